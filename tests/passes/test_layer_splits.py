"""Splits by layers: against every cut in every order of the devices, written anew from the formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_compile.passes import layer_splits as module
from tessera_compile.passes.layer_splits import layer_splits
from tessera_compile.passes.mix import HOME, Mix, Move, apart, fits, value, worth
from tests.mixes import best_split, layered, mix_of

limited = settings(max_examples=60, deadline=None, derandomize=True)


def ours(mix: Mix) -> float:
    fitting = [p for p in layer_splits(mix) if mix.allowed[np.arange(len(p)), list(p)].all() and fits(mix, worth(mix, p))]
    return min((value(mix, p) for p in fitting), default=math.inf)


sizes_of = st.sampled_from([(2,), (3,), (4,), (2, 2), (1, 3), (1, 1, 1), (1, 1, 2)])


@limited
@given(st.integers(0, 10**6), sizes_of, st.booleans(), st.booleans())
def test_no_split_over_the_members_is_better(seed, sizes, overlap, tight):
    """With serial transfers home's own are only met to a thousandth."""
    mix = apart(layered(seed, sizes, overlap, tight))
    best = best_split(mix)
    assert ours(mix) >= best * (1 - 1e-9) - 1e-9
    assert ours(mix) <= best * (1 + (1e-9 if overlap else 1e-3)) + 1e-9


@limited
@given(st.integers(0, 10**6), st.sampled_from([(3,), (2, 2), (1, 1, 2)]), st.booleans())
def test_few_orders_where_there_are_too_many(seed, sizes, overlap):
    """Kinds next to one another: never better than all orders, and the best where the times are the same everywhere."""
    mix = apart(layered(seed, sizes, overlap, False))
    before, module.MOST_STEPS = module.MOST_STEPS, 0
    try:
        assert ours(mix) >= best_split(mix) * (1 - 1e-9) - 1e-9
        alike = replace(mix, times=np.ones(mix.times.shape), links=dict.fromkeys(mix.links, (0.001, 1.0)), overlap=True)
        alike = replace(alike, moves=tuple(m for m in mix.moves if m.source != HOME and not m.to_home))
        assert ours(alike) == pytest.approx(best_split(alike))
    finally:
        module.MOST_STEPS = before


def test_members_by_hand():
    """Six layers of 10 µs on three alike: two each; a fast one takes twice as many."""
    moves = [Move(f"v{k}", 1000, k, (k + 1,)) for k in range(5)]
    assert ours(apart(mix_of([[10]] * 6, moves, sizes=[3]))) == 20
    assert ours(apart(mix_of([[10, 5]] * 8, moves, sizes=[2, 1]))) == 20
    assert ours(apart(mix_of([[10]] * 6, moves, sizes=[3], overlap=False))) == 20 + 2 + 2


def test_links_between_members_may_differ():
    """The slow link stands between two that are not neighbours."""
    mix = mix_of([[10]] * 3, [Move("a", 1000, 0, (1,)), Move("b", 1000, 1, (2,))], sizes=[3])
    slow = {pair: (0.1, 1.0) if set(pair) == {"g0#0", "g0#2"} else link for pair, link in mix.inner.items()}
    assert ours(apart(replace(mix, inner=slow))) == 10


def test_copies_on_the_devices_that_are_left():
    """Of six devices after home, two-stage splits go three times."""
    mix = apart(mix_of([[10]] * 6, sizes=[7]))
    pairs = {tuple(sorted(set(p))) for p in layer_splits(mix) if len(set(p)) == 2 and 0 not in p}
    assert {(1, 2), (3, 4), (5, 6)} <= pairs


def test_more_layers_than_can_be_cut():
    mix = apart(mix_of([[1.0 + k % 3] for k in range(999)], sizes=[3]))
    assert ours(mix) == pytest.approx(666, rel=0.02)


def test_nothing_to_split():
    assert layer_splits(mix_of([[1, 1]])) == []
    assert layer_splits(mix_of([[1], [1]])) == []
    assert layer_splits(mix_of([], sizes=[1, 1, 1])) == []
    assert layer_splits(apart(mix_of([[1], [1]], sizes=[3], residents=(("w", 9, (0, 1), False),), memory=[5]))) == []
