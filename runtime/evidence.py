"""A compiled piece of a graph → the bytes of the graph's values that it reads and writes, and how that is known.

The piece is called once on copies. Of each kernel that it launches (``launches.py``) the PTX is decided upon (``verdict``):

- INDEPENDENT: the slice interpreter says which bytes it touches, or, of large launches, one instrumented run;
- GUARDED: the interpreter, on the contents of the guarding buffers; what was found holds while these stay as they are;
- DEPENDENT, UNKNOWN, no PTX: the storages that it is given, whole; operators: the elements of the tensors that they are given.

Memory is followed by address: what lies in an input or in an output of the piece is told of that value, what was allocated in
between is dropped. A kernel that cannot be seen (C++ of Inductor's, an extension module) betrays itself by what it leaves behind:
where bytes are read or returned that nothing seen has written, nothing of the piece is called exact. A custom operator is
told by the launches seen inside of it; arguments that none of them touches are told by its schema. One that reads or overwrites
the same argument by a second kernel, which cannot be seen, is not found out.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..passes.ir import KernelGraph
from ..ptx_tools import Buffer, Footprint, Intervals, Module, PtxError, Verdict, footprint, parse, verdict
from ..ptx_tools.footprints import BufferFootprint
from ..ptx_tools.launch import VARIABLES_BASE
from .codegen import Codegen, Compiled, lookup
from .copies import copies, storage_bytes
from .dryrun import Arena, DryRunError, recording
from .launches import Extent, Launch, Refused, Tiles, capturing_launches

NOTHING = Intervals.of(())

#: Threads of a launch from which on an instrumented run, which has to be assembled first, is tried before the interpreter.
MANY_THREADS = 1 << 19
#: Threads of a launch from which on it is not interpreted, which would take more than some seconds.
MOST_THREADS = 1 << 24
#: Bytes of storages that are copied for an instrumented run.
MOST_COPIED = 1 << 32
_KEPT = 4096


@dataclass(frozen=True)
class LaunchRecord:
    """One launch in short. verdict: as ``ptx_tools`` gives it, "" without PTX. how: ``interpreted``, ``recorded``, ``remembered``
    (an equal launch), or ``""`` where there is no footprint, and ``reason`` says why. seconds: what finding it took."""

    name: str
    kind: str
    digest: str
    verdict: str
    grid: tuple[int, int, int]
    how: str
    reason: str
    seconds: float


@dataclass(frozen=True)
class Evidence:
    """What one call of a piece touched.

    footprint: buffers are named after values of the graph, byte 0 is the first byte of the value's tensor; None where the piece
    failed. exact: the values that only launches with a footprint touched; of the others, and of a piece that was not run, the
    footprint is what may be touched at most if schemas are right. guards: the values whose contents it holds for. reason: why
    not all is exact. seconds: what finding it took, the call included.
    """

    footprint: Footprint | None
    exact: frozenset[str] = frozenset()
    launches: tuple[LaunchRecord, ...] = ()
    guards: tuple[str, ...] = ()
    seconds: float = 0.0
    reason: str = ""

    @property
    def digests(self) -> frozenset[str]:
        """Hashes of the binaries that were launched; operators have none."""
        return frozenset(launch.digest for launch in self.launches if launch.digest)

    @property
    def certain(self) -> Footprint | None:
        """The footprint of the exact values alone, which is what ``refine`` may rely on; None where there is none."""
        found = self.footprint
        return None if found is None else replace(found, buffers=tuple(b for b in found.buffers if b.name in self.exact))

    def to_text(self) -> str:
        lines = [f"{launch.kind} {launch.name} {launch.verdict} {launch.how or launch.reason}" for launch in self.launches]
        for buffer in () if self.footprint is None else self.footprint.buffers:
            known = "exactly" if buffer.name in self.exact else "at most"
            lines.append(f"{buffer.name}: {known} {buffer.reads.nbytes} B read, {buffer.writes.nbytes} B written")
        return "\n".join([*lines, *([self.reason] if self.reason else [])])


def reads_within(evidence: Evidence, value: str, intervals: Intervals, watched: Collection[str] = ()) -> bool:
    """Whether it is known that the piece reads no byte of ``value`` outside of ``intervals``.

    watched: values whose contents the caller sees to; what holds only while others stay as they are is not known.
    """
    found = evidence.footprint
    if found is None or value not in evidence.exact or not set(evidence.guards) <= set(watched):
        return False
    return all(buffer.reads.issubset(intervals) for buffer in found.buffers if buffer.name == value)


def same(evidence: Evidence, other: Evidence) -> bool:
    """Whether both are of the same binaries, launched in the same order and on grids of the same size."""
    return [(n.name, n.digest, n.grid) for n in evidence.launches] == [(n.name, n.digest, n.grid) for n in other.launches]


def gather(
    graph: KernelGraph,
    kernels: Sequence[str],
    outputs: Sequence[str],
    codegen: Codegen,
    values: Mapping[str, Any],
    device: torch.device | None = None,
    *,
    invented: bool,
) -> Evidence:
    """Evidence of the piece that ``codegen`` makes of ``kernels``.

    Args:
        values: the values that the kernels read, by name; they are copied, never launched on.
        device: as in ``Codegen.compile``; the values lie there.
        invented: the values are no real ones. Then no kernel is launched whose accesses depend on data.

    Raises nothing that the piece raises: that is the ``reason`` of evidence without footprint.
    """
    started = time.perf_counter()
    compiled = codegen.compile(graph, kernels, outputs, device)
    given = {name: lookup(dict(values), name) for name in compiled.inputs}
    key = _key(compiled, given, invented)
    places = {name: f"in:{i}" for i, name in enumerate(compiled.inputs)}
    places |= {name: f"out:{i}" for i, name in enumerate(compiled.outputs)}
    with _lock:
        held = _known.setdefault(codegen, {}).get(key)
    if held is not None:
        return replace(_renamed(held[1], {place: name for name, place in places.items()}), seconds=time.perf_counter() - started)
    dependent = next((k for k in kernels if invented and (graph[k].data_dependent or graph[k].needs_data)), None)
    if dependent is not None:
        found = _by_schema(graph, kernels, given, outputs, f"{dependent} depends on data, and there are none")
        return replace(found, seconds=time.perf_counter() - started)
    if not compiled.outputs and not compiled.writes and not kernels:
        return Evidence(Footprint("", (), NOTHING, NOTHING), frozenset(), seconds=time.perf_counter() - started)
    own = copies(given)
    witness = _Witness([v for v in own.values() if isinstance(v, torch.Tensor) and v.layout == torch.strided])
    try:
        with torch.no_grad(), capturing_launches(witness.see, witness.allow if invented else None) as seen:
            results = compiled.call([own[name] for name in compiled.inputs])
            _synchronise(own.values())
    except Refused as refusal:
        found = _by_schema(graph, kernels, given, outputs, str(refusal))
        return replace(found, seconds=time.perf_counter() - started)
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0]}"
        return Evidence(None, reason=reason, seconds=time.perf_counter() - started)
    made = dict(zip(compiled.outputs, results, strict=True))
    evidence = _assemble(kernels, own, made, [t for found in seen for t in found])
    if not evidence.guards:
        with _lock:
            _known[codegen][key] = (compiled.call, _renamed(evidence, places))
    return replace(evidence, seconds=time.perf_counter() - started)


_lock = threading.Lock()
#: By code generator, which gives equal pieces one callable: evidence of what it has made, values named by their place.
_known: weakref.WeakKeyDictionary[Codegen, dict[Any, tuple[Any, Evidence]]] = weakref.WeakKeyDictionary()


def _key(compiled: Compiled, given: Mapping[str, Any], invented: bool) -> Any:
    shapes = tuple(
        (tuple(v.shape), tuple(v.stride()), v.device) if isinstance(v, torch.Tensor) else (type(v), v) for v in given.values()
    )
    return id(compiled.call), shapes, invented


def _renamed(evidence: Evidence, names: Mapping[str, str]) -> Evidence:
    found = evidence.footprint
    return replace(
        evidence,
        footprint=None if found is None else found.renamed(names),
        exact=frozenset(names.get(n, n) for n in evidence.exact),
    )


def _synchronise(values: Iterable[Any]) -> None:
    for device in {v.device for v in values if isinstance(v, torch.Tensor) and v.is_cuda}:
        torch.cuda.synchronize(device)


def _by_schema(
    graph: KernelGraph, kernels: Sequence[str], given: Mapping[str, Any], outputs: Sequence[str], reason: str
) -> Evidence:
    """What the kernels may touch at most if they do what their schemas say."""
    written = {w for k in kernels for w in graph[k].writes}
    buffers = []
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            whole = _span(value).shift(-value.data_ptr())
            buffers.append(_buffer(name, whole, whole, whole if name in written else NOTHING))
    for name in outputs:
        whole = Intervals.of([(0, graph.values[name].bytes)]) if name in graph.values else NOTHING
        buffers.append(_buffer(name, whole, NOTHING, whole))
    return Evidence(Footprint("", tuple(buffers), NOTHING, NOTHING), reason=reason)


def _buffer(name: str, whole: Intervals, reads: Intervals, writes: Intervals) -> BufferFootprint:
    return BufferFootprint(name, 0, int(whole.ends[-1]) if whole else 0, reads, writes)


def _span(tensor: torch.Tensor) -> Intervals:
    """From the first byte of the first element to the end of the last, by address."""
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return NOTHING
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return Intervals.of([(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())])


# -- one launch


@dataclass
class Touch:
    """What one launch touched, by address. ``exact``: that is its footprint; else it may touch that at most.

    guards: the bytes whose contents were used; most: what it may read and write where these are not known.
    """

    record: LaunchRecord
    reads: Intervals
    writes: Intervals
    exact: bool
    guards: Intervals = NOTHING
    most: tuple[Intervals, Intervals] = (NOTHING, NOTHING)


@dataclass
class _Witness:
    """Turns launches into touches as they are made, while the tensors are there. ``inputs``: what the piece is given."""

    inputs: Sequence[torch.Tensor]

    def allow(self, name: str, ptx: str | None) -> None:
        """Keeps kernels from being launched on invented data where that decides their accesses."""
        if ptx is None:
            raise Refused(f"{name} has no PTX that would show whether it depends on data, and there are none")
        decided = _decided(ptx, name)
        if isinstance(decided, str) or decided[1].data_dependent is not False:
            shown = decided if isinstance(decided, str) else str(decided[1])
            raise Refused(f"{name} is {shown}, and there are no data")

    def see(self, launch: Launch) -> list[Touch]:
        return _library(launch) if launch.kind == "library" else [touch(self._known(launch))]

    def _known(self, launch: Launch) -> Launch:
        """Addresses that are passed as numbers as what they point to, where they point into an input."""
        args, tensors = list(launch.args), dict(launch.tensors)
        for place, (name, value) in enumerate(args):
            if not isinstance(value, int) or launch.kind != "cuda":
                continue
            for tensor in self.inputs:
                start, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
                if start <= value < start + size:
                    tensors[name] = storage_bytes(tensor)[value - start :]
                    args[place] = name, Extent.of(tensors[name])
                    break
        return replace(launch, args=tuple(args), tensors=tensors)


@functools.lru_cache(maxsize=128)
def _decided(ptx: str, name: str) -> tuple[Module, Verdict] | str:
    try:
        module = parse(ptx, name=f"<{name}>")
        return module, verdict(module, name)
    except PtxError as error:
        return str(error)


def _library(launch: Launch) -> list[Touch]:
    """An operator: the elements of its tensors, but for those arguments that launches inside of it show."""
    inside: list[Touch] = [touch for touches in launch.inside for touch in touches]
    told = [t for t in inside if t.record.kind != "library"]
    reads, writes = NOTHING, NOTHING
    for parameter, extent in launch.args:
        if not isinstance(extent, Extent):
            continue
        part = extent.intervals()
        written = launch.written is not None and parameter in launch.written
        if any(t.writes & part for t in told) or (not written and any(t.reads & part for t in told)):
            continue
        if not parameter.startswith("result_"):
            reads = reads | part
        if written:
            writes = writes | part
    record = LaunchRecord(launch.name, "library", "", "", launch.grid, "", launch.opaque or "an operator", 0.0)
    return [*inside, Touch(record, reads, writes, False)]


def touch(launch: Launch) -> Touch:
    """What the launch of a kernel touched: its footprint, or the storages that it is given. Its tensors must be alive."""
    started = time.perf_counter()
    shown, how, reason = "", "", launch.opaque
    found: tuple[Intervals, Intervals] | None = None
    guards = NOTHING
    if launch.ptx is not None and not launch.opaque:
        decided = _decided(launch.ptx, launch.name)
        if isinstance(decided, str):
            reason = decided
        else:
            shown = str(decided[1].kind)
            try:
                if decided[1].kind == "INDEPENDENT":
                    found, how = _independent(launch, decided[0])
                elif decided[1].kind == "GUARDED":
                    found, guards = _guarded(launch, *decided)
                    how = "interpreted"
                else:
                    reason = str(decided[1])
            except (PtxError, DryRunError, ValueError) as error:
                reason = str(error)
    reads, writes = NOTHING, NOTHING
    for parameter, value in launch.args:
        extent = value.extent if isinstance(value, Tiles) else value
        if isinstance(extent, Extent):
            reads = reads | extent.whole()
            if launch.written is None or parameter in launch.written:
                writes = writes | extent.whole()
    record = LaunchRecord(launch.name, launch.kind, launch.digest, shown, launch.grid, how, reason, time.perf_counter() - started)
    return Touch(record, *(found or (reads, writes)), found is not None, guards, (reads, writes))


def _block(launch: Launch, module: Module) -> Any:
    """Threads of a block: what the kernel requires where it says so (Triton may add warps), else what it was launched with."""
    for directive in module.kernel(launch.name).tuning:
        if directive.name == ".reqntid":
            return tuple(int(t) for t in directive.tokens if t != ",")
    return launch.block


def _independent(launch: Launch, module: Module) -> tuple[tuple[Intervals, Intervals], str]:
    layout = _layout(launch)
    with _lock:
        held = _launched.get(layout)
    starts = _storages(launch)
    if held is not None:
        return _placed(held, starts), "remembered"
    threads = math.prod(launch.grid) * _threads(_block(launch, module))
    ways = [("interpreted", _interpret), ("recorded", _record)]
    if threads >= MANY_THREADS:
        ways.reverse()
    errors = []
    for how, way in ways:
        try:
            found = way(launch, module)
        except (PtxError, DryRunError, ValueError, torch.OutOfMemoryError) as error:
            errors.append(f"not {how}: {error}")
            continue
        with _lock:
            relative = _relative(found, starts)
            if relative is not None:
                _launched[layout] = relative
                while len(_launched) > _KEPT:
                    _launched.popitem(last=False)
        return found, how
    raise PtxError("; ".join(errors))


def _interpret(
    launch: Launch, module: Module, guards: Collection[str] = (), contents: Mapping[int, Any] | None = None
) -> tuple[Intervals, Intervals]:
    """By address, from the slice interpreter. contents: of the storages of ``guards``, by address."""
    params = [p.name for p in module.kernel(launch.name).params or ()]
    if len(launch.args) > len(params):
        raise PtxError(f"{launch.name} has {len(params)} parameters and was launched with {len(launch.args)}")
    threads = math.prod(launch.grid) * _threads(_block(launch, module))
    if threads > MOST_THREADS:
        raise PtxError(f"{threads} threads are more than are interpreted")
    args: dict[str, Any] = {}
    extra: dict[str, Buffer] = {}
    for param, (_, value) in zip(params, launch.args, strict=False):
        if not isinstance(value, Extent):
            args[param] = value.map if isinstance(value, Tiles) else value
            continue
        start, size = value.storage
        data = None
        if param in guards and contents is not None:
            data = contents[start][value.address - start :]
        args[param] = Buffer(value.address, start + size - value.address, data)
        if value.address > start:  # A view is a pointer into its storage, and a kernel may go back from there.
            extra[f"before {param}"] = Buffer(start, value.address - start)
    found = footprint(
        module, launch.name, launch.grid, _block(launch, module), args, shared_bytes=launch.shared_bytes, extra=extra
    )
    reads, writes = found.outside_reads, found.outside_writes
    for buffer in found.buffers:
        if buffer.addr >= VARIABLES_BASE and buffer.name not in args and buffer.name not in extra:
            if buffer.writes:
                raise PtxError(f"{launch.name} keeps state in the variable {buffer.name}")
            continue
        reads, writes = reads | buffer.reads.shift(buffer.addr), writes | buffer.writes.shift(buffer.addr)
    return reads, writes


def _guarded(launch: Launch, module: Module, decided: Verdict) -> tuple[tuple[Intervals, Intervals], Intervals]:
    params = [p.name for p in module.kernel(launch.name).params or ()]
    contents: dict[int, Any] = {}
    guards = NOTHING
    for param, (name, value) in zip(params, launch.args, strict=False):
        if param not in decided.buffers:
            continue
        tensor = launch.tensors.get(name)
        if not isinstance(value, Extent) or tensor is None:
            raise PtxError(f"{launch.name} is guarded by {param}, which is no tensor that is known")
        contents[value.storage[0]] = storage_bytes(tensor).cpu().numpy()
        guards = guards | Intervals.of([(value.address, value.storage[0] + value.storage[1])])
    found = _interpret(launch, module, decided.buffers, contents)
    if found[1] & guards:
        raise PtxError(f"{launch.name} writes what guards it")
    return found, guards & found[0]


def _record(launch: Launch, module: Module) -> tuple[Intervals, Intervals]:
    """By address, from one instrumented run on copies of the storages."""
    if launch.again is None or not launch.tensors:
        raise DryRunError("it cannot be launched again")
    owners: dict[int, torch.Tensor] = {}
    for tensor in launch.tensors.values():
        if not tensor.is_cuda:
            raise DryRunError(f"an argument lies on {tensor.device}")
        if tensor.untyped_storage().nbytes():
            owners.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    total = sum(t.untyped_storage().nbytes() for t in owners.values())
    if total > MOST_COPIED:
        raise DryRunError(f"its storages hold {total} bytes, more than are copied")
    arena = Arena({str(start): storage_bytes(tensor) for start, tensor in owners.items()})
    values: list[Any] = []
    for name, value in launch.args:
        if not isinstance(value, Extent):
            values.append(value)
            continue
        start, tensor = value.storage[0], launch.tensors[name]
        memory = arena[str(start)] if str(start) in arena.views else arena.memory[:0]
        size = tensor.element_size()
        elements = memory[: memory.numel() // size * size].view(tensor.dtype)
        at = int(elements.storage_offset()) + int(tensor.storage_offset())
        values.append(torch.as_strided(elements, tensor.shape, tensor.stride(), at))
    with recording(
        launch.kernel, arena, ptx=launch.ptx, name=launch.name, threads=_threads(_block(launch, module)),
        shared_bytes=launch.shared_bytes,
    ) as record:  # fmt: skip
        launch.again(values)
    reads, writes = NOTHING, NOTHING
    for buffer in record.footprint.buffers:
        reads = reads | buffer.reads.shift(int(buffer.name))
        writes = writes | buffer.writes.shift(int(buffer.name))
    if not record.footprint.complete:
        raise DryRunError(f"{launch.name} touches more than the storages that it is given")
    return reads, writes


def _threads(block: Any) -> int:
    return math.prod(block) if isinstance(block, tuple) else int(block)


_launched: OrderedDict[Any, tuple[tuple[Intervals, Intervals], ...]] = OrderedDict()


def _storages(launch: Launch) -> list[tuple[int, int]]:
    """Address and bytes of the storages that a launch is given, each once, in the order of the parameters."""
    extents = (v.extent if isinstance(v, Tiles) else v for _, v in launch.args)
    return list(dict.fromkeys(e.storage for e in extents if isinstance(e, Extent)))


def _layout(launch: Launch) -> Any:
    """Equal for launches whose footprints are equal but for where their storages lie."""
    storages = _storages(launch)
    args = tuple(
        (storages.index(v.storage), v.address - v.storage[0], v.address % 256)
        if isinstance(v, Extent)
        else (storages.index(v.extent.storage), replace(v.map, addr=v.map.addr - v.extent.storage[0]))
        if isinstance(v, Tiles)
        else (type(v), v)
        for _, v in launch.args
    )
    ptx = hashlib.sha256((launch.ptx or "").encode()).hexdigest()
    return ptx, launch.name, launch.grid, launch.block, launch.shared_bytes, args, tuple(size for _, size in storages)


def _relative(
    found: tuple[Intervals, Intervals], storages: Sequence[tuple[int, int]]
) -> tuple[tuple[Intervals, Intervals], ...] | None:
    """Per storage, from its start; None where more was touched."""
    parts = []
    for start, size in storages:
        whole = Intervals.of([(start, start + size)])
        parts.append(((found[0] & whole).shift(-start), (found[1] & whole).shift(-start)))
    everything = Intervals.of((s, s + n) for s, n in storages)
    return tuple(parts) if found[0].issubset(everything) and found[1].issubset(everything) else None


def _placed(held: Sequence[tuple[Intervals, Intervals]], storages: Sequence[tuple[int, int]]) -> tuple[Intervals, Intervals]:
    reads, writes = NOTHING, NOTHING
    for (r, w), (start, _) in zip(held, storages, strict=True):
        reads, writes = reads | r.shift(start), writes | w.shift(start)
    return reads, writes


# -- the piece


def _assemble(kernels: Sequence[str], given: Mapping[str, Any], made: Mapping[str, Any], touches: Sequence[Touch]) -> Evidence:
    inputs = {name: v for name, v in given.items() if isinstance(v, torch.Tensor)}
    outputs = {name: v for name, v in made.items() if isinstance(v, torch.Tensor)}
    outside = Intervals.of(pair for value in inputs.values() for pair in _span(value))  # all that was there before
    written, reads, doubtful, guards = NOTHING, NOTHING, NOTHING, NOTHING
    maybe_reads, maybe_writes = NOTHING, NOTHING
    reasons: dict[str, None] = {}
    unseen = False
    records = []
    for touch in touches:
        if touch.guards - outside or touch.guards & (written | maybe_writes):
            # What it was guarded by is no input as it was given, so nobody can watch it.
            record = replace(touch.record, how="", reason="what guards it is made in the same piece")
            touch = Touch(record, *touch.most, False)
        records.append(touch.record)
        if touch.exact:
            unknown = touch.reads - outside - written - maybe_writes
            if unknown:
                unseen = True
                reasons[f"{touch.record.name} reads {unknown.nbytes} bytes that were written by nothing that was seen"] = None
            reads = reads | (touch.reads - written)
            written = written | touch.writes
            guards = guards | touch.guards
            # Memory of the piece's own: what becomes of it is what was written last.
            doubtful = doubtful - (touch.writes - outside)
        elif touch.reads or touch.writes:
            reasons[f"{touch.record.name}: {touch.record.reason}"] = None
            maybe_reads, maybe_writes = maybe_reads | touch.reads, maybe_writes | touch.writes
            doubtful = doubtful | touch.reads | touch.writes
    for name, value in outputs.items():
        missing = Extent.of(value).intervals() - outside - written - maybe_writes if value.layout == torch.strided else NOTHING
        if missing:
            unseen = True
            reasons[f"{missing.nbytes} bytes of {name} were written by nothing that was seen"] = None
    buffers, exact, watched = [], set(), []
    library = any(not touch.exact for touch in touches)
    for name, value in {**inputs, **outputs}.items():
        span = _span(value)
        base = value.data_ptr() if span else 0
        # What is read of memory that the piece made was put there by the piece.
        r, w = (reads | maybe_reads) & span & outside, (written | maybe_writes) & span
        buffers.append(_buffer(name, span.shift(-base), r.shift(-base), w.shift(-base)))
        touched = bool(r or w)
        if not unseen and not doubtful & span and (touched or not library) and value.layout == torch.strided:
            exact.add(name)
        if name in inputs and guards & span:
            watched.append(name)
    names = tuple(watched)
    found = Footprint(" ".join(kernels), tuple(buffers), NOTHING, NOTHING, names)
    return Evidence(found, frozenset(exact), tuple(records), names, reason="; ".join(reasons))
