"""The arrays of a mix and what a placement is worth: by hand, against the formulas, from tables and graphs, and bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tessera_compile.passes.cluster import Cluster, Device, Link
from tessera_compile.passes.errors import PlanError, ProfileError
from tessera_compile.passes.ir import Profile
from tessera_compile.passes.latency import fastest_chains, longest_paths, makespan, waits
from tessera_compile.passes.mix import (
    HOME,
    Move,
    fits,
    group_devices,
    group_links,
    loads_of,
    mix_of_graphs,
    mix_of_table,
    read_table,
    resources,
    value,
    worth,
)
from tests.graphs import cpus, synthetic
from tests.mixes import busy, finish, footprint, mix_of, placements, random_mix, room

HEADER = "workload,position,layer,block,kernel,reads,bytes_out,state,state_bytes_written,d0_us,d1_us\n"


def table(tmp_path, text, header=HEADER):
    path = tmp_path / "profile.csv"
    path.write_text(header + text)
    return path


def of_table(path, weights=None, **options):
    rows = read_table(path)
    weights = weights or dict.fromkeys((r["workload"] for r in rows), 1.0)
    return mix_of_table(rows, cpus(2), weights, name=str(path), **options)


# --- what a placement is worth


def test_loads_by_hand():
    """Two members share the compute of their group, and two pairs the link; one move a value and destination."""
    moves = (Move("v", 1000, 0, (1, 2)), Move("x", 500, HOME, (2,)), Move("y", 0, 2, (), True))
    mix = mix_of([[4, 1], [6, 2], [9, 8]], moves, sizes=[1, 2])
    of = worth(mix, (0, 1, 1))
    assert of.compute.tolist() == [4, 10]
    assert of.link.tolist() == [[0, 2 + 1.5], [1, 0]]
    assert of.moved_bytes == 1500
    assert resources(mix, of).tolist() == [4, 5, 3.5 / 2, 0.5]
    assert value(mix, (0, 1, 1)) == 5


def test_serial_transfers_take_the_time_of_both_ends():
    mix = mix_of([[4, 1], [6, 2]], [Move("v", 1000, 0, (1,))], sizes=[1, 2], overlap=False)
    assert resources(mix, worth(mix, (0, 1))).tolist() == [4 + 2, (2 + 2) / 2]


def test_replica_that_a_kernel_overwrites_needs_no_move():
    moves = (Move("s", 1000, HOME, (0, 2), unless=1),)
    mix = mix_of([[1, 1, 1]] * 3, moves)
    assert worth(mix, (1, 2, 2)).link[0].tolist() == [0, 2, 0]
    assert worth(mix, (2, 2, 2)).link.sum() == 0


@pytest.mark.parametrize("groups", [2, 3])
def test_worth_and_its_vectorised_form_follow_the_formulas(groups):
    """Every placement of random mixes."""
    for seed in range(60):
        mix = random_mix(seed, groups)
        places = placements(mix)
        if not places:
            continue
        together, fit = loads_of(mix, np.array(places))
        assert fit.all()
        for i, place in enumerate(places):
            expected = busy(mix, place)
            np.testing.assert_allclose(resources(mix, worth(mix, place)), expected, atol=1e-9)
            np.testing.assert_allclose(together[:, i], expected, atol=1e-9)
            assert fits(mix, worth(mix, place))


def test_memory_is_of_weights_activations_and_state_at_home():
    residents = (("w", 10, (0, 1), False), ("s", 3, (1,), True))
    mix = mix_of([[1, 1], [1, 1]], memory=[9, 13], residents=residents, activation_bytes=2)
    assert worth(mix, (0, 1)).memory.tolist() == [10 + 3 + 2, 10 + 3 + 2]
    assert worth(mix, (1, 1)).memory.tolist() == [3 + 2, 15]
    assert worth(mix, (0, 0)).memory.tolist() == [15, 0]
    assert not fits(mix, worth(mix, (1, 1)))
    for seed in range(40):
        mix = random_mix(seed, 3, limited=True)
        for place in np.ndindex(*(3,) * len(mix.kernels)):
            assert fits(mix, worth(mix, place)) == room(mix, footprint(mix, place))


# --- one request


@pytest.mark.parametrize("groups", [2, 3])
def test_makespan_is_that_of_a_list_scheduler(groups):
    for seed in range(80):
        mix = random_mix(seed, groups)
        for place in placements(mix)[:40]:
            assert makespan(mix, place) == pytest.approx(finish(mix, place), abs=1e-9)


def test_makespan_by_hand():
    """Two uses of a chain with a branch, state moved once a use, and the result home."""
    moves = (
        Move("v", 1000, 0, (1, 2), count=2.0),
        Move("kv", 1000, 1, (3,), count=2.0),
        Move("y", 1000, 2, (), True, count=2.0),
    )
    mix = mix_of([[5, 9], [3, 3], [4, 4], [7, 7]], moves, workload=[0, 0, 0, 1], weights=[2.0, 3.0])
    # k0 on 0 till 5; k1 on 0 till 8, k2 on 1 from 7 to 11, home at 13.
    assert makespan(mix, (0, 0, 1, 0)) == 2 * 13 + 3 * 7
    assert makespan(mix, (0, 0, 1, 1)) == 2 * 13 + 2 * 2 + 3 * 7


def test_earlier_readers_of_state_do_not_wait_for_its_writer():
    mix = mix_of([[1, 1], [1, 1]], [Move("s", 10_000, 1, (0,))])
    assert makespan(mix, (0, 1)) == 1


def test_bound_of_a_chain_leaves_out_what_compute_can_hide():
    """A skip edge and an input read late travel while the kernels between run."""
    moves = (Move("v0", 10, 0, (1, 2)), Move("v1", 10, 1, (2,)), Move("x", 5000, HOME, (2,)))
    mix = mix_of([[1, 9], [8, 9], [9, 1]], moves, per_byte=0.001, latency=1.0)
    paths = longest_paths(mix)
    assert paths == [[0, 1, 2]]
    within, later = waits(mix, paths)
    assert [(m.source, m.readers) for m in within] == [(0, (1,)), (1, (2,))]
    assert not later
    placement, least = fastest_chains(mix, paths)
    assert placement == (0, 0, 1)
    assert least == pytest.approx(1 + 8 + 1.01 + 1)
    assert makespan(mix, placement) == pytest.approx(least)


@pytest.mark.parametrize("groups", [2, 3])
def test_chain_bound_holds(groups):
    for seed in range(150):
        mix = random_mix(seed, groups)
        places = placements(mix)
        if places:
            least = fastest_chains(mix, longest_paths(mix))[1]
            assert least <= min(finish(mix, place) for place in places) + 1e-9


# --- devices


def test_identical_devices_form_a_group():
    cluster = cpus(3)
    groups = group_devices(cluster)
    assert [g.members for g in groups] == [("d0", "d1", "d2")]
    assert group_links(cluster, groups) == {}
    assert [g.name for g in group_devices(cluster, alike=False)] == ["d0", "d1", "d2"]


def test_devices_that_differ_in_memory_or_links_stay_apart():
    devices = tuple(Device(f"d{i}", "t", "modelled", 10 + (i == 2), 1.0, 1.0) for i in range(3))
    link = {(a.name, b.name): Link(1.0, 1.0) for a in devices for b in devices if a is not b}
    assert [g.members for g in group_devices(Cluster(devices, link))] == [("d0", "d1"), ("d2",)]
    link["d0", "d2"] = Link(2.0, 1.0)
    assert len(group_devices(Cluster(devices, link))) == 3


# --- from graphs


def test_from_graphs_counts_moves_and_shares_weights():
    one = synthetic([(0, 1)], 2, weights={"w": (100, [0, 1])})
    two = synthetic([(0, 1)], 2, weights={"w": (100, [1]), "other": (7, [0])})
    one.graph.update(name="decode", storages={"w": 17})
    two.graph.update(name="prefill", storages={"w": 17, "other": 18})
    profile = Profile.of({k: {"d0": 1, "d1": 2} for k in ("k0", "k1")})
    cluster = cpus(2)
    mix = mix_of_graphs([(one, profile, 10), (two, profile, 2)], cluster, alike=False)
    assert mix.kernels == ("decode/k0", "decode/k1", "prefill/k0", "prefill/k1")
    assert mix.counts.tolist() == [10, 10, 2, 2]
    assert {m.count for m in mix.moves if m.value.startswith("decode/")} == {10}
    assert sorted(mix.residents) == [("decode/w", 100, (0, 1, 3), False), ("prefill/other", 7, (2,), False)]
    # v0 crosses in each use, v1 comes home.
    assert worth(mix, (0, 1, 0, 1)).link.tolist() == [[0, 12 * 2], [12 * 2, 0]]


def test_from_graphs_the_price_of_a_cut_is_in_the_latency():
    profile = Profile.of({k: {"d0": 1, "d1": 2} for k in ("k0", "k1")})
    priced = Profile(profile.times, cut_us={"d1": 5.0})
    mix = mix_of_graphs([(synthetic([(0, 1)], 2), priced, 1)], cpus(2), alike=False)
    assert mix.us(0, 1, 1000) == mix.us(1, 0, 1000) == 1 + 1 + 5


def test_bad_graphs():
    ddg = synthetic([(0, 1)], 2)
    good = Profile.of({k: {"d0": 1, "d1": 2} for k in ("k0", "k1")})
    with pytest.raises(PlanError, match="at least one"):
        mix_of_graphs([], cpus(2))
    for weight in (0, -1, math.nan, math.inf):
        with pytest.raises(PlanError, match="positive number"):
            mix_of_graphs([(ddg, good, weight)], cpus(2))
    with pytest.raises(ProfileError, match="k1"):
        mix_of_graphs([(ddg, Profile.of({"k0": {"d0": 1}}), 1)], cpus(2))
    with pytest.raises(ProfileError, match="k0"):
        mix_of_graphs([(ddg, Profile.of({"k0": {"d0": -1}, "k1": {"d0": 1}}), 1)], cpus(2))
    with pytest.raises(ProfileError, match="k1"):
        mix_of_graphs([(ddg, Profile.of({"k0": {"d0": 1}, "k1": {}}), 1)], cpus(2))
    cyclic = ddg.copy()
    cyclic.add_edge("k1", "k0", kind="raw")
    with pytest.raises(PlanError, match="cycle"):
        mix_of_graphs([(cyclic, good, 1)], cpus(2))


def test_check_names_what_is_wrong():
    for bad in (math.nan, -1.0):
        with pytest.raises(ProfileError, match="k1"):
            mix_of([[1, 1], [1, bad]]).check()
    with pytest.raises(PlanError, match="'k0' can run on no device"):
        mix_of([[None, None]]).check()
    with pytest.raises(PlanError, match="'w0' has weight 0"):
        mix_of([[1, 1]], weights=[0.0]).check()
    for link in ((math.inf, 0.0), (math.nan, 0.0), (0.0, math.inf), (-1.0, 0.0)):
        with pytest.raises(PlanError, match="g0 → g1 has no bandwidth"):
            mix_of([[1, 1]], links={(0, 1): link, (1, 0): (0.0, 0.0)}).check()
    with pytest.raises(PlanError, match="'k0' is pinned to 'g1', which cannot run it"):
        _ = mix_of([[1, None]], pins={0: 1}).allowed


# --- from tables


def test_from_a_table_with_state(tmp_path):
    """Written state follows readers of its own workload and of later phases; a fan-out is one move a destination."""
    path = table(
        tmp_path,
        "prefill,0,-1,other,embed,,100,,,1,2\n"
        "prefill,1,0,attention,attn,0,100,kv,1000,1,2\n"
        "prefill,2,0,ffn,ffn,0 1,,,,1,\n"
        "decode,0,0,attention,attn,,10,kv,10,4,1\n"
        "decode,1,0,ffn,ffn,0,10,kv,,5,1\n",
    )
    mix = of_table(path, {"prefill": 1.0, "decode": 9.0}, alike=False)
    assert mix.workloads == ("prefill", "decode")
    assert mix.counts.tolist() == [1, 1, 1, 9, 9]
    assert mix.times[2].tolist() == [1, math.inf]
    moves = {(m.value, m.source): (m.bytes, m.readers, m.count) for m in mix.moves}
    assert moves == {
        ("v0", 0): (100, (1, 2), 1.0),
        ("v1", 1): (100, (2,), 1.0),
        ("v3", 3): (10, (4,), 9.0),
        ("kv", 1): (1000, (3, 4), 1.0),
        ("kv", 3): (10, (4,), 9.0),
    }
    back = of_table(path, {"prefill": 1.0, "decode": 9.0}, phases=["decode", "prefill"], alike=False)
    assert {(m.source, m.readers) for m in back.moves if m.value == "kv"} == {(3, (1, 4))}


def test_a_workload_without_weight_is_left_out(tmp_path):
    path = table(tmp_path, "a,0,0,x,k,,1,,,1,1\nb,0,0,x,k,,1,,,1,1\n")
    assert of_table(path, {"b": 2.0}).kernels == ("b/0",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a,0,0,x,k,,1,,,1", "profile.csv:3: 11 fields"),
        ("a,0,0,x,k,,1,,,1,1,1", "profile.csv:3: 11 fields"),
        ("a,1,0,x,k,,1,,,nan,1", "profile.csv:3: d0_us is 'nan'"),
        ("a,1,0,x,k,,1,,,-3,1", "profile.csv:3: d0_us is '-3'"),
        ("a,1,0,x,k,,1,,,fast,1", "profile.csv:3: d0_us is 'fast'"),
        ("a,1,0,x,k,0,-1,,,1,1\na,2,0,x,k,1,,,,1,1", "profile.csv:3: bytes_out is '-1'"),
        ("a,1,0,x,k,,1,s,much,1,1", "profile.csv:3: state_bytes_written is 'much'"),
        ("a,1,one,x,k,,1,,,1,1", "profile.csv:3: layer is 'one'"),
        ("a,0,0,x,k,,1,,,1,1", "profile.csv:3: position 0 of a stands twice"),
        ("a,1,0,x,k,2,1,,,1,1\na,2,0,x,k,,1,,,1,1", "profile.csv:3: reads position 2, which is not an earlier kernel"),
        ("a,1,0,x,k,1,1,,,1,1", "profile.csv:3: reads position 1"),
        ("b,1,0,x,k,0,1,,,1,1", "profile.csv:3: reads position 0, which is not an earlier kernel of b"),
        ("a,1,0,x,k,,1,,,,", "'a/1' can run on no device"),
        ("a,1,0,x,k,,1,,,inf,inf", "'a/1' can run on no device"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = table(tmp_path, "a,0,0,x,k,,1,,,1,1\n" + line + "\n")
    with pytest.raises((ProfileError, PlanError), match=message.replace("(", r"\(")):
        of_table(path)


def test_bad_tables(tmp_path):
    with pytest.raises(ProfileError, match="no column 'block'"):
        read_table(table(tmp_path, "", HEADER.replace("block,", "")))
    with pytest.raises(ProfileError, match="no column '<device>_us'"):
        read_table(table(tmp_path, "", HEADER.replace(",d0_us,d1_us", "")))
    for empty in ("", HEADER):
        with pytest.raises(ProfileError):
            read_table(table(tmp_path, "", empty))
    path = table(tmp_path, "a,0,0,x,k,,1,,,1,1\n")
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)))
    with pytest.raises(ProfileError, match=r"binary\.csv is no CSV"):
        read_table(tmp_path / "binary.csv")
    devices = tuple(Device(f"d{i}", f"t{i}", "cpu", 1 << 30, 1.0, 1.0) for i in range(3))
    cluster = Cluster(devices, {(a.name, b.name): Link(1.0, 1.0) for a in devices for b in devices if a is not b})
    with pytest.raises(ProfileError, match="no times for 'd2'"):
        mix_of_table(read_table(path), cluster, {"a": 1.0})
    with pytest.raises(PlanError, match="no workload 'b'; it has a"):
        of_table(path, {"b": 1.0})
    with pytest.raises(PlanError, match="'a' has weight 0"):
        of_table(path, {"a": 0.0})
    with pytest.raises(PlanError, match="must name each of"):
        of_table(path, phases=["a", "b"])


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path):
    path = tmp_path / "excel.csv"
    path.write_text(HEADER + "a,0,,x,k,,1,,,1,1\n", encoding="utf-8-sig")
    mix = of_table(path)
    assert mix.layers == (-1,)
