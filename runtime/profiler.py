"""Times of kernels on the lanes that will run them.

Each distinct fingerprint is timed once per device type, alone, warm: median and interquartile range of repeated calls, in a
lane's own thread with a lane's thread setting. On what data:

- kernels whose addresses don't depend on data, and those for which the schema proves zeros to be safe indices: on invented data,
  random numbers for floats, zeros for integers;
- the others: on the tensors of the first real call (:func:`needs_real_call`), those that a kernel overwrites copied;
- kernels with effects, and those that fail: the modelled time, marked ``modelled``.

Kernels timed alone cost more than in a fused segment. Each device type is calibrated: every time is multiplied by (whole graph in
one segment) / (sum of its kernels), and the difference, divided by the number of seams, is the price of a cut; not where the
graph's weights exceed the device's memory. Timings are kept on disk (``profile_cache.py``). The caller's tensors, generators and
thread settings are not touched.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..passes import torch_compat
from ..passes.cluster import Cluster, Device
from ..passes.errors import TesseraWarning
from ..passes.ir import Kernel, KernelGraph, Profile, Timing
from .codegen import Codegen, Compiled, constants, first_line, lookup
from .lane_pool import errand, shared_pool
from .profile_cache import ProfileCache, setting
from .roofline import model_profile, roofline_us
from .weights import present

log = logging.getLogger(__name__)

_MIN_RUNS, _MAX_RUNS, _ENOUGH_SECONDS = 5, 50, 0.02


def needs_real_call(graph: KernelGraph) -> bool:
    """Whether some kernel, or the whole graph for calibration, can only be timed safely on the tensors of a real call."""
    return any(
        k.needs_data or (k.data_dependent and any(graph.values[v].origin == "activation" for v in k.inputs))
        for k in graph.kernels
    )


def profile(
    graph: KernelGraph,
    cluster: Cluster,
    codegen: Codegen,
    *,
    how: str = "measure",
    lanes: int,
    threads: int,
    real: Sequence[Any] | None = None,
    cache: ProfileCache | None = None,
    progress: Callable[[Iterable[Any], str], Iterable[Any]] = lambda items, _: items,
) -> Profile:
    """Times every kernel of ``graph`` on every device of ``cluster``.

    Args:
        how: ``"measure"`` times CPU lanes and models data-sheet GPUs; ``"model"`` models everything.
        lanes, threads: the lane pool whose threads do the timing.
        real: the graph's inputs in a real call; without them kernels that need real data get modelled times.
        cache: where timings are kept; None keeps none.
        progress: wraps the kernels to be timed, with a title, for a progress bar.
    """
    modelled = model_profile(graph, cluster.devices)
    device = next((d for d in cluster.devices if d.kind == "cpu"), None)
    if how != "measure" or codegen.codegen == "null" or device is None or not graph.kernels:
        return modelled
    timer = _Timer(graph, codegen, device, lanes, threads, real, cache)
    distinct: dict[str, list[Kernel]] = {}
    for kernel in graph.kernels:
        distinct.setdefault(kernel.fingerprint, []).append(kernel)
    alone: dict[str, Timing] = {}
    for kernels in progress(list(distinct.values()), "timing kernels"):
        timing = timer.kernel(kernels[0])
        alone.update((k.name, timing) for k in kernels)
    ratio, cut = _calibration(graph, alone, timer)
    cpus = [d.name for d in cluster.devices if d.kind == "cpu"]
    times = {k: dict(row) for k, row in modelled.times.items()}
    for name, timing in alone.items():
        scaled = timing
        if ratio is not None and timing.source == "measured":
            scaled = replace(timing, us=timing.us * ratio, spread=timing.spread * ratio, source="calibrated")
        times[name].update(dict.fromkeys(cpus, scaled))
    return Profile(times, {} if ratio is None else dict.fromkeys(cpus, ratio), dict.fromkeys(cpus, cut))


def _calibration(graph: KernelGraph, alone: Mapping[str, Timing], timer: _Timer) -> tuple[float | None, float]:
    """(whole graph / sum of kernels, µs a seam costs); (None, 0) where not everything could be timed."""
    alone = {name: t for name, t in alone.items() if graph[name].outputs or graph[name].writes}
    if any(t.source != "measured" for t in alone.values()) or len(alone) < 2:
        return None, 0.0
    whole = timer.whole()
    total = sum(t.us for t in alone.values())
    if whole is None or total <= 0:
        return None, 0.0
    return whole.us / total, max(0.0, (total - whole.us) / (len(alone) - 1))


class _Timer:
    """Times pieces of one graph on one lane of a pool."""

    def __init__(
        self,
        graph: KernelGraph,
        codegen: Codegen,
        device: Device,
        lanes: int,
        threads: int,
        real: Sequence[Any] | None,
        cache: ProfileCache | None,
    ) -> None:
        self.graph = graph
        self.codegen = codegen
        self.device = device
        self.pool = shared_pool(lanes, threads)
        self.cache = cache
        self.setting = setting(codegen.codegen, threads) if cache is not None else {}
        self.real = None if real is None else dict(zip(graph.inputs, real, strict=True))
        self._captured: dict[str, Any] | None = None

    def kernel(self, kernel: Kernel) -> Timing:
        modelled = Timing(roofline_us(kernel, self.graph, self.device), source="modelled")
        checks = not kernel.outputs and not kernel.writes  # An assertion: invented data need not satisfy it.
        if checks or kernel.effect or (kernel.needs_data and self.real is None):
            return modelled
        try:
            timing = self._timed(kernel.fingerprint, [kernel.name], kernel.outputs, kernel.needs_data)
        except Exception as error:
            untimed(self.codegen, f"kernel {kernel.name} cannot be timed ({first_line(error)}); its time is modelled")
            return modelled
        return timing

    def whole(self) -> Timing | None:
        """The graph in one segment; None if it has effects, does not fit, or cannot be run on the data at hand."""
        if any(k.effect for k in self.graph.kernels) or (needs_real_call(self.graph) and self.real is None):
            return None
        residents = sum(v.bytes for v in self.graph.values.values() if self.graph.resident(v.name) and v.storage == v.name)
        if residents > self.device.memory:
            log.info("the graph does not fit on %s as a whole; times are not calibrated", self.device.name)
            return None
        key = hashlib.sha256(" ".join(k.fingerprint for k in self.graph.kernels).encode()).hexdigest()[:16]
        outputs = [v for v in self.graph.output_values if self.graph.producer(v) is not None]
        try:
            return self._timed(key, [k.name for k in self.graph.kernels], outputs, self.real is not None)
        except Exception as error:
            untimed(self.codegen, f"the whole graph cannot be timed ({first_line(error)}); times are not calibrated")
            return None

    def _timed(self, fingerprint: str, kernels: Sequence[str], outputs: Sequence[str], on_real: bool) -> Timing:
        key = {**self.setting, "fingerprint": fingerprint, "sizes": self._sizes(kernels)}
        if self.cache is not None and (found := self.cache.get(key)) is not None:
            return found
        compiled = self.codegen.compile(self.graph, kernels, outputs)
        if on_real:
            inputs = self._real_inputs(compiled)
            timing: Timing = self._on_lane(lambda: _time(compiled, inputs))
        else:
            # Made in the lane's thread: this one may be inside the fake tensor mode of the compilation.
            timing = self._on_lane(lambda: _time(compiled, list(invented_inputs(self.graph, compiled.inputs))))
        if self.cache is not None:
            self.cache.put(key, timing)
        return timing

    def _sizes(self, kernels: Sequence[str]) -> str:
        """The hints of symbolic dimensions, which fingerprints leave open: bytes of what the kernels read."""
        values = (self.graph.values[v] for k in kernels for v in self.graph[k].inputs)
        return ",".join(str(v.bytes) for v in values if any(isinstance(s, str) for s in v.shape))

    def _real_inputs(self, compiled: Compiled) -> list[Any]:
        assert self.real is not None
        if any(self.graph.producer(name.partition(".size(")[0]) is not None for name in compiled.inputs):
            if self._captured is None:
                with torch.random.fork_rng(devices=[]):  # The dry run draws what the real one will draw again.
                    self._captured = self._on_lane(lambda: captured_values(self.graph, self.real or {}))
            env = self._captured
        else:
            env = {**constants(self.graph), **self.real}
        inputs = [present(lookup(env, name)) for name in compiled.inputs]
        return [v.clone() if name in compiled.writes else v for name, v in zip(compiled.inputs, inputs, strict=True)]

    def _on_lane(self, function: Callable[[], Any]) -> Any:
        """Calls ``function`` in the pool's first lane and hands on what it returns or raises."""
        job, outcome = errand(function)
        self.pool.submit([job] + [lambda: None] * (self.pool.count - 1))
        return outcome.result()


