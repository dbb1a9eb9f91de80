"""PTX text to a tree.

A tokenizer of one regular expression and a parser by recursive descent. Modifiers are a set with an order of writing: nothing
here says which may follow which, since ptxas accepts them in almost any order (`atom.global.gpu.acq_rel.add`,
`ld .global .u32`). What an opcode means is the business of `isa.py`; the parser only says what is written.
"""

from __future__ import annotations

import re
import struct
from itertools import accumulate, chain
from typing import NoReturn

from .syntax import (
    TYPE_BYTES,
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
    Span,
    Statement,
    Variable,
    Vector,
    line_starts,
)

# White space and comments, then one token: an identifier with its dotted tail, a directive or modifier, a number, a string, or
# one character. `::` belongs to the word (`.L2::128B`), a single `:` ends a label. `//` inside a string is no comment because
# strings are tokens.
TOKEN = re.compile(
    r"((?:[ \t\r\n\f\v]+|//[^\n]*|/\*[^*]*(?:\*(?!/)[^*]*)*\*/)*)"
    r"([A-Za-z_$%][\w$%]*(?:(?:\.|::)[\w$]+)*"
    r"|\.[A-Za-z_]\w*(?:(?:\.|::)\w+)*"
    r"|0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?"
    r"|(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?"
    r'|"(?:[^"\\\n]|\\.)*"|<<|>>|<=|>=|==|!=|&&|\|\||@@|[^\s]|\Z)',
    re.ASCII,
)
TARGET = re.compile(r"(?:sm|compute)_\d+[af]?\Z", re.ASCII)
IDENTIFIER = re.compile(r"(?:[A-Za-z][\w$]*|[_$%][\w$]*)(?:\.[xyzwrgba])?\Z", re.ASCII)

LINKAGE = {".extern", ".visible", ".weak", ".common"}
SPACES = {".global", ".const", ".shared", ".local", ".param", ".tex", ".shared::cta", ".shared::cluster"}
TUNING = {
    ".maxntid", ".reqntid", ".minnctapersm", ".maxnctapersm", ".maxnreg", ".noreturn", ".reqnctapercluster",
    ".explicitcluster", ".maxclusterrank", ".pragma", ".abi_preserve", ".abi_preserve_control", ".blocksareclusters", ".unique",
    ".language", ".attribute",
}  # fmt: skip
PRECEDENCE = [
    {"||"},
    {"&&"},
    {"|"},
    {"^"},
    {"&"},
    {"==", "!="},
    {"<", ">", "<=", ">="},
    {"<<", ">>"},
    {"+", "-"},
    {"*", "/", "%"},
]
OPERATORS = set().union(*PRECEDENCE) | {"?"}


def parse(text: str, *, name: str = "<ptx>") -> Module:
    """Read a PTX module; `name` stands in messages.

    Raises PtxError `NAME:LINE:COLUMN: expected …, found …` for anything that is not PTX: a truncated file, binary junk, an
    `.address_size` other than 64. An opcode that nobody knows is not an error here: its kernel gets no footprint.
    """
    if not isinstance(text, str):
        raise TypeError(f"parse takes the text of a PTX module, not {type(text).__name__}; decode bytes first")
    parser = _Parser(text, name)
    try:
        return parser.module()
    except RecursionError:
        parser.fail("fewer levels of nesting")


