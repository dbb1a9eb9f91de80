"""Kernel graphs for tests: lowered from small functions, and made by hand where a planner's test needs exact numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import networkx as nx
from torch.fx.experimental.proxy_tensor import make_fx

from tessera_compile.passes import depend, lower
from tessera_compile.passes.cluster import Cluster, Device, Link
from tessera_compile.passes.ir import Kernel, KernelGraph, Value


def lowered(function: Callable[..., Any], args: Sequence[Any], static: Sequence[int] = ()) -> KernelGraph:
    """``function`` traced to ATen and lowered."""
    return lower(make_fx(function)(*args), args, static_inputs=static)


def cpus(count: int, *, memory: int = 1 << 40, gb_per_s: float = 1.0, latency_us: float = 1.0) -> Cluster:
    """``count`` devices named d0, d1, … with equal links."""
    devices = tuple(Device(f"d{i}", "cpu", "cpu", memory, 0.05, 8.0) for i in range(count))
    link = Link(gb_per_s, latency_us)
    return Cluster(devices, {(a.name, b.name): link for a in devices for b in devices if a is not b})


def synthetic(
    edges: Sequence[tuple[int, int]],
    count: int,
    *,
    nbytes: Sequence[int] | None = None,
    weights: dict[str, tuple[int, Sequence[int]]] | None = None,
    reads_input: Sequence[int] = (0,),
    outputs: Sequence[int] | None = None,
    writes_state: dict[int, Sequence[int]] | None = None,
    effects: Sequence[int] = (),
) -> nx.DiGraph:
    """A dependence graph of kernels k0 … k(count−1), without FX graph, for planners and schedulers.

    Kernel i makes value v_i of ``nbytes[i]`` bytes (default 1000). Edge (i, j), i < j: kernel j reads v_i. ``weights``: name →
    (bytes, readers). ``reads_input``: kernels that read the graph input x (1000 bytes). ``outputs``: kernels whose values are
    returned (default: those that nobody reads). ``writes_state``: writer → readers of its state s_i (500 bytes).
    """
    sizes = list(nbytes or [1000] * count)
    writes_state = writes_state or {}
    read = {i: [a for a, b in edges if b == i] for i in range(count)}
    used = {a for a, _ in edges}
    returned = list(outputs) if outputs is not None else [i for i in range(count) if i not in used]

    def value(name: str, size: int, origin: Any, storage: str | None = None) -> Value:
        return Value(name, (size,), (1,), "uint8", "cpu", size, origin, storage or name)

    values = {"x": value("x", 1000, "input")}
    for name, (size, _) in (weights or {}).items():
        values[name] = value(name, size, "weight")
    for i in writes_state:
        values[f"s{i}"] = value(f"s{i}", 500, "state")
    kernels = []
    for i in range(count):
        inputs = [f"v{a}" for a in read[i]]
        inputs += ["x"] if i in reads_input else []
        inputs += [name for name, (_, readers) in (weights or {}).items() if i in readers]
        inputs += [f"s{w}" for w, readers in writes_state.items() if i in readers or i == w]
        made = [f"v{i}"]
        values[f"v{i}"] = value(f"v{i}", sizes[i], "activation")
        written: tuple[str, ...] = ()
        if i in writes_state:
            values[f"c{i}"] = value(f"c{i}", 500, "state", f"s{i}")
            made.append(f"c{i}")
            written = (f"s{i}",)
        kernels.append(
            Kernel(
                f"k{i}",
                (f"n{i}",),
                tuple(inputs),
                tuple(made),
                written,
                "pointwise",
                1,
                1,
                1,
                f"layer{i}",
                "",
                f"f{i}",
                i in effects,
            )
        )
    state = [f"s{i}" for i in writes_state]
    graph = KernelGraph(
        tuple(kernels),
        values,
        ("x", *(weights or {}), *state),
        tuple(f"v{i}" for i in returned),
        tuple(f"v{i}" for i in returned),
        {f"s{i}": f"c{i}" for i in writes_state},
        tuple(f"v{i}" for i in returned),
        count,
        0,
    )
    return depend(graph)
