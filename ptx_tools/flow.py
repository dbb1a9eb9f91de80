"""A kernel as one control-flow graph: scopes resolved, calls followed, branches to traps cut.

`flatten(module, kernel)` gives basic blocks of instructions whose names are unique: a register of an inner `{ }` is
another register than its namesake outside, and a callee is copied into each place that calls it, its parameters bound to the
caller's. So the analyses after this know registers, blocks and edges, and nothing of scopes, labels or calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import networkx as nx

from . import isa
from .syntax import (
    Address,
    Block,
    Directive,
    Function,
    Group,
    Instruction,
    Label,
    Literal,
    Module,
    Name,
    Not,
    Offset,
    Operand,
    Pair,
    PtxError,
    Registers,
    Variable,
    Vector,
)

MOST_INSTRUCTIONS = 400_000
"""A kernel that grows beyond this by following its calls is not analysed."""

# Functions of the driver that a kernel may call without a body in the module.
NEVER_RETURN = frozenset({"__assertfail", "__trap"})
NO_MEMORY = frozenset({"vprintf", "free"})  # of the user's: a format and its arguments are strings and locals
FRESH_MEMORY = frozenset({"malloc"})


class CannotFollow(PtxError):
    """A call whose callee is unknown, recursive, or too much. The kernel's footprint is unknown."""


