"""Program + times → its steady state: a modulo schedule, in which a request starts every period and each lane's order is fixed.

With w[o] the time of operation o (a segment on its lane, a transfer on its directed link) and R(o) its resource, the period is

    P = max over resources r of Σ_{R(o) = r} w[o]                                                          (period)

and each operation gets a start σ(o) ≥ 0, counted from the start of its request, such that

    σ(b) ≥ σ(a) + w[a]              for every operation b that waits for a, and along each lane's program    (precedence)
    [σ(a), σ(a) + w[a]) and [σ(b), σ(b) + w[b]) are disjoint modulo P           where R(a) = R(b), a ≠ b      (resource)

Request i starts o at i·P + σ(o), so in one period a lane runs its segments in the order of σ mod P, each for the request
⌊σ / P⌋ periods back (its *stage*). A request is on the lanes for L = max σ + w, and ⌈L / P⌉ of them overlap (the *slots*).

Such a schedule always exists at this P: operations of one resource can be laid end to end in any order, which fits since their
sum is at most P, and each delayed by whole periods until what it waits for is done; without recurrences nothing limits the
delay. (A request that needs the state that its predecessor leaves is not pipelined with it.) L is what is worth minimising, since
each slot is memory. Three ways are tried, and the smallest L wins. (1) Operations are placed in topological order, each in the
first gap of its resource that holds it; one that finds no gap is given its place beforehand, and all is placed anew. (2) The
same, but a resource whose gaps have become too short is laid end to end in the order that the gaps suggested. (3) Each resource
end to end in the order of the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from .errors import ProgramError
from .ir import Out, Program, Recv, Run, Send, Signal, Wait

_EPS = 1e-6  # µs
_LONGER = 1.03  # Each period that is tried, over that before it.
#: Operations that are moved in search of a smaller latency: at most so many, and so many times the number of operations, since
#: each attempt places all anew.
_MOVES, _PLACED = 400, 20_000
_RESERVED = 60  # Operations that may be given their place beforehand.


@dataclass(frozen=True)
class Part:
    """Instructions ``first`` … ``last`` of a lane's program, executed together for the request ``stage`` periods back."""

    first: int
    last: int
    stage: int


@dataclass(frozen=True)
class Steady:
    """A modulo schedule of one program.

    ``starts``: segment, or ``"value->lane"`` for a transfer → µs after the start of its request. ``lanes``: the parts of each
    lane in their order within a period. ``latency_us``: L. ``slots``: requests that overlap. ``shortest_us``: P, where
    ``period_us`` is longer for the sake of fewer slots.
    """

    program: Program
    period_us: float
    latency_us: float
    starts: Mapping[str, float] = field(repr=False)
    lanes: tuple[tuple[Part, ...], ...] = field(repr=False)
    shortest_us: float = 0.0

    @property
    def slots(self) -> int:
        return max(1, math.ceil((self.latency_us - _EPS) / self.period_us)) if self.period_us > 0 else 1

    def to_text(self) -> str:
        """A period of every lane; ``[s]`` says for the request how many periods back."""
        lines = [f"period {self.period_us:.1f} µs, latency {self.latency_us:.1f} µs, {self.slots} slots"]
        for lane, parts in zip(self.program.lanes, self.lanes, strict=True):
            lines.append(f"lane {lane.index} {lane.device}")
            for part in parts:
                lines += [f"  [{part.stage}] {x.to_text()}" for x in lane.instructions[part.first : part.last + 1]]
        return "\n".join(lines)


@dataclass(frozen=True)
class Operation:
    """``after``: indices of the operations that must be done first."""

    name: str
    resource: tuple[int, ...]  # (lane,) or (source, target)
    us: float
    after: tuple[int, ...]


def steady(
    program: Program, run_us: Mapping[str, float], transfer_us: Callable[[str, int, int], float], *, slots: int | None = None
) -> Steady:
    """The steady state of ``program``.

    Args:
        run_us: segment → µs.
        transfer_us: (value, source lane, target lane) → µs; a signal is ``"signal KERNEL"``.
        slots: how many requests may overlap. Where the shortest period needs more, a longer one is taken: of those tried, which
            lie a few percent apart, the first that needs no more. By default the shortest, whatever it needs.

    Raises:
        ProgramError: the program cannot be executed, even once.
    """
    operations, ends = operations_of(program, run_us, transfer_us)
    loads: dict[tuple[int, ...], float] = {}
    for o in operations:
        loads[o.resource] = loads.get(o.resource, 0.0) + o.us
    shortest = max(loads.values(), default=0.0)
    alone = sum(o.us for o in operations)
    period = shortest
    while True:
        starts = _best(operations, period, list(loads))
        made = Steady(
            program,
            period,
            max((s + o.us for s, o in zip(starts, operations, strict=True)), default=0.0),
            {o.name: s for o, s in zip(operations, starts, strict=True)},
            _parts(program, operations, starts, ends, period),
            shortest,
        )
        if slots is None or made.slots <= slots:
            return made
        if period >= alone:
            raise ProgramError(f"slots={slots!r}: at least one request must be in flight")
        period = min(alone, period * _LONGER)


