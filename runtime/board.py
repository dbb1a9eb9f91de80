"""Which lane runs what next, of many requests in flight: no threads, no tensors and no clock of its own.

Each request has one instruction pointer a lane. Instructions that cost a lane nothing (sends, receives, holds, frees) are
served as soon as they can be; of the segments, a lane runs

- ``due``: of those that can start, the one that comes first in the steady state (``passes/steady.py``): of equal segments that
  of the oldest request, but a young request's early segment before an old one's late segment where other lanes would idle
  without it;
- ``age``: of those that can start, the oldest request's;
- ``fifo``: the one that could have started first;
- ``static``: the one that comes next in the steady state, waiting for it if need be.

The order of two segments is that of ``base + start``: the starts respect the program's dependences, and a request's base is when
the busiest lane or link would have done all that the requests before it ask of it: one period after its predecessor's, where all
follow one program. So one total order respects all dependences, whatever requests come and go: under ``static`` the least segment
that has not run is first in its lane and has all it needs, and the lanes cannot deadlock.

Where requests of unlike length are in flight the longer ones have more slack: each is due when it would end if all took the same
multiple of the time that they take alone (the multiple that was seen of late). Otherwise the long segments of a prefill would
hold up the short ones of decode steps at every crossing, and lanes that wait for those would idle.

A link carries one value at a time in each direction; of the values that wait for it the oldest request's goes first (``fifo``:
the one sent first; ``due``, ``static``: the one that comes next in the steady state, for which ``static`` waits too). But for
``static``, it is carried in pieces (``Route.piece``), after each of which another value may go first. Times are
numbers of the caller's clock. With modelled times the caller asks at the times that it is told, and the answers are a discrete-
event simulation's, as ``simulator.py`` has them; the engine's lanes ask in real time. A lane never has a segment waiting behind
another: it chooses when it is free, so nothing has to be taken back for an older request. Lanes that are fed ahead of time, as
those of GPUs, say by a :class:`Gate` what may be chosen now; then an instruction is executed when it has been issued.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..passes.ir import Instruction, KernelGraph, Program, Recv, Run, Send, Signal, Wait

#: Longest time that a modelled link serves one value before it looks for one that goes first, µs: 2.5 MB at 200 Gbit/s.
PIECE_US = 100.0

Order = Literal["age", "fifo", "due", "static"]


@dataclass(frozen=True)
class Route:
    """A program as the board sees it.

    Attributes:
        run_time: segment → time on its lane; None: it takes what it takes.
        transfer_time: (value, source lane, target lane) → time on the link.
        starts: segment (or ``"value->lane"``) → its start in the steady state, after that of its request. Without one the
            order is that in which the segments can run, one after the other.
        period: time between requests in the steady state.
        alone: time from a request's start to its end when no other is in flight; 0: unknown.
        piece: the longest time that a link carries a value before it looks for one that goes first.
        writes: (lane, position) → storages overwritten there.
        storages: value → storage that holds it, of values that are sent.
        sizes: value → bytes.
        keys, transfers: made from the others: start of the lane's next segment, by lane and position; link → (start, value),
            ascending. loads: time asked of each lane and link; made from the times, or else the period.
    """

    program: Program
    run_time: Mapping[str, float] | None = None
    transfer_time: Callable[[str, int, int], float] = lambda *_: 0.0
    starts: Mapping[str, float] | None = None
    period: float = 0.0
    alone: float = 0.0
    piece: float = math.inf
    writes: Mapping[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    storages: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    keys: tuple[tuple[float, ...], ...] = ()
    transfers: Mapping[tuple[int, int], tuple[tuple[float, str], ...]] = field(default_factory=dict)
    loads: Mapping[tuple[int, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        starts = self.starts if self.starts is not None else _in_turn(self.program)
        keys = []
        for lane in self.program.lanes:
            row, after = [math.inf] * len(lane.instructions), math.inf
            for at in range(len(lane.instructions) - 1, -1, -1):
                instruction = lane.instructions[at]
                if isinstance(instruction, Run):
                    after = starts[instruction.segment]
                row[at] = after
            keys.append(tuple(row))
        object.__setattr__(self, "keys", tuple(keys))
        if not self.loads:
            object.__setattr__(self, "loads", self._loads())
        found: dict[tuple[int, int], list[tuple[float, str]]] = {}
        for index, _, x in self.program if self.starts is not None else ():
            if isinstance(x, (Send, Signal)):
                found.setdefault((index, x.to), []).append((starts[f"{_name(x)}->{x.to}"], _name(x)))
        object.__setattr__(self, "transfers", {link: tuple(sorted(names)) for link, names in found.items()})

    def _loads(self) -> dict[tuple[int, ...], float]:
        if self.run_time is None:
            return {(): self.period}
        loads: dict[tuple[int, ...], float] = {}
        for index, _, x in self.program:
            if isinstance(x, Run):
                loads[(index,)] = loads.get((index,), 0.0) + self.run_time[x.segment]
            elif isinstance(x, (Send, Signal)):
                loads[index, x.to] = loads.get((index, x.to), 0.0) + self.transfer_time(_name(x), index, x.to)
        return loads


def _in_turn(program: Program) -> dict[str, float]:
    """Segment → its place when one runs at a time and each as soon as what it waits for was sent."""
    position, sent = [0] * len(program.lanes), set[tuple[int, int, str]]()
    order: dict[str, float] = {}
    moving = True
    while moving:
        moving = False
        for lane in program.lanes:
            while position[lane.index] < len(lane.instructions):
                x = lane.instructions[position[lane.index]]
                if isinstance(x, (Recv, Wait)) and (x.source, lane.index, _name(x)) not in sent:
                    break
                if isinstance(x, (Send, Signal)):
                    sent.add((lane.index, x.to, _name(x)))
                elif isinstance(x, Run):
                    order[x.segment] = float(len(order))
                position[lane.index] += 1
                moving = True
    return order


def _name(instruction: Send | Recv | Signal | Wait) -> str:
    """What a transfer is called: its value, or the kernel that it signals."""
    return instruction.value if isinstance(instruction, (Send, Recv)) else f"signal {instruction.kernel}"


def route_of(graph: KernelGraph, program: Program, **more: Any) -> Route:
    """The route of ``program``, whose kernels and values are ``graph``'s; ``more`` are other fields of :class:`Route`."""
    writes = {}
    for lane, at, instruction in program:
        if isinstance(instruction, Run):
            found = tuple(graph.values[v].storage for k in instruction.kernels for v in graph[k].outputs)
            made = {v for k in instruction.kernels for v in graph[k].outputs}
            writes[lane, at] = tuple(s for s in found if s not in made)
        elif isinstance(instruction, Recv) and graph.values[instruction.value].storage != instruction.value:
            writes[lane, at] = (graph.values[instruction.value].storage,)
    storages = {v.name: v.storage for v in graph.values.values()}
    sizes = {v.name: v.bytes for v in graph.values.values()}
    return Route(program, writes={k: v for k, v in writes.items() if v}, storages=storages, sizes=sizes, **more)


