"""The planning problem as arrays, and the value of a placement: what ``partition`` minimises and every report quotes.

With kernels in the lowered order, x[k] the device of kernel k, t[k, g] its time there (µs) and
m[v, u, g] = latency + bytes / bandwidth + price of a cut the time to move value v from u to g:

- compute   T[g] = Σ_k t[k, g] over x[k] = g                                        (:func:`evaluate`)
- link u→g  L[u, g] = Σ m[v, u, g] over the moves, one for each (value, destination); links are full duplex; the parts of a
  value that different kernels read (``parts.py``) count as values
- throughput: where transfers overlap compute a link is a resource like a device, bottleneck = max(max_g T[g], max_{u,g} L[u,
  g]);
  where they can't, bottleneck = max_g (T[g] + Σ_u L[u, g] + Σ_u L[g, u])
- latency: the makespan of list scheduling in the lowered order: a kernel starts when its device has finished the kernels
  before it and its inputs have arrived; a value arrives m after it was made; links do not queue.
- memory of g: weights, constants and state of the kernels on g, plus, where any kernel runs there or it is home, ``inflight``
  times the graph's peak of live activations. A lane runs its kernels in the lowered order, so it never holds more at once
  than is live at one point of that order; the peak over the whole graph is therefore an upper bound for each lane.

Inputs start on the home device (the cluster's first); outputs and overwritten state end there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np

from .cluster import Cluster
from .errors import PlanError
from .ir import KernelGraph, Load, Profile
from .parts import parts

HOME = -1


@dataclass(frozen=True)
class Flow:
    """A value, or a part of it, and who needs it: made by kernel ``source`` (:data:`HOME` for inputs), read by ``readers``,
    perhaps by home.

    Readers before ``source`` read the content that it left in the call before: state that its lane keeps.
    ``unless`` is the kernel on whose device the value is current anyway (a replica of state that this kernel overwrites).
    """

    value: str
    bytes: int
    source: int
    readers: tuple[int, ...]
    to_home: bool
    unless: int | None = None


@dataclass(frozen=True)
class Problem:
    """Arrays of one planning problem. ``times[k, g]`` is µs, infinite where kernel k cannot run on device g."""

    kernels: tuple[str, ...]
    devices: tuple[str, ...]
    times: np.ndarray
    flows: tuple[Flow, ...]
    order_edges: tuple[tuple[int, int], ...]
    residents: tuple[tuple[str, int, tuple[int, ...], bool], ...]
    activation_bytes: int
    cluster: Cluster
    inflight: int
    overlap: bool
    cut_us: tuple[float, ...]

    def us(self, source: int, target: int, nbytes: int) -> float:
        """m: the link's time for ``nbytes``, and what the dearer device loses by cutting a segment there; 0 within a device."""
        if source == target:
            return 0.0
        link = self.cluster.us(self.devices[source], self.devices[target], nbytes)
        return link + max(self.cut_us[source], self.cut_us[target])


@dataclass(frozen=True)
class Evaluation:
    """The value of a placement; see the formulas at the top of this file."""

    bottleneck_us: float
    makespan_us: float
    loads: Mapping[str, Load]
    cut_values: int
    cut_bytes: int

    def fits(self, cluster: Cluster) -> bool:
        return all(self.loads[d.name].memory_bytes <= d.memory for d in cluster.devices)


def make_problem(ddg: nx.DiGraph, profile: Profile, cluster: Cluster, *, inflight: int = 1, overlap: bool = True) -> Problem:
    """Collects the arrays.

    Raises:
        PlanError: the graph has a cycle, or was not made by ``depend``.
        ProfileError: a kernel has no time, or one that is not a time.
    """
    graph: KernelGraph | None = ddg.graph.get("kernels")
    if graph is None:
        raise PlanError('the dependence graph lacks ddg.graph["kernels"]; make it with depend()')
    if not nx.is_directed_acyclic_graph(ddg):
        cycle = " -> ".join(edge[0] for edge in nx.find_cycle(ddg))
        raise PlanError(f"the dependence graph has a cycle: {cycle}")
    names = tuple(k.name for k in graph.kernels)
    profile.check(names, cluster.names)
    index = {name: i for i, name in enumerate(names)}
    times = np.array([[profile.us(k, d) for d in cluster.names] for k in names], dtype=float).reshape(
        len(names), len(cluster.names)
    )

    final = {graph.values[v].storage: v for v in graph.mutated.values()}
    writer = {x: index[k.name] for k in graph.kernels for x in k.writes}
    flows = []
    for value in graph.values.values():
        readers = tuple(index[r] for r in graph.readers(value.name))
        made_by = graph.producer(value.name)
        if graph.keeper(value.name) is not None:
            at = writer[value.storage]
            readers = tuple(r for r in readers if r != at)
            if value.storage == value.name and readers:
                flows.append(Flow(value.name, value.bytes, at, readers, False))
        elif value.storage != value.name:
            if final[value.storage] == value.name:
                (part,) = parts(ddg, value.name)
                flows.append(Flow(value.name, part.bytes, index[made_by or ""], (), True))
        elif value.origin == "state":
            readers = tuple(r for r in readers if r != writer[value.name])
            if readers:
                flows.append(Flow(value.name, value.bytes, HOME, readers, False, unless=writer[value.name]))
        elif made_by is not None:
            to_home = value.name in graph.output_values
            for part in parts(ddg, value.name) if readers or to_home else ():
                flows.append(Flow(value.name, part.bytes, index[made_by], tuple(index[r] for r in part.readers), to_home))
        elif value.origin == "input" and value.device != "host" and readers:
            flows.append(Flow(value.name, value.bytes, HOME, readers, False))
    order_edges = tuple((index[a], index[b]) for a, b, kind in ddg.edges(data="kind") if kind != "raw")
    residents = tuple(
        (v.name, v.bytes, (writer[v.name],), False)
        if graph.keeper(v.name) is not None
        else (v.name, v.bytes, tuple(index[r] for r in graph.readers(v.name)), v.origin == "state")
        for v in graph.values.values()
        if graph.resident(v.name) and v.storage == v.name and v.device != "host"
    )
    cut_us = tuple(float(profile.cut_us.get(d, 0.0)) for d in cluster.names)
    return Problem(
        names, cluster.names, times, tuple(flows), order_edges, residents, _peak(graph), cluster, inflight, overlap, cut_us
    )


