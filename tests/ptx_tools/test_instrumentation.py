"""Instrumenting: the text is kept, it assembles, and what it records is what the kernel touches.

No GPU is needed. Three things stand in for it: ptxas, the slice interpreter (which runs real kernels, instrumented and not, and
must see shadow stores where it sees accesses), and `Thread` below, which runs small straight kernels with their data, so that
bits, event records and guards are seen as well.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tessera_compile.ptx_tools import isa
from tessera_compile.ptx_tools.footprints import Footprint, Intervals
from tessera_compile.ptx_tools.instrumentation import (
    EVENT,
    EVENTS_HEADER,
    Control,
    Instrumented,
    Recording,
    cost,
    instrument,
    read_maps,
    splice,
)
from tessera_compile.ptx_tools.interpretation import footprint
from tessera_compile.ptx_tools.launch import PARAM_WINDOW, SHARED_WINDOW, Buffer, TensorMap
from tessera_compile.ptx_tools.parsing import parse
from tessera_compile.ptx_tools.syntax import Address, Instruction, Literal, Module, Name, Not, Operand, Pair, PtxError, Vector
from tests.ptx_tools.corpus import DATA, needs_ptxas, skip_if_too_new, static_files, triton_cases, triton_ptx

# ptxas does not take `($str1)` as an operand, though other tools write it.
NOT_FOR_PTXAS = {"b09_intelllvm4623_paren_symbol.ptx"}
EVERY_CASE = [*static_files(), *triton_cases()]
SCHEMES = ("shadow", "bitmap")
HEAD = ".version 9.0\n.target sm_100a\n.address_size 64\n"

every_case = pytest.mark.parametrize("case", EVERY_CASE, ids=[c.name if isinstance(c, Path) else c for c in EVERY_CASE])
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def text_of(case: Path | str) -> str:
    return case.read_text() if isinstance(case, Path) else triton_ptx(case).ptx


def without_edits(instrumented: Instrumented) -> str:
    text, shift, parts, last = instrumented.text, 0, [], 0
    for offset, inserted in instrumented.edits:
        at = offset + shift
        assert text[at : at + len(inserted)] == inserted
        parts.append(text[last:at])
        last = at + len(inserted)
        shift += len(inserted)
    return "".join([*parts, text[last:]])


# -- the text


@every_case
@every_scheme
def test_everything_else_survives(case, scheme):
    module = parse(text_of(case))
    found = instrument(module, scheme)
    assert without_edits(found) == module.text
    assert not any("\n" in inserted for _, inserted in found.edits)
    again = parse(found.text)
    for name, kernel in module.kernels.items():
        for mine, other in zip(kernel.params or (), again.kernels[name].params or (), strict=True):
            assert replace(mine, span=(0, 0)) == replace(other, span=(0, 0))
    assert list(again.kernels) == list(module.kernels)
    assert again.variables[found.control].space == found.control_space


@needs_ptxas
@every_case
def test_every_case_assembles(case):
    module = parse(text_of(case))
    if isinstance(case, Path) and case.name in NOT_FOR_PTXAS:
        pytest.skip("ptxas does not take the original")
    skip_if_too_new(module.text)
    for scheme in SCHEMES:
        found = cost(module, instrument(module, scheme))
        assert list(found) == [name for name in found if name in module.kernels]
        assert len(found) == len(module.kernels)
        for kernel in found.values():
            assert kernel.registers_after <= max(kernel.registers + 64, 64)
            if kernel.registers < 255:  # one that has none to spare keeps what is added elsewhere
                assert kernel.spills_after <= kernel.spills + 64


def test_lines_do_not_move_and_labels_stay_in_front():
    body = "ld.param.u64 %a, [a]; L: st.global.u8 [%a], 1; { st.global.u8 [%a+1], 2; }"
    text = HEAD + ".entry k(.param .u64 a) { .reg .b64 %a;\n" + body + " }"
    found = instrument(parse(text))
    assert found.text.count("\n") == text.count("\n")
    assert "L: { .reg" in found.text
    assert [(site.line, site.column) for site in found.sites] == [(5, body.index("st") + 1), (5, body.rindex("st") + 1)]


def test_names_do_not_collide():
    text = HEAD + ".global .b32 __tessera_control;\n.entry k(.param .u64 a) { .reg .b64 %tsr; ld.param.u64 %tsr, [a];"
    text += " st.global.u8 [%tsr], 1; }"
    found = instrument(parse(text))
    assert found.control == "__tessera_control1"
    assert "%tsr1_" in found.text


@needs_ptxas
def test_the_control_block_goes_to_global_memory_where_the_constants_are_full():
    body = ".entry k(.param .u64 a) { .reg .b64 %a; .reg .b32 %r; ld.param.u64 %a, [a]; ld.const.u32 %r, [c];"
    body += " st.global.u32 [%a], %r; }"
    full = parse(f"{HEAD}.const .align 4 .b8 c[65536] = {{1}};\n{body}")
    found = instrument(full)
    assert found.control_space == "global"
    assert cost(full, found)["k"].spills_after == 0
    almost = parse(f"{HEAD}.const .align 4 .b8 c[65456] = {{1}};\n{body}")
    assert instrument(almost).control_space == "const"
    cost(almost, instrument(almost))


def test_only_chosen_kernels_and_every_function():
    text = (
        HEAD
        + ".func f(.param .u64 p) { .reg .b64 %a; ld.param.u64 %a, [p]; st.global.u8 [%a], 1; ret; }\n"
        + "".join(f".entry {n}(.param .u64 a) {{ .reg .b64 %a; ld.param.u64 %a, [a]; st.global.u8 [%a], 1; }}\n" for n in "xyz")
    )
    found = instrument(parse(text), kernels=["y"])
    assert [site.function for site in found.sites] == ["f", "y"]
    assert list(found.kernels) == ["y"]
    assert found.kernels["y"].sites == (1,)
    with pytest.raises(PtxError, match="no kernel 'w'"):
        instrument(parse(text), kernels=["w"])


def test_bad_input():
    module = parse(HEAD + ".entry k() { ret; }")
    with pytest.raises(ValueError, match="'shadow' or 'bitmap', not 'counters'"):
        instrument(module, "counters")
    with pytest.raises(PtxError, match="newer than the instruction table"):
        instrument(parse(".version 99.0\n.target sm_90\n.address_size 64\n.entry k() { ret; }"))
    with pytest.raises(PtxError, match=r"<ptx>:4:14: expected a declared name, found '%nothing'"):
        instrument(parse(HEAD + ".entry k() { st.global.u8 [%nothing], 1; }"))
    with pytest.raises(ValueError, match="arena=0x1001 is no multiple of 128"):
        Control(0x1001, 128, 0x2000, 0x3000, 0x4000)
    with pytest.raises(ValueError, match="no bytes"):
        Control(0x1000, 0, 0x2000, 0x3000, 0x4000)
    with pytest.raises(ValueError, match="16-byte aligned"):
        Control(0x1000, 128, 0x2000, 0x3000, 0x4000, 0, 5)


# -- what is a site, and what makes a kernel incomplete


def test_sites_of_every_memory_instruction():
    module = parse((DATA / "hand" / "h2_mem100.ptx").read_text(), name="h2")
    found = instrument(module)
    info = found.kernels["mem100"]
    sited = {(site.line, site.column) for site in found.sites}
    told = {reason.split(": ")[0] for reason in info.incomplete}
    assert len(info.sites) == len(found.sites)
    assert len(told) == 5  # the multimem ones
    for item in module.kernels["mem100"].instructions():
        outside = [a for a in isa.accesses(item) if a.outside]
        line, column = module.place(item.span[0])
        assert ((line, column) in sited or f"h2:{line}:{column}" in told) == bool(outside), item.mnemonic
    events = {site.mnemonic.split(".sync")[0] for site in found.sites if site.how == "event"}
    assert {"wmma.load.a", "wmma.store.d", "wmma.load.c"} < events
    assert {site.descriptor for site in found.sites if "tensor." in site.mnemonic} == {"tm"}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("tex.2d.v4.f32.f32 {%f0,%f1,%f2,%f3}, [%a, {%f0,%f1}];", "a texture or surface"),
        ("sust.b.1d.b32.trap [%a, {%r}], %r;", "a texture or surface"),
        ("multimem.st.weak.global.v4.f32 [%a], {%f0,%f1,%f2,%f3};", "multicast"),
        ("call other, (%a);", "other has no body"),
        ("call inner, (%a);", "4:22: frobnicate.global.u32 is not in the instruction table"),
        ("{ proto: .callprototype _ (.param .b64 x); call %a, (%a), proto; }", "indirect call"),
        ("{ some: .calltargets inner, other; call %a, (%a), some; }", "other has no body"),
        ("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.ignore_oob [%r], [%a], 16, 1, 1, [%r];", "not in the"),
    ],
)
def test_what_cannot_be_recorded_is_told(body, why):
    text = (
        HEAD
        + ".func inner(.reg .b64 x) { frobnicate.global.u32 x; }\n.extern .func other(.reg .b64 x);\n"
        + ".extern .func vprintf(.reg .b64 x); .extern .func __assertfail();\n"
        + ".entry clean() { .reg .b64 %a; call vprintf, (%a); call __assertfail; ret; }\n"
        + f".entry k() {{ .reg .b64 %a; .reg .b32 %r; .reg .f32 %f<4>; {body} }}"
    )
    found = instrument(parse(text.replace(".func inner(", ".func  inner(", 1)))
    assert found.kernels["clean"].incomplete == ()
    assert why.replace("4:22", "4:29") in " ".join(found.kernels["k"].incomplete)
    assert all(reason.startswith("<ptx>:") for reason in found.kernels["k"].incomplete)
    with pytest.raises(PtxError):
        read_maps(found, "k", CONTROL, Recording(b"", b"", b""), {})


def test_callees_belong_to_their_callers():
    text = (
        HEAD
        + ".func leaf(.reg .b64 x) { .reg .b32 r; ld.global.u32 r, [x]; ret; }\n"
        + ".func middle(.reg .b64 x) { call leaf, (x); st.global.u32 [x], 1; ret; }\n"
        + ".func unused(.reg .b64 x) { st.global.u32 [x], 1; ret; }\n"
        + ".entry k(.param .u64 a) { .reg .b64 %a; ld.param.u64 %a, [a]; call middle, (%a); ret; }\n"
    )
    found = instrument(parse(text))
    assert {found.sites[index].function for index in found.kernels["k"].sites} == {"leaf", "middle"}


# -- one thread, run with its data

ARENA, READ, WRITTEN, FLAGS, EVENTS, VARIABLES = 0x7000_0000, 0x1000_0000, 0x2000_0000, 0x3000_0000, 0x4000_0000, 0x5000_0000
ARENA_BYTES, CAPACITY = 4096, 64
CONTROL = Control(ARENA, ARENA_BYTES, READ, WRITTEN, FLAGS, EVENTS, CAPACITY)


ACCESSES = {"st", "red", "cp", "wmma", "tensormap", "discard", "ld", "atom", "prefetch", "applypriority"}


class Thread:
    """Runs the straight code of a kernel: arithmetic, and all that was inserted. The kernel's own loads give garbage, its stores
    and copies do nothing. Branches are not followed. Scopes: no name in these tests is declared twice unless given apart."""

    def __init__(self, instrumented: Instrumented, control: Control = CONTROL) -> None:
        self.found = instrumented
        self.module = parse(instrumented.text)
        self.prefix = next((name for name in ("%tsr_", "%tsr1_") if name in instrumented.text), "%tsr_")
        self.control = control.pack()
        size = instrumented.map_bytes(control.arena_bytes)
        self.memory = {
            control.read_map: bytearray(size),
            control.write_map: bytearray(size),
            control.outside: bytearray(len(instrumented.sites)),
            control.events: bytearray(instrumented.event_bytes(control.capacity)),
        }
        self.settings = control
        self.symbols = {}
        at = VARIABLES
        for name, variable in self.module.variables.items():
            self.symbols[name] = at + 4  # no better aligned than a 4-byte variable may be
            if variable.align > 4:
                self.symbols[name] = at
            at += 4096

    def run(self, kernel: str | None = None, **params: int) -> Thread:
        self.registers: dict[str, int] = {"%lanemask_lt": 0, "%laneid": 0}
        self.params = params
        for item in self.module.kernel(kernel).instructions():
            self.step(item)
        return self

    def recording(self) -> Recording:
        c = self.settings
        return Recording(*(bytes(self.memory[at]) for at in (c.read_map, c.write_map, c.outside, c.events)))

    def footprint(self, kernel: str | None = None, maps: Mapping[str | int, TensorMap] | None = None, **more: int) -> Footprint:
        buffers = {"all": Buffer(ARENA, ARENA_BYTES)}
        return read_maps(self.found, kernel, self.settings, self.recording(), buffers, maps, variables=more or None)

    def value(self, operand: Operand) -> int:
        if isinstance(operand, Literal):
            return int(operand.value)
        if isinstance(operand, Not):
            return 1 - self.value(operand.operand)
        assert isinstance(operand, Name)
        if operand.text in self.registers:
            return self.registers[operand.text]
        if operand.text in self.params:
            return list(self.params).index(operand.text) * 256
        return self.symbols[operand.text]

    def place(self, address: Address) -> int:
        return (self.value(address.base) if address.base else 0) + address.offset

    def cell(self, address: int) -> tuple[bytearray, int]:
        for start, data in self.memory.items():
            if start <= address < start + len(data):
                return data, address - start
        raise AssertionError(f"the recording code touches {address:#x}")

    def store(self, address: int, data: bytes) -> None:
        memory, at = self.cell(address)
        assert address % len(data) == 0, "a misaligned store"
        assert at + len(data) <= len(memory)
        memory[at : at + len(data)] = data

    def step(self, item: Instruction) -> None:
        if item.predicate is not None and bool(self.registers[item.predicate]) == item.negated:
            return
        ours = any(name.text.startswith(self.prefix) for operand in item.operands for name in isa.read_names(operand))
        modifiers, operands = item.modifiers, item.operands
        kind = isa.data_type(item)
        bits = int(kind[1:]) if kind[1:].isdigit() else 1
        wrap = (1 << bits) - 1
        opcode = item.opcode
        if opcode in ACCESSES and not ours and "param" not in modifiers:
            for name in isa.written_names(item):
                self.registers[name.text] = 0xDEAD_BEEF_0000
            return
        if opcode == "ld":
            address = operands[1]
            assert isinstance(address, Address)
            assert address.base is not None
            if "param" in modifiers:
                result = [self.params[address.base.text]]
            else:
                assert address.base.text == self.found.control
                wide = 2 if "v2" in modifiers else 1
                result = list(struct.unpack_from(f"<{wide}Q", self.control, address.offset))
            for name, value in zip(isa.written_names(item), result, strict=True):
                self.registers[name.text] = value
        elif opcode == "st":
            items = operands[1].items if isinstance(operands[1], Vector) else (operands[1],)
            self.store(self.place(operands[0]), b"".join((self.value(i) & wrap).to_bytes(bits // 8, "little") for i in items))
        elif opcode == "red":
            assert modifiers == ("global", "or", "b32")
            memory, at = self.cell(self.place(operands[0]))
            assert at % 4 == 0
            old = int.from_bytes(memory[at : at + 4], "little")
            memory[at : at + 4] = (old | self.value(operands[1])).to_bytes(4, "little")
        elif opcode == "atom":
            memory, at = self.cell(self.place(operands[1]))
            old = int.from_bytes(memory[at : at + 8], "little")
            memory[at : at + 8] = (old + self.value(operands[2])).to_bytes(8, "little")
            self.registers[operands[0].text] = old
        elif opcode == "activemask":
            self.registers[operands[0].text] = 1
        elif opcode == "setp":
            a, b = (self.value(o) & wrap for o in operands[1:3])
            holds = {"lt": a < b, "ne": a != b, "eq": a == b, "gt": a > b}[modifiers[0]]
            other = self.value(operands[3]) if len(operands) > 3 else 1
            first = operands[0]
            for name, result in zip(isa.written_names(item), (holds, not holds), strict=False):
                self.registers[name.text] = int(result and bool(other))
            assert isinstance(first, (Name, Pair))
        elif opcode == "isspacep":
            window = {"global": (0, 3), "param": (3,)}[modifiers[0]]  # parameters lie in the window of global memory
            self.registers[operands[0].text] = int((self.value(operands[1]) >> 60) in window)
        elif opcode == "mov" and isinstance(operands[0], Vector):
            whole = self.value(operands[1])
            self.registers[operands[0].items[0].text], self.registers[operands[0].items[1].text] = whole & 0xFFFFFFFF, whole >> 32
        elif opcode == "cvta":
            window = PARAM_WINDOW if "param" in modifiers else SHARED_WINDOW if "shared" in modifiers else 0
            self.registers[operands[0].text] = self.value(operands[1]) + (-window if "to" in modifiers else window)
        elif opcode not in ("ret", "exit"):
            values = [self.value(o) for o in operands[1:]]
            result = {
                "mov": lambda a: a, "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "and": lambda a, b: a & b,
                "or": lambda a, b: a | b, "not": lambda a: ~a, "shl": lambda a, b: a << b, "shr": lambda a, b: a >> b,
                "min": min, "cvt": lambda a: a, "mad": lambda a, b, c: a * b + c, "selp": lambda a, b, c: a if c else b,
            }[opcode](*values)  # fmt: skip
            assert isinstance(operands[0], Name)
            self.registers[operands[0].text] = result & wrap


REGISTERS = ".reg .b64 %a, %b, %x<4>; .reg .b32 %r<9>; .reg .b16 %h<4>; .reg .f32 %f<9>; .reg .pred %p, %q; .reg .b128 %w;"


def kernel(body: str, params: str = ".param .u64 a, .param .u32 n", before: str = "", head: str = HEAD) -> Module:
    start = "ld.param.u64 %a, [a]; ld.param.u32 %r0, [n]; setp.ne.u32 %p, %r0, 0;"
    return parse(f"{head}{before}\n.entry k({params}) {{ {REGISTERS} .shared .align 16 .b8 sm[1024]; {start} {body} ret; }}")


def touched(module: Module, scheme: str, kernel_: str | None = None, **params: int) -> tuple[list, list]:
    found = Thread(instrument(module, scheme)).run(kernel_, **params).footprint(kernel_)["all"]
    return list(found.reads), list(found.writes)


@every_scheme
@pytest.mark.parametrize(
    ("body", "reads", "writes"),
    [
        ("ld.global.u8 %r1, [%a+3];", [(3, 4)], []),
        ("st.global.u16 [%a+2], %h0;", [], [(2, 4)]),
        ("ld.volatile.global.f32 %f0, [%a+64];", [(64, 68)], []),
        ("ld.global.b64 %b, [%a];", [(0, 8)], []),
        ("ld.global.b128 %w, [%a+16];", [(16, 32)], []),
        ("ld.global.nc.v4.b64 {%x0,%x1,%x2,%x3}, [%a+32];", [(32, 64)], []),
        ("st.global.v8.f32 [%a+96], {%f0,%f1,%f2,%f3,%f4,%f5,%f6,%f7};", [], [(96, 128)]),
        ("ld.global.v2.u16 {%h0,%h1}, [%a+4092];", [(4092, 4096)], []),
        ("atom.global.add.u32 %r1, [%a+8], 1;", [(8, 12)], [(8, 12)]),
        ("red.global.add.v4.f32 [%a+16], {%f0,%f1,%f2,%f3};", [(16, 32)], [(16, 32)]),
        ("atom.global.cas.b16 %h0, [%a+6], %h1, %h2;", [(6, 8)], [(6, 8)]),
        ("st.async.release.gpu.global.u32 [%a], %r1;", [], [(0, 4)]),
        ("discard.global.L2 [%a+128], 128;", [], [(128, 256)]),
        ("tensormap.replace.tile.global_address.global.b1024.b64 [%a+64], %b;", [], [(64, 192)]),
        ("ld.u32 %r1, [%a+4]; st.u8 [%a+5], %r1;", [(4, 8)], [(5, 6)]),
        ("add.s64 %a, %a, 100; ld.global.u32 %r1, [%a+-100]; ld.global.u32 %r1, [%a-96];", [(0, 8)], []),
        ("ld.global.u64 %a, [%a]; ", [(0, 8)], []),
        ("mov.b32 %r1, 0x70000010; ld.global.u32 %r2, [%r1+4];", [(20, 24)], []),
        ("ld.global.u32 %r2, [0x70000020];", [(32, 36)], []),
        ("@%p ld.global.u32 %r1, [%a]; @!%p ld.global.u32 %r1, [%a+8];", [(0, 4)], []),
        ("{ .reg .b64 %inner; add.s64 %inner, %a, 8; st.global.u32 [%inner], 1; }", [], [(8, 12)]),
        ("prefetch.global.L2 [%a]; applypriority.global.L2::evict_normal [%a], 128;", [], []),
    ],
)
def test_marks(scheme, body, reads, writes):
    assert touched(kernel(body), scheme, a=ARENA, n=5) == (reads, writes)


@every_scheme
@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 7, 8, 11, 12, 15, 16, 17, 99])
def test_cp_async_reads_what_its_source_size_says(scheme, n):
    body = "cp.async.cg.shared.global.L2::cache_hint [%r1], [%a+16], 16, %r0, %b;"
    body += "cp.async.ca.shared.global [%r1], [%a+100], 4, %r0;"
    reads = [(start, start + min(n, most)) for start, most in ((16, 16), (100, 4)) if n]
    assert touched(kernel(body), scheme, a=ARENA, n=n) == (reads, [])
    literal = f"cp.async.cg.shared.global [%r1], [%a+16], 16, {n}; cp.async.ca.shared.global [%r1], [%a+100], 4, {n};"
    assert touched(kernel(literal), scheme, a=ARENA, n=1) == (reads, [])


@every_scheme
@pytest.mark.parametrize("n", [0, 1])
def test_cp_async_sizes_that_are_all_or_nothing(scheme, n):
    body = "selp.b32 %r2, 16, 0, %p; selp.b32 %r3, %r2, 0, %p; cp.async.cg.shared.global [%r1], [%a], 16, %r3;"
    module = kernel(body)
    assert touched(module, scheme, a=ARENA, n=n) == ([(0, 16)] if n else [], [])
    assert instrument(module).text.count("@%tsr") == 2  # one store of marks, one flag
    some = kernel("selp.b32 %r2, 12, 4, %p; cp.async.cg.shared.global [%r1], [%a], 16, %r2;")
    assert touched(some, scheme, a=ARENA, n=n) == ([(0, 12 if n else 4)], [])


@every_scheme
@pytest.mark.parametrize("n", [0, 1])
def test_cp_async_that_ignores_its_source(scheme, n):
    body = "cp.async.ca.shared.global [%r1], [%a], 8, %p; cp.async.ca.shared.global [%r1], [%a+16], 8, !%p;"
    assert touched(kernel(body), scheme, a=ARENA, n=n) == ([(16, 24)] if n else [(0, 8)], [])
    # The fourth operand is what the innermost scope says.
    hidden = "{ .reg .b32 %q; mov.b32 %q, 4; cp.async.ca.shared.global [%r1], [%a], 8, %q; }"
    assert touched(kernel(hidden), scheme, a=ARENA, n=n) == ([(0, 4)], [])
    guarded = "@!%p cp.async.ca.shared.global [%r1], [%a], 8, %p; @%p cp.async.ca.shared.global [%r1], [%a+8], 8, !%p;"
    assert touched(kernel(guarded), scheme, a=ARENA, n=n) == ([(8, 16)] if n else [(0, 8)], [])


@every_scheme
@pytest.mark.parametrize("n", [0, 1])
def test_recording_runs_under_the_guard_of_the_instruction(scheme, n):
    body = "mov.b64 %b, 0; @%p ld.global.u32 %r1, [%a]; @!%p st.global.u32 [%a+4], 1; @%p st.global.u32 [%b+8], 1;"
    module = kernel(body)
    if n:
        with pytest.raises(PtxError, match=r"5:\d+: st.global.u32: it touched memory outside of the arena"):
            touched(module, scheme, a=ARENA, n=n)
    else:
        assert touched(module, scheme, a=ARENA, n=n) == ([], [(4, 8)])


@every_scheme
def test_nothing_outside_of_the_arena_is_lost(scheme):
    for offset in (-4, ARENA_BYTES, 1 << 40):
        near = f"[%a+{offset}]"
        for body in (f"ld.global.u32 %r1, {near};", f"st.u32 {near}, 1;", f"discard.global.L2 [%a+{offset & ~127}], 128;"):
            with pytest.raises(PtxError, match="outside of the arena"):
                touched(kernel(body), scheme, a=ARENA, n=0)
    # An address that no byte is read from may be anywhere.
    assert touched(kernel("cp.async.cg.shared.global [%r1], [%a+-16], 16, %r0;"), scheme, a=ARENA, n=0) == ([], [])


@every_scheme
@pytest.mark.parametrize("space", ["shared", "local", "param", "const"])
def test_generic_addresses_elsewhere_are_not_global(scheme, space):
    window = {"shared": 1, "local": 2, "param": 3, "const": 4}[space] << 60
    body = "ld.u32 %r1, [%a]; st.u32 [%a+8], 1; @%p atom.add.u32 %r2, [%a], 1;"
    assert touched(kernel(body), scheme, a=window, n=1) == ([], [])
    old = ".version 7.0\n.target sm_80\n.address_size 64\n"
    if space != "param":
        assert touched(kernel(body, head=old), scheme, a=window, n=1) == ([], [])
    assert "isspacep.param" not in instrument(kernel(body, head=old), scheme).text


@every_scheme
def test_symbols_of_other_spaces_are_no_sites(scheme):
    module = kernel("ld.u32 %r1, [sm]; ld.const.u32 %r1, [cst]; ld.u32 %r1, [cst+4];", before=".const .b32 cst[4];")
    assert instrument(module, scheme).sites == ()


# -- variables of the module

TABLES = ".global .b32 tbl[8]; .global .align 1 .b8 odd[64]; .global .align 16 .b8 late[256];"


@every_scheme
def test_variables_of_the_module(scheme):
    body = (
        "ld.global.u32 %r1, [tbl+8]; @%p st.global.u8 [odd+3], 1; @!%p st.global.u8 [odd+5], 1; ld.global.u32 %r1, tbl[1];"
        "mov.u64 %b, late; add.s64 %b, %b, 16; cvta.global.u64 %x0, %b;"
        "ld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%b]; red.add.u32 [%x0+64], 1;"
    )
    module = kernel(body, before=TABLES)
    found = instrument(module, scheme)
    assert [(s.how, s.variables, s.offset) for s in found.sites] == [
        ("variable", ("tbl",), 8),
        ("variable", ("odd",), 3),
        ("variable", ("odd",), 5),
        ("variable", ("tbl",), 4),
        ("mark", ("late",), None),
        ("mark", ("late",), None),
    ]
    result = Thread(found).run(a=ARENA, n=1).footprint()
    assert [b.name for b in result.buffers] == ["all", "tbl", "odd", "late"]
    assert not result["all"].reads
    assert list(result["tbl"].reads) == [(4, 12)]
    assert list(result["odd"].writes) == [(3, 4)]
    assert list(result["late"].reads) == [(16, 32), (80, 84)]
    assert list(result["late"].writes) == [(80, 84)]
    assert result.complete


@every_scheme
@pytest.mark.parametrize("n", [0, 1])
def test_a_register_that_may_hold_either(scheme, n):
    body = "mov.u64 %b, odd; add.s64 %b, %b, 4; selp.b64 %b, %b, %a, %p; st.global.v2.u32 [%b], {%r1, %r2};"
    module = kernel(body, before=TABLES)
    thread = Thread(instrument(module, scheme))
    thread.symbols["odd"] += 4  # 8-byte aligned by chance, with an offset that is not
    result = Thread.footprint(thread.run(a=ARENA + 16, n=n))
    assert list(result["all"].writes) == ([] if n else [(16, 24)])
    assert [list(b.writes) for b in result.buffers[1:]] == ([[(4, 12)]] if n else [])


@every_scheme
def test_beyond_the_end_of_a_variable(scheme):
    module = kernel("mov.u64 %b, tbl; ld.global.u64 %x0, [%b+32];", before=TABLES)
    with pytest.raises(PtxError, match="outside of the arena"):
        touched(module, scheme, a=ARENA, n=0)
    module = kernel("ld.global.u32 %r1, [tbl+32];", before=TABLES)
    with pytest.raises(PtxError, match="outside of the arena"):
        touched(module, scheme, a=ARENA, n=0)


def test_variables_are_told_from_namesakes():
    body = "{ .reg .b64 tbl; mov.b64 tbl, %a; ld.global.u32 %r1, [tbl]; } mov.u64 %b, tbl; ld.global.u32 %r1, [%b];"
    found = instrument(kernel(body, before=TABLES))
    assert [site.variables for site in found.sites] == [(), ()]


@needs_ptxas
@every_scheme
def test_code_for_variables_assembles(scheme):
    body = "mov.u64 %b, odd; selp.b64 %b, %b, %a, %p; @%p st.global.v2.u32 [%b], {%r1, %r2};"
    body += "ld.u32 %r1, [%b]; ld.global.u32 %r1, tbl[1];"
    module = kernel(body, before=TABLES)
    cost(module, instrument(module, scheme))


# -- events


def test_bulk_copies():
    body = (
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%a+128], 256, [%r2];"
        "@%p cp.async.bulk.global.shared::cta.bulk_group [%a], [%r1], %r0;"
        "mov.b16 %h1, 0x8005; cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%a+1024], [%r1], 32, %h1;"
        "@!%p cp.async.bulk.global.shared::cta.bulk_group [%a+512], [%r1], 64;"
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%a+2048], [%r1], 64;"
    )
    module = kernel(body)
    result = Thread(instrument(module)).run(a=ARENA, n=48).footprint()["all"]
    assert list(result.reads) == [(128, 384), (2048, 2112)]
    masked = [(1024 + 16 * row + a, 1024 + 16 * row + b) for row in (0, 1) for a, b in ((0, 1), (2, 3), (15, 16))]
    assert list(result.writes) == [(0, 48), *Intervals.of(masked), (2048, 2112)]


def test_a_bulk_copy_may_leave_the_arena():
    module = kernel("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%a], 256, [%r2];")
    result = Thread(instrument(module)).run(a=ARENA - 128, n=0).footprint()
    assert list(result["all"].reads) == [(0, 128)]
    assert list(result.outside_reads) == [(ARENA - 128, ARENA)]


MAP = TensorMap(ARENA, 4, (16, 32), (64,), (8, 2))
TENSOR_PARAMS = ".param .u64 a, .param .u32 n, .param .align 64 .b8 tm[128], .param .align 64 .b8 pair[256]"
TENSOR_LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.tile"


@pytest.mark.parametrize("take", ["mov.b64 %b, tm;", "mov.b32 %r5, tm; cvt.u64.u32 %b, %r5;"])
def test_tensor_copies(take):
    body = (
        f"{take} cvta.param.u64 %x0, %b; mov.b64 %x2, pair; cvta.param.u64 %x3, %x2; add.s64 %x1, %x3, 128; mov.b32 %r3, -4;"
        f"{TENSOR_LOAD}.mbarrier::complete_tx::bytes [%r1], [%x0, {{4, %r0}}], [%r2];"
        f"{TENSOR_LOAD}.mbarrier::complete_tx::bytes [%r1], [%x0, {{%r3, 31}}], [%r2];"
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%x1, {8, 4}], [%r1];"
        f"{TENSOR_LOAD}::gather4.mbarrier::complete_tx::bytes [%r1], [%x0, {{0, 8, 10, 12, 40}}], [%r2];"
        "@!%p cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%x0, {0, 0}], [%r1];"
    )
    module = kernel(body, TENSOR_PARAMS)
    found = instrument(module)
    assert [site.descriptor for site in found.sites] == ["tm", "tm", "pair+128", "tm", "tm"]
    thread = Thread(found).run(a=ARENA, n=2, tm=0, pair=0)
    result = thread.footprint(maps={"tm": MAP, "pair+128": MAP})["all"]
    rows = [(2, 4), (3, 4), (31, -4), (8, 0), (10, 0), (12, 0)]
    assert list(result.reads) == list(Intervals.of([(64 * row + 4 * max(c, 0), 64 * row + 4 * (c + 8)) for row, c in rows]))
    assert list(result.writes) == [(64 * row + 32, 64 * row + 64) for row in (4, 5)]
    with pytest.raises(PtxError, match=r"tensor map in parameter pair\+128 is not known"):
        thread.footprint(maps={"tm": MAP})
    with pytest.raises(PtxError, match="has 1 dimensions, not 2"):
        thread.footprint(maps={"tm": TensorMap(ARENA, 4, (16,), (), (8,)), "pair+128": MAP})


def test_a_tensor_map_in_global_memory():
    body = f"{TENSOR_LOAD}.mbarrier::complete_tx::bytes [%r1], [%a, {{0, 0}}], [%r2];"
    thread = Thread(instrument(kernel(body))).run(a=ARENA + 3072, n=0)
    assert list(thread.footprint(maps={ARENA + 3072: MAP})["all"].reads) == [(0, 32), (64, 96), (3072, 3200)]
    with pytest.raises(PtxError, match="tensor map in address 0x70000c00 is not known"):
        thread.footprint()


def test_im2col_copies_are_recorded_and_refused():
    body = (
        "mov.b16 %h1, 7; mov.b64 %b, tm; cvta.param.u64 %x0, %b; cp.async.bulk.tensor.4d.shared::cta.global.im2col"
        ".mbarrier::complete_tx::bytes [%r1], [%x0, {1, 2, 3, 4}], [%r2], {%h1, 9};"
    )
    thread = Thread(instrument(kernel(body, TENSOR_PARAMS))).run(a=ARENA, n=0, tm=0, pair=0)
    (event,) = np.frombuffer(thread.recording().events, np.uint8)[EVENTS_HEADER:].view(EVENT)[:1]
    assert event["coordinates"].tolist() == [1, 2, 3, 4, 0]
    assert event["offsets"].tolist() == [7, 9, 0, 0]
    with pytest.raises(PtxError, match="im2col copies are not modelled"):
        thread.footprint(maps={"tm": MAP})


@pytest.mark.parametrize("generic", [False, True])
def test_fragments(generic):
    space = "" if generic else ".global"
    body = (
        f"wmma.load.a.sync.aligned.row.m16n16k16{space}.f16 {{%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}}, [%a], %r0;"
        f"@%p wmma.store.d.sync.aligned.col.m16n16k16{space}.f32 [%a+2048], {{%f0,%f1,%f2,%f3,%f4,%f5,%f6,%f7}}, 16;"
        f"@!%p wmma.store.d.sync.aligned.row.m16n16k16{space}.f32 [%a], {{%f0,%f1,%f2,%f3,%f4,%f5,%f6,%f7}};"
    )
    module = kernel(body)
    result = Thread(instrument(module)).run(a=ARENA, n=40).footprint()["all"]
    assert list(result.reads) == [(80 * row, 80 * row + 32) for row in range(16)]
    assert list(result.writes) == [(2048, 2048 + 16 * 64)]
    if generic:
        nothing = Thread(instrument(module)).run(a=SHARED_WINDOW + 64, n=40).footprint()["all"]
        assert not nothing.reads
        assert not nothing.writes


def test_lost_events_are_seen():
    body = "cp.async.bulk.global.shared::cta.bulk_group [%a], [%r1], 16;" * 3
    found = instrument(kernel(body))
    control = replace(CONTROL, capacity=2)
    thread = Thread(found, control).run(a=ARENA, n=0)
    with pytest.raises(PtxError, match="k made 3 events, with room for 2"):
        thread.footprint()
    assert Thread(found, replace(CONTROL, capacity=3)).run(a=ARENA, n=0).footprint()["all"].writes.nbytes == 16


@needs_ptxas
def test_event_code_assembles():
    for body in (
        "mov.b64 %b, tm; cvta.param.u64 %x0, %b; cp.async.bulk.tensor.4d.shared::cluster.global.im2col"
        ".mbarrier::complete_tx::bytes [%r1], [%x0, {1, 2, 3, %r0}], [%r2], {%h1, %h2};",
        "@%p cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%a+1024], [%r1], 32, %h1;",
        "@!%p wmma.load.a.sync.aligned.row.m16n16k16.f16 {%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}, [%a], %r0;",
    ):
        module = kernel(body, TENSOR_PARAMS)
        cost(module, instrument(module))


# -- reading back


def test_recordings_that_do_not_fit():
    found = instrument(kernel("ld.global.u32 %r1, [%a]; cp.async.bulk.global.shared::cta.bulk_group [%a], [%r1], 16;"))
    thread = Thread(found).run(a=ARENA, n=0)
    good = thread.recording()
    buffers = {"x": Buffer(ARENA, 2), "y": Buffer(ARENA + 8, 100)}
    result = read_maps(found, None, CONTROL, good, buffers)
    assert list(result["x"].reads) == [(0, 2)]
    assert list(result["y"].writes) == [(0, 8)]
    assert list(result.outside_reads) == [(ARENA + 2, ARENA + 4)]
    assert list(result.outside_writes) == [(ARENA + 2, ARENA + 8)]
    with pytest.raises(ValueError, match="a map of 100 bytes, where the arena needs 4096"):
        read_maps(found, "k", CONTROL, replace(good, read_map=bytes(100)), buffers)
    with pytest.raises(ValueError, match="3 flags"):
        read_maps(found, "k", CONTROL, replace(good, outside=bytes(3)), buffers)
    with pytest.raises(ValueError, match="1 sites that record events"):
        read_maps(found, "k", CONTROL, replace(good, events=None), buffers)
    with pytest.raises(PtxError, match="found 'j'"):
        read_maps(found, "j", CONTROL, good, buffers)
    stray = np.zeros(1, EVENT)
    with pytest.raises(PtxError, match="an event of site 0, which k does not have"):
        read_maps(found, "k", CONTROL, replace(good, events=struct.pack("<2Q", 1, 0) + stray.tobytes()), buffers)
    with pytest.raises(ValueError, match="1 events need 64 bytes"):
        read_maps(found, "k", CONTROL, replace(good, events=struct.pack("<2Q", 1, 0)), buffers)


def test_bitmaps_are_an_eighth():
    module = kernel("ld.global.u32 %r1, [tbl]; ld.global.u32 %r1, [%a];", before=TABLES)
    assert instrument(module).map_bytes(1024) == 1024 + 128 + 128 + 256
    assert instrument(module, "bitmap").map_bytes(1024) == (1024 + 128 + 128 + 256) // 8


def test_splice():
    assert splice("abc", [(0, "x"), (1, "y"), (3, "z")]) == "xaybcz"


# -- real kernels: the interpreter sees marks where it sees accesses

X, Y, Z = 0x1_0000_0000, 0x1_0100_0000, 0x1_0200_0000


def launch(
    file: str, kernel_: str | None, grid: int | tuple, block: int | tuple, sizes: list[int], *numbers: int, shared: int = 0
):
    return file, kernel_, grid, block, [*map(Buffer, (X, Y, Z), sizes), *numbers], shared


POINTERS = struct.pack("<64Q", *[X + 256] * 64)
B11, B08 = "bugs/b11_own_cpasync_srcsize_selfaddr.ptx", "bugs/b08_ce7959_predicates.ptx"
MATRIX = [256 * 192 * 2, 192 * 256 * 2, 256 * 256 * 2]
KERNELS = {
    "add": launch("triton/add.sm_80.ptx", None, 3, 128, [9000] * 3, 2250),
    "softmax": launch("triton/softmax.sm_90.ptx", None, 4, 128, [4 * 700 * 4, 4 * 800 * 4], 800, 700, 4, 650, shared=64),
    "matmul": launch("triton/matmul.sm_80.ptx", None, 4, 256, MATRIX, 256, 256, 192, 192, 256, 256, shared=98304),
    "vec4": launch("cuda/c01_vec.sm_80.ptx", "vec4", 3, 64, [2400] * 3, 150),
    "grid stride": launch("cuda/c01_vec.sm_90a.ptx", "grid_stride", 3, 64, [4000] * 2, 1000),
    "stencil": launch("cuda/c10_loops.sm_90a.ptx", "stencil", (2, 3), (16, 8), [20 * 18 * 5 * 4] * 2, 20, 18, 5),
    "transpose": launch("cuda/c10_loops.sm_80.ptx", "transpose", (2, 2), (32, 8), [50 * 40 * 4] * 2, 50, 40),
    "bytes": launch("cuda/c10_loops.sm_100a.ptx", "bytes", 2, 64, [100, 200, 800], 100),
    "cp.async": launch("cuda/c06_async.sm_80.ptx", "cpasync", 2, 256, [8192] * 2, 1),
    "pipe": launch("cuda/c06_async.sm_80.ptx", "pipe", 1, 128, [8192] * 2, 3),
    "guards": launch(B08, None, 1, 32, [64], 6),
}
KERNELS |= {f"switch {op}": launch("cuda/c03_switch.sm_90a.ptx", "sw", 2, 64, [400, 800], 100, op) for op in (1, 2, 3, 7, 9)}
KERNELS |= {f"source size {n}": (B11, None, 1, 32, [Buffer(X, 512, POINTERS), n], 0) for n in (0, 3, 16)}
PICKS = np.array([5, 0, 39, 5, 31, 17], np.int64)
FIVE = [Buffer(X + (i << 20), n) for i, n in enumerate((4 * 1200, 512, 8, 4, 2 * 1200))]
HEADS = [Buffer(X + (i << 20), 2 * 2 * 200 * 64) for i in range(4)]
ROWS = [Buffer(X + (i << 20), n) for i, n in enumerate((2 * 5 * 1500, 2 * 5 * 1500, 6000, 6000, 20, 20))]
KERNELS |= {
    "gather": (
        "triton/gather.sm_80.ptx", None, 6, 128, [Buffer(X, 48, PICKS), Buffer(Y, 40 * 800), Buffer(Z, 6 * 800), 6, 200], 0,
    ),
    "atomics": ("triton/atomics.sm_80.ptx", None, 3, 128, [*FIVE, 1200], 4096),
    "layernorm": ("layernorm.sm_90", None, 5, 128, [*ROWS, 1500, 1500, 1e-5], 64),
    "flash": ("flash_causal.sm_90", None, (2, 2), 128, [*HEADS, Buffer(X + (5 << 20), 1600), 0.1, *[12800, 64] * 4, 200], 65536),
    "reduction": (
        "inductor_red.sm_80", None, 3, 128,
        [Buffer(X, 2 * 10 * 1000), Buffer(Y, 4000), Buffer(Z, 40), Buffer(Z + (1 << 20), 80), 10, 1000], 256,
    ),
}  # fmt: skip


def source_of(file: str) -> str:
    return (DATA / file).read_text() if "/" in file else triton_ptx(file).ptx


@pytest.mark.parametrize("name", KERNELS)
@every_scheme
def test_the_interpreter_sees_the_marks(name, scheme):
    file, kernel_, grid, block, args, shared_bytes = KERNELS[name]
    module = parse(source_of(file), name=file)
    expected = footprint(module, kernel_, grid, block, args, shared_bytes=shared_bytes)
    assert expected.complete
    found = instrument(module, scheme)
    start, end = X, max(b.addr + b.nbytes for b in expected.buffers)
    control = Control(start, -(-(end - start) // 128) * 128, 0x2_0000_0000, 0x3_0000_0000, 0x4_0000_0000)
    size = found.map_bytes(control.arena_bytes)
    extra = {
        "reads": Buffer(control.read_map, size),
        "writes": Buffer(control.write_map, size),
        "flags": Buffer(control.outside, len(found.sites)),
    }
    again, settings = parse(found.text, name=file), {found.control: control.pack()}
    result = footprint(again, kernel_, grid, block, args, shared_bytes=shared_bytes, extra=extra, symbols=settings)
    for mine, other in zip(result.buffers, expected.buffers, strict=False):
        assert (mine.name, mine.reads, mine.writes) == (other.name, other.reads, other.writes)
    marked = {b.name: b.writes for b in result.buffers}
    assert "flags" not in marked
    for what in ("reads", "writes"):
        whole = Intervals.of([])
        for buffer in expected.buffers:
            whole = whole | getattr(buffer, what).shift(buffer.addr - start)
        if scheme == "bitmap":  # the interpreter sees words; their bits are data
            whole = Intervals.merge(whole.starts // 32 * 4, (whole.ends + 31) // 32 * 4)
        assert marked.get(what, Intervals.of([])) == whole