class _Parser:
    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        pairs = TOKEN.findall(text)
        self.tokens: list[str] = [token for _, token in pairs]
        ends = list(accumulate(chain.from_iterable((len(blank), len(token)) for blank, token in pairs)))
        self.starts = ends[::2]
        self.ends = ends[1::2]
        while len(self.tokens) > 1 and not self.tokens[-2]:
            self.tokens.pop()
        if not self.tokens or self.tokens[-1]:
            self.tokens.append("")
            self.starts.append(len(text))
            self.ends.append(len(text))
        self.at = 0
        self.words: dict[str, tuple[str, tuple[str, ...]]] = {}
        self.names: dict[str, Name] = {}
        self.opcode = ""
        self.elements: list[dict[str, int]] = [{}]  # by scope, the bytes of one element of each variable
        if '"' in self.tokens:
            self.fail("a string that ends on its line", self.tokens.index('"'))
        if not text.isascii():
            for at, token in enumerate(self.tokens):
                if not token.isascii() and token[0] != '"':
                    self.fail("ASCII outside of comments and strings", at)

    # -- tokens

    def fail(self, expected: str, at: int | None = None) -> NoReturn:
        at = self.at if at is None else at
        lines = line_starts(self.text)
        place = Module("", "", (0, 0), "", (), 64, (), lines).place(self.starts[at])
        found = self.tokens[at]
        shown = "the end of the file" if not found else repr(found if len(found) < 40 else found[:37] + "...")
        raise PtxError(f"{self.name}:{place[0]}:{place[1]}: expected {expected}, found {shown}")

    def take(self, token: str) -> None:
        if self.tokens[self.at] != token:
            self.fail(f"{token!r}")
        self.at += 1

    def maybe(self, token: str) -> bool:
        if self.tokens[self.at] == token:
            self.at += 1
            return True
        return False

    def identifier(self, what: str) -> str:
        token = self.tokens[self.at]
        if not IDENTIFIER.match(token):
            self.fail(what)
        self.at += 1
        return token

    def integer(self, what: str) -> int:
        at = self.at
        value = self.constant()
        if not isinstance(value, Literal) or not isinstance(value.value, int):
            self.fail(what, at)
        return value.value

    def plain_integer(self, what: str) -> int:
        """A number that ends before `>`, so no expression."""
        value = literal(self.tokens[self.at]) if self.tokens[self.at][:1].isdigit() else None
        if value is None or not isinstance(value.value, int):
            self.fail(what)
        self.at += 1
        return value.value

    def span(self, first: int) -> Span:
        return self.starts[first], self.ends[self.at - 1]

    # -- the module

    def module(self) -> Module:
        version, target, size = (0, 0), "", 64
        options: tuple[str, ...] = ()
        items: list[Directive | Variable | Function] = []
        tokens = self.tokens
        if tokens[0] != ".version":
            self.fail("'.version' at the head of the module")
        while tokens[self.at]:
            first, token = self.at, tokens[self.at]
            if token == ".version":
                self.at += 1
                numbers = re.fullmatch(r"(\d+)\.(\d+)", tokens[self.at])
                if not numbers:
                    self.fail("a version like 8.7")
                version = (int(numbers[1]), int(numbers[2]))
                self.at += 1
                items.append(Directive(token, (tokens[self.at - 1],), self.span(first)))
            elif token == ".target":
                self.at += 1
                if not TARGET.match(tokens[self.at]):
                    self.fail("a target like sm_90")
                words = [self.identifier("a target like sm_90")]
                while self.maybe(","):
                    words.append(self.identifier("an option of the target"))
                target, options = words[0], tuple(words[1:])
                items.append(Directive(token, tuple(tokens[first + 1 : self.at]), self.span(first)))
            elif token == ".address_size":
                self.at += 1
                size = self.integer("32 or 64")
                if size != 64:
                    self.fail("an address size of 64 (32-bit modules are not supported)", first + 1)
                items.append(Directive(token, (str(size),), self.span(first)))
            elif token in (".entry", ".func") or (token in LINKAGE and self._is_function()):
                items.append(self.function())
            elif token in LINKAGE or token in SPACES:
                items.extend(self.variables())
            else:
                items.append(self.directive())
        if not target:
            self.fail("a '.target'")
        return Module(self.name, self.text, version, target, options, size, tuple(items), line_starts(self.text))

    def _is_function(self) -> bool:
        at = self.at
        while self.tokens[at] in LINKAGE:
            at += 1
        return self.tokens[at] in (".entry", ".func")

    def directive(self) -> Directive:
        """One that is carried along. Those without a semicolon (`.loc`, `.file`, `.section`) have a grammar of their own."""
        first, tokens = self.at, self.tokens
        name = tokens[first]
        if name[0] != "." or name == ".":
            self.fail("a directive, a variable or a function")
        self.at += 1
        if name == ".loc":
            for what in ("a file number", "a line number", "a column number"):
                self.integer_token(what)
            if tokens[self.at] == "," and tokens[self.at + 1] == "function_name":
                self.at += 2
                self.identifier("a label of the section of names")
                if self.maybe("+"):
                    self.integer_token("an offset")
                self.take(",")
                self.take("inlined_at")
                for what in ("a file number", "a line number", "a column number"):
                    self.integer_token(what)
        elif name == ".file":
            self.integer_token("a file number")
            if tokens[self.at][:1] != '"':
                self.fail("a file name in quotes")
            self.at += 1
            while self.maybe(","):
                self.integer_token("a number")
        elif name == ".section":
            if tokens[self.at][:1] != ".":
                self.fail("the name of the section")
            self.at += 1
            self.take("{")
            while not self.maybe("}"):
                if not tokens[self.at]:
                    self.fail("'}' at the end of the section")
                self.at += 1
        elif name in (".pragma", ".alias", ".branchtargets", ".calltargets", ".callprototype"):
            while not self.maybe(";"):
                if not tokens[self.at] or tokens[self.at] in "{}":
                    self.fail("';'")
                self.at += 1
        else:
            self.fail("a directive that is known", first)
        return Directive(name, tuple(tokens[first + 1 : self.at]), self.span(first))

    def integer_token(self, what: str) -> None:
        if not self.tokens[self.at][:1].isdigit():
            self.fail(what)
        self.at += 1

    # -- declarations

    def function(self) -> Function:
        first, tokens = self.at, self.tokens
        linkage = []
        self.elements.append({})
        while tokens[self.at] in LINKAGE:
            linkage.append(tokens[self.at])
            self.at += 1
        entry = tokens[self.at] == ".entry"
        self.at += 1
        while tokens[self.at] == ".attribute":
            self.attribute()
        returns = None
        if not entry and tokens[self.at] == "(":
            returns = self.parameters()
        name = self.identifier("the name of the function")
        params = self.parameters() if tokens[self.at] == "(" else None
        tuning = []
        while tokens[self.at] in TUNING:
            start = self.at
            self.at += 1
            if tokens[start] == ".attribute":
                self.at = start
                self.attribute()
            elif tokens[start] == ".pragma":
                while not self.maybe(";"):
                    if not tokens[self.at]:
                        self.fail("';'")
                    self.at += 1
            else:
                while tokens[self.at][:1].isdigit() or tokens[self.at] == ",":
                    self.at += 1
            tuning.append(Directive(tokens[start], tuple(tokens[start + 1 : self.at]), self.span(start)))
        if tokens[self.at] == "{":
            body = self.block()
        elif self.maybe(";"):
            body = None
        else:
            self.fail("'{' and the body of the function, or ';'")
        self.elements.pop()
        return Function(entry, name, tuple(linkage), returns, params, tuple(tuning), body, self.span(first))

    def attribute(self) -> tuple[str, ...]:
        first = self.at
        self.at += 1
        self.take("(")
        depth = 1
        while depth:
            token = self.tokens[self.at]
            if not token:
                self.fail("')'")
            depth += (token == "(") - (token == ")")
            self.at += 1
        return tuple(self.tokens[first : self.at])

    def parameters(self) -> tuple[Variable, ...]:
        self.take("(")
        found: list[Variable] = []
        if self.maybe(")"):
            return ()
        while True:
            if self.tokens[self.at] not in (".param", ".reg"):
                self.fail("'.param' or '.reg'")
            found.extend(self.variables(parameter=True))
            if self.maybe(")"):
                return tuple(found)
            self.take(",")

    def variables(self, parameter: bool = False) -> list[Variable]:
        """`.visible .global .align 8 .u64 tbl[3] = {…}, other;`"""
        first, tokens = self.at, self.tokens
        linkage, qualifiers = [], []
        while tokens[self.at] in LINKAGE:
            linkage.append(tokens[self.at])
            self.at += 1
        space = tokens[self.at]
        if space not in SPACES and space != ".reg":
            self.fail("a state space")
        self.at += 1
        if space == ".const" and tokens[self.at] == "[":
            self.fail("a variable (constant banks by number are not supported)")
        type_, vector, align = "", None, 0
        while tokens[self.at][:1] == ".":
            token = tokens[self.at]
            if token == ".align":
                self.at += 1
                align = self.integer("an alignment")
                qualifiers += [token, str(align)]
            elif token == ".attribute":
                qualifiers += self.attribute()
            elif token in (".v2", ".v4", ".v8"):
                vector = token[1:]
                self.at += 1
            elif token == ".ptr" or (token in SPACES and ".ptr" in qualifiers):
                qualifiers.append(token)
                self.at += 1
            elif token[1:] in TYPE_BYTES and not type_:
                type_ = token[1:]
                self.at += 1
            elif token == ".managed":
                qualifiers.append(token)
                self.at += 1
            else:
                self.fail("a type or a qualifier of the variable")
        if not type_:
            self.fail("the type of the variable")
        found = []
        while True:
            name = self.identifier("the name of the variable")
            count = None
            if self.maybe("<"):
                count = self.plain_integer("how many variables")
                self.take(">")
            dims: list[int | None] = []
            while self.maybe("["):
                if self.maybe("]"):
                    dims.append(None)
                else:
                    dims.append(self.integer("the size of the array"))
                    self.take("]")
            initial: tuple[str, ...] = ()
            if self.maybe("="):
                start = self.at
                self.initializer()
                initial = tuple(tokens[start : self.at])
            natural = align or TYPE_BYTES.get(type_, 8) * int((vector or "v1")[1:])
            self.elements[-1][name] = TYPE_BYTES.get(type_, 8)
            if dims and dims[0] is None and initial[:1] == ("{",):
                dims[0] = _count_items(initial)
            # A parameter's span is its own text, for the comma after it belongs to the list.
            found.append(
                Variable(
                    space[1:], type_, name, count, tuple(dims), vector, natural, tuple(linkage), tuple(qualifiers), initial,
                    self.span(first),
                )
            )  # fmt: skip
            if parameter:
                return found
            if self.maybe(";"):
                return found
            if tokens[self.at] != ",":
                self.fail("',' or ';'")
            self.at += 1

    def initializer(self) -> None:
        if self.maybe("{"):
            if self.maybe("}"):
                return
            while True:
                self.initializer()
                if self.maybe("}"):
                    return
                self.take(",")
        elif self.tokens[self.at][:1] == '"':
            self.at += 1
        else:
            self.constant()

    # -- bodies

    def block(self) -> Block:
        first, tokens = self.at, self.tokens
        self.at += 1
        self.elements.append({})
        items: list[Statement] = []
        add = items.append
        while True:
            at = self.at
            token = tokens[at]
            head = token[:1]
            if token == "}":
                self.at += 1
                self.elements.pop()
                return Block(tuple(items), self.span(first))
            if head == "." and token != ".":
                if token == ".reg":
                    add(self.registers())
                elif token in SPACES or token in LINKAGE:
                    items.extend(self.variables())
                else:
                    add(self.directive())
            elif head == "{":
                add(self.block())
            elif head == "@" or head.isalpha() or head in ("_", "$", "%"):
                if tokens[at + 1] == ":" and head != "@":
                    if not IDENTIFIER.match(token):
                        self.fail("a label")
                    self.at += 2
                    add(Label(token, self.span(at)))
                else:
                    add(self.instruction())
            elif head == ";" and token:
                self.at += 1  # an empty statement
            elif not token:
                self.fail("'}' at the end of the body")
            else:
                self.fail("an instruction, a label or a declaration")

    def registers(self) -> Registers:
        first, tokens = self.at, self.tokens
        self.at += 1
        type_, vector, names = "", None, []
        while tokens[self.at][:1] == ".":
            token = tokens[self.at]
            if token in (".v2", ".v4", ".v8"):
                vector = token[1:]
            elif token[1:] in TYPE_BYTES:
                type_ = token[1:]
            elif token == ".align":
                self.at += 1
                self.integer_token("an alignment")
                continue
            else:
                self.fail("the type of the registers")
            self.at += 1
        if not type_:
            self.fail("the type of the registers")
        while True:
            name = self.identifier("the name of a register")
            count = None
            if self.maybe("<"):
                count = self.plain_integer("how many registers")
                self.take(">")
            names.append((name, count))
            if self.maybe(";"):
                return Registers(type_, vector, tuple(names), self.span(first))
            if tokens[self.at] != ",":
                self.fail("',' or ';'")
            self.at += 1

    def instruction(self) -> Instruction:
        tokens = self.tokens
        first = at = self.at
        predicate, negated = None, False
        if tokens[at] == "@":
            self.at += 1
            negated = self.maybe("!")
            predicate = self.identifier("a predicate register")
            at = self.at
        word = tokens[at]
        known = self.words.get(word)
        if known is None:
            if not (word[:1].isalpha() or word[:1] == "_") or "%" in word or "$" in word:
                self.fail("an instruction")
            parts = word.split(".")
            known = self.words[word] = (parts[0], tuple(parts[1:]))
        opcode, modifiers = known
        at += 1
        while tokens[at][:1] == "." and tokens[at] != ".":  # `ld .global .u32`
            modifiers = (*modifiers, *tokens[at][1:].split("."))
            at += 1
        self.at = at
        if tokens[at] == ";":
            self.at = at + 1
            return Instruction(opcode, modifiers, (), predicate, negated, (self.starts[first], self.ends[at]))
        operands: list[Operand] = []
        self.opcode = opcode
        call = opcode == "call"
        while True:
            operands.append(self.group() if call and tokens[self.at] == "(" else self.operand())
            token = tokens[self.at]
            if token == ",":
                self.at += 1
            elif token == ";":
                self.at += 1
                return Instruction(
                    opcode, modifiers, tuple(operands), predicate, negated, (self.starts[first], self.ends[self.at - 1])
                )
            else:
                self.fail("',' or ';'")

    def group(self) -> Group:
        self.take("(")
        items: list[Operand] = []
        if self.maybe(")"):
            return Group(())
        while True:
            items.append(self.operand())
            if self.maybe(")"):
                return Group(tuple(items))
            self.take(",")

    def operand(self) -> Operand:
        tokens = self.tokens
        token = tokens[self.at]
        name = self.names.get(token)
        if name is None and IDENTIFIER.match(token) and token not in ("generic", "WARP_SZ"):
            name = self.names[token] = Name(token)
        if name is not None:
            following = tokens[self.at + 1]
            self.at += 1
            if following in (",", ";", "]", "}", ")"):
                return name
            if following == "|":
                self.at += 1
                return Pair(name, Name(self.identifier("a second destination")))
            if following == "[":
                return self.element(name)
            if following in ("+", "-"):
                self.at -= 1
                return self.constant()
            return name
        if token == "[":
            return self.address()
        if token == "{":
            self.at += 1
            items: list[Operand] = []
            while True:
                items.append(self.operand())
                if self.maybe("}"):
                    return Vector(tuple(items))
                self.take(",")
        if token == "!" and IDENTIFIER.match(tokens[self.at + 1]):
            self.at += 2
            return Not(Name(tokens[self.at - 1]))
        return self.constant()

    def element(self, name: Name) -> Operand:
        """`arr[3]` counts elements, not bytes. It is a place in memory, but mov takes the address of it."""
        size = next((scope[name.text] for scope in reversed(self.elements) if name.text in scope), None)
        if size is None:
            self.fail("a variable that is declared before the index", self.at - 1)
        self.take("[")
        offset = size * self.integer("a constant index")
        self.take("]")
        return Offset(name, offset) if self.opcode == "mov" else Address(name, offset)

    def address(self) -> Address:
        tokens, first = self.tokens, self.at
        self.at += 1
        base: Name | None = None
        offset, written = 0, False
        at = self.at
        if IDENTIFIER.match(tokens[at]) and tokens[at] != "generic":
            base = self.names.get(tokens[at]) or self.names.setdefault(tokens[at], Name(tokens[at]))
            self.at += 1
            if tokens[self.at] in ("+", "-"):
                negative = tokens[self.at] == "-"
                self.at += 1
                offset = self.integer("an offset in bytes")
                offset = -offset if negative else offset
                written = offset == 0
        else:
            value = self.constant()
            if isinstance(value, Literal) and isinstance(value.value, int):
                offset = value.value
            elif isinstance(value, Name):
                base = value
            elif isinstance(value, Offset):
                base, offset = value.base, value.bytes
            else:
                self.fail("an address", first + 1)
        coordinates: tuple[Operand, ...] = ()
        sampler: Name | None = None
        while self.maybe(","):
            if tokens[self.at] == "{":
                vector = self.operand()
                assert isinstance(vector, Vector)
                coordinates = vector.items
            elif coordinates == () and sampler is None and IDENTIFIER.match(tokens[self.at]):
                word = Name(self.identifier("a sampler or a coordinate"))
                if tokens[self.at] == ",":
                    sampler = word
                else:
                    coordinates = (word,)
            else:
                coordinates = (*coordinates, self.operand())
        self.take("]")
        return Address(base, offset, coordinates, sampler, written)

    # -- constant expressions

    def constant(self, level: int = -1) -> Operand:
        """A constant expression with the precedence of C, folded; symbols may be moved by a constant."""
        if level < 0:
            value = self.constant(0)
            if self.tokens[self.at] != "?":
                return value
            self.at += 1
            first = self.constant()
            self.take(":")
            second = self.constant()
            return first if _number(value) else second
        if level == len(PRECEDENCE):
            return self.unary()
        value = self.constant(level + 1) if not self._plain() or self.tokens[self.at + 1] in OPERATORS else self.unary()
        while self.tokens[self.at] in PRECEDENCE[level]:
            at = self.at
            operator = self.tokens[at]
            if level == 2 and isinstance(value, Name):
                break
            self.at += 1
            value = self._fold(operator, value, self.constant(level + 1), at)
        return value

    def _plain(self) -> bool:
        return self.tokens[self.at][:1].isdigit()

    def _fold(self, operator: str, left: Operand, right: Operand, at: int) -> Operand:
        if isinstance(left, Name | Offset) and operator in "+-" and isinstance(right, Literal) and isinstance(right.value, int):
            moved = right.value if operator == "+" else -right.value
            if isinstance(left, Name):
                return Offset(left, moved)
            return Offset(left.base, left.bytes + moved, left.generic)
        if isinstance(right, Name | Offset) and operator == "+" and isinstance(left, Literal):
            return self._fold("+", right, left, at)
        if not isinstance(left, Literal) or not isinstance(right, Literal):
            self.fail("constants on both sides of the operator", at)
        value = _arithmetic(operator, left.value, right.value)
        if value is None:
            self.fail("a divisor other than zero and integers for bits", at)
        return _constant(value)

    def unary(self) -> Operand:
        token, at = self.tokens[self.at], self.at
        if token in ("-", "~", "!", "+"):
            self.at += 1
            operand = self.unary()
            if not isinstance(operand, Literal) or (token == "~" and isinstance(operand.value, float)):
                self.fail("a constant after the sign", at)
            number = operand.value
            if token == "+":
                return operand
            if token == "-" and isinstance(number, float) and operand.text[0] != "-":
                return Literal(-number, "-" + operand.text)
            return _constant(-number if token == "-" else int(not number) if token == "!" else ~int(number))
        if token == "(":
            self.at += 1
            if self.tokens[self.at] in (".s64", ".u64"):  # a cast
                self.at += 1
                self.take(")")
                return self.unary()
            value_ = self.constant()
            self.take(")")
            return value_
        if token == "generic":
            self.at += 1
            self.take("(")
            inner = self.constant()
            self.take(")")
            if isinstance(inner, Name):
                return Offset(inner, 0, True)
            if isinstance(inner, Offset):
                return Offset(inner.base, inner.bytes, True)
            self.fail("a symbol", at + 2)
        if token[:1].isdigit() or (token[:1] == "." and token[1:2].isdigit()):
            value = literal(token)
            if value is None:
                self.fail("a number")
            self.at += 1
            return value
        if token == "WARP_SZ":
            self.at += 1
            return Literal(32, token)
        if IDENTIFIER.match(token):
            self.at += 1
            return Name(token)
        self.fail("an operand")


