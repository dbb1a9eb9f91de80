"""Plans of a mix that cross less often than the best one: for when few requests are in flight.

What a plan promises is of lanes that always have something to do. A request that crosses waits at every crossing for what the
other lane has begun, and while it waits it feeds nobody: with few in flight the lanes of a plan with hundreds of crossings run
dry. A plan that is made as if each move took longer crosses only where it gains more than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from .mix import Mix, memory_binds, resources, worth
from .mix_plan import MixPlan
from .mixture import best_mixture, best_shares, in_turn, loads_by_name, named, whole_shares

#: µs that a move is taken to take longer.
PRICES_US = (100.0, 300.0, 1000.0, 3000.0)


def plans_by_crossings(
    mix: Mix, best: MixPlan, *, prices_us: Sequence[float] = PRICES_US, time_limit: float = 10.0, gap: float = 5e-3
) -> list[MixPlan]:
    """``best``, a plan of ``mix``, and plans that cross less and less, with what they are worth in ``mix`` as it is.

    Args:
        time_limit: seconds for each; gap: as of ``best_mixture``.

    Of the others ``bound_us`` is that of ``best``, which no plan goes below. Where memory cannot hold all weights on every device
    there are no others.
    """
    found = [best]
    if memory_binds(mix):
        return found
    for price in prices_us:
        links = {pair: (per_byte, latency + price) for pair, (per_byte, latency) in mix.links.items()}
        plan = best_mixture(replace(mix, links=links), time_limit=time_limit, gap=gap)
        found += [_worth(mix, plan, best, [p.placement for p in plan.plans]), _worth(mix, plan, best, [plan.single.placement])]
    return found


def _worth(mix: Mix, plan: MixPlan, best: MixPlan, placements: Sequence[Mapping[str, str]]) -> MixPlan:
    """The best mixture of ``placements`` in ``mix``, its ``single`` being that of ``plan``."""
    names = [g.name for g in mix.groups]
    places = [tuple(names.index(p[k]) for k in mix.kernels) for p in placements]
    worths = [worth(mix, place) for place in places]
    table = np.stack([resources(mix, of) for of in worths], axis=1)
    chosen, _ = best_shares(table / (float(table.max()) or 1.0))
    chosen = sorted(chosen or [(int(table.max(axis=0).argmin()), 1.0)], key=lambda item: -item[1])
    total = sum(share for _, share in chosen)
    used, shares = [i for i, _ in chosen], [share / total for _, share in chosen]
    whole = whole_shares(mix, [worths[i] for i in used], shares)
    one = tuple(names.index(plan.single.placement[k]) for k in mix.kernels)
    single = named(mix, one, 1.0, worth(mix, one))
    # Everything fits on every device: what a plan holds is no more than what all hold together.
    memory = np.max([of.memory for of in worths], axis=0)
    return replace(
        best,
        plans=tuple(named(mix, places[i], share, worths[i]) for i, share in zip(used, shares, strict=True)),
        whole=whole,
        whole_us=in_turn(mix, [worths[i] for i in used], whole),
        single=single,
        single_us=single.bottleneck_us,
        bottleneck_us=float((table[:, used] @ shares).max(initial=0.0)),
        loads=loads_by_name(mix, [(worths[i], share) for i, share in zip(used, shares, strict=True)], memory),
        status="heuristic",
    )
