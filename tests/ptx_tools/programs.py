"""Small random PTX programs, and a machine that runs them one thread at a time, one byte at a time.

The machine knows nothing of slices, arrays or taint: it executes everything, with real values in memory, and writes down which
bytes were touched. It does not read the PTX text either; program and text are made side by side.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tests.ptx_tools.scalar import WIDTHS, Undefined, evaluate, signed, unsigned

BUFFERS = {"a": 0x7F00_0000_0100, "b": 0x7F00_0001_0000, "g": 0x7F00_0002_0000}
"""Where they lie; a kernel parameter of that name points there. `g` is only ever read."""
SIZE = 4096
SLOT = 16
"""Bytes of shared memory for each thread."""

Operand = str | int


@dataclass
class Step:
    """One instruction: `text` without its guard, and what it does to a thread, or to its warp or block where that is named."""

    text: str
    run: Callable[[Thread], Any] | None = None
    guard: tuple[str, bool] | None = None
    target: str = ""
    kind: str = "plain"  # plain, label, bra, brx, exit, bar, shfl, vote
    data: Any = None


@dataclass
class Program:
    steps: list[Step]
    text: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    numbers: tuple[int, int]
    clean: bool
    """Nothing that was loaded decides an access, but what came from `g`."""
    guarded: bool

    def __str__(self) -> str:
        return f"grid {self.grid}, block {self.block}, n = {self.numbers[0]}, m = {self.numbers[1]}\n{self.text}"


class Thread:
    def __init__(
        self, machine: Machine, tid: tuple[int, int, int], ctaid: tuple[int, int, int], lane: int, shared: bytearray
    ) -> None:
        self.machine, self.lane, self.shared = machine, lane, shared
        self.regs: dict[str, int] = {}
        self.local = bytearray(96)
        self.at, self.done = 0, False
        program = machine.program
        for axis, letter in enumerate("xyz"):
            self.regs[f"%tid.{letter}"], self.regs[f"%ntid.{letter}"] = tid[axis], program.block[axis]
            self.regs[f"%ctaid.{letter}"], self.regs[f"%nctaid.{letter}"] = ctaid[axis], program.grid[axis]
        self.regs["%laneid"] = lane % 32

    def value(self, operand: Operand) -> int:
        return self.regs[operand] if isinstance(operand, str) else operand

    def allows(self, guard: tuple[str, bool] | None) -> bool:
        return guard is None or bool(self.regs[guard[0]]) != guard[1]


class Machine:
    """Runs a program on the given contents of the buffers."""

    def __init__(self, program: Program, contents: dict[str, bytes]) -> None:
        self.program = program
        self.memory = {name: bytearray(data) for name, data in contents.items()}
        self.reads: set[int] = set()
        self.writes: set[int] = set()
        self.labels = {s.target: i for i, s in enumerate(program.steps) if s.kind == "label"}

    def run(self) -> Machine:
        grid, block = self.program.grid, self.program.block
        for ctaid in itertools.product(*(range(n) for n in reversed(grid))):
            shared = bytearray(2 * SLOT * block[0] * block[1] * block[2] + 64)
            threads = [
                Thread(self, (x, y, z), (ctaid[2], ctaid[1], ctaid[0]), lane, shared)
                for lane, (z, y, x) in enumerate(itertools.product(*(range(n) for n in reversed(block))))
            ]
            self.block(threads)
        return self

    def block(self, threads: list[Thread]) -> None:
        steps = self.program.steps
        running = list(threads)
        while running:
            for thread in running:
                self.go(thread)
            running = []
            for first in range(0, len(threads), 32):
                warp = [t for t in threads[first : first + 32] if not t.done]
                if warp and steps[warp[0].at].kind in ("shfl", "vote"):
                    step = steps[warp[0].at]
                    assert all(t.at == warp[0].at for t in warp), "the generator lets a warp diverge before a collective"
                    step.run(warp)
                    running += warp
            if not running:
                running = [t for t in threads if not t.done]
                assert len({t.at for t in running}) <= 1, "the generator lets a block diverge before a barrier"
            for thread in running:
                thread.at += 1

    def go(self, thread: Thread) -> None:
        """To the next collective, or to the end."""
        steps = self.program.steps
        while True:
            step = steps[thread.at]
            if step.kind in ("shfl", "vote", "bar"):
                return
            if step.kind == "label" or not thread.allows(step.guard):
                thread.at += 1
            elif step.kind == "bra":
                thread.at = self.labels[step.target]
            elif step.kind == "brx":
                thread.at = self.labels[step.data[thread.value(step.target)]]
            elif step.kind == "exit":
                thread.done = True
                return
            else:
                step.run(thread)
                thread.at += 1

    # -- memory

    def load(self, thread: Thread, space: str, address: int, size: int) -> int:
        if space == "global":
            self.reads.update(range(address, address + size))
            return int.from_bytes(bytes(self.byte(a) for a in range(address, address + size)), "little")
        memory = thread.shared if space == "shared" else thread.local
        return int.from_bytes(memory[address : address + size], "little")

    def store(self, thread: Thread, space: str, address: int, size: int, value: int) -> None:
        raw = unsigned(value, 8 * size).to_bytes(size, "little")
        if space != "global":
            (thread.shared if space == "shared" else thread.local)[address : address + size] = raw
            return
        self.writes.update(range(address, address + size))
        for i, byte in enumerate(raw):
            for name, base in BUFFERS.items():
                if base <= address + i < base + SIZE:
                    self.memory[name][address + i - base] = byte

    def byte(self, address: int) -> int:
        for name, base in BUFFERS.items():
            if base <= address < base + SIZE:
                return self.memory[name][address - base]
        return address * 37 & 0xFF


HEADER = """.version 8.7
.target sm_90a
.address_size 64
.func (.param .b32 ret) mix(.param .b32 x, .param .b32 y)
{ .reg .b32 %r<8>; .reg .pred %p<2>; ld.param.b32 %r1, [x]; ld.param.b32 %r2, [y]; setp.lt.s32 %p1, %r1, %r2; @%p1 bra LESS;
  sub.s32 %r3, %r2, %r1; st.param.b32 [ret], %r3; ret;
LESS: mad.lo.u32 %r3, %r1, 3, %r2; st.param.b32 [ret], %r3; ret; }
.func touch(.param .b64 q, .param .b32 k)
{ .reg .b64 %rd<2>; .reg .b32 %r<4>; .reg .pred %p<2>; ld.param.b64 %rd1, [q]; ld.param.b32 %r1, [k]; and.b32 %r2, %r1, 1;
  setp.eq.u32 %p1, %r2, 0; @%p1 ret; st.u16 [%rd1+2], %r1; ret; }
