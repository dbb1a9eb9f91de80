"""Why a kernel is where it is, what matters most, what more would bring, and what the same money would buy."""

from __future__ import annotations

import math

import pytest

from tessera_compile.passes.errors import PlanError
from tessera_compile.passes.explaining import Reason, compare, differences, matter_most, same_budget, sensitivity, why
from tessera_compile.passes.latency import makespan
from tessera_compile.passes.mix import HOME, Move, value
from tessera_compile.passes.mixture import best_mixture, fastest_request
from tests.mixes import mix_of, placements, random_mix


def named(mix, place):
    return {k: mix.groups[g].name for k, g in zip(mix.kernels, place, strict=True)}


@pytest.mark.parametrize(
    ("here", "there", "reason"),
    [
        (1, 2, Reason.CHOSEN_CHEAPER),
        (2, 1, Reason.TARGET_CHEAPER),
        (100, 100.5, Reason.TIE),
        (0, 0, Reason.TIE),
        (1, math.inf, Reason.INFEASIBLE),
    ],
)
def test_reasons(here, there, reason):
    assert compare(here, there) is reason


def test_why_by_hand():
    mix = mix_of([[5, 1], [2, 9], [3, None]], [Move("v", 1000, 1, (2,))])
    place = named(mix, (0, 0, 0))
    found = why(mix, place, "k0", "g1")
    assert (found.reason, found.chosen_us, found.target_us, found.value_us, found.moved_us) == (
        Reason.TARGET_CHEAPER,
        5,
        1,
        10,
        5,
    )
    found = why(mix, place, "k1", "g1")
    assert (found.reason, found.moved_us) == (Reason.CHOSEN_CHEAPER, 9)
    assert "CHOSEN CHEAPER; moved alone, a mix takes 9.0 µs instead of 10.0" in str(found)
    found = why(mix, place, "k2", "g1")
    assert (found.reason, found.moved_us) == (Reason.INFEASIBLE, math.inf)
    assert str(found) == "k2 on g0: INFEASIBLE on g1"
    pinned = mix_of([[5, 1]], pins={0: 0})
    assert why(pinned, {"k0": "g0"}, "k0", "g1").reason is Reason.INFEASIBLE


def test_why_of_a_latency_plan_is_in_makespans():
    mix = mix_of([[5, 1], [2, 9]], [Move("v", 1000, 0, (1,)), Move("x", 1000, HOME, (0,))])
    found = why(mix, named(mix, (0, 0)), "k0", "g1", "latency")
    assert (found.value_us, found.moved_us) == (7, 2 + 1 + 2 + 2)


def test_why_names_what_is_not_there():
    mix = mix_of([[1, 1]])
    with pytest.raises(PlanError, match="no kernel 'k9'"):
        why(mix, {"k0": "g0"}, "k9", "g1")
    with pytest.raises(PlanError, match="no group 'gpu'; there are g0, g1"):
        why(mix, {"k0": "g0"}, "k0", "gpu")


@pytest.mark.parametrize(("objective", "value_of"), [("throughput", value), ("latency", makespan)])
def test_what_matters_most_is_the_dearest_best_move(objective, value_of):
    for seed in range(30):
        mix = random_mix(seed, 3, limited=False)
        place = placements(mix)[0]
        allowed = mix.allowed
        expected = {}
        for k, row in enumerate(allowed):
            moves = [value_of(mix, [*place[:k], g, *place[k + 1 :]]) for g in range(3) if row[g] and g != place[k]]
            if moves:
                expected[mix.kernels[k]] = min(moves)
        found = matter_most(mix, named(mix, place), objective=objective)
        assert [w.moved_us for w in found] == pytest.approx(sorted(expected.values(), reverse=True))
        assert all(w.moved_us == pytest.approx(expected[w.kernel]) for w in found)
        assert len(matter_most(mix, named(mix, place), count=1)) == min(1, len(expected))


def test_differences_of_plans():
    assert differences({"a": "x", "b": "y"}, {"a": "x", "b": "z", "c": "x"}) == {"b": ("y", "z"), "c": (None, "x")}
    assert differences({"a": "x"}, {}) == {"a": ("x", None)}


def test_sensitivity_plans_again():
    gib = 1 << 30
    residents = (("a", gib, (0,), False), ("b", gib, (1,), False))
    mix = mix_of([[1, 9], [1, 9]], [Move("v", 2000, 0, (1,))], residents=residents, memory=[gib, 4 * gib], overlap=False)
    plan = best_mixture(mix)
    found = sensitivity(mix, plan)
    changes = {what: (us, ratio) for what, us, ratio in found.changes}
    assert set(changes) == {"links twice as wide", "one GiB more on g0"}
    assert all(ratio >= 1 for _, ratio in changes.values())
    assert changes["one GiB more on g0"][0] < plan.bottleneck_us
    assert "one GiB more on g0" in str(found)
    assert sensitivity(mix_of([[1.0]]), best_mixture(mix_of([[1.0]]))).changes == ()


def test_sensitivity_of_a_latency_plan_is_in_latency():
    mix = mix_of([[9, 1], [1, 9]], [Move("v", 4000, 0, (1,)), Move("x", 4000, HOME, (0,))])
    plan = fastest_request(mix)
    ((_, us, ratio),) = sensitivity(mix, plan).changes
    assert plan.bottleneck_us == 10
    assert us == 5 - 2 + 1 + 3 + 1
    assert ratio == pytest.approx(plan.bottleneck_us / us)


def test_the_same_money():
    """Prices 1 and 2 dollars: two of g0 and one of g1 cost 4."""
    mix = mix_of([[6, 3], [6, 3]], sizes=[2, 1])
    assert same_budget(mix) == {"all g0": 4, "dollars in g0": 3, "all g1": 2, "dollars in g1": 3}


def test_the_same_money_leaves_out_what_cannot_be():
    residents = (("w", 10, (0,), False),)
    mix = mix_of([[6, 3], [None, 3]], residents=residents, memory=[5, 5])
    assert same_budget(mix) == {}
    # State at home does not count where all devices are of the other type.
    mix = mix_of([[6, 3]], residents=(("s", 10, (0,), True),), memory=[5, 10])
    assert set(same_budget(mix)) == {"all g1", "dollars in g1"}
