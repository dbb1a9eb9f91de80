"""Does where a kernel reads and writes depend on what it reads?

Taint over the slice of `slicing.py`, without running anything. A value loaded from memory taints what is computed from it:
through registers, guards, shared and local memory, parameters of calls. What is tainted matters where it reaches an address, a
size, a guard of an access, or a branch that decides whether an access happens.

- INDEPENDENT: nothing tainted matters. The footprint of a launch holds for every launch with the same arguments.
- GUARDED(buffers): all that matters was loaded from these buffers, and the kernel itself leaves them alone: the footprint holds
  while their contents do (and while no other argument overlaps them).
- DEPENDENT(sites): it follows from data that no guard can pin down: the kernel writes it, or may, or a pointer was loaded.
- UNKNOWN(reason): a call that cannot be followed, an instruction that is not in the table, an address from elsewhere.

A semaphore is a guard too. Where a branch depends on what an atomic returned, and the accesses behind it are the same whichever
of the contenders gets there, only the initial contents of the semaphore matter: the last block to arrive does the same work,
whoever it is. That takes one atomic instruction that each contender executes once with the same operand, a condition that
compares with nothing of the contender's own, and accesses whose addresses use no block index that the address of the atomic does
not use. The contenders are blocks where one thread asks and tells the others through shared memory, else threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from . import isa
from .flow import Op, flatten
from .interpretation import UNKNOWN_SPECIALS
from .slicing import Slice, access_registers, call_slots, slice_kernel
from .syntax import TYPE_BYTES, Address, Module, Name, Offset, Operand, PtxError, Vector
from .syntax import Literal as Constant


class Kind(StrEnum):
    INDEPENDENT = "INDEPENDENT"
    GUARDED = "GUARDED"
    DEPENDENT = "DEPENDENT"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class Verdict:
    """kind; buffers: parameters and module variables whose contents decide; sites: `file:line:column: mnemonic` of what they
    decide about; reason: why it is unknown."""

    kind: Kind
    buffers: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    reason: str = ""

    @property
    def data_dependent(self) -> bool | None:
        """None where it is not known."""
        return None if self.kind is Kind.UNKNOWN else self.kind is not Kind.INDEPENDENT

    def __str__(self) -> str:
        inside = {Kind.GUARDED: ", ".join(self.buffers), Kind.DEPENDENT: "; ".join(self.sites), Kind.UNKNOWN: self.reason}.get(
            self.kind
        )
        return self.kind.value if inside is None else f"{self.kind.value}({inside})"


def verdict(module: Module, kernel: str | None = None) -> Verdict:
    """Decide for one kernel (the only one, where `kernel` is None). Raises PtxError where the module has no such kernel or is
    newer than the table."""
    isa.check_version(module)
    name = module.kernel(kernel).name
    try:
        flow = flatten(module, name)
    except PtxError as error:
        return Verdict(Kind.UNKNOWN, reason=str(error))
    sliced = slice_kernel(flow)
    taint = _Taint(sliced, {})
    reaching = taint.reaching()
    return (_Taint(sliced, reaching) if reaching else taint).decide()


Root = str
"""A kernel parameter or a module variable that an address was computed from; `LOCAL`, `SHARED`, `PARAM` for the other spaces."""

LOCAL, SHARED, PARAM = "(local)", "(shared)", "(param)"
LOADED, MANGLED = "?loaded", "?mangled"
"""A pointer that was itself loaded; a pointer whose bits were taken apart (shifted right, cut into fields). Nobody knows where
they go."""
NOWHERE = frozenset({LOADED, MANGLED})


# Results that no argument decides: who is there, who came first, what has arrived.
_STRANGE = {
    "activemask": "which threads are active",
    "mbarrier": "the state of a barrier",
    "clusterlaunchcontrol": "which blocks have been started",
}


T = TypeVar("T", int, str)
_ASKING = "%tid of the thread that asks"
_THREADS = {"%tid.x", "%tid.y", "%tid.z", "%laneid"}


def _is_index(name: str) -> bool:
    return name.startswith(("%ctaid", "%cluster", "%tid", "%laneid", "%lanemask"))


def _of_blocks(identity: set[str]) -> set[str]:
    return {name for name in identity if name.startswith(("%ctaid", "%cluster"))}


def _same_for_a_warp(op: Op) -> bool:
    """Whether what an op makes of the index of a thread is one value for the lanes of a warp: its upper bits, one lane's
    value."""
    if op.opcode == "shr":
        by = op.operands[2]
        return isinstance(by, Constant) and by.value >= 5
    return op.opcode == "shfl" and "idx" in op.modifiers and isinstance(op.operands[2], Constant)


def _private(roots: set[Root]) -> set[Root]:
    """Those that are no memory of the user's. `(param)NAME` is the parameter's own bytes: a struct, or a tensor map."""
    return {root for root in roots if root[0] == "("}


def _grow(table: dict[str, set[T]], key: str, more: set[T]) -> bool:
    """Add to a set of the table; whether that changed it."""
    known = table.setdefault(key, set())
    if more <= known:
        return False
    known |= more
    return True


class _Taint:
    def __init__(self, sliced: Slice, reaching: dict[int, list[int]]) -> None:
        """reaching: for loads from fixed places of shared memory, the stores they may see; the others may see any."""
        self.slice, self.flow = sliced, sliced.flow
        self.ops = list(self.flow.ops)
        self.params = {p.name for p in self.flow.kernel.params or ()}
        self.slots = call_slots(self.flow)
        self.taint: dict[str, set[int]] = {}  # register → indices of the ops that loaded
        self.roots: dict[str, set[Root]] = {}
        self.identity: dict[str, set[str]] = {}  # register → indices of blocks and threads it was computed from
        self.stored: dict[int, tuple[set[int], set[str], set[str], set[Root]]] = {}  # store → taint, identity, strange, roots
        self.seen_by = reaching
        # Blocks of a cluster write each other's shared memory, on paths that a block itself need not take.
        self.clustered = any(
            op.opcode == "mapa" or "multicast::cluster" in op.modifiers or any("%cluster" in r for r in self.slice.uses[op.index])
            for op in self.ops
        )
        self.controls: dict[int, list[int]] = {}  # block → blocks whose branches decide whether it runs
        for block in self.slice.relevant:
            for inside in self.flow.region(block):
                self.controls.setdefault(inside, []).append(block)
        self.strange: dict[str, set[str]] = {}  # register → special registers that no argument decides
        self.memory_taint: dict[str, set[int]] = {LOCAL: set(), SHARED: set()}
        self.memory_roots: dict[str, set[Root]] = {LOCAL: set(), SHARED: set()}
        self.memory_identity: dict[str, set[str]] = {LOCAL: set(), SHARED: set()}
        self.memory_strange: dict[str, set[str]] = {LOCAL: set(), SHARED: set()}
        self.propagate()

    # -- propagation

    def propagate(self) -> None:
        needed = [op for op in self.ops if op.index in self.slice.needed]
        makers: dict[int, list[str]] = {}
        for reg, ops in self.slice.defs.items():
            for op in ops:
                makers.setdefault(op.index, []).append(reg)
        changed = True
        while changed:
            changed = False
            for op in needed:
                changed |= self._step(op, makers.get(op.index, []))

    def _step(self, op: Op, outs: list[str]) -> bool:
        taint: set[int] = set()
        identity: set[str] = set()
        strange: set[str] = set()
        for reg in self.slice.uses[op.index]:
            taint |= self.taint.get(reg, set())
            identity |= self.identity.get(reg, set())
            strange |= self.strange.get(reg, set())
            if _is_index(reg) and reg not in self.flow.types:
                identity.add(reg)
            if reg.startswith(UNKNOWN_SPECIALS) and reg not in self.flow.types:
                strange.add(reg)
        for block in self.controls.get(op.block, ()):
            for reg in self.slice.uses[self.flow.blocks[block].ops[-1].index]:
                identity |= self.identity.get(reg, set()) | ({reg} if _is_index(reg) and reg not in self.flow.types else set())
        if _same_for_a_warp(op):
            identity = {f"warp of {name}" if name in _THREADS else name for name in identity}
        if op.opcode == "fresh":
            strange.add("malloc")
        if op.opcode in _STRANGE:
            strange.add(_STRANGE[op.opcode])
        if op.opcode == "atom" or (op.opcode in ("wgmma", "tcgen05") and outs):
            taint.add(op.index)  # the order of the threads, or what lies in shared and tensor memory
        if op.opcode == "atom":
            identity.add(_ASKING)
        roots = self._roots_of(op)
        changed = False
        for access in self.slice.accesses[op.index]:
            spaces = self._spaces(access)
            if access.reads:
                if op.index in self.seen_by:
                    for store in self.seen_by[op.index]:
                        more_taint, more_identity, more_strange, more_roots = self.stored.get(store, (set(), set(), set(), set()))
                        taint |= more_taint
                        identity |= _of_blocks(more_identity)
                        strange |= more_strange
                        roots |= more_roots
                for space in self._private_spaces(access) if op.index not in self.seen_by else ():
                    taint |= self.memory_taint[space]
                    roots |= self.memory_roots[space]
                    # All threads that read one place of shared memory see the same.
                    identity |= self.memory_identity[space] if space == LOCAL else _of_blocks(self.memory_identity[space])
                    strange |= self.memory_strange[space]
                private = op.index in self.seen_by or (bool(spaces) and spaces == _private(spaces) and access.record != "tensor")
                if (access.outside and not private) or access.space == "const":
                    taint = taint | {op.index}
        for access in self.slice.accesses[op.index]:
            if not access.writes:
                continue
            stored = self._stored_roots(op)
            kept = set() if op.opcode == "mbarrier" else strange  # a barrier's state is no data
            if self.stored.get(op.index) != (taint, identity, kept, stored):
                self.stored[op.index] = (taint, identity, kept, stored)
                changed = True
            for space in self._private_spaces(access):
                changed |= _grow(self.memory_taint, space, taint) | _grow(self.memory_identity, space, identity)
                changed |= _grow(self.memory_roots, space, stored) | _grow(self.memory_strange, space, kept)
        for reg in outs:
            changed |= _grow(self.taint, reg, taint) | _grow(self.identity, reg, identity)
            changed |= _grow(self.strange, reg, strange) | _grow(self.roots, reg, roots)
        return changed

    def _private_spaces(self, access: isa.Access) -> set[Root]:
        """Which of local and shared memory an access may go to."""
        spaces = self._spaces(access)
        if access.space == "generic" and (not spaces or spaces & NOWHERE):
            return {LOCAL, SHARED}
        return spaces & {LOCAL, SHARED}

    def _fixed(self, access: isa.Access) -> tuple[str, int] | None:
        """The variable and offset of an address that is one place of shared memory for all threads."""
        address = access.address
        if access.space != "shared" or address is None or address.base is None:
            return None
        base: Operand = address.base
        offset = address.offset
        while isinstance(base, Name) and base.text in self.flow.types:
            makers = self.slice.defs.get(base.text, [])
            if len(makers) != 1 or makers[0].opcode != "mov" or makers[0].predicate or len(makers[0].operands) != 2:
                return None
            base = makers[0].operands[1]
        if isinstance(base, Offset):
            name, offset = base.base.text, offset + base.bytes
        elif isinstance(base, Name):
            name = base.text
        else:
            return None
        return (name, offset) if name in self.flow.variables else None

    def reaching(self) -> dict[int, list[int]]:
        """For each load from a fixed place of shared memory, the stores it may see; loads that may see any are left out."""
        found = {op.index: self._reaching_stores(op) for op in self.ops if op.index in self.slice.needed and op.opcode == "ld"}
        return {index: stores for index, stores in found.items() if stores is not None}

    def _reaching_stores(self, load: Op) -> list[int] | None:
        """The stores whose value a load from a fixed place of shared memory may see, in a program without races: those on the way
        back to ones that overwrite the place for the whole block. None where the place is not fixed, where some way back comes to
        the start of the kernel, and where not all threads come to the load: then others may store from elsewhere."""
        access = self.slice.accesses[load.index][0]
        place = self._fixed(access)
        if place is None or access.nbytes is None or self.clustered:
            return None
        for control in self.controls.get(load.block, ()):
            for reg in self.slice.uses[self.flow.blocks[control].ops[-1].index]:
                if self.taint.get(reg) or self.identity.get(reg, set()) - _of_blocks(self.identity.get(reg, set())):
                    return None
        found: set[int] = set()
        before: dict[int, list[int]] = {}
        for each in self.flow.blocks:
            for successor in each.successors:
                before.setdefault(successor, []).append(each.index)
        seen: set[int] = set()
        at = self.flow.blocks[load.block].ops
        work = [(load.block, at[: next(i for i, op in enumerate(at) if op is load)])]
        while work:
            block, ops = work.pop()
            if self._scan_back(ops, place, access.nbytes, found):
                continue
            if block == 0:
                return None
            for previous in before.get(block, []):
                if previous not in seen:
                    seen.add(previous)
                    work.append((previous, self.flow.blocks[previous].ops))
        return sorted(found)

    def _scan_back(self, ops: list[Op], place: tuple[str, int], nbytes: int, found: set[int]) -> bool:
        """Collect stores to the place, last first; True where one overwrites it."""
        for op in reversed(ops):
            for access in self.slice.accesses[op.index]:
                spaces = self._spaces(access)
                if not access.writes or (spaces and SHARED not in spaces) or access.space == "global":
                    continue
                other = self._fixed(access)
                if other is None or access.nbytes is None or op.opcode != "st" or other[0] != place[0]:
                    found.add(op.index)
                    continue
                if other[1] + access.nbytes <= place[1] or place[1] + nbytes <= other[1]:
                    continue
                found.add(op.index)
                covers = other[1] <= place[1] and place[1] + nbytes <= other[1] + access.nbytes
                if covers and (op.predicate is None or self._one_thread(op)):
                    return True
        return False

    def _spaces(self, access: isa.Access) -> set[Root]:
        """Where an access may go, as far as its address says: the private spaces, or roots."""
        if access.space == "local":
            return {LOCAL}
        if access.space == "shared":
            return {SHARED}
        if access.space == "param":
            return {PARAM}
        if access.address is None or access.address.base is None:
            return set()
        return self._operand_roots(access.address.base)

    def _operand_roots(self, operand: Operand) -> set[Root]:
        if isinstance(operand, Vector):
            return set().union(*(self._operand_roots(item) for item in operand.items))
        name = operand.base.text if isinstance(operand, Offset) else operand.text if isinstance(operand, Name) else ""
        if not name:
            return set()
        variable = self.flow.variables.get(name)
        if variable is not None and name not in self.flow.types:
            space = variable.space.split("::")[0]
            if space == "param":
                return {PARAM + name}
            return {{"shared": SHARED, "local": LOCAL}.get(space, name)}
        return self.roots.get(name, set())

    def _stored_roots(self, op: Op) -> set[Root]:
        return set().union(*(self._operand_roots(o) for o in op.operands[1:] if not isinstance(o, Address)))

    def _roots_of(self, op: Op) -> set[Root]:
        """Of the pointer an op makes: additions keep them, products and shifts do not make pointers."""
        sources = op.operands[1:]
        if op.opcode in ("ld", "ldu"):
            address = op.operands[1]
            base = address.base.text if isinstance(address, Address) and address.base else ""
            if base in self.params:
                return {base}
            if base in self.slots:
                return set(self.roots.get(f"[{base}]", set()))
            spaces = self._operand_roots(address.base) if isinstance(address, Address) and address.base else set()
            inside = {root.removeprefix(PARAM) for root in spaces if root.startswith(PARAM)}  # a pointer inside a struct
            private = op.index in self.seen_by or "shared" in str(op.modifiers) or "local" in op.modifiers
            if private or (spaces and spaces == _private(spaces)) or TYPE_BYTES.get(isa.data_type(op.instruction), 0) < 8:
                return inside
            return inside | {LOADED}
        if op.opcode == "atom":
            return {LOADED} if TYPE_BYTES.get(isa.data_type(op.instruction), 0) >= 8 else set()
        if op.opcode in ("shr", "bfe", "bfi", "shf", "lop3"):
            mixed = set().union(*(self._operand_roots(source) for source in sources if not isinstance(source, Address)))
            return {MANGLED} if mixed - {LOADED} and TYPE_BYTES.get(isa.data_type(op.instruction), 0) >= 8 else set()
        if op.opcode in ("shl", "mul"):  # an offset, unless bits of a pointer are put together again
            return set().union(*(self._operand_roots(source) for source in sources)) & {MANGLED}
        if op.opcode == "st":
            return self._stored_roots(op)
        if op.opcode == "cvta":
            heads = {m.split("::")[0] for m in op.modifiers}
            for head, space in (("shared", SHARED), ("local", LOCAL)):
                if head in heads:
                    return {space}
        if op.opcode in ("mad", "fma", "madc"):
            sources = op.operands[3:4]
        elif op.opcode == "selp":
            sources = op.operands[1:3]
        elif op.opcode == "shfl":
            sources = op.operands[1:2]
        elif op.opcode not in (
            "mov",
            "cvta",
            "add",
            "sub",
            "addc",
            "subc",
            "and",
            "or",
            "xor",
            "min",
            "max",
            "cvt",
            "prmt",
            "slct",
            "mapa",
        ):
            return set()
        return set().union(*(self._operand_roots(source) for source in sources))

    # -- the verdict

    def decide(self) -> Verdict:
        flow = self.flow
        written: set[Root] = set()
        sites: list[tuple[Op, set[int]]] = []
        wild: list[Op] = []
        loose_write = False
        built: set[Root] = set()  # where the kernel puts tensor maps of its own making
        for op in self.ops:
            if op.opcode == "tensormap":
                built |= set().union(*(self._spaces(a) for a in self.slice.accesses[op.index] if a.outside))
                tainted = set().union(*(self.taint.get(reg, set()) for reg in self.slice.uses[op.index]))
                if tainted:
                    sites.append((op, tainted))
        for op in self.ops:
            for access in self.slice.accesses[op.index]:
                if not access.outside:
                    continue
                if access.record in ("resource", "replicas"):
                    what = "a texture or surface" if access.record == "resource" else "a multicast address"
                    return Verdict(Kind.UNKNOWN, reason=f"{flow.where(op)}: {op.instruction.mnemonic} touches {what}")
                registers = access_registers(access) | ({op.predicate} if op.predicate else set())
                for reg in registers:
                    strange = self.strange.get(reg, set()) | ({reg} if reg.startswith(UNKNOWN_SPECIALS) else set())
                    if strange:
                        what = ", ".join(sorted(strange))
                        return Verdict(Kind.UNKNOWN, reason=f"{flow.where(op)}: {op.instruction.mnemonic} depends on {what}")
                roots = self._spaces(access)
                tainted = set().union(*(self.taint.get(reg, set()) for reg in registers))
                lanes = {r for reg in access_registers(access) for r in self.identity.get(reg, set()) | {reg}} & _THREADS
                if lanes and self._elected(op) and not (roots and roots == _private(roots) and access.record != "tensor"):
                    return Verdict(
                        Kind.UNKNOWN, reason=f"{flow.where(op)}: {op.instruction.mnemonic} depends on which lane is elected"
                    )
                if access.record == "tensor":
                    of_params = {root.removeprefix(PARAM) for root in roots if root.startswith(PARAM)}
                    if roots and len(of_params) == len(roots):
                        written |= of_params if access.writes else set()
                    elif roots & built:
                        loose_write |= access.writes  # the map says where, not its address
                    else:  # the contents of a map in memory are data
                        tainted = tainted | {op.index}
                        loose_write |= access.writes
                elif roots and roots == _private(roots):
                    continue
                elif access.writes:
                    written |= roots - _private(roots) - NOWHERE
                    loose_write |= not roots or bool(roots & NOWHERE)
                if tainted:
                    sites.append((op, tainted))
                if roots <= NOWHERE and tainted:
                    wild.append(op)
        controlled = self._tainted_branches()
        for block in self.slice.relevant:
            end = flow.blocks[block].ops[-1]
            for reg in self.slice.uses[end.index]:
                if self.strange.get(reg):
                    what = ", ".join(sorted(self.strange[reg]))
                    return Verdict(Kind.UNKNOWN, reason=f"{flow.where(end)}: a branch depends on {what}")
        sites += controlled
        if not sites:
            return Verdict(Kind.INDEPENDENT)
        shown = tuple(dict.fromkeys(f"{flow.where(op)}: {op.instruction.mnemonic}" for op, _ in sites))
        if wild or loose_write:
            return Verdict(Kind.DEPENDENT, sites=shown)
        buffers: set[Root] = set()
        for op, tainted in sites:
            for index in tainted:
                loaded = self._loaded_from(self.ops[index])
                if not loaded or (loaded & written and not self._is_semaphore(op, self.ops[index], loaded)):
                    return Verdict(Kind.DEPENDENT, sites=shown)
                buffers |= loaded
        return Verdict(Kind.GUARDED, tuple(sorted(buffers)), shown)

    def _tainted_branches(self) -> list[tuple[Op, set[int]]]:
        found = []
        for block in sorted(self.slice.relevant):
            end = self.flow.blocks[block].ops[-1]
            tainted = set().union(*(self.taint.get(reg, set()) for reg in self.slice.uses[end.index]))
            if tainted:
                found.append((end, tainted))
        return found

    def _loaded_from(self, op: Op) -> set[Root]:
        found: set[Root] = set()
        for access in self.slice.accesses[op.index]:
            if (access.reads or access.record == "tensor") and (access.outside or access.space == "const"):
                spaces = self._spaces(access)
                if access.record == "tensor":  # what lies where a tensor map points
                    found |= {root.removeprefix(PARAM) for root in spaces if root.startswith(PARAM)}
                found |= spaces - _private(spaces)
        return set() if found & NOWHERE else found

    def _is_semaphore(self, site: Op, source: Op, buffers: set[Root]) -> bool:
        """Whether a branch on the result of an atomic guards work that is the same for every contender; see the module."""
        if source.opcode != "atom" or site.opcode not in ("bra", "brx") or self._repeated(source.block):
            return False
        for op in self.ops:  # nothing but this atomic touches the semaphore
            for access in self.slice.accesses[op.index]:
                if access.outside and op is not source and (self._spaces(access) & buffers or not self._spaces(access)):
                    return False
        address = self.slice.accesses[source.index][0].address
        if address is None or address.base is None:
            return False
        single = self._one_index(address.base)  # contenders for one semaphore must agree in all that the work behind it uses
        if single is None or (len(single) > 1 and not all(s in _THREADS for s in single)):
            return False
        asked, condition = self._identity_of(source), set[str]()
        for reg in self.slice.uses[site.index]:
            condition |= self.identity.get(reg, set())
        blockwise = not condition - _of_blocks(condition)
        if blockwise and not self._one_thread(source):
            return False
        contenders = _of_blocks(asked) if blockwise else asked
        given = set().union(*(self._operand_identity(o) for o in source.operands[2:]))
        if not (condition - {_ASKING} <= contenders and given <= contenders):
            return False
        region = self.flow.region(site.block)
        makers = {op.index for op in self.ops if op.block in region and op.index in self.slice.needed}
        for op in self.ops:
            if op.block in region or not (op.index in self.slice.needed or op.index in self._outside()):
                continue
            for reg in self.slice.uses[op.index]:
                if any(maker.index in makers for maker in self.slice.defs.get(reg, ())):
                    return False
        for op in self.ops:
            if op.block in region and op.index in self._outside():
                found = self._identity_of(op)
                if not (_of_blocks(found) if blockwise else found) <= contenders:
                    return False
        return True

    def _repeated(self, block: int) -> bool:
        """Whether a block may run again."""
        seen: set[int] = set()
        work = list(self.flow.successors(block))
        while work:
            at = work.pop()
            if at == block:
                return True
            if at not in seen:
                seen.add(at)
                work += self.flow.successors(at)
        return False

    def _one_thread(self, op: Op) -> bool:
        """Whether an op stands under a guard that picks threads by their index, the first thread of the block among them."""
        if op.predicate and self._picks_first(op.predicate, not op.negated):
            return True
        for block in self.controls.get(op.block, ()):
            end = self.flow.blocks[block].ops[-1]
            if end.opcode != "bra" or end.predicate is None or len(end.targets) != 1:
                continue
            stop = self.flow.postdominator[block]
            taken, fallen = (self._reaches(start, op.block, stop) for start in (end.targets[0], block + 1))
            if taken != fallen and self._picks_first(end.predicate, taken != end.negated):
                return True
        return False

    def _elected(self, op: Op) -> bool:
        """Whether an election decides which lane runs an op."""
        guards = {op.predicate} if op.predicate else set[str]()
        for block in self.controls.get(op.block, ()):
            guards |= self.slice.uses[self.flow.blocks[block].ops[-1].index]
        seen: set[str] = set()
        while guards:
            guard = guards.pop()
            if guard in seen:
                continue
            seen.add(guard)
            for maker in self.slice.defs.get(guard, ()):
                if maker.opcode == "elect":
                    return True
                guards |= self.slice.uses[maker.index]
        return False

    def _reaches(self, start: int, goal: int, stop: int) -> bool:
        seen, work = {stop}, [start]
        while work:
            at = work.pop()
            if at == goal:
                return True
            if at not in seen:
                seen.add(at)
                work += self.flow.successors(at)
        return False

    def _picks_first(self, guard: str, truth: bool) -> bool:
        """Whether the guard has this truth in the first thread because an index of it is 0."""
        makers = self.slice.defs.get(guard, [])
        if len(makers) != 1 or makers[0].opcode != "setp" or makers[0].predicate or len(makers[0].operands) != 3:
            return False
        equal = "eq" if truth else "ne"
        zero = makers[0].operands[2]
        return (
            equal in makers[0].modifiers
            and isinstance(zero, Constant)
            and zero.value == 0
            and self._is_first(makers[0].operands[1])
        )

    def _is_first(self, operand: Operand) -> bool:
        """Whether a value is computed from the indices of the thread alone, and is 0 in the first thread."""
        if isinstance(operand, Constant):
            return operand.value == 0
        if not isinstance(operand, Name):
            return False
        if operand.text in _THREADS:
            return True
        makers = self.slice.defs.get(operand.text, [])
        if len(makers) != 1 or makers[0].predicate:
            return False
        maker = makers[0]
        if maker.opcode in ("mov", "cvt", "shr", "shl", "rem", "div", "bfe", "shfl"):
            return self._is_first(maker.operands[1])
        if maker.opcode in ("and", "mul"):
            return any(self._is_first(o) for o in maker.operands[1:3])
        if maker.opcode in ("or", "add", "xor"):
            return all(self._is_first(o) for o in maker.operands[1:3])
        return False

    def _one_index(self, operand: Operand, seen: frozenset[str] = frozenset()) -> set[str] | None:
        """The indices of blocks and threads that a value is an injective function of, None where it may not be: it is one index,
        moved, widened, added to something that has none, or multiplied by a constant that is not 0."""
        if isinstance(operand, Constant | Offset):
            return set()
        if not isinstance(operand, Name) or operand.text in seen:
            return None
        name = operand.text
        if name not in self.flow.types:
            return {name} if _is_index(name) else set()
        if not self.identity.get(name):
            return set()
        makers = self.slice.defs.get(name, [])
        if len(makers) != 1 or makers[0].predicate:
            return None
        maker, inner = makers[0], seen | {name}
        if maker.opcode in ("mov", "cvt", "cvta"):
            return self._one_index(maker.operands[1], inner)
        if maker.opcode in ("add", "sub", "mad"):
            parts = list(maker.operands[1:])
            if maker.opcode == "mad":
                if not isinstance(parts[1], Constant) or not parts[1].value:
                    return None
                parts = [parts[0], parts[2]]
            found = [self._one_index(part, inner) for part in parts]
            with_index = [f for f in found if f is None or f]
            return set() if not with_index else with_index[0] if len(with_index) == 1 else None
        if (
            maker.opcode in ("mul", "shl")
            and isinstance(maker.operands[2], Constant)
            and (maker.opcode == "shl" or maker.operands[2].value)
        ):
            return self._one_index(maker.operands[1], inner)
        return None

    def _operand_identity(self, operand: Operand) -> set[str]:
        found: set[str] = set()
        for name in isa.read_names(operand):
            found |= self.identity.get(name.text, set()) | ({name.text} if _is_index(name.text) else set())
        return found

    def _outside(self) -> set[int]:
        return {index for index, table in self.slice.accesses.items() if any(a.outside for a in table)}

    def _identity_of(self, op: Op) -> set[str]:
        """The indices of blocks and threads that an access's address and guard were computed from."""
        found: set[str] = set()
        for access in self.slice.accesses[op.index]:
            for reg in access_registers(access) | ({op.predicate} if op.predicate else set()):
                found |= self.identity.get(reg, set())
        return found - {_ASKING}
