"""No footprint depends on what was not looked at: the corpus on random memory, and random programs against a plain machine."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera_compile.ptx_tools import (
    Buffer,
    Footprint,
    Intervals,
    Kind,
    Module,
    NotDerivable,
    TensorMap,
    footprint,
    interpretation,
    parse,
    verdict,
)  # fmt: skip
from tests.ptx_tools.corpus import static_files, triton_cases, triton_ptx
from tests.ptx_tools.launching import triton_module
from tests.ptx_tools.programs import BUFFERS, SIZE, Machine, Program, random_contents, random_program

# -- the corpus


@pytest.fixture(autouse=True)
def _loops_end(monkeypatch):
    monkeypatch.setattr(interpretation, "MOST_TURNS", 20_000)


def arguments(module: Module, kernel: str, fill: dict[str, bytes]) -> list[Any]:
    """Something for each parameter: a buffer for a pointer, with contents where `fill` has some, a small number else."""
    found: list[Any] = []
    for index, param in enumerate(module.kernel(kernel).params or ()):
        if param.nbytes == 128:
            found.append(TensorMap((1 << 44) + (index << 34), 2, (96, 80), (256,), (64, 32)))
        elif ".ptr" in param.qualifiers:
            found.append(Buffer((1 << 44) + (index << 34), 1 << 14, fill.get(param.name)))
        elif param.type == "f32":
            found.append(0.5)
        elif param.dims or param.type[0] not in "usb":
            found.append(bytes(param.nbytes or 0))
        else:
            found.append(1 if param.nbytes == 1 else 80)
    return found


def launch(module: Module, kernel: str, fill: dict[str, bytes], shared: int) -> Footprint | str:
    """The footprint, or why there is none."""
    function = module.kernel(kernel)
    threads = next((tuple(int(t) for t in d.tokens if t != ",") for d in function.tuning if d.name == ".reqntid"), (48,))
    cluster = next((int(d.tokens[0]) for d in function.tuning if d.name == ".reqnctapercluster"), 1)
    try:
        return footprint(module, kernel, (2 * cluster, 2), threads, arguments(module, kernel, fill), shared_bytes=shared)
    except NotDerivable as error:
        return str(error)


def same(one: Footprint, two: Footprint) -> bool:
    found = [[(b.name, b.reads, b.writes) for b in f.buffers] for f in (one, two)]
    return found[0] == found[1] and (one.outside_reads, one.outside_writes) == (two.outside_reads, two.outside_writes)


def contents(module: Module, kernel: str, seed: int) -> dict[str, bytes]:
    rng = random.Random(f"{kernel}{seed}")
    return {p.name: rng.randbytes(1 << 14) for p in module.kernel(kernel).params or () if ".ptr" in p.qualifiers}


def check_kernel(module: Module, kernel: str, shared: int = 0) -> None:
    found = verdict(module, kernel)
    if found.kind is Kind.UNKNOWN:
        return
    blind = launch(module, kernel, {}, shared)
    if found.kind is Kind.GUARDED:
        assert isinstance(blind, str), "it depends on contents that were not given"
        indices = np.arange(1 << 12, dtype=np.int32).tobytes()
        guards = dict.fromkeys(found.buffers, indices)
        seen = [launch(module, kernel, contents(module, kernel, seed) | guards, shared) for seed in range(2)]
        seen.append(launch(module, kernel, guards, shared))
    else:
        seen = [launch(module, kernel, contents(module, kernel, seed), shared) for seed in range(2)]
        if isinstance(blind, Footprint):
            seen.append(blind)
        elif found.kind is Kind.INDEPENDENT:
            assert all(isinstance(each, str) for each in seen), "what is unknown does not become known by data"
    if found.kind is Kind.INDEPENDENT:
        assert all(isinstance(each, str) or each.guards == () for each in seen)
    if isinstance(blind, Footprint) or found.kind is Kind.GUARDED:
        first = seen[0]
        for each in seen[1:]:
            assert isinstance(first, str) == isinstance(each, str)
            assert isinstance(first, str) or isinstance(each, str) or same(first, each)


@pytest.mark.parametrize("path", [p for p in static_files() if p.parent.name != "triton"], ids=lambda path: path.stem)
def test_other_data_gives_the_same_footprint(path):
    module = parse(path.read_text(), name=path.name)
    for kernel in module.kernels:
        check_kernel(module, kernel)


@pytest.mark.parametrize("case", triton_cases())
def test_other_data_gives_the_same_footprint_of_triton_kernels(case):
    module = triton_module(case)
    check_kernel(module, next(iter(module.kernels)), triton_ptx(case).metadata["shared"])


# -- random programs


def touched(found: Footprint, write: bool) -> Intervals:
    whole = found.outside_writes if write else found.outside_reads
    for buffer in found.buffers:
        whole = whole | (buffer.writes if write else buffer.reads).shift(buffer.addr)
    return whole


def single(addresses: set[int]) -> Intervals:
    return Intervals.of([(address, address + 1) for address in addresses])


def check_program(program: Program) -> str:
    """What became of it: 'exact' or 'refused'."""
    one, two = random_contents(1), random_contents(2)
    two["g"] = one["g"]
    first, second = Machine(program, one).run(), Machine(program, two).run()
    steady = (first.reads, first.writes) == (second.reads, second.writes)
    module = parse(program.text, name="random.ptx")
    decided = verdict(module, "k")
    if decided.kind is Kind.INDEPENDENT:
        assert steady, f"not independent at all:\n{program}"
    if decided.kind is Kind.GUARDED:
        kept = {name: one[name] if f"k_{name}" in decided.buffers else random_contents(3)[name] for name in BUFFERS}
        third = Machine(program, kept).run()
        assert (first.reads, first.writes) == (third.reads, third.writes), f"{decided} is not enough:\n{program}"
    arguments = [Buffer(at, SIZE, one["g"] if name == "g" and program.guarded else None) for name, at in BUFFERS.items()]
    try:
        found = footprint(module, "k", program.grid, program.block, [*arguments, *program.numbers])
    except NotDerivable:
        return "refused"
    assert steady, f"other data would give another footprint:\n{program}"
    for write, expected in ((False, first.reads), (True, first.writes)):
        got = touched(found, write)
        assert got == single(expected), f"{'writes' if write else 'reads'} differ: {got - single(expected)} too many, " + (
            f"{single(expected) - got} missing\n{program}"
        )
    return "exact"


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_programs_against_a_machine_of_one_thread(first):
    """Nothing wrong, and nearly nothing refused where no data decides."""
    programs = [random_program(random.Random(seed)) for seed in range(first, first + 20)]
    outcomes = [(program.clean, check_program(program)) for program in programs]
    clean = [outcome for is_clean, outcome in outcomes if is_clean]
    assert clean.count("exact") >= len(clean) - 2


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(st.randoms(use_true_random=False))
def test_programs_that_hypothesis_makes(rng):
    check_program(random_program(rng))
