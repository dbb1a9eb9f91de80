"""The ways in which an engine can run a graph of CUDA lanes, and the lanes themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from .passes.ir import Plan, Run, sent_bytes
from .passes.periods import Period, period_of
from .pipeline import CompiledGraph
from .runtime.board import Order, Route
from .runtime.codegen import Codegen
from .runtime.cuda_clocks import Clocks
from .runtime.cuda_dispatcher import CudaDispatcher
from .runtime.cuda_requests import CudaRequests
from .runtime.cuda_streams import apart, lane_streams
from .runtime.monitor import Followed
from .runtime.replicas import Residents
from .ways import Way, Ways

#: Periods are captured where one takes at most this times what it takes without boundaries.
LONGER = 1.1


@dataclass(frozen=True)
class Issuer:
    """What serves the requests of one way: its route, without times, since lanes take what they take, and its program."""

    route: Route
    executor: CudaRequests


class CudaWays(Ways):
    """Of one graph; see :class:`Ways`.

    Args:
        dispatcher: of the engine.
    """

    def __init__(
        self,
        graph: CompiledGraph,
        plans: Sequence[Followed],
        *,
        inflight: int,
        factor: float,
        free_transfers: bool,
        dispatcher: CudaDispatcher,
    ) -> None:
        self._real, self._dispatcher = graph, dispatcher
        self._issuers: dict[int, Issuer] = {}
        planned = cast(CompiledGraph, _Planned(graph))
        super().__init__(planned, plans, inflight=inflight, factor=factor, free_transfers=free_transfers)

    def issuer(self, way: Way) -> Issuer:
        return self._issuers[id(way.executor)]

    def reasons(self) -> dict[str, str]:
        """Why segments and periods run uncaptured, by name; what differs between plans has a plan's number behind it."""
        with self._lock:
            found = [dict(issuer.executor.reasons) for issuer in self._issuers.values()]
        reasons: dict[str, str] = {}
        for number, own in enumerate(found):
            for what, why in own.items():
                if reasons.setdefault(what, why) != why:
                    reasons[f"{what}, plan {number}"] = why
        return reasons

    def _way(self, name: str, plan: Plan) -> Way:
        way = super()._way(name, plan)
        if id(way.executor) not in self._issuers:
            options = self._real.options
            period = self._period(way)
            executor = apart(
                lambda: CudaRequests(
                    self._real.kernels,
                    way.route.program,
                    self._real.codegen,
                    residents=self._dispatcher.residents,
                    captured=bool(options.cuda_graphs),
                    lanes=lane_names(self._real),
                    transport=options.transport,
                    clocks=self._dispatcher.clocks,
                    times=way.route,
                    period=period,
                )
            )
            if executor.period is not None and executor.period.period_us > LONGER * way.steady.period_us:
                executor.reasons["periods"] = (
                    f"a captured one takes {executor.period.period_us:.1f} µs with {self._inflight} in flight, against "
                    f"{way.steady.period_us:.1f} µs segment by segment"
                )
                executor.period = None
            route = replace(way.route, run_time=None, transfer_time=_no_time)
            self._issuers[id(way.executor)] = Issuer(route, executor)
        return way

    def _period(self, way: Way) -> Period:
        kernels, profile, cluster = self._real.kernels, self._report.profile, self._real.cluster
        names, program = cluster.names, way.route.program
        run_us = {x.segment: sum(profile.us(k, names[lane]) for k in x.kernels) for lane, _, x in program if isinstance(x, Run)}
        crossing = sent_bytes(kernels, program)

        def transfer_us(value: str, source: int, target: int) -> float:
            return 0.0 if self._free else cluster.us(names[source], names[target], crossing.get((value, target), 0))

        # One request more than there are stages, so that one can come while another goes.
        return period_of(way.steady, run_us, transfer_us, slots=max(1, self._inflight - 1))


class _Planned:
    """A graph as the planner sees it: what CPU lanes would run of it is not compiled."""

    def __init__(self, graph: CompiledGraph) -> None:
        self._graph = graph
        self.codegen = Codegen("null")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


def _no_time(value: str, source: int, target: int) -> float:
    return 0.0


def lane_names(graph: CompiledGraph) -> list[str]:
    """The slices and GPUs that run a graph."""
    emulated = graph.options.emulate_on
    return emulated.split(",") if emulated else list(graph.cluster.names)


def make_dispatcher(graph: CompiledGraph, order: Order, pipelined: bool) -> CudaDispatcher:
    """Lanes for ``graph`` and all that run on its cluster."""
    streams = lane_streams(lane_names(graph))
    residents = [Residents(device=lane.device) for lane in streams]
    factor = graph.options.pace
    clocks = apart(lambda: Clocks(len(streams), streams[0].device, factor)) if factor else None
    return CudaDispatcher(streams, residents, order=order, pipelined=pipelined, clocks=clocks)
