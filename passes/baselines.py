"""The plans that people use today, each in its strongest honest form, and the best mixture of each kind with replicas.

====================  =====================================================================================================
name                  placements
====================  =====================================================================================================
single:GROUP          everything on one device of a group
replicas              a mixture of the above: each group serves the share of requests that it can
layers                contiguous stretches of layers, one for each group, in every order of (up to four) groups; every cut
attention-ffn         blocks named attention on one group, ffn on another, the rest with either
prefill-decode        every assignment of whole workloads to groups
NAME+replicas         the best mixture of the placements of that name with those of ``single``
====================  =====================================================================================================

A name is left out where it does not apply: layers without layer numbers, attention-ffn without blocks, and so on. In all of them
groups of several devices serve different requests on their members.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from .mix import Mix, Worth, fits, resources, worth

Placement = tuple[int, ...]


@dataclass(frozen=True)
class Baselines:
    """Placements by the name of their kind; those that are not possible are left out."""

    kinds: Mapping[str, tuple[Placement, ...]]

    def placements(self) -> Iterator[Placement]:
        for placements in self.kinds.values():
            yield from placements

    def values(self, mix: Mix, mixed: Callable[[Mapping[Placement, Worth]], float], time_left: float = 10.0) -> dict[str, float]:
        """Name → µs of one mix. Kinds that do not fit into memory are left out.

        ``mixed`` gives the µs of the best mixture of some placements, such that memory holds the weights of all it uses.
        """
        deadline = time.perf_counter() + time_left
        worths: dict[Placement, Worth] = {}
        table: dict[Placement, float] = {}
        for placement in self.placements():
            if placement and placement not in table:
                found = worth(mix, placement)
                if fits(mix, found):
                    worths[placement] = found
                    table[placement] = float(resources(mix, found).max(initial=0.0))
        result: dict[str, float] = {}
        singles = [p for p in self.kinds.get("single", ()) if p in table]
        for placement in singles:  # one device of the group: it computes all, and its links are its own
            group = mix.groups[placement[0]]
            alone = replace(mix, groups=tuple(replace(g, members=g.members[:1]) for g in mix.groups))
            result[f"single:{group.name}"] = float(resources(alone, worths[placement]).max(initial=0.0))
        if singles:
            result["replicas"] = mixed({p: worths[p] for p in singles})
        for kind, placements in self.kinds.items():
            ready = [p for p in placements if p in table]
            if kind == "single" or not ready:
                continue
            result[kind] = min(table[p] for p in ready)
            if singles and time.perf_counter() < deadline:
                result[f"{kind}+replicas"] = mixed({p: worths[p] for p in [*ready, *singles]})
        return result


def simple_plans(mix: Mix) -> Baselines:
    """All the placements of the table above that the pins and the devices allow."""
    allowed = mix.allowed
    size, count = len(mix.groups), len(mix.kernels)

    def possible(placement: Placement) -> bool:
        return count == 0 or bool(allowed[np.arange(count), list(placement)].all())

    kinds: dict[str, list[Placement]] = {"single": [(g,) * count for g in range(size)]}
    if size > 1:
        kinds["layers"] = list(_layers(mix))
        kinds["attention-ffn"] = list(_blocks(mix))
        kinds["prefill-decode"] = list(_phases(mix))
    kept = {kind: tuple(dict.fromkeys(p for p in placements if possible(p))) for kind, placements in kinds.items()}
    return Baselines({kind: placements for kind, placements in kept.items() if placements or kind == "single"})


def _layers(mix: Mix) -> Iterator[Placement]:
    """Kernels before the first layer go with it, those after the last with that one."""
    layers = sorted({layer for layer in mix.layers if layer >= 0})
    if len(layers) < 2:
        return
    size = len(mix.groups)
    position = {layer: i for i, layer in enumerate(layers)}
    depth: list[int] = []
    reached: dict[int, int] = {}
    for layer, workload in zip(mix.layers, mix.workload.tolist(), strict=True):
        depth.append(reached.get(workload, 0) if layer < 0 else position[layer])
        reached[workload] = depth[-1]
    if size == 2:
        for cut in range(1, len(layers)):
            yield tuple(int(d >= cut) for d in depth)
            yield tuple(int(d < cut) for d in depth)
        return
    orders = list(itertools.permutations(range(size))) if size <= 4 else [tuple(range(size)), tuple(reversed(range(size)))]
    for order in orders:
        yield _shifted(mix, _balanced(mix, layers, depth, order), depth, order, len(layers))


def _shifted(mix: Mix, cuts: np.ndarray, depth: list[int], order: tuple[int, ...], layers: int) -> Placement:
    """The split after moving cuts, one at a time, as long as that makes it fit, or faster with its transfers."""

    def split(at: np.ndarray) -> Placement:
        return tuple(order[int(np.searchsorted(at, d, side="right"))] for d in depth)

    def score(at: np.ndarray) -> tuple[float, float]:
        of = worth(mix, split(at))
        over = sum(max(0.0, of.memory[g] - group.memory) for g, group in enumerate(mix.groups) if np.isfinite(group.memory))
        busy = float(resources(mix, of).max(initial=0.0))
        return over, busy if np.isfinite(busy) else np.inf

    best, steps = score(cuts), [s for s in (8, 4, 2, 1) if s < layers] or [1]
    improved = True
    while improved:
        improved = False
        for i in range(len(cuts)):
            for step in (sign * s for s in steps for sign in (-1, 1)):
                trial = cuts.copy()
                trial[i] += step
                if not (np.diff(trial, prepend=0, append=layers) >= 0).all():
                    continue
                found = score(trial)
                if found < best:
                    cuts, best, improved = trial, found, True
    return split(cuts)


def _balanced(mix: Mix, layers: list[int], depth: list[int], order: tuple[int, ...]) -> np.ndarray:
    """Cuts that minimise the largest compute of a stage, by dynamic programming over (layer, stage)."""
    size, count = len(order), len(layers)
    times = mix.times * mix.counts[:, None]
    finite = np.where(np.isfinite(times), times, 0.0)
    # What a device cannot run goes to another, if any cut allows that.
    times = np.where(mix.allowed, finite, 1e6 * (1.0 + finite.sum()))
    work = np.zeros((count, size))
    for k, d in enumerate(depth):
        for stage, g in enumerate(order):
            work[d, stage] += times[k, g] / mix.groups[g].size
    sums = np.concatenate((np.zeros((1, size)), np.cumsum(work, axis=0)))
    best = np.full((size + 1, count + 1), np.inf)
    came = np.zeros((size + 1, count + 1), dtype=int)
    best[0, 0] = 0.0
    for stage in range(1, size + 1):
        for end in range(count + 1):
            options = np.maximum(best[stage - 1, : end + 1], sums[end, stage - 1] - sums[: end + 1, stage - 1])
            came[stage, end] = int(options.argmin())
            best[stage, end] = options[came[stage, end]]
    cuts, end = [], count
    for stage in range(size, 1, -1):
        end = came[stage, end]
        cuts.append(end)
    return np.array(sorted(cuts))


def _blocks(mix: Mix) -> Iterator[Placement]:
    if not {"attention", "ffn"} <= set(mix.blocks):
        return
    for a, f in itertools.permutations(range(len(mix.groups)), 2):
        for rest in (a, f):
            yield tuple({"attention": a, "ffn": f}.get(block, rest) for block in mix.blocks)


def _phases(mix: Mix) -> Iterator[Placement]:
    if len(mix.workloads) < 2 or len(mix.groups) ** len(mix.workloads) > 4096:
        return
    for choice in itertools.product(range(len(mix.groups)), repeat=len(mix.workloads)):
        if len(set(choice)) > 1:
            yield tuple(choice[w] for w in mix.workload)
