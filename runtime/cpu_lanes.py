"""Executes a :class:`Program` on CPU lanes: one thread a lane, real copies between them.

Lanes share nothing but transfers. A receive copies into storage that the receiver owns, so a sender may free or overwrite its
own; before it overwrites, it waits until pending sends of that storage were taken. Weights and state read away from home are
replicas. The caller's tensors are touched by the home lane alone, and only where the graph mutates them; state that another
lane keeps is touched by that lane.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..passes import torch_compat
from ..passes.errors import ProgramError
from ..passes.ir import Free, Hold, KernelGraph, Out, Program, Recv, Run, Send, Signal, Wait, segment_values
from .codegen import Codegen, Compiled, constants, lookup
from .lane_pool import shared_pool
from .pacing import Pace, PacedRequest
from .replicas import Replica, Sighting, at_exit, own_copy, sight
from .slices import own_part, update_part
from .state_homes import HOMES


class Aborted(Exception):
    """Raised inside a lane when another lane of the same request has failed."""


@dataclass(frozen=True)
class _Segment:
    name: str
    compiled: Compiled
    outputs: tuple[str, ...]
    written: tuple[tuple[str, str], ...]  # (storage, new version)
    kernels: tuple[str, ...]


class CpuLaneExecutor:
    """A program, compiled and ready to be called with the graph's inputs, in a list, as often as wanted.

    Calls from several threads are safe; each lane serves them in the order in which they came. With one lane everything runs
    in the caller's thread, under the caller's thread setting.

    Args:
        codegen: compiles the segments; its ``threads`` should be the lanes'.
        threads: intra-operator threads of each lane; by default the caller's setting divided among the lanes.
        poison: for tests: fill storage with NaN when it is freed, so that any use of it shows.
        pace: emulate modelled devices: runs and transfers take their modelled time, scaled.
        progress: wraps the segments to be compiled, with a title, for a progress bar.

    Attributes:
        runs: how many requests have completed.
        returned: bytes of overwritten inputs that other lanes have sent home so far.
        moved: bytes of state that this program's lanes keep and that lived on another device before.
    """

    def __init__(
        self,
        graph: KernelGraph,
        program: Program,
        codegen: Codegen,
        *,
        threads: int | None = None,
        poison: bool = False,
        pace: Pace | None = None,
        progress: Callable[[Sequence[Any], str], Iterable[Any]] = lambda items, _: items,
    ) -> None:
        self.graph = graph
        self.program = program
        self.poison = poison
        self.pace = pace
        self.runs = self.returned = self.moved = 0
        self._count_lock = threading.Lock()
        self.lanes = len(program.lanes)
        self.threads = threads if threads is not None else lane_threads(self.lanes)
        self.home = next(i for i, _, instruction in program if isinstance(instruction, Out))
        self.segments: dict[tuple[int, int], _Segment] = {}
        wanted = [(lane, at, io) for lane in program.lanes for at, io in segment_values(graph, lane.instructions).items()]
        for lane, at, io in progress(wanted, "compiling segments"):
            run = lane.instructions[at]
            compiled = codegen.compile(graph, run.kernels, io.outputs)
            written = tuple(
                (graph.values[v].storage, v) for k in run.kernels for v in graph[k].outputs if graph.values[v].storage != v
            )
            self.segments[lane.index, at] = _Segment(run.segment, compiled, compiled.outputs, written, run.kernels)
        held = {i: instruction.values for i, _, instruction in program if isinstance(instruction, Hold)}
        self.replicas = {lane: {v: Replica(memory=program.lanes[lane].device) for v in values} for lane, values in held.items()}
        self._held = tuple(dict.fromkeys(v for values in held.values() for v in values))
        self.writers = {(lane, s) for (lane, _), segment in self.segments.items() for s, _ in segment.written}
        names = [o for o in graph.outputs if o is not None]
        self._finish = codegen.compile(graph, [], names)
        lane_of = {k: lane for lane, _, x in program if isinstance(x, Run) for k in x.kernels}
        self._kept = {v: lane_of[graph.keeper(v) or ""] for v in graph.kept}
        versions = [graph.values[x.value] for _, _, x in program if isinstance(x, Recv)]
        self._returns = sum(v.bytes for v in versions if v.storage != v.name)
        self._constants = constants(graph)
        self._literals = literal_outputs(graph)

    def __call__(self, args: list[Any]) -> list[Any]:
        """Runs the program once.

        Args:
            args: the graph's inputs, in order; the list is emptied.

        Returns:
            The graph's outputs, in order.
        """
        inputs, envs = self.open(args)
        home = envs[self.home]
        request = _Request(self.lanes, self.pace.begin(self.lanes) if self.pace is not None else None)
        request.seen = self.sightings(home)
        if self.lanes == 1:
            self._lane(0, home, request)
        else:
            self._on_lanes(envs, request)
        for lane, value, use in request.written_replicas:
            at_exit(inputs[value], partial(self.replicas[lane][value].mark, use))
        if self.pace is not None and request.paced is not None:
            self.pace.add(request.paced)
        return self.close(home, inputs)

    def open(self, args: list[Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The inputs by name, and what each lane knows when a request starts; ``args`` is emptied."""
        inputs = dict(zip(self.graph.inputs, args, strict=True))
        args.clear()
        hosts = {name: value for name, value in inputs.items() if not isinstance(value, torch.Tensor)}
        envs: list[dict[str, Any]] = [dict(hosts) for _ in range(self.lanes)]
        envs[self.home] = {**self._constants, **inputs}
        for name, lane in self._kept.items():
            envs[lane][name] = inputs[name]
            moved = HOMES.settle(inputs[name], self.program.lanes[lane].device)
            if moved:
                with self._count_lock:
                    self.moved += moved
        return inputs, envs

    def sightings(self, home: dict[str, Any]) -> dict[str, Sighting]:
        """The residents that other lanes hold, as they are at the entry of this call."""
        return {v: sight(home[v]) for v in self._held}

    def close(self, home: dict[str, Any], inputs: dict[str, Any]) -> list[Any]:
        """The graph's outputs, in order, from what the home lane knows in the end."""
        finished = self._finish.call([lookup(home, name) for name in self._finish.inputs])
        results = iter(outputs_apart(self.graph, finished, inputs))
        with self._count_lock:
            self.runs += 1
            self.returned += self._returns
        return [
            literal if name is None else next(results) for name, literal in zip(self.graph.outputs, self._literals, strict=True)
        ]

    def _on_lanes(self, envs: list[dict[str, Any]], request: _Request) -> None:
        inference = torch.is_inference_mode_enabled()

        def job(lane: int) -> Callable[[], None]:
            def run() -> None:
                try:
                    with torch.inference_mode(inference), torch.no_grad():
                        self._lane(lane, envs[lane], request)
                except BaseException as error:
                    request.fail(error)
                finally:
                    request.finished()

            return run

        shared_pool(self.lanes, self.threads).submit([job(lane) for lane in range(self.lanes)])
        try:
            request.wait()
        except BaseException as error:  # Interrupted: no lane may go on writing once the caller has control again.
            request.fail(error)
            request.wait()
            raise
        request.reraise()

    def _lane(self, lane: int, env: dict[str, Any], request: _Request) -> None:
        values = self.graph.values
        for at, instruction in enumerate(self.program.lanes[lane].instructions):
            if isinstance(instruction, Run):
                segment = self.segments[lane, at]
                for storage, _ in segment.written:
                    request.settle(lane, storage)
                try:
                    results = segment.compiled.call([lookup(env, name) for name in segment.compiled.inputs])
                except Exception as error:
                    device = self.program.lanes[lane].device
                    error.add_note(f"in segment {segment.name} ({' '.join(segment.kernels)}) on lane {lane} ({device})")
                    raise
                if request.paced is not None:
                    request.paced.ran(lane, segment.name)
                env.update(zip(segment.outputs, results, strict=True))
                for storage, version in segment.written:
                    env[version] = env[storage]
            elif isinstance(instruction, Send):
                request.post(lane, instruction.to, instruction.value, values[instruction.value].storage, env[instruction.value])
            elif isinstance(instruction, Recv):
                storage = values[instruction.value].storage
                posting = request.take(lane, instruction.source, instruction.value)
                if storage == instruction.value:
                    payload, boxes = posting.payload, instruction.boxes
                    env[instruction.value] = own_part(payload, boxes) if boxes else own_copy(payload)
                else:
                    request.settle(lane, storage)
                    if instruction.boxes:
                        update_part(env[storage], posting.payload, instruction.boxes)
                    else:
                        env[storage].copy_(posting.payload)
                    env[instruction.value] = env[storage]
                posting.payload = None
                posting.taken.set()
                if request.paced is not None:
                    request.paced.received(lane, posting.arrival)
            elif isinstance(instruction, Signal):
                request.post(lane, instruction.to, f"signal {instruction.kernel}", "", None)
            elif isinstance(instruction, Wait):
                posting = request.take(lane, instruction.source, f"signal {instruction.kernel}")
                posting.taken.set()
                if request.paced is not None:
                    request.paced.received(lane, posting.arrival)
            elif isinstance(instruction, Hold):
                for value in instruction.values:
                    replica = self.replicas[lane][value]
                    use = replica.bring(request.seen[value], volatile=value in self.graph.mutated)
                    env[value] = replica.tensor
                    if (lane, value) in self.writers:
                        request.written_replicas.append((lane, value, use))
            elif isinstance(instruction, Free):
                for value in instruction.values:
                    if self.poison:
                        request.settle(lane, value)
                        state = {torch_compat.storage_key(env[name]) for name in self.graph.mutated if name in env}
                        # A compiler may have made the value in the storage of the state that it is copied into.
                        if not (isinstance(env[value], torch.Tensor) and torch_compat.storage_key(env[value]) in state):
                            poison_tensor(env[value])
                    del env[value]
            elif not isinstance(instruction, Out):
                raise ProgramError(f"CPU lanes cannot execute {instruction.to_text()!r}")
        # The lane's next request may refresh a replica in place: what was sent of it, also under the name of a value that the
        # compiler made in its storage, must be taken by then.
        if lane in self.replicas or lane in self._kept.values():
            request.settle_all(lane)


