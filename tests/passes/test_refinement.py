"""Dependences by bytes: against every byte looked at alone, and on graphs whose truth is known."""

from __future__ import annotations

import warnings

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from tessera_compile.passes import depend, lower, refine
from tessera_compile.passes import refinement as module
from tessera_compile.passes.errors import ProfileError, TesseraWarning
from tessera_compile.passes.ir import Kernel, KernelGraph, Value
from tessera_compile.ptx_tools import Buffer
from tessera_compile.ptx_tools import footprint as interpret
from tessera_compile.ptx_tools.footprints import BufferFootprint, Footprint, Intervals
from tests.ptx_tools.launching import triton_module

NONE = Intervals.of([])


def touches(reads: dict[str, list] | None = None, writes: dict[str, list] | None = None, size: int = 8, **more) -> Footprint:
    reads, writes = reads or {}, writes or {}
    buffers = tuple(
        BufferFootprint(name, 0, size, Intervals.of(reads.get(name, [])), Intervals.of(writes.get(name, [])))
        for name in dict.fromkeys([*reads, *writes])
    )
    return Footprint("k", buffers, more.pop("outside", NONE), NONE, **more)


def kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], writes: tuple[str, ...] = (), **more) -> Kernel:
    return Kernel(name, (f"n_{name}",), inputs, outputs, writes, "op", 0, 0, 0, "", "", f"f_{name}", **more)


def graph_of(kernels: list[Kernel], size: int, versions: dict[str, str], inputs: list[str]) -> KernelGraph:
    """versions: new version of an input → the input."""
    names = dict.fromkeys([*inputs, *(v for k in kernels for v in k.outputs)])
    values = {
        n: Value(n, (size,), (1,), "uint8", "cpu", size, "state" if n in inputs else "activation", versions.get(n, n))
        for n in names
    }
    final = {storage: version for version, storage in versions.items()}
    return KernelGraph(tuple(kernels), values, tuple(inputs), (), (), final, (), len(kernels), 0)


def edges(ddg: nx.DiGraph) -> dict[tuple[str, str, str], int]:
    found: dict[tuple[str, str, str], int] = {}
    for a, b, data in ddg.edges(data=True):
        for d in data["deps"]:
            found[a, b, d.kind] = found.get((a, b, d.kind), 0) + d.bytes
    return found


SIZE = 6
SETS = st.sets(st.integers(0, SIZE - 1), max_size=SIZE).map(lambda s: [(i, i + 1) for i in s])


@st.composite
def programs(draw):
    """Kernels that read values and make new ones or new versions of two inputs; some have footprints, some touch more than they
    declare."""
    current = {"s": "s", "t": "t"}
    kernels, versions, footprints = [], {}, {}
    for i in range(draw(st.integers(2, 7))):
        reads = sorted(draw(st.sets(st.sampled_from(sorted(current)), max_size=2)))
        target = draw(st.sampled_from(["s", "t", ""]))
        output = f"v{i}"
        if target:
            versions[output] = target
        inputs = tuple(dict.fromkeys([*(current[r] for r in reads), *([current[target]] if target else [])]))
        kernels.append(kernel(f"k{i}", inputs, (output,), (target,) if target else ()))
        if draw(st.booleans()):
            named = draw(st.sets(st.sampled_from([*inputs, output, "s"]), min_size=1))
            footprints[f"k{i}"] = touches({n: draw(SETS) for n in named}, {n: draw(SETS) for n in named}, SIZE)
        current[target or output] = output
    return graph_of(kernels, SIZE, versions, ["s", "t"]), footprints


