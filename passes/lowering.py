"""ATen FX graph → :class:`KernelGraph`.

Rules, in order:

1. A copy of the graph is decomposed if it is not yet, and Inductor's joint graph passes run once over it, so that random
   operators read explicit seed tensors.
2. *Free* nodes (views, factories, arithmetic on sizes) are cloned into every consumer and belong to no kernel.
3. Matrix products, convolutions, attention and whatever else Inductor would call out for are kernels alone.
4. Pointwise operators, reductions, cat and index join the kernel of their latest producer; of an earlier producer when
   they are its only reader. Never when that would make a cycle between kernels (ancestor bit masks tell). Then a kernel of
   such operators whose results one other such kernel alone reads is merged into it, which cannot make a cycle.
5. ``copy_`` into a graph input joins the kernel that makes the new value, so that it can be made in place.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from . import torch_compat
from .errors import LoweringError
from .extraction import extract
from .ir import Kernel, KernelGraph, Origin, Value
from .kernel_facts import byte_count, dim_text, flops, kind_of, module_path, needs_data, short_name, source_line, traffic
from .operators import CHECKS, INDEX, SCATTER, is_effect, is_free, is_fusable, is_scalar, packet, sources, sources_through


def lower(gm: fx.GraphModule, example_inputs: Sequence[Any] = (), *, static_inputs: Sequence[int] = ()) -> KernelGraph:
    """Groups the nodes of a functional ATen graph into kernels.

    Args:
        gm: an inference graph of ATen operators, as AOTAutograd, ``make_fx`` or ``torch.export`` make it: functional but for
            trailing ``copy_`` nodes into its placeholders. It is not changed.
        example_inputs: real or fake tensors; needed only where nodes lack fake values in ``meta["val"]``.
        static_inputs: positions of parameters and buffers among the placeholders.

    Raises:
        LoweringError: the graph has nodes that are not ATen calls, or writes in place other than by a final ``copy_``.
    """
    gm = _prepare(gm, example_inputs)
    _drop_dead(gm.graph)
    grouping = _Grouping(gm)
    return _build(gm, grouping, frozenset(static_inputs))


def _prepare(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    gm = _copy(gm)
    for node in gm.graph.nodes:
        if node.op in ("call_module", "call_method"):
            raise LoweringError(
                f"node {node.name!r} is a {node.op} of {node.target!r}; lower takes ATen graphs: trace with AOTAutograd, "
                "torch.export or make_fx first"
            )
    values = [n.meta.get("val") for n in gm.graph.nodes if n.op != "output"]
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    modes = {id(v.fake_mode) for v in values if hasattr(v, "fake_mode")}
    complete = all("val" in n.meta for n in gm.graph.nodes if n.op in ("placeholder", "call_function"))
    mode = torch_compat.fake_mode_of(values) or torch_compat.fake_mode_of(example_inputs) or torch_compat.current_fake_mode()
    if not complete or len(modes) > 1:
        if len(example_inputs) != len(placeholders):
            raise LoweringError(
                f"the graph has {len(placeholders)} inputs without shapes but {len(example_inputs)} example inputs"
            )
        mode = torch_compat.fake_mode_of(example_inputs) or torch_compat.new_fake_mode()
        torch_compat.fake_propagate(gm, example_inputs, mode)
    for node in gm.graph.nodes:
        if node.op == "call_function" and not _known_target(node.target):
            raise LoweringError(
                f"node {node.name!r} calls {node.target!r}, which is not an ATen operator; trace with AOTAutograd first"
            )
    if mode is None:
        mode = torch_compat.new_fake_mode()
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value = node.meta.get("val", _attribute(gm, str(node.target)))
            real = isinstance(value, torch.Tensor) and torch_compat.fake_mode_of([value]) is None
            node.meta["val"] = mode.from_tensor(value) if real else value
    if torch_compat.needs_decomposing(gm):
        gm = torch_compat.decompose(gm, [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"], mode)
    gm = _with_copies_last(gm, lambda g: torch_compat.joint_graph_passes(g, mode))
    if any(n.op == "call_function" and "val" not in n.meta for n in gm.graph.nodes):
        torch_compat.fake_propagate(gm, [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"], mode)
    return gm


def _with_copies_last(gm: fx.GraphModule, passes: Callable[[fx.GraphModule], fx.GraphModule]) -> fx.GraphModule:
    """Applies ``passes`` with the final copies into inputs taken out, as outputs, and puts them back.

    Inductor's passes take an input for constant and drop clones of it, also where such a clone keeps the old content of an input
    that is overwritten (two buffers that are swapped). A value that turns out to be an overwritten input is cloned again, before
    all copies.
    """
    graph = gm.graph
    output = next(iter(reversed(graph.nodes)))
    copies = [n for n in graph.nodes if n.target is torch.ops.aten.copy_.default and n.args[0].op == "placeholder"]
    if not copies or any(set(n.users) - {output} for n in copies):
        return passes(gm)
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    targets = [inputs.index(n.args[0]) for n in copies]
    single = not isinstance(output.args[0], (list, tuple))
    returned = [output.args[0]] if single else list(output.args[0])
    # A returned copy stands for its input; it is put back with the copy.
    again = {position: copies.index(n) for position, n in enumerate(returned) if n in copies}
    returned = [n.args[0] if n in copies else n for n in returned]
    output.args = ((*returned, *(n.args[1] for n in copies)),)
    metas = [(dict(n.meta), n.name) for n in copies]
    for node in copies:
        graph.erase_node(node)
    gm = passes(gm)
    graph = gm.graph
    output = next(iter(reversed(graph.nodes)))
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    values = list(output.args[0])[len(returned) :]
    overwritten = {inputs[i] for i in targets}
    with graph.inserting_before(output):
        for position, value in enumerate(values):
            if isinstance(value, fx.Node) and any(s in overwritten for s in sources_through(value)):
                values[position] = graph.call_function(torch.ops.aten.clone.default, (value,))
                values[position].meta = dict(value.meta)
        restored = []
        for target, value, (meta, name) in zip(targets, values, metas, strict=True):
            copy = graph.call_function(torch.ops.aten.copy_.default, (inputs[target], value))
            copy.meta, copy.name = meta, name  # The name is free: its first owner was erased.
            restored.append(copy)
    kept = list(output.args[0])[: len(returned)]
    for position, number in again.items():
        kept[position] = restored[number]
    output.args = (kept[0] if single else tuple(kept),)
    gm.recompile()
    return gm


def _known_target(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload) or torch_compat.is_higher_order(target):
        return True
    module = getattr(target, "__module__", "") or ""
    return module in ("_operator", "operator", "math") or getattr(target, "__name__", "").startswith("sym_")


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    result = graph.graph_copy(gm.graph, {})
    output = graph.output(result)
    output.meta = dict(next(iter(reversed(gm.graph.nodes))).meta)
    copied = fx.GraphModule(gm, graph)
    copied.meta = dict(gm.meta)
    for name, child in list(copied.named_children()):
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, _copy(child))
    return copied


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _drop_dead(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not is_effect(node) and packet(node) not in CHECKS:
            graph.erase_node(node)


class _Grouping:
    """Assigns every non-free node to a group; groups form a DAG, kept acyclic with a bit mask of ancestors each."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.members: list[list[fx.Node]] = []
        self.ancestors: list[int] = []
        self.group: dict[fx.Node, int] = {}
        self.position = {n: i for i, n in enumerate(gm.graph.nodes)}
        self.sources: dict[fx.Node, list[fx.Node]] = {}
        self.solo: list[bool] = []
        readers: dict[fx.Node, list[fx.Node]] = {}
        copies: list[fx.Node] = []
        overwritten: dict[fx.Node, fx.Node] = {}
        for node in gm.graph.nodes:
            if node.op == "output":
                for source in sources(node):
                    readers.setdefault(source, []).append(node)
            if node.op != "call_function" or is_free(node):
                continue
            found = self.sources[node] = sources(node)
            for source in found:
                changed = source if source.target is torch.ops.aten.copy_.default else overwritten.get(source)
                if changed is not None and not (source is node.args[0] and node.target is torch.ops.aten.copy_.default):
                    raise LoweringError(
                        f"node {node.name!r} reads {changed.args[0]} after {changed.name!r} overwrote it; functionalize the "
                        "graph, so that copies into its inputs come last"
                    )
                readers.setdefault(source, []).append(node)
            if node.target is torch.ops.aten.copy_.default:
                target = node.args[0]
                if not isinstance(target, fx.Node) or target.op != "placeholder":
                    raise LoweringError(
                        f"node {node.name!r} writes into {target}, which is not a graph input; functionalize the graph"
                    )
                copies.append(node)
                overwritten[target] = node
            elif isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
                raise LoweringError(
                    f"node {node.name!r} ({node.target}) writes in place; lower takes functional graphs, as AOTAutograd or "
                    "torch.func.functionalize make them"
                )
        for node in self.sources:
            if node not in copies:
                self._place(node, readers)
        self._merge_into_sole_readers(readers)
        for node in copies:
            self._place_copy(node, readers)

    def _merge_into_sole_readers(self, readers: dict[fx.Node, list[fx.Node]]) -> None:
        for group in reversed(range(len(self.members))):
            members = self.members[group]
            if self.solo[group] or not is_fusable(members[0]):
                continue
            # The output node and copies are in no group yet: what they read must stay visible.
            read_by = {self.group.get(r, -1) for n in members for r in readers.get(n, ())} - {group}
            if len(read_by) != 1:
                continue
            other = read_by.pop()
            if other < 0 or self.solo[other] or not is_fusable(self.members[other][0]):
                continue
            self.members[other] += members
            self.group.update(dict.fromkeys(members, other))
            self.members[group] = []
            self.ancestors = [mask & ~(1 << group) for mask in self.ancestors]

    def _place(self, node: fx.Node, readers: dict[fx.Node, list[fx.Node]]) -> None:
        producers = {self.group[s]: s for s in self.sources[node] if s in self.group}
        if node.target is operator.getitem or (is_scalar(node) and packet(node) != "aten._local_scalar_dense" and producers):
            self._join(node, max(producers), producers)
            return
        if is_fusable(node) and producers:
            latest = self.group[max((s for s in self.sources[node] if s in self.group), key=self.position.__getitem__)]
            candidates = [latest] + [
                g for g, s in sorted(producers.items(), reverse=True) if g != latest and len(readers[s]) == 1
            ]
            for candidate in candidates:
                if self.solo[candidate] or not is_fusable(self.members[candidate][0]):
                    continue
                if all(g == candidate or not self.ancestors[g] >> candidate & 1 for g in producers):
                    self._join(node, candidate, producers)
                    return
        self._new(node, producers)

    def _place_copy(self, node: fx.Node, readers: dict[fx.Node, list[fx.Node]]) -> None:
        target, value = node.args[0], node.args[1]
        assert isinstance(target, fx.Node)
        made_by = [s for s in self.sources[node] if s in self.group and s is not target]
        before = {self.group[r] for r in readers[target] if r in self.group}
        producers = {self.group[s]: s for s in made_by}
        if isinstance(value, fx.Node) and len(producers) == 1:
            group = next(iter(producers))
            if all(g == group or not self.ancestors[g] >> group & 1 for g in before):
                self._join(node, group, {**producers, **dict.fromkeys(before)})
                return
        self._new(node, {**producers, **dict.fromkeys(before)})

    def _new(self, node: fx.Node, producers: Iterable[int]) -> None:
        index = len(self.members)
        self.members.append([node])
        self.solo.append(is_effect(node) and node.target is not torch.ops.aten.copy_.default)
        mask = 0
        for g in producers:
            mask |= self.ancestors[g] | 1 << g
        self.ancestors.append(mask)
        self.group[node] = index

    def _join(self, node: fx.Node, group: int, producers: Iterable[int]) -> None:
        self.members[group].append(node)
        self.group[node] = group
        added = 0
        for g in producers:
            if g != group:
                added |= self.ancestors[g] | 1 << g
        if added & ~self.ancestors[group]:
            self.ancestors[group] |= added
            for g, mask in enumerate(self.ancestors):
                if mask >> group & 1:
                    self.ancestors[g] = mask | added

    def ordered(self) -> list[list[fx.Node]]:
        """Groups in an order that respects dependences, as close to the graph's own as possible."""
        before: list[set[int]] = [set() for _ in self.members]
        after: list[set[int]] = [set() for _ in self.members]
        alive = [g for g, members in enumerate(self.members) if members]
        for group in alive:
            mask = self.ancestors[group]
            for other in range(len(self.members)):
                if mask >> other & 1:
                    before[group].add(other)
                    after[other].add(group)
        waiting = [len(b) for b in before]
        key = {g: max(self.position[n] for n in self._timed(g)) for g in alive}
        heap = [(key[g], g) for g in alive if waiting[g] == 0]
        heapq.heapify(heap)
        result = []
        while heap:
            _, group = heapq.heappop(heap)
            result.append(sorted(self.members[group], key=self.position.__getitem__))
            for other in after[group]:
                waiting[other] -= 1
                if waiting[other] == 0:
                    heapq.heappush(heap, (key[other], other))
        assert len(result) == len(alive), "kernels form a cycle"
        return result

    def _timed(self, group: int) -> list[fx.Node]:
        """The nodes that say when a group is due: copies stand at the end of the graph wherever their values are made."""
        computing = [n for n in self.members[group] if n.target is not torch.ops.aten.copy_.default]
        return computing or self.members[group]


