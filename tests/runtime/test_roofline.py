"""The roofline by hand, and the ceilings that data sheets set."""

import pytest

from tessera_compile import make_cluster
from tessera_compile.runtime.roofline import FLOOR_CYCLES, ceiling, model_us


def device(name):
    return make_cluster(name).devices[0]


@pytest.mark.parametrize(
    ("pair", "expected"), [("a100-80gb,l40s", 1.315), ("h100-sxm,rtx-pro-6000", 1.013), ("b200,h100-sxm", 1.010)]
)
def test_ceilings_by_data_sheet(pair, expected):
    first, second = make_cluster(pair).devices
    assert ceiling(first, second) == pytest.approx(expected, abs=5e-4)
    assert ceiling(second, first) == pytest.approx(expected, abs=5e-4)


def test_the_ceiling_is_one_for_alike_devices():
    a100 = device("a100-80gb")
    assert ceiling(a100, a100) == pytest.approx(1.0)


def test_small_kernels_cost_the_floor_and_are_faster_on_the_higher_clock():
    a100, l40s = device("a100-80gb"), device("l40s")
    assert model_us(a100, "pointwise", 0, 0, 0) == pytest.approx(FLOOR_CYCLES / 1410)
    assert model_us(l40s, "pointwise", 32, 0, 256) < model_us(a100, "pointwise", 32, 0, 256)


def test_weights_come_from_dram_and_activations_from_l2_while_they_fit():
    l40s = device("l40s")
    floor = FLOOR_CYCLES / 2520
    assert model_us(l40s, "gemm", 0, 50e6, 0) == pytest.approx(floor + 50e6 / (864e3 * 0.8))
    assert model_us(l40s, "pointwise", 0, 0, 50e6) == pytest.approx(floor + 50e6 / (16 * 142 * 2.52e3 * 0.8))
    assert model_us(l40s, "pointwise", 0, 0, 200e6) == pytest.approx(floor + 200e6 / (864e3 * 0.8))


def test_arithmetic_by_kind_and_width():
    a100 = device("a100-80gb")
    floor = FLOOR_CYCLES / 1410
    assert model_us(a100, "gemm", 1e12, 0, 0) == pytest.approx(floor + 1e12 / (312e6 * 0.7))
    assert model_us(a100, "gemm", 1e12, 0, 0, wide=True) == pytest.approx(floor + 1e12 / (156e6 * 0.7))
    assert model_us(a100, "pointwise", 1e12, 0, 0) == pytest.approx(floor + 1e12 / (108 * 128 * 2 * 1.41e3 * 0.5))


def test_the_census_is_told_apart_rightly():
    """Of the real A100/L40S kernels, who is faster; the benchmark prints the errors as well."""
    import csv

    from benchmarks.roofline import CENSUS, ROWS, work_of

    a100, l40s = make_cluster("a100-80gb-pcie,l40s").devices
    with CENSUS.open() as file:
        rows = [(r, work_of(r["kernel"], ROWS[r["workload"]])) for r in csv.DictReader(file) if r["workload"] == "decode"]
    known = [(r, w) for r, w in rows if w is not None]

    def says_a100(work):
        return model_us(a100, work.kind, work.flops, work.cold, work.warm) < model_us(
            l40s, work.kind, work.flops, work.cold, work.warm
        )

    right = [says_a100(w) == (float(r["a100-80gb_us"]) < float(r["l40s_us"])) for r, w in known]
    assert len(right) == 417
    assert sum(right) >= 416
