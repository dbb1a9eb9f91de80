"""Requests on a board in simulated time: discrete events, no threads, nothing computed. The fourth interpreter of programs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..passes.errors import ProgramError
from .board import Board, Order, Route, Step, Ticket


@dataclass(frozen=True)
class Passage:
    """One simulated request: when it came, when it was let in, when it was done; µs."""

    number: int
    arrival: float
    start: float
    finish: float


@dataclass(frozen=True)
class Run:
    """What came of a simulation: the requests in order, the µs that each lane was busy, bytes moved."""

    passages: tuple[Passage, ...]
    busy: tuple[float, ...]
    moved: int

    @property
    def period(self) -> float:
        """µs between two requests in the steady state: the slope of the line through the ends of the middle half of them."""
        ends = sorted(p.finish for p in self.passages)
        ends = ends[len(ends) // 4 : len(ends) - len(ends) // 4]
        if len(ends) < 2:
            return math.nan
        middle, mean = (len(ends) - 1) / 2, sum(ends) / len(ends)
        return sum((i - middle) * (e - mean) for i, e in enumerate(ends)) / sum((i - middle) ** 2 for i in range(len(ends)))


def drive(
    choose: Callable[[int], Sequence[Route]],
    arrivals: Iterable[float],
    *,
    lanes: int,
    inflight: int,
    order: Order = "due",
    pipelined: bool = True,
    watch: Callable[[Step], None] = lambda _: None,
    ended: Callable[[Passage], None] = lambda _: None,
) -> Run:
    """Sends requests through ``lanes`` lanes.

    Args:
        choose: number of a request, when it is let in → the routes that it takes one after the other, whose times are in µs.
        arrivals: when each request comes, ascending.
        inflight: how many may be on the lanes at once; the others wait.
        watch: called with every instruction when it starts; ended: with every request when it is done.

    Raises:
        ProgramError: requests are in flight and nothing can happen any more.
    """
    board = Board(lanes, order, pipelined=pipelined)
    coming = deque(enumerate(arrivals))
    queue: deque[tuple[int, float]] = deque()
    done: list[Passage] = []
    came: dict[int, tuple[float, float]] = {}
    left: dict[int, list[Route]] = {}
    now = 0.0
    while coming or queue or board.tickets:
        while coming and coming[0][1] <= now:
            queue.append(coming.popleft())
        while queue and len(board.tickets) < inflight:
            number, arrival = queue.popleft()
            came[number] = (arrival, now)
            first, *left[number] = choose(number)
            board.admit(Ticket(number, first), now)
        wake = coming[0][1] if coming else math.inf
        moving = True
        while moving:
            moving = False
            wakes = []
            for lane in range(lanes):
                while isinstance(found := board.next(lane, now), Step):
                    watch(found)
                    board.executed(found, now)
                    moving = True
                wakes.append(found)
        finished, board.finished = board.finished, []
        for ticket in finished:
            if left[ticket.number]:
                board.admit(Ticket(ticket.number, left[ticket.number].pop(0)), ticket.finished)
                continue
            del left[ticket.number]
            done.append(Passage(ticket.number, *came.pop(ticket.number), ticket.finished))
            ended(done[-1])
        if finished:
            continue
        wake = min([wake, *wakes])
        if wake == math.inf and board.tickets:
            stuck = ", ".join(
                f"request {t.number} at {[x and x.to_text() for x in map(t.next, range(lanes))]}" for t in board.tickets
            )
            raise ProgramError(f"nothing can happen any more: {stuck}")
        if wake < math.inf:
            now = max(now, wake)
    return Run(tuple(sorted(done, key=lambda p: p.number)), tuple(board.busy), board.moved)