class Ticket:
    """One request's way through one program.

    Args:
        number: its age: the smaller, the older.
        load: whatever the caller wants to find again.
    """

    def __init__(self, number: int, route: Route, load: Any = None) -> None:
        self.number = number
        self.route = route
        self.load = load
        count = len(route.program.lanes)
        self.at = [0] * count
        self.since = [0.0] * count
        self.arrived: list[dict[tuple[int, str], float]] = [{} for _ in range(count)]
        self.untaken: list[dict[str, int]] = [{} for _ in range(count)]
        self.moved: dict[tuple[int, int], set[str]] = {}
        self.stuck = [False] * count  # Was found unable to go on in a lane, and nothing has changed since.
        self.base = self.slack = 0.0  # The base contains the slack.
        self.admitted = 0.0
        self.busy = 0
        self.dropped = False

    def next(self, lane: int) -> Instruction | None:
        instructions = self.route.program.lanes[lane].instructions
        return instructions[self.at[lane]] if self.at[lane] < len(instructions) else None

    @property
    def done(self) -> bool:
        return all(a == len(lane.instructions) for a, lane in zip(self.at, self.route.program.lanes, strict=True))

    @property
    def finished(self) -> float:
        """When its last instruction was done."""
        return max(self.since)

    def ready(self, lane: int, instruction: Instruction) -> float:
        """Since when ``instruction``, its next on ``lane``, can start; infinite while it cannot."""
        if isinstance(instruction, (Recv, Wait)):
            arrival = self.arrived[lane].get((instruction.source, _name(instruction)), math.inf)
        else:
            arrival = 0.0
        # What is sent of a storage must be taken before the storage is overwritten.
        for storage in self.route.writes.get((lane, self.at[lane]), ()):
            if self.untaken[lane].get(storage):
                return math.inf
        return max(arrival, self.since[lane])


