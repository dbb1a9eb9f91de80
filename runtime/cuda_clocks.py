"""Emulated time on slices of a GPU for many requests at once: the clocks of lanes and links, and those of each request.

``cuda_pacing.py`` paces one request after the other. Here the lanes' clocks are shared by all requests in flight: a segment
starts when its lane is free and its inputs are there, in modelled time, as on the CPU (``dispatcher.py``); a value has arrived
when its link has had time to move it, and the link's stream spins until then, so that what the host learns from events is
emulated time as well. All clocks lie in GPU memory. A step whose work ends later than its modelled time is an *overrun*.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .device_code import launch
from .pacing import Emulation

Transfer = tuple[int, int, str]  # source lane, target lane, value or signal


class Words:
    """The clocks of one request at a time: since when what each lane has of it is there, when each transfer was sent and has
    arrived."""

    def __init__(self, lanes: int, transfers: Iterable[Transfer], device: torch.device) -> None:
        names = tuple(transfers)
        memory = torch.zeros(1 + lanes + 2 * len(names), dtype=torch.int64, device=device)
        self.started = memory[:1]
        self.all = memory[1 : 1 + lanes]
        self.since = [memory[1 + lane : 2 + lane] for lane in range(lanes)]
        rest = memory[1 + lanes :]
        self.sent = {name: rest[2 * i : 2 * i + 1] for i, name in enumerate(names)}
        self.arrived = {name: rest[2 * i + 1 : 2 * i + 2] for i, name in enumerate(names)}


class Clocks:
    """Of the lanes and links of one engine.

    Args:
        factor: real time per emulated time.
    """

    def __init__(self, lanes: int, device: torch.device, factor: float) -> None:
        self.factor, self.lanes, self.device = factor, lanes, device
        self._memory = torch.zeros(lanes + lanes * lanes + 2 * lanes + 2, dtype=torch.int64, device=device)
        torch.cuda.current_stream(device).synchronize()
        self._lanes = [self._memory[i : i + 1] for i in range(lanes)]
        at = lanes
        self._links = {(s, t): self._memory[at + s * lanes + t :][:1] for s in range(lanes) for t in range(lanes)}
        at += lanes * lanes
        self._counts = [self._memory[at + 2 * i : at + 2 * i + 2] for i in range(lanes)]
        self._totals = self._memory[-2:]

    def words(self, transfers: Iterable[Transfer]) -> Words:
        """Clocks for a request, on the current stream."""
        return Words(self.lanes, transfers, self.device)

    # Each of these enqueues a kernel on the current stream.

    def begin(self, words: Words) -> None:
        """The request starts now."""
        launch("clock_begin", 1, 1, words.all, (self.lanes, 4), words.started)

    def ran(self, lane: int, words: Words, ns: float) -> None:
        """Behind a segment: spins until its modelled time is over."""
        launch("clock_ran", 1, 1, self._lanes[lane], words.since[lane], round(ns), self._counts[lane])

    def sent(self, lane: int, words: Words, name: Transfer) -> None:
        """Behind what made a value, on the sender's stream."""
        launch("clock_sent", 1, 1, words.since[lane], words.sent[name])

    def moved(self, words: Words, name: Transfer, ns: float) -> None:
        """Behind the copy, on the link's stream: spins until the value has arrived."""
        source, target, _ = name
        link = self._links[source, target]
        launch("clock_moved", 1, 1, link, words.sent[name], round(ns), words.arrived[name], self._counts[target])

    def taken(self, lane: int, words: Words, name: Transfer) -> None:
        """On the receiver's stream: what comes next starts no sooner than the value arrived."""
        launch("clock_taken", 1, 1, words.since[lane], words.arrived[name])

    def level(self, words: Words) -> None:
        """All lanes and links go on together, no sooner than the request of ``words`` began."""
        launch("clock_level", 1, 1, self._memory, (self.lanes * (1 + self.lanes), 4), words.started)

    def end(self, words: Words) -> None:
        """Behind all that the request has done."""
        launch("pace_end", 1, 1, words.all, (self.lanes, 4), words.started, self._totals)

    def reset(self) -> None:
        """Starts the counts anew, on the current stream."""
        self._memory[-2 - 2 * self.lanes :].zero_()

    def result(self) -> Emulation:
        """What came of the requests that are done, as far as the lanes are; waits for the current stream alone."""
        counts = [c.tolist() for c in self._counts]
        requests, total = self._totals.tolist()
        mean = total / max(requests, 1) / 1e3 / self.factor
        return Emulation(self.factor, requests, mean, sum(c[0] for c in counts), sum(c[1] for c in counts))
