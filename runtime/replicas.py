"""Copies of weights and state on lanes other than home, and whether they are still current.

A replica is current when the caller passes the same tensor object, with the same storage, address, shape, strides and version
counter as when it was copied. The storage is told by a weak reference, which also keeps its identity from being reused. A weak
reference to the tensor would forbid ``torch.utils.swap_tensors``: of weights the object itself is kept until the next call that
passes another one; of state, which its owner may want to be rid of, the id. AOTAutograd bumps the counter of an input that the
graph mutates before our code runs, so counters are read outside its wrapper: by :func:`watch_call` at entry, and again at exit
for state that a lane wrote. Tensors without a counter (inference tensors) are never current: they are copied on every call.
Writes that no counter sees (``.data``, NumPy views) are not noticed.

A lane decides whether a replica is current when it comes to use it, not when the call was made: calls with other weights may
stand between the two in the lane's queue.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..passes import torch_compat
from .weights import weight_of


@dataclass(frozen=True)
class Sighting:
    """A tensor as it was at the entry of a call.

    ``owner`` is the object that the caller passed: two objects on one storage may have counters of their own. ``version`` is
    None where no counter exists.
    """

    source: torch.Tensor
    owner: torch.Tensor
    place: tuple[object, ...]
    version: int | None


@dataclass(frozen=True)
class _Stamp:
    owner: int
    kept: torch.Tensor | None  # Keeps the id from being reused.
    storage: Any
    place: tuple[object, ...]
    version: int

    @classmethod
    def of(cls, seen: Sighting, keep: bool) -> _Stamp | None:
        if seen.version is None:
            return None
        return cls(id(seen.owner), seen.owner if keep else None, torch_compat.weak_storage(seen.source), seen.place, seen.version)

    def matches(self, seen: Sighting) -> bool:
        return self.owner == id(seen.owner) and (self.place, self.version) == (seen.place, seen.version)


class Replica:
    """One lane's copy of one weight, constant or state, on ``device`` (by default where the source lies).

    memory: what the lane's copies of a loaded model's weights are kept under, for all graphs; by default the device.
    """

    def __init__(self, device: torch.device | None = None, memory: Hashable = None) -> None:
        self.device = device
        self.memory = device if memory is None else memory
        self.tensor: torch.Tensor | None = None
        self.copied = 0  # Bytes copied into it so far, but for a loaded model's weights.
        self._lock = threading.Lock()
        self._use = 0
        self._shared = False
        self._stamp: _Stamp | None = None  # None: not to be trusted.

    def bring(self, seen: Sighting, volatile: bool, in_place: bool = True) -> int:
        """Makes the copy equal to ``seen``; called by the lane that owns it.

        Args:
            volatile: the running call overwrites the source, so that the copy is not to be trusted after it unless
                :meth:`mark` says so.
            in_place: whether an outdated copy may be overwritten; not where other requests are still reading it.

        Returns:
            The number of this use, for :meth:`mark`.
        """
        with self._lock:
            self._use += 1
            stamp, self._stamp = self._stamp, None
            if self.tensor is None or stamp is None or not stamp.matches(seen):
                weight = weight_of(seen.source)
                if weight is not None:
                    self.tensor = weight.on(self.memory, self.device)
                else:
                    # Nothing is written into a weight's copy, which other graphs read.
                    self.tensor = refreshed(None if self._shared or not in_place else self.tensor, seen.source, self.device)
                    self.copied += self.tensor.nbytes
                self._shared = weight is not None
                stamp = _Stamp.of(seen, keep=not volatile)
            if not volatile:
                self._stamp = stamp
            return self._use

    def distrust(self) -> None:
        """The next use copies again."""
        with self._lock:
            self._stamp = None

    def mark(self, use: int, owner: torch.Tensor, source: torch.Tensor) -> None:
        """Says that the copy equals ``source`` as it is now, unless the lane has used it for another call since ``use``."""
        stamp = _Stamp.of(Sighting(source, owner, _place(source), _version(owner)), keep=False)
        with self._lock:
            if use == self._use:
                self._stamp = stamp


class Residents:
    """One lane's replicas for many programs and many states, by where the original lies; used by that lane alone.

    Graphs and plans that read one weight on this lane share its replica. Replicas of originals that are gone go too.

    Args:
        memory: as of :class:`Replica`: the lane's name.
        device: where the replicas lie, by default where their originals do.
    """

    def __init__(self, memory: Hashable = None, device: torch.device | None = None) -> None:
        self._memory, self._device = memory, device
        self._replicas: dict[tuple[object, ...], tuple[Any, Replica]] = {}
        self._sweep_at = 64

    def __len__(self) -> int:
        return len(self._replicas)

    def of(self, seen: Sighting) -> Replica:
        """The replica for ``seen``, perhaps an empty one."""
        found = self._replicas.get(seen.place)
        if found is None:
            if len(self._replicas) >= self._sweep_at:
                self._replicas = {k: v for k, v in self._replicas.items() if not v[0].expired()}
                self._sweep_at = max(64, 2 * len(self._replicas))
            # The weak reference keeps the storage's identity, which is part of the place, from being reused.
            found = self._replicas[seen.place] = (torch_compat.weak_storage(seen.source), Replica(self._device, self._memory))
        return found[1]

    def bytes(self) -> int:
        """Bytes of the replicas of originals that are still there."""
        tensors = [r.tensor for weak, r in self._replicas.values() if r.tensor is not None and not weak.expired()]
        return sum(t.nbytes for t in tensors)


@dataclass
class Watch:
    """The tensors passed to one call with their counters at its entry, and what to do at its exit.

    AOTAutograd hands on most tensors as they are, some as another object on the same memory: they are found by object first, else
    by where they lie. Where two objects lie in one place nobody can say whose counter counts: None.
    """

    by_id: dict[int, tuple[torch.Tensor, int | None]] = field(default_factory=dict)
    by_place: dict[tuple[object, ...], tuple[torch.Tensor, int | None]] = field(default_factory=dict)
    at_exit: list[Callable[[], None]] = field(default_factory=list)

    def add(self, tensor: torch.Tensor) -> None:
        place, version = _place(tensor), _version(tensor)
        other = self.by_place.get(place)
        self.by_id[id(tensor)] = (tensor, version)
        self.by_place[place] = (tensor, version if other is None or other[0] is tensor else None)

    def find(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None] | None:
        return self.by_id.get(id(tensor)) or self.by_place.get(_place(tensor))


_current = threading.local()


@contextlib.contextmanager
def watch_call(args: Sequence[Any]) -> Iterator[None]:
    """Notes the counters of the tensors among ``args``; if the call ends well, does what was deferred to its exit."""
    watch = Watch()
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.layout == torch.strided:
            watch.add(arg)
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
    watch: Watch | None = getattr(_current, "watch", None)
    found = None if watch is None else watch.find(source)
    owner, version = found if found is not None else (source, _version(source))
    return Sighting(source, owner, _place(source), version)


def at_exit(source: torch.Tensor, action: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Calls ``action(owner, source)``, owner being the caller's own object, once its counter has its final value."""
    watch: Watch | None = getattr(_current, "watch", None)
    if watch is None:
        action(source, source)
        return
    found = watch.find(source)
    owner = source if found is None else found[0]
    watch.at_exit.append(lambda: action(owner, source))


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where and how a tensor lies in memory."""
    return torch_compat.storage_key(tensor), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def own_copy(value: Any, device: torch.device | None = None) -> Any:
    """A copy of ``value`` in new storage with the same shape and strides; host numbers are returned as they are.

    device: where it shall lie, by default where ``value`` does. A tensor on the CPU stays there: its kernels run on the host.
    """
    if not isinstance(value, torch.Tensor):
        return value
    where = value.device if device is None or value.device.type == "cpu" else device
    if value.layout != torch.strided:
        return value.to(where, copy=True)
    # Conjugation and negation are bits of the tensor: copy what lies in memory, and set the bit again.
    if value.is_conj():
        return own_copy(value.conj(), device).conj()
    if value.is_neg():
        return torch_compat.negative_view(own_copy(torch_compat.negative_view(value), device))
    if not overlaps(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=where).copy_(value)
    # Expanded dimensions share elements: copy the span of memory that the tensor covers.
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((span,), (1,)).to(where, copy=True).as_strided(value.shape, value.stride(), 0)


def refreshed(replica: torch.Tensor | None, source: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """``source`` copied into ``replica``, or into new storage where that does not fit."""
    if (
        replica is None
        or source.layout != torch.strided
        or (replica.shape, replica.stride(), replica.dtype) != (source.shape, source.stride(), source.dtype)
        or overlaps(source)
        or (replica.is_conj(), replica.is_neg()) != (source.is_conj(), source.is_neg())
        or (replica.is_inference() and not torch.is_inference_mode_enabled())
    ):
        result: torch.Tensor = own_copy(source.detach(), device)
        return result
    return replica.copy_(source)


def overlaps(tensor: torch.Tensor) -> bool:
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
