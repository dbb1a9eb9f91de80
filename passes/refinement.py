"""Data-dependence graph + footprints → data-dependence graph: dependences by the bytes that kernels touch.

A footprint says which bytes of a value one launch of a kernel reads and writes. Where it is known,

- a dependence between disjoint bytes goes, and ``bytes`` of a raw edge becomes |written ∩ read|: of the bytes that a kernel
  reads, each comes from the last kernel before it that wrote it;
- a kernel that writes what its schema does not declare gets the edges of a writer, and one warning names its operator and the
  value.

Where it is not known, what a kernel takes is read as far as the graph's views show it (``extents.py``) or whole, and what it
makes is written whole. So is a footprint that need not hold for every later run: one with guards that nobody watches, one with
accesses outside of its buffers, one of a kernel whose addresses the schema says depend on data, or whose shapes are symbolic.
Such a footprint still tells of undeclared writes.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import networkx as nx

from ..ptx_tools.footprints import Box, Footprint, Intervals
from .dependence import STRENGTH, add_edge
from .errors import ProfileError, TesseraWarning
from .extents import MOST_BOXES, Extents
from .ir import Dependence, DependenceKind, Kernel, KernelGraph

NOTHING = Intervals.of([])


@dataclass(frozen=True)
class Refinement:
    """What refining changed: dependences as (before, after, dependence), and the bytes of all edges before and after."""

    removed: tuple[tuple[str, str, Dependence], ...]
    added: tuple[tuple[str, str, Dependence], ...]
    bytes_before: int
    bytes_after: int

    @property
    def summary(self) -> str:
        sizes = f"{self.bytes_before} -> {self.bytes_after} B on all edges"
        return f"{len(self.removed)} dependences removed, {len(self.added)} added, {sizes}"

    def to_text(self) -> str:
        lines = [self.summary]
        lines += [f"- {a} -> {b}: {d.to_text()}" for a, b, d in self.removed]
        lines += [f"+ {a} -> {b}: {d.to_text()}" for a, b, d in self.added]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Access:
    """What one kernel does to one storage. ``surely``: of ``writes``, what is overwritten for certain. ``made``: the value it
    makes there."""

    kernel: str
    reads: Intervals
    writes: Intervals
    surely: Intervals
    made: str
    evidence: str


def refine(
    ddg: nx.DiGraph, footprints: Mapping[str, Footprint], extents: Extents | None = None, watched: Collection[str] = ()
) -> nx.DiGraph:
    """A refined copy of ``ddg``.

    ``graph["refinement"]`` of it is the :class:`Refinement`; ``graph["reads"]`` has, by (kernel, value), the boxes that the
    kernel reads of a value that another made, where they are few and less than all of it; ``graph["writes"]``, by new version of
    a graph input, the boxes in which it may differ from the old content.

    Args:
        footprints: kernel → what a launch of it touches. Its buffers are named after values of the graph (``Footprint.renamed``),
            and byte 0 of a buffer is the first byte of the value. A value that it does not name is as the schema says.
        extents: what the graph's views say, from :func:`extents.extents`.
        watched: values whose contents the caller sees to: a footprint that is guarded by them alone counts.

    Raises ProfileError where a footprint is of no kernel of the graph, or names no value of it.
    """
    graph: KernelGraph = ddg.graph["kernels"]
    _check(graph, footprints)
    sizes: dict[str, int] = {}  # of storages; a strided input may reach further than its bytes
    for value in graph.values.values():
        sizes[value.storage] = max(value.bytes, sizes.get(value.storage, 0))
    for footprint in footprints.values():
        for buffer in footprint.buffers:
            storage = graph.values[buffer.name].storage
            sizes[storage] = max([sizes[storage], *buffer.reads.ends[-1:].tolist(), *buffer.writes.ends[-1:].tolist()])
    extents = extents or Extents()
    for name, boxes in [*((value, boxes) for (_, value), boxes in extents.reads.items()), *extents.writes.items()]:
        storage = graph.values[name].storage
        sizes[storage] = max([sizes[storage], *(int(b.intervals().ends[-1]) for b in boxes if b.nbytes)])
    storages: dict[str, list[_Access]] = {}
    seen: set[str] = set()
    read: dict[tuple[str, str], tuple[Box, ...]] = {}
    for kernel in graph.kernels:
        for storage, access, known in _accesses(graph, kernel, footprints.get(kernel.name), extents, sizes, watched):
            storages.setdefault(storage, []).append(access)
            if known:
                seen.add(storage)
                boxes = _boxes(access.reads, sizes[storage])
                if boxes and storage in kernel.inputs and graph.producer(storage) is not None:
                    read[kernel.name, storage] = boxes
    found: dict[tuple[str, str], list[Dependence]] = {}
    for before, after, data in ddg.edges(data=True):
        for dependence in data["deps"]:
            through = graph.values.get(dependence.value)
            if dependence.kind == "effect" or through is None or through.storage not in seen:
                found.setdefault((before, after), []).append(dependence)
    for storage in seen:
        for before, after, dependence in _dependences(storage, storages[storage], sizes[storage]):
            found.setdefault((before, after), []).append(dependence)
    refined = nx.DiGraph(**ddg.graph)
    refined.add_nodes_from(ddg.nodes(data=True))
    for (before, after), deps in found.items():
        add_edge(refined, before, after, tuple(sorted(deps, key=lambda d: STRENGTH[d.kind])))
    refined.graph.update(refinement=_compare(ddg, refined), reads=read, writes=dict(extents.writes))
    return refined


def _check(graph: KernelGraph, footprints: Mapping[str, Footprint]) -> None:
    names = {k.name for k in graph.kernels}
    for kernel, footprint in footprints.items():
        if kernel not in names:
            raise ProfileError(
                f"there is a footprint of {kernel!r}, which is no kernel of this graph; refine the graph it was made of"
            )
        for buffer in footprint.buffers:
            if buffer.name not in graph.values:
                raise ProfileError(
                    f"the footprint of {kernel} names {buffer.name!r}, which is no value of this graph; name buffers after values"
                )


def _accesses(
    graph: KernelGraph,
    kernel: Kernel,
    footprint: Footprint | None,
    extents: Extents,
    sizes: Mapping[str, int],
    watched: Collection[str],
) -> list[tuple[str, _Access, bool]]:
    """By storage, what the kernel does there, and whether a footprint says so."""
    takes = {graph.values[v].storage: v for v in kernel.inputs}
    makes = {graph.values[v].storage: v for v in kernel.outputs}
    told: dict[str, tuple[Intervals, Intervals]] = {}
    for buffer in footprint.buffers if footprint is not None else ():
        storage = graph.values[buffer.name].storage
        reads, writes = told.get(storage, (NOTHING, NOTHING))
        told[storage] = reads | buffer.reads, writes | buffer.writes
    holds = footprint is not None and _holds(graph, kernel, footprint, watched)
    found = []
    for storage in dict.fromkeys([*takes, *makes, *told]):
        whole = Intervals.of([(0, sizes[storage])])
        reads, writes = whole if storage in takes else NOTHING, whole if storage in makes else NOTHING
        surely, evidence, known = writes, "schema", False
        shown = extents.reads.get((kernel.name, takes.get(storage, "")))
        if shown is not None and storage not in makes:
            reads, evidence, known = Intervals.of(i for box in shown for i in box.intervals()), "extent", True
        changed = extents.writes.get(makes.get(storage, ""))
        if changed is not None:
            writes = surely = Intervals.of(i for box in changed for i in box.intervals())
            evidence, known = "extent", True
        if storage in told:
            if holds:
                (reads, writes), evidence, known = told[storage], "footprint", True
                surely = writes
            elif told[storage][1] and storage not in makes:
                reads, writes, evidence, known = reads | told[storage][0], whole, "footprint", True
            if told[storage][1] and storage not in makes:
                _warn(kernel, storage)
        made = makes.get(storage, storage)
        found.append((storage, _Access(kernel.name, reads, writes, surely, made, evidence), known))
    return found


def _holds(graph: KernelGraph, kernel: Kernel, footprint: Footprint, watched: Collection[str]) -> bool:
    """Whether the footprint is that of every run of the kernel."""
    values = [graph.values[v] for v in (*kernel.inputs, *kernel.outputs)]
    symbolic = any(isinstance(n, str) for v in values for n in (*v.shape, *v.strides))
    # Where the schema says that addresses depend on data, the code must have said on which.
    guarded = set(footprint.guards) <= set(watched) and (bool(footprint.guards) or not kernel.data_dependent)
    return footprint.complete and guarded and not symbolic


_warned: set[tuple[str, str]] = set()


def _warn(kernel: Kernel, value: str) -> None:
    if (kernel.fingerprint, value) in _warned:
        return
    _warned.add((kernel.fingerprint, value))
    warnings.warn(
        f"kernel {kernel.name} ({', '.join(kernel.nodes[:3])}) writes {value}, which its schema does not declare (mutates_args "
        "of a custom operator); the order of what touches it is kept, but other code that trusts the schema may go wrong",
        TesseraWarning,
        stacklevel=5,
    )


def _boxes(part: Intervals, size: int) -> tuple[Box, ...]:
    """The boxes that ``part`` is made of; none where it is all of ``size`` bytes, or more than a few."""
    if part.nbytes >= size or not part:
        return ()
    box = part.box()
    if box is not None:
        return (box,)
    if len(part) <= MOST_BOXES:
        return tuple(Box(a, (b - a,), (1,)) for a, b in part)
    # Two slices of packed rows make two runs a row: those at one place of each row are a box.
    for runs in range(2, MOST_BOXES + 1):
        boxes = [Intervals(part.starts[i::runs], part.ends[i::runs]).box() for i in range(runs)]
        if len(part) % runs == 0 and None not in boxes:
            return tuple(b for b in boxes if b is not None)
    return ()


def _dependences(storage: str, accesses: list[_Access], size: int) -> list[tuple[str, str, Dependence]]:
    """All dependences through one storage of ``size`` bytes, kernels in order."""
    found = []
    for at, after in enumerate(accesses):
        reads, writes = after.reads, after.writes
        for before in reversed(accesses[:at]):
            raw = before.writes & reads
            kinds: list[tuple[DependenceKind, str, int]] = []
            if raw:
                kinds.append(("raw", before.made, raw.nbytes))
            if before.writes & writes:
                kinds.append(("waw", storage, 0))
            if before.reads & writes:
                kinds.append(("war", storage, 0))
            evidence = next((e for e in ("footprint", "extent") if e in (before.evidence, after.evidence)), "schema")
            boxes = _boxes(raw, size)
            found += [
                (before.kernel, after.kernel, Dependence(kind, value, n, evidence, boxes if kind == "raw" else ()))
                for kind, value, n in kinds
            ]
            # What came before a certain overwriting is ordered through it.
            reads, writes = reads - before.surely, writes - before.surely
            if not reads and not writes:
                break
    return found


def _compare(old: nx.DiGraph, new: nx.DiGraph) -> Refinement:
    def deps(ddg: nx.DiGraph) -> dict[tuple[str, str, str, str], Dependence]:
        return {(a, b, d.kind, d.value): d for a, b, data in ddg.edges(data=True) for d in data["deps"]}

    before, after = deps(old), deps(new)
    removed = tuple((k[0], k[1], d) for k, d in before.items() if k not in after)
    added = tuple((k[0], k[1], d) for k, d in after.items() if k not in before)
    total = [sum(data["bytes"] for _, _, data in ddg.edges(data=True)) for ddg in (old, new)]
    return Refinement(removed, added, *total)