@dataclass
class Step:
    """An instruction that a lane is to execute now; ``end`` is set once it is known when the lane is free again."""

    ticket: Ticket
    lane: int
    position: int
    instruction: Instruction
    start: float
    end: float | None = None


@dataclass
class _Transfer:
    ticket: Ticket
    name: str
    sent: float
    takes: float


@dataclass
class _Link:
    free_at: float = 0.0
    queue: list[_Transfer] = field(default_factory=list)
    moving: int = 0  # Transfers that were chosen and of which :meth:`Board.delivered` was not said.


class Gate(Protocol):
    """What lanes and links that are fed ahead of time let through. Each answers with those of the given that may be chosen now,
    in the given order."""

    def runs(self, lane: int, tickets: list[Ticket]) -> list[Ticket]:
        """tickets: those whose next segment on ``lane`` could start."""

    def transfers(self, source: int, target: int, moving: int, waiting: list[tuple[Ticket, str]]) -> list[tuple[Ticket, str]]:
        """waiting: tickets and names of what they have sent; moving: how many others have been chosen and have not arrived."""


class Board:
    """The requests in flight and the state of lanes and links. Not safe for threads: the caller has a lock.

    Args:
        pipelined: False: one request at a time, as plain calls are.
        gate: by default all that can start may be chosen.

    Attributes:
        steps: runs and transfers so far; overran: how many of the runs were computed later than their modelled end.
        busy: time that each lane was busy; moved: bytes sent.
        finished: tickets that are done, for the caller to take out.
    """

    def __init__(self, lanes: int, order: Order = "age", *, pipelined: bool = True, gate: Gate | None = None) -> None:
        self.lanes = lanes
        self.gate = gate
        self.order: Order = order
        self.pipelined = pipelined
        self.tickets: list[Ticket] = []
        self.free_at = [0.0] * lanes
        self.running: list[Step | None] = [None] * lanes
        self.links: dict[tuple[int, int], _Link] = {}
        self.busy = [0.0] * lanes
        self.moved = self.steps = self.overran = 0
        self.finished: list[Ticket] = []
        self._frontier = -math.inf
        self._work: dict[tuple[int, ...], float] = {}
        self._slowdown = 2.0  # Of late, a request's time over its time alone.
        self._shortest = math.inf  # Least time alone of any request.

    def admit(self, ticket: Ticket, now: float) -> None:
        """Lets ``ticket`` in; nobody must hold its number already."""
        ticket.admitted = now
        ticket.since = [now] * self.lanes
        ticket.base = max(0.0, self._frontier, *self._work.values())
        behind = ticket.base - max(self._work.values(), default=0.0)
        if behind > 0:  # Lanes were idle.
            self._work = {resource: work + behind for resource, work in self._work.items()}
        for resource, load in ticket.route.loads.items():
            self._work[resource] = self._work.get(resource, ticket.base) + load
        alone = ticket.route.alone
        if alone:
            self._shortest = min(self._shortest, alone)
            # More than the time by which what it asks of one resource puts off the base of those behind it.
            ticket.slack = self._slowdown * (alone - self._shortest)
            ticket.base += ticket.slack
        bisect.insort(self.tickets, ticket, key=lambda t: t.number)

    def drop(self, ticket: Ticket) -> None:
        """Takes ``ticket`` out, which has failed. Lanes that are at work for it finish their instruction first."""
        ticket.dropped = True
        if ticket in self.tickets:
            self.tickets.remove(ticket)
        for (source, target), link in self.links.items():
            link.queue = [x for x in link.queue if x.ticket is not ticket]
            if self.gate is not None:
                link.moving -= sum(s == source for s, _ in ticket.arrived[target])  # Chosen, and never received.
        ticket.arrived = [{} for _ in ticket.arrived]
        for lane, step in enumerate(self.running):
            if step is not None and step.ticket is ticket and step.end is not None:
                self.running[lane] = None

    def delivered(self, source: int, target: int) -> None:
        """Says that a transfer which was received has arrived; for gates."""
        self.links[source, target].moving -= 1

    def next(self, lane: int, now: float) -> Step | float:
        """What ``lane`` is to do now, or the time at which to ask again (infinite: when something has changed)."""
        wake = self._advance(lane, now)
        running = self.running[lane]
        if running is not None:
            if running.end is None or running.end > now:
                wake = math.inf if running.end is None else min(wake, running.end)
            else:
                self._ran(running)
                running = None
        active = self._active()
        candidates: list[tuple[float, Ticket]] = []
        for ticket in active:
            if ticket.stuck[lane]:
                continue
            instruction = ticket.next(lane)
            if instruction is None or (running is not None and running.ticket is ticket):
                continue
            ready = ticket.ready(lane, instruction)
            if ready == math.inf:
                ticket.stuck[lane] = True
            elif isinstance(instruction, Run):
                candidates.append((ready, ticket))
            elif ready <= now:
                return self._step(ticket, lane, instruction, ready)
            else:
                wake = min(wake, ready)
        if running is not None:
            return wake
        if self.order == "static":
            first = min(active, key=lambda t: (self._key(t, lane), t.number), default=None)
            candidates = [c for c in candidates if c[1] is first]
        if self.gate is not None and candidates:
            allowed = self.gate.runs(lane, [ticket for _, ticket in candidates])
            candidates = [c for c in candidates if c[1] in allowed]
        if not candidates:
            return wake
        free = self.free_at[lane]
        decide = max(free, min(ready for ready, _ in candidates))
        if decide > now:
            return min(wake, decide)
        able = [c for c in candidates if c[0] <= decide]
        if self.order == "fifo":
            ready, ticket = min(able, key=lambda c: (c[0], c[1].number))
        elif self.order == "due":
            ready, ticket = min(able, key=lambda c: (self._key(c[1], lane), c[1].number))
        else:
            ready, ticket = able[0]
        self._frontier = max(self._frontier, self._key(ticket, lane) - ticket.slack)
        instruction = ticket.next(lane)
        assert instruction is not None
        step = self.running[lane] = self._step(ticket, lane, instruction, max(free, ready))
        return step

    def following(self, step: Step, now: float) -> Step | None:
        """Of the same request, what its lane can do right behind ``step``, which was executed, and what costs it nothing; None
        where :meth:`next` is to say what comes."""
        ticket, lane = step.ticket, step.lane
        instruction = None if ticket.dropped else ticket.next(lane)
        if instruction is None or isinstance(instruction, (Run, Recv, Wait)):
            return None
        ready = ticket.ready(lane, instruction)
        return self._step(ticket, lane, instruction, ready) if ready <= now else None

    def executed(self, step: Step, now: float) -> None:
        """Says that ``step`` is done. A run with a modelled time keeps its lane busy to the end of it."""
        ticket, lane, instruction = step.ticket, step.lane, step.instruction
        ticket.busy -= 1
        if isinstance(instruction, Run):
            self.steps += 1
            times = ticket.route.run_time
            step.end = now if times is None else step.start + times[instruction.segment]
            if now > step.end:
                self.overran += 1
                step.end = now
            self.busy[lane] += step.end - step.start
            self.free_at[lane] = step.end
            if ticket.dropped:
                self.running[lane] = None
            return
        if ticket.dropped:
            return
        ticket.since[lane] = max(ticket.since[lane], step.start)
        if isinstance(instruction, (Send, Signal)):
            self._send(ticket, lane, instruction)
        elif isinstance(instruction, Recv):
            del ticket.arrived[lane][instruction.source, instruction.value]
            ticket.untaken[instruction.source][ticket.route.storages.get(instruction.value, instruction.value)] -= 1
            ticket.stuck[instruction.source] = False
        elif isinstance(instruction, Wait):
            del ticket.arrived[lane][instruction.source, _name(instruction)]
        self._pass(ticket, lane)

    def _step(self, ticket: Ticket, lane: int, instruction: Instruction, start: float) -> Step:
        ticket.busy += 1
        return Step(ticket, lane, ticket.at[lane], instruction, start)

    def _key(self, ticket: Ticket, lane: int) -> float:
        row = ticket.route.keys[lane]
        return ticket.base + row[ticket.at[lane]] if ticket.at[lane] < len(row) else math.inf

    def _precedence(self, transfer: _Transfer, target: int) -> float:
        """The least goes first over a link."""
        if self.order == "age":
            return transfer.ticket.number
        starts = transfer.ticket.route.starts
        if self.order == "due" and starts is not None:
            return transfer.ticket.base + starts[f"{transfer.name}->{target}"]
        return transfer.sent

    def _active(self) -> list[Ticket]:
        """The requests that are served: all, or the oldest."""
        return self.tickets if self.pipelined else self.tickets[:1]

    def _due(self, source: int, target: int) -> tuple[Ticket, str] | None:
        """The transfer whose turn it is in the steady state."""
        best: tuple[float, int, Ticket, str] | None = None
        for ticket in self._active():
            moved = ticket.moved.get((source, target), ())
            for start, name in ticket.route.transfers.get((source, target), ()):
                if name not in moved:
                    if best is None or (ticket.base + start, ticket.number) < best[:2]:
                        best = (ticket.base + start, ticket.number, ticket, name)
                    break
        return None if best is None else best[2:]

    def _ran(self, step: Step) -> None:
        """The run's modelled time is over."""
        assert step.end is not None
        self.running[step.lane] = None
        step.ticket.since[step.lane] = step.end
        self._pass(step.ticket, step.lane)

    def _pass(self, ticket: Ticket, lane: int) -> None:
        ticket.at[lane] += 1
        if ticket.done:
            self.tickets.remove(ticket)
            self.finished.append(ticket)
            if ticket.route.alone:
                seen = (ticket.finished - ticket.admitted) / ticket.route.alone
                self._slowdown += (max(1.0, seen) - self._slowdown) / 16
            if not self.pipelined and self.tickets:  # The next one starts now, not when it came.
                self.tickets[0].since = [max(since, ticket.finished) for since in self.tickets[0].since]

    def _send(self, ticket: Ticket, lane: int, instruction: Send | Signal) -> None:
        name = _name(instruction)
        if isinstance(instruction, Send):
            storage = ticket.route.storages.get(name, name)
            ticket.untaken[lane][storage] = ticket.untaken[lane].get(storage, 0) + 1
            self.moved += sum(b.nbytes for b in instruction.boxes) or ticket.route.sizes.get(name, 0)
        self.steps += 1
        takes = ticket.route.transfer_time(name, lane, instruction.to)
        self.links.setdefault((lane, instruction.to), _Link()).queue.append(_Transfer(ticket, name, ticket.since[lane], takes))

    def _advance(self, lane: int, now: float) -> float:
        """Starts the transfers to ``lane`` that can start by ``now``; the time at which the next one can."""
        wake = math.inf
        strict = self.order == "static" and all(t.route.starts is not None for t in self.tickets)
        for (source, target), link in self.links.items():
            if target != lane:
                continue
            while link.queue:
                begin = max(link.free_at, min(x.sent for x in link.queue))
                if begin > now:
                    wake = min(wake, begin)
                    break
                waiting = [x for x in link.queue if x.sent <= begin]
                if strict:
                    due = self._due(source, target)
                    waiting = [x for x in link.queue if (x.ticket, x.name) == due]
                    if not waiting:
                        break  # Until it is sent.
                    begin = max(link.free_at, waiting[0].sent)
                if self.gate is not None:
                    allowed = self.gate.transfers(source, target, link.moving, [(x.ticket, x.name) for x in waiting])
                    waiting = [x for x in waiting if (x.ticket, x.name) in allowed]
                    if not waiting:
                        break  # Until something has arrived, or has been made.
                chosen = min(waiting, key=lambda x: self._precedence(x, target))
                piece = chosen.ticket.route.piece
                if chosen.takes > piece and not strict and self.gate is None:
                    chosen.takes -= piece
                    link.free_at = begin + piece
                    continue
                link.moving += 1
                link.queue.remove(chosen)
                arrival = link.free_at = begin + chosen.takes
                chosen.ticket.arrived[lane][source, chosen.name] = arrival
                chosen.ticket.stuck[lane] = False
                chosen.ticket.moved.setdefault((source, target), set()).add(chosen.name)
        return wake
