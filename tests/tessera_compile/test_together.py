"""Joint planning of the graphs of a compiled model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tessera_compile
from tessera_compile import plan_together, report
from tessera_compile.compiler import executors
from tessera_compile.passes.errors import OptionsError, PlanError

OPTIONS = {"cluster": "2xcpu", "codegen": "eager", "profile": "model", "policy": "throughput"}


class Cached(nn.Module):
    """Two layers with a cache that every call writes; called on many rows (prefill) and on one (decode)."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("cache", torch.zeros(8, 16))

    def forward(self, x, at):
        x = torch.relu(self.first(x))
        self.cache.index_copy_(0, at, x)
        return self.second(self.cache).sum(0) + x.sum(0)


def test_prefill_and_decode_are_planned_as_one_mix():
    torch.manual_seed(0)
    model = Cached()
    eager = [model(torch.ones(4, 16), torch.arange(4)), *(model(torch.ones(1, 16), torch.tensor([i])) for i in (4, 5))]
    cache = model.cache.clone()
    model.cache.zero_()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="tessera", options=OPTIONS, dynamic=False)
    with torch.no_grad(), plan_together("2xcpu", uses={"prefill": 1, "decode": 100}) as together:
        with together.phase("prefill"):
            compiled(torch.ones(4, 16), torch.arange(4))
        with together.phase("decode"):
            compiled(torch.ones(1, 16), torch.tensor([4]))
    assert together.plan.plans[0].placement
    assert {k.split(".")[0] for k in together.plan.plans[0].placement} == {"prefill", "decode"}
    weights = sum(p.numel() * 4 for p in model.parameters()) + model.cache.numel() * 4
    assert together.shared == weights
    assert [c.phase for c in together.changes] == ["prefill", "decode"]
    assert "of weights and state" in str(together)
    plans = [g.plan for g in report(compiled).graphs]
    assert [p.planner for p in plans] == ["together", "together"]
    members = {name: devices[0] for name, devices in together.plan.groups.items()}
    for graph, plan in zip(("prefill.0", "decode.1"), plans, strict=True):
        for kernel, device in plan.placement.items():
            assert device == members[together.plan.plans[0].placement[f"{graph}/{kernel}"]]
    # The graphs run by the new plan and give what eager gives.
    model.cache.zero_()
    before = [e.runs for e in executors(compiled)]
    with torch.no_grad():
        results = [compiled(torch.ones(4, 16), torch.arange(4))]
        results += [compiled(torch.ones(1, 16), torch.tensor([i])) for i in (4, 5)]
    for got, want in zip(results, eager, strict=True):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(model.cache, cache)
    assert [e.runs for e in executors(compiled)] == [before[0] + 1, before[1] + 2]


def test_nothing_called():
    with pytest.raises(PlanError, match="nothing was called"), plan_together("2xcpu"):
        pass


def test_another_cluster_than_the_model_was_compiled_for():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x @ x + 1, backend="tessera", options=OPTIONS)
    with pytest.raises(PlanError, match="is compiled for cpu#0, cpu#1"), torch.no_grad(), plan_together("3xcpu"):
        compiled(torch.ones(3, 3))
    with torch.no_grad():
        assert compiled(torch.ones(3, 3)).sum() == 36


def test_a_phase_that_never_ran_and_bad_uses():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x @ x + 1, backend="tessera", options=OPTIONS)
    with (
        pytest.raises(PlanError, match="'decode', in which nothing was called"),
        torch.no_grad(),
        plan_together(uses={"decode": 3}),
    ):
        compiled(torch.ones(3, 3))
    with pytest.raises(OptionsError, match="must be positive"):
        plan_together(uses={"decode": 0})


def test_an_error_inside_is_not_hidden_and_plans_nothing():
    with pytest.raises(ZeroDivisionError), plan_together("2xcpu") as together:
        raise ZeroDivisionError
    assert together.plan is None
    assert str(together) == "plan_together: nothing planned yet"
    assert not tessera_compile.pipeline.OBSERVERS