def _constant(value: int | float) -> Literal:
    """A computed constant: an integer has 64 bits, and a float is written with its bits."""
    if isinstance(value, float):
        return Literal(value, f"0d{struct.pack('>d', value).hex().upper()}")
    if not -(2**63) <= value < 2**64:
        value %= 2**64
    return Literal(value, str(value))


def _number(value: Operand) -> int | float:
    return value.value if isinstance(value, Literal) else 1


def _arithmetic(operator: str, a: int | float, b: int | float) -> int | float | None:
    try:
        match operator:
            case "+":
                return a + b
            case "-":
                return a - b
            case "*":
                return a * b
            case "/" if isinstance(a, int) and isinstance(b, int):
                quotient = abs(a) // abs(b)
                return quotient if (a < 0) == (b < 0) else -quotient
            case "/":
                return a / b
            case "<":
                return int(a < b)
            case ">":
                return int(a > b)
            case "<=":
                return int(a <= b)
            case ">=":
                return int(a >= b)
            case "==":
                return int(a == b)
            case "!=":
                return int(a != b)
            case "&&":
                return int(bool(a) and bool(b))
            case "||":
                return int(bool(a) or bool(b))
        if isinstance(a, float) or isinstance(b, float):
            return None
        match operator:
            case "%":
                remainder = abs(a) % abs(b)
                return remainder if a >= 0 else -remainder
            case "<<":
                return a << b if 0 <= b < 64 else 0
            case ">>":
                return a >> b if 0 <= b < 64 else 0
            case "&":
                return a & b
            case "|":
                return a | b
            case "^":
                return a ^ b
    except (ZeroDivisionError, OverflowError):
        return None
    return None


def literal(token: str) -> Literal | None:
    """A number as PTX writes it: 0f and 0d followed by bits, 0x, 0b, octal, a trailing U; None where it is not one."""
    head = token[:2].lower()
    try:
        if head == "0f" and len(token) == 10:
            return Literal(struct.unpack(">f", bytes.fromhex(token[2:]))[0], token)
        if head == "0d" and len(token) == 18:
            return Literal(struct.unpack(">d", bytes.fromhex(token[2:]))[0], token)
        digits = token.rstrip("U")
        if head in ("0x", "0b"):
            value = int(digits[2:], 16 if head == "0x" else 2)
        elif not digits.isdigit():
            return Literal(float(token), token)
        else:
            value = int(digits, 8 if digits[0] == "0" and len(digits) > 1 else 10)
    except ValueError:
        return None
    return Literal(value, token) if value < 2**64 else None


def _count_items(tokens: tuple[str, ...]) -> int:
    depth, count = 0, 1
    for token in tokens:
        depth += (token in "{(") - (token in "})")
        if token == "," and depth == 1:
            count += 1
    return count
