"""The verifier: no instruction of a right program can be left out, wrong programs are refused, and what passes computes right."""

import itertools
import random
import textwrap

import pytest

from tessera_compile.passes import partition, schedule, verify
from tessera_compile.passes.errors import ProgramError
from tessera_compile.passes.ir import Free, Hold, Lane, Out, Profile, Program, Recv, Run, Send, Signal, Wait
from tests.graphs import cpus, lowered, synthetic


def planned(ddg, lanes, count):
    """The plan that puts kernel i of the lowered order on device lanes[i], of ``count``."""
    names = [k.name for k in ddg.graph["kernels"].kernels]
    profile = Profile.of({k: {f"d{g}": 1.0 for g in range(count)} for k in names})
    placement = {k: f"d{g}" for k, g in zip(names, lanes, strict=True)}
    return partition(ddg, profile, cpus(count), placement=placement, planner="given")


# name → (graph, lane of each kernel, lanes, one kernel a segment)
GRAPHS = {
    "chain": (synthetic([(0, 1), (1, 2)], 3), [0, 1, 0], 2, False),
    "one lane": (synthetic([(0, 1), (0, 2), (1, 3), (2, 3)], 4, weights={"w": (10, [1, 3])}), [0, 0, 0, 0], 1, True),
    "state": (
        synthetic([(0, 2), (1, 2)], 4, writes_state={2: [0, 1], 3: [0]}, weights={"w": (10, [1, 2])}),
        [0, 1, 2, 1],
        3,
        False,
    ),
    "effects": (synthetic([(0, 3), (2, 4)], 6, effects=(0, 1, 2, 4, 5), reads_input=(0, 2, 5)), [0, 1, 2, 2, 0, 1], 3, False),
    "everything": (
        synthetic(
            [(0, 1), (0, 2), (1, 3), (2, 3), (2, 4), (3, 6), (4, 5), (5, 7)],
            8,
            weights={"w": (10, [0, 3, 6]), "u": (10, [4])},
            writes_state={5: [1, 3], 6: []},
            effects=(1, 4, 7),
            outputs=[3, 7],
        ),
        [0, 1, 2, 3, 1, 0, 2, 1],
        4,
        False,
    ),
}


def made(name):
    ddg, lanes, count, alone = GRAPHS[name]
    plan = planned(ddg, lanes, count)
    return ddg, plan, schedule(ddg, plan, one_kernel_a_segment=alone)


@pytest.mark.parametrize("name", GRAPHS)
def test_right_programs_pass(name):
    ddg, plan, program = made(name)
    verify(program, ddg, plan)


def test_the_programs_hold_every_instruction():
    kinds = {type(i) for name in GRAPHS for _, _, i in made(name)[2]}
    assert kinds == {Run, Send, Recv, Signal, Wait, Hold, Free, Out}


@pytest.mark.parametrize(
    ("name", "lane", "position"), [(name, lane, position) for name in GRAPHS for lane, position, _ in made(name)[2]]
)
def test_no_instruction_can_be_left_out(name, lane, position):
    ddg, plan, program = made(name)
    with pytest.raises(ProgramError):
        verify(program.without(lane, position), ddg, plan)


def test_no_instruction_of_a_lowered_graph_can_be_left_out():
    def function(x, weight, cache):
        cache.copy_(cache * 0.5 + x)
        y = (x @ weight).relu()
        z = (y @ weight).softmax(-1)
        return z @ weight, y.sum()

    import torch

    from tessera_compile.passes import depend

    ddg = depend(lowered(function, [torch.ones(4, 4), torch.ones(4, 4), torch.ones(4, 4)], static=[1]))
    count = len(ddg)
    assert count >= 4
    plan = planned(ddg, [1 - i % 2 for i in range(count)], 2)
    program = schedule(ddg, plan)
    verify(program, ddg, plan)
    for lane, position, instruction in program:
        try:
            verify(program.without(lane, position), ddg, plan)
        except ProgramError:
            continue
        pytest.fail(f"lane {lane} does without '{instruction.to_text()}'")


# --- swapped neighbours ---------------------------------------------------------------------------------------------


