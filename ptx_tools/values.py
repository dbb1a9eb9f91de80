"""What a register may hold while a kernel is interpreted: an array, nothing known, or an array that is known in some threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Poison:
    """A value that is unknown in every thread."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = Poison()


@dataclass(slots=True)
class Partial:
    """A value that is unknown where `bad`."""

    array: Array
    bad: Array


Value = Array | Poison | Partial


def blend(mask: Array, new: Value, old: Value) -> Value:
    """`new` where the mask holds, `old` elsewhere."""
    if isinstance(new, np.ndarray) and isinstance(old, np.ndarray):
        return np.where(mask, new, old)
    new_array, new_bad = _parts(new)
    old_array, old_bad = _parts(old)
    if new_array is None and old_array is None:
        return UNKNOWN
    bad = np.where(mask, new_bad, old_bad)
    if new_array is None or old_array is None:
        array = old_array if new_array is None else new_array
        assert array is not None
    else:
        array = np.where(mask, new_array, old_array)
    return Partial(array, bad) if bad.any() else array


def and_bad(value: Value, bad: Array) -> Value:
    """The value, unknown also where `bad`."""
    if isinstance(value, Poison):
        return value
    if isinstance(value, Partial):
        return Partial(value.array, value.bad | bad)
    return Partial(value, bad)


def _parts(value: Value) -> tuple[Array | None, Array]:
    if isinstance(value, Poison):
        return None, np.ones((1, 1), bool)
    if isinstance(value, Partial):
        return value.array, value.bad
    return value, np.zeros((1, 1), bool)
