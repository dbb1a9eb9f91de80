"""Evidence of compiled pieces. Without a GPU, Triton kernels are compiled all the same and run by stand-ins on CPU tensors, which
are launched, captured, decided upon and interpreted as the real ones are."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tessera_compile.passes.errors import TesseraError
from tessera_compile.ptx_tools import Intervals
from tessera_compile.runtime import evidence
from tessera_compile.runtime.codegen import Codegen
from tessera_compile.runtime.evidence import gather, reads_within, same
from tessera_compile.runtime.launches import capturing_launches
from tests.graphs import lowered
from tests.ptx_tools.corpus import triton_ptx

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
NONE = Intervals.of(())


def span(*pairs):
    return Intervals.of(pairs)


# -- kernels compiled for a GPU that is not there


class StandIn:
    """What Triton's ``CompiledKernel`` shows of a kernel, launched by a function on CPU tensors."""

    def __init__(self, case, launched):
        built = triton_ptx(case)
        self.asm = {"ptx": built.ptx}
        shown = ("name", "num_warps", "shared", "num_ctas", "tensordesc_meta")
        self.metadata = SimpleNamespace(**{k: built.metadata[k] for k in shown})
        self.src = SimpleNamespace(signature=built.metadata["signature"], constants={})
        self.function = None
        self._run = lambda *given: launched(*given[9:])

    @property
    def run(self):
        return self._run


@pytest.fixture
def stand_ins(monkeypatch):
    """Kernels of the corpus, which can be launched here."""
    pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot be compiled")
    from triton.runtime.jit import JITFunction

    from tests.data.ptx import triton_kernels as source

    counts = {"add": 0, "gather": 0}

    def add(x, y, o, n, block):
        counts["add"] += 1
        flat = [torch.as_strided(t, (n,), (1,)) for t in (x, y, o)]
        torch.add(flat[0], flat[1], out=flat[2])

    def pick(idx, w, o, n, width, block):
        counts["gather"] += 1
        o[:n, :width] = w[idx[:n], :width]

    def product(a, b, c, *rest):
        torch.mm(a.base, b.base.t(), out=c.base)

    made = {
        source.k_add.fn: StandIn("add.sm_90", add),
        source.k_gather.fn: StandIn("gather.sm_90", pick),
        source.k_matmul_tma_host.fn: StandIn("matmul_tma_host.sm_90", product),
    }

    def run(self, *args, grid, warmup, **kwargs):
        kernel = made[self.fn]
        if not warmup:
            kernel.run(*(*grid, 1, 1)[:3], 0, None, None, None, None, None, *args, *kwargs.values())
        return kernel

    monkeypatch.setattr(JITFunction, "run", run)
    return SimpleNamespace(add=source.k_add, gather=source.k_gather, matmul=source.k_matmul_tma_host, counts=counts)


KERNELS = None


