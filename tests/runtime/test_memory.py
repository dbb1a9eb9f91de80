"""What a report says of memory: the plan's bytes by kind, and what lies there in place and copied."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tessera_compile
from tessera_compile.compiler import executors
from tessera_compile.passes import depend, partition, schedule
from tessera_compile.passes.cluster import Cluster, Device, Link
from tessera_compile.passes.ir import Hold
from tessera_compile.reports import Report
from tessera_compile.runtime.memory import MemoryUse, memory_use
from tessera_compile.runtime.roofline import model_profile
from tests.graphs import lowered


class Counted(torch.nn.Module):
    """Two products whose weights have 1024 and 512 bytes, and a counter of 64 that is overwritten."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(16, 16))
        self.second = torch.nn.Parameter(torch.randn(16, 8))
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x):
        y = x @ self.first
        self.seen.add_(y.sum(0))
        return (y + self.seen) @ self.second


@pytest.mark.parametrize("planner", ["alternate", "single", "random:3"])
def test_what_was_planned_is_what_lies_there_after_a_call(planner):
    torch.compiler.reset()
    options = {"cluster": "3xcpu", "planner": planner, "codegen": "eager", "profile": "model", "inflight": 2}
    compiled = torch.compile(Counted().eval(), backend="tessera", options=options)
    with torch.no_grad():
        for _ in range(2):
            compiled(torch.randn(4, 16))
    (graph,) = tessera_compile.report(compiled).graphs
    assert list(graph.memory) == list(graph.plan.devices)
    for device, use in graph.memory.items():
        assert use.planned == graph.plan.loads[device].memory_bytes
        assert use.in_place + use.copied == use.weights + use.state
        assert use.allocated is None
    home, *others = graph.memory.values()
    assert home.state == 64
    assert home.copied == 0
    assert all(use.in_place == 0 for use in others)
    assert sum(use.weights for use in graph.memory.values()) == 1536
    assert "memory of cpu#0: " in graph.to_text()
    text = tessera_compile.report(compiled).to_json()
    assert Report.from_json(text).graphs[0].memory == graph.memory


def test_a_dry_run_has_only_what_is_planned():
    report = tessera_compile.explain(Counted().eval(), options={"cluster": "a100-80gb,l40s"})(torch.randn(4, 16))
    for device, use in report.graphs[0].memory.items():
        assert use.planned == report.graphs[0].plan.loads[device].memory_bytes
        assert (use.in_place, use.copied, use.allocated) == (None, None, None)


def test_reports_say_why_something_runs_uncaptured():
    torch.compiler.reset()
    options = {"cluster": "2xcpu", "planner": "alternate", "codegen": "eager", "profile": "model"}
    compiled = torch.compile(Counted().eval(), backend="tessera", options=options)
    with torch.no_grad():
        compiled(torch.randn(4, 16))
    (executor,) = executors(compiled)
    executor.reasons = {"all": "a kernel has effects", "S1": "it cannot be captured", "x lies on the host": "x lies on the host"}
    report = tessera_compile.report(compiled)
    assert report.graphs[0].uncaptured == ("a kernel has effects", "S1: it cannot be captured", "x lies on the host")
    assert "uncaptured: S1: it cannot be captured" in report.to_text()
    assert Report.from_json(report.to_json()).graphs[0].uncaptured == report.graphs[0].uncaptured


def slices(memory: int) -> Cluster:
    devices = tuple(Device(f"cuda:0/{n}sm", f"h200/{n}sm", "cuda", memory, tflops=400.0, gb_per_s=4800.0) for n in (56, 64))
    return Cluster(devices, {(a.name, b.name): Link(1000.0, 5.0) for a in devices for b in devices if a is not b})


def test_slices_of_one_gpu_hold_weights_once():
    """Both read the 1024 bytes in place; each needs memory for activations of its own."""

    def f(x, w):
        return torch.relu(x @ w) @ w

    graph = lowered(f, [torch.randn(4, 16), torch.randn(16, 16)], [1])
    ddg, cluster = depend(graph), slices(2048)
    times = model_profile(graph, cluster.devices)
    first = graph.kernels[0].name
    placement = {k.name: cluster.names[k.name != first] for k in graph.kernels}
    plan = partition(ddg, times, cluster, placement=placement, planner="by hand", time_limit=0)
    program = schedule(ddg, plan)
    assert any(isinstance(i, Hold) for _, _, i in program)
    gpu = SimpleNamespace(device=torch.device("cuda", 0))
    executor = SimpleNamespace(program=program, lanes=(gpu, gpu), replicas={1: {}})
    found = memory_use(ddg, times, cluster, plan, inflight=1, executor=executor)
    assert list(found) == ["cuda:0/56sm", "cuda:0/64sm", "cuda:0"]
    one, other, both = found.values()
    assert (one.weights, other.weights, both.weights) == (1024, 1024, 1024)
    assert both.activations == one.activations + other.activations > 0
    assert (both.in_place, both.copied) == (1024, 0)
    assert one.planned <= one.limit == both.limit < both.planned
    assert "MORE THAN THE 2.0 KiB" in both.to_text()
    assert "MORE" not in one.to_text()
    assert both.allocated is not None


def test_text():
    use = MemoryUse(2048, 1024, 512, 4096, in_place=3072, copied=0, allocated=8192, most_allocated=16384)
    assert use.to_text() == (
        "2.0 KiB of weights, 1.0 KiB of state and 512 B of activations planned, of 4.0 KiB; 3.0 KiB read in place, 0 B copied; "
        "this process has 8.0 KiB there, 16.0 KiB at most"
    )
