"""State that lanes keep: what can be kept, and the program of a small graph, written out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tessera_compile.passes import depend, partition, schedule, verify
from tessera_compile.passes.errors import ProgramError
from tessera_compile.passes.ir import KernelGraph, Profile, Program
from tessera_compile.passes.keeping import keep
from tessera_compile.passes.mix import mix_of_graphs, worth
from tessera_compile.passes.problem import make_problem, moves
from tests.graphs import cpus, lowered, synthetic

DEVICES = cpus(2)


def state_graph():
    """k0 reads state s1 as it was; k1 reads k0 and overwrites it; k2 reads k1."""
    ddg = synthetic([(0, 1), (1, 2)], 3, writes_state={1: [0]})
    return depend(keep(ddg.graph["kernels"], ["s1"]))


def planned(ddg, *places):
    profile = Profile.of({f"k{i}": dict.fromkeys(DEVICES.names, 5.0) for i in range(3)})
    where = {f"k{i}": f"d{g}" for i, g in enumerate(places)}
    plan = partition(ddg, profile, DEVICES, placement=where)
    return plan, schedule(ddg, plan)


def test_the_writers_lane_keeps_it_and_a_reader_elsewhere_is_sent_its_content():
    ddg = state_graph()
    plan, program = planned(ddg, 0, 1, 0)
    assert program.to_text() == (
        "lane 0 d0\n"
        "  recv s1 <- 1\n"
        "  run S0: k0\n"
        "  free s1\n"
        "  send v0 -> 1\n"
        "  free v0\n"
        "  recv v1 <- 1\n"
        "  run S2: k2\n"
        "  free v1\n"
        "  out v2\n"
        "lane 1 d1\n"
        "  send s1 -> 0\n"
        "  recv v0 <- 0\n"
        "  run S1: k1\n"
        "  free v0\n"
        "  send v1 -> 0\n"
        "  free v1\n"
    )
    verify(program, ddg, plan)
    for lane, position, instruction in program:
        with pytest.raises(ProgramError):
            verify(program.without(lane, position), ddg, plan)
        del instruction
    held = Program.from_text(program.to_text().replace("lane 1 d1\n", "lane 1 d1\n  hold s1\n"))
    with pytest.raises(ProgramError, match="not something that this lane can keep a replica of"):
        verify(held, ddg, plan)


def test_with_its_readers_beside_it_nothing_of_it_moves():
    ddg = state_graph()
    plan, program = planned(ddg, 1, 1, 1)
    assert "s1" not in program.to_text().replace("S1", "")
    verify(program, ddg, plan)
    assert plan.cut_bytes == 2000  # x goes there, and v2 comes back.
    assert {d: load.memory_bytes for d, load in plan.loads.items()}["d1"] >= 500


def test_the_planner_counts_what_the_program_sends():
    ddg = state_graph()
    for places in [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)]:
        plan, program = planned(ddg, *places)
        verify(program, ddg, plan)
        sent = sum(ddg.graph["kernels"].values[x.value].bytes for _, _, x in program if hasattr(x, "value") and hasattr(x, "to"))
        assert plan.cut_bytes == sent
        problem = make_problem(ddg, Profile.of({f"k{i}": dict.fromkeys(DEVICES.names, 5.0) for i in range(3)}), DEVICES)
        assert sum(flow.bytes for flow, _, _ in moves(problem, places)) == sent


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_plans_are_found_and_moving_the_state_is_priced(objective):
    ddg = state_graph()
    slow = {"d0": 50.0, "d1": 5.0}
    profile = Profile.of({"k0": slow, "k1": slow, "k2": slow})
    plan = partition(ddg, profile, DEVICES, objective=objective)
    verify(schedule(ddg, plan), ddg, plan)
    assert set(plan.placement.values()) == {"d1"}


def test_between_two_graphs_it_moves_once():
    ddgs = [state_graph(), state_graph()]
    profile = Profile.of({f"k{i}": dict.fromkeys(DEVICES.names, 5.0) for i in range(3)})
    for ddg in ddgs:
        ddg.graph["storages"] = {"s1": 77}
    mix = mix_of_graphs([(ddgs[0], profile, 1.0), (ddgs[1], profile, 100.0)], DEVICES, alike=False)
    (move,) = [m for m in mix.moves if m.value == "state 77"]
    assert (move.source, move.readers, move.bytes, move.count) == (1, (4,), 500, 1.0)
    apart, together = worth(mix, (0, 0, 0, 0, 1, 0)).link, worth(mix, (0, 1, 0, 0, 1, 0)).link
    # Apart, v0 of the first graph stays, and the state goes from its k1 to the second's.
    once = DEVICES.us("d0", "d1", 500)
    assert apart[0, 1] - together[0, 1] == pytest.approx(once - DEVICES.us("d0", "d1", 1000))
    (held,) = [r for r in mix.residents if r[0].endswith("s1")]
    assert held[1:] == (500, (1, 4), False)


def test_only_what_a_lane_can_have_for_itself_is_kept():
    def returns_a_view(x, s):
        s.copy_(s + x)
        return s[0]

    def plain(x, s):
        s.copy_(s + x)
        return x * 2

    x, s = torch.ones(2, 2), torch.zeros(2, 2)
    for function, kept in ((returns_a_view, False), (plain, True)):
        graph = lowered(function, (x, s))
        state = next(iter(graph.mutated))
        assert keep(graph, graph.inputs).kept == ((state,) if kept else ())


def test_a_kept_graph_survives_json_and_shows_what_is_kept():
    graph = state_graph().graph["kernels"]
    again = KernelGraph.from_json(graph.to_json())
    assert again == graph
    assert again != replace(graph, kept=())
    assert "mutate s1 = c1 kept" in graph.to_text()
