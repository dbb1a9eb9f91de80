"""Copies of weights and state on lanes other than home, and whether they are still current.

A replica is current when the source tensor has the same storage, address and version counter as when it was copied. The
storage is told by a weak reference, which also keeps its identity from being reused. AOTAutograd bumps the counter of an input
that the graph mutates before our code runs, so counters are read outside its wrapper: by :func:`watch_call` at entry, and again
at exit for state that a lane wrote. Tensors without a counter (inference tensors) are never current: they are copied on every
call. Writes that no counter sees (``.data``, NumPy views) are not noticed.

A lane decides whether a replica is current when it comes to use it, not when the call was made: calls with other weights may
stand between the two in the lane's queue.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..passes import torch_compat


@dataclass(frozen=True)
class Sighting:
    """A tensor as it was at the entry of a call. ``version`` is None where no counter exists."""

    source: torch.Tensor
    storage: int
    address: int
    version: int | None


class Replica:
    """One lane's copy of one weight, constant or state."""

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None
        self._lock = threading.Lock()
        self._use = 0
        self._stamp: tuple[Any, int, int] | None = None  # (weak storage, address, version); None: not to be trusted

    def bring(self, seen: Sighting, volatile: bool) -> int:
        """Makes the copy equal to ``seen``; called by the lane that owns it.

        Args:
            volatile: the running call overwrites the source, so that the copy is not to be trusted after it unless
                :meth:`mark` says so.

        Returns:
            The number of this use, for :meth:`mark`.
        """
        with self._lock:
            self._use += 1
            stamp, self._stamp = self._stamp, None
            known = stamp is not None and (stamp[0].cdata, *stamp[1:]) == (seen.storage, seen.address, seen.version)
            if self.tensor is None or not known:
                self.tensor = refreshed(self.tensor, seen.source)
                stamp = None
                if seen.version is not None:
                    stamp = (torch_compat.weak_storage(seen.source), seen.address, seen.version)
            if not volatile:
                self._stamp = stamp
            return self._use

    def mark(self, use: int, source: torch.Tensor) -> None:
        """Says that the copy equals ``source`` as it is now, unless the lane has used it for another call since ``use``."""
        version = _version(source)
        with self._lock:
            if use == self._use and version is not None:
                self._stamp = (torch_compat.weak_storage(source), source.data_ptr(), version)


@dataclass
class Watch:
    """The tensors passed to one call, by storage, their counters at its entry, and what to do at its exit."""

    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    versions: dict[int, int | None] = field(default_factory=dict)
    at_exit: list[Callable[[], None]] = field(default_factory=list)


_current = threading.local()


@contextlib.contextmanager
def watch_call(args: Sequence[Any]) -> Iterator[None]:
    """Notes the counters of the tensors among ``args``; if the call ends well, does what was deferred to its exit."""
    watch = Watch()
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.layout == torch.strided:
            key = torch_compat.storage_key(arg)
            watch.tensors[key] = arg
            watch.versions[key] = _version(arg)
    outer = getattr(_current, "watch", None)
    _current.watch = watch
    try:
        yield
        for action in watch.at_exit:
            action()
    finally:
        _current.watch = outer


def sight(source: torch.Tensor) -> Sighting:
    """``source`` as it was when the running call began."""
    key = torch_compat.storage_key(source)
    watch: Watch | None = getattr(_current, "watch", None)
    version = watch.versions[key] if watch is not None and key in watch.versions else _version(source)
    return Sighting(source, key, source.data_ptr(), version)


def at_exit(source: torch.Tensor, action: Callable[[torch.Tensor], None]) -> None:
    """Calls ``action`` with the caller's own tensor of ``source``'s storage, once its counter has its final value."""
    watch: Watch | None = getattr(_current, "watch", None)
    if watch is None:
        action(source)
    else:
        owner = watch.tensors.get(torch_compat.storage_key(source), source)
        watch.at_exit.append(lambda: action(owner))


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def own_copy(value: Any) -> Any:
    """A copy of ``value`` in new storage with the same shape and strides; host numbers are returned as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout != torch.strided or value.is_conj() or value.is_neg():
        return value.clone()
    if not _overlaps(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
    # Expanded dimensions share elements: copy the span of memory that the tensor covers.
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((span,), (1,)).clone().as_strided(value.shape, value.stride(), 0)


def refreshed(replica: torch.Tensor | None, source: torch.Tensor) -> torch.Tensor:
    """``source`` copied into ``replica``, or into new storage where that does not fit."""
    if (
        replica is None
        or source.layout != torch.strided
        or (replica.shape, replica.stride(), replica.dtype) != (source.shape, source.stride(), source.dtype)
        or _overlaps(source)
        or (replica.is_inference() and not torch.is_inference_mode_enabled())
    ):
        result: torch.Tensor = own_copy(source.detach())
        return result
    return replica.copy_(source)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two indices of ``tensor`` may reach one element."""
    if tensor.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
