"""DDG + Plan → :class:`Program`: one instruction list a lane, correct under rendezvous sends.

Kernels are walked in the lowered order. A lane's open segment ends *after* a kernel whose value leaves the device (so that
the send need not wait for the rest) and *before* a kernel with a remote input that was produced after the segment began, or
with a second effect. A plan for latency also ends it before any kernel with a remote input: what comes before need not wait for
it, as the plan's makespan assumes.
So every kernel of a segment comes, in the lowered order, before every kernel of a segment that depends on it across lanes.

Each send stands before the next run of the lane that made its value, and its receive at the same point of a global order of
runs and transfers, as late in it as that (or the need of the receiver) allows. A lane's list is the global order restricted to
that lane; since executing it in that order is possible, no in-order execution can deadlock. Of a value whose readers there need
some boxes alone (``parts.py``) just those are sent. Storage is freed after the last
instruction of the lane that uses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set

import networkx as nx

from ..ptx_tools.footprints import Box
from .errors import PlanError
from .ir import (
    Free,
    Hold,
    Instruction,
    KernelGraph,
    Lane,
    Out,
    Plan,
    Profile,
    Program,
    Recv,
    Run,
    Send,
    Signal,
    Wait,
    segment_values,
)
from .parts import parts


def schedule(
    ddg: nx.DiGraph,
    plan: Plan,
    *,
    one_kernel_a_segment: bool = False,
    profile: Profile | None = None,
    longest_us: float = math.inf,
) -> Program:
    """Turns a plan into instruction lists.

    Args:
        one_kernel_a_segment: cut after every kernel, so that compiled pieces are shared between equal kernels.
        longest_us: cut where a segment would take longer than that by ``profile``: while one runs its lane serves no other
            request. Kernels are not cut.

    Raises:
        PlanError: the plan is for another graph.
    """
    graph: KernelGraph = ddg.graph["kernels"]
    names = [k.name for k in graph.kernels]
    if set(names) != set(plan.placement):
        raise PlanError("the plan places other kernels than the dependence graph has; partition this graph again")
    ddg = _with_order_of_memory(ddg, graph)
    lane_of = {k: plan.devices.index(plan.placement[k]) for k in names}
    home = plan.devices.index(plan.home)
    took = {k: 0.0 if profile is None else profile.us(k, plan.placement[k]) for k in names}
    longest = -math.inf if one_kernel_a_segment else longest_us
    segments = _segments(ddg, graph, lane_of, home, took, longest, eager=plan.objective == "latency")
    events = _events(ddg, graph, lane_of, segments, home, len(plan.devices))
    kept = {v: lane_of[graph.keeper(v) or ""] for v in graph.kept}
    return Program(
        tuple(
            Lane(index, device, _lane(graph, events[index], index == home, {v for v, at in kept.items() if at == index}))
            for index, device in enumerate(plan.devices)
        )
    )


def _with_order_of_memory(ddg: nx.DiGraph, graph: KernelGraph) -> nx.DiGraph:
    """With two kinds of edges that bytes may not ask for: from who reads an overwritten input to who overwrites it, since a lane
    holds one version of it at a time; and from who makes a value to who takes it, since it must have room for what it takes."""
    makers = {(graph.producer(v), kernel.name) for kernel in graph.kernels for v in kernel.inputs}
    missing = [(maker, taker) for maker, taker in makers if maker not in (None, taker) and not ddg.has_edge(maker, taker)]
    missing += [
        (reader, kernel.name)
        for kernel in graph.kernels
        for value in kernel.writes
        for reader in graph.readers(value)
        if reader != kernel.name and not ddg.has_edge(reader, kernel.name) and not nx.has_path(ddg, kernel.name, reader)
    ]
    if not missing:
        return ddg
    ordered = nx.DiGraph(ddg)
    ordered.add_edges_from(missing)
    return ordered


def _wanted_at_home(graph: KernelGraph) -> dict[str, None]:
    """What the outputs are computed from, and the new content of overwritten inputs, but for those that another lane keeps."""
    return dict.fromkeys([*graph.output_values, *(v for name, v in graph.mutated.items() if name not in graph.kept)])


def _segments(
    ddg: nx.DiGraph,
    graph: KernelGraph,
    lane_of: Mapping[str, int],
    home: int,
    took: Mapping[str, float],
    longest: float,
    eager: bool,
) -> list[tuple[str, ...]]:
    """Runs of kernels on one lane, in the order in which they end. eager: none waits for what only a later kernel needs.
    ``took``: µs of each kernel, ``longest``: of a run, which a kernel alone may exceed."""
    position = {k.name: i for i, k in enumerate(graph.kernels)}
    wanted = _wanted_at_home(graph)
    open_at: dict[int, list[str]] = {}
    done: list[tuple[str, ...]] = []

    length: dict[int, float] = {}

    def close(lane: int) -> None:
        length.pop(lane, None)
        kernels = open_at.pop(lane, None)
        if kernels:
            done.append(tuple(kernels))

    for kernel in graph.kernels:
        lane = lane_of[kernel.name]
        remote = [position[p] for p in ddg.predecessors(kernel.name) if lane_of[p] != lane]
        if lane in open_at and any(eager or p > position[open_at[lane][0]] for p in remote):
            close(lane)
        # A compiler may reorder two draws from one generator, or two prints, that it sees in one segment.
        if kernel.effect and any(graph[k].effect for k in open_at.get(lane, ())):
            close(lane)
        if length.get(lane, 0.0) + took[kernel.name] > longest:
            close(lane)
        length[lane] = length.get(lane, 0.0) + took[kernel.name]
        open_at.setdefault(lane, []).append(kernel.name)
        leaves = any(lane_of[s] != lane for s in ddg.successors(kernel.name))
        home_needs = lane != home and any(v in wanted for v in kernel.outputs)
        if leaves or home_needs:
            close(lane)
    for lane in sorted(open_at, key=lambda x: position[open_at[x][-1]]):
        close(lane)
    return sorted(done, key=lambda kernels: position[kernels[-1]])


def _events(
    ddg: nx.DiGraph, graph: KernelGraph, lane_of: Mapping[str, int], segments: list[tuple[str, ...]], home: int, count: int
) -> dict[int, list[Instruction]]:
    """The global order of runs and transfers, split by lane."""
    end = len(segments)
    segment_of = {k: i for i, kernels in enumerate(segments) for k in kernels}
    lanes = [lane_of[kernels[0]] for kernels in segments]
    held: dict[int, dict[str, None]] = {lane: {} for lane in range(count)}
    wanted = _wanted_at_home(graph)
    # before[i] = the transfers between segments i − 1 and i, older values first: (lane, instruction) of the giver and the taker.
    before: dict[int, list[tuple[int, Instruction, int, Instruction]]] = {i: [] for i in range(end + 1)}

    def needed_first(readers: Iterable[str], target: int) -> int:
        return min((segment_of[r] for r in readers if lane_of[r] == target), default=end)

    def deadline(made_in: int, source: int, needed: int) -> int:
        """As late as possible, but before the source lane goes on to its next segment."""
        return min(needed, next((i for i in range(made_in + 1, end) if lanes[i] == source), end))

    def transfer(value: str, made_in: int, source: int, target: int, needed: int, boxes: tuple[Box, ...] = ()) -> int:
        at = deadline(made_in, source, needed)
        before[at].append((source, Send(value, target, boxes), target, Recv(value, source, boxes)))
        return at

    for value in graph.values.values():
        if graph.producer(value.name) is not None or value.device == "host":
            continue
        readers = graph.readers(value.name)
        keeper = graph.keeper(value.name)
        owner = home if keeper is None else lane_of[keeper]
        for target in dict.fromkeys(lane_of[r] for r in readers):
            if target == owner:
                continue
            if graph.resident(value.name) and keeper is None:
                held[target][value.name] = None
            else:
                transfer(value.name, -1, owner, target, needed_first(readers, target))
    for number, kernels in enumerate(segments):
        lane = lanes[number]
        arrives: dict[int, int] = {}  # Earliest transfer from this segment to each lane.
        for name in (v for kernel in kernels for v in graph[kernel].outputs):
            readers = graph.readers(name)
            targets = dict.fromkeys(lane_of[r] for r in readers)
            if name in wanted:
                targets[home] = None
            there = parts(ddg, name) if any(target != lane for target in targets) else ()
            for target in targets:
                if target != lane:
                    version = graph.values[name].storage != name
                    boxes = tuple(b for p in there if version or any(lane_of[r] == target for r in p.readers) for b in p.boxes)
                    at = transfer(name, number, lane, target, needed_first(readers, target), boxes)
                    arrives[target] = min(at, arrives.get(target, end))
        for kernel in kernels:
            for after in ddg.successors(kernel):
                target, needed = lane_of[after], segment_of[after]
                if target == lane or arrives.get(target, end + 1) <= needed:
                    continue  # A value that crosses before carries the order along.
                at = arrives[target] = deadline(number, lane, needed)
                before[at].append((lane, Signal(kernel, target), target, Wait(kernel, lane)))

    events: dict[int, list[Instruction]] = {lane: [Hold(tuple(names))] if names else [] for lane, names in held.items()}
    for number in range(end + 1):
        for source, give, target, take in before[number]:
            events[source].append(give)
            events[target].append(take)
        if number < end:
            events[lanes[number]].append(Run(f"S{number}", segments[number]))
    events[home].append(Out(tuple(wanted)))
    return events


def _lane(graph: KernelGraph, events: list[Instruction], is_home: bool, kept: Set[str]) -> tuple[Instruction, ...]:
    """Adds the frees: each storage that the lane owns, after the last instruction that uses it."""
    last: dict[str, int] = {}
    for at, event in enumerate(events):
        if isinstance(event, (Send, Recv)):
            last[event.value] = at
        elif isinstance(event, Out):
            last.update(dict.fromkeys(event.values, at))
    for at, io in segment_values(graph, events).items():
        for value in (*io.inputs, *io.outputs):
            last[value] = max(at, last.get(value, at))
    result: list[Instruction] = []
    for at, event in enumerate(events):
        result.append(event)
        ending = tuple(v for v in last if last[v] == at and _owned(graph, v, is_home, kept)) if not isinstance(event, Out) else ()
        if ending:
            result.append(Free(ending))
    return tuple(result)


def _owned(graph: KernelGraph, value: str, is_home: bool, kept: Set[str]) -> bool:
    """Whether the lane allocated the storage of ``value`` for this request alone; ``kept``: the state that it keeps."""
    if graph.values[value].storage != value:
        return False
    if graph.keeper(value) is not None:
        return value not in kept  # Another lane's state, of which it was sent a copy.
    if graph.resident(value):
        return False
    if graph.producer(value) is None:
        return not is_home and graph.values[value].device != "host"  # Sizes that the caller passed are on every lane.
    return True
