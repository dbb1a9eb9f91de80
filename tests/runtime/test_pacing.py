"""Emulated time, against what the model says by hand."""

import pytest
import torch

import tessera_compile
from tessera_compile import make_cluster
from tessera_compile.compiler import executors
from tessera_compile.passes import depend, partition, schedule, verify
from tessera_compile.passes.ir import Profile
from tessera_compile.runtime.codegen import Codegen
from tessera_compile.runtime.cpu_lanes import CpuLaneExecutor
from tessera_compile.runtime.pacing import Emulation, Pace
from tests.graphs import lowered

X = torch.ones(8, 8)


def emulate(function, args, where, us, factor=200.0, codegen="eager", link="8GB/s+50us", runs=3):
    """Emulation of ``function`` with kernel i on device ``where[i]`` for ``us[i]`` µs, and the plan."""
    graph = lowered(function, args)
    cluster = make_cluster(f"a100-80gb,l40s@{link}")
    ddg = depend(graph)
    names = [k.name for k in graph.kernels]
    assert len(names) == len(us)
    profile = Profile.of({k: dict.fromkeys(cluster.names, t) for k, t in zip(names, us, strict=True)})
    placement = {k: cluster.names[g] for k, g in zip(names, where, strict=True)}
    plan = partition(ddg, profile, cluster, placement=placement)
    program = schedule(ddg, plan)
    verify(program, ddg, plan)
    pace = Pace(graph, program, profile, cluster, factor)
    run = CpuLaneExecutor(graph, program, Codegen(codegen, threads=1), threads=1, pace=pace)
    for _ in range(runs):
        results = run(list(args))
    if codegen == "eager":
        expected = function(*args)
        torch.testing.assert_close(results, list(expected) if isinstance(expected, tuple) else [expected])
    return pace.result(), plan


def chain(x):
    return torch.relu(x @ x) @ x


@pytest.mark.parametrize("codegen", ["eager", "null"])
def test_a_chain_over_two_devices_takes_its_kernels_and_transfers(codegen):
    emulation, plan = emulate(chain, [X], [0, 1, 0], [100.0, 200.0, 300.0], codegen=codegen)
    # Two transfers of 256 bytes at 8 GB/s and 50 µs.
    expected = 100 + 200 + 300 + 2 * (50 + 256 / 8e3)
    assert plan.makespan_us == pytest.approx(expected)
    assert emulation.requests == 3
    assert emulation.steps == 3 * 5
    if not emulation.void:  # A loaded machine may overrun; then it says so, and proves nothing.
        assert emulation.mean_us == pytest.approx(expected, rel=0.02)


def test_a_value_that_waited_for_its_receiver_is_no_overrun():
    def function(x):
        return (torch.relu(x @ x) @ x) + torch.sin(x) @ x

    # Device 1 is busy for 90 µs when the sine, which it needs later, has long arrived.
    graph = lowered(function, [X])
    where = [0 if "sin" in k.name else 1 for k in graph.kernels]
    us = [90.0 if i == where.index(1) else 1.0 for i in range(len(where))]
    for _ in range(3):  # A loaded machine may be late once, not every time.
        emulation, _ = emulate(function, [X], where, us, factor=2000.0, link="900GB/s+1us", runs=2)
        if not emulation.overran:
            break
    assert emulation.overran == 0


def test_too_small_a_factor_is_void_and_says_so():
    emulation, _ = emulate(chain, [X], [0, 1, 0], [1.0, 1.0, 1.0], factor=0.01)
    assert emulation.void
    assert "void, raise the factor" in emulation.to_text()
    assert "emulated" in emulation.to_text()


def test_one_percent_is_the_limit():
    assert not Emulation(1.0, 1, 1.0, 100, 1).void
    assert Emulation(1.0, 1, 1.0, 100, 2).void


def test_through_the_backend_everything_says_emulated():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16)).eval()
    options = {"cluster": "a100-80gb,l40s", "codegen": "eager", "pace": 500, "planner": "alternate"}
    compiled = torch.compile(model, backend="tessera", options=options)
    x = torch.randn(4, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    report = tessera_compile.report(compiled)
    assert "emulated at 500×: 1 requests" in str(report)
    assert report.graphs[0].emulation.steps > 3
    assert tessera_compile.Report.from_json(report.to_json()).graphs[0].emulation == report.graphs[0].emulation
    assert executors(compiled)[0].runs == 1
