"""Joint plans of dependence graphs: shared weights, batch sizes, pins, identical devices, and bad input."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_compile.catalogue import make_cluster
from tessera_compile.passes import depend
from tessera_compile.passes.cluster import Cluster, Device, Link
from tessera_compile.passes.errors import InfeasibleError, PlanError, ProfileError
from tessera_compile.passes.ir import Profile
from tessera_compile.passes.mix import apart, group_devices, mix_of_graphs, worth
from tessera_compile.passes.planning import Batches, _plan, plan_mix
from tests.graphs import cpus, synthetic
from tests.mixes import best_of, best_split, busy, layered, optimum, placements, random_mix


def unlike(memory=(1 << 40, 1 << 40), gb_per_s=1.0):
    devices = tuple(Device(f"d{i}", f"t{i}", "modelled", m, 1.0, 8.0) for i, m in enumerate(memory))
    return Cluster(devices, {(a.name, b.name): Link(gb_per_s, 1.0) for a in devices for b in devices if a is not b})


def profile_of(rows, devices=None):
    names = devices or [f"d{g}" for g in range(len(rows[0]))]
    return Profile.of(
        {f"k{i}": {d: us for d, us in zip(names, row, strict=True) if us is not None} for i, row in enumerate(rows)}
    )


def phase(name, rows, *, devices=None, **options):
    count = len(rows)
    ddg = synthetic([(k, k + 1) for k in range(count - 1)], count, **options)
    weights = list(options.get("weights") or ())
    ddg.graph.update(name=name, profile=profile_of(rows, devices), storages={w: w for w in weights})
    return ddg


def test_phases_go_where_they_are_fastest():
    prefill, decode = phase("prefill", [[90, 10], [90, 10]]), phase("decode", [[10, 90], [10, 90]])
    plan = plan_mix([(prefill, 1.0), (decode, 1.0)], unlike())
    assert plan.plans[0].placement == {"prefill/k0": "d1", "prefill/k1": "d1", "decode/k0": "d0", "decode/k1": "d0"}
    assert plan.status == "optimal within the gap"
    assert plan.baselines["prefill-decode"] == 20
    assert plan.bottleneck_us <= 20
    assert plan.batches == (1, 1)


def test_phases_share_their_weights():
    """Both phases on one device hold the weights once; without that they would not fit there."""
    weights = {"w": (1000, [0, 1])}
    phases = [(phase(n, [[1, 50], [1, 50]], weights=weights), 1.0) for n in ("prefill", "decode")]
    # Activations at the peak: x, v0 and v1 of 1000 bytes.
    plan = plan_mix(phases, unlike((4000, 10_000)))
    assert set(plan.single.placement.values()) == {"d0"}
    assert plan.loads["d0"][2] == 4000
    for ddg, _ in phases:
        del ddg.graph["storages"]
    apart = plan_mix(phases, unlike((4000, 10_000)))
    assert set(apart.single.placement.values()) == {"d0", "d1"}


def test_profiles_may_be_given():
    ddg = synthetic([(0, 1)], 2)
    plan = plan_mix([(ddg, 2.0)], unlike(), profiles=[profile_of([[1, 9], [1, 9]])])
    assert set(plan.plans[0].placement.values()) == {"d0"}
    with pytest.raises(PlanError, match="has no profile"):
        plan_mix([(ddg, 1.0)], unlike())
    with pytest.raises(PlanError, match="2 profiles for 1 plain graphs"):
        plan_mix([(ddg, 1.0)], unlike(), profiles=[profile_of([[1, 9], [1, 9]])] * 2)


# --- batches


def batches(times, activations):
    """Batch → a graph of one kernel of so many µs and activation bytes."""
    options = {}
    for batch, us in times.items():
        ddg = synthetic([], 1, nbytes=[activations[batch]], reads_input=())
        ddg.graph["name"] = "decode"
        options[batch] = (ddg, profile_of([[us, us]]))
    return Batches(options)


def test_the_larger_batch_where_a_request_is_cheaper_in_it():
    part = batches({1: 10.0, 4: 16.0}, {1: 1000, 4: 4000})
    plan = plan_mix([(part, 8.0)], unlike())
    assert plan.batches == (4,)
    assert plan.bottleneck_us <= 8 / 4 * 16 / 2 + 1e-9 + 8 / 4 * 5
    assert plan.single_us == 8 / 4 * 16


def test_the_smaller_batch_where_it_is_as_fast_or_memory_forbids():
    assert plan_mix([(batches({1: 10.0, 4: 41.0}, {1: 1000, 4: 4000}), 1.0)], unlike()).batches == (1,)
    part = batches({1: 10.0, 4: 16.0}, {1: 1000, 4: 4000})
    assert plan_mix([(part, 8.0)], unlike((2000, 2000))).batches == (1,)
    assert plan_mix([(part, 8.0)], unlike((5000, 5000))).batches == (4,)  # and 1000 of x
    with pytest.raises(InfeasibleError, match="does not fit"):
        plan_mix([(part, 8.0)], unlike((500, 500)))


def test_the_bound_is_over_all_batches():
    part = batches({1: 10.0, 2: 20.0, 4: 40.0}, {1: 0, 2: 0, 4: 0})
    plan = plan_mix([(part, 1.0)], unlike())
    alone = [plan_mix([(Batches({b: part.options[b]}), 1.0)], unlike()) for b in (1, 2, 4)]
    assert plan.bottleneck_us == pytest.approx(min(p.bottleneck_us for p in alone))
    assert plan.bound_us == pytest.approx(min(p.bound_us for p in alone))


def fast_apart(weights=None):
    """Batch 1 is fast on d0 alone, batch 4 on d1."""
    options = {}
    for batch, row in {1: [5.0, 100.0], 4: [400.0, 16.0]}.items():
        ddg = synthetic([], 1, nbytes=[0], reads_input=(), outputs=[], weights=weights)
        ddg.graph.update(name="decode", storages=dict.fromkeys(weights or (), "w"))
        options[batch] = (ddg, profile_of([row]))
    return Batches(options)


def test_devices_may_serve_at_different_batch_sizes():
    """5 µs a request on d0, 4 on d1: rates add up."""
    plan = plan_mix([(fast_apart(), 1.0)], unlike())
    assert plan.bottleneck_us == pytest.approx(1 / (1 / 4 + 1 / 5))
    assert plan.bound_us == pytest.approx(plan.bottleneck_us)
    assert plan.baselines["replicas"] == pytest.approx(plan.bottleneck_us)
    assert plan.status == "optimal within the gap"
    assert plan.recommendation == "replicas"
    assert [(p.batches, list(p.placement.values())) for p in plan.plans] == [((4,), ["d1"]), ((1,), ["d0"])]
    assert [p.share for p in plan.plans] == pytest.approx([5 / 9, 4 / 9])
    assert plan.batches == (4,)
    assert plan.single_us == 4
    assert "share 0.556, batch 4: 1 kernels on d1" in plan.to_text()
    none = plan_mix([(fast_apart(), 1.0)], unlike(), time_limit=0)
    assert none.status == "heuristic: no time to solve (one batch size a phase; requests split over several are not bounded)"


def test_where_memory_binds_batch_sizes_are_not_mixed_but_bounded():
    """Weights of one storage are held once; of two, one device has no room for both."""
    weights = {"w": (3000, [0])}
    both = plan_mix([(fast_apart(weights), 1.0)], unlike((4000, 4000)))
    assert len(both.plans) == 2
    assert both.loads["d0"][2] == both.loads["d1"][2] == 3000 + 1000  # of x
    part = fast_apart(weights)
    for batch, (ddg, _) in part.options.items():
        ddg.graph["storages"] = {"w": f"w{batch}"}
    one = plan_mix([(part, 1.0)], unlike((4000, 4000)))
    assert one.bottleneck_us == pytest.approx(1 / (1 / 4 + 1 / 100))  # batch 4, nearly all on d1
    assert one.bound_us == pytest.approx(1 / (1 / 4 + 1 / 5))
    assert one.status == "heuristic"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([2, 3]), st.booleans())
def test_no_mixture_of_batch_sizes_is_below_the_bound(seed, devices, tight):
    """A phase at batch 1 and 2 and one at 1 and 3; every placement at every choice of sizes."""
    draw = random.Random(seed)
    parts, options = [], []
    for name, large in (("prefill", 2), ("decode", 3)):
        sizes = {}
        for batch in (1, large):
            count = 2
            weights = {"w": (draw.randint(500, 3000), [draw.randrange(count)])} if tight else {}
            ddg = synthetic([(0, 1)], count, nbytes=[draw.choice([0, 500, 3000]), 100], weights=weights)
            ddg.graph.update(name=name, storages={})
            rows = [[batch ** draw.uniform(0, 1) * draw.choice([2, 5, 9]) for _ in range(devices)] for _ in range(count)]
            sizes[batch] = (ddg, profile_of(rows))
        options.append(sizes)
        parts.append((Batches(sizes), draw.choice([1.0, 4.0])))
    overlap = draw.random() < 0.5
    cluster = unlike([draw.choice([4000, 8000]) if tight else 1 << 40] * devices)
    columns = []
    for choice in itertools.product(*options):
        chosen = [(*sizes[b], weight / b) for sizes, b, (_, weight) in zip(options, choice, parts, strict=True)]
        mix = mix_of_graphs(chosen, cluster, overlap=overlap, state_moves=True, alike=False)
        columns += [busy(mix, place) for place in placements(mix)]
    try:
        plan = plan_mix(parts, cluster, overlap=overlap)
    except InfeasibleError:
        assert not columns
        return
    best = best_of(np.array(columns).T)
    assert plan.bound_us <= best * (1 + 1e-9)
    assert plan.bottleneck_us >= best * (1 - 1e-7)
    assert plan.bottleneck_us <= min(plan.baselines.values()) * (1 + 1e-9)
    assert sum(p.share for p in plan.plans) == pytest.approx(1)
    if devices == 2 and not tight:
        assert plan.bound_us == pytest.approx(best)
        assert plan.bottleneck_us <= best * (1 + 5.1e-3)


def test_phases_choose_their_batches_apart():
    """Decode gains from batching, prefill does not."""
    decode = batches({1: 10.0, 8: 12.0}, {1: 100, 8: 800})
    prefill = batches({1: 50.0, 8: 400.5}, {1: 100, 8: 800})
    plan = plan_mix([(prefill, 1.0), (decode, 16.0)], unlike())
    assert plan.batches == (1, 8)


def test_bad_batches():
    with pytest.raises(PlanError, match="at least one"):
        Batches({})
    with pytest.raises(PlanError, match="none below 1"):
        Batches({0: (synthetic([], 1), profile_of([[1, 1]]))})


# --- pins


def test_pins():
    prefill, decode = phase("prefill", [[90, 10], [90, 10]]), phase("decode", [[10, 90], [10, 90]])
    plan = plan_mix([(prefill, 1.0), (decode, 1.0)], unlike(), pins={"k1": "d0", "layer0": "d1"})
    expected = {"prefill/k0": "d1", "prefill/k1": "d0", "decode/k0": "d1", "decode/k1": "d0"}
    assert all(p.placement == expected for p in plan.plans)


def test_bad_pins():
    ddg = phase("a", [[1, 1], [1, None]])
    for pins, message in (
        ({"k0": "gpu"}, "names 'gpu', which is not in the cluster"),
        ({"k7": "d0"}, "matches no kernel"),
        ({"k0": "d0", "layer0": "d1"}, "'k0' is pinned to two devices"),
        ({"k1": "d1"}, "'a/k1' is pinned to 'd1', which cannot run it"),
    ):
        with pytest.raises(PlanError, match=message):
            plan_mix([(ddg, 1.0)], unlike(), pins=pins)


# --- identical devices


def test_identical_devices_are_one_group():
    """Two A100s serve different requests: half the time of one."""
    cluster = make_cluster("2xa100-80gb,l40s@200Gbps+10us")
    devices = list(cluster.names)
    ddg = phase("m", [[10, 10, 40], [10, 10, 40]], devices=devices)
    plan = plan_mix([(ddg, 1.0)], cluster)
    assert plan.groups["a100-80gb"] == ("a100-80gb#0", "a100-80gb#1")
    assert plan.baselines["single:a100-80gb"] == 20  # one of them alone
    # Rates add up: 2 / 20 of the pair and 1 / 80 of the other.
    assert plan.baselines["replicas"] == pytest.approx(80 / 9, rel=1e-2) or plan.baselines["replicas"] >= 80 / 9
    assert plan.bottleneck_us <= plan.baselines["replicas"]
    pinned = plan_mix([(ddg, 1.0)], cluster, pins={"k0": "a100-80gb", "k1": "a100-80gb#1"})
    assert pinned.single.placement["m/k1"] == "a100-80gb#1"  # a member that is pinned is planned apart
    assert pinned.single.placement["m/k0"] in ("a100-80gb#0", "a100-80gb#1")


def test_a_pin_to_one_of_identical_devices_costs_what_it_costs():
    ddg = phase("m", [[100, 100], [100, 100]])
    devices = tuple(Device(f"t#{i}", "t", "modelled", 1 << 40, 1.0, 8.0) for i in range(2))
    cluster = Cluster(devices, {("t#0", "t#1"): Link(1.0, 1.0), ("t#1", "t#0"): Link(1.0, 1.0)})
    ddg.graph["profile"] = profile_of([[100, 100]] * 2, ["t#0", "t#1"])
    plan = plan_mix([(ddg, 1.0)], cluster, pins={"k*": "t#1"})
    assert plan.bottleneck_us == 200
    assert set(plan.single.placement.values()) == {"t#1"}


def test_groups_of_one_type_behind_other_links_keep_apart():
    names = [f"t#{i}" for i in range(4)]
    devices = tuple(Device(n, "t", "modelled", 1 << 40, 1.0, 8.0) for n in names)
    near = lambda a, b: (a in names[:2]) == (b in names[:2])  # noqa: E731
    links = {(a, b): Link(10.0 if near(a, b) else 1.0, 1.0) for a in names for b in names if a != b}
    groups = group_devices(Cluster(devices, links))
    assert len({g.name for g in groups}) == len(groups)


def test_many_kernels_with_one_choice_each():
    ddg = phase("m", [[1]] * 100, devices=["d0"])
    cluster = Cluster((Device("d0", "t", "modelled", 1 << 40, 1.0, 8.0),), {})
    plan = plan_mix([(ddg, 1.0)], cluster)
    assert plan.bottleneck_us == 100
    assert plan.recommendation == "one device"


def test_state_that_a_later_graph_only_reads_reaches_it():
    """400 of the bytes that the first graph writes; the second holds the same storage as a weight."""
    writer = with_cache("writer", [[1, 1], [1, 1]], nbytes=400)
    reader = phase("reader", [[1, 1]], weights={"w": (500, [0])})
    reader.graph["storages"] = {"w": "cache"}
    parts = [(writer, writer.graph["profile"], 2.0), (reader, reader.graph["profile"], 3.0)]
    moving = worth(mix_of_graphs(parts, unlike(gb_per_s=0.1), state_moves=True), [0, 0, 1])
    home = worth(mix_of_graphs(parts, unlike(gb_per_s=0.1)), [0, 0, 1])
    boundary = 3 * (1 + 10)  # x of 1000 bytes, and v back home
    assert moving.link[0, 1] == pytest.approx(boundary + 2 * 5)
    assert home.link[0, 1] == pytest.approx(boundary + 2 * 6)


def test_identical_devices_split_a_request_where_memory_forbids_replicas():
    """Weights of 1000 bytes each, and room for one beside the activations."""
    ddg = phase("m", [[10, 10], [10, 10]], weights={"a": (1000, [0]), "b": (1000, [1])})
    roomy = plan_mix([(ddg, 1.0)], cpus(2, memory=10_000))
    assert list(roomy.groups) == ["cpu"]
    assert roomy.bottleneck_us == 10
    tight = plan_mix([(ddg, 1.0)], cpus(2, memory=4000))
    assert list(tight.groups) == ["d0", "d1"]
    assert sorted(tight.single.placement.values()) == ["d0", "d1"]
    assert tight.bottleneck_us == 10
    assert tight.loads["d0"][2] <= 4000
    pinned = plan_mix([(ddg, 1.0)], cpus(2, memory=4000), pins={"k1": "d0"})
    assert pinned.single.placement == {"m/k0": "d1", "m/k1": "d0"}
    both = plan_mix([(ddg, 1.0)], cpus(2, memory=4000), pins={"k1": "cpu"})
    assert sorted(both.single.placement.values()) == ["d0", "d1"]
    with pytest.raises(InfeasibleError, match="does not fit"):
        plan_mix([(ddg, 1.0)], cpus(2, memory=3500))


def test_pipelines_of_identical_devices_where_memory_forbids_replicas():
    """Four devices of which two hold the six layers: two pipelines of three layers each are twice as fast as one, and one of four
    stages has two layers on two of them."""
    rows = [[10] * 4] * 6
    ddg = phase("m", rows, nbytes=[0] * 6, weights={f"w{k}": (1000, [k]) for k in range(6)}, reads_input=(), outputs=[])
    graph = ddg.graph["kernels"]
    changed = depend(replace(graph, kernels=tuple(replace(k, module=f"layers.{i}") for i, k in enumerate(graph.kernels))))
    changed.graph.update(name="m", profile=ddg.graph["profile"])
    cluster = cpus(4, memory=3000, latency_us=0.5)
    plan = plan_mix([(changed, 1.0)], cluster)
    assert list(plan.groups) == ["d0", "d1", "d2", "d3"]
    assert "replicas" not in plan.baselines
    assert plan.baselines["layers"] == 20
    assert plan.bottleneck_us == pytest.approx(15)
    roomy = plan_mix([(changed, 1.0)], cpus(4, latency_us=0.5))
    assert list(roomy.groups) == ["cpu"]
    assert roomy.baselines == {"single:cpu": 60, "replicas": 15, "layers": 20, "layers+replicas": 15}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([(2,), (3,), (1, 2), (2, 1)]), st.booleans(), st.booleans())
def test_never_worse_than_a_split_by_layers_over_the_members(seed, sizes, overlap, tight):
    mix = layered(seed, sizes, overlap, tight)
    best = best_split(apart(mix))
    try:
        plan = _plan(mix, 20.0, 5e-3)
    except InfeasibleError:
        assert math.isinf(best)
        return
    assert plan.bottleneck_us <= min([best, *plan.baselines.values()]) * (1 + 1e-9) + 1e-9
    if math.isfinite(best):
        assert plan.baselines["layers"] <= best * (1 + (1e-9 if overlap else 1e-3)) + 1e-9


def test_the_bound_holds_for_members_apart_and_taking_turns():
    """Memory binds: neither the mixtures of the group nor those of its members are below it."""
    apart_won = 0
    for seed in range(300):
        mix = random_mix(seed, 1 + seed % 2, limited=True)
        if len(mix.kernels) > 4 or sum(g.size for g in mix.groups) > 3:
            continue
        ends = [best[1] for best in (optimum(mix), optimum(apart(mix))) if best is not None]
        if not ends:
            with pytest.raises(InfeasibleError):
                _plan(mix, 20.0, 5e-3)
            continue
        plan = _plan(mix, 20.0, 5e-3)
        assert plan.bound_us <= min(ends) * (1 + 1e-9) + 1e-9
        assert plan.bottleneck_us == pytest.approx(min(ends), rel=1e-6, abs=1e-9)
        assert plan.bottleneck_us <= min(plan.baselines.values(), default=math.inf) * (1 + 1e-9) + 1e-9
        apart_won += len(plan.groups) > len(mix.groups)
    assert apart_won > 3


def test_pins_to_a_group_hold_where_its_members_are_planned_apart():
    cluster = Cluster(
        (*cpus(2, memory=4000).devices, Device("big", "gpu", "modelled", 1 << 40, 1.0, 1.0)),
        {(a, b): Link(1.0, 1.0) for a in ("d0", "d1", "big") for b in ("d0", "d1", "big") if a != b},
    )
    ddg = phase("m", [[10, 10, 1]] * 2, devices=["d0", "d1", "big"], weights={"a": (1000, [0]), "b": (1000, [1])})
    free = plan_mix([(ddg, 1.0)], cluster)
    assert "big" in set(free.single.placement.values())
    plan = plan_mix([(ddg, 1.0)], cluster, pins={"k*": "cpu"})
    for p in (*plan.plans, plan.single):
        assert sorted(p.placement.values()) == ["d0", "d1"]


# --- bad input


def test_bad_input():
    ddg = phase("a", [[1, 1], [1, 1]])
    for weight in (0, -1, math.nan, math.inf):
        with pytest.raises(PlanError, match="positive number"):
            plan_mix([(ddg, weight)], unlike())
    with pytest.raises(PlanError, match="at least one"):
        plan_mix([], unlike())
    for limit in (-1, math.nan, "long"):
        with pytest.raises(PlanError, match="time_limit"):
            plan_mix([(ddg, 1.0)], unlike(), time_limit=limit)
    with pytest.raises(ProfileError, match="k1"):
        plan_mix([(ddg, 1.0)], unlike(), profiles=[profile_of([[1, 1]])])
    with pytest.raises(ProfileError, match="k0"):
        plan_mix([(ddg, 1.0)], unlike(), profiles=[profile_of([[math.nan, 1], [1, 1]])])
    cyclic = ddg.copy()
    cyclic.add_edge("k1", "k0", kind="raw")
    with pytest.raises(PlanError, match="cycle"):
        plan_mix([(cyclic, 1.0)], unlike())


def test_no_time_is_a_heuristic_that_says_so():
    prefill, decode = phase("prefill", [[90, 10], [90, 10]]), phase("decode", [[10, 90], [10, 90]])
    plan = plan_mix([(prefill, 1.0), (decode, 1.0)], unlike(), time_limit=0)
    assert plan.status == "heuristic: no time to solve"
    assert plan.bottleneck_us == 20


def test_what_does_not_fit_is_named():
    ddg = phase("m", [[1, 1]], weights={"huge": (5 << 30, [0])})
    with pytest.raises(InfeasibleError, match=r"huge 5\.0 GiB"):
        plan_mix([(ddg, 1.0)], unlike((1 << 30, 1 << 30)))


def test_module_paths_give_layers_and_blocks():
    ddg = phase("m", [[1, 9], [9, 1], [1, 9], [9, 1]])
    graph = ddg.graph["kernels"]
    modules = ["layers.0.attn", "layers.0.mlp", "layers.1.attn", "layers.1.mlp"]
    changed = depend(replace(graph, kernels=tuple(replace(k, module=m) for k, m in zip(graph.kernels, modules, strict=True))))
    changed.graph.update(name="m", profile=ddg.graph["profile"])
    plan = plan_mix([(changed, 1.0)], unlike(gb_per_s=100.0))
    assert {"layers", "attention-ffn", "attention-ffn+replicas"} <= set(plan.baselines)
    assert plan.baselines["attention-ffn"] < plan.baselines["layers"]


def with_cache(name, rows, nbytes=None):
    """k0 reads the cache s1 (500 bytes), k1 writes it; ``nbytes`` of it are written in one use."""
    ddg = synthetic([(0, 1)], 2, writes_state={1: [0]}, reads_input=(), outputs=[])
    ddg.graph.update(name=name, profile=profile_of(rows), storages={"s1": "cache"})
    if nbytes is not None:
        ddg.graph["state_bytes"] = {"s1": nbytes}
    return ddg


def test_state_moves_once_at_the_phase_boundary():
    """Prefill is faster on d1, decode on d0; what prefill writes of the cache moves once:
    1 µs + 400 bytes at 0.1 GB/s = 5 µs."""
    prefill, decode = with_cache("prefill", [[900, 10], [900, 10]], nbytes=400), with_cache("decode", [[10, 900], [10, 900]])
    cluster = unlike(gb_per_s=0.1)
    mix = mix_of_graphs(
        [(prefill, prefill.graph["profile"], 2.0), (decode, decode.graph["profile"], 3.0)], cluster, state_moves=True
    )
    moves = {(m.source, m.readers, m.bytes, m.count) for m in mix.moves if m.value.startswith("state")}
    assert moves == {(1, (0, 2, 3), 400, 2.0), (3, (2,), 500, 3.0)}
    split = worth(mix, [1, 1, 0, 0])
    assert split.link[1, 0] == pytest.approx(2 * 5)  # nothing goes back: a new request starts with a fresh cache
    assert split.link[0, 1] == 0
    plan = plan_mix([(prefill, 2.0), (decode, 3.0)], cluster)
    assert plan.single.placement == {"prefill/k0": "d1", "prefill/k1": "d1", "decode/k0": "d0", "decode/k1": "d0"}
    assert plan.single_us == 60
    # As plain calls have it, d1 would fetch the cache from home and bring it back in each use.
    home = mix_of_graphs([(prefill, prefill.graph["profile"], 2.0), (decode, decode.graph["profile"], 3.0)], cluster)
    assert worth(home, [1, 1, 0, 0]).link[1, 0] == pytest.approx(2 * 6)
    with pytest.raises(PlanError, match="neither 'moves' nor 'home'"):
        plan_mix([(prefill, 1.0)], cluster, state="away")
