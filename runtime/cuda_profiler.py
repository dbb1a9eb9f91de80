"""Times of kernels on CUDA lanes.

Each distinct fingerprint is timed once a device type (a slice is a type of its own), alone, on the stream of a lane of that
type: ten calls captured in one CUDA graph, so that launch gaps don't count, replayed until enough time has passed; median and
interquartile range. The L2 cache is warm: every call finds what the one before left. A kernel that cannot be captured is
timed by events around plain calls. Data are invented or those of the first real call, by the rules of ``profiler.py``; what a
kernel overwrites is a copy.

As on CPU lanes, the sum of the kernels is calibrated against the whole graph in one segment, and the difference per seam is
the price of a cut. Slices of one GPU share its L2 cache and its memory: the whole graph is also timed on all of them at once,
and the ratio to its time alone, their contention, is in the times of each.

A kernel that fails on a device cannot run there: it has no time for that device, and the reason is in the report. One for which
memory does not suffice while it is timed gets a modelled time.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..passes.cluster import Cluster, Device
from ..passes.ir import Kernel, KernelGraph, Profile, Timing
from .codegen import Codegen, Compiled, constants, first_line, lookup
from .cuda_streams import ISSUING, LaneStreams, apart, capturing, lane_streams
from .device_code import check
from .profile_cache import ProfileCache, setting
from .profiler import captured_values, invented_inputs, needs_real_call, untimed
from .replicas import own_copy
from .roofline import model_profile, roofline_us
from .weights import present

_LAUNCHES, _MIN_REPLAYS, _MAX_REPLAYS, _ENOUGH_SECONDS = 10, 5, 40, 0.03


def profile_on_gpus(
    graph: KernelGraph,
    cluster: Cluster,
    codegen: Codegen,
    *,
    real: Sequence[Any] | None = None,
    cache: ProfileCache | None = None,
    progress: Callable[[Iterable[Any], str], Iterable[Any]] = lambda items, _: items,
) -> Profile:
    """Times every kernel on every type of CUDA device in the cluster; other devices get modelled times."""
    modelled = model_profile(graph, cluster.devices)
    times = {k: dict(row) for k, row in modelled.times.items()}
    if real is not None:  # the timers' streams know nothing of what the caller has enqueued
        for index in {v.device.index for v in real if isinstance(v, torch.Tensor) and v.is_cuda}:
            torch.cuda.current_stream(index).synchronize()
    streams = dict(zip([d.name for d in cluster.devices if d.kind == "cuda"], _lanes(cluster), strict=True))
    distinct: dict[str, list[Kernel]] = {}
    for kernel in graph.kernels:
        distinct.setdefault(kernel.fingerprint, []).append(kernel)
    calibration: dict[str, float] = {}
    cuts: dict[str, float] = {}
    timers: dict[str, _Timer] = {}
    types: dict[str, list[Device]] = {}
    for device in cluster.devices:
        if device.kind == "cuda":
            types.setdefault(device.type, []).append(device)
    for devices in types.values():
        timer = _Timer(graph, codegen, devices[0], streams[devices[0].name], real, cache)
        alone: dict[str, Timing | None] = {}
        for kernels in progress(list(distinct.values()), f"timing kernels on {devices[0].type}"):
            timing = timer.kernel(kernels[0])
            alone.update((k.name, timing) for k in kernels)
        ratio, cut = _calibrate(graph, alone, timer)
        for name, timing in alone.items():
            if timing is None:
                for device in devices:
                    times[name].pop(device.name, None)
                continue
            scaled = timing
            if ratio is not None and timing.source == "measured":
                scaled = replace(timing, us=timing.us * ratio, spread=timing.spread * ratio, source="calibrated")
            times[name].update({d.name: scaled for d in devices})
        for device in devices:
            timers[device.name] = timer.of(device, streams[device.name])
            cuts[device.name] = cut
            if ratio is not None:
                calibration[device.name] = ratio
    contention = _contention(timers)
    for row in times.values():
        for name, factor in contention.items():
            if name in row and row[name].source != "modelled":
                row[name] = replace(row[name], us=row[name].us * factor, spread=row[name].spread * factor)
    return Profile(times, calibration, cuts, contention)


def _contention(timers: Mapping[str, _Timer]) -> dict[str, float]:
    """By device, the time of the whole graph while the other slices of its GPU run it too, over its time alone."""
    together: dict[torch.device, list[str]] = {}
    for name, timer in timers.items():
        together.setdefault(timer.streams.device, []).append(name)
    found: dict[str, float] = {}
    for names in together.values():
        if len(names) > 1 and (factors := _Timer.contention([timers[n] for n in names])):
            found.update(zip(names, factors, strict=True))
    return found


def _lanes(cluster: Cluster) -> tuple[LaneStreams, ...]:
    return lane_streams([d.name for d in cluster.devices if d.kind == "cuda"])


def _calibrate(graph: KernelGraph, alone: Mapping[str, Timing | None], timer: _Timer) -> tuple[float | None, float]:
    counted = [t for name, t in alone.items() if graph[name].outputs or graph[name].writes]
    measured = [t for t in counted if t is not None and t.source == "measured"]
    if len(measured) < len(counted) or len(counted) < 2:
        return None, 0.0
    whole = timer.whole()
    total = sum(t.us for t in measured)
    if whole is None or total <= 0:
        return None, 0.0
    return whole.us / total, max(0.0, (total - whole.us) / (len(counted) - 1))


@functools.cache
def _driver_version() -> str:
    from cuda.bindings import runtime

    (version,) = check(runtime.cudaDriverGetVersion(), "asking for the driver's version")
    return str(version)


@functools.cache
def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


class _Timer:
    def __init__(
        self, graph: KernelGraph, codegen: Codegen, device: Device, streams: LaneStreams, real: Sequence[Any] | None, cache:
        ProfileCache | None
    ) -> None:  # fmt: skip
        self.graph, self.codegen, self.device, self.streams, self.cache = graph, codegen, device, streams, cache
        self.real = None if real is None else dict(zip(graph.inputs, real, strict=True))
        self._captured: dict[str, Any] | None = None
        index = streams.device.index or 0
        self.setting = {
            **setting(codegen.codegen, 0),
            "device": torch.cuda.get_device_name(index),
            "sms": str(streams.sms),
            "cuda": str(torch.version.cuda),
            "capability": str(torch.cuda.get_device_capability(index)),
            "driver": _driver_version(),
            "triton": _triton_version(),
            "l2": "warm",
        }

    def kernel(self, kernel: Kernel) -> Timing | None:
        """None where the kernel cannot run here."""
        modelled = Timing(roofline_us(kernel, self.graph, self.device), source="modelled")
        checks = not kernel.outputs and not kernel.writes
        if checks or kernel.effect or (kernel.needs_data and self.real is None):
            return modelled
        try:
            return self._timed(kernel.fingerprint, [kernel.name], kernel.outputs, kernel.needs_data)
        except torch.cuda.OutOfMemoryError as error:
            needed = sum(self.graph.values[v].bytes for v in {*kernel.inputs, *kernel.outputs})
            if needed > self.device.memory:
                has = f"{self.device.name} has {self.device.memory}"
                untimed(self.codegen, f"kernel {kernel.name} needs {needed} bytes, and {has}")
                return None
            reason = f"kernel {kernel.name} is not timed on {self.device.name} ({first_line(error)}); its time is modelled"
            untimed(self.codegen, reason)
            return modelled
        except Exception as error:
            reason = f"kernel {kernel.name} cannot run on {self.device.name} ({first_line(error)})"
            untimed(self.codegen, reason)
            return None

    def of(self, device: Device, streams: LaneStreams) -> _Timer:
        """The same for another device of its type."""
        real = None if self.real is None else list(self.real.values())
        return _Timer(self.graph, self.codegen, device, streams, real, self.cache)

    @staticmethod
    def contention(timers: Sequence[_Timer]) -> list[float]:
        """For slices of one GPU; none where the whole graph cannot be captured."""
        first = timers[0]
        graph = first.graph
        if any(k.effect for k in graph.kernels) or (needs_real_call(graph) and first.real is None):
            return []
        fingerprints = " ".join(k.fingerprint for k in graph.kernels)
        sizes = ",".join(str(v.bytes) for v in graph.values.values() if any(isinstance(s, str) for s in v.shape))
        names = [t.device.name for t in timers]
        keys = [
            {**t.setting, "fingerprint": hashlib.sha256(fingerprints.encode()).hexdigest()[:16], "sizes": sizes,
             "contention": f"{i} of {' '.join(names)}"}
            for i, t in enumerate(timers)
        ]  # fmt: skip
        if first.cache is not None:
            known = [first.cache.get(key) for key in keys]
            if all(k is not None for k in known):
                return [k.us for k in known if k is not None]
        outputs = [v for v in graph.output_values if graph.producer(v) is not None]
        try:
            compiled = [t.codegen.compile(graph, [k.name for k in graph.kernels], outputs, t.streams.device) for t in timers]
            factors: list[float] = apart(lambda: _at_once(timers, compiled))
        except Exception as error:
            untimed(
                first.codegen, f"{' and '.join(names)} cannot be timed at once ({first_line(error)}); contention is not known"
            )
            return []
        if first.cache is not None:
            for key, factor in zip(keys, factors, strict=True):
                first.cache.put(key, Timing(factor, 0.0, "measured"))
        return factors

    def whole(self) -> Timing | None:
        if any(k.effect for k in self.graph.kernels) or (needs_real_call(self.graph) and self.real is None):
            return None
        key = hashlib.sha256(" ".join(k.fingerprint for k in self.graph.kernels).encode()).hexdigest()[:16]
        outputs = [v for v in self.graph.output_values if self.graph.producer(v) is not None]
        try:
            return self._timed(key, [k.name for k in self.graph.kernels], outputs, self.real is not None)
        except Exception as error:
            reason = f"the whole graph cannot be timed on {self.device.name} ({first_line(error)}); times are not calibrated"
            untimed(self.codegen, reason)
            return None

    def _timed(self, fingerprint: str, kernels: Sequence[str], outputs: Sequence[str], on_real: bool) -> Timing:
        values = (self.graph.values[v] for k in kernels for v in self.graph[k].inputs)
        sizes = ",".join(str(v.bytes) for v in values if any(isinstance(s, str) for s in v.shape))
        key = {**self.setting, "fingerprint": fingerprint, "sizes": sizes}
        if self.cache is not None and (found := self.cache.get(key)) is not None:
            return found
        compiled = self.codegen.compile(self.graph, kernels, outputs, self.streams.device)
        timing: Timing = apart(lambda: self._time(compiled, on_real))
        if self.cache is not None:
            self.cache.put(key, timing)
        return timing

    def _inputs(self, compiled: Compiled, on_real: bool) -> list[Any]:
        if not on_real:
            return list(invented_inputs(self.graph, compiled.inputs))
        assert self.real is not None
        env = {**constants(self.graph), **self.real}
        if any(self.graph.producer(name.partition(".size(")[0]) is not None for name in compiled.inputs):
            if self._captured is None:
                with torch.random.fork_rng():
                    self._captured = captured_values(self.graph, self.real)
            env = self._captured
        inputs = [present(lookup(env, name)) for name in compiled.inputs]
        return [own_copy(v) if name in compiled.writes else v for name, v in zip(compiled.inputs, inputs, strict=True)]

    def _here(self, value: Any) -> Any:
        """What was made for the GPU that the graph was traced for, on this one."""
        elsewhere = isinstance(value, torch.Tensor) and value.is_cuda and value.device != self.streams.device
        return own_copy(value, self.streams.device) if elsewhere else value

    def _time(self, compiled: Compiled, on_real: bool) -> Timing:
        device, stream = self.streams.device, self.streams.compute
        with ISSUING, torch.cuda.device(device):
            inputs = [self._here(v) for v in self._inputs(compiled, on_real)]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # compiles, tunes, loads
                    compiled.call(list(inputs))
            stream.synchronize()
            try:
                graph = torch.cuda.CUDAGraph()
                with capturing(graph, stream):
                    for _ in range(_LAUNCHES):
                        compiled.call(list(inputs))
                run: Callable[[], Any] = graph.replay
                count = _LAUNCHES
            except Exception:
                torch.cuda.synchronize(device)

                def run() -> Any:
                    return compiled.call(list(inputs))

                count = 1
            times: list[float] = []
            started = time.perf_counter()
            with torch.cuda.stream(stream):
                run()
                while len(times) < _MIN_REPLAYS or (
                    len(times) < _MAX_REPLAYS and time.perf_counter() - started < _ENOUGH_SECONDS
                ):
                    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    begin.record()
                    run()
                    end.record()
                    end.synchronize()
                    times.append(begin.elapsed_time(end) * 1e3 / count)
        quartiles = statistics.quantiles(times, n=4)
        return Timing(statistics.median(times), quartiles[2] - quartiles[0], "measured")


def _at_once(timers: Sequence[_Timer], compiled: Sequence[Compiled]) -> list[float]:
    """Replays of the whole graph on every slice, alone and while all run; time together over time alone, at least 1."""
    with ISSUING, torch.cuda.device(timers[0].streams.device):
        graphs = []
        for timer, piece in zip(timers, compiled, strict=True):
            stream = timer.streams.compute
            inputs = [timer._here(v) for v in timer._inputs(piece, timer.real is not None)]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                piece.call(list(inputs))
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, stream):
                kept = piece.call(list(inputs))
            graphs.append((graph, stream, inputs, kept))

        def run(which: Sequence[int], counts: Sequence[int]) -> list[float]:
            """µs of a replay on each of ``which``."""
            torch.cuda.synchronize()
            events = []
            for at in which:
                graph, stream, *_ = graphs[at]
                with torch.cuda.stream(stream):
                    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    begin.record()
                    for _ in range(counts[at]):
                        graph.replay()
                    end.record()
                events.append((begin, end))
            torch.cuda.synchronize()
            return [b.elapsed_time(e) * 1e3 / counts[at] for at, (b, e) in zip(which, events, strict=True)]

        everyone = range(len(graphs))
        run(everyone, [1] * len(graphs))
        alone = [run([at], [5] * len(graphs))[0] for at in everyone]
        # As many replays as fill the same time on each, so that all are busy from the first to nearly the last.
        counts = [max(5, min(500, round(_ENOUGH_SECONDS * 1e6 / us))) for us in alone]
        alone = [run([at], counts)[0] for at in everyone]
        together = run(everyone, counts)
        return [max(1.0, t / a) for t, a in zip(together, alone, strict=True)]
