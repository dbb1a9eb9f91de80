"""Placements without a solver."""

from collections import Counter
from dataclasses import replace

import pytest

from tessera_compile.passes import partition, schedule, verify
from tessera_compile.passes.errors import PlanError
from tessera_compile.passes.ir import Profile
from tessera_compile.passes.placements import place
from tests.graphs import cpus, synthetic


def profile_of(rows):
    return Profile.of({f"k{i}": {f"d{g}": us for g, us in enumerate(row) if us is not None} for i, row in enumerate(rows)})


def even(count, devices):
    return profile_of([[1.0] * devices] * count)


@pytest.mark.parametrize(
    ("rows", "device"),
    [
        ([[19, 5], [1, 4]], "d1"),  # 20 against 9 and 4 for transfers
        ([[5, 9], [4, 1]], "d0"),
        ([[1, 1], [1, 1]], "d0"),  # Home, where they are equal.
        ([[1, 50], [None, 50]], "d1"),  # The fast one cannot run k1.
    ],
)
def test_single_takes_the_device_with_the_least_makespan(rows, device):
    assert place("single", synthetic([(0, 1)], 2), profile_of(rows), cpus(2)) == {"k0": device, "k1": device}


def test_alternate_goes_round_in_the_lowered_order():
    placement = place("alternate", synthetic([(0, 1)], 5), even(5, 3), cpus(3))
    assert list(placement.items()) == [("k0", "d0"), ("k1", "d1"), ("k2", "d2"), ("k3", "d0"), ("k4", "d1")]


def test_random_is_the_same_for_the_same_seed():
    ddg, profile, cluster = synthetic([], 40), even(40, 3), cpus(3)
    first = place("random:7", ddg, profile, cluster)
    assert first == place("random:7", ddg, profile, cluster) == place("random", ddg, profile, cluster, seed=7)
    assert first == place("random:7", ddg, profile, cluster, seed=1)
    assert first != place("random:8", ddg, profile, cluster)
    assert place("random", ddg, profile, cluster) == place("random:0", ddg, profile, cluster)
    assert list(first) == [f"k{i}" for i in range(40)]


def test_random_uses_every_device_about_equally():
    counts = Counter(place("random:1", synthetic([], 300), even(300, 3), cpus(3)).values())
    assert set(counts) == {"d0", "d1", "d2"}
    assert min(counts.values()) > 60


@pytest.mark.parametrize("planner", ["single", "alternate", "random:3"])
def test_no_kernels(planner):
    assert place(planner, synthetic([], 0), Profile({}), cpus(2)) == {}


@pytest.mark.parametrize("planner", ["", "Single", "milp", "randomly", "single:1", "random:seven"])
def test_unknown_planner(planner):
    with pytest.raises(PlanError, match="known: single, layers, attention-ffn, alternate, random:SEED"):
        place(planner, synthetic([], 1), even(1, 2), cpus(2))


@pytest.mark.parametrize("planner", ["single", "alternate", "random:1", "random:2"])
def test_every_placement_can_be_planned_and_scheduled(planner):
    ddg = synthetic([(0, 1), (0, 2), (1, 3), (2, 3)], 4, writes_state={2: [0]}, effects=(1, 2))
    profile, cluster = even(4, 3), cpus(3)
    placement = place(planner, ddg, profile, cluster)
    plan = partition(ddg, profile, cluster, placement=placement, planner=planner)
    assert (plan.placement, plan.planner, plan.status) == (placement, planner, "given")
    verify(schedule(ddg, plan), ddg, plan)


def test_single_prefers_a_device_that_holds_the_graph():
    ddg = synthetic([(0, 1)], 2, weights={"w": (9000, [0])})
    cluster = cpus(2).with_memory({"d0": 8000})
    assert place("single", ddg, even(2, 2), cluster) == {"k0": "d1", "k1": "d1"}


def test_single_where_no_device_can_run_everything():
    with pytest.raises(PlanError, match="no one device"):
        place("single", synthetic([(0, 1)], 2), profile_of([[1, None], [None, 1]]), cpus(2))


def in_modules(ddg, modules):
    """The graph with the module paths of its kernels replaced."""
    graph = ddg.graph["kernels"]
    kernels = tuple(replace(k, module=m) for k, m in zip(graph.kernels, modules, strict=True))
    ddg.graph["kernels"] = replace(graph, kernels=kernels)
    return ddg


def test_layers_takes_the_best_cut_in_the_better_order():
    """Layers of 10, 10, 10, 30 µs on d0 and 20, 20, 20, 10 on d1: the last alone on d1, 30 against 10 + transfers."""
    ddg = in_modules(synthetic([(0, 1), (1, 2), (2, 3)], 4), [f"model.layers.{i}.mlp" for i in range(4)])
    placement = place("layers", ddg, profile_of([[10, 20], [10, 20], [10, 20], [30, 10]]), cpus(2))
    assert list(placement.values()) == ["d0", "d0", "d0", "d1"]


def test_attention_and_feed_forward_apart():
    modules = ["model.embed", "layers.0.self_attn", "layers.0.mlp", "layers.1.self_attn", "layers.1.mlp"]
    ddg = in_modules(synthetic([(i, i + 1) for i in range(4)], 5), modules)
    placement = place("attention-ffn", ddg, profile_of([[1, 1], [50, 10], [10, 50], [50, 10], [10, 50]]), cpus(2))
    assert [placement[f"k{i}"] for i in range(1, 5)] == ["d1", "d0", "d1", "d0"]


@pytest.mark.parametrize(("planner", "needs"), [("layers", "two layers or more"), ("attention-ffn", "named for attention")])
def test_a_split_without_its_modules_says_what_it_needs(planner, needs):
    with pytest.raises(PlanError, match=needs):
        place(planner, synthetic([(0, 1)], 2), even(2, 2), cpus(2))
