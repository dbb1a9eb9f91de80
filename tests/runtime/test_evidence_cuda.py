"""Evidence of real launches on a GPU: Inductor's kernels, the user's, C++ and what operators launch. CPU: test_evidence.py."""

from __future__ import annotations

import gc

import pytest
import torch

from tessera_compile.ptx_tools import Intervals
from tessera_compile.runtime import evidence
from tessera_compile.runtime.codegen import Codegen
from tessera_compile.runtime.evidence import gather, same
from tessera_compile.runtime.launches import capturing_launches
from tests.graphs import lowered

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
NONE = Intervals.of(())


def span(*pairs):
    return Intervals.of(pairs)


def whole(tensor):
    return span((0, tensor.numel() * tensor.element_size()))


def of_graph(function, args, *, codegen=None, invented=False):
    with torch.no_grad():
        graph = lowered(function, args)
    kernels = [k.name for k in graph.kernels]
    values = dict(zip(graph.inputs, args, strict=True))
    before = {name: value.clone() for name, value in values.items()}
    found = gather(graph, kernels, graph.outputs, codegen or Codegen("inductor", strict=True), values, invented=invented)
    assert all(torch.equal(value, before[name]) for name, value in values.items())
    return graph, found


@pytest.fixture(autouse=True)
def _forget():
    evidence._launched.clear()
    evidence._known.clear()


@pytest.mark.parametrize("invented", [False, True])
@pytest.mark.parametrize("static", [True, False])
def test_a_pointwise_kernel_of_inductors(static, invented):
    x, y = torch.randn(100, 300, device="cuda"), torch.randn(100, 300, device="cuda")
    with torch._inductor.config.patch(use_static_cuda_launcher=static):
        graph, found = of_graph(lambda a, b: (a * 2 + b).relu(), (x, y), invented=invented)
    a, b = graph.inputs
    (out,) = graph.outputs
    assert found.exact == {a, b, out}, found.to_text()
    assert found.footprint[a].reads == found.footprint[b].reads == whole(x)
    assert found.footprint[out].writes == whole(x)
    assert found.footprint[a].writes == NONE
    assert [n.verdict for n in found.launches if n.kind == "triton"] == ["INDEPENDENT"]


def test_a_slice_is_read_as_a_slice():
    x = torch.randn(64, 96, device="cuda")
    graph, found = of_graph(lambda a: a[:, 32:64].sin(), (x,))
    assert found.footprint[graph.inputs[0]].reads == span(*((384 * i + 128, 384 * i + 256) for i in range(64)))
    assert graph.inputs[0] in found.exact, found.to_text()


def test_recorded_is_interpreted(monkeypatch):
    x = torch.randn(200, 1000, device="cuda")

    def function(a):
        return torch.softmax(a[:, :777], 1), a[::3].sum(0)

    _, first = of_graph(function, (x,))
    evidence._launched.clear()
    evidence._known.clear()
    monkeypatch.setattr(evidence, "MANY_THREADS", 0)
    _, second = of_graph(function, (x,))
    assert {n.how for n in first.launches if n.kind == "triton"} == {"interpreted"}, first.to_text()
    assert {n.how for n in second.launches if n.kind == "triton"} == {"recorded"}, second.to_text()
    assert same(first, second)
    for buffer in first.footprint.buffers:
        other = next(b for b in second.footprint.buffers if b.nbytes == buffer.nbytes and b.name == buffer.name)
        assert (other.reads, other.writes) == (buffer.reads, buffer.writes)


def test_a_matrix_product_is_an_operator_and_its_epilogue_is_not():
    x, w = torch.randn(64, 128, device="cuda"), torch.randn(128, 96, device="cuda")
    graph, found = of_graph(lambda a, b: (a @ b).relu() + 1, (x, w))
    assert found.footprint[graph.inputs[0]].reads == whole(x)
    assert graph.inputs[0] not in found.exact
    assert graph.outputs[0] in found.exact, found.to_text()
    assert {n.kind for n in found.launches} == {"library", "triton"}


def test_a_matrix_product_of_a_triton_template_is_exact():
    x = torch.randn(256, 128, device="cuda", dtype=torch.float16)
    w = torch.randn(128, 256, device="cuda", dtype=torch.float16)
    options = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    with torch._inductor.config.patch(options):
        graph, found = of_graph(lambda a, b: a @ b, (x, w))
    assert {n.kind for n in found.launches} == {"triton"}, found.to_text()
    assert found.exact == {*graph.inputs, *graph.outputs}, found.to_text()
    assert found.footprint[graph.inputs[0]].reads == whole(x)


