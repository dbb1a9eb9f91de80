"""Joint planning of several dependence graphs, and the choice of batch sizes: the public entry to ``mixture.py``."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
import numpy as np

from .batching import mix_batches
from .cluster import Cluster
from .errors import InfeasibleError, PlanError
from .ir import Profile
from .mix import Mix, apart, group_devices, memory_binds, mix_of_graphs
from .mix_plan import MixPlan, recommend
from .mixture import best_mixture
from .partitioning import matching
from .relaxation import relax_together


@dataclass(frozen=True)
class Batches:
    """A phase that may run at several batch sizes: ``options[b]`` is the graph (and profile) that serves b requests at once."""

    options: Mapping[int, tuple[nx.DiGraph, Profile]]

    def __post_init__(self) -> None:
        if not self.options or any(b < 1 for b in self.options):
            raise PlanError(f"batch sizes {sorted(self.options)}: at least one, and none below 1")


def plan_mix(
    parts: Sequence[tuple[nx.DiGraph | Batches, float]],
    cluster: Cluster,
    *,
    profiles: Sequence[Profile] | None = None,
    pins: Mapping[str, str] | None = None,
    overlap: bool = True,
    inflight: int = 1,
    state: str = "moves",
    alike: bool = True,
    time_limit: float = 60.0,
    gap: float = 5e-3,
) -> MixPlan:
    """Plan graphs together that run on one cluster, ``weight`` times each in one mix: prefill and decode of a model, say.

    Args:
        parts: (dependence graph, weight) pairs. For a phase given as :class:`Batches` the weight is for one request, and the
            plan chooses the batch: it is used weight / b times. ``ddg.graph["name"]`` names a graph in the result.
        profiles: one for each part that is a plain graph, in order; by default ``ddg.graph["profile"]``.
        pins: glob over kernel names or module paths → device or group of identical devices.
        inflight: requests whose activations are in memory at once.
        state: ``"moves"``: mutable state stays where it is used; what is written of it moves to other kernels that touch it,
            from earlier graphs to later ones at the phase boundary; ``"home"``: it is fetched from home and brought back in every
            use, as plain calls do. See ``mix.py: mix_of_graphs`` for how graphs say which state they share.
        alike: identical devices form one group, whose members serve different requests; False plans each for alone, as plain
            calls need it, whose requests come one after the other.
        gap: relative gap to the certified bound at which to stop.

    Identical devices form one group whose members serve different requests; where memory forbids that, each is planned for alone.

    With several batch sizes ``bound_us`` holds for mixtures in which each request may be served at another size, of those for
    which a plan fits; it relaxes memory (``relaxation.py: relax_together``). The plan is such a mixture where that is better and
    memory holds the weights of all sizes on every device (``batching.py``), else it has one size a phase.

    Raises:
        InfeasibleError: no plan fits into memory, for no batch size; it names what is biggest.
        PlanError, ProfileError: bad weights, missing or impossible times, cyclic graphs, pins that match nothing.
    """
    if state not in ("moves", "home"):
        raise PlanError(f"state {state!r} is neither 'moves' nor 'home'")
    if not (isinstance(time_limit, int | float) and time_limit >= 0):
        raise PlanError(f"time_limit {time_limit!r} must be seconds, 0 or more")
    plain = sum(not isinstance(part, Batches) for part, _ in parts)
    if profiles is not None and len(profiles) != plain:
        raise PlanError(f"{len(profiles)} profiles for {plain} plain graphs: give one for each, in order")
    given = iter(profiles or ())
    phases: list[dict[int, tuple[nx.DiGraph, Profile]]] = []
    for part, weight in parts:
        if not 0 < weight < math.inf:
            raise PlanError(f"weight {weight} of a mix must be a positive number")
        if isinstance(part, Batches):
            phases.append(dict(part.options))
            continue
        profile = next(given, None) or part.graph.get("profile")
        if profile is None:
            raise PlanError('a graph of the mix has no profile: pass profiles=, or set ddg.graph["profile"]')
        phases.append({1: (part, profile)})
    started = time.perf_counter()
    refused: InfeasibleError | None = None
    choices = list(itertools.product(*(sorted(options) for options in phases)))
    mixes: dict[tuple[int, ...], Mix] = {}
    plans: dict[tuple[int, ...], MixPlan] = {}

    def left(shares: int) -> float:
        return max(0.0, time_limit - (time.perf_counter() - started)) / shares

    def mix_of(chosen: Sequence[tuple[nx.DiGraph, Profile, float]]) -> Mix:
        return _mix(chosen, cluster, pins or {}, overlap, inflight, state == "moves", alike)

    for number, sizes in enumerate(choices):
        mix = mix_of([(*options[b], weight / b) for options, b, (_, weight) in zip(phases, sizes, parts, strict=True)])
        try:
            plan = _plan(mix, left(len(choices) - number + (len(choices) > 1)), gap)
        except InfeasibleError as error:
            refused = error
            continue
        each = tuple(replace(p, batches=sizes) for p in plan.plans)
        mixes[sizes], plans[sizes] = mix, replace(plan, plans=each, single=replace(plan.single, batches=sizes), batches=sizes)
    if not plans:
        assert refused is not None
        raise refused
    best = min(plans.values(), key=lambda plan: plan.bottleneck_us)
    best = replace(best, **_proven(best, min(plan.bound_us for plan in plans.values()), gap))
    if len(plans) > 1:
        bound, fractions = 0.0, list[np.ndarray | None]()
        if time_limit > 0 and best.bottleneck_us > 0:
            bound, fractions = relax_together(list(mixes.values()), best.bottleneck_us, left(1))
        if not bound:
            what = "one batch size a phase; requests split over several are not bounded"
            best = replace(best, status=f"{best.status} ({what})")
        elif best.bottleneck_us - bound <= max(gap, 1e-9) * best.bottleneck_us:
            best = replace(best, **_proven(best, bound, gap))
        else:
            every = [(*options[b], 1.0) for options in phases for b in sorted(options)]
            best = mix_batches(mixes, plans, fractions, mix_of(every), {sizes: _positions(phases, sizes) for sizes in plans})
            best = replace(best, bound_us=min(bound, best.bottleneck_us))
            close = best.bottleneck_us - bound <= max(gap, 1e-9) * best.bottleneck_us
            best = replace(best, status="optimal within the gap" if close else "heuristic")
    return replace(best, seconds=time.perf_counter() - started)


def _positions(phases: Sequence[Mapping[int, tuple[nx.DiGraph, Profile]]], sizes: Sequence[int]) -> list[int]:
    """Where the kernels of a mix at these batch sizes are in the mix of the graphs of all sizes, phase by phase."""
    found: list[int] = []
    start = 0
    for options, chosen in zip(phases, sizes, strict=True):
        for b in sorted(options):
            count = len(options[b][0].graph["kernels"].kernels)
            if b == chosen:
                found += range(start, start + count)
            start += count
    return found


def _proven(plan: MixPlan, bound: float, gap: float) -> dict[str, Any]:
    """The plan's bound and status where other choices were bounded too: all that could have been chosen."""
    bound = min(bound, plan.bound_us)
    close = plan.bottleneck_us - bound <= max(gap, 1e-9) * plan.bottleneck_us
    return {"bound_us": bound, "status": plan.status if close or not plan.status.startswith("optimal") else "heuristic"}