def verify_steady(programs: Sequence[Steady], slots: int) -> None:
    """Proves of overlapping requests what ``verify`` proves of one, given that it holds of each program.

    Request i follows ``programs[0]`` (or, where plans alternate, ``programs[i mod n]``; their order then is that of i·P + start)
    in slot i mod ``slots``, and is let in when the request before it in that slot is done. Lanes execute their parts strictly in
    order. Executed symbolically for as many requests as it takes until every slot was used three times, proven:

    - no deadlock: ``slots`` are enough for the order;
    - each lane executes each instruction of each request once, in the order of the program: so whatever ``verify`` has proven of
      uses, frees, dependences and outputs holds in the slot's own storage;
    - a slot is empty when its next request enters it: nothing of one request is read or overwritten by another.

    State that requests share is not part of it: the engine lets a request that needs another's state in when that one is done.

    Raises:
        ProgramError: names the request, the lane and what is wrong.
    """
    if not programs or slots < 1:
        raise ProgramError(f"{len(programs)} steady programs in {slots} slots: at least one of each is needed")
    count = len(programs[0].lanes)
    if any(len(p.lanes) != count for p in programs):
        raise ProgramError("the steady programs have different numbers of lanes")
    requests = 3 * max(slots, len(programs), *(p.slots for p in programs))
    orders: list[list[tuple[int, int]]] = []  # of each lane: (request, position)
    for lane in range(count):
        keyed = []
        for i in range(requests):
            for order, part in enumerate(programs[i % len(programs)].lanes[lane]):
                # Within a period parts stand in their order; a stage is a period later.
                keyed += [((i + part.stage, order, i), (i, at)) for at in range(part.first, part.last + 1)]
        orders.append([step for _, step in sorted(keyed)])
    for lane, steps in enumerate(orders):
        for i in range(requests):
            found = [at for r, at in steps if r == i]
            expected = len(programs[i % len(programs)].program.lanes[lane].instructions)
            if found != list(range(expected)):
                raise ProgramError(f"lane {lane} executes request {i}'s instructions as {found}, not 0 … {expected - 1} in order")
    position = [0] * count
    left = [sum(len(x.instructions) for x in programs[i % len(programs)].program.lanes) for i in range(requests)]
    sent: set[tuple[int, int, int, str]] = set()
    moving = True
    while moving:
        moving = False
        for lane in range(count):
            while position[lane] < len(orders[lane]):
                request, at = orders[lane][position[lane]]
                instruction = programs[request % len(programs)].program.lanes[lane].instructions[at]
                if request >= slots and left[request - slots]:
                    break  # Its slot is not empty yet.
                if isinstance(instruction, (Recv, Wait)):
                    if (request, instruction.source, lane, _name(instruction)) not in sent:
                        break
                    sent.remove((request, instruction.source, lane, _name(instruction)))
                elif isinstance(instruction, (Send, Signal)):
                    sent.add((request, lane, instruction.to, _name(instruction)))
                position[lane] += 1
                left[request] -= 1
                moving = True
    stuck = [(lane, *orders[lane][position[lane]]) for lane in range(count) if position[lane] < len(orders[lane])]
    if stuck:
        where = "; ".join(
            f"lane {lane} at '{programs[r % len(programs)].program.lanes[lane].instructions[at].to_text()}' of request {r}"
            for lane, r, at in stuck
        )
        raise ProgramError(f"deadlock with {slots} slots: {where}")


def _name(instruction: Send | Recv | Signal | Wait) -> str:
    return instruction.value if isinstance(instruction, (Send, Recv)) else f"signal {instruction.kernel}"


