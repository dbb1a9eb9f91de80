"""How values go from one CUDA lane to another.

A :class:`Link` is one direction between two lanes: a stream of its own at each end, so what is sent waits for what was sent
before it on that link and for nothing else, and requests are served in the order in which they are issued, oldest first. Its
transport does the copying:

- ``engine``: the copy engine (``copy_``: within one GPU, or a peer copy over NVLink or PCIe);
- ``kernel``: a kernel of the sending lane stores into the receiver's memory; fewer µs for small values;
- ``peer``: of the two the one that was measured to be faster for the size;
- ``gpu``: as ``kernel``, and the arrival is told by a flag in the receiver's memory, for which its stream waits, not by an
  event. Inside a capture the edges of the graph tell it: a graph may run what has no edge between in any order;
- ``nccl``: grouped send and receive of one process (package ``nccl4py``);
- ``host``: through two pinned buffers, for GPUs without peer access.

Values travel as bytes, whatever their dtype; empty ones not at all. Before a link is used, patterns are sent over it and
compared (:func:`prove`), once a process; a path that corrupts them is replaced by the host, with a warning.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..passes import torch_compat
from ..passes.cluster import Cluster
from ..passes.cluster import Link as Path
from ..passes.errors import ClusterError, TesseraWarning
from ..ptx_tools.footprints import Box
from .cuda_streams import ISSUING, LaneStreams, capturing, lane_streams
from .device_code import check, launch
from .replicas import overlaps
from .slices import part_views, room_for

CHUNK = 4 << 20
"""Bytes of each of the two pinned buffers of a link."""
SIZES = (4096, 1 << 16, 1 << 20, 1 << 25)
"""What is timed to choose between two ways, and for the planner: the first gives the latency, the last the bandwidth."""
_ODD = (1, 3, 4099, (1 << 20) + 5)


class Transport(Protocol):
    """``copy`` enqueues the copy of ``source`` into ``target``, tensors of one layout whose elements lie closely, and returns the
    stream behind which the copy is done. Both streams of the link are already behind what it has to wait for."""

    name: str

    def copy(self, link: Link, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Stream: ...


@dataclass
class Link:
    """One direction between two lanes: ``out`` is a stream of the sending lane, ``into`` one of the receiving.

    ``busy``: the streams used since :meth:`drain`; ``moved_bytes`` counts.
    """

    source: LaneStreams
    target: LaneStreams
    out: torch.cuda.Stream
    into: torch.cuda.Stream
    transport: Transport
    moved_bytes: int = field(default=0, repr=False)
    busy: dict[int, torch.cuda.Stream] = field(default_factory=dict, repr=False)

    def fetch(
        self, payload: torch.Tensor, ready: torch.cuda.Event, room: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.cuda.Event]:
        """A copy of ``payload`` in memory of the receiver, with its strides, and the event behind which it is there.

        ready: behind what made the payload. room: where to put it, of its shape, strides and dtype; by default new memory.
        """
        if payload.is_conj():
            got, done = self.fetch(payload.conj(), ready)
            return got.conj(), done
        if payload.is_neg():
            got, done = self.fetch(torch_compat.negative_view(payload), ready)
            return torch_compat.negative_view(got), done
        near = getattr(self.transport, "near", None)
        if room is None and near is not None and payload.is_contiguous() and self.source.device == self.target.device:
            return self._near(near, payload, ready)
        spread = not payload.is_contiguous() and overlaps(payload)
        if room is not None and not spread:
            return room, self.update(room, payload, [ready])
        self.into.wait_event(ready)  # and so is part of the capture, if there is one, when it takes memory for it
        with torch.cuda.stream(self.into):
            if spread:  # expanded dimensions share elements: the span of memory that it covers
                span = 1 + sum((size - 1) * stride for size, stride in zip(payload.shape, payload.stride(), strict=True))
                room = torch.empty((span,), dtype=payload.dtype, device=self.target.device)
                got = room.as_strided(payload.shape, payload.stride(), 0)
                payload = payload.as_strided((span,), (1,))
            else:
                got = room = torch.empty_strided(payload.shape, payload.stride(), dtype=payload.dtype, device=self.target.device)
        return got, self.update(room, payload, [ready])

    def fetch_parts(
        self, payload: torch.Tensor, boxes: Sequence[Box], ready: torch.cuda.Event, room: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.cuda.Event]:
        """As :meth:`fetch`, but only the ``boxes`` of the payload's bytes are moved; the others hold anything."""
        self.into.wait_event(ready)  # as in fetch
        if room is None:
            with torch.cuda.stream(self.into):
                room = room_for(payload, self.target.device)
        return room, self.update_parts(room, payload, boxes, [ready])

    def update_parts(
        self, target: torch.Tensor, payload: torch.Tensor, boxes: Sequence[Box], after: Sequence[torch.cuda.Event]
    ) -> torch.cuda.Event:
        """As :meth:`update`, of the ``boxes`` alone."""
        for view, source in zip(part_views(target, boxes), part_views(payload, boxes), strict=True):
            # One may end on one stream, the next on the other.
            self.into.wait_event(self.update(view, source, after))
        end: torch.cuda.Event = self.into.record_event()
        return end

    def _near(
        self, near: Callable[[Link, torch.Tensor], tuple[torch.cuda.Stream, Callable[[], torch.Tensor]]], payload: torch.Tensor,
        ready: torch.cuda.Event,
    ) -> tuple[torch.Tensor, torch.cuda.Event]:  # fmt: skip
        """Within one GPU one stream does it all: the host has few calls to make."""
        stream, copy = near(self, payload)
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            got = copy()
        used_on(payload, stream)
        self.busy[id(stream)] = stream
        self.moved_bytes += payload.nbytes
        return got, stream.record_event()

    def update(self, target: torch.Tensor, payload: torch.Tensor, after: Sequence[torch.cuda.Event]) -> torch.cuda.Event:
        """Copy ``payload`` into ``target``, memory of the receiver, behind the events; the event behind the copy."""
        for event in after:
            self.out.wait_event(event)
            self.into.wait_event(event)
        self.busy.update({id(self.out): self.out, id(self.into): self.into})
        if payload.numel() == 0:
            arrived: torch.cuda.Event = self.into.record_event()
            return arrived
        # New memory belongs to `into`: what it was before has been used up to here.
        self.out.wait_event(self.into.record_event())
        self.moved_bytes += payload.nbytes
        if payload.stride() != target.stride() or not lies_closely(payload):
            done = self._packed(target, payload)
        else:
            done = self.transport.copy(self, target, payload)
        behind: torch.cuda.Event = done.record_event()
        for stream in (self.out, self.into):
            used_on(payload, stream)
            used_on(target, stream)
        return behind

    def _packed(self, target: torch.Tensor, payload: torch.Tensor) -> torch.cuda.Stream:
        """What does not lie closely is packed by the sender and unpacked by the receiver."""
        with torch.cuda.stream(self.out):
            packed = payload.clone(memory_format=torch.contiguous_format)
        with torch.cuda.stream(self.into):
            received = torch.empty(payload.shape, dtype=payload.dtype, device=self.target.device)
        self.into.wait_event(self.out.record_event())
        self.out.wait_event(self.into.record_event())
        done = self.transport.copy(self, received, packed)
        self.into.wait_event(done.record_event())
        used_on(packed, self.into)
        used_on(received, self.out)
        with torch.cuda.stream(self.into):
            target.copy_(received)
        return self.into

    def drain(self) -> list[torch.cuda.Event]:
        """Events behind all that was moved since the last call."""
        streams = list(self.busy.values())
        self.busy.clear()
        return [stream.record_event() for stream in streams]


