"""Worker threads, one a lane, with a thread setting of their own that never reaches the user's threads."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch

T = TypeVar("T")
Job = Callable[[], None]


class LanePool:
    """``count`` threads that run one job at a time each, in the order in which jobs were submitted.

    Args:
        threads: intra-operator threads of each lane.
    """

    def __init__(self, count: int, threads: int, depth: int = 0) -> None:
        self.count = count
        self.threads = threads
        self._depth = depth
        self._queues: list[queue.SimpleQueue[Job | None]] = [queue.SimpleQueue() for _ in range(count)]
        self._lock = threading.Lock()
        default = _in_fresh_thread(torch.get_num_threads)
        ready = threading.Barrier(count + 1)
        self._workers = [
            threading.Thread(target=self._work, args=(q, ready), name=f"tessera-lane-{i}", daemon=True)
            for i, q in enumerate(self._queues)
        ]
        for worker in self._workers:
            worker.start()
        ready.wait()
        # torch.set_num_threads acts on the calling thread and on the default that threads started later take over. The lanes
        # have theirs by now; a thread that dies at once gives the user's default back.
        _in_fresh_thread(lambda: torch.set_num_threads(default))

    def submit(self, jobs: Sequence[Job]) -> None:
        """Gives job i to lane i. Jobs of one call stand in every lane's queue in the same order relative to other calls."""
        with self._lock:
            for q, job in zip(self._queues, jobs, strict=True):
                q.put(job)

    def close(self) -> None:
        """Ends the threads after the jobs submitted so far."""
        for q in self._queues:
            q.put(None)

    def _work(self, jobs: queue.SimpleQueue[Job | None], ready: threading.Barrier) -> None:
        _here.depth = self._depth + 1
        torch.get_num_threads()  # Initialises this thread; torch would otherwise overwrite the setting at its first operator.
        torch.set_num_threads(self.threads)
        ready.wait()
        while (job := jobs.get()) is not None:
            job()
            del job  # A waiting lane must not keep the last request's tensors alive.


_here = threading.local()
_pools: dict[tuple[int, ...], LanePool] = {}
_pools_lock = threading.Lock()


def shared_pool(count: int, threads: int) -> LanePool:
    """The pool of this process for ``count`` lanes.

    A forked child gets its own, since threads don't survive a fork; so does a call made from within a lane (by an operator that
    itself calls a compiled function), since that lane is busy until the call returns.
    """
    depth = getattr(_here, "depth", 0)
    key = (os.getpid(), depth, count, threads)
    with _pools_lock:
        if key not in _pools:
            _pools[key] = LanePool(count, threads, depth)
        return _pools[key]


def _in_fresh_thread(function: Callable[[], T]) -> T:
    result: list[T] = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def errand(function: Callable[[], T]) -> tuple[Job, Future[T]]:
    """A job that calls ``function`` in another thread as this one would, in inference mode or not, and without gradients; and
    what comes of it."""
    outcome: Future[T] = Future()
    inference = torch.is_inference_mode_enabled()

    def job() -> None:
        try:
            with torch.inference_mode(inference), torch.no_grad():
                outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    return job, outcome
