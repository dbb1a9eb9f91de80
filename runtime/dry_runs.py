"""Which kernels are run once to see what they touch, what of it holds for later runs, and whether it holds of whole segments.

A footprint counts for the values that only launches with a footprint touched (``Evidence.exact``). One that holds only while the
contents of other tensors stay as they are counts where these are weights, constants or state whose version can be checked at
each call without asking the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import networkx as nx
import torch

from ..passes import torch_compat
from ..passes.extents import Extents
from ..passes.ir import KernelGraph, Program, Recv, Run, segment_values
from ..passes.parts import reads
from ..ptx_tools.footprints import Footprint, Intervals
from .codegen import Codegen
from .probing import custom_operators
from .profiler import captured_values, invented_inputs
from .replicas import sight

if TYPE_CHECKING:
    from .evidence import Evidence  # reading PTX is imported where kernels are run


@dataclass(frozen=True)
class DryRun:
    """What was found by running kernels of one graph once.

    ``asked``: how many. ``exact``: those of which all values have a footprint; ``partly``: some; ``reasons``: kernel → why not
    all. ``launches`` counts them by how their footprints were had. ``guards``: what must stay as it is. ``unproven``: (segment,
    value) of which the final code showed less than its kernels alone, so that the value is sent whole.
    """

    asked: int
    exact: tuple[str, ...]
    partly: tuple[str, ...]
    reasons: Mapping[str, str]
    launches: Mapping[str, int]
    guards: tuple[str, ...]
    seconds: float
    unproven: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> DryRun:
        """From what ``dataclasses.asdict`` made of one, also by way of JSON."""
        made: dict[str, Any] = {n: tuple(map(_frozen, v)) if isinstance(v, (list, tuple)) else v for n, v in fields.items()}
        return cls(**made)


def _frozen(item: Any) -> Any:
    return tuple(item) if isinstance(item, list) else item


def worth_running(graph: KernelGraph, how: str) -> tuple[str, ...]:
    """``always``: all kernels of fixed shapes; ``auto``: those of users among them, of which schemas say least."""
    own = set(custom_operators(graph)) | {n.name for n in graph.module.graph.nodes if torch_compat.is_triton_kernel(n.target)}
    asked = [k for k in graph.kernels if not k.effect and (how == "always" or own & set(k.nodes))]
    values = graph.values
    fixed = (k for k in asked if not any(isinstance(n, str) for v in (*k.inputs, *k.outputs) for n in values[v].shape))
    return tuple(k.name for k in fixed)


class Values:
    """The values of a graph for a dry run: those of a real call, or invented ones. Computed when first asked for."""

    def __init__(self, graph: KernelGraph, real: Sequence[Any] | None) -> None:
        self.graph, self.invented = graph, real is None
        #: The real inputs by name; none where values are invented.
        self.given: dict[str, Any] = {} if real is None else dict(zip(graph.inputs, real, strict=True))
        self._captured: dict[str, Any] | None = None

    def settle(self) -> None:
        """Waits for what makes the real inputs."""
        for index in {v.device.index for v in self.given.values() if isinstance(v, torch.Tensor) and v.is_cuda}:
            torch.cuda.current_stream(index).synchronize()

    def of(self, names: Collection[str]) -> dict[str, Any]:
        if self.invented:
            return dict(zip(names, invented_inputs(self.graph, names), strict=True))
        if self._captured is None:
            with torch.random.fork_rng():
                self._captured = captured_values(self.graph, self.given)
        return self._captured


def dry_run(graph: KernelGraph, kernels: Sequence[str], codegen: Codegen, values: Values) -> dict[str, Evidence]:
    """Kernel → what its code, compiled alone, touched."""
    from .evidence import gather

    found = {}
    for name in kernels:
        kernel = graph[name]
        outputs = [v for v in kernel.outputs if graph.values[v].storage == v]
        found[name] = gather(
            graph, [name], outputs, codegen, values.of(_needed(graph, [name], outputs, codegen)), invented=values.invented
        )
    return found


def _needed(graph: KernelGraph, kernels: Sequence[str], outputs: Sequence[str], codegen: Codegen) -> list[str]:
    return [name.partition(".size(")[0] for name in codegen.compile(graph, kernels, outputs).inputs]


def holding(graph: KernelGraph, found: Mapping[str, Evidence], guards: bool = True) -> dict[str, Footprint]:
    """Kernel → the part of its footprint that holds for later runs; guards: also that which needs others' contents to stay."""
    kept = {}
    for name, evidence in found.items():
        watchable = guards and all(graph.resident(v) and v not in graph.mutated for v in evidence.guards)
        if evidence.footprint is None or (evidence.guards and not watchable):
            continue
        buffers = tuple(b for b in evidence.footprint.buffers if b.name in evidence.exact and b.name in graph.values)
        if buffers:
            kept[name] = replace(evidence.footprint, kernel=name, buffers=buffers)
    return kept


