"""PTX arithmetic on Python integers, written from the text of the PTX ISA and from nothing else: `semantics.py` is held to it."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

Bits = int
"""A register's content: an unsigned integer, True or False for a predicate."""

WIDTHS = {"u8": 8, "s8": 8, "b8": 8, "u16": 16, "s16": 16, "b16": 16, "u32": 32, "s32": 32, "b32": 32, "f32": 32} | {
    "u64": 64, "s64": 64, "b64": 64, "f64": 64, "pred": 1,
}  # fmt: skip


class Undefined(Exception):
    """The ISA does not say what comes out."""


def unsigned(value: int, width: int) -> int:
    return value & ((1 << width) - 1)


def signed(value: int, width: int) -> int:
    value = unsigned(value, width)
    return value - (1 << width) if value >> (width - 1) else value


def number(bits: int, kind: str) -> int:
    """Register bits as a number of an integer type."""
    return signed(bits, WIDTHS[kind]) if kind[0] == "s" else unsigned(bits, WIDTHS[kind])


def to_float(bits: int, kind: str) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0] if kind == "f32" else struct.unpack("<d", struct.pack("<Q", bits))[0]


def from_float(value: float, kind: str) -> int:
    """Nearest float, ties to even; overflow is infinite."""
    if kind == "f64":
        return struct.unpack("<Q", struct.pack("<d", value))[0]
    try:
        return struct.unpack("<I", struct.pack("<f", value))[0]
    except OverflowError:
        return 0x7F800000 if value > 0 else 0xFF800000


def flush(bits: int) -> int:
    """A subnormal f32 becomes zero of its sign."""
    return bits & 0x80000000 if not bits & 0x7F800000 else bits


def divide(a: int, b: int) -> tuple[int, int]:
    """Quotient and remainder, rounded to zero."""
    if b == 0:
        raise Undefined("division by zero")
    quotient = abs(a) // abs(b)
    quotient = -quotient if (a < 0) != (b < 0) else quotient
    return quotient, a - quotient * b


ORDERED: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "lo": lambda a, b: a < b, "ls": lambda a, b: a <= b,
    "hi": lambda a, b: a > b, "hs": lambda a, b: a >= b,
}  # fmt: skip


def compare(how: str, a: int, b: int, kind: str, ftz: bool = False) -> bool:
    if kind[0] != "f":
        return ORDERED[how](number(a, kind), number(b, kind))
    if ftz:
        a, b = flush(a), flush(b)
    x, y = to_float(a, kind), to_float(b, kind)
    nan = math.isnan(x) or math.isnan(y)
    if how in ("num", "nan"):
        return nan == (how == "nan")
    if how.endswith("u") and how != "u":
        return nan or ORDERED[how[:-1]](x, y)
    return not nan and ORDERED[how](x, y)


JOINS: dict[str, Callable[[bool, bool], bool]] = {
    "and": lambda a, b: a and b, "or": lambda a, b: a or b, "xor": lambda a, b: a != b,
}  # fmt: skip