def _build(gm: fx.GraphModule, grouping: _Grouping, static: frozenset[int]) -> KernelGraph:
    output = next(iter(reversed(gm.graph.nodes)))
    returned = output.args[0] if isinstance(output.args[0], (list, tuple)) else (output.args[0],)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    mutated: dict[str, str] = {}
    for node in grouping.group:
        if node.target is torch.ops.aten.copy_.default:
            mutated[_overwritten(node)] = node.name

    values: dict[str, Value] = {}
    for index, node in enumerate(placeholders):
        origin: Origin = "state" if node.name in mutated else "weight" if index in static else "input"
        values[node.name] = _value(node, origin)
    used_constants = {s for n in [*grouping.sources, output] for s in sources(n) if s.op == "get_attr"}
    for node in sorted(used_constants, key=grouping.position.__getitem__):
        values[node.name] = _value(node, "constant")

    needed: dict[fx.Node, set[int]] = {}
    for node, found in grouping.sources.items():
        for source in found:
            needed.setdefault(source, set()).add(grouping.group[node])
    output_sources = sources(output)
    kernels = []
    for number, members in enumerate(grouping.ordered()):
        group = grouping.group[members[0]]
        outputs, writes, inputs = [], [], dict[str, None]()
        for node in members:
            if node.target is torch.ops.aten.copy_.default:
                target = _overwritten(node)
                writes.append(target)
                outputs.append(node.name)
                values[node.name] = replace(_value(node.args[0], "state"), name=node.name, storage=target)
            elif needed.get(node, set()) - {group} or node in output_sources:
                if isinstance(node.meta.get("val"), (tuple, list)):
                    raise LoweringError(f"node {node.name!r} makes a tuple that leaves its kernel; unpack it with getitem first")
                outputs.append(node.name)
                values[node.name] = _value(node, "activation")
            for source in grouping.sources[node]:
                if grouping.group.get(source) != group:
                    # A write needs the storage even where it does not read the old content.
                    inputs[source.name] = None
        read, written = traffic(members, grouping.group, group, set(outputs), values)
        effect = any(is_effect(n) and n.target is not torch.ops.aten.copy_.default for n in members)
        kernels.append(
            Kernel(
                name=f"k{number}_{short_name(members)}",
                nodes=tuple(n.name for n in members),
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                writes=tuple(writes),
                kind=kind_of(members),
                flops=sum(flops(n) for n in members),
                bytes_read=read,
                bytes_written=written,
                module=module_path(members),
                source=source_line(members),
                fingerprint="",
                effect=effect,
                data_dependent=any(packet(n) in INDEX or packet(n) in SCATTER for n in members),
                needs_data=any(needs_data(n, grouping.group, group) for n in members),
            )
        )
    storages: dict[int, str] = {}
    for node in placeholders:
        if isinstance(node.meta["val"], torch.Tensor):
            storages.setdefault(torch_compat.storage_key(node.meta["val"]), node.name)
    free = sum(1 for n in gm.graph.nodes if is_free(n))
    graph = KernelGraph(
        kernels=tuple(kernels),
        values=values,
        inputs=tuple(n.name for n in placeholders),
        outputs=tuple(n.name if isinstance(n, fx.Node) else None for n in returned),
        output_values=tuple(s.name for s in output_sources),
        mutated=mutated,
        output_storages=tuple(_output_storage(n, storages) for n in returned),
        nodes=sum(1 for n in gm.graph.nodes if n.op == "call_function"),
        free_nodes=free,
        module=gm,
    )
    named = tuple(replace(k, fingerprint=extract(graph, [k.name], k.outputs).key) for k in graph.kernels)
    return replace(graph, kernels=named)


