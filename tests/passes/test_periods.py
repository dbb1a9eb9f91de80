"""Periods as graphs: stages, orders and lengths, by hand and against a simulation of their own."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_compile.passes.ir import Lane, Out, Program, Recv, Run, Send
from tessera_compile.passes.periods import Period, period_of
from tessera_compile.passes.steady import Operation, operations_of, steady
from tests.passes.test_steady import TWO, mixes

ACROSS = Program(
    (
        Lane(0, "a", (Run("S0", ("k0",)), Send("v", 1))),
        Lane(1, "b", (Recv("v", 0), Run("S1", ("k1",)), Out(("w",)))),
    )
)


@pytest.mark.parametrize(
    ("slots", "us", "stages"),
    [
        (1, 22.0, {"S0": 0, "v->1": 0, "S1": 0}),
        (2, 12.0, {"S0": 0, "S1": 1}),  # the transfer behind S0, or before S1
        (3, 10.0, {"S0": 0, "v->1": 1, "S1": 2}),
        (9, 10.0, {"S0": 0, "v->1": 1, "S1": 2}),  # no more slots than are of use
    ],
)
def test_a_value_that_crosses_costs_a_stage_or_its_time(slots: int, us: float, stages: dict[str, int]):
    run_us = {"S0": 10.0, "S1": 10.0}
    period = period_of(steady(ACROSS, run_us, lambda *_: 2.0), run_us, lambda *_: 2.0, slots=slots)
    assert (period.period_us, period.slots) == (us, min(slots, 3))
    assert stages.items() <= period.stages.items()
    assert period.to_text().startswith(f"period {us:.1f} µs, {min(slots, 3)} slots")


def test_lanes_that_hang_on_nothing_of_their_period_reach_the_busier_ones_time():
    run_us = {"S0": 10.0, "S1": 20.0, "S2": 10.0}
    period = period_of(steady(TWO, run_us, lambda *_: 1.0), run_us, lambda *_: 1.0, slots=5)
    assert period.period_us == 20
    # While lane 1 is busy for 20, lane 0 has time for what it hands over, and for what it was handed a period before.
    assert [period.stages[s] for s in ("S0", "S1", "S2")] == [0, 1, 2]


def check(period: Period, operations: list[Operation]) -> None:
    named = {o.name: o for o in operations}
    assert sorted(period.order) == sorted(named)
    ends: dict[str, float] = {}
    free: dict[tuple[int, ...], float] = defaultdict(float)
    for name in period.order:  # Whoever is waited for comes before.
        start = max([ends[a] for a in period.after[name]] + [free[named[name].resource]])
        ends[name] = free[named[name].resource] = start + named[name].us
    assert max(ends.values(), default=0.0) == pytest.approx(period.period_us)
    for o in operations:
        for a in o.after:
            before = operations[a].name
            assert period.stages[before] <= period.stages[o.name]
            assert (before in period.after[o.name]) == (period.stages[before] == period.stages[o.name])
    assert period.slots == max(period.stages.values(), default=0) + 1


@settings(max_examples=60, deadline=None)
@given(mixes(), st.integers(1, 8))
def test_nothing_is_done_before_what_it_needs_and_more_slots_are_no_worse(case, slots):
    _, program, run_us, transfer_us = case
    made = steady(program, run_us, transfer_us)
    operations, _ = operations_of(program, run_us, transfer_us)
    loads: dict[tuple[int, ...], float] = defaultdict(float)
    for o in operations:
        loads[o.resource] += o.us
    period = period_of(made, run_us, transfer_us, slots=slots)
    check(period, operations)
    assert period.slots <= slots
    assert period.period_us >= max(loads.values(), default=0.0) - 1e-6
    assert period_of(made, run_us, transfer_us, slots=slots + 1).period_us <= period.period_us + 1e-6
    # Enough slots for a stage more wherever a value changes lanes, and one for the transfer.
    assert period_of(made, run_us, transfer_us, slots=10**6).period_us <= max(loads.values(), default=0.0) + 1e-3
