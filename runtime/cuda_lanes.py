"""Runs a :class:`Program` on CUDA lanes: GPUs, or slices of one.

One host thread issues the instructions of all lanes, each into its lane's stream; nothing waits for the GPU. Order between
lanes is made by events alone, where the program says so: a send records one behind what made the value, and a receive copies
behind it on the link between the two lanes (``transports.py``), into storage that the receiver owns; the receiver's kernels
wait for the copy. The caller's current stream is the fork and the join: every lane starts behind what was enqueued there, and
what the caller enqueues next starts behind every lane.

Memory: a tensor belongs to the stream that it was allocated on. Where another stream uses it, ``record_stream`` tells the
allocator, so it is not handed out before that use is done. What a lane overwrites in place (state, and its replicas) first
waits for the copies that still read it.

On one GPU lanes share weights and constants, which nobody writes; state that a lane writes is replicated there too, since the
program orders only what it says. Another GPU has replicas of all that its kernels read, and segments lowered for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..passes import torch_compat
from ..passes.cluster import Cluster
from ..passes.errors import ProgramError
from ..passes.ir import Free, Hold, KernelGraph, Out, Profile, Program, Recv, Run, Send, Signal, Wait, segment_values
from .codegen import Codegen, Compiled, constants, lookup
from .cpu_lanes import literal_outputs, outputs_apart, poison_tensor
from .cuda_pacing import CudaPace
from .cuda_streams import ISSUING, LaneStreams, apart, lane_streams
from .replicas import Replica, Sighting, at_exit, overlaps, sight
from .segment_graphs import Slot, copies_of
from .transports import Link, make_link, used_on


@dataclass(frozen=True)
class _Segment:
    name: str
    compiled: Compiled
    written: tuple[tuple[str, str], ...]
    kernels: tuple[str, ...]


@dataclass
class Posted:
    """A value on its way: what the receiver copies, and the event behind what made it."""

    payload: Any
    ready: torch.cuda.Event


@dataclass
class Issue:
    """One request while it is being issued."""

    envs: list[dict[str, Any]]
    seen: dict[str, Sighting]
    mail: dict[tuple[int, int, str], Posted] = field(default_factory=dict)
    reading: list[dict[str, list[torch.cuda.Event]]] = field(default_factory=list)  # lane → storage → copies that read it
    used: set[tuple[int, int]] = field(default_factory=set)  # links, by lanes
    slot: Slot | None = None
    held: Mapping[tuple[int, str], torch.Tensor] | None = None  # replicas that were brought already, by lane and value
    written_replicas: list[tuple[int, str, int]] = field(default_factory=list)
    taken: set[tuple[int, int, str]] = field(default_factory=set)
    posted: int = 0


class CudaLaneExecutor:
    """Interprets one program. Call it as the CPU lanes' executor: with the graph's inputs in a list, which is emptied.

    Args:
        poison: fill freed and sent values with NaN, on the lane's stream, for tests.
        lanes: the slices that stand for the program's devices, where those are modelled ones.
        transport: how values cross, see ``transports.py``.
        slots: capture each segment as a CUDA graph, in as many slots in turn; 0: none. See ``segment_graphs.py``.
        pace: times, devices and factor of an emulation on one GPU, see ``cuda_pacing.py``.

    ``runs`` counts calls. Safe from several threads: requests are issued one after the other.
    """

    def __init__(
        self,
        graph: KernelGraph,
        program: Program,
        codegen: Codegen,
        *,
        poison: bool = False,
        lanes: Sequence[str] | None = None,
        transport: str = "auto",
        slots: int = 0,
        pace: tuple[Profile, Cluster, float] | None = None,
        progress: Callable[[Sequence[Any], str], Iterable[Any]] = lambda items, _: items,
    ) -> None:
        self.graph, self.program, self.poison = graph, program, poison
        self.runs = 0
        self.lanes: tuple[LaneStreams, ...] = lane_streams(lanes or [lane.device for lane in program.lanes])
        self.pace: CudaPace | None = None
        if pace is not None:
            self.pace = apart(lambda: CudaPace(graph, program, *pace, self.lanes[0].device))
        self.home = next(i for i, _, instruction in program if isinstance(instruction, Out))
        self.links: dict[tuple[int, int], Link] = {
            (source, lane): apart(partial(make_link, self.lanes[source], self.lanes[lane], transport))
            for source, lane in sorted({(i.source, lane) for lane, _, i in program if isinstance(i, Recv)})
        }
        self.segments: dict[tuple[int, int], _Segment] = {}
        wanted = [(lane, at, io) for lane in program.lanes for at, io in segment_values(graph, lane.instructions).items()]
        for lane, at, io in progress(wanted, "compiling segments"):
            run = lane.instructions[at]
            assert isinstance(run, Run)
            compiled = codegen.compile(graph, run.kernels, io.outputs, device=self.lanes[lane.index].device)
            written = tuple(
                (graph.values[v].storage, v) for k in run.kernels for v in graph[k].outputs if graph.values[v].storage != v
            )
            self.segments[lane.index, at] = _Segment(run.segment, compiled, written, run.kernels)
        held = {i: instruction.values for i, _, instruction in program if isinstance(instruction, Hold)}
        mutated = set(graph.mutated)
        self.shared = {lane: tuple(v for v in values if self._shares(lane, v, mutated)) for lane, values in held.items()}
        self.replicas = {
            lane: {v: Replica(self.lanes[lane].device) for v in values if v not in self.shared[lane]}
            for lane, values in held.items()
        }
        self._held = tuple(dict.fromkeys(v for values in held.values() for v in values))
        self._writers = {(lane, s) for (lane, _), segment in self.segments.items() for s, _ in segment.written}
        self._finish = codegen.compile(graph, [], [o for o in graph.outputs if o is not None])
        self._constants = constants(graph)
        self.reasons: dict[str, str] = {}
        views = [s for s in graph.output_storages if s is not None and s in graph.inputs]
        if slots and views:
            self.reasons["all"] = f"an output is a view of input {views[0]}"
        self._slots = [Slot(self.reasons) for _ in range(0 if views else slots)]
        self._fresh = tuple(v for v in graph.inputs if not graph.resident(v))
        if self._slots:
            nodes = {n.name: n for n in graph.module.graph.nodes}
            for segment in self.segments.values():
                if any(graph[k].effect for k in segment.kernels):
                    self.reasons[segment.name] = "a kernel has effects"
                elif any(asks_the_host(nodes[n]) for k in segment.kernels for n in graph[k].nodes):
                    self.reasons[segment.name] = "the host needs a value that is computed on the GPU"
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

    @property
    def replays(self) -> int:
        """Of segments."""
        return sum(slot.replays for slot in self._slots)

    def bring(self, inputs: dict[str, Any]) -> tuple[dict[tuple[int, str], torch.Tensor], list[tuple[int, str, int]]]:
        """Make all replicas current on their lanes' streams, between what the caller has enqueued and what it enqueues next.

        Returns the replicas by lane and value, and those that the program overwrites with the number of this use.
        """
        held: dict[tuple[int, str], torch.Tensor] = {}
        written: list[tuple[int, str, int]] = []
        if not any(self.replicas.values()):
            return held, written
        current = torch.cuda.current_stream(self.lanes[self.home].device)
        begin = current.record_event()
        for lane, replicas in self.replicas.items():
            streams = self.lanes[lane]
            streams.compute.wait_event(begin)
            with torch.cuda.device(streams.device), torch.cuda.stream(streams.compute):
                for value, replica in replicas.items():
                    source = self._constants[value] if value in self._constants else inputs[value]
                    use = replica.bring(sight(source), volatile=value in self.graph.mutated)
                    assert replica.tensor is not None
                    held[lane, value] = replica.tensor
                    if (lane, value) in self._writers:
                        written.append((lane, value, use))
            current.wait_event(streams.compute.record_event())
        return held, written

    def mark(self, written: Sequence[tuple[int, str, int]], inputs: dict[str, Any]) -> None:
        """At the exit of the call, replicas that were overwritten as their source was are current."""
        for lane, value, use in written:
            at_exit(inputs[value], partial(self.replicas[lane][value].mark, use))

    def issue(self, inputs: dict[str, Any], held: Mapping[tuple[int, str], torch.Tensor] | None = None) -> list[Any]:
        """Enqueue one request behind the caller's current stream, and what comes next behind it; the outputs that are
        tensors.

        held: replicas that were brought already.
        """
        home = self.lanes[self.home]
        current = torch.cuda.current_stream(home.device)
        slot = self._slots[self.runs % len(self._slots)] if self._slots else None
        if slot is not None and torch.cuda.is_current_stream_capturing():  # the caller's own graph takes the kernels as they are
            slot = None
        if slot is not None and (reason := unfit(inputs)):
            self.reasons.setdefault(reason, reason)
            slot = None
        if slot is not None:
            return self._in_slot(slot, inputs, current)
        return self._issue(inputs, inputs, current, None, held)

    def _in_slot(self, slot: Slot, inputs: dict[str, Any], current: torch.cuda.Stream) -> list[Any]:
        for event in slot.done:
            current.wait_event(event)
        mine = dict(inputs)
        for name in self._fresh:
            value = inputs[name]
            if isinstance(value, torch.Tensor):
                mine[name] = slot.buffer(name, value, value.device)
                mine[name].copy_(value, non_blocking=True)
                used_on(mine[name], current)
        results = self._issue(mine, inputs, current, slot, None)
        for name in self.graph.mutated:
            if name in self._fresh:
                inputs[name].copy_(mine[name], non_blocking=True)
        finished = copies_of(results)()
        slot.done = [current.record_event()]
        return finished

    def _issue(
        self, inputs: dict[str, Any], given: dict[str, Any], current: torch.cuda.Stream, slot: Slot | None,
        held: Mapping[tuple[int, str], torch.Tensor] | None,
    ) -> list[Any]:  # fmt: skip
        """inputs: as the kernels read them; given: as the caller passed them."""
        home = self.lanes[self.home]
        hosts = {name: value for name, value in inputs.items() if not isinstance(value, torch.Tensor)}
        envs: list[dict[str, Any]] = [dict(hosts) for _ in self.lanes]
        envs[self.home] = {**self._constants, **inputs}
        passed = {**self._constants, **given}
        seen = {} if held is not None else {v: sight(passed[v]) for v in self._held}
        issue = Issue(envs, seen, reading=[{} for _ in self.lanes], slot=slot, held=held)
        begin = current.record_event()
        for lane in self.lanes:
            lane.compute.wait_event(begin)
        if self.pace is not None:
            self.pace.begin(self.lanes, self.home)
        try:
            self._run_all(issue)
            with torch.cuda.stream(home.compute):
                finished = self._finish.call([lookup(envs[self.home], name) for name in self._finish.inputs])
                finished = outputs_apart(self.graph, finished, inputs)
        except BaseException:
            # Nothing may run on in memory that the caller gets back. An invalidated capture takes no more events.
            with contextlib.suppress(Exception):
                self._join(current, issue)
            raise
        self._join(current, issue)
        if self.pace is not None:
            with torch.cuda.stream(current):
                self.pace.end()
        self.mark(issue.written_replicas, given)
        for tensor in finished:
            used_on(tensor, current)
        return finished

    def _join(self, current: torch.cuda.Stream, issue: Issue) -> None:
        moved = [event for pair in issue.used for event in self.links[pair].drain()]
        for lane in self.lanes:
            current.wait_event(lane.compute.record_event())
        for event in moved:
            current.wait_event(event)

    # -- issuing

    def _run_all(self, issue: Issue) -> None:
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

    def _step(self, lane: int, at: int, instruction: Any, issue: Issue) -> bool:
        """Issue one instruction; False where it waits for a send that has not been issued."""
        env, streams, values = issue.envs[lane], self.lanes[lane], self.graph.values
        if isinstance(instruction, Run):
            segment = self.segments[lane, at]
            for storage, _ in segment.written:
                self._settle(lane, storage, issue)
            try:
                given = [lookup(env, name) for name in segment.compiled.inputs]
                if issue.slot is not None:
                    results = issue.slot.run((lane, at), segment.name, segment.compiled, given, streams)
                else:
                    with torch.cuda.device(streams.device), torch.cuda.stream(streams.compute):
                        results = segment.compiled.call(given)
            except Exception as error:
                device = self.program.lanes[lane].device
                error.add_note(f"in segment {segment.name} ({' '.join(segment.kernels)}) on lane {lane} ({device})")
                raise
            if self.pace is not None:
                self.pace.ran(lane, streams, segment.name)
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
                if self.pace is not None:
                    self.pace.sent(lane, streams, instruction.to, instruction.value)
                issue.mail[key] = Posted(env[instruction.value], streams.compute.record_event())
                issue.posted += 1
            return False
        elif isinstance(instruction, Recv):
            posted = issue.mail.pop((instruction.source, lane, instruction.value), None)
            if posted is None:
                return False
            self._receive(lane, instruction, posted, issue)
            if self.pace is not None:
                self.pace.received(lane, streams, instruction.source, instruction.value)
            issue.taken.add((instruction.source, lane, instruction.value))
        elif isinstance(instruction, Signal):
            name = f"signal {instruction.kernel}"
            if self.pace is not None:
                self.pace.sent(lane, streams, instruction.to, name)
            issue.mail[lane, instruction.to, name] = Posted(None, streams.compute.record_event())
        elif isinstance(instruction, Wait):
            name = f"signal {instruction.kernel}"
            posted = issue.mail.pop((instruction.source, lane, name), None)
            if posted is None:
                return False
            streams.compute.wait_event(posted.ready)
            if self.pace is not None:
                self.pace.received(lane, streams, instruction.source, name)
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

    def _receive(self, lane: int, instruction: Recv, posted: Posted, issue: Issue) -> None:
        env, streams = issue.envs[lane], self.lanes[lane]
        storage = self.graph.values[instruction.value].storage
        payload = posted.payload
        if not isinstance(payload, torch.Tensor) or payload.device.type == "cpu" != streams.device.type:
            self._behind(lane, posted.ready, issue)  # what lies on the host is there for every lane
            env[instruction.value] = payload
            return
        link = self.links[instruction.source, lane]
        issue.used.add((instruction.source, lane))
        if storage == instruction.value:
            room = None
            if issue.slot is not None:
                with torch.cuda.stream(link.into):
                    room = issue.slot.buffer((lane, instruction.value), payload, streams.device)
            if instruction.boxes:
                env[instruction.value], done = link.fetch_parts(payload, instruction.boxes, posted.ready, room)
            else:
                env[instruction.value], done = link.fetch(payload, posted.ready, room)
            used_on(env[instruction.value], streams.compute)
        else:
            # A new version of state that lives here: in place, behind everything that reads the old one.
            self._settle(lane, storage, issue)
            after, there = [posted.ready, streams.compute.record_event()], env[storage]
            if instruction.boxes:
                done = link.update_parts(there, payload, instruction.boxes, after)
            else:
                done = link.update(there, payload, after)
            env[instruction.value] = env[storage]
        self._behind(lane, done, issue)
        source = self.graph.values[instruction.value].storage
        issue.reading[instruction.source].setdefault(source, []).append(done)

    def _behind(self, lane: int, event: torch.cuda.Event, issue: Issue) -> None:
        """What the lane does next of this request runs behind ``event``."""
        self.lanes[lane].compute.wait_event(event)

    def _settle(self, lane: int, storage: str, issue: Issue) -> None:
        """What the lane does next runs behind the copies that still read ``storage`` of it."""
        for event in issue.reading[lane].pop(storage, ()):
            self.lanes[lane].compute.wait_event(event)

    def _hold(self, lane: int, instruction: Hold, issue: Issue) -> None:
        env, streams = issue.envs[lane], self.lanes[lane]
        home = issue.envs[self.home]
        for value in instruction.values:
            replica = self.replicas[lane].get(value)
            if replica is None:
                env[value] = home[value]
                continue
            if issue.held is not None:
                env[value] = issue.held[lane, value]
                continue
            with torch.cuda.device(streams.device), torch.cuda.stream(streams.compute):
                use = replica.bring(issue.seen[value], volatile=value in self.graph.mutated)
                if torch.cuda.is_current_stream_capturing():  # recorded, not done
                    replica.distrust()
            env[value] = replica.tensor
            if (lane, value) in self._writers:
                issue.written_replicas.append((lane, value, use))

    def _poison(self, lane: int, value: str, issue: Issue) -> None:
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


def asks_the_host(node: torch.fx.Node) -> bool:
    """Whether the host needs a value that the GPU computes, so that the node cannot be captured."""
    return node.target is torch.ops.aten._local_scalar_dense.default or torch_compat.has_unbacked(node.meta.get("val"))


def unfit(inputs: dict[str, Any]) -> str:
    """Why these inputs cannot be copied into buffers of a slot; empty where they can."""
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and not value.is_cuda:
            return f"input {name} lies on the host, and a graph would keep its content"
        if isinstance(value, torch.Tensor) and (value.layout != torch.strided or overlaps(value)):
            return f"elements of input {name} share memory"
    return ""
