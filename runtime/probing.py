"""Run custom operators once, on copies, and see whether they write what their schemas do not declare.

What is seen is evidence that there is a write, never that there is none: it adds dependences and removes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..passes import torch_compat
from ..passes.errors import TesseraWarning
from ..passes.ir import KernelGraph
from ..passes.operators import is_effect, sources
from .philox import inductor_randint, inductor_random, inductor_seeds
from .replicas import own_copy
from .weights import present

#: Operators whose schemas torch's own tests hold against what they do, and those that this package makes.
_TRUSTED = {"aten", "prims", "prim", "inductor", "rngprims", "_c10d_functional", "tessera"}
_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Undeclared:
    """Writes that were seen: node → names of arguments.

    ``sayable``: those that :func:`hidden_writes.declare` can put into the graph; ``others`` are lists of tensors, and arguments
    of operators that declare other writes.
    """

    sayable: dict[str, tuple[str, ...]]
    others: dict[str, tuple[str, ...]]


def custom_operators(graph: KernelGraph) -> tuple[str, ...]:
    """The nodes that call operators of others than torch."""
    return tuple(n.name for n in graph.module.graph.nodes if _operator(n) is not None)


def _operator(node: fx.Node) -> torch._ops.OpOverload | None:
    if node.op != "call_function":
        return None
    target = torch_compat.functionalized_operator(node) or node.target
    return target if isinstance(target, torch._ops.OpOverload) and target.namespace not in _TRUSTED else None


def undeclared_writes(graph: KernelGraph, inputs: Mapping[str, Any]) -> Undeclared:
    """What custom operators changed and their schemas say that they do not; warns once for each argument.

    The graph runs uncompiled up to its last custom operator, on ``inputs`` (name → value), of which whatever a custom operator
    might write is copied first. Arguments are compared byte by byte: a write that leaves the bytes as they were is not seen.
    """
    probe = _Probe(graph)
    with torch.no_grad(), torch.random.fork_rng(devices=_cuda_devices(inputs)):
        probe.run(*(inputs[name] for name in graph.inputs))
    for node, arguments in [*probe.found.items(), *probe.others.items()]:
        _warn(str(probe.targets[node]), arguments)
    return Undeclared(probe.found, probe.others)


class _Done(Exception):
    pass


class _Probe(fx.Interpreter):
    def __init__(self, graph: KernelGraph) -> None:
        super().__init__(graph.module)
        self.found: dict[str, tuple[str, ...]] = {}
        self.others: dict[str, tuple[str, ...]] = {}
        self.targets: dict[str, Any] = {}
        names = custom_operators(graph)
        self.custom, self.last = set(names), names[-1] if names else None
        nodes = {n.name: n for n in graph.module.graph.nodes}
        self.copied = {s.name for name in names for s in sources(nodes[name])} | set(graph.mutated)
        self.random = dict(zip(torch_compat.random_prims(), (inductor_seeds, inductor_random, inductor_randint), strict=True))

    def run(self, *args: Any, **more: Any) -> Any:
        try:
            if self.last is not None:
                super().run(*args, enable_io_processing=False)
        except _Done:
            pass
        finally:
            self.env = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "placeholder" or n.op == "get_attr":
            value = present(super().run_node(n))
            return own_copy(value) if n.name in self.copied and isinstance(value, torch.Tensor) else value
        if n.op == "call_function" and is_effect(n) and not n.users:
            return None  # a print or an assertion: the real call will say it
        if n.name not in self.custom:
            return super().run_node(n)
        result = self._probed(n)
        if n.name == self.last:
            raise _Done
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(self.random.get(target, target), args, kwargs)

    def _probed(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        operator = _operator(n)
        assert operator is not None
        plain = operator is n.target
        given: dict[str, list[torch.Tensor]] = {}
        for position, argument in enumerate(operator._schema.arguments):
            value = args[position] if plain and position < len(args) else kwargs.get(argument.name)
            declared = argument.alias_info is not None and argument.alias_info.is_write
            tensors = [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, torch.Tensor)]
            if tensors and not declared:
                given[argument.name] = tensors
        before = {name: [_bytes(v).clone() for v in tensors] for name, tensors in given.items()}
        result = self.call_function(n.target, args, kwargs)
        changed = [
            name
            for name, tensors in given.items()
            if not all(torch.equal(_bytes(v), old) for v, old in zip(tensors, before[name], strict=True))
        ]
        lists = {a.name for a in operator._schema.arguments if not isinstance(a.type, torch.TensorType)}
        for found, names in (
            (self.found, [c for c in changed if plain and c not in lists]),
            (self.others, [c for c in changed if not plain or c in lists]),
        ):
            if names:
                found[n.name], self.targets[n.name] = tuple(names), operator
        return result


def _bytes(value: torch.Tensor) -> torch.Tensor:
    """The contents as bytes, so that NaNs are equal to themselves; a copy where the elements do not lie closely."""
    plain = value.resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8) if plain.numel() else plain.new_empty(0, dtype=torch.uint8)


def _cuda_devices(inputs: Mapping[str, Any]) -> list[int]:
    return sorted({v.device.index or 0 for v in inputs.values() if isinstance(v, torch.Tensor) and v.is_cuda})


def _warn(operator: str, arguments: tuple[str, ...]) -> None:
    for argument in arguments:
        if (operator, argument) not in _warned:
            _warned.add((operator, argument))
            warnings.warn(
                f"operator {operator} writes its argument {argument!r}, which its schema does not declare (mutates_args of a "
                "custom operator); the order of what touches it is kept here, but other code that trusts the schema may go wrong",
                TesseraWarning,
                stacklevel=4,
            )
