"""A whole program as one CUDA graph: captured once for each signature of inputs, replayed after that.

Weights, constants and state are read where they lie; a call that passes them at other addresses captures again. Other inputs
are copied into static buffers, outputs are copied out, inputs that the graph overwrites are copied back. The lanes' streams
are forked from the capturing stream and joined to it by the events of the program, so one graph spans all lanes, and its
memory is a private pool on each device.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .cuda_lanes import CudaLaneExecutor, asks_the_host
from .cuda_streams import ISSUING, capturing
from .replicas import overlaps, own_copy
from .segment_graphs import copies_of

log = logging.getLogger(__name__)

MOST_GRAPHS = 16
"""Signatures kept; the one unused for longest goes."""


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Any]
    copied: tuple[str, ...]
    copies: Callable[[], list[Any]]  # of the outputs, on the current stream
    backs: tuple[str, ...]
    pools: list[Any]  # of other devices, kept alive
    held: list[int]  # addresses of the replicas


class GraphedExecutor:
    """Wraps a :class:`CudaLaneExecutor`: the first call with a signature runs as it is, the second is captured, later ones
    replay.

    ``reasons``: why calls run uncaptured. ``replays`` counts replays.
    """

    def __init__(self, inner: CudaLaneExecutor) -> None:
        self.inner = inner
        self.reasons: dict[str, str] = {}
        self.replays = 0
        self._captured: dict[Any, _Captured | None] = {}
        self._last: torch.cuda.Event | None = None  # behind the latest replay and the copies of its outputs
        graph = inner.graph
        self._static = frozenset(v for v in graph.inputs if graph.resident(v))
        self._statics = [i for i, v in enumerate(graph.inputs) if v in self._static]
        self._others = [i for i, v in enumerate(graph.inputs) if v not in self._static]
        aliases = [s for s in graph.output_storages if s is not None and s in graph.inputs]
        self._never = ""
        if aliases:
            self._never = f"an output is a view of input {aliases[0]}"
        elif any(k.effect for k in graph.kernels):
            self._never = "a kernel has effects"
        elif any(asks_the_host(node) for node in graph.module.graph.nodes):
            self._never = "the host needs a value that is computed on the GPU"

    # what callers of either executor look at
    @property
    def runs(self) -> int:
        return self.inner.runs

    @property
    def program(self) -> Any:
        return self.inner.program

    @property
    def pace(self) -> Any:
        return self.inner.pace

    def __call__(self, args: list[Any]) -> list[Any]:
        if self._never:
            self.reasons.setdefault("all", self._never)
            return self.inner(args)
        if torch.cuda.is_current_stream_capturing():  # the caller's own graph takes the kernels in as they are
            return self.inner(args)
        inputs = dict(zip(self.inner.graph.inputs, args, strict=True))
        with ISSUING:
            current = torch.cuda.current_stream(self.inner.lanes[self.inner.home].device)
            if self._last is not None:  # static buffers, replicas and links are one request's at a time, whoever calls
                current.wait_event(self._last)
            key = self._key(args)
            if key not in self._captured:
                if reason := self._unfit(inputs):
                    self.reasons.setdefault(reason, reason)
                    return self._as_it_is(args, current)
                self._captured[key] = None  # the first call compiles, tunes and loads
                while len(self._captured) > MOST_GRAPHS:
                    if self._last is not None:  # its memory may still be at work, on another caller's stream
                        self._last.synchronize()
                    self._captured.pop(next(iter(self._captured)))
                return self._as_it_is(args, current)
            found = self._captured.pop(key)
            held, written = self.inner.bring(inputs)
            if found is None or [t.data_ptr() for t in held.values()] != found.held:
                try:
                    found = self._capture(inputs, held)
                except Exception as error:
                    self._never = (
                        f"it cannot be captured: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                    )
                    self.reasons["all"] = self._never
                    log.info("runs uncaptured: %s", self._never)
                    return self._as_it_is(args, current)
            self._captured[key] = found  # most recently used last
            args.clear()
            return self._replay(found, inputs, written)

    def _as_it_is(self, args: list[Any], current: torch.cuda.Stream) -> list[Any]:
        results = self.inner(args)
        self._last = current.record_event()
        return results

    def _unfit(self, inputs: dict[str, Any]) -> str:
        """Why these inputs cannot be copied into static buffers; empty where they can."""
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor):
                if not value.is_cuda:
                    return f"input {name} lies on the host, and a graph would keep its content"
                if name not in self._static and (value.layout != torch.strided or overlaps(value)):
                    return f"elements of input {name} share memory"
        return ""

    def _key(self, args: list[Any]) -> Any:
        """What a captured graph depends on: addresses of what it reads where it lies (dynamo guards the rest of those), shapes of
        what is copied, numbers."""
        others = [
            (v.shape, v.stride(), v.dtype, v.device) if isinstance(v, torch.Tensor) else v
            for v in map(args.__getitem__, self._others)
        ]
        return (*[args[i].data_ptr() for i in self._statics], *others)

    def _capture(self, inputs: dict[str, Any], held: dict[tuple[int, str], torch.Tensor]) -> _Captured:
        inner = self.inner
        home = inner.lanes[inner.home].device
        current = torch.cuda.current_stream(home)
        tensors = {n: v for n, v in inputs.items() if isinstance(v, torch.Tensor)}
        copied = tuple(n for n in tensors if n not in self._static)
        with torch.inference_mode(False), torch.no_grad():  # calls outside of inference mode also copy into these
            static = {n: (own_copy(v) if n in copied else v) for n, v in tensors.items()}
        static |= {n: v for n, v in inputs.items() if n not in tensors}
        stream = torch.cuda.Stream(home)
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        others: list[Any] = []
        # A failed capture must not have changed anything: capturing enqueues nothing, so state is as it was.
        with contextlib.ExitStack() as pools:
            for device in sorted({lane.device.index or 0 for lane in inner.lanes} - {home.index or 0}):
                with torch.cuda.device(device):
                    pool = torch.cuda.MemPool()  # the capture's own pool is of its own device alone
                pools.enter_context(torch.cuda.use_mem_pool(pool, device=torch.device("cuda", device)))
                others.append(pool)
            pools.enter_context(capturing(graph, stream))
            outputs = inner.issue(dict(static), held)
        current.wait_stream(stream)
        backs = tuple(n for n in inner.graph.mutated if n in copied)
        return _Captured(graph, static, copied, copies_of(outputs), backs, others, [t.data_ptr() for t in held.values()])

    def _replay(
        self, found: _Captured, inputs: dict[str, Any], written: Sequence[tuple[int, str, int]]
    ) -> list[Any]:  # fmt: skip
        current = torch.cuda.current_stream(self.inner.lanes[self.inner.home].device)
        for name in found.copied:
            found.inputs[name].copy_(inputs[name], non_blocking=True)
        found.graph.replay()
        for name in found.backs:
            inputs[name].copy_(found.inputs[name], non_blocking=True)
        self.replays += 1
        self.inner.runs += 1
        copies = found.copies()
        self._last = current.record_event()
        self.inner.mark(written, inputs)
        given = iter(copies)
        graph = self.inner.graph
        return [
            literal if name is None else next(given) for name, literal in zip(graph.outputs, self.inner.literals, strict=True)
        ]
