"""Times of kernels on the lanes that will run them.

Each distinct fingerprint is timed once per device type, alone, warm, on invented data: random numbers for floats, zeros for
integers (which stay inside any index range that is not empty), in storage of the profiler's own. Kernels with effects are not
run: they, and kernels that fail on invented data, get the modelled time and say so. The caller's tensors and generators are
not touched.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..passes import torch_compat
from ..passes.cluster import Cluster, Device
from ..passes.errors import TesseraWarning
from ..passes.ir import Kernel, KernelGraph, Profile, Timing
from .codegen import Codegen, Compiled
from .lane_pool import shared_pool
from .roofline import model_profile, roofline_us

log = logging.getLogger(__name__)

_MIN_RUNS, _MAX_RUNS, _ENOUGH_SECONDS = 5, 50, 0.02


def profile(
    graph: KernelGraph,
    cluster: Cluster,
    codegen: Codegen,
    *,
    how: str = "measure",
    lanes: int,
    threads: int,
    progress: Callable[[Iterable[Any], str], Iterable[Any]] = lambda items, _: items,
) -> Profile:
    """Times every kernel of ``graph`` on every device of ``cluster``.

    Args:
        how: ``"measure"`` times CPU lanes and models data-sheet GPUs; ``"model"`` models everything.
        lanes, threads: the lane pool whose threads do the timing.
        progress: wraps the kernels to be timed, with a title, for a progress bar.
    """
    measured = {d.type: d for d in cluster.devices if d.kind == "cpu"} if how == "measure" and codegen.codegen != "null" else {}
    result = {k: dict(row) for k, row in model_profile(graph, cluster.devices).times.items()}
    distinct: dict[str, list[Kernel]] = {}
    for kernel in graph.kernels:
        distinct.setdefault(kernel.fingerprint, []).append(kernel)
    if measured:
        for kernels in progress(list(distinct.values()), "timing kernels"):
            # All CPU lanes are alike: one timing stands for every lane and every equal kernel.
            timing = _time_on_lane(graph, kernels[0], codegen, next(iter(measured.values())), lanes, threads)
            for kernel in kernels:
                result[kernel.name].update({d.name: timing for d in cluster.devices if d.type in measured})
    return Profile(result)


def _time_on_lane(graph: KernelGraph, kernel: Kernel, codegen: Codegen, device: Device, lanes: int, threads: int) -> Timing:
    modelled = Timing(roofline_us(kernel, graph, device), source="modelled")
    if kernel.effect:
        return modelled
    compiled = codegen.compile(graph, [kernel.name], kernel.outputs)
    outcome: list[Timing | BaseException] = []
    done = threading.Event()

    def job() -> None:
        try:
            with torch.no_grad():
                outcome.append(_time(graph, compiled))
        except BaseException as error:
            outcome.append(error)
        finally:
            done.set()

    shared_pool(lanes, threads).submit([job] + [lambda: None] * (lanes - 1))
    done.wait()
    result = outcome[0]
    if isinstance(result, Timing):
        return result
    if not isinstance(result, Exception):
        raise result
    warnings.warn(
        f"kernel {kernel.name} cannot be timed on invented data ({result}); its time is modelled", TesseraWarning, stacklevel=2
    )
    return modelled


def _time(graph: KernelGraph, compiled: Compiled) -> Timing:
    inputs = list(invented_inputs(graph, compiled.inputs))
    times: list[float] = []
    compiled.call(list(inputs))
    started = time.perf_counter()
    while len(times) < _MIN_RUNS or (len(times) < _MAX_RUNS and time.perf_counter() - started < _ENOUGH_SECONDS):
        args = list(inputs)
        begin = time.perf_counter_ns()
        compiled.call(args)
        times.append((time.perf_counter_ns() - begin) / 1e3)
    quartiles = statistics.quantiles(times, n=4)
    return Timing(statistics.median(times), quartiles[2] - quartiles[0], "measured")


def invented_inputs(graph: KernelGraph, names: Iterable[str]) -> Iterator[Any]:
    """Values of the right shapes: standard normal floats, zero integers, true booleans; the same on every call."""
    generator = torch.Generator().manual_seed(0)
    fakes = {n.name: n.meta.get("val") for n in graph.module.graph.nodes}
    for name in names:
        base, _, size = name.partition(".size(")
        fake = fakes[base] if name not in fakes else fakes[name]
        if size and name not in fakes:
            yield torch_compat.size_hint(fake.shape[int(size[:-1])])
        elif not isinstance(fake, torch.Tensor):
            yield torch_compat.size_hint(fake) if isinstance(fake, torch.SymInt) else fake
        else:
            yield _invented(torch_compat.empty_like_fake(fake, {}), generator)


def _invented(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    span = tensor.as_strided((_span(tensor),), (1,)) if tensor.numel() else tensor
    if tensor.is_floating_point() or tensor.is_complex():
        numbers = torch.randn(span.shape, generator=generator)
        span.copy_(numbers)
    else:
        span.fill_(tensor.dtype == torch.bool)
    return tensor


def _span(tensor: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
