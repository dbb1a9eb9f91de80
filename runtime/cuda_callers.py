"""Who calls on which stream: what hands tensors from the stream of a request's sender to that of the thread that serves it.

Threads that serve requests have a stream of their own on each GPU: on a common one each request would wait for those before it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

import torch

_here = threading.local()


class Sender:
    """The current device and streams of a thread, and what is enqueued there so far.

    Args:
        tensors: those that it sends.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.device = torch.cuda.current_device()
        indices = {self.device, *(t.device.index or 0 for t in tensors if t.is_cuda)}
        self.streams = {index: torch.cuda.current_stream(index) for index in sorted(indices)}
        self.events = {index: stream.record_event() for index, stream in self.streams.items()}

    @classmethod
    def here(cls, tensors: Iterable[torch.Tensor]) -> Sender | None:
        """The calling thread; None where nobody uses a GPU."""
        return cls(tensors) if torch.cuda.is_initialized() else None

    @contextlib.contextmanager
    def served(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """In the serving thread: its own streams are current, behind what the sender had enqueued. What the block enqueues there
        is done when it ends."""
        with contextlib.ExitStack() as stack:
            mine, done = {}, {}
            for index in sorted(self.streams, key=lambda i: i == self.device):  # The last one stays the current device.
                mine[index], done[index] = _own(index)
                stack.enter_context(torch.cuda.stream(mine[index]))
                mine[index].wait_event(self.events[index])
            for tensor in tensors:
                if tensor.is_cuda and tensor.layout == torch.strided:
                    tensor.record_stream(mine[tensor.device.index or 0])
            try:
                yield
            finally:
                for index, stream in mine.items():
                    done[index].record(stream)
                    done[index].synchronize()

    def receives(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tells the allocator that the sender's streams will use the results."""
        for tensor in tensors:
            if tensor.is_cuda and tensor.layout == torch.strided:
                index = tensor.device.index or 0
                tensor.record_stream(self.streams[index] if index in self.streams else torch.cuda.current_stream(index))


def _own(index: int) -> tuple[torch.cuda.Stream, torch.cuda.Event]:
    """The thread's stream on a GPU, and an event that is waited for asleep."""
    streams: dict[int, tuple[torch.cuda.Stream, torch.cuda.Event]] = _here.__dict__.setdefault("streams", {})
    if index not in streams:
        # torch hands the streams of a priority out in turn, and captures are made on some of the default one: what is enqueued
        # here must not get into them.
        streams[index] = torch.cuda.Stream(index, priority=-1), torch.cuda.Event(blocking=True)
    return streams[index]
