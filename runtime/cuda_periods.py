"""A period of a program's steady state as one CUDA graph, and the requests that go through such graphs.

``passes/periods.py`` says what a period does: each segment and each transfer once, for requests of unlike age. A request keeps to
its *place* (``cuda_requests.py``), whose segments were captured one by one when it was used before; the graph of a period is put
together from those, as child graphs, and from a capture of each transfer. With N places there are N such graphs: that of period
p works for request p − s in place (p − s) mod N at stage s. One place more than there are stages stands idle in each period:
from it the outputs of the request that is done are copied, and into it the inputs of the next one.

The first and last periods of a run have stages without a request: these compute again what lies in their place, which nobody
reads. So programs that overwrite anything are not run like this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..passes.ir import Recv, Run, Send, Signal, Wait
from ..passes.periods import Period
from .board import Ticket
from .cuda_clocks import Transfer
from .cuda_requests import CudaRequest, CudaRequests, Flight, Place, name_of
from .cuda_streams import ISSUING
from .device_code import check
from .segment_graphs import new_graph


class PeriodGraphs:
    """The graphs of one program, put together.

    Args:
        executor: whose ``period`` they are of.
        places: complete ones, as many as the period has slots, or one more.

    Raises:
        ClusterError, RuntimeError: the driver or torch refuses something.
    """

    def __init__(self, executor: CudaRequests, places: Sequence[Place]) -> None:
        assert executor.period is not None
        self.executor, self.places = executor, tuple(places)
        self.period: Period = executor.period
        self.key = places[0].key
        self._kept: list[Any] = []  # Captures whose memory the graphs use.
        self._graphs: list[Any] = []
        with ISSUING:
            torch.cuda.synchronize(executor.lanes[executor.home].device)
            self._stream = torch.cuda.Stream(executor.lanes[executor.home].device)
            runs = {x.segment: (lane, at, x) for lane, at, x in executor.program if isinstance(x, Run)}
            moves = {f"{n}->{target}": (source, target, n) for source, target, n in executor.transfers}
            parts = [{**self._runs(runs, p), **self._moves(moves, p)} for p in self.places]
            for turn in range(len(self.places)):
                self._graphs.append(self._assembled(turn, parts, runs, moves))

    def launch(self, number: int, stream: torch.cuda.Stream) -> None:
        """Period ``number``, on ``stream``."""
        from cuda.bindings import driver

        check(driver.cuGraphLaunch(self._graphs[number % len(self.places)], stream.cuda_stream), "launching a period")

    def place(self, number: int) -> Place:
        """That of the request which comes in with period ``number``."""
        return self.places[number % len(self.places)]

    def __del__(self) -> None:
        from cuda.bindings import driver

        for graph in self._graphs:
            driver.cuGraphExecDestroy(graph)
        self._graphs.clear()

    # -- what each place has captured

    def _runs(self, runs: dict[str, Any], place: Place) -> dict[str, list[torch.cuda.CUDAGraph]]:
        """Segment → its graphs, one after the other; on paced lanes with its clocks'."""
        executor, clocks, words = self.executor, self.executor.clocks, place.words
        assert place.slot is not None
        found = {}
        for segment, (lane, at, x) in runs.items():
            graph = place.slot.captured((lane, at))
            assert graph is not None
            found[segment] = [graph]
            if clocks is None or words is None:
                continue
            assert executor.times is not None
            assert executor.times.run_time is not None
            takes, gives = _around(executor.program.lanes[lane].instructions, lane, at)
            ns = executor.times.run_time[x.segment]

            def before(lane: int = lane, takes: Sequence[Transfer] = takes) -> None:
                for name in takes:
                    clocks.taken(lane, words, name)

            def behind(lane: int = lane, ns: float = ns, gives: Sequence[Transfer] = gives) -> None:
                clocks.ran(lane, words, ns)
                for name in gives:
                    clocks.sent(lane, words, name)

            stream = executor.lanes[lane].compute
            found[segment] = [*([self._capture(stream, before)] if takes else []), graph, self._capture(stream, behind)]
        return found

    def _moves(self, moves: dict[str, Transfer], place: Place) -> dict[str, list[torch.cuda.CUDAGraph]]:
        executor = self.executor
        boxes = {(x.source, lane, x.value): x.boxes for lane, _, x in executor.program if isinstance(x, Recv)}
        first = {  # sent before its lane's first segment: no segment tells its clock
            (lane.index, x.to, name_of(x))
            for lane in executor.program.lanes
            for at, x in enumerate(lane.instructions)
            if isinstance(x, (Send, Signal)) and not any(isinstance(y, Run) for y in lane.instructions[:at])
        }
        found: dict[str, list[torch.cuda.CUDAGraph]] = {}
        for title, name in moves.items():
            source, target, _ = name
            payload, room = place.moved.get(name, (None, None))
            link = executor.links.get((source, target))
            clocked = executor.clocks is not None and place.words is not None
            on_gpu = link is not None and isinstance(room, torch.Tensor) and room.is_cuda
            if on_gpu and (payload.is_conj() or payload.is_neg()):
                raise RuntimeError(f"{title} is a conjugate or negative view, which takes memory of its own to send")
            if not on_gpu and not clocked:
                found[title] = []  # What lies on the host, and signals, have nothing to move.
                continue

            def work(name: Transfer = name, payload: Any = payload, room: Any = room, on_gpu: bool = on_gpu) -> None:
                stream = self._stream
                begin = stream.record_event()
                if on_gpu:
                    link = executor.links[name[:2]]
                    link.busy.clear()
                    if boxes.get(name):
                        link.fetch_parts(payload, boxes[name], begin, room)
                    else:
                        link.fetch(payload, begin, room)
                    for event in link.drain():
                        stream.wait_event(event)
                if executor.clocks is not None and place.words is not None:
                    assert executor.times is not None
                    if name in first:
                        executor.clocks.sent(name[0], place.words, name)
                    executor.clocks.moved(place.words, name, executor.times.transfer_time(name[2], name[0], name[1]))

            found[title] = [self._capture(self._stream, work)]
        return found

    def _capture(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = new_graph(keep=True)
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="relaxed")
            try:
                work()
            finally:
                graph.capture_end()
        self._kept.append(graph)
        return graph

    # -- put together

    def _assembled(
        self, turn: int, parts: Sequence[dict[str, list[torch.cuda.CUDAGraph]]], runs: dict[str, Any], moves: dict[str, Transfer]
    ) -> Any:  # fmt: skip
        from cuda.bindings import driver

        executor, period = self.executor, self.period
        (whole,) = check(driver.cuGraphCreate(0), "making a graph")

        def add(child: torch.cuda.CUDAGraph, after: list[Any]) -> Any:
            raw = driver.CUgraph(child.raw_cuda_graph())
            unique = list({int(n): n for n in after}.values())
            (node,) = check(driver.cuGraphAddChildGraphNode(whole, unique, len(unique), raw), "putting a graph into another")
            return node

        first: list[Any] = []
        words = self.places[turn].words
        if executor.clocks is not None and words is not None:
            clocks = executor.clocks
            first = [add(self._capture(self._stream, lambda: clocks.level(words)), [])]
        ends: dict[str, list[Any]] = {}  # Operation → nodes behind which it is done.
        last: dict[Any, list[Any]] = {}  # Lane or link → likewise.
        for name in period.order:
            place = (turn - period.stages[name]) % len(self.places)
            resource: Any = runs[name][0] if name in runs else moves[name][:2]
            after = [node for one in period.after[name] for node in ends[one]] + last.get(resource, [])
            for child in parts[place][name]:
                after = [add(child, after or first)]
            ends[name] = last[resource] = after
        (made,) = check(driver.cuGraphInstantiate(whole, 0), "making a period's graph ready")
        driver.cuGraphDestroy(whole)
        return made


