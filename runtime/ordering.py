"""Which requests must follow which: those that share state that one of them changes, in the order in which they came.

A request uses things (storages of tensors, cache objects, the model's own buffers), each only read or also written. It is free
to go when no earlier request that is not over writes what it uses, or uses what it writes. All uses are entered together when
the request comes, so nobody waits in a circle; requests that share nothing never wait for each other.

What a request will write cannot be seen beforehand, so it is learnt: of a *kind* of call (the structure of its arguments) the
first one is taken to write all that it is given, and the model's buffers too; afterwards it is known what it did write.
"""

from __future__ import annotations

import enum
import functools
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..passes import torch_compat

Key = Hashable
Path = tuple[Hashable, ...]
#: The state that belongs to the model and not to an argument.
MODEL: Key = "model"

_PLAIN = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    torch.nn.Module,
    enum.Enum,
    type,
)


class Ordering:
    """Requests by number, ascending as they come. Not safe for threads: the caller has a lock."""

    def __init__(self) -> None:
        self._lines: dict[Key, deque[tuple[int, bool]]] = {}
        self._uses: dict[int, Mapping[Key, bool]] = {}
        self._blocked: dict[int, set[Key]] = {}

    def enter(self, number: int, uses: Mapping[Key, bool]) -> bool:
        """Enters a request that uses each key (True: also writes it); whether it is free to go now."""
        self._uses[number] = dict(uses)
        blocked = set()
        for key, writes in uses.items():
            line = self._lines.setdefault(key, deque())
            if line and (writes or any(w for _, w in line)):
                blocked.add(key)
            line.append((number, writes))
        self._blocked[number] = blocked
        return not blocked

    def leave(self, number: int) -> list[int]:
        """Takes out a request that is over, or given up; those that are free to go now and were not before."""
        uses = self._uses.pop(number)
        del self._blocked[number]
        return [n for key, writes in uses.items() for n in self._change(key, (number, writes), None)]

    def relax(self, number: int, uses: Mapping[Key, bool]) -> list[int]:
        """Says that a request uses no more than ``uses``, which are among those that it was entered with; those that are free to
        go now and were not before."""
        had = self._uses[number]
        self._uses[number] = {key: uses[key] for key in had if key in uses}
        free = []
        blocked = self._blocked[number]
        if blocked and not blocked & set(uses):
            free.append(number)
        blocked &= set(uses)
        for key, writes in had.items():
            if key not in uses or writes != uses[key]:
                free += self._change(key, (number, writes), (number, uses[key]) if key in uses else None)
        return free

    def _change(self, key: Key, old: tuple[int, bool], new: tuple[int, bool] | None) -> list[int]:
        """Changes one entry of a line, or takes it out; those that this makes free."""
        line = self._lines[key]
        place = line.index(old)
        del line[place]
        if new is not None:
            line.insert(place, new)
        if not line:
            del self._lines[key]
        free = []
        for place, (other, writes) in enumerate(line):
            if writes and place:
                break
            if key in self._blocked[other]:
                self._blocked[other].remove(key)
                if not self._blocked[other]:
                    free.append(other)
            if writes:
                break
        return free

    def __len__(self) -> int:
        return len(self._uses)


@dataclass(frozen=True)
class Leaves:
    """What a call is given: tensors and other objects that may hold state, by their place among the arguments."""

    tensors: Mapping[Path, torch.Tensor]
    objects: Mapping[Path, Any]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Leaves:
        tensors: dict[Path, torch.Tensor] = {}
        objects: dict[Path, Any] = {}
        stack: list[tuple[Path, Any]] = [((name,), value) for name, value in (*enumerate(args), *kwargs.items())]
        while stack:
            path, value = stack.pop()
            if isinstance(value, torch.Tensor):
                tensors[path] = value
            elif isinstance(value, (tuple, list)):
                stack += [((*path, i), x) for i, x in enumerate(value)]
            elif type(value) is dict:
                stack += [((*path, name), x) for name, x in value.items()]
            elif not isinstance(value, _PLAIN) and not callable(value):
                objects[path] = value
        return cls(tensors, objects)

    @functools.cached_property
    def kind(self) -> Hashable:
        """Equal for calls of which one tells what the other will write."""
        tensors = ((p, t.dtype, t.dim()) for p, t in self.tensors.items())
        return frozenset(tensors), frozenset((p, type(x)) for p, x in self.objects.items())


@dataclass
class _Known:
    paths: set[Path] = field(default_factory=set)
    model: bool = False


class Learnt:
    """What calls of each kind were seen to write. Not safe for threads."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Known] = {}

    def uses(self, leaves: Leaves) -> dict[Key, bool]:
        """What a call uses, and whether it is expected to write it."""
        known = self._kinds.get(leaves.kind)
        uses: dict[Key, bool] = {MODEL: known is None or known.model}
        for path, tensor in leaves.tensors.items():
            key = ("storage", torch_compat.storage_key(tensor)) if tensor.layout == torch.strided else ("tensor", id(tensor))
            uses[key] = uses.get(key, False) or known is None or path in known.paths
        for path, value in leaves.objects.items():
            if known is None or path in known.paths:
                uses["object", id(value)] = True
        return uses

    def only_reads(self, leaves: Leaves) -> bool:
        """Whether calls like this one were seen, and none of them to write anything."""
        known = self._kinds.get(leaves.kind)
        return known is not None and not known.paths and not known.model

    def learn(self, leaves: Leaves, versions: Mapping[Path, int], written: Iterable[int]) -> bool:
        """Takes note of a call that has ended well; whether it was the first of its kind.

        Args:
            versions: :func:`versions_of` its leaves before it.
            written: identities of the storages that its graphs have overwritten.
        """
        first = leaves.kind not in self._kinds
        known = self._kinds.setdefault(leaves.kind, _Known())
        left = set(written)
        after = versions_of(leaves)
        for path, tensor in leaves.tensors.items():
            key = torch_compat.storage_key(tensor) if tensor.layout == torch.strided else None
            if key in left or after.get(path) != versions.get(path):
                known.paths.add(path)
        left -= {torch_compat.storage_key(t) for t in leaves.tensors.values() if t.layout == torch.strided}
        for path, value in leaves.objects.items():
            held = list(tensors_in(value))
            if held:
                known.paths.add(path)
                left -= {torch_compat.storage_key(t) for t in held if t.layout == torch.strided}
        known.model = known.model or bool(left)
        return first


def versions_of(leaves: Leaves) -> dict[Path, int]:
    """The counters of writes of the tensors that have one."""
    return {p: t._version for p, t in leaves.tensors.items() if not t.is_inference()}


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Tensors that ``value`` holds, a few attributes and containers deep."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if depth == 0 or isinstance(value, _PLAIN):
        return
    if isinstance(value, (tuple, list)):
        inside: Iterable[Any] = value
    elif isinstance(value, dict):
        inside = value.values()
    else:
        inside = getattr(value, "__dict__", {}).values()
    for x in inside:
        yield from tensors_in(x, depth - 1)
