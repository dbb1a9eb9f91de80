"""CUDA lanes that serve many requests at once: one thread issues the segments of all requests, as the board says.

A GPU works off what was enqueued; to decide late and yet keep it busy, each lane and each link is given at most ``AHEAD``
segments and transfers that are not known to be done. What is known comes from events, which the issuing thread asks for while
anything is under way; it sleeps in between, and until something comes where nothing is. Of what may be issued, that goes first
whose inputs have arrived: on a stream, what waits for its inputs keeps those behind it waiting too. Only a lane that would
otherwise stand idle is given a segment whose inputs are still on their way, and in static order every lane is, since there the
order is fixed. Collective libraries see one order of transfers, that of this thread.

In static order, while enough requests for one program are there, they go through graphs of whole periods (``cuda_periods.py``).

The thread that brings a request waits for its end, so as many requests are in flight as threads bring some. Paced lanes
(``cuda_clocks.py``) are emulated slices of one GPU.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..passes.ir import Recv, Run, Wait
from .board import Board, Order, Route, Step, Ticket
from .codegen import first_line
from .cuda_clocks import Clocks
from .cuda_periods import Cycle, PeriodGraphs, sent_of
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
        self._line: list[Ticket] = []  # requests that are neither on the board nor in periods, oldest first
        self._cycle: Cycle | None = None
        self._short = False  # A cycle waits for places that requests which are done have not left yet.
        self.periods = 0
        self._stream: Any = None  # the issuing thread's own
        self._asked = False  # Nothing could be issued, and nothing has changed since.
        self._closed = False
        self._started = time.monotonic_ns()
        self._busy = [0.0] * count
        self._queued = [0] * count  # segments issued and not known to be done, per lane
        #: Per lane what its stream will do, in order; behind them, what is left of requests whose periods are over.
        self._flying: list[deque[_Tracked]] = [deque() for _ in range(count + 1)]
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
            self._wake()

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
            request = executor.open(args, placed=self._cycle is None)
            ticket = Ticket(number, route, request)
            try:
                with self._lock:
                    if self._closed:
                        raise RuntimeError("the engine's lanes are closed")
                    bisect.insort(self._line, ticket, key=lambda t: t.number)
                    ticket.admitted = time.monotonic_ns()
                    self._wake()
                request.done.wait()
                if request.error is not None:
                    raise request.error
            except BaseException:
                executor.give_up(request)
                raise
            results = executor.close(request)
        if self._short:
            with self._lock:
                self._short = False
                self._wake()
        return results, (time.monotonic_ns() - ticket.admitted) / 1e9 / (self.factor or 1.0)

    def abort(self, number: int, error: BaseException) -> bool:
        """Ends request ``number`` with ``error``. One that overwrites its caller's tensors goes on to its end: False."""
        with self._lock:
            for ticket in self._under_way():
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
            self._wake()
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
        staged = [t for t in self._cycle.stages if t is not None] if self._cycle is not None else []
        return list({id(t): t for t in (*self._line, *self._board.tickets, *staged, *flying)}.values())

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
            self._stream = torch.cuda.Stream(self.streams[0].device)
        while (work := self._next()) is not None:
            work()
            del work  # A waiting thread must not keep the last request's tensors alive.

    def _next(self) -> Callable[[], None] | None:
        """What is to be issued next. None: the lanes are closed."""
        with self._lock:
            while True:
                self._observe()
                if not self._asked:
                    found = self._next_in_cycle() if self._cycle is not None else self._next_on_board()
                    if found is not None:
                        return found
                    self._asked = True
                flying = any(self._flying) or any(self._moving.values()) or (self._cycle is not None and self._cycle.launched)
                if self._closed and not flying and not self._under_way():
                    return None
                self._changed.wait(_POLL if flying else None)

    def _wake(self) -> None:
        self._asked = False
        self._changed.notify()

    def _next_on_board(self) -> Callable[[], None] | None:
        gathering = self._gathering()
        if gathering and not self._board.tickets and not any(self._flying) and not any(self._moving.values()):
            return None if self._short else self._begin_cycle
        if self._line and not gathering:
            return partial(self._admit, self._line.pop(0))
        now = time.monotonic_ns()
        first = next(self._turn)
        for i in range(len(self.streams)):
            found = self._board.next((first + i) % len(self.streams), now)
            if isinstance(found, Step):
                return partial(self._issue, found)
        return None

    def _admit(self, ticket: Ticket) -> None:
        """Puts a request of the line on the board."""
        request: CudaRequest = ticket.load
        error: BaseException | None = None
        if request.place is None:
            try:
                with ISSUING, torch.inference_mode(request.inference), torch.no_grad():
                    stream = self._stream if self._stream is not None else torch.cuda.current_stream()
                    request.executor.place(request, stream)
            except BaseException as raised:
                error = raised
        with self._lock:
            since = ticket.admitted
            self._board.admit(ticket, time.monotonic_ns())
            ticket.admitted = since
            self._asked = False
            error = error or request.error
            if error is not None:
                self._fail(ticket, error)
                request.executor.displace(request)

    def _issue(self, step: Step) -> None:
        """One instruction, and those right behind it that cost the lane nothing."""
        request: CudaRequest = step.ticket.load
        following: Step | None = step
        with ISSUING, torch.inference_mode(request.inference), torch.no_grad():
            while following is not None:
                step, error, flight = following, None, None
                try:
                    flight = request.executor.perform(step.lane, step.position, step.instruction, request)
                except BaseException as raised:
                    error = raised
                with self._lock:
                    now = time.monotonic_ns()
                    self._issued(step, flight, error, now)
                    following = self._board.following(step, now)
        with self._lock:
            finished, self._board.finished = self._board.finished, []
        for ticket in finished:
            self._finish(ticket)

    def _issued(self, step: Step, flight: Flight | None, error: BaseException | None, now: int) -> None:
        ticket, lane, x = step.ticket, step.lane, step.instruction
        request: CudaRequest = ticket.load
        self._asked = False
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
        self._board.executed(step, now)
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
        cycle = self._cycle
        while cycle is not None and cycle.launched:
            try:
                if not cycle.launched[0][0].query():
                    break
            except Exception as error:
                for ticket in self._under_way():
                    self._fail(ticket, error)
            _, stages = cycle.launched.popleft()
            self._asked = False
            for lane, ms in cycle.busy_ms(stages).items():
                self._busy[lane] += 1e6 * ms

    def _landed(self, tracked: _Tracked) -> None:
        flight, request = tracked.flight, tracked.ticket.load
        self._asked = False
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
            self._asked = False
            if error is not None:
                self._fail(ticket, error)
            request.issued = True
            if request.tail is not None and request.error is None:
                flight = Flight(request.tail)
                request.flights[id(flight)] = flight
                self._flying[executor.home].append(_Tracked(flight, ticket, executor.home, None, False))
            self._settle(request)

    # -- periods

    def _gathering(self) -> bool:
        """Whether those in line are to wait for a cycle of periods: enough requests of one program are there, and places in
        which it is captured."""
        if self._board.order != "static" or not self._board.pipelined or not self._line:
            return False
        head: CudaRequest = self._line[0].load
        executor, period = head.executor, head.executor.period
        if period is None:
            return False
        tickets = (*self._line, *self._board.tickets)
        # With fewer than there are stages some stand idle; with few of them the lanes do better without.
        if 2 * len(tickets) <= period.slots or any(t.load.executor is not executor for t in tickets):
            return False
        cycle: Cycle | None = executor.cycle
        return cycle.fits(head) if cycle is not None else executor.complete(head.key) >= period.slots

    def _begin_cycle(self) -> None:
        with self._lock:
            if not self._line:
                return
            head: CudaRequest = self._line[0].load
            executor, period = head.executor, head.executor.period
            assert period is not None
            for ticket in self._line:  # Some were given a place before it was known that they need none.
                executor.displace(ticket.load)
            cycle: Cycle | None = executor.cycle
            places = executor.claim(head.key, period.slots, period.slots + 1) if cycle is None else ()
            if cycle is None and not places:
                self._short = True
                return
        if cycle is None:
            try:
                with torch.inference_mode(False), torch.no_grad():
                    cycle = executor.cycle = Cycle(PeriodGraphs(executor, places))
            except Exception as error:
                executor.unclaim(places)
                with self._lock:
                    executor.reasons["periods"] = f"they cannot be captured: {type(error).__name__}: {first_line(error)}"
                    executor.period = None
                    self._asked = False
                return
        with self._lock:
            self._cycle = cycle
            self._asked = False

    def _next_in_cycle(self) -> Callable[[], None] | None:
        cycle = self._cycle
        assert cycle is not None
        comes = bool(self._line) and self._board.order == "static" and cycle.fits(self._line[0].load)
        if cycle.empty and not comes:
            if not cycle.launched:
                self._cycle = None
                self._wake()
                return self._next_on_board()
            return None
        # A period behind the running one keeps the lanes busy. One that nobody comes in with can wait for its turn: until then
        # somebody may come.
        if len(cycle.launched) >= (AHEAD if comes else 1):
            return None
        return partial(self._launch, cycle, self._line.pop(0) if comes else None)

    def _launch(self, cycle: Cycle, ticket: Ticket | None) -> None:
        error: BaseException | None = None
        done: Ticket | None = None
        try:
            with ISSUING, torch.no_grad():
                if ticket is not None:
                    cycle.executor.displace(ticket.load)
                    if not cycle.holds(ticket.load):
                        ticket.load.key = None  # No graph has read where its weights are: by segments, after these.
                        with self._lock:
                            self._asked = False
                            bisect.insort(self._line, ticket, key=lambda t: t.number)
                        return
                done = cycle.launch(ticket)
                self.periods += 1
        except BaseException as raised:
            error = raised
        with self._lock:
            self._asked = False
            if error is not None:
                for one in (ticket, *cycle.stages):
                    if one is not None:
                        self._fail(one, error)
                cycle.stages.extend([None] * len(cycle.stages))
            if done is None:
                return
            request: CudaRequest = done.load
            self._board.moved += sent_of(cycle.executor, done.route.sizes)
            request.issued = True
            if request.error is None:
                flight = cycle.flight(done)
                request.flights[id(flight)] = flight
                self._flying[-1].append(_Tracked(flight, done, 0, None, False))

    def _settle(self, request: CudaRequest) -> None:
        if request.issued and not request.flights and not request.done.is_set():
            request.done.set()

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        request: CudaRequest = ticket.load
        if request.error is None:
            request.error = error
        self._line = [t for t in self._line if t is not ticket]
        self._board.drop(ticket)
        if not ticket.busy:
            request.done.set()
        self._wake()
