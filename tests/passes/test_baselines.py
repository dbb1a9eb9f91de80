"""The plans that people use today: which placements they are, by hand, and that none is left out or wrong."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from tessera_compile.passes.baselines import simple_plans
from tessera_compile.passes.mix import Move, resources, value, worth
from tessera_compile.passes.mixture import _master, best_mixture
from tests.mixes import best_of, mix_of, optimum, random_mix


def values(mix):
    return simple_plans(mix).values(mix, lambda of, pool: _master(of, pool)[1])


def test_singles_and_replicas_by_hand():
    """Rates add up: 1/10 and 2/20 requests a µs."""
    mix = mix_of([[4, 8], [6, 12]], sizes=[1, 2], layers=(-1, -1), blocks=("other", "other"))
    assert values(mix) == {"single:g0": 10, "single:g1": 20, "replicas": 5}


def test_replicas_are_the_sum_of_rates():
    for seed in range(30):
        mix = random_mix(seed, 3, limited=False)
        found = values(mix)
        if (
            len(simple_plans(mix).kinds["single"]) == 3
            and not any(m.to_home or m.source == -1 for m in mix.moves)
            and found["replicas"] > 0
        ):
            rates = [g.size / found[f"single:{g.name}"] for g in mix.groups]
            assert found["replicas"] == pytest.approx(1 / sum(rates))


def test_layers_are_every_cut_of_two_groups():
    """Kernels before the first layer go with it, those after the last with that one."""
    mix = mix_of([[1, 1]] * 5, layers=(-1, 0, 1, 2, -1), blocks=("other",) * 5)
    kinds = simple_plans(mix).kinds
    cuts = {(0, 0, 1, 1, 1), (0, 0, 0, 1, 1), (1, 1, 0, 0, 0), (1, 1, 1, 0, 0)}
    assert set(kinds["layers"]) == cuts
    assert "attention-ffn" not in kinds
    assert "prefill-decode" not in kinds


def test_layers_of_three_groups_are_balanced():
    """The dynamic program finds the cuts that balance compute, in the best order, as all cuts do."""
    rows = [[3, 1, 2], [5, 4, 4], [1, 2, 6], [2, 2, 2], [7, 3, 5]]
    mix = mix_of(rows, layers=(0, 1, 2, 3, 4), blocks=("other",) * 5)
    best = math.inf
    for order in itertools.permutations(range(3)):
        for a, b in itertools.combinations_with_replacement(range(6), 2):
            place = [order[(k >= a) + (k >= b)] for k in range(5)]
            best = min(best, value(mix, place))
    assert values(mix)["layers"] == best


def test_layers_that_one_group_cannot_run_go_elsewhere():
    rows = [[1, None, 5], [1, 1, 1], [1, 1, 1], [None, 9, None]]
    mix = mix_of(rows, layers=(0, 1, 2, 3), blocks=("other",) * 4)
    assert values(mix)["layers"] == 9


def test_blocks_and_phases():
    moves = [Move("kv", 1000, 1, (2,))]
    blocks = ("attention", "ffn", "attention", "other")
    mix = mix_of([[1, 2]] * 4, moves, workload=[0, 0, 1, 1], weights=[1.0, 3.0], layers=(-1,) * 4, blocks=blocks)
    kinds = simple_plans(mix).kinds
    assert set(kinds["attention-ffn"]) == {(0, 1, 0, 0), (0, 1, 0, 1), (1, 0, 1, 0), (1, 0, 1, 1)}
    assert set(kinds["prefill-decode"]) == {(0, 0, 1, 1), (1, 1, 0, 0)}
    assert values(mix)["prefill-decode"] == min(max(2, 12), max(4, 6))


def test_pins_and_infeasible_pairs_leave_plans_out():
    mix = mix_of([[1, None], [1, 1]], pins={1: 0})
    assert set(simple_plans(mix).placements()) == {(0, 0)}
    assert values(mix) == {"single:g0": 2, "replicas": 2}


def test_mixtures_of_simple_plans_share_memory():
    """Two halves fit, but not with the two other halves: a layer split mixed with its reverse is no plan."""
    residents = (("a", 10, (0,), False), ("b", 10, (1,), False))
    free = mix_of([[2, 2], [4, 4]], residents=residents, layers=(0, 1))
    tight = mix_of([[2, 2], [4, 4]], residents=residents, layers=(0, 1), memory=[10, 10])
    assert values(free)["layers+replicas"] == 3
    assert values(tight) == {"layers": 4, "attention-ffn": 4}
    found = best_mixture(tight)
    assert found.bottleneck_us == 4
    assert len(found.plans) == 1


def test_no_baseline_beats_the_true_optimum():
    for seed in range(120):
        mix = random_mix(seed, 2 + seed % 2)
        best = optimum(mix)
        if best is None:
            continue
        for name, us in values(mix).items():
            floor = best[1] if "replicas" in name else best[0]
            assert us >= floor * (1 - 1e-9) - 1e-9, name


def test_mixture_with_replicas_is_a_linear_program():
    for seed in range(40):
        mix = replace(random_mix(seed, 2, limited=False), inner={})
        plans = simple_plans(mix)
        found = values(mix)
        for kind in ("layers", "attention-ffn", "prefill-decode"):
            if f"{kind}+replicas" in found:
                pool = dict.fromkeys([*plans.kinds[kind], *plans.kinds["single"]])
                columns = [resources(mix, worth(mix, p)) for p in pool]
                expected = best_of(np.array(columns).T)
                assert found[f"{kind}+replicas"] == pytest.approx(expected, abs=1e-9)


def test_members_of_a_group_may_each_have_layers_of_their_own():
    """Of four layers two go to the fast device; replicas are as fast."""
    mix = mix_of([[10, 5]] * 4, sizes=[2, 1], layers=(0, 1, 2, 3), blocks=("other",) * 4)
    found = values(mix)
    assert found["layers"] == 10
    assert found["replicas"] == pytest.approx(10)
    one = mix_of([[10]] * 3, [Move("v", 9000, 1, (2,))], sizes=[2], layers=(0, 1, 2), blocks=("other",) * 3)
    assert values(one) == {"single:g0": 30, "replicas": 15, "layers": 20, "layers+replicas": 15}
    assert "layers" not in values(replace(one, inner={}))


def test_taking_turns_is_never_slower_than_the_split():
    """What the planner's pool has of a split over members, in every mix that memory does not bind."""
    compared = 0
    for seed in range(75):
        mix = random_mix(seed, 1 + seed % 3, limited=False)
        plans = simple_plans(mix)
        for split in plans.pipelines:
            assert plans.members is not None
            turns = plans.taking_turns(split)
            assert value(mix, turns) <= value(plans.members, split) * (1 + 1e-9) + 1e-9
            assert turns in set(plans.placements())
            compared += 1
    assert compared > 150


def test_one_group_and_no_kernels():
    assert values(mix_of([[3.0], [4.0]])) == {"single:g0": 7, "replicas": 7}
    assert values(mix_of([], sizes=[1, 1])) == {}
