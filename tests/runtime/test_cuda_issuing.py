"""What the executors of CUDA lanes compute and issue, with streams that run on the host: no GPU, and nothing of its timing."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tessera_compile import make_cluster
from tessera_compile.passes import depend, partition, schedule
from tessera_compile.passes.errors import TesseraWarning
from tessera_compile.passes.ir import Recv
from tessera_compile.passes.placements import place
from tessera_compile.runtime import cuda_graphs, cuda_lanes, cuda_profiler, segment_graphs, transports
from tessera_compile.runtime.codegen import Codegen, Compiled
from tessera_compile.runtime.cuda_streams import LaneStreams
from tessera_compile.runtime.roofline import model_profile
from tests.capture import Capture, assert_same


class _Event:
    def __init__(self, stream: _Stream) -> None:
        self.stream = stream


class _Stream:
    device = torch.device("cpu")

    def __init__(self, *_: object) -> None:
        self.waits: list[_Stream] = []

    def record_event(self) -> _Event:
        return _Event(self)

    def wait_event(self, event: _Event) -> None:
        self.waits.append(event.stream)

    def wait_stream(self, other: _Stream) -> None:
        self.waits.append(other)


class _Lane(LaneStreams):
    def new_stream(self) -> _Stream:  # type: ignore[override]
        return _Stream()


class _HostLane:
    """Of a GPU, though all that it is given lies on the host."""

    device, context = torch.device("cuda", 0), None

    def __init__(self, compute: _Stream, sms: int) -> None:
        self.compute, self.sms = compute, sms

    def new_stream(self) -> _Stream:
        return _Stream()


class _Graph:
    """Captures nothing: a replay leaves the outputs as they are."""

    def replay(self) -> None:
        pass


@pytest.fixture
def caller(monkeypatch: pytest.MonkeyPatch) -> _Stream:
    """The caller's current stream."""
    current = _Stream()
    lanes: dict[str, LaneStreams] = {}

    def lane_streams(names: list[str]) -> tuple[LaneStreams, ...]:
        return tuple(lanes.setdefault(n, _Lane(torch.device("cpu"), _Stream(), 8)) for n in names)  # type: ignore[arg-type]

    def make_link(source: LaneStreams, target: LaneStreams, transport: str) -> transports.Link:
        assert transport == "auto"
        return transports.Link(source, target, source.new_stream(), target.new_stream(), transports.Engine())

    monkeypatch.setattr(cuda_lanes, "lane_streams", lane_streams)
    monkeypatch.setattr(cuda_lanes, "make_link", make_link)
    for name, fake in {
        "current_stream": lambda *_: current,
        "stream": lambda *_: contextlib.nullcontext(),
        "device": lambda *_: contextlib.nullcontext(),
        "Stream": _Stream,
        "CUDAGraph": _Graph,
        "graph": lambda *_, **__: contextlib.nullcontext(),
        "set_stream": lambda *_: None,
        "set_device": lambda *_: None,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return current


def executor(graph, placement: str, lanes: str = "2xcpu") -> cuda_lanes.CudaLaneExecutor:
    cluster = make_cluster(lanes)
    ddg, times = depend(graph), model_profile(graph, cluster.devices)
    plan = partition(ddg, times, cluster, placement=place(placement, ddg, times, cluster), planner="random", time_limit=0)
    return cuda_lanes.CudaLaneExecutor(graph, schedule(ddg, plan), Codegen("eager"), poison=True)


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x):
        self.count += 1
        wide = x[:1].expand(4, 8)
        return torch.relu(self.a(x)) @ torch.sigmoid(self.b(wide)).T + self.c(x).sum(-1) + self.count.sum(), self.count * 2


