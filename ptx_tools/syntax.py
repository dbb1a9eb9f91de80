"""The tree of a PTX module. Every node keeps the span of source text it was read from, so that tools can edit the text itself.

The tree is what `parsing.parse` returns and `printing.to_text` prints. It is deliberately shallow: what PTX calls an instruction
is one node with an opcode, a tuple of modifiers and operands, and a directive that nothing here needs to understand (`.loc`,
`.pragma`, a DWARF section) keeps its tokens and nothing else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

Span = tuple[int, int]

NOWHERE: Span = (0, 0)


class PtxError(ValueError):
    """PTX that cannot be used. The message begins `FILE:LINE:COLUMN:`."""


@dataclass(frozen=True, slots=True)
class Name:
    """A register, a special register (`%tid.x`), a variable, a label, a function, or the sink `_`."""

    text: str


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant. `value` is an int, or a float; `text` is how it was written, which for floats carries the exact bits.

    Two are equal where their texts are, for a NaN does not equal itself.
    """

    value: int | float = field(compare=False)
    text: str


@dataclass(frozen=True, slots=True)
class Offset:
    """A symbol plus a constant number of bytes: `x+8`, `generic(x)+4`, or `arr[3]` as an operand of mov (12 bytes in `.u32`)."""

    base: Name
    bytes: int
    generic: bool = False


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`, in bytes, or `arr[3]` outside of mov. `base` is None where the address is a constant.

    `coordinates` are those of `[map, {x, y}]`. `written` says that an offset of zero was written out: ptxas adds it without
    optimization, so it is printed again; it makes no other address.
    """

    base: Name | None
    offset: int
    coordinates: tuple[Operand, ...] = ()
    sampler: Name | None = None
    written: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b}`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """`(a, b)`: the arguments or results of a call."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """`a|b`: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Not:
    """`!p`."""

    operand: Name


Operand = Name | Literal | Offset | Address | Vector | Group | Pair | Not


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `predicate` is the name of the guarding register, `negated` whether it is `@!p`."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: str | None
    negated: bool
    span: Span

    @property
    def mnemonic(self) -> str:
        return ".".join((self.opcode, *self.modifiers))


@dataclass(frozen=True, slots=True)
class Label:
    name: str
    span: Span


@dataclass(frozen=True, slots=True)
class Directive:
    """Anything that is carried along: `.loc`, `.file`, `.pragma`, `.section`, `.branchtargets` …; `tokens` are its words."""

    name: str
    tokens: tuple[str, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Registers:
    """`.reg .b32 %r<16>, a;`: (name, count) for each, count None where the name stands for itself."""

    type: str
    vector: str | None
    names: tuple[tuple[str, int | None], ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable in a state space. `nbytes` is None for an array of unknown size, `extern .shared` most of all.

    `qualifiers` are the words that stand before and between (`.visible`, `.align 16`, `.attribute(…)`, `.ptr .global`) in order;
    `initial` are the tokens of the initialiser, () where there is none.
    """

    space: str
    type: str
    name: str
    count: int | None
    dims: tuple[int | None, ...]
    vector: str | None
    align: int
    linkage: tuple[str, ...]
    qualifiers: tuple[str, ...]
    initial: tuple[str, ...]
    span: Span

    @property
    def nbytes(self) -> int | None:
        size = TYPE_BYTES.get(self.type, 8) * {None: 1, "v2": 2, "v4": 4, "v8": 8}[self.vector] * (self.count or 1)
        for dim in self.dims:
            if dim is None:
                return None
            size *= dim
        return size


@dataclass(frozen=True, slots=True)
class Block:
    """`{ … }`: a scope of its own."""

    items: tuple[Statement, ...]
    span: Span


Statement = Instruction | Label | Directive | Registers | Variable | Block


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel (`entry`) or a device function. `body` is None for a declaration; `tuning` are `.maxntid` and the like."""

    entry: bool
    name: str
    linkage: tuple[str, ...]
    returns: tuple[Variable, ...] | None
    params: tuple[Variable, ...] | None
    tuning: tuple[Directive, ...]
    body: Block | None
    span: Span

    def instructions(self) -> Iterator[Instruction]:
        stack = [iter(self.body.items)] if self.body else []
        while stack:
            for item in stack[-1]:
                if isinstance(item, Instruction):
                    yield item
                elif isinstance(item, Block):
                    stack.append(iter(item.items))
                    break
            else:
                stack.pop()


@dataclass(frozen=True)
class Module:
    """One PTX file: `version` as (major, minor), `target` as written (`sm_90a`), `items` in order."""

    name: str
    text: str
    version: tuple[int, int]
    target: str
    target_options: tuple[str, ...]
    address_size: int
    items: tuple[Directive | Variable | Function, ...]
    lines: list[int] = field(repr=False, compare=False, default_factory=list)

    @property
    def functions(self) -> dict[str, Function]:
        """By name; a definition stands before a declaration of the same name."""
        found: dict[str, Function] = {}
        for item in self.items:
            if isinstance(item, Function) and (item.name not in found or found[item.name].body is None):
                found[item.name] = item
        return found

    @property
    def kernels(self) -> dict[str, Function]:
        return {name: function for name, function in self.functions.items() if function.entry and function.body}

    @property
    def variables(self) -> dict[str, Variable]:
        return {item.name: item for item in self.items if isinstance(item, Variable)}

    def kernel(self, name: str | None) -> Function:
        """The kernel of that name, or the only one. Raises PtxError that lists what there is."""
        kernels = self.kernels
        if name is None and len(kernels) == 1:
            return next(iter(kernels.values()))
        if name is None or name not in kernels:
            asked = "has not one kernel" if name is None else f"has no kernel {name!r}"
            raise PtxError(f"{self.name}:1:1: the module {asked}; it has {', '.join(kernels) or 'none'}")
        return kernels[name]

    def place(self, offset: int) -> tuple[int, int]:
        """Line and column, both from 1, of an offset into the text."""
        line = bisect_right(self.lines, offset)
        return line, offset - self.lines[line - 1] + 1

    def where(self, span: Span) -> str:
        line, column = self.place(span[0])
        return f"{self.name}:{line}:{column}"


def line_starts(text: str) -> list[int]:
    starts = [0]
    find = text.find
    at = find("\n")
    while at >= 0:
        starts.append(at + 1)
        at = find("\n", at + 1)
    return starts


TYPE_BYTES = {f"{kind}{bits}": bits // 8 for kind in "bsuf" for bits in (8, 16, 32, 64)} | {
    **dict.fromkeys(("pred", "e4m3", "e5m2", "b1", "b4", "b6"), 1),
    **dict.fromkeys(("bf16", "e4m3x2", "e5m2x2"), 2),
    **dict.fromkeys(("f16x2", "bf16x2", "u16x2", "s16x2", "tf32"), 4),
    **dict.fromkeys(("f32x2", "texref", "samplerref", "surfref"), 8),
    "b128": 16,
    "b1024": 128,
}
