"""What an engine would do with a plan, in simulated time: ``tessera_compile.simulate(report, arrivals=…)``.

Nothing is computed and no thread waits: the programs of a report run on the engine's own board (``runtime/board.py``) with the
times of the report's profile and the links of a cluster. So queues, waiting and the order in which lanes serve requests are as in
the engine; what the model of times leaves out (launches, Python, contention for memory) is left out here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .catalogue import make_cluster
from .engine_stats import Percentiles
from .passes.cluster import Cluster
from .passes.errors import PlanError
from .passes.ir import KernelGraph, Profile, Program, format_bytes, sent_bytes
from .passes.ir import Run as RunSegment
from .passes.steady import steady
from .reports import GraphReport, Report
from .runtime.board import PIECE_US, Order, Route, route_of
from .runtime.simulator import Passage, drive


@dataclass(frozen=True)
class SimulationResult:
    """Requests in the order in which they came (µs), how busy each device was, and bytes moved.

    ``period_us``: between two requests in the steady state. ``predicted_us``: what the plans say of that, the busiest device or
    link. ``wait`` and ``total``: ms from arrival to start, and to the end.
    """

    passages: tuple[Passage, ...]
    period_us: float
    predicted_us: float
    busy: dict[str, float]
    moved_bytes: int
    wait: Percentiles
    total: Percentiles

    def to_text(self) -> str:
        lanes = ", ".join(f"{name} {100 * share:.1f} %" for name, share in self.busy.items())
        return (
            f"simulated: {len(self.passages)} requests, one every {self.period_us:.1f} µs ({self.predicted_us:.1f} µs "
            f"predicted); p50/p99 from arrival to end {self.total.p50:.3f}/{self.total.p99:.3f} ms; busy {lanes}; "
            f"{format_bytes(self.moved_bytes)} moved"
        )

    __str__ = to_text


def modelled_route(
    graph: KernelGraph, program: Program, profile: Profile, cluster: Cluster, *, slots: int, free_transfers: bool = False
) -> tuple[Route, float]:
    """The route of a program in modelled µs, with the steady state for ``slots`` requests, and the shortest period there is."""
    names = cluster.names
    run_us = {
        x.segment: sum(profile.us(k, names[lane]) for k in x.kernels) for lane, _, x in program if isinstance(x, RunSegment)
    }

    sizes = sent_bytes(graph, program)

    def transfer_us(value: str, source: int, target: int) -> float:
        nbytes = sizes.get((value, target), 0)
        return 0.0 if free_transfers else cluster.us(names[source], names[target], nbytes)

    made = steady(program, run_us, transfer_us, slots=slots)
    loads: dict[object, float] = {}
    for lane, _, x in program:
        if isinstance(x, RunSegment):
            loads[lane] = loads.get(lane, 0.0) + run_us[x.segment]
        elif hasattr(x, "to") and hasattr(x, "value"):
            loads[lane, x.to] = loads.get((lane, x.to), 0.0) + transfer_us(x.value, lane, x.to)
    timed = route_of(graph, program, run_time=run_us, transfer_time=transfer_us)
    alone = drive(lambda _: [timed], [0.0], lanes=len(names), inflight=1).passages[0].finish
    route = replace(timed, starts=made.starts, period=made.period_us, alone=alone, piece=PIECE_US)
    return route, max(loads.values(), default=0.0)


def simulate(
    report: Report | GraphReport,
    cluster: str | Cluster | None = None,
    *,
    arrivals: int | Sequence[float] = 100,
    inflight: int = 4,
    order: Order = "due",
    pipelined: bool = True,
    free_transfers: bool = False,
) -> SimulationResult:
    """Sends requests through the programs of ``report``, each through all of its graphs, one after the other.

    Args:
        cluster: with the same devices and other links, say; by default that of the report.
        arrivals: µs at which requests come, ascending; a number: so many, all at the beginning.
        inflight, order, pipelined, free_transfers: as of the engine; order ``static`` follows the steady state.

    Raises:
        PlanError: the cluster has other devices than the plan; there is no graph; arrivals go back in time.
    """
    graphs = report.graphs if isinstance(report, Report) else (report,)
    if not graphs:
        raise PlanError("the report has no graph that was planned: there is nothing to simulate")
    times = [0.0] * arrivals if isinstance(arrivals, int) else [float(t) for t in arrivals]
    if times != sorted(times) or (times and times[0] < 0):
        raise PlanError("arrivals must be µs from 0 on, in ascending order")
    routes, predicted = [], 0.0
    for graph in graphs:
        used = graph.cluster if cluster is None else make_cluster(cluster)
        if used.names != graph.plan.devices:
            raise PlanError(f"the plan is for {', '.join(graph.plan.devices)}, the cluster has {', '.join(used.names)}")
        route, us = modelled_route(
            graph.kernels, graph.program, graph.profile, used, slots=inflight, free_transfers=free_transfers
        )
        routes.append(route)
        predicted += us
    names = graphs[0].plan.devices
    ran = drive(lambda _: routes, times, lanes=len(names), inflight=inflight, order=order, pipelined=pipelined)
    end = max((p.finish for p in ran.passages), default=0.0)
    return SimulationResult(
        ran.passages,
        ran.period,
        predicted,
        {name: us / end if end else 0.0 for name, us in zip(names, ran.busy, strict=True)},
        ran.moved,
        Percentiles.of((p.start - p.arrival) / 1e6 for p in ran.passages),
        Percentiles.of((p.finish - p.arrival) / 1e6 for p in ran.passages),
    )
