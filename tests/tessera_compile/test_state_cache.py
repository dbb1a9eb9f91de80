"""A decoder with a StateCache: eager's results, and layers that live on their home lane alone."""

from __future__ import annotations

import copy
import dataclasses
import threading

import pytest
import torch

import tessera_compile
from tessera_compile import Engine, StateCache
from tessera_compile.compiler import executors
from tessera_compile.passes.errors import OptionsError
from tessera_compile.passes.torch_compat import storage_key
from tessera_compile.runtime.state_homes import HOMES, mark
from tests.models import llama

OPTIONS = {"codegen": "eager", "profile": "model"}
STEPS = 8
WAIT = 60.0
PLANS = [
    {"planner": "random:1"},
    {"planner": "random:2", "cluster": "3xcpu"},
    {"planner": "random:5", "cluster": "3xcpu"},
    {"planner": "alternate", "codegen": "inductor"},
]


def decode(call, cache, first=5, steps=STEPS):
    """Greedy decoding from one token; the logits of every step."""
    ids, logits = torch.tensor([[first]]), []
    with torch.no_grad():
        for step in range(steps):
            out = call(input_ids=ids, past_key_values=cache, position_ids=torch.tensor([[step]]), use_cache=True)
            logits.append(out.logits)
            ids = out.logits[:, -1:].argmax(-1)
    return logits


def eagers(model, first=5):
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=16)
    return decode(model, cache, first), cache


def compiled(model, **options):
    return torch.compile(model, backend="tessera", options={**OPTIONS, **options})


