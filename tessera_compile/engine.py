"""The engine: many requests in flight through one compiled callable.

    with tessera_compile.Engine(compiled, inflight=8) as engine:
        future = engine.submit(x)
        print(future.result(), engine.stats())

A request is one call of the callable, made by one of ``inflight`` worker threads. Where it reaches a graph of a compiled model,
the graph's program runs on the engine's lanes (``runtime/dispatcher.py``), pipelined with those of other requests; Python between
graphs runs on the worker. Requests that share state that one of them changes follow each other (``runtime/ordering.py``). Graphs
of one lane, many of which Inductor runs alone, run where the worker calls them.

Where a GPU is in use each worker has a stream of its own, which begins behind what was enqueued when the request was submitted;
a result is complete when its future says so.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import heapq
import itertools
import logging
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch

from .batches import Batch, Failed, run_together
from .cuda_ways import CudaWays, make_dispatcher
from .engine_stats import EngineStats, Record
from .passes import torch_compat
from .passes.errors import EngineError, EngineFullError, OptionsError, TesseraWarning
from .pipeline import CompiledGraph
from .runtime.board import Order
from .runtime.cpu_lanes import lane_threads
from .runtime.cuda_callers import Sender
from .runtime.cuda_dispatcher import CudaDispatcher
from .runtime.dispatcher import Dispatcher
from .runtime.enrolment import serve, serving
from .runtime.monitor import Followed, Monitor
from .runtime.ordering import Learnt, Leaves, Ordering, tensors_in, versions_of
from .ways import Turn, Way, Ways

log = logging.getLogger(__name__)

Policy = Literal["auto", "latency", "throughput"]
Scheduling = Literal["auto", "dynamic", "static"]
#: Requests of which stats() has the times.
REMEMBERED = 4096


class RequestFuture(concurrent.futures.Future[Any]):
    """The result of one request: a ``concurrent.futures.Future`` that can also be awaited. Only a request that has not started
    can be cancelled."""

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()


class _Request:
    def __init__(
        self, engine: Engine, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], deadline: float | None
    ) -> None:
        self.engine = engine
        self.number = number
        self.args, self.kwargs = args, kwargs
        self.deadline = deadline
        self.future = RequestFuture()
        self.arrival = time.monotonic()
        self.started = 0.0
        self.inference = torch.is_inference_mode_enabled()
        self.leaves = Leaves.of(args, kwargs)
        self.sender = Sender.here(self.leaves.tensors.values())
        self.following: Followed = "latency"
        self.execution = 0.0  # seconds on the lanes (emulated ones, if paced)
        self.alone = 0.0  # seconds that the plans predict for it alone
        self.written: set[int] = set()
        self.turns: dict[Hashable, Turn] = {}  # Of mixtures, whose graphs it takes by one plan.
        self.tokens: list[float] = []
        self.abandoned: BaseException | None = None
        self.key: Hashable | None = None  # Equal for requests that may be joined with it.
        self.members: list[_Request] = []  # Those that its worker serves with it.
        self.together: Sequence[_Request] = [self]  # Those that run in its call now, itself among them.
        self._settled = threading.Lock()

    def run(self, graph: CompiledGraph, args: list[Any]) -> list[Any]:
        """Called by a graph in the worker's thread."""
        if self.abandoned is not None and self.given_up():
            raise self.abandoned
        return self.engine._run(self, graph, args)

    def given_up(self) -> bool:
        """Whether nobody waits for what runs in its call any more."""
        return all(r.abandoned is not None for r in self.together)

    def settle(self, result: Any = None, error: BaseException | None = None) -> bool:
        """Sets the future, if nobody has yet."""
        if not self._settled.acquire(blocking=False):
            return False
        if self.future.cancelled():
            return False
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
        return True