def _time(compiled: Compiled, inputs: Sequence[Any]) -> Timing:
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


def untimed(codegen: Codegen, reason: str) -> None:
    """Warns that something could not be timed, and keeps the reason for the report."""
    codegen.fallbacks[reason] = reason
    warnings.warn(reason, TesseraWarning, stacklevel=4)


def captured_values(graph: KernelGraph, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Every value of the graph for these inputs, computed kernel by kernel, uncompiled, on copies of overwritten inputs."""
    env = {**constants(graph), **inputs}
    for name in graph.mutated:
        env[name] = env[name].clone()
    codegen = Codegen("eager")
    for kernel in graph.kernels:
        if kernel.effect and not kernel.outputs:
            continue  # A print or an assertion: the real call will say it once.
        # What the kernel reads must survive it for the timing, also where it overwrites it.
        before = {name: env[name].clone() for name in kernel.writes}
        piece = codegen.compile(graph, [kernel.name], kernel.outputs)
        env.update(zip(piece.outputs, piece.call([present(lookup(env, name)) for name in piece.inputs]), strict=True))
        env.update(before)
    return env


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
        span.copy_(torch.randn(span.shape, generator=generator))
    else:
        span.fill_(tensor.dtype == torch.bool)
    return tensor


def _span(tensor: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
