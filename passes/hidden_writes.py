"""ATen graph + writes that schemas do not declare → a graph that says them.

An operator that overwrites an argument without saying so in its schema (``mutates_args`` of a custom operator) is right by luck:
whoever reads the argument later must run later, in the same memory, and nothing in the graph says so. Here such a call becomes
one of an operator made for it, which works on copies and returns the new contents; what reads the argument later, also through
views and as an output, reads those; an input of the graph is overwritten at its end, as it would have been. From then on the
dependence is one like any other.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import torch_compat
from .errors import LoweringError
from .operators import is_free, is_scalar

_library: torch.library.Library | None = None
_made: dict[tuple[str, tuple[str, ...]], Any] = {}


def declare(gm: fx.GraphModule, writes: Mapping[str, Sequence[str]]) -> fx.GraphModule:
    """A copy of ``gm`` in which undeclared writes are values.

    Args:
        gm: a functional ATen graph with fake values in ``meta["val"]``.
        writes: node → names, in its schema, of the arguments that it overwrites without declaring it.

    Raises:
        LoweringError: a node is no call of an operator, or has no such tensor argument.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    new = fx.GraphModule(gm, graph)
    by_name = {}
    for old, node in copies.items():
        node.meta = dict(old.meta)
        by_name[old.name] = node
    for name, arguments in writes.items():
        if name not in by_name or not isinstance(by_name[name].target, torch._ops.OpOverload):
            raise LoweringError(f"{name!r} is no call of an operator in this graph; undeclared writes are of operators")
        _declare(new, by_name[name], tuple(arguments))
    graph.lint()
    new.recompile()
    return new


def declared_contents(gm: fx.GraphModule) -> frozenset[str]:
    """The nodes that are new contents of arguments, as :func:`declare` put them there."""
    made = {target: len(target._schema.returns) - len(arguments) for (_, arguments), target in _made.items()}
    return frozenset(
        n.name
        for n in gm.graph.nodes
        if n.target is operator.getitem and n.args[0].target in made and n.args[1] >= made[n.args[0].target]
    )


def _declare(gm: fx.GraphModule, node: fx.Node, arguments: tuple[str, ...]) -> None:
    graph, order = gm.graph, list(gm.graph.nodes)
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    given: dict[str, fx.Node] = {}
    for position, argument in enumerate(target._schema.arguments):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if argument.name in arguments and isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor):
            given[argument.name] = value
    missing = [a for a in arguments if a not in given]
    if missing:
        raise LoweringError(f"{node.name!r} ({target}) has no tensor argument {missing[0]!r}")
    _check(node, given)
    later = order[order.index(node) + 1 :]
    count = len(target._schema.returns)
    with graph.inserting_after(node):
        call = graph.call_function(declared(target, arguments), node.args, node.kwargs)
    old = node.meta["val"]
    results = list(old) if isinstance(old, (list, tuple)) else [old] if count else []
    call.meta = {**node.meta, "val": (*results, *(n.meta["val"] for n in given.values()))}
    at = call

    def insert(function: Any, args: tuple[Any, ...], val: Any) -> fx.Node:
        nonlocal at
        with graph.inserting_after(at):
            at = graph.call_function(function, args)
        at.meta = {k: v for k, v in node.meta.items() if k in ("stack_trace", "nn_module_stack")} | {"val": val}
        return at

    if count == 1:
        node.replace_all_uses_with(insert(operator.getitem, (call, 0), results[0]))
    elif count:
        node.replace_all_uses_with(call)
    for number, value in enumerate(given.values(), count):
        written = insert(operator.getitem, (call, number), value.meta["val"])
        base = _base(value)
        if base is not value:
            val = value.meta["val"]
            where = (list(val.shape), list(val.stride()), int(val.storage_offset()) - int(base.meta["val"].storage_offset()))
            written = insert(torch.ops.aten.as_strided_scatter.default, (base, written, *where), base.meta["val"])
        _read_instead(graph, base, written, later, insert)
        final = [n for n in graph.nodes if n.target is torch.ops.aten.copy_.default and n.args[0] is base]
        if base.op == "placeholder" and not final:
            with graph.inserting_before(order[-1]):
                copy = graph.call_function(torch.ops.aten.copy_.default, (base, written))
            copy.meta = {"val": base.meta["val"]}
    graph.erase_node(node)


