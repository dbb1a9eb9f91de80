"""Emulated time: CPU lanes that take as long as modelled devices would, scaled by a factor.

Every lane has a clock of its own, advanced by the modelled time of each run; a lane waits until the real (monotonic) clock has
caught up. A value arrives when its link, which carries one value at a time in each direction, has had time to move it. What the
lane really computes must be done by then; a run or transfer that was not is an *overrun*, and an emulation with more than 1 % of
them is void. Everything here is emulated: it says what the model predicts with queues and waiting included, never what hardware
does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ..passes.cluster import Cluster
from ..passes.ir import KernelGraph, Profile, Program, Run, sent_bytes

#: Share of runs and transfers that may overrun before an emulation says nothing.
TOLERANCE = 0.01
_SPIN_NS = 200_000


@dataclass(frozen=True)
class Emulation:
    """What came of the emulated requests so far: mean emulated µs of one, runs and transfers, and how many of those overran."""

    factor: float
    requests: int
    mean_us: float
    steps: int
    overran: int

    @property
    def void(self) -> bool:
        return self.overran > TOLERANCE * self.steps

    def to_text(self) -> str:
        text = (
            f"emulated at {self.factor:g}×: {self.requests} requests, {self.mean_us:.1f} emulated µs each; "
            f"{self.overran} of {self.steps} runs and transfers overran"
        )
        return f"{text}: void, raise the factor" if self.void else text


class Pace:
    """The modelled times of one program.

    Args:
        factor: real time per emulated time; large enough that lanes are done before their deadlines.
    """

    def __init__(self, graph: KernelGraph, program: Program, profile: Profile, cluster: Cluster, factor: float) -> None:
        self.factor = factor
        names = cluster.names
        self._run_ns = {
            instruction.segment: 1e3 * factor * sum(profile.us(k, names[lane]) for k in instruction.kernels)
            for lane, _, instruction in program
            if isinstance(instruction, Run)
        }
        self._cluster = cluster
        self._bytes: Mapping[tuple[str, int], int] = sent_bytes(graph, program)
        self._lock = threading.Lock()
        self._requests = self._steps = self._overran = 0
        self._total_us = 0.0

    def begin(self, lanes: int) -> PacedRequest:
        return PacedRequest(self, lanes)

    def run_ns(self, segment: str) -> float:
        return self._run_ns[segment]

    def transfer_ns(self, value: str, source: int, target: int) -> float:
        """A signal carries no bytes; it still takes the link's latency."""
        names = self._cluster.names
        return 1e3 * self.factor * self._cluster.us(names[source], names[target], self._bytes.get((value, target), 0))

    def add(self, request: PacedRequest) -> None:
        with self._lock:
            self._requests += 1
            self._steps += sum(request.steps)
            self._overran += sum(request.overran)
            self._total_us += (max(request.clock) - request.started) / 1e3 / self.factor

    def result(self) -> Emulation:
        """What came of the requests that are done."""
        with self._lock:
            mean = self._total_us / self._requests if self._requests else 0.0
            return Emulation(self.factor, self._requests, mean, self._steps, self._overran)


class PacedRequest:
    """The lanes' clocks of one request, in real nanoseconds. Each lane touches its own entries alone."""

    def __init__(self, pace: Pace, lanes: int) -> None:
        self._pace = pace
        self.started = float(time.monotonic_ns())
        self.clock = [self.started] * lanes
        self.steps = [0] * lanes
        self.overran = [0] * lanes
        self._link_free: dict[tuple[int, int], float] = {}

    def ran(self, lane: int, segment: str) -> None:
        """Called when ``lane`` has computed ``segment``: waits until its modelled time is over."""
        self._reach(lane, self.clock[lane] + self._pace.run_ns(segment))

    def sent(self, value: str, source: int, target: int) -> float:
        """When ``value``, sent now, will have arrived."""
        begin = max(self.clock[source], self._link_free.get((source, target), 0.0))
        arrival = self._link_free[source, target] = begin + self._pace.transfer_ns(value, source, target)
        return arrival

    def received(self, lane: int, arrival: float) -> None:
        """Called when ``lane`` has its copy: waits until the value would have arrived, if that is not past for the lane."""
        if arrival > self.clock[lane]:
            self._reach(lane, arrival)
        else:
            self.steps[lane] += 1

    def _reach(self, lane: int, deadline: float) -> None:
        self.steps[lane] += 1
        now = time.monotonic_ns()
        if now > deadline:
            self.overran[lane] += 1
            self.clock[lane] = float(now)
            return
        while (left := deadline - time.monotonic_ns()) > 0:
            time.sleep((left - _SPIN_NS) / 1e9 if left > _SPIN_NS else 0)
        self.clock[lane] = deadline