def must_stay_in_order(ddg, first, second):
    """Whether ``second`` needs ``first`` before it on the same lane."""
    graph = ddg.graph["kernels"]
    made = [v for k in first.kernels for v in graph[k].outputs] if isinstance(first, Run) else []
    if isinstance(first, Recv):
        made = [first.value]
    elif isinstance(first, Hold):
        made = list(first.values)
    if isinstance(second, Run):
        if isinstance(first, Wait):
            return any(ddg.has_edge(first.kernel, k) for k in second.kernels)
        return any(v in made for k in second.kernels for v in graph[k].inputs)
    if isinstance(second, Signal):
        return isinstance(first, Run) and second.kernel in first.kernels
    if isinstance(second, Send):
        return second.value in made
    if isinstance(second, Out):
        return any(v in made for v in second.values)
    if isinstance(second, Free):
        used = [first.value] if isinstance(first, (Send, Recv)) else list(first.values) if isinstance(first, Out) else made
        if isinstance(first, Run):
            used = [*made, *(v for k in first.kernels for v in graph[k].inputs)]
        return any(v in used for v in second.values)
    return False


def swapped(program, lane, position):
    lanes = [list(x.instructions) for x in program.lanes]
    lanes[lane][position : position + 2] = reversed(lanes[lane][position : position + 2])
    return rebuilt(program, lanes)


def rebuilt(program, lanes):
    return Program(tuple(Lane(x.index, x.device, tuple(i)) for x, i in zip(program.lanes, lanes, strict=True)))


SWAPS = [
    (name, lane.index, position)
    for name in GRAPHS
    for ddg, _, program in [made(name)]
    for lane in program.lanes
    for position, pair in enumerate(itertools.pairwise(lane.instructions))
    if must_stay_in_order(ddg, *pair)
]


@pytest.mark.parametrize(("name", "lane", "position"), SWAPS)
def test_dependent_neighbours_cannot_be_swapped(name, lane, position):
    ddg, plan, program = made(name)
    with pytest.raises(ProgramError):
        verify(swapped(program, lane, position), ddg, plan)


def test_there_are_swaps_of_many_kinds():
    pairs = set()
    for name, lane, position in SWAPS:
        instructions = made(name)[2].lanes[lane].instructions
        pairs.add((type(instructions[position]), type(instructions[position + 1])))
    assert {(Run, Send), (Recv, Run), (Run, Free), (Send, Free), (Run, Signal), (Wait, Run), (Recv, Out)} <= pairs


# --- wrong programs, by hand ----------------------------------------------------------------------------------------

CHAIN = (synthetic([(0, 1), (1, 2)], 3), [0, 1, 0], 2)
PAIR = (synthetic([(0, 1)], 2), [0, 1], 2)
CROSS = (synthetic([(0, 2), (1, 2), (0, 3), (1, 3)], 4), [0, 1, 0, 1], 2)
STATE = (synthetic([(0, 1)], 2, writes_state={1: [0]}), [0, 1], 2)
HOME_STATE = (synthetic([], 2, writes_state={1: [0]}), [0, 0], 1)
EFFECTS = (synthetic([], 2, effects=(0, 1)), [0, 1], 2)
WEIGHTS = (synthetic([(0, 1)], 2, weights={"w": (10, [0, 1])}), [0, 1], 2)
ALONE = (synthetic([(0, 1)], 2), [0, 0], 1)

