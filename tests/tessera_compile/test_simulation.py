"""Simulated requests against what the plan says by hand."""

import pytest
import torch
from torch import nn

import tessera_compile
from tessera_compile import make_cluster, simulate
from tessera_compile.cli import main
from tessera_compile.passes.errors import PlanError


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))).eval()
    options = {"cluster": "a100-80gb,l40s@200Gbps+1us", "profile": "model", "planner": "alternate", "policy": "throughput"}
    return tessera_compile.explain(model, options=options)(torch.randn(256, 512))


def test_one_request_takes_the_plans_makespan(report):
    plan = report.graphs[0].plan
    alone = simulate(report, arrivals=1)
    assert alone.passages[0].finish == pytest.approx(plan.makespan_us, rel=1e-6)
    assert alone.total.p99 == pytest.approx(plan.makespan_us / 1e3, rel=1e-6)
    far = simulate(report, arrivals=[0.0, 1e6, 2e6])
    assert [p.finish - p.arrival for p in far.passages] == pytest.approx([plan.makespan_us] * 3, rel=1e-6)
    assert far.wait.p99 == 0


@pytest.mark.parametrize("order", ["due", "age", "fifo", "static"])
def test_many_requests_come_close_to_the_plans_bottleneck_and_never_below(report, order):
    plan = report.graphs[0].plan
    many = simulate(report, arrivals=200, inflight=12, order=order)
    assert many.predicted_us == pytest.approx(plan.bottleneck_us, rel=1e-6)
    assert many.period_us >= plan.bottleneck_us * 0.999
    assert many.period_us <= plan.bottleneck_us * 1.1
    if order == "static":
        assert many.period_us == pytest.approx(plan.bottleneck_us, rel=1e-3)
    assert "200 requests" in many.to_text()
    # The bytes are those of the plan, for each request.
    assert many.moved_bytes == 200 * sum(load.sent_bytes for load in plan.loads.values())


def test_one_at_a_time_and_free_transfers(report):
    plan = report.graphs[0].plan
    slow = simulate(report, arrivals=50, inflight=8, pipelined=False)
    assert slow.period_us == pytest.approx(plan.makespan_us, rel=1e-6)
    free = simulate(report, arrivals=50, inflight=8, pipelined=False, free_transfers=True)
    busiest = sum(sum(row[plan.placement[k]] for k, row in plan.times.items() if plan.placement[k] == d) for d in plan.devices)
    assert free.period_us == pytest.approx(busiest, rel=1e-6)


def test_from_a_shell(report, tmp_path, capsys):
    path = tmp_path / "report.json"
    report.to_json(path)
    assert main(["simulate", str(path), "--requests", "50", "--inflight", "6", "--order", "static"]) == 0
    assert "simulated: 50 requests" in capsys.readouterr().out
    assert main(["simulate", str(path), "--cluster", "2xcpu"]) == 2
    assert main(["simulate", str(path), "--requests", "0"]) == 2
    assert main(["simulate", str(tmp_path / "nothing.json")]) == 2
    path.write_text("{}")
    assert main(["simulate", str(path)]) == 2
    assert "is not a report" in capsys.readouterr().err


def test_other_links_and_bad_input(report):
    narrow = simulate(report, make_cluster("a100-80gb,l40s@1Gbps+1us"), arrivals=50, inflight=8)
    assert narrow.period_us > simulate(report, arrivals=50, inflight=8).period_us
    with pytest.raises(PlanError, match="the cluster has cpu#0, cpu#1"):
        simulate(report, "2xcpu")
    with pytest.raises(PlanError, match="ascending"):
        simulate(report, arrivals=[2.0, 1.0])
    with pytest.raises(PlanError, match="nothing to simulate"):
        simulate(tessera_compile.Report(()))
