"""The linear relaxation: its certified bound never exceeds the true optimum, whatever the duals, and for two groups equals it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import sparse

from tessera_compile.passes.mix import HOME, Move, fits, value, worth
from tessera_compile.passes.relaxation import _Rows, certified, integer_plan, relax, relax_together
from tests.mixes import best_of, busy, mix_of, optimum, placements, random_mix


def rows_of(mix, upper):
    rows = _Rows(mix, upper)
    rows.assign()
    rows.moves(rows.uniform())
    rows.loads()
    rows.memory()
    return rows


def chain(count, groups, seed=0, **options):
    draw = np.random.default_rng(seed)
    moves = [Move(f"v{k}", int(draw.integers(0, 3000)), k, (k + 1,)) for k in range(count - 1)]
    return mix_of(draw.uniform(1, 20, (count, groups)).tolist(), moves, **options)


@pytest.mark.parametrize("groups", [2, 3])
def test_bound_is_below_the_optimum_and_a_looser_upper_does_no_harm(groups):
    for seed in range(150):
        mix = random_mix(seed, groups)
        best = optimum(mix)
        if best is None:
            continue
        single, mixture = best
        for upper in (single, 3 * single + 1):
            found = relax(mix, upper or 1.0)
            assert found.bound <= mixture * (1 + 1e-9) + 1e-9


def test_two_groups_without_memory_are_exact():
    for seed in range(200):
        mix = random_mix(seed, 2, limited=False)
        single, mixture = optimum(mix)
        assert relax(mix, single or 1.0).bound == pytest.approx(mixture, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("groups", [2, 3])
def test_a_bound_over_several_mixes_is_that_of_their_plans_together(groups):
    """The mix at another batch size: other times, fewer uses. With two groups and no memory, exact."""
    exact = 0
    for seed in range(100):
        mix = random_mix(seed, groups)
        draw = np.random.default_rng(seed)
        times = mix.times * draw.uniform(1, 3, mix.times.shape)
        other = replace(
            mix,
            times=times,
            counts=mix.counts / 2,
            moves=tuple(replace(m, bytes=m.bytes * 2, count=m.count / 2) for m in mix.moves),
        )
        columns = np.array([busy(m, place) for m in (mix, other) for place in placements(m)]).T
        if not len(columns) or not columns.max(axis=0).min():
            continue
        best = best_of(columns)
        bound, fractions = relax_together([mix, other], 2 * float(columns.max(axis=0).min()))
        for x in fractions:
            assert x is None or x.sum(axis=1) == pytest.approx(1)
        assert bound <= best * (1 + 1e-9)
        assert bound <= relax(mix, float(columns.max())).bound * (1 + 1e-6) + 1e-9
        if groups == 2 and all(math.isinf(g.memory) for g in mix.groups):
            assert bound == pytest.approx(best)
            exact += 1
    assert exact > 20 or groups > 2
    assert relax_together([mix, other], 1e6, time_limit=0)[0] >= 0


@pytest.mark.parametrize("groups", [2, 3])
def test_any_duals_give_a_bound(groups):
    """Weak duality needs no right duals: random ones, of every scale, never give more than the optimum."""
    draw = np.random.default_rng(0)
    for seed in range(60):
        mix = random_mix(seed, groups)
        best = optimum(mix)
        if best is None or best[0] <= 0:
            continue
        single, mixture = best
        matrix, right, cost, upper, equal = rows_of(mix, single).arrays()
        for scale in (1e-3, 1.0, 1e3):
            y = draw.normal(size=len(right)) * scale
            w = draw.normal(size=len(mix.kernels)) * scale
            found = certified(cost, matrix, right, equal, np.ones(len(w)), upper, y, w)
            assert found * single <= mixture * (1 + 1e-9)
            near = certified(cost, matrix, right, equal, np.ones(len(w)), upper, np.minimum(y, 0) * 1e-4, w * 1e-4)
            assert near * single <= mixture * (1 + 1e-9)


def test_duals_that_are_no_numbers_prove_nothing():
    one = sparse.csr_array(np.ones((1, 1)))
    ones = np.ones(1)
    for bad in (math.nan, math.inf):
        assert certified(ones, one, ones, one, ones, ones, np.array([bad]), ones) == -math.inf
        assert certified(ones, one, ones, one, ones, ones, -ones, np.array([bad])) == -math.inf


def test_duals_of_the_wrong_sign_are_clipped():
    """x ≤ 100 with y = 1 would prove 99 of the optimum 0."""
    one, ones = sparse.csr_array(np.ones((1, 1))), np.ones(1)
    assert certified(np.zeros(1), one, 100 * ones, one, ones, ones, ones, np.zeros(1)) == pytest.approx(0.0)


def test_certificate_by_hand():
    """min c where c ≥ 3 x and x = 1: y = −1 on 3 x − c ≤ 0, w = 3."""
    cost, upper = np.array([0.0, 1.0]), np.array([1.0, 10.0])
    a, e = sparse.csr_array(np.array([[3.0, -1.0]])), sparse.csr_array(np.array([[1.0, 0.0]]))
    right = np.array([3.0])
    found = certified(cost, a, np.zeros(1), e, np.ones(1), upper, -np.ones(1), right)
    assert found == pytest.approx(3.0, abs=1e-9)
    assert found <= 3.0
    # With w too big, 3 − 5 is charged to x at its upper bound.
    assert certified(cost, a, np.zeros(1), e, np.ones(1), upper, -np.ones(1), np.array([5.0])) == pytest.approx(3.0)


def test_alike_links_with_a_replica_that_needs_no_move():
    """Three groups, links alike: a value that is current at its reader leaves no group (the bound was above the optimum)."""
    moves = [Move("s", 5000, HOME, (0,), unless=1)]
    mix = mix_of([[None, 1, None], [None, 2, None]], moves)
    assert optimum(mix) == (3.0, 3.0)
    assert relax(mix, 3.0).bound <= 3.0


@pytest.mark.parametrize("groups", [2, 3])
def test_replicas_of_what_a_kernel_made(groups):
    """``unless`` with a kernel as the source: two groups are no longer a cut, but the bound holds."""
    for seed in range(80):
        mix = random_mix(seed, groups)
        last = len(mix.kernels) - 1
        moves = tuple(replace(m, unless=(m.source + 1) % (last + 1)) if m.source != HOME and m.readers else m for m in mix.moves)
        mix = replace(mix, moves=moves)
        best = optimum(mix)
        if best is not None:
            assert relax(mix, best[0] or 1.0).bound <= best[1] * (1 + 1e-9) + 1e-9


def test_activations_take_no_room_where_nothing_runs():
    mix = mix_of([[2, 1], [2, 1]], memory=[20, 3], residents=(("w", 10, (0, 1), False),), activation_bytes=5)
    # 15 bytes on the second group's 3: at most a fifth of the kernels.
    assert relax(mix, 4.0).bound == pytest.approx(4 * 4 / 5, rel=1e-6)


def test_prices_sum_to_one_with_the_sizes():
    mix = chain(30, 2, sizes=[1, 3])
    found = relax(mix, value(mix, [0] * 30))
    total = float(found.group_prices @ [1, 3]) + sum(p * 3 for p in found.link_prices.values())
    assert total == pytest.approx(1.0, abs=1e-6)
    assert found.x.sum(axis=1) == pytest.approx(np.ones(30))


def test_no_time_proves_nothing_but_does_not_fail():
    mix = chain(400, 3)
    found = relax(mix, value(mix, [0] * 400), time_limit=0.0)
    assert 0 <= found.bound <= value(mix, [0] * 400)


@pytest.mark.parametrize("groups", [2, 3])
def test_integer_plan_is_the_best_single_plan(groups):
    for seed in range(40):
        mix = random_mix(seed, groups)
        best = optimum(mix)
        if best is None or best[0] <= 0 or (groups == 3 and len(set(mix.links.values())) == 1):
            continue  # With links alike the rows add them up: a plan, but perhaps not the best.
        found = integer_plan(mix, best[0] * 1.5, 10.0, 1e-9)
        assert found in placements(mix)
        assert value(mix, found) == pytest.approx(best[0], rel=1e-6)


def test_integer_plan_finds_none_better_than_the_optimum():
    mix = mix_of([[3, 4]])
    assert integer_plan(mix, 2.0, 5.0, 1e-9) is None


def test_one_at_a_time_is_a_minimum_cut():
    """The sum of all compute and moves, by enumeration."""
    for seed in range(60):
        mix = random_mix(seed, 2, limited=False)
        sums = [float(w.compute.sum() + w.link.sum()) for w in (worth(mix, p) for p in placements(mix))]
        found = relax(mix, max(sums) or 1.0, one_at_a_time=True)
        assert found.bound == pytest.approx(min(sums), rel=1e-6, abs=1e-9)


def test_memory_rows_hold_only_for_what_does_not_fit():
    residents = tuple((f"w{k}", 10, (k,), False) for k in range(4))
    free = mix_of([[1, 2]] * 4, residents=residents, memory=[40, 40])
    tight = mix_of([[1, 2]] * 4, residents=residents, memory=[20, 40])
    assert relax(free, 8.0).bound == pytest.approx(8 / 3, rel=1e-6)
    # Two kernels at most on the first group: 2 there and 4 on the other.
    assert relax(tight, 8.0).bound == pytest.approx(4.0, rel=1e-6)
    assert not fits(tight, worth(tight, (0, 0, 0, 1)))
