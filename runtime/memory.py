"""What one graph's lanes take of memory: what the plan says, and what is really there.

The plan counts, for each device, the weights, constants and state that its kernels read and, where any kernel runs there or it is
home, the peak of the activations of the requests in flight. What is really there: the caller's own tensors, where lanes read them
in place, and copies of them. Slices of one GPU, and devices that are emulated on one, lie in its memory together: weights once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
import torch

from ..passes.cluster import Cluster
from ..passes.ir import KernelGraph, Plan, Profile, format_bytes
from ..passes.problem import make_problem


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device, or in the memory of one GPU with all that lies in it.

    Attributes:
        weights: of weights and constants that kernels there read, by the plan.
        state: of inputs that the graph overwrites, with their replicas, by the plan.
        activations: at their peak, by the plan.
        limit: what there is; 0 where it is not known.
        in_place: of weights, constants and state that are read where the caller has them; None where nothing was built.
        copied: of replicas that are there now; None where nothing was built.
        allocated: by this process on this GPU now, whatever for; None for what is no whole GPU.
        most_allocated: the most so far, or since the user's last ``torch.cuda.reset_peak_memory_stats``.
    """

    weights: int
    state: int
    activations: int
    limit: int
    in_place: int | None = None
    copied: int | None = None
    allocated: int | None = None
    most_allocated: int | None = None

    @property
    def planned(self) -> int:
        return self.weights + self.state + self.activations

    def to_text(self) -> str:
        parts = (self.weights, self.state, self.activations)
        weights, state, activations = map(format_bytes, parts)
        text = f"{weights} of weights, {state} of state and {activations} of activations planned"
        if self.limit:
            text += f", {'MORE THAN THE ' if self.planned > self.limit else 'of '}{format_bytes(self.limit)}"
        if self.in_place is not None and self.copied is not None:
            text += f"; {format_bytes(self.in_place)} read in place, {format_bytes(self.copied)} copied"
        if self.allocated is not None and self.most_allocated is not None:
            text += f"; this process has {format_bytes(self.allocated)} there, {format_bytes(self.most_allocated)} at most"
        return text


def memory_use(
    ddg: nx.DiGraph, profile: Profile, cluster: Cluster, plan: Plan, *, inflight: int, executor: Any = None
) -> dict[str, MemoryUse]:
    """By device, and by GPU where devices lie in one's memory together.

    Args:
        inflight: requests whose activations are in memory at once.
        executor: of CPU or CUDA lanes, which runs the plan's program; None where nothing was built.
    """
    graph: KernelGraph = ddg.graph["kernels"]
    problem = make_problem(ddg, profile, cluster, inflight=inflight)
    inner = getattr(executor, "inner", executor)  # inside of one that captures it
    replicas = _replicas(inner)
    used = {plan.home, *plan.placement.values()}
    wanted: dict[str, dict[str, int]] = {d: {} for d in cluster.names}
    for name, nbytes, readers, at_home in problem.residents:
        for device in {plan.placement[problem.kernels[r]] for r in readers} | ({plan.home} if at_home else set()):
            wanted[device][name] = nbytes

    def use(devices: Iterable[str], limit: int, share: bool) -> MemoryUse:
        """share: what is no replica lies there once for all ``devices``."""
        found = {"weights": 0, "state": 0, "in_place": 0, "copied": 0}
        seen: set[str] = set()
        active = 0
        for device in devices:
            active += device in used
            for name, nbytes in wanted[device].items():
                replica = replicas.get((device, name))
                if replica is None and share:
                    if name in seen:
                        continue
                    seen.add(name)
                found["state" if name in graph.mutated else "weights"] += nbytes
                if replica is None:
                    found["in_place"] += nbytes
                elif replica.tensor is not None:
                    found["copied"] += replica.tensor.untyped_storage().nbytes()
        made = MemoryUse(found["weights"], found["state"], active * problem.activation_bytes * inflight, limit)
        return made if inner is None else replace(made, in_place=found["in_place"], copied=found["copied"])

    result = {d.name: use([d.name], d.memory, False) for d in cluster.devices}
    for gpu, devices in _gpus(inner).items():
        together = use(devices, _limit(cluster, devices), True) if devices != [str(gpu)] else result[str(gpu)]
        stats = torch.cuda.memory_stats(gpu)
        result[str(gpu)] = replace(
            together,
            allocated=int(stats.get("allocated_bytes.all.current", 0)),
            most_allocated=int(stats.get("allocated_bytes.all.peak", 0)),
        )
    return result


def _replicas(executor: Any) -> dict[tuple[str, str], Any]:
    """(device, value) → the replica that the lane keeps."""
    if executor is None:
        return {}
    lanes = executor.program.lanes
    return {(lanes[lane].device, name): r for lane, found in executor.replicas.items() for name, r in found.items()}


def _gpus(executor: Any) -> dict[torch.device, list[str]]:
    """GPU → the devices of the plan that lie in its memory; none for CPU lanes."""
    found: dict[torch.device, list[str]] = {}
    if executor is not None and isinstance(executor.lanes, tuple):
        for lane, streams in zip(executor.program.lanes, executor.lanes, strict=True):
            found.setdefault(streams.device, []).append(lane.device)
    return found


def _limit(cluster: Cluster, devices: Iterable[str]) -> int:
    """Of slices the GPU's, which each of them counts with; of emulated devices none."""
    return max((cluster[d].memory for d in devices if cluster[d].kind == "cuda"), default=0)
