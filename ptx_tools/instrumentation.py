"""Make a kernel record which bytes it touches: code is spliced into the text of the module, and the maps it fills are read back.

`instrument` puts a few instructions before every access to global memory. Nothing is sampled, and nothing of the module is
printed anew: the text of the result without `edits` is the text that was given. Names, parameters and their order stay as they
are, so the new kernel is launched like the old one. Where it records is said by a control block: a variable of the module named
`Instrumented.control`, in constant memory (in global memory where the module fills its 64 KB of constants). The host sets it,
as `Control(…).pack()`, before the launch, and clears what it points to. Never launch with a control block that was not set.

======  ============  ==============================================================================================
offset  field         meaning
======  ============  ==============================================================================================
0       arena         first address of the memory that is watched; a multiple of 128
8       arena_bytes   its size; a multiple of 128, not 0
16      read_map      `Instrumented.map_bytes(arena_bytes)` zeroed bytes, 128-byte aligned: what was read
24      write_map     the same: what was written
32      outside       one zeroed byte for each site; 1 where an access of that site lay outside of the arena
40      events        16 zeroed bytes (the first 8 count the events), then room for `capacity` records; 16-byte aligned
48      capacity      how many records there is room for; a count above it says that records were lost
56      -             0
======  ============  ==============================================================================================

A site is one access of one instruction. How it records:

=========  =====================================================================================================================
mark       scheme "shadow": 0x01 bytes at `map + (address - arena)`, in stores as wide as the access: since arena and maps are
           multiples of 128, an access that is aligned makes stores that are aligned. No atomics, the same bytes again and again.
           Scheme "bitmap": `red.or` of bit `(address - arena) % 32` and following of the 32-bit word `(address - arena) / 32`.
variable   the same, for an address that is a variable of the module plus a constant. Variables lie outside of the arena; the
           maps go on after it with an area for each (`Instrumented.variables`). A register that may hold the address of a
           variable is compared with the variable at run time, and marks in its area.
event      a record of type `EVENT`, for copies whose extent is not in the instruction: bulk copies, tensor copies, fragments.
=========  =====================================================================================================================

A generic address counts only where it is global. An address outside of arena and variables sets `outside[site]`, and such maps
are refused. Accesses that cannot be recorded (textures, multicast memory, functions without a body) make the kernel
`incomplete`, with the reasons. `read_maps` makes a footprint out of what was recorded, or raises PtxError; it never guesses.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import or_
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from . import flow, isa
from .assembling import assemble
from .footprints import BufferFootprint, Footprint, Intervals, Recorder
from .launch import Buffer, TensorMap
from .syntax import (
    TYPE_BYTES,
    Address,
    Block,
    Directive,
    Function,
    Group,
    Instruction,
    Label,
    Module,
    Name,
    Not,
    Offset,
    Operand,
    PtxError,
    Registers,
    Variable,
    Vector,
)
from .syntax import Literal as Constant

SCHEMES = ("shadow", "bitmap")
ALIGNMENT = 128
CONSTANT_BANK = 65536

EVENT = np.dtype(
    [
        ("site", "<u4"),  # index into Instrumented.sites
        ("size", "<u4"),  # bulk: bytes; fragment: stride in elements; else 0
        ("address", "<u8"),  # generic; tensor: of the tensor map
        ("coordinates", "<i4", 5),  # tensor: as many as the instruction has
        ("mask", "<u4"),  # bulk: bit i is byte i of every 16, 0xFFFF without .cp_mask
        ("offsets", "<u2", 4),  # tensor: of an im2col copy
    ]
)
EVENTS_HEADER = 16


@dataclass(frozen=True)
class Control:
    """What the host puts into the control block; see the module. Raises ValueError for what is not aligned."""

    arena: int
    arena_bytes: int
    read_map: int
    write_map: int
    outside: int
    events: int = 0
    capacity: int = 0

    def __post_init__(self) -> None:
        for name in ("arena", "arena_bytes", "read_map", "write_map"):
            if getattr(self, name) % ALIGNMENT:
                raise ValueError(f"Control: {name}={getattr(self, name):#x} is no multiple of {ALIGNMENT}")
        if self.arena_bytes <= 0:
            raise ValueError("Control: the arena has no bytes")
        if self.events % 16 or (self.capacity and not self.events):
            raise ValueError(f"Control: events={self.events:#x} must be a 16-byte aligned address where there is a capacity")

    def pack(self) -> bytes:
        fields = (self.arena, self.arena_bytes, self.read_map, self.write_map, self.outside, self.events, self.capacity, 0)
        return struct.pack("<8Q", *fields)


@dataclass(frozen=True)
class Site:
    """One access of one instruction.

    nbytes: how many it marks (the most, for cp.async with a source size); None where the event says.
    variables: module variables that the address may lie in; offset: the constant one, for `how` "variable".
    descriptor: of a tensor copy, the kernel parameter its tensor map lies in (`name`, or `name+64`), None where it is not known.
    """

    index: int
    function: str
    line: int
    column: int
    mnemonic: str
    space: isa.SpaceName
    reads: bool
    writes: bool
    how: Literal["mark", "variable", "event"]
    nbytes: int | None
    variables: tuple[str, ...] = ()
    offset: int | None = None
    descriptor: str | None = None
    access: isa.Access | None = field(default=None, repr=False)
    instruction: Instruction | None = field(default=None, repr=False)


@dataclass(frozen=True)
class KernelInfo:
    """sites: indices of those it can reach, its callees' with them. incomplete: why it has no footprint, () where it has one."""

    name: str
    sites: tuple[int, ...]
    incomplete: tuple[str, ...]


@dataclass(frozen=True)
class VariableArea:
    """Where a module variable has its place in the maps: `offset` bytes after the arena."""

    name: str
    nbytes: int
    offset: int


