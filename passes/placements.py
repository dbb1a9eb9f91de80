"""Placements that need no solver: the best one device, and two so that anyone can test that every placement is correct."""

from __future__ import annotations

import random

import networkx as nx
import numpy as np

from .cluster import Cluster
from .errors import PlanError
from .ir import KernelGraph, Profile
from .problem import evaluate, make_problem


def place(planner: str, ddg: nx.DiGraph, profile: Profile, cluster: Cluster, *, seed: int = 0) -> dict[str, str]:
    """Kernel → device.

    Args:
        planner: ``single``: of the devices that hold the graph, the one with the least makespan. ``alternate``: round
            robin over the devices in the lowered order. ``random`` or ``random:SEED``: uniform, the same
            for the same seed and graph.

    Raises:
        PlanError: no such planner; for ``single``, no device that can run every kernel.
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
    if planner == "alternate":
        return {k: cluster.names[i % len(cluster.names)] for i, k in enumerate(names)}
    kind, _, text = planner.partition(":")
    if kind == "random" and (not text or (text.isascii() and text.isdigit())):
        generator = random.Random(int(text) if text else seed)
        return {k: generator.choice(cluster.names) for k in names}
    raise PlanError(f"no planner {planner!r}; known: single, alternate, random:SEED")