def _mix(
    parts: Sequence[tuple[nx.DiGraph, Profile, float]],
    cluster: Cluster,
    pins: Mapping[str, str],
    overlap: bool,
    inflight: int,
    state_moves: bool,
    alike: bool,
) -> Mix:
    shared = {m for g in group_devices(cluster) if g.size > 1 for m in g.members}
    # A pin to one of several identical devices sets it apart from them.
    alike = alike and not any(device in shared for device in pins.values())
    made = mix_of_graphs(parts, cluster, overlap=overlap, inflight=inflight, alike=alike, state_moves=state_moves)
    return pin(made, parts, pins, cluster)


def _plan(mix: Mix, time_limit: float, gap: float) -> MixPlan:
    """The best mixture where the members of a group serve different requests, or, where memory binds and it is better, where they
    share the weights of one request, each a group of its own. Compared with the simple plans of both."""
    if all(g.size == 1 for g in mix.groups) or not memory_binds(mix):
        return best_mixture(mix, time_limit=time_limit, gap=gap)
    started = time.perf_counter()
    try:
        grouped = best_mixture(mix, time_limit=time_limit / 2, gap=gap)
    except InfeasibleError:
        return best_mixture(apart(mix), time_limit=time_limit, gap=gap)
    try:
        left = max(time_limit / 4, time_limit - (time.perf_counter() - started))
        alone = best_mixture(apart(mix), time_limit=left, gap=gap)
    except InfeasibleError:
        return grouped
    best, other = (alone, grouped) if alone.bottleneck_us < grouped.bottleneck_us else (grouped, alone)
    baselines = dict(grouped.baselines)
    for name, us in alone.baselines.items():
        if not name.startswith("single:"):  # the members of a group alone are all the same
            baselines[name] = min(us, baselines.get(name, us))
    return replace(
        best,
        **_proven(best, other.bound_us, gap),
        baselines=baselines,
        recommendation=recommend(baselines, best.bottleneck_us),
        seconds=time.perf_counter() - started,
    )


def pin(mix: Mix, parts: Sequence[tuple[Any, ...]], pins: Mapping[str, str], cluster: Cluster) -> Mix:
    """The mix with kernels pinned by patterns over their names and module paths, to a device or a group of identical ones."""
    fixed: dict[int, frozenset[int]] = {}
    for pattern, device in pins.items():
        members = next((g.members for g in group_devices(cluster) if device == g.name), (device,))
        found = frozenset(i for i, g in enumerate(mix.groups) if device == g.name or set(members) & set(g.members))
        if not found:
            names = dict.fromkeys([*(g.name for g in mix.groups), *cluster.names])
            raise PlanError(f"pin {pattern!r} names {device!r}, which is not in the cluster ({', '.join(names)})")
        base, hit = 0, 0
        for ddg, *_ in parts:
            graph = ddg.graph["kernels"]
            names_hit = set(matching(graph, pattern))
            for i, kernel in enumerate(graph.kernels):
                if kernel.name in names_hit:
                    hit += 1
                    if fixed.setdefault(base + i, found) != found:
                        raise PlanError(f"kernel {kernel.name!r} is pinned to two devices; drop one pin")
            base += len(graph.kernels)
        if not hit:
            raise PlanError(f"pin {pattern!r} matches no kernel and no module")
    times = mix.times.copy()
    for k, groups in fixed.items():
        if len(groups) > 1:  # The members of a group, each planned for alone.
            times[k, [g for g in range(len(mix.groups)) if g not in groups]] = math.inf
    pinned = replace(mix, times=times, pins={k: next(iter(groups)) for k, groups in fixed.items() if len(groups) == 1})
    pinned.check()
    _ = pinned.allowed
    return pinned
