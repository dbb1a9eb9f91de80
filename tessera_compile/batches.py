"""Requests joined along their first dimension: what may be joined, how, and what each gets back.

Nothing is guessed: :class:`Batch` says which arguments and which results have the requests' rows in dimension 0. Requests are
joined only if those arguments agree in all but their values, the others are the same objects, and a call of their kind was seen
to write nothing. What a joined call returns is checked, and where it does not divide the requests are run one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch.utils import _pytree as pytree

from .passes import torch_compat
from .passes.errors import EngineError, OptionsError
from .passes.mix_plan import MixPlan
from .runtime.enrolment import Serving, serve

log = logging.getLogger(__name__)

Name = int | str
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


class Member(Serving, Protocol):
    """A request, as this module sees it. ``together``: those that run in one call now, itself among them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    together: Sequence[Any]
    abandoned: BaseException | None
    written: set[int]


@dataclass(frozen=True)
class Batch:
    """How requests of an engine may be joined: ``Engine(compiled, batch=Batch(8, arguments=(0,)))``.

    Args:
        sizes: how many requests run in one call: so many at once, or one by one; of several numbers the largest for which
            enough wait. Each is a shape of its own to compile.
        arguments: positions or keywords of the call, in whose tensors dimension 0 is the batch.
        outputs: positions or keys of the result, in whose tensors it is; ``all``: in all that there are. The others must be the
            same for every request, which gets a copy.

    Requests on GPUs are not joined.

    Raises:
        OptionsError: sizes are not whole numbers from 2, or no argument is named.
    """

    sizes: int | Sequence[int]
    arguments: Sequence[Name]
    outputs: Sequence[Name] | Literal["all"] = "all"

    def __post_init__(self) -> None:
        sizes = [self.sizes] if isinstance(self.sizes, int) else list(self.sizes)
        if not sizes or any(not isinstance(n, int) or isinstance(n, bool) or n < 2 for n in sizes):
            raise OptionsError(f"batch sizes {self.sizes!r}: they take whole numbers from 2")
        for what, names in (("arguments", self.arguments), ("outputs", self.outputs)):
            if names != "all" and (isinstance(names, str) or not names):
                raise OptionsError(f"batch {what}={names!r}: it takes positions or names, at least one")
        if self.arguments == "all":
            raise OptionsError("batch arguments='all': name those whose dimension 0 is the batch")
        object.__setattr__(self, "sizes", tuple(sorted(set(sizes), reverse=True)))

    @classmethod
    def of(
        cls, plan: MixPlan, arguments: Sequence[Name], outputs: Sequence[Name] | Literal["all"] = "all", *, phase: int = 0
    ) -> Batch | None:
        """The sizes that ``plan`` (of ``plan_mix`` with ``Batches``) has chosen for a phase, by its place in the mix; None if it
        serves every request alone."""
        sizes = sorted({p.batches[phase] for p in plan.plans if p.batches} - {1})
        return cls(sizes, arguments, outputs) if sizes else None

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Descending."""
        assert isinstance(self.sizes, tuple)
        return self.sizes

    def together(self, waiting: int) -> int:
        """How many of ``waiting`` requests to run in one call."""
        return next((n for n in self._sizes if n <= waiting), 1)

    def key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
        """Equal for calls that can be joined; None for one that cannot be joined with any."""
        leaves, spec = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
        found: list[Hashable] = [str(spec)]
        rows: set[int] = set()
        for path, leaf in leaves:
            if isinstance(leaf, torch.Tensor) and self._joins(path):
                if leaf.device.type != "cpu" or leaf.layout != torch.strided or not leaf.dim():
                    return None
                rows.add(leaf.shape[0])
                found.append((leaf.shape, leaf.dtype))
            elif isinstance(leaf, _PLAIN):
                found.append((type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf))
            else:
                found.append(id(leaf))  # The request keeps it alive.
        return tuple(found) if len(rows) == 1 else None

    def join(self, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """One call for several with equal keys: copies of their tensors, one after the other."""
        flat = [pytree.tree_flatten_with_path((tuple(args), dict(kwargs))) for args, kwargs in calls]
        leaves = [leaf for _, leaf in flat[0][0]]
        with torch.inference_mode(False), torch.no_grad():  # With a counter, so that writes into them are seen.
            for i, (path, leaf) in enumerate(flat[0][0]):
                if isinstance(leaf, torch.Tensor) and self._joins(path):
                    leaves[i] = torch.cat([each[i][1] for each, _ in flat])
        args, kwargs = pytree.tree_unflatten(leaves, flat[0][1])
        return args, kwargs

    def split(self, result: Any, count: int, rows: int) -> list[Any]:
        """What each of ``count`` requests of ``rows`` rows gets of a joined call's result: tensors of its own.

        Raises:
            UnfitError: the result does not divide.
        """
        leaves, spec = pytree.tree_flatten_with_path(result)
        each: list[list[Any]] = [[] for _ in range(count)]
        for path, leaf in leaves:
            where = pytree.keystr(path) or "the result"
            if isinstance(leaf, torch.Tensor):
                divides = self.outputs == "all" or (bool(path) and _name(path[0]) in self.outputs)
                if divides and (not leaf.dim() or leaf.shape[0] != count * rows):
                    raise UnfitError(f"{where} has shape {tuple(leaf.shape)}, not {count * rows} rows")
                for number, mine in enumerate(each):
                    mine.append((leaf[number * rows : (number + 1) * rows] if divides else leaf).clone())
            elif isinstance(leaf, _PLAIN):
                for mine in each:
                    mine.append(leaf)
            else:
                raise UnfitError(f"{where} is a {type(leaf).__name__}, which nobody knows how to divide")
        return [pytree.tree_unflatten(mine, spec) for mine in each]

    def rows(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Of a call that has a key."""
        return int(self._tensors(args, kwargs)[0].shape[0])

    def _tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        leaves, _ = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
        return [leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor) and self._joins(path)]

    def _joins(self, path: Sequence[Any]) -> bool:
        return _name(path[1]) in self.arguments  # path[0] says whether it is positional.


