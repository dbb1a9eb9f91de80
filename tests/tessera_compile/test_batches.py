"""Joined requests: each gets what it would get alone, and one's misfortune is not the others'."""

from __future__ import annotations

import contextlib
import threading
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tessera_compile import Batch, Engine
from tessera_compile.batches import UnfitError
from tessera_compile.passes.errors import EngineError, OptionsError, TesseraWarning
from tessera_compile.passes.mix_plan import MixPlan, SharedPlan

OPTIONS = {"cluster": "2xcpu", "codegen": "eager", "profile": "model", "planner": "alternate"}
WAIT = 60.0


class Gated:
    """Calls ``function``, but only while the gate is open; notes the rows of each call."""

    def __init__(self, function):
        self.function = function
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.rows = []

    def __call__(self, x, *args, **kwargs):
        self.entered.release()
        assert self.gate.wait(WAIT)
        self.rows.append(x.shape[0])
        return self.function(x, *args, **kwargs)


@contextlib.contextmanager
def serving(function, batch, first=(), **options):
    """An engine with one worker that knows the kind of call; while the gate is shut, requests pile up behind one."""
    call = Gated(function)
    with Engine(call, inflight=1, batch=batch, **options) as engine:
        if first:
            engine.submit(*first).result(WAIT)
            call.rows.clear()
            call.entered.acquire(timeout=WAIT)
        try:
            yield engine, call
        finally:
            call.gate.set()


def blocked(engine, call, *args):
    """Shuts the gate and lets one request run into it."""
    call.gate.clear()
    future = engine.submit(*args)
    assert call.entered.acquire(timeout=WAIT)
    return future


def results(call, first, futures):
    """Opens the gate, and waits for all."""
    call.gate.set()
    first.result(WAIT)
    return [future.result(WAIT) for future in futures]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def test_joined_results_are_those_of_one_by_one():
    plain = model()
    compiled = torch.compile(plain, backend="tessera", options=OPTIONS)
    xs = [torch.randn(2, 8) for _ in range(12)]
    with torch.no_grad():
        want = [plain(x) for x in xs]
    with serving(compiled, Batch((4, 8), arguments=(0,)), first=(xs[0],)) as (engine, call):
        futures = [blocked(engine, call, xs[0]), *map(engine.submit, xs[1:])]
        call.gate.set()
        for future, one in zip(futures, want, strict=True):
            got = future.result(WAIT)
            torch.testing.assert_close(got, one)
            assert got.untyped_storage().nbytes() == one.nbytes  # Its own, not a part of all.
        stats = engine.stats()
    # 1 ran into the gate, 11 waited: the largest size that is full, and again, and the rest alone.
    assert call.rows == [2, 16, 2, 2, 2]
    assert (stats.done, stats.failed, stats.joined, stats.in_flight) == (13, 0, 8, 0)
    assert "tessera_joined_requests_total 8" in stats.to_prometheus()


def test_what_differs_is_not_joined():
    weight, other = torch.eye(8), 2 * torch.eye(8)

    def f(x, w, scale=1.0):
        return {"y": x @ w * scale, "w": w.sum(), "n": 3}

    batch = Batch(2, arguments=(0,), outputs=("y",))
    with serving(f, batch, first=(torch.zeros(1, 8), weight)) as (engine, call):
        first = blocked(engine, call, torch.ones(1, 8), weight)
        calls = [
            ((torch.full((1, 8), 2.0), weight), {}),
            ((torch.full((1, 8), 3.0), other), {}),
            ((torch.full((1, 8), 4.0), weight), {"scale": 2.0}),
            ((torch.full((3, 8), 5.0), weight), {}),
            ((torch.full((1, 8), 6.0), weight), {}),
        ]
        futures = [engine.submit(*args, **kwargs) for args, kwargs in calls]
        call.gate.set()
        first.result(WAIT)
        results = [future.result(WAIT) for future in futures]
    assert call.rows == [1, 2, 1, 1, 3]  # The first and the last of the five were joined.
    for (args, kwargs), got in zip(calls, results, strict=True):
        want = f(*args, **kwargs)
        torch.testing.assert_close(got, want)
    assert results[0]["w"] is not results[4]["w"]