def _peak(graph: KernelGraph) -> int:
    """Most bytes of inputs and activations that are live at one point of the lowered order."""
    position = {k.name: i for i, k in enumerate(graph.kernels)}
    end = len(graph.kernels)
    change = [0] * (end + 2)
    for value in graph.values.values():
        if graph.resident(value.name) or value.device == "host":
            continue
        made_by = graph.producer(value.name)
        first = position[made_by] if made_by is not None else 0
        last = max((position[r] for r in graph.readers(value.name)), default=first)
        if value.name in graph.output_values or made_by is None:
            last = end
        change[first] += value.bytes
        change[last + 1] -= value.bytes
    live = peak = 0
    for delta in change:
        live += delta
        peak = max(peak, live)
    return peak


def moves(problem: Problem, placement: Sequence[int]) -> Iterable[tuple[Flow, int, int]]:
    """Yields (flow, source device, target device), one for each value and destination."""
    for flow in problem.flows:
        source = 0 if flow.source == HOME else placement[flow.source]
        targets = {placement[r] for r in flow.readers}
        if flow.to_home:
            targets.add(0)
        targets.discard(source)
        if flow.unless is not None:
            targets.discard(placement[flow.unless])
        for target in sorted(targets):
            yield flow, source, target


def evaluate(problem: Problem, placement: Sequence[int]) -> Evaluation:
    """The value of ``placement`` (device index of each kernel)."""
    count = len(problem.devices)
    compute = [0.0] * count
    for k, g in enumerate(placement):
        compute[g] += float(problem.times[k, g])
    transfer = [0.0] * count
    sent = [0] * count
    links: dict[tuple[int, int], float] = {}
    cut_values = 0
    arrivals: list[list[tuple[int, float]]] = [[] for _ in placement]
    ends: list[tuple[int, float]] = []
    for flow in problem.flows:
        source = 0 if flow.source == HOME else placement[flow.source]
        for reader in flow.readers:
            target = placement[reader]
            current = flow.unless is not None and placement[flow.unless] == target
            made = flow.source if flow.source < reader else HOME  # Else left there by the call before.
            arrivals[reader].append((made, 0.0 if current else problem.us(source, target, flow.bytes)))
        if flow.to_home:
            ends.append((flow.source, problem.us(source, 0, flow.bytes)))
    for flow, source, target in moves(problem, placement):
        us = problem.us(source, target, flow.bytes)
        transfer[source] += us
        transfer[target] += us
        links[source, target] = links.get((source, target), 0.0) + us
        sent[source] += flow.bytes
        cut_values += 1
    for before, after in problem.order_edges:
        u, g = placement[before], placement[after]
        arrivals[after].append((before, problem.us(u, g, 0)))

    free_at = [0.0] * count
    finish = [0.0] * len(placement)
    for k, g in enumerate(placement):
        start = free_at[g]
        for source, us in arrivals[k]:
            start = max(start, us if source == HOME else finish[source] + us)
        finish[k] = free_at[g] = start + float(problem.times[k, g])
    makespan = max([*finish, *(finish[s] + us for s, us in ends if s != HOME)], default=0.0)

    used = {0, *placement}
    memory = [problem.activation_bytes * problem.inflight if g in used else 0 for g in range(count)]
    for _, nbytes, readers, state in problem.residents:
        for g in {placement[r] for r in readers} | ({0} if state else set()):
            memory[g] += nbytes
    loads = {d: Load(compute[g], transfer[g], sent[g], memory[g]) for g, d in enumerate(problem.devices)}
    if problem.overlap:
        bottleneck = max([*compute, *links.values()], default=0.0)
    else:
        bottleneck = max((c + m for c, m in zip(compute, transfer, strict=True)), default=0.0)
    return Evaluation(bottleneck, makespan, loads, cut_values, sum(sent))
