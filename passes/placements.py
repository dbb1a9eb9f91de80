"""Placements that need no solver: simple plans that people use, and two so that anyone can test that every placement is
correct."""

from __future__ import annotations

import random

import networkx as nx
import numpy as np

from .baselines import simple_plans
from .cluster import Cluster
from .errors import PlanError
from .ir import KernelGraph, Profile
from .mix import fits, mix_of_graphs, resources, worth
from .problem import evaluate, make_problem


def place(planner: str, ddg: nx.DiGraph, profile: Profile, cluster: Cluster, *, seed: int = 0) -> dict[str, str]:
    """Kernel → device.

    Args:
        planner: ``single``: of the devices that hold the graph, the one with the least makespan. ``layers`` and
            ``attention-ffn``: the best split by layers, or with attention on one device and feed-forward on another, as in
            ``baselines.py``, by bottleneck. ``alternate``: round robin over the devices in the lowered order. ``random`` or
            ``random:SEED``: uniform, the same for the same seed and graph.

    Raises:
        PlanError: no such planner; for ``single``, no device that can run every kernel; for ``layers`` and ``attention-ffn``,
        modules
            without layer numbers or without both kinds of block, or no split of the kind that fits.
    """
    graph: KernelGraph = ddg.graph["kernels"]
    names = [k.name for k in graph.kernels]
    if planner == "single":
        problem = make_problem(ddg, profile, cluster)
        able = [g for g in range(len(cluster.names)) if np.isfinite(problem.times[:, g]).all()]
        if not able:
            raise PlanError("no one device can run every kernel; use another planner")
        alone = {g: evaluate(problem, [g] * len(names)) for g in able}
        best = min(able, key=lambda g: (not alone[g].fits(cluster), alone[g].makespan_us))
        return dict.fromkeys(names, cluster.names[best])
    if planner in ("layers", "attention-ffn"):
        return _split(planner, ddg, profile, cluster)
    if planner == "alternate":
        return {k: cluster.names[i % len(cluster.names)] for i, k in enumerate(names)}
    kind, _, text = planner.partition(":")
    if kind == "random" and (not text or (text.isascii() and text.isdigit())):
        generator = random.Random(int(text) if text else seed)
        return {k: generator.choice(cluster.names) for k in names}
    raise PlanError(f"no planner {planner!r}; known: single, layers, attention-ffn, alternate, random:SEED")


def _split(planner: str, ddg: nx.DiGraph, profile: Profile, cluster: Cluster) -> dict[str, str]:
    mix = mix_of_graphs([(ddg, profile, 1.0)], cluster, alike=False)
    candidates = [(p, worth(mix, p)) for p in simple_plans(mix).kinds.get(planner, ())]
    possible = [(float(resources(mix, of).max()), p) for p, of in candidates if fits(mix, of)]
    if not possible:
        needs = "modules with two layers or more" if planner == "layers" else "modules named for attention and for feed-forward"
        raise PlanError(f"planner {planner!r} needs {needs}, two devices, and a split that fits into memory")
    best = min(possible)[1]
    return {k.name: mix.groups[g].name for k, g in zip(ddg.graph["kernels"].kernels, best, strict=True)}
