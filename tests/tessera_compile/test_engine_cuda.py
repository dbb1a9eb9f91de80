"""The engine on CUDA lanes: slices of one GPU stand for several."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn

from tessera_compile import Engine
from tessera_compile.compiler import executors
from tests.models import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
TWO = "cuda:0/48sm,cuda:0/64sm"
THREE = "cuda:0/32sm,cuda:0/32sm,cuda:0/48sm"
WAIT = 120.0
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        left, right = torch.relu(self.a(x)), torch.sigmoid(self.b(x))
        return self.d(torch.tanh(left @ right.T) @ self.c(right)), left.sum(0)


@torch.library.custom_op("tessera_engine_tests::nap", mutates_args=())
def nap(x: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(3_000_000)
    return x.clone()


@nap.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Slow(Branches):
    """Takes the GPU longer than the host, so that requests are always waiting."""

    def forward(self, x):
        left, right = nap(torch.relu(self.a(x))), nap(torch.sigmoid(self.b(x)))
        return self.d(torch.tanh(left @ right.T) @ self.c(right)), left.sum(0)


class Stateful(Branches):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(64))

    def forward(self, x):
        self.count.add_(x.sum(0))
        return super().forward(x)[0] + self.count


def branches(kind=Branches):
    torch.manual_seed(0)
    return kind().cuda().eval()


def compiled(model, cluster=TWO, **options):
    torch._dynamo.reset()
    given = {"cluster": cluster, "profile": "model", "planner": "alternate", "codegen": "eager", **options}
    return torch.compile(model, backend="tessera", options=given, dynamic=False)


def inputs(count, rows=8):
    generator = torch.Generator("cuda").manual_seed(1)
    return [torch.randn(rows, 64, device="cuda", generator=generator) for _ in range(count)]


def same(got, want):
    for g, w in zip(got if isinstance(got, tuple) else [got], want if isinstance(want, tuple) else [want], strict=True):
        torch.testing.assert_close(g, w, **CLOSE)


@pytest.mark.parametrize("scheduling", ["dynamic", "static"])
@pytest.mark.parametrize("cuda_graphs", [False, True, "segments"])
@pytest.mark.parametrize(("planner", "cluster"), [("alternate", TWO), ("random:2", THREE)])
def test_results_with_many_in_flight_are_those_of_eager(scheduling, cuda_graphs, planner, cluster):
    model, xs = branches(Slow), inputs(80)
    with torch.no_grad():
        wanted = [model(x) for x in xs]
    run = compiled(model, cluster, planner=planner, cuda_graphs=cuda_graphs)
    with Engine(run, inflight=8, scheduling=scheduling) as engine:
        for got, want in zip(engine.map(xs), wanted, strict=True):
            same(got, want)
        stats = engine.stats()
        periods, reasons = stats.periods, stats.uncaptured
    assert (stats.done, stats.failed) == (80, 0)
    assert all(0 < share <= 1 for share in stats.busy.values())
    assert stats.moved_bytes > 0
    assert executors(run)[0].runs == 0
    if cuda_graphs and scheduling == "static":
        assert periods > 0 or "segment by segment" in reasons.get("periods", ""), reasons
    elif not cuda_graphs:
        assert reasons["periods"] == "cuda_graphs is off"


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("scheduling", ["dynamic", "static"])
def test_a_llama(codegen, scheduling):
    example = MODELS["llama"]()
    model = example.model.cuda()
    given = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in example.inputs.items()}
    batches = [{**given, "input_ids": (given["input_ids"] + i) % 50} for i in range(40)]
    with torch.no_grad():
        wanted = [model(**b).logits for b in batches]
    run = compiled(model, planner="layers", codegen=codegen, cuda_graphs=True)
    with Engine(run, inflight=6, scheduling=scheduling) as engine:
        for got, want in zip(engine.map(batches), wanted, strict=True):
            torch.testing.assert_close(got.logits, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("scheduling", ["dynamic", "static"])
def test_state_is_changed_in_the_order_of_submit(scheduling, cuda_graphs):
    model, theirs = branches(Stateful), branches(Stateful)
    xs = inputs(40)
    with torch.no_grad():
        wanted = [theirs(x) for x in xs]
    with Engine(compiled(model, cuda_graphs=cuda_graphs), inflight=6, scheduling=scheduling) as engine:
        futures = [engine.submit(x) for x in xs]
        for future, want in zip(futures, wanted, strict=True):
            same(future.result(WAIT), want)
    torch.testing.assert_close(model.count, theirs.count, **CLOSE)


def test_caches_of_conversations_are_their_own():
    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.key, self.out = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x, cache, at):
            cache.index_copy_(0, at, self.key(x))
            return self.out(torch.softmax(x @ cache.t(), -1) @ cache)

    torch.manual_seed(0)
    model = Step().cuda()
    caches = [torch.zeros(16, 64, device="cuda") for _ in range(5)]
    theirs = [torch.zeros(16, 64, device="cuda") for _ in range(5)]
    places = [torch.tensor([i], device="cuda") for i in range(16)]
    xs = inputs(80, rows=1)
    with Engine(compiled(model, cuda_graphs=True), inflight=5) as engine:
        futures = [engine.submit(x, caches[i % 5], places[i // 5]) for i, x in enumerate(xs)]
        with torch.no_grad():
            wanted = [model(x, theirs[i % 5], places[i // 5]) for i, x in enumerate(xs)]
        for future, want in zip(futures, wanted, strict=True):
            same(future.result(WAIT), want)
    for ours, other in zip(caches, theirs, strict=True):
        torch.testing.assert_close(ours, other, **CLOSE)


def test_inputs_made_on_a_stream_of_the_callers_are_waited_for_and_results_are_safe_there():
    model = branches()
    run = compiled(model, cuda_graphs=True)
    mine = torch.cuda.Stream()
    with Engine(run, inflight=4) as engine, torch.cuda.stream(mine), torch.no_grad():
        for i in range(30):
            torch.cuda._sleep(2_000_000)
            x = torch.full((8, 64), i / 30.0, device="cuda")
            future = engine.submit(x)
            del x
            junk = [torch.full((8, 64), float("nan"), device="cuda") for _ in range(8)]
            got = future.result(WAIT)
            torch.cuda._sleep(1_000_000)
            kept = [g.clone() for g in got]
            del got, junk
            same(tuple(kept), model(torch.full((8, 64), i / 30.0, device="cuda")))
        assert torch.cuda.current_stream() == mine


def test_an_error_in_the_middle_fails_its_own_request(monkeypatch):
    model, xs = branches(), inputs(60)
    with torch.no_grad():
        wanted = [model(x) for x in xs]
    with Engine(compiled(model, cuda_graphs="segments"), inflight=6) as engine:
        same(engine.submit(xs[0]).result(WAIT), wanted[0])
        executor = next(iter(next(iter(engine._ways.values()))._issuers.values())).executor
        perform, seen = executor.perform, []

        def fails(lane, at, x, request):
            if type(x).__name__ == "Run" and lane == 1:
                seen.append(request)
                if len(seen) % 7 == 3:
                    raise ValueError("a kernel of ours fails")
            return perform(lane, at, x, request)

        monkeypatch.setattr(executor, "perform", fails)
        futures = [engine.submit(x) for x in xs]
        errors = 0
        for future, want in zip(futures, wanted, strict=True):
            error = future.exception(WAIT)
            if error is None:
                same(future.result(), want)
            else:
                assert "a kernel of ours fails" in str(error)
                errors += 1
        assert 0 < errors < 60
        monkeypatch.setattr(executor, "perform", perform)
        seen.clear()
        for got, want in zip(engine.map(xs), wanted, strict=True):
            same(got, want)


def test_cancelled_and_late_requests_leave_the_others_alone():
    model, xs = branches(), inputs(120)
    with torch.no_grad():
        wanted = [model(x) for x in xs]
    with Engine(compiled(model), inflight=3) as engine:
        engine.submit(xs[0]).result(WAIT)
        futures = [engine.request((x,), timeout=1e-4 if i % 10 == 4 else None) for i, x in enumerate(xs)]
        cancelled = {i for i in range(5, 120, 10) if futures[i].cancel()}
        for i, (future, want) in enumerate(zip(futures, wanted, strict=True)):
            if i in cancelled:
                assert future.cancelled()
            elif i % 10 == 4 and isinstance(future.exception(WAIT), TimeoutError):
                continue
            else:
                same(future.result(WAIT), want)
        same(engine.submit(xs[1]).result(WAIT), wanted[1])


@pytest.mark.parametrize("scheduling", ["dynamic", "static"])
def test_requests_of_other_shapes_run_beside_each_other(scheduling):
    model = branches()
    xs = [x for group in zip(inputs(20, 4), inputs(20, 8), inputs(20, 16), strict=True) for x in group]
    with torch.no_grad():
        wanted = [model(x) for x in xs]
    with Engine(compiled(model, cuda_graphs=True), inflight=6, scheduling=scheduling) as engine:
        for got, want in zip(engine.map(xs), wanted, strict=True):
            same(got, want)


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_thousands_of_requests_with_plans_and_orders_switched_take_no_more_memory(cuda_graphs):
    model, xs = branches(), inputs(64)
    with torch.no_grad():
        wanted = [model(x)[0] for x in xs]
    run = compiled(model, planner="milp", cuda_graphs=cuda_graphs)
    used, wrong = [], []
    with Engine(run, inflight=6, queue=32) as engine:
        stop = threading.Event()

        def switch():
            turn = 0
            while not stop.wait(0.05):
                turn += 1
                engine.follow(("throughput", "latency")[turn % 2])
                if engine._dispatcher is not None:
                    engine._dispatcher.order = ("due", "static", "age")[turn % 3]

        def client(c):
            for i in range(250):
                at = (c * 17 + i) % 64
                if not torch.allclose(engine.submit(xs[at]).result(WAIT)[0], wanted[at], **CLOSE):
                    wrong.append((c, i))

        switching = threading.Thread(target=switch)
        switching.start()
        for _ in range(4):
            clients = [threading.Thread(target=client, args=(c,)) for c in range(4)]
            for thread in clients:
                thread.start()
            for thread in clients:
                thread.join()
            gc.collect()
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
        stop.set()
        switching.join()
        stats = engine.stats()
    assert not wrong
    assert (stats.done, stats.failed) == (4000, 0)
    assert used[-1] <= used[1] + (4 << 20), used


def test_paced_lanes_are_emulated_under_the_engine():
    model, xs = branches(), inputs(40)
    with torch.no_grad():
        wanted = [model(x) for x in xs]
    options = {"cluster": "a100-80gb,l40s@200Gbps", "pace": 400.0, "emulate_on": TWO, "cuda_graphs": True}
    for scheduling in ("dynamic", "static"):
        with Engine(compiled(model, **options), inflight=6, scheduling=scheduling) as engine:
            for got, want in zip(engine.map(xs), wanted, strict=True):
                same(got, want)
            emulation = engine.stats().emulation
        assert emulation.requests == 40
        assert emulation.mean_us > 0
        assert emulation.steps > 0