# A right program for each graph; the wrong ones below differ from these in one thing.
RIGHT = {
    "chain": (
        CHAIN,
        """
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
        """,
    ),
    "pair": (
        PAIR,
        """
        lane 0 d0
          run S0: k0
          send v0 -> 1
          free v0
          recv v1 <- 1
          out v1
        lane 1 d1
          recv v0 <- 0
          run S1: k1
          send v1 -> 0
          free v0 v1
        """,
    ),
    "cross": (
        CROSS,
        """
        lane 0 d0
          run S0: k0
          send v0 -> 1
          recv v1 <- 1
          run S2: k2
          free v0 v1
          recv v3 <- 1
          out v2 v3
        lane 1 d1
          run S1: k1
          recv v0 <- 0
          send v1 -> 0
          run S3: k3
          free v0 v1
          send v3 -> 0
          free v3
        """,
    ),
    "state": (
        STATE,
        """
        lane 0 d0
          run S0: k0
          send v0 -> 1
          free v0
          recv c1 <- 1
          recv v1 <- 1
          out v1 c1
        lane 1 d1
          hold s1
          recv v0 <- 0
          run S1: k1
          send c1 -> 0
          send v1 -> 0
          free v0 v1
        """,
    ),
    "home state": (
        HOME_STATE,
        """
        lane 0 d0
          run S0: k0 k1
          out v0 v1 c1
        """,
    ),
    "effects": (
        EFFECTS,
        """
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
        """,
    ),
    "weights": (
        WEIGHTS,
        """
        lane 0 d0
          run S0: k0
          send v0 -> 1
          free v0
          recv v1 <- 1
          out v1
        lane 1 d1
          hold w
          recv v0 <- 0
          run S1: k1
          send v1 -> 0
          free v0 v1
        """,
    ),
    "alone": (
        ALONE,
        """
        lane 0 d0
          run S0: k0
          run S1: k1
          free v0
          out v1
        """,
    ),
}


def written(name):
    (ddg, lanes, count), text = RIGHT[name]
    return ddg, planned(ddg, lanes, count), textwrap.dedent(text).lstrip("\n")


@pytest.mark.parametrize("name", RIGHT)
def test_hand_written_programs_pass(name):
    ddg, plan, text = written(name)
    program = Program.from_text(text)
    assert program.to_text() == text
    verify(program, ddg, plan)


