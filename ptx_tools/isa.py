"""What each PTX instruction does to memory.

One function, `accesses`, says for an instruction which memory it reads and writes, how many bytes, and how a recorder can note
that. Sources: the PTX ISA reference (chapter "Instruction Set"), and what ptxas 8.7 to 13.0 accepts. The table fails closed: an
opcode that is not in it raises UnknownOpcode, and its kernel gets no footprint.

====================================================  =========  ==========================================================
family                                                record     bytes
====================================================  =========  ==========================================================
ld ldu st (all qualifiers, generic too)               mark       type x vector
atom red, st.async / red.async on global              mark       type x vector; cas counts as a write, taken or not
cp.async                                              mark       min(cp-size, src-size); none where ignore-src holds
cp.async.bulk, cp.reduce.async.bulk                   bulk       the size operand; with .cp_mask the masked bytes of each 16
cp.async.bulk.tensor, cp.reduce.async.bulk.tensor     tensor     box of the tensor map at the coordinates
tensormap.replace / cp_fenceproxy, discard            mark       128
wmma.load / wmma.store                                fragment   rows of the matrix, `stride` elements apart
multimem.*                                            replicas   the same offset of every replica of a multicast object
tex tld4 suld sust sured                              resource   somewhere in the texture or surface
====================================================  =========  ==========================================================

Everything else is in NO_ACCESS: it touches registers, barriers, tensor memory, caches, or nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal as OneOf

from .syntax import TYPE_BYTES, Address, Instruction, Literal, Module, Name, Not, Operand, PtxError, Vector

NEWEST_VERSION = (9, 4)
"""The newest `.version` whose instructions the table covers; newer modules are refused."""

SpaceName = OneOf["global", "generic", "shared", "local", "param", "const", "resource"]
Record = OneOf["mark", "bulk", "tensor", "fragment", "replicas", "resource"]


class UnknownOpcode(PtxError):
    """An instruction whose effect on memory is not in the table."""


def malformed(instruction: Instruction, where: str) -> PtxError:
    """For an instruction that the table knows and that lacks an operand, a type or a modifier.

    ptxas refuses such a module too.
    """
    return PtxError(
        f"{where}: expected the operands, type and modifiers that {instruction.opcode} takes, found {instruction.mnemonic}"
    )


WRITTEN_WRONG = (IndexError, KeyError, ValueError, AttributeError, StopIteration, AssertionError)
"""What taking an instruction apart raises where a piece of it is not there."""


@dataclass(frozen=True, slots=True)
class Access:
    """One access of an instruction.

    nbytes: bytes for `mark` (the most, where `limit` lowers it), None where `size` or a tensor map says.
    address: where; for `tensor` the address of the tensor map, its coordinates with it.
    size: the operand with the number of bytes (`bulk`), or the stride in elements (`fragment`).
    limit: cp.async only: src-size, or a predicate that suppresses the read (the type of the register tells which).
    byte_mask: the `.cp_mask` operand.
    """

    space: SpaceName
    reads: bool
    writes: bool
    record: Record
    address: Address | None
    nbytes: int | None = None
    size: Operand | None = None
    limit: Operand | None = None
    byte_mask: Operand | None = None

    @property
    def kind(self) -> str:
        return "both" if self.reads and self.writes else "write" if self.writes else "read"

    @property
    def outside(self) -> bool:
        """Whether it may touch memory that outlives the kernel's blocks."""
        return self.space in ("global", "generic", "resource")


NO_ACCESS = frozenset(
    re.findall(
        r"\w+",
        """
    abs activemask add addc alloca and bar barrier bfe bfi bfind bmsk bra brev brkpt brx clz cnot copysign cos
    createpolicy cvt cvta div dp2a dp4a elect ex2 exit fence fma fns getctarank griddepcontrol isspacep istypep lg2
    lop3 mad mad24 madc mapa match max membar min mma mov movmatrix mul mul24 nanosleep neg not or pmevent popc
    prefetch prefetchu prmt rcp redux rem ret rsqrt sad selp set setmaxnreg setp shf shfl shl shr sin slct sqrt
    stackrestore stacksave sub subc suq szext tanh testp trap txq vote xor applypriority vabsdiff vabsdiff2 vabsdiff4
    vadd vadd2 vadd4 vavrg2 vavrg4 vmad vmax vmax2 vmax4 vmin vmin2 vmin4 vset vset2 vset4 vshl vshr vsub vsub2 vsub4
    wgmma
    """,
    )
)
# Shared memory only. What they leave there is data of the kernel, which the interpreter forgets rather than models.
SHARED_WRITES = frozenset({"stmatrix"})
SHARED_READS = frozenset({"ldmatrix"})


