"""Steady state → what one captured graph of a period does.

A captured graph begins when the one before it has ended, so where periods are graphs nothing crosses their boundary: an operation
(a segment, or a transfer) that begins in a period ends in it. The graph of period p executes operation o of request p − s(o), s
being its *stage*. Within the period o waits for those operations before it that have the same stage, and for its lane or link. A
period takes as long as the longest chain of these, at least max_g W_g, and so much where no lane's work hangs on anything of its
own period. Tried are:

- the stages of the modulo schedule (``steady.py``), which is made for lanes that never stop at a boundary;
- a stage more wherever a value changes lanes: lanes are then independent within a period, and transfers end it;
- two more, one for the transfer, which then goes on beside the lanes' work;
- a stage more wherever a chain of operations would take longer than a given time, for a number of such times.

All are laid out (longest rest first), and the shortest is taken of those that need no more than the slots that there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .ir import Program
from .steady import Operation, Steady, operations_of, split

_STEPS = 24  # Chain lengths that are tried between the shortest period and a whole request.


@dataclass(frozen=True)
class Period:
    """``stages``: segment, or ``"value->lane"`` for a transfer → periods after that in which its request came in. ``after``: what
    it waits for within the period, besides what its lane or link does before it. ``order``: all of them in the order in which
    lanes and links do them. ``slots``: requests that overlap. ``period_us``: what a period takes."""

    program: Program
    stages: Mapping[str, int]
    after: Mapping[str, tuple[str, ...]]
    order: tuple[str, ...]
    slots: int
    period_us: float

    def to_text(self) -> str:
        """In order; ``[s]`` says for the request how many periods back."""
        lines = [f"period {self.period_us:.1f} µs, {self.slots} slots"]
        lines += [
            f"  [{self.stages[o]}] {o}" + (f" after {' '.join(self.after[o])}" if self.after[o] else "") for o in self.order
        ]
        return "\n".join(lines)


def period_of(
    steady: Steady, run_us: Mapping[str, float], transfer_us: Callable[[str, int, int], float], *, slots: int
) -> Period:
    """The shortest period that is found.

    Args:
        run_us, transfer_us: as of :func:`~passes.steady.steady`.
        slots: how many requests may overlap, at least one.
    """
    operations, _ = operations_of(steady.program, run_us, transfer_us)
    best: tuple[float, int] | None = None
    found: tuple[list[int], list[int]] | None = None
    for stages in _stagings(operations, steady):
        count = max(stages, default=0) + 1
        if count > slots or any(stages[a] > s for o, s in zip(operations, stages, strict=True) for a in o.after):
            continue
        order, period = _laid_out(operations, stages)
        if best is None or (period, count) < (best[0] - 1e-6, best[1]) or (period <= best[0] + 1e-6 and count < best[1]):
            best, found = (period, count), (stages, order)
    assert best is not None  # One stage is always possible.
    assert found is not None
    stages, order = found
    return Period(
        steady.program,
        {o.name: s for o, s in zip(operations, stages, strict=True)},
        {
            o.name: tuple(operations[a].name for a in dict.fromkeys(o.after) if stages[a] == s)
            for o, s in zip(operations, stages, strict=True)
        },
        tuple(operations[i].name for i in order),
        best[1],
        best[0],
    )


def _stagings(operations: Sequence[Operation], steady: Steady) -> Iterable[list[int]]:
    def staged(before: Callable[[Operation, Operation], int]) -> list[int]:
        stages: list[int] = []
        for o in operations:
            stages.append(max((stages[a] + before(operations[a], o) for a in o.after), default=0))
        return stages

    def moves(o: Operation) -> bool:
        return len(o.resource) == 2

    yield [0] * len(operations)
    if steady.period_us > 0:
        yield [split(steady.starts[o.name], steady.period_us)[0] for o in operations]
    yield staged(lambda a, o: int(moves(a)))
    yield staged(lambda a, o: int(moves(a)) + int(moves(o)))
    loads: dict[tuple[int, ...], float] = {}
    for o in operations:
        loads[o.resource] = loads.get(o.resource, 0.0) + o.us
    shortest, alone = max(loads.values(), default=0.0), sum(o.us for o in operations)
    for step in range(_STEPS):
        if shortest > 0:
            yield _cut(operations, shortest * (alone / shortest) ** (step / _STEPS))


def _cut(operations: Sequence[Operation], longest: float) -> list[int]:
    """Each operation in the first stage in which a chain of at most ``longest`` µs ends with it."""
    stages: list[int] = []
    ends: list[float] = []
    for o in operations:
        stage = max((stages[a] for a in o.after), default=0)
        start = max((ends[a] for a in o.after if stages[a] == stage), default=0.0)
        if start > 0 and start + o.us > longest * (1 + 1e-9):
            stage, start = stage + 1, 0.0
        stages.append(stage)
        ends.append(start + o.us)
    return stages


def _laid_out(operations: Sequence[Operation], stages: Sequence[int]) -> tuple[list[int], float]:
    """The order of all operations within a period, and how long it takes: of those that can start first on their lane or link
    the one before which most is left to do."""
    followers: list[list[int]] = [[] for _ in operations]
    waits = [0] * len(operations)
    for i, o in enumerate(operations):
        for a in set(o.after):
            if stages[a] == stages[i]:
                followers[a].append(i)
                waits[i] += 1
    rest = [0.0] * len(operations)
    for i in range(len(operations) - 1, -1, -1):
        rest[i] = operations[i].us + max((rest[f] for f in followers[i]), default=0.0)
    ready = {i: 0.0 for i, w in enumerate(waits) if w == 0}
    earliest = [0.0] * len(operations)
    free: dict[tuple[int, ...], float] = {}
    order: list[int] = []
    end = 0.0
    while ready:
        starts = {i: max(at, free.get(operations[i].resource, 0.0)) for i, at in ready.items()}
        chosen = min(starts, key=lambda i: (starts[i], -rest[i], -stages[i], i))
        done = free[operations[chosen].resource] = starts[chosen] + operations[chosen].us
        del ready[chosen]
        order.append(chosen)
        end = max(end, done)
        for f in followers[chosen]:
            earliest[f] = max(earliest[f], done)
            waits[f] -= 1
            if waits[f] == 0:
                ready[f] = earliest[f]
    return order, end
