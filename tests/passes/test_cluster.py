"""Clusters: the grammar of their text, default links, and what is refused with a hint."""

from dataclasses import replace

import pytest

from tessera_compile import make_cluster
from tessera_compile.passes.cluster import Cluster, Link
from tessera_compile.passes.errors import ClusterError

GIB = 2**30


def link(text):
    """The link of all pairs in the cluster ``text``."""
    (only,) = set(make_cluster(text).links.values())
    return only


def test_default_is_two_cpu_lanes():
    cluster = make_cluster()
    assert cluster == make_cluster(None) == make_cluster("2xcpu") == make_cluster("cpu,cpu")
    assert cluster.names == ("cpu#0", "cpu#1")
    assert cluster.home == "cpu#0"
    assert all(d.kind == "cpu" and d.memory > 0 for d in cluster.devices)


def test_a_cluster_is_taken_as_it_is():
    cluster = make_cluster("cpu")
    assert make_cluster(cluster) is cluster


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("cpu", ["cpu"]),
        ("1xcpu", ["cpu"]),
        ("3xcpu", ["cpu#0", "cpu#1", "cpu#2"]),
        ("a100-80gb,l40s", ["a100-80gb", "l40s"]),
        ("l40s,a100-80gb", ["l40s", "a100-80gb"]),
        ("2xa100-80gb,l40s", ["a100-80gb#0", "a100-80gb#1", "l40s"]),
        ("l40s,a100-80gb,l40s", ["l40s#0", "a100-80gb", "l40s#1"]),
        ("l4,2xl4,l40s", ["l4#0", "l4#1", "l4#2", "l40s"]),
        (" cpu , l40s ", ["cpu", "l40s"]),
        ("12xl4", [f"l4#{i}" for i in range(12)]),
        ("l4,l40s @200Gbps", ["l4", "l40s"]),
    ],
)
def test_names(text, names):
    cluster = make_cluster(text)
    assert list(cluster.names) == names
    assert cluster.home == names[0]
    assert cluster.links.keys() == {(a, b) for a in names for b in names if a != b}


def test_figures_come_from_the_catalogue():
    device = make_cluster("2xa100-80gb").devices[1]
    assert (device.name, device.type, device.kind, device.memory) == ("a100-80gb#1", "a100-80gb", "modelled", 80 * GIB)
    assert (device.tflops, device.gb_per_s, device.l2_bytes, device.price) == (312.0, 2039.0, 40 * 2**20, 1.5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2xl4@200Gbps", Link(25.0, 10.0)),
        ("2xl4@25GB/s", Link(25.0, 10.0)),
        ("2xl4@12.5Gbps+2.5us", Link(1.5625, 2.5)),
        ("2xl4@25GB/s+0us", Link(25.0, 0.0)),
        ("2xl4+7us", Link(32.0, 7.0)),
        ("2xcpu@1GB/s", Link(1.0, 30.0)),
        ("2xcpu@1GB/s+5us", Link(1.0, 5.0)),
    ],
)
def test_links(text, expected):
    assert link(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2xa100-80gb", Link(300.0, 10.0)),
        ("a100-80gb,l40s", Link(32.0, 10.0)),  # The slower one's.
        ("l40s,a100-80gb", Link(32.0, 10.0)),
        ("h100-sxm,a100-80gb", Link(300.0, 10.0)),
        ("2xcpu", Link(4.0, 30.0)),  # Half of 8 GB/s: read once, written once.
        ("cpu,l40s", Link(32.0, 10.0)),
    ],
)
def test_default_links(text, expected):
    assert link(text) == expected


def test_pairs_have_their_own_default_links():
    links = make_cluster("2xa100-80gb,l40s").links
    assert links["a100-80gb#0", "a100-80gb#1"].gb_per_s == 300
    assert links["a100-80gb#1", "l40s"].gb_per_s == 32
    assert links["l40s", "a100-80gb#0"].gb_per_s == 32


def test_time_on_a_link():
    cluster = make_cluster("a100-80gb,l40s@200Gbps+10us")
    assert cluster.us("a100-80gb", "l40s", 25_000) == 11
    assert cluster.us("l40s", "a100-80gb", 0) == 10
    assert cluster.us("l40s", "l40s", 1 << 30) == 0


@pytest.mark.parametrize(
    "text",
    [
        ",",
        "cpu,",
        ",cpu",
        "cpu,,l40s",
        "2x",
        "2 x cpu",
        "-1xcpu",
        "1.5xcpu",
        "cpu;cpu",
        "cpu cpu",
        "3",
        "cpu/sm",
        "cpu/48",
        "cpu/48sm/2sm",
        "l4#0",
        " ",
    ],
)
def test_items_that_cannot_be_read(text):
    with pytest.raises(ClusterError, match="cannot read") as error:
        make_cluster(text)
    assert repr(text) in str(error.value)


def test_the_item_at_fault_is_named():
    with pytest.raises(ClusterError, match=r"'l 4' in cluster 'cpu,l 4,l40s'"):
        make_cluster("cpu,l 4,l40s")


@pytest.mark.parametrize("text", ["0xcpu", "cpu,0xl4", "00xl4"])
def test_no_device(text):
    with pytest.raises(ClusterError, match="asks for no device"):
        make_cluster(text)