@dataclass
class _Posting:
    payload: Any
    taken: threading.Event
    arrival: float = 0.0  # When it arrives in emulated time.


class _Request:
    """What the lanes of one request share: an inbox each, and whether one of them has failed."""

    def __init__(self, lanes: int, paced: PacedRequest | None) -> None:
        self.paced = paced
        self._inboxes = [threading.Condition() for _ in range(lanes)]
        self._arrived: list[dict[tuple[int, str], _Posting]] = [{} for _ in range(lanes)]
        self._pending: list[dict[str, list[_Posting]]] = [{} for _ in range(lanes)]
        self._unfinished = lanes
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self.seen: dict[str, Sighting] = {}
        self.written_replicas: list[tuple[int, str, int]] = []

    def post(self, source: int, target: int, name: str, storage: str, payload: Any) -> None:
        posting = _Posting(payload, threading.Event())
        if self.paced is not None:
            posting.arrival = self.paced.sent(name, source, target)
        self._pending[source].setdefault(storage, []).append(posting)
        with self._inboxes[target]:
            self._arrived[target][source, name] = posting
            self._inboxes[target].notify()

    def take(self, lane: int, source: int, name: str) -> _Posting:
        with self._inboxes[lane]:
            while (source, name) not in self._arrived[lane]:
                if self._error is not None:
                    raise Aborted
                self._inboxes[lane].wait()
            return self._arrived[lane].pop((source, name))

    def settle(self, lane: int, storage: str) -> None:
        """Waits until every send of ``storage`` from ``lane`` was copied by its receiver."""
        for posting in self._pending[lane].pop(storage, ()):
            while not posting.taken.wait(timeout=0.1):
                if self._error is not None:
                    raise Aborted

    def settle_all(self, lane: int) -> None:
        """Waits until every send from ``lane`` was copied by its receiver."""
        for storage in list(self._pending[lane]):
            self.settle(lane, storage)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None and not isinstance(error, Aborted):
                self._error = error
        for inbox in self._inboxes:
            with inbox:
                inbox.notify_all()

    def finished(self) -> None:
        with self._lock:
            self._unfinished -= 1
            if self._unfinished == 0:
                self._done.set()

    def wait(self) -> None:
        self._done.wait()

    def reraise(self) -> None:
        if self._error is not None:
            raise self._error


