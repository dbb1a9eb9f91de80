"""Plan several graphs for one cluster together: prefill and decode of a model, say.

    with tessera_compile.plan_together(uses={"prefill": 1, "decode": 128}) as together:
        with together.phase("prefill"):
            compiled(prompt)
        with together.phase("decode"):
            compiled(token)
    print(together)

The calls run as they always do. On leaving the block their graphs are planned as one mix: weights and state that two graphs
share, told by their storage, are held once, and the bottleneck of the whole mix is minimised. Then each graph follows its
part of the plan: in plain calls of the best single one, in an engine of the mixture's plans by their shares.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import networkx as nx
import torch

from . import pipeline
from .catalogue import make_cluster
from .in_flight import simulated_us
from .passes import partition, schedule, torch_compat
from .passes.cluster import Cluster
from .passes.crossings import plans_by_crossings
from .passes.errors import OptionsError, PlanError
from .passes.ir import Plan, format_bytes
from .passes.mix import Mix, mix_of_graphs
from .passes.mix_plan import GraphShares
from .passes.mixture import MixPlan
from .passes.partitioning import matching
from .passes.planning import pin, plan_mix
from .pipeline import CompiledGraph
from .runtime.board import PIECE_US
from .simulation import modelled_route

#: Requests that are simulated of each plan, about.
SIMULATED = 800.0
#: Under a joint plan an engine's segments take no longer than this part of what the shortest graph takes alone: a decode step
#: that meets a segment of a prefill at a crossing waits for the rest of it.
SEGMENT_SHARE = 0.1


@dataclass(frozen=True)
class Change:
    """What following the plan means for one graph: kernels that move, segments to compile anew, weights to copy to other
    devices."""

    graph: int
    phase: str
    kernels: int
    moved: int
    segments: int
    new_segments: int
    copied_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.phase} (graph {self.graph}): {self.moved} of {self.kernels} kernels move, {self.new_segments} of "
            f"{self.segments} segments are compiled anew, {format_bytes(self.copied_bytes)} of weights and state go to other "
            "devices"
        )


class PlanTogether:
    """The context manager. After the block: ``plan`` (a ``MixPlan``), ``changes``, and ``shared``, the bytes that graphs
    share; ``followed``, the mixture that an engine follows, and ``simulated``, the plans that it was chosen from, with the µs
    that a mix took."""

    def __init__(
        self,
        cluster: str | Cluster | None = None,
        *,
        uses: Mapping[str, float] | None = None,
        inflight: int | None = None,
        time_limit: float = 60.0,
        gap: float = 5e-3,
    ) -> None:
        self.cluster = make_cluster(cluster) if cluster is not None else None
        self.uses = dict(uses or {})
        if any(not n > 0 for n in self.uses.values()):
            raise OptionsError(f"uses {self.uses}: every number must be positive")
        if inflight is not None and (not isinstance(inflight, int) or isinstance(inflight, bool) or inflight < 1):
            raise OptionsError(f"inflight={inflight!r}; it takes a whole number from 1")
        self.inflight, self.time_limit, self.gap = inflight, time_limit, gap
        self.followed: MixPlan | None = None
        self.simulated: list[tuple[MixPlan, float]] = []
        self.plan: MixPlan | None = None
        self.changes: tuple[Change, ...] = ()
        self.shared = 0
        self._phase = threading.local()
        self._lock = threading.Lock()
        self._calls: dict[int, tuple[CompiledGraph, str, int, dict[str, int]]] = {}

    def __enter__(self) -> PlanTogether:
        pipeline.OBSERVERS.append(self._observe)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pipeline.OBSERVERS.remove(self._observe)
        if error is None:
            self._plan()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Calls inside belong to phase ``name``, whose uses in one mix are ``uses[name]``, or else as many as are made here."""
        before = getattr(self._phase, "name", None)
        self._phase.name = name
        try:
            yield
        finally:
            self._phase.name = before

    def _observe(self, graph: CompiledGraph, args: Sequence[Any]) -> None:
        name = getattr(self._phase, "name", None) or "calls"
        with self._lock:
            _, phase, count, storages = self._calls.get(id(graph), (graph, name, 0, {}))
            if phase != name:
                raise PlanError(f"one graph ran in phase {phase!r} and in {name!r}; phases that run the same graph are one phase")
            if not storages:
                storages = {
                    v: torch_compat.storage_key(t)
                    for v, t in zip(graph.kernels.inputs, args, strict=True)
                    if isinstance(t, torch.Tensor) and graph.kernels.resident(v)
                }
            self._calls[id(graph)] = (graph, phase, count + 1, storages)

    def _plan(self) -> None:
        calls = list(self._calls.values())
        if not calls:
            raise PlanError(
                "nothing was called inside plan_together: call the compiled model there, with two devices or more (one-device "
                "graphs are Inductor's)"
            )
        unknown = sorted(set(self.uses) - {phase for _, phase, _, _ in calls})
        if unknown:
            raise PlanError(f"uses names phase {unknown[0]!r}, in which nothing was called")
        cluster = self.cluster or calls[0][0].cluster
        for graph, phase, _, _ in calls:
            if graph.cluster != cluster:
                raise PlanError(f"{phase!r} is compiled for {', '.join(graph.cluster.names)}, not for {', '.join(cluster.names)}")
        in_phase = {phase: max(c for _, p, c, _ in calls if p == phase) for _, phase, _, _ in calls}
        parts, seen = [], dict[int, int]()
        for graph, phase, count, storages in calls:
            assert graph.report is not None
            ddg = graph.ddg_by_views.copy()
            ddg.graph.update(graph.ddg_by_views.graph)
            ddg.graph.update(name=f"{phase}.{graph.number}", profile=graph.report.profile, storages=storages)
            parts.append((ddg, self.uses.get(phase, in_phase[phase]) * count / in_phase[phase]))
            for value, key in storages.items():
                nbytes = graph.kernels.values[value].bytes
                self.shared += min(nbytes, seen.get(key, 0))
                seen[key] = max(nbytes, seen.get(key, 0))
        overlap = all(d.kind != "cpu" for d in cluster.devices)
        inflight = max(graph.options.inflight for graph, _, _, _ in calls)
        pins: dict[str, str] = {}
        for graph, _, _, _ in calls:
            for pattern, device in graph.options.pins:
                if matching(graph.kernels, pattern) and pins.setdefault(pattern, device) != device:
                    raise PlanError(f"pin {pattern!r} goes to {pins[pattern]!r} in one model and to {device!r} in another")
        self.plan = plan_mix(
            parts,
            cluster,
            pins=pins,
            overlap=overlap,
            inflight=inflight,
            state="home",
            alike=False,
            time_limit=self.time_limit,
            gap=self.gap,
        )
        self.followed = self.plan
        if self.inflight is not None:
            mix = mix_of_graphs(
                [(ddg, ddg.graph["profile"], weight) for ddg, weight in parts],
                cluster,
                overlap=overlap,
                inflight=inflight,
                alike=False,
            )
            self._choose(pin(mix, parts, pins, cluster), cluster, parts, self.inflight)
        followed = self.plan.single.placement  # a plain call follows one plan, and this is the best for all of them
        members = {name: devices[0] for name, devices in self.plan.groups.items()}
        changes = []
        for (graph, phase, _, _), (ddg, _) in zip(calls, parts, strict=True):
            prefix = f"{ddg.graph['name']}/"
            placement = {k.removeprefix(prefix): members[g] for k, g in followed.items() if k.startswith(prefix)}
            changes.append(self._follow(graph, phase, placement))
        longest_us = longest(graph.report.plan for graph, _, _, _ in calls if graph.report is not None)
        for (graph, _, _, _), (ddg, _) in zip(calls, parts, strict=True):
            graph.joint = GraphShares.of(self.followed, ddg.graph["name"], longest_us)
        self.changes = tuple(changes)

    def _choose(self, mix: Mix, cluster: Cluster, parts: Sequence[tuple[nx.DiGraph, float]], inflight: int) -> None:
        """Follows that of the plans, of those which cross less and less, which serves most with so many requests in flight."""
        assert self.plan is not None
        uses = {ddg.graph["name"]: weight for ddg, weight in parts}
        mixes = min(max(6.0, 2.0 / min(uses.values())), max(1.0, SIMULATED / sum(uses.values())))
        for plan in plans_by_crossings(mix, self.plan, time_limit=min(10.0, self.time_limit), gap=self.gap):
            members = {name: devices[0] for name, devices in plan.groups.items()}
            shared = []
            for one in plan.plans:
                placed = {}
                for ddg, _ in parts:
                    prefix = f"{ddg.graph['name']}/"
                    where = {k.removeprefix(prefix): members[g] for k, g in one.placement.items() if k.startswith(prefix)}
                    placed[ddg.graph["name"]] = partition(ddg, ddg.graph["profile"], cluster, placement=where)
                longest_us = longest(placed.values())
                routes = {}
                for ddg, _ in parts:
                    name, profile = ddg.graph["name"], ddg.graph["profile"]
                    program = schedule(ddg, placed[name], profile=profile, longest_us=longest_us)
                    routes[name] = modelled_route(ddg.graph["kernels"], program, profile, cluster, slots=inflight)[0]
                shared.append((one.share, routes))
            us = simulated_us(shared, uses, lanes=len(cluster.devices), inflight=inflight, mixes=mixes)
            self.simulated.append((plan, us))
        # Of plans that serve as much the one that promises more: it gains if more are in flight.
        least = min(us for _, us in self.simulated)
        close = [plan for plan, us in self.simulated if us <= 1.002 * least]
        self.followed = min(close, key=lambda plan: plan.bottleneck_us)

    def _follow(self, graph: CompiledGraph, phase: str, placement: Mapping[str, str]) -> Change:
        before = graph.report
        assert before is not None
        graph.replan(placement, "together")
        after = graph.report
        assert after is not None
        old, new = _segments(before.program), _segments(after.program)
        copied = 0
        for value in graph.kernels.values.values():
            if not graph.kernels.resident(value.name):
                continue
            readers = graph.kernels.readers(value.name)
            had = {before.plan.placement[r] for r in readers} | {before.plan.home}
            needs = {after.plan.placement[r] for r in readers}
            copied += value.bytes * len(needs - had)
        moved = sum(before.plan.placement[k] != d for k, d in after.plan.placement.items())
        return Change(graph.number, phase, len(placement), moved, len(new), len(new - old), copied)

    def __str__(self) -> str:
        if self.plan is None:
            return "plan_together: nothing planned yet"
        lines = [self.plan.to_text(), f"graphs share {format_bytes(self.shared)} of weights and state"]
        if len(self.plan.plans) > 1:
            lines.append(f"a plain call follows the best single plan, {self.plan.single_us:.1f} µs a mix; an engine mixes them")
        return "\n".join([*lines, *map(str, self.changes)])


