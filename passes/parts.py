"""Which bytes of a value go to those who read only some of them: one rule for what the planner counts and what programs send.

The readers of a value are grouped: two that read a byte in common are in one group. A group's boxes cross once to each device
that has one of its readers. Where a reader needs all of it, or the caller does, there is one group and it is sent whole. Of a new
version of a graph input goes what it changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import networkx as nx

from ..ptx_tools.footprints import Box, Intervals
from .ir import KernelGraph


@dataclass(frozen=True)
class Part:
    """Some boxes of a value, () for all of it, their bytes, and the kernels that read them."""

    boxes: tuple[Box, ...]
    bytes: int
    readers: tuple[str, ...]


def parts(ddg: nx.DiGraph, value: str) -> tuple[Part, ...]:
    """The parts in which ``value`` crosses. They have no byte in common, and each of its readers is in one of them."""
    graph: KernelGraph = ddg.graph["kernels"]
    made_by = graph.producer(value)
    readers = graph.readers(value)
    entry = graph.values[value]
    whole = (Part((), entry.bytes, readers),)
    if entry.storage != value:
        changed: Mapping[str, tuple[Box, ...]] = ddg.graph.get("writes", {})
        boxes = changed.get(value, ())
        return (Part(boxes, sum(b.nbytes for b in boxes) or entry.bytes, readers),)
    if made_by is None or value in graph.output_values or value in graph.mutated.values():
        return whole
    read: dict[str, tuple[Box, ...]] = {}
    for reader in readers:
        boxes = reads(ddg, reader, value)
        if not boxes:
            return whole
        read[reader] = boxes
    groups: list[tuple[Intervals, list[Box], list[str]]] = []
    for reader, boxes in read.items():
        bytes_, mine, names = Intervals.of(i for b in boxes for i in b.intervals()), list(boxes), [reader]
        apart = []
        for group in groups:
            if group[0] & bytes_:
                bytes_, mine, names = bytes_ | group[0], [*group[1], *mine], [*group[2], *names]
            else:
                apart.append(group)
        groups = [*apart, (bytes_, mine, names)]
    found = []
    for bytes_, theirs, names in groups:
        distinct = _apart(theirs, bytes_)
        if distinct is None:
            return whole
        found.append(Part(distinct, bytes_.nbytes, tuple(names)))
    return tuple(found)


def reads(ddg: nx.DiGraph, kernel: str, value: str) -> tuple[Box, ...]:
    """The boxes of ``value`` that ``kernel`` reads; () where it may read all of it."""
    known: Mapping[tuple[str, str], tuple[Box, ...]] = ddg.graph.get("reads", {})
    return known.get((kernel, value), ())


def _apart(boxes: list[Box], bytes_: Intervals) -> tuple[Box, ...] | None:
    """Boxes without common bytes that hold exactly ``bytes_``; None where none are at hand."""
    kept: list[Box] = []
    for box in sorted(dict.fromkeys(boxes), key=lambda b: -b.nbytes):
        inside = box.intervals()
        if not any(inside.issubset(k.intervals()) for k in kept):
            kept.append(box)
    if sum(b.nbytes for b in kept) == bytes_.nbytes:
        return tuple(sorted(kept, key=lambda b: b.start))
    one = bytes_.box()
    return None if one is None else (one,)