def operations_of(
    program: Program, run_us: Mapping[str, float], transfer_us: Callable[[str, int, int], float]
) -> tuple[list[Operation], list[list[tuple[int, ...]]]]:
    """Segments and transfers in topological order, and for each instruction of each lane those that its lane has waited for."""
    found: list[Operation] = []
    position = [0] * len(program.lanes)
    known: list[tuple[int, ...]] = [()] * len(program.lanes)  # What the lane's next operation comes after.
    ends: list[list[tuple[int, ...]]] = [[] for _ in program.lanes]
    sent: dict[tuple[int, int, str], int] = {}
    moving = True
    while moving:
        moving = False
        for lane in program.lanes:
            g = lane.index
            while position[g] < len(lane.instructions):
                x = lane.instructions[position[g]]
                if isinstance(x, Run):
                    found.append(Operation(x.segment, (g,), run_us[x.segment], known[g]))
                    known[g] = (len(found) - 1,)
                elif isinstance(x, (Send, Signal)):
                    us = transfer_us(_name(x), g, x.to)
                    found.append(Operation(f"{_name(x)}->{x.to}", (g, x.to), us, known[g]))
                    sent[g, x.to, _name(x)] = len(found) - 1
                elif isinstance(x, (Recv, Wait)):
                    if (x.source, g, _name(x)) not in sent:
                        break
                    known[g] = (*known[g], sent[x.source, g, _name(x)])
                ends[g].append(known[g])
                position[g] += 1
                moving = True
    stuck = [g for g, lane in enumerate(program.lanes) if position[g] < len(lane.instructions)]
    if stuck:
        raise ProgramError(f"deadlock: lane {stuck[0]} waits for what nobody sends")
    return found, ends


