"""The ways in which an engine can run one graph: its latency plan, its throughput plan or mixture, each with what runs it."""

from __future__ import annotations

import itertools
import math
import threading
import warnings
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .passes import partition, schedule, verify
from .passes.errors import PlanError, TesseraWarning
from .passes.ir import Plan, Program, Run, format_bytes, sent_bytes
from .passes.mix import mix_of_graphs
from .passes.mix_plan import GraphShares
from .passes.mixture import best_mixture
from .passes.steady import Steady, steady, verify_steady
from .pipeline import CompiledGraph, make_plan
from .runtime.board import PIECE_US, Route, route_of
from .runtime.cpu_lanes import CpuLaneExecutor, lane_threads
from .runtime.monitor import Followed
from .runtime.simulator import drive

#: A steady state is followed on its own accord where its period is at most this times the shortest.
NEAR = 1.02


@dataclass(frozen=True)
class Turn:
    """Which plan of a mixture, by its place, and which device of each group of identical ones."""

    mixture: Hashable  # The same for graphs that were planned together: what one chooses is for all.
    plan: int
    members: Mapping[str, str]


@dataclass(frozen=True)
class Way:
    """One plan that is ready to run. ``homes``: state → lanes that touch it, or the one that keeps it; ``steady``: its modulo
    schedule; ``alone_us``: what a request takes with the lanes to itself, segments and transfers as they are issued."""

    name: str
    plan: Plan
    executor: CpuLaneExecutor
    route: Route
    steady: Steady
    alone_us: float
    homes: Mapping[str, frozenset[int]]


