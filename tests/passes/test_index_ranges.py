from __future__ import annotations

import itertools

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Identity, Max, ModularIndexing

from tessera_compile.passes.index_ranges import MOST_ELEMENTS, index_bytes
from tessera_compile.ptx_tools import Intervals

a, b, s = sympy.symbols("a b s", integer=True, nonnegative=True)


@pytest.mark.parametrize(
    "index",
    [
        a * 10 + b,
        a + 5 * b + 3,
        FloorDiv(a, 2) * 7 + ModularIndexing(b, 2, 3),
        ModularIndexing(a * 4 + b, 3, 5) - 2,
        Max(a, b) * 2,
        a**2 + b % 2,
        sympy.Integer(4),
    ],
)
def test_bytes_of_an_index_are_those_of_each_point(index):
    wanted = set()
    for x, y in itertools.product(range(6), range(4)):
        at = int(sympy.sympify(index).subs({a: x, b: y}).doit())
        wanted.update(range(at * 4, at * 4 + 4))
    found = index_bytes(index, {"a": sympy.Integer(6), "b": 4}, 4)
    assert found == Intervals.of((x, x + 1) for x in wanted)


def test_wrappers_mean_what_is_in_them():
    assert index_bytes(Identity(a) * 3 + b, {"a": 2, "b": 2}, 1) == Intervals.of([(0, 2), (3, 5)])


def test_what_cannot_be_enumerated_is_not():
    assert index_bytes(a * s, {"a": 4}, 4) is None  # a symbol without range
    assert index_bytes(a, {"a": s}, 4) is None  # a range that is no number
    assert index_bytes(sympy.Function("indirect")(a), {"a": 4}, 4) is None
    assert index_bytes(a, {"a": MOST_ELEMENTS + 1}, 4) is None
    assert index_bytes(sympy.Integer(0), {"a": MOST_ELEMENTS + 1}, 4) == Intervals.of([(0, 4)])  # none of its variables counts
    assert index_bytes(a, {"a": 0}, 4) == Intervals.of(())
