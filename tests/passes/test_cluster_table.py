"""Clusters from the tables of a TOML file, and what is wrong with them."""

import tomllib

import pytest

import tessera_compile
from tessera_compile.passes.errors import ClusterError

GOOD = """
[[device]]
type = "a100-80gb"
count = 2
memory_gib = 70

[[device]]
name = "mine"
bf16_tflops = 100
memory_gb_per_s = 500
memory_gib = 24

[link]
gbps = 100
latency_us = 12

[[links]]
from = "a100-80gb#0"
to = "a100-80gb#1"
gb_per_s = 300

[[links]]
from = "mine"
to = "a100-80gb#0"
gb_per_s = 5
both_ways = false
"""


def read(tmp_path, text):
    tomllib.loads(text)
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return tessera_compile.make_cluster(str(path))


def test_everything_at_once(tmp_path):
    cluster = read(tmp_path, GOOD)
    assert cluster.names == ("a100-80gb#0", "a100-80gb#1", "mine")
    assert cluster["a100-80gb#1"].memory == 70 * 2**30
    assert cluster["a100-80gb#1"].tflops == 312
    assert cluster["mine"].gb_per_s == 500
    assert cluster["mine"].kind == "modelled"
    assert cluster.links["a100-80gb#1", "a100-80gb#0"].gb_per_s == 300
    assert cluster.links["mine", "a100-80gb#0"].gb_per_s == 5
    assert cluster.links["a100-80gb#0", "mine"].gb_per_s == 12.5
    assert cluster.links["a100-80gb#0", "mine"].latency_us == 12


def test_cpu_lanes(tmp_path):
    cluster = read(tmp_path, '[[device]]\ntype = "cpu"\ncount = 2\nmemory_gib = 1\n[link]\ngb_per_s = 3\n')
    assert cluster.names == ("cpu#0", "cpu#1")
    assert {d.memory for d in cluster.devices} == {2**30}


def test_as_an_option(tmp_path):
    read(tmp_path, GOOD)
    options = tessera_compile.Options(cluster=tmp_path / "cluster.toml")
    assert hash(options) == hash(tessera_compile.Options(cluster=str(tmp_path / "cluster.toml")))
    (tmp_path / "cluster.toml").write_text(GOOD.replace("gb_per_s = 300", "gb_per_s = 200"))
    assert options != tessera_compile.Options(cluster=tmp_path / "cluster.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("latency_us", "latncy_us", "did you mean 'latency_us'"),
        ("memory_gib = 24", "memory_gb = 24", "did you mean"),
        ('type = "a100-80gb"', 'type = "a100-80g"', "did you mean a100-80gb"),
        ("[link]\ngbps = 100\nlatency_us = 12", "", "no link from"),
        ('to = "a100-80gb#1"', 'to = "a100-80gb#7"', "no device 'a100-80gb#7'"),
        ("gbps = 100", "gbps = 100\ngb_per_s = 10", "one of gbps"),
        ("gbps = 100", "gbps = 0", "need > 0"),
        ('gbps = 100', 'gbps = "fast"', "'fast'; it takes a number"),
        ("count = 2", "count = 0", "whole number from 1"),
        ("count = 2", "count = true", "whole number from 1"),
        ("memory_gib = 70", 'memory_gib = "70"', "'70'; it takes a number"),
        ("memory_gib = 70", "memory_gib = nan", "nan; it takes a number"),
        ("bf16_tflops = 100", "bf16_tflops = -3", "-3; it takes a number"),
        ('to = "a100-80gb#1"', 'to = "a100-80gb#0"', "linked to itself"),
        ("both_ways = false", 'both_ways = "no"', "true or false"),
        ("[link]\n", "[[link]]\n", "write [link]"),
        ("[[links]]\nfrom = \"mine\"", "[[lnks]]\nfrom = \"mine\"", "did you mean 'links'"),
        ('name = "mine"\nbf16_tflops = 100', 'name = "mine"', "bf16_tflops"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(ClusterError) as caught:
        read(tmp_path, GOOD.replace(old, new, 1))
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "[device]\ntype = 'l4'\n", "[[device]]\ntype = 'cpu'\nbf16_tflops = 5\n"])
def test_other_tables_that_say_nothing(tmp_path, text):
    with pytest.raises(ClusterError, match=r"cluster\.toml"):
        read(tmp_path, text)


def test_a_name_is_one_word(tmp_path):
    with pytest.raises(ClusterError, match="one word"):
        read(tmp_path, '[[device]]\ntype = "l4"\nname = "my gpu"\n')


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ClusterError, match=r"none\.toml"):
        tessera_compile.make_cluster(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("[[device")
    with pytest.raises(ClusterError, match=r"bad\.toml"):
        tessera_compile.make_cluster(str(tmp_path / "bad.toml"))
