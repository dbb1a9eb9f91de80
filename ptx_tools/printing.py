"""A tree back to PTX text, one statement a line. Tools edit the source text itself; this is for tests and for reading."""

from __future__ import annotations

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
    Registers,
    Statement,
    Variable,
    Vector,
)


def to_text(module: Module) -> str:
    """Print a module. Comments and layout go, everything that ptxas reads stays: the same SASS comes out.

    Offsets are printed as `+-4`, for ptxas does not read `-4` there.
    """
    lines: list[str] = []
    for item in module.items:
        if isinstance(item, Function):
            _function(item, lines)
        elif isinstance(item, Variable):
            lines.append(variable(item) + ";")
        else:
            lines.append(directive(item))
    return "\n".join(lines) + "\n"


def _function(function: Function, lines: list[str]) -> None:
    head = [*function.linkage, ".entry" if function.entry else ".func"]
    if function.returns is not None:
        head.append(f"({', '.join(map(variable, function.returns))})")
    head.append(function.name + ("" if function.params is None else f"({', '.join(map(variable, function.params))})"))
    lines.append(" ".join(head))
    lines.extend(directive(item) for item in function.tuning)
    if function.body is None:
        lines.append(";")
    else:
        _block(function.body, lines, "")


def _block(block: Block, lines: list[str], indent: str) -> None:
    lines.append(indent + "{")
    for item in block.items:
        if isinstance(item, Block):
            _block(item, lines, indent + "  ")
        else:
            lines.append(indent + ("" if isinstance(item, Label) else "  ") + statement(item))
    lines.append(indent + "}")


def statement(item: Statement) -> str:
    match item:
        case Instruction():
            return instruction(item)
        case Label():
            return item.name + ":"
        case Registers():
            vector = f" .{item.vector}" if item.vector else ""
            names = ", ".join(name if count is None else f"{name}<{count}>" for name, count in item.names)
            return f".reg{vector} .{item.type} {names};"
        case Variable():
            return variable(item) + ";"
        case Directive():
            return directive(item)
        case Block():
            lines: list[str] = []
            _block(item, lines, "")
            return "\n".join(lines)


def instruction(item: Instruction) -> str:
    """One instruction with its guard and semicolon."""
    guard = f"@{'!' if item.negated else ''}{item.predicate} " if item.predicate else ""
    operands = ", ".join(map(operand, item.operands))
    return f"{guard}{item.mnemonic}{' ' + operands if operands else ''};"


def operand(item: Operand) -> str:
    match item:
        case Name():
            return item.text
        case Literal():
            return item.text
        case Offset():
            base = f"generic({item.base.text})" if item.generic else item.base.text
            return f"{base}+{item.bytes}"
        case Vector():
            return "{" + ", ".join(map(operand, item.items)) + "}"
        case Group():
            return "(" + ", ".join(map(operand, item.items)) + ")"
        case Pair():
            return f"{operand(item.first)}|{operand(item.second)}"
        case Not():
            return "!" + item.operand.text
        case Address():
            inner = (
                str(item.offset)
                if item.base is None
                else item.base.text + (f"+{item.offset}" if item.offset or item.written else "")
            )
            if item.sampler:
                inner += ", " + item.sampler.text
            if item.coordinates:
                inner += ", {" + ", ".join(map(operand, item.coordinates)) + "}"
            return f"[{inner}]"


def variable(item: Variable) -> str:
    words = [*item.linkage, "." + item.space]
    # `.ptr` and what follows it stand after the type, an alignment before it.
    cut = item.qualifiers.index(".ptr") if ".ptr" in item.qualifiers else len(item.qualifiers)
    words += item.qualifiers[:cut]
    if item.vector:
        words.append("." + item.vector)
    words.append("." + item.type)
    words += item.qualifiers[cut:]
    name = item.name if item.count is None else f"{item.name}<{item.count}>"
    name += "".join("[]" if dim is None else f"[{dim}]" for dim in item.dims)
    words.append(name)
    if item.initial:
        words += ["=", " ".join(item.initial)]
    return " ".join(words)


def directive(item: Directive) -> str:
    if item.name == ".section":  # one datum a line, as ptxas wants it
        text = " ".join(item.tokens[1:])
        for word in (" .b8 ", " .b16 ", " .b32 ", " .b64 "):
            text = text.replace(word, "\n" + word[1:])
        return f".section {item.tokens[0]} {text}"
    words = " ".join(item.tokens)
    for mark in (" ,", " ;", " :"):
        words = words.replace(mark, mark[1:])
    return f"{item.name} {words}"