.visible .entry k(.param .b64 k_a, .param .b64 k_b, .param .b64 k_g, .param .b32 k_n, .param .b32 k_m)
{ .reg .b32 %r<8>, %u<4>, %d<6>, %x<400>; .reg .b64 %rd<6>, %z<400>, %ba, %bb, %bg; .reg .b16 %h<4>;
  .reg .pred %p<5>, %q<400>, %dp;
  .shared .align 16 .b8 sm[{shared}]; .local .align 16 .b8 lo[96];
"""
TYPES = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
R = [f"%r{i}" for i in range(6)]
U = [f"%u{i}" for i in range(3)]
D = [f"%d{i}" for i in range(4)]
RD = [f"%rd{i}" for i in range(3)]
H = [f"%h{i}" for i in range(3)]
P = [f"%p{i}" for i in range(4)]
WORD_OPS = [
    "add.u32", "sub.s32", "mul.lo.u32", "mul.hi.s32", "mul.hi.u32", "min.u32", "max.s32", "min.s32", "and.b32", "or.b32",
    "xor.b32", "shl.b32",
    "shr.u32", "shr.s32", "mul24.lo.s32", "div.u32", "rem.s32", "rem.u32", "bmsk.clamp.b32", "szext.wrap.s32",
]  # fmt: skip
WORD_OPS3 = ["mad.lo.u32", "sad.s32", "bfe.s32", "bfe.u32", "shf.l.wrap.b32", "shf.r.clamp.b32", "prmt.b32", "mad24.lo.u32"]
WORD_OPS1 = ["neg.s32", "abs.s32", "not.b32", "cnot.b32", "popc.b32", "clz.b32", "brev.b32", "bfind.s32"]
LONG_OPS = ["add.u64", "sub.u64", "mul.lo.s64", "mul.hi.u64", "min.s64", "xor.b64", "and.b64", "or.b64"]
HALF_OPS = ["add.u16", "sub.s16", "mul.lo.s16", "mul.hi.u16", "min.s16", "max.u16", "xor.b16"]
COMPARES = ["eq", "ne", "lt", "le", "gt", "ge"]


@lru_cache(1 << 18)
def remembered(mnemonic: str, values: tuple[int, ...], carry: bool) -> list[int]:
    """Threads mostly compute alike, and each program runs twice."""
    try:
        return evaluate(mnemonic, list(values), carry)
    except Undefined:
        raise AssertionError(f"the generator divides by zero: {mnemonic}") from None


@dataclass
class Scope:
    """Where a statement is written: whether all threads of the block are here together, the loop around, the depth."""

    together: bool
    depth: int = 0
    loop: tuple[str, str, bool] | None = None  # labels of continue and break, and whether all its threads leave it at once


@dataclass
class Writer:
    """Writes one program. clean: no loaded value decides anything; guarded: what is loaded from `g` may."""

    rng: random.Random
    clean: bool
    guarded: bool
    exits: bool
    steps: list[Step] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    serial: Iterator[int] = field(default_factory=itertools.count)
    threads: int = 32

    # -- single instructions

    def put(self, text: str, run: Callable[[Thread], Any], guard: tuple[str, bool] | None = None) -> None:
        self.steps.append(Step(text, run, guard))

    def op(
        self, mnemonic: str, targets: Sequence[str], sources: Sequence[Operand], guard: tuple[str, bool] | None = None
    ) -> None:
        """A register instruction, as `scalar.evaluate` has it. Constants are given as bits."""
        masks = [(1 << WIDTHS[kind]) - 1 for kind in self.kinds(mnemonic, len(sources))]
        names = [*targets, "cc"] if ".cc" in mnemonic else list(targets)
        carries = mnemonic.startswith(("addc", "subc"))

        def run(thread: Thread) -> None:
            regs = thread.regs
            values = tuple((regs[s] if isinstance(s, str) else s) & mask for s, mask in zip(sources, masks, strict=True))
            found = remembered(mnemonic, values, carries and bool(regs["cc"]))
            for name, value in zip(names, found, strict=False):
                regs[name] = value

        self.put(f"{mnemonic} {'|'.join(targets)}, {', '.join(map(str, sources))};", run, guard)

    @staticmethod
    def kinds(mnemonic: str, count: int) -> list[str]:
        opcode, *modifiers = mnemonic.split(".")
        kind = [m for m in modifiers if m in WIDTHS][-1]
        if opcode in ("shl", "shr"):
            return [kind, "u32"]
        if opcode == "bfe":
            return [kind, "u32", "u32"]
        if opcode == "selp" or (opcode == "setp" and count == 3):
            return [kind, kind, "pred"]
        if opcode == "mad" and "wide" in modifiers:
            return [kind, kind, f"u{2 * WIDTHS[kind]}"]
        return [kind] * count

    def word(self, together: bool = False) -> Operand:
        """A 32-bit source; one that all threads of the block share where that is asked for."""
        if self.rng.random() < 0.3:
            return self.rng.choice([0, 1, 2, 3, 4, 5, 7, 8, 31, 33, 255, 0x7FFFFFFF, 0xFFFFFFFF, self.rng.getrandbits(32)])
        return self.rng.choice(U if together else R + U + R)

    def guard(self, chance: float = 0.3) -> tuple[str, bool] | None:
        if self.rng.random() >= chance:
            return None
        return self.rng.choice(P), self.rng.random() < 0.4

    def arithmetic(self, scope: Scope) -> None:
        rng = self.rng
        together = scope.together and rng.random() < 0.3
        target = rng.choice(U if together else R)
        guard = None if together else self.guard()
        match rng.randrange(9):
            case 0 | 1 | 2:
                mnemonic = rng.choice(WORD_OPS)
                second = self.word(together)
                if mnemonic[:3] in ("div", "rem"):
                    second = rng.choice([1, 2, 3, 7, 0xFFFFFFFF, 1000])
                self.op(mnemonic, [target], [self.word(together), second], guard)
            case 3:
                self.op(rng.choice(WORD_OPS3), [target], [self.word(together) for _ in range(3)], guard)
            case 4:
                self.op(rng.choice(WORD_OPS1), [target], [self.word(together)], guard)
            case 5:
                self.op(
                    rng.choice(LONG_OPS), [rng.choice(RD)], [rng.choice(RD), rng.choice([*RD, rng.getrandbits(40)])], self.guard()
                )
            case 6:
                self.op(
                    rng.choice(HALF_OPS), [rng.choice(H)], [rng.choice(H), rng.choice([*H, rng.getrandbits(16)])], self.guard()
                )
            case 7:
                which = rng.randrange(6)
                if which == 0:
                    self.op(rng.choice(["cvt.u64.u32", "cvt.s64.s32"]), [rng.choice(RD)], [rng.choice(R)], self.guard())
                elif which == 1:
                    self.op(rng.choice(["cvt.u32.u64", "cvt.sat.s32.s64"]), [rng.choice(R)], [rng.choice(RD)], self.guard())
                elif which == 2:
                    self.op(
                        rng.choice(["cvt.s32.s16", "cvt.u32.u16", "cvt.u32.u8"]), [rng.choice(R)], [rng.choice(H)], self.guard()
                    )
                elif which == 3:
                    self.op(rng.choice(["cvt.u16.u32", "cvt.sat.u16.s32"]), [rng.choice(H)], [rng.choice(R)], self.guard())
                elif which == 4:
                    self.op(
                        rng.choice(["mul.wide.s32", "mul.wide.u32"]), [rng.choice(RD)], [self.word(), self.word()], self.guard()
                    )
                else:
                    self.op("mad.wide.u32", [rng.choice(RD)], [self.word(), self.word(), rng.choice(RD)], self.guard())
            case 8:
                low, high = rng.choice(R), rng.choice(R)
                self.op("add.cc.u32", [low], [self.word(), self.word()])
                self.op(rng.choice(["addc.u32", "addc.cc.u32"]), [high], [self.word(), self.word()], self.guard(0.2))

    def predicate(self, scope: Scope, target: str | None = None) -> str:
        rng = self.rng
        target = target or rng.choice(P)
        guard = self.guard(0.2) if target in P else None
        which = rng.randrange(5)
        if which == 0 and target in P:
            self.op(f"{rng.choice(['and', 'or', 'xor'])}.pred", [target], [rng.choice(P), rng.choice(P)], guard)
        elif which == 1 and target in P:
            other = rng.choice([p for p in P if p != target])
            join = rng.choice(["and", "or", "xor"])
            self.op(
                f"setp.{rng.choice(COMPARES)}.{join}.s32", [target, other], [rng.choice(R), self.word(), rng.choice(P)], guard
            )
        elif which == 2:
            self.op(f"setp.{rng.choice(COMPARES)}.u64", [target], [rng.choice(RD), rng.choice([*RD, 1 << 20])], guard)
        else:
            self.op(f"setp.{rng.choice(COMPARES)}.{rng.choice('us')}32", [target], [rng.choice(R + U), self.word()], guard)
        return target

    def select(self, scope: Scope) -> None:
        self.op("selp.b32", [self.rng.choice(R)], [self.word(), self.word(), self.rng.choice(P)], self.guard(0.2))

    # -- memory

    def address(self, size: int, buffer: str = "", inside: bool = False, source: Operand | None = None) -> tuple[str, int]:
        """A fresh register that points into a buffer, or just over its ends, and an offset."""
        rng = self.rng
        buffer = buffer or rng.choice("ab")
        word, far = f"%x{next(self.serial)}", f"%z{next(self.serial)}"
        mask = rng.choice([0x3F, 0xFF, 0xFFF]) & -size
        source = source if source is not None else rng.choice(R + U)
        self.op("and.b32", [word], [source, mask])
        if rng.random() < 0.3 and not inside:
            scale = rng.choice([1, 2, 3])
            self.op("mad.wide.u32", [far], [word, scale, f"%b{buffer}"])
        else:
            long = f"%z{next(self.serial)}"
            self.op("cvt.u64.u32", [long], [word])
            self.op("add.u64", [far], [f"%b{buffer}", long])
        return far, 0 if inside or rng.random() < 0.6 else rng.choice([size, -size, 2 * size, 4096 - size, 16])

    def load(
        self, space: str, size: int, targets: list[str], base: str, offset: int, guard: tuple[str, bool] | None = None,
        generic: bool = False,
        kind: str = "",
    ) -> None:  # fmt: skip
        kind = kind or TYPES[size]
        origin = WINDOWS.get(space, 0) if generic else 0

        def run(thread: Thread) -> None:
            address = thread.value(base) + offset - origin
            for i, target in enumerate(targets):
                value = self.now(thread).load(thread, space, address + i * size, size)
                if kind[0] == "s":
                    value = unsigned(signed(value, 8 * size), 64)
                thread.regs[target] = unsigned(value, 64 if target in RD or target[:2] == "%z" else 16 if target in H else 32)

        vector = f".v{len(targets)}" if len(targets) > 1 else ""
        into = f"{{{', '.join(targets)}}}" if vector else targets[0]
        self.put(f"ld{'' if generic else '.' + space}{vector}.{kind} {into}, [{base}{offset:+d}];", run, guard)

    def store(
        self, space: str, size: int, sources: list[Operand], base: str, offset: int, guard: tuple[str, bool] | None = None,
        generic: bool = False
    ) -> None:  # fmt: skip
        origin = WINDOWS.get(space, 0) if generic else 0

        def run(thread: Thread) -> None:
            address = thread.value(base) + offset - origin
            for i, source in enumerate(sources):
                self.now(thread).store(thread, space, address + i * size, size, thread.value(source))

        vector = f".v{len(sources)}" if len(sources) > 1 else ""
        what = f"{{{', '.join(map(str, sources))}}}" if vector else sources[0]
        self.put(f"st{'' if generic else '.' + space}{vector}.{TYPES[size]} [{base}{offset:+d}], {what};", run, guard)

    @staticmethod
    def now(thread: Thread) -> Machine:
        return thread.machine

    def global_access(self, scope: Scope) -> None:
        rng = self.rng
        size, count = rng.choice([(1, 1), (2, 1), (4, 1), (4, 1), (4, 2), (4, 4), (8, 1)])
        base, offset = self.address(size * count)
        generic = rng.random() < 0.25
        if rng.random() < 0.5:
            targets = [f"%z{next(self.serial)}"] if size == 8 else rng.sample(D, count)
            self.load("global", size, targets, base, offset, self.guard(), generic)
        else:
            sources: list[Operand] = [rng.choice(RD)] if size == 8 else [rng.choice(R + D + U) for _ in range(count)]
            self.store("global", size, sources, base, offset, self.guard(), generic)

    def atomic(self, scope: Scope) -> None:
        rng = self.rng
        base, offset = self.address(4)
        target = rng.choice(D) if rng.random() < 0.6 else ""
        value = self.word()

        def run(thread: Thread) -> None:
            machine = self.now(thread)
            address = thread.value(base) + offset
            old = machine.load(thread, "global", address, 4)
            machine.store(thread, "global", address, 4, old + thread.value(value))
            if target:
                thread.regs[target] = old

        text = (
            f"atom.global.add.u32 {target}, [{base}{offset:+d}], {value};"
            if target
            else f"red.global.add.u32 [{base}{offset:+d}], {value};"
        )
        self.put(text, run, self.guard())

    def data(self, scope: Scope) -> None:
        self.op(
            self.rng.choice(["add.u32", "xor.b32", "mul.lo.u32"]),
            [self.rng.choice(D)],
            [self.rng.choice(D), self.word()],
            self.guard(),
        )

    def guarded_load(self, scope: Scope) -> None:
        """From `g`, whose contents are known."""
        size = self.rng.choice([1, 2, 4, 4])
        base, offset = self.address(size, "g", inside=True)
        kind = self.rng.choice("us") + str(8 * size)
        self.load("global", size, [self.rng.choice(R)], base, offset, self.guard(0.2), self.rng.random() < 0.2, kind)

    def private(self, scope: Scope) -> None:
        """Local memory: pieces of several sizes over each other."""
        rng = self.rng
        size = rng.choice([1, 2, 4, 8])
        offset = rng.randrange(0, 32, size)
        generic = rng.random() < 0.2
        base = "%z1" if generic else "%z0"
        if rng.random() < 0.5:
            source = rng.choice(RD) if size == 8 else rng.choice(H) if size == 2 else rng.choice(R)
            self.store("local", size, [source], base, offset, self.guard(), generic)
        elif size == 8:
            self.load("local", 8, [rng.choice(RD)], base, offset, self.guard(), generic)
        else:
            self.load("local", size, [rng.choice(R)], base, offset, self.guard(), generic, rng.choice("us") + str(8 * size))

    def exchange(self, scope: Scope) -> None:
        """Every thread writes a slot of its own, and after a barrier reads another's."""
        rng = self.rng
        mine = f"%x{next(self.serial)}"
        self.slot(mine, rng.random() < 0.3, rng.randrange(self.threads))
        for _ in range(rng.randint(1, 3)):
            size, count = rng.choice([(1, 1), (2, 1), (4, 1), (4, 2), (4, 4)])
            offset = rng.randrange(0, SLOT, size * count)
            sources: list[Operand] = [rng.choice(R + U) for _ in range(count)]
            self.store("shared", size, sources, mine, offset, self.guard())
        if rng.random() < 0.3:
            self.load("shared", 4, [rng.choice(R)], mine, rng.choice([0, 4, 8]), self.guard())
        self.bar()
        for _ in range(rng.randint(1, 2)):
            other = f"%x{next(self.serial)}"
            self.slot(other, rng.random() < 0.3, rng.randrange(self.threads))
            size, count = rng.choice([(1, 1), (2, 1), (4, 1), (4, 2)])
            offset = rng.randrange(0, SLOT, size * count)
            if rng.random() < 0.2:
                wide = f"%z{next(self.serial)}"
                self.op("cvt.u64.u32", [wide], [other])
                self.put(
                    f"cvta.shared.u64 {wide}, {wide};", lambda t, w=wide: t.regs.__setitem__(w, t.regs[w] + WINDOWS["shared"])
                )
                self.load("shared", size, rng.sample(R, count), wide, offset, self.guard(), generic=True)
            else:
                self.load("shared", size, rng.sample(R, count), other, offset, self.guard())
        self.bar()

    def slot(self, register: str, backwards: bool, turn: int) -> None:
        """`register`: address in shared memory of the slot of the thread `turn` further on, or counted from the end."""
        self.op("add.u32", [register], ["%r7", turn])
        self.op("rem.u32", [register], [register, self.threads])
        if backwards:
            self.op("sub.u32", [register], [self.threads - 1, register])
        self.op("mad.lo.u32", [register], [register, SLOT, "%r6"])

    def bar(self) -> None:
        self.steps.append(Step("bar.sync 0;", kind="bar"))

    def shuffle(self, scope: Scope) -> None:
        rng = self.rng
        mode = rng.choice(["up", "down", "bfly", "idx"])
        target, source, flag = rng.choice(R), rng.choice(R), rng.choice([*P, ""])
        step = rng.choice([*U, *range(32)]) if mode != "idx" else self.word()
        width = rng.choice([32, 32, 16, 8])
        clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
        keep = f"%q{next(self.serial)}"

        def run(warp: list[Thread]) -> None:
            old = {t.lane % 32: t.regs[source] for t in warp}
            for t in warp:
                lane, b = t.lane % 32, t.value(step) & 31
                first = lane & (32 - width)
                last = first | (clamp & 31 & ~(32 - width))
                j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": first | (b & ~(32 - width) & 31)}[mode]
                inside = j >= last if mode == "up" else j <= last
                t.regs[target] = old[j] if inside else old[lane]
                t.regs[flag or keep] = int(inside)

        text = f"shfl.sync.{mode}.b32 {target}|{flag or keep}, {source}, {step}, {clamp}, 0xffffffff;"
        self.steps.append(Step(text, run, kind="shfl"))

    def vote(self, scope: Scope) -> None:
        rng = self.rng
        mode = rng.choice(["any", "all", "uni", "ballot"])
        source, negated = rng.choice(P), rng.random() < 0.3
        target = rng.choice(R) if mode == "ballot" else rng.choice(P)

        def run(warp: list[Thread]) -> None:
            votes = {t.lane % 32: bool(t.regs[source]) != negated for t in warp}
            found = {
                "any": any(votes.values()), "all": all(votes.values()), "uni": len(set(votes.values())) == 1,
                "ballot": sum(vote << lane for lane, vote in votes.items()),
            }[mode]  # fmt: skip
            for t in warp:
                t.regs[target] = int(found)

        kind = "b32" if mode == "ballot" else "pred"
        text = f"vote.sync.{mode}.{kind} {target}, {'!' if negated else ''}{source}, 0xffffffff;"
        self.steps.append(Step(text, run, kind="vote"))

    def call(self, scope: Scope) -> None:
        rng = self.rng
        if rng.random() < 0.5:
            first, second, target = self.word(), self.word(), rng.choice(R)

            def mix(thread: Thread) -> None:
                x, y = thread.value(first), thread.value(second)
                thread.regs[target] = unsigned(3 * x + y if signed(x, 32) < signed(y, 32) else y - x, 32)

            self.put(
                f"{{ .param .b32 x; .param .b32 y; .param .b32 v; st.param.b32 [x], {first}; st.param.b32 [y], {second}; "
                f"call.uni (v), mix, (x, y); ld.param.b32 {target}, [v]; }}",
                mix,
            )
            return
        base, _ = self.address(4)
        value = rng.choice(R)

        def touch(thread: Thread) -> None:
            if thread.value(value) & 1:
                self.now(thread).store(thread, "global", thread.value(base) + 2, 2, thread.value(value))

        self.put(
            f"{{ .param .b64 q; .param .b32 y; st.param.b64 [q], {base}; st.param.b32 [y], {value}; call.uni touch, (q, y); }}",
            touch,
        )

    # -- control

    def label(self) -> str:
        return f"L{next(self.serial)}"

    def place(self, label: str) -> None:
        self.steps.append(Step(f"{label}:", kind="label", target=label))

    def jump(self, label: str, guard: tuple[str, bool] | None = None) -> None:
        self.steps.append(Step(f"bra{'' if guard else '.uni'} {label};", guard=guard, kind="bra", target=label))

    def condition(self, scope: Scope, together: bool) -> tuple[str, bool]:
        """A predicate of its own, so that nothing changes it later."""
        flag = f"%q{next(self.serial)}"
        if together:
            self.op(f"setp.{self.rng.choice(COMPARES)}.u32", [flag], [self.rng.choice(U), self.word(True)])
        elif not self.clean and self.rng.random() < 0.3:
            self.op(f"setp.{self.rng.choice(COMPARES)}.u32", [flag], [self.rng.choice(D), 0x80000000])
        elif self.rng.random() < 0.5:
            self.op(f"setp.{self.rng.choice(COMPARES)}.s32", [flag], [self.rng.choice(R), self.word()])
        else:
            return self.rng.choice(P), self.rng.random() < 0.5
        return flag, self.rng.random() < 0.3

    def branch(self, scope: Scope) -> None:
        together = scope.together and self.rng.random() < 0.4
        name, negated = self.condition(scope, together)
        otherwise, end = self.label(), self.label()
        inner = Scope(together, scope.depth + 1, scope.loop)
        self.jump(otherwise, (name, not negated))
        self.body(inner)
        if self.rng.random() < 0.6:
            self.jump(end)
            self.place(otherwise)
            self.body(inner)
            self.place(end)
        else:
            self.place(otherwise)

    def loop(self, scope: Scope) -> None:
        rng = self.rng
        together = scope.together and rng.random() < 0.5
        turn, most, flag = f"%x{next(self.serial)}", f"%x{next(self.serial)}", f"%q{next(self.serial)}"
        source: Operand = rng.choice(U) if together else rng.choice(R)
        if not together and not self.clean and rng.random() < 0.2:
            source = rng.choice(D)
        self.op("and.b32", [most], [source, 3])
        self.op("mov.u32", [turn], [0])
        head, again, end = self.label(), self.label(), self.label()
        first = rng.random() < 0.5
        self.place(head)
        if first:
            self.op("setp.ge.u32", [flag], [turn, most])
            self.jump(end, (flag, False))
        self.body(Scope(together, scope.depth + 1, (again, end, together)))
        if rng.random() < 0.5:
            self.op("add.u32", [rng.choice(R)], [rng.choice(R), turn])
        self.place(again)
        self.op("add.u32", [turn], [turn, 1])
        if first:
            self.jump(head)
        else:
            self.op("setp.lt.u32", [flag], [turn, most])
            self.jump(head, (flag, False))
        self.place(end)

    def leave(self, scope: Scope) -> None:
        """Out of the loop, or to its next turn."""
        if scope.loop is None:
            return
        again, end, together = scope.loop
        if together and not scope.together:
            return
        guard = self.condition(scope, together)
        self.jump(self.rng.choice([again, end]), guard)

    def switch(self, scope: Scope) -> None:
        rng = self.rng
        count = rng.randint(2, 4)
        together = scope.together and rng.random() < 0.3
        index, flag = f"%x{next(self.serial)}", f"%q{next(self.serial)}"
        source: Operand = rng.choice(U) if together else rng.choice(R)
        self.op("rem.u32", [index], [source, count + 1])
        labels, end = [self.label() for _ in range(count)], self.label()
        rest = self.label()
        guard = None
        if rng.random() < 0.5:
            self.op("setp.eq.u32", [flag], [index, count])
            self.jump(rest, (flag, False))
        else:
            self.op("setp.lt.u32", [flag], [index, count])
            guard = (flag, False)
        name = f"T{next(self.serial)}"
        table = [*labels, labels[0]]
        self.lists.append(f"{name}: .branchtargets {', '.join(table)};")
        self.steps.append(Step(f"brx.idx {index}, {name};", guard=guard, kind="brx", target=index, data=table))
        self.place(rest)
        inner = Scope(together, scope.depth + 1, scope.loop)
        self.short(inner)
        self.jump(end)
        for label in labels:
            self.place(label)
            self.short(inner)
            if rng.random() < 0.8:
                self.jump(end)
        self.place(end)

    def quit(self, scope: Scope) -> None:
        if self.exits:
            self.steps.append(Step(self.rng.choice(["exit;", "ret;"]), guard=self.condition(scope, False), kind="exit"))

    def spin(self, scope: Scope) -> None:
        """A loop that memory ends, with an access that is the same each time, or not."""
        rng = self.rng
        turn, flag, head = f"%x{next(self.serial)}", f"%q{next(self.serial)}", self.label()
        base, offset = self.address(4)
        moving = not self.clean and rng.random() < 0.4
        self.op("mov.u32", [turn], [0])
        self.place(head)
        self.load("global", 4, [rng.choice(D)], base, offset)
        if moving:
            self.op("add.u64", [base], [base, 4])
        if rng.random() < 0.4:
            again, other = self.address(4, source=rng.choice(U))
            self.store("global", 4, [rng.choice(D)], again, other)
        self.op("add.u32", [turn], [turn, 1])
        self.op("setp.lt.u32", ["%dp"], [turn, 3])
        self.op("setp.lt.and.u32", [flag], [rng.choice(D), 0x90000000, "%dp"])
        self.jump(head, (flag, False))

    def dirty(self, scope: Scope) -> None:
        """What was loaded decides."""
        rng = self.rng
        match rng.randrange(4):
            case 0:
                self.op(f"setp.{rng.choice(COMPARES)}.u32", [rng.choice(P)], [rng.choice(D), 0x80000000], self.guard())
            case 1:
                self.op("add.u32", [rng.choice(R)], [rng.choice(D), self.word()], self.guard())
            case 2:
                self.op("mov.u32", [rng.choice(R)], [rng.choice(D)], self.guard())
            case 3:
                base, offset = self.address(4, source=rng.choice(D))
                self.store("global", 4, [rng.choice(R)], base, offset, self.guard())

    def statement(self, scope: Scope) -> None:
        rng = self.rng
        choices: list[tuple[float, Callable[[Scope], None]]] = [
            (5, self.arithmetic), (3, self.predicate), (1, self.select), (5, self.global_access), (1, self.data),
            (1.5, self.private),
            (0.7, self.call), (0.7, self.atomic), (0.6, self.spin),
        ]  # fmt: skip
        if scope.depth < 3:
            choices += [(2.5, self.branch), (1.5, self.loop), (0.7, self.switch)]
        if scope.loop:
            choices.append((1, self.leave))
        if scope.together:
            choices.append((1.5, self.exchange))
            if not self.exits:
                choices.append((1, self.vote))
                if self.threads % 32 == 0:
                    choices.append((1.5, self.shuffle))
        if self.exits and scope.depth:
            choices.append((0.7, self.quit))
        if self.guarded:
            choices.append((2.5, self.guarded_load))
        if not self.clean:
            choices.append((1, self.dirty))
        (chosen,) = rng.choices([c for _, c in choices], [w for w, _ in choices])
        chosen(scope)

    def body(self, scope: Scope) -> None:
        for _ in range(self.rng.randint(1, 4 if scope.depth else 9)):
            self.statement(scope)

    def short(self, scope: Scope) -> None:
        for _ in range(self.rng.randint(1, 2)):
            self.rng.choice([self.arithmetic, self.global_access, self.predicate])(scope)

    # -- the whole

    def write(self) -> Program:
        rng = self.rng
        block = rng.choice([(32, 1, 1), (32, 1, 1), (33, 1, 1), (8, 4, 1), (5, 3, 2), (64, 1, 1), (7, 1, 1), (16, 2, 2)])
        grid = rng.choice([(1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 2, 1), (1, 1, 2)])
        self.threads = block[0] * block[1] * block[2]
        numbers = rng.choice([0, 1, 5, 37, 1000]), rng.choice([0, 2, 3, 77, 0xFFFFFFF0])
        next(self.serial), next(self.serial)
        for name in "abg":
            self.put(f"ld.param.b64 %b{name}, [k_{name}];", lambda t, n=name: t.regs.__setitem__(f"%b{n}", BUFFERS[n]))
        for register, index in (("%u0", 0), ("%u1", 1)):
            self.put(
                f"ld.param.b32 {register}, [k_{'nm'[index]}];", lambda t, r=register, i=index: t.regs.__setitem__(r, numbers[i])
            )
        self.op("mad.lo.u32", ["%r7"], ["%tid.z", "%ntid.y", "%tid.y"])
        self.op("mad.lo.u32", ["%r7"], ["%r7", "%ntid.x", "%tid.x"])
        self.op("mad.lo.u32", ["%u2"], ["%ctaid.y", "%nctaid.x", "%ctaid.x"])
        self.op("add.u32", ["%u2"], ["%u2", "%ctaid.z"])
        self.put("mov.u32 %r6, sm;", lambda t: t.regs.__setitem__("%r6", 0))
        self.put("mov.u64 %z0, lo;", lambda t: t.regs.__setitem__("%z0", 0))
        self.put("cvta.local.u64 %z1, %z0;", lambda t: t.regs.__setitem__("%z1", WINDOWS["local"]))
        self.op("mad.lo.u32", ["%r0"], ["%u2", self.threads, "%r7"])
        self.op("mov.u32", ["%r1"], ["%r7"])
        self.op("mov.u32", ["%r2"], ["%u0"])
        self.op("shl.b32", ["%r3"], ["%r7", rng.randrange(5)])
        self.op("xor.b32", ["%r4"], ["%r0", rng.getrandbits(6)])
        self.op("mov.u32", ["%r5"], ["%laneid"])
        for i in range(3):
            self.op("cvt.u64.u32", [RD[i]], [R[i]])
            self.op("cvt.u16.u32", [H[i]], [R[i + 1]])
        for i, name in enumerate(P):
            self.op("setp.lt.u32", [name], [R[i], [16, 5, "%u1", 20][i]])
        for name in D:
            self.load("global", 4, [name], self.address(4)[0], 0)
        for offset in range(0, 32, 8):
            self.store("local", 8, [rng.choice(RD)], "%z0", offset)
        mine = f"%x{next(self.serial)}"
        self.slot(mine, False, 0)
        self.store("shared", 4, ["%r0", "%r1", "%r3", "%r5"], mine, 0)
        self.bar()
        self.body(Scope(True))
        for register in R:
            self.store("global", 1, [0], *self.address(1, source=register))
        self.steps.append(Step("ret;", kind="exit"))
        lines = ["  " + (f"@{'!' if s.guard[1] else ''}{s.guard[0]} " if s.guard else "") + s.text for s in self.steps]
        head = HEADER.replace("{shared}", str(SLOT * self.threads + 64))
        text = head + "\n".join([*self.lists, *lines]) + "\n}\n"
        return Program(self.steps, text, grid, block, numbers, self.clean, self.guarded)


WINDOWS = {"shared": 1 << 60, "local": 2 << 60}
"""Only so that generic addresses differ from others here; where the interpreter puts them is its own affair."""


def random_program(rng: random.Random) -> Program:
    clean, guarded = rng.random() < 0.7, rng.random() < 0.4
    return Writer(rng, clean, guarded, exits=rng.random() < 0.4).write()


def random_contents(seed: int) -> dict[str, bytes]:
    return {name: random.Random(f"{seed}{name}").randbytes(SIZE) for name in BUFFERS}
