"""The engine: right results whatever runs beside them, and faults that stay where they are."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import tessera_compile
from tessera_compile import Engine, mark_token
from tessera_compile.compiler import executors
from tessera_compile.passes.errors import EngineError, EngineFullError, OptionsError, TesseraWarning
from tessera_compile.passes.torch_compat import storage_key
from tessera_compile.ways import Ways

OPTIONS = {"cluster": "2xcpu", "codegen": "eager", "profile": "model"}
PACED = {"cluster": "a100-80gb,l40s", "codegen": "null", "profile": "model"}
WAIT = 60.0  # seconds until a test gives up


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)).eval()


def compiled(model, **options):
    return torch.compile(model, backend="tessera", options={**OPTIONS, **options})


def expected(model, xs):
    with torch.no_grad():
        return [model(x) for x in xs]


@pytest.mark.parametrize("policy", ["auto", "latency", "throughput"])
@pytest.mark.parametrize("scheduling", ["dynamic", "static"])
@pytest.mark.parametrize("planner", ["milp", "alternate"])
def test_results_are_those_of_plain_calls_and_in_order(policy, scheduling, planner):
    model = small()
    xs = [torch.randn(3, 8) for _ in range(30)]
    with Engine(compiled(model, planner=planner), policy=policy, scheduling=scheduling) as engine:
        for got, want in zip(engine.map(xs), expected(model, xs), strict=True):
            torch.testing.assert_close(got, want)
        stats = engine.stats()
    assert (stats.done, stats.failed, stats.queue_depth, stats.in_flight) == (30, 0, 0, 0)
    assert set(stats.busy) == {"cpu#0", "cpu#1"}
    if planner == "alternate":
        assert stats.moved_bytes > 0


@pytest.mark.parametrize(("order", "pipelined"), [("fifo", True), ("age", True), ("due", False)])
def test_the_orders_that_serve_for_comparison_compute_the_same(order, pipelined):
    model = small()
    xs = [torch.randn(3, 8) for _ in range(20)]
    with Engine(compiled(model, planner="random:3"), order=order, pipelined=pipelined) as engine:
        for got, want in zip(engine.map(xs), expected(model, xs), strict=True):
            torch.testing.assert_close(got, want)


def test_graphs_run_on_the_engines_lanes_and_plain_calls_do_not():
    model = compiled(small(), planner="alternate")
    x = torch.randn(2, 8)
    with torch.no_grad():
        plain = model(x)
    before = executors(model)[0].runs
    with Engine(model) as engine:
        torch.testing.assert_close(engine.submit(x).result(WAIT), plain)
        assert executors(model)[0].runs == before
        assert engine.stats().moved_bytes > 0


class Broken(nn.Module):
    """Two graphs with Python between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen = []

    def forward(self, x):
        y = torch.relu(self.first(x)) @ self.first.weight
        torch._dynamo.graph_break()
        self.note(y)
        return self.second(y) + x

    @torch.compiler.disable
    def note(self, y):
        self.seen.append(threading.current_thread().name)


def test_python_between_graphs_runs_on_workers():
    model = Broken().eval()
    xs = [torch.randn(2, 8) for _ in range(12)]
    want = expected(model, xs)
    model.seen.clear()
    with Engine(compiled(model, planner="alternate"), inflight=3) as engine:
        for got, one in zip(engine.map(xs), want, strict=True):
            torch.testing.assert_close(got, one)
    assert {name.rpartition("-")[0] for name in model.seen} == {"tessera-request"}


def test_another_shape_recompiles_and_both_go_on():
    model = small()
    xs = [torch.randn(1 + i % 4, 8) for i in range(24)]
    with Engine(compiled(model, planner="alternate")) as engine:
        futures = [engine.submit(x) for x in xs]
        for future, want in zip(futures, expected(model, xs), strict=True):
            torch.testing.assert_close(future.result(WAIT), want)


def test_keywords_inference_mode_and_dicts():
    def f(a, *, b):
        return (a @ b).relu() @ b

    a, b = torch.randn(4, 4), torch.randn(4, 4)
    with Engine(compiled(f, planner="alternate")) as engine:
        with torch.inference_mode():
            inside = engine.submit(a, b=b)
        torch.testing.assert_close(inside.result(WAIT), f(a, b=b))
        (mapped,) = engine.map([{"a": a, "b": b}])
        torch.testing.assert_close(mapped, f(a, b=b))