def test_one_that_fails_fails_alone():
    def picky(x):
        if (x < 0).any():
            raise ValueError("negative")
        return x * 2

    with serving(picky, Batch(3, arguments=(0,)), first=(torch.zeros(1, 2),)) as (engine, call):
        first = blocked(engine, call, torch.zeros(1, 2))
        futures = [engine.submit(torch.full((1, 2), float(v))) for v in (1, -1, 3)]
        call.gate.set()
        first.result(WAIT)
        assert futures[0].result(WAIT).eq(2).all()
        with pytest.raises(ValueError, match="negative"):
            futures[1].result(WAIT)
        assert futures[2].result(WAIT).eq(6).all()
        assert engine.submit(torch.ones(1, 2)).result(WAIT).eq(2).all()
    assert call.rows == [1, 3, 1, 1, 1, 1]


def test_one_that_is_cancelled_leaves_the_others_alone():
    with serving(lambda x: x + 1, Batch((2, 3), arguments=(0,)), first=(torch.zeros(1, 2),)) as (engine, call):
        first = blocked(engine, call, torch.zeros(1, 2))
        futures = [engine.request((torch.full((1, 2), float(v)),)) for v in range(3)]
        assert futures[1].cancel()
        call.gate.set()
        first.result(WAIT)
        assert [futures[i].result(WAIT)[0, 0].item() for i in (0, 2)] == [1.0, 3.0]
    assert call.rows == [1, 2]
    assert engine.stats().queue_depth == 0


def test_a_late_member_of_a_running_batch():
    release = threading.Event()
    running = threading.Event()

    def f(x):
        if x.shape[0] > 1:
            running.set()
            assert release.wait(WAIT)
        return x + 1

    with serving(f, Batch(3, arguments=(0,)), first=(torch.zeros(1, 2),)) as (engine, call):
        first = blocked(engine, call, torch.zeros(1, 2))
        late = engine.request((torch.zeros(1, 2),), timeout=1.5)
        others = [engine.request((torch.full((1, 2), float(v)),)) for v in (1, 2)]
        call.gate.set()
        first.result(WAIT)
        assert running.wait(WAIT)
        with pytest.raises(TimeoutError):
            late.result(WAIT)
        release.set()
        assert [future.result(WAIT)[0, 0].item() for future in others] == [2.0, 3.0]
        stats = engine.stats()
    assert (stats.failed, stats.done) == (1, 4)


def test_state_excludes_joining():
    def step(x, state):
        state.add_(x)
        return x * 2

    state = torch.zeros(1, 2)
    with serving(step, Batch(2, arguments=(0, 1)), first=(torch.ones(1, 2), state)) as (engine, call):
        futures = [blocked(engine, call, torch.ones(1, 2), state)]
        futures += [engine.submit(torch.ones(1, 2), torch.zeros(1, 2)) for _ in range(4)]
        call.gate.set()
        for future in futures:
            future.result(WAIT)
    assert call.rows == [1] * 5
    assert state.eq(2).all()


class Cache:
    def __init__(self):
        self.rows = torch.zeros(1, 2)


def test_objects_that_hold_tensors_exclude_joining():
    with serving(lambda x, c: x + c.rows, Batch(2, arguments=(0,)), first=(torch.ones(1, 2), Cache())) as (engine, call):
        cache = Cache()
        futures = [blocked(engine, call, torch.ones(1, 2), cache), *(engine.submit(torch.ones(1, 2), cache) for _ in range(3))]
        call.gate.set()
        for future in futures:
            future.result(WAIT)
    assert call.rows == [1] * 4


def writing(x, write):
    """Known from a first call that writes nothing."""
    if write:
        x.add_(1)
    return x * 2


@pytest.mark.parametrize("compile", [False, True])
def test_a_joined_argument_that_is_overwritten_after_all(compile):
    function = torch.compile(writing, backend="tessera", options=OPTIONS) if compile else writing
    with serving(function, Batch(2, arguments=(0,)), first=(torch.zeros(1, 2), False)) as (engine, call):
        first = blocked(engine, call, torch.zeros(1, 2), False)
        xs = [torch.full((1, 2), float(v)) for v in range(4)]
        futures = [engine.submit(x, True) for x in xs]
        with pytest.warns(TesseraWarning, match="not batched any more: the call overwrites an argument"):
            got = results(call, first, futures)
    assert [x[0, 0].item() for x in xs] == [1.0, 2.0, 3.0, 4.0]
    assert [r[0, 0].item() for r in got] == [2.0, 4.0, 6.0, 8.0]
    assert call.rows == [1, 2, 1, 1, 1, 1]


