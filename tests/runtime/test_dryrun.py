"""Instrumented runs on a GPU. The footprints of many Triton kernels are compared in ``benchmarks/gpu/ptx_dryrun.py``."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera_compile.ptx_tools import Buffer, Intervals, PtxError, footprint, parse
from tessera_compile.runtime.dryrun import Arena, DryRunError, PtxKernel, recording

DATA = Path(__file__).parents[1] / "data" / "ptx"
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the PTX is for sm_90"
)
NONE = Intervals.of(())


def test_an_arena_needs_a_cuda_device():
    with pytest.raises(DryRunError, match="one CUDA device, got cpu"):
        Arena({"x": torch.zeros(3)})


@gpu
@needs_gpu
def test_an_arena_copies_and_keeps_aliases():
    base = torch.arange(24, device="cuda", dtype=torch.float32).reshape(4, 6)
    tensors = {"rows": base[1:3], "columns": base[:, 2:4].t(), "other": torch.ones(3, device="cuda", dtype=torch.int8)}
    arena = Arena(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(arena[name], tensor)
        assert arena[name].stride() == tensor.stride()
        assert arena.buffers[name].addr == arena[name].data_ptr()
    arena["rows"].zero_()
    assert arena["columns"][:, 1].abs().sum() == 0
    assert base[1].sum() == sum(range(6, 12))


@gpu
@needs_hopper
def test_a_cuda_kernel_recorded_is_the_kernel_interpreted():
    text = (DATA / "cuda" / "c10_loops.sm_90a.ptx").read_text()
    w, h = 70, 45
    a = torch.randn(h, w, device="cuda")
    arena = Arena({"a": a, "o": torch.zeros(w, h, device="cuda")})
    kernel = PtxKernel(text, "transpose", threads=256)
    before = kernel.function
    for scheme in ("shadow", "bitmap"):
        with recording(kernel, arena, scheme=scheme) as record:
            kernel.launch((3, 2), (32, 8), [arena["a"], arena["o"], w, h])
        assert kernel.function == before
        assert torch.equal(arena["o"], a.t())
        found = footprint(parse(text), "transpose", (3, 2), (32, 8), [arena.buffers["a"], arena.buffers["o"], w, h])
        for name, param in (("a", "transpose_param_0"), ("o", "transpose_param_1")):
            assert record.footprint[name].reads == found[param].reads
            assert record.footprint[name].writes == found[param].writes
        assert record.footprint["a"].reads == Intervals.of([(0, 4 * w * h)])


@gpu
@needs_hopper
def test_a_loaded_bound_is_recorded_as_it_happened():
    text = (DATA / "cuda" / "c10_loops.sm_90a.ptx").read_text()
    rp = torch.tensor([0, 2, 2, 5], device="cuda", dtype=torch.int32)
    ci = torch.tensor([7, 1, 3, 3, 0], device="cuda", dtype=torch.int32)
    tensors = {
        "rp": rp,
        "ci": ci,
        "v": torch.ones(5, device="cuda"),
        "x": torch.arange(8.0, device="cuda"),
        "y": torch.zeros(3, device="cuda"),
    }
    arena = Arena(tensors)
    kernel = PtxKernel(text, "csr", threads=32)
    with recording(kernel, arena) as record:
        kernel.launch((1,), (32,), [arena[n] for n in tensors] + [3])
    assert arena["y"].tolist() == [8.0, 0.0, 6.0]
    assert record.footprint["x"].reads == Intervals.of([(4 * i, 4 * i + 4) for i in (0, 1, 3, 7)])
    assert record.footprint["y"].writes == Intervals.of([(0, 12)])
    args = [Buffer(arena.buffers[n].addr, arena.buffers[n].nbytes, np.asarray(tensors[n].cpu())) for n in ("rp", "ci")]
    found = footprint(parse(text), "csr", 1, 32, [*args, *(arena.buffers[n] for n in ("v", "x", "y")), 3])
    assert found["csr_param_3"].reads == record.footprint["x"].reads


@gpu
@needs_hopper
def test_an_access_outside_of_the_arena_is_not_lost():
    text = (DATA / "cuda" / "c10_loops.sm_90a.ptx").read_text()
    a, o = torch.randn(32, 32, device="cuda"), torch.zeros(32, 32, device="cuda")
    arena = Arena({"o": o})
    kernel = PtxKernel(text, "transpose", threads=256)
    with pytest.raises(PtxError, match="outside"), recording(kernel, arena):
        kernel.launch((1, 1), (32, 8), [a, arena["o"], 32, 32])


@gpu
@needs_hopper
def test_the_function_is_put_back_when_the_block_fails():
    kernel = PtxKernel((DATA / "cuda" / "c10_loops.sm_90a.ptx").read_text(), "transpose", threads=256)
    before = kernel.function

    def fail():
        with recording(kernel, Arena({"o": torch.zeros(4, device="cuda")})):
            assert kernel.function != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert kernel.function == before


@gpu
@needs_gpu
def test_a_module_for_another_gpu_is_refused():
    other = "c10_loops.sm_80.ptx" if torch.cuda.get_device_capability() != (8, 0) else "c10_loops.sm_90a.ptx"
    with pytest.raises(DryRunError, match=r"the module is for sm_\d+a?, the device .* is sm_"):
        PtxKernel((DATA / "cuda" / other).read_text(), "transpose")


@gpu
@needs_hopper
def test_a_kernel_that_cannot_be_recorded_says_why():
    kernel = PtxKernel((DATA / "cuda" / "c08_tex.sm_90a.ptx").read_text(), "texk")
    with (
        pytest.raises(DryRunError, match="texk has no exact record"),
        recording(kernel, Arena({"o": torch.zeros(4, device="cuda")})),
    ):
        pass


@gpu
@needs_gpu
def test_a_kernel_of_inductors_static_launcher():
    """Its function is swapped; what it reads and writes is what the source says."""
    x, y = torch.randn(100, 200, device="cuda"), torch.randn(100, 200, device="cuda")
    with torch.no_grad():
        expected = torch.compile(lambda a, b: torch.relu(a + b).sum(1))(x, y)
    found = [o for o in gc.get_objects() if type(o).__name__ == "StaticallyLaunchedCudaKernel" and "add_relu_sum" in o.name]
    if not found:
        pytest.skip("this torch has no static launcher")
    kernel = found[0]
    arena = Arena({"x": x, "y": y, "out": torch.zeros(100, device="cuda")})
    stream = torch.cuda.current_stream().cuda_stream
    with recording(kernel, arena) as record:
        kernel.run(100, 1, 1, stream, arena["x"], arena["y"], arena["out"], 100, 200)
    torch.testing.assert_close(arena["out"], expected)
    assert record.footprint["x"].reads == record.footprint["y"].reads == Intervals.of([(0, 80_000)])
    assert record.footprint["out"].writes == Intervals.of([(0, 400)])
    assert record.footprint["out"].reads == NONE
