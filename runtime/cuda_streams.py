"""Streams of CUDA lanes: a whole GPU each, or a slice of one through a green context.

A lane has one stream for its kernels; links between lanes have streams of their own. Streams of a slice run on its
multiprocessors alone; slices of one GPU share its memory, so tensors need no copy to be seen, only ordering. What is made here
lives as long as the process: green contexts cannot be torn down under tensors that were allocated on their streams.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..passes import torch_compat
from ..passes.errors import ClusterError
from .device_code import check
from .lane_pool import errand

ISSUING = threading.RLock()
"""Held while anything is enqueued on streams of lanes: executors share them, and a capture takes in what others enqueue."""
_PIECE = 8
"""Multiprocessors of the smallest slice that every supported GPU can be cut into."""
NAME = re.compile(r"cuda:(\d+)(?:/(\d+)sm)?(?:#\d+)?")


@dataclass(frozen=True)
class LaneStreams:
    """``compute`` for kernels; ``sms`` multiprocessors that the driver granted (all of the GPU's, or the slice's);
    ``context``: the green context of a slice."""

    device: torch.device
    compute: torch.cuda.Stream
    sms: int
    context: Any = None

    def new_stream(self) -> torch.cuda.Stream:
        """Another stream of this lane, for as long as the process lives."""
        with torch.cuda.device(self.device):
            return torch.cuda.Stream(self.device) if self.context is None else _stream_of(self.context, self.device)


_made: dict[tuple[str, ...], tuple[LaneStreams, ...]] = {}
_keep: list[Any] = []  # Handles of green contexts.
_lock = threading.Lock()


def lane_streams(names: Sequence[str]) -> tuple[LaneStreams, ...]:
    """Streams for the lanes of a cluster, by device names such as ``cuda:0`` and ``cuda:0/48sm``; the same ones for the same
    names.

    Raises ClusterError where a GPU is not there, or has fewer multiprocessors than its slices ask for.
    """
    key = tuple(names)
    with _lock:
        if key not in _made:
            _made[key] = _make(key)
        return _made[key]


def _make(names: tuple[str, ...]) -> tuple[LaneStreams, ...]:
    wanted: list[tuple[int, int | None]] = []
    for name in names:
        match = NAME.fullmatch(name)
        if match is None:
            raise ClusterError(f"{name!r} is no CUDA device; name one as cuda:0 or cuda:0/48sm")
        index = int(match[1])
        if index >= torch.cuda.device_count():
            raise ClusterError(f"{name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
        wanted.append((index, int(match[2]) if match[2] else None))
    found: list[LaneStreams | None] = [None] * len(names)
    for index in dict.fromkeys(i for i, _ in wanted):
        lanes = [at for at, (i, _) in enumerate(wanted) if i == index]
        device = torch.device("cuda", index)
        total = torch.cuda.get_device_properties(device).multi_processor_count
        whole = [at for at in lanes if wanted[at][1] is None]
        for at in whole:
            found[at] = LaneStreams(device, torch.cuda.Stream(device), total)
        sliced = [at for at in lanes if wanted[at][1] is not None]
        asked = [wanted[at][1] or 0 for at in sliced]
        if sum(asked) > total:
            raise ClusterError(f"the slices of cuda:{index} ask for {sum(asked)} multiprocessors; it has {total}")
        for at, streams in zip(sliced, _slices(device, asked), strict=True):
            found[at] = streams
    return tuple(s for s in found if s is not None)


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Capture what the block enqueues on ``stream`` and on the streams that are forked from it. The current device and streams
    are as before afterwards, also where it fails; scratch memory of cuBLAS is the graph's own."""
    device, current = torch.cuda.current_device(), torch.cuda.current_stream(stream.device)
    torch_compat.clear_cublas_workspaces()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="relaxed"):
            yield
    finally:
        torch_compat.clear_cublas_workspaces()
        torch.cuda.set_stream(current)  # an invalidated capture leaves its own stream current
        torch.cuda.set_device(device)


def _slices(device: torch.device, asked: Sequence[int]) -> list[LaneStreams]:
    if not asked:
        return []
    from cuda.bindings import driver

    torch.cuda.init()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        (handle,) = check(driver.cuDeviceGet(device.index), f"finding {device}")
        (left,) = check(
            driver.cuDeviceGetDevResource(handle, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM),
            f"asking {device} for its SMs",
        )
        # A slice cannot be cut from what another one left, but slices can be put together from equal pieces.
        pieces = int(left.sm.smCount) // _PIECE
        groups, found, _ = check(driver.cuDevSmResourceSplitByCount(pieces, left, 0, _PIECE), f"cutting {device} into slices")
        free = list(groups[: int(found)])
        made = []
        for count in asked:
            needed = -(-count // _PIECE)
            if needed > len(free):
                raise ClusterError(
                    f"the slices of {device} need {sum(-(-n // _PIECE) for n in asked)} pieces of {_PIECE} multiprocessors; "
                    f"it has {int(found)}"
                )
            mine, free = free[:needed], free[needed:]
            (description,) = check(driver.cuDevResourceGenerateDesc(mine, needed), "describing a slice")
            flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
            (context,) = check(driver.cuGreenCtxCreate(description, handle, flags), f"a green context of {count} SMs on {device}")
            granted = sum(int(piece.sm.smCount) for piece in mine)
            _keep.append(context)
            made.append(LaneStreams(device, _stream_of(context, device), granted, context))
        return made


def _stream_of(context: Any, device: torch.device) -> torch.cuda.Stream:
    from cuda.bindings import driver

    flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    (stream,) = check(driver.cuGreenCtxStreamCreate(context, flags, 0), "a stream of a slice")
    _keep.append(stream)
    return torch.cuda.ExternalStream(int(stream), device=device)


def apart(function: Callable[[], Any]) -> Any:
    """Call in a thread of its own: this one may be inside the fake tensor mode of a compilation, or on another stream."""
    job, outcome = errand(function)
    thread = threading.Thread(target=job, name="tessera-apart")
    thread.start()
    thread.join()
    return outcome.result()
