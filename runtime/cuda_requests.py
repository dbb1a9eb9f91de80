"""A program on CUDA lanes, for requests whose instructions are issued one by one, in whatever order lanes become free.

:class:`CudaLaneExecutor` issues a whole request at a time; here each request has its own state between instructions, so that
many can be in flight. What a lane waits for is told to its stream only when the request's next kernel is issued there: until
then kernels of other requests can go before it. A request works in a *place* of its own: where its segments are captured, the
buffers and graphs of a slot (``segment_graphs.py``); on paced lanes its clocks (``cuda_clocks.py``).

The thread that brings a request opens and closes it on its own current stream; one thread issues all that lies in between.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..passes import torch_compat
from ..passes.errors import ProgramError
from ..passes.ir import Hold, KernelGraph, Program, Recv, Run, Send, Signal, Wait
from ..passes.periods import Period
from .board import Route
from .codegen import Codegen, lookup
from .cpu_lanes import outputs_apart
from .cuda_clocks import Clocks, Transfer, Words
from .cuda_lanes import CudaLaneExecutor, Issue, Posted, unfit
from .replicas import Residents, at_exit, sight
from .segment_graphs import Slot, copies_of
from .transports import used_on


@dataclass
class Flight:
    """Something that was issued and may not be done: ``end`` is behind it, ``begin``, of segments, before it."""

    end: torch.cuda.Event
    begin: torch.cuda.Event | None = None
    done: bool = False


@dataclass
class Place:
    """What one request at a time has for itself. ``done``: behind the request that had it last. Of that, for graphs of whole
    periods: ``key``, what was captured depends on; ``inputs`` by name; ``moved``: transfer → what was sent, and where it
    arrived; ``held``: replicas by lane and value; ``results``: what outputs are made of."""

    slot: Slot | None
    words: Words | None
    done: list[torch.cuda.Event] = field(default_factory=list)
    key: Any = None
    inputs: dict[str, Any] = field(default_factory=dict)
    moved: dict[Transfer, tuple[Any, Any]] = field(default_factory=dict)
    held: dict[tuple[int, str], Any] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)


@dataclass
class CudaRequest(Issue):
    """One request in flight.

    ``behind``: per lane, what its next instruction there waits for. ``latest``: per lane, the segment that was issued last.
    ``makers``: transfer → the segment that it follows, if any. ``flights``: what was issued and is not known to be done.
    """

    executor: CudaRequests = field(kw_only=True)
    inputs: dict[str, Any] = field(default_factory=dict)  # as the kernels read them
    given: dict[str, Any] = field(default_factory=dict)  # as the caller passed them
    place: Place | None = None
    key: Any = None
    copied: bool = False  # ``finished`` are the caller's own
    begun: torch.cuda.Event | None = None
    inference: bool = False
    written: frozenset[int] = frozenset()
    behind: list[list[torch.cuda.Event]] = field(default_factory=list)
    arrived: list[list[Transfer]] = field(default_factory=list)  # per lane, transfers that its clock does not know of yet
    latest: list[Flight | None] = field(default_factory=list)
    makers: dict[Transfer, Flight | None] = field(default_factory=dict)
    incoming: list[int] = field(default_factory=list)  # per lane, transfers that were issued and have not arrived
    flights: dict[int, Flight] = field(default_factory=dict)
    tail: torch.cuda.Event | None = None  # behind the outputs
    finished: Sequence[Any] = ()
    issued: bool = False
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class CudaRequests(CudaLaneExecutor):
    """Args beyond those of :class:`CudaLaneExecutor`:

    captured: whether segments are captured; each place then has a slot of its own.
    period: what a graph of a whole period is to do; ``no_period`` says why there is none.
    residents: one for each lane, of all programs: weights and state that lanes hold.
    clocks, times: of paced lanes: the clocks, and a route with real ns of segments and transfers.
    """

    def __init__(
        self,
        graph: KernelGraph,
        program: Program,
        codegen: Codegen,
        *,
        residents: Sequence[Residents],
        captured: bool,
        lanes: Sequence[str] | None = None,
        transport: str = "auto",
        clocks: Clocks | None = None,
        times: Route | None = None,
        period: Period | None = None,
    ) -> None:
        super().__init__(graph, program, codegen, lanes=lanes, transport=transport, slots=int(captured))
        self.captured = captured and bool(self._slots)
        self._copied = frozenset(self._fresh)
        self._copies = tuple({v: None for lane, values in self.replicas.items() for v in values})
        self.residents, self.clocks, self.times = residents, clocks, times
        self.transfers: tuple[Transfer, ...] = tuple(
            dict.fromkeys((lane, x.to, name_of(x)) for lane, _, x in program if isinstance(x, (Send, Signal)))
        )
        self._places: list[Place] = []  # free ones
        self._made: list[Place] = []
        self.cycle: Any = None  # of the dispatcher, once periods are captured
        self._guard = threading.Lock()
        self.period = period
        self.no_period = self._unperiodic()
        if self.no_period:
            self.reasons["periods"] = self.no_period
            self.period = None
        lane_of = {k: lane for lane, _, x in program if isinstance(x, Run) for k in x.kernels}
        self._kept = {v: lane_of[graph.keeper(v) or ""] for v in graph.kept}

    # -- by the thread that brings the request

    def written(self, args: Sequence[Any]) -> frozenset[int]:
        """Identities of the caller's storages that a request with these inputs overwrites."""
        given = zip(self.graph.inputs, args, strict=True)
        return frozenset(torch_compat.storage_key(x) for name, x in given if name in self.graph.mutated)

    def open(self, args: list[Any], placed: bool = True) -> CudaRequest:
        """A request that is to be issued behind what was enqueued on the current stream; ``args`` is emptied.

        placed: give it a place at once; otherwise :meth:`place` must follow, or a graph of a period take it in.
        """
        given = dict(zip(self.graph.inputs, args, strict=True))
        written = self.written(args)
        args.clear()
        passed = {**self._constants, **given}
        count = len(self.lanes)
        request = CudaRequest(
            [],
            {v: sight(passed[v]) for v in self._copies},
            reading=[{} for _ in self.lanes],
            executor=self,
            given=given,
            key=self._key(given) if self.period is not None else None,
            inference=torch.is_inference_mode_enabled(),
            written=written,
            arrived=[[] for _ in range(count)],
            latest=[None] * count,
            incoming=[0] * count,
        )
        current = torch.cuda.current_stream(self.lanes[self.home].device)
        if placed:
            self.place(request, current)
        else:
            request.begun = current.record_event()
        return request

    def place(self, request: CudaRequest, stream: torch.cuda.Stream) -> None:
        """Gives the request a place, on ``stream``."""
        given = request.given
        captured = self.captured
        if captured and (reason := unfit(given)):
            self.reasons.setdefault(reason, reason)
            captured = False
        place = request.place = self._take(captured)
        request.slot = place.slot
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            self.enter(request, place, stream)
        begin = stream.record_event()
        request.behind = [[begin] for _ in self.lanes]
        hosts = {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}
        request.envs = [dict(hosts) for _ in self.lanes]
        request.envs[self.home] = {**self._constants, **request.inputs}
        for name, lane in self._kept.items():
            request.envs[lane][name] = request.inputs[name]

    def enter(self, request: CudaRequest, place: Place, stream: torch.cuda.Stream) -> None:
        """The request's inputs come into the place, on ``stream``, which is current."""
        for event in (*place.done, *([request.begun] if request.begun is not None else [])):
            stream.wait_event(event)
        request.inputs = dict(request.given)
        if place.slot is not None:
            for name in self._fresh:
                value = request.given[name]
                if isinstance(value, torch.Tensor):
                    request.inputs[name] = place.slot.buffer(name, value, value.device)
                    request.inputs[name].copy_(value, non_blocking=True)
        if place.words is not None and self.clocks is not None:
            self.clocks.begin(place.words)

    def close(self, request: CudaRequest) -> list[Any]:
        """The outputs of a request that is done, on the current stream; what it has written is there for that stream too."""
        current = torch.cuda.current_stream(self.lanes[self.home].device)
        self._wait_for(request, current)
        for lane, value, use in request.written_replicas:
            replica = self.residents[lane].of(request.seen[value])
            at_exit(request.given[value], partial(replica.mark, use))
        finished = list(request.finished)
        place = request.place
        if request.copied:
            for tensor in finished:
                used_on(tensor, current)
        elif place is not None and place.slot is not None:
            for name in self.graph.mutated:
                if request.inputs[name] is not request.given[name]:
                    request.given[name].copy_(request.inputs[name], non_blocking=True)
            finished = copies_of(finished)()
        else:
            for tensor in finished:
                used_on(tensor, current)
        if not request.copied and place is not None and place.words is not None and self.clocks is not None:
            with torch.cuda.device(current.device):
                self.clocks.end(place.words)
        if place is not None:
            place.key = request.key
        self._give_back(request, current)
        if request.written:  # Who comes next may be on another stream.
            current.synchronize()
        with self._guard:
            self.runs += 1
        given = iter(finished)
        return [literal if name is None else next(given) for name, literal in zip(self.graph.outputs, self.literals, strict=True)]

    def give_up(self, request: CudaRequest) -> None:
        """Of a request that has failed: what still runs of it must not meet memory that is used anew."""
        current = torch.cuda.current_stream(self.lanes[self.home].device)
        self._wait_for(request, current)
        for value in request.given.values():
            used_on(value, current)
        self._give_back(request, current)

    def _wait_for(self, request: CudaRequest, current: torch.cuda.Stream) -> None:
        for flight in [*request.flights.values(), *request.latest]:
            if flight is not None:
                current.wait_event(flight.end)
        if request.tail is not None:
            current.wait_event(request.tail)

    def _take(self, captured: bool) -> Place:
        with self._guard:
            # Periods need places: those that they will need are made before any is used again.
            fresh = captured and self.period is not None and len(self._made) <= self.period.slots
            for at, place in enumerate(() if fresh else self._places):
                if (place.slot is not None) == captured:
                    return self._places.pop(at)
        words = None
        if self.clocks is not None:
            words = self.clocks.words(self.transfers)
        place = Place(Slot(self.reasons, keep=self.period is not None) if captured else None, words)
        with self._guard:
            self._made.append(place)
        return place

    def _give_back(self, request: CudaRequest, current: torch.cuda.Stream) -> None:
        done = current.record_event()
        with self._guard:
            place, request.place = request.place, None
            if place is not None:
                place.done = [done]
                self._places.append(place)

    def displace(self, request: CudaRequest) -> None:
        """Takes its place, if it has one, from a request of which nothing was issued yet."""
        with self._guard:
            place, request.place, request.slot = request.place, None, None
            if place is not None:
                place.done = request.behind[0][:1]
                self._places.append(place)

    # -- places for graphs of periods

    def complete(self, key: Any) -> int:
        """How many places have all segments captured for requests with this key, free or not."""
        with self._guard:
            return sum(self._whole(place, key) for place in self._made)

    def claim(self, key: Any, least: int, most: int) -> tuple[Place, ...]:
        """Takes free ones of these for good; none where there are fewer than ``least``."""
        with self._guard:
            found = [place for place in self._places if self._whole(place, key)][:most]
            if len(found) < least:
                return ()
            self._places = [p for p in self._places if not any(p is q for q in found)]
            return tuple(found)

    def results(self, place: Place) -> list[Any]:
        """Copies of the outputs that lie in a place, on the current stream."""
        return copies_of(self._finish.call(list(place.results)))()

    def unclaim(self, places: Sequence[Place]) -> None:
        with self._guard:
            self._places += places

    def _whole(self, place: Place, key: Any) -> bool:
        slot = place.slot
        return slot is not None and place.key == key and all(slot.captured(spot) is not None for spot in self.segments)

    def _key(self, given: dict[str, Any]) -> Any:
        """What captures depend on: addresses of what is read where it lies, shapes of what is copied, numbers."""
        return tuple(
            ((v.shape, v.stride(), v.dtype) if n in self._copied else v.data_ptr()) if isinstance(v, torch.Tensor) else v
            for n, v in given.items()
        )

    def _unperiodic(self) -> str:
        """Why no graph can hold a period; empty where one can."""
        if not self.captured:
            return self.reasons.get("all", "") or "cuda_graphs is off"
        if self.period is None:
            return "none was asked for"
        if self.graph.mutated:
            return f"it overwrites {next(iter(self.graph.mutated))}, and so would the stages of a period that stand idle"
        if self.reasons:
            name, why = next(iter(self.reasons.items()))
            return f"{name}: {why}"
        return ""

    # -- by the thread that issues

    def perform(self, lane: int, at: int, x: Any, request: CudaRequest) -> Flight | None:
        """Issue one instruction; what is known of its end, where it has one that matters."""
        streams = self.lanes[lane]
        if isinstance(x, Recv):
            if self.graph.values[x.value].storage != x.value:
                self._flush(lane, request)  # In place, behind what has been read.
            name = (x.source, lane, x.value)
            posted = request.mail.pop(name)
            self._receive(lane, x, posted, request)
            if request.slot is not None and request.place is not None and isinstance(posted.payload, torch.Tensor):
                request.place.moved[name] = posted.payload, request.envs[lane][x.value]
            return self._arriving(lane, name, request)
        if isinstance(x, Wait):
            name = (x.source, lane, name_of(x))
            self._behind(lane, request.mail.pop(name).ready, request)
            return self._arriving(lane, name, request) if self.clocks is not None else None
        if isinstance(x, (Run, Send, Signal, Hold)):
            self._flush(lane, request)
        if isinstance(x, (Send, Signal)):
            name = (lane, x.to, name_of(x))
            latest = request.makers[name] = request.latest[lane]
            if self.clocks is not None and (words := words_of(request)) is not None:
                with torch.cuda.device(streams.device), torch.cuda.stream(streams.compute):
                    self.clocks.sent(lane, words, name)
                latest = None
            ready = latest.end if latest is not None else streams.compute.record_event()
            request.mail[name] = Posted(request.envs[lane][x.value] if isinstance(x, Send) else None, ready)
            return None
        if isinstance(x, Hold):
            self._hold(lane, x, request)
            return Flight(streams.compute.record_event())
        if not isinstance(x, Run):
            self._step(lane, at, x, request)
            return None
        begin = torch.cuda.Event(enable_timing=True)
        begin.record(streams.compute)
        self._step(lane, at, x, request)
        if self.clocks is not None and (words := words_of(request)) is not None:
            assert self.times is not None
            assert self.times.run_time is not None
            with torch.cuda.device(streams.device), torch.cuda.stream(streams.compute):
                self.clocks.ran(lane, words, self.times.run_time[x.segment])
        end = torch.cuda.Event(enable_timing=True)
        end.record(streams.compute)
        flight = request.latest[lane] = Flight(end, begin)
        return flight

    def finish(self, request: CudaRequest) -> None:
        """Issue what is left once all instructions are: outputs are views and copies of what the home lane knows."""
        home = self.lanes[self.home]
        env = request.envs[self.home]
        self._flush(self.home, request)
        with torch.cuda.device(home.device), torch.cuda.stream(home.compute):
            values = [lookup(env, name) for name in self._finish.inputs]
            if request.slot is not None and request.place is not None:
                request.place.results, request.place.inputs = list(values), request.inputs
            finished = self._finish.call(values)
            request.finished = outputs_apart(self.graph, finished, request.inputs)
            request.tail = home.compute.record_event()

    def _arriving(self, lane: int, name: Transfer, request: CudaRequest) -> Flight:
        event = request.behind[lane][-1]
        words = words_of(request)
        if self.clocks is not None and words is not None:
            assert self.times is not None
            stream = self.links[name[:2]].into if name[:2] in self.links else self.lanes[lane].compute
            stream.wait_event(event)
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                self.clocks.moved(words, name, self.times.transfer_time(name[2], name[0], lane))
            event = request.behind[lane][-1] = stream.record_event()
            request.arrived[lane].append(name)
        return Flight(event)

    def _behind(self, lane: int, event: torch.cuda.Event, issue: Issue) -> None:
        assert isinstance(issue, CudaRequest)
        issue.behind[lane].append(event)

    def _flush(self, lane: int, request: CudaRequest) -> None:
        """The lane's stream now waits for what the request's next instruction there needs."""
        streams = self.lanes[lane]
        if request.behind[lane]:
            for event in request.behind[lane]:
                streams.compute.wait_event(event)
            request.behind[lane].clear()
        if request.arrived[lane] and self.clocks is not None and (words := words_of(request)) is not None:
            with torch.cuda.device(streams.device), torch.cuda.stream(streams.compute):
                for name in request.arrived[lane]:
                    self.clocks.taken(lane, words, name)
            request.arrived[lane].clear()

    def _hold(self, lane: int, instruction: Hold, issue: Issue) -> None:
        env, streams = issue.envs[lane], self.lanes[lane]
        home = issue.envs[self.home]
        with torch.cuda.device(streams.device), torch.cuda.stream(streams.compute):
            for value in instruction.values:
                if value in self.shared[lane]:
                    env[value] = home[value]
                    continue
                replica = self.residents[lane].of(issue.seen[value])
                # Only requests that overwrite it share a volatile one, and they come one after the other.
                volatile = value in self.graph.mutated
                use = replica.bring(issue.seen[value], volatile, in_place=volatile)
                env[value] = replica.tensor
                if isinstance(issue, CudaRequest) and issue.place is not None:
                    issue.place.held[lane, value] = replica.tensor
                if (lane, value) in self._writers:
                    issue.written_replicas.append((lane, value, use))


def words_of(request: CudaRequest) -> Words | None:
    return None if request.place is None else request.place.words


def name_of(x: Send | Recv | Signal | Wait) -> str:
    """What a transfer is called: its value, or the kernel that it signals."""
    if isinstance(x, (Send, Recv)):
        return x.value
    if isinstance(x, (Signal, Wait)):
        return f"signal {x.kernel}"
    raise ProgramError(f"{x!r} moves nothing")
