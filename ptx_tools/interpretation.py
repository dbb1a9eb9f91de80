"""The bytes a launch reads and writes, found without a GPU and without the data.

Only the slice of the kernel that feeds addresses, sizes, guards and branches is executed (`slicing.py`), for all threads of many
blocks at once as NumPy arrays. A register is an array that broadcasts to (blocks, threads): what depends on the block alone is
(B, 1), on the thread alone (1, T), on neither (1, 1), so most of the arithmetic is tiny. A value loaded from memory whose
contents are not given is unknown; where an unknown value reaches an address, a size, a guard or a branch that matters, the launch
has no footprint and NotDerivable says where.

Threads that stand at different places are run lowest block first (loops before what follows them), so they meet again where
their paths do. Barriers of the block order what passes through shared memory; what is handed over by other means (mbarriers,
flags) is not taken for ordered: a value that would need it is refused, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, NoReturn

import networkx as nx
import numpy as np

from . import isa, semantics
from .flow import Flow, Op, flatten
from .footprints import BufferFootprint, Footprint, Recorder
from .launch import (
    CONST_WINDOW,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    VARIABLES_BASE,
    WINDOW,
    Argument,
    Buffer,
    TensorMap,
    bind_arguments,
)
from .local_memory import LocalMemory
from .semantics import UNSIGNED, Array, read_as, write_as
from .shared_memory import BARRIERS, SharedMemory
from .slicing import Slice, call_slots, is_barrier, op_defs, slice_kernel
from .syntax import TYPE_BYTES, Address, Literal, Module, Name, Not, Offset, Operand, Pair, PtxError, Vector
from .values import UNKNOWN, Partial, Poison, Value, and_bad, blend

MOST_SHARED = 232_448
"""Bytes of shared memory a block may have on any GPU that PTX knows so far."""

LANES = 1 << 17
"""Threads interpreted at once: arrays of this many 64-bit values stay near the cache."""

MOST_TURNS = 1 << 22
"""Basic blocks executed before a launch is given up: a loop that never ends would be interpreted forever."""

Dim = int | tuple[int, ...]


class NotDerivable(PtxError):
    """The launch has no footprint that the interpreter can vouch for; the message says which instruction stands in the way."""


# What no argument decides: time, and where the hardware put a block. Their values are unknown.
UNKNOWN_SPECIALS = (
    "%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi", "%smid", "%nsmid", "%warpid",
    "%nwarpid", "%gridid", "%pm", "%envreg", "%current_graph_exec",
)  # fmt: skip


def footprint(
    module: Module,
    kernel: str | None,
    grid: Dim,
    block: Dim,
    args: Sequence[Argument] | Mapping[str, Argument],
    *,
    shared_bytes: int = 0,
    cluster: Dim | None = None,
    symbols: Mapping[str, bytes] | None = None,
    extra: Mapping[str, Buffer] | None = None,
) -> Footprint:
    """The exact footprint of one launch.

    grid, block, cluster: up to three numbers, x first. args: `Buffer(addr, nbytes)`, `TensorMap`, ints and floats by position or
    by name; a struct is its bytes; None, and what is left out at the end, is not known. shared_bytes: dynamic shared memory.
    symbols: contents of module variables, without which what is loaded from them is unknown. extra: named memory that is no
    argument.

    Raises NotDerivable where the accesses depend on data, or on what is not modelled; PtxError and ValueError for bad input.
    """
    grid_, block_ = _dim3("grid", grid), _dim3("block", block)
    cluster_ = _dim3("cluster", cluster) if cluster is not None else _declared_cluster(module, kernel)
    if any(n < 0 for n in grid_) or any(n < 1 for n in block_) or math.prod(block_) > 1024 or block_[2] > 64:
        raise ValueError(f"grid {grid_} and block {block_}: a block has 1 to 1024 threads, 64 along z, and no size is negative")
    if grid_[0] >= 1 << 31 or max(grid_[1:]) >= 1 << 16:
        raise ValueError(f"grid {grid_}: at most 2^31 - 1 blocks along x and 65535 along y and z")
    if any(n < 1 for n in cluster_) or math.prod(cluster_) > 16:
        raise ValueError(f"cluster {cluster_}: a cluster has 1 to 16 blocks")
    if not 0 <= shared_bytes <= MOST_SHARED:
        raise ValueError(f"shared_bytes {shared_bytes}: a block has 0 to {MOST_SHARED} bytes")
    if any(g % c for g, c in zip(grid_, cluster_, strict=True)):
        raise ValueError(f"grid {grid_} is no multiple of the cluster {cluster_}")
    function = module.kernel(kernel)
    limit = _required_threads(function)
    if limit is not None and limit != block_:
        raise ValueError(f"{function.name} is compiled for blocks of {limit}, not {block_}")
    most = _most_threads(function)
    if most is not None and math.prod(block_) > most:
        raise ValueError(f"{function.name} is compiled for at most {most} threads a block, not {math.prod(block_)}")
    flow = flatten(module, function.name)
    sliced = slice_kernel(flow)

    def run(elect_last: bool) -> Footprint:
        machine = _Machine(sliced, grid_, block_, cluster_, args, shared_bytes, symbols or {}, extra or {})
        machine.elect_last = elect_last
        with np.errstate(all="ignore"):
            return machine.run()

    found = run(False)
    elections = [op for op in flow.ops if op.opcode == "elect" and op.index in sliced.needed]
    if elections and found != run(True):
        where = flow.where(elections[0])
        raise NotDerivable(
            f"{where}: {elections[0].instruction.mnemonic}: which lane is elected decides where it reads or writes"
        )
    return found


def _dim3(what: str, value: Dim) -> tuple[int, int, int]:
    numbers = tuple(int(n) for n in ((value,) if isinstance(value, int | Integral) else value))
    if not 1 <= len(numbers) <= 3:
        raise ValueError(f"{what} {value} must have one to three numbers")
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def _numbers(tokens: tuple[str, ...]) -> tuple[int, int, int]:
    return _dim3("size", tuple(int(t) for t in tokens if t != ","))


def _declared_cluster(module: Module, kernel: str | None) -> tuple[int, int, int]:
    for directive in module.kernel(kernel).tuning:
        if directive.name == ".reqnctapercluster":
            return _numbers(directive.tokens)
    return 1, 1, 1


def _required_threads(function: Any) -> tuple[int, int, int] | None:
    for directive in function.tuning:
        if directive.name == ".reqntid":
            return _numbers(directive.tokens)
    return None


def _most_threads(function: Any) -> int | None:
    for directive in function.tuning:
        if directive.name == ".maxntid":
            return math.prod(_numbers(directive.tokens))
    return None


class _Machine:
    elect_last = False
    """Which lane of a warp an election takes: PTX does not say, so what comes of both ends must be the same."""

    def __init__(
        self, sliced: Slice, grid: tuple[int, int, int], block: tuple[int, int, int], cluster: tuple[int, int, int],
        args: Sequence[Argument] | Mapping[str, Argument], shared_bytes: int, symbols: Mapping[str, bytes],
        extra: Mapping[str, Buffer],
    ) -> None:  # fmt: skip
        self.slice, self.flow = sliced, sliced.flow
        self.grid, self.block, self.cluster = grid, block, cluster
        kernel = self.flow.kernel
        self.launch = bind_arguments(self.flow.module, kernel.name, kernel.params or (), args)
        self.threads = math.prod(block)
        self.blocks = math.prod(grid)
        self.shared_bytes = shared_bytes
        self.slots = call_slots(self.flow)
        self._lay_out(symbols)
        self.targets = [(n, b.addr, b.nbytes) for n, b in self.launch.buffers]
        self.targets += [(n, b.addr, b.nbytes) for n, b in extra.items()]
        self.targets += [(n, at, size) for n, (space, at, size) in self.symbols.items() if space == "global"]
        self.recorder = Recorder(self.targets)
        known = [(b.addr, b.data(), n) for n, b in (*self.launch.buffers, *extra.items()) if b.contents is not None]
        for name, data in symbols.items():
            if name not in self.symbols:
                raise ValueError(f"the module has no variable {name!r}; it has {', '.join(self.symbols) or 'none'}")
            known.append((self.symbols[name][1], np.frombuffer(data, np.uint8), name))
        self.known = known
        self.guards: set[str] = set()
        self.read_params = {
            access.address.base.text
            for index in sliced.needed
            for access in sliced.accesses[index]
            if access.space == "param" and access.address is not None and access.address.base is not None
        }
        self.order = _running_order(self.flow)
        self.code = {b.index: self._compile_block(b.index) for b in self.flow.blocks}
        self.local_registers = self._block_local()

    # -- addresses of variables

    def _lay_out(self, symbols: Mapping[str, bytes]) -> None:
        self.addresses: dict[str, int] = {}
        self.symbols: dict[str, tuple[str, int, int]] = {}
        shared = local = 0
        shared = 1024
        next_global, next_const = VARIABLES_BASE, CONST_WINDOW + 4096
        dynamic: list[str] = []
        for name, variable in self.flow.variables.items():
            size = variable.nbytes
            space = variable.space.split("::")[0]
            if space == "shared":
                if size is None or "extern" in "".join(variable.linkage):
                    dynamic.append(name)
                    continue
                shared = -(-shared // variable.align) * variable.align
                self.addresses[name] = shared
                shared += size
            elif space == "local":
                local = -(-local // variable.align) * variable.align
                self.addresses[name] = local
                local += size or 0
            elif space == "global":
                size = size or 0
                self.addresses[name] = next_global
                self.symbols[name] = ("global", next_global, size)
                next_global += -(-size // 256) * 256 + 256
            elif space == "const":
                size = size or 0
                self.addresses[name] = next_const
                self.symbols[name] = ("const", next_const, size)
                next_const += -(-size // 256) * 256 + 256
            elif space == "param" and name in self.launch.offsets:
                self.addresses[name] = self.launch.offsets[name]
        if dynamic:
            shared = -(-shared // 1024) * 1024
            for name in dynamic:
                self.addresses[name] = shared
            shared += self.shared_bytes
        self.shared_size = shared + (0 if dynamic else self.shared_bytes)
        self.local_size = -(-local // 8) * 8

    # -- failures

    def refuse(self, op: Op, why: str) -> NoReturn:
        absent = [name for name, at in self.launch.offsets.items() if name in self.read_params and not self.launch.known[at]]
        hint = f" (these parameters were not given: {', '.join(absent)})" if absent and "depend" in why else ""
        raise NotDerivable(f"{self.flow.where(op)}: {op.instruction.mnemonic}: {why}{hint}")

    # -- running

    def run(self) -> Footprint:
        threads = self.threads
        at_once = max(1, LANES // threads)
        if self.slice.shared:
            at_once = max(1, min(at_once, (1 << 26) // max(self.shared_size, 1)))
        if self.slice.local:
            at_once = max(1, min(at_once, (1 << 26) // max(self.local_size * threads, 1)))
        group = math.prod(self.cluster)
        at_once = max(group, at_once // group * group)
        if self.blocks and self.slice.accesses:
            for first in range(0, self.blocks, at_once):
                self._run_blocks(np.arange(first, min(first + at_once, self.blocks), dtype=np.int64))
        found = []
        own = len(self.launch.buffers)
        for index, (name, addr, size) in enumerate(self.targets):
            reads, writes = self.recorder.touched(index, False), self.recorder.touched(index, True)
            if index < own or reads or writes:
                found.append(BufferFootprint(name, addr, size, reads, writes))
        outside = self.recorder.touched(-1, False), self.recorder.touched(-1, True)
        for index, (name, _, _) in enumerate(self.targets):
            if name in self.guards and self.recorder.touched(index, True):
                raise NotDerivable(
                    f"{self.flow.module.name}:1:1: {self.flow.kernel.name} writes {name}, whose contents decide where it reads "
                    "and writes"
                )
        return Footprint(self.flow.kernel.name, tuple(found), *outside, tuple(sorted(self.guards)))

    def _run_blocks(self, ids: Array) -> None:
        self.count = len(ids)
        self.shape = (self.count, self.threads)
        self.regs: dict[str, Value] = {}
        self.memory: dict[tuple[str, int, int], Value] = {}
        self.specials = self._special_values(ids)
        self.shared = SharedMemory(self.count, self.threads, self.shared_size) if self.slice.shared else None
        has_local = self.slice.local and self.local_size > 0
        self.local = LocalMemory(self.count, self.threads, self.local_size) if has_local else None
        self.maps: list[tuple[Array, dict[str, Value]]] = []
        self.built: dict[int, TensorMap] = {}
        exit_ = self.flow.exit
        # pending: (rank, block, first instruction) → mask
        pending: dict[tuple[int, int, int], Array] = {(self.order[0], 0, 0): np.ones((1, 1), bool)}
        waiting: dict[tuple[int, int, int], tuple[Array, Array]] = {}
        exited = self.exited = np.zeros((1, 1), bool)
        turns = 0
        while pending or waiting:
            if not pending:
                place = next(iter(waiting))
                self.refuse(self.flow.blocks[place[1]].ops[place[2] - 1], "the barrier is never complete")
            key = min(pending)
            mask = pending.pop(key)
            if not mask.any():
                continue
            _, index, start = key
            turns += 1
            if turns > MOST_TURNS:
                end = self.flow.blocks[index].ops[-1]
                self.refuse(end, f"the threads are still running after {MOST_TURNS} basic blocks")
            self.alone = not pending and not waiting
            self.mask = mask
            self.full = self.alone
            code = self.code[index]
            stopped = False
            for position in range(start, len(code)):
                step, op = code[position]
                if self.shared is not None and is_barrier(op):
                    self._arrive(op, mask, (key[0], index, position + 1), pending, waiting, exited)
                    stopped = True
                    break
                step()
            if stopped:
                continue
            for target, where in self._leave(index, mask):
                if target == exit_ or target < 0:
                    exited = self.exited = exited | where
                    if self.shared is not None and waiting:
                        self._release(pending, waiting, exited)
                    continue
                place = (self.order[target], target, 0)
                pending[place] = pending[place] | where if place in pending else where

    def _leave(self, index: int, mask: Array) -> list[tuple[int, Array]]:
        """Where the threads of `mask` go from the end of a block."""
        block = self.flow.blocks[index]
        if not block.successors:
            return [(-1, mask)]
        if len(block.successors) == 1:
            return [(block.successors[0], mask)]
        if index not in self.slice.relevant:
            return [(self.flow.postdominator[index], mask)]
        end = block.ops[-1]
        if end.opcode == "brx":
            jumping = self._guarded(end, mask)
            result = [(index + 1, mask & ~jumping)] if (mask & ~jumping).any() else []
            if not jumping.any():
                return result
            selector = self.decided(self.operand(end.operands[0], "u32")(), jumping, end, "the branch depends on data")
            for position, target in enumerate(end.targets):
                taken = jumping & (selector == position)
                if taken.any():
                    result.append((target, taken))
            if (jumping & (selector >= len(end.targets))).any():
                self.refuse(end, "the index of the branch lies outside its list")
            return result
        assert end.predicate is not None
        guard = self.decided(self.fetch(end.predicate), mask, end, "the branch depends on data")
        taken = mask & (~guard if end.negated else guard)
        fall = mask & (guard if end.negated else ~guard)
        target = end.targets[0] if end.targets else -1  # a guarded exit and a guarded trap
        if end.opcode in ("ret", "exit"):
            target = self.flow.exit
        return [(t, m) for t, m in ((target, taken), (index + 1, fall)) if m.any()]

    # -- barriers of the block

    def _arrive(
        self, op: Op, mask: Array, after: tuple[int, int, int], pending: dict[tuple[int, int, int], Array],
        waiting: dict[tuple[int, int, int], tuple[Array, Array]], exited: Array,
    ) -> None:  # fmt: skip
        assert self.shared is not None
        mask = self._guarded(op, mask)
        whole = np.broadcast_to(mask, self.shape)
        skipped = self.mask & ~mask
        if skipped.any():
            pending[after] = pending[after] | skipped if after in pending else skipped
        operands = list(op.operands)
        if "red" in op.modifiers:
            for name in isa.written_names(op.instruction):
                self.store(name.text, UNKNOWN)
            operands = operands[1:2] + (operands[2:3] if len(operands) > 3 else [])
        if not mask.any():
            return
        numbers = self._barrier_operand(operands[0], mask, op) if operands else np.zeros((1, 1), np.int64)
        counts = self._barrier_operand(operands[1], mask, op) if len(operands) > 1 else np.full((1, 1), -1)
        waits = "arrive" not in op.modifiers
        for barrier in _distinct(numbers, whole):
            here = whole & (numbers == barrier)
            if barrier >= BARRIERS:
                self.refuse(op, f"there are {BARRIERS} barriers")
            for count in _distinct(counts, here):
                self.shared.arrive(barrier, here & (counts == count), None if count < 0 else count, waits)
        if not waits:
            pending[after] = pending[after] | mask if after in pending else mask
        else:
            at = np.where(whole, numbers, -1)
            if after in waiting:
                old, where = waiting[after]
                waiting[after] = (old | whole, np.where(whole, at, where))
            else:
                waiting[after] = (whole, at)
        self._release(pending, waiting, exited)

    def _barrier_operand(self, operand: Operand, mask: Array, op: Op) -> Array:
        return self.decided(self.operand(operand, "u32")(), mask, op, "the barrier depends on data").astype(np.int64)

    def _release(
        self, pending: dict[tuple[int, int, int], Array], waiting: dict[tuple[int, int, int], tuple[Array, Array]], exited: Array
    ) -> None:  # fmt: skip
        assert self.shared is not None
        gone = np.broadcast_to(exited, self.shape).sum(axis=1)
        for barrier in range(BARRIERS):
            done = self.shared.complete(barrier, gone)
            if not done.any():
                continue
            for place in list(waiting):
                mask, at = waiting[place]
                freed = mask & (at == barrier) & done[:, None]
                if not freed.any():
                    continue
                self.shared.acquire(barrier, freed)
                pending[place] = pending[place] | freed if place in pending else freed
                rest = mask & ~freed
                if rest.any():
                    waiting[place] = (rest, at)
                else:
                    del waiting[place]
            self.shared.reset(barrier, done)

    # -- values

    def fetch(self, name: str) -> Value:
        value = self.regs.get(name)
        if value is not None:
            return value
        if name[0] == "%":
            special = self.specials.get(name)
            if special is not None:
                return special
        return UNKNOWN

    def store(self, name: str, value: Value, mask: Array | None = None) -> None:
        """Write a register where the current threads are; others keep what they had."""
        mask = self.mask if mask is None else mask
        if (self.full and mask is self.mask) or (name in self.local_registers and mask is self.mask):
            self.regs[name] = value
            return
        self.regs[name] = blend(mask, value, self.regs.get(name, UNKNOWN))

    def settled(self, value: Value, mask: Array | None = None) -> Value:
        """The plain array of a value that is known in all threads of the mask (those that run now)."""
        if isinstance(value, Partial) and not (value.bad & (self.mask if mask is None else mask)).any():
            return value.array
        return value

    def decided(self, value: Value, mask: Array, op: Op, why: str) -> Array:
        """The array of a value that must be known in the threads of `mask`."""
        if isinstance(value, Poison):
            self.refuse(op, why)
        if isinstance(value, Partial):
            if (value.bad & mask).any():
                self.refuse(op, why)
            return value.array
        return value

    def operand(self, operand: Operand, kind: str) -> Callable[[], Value]:
        """A function that reads an operand as a PTX type."""
        match operand:
            case Name():
                text = operand.text
                if text in self.addresses and text not in self.flow.types:
                    constant = self._constant(self._symbol_address(text), kind)
                    return lambda: constant
                if text in self.slots:
                    return lambda: UNKNOWN

                def get() -> Value:
                    value = self.regs.get(text)
                    if value is None:
                        value = self.fetch(text)
                    if isinstance(value, np.ndarray):
                        return read_as(value, kind)
                    if isinstance(value, Partial):
                        return Partial(read_as(value.array, kind), value.bad)
                    return value

                return get
            case Literal():
                constant = self._constant(operand.value, kind, operand.text)
                return lambda: constant
            case Offset():
                if operand.base.text not in self.addresses:
                    return lambda: UNKNOWN
                address = self._symbol_address(operand.base.text)
                if operand.generic:
                    space = self.flow.variables[operand.base.text].space.split("::")[0]
                    address += {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}.get(space, 0)
                constant = self._constant(address + operand.bytes, kind)
                return lambda: constant
            case Not():
                inner = self.operand(operand.operand, "pred")

                def invert() -> Value:
                    value = inner()
                    if isinstance(value, np.ndarray):
                        return ~value
                    return Partial(~value.array, value.bad) if isinstance(value, Partial) else value

                return invert
        return lambda: UNKNOWN

    def _symbol_address(self, name: str) -> int:
        address = self.addresses[name]
        return address - CONST_WINDOW if address >= CONST_WINDOW else address

    def _constant(self, value: int | float, kind: str, text: str = "") -> Array:
        target = semantics.numpy_type(kind)
        if target is None:
            target = np.uint64
        if target is np.bool_:
            return np.full((1, 1), bool(value))
        dtype = np.dtype(target)
        if text[:2].lower() in ("0f", "0d") and len(text) == 2 + 2 * dtype.itemsize:  # its bits, a NaN's too
            return np.full((1, 1), int(text[2:], 16), UNSIGNED[dtype.itemsize]).view(target)
        if dtype.kind == "f":
            if isinstance(value, int):  # bits
                return np.full((1, 1), value, UNSIGNED[dtype.itemsize]).view(target)
            return np.full((1, 1), value, target)
        if isinstance(value, float):
            bits = np.full((1, 1), value, np.float64 if dtype.itemsize == 8 else np.float32)
            return np.asarray(bits.view(UNSIGNED[bits.dtype.itemsize]).astype(UNSIGNED[dtype.itemsize]).view(target))
        wrapped = value & ((1 << 8 * dtype.itemsize) - 1)
        return np.full((1, 1), wrapped, UNSIGNED[dtype.itemsize]).view(target)

    # -- special registers

    def _special_values(self, ids: Array) -> dict[str, Value]:
        found: dict[str, Value] = {}
        lane = np.arange(self.threads, dtype=np.int64)[None, :]
        block = ids[:, None]

        def put(name: str, value: Array | int) -> None:
            array = np.full((1, 1), value) if isinstance(value, int) else value
            found[name] = array.astype(np.uint32)

        def split(at: Array, sizes: tuple[int, int, int]) -> tuple[Array, Array, Array]:
            return at % sizes[0], at // sizes[0] % sizes[1], at // (sizes[0] * sizes[1])

        clusters = tuple(g // c for g, c in zip(self.grid, self.cluster, strict=True))
        group = math.prod(self.cluster)
        if group > 1:  # blocks of a cluster are numbered together so that they are interpreted together
            rank = block % group
            inside = split(rank, self.cluster)
            around = split(block // group, clusters)  # type: ignore[arg-type]
            ctaid = tuple(a * c + i for a, c, i in zip(around, self.cluster, inside, strict=True))
        else:
            rank, inside = block * 0, split(block * 0, (1, 1, 1))
            around = ctaid = split(block, self.grid)
        for axis, letter in enumerate("xyz"):
            put(f"%tid.{letter}", split(lane, self.block)[axis])
            put(f"%ntid.{letter}", self.block[axis])
            put(f"%ctaid.{letter}", ctaid[axis])
            put(f"%nctaid.{letter}", self.grid[axis])
            put(f"%clusterid.{letter}", around[axis])
            put(f"%nclusterid.{letter}", clusters[axis])
            put(f"%cluster_ctaid.{letter}", inside[axis])
            put(f"%cluster_nctaid.{letter}", self.cluster[axis])
        put("%cluster_ctarank", rank)
        put("%cluster_nctarank", group)
        put("%laneid", lane % 32)
        found["%is_explicit_cluster"] = np.full((1, 1), group > 1)
        one = np.uint32(1)
        lane32 = (lane % 32).astype(np.uint32)
        found["%lanemask_eq"] = one << lane32
        found["%lanemask_lt"] = (one << lane32) - one
        found["%lanemask_le"] = ((one << lane32) - one) | (one << lane32)
        found["%lanemask_ge"] = ~((one << lane32) - one)
        found["%lanemask_gt"] = ~(((one << lane32) - one) | (one << lane32))
        put("%dynamic_smem_size", self.shared_bytes)
        return found

    # -- compiling

    def _block_local(self) -> set[str]:
        """Registers that are set, without a guard, before every use and used in one block alone: nothing of theirs is kept."""
        homes: dict[str, set[int]] = {}
        for op in self.flow.ops:
            for name in self.slice.uses[op.index]:
                homes.setdefault(name, set()).add(op.block)
        for name, makers in self.slice.defs.items():
            for op in makers:
                homes.setdefault(name, set()).add(op.block)
        local: set[str] = set()
        for name, makers in self.slice.defs.items():
            if len(homes[name]) != 1 or any(op.predicate for op in makers):
                continue
            if self.slice.shared and any(is_barrier(op) for op in self.flow.blocks[makers[0].block].ops):
                continue  # threads that wait there keep theirs while others run through the block
            earliest = min(op.index for op in makers)
            users = [op.index for op in self.flow.blocks[makers[0].block].ops if name in self.slice.uses[op.index]]
            if all(index > earliest for index in users):
                local.add(name)
        return local

    def _compile_block(self, index: int) -> list[tuple[Callable[[], None], Op]]:
        code: list[tuple[Callable[[], None], Op]] = []
        for op in self.flow.blocks[index].ops:
            steps: list[Callable[[], None]] = []
            try:
                for access in self.slice.accesses[op.index]:
                    if access.outside:
                        steps.append(self._record(op, access))
                if op.index in self.slice.needed:
                    steps.append(self._execute(op))
            except isa.WRITTEN_WRONG as error:
                if isinstance(error, PtxError):
                    raise
                raise isa.malformed(op.source, self.flow.where(op)) from None
            code.extend((step, op) for step in steps)
        return code

    def _guarded(self, op: Op, mask: Array) -> Array:
        if op.predicate is None:
            return mask
        guard = self.decided(self.fetch(op.predicate), mask, op, "its guard depends on data")
        return mask & (~guard if op.negated else guard)

    def _execute(self, op: Op) -> Callable[[], None]:
        if op.opcode in ("ld", "ldu"):
            inner = self._load(op)
        elif op.opcode != "tensormap" and any(a.writes for a in self.slice.accesses[op.index]):
            inner = self._store_op(op)
        elif op.opcode == "mov":
            inner = self._move(op)
        elif op.opcode == "cvta":
            inner = self._cvta(op)
        elif op.opcode == "isspacep":
            inner = self._isspacep(op)
        elif op.opcode in ("shfl", "vote", "elect", "activemask", "match", "redux"):
            inner = self._collective(op)
        elif op.opcode in ("and", "or", "xor", "not") and "pred" in op.modifiers:
            inner = self._predicate_logic(op)
        elif op.opcode in ("bar", "barrier") and "warp" in op.modifiers:
            return lambda: self.shared.together(self.mask) if self.shared is not None else None
        elif op.opcode in ("bra", "brx", "ret", "exit", "trap") or (
            op.opcode in ("bar", "barrier") and "red" not in op.modifiers
        ):
            return lambda: None
        elif op.opcode == "tensormap":
            inner = self._tensormap(op)
        else:
            inner = self._pure(op)
        if op.predicate is None:
            return inner
        names = op_defs(op, set())
        predicate, negated = op.predicate, op.negated

        def guarded() -> None:
            guard = self.fetch(predicate)
            mask, full = self.mask, self.full
            if not isinstance(guard, np.ndarray):
                bad: Array = np.ones((1, 1), bool) if isinstance(guard, Poison) else guard.bad
                if (mask & bad).any():
                    self._forget(op)
                    for name in names:
                        self.store(name, UNKNOWN)
                    return
                assert isinstance(guard, Partial)
                guard = guard.array
            inside = mask & (~guard if negated else guard)
            if not inside.any():
                return
            try:
                if not inside.all():
                    self.full = False
                    before = {name: self.regs.get(name, UNKNOWN) for name in names}
                    self.mask = inside
                    inner()
                    outside_ = mask & ~inside
                    if outside_.any():
                        for name in names:
                            self.regs[name] = blend(outside_, before[name], self.regs.get(name, UNKNOWN))
                else:
                    inner()
            finally:
                self.mask, self.full = mask, full

        return guarded

    def _forget(self, op: Op) -> None:
        """A write that may or may not happen: what it could touch is unknown from here on."""
        if op.opcode == "tensormap":
            self.maps.clear()
            self.built.clear()
        if self.shared is not None and any(a.writes and a.space in ("shared", "generic") for a in self.slice.accesses[op.index]):
            self.shared.forget(lambda why: self.refuse(op, why))
        for access in self.slice.accesses[op.index]:
            if access.writes and access.space in ("local", "generic") and self.local is not None:
                self.local.forget(self.mask)
            if access.writes and access.space in ("param", "generic"):
                self.memory = dict.fromkeys(self.memory, UNKNOWN)

    def _destinations(self, op: Op) -> list[tuple[str, str]]:
        first = op.operands[0]
        items: Sequence[Operand]
        if isinstance(first, Vector):
            items = first.items
        elif isinstance(first, Pair):
            items = (first.first, first.second)
        else:
            items = (first,)
        return [(i.text, self.flow.types.get(i.text, "b64")) if isinstance(i, Name) else ("_", "b64") for i in items]

    def _pure(self, op: Op) -> Callable[[], None]:
        meaning = semantics.compute(op)
        targets = self._destinations(op) if op.operands and isa.written_names(op.instruction) else []
        names = [n for n, _ in targets if n != "_"]
        if meaning is None or len(op.operands) - 1 > len(meaning.sources) or any(TYPE_BYTES.get(k, 0) > 8 for _, k in targets):

            def unknown() -> None:
                for name in names:
                    self.store(name, UNKNOWN)
                if "cc" in op.modifiers:
                    self.store("%cc", UNKNOWN)

            return unknown
        sources = [self.operand(o, k) for o, k in zip(op.operands[1:], meaning.sources, strict=False)]
        if len(meaning.sources) > len(sources):  # the carry
            sources.append(self.operand(Name("%cc"), "pred"))
        if "cc" in op.modifiers:
            targets = [*targets[:1], ("%cc", "pred")]
        function = meaning.function
        simple = len(targets) == 1

        def step() -> None:
            bad: Array | None = None
            arrays = []
            for source in sources:
                value = source()
                if isinstance(value, np.ndarray):
                    arrays.append(value)
                elif isinstance(value, Partial):
                    arrays.append(value.array)
                    bad = value.bad if bad is None else bad | value.bad
                else:
                    for name, _ in targets:
                        if name != "_":
                            self.store(name, UNKNOWN)
                    return
            results = function(*arrays)
            if results[0].dtype.kind == "f" and op.opcode not in ("selp", "slct"):
                nan = np.isnan(results[0])  # the ISA leaves open which
                if nan.any():
                    bad = nan if bad is None else bad | nan
            if op.opcode in ("div", "rem") and arrays[1].dtype.kind != "f":
                zero = arrays[1] == 0
                if zero.any():
                    bad = zero if bad is None else bad | zero
            if simple and bad is None:
                self.store(targets[0][0], write_as(results[0], targets[0][1]))
                return
            for (name, kind), result in zip(targets, results, strict=False):
                if name != "_":
                    value_ = write_as(result, kind)
                    self.store(name, value_ if bad is None else Partial(value_, bad))

        return step

    def _predicate_logic(self, op: Op) -> Callable[[], None]:
        (name, _) = self._destinations(op)[0]
        sources = [self.operand(o, "pred") for o in op.operands[1:]]
        function: Any = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}[op.opcode]
        absorbing = {"and": False, "or": True}.get(op.opcode)

        def step() -> None:
            values = [s() for s in sources]
            if all(isinstance(v, np.ndarray) for v in values):
                self.store(name, function(*values))
                return
            # A known False makes a conjunction known, a known True a disjunction.
            arrays, bads, settled = [], np.zeros((1, 1), bool), np.zeros((1, 1), bool)
            for value in values:
                bad = np.ones((1, 1), bool) if isinstance(value, Poison) else np.zeros((1, 1), bool)
                array = np.zeros((1, 1), bool)
                if isinstance(value, Partial):
                    bad, array = value.bad, value.array
                elif isinstance(value, np.ndarray):
                    array = value
                bads = bads | bad
                if absorbing is not None:
                    settled = settled | (~bad & (array == absorbing))
                arrays.append(array)
            result = np.where(settled, bool(absorbing), function(*arrays)) if absorbing is not None else function(*arrays)
            bads = bads & ~settled
            self.store(name, Partial(result, bads) if bads.any() else result)

        return step

    def _move(self, op: Op) -> Callable[[], None]:
        kind = isa.data_type(op.instruction)
        target, source = op.operands[0], op.operands[1]
        if isinstance(source, Vector) or isinstance(target, Vector):
            return self._pack(op, kind, target, source)
        if isinstance(source, Name) and source.text.startswith(UNKNOWN_SPECIALS) and source.text not in self.flow.types:
            source = Name("%unknown")
        (name, register) = self._destinations(op)[0]
        if TYPE_BYTES.get(kind, 0) > 8 or semantics.numpy_type(kind) is None:
            return lambda: self.store(name, UNKNOWN)
        get = self.operand(source, kind)

        def step() -> None:
            value = get()
            if isinstance(value, np.ndarray):
                self.store(name, write_as(value, register))
            elif isinstance(value, Partial):
                self.store(name, Partial(write_as(value.array, register), value.bad))
            else:
                self.store(name, value)

        return step

    def _pack(self, op: Op, kind: str, target: Operand, source: Operand) -> Callable[[], None]:
        total = TYPE_BYTES[kind]
        if (isinstance(target, Vector) and isinstance(source, Vector)) or total > 8:
            names = [n for n, _ in self._destinations(op) if n != "_"]

            def unknown() -> None:
                for name in names:
                    self.store(name, UNKNOWN)

            return unknown
        if isinstance(source, Vector):
            size = total // len(source.items)
            parts = [self.operand(item, f"u{8 * size}") for item in source.items]
            (name, register) = self._destinations(op)[0]

            def pack() -> None:
                whole: Array = np.zeros((1, 1), UNSIGNED[total])
                bad: Array | None = None
                for position, part in enumerate(parts):
                    value = part()
                    if isinstance(value, Poison):
                        self.store(name, UNKNOWN)
                        return
                    if isinstance(value, Partial):
                        bad = value.bad if bad is None else bad | value.bad
                        value = value.array
                    whole = whole | (value.astype(UNSIGNED[total]) << UNSIGNED[total](8 * size * position))
                result = write_as(whole, register)
                self.store(name, result if bad is None else Partial(result, bad))

            return pack
        assert isinstance(target, Vector)
        size = total // len(target.items)
        get = self.operand(source, f"u{8 * total}")
        outs = self._destinations(op)

        def unpack() -> None:
            value = get()
            for position, (name, register) in enumerate(outs):
                if name == "_":
                    continue
                if isinstance(value, Poison):
                    self.store(name, UNKNOWN)
                    continue
                array = value.array if isinstance(value, Partial) else value
                piece = (array >> UNSIGNED[total](8 * size * position)).astype(UNSIGNED[size])
                result = write_as(piece, register)
                self.store(name, Partial(result, value.bad) if isinstance(value, Partial) else result)

        return unpack

    # -- address spaces

    def _cvta(self, op: Op) -> Callable[[], None]:
        kind = isa.data_type(op.instruction)
        heads = {m.split("::")[0] for m in op.modifiers}
        window = (
            SHARED_WINDOW if "shared" in heads else LOCAL_WINDOW if "local" in heads else PARAM_WINDOW if "param" in heads else 0
        )
        if "const" in heads:
            window = CONST_WINDOW
        if "to" in op.modifiers:
            window = -window
        get = self.operand(op.operands[1], "u64" if kind.endswith("64") else "u32")
        (name, register) = self._destinations(op)[0]
        shift = np.uint64(window & (2**64 - 1))

        def step() -> None:
            value = get()
            if isinstance(value, Poison):
                self.store(name, UNKNOWN)
                return
            array = value.array if isinstance(value, Partial) else value
            result = write_as(array.astype(np.uint64) + shift, register)
            self.store(name, Partial(result, value.bad) if isinstance(value, Partial) else result)

        return step

    def _isspacep(self, op: Op) -> Callable[[], None]:
        space = next(
            m.split("::")[0] for m in op.modifiers if m.split("::")[0] in ("global", "shared", "local", "param", "const")
        )
        (name, _) = self._destinations(op)[0]
        get = self.operand(op.operands[1], "u64")
        window = {"shared": 1, "local": 2, "param": 3, "const": 4, "global": 0}[space]

        def step() -> None:
            value = get()
            if isinstance(value, Poison):
                self.store(name, UNKNOWN)
                return
            array = value.array if isinstance(value, Partial) else value
            result = (array >> np.uint64(60)) == window
            self.store(name, Partial(result, value.bad) if isinstance(value, Partial) else result)

        return step

    def _address(self, address: Address, space: str) -> Callable[[], Value]:
        """The full address of an operand in the window of its space, as uint64."""
        window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW, "const": CONST_WINDOW}.get(space, 0)
        offset = np.uint64((address.offset + window) & (2**64 - 1))
        if address.base is None:
            constant = np.full((1, 1), offset, np.uint64)
            return lambda: constant
        get = self.operand(address.base, "u64")

        def step() -> Value:
            value = get()
            if isinstance(value, np.ndarray):
                return value + offset if offset else value
            if isinstance(value, Partial):
                return Partial(value.array + offset, value.bad)
            return value

        return step

    # -- loads and stores that the slice needs

    def _load(self, op: Op) -> Callable[[], None]:
        access = self.slice.accesses[op.index][0]
        assert access.address is not None
        kind = isa.data_type(op.instruction)
        targets = self._destinations(op)
        size = TYPE_BYTES[kind]
        base = access.address.base
        if access.space == "param" and base is not None and base.text in self.slots:
            return self._load_slots(op, f"param {base.text}", access.address.offset, targets, kind, size)
        get = self._address(access.address, access.space)

        def step() -> None:
            address = get()
            for position, (name, register) in enumerate(targets):
                if name == "_":
                    continue
                value: Value = UNKNOWN
                if not isinstance(address, Poison) and size <= 8 and semantics.numpy_type(kind) is not None:
                    array = address.array if isinstance(address, Partial) else address
                    value = self._read(array + np.uint64(position * size), size, op)
                    if isinstance(address, Partial):
                        value = and_bad(value, address.bad)
                if isinstance(value, Poison):
                    self.store(name, UNKNOWN)
                elif isinstance(value, Partial):
                    self.store(name, Partial(write_as(read_as(value.array, kind), register), value.bad))
                else:
                    self.store(name, write_as(read_as(value, kind), register))

        return step

    def _load_slots(
        self, op: Op, space: str, offset: int, targets: list[tuple[str, str]], kind: str, size: int
    ) -> Callable[[], None]:  # fmt: skip
        def step() -> None:
            for position, (name, register) in enumerate(targets):
                value = self._read_slot(space, offset + position * size, size)
                if isinstance(value, np.ndarray):
                    value = write_as(read_as(value, kind), register)
                elif isinstance(value, Partial):
                    value = Partial(write_as(read_as(value.array, kind), register), value.bad)
                if name != "_":
                    self.store(name, value)

        return step

    def _read_slot(self, space: str, offset: int, size: int) -> Value:
        """Parameters of calls are kept by exact offset and size; what was written in other pieces is unknown unless one piece
        contains it."""
        value = self.memory.get((space, offset, size))
        if value is not None:
            return value
        for (other, start, length), held in self.memory.items():
            if other == space and start <= offset and offset + size <= start + length and isinstance(held, np.ndarray):
                return np.asarray((held >> held.dtype.type(8 * (offset - start))).astype(UNSIGNED[size]))
        if size > 1:
            half = size // 2
            low, high = self._read_slot(space, offset, half), self._read_slot(space, offset + half, half)
            if isinstance(low, np.ndarray) and isinstance(high, np.ndarray):
                wide = UNSIGNED[size]
                return np.asarray(low.astype(wide) | (high.astype(wide) << wide(8 * half)))
        return UNKNOWN

    def _write_slot(self, space: str, offset: int, size: int, value: Value) -> None:
        key = (space, offset, size)
        old = UNKNOWN if self.full else self._read_slot(space, offset, size)
        for other in [k for k in self.memory if k[0] == space and k != key and k[1] < offset + size and offset < k[1] + k[2]]:
            _, start, length = other
            held = self.memory.pop(other)
            if isinstance(held, np.ndarray):  # keep the bytes that are not overwritten
                for byte in range(length):
                    if not offset <= start + byte < offset + size:
                        self.memory[(space, start + byte, 1)] = (held >> held.dtype.type(8 * byte)).astype(np.uint8)
        self.memory[key] = value if self.full else blend(self.mask, value, old)

    def _read(self, address: Array, size: int, op: Op) -> Value:
        """What lies at generic addresses, where that is known."""
        window = address >> np.uint64(60)
        low, high = int(window.min()), int(window.max())
        if low != high:  # idle threads may hold anything
            active = np.broadcast_to(window, np.broadcast_shapes(window.shape, self.mask.shape))[
                np.broadcast_to(self.mask, np.broadcast_shapes(window.shape, self.mask.shape))
            ]
            if not active.size or int(active.min()) != int(active.max()):
                return UNKNOWN
            low = int(active.min())
            address = np.where(window == low, address, np.uint64(low << 60))
        offset = (address & np.uint64(WINDOW - 1)).astype(np.int64)
        if low == 3:
            return self._read_params(offset, size)
        if low == 1:
            return self.shared.read(offset, size, self.mask, lambda why: self.refuse(op, why)) if self.shared else UNKNOWN
        if low == 2:
            return self.local.read(offset, size) if self.local else UNKNOWN
        return self._read_known(address.astype(np.int64), size)

    def _read_params(self, offset: Array, size: int) -> Value:
        block, known = self.launch.block, self.launch.known
        if offset.size == 1:
            at = int(offset[0, 0])
            if at < 0 or at + size > len(block) or not known[at : at + size].all():
                return UNKNOWN
            return np.asarray(block[at : at + size].copy().view(UNSIGNED[size]).reshape(1, 1))
        inside = (offset >= 0) & (offset + size <= len(block))
        if not inside.all():
            return UNKNOWN
        index = offset[..., None] + np.arange(size)
        if not known[index].all():
            return UNKNOWN
        return np.asarray(np.ascontiguousarray(block[index]).view(UNSIGNED[size])[..., 0])

    def _read_known(self, address: Array, size: int) -> Value:
        for start, data, name in self.known:
            inside = (address >= start) & (address + size <= start + len(data))
            if not (inside & self.mask).any():
                continue
            index = np.where(inside, address - start, 0)[..., None] + np.arange(size)
            if len(data) < size:
                continue
            array = np.ascontiguousarray(data[index]).view(UNSIGNED[size])[..., 0]
            self.guards.add(name)
            return array if inside.all() else Partial(array, ~inside)
        return UNKNOWN

    def _store_op(self, op: Op) -> Callable[[], None]:
        table = self.slice.accesses[op.index]
        if op.opcode == "st" and len(table) == 1 and table[0].record == "mark" and "async" not in op.modifiers:
            return self._store_mark(op, table[0])
        targets = [
            (a, self._address(a.address, a.space)) for a in table if a.writes and a.space in ("shared", "generic") and a.address
        ]
        names = op_defs(op, set())
        sizes = {id(a): self._filled_bytes(op, a) for a, _ in targets}
        asynchronous = op.opcode == "cp" or "async" in op.modifiers
        everywhere = "multicast::cluster" in op.modifiers
        matrices = {"x2": 2, "x4": 4}.get(next((m for m in op.modifiers if m in ("x1", "x2", "x4")), ""), 1)

        def refuse(why: str) -> NoReturn:
            self.refuse(op, why)

        def forget() -> None:
            for access, get in targets:
                if self.shared is None:
                    continue
                address, nbytes = self.settled(get()), sizes[id(access)]()
                mask = self.mask
                if op.opcode == "stmatrix":  # rows of 16 bytes, 8 a matrix, each at the address of one lane
                    if "m8n8" not in op.modifiers:
                        nbytes = UNKNOWN
                    mask = mask & (np.arange(self.threads)[None, :] % 32 < 8 * matrices)
                if isinstance(address, np.ndarray) and isinstance(nbytes, np.ndarray) and mask.any():
                    window = np.broadcast_to(address >> np.uint64(60), self.shape)[np.broadcast_to(mask, self.shape)]
                    if not (window == 1).any():
                        continue
                    offset = (address & np.uint64(WINDOW - 1)).astype(np.int64)
                    if not (window == 1).all() or (op.opcode in ("st", "red") and asynchronous):
                        self.shared.forget(refuse)
                    elif asynchronous:
                        self.shared.fill(offset, nbytes, mask, refuse, everywhere)
                    else:
                        if op.opcode == "mbarrier":  # all threads of a block at one barrier: one stands for them
                            whole, at = np.broadcast_to(mask, self.shape), np.broadcast_to(offset, self.shape)
                            first = np.argmax(whole, axis=1)[:, None]
                            if not (whole & (at != np.take_along_axis(at, first, axis=1))).any():
                                mask = whole & (np.arange(self.threads) == first)
                        self.shared.write(offset, int(nbytes.flat[0]), UNKNOWN, mask, refuse)
                elif mask.any():
                    self.shared.forget(refuse)
            for name in names:
                self.store(name, UNKNOWN)

        return forget

    def _filled_bytes(self, op: Op, access: isa.Access) -> Callable[[], Value]:
        """How many bytes a write to shared memory covers at most."""
        if access.nbytes is not None:
            constant = np.full((1, 1), access.nbytes, np.int64)
            return lambda: constant
        if access.size is not None:
            get = self.operand(access.size, "u32")

            def size() -> Value:
                value = self.settled(get())
                return value.astype(np.int64) if isinstance(value, np.ndarray) else UNKNOWN

            return size
        source = next((a for a in self.slice.accesses[op.index] if a.record == "tensor" and a.address is not None), None)
        if source is None or source.address is None:
            return lambda: UNKNOWN
        descriptor = self._address(source.address, "global")

        def box() -> Value:
            at = self.settled(descriptor())
            if not isinstance(at, np.ndarray):
                return UNKNOWN
            chosen = np.unique(np.broadcast_to(at, self.shape)[np.broadcast_to(self.mask, self.shape)])
            maps = [self.launch.maps.get(int(a) & (WINDOW - 1)) if int(a) >> 60 == 3 else None for a in chosen]
            nbytes = [m.element_bytes * math.prod(m.box) for m in maps if m is not None]
            return np.full((1, 1), max(nbytes), np.int64) if nbytes and len(nbytes) == len(maps) else UNKNOWN

        return box

    def _store_mark(self, op: Op, access: isa.Access) -> Callable[[], None]:
        assert access.address is not None
        kind = isa.data_type(op.instruction)
        size = TYPE_BYTES[kind]
        source = op.operands[1]
        items = source.items if isinstance(source, Vector) else (source,)
        exact = size <= 8 and semantics.numpy_type(kind) is not None
        values = [self.operand(item, f"u{8 * size}") if exact else (lambda: UNKNOWN) for item in items]
        base = access.address.base
        if access.space == "param" and base is not None and base.text in self.slots:
            space, offset = f"param {base.text}", access.address.offset

            def to_slots() -> None:
                for position, value in enumerate(values):
                    self._write_slot(space, offset + position * size, size, value())

            return to_slots
        get = self._address(access.address, access.space)

        def step() -> None:
            address = self.settled(get())
            if not isinstance(address, np.ndarray):
                self._forget(op)
                return
            window = np.broadcast_to(address >> np.uint64(60), self.shape)[np.broadcast_to(self.mask, self.shape)]
            for space in np.unique(window):
                if space == 0:
                    continue
                if len(np.unique(window)) > 1:
                    self._forget(op)
                    return
                offset = (address & np.uint64(WINDOW - 1)).astype(np.int64)
                if space == 2 and self.local is not None:
                    for position, value in enumerate(values):
                        self.local.write(offset + position * size, size, value(), self.mask)
                elif space == 1 and self.shared is not None:
                    for position, value in enumerate(values):
                        self.shared.write(offset + position * size, size, value(), self.mask, lambda why: self.refuse(op, why))

        return step

    # -- collectives of a warp

    def _collective(self, op: Op) -> Callable[[], None]:
        targets = self._destinations(op)
        names = [n for n, _ in targets if n != "_"]

        def unknown() -> None:
            for name in names:
                self.store(name, UNKNOWN)

        mode = next((m for m in op.modifiers if m in ("up", "down", "bfly", "idx", "any", "all", "uni", "ballot")), "")
        if op.opcode == "shfl" and mode:
            return self._shuffle(op, mode, targets, unknown)
        if op.opcode == "elect":
            return self._elect(op, targets)
        if op.opcode == "vote" and mode:
            return self._vote(op, mode, targets, unknown)
        return unknown

    def _warps(self, array: Array) -> Array:
        """(B, T) → (B, warps, 32), the last warp padded with zeros."""
        whole = np.broadcast_to(array, self.shape)
        pad = -self.threads % 32
        if pad:
            whole = np.concatenate((whole, np.zeros((self.count, pad), whole.dtype)), axis=1)
        return whole.reshape(self.count, -1, 32)

    def _threads(self, warps: Array) -> Array:
        return warps.reshape(self.count, -1)[:, : self.threads]

    def _shuffle(self, op: Op, mode: str, targets: list[tuple[str, str]], unknown: Callable[[], None]) -> Callable[[], None]:
        source, offset, clamp = (self.operand(o, "u32") for o in op.operands[1:4])
        name, kind = targets[0]

        def step() -> None:
            if self.shared is not None and "sync" in op.modifiers:
                self.shared.together(self.mask)
            value, b, c = source(), offset(), clamp()
            if isinstance(value, Partial) and not (value.bad & self.mask).any():
                value = value.array
            if not isinstance(value, np.ndarray) or not isinstance(b, np.ndarray) or not isinstance(c, np.ndarray):
                unknown()
                return
            active = self._warps(self.mask)
            lane = np.arange(32)[None, None, :]
            step_, limit = self._warps(b).astype(np.int64) & 31, self._warps(c).astype(np.int64)
            segment, maximum = (limit >> 8) & 31, limit & 31
            low = lane & segment
            high = low | (maximum & ~segment)
            if mode == "up":
                from_ = lane - step_
                ok = from_ >= high
            elif mode == "down":
                from_ = lane + step_
                ok = from_ <= high
            elif mode == "bfly":
                from_ = lane ^ step_
                ok = from_ <= high
            else:
                from_ = low | (step_ & ~segment)
                ok = from_ <= high
            from_ = np.where(ok, from_, lane)
            bad = ~np.take_along_axis(active, from_, axis=2)
            result = np.take_along_axis(self._warps(value), from_, axis=2)
            bad_threads = self._threads(bad) & self.mask
            found = self._threads(result)
            if value.shape == (1, 1) or (value.shape[1] == 1):
                found = value
            self.store(name, Partial(write_as(found, kind), bad_threads) if bad_threads.any() else write_as(found, kind))
            if len(targets) > 1 and targets[1][0] != "_":
                self.store(targets[1][0], self._threads(ok))

        return step

    def _elect(self, op: Op, targets: list[tuple[str, str]]) -> Callable[[], None]:
        members = self.operand(op.operands[-1], "u32")

        def step() -> None:
            found = self._members(members())
            if found is None:
                for name, _ in targets:
                    if name != "_":
                        self.store(name, UNKNOWN)
                return
            member, bad = found
            lane = np.arange(32, dtype=np.uint32)[None, None, :]
            chosen = ((member >> lane) & np.uint32(1)).astype(bool)
            low = member & (~member + np.uint32(1))
            first = np.bitwise_count(low - np.uint32(1)).astype(np.uint32)
            if self.elect_last:
                first = (np.frexp(member.astype(np.float64))[1] - 1).clip(0).astype(np.uint32)
            if self.shared is not None:
                self.shared.together(self.mask)
            for (name, kind), result in zip(targets, (first, (lane == first) & chosen), strict=False):
                if name == "_":
                    continue
                value = self._threads(result)
                row = value[:1]
                value = write_as(row if (value == row).all() else value, kind)
                self.store(name, Partial(value, self._threads(bad)) if bad.any() else value)

        return step

    def _members(self, mask: Value | None) -> tuple[Array, Array] | None:
        """For each lane, (B, warps, 32): the lanes that take part with it, as bits, and whether that is uncertain: others that it
        waits for stand elsewhere. None as `mask` is for instructions from before `.sync`: whoever is there."""
        weight = (np.uint32(1) << np.arange(32, dtype=np.uint32))[None, None, :]
        active = np.where(self._warps(self.mask), weight, np.uint32(0)).sum(axis=2, dtype=np.uint32)[..., None]
        live = np.where(self._warps(~self.exited), weight, np.uint32(0)).sum(axis=2, dtype=np.uint32)[..., None]
        if mask is None:
            members = np.broadcast_to(active, (*active.shape[:2], 32))
            return members, (members != live) & self._warps(self.mask)
        if isinstance(mask, Partial) and not (mask.bad & self.mask).any():
            mask = mask.array
        if not isinstance(mask, np.ndarray):
            return None
        wanted = self._warps(mask)
        bad = ((wanted & live & ~active) != 0) | ((wanted & weight) == 0)
        return wanted & active, bad & self._warps(self.mask)

    def _vote(self, op: Op, mode: str, targets: list[tuple[str, str]], unknown: Callable[[], None]) -> Callable[[], None]:
        source = self.operand(op.operands[1], "pred")
        members = self.operand(op.operands[2], "u32") if "sync" in op.modifiers else None
        name, kind = targets[0]

        def step() -> None:
            if self.shared is not None and "sync" in op.modifiers:
                self.shared.together(self.mask)
            value = source()
            if isinstance(value, Partial) and not (value.bad & self.mask).any():
                value = value.array
            found = self._members(members() if members else None)
            if not isinstance(value, np.ndarray) or found is None:
                unknown()
                return
            member, bad = found
            weight = (np.uint32(1) << np.arange(32, dtype=np.uint32))[None, None, :]
            ballot = np.where(self._warps(value), weight, np.uint32(0)).sum(axis=2, dtype=np.uint32)[..., None]
            votes = ballot & member
            result: Array
            if mode == "ballot":
                result = votes
            elif mode == "any":
                result = votes != 0
            elif mode == "all":
                result = votes == member
            else:
                result = (votes == member) | (votes == 0)
            array = write_as(self._threads(result), kind)
            self.store(name, Partial(array, self._threads(bad)) if bad.any() else array)

        return step

    # -- recording

    def _record(self, op: Op, access: isa.Access) -> Callable[[], None]:
        if access.record in ("resource", "replicas"):
            why = (
                "which part of a texture or surface it touches"
                if access.record == "resource"
                else "the replicas of a multicast address"
            )
            return lambda: self.refuse(op, f"{why} is not known")
        assert access.address is not None
        get = self._address(access.address, "global")
        reads, writes = access.reads, access.writes
        generic = access.space == "generic"

        def prepared() -> tuple[Array, Array] | None:
            mask = self._guarded(op, self.mask)
            if not mask.any():
                return None
            return self.decided(get(), mask, op, "its address depends on data"), mask

        def pick(array: Array, mask: Array) -> Array:
            """The values of the threads in the mask, fewer where they do not differ."""
            if mask.size == 1:
                return array.reshape(-1)
            if array.size == 1:
                return array.reshape(-1)
            if mask.shape == array.shape:
                return array[mask]
            if array.shape[0] == 1 and mask.shape[0] > 1:
                mask = np.asarray(mask.any(axis=0, keepdims=True))
            if array.shape[1] == 1 and mask.shape[1] > 1:
                mask = np.asarray(mask.any(axis=1, keepdims=True))
            shape = np.broadcast_shapes(array.shape, mask.shape)
            return np.asarray(np.broadcast_to(array, shape)[np.broadcast_to(mask, shape)])

        def outside(addresses: Array) -> Array:
            """Which of the addresses are global; a generic one may lie in another space, but none may lie nowhere."""
            window = addresses >> np.uint64(60)
            if addresses.size and int(window.max()) > (CONST_WINDOW >> 60 if generic else 0):
                self.refuse(op, "its address lies in no global memory")
            return np.asarray(window == 0)

        def mark(addresses: Array, width: int) -> None:
            addresses = addresses[outside(addresses)]
            at = addresses.astype(np.int64)
            if reads:
                self.recorder.mark(False, at, width)
            if writes:
                self.recorder.mark(True, at, width)

        def spans(starts: Array, lengths: Array) -> None:
            keep = outside(starts.astype(np.uint64))
            starts, lengths = starts[keep].astype(np.int64), lengths[keep]
            for write in (False, True):
                if (writes if write else reads) and len(starts):
                    self.recorder.spans(write, starts, starts + lengths.astype(np.int64))

        if access.record == "mark":
            width = access.nbytes
            assert width is not None
            limit = access.limit
            if limit is None:

                def plain() -> None:
                    found = prepared()
                    if found is not None:
                        mark(pick(*found), width)

                return plain
            return self._limited(op, limit, width, prepared, pick, mark, spans)
        if access.record == "bulk":
            assert access.size is not None
            size = self.operand(access.size, "u32")
            chunks = None if access.byte_mask is None else self.operand(access.byte_mask, "u16")

            def bulk() -> None:
                found = prepared()
                if found is None:
                    return
                address, mask = found
                nbytes = self.decided(size(), mask, op, "its size depends on data")
                both = np.broadcast_shapes(address.shape, nbytes.shape)
                lengths = pick(np.broadcast_to(nbytes, both), mask)
                starts = pick(np.broadcast_to(address, both), mask)
                if chunks is None:
                    spans(starts, lengths)
                    return
                selected = self.decided(chunks(), mask, op, "its byte mask depends on data")
                chosen = pick(np.broadcast_to(selected, np.broadcast_shapes(both, selected.shape)), mask)
                chosen = np.broadcast_to(chosen, starts.shape)
                for byte in range(16):
                    on = ((chosen >> np.uint16(byte)) & np.uint16(1)).astype(bool)
                    for start, length in zip(starts[on].tolist(), lengths[on].tolist(), strict=True):
                        each = np.arange(start + byte, start + length, 16, dtype=np.int64)
                        spans(each, np.ones(len(each), np.int64))

            return bulk
        if access.record == "fragment":
            lines, line, bits = isa.fragment_rows(op.instruction)
            stride_ = None if access.size is None else self.operand(access.size, "u32")

            def fragment() -> None:
                found = prepared()
                if found is None:
                    return
                address, mask = found
                stride = (
                    np.full((1, 1), line) if stride_ is None else self.decided(stride_(), mask, op, "its stride depends on data")
                )
                both = np.broadcast_shapes(address.shape, stride.shape)
                at = pick(np.broadcast_to(address, both), mask).astype(np.int64)
                pitch = pick(np.broadcast_to(stride, both), mask).astype(np.int64)
                if generic and (at >= WINDOW).any():
                    if (at >= WINDOW).all():
                        return
                    self.refuse(op, "a matrix lies in shared memory for some threads only")
                starts = at[:, None] + pitch[:, None] * np.arange(lines) * bits // 8
                spans(starts.reshape(-1), np.full(starts.size, line * bits // 8, np.int64))

            return fragment
        return self._record_tensor(op, access, prepared, spans)

    def _limited(
        self, op: Op, limit: Operand, width: int, prepared: Any, pick: Any, mark: Callable[[Array, int], None], spans: Any
    ) -> Callable[[], None]:  # fmt: skip
        """cp.async with a source size, or with a predicate that turns the source off."""
        predicate = isinstance(limit, Not) or (isinstance(limit, Name) and self.flow.types.get(limit.text) == "pred")
        get_limit = self.operand(limit, "pred" if predicate else "u32")

        def step() -> None:
            mask = self._guarded(op, self.mask)
            if not mask.any():
                return
            value = self.decided(get_limit(), mask, op, "how much it reads depends on data")
            if predicate:
                nbytes = np.where(value, 0, width)
            else:
                nbytes = np.minimum(value.astype(np.int64), width)
            reading = mask & (nbytes > 0)
            if not reading.any():
                return
            before = self.mask
            self.mask = reading
            try:
                found = prepared()
            finally:
                self.mask = before
            if found is None:
                return
            address, inside = found
            if (np.broadcast_to(nbytes, np.broadcast_shapes(nbytes.shape, inside.shape))[
                np.broadcast_to(inside, np.broadcast_shapes(nbytes.shape, inside.shape))
            ] == width).all():  # fmt: skip
                mark(pick(address, inside), width)
                return
            shape = np.broadcast_shapes(address.shape, nbytes.shape, inside.shape)
            chosen = np.broadcast_to(inside, shape)
            spans(np.broadcast_to(address, shape)[chosen], np.broadcast_to(nbytes, shape)[chosen])

        return step

    def _record_tensor(self, op: Op, access: isa.Access, prepared: Any, spans: Any) -> Callable[[], None]:
        assert access.address is not None
        coordinates = [self.operand(c, "s32") for c in access.address.coordinates]
        rows = any(m.endswith(("gather4", "scatter4")) for m in op.modifiers)
        if any(m.startswith("im2col") for m in op.modifiers):
            return lambda: self.refuse(op, "im2col copies are not modelled")
        rank = next(int(m[0]) for m in op.modifiers if m in ("1d", "2d", "3d", "4d", "5d"))

        def step() -> None:
            found = prepared()
            if found is None:
                return
            address, mask = found
            values = [self.decided(get(), mask, op, "its coordinates depend on data") for get in coordinates]
            shape = np.broadcast_shapes(address.shape, mask.shape, *(v.shape for v in values))
            chosen = np.broadcast_to(mask, shape)
            table = np.stack([np.broadcast_to(v, shape)[chosen].astype(np.int64) for v in values], axis=1)
            where = np.broadcast_to(address, shape)[chosen]
            descriptors, which = np.unique(where, return_inverse=True)
            inside = descriptors[descriptors < np.uint64(WINDOW)]
            self.recorder.mark(False, inside, 128)  # a map in global memory is read itself
            maps: dict[TensorMap, list[int]] = {}  # often one map at many addresses
            for position, descriptor in enumerate(descriptors.tolist()):
                maps.setdefault(self._map_at(descriptor, op), []).append(position)
            for map_, positions in maps.items():
                mine = np.unique(table if len(maps) == 1 else table[np.isin(which, positions)], axis=0)
                if len(map_.shape) != rank:
                    self.refuse(op, f"the tensor map has {len(map_.shape)} dimensions, not {rank}")
                if rows:  # four rows of a matrix: one column, four row numbers
                    for row in range(1, 5):
                        starts, ends = _row_map(map_).rows(mine[:, [0, row]])
                        spans(starts, ends - starts)
                    continue
                starts, ends = map_.rows(mine)
                spans(starts, ends - starts)

        return step

    def _map_at(self, address: int, op: Op) -> TensorMap:
        if address >> 60 == 3:
            offset = address & (WINDOW - 1)
            found = self.launch.maps.get(offset)
            if found is None:
                name = next((n for n, at in self.launch.offsets.items() if at == offset), "?")
                self.refuse(op, f"parameter {name} is used as a tensor map; pass a TensorMap for it")
            return found
        known = self.built.get(address)
        if known is not None:
            return known
        found = None
        for where, fields in self.maps:
            hits = np.flatnonzero(where.reshape(-1) == address)
            if len(hits) > 1 and all(not isinstance(v, np.ndarray) or v.shape[0] == 1 for v in fields.values()):
                hits = hits[:1]  # the same for all blocks
            for hit in hits:
                other = self._built_map(fields, int(hit), where.shape, op)
                if found is not None and other != found:
                    self.refuse(op, "blocks disagree about its tensor map")
                found = other
        if found is None:
            self.refuse(op, "its tensor map lies in memory whose contents are not known")
        self.built[address] = found
        return found

    # -- tensor maps that a kernel builds itself

    def _tensormap(self, op: Op) -> Callable[[], None]:
        """tensormap.replace fills fields of a map in shared memory, cp_fenceproxy publishes it at a global address."""
        modifiers = op.modifiers
        if "replace" in modifiers:
            field_ = next((m for m in modifiers if m in _MAP_FIELDS), None)
            address = op.operands[0]
            assert isinstance(address, Address)
            space = "shared" if any(m.startswith("shared") for m in modifiers) else "global"
            where = self._address(address, space)
            ordinal = op.operands[1] if len(op.operands) == 3 else None
            number = ordinal.value if isinstance(ordinal, Literal) else 0
            value = self.operand(op.operands[-1], "u64" if "b64" in modifiers else "u32")
            key = f"{field_}.{number}"

            def replace_field() -> None:
                self.built.clear()
                at = self.settled(where())
                if not isinstance(at, np.ndarray) or field_ is None:
                    self.maps.clear()
                    return
                mask = self._guarded(op, self.mask)
                fields = self._map_fields(op, at, mask)
                rows = np.asarray(mask.any(axis=1, keepdims=True))
                fields[key] = blend(rows, self._one_of(value(), mask), fields.get(key, UNKNOWN))

            return replace_field
        target, source = op.operands[0], op.operands[1]
        assert isinstance(target, Address)
        assert isinstance(source, Address)
        to, from_ = self._address(target, "global"), self._address(source, "shared")

        def publish() -> None:
            self.built.clear()
            at, origin = self.settled(to()), self.settled(from_())
            if not isinstance(at, np.ndarray) or not isinstance(origin, np.ndarray):
                self.maps.clear()
                return
            mask = self._guarded(op, self.mask)
            fields = dict(self._map_fields(op, origin, mask))
            one = self._one_of(at, mask)
            if not isinstance(one, np.ndarray):
                self.refuse(op, "threads publish several tensor maps at once")
            rows = np.broadcast_to(mask, self.shape).any(axis=1, keepdims=True)
            key = np.where(rows, one, NO_MAP)
            self.maps = [(np.where(rows & (np.broadcast_to(w, key.shape) == key), NO_MAP, w), f) for w, f in self.maps]
            self.maps.append((key, fields))

        return publish

    def _one_of(self, value: Value, mask: Array) -> Value:
        """What the threads of the mask agree on, (B, 1), for each block; unknown where they do not."""
        if isinstance(value, Partial) and not (value.bad & mask).any():
            value = value.array
        if not isinstance(value, np.ndarray) or value.shape[1] == 1:
            return value
        whole, rows = np.broadcast_to(value, self.shape), np.broadcast_to(mask, self.shape)
        one = np.take_along_axis(whole, np.argmax(rows, axis=1)[:, None], axis=1)
        bad = (rows & (whole != one)).any(axis=1, keepdims=True)
        return Partial(one, bad) if bad.any() else one

    def _map_fields(self, op: Op, at: Array, mask: Array) -> dict[str, Value]:
        """The fields of the map at one address a block, as the threads of the mask give it."""
        one = self._one_of(at, mask)
        if not isinstance(one, np.ndarray):
            self.refuse(op, "threads build several tensor maps at once")
        rows = np.broadcast_to(mask, self.shape).any(axis=1, keepdims=True)
        for where, fields in self.maps:
            if ((where == one) | ~rows).all():
                return fields
        fields = {}
        self.maps.append((np.where(rows, one, NO_MAP), fields))
        return fields

    def _built_map(self, fields: dict[str, Value], index: int, shape: tuple[int, ...], op: Op) -> TensorMap:
        def number(name: str) -> int:
            value = fields.get(name)
            if isinstance(value, Partial) and not value.bad[index if value.bad.shape[0] > 1 else 0].any():
                value = value.array
            if not isinstance(value, np.ndarray):
                self.refuse(op, f"{name.split('.')[0]} of its tensor map is not known")
            values = value[index] if value.shape[0] > 1 and shape[0] > 1 else value
            if not (values == values.flat[0]).all():
                self.refuse(op, "threads disagree about its tensor map")
            return int(values.flat[0])

        rank = number("rank.0") + 1
        kind = number("elemtype.0")
        if kind not in _MAP_ELEMENT_BYTES or ("interleave_layout.0" in fields and number("interleave_layout.0")):
            self.refuse(op, "its tensor map has a layout that is not modelled")
        return TensorMap(
            number("global_address.0"),
            _MAP_ELEMENT_BYTES[kind],
            tuple(number(f"global_dim.{d}") for d in range(rank)),
            tuple(number(f"global_stride.{d}") for d in range(rank - 1)),
            tuple(number(f"box_dim.{d}") for d in range(rank)),
            tuple(number(f"element_stride.{d}") for d in range(rank)),
        )


NO_MAP = np.uint64(2**64 - 1)
_MAP_FIELDS = frozenset(
    {"global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride", "elemtype", "interleave_layout",
     "swizzle_mode", "fill_mode", "swizzle_atomicity"}
)  # fmt: skip
# PTX ISA, tensormap.replace, values of .elemtype
_MAP_ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 4, 9: 8, 10: 2, 11: 4, 12: 4}


def _distinct(values: Array, mask: Array) -> list[int]:
    """The values that the threads of the mask have."""
    if values.size == 1:
        return [int(values[0, 0])]
    found: list[int] = np.unique(np.broadcast_to(values, mask.shape)[mask]).tolist()
    return found


def _row_map(map_: TensorMap) -> TensorMap:
    return TensorMap(map_.addr, map_.element_bytes, map_.shape, map_.strides, (map_.box[0], 1), map_.element_strides)


def _running_order(flow: Flow) -> dict[int, int]:
    """Rank of each block: a loop before what follows it, a branch before where its paths meet."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(flow.exit))
    graph.add_edges_from((b.index, s) for b in flow.blocks for s in b.successors if s < flow.exit)
    order: list[int] = []

    def visit(nodes: set[int], entry: int) -> None:
        inner = graph.subgraph(nodes)
        components = list(nx.strongly_connected_components(inner))
        of = {n: i for i, component in enumerate(components) for n in component}
        condensed = nx.DiGraph()
        condensed.add_nodes_from(range(len(components)))
        condensed.add_edges_from((of[a], of[b]) for a, b in inner.edges if of[a] != of[b])
        for at in nx.lexicographical_topological_sort(condensed, key=lambda i: min(components[i])):
            component = components[at]
            if len(component) == 1:
                order.extend(component)
                continue
            heads = [n for n in component if n == entry or any(p not in component for p in graph.predecessors(n))]
            head = min(heads) if heads else min(component)
            order.append(head)
            visit(component - {head}, -1)

    visit(set(range(flow.exit)), 0)
    return {block: rank for rank, block in enumerate(order)}