def truth(graph: KernelGraph, footprints: dict[str, Footprint]) -> dict[tuple[str, str, str], int]:
    """Byte by byte: who wrote it last before a read, and so on."""
    storages = sorted({v.storage for v in graph.values.values()})
    done: dict[tuple[str, int], list[tuple[str, bool, bool]]] = {}  # (storage, byte) → (kernel, reads, writes), in order
    known = set()
    for k in graph.kernels:
        told: dict[str, tuple[set[int], set[int]]] = {}
        for b in footprints[k.name].buffers if k.name in footprints else ():
            reads, writes = told.setdefault(graph.values[b.name].storage, (set(), set()))
            reads |= {i for lo, hi in b.reads for i in range(lo, hi)}
            writes |= {i for lo, hi in b.writes for i in range(lo, hi)}
        known |= set(told)
        for storage in storages:
            declared = [any(graph.values[v].storage == storage for v in vs) for vs in (k.inputs, k.outputs)]
            for i in range(SIZE):
                r, w = (i in told[storage][0], i in told[storage][1]) if storage in told else declared
                if r or w:
                    done.setdefault((storage, i), []).append((k.name, r, w))
    found: dict[tuple[str, str, str], int] = {}
    for (storage, _), accesses in done.items():
        if storage not in known:
            continue
        for at, (b, r, w) in enumerate(accesses):
            for a, ra, wa in reversed(accesses[:at]):
                for kind, holds, count in (("raw", wa and r, 1), ("waw", wa and w, 0), ("war", ra and w, 0)):
                    if holds:
                        found[a, b, kind] = found.get((a, b, kind), 0) + count
                if wa:
                    break
    for a, b, data in depend(graph).edges(data=True):
        for d in data["deps"]:
            if graph.values[d.value].storage not in known:
                found[a, b, d.kind] = found.get((a, b, d.kind), 0) + d.bytes
    return found


@settings(max_examples=300, deadline=None)
@given(programs())
def test_every_dependence_is_that_of_some_byte(program):
    graph, footprints = program
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TesseraWarning)
        refined = refine(depend(graph), footprints)
    assert edges(refined) == truth(graph, footprints)
    assert nx.is_directed_acyclic_graph(refined)
    assert list(refined) == [k.name for k in graph.kernels]


def test_without_footprints_nothing_changes():
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    ddg = depend(lower(make_fx(lambda x, w: torch.relu(x @ w) @ w + x)(x, w), [x, w]))
    refined = refine(ddg, {})
    assert nx.utils.graphs_equal(nx.DiGraph(ddg.edges), nx.DiGraph(refined.edges))
    assert edges(refined) == edges(ddg)
    report = refined.graph["refinement"]
    assert (report.removed, report.added) == ((), ())
    assert report.bytes_before == report.bytes_after > 0


def test_packed_projections_cross_in_thirds():
    x, w, v = torch.randn(4, 16), torch.randn(16, 48), torch.randn(16, 16)

    def packed(x, w, v):
        q, k, _ = (x @ w).split(16, 1)
        return q @ v, k @ v

    graph = lower(make_fx(packed)(x, w, v), [x, w, v], static_inputs=[1, 2])
    ddg = depend(graph)
    first, *others = [k.name for k in graph.kernels]
    assert [ddg.edges[first, o]["bytes"] for o in others] == [4 * 48 * 4] * 2
    (value,) = graph[first].outputs
    slices = [[(row * 192 + 64 * part, row * 192 + 64 * part + 64) for row in range(4)] for part in range(2)]
    refined = refine(ddg, {o: touches({value: part}, size=768) for o, part in zip(others, slices, strict=True)})
    assert [refined.edges[first, o]["bytes"] for o in others] == [4 * 16 * 4] * 2
    assert refined.edges[first, others[0]]["evidence"] == "footprint"
    report = refined.graph["refinement"]
    assert (report.bytes_before, report.bytes_after) == (1536, 512)
    assert "1536 -> 512 B" in report.to_text()


