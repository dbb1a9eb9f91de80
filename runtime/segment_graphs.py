"""One CUDA graph a segment, for requests whose segments are issued one by one, in whatever order lanes become free.

A request runs in a *slot*: memory of its own, in which every value lies where it lay the last time. The first request of a slot
runs as it is, the second captures each segment as it comes to it, later ones replay. What is captured holds addresses, so a
segment is replayed only where all that it reads lies where it lay; where the caller passes other weights it is captured again.
Slots are used in turn, and a slot begins behind the end of the request that had it before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .codegen import Compiled, first_line
from .cuda_streams import LaneStreams, capturing
from .replicas import own_copy

MOST_CAPTURES = 8
"""Captures of one segment and slot before it runs as it is: what it reads lies somewhere else each time."""


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    key: tuple[Any, ...]
    outputs: Sequence[Any]


@dataclass
class Slot:
    """Memory and graphs of one request at a time. ``reasons``: why segments run uncaptured, by name. ``keep``: graphs are to be
    put into larger ones too."""

    reasons: dict[str, str]
    keep: bool = False
    done: list[torch.cuda.Event] = field(default_factory=list)  # behind the request that had it last
    replays: int = 0
    _buffers: dict[Any, torch.Tensor] = field(default_factory=dict)
    _graphs: dict[tuple[int, int], _Captured] = field(default_factory=dict)
    _captures: dict[tuple[int, int], int] = field(default_factory=dict)
    _pools: dict[int, Any] = field(default_factory=dict)

    def buffer(self, key: Any, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Memory of the slot's own for a value such as ``like``: the same as last time where that fits."""
        found = self._buffers.get(key)
        if found is None or (found.shape, found.stride(), found.dtype) != (like.shape, like.stride(), like.dtype):
            with torch.inference_mode(False):
                found = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
            self._buffers[key] = found
        return found

    def captured(self, place: tuple[int, int]) -> torch.cuda.CUDAGraph | None:
        """The graph of a segment, if it has one."""
        found = self._graphs.get(place)
        return None if found is None else found.graph

    def run(
        self, place: tuple[int, int], name: str, compiled: Compiled, inputs: list[Any], streams: LaneStreams
    ) -> Sequence[Any]:
        """The outputs of a segment, issued on the lane's stream."""
        key = tuple((v.data_ptr(), v.shape, v.stride()) if isinstance(v, torch.Tensor) else v for v in inputs)
        found = self._graphs.get(place)
        with torch.cuda.device(streams.device), torch.cuda.stream(streams.compute):
            if found is not None and found.key == key:
                found.graph.replay()
                self.replays += 1
                return found.outputs
            tries = self._captures[place] = self._captures.get(place, -1) + 1
            if tries == 0 or name in self.reasons:
                return compiled.call(inputs)
        if tries > MOST_CAPTURES:
            self.reasons[name] = "what it reads lies somewhere else each time"
            self._graphs.pop(place, None)
            return self._plainly(compiled, inputs, streams)
        try:
            self._graphs[place] = self._capture(place, key, compiled, inputs, streams)
        except Exception as error:  # capturing enqueues nothing, so nothing has happened yet
            torch.cuda.synchronize(streams.device)
            self.reasons[name] = f"it cannot be captured: {type(error).__name__}: {first_line(error)}"
            return self._plainly(compiled, inputs, streams)
        with torch.cuda.device(streams.device), torch.cuda.stream(streams.compute):
            self._graphs[place].graph.replay()
        return self._graphs[place].outputs

    def _plainly(self, compiled: Compiled, inputs: list[Any], streams: LaneStreams) -> Sequence[Any]:
        with torch.cuda.device(streams.device), torch.cuda.stream(streams.compute):
            return compiled.call(inputs)

    def _capture(
        self, place: tuple[int, int], key: tuple[Any, ...], compiled: Compiled, inputs: list[Any], streams: LaneStreams
    ) -> _Captured:  # fmt: skip
        lane, graph = place[0], new_graph(self.keep)
        # A lane's graphs run one after the other, so each can use what those before it have left. One that is captured again must
        # not: its outputs could lie where a later one, captured before, still works.
        pool = self._pools.get(lane) if place not in self._graphs else None
        if pool is None:
            pool = torch.cuda.graph_pool_handle()
            self._pools.setdefault(lane, pool)
        with torch.cuda.device(streams.device), capturing(graph, streams.compute, pool):
            outputs = compiled.call(list(inputs))
        return _Captured(graph, key, outputs)


def new_graph(keep: bool = False) -> torch.cuda.CUDAGraph:
    """keep: so that it can be put into a larger one, where this version of torch can."""
    if not keep:
        return torch.cuda.CUDAGraph()
    try:
        return torch.cuda.CUDAGraph(keep_graph=True)
    except TypeError:
        return torch.cuda.CUDAGraph()


def copies_of(outputs: Sequence[Any]) -> Callable[[], list[Any]]:
    """Makes copies of what a request returns, on the current stream, since the memory is the next one's. Outputs that share
    storage share it in the copies too."""
    keys = [o.untyped_storage().data_ptr() if isinstance(o, torch.Tensor) and o.is_cuda else 0 for o in outputs]
    shared = {key for key in keys if key and keys.count(key) > 1}
    closely = [key and o.numel() * o.element_size() == o.untyped_storage().nbytes() for o, key in zip(outputs, keys, strict=True)]

    def copy() -> list[Any]:
        fresh: dict[int, torch.Tensor] = {}
        result = []
        for output, key, whole in zip(outputs, keys, closely, strict=True):
            if not key:
                result.append(output)
            elif key not in shared:
                result.append(output.clone(memory_format=torch.preserve_format) if whole else own_copy(output))
            else:
                if key not in fresh:
                    raw = torch.empty(0, dtype=torch.uint8, device=output.device).set_(output.untyped_storage())
                    fresh[key] = raw.clone()
                view = torch.empty(0, dtype=output.dtype, device=output.device)
                result.append(view.set_(fresh[key].untyped_storage(), output.storage_offset(), output.shape, output.stride()))
        return result

    return copy
