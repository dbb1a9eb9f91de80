"""The dispatcher of CUDA lanes with streams that run on the host: what it issues in which order, and what faults do."""

from __future__ import annotations

import itertools
import random
import threading
from typing import Any

import pytest
import torch

from tessera_compile import make_cluster
from tessera_compile.passes import depend, partition, schedule
from tessera_compile.passes.ir import Run
from tessera_compile.passes.periods import period_of
from tessera_compile.passes.placements import place
from tessera_compile.passes.steady import steady
from tessera_compile.runtime import cuda_dispatcher, cuda_lanes, segment_graphs
from tessera_compile.runtime.board import Order, route_of
from tessera_compile.runtime.codegen import Codegen
from tessera_compile.runtime.cuda_dispatcher import AHEAD, CudaDispatcher
from tessera_compile.runtime.cuda_requests import CudaRequests
from tessera_compile.runtime.replicas import Residents
from tessera_compile.runtime.roofline import model_profile
from tests.capture import Capture, assert_same
from tests.runtime.test_cuda_issuing import Branches, _Lane, _Stream, caller  # noqa: F401  # a fixture

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is faked, which dynamo notices where there is one")
WAIT = 60.0


class Late:
    """An event that is done after it was asked for a few times."""

    left = 3

    def __init__(self, **_: object) -> None:
        self.asked = 0

    def record(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        self.asked += 1
        return self.asked > Late.left

    def elapsed_time(self, other: Late) -> float:
        return 1.0

    def synchronize(self) -> None:
        self.asked = Late.left


class Streams(_Stream):
    def record_event(self) -> Any:
        return Late()

    def wait_event(self, event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture(autouse=True)
def events(caller: _Stream, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    current = Streams()
    lanes: dict[str, Any] = {}

    def lane_streams(names: list[str]) -> tuple[Any, ...]:
        return tuple(lanes.setdefault(n, _Lane(torch.device("cpu"), Streams(), 8)) for n in names)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda, "Event", Late)
    monkeypatch.setattr(torch.cuda, "Stream", Streams)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current)
    monkeypatch.setattr(_Lane, "new_stream", lambda _: Streams())
    monkeypatch.setattr(cuda_lanes, "lane_streams", lane_streams)


class Setting:
    """A model under a placement, a dispatcher for it, and what the dispatcher has issued."""

    def __init__(
        self, model: torch.nn.Module, placement: str, lanes: int = 2, order: Order = "due", x: Any = None, captured: bool = False
    ) -> None:  # fmt: skip
        x = torch.randn(4, 8) if x is None else x
        cluster = make_cluster(f"{lanes}xcpu")
        self.captured = Capture(model, {"x": x})
        graph = self.captured.graphs[0]
        ddg, times = depend(graph), model_profile(graph, cluster.devices)
        plan = partition(ddg, times, cluster, placement=place(placement, ddg, times, cluster), planner="random", time_limit=0)
        self.program = schedule(ddg, plan)
        run_us = {
            i.segment: sum(times.us(k, cluster.names[g]) for k in i.kernels) for g, _, i in self.program if isinstance(i, Run)
        }
        made = steady(self.program, run_us, lambda *_: 1.0, slots=4)
        self.residents = [Residents() for _ in range(lanes)]
        self.executor = CudaRequests(
            graph, self.program, Codegen("eager"), residents=self.residents, captured=captured,
            period=period_of(made, run_us, lambda *_: 1.0, slots=4),
        )  # fmt: skip
        self.route = route_of(graph, self.program, starts=made.starts, period=made.period_us)
        self.dispatcher = CudaDispatcher(self.executor.lanes, self.residents, order=order)
        self.numbers = iter(range(10_000))
        self.issued: list[tuple[int, str, int]] = []
        perform = self.executor.perform

        def noted(lane: int, at: int, x: Any, request: Any) -> Any:
            self.issued.append((lane, type(x).__name__, id(request)))
            return perform(lane, at, x, request)

        self.executor.perform = noted  # type: ignore[method-assign]
        self.args: list[Any] = []  # of the graph, for the inputs that it was captured with

        def recording(args: list[Any]) -> list[Any]:
            self.args = list(args)
            return self.call(args)

        self.captured.run[0] = recording
        self.captured()

    def call(self, args: list[Any]) -> list[Any]:
        return self.dispatcher.call(next(self.numbers), self.route, self.executor, args)[0]


class Recomputed:
    """A captured segment whose replay computes what it has captured."""

    def __init__(self, call: Any, inputs: list[Any], outputs: list[Any]) -> None:
        self.call, self.inputs, self.outputs = call, inputs, outputs

    def replay(self) -> None:
        for output, result in zip(self.outputs, self.call(list(self.inputs)), strict=True):
            output.copy_(result)


class HostPeriods:
    """In place of graphs of periods: a request is computed at its last stage, from what its place then holds."""

    def __init__(self, executor: CudaRequests, places: Any) -> None:
        assert executor.period is not None
        self.executor, self.places, self.period, self.key = executor, places, executor.period, places[0].key
        self.launched: list[int] = []

    def place(self, number: int) -> Any:
        return self.places[number % len(self.places)]

    def launch(self, number: int, stream: object) -> None:
        self.launched.append(number)
        place = self.place(number - self.period.slots + 1)
        graph, env = self.executor.graph, {**self.executor._constants, **place.inputs}
        kernels = [k.name for k in graph.kernels]
        whole = Codegen("eager").compile(graph, kernels, self.executor._finish.inputs)
        for room, value in zip(place.results, whole.call([env[n] for n in whole.inputs]), strict=True):
            room.copy_(value)


@pytest.fixture
def periodic(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(self: Any, place: Any, key: Any, compiled: Any, inputs: list[Any], streams: Any) -> Any:
        outputs = list(compiled.call(list(inputs)))
        return segment_graphs._Captured(Recomputed(compiled.call, list(inputs), outputs), key, outputs)  # type: ignore[arg-type]

    monkeypatch.setattr(segment_graphs.Slot, "_capture", capture)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(cuda_dispatcher, "PeriodGraphs", HostPeriods)


@pytest.mark.usefixtures("periodic")
@pytest.mark.parametrize("seed", range(4))
def test_a_deep_queue_in_static_order_goes_through_periods(seed: int):
    torch.manual_seed(seed)
    model = Diamond()
    with torch.no_grad():
        setting = Setting(model, f"random:{seed}", 2, "static", captured=True)
        assert setting.executor.period is not None
        graph = setting.captured.graphs[0]
        held = {n: v for n, v in zip(graph.inputs, setting.args, strict=True) if graph.resident(n)}
        done: list[int] = []

        def client(c: int) -> Any:
            def run() -> None:
                for i in range(12):
                    x = torch.full((4, 8), c + i / 16.0)
                    got = setting.call([held.get(n, x) for n in graph.inputs])
                    for value, expected in zip(got, model(x), strict=True):
                        torch.testing.assert_close(value, expected)
                    done.append(c)

            return run

        together([client(c) for c in range(6)])
        assert len(done) == 72
        assert setting.dispatcher.periods > 0
        periods = setting.dispatcher.periods
        # One alone is no queue: it goes segment by segment, also while the order is static.
        client(0)()
        assert setting.dispatcher.periods == periods
        setting.dispatcher.order = "due"
        together([client(c) for c in range(6)])
        assert setting.dispatcher.periods == periods
        assert setting.dispatcher.busy()[1] > 0
    setting.dispatcher.close()
    assert not setting.dispatcher._thread.is_alive()


@pytest.mark.usefixtures("periodic")
def test_the_order_changes_and_requests_of_another_shape_come_between_periods():
    model = Diamond()
    with torch.no_grad():
        setting = Setting(model, "random:1", 2, "static", captured=True)
        graph = setting.captured.graphs[0]
        held = {n: v for n, v in zip(graph.inputs, setting.args, strict=True) if graph.resident(n)}
        stop = threading.Event()

        def switch() -> None:
            for order in itertools.cycle(("due", "static", "static")):
                if stop.wait(0.01):
                    return
                setting.dispatcher.order = order  # type: ignore[assignment]

        def client(c: int) -> Any:
            def run() -> None:
                for i in range(60):
                    mine = {n: v.clone() if c == 5 and i % 7 == 3 else v for n, v in held.items()}  # lies elsewhere
                    x = torch.full((4, 8), c + i / 16.0)
                    got = setting.call([mine.get(n, x) for n in graph.inputs])
                    for value, expected in zip(got, model(x), strict=True):
                        torch.testing.assert_close(value, expected)

            return run

        switching = threading.Thread(target=switch)
        switching.start()
        together([client(c) for c in range(6)])
        stop.set()
        switching.join()
        assert setting.dispatcher.periods > 0
    setting.dispatcher.close()


@pytest.mark.usefixtures("periodic")
def test_an_error_in_a_period_fails_those_in_it_and_others_go_on(monkeypatch: pytest.MonkeyPatch):
    launch = HostPeriods.launch

    def fails(self: HostPeriods, number: int, stream: object) -> None:
        if number == 7:
            raise ValueError("the driver refuses")
        launch(self, number, stream)

    monkeypatch.setattr(HostPeriods, "launch", fails)
    with torch.no_grad():
        setting = Setting(Diamond(), "random:0", 2, "static", captured=True)
        want = setting.call(list(setting.args))
        failed: list[int] = []

        def client() -> None:
            for i in range(12):
                try:
                    got = setting.call(list(setting.args))
                except ValueError:
                    failed.append(i)
                    continue
                for value, expected in zip(got, want, strict=True):
                    torch.testing.assert_close(value, expected)

        together([client] * 6)
        assert setting.executor.period is not None
        assert 1 <= len(failed) <= setting.executor.period.slots * 6
    assert setting.dispatcher._under_way() == []
    setting.dispatcher.close()


@pytest.mark.usefixtures("periodic")
def test_periods_that_cannot_be_captured_say_why(monkeypatch: pytest.MonkeyPatch):
    def refuses(*_: object) -> None:
        raise RuntimeError("no capture here")

    monkeypatch.setattr(cuda_dispatcher, "PeriodGraphs", refuses)
    with torch.no_grad():
        setting = Setting(Diamond(), "random:0", 2, "static", captured=True)
        together([lambda: [setting.call(list(setting.args)) for _ in range(8)]] * 6)
        assert setting.executor.reasons["periods"] == "they cannot be captured: RuntimeError: no capture here"
        assert setting.dispatcher.periods == 0
        overwrites = Setting(Counting(), "random:1", 2, "static", captured=True)
        assert "and so would the stages of a period that stand idle" in overwrites.executor.reasons["periods"]
    setting.dispatcher.close()
    overwrites.dispatcher.close()


def together(jobs: list[Any]) -> None:
    errors: list[BaseException] = []

    def run(job: Any) -> None:
        try:
            with torch.no_grad():
                job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


class Diamond(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        left, right = torch.relu(self.a(x)), torch.sigmoid(self.b(x))
        return self.d(torch.tanh(left @ right.T) @ self.c(right)), left.sum()


class Counting(Diamond):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x):
        self.count.add_(x.sum(0))
        return super().forward(x)


@pytest.mark.parametrize("order", ["due", "age", "fifo", "static"])
@pytest.mark.parametrize("lanes", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_requests_in_flight_compute_what_eager_does(order: Order, lanes: int, seed: int):
    torch.manual_seed(seed)
    model = Diamond()
    with torch.no_grad():
        setting = Setting(model, f"random:{seed}", lanes, order)
        inputs = [torch.randn(4, 8) for _ in range(24)]
        wanted = [model(x) for x in inputs]
        graph = setting.captured.graphs[0]
        fresh = [n for n in graph.inputs if not graph.resident(n)]
        held = {n: v for n, v in zip(graph.inputs, setting.args, strict=True) if n not in fresh}

        def job(x: torch.Tensor, want: Any) -> Any:
            def run() -> None:
                got = setting.call([held.get(n, x) for n in graph.inputs])
                for value, expected in zip(got, want, strict=True):
                    torch.testing.assert_close(value, expected)

            return run

        for first in range(0, 24, 4):
            together([job(x, w) for x, w in zip(inputs[first : first + 4], wanted[first : first + 4], strict=True)])
        busy, moved, _ = setting.dispatcher.busy()
    setting.dispatcher.close()
    assert setting.executor.runs == 25
    assert sum(b > 0 for b in busy) == len({lane for lane, kind, _ in setting.issued if kind == "Run"})
    assert (moved > 0) == any(kind == "Recv" for _, kind, _ in setting.issued)
    assert all(link.moving == 0 for link in setting.dispatcher._board.links.values())


def test_state_that_requests_share_is_overwritten_in_their_order():
    ours, theirs = Branches(), Branches()
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        x = torch.randn(4, 8)
        setting = Setting(ours, "random:1", 2, x=x)
        theirs.count.copy_(ours.count)
        graph = setting.captured.graphs[0]
        for _ in range(3):
            assert_same(setting.captured(), theirs(x))
        args = list(setting.args)
        assert graph.mutated
        together([lambda: setting.call(list(args)) for _ in range(8)])
        for _ in range(8):
            theirs(x)
    setting.dispatcher.close()
    torch.testing.assert_close(ours.count, theirs.count)


def test_a_lane_is_given_two_segments_at_most_and_is_refilled_when_one_is_done(monkeypatch: pytest.MonkeyPatch):
    with torch.no_grad():
        setting = Setting(Diamond(), "alternate")
        monkeypatch.setattr(Late, "left", 10**9)
        args = list(setting.args)
        threads = [threading.Thread(target=lambda: setting.call(list(args)), daemon=True) for _ in range(6)]
        for thread in threads:
            thread.start()
        for _ in range(200):
            threading.Event().wait(0.005)
            queued = list(setting.dispatcher._queued)
            if max(queued) == AHEAD:
                break
        assert max(queued) == AHEAD
        threading.Event().wait(0.05)
        assert all(q <= AHEAD for q in setting.dispatcher._queued)
        monkeypatch.setattr(Late, "left", 0)
        for thread in threads:
            thread.join(WAIT)
            assert not thread.is_alive()
    setting.dispatcher.close()


@pytest.mark.parametrize("order", ["due", "static"])
def test_an_error_in_the_middle_fails_its_own_request(order: Order):
    model = Diamond()
    with torch.no_grad():
        setting = Setting(model, "random:2", 2, order)
        args = list(setting.args)
        want = setting.call(list(args))
        perform, victims = setting.executor.perform, []

        def fails(lane: int, at: int, x: Any, request: Any) -> Any:
            if not victims and isinstance(x, Run) and lane == 1:
                victims.append(id(request))
            if victims[:1] == [id(request)] and isinstance(x, Run):
                raise ValueError("a kernel of ours fails")
            return perform(lane, at, x, request)

        setting.executor.perform = fails  # type: ignore[method-assign]
        outcomes: list[Any] = []

        def job() -> None:
            try:
                outcomes.append(setting.call(list(args)))
            except ValueError as error:
                outcomes.append(error)

        together([job] * 6)
        setting.executor.perform = perform  # type: ignore[method-assign]
        failed = [o for o in outcomes if isinstance(o, ValueError)]
        assert (len(outcomes), len(failed)) == (6, 1)
        for got in (o for o in outcomes if not isinstance(o, ValueError)):
            for value, expected in zip(got, want, strict=True):
                torch.testing.assert_close(value, expected)
        together([lambda: setting.call(list(args))] * 4)
    assert all(link.moving == 0 for link in setting.dispatcher._board.links.values())
    assert (setting.dispatcher._queued, setting.dispatcher._board.tickets) == ([0, 0], [])
    setting.dispatcher.close()


def test_an_aborted_request_ends_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch):
    with torch.no_grad():
        setting = Setting(Diamond(), "alternate")
        monkeypatch.setattr(Late, "left", 10**9)
        args = list(setting.args)
        outcomes: dict[int, Any] = {}

        def job(number: int) -> Any:
            def run() -> None:
                try:
                    outcomes[number] = setting.dispatcher.call(number, setting.route, setting.executor, list(args))
                except TimeoutError as error:
                    outcomes[number] = error

            return run

        threads = [threading.Thread(target=job(n), daemon=True) for n in range(4)]
        for thread in threads:
            thread.start()
        aborted = False
        for _ in range(1000):
            if aborted := setting.dispatcher.abort(2, TimeoutError("late")):
                break
            threading.Event().wait(0.005)
        assert aborted
        threads[2].join(WAIT)
        monkeypatch.setattr(Late, "left", 0)
        for thread in threads:
            thread.join(WAIT)
    assert isinstance(outcomes[2], TimeoutError)
    assert sum(isinstance(o, tuple) for o in outcomes.values()) == 3
    setting.dispatcher.close()
    assert not setting.dispatcher._thread.is_alive()


def test_what_has_arrived_goes_before_what_is_on_its_way():
    gate = object.__new__(CudaDispatcher)

    class Ticket:
        def __init__(self, incoming: int) -> None:
            self.load = type("Load", (), {"incoming": [incoming], "makers": {}})()

    late, ready = Ticket(1), Ticket(0)
    gate._board = type("Board", (), {"order": "due", "pipelined": True})()  # type: ignore[assignment]
    gate._flying = []
    for queued, order, want in (
        (0, "due", [ready]), (1, "due", [ready]), (2, "due", []), (1, "static", [late, ready]), (2, "static", []),
    ):  # fmt: skip
        gate._queued, gate._board.order = [queued], order  # type: ignore[assignment]
        assert gate.runs(0, [late, ready]) == want  # type: ignore[list-item]
    gate._board.order = "due"
    gate._queued = [0]
    assert gate.runs(0, [late]) == [late]  # type: ignore[list-item]
    gate._queued = [1]
    assert gate.runs(0, [late]) == []  # type: ignore[list-item]


def test_random_interleavings_end(monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(0)
    monkeypatch.setattr(Late, "query", lambda self: rng.random() < 0.3)
    monkeypatch.setattr(cuda_dispatcher, "_POLL", 0.0)
    with torch.no_grad():
        for seed, order in ((3, "due"), (4, "static"), (5, "age")):
            setting = Setting(Diamond(), f"random:{seed}", 3, order)  # type: ignore[arg-type]
            args = list(setting.args)
            want = setting.call(list(args))
            results: list[Any] = []
            together([lambda s=setting, a=args, r=results: r.append(s.call(list(a)))] * 8)
            for got in results:
                for value, expected in zip(got, want, strict=True):
                    torch.testing.assert_close(value, expected)
            setting.dispatcher.close()
