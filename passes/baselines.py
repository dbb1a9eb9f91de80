"""The plans that people use today, each in its strongest honest form, and the best mixture of each kind with replicas.

====================  =====================================================================================================
name                  placements
====================  =====================================================================================================
single:GROUP          everything on one device of a group
replicas              a mixture of the above: each group serves the share of requests that it can
layers                contiguous stretches of layers, one for each group, or one for each device: ``layer_splits.py``
attention-ffn         blocks named attention on one group, ffn on another, the rest with either
prefill-decode        every assignment of whole workloads to groups
NAME+replicas         the best mixture of the placements of that name with those of ``single``
====================  =====================================================================================================

A name is left out where it does not apply: layers without layer numbers, attention-ffn without blocks, and so on. Groups of
several devices serve different requests on their members, but a split by layers may also give each member layers of its own
(``Baselines.pipelines``). Where memory holds everything on every device, members that take turns with those stages are no slower:
the mean of what they do is at most what the busiest does, and what moved between them need not. So the planner needs no such
split, but is compared with it. Where memory does not, ``planning.py`` plans the members apart, with the same splits.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from .layer_splits import layer_splits
from .mix import Mix, Worth, apart, fits, memory_binds, possible, resources, worth

Placement = tuple[int, ...]
Mixed = Callable[[Mix, Mapping[Placement, Worth]], float]


@dataclass(frozen=True)
class Baselines:
    """Placements by the name of their kind; those that are not possible are left out.

    ``pipelines``: splits by layers over ``members``, the mix in which each device is a group (None where none is shared).
    """

    kinds: Mapping[str, tuple[Placement, ...]]
    members: Mix | None = None
    pipelines: tuple[Placement, ...] = ()
    group_of: tuple[int, ...] = ()

    def placements(self) -> Iterator[Placement]:
        """Of the groups: what ``kinds`` has, and the pipelines' with members taking turns."""
        for placements in self.kinds.values():
            yield from placements
        for pipeline in self.pipelines:
            yield self.taking_turns(pipeline)

    def taking_turns(self, pipeline: Placement) -> Placement:
        """The groups of the devices of a placement over ``members``."""
        return tuple(self.group_of[d] for d in pipeline)

    def values(
        self, mix: Mix, mixed: Mixed, time_left: float = 10.0, known: Mapping[Placement, Worth] | None = None
    ) -> dict[str, float]:
        """Name → µs of one mix. Kinds that do not fit into memory are left out. known: what some placements cost.

        ``mixed(mix, worths)`` gives the µs of the best mixture of some placements of ``mix`` or ``members``, such that memory
        holds the weights of all it uses.
        """
        deadline = time.perf_counter() + time_left
        worths: dict[Placement, Worth] = {}
        table: dict[Placement, float] = {}
        for placement in itertools.chain.from_iterable(self.kinds.values()):
            if placement and placement not in table:
                found = (known or {}).get(placement) or worth(mix, placement)
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
            result["replicas"] = mixed(mix, {p: worths[p] for p in singles})
        for kind, placements in self.kinds.items():
            ready = [p for p in placements if p in table]
            if kind == "single" or not ready:
                continue
            result[kind] = min(table[p] for p in ready)
            if singles and time.perf_counter() < deadline:
                result[f"{kind}+replicas"] = mixed(mix, {p: worths[p] for p in [*ready, *singles]})
        if self.members is not None and self.pipelines:
            apiece = {p: worth(self.members, p) for p in self.pipelines}
            least = min(float(resources(self.members, of).max(initial=0.0)) for of in apiece.values())
            result["layers"] = min(least, result.get("layers", math.inf))
            if singles and time.perf_counter() < deadline:
                count = len(mix.kernels)
                whole = [(d,) * count for d, g in enumerate(self.group_of) if (g,) * count in table]
                shared = mixed(self.members, apiece | {p: worth(self.members, p) for p in whole})
                result["layers+replicas"] = min(shared, result.get("layers+replicas", math.inf))
        return result


def simple_plans(mix: Mix) -> Baselines:
    """All the placements of the table above that the pins and the devices allow."""
    size, count = len(mix.groups), len(mix.kernels)
    kinds: dict[str, list[Placement]] = {"single": [(g,) * count for g in range(size)]}
    if size > 1:
        kinds["layers"] = layer_splits(mix)
        kinds["attention-ffn"] = list(_blocks(mix))
        kinds["prefill-decode"] = list(_phases(mix))
    kept = {kind: tuple(dict.fromkeys(p for p in placements if possible(mix, p))) for kind, placements in kinds.items()}
    plans = Baselines({kind: placements for kind, placements in kept.items() if placements or kind == "single"})
    linked = all(pair in mix.inner for group in mix.groups for pair in itertools.permutations(group.members, 2))
    if all(g.size == 1 for g in mix.groups) or not linked or memory_binds(mix):
        return plans
    members = apart(mix)
    group_of = tuple(g for g, group in enumerate(mix.groups) for _ in group.members)
    return replace(
        plans, members=members, pipelines=tuple(p for p in layer_splits(members) if possible(members, p)), group_of=group_of
    )


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
