"""CUDA lanes that serve many requests at once: one thread issues the segments of all requests, as the board says.

A GPU works off what was enqueued; to decide late and yet keep it busy, each lane and each link is given at most ``AHEAD``
segments and transfers that are not known to be done. What is known comes from events, which the issuing thread asks for while
anything is under way; it sleeps in between, and until something comes where nothing is. Of what may be issued, that goes first
whose inputs have arrived: on a stream, what waits for its inputs keeps those behind it waiting too. Only a lane that would
otherwise stand idle is given a segment whose inputs are still on their way, and in static order every lane is, since there the
order is fixed. Collective libraries see one order of transfers, that of this thread.

The thread that brings a request waits for its end, so as many requests are in flight as threads bring some. Paced lanes
(``cuda_clocks.py``) are emulated slices of one GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..passes.ir import Recv, Run, Wait
from .board import Board, Order, Route, Step, Ticket
from .cuda_clocks import Clocks
from .cuda_requests import CudaRequest, CudaRequests, Flight
from .cuda_streams import ISSUING, LaneStreams
from .pacing import Emulation
from .replicas import Residents

AHEAD = 2
"""Segments that a lane may have waiting or running, and transfers a link."""
_POLL = 20e-6  # seconds between two looks at events


@dataclass
class _Tracked:
    """A flight on its lane or link; ``link``: the transfer counts for its link."""

    flight: Flight
    ticket: Ticket
    lane: int
    link: tuple[int, int] | None
    segment: bool


@dataclass
class _Writer:
    """A request that overwrites what others may see; ``under_way``: not only in line."""

    number: int
    written: frozenset[int]
    under_way: bool = False


class CudaDispatcher:
    """The lanes of one engine.

    Args:
        streams: the lanes.
        order, pipelined: see ``board.py``.
        clocks: of paced lanes.
        residents: of each lane.
    """

    def __init__(
        self,
        streams: Sequence[LaneStreams],
        residents: Sequence[Residents],
        *,
        order: Order = "due",
        pipelined: bool = True,
        clocks: Clocks | None = None,
    ) -> None:
        self.streams, self.residents, self.clocks = streams, residents, clocks
        self.factor = clocks.factor if clocks is not None else 0.0
        count = len(streams)
        self._board = Board(count, order, pipelined=pipelined, gate=self)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._gate = threading.Condition(self._lock)
        self._writers: list[_Writer] = []
        self._closed = False
        self._started = time.monotonic_ns()
        self._busy = [0.0] * count
        self._queued = [0] * count  # segments issued and not known to be done, per lane
        self._flying: list[deque[_Tracked]] = [deque() for _ in range(count)]  # per lane: what its stream will do, in order
        self._moving: dict[tuple[int, int], deque[_Tracked]] = {}
        self._turn = itertools.count()
        self._thread = threading.Thread(target=self._serve, name="tessera-issue", daemon=True)
        self._thread.start()

    @property
    def order(self) -> Order:
        return self._board.order

    @order.setter
    def order(self, order: Order) -> None:
        """From the next decision of each lane on. Every order respects all dependences, so requests in flight go on."""
        with self._lock:
            self._board.order = order
            self._changed.notify()

    # -- by threads that bring requests

    def call(self, number: int, route: Route, executor: CudaRequests, args: list[Any]) -> tuple[list[Any], float]:
        """Runs one request, behind what the calling thread has enqueued on its current stream, and waits for its end.

        Args:
            number: its age: the smaller, the older. No two calls that run at once may have the same.
            route: without times: what a step takes is seen when it is done.
            args: the graph's inputs, in a list that is emptied.

        Returns:
            The graph's outputs, for the current stream, and the seconds (emulated ones, if paced) that it was on the lanes.
        """
        with self._in_turn(number, executor.written(args)):
            request = executor.open(args)
            ticket = Ticket(number, route, request)
            try:
                with self._lock:
                    if self._closed:
                        raise RuntimeError("the engine's lanes are closed")
                    self._board.admit(ticket, time.monotonic_ns())
                    self._changed.notify()
                request.done.wait()
                if request.error is not None:
                    raise request.error
            except BaseException:
                executor.give_up(request)
                raise
            results = executor.close(request)
        return results, (time.monotonic_ns() - ticket.admitted) / 1e9 / (self.factor or 1.0)

    def abort(self, number: int, error: BaseException) -> bool:
        """Ends request ``number`` with ``error``. One that overwrites its caller's tensors goes on to its end: False."""
        with self._lock:
            for ticket in self._board.tickets:
                if ticket.number == number and not ticket.load.written:
                    self._fail(ticket, error)
                    return True
        return False

    def emulation(self) -> Emulation | None:
        """What came of paced requests; None if unpaced."""
        return None if self.clocks is None else self.clocks.result()

    def busy(self) -> tuple[tuple[float, ...], int, float]:
        """Share of the time since the last :meth:`reset` that each lane was busy, bytes moved, and that time in ns."""
        with self._lock:
            elapsed = max(1, time.monotonic_ns() - self._started)
            return tuple(b / elapsed for b in self._busy), self._board.moved, float(elapsed)

    def reset(self) -> None:
        """Starts the counts anew."""
        with self._lock:
            self._busy, self._board.moved = [0.0] * len(self._busy), 0
            self._board.steps = self._board.overran = 0
            self._started = time.monotonic_ns()
        if self.clocks is not None:
            self.clocks.reset()

    def close(self) -> None:
        """Ends the lanes once the requests in flight are done."""
        with self._lock:
            self._closed = True
            self._changed.notify()
            self._gate.notify_all()
        self._thread.join()

    @contextlib.contextmanager
    def _in_turn(self, number: int, written: frozenset[int]) -> Iterator[None]:
        """Waits until no older request in line and none under way overwrites what this one does."""
        if not written:
            yield
            return
        mine = _Writer(number, written)
        with self._lock:
            self._writers.append(mine)
            while not self._closed and any(
                x.written & written and (x.under_way or x.number < number) for x in self._writers if x is not mine
            ):
                self._gate.wait()
            mine.under_way = True
        try:
            yield
        finally:
            with self._lock:
                self._writers.remove(mine)
                self._gate.notify_all()

    def _under_way(self) -> list[Ticket]:
        """Requests that are not done: on the board, or issued."""
        flying = [x.ticket for queue in (*self._flying, *self._moving.values()) for x in queue]
        return list({id(t): t for t in (*self._board.tickets, *flying)}.values())

    # -- what may be chosen (``board.Gate``)

    def runs(self, lane: int, tickets: list[Ticket]) -> list[Ticket]:
        if self._queued[lane] >= AHEAD:
            return []
        if not self._board.pipelined and any(x.ticket not in tickets for queue in self._flying for x in queue):
            return []
        if self._board.order == "static":
            return tickets
        return [t for t in tickets if not t.load.incoming[lane]] or ([] if self._queued[lane] else tickets)

    def transfers(self, source: int, target: int, moving: int, waiting: list[tuple[Ticket, str]]) -> list[tuple[Ticket, str]]:
        if moving >= AHEAD:
            return []
        if self._board.order == "static":
            return waiting
        makers = [(ticket.load.makers.get((source, target, name)), ticket, name) for ticket, name in waiting]
        ready = [(ticket, name) for maker, ticket, name in makers if maker is None or maker.done]
        return ready or ([] if moving else waiting)

    # -- the issuing thread

    def _serve(self) -> None:
        if self.streams[0].device.type == "cuda":
            torch.cuda.set_device(self.streams[0].device)
        while (step := self._next()) is not None:
            error: BaseException | None = None
            flight: Flight | None = None
            request: CudaRequest = step.ticket.load
            executor = request.executor
            try:
                with ISSUING, torch.inference_mode(request.inference), torch.no_grad():
                    flight = executor.perform(step.lane, step.position, step.instruction, request)
            except BaseException as raised:
                error = raised
            with self._lock:
                self._issued(step, flight, error)
                finished, self._board.finished = self._board.finished, []
            for ticket in finished:
                self._finish(ticket)
            del step, request, executor, flight, error, finished

    def _next(self) -> Step | None:
        """What is to be issued next. None: the lanes are closed."""
        with self._lock:
            while True:
                self._observe()
                now = time.monotonic_ns()
                first = next(self._turn)
                for i in range(len(self.streams)):
                    found = self._board.next((first + i) % len(self.streams), now)
                    if isinstance(found, Step):
                        return found
                flying = any(self._flying) or any(self._moving.values())
                if self._closed and not self._board.tickets and not flying:
                    return None
                self._changed.wait(_POLL if flying else None)

    def _issued(self, step: Step, flight: Flight | None, error: BaseException | None) -> None:
        ticket, lane, x = step.ticket, step.lane, step.instruction
        request: CudaRequest = ticket.load
        link = None
        if isinstance(x, (Recv, Wait)) and not ticket.dropped:
            link = (x.source, lane)
        if flight is not None:
            request.flights[id(flight)] = flight
            queue = self._flying[lane] if link is None else self._moving.setdefault(link, deque())
            queue.append(_Tracked(flight, ticket, lane, link, isinstance(x, Run)))
            self._queued[lane] += isinstance(x, Run)
            request.incoming[lane] += link is not None
        elif link is not None:
            self._board.delivered(*link)
        self._board.executed(step, time.monotonic_ns())
        if error is not None:
            self._fail(ticket, error)
        elif ticket.dropped and not ticket.busy:
            request.done.set()

    def _observe(self) -> None:
        """Takes note of what is done."""
        for queue in (*self._flying, *self._moving.values()):
            while queue:
                try:
                    if not queue[0].flight.end.query():
                        break
                except Exception as error:  # The device is lost: nobody's result will come.
                    for ticket in self._under_way():
                        self._fail(ticket, error)
                self._landed(queue.popleft())

    def _landed(self, tracked: _Tracked) -> None:
        flight, request = tracked.flight, tracked.ticket.load
        flight.done = True
        request.flights.pop(id(flight), None)
        if tracked.segment:
            self._queued[tracked.lane] -= 1
            if flight.begin is not None and request.error is None:
                self._busy[tracked.lane] += 1e6 * flight.begin.elapsed_time(flight.end)
        if tracked.link is not None:
            request.incoming[tracked.lane] -= 1
            self._board.delivered(*tracked.link)
        self._settle(request)

    def _finish(self, ticket: Ticket) -> None:
        """All instructions of a request are issued: so are its outputs."""
        request: CudaRequest = ticket.load
        executor = request.executor
        error = request.error
        if error is not None:
            return
        try:
            with ISSUING, torch.inference_mode(request.inference), torch.no_grad():
                executor.finish(request)
        except BaseException as raised:
            error = raised
        with self._lock:
            if error is not None:
                self._fail(ticket, error)
            request.issued = True
            if request.tail is not None and request.error is None:
                flight = Flight(request.tail)
                request.flights[id(flight)] = flight
                self._flying[executor.home].append(_Tracked(flight, ticket, executor.home, None, False))
            self._settle(request)

    def _settle(self, request: CudaRequest) -> None:
        if request.issued and not request.flights and not request.done.is_set():
            request.done.set()

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        request: CudaRequest = ticket.load
        if request.error is None:
            request.error = error
        self._board.drop(ticket)
        if not ticket.busy:
            request.done.set()
        self._changed.notify()