TARGETS = frozenset(
    {
        10,
        11,
        12,
        13,
        20,
        21,
        30,
        32,
        35,
        37,
        50,
        52,
        53,
        60,
        61,
        62,
        70,
        72,
        75,
        80,
        86,
        87,
        88,
        89,
        90,
        100,
        101,
        103,
        110,
        120,
        121,
    }
)
"""Architectures whose instructions the table covers."""


def check_version(module: Module) -> None:
    """Raise PtxError where the module is newer than the table, or for an architecture that it does not know."""
    digits = "".join(c for c in module.target if c.isdigit())
    if int(digits or 0) not in TARGETS:
        at = module.where(next((item.span for item in module.items if getattr(item, "name", "") == ".target"), (0, 0)))
        raise PtxError(f"{at}: target {module.target} is none that the instruction table knows, sm_10 to sm_121")
    if module.version > NEWEST_VERSION:
        version, newest = (".".join(map(str, v)) for v in (module.version, NEWEST_VERSION))
        at = module.where(next((item.span for item in module.items if getattr(item, "name", "") == ".version"), (0, 0)))
        raise PtxError(f"{at}: PTX {version} is newer than the instruction table, which ends at {newest}")


def data_type(instruction: Instruction) -> str:
    """The last type among the modifiers, '' where there is none: `cvt.f32.f16` has f16."""
    for modifier in reversed(instruction.modifiers):
        if modifier in TYPE_BYTES:
            return modifier
    return ""


def accesses(instruction: Instruction, where: str = "<ptx>:1:1") -> tuple[Access, ...]:
    """What an instruction does to memory, () for nothing; calls are the caller's to follow.

    Raises UnknownOpcode, naming `where`, for an instruction that the table does not have.
    """
    opcode = instruction.opcode
    if opcode in NO_ACCESS or opcode == "call":
        return ()
    family = _FAMILIES.get(opcode)
    try:
        found = family(instruction) if family else None
        if found and found[0].record == "fragment":
            fragment_rows(instruction)
    except WRITTEN_WRONG:
        raise malformed(instruction, where) from None
    if found is None:
        raise UnknownOpcode(f"{where}: {instruction.mnemonic} is not in the instruction table, so what it touches is unknown")
    return found


def _space(modifiers: tuple[str, ...]) -> SpaceName:
    for modifier in modifiers:
        head = modifier.split("::")[0]
        if head == "global" or head == "shared" or head == "local" or head == "param" or head == "const":
            return head  # type: ignore[return-value]
    return "generic"


def _width(instruction: Instruction) -> int | None:
    kind = data_type(instruction)
    if not kind:
        return None
    vector = next((int(m[1:]) for m in instruction.modifiers if m in ("v2", "v4", "v8")), 1)
    return TYPE_BYTES[kind] * vector


def _address(instruction: Instruction, index: int) -> Address | None:
    """The address operand; old PTX writes `arr[3]` without brackets for it."""
    if index >= len(instruction.operands):
        return None
    operand = instruction.operands[index]
    if isinstance(operand, Address):
        return operand
    base, offset = getattr(operand, "base", None), getattr(operand, "bytes", None)
    return Address(base, offset) if base is not None and offset is not None else None


def _mark(
    instruction: Instruction, index: int, reads: bool, writes: bool, nbytes: int | None = None
) -> tuple[Access, ...] | None:
    address = _address(instruction, index)
    width = nbytes or _width(instruction)
    if address is None or width is None:
        return None
    return (Access(_space(instruction.modifiers), reads, writes, "mark", address, width),)


def _load(instruction: Instruction) -> tuple[Access, ...] | None:
    return _mark(instruction, 1, True, False)


def _store(instruction: Instruction) -> tuple[Access, ...] | None:
    if "bulk" in instruction.modifiers:  # st.bulk fills shared memory with zeros
        address = _address(instruction, 0)
        return None if address is None else (Access("shared", False, True, "bulk", address, size=instruction.operands[1]),)
    if "async" in instruction.modifiers and _space(instruction.modifiers) == "generic":
        return None
    return _mark(instruction, 0, False, True)


def _red(instruction: Instruction) -> tuple[Access, ...] | None:
    if "async" in instruction.modifiers and _space(instruction.modifiers) == "generic":
        return None
    return _mark(instruction, 0, True, True)


def _atom(instruction: Instruction) -> tuple[Access, ...] | None:
    return _mark(instruction, 1, True, True)


