"""Local memory: bytes of each thread's own, addressed by numbers that may differ from thread to thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .semantics import UNSIGNED
from .values import UNKNOWN, Partial, Poison, Value

Array = npt.NDArray[Any]


class LocalMemory:
    """`size` bytes for each of `count` × `threads` threads, each with a value or unknown, as all are at the start.

    Offsets and masks broadcast to (count, threads). What lies beyond `size` (a stack that a call grows) is unknown.
    """

    def __init__(self, count: int, threads: int, size: int) -> None:
        self.shape, self.size = (count, threads), size
        self.data = np.zeros((count, threads, size), np.uint8)
        self.bad = np.ones((count, threads, size), bool)

    def read(self, offset: Array, size: int) -> Value:
        """What each thread finds in `size` bytes (1, 2, 4 or 8) at its `offset`, as unsigned integers."""
        inside, index = self._places(offset, size)
        bad = ~inside | np.take_along_axis(self.bad, index, axis=2).any(axis=2)
        if bad.all():
            return UNKNOWN
        raw = np.ascontiguousarray(np.take_along_axis(self.data, index, axis=2))
        values = raw.view(UNSIGNED[size])[..., 0]
        if bad.any():
            return Partial(values, bad)
        same: Array = values[:1, :1] if (values == values[0, 0]).all() else values
        return same

    def write(self, offset: Array, size: int, value: Value, mask: Array) -> None:
        """Store in the threads of the mask."""
        inside, index = self._places(offset, size)
        where = inside & np.broadcast_to(mask, self.shape)
        block, thread = np.nonzero(where)
        to = (block[:, None], thread[:, None], index[where])
        if isinstance(value, Poison):
            self.bad[to] = True
            return
        array = value.array if isinstance(value, Partial) else value
        chosen = np.ascontiguousarray(np.broadcast_to(array, self.shape)[where].astype(UNSIGNED[size]))
        self.data[to] = chosen.view(np.uint8).reshape(len(chosen), size)
        self.bad[to] = np.broadcast_to(value.bad, self.shape)[where][:, None] if isinstance(value, Partial) else False

    def forget(self, mask: Array) -> None:
        """The threads of the mask write, nobody knows where."""
        self.bad[np.broadcast_to(mask, self.shape)] = True

    def _places(self, offset: Array, size: int) -> tuple[Array, Array]:
        """Which threads stay inside, and the bytes each touches (those of the others are of no account)."""
        at = np.broadcast_to(offset, self.shape)
        inside = (at >= 0) & (at + size <= self.size)
        return inside, np.where(inside, at, 0)[..., None] + np.arange(min(size, self.size))