@dataclass(frozen=True)
class Instrumented:
    """An instrumented module. `edits` are (offset into the original text, inserted text), in order."""

    name: str
    text: str = field(repr=False)
    scheme: str
    control: str
    control_space: Literal["const", "global"]
    sites: tuple[Site, ...] = field(repr=False)
    kernels: dict[str, KernelInfo]
    variables: tuple[VariableArea, ...]
    edits: tuple[tuple[int, str], ...] = field(repr=False)

    @cached_property
    def tail(self) -> int:
        """Bytes of the areas for variables."""
        last = self.variables[-1] if self.variables else None
        return _round_up(last.offset + last.nbytes) if last else 0

    def map_bytes(self, arena_bytes: int) -> int:
        """Size of the read map, and of the write map."""
        whole = arena_bytes + self.tail
        return whole if self.scheme == "shadow" else whole // 8

    def event_bytes(self, capacity: int) -> int:
        return EVENTS_HEADER + capacity * EVENT.itemsize

    def where(self, site: Site) -> str:
        return f"{self.name}:{site.line}:{site.column}"

    def kernel(self, name: str | None) -> KernelInfo:
        """The kernel of that name, or the only one."""
        if name is None and len(self.kernels) == 1:
            return next(iter(self.kernels.values()))
        if name is None or name not in self.kernels:
            raise PtxError(f"{self.name}:1:1: expected one of the instrumented kernels {', '.join(self.kernels)}, found {name!r}")
        return self.kernels[name]


