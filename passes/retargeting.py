"""A graph traced for one device → the same graph for another.

Devices stand in three places of an ATen graph: in the metadata of its values, in the arguments of factories and conversions, and,
unsaid, in factories that take the default device. All of them are rewritten; so are those of sub-graphs (the bodies of cond, scan
and map). What lies on other devices, and a user's own transfers to them, stay: a scalar that the model keeps on the CPU is still
one on every lane.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from . import torch_compat
from .errors import LoweringError
from .operators import is_scalar

#: Entries of ``node.meta`` that hold fake tensors.
_VALUES = ("val", "example_value", "eager_input_vals")


def retargeted(gm: fx.GraphModule, source: torch.device, target: torch.device) -> fx.GraphModule:
    """A copy of ``gm`` in which ``target`` stands wherever ``source`` stood.

    Args:
        gm: an ATen graph, with fake tensors in ``node.meta["val"]``. It is not changed.
        source: the device that it was traced for, the current one of its type at that time: that is what the graph means where
            it names a type without an index. Without an index itself it is the first of its type.
        target: need not exist on this machine.

    Returns:
        A graph whose fake tensors have the same mode, symbolic sizes and storages (views still share one). Tensors that the
        graph holds as attributes are the same objects, where they are: only the metadata of the nodes that fetch them says
        ``target``, since a lane is handed its own replica of them.

    Raises:
        LoweringError: a sub-graph holds a tensor on ``source``, of which no lane can be handed a replica.
    """
    return _Retargeting(source, target).module(gm, "")


class _Retargeting:
    def __init__(self, source: torch.device, target: torch.device) -> None:
        self.source, self.target = source, target
        self.fakes: dict[int, tuple[Any, Any]] = {}  # Each with its original, which keeps the id from being reused.

    def module(self, gm: fx.GraphModule, path: str) -> fx.GraphModule:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in gm.graph.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        result = fx.GraphModule(gm, graph)
        result.meta = dict(gm.meta)
        bodies: dict[str, fx.GraphModule] = {}
        for node in graph.nodes:
            if node.op == "get_attr":
                self._attribute(result, node, path, bodies)
            elif node.op == "call_function":
                self._arguments(node)
            for name in _VALUES:
                if name in node.meta:
                    node.meta[name] = pytree.tree_map(self._value, node.meta[name])
        for target, body in bodies.items():
            owner, _, name = target.rpartition(".")
            setattr(result.get_submodule(owner), name, body)
        result.recompile()
        return result

    def _attribute(self, gm: fx.GraphModule, node: fx.Node, path: str, bodies: dict[str, fx.GraphModule]) -> None:
        target = str(node.target)
        value: Any = gm
        for part in target.split("."):
            value = getattr(value, part)
        if isinstance(value, fx.GraphModule):
            if target not in bodies:
                bodies[target] = self.module(value, f"{path}{target}.")
        elif path and isinstance(value, torch.Tensor) and self._is_source(value.device):
            raise LoweringError(
                f"the sub-graph {path[:-1]!r} holds a tensor ({target!r}) on {value.device}, which cannot be run on "
                f"{self.target}; pass the tensor to the body as an operand"
            )

    def _arguments(self, node: fx.Node) -> None:
        node.args = fx.node.map_aggregate(node.args, self._device)
        node.kwargs = fx.node.map_aggregate(node.kwargs, self._device)
        if not isinstance(node.target, torch._ops.OpOverload) or not all(map(is_scalar, node.all_input_nodes)):
            return
        # A factory that names no device takes the default one, which need not be the target.
        for position, argument in enumerate(node.target._schema.arguments):
            if argument.name == "device":
                given = node.args[position] if position < len(node.args) else node.kwargs.get("device")
                val = node.meta.get("val")
                if given is None and isinstance(val, torch.Tensor) and self._is_source(val.device):
                    node.update_kwarg("device", self.target)

    def _device(self, value: Any) -> Any:
        return self.target if isinstance(value, torch.device) and self._is_source(value) else value

    def _is_source(self, device: torch.device) -> bool:
        return device.type == self.source.type and (device.index is None or device.index == (self.source.index or 0))

    def _value(self, value: Any) -> Any:
        if torch_compat.fake_mode_of([value]) is None or not self._is_source(value.device):
            return value
        found = self.fakes.get(id(value))
        if found is None:
            found = self.fakes[id(value)] = (value, torch_compat.fake_on(value, self.target))
        return found[1]
