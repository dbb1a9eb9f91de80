"""What views show of a value: against every element looked at alone, and on graphs whose truth is known."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from tessera_compile.passes import depend, lower, refine
from tessera_compile.passes.extents import box_of, extents
from tessera_compile.passes.parts import parts
from tessera_compile.ptx_tools.footprints import Box, Intervals
from tests.graphs import lowered


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of element numbers, and a view of it made by a few random operations."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    base = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
    if draw(st.booleans()) and base.dim() > 1:
        base = base.transpose(0, 1).contiguous().transpose(0, 1)
    view = base
    for _ in range(draw(st.integers(0, 4))):
        how = draw(st.sampled_from(["slice", "select", "transpose", "unsqueeze", "expand", "flatten", "split"]))
        dim = draw(st.integers(0, max(view.dim() - 1, 0)))
        if how == "unsqueeze":
            view = view.unsqueeze(dim)
        elif not view.dim():
            continue
        elif how == "slice":
            start = draw(st.integers(0, view.shape[dim]))
            view = view[
                (slice(None),) * dim + (slice(start, draw(st.integers(start, view.shape[dim])), draw(st.integers(1, 3))),)
            ]
        elif how == "select" and view.shape[dim]:
            view = view.select(dim, draw(st.integers(0, view.shape[dim] - 1)))
        elif how == "transpose":
            view = view.transpose(dim, draw(st.integers(0, view.dim() - 1)))
        elif how == "expand":
            view = view.expand(2, *view.shape)
        elif how == "flatten" and view.is_contiguous():
            view = view.flatten()
        elif how == "split" and view.shape[dim] > 1:
            view = view.split(2, dim)[1 if view.shape[dim] > 2 else 0]
    return base, view


@settings(max_examples=400, deadline=None)
@given(views())
def test_a_view_is_the_bytes_of_its_elements_or_no_box(pair):
    base, view = pair
    flat = base.as_strided((base.numel(),), (1,))
    at = {int(n): i * 8 for i, n in enumerate(flat.tolist())}  # element number → byte
    truth = Intervals.of((at[int(n)], at[int(n)] + 8) for n in view.flatten().tolist())
    box = box_of(view, base)
    if box is not None:
        assert (box.intervals() if box.nbytes else Intervals.of([])) == truth
        assert box.nbytes == truth.nbytes
    else:
        assert truth.nbytes == 0 or truth.nbytes < view.numel() * 8 or truth.box() is None or len(truth) > 1


def qkv(x, w, a, b):
    q, k, v = (x @ w).chunk(3, -1)
    return q @ a, (k @ b).relu(), v @ a + x


def test_packed_heads():
    graph = lowered(qkv, [torch.randn(6, 4), torch.randn(4, 12), torch.randn(4, 4), torch.randn(4, 4)])
    made = graph.kernels[0].outputs[0]
    found = extents(graph)
    readers = graph.readers(made)
    assert [found.reads[r, made] for r in readers] == [(Box(16 * i, (6, 16), (48, 1)),) for i in range(3)]
    ddg = refine(depend(graph), {}, found)
    for reader in readers:
        (dep,) = [d for d in ddg.edges[graph.kernels[0].name, reader]["deps"] if d.value == made]
        assert (dep.bytes, dep.evidence, dep.boxes) == (96, "extent", found.reads[reader, made])
    assert {p.readers for p in parts(ddg, made)} == {(r,) for r in readers}
    assert [p.bytes for p in parts(ddg, made)] == [96, 96, 96]
    refinement = ddg.graph["refinement"]
    assert refinement.bytes_before - refinement.bytes_after == 3 * 288 - 3 * 96


def test_who_needs_all_of_it_gets_all_of_it():
    def f(x, w):
        y = x @ w
        return (y[:, :2] @ w[:2]).relu(), y.sum(1, keepdim=True) * w

    graph = lowered(f, [torch.randn(4, 4), torch.randn(4, 4)])
    made = graph.kernels[0].outputs[0]
    ddg = refine(depend(graph), {}, extents(graph))
    (part,) = parts(ddg, made)
    assert part.boxes == ()
    assert set(part.readers) == set(graph.readers(made))
    assert part.bytes == 64


def test_what_is_returned_goes_whole():
    def f(x, w):
        y = x @ w
        return y, y[:, :2] @ w[:2]

    graph = lowered(f, [torch.randn(4, 4), torch.randn(4, 4)])
    made = graph.kernels[0].outputs[0]
    ddg = refine(depend(graph), {}, extents(graph))
    assert [p.boxes for p in parts(ddg, made)] == [()]


def test_readers_of_common_bytes_are_served_together():
    def f(x, w):
        y = x @ w  # 4 × 8
        return y[:, :2] @ w[:2], y[:, 1:3] @ w[:2], y[:, 6:] @ w[:2]

    graph = lowered(f, [torch.randn(4, 4), torch.randn(4, 8)])
    made = graph.kernels[0].outputs[0]
    ddg = refine(depend(graph), {}, extents(graph))
    readers = graph.readers(made)
    found = {frozenset(p.readers): p for p in parts(ddg, made)}
    assert set(found) == {frozenset(readers[:2]), frozenset(readers[2:])}
    assert found[frozenset(readers[:2])].boxes == (Box(0, (4, 12), (32, 1)),)
    assert found[frozenset(readers[2:])].bytes == 32


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4), st.integers(1, 2)), min_size=1, max_size=5))
def test_parts_share_no_byte_and_hold_what_their_readers_read(slices):
    slices = [(start, min(8, start + length), step) for start, length, step in slices]

    def f(x, w, *ones):
        y = x @ w
        return [y[:, a:b:s] @ one[: len(range(a, b, s))] for (a, b, s), one in zip(slices, ones, strict=True)]

    graph = lowered(f, [torch.randn(3, 4), torch.randn(4, 8), *(torch.randn(8, 2 + i) for i in range(len(slices)))])
    made = graph.kernels[0].outputs[0]
    ddg = refine(depend(graph), {}, extents(graph))
    found = parts(ddg, made)
    assert sorted(r for p in found for r in p.readers) == sorted(graph.readers(made))
    if found[0].boxes == ():
        assert len(found) == 1
        return
    bytes_of = [Intervals.of(i for b in p.boxes for i in b.intervals()) for p in found]
    assert sum(b.nbytes for b in bytes_of) == sum(p.bytes for p in found) <= graph.values[made].bytes
    assert all(not (a & b) for i, a in enumerate(bytes_of) for b in bytes_of[:i])
    for part, held in zip(found, bytes_of, strict=True):
        assert sum(b.nbytes for b in part.boxes) == part.bytes
        for reader in part.readers:
            (dep,) = [d for d in ddg.edges[graph.kernels[0].name, reader]["deps"] if d.value == made]
            assert Intervals.of(i for b in dep.boxes for i in b.intervals()).issubset(held)


@pytest.mark.parametrize("boxes", [(Box(0, (6, 16), (48, 1)),), (Box(4, (8,), (1,)), Box(64, (2, 3, 4), (96, 32, 1)))])
def test_text_of_parts(boxes):
    from tessera_compile.passes.ir import Program

    text = f"lane 0 a\n  send v[{','.join(t(b) for b in boxes)}] -> 1\nlane 1 b\n  recv v[{','.join(t(b) for b in boxes)}] <- 0\n"
    program = Program.from_text(text)
    assert program.lanes[0].instructions[0].boxes == boxes
    assert program.to_text() == text


def t(box: Box) -> str:
    return "+".join(
        [str(box.start), *(f"{n}x{s}" for n, s in zip(box.shape[:-1], box.strides[:-1], strict=True)), str(box.shape[-1])]
    )


def cached(x, w, cache):
    k = x @ w  # 2 × 4
    cache[:, 3] = k
    scores = cache[:, :4] @ w
    return scores.sum(0)


@pytest.mark.parametrize("static", [[1], []])
def test_a_slot_of_a_cache(static):
    args = [torch.randn(2, 4), torch.randn(4, 4), torch.zeros(2, 8, 4)]
    graph = functional(cached, args, static)
    (version,) = graph.mutated.values()
    found = extents(graph)
    assert found.writes == {version: (Box(3 * 16, (2, 16), (8 * 16, 1)),)}
    ddg = refine(depend(graph), {}, found)
    (part,) = parts(ddg, version)
    assert (part.bytes, part.boxes) == (32, found.writes[version])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["slice", "select", "nested", "all", "diagonal"]), st.integers(0, 3), st.integers(1, 4)),
        max_size=3,
    )
)
def test_what_a_new_version_changes(writes):
    """Against the elements that differ when every written value is new."""

    def f(state):
        for how, start, length in writes:
            if how == "slice":
                state[:, start : start + length].add_(1)
            elif how == "select":
                state[start].add_(1)
            elif how == "nested":
                state[start:][:, :length].add_(1)
            elif how == "diagonal":
                state.diagonal(0, 0, 1).add_(1)
            else:
                state.add_(1)
        return state.sum()

    graph = functional(f, [torch.zeros(4, 6, 2)])
    state = torch.zeros(4, 6, 2)
    f(state)
    changed = state != 0
    truth = Intervals.of((4 * i, 4 * i + 4) for i, c in enumerate(changed.flatten().tolist()) if c)
    found = extents(graph)
    if not graph.mutated:
        return
    (version,) = graph.mutated.values()
    boxes = found.writes.get(version)
    if boxes is not None:
        assert truth.issubset(Intervals.of(i for b in boxes for i in b.intervals()))
    if len(writes) == 1 and writes[0][0] != "all" and truth.nbytes < 4 * 6 * 2 * 4:
        assert boxes is not None
        assert Intervals.of(i for b in boxes for i in b.intervals()) == truth


def functional(f, args, static=()):
    """Traced as the compiler's graphs are: functional, copies into inputs last."""
    return lower(make_fx(torch.func.functionalize(f))(*args), args, static_inputs=static)
