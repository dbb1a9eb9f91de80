"""The steady state: the equations checked one by one, and its period met by simulated lanes that follow its order."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tessera_compile.passes import partition, schedule, verify
from tessera_compile.passes.errors import ProgramError
from tessera_compile.passes.ir import Lane, Out, Profile, Program, Recv, Run, Send
from tessera_compile.passes.steady import Part, Steady, steady, verify_steady
from tessera_compile.runtime.board import Board, Route, Ticket, route_of
from tessera_compile.runtime.simulator import drive
from tests.graphs import cpus, synthetic

TWO = Program(
    (
        Lane(0, "a", (Run("S0", ("k0",)), Send("v0", 1), Recv("v1", 1), Run("S2", ("k2",)), Out(("v2",)))),
        Lane(1, "b", (Recv("v0", 0), Run("S1", ("k1",)), Send("v1", 0))),
    )
)


def loads(program, run_us, transfer_us):
    found = defaultdict(float)
    for lane, _, x in program:
        if isinstance(x, Run):
            found[lane] += run_us[x.segment]
        elif isinstance(x, Send):
            found[lane, x.to] += transfer_us(x.value, lane, x.to)
    return found


def check(made: Steady, run_us, transfer_us):
    """Every equation of the pass, one by one."""
    program, period = made.program, made.period_us
    arcs = defaultdict(list)
    done: dict[str, float] = {}
    for lane in program.lanes:
        for x in lane.instructions:
            if isinstance(x, Run):
                arcs[lane.index].append((made.starts[x.segment], run_us[x.segment]))
                done[x.segment] = made.starts[x.segment] + run_us[x.segment]
            elif isinstance(x, Send):
                start = made.starts[f"{x.value}->{x.to}"]
                arcs[lane.index, x.to].append((start, transfer_us(x.value, lane.index, x.to)))
    for lane in program.lanes:
        ready = 0.0
        for x in lane.instructions:
            if isinstance(x, Recv):
                ready = max(ready, made.starts[f"{x.value}->{lane.index}"] + transfer_us(x.value, x.source, lane.index))
            elif isinstance(x, Run):
                assert made.starts[x.segment] >= ready - 1e-4
                ready = done[x.segment]
            elif isinstance(x, Send):
                assert made.starts[f"{x.value}->{x.to}"] >= ready - 1e-4
        assert ready <= made.latency_us + 1e-4
    for used in arcs.values():
        placed = sorted((s % period, us) for s, us in used if us > 0)
        for (a, us), (b, _) in zip(placed, [*placed[1:], (placed[0][0] + period, 0.0)] if placed else [], strict=True):
            assert a + us <= b + 1e-3


@st.composite
def mixes(draw):
    count = draw(st.integers(2, 12))
    lanes = draw(st.integers(1, 3))
    edges = [(i - 1, i) for i in range(1, count) if draw(st.booleans())]
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    edges += [(min(p), max(p)) for p in draw(st.lists(pairs, max_size=8)) if p[0] != p[1]]
    us = draw(st.lists(st.integers(0, 40).map(float), min_size=count, max_size=count))
    where = draw(st.lists(st.integers(0, lanes - 1), min_size=count, max_size=count))
    latency = draw(st.sampled_from([0.0, 1.0, 15.0]))
    ddg = synthetic(sorted(set(edges)), count)
    cluster = cpus(lanes, latency_us=latency)
    graph = ddg.graph["kernels"]
    profile = Profile.of({k.name: dict.fromkeys(cluster.names, t) for k, t in zip(graph.kernels, us, strict=True)})
    placement = {k.name: cluster.names[g] for k, g in zip(graph.kernels, where, strict=True)}
    plan = partition(ddg, profile, cluster, placement=placement)
    program = schedule(ddg, plan)
    verify(program, ddg, plan)
    run_us = {x.segment: sum(us[int(k[1:])] for k in x.kernels) for _, _, x in program if isinstance(x, Run)}
    return graph, program, run_us, lambda value, source, target: latency + 1.0


@settings(max_examples=60, deadline=None)
@given(mixes())
def test_every_equation_holds_and_lanes_that_follow_the_order_reach_the_period(case):
    graph, program, run_us, transfer_us = case
    made = steady(program, run_us, transfer_us)
    assert made.period_us == pytest.approx(max(loads(program, run_us, transfer_us).values(), default=0.0), abs=1e-6)
    if made.period_us <= 0:
        return
    check(made, run_us, transfer_us)
    verify_steady([made], made.slots)
    route = route_of(graph, program, run_time=run_us, transfer_time=transfer_us, starts=made.starts, period=made.period_us)
    # Segments without any length begin where others do, and their order is then not that of their starts.
    assume(all(us > 0 for us in run_us.values()))
    ran = drive(lambda _: [route], [0.0] * 40, lanes=len(program.lanes), inflight=made.slots + 2, order="static")
    assert ran.period <= made.period_us * 1.001 + 1e-3


@settings(max_examples=30, deadline=None)
@given(mixes(), st.integers(1, 4))
def test_fewer_slots_take_a_longer_period_and_hold_too(case, slots):
    _, program, run_us, transfer_us = case
    made = steady(program, run_us, transfer_us, slots=slots)
    assert made.slots <= slots
    if made.period_us > 0:
        check(made, run_us, transfer_us)
        verify_steady([made], slots)


@settings(max_examples=40, deadline=None)
@given(mixes(), st.sampled_from(["due", "age", "fifo", "static"]), st.integers(1, 5), st.booleans())
def test_no_order_loses_or_blocks_a_request(case, order, inflight, pipelined):
    graph, program, run_us, transfer_us = case
    route = route_of(graph, program, run_time=run_us, transfer_time=transfer_us)
    steps = []
    ran = drive(
        lambda _: [route],
        [float(3 * i) for i in range(12)],
        lanes=len(program.lanes),
        inflight=inflight,
        order=order,
        pipelined=pipelined,
        watch=lambda s: steps.append((s.ticket.number, s.lane, s.position)),
    )
    assert [p.number for p in ran.passages] == list(range(12))
    total = sum(len(lane.instructions) for lane in program.lanes)
    assert len(steps) == len(set(steps)) == 12 * total
    for lane in program.lanes:
        for number in range(12):
            mine = [at for n, g, at in steps if (n, g) == (number, lane.index)]
            assert mine == list(range(len(lane.instructions)))


def test_a_chain_over_two_lanes_by_hand():
    made = steady(TWO, {"S0": 10.0, "S1": 20.0, "S2": 10.0}, lambda *_: 1.0)
    assert made.period_us == 20
    # One request alone takes 10 + 1 + 20 + 1 + 10; lane 0 has its 10 + 10 in one period.
    assert made.latency_us >= 42
    assert made.slots == math.ceil(made.latency_us / 20)
    verify_steady([made], made.slots)
    with pytest.raises(ProgramError, match=f"deadlock with {made.slots - 2} slots"):
        verify_steady([made], made.slots - 2)
    text = made.to_text()
    assert "period 20.0 µs" in text
    assert "run S1: k1" in text


def test_what_is_out_of_order_or_missing_is_found():
    made = steady(TWO, {"S0": 10.0, "S1": 20.0, "S2": 10.0}, lambda *_: 1.0)
    missing = replace(made, lanes=(made.lanes[0], ()))
    with pytest.raises(ProgramError, match="lane 1 executes request 0's instructions as"):
        verify_steady([missing], 4)
    parts = [Part(p.first, p.last, 5 if p.first == 0 else 0) for p in made.lanes[0]]
    with pytest.raises(ProgramError, match="lane 0 executes request 0"):
        verify_steady([replace(made, lanes=(tuple(parts), made.lanes[1]))], 8)
    with pytest.raises(ProgramError, match="at least one of each"):
        verify_steady([made], 0)
    late = replace(made, lanes=(tuple(replace(p, stage=p.stage + 9 * (p.first > 0)) for p in made.lanes[0]), made.lanes[1]))
    with pytest.raises(ProgramError, match="deadlock"):
        verify_steady([late], made.slots)
    verify_steady([late], made.slots + 9)


def test_a_program_that_waits_for_nothing_sent_is_refused():
    stuck = Program((Lane(0, "a", (Recv("v", 1), Run("S0", ("k",)), Out(()))), Lane(1, "b", ())))
    with pytest.raises(ProgramError, match="waits for what nobody sends"):
        steady(stuck, {"S0": 1.0}, lambda *_: 0.0)


def test_older_requests_go_first_over_a_link_and_on_a_lane():
    route = Route(TWO, run_time={"S0": 10.0, "S1": 30.0, "S2": 10.0}, transfer_time=lambda *_: 1.0)
    order = []
    drive(
        lambda _: [route],
        [0.0] * 6,
        lanes=2,
        inflight=6,
        order="age",
        watch=lambda s: order.append((s.ticket.number, s.instruction.segment)) if isinstance(s.instruction, Run) else None,
    )
    # Lane 0 runs ahead with S0 while S1 is slow, but takes an old request's S2 before a young one's S0.
    assert order.index((0, "S2")) < order.index((5, "S0"))
    assert [n for n, s in order if s == "S1"] == list(range(6))


@settings(max_examples=30, deadline=None)
@given(mixes(), st.randoms(use_true_random=False), st.booleans())
def test_the_order_can_change_at_any_time(case, random, pipelined):
    graph, program, run_us, transfer_us = case
    made = steady(program, run_us, transfer_us)
    route = route_of(graph, program, run_time=run_us, transfer_time=transfer_us, starts=made.starts, period=made.period_us)
    board, coming, done, now = Board(len(program.lanes), pipelined=pipelined), list(range(15)), 0, 0.0
    while coming or board.tickets:
        while coming and len(board.tickets) < 4:
            board.admit(Ticket(coming.pop(min(len(coming) - 1, random.randrange(3))), route), now)
        if random.random() < 0.2:
            board.order = random.choice(["due", "age", "fifo", "static"])
        moving, wake = True, math.inf
        while moving:
            moving, wake = False, math.inf
            for lane in range(len(program.lanes)):
                found = board.next(lane, now)
                if isinstance(found, float):
                    wake = min(wake, found)
                else:
                    board.executed(found, now)
                    moving = True
        done += len(board.finished)
        if board.finished:
            board.finished.clear()
            continue
        assert wake < math.inf, "nothing can happen any more"
        now = max(now, wake)
    assert done == 15