def _segments(program: Any) -> set[tuple[str, tuple[str, ...]]]:
    from .passes.ir import Run

    return {(lane.device, i.kernels) for lane in program.lanes for i in lane.instructions if isinstance(i, Run)}


def longest(plans: Iterable[Plan]) -> float:
    """µs that a segment may take under these plans of graphs whose requests are in flight together."""
    return max(PIECE_US, SEGMENT_SHARE * min(plan.makespan_us for plan in plans))


def plan_together(
    cluster: str | Cluster | None = None,
    *,
    uses: Mapping[str, float] | None = None,
    inflight: int | None = None,
    time_limit: float = 60.0,
    gap: float = 5e-3,
) -> PlanTogether:
    """A context in which calls of compiled models are planned together; see the module.

    Args:
        cluster: of the models called inside, which must all be compiled for it; by default that of the first.
        uses: phase → uses in one mix; a phase that is not named counts as often as it is called.
        inflight: requests that an engine will have in flight. What a plan promises takes enough of them; with fewer, plans that
            cross less may serve more: several are simulated, which takes some seconds, and an engine follows the best.
        time_limit, gap: seconds and relative gap for the planner.

    Raises, on leaving the block: PlanError where nothing was called or clusters differ, InfeasibleError where no plan fits.
    """
    return PlanTogether(cluster, uses=uses, inflight=inflight, time_limit=time_limit, gap=gap)
