"""Plans that cross less: what they are worth in the mix as it is, and when they serve more."""

from __future__ import annotations

import numpy as np
import pytest

from tessera_compile.passes.crossings import plans_by_crossings
from tessera_compile.passes.mix import Group, Mix, Move, value
from tessera_compile.passes.mixture import best_mixture


def zigzag(count=12, weight=4.0, memory=1e9):
    """A chain of kernels that are fast in turns on one and on the other of two devices, and a long job that suits the second."""
    a, b = [10.0, 14.0], [14.0, 10.0]
    times = np.array([*(a if i % 2 == 0 else b for i in range(count)), [120.0, 60.0]])
    moves = tuple(Move(f"v{i}", 1000, i, (i + 1,), count=weight) for i in range(count - 1))
    of = np.array([0] * count + [1])
    counts = np.array([weight] * count + [1.0])
    return Mix(
        tuple(f"k{i}" for i in range(count + 1)),
        ("step", "long"),
        of,
        {"step": weight, "long": 1.0},
        counts,
        times,
        (Group("d0", ("d0",), memory), Group("d1", ("d1",), memory)),
        {(0, 1): (1e-5, 1.0), (1, 0): (1e-5, 1.0)},
        moves,
        (-1,) * (count + 1),
        ("other",) * (count + 1),
        residents=(("w", 1000, (0, 1), False),),
    )


def crossings(mix, plan):
    place = plan.placement
    return sum(place[mix.kernels[m.source]] != place[mix.kernels[m.readers[0]]] for m in mix.moves)


def test_dearer_moves_make_plans_that_cross_less_and_are_worth_what_they_say():
    mix = zigzag()
    best = best_mixture(mix)
    found = plans_by_crossings(mix, best, prices_us=(10.0, 1e6))
    assert found[0] is best
    assert len(found) == 5
    for plan in found:
        groups = [g.name for g in mix.groups]
        loads = []
        for shared in plan.plans:
            place = [groups.index(shared.placement[k]) for k in mix.kernels]
            assert shared.bottleneck_us == pytest.approx(value(mix, place))
            loads.append(shared.bottleneck_us)
        assert plan.bottleneck_us <= max(loads) + 1e-9
        assert plan.bottleneck_us >= best.bound_us - 1e-6
        assert sum(p.share for p in plan.plans) == pytest.approx(1.0)
        assert sum(plan.whole) >= len(plan.plans)
    assert max(crossings(mix, p) for p in best.plans) > 0
    assert [crossings(mix, p) for p in found[-1].plans] == [0]  # A million µs a move: none is worth it.


def test_where_memory_binds_there_are_no_others():
    mix = zigzag(memory=900.0)
    mix.check()
    best = best_mixture(zigzag())
    assert plans_by_crossings(mix, best) == [best]