def _best(operations: Sequence[Operation], period: float, resources: Sequence[tuple[int, ...]]) -> list[float]:
    """Starts with this period and, of those found, the smallest latency."""

    def latency(starts: Sequence[float]) -> float:
        return max((s + o.us for s, o in zip(starts, operations, strict=True)), default=0.0)

    members: dict[tuple[int, ...], list[int]] = {r: [] for r in resources}
    for i, o in enumerate(operations):
        members[o.resource].append(i)
    best = _place(operations, period, members)
    packed: dict[tuple[int, ...], list[int]] = {}
    for _ in range(len(resources) + 1):
        starts = _place(operations, period, packed)
        crowded = [r for r in resources if r not in packed and _overlap(operations, starts, r, period)]
        if not crowded:
            break
        for resource in crowded:
            packed[resource] = sorted(members[resource], key=lambda i: (starts[i] % period, i))
    if latency(starts) < latency(best):
        best = starts
    else:
        packed = members
    beforehand = _reserve(operations, period)
    if beforehand is not None and latency(beforehand) < latency(best):
        return beforehand
    # Move single operations within resources that are laid end to end, as long as that makes the latency smaller.
    movable = [r for r in packed if len(packed[r]) > 2]
    random = Random(0)
    least = latency(best)
    for _ in range(min(_MOVES, _PLACED // max(1, len(operations))) if movable else 0):
        resource = random.choice(movable)
        order = list(packed[resource])
        order.insert(random.randrange(len(order)), order.pop(random.randrange(len(order))))
        starts = _place(operations, period, {**packed, resource: order})
        if latency(starts) <= least and not any(_overlap(operations, starts, r, period) for r in resources if r not in packed):
            best, least, packed = starts, latency(starts), {**packed, resource: order}
    return best


def _reserve(operations: Sequence[Operation], period: float) -> list[float] | None:
    """Starts of way (1); None where too many operations would need their place beforehand."""
    wanted: dict[int, float] = {}  # Of operations that found no gap: when they could have started.
    best: list[float] | None = None
    least, again = math.inf, 0
    for _ in range(_RESERVED):
        gaps = {o.resource: _Gaps(period) for o in operations}
        offset: dict[int, float] = {}
        for i in sorted(wanted, key=lambda i: -operations[i].us):
            start = gaps[operations[i].resource].take(wanted[i], operations[i].us)
            if start is None:
                return best
            offset[i] = start % period
        starts: list[float] = []
        for i, o in enumerate(operations):
            ready = max((starts[a] + operations[a].us for a in o.after), default=0.0)
            if i in offset:
                wanted[i] = ready
                late = (offset[i] - ready) % period
                starts.append(ready + (0.0 if period - late < _EPS else late))
                continue
            start = gaps[o.resource].take(ready, o.us)
            if start is None:
                wanted[i] = ready
                break
            starts.append(start)
        else:
            latency = max((s + o.us for s, o in zip(starts, operations, strict=True)), default=0.0)
            if latency < least:
                best, least = starts, latency
            again += 1
            if again > 3 or not wanted:  # With the places nearer to where they are wanted L may become smaller.
                return best
    return best


class _Gaps:
    """The free time of one resource within a period, as arcs (start, length) of a circle."""

    def __init__(self, period: float) -> None:
        self.period = period
        self.arcs: list[tuple[float, float]] | None = None  # None: all free.

    def take(self, ready: float, us: float) -> float | None:
        """The first start from ``ready`` on at which ``us`` are free, which are then taken; None: there is no such gap."""
        if us <= 0 or self.period <= 0:
            return ready
        if self.arcs is None:
            self.arcs = [((ready + us) % self.period, self.period - us)]
            return ready
        best: tuple[float, int, float] | None = None
        for i, (start, length) in enumerate(self.arcs):
            into = (ready - start) % self.period
            if into > self.period - _EPS:
                into = 0.0  # The arc starts here, but for rounding.
            if length - into < us - _EPS:
                if length < us - _EPS:
                    continue
                wait, into = self.period - into, 0.0
            else:
                wait = 0.0
            if best is None or wait < best[0]:
                best = (wait, i, into)
        if best is None:
            return None
        wait, i, into = best
        start, length = self.arcs[i]
        rest = [(start, into), ((start + into + us) % self.period, length - into - us)]
        self.arcs[i : i + 1] = [arc for arc in rest if arc[1] > _EPS]
        return ready + wait


def _place(operations: Sequence[Operation], period: float, packed: Mapping[tuple[int, ...], Sequence[int]]) -> list[float]:
    """Starts that respect precedence: those of ``packed`` resources end to end, others in gaps, or where there is no gap as if
    the resource were free."""
    offset: dict[int, float] = {}
    for order in packed.values():
        at = 0.0
        # The first operation of the program starts its resource's period, wherever that turns out to lie.
        first = min(range(len(order)), key=lambda p: order[p])
        for i in (*order[first:], *order[:first]):
            offset[i] = at
            at += operations[i].us
    phase: dict[tuple[int, ...], float] = {}
    gaps: dict[tuple[int, ...], _Gaps] = {}
    starts: list[float] = []
    for i, o in enumerate(operations):
        ready = max((starts[a] + operations[a].us for a in o.after), default=0.0)
        if i in offset:
            begin = phase.setdefault(o.resource, ready - offset[i])
            late = (begin + offset[i] - ready) % period if period > 0 else 0.0
            starts.append(ready + (0.0 if period - late < _EPS else late))
        else:
            start = gaps.setdefault(o.resource, _Gaps(period)).take(ready, o.us)
            starts.append(ready if start is None else start)
    return starts


def _overlap(operations: Sequence[Operation], starts: Sequence[float], resource: tuple[int, ...], period: float) -> bool:
    arcs = sorted((s % period, o.us) for s, o in zip(starts, operations, strict=True) if o.resource == resource and o.us > 0)
    if not arcs:
        return False
    after = [*arcs[1:], (arcs[0][0] + period, 0.0)]
    return any(a + us > b + len(arcs) * _EPS for (a, us), (b, _) in zip(arcs, after, strict=True))


def _parts(
    program: Program,
    operations: Sequence[Operation],
    starts: Sequence[float],
    ends: Sequence[Sequence[tuple[int, ...]]],
    period: float,
) -> tuple[tuple[Part, ...], ...]:
    """The lanes' programs in parts: a segment with what its lane waits for before it and hands on after it; inputs that the home
    lane hands on, and what it waits for in the end, are parts without a segment."""
    at = {o.name: s for o, s in zip(operations, starts, strict=True)}
    lanes = []
    for lane in program.lanes:
        parts: list[tuple[float, int, int]] = []
        first, start, gives = 0, None, False
        for i, x in enumerate([*lane.instructions, None]):
            if i > first and (x is None or ((start is not None or gives) and isinstance(x, (Recv, Wait, Run, Out)))):
                if start is None:  # No segment: when all that it waits for is there.
                    start = max((starts[o] + operations[o].us for o in ends[lane.index][i - 1]), default=0.0)
                parts.append((start, first, i - 1))
                first, start, gives = i, None, False
            if isinstance(x, Run):
                start = at[x.segment]
            elif isinstance(x, (Send, Signal)):
                gives = True
        staged = [(*split(start, period), first, last) for start, first, last in parts]
        # Of parts at one time that of the oldest request comes first: others may wait for its end.
        ordered = sorted(staged, key=lambda p: (p[1], -p[0], p[2]))
        lanes.append(tuple(Part(first, last, stage) for stage, _, first, last in ordered))
    return tuple(lanes)


def split(start: float, period: float) -> tuple[int, float]:
    """Stage and offset of a start; one that is a hair before the next period belongs to that."""
    if period <= 0:
        return 0, 0.0
    stage = math.floor((start + _EPS) / period)
    return stage, round(max(0.0, start - stage * period), 5)