def instrument(module: Module, scheme: str = "shadow", *, kernels: Iterable[str] | None = None) -> Instrumented:
    """Make the kernels of a module (all, or those named) and every function in it record what they touch.

    Raises ValueError for a scheme other than "shadow" and "bitmap", PtxError for a module newer than the instruction table, a
    kernel that is not there and an address that nothing declares. What cannot be recorded is said in `KernelInfo.incomplete`.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"the scheme is {' or '.join(map(repr, SCHEMES))}, not {scheme!r}")
    isa.check_version(module)
    if module.address_size != 64:
        raise PtxError(f"{module.name}:1:1: expected .address_size 64, found {module.address_size}")
    chosen = list(module.kernels) if kernels is None else [module.kernel(name).name for name in kernels]
    return _Instrumenter(module, scheme, chosen).run()


class Cost(NamedTuple):
    """Of one kernel: registers a thread, and bytes of spill stores and loads, before and after."""

    registers: int
    registers_after: int
    spills: int
    spills_after: int


def cost(module: Module, instrumented: Instrumented) -> dict[str, Cost]:
    """What ptxas says about the kernels with and without the recording. Raises PtxError where it does not take them."""
    before, after = assemble(module.text, name=module.name).kernels, assemble(instrumented.text, name=module.name).kernels
    return {
        name: Cost(
            old.registers,
            after[name].registers,
            old.spill_store_bytes + old.spill_load_bytes,
            after[name].spill_store_bytes + after[name].spill_load_bytes,
        )
        for name, old in before.items()
        if name in instrumented.kernels
    }


# -- scopes and where addresses come from


@dataclass(frozen=True, slots=True, eq=False)
class _Register:
    """A declared register; each is itself, whatever its name."""

    type: str


_Symbol = _Register | Variable


@dataclass(slots=True)
class _Placed:
    """An instruction, and what the names in it mean where it stands."""

    instruction: Instruction
    symbols: dict[str, _Symbol]


class _Body:
    """One function: its instructions in order with their names resolved, and the definitions of each register."""

    def __init__(self, module: Module, function: Function) -> None:
        self.module, self.function = module, function
        self.placed: list[_Placed] = []
        self.definitions: dict[_Register, list[_Placed]] = {}
        self.lists: dict[str, tuple[str, ...]] = {}
        self._roots: dict[_Register, frozenset[str]] = {}
        self._globals = {id(v) for v in module.variables.values() if v.space == "global"}
        self.declared: set[str] = set()
        names: dict[str, _Symbol] = dict(module.variables)
        for variable in (function.params or ()) + (function.returns or ()):
            names[variable.name] = _Register(variable.type) if variable.space == "reg" else variable
        assert function.body is not None
        self._block(function.body, [names])

    def _block(self, block: Block, scopes: list[dict[str, _Symbol]]) -> None:
        here: dict[str, _Symbol] = {}
        scopes = [*scopes, here]
        label = ""
        for item in block.items:
            if isinstance(item, Registers):
                for name, count in item.names:
                    for one in (name,) if count is None else (f"{name}{i}" for i in range(count)):
                        here[one] = _Register(item.type)
                        for first, second in zip("xyzw", "rgba", strict=True) if item.vector else ():
                            here[f"{one}.{first}"] = here[f"{one}.{second}"] = _Register(item.type)
            elif isinstance(item, Variable):
                for one in (item.name,) if item.count is None else (f"{item.name}{i}" for i in range(item.count)):
                    here[one] = item
            elif isinstance(item, Block):
                self._block(item, scopes)
            elif isinstance(item, Label):
                label = item.name
            elif isinstance(item, Directive):
                if item.name == ".calltargets":
                    self.lists[label] = tuple(token for token in item.tokens if token not in (",", ";"))
            else:
                self._place(item, scopes)
        self.declared.update(here)

    def _place(self, item: Instruction, scopes: list[dict[str, _Symbol]]) -> None:
        names = {name.text for operand in item.operands for name in isa.read_names(operand)}
        if item.predicate is not None:
            names.add(item.predicate)
        found = {}
        for name in names:
            for scope in reversed(scopes):
                if name in scope:
                    found[name] = scope[name]
                    break
        placed = _Placed(item, found)
        self.placed.append(placed)
        for target in isa.written_names(item):
            register = found.get(target.text)
            if isinstance(register, _Register):
                self.definitions.setdefault(register, []).append(placed)

    def roots(self, register: _Register) -> frozenset[str]:
        """The module's global variables whose addresses may be in a register: those that its value is computed from.

        What is loaded stops the search, so more is possible; that is why addresses are compared at run time.
        """
        known = self._roots.get(register)
        if known is not None:
            return known
        seen, stack, found = {register}, [register], set()
        while stack:
            for placed in self.definitions.get(stack.pop(), ()):
                if placed.instruction.opcode in _FROM_MEMORY:
                    continue
                for symbol in placed.symbols.values():
                    if isinstance(symbol, _Register):
                        if symbol not in seen:
                            seen.add(symbol)
                            stack.append(symbol)
                    elif id(symbol) in self._globals:
                        found.add(symbol.name)
        result = self._roots[register] = frozenset(found)
        return result

    def parameter(self, placed: _Placed, address: Address) -> str | None:
        """The kernel parameter that an address lies in, as `name` or `name+offset`, where that is plain to see."""
        if not self.function.entry or address.base is None:
            return None
        found = self._constant(placed, address.base, frozenset())
        if found is None or found[0].space != "param":
            return None
        offset = found[1] + address.offset
        return f"{found[0].name}+{offset}" if offset else found[0].name

    def _constant(self, placed: _Placed, operand: Operand, seen: frozenset[_Register]) -> tuple[Variable, int] | None:
        """The variable and offset that an operand is the address of, if all its definitions agree."""
        if isinstance(operand, Offset):
            base = self._constant(placed, operand.base, seen)
            return base and (base[0], base[1] + operand.bytes)
        symbol = placed.symbols.get(operand.text) if isinstance(operand, Name) else None
        if symbol is None or isinstance(symbol, Variable):
            return (symbol, 0) if symbol else None
        if symbol in seen:
            return None
        results = {self._step(definition, seen | {symbol}) for definition in self.definitions.get(symbol, ())}
        return results.pop() if len(results) == 1 else None

    def _step(self, placed: _Placed, seen: frozenset[_Register]) -> tuple[Variable, int] | None:
        item = placed.instruction
        if item.opcode in ("mov", "cvta", "cvt") and not isinstance(item.operands[0], Vector):
            return self._constant(placed, item.operands[1], seen)
        if item.opcode in ("add", "sub"):
            base, step = item.operands[1:3]
            if item.opcode == "add" and isinstance(base, Constant):
                base, step = step, base
            found = self._constant(placed, base, seen)
            if found is not None and isinstance(step, Constant) and isinstance(step.value, int):
                return found[0], found[1] + (step.value if item.opcode == "add" else -step.value)
        return None

    def numbers(self, register: _Symbol | None) -> frozenset[int] | None:
        """The values that a register can have, where its definitions say so: `selp.b32 %size, 16, 0, %p`."""
        seen, stack, found = {register}, [register], set()
        while stack:
            symbol = stack.pop()
            made = self.definitions.get(symbol) if isinstance(symbol, _Register) else None
            if not made:
                return None
            for placed in made:
                item = placed.instruction
                if item.opcode not in ("mov", "selp"):
                    return None
                for source in item.operands[1 : 3 if item.opcode == "selp" else 2]:
                    if isinstance(source, Constant) and isinstance(source.value, int):
                        found.add(source.value % 2**32)
                    elif isinstance(source, Name):
                        other = placed.symbols.get(source.text)
                        if other not in seen:
                            seen.add(other)
                            stack.append(other)
                    else:
                        return None
        return frozenset(found)


_FROM_MEMORY = frozenset({"ld", "ldu", "atom", "tex", "tld4", "suld", "multimem", "call"})


# -- the code that records


class _Snippet:
    """Code that goes before one instruction, in a scope of its own. It has no branches and leaves every other register alone."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.declared: dict[str, list[str]] = {}
        self.lines: list[str] = []
        self.count = 0

    def new(self, kind: str) -> str:
        name = f"{self.prefix}{self.count}"
        self.count += 1
        self.declared.setdefault(kind, []).append(name)
        return name

    def add(self, line: str, guard: str = "") -> None:
        self.lines.append(f"@{guard} {line};" if guard else f"{line};")

    def set(self, kind: str, line: str) -> str:
        """A new register that `line`, with `$` for the register, computes."""
        name = self.new(kind)
        self.add(line.replace("$", name, 1))
        return name

    def both(self, first: str, second: str) -> str:
        """The conjunction of two guards, each `p`, `!p`, or '' for true."""
        if not first or not second:
            return first or second
        a, b = (self.set("pred", f"not.pred $, {term[1:]}") if term[0] == "!" else term for term in (first, second))
        return self.set("pred", f"and.pred $, {a}, {b}")

    @property
    def text(self) -> str:
        if not self.lines:
            return ""
        registers = " ".join(f".reg .{kind} {', '.join(names)};" for kind, names in self.declared.items())
        return f"{{ {registers} {' '.join(self.lines)} }} "


@dataclass(slots=True)
class _Spot:
    """Where an access is in the maps: a 64-bit offset, and the guard under which there is one."""

    offset: str
    inside: str


