"""Emulated time on slices of a GPU: kernels that spin on a lane's stream until its modelled time is over.

The clocks of ``pacing.py``, kept in GPU memory: every lane has one, advanced by the modelled time of each run; a value arrives
when its link has had time to move it. Nothing is asked of the host, so a captured program is paced as well. What the slice
really computes must be done by then; a run or transfer that was not is an *overrun*. The clock is ``%globaltimer``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..passes.cluster import Cluster
from ..passes.ir import KernelGraph, Profile, Program, Recv, Wait
from .cuda_streams import LaneStreams
from .device_code import launch
from .pacing import Emulation, Pace


class CudaPace:
    """The modelled times of one program, for slices of one GPU.

    Args:
        cluster: the modelled devices, one a lane, in the lanes' order.
        profile: times on them.
        factor: real time per emulated time.
    """

    def __init__(
        self, graph: KernelGraph, program: Program, profile: Profile, cluster: Cluster, factor: float, device: torch.device
    ) -> None:  # fmt: skip
        self.factor = factor
        self._pace = Pace(graph, program, profile, cluster, factor)
        self._count = len(program.lanes)
        arrivals = [
            (i.source, lane, i.value if isinstance(i, Recv) else f"signal {i.kernel}")
            for lane, _, i in program
            if isinstance(i, (Recv, Wait))
        ]
        links = sorted({(source, lane) for source, lane, _ in arrivals})
        clocks = range(self._count)
        words = self._count + 1 + len(links) + len(arrivals) + 2 * self._count + 2
        self._words = torch.zeros(words, dtype=torch.int64, device=device)
        torch.cuda.current_stream(device).synchronize()
        at = iter(range(words))

        def take(count: int = 1) -> torch.Tensor:
            first = next(at)
            for _ in range(count - 1):
                next(at)
            return self._words[first : first + count]

        self._clocks = [take() for _ in clocks]
        self._started = take()
        self._links = {pair: take() for pair in links}
        self._arrivals = {key: take() for key in arrivals}
        self._counts = [take(2) for _ in clocks]
        self._totals = take(2)

    def begin(self, lanes: Sequence[LaneStreams], home: int) -> None:
        """No lane's clock is behind the time at which a request begins."""
        for at, lane in enumerate(lanes):
            with torch.cuda.stream(lane.compute):
                launch("pace_begin", 1, 1, self._clocks[at], self._started if at == home else None)

    def ran(self, lane: int, streams: LaneStreams, segment: str) -> None:
        with torch.cuda.stream(streams.compute):
            launch("pace_ran", 1, 1, self._clocks[lane], round(self._pace.run_ns(segment)), self._counts[lane])

    def sent(self, lane: int, streams: LaneStreams, target: int, name: str) -> None:
        ns = round(self._pace.transfer_ns(name, lane, target))
        with torch.cuda.stream(streams.compute):
            launch("pace_sent", 1, 1, self._clocks[lane], self._links[lane, target], ns, self._arrivals[lane, target, name])

    def received(self, lane: int, streams: LaneStreams, source: int, name: str) -> None:
        with torch.cuda.stream(streams.compute):
            launch("pace_received", 1, 1, self._clocks[lane], self._arrivals[source, lane, name], self._counts[lane])

    def end(self) -> None:
        """On the current stream, behind all lanes."""
        launch("pace_end", 1, 1, self._words, (self._count, 4), self._started, self._totals)

    def result(self) -> Emulation:
        """What came of the requests that are done; waits for the GPU."""
        torch.cuda.synchronize(self._words.device)
        steps, overran = (sum(int(c[i]) for c in self._counts) for i in range(2))
        requests, total = self._totals.tolist()
        return Emulation(self.factor, requests, total / max(requests, 1) / 1e3 / self.factor, steps, overran)