@dataclass(slots=True, eq=False)
class Op:
    """An instruction in its place. `operands` carry resolved names; `source` is what the text says; `index` counts all."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: str | None
    negated: bool
    source: Instruction
    index: int = -1
    block: int = -1
    targets: tuple[int, ...] = ()

    @property
    def instruction(self) -> Instruction:
        return Instruction(self.opcode, self.modifiers, self.operands, self.predicate, self.negated, self.source.span)


@dataclass(slots=True)
class BasicBlock:
    """`successors`: where control may go. A conditional branch ends its block with the target first and the next block second."""

    index: int
    ops: list[Op] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)


@dataclass
class Flow:
    """blocks[0] is the entry; `exit` is the index of a virtual block after all. `types` of registers; `variables` by unique
    name."""

    module: Module
    kernel: Function
    blocks: list[BasicBlock]
    types: dict[str, str]
    variables: dict[str, Variable]
    postdominator: dict[int, int]

    @property
    def exit(self) -> int:
        return len(self.blocks)

    @property
    def ops(self) -> Iterable[Op]:
        for block in self.blocks:
            yield from block.ops

    def where(self, op: Op) -> str:
        return self.module.where(op.source.span)

    def successors(self, index: int) -> list[int]:
        return self.blocks[index].successors if index < self.exit else []

    def region(self, index: int) -> set[int]:
        """The blocks whose running the branch at the end of `index` decides: from its successors up to its post-dominator."""
        stop = self.postdominator[index]
        found: set[int] = set()
        stack = [b for b in self.successors(index) if b != stop]
        while stack:
            block = stack.pop()
            if block in found or block == self.exit:
                continue
            found.add(block)
            stack.extend(b for b in self.successors(block) if b != stop)
        return found


def flatten(module: Module, kernel: str | None = None) -> Flow:
    """The flow graph of a kernel (the only one, where `kernel` is None).

    Raises CannotFollow for indirect and recursive calls and for functions without a body that are not the driver's, UnknownOpcode
    for what `isa` does not know, PtxError for labels and names that nothing declares.
    """
    isa.check_version(module)
    function = module.kernel(kernel)
    builder = _Builder(module)
    builder.body(function, prefix="", bind={}, after=None, stack=(function.name,))
    return builder.finish(function)


@dataclass(slots=True)
class _Mark:
    label: str


class _Builder:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.functions = module.functions
        self.types: dict[str, str] = {}
        self.vectors: dict[str, int] = {}
        self.variables: dict[str, Variable] = dict(module.variables)
        self.stream: list[Op | _Mark] = []
        self.lists: dict[str, tuple[str, ...]] = {}
        self.serial = 0

    def where(self, item: Instruction | Variable | Directive) -> str:
        return self.module.where(item.span)

    # -- one function body

    def body(
        self, function: Function, prefix: str, bind: dict[str, str], after: str | None, stack: tuple[str, ...],
        base: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        scope = dict(base or {})
        for variable in (function.params or ()) + (function.returns or ()):
            unique = bind.get(variable.name)
            if unique is None:
                unique = prefix + variable.name
                self.declare(variable, unique)
            scope[variable.name] = unique
        assert function.body is not None
        self.block(function.body, scope, {}, prefix, after, stack)

    def declare(self, variable: Variable, unique: str) -> None:
        if variable.space == "reg":
            self.types[unique] = variable.type
        else:
            self.variables[unique] = variable

    def block(
        self, block: Block, outer: dict[str, str], labels: dict[str, str], prefix: str, after: str | None, stack: tuple[str, ...]
    ) -> None:  # fmt: skip
        self.serial += 1
        tag = "" if self.serial == 1 else f"@{self.serial}"
        scope, labels = dict(outer), dict(labels)
        for item in block.items:  # labels are seen before they stand
            if isinstance(item, Label):
                labels[item.name] = f"{prefix}{item.name}{tag}"
        previous: Label | None = None
        for item in block.items:
            if isinstance(item, Registers):
                for name, count in item.names:
                    for one in (name,) if count is None else (f"{name}{i}" for i in range(count)):
                        unique = f"{prefix}{one}{tag}"
                        scope[one] = unique
                        self.types[unique] = item.type
                        if item.vector:
                            self.vectors[unique] = int(item.vector[1:])
                            for part in "xyzw"[: int(item.vector[1:])]:
                                self.types[f"{unique}.{part}"] = item.type
            elif isinstance(item, Variable):
                names = [item.name] if item.count is None else [f"{item.name}{i}" for i in range(item.count)]
                for one in names:
                    unique = f"{prefix}{one}{tag}"
                    while unique in self.variables:  # a namesake of a variable of the module, which callees still mean
                        unique += "'"
                    scope[one] = unique
                    self.declare(replace(item, name=one, count=None), unique)
            elif isinstance(item, Label):
                self.stream.append(_Mark(labels[item.name]))
                previous = item
            elif isinstance(item, Directive):
                if item.name in (".branchtargets", ".calltargets") and previous is not None:
                    self.lists[labels[previous.name]] = tuple(labels.get(t, t) for t in item.tokens if t not in (",", ";"))
            elif isinstance(item, Block):
                self.block(item, scope, labels, prefix, after, stack)
            else:
                self.instruction(item, scope, labels, prefix, after, stack)

    def instruction(
        self, item: Instruction, scope: dict[str, str], labels: dict[str, str], prefix: str, after: str | None,
        stack: tuple[str, ...],
    ) -> None:  # fmt: skip
        if len(self.stream) > MOST_INSTRUCTIONS:
            raise CannotFollow(f"{self.where(item)}: following the calls makes more than {MOST_INSTRUCTIONS} instructions")
        predicate = None
        if item.predicate is not None:
            predicate = scope.get(item.predicate)
            if predicate is None:
                raise PtxError(f"{self.where(item)}: expected a declared predicate, found {item.predicate!r}")
        if item.opcode == "call":
            self.call(item, scope, prefix, predicate, stack)
            return
        if item.opcode in ("bra", "brx") and len(item.operands) != (1 if item.opcode == "bra" else 2):
            raise isa.malformed(item, self.where(item))
        if item.opcode in ("bra", "brx"):
            target = item.operands[-1 if item.opcode == "brx" else 0]
            if not isinstance(target, Name) or target.text not in labels:
                raise PtxError(f"{self.where(item)}: expected a label of this scope")
            operands: tuple[Operand, ...] = (Name(labels[target.text]),)
            if item.opcode == "brx":
                operands = (self.resolve(item.operands[0], scope, item), *operands)
        else:
            operands = tuple(self.resolve(operand, scope, item) for operand in item.operands)
        if item.opcode == "ret" and after is not None:
            self.add("bra", ("uni",), (Name(after),), predicate, item.negated, item)
            return
        isa.accesses(item, self.where(item))
        self.add(item.opcode, item.modifiers, operands, predicate, item.negated, item)

    def add(
        self, opcode: str, modifiers: tuple[str, ...], operands: tuple[Operand, ...], predicate: str | None, negated: bool,
        source: Instruction,
    ) -> None:  # fmt: skip
        self.stream.append(Op(opcode, modifiers, operands, predicate, negated, source))

    def resolve(self, operand: Operand, scope: dict[str, str], item: Instruction) -> Operand:
        match operand:
            case Name():
                unique = scope.get(operand.text)
                if unique is None:
                    head, dot, part = operand.text.rpartition(".")
                    if dot and head in scope:
                        return Name(f"{scope[head]}.{part.translate(_COLOUR)}")
                    if operand.text[0] == "%" or operand.text == "_":
                        return operand  # a special register
                    if operand.text in self.variables or operand.text in self.functions:
                        return operand
                    if operand.text == "WARP_SZ":
                        return Literal(32, "WARP_SZ")
                    raise PtxError(f"{self.where(item)}: expected a declared name, found {operand.text!r}")
                if unique in self.vectors:
                    return Vector(tuple(Name(f"{unique}.{part}") for part in "xyzw"[: self.vectors[unique]]))
                return Name(unique)
            case Literal():
                return operand
            case Offset():
                return Offset(self._symbol(operand.base, scope, item), operand.bytes, operand.generic)
            case Address():
                base = None if operand.base is None else self._symbol(operand.base, scope, item)
                coordinates = tuple(self.resolve(c, scope, item) for c in operand.coordinates)
                return Address(base, operand.offset, coordinates, operand.sampler)
            case Vector():
                return Vector(tuple(self.resolve(i, scope, item) for i in operand.items))
            case Group():
                return Group(tuple(self.resolve(i, scope, item) for i in operand.items))
            case Pair():
                return Pair(self.resolve(operand.first, scope, item), self.resolve(operand.second, scope, item))
            case Not():
                return Not(self._symbol(operand.operand, scope, item))

    def _symbol(self, name: Name, scope: dict[str, str], item: Instruction) -> Name:
        found = self.resolve(name, scope, item)
        if not isinstance(found, Name):
            raise PtxError(f"{self.where(item)}: expected a scalar, found {name.text!r}")
        return found

    # -- calls

    def call(self, item: Instruction, scope: dict[str, str], prefix: str, predicate: str | None, stack: tuple[str, ...]) -> None:
        operands = list(item.operands)
        first = operands[0]
        results: tuple[Operand, ...] = ()
        if isinstance(first, Group):
            results = first.items
            operands.pop(0)
        target = operands.pop(0)
        arguments = operands[0].items if operands and isinstance(operands[0], Group) else ()
        if not isinstance(target, Name) or target.text in scope or target.text not in self.functions:
            raise CannotFollow(f"{self.where(item)}: an indirect call cannot be followed")
        function = self.functions[target.text]
        if target.text in stack:
            raise CannotFollow(f"{self.where(item)}: the recursion of {target.text} cannot be followed")
        if function.body is None:
            if target.text in NEVER_RETURN:
                self.add("trap", (), (), predicate, item.negated, item)
            elif target.text in FRESH_MEMORY:
                fresh = tuple(self.resolve(result, scope, item) for result in results)
                self.add("fresh", (), fresh, predicate, item.negated, item)
            elif target.text not in NO_MEMORY:
                raise CannotFollow(f"{self.where(item)}: {target.text} has no body in this module, so it cannot be followed")
            return
        self.serial += 1
        inner = f"{prefix}{function.name}#{self.serial}:"
        done = f"{inner}return"
        if predicate is not None:
            self.add("bra", (), (Name(done),), predicate, not item.negated, item)
        bind: dict[str, str] = {}
        if len(function.params or ()) != len(arguments) or len(function.returns or ()) != len(results):
            raise PtxError(
                f"{self.where(item)}: expected {len(function.params or ())} arguments and {len(function.returns or ())} results "
                f"for {function.name}, found {len(arguments)} and {len(results)}"
            )
        for formal, actual in zip((function.params or ()), arguments, strict=True):
            resolved = self.resolve(actual, scope, item)
            if formal.space == "param" and isinstance(resolved, Name) and resolved.text in self.variables:
                bind[formal.name] = resolved.text
                continue
            unique = bind[formal.name] = inner + formal.name
            self.declare(formal, unique)
            if formal.space == "reg":
                self.add("mov", (formal.type,), (Name(unique), resolved), None, False, item)
            else:
                self.add("st", ("param", formal.type), (Address(Name(unique), 0), resolved), None, False, item)
        back: list[tuple[Variable, str, Operand]] = []
        for formal, actual in zip((function.returns or ()), results, strict=True):
            resolved = self.resolve(actual, scope, item)
            if formal.space == "param" and isinstance(resolved, Name) and resolved.text in self.variables:
                bind[formal.name] = resolved.text
                continue
            unique = bind[formal.name] = inner + formal.name
            self.declare(formal, unique)
            back.append((formal, unique, resolved))
        self.body(function, inner, bind, done, (*stack, function.name))
        self.stream.append(_Mark(done))
        for formal, unique, resolved in back:
            if formal.space == "reg":
                self.add("mov", (formal.type,), (resolved, Name(unique)), None, False, item)
            else:
                self.add("ld", ("param", formal.type), (resolved, Address(Name(unique), 0)), None, False, item)

    # -- the graph

    def finish(self, kernel: Function) -> Flow:
        blocks: list[BasicBlock] = [BasicBlock(0)]
        labels: dict[str, int] = {}
        for item in self.stream:
            current = blocks[-1]
            if isinstance(item, _Mark):
                if current.ops:
                    current = BasicBlock(len(blocks))
                    blocks.append(current)
                labels[item.label] = current.index
                continue
            if current.ops and current.ops[-1].opcode in _ENDS:
                current = BasicBlock(len(blocks))
                blocks.append(current)
            current.ops.append(item)
        last = len(blocks)
        for block in blocks:
            end = block.ops[-1] if block.ops else None
            fall = block.index + 1
            if end is None or end.opcode not in _ENDS:
                block.successors = [fall]
                continue
            if end.opcode == "bra":
                name = end.operands[0]
                assert isinstance(name, Name)
                targets = [labels[name.text]]
            elif end.opcode == "brx":
                name = end.operands[1]
                assert isinstance(name, Name)
                if name.text not in self.lists:
                    raise PtxError(f"{self.module.where(end.source.span)}: expected a .branchtargets list")
                targets = [labels[label] for label in self.lists[name.text]]
            elif end.opcode in ("ret", "exit"):
                targets = [last]
            else:
                targets = []
            end.targets = tuple(targets)
            block.successors = list(dict.fromkeys(targets + ([fall] if end.predicate is not None else [])))
        _cut_traps(blocks, last)
        count = 0
        for block in blocks:
            for op in block.ops:
                op.index, op.block = count, block.index
                count += 1
        return Flow(self.module, kernel, blocks, self.types, self.variables, _postdominators(blocks))


_COLOUR = str.maketrans("rgba", "xyzw")
_ENDS = frozenset({"bra", "brx", "ret", "exit", "trap"})


def _cut_traps(blocks: list[BasicBlock], last: int) -> None:
    """A path that only leads to a trap ends the program, so nothing after it depends on having not been taken."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(last + 1))
    graph.add_edges_from((b.index, s) for b in blocks for s in b.successors)
    returns = nx.ancestors(graph, last) | {last}
    endless = {n for component in nx.strongly_connected_components(graph) if len(component) > 1 for n in component}
    endless |= {b.index for b in blocks if b.index in b.successors}
    forever = set(endless)
    for node in endless:
        forever |= nx.ancestors(graph, node)
    for block in blocks:
        kept = [s for s in block.successors if s in returns or s in forever]
        block.successors = kept


def _postdominators(blocks: list[BasicBlock]) -> dict[int, int]:
    """Immediate post-dominators; a block that reaches no exit has the virtual exit."""
    last = len(blocks)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(last + 1))
    graph.add_edges_from((s, b.index) for b in blocks for s in b.successors)
    found = nx.immediate_dominators(graph, last)
    return {b.index: found.get(b.index, last) for b in blocks}