class _Instrumenter:
    def __init__(self, module: Module, scheme: str, kernels: list[str]) -> None:
        self.module, self.scheme, self.kernels = module, scheme, kernels
        self.control = _unused("__tessera_control", module.text)
        self.prefix = _unused("%tsr", module.text) + "_"
        self.space: Literal["const", "global"] = "const" if _fits_constants(module) else "global"
        self.sites: list[Site] = []
        self.edits: list[tuple[int, str]] = []
        self.reasons: dict[str, list[str]] = {}
        self.callees: dict[str, set[str]] = {}
        self.variables = {area.name: area for area in _areas(module)}
        # Where there is no isspacep.param there is no cvta.param, so nothing makes a generic address of a parameter.
        knows_param = module.version >= (7, 7) and int("".join(filter(str.isdigit, module.target)) or 0) >= 70
        self.spaces = ("global", "param") if knows_param else ("global",)
        self.has_activemask = module.version >= (6, 2)

    def run(self) -> Instrumented:
        self.edits.append((self._head(), f" .visible .{self.space} .align 16 .b64 {self.control}[8];"))
        for name, function in self.module.functions.items():
            if function.body is not None and (not function.entry or name in self.kernels):
                self._function(function)
        self.edits.sort(key=lambda edit: edit[0])
        infos = {name: self._info(name) for name in self.kernels}
        return Instrumented(
            self.module.name, splice(self.module.text, self.edits), self.scheme, self.control, self.space, tuple(self.sites),
            infos, tuple(self.variables.values()), tuple(self.edits),
        )  # fmt: skip

    def _head(self) -> int:
        """The end of the last of the directives that must come first."""
        heads = [i.span[1] for i in self.module.items if isinstance(i, Directive) and i.name in (".target", ".address_size")]
        if not heads:
            raise PtxError(f"{self.module.name}:1:1: expected a .target")
        return max(heads)

    def _info(self, kernel: str) -> KernelInfo:
        reached, stack = {kernel}, [kernel]
        while stack:
            for callee in self.callees.get(stack.pop(), ()):
                if callee not in reached:
                    reached.add(callee)
                    stack.append(callee)
        sites = tuple(site.index for site in self.sites if site.function in reached)
        return KernelInfo(kernel, sites, tuple(why for name in self.reasons if name in reached for why in self.reasons[name]))

    # -- one function

    def _function(self, function: Function) -> None:
        body = _Body(self.module, function)
        for placed in body.placed:
            item = placed.instruction
            if item.opcode == "call":
                self._call(body, placed)
                continue
            try:
                found = isa.accesses(item, self.module.where(item.span))
            except isa.UnknownOpcode as error:
                self.reasons.setdefault(function.name, []).append(str(error))
                continue
            code = _Snippet(self.prefix)
            for access in found:
                if access.outside:
                    self._access(body, placed, access, code)
            if code.text:
                self.edits.append((item.span[0], code.text))

    def _cannot(self, body: _Body, item: Instruction, why: str) -> None:
        self.reasons.setdefault(body.function.name, []).append(f"{self.module.where(item.span)}: {item.mnemonic}: {why}")

    def _call(self, body: _Body, placed: _Placed) -> None:
        """Callees are instrumented in their own places; here it is only seen that there is one."""
        item = placed.instruction
        operands = [operand for operand in item.operands if not isinstance(operand, Group)]
        target = operands[0] if operands else None
        if not isinstance(target, Name) or target.text in placed.symbols or target.text not in self.module.functions:
            last = operands[-1] if len(operands) > 1 else None
            names = body.lists.get(last.text, ()) if isinstance(last, Name) else ()
            if not names:
                self._cannot(body, item, "the callee of an indirect call may be a function that records nothing")
                return
        else:
            names = (target.text,)
        for name in names:
            callee = self.module.functions.get(name)
            if callee is not None and callee.body is not None:
                self.callees.setdefault(body.function.name, set()).add(name)
            elif name not in flow.NEVER_RETURN | flow.NO_MEMORY | flow.FRESH_MEMORY:
                self._cannot(body, item, f"{name} has no body in this module, so it records nothing")

    def _access(self, body: _Body, placed: _Placed, access: isa.Access, code: _Snippet) -> None:
        item = placed.instruction
        if access.record == "resource":
            self._cannot(body, item, "which part of a texture or surface it touches cannot be recorded")
            return
        if access.record == "replicas":
            self._cannot(body, item, "the replicas behind a multicast address cannot be recorded")
            return
        assert access.address is not None
        base = access.address.base
        symbol = placed.symbols.get(base.text) if base else None
        if base is not None and symbol is None:
            raise PtxError(f"{self.module.where(item.span)}: expected a declared name, found {base.text!r}")
        if isinstance(symbol, Variable) and symbol.space.split("::")[0] not in ("global", "const") and access.record != "tensor":
            return  # `ld.u32 %r, [shared_variable]`: ptxas takes the space of the variable
        if isinstance(symbol, Variable) and symbol.space == "const" and access.space == "generic":
            return
        guard = "" if item.predicate is None else f"!{item.predicate}" if item.negated else item.predicate
        if access.record == "mark":
            self._mark(body, placed, access, guard, code)
        else:
            self._event(body, placed, access, guard, code)

    def _site(
        self, body: _Body, item: Instruction, access: isa.Access, how: Literal["mark", "variable", "event"], **more: Any
    ) -> Site:
        line, column = self.module.place(item.span[0])
        site = Site(
            len(self.sites), body.function.name, line, column, item.mnemonic, access.space, access.reads, access.writes, how,
            access=access, instruction=item, **more,
        )  # fmt: skip
        self.sites.append(site)
        return site

    def _field(self, code: _Snippet, offset: int) -> str:
        return code.set("b64", f"ld.{self.space}.b64 $, [{self.control}+{offset}]")

    def _address(self, code: _Snippet, placed: _Placed, address: Address) -> str:
        """A 64-bit register with the address. One that is given in 32 bits is extended, as the hardware does."""
        base = address.base
        if base is None:
            return code.set("b64", f"mov.b64 $, {address.offset % 2**64}")
        symbol = placed.symbols.get(base.text)
        if isinstance(symbol, _Register):
            name = base.text if TYPE_BYTES[symbol.type] == 8 else code.set("b64", f"cvt.u64.u32 $, {base.text}")
        else:
            name = code.set("b64", f"mov.b64 $, {base.text}")
        return code.set("b64", f"add.s64 $, {name}, {address.offset}") if address.offset else name

    # -- marks

    def _mark(self, body: _Body, placed: _Placed, access: isa.Access, guard: str, code: _Snippet) -> None:
        assert access.address is not None
        assert access.nbytes is not None
        width, count, bits = access.nbytes, "", -1
        if isinstance(access.limit, Constant):
            width = min(width, int(access.limit.value) % 2**32)
        elif access.limit is not None:
            if self._is_predicate(placed, access.limit):
                inverse = access.limit.operand.text if isinstance(access.limit, Not) else f"!{_text(access.limit)}"
                guard = code.both(guard, inverse)
            else:
                guard, count, bits = self._count(code, body, placed, access.limit, width, guard)
        base = access.address.base
        symbol = placed.symbols.get(base.text) if base else None
        if isinstance(symbol, Variable):
            area = self._area(symbol)
            if area and not count and 0 <= access.address.offset <= area.nbytes - width:
                at = access.address.offset
                self._site(body, placed.instruction, access, "variable", nbytes=width, variables=(area.name,), offset=at)
                if width:
                    start = self._field(code, 8)
                    spot = _Spot(code.set("b64", f"add.s64 $, {start}, {area.offset + at}"), guard)
                    self._write(code, access, spot, width, min(symbol.align, at & -at or ALIGNMENT))
                return
            roots = [symbol.name] if area else []
        else:
            roots = sorted(body.roots(symbol)) if symbol else []
        seen = [name for name in roots if name not in body.declared]  # a namesake in the function may hide the variable
        near = [a for name in seen if (a := self.variables.get(name)) and a.nbytes >= width]
        if count:
            near = [a for a in near if self.module.variables[a.name].align >= width]
        site = self._site(body, placed.instruction, access, "mark", nbytes=width, variables=tuple(a.name for a in near))
        if width:
            spot = self._locate(code, placed, access, width, guard, site, near)
            unit = min([ALIGNMENT, *(self.module.variables[area.name].align for area in near)])
            self._write(code, access, spot, width, unit, count, bits)

    def _count(
        self, code: _Snippet, body: _Body, placed: _Placed, limit: Operand, width: int, guard: str
    ) -> tuple[str, str, int]:  # fmt: skip
        """The source size of a cp.async: guard with "not 0", a register with the number of bytes, and its bits that may be set.

        Most sizes are all or nothing; then the guard alone says it, and the register is ''.
        """
        size = _text(limit)
        numbers = body.numbers(placed.symbols.get(size))
        bits = -1 if numbers is None else reduce(or_, (min(number, width) for number in numbers), 0)
        joined = f".and.u32 $, {size}, 0, {guard}" if guard else f".u32 $, {size}, 0"
        guard = code.set("pred", f"setp.ne{joined}")
        return guard, "" if bits == width else code.set("b32", f"min.u32 $, {size}, {width}"), bits

    def _area(self, symbol: Variable) -> VariableArea | None:
        area = self.variables.get(symbol.name)
        return area if area and self.module.variables.get(symbol.name) is symbol else None

    def _is_predicate(self, placed: _Placed, operand: Operand) -> bool:
        """Whether the fourth operand of cp.async is a predicate, which turns the source off, or a number of bytes."""
        symbol = placed.symbols.get(operand.text) if isinstance(operand, Name) else None
        return isinstance(operand, Not) or (isinstance(symbol, _Register) and symbol.type == "pred")

    def _locate(
        self, code: _Snippet, placed: _Placed, access: isa.Access, width: int, guard: str, site: Site, near: list[VariableArea]
    ) -> _Spot:
        """Find the access in the arena or in one of the variables; where it is global and in neither, set the site's flag."""
        assert access.address is not None
        address = self._address(code, placed, access.address)
        base, size = code.new("b64"), code.new("b64")
        code.add(f"ld.{self.space}.v2.b64 {{{base}, {size}}}, [{self.control}]")
        offset = code.set("b64", f"sub.s64 $, {address}, {base}")
        # Arena and access are aligned, so the access is inside where its first byte is. A tensor map may be aligned to 64 only.
        limit = code.set("b64", f"add.s64 $, {size}, {1 - width}") if width > 32 else size
        inside, beyond = code.new("pred"), code.new("pred")
        if not near:
            joined = (
                f".and.u64 {inside}|{beyond}, {offset}, {limit}, {guard}"
                if guard
                else f".u64 {inside}|{beyond}, {offset}, {limit}"
            )
            code.add(f"setp.lt{joined}")
        else:
            found = code.set("pred", f"setp.lt.u64 $, {offset}, {limit}")
            for area in near:
                start = code.set("b64", f"mov.b64 $, {area.name}")
                at = code.set("b64", f"sub.s64 $, {address}, {start}")
                here = code.set("pred", f"setp.lt.u64 $, {at}, {area.nbytes - width + 1}")
                code.add(f"or.pred {found}, {found}, {here}")
                code.add(f"add.s64 {at}, {at}, {size}")
                code.add(f"add.s64 {at}, {at}, {area.offset}")
                code.add(f"selp.b64 {offset}, {at}, {offset}, {here}")
            missed = code.set("pred", f"not.pred $, {found}")
            inside, beyond = code.both(found, guard), code.both(missed, guard)
        if access.space == "generic":
            beyond = self._if_global(code, address, beyond)
        flags, one = self._field(code, 32), code.set("b32", "mov.b32 $, 1")
        code.add(f"st.global.b8 [{flags}+{site.index}], {one}", beyond)
        return _Spot(offset, inside)

    def _if_global(self, code: _Snippet, address: str, guard: str) -> str:
        """The guard, where a generic address is global. The window of the parameters lies inside of global memory."""
        for space in self.spaces:
            holds = code.set("pred", f"isspacep.{space} $, {address}")
            guard = code.both(guard, holds if space == "global" else f"!{holds}")
        return guard

    def _write(
        self, code: _Snippet, access: isa.Access, spot: _Spot, width: int, unit: int, count: str = "", bits: int = -1
    ) -> None:  # fmt: skip
        """Mark `width` bytes from the spot on, in pieces aligned to `unit`.

        count: a register with how many of them to mark, 0 to `width`; bits: which bits of that number may be set.
        """
        fields = [field_ for field_, wanted in ((16, access.reads), (24, access.writes)) if wanted]
        maps = [self._field(code, field_) for field_ in fields]
        if self.scheme == "bitmap":
            self._bits(code, maps, spot, width, unit, count)
            return
        ones = code.set("b32", "mov.b32 $, 0x01010101")
        starts = [code.set("b64", f"add.s64 $, {map_}, {spot.offset}") for map_ in maps]
        if not count:
            for at, size in _pieces(width, min(unit, 16)):
                for start in starts:
                    code.add(f"{_STORES[size]} [{start}+{at}], {_filled(ones, size)}", spot.inside)
            return
        # One store for each bit of the number, the widest first: a store comes after what the higher bits have marked.
        for size in (16, 8, 4, 2, 1):
            if size > width or not bits & size:
                continue
            bit = code.set("b32", f"and.b32 $, {count}, {size}")
            chosen = code.set("pred", f"setp.ne.and.b32 $, {bit}, 0, {spot.inside}")
            targets = starts
            if size < width and bits & (2 * width - 2 * size):
                above = code.set("b32", f"and.b32 $, {count}, {2 * width - 2 * size}")
                wide = code.set("b64", f"cvt.u64.u32 $, {above}")
                targets = [code.set("b64", f"add.s64 $, {start}, {wide}") for start in starts]
            for target in targets:
                code.add(f"{_STORES[size]} [{target}], {_filled(ones, size)}", chosen)

    def _bits(self, code: _Snippet, maps: list[str], spot: _Spot, width: int, unit: int, count: str) -> None:
        # No register is set twice: a turn of a loop must be seen to do what the turn before it did.
        for at, size in [(0, width)] if count else _pieces(width, min(unit, 32)):
            offset = code.set("b64", f"add.s64 $, {spot.offset}, {at}") if at else spot.offset
            word = code.set("b64", f"shl.b64 $, {code.set('b64', f'shr.u64 $, {offset}, 5')}, 2")
            low = code.set("b32", f"and.b32 $, {code.set('b32', f'cvt.u32.u64 $, {offset}')}, 31")
            if count:
                ones = code.set("b32", f"sub.u32 $, {code.set('b32', f'shl.b32 $, 1, {count}')}, 1")
            else:
                ones = code.set("b32", f"mov.b32 $, {(1 << size) - 1}")
            bits = code.set("b32", f"shl.b32 $, {ones}, {low}")
            for map_ in maps:
                target = code.set("b64", f"add.s64 $, {map_}, {word}")
                code.add(f"red.global.or.b32 [{target}], {bits}", spot.inside)

    # -- events

    def _event(self, body: _Body, placed: _Placed, access: isa.Access, guard: str, code: _Snippet) -> None:
        assert access.address is not None
        item = placed.instruction
        descriptor = body.parameter(placed, access.address) if access.record == "tensor" else None
        site = self._site(body, item, access, "event", nbytes=None, descriptor=descriptor)
        address = self._address(code, placed, access.address)
        if access.space == "generic":
            guard = self._if_global(code, address, guard)
        if access.record == "fragment" and self.has_activemask:
            guard = self._first_lane(code, guard)
        words = self._payload(code, placed, access, site, address)
        buffer, capacity, at = self._field(code, 40), self._field(code, 48), code.set("b64", "mov.b64 $, 0")
        code.add(f"atom.global.add.u64 {at}, [{buffer}], 1", guard)
        joined = f".and.u64 $, {at}, {capacity}, {guard}" if guard else f".u64 $, {at}, {capacity}"
        room = code.set("pred", f"setp.lt{joined}")
        record = code.set("b64", f"mad.lo.s64 $, {at}, {EVENT.itemsize}, {buffer}")
        for index in range(0, len(words), 4):
            four = ", ".join(words[index : index + 4])
            code.add(f"st.global.v4.b32 [{record}+{EVENTS_HEADER + 4 * index}], {{{four}}}", room)

    def _first_lane(self, code: _Snippet, guard: str) -> str:
        """One of the threads that run a wmma: its operands are the same in all. activemask has those that pass its guard."""
        mask = code.set("b32", "mov.b32 $, 0")
        code.add(f"activemask.b32 {mask}", guard)
        lower = code.set("b32", "mov.u32 $, %lanemask_lt")
        code.add(f"and.b32 {lower}, {lower}, {mask}")
        joined = f".and.b32 $, {lower}, 0, {guard}" if guard else f".b32 $, {lower}, 0"
        return code.set("pred", f"setp.eq{joined}")

    def _payload(self, code: _Snippet, placed: _Placed, access: isa.Access, site: Site, address: str) -> list[str]:
        """The twelve words of an event."""
        item = placed.instruction
        assert access.address is not None
        zero = code.set("b32", "mov.b32 $, 0")
        low, high = code.new("b32"), code.new("b32")
        code.add(f"mov.b64 {{{low}, {high}}}, {address}")
        size, mask = zero, zero
        if access.record == "fragment" and access.size is None:
            size = code.set("b32", f"mov.b32 $, {isa.fragment_rows(item)[1]}")
        elif access.size is not None:
            size = self._word(code, placed, access.size)
        if access.record == "bulk":
            mask = (
                code.set("b32", "mov.b32 $, 0xFFFF") if access.byte_mask is None else self._word(code, placed, access.byte_mask)
            )
        coordinates = [self._word(code, placed, c) for c in access.address.coordinates]
        coordinates += [zero] * (5 - len(coordinates))
        offsets = [self._word(code, placed, o) for o in _im2col_offsets(item)] if access.record == "tensor" else []
        offsets += [zero] * (4 - len(offsets))
        pairs = [zero, zero]
        for index in (0, 1):
            first, second = offsets[2 * index : 2 * index + 2]
            if first != zero or second != zero:
                shifted = code.set("b32", f"shl.b32 $, {second}, 16")
                only = code.set("b32", f"and.b32 $, {first}, 0xFFFF")
                pairs[index] = code.set("b32", f"or.b32 $, {only}, {shifted}")
        return [code.set("b32", f"mov.b32 $, {site.index}"), size, low, high, *coordinates, mask, *pairs]

    def _word(self, code: _Snippet, placed: _Placed, operand: Operand) -> str:
        """A 32-bit register with a number that an operand gives."""
        if isinstance(operand, Constant):
            return code.set("b32", f"mov.b32 $, {int(operand.value) % 2**32}")
        text = _text(operand)
        symbol = placed.symbols.get(text)
        size = TYPE_BYTES[symbol.type] if isinstance(symbol, _Register) else 4
        return code.set("b32", {2: f"cvt.u32.u16 $, {text}", 8: f"cvt.u32.u64 $, {text}"}.get(size, f"mov.b32 $, {text}"))


