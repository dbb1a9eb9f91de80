"""The scheduler: programs of small graphs written out by hand, and random graphs whose programs must be proven and minimal."""

import math
import random
import textwrap

import pytest

from tessera_compile.passes import partition, schedule, verify
from tessera_compile.passes.errors import PlanError
from tessera_compile.passes.ir import Free, Hold, Out, Profile, Program, Recv, Run, Send, Signal, Wait
from tests.graphs import cpus, synthetic


def planned(ddg, lanes, count):
    """The plan that puts kernel i of the lowered order on device lanes[i], of ``count``."""
    names = [k.name for k in ddg.graph["kernels"].kernels]
    profile = Profile.of({k: {f"d{g}": 1.0 for g in range(count)} for k in names})
    placement = {k: f"d{g}" for k, g in zip(names, lanes, strict=True)}
    return partition(ddg, profile, cpus(count), placement=placement, planner="given")


def program_of(ddg, lanes, count, **options):
    plan = planned(ddg, lanes, count)
    program = schedule(ddg, plan, **options)
    verify(program, ddg, plan)
    return program


def text(program):
    return textwrap.dedent(program).lstrip("\n")


# --- programs written out by hand -----------------------------------------------------------------------------------


def test_one_lane_is_one_segment():
    ddg = synthetic([(0, 1), (0, 2), (1, 2)], 3, weights={"w": (10, [0, 2])})
    assert program_of(ddg, [0, 0, 0], 1).to_text() == text("""
        lane 0 d0
          run S0: k0 k1 k2
          out v2
        """)


def test_one_kernel_a_segment():
    ddg = synthetic([(0, 1), (0, 2), (1, 2)], 3)
    assert program_of(ddg, [0, 0, 0], 1, one_kernel_a_segment=True).to_text() == text("""
        lane 0 d0
          run S0: k0
          run S1: k1
          run S2: k2
          free v0 v1
          out v2
        """)


def test_no_kernels():
    assert program_of(synthetic([], 0), [], 2).to_text() == text("""
        lane 0 d0
          out
        lane 1 d1
        """)


def test_chain_there_and_back():
    assert program_of(synthetic([(0, 1), (1, 2)], 3), [0, 1, 0], 2).to_text() == text("""
        lane 0 d0
          run S0: k0
          send v0 -> 1
          free v0
          recv v1 <- 1
          run S2: k2
          free v1
          out v2
        lane 1 d1
          recv v0 <- 0
          run S1: k1
          free v0
          send v1 -> 0
          free v1
        """)


def test_everything_away_from_home():
    assert program_of(synthetic([(0, 1)], 2), [1, 1], 2).to_text() == text("""
        lane 0 d0
          send x -> 1
          recv v1 <- 1
          out v1
        lane 1 d1
          recv x <- 0
          run S0: k0 k1
          free x
          send v1 -> 0
          free v1
        """)


def test_diamond_with_a_branch_away():
    # v0 leaves before k1 runs, so that the lanes work side by side; v0 stays for k1.
    assert program_of(synthetic([(0, 1), (0, 2), (1, 3), (2, 3)], 4), [0, 0, 1, 0], 2).to_text() == text("""
        lane 0 d0
          run S0: k0
          send v0 -> 1
          run S1: k1
          free v0
          recv v2 <- 1
          run S3: k3
          free v2 v1
          out v3
        lane 1 d1
          recv v0 <- 0
          run S2: k2
          free v0
          send v2 -> 0
          free v2
        """)


def test_diamond_with_each_branch_on_its_own_lane():
    assert program_of(synthetic([(0, 1), (0, 2), (1, 3), (2, 3)], 4), [0, 1, 2, 0], 3).to_text() == text("""
        lane 0 d0
          run S0: k0
          send v0 -> 1
          send v0 -> 2
          free v0
          recv v1 <- 1
          recv v2 <- 2
          run S3: k3
          free v1 v2
          out v3
        lane 1 d1
          recv v0 <- 0
          run S1: k1
          free v0
          send v1 -> 0
          free v1
        lane 2 d2
          recv v0 <- 0
          run S2: k2
          free v0
          send v2 -> 0
          free v2
        """)


def test_a_value_crosses_once_and_stays_until_its_last_reader():
    assert program_of(synthetic([(0, 1), (0, 2)], 3), [0, 1, 1], 2).to_text() == text("""
        lane 0 d0
          run S0: k0
          send v0 -> 1
          free v0
          recv v1 <- 1
          recv v2 <- 1
          out v1 v2
        lane 1 d1
          recv v0 <- 0
          run S1: k1
          send v1 -> 0
          free v1
          run S2: k2
          free v0
          send v2 -> 0
          free v2
        """)


def test_a_segment_ends_before_a_kernel_that_waits_for_what_it_started():
    # k3 joins no segment of k0, because k2, which it needs, needs k1 of that segment.
    ddg = synthetic([(0, 3), (1, 2), (2, 3)], 4, reads_input=(0, 1))
    assert program_of(ddg, [0, 0, 1, 0], 2).to_text() == text("""
        lane 0 d0
          run S0: k0 k1
          send v1 -> 1
          free v1
          recv v2 <- 1
          run S2: k3
          free v2 v0
          out v3
        lane 1 d1
          recv v1 <- 0
          run S1: k2
          free v1
          send v2 -> 0
          free v2
        """)