@pytest.mark.parametrize(
    "text",
    [
        "2xl4@",
        "2xl4+",
        "2xl4@200",
        "2xl4@200Mbps",
        "2xl4@200gbps",
        "2xl4@fastGbps",
        "2xl4@-5GB/s",
        "2xl4@1e3GB/s",
        "2xl4@.5GB/s",
        "2xl4+10ms",
        "2xl4+10",
        "2xl4+-1us",
        "2xl4+5us@10Gbps",
        "2xl4@10Gbps@20Gbps",
        "2xl4@10Gbps+1us+2us",
        "l4@200Gbps,l40s",
        "l4+5us,l40s",
        "l4@200Gbps,l40s@200Gbps",
    ],
)
def test_links_that_cannot_be_read(text):
    with pytest.raises(ClusterError, match="cannot read the link") as error:
        make_cluster(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", ["2xl4@0Gbps", "2xl4@0.0GB/s+5us"])
def test_zero_bandwidth(text):
    with pytest.raises(ClusterError, match="zero bandwidth"):
        make_cluster(text)


@pytest.mark.parametrize(
    ("text", "near"),
    [("a100-80bg", "a100-80gb"), ("2xl40", "l40s"), ("cpu,h100sxm", "h100-sxm"), ("gpu", "cpu"), ("A100-80gb", "a100-80gb")],
)
def test_unknown_names_bring_the_nearest(text, near):
    with pytest.raises(ClusterError, match=r"unknown device.*did you mean") as error:
        make_cluster(text)
    assert near in str(error.value).split("did you mean")[1]


def test_a_name_like_no_other_brings_them_all():
    with pytest.raises(ClusterError, match="unknown device 'zzzzzz'") as error:
        make_cluster("zzzzzz")
    for name in ("a100-80gb", "l40s", "cpu", "cuda:N"):
        assert name in str(error.value)


@pytest.mark.parametrize("text", ["a100-80gb/48sm", "cpu,l4/1sm", "cpu/4sm"])
def test_only_real_gpus_can_be_sliced(text):
    with pytest.raises(ClusterError, match="sliced"):
        make_cluster(text)


def test_a_cluster_needs_a_device():
    with pytest.raises(ClusterError, match="at least one device"):
        Cluster((), {})


def test_names_must_not_repeat():
    device = make_cluster("cpu").devices[0]
    with pytest.raises(ClusterError, match="repeat: cpu, cpu"):
        Cluster((device, device), {})


def test_a_missing_link_is_named():
    cluster = make_cluster("cpu,l4")
    one_way = {("cpu", "l4"): cluster.links["cpu", "l4"]}
    with pytest.raises(ClusterError, match="no link from 'l4' to 'cpu'"):
        Cluster(cluster.devices, one_way)


@pytest.mark.parametrize(
    "bad", [Link(0.0, 1.0), Link(-1.0, 1.0), Link(1.0, -1.0), Link(float("nan"), 1.0), Link(1.0, float("nan"))]
)
def test_links_must_be_possible(bad):
    cluster = make_cluster("cpu,l4")
    with pytest.raises(ClusterError, match="l4"):
        Cluster(cluster.devices, {**cluster.links, ("cpu", "l4"): bad})


def test_devices_by_name():
    cluster = make_cluster("cpu,2xl4")
    assert cluster["l4#1"] is cluster.devices[2]
    with pytest.raises(ClusterError, match=r"no device 'l4'.*cpu, l4#0, l4#1"):
        cluster["l4"]


def test_with_memory():
    cluster = make_cluster("a100-80gb,l4")
    limited = cluster.with_memory({"l4": 5 * GIB})
    assert [d.memory for d in limited.devices] == [80 * GIB, 5 * GIB]
    assert limited.links == cluster.links
    assert replace(limited.devices[1], memory=24 * GIB) == cluster.devices[1]
    assert [d.memory for d in cluster.devices] == [80 * GIB, 24 * GIB]
    assert cluster.with_memory({}) == cluster
    with pytest.raises(ClusterError, match="'h200'"):
        cluster.with_memory({"h200": 1})


def test_equal_clusters_hash_alike():
    text = "2xa100-80gb,l40s@200Gbps"
    assert hash(make_cluster(text)) == hash(make_cluster(text))
    assert make_cluster(text) != make_cluster(text + "+5us")
    assert len({make_cluster(text), make_cluster(text), make_cluster("cpu")}) == 2


@pytest.mark.parametrize("text", ["cpu", "2xcpu", "2xa100-80gb,l40s@200Gbps+10us", "cpu,l4"])
def test_json_round_trip(text):
    cluster = make_cluster(text)
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_text():
    assert make_cluster("a100-80gb,l4@25GB/s").to_text() == (
        "device a100-80gb modelled a100-80gb: 312 TFLOP/s, 2039 GB/s, 80.0 GiB\n"
        "device l4 modelled l4: 121 TFLOP/s, 300 GB/s, 24.0 GiB\n"
        "link a100-80gb -> l4: 25 GB/s + 10 us\n"
        "link l4 -> a100-80gb: 25 GB/s + 10 us"
    )
