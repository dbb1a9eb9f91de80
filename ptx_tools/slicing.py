"""Which instructions of a kernel decide where it reads and writes.

Every memory access that may leave the block needs its address, size and guard; what computes those is needed too, through
registers, parameters of calls, shared and local memory. A conditional branch is needed where the blocks that it decides about
hold anything needed. Two kinds of branch are not:

- one whose region holds nothing needed (the slow path of a division, a wait for a barrier);
- one that only repeats what has happened already: everything needed in its region was executed before the branch was reached and
  does not change from one turn to the next (a spin lock, a poll of a flag).

The interpreter leaves such a branch by its post-dominator.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import networkx as nx

from . import isa
from .flow import Flow, Op
from .syntax import Address, Operand

Reg = str


@dataclass
class Slice:
    """needed: indices of ops to execute. relevant: blocks whose final branch must be decided. shared/local: memory is
    modelled."""

    flow: Flow
    needed: set[int]
    relevant: set[int]
    shared: bool
    local: bool
    accesses: dict[int, tuple[isa.Access, ...]]
    defs: dict[Reg, list[Op]] = field(repr=False)
    uses: dict[int, frozenset[Reg]] = field(repr=False)


FIXED = ("const",)
"""Spaces whose contents do not change while a kernel runs."""


def is_barrier(op: Op) -> bool:
    return op.opcode in ("bar", "barrier") and "warp" not in op.modifiers and "cluster" not in op.modifiers


def slot(variable: str) -> Reg:
    """The pseudo-register that stands for a parameter block of a call."""
    return f"[{variable}]"


def call_slots(flow: Flow) -> set[str]:
    """Parameter variables that are not the kernel's own: blocks between caller and callee."""
    own = {variable.name for variable in flow.kernel.params or ()}
    return {name for name, variable in flow.variables.items() if variable.space == "param" and name not in own}


def op_defs(op: Op, slots: set[str]) -> tuple[Reg, ...]:
    """Registers an op writes, `%cc` of carry chains and parameter blocks among them."""
    if op.opcode == "fresh":
        return tuple(n.text for operand in op.operands for n in isa.read_names(operand))
    names = tuple(name.text for name in isa.written_names(op.instruction))
    if op.opcode in ("add", "sub", "mad", "addc", "subc", "madc") and "cc" in op.modifiers:
        names += ("%cc",)
    if op.opcode == "st" and "param" in _heads(op):
        address = op.operands[0]
        if isinstance(address, Address) and address.base is not None and address.base.text in slots:
            names += (slot(address.base.text),)
        else:  # through a register: any of them
            names += tuple(map(slot, sorted(slots)))
    return names


def op_uses(op: Op, slots: set[str]) -> frozenset[Reg]:
    """Registers an op reads, guard included. Parameter blocks and `%cc` count as registers."""
    reads: set[Reg] = {op.predicate} if op.predicate else set()
    operands: tuple[Operand, ...] = op.operands
    writes_first = bool(isa.written_names(op.instruction)) or op.opcode == "fresh"
    for index, operand in enumerate(operands):
        if index == 0 and writes_first:
            continue
        reads.update(name.text for name in isa.read_names(operand))
    if op.opcode in ("addc", "subc", "madc"):
        reads.add("%cc")
    for operand in operands:
        if isinstance(operand, Address) and operand.base is not None and operand.base.text in slots:
            reads.add(slot(operand.base.text))
    if op.predicate:  # a guarded instruction leaves the old value where the guard is false
        reads.update(name.text for name in isa.written_names(op.instruction))
    return frozenset(reads)


def _heads(op: Op) -> set[str]:
    return {modifier.split("::")[0] for modifier in op.modifiers}


def access_registers(access: isa.Access) -> set[Reg]:
    """The registers that say where an access goes and how far."""
    found: set[Reg] = set()
    for operand in (access.address, access.size, access.limit, access.byte_mask):
        if operand is not None:
            found.update(name.text for name in isa.read_names(operand))
    return found