def test_an_index_guards_what_is_gathered():
    table, index = torch.randn(1000, 64, device="cuda"), torch.tensor([5, 999, 5], device="cuda")
    graph, found = of_graph(lambda t, i: t[i] * 2, (table, index))
    t, i = graph.inputs
    assert found.guards == (i,), found.to_text()
    assert found.footprint[t].reads == span((5 * 256, 6 * 256), (999 * 256, 1000 * 256))
    _, invented = of_graph(lambda t, i: t[i] * 2, (table, index), invented=True)
    assert not invented.launches
    assert not invented.exact


# -- kernels of the user's


def kernels():
    pytest.importorskip("triton")
    from tests.data.ptx import triton_kernels

    return triton_kernels


@torch.library.custom_op("tessera_evidence_cuda::partly", mutates_args=())
def partly(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    o = torch.zeros_like(x)
    kernels().k_add[(2,)](x, y, o, 1500, BLOCK=1024)
    return o


@torch.library.custom_op("tessera_evidence_cuda::lie", mutates_args=())
def lie(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    kernels().k_add[(1,)](x, y, y, 100, BLOCK=1024)
    return y * 2


for _op in (partly, lie):
    _op.register_fake(lambda x, y: torch.empty_like(x))
ops = torch.ops.tessera_evidence_cuda


@pytest.mark.parametrize("codegen", ["inductor", "eager"])
def test_a_kernel_that_a_custom_operator_launches(codegen):
    x, y = torch.randn(4000, device="cuda"), torch.randn(4000, device="cuda")
    graph, found = of_graph(lambda a, b: ops.partly(a, b), (x, y), codegen=Codegen(codegen))
    a, b = graph.inputs
    assert {a, b} <= found.exact, found.to_text()
    assert found.footprint[a].reads == found.footprint[b].reads == span((0, 6000))
    assert found.footprint[graph.outputs[0]].writes == span((0, 16000))


def test_a_lying_operator():
    x, y = torch.randn(4000, device="cuda"), torch.randn(4000, device="cuda")
    graph, found = of_graph(lambda a, b: ops.lie(a, b), (x, y))
    assert found.footprint[graph.inputs[1]].writes == span((0, 400))
    assert found.footprint[graph.inputs[0]].writes == NONE


def test_a_users_kernel_in_the_model():
    """Traced by dynamo, compiled by Inductor: seen by the autotuner that launches it."""
    k = kernels()

    def model(x, y):
        out = torch.empty_like(x)
        k.k_add[(4,)](x, y, out, 4000, BLOCK=1024)
        return out * 2

    x, y = torch.randn(4000, device="cuda"), torch.randn(4000, device="cuda")
    with torch.no_grad():
        compiled = torch.compile(model)
        compiled(x, y)
        with capturing_launches() as seen:
            compiled(x, y)
    found = next(launch for launch in seen if launch.name == "k_add")
    assert [p for p, _ in found.args] == ["x_ptr", "y_ptr", "o_ptr", "n"]
    assert found.grid == (4, 1, 1)
    assert found.args[0][1].address == x.data_ptr()
    assert found.ptx is not None
    assert not found.opaque


SOURCE = """
extern "C" __global__ void scale(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2 * x[i];
}
"""


@pytest.mark.parametrize("code", ["ptx", "cubin"])
def test_a_kernel_in_c(code):
    core = pytest.importorskip("cuda.core")
    device = core.Device()
    device.set_current()
    arch = "".join(map(str, torch.cuda.get_device_capability()))
    program = core.Program(SOURCE, code_type="c++", options=core.ProgramOptions(std="c++17", arch=f"sm_{arch}"))
    module = program.compile(code)
    kernel = module.get_kernel("scale")

    @torch.library.custom_op(f"tessera_evidence_cuda::scale_{code}", mutates_args=())
    def scale(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        stream = device.create_stream(torch.cuda.current_stream()) if hasattr(device, "create_stream") else None
        config = core.LaunchConfig(grid=4, block=256)
        core.launch(stream, config, kernel, x.data_ptr(), out.data_ptr(), 900)
        return out

    scale.register_fake(torch.empty_like)
    x = torch.randn(1000, device="cuda")
    op = getattr(torch.ops.tessera_evidence_cuda, f"scale_{code}")
    graph, found = of_graph(lambda a: op(a), (x,))
    (record,) = [n for n in found.launches if n.kind == "cuda"]
    assert gc.is_tracked(module)
    assert record.grid == (4, 1, 1)
    name = graph.inputs[0]
    if code == "ptx":
        assert found.footprint[name].reads == span((0, 3600)), found.to_text()
        assert name in found.exact
    else:
        assert name not in found.exact
        assert record.reason.startswith("its object code is not PTX")
    assert module.code_type == code
