"""Kernels of a :class:`KernelGraph` → an FX graph of their own that can be compiled and run.

Free nodes are cloned in; values made elsewhere become placeholders; constants and every free symbol of the shapes become
inputs as well, so that one compiled piece serves every call and, through :attr:`Piece.key`, every structurally equal piece.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from . import torch_compat
from .errors import LoweringError
from .ir import KernelGraph
from .retargeting import retargeted


@dataclass(frozen=True)
class Piece:
    """A part of a graph, ready to compile.

    ``inputs`` name the values to pass, in order; ``"v.size(0)"`` stands for a size of value ``v``. ``outputs`` name the
    values returned. ``writes`` are the inputs overwritten in place. ``key`` is equal for pieces that compute the same
    function on inputs of the same shapes, strides, dtypes and devices.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    writes: tuple[str, ...]
    key: str


def extract(graph: KernelGraph, kernels: Iterable[str], outputs: Sequence[str]) -> Piece:
    """Cuts ``kernels`` out of ``graph``.

    Args:
        outputs: FX nodes to return. With no kernels these may be views of values: the piece that computes a graph's outputs.
    """
    original: fx.GraphModule | None = graph.module
    if original is None:
        raise LoweringError("this kernel graph was read from JSON and has no FX graph; lower the model again to run it")
    members = {node for k in kernels for node in graph[k].nodes}
    written = {v for k in kernels for v in graph[k].writes}
    position = _positions(graph)
    # A new version of an overwritten input is made in place: there is nothing to return.
    outputs = [o for o in outputs if not (o in members and graph.values[o].storage != o)]

    # Members in graph order, each preceded by the free nodes that it needs: an order, and hence a key, that depends on the
    # structure of the piece alone and not on where it stood in the graph.
    outside: list[fx.Node] = []
    body: list[fx.Node] = []
    seen: set[fx.Node] = set()

    def visit(node: fx.Node) -> None:
        if node in seen:
            return
        seen.add(node)
        if node.name not in members and node.name in graph.values:
            outside.append(node)
            return
        for arg in node.all_input_nodes:
            visit(arg)
        body.append(node)

    for name in sorted(members, key=lambda name: position[name][0]):
        visit(position[name][1])
    for name in outputs:
        visit(position[name][1])

    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in outside:
        copies[node] = new.placeholder(node.name)
        copies[node].meta = {"val": node.meta["val"]}
    inputs = [n.name for n in outside]
    inputs += _pass_symbols(graph, outside, body, new)
    for node in body:
        copies[node] = new.node_copy(node, copies.__getitem__)
        copies[node].meta = {k: v for k, v in node.meta.items() if k in ("val", "tensor_meta", "stack_trace", "nn_module_stack")}
    new.output(tuple(copies[position[name][1]] for name in outputs))
    module = fx.GraphModule(original, new)
    return Piece(module, tuple(inputs), tuple(outputs), tuple(sorted(written)), _key(module))


def moved(piece: Piece, source: torch.device, target: torch.device) -> Piece:
    """The piece lowered for another device than the one that its graph was traced for."""
    module = retargeted(piece.module, source, target)
    return replace(piece, module=module, key=_key(module))


def _positions(graph: KernelGraph) -> dict[str, tuple[int, fx.Node]]:
    """Node name → (position, node); made once a graph."""
    cached: dict[str, tuple[int, fx.Node]] | None = graph.__dict__.get("_positions")
    if cached is None:
        cached = graph.__dict__["_positions"] = {n.name: (i, n) for i, n in enumerate(graph.module.graph.nodes)}
    return cached


def _pass_symbols(graph: KernelGraph, outside: list[fx.Node], body: list[fx.Node], new: fx.Graph) -> list[str]:
    """Adds an input for every free symbol that the piece's own inputs do not already hand over as an integer."""
    added = []
    symbols = torch_compat.free_symbols([n.meta.get("val") for n in (*outside, *body)])
    known = {torch_compat.symbol_of(n.meta.get("val")) for n in (*outside, *body)}
    for symbol in symbols:
        if symbol in known:
            continue
        holder = next(
            (n for n in graph.module.graph.nodes if n.name in graph.values and torch_compat.symbol_of(n.meta["val"]) == symbol),
            None,
        )
        if holder is not None and graph.producer(holder.name) is None:
            name, val = holder.name, holder.meta["val"]
        else:
            sizes = [
                (n, d)
                for n in outside
                if isinstance(n.meta.get("val"), torch.Tensor)
                for d, size in enumerate(n.meta["val"].shape)
                if torch_compat.symbol_of(size) == symbol
            ]
            if not sizes:
                continue  # Made inside the piece: a data-dependent size.
            node, dim = sizes[0]
            name, val = f"{node.name}.size({dim})", node.meta["val"].shape[dim]
        placeholder = new.placeholder(re.sub(r"\W", "_", name))
        placeholder.meta = {"val": val}
        added.append(name)
    return added


def _key(module: fx.GraphModule) -> str:
    """Hash of the graph with its nodes and symbols renamed in order of appearance."""
    names: dict[Any, str] = {}
    symbols: dict[str, str] = {}

    def rename(match: re.Match[str]) -> str:
        return symbols.setdefault(match[0], f"s#{len(symbols)}")

    def describe(val: Any) -> str:
        if isinstance(val, torch.Tensor):
            strides = tuple(val.stride()) if val.layout == torch.strided else str(val.layout)
            text = f"{val.dtype}{tuple(val.shape)}{strides}{val.device}{val.is_conj()}{val.is_neg()}"
        elif isinstance(val, (list, tuple)):
            return "(" + ",".join(describe(v) for v in val) + ")"
        else:
            text = f"{type(val).__name__}:{val}"
        return re.sub(r"\b[suz]\d+\b", rename, text)

    def argument(arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return names[arg]
        if isinstance(arg, (list, tuple)):
            return "[" + ",".join(map(argument, arg)) + "]"
        if isinstance(arg, dict):
            return "{" + ",".join(f"{k}:{argument(v)}" for k, v in arg.items()) + "}"
        if isinstance(arg, slice):
            return f"slice({argument(arg.start)},{argument(arg.stop)},{argument(arg.step)})"
        return f"{type(arg).__name__}:{arg!r}"

    lines = []
    for node in module.graph.nodes:
        names[node] = f"%{len(names)}"
        if node.op == "get_attr":
            value: Any = module
            for part in str(node.target).split("."):
                value = getattr(value, part)
            # A sub-graph (cond, scan) is part of the structure; other attributes are told apart by identity.
            lines.append(f"get_attr {_key(value) if isinstance(value, fx.GraphModule) else id(value)}")
            continue
        target = "" if node.op in ("placeholder", "output") else str(node.target)
        val = describe(node.meta.get("val")) if node.op != "output" else ""
        lines.append(
            f"{node.op} {target} {argument(node.args) if node.op != 'placeholder' else ''} {argument(node.kwargs)} {val}"
        )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
