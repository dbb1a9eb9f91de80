"""An index expression over ranges of its variables → the bytes that it stands for.

The expressions are those of Inductor's read/write sets: integer arithmetic with ``FloorDiv``, ``ModularIndexing`` and the like.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ptx_tools.footprints import Intervals

Ints = npt.NDArray[np.int64]

#: Elements up to which an index is enumerated.
MOST_ELEMENTS = 1 << 25


def index_bytes(index: Any, ranges: Mapping[str, Any], itemsize: int) -> Intervals | None:
    """Bytes of the elements ``index`` (a SymPy expression, in elements) takes while each variable runs from 0 to its range.

    None where it cannot be enumerated: a size or a variable that is not known, a function that is not, more than
    ``MOST_ELEMENTS`` elements. Negative indices are kept.
    """
    sizes = {}
    for name, size in ranges.items():
        if not getattr(size, "is_number", isinstance(size, int)):
            return None
        sizes[name] = int(size)
    used = [name for name in sizes if any(str(s) == name for s in getattr(index, "free_symbols", ()))]
    if 0 in sizes.values():
        return Intervals.of(())
    if math.prod(sizes[name] for name in used) > MOST_ELEMENTS:
        return None
    env: dict[str, Ints] = {}
    for place, name in enumerate(used):
        shape = [1] * len(used)
        shape[place] = sizes[name]
        env[name] = np.arange(sizes[name], dtype=np.int64).reshape(shape)
    try:
        at = np.unique(_evaluate(index, env))
    except KeyError:
        return None
    return Intervals.merge(at * itemsize, at * itemsize + itemsize)


def _evaluate(expression: Any, env: Mapping[str, Ints]) -> Ints:
    """Raises KeyError where a symbol or a function is not known."""
    if isinstance(expression, int) or getattr(expression, "is_Integer", False):
        return np.array(int(expression), np.int64)
    if expression.is_Symbol:
        return env[str(expression)]
    args = [_evaluate(a, env) for a in expression.args]
    name = expression.func.__name__
    result: Ints
    if name == "Add":
        result = args[0]
        for more in args[1:]:
            result = result + more
        return result
    if name == "Mul":
        result = args[0]
        for more in args[1:]:
            result = result * more
        return result
    if name == "Pow" and (args[1] >= 0).all():
        result = args[0] ** args[1]
        return result
    if name in ("FloorDiv", "CleanDiv"):
        result = args[0] // args[1]
        return result
    if name == "ModularIndexing":  # (base // divisor) % modulus
        result = (args[0] // args[1]) % args[2]
        return result
    if name in ("Mod", "PythonMod"):
        result = args[0] % args[1]
        return result
    if name in ("Max", "Min"):
        result = args[0]
        for more in args[1:]:
            result = np.maximum(result, more) if name == "Max" else np.minimum(result, more)
        return result
    if name in ("Identity", "ToInt"):
        return args[0]
    raise KeyError(name)
