"""When to follow which plan: the throughput plan while requests wait, the latency plan while they don't.

Over the requests that finished within the last window W, with a their arrival, f their end and e the time that the plan they
followed takes alone (paced lanes) or that they took on the lanes,

    q = mean (f − a) / e

At q ≥ β the throughput plan is followed, below (1 − h)·β the latency plan; between the two, and within a window after a switch,
nothing changes (hysteresis). A target for f − a works the same way: where the p95 of the window is above it, the throughput plan
is followed; the latency plan comes back only when it is met and q is low.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

Followed = Literal["latency", "throughput"]
HYSTERESIS = 0.1


class Monitor:
    """Times are seconds, of whatever clock the caller has.

    Args:
        window: W. beta: β. target: seconds from arrival to end that 95 of 100 requests should keep to.
    """

    def __init__(self, *, window: float = 0.3, beta: float = 1.5, target: float | None = None) -> None:
        if not (window > 0 and beta > 0 and (target is None or target > 0)):
            raise ValueError(f"window {window!r}, beta {beta!r} and target {target!r} must be positive")
        self.window, self.beta, self.target = window, beta, target
        self.following: Followed = "latency"
        self.switches = 0
        self._seen: deque[tuple[float, float, float]] = deque()  # (end, seconds from arrival to end, q)
        self._switched = float("-inf")

    def add(self, arrival: float, end: float, execution: float) -> Followed:
        """Takes note of a request; what to follow from now on."""
        self._seen.append((end, end - arrival, (end - arrival) / execution if execution > 0 else 1.0))
        while self._seen[0][0] < end - self.window:
            self._seen.popleft()
        if end - self._switched < self.window:
            return self.following
        q = sum(x[2] for x in self._seen) / len(self._seen)
        times = sorted(x[1] for x in self._seen)
        late = self.target is not None and times[int(0.95 * (len(times) - 1))] > self.target
        wanted = self.following
        if q >= self.beta or late:
            wanted = "throughput"
        elif q < (1 - HYSTERESIS) * self.beta:
            wanted = "latency"
        self.switch(wanted, end)
        return self.following

    def switch(self, wanted: Followed, now: float) -> None:
        """Follows ``wanted`` from now on."""
        if wanted != self.following:
            self.following, self._switched = wanted, now
            self.switches += 1