def _check(node: fx.Node, given: Mapping[str, fx.Node]) -> None:
    """Raises where copies of the arguments would not stand for the arguments."""
    bases = [_base(a) for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    for name, value in given.items():
        base, val = _base(value), value.meta["val"]
        if bases.count(base) > 1 or sum(a is value for a in [*node.args, *node.kwargs.values()]) > 1:
            raise LoweringError(f"{node.name!r} writes its argument {name!r} and has another in the same storage")
        if torch_compat.free_symbols([val, base.meta["val"]]):
            raise LoweringError(f"{node.name!r} writes its argument {name!r}, whose shape changes from call to call")
        if any(s == 0 and n > 1 for n, s in zip(val.shape, val.stride(), strict=True)):
            raise LoweringError(f"{node.name!r} writes its argument {name!r}, whose elements share memory")
        if base is not value and int(base.meta["val"].storage_offset()):
            raise LoweringError(f"{node.name!r} writes a view of {base.name}, which begins in the middle of its storage")


def _base(node: fx.Node) -> fx.Node:
    """What a view is one of."""
    while node.op == "call_function" and is_free(node):
        tensors = [a for a in node.all_input_nodes if not is_scalar(a)]
        if not tensors:
            break
        node = tensors[0]
    return node


def _read_instead(graph: fx.Graph, base: fx.Node, written: fx.Node, later: Sequence[fx.Node], insert: Any) -> None:
    """Makes ``later`` nodes that read ``base``, or views of it made before, read ``written``, or the same views of it."""
    again: dict[fx.Node, fx.Node] = {base: written}
    following = set(later)

    def renewed(node: fx.Node) -> fx.Node:
        if node in again:
            return again[node]
        if node in following or node.op != "call_function" or not is_free(node) or _base(node) is not base:
            return node
        args = fx.map_arg(node.args, renewed)
        kwargs = fx.map_arg(node.kwargs, renewed)
        view: fx.Node = insert(node.target, args, node.meta["val"])
        view.kwargs = kwargs
        again[node] = view
        return view

    for node in later:
        final = node.target is torch.ops.aten.copy_.default and node.args[0] is base
        args = fx.map_arg(node.args, renewed)
        node.args = (base, *args[1:]) if final else args
        node.kwargs = fx.map_arg(node.kwargs, renewed)


def declared(target: torch._ops.OpOverload, arguments: tuple[str, ...]) -> Any:
    """An operator that does what ``target`` does on copies of ``arguments`` and returns their new contents after its results."""
    key = (str(target), arguments)
    if key in _made:
        return _made[key]
    global _library
    if _library is None:
        _library = torch.library.Library("tessera", "FRAGMENT")
    schema = target._schema
    name = re.sub(r"\W", "_", f"{target}_{'_'.join(arguments)}")
    taken = re.sub(r"\([a-z]!?(?: -> [a-z!|*]+)?\)", "", str(schema)).partition("(")[2].rpartition(" -> ")[0].removesuffix(")")
    returns = [str(r.type) for r in schema.returns] + ["Tensor"] * len(arguments)
    if any(r not in ("Tensor", "int", "float", "bool") for r in returns):
        raise LoweringError(f"{target} returns {', '.join(returns)}; an undeclared write of it cannot be told")
    _library.define(f"{name}({taken}) -> ({', '.join(returns)})")
    places = [i for i, a in enumerate(schema.arguments) if a.name in arguments]
    keywords = {a.name for a in schema.arguments if a.kwarg_only}
    names = [a.name for a in schema.arguments]

    def run(copy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        given = dict(zip(names, args, strict=False)) | kwargs
        for place in places:
            given[names[place]] = copy(given[names[place]])
        results = target(
            *(given[n] for n in names if n in given and n not in keywords), **{n: given[n] for n in keywords if n in given}
        )
        made = () if not schema.returns else tuple(results) if len(schema.returns) > 1 else (results,)
        return (*made, *(given[names[place]] for place in places))

    def real(*args: Any, **kwargs: Any) -> Any:
        found = run(_copy, args, kwargs)
        return found if len(found) > 1 else found[0]

    _library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tessera::{name}", real, lib=_library)
    _made[key] = getattr(torch.ops.tessera, name).default
    return _made[key]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
