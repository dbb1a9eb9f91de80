"""Lowered graph → the bytes that kernels read of values and write of state, as far as the graph itself says.

A kernel whose nodes reach a value through views alone (a slice of packed heads, one half of a chunk) reads no more than what the
views show, whatever code is generated for it: its result is a function of those elements. That is proof enough to leave the rest
behind where the value crosses. State that is overwritten through views (one slot of a cache) changes in what they show alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..ptx_tools.footprints import Box
from . import torch_compat
from .ir import KernelGraph
from .operators import is_free, is_scalar, packet, sources_through

#: Runs of bytes that one reading may have; of more the value is taken whole.
MOST_BOXES = 8


@dataclass(frozen=True)
class Extents:
    """Boxes of bytes; byte 0 is a value's first element. Only what is less than the whole value is there, of fixed shapes.

    ``reads``: (kernel, value) → all bytes of the value, made by another kernel, that the kernel reads; () is a kernel that takes
    the value and reads nothing of it but its sizes. ``writes``: new version of a graph input → all bytes in which it may differ
    from the old content.
    """

    reads: Mapping[tuple[str, str], tuple[Box, ...]] = field(default_factory=dict)
    writes: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)


def extents(graph: KernelGraph) -> Extents:
    """What the graph says; nothing of one that was read from JSON."""
    if graph.module is None:
        return Extents()
    return Extents(_reads(graph, graph.module), _writes(graph, graph.module))


def _writes(graph: KernelGraph, module: fx.GraphModule) -> dict[str, tuple[Box, ...]]:
    nodes = {n.name: n for n in module.graph.nodes}
    found = {}
    for name, version in graph.mutated.items():
        if not _plain(nodes[name]) or graph.producer(version) is None:
            continue
        base = nodes[name].meta["val"]
        shown = [box_of(view, base) for view in _changed(nodes[version].args[1], base, nodes[name])]
        boxes = tuple(dict.fromkeys(b for b in shown if b is not None and b.nbytes))
        kept = _outermost(boxes)
        if None not in shown and 0 < len(kept) <= MOST_BOXES and sum(b.nbytes for b in kept) < graph.values[name].bytes:
            found[version] = kept
    return found


def _changed(node: Any, place: torch.Tensor, state: fx.Node) -> list[torch.Tensor]:
    """Views of ``state`` in which ``node``, that is to stand where its view ``place`` is, may differ from what is there."""
    if not isinstance(node, fx.Node):
        return [place]
    val = node.meta.get("val")
    if node is state or (node.op == "call_function" and is_free(node)):
        found = sources_through(node)
        if len(found) != 1 or not _shows(node, found[0], place, state):
            return [place]
        # A view of a newer version shows no more changes than that version has.
        return [] if found[0] is state else _changed(found[0], state.meta["val"], state)
    if packet(node) in _VIEW_OF and isinstance(val, torch.Tensor) and val.shape == place.shape:
        inside, source, *where = list[Any](node.args)
        view = _VIEW_OF[packet(node)](place, *where, **node.kwargs)
        return [*_changed(inside, place, state), *_changed(source, view, state)]
    return [place]


#: Operators that write into what a view shows → the view.
_VIEW_OF: dict[str, Callable[..., torch.Tensor]] = {
    "aten.slice_scatter": torch.ops.aten.slice.Tensor,
    "aten.select_scatter": torch.ops.aten.select.int,
    "aten.diagonal_scatter": torch.ops.aten.diagonal.default,
}


def _shows(node: fx.Node, source: fx.Node, place: torch.Tensor, state: fx.Node) -> bool:
    """Whether ``node`` shows of ``source`` what ``place`` shows of the state, elements in the same places."""
    val, of, whole = node.meta.get("val"), source.meta.get("val"), state.meta["val"]
    if not isinstance(val, torch.Tensor) or not isinstance(of, torch.Tensor):
        return False
    if torch_compat.storage_key(val) != torch_compat.storage_key(of) or (of.shape, of.stride()) != (whole.shape, whole.stride()):
        return False
    offset, expected = val.storage_offset() - of.storage_offset(), place.storage_offset() - whole.storage_offset()
    return (val.shape, val.stride(), offset) == (place.shape, place.stride(), expected)


def _reads(graph: KernelGraph, module: fx.GraphModule) -> dict[tuple[str, str], tuple[Box, ...]]:
    nodes = {n.name: n for n in module.graph.nodes}
    found: dict[tuple[str, str], tuple[Box, ...]] = {}
    for kernel in graph.kernels:
        members = {nodes[name] for name in kernel.nodes}
        for name in kernel.inputs:
            value = graph.values[name]
            if graph.producer(name) is None or value.storage != name or not _plain(nodes[name]):
                continue
            boxes: dict[Box, None] = {}
            whole = False
            for member in members:
                for argument in member.all_input_nodes:
                    if argument in members:
                        continue
                    read = _through(argument, nodes[name], graph.values)
                    whole = whole or read is None
                    boxes.update(dict.fromkeys(read or ()))
            if not whole and len(boxes) <= MOST_BOXES:
                kept = _outermost(tuple(boxes))
                if sum(b.nbytes for b in kept) < value.bytes:
                    found[kernel.name, name] = kept
    return found


def _plain(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.layout == torch.strided and not torch_compat.free_symbols([val])


def _through(node: fx.Node, value: fx.Node, values: Mapping[str, object]) -> tuple[Box, ...] | None:
    """What reading ``node``, which no kernel of this one makes, reads of ``value``; None is all of it."""
    if node is value:
        return None
    if node.name in values or is_scalar(node) or node.op != "call_function" or not is_free(node):
        return ()
    val, base = node.meta.get("val"), value.meta["val"]
    if isinstance(val, torch.Tensor) and _plain(node) and torch_compat.storage_key(val) == torch_compat.storage_key(base):
        box = box_of(val, base)
        return None if box is None else (box,) if box.nbytes else ()
    found: dict[Box, None] = {}
    for argument in node.all_input_nodes:
        read = _through(argument, value, values)
        if read is None:
            return None
        found.update(dict.fromkeys(read))
    return tuple(found)


def box_of(view: torch.Tensor, base: torch.Tensor) -> Box | None:
    """The bytes of a view of ``base``, counted from its first element; None where they are no box that lies within it."""
    size = base.element_size()
    if view.element_size() != size or any(s < 0 for s in view.stride()):
        return None
    start = (int(view.storage_offset()) - int(base.storage_offset())) * size
    if view.numel() == 0:
        return Box(0, (0,), (1,))
    steps = sorted((int(s) * size, int(n)) for n, s in zip(view.shape, view.stride(), strict=True) if n > 1 and s > 0)
    # From the innermost out: runs that touch are one run, and what overlaps is no box.
    run, outer = size, list[tuple[int, int]]()
    for stride, count in steps:
        if not outer and stride == run:
            run *= count
        elif outer and stride == outer[-1][0] * outer[-1][1]:
            outer[-1] = (outer[-1][0], outer[-1][1] * count)
        elif stride >= (outer[-1][0] * outer[-1][1] if outer else run):
            outer.append((stride, count))
        else:
            return None
    last = start + sum(s * (n - 1) for s, n in outer) + run
    span = (sum((int(n) - 1) * int(s) for n, s in zip(base.shape, base.stride(), strict=True)) + 1) * size
    if start < 0 or last > span:
        return None
    outer.reverse()
    return Box(start, (*(n for _, n in outer), run), (*(s for s, _ in outer), 1))


def _outermost(boxes: tuple[Box, ...]) -> tuple[Box, ...]:
    return tuple(b for b in boxes if not any(b != other and _holds(other, b) for other in boxes))


def _holds(outer: Box, inner: Box) -> bool:
    """Whether ``inner`` lies within ``outer``; False where they are too large to tell byte by byte."""
    if math.prod(outer.shape[:-1]) + math.prod(inner.shape[:-1]) > 1 << 16:
        return False
    return inner.intervals().issubset(outer.intervals())
