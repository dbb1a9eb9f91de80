"""Placements that need no solver: the best one device, and two so that anyone can test that every placement is correct."""

from __future__ import annotations

import random

import networkx as nx

from .cluster import Cluster
from .errors import PlanError
from .ir import KernelGraph, Profile


def place(planner: str, ddg: nx.DiGraph, profile: Profile, cluster: Cluster, *, seed: int = 0) -> dict[str, str]:
    """Kernel → device.

    Args:
        planner: ``single``: the device whose sum of kernel times is least. ``alternate``: round robin over the devices in the
            lowered order. ``random`` or ``random:SEED``: uniform, the same for the same seed and graph.

    Raises:
        PlanError: no such planner.
    """
    graph: KernelGraph = ddg.graph["kernels"]
    names = [k.name for k in graph.kernels]
    if planner == "single":
        best = min(cluster.names, key=lambda d: sum(profile.us(k, d) for k in names))
        return dict.fromkeys(names, best)
    if planner == "alternate":
        return {k: cluster.names[i % len(cluster.names)] for i, k in enumerate(names)}
    kind, _, text = planner.partition(":")
    if kind == "random":
        generator = random.Random(int(text) if text else seed)
        return {k: generator.choice(cluster.names) for k in names}
    raise PlanError(f"no planner {planner!r}; known: single, alternate, random:SEED")
