"""Changing what is said not to be read."""

from __future__ import annotations

import pytest
import torch

from tessera_compile.ptx_tools import Intervals
from tessera_compile.runtime.codegen import Codegen
from tessera_compile.runtime.perturbing import unread_holds
from tests.graphs import lowered


def compiled(function, *args):
    graph = lowered(function, args)
    made = Codegen("eager").compile(graph, [k.name for k in graph.kernels], [v for v in graph.output_values if graph.producer(v)])
    return made, dict(zip(graph.inputs, args, strict=True)), graph.inputs


def rows(*pairs):
    return Intervals.of((64 * a, 64 * b) for a, b in pairs)


def test_a_true_claim_holds_and_a_false_one_does_not():
    x = torch.randn(8, 16)
    x[7, 3] = float("nan")
    before = x.clone()
    piece, values, (name,) = compiled(lambda a: a[2:4] * 2 + a[7], x)
    assert unread_holds(piece, values, {name: rows((2, 4), (7, 8))}) is True
    assert unread_holds(piece, values, {name: rows((2, 4))}) is False
    assert unread_holds(piece, values, {name: rows((2, 3), (7, 8))}) is False
    assert unread_holds(piece, values, {}) is True
    assert torch.equal(x.nan_to_num(), before.nan_to_num())


def test_strided_values_and_what_lies_between_their_elements():
    x = torch.randn(8, 32)[:, ::2]
    piece, values, (name,) = compiled(lambda a: a[0] + 1, x)
    assert unread_holds(piece, values, {name: Intervals.of([(0, 128)])}) is True
    assert unread_holds(piece, values, {name: Intervals.of([(0, 100)])}) is False


def test_what_is_overwritten_may_be_changed_and_what_is_left_stays():
    cache, x = torch.randn(8, 16), torch.randn(2, 16)
    piece, values, names = compiled(lambda c, y: (c.copy_(torch.slice_scatter(c, y, 0, 2, 4)), y + 1)[1], cache, x)
    assert piece.writes == (names[0],)
    assert unread_holds(piece, values, {names[0]: rows((0, 2), (4, 8))}) is True
    # A copy of the rest reads it, but each byte to where it was.
    assert unread_holds(piece, values, {names[0]: rows()}) is True
    assert unread_holds(piece, values, {names[1]: rows()}) is False


def test_numbers_that_may_be_indices_are_left_alone():
    x, i = torch.randn(8, 16), torch.tensor([1, 5])
    piece, values, (a, b) = compiled(lambda t, j: t[j], x, i)
    assert unread_holds(piece, values, {b: rows()}) is True
    assert unread_holds(piece, values, {a: rows((1, 2), (5, 6))}) is True


def test_nothing_is_told_of_what_differs_each_time():
    @torch.library.custom_op("tessera_perturbing::count", mutates_args=())
    def count(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return x + len(seen)

    count.register_fake(torch.empty_like)
    seen = []
    piece, values, (name,) = compiled(torch.ops.tessera_perturbing.count, torch.randn(8, 16))
    assert unread_holds(piece, values, {name: rows((0, 8))}) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_footprints_of_a_gpu_hold():
    from tessera_compile.runtime.evidence import gather

    x, w = torch.randn(64, 96, device="cuda"), torch.randn(32, 48, device="cuda")
    graph = lowered(lambda a, b: torch.softmax(a[:, 32:64] @ b, 1) * 2, (x, w))
    values, codegen = dict(zip(graph.inputs, (x, w), strict=True)), Codegen("inductor")
    kernels = [k.name for k in graph.kernels]
    found = gather(graph, kernels, graph.outputs, codegen, values, invented=False)
    piece = codegen.compile(graph, kernels, graph.outputs)
    assert unread_holds(piece, values, {b.name: b.reads for b in found.footprint.buffers if b.name in values}) is True
    assert unread_holds(piece, values, {graph.inputs[0]: Intervals.of([(0, 100)])}) is False