class UnfitError(EngineError):
    """A joined call does not give what its members would get one by one; nothing has been lost by trying."""


def run_together(batch: Batch, call: Callable[..., Any], members: Sequence[Member]) -> tuple[list[Any], str]:
    """Runs requests with equal keys in one call, or one by one where that fails.

    The first of ``members`` is the one that the running thread serves.

    Returns:
        For each its result or :class:`Failed`; and why such requests are not to be joined again, or "".
    """
    first = members[0]
    calls = [(m.args, m.kwargs) for m in members]
    reason = ""
    try:
        args, kwargs = batch.join(calls)
        copies = batch._tensors(args, kwargs)
        versions = [t._version for t in copies]
        for m in members:
            m.together = members
        result = call(*args, **kwargs)
        storages = {torch_compat.storage_key(t) for t in copies}
        if first.written - storages:
            # Once for all of them and not once for each: this cannot be taken back.
            error = EngineError("a batch of requests has overwritten state that its members share; do not batch such calls")
            return [Failed(error)] * len(members), str(error)
        if first.written or versions != [t._version for t in copies]:
            raise UnfitError("the call overwrites an argument that was joined")
        return batch.split(result, len(members), batch.rows(*calls[0])), ""
    except UnfitError as error:
        reason = f"requests are not batched any more: {error}"
    except Exception as error:
        log.info("a batch of %d requests failed (%s); running them one by one", len(members), error)
    finally:
        for m in members:
            m.together = [m]
    first.written.clear()  # Into copies.
    answers: list[Any] = []
    for m in members:
        serve(m)
        try:
            if m.abandoned is not None:
                raise m.abandoned
            answers.append(call(*m.args, **m.kwargs))
        except Exception as error:
            answers.append(Failed(error))
        finally:
            serve(first)
    return answers, reason


@dataclass(frozen=True)
class Failed:
    """In the place of a result: a result may be an exception object."""

    error: BaseException


def _name(key: Any) -> Any:
    """The position, key or attribute that an entry of a path stands for."""
    return next((getattr(key, a) for a in ("idx", "key", "name") if hasattr(key, a)), None)