# what → (program, text to replace, its replacement, part of the message)
WRONG = {
    "sends that cross": ("cross", "recv v0 <- 0\n  send v1 -> 0", "send v1 -> 0\n  recv v0 <- 0", "deadlock.*lane 0.*lane 1"),
    "receives that cross": ("cross", "send v0 -> 1\n  recv v1 <- 1", "recv v1 <- 1\n  send v0 -> 1", "deadlock"),
    "wait for the lane's own future": (
        "effects",
        "wait k0 <- 0\n  run S1: k1\n  send v1 -> 0",
        "run S1: k1\n  send v1 -> 0\n  wait k0 <- 0",
        "deadlock",
    ),
    "use after free": ("alone", "run S1: k1\n  free v0", "free v0\n  run S1: k1", "v0 is not on lane 0"),
    "send after free": ("chain", "send v0 -> 1\n  free v0", "free v0\n  send v0 -> 1", "v0 is not on lane 0"),
    "output freed": ("pair", "out v1", "free v1\n  out v1", "v1 is not on lane 0"),
    "double free": ("pair", "free v0 v1", "free v0 v1\n  free v0", "free v0.*freed before"),
    "double free at once": ("pair", "free v0 v1", "free v0 v0 v1", "v0 .*freed before"),
    "free of a weight": ("weights", "free v0 v1", "free v0 v1 w", "w is not this lane's to free"),
    "free of the caller's input": ("pair", "free v0\n  recv v1", "free v0 x\n  recv v1", "x is not this lane's to free"),
    "free of what was never here": ("pair", "free v0\n  recv v1", "free v0 v1\n  recv v1", "v1 is not this lane's to free"),
    "stale read in a segment": ("home state", "k0 k1", "k1 k0", "s1 was overwritten by c1"),
    "stale read in a later segment": ("home state", "run S0: k0 k1", "run S0: k1\n  run S1: k0", "s1 was overwritten by c1"),
    "kernel on the wrong lane": ("chain", "run S0: k0\n", "run S0: k0 k1\n", "k1 belongs on d1"),
    "kernel twice": ("chain", "run S2: k2", "run S2: k2\n  run S3: k2", "k2 runs twice"),
    "kernel twice in a segment": ("chain", "run S2: k2", "run S2: k2 k2", "k2 runs twice"),
    "segment twice": ("alone", "S1", "S0", "segment S0 runs twice"),
    "kernel missing": ("chain", "  run S2: k2\n", "", "k2 never runs"),
    "kernel of another graph": ("chain", "run S2: k2", "run S2: k2 k9", "no kernel 'k9'"),
    "producer after its consumer in a segment": (
        "alone",
        "run S0: k0\n  run S1: k1\n  free v0\n",
        "run S0: k1 k0\n",
        "v0 is not",
    ),
    "output not handed out": ("effects", "out v0 v1", "out v0\n  free v1", "v1 is not handed out"),
    "nothing handed out": ("alone", "  out v1\n", "", "hands nothing out"),
    "handed out twice": ("alone", "out v1", "out v1\n  out v1", "only lane 0 hands out, once"),
    "handed out elsewhere": ("pair", "free v0 v1", "free v0\n  out v1", "only lane 0 hands out"),
    "handed out before it is made": (
        "alone",
        "run S1: k1\n  free v0\n  out v1",
        "out v1\n  run S1: k1\n  free v0",
        "v1 is not on",
    ),
    "overwritten input left at its old content": (
        "state",
        "recv c1 <- 1\n  recv v1 <- 1\n  out v1 c1\nlane 1 d1\n  hold s1\n  recv v0 <- 0\n  run S1: k1\n  send c1 -> 0\n",
        "recv v1 <- 1\n  out v1\nlane 1 d1\n  hold s1\n  recv v0 <- 0\n  run S1: k1\n",
        "the caller's s1 holds s1 on lane 0, not c1",
    ),
    "overwritten input not handed out": ("state", "out v1 c1", "out v1", "c1 is not handed out"),
    "leak": ("pair", "free v0 v1", "free v1", "lane 1 never frees v0"),
    "leak of what was received": ("chain", "  free v1\n  out v2", "  out v2", "lane 0 never frees v1"),
    "wait without a signal": ("effects", "  signal k0 -> 1\n", "", "deadlock|without answering"),
    "leak at home": ("alone", "  free v0\n", "", "lane 0 never frees v0"),
    "send of a value that is not there": (
        "chain",
        "run S0: k0\n  send v0 -> 1",
        "send v0 -> 1\n  run S0: k0",
        "v0 is not on lane 0",
    ),
    "send of another value": ("chain", "send v1 -> 0", "send v2 -> 0", "deadlock"),
    "send of no value": ("chain", "send v1 -> 0", "send v9 -> 0", "no value 'v9'"),
    "receive of no value": ("chain", "recv v1 <- 1", "recv v9 <- 1", "no value 'v9'"),
    "free of no value": ("chain", "free v1\n  out", "free v1 v9\n  out", "no value 'v9'"),
    "out of no value": ("chain", "out v2", "out v2 v9", "no value 'v9'"),
    "send to itself": ("chain", "send v0 -> 1", "send v0 -> 0", "no other lane 0"),
    "send to no lane": ("chain", "send v0 -> 1", "send v0 -> 2", "no other lane 2"),
    "send to a lane that ended": ("pair", "free v0 v1", "send v0 -> 0\n  free v0 v1", "lane 0 ends without answering"),
    "receive of what is here": (
        "pair",
        "free v0\n  recv v1 <- 1\n  out v1\nlane 1 d1\n  recv v0 <- 0\n",
        "send v0 -> 1\n  free v0\n  recv v1 <- 1\n  out v1\nlane 1 d1\n  recv v0 <- 0\n  recv v0 <- 0\n",
        "v0 is already on lane 1",
    ),
    "state not held": (
        "state",
        "hold s1\n  recv v0 <- 0\n  run S1: k1",
        "recv v0 <- 0\n  run S1: k1",
        "s1 is not on lane 1",
    ),
    "weight not held": ("weights", "  hold w\n", "", "w is not on lane 1"),
    "weight held too late": (
        "weights",
        "hold w\n  recv v0 <- 0\n  run S1: k1",
        "recv v0 <- 0\n  run S1: k1\n  hold w",
        "w is not on",
    ),
    "hold at home": ("weights", "run S0: k0", "hold w\n  run S0: k0", "w is not something that this lane can keep"),
    "hold of what lives for one call": (
        "pair",
        "recv v0 <- 0",
        "hold x\n  recv v0 <- 0",
        "x is not something that this lane can keep",
    ),
    "effects without signal and wait": (
        "effects",
        "signal k0 -> 1\n  recv v1 <- 1\n  out v0 v1\nlane 1 d1\n  wait k0 <- 0\n",
        "recv v1 <- 1\n  out v0 v1\nlane 1 d1\n",
        r"k1 can start before k0 is done.*effect",
    ),
    "effects ordered the wrong way round": (
        "effects",
        "signal k0 -> 1\n  recv v1 <- 1\n  out v0 v1\nlane 1 d1\n  wait k0 <- 0\n  run S1: k1\n",
        "recv v1 <- 1\n  signal k0 -> 1\n  out v0 v1\nlane 1 d1\n  run S1: k1\n  wait k0 <- 0\n",
        "deadlock",
    ),
    "signal before the kernel has run": (
        "effects",
        "run S0: k0\n  signal k0 -> 1",
        "signal k0 -> 1\n  run S0: k0",
        "k0 has not run",
    ),
    "signal for a kernel of another lane": ("effects", "signal k0 -> 1", "signal k1 -> 1", "deadlock"),
    "wait for another lane": ("effects", "wait k0 <- 0", "wait k0 <- 1", "no other lane 1"),
    "lanes of other devices": ("chain", "lane 1 d1", "lane 1 d7", "d7"),
    "lane of another device": ("alone", "lane 0 d0", "lane 0 d1", "d1"),
    "lane too many": ("alone", "out v1\n", "out v1\nlane 1 d1\n", "d1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_programs_are_refused(what):
    name, before, after, message = WRONG[what]
    ddg, plan, text = written(name)
    assert text.count(before) == 1
    with pytest.raises(ProgramError, match=message):
        verify(Program.from_text(text.replace(before, after)), ddg, plan)


def test_a_new_version_needs_the_storage_that_it_updates():
    ddg = synthetic([(0, 1)], 3, writes_state={2: []}, reads_input=())
    plan = planned(ddg, [0, 1, 0], 2)
    text = schedule(ddg, plan).to_text()
    wrong = text.replace("  out", "  send c2 -> 1\n  out") + "  recv c2 <- 0\n"
    with pytest.raises(ProgramError, match="lane 1 does not hold s2, which c2 updates"):
        verify(Program.from_text(wrong), ddg, plan)


def test_war_across_lanes_needs_a_signal():
    ddg = synthetic([], 2, writes_state={1: [0]}, reads_input=())
    plan = planned(ddg, [1, 0], 2)
    text = schedule(ddg, plan).to_text()
    unordered = text.replace("  wait k0 <- 1\n", "").replace("  signal k0 -> 0\n", "")
    assert unordered != text
    with pytest.raises(ProgramError, match=r"k1 can start before k0 is done.*war s1"):
        verify(Program.from_text(unordered), ddg, plan)


def test_order_does_not_flow_from_a_receiver_to_a_sender():
    # Under rendezvous, k1 could not start before lane 1 has received x, after k0 there. A send that does not wait lets it.
    ddg = synthetic([], 2, effects=(0, 1), reads_input=())
    plan = planned(ddg, [1, 0], 2)
    text = textwrap.dedent("""
        lane 0 d0
          send x -> 1
          run S1: k1
          recv v0 <- 1
          out v0 v1
        lane 1 d1
          run S0: k0
          recv x <- 0
          free x
          send v0 -> 0
          free v0
        """)
    with pytest.raises(ProgramError, match="k1 can start before k0 is done"):
        verify(Program.from_text(text), ddg, plan)


def test_order_flows_through_a_third_lane():
    ddg = synthetic([], 2, effects=(0, 1), reads_input=(), outputs=[0])
    plan = planned(ddg, [0, 2], 3)
    text = textwrap.dedent("""
        lane 0 d0
          run S0: k0
          send x -> 1
          out v0
        lane 1 d1
          recv x <- 0
          send x -> 2
          free x
        lane 2 d2
          recv x <- 1
          run S1: k1
          free x
        """)
    verify(Program.from_text(text), ddg, plan)


def test_an_output_is_still_there_at_exit():
    # The caller computes the outputs from what was handed out: giving its storage back afterwards is a use after free.
    ddg, plan, text = written("alone")
    with pytest.raises(ProgramError, match="v1"):
        verify(Program.from_text(text.replace("out v1", "out v1\n  free v1")), ddg, plan)


def test_a_lane_cannot_hold_a_version_that_is_yet_to_be_made():
    # c1 is what k1 makes of s1 in this very call; before the lane starts there is nothing to bring a replica up to.
    ddg, plan, text = written("state")
    stolen = text.replace("hold s1", "hold c1").replace("run S1: k1\n  send c1 -> 0", "send c1 -> 0\n  hold s1\n  run S1: k1")
    with pytest.raises(ProgramError, match="c1"):
        verify(Program.from_text(stolen), ddg, plan)


def test_a_lane_does_not_free_the_replica_that_it_holds():
    # Received for this call, then held from call to call, then freed: the next call's replica is gone.
    ddg, plan, text = written("weights")
    wrong = text.replace("run S0: k0", "send w -> 1\n  run S0: k0").replace("hold w", "recv w <- 0\n  hold w")
    wrong = wrong.replace("free v0 v1", "free v0 v1 w")
    with pytest.raises(ProgramError, match="w"):
        verify(Program.from_text(wrong), ddg, plan)


# --- programs that pass compute what the graph computes -------------------------------------------------------------


class Wrong(Exception):
    """An execution went wrong."""


def contents(graph):
    """What each value holds when kernels run one after the other: inputs stand for themselves, the rest are hashes."""
    now = {v.storage: v.name for v in graph.values.values() if graph.producer(v.name) is None}
    result = dict(now)
    for kernel in graph.kernels:
        read = tuple(now[graph.values[v].storage] for v in kernel.inputs)
        for v in kernel.outputs:
            result[v] = now[graph.values[v].storage] = hash((kernel.name, v, read))
    return result


def execute(program, graph, draw, rendezvous):
    """Runs ``program`` on lanes that take turns at random; sends wait for their receives only under ``rendezvous``."""
    right = contents(graph)
    first = {v.storage: v.name for v in graph.values.values() if graph.producer(v.name) is None}
    memory = [dict(first) if lane.index == 0 else {} for lane in program.lanes]
    held = [set(first) if lane.index == 0 else set() for lane in program.lanes]
    queues = {pair: [] for pair in itertools.permutations(range(len(memory)), 2)}
    at = [0] * len(memory)
    effects, out = [], ()

    def load(lane, value):
        storage = graph.values[value].storage
        if memory[lane].get(storage) != right[value]:
            raise Wrong(f"{value} is not on lane {lane}")
        return right[value]

    def store(lane, value):
        storage = graph.values[value].storage
        if (storage == value) == (storage in memory[lane]):
            raise Wrong(f"no place for {value} on lane {lane}")
        memory[lane][storage] = right[value]

    def used_outside(lane, values):
        """Of the values made in a segment, those that the lane's other instructions name."""
        found = set()
        for i in program.lanes[lane].instructions:
            if isinstance(i, (Send, Out)):
                found |= {i.value} if isinstance(i, Send) else set(i.values)
            elif isinstance(i, Run):
                own = {v for k in i.kernels for v in graph[k].outputs}
                found |= {v for k in i.kernels for v in graph[k].inputs} - own
        return [v for v in values if v in found]

    def step(lane):
        nonlocal out
        i = program.lanes[lane].instructions[at[lane]]
        if isinstance(i, (Send, Signal)):
            message = ("value", i.value) if isinstance(i, Send) else ("done", i.kernel)
            if isinstance(i, Send):
                load(lane, i.value)
            if rendezvous:
                there = program.lanes[i.to].instructions[at[i.to] : at[i.to] + 1]
                if there != ((Recv(i.value, lane) if isinstance(i, Send) else Wait(i.kernel, lane)),):
                    return False
                if isinstance(i, Send):
                    store(i.to, i.value)
                at[i.to] += 1
            else:
                queues[lane, i.to].append(message)
        elif isinstance(i, (Recv, Wait)):
            message = ("value", i.value) if isinstance(i, Recv) else ("done", i.kernel)
            if not queues[i.source, lane]:
                return False
            if queues[i.source, lane].pop(0) != message:
                raise Wrong("another message came")
            if isinstance(i, Recv):
                store(lane, i.value)
        elif isinstance(i, Hold):
            for value in i.values:
                memory[lane][value] = first[value]
                held[lane].add(value)
        elif isinstance(i, Free):
            for value in i.values:
                if value in held[lane] or value not in memory[lane]:
                    raise Wrong(f"lane {lane} cannot free {value}")
                del memory[lane][value]
        elif isinstance(i, Out):
            out = i.values
        else:
            inside = {}
            for name in i.kernels:
                kernel = graph[name]
                read = tuple(inside[v] if v in inside else load(lane, v) for v in kernel.inputs)
                for v in kernel.outputs:
                    assert hash((name, v, read)) == right[v]
                    if graph.values[v].storage == v:
                        inside[v] = right[v]
                    else:
                        store(lane, v)
                effects.extend([name] if kernel.effect else [])
            for v in used_outside(lane, inside):
                store(lane, v)
        at[lane] += 1
        return True

    while unfinished := [x.index for x in program.lanes if at[x.index] < len(x.instructions)]:
        draw.shuffle(unfinished)
        if not any(step(lane) for lane in unfinished):
            raise Wrong("deadlock")
    if any(queues.values()):
        raise Wrong("a message was never taken")
    if effects != [k.name for k in graph.kernels if k.effect]:
        raise Wrong("effects out of order")
    for value in (*graph.output_values, *graph.mutated.values()):
        load(0, value)
        if value not in out:
            raise Wrong(f"{value} is not handed out")
    for lane, left in enumerate(memory):
        if set(left) - held[lane] - (set(out) if lane == 0 else set()):
            raise Wrong(f"lane {lane} leaks")


def changed(program, draw):
    """``program`` with one to three instructions moved, swapped, repeated, left out, or with their names in another order."""
    lanes = [list(x.instructions) for x in program.lanes]
    for _ in range(draw.choice((1, 1, 2, 3))):
        lane = draw.choice([x for x in lanes if x])
        a, b = draw.randrange(len(lane)), draw.randrange(len(lane))
        kind = draw.randrange(6)
        if kind == 0:
            lane[a], lane[b] = lane[b], lane[a]
        elif kind in (1, 2):
            lane.insert(b if kind == 1 else max(0, a - 1), lane.pop(a))
        elif kind == 3:
            lane.insert(b, lane[a])
        elif kind == 4 and isinstance(lane[a], Run):
            lane[a] = Run(lane[a].segment, tuple(draw.sample(lane[a].kernels, len(lane[a].kernels))))
        elif kind == 5 and isinstance(lane[a], (Send, Signal)):
            # A pair goes, so that nothing waits for it.
            gone, source = lane.pop(a), lanes.index(lane)
            answer = Recv(gone.value, source) if isinstance(gone, Send) else Wait(gone.kernel, source)
            if answer in lanes[gone.to]:
                lanes[gone.to].remove(answer)
    return rebuilt(program, lanes)


@pytest.mark.parametrize("seed", range(40))
def test_what_passes_computes_what_the_graph_computes(seed):
    draw = random.Random(seed)
    count = draw.choice((3, 5, 8))
    some = lambda limit, top: sorted(draw.sample(range(limit), draw.randint(0, min(top, limit))))  # noqa: E731
    ddg = synthetic(
        [(i, j) for j in range(count) for i in range(j) if draw.random() < 0.3],
        count,
        weights={f"w{i}": (10, some(count, 3)) for i in range(2)},
        reads_input=some(count, 2),
        writes_state={w: some(w, 2) for w in some(count, 2)},
        effects=some(count, 3),
    )
    plan = planned(ddg, [draw.randrange(3) for _ in range(count)], 3)
    graph = ddg.graph["kernels"]
    program = schedule(ddg, plan, one_kernel_a_segment=seed % 2 == 0)
    passed = [program]
    for _ in range(60):
        other = changed(program, draw)
        try:
            verify(other, ddg, plan)
        except ProgramError:
            continue
        passed.append(other)
    for candidate in passed:
        for rendezvous in (True, False, True, False):
            try:
                execute(candidate, graph, draw, rendezvous)
            except Wrong as wrong:
                pytest.fail(f"verify passed this, but {wrong}:\n{candidate.to_text()}")