class Engine:
    """Runs calls of ``compiled``, several at a time, without gradients.

    Args:
        compiled: what ``torch.compile(…, backend="tessera")`` returned, or any callable that calls such.
        inflight: requests that run at once; each has activations of its own.
        policy: ``latency`` or ``throughput``: the plan to follow; ``auto``: the one that the monitor says.
        queue: requests that may wait to start.
        when_full: whether ``submit`` waits for a place in the queue or raises EngineFullError.
        timeout: seconds from submit after which a request's future fails with TimeoutError; None: never.
        scheduling: ``dynamic``: of what can run, what is due first; ``static``: strictly by the plans' steady states; ``auto``:
            static while the throughput plan is followed and at least ``inflight`` requests wait, if the steady states come within
            2 % of the shortest periods with that many in flight.
        window_ms, beta, slo_ms: of the monitor (``runtime/monitor.py``): its window, when to change plan, and a target for the
            time from submit to result.
        batch: which requests may be joined into one call, and how (``batches.py``); None: none.
        order, pipelined, free_transfers: for comparisons: serve segments by ``age`` or ``fifo``, one request at a time, or (of
            paced lanes) let transfers take no time.

    Raises:
        OptionsError: an argument is outside its domain.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        inflight: int = 4,
        policy: Policy = "auto",
        *,
        queue: int = 256,
        when_full: Literal["wait", "refuse"] = "wait",
        timeout: float | None = None,
        scheduling: Scheduling = "auto",
        window_ms: float = 300.0,
        beta: float = 1.5,
        slo_ms: float | None = None,
        batch: Batch | None = None,
        order: Literal["due", "age", "fifo"] = "due",
        pipelined: bool = True,
        free_transfers: bool = False,
    ) -> None:
        for name, value, allowed in (
            ("policy", policy, ("auto", "latency", "throughput")),
            ("when_full", when_full, ("wait", "refuse")),
            ("scheduling", scheduling, ("auto", "dynamic", "static")),
            ("order", order, ("due", "age", "fifo")),
        ):
            if value not in allowed:
                raise OptionsError(f"{name}={value!r}; it takes {', '.join(map(repr, allowed))}")
        for name, number in (("inflight", inflight), ("queue", queue)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise OptionsError(f"{name}={number!r}; it takes a whole number from 1")
        for name, seconds in (("timeout", timeout), ("window_ms", window_ms), ("beta", beta), ("slo_ms", slo_ms)):
            if seconds is not None and not seconds > 0:
                raise OptionsError(f"{name}={seconds!r}; it takes a positive number")
        if not callable(compiled):
            raise OptionsError(
                f"{type(compiled).__name__} cannot be called; pass what torch.compile(…, backend='tessera') returned"
            )
        self._compiled = compiled
        self.inflight, self.policy = inflight, policy
        self._limit, self._refuse, self._timeout = queue, when_full == "refuse", timeout
        self._scheduling, self._order, self._pipelined = scheduling, order, pipelined
        self._free_transfers = free_transfers
        self._batch = batch
        self._unfit: set[Hashable] = set()  # Keys of requests that turned out not to divide.
        self._plans: tuple[Followed, ...] = ("latency", "throughput") if policy == "auto" else (policy,)
        self._monitor = Monitor(window=window_ms / 1e3, beta=beta, target=None if slo_ms is None else slo_ms / 1e3)
        if policy == "throughput":
            self._monitor.following = "throughput"
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._numbers = itertools.count()
        self._ordering, self._learnt = Ordering(), Learnt()
        self._queued: dict[int, _Request] = {}
        self._ready: list[int] = []
        self._running: dict[int, _Request] = {}
        self._closing = False
        self._records: deque[Record] = deque(maxlen=REMEMBERED)
        self._counts: Counter[str] = Counter()
        self._plan_lock = threading.Lock()
        self._dispatcher: Dispatcher | CudaDispatcher | None = None
        self._devices: tuple[str, ...] = ()
        self._short = False  # Whether the steady states are worth following.
        self._ways: weakref.WeakKeyDictionary[CompiledGraph, Ways] = weakref.WeakKeyDictionary()
        #: Of conversations: state's storage → the storage, so that its identity stays taken, and the plan and the turns that it
        #: stays with.
        self._stays: dict[int, tuple[Any, Followed, dict[Hashable, Turn]]] = {}
        self._began = time.monotonic()
        self._workers = [threading.Thread(target=self._serve, name=f"tessera-request-{i}", daemon=True) for i in range(inflight)]
        self._timer = threading.Thread(target=self._watch, name="tessera-timer", daemon=True)
        self._deadlines: list[tuple[float, int, weakref.ref[_Request]]] = []
        self._late = threading.Condition(self._lock)
        for thread in (*self._workers, self._timer):
            thread.start()

    # What users call

    def submit(self, *args: Any, **kwargs: Any) -> RequestFuture:
        """Sends one call; waits while the queue is full (or raises EngineFullError, see ``when_full``).

        Raises:
            EngineError: the engine is closed.
        """
        return self.request(args, kwargs)

    def request(
        self,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        wait: float | None = None,
    ) -> RequestFuture:
        """Like ``submit``, with a time-out of its own.

        Args:
            timeout: seconds from now to its result; by default the engine's.
            wait: seconds to wait for a place in the queue, after which EngineFullError is raised.
        """
        deadline = timeout if timeout is not None else self._timeout
        until = None if wait is None else time.monotonic() + wait
        made = (tuple(args), dict(kwargs or {}))
        key = self._batch.key(*made) if self._batch is not None else None
        with self._lock:
            while not self._closing and len(self._queued) >= self._limit:
                left = None if until is None else until - time.monotonic()
                if self._refuse or (left is not None and left <= 0):
                    self._counts["refused"] += 1
                    raise EngineFullError(
                        f"{len(self._queued)} requests wait already, which is all that queue={self._limit} allows; wait for "
                        "results, or make the queue longer"
                    )
                self._room.wait(left)
            if self._closing:
                raise EngineError("this engine is closed; make another one")
            request = _Request(self, next(self._numbers), *made, None)
            request.key = key
            if deadline is not None:
                request.deadline = request.arrival + deadline
                heapq.heappush(self._deadlines, (request.deadline, request.number, weakref.ref(request)))
                self._late.notify()
            self._queued[request.number] = request
            self._counts["submitted"] += 1
            if self._ordering.enter(request.number, self._learnt.uses(request.leaves)):
                heapq.heappush(self._ready, request.number)
                self._work.notify()
            future = request.future
        future.add_done_callback(_Forget(self, request.number))
        return future

    def map(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The results for ``batches``, in order: a tuple is the arguments of a call, a dict its keywords, anything else its only
        argument. Reads ahead as far as requests run and wait."""
        ahead = self.inflight + min(self.inflight, self._limit)
        futures: deque[RequestFuture] = deque()
        source = iter(batches)
        try:
            while True:
                for batch in itertools.islice(source, ahead - len(futures)):
                    if isinstance(batch, tuple):
                        futures.append(self.submit(*batch))
                    elif isinstance(batch, dict):
                        futures.append(self.submit(**batch))
                    else:
                        futures.append(self.submit(batch))
                if not futures:
                    return
                yield futures.popleft().result()
        finally:
            for future in futures:
                future.cancel()

    def follow(self, plan: Followed) -> None:
        """Follows ``plan`` from the next request on; under ``policy="auto"`` until the monitor says otherwise.

        Raises:
            OptionsError: the engine has only the other plan.
        """
        if plan not in self._plans:
            raise OptionsError(f"plan {plan!r}: this engine has {', '.join(map(repr, self._plans))}")
        with self._lock:
            self._monitor.switch(plan, self._clock())

    def stats(self) -> EngineStats:
        """What the engine has done so far, and is doing."""
        with self._lock:
            records = tuple(self._records)
            counts = dict(self._counts)
            waiting, running = len(self._queued), len(self._running)
            following, switches = self._monitor.following, self._monitor.switches
            dispatcher = self._dispatcher
        busy: tuple[float, ...] = ()
        moved, emulation, held = 0, None, 0
        order: str = "dynamic"
        periods, uncaptured = 0, {}
        if dispatcher is not None:
            busy, moved, _ = dispatcher.busy()
            emulation = dispatcher.emulation()
            held = sum(r.bytes() for r in dispatcher.residents)
            order = "static" if dispatcher.order == "static" else "dynamic"
            if isinstance(dispatcher, CudaDispatcher):
                periods = dispatcher.periods
                with self._plan_lock:
                    found = [ways.reasons() for ways in self._ways.values() if isinstance(ways, CudaWays)]
                uncaptured = {what: why for reasons in found for what, why in reasons.items()}
        return EngineStats.of(
            records, counts, waiting, running, following, order, switches, dict(zip(self._devices, busy, strict=False)), moved,
            held, time.monotonic() - self._began, emulation, periods, uncaptured,
        )  # fmt: skip

    def close(self, now: bool = False) -> None:
        """Ends the engine; returns when its threads are done with requests.

        Args:
            now: False: whatever was submitted is served first. True: what has not started is cancelled, and what runs ends at
                its next instruction with EngineError; graphs that overwrite their caller's tensors are run to their end.
        """
        with self._lock:
            first, self._closing = not self._closing, True
            dropped = list(self._queued.values()) if now else []
            running = list(self._running.values()) if now else []
            self._room.notify_all()
        for request in dropped:
            request.future.cancel()
        for request in running:
            self._abandon(request, EngineError("the engine was closed while this request ran"))
        with self._lock:
            self._work.notify_all()
            self._late.notify_all()
        for worker in self._workers:
            if worker is not threading.current_thread():
                worker.join()
        if first:
            if self._dispatcher is not None:
                self._dispatcher.close()
            log.info("engine closed: %s", self.stats().line())

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(now=error is not None)

    # Threads

    def _serve(self) -> None:
        while (request := self._take()) is not None:
            serve(request)
            try:
                mode = torch.inference_mode() if request.inference else contextlib.nullcontext()
                before = versions_of(request.leaves)
                sender = request.sender
                streams = contextlib.nullcontext() if sender is None else sender.served(request.leaves.tensors.values())
                with mode, torch.no_grad(), streams:
                    result = self._call(request)
                error = None
                if sender is not None:
                    sender.receives(tensors_in(result))
            except BaseException as raised:
                result, error, before = None, raised, {}
            finally:
                serve(None)
            self._over(request, before, error)
            request.settle(result, error)
            request.members.clear()
            del request, result, error, before  # A waiting worker must not keep the last request's tensors alive.

    def _call(self, request: _Request) -> Any:
        """The result of a request; those that its worker serves with it get theirs here."""
        if not request.members:
            return self._compiled(*request.args, **request.kwargs)
        assert self._batch is not None
        before = [versions_of(r.leaves) for r in request.members]
        answers: list[Any] = []
        try:
            answers, unfit = run_together(self._batch, self._compiled, [request, *request.members])
            if unfit:
                warnings.warn(unfit, TesseraWarning, stacklevel=2)
                with self._lock:
                    self._unfit.add(request.key)
        finally:
            answers = answers or [Failed(EngineError("the batch of this request could not be run"))] * (1 + len(before))
            for other, versions, answer in zip(request.members, before, answers[1:], strict=True):
                if other.execution == 0.0:  # It was not run alone.
                    other.execution, other.alone, other.tokens = request.execution, request.alone, list(request.tokens)
                error = answer.error if isinstance(answer, Failed) else None
                self._over(other, versions, error)
                other.settle(None if error is not None else answer, error)
        if isinstance(answers[0], Failed):
            raise answers[0].error
        return answers[0]

    def _join(self, request: _Request) -> None:
        """Takes those that are to run in one call with ``request`` out of the queue."""
        if self._batch is None or not self._joinable(request):
            return
        same = [
            other
            for number in sorted(self._ready)
            if (other := self._queued.get(number)) is not None
            and (other.key, other.inference) == (request.key, request.inference)
            and self._joinable(other)
        ]
        for other in same[: self._batch.together(1 + len(same)) - 1]:
            if other.future.set_running_or_notify_cancel():
                self._start(other)
                request.members.append(other)
        self._counts["joined"] += 1 + len(request.members) if request.members else 0

    def _joinable(self, request: _Request) -> bool:
        return request.key is not None and request.key not in self._unfit and self._learnt.only_reads(request.leaves)

    def _start(self, request: _Request) -> None:
        del self._queued[request.number]
        self._running[request.number] = request
        self._room.notify()
        request.started = time.monotonic()
        request.following = self._monitor.following

    def _take(self) -> _Request | None:
        """The oldest request that may start; None: there will be none."""
        with self._lock:
            while True:
                while self._ready:
                    request = self._queued.get(heapq.heappop(self._ready))
                    if request is None or not request.future.set_running_or_notify_cancel():
                        continue  # Given up: its callback takes it out.
                    self._start(request)
                    self._join(request)
                    self._schedule()
                    return request
                if self._closing and not self._queued:
                    self._work.notify_all()
                    return None
                self._work.wait()

    def _over(self, request: _Request, before: Mapping[Any, int], error: BaseException | None) -> None:
        end = time.monotonic()
        with self._lock:
            del self._running[request.number]
            if error is None and self._learnt.learn(request.leaves, before, request.written):
                for other in self._queued.values():
                    if other.leaves.kind == request.leaves.kind:
                        self._free(self._ordering.relax(other.number, self._learnt.uses(other.leaves)))
            self._free(self._ordering.leave(request.number))
            failed = error is not None or request.abandoned is not None
            self._counts["failed" if failed else "done"] += 1
            if not failed:
                scale = (self._dispatcher.factor if self._dispatcher is not None else 0.0) or 1.0
                arrival, finish = request.arrival / scale, end / scale
                self._records.append(
                    Record(request.started / scale - arrival, finish - request.started / scale,
                           tuple(t / scale - arrival for t in request.tokens))
                )  # fmt: skip
                if self.policy == "auto":
                    was = self._monitor.following
                    execution = request.alone or request.execution or finish - request.started / scale
                    if self._monitor.add(arrival, finish, execution) != was:
                        log.info("engine follows the %s plan; %d requests wait", self._monitor.following, len(self._queued))

    def _free(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            heapq.heappush(self._ready, number)
            self._work.notify()

    def _forget(self, number: int) -> None:
        """Takes a request that was cancelled out of the queue."""
        with self._lock:
            if number in self._queued:
                self._drop(number, "cancelled")

    def _drop(self, number: int, why: str) -> None:
        del self._queued[number]
        self._counts[why] += 1
        self._free(self._ordering.leave(number))
        self._room.notify()
        if self._closing and not self._queued:
            self._work.notify_all()

    def _watch(self) -> None:
        """Fails requests whose time is over."""
        while True:
            with self._lock:
                if self._closing and not self._queued and not self._running:
                    return
                due = self._deadlines[0][0] - time.monotonic() if self._deadlines else None
                if due is None or due > 0:
                    self._late.wait(min(due, 1.0) if due is not None else (0.1 if self._closing else None))
                    continue
                request = heapq.heappop(self._deadlines)[2]()
            if request is not None and not request.future.done():
                self._abandon(request, TimeoutError(f"request {request.number} was not done in time"))

    def _abandon(self, request: _Request, error: BaseException) -> None:
        """Fails a request. What runs of it ends at its next instruction, unless it overwrites its caller's tensors."""
        request.abandoned = error
        with self._lock:
            if request.number in self._queued:
                if not request.future.set_running_or_notify_cancel():
                    return
                self._drop(request.number, "late")
        together = request.together
        if request.settle(error=error) and self._dispatcher is not None and request.given_up():
            self._dispatcher.abort(together[0].number, error)

    # Graphs

    def _run(self, request: _Request, graph: CompiledGraph, args: list[Any]) -> list[Any]:
        executor = graph.executor
        if len(executor.program.lanes) == 1 or graph.options.dryrun:
            results: list[Any] = executor(args)
            return results
        ways = self._ways_of(graph)
        state = [
            (torch_compat.storage_key(x), x)
            for x, name in zip(args, graph.kernels.inputs, strict=True)
            if name in graph.kernels.mutated
        ]
        way = ways.choose(*self._plan_for(request, ways, state))
        request.written.update(key for key, _ in state)
        del state
        dispatcher = self._dispatcher
        try:
            if isinstance(dispatcher, CudaDispatcher):
                assert isinstance(ways, CudaWays)
                issuer = ways.issuer(way)
                results, seconds = dispatcher.call(request.number, issuer.route, issuer.executor, args)
            else:
                assert dispatcher is not None
                results, seconds = dispatcher.call(request.number, way.route, way.executor, args)
        finally:
            ways.release(way)
        request.execution += seconds
        if dispatcher.factor:
            request.alone += way.alone_us / 1e6
        return results

    def _plan_for(self, request: _Request, ways: Ways, state: list[tuple[int, torch.Tensor]]) -> tuple[Followed, Turn | None]:
        """The plan that is being followed and, of a mixture, the request's turn; of a conversation those that it began with,
        where the plans keep state in different places."""
        if not state or ways.same_homes():
            return request.following, self._turn_in(request.turns, ways, request.following)
        with self._lock:
            stays, turns = next((self._stays[key][1:] for key, _ in state if key in self._stays), (request.following, {}))
            for key, tensor in state:
                if key not in self._stays:
                    self._stays[key] = (torch_compat.weak_storage(tensor), stays, turns)
            if len(self._stays) > 1024:
                self._stays = {key: x for key, x in self._stays.items() if not x[0].expired()}
            return stays, self._turn_in(turns, ways, stays)

    def _turn_in(self, turns: dict[Hashable, Turn], ways: Ways, following: Followed) -> Turn | None:
        """The turn that was taken before in this mixture, or a new one."""
        found = turns.get(ways.mixture)
        if found is None and (found := ways.turn(following)) is not None:
            turns[ways.mixture] = found
        return found

    def _ways_of(self, graph: CompiledGraph) -> Ways:
        ways = self._ways.get(graph)
        assert graph.report is not None
        if ways is not None and ways.program is graph.report.program:
            return ways
        with self._plan_lock:
            ways = self._ways.get(graph)
            if ways is not None and ways.program is graph.report.program:
                return ways
            devices = graph.cluster.names
            if self._dispatcher is not None and devices != self._devices:
                raise EngineError(
                    f"this engine runs graphs on {', '.join(self._devices)}, and graph {graph.number} is for "
                    f"{', '.join(devices)}; give models of another cluster an engine of their own"
                )
            pace, made = graph.options.pace, self._dispatcher
            how: dict[str, Any] = {"inflight": self.inflight, "factor": pace, "free_transfers": self._free_transfers}
            on_cuda = graph.options.emulate_on is not None or any(d.kind == "cuda" for d in graph.cluster.devices)
            if made is None:
                if on_cuda:
                    made = make_dispatcher(graph, self._order, self._pipelined)
                else:
                    threads = lane_threads(len(devices))
                    made = Dispatcher(devices, threads, order=self._order, pipelined=self._pipelined, factor=pace)
                self._devices, self._dispatcher = devices, made
            if isinstance(made, CudaDispatcher):
                ways = CudaWays(graph, self._plans, dispatcher=made, **how)
            else:
                ways = Ways(graph, self._plans, **how)
            self._ways[graph] = ways
            self._short = all(w.steady_is_short() for w in self._ways.values())
            return ways

    def _schedule(self) -> None:
        """Chooses between the two ways of scheduling."""
        if self._dispatcher is None:
            return
        deep = self._short and self._monitor.following == "throughput" and len(self._queued) >= self.inflight
        static = self._scheduling == "static" or (self._scheduling == "auto" and deep)
        order: Order = "static" if static else self._order
        if order != self._dispatcher.order:
            self._dispatcher.order = order

    def _clock(self) -> float:
        return time.monotonic() / ((self._dispatcher.factor if self._dispatcher is not None else 0.0) or 1.0)


class _Forget:
    """Called when a future is done: takes its request out of the queue, should it still be there."""

    def __init__(self, engine: Engine, number: int) -> None:
        self._engine, self._number = engine, number

    def __call__(self, _: concurrent.futures.Future[Any]) -> None:
        self._engine._forget(self._number)


def mark_token() -> None:
    """Says that the running request has made a token; for ``stats()``. Outside engines it does nothing.

    Call it between calls of the compiled model, in a loop that is itself what the engine runs.
    """
    request = serving()
    if isinstance(request, _Request):
        request.tokens.append(time.monotonic())


__all__ = ["Engine", "Followed", "RequestFuture", "Way", "mark_token"]