# State


def test_requests_of_one_conversation_follow_each_other_and_conversations_overlap():
    def step(x, state):
        state.mul_(0.5).add_(x @ x)
        return state.sum() + (state @ x)[0, 0]

    call = compiled(step, planner="alternate")
    states = [torch.zeros(4, 4) for _ in range(3)]
    with Engine(call, inflight=4) as engine:
        futures = [[engine.submit(torch.full((4, 4), 1.0 + i + c), states[c]) for c in range(3)] for i in range(15)]
        results = [[f.result(WAIT) for f in row] for row in futures]
    for c in range(3):
        state = torch.zeros(4, 4)
        for i in range(15):
            torch.testing.assert_close(results[i][c], step(torch.full((4, 4), 1.0 + i + c), state))
        torch.testing.assert_close(states[c], state)


class Counting(nn.Module):
    """A buffer that every call changes: the model's own state, which no argument shows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.count.add_(x.sum(0))
        return self.linear(self.count * 2) + self.count


def test_a_model_with_state_of_its_own_serves_in_order():
    torch.manual_seed(0)
    model = Counting().eval()
    xs = [torch.full((2, 4), float(i)) for i in range(20)]
    want = expected(model, xs)
    model.count.zero_()
    with Engine(compiled(model, planner="alternate"), inflight=4) as engine:
        for got, one in zip([engine.submit(x) for x in xs], want, strict=True):
            torch.testing.assert_close(got.result(WAIT), one)


def test_a_decoder_with_a_static_cache():
    from tests.models import llama

    model = llama().model
    config = model.config

    def decode(call, base, steps=4):
        from transformers import StaticCache

        cache, ids, found = StaticCache(config=config, max_cache_len=16), torch.tensor([[base]]), []
        for step in range(steps):
            out = call(input_ids=ids, past_key_values=cache, position_ids=torch.tensor([[step]]), use_cache=True)
            found.append(out.logits)
            ids = out.logits[:, -1:].argmax(-1)
        return found

    with torch.no_grad():
        want = [decode(model, base) for base in (5, 9, 11)]
    got: dict[int, list[torch.Tensor]] = {}
    with Engine(compiled(model, planner="alternate"), inflight=3) as engine:

        def client(i: int, base: int) -> None:
            got[i] = decode(lambda **kw: engine.submit(**kw).result(WAIT), base)

        client(0, 5)  # compiles
        threads = [threading.Thread(target=client, args=pair) for pair in ((1, 9), (2, 11))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
    for i, logits in enumerate(want):
        for a, e in zip(got[i], logits, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


def test_new_weights_are_seen_by_later_requests_and_old_ones_by_none():
    model = small()
    call = compiled(model, planner="alternate")
    x = torch.randn(2, 8)
    with Engine(call, inflight=4) as engine:
        for round in range(4):
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.1 * round)
            want = expected(model, [x])[0]
            for got in engine.map([x] * 6):
                torch.testing.assert_close(got, want)


# Faults

picky_op = torch.library.custom_op("tessera_engine_test::picky", mutates_args=())


@picky_op
def picky(x: torch.Tensor) -> torch.Tensor:
    if x[0, 0] < 0:
        raise ValueError("negative first element")
    return x * 2


@picky.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def fragile(x):
    return (picky(x @ x) + 1).relu() @ x


def good(i=0):
    return torch.eye(4) * (1 + i)


def bad():
    x = torch.eye(4)
    x[0, 0], x[0, 1], x[1, 0] = 0.0, 1.0, -1.0
    return x


def test_a_lane_that_raises_fails_its_request_alone():
    with Engine(compiled(fragile, planner="alternate"), inflight=4) as engine:
        engine.submit(good()).result(WAIT)
        futures = [engine.submit(bad() if i % 3 == 0 else good(i)) for i in range(30)]
        for i, future in enumerate(futures):
            if i % 3 == 0:
                with pytest.raises(ValueError, match="negative first element") as caught:
                    future.result(WAIT)
                assert any("on lane" in note for note in caught.value.__notes__)
            else:
                torch.testing.assert_close(future.result(WAIT), fragile(good(i)))
        assert engine.stats().failed == 10


class Gate:
    """A callable that waits until it is opened, and counts how many are inside."""

    def __init__(self):
        self.open, self.inside = threading.Event(), threading.Semaphore(0)

    def __call__(self, x):
        self.inside.release()
        assert self.open.wait(WAIT)
        return x


def test_a_full_queue_refuses_or_waits():
    gate = Gate()
    with Engine(gate, inflight=1, queue=2, when_full="refuse") as engine:
        first = engine.submit(0)
        assert gate.inside.acquire(timeout=WAIT)
        rest = [engine.submit(i) for i in (1, 2)]
        with pytest.raises(EngineFullError, match="queue=2"):
            engine.submit(3)
        assert engine.stats().refused == 1
        assert engine.stats().queue_depth == 2
        gate.open.set()
        assert [f.result(WAIT) for f in (first, *rest)] == [0, 1, 2]
    gate = Gate()
    with Engine(gate, inflight=1, queue=1) as engine:
        engine.submit(0)
        assert gate.inside.acquire(timeout=WAIT)
        engine.submit(1)
        with pytest.raises(EngineFullError):
            engine.request((2,), wait=0.01)
        late = []
        thread = threading.Thread(target=lambda: late.append(engine.submit(2).result(WAIT)))
        thread.start()
        gate.open.set()
        thread.join(WAIT)
        assert late == [2]


def test_a_cancelled_request_does_not_run_and_blocks_nobody():
    gate, state = Gate(), torch.zeros(1)
    ran = []

    def call(x, s):
        ran.append(x)
        return gate(x)

    with Engine(call, inflight=1) as engine:
        first = engine.submit(0, state)
        assert gate.inside.acquire(timeout=WAIT)
        second, third = engine.submit(1, state), engine.submit(2, state)
        assert second.cancel()
        assert not first.cancel()  # It runs.
        gate.open.set()
        assert third.result(WAIT) == 2
        assert first.result(WAIT) == 0
    assert ran == [0, 2]
    assert engine.stats().cancelled == 1


def test_time_outs_of_waiting_and_running_requests():
    gate = Gate()
    with Engine(gate, inflight=1, timeout=WAIT) as engine:
        running = engine.request((0,), timeout=0.05)
        assert gate.inside.acquire(timeout=WAIT)
        waiting = engine.request((1,), timeout=0.05)
        for future in (running, waiting):
            with pytest.raises(TimeoutError):
                future.result(WAIT)
        gate.open.set()
        assert engine.submit(2).result(WAIT) == 2
        stats = engine.stats()
    assert (stats.late, stats.done) == (1, 1)


def test_use_after_close_and_closing_twice():
    engine = Engine(small())
    engine.close()
    engine.close(now=True)
    with pytest.raises(EngineError, match="this engine is closed"):
        engine.submit(torch.ones(1, 8))


def test_closing_serves_what_waits_and_closing_now_drops_it():
    gate = Gate()
    engine = Engine(gate, inflight=1)
    futures = [engine.submit(i) for i in range(4)]
    gate.open.set()
    engine.close()
    assert [f.result(0) for f in futures] == [0, 1, 2, 3]
    gate = Gate()
    engine = Engine(gate, inflight=1)
    first = engine.submit(0)
    assert gate.inside.acquire(timeout=WAIT)
    rest = [engine.submit(i) for i in range(3)]
    closing = threading.Thread(target=engine.close, kwargs={"now": True})
    closing.start()
    with pytest.raises(EngineError, match="was closed while this request ran"):
        first.result(WAIT)
    gate.open.set()
    closing.join(WAIT)
    assert not closing.is_alive()
    assert all(f.cancelled() for f in rest)


def test_an_error_in_the_block_is_not_hidden_and_closes_now():
    with pytest.raises(ZeroDivisionError), Engine(small()) as engine:
        raise ZeroDivisionError
    assert not any(w.is_alive() for w in engine._workers)


def test_futures_can_be_awaited():
    async def main(engine):
        return await asyncio.gather(*(engine.submit(x) for x in xs))

    model = small()
    xs = [torch.randn(2, 8) for _ in range(6)]
    with Engine(compiled(model)) as engine:
        for got, want in zip(asyncio.run(main(engine)), expected(model, xs), strict=True):
            torch.testing.assert_close(got, want)


def test_bad_arguments():
    for arguments, match in (
        ({"inflight": 0}, "inflight=0"),
        ({"policy": "fast"}, "'throughput'"),
        ({"queue": True}, "queue=True"),
        ({"timeout": -1}, "timeout=-1"),
        ({"scheduling": "modulo"}, "'static'"),
    ):
        with pytest.raises(OptionsError, match=match):
            Engine(small(), **arguments)
    with pytest.raises(OptionsError, match="cannot be called"):
        Engine(3)
    with Engine(small(), policy="latency") as engine, pytest.raises(OptionsError, match="this engine has 'latency'"):
        engine.follow("throughput")


def test_models_of_two_clusters_need_two_engines():
    first, second = compiled(small(), planner="alternate"), compiled(small(), planner="alternate", cluster="3xcpu")

    def both(x):
        return second(torch.cat([first(x), first(x)], 1))

    with Engine(both) as engine, pytest.raises(EngineError, match="an engine of their own"):
        engine.submit(torch.ones(1, 8)).result(WAIT)


def test_many_submits_from_eight_threads_with_switches_forced():
    model = small()
    call = compiled(model)
    state_call = compiled(lambda x, s: s.add_((x @ x).relu() @ x).sum())
    each, clients = 100, 8
    wrong: list[object] = []
    states = [torch.zeros(4, 4) for _ in range(clients)]

    def work(kind, x, *more):
        return state_call(x, *more) if kind == "state" else call(x)

    before = threading.active_count()
    with Engine(work, inflight=4, queue=32) as engine:
        stop = threading.Event()

        def switch() -> None:
            while not stop.wait(0.01):
                engine.follow("throughput")
                engine.follow("latency")

        def client(c: int) -> None:
            state = torch.zeros(4, 4)
            x = torch.eye(4) * 0.5
            pending = []
            for i in range(each):
                if i % 4 == 3:
                    pending.append((engine.submit("state", x, states[c]), state.add_((x @ x).relu() @ x).sum()))
                else:
                    y = torch.full((1, 8), float(100 * c + i) / 800)
                    pending.append((engine.submit("plain", y), model(y).detach()))
            for future, want in pending:
                try:
                    torch.testing.assert_close(future.result(WAIT), want)
                except BaseException as error:
                    wrong.append(error)

        threads = [threading.Thread(target=client, args=(c,)) for c in range(clients)]
        threads.append(threading.Thread(target=switch))
        for thread in threads:
            thread.start()
        for thread in threads[:-1]:
            thread.join(WAIT)
            assert not thread.is_alive(), "a client hangs"
        stop.set()
        threads[-1].join(WAIT)
        stats = engine.stats()
        assert not engine._ordering._lines
        assert not engine._running
    assert wrong == []
    assert (stats.submitted, stats.done, stats.failed) == (each * clients, each * clients, 0)
    assert stats.switches > 2
    deadline = time.monotonic() + WAIT
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_nothing_of_a_request_outlives_it():
    model = small()
    with Engine(compiled(model, planner="alternate"), inflight=2) as engine:
        engine.submit(torch.randn(2, 8)).result(WAIT)
        kept = []
        for _ in range(20):
            x = torch.randn(2, 8)
            out = engine.submit(x).result(WAIT)
            kept += [weakref.ref(x), weakref.ref(out)]
            del x, out
        deadline = time.monotonic() + WAIT
        while any(ref() is not None for ref in kept) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert not any(ref() is not None for ref in kept)


def test_replicas_of_dead_conversations_go():
    call = compiled(lambda x, s: s.add_((x @ s).relu() @ x) @ x, planner="alternate")
    with Engine(call, inflight=2) as engine:
        x = torch.eye(4)
        for _ in range(300):
            engine.submit(x, torch.zeros(4, 4)).result(WAIT)
        assert engine._dispatcher is not None
        assert max(len(r) for r in engine._dispatcher.residents) <= 128


# Plans


def test_plans_that_do_not_fit_together_are_said_and_the_compiled_one_stays(monkeypatch):
    model, x = small(), torch.randn(1, 8)
    call = compiled(model)
    with Engine(call) as engine:
        engine.submit(x).result(WAIT)
        ((graph, ways),) = engine._ways.items()
        assert len(ways.all) == 2
        assert ways.reason == ""
        memory = {"cpu#0": 400}  # The first layer alone has 576 bytes of weights.
        monkeypatch.setattr(graph, "cluster", graph.cluster.with_memory(memory))
        assert "need" in ways._too_big()
        assert "on cpu#0, which has 400 B: it stays with the latency plan" in ways._too_big()
        monkeypatch.setattr(Ways, "_too_big", lambda self: "too big")
        with pytest.warns(TesseraWarning, match="too big"):
            stays = Ways(graph, ("latency", "throughput"), inflight=2, factor=0.0, free_transfers=False)
        assert stays.choose("throughput") is stays.choose("latency")


def test_a_conversation_stays_on_its_plan_where_plans_keep_state_apart():
    call = compiled(lambda x, s: s.add_((x @ x).relu() @ x).sum())
    x, s, other = torch.eye(4), torch.zeros(4, 4), torch.zeros(4, 4)
    with Engine(call) as engine:
        engine.submit(x, s).result(WAIT)
        (ways,) = engine._ways.values()
        assert ways.latency is not None
        assert ways.throughput is not None
        ways.same_homes = lambda: False
        engine.follow("latency")
        engine.submit(x, s).result(WAIT)
        engine.follow("throughput")
        engine.submit(x, s).result(WAIT)
        engine.submit(x, other).result(WAIT)
        stays = {key: plan for key, (_, plan, _) in engine._stays.items()}
        assert stays == {storage_key(s): "latency", storage_key(other): "throughput"}


def test_tokens_and_what_the_engine_says_of_itself(caplog):
    model = compiled(small(), planner="alternate")

    def generate(x):
        for _ in range(3):
            y = model(x)
            mark_token()
        return y

    mark_token()  # Outside engines it does nothing.
    with caplog.at_level(logging.INFO, logger="tessera_compile"), Engine(generate) as engine:
        for _ in engine.map([torch.randn(2, 8)] * 5):
            pass
        stats = engine.stats()
    assert 0 < stats.first_token.p50 <= stats.total.p99
    assert stats.per_token.p50 > 0
    assert "engine closed: 5 done, 0 failed" in caplog.text
    text = stats.to_prometheus()
    assert 'tessera_requests_total{outcome="done"} 5\n' in text
    assert 'tessera_lane_busy_ratio{lane="cpu#1"}' in text
    for line in text.splitlines():
        if not line.startswith("# "):
            float(line.rpartition(" ")[2])


def test_identical_devices_share_the_requests_of_a_mixture():
    model = small()
    xs = [torch.randn(2, 8) for _ in range(40)]
    with Engine(compiled(model), policy="throughput", inflight=4) as engine:
        for got, want in zip(engine.map(xs), expected(model, xs), strict=True):
            torch.testing.assert_close(got, want)
        (ways,) = engine._ways.values()
        runs = [way.executor.runs for way in ways.all]
        stats = engine.stats()
    assert sum(runs) == 40
    if ways._shares:  # A replica on each is better than one plan.
        assert min(stats.busy.values()) > 0
        assert not any(ways._outstanding.values())


def test_one_lane_is_inductors_and_runs_on_the_workers():
    model = small()
    xs = [torch.randn(2, 8) for _ in range(6)]
    with Engine(torch.compile(model, backend="tessera", options={"cluster": "cpu"})) as engine:
        for got, want in zip(engine.map(xs), expected(model, xs), strict=True):
            torch.testing.assert_close(got, want)
        assert engine.stats().busy == {}


# Paced emulation


def test_paced_lanes_pipeline_requests():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).eval()
    call = torch.compile(model, backend="tessera", options={**PACED, "pace": 2000, "planner": "alternate"})
    x = torch.randn(256, 512)
    with Engine(call, inflight=4, scheduling="static") as engine:
        for _ in engine.map([x] * 12):
            pass
        stats = engine.stats()
    assert stats.emulation is not None
    assert stats.emulation.requests == 12
    assert "emulated at 2000×" in stats.line()
    plan = tessera_compile.report(call).graphs[0].plan
    assert stats.emulation.mean_us > 0.99 * plan.makespan_us or stats.emulation.void
