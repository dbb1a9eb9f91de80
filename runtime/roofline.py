"""Times for GPUs known by their data sheets alone.

    t = floor + max(FLOPs / (peak · e), cold bytes / (DRAM bandwidth · e) + warm bytes / (warm bandwidth · e))

- floor: launch, first loads and drain take about the same number of clock cycles on every GPU, so the floor is
  :data:`FLOOR_CYCLES` / boost clock. This is why small kernels are faster on a GPU with a higher clock, whatever its memory.
- peak: the dense bf16 tensor rate for matrix kernels in 16 bits, half of it in 32 bits (tf32); for everything else the fp32 rate
  of the ordinary cores, multiprocessors · 128 lanes · 2 · clock.
- cold bytes: weights, constants and state, which a step has swept out of the L2 cache by the time it comes back to them.
- warm bytes: activations, read from L2 at :data:`L2_BYTES_PER_CYCLE` · multiprocessors · clock where what the kernel reads and
  writes of them fits in L2, else from DRAM.

All figures of a GPU are published ones (``gpus.toml``). The constants below are round assumptions of ours, the same for every
GPU and fitted to no measurement; a profile made with them says ``modelled``. ``benchmarks/roofline.py`` holds them against real
times.
"""

from __future__ import annotations

from ..passes.cluster import Device
from ..passes.ir import Kernel, KernelGraph, Profile, Timing

#: Clock cycles from launch to drain of a kernel that does next to nothing.
FLOOR_CYCLES = 2500
#: Bytes that a multiprocessor gets from L2 in a clock cycle.
L2_BYTES_PER_CYCLE = 16
#: Share of the peak that a kernel of each kind reaches when arithmetic bounds it.
EFFICIENCY = {"gemm": 0.7, "attention": 0.5, "conv": 0.6}
#: The same for everything outside matrix units, and for memory.
OTHER_EFFICIENCY, BANDWIDTH_EFFICIENCY = 0.5, 0.8


def roofline_us(kernel: Kernel, graph: KernelGraph, device: Device) -> float:
    """Microseconds of ``kernel`` on ``device`` by the formula at the top of this file.

    Raises:
        ValueError: the device has no published figures.
    """
    cold = sum(graph.values[v].bytes for v in kernel.inputs if graph.resident(v))
    wide = any(graph.values[v].dtype in ("float32", "float64") for v in (*kernel.inputs, *kernel.outputs))
    cold = min(cold, kernel.bytes_read)
    warm = kernel.bytes_read + kernel.bytes_written - cold
    return model_us(device, kernel.kind, kernel.flops, cold, warm, wide=wide)


def model_us(device: Device, kind: str, flops: float, cold_bytes: float, warm_bytes: float, *, wide: bool = False) -> float:
    """Microseconds of a kernel of ``kind`` from its counts; ``wide``: its operands have 32 bits or more.

    Raises:
        ValueError: the device has no published figures.
    """
    if device.tflops <= 0 or device.gb_per_s <= 0:
        raise ValueError(f"device {device.name!r} has no figures to model from (TFLOP/s, GB/s)")
    clock = device.boost_ghz or 1.5
    if kind in EFFICIENCY:
        rate = device.tflops * (0.5 if wide else 1.0) * EFFICIENCY[kind]
    else:
        cores = device.sms * 128 * 2 * clock / 1e3 if device.sms else device.tflops / 16
        rate = cores * OTHER_EFFICIENCY
    dram = device.gb_per_s * BANDWIDTH_EFFICIENCY
    cached = device.sms and warm_bytes <= device.l2_bytes
    warm_rate = max(dram, L2_BYTES_PER_CYCLE * device.sms * clock * BANDWIDTH_EFFICIENCY) if cached else dram
    memory = cold_bytes / (dram * 1e3) + warm_bytes / (warm_rate * 1e3)
    return FLOOR_CYCLES / (clock * 1e3) + max(flops / (rate * 1e6), memory)


def model_profile(graph: KernelGraph, devices: tuple[Device, ...]) -> Profile:
    """The roofline time of every kernel on every device."""
    return Profile(
        {k.name: {d.name: Timing(roofline_us(k, graph, d), source="modelled") for d in devices} for k in graph.kernels}
    )


def ceiling(first: Device, second: Device) -> float:
    """The most that any mix of kernels on these two can gain over one replica on each, by data sheet.

    Work is two pure kinds: arithmetic, at the tensor rates, and memory traffic, at the bandwidths. With a share s of a request's
    time on ``first`` in arithmetic, replicas reach 1 + 1 / (s·P/p + (1 − s)·B/b) requests in the time of one on ``first``;
    kernels placed freely reach the fluid optimum, which gives each device the kind that it is relatively better at. The ratio is
    largest at some s, found on a fine grid. 1 when both ratios are equal.
    """
    arithmetic, traffic = first.tflops / second.tflops, first.gb_per_s / second.gb_per_s  # Slow-down on ``second``.
    best = 1.0
    for step in range(1, 2000):
        share = step / 2000
        replicas = 1 + 1 / (share * arithmetic + (1 - share) * traffic)
        best = max(best, _split(share, arithmetic, traffic) / replicas)
    return best


def _split(share: float, arithmetic: float, traffic: float) -> float:
    """Requests in the time of one on the first device when each kind goes where it is relatively better, the other filling up."""
    kinds = sorted([(arithmetic, share), (traffic, 1 - share)])  # The second device takes the kind that it slows down least.
    (slow, work), (slower, rest) = kinds
    if work * slow >= rest:
        # The first device does all of the rest and helps with the work until both end together: rest + w = (work − w) · slow.
        return 1 / (rest + (work * slow - rest) / (1 + slow))
    # The second device does all of the work and helps with the rest: work · slow + w · slower = rest − w.
    return 1 / (rest - (rest - work * slow) / (1 + slower))
