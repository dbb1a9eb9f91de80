"""Tree to text: the same machine code comes out, and spans say where in the text each node stands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera_compile.ptx_tools.assembling import assemble, same_code
from tessera_compile.ptx_tools.parsing import parse
from tessera_compile.ptx_tools.printing import instruction as print_instruction
from tessera_compile.ptx_tools.printing import to_text
from tessera_compile.ptx_tools.syntax import Block, Function, Instruction, Module, PtxError, Registers, Span, Variable
from tests.ptx_tools.corpus import DATA, needs_ptxas, skip_if_too_new, static_files, triton_cases, triton_ptx
from tests.ptx_tools.trees import HEAD, instruction, shape

# ptxas does not take `($str1)` as an operand, though other tools write it.
NOT_FOR_PTXAS = {"b09_intelllvm4623_paren_symbol.ptx"}
EVERY_CASE = [*static_files(), *triton_cases()]


def every_case(function):
    """Run a test for each committed file and each Triton kernel."""
    ids = [case.name if isinstance(case, Path) else case for case in EVERY_CASE]
    return pytest.mark.parametrize("case", EVERY_CASE, ids=ids)(function)


def text_of(case: Path | str) -> str:
    return case.read_text() if isinstance(case, Path) else triton_ptx(case).ptx


@every_case
def test_printing_is_a_fixed_point(case):
    module = parse(text_of(case))
    printed = to_text(module)
    again = parse(printed)
    assert shape(again) == shape(module)
    assert to_text(again) == printed


@needs_ptxas
@every_case
def test_what_is_printed_assembles_to_the_same_code(case):
    text = text_of(case)
    if isinstance(case, Path) and case.name in NOT_FOR_PTXAS:
        with pytest.raises(PtxError, match="ptxas: Parsing error"):
            assemble(text)
        return
    printed = to_text(parse(text))
    skip_if_too_new(text)
    assert same_code(text, printed)
    assert assemble(printed).kernels == assemble(text).kernels


@pytest.mark.parametrize(
    "text",
    [
        "@!%p1 bra.uni L;",
        "ld.global.u32 %r1, [%rd1+-4];",
        "ld.local.u32 %r1, [64];",
        "mov.u64 %rd1, x+-4;",
        "mov.u64 %rd1, generic(x)+8;",
        "mov.b64 {%r1, _}, %rd1;",
        "setp.lt.and.u32 p|q, %r1, 010, !p;",
        "call.uni (r), f, (a, b);",
        "tex.2d.v4.f32.s32 {f, f, f, f}, [t, s, {%r1, %r2}];",
        "mov.f32 f, 0fFF800000;",
        "mov.f32 f, -2.5e0;",
    ],
)
def test_an_instruction_as_it_is_written(text):
    assert print_instruction(instruction(text)) == text


def test_computed_constants_are_printed_as_numbers():
    texts = ["(1<<2)+3", "~0", "1.0/3.0", "-(0x10)"]
    printed = [print_instruction(instruction(f"mov.b64 %rd1, {text};")) for text in texts]
    assert printed == [f"mov.b64 %rd1, {text};" for text in ("7", "-1", "0d3FD5555555555555", "-16")]


def test_the_whole_of_a_small_module():
    text = (
        HEAD
        + "// comment\n.visible .entry k(.param .align 8 .b8 a[16]) .maxntid 32,1,1 { .reg .b32 r<2>; L: @p mov.u32 r1,8/2; }"
    )
    assert to_text(parse(text)).splitlines() == [
        ".version 8.7",
        ".target sm_90a",
        ".address_size 64",
        ".visible .entry k(.param .align 8 .b8 a[16])",
        ".maxntid 32, 1, 1",
        "{",
        "  .reg .b32 r<2>;",
        "L:",
        "  @p mov.u32 r1, 4;",
        "}",
    ]


# -- spans


def parts(module: Module) -> Iterator[Span]:
    """Spans of what stands in a module, in order: of a function its parts, of a block its brackets and its parts."""
    for item in module.items:
        if isinstance(item, Function) and item.body:
            start = item.body.span[0]
            for each in (*(item.returns or ()), *(item.params or ()), *item.tuning):
                assert item.span[0] < each.span[0] <= each.span[1] <= start
            yield item.span[0], start
            yield from inside(item.body)
            assert item.span[1] == item.body.span[1]
        else:
            yield item.span


def inside(block: Block) -> Iterator[Span]:
    yield block.span[0], block.span[0] + 1
    for item in block.items:
        if isinstance(item, Block):
            yield from inside(item)
        else:
            yield item.span
    yield block.span[1] - 1, block.span[1]


@every_case
def test_spans_and_what_is_between_them_are_the_text(case):
    """Spans follow one another, and between them is nothing but white space, comments and the marks between variables."""
    text = text_of(case)
    module = parse(text)
    pieces, at, first = [], 0, 0
    for start, end in parts(module):
        if start == first and pieces:  # the next variable of one statement: its span begins where the statement does
            start = at
        assert at <= start < end
        gap = text[at:start]
        assert not parse_gap(gap), gap
        pieces += [gap, text[start:end]]
        first, at = start, end
    assert "".join(pieces) + text[at:] == text
    assert not parse_gap(text[at:])


def parse_gap(gap: str) -> str:
    """What is left of a gap without comments and the marks that belong to no node."""
    lines = (line.split("//")[0] for line in gap.splitlines())
    text = " ".join(lines)
    while "/*" in text:
        before, _, rest = text.partition("/*")
        text = before + rest.partition("*/")[2]
    return text.strip(" \t\r\n;,")


@every_case
def test_the_text_of_an_instruction_is_that_instruction(case):
    module = parse(text_of(case))
    text = module.text
    variables = "".join(text[slice(*item.span)] + ";\n" for item in module.items if isinstance(item, Variable))
    for function in module.functions.values():
        known = [item for item in (function.body.items if function.body else ()) if isinstance(item, Registers | Variable)]
        declared = "".join(text[slice(*item.span)].rstrip(";") + ";\n" for item in known)
        found = list(function.instructions())
        again = parse(HEAD + variables + ".func f {" + declared + "\n".join(text[slice(*item.span)] for item in found) + "}")
        assert shape(tuple(again.functions["f"].instructions())) == shape(tuple(found))
        assert all(text[item.span[0]] in "@" + item.opcode[0] and text[item.span[1] - 1] == ";" for item in found)


def test_an_edit_at_a_span():
    """What tools do: put text before an instruction, and leave all else as it is."""
    text = (DATA / "hand" / "h1_syntax.ptx").read_text()
    module = parse(text)
    loads = [item for item in module.kernel(None).instructions() if item.mnemonic == "ld.global.u32"]
    assert len(loads) == 3
    edited = text
    for item in reversed(loads):
        edited = edited[: item.span[0]] + "mov.u32 %r15, 1; " + edited[item.span[0] :]
    changed = list(parse(edited).kernel(None).instructions())
    inserted = [at for at, item in enumerate(changed) if item.mnemonic == "mov.u32" and item.operands[0].text == "%r15"]
    assert [changed[at + 1].mnemonic for at in inserted] == ["ld.global.u32"] * 3
    kept = tuple(item for at, item in enumerate(changed) if at not in inserted)
    assert shape(kept) == shape(tuple(module.kernel(None).instructions()))


def test_places_count_from_one():
    module = parse(HEAD + ".entry k {\n  ret;\n}\n", name="m.ptx")
    (ret,) = module.kernel("k").instructions()
    assert isinstance(ret, Instruction)
    assert module.where(ret.span) == "m.ptx:5:3"
    assert module.where(module.kernel("k").span) == "m.ptx:4:1"
    assert module.text[slice(*ret.span)] == "ret;"