def evaluate(mnemonic: str, args: list[int], carry: bool = False) -> list[int]:
    """Results of an instruction as bit patterns of its result type. `args` are bits of the operand types, constants too.

    setp gives both predicates. Those with `.cc` give the carry last. Raises Undefined where the ISA says so.
    """
    opcode, *modifiers = mnemonic.split(".")
    types = [m for m in modifiers if m in WIDTHS]
    kind = types[-1]
    width = WIDTHS[kind]
    ftz = "ftz" in modifiers
    a, b, c, d = (*args, 0, 0, 0, 0)[:4]

    def given(value: int, bits: int = width) -> list[int]:
        return [unsigned(value, bits)]

    def rounded(value: float) -> list[int]:
        bits = from_float(value, kind)
        return [flush(bits) if ftz else bits]

    x, y, z = (number(v, kind) if kind[0] in "us" else v for v in (a, b, c)) if kind != "pred" else (a, b, c)
    if kind[0] == "f" and opcode in ("add", "sub", "mul", "min", "max", "neg", "abs", "div"):
        if ftz:
            a, b = flush(a), flush(b)
        f, g = to_float(a, kind), to_float(b, kind)
        if opcode in ("neg", "abs") and math.isnan(f):
            raise Undefined("which NaN")
        if opcode == "neg":
            return given(a ^ 1 << (width - 1))
        if opcode == "abs":
            return given(a & ~(1 << (width - 1)))
        if opcode in ("min", "max"):
            if math.isnan(f) or math.isnan(g):
                if math.isnan(f) and math.isnan(g):
                    raise Undefined("which NaN")
                return [b if math.isnan(f) else a]
            if f == g == 0:
                return [(a | b) if opcode == "min" else (a & b)]
            return [a if (f < g) == (opcode == "min") else b]
        with_ = {"add": lambda: f + g, "sub": lambda: f - g, "mul": lambda: f * g, "div": lambda: f / g}[opcode]
        try:
            value = with_()
        except ZeroDivisionError:
            raise Undefined("float division by zero") from None
        if math.isnan(value):
            raise Undefined("which NaN")
        return rounded(value)  # exact in double before it is rounded to f32: 53 > 2 * 24 + 1
    match opcode:
        case "add" | "addc" | "sub" | "subc":
            bit = int(carry) if opcode.endswith("c") else 0
            total = (
                unsigned(a, width) + unsigned(b, width) + bit
                if opcode[0] == "a"
                else unsigned(a, width) - unsigned(b, width) - bit
            )
            return given(total) + ([int(total < 0 or total >> width > 0)] if "cc" in modifiers else [])
        case "mul" | "mad":
            product = x * y
            if "wide" in modifiers:
                return given(product + (c if opcode == "mad" else 0), 2 * width)
            part = product >> width if "hi" in modifiers else product
            return given(part + (c if opcode == "mad" else 0))
        case "mul24" | "mad24":
            product = (signed(a, 24) * signed(b, 24)) if kind[0] == "s" else (unsigned(a, 24) * unsigned(b, 24))
            part = product >> 16 if "hi" in modifiers else product
            return given(part + (c if opcode == "mad24" else 0))
        case "div":
            return given(divide(x, y)[0])
        case "rem":
            return given(divide(x, y)[1])
        case "min":
            return given(min(x, y))
        case "max":
            return given(max(x, y))
        case "sad":
            return given(abs(x - y) + z)
        case "neg":
            return given(-x)
        case "abs":
            return given(abs(x))
        case "not":
            return [int(not a)] if kind == "pred" else given(~a)
        case "cnot":
            return given(int(a == 0))
        case "and":
            return given(a & b)
        case "or":
            return given(a | b)
        case "xor":
            return given(a ^ b)
        case "shl":
            return given(a << min(b, width))
        case "shr":
            return given(x >> min(b, width))
        case "shf":
            n = min(c, 32) if "clamp" in modifiers else c & 31
            whole = b << 32 | a
            return given(whole << n >> 32 if "l" in modifiers else whole >> n)
        case "bfe":
            position, length, top = b & 0xFF, c & 0xFF, width - 1
            if kind[0] == "u" or length == 0:
                fill = 0
            else:
                fill = a >> min(position + length - 1, top) & 1
            return given(
                sum((a >> (position + i) & 1 if i < length and position + i <= top else fill) << i for i in range(width))
            )
        case "bfi":
            position, length, out = c & 0xFF, d & 0xFF, b
            for i in range(length):
                if position + i < width:
                    out = out & ~(1 << position + i) | (a >> i & 1) << position + i
            return given(out)
        case "prmt":
            source = [(b << 32 | a) >> 8 * i & 0xFF for i in range(8)]
            out = 0
            for i in range(4):
                select = c >> 4 * i & 15
                byte = source[select & 7]
                out |= (0xFF * (byte >> 7) if select & 8 else byte) << 8 * i
            return given(out)
        case "lop3":
            return given(sum((d >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(width)))
        case "popc":
            return given(a.bit_count(), 32)
        case "clz":
            return given(width - a.bit_length(), 32)
        case "brev":
            return given(int(f"{a:0{width}b}"[::-1], 2))
        case "bfind":
            value = ~x if x < 0 else x
            found = value.bit_length() - 1
            return given(width - 1 - found if "shiftamt" in modifiers and found >= 0 else found, 32)
        case "setp" | "set":
            how = next(m for m in modifiers if m in ORDERED or (m[:-1] in ORDERED and m[-1] == "u") or m in ("num", "nan"))
            first = compare(how, a, b, kind, ftz)
            second = not first
            for join in modifiers:
                if join in JOINS:
                    first, second = JOINS[join](first, bool(c)), JOINS[join](second, bool(c))
            if opcode == "set":
                return [from_float(float(first), "f32") if types[0] == "f32" else 0xFFFFFFFF * first]
            return [int(first), int(second)]
        case "selp":
            return [a if c else b]
        case "slct":
            if types[-1] == "f32":
                return [a if to_float(flush(c) if ftz else c, "f32") >= 0 else b]
            return [a if signed(c, 32) >= 0 else b]
        case "szext":
            n = b & 31 if "wrap" in modifiers else min(b, 32)
            if n == 0:
                return [0]
            return given(signed(a, n) if kind[0] == "s" else unsigned(a, n))
        case "bmsk":
            position, length = (a & 31, b & 31) if "wrap" in modifiers else (min(a, 32), min(b, 32))
            return given(((1 << length) - 1) << position)
        case "cvt":
            return [convert(a, types[0], types[1], set(modifiers))]
        case "mov":
            return [a]
    raise NotImplementedError(mnemonic)


def convert(bits: int, to: str, kind: str, modifiers: set[str]) -> int:
    width = WIDTHS[to]
    if kind[0] != "f":
        value = number(bits, kind)
        if to[0] == "f":
            return nearest(value, to)
        if "sat" in modifiers:
            low, high = (-(1 << width - 1), (1 << width - 1) - 1) if to[0] == "s" else (0, (1 << width) - 1)
            value = min(max(value, low), high)
        return unsigned(value, width)
    if "ftz" in modifiers and kind == "f32":
        bits = flush(bits)
    number_ = to_float(bits, kind)
    if to[0] == "f":
        if {"rni", "rzi", "rmi", "rpi"} & modifiers and math.isfinite(number_):
            sign = math.copysign(1.0, number_)
            number_ = math.copysign(float(integral(number_, modifiers)), sign)
        if math.isnan(number_):
            raise Undefined("which NaN")
        if "sat" in modifiers:
            number_ = min(max(number_, 0.0), 1.0)
        found = from_float(number_, to)
        return flush(found) if "ftz" in modifiers and to == "f32" else found
    if math.isnan(number_):
        return 0 if kind == "f32" and width < 64 else 1 << width - 1
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if to[0] == "s" else (0, (1 << width) - 1)
    if math.isinf(number_):
        return unsigned(high if number_ > 0 else low, width)
    return unsigned(min(max(integral(number_, modifiers), low), high), width)


def integral(value: float, modifiers: set[str]) -> int:
    if "rni" in modifiers:
        return round(value)
    if "rmi" in modifiers:
        return math.floor(value)
    return math.ceil(value) if "rpi" in modifiers else math.trunc(value)


def nearest(value: int, kind: str) -> int:
    """The float nearest to an integer, ties to even, without a detour through another format."""
    digits = 24 if kind == "f32" else 53
    size = abs(value)
    extra = max(size.bit_length() - digits, 0)
    kept, lost, half = size >> extra, size & ((1 << extra) - 1), 1 << extra >> 1
    if extra and (lost > half or (lost == half and kept & 1)):
        kept += 1
    return from_float(math.copysign(math.ldexp(kept, extra), value), kind)