def launch_add(x, y, o, n):
    KERNELS.add[(-(-n // 1024),)](x, y, o, n, BLOCK=1024)


@torch.library.custom_op("tessera_evidence::plus", mutates_args=())
def plus(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    o = torch.empty_like(x)
    launch_add(x, y, o, x.numel())
    return o


@torch.library.custom_op("tessera_evidence::lie", mutates_args=())
def lie(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    launch_add(x, y, y, 100)
    return y * 2


@torch.library.custom_op("tessera_evidence::hidden", mutates_args=())
def hidden(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    o = torch.empty_like(x)
    launch_add(x, y, o, 100)  # and the rest is written where nobody sees it
    o.numpy()[100:] = 1
    return o


@torch.library.custom_op("tessera_evidence::pick", mutates_args=())
def pick(idx: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    o = torch.empty(idx.numel(), w.size(1), dtype=w.dtype)
    KERNELS.gather[(idx.numel(),)](idx, w, o, idx.numel(), w.size(1), BD=256)
    return o


@torch.library.custom_op("tessera_evidence::tiled", mutates_args=())
def tiled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    from triton.tools.tensor_descriptor import TensorDescriptor

    c = torch.empty(a.size(0), b.size(0), dtype=a.dtype)
    described = [TensorDescriptor.from_tensor(t, block) for t, block in ((a, [128, 64]), (b, [128, 64]), (c, [128, 128]))]
    sizes = (a.size(0), b.size(0), a.size(1))
    KERNELS.matmul[(-(-sizes[0] // 128) * -(-sizes[1] // 128),)](*described, *sizes, BM=128, BN=128, BK=64)
    return c


@tiled.register_fake
def _(a, b):
    return a.new_empty(a.size(0), b.size(0))


for op, shape in ((plus, None), (lie, None), (hidden, None), (pick, "pick")):
    op.register_fake((lambda idx, w: w.new_empty(idx.numel(), w.size(1))) if shape else (lambda x, y: torch.empty_like(x)))
ops = torch.ops.tessera_evidence


def evidence_of(function, args, stand_ins, *, invented=False, kernel=None, codegen=None):
    """Evidence of one kernel, by default the last, with the inputs of the graph named x0, x1, …"""
    global KERNELS
    KERNELS = stand_ins
    graph = lowered(function, args)
    chosen = graph.kernels[-1] if kernel is None else kernel(graph)
    values = dict(zip(graph.inputs, args, strict=True))
    stand_ins.counts.update(add=0, gather=0)  # tracing runs operators too
    found = gather(graph, [chosen.name], chosen.outputs, codegen or Codegen("eager"), values, invented=invented)
    return graph, chosen, found


def test_a_triton_kernel_in_a_custom_operator_is_exact(stand_ins):
    x, y = torch.randn(1500), torch.randn(1500)
    before = x.clone(), y.clone()
    graph, kernel, found = evidence_of(lambda a, b: ops.plus(a, b), (x, y), stand_ins)
    a, b = graph.inputs
    assert found.exact == {a, b, *kernel.outputs}, found.to_text()
    assert found.footprint[a].reads == found.footprint[b].reads == span((0, 6000))
    assert found.footprint[a].writes == NONE
    assert found.footprint[kernel.outputs[0]].writes == span((0, 6000))
    assert [(n.kind, n.verdict) for n in found.launches if n.kind == "triton"] == [("triton", "INDEPENDENT")]
    assert len(found.digests) == 1
    assert reads_within(found, a, span((0, 6000)))
    assert not reads_within(found, a, span((0, 5999)))
    assert not reads_within(found, "other", span((0, 6000)))
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


def test_a_kernel_that_is_given_a_view_reads_that_part_of_the_value(stand_ins):
    x = torch.randn(3, 1024)
    graph, _, found = evidence_of(lambda a: ops.plus(a[1], a[2]), (x,), stand_ins)
    assert found.footprint[graph.inputs[0]].reads == span((4096, 12288))
    assert graph.inputs[0] in found.exact
    assert not found.guards


def test_a_lying_operator_is_seen_to_write(stand_ins):
    graph, _, found = evidence_of(lambda a, b: ops.lie(a, b), (torch.randn(200), torch.randn(200)), stand_ins)
    a, b = graph.inputs
    assert found.footprint[b].writes == span((0, 400))
    assert found.footprint[a].reads == span((0, 400))
    assert b not in found.exact  # an operator reads it too
    assert a in found.exact
    assert [buffer.name for buffer in found.certain.buffers] == [a, graph.outputs[0]][: len(found.exact)]


def test_what_nobody_saw_being_written_makes_nothing_exact(stand_ins):
    _, _, found = evidence_of(lambda a, b: ops.hidden(a, b), (torch.randn(200), torch.randn(200)), stand_ins)
    assert not found.exact
    assert "400 bytes of" in found.reason


def test_a_gather_is_guarded_by_its_index(stand_ins):
    idx, w = torch.tensor([3, 0, 3]), torch.randn(5, 64)
    graph, _, found = evidence_of(lambda i, t: ops.pick(i, t), (idx, w), stand_ins)
    i, t = graph.inputs
    assert found.guards == (i,), found.to_text()
    assert found.footprint[t].reads == span((0, 256), (3 * 256, 4 * 256))
    assert found.footprint.guards == (i,)
    assert not reads_within(found, t, span((0, 1280)))
    assert reads_within(found, t, span((0, 1280)), watched=[i])
    _, _, other = evidence_of(lambda i, t: ops.pick(i, t), (torch.tensor([1, 1, 1]), w), stand_ins)
    assert other.footprint[t].reads == span((256, 512))


def test_a_guarded_kernel_is_not_launched_on_invented_data(stand_ins):
    args = torch.tensor([3, 0, 3]), torch.randn(5, 64)
    graph, kernel, found = evidence_of(lambda i, t: ops.pick(i, t), args, stand_ins, invented=True)
    assert "k0_pick depends on data" in found.reason
    graph = replace(graph, kernels=(replace(kernel, needs_data=False),))  # as if the schema had said nothing
    values = dict(zip(graph.inputs, args, strict=True))
    stand_ins.counts.update(gather=0)
    found = gather(graph, [kernel.name], kernel.outputs, Codegen("eager"), values, invented=True)
    assert stand_ins.counts["gather"] == 0
    assert not found.exact
    assert found.reason == "k_gather is GUARDED(k_gather_param_0), and there are no data"
    assert found.footprint[graph.inputs[1]].reads == span((0, 1280))
    assert found.footprint[kernel.outputs[0]].writes == span((0, 768))


def test_an_independent_kernel_is_launched_on_invented_data(stand_ins):
    _, kernel, found = evidence_of(lambda a, b: ops.plus(a, b), (torch.zeros(64), torch.zeros(64)), stand_ins, invented=True)
    assert kernel.outputs[0] in found.exact
    assert stand_ins.counts["add"] == 1


def test_equal_pieces_of_other_layers_are_remembered(stand_ins):
    global KERNELS
    KERNELS = stand_ins
    x = torch.randn(3, 1024)
    graph = lowered(lambda a: ops.plus(ops.plus(a, a), a), (x,))
    stand_ins.counts.update(add=0)
    codegen, first, second = Codegen("eager"), *graph.kernels
    made = gather(graph, [first.name], first.outputs, codegen, {graph.inputs[0]: x}, invented=False)
    # One is a piece of one input, the other of two: each is launched, and asked for again neither is.
    values = {graph.inputs[0]: x, first.outputs[0]: x * 2}
    other = gather(graph, [second.name], second.outputs, codegen, values, invented=False)
    assert [n.how for n in other.launches if n.kind == "triton"] == ["interpreted"]
    count = stand_ins.counts["add"]
    again = gather(graph, [second.name], second.outputs, codegen, values, invented=False)
    assert stand_ins.counts["add"] == count == 2
    assert again.exact == other.exact == {graph.inputs[0], *first.outputs, *second.outputs}
    assert again.footprint[second.outputs[0]].writes == other.footprint[second.outputs[0]].writes == span((0, 12288))
    assert same(again, other)
    assert same(made, other)


def test_tiles_are_copied_through_maps_of_views(stand_ins):
    x = torch.randn(304, 256).half()
    graph, kernel, found = evidence_of(lambda a: ops.tiled(a[:200, :128], a[200:, 128:]), (x,), stand_ins)
    name = graph.inputs[0]
    assert name in found.exact, found.to_text()
    rows = [(512 * i, 512 * i + 256) for i in range(200)] + [(512 * i + 256, 512 * i + 512) for i in range(200, 304)]
    assert found.footprint[name].reads == span(*rows)
    assert found.footprint[kernel.outputs[0]].writes == span((0, 200 * 104 * 2))


def test_a_launch_too_large_for_the_interpreter_is_told_by_its_storages(stand_ins, monkeypatch):
    monkeypatch.setattr(evidence, "MOST_THREADS", 255)
    x = torch.randn(4, 1024)
    graph, _, found = evidence_of(lambda a: ops.plus(a[0], a[1]), (x,), stand_ins)
    assert graph.inputs[0] in found.exact  # one block of 128 threads
    graph, kernel, found = evidence_of(lambda a: ops.plus(a[:2], a[1:3]), (x,), stand_ins)
    assert not found.exact
    assert "256 threads are more than are interpreted" in found.reason
    assert found.footprint[graph.inputs[0]].reads == span((0, 16384))
    assert found.footprint[kernel.outputs[0]].writes == span((0, 8192))


# -- operators


def test_operators_are_told_by_the_elements_they_are_given():
    x = torch.randn(8, 64)
    graph = lowered(lambda a: a[:, :16] @ a[:, 16:32].t(), (x,))
    found = gather(graph, [k.name for k in graph.kernels], graph.outputs, Codegen("eager"), {graph.inputs[0]: x}, invented=False)
    name = graph.inputs[0]
    assert found.footprint[name].reads == span(*((256 * i, 256 * i + 128) for i in range(8)))
    assert not found.exact
    assert found.footprint[graph.outputs[0]].writes == span((0, 256))
    assert all(n.kind == "library" for n in found.launches)
    assert not found.digests


def test_compiled_code_for_the_cpu_is_not_exact():
    x = torch.randn(50)
    graph = lowered(lambda a: (a * 2).relu(), (x,))
    found = gather(
        graph, [k.name for k in graph.kernels], graph.outputs, Codegen("inductor"), {graph.inputs[0]: x}, invented=False
    )
    assert not found.exact
    assert "nothing that was seen" in found.reason


def test_a_piece_that_fails_has_a_reason_and_no_footprint():
    @torch.library.custom_op("tessera_evidence::fails", mutates_args=())
    def fails(x: torch.Tensor) -> torch.Tensor:
        if not traced:
            return x.clone()
        raise ValueError("not today")

    fails.register_fake(torch.empty_like)
    x = torch.randn(3)
    traced = []
    graph = lowered(lambda a: ops.fails(a), (x,))
    traced.append(True)
    found = gather(
        graph, [graph.kernels[0].name], graph.kernels[0].outputs, Codegen("eager"), {graph.inputs[0]: x}, invented=False
    )
    assert found.footprint is None
    assert found.reason == "ValueError: not today"


def test_a_kernel_that_depends_on_data_is_not_run_without():
    table, idx = torch.randn(10, 4), torch.tensor([1, 2])
    graph = lowered(lambda t, i: t[i], (table, idx))
    values = dict(zip(graph.inputs, (table, idx), strict=True))
    (kernel,) = graph.kernels
    found = gather(graph, [kernel.name], kernel.outputs, Codegen("eager"), values, invented=True)
    assert kernel.data_dependent
    assert not found.launches
    assert found.footprint[graph.inputs[0]].reads == span((0, 160))


def test_launches_inside_of_operators_are_listed_with_them(stand_ins):
    global KERNELS
    KERNELS = stand_ins
    with capturing_launches() as seen:
        ops.lie(torch.zeros(200), torch.zeros(200))
    named = [launch for launch in seen if launch.name == "tessera_evidence.lie.default"]
    assert [n.kind for n in named[0].inside] == ["triton", "library"]
    launched = named[0].inside[0]
    assert (launched.name, launched.grid, launched.block) == ("k_add", (1, 1, 1), 128)
    assert [p for p, _ in launched.args] == ["x_ptr", "y_ptr", "o_ptr", "n"]
    assert launched.args[3][1] == 100
    assert launched.args[0][1].shape == (200,)


def test_launches_of_other_threads_are_not_seen():
    import threading

    with capturing_launches() as seen:
        thread = threading.Thread(target=lambda: torch.ones(3) + 1)
        thread.start()
        thread.join()
        torch.ones(3).add_(1)
    assert [launch.name for launch in seen] == ["aten.ones.default", "aten.add_.Tensor"]
    assert seen[1].written == {"self", "result_0"}


def test_everything_is_put_back_when_the_block_fails(stand_ins):
    from triton.runtime.jit import JITFunction

    before = JITFunction.run

    def fail():
        with capturing_launches():
            raise TesseraError("no")

    with pytest.raises(TesseraError):
        fail()
    assert JITFunction.run is before


def test_scattered_elements_are_told_apart():
    from tessera_compile.runtime.launches import Extent

    x = torch.zeros(6, 10)
    for view in (x, x[1:3], x[:, ::3], x.t()[2:5], x[::2, 1:7], x[0, 0].expand(3, 4), x[:0]):
        marks = torch.zeros_like(x)
        torch.as_strided(marks, view.shape, view.stride(), view.storage_offset()).fill_(1)
        wanted = Intervals.from_marks(marks.bool().numpy().reshape(-1), 4, x.data_ptr())
        assert Extent.of(view).intervals() == wanted
    assert np.array_equal(Extent.of(x[1]).whole().ends, [x.data_ptr() + 240])