class Guards:
    """Tensors whose contents a plan relies on, as they were when it was made."""

    def __init__(self, graph: KernelGraph, names: Sequence[str], values: Values) -> None:
        self.names = tuple(dict.fromkeys(names))
        self._at = {name: graph.inputs.index(name) for name in self.names if name in graph.inputs}  # constants cannot change
        self._seen = {name: sight(values.given[name]) for name in self._at}

    @property
    def known(self) -> bool:
        """Whether every one of them has a version that can be compared."""
        return all(seen.version is not None for seen in self._seen.values())

    def changed(self, args: Sequence[Any]) -> str | None:
        """The name of one that is not what it was; nothing is asked of a device."""
        for name, at in self._at.items():
            now, seen = sight(args[at]), self._seen[name]
            if (now.place, now.version) != (seen.place, seen.version) or now.owner is not seen.owner:
                return name
        return None


def summary(graph: KernelGraph, found: Mapping[str, Evidence], used: Mapping[str, Footprint], seconds: float) -> DryRun:
    exact, partly, reasons = [], [], {}
    launches: dict[str, int] = {}
    for name, evidence in found.items():
        touched = {*graph[name].inputs, *graph[name].outputs} - {v.name for v in graph.values.values() if v.device == "host"}
        told = {b.name for b in used[name].buffers} if name in used else set()
        versions = {v for v in touched if graph.values[v].storage != v and graph.values[v].storage in told}
        if touched <= told | versions:
            exact.append(name)
        elif told:
            partly.append(name)
        if evidence.reason:
            reasons[name] = evidence.reason
        for launch in evidence.launches:
            how = launch.how or "not known"
            launches[how] = launches.get(how, 0) + 1
    guards = tuple(dict.fromkeys(g for name in used for g in found[name].guards))
    return DryRun(len(found), tuple(exact), tuple(partly), reasons, launches, guards, seconds)


def unproven(
    ddg: nx.DiGraph, program: Program, views: Extents, codegen: Codegen, values: Values, devices: Sequence[torch.device],
    watched: Collection[str],
) -> list[tuple[str, str, tuple[str, ...]]]:  # fmt: skip
    """(segment, value, kernels) where a part of a value is received on the word of footprints that the segment does not keep.

    What the graph's views show is a fact about the function and needs no code. Footprints are of kernels compiled alone; segments
    fuse and tune differently, so each that reads such a part is run once itself.
    """
    from .evidence import gather, reads_within

    graph: KernelGraph = ddg.graph["kernels"]
    failed = []
    for lane in program.lanes:
        arrivals = [x for x in lane.instructions if isinstance(x, Recv) and x.boxes]
        came = {x.value: x.boxes for x in arrivals if graph.values[x.value].storage == x.value}
        for at, io in segment_values(graph, lane.instructions).items():
            run = lane.instructions[at]
            assert isinstance(run, Run)
            evidence: Evidence | None = None
            for value in io.inputs:
                if value not in came:
                    continue
                here = Intervals.of(i for b in came[value] for i in b.intervals())
                users = tuple(k for k in run.kernels if value in graph[k].inputs)
                doubted = [k for k in users if not _shown(views, k, value, here)]
                if not doubted:
                    continue
                assert all(reads(ddg, k, value) for k in users)
                if evidence is None:
                    needed = _needed(graph, run.kernels, io.outputs, codegen)
                    evidence = gather(
                        graph, run.kernels, io.outputs, codegen, values.of(needed), devices[lane.index], invented=values.invented
                    )
                if not reads_within(evidence, value, here, watched):
                    failed.append((run.segment, value, users))
    return failed


def _shown(views: Extents, kernel: str, value: str, here: Intervals) -> bool:
    boxes = views.reads.get((kernel, value))
    return boxes is not None and Intervals.of(i for b in boxes for i in b.intervals()).issubset(here)
