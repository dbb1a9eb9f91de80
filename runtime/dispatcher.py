"""CPU lanes that serve many requests at once: one thread a lane, which asks the board what to do next.

Each request has an environment of its own on every lane (its slot), so requests in flight share nothing but replicas of weights,
which are never overwritten: an outdated one is replaced. Requests that overwrite the same storage follow each other. The thread
that brings a request waits for its end, so as many requests are in flight as threads bring some.

With a ``factor`` the lanes emulate modelled devices as ``pacing.py`` says, but their clocks and those of the links are shared by
all requests: a lane's segment starts when the lane is free and its inputs are there, in modelled time, and the thread waits until
the real clock has caught up. A segment that was computed later than its modelled end is an overrun.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..passes import torch_compat
from ..passes.errors import ProgramError
from ..passes.ir import Free, Hold, Out, Recv, Run, Send, Signal, Wait
from .board import Board, Order, Route, Step, Ticket
from .codegen import lookup
from .cpu_lanes import CpuLaneExecutor
from .lane_pool import LanePool
from .pacing import Emulation
from .replicas import Replica, Residents, Sighting, at_exit, own_copy
from .slices import own_part, update_part


class _Load:
    """What a ticket carries: the tensors of one request."""

    def __init__(self, executor: CpuLaneExecutor, args: list[Any]) -> None:
        self.executor = executor
        self.inputs, self.envs = executor.open(args)
        self.seen: dict[str, Sighting] = executor.sightings(self.envs[executor.home])
        self.inbox: list[dict[tuple[int, str], Any]] = [{} for _ in self.envs]
        self.inference = torch.is_inference_mode_enabled()
        self.written = frozenset(torch_compat.storage_key(self.inputs[name]) for name in executor.graph.mutated)
        self.marks: list[tuple[str, Replica, int]] = []
        self.error: BaseException | None = None
        self.done = threading.Event()


class Dispatcher:
    """The lanes of one engine.

    Args:
        devices: the names of the lanes.
        threads: intra-operator threads of each.
        order, pipelined: see ``board.py``.
        factor: real time per modelled time; 0: unpaced.
    """

    def __init__(
        self, devices: Sequence[str], threads: int, *, order: Order = "due", pipelined: bool = True, factor: float = 0.0
    ) -> None:
        lanes = len(devices)
        self.factor = factor
        self.residents = [Residents(name) for name in devices]
        self._board = Board(lanes, order, pipelined=pipelined)
        self._lock = threading.Lock()
        self._lanes = [threading.Condition(self._lock) for _ in range(lanes)]
        self._gate = threading.Condition(self._lock)
        self._waiting: list[tuple[int, frozenset[int]]] = []
        self._closed = False
        self._requests = 0
        self._total = 0.0
        self._started = time.monotonic_ns()
        self._pool = LanePool(lanes, threads)
        self._pool.submit([partial(self._serve, lane) for lane in range(lanes)])

    @property
    def order(self) -> Order:
        return self._board.order

    @order.setter
    def order(self, order: Order) -> None:
        """From the next decision of each lane on. Every order respects all dependences, so requests in flight go on."""
        with self._lock:
            self._board.order = order
            self._wake_all()

    def call(self, number: int, route: Route, executor: CpuLaneExecutor, args: list[Any]) -> tuple[list[Any], float]:
        """Runs one request and waits for it.

        Args:
            number: its age: the smaller, the older. No two calls that run at once may have the same.
            args: the graph's inputs, in a list that is emptied.

        Returns:
            The graph's outputs, and the seconds (emulated ones, if paced) that it was on the lanes.
        """
        load = _Load(executor, args)
        ticket = Ticket(number, route, load)
        with self._lock:
            self._wait_turn(number, load.written)
            if self._closed:
                raise RuntimeError("the engine's lanes are closed")
            self._board.admit(ticket, time.monotonic_ns())
            self._wake_all()
        load.done.wait()
        ticket.load = None
        if load.error is not None:
            raise load.error
        for value, replica, use in load.marks:
            at_exit(load.inputs[value], partial(replica.mark, use))
        results = executor.close(load.envs[executor.home], load.inputs)
        return results, (ticket.finished - ticket.admitted) / 1e9 / (self.factor or 1.0)

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
        if not self.factor:
            return None
        with self._lock:
            mean = self._total / self._requests if self._requests else 0.0
            return Emulation(self.factor, self._requests, mean / 1e3 / self.factor, self._board.steps, self._board.overran)

    def busy(self) -> tuple[tuple[float, ...], int, float]:
        """Share of the time since the last :meth:`reset` that each lane was busy, bytes moved, and that time in ns."""
        with self._lock:
            elapsed = max(1, time.monotonic_ns() - self._started)
            return tuple(b / elapsed for b in self._board.busy), self._board.moved, float(elapsed)

    def reset(self) -> None:
        """Starts the counts anew."""
        with self._lock:
            board = self._board
            board.busy, board.moved, board.steps, board.overran = [0.0] * board.lanes, 0, 0, 0
            self._requests, self._total, self._started = 0, 0.0, time.monotonic_ns()

    def close(self) -> None:
        """Ends the lanes once the requests in flight are done."""
        with self._lock:
            self._closed = True
            self._wake_all()
            self._gate.notify_all()
        self._pool.close()

    def _wait_turn(self, number: int, written: frozenset[int]) -> None:
        """Waits until no older request in flight or in line here overwrites what this one does."""
        if not written:
            return
        mine = (number, written)
        self._waiting.append(mine)
        try:
            while not self._closed and (
                any(t.load is not None and t.load.written & written for t in self._board.tickets)
                or any(n < number and w & written for n, w in self._waiting)
            ):
                self._gate.wait()
        finally:
            self._waiting.remove(mine)
            self._gate.notify_all()

    def _wake_all(self) -> None:
        for condition in self._lanes:
            condition.notify()

    def _serve(self, lane: int) -> None:
        while (step := self._next(lane)) is not None:
            error: BaseException | None = None
            try:
                load: _Load = step.ticket.load
                with torch.inference_mode(load.inference), torch.no_grad():
                    self._execute(step, load)
            except BaseException as raised:
                error = raised
            with self._lock:
                self._board.executed(step, time.monotonic_ns())
                if error is not None:
                    self._fail(step.ticket, error)
                else:
                    self._settle(step)
            del step, error, load

    def _next(self, lane: int) -> Step | None:
        """What ``lane`` is to compute or copy next; what costs nothing is done here. None: the lanes are closed."""
        with self._lock:
            while True:
                now = time.monotonic_ns()
                found = self._board.next(lane, now)
                self._finish()
                if isinstance(found, float):
                    if self._closed and not self._board.tickets:
                        self._wake_all()
                        return None
                    self._lanes[lane].wait(None if found == math.inf else max(0.0, (found - now) / 1e9))
                elif isinstance(found.instruction, (Run, Recv, Hold)):
                    return found
                else:
                    try:
                        self._pass(found)
                    except Exception as error:  # The lane must go on for the others.
                        self._board.executed(found, now)
                        self._fail(found.ticket, error)
                    else:
                        self._board.executed(found, now)
                        self._settle(found)

    def _pass(self, step: Step) -> None:
        """Executes what costs a lane nothing."""
        load: _Load = step.ticket.load
        lane, x = step.lane, step.instruction
        if isinstance(x, Send):
            load.inbox[x.to][lane, x.value] = load.envs[lane][x.value]
        elif isinstance(x, Free):
            for value in x.values:
                del load.envs[lane][value]
        elif not isinstance(x, (Signal, Wait, Out)):
            raise ProgramError(f"CPU lanes cannot execute {x.to_text()!r}")

    def _settle(self, step: Step) -> None:
        """Wakes the lanes that ``step`` concerns, and the caller of a request that is done."""
        x = step.instruction
        if isinstance(x, (Send, Signal)):
            self._lanes[x.to].notify()
        elif isinstance(x, (Recv, Wait)):
            self._lanes[x.source].notify()
        if step.ticket.dropped and not step.ticket.busy:
            step.ticket.load.done.set()
        self._finish()

    def _finish(self) -> None:
        for ticket in self._board.finished:
            self._requests += 1
            self._total += ticket.finished - ticket.admitted
            load: _Load = ticket.load
            if load.written:
                self._gate.notify_all()
            load.done.set()
            if not self._board.pipelined or self._closed:
                self._wake_all()
        self._board.finished.clear()

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        load: _Load = ticket.load
        if load.error is None:
            load.error = error
        self._board.drop(ticket)
        if not ticket.busy:
            load.done.set()
        self._gate.notify_all()
        self._wake_all()

    def _execute(self, step: Step, load: _Load) -> None:
        lane, x, env, executor = step.lane, step.instruction, load.envs[step.lane], load.executor
        if isinstance(x, Run):
            segment = executor.segments[lane, step.position]
            try:
                results = segment.compiled.call([lookup(env, name) for name in segment.compiled.inputs])
            except Exception as error:
                device = executor.program.lanes[lane].device
                error.add_note(f"in segment {segment.name} ({' '.join(segment.kernels)}) on lane {lane} ({device})")
                raise
            env.update(zip(segment.outputs, results, strict=True))
            for storage, version in segment.written:
                env[version] = env[storage]
        elif isinstance(x, Recv):
            payload = load.inbox[lane].pop((x.source, x.value))
            storage = executor.graph.values[x.value].storage
            if storage == x.value:
                env[x.value] = own_part(payload, x.boxes) if x.boxes else own_copy(payload)
            else:
                if x.boxes:
                    update_part(env[storage], payload, x.boxes)
                else:
                    env[storage].copy_(payload)
                env[x.value] = env[storage]
        else:
            assert isinstance(x, Hold)
            for value in x.values:
                replica = self.residents[lane].of(load.seen[value])
                # Only requests that overwrite it share a volatile one, and they come one after the other.
                volatile = value in executor.graph.mutated
                use = replica.bring(load.seen[value], volatile, in_place=volatile)
                env[value] = replica.tensor
                if (lane, value) in executor.writers:
                    load.marks.append((value, replica, use))