def _cp(instruction: Instruction) -> tuple[Access, ...] | None:
    modifiers = instruction.modifiers
    if "async" not in modifiers:
        return None
    if "bulk" in modifiers:
        return _tensor_copy(instruction) if "tensor" in modifiers else _bulk_copy(instruction)
    if {"commit_group", "wait_group", "wait_all", "mbarrier"} & set(modifiers):
        return ()
    operands = list(instruction.operands)
    if not {"ca", "cg"} & set(modifiers) or len(operands) < 3:
        return None
    if "L2::cache_hint" in modifiers:
        operands.pop()
    size, target, source = operands[2], _address(instruction, 0), _address(instruction, 1)
    if not isinstance(size, Literal) or not isinstance(size.value, int) or target is None or source is None or len(operands) > 4:
        return None
    limit = operands[3] if len(operands) == 4 else None
    return (
        Access("global", True, False, "mark", source, size.value, limit=limit),
        Access("shared", False, True, "mark", target, size.value),
    )


def _two_spaces(modifiers: tuple[str, ...]) -> list[SpaceName]:
    return [_space((m,)) for m in modifiers if m.split("::")[0] in ("global", "shared")]


def _bulk_copy(instruction: Instruction) -> tuple[Access, ...] | None:
    modifiers = instruction.modifiers
    if {"commit_group", "wait_group", "prefetch"} & set(modifiers):
        return ()
    if "ignore_oob" in modifiers:  # the bytes at either end that it leaves out are operands of their own
        return None
    spaces = _two_spaces(modifiers)
    target, source = _address(instruction, 0), _address(instruction, 1)
    if len(spaces) != 2 or target is None or source is None or len(instruction.operands) < 3:
        return None
    size = instruction.operands[2]
    mask = instruction.operands[-1] if "cp_mask" in modifiers else None
    reduces = "reduce" in modifiers
    return (
        Access(spaces[1], True, False, "bulk", source, size=size),
        Access(spaces[0], reduces, True, "bulk", target, size=size, byte_mask=mask),
    )


def _tensor_copy(instruction: Instruction) -> tuple[Access, ...] | None:
    modifiers = instruction.modifiers
    if "prefetch" in modifiers:
        return ()
    spaces = _two_spaces(modifiers)
    first, second = _address(instruction, 0), _address(instruction, 1)
    if len(spaces) != 2 or "global" not in spaces or first is None or second is None:
        return None
    if spaces[0] == "global":
        if not first.coordinates:
            return None
        return (
            Access("global", "reduce" in modifiers, True, "tensor", first),
            Access("shared", True, False, "tensor", second),
        )
    if not second.coordinates:
        return None
    return Access("global", True, False, "tensor", second), Access("shared", False, True, "tensor", first)


def _tensormap(instruction: Instruction) -> tuple[Access, ...] | None:
    modifiers = instruction.modifiers
    if "replace" in modifiers:
        return _mark(instruction, 0, False, True, 128)
    if "cp_fenceproxy" in modifiers:
        target, source = _address(instruction, 0), _address(instruction, 1)
        if target is None or source is None:
            return None
        return Access("shared", True, False, "mark", source, 128), Access("global", False, True, "mark", target, 128)
    return None


def _discard(instruction: Instruction) -> tuple[Access, ...] | None:
    return _mark(instruction, 0, False, True, 128)


def _multimem(instruction: Instruction) -> tuple[Access, ...] | None:
    modifiers = instruction.modifiers
    if {"commit_group", "wait_group"} & set(modifiers):
        return ()
    load = "ld_reduce" in modifiers
    address = _address(instruction, 1 if load else 0)
    if address is None or not {"ld_reduce", "st", "red", "cp"} & set(modifiers):
        return None
    space = _space(modifiers)
    return (Access(space, load or "red" in modifiers, not load, "replicas", address, _width(instruction)),)


def _wmma(instruction: Instruction) -> tuple[Access, ...] | None:
    modifiers = instruction.modifiers
    if "mma" in modifiers:
        return ()
    load = "load" in modifiers
    address = _address(instruction, 1 if load else 0)
    if address is None or not ({"load", "store"} & set(modifiers)):
        return None
    stride = instruction.operands[2] if len(instruction.operands) > 2 else None
    return (Access(_space(modifiers), load, not load, "fragment", address, size=stride),)


def _shared_matrix(instruction: Instruction) -> tuple[Access, ...] | None:
    load = instruction.opcode == "ldmatrix"
    address = _address(instruction, 1 if load else 0)
    return None if address is None else (Access("shared", load, not load, "mark", address, 16),)


def _texture(instruction: Instruction) -> tuple[Access, ...] | None:
    reads = instruction.opcode in ("tex", "tld4", "suld", "sured")
    return (Access("resource", reads, not reads or instruction.opcode == "sured", "resource", None),)


def _cluster_launch(instruction: Instruction) -> tuple[Access, ...] | None:
    if "query_cancel" in instruction.modifiers:
        return ()
    address = _address(instruction, 0)
    return None if address is None else (Access("shared", False, True, "mark", address, 16),)