def test_a_model_that_overwrites_its_own_state_after_all():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x, count):
            if count:
                self.count.add_(1)
            return (x @ x.T @ x) + 1

    counting = Counting().eval()
    compiled = torch.compile(counting, backend="tessera", options=OPTIONS)
    with serving(compiled, Batch(2, arguments=(0,)), first=(torch.eye(2), False)) as (engine, call):
        first = blocked(engine, call, torch.eye(2), False)
        futures = [engine.submit(torch.eye(2), True) for _ in range(2)]
        with pytest.warns(TesseraWarning, match="overwritten state"):
            results(call, first, [engine.submit(torch.eye(2), False)])
        for future in futures:
            with pytest.raises(EngineError, match="overwritten state that its members share"):
                future.result(WAIT)
        engine.submit(torch.eye(2), True).result(WAIT)
        assert counting.count[0].item() == 2.0


@pytest.mark.parametrize("result", [lambda x: x.sum(), lambda x: x.T, lambda x: (x, Cache())], ids=["scalar", "rows", "object"])
def test_results_that_do_not_divide_are_had_one_by_one(result):
    with serving(result, Batch(2, arguments=(0,)), first=(torch.ones(1, 3),)) as (engine, call):
        first = blocked(engine, call, torch.ones(1, 3))
        futures = [engine.submit(torch.full((1, 3), float(v))) for v in range(4)]
        with pytest.warns(TesseraWarning, match="not batched any more"):
            got = results(call, first, futures)
    assert call.rows == [1, 2, 1, 1, 1, 1]
    for v, one in enumerate(got):
        want = result(torch.full((1, 3), float(v)))
        if isinstance(one, torch.Tensor):
            assert one.equal(want)
        else:
            assert one[0].equal(want[0])


TREES = st.recursive(
    st.tuples(st.integers(1, 3), st.sampled_from([torch.float32, torch.int64, torch.bool])),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(TREES, st.integers(2, 4), st.integers(1, 3), st.integers(0, 1 << 30))
def test_splitting_what_was_joined_gives_it_back(tree, count, rows, seed):
    generator = torch.Generator().manual_seed(seed)

    def make(node):
        if isinstance(node, list):
            return [make(x) for x in node]
        if isinstance(node, dict):
            return {name: make(x) for name, x in node.items()}
        width, dtype = node
        return torch.randint(0, 2, (rows, width), generator=generator).to(dtype)

    batch = Batch(count, arguments=(0, "z"))
    calls = [((make(tree), 7), {"z": make(tree)}) for _ in range(count)]
    assert len({batch.key(*call) for call in calls}) == 1
    (joined, seven), kwargs = batch.join(calls)
    assert seven == 7
    parts = batch.split((joined, kwargs["z"], "text", None), count, rows)
    for (first, z, text, nothing), (args, kw) in zip(parts, calls, strict=True):
        torch.testing.assert_close([first, z], [args[0], kw["z"]], rtol=0, atol=0)
        assert (text, nothing) == ("text", None)
    with pytest.raises(UnfitError, match="rows"):
        batch.split(joined, count + 1, rows)


def test_the_sizes_of_a_plan():
    def plan(*sizes):
        shared = tuple(SharedPlan(1 / len(sizes), {}, 1.0, s) for s in sizes)
        return MixPlan(shared, (1,) * len(sizes), shared[0], 1.0, 1.0, 1.0, "", 0.0, {}, {})

    assert Batch.of(plan((1, 8), (1, 4)), (0,), phase=1) == Batch((4, 8), (0,))
    assert Batch.of(plan((1, 8)), (0,), phase=0) is None
    assert Batch.of(plan(()), (0,)) is None
    assert [Batch((4, 8), (0,)).together(n) for n in (1, 3, 4, 7, 8, 20)] == [1, 1, 4, 4, 8, 8]


def test_bad_arguments():
    for sizes in (0, 1, True, (), (4, 1)):
        with pytest.raises(OptionsError, match="whole numbers from 2"):
            Batch(sizes, (0,))
    for arguments, outputs in (((), "all"), ("x", "all"), ((0,), ()), ("all", "all"), ((0,), "logits")):
        with pytest.raises(OptionsError):
            Batch(2, arguments, outputs)
    batch = Batch(2, (0, 1))
    assert batch.key((torch.zeros(2), torch.zeros(3)), {}) is None  # Rows differ.
    assert batch.key((torch.tensor(1.0),), {}) is None
    assert batch.key((1, 2), {}) is None


def test_without_warnings_nothing_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with serving(lambda x: x + 1, Batch(2, arguments=(0,)), first=(torch.zeros(1, 2),)) as (engine, call):
            futures = [blocked(engine, call, torch.zeros(1, 2)), *(engine.submit(torch.zeros(1, 2)) for _ in range(4))]
            call.gate.set()
            for future in futures:
                future.result(WAIT)
    assert call.rows == [1, 2, 2]
