"""Shared memory of many blocks, with the order that barriers give.

Each byte has a value or is unknown. Values pass from one warp to another only through a barrier: every warp carries a vector
clock, a barrier merges the clocks of those who meet there, and a read of what another warp wrote without a barrier between is
refused, as is a write over what another warp has read. Within a warp, values pass between lanes only through a barrier or an
instruction in which the whole warp takes part (`bar.warp.sync`, shuffles, votes). What an asynchronous copy fills, and what other
blocks of a cluster may have written, is unknown for good: their completion is told by other means than barriers.
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
        self.lost = np.zeros((count, size), bool)  # unknown for good
        self.clashed = np.full((count, size), -1, np.int32)  # epoch in which two threads stored without order
        self.write_thread = np.full((count, size), -1, np.int16)  # -2: several
        self.read_thread = np.full((count, size), -1, np.int16)
        self.turn = np.zeros((count, warps), np.int32)  # counts what the whole warp took part in
        self.write_turn = np.zeros((count, size), np.int32)
        self.read_turn = np.zeros((count, size), np.int32)

    def together(self, mask: Array) -> None:
        """Warps that are whole in the mask take part in an instruction together."""
        pad = -self.threads % 32
        whole = np.broadcast_to(mask, self.shape)
        if pad:
            whole = np.concatenate((whole, np.ones((self.count, pad), bool)), axis=1)
        self.turn += whole.reshape(self.count, -1, 32).all(axis=2)

    def forget(self, refuse: Refuse) -> None:
        """Something is written, nobody knows where or when: every value is unknown for good. Refuses where one was used already
        that the write may have been meant for."""
        if ((self.reader != -1) & (self.read_epoch >= self.epoch[:, None])).any():
            refuse(HANDED)
        self.bad[:] = True
        self.lost[:] = True

    def fill(self, offset: Array, nbytes: Array, mask: Array, refuse: Refuse, everywhere: bool = False) -> None:
        """An asynchronous copy of `nbytes` (broadcast to all threads) to `offset`, in every block where `everywhere`."""
        whole = np.broadcast_to(mask, self.shape)
        block, _ = np.nonzero(whole)
        starts = np.broadcast_to(offset, self.shape)[whole]
        sizes = np.broadcast_to(nbytes, self.shape)[whole]
        pairs = np.unique(np.stack((block, starts, sizes), axis=1), axis=0) if len(starts) else np.zeros((0, 3), np.int64)
        for b, start, size in pairs.tolist():
            if start < 0 or start + size > self.size:
                refuse("writes shared memory that the launch does not have")
            where = (slice(None) if everywhere else b, slice(start, start + size))
            epoch = self.epoch[:, None] if everywhere else self.epoch[b]
            if ((self.reader[where] != -1) & (self.read_epoch[where] >= epoch)).any():
                refuse(HANDED)
            self.bad[where] = True
            self.lost[where] = True

    def _pick(self, offset: Array, mask: Array) -> tuple[Array, Array, Array, Array]:
        """Blocks, threads, warps and offsets of the threads in the mask."""
        whole = np.broadcast_to(mask, self.shape)
        block, thread = np.nonzero(whole)
        return block, thread, self.warp[thread], np.broadcast_to(offset, self.shape)[whole]

    def _mark_thread(self, table: Array, rows: Array, index: Array, thread: Array, keep: bool) -> None:
        """Note who touched bytes: one thread, or -2 for several, those noted before among them where `keep`."""
        wide = np.broadcast_to(thread[:, None], index.shape)
        before = table[rows, index]
        table[rows, index] = wide
        several = table[rows, index] != wide
        if keep:
            several |= (before != -1) & (before != wide)
        table[np.broadcast_to(rows, index.shape)[several], index[several]] = -2

    def read(self, offset: Array, size: int, mask: Array, refuse: Refuse) -> Value:
        block, thread, warp, at = self._pick(offset, mask)
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
        turn = self.turn[rows, warp[:, None]]
        lane = (self.write_thread[rows, index] == thread[:, None]) | (turn > self.write_turn[rows, index])
        unordered |= (writer == warp[:, None]) & ~lane
        if (unordered.any(axis=1) & ~bad).any():
            refuse(HANDED)
        fresh = (self.read_epoch[rows, index] < self.epoch[rows]) | (
            (self.reader[rows, index] == warp[:, None]) & (self.read_turn[rows, index] < turn)
        )
        self.read_thread[rows, index] = np.where(fresh, -1, self.read_thread[rows, index])
        self._mark_thread(self.read_thread, rows, index, thread, keep=True)
        self.read_turn[rows, index] = turn
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
        block, thread, warp, at = self._pick(offset, mask)
        if not len(at):
            return
        if at.min() < 0 or at.max() + size > self.size:
            refuse("writes shared memory that the launch does not have")
        index = at[:, None] + np.arange(size)
        rows = block[:, None]
        reader, epoch = self.reader[rows, index], self.read_epoch[rows, index]
        later = self.clock[rows, warp[:, None], np.maximum(reader, 0)] >= self.read_at[rows, index]
        turn = self.turn[rows, warp[:, None]]
        mine = (reader == warp[:, None]) & (
            (self.read_thread[rows, index] == thread[:, None]) | (turn > self.read_turn[rows, index])
        )
        others = (reader >= 0) & (reader != warp[:, None]) & later
        fine = (reader == -1) | mine | (epoch < self.epoch[rows]) | others
        if not fine.all():
            refuse(HANDED)
        writer = self.writer[rows, index]
        ordered = self.clock[rows, warp[:, None], np.maximum(writer, 0)] >= self.written_at[rows, index]
        lane = (self.write_thread[rows, index] == thread[:, None]) | (turn > self.write_turn[rows, index])
        clash = (writer >= 0) & np.where(writer == warp[:, None], ~lane, ~ordered)
        never = self.lost[rows, index] | (self.clashed[rows, index] == self.epoch[rows])
        if isinstance(value, Poison):
            self.bad[rows, index] = True
        else:
            whole = np.broadcast_to(mask, self.shape)
            unknown: Array | None = None
            if isinstance(value, Partial):
                unknown, value = np.broadcast_to(value.bad, self.shape)[whole], value.array
            values = np.ascontiguousarray(np.broadcast_to(value, self.shape)[whole])
            raw = values.view(np.uint8).reshape(len(values), size)
            same = ~clash | (~self.bad[rows, index] & (self.data[rows, index] == raw))
            self.data[rows, index] = raw
            # Several threads that store different bytes in one place leave one of them, nobody knows which.
            kept = self.data[rows, index] == raw
            self.bad[rows, index] = False
            lost = ~kept | ~same | never
            if unknown is not None:
                lost |= unknown[:, None]
            self.bad[np.broadcast_to(rows, index.shape)[lost], index[lost]] = True
        wide = np.broadcast_to(rows, index.shape)
        self.clashed[wide[clash], index[clash]] = self.epoch[wide[clash]]
        self._mark_thread(self.write_thread, rows, index, thread, keep=False)
        self.write_turn[rows, index] = turn
        self.writer[rows, index] = warp[:, None]
        self.written_at[rows, index] = self.clock[rows, warp[:, None], warp[:, None]]
        self.reader[rows, index] = -1
        self.read_thread[rows, index] = -1

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
        self.together(mask)

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
        self.turn[everyone & ~self.loose[:, barrier]] += 1
        self.loose[done, barrier] = False
        self.arrived[done, barrier] = 0
        self.meeting[done, barrier] = 0

    def _by_warp(self, mask: Array) -> Array:
        pad = -self.threads % 32
        whole = np.broadcast_to(mask, self.shape)
        if pad:
            whole = np.concatenate((whole, np.zeros((self.count, pad), bool)), axis=1)
        return np.asarray(whole.reshape(self.count, -1, 32).any(axis=2))
