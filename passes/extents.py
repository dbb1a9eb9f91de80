"""Lowered graph → the bytes of its values that each kernel reads, as far as the graph itself says.

A kernel whose nodes reach a value through views alone (a slice of packed heads, one half of a chunk) reads no more than what the
views show, whatever code is generated for it: its result is a function of those elements. That is proof enough to leave the rest
behind where the value crosses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import fx

from ..ptx_tools.footprints import Box
from . import torch_compat
from .ir import KernelGraph
from .operators import is_free, is_scalar

#: Runs of bytes that one reading may have; of more the value is taken whole.
MOST_BOXES = 8


def extents(graph: KernelGraph) -> dict[tuple[str, str], tuple[Box, ...]]:
    """(kernel, value) → boxes that hold all bytes of the value that the kernel reads; byte 0 is the value's first element.

    Only pairs of which less than the whole value is read are there, and only values that are made by kernels, of fixed shape.
    () is a kernel that takes the value and reads nothing of it but its sizes.
    """
    module: fx.GraphModule | None = graph.module
    if module is None:
        return {}
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
                kept = tuple(b for b in boxes if not any(b != other and _holds(other, b) for other in boxes))
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


def _holds(outer: Box, inner: Box) -> bool:
    """Whether ``inner`` lies within ``outer``; False where they are too large to tell byte by byte."""
    if math.prod(outer.shape[:-1]) + math.prod(inner.shape[:-1]) > 1 << 16:
        return False
    return inner.intervals().issubset(outer.intervals())
