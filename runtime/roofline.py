"""Times for GPUs known by their data sheets alone.

t = max(FLOPs / (peak · e_flops), bytes / (bandwidth · e_bytes)) + floor, where e depends on the kind of kernel. The efficiencies
below are round assumptions, not fits; a profile made with them says ``modelled``. Peaks are the dense bf16 tensor rate for
kernels that use matrix units in 16 bits, half of it in 32 bits (tf32), and a sixteenth for arithmetic outside matrix units.
"""

from __future__ import annotations

from ..passes.cluster import Device
from ..passes.ir import Kernel, KernelGraph, Profile, Timing

#: Least time of any kernel on a GPU: launch and drain, µs.
FLOOR_US = 2.0

_MATRIX_KINDS = {"gemm": 0.7, "attention": 0.5, "conv": 0.6}
_OTHER_FLOPS = 0.5
_BANDWIDTH = 0.8


def roofline_us(kernel: Kernel, graph: KernelGraph, device: Device) -> float:
    """Microseconds of ``kernel`` on ``device`` by the formula at the top of this file.

    Raises:
        ValueError: the device has no published figures.
    """
    if device.tflops <= 0 or device.gb_per_s <= 0:
        raise ValueError(f"device {device.name!r} has no figures to model from (TFLOP/s, GB/s)")
    wide = any(graph.values[v].dtype in ("float32", "float64") for v in (*kernel.inputs, *kernel.outputs))
    if kernel.kind in _MATRIX_KINDS:
        rate = device.tflops * _MATRIX_KINDS[kernel.kind] * (0.5 if wide else 1.0)
    else:
        rate = device.tflops / 16 * _OTHER_FLOPS
    compute = kernel.flops / (rate * 1e6)
    memory = (kernel.bytes_read + kernel.bytes_written) / (device.gb_per_s * 1e3 * _BANDWIDTH)
    return max(compute, memory) + FLOOR_US


def model_profile(graph: KernelGraph, devices: tuple[Device, ...]) -> Profile:
    """The roofline time of every kernel on every device."""
    return Profile(
        {k.name: {d.name: Timing(roofline_us(k, graph, d), source="modelled") for d in devices} for k in graph.kernels}
    )