def slice_kernel(flow: Flow) -> Slice:
    """Compute the slice of a kernel; see the module's docstring."""
    slots = call_slots(flow)
    ops = list(flow.ops)
    table = {op.index: isa.accesses(op.instruction) if op.opcode not in ("fresh",) else () for op in ops}
    defs: dict[Reg, list[Op]] = {}
    uses: dict[int, frozenset[Reg]] = {}
    for op in ops:
        uses[op.index] = op_uses(op, slots)
        for reg in op_defs(op, slots):
            defs.setdefault(reg, []).append(op)
    outside = {op.index for op in ops if any(a.outside for a in table[op.index])}
    branches = [b.index for b in flow.blocks if len(b.successors) > 1]
    regions = {b: flow.region(b) for b in branches}
    dominators = _dominators(flow)
    by_block: dict[int, list[Op]] = {b.index: b.ops for b in flow.blocks}

    needed: set[int] = set()
    wanted: set[Reg] = set()
    relevant: set[int] = set()
    shared = local = False
    work: list[Reg] = []

    def want(registers: set[Reg] | frozenset[Reg]) -> None:
        for reg in registers:
            if reg not in wanted:
                wanted.add(reg)
                work.append(reg)

    for index in outside:
        op = ops[index]
        for access in table[index]:
            if access.outside:
                want(access_registers(access))
        if op.predicate:
            want({op.predicate})

    if any(access.record == "tensor" for index in outside for access in table[index]):
        for op in ops:  # a kernel that builds its tensor maps: their fields are needed
            if op.opcode == "tensormap":
                needed.add(op.index)
                want(uses[op.index])

    changed = True
    while changed:
        changed = False
        while work:
            for op in defs.get(work.pop(), ()):
                if op.index in needed:
                    continue
                needed.add(op.index)
                changed = True
                want(uses[op.index])
                for access in table[op.index]:
                    if access.reads:
                        generic = access.space == "generic"
                        if (access.space == "shared" or generic) and not shared and _writes(flow, table, "shared"):
                            shared = True
                        if (access.space == "local" or generic) and not local and _writes(flow, table, "local"):
                            local = True
        for op in ops:
            if op.index in needed:
                continue
            stores = any(
                a.writes and ((shared and a.space in ("shared", "generic")) or (local and a.space in ("local", "generic")))
                for a in table[op.index]
            )
            if stores or (shared and (is_barrier(op) or op.opcode == "bar" or op.opcode == "barrier")):
                needed.add(op.index)
                changed = True
                want(uses[op.index])
        for block in branches:
            if block in relevant:
                continue
            inside = [op for b in regions[block] for op in by_block[b] if op.index in needed or op.index in outside]
            if inside and not _repeats(inside, regions[block], block, defs, uses, needed, outside, table, dominators):
                relevant.add(block)
                changed = True
                end = flow.blocks[block].ops[-1]
                want(uses[end.index])
        if work:
            changed = True
    return Slice(flow, needed, relevant, shared, local, table, defs, uses)


def _writes(flow: Flow, table: dict[int, tuple[isa.Access, ...]], space: str) -> bool:
    return any(a.writes and a.space in (space, "generic") for op in flow.ops for a in table[op.index])


def _dominators(flow: Flow) -> dict[int, set[int]]:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(flow.exit + 1))
    graph.add_edges_from((b.index, s) for b in flow.blocks for s in b.successors)
    parent = nx.immediate_dominators(graph, 0)
    found: dict[int, set[int]] = {}
    for block in graph:
        chain, at = {block}, block
        while parent.get(at) is not None and parent[at] != at:
            at = parent[at]
            chain.add(at)
        found[block] = chain
    return found


def _repeats(
    inside: list[Op], region: set[int], block: int, defs: dict[Reg, list[Op]], uses: dict[int, frozenset[Reg]], needed: set[int],
    outside: set[int], table: dict[int, tuple[isa.Access, ...]], dominators: dict[int, set[int]],
) -> bool:  # fmt: skip
    """Whether all needed ops of the region ran before the branch and would do the same again."""
    known: dict[Reg, bool] = {}

    def invariant(reg: Reg) -> bool:
        if reg not in known:
            known[reg] = False  # a cycle changes
            makers = defs.get(reg, [])
            within = [op for op in makers if op.block in region or op.block == block]
            if not within:
                known[reg] = True
            elif len(makers) == 1:
                op = makers[0]
                changing = op.opcode in ("fresh", "elect", "activemask", "match", "vote", "shfl", "redux")
                known[reg] = (
                    all(a.space in FIXED for a in table[op.index]) and not changing and all(invariant(r) for r in uses[op.index])
                )
        return known[reg]

    for op in inside:
        if op.block not in dominators[block]:
            return False
        if is_barrier(op):
            return False
        if op.index in needed and not all(invariant(reg) for reg in uses[op.index]):
            return False
        if op.index in needed and any(a.reads and a.space not in FIXED for a in table[op.index]):
            return False
        if op.index in outside:
            registers = {r for a in table[op.index] if a.outside for r in access_registers(a)}
            if op.predicate:
                registers.add(op.predicate)
            if not all(invariant(reg) for reg in registers):
                return False
    return True