def _overwritten(copy: fx.Node) -> str:
    """Name of the graph input that a ``copy_`` node overwrites."""
    target = copy.args[0]
    assert isinstance(target, fx.Node)
    return target.name


def _output_storage(node: Any, storages: dict[int, str]) -> str | None:
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if node.target is torch.ops.aten.copy_.default:
        node = node.args[0]
    base = node
    while base.op == "call_function" and is_free(base) and base.all_input_nodes:
        tensors = [a for a in base.all_input_nodes if not is_scalar(a)]
        if not tensors:
            break
        base = tensors[0]
    if isinstance(base.meta.get("val"), torch.Tensor):
        return storages.setdefault(torch_compat.storage_key(base.meta["val"]), base.name)
    return str(base.name)


def _value(node: Any, origin: Origin) -> Value:
    val = node.meta["val"]
    if not isinstance(val, torch.Tensor):
        return Value(node.name, (), (), "symint" if not isinstance(val, float) else "float", "host", 8, origin, node.name)
    shape = tuple(dim_text(s) for s in val.shape)
    strides = tuple(dim_text(s) for s in val.stride()) if val.layout == torch.strided else ()
    return Value(
        node.name, shape, strides, str(val.dtype).removeprefix("torch."), str(val.device), byte_count(val), origin, node.name
    )
