"""Shared memory of many blocks, with the order that barriers give.

Each byte has a value or is unknown. Values pass from one warp to another only through a barrier: every warp carries a vector
clock, a barrier merges the clocks of those who meet there, and a read of what another warp wrote without a barrier between is
refused, as is a write over what another warp has read. Within a warp program order is taken, which is what compilers rely on after
`bar.warp.sync`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from .semantics import UNSIGNED
from .values import UNKNOWN, Partial, Poison, Value

Array = npt.NDArray[Any]
Refuse = Callable[[str], NoReturn]
BARRIERS = 16
HANDED = "a value passes through shared memory with no barrier between the threads"


class SharedMemory:
    """`size` bytes for each of `count` blocks of `threads` threads. Offsets and masks broadcast to (count, threads)."""

    def __init__(self, count: int, threads: int, size: int) -> None:
        warps = -(-threads // 32)
        self.count, self.threads, self.size = count, threads, size
        self.shape = (count, threads)
        self.data = np.zeros((count, size), np.uint8)
        self.bad = np.ones((count, size), bool)
        self.writer = np.full((count, size), -1, np.int16)
        self.written_at = np.zeros((count, size), np.int32)
        self.reader = np.full((count, size), -1, np.int16)  # -2: several warps
        self.read_at = np.zeros((count, size), np.int32)
        self.read_epoch = np.full((count, size), -1, np.int32)
        self.clock = np.zeros((count, warps, warps), np.int32)
        self.clock[:, range(warps), range(warps)] = 1
        self.epoch = np.zeros(count, np.int32)
        self.arrived = np.zeros((count, BARRIERS), np.int64)
        self.expected = np.full((count, BARRIERS), -1, np.int64)
        self.loose = np.zeros((count, BARRIERS), bool)  # somebody arrived and did not wait
        self.meeting = np.zeros((count, BARRIERS, warps), np.int32)
        self.warp = np.arange(threads) // 32

    def forget(self) -> None:
        """Every value is unknown from here on."""
        self.bad[:] = True

    def _pick(self, offset: Array, mask: Array) -> tuple[Array, Array, Array]:
        """Blocks, warps and offsets of the threads in the mask."""
        whole = np.broadcast_to(mask, self.shape)
        block, thread = np.nonzero(whole)
        return block, self.warp[thread], np.broadcast_to(offset, self.shape)[whole]

    def read(self, offset: Array, size: int, mask: Array, refuse: Refuse) -> Value:
        block, warp, at = self._pick(offset, mask)
        if not len(at):
            return UNKNOWN
        if at.min() < 0 or at.max() + size > self.size:
            refuse("reads shared memory that the launch does not have")
        index = at[:, None] + np.arange(size)
        rows = block[:, None]
        bad = self.bad[rows, index].any(axis=1)
        writer = self.writer[rows, index]
        seen = self.clock[rows, warp[:, None], np.maximum(writer, 0)]
        unordered = (writer >= 0) & (writer != warp[:, None]) & (seen < self.written_at[rows, index])
        if (unordered.any(axis=1) & ~bad).any():
            refuse(HANDED)
        old = self.reader[rows, index]
        self.reader[rows, index] = np.where((old == -1) | (old == warp[:, None]), warp[:, None], -2)
        several = np.zeros((self.count, self.size), bool)
        # Threads of several warps may read one byte in this very step.
        first = np.full((self.count, self.size), -1, np.int16)
        first[rows, index] = np.broadcast_to(warp[:, None], index.shape)
        differs = first[rows, index] != warp[:, None]
        several[np.broadcast_to(rows, index.shape)[differs], index[differs]] = True
        self.reader[several] = -2
        self.read_at[rows, index] = self.clock[rows, warp[:, None], warp[:, None]]
        self.read_epoch[rows, index] = self.epoch[rows]
        values = np.ascontiguousarray(self.data[rows, index]).view(UNSIGNED[size])[:, 0]
        whole = np.broadcast_to(mask, self.shape)
        result = np.zeros(self.shape, UNSIGNED[size])
        result[whole] = values
        unknown = np.zeros(self.shape, bool)
        unknown[whole] = bad
        if bad.all():
            return UNKNOWN
        if not bad.any():
            if (result == result[:, :1]).all() and whole.all():
                return result[:, :1]
            return result
        return Partial(result, unknown)

    def write(self, offset: Array, size: int, value: Value, mask: Array, refuse: Refuse) -> None:
        block, warp, at = self._pick(offset, mask)
        if not len(at):
            return
        if at.min() < 0 or at.max() + size > self.size:
            refuse("writes shared memory that the launch does not have")
        index = at[:, None] + np.arange(size)
        rows = block[:, None]
        reader, epoch = self.reader[rows, index], self.read_epoch[rows, index]
        later = self.clock[rows, warp[:, None], np.maximum(reader, 0)] >= self.read_at[rows, index]
        fine = (reader == -1) | (reader == warp[:, None]) | (epoch < self.epoch[rows]) | ((reader >= 0) & later)
        if not fine.all():
            refuse(HANDED)
        writer = self.writer[rows, index]
        ordered = self.clock[rows, warp[:, None], np.maximum(writer, 0)] >= self.written_at[rows, index]
        clash = (writer >= 0) & (writer != warp[:, None]) & ~ordered
        if isinstance(value, Poison):
            self.bad[rows, index] = True
        else:
            whole = np.broadcast_to(mask, self.shape)
            unknown: Array | None = None
            if isinstance(value, Partial):
                unknown, value = np.broadcast_to(value.bad, self.shape)[whole], value.array
            values = np.ascontiguousarray(np.broadcast_to(value, self.shape)[whole])
            raw = values.view(np.uint8).reshape(len(values), size)
            same = ~clash | (self.data[rows, index] == raw)
            self.data[rows, index] = raw
            # Several threads that store different bytes in one place leave one of them, nobody knows which.
            kept = self.data[rows, index] == raw
            self.bad[rows, index] = False
            lost = ~kept | ~same
            if unknown is not None:
                lost |= unknown[:, None]
            self.bad[np.broadcast_to(rows, index.shape)[lost], index[lost]] = True
        self.writer[rows, index] = warp[:, None]
        self.written_at[rows, index] = self.clock[rows, warp[:, None], warp[:, None]]
        self.reader[rows, index] = -1

    # -- barriers

    def arrive(self, barrier: int, mask: Array, count: int | None, waits: bool) -> None:
        blocks = mask.any(axis=1)
        if not waits:
            self.loose[blocks, barrier] = True
        self.arrived[:, barrier] += mask.sum(axis=1)
        self.expected[blocks, barrier] = -1 if count is None else count
        warps = self._by_warp(mask)
        mine = np.where(warps[:, :, None], self.clock, 0).max(axis=1)
        self.meeting[:, barrier] = np.maximum(self.meeting[:, barrier], mine)
        rows, who = np.nonzero(warps)
        self.clock[rows, who, who] += 1

    def complete(self, barrier: int, gone: Array) -> Array:
        """Blocks in which the barrier has all its threads; `gone` counts those that have left the kernel."""
        expected = np.where(self.expected[:, barrier] < 0, self.threads - gone, self.expected[:, barrier])
        return np.asarray((self.arrived[:, barrier] > 0) & (self.arrived[:, barrier] >= expected))

    def acquire(self, barrier: int, mask: Array) -> None:
        rows, who = np.nonzero(self._by_warp(mask))
        self.clock[rows, who] = np.maximum(self.clock[rows, who], self.meeting[rows, barrier])

    def reset(self, barrier: int, done: Array) -> None:
        everyone = done & ((self.expected[:, barrier] < 0) | (self.expected[:, barrier] >= self.threads))
        self.epoch[everyone & ~self.loose[:, barrier]] += 1
        self.loose[done, barrier] = False
        self.arrived[done, barrier] = 0
        self.meeting[done, barrier] = 0

    def _by_warp(self, mask: Array) -> Array:
        pad = -self.threads % 32
        whole = np.broadcast_to(mask, self.shape)
        if pad:
            whole = np.concatenate((whole, np.zeros((self.count, pad), bool)), axis=1)
        return whole.reshape(self.count, -1, 32).any(axis=2)
