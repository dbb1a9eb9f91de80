""":class:`KernelGraph` → the data-dependence graph, from what the operators' schemas say.

Nodes are kernel names with ``kernel=``; the graph carries its :class:`KernelGraph` as ``ddg.graph["kernels"]``. An edge
(a, b) says that a comes before b, and why: ``deps`` holds every :class:`Dependence`, ``kind``/``value``/``evidence`` those of
the strongest one, ``bytes`` the sum over distinct values, which is what crosses if a and b are on different devices.

- raw: b reads what a made.
- war: a reads the old content of a graph input that b overwrites. Nothing crosses.
- waw: a and b overwrite the same graph input.
- effect: a and b print or draw from a generator; they keep their order.
"""

from __future__ import annotations

import networkx as nx

from .hidden_writes import declared_contents
from .ir import Dependence, KernelGraph

STRENGTH = {"raw": 0, "waw": 1, "war": 2, "effect": 3}


def depend(kernels: KernelGraph) -> nx.DiGraph:
    """Builds the data-dependence graph of ``kernels``; always acyclic, since kernels are in a valid order."""
    ddg = nx.DiGraph(kernels=kernels)
    seen = declared_contents(kernels.module) if kernels.module is not None else ()
    for kernel in kernels.kernels:
        ddg.add_node(kernel.name, kernel=kernel)
    last_effect: str | None = None
    last_writer: dict[str, str] = {}
    for kernel in kernels.kernels:
        for value in kernel.inputs:
            producer = kernels.producer(value)
            how = "probe" if value in seen else "schema"
            if producer is not None:
                _add(ddg, producer, kernel.name, Dependence("raw", value, kernels.values[value].bytes, how))
        for value in kernel.writes:
            for reader in kernels.readers(value):
                if reader != kernel.name and value not in kernels[reader].writes:
                    _add(ddg, reader, kernel.name, Dependence("war", value, 0, "schema"))
            if value in last_writer:
                _add(ddg, last_writer[value], kernel.name, Dependence("waw", value, 0, "schema"))
            last_writer[value] = kernel.name
        if kernel.effect:
            if last_effect is not None:
                _add(ddg, last_effect, kernel.name, Dependence("effect", kernel.name, 0, "schema"))
            last_effect = kernel.name
    return ddg


def _add(ddg: nx.DiGraph, before: str, after: str, dependence: Dependence) -> None:
    deps: tuple[Dependence, ...] = ddg.edges[before, after]["deps"] if ddg.has_edge(before, after) else ()
    if dependence not in deps:
        add_edge(ddg, before, after, tuple(sorted((*deps, dependence), key=lambda d: STRENGTH[d.kind])))


def add_edge(ddg: nx.DiGraph, before: str, after: str, deps: tuple[Dependence, ...]) -> None:
    """Sets the edge (before, after) to ``deps``, strongest first, with the attributes that the top of this file describes."""
    crossing = {d.value: d.bytes for d in deps if d.kind == "raw"}
    first = deps[0]
    ddg.add_edge(
        before, after, kind=first.kind, value=first.value, evidence=first.evidence, bytes=sum(crossing.values()), deps=deps
    )