def _barrier(instruction: Instruction) -> tuple[Access, ...] | None:
    """A barrier object is 8 bytes of shared memory, whatever is done to it."""
    address = next((o for o in instruction.operands if isinstance(o, Address)), None)
    if "pending_count" in instruction.modifiers:
        return ()
    if address is None or _space(instruction.modifiers) != "shared":
        return None  # through a generic address it could not be told from data
    return (Access("shared", False, True, "mark", address, 8),)


def _tensor_core(instruction: Instruction) -> tuple[Access, ...] | None:
    """Of what tcgen05 does, only an allocation touches memory as data: it leaves 4 bytes in shared memory."""
    if "alloc" not in instruction.modifiers:
        return ()
    address = _address(instruction, 0)
    return None if address is None else (Access("shared", False, True, "mark", address, 4),)


_FAMILIES = {
    "mbarrier": _barrier,
    "tcgen05": _tensor_core,
    "ld": _load,
    "ldu": _load,
    "st": _store,
    "red": _red,
    "atom": _atom,
    "cp": _cp,
    "tensormap": _tensormap,
    "discard": _discard,
    "multimem": _multimem,
    "wmma": _wmma,
    "ldmatrix": _shared_matrix,
    "stmatrix": _shared_matrix,
    "tex": _texture,
    "tld4": _texture,
    "suld": _texture,
    "sust": _texture,
    "sured": _texture,
    "clusterlaunchcontrol": _cluster_launch,
}


def fragment_rows(instruction: Instruction) -> tuple[int, int, int]:
    """Of a wmma.load or wmma.store: (lines, elements a line, bits an element); a line is a row or a column, as laid out."""
    modifiers = instruction.modifiers
    shape = next(m for m in modifiers if m[0] == "m" and "n" in m and m[1].isdigit())
    m, rest = shape[1:].split("n")
    n, k = rest.split("k")
    which = next(mod for mod in modifiers if mod in ("a", "b", "c", "d"))
    rows, columns = {"a": (m, k), "b": (k, n), "c": (m, n), "d": (m, n)}[which]
    lines, line = (int(rows), int(columns)) if "row" in modifiers else (int(columns), int(rows))
    kind = next(m for m in reversed(modifiers) if m in TYPE_BYTES or m in ("s4", "u4", "b1"))
    bits = {"s4": 4, "u4": 4, "b1": 1, "tf32": 32}.get(kind) or TYPE_BYTES[kind] * 8
    return lines, line, bits


def written_names(instruction: Instruction) -> tuple[Name, ...]:
    """The registers an instruction writes."""
    opcode, modifiers, operands = instruction.opcode, instruction.modifiers, instruction.operands
    if opcode in _NO_DESTINATION or not operands or isinstance(operands[0], Address):
        return ()
    if opcode == "bar" or opcode == "barrier":
        return _names(operands[0]) if "red" in modifiers else ()
    if opcode == "tcgen05" and "ld" not in modifiers:
        return ()
    if opcode == "wgmma" and "mma_async" not in modifiers:
        return ()
    if opcode == "mbarrier" and not {"arrive", "arrive_drop", "test_wait", "try_wait", "pending_count"} & set(modifiers):
        return ()
    return _names(operands[0])


_NO_DESTINATION = frozenset(
    [
        "st",
        "red",
        "bra",
        "brx",
        "ret",
        "exit",
        "trap",
        "brkpt",
        "membar",
        "fence",
        "prefetch",
        "prefetchu",
        "cp",
        "discard",
        "applypriority",
        "nanosleep",
        "pmevent",
        "call",
        "setmaxnreg",
        "griddepcontrol",
        "stackrestore",
        "stmatrix",
        "tensormap",
        "sust",
    ]
)


def _names(operand: Operand) -> tuple[Name, ...]:
    if isinstance(operand, Name):
        return (operand,) if operand.text != "_" else ()
    if isinstance(operand, Vector):
        return tuple(name for item in operand.items for name in _names(item))
    first, second = getattr(operand, "first", None), getattr(operand, "second", None)
    if first is not None and second is not None:
        return _names(first) + _names(second)
    return ()


def read_names(operand: Operand) -> tuple[Name, ...]:
    """Every name in an operand, addresses and coordinates included."""
    if isinstance(operand, Name):
        return (operand,)
    if isinstance(operand, Literal):
        return ()
    if isinstance(operand, Not):
        return (operand.operand,)
    if isinstance(operand, Address):
        base = (operand.base,) if operand.base else ()
        return base + tuple(name for item in operand.coordinates for name in read_names(item))
    base_ = getattr(operand, "base", None)
    if base_ is not None:
        return (base_,)
    items = getattr(operand, "items", None)
    if items is not None:
        return tuple(name for item in items for name in read_names(item))
    first, second = getattr(operand, "first", None), getattr(operand, "second", None)
    return read_names(first) + read_names(second) if first is not None and second is not None else ()