class Ways:
    """Of one graph.

    Args:
        plans: which plans are wanted.
        inflight: requests that overlap at most.
        factor: real time per modelled time, for paced lanes; 0: unpaced.
        free_transfers: let transfers take no time, for comparisons; paced lanes alone.
    """

    def __init__(
        self, graph: CompiledGraph, plans: Sequence[Followed], *, inflight: int, factor: float, free_transfers: bool
    ) -> None:
        report = graph.report
        assert report is not None
        self.program = report.program  # Another one: the graph was planned anew.
        self._graph, self._report = graph, report
        self._inflight, self._factor, self._free = inflight, factor, free_transfers
        self._lock = threading.Lock()
        self.mixture: Hashable = id(self)
        self._made: dict[tuple[str, ...], Way] = {}
        self._outstanding: Counter[str] = Counter()
        self._served: list[int] = []
        #: Of the throughput mixture: (share, kernel → group).
        self._shares: list[tuple[float, Mapping[str, str]]] = []
        self._groups: Mapping[str, tuple[str, ...]] = {d: (d,) for d in graph.cluster.names}
        self.latency: Way | None = self._plan_of("latency") if "latency" in plans else None
        self.throughput: Way | None = self._plan_of("throughput") if "throughput" in plans else None
        if self.throughput is not None:
            self._mix(self.throughput)
        self.reason = self._too_big()
        if self.reason:
            # The plan that the graph was compiled with is the one that was promised to fit.
            kept = self._way("compiled", report.plan)
            self.latency = self.throughput = kept
            self._shares = []
            warnings.warn(self.reason, TesseraWarning, stacklevel=2)

    def turn(self, following: Followed) -> Turn | None:
        """The turn of the next request, or conversation: a mixture's plans are served by their shares; of identical devices the
        one with the fewest requests in flight serves. None where one plan serves all."""
        with self._lock:
            if following == "latency" or self.throughput is None or not self._shares:
                return None
            total = sum(self._served) + 1
            behind = [share * total - served for (share, _), served in zip(self._shares, self._served, strict=True)]
            plan = behind.index(max(behind))
            self._served[plan] += 1
            members = {g: min(names, key=lambda d: self._outstanding[d]) for g, names in self._groups.items()}
            return Turn(self.mixture, plan, members)

    def choose(self, following: Followed, turn: Turn | None = None) -> Way:
        """The way of a request; ``turn``, of this mixture, as :meth:`turn` has given it."""
        with self._lock:
            if following == "latency" or self.throughput is None:
                way = self.latency or self.throughput
                assert way is not None
            elif not self._shares or turn is None:
                way = self.throughput
            else:
                placement = {k: turn.members[g] for k, g in self._shares[turn.plan][1].items()}
                way = self._way("throughput", self._evaluated(placement))
            self._outstanding.update(dict.fromkeys(way.plan.placement.values(), 1))
            return way

    def release(self, way: Way) -> None:
        """Says that a request which was given ``way`` is over."""
        with self._lock:
            self._outstanding.subtract(dict.fromkeys(way.plan.placement.values(), 1))

    @property
    def all(self) -> tuple[Way, ...]:
        with self._lock:
            return tuple(self._made.values())

    def steady_is_short(self) -> bool:
        """Whether the steady states come near the shortest periods with as many requests in flight as there may be."""
        return all(w.steady.period_us <= NEAR * w.steady.shortest_us for w in self.all)

    def same_homes(self) -> bool:
        """Whether all ways keep state on the same lanes, so that a conversation can change between them freely."""
        return len({tuple(sorted((v, tuple(sorted(h))) for v, h in way.homes.items())) for way in self.all}) <= 1

    def _plan_of(self, objective: Followed) -> Way:
        report, graph = self._report, self._graph
        if report.plan.objective == objective or report.plan.planner not in ("milp", "together"):
            plan = report.plan  # Planned for this, or placed by hand: then there is one plan.
        else:
            plan = make_plan(
                graph.ddg_by_views, graph.kernels, report.profile, graph.cluster, graph.options.with_changes(policy=objective)
            )
        return self._way(objective, plan)

    def _mix(self, single: Way) -> None:
        """Looks for a mixture of plans that is better than the best one."""
        report, graph = self._report, self._graph
        if graph.joint is not None and report.plan.planner == "together":
            if len(graph.joint.plans) > 1:
                self.mixture = id(graph.joint.mixture)  # Which the graph keeps alive.
                self._share(graph.joint.plans, graph.joint.groups)
            return
        if report.plan.planner != "milp" or graph.options.pins or not graph.kernels.kernels:
            return
        mix = mix_of_graphs(
            [(graph.ddg_by_views, report.profile, 1.0)], graph.cluster, overlap=report.plan.overlap, inflight=self._inflight
        )
        try:
            found = best_mixture(mix, time_limit=min(2.0, graph.options.time_limit))
        except PlanError:
            return
        if found.bottleneck_us >= 0.999 * single.plan.bottleneck_us:
            return
        own = GraphShares.of(found, mix.workloads[0])
        self._share(own.plans, own.groups)

    def _share(self, plans: Sequence[tuple[float, Mapping[str, str]]], groups: Mapping[str, tuple[str, ...]]) -> None:
        """Makes the ways of a mixture's plans."""
        self._shares, self._served, self._groups = list(plans), [0] * len(plans), groups
        for _, placement in self._shares:
            used = sorted(set(placement.values()))
            for members in itertools.product(*(self._groups[g] for g in used)):
                of = dict(zip(used, members, strict=True))
                self._way("throughput", self._evaluated({k: of[g] for k, g in placement.items()}))

    def _evaluated(self, placement: Mapping[str, str]) -> Plan:
        found = self._made.get(tuple(placement[k.name] for k in self._graph.kernels.kernels))
        if found is not None:
            return found.plan
        graph, report = self._graph, self._report
        return partition(
            graph.ddg_by_views,
            report.profile,
            graph.cluster,
            inflight=self._inflight,
            overlap=report.plan.overlap,
            placement=placement,
            planner="mixture",
        )

    def _way(self, name: str, plan: Plan) -> Way:
        graph = self._graph
        key = tuple(plan.placement[k.name] for k in graph.kernels.kernels)
        if key in self._made:
            return self._made[key]
        longest_us = math.inf if graph.joint is None else graph.joint.longest_us
        program = schedule(graph.ddg_by_views, plan, profile=self._report.profile, longest_us=longest_us)
        verify(program, graph.ddg_by_views, plan)
        threads = lane_threads(len(graph.cluster.devices))
        executor = CpuLaneExecutor(graph.kernels, program, graph.codegen, threads=threads)
        route, made, alone_us = self._route(program)
        touching: dict[str, set[int]] = {v: set() for v in graph.kernels.mutated}
        kept = {v: graph.kernels.keeper(v) for v in graph.kernels.kept}
        for kernel in graph.kernels.kernels:
            for value in (*kernel.inputs, *kernel.writes):
                storage = graph.kernels.values[value].storage
                if storage in touching and kept.get(storage, kernel.name) == kernel.name:
                    touching[storage].add(plan.devices.index(plan.placement[kernel.name]))
        way = Way(name, plan, executor, route, made, alone_us, {v: frozenset(lanes) for v, lanes in touching.items()})
        self._made[key] = way
        return way

    def _route(self, program: Program) -> tuple[Route, Steady, float]:
        graph, profile, cluster = self._graph.kernels, self._report.profile, self._graph.cluster
        names = cluster.names
        run_us = {x.segment: sum(profile.us(k, names[lane]) for k in x.kernels) for lane, _, x in program if isinstance(x, Run)}

        crossing = sent_bytes(graph, program)

        def transfer_us(value: str, source: int, target: int) -> float:
            nbytes = crossing.get((value, target), 0)
            return 0.0 if self._free else cluster.us(names[source], names[target], nbytes)

        made = steady(program, run_us, transfer_us, slots=self._inflight)
        if made.period_us > 0:
            verify_steady([made], self._inflight)
        modelled = route_of(graph, program, run_time=run_us, transfer_time=transfer_us)
        alone = drive(lambda _: [modelled], [0.0], lanes=len(names), inflight=1).passages[0].finish
        ns = 1e3 * (self._factor or 1.0)
        timed: dict[str, Any] = {}
        if self._factor:
            timed = {
                "run_time": {s: ns * us for s, us in run_us.items()},
                "transfer_time": lambda v, s, t: ns * transfer_us(v, s, t),
            }
        starts = {name: ns * us for name, us in made.starts.items()}
        slack: dict[str, float] = {"period": ns * made.period_us, "alone": ns * alone, "piece": ns * PIECE_US}
        return route_of(graph, program, starts=starts, **slack, **timed), made, alone

    def _too_big(self) -> str:
        """Why the plans do not fit into memory together; empty if they do."""
        graph = self._graph
        if len(self._made) < 2:
            return ""
        ways = tuple(self._made.values())
        sizes = graph.kernels.values
        for device in graph.cluster.devices:
            held = [_residents(graph, w.plan, device.name) for w in ways]
            together = sum(sizes[v].bytes for v in set().union(*held))
            rest = max(
                w.plan.loads[device.name].memory_bytes - sum(sizes[v].bytes for v in h) for w, h in zip(ways, held, strict=True)
            )
            if together + max(0, rest) > device.memory:
                return (
                    f"graph {graph.number}: the plans of the engine need {format_bytes(together + max(0, rest))} on "
                    f"{device.name}, which has {format_bytes(device.memory)}: it stays with the "
                    f"{self._report.plan.objective} plan; raise max_memory, or lower inflight"
                )
        return ""


def _residents(graph: CompiledGraph, plan: Plan, device: str) -> set[str]:
    """Weights, constants and state that kernels on ``device`` read."""
    kernels = graph.kernels
    return {v for k in kernels.kernels if plan.placement[k.name] == device for v in k.inputs if kernels.resident(v)}