def _around(instructions: Sequence[Any], lane: int, at: int) -> tuple[list[Transfer], list[Transfer]]:
    """What the lane takes between its last segment and that at ``at``, and what it gives before the next."""
    takes: list[Transfer] = []
    for x in reversed(instructions[:at]):
        if isinstance(x, Run):
            break
        if isinstance(x, (Recv, Wait)):
            takes.append((x.source, lane, name_of(x)))
    gives: list[Transfer] = []
    for x in instructions[at + 1 :]:
        if isinstance(x, Run):
            break
        if isinstance(x, (Send, Signal)):
            gives.append((lane, x.to, name_of(x)))
    return takes, gives


class Cycle:
    """Requests that go through the graphs of periods, one a period, oldest first."""

    def __init__(self, graphs: PeriodGraphs) -> None:
        self.graphs, self.executor = graphs, graphs.executor
        device = self.executor.lanes[self.executor.home].device
        self._stream, self._head, self._tail = (torch.cuda.Stream(device) for _ in range(3))
        self._number = 0
        #: The requests at each stage.
        self.stages: deque[Ticket | None] = deque([None] * graphs.period.slots, maxlen=graphs.period.slots)
        #: Of periods that were launched and are not known to be done: their end, and the stages that were not idle.
        self.launched: deque[tuple[torch.cuda.Event, frozenset[int]]] = deque()
        self._times = self._timed()

    @property
    def empty(self) -> bool:
        return not any(t is not None for t in self.stages)

    def fits(self, request: CudaRequest) -> bool:
        """Whether the graphs compute what this request asks for."""
        return request.executor is self.executor and request.key == self.graphs.key

    def holds(self, request: CudaRequest) -> bool:
        """Whether what other GPUs hold of this request's weights is what the graphs read; brings it up to date."""
        executor = self.executor
        place = self.graphs.places[0]
        for (lane, value), held in place.held.items():
            streams = executor.lanes[lane]
            replica = executor.residents[lane].of(request.seen[value])
            with torch.cuda.device(streams.device), torch.cuda.stream(streams.compute):
                replica.bring(request.seen[value], False, in_place=False)
            if replica.tensor is not held:
                return False
            self._stream.wait_event(streams.compute.record_event())
        return True

    def launch(self, ticket: Ticket | None) -> Ticket | None:
        """The next period, which ``ticket`` comes in with; the request that is done with it."""
        executor, number = self.executor, self._number
        self._number += 1  # Also where it fails: its place is left to itself.
        if ticket is not None:
            request: CudaRequest = ticket.load
            with torch.cuda.stream(self._head):
                executor.enter(request, self.graphs.place(number), self._head)
            entered = self._head.record_event()
            self._stream.wait_event(entered)
            request.tail = entered
        self.graphs.launch(number, self._stream)
        ended = self._stream.record_event()
        self.stages.appendleft(ticket)
        self.launched.append((ended, frozenset(s for s, t in enumerate(self.stages) if t is not None)))
        done = self.stages[-1]
        if done is None:
            return None
        self.stages[-1] = None
        request = done.load
        place = self.graphs.place(number - (len(self.stages) - 1))
        self._tail.wait_event(ended)
        with torch.inference_mode(request.inference), torch.cuda.stream(self._tail):
            request.finished = executor.results(place)
            if executor.clocks is not None and place.words is not None:
                executor.clocks.end(place.words)
        request.copied, request.tail = True, self._tail.record_event()
        place.done = [request.tail]
        return done

    def busy_ms(self, stages: frozenset[int]) -> dict[int, float]:
        """Lane → ms that it works in a period for the requests at these stages."""
        found: dict[int, float] = {}
        for (lane, _), (stage, ms) in self._times.items():
            if stage in stages:
                found[lane] = found.get(lane, 0.0) + ms
        return found

    def _timed(self) -> dict[tuple[int, int], tuple[int, float]]:
        """Lane and position of each segment → its stage, and ms: modelled ones of paced lanes, else those of a replay."""
        executor, period = self.executor, self.graphs.period
        slot = self.graphs.places[0].slot
        assert slot is not None
        found = {}
        for (lane, at), segment in executor.segments.items():
            stage = period.stages[segment.name]
            if executor.times is not None and executor.times.run_time is not None:
                found[lane, at] = stage, executor.times.run_time[segment.name] / 1e6
                continue
            graph, streams = slot.captured((lane, at)), executor.lanes[lane]
            assert graph is not None
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with ISSUING, torch.cuda.device(streams.device), torch.cuda.stream(streams.compute):
                graph.replay()
                begin.record(streams.compute)
                graph.replay()
                end.record(streams.compute)
            end.synchronize()
            found[lane, at] = stage, begin.elapsed_time(end)
        return found

    def flight(self, ticket: Ticket) -> Flight:
        """Behind the outputs of a request that is done."""
        tail = ticket.load.tail
        assert tail is not None
        return Flight(tail)


def sent_of(executor: CudaRequests, sizes: Any) -> int:
    """Bytes that a request sends."""
    return sum(sum(b.nbytes for b in x.boxes) or sizes.get(x.value, 0) for _, _, x in executor.program if isinstance(x, Send))