_STORES = {1: "st.global.b8", 2: "st.global.b16", 4: "st.global.b32", 8: "st.global.v2.b32", 16: "st.global.v4.b32"}


def _filled(ones: str, size: int) -> str:
    return f"{{{', '.join([ones] * (size // 4))}}}" if size > 4 else ones


def _pieces(width: int, widest: int) -> Iterator[tuple[int, int]]:
    """`width` bytes as (offset, power of two) pieces, each aligned to itself."""
    at, size = 0, widest
    while at < width:
        while size > width - at:
            size //= 2
        yield at, size
        at += size


def _text(operand: Operand) -> str:
    if not isinstance(operand, Name):
        raise TypeError(f"expected a register, found {operand}")
    return operand.text


def _im2col_offsets(item: Instruction) -> tuple[Operand, ...]:
    """The offsets of a load in one of the im2col modes: a vector after the barrier."""
    if not any(modifier.startswith("im2col") for modifier in item.modifiers):
        return ()
    return next((operand.items for operand in item.operands if isinstance(operand, Vector)), ())


def _round_up(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT


def _unused(name: str, text: str) -> str:
    """`name`, or `name` and a number, that stands nowhere in the text."""
    candidate, number = name, 0
    while candidate in text:
        number += 1
        candidate = f"{name}{number}"
    return candidate


def _fits_constants(module: Module) -> bool:
    used = 0
    for variable in module.variables.values():
        if variable.space == "const":
            if variable.nbytes is None or "extern" in "".join(variable.linkage):
                return False
            used = -(-used // variable.align) * variable.align + variable.nbytes
    return used + 16 + 64 <= CONSTANT_BANK


def _areas(module: Module) -> Iterator[VariableArea]:
    """A place in the maps for each global variable of known size."""
    offset = 0
    for name, variable in module.variables.items():
        if variable.space == "global" and variable.nbytes and variable.count is None:
            yield VariableArea(name, variable.nbytes, offset)
            offset = _round_up(offset + variable.nbytes)


def splice(text: str, edits: Iterable[tuple[int, str]]) -> str:
    """The text with each (offset, insertion) put in; offsets are those of the text as given, in order."""
    parts, last = [], 0
    for offset, inserted in edits:
        parts += [text[last:offset], inserted]
        last = offset
    return "".join([*parts, text[last:]])


# -- reading back


@dataclass(frozen=True, eq=False)
class Recording:
    """What the host copied back after the launch: the memory that the control block points to, as bytes or as uint8 arrays.

    events: the header and the records; None where the kernel has no sites of that kind.
    """

    read_map: bytes | npt.NDArray[np.uint8]
    write_map: bytes | npt.NDArray[np.uint8]
    outside: bytes | npt.NDArray[np.uint8]
    events: bytes | npt.NDArray[np.uint8] | None = None


def read_maps(
    instrumented: Instrumented,
    kernel: str | None,
    control: Control,
    recording: Recording,
    buffers: Mapping[str, Buffer],
    maps: Mapping[str | int, TensorMap] | None = None,
    *,
    variables: Mapping[str, int] | None = None,
) -> Footprint:
    """The footprint of the launch that filled the maps.

    buffers: by name, in the order that the footprint shall have; what was touched in no buffer is outside. maps: tensor maps by
    the name of the kernel parameter they are in (`Site.descriptor`) or by the address they lie at. variables: addresses of module
    variables, which bulk copies to and from them need; other accesses to variables are known without.

    Raises PtxError where the launch has no exact footprint: an incomplete kernel, an access outside of the arena, lost events, a
    tensor map that is not known. Raises ValueError where the recording does not have the sizes that the control block says.
    """
    info = instrumented.kernel(kernel)
    if info.incomplete:
        raise PtxError(info.incomplete[0] + (f" (and {len(info.incomplete) - 1} more)" if len(info.incomplete) > 1 else ""))
    maps = maps or {}
    _check_outside(instrumented, recording)
    named = dict(buffers)
    for key, map_ in maps.items():
        if isinstance(key, str) and key not in named:
            named[key] = Buffer(map_.addr, map_.nbytes)
    places = dict(variables or {})
    nowhere = 1 << 59  # variables whose address nobody said lie where no memory is
    areas = {a.name: (places.get(a.name, nowhere + control.arena_bytes + a.offset), a) for a in instrumented.variables}
    targets = [(name, buffer.addr, buffer.nbytes) for name, buffer in named.items()]
    targets += [(name, at, area.nbytes) for name, (at, area) in areas.items()]
    recorder = Recorder(targets)
    for write, raw in ((False, recording.read_map), (True, recording.write_map)):
        marks = _marks(instrumented, control, raw)
        found = Intervals.from_marks(marks[: control.arena_bytes], 1, control.arena)
        recorder.spans(write, found.starts, found.ends)
        for at, area in areas.values():
            first = control.arena_bytes + area.offset
            found = Intervals.from_marks(marks[first : first + area.nbytes], 1, at)
            recorder.spans(write, found.starts, found.ends)
    _decode(instrumented, info, control, recording, recorder, maps)
    result = []
    for index, (name, addr, size) in enumerate(targets):
        reads, writes = recorder.touched(index, False), recorder.touched(index, True)
        if index < len(named) or reads or writes:
            result.append(BufferFootprint(name, addr if index < len(named) else places.get(name, 0), size, reads, writes))
    return Footprint(info.name, tuple(result), recorder.touched(-1, False), recorder.touched(-1, True))


def _bytes(raw: bytes | npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(raw, np.uint8) if isinstance(raw, bytes) else np.ascontiguousarray(raw).reshape(-1).view(np.uint8)


def _marks(instrumented: Instrumented, control: Control, raw: bytes | npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    data, size = _bytes(raw), instrumented.map_bytes(control.arena_bytes)
    if len(data) != size:
        raise ValueError(f"a map of {len(data)} bytes, where the arena needs {size}")
    return (data if instrumented.scheme == "shadow" else np.unpackbits(data, bitorder="little")).astype(np.bool_)


def _check_outside(instrumented: Instrumented, recording: Recording) -> None:
    flags = _bytes(recording.outside)
    if len(flags) != len(instrumented.sites):
        raise ValueError(
            f"{len(flags)} flags of accesses outside of the arena, where the module has {len(instrumented.sites)} sites"
        )
    for index in np.flatnonzero(flags):
        site = instrumented.sites[index]
        raise PtxError(f"{instrumented.where(site)}: {site.mnemonic}: it touched memory outside of the arena")


def _decode(
    instrumented: Instrumented, info: KernelInfo, control: Control, recording: Recording, recorder: Recorder,
    maps: Mapping[str | int, TensorMap],
) -> None:  # fmt: skip
    """Turn events into intervals."""
    own = {index for index in info.sites if instrumented.sites[index].how == "event"}
    if recording.events is None:
        if own:
            raise ValueError(f"{info.name} has {len(own)} sites that record events, and the recording has none")
        return
    data = _bytes(recording.events)
    count = int(data[:8].view(np.uint64)[0]) if len(data) >= EVENTS_HEADER else 0
    if count > control.capacity:
        raise PtxError(f"{instrumented.name}:1:1: {info.name} made {count} events, with room for {control.capacity}")
    if len(data) < instrumented.event_bytes(count):
        raise ValueError(f"{count} events need {instrumented.event_bytes(count)} bytes, and the recording has {len(data)}")
    events = data[EVENTS_HEADER : instrumented.event_bytes(count)].view(EVENT)
    for index in np.unique(events["site"]).tolist():
        if index not in own:
            raise PtxError(f"{instrumented.name}:1:1: an event of site {index}, which {info.name} does not have")
        site, mine = instrumented.sites[index], events[events["site"] == index]
        assert site.access is not None
        if site.access.record == "tensor":
            _decode_tensor(instrumented, control, recorder, site, np.unique(mine), maps)
            continue
        starts, lengths = (_decode_bulk if site.access.record == "bulk" else _decode_fragment)(site, np.unique(mine))
        _spans(recorder, site, starts, starts + lengths)


Ints = npt.NDArray[np.int64]


def _spans(recorder: Recorder, site: Site, starts: Ints, ends: Ints) -> None:
    for write, wanted in ((False, site.reads), (True, site.writes)):
        if wanted:
            recorder.spans(write, starts, ends)


def _decode_bulk(site: Site, events: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    starts, lengths = events["address"].astype(np.int64), events["size"].astype(np.int64)
    whole = events["mask"] == 0xFFFF
    parts = [(starts[whole], lengths[whole])]
    for start, length, mask in zip(starts[~whole], lengths[~whole], events["mask"][~whole], strict=True):
        chosen = np.flatnonzero((int(mask) >> np.arange(16)) & 1)
        each = (start + np.arange(0, length, 16)[:, None] + chosen).reshape(-1)
        parts.append((each, np.ones(len(each), np.int64)))
    return np.concatenate([s for s, _ in parts]), np.concatenate([n for _, n in parts])


def _decode_fragment(site: Site, events: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    assert site.instruction is not None
    lines, line, bits = isa.fragment_rows(site.instruction)
    pitch = events["size"].astype(np.int64)[:, None] * bits // 8
    starts = (events["address"].astype(np.int64)[:, None] + pitch * np.arange(lines)).reshape(-1)
    return starts, np.full(len(starts), line * bits // 8, np.int64)


def _decode_tensor(
    instrumented: Instrumented, control: Control, recorder: Recorder, site: Site, events: npt.NDArray[Any],
    maps: Mapping[str | int, TensorMap],
) -> None:  # fmt: skip
    assert site.instruction is not None
    modifiers, where = site.instruction.modifiers, f"{instrumented.where(site)}: {site.mnemonic}"
    if any(modifier.startswith("im2col") for modifier in modifiers):
        raise PtxError(f"{where}: im2col copies are not modelled")
    rank = next(int(modifier[0]) for modifier in modifiers if modifier in ("1d", "2d", "3d", "4d", "5d"))
    four_rows = any(modifier.endswith(("gather4", "scatter4")) for modifier in modifiers)
    for address in np.unique(events["address"]).tolist():
        map_ = maps.get(site.descriptor) if site.descriptor is not None else None
        if map_ is None:
            map_ = maps.get(address)
        if map_ is None:
            at = f"parameter {site.descriptor}" if site.descriptor else f"address {address:#x}"
            raise PtxError(f"{where}: the tensor map in {at} is not known")
        if len(map_.shape) != rank:
            raise PtxError(f"{where}: the tensor map has {len(map_.shape)} dimensions, not {rank}")
        coordinates = events["coordinates"][events["address"] == address].astype(np.int64)
        if four_rows:  # one column and the numbers of four rows
            one = TensorMap(map_.addr, map_.element_bytes, map_.shape, map_.strides, (map_.box[0], 1), map_.element_strides)
            for row in range(1, 5):
                _spans(recorder, site, *one.rows(coordinates[:, [0, row]]))
        else:
            _spans(recorder, site, *map_.rows(coordinates[:, :rank]))
        if site.descriptor is None and control.arena <= address < control.arena + control.arena_bytes:
            recorder.spans(False, np.array([address]), np.array([address + 128]))  # the copy reads the map itself