def test_residents_are_held_away_from_home_and_never_sent_or_freed():
    ddg = synthetic([(0, 1)], 2, weights={"w": (4000, [0, 1]), "u": (10, [1]), "t": (10, [0])})
    assert program_of(ddg, [0, 1], 2).to_text() == text("""
        lane 0 d0
          run S0: k0
          send v0 -> 1
          free v0
          recv v1 <- 1
          out v1
        lane 1 d1
          hold w u
          recv v0 <- 0
          run S1: k1
          free v0
          send v1 -> 0
          free v1
        """)


def test_state_written_away_from_home_comes_back():
    # k0 reads s1 at home before k1 overwrites it on lane 1: v0, which crosses between them, keeps the order.
    assert program_of(synthetic([(0, 1)], 2, writes_state={1: [0]}), [0, 1], 2).to_text() == text("""
        lane 0 d0
          run S0: k0
          send v0 -> 1
          free v0
          recv v1 <- 1
          recv c1 <- 1
          out v1 c1
        lane 1 d1
          hold s1
          recv v0 <- 0
          run S1: k1
          free v0
          send v1 -> 0
          free v1
          send c1 -> 0
        """)


def test_state_written_at_home_stays_there():
    # Lane 1 reads the old content from its own replica; the writer waits until it is done.
    ddg = synthetic([], 2, writes_state={1: [0]}, reads_input=())
    assert program_of(ddg, [1, 0], 2).to_text() == text("""
        lane 0 d0
          wait k0 <- 1
          run S1: k1
          recv v0 <- 1
          out v0 v1 c1
        lane 1 d1
          hold s1
          run S0: k0
          signal k0 -> 0
          send v0 -> 0
          free v0
        """)


def test_readers_of_old_state_signal_its_writer():
    ddg = synthetic([], 2, writes_state={1: [0]}, reads_input=())
    assert program_of(ddg, [1, 2], 3).to_text() == text("""
        lane 0 d0
          recv v0 <- 1
          recv v1 <- 2
          recv c1 <- 2
          out v0 v1 c1
        lane 1 d1
          hold s1
          run S0: k0
          signal k0 -> 2
          send v0 -> 0
          free v0
        lane 2 d2
          hold s1
          wait k0 <- 1
          run S1: k1
          send v1 -> 0
          free v1
          send c1 -> 0
        """)


def test_effects_across_lanes_are_ordered_by_a_signal():
    assert program_of(synthetic([], 2, effects=(0, 1)), [0, 1], 2).to_text() == text("""
        lane 0 d0
          run S0: k0
          signal k0 -> 1
          recv v1 <- 1
          out v0 v1
        lane 1 d1
          wait k0 <- 0
          run S1: k1
          send v1 -> 0
          free v1
        """)


def test_effects_that_a_value_orders_need_no_signal():
    program = program_of(synthetic([(0, 1)], 2, effects=(0, 1)), [0, 1], 2)
    assert not any(isinstance(i, (Signal, Wait)) for _, _, i in program)
    assert program == program_of(synthetic([(0, 1)], 2), [0, 1], 2)


def test_a_segment_holds_one_effect_at_most():
    # A compiler that sees two draws from one generator together may reorder them.
    assert program_of(synthetic([], 4, effects=(0, 2)), [0] * 4, 2).to_text() == text("""
        lane 0 d0
          run S0: k0 k1
          run S1: k2 k3
          out v0 v1 v2 v3
        lane 1 d1
        """)


def test_what_nobody_reads_is_neither_sent_nor_freed():
    assert program_of(synthetic([(0, 1)], 3, outputs=[1], reads_input=(0, 2)), [0, 1, 1], 2).to_text() == text("""
        lane 0 d0
          send x -> 1
          run S0: k0
          send v0 -> 1
          free v0
          recv v1 <- 1
          out v1
        lane 1 d1
          recv x <- 0
          recv v0 <- 0
          run S1: k1
          free v0
          send v1 -> 0
          free v1
          run S2: k2
          free x
        """)


def test_plan_of_another_graph():
    with pytest.raises(PlanError, match="other kernels"):
        schedule(synthetic([], 3), planned(synthetic([], 2), [0, 0], 1))


# --- random graphs --------------------------------------------------------------------------------------------------


def random_graph(seed, count=30):
    draw = random.Random(seed)
    density = draw.choice((0.03, 0.1, 0.3))
    some = lambda limit, top: sorted(draw.sample(range(limit), draw.randint(0, min(top, limit))))  # noqa: E731
    ddg = synthetic(
        [(i, j) for j in range(count) for i in range(j) if draw.random() < density],
        count,
        weights={f"w{i}": (100, some(count, 5)) for i in range(5)},
        reads_input=some(count, 3),
        outputs=some(count, 5) if draw.random() < 0.5 else None,
        writes_state={w: some(w, 4) for w in some(count, 4)},
        effects=some(count, 6),
    )
    return draw, ddg


