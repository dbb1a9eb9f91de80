"""Layout, comments and the order of modifiers change nothing but spans; damaged text is a PtxError and nothing else."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_compile.ptx_tools.parsing import parse
from tessera_compile.ptx_tools.printing import to_text
from tessera_compile.ptx_tools.syntax import PtxError
from tests.ptx_tools.corpus import DATA, static_files
from tests.ptx_tools.trees import HEAD, instruction, shape

SMALL = {path.name: path.read_text() for path in static_files() if path.stat().st_size < 3000}
GAPS = ["", " ", "\n", "\t", "\r\n", "\f", "/* ; } */", "/**/", "/* ** / \n */", "// { ret;\n", '/* " */']

# Not the tokenizer of the parser: strings, gaps of white space and comments, marks, and the rest in runs.
PIECE = re.compile(
    r"""(?P<gap>(?:\s|//[^\n]*|/\*.*?\*/)+)|"[^"]*"|<<|>>|<=|>=|==|!=|&&|\|\||(?P<word>(?:[^\s";,{}()\[\]=<>+*|&@!?:/-]|::)+)|.""",
    re.DOTALL,
)


def split(text: str) -> list[tuple[str, bool]]:
    """Pieces that may not be cut, and whether something must stand between each and the next."""
    pieces: list[tuple[str, bool]] = []
    for found in PIECE.finditer(text):
        if not found["gap"]:
            pieces.append((found[0], False))
        elif pieces:
            pieces[-1] = (pieces[-1][0], True)
    return pieces


def laid_out(text: str, gaps: list[str]) -> str:
    """The text with these gaps in turn, with a blank where a gap is needed and there is none."""
    out = [gaps[-1]]
    for index, (piece, needed) in enumerate(split(text)):
        gap = gaps[index % len(gaps)]
        out += [piece, gap or (" " if needed else "")]
    return "".join(out)


@pytest.mark.parametrize("path", static_files(), ids=lambda path: path.name)
def test_all_on_one_line(path):
    text = path.read_text()
    line = laid_out(text, [""])
    assert "\n" not in line
    module = parse(line)
    assert shape(module) == shape(parse(text))
    assert to_text(module) == to_text(parse(text))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(SMALL)), st.lists(st.sampled_from(GAPS), min_size=1, max_size=40))
def test_layout_does_not_matter(name, gaps):
    text = SMALL[name]
    assert shape(parse(laid_out(text, gaps))) == shape(parse(text))


WORDS = {
    "ld": ["global", "relaxed", "gpu", "L1::no_allocate", "L2::cache_hint", "L2::128B", "v4", "u32"],
    "st": ["shared::cluster", "release", "cluster", "v2", "b64"],
    "atom": ["global", "acq_rel", "sys", "add", "noftz", "v2", "bf16x2"],
}
OPERANDS = {"ld": "{a, b, c, d}, [%rd1+-8], %rd2", "st": "[%r1], {a, b}", "atom": "{a, b}, [%rd1], {c, d}"}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_modifiers_in_any_order(data):
    """The same set is read, in the order of writing, with blanks before the dots or without."""
    opcode = data.draw(st.sampled_from(sorted(WORDS)))
    words = data.draw(st.permutations(WORDS[opcode]))
    blanks = [data.draw(st.sampled_from(["", " ", "\n\t", "/* .v8 */"])) for _ in words]
    guard = data.draw(st.sampled_from(["", "@p ", "@!%p1 "]))
    mnemonic = opcode + "".join(f"{blank}.{word}" for blank, word in zip(blanks, words, strict=True))
    found = instruction(f"{guard}{mnemonic} {OPERANDS[opcode]};")
    assert (found.opcode, found.modifiers) == (opcode, tuple(words))
    usual = instruction(f"{guard}{'.'.join([opcode, *WORDS[opcode]])} {OPERANDS[opcode]};")
    assert sorted(found.modifiers) == sorted(usual.modifiers)
    assert (found.operands, found.predicate, found.negated) == (usual.operands, usual.predicate, usual.negated)


def check_damaged(text: str) -> None:
    try:
        module = parse(text)
    except PtxError as error:
        assert re.match(r"<ptx>:\d+:\d+: expected ", str(error))  # noqa: PT017
        return
    printed = to_text(module)
    assert to_text(parse(printed)) == printed


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_damage_is_an_error_or_another_module(data):
    """Bytes are replaced, taken out, put in and moved; what still parses prints stably."""
    text = SMALL[data.draw(st.sampled_from(sorted(SMALL)))]
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 12)))
        other = data.draw(st.integers(0, len(text)))
        new = data.draw(
            st.one_of(st.binary(max_size=3).map(lambda raw: raw.decode("latin-1")), st.just(text[other : other + 20]))
        )
        text = text[:start] + new + text[end:]
    check_damaged(text)


MARKS = [
    *'.,;:{}()[]<>@!|+-~?=%"/',
    ".reg",
    ".align",
    ".section",
    ".loc",
    ".file",
    "1",
    "0x",
    "0f3F",
    "x",
    "generic",
    "call",
    "\n",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*MARKS, ".pragma", ".global", ".param", ".entry", ".func", ".b32", "mov.u32"]), max_size=12))
def test_any_row_of_tokens(tokens):
    check_damaged(HEAD + " ".join(tokens))
    check_damaged(HEAD + ".entry k { " + " ".join(tokens))
    check_damaged(HEAD + ".entry k { mov.u32 a, " + " ".join(tokens) + "; }")


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.text(max_size=60), st.binary(max_size=60).map(lambda raw: raw.decode("latin-1"))))
def test_junk(text):
    with pytest.raises(PtxError):
        parse(text)
    check_damaged(HEAD + text)


def test_the_files_are_there():
    """The samples above are drawn from files that exist."""
    assert len(SMALL) >= 15
    assert (DATA / "hand" / "h1_syntax.ptx").name in SMALL
