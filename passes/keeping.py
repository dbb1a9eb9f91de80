"""Which overwritten inputs of a graph a lane can keep for itself: neither copied there before a call nor brought home after it.

The lane is that of the kernel which writes the input. A kernel elsewhere that reads the content from before the call is sent
it; what is read of the new content inside the graph is a value of its own in the lowered graph, and crosses as any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .ir import KernelGraph


def keep(graph: KernelGraph, names: Iterable[str]) -> KernelGraph:
    """``graph`` with those of the inputs ``names`` kept that can be: one kernel writes them, nothing returned is made of them or
    is a view of them, and nobody reads their new version by its own name. The others stay state of the home lane."""
    writers = [v for kernel in graph.kernels for v in kernel.writes]
    returned = {*graph.output_values, *graph.output_storages}

    def keepable(name: str) -> bool:
        final = graph.mutated.get(name)
        if final is None or final not in graph.values:
            return False
        own = graph.values[final].storage == name and graph.values[name].device != "host"
        return own and writers.count(name) == 1 and not returned & {name, final} and not graph.readers(final)

    return replace(graph, kept=tuple(name for name in names if keepable(name)))