@pytest.mark.parametrize("lanes", ["1xcpu", "2xcpu", "3xcpu"])
@pytest.mark.parametrize("seed", range(6))
def test_random_placements_compute_what_eager_does(caller: _Stream, lanes: str, seed: int):
    torch.manual_seed(seed)
    ours, theirs, x = Branches(), Branches(), torch.randn(4, 8)
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        captured = Capture(ours, {"x": x})
        captured.run[0] = executor(captured.graphs[0], f"random:{seed}", lanes)
        theirs.count.copy_(ours.count)
        for _ in range(3):
            assert_same(captured(), theirs(x))
            torch.testing.assert_close(ours.count, theirs.count)


def test_the_caller_waits_for_every_lane_and_for_links_that_were_used(caller: _Stream):
    with torch.no_grad():
        captured = Capture(Branches(), {"x": torch.randn(4, 8)})
        run = captured.run[0] = executor(captured.graphs[0], "random:1", "3xcpu")
        captured()
    pairs = {(instruction.source, lane) for lane, _, instruction in run.program if isinstance(instruction, Recv)}
    assert set(run.links) == pairs != set()
    assert all(s.compute in caller.waits for s in run.lanes)
    assert all(link.out in caller.waits or link.into in caller.waits for link in run.links.values())
    assert all(link.busy == {} for link in run.links.values())


def test_an_output_in_the_storage_of_an_overwritten_input_is_copied(caller: _Stream):
    class Swap(torch.nn.Module):
        def forward(self, x, y):
            old = x + 0
            x.copy_(y)
            return old, x * 2

    x, y = torch.randn(4), torch.randn(4)
    with torch.no_grad():
        captured = Capture(Swap(), {"x": x, "y": y})
        captured.run[0] = run = executor(captured.graphs[0], "random:0")
        compiled = run._finish.call

        def reuses(values):  # a compiler may compute a result in place of what nobody reads any more
            results = list(compiled(values))
            x_now = next(v for v in captured_inputs if v.data_ptr() == x.data_ptr())
            results[-1] = x_now.mul_(1)
            return results

        captured_inputs = [x]
        object.__setattr__(run._finish, "call", reuses)
        outputs = captured()
    assert outputs[-1].data_ptr() != x.data_ptr()


