"""What so many requests in flight reach of a mix, in simulated time."""

from __future__ import annotations

import pytest

from tessera_compile.in_flight import simulated_us
from tessera_compile.passes.ir import Lane, Out, Program, Recv, Run, Send
from tessera_compile.runtime.board import Route


def route(name, *us, move=1.0):
    """Segments by turns on lane 0 and lane 1, each sending to the next; ends on lane 0 or where its last one is."""
    lanes: list[list] = [[], []]
    times, starts, at = {}, {}, 0.0
    for i, took in enumerate(us):
        lane = i % 2
        if i:
            lanes[1 - lane].append(Send(f"{name}v{i}", lane))
            lanes[lane].append(Recv(f"{name}v{i}", 1 - lane))
            starts[f"{name}v{i}->{lane}"] = at
            at += move
        segment = f"{name}{i}"
        lanes[lane].append(Run(segment, (segment,)))
        times[segment], starts[segment] = took, at
        at += took
    lanes[0].append(Out(()))
    program = Program(tuple(Lane(i, f"d{i}", tuple(x)) for i, x in enumerate(lanes)))
    return Route(program, times, lambda *_: move, starts, period=max(us), alone=at, piece=100.0)


def test_enough_in_flight_reach_the_busiest_lane_and_too_few_do_not():
    step = route("s", 10.0, 10.0, 10.0, 10.0)
    shared = [(1.0, {"step": step})]
    full = simulated_us(shared, {"step": 20}, lanes=2, inflight=8)
    assert full == pytest.approx(20.0 * 20, rel=0.05)
    alone = simulated_us(shared, {"step": 20}, lanes=2, inflight=1)
    assert alone == pytest.approx(43.0 * 20, rel=0.05)


def test_a_plan_that_crosses_less_serves_more_when_few_are_in_flight():
    long = route("p", 0.001, 1000.0)  # On lane 1, which nothing interrupts.
    many = {"step": route("s", *([10.0, 2.0] * 20)), "long": long}
    few = {"step": route("t", 200.0, 40.0), "long": long}
    uses = {"step": 10, "long": 1}
    with_few = {name: simulated_us([(1.0, x)], uses, lanes=2, inflight=3) for name, x in (("many", many), ("few", few))}
    assert with_few["few"] < 0.95 * with_few["many"]


def test_shares_are_followed_by_each_workload():
    left, right = route("l", 10.0), route("r", 0.001, 10.0)
    shared = [(0.5, {"step": left}), (0.5, {"step": right})]
    assert simulated_us(shared, {"step": 20}, lanes=2, inflight=4) == pytest.approx(20 * 5.0, rel=0.05)