def lies_closely(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one range of memory, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor whose elements lie closely."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = int(tensor.storage_offset()) * tensor.element_size()
    return raw.set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))


def used_on(value: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that a stream uses a tensor of another stream's."""
    if isinstance(value, torch.Tensor) and value.is_cuda:  # a graph may also hold scalars on the host
        value.record_stream(stream)


# -- the transports


class Engine:
    name = "engine"

    def copy(self, link: Link, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Stream:
        # Between devices `copy_` runs on the source's current stream and makes the target's wait for it.
        with torch.cuda.stream(link.out), torch.cuda.stream(link.into):
            target.copy_(source, non_blocking=True)
        return link.into

    def near(self, link: Link, source: torch.Tensor) -> tuple[torch.cuda.Stream, Callable[[], torch.Tensor]]:
        return link.into, source.clone


class CopyKernel:
    name = "kernel"

    def copy(self, link: Link, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Stream:
        _enable_peer(link.source.device.index or 0, link.target.device.index or 0)
        with torch.cuda.stream(link.out):
            _move(link, target, source, None, None)
        return link.out

    def near(self, link: Link, source: torch.Tensor) -> tuple[torch.cuda.Stream, Callable[[], torch.Tensor]]:
        def copy() -> torch.Tensor:
            target = torch.empty_like(source)
            if source.nbytes:
                _move(link, target, source, None, None)
            return target

        return link.out, copy


def _move(
    link: Link, target: torch.Tensor, source: torch.Tensor, arrived: torch.Tensor | None, flag: torch.Tensor | None
) -> None:
    """On the current stream."""
    nbytes = source.nbytes
    blocks = max(1, min(2 * link.source.sms, math.ceil(nbytes / (256 * 64))))
    launch("move_bytes", blocks, 256, source, target, nbytes, arrived, flag)


@dataclass
class Peer:
    """``kernel`` up to ``most`` bytes, ``engine`` for more; inside a capture, where the host's calls cost nothing, up to
    ``most_captured``."""

    most: int
    most_captured: int
    name: str = "peer"
    small: CopyKernel = field(default_factory=CopyKernel)
    large: Engine = field(default_factory=Engine)

    def _of(self, nbytes: int) -> CopyKernel | Engine:
        if nbytes > max(self.most, self.most_captured):
            return self.large
        most = self.most
        if self.most != self.most_captured and torch.cuda.is_current_stream_capturing():
            most = self.most_captured
        return self.small if nbytes <= most else self.large

    def copy(self, link: Link, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Stream:
        return self._of(source.nbytes).copy(link, target, source)

    def near(self, link: Link, source: torch.Tensor) -> tuple[torch.cuda.Stream, Callable[[], torch.Tensor]]:
        return self._of(source.nbytes).near(link, source)


class Gpu:
    """The sender's kernel raises a flag in the receiver's memory; the receiver's stream waits for it and takes it down, and the
    sender's stream waits until it is down."""

    name = "gpu"

    def __init__(self, link: Link) -> None:
        _enable_peer(link.source.device.index or 0, link.target.device.index or 0)
        key = id(link.source), id(link.target)
        with _lock:  # as long-lived as the streams that use them
            if key not in _flags:
                made = []
                for device in (link.source.device, link.target.device):  # blocks are counted where they run
                    made.append(torch.zeros(32, dtype=torch.int32, device=device))
                    torch.cuda.synchronize(device)
                _flags[key] = made[0], made[1]
            self.arrived, self.flag = _flags[key]

    def copy(self, link: Link, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Stream:
        with torch.cuda.stream(link.out):
            if torch.cuda.is_current_stream_capturing():
                _move(link, target, source, None, None)
                link.into.wait_event(link.out.record_event())
                return link.into
            # Issued in this order, so that streams which share a hardware queue cannot wait for each other.
            wait_value(link.out, self.flag, 0)
            _move(link, target, source, self.arrived, self.flag)
        wait_value(link.into, self.flag, 1)
        write_value(link.into, self.flag, 0)
        return link.into


def wait_value(stream: torch.cuda.Stream, word: torch.Tensor, value: int) -> None:
    """What is enqueued next on the stream waits until 32 bits of GPU memory equal ``value``. Can be captured."""
    from cuda.bindings import driver

    equal = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
    with torch.cuda.device(stream.device):
        check(driver.cuStreamWaitValue32(stream.cuda_stream, word.data_ptr(), value, equal), "waiting for a flag")


def write_value(stream: torch.cuda.Stream, word: torch.Tensor, value: int) -> None:
    """The stream stores ``value`` in 32 bits of GPU memory, after all that it did before. Can be captured."""
    from cuda.bindings import driver

    plain = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
    with torch.cuda.device(stream.device):
        check(driver.cuStreamWriteValue32(stream.cuda_stream, word.data_ptr(), value, plain), "writing a flag")


class Host:
    """Chunk by chunk through two pinned buffers: while one is read by the receiver the sender fills the other."""

    name = "host"

    def __init__(self) -> None:
        self._pairs = [_Pair(), _Pair()]  # of calls as they are issued, and of captured graphs, whose events are their own

    def copy(self, link: Link, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Stream:
        target, source = as_bytes(target), as_bytes(source)
        with torch.cuda.stream(link.out):
            capturing, capture = torch.cuda.is_current_stream_capturing(), _capture_id(link.out)
        pair = self._pairs[capturing]
        if pair.capture != capture:
            pair.capture, pair.free = capture, [None, None]
        for number, start in enumerate(range(0, source.numel(), CHUNK)):
            at = number % 2
            end = min(start + CHUNK, source.numel())
            buffer = pair.buffers[at][: end - start]
            if (free := pair.free[at]) is not None:
                link.out.wait_event(free)
            with torch.cuda.stream(link.out):
                buffer.copy_(source[start:end], non_blocking=True)
            link.into.wait_event(link.out.record_event())
            with torch.cuda.stream(link.into):
                target[start:end].copy_(buffer, non_blocking=True)
            pair.free[at] = link.into.record_event()
        return link.into


class _Pair:
    def __init__(self) -> None:
        self.buffers = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.free: list[torch.cuda.Event | None] = [None, None]
        self.capture = 0


def _capture_id(stream: torch.cuda.Stream) -> int:
    """Which capture a stream is part of; 0 for none."""
    from cuda.bindings import runtime

    found = check(runtime.cudaStreamGetCaptureInfo(stream.cuda_stream), "asking about a capture")
    return int(found[1]) if int(found[0]) else 0


class Nccl:
    """Send and receive of one process in one group. All are issued under one lock, so every link sees one global order."""

    name = "nccl"

    def copy(self, link: Link, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Stream:
        from nccl.core import group

        a, b = link.source.device.index or 0, link.target.device.index or 0
        comms = _communicators(tuple(sorted({a, b})))
        out = link.into if a == b else link.out
        with group():
            comms[a].send(as_bytes(source), comms[b].rank, stream=out.cuda_stream)
            comms[b].recv(as_bytes(target), comms[a].rank, stream=link.into.cuda_stream)
        return link.into


@functools.cache
def _communicators(devices: tuple[int, ...]) -> dict[int, Any]:
    try:
        from nccl.core import Communicator
    except ImportError as error:
        raise ClusterError(f"transport 'nccl' needs the package nccl4py ({error}); install it, or use 'auto'") from error
    for device in devices:
        torch.cuda.current_stream(device).synchronize()  # initialises it
    return dict(zip(devices, Communicator.init_all(list(devices)), strict=True))


@functools.cache
def _enable_peer(source: int, target: int) -> None:
    """Let kernels of ``source`` store into memory of ``target``."""
    if source == target:
        return
    from cuda.bindings import runtime

    torch.zeros(1, device=f"cuda:{source}").to(f"cuda:{target}")  # torch maps its own memory for the peer
    with torch.cuda.device(source):
        result = runtime.cudaDeviceEnablePeerAccess(target, 0)
        if int(result[0]) != int(runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled):
            check(result, f"letting cuda:{source} into memory of cuda:{target}")


# -- choosing and proving


@dataclass(frozen=True)
class Proven:
    """What was seen of one transport on one pair: µs of a copy by size in bytes, as the host issues them and inside a captured
    graph (the same, where it cannot be captured)."""

    transport: str
    us: dict[int, float]
    captured_us: dict[int, float]

    def path(self, captured: bool) -> Path:
        """Latency, and bandwidth of the largest size, as the planner takes them."""
        us = self.captured_us if captured else self.us
        large = SIZES[-1]
        beyond = max(us[large] - us[SIZES[0]], 1e-3)
        return Path(gb_per_s=large / beyond / 1e3, latency_us=us[SIZES[0]])


@dataclass(frozen=True)
class LinkReport:
    """The transport in use between two lanes and what it takes, all that were tried, and which corrupted the pattern."""

    chosen: Proven
    tried: tuple[Proven, ...]
    corrupt: tuple[str, ...] = ()


_streams: dict[tuple[int, int], tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
_flags: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
_reports: dict[tuple[int, int, str], tuple[LinkReport, Callable[[Link], Transport]]] = {}
_lock = threading.RLock()


def make_link(source: LaneStreams, target: LaneStreams, transport: str = "auto") -> Link:
    """The link between two lanes, proven. Links of the same two lanes share their streams.

    Raises ClusterError where the transport asked for is not there, or no path moves the pattern unharmed.
    """
    with _lock, ISSUING:
        pair = id(source), id(target)
        if pair not in _streams:
            _streams[pair] = source.new_stream(), target.new_stream()
        link = Link(source, target, *_streams[pair], Engine())
        report = _proven(link, transport)
        link.transport = report[1](link)
        return link


def link_report(source: LaneStreams, target: LaneStreams, transport: str = "auto") -> LinkReport:
    """What is known of the link; it is proven first where it was not."""
    make_link(source, target, transport)
    return _reports[id(source), id(target), transport][0]


def with_measured_links(cluster: Cluster, transport: str, captured: bool) -> Cluster:
    """The cluster with what was measured of the links between its CUDA devices.

    captured: as they are inside a captured graph, not as the host issues them.
    """
    names = [d.name for d in cluster.devices if d.kind == "cuda"]
    lanes = dict(zip(names, lane_streams(names), strict=True))
    links = {
        (a, b): link_report(lanes[a], lanes[b], transport).chosen.path(captured) if a in lanes and b in lanes else link
        for (a, b), link in cluster.links.items()
    }
    return Cluster(cluster.devices, links)


def _proven(link: Link, transport: str) -> tuple[LinkReport, Callable[[Link], Transport]]:
    key = id(link.source), id(link.target), transport
    if key not in _reports:
        _reports[key] = _choose(link, transport)
    return _reports[key]


def _choose(link: Link, wanted: str) -> tuple[LinkReport, Callable[[Link], Transport]]:
    a, b = link.source.device.index or 0, link.target.device.index or 0
    near = a == b or torch.cuda.can_device_access_peer(a, b)
    makers: dict[str, Callable[[Link], Transport]] = {
        "engine": lambda _: Engine(), "kernel": lambda _: CopyKernel(), "gpu": Gpu, "nccl": lambda _: Nccl(),
        "host": lambda _: Host(),
    }  # fmt: skip
    if wanted in ("peer", "gpu") and not near:
        raise ClusterError(f"transport {wanted!r}: cuda:{a} has no peer access to cuda:{b}; use 'auto' or 'host'")
    names = {"auto": ("engine", "kernel") if near else ("host",), "peer": ("engine", "kernel")}.get(wanted, (wanted,))
    tried: list[Proven] = []
    corrupt: list[str] = []
    for name in names:
        link.transport = makers[name](link)
        found = prove(link)
        if found is None:
            corrupt.append(name)
        else:
            tried.append(found)
    if not tried and "host" not in names:
        link.transport = Host()
        found = prove(link)
        if found is not None:
            _warn(link, corrupt, "host")
            return LinkReport(found, (found,), tuple(corrupt)), makers["host"]
    if not tried:
        raise ClusterError(f"no value arrives from {link.source.device} at {link.target.device} as it was sent")
    if len(tried) == 2:
        engine, kernel = tried
        most = max((size for size in SIZES if kernel.us[size] < engine.us[size]), default=0)
        captured = max((size for size in SIZES if kernel.captured_us[size] < engine.captured_us[size]), default=0)
        link.transport = Peer(most, captured)
        both = Proven("peer", _time(link), _time_captured(link))
        return LinkReport(both, tuple(tried)), lambda _: Peer(most, captured)
    if corrupt:
        _warn(link, corrupt, tried[0].transport)
    return LinkReport(tried[0], tuple(tried), tuple(corrupt)), makers[tried[0].transport]


def _warn(link: Link, corrupt: Sequence[str], instead: str) -> None:
    through = "through the host" if instead == "host" else f"by {instead}"
    warnings.warn(
        f"what {' and '.join(corrupt)} moved from {link.source.device} to {link.target.device} did not arrive as it was sent; "
        f"values between them go {through}",
        TesseraWarning,
        stacklevel=5,
    )


_REPEATS = 10


def prove(link: Link) -> Proven | None:
    """Send random bytes of odd sizes at odd places, compare, and time SIZES. None where a byte arrived changed."""
    source = link.source
    with torch.no_grad(), torch.cuda.device(source.device):
        data = _pattern(link)
        ready = torch.cuda.current_stream().record_event()
        sent, got = [], []
        for size in (*_ODD, SIZES[-1]):
            for offset in (0, 7):
                part = data[offset : offset + size]
                with torch.cuda.stream(link.into):  # into new memory, and into memory that is there
                    room = torch.empty(size, dtype=torch.uint8, device=link.target.device) if offset else None
                sent.append(part)
                got.append(link.fetch(part, ready, room))
        for (arrived, done), part in zip(got, sent, strict=True):
            done.synchronize()
            if not torch.equal(arrived.cpu(), part.cpu()):
                return None
    return Proven(link.transport.name, _time(link), _time_captured(link))


def _pattern(link: Link) -> torch.Tensor:
    device = link.source.device
    generator = torch.Generator(device).manual_seed(20260410)
    return torch.randint(0, 256, (SIZES[-1] + 64,), dtype=torch.uint8, device=device, generator=generator)


def _time(link: Link) -> dict[int, float]:
    """µs of a copy by size, each behind the one before, as the host issues them."""
    us = {}
    with torch.no_grad(), torch.cuda.device(link.source.device):
        data = _pattern(link)
        torch.cuda.current_stream().synchronize()
        for size in SIZES:
            times = []
            for _ in range(3):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                link.into.record_event(begin)
                _chain(link, data[:size], begin)
                link.into.record_event(end)
                end.synchronize()
                times.append(begin.elapsed_time(end) * 1e3 / _REPEATS)
            us[size] = min(times)
    return us


def _time_captured(link: Link) -> dict[int, float]:
    """The same inside a captured graph; as the host issues them where a capture fails."""
    us = {}
    device = link.source.device
    with torch.no_grad(), torch.cuda.device(device):
        data = _pattern(link)
        torch.cuda.current_stream().synchronize()
        for size in SIZES:
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
            room = None
            if link.target.device != device:  # the graph's pool is of its own device alone
                with torch.cuda.stream(link.into):
                    room = torch.empty(size, dtype=torch.uint8, device=link.target.device)
                link.into.synchronize()
            link.busy.clear()
            try:
                with capturing(graph, stream):
                    _chain(link, data[:size], stream.record_event(), room)
                    for event in link.drain():
                        stream.wait_event(event)
            except Exception:
                torch.cuda.synchronize(device)
                return _time(link)
            times = []
            with torch.cuda.stream(stream):
                for _ in range(4):
                    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    begin.record()
                    graph.replay()
                    end.record()
                    end.synchronize()
                    times.append(begin.elapsed_time(end) * 1e3 / _REPEATS)
            us[size] = min(times[1:])
    return us


def _chain(link: Link, payload: torch.Tensor, done: torch.cuda.Event, room: torch.Tensor | None = None) -> None:
    for _ in range(_REPEATS):
        _, done = link.fetch(payload, done, room)
    link.into.wait_event(done)