def test_static_buffers_are_one_requests_at_a_time(caller: _Stream, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    with torch.no_grad():
        captured = Capture(model, {"input": torch.randn(4, 8)})
        captured.run[0] = run = cuda_graphs.GraphedExecutor(executor(captured.graphs[0], "random:0"))
        captured(), captured()
        assert (run.runs, run.replays) == (2, 1)
        before = run._last
        caller.waits.clear()
        waited: list[_Event] = []
        monkeypatch.setattr(caller, "wait_event", waited.append)
        captured()
    assert waited[0] is before
    assert run._last is not before


def test_inputs_that_a_graph_cannot_hold_run_uncaptured(caller: _Stream, monkeypatch: pytest.MonkeyPatch):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    with torch.no_grad():
        captured = Capture(model, {"input": torch.randn(4, 8)})
        captured.run[0] = run = cuda_graphs.GraphedExecutor(executor(captured.graphs[0], "random:0"))
        captured(), captured()
        assert run.replays == 0
        assert any("lies on the host" in r for r in run.reasons)
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        wide = Capture(model, {"input": torch.randn(1, 8).expand(4, 8)})
        wide.run[0] = run = cuda_graphs.GraphedExecutor(executor(wide.graphs[0], "random:0"))
        wide(), wide()
        assert run.replays == 0
        assert any("share memory" in r for r in run.reasons)


def test_a_graph_that_asks_the_host_is_not_captured(caller: _Stream):
    class Counts(torch.nn.Module):
        def forward(self, x):
            return torch.nonzero(x)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        captured = Capture(Counts(), {"x": torch.randn(4)})
        captured.run[0] = run = cuda_graphs.GraphedExecutor(executor(captured.graphs[0], "random:0"))
        captured(), captured()
    assert run.replays == 0
    assert "host needs" in run.reasons["all"]


def test_a_segment_that_is_captured_again_has_a_pool_of_its_own(caller: _Stream, monkeypatch: pytest.MonkeyPatch):
    pools: list[object] = []
    handles = iter(range(10))

    @contextlib.contextmanager
    def capturing(graph, stream, pool):
        pools.append(pool)
        yield

    monkeypatch.setattr(segment_graphs, "capturing", capturing)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    reasons: dict[str, str] = {}
    slot = segment_graphs.Slot(reasons)
    compiled = Compiled(lambda inputs: [inputs[0] * 2], ("x",), ("y",), (), "eager")
    lane = _Lane(torch.device("cpu"), _Stream(), 8)
    tensors = [torch.ones(2) * i for i in range(20)]

    def run(place, tensor):
        return slot.run(place, f"S{place[1]}", compiled, [tensor], lane)[0]

    for where in ((0, 1), (0, 2)):
        for _ in range(3):  # as it is, captured, replayed
            run(where, tensors[0])
    assert (pools, slot.replays) == ([0, 0], 2)
    for tensor in tensors[1:4]:
        assert torch.equal(run((0, 1), tensor), tensor * 2)
    assert pools == [0, 0, 1, 2, 3]
    run((1, 1), tensors[0]), run((1, 1), tensors[0])
    assert pools[-1] == 4
    for tensor in tensors[4:]:
        assert torch.equal(run((0, 1), tensor), tensor * 2)
    assert "somewhere else each time" in reasons["S1"]
    assert len(pools) == 6 + segment_graphs.MOST_CAPTURES - 4


def test_a_segment_that_cannot_be_captured_runs_as_it_is(caller: _Stream, monkeypatch: pytest.MonkeyPatch):
    @contextlib.contextmanager
    def capturing(graph, stream, pool):
        yield
        raise RuntimeError("no capture")

    monkeypatch.setattr(segment_graphs, "capturing", capturing)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    reasons: dict[str, str] = {}
    slot = segment_graphs.Slot(reasons)
    compiled = Compiled(lambda inputs: [inputs[0] * 2], ("x",), ("y",), (), "eager")
    x = torch.ones(2)
    for _ in range(4):
        assert torch.equal(slot.run((0, 0), "S0", compiled, [x], _Lane(torch.device("cpu"), _Stream(), 8))[0], x * 2)
    assert reasons == {"S0": "it cannot be captured: RuntimeError: no capture"}
    assert slot.replays == 0


def test_what_lies_on_the_host_is_not_copied_between_lanes(caller: _Stream, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_lanes, "lane_streams", lambda names: tuple(_HostLane(_Stream(), 8) for _ in names))
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)), torch.randn(4, 8)
    with torch.no_grad():
        captured = Capture(model, {"input": x})
        captured.run[0] = run = executor(captured.graphs[0], "alternate")
        assert_same(captured(), model(x))
    assert run.links
    assert all(link.moved_bytes == 0 for link in run.links.values())


def test_a_kernel_that_fails_has_no_time_and_one_without_memory_a_modelled_one(monkeypatch: pytest.MonkeyPatch):
    graph = Capture(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), {"input": torch.randn(4, 8)}).graphs[0]
    timer = object.__new__(cuda_profiler._Timer)
    timer.graph, timer.codegen, timer.device, timer.real = graph, Codegen("eager"), make_cluster("1xcpu").devices[0], None

    def fails(error: Exception):
        def timed(*_: object) -> None:
            raise error

        return timed

    monkeypatch.setattr(timer, "_timed", fails(RuntimeError("no image for this device")))
    with pytest.warns(TesseraWarning, match="cannot run on .*no image for this device"):
        assert timer.kernel(graph.kernels[0]) is None
    monkeypatch.setattr(timer, "_timed", fails(torch.cuda.OutOfMemoryError("out of memory")))
    with pytest.warns(TesseraWarning, match="its time is modelled"):
        assert timer.kernel(graph.kernels[0]).source == "modelled"
    assert len(timer.codegen.fallbacks) == 2
