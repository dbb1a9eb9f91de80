"""A mixture whose plans run at different batch sizes: one device may serve requests four at a time, another one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from .mix import Mix, Worth, memory_binds, possible, resources, worth
from .mix_plan import MixPlan, recommend
from .mixture import best_shares, in_turn, level_plans, loads_by_name, named, whole_shares

Placement = tuple[int, ...]
Sizes = tuple[int, ...]


def mix_batches(
    mixes: Mapping[Sizes, Mix],
    plans: Mapping[Sizes, MixPlan],
    fractions: Iterable[np.ndarray | None],
    union: Mix,
    positions: Mapping[Sizes, Sequence[int]],
) -> MixPlan:
    """The best of the ``plans``, or a mixture of plans at all sizes where that is better; compared with the simple plans of all.

    Args:
        mixes: batch sizes, one of each phase → the mix at these sizes, all on the same groups.
        plans: the best mixture of each.
        fractions: of each mix, as ``relax_together`` gives them: with two groups the plans cut from them reach its bound.
        union: the graphs of all sizes as one mix, for its weights; ``positions``: of each mix, where its kernels are in it.

    Where memory cannot hold everything on every device, sizes are not mixed.
    """
    best = min(plans.values(), key=lambda plan: plan.bottleneck_us)
    baselines = dict(best.baselines)
    for plan in plans.values():
        for name, us in plan.baselines.items():
            if not name.startswith("single:") or name in baselines:
                baselines[name] = min(us, baselines.get(name, us))
    best = replace(best, baselines=baselines, recommendation=recommend(baselines, best.bottleneck_us))
    if memory_binds(union):
        return best
    pool: dict[tuple[Sizes, Placement], Worth] = {}
    alone: list[tuple[Sizes, Placement]] = []
    for (sizes, mix), x in zip(mixes.items(), fractions, strict=True):
        names = [g.name for g in mix.groups]
        singles = [(g,) * len(mix.kernels) for g in range(len(names)) if mix.allowed[:, g].all()]
        alone += [(sizes, place) for place in singles]
        found = [tuple(names.index(p.placement[k]) for k in mix.kernels) for p in (*plans[sizes].plans, plans[sizes].single)]
        for place in (*singles, *found, *(level_plans(mix, x) if x is not None else ())):
            if possible(mix, place):
                pool[sizes, place] = worth(mix, place)
    if alone:
        baselines["replicas"] = min(_best(mixes, {key: pool[key] for key in alone})[1], baselines.get("replicas", np.inf))
    shares, us = _best(mixes, pool)
    if us >= best.bottleneck_us:
        return replace(best, recommendation=recommend(baselines, best.bottleneck_us))
    memory = _memory(union, [(positions[sizes], place) for (sizes, place), _ in shares])
    any_mix, worths = mixes[shares[0][0][0]], [pool[key] for key, _ in shares]
    whole = whole_shares(any_mix, worths, [share for _, share in shares])
    return replace(
        best,
        plans=tuple(named(mixes[sizes], place, share, pool[sizes, place], sizes) for (sizes, place), share in shares),
        whole=whole,
        whole_us=in_turn(any_mix, worths, whole),
        bottleneck_us=us,
        loads=loads_by_name(any_mix, [(of, share) for of, (_, share) in zip(worths, shares, strict=True)], memory),
        recommendation=recommend(baselines, us),
        batches=shares[0][0][0],
    )


def _best(
    mixes: Mapping[Sizes, Mix], pool: Mapping[tuple[Sizes, Placement], Worth]
) -> tuple[list[tuple[tuple[Sizes, Placement], float]], float]:
    """Shares, the largest first, and µs of a mix."""
    keys = list(pool)
    table = np.stack([resources(mixes[sizes], pool[sizes, place]) for sizes, place in keys], axis=1)
    scale = float(table.max(axis=0).min()) or 1.0
    chosen, _ = best_shares(table / scale)
    if not chosen:
        chosen = [(int(table.max(axis=0).argmin()), 1.0)]
    total = sum(share for _, share in chosen)
    shares = sorted(((i, share / total) for i, share in chosen), key=lambda item: -item[1])
    us = float((table[:, [i for i, _ in shares]] @ [share for _, share in shares]).max(initial=0.0))
    return [(keys[i], share) for i, share in shares], us


def _memory(union: Mix, placed: Iterable[tuple[Sequence[int], Placement]]) -> np.ndarray:
    """Bytes on a member of each group when all these plans are resident: (where its kernels are in ``union``, their groups)."""
    on: list[set[int]] = [set() for _ in union.groups]
    for kernels, place in placed:
        for k, g in zip(kernels, place, strict=True):
            on[g].add(k)
    memory = np.zeros(len(on))
    for g, kernels_here in enumerate(on):
        memory[g] = sum(n for _, n, readers, state in union.residents if kernels_here.intersection(readers) or (state and g == 0))
        memory[g] += union.activation_bytes if kernels_here or g == 0 else 0
    return memory
