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
from torch.utils import _pytree as pytree

from ..passes import torch_compat
from ..passes.errors import TesseraWarning
from ..passes.ir import KernelGraph
from ..passes.operators import is_effect, sources, sources_through
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

    def inputs(self, graph: KernelGraph) -> frozenset[str]:
        """The inputs of the graph that are written, also through views."""
        nodes = {n.name: n for n in graph.module.graph.nodes}
        found: set[str] = set()
        for name, arguments in [*self.sayable.items(), *self.others.items()]:
            operator, node = _operator(nodes[name]), nodes[name]
            for position, argument in enumerate(operator._schema.arguments if operator is not None else ()):
                value = (
                    node.args[position]
                    if position < len(node.args) and operator is node.target
                    else node.kwargs.get(argument.name)
                )
                if argument.name in arguments and isinstance(value, fx.Node):
                    found.update(s.name for s in sources_through(value) if s.op == "placeholder")
        return frozenset(found)


def custom_operators(graph: KernelGraph) -> tuple[str, ...]:
    """The nodes that call operators of others than torch."""
    module = graph.module
    return tuple(n.name for n in module.graph.nodes if _operator(n) is not None or _inside(n, module))


def taken_by_custom(graph: KernelGraph) -> frozenset[str]:
    """The inputs of the graph that custom operators are given, also through views."""
    names = set(custom_operators(graph))
    return frozenset(s.name for n in graph.module.graph.nodes if n.name in names for s in sources(n) if s.op == "placeholder")


def _operator(node: fx.Node) -> torch._ops.OpOverload | None:
    if node.op != "call_function":
        return None
    target = torch_compat.functionalized_operator(node) or node.target
    return target if isinstance(target, torch._ops.OpOverload) and target.namespace not in _TRUSTED else None


def _inside(node: fx.Node, module: torch.nn.Module) -> bool:
    """Whether a branch or body of a higher-order operator calls operators of others than torch."""
    if node.op != "call_function" or not torch_compat.is_higher_order(node.target):
        return False
    bodies = [getattr(module, str(a.target), None) for a in node.all_input_nodes if a.op == "get_attr"]
    return any(
        _operator(n) is not None or _inside(n, body)
        for body in bodies
        if isinstance(body, fx.GraphModule)
        for n in body.graph.nodes
    )


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
        if operator is None:
            return self._body(n, args, kwargs)
        plain = operator is n.target
        given: dict[str, list[torch.Tensor]] = {}
        for position, argument in enumerate(operator._schema.arguments):
            value = args[position] if plain and position < len(args) else kwargs.get(argument.name)
            declared = argument.alias_info is not None and argument.alias_info.is_write
            tensors = [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, torch.Tensor)]
            if tensors and not declared:
                given[argument.name] = tensors
        blank = [v for tensors in given.values() for v in tensors if v.is_floating_point() and not v.any()]
        result, changed = self._called(n.target, args, kwargs, given)
        if blank:
            # Zeros hide a write that scales: once more, on copies in which they are something else.
            changed += [c for c in self._on_others(n.target, args, kwargs, given, blank) if c not in changed]
        lists = {a.name for a in operator._schema.arguments if not isinstance(a.type, torch.TensorType)}
        results = {torch_compat.storage_key(r) for r in pytree.tree_leaves(result) if isinstance(r, torch.Tensor)}
        # A result in an argument's storage: a write to either is one to both, which copies cannot show.
        shared = [name for name, tensors in given.items() if any(torch_compat.storage_key(v) in results for v in tensors)]
        sayable = plain and not shared
        for found, names in (
            (self.found, [c for c in changed if sayable and c not in lists]),
            (self.others, [*dict.fromkeys([c for c in changed if not sayable or c in lists] + shared)]),
        ):
            if names:
                found[n.name], self.targets[n.name] = tuple(names), operator
        return result

    def _called(
        self, target: Any, args: Any, kwargs: Any, given: Mapping[str, list[torch.Tensor]]
    ) -> tuple[Any, list[str]]:  # fmt: skip
        """The result of a call, and the names of what it changed."""
        before = {name: [_bytes(v).clone() for v in tensors] for name, tensors in given.items()}
        result = self.call_function(target, args, kwargs)
        same = {
            name: all(torch.equal(_bytes(v), old) for v, old in zip(tensors, before[name], strict=True))
            for name, tensors in given.items()
        }
        return result, [name for name, kept in same.items() if not kept]

    def _on_others(
        self, target: Any, args: Any, kwargs: Any, given: Mapping[str, list[torch.Tensor]], blank: list[torch.Tensor]
    ) -> list[str]:  # fmt: skip
        copies: dict[int, torch.Tensor] = {}

        def copied(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in copies:
                copies[id(value)] = own_copy(value)
                if any(value is v for v in blank):
                    copies[id(value)].fill_(0.75)
            return copies[id(value)]

        others, more = pytree.tree_map(copied, (args, kwargs))
        try:
            return self._called(target, others, more, {n: [copied(v) for v in vs] for n, vs in given.items()})[1]
        except Exception:
            return []  # It takes no other values; what the real ones showed stands.

    def _body(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """A higher-order operator whose body calls custom ones: any tensor that it is given may be theirs to change."""
        tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        given = {f"tensor {i}": [v] for i, v in enumerate(tensors)}
        result, changed = self._called(n.target, args, kwargs, given)
        if changed:
            self.others[n.name], self.targets[n.name] = tuple(changed), n.target
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
