"""What is known of ATen operators: which are free, which have effects, which Inductor fuses, and what a node reads."""

from __future__ import annotations

import operator

import torch
from torch import fx

from . import torch_compat

GEMM = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm", "aten._int_mm", "aten._grouped_mm", "aten.dot",
         "aten.mv", "aten._scaled_grouped_mm"}  # fmt: skip
INDEX = {"aten.index", "aten._unsafe_index", "aten.embedding", "aten.gather", "aten.index_select"}
SCATTER = {"aten.index_put", "aten._unsafe_index_put", "aten.scatter", "aten.scatter_add", "aten.scatter_reduce",
            "aten.index_add", "aten.index_copy", "aten.masked_scatter"}  # fmt: skip
MOVE = {"aten.cat", "aten.constant_pad_nd", "aten.slice_scatter", "aten.select_scatter", "aten.diagonal_scatter",
         "aten.as_strided_scatter", "aten.flip", "aten.roll", "aten.repeat", "aten.lift_fresh_copy", "aten.copy",
         "aten.clone"}  # fmt: skip
REDUCE = {"aten._softmax", "aten._log_softmax", "aten.logsumexp", "aten.native_layer_norm", "aten.native_group_norm",
           "aten.var_mean", "aten.std_mean", "aten.aminmax", "prims.var", "prims.sum"}  # fmt: skip
RESHAPING_SCATTER = {"aten.slice_scatter", "aten.select_scatter", "aten.diagonal_scatter", "aten.as_strided_scatter"}
RANDOM = {"prims.inductor_lookup_seed", "prims.inductor_random", "prims.inductor_randint"}
CHECKS = {"aten._assert_async", "aten._assert_scalar", "aten._assert_tensor_metadata", "aten.sym_constrain_range",
           "aten.sym_constrain_range_for_size"}  # fmt: skip


def is_free(node: fx.Node) -> bool:
    """Whether ``node`` is cloned into its consumers: a view, a factory, or arithmetic on sizes."""
    if node.op != "call_function" or node.target in (torch.ops.aten.copy_.default,):
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and source.op == "call_function" and is_free(source)
    if torch_compat.is_higher_order(node.target) or packet(node) in CHECKS:
        return False
    tensors = [a for a in node.all_input_nodes if not is_scalar(a)]
    if is_scalar(node):
        # Sizes of a graph input are known to every consumer; sizes of a computed tensor belong to its producer.
        return all(a.op == "placeholder" for a in tensors) and packet(node) != "aten._local_scalar_dense"
    if isinstance(node.target, torch._ops.OpOverload):
        if any(r.alias_info is not None and not r.alias_info.is_write for r in node.target._schema.returns):
            return True
        return not tensors and not is_effect(node) and isinstance(node.meta.get("val"), torch.Tensor)
    return False


def is_effect(node: fx.Node) -> bool:
    """Whether the order of ``node`` among its like matters beyond its result: prints, draws from a generator, and writes."""
    if node.op != "call_function":
        return False
    if torch_compat.is_higher_order(node.target):
        return "effect" in str(node.target) or "print" in str(node.target)
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target._schema.is_mutable or packet(node) == "aten._print":
        return True
    return torch.Tag.nondeterministic_seeded in node.target.tags and not _never_drops(node)


def _never_drops(node: fx.Node) -> bool:
    """Whether the operator only draws random numbers for a dropout that is switched off, as attention does."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            value = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return bool(value == 0)
    return False


def packet(node: fx.Node) -> str:
    """``"aten.mm"`` for any overload of it; the plain text of other targets."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target.overloadpacket)
    return str(node.target)


def is_scalar(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def sources_through(node: fx.Node) -> list[fx.Node]:
    """``node`` itself if it is a placeholder, constant or kernel node, else what it is a view of."""
    return sources(node) if node.op == "call_function" and is_free(node) else [node]


def sources(node: fx.Node) -> list[fx.Node]:
    """The placeholders, constants and kernel nodes that ``node`` reads, looking through free nodes; first use first."""
    found: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()

    def visit(n: fx.Node) -> None:
        if n in seen:
            return
        seen.add(n)
        if n.op == "get_attr" and not isinstance(n.meta.get("val"), torch.Tensor):
            return
        if n.op in ("placeholder", "get_attr") or (n.op == "call_function" and not is_free(n)):
            found[n] = None
            return
        for a in n.all_input_nodes:
            visit(a)

    for a in node.all_input_nodes:
        visit(a)
    return list(found)


def is_fusable(node: fx.Node) -> bool:
    """Whether Inductor generates code for ``node`` that can be fused with its producer's."""
    if not isinstance(node.target, torch._ops.OpOverload) or is_effect(node):
        return False
    if torch_compat.has_unbacked(node.meta.get("val")):
        return False
    name = packet(node)
    known = name in INDEX or name in MOVE or name in REDUCE or name in RANDOM
    return known or torch.Tag.pointwise in node.target.tags or torch.Tag.reduction in node.target.tags


def is_reduction(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.reduction in node.target.tags or packet(node) in REDUCE


def is_integer(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and not val.is_floating_point() and not val.is_complex() and val.dtype != torch.bool