def moves(ddg, lane_of):
    """(value, from, to) that a plan needs: to each lane with a reader, and home what the caller gets. Residents don't move."""
    graph = ddg.graph["kernels"]
    found = set()
    for value in graph.values.values():
        makers = [k.name for k in graph.kernels if value.name in k.outputs]
        if not makers and value.origin != "input":
            continue
        source = lane_of[makers[0]] if makers else 0
        targets = {lane_of[k.name] for k in graph.kernels if value.name in k.inputs}
        if makers and (value.name in graph.output_values or value.name in graph.mutated.values()):
            targets.add(0)
        found |= {(value.name, source, t) for t in targets - {source}}
    return found


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_random_graphs(seed, alone):
    draw, ddg = random_graph(seed)
    count = 2 + seed % 3
    graph = ddg.graph["kernels"]
    # Some placements are stretches, as a planner makes them, some are noise.
    runs = draw.choice((1, 4, 10))
    lanes = [lane for _ in range(0, 30, runs) for lane in [draw.randrange(count)] * runs][:30]
    plan = planned(ddg, lanes, count)
    program = schedule(ddg, plan, one_kernel_a_segment=alone)
    verify(program, ddg, plan)
    assert Program.from_text(program.to_text()) == program
    assert Program.from_json(program.to_json()) == program
    assert schedule(ddg, plan, one_kernel_a_segment=alone) == program

    lane_of = {k.name: lane for k, lane in zip(graph.kernels, lanes, strict=True)}
    instructions = list(program)
    sends = [(i.value, lane, i.to) for lane, _, i in instructions if isinstance(i, Send)]
    recvs = [(i.value, i.source, lane) for lane, _, i in instructions if isinstance(i, Recv)]
    assert len(set(sends)) == len(sends)
    assert set(sends) == set(recvs) == moves(ddg, lane_of)
    for name in graph.values:
        if graph.resident(name):
            assert not any(name in i.values for _, _, i in instructions if isinstance(i, Free))
    for lane in range(1, count):
        read = {v for k in graph.kernels if lane_of[k.name] == lane for v in k.inputs if graph.values[v].origin != "activation"}
        held = [v for x, _, i in instructions if x == lane and isinstance(i, Hold) for v in i.values]
        assert sorted(held) == sorted(read - {"x"})
    # Lanes run their kernels in the lowered order.
    for lane in range(count):
        ran = [k for x, _, i in instructions if x == lane and isinstance(i, Run) for k in i.kernels]
        assert ran == [k.name for k in graph.kernels if lane_of[k.name] == lane]
    if alone:
        assert all(len(i.kernels) == 1 for _, _, i in instructions if isinstance(i, Run))
    outs = [(lane, i.values) for lane, _, i in instructions if isinstance(i, Out)]
    assert outs == [(0, tuple(dict.fromkeys([*graph.output_values, *graph.mutated.values()])))]
    # All of a segment comes, in the lowered order, before all of a segment that depends on it across lanes.
    segment_of = {k: i.kernels for _, _, i in instructions if isinstance(i, Run) for k in i.kernels}
    for before, after in ddg.edges:
        if lane_of[before] != lane_of[after]:
            assert max(int(k[1:]) for k in segment_of[before]) < min(int(k[1:]) for k in segment_of[after])


def test_signals_are_sent_only_where_no_value_keeps_the_order():
    signals = 0
    for seed in range(100, 112):
        draw, ddg = random_graph(seed, 12)
        lanes = [draw.randrange(3) for _ in range(12)]
        for lane, _, instruction in program_of(ddg, lanes, 3):
            if isinstance(instruction, Signal):
                signals += 1
                after = [s for s in ddg.successors(instruction.kernel) if lanes[int(s[1:])] == instruction.to]
                assert any(all(d.kind != "raw" for d in ddg.edges[instruction.kernel, s]["deps"]) for s in after)
                assert lane == lanes[int(instruction.kernel[1:])]
    assert signals > 10


@pytest.mark.parametrize(
    ("longest", "runs"),
    [
        (math.inf, [("k0", "k1", "k2", "k3")]),
        (100.0, [("k0", "k1", "k2", "k3")]),
        (60.0, [("k0", "k1"), ("k2", "k3")]),
        (40.0, [("k0",), ("k1",), ("k2", "k3")]),
        (5.0, [("k0",), ("k1",), ("k2",), ("k3",)]),
    ],
)
def test_segments_are_cut_where_they_would_take_too_long(longest, runs):
    ddg, cluster = synthetic([(0, 1), (1, 2), (2, 3)], 4), cpus(2)
    profile = Profile.of({f"k{i}": {"d0": us, "d1": us} for i, us in enumerate((20.0, 40.0, 30.0, 10.0))})
    plan = partition(ddg, profile, cluster, placement={f"k{i}": "d1" for i in range(4)})
    program = schedule(ddg, plan, profile=profile, longest_us=longest)
    verify(program, ddg, plan)
    assert [x.kernels for _, _, x in program if isinstance(x, Run)] == runs