def test_three_triton_kernels_share_a_workspace():
    """Each writes a part of one buffer; a fourth reads the second part. Footprints are interpreted, with no GPU."""
    add = triton_module("add.sm_90")
    base, part = 1 << 32, 4096
    workspace = [Buffer(base + i * part, part) for i in range(3)]

    def writes_part(i: int) -> Footprint:
        args = [Buffer(base + (1 << 20), part), Buffer(base + (2 << 20), part), workspace[i], part // 4]
        found = interpret(add, None, 1, 128, args)
        out = found.buffers[2]
        assert found.complete
        assert out.writes == Intervals.of([(0, part)])
        return touches({"x": list(found.buffers[0].reads)}, {"w": list(out.writes.shift(i * part))}, 3 * part)

    kernels = [kernel(f"k{i}", ("x", "w" if i == 0 else f"w{i - 1}"), (f"w{i}",), ("w",)) for i in range(3)]
    kernels.append(kernel("reader", ("w2",), ("y",)))
    graph = graph_of(kernels, 3 * part, {f"w{i}": "w" for i in range(3)}, ["x", "w"])
    ddg = depend(graph)
    assert nx.has_path(ddg, "k0", "k2")
    footprints = {f"k{i}": writes_part(i) for i in range(3)}
    footprints["reader"] = touches({"w": [(part, 2 * part)]}, size=3 * part)
    refined = refine(ddg, footprints)
    assert edges(refined) == {("k1", "reader", "raw"): part}
    assert {(a, b) for a, b, _ in refined.graph["refinement"].removed} >= {("k0", "k1"), ("k1", "k2"), ("k2", "reader")}


def lying() -> KernelGraph:
    readers = [kernel(name, ("v",), (f"{name}_out",)) for name in ("before", "op", "after")]
    return graph_of([kernel("make", (), ("v",)), *readers], 8, {}, [])


@pytest.mark.parametrize("more", [{}, {"guards": ("v",)}, {"outside": Intervals.of([(0, 4)])}])
def test_an_undeclared_write_is_a_write_and_is_told_once(monkeypatch, more):
    monkeypatch.setattr(module, "_warned", set())
    graph = lying()
    ddg = depend(graph)
    assert not ddg.has_edge("op", "after")
    told = {"op": touches({"v": [(0, 8)]}, {"v": [(0, 4)]}, **more)}
    with pytest.warns(TesseraWarning, match=r"kernel op \(n_op\) writes v, which its schema does not declare"):
        refined = refine(ddg, told)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refine(ddg, told)
    assert refined.edges["op", "after"]["kind"] == "raw"
    assert refined.edges["before", "op"]["kind"] == "war"
    # what the schema-only reader takes comes from both writers: from the lying one what it wrote, where that is known
    assert edges(refined)["op", "after", "raw"] == (4 if not more else 8)
    assert edges(refined)["make", "after", "raw"] == (8 if more else 8 - 4)


@pytest.mark.parametrize(
    "change",
    [
        {"footprint": {"guards": ("v",)}},
        {"footprint": {"outside": Intervals.of([(64, 68)])}},
        {"kernel": {"data_dependent": True}},
        {"shape": ("s0",)},
    ],
)
def test_what_need_not_hold_for_every_run_removes_nothing(change):
    graph = graph_of([kernel("a", (), ("v",)), kernel("b", ("v",), ("y",), **change.get("kernel", {}))], 8, {}, [])
    if "shape" in change:
        values = {n: Value(n, change["shape"], (1,), "uint8", "cpu", 8, "activation", n) for n in graph.values}
        graph = KernelGraph(graph.kernels, values, (), (), (), {}, (), 2, 0)
    refined = refine(depend(graph), {"b": touches({"v": []}, **change.get("footprint", {}))})
    assert edges(refined) == {("a", "b", "raw"): 8}
    assert edges(refine(depend(lying()), {"after": touches({"v": []})})).keys() == {
        ("make", "before", "raw"),
        ("make", "op", "raw"),
    }


def test_effects_keep_their_order():
    graph = graph_of([kernel("a", (), ("v",), effect=True), kernel("b", ("v",), ("y",), effect=True)], 8, {}, [])
    refined = refine(depend(graph), {"b": touches({"v": []})})
    assert edges(refined) == {("a", "b", "effect"): 0}


def test_names_that_are_not_of_the_graph():
    ddg = depend(lying())
    with pytest.raises(ProfileError, match="'nobody', which is no kernel"):
        refine(ddg, {"nobody": touches({"v": []})})
    with pytest.raises(ProfileError, match="names 'a_ptr', which is no value"):
        refine(ddg, {"op": touches({"a_ptr": []})})
    renamed = touches({"a_ptr": []}, guards=("a_ptr",)).renamed({"a_ptr": "v"})
    assert ([b.name for b in renamed.buffers], renamed.guards) == (["v"], ("v",))
