"""What the arithmetic instructions compute, on arrays.

`compute(op)` returns a function from operand arrays to result arrays for an instruction that is a pure function of registers, or
None where it has no exact meaning here (approximate functions, half precision, matrix products): a value made by such an
instruction is unknown. Registers hold unsigned bit patterns (`uint8/16/32/64`) or `bool`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from . import isa
from .flow import Op
from .syntax import TYPE_BYTES

Array = npt.NDArray[Any]
Compute = Callable[..., tuple[Array, ...]]
"""Takes one array for each source, of the type in `sources`; returns one for each destination."""

UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED: dict[int, Any] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
FLOATS: dict[str, Any] = {"f32": np.float32, "f64": np.float64}


def numpy_type(kind: str) -> Any:
    """The NumPy type of a PTX type, None where there is none (half floats in pairs, 128 bits)."""
    if kind == "pred":
        return np.bool_
    if kind in FLOATS:
        return FLOATS[kind]
    size = TYPE_BYTES.get(kind, 0)
    if kind[0] == "s" and kind[1:].isdigit():
        return SIGNED.get(size)
    if (kind[0] in "ub" and kind[1:].isdigit()) or kind in ("f16", "bf16", "f16x2", "bf16x2", "b16"):
        return UNSIGNED.get(size)
    return None


class Meaning:
    """sources: the PTX type that each source operand is read as; results: that of each destination."""

    __slots__ = ("function", "results", "sources")

    def __init__(self, function: Compute, sources: list[str], results: list[str]) -> None:
        self.function, self.sources, self.results = function, sources, results


def compute(op: Op) -> Meaning | None:
    """The meaning of an op, None where it has none here; see the module."""
    maker = _MAKERS.get(op.opcode)
    if maker is None:
        return None
    types = [m for m in op.modifiers if m in TYPE_BYTES]
    if not types:
        return None
    return maker(op, set(op.modifiers), types)


def _is_float(kind: str) -> bool:
    return kind[0] == "f" or kind.startswith("bf")


def _exact_float(op: Op, modifiers: set[str], kind: str) -> bool:
    """f32 and f64, rounded to nearest."""
    return kind in FLOATS and not modifiers & {"approx", "rz", "rm", "rp", "full", "sat"}


def _flush(a: Array) -> Array:
    """Subnormal f32 become zero of their sign, as `.ftz` says of operands and results."""
    if a.dtype != np.float32:
        return a
    return np.where(np.abs(a) < np.finfo(np.float32).smallest_normal, np.copysign(np.float32(0), a), a)


def _flushing(function: Compute) -> Compute:
    """The function with subnormals flushed before and after it."""
    return lambda *arrays: tuple(_flush(result) for result in function(*map(_flush, arrays)))


def _binary(function: Callable[[Array, Array], Array]) -> Callable[[Op, set[str], list[str]], Meaning | None]:
    def make(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
        kind = types[-1]
        if (
            (_is_float(kind) and not _exact_float(op, modifiers, kind))
            or numpy_type(kind) is None
            or modifiers & {"sat", "relu", "NaN"}
        ):
            return None
        both: Compute = lambda a, b: (function(a, b),)  # noqa: E731
        return Meaning(_flushing(both) if "ftz" in modifiers else both, [kind, kind], [kind])

    return make


def _add(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    kind = types[-1]
    if "cc" in modifiers or op.opcode in ("addc", "subc"):
        return _carry(op, modifiers, kind)
    function = np.add if op.opcode == "add" else np.subtract
    return _binary(function)(op, modifiers, types)


def _carry(op: Op, modifiers: set[str], kind: str) -> Meaning | None:
    size = TYPE_BYTES[kind]
    unsigned = f"u{8 * size}"
    subtract = op.opcode.startswith("sub")
    takes = op.opcode in ("addc", "subc")
    gives = "cc" in modifiers

    def function(a: Array, b: Array, *carry: Array) -> tuple[Array, ...]:
        bit = carry[0].astype(a.dtype) if takes else np.zeros((1, 1), a.dtype)
        if subtract:
            total = a - b - bit
            out = (a < b) | ((a == b) & (bit != 0))
        else:
            total = a + b + bit
            out = (total < a) | ((total == a) & (bit != 0) & (b != 0))
        return (total, out) if gives else (total,)

    return Meaning(function, [unsigned, unsigned] + (["pred"] if takes else []), [unsigned] + (["pred"] if gives else []))


def _high(a: Array, b: Array) -> Array:
    """The upper half of a product."""
    size = a.dtype.itemsize
    if size < 8:
        wide = SIGNED[2 * size] if a.dtype.kind == "i" else UNSIGNED[2 * size]
        return np.asarray(((a.astype(wide) * b.astype(wide)) >> (8 * size)).astype(a.dtype))
    signed = a.dtype.kind == "i"
    x, y = a.astype(np.uint64), b.astype(np.uint64)
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1, y0, y1 = x & low, x >> shift, y & low, y >> shift
    middle = x1 * y0 + ((x0 * y0) >> shift)
    other = (middle & low) + x0 * y1
    high = x1 * y1 + (middle >> shift) + (other >> shift)
    if signed:
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return np.asarray(high.view(a.dtype) if high.dtype != a.dtype else high)


def _product(a: Array, b: Array, modifiers: set[str]) -> Array:
    if "wide" in modifiers:
        size = a.dtype.itemsize * 2
        wide = SIGNED[size] if a.dtype.kind == "i" else UNSIGNED[size]
        return np.asarray(a.astype(wide) * b.astype(wide))
    if "hi" in modifiers:
        return _high(a, b)
    return a * b


def _mul(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    kind = types[-1]
    if _is_float(kind):
        return _binary(np.multiply)(op, modifiers, types)
    if numpy_type(kind) is None or "sat" in modifiers:
        return None
    result = f"{kind[0]}{16 * TYPE_BYTES[kind]}" if "wide" in modifiers else kind
    return Meaning(lambda a, b: (_product(a, b, modifiers),), [kind, kind], [result])


def _mad(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    kind = types[-1]
    if _is_float(kind):
        if kind == "f64" and _exact_float(op, modifiers, kind):
            return None  # a fused product needs more than 64 bits to be exact
        if kind == "f32" and _exact_float(op, modifiers, kind):
            # A product of two floats is exact in double; the sum rounds twice, which differs only where the double is a tie. That
            # cannot be told apart here, so such values are unknown.
            return None
        return None
    if numpy_type(kind) is None or "sat" in modifiers or "cc" in modifiers or op.opcode == "madc":
        return None
    result = f"{kind[0]}{16 * TYPE_BYTES[kind]}" if "wide" in modifiers else kind
    return Meaning(lambda a, b, c: (_product(a, b, modifiers) + c,), [kind, kind, result], [result])


def _mul24(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    kind = types[-1]
    if "sat" in modifiers:
        return None
    wide = np.int64 if kind[0] == "s" else np.uint64

    def cut(a: Array) -> Array:
        return ((a.astype(wide) << wide(40)) >> wide(40)).astype(wide)

    def function(a: Array, b: Array, *c: Array) -> tuple[Array, ...]:
        product = cut(a) * cut(b)
        part = (product >> wide(16) if "hi" in modifiers else product).astype(a.dtype)
        return (part + c[0] if c else part,)

    count = 3 if op.opcode == "mad24" else 2
    return Meaning(function, [kind] * count, [kind])


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return np.true_divide(a, b)
    safe = np.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return np.asarray(a // safe)
    quotient = a // safe
    return np.asarray(quotient + ((a % safe != 0) & ((a < 0) != (safe < 0))).astype(a.dtype))


def _remainder(a: Array, b: Array) -> Array:
    safe = np.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return np.asarray(a % safe)
    return np.asarray(a - _divide(a, safe) * safe)


def _div(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    return _binary(_divide if op.opcode == "div" else _remainder)(op, modifiers, types)


def _minmax(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    kind = types[-1]
    if kind in ("u16x2", "s16x2") or modifiers & {"relu", "xorsign", "abs", "NaN"}:
        return None
    if kind in FLOATS:
        return _binary(_float_extreme(op.opcode == "min"))(op, modifiers, types)
    return _binary(np.minimum if op.opcode == "min" else np.maximum)(op, modifiers, types)


def _float_extreme(least: bool) -> Callable[[Array, Array], Array]:
    """The other operand where one is NaN; -0 is less than +0."""
    choose = np.fmin if least else np.fmax

    def function(a: Array, b: Array) -> Array:
        negative = (np.signbit(a) | np.signbit(b)) if least else (np.signbit(a) & np.signbit(b))
        zero = np.where(negative, -a.dtype.type(0), a.dtype.type(0))
        return np.where((a == 0) & (b == 0), zero, choose(a, b))

    return function


def _bitwise(function: Callable[[Array, Array], Array]) -> Callable[[Op, set[str], list[str]], Meaning | None]:
    def make(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
        kind = types[-1]
        return Meaning(lambda a, b: (function(a, b),), [kind, kind], [kind])

    return make


def _unary(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    kind = types[-1]
    if (_is_float(kind) and kind not in FLOATS) or modifiers & {"approx", "sat"}:
        return None
    functions: dict[str, Callable[[Array], Array]] = {
        "not": lambda a: ~a,
        "cnot": lambda a: (a == 0).astype(a.dtype),
        "neg": lambda a: -a if a.dtype.kind != "u" else (~a + a.dtype.type(1)),
        "abs": np.abs,
    }
    function = functions[op.opcode]
    one: Compute = lambda a: (function(a),)  # noqa: E731
    return Meaning(_flushing(one) if "ftz" in modifiers else one, [kind], [kind])


def _shift(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    kind = types[-1]
    bits = 8 * TYPE_BYTES[kind]
    left = op.opcode == "shl"

    def function(a: Array, n: Array) -> tuple[Array, ...]:
        amount = np.minimum(n, np.uint32(bits - 1)).astype(a.dtype)
        if left:
            return (np.where(n >= bits, a.dtype.type(0), a << amount),)
        if a.dtype.kind == "i":
            return (a >> amount,)
        return (np.where(n >= bits, a.dtype.type(0), a >> amount),)

    return Meaning(function, [kind, "u32"], [kind])


def _funnel(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    def function(a: Array, b: Array, c: Array) -> tuple[Array, ...]:
        whole = (b.astype(np.uint64) << np.uint64(32)) | a
        n = (np.minimum(c, 32) if "clamp" in modifiers else c & np.uint32(31)).astype(np.uint64)
        if "l" in modifiers:
            return (((whole << n) >> np.uint64(32)).astype(np.uint32),)
        return ((whole >> n).astype(np.uint32),)

    return Meaning(function, ["u32", "u32", "u32"], ["u32"])


def _bfe(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    kind = types[-1]
    size = TYPE_BYTES[kind]
    bits = 8 * size
    unsigned = UNSIGNED[size]

    def function(a: Array, b: Array, c: Array) -> tuple[Array, ...]:
        pos, given = (b & 0xFF).astype(np.int64), (c & 0xFF).astype(np.int64)
        length = np.minimum(given, np.maximum(bits - pos, 0))  # bits that the register has; the sign fills the others
        u = a.view(unsigned) if a.dtype != unsigned else a
        shifted = np.where(pos >= bits, unsigned(0), u >> np.minimum(pos, bits - 1).astype(unsigned))
        mask = np.where(
            length >= bits, unsigned(2**bits - 1), (unsigned(1) << np.minimum(length, bits - 1).astype(unsigned)) - unsigned(1)
        )
        result = shifted & mask
        if kind[0] == "s":
            top = np.minimum(pos + given - 1, bits - 1).clip(0)
            sign = ((u >> top.astype(unsigned)) & unsigned(1)).astype(bool) & (given > 0)
            result = np.where(sign, result | ~mask, result)
        return (result.astype(unsigned),)

    return Meaning(function, [kind, "u32", "u32"], [f"u{bits}"])


def _bfi(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    bits = 8 * TYPE_BYTES[types[-1]]
    unsigned = UNSIGNED[bits // 8]

    def function(a: Array, b: Array, c: Array, d: Array) -> tuple[Array, ...]:
        pos, length = (c & 0xFF).astype(np.int64), (d & 0xFF).astype(np.int64)
        mask = np.where(
            length >= bits, unsigned(2**bits - 1), (unsigned(1) << np.minimum(length, bits - 1).astype(unsigned)) - unsigned(1)
        )
        place = np.minimum(pos, bits - 1).astype(unsigned)
        field = np.where(pos >= bits, unsigned(0), mask << place)
        value = np.where(pos >= bits, unsigned(0), a << place)
        return (((b & ~field) | (value & field)).astype(unsigned),)

    kind = f"u{bits}"
    return Meaning(function, [kind, kind, "u32", "u32"], [kind])


def _prmt(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    if modifiers & {"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"}:
        return None

    def function(a: Array, b: Array, c: Array) -> tuple[Array, ...]:
        whole = (b.astype(np.uint64) << np.uint64(32)) | a
        result: Array = np.zeros((1, 1), np.uint32)
        for i in range(4):
            selector = (c >> np.uint32(4 * i)) & np.uint32(15)
            byte = (whole >> ((selector & np.uint32(7)) * np.uint32(8)).astype(np.uint64)).astype(np.uint32) & np.uint32(0xFF)
            signed = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
            result = result | (np.where(selector & np.uint32(8), signed, byte) << np.uint32(8 * i))
        return (result.astype(np.uint32),)

    return Meaning(function, ["u32", "u32", "u32"], ["u32"])


def _lop3(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    if modifiers & {"or", "and"}:
        return None

    def function(a: Array, b: Array, c: Array, table: Array) -> tuple[Array, ...]:
        lut = int(table.reshape(-1)[0])
        result: Array = np.zeros((1, 1), np.uint32)
        for i in range(8):
            if lut >> i & 1:
                result = result | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
        return (result,)

    return Meaning(function, ["u32", "u32", "u32", "u32"], ["u32"])


def _count(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    kind = types[-1]
    bits = 8 * TYPE_BYTES[kind]
    unsigned = UNSIGNED[bits // 8]

    def top(a: Array) -> Array:
        """Index of the highest one, -1 for none, exactly."""
        found = np.full(a.shape, -1, np.int64)
        rest = a.copy()
        for step in (32, 16, 8, 4, 2, 1):
            if step >= bits:
                continue
            high = rest >= unsigned(1 << step)
            found = np.where(high, found + step, found)
            rest = np.where(high, rest >> unsigned(step), rest)
        return np.where(rest != 0, found + 1, -1)

    def function(a: Array) -> tuple[Array, ...]:
        if op.opcode == "popc":
            return (np.bitwise_count(a).astype(np.uint32),)
        if op.opcode == "clz":
            return ((bits - 1 - top(a)).astype(np.uint32),)
        if op.opcode == "brev":
            result = np.zeros(a.shape, unsigned)
            for i in range(bits):
                result |= ((a >> unsigned(i)) & unsigned(1)) << unsigned(bits - 1 - i)
            return (result,)
        value = a
        if kind[0] == "s":
            value = np.where(a >> unsigned(bits - 1), ~a, a)
        found = top(value)
        if "shiftamt" in modifiers:
            found = np.where(found < 0, found, bits - 1 - found)
        return (found.astype(np.int32).view(np.uint32),)

    return Meaning(function, [f"u{bits}"], [f"u{bits}" if op.opcode == "brev" else "u32"])


def _sad(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    kind = types[-1]
    return Meaning(lambda a, b, c: (np.where(a < b, b - a, a - b) + c,), [kind] * 3, [kind])


_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def _comparison(modifiers: list[str], kind: str) -> Callable[[Array, Array], Array] | None:
    for name in modifiers:
        if name in _COMPARE:
            if kind in FLOATS and name == "ne":
                return lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)
            return _COMPARE[name]
        if kind in FLOATS and name in ("num", "nan"):
            nan = name == "nan"
            return lambda a, b: (np.isnan(a) | np.isnan(b)) == nan
        if kind in FLOATS and name[-1:] == "u" and name[:-1] in _COMPARE:
            inner = _COMPARE[name[:-1]]
            return lambda a, b: inner(a, b) | np.isnan(a) | np.isnan(b)
    return None


_JOIN: dict[str, Callable[[Array, Array], Array]] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _setp(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    kind = types[-1]
    compare = _comparison(list(op.modifiers), kind)
    if compare is None or numpy_type(kind) is None or (_is_float(kind) and kind not in FLOATS):
        return None
    if "ftz" in modifiers:
        plain = compare
        compare = lambda a, b: plain(_flush(a), _flush(b))  # noqa: E731
    join = next((_JOIN[m] for m in op.modifiers if m in _JOIN), None)
    if op.opcode == "set":
        result = types[0]

        def make(a: Array, b: Array, *c: Array) -> tuple[Array, ...]:
            found = compare(a, b)
            if join is not None:
                found = join(found, c[0])
            if result == "f32":
                return (found.astype(np.float32),)
            return (np.where(found, np.uint32(0xFFFFFFFF), np.uint32(0)),)

        return Meaning(make, [kind, kind] + (["pred"] if join else []), ["f32" if result == "f32" else "u32"])

    def both(a: Array, b: Array, *c: Array) -> tuple[Array, ...]:
        found = compare(a, b)
        other = ~found
        return (found, other) if join is None else (join(found, c[0]), join(other, c[0]))

    return Meaning(both, [kind, kind] + (["pred"] if join else []), ["pred", "pred"])


def _either(condition: Array, yes: Array, no: Array) -> Array:
    return np.where(condition, yes, no)


def _selp(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    kind = types[-1]
    if op.opcode == "slct":
        condition = types[-1]
        if condition == "f32":
            see = _flush if "ftz" in modifiers else np.asarray
            return Meaning(lambda a, b, c: (_either(see(c) >= 0, a, b),), [types[0], types[0], "f32"], [types[0]])
        return Meaning(lambda a, b, c: (_either(c >= 0, a, b),), [types[0], types[0], "s32"], [types[0]])
    if numpy_type(kind) is None:
        return None
    return Meaning(lambda a, b, c: (_either(c, a, b),), [kind, kind, "pred"], [kind])


def _cvt(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    if len(types) != 2 or "pack" in modifiers:
        return None
    to, source = types
    target, origin = numpy_type(to), numpy_type(source)
    if target is None or origin is None or {to, source} & {"f16", "bf16", "f16x2", "bf16x2", "tf32"}:
        return None
    if to in FLOATS:
        if modifiers & {"rz", "rm", "rp", "sat", "relu"}:
            return None
        rounding = _rounding(modifiers) if modifiers & {"rzi", "rni", "rmi", "rpi"} else np.asarray
        convert: Compute = lambda a: (rounding(a).astype(target),)  # noqa: E731
        return Meaning(_flushing(convert) if "ftz" in modifiers else convert, [source], [to])
    if source in FLOATS:
        rounding = _rounding(modifiers)
        info = np.iinfo(target)
        # PTX ISA, cvt: what a NaN becomes
        nan = 0 if source == "f32" and info.bits < 64 else 1 << (info.bits - 1)
        nan = nan - (1 << info.bits) if nan > info.max else nan

        def to_integer(a: Array) -> tuple[Array, ...]:
            rounded = rounding((_flush(a) if "ftz" in modifiers else a).astype(np.float64))
            low, high = float(info.min), float(info.max)
            clipped = np.where(np.isnan(rounded), 0.0, np.clip(rounded, low, high))
            whole = np.where((clipped < high) & (clipped > low), clipped, 0).astype(target)
            whole = np.where(clipped >= high, target(info.max), np.where(clipped <= low, target(info.min), whole))
            return (np.where(np.isnan(a), target(nan), whole),)

        return Meaning(to_integer, [source], [to])
    if "sat" in modifiers:
        info, have = np.iinfo(target), np.iinfo(origin)
        low, high = max(info.min, have.min), min(info.max, have.max)
        return Meaning(lambda a: (np.clip(a, a.dtype.type(low), a.dtype.type(high)).astype(target),), [source], [to])
    return Meaning(lambda a: (a.astype(target),), [source], [to])


def _rounding(modifiers: set[str]) -> Callable[[Array], Array]:
    if "rni" in modifiers:
        return np.rint
    if "rmi" in modifiers:
        return np.floor
    if "rpi" in modifiers:
        return np.ceil
    return np.trunc


def _szext(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    kind = types[-1]

    def function(a: Array, n: Array) -> tuple[Array, ...]:
        count = (n & np.uint32(31)) if "wrap" in modifiers else np.minimum(n, np.uint32(32))
        shift = (np.uint32(32) - count).astype(np.int64)
        wide = (a.astype(np.int64) << shift).astype(np.int32 if kind[0] == "s" else np.uint32)
        return (np.where(count == 0, wide.dtype.type(0), wide >> np.minimum(shift, 31).astype(wide.dtype)),)

    return Meaning(function, [kind, "u32"], [kind])


def _bmsk(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    def function(a: Array, b: Array) -> tuple[Array, ...]:
        wrap = "wrap" in modifiers
        pos = ((a & np.uint32(31)) if wrap else np.minimum(a, np.uint32(32))).astype(np.uint64)
        length = ((b & np.uint32(31)) if wrap else np.minimum(b, np.uint32(32))).astype(np.uint64)
        ones = (np.uint64(1) << length) - np.uint64(1)
        return (((ones << pos) & np.uint64(0xFFFFFFFF)).astype(np.uint32),)

    return Meaning(function, ["u32", "u32"], ["u32"])


def _mov(op: Op, modifiers: set[str], types: list[str]) -> Meaning | None:
    kind = types[-1]
    if numpy_type(kind) is None:
        return None
    return Meaning(lambda a: (a,), [kind], [kind])


_MAKERS: dict[str, Callable[[Op, set[str], list[str]], Meaning | None]] = {
    "add": _add, "sub": _add, "addc": _add, "subc": _add, "mul": _mul, "mad": _mad, "fma": _mad, "madc": _mad,
    "mul24": _mul24, "mad24": _mul24, "div": _div, "rem": _div, "min": _minmax, "max": _minmax,
    "and": _bitwise(np.bitwise_and), "or": _bitwise(np.bitwise_or), "xor": _bitwise(np.bitwise_xor),
    "not": _unary, "cnot": _unary, "neg": _unary, "abs": _unary, "shl": _shift, "shr": _shift, "shf": _funnel,
    "bfe": _bfe, "bfi": _bfi, "prmt": _prmt, "lop3": _lop3, "popc": _count, "clz": _count, "brev": _count, "bfind": _count,
    "sad": _sad, "setp": _setp, "set": _setp, "selp": _selp, "slct": _selp, "cvt": _cvt, "szext": _szext, "bmsk": _bmsk,
    "mov": _mov,
}  # fmt: skip


def read_as(value: Array, kind: str) -> Array:
    """A register's bits as a PTX type: cut to its width, then seen as signed, unsigned or float."""
    target = numpy_type(kind)
    if value.dtype == target:
        return value
    if target is np.bool_ or value.dtype == np.bool_:
        return value.astype(target)
    size = np.dtype(target).itemsize
    if value.dtype.itemsize != size:
        value = value.astype(UNSIGNED[size])
    return value.view(target)


def write_as(value: Array, register: str) -> Array:
    """A result as the bits of a register of type `register`; a narrower signed value is sign-extended."""
    target = np.dtype(np.bool_) if register == "pred" else np.dtype(UNSIGNED[TYPE_BYTES[register]])
    if value.dtype == target:
        return value
    if value.dtype.kind == "f":
        value = np.ascontiguousarray(value).view(UNSIGNED[value.dtype.itemsize])
    return value.view(target) if value.dtype.itemsize == target.itemsize and target.kind == "u" else value.astype(target)


def result_type(op: Op) -> str:
    return isa.data_type(op.instruction)