def lane_threads(lanes: int) -> int:
    """Intra-operator threads of each of ``lanes`` lanes: the caller's setting, divided, at least one."""
    return max(1, torch.get_num_threads() // lanes)


def poison_tensor(value: Any) -> None:
    """Overwrites freed storage: NaN, or a value far outside any index."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return
    if value.is_floating_point() or value.is_complex():
        value.fill_(float("nan"))
    elif value.dtype == torch.bool:
        value.logical_not_()
    else:
        value.fill_(torch.iinfo(value.dtype).max)


def outputs_apart(graph: KernelGraph, results: Sequence[Any], inputs: dict[str, Any]) -> list[Any]:
    """The results, copies of those that a compiler made in the storage of an overwritten input and are no views of it."""
    overwritten = {torch_compat.storage_key(inputs[name]) for name in graph.mutated}
    own = [s for o, s in zip(graph.outputs, graph.output_storages, strict=True) if o is not None]
    names = set(graph.inputs)
    return [
        own_copy(r) if isinstance(r, torch.Tensor) and s not in names and torch_compat.storage_key(r) in overwritten else r
        for r, s in zip(results, own, strict=True)
    ]


def literal_outputs(graph: KernelGraph) -> Sequence[Any]:
    output = next(iter(reversed(graph.module.graph.nodes)))
    returned = output.args[0] if isinstance(output.args[0], (list, tuple)) else (output.args[0],)
    return [None if name is not None else value for name, value in zip(graph.outputs, returned, strict=True)]
