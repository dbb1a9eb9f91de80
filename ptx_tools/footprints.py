"""Which bytes a kernel touched: interval sets for each buffer, and the boxes that they sometimes are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Intervals:
    """A set of bytes as sorted, disjoint, non-adjacent half-open intervals [start, end).

    `starts` and `ends` are int64 arrays of one length. Build one with `Intervals.of`; the constructor trusts its arguments.
    """

    starts: Ints
    ends: Ints

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> Intervals:
        """From (start, end) pairs in any order, overlapping or not; empty ones are dropped.

        Raises ValueError where end < start.
        """
        array = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
        return cls.merge(array[:, 0], array[:, 1])

    @classmethod
    def merge(cls, starts: Ints, ends: Ints) -> Intervals:
        """The union of intervals given as two arrays."""
        starts, ends = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
        if (ends < starts).any():
            bad = int(np.flatnonzero(ends < starts)[0])
            raise ValueError(f"interval [{starts[bad]}, {ends[bad]}) ends before it starts")
        keep = ends > starts
        starts, ends = starts[keep], ends[keep]
        if not len(starts):
            return cls(starts, ends)
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        new = np.concatenate(([True], starts[1:] > ends[:-1]))
        last = np.concatenate((new[1:], [True]))
        return cls(starts[new], ends[last])

    @classmethod
    def from_marks(cls, marks: npt.NDArray[np.bool_], unit: int, offset: int = 0) -> Intervals:
        """From one flag for each `unit` bytes, the first at `offset`."""
        edges = np.flatnonzero(np.diff(marks, prepend=False, append=False)).astype(np.int64) * unit + offset
        return cls(edges[::2], edges[1::2])

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.starts.tolist(), self.ends.tolist(), strict=True)

    def __bool__(self) -> bool:
        return len(self.starts) > 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Intervals):
            return NotImplemented
        return bool(np.array_equal(self.starts, other.starts) and np.array_equal(self.ends, other.ends))

    def __hash__(self) -> int:
        return hash((self.starts.tobytes(), self.ends.tobytes()))

    def __repr__(self) -> str:
        shown = ", ".join(f"[{start}, {end})" for start, end in list(self)[:4])
        return f"<Intervals {shown}{f', … {len(self)} in all' if len(self) > 4 else ''}>"

    @property
    def nbytes(self) -> int:
        return int((self.ends - self.starts).sum())

    def __or__(self, other: Intervals) -> Intervals:
        return Intervals.merge(np.concatenate((self.starts, other.starts)), np.concatenate((self.ends, other.ends)))

    def __and__(self, other: Intervals) -> Intervals:
        return self._combine(other, lambda a, b: a & b)

    def __sub__(self, other: Intervals) -> Intervals:
        return self._combine(other, lambda a, b: a & ~b)

    def _combine(self, other: Intervals, keep: Any) -> Intervals:
        edges = np.unique(np.concatenate((self.starts, self.ends, other.starts, other.ends)))
        if len(edges) < 2:
            return Intervals.of(())
        inside = keep(self._covers(edges[:-1]), other._covers(edges[:-1]))
        return Intervals.merge(edges[:-1][inside], edges[1:][inside])

    def _covers(self, points: Ints) -> npt.NDArray[np.bool_]:
        if not self:
            return np.zeros(len(points), bool)
        at = np.searchsorted(self.starts, points, side="right") - 1
        return np.asarray((at >= 0) & (points < self.ends[np.maximum(at, 0)]))

    def __contains__(self, byte: int) -> bool:
        return bool(self._covers(np.array([byte], np.int64))[0])

    def issubset(self, other: Intervals) -> bool:
        return not self - other

    def shift(self, by: int) -> Intervals:
        return Intervals(self.starts + by, self.ends + by)

    def box(self) -> Box | None:
        """The strided box that is exactly this set, None where there is none (the empty set has none)."""
        if not self:
            return None
        width = int(self.ends[0] - self.starts[0])
        if not (self.ends - self.starts == width).all():
            return None
        start, counts, strides = int(self.starts[0]), [width], [1]
        at = self.starts - start
        while len(at) > 1:
            pitch = int(at[1])
            run = 1 + int(np.argmin(np.concatenate((np.diff(at) == pitch, [False]))))
            if len(at) % run or not (at.reshape(-1, run) == at[::run, None] + pitch * np.arange(run)).all():
                return None
            counts.append(run)
            strides.append(pitch)
            at = at[::run]
        return Box(start, tuple(reversed(counts)), tuple(reversed(strides)))


@dataclass(frozen=True)
class Box:
    """Bytes start + Σ i_d · strides[d], 0 ≤ i_d < shape[d]; the last dimension is contiguous bytes (stride 1).

    A matrix slice of 3 rows of 64 bytes, 256 apart, is shape (3, 64), strides (256, 1).
    """

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape))

    def intervals(self) -> Intervals:
        starts = np.array([self.start], np.int64)
        for count, stride in zip(self.shape[:-1], self.strides[:-1], strict=True):
            starts = (starts[:, None] + stride * np.arange(count, dtype=np.int64)).reshape(-1)
        return Intervals.merge(starts, starts + self.shape[-1])


@dataclass(frozen=True)
class BufferFootprint:
    """Offsets from `addr`. `name` is the kernel parameter, or the module variable, that holds the buffer."""

    name: str
    addr: int
    nbytes: int
    reads: Intervals
    writes: Intervals

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "addr": self.addr,
            "nbytes": self.nbytes,
            "reads": [list(pair) for pair in self.reads],
            "writes": [list(pair) for pair in self.writes],
        }


@dataclass(frozen=True)
class Footprint:
    """What one launch of a kernel reads and writes.

    buffers: one for each buffer argument, in the order of the parameters, then touched module variables.
    outside_reads, outside_writes: absolute addresses that lie in no buffer: a footprint with any is no evidence for a dependence.
    guards: names of buffers whose contents were used; it holds while those bytes stay as they were.
    """

    kernel: str
    buffers: tuple[BufferFootprint, ...]
    outside_reads: Intervals
    outside_writes: Intervals
    guards: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> BufferFootprint:
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        raise KeyError(f"{name!r} is no buffer of {self.kernel}; it has {', '.join(b.name for b in self.buffers)}")

    def renamed(self, names: Mapping[str, str]) -> Footprint:
        """The same with other names of buffers and guards, for example of values for parameters; those not named keep theirs."""
        buffers = tuple(replace(b, name=names.get(b.name, b.name)) for b in self.buffers)
        return replace(self, buffers=buffers, guards=tuple(names.get(g, g) for g in self.guards))

    @property
    def complete(self) -> bool:
        return not self.outside_reads and not self.outside_writes

    def __str__(self) -> str:
        lines = [f"kernel {self.kernel}" + (f" (while {', '.join(self.guards)} is unchanged)" if self.guards else "")]
        for buffer in self.buffers:
            for what, found in (("reads", buffer.reads), ("writes", buffer.writes)):
                lines.append(f"  {buffer.name} {what} {_describe(found, buffer.nbytes)}")
        for what, found in (("reads", self.outside_reads), ("writes", self.outside_writes)):
            if found:
                lines.append(f"  outside every buffer: {what} {found.nbytes} bytes, the first at {int(found.starts[0]):#x}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "buffers": [buffer.to_json() for buffer in self.buffers],
            "outside": {"reads": [list(p) for p in self.outside_reads], "writes": [list(p) for p in self.outside_writes]},
            "guards": list(self.guards),
        }


def _describe(found: Intervals, nbytes: int) -> str:
    if not found:
        return "nothing"
    if len(found) == 1 and found.nbytes == nbytes:
        return f"all {nbytes} bytes"
    box = found.box()
    if len(found) == 1:
        return f"{found.nbytes} of {nbytes} bytes, [{int(found.starts[0])}, {int(found.ends[0])})"
    if box:
        return f"{found.nbytes} of {nbytes} bytes, {' x '.join(map(str, box.shape))} with strides {box.strides} from {box.start}"
    return f"{found.nbytes} of {nbytes} bytes in {len(found)} intervals"


Target = tuple[str, int, int]
"""Name, address and size of a buffer."""

LARGEST_MAP = 1 << 30
"""Flags for one buffer and width, of which only what is touched takes memory; a larger buffer keeps intervals instead."""
SCANNED = 1 << 24
"""Flags looked at together."""


class Recorder:
    """Collects accesses by absolute address; `finish` sorts them into buffers."""

    def __init__(self, targets: list[Target]) -> None:
        self.targets = targets
        self.marks: dict[tuple[int, bool, int], npt.NDArray[np.bool_]] = {}
        self.ranges: dict[tuple[int, bool], list[Intervals]] = {}
        self.pending: dict[tuple[int, bool], int] = {}

    def mark(self, write: bool, addresses: npt.NDArray[Any], width: int) -> None:
        """`width` bytes at each address (any shape, any integer type below 2^63)."""
        if not addresses.size:
            return
        at = addresses.reshape(-1).astype(np.int64, copy=False)
        low, high = int(at.min()), int(at.max()) + width
        left = True
        for index, (_, start, size) in enumerate(self.targets):
            if high <= start or low >= start + size:
                continue
            inside = start <= low and high <= start + size
            if inside:
                self._mark(index, write, at, width, start, size)
                left = False
            else:
                within = (at >= start) & (at + width <= start + size)
                self._mark(index, write, at[within], width, start, size)
                across = ~within & (at + width > start) & (at < start + size)
                if across.any():
                    self._add(index, write, np.maximum(at[across], start), np.minimum(at[across] + width, start + size))
        if left:
            self._outside(write, at, at + width)

    def spans(self, write: bool, starts: npt.NDArray[Any], ends: npt.NDArray[Any]) -> None:
        """Intervals of any length."""
        starts, ends = starts.reshape(-1).astype(np.int64), ends.reshape(-1).astype(np.int64)
        if not len(starts):
            return
        merged = Intervals.merge(starts, ends)
        for index, (_, start, size) in enumerate(self.targets):
            self._add(index, write, np.clip(merged.starts, start, start + size), np.clip(merged.ends, start, start + size))
        self._outside(write, merged.starts, merged.ends)

    def _outside(self, write: bool, starts: Ints, ends: Ints) -> None:
        known = Intervals.merge(
            np.array([t[1] for t in self.targets], np.int64), np.array([t[1] + t[2] for t in self.targets], np.int64)
        )
        rest = Intervals.merge(starts, ends) - known
        if rest:
            self._add(-1, write, rest.starts, rest.ends)

    def _mark(self, index: int, write: bool, at: Ints, width: int, start: int, size: int) -> None:
        if not len(at):
            return
        unit = width if width & (width - 1) == 0 else 1
        if (unit == 1 and width > 1) or int(np.bitwise_or.reduce(at)) & (unit - 1):
            self._add(index, write, at, at + width)
            return
        first = start // unit
        count = (start + size - 1) // unit - first + 1
        if count > LARGEST_MAP:
            if (at[1:] < at[:-1]).any():
                at = np.sort(at)
            new = np.concatenate(([True], at[1:] > at[:-1] + width))
            last = np.concatenate((new[1:], [True]))
            self._add(index, write, at[new], at[last] + width)
            return
        key = (index, write, unit)
        marks = self.marks.get(key)
        if marks is None:
            marks = self.marks[key] = np.zeros(count, bool)
        marks[at // unit - first] = True

    def _add(self, index: int, write: bool, starts: Ints, ends: Ints) -> None:
        merged = Intervals.merge(starts, ends)
        if not merged:
            return
        key = (index, write)
        self.ranges.setdefault(key, []).append(merged)
        self.pending[key] = self.pending.get(key, 0) + len(merged)
        if self.pending[key] > 1 << 22:  # keep the memory bounded
            whole = self._union(key)
            self.ranges[key] = [whole]
            self.pending[key] = len(whole) // 2

    def _union(self, key: tuple[int, bool]) -> Intervals:
        parts = self.ranges.get(key, [])
        if not parts:
            return Intervals.of(())
        return Intervals.merge(np.concatenate([p.starts for p in parts]), np.concatenate([p.ends for p in parts]))

    def touched(self, index: int, write: bool) -> Intervals:
        """Offsets into buffer `index`, or absolute addresses for -1."""
        start, size = self.targets[index][1:] if index >= 0 else (0, 0)
        sets = [self._union((index, write)).shift(-start)]
        for (target, kind, unit), marks in self.marks.items():
            if target == index and kind == write:
                for first in range(0, len(marks), SCANNED):
                    part = marks[first : first + SCANNED]
                    if part.any():
                        sets.append(Intervals.from_marks(part, unit, (start // unit + first) * unit - start))
        whole = Intervals.merge(np.concatenate([s.starts for s in sets]), np.concatenate([s.ends for s in sets]))
        return whole if index < 0 else whole & Intervals.of([(0, size)])
