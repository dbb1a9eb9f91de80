"""Footprints against Inductor's read/write sets."""

from __future__ import annotations

import pytest
import sympy
import torch

from tessera_compile.ptx_tools import Intervals
from tessera_compile.runtime.codegen import Codegen
from tessera_compile.runtime.cross_check import compare, cross_check
from tessera_compile.runtime.evidence import touch
from tessera_compile.runtime.launches import Extent, Launch
from tests.graphs import lowered
from tests.ptx_tools.corpus import triton_ptx

i = sympy.Symbol("i", integer=True)


def launched(n=1000, size=1500):
    """A launch of x + y → o on CPU tensors, which is interpreted and not run."""
    tensors = {name: torch.zeros(size) for name in ("x_ptr", "y_ptr", "o_ptr")}
    args = (*((name, Extent.of(t)) for name, t in tensors.items()), ("n", n))
    launch = Launch("triton", "k_add", "d", triton_ptx("add.sm_90").ptx, (2, 1, 1), 128, args, tensors=tensors)
    return launch, touch(launch)


def accesses(reads=1000, writes=1000, y=i):
    return [
        ("x_ptr", False, i, {"i": reads}, 4, False),
        ("y_ptr", False, y, {"i": 1000}, 4, False),
        ("o_ptr", True, i, {"i": writes}, 4, False),
    ]


def test_equal_sets_agree():
    found = compare([("k_add", accesses())], [launched()])
    assert (found.kernels, found.mismatches, found.skipped) == (("k_add",), (), ())
    assert (found.enumerated, found.whole) == (3, 0)


def test_sets_may_be_larger_and_whole_buffers():
    found = compare([("k_add", accesses(reads=1200, y=None))], [launched()])
    assert not found.mismatches
    assert (found.enumerated, found.whole) == (2, 1)


def test_a_footprint_beyond_the_sets_is_told_with_both():
    found = compare([("k_add", accesses(reads=900, writes=999))], [launched()])
    shown = {(m.parameter, m.kind): (m.footprint, m.expected) for m in found.mismatches}
    assert shown == {
        ("x_ptr", "reads"): (Intervals.of([(0, 4000)]), Intervals.of([(0, 3600)])),
        ("o_ptr", "writes"): (Intervals.of([(0, 4000)]), Intervals.of([(0, 3996)])),
    }
    assert "k_add reads 400 bytes of x_ptr that Inductor does not know of" in found.mismatches[0].to_text()


def test_each_launch_is_compared_with_its_own_sets():
    made = [("k_add", accesses()), ("k_add", accesses(reads=10))]
    found = compare(made, [launched(), launched(10), launched()])
    assert [m.parameter for m in found.mismatches] == []
    assert found.skipped == (("k_add", "Inductor did not generate it"),)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_kernels_of_inductors_agree():
    x = torch.randn(40, 60, device="cuda")
    table, index = torch.randn(10, 60, device="cuda"), torch.arange(40, device="cuda") % 10

    def function(a, t, j):
        padded = torch.cat([a[:, ::2], a.flip(0)[:, :7]], 1)
        return torch.softmax(padded, 1), torch.nn.functional.pad(a, (3, 2)).sum(0), a.t().contiguous() + 1, t[j] * a

    with torch.no_grad():
        graph = lowered(function, (x, table, index))
    values = dict(zip(graph.inputs, (x, table, index), strict=True))
    codegen = Codegen("inductor")
    with torch._inductor.config.patch(fx_graph_cache=False):
        _, found = cross_check(lambda: codegen.compile(graph, [k.name for k in graph.kernels], graph.outputs), values)
    assert not found.mismatches, [m.to_text() for m in found.mismatches]
    assert not found.skipped
    assert len(found.kernels) >= 3
    assert found.enumerated > found.whole
