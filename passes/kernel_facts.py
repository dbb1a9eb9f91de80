"""What is said of a kernel made of FX nodes: work, bytes, kind, name, and where in the model it comes from."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from . import torch_compat
from .ir import Value
from .operators import GEMM, INDEX, MOVE, SCATTER, is_free, is_fusable, is_integer, is_reduction, packet, sources


def dim_text(size: Any) -> int | str:
    return size if isinstance(size, int) else str(size.node.expr)


def byte_count(val: Any) -> int:
    if not isinstance(val, torch.Tensor):
        return 8
    count = val.element_size()
    for size in val.shape:
        count *= torch_compat.size_hint(size)
    return count


def numel(val: Any) -> int:
    return byte_count(val) // val.element_size() if isinstance(val, torch.Tensor) else 1


def traffic(
    members: list[fx.Node], group_of: Mapping[fx.Node, int], group: int, outputs: set[str], values: Mapping[str, Value]
) -> tuple[int, int]:
    """Bytes that the kernel must read and write: what crosses its boundary, through the views that it is read by."""
    read: dict[str, int] = {}
    for node in members:
        if node.target is torch.ops.aten.copy_.default:
            continue
        for position, arg in enumerate(node.all_input_nodes):
            val = arg.meta.get("val")
            if not isinstance(val, torch.Tensor) or group_of.get(arg) == group:
                continue
            count = byte_count(val)
            if position == 0 and packet(node) in INDEX:
                count = min(count, byte_count(node.meta.get("val")))
            for source in [arg] if arg in group_of or arg.op in ("placeholder", "get_attr") else sources(arg):
                if source.name in values and group_of.get(source) != group:
                    read[source.name] = read.get(source.name, 0) + count
    written = sum(values[name].bytes for name in outputs)
    return sum(min(count, values[name].bytes) for name, count in read.items()), written


def flops(node: fx.Node) -> int:
    val = node.meta.get("val")
    formula = flop_registry.get(node.target.overloadpacket) if isinstance(node.target, torch._ops.OpOverload) else None
    if formula is not None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        return torch_compat.size_hint(formula(*args, **kwargs, out_val=val))
    if node.target is operator.getitem or not isinstance(val, torch.Tensor):
        return 0
    if is_reduction(node):
        return max(numel(a.meta.get("val")) for a in node.all_input_nodes)
    return numel(val) if is_fusable(node) and packet(node) not in MOVE | INDEX else 0


def needs_data(node: fx.Node, group_of: dict[fx.Node, int], group: int) -> bool:
    """Whether zeros in integer inputs might be bad contents for ``node``.

    Index zero is inside every dimension that is not empty, so an index operator is safe if its indices come into the kernel as
    they are (through views and casts), and not if the kernel computes them. Others than ATen promise nothing about integers.
    """
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims"):
        if packet(node) not in INDEX | SCATTER:
            return False
        indices = [a for a in node.all_input_nodes if is_integer(a)]
        return any(_computed_inside(a, group_of, group) for a in indices)
    if node.target is operator.getitem or not isinstance(node.target, torch._ops.OpOverload):
        return torch_compat.is_higher_order(node.target)
    return any(is_integer(a) for a in node.all_input_nodes)


def _computed_inside(node: fx.Node, group_of: dict[fx.Node, int], group: int) -> bool:
    while packet(node) == "prims.convert_element_type" and group_of.get(node) == group:
        (node,) = node.all_input_nodes
    if group_of.get(node) == group:
        return True
    return (
        node.op == "call_function" and is_free(node) and any(_computed_inside(a, group_of, group) for a in node.all_input_nodes)
    )


def kind_of(members: list[fx.Node]) -> str:
    names = {packet(n) for n in members}
    if names & GEMM:
        return "gemm"
    if any("attention" in n for n in names):
        return "attention"
    if any("convolution" in n for n in names):
        return "conv"
    if any(is_reduction(n) for n in members):
        return "reduction"
    if names & (INDEX | SCATTER):
        return "index"
    if names <= MOVE | {"aten.copy_"}:
        return "copy"
    return "pointwise" if all(is_fusable(n) or packet(n) == "aten.copy_" for n in members) else "opaque"


def short_name(members: list[fx.Node]) -> str:
    """A word for the kernel's name: its heaviest operator."""
    real = [n for n in members if n.target is not operator.getitem] or members
    if not is_fusable(real[0]):
        heaviest = real[0]
    else:
        heaviest = max(real, key=lambda n: (packet(n) in INDEX, is_reduction(n), flops(n)))
    word = packet(heaviest).rsplit(".", 1)[-1].rsplit("::", 1)[-1]
    return re.sub(r"\W+", "_", word).strip("_") or "op"


def module_path(members: list[fx.Node]) -> str:
    for node in members:
        stack = node.meta.get("nn_module_stack")
        if stack:
            path = re.sub(r"^L\['\w+'\](\[\d+\])*", "", str(list(stack.values())[-1][0]))
            path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
            path = path.replace("._modules", "").strip(".")
            if path:
                return path
    return ""


def source_line(members: list[fx.Node]) -> str:
    for node in members:
        found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
        if found:
            return f"{found[-1][0]}:{found[-1][1]}"
    return ""