def close(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


def same_content(cache, other):
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        close([mine.keys, mine.values.cpu()], [theirs.keys, theirs.values])


def tensors(cache):
    return [x for layer in cache.layers for x in (layer.keys, layer.values, layer.cumulative_length)]


def copied_state(call):
    """Bytes of overwritten inputs that were copied to lanes, and those that were brought home."""
    found = executors(call)
    copied = sum(r.copied for e in found for lane in e.replicas.values() for v, r in lane.items() if v in e.graph.mutated)
    return copied, sum(e.returned for e in found)


@pytest.mark.parametrize("options", PLANS, ids=lambda o: " ".join(map(str, o.values())))
def test_steps_equal_eager_and_nothing_is_copied_or_returned(options):
    model = llama().model
    want, want_cache = eagers(model)
    call = compiled(model, **options)
    cache = StateCache(model.config, 16)
    where = [x.data_ptr() for x in tensors(cache)]
    close(decode(call, cache), want)
    same_content(cache, want_cache)  # The caller reads what the lanes keep.
    assert [x.data_ptr() for x in tensors(cache)] == where
    assert copied_state(call) == (0, 0)
    (executor,) = executors(call)
    assert (executor.runs, executor.moved) == (STEPS, 0)
    graph = tessera_compile.report(call).graphs[0]
    assert len(graph.kernels.kept) == 3 * len(cache.layers)
    writers = {graph.plan.placement[k.name] for k in graph.kernels.kernels if k.writes}
    assert {home for layer in cache.homes() for home in layer.values()} == writers
    assert len(writers) > 1  # Not all of it at home.


def test_a_static_cache_is_copied_and_returned():
    """What the test above counts would be seen."""
    from transformers import StaticCache

    model = llama().model
    call = compiled(model, planner="random:1")
    decode(call, StaticCache(config=model.config, max_cache_len=16), steps=2)
    copied, returned = copied_state(call)
    assert copied > 0
    assert returned > 0


def test_other_conversations_run_the_same_code():
    model = llama().model
    call = compiled(model, planner="random:1")
    caches = [StateCache(model.config, 16) for _ in range(3)]
    for first, cache in zip((5, 9, 11), caches, strict=True):
        close(decode(call, cache, first), eagers(model, first)[0])
    twin = copy.deepcopy(caches[0])
    twin.reset()
    close(decode(call, twin), eagers(model)[0])
    assert [e.runs for e in executors(call)] == [4 * STEPS]


def test_batches_in_half_precision_and_rows_reordered():
    model = llama().model.to(torch.bfloat16)
    cache = StateCache(model.config, 8, 2, dtype=torch.bfloat16)
    keys = cache.layers[0].keys
    assert (keys.dtype, keys.shape[0]) == (torch.bfloat16, 2)
    keys[0], keys[1] = 1, 2
    cache.reorder_cache(torch.tensor([1, 1]))
    assert cache.layers[0].keys is keys
    assert keys.eq(2).all()


def test_generate_moves_what_two_graphs_keep_in_different_places_once():
    model = llama().model
    ids = torch.tensor([[5, 9, 3]])
    want = model.generate(ids, max_new_tokens=STEPS, do_sample=False)
    eager, cache = model.forward, StateCache(model.config, 16)
    call = model.forward = torch.compile(eager, backend="tessera", options={**OPTIONS, "cluster": "3xcpu", "planner": "random:2"})
    try:
        got = model.generate(ids, max_new_tokens=STEPS, do_sample=False, past_key_values=cache)
    finally:
        model.forward = eager
    assert got.equal(want)
    prefill, step = executors(call)
    assert (prefill.runs, step.runs) == (1, STEPS - 1)
    homes = [{v: g.plan.placement[g.kernels.keeper(v)] for v in g.kernels.kept} for g in tessera_compile.report(call).graphs]
    # In both graphs the cache's tensors are the inputs that are kept, in the same order.
    moves = [a != b for a, b in zip(homes[0].values(), homes[1].values(), strict=True)]
    kept = tessera_compile.report(call).graphs[1].kernels
    assert any(moves)
    assert prefill.moved == 0
    assert step.moved == sum(kept.values[v].bytes for v, moved in zip(kept.kept, moves, strict=True) if moved)
    assert copied_state(call) == (0, 0)


@pytest.mark.parametrize(("planner", "cluster"), [("random:3", "2xcpu"), ("random:2", "3xcpu")])
def test_conversations_of_an_engine(planner, cluster):
    model = llama().model
    want = {first: eagers(model, first) for first in (5, 9, 11, 17)}
    caches = {first: StateCache(model.config, 16) for first in want}
    got: dict[int, list[torch.Tensor]] = {}
    with Engine(compiled(model, planner=planner, cluster=cluster), inflight=3) as engine:

        def client(first: int) -> None:
            got[first] = decode(lambda **kw: engine.submit(**kw).result(WAIT), caches[first], first)

        clients = [threading.Thread(target=client, args=(first,)) for first in want]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(WAIT)
        (ways,) = engine._ways.values()
        storages = {storage_key(x) for cache in caches.values() for x in tensors(cache)}
        places = [place for lane in engine._dispatcher.residents for place in lane._replicas]
        assert places  # Weights have replicas,
        assert not [place for place in places if place[0] in storages]  # and the caches none.
        assert [(way.executor.runs, way.executor.returned) for way in ways.all] == [(len(want) * STEPS, 0)]
    for first, (logits, cache) in want.items():
        close(got[first], logits)
        same_content(caches[first], cache)


def step(x, keys):
    """Overwrites the state, and computes something that is not of it."""
    keys.mul_(0.5).add_(x @ x)
    return torch.relu(x @ x.T) @ x


def place(ways, latency, throughput):
    """Gives the two plans the state's writer on these devices, and everything else on cpu#0."""
    ways._made.clear()
    ways._shares = []

    def way(name, device):
        where = {k.name: device if k.writes else "cpu#0" for k in ways._graph.kernels.kernels}
        return ways._way(name, dataclasses.replace(ways.latency.plan, placement=where))

    ways.latency, ways.throughput = way("latency", latency), way("throughput", throughput)


@pytest.mark.parametrize("other", ["cpu#1", "cpu#0"])
def test_plans_with_equal_homes_switch_freely_and_from_others_conversations_drain(other):
    x = torch.randn(4, 4)
    first, state, new, twin = (torch.zeros(4, 4) for _ in range(4))
    for s in (first, state, new):
        mark(s)
    with Engine(compiled(step, cluster="2xcpu"), inflight=2) as engine:
        engine.submit(x, first).result(WAIT)
        (ways,) = engine._ways.values()
        place(ways, "cpu#1", other)
        assert ways.same_homes() == (other == "cpu#1")
        for plan in ("latency", "throughput", "latency", "throughput"):
            engine.follow(plan)
            torch.testing.assert_close(engine.submit(x, state).result(WAIT), step(x, twin))
            assert HOMES.of(state) == "cpu#1"
        torch.testing.assert_close(state, twin)
        runs = ways.throughput.executor.runs
        engine.submit(x, new).result(WAIT)  # Another conversation follows the other plan from its beginning.
        assert ways.throughput.executor.runs == runs + 1
        assert HOMES.of(new) == other
        assert [way.executor.moved for way in ways.all] == [0] * len(ways.all)
        assert (ways.latency is ways.throughput) == (other == "cpu#1")
        assert runs == (4 if other == "cpu#1" else 0)


def test_what_cannot_be_kept_stays_with_the_caller():
    def returns_it(x, s):
        s.add_(x @ x)
        return s * 1, s

    x, s = torch.eye(3), torch.zeros(3, 3)
    mark(s)
    call = compiled(returns_it, planner="alternate")
    with torch.no_grad():
        call(x, s)
    torch.testing.assert_close(s, torch.eye(3))
    shared = torch.zeros(2, 3)
    mark(shared)
    with torch.no_grad(), pytest.raises(Exception, match=r"FallbackError: the state of a StateCache stays .* share memory"):
        compiled(lambda x, a, b: (a.add_(x[:2]), b + x[0])[1], strict=True)(x, shared, shared[0])
    assert HOMES.of(shared) is None


def test_bad_arguments():
    config = llama().model.config
    for wrong in ({"max_cache_len": 0}, {"max_cache_len": 8, "batch_size": 0}, {"max_cache_len": True}):
        with pytest.raises(OptionsError, match="whole number"):
            StateCache(config, **wrong)
