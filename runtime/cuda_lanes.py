"""Runs a :class:`Program` on CUDA lanes: GPUs, or slices of one.

One host thread issues the instructions of all lanes, each into its lane's streams; nothing waits for the GPU. Order between
lanes is made by events alone, where the program says so: a send records one behind what made the value, a receive lets the
lane's copy stream wait for it, copies into storage that the lane owns, and lets the compute stream wait for the copy. The
caller's current stream is the fork and the join: every lane starts behind what was enqueued there, and what the caller
enqueues next starts behind every lane.

Memory: a tensor belongs to the stream that it was allocated on. Where another stream uses it, ``record_stream`` tells the
allocator, so it is not handed out before that use is done. What a lane overwrites in place (state, and its replicas) first
waits for the copies that still read it.

On one GPU lanes share weights and constants, which nobody writes; state that a lane writes is replicated there too, since the
program orders only what it says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..passes.errors import ProgramError
from ..passes.ir import Free, Hold, KernelGraph, Out, Program, Recv, Run, Send, Signal, Wait, segment_values
from .codegen import Codegen, Compiled, constants, lookup
from .cpu_lanes import literal_outputs, outputs_apart, poison_tensor
from .cuda_streams import LaneStreams, lane_streams
from .replicas import Replica, Sighting, at_exit, own_copy, sight

ISSUING = threading.RLock()
"""Held while anything is enqueued on streams of lanes: executors share them, and a capture takes in what others enqueue."""


@dataclass(frozen=True)
class _Segment:
    name: str
    compiled: Compiled
    written: tuple[tuple[str, str], ...]
    kernels: tuple[str, ...]


@dataclass
class _Posted:
    """A value on its way: what the receiver copies, and the event behind what made it."""

    payload: Any
    ready: torch.cuda.Event


@dataclass
class _Issue:
    """One request while it is being issued."""

    envs: list[dict[str, Any]]
    seen: dict[str, Sighting]
    mail: dict[tuple[int, int, str], _Posted] = field(default_factory=dict)
    reading: list[dict[str, list[torch.cuda.Event]]] = field(default_factory=list)  # lane → storage → copies that read it
    copying: set[int] = field(default_factory=set)  # lanes whose copy streams were used
    written_replicas: list[tuple[int, str, int]] = field(default_factory=list)
    taken: set[tuple[int, int, str]] = field(default_factory=set)
    posted: int = 0


class CudaLaneExecutor:
    """Interprets one program. Call it as the CPU lanes' executor: with the graph's inputs in a list, which is emptied.

    Args:
        poison: fill freed and sent values with NaN, on the lane's stream, for tests.

    ``runs`` counts calls. Safe from several threads: requests are issued one after the other.
    """

    def __init__(
        self,
        graph: KernelGraph,
        program: Program,
        codegen: Codegen,
        *,
        poison: bool = False,
        progress: Callable[[Sequence[Any], str], Iterable[Any]] = lambda items, _: items,
    ) -> None:
        self.graph, self.program, self.poison = graph, program, poison
        self.pace = None
        self.runs = 0
        self.lanes: tuple[LaneStreams, ...] = lane_streams([lane.device for lane in program.lanes])
        devices = {s.device for s in self.lanes}
        if len(devices) > 1 and any(_baked_device(graph, d) for d in devices):
            raise ProgramError(
                "a program of several GPUs needs its segments lowered for each of them, which this version does not do"
            )
        self.home = next(i for i, _, instruction in program if isinstance(instruction, Out))
        self.segments: dict[tuple[int, int], _Segment] = {}
        wanted = [(lane, at, io) for lane in program.lanes for at, io in segment_values(graph, lane.instructions).items()]
        for lane, at, io in progress(wanted, "compiling segments"):
            run = lane.instructions[at]
            assert isinstance(run, Run)
            compiled = codegen.compile(graph, run.kernels, io.outputs)
            written = tuple(
                (graph.values[v].storage, v) for k in run.kernels for v in graph[k].outputs if graph.values[v].storage != v
            )
            self.segments[lane.index, at] = _Segment(run.segment, compiled, written, run.kernels)
        held = {i: instruction.values for i, _, instruction in program if isinstance(instruction, Hold)}
        mutated = set(graph.mutated)
        self.shared = {lane: tuple(v for v in values if self._shares(lane, v, mutated)) for lane, values in held.items()}
        self.replicas = {lane: {v: Replica() for v in values if v not in self.shared[lane]} for lane, values in held.items()}
        self._held = tuple(dict.fromkeys(v for values in held.values() for v in values))
        self._writers = {(lane, s) for (lane, _), segment in self.segments.items() for s, _ in segment.written}
        self._finish = codegen.compile(graph, [], [o for o in graph.outputs if o is not None])
        self._constants = constants(graph)
        self.literals = literal_outputs(graph)

    def _shares(self, lane: int, value: str, mutated: set[str]) -> bool:
        return value not in mutated and self.lanes[lane].device == self.lanes[self.home].device

    def __call__(self, args: list[Any]) -> list[Any]:
        inputs = dict(zip(self.graph.inputs, args, strict=True))
        args.clear()
        with ISSUING:
            results = self.issue(inputs)
            self.runs += 1
        given = iter(results)
        return [literal if name is None else next(given) for name, literal in zip(self.graph.outputs, self.literals, strict=True)]

    def issue(self, inputs: dict[str, Any]) -> list[Any]:
        """Enqueue one request behind the caller's current stream, and what comes next behind it; the outputs that are
        tensors."""
        home = self.lanes[self.home]
        current = torch.cuda.current_stream(home.device)
        hosts = {name: value for name, value in inputs.items() if not isinstance(value, torch.Tensor)}
        envs: list[dict[str, Any]] = [dict(hosts) for _ in self.lanes]
        envs[self.home] = {**self._constants, **inputs}
        issue = _Issue(envs, {v: sight(envs[self.home][v]) for v in self._held}, reading=[{} for _ in self.lanes])
        begin = current.record_event()
        for lane in self.lanes:
            lane.compute.wait_event(begin)
        try:
            self._run_all(issue)
            with torch.cuda.stream(home.compute):
                finished = self._finish.call([lookup(envs[self.home], name) for name in self._finish.inputs])
                finished = outputs_apart(self.graph, finished, inputs)
        finally:
            # Also when a segment fails: nothing may run on in memory that the caller gets back.
            for at, lane in enumerate(self.lanes):
                current.wait_event(lane.compute.record_event())
                if at in issue.copying:
                    current.wait_event(lane.copies.record_event())
        for lane_, value, use in issue.written_replicas:
            at_exit(inputs[value], partial(self.replicas[lane_][value].mark, use))
        for tensor in finished:
            _used_on(tensor, current)
        return finished

    # -- issuing

    def _run_all(self, issue: _Issue) -> None:
        """Each lane in turn, as far as what it waits for has been issued; the program has no deadlock."""
        at = [0] * len(self.lanes)
        lists = [lane.instructions for lane in self.program.lanes]
        while any(at[i] < len(lists[i]) for i in range(len(at))):
            moved, posted = False, issue.posted
            for lane, instructions in enumerate(lists):
                while at[lane] < len(instructions) and self._step(lane, at[lane], instructions[at[lane]], issue):
                    at[lane] += 1
                    moved = True
            if not moved and issue.posted == posted:
                raise ProgramError("the lanes wait for each other; verify() refuses such programs")
        for lane in self.replicas:
            if self.replicas[lane]:  # the next request may refresh a replica in place
                for storage in list(issue.reading[lane]):
                    self._settle(lane, storage, issue)

    def _step(self, lane: int, at: int, instruction: Any, issue: _Issue) -> bool:
        """Issue one instruction; False where it waits for a send that has not been issued."""
        env, streams, values = issue.envs[lane], self.lanes[lane], self.graph.values
        if isinstance(instruction, Run):
            segment = self.segments[lane, at]
            for storage, _ in segment.written:
                self._settle(lane, storage, issue)
            try:
                with torch.cuda.device(streams.device), torch.cuda.stream(streams.compute):
                    results = segment.compiled.call([lookup(env, name) for name in segment.compiled.inputs])
            except Exception as error:
                device = self.program.lanes[lane].device
                error.add_note(f"in segment {segment.name} ({' '.join(segment.kernels)}) on lane {lane} ({device})")
                raise
            env.update(zip(segment.compiled.outputs, results, strict=True))
            for storage, version in segment.written:
                env[version] = env[storage]
        elif isinstance(instruction, Send):
            # A rendezvous, as verify() assumes: only once the copy is issued can what comes next be ordered behind it.
            key = (lane, instruction.to, instruction.value)
            if key in issue.taken:
                issue.taken.remove(key)
                return True
            if key not in issue.mail:
                issue.mail[key] = _Posted(env[instruction.value], streams.compute.record_event())
                issue.posted += 1
            return False
        elif isinstance(instruction, Recv):
            posted = issue.mail.pop((instruction.source, lane, instruction.value), None)
            if posted is None:
                return False
            self._receive(lane, instruction, posted, issue)
            issue.taken.add((instruction.source, lane, instruction.value))
        elif isinstance(instruction, Signal):
            issue.mail[lane, instruction.to, f"signal {instruction.kernel}"] = _Posted(None, streams.compute.record_event())
        elif isinstance(instruction, Wait):
            posted = issue.mail.pop((instruction.source, lane, f"signal {instruction.kernel}"), None)
            if posted is None:
                return False
            streams.compute.wait_event(posted.ready)
        elif isinstance(instruction, Hold):
            self._hold(lane, instruction, issue)
        elif isinstance(instruction, Free):
            for value in instruction.values:
                if self.poison:
                    self._poison(lane, value, issue)
                del env[value]
        elif not isinstance(instruction, Out):
            raise ProgramError(f"CUDA lanes cannot execute {instruction.to_text()!r}")
        del values
        return True

    def _receive(self, lane: int, instruction: Recv, posted: _Posted, issue: _Issue) -> None:
        env, streams = issue.envs[lane], self.lanes[lane]
        storage = self.graph.values[instruction.value].storage
        payload = posted.payload
        if not isinstance(payload, torch.Tensor):
            streams.compute.wait_event(posted.ready)
            env[instruction.value] = payload
            return
        if storage == instruction.value:
            # Storage of its own, owned by the copy stream, so that the copy overlaps what the lane computes meanwhile.
            streams.copies.wait_event(posted.ready)
            issue.copying.add(lane)
            with torch.cuda.device(streams.device), torch.cuda.stream(streams.copies):
                target = own_copy(payload)
            done = streams.copies.record_event()
            _used_on(payload, streams.copies)
            _used_on(target, streams.compute)
            streams.compute.wait_event(done)
            env[instruction.value] = target
        else:
            # A new version of state that lives here: in place, behind everything that reads the old one.
            self._settle(lane, storage, issue)
            streams.compute.wait_event(posted.ready)
            with torch.cuda.device(streams.device), torch.cuda.stream(streams.compute):
                env[storage].copy_(payload, non_blocking=True)
            done = streams.compute.record_event()
            _used_on(payload, streams.compute)
            env[instruction.value] = env[storage]
        source = self.graph.values[instruction.value].storage
        issue.reading[instruction.source].setdefault(source, []).append(done)

    def _settle(self, lane: int, storage: str, issue: _Issue) -> None:
        """What the lane does next runs behind the copies that still read ``storage`` of it."""
        for event in issue.reading[lane].pop(storage, ()):
            self.lanes[lane].compute.wait_event(event)

    def _hold(self, lane: int, instruction: Hold, issue: _Issue) -> None:
        env, streams = issue.envs[lane], self.lanes[lane]
        home = issue.envs[self.home]
        for value in instruction.values:
            replica = self.replicas[lane].get(value)
            if replica is None:
                env[value] = home[value]
                continue
            with torch.cuda.device(streams.device), torch.cuda.stream(streams.compute):
                use = replica.bring(issue.seen[value], volatile=value in self.graph.mutated)
            env[value] = replica.tensor
            if (lane, value) in self._writers:
                issue.written_replicas.append((lane, value, use))

    def _poison(self, lane: int, value: str, issue: _Issue) -> None:
        env, streams = issue.envs[lane], self.lanes[lane]
        tensor = env[value]
        if not isinstance(tensor, torch.Tensor):
            return
        key = tensor.untyped_storage().data_ptr()
        held = [env[name] for name in (*self.graph.mutated, *self.graph.inputs) if isinstance(env.get(name), torch.Tensor)]
        others = [t for name, t in env.items() if name != value and isinstance(t, torch.Tensor)]
        if any(t.untyped_storage().data_ptr() == key for t in (*held, *others)):
            return
        self._settle(lane, value, issue)
        with torch.cuda.device(streams.device), torch.cuda.stream(streams.compute):
            poison_tensor(tensor)


def _used_on(value: Any, stream: torch.cuda.Stream) -> None:
    if isinstance(value, torch.Tensor) and value.is_cuda:  # a graph may also hold scalars on the host
        value.record_stream(stream)


def _baked_device(graph: KernelGraph, device: torch.device) -> bool:
    """Whether the graph's own metadata names another device than ``device``: its segments then run there and nowhere else."""
    for node in graph.module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type == "cuda" and (value.device.index or 0) != (device.index or 0):
            return True
    return False
