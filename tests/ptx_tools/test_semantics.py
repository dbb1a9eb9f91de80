"""Every arithmetic instruction against Python integers: operands come from a buffer, the result shows where a store goes."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from tessera_compile.ptx_tools import Buffer, NotDerivable, footprint, parse
from tests.ptx_tools.scalar import WIDTHS, Undefined, evaluate, signed, unsigned

REGISTER = {8: "b16", 16: "b16", 32: "b32", 64: "b64", 1: "pred"}
TOP = {w: 1 << w - 1 for w in (8, 16, 32, 64)}
EDGES = {w: [0, 1, 2, 3, 7, TOP[w] - 1, TOP[w], TOP[w] + 1, 2 * TOP[w] - 1, 2 * TOP[w] - 2] for w in TOP}
AMOUNTS = [0, 1, 5, 7, 8, 15, 16, 24, 28, 31, 32, 33, 63, 64, 65, 100, 255, 256, 260, 0x8000_0000, 0xFFFF_FFFF]
FLOATS = {
    "f32": [0, 0x80000000, 0x3F800000, 0xBF800000, 0x3F000000, 0x3FC00000, 0xBFC00000, 0x40200000, 0x4F000000, 0xCF000000,
            0x5F000000, 0xDF800000, 0x4B7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x80000001, 0x007FFFFF, 0x00800000,
            0x7F7FFFFF, 0x437F8000],
    "f64": [0, 1 << 63, 0x3FF0 << 48, 0xBFF8 << 48, 0x3FE0 << 48, 0x4004 << 48, 0x41DFFFFFFFC00000, 0x41E0 << 48, 0xC1E0 << 48,
            0x43E0 << 48, 0xC3E0 << 48, 0x43F0 << 48, 0x7FF0 << 48, 0xFFF0 << 48, 0x7FF8 << 48, 1, 0x3FEFFFFFFFFFFFFF,
            0x4330 << 48, 0x47F0 << 48],
}  # fmt: skip
APART = 1 << 33


def interpret(
    mnemonic: str, operands: list[str], results: list[str], cases: list[list[int]], setup: str = "", last: str = ""
) -> list[list[int]]:
    """Bits of each result for each case, as the interpreter has them. `setup` runs before, `last` is one more operand."""
    registers = [REGISTER[WIDTHS[kind]] for kind in operands]
    targets = [REGISTER[WIDTHS[kind]] for kind in results]
    lines = []
    for index, kind in enumerate(registers):
        lines.append(f".reg .{kind} a{index}; ld.global.u64 w, [in+{8 * index}];")
        narrow = {"b16": "cvt.u16.u64", "b32": "cvt.u32.u64", "b64": "mov.b64", "pred": "setp.ne.u64"}[kind]
        lines.append(f"{narrow} a{index}, w{', 0' if kind == 'pred' else ''};")
    lines += [f".reg .{kind} r{index};" for index, kind in enumerate(targets)]
    if ".cc" in mnemonic or mnemonic[:4] in ("addc", "subc"):
        targets, outs = [*targets[:1], "b32"], ["r0"]
        tail = ".reg .b32 r1; addc.u32 r1, 0, 0;" if ".cc" in mnemonic else ""
    else:
        outs, tail = [f"r{i}" for i in range(len(results))], ""
    lines.append(f"{setup} {mnemonic} {'|'.join(outs)}, {', '.join(f'a{i}' for i in range(len(operands)))}{last}; {tail}")
    shown = len(results)
    for index, kind in enumerate(targets[:shown]):
        wide = {
            "b16": "cvt.u64.u16 w, {};", "b32": "cvt.u64.u32 w, {};", "b64": "mov.b64 w, {};", "pred": "selp.u64 w, 1, 0, {};",
        }[kind].format(f"r{index}")  # fmt: skip
        for half, store in enumerate(("and.b64 v, w, 0xffffffff;", "shr.u64 v, w, 32;")):
            lines.append(
                f"{wide} {store} add.u64 v, v, out; add.u64 v, v, {(2 * index + half) * APART * len(cases)}; st.global.u8 [v], 0;"
            )
    text = (
        ".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 p, .param .u64 q) {"
        ".reg .b64 in, out, w, v; .reg .b32 t, c; .reg .pred z; ld.param.u64 in, [p]; ld.param.u64 out, [q];"
        "mov.u32 t, %tid.x; mov.u32 c, %ctaid.x;"
        f"mad.lo.u32 t, c, 256, t; setp.ge.u32 z, t, {len(cases)}; @z exit;"
        f"mul.wide.u32 w, t, {8 * max(len(operands), 1)}; add.u64 in, in, w; mul.wide.u32 w, t, 8;"
        f"mul.lo.u64 w, w, {APART // 8}; add.u64 out, out, w;" + "\n".join(lines) + " ret; }"
    )
    data = np.array([[*case] for case in cases], np.uint64).reshape(-1)
    span = 2 * shown * APART * len(cases)
    source, target = Buffer(0x10000, data.nbytes, data), Buffer(1 << 50, span)
    found = footprint(parse(text, name="k.ptx"), "k", -(-len(cases) // 256), 256, [source, target])
    assert found.complete
    starts = found["q"].writes.starts
    assert len(starts) == 2 * shown * len(cases)
    values = [[0] * shown for _ in cases]
    for start in starts.tolist():
        part, rest = divmod(start, APART * len(cases))
        values[rest // APART][part // 2] |= rest % APART << 32 * (part % 2)
    return values


def edges(kind: str) -> list[int]:
    return FLOATS[kind] if kind[0] == "f" else [0, 1] if kind == "pred" else EDGES[WIDTHS[kind]]


def check(
    mnemonic: str, operands: list[str], results: list[str], pools: list[list[int]] | None = None, most: int = 1500,
    setup: str = "",
    carry: bool = False,
) -> None:  # fmt: skip
    pools = pools or [edges(kind) for kind in operands]
    cases = [list(case) for case in itertools.product(*pools)]
    random.Random(mnemonic).shuffle(cases)
    rng = random.Random(len(mnemonic))
    cases = cases[:most]
    if all(kind[0] != "f" for kind in operands):
        cases += [[rng.getrandbits(WIDTHS[kind]) for kind in operands] for _ in range(60)]
    expected, kept = [], []
    for case in cases:
        try:
            expected.append(evaluate(mnemonic, case, carry)[: len(results)])
            kept.append(case)
        except Undefined:
            continue
    found = interpret(mnemonic, operands, results, kept, setup)
    for case, want, got in zip(kept, expected, found, strict=True):
        want = [unsigned(signed(value, 8), 16) if kind == "s8" else value for value, kind in zip(want, results, strict=True)]
        assert got == want, f"{mnemonic} {[hex(v) for v in case]}: {[hex(v) for v in got]}, not {[hex(v) for v in want]}"


INTEGERS = [f"{sign}{width}" for sign in "us" for width in (16, 32, 64)]
SIMPLE = [
    *(f"{op}.{kind}" for op in ("add", "sub", "mul.lo", "mul.hi", "div", "rem", "min", "max") for kind in INTEGERS),
    *(f"{op}.b{width}" for op in ("and", "or", "xor") for width in (16, 32, 64)),
    *(f"{op}.pred" for op in ("and", "or", "xor")),
    *(f"mul24.{half}.{kind}" for half in ("lo", "hi") for kind in ("u32", "s32")),
    *(f"{op}{ftz}.f32" for op in ("add", "sub", "mul", "min", "max", "div.rn") for ftz in ("", ".ftz")),
    *(f"{op}.f64" for op in ("add", "sub", "mul", "min", "max", "div.rn")),
]


@pytest.mark.parametrize("mnemonic", SIMPLE)
def test_two_operands_of_one_type(mnemonic):
    kind = mnemonic.rpartition(".")[2]
    check(mnemonic, [kind, kind], [kind])


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_products(kind):
    wide = f"{kind[0]}{2 * WIDTHS[kind]}"
    check(f"mul.wide.{kind}", [kind, kind], [wide])
    check(f"mad.wide.{kind}", [kind, kind, wide], [wide])


@pytest.mark.parametrize("kind", INTEGERS)
def test_multiply_and_add(kind):
    check(f"mad.lo.{kind}", [kind] * 3, [kind])
    check(f"mad.hi.{kind}", [kind] * 3, [kind])
    check(f"sad.{kind}", [kind] * 3, [kind])


@pytest.mark.parametrize("mnemonic", ["mad24.lo.u32", "mad24.hi.u32", "mad24.lo.s32", "mad24.hi.s32"])
def test_multiply_and_add_of_24_bits(mnemonic):
    kind = mnemonic[-3:]
    check(mnemonic, [kind] * 3, [kind])


@pytest.mark.parametrize(
    "mnemonic",
    [*(f"{op}.s{w}" for op in ("neg", "abs") for w in (16, 32, 64)), *(f"{op}.b{w}" for op in ("not", "cnot")
       for w in (16, 32, 64)),
     "not.pred", "neg.f32", "abs.f32", "neg.ftz.f32", "abs.ftz.f32", "neg.f64", "abs.f64", *(f"mov.b{w}" for w in (16, 32, 64))],
)  # fmt: skip
def test_one_operand(mnemonic):
    kind = mnemonic.rpartition(".")[2]
    check(mnemonic, [kind], [kind])


@pytest.mark.parametrize(
    "mnemonic", [*(f"shl.b{w}" for w in (16, 32, 64)), *(f"shr.{k}{w}" for k in "usb" for w in (16, 32, 64))]
)
def test_shifts_by_more_than_the_width(mnemonic):
    kind = mnemonic.rpartition(".")[2]
    check(mnemonic, [kind, "u32"], [kind], [edges(kind), AMOUNTS])


@pytest.mark.parametrize("mnemonic", [f"shf.{way}.{mode}.b32" for way in "lr" for mode in ("clamp", "wrap")])
def test_funnel_shifts(mnemonic):
    check(mnemonic, ["b32"] * 3, ["b32"], [edges("u32"), edges("u32"), AMOUNTS])


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_field_extract(kind):
    check(f"bfe.{kind}", [kind, "u32", "u32"], [kind], [[*edges(kind), 0x9234_5678], AMOUNTS, AMOUNTS], most=5000)


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_bit_field_insert(kind):
    check(f"bfi.{kind}", [kind, kind, "u32", "u32"], [kind], [edges(kind)[-4:], edges(kind)[:5], AMOUNTS, AMOUNTS], most=3000)


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_counting_bits(kind):
    pool = [[*edges(kind), *(1 << i for i in range(WIDTHS[kind])), *((1 << i) - 1 for i in range(WIDTHS[kind]))]]
    for opcode in ("popc", "clz"):
        check(f"{opcode}.{kind}", [kind], ["u32"], pool)
    check(f"brev.{kind}", [kind], [kind], pool)
    for sign in "us":
        check(f"bfind.{sign}{kind[1:]}", [f"{sign}{kind[1:]}"], ["u32"], pool)
        check(f"bfind.shiftamt.{sign}{kind[1:]}", [f"{sign}{kind[1:]}"], ["u32"], pool)


def test_permuted_bytes():
    selectors = [0x3210, 0x7654, 0x0123, 0xBA98, 0xFEDC, 0x8F08, 0xFFFF_4401]
    check("prmt.b32", ["b32"] * 3, ["b32"], [[0x8001_7F80, 0x1234_5678], [0xFF00_80FF, 0x9ABC_DEF0], selectors])


@pytest.mark.parametrize("table", [0x80, 0xFE, 0x96, 0xC0, 0x1B, 0, 0xFF, 0xE8])
def test_three_way_logic(table):
    pools = [[0x0F0F_3355, 0, 0xFFFF_FFFF], [0x00FF_5533], [0xF0F0_0F0F, 0x8000_0001]]
    cases = [list(case) for case in itertools.product(*pools)]
    found = interpret("lop3.b32", ["b32"] * 3, ["b32"], cases, last=f", {table}")
    assert found == [evaluate("lop3.b32", [*case, table]) for case in cases]


@pytest.mark.parametrize("kind", [*INTEGERS, "b32", "b64", "f32", "f64"])
def test_comparisons(kind):
    hows = ["eq", "ne"]
    if kind[0] != "b":
        hows += ["lt", "le", "gt", "ge"]
    if kind[0] == "u":
        hows += ["lo", "ls", "hi", "hs"]
    if kind[0] == "f":
        hows += ["equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
    for how in hows:
        check(f"setp.{how}.{kind}", [kind, kind], ["pred", "pred"])


@pytest.mark.parametrize("join", ["and", "or", "xor"])
def test_comparisons_joined_with_a_predicate(join):
    check(f"setp.lt.{join}.s32", ["s32", "s32", "pred"], ["pred", "pred"])
    check(f"setp.neu.{join}.f32", ["f32", "f32", "pred"], ["pred", "pred"])
    check(f"set.ge.{join}.u32.s32", ["s32", "s32", "pred"], ["u32"])
    negated = f"setp.eq.{join}.u32 z, a0, 5, !z; selp.b32 a0, 1, 0, z;"  # z was false
    assert interpret("mov.b32", ["b32"], ["b32"], [[5], [6]], negated) == [[int(join != "xor")], [int(join != "and")]]


def test_comparisons_flush_subnormals_where_they_say_so():
    for how in ("eq", "lt", "ne", "gtu"):
        check(f"setp.{how}.ftz.f32", ["f32", "f32"], ["pred"])
    check("slct.ftz.u32.f32", ["u32", "u32", "f32"], ["u32"])


def test_set_makes_masks_and_floats():
    check("set.lt.u32.s32", ["s32", "s32"], ["u32"])
    check("set.gt.f32.u32", ["u32", "u32"], ["f32"])
    check("set.neu.u32.f32", ["f32", "f32"], ["u32"])


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "s32", "f32", "f64"])
def test_selections(kind):
    check(f"selp.{kind}", [kind, kind, "pred"], [kind])
    check(f"slct.{kind}.s32", [kind, kind, "s32"], [kind])
    check(f"slct.{kind}.f32", [kind, kind, "f32"], [kind])


CONVERTED = ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"]


@pytest.mark.parametrize("to", CONVERTED)
@pytest.mark.parametrize("kind", CONVERTED)
def test_integers_become_integers(to, kind):
    if to != kind:
        check(f"cvt.{to}.{kind}", [kind], [to], narrow(kind))
    check(f"cvt.sat.{to}.{kind}", [kind], [to], narrow(kind))


def narrow(kind: str) -> list[list[int]]:
    return [[*edges(kind), 127, 128, 255, 0x55]]


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("rounding", ["rni", "rzi", "rmi", "rpi"])
def test_floats_become_integers(kind, rounding):
    for to in CONVERTED:
        check(f"cvt.{rounding}.{to}.{kind}", [kind], [to])
    check(f"cvt.{rounding}.{kind}.{kind}", [kind], [kind])
    if kind == "f32":
        check(f"cvt.{rounding}.ftz.s32.f32", ["f32"], ["s32"])
        check(f"cvt.{rounding}.ftz.f32.f32", ["f32"], ["f32"])


@pytest.mark.parametrize("to", ["f32", "f64"])
def test_numbers_become_floats(to):
    ties = [16777217, 16777219, (1 << 24) + 2, (1 << 53) + 1, (1 << 53) + 3, (1 << 40) + (1 << 15), 0x7FFFFFC0, 0xFFFFFF80]
    for kind in CONVERTED:
        pool = [[v & ((1 << WIDTHS[kind]) - 1) for v in (*edges(kind), *ties)]]
        check(f"cvt.rn.{to}.{kind}", [kind], [to], pool)
    check(f"cvt{'.rn' if to == 'f32' else ''}.{to}.{'f64' if to == 'f32' else 'f32'}", ["f64" if to == "f32" else "f32"], [to])


@pytest.mark.parametrize(
    "mnemonic", ["cvt.rz.f32.u32", "cvt.rp.f32.s64", "cvt.rm.f32.f64", "cvt.rn.f16.f32", "cvt.rn.sat.f32.f64"]
)
def test_conversions_that_are_not_modelled_are_unknown(mnemonic):
    *_, to, kind = mnemonic.split(".")
    with pytest.raises(NotDerivable, match="address depends on data"):
        interpret(mnemonic, [kind], [{"f16": "b16"}.get(to, to)], [[5]])


@pytest.mark.parametrize(
    ("mnemonic", "operands", "result"),
    [
        ("add.sat.s32", ["s32", "s32"], "s32"), ("mad.hi.sat.s32", ["s32"] * 3, "s32"), ("mad24.hi.sat.s32", ["s32"] * 3, "s32"),
        ("add.sat.f32", ["f32", "f32"], "f32"), ("add.rz.f32", ["f32", "f32"], "f32"), ("fma.rn.f32", ["f32"] * 3, "f32"),
        ("ex2.approx.f32", ["f32"], "f32"), ("min.NaN.f32", ["f32", "f32"], "f32"), ("dp4a.u32.u32", ["u32"] * 3, "u32"),
        ("prmt.b32.f4e", ["b32"] * 3, "b32"), ("copysign.f32", ["f32", "f32"], "f32"), ("sub.rp.f64", ["f64", "f64"], "f64"),
        ("mul.ftz.sat.f32", ["f32", "f32"], "f32"), ("div.approx.f32", ["f32", "f32"], "f32"),
        ("max.s16x2", ["b32", "b32"], "b32"),
        ("neg.f16", ["b16"], "b16"), ("abs.bf16", ["b16"], "b16"), ("add.f16", ["b16", "b16"], "b16"),
        ("min.relu.s32", ["s32"] * 2, "s32"),
        ("max.xorsign.abs.f32", ["f32", "f32"], "f32"), ("min.f32", ["f32", "f32", "f32"], "f32"),
        ("add.u16x2", ["b32", "b32"], "b32"),
        ("vadd.u32.u32.u32", ["u32", "u32"], "u32"), ("fns.b32", ["b32"] * 3, "b32"), ("mul.lo.sat.s32", ["s32"] * 2, "s32"),
        ("div.full.f32", ["f32", "f32"], "f32"), ("abs.ftz.f16x2", ["b32"], "b32"), ("tanh.approx.f32", ["f32"], "f32"),
        ("cvt.pack.sat.u8.s32.b32", ["s32", "s32", "b32"], "u32"), ("cvt.rna.tf32.f32", ["f32"], "b32"),
    ],
)  # fmt: skip
def test_what_has_no_exact_meaning_is_unknown(mnemonic, operands, result):
    """None of these may quietly turn into its plain namesake."""
    with pytest.raises(NotDerivable, match="depends on data"):
        interpret(mnemonic, operands, [result], [[3] * len(operands)])


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("opcode", ["div", "rem"])
def test_division_by_zero_is_unknown(kind, opcode):
    with pytest.raises(NotDerivable, match="address depends on data"):
        interpret(f"{opcode}.{kind}", [kind, kind], [kind], [[7, 0]])


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("carry", [0, 1])
def test_carry_chains(width, carry):
    for sign in "us":
        kind = f"{sign}{width}"
        first = f"add.cc.u32 t, {'0xffffffff' if carry else 0}, 1;"
        for opcode in ("add", "sub"):
            check(f"{opcode}.cc.{kind}", [kind, kind], [kind, "u32"])
            check(f"{opcode}c.{kind}", [kind, kind], [kind], setup=first, carry=bool(carry))
            check(f"{opcode}c.cc.{kind}", [kind, kind], [kind, "u32"], setup=first, carry=bool(carry))


@pytest.mark.parametrize("kind", ["u32", "s32"])
@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_extension_from_a_bit(kind, mode):
    check(f"szext.{mode}.{kind}", [kind, "u32"], [kind], [[*edges(kind), 0x5A5A_A5A5], AMOUNTS])


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_bit_masks(mode):
    check(f"bmsk.{mode}.b32", ["b32", "b32"], ["b32"], [AMOUNTS, AMOUNTS])


def test_registers_are_packed_and_unpacked():
    cases = [[0x1122_3344_5566_7788], [0xFFEE_0000_8000_0001]]
    setup = ".reg .b32 lo, hi; mov.b64 {lo, hi}, a0; mov.b64 a0, {hi, lo};"
    assert interpret("mov.b64", ["b64"], ["b64"], cases, setup) == [[(c & 0xFFFFFFFF) << 32 | c >> 32] for (c,) in cases]
    setup = ".reg .b16 h<4>; mov.b64 {h0, h1, h2, h3}, a0; mov.b64 a0, {h3, h1, h2, h0};"
    words = [[c >> 16 * i & 0xFFFF for i in range(4)] for (c,) in cases]
    expected = [[w[3] | w[1] << 16 | w[2] << 32 | w[0] << 48] for w in words]
    assert interpret("mov.b64", ["b64"], ["b64"], cases, setup) == expected
    setup = ".reg .b16 h<2>; .reg .b32 x; mov.b64 {_, x}, a0; mov.b32 {h0, h1}, x; mov.b32 x, {h1, 7}; cvt.u64.u32 a0, x;"
    assert interpret("mov.b64", ["b64"], ["b64"], cases, setup) == [[7 << 16 | c >> 48] for (c,) in cases]


def test_float_constants_keep_their_bits():
    """A NaN has a payload, and a decimal constant is what its type makes of it."""
    for text, width, bits in (
        ("0f7FFFFFFF", 32, 0x7FFFFFFF), ("0fFFC00001", 32, 0xFFC00001), ("0f3F800000", 32, 0x3F800000),
        ("0d7FF8000000000123", 64, 0x7FF8000000000123),
    ):  # fmt: skip
        register = f"b{width}"
        assert interpret(f"mov.{register}", [register], [register], [[0]], f"mov.{register} a0, {text};") == [[bits]]
        assert interpret(f"mov.{register}", [register], [register], [[0]], f"mov.f{width} a0, {text};") == [[bits]]
    assert interpret("mov.b32", ["b32"], ["b32"], [[0]], "mov.f32 a0, 1.5;") == [[0x3FC00000]]


def test_loads_extend_into_wider_registers():
    cases = [[0xFFFF_FFFF_FFFF_FF80], [0x1234_5678_9ABC_DE7F]]
    for kind, load in (("s8", "ld.global.s8"), ("u8", "ld.global.u8"), ("s16", "ld.global.s16"), ("u32", "ld.global.u32")):
        width = WIDTHS[kind]
        expected = []
        for (case,) in cases:
            value = case & ((1 << width) - 1)
            if kind[0] == "s" and value >> width - 1:
                value |= (1 << 64) - (1 << width)
            expected.append([value])
        assert interpret("mov.b64", ["b64"], ["b64"], cases, f"{load} a0, [in];") == expected
