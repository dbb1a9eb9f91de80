"""Times are measured where there is something to measure, modelled by formula elsewhere, and touch nobody's state."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from tessera_compile.catalogue import make_cluster
from tessera_compile.compiler import executors, report
from tessera_compile.passes import lower
from tessera_compile.passes.cluster import Cluster, Device
from tessera_compile.passes.errors import TesseraWarning
from tessera_compile.passes.ir import KernelGraph, Profile, Timing
from tessera_compile.runtime import profiler
from tessera_compile.runtime.codegen import Codegen
from tessera_compile.runtime.profiler import invented_inputs, profile
from tessera_compile.runtime.roofline import roofline_us
from tests.graphs import lowered

# Alone, or scaled to what the kernels take together.
TIMED = {"measured", "calibrated"}


def layers(x, w):
    for _ in range(3):
        x = torch.relu(x @ w)
    return x


def layered(static: tuple[int, ...] = (1,)) -> KernelGraph:
    return lowered(layers, [torch.randn(8, 8), torch.randn(8, 8)], static)


def timed(graph: KernelGraph, cluster: str | Cluster = "2xcpu", codegen: str = "eager", how: str = "measure") -> Profile:
    made = make_cluster(cluster)
    return profile(graph, made, Codegen(codegen, threads=1), how=how, lanes=len(made.devices), threads=1)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_times_are_measured_on_cpu_lanes(codegen):
    graph = layered()
    times = timed(graph, codegen=codegen)
    times.check([k.name for k in graph.kernels], ["cpu#0", "cpu#1"])
    for kernel in graph.kernels:
        row = times.times[kernel.name]
        assert set(row) == {"cpu#0", "cpu#1"}
        for timing in row.values():
            assert timing.source in TIMED
            assert 0 < timing.us < 1e6
            assert timing.spread >= 0
        assert row["cpu#0"] == row["cpu#1"], "lanes are alike"


def test_longer_kernels_take_longer():
    graph = lowered(lambda a, b: (a @ a, b @ b), [torch.randn(8, 8), torch.randn(768, 768)])
    small, large = graph.kernels
    times = timed(graph)
    assert times.us(large.name, "cpu#0") > 10 * times.us(small.name, "cpu#0")


def test_equal_fingerprints_share_one_timing(monkeypatch):
    graph = layered()
    assert len(graph.kernels) == 6
    measured = []
    original = profiler._time

    def time_once(*args):
        measured.append(args)
        return original(*args)

    monkeypatch.setattr(profiler, "_time", time_once)
    times = timed(graph)
    assert len(measured) <= 3, "two kinds of kernel, and perhaps the whole"
    rows = {}
    for kernel in graph.kernels:
        rows.setdefault(kernel.fingerprint, []).append(times.times[kernel.name]["cpu#0"])
    assert sorted(len(row) for row in rows.values()) == [3, 3]
    assert all(timing == row[0] for row in rows.values() for timing in row)
    first, second = (row[0] for row in rows.values())
    assert first != second


def test_effects_are_modelled_and_not_run():
    def f(x):
        return torch.randperm(16), torch.rand(16) + x, (x[None] @ x[:, None]).relu()

    graph = lowered(f, [torch.randn(16)])
    effects = [k for k in graph.kernels if k.effect]
    assert len(effects) == 2
    state = torch.get_rng_state()
    times = timed(graph)
    assert torch.equal(torch.get_rng_state(), state)
    (cpu, _) = make_cluster("2xcpu").devices
    for kernel in graph.kernels:
        timing = times.times[kernel.name]["cpu#0"]
        assert timing.source in ({"modelled"} if kernel.effect else TIMED)
        if kernel.effect:
            assert timing.us == roofline_us(kernel, graph, cpu)


def test_nothing_is_measured_where_it_should_not_be():
    graph = layered()
    for codegen, how in (("eager", "model"), ("null", "measure")):
        times = timed(graph, codegen=codegen, how=how)
        assert {t.source for row in times.times.values() for t in row.values()} == {"modelled"}


def test_data_sheet_devices_are_modelled_beside_measured_lanes():
    graph = layered()
    times = timed(graph, "cpu,a100-80gb")
    for row in times.times.values():
        assert row["cpu"].source in TIMED
        assert row["a100-80gb"].source == "modelled"


@torch.library.custom_op("tessera_profiler::needs_ones", mutates_args=())
def needs_ones(x: torch.Tensor) -> torch.Tensor:
    if not (x == 1).all():
        raise ValueError("not ones")
    return x.clone()


@needs_ones.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_kernel_that_fails_on_invented_data_is_modelled_with_a_warning():
    graph = lowered(lambda x: needs_ones(x) @ x, [torch.ones(4, 4)])
    with pytest.warns(TesseraWarning, match=r"needs_ones.*not ones.*modelled"):
        times = timed(graph)
    failing, product = (times.times[k.name]["cpu#0"].source for k in graph.kernels)
    assert failing == "modelled"
    assert product in TIMED


def test_indices_are_invented_within_range():
    def f(table, ids, at):
        return table[ids] @ table.t(), table.gather(0, at), torch.nn.functional.embedding(ids, table)

    graph = lowered(f, [torch.randn(1, 5), torch.zeros(7, dtype=torch.long), torch.zeros(1, 5, dtype=torch.long)])
    times = timed(graph)
    assert {t.source for row in times.times.values() for t in row.values()} <= TIMED


def test_invented_inputs_have_the_shapes_of_the_real_ones():
    args = [
        torch.randn(3, 4).t(),
        torch.zeros(5, dtype=torch.int32),
        torch.zeros(2, dtype=torch.bool),
        torch.randn(1, 4).expand(3, 4),
        torch.randn(2, dtype=torch.complex64),
        torch.randn(0, 3),
        torch.tensor(1.0, dtype=torch.float64),
    ]
    graph = lowered(lambda *a: [x + 0 for x in a], args)
    state = torch.get_rng_state()
    first, second = (list(invented_inputs(graph, graph.inputs)) for _ in range(2))
    for a, b, real in zip(first, second, args, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (real.shape, real.stride(), real.dtype)
        assert torch.equal(a, b)
    assert (first[1] == 0).all()
    assert first[2].all()
    assert first[0].unique().numel() == 12
    assert torch.equal(torch.get_rng_state(), state)


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("ring", torch.zeros(4, 4))

    def forward(self, x, cache, at):
        y = self.lin(x) + torch.rand(4)
        self.seen.add_(y.sum(0))
        cache.mul_(2).add_(y)
        # Rows that the kernel itself computes: it can be timed on the caller's tensors alone.
        cache.index_add_(0, (at * 3 + 1) % 4, x[(at + 2) % 4] @ y)
        self.ring.copy_(x[(at * 3 + 1) % 4] + self.ring)
        return y @ self.lin.weight, torch.randperm(4), cache[(at + 1) % 4] @ y


def test_profiling_leaves_the_callers_state_alone():
    """Weights, buffers, inputs, generator and threads are after a measured call what they are after a modelled one."""
    results = []
    start = Stateful()
    threads = torch.get_num_threads()
    for how in ("model", "measure"):
        torch._dynamo.reset()
        model = copy.deepcopy(start)
        compiled = torch.compile(model, backend="tessera", options={"profile": how, "codegen": "eager", "planner": "alternate"})
        x, cache, at = torch.ones(4, 4), torch.ones(4, 4), torch.arange(4)
        torch.manual_seed(4)
        with torch.no_grad():
            out = compiled(x, cache, at)
        results.append([*out, x, cache, at, *model.parameters(), *model.buffers(), torch.get_rng_state()])
        assert torch.get_num_threads() == threads
        fresh = []
        thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))  # noqa: B023
        thread.start()
        thread.join()
        assert fresh == [threads]
        assert executors(compiled)[0].runs == 1
        sources = {t.source for row in report(compiled).graphs[0].profile.times.values() for t in row.values()}
        assert sources <= {"modelled"} if how == "model" else sources & TIMED
        assert all(p._version == 0 for p in model.parameters())
    for modelled, measured in zip(*results, strict=True):
        assert torch.equal(modelled, measured)


# torch 2.11 itself refuses a call of a compiled function while another thread traces, whatever the backend.
@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 refuses calls while another thread compiles")
def test_threads_that_make_the_first_call_at_once():
    """The first call's tensors are timed on, once, whoever comes first; all get their results."""
    model = Stateful()

    def f(x, at):
        return x[(at * 3 + 1) % 4] @ x, model.lin(x)

    compiled = torch.compile(f, backend="tessera", options={"profile": "measure", "codegen": "eager", "planner": "alternate"})
    at, wrong = torch.arange(4), []
    start = threading.Barrier(4)

    def call(i: int) -> None:
        x = torch.full((4, 4), float(i))
        start.wait()
        try:
            with torch.no_grad():
                for _ in range(5):
                    torch.testing.assert_close(compiled(x, at), f(x, at))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert wrong == []
    assert sum(e.runs for e in executors(compiled)) == 20


# The model by hand. a100-80gb: 312 TFLOP/s, 2039 GB/s, 108 multiprocessors at 1.41 GHz, 40 MiB of L2.

FLOOR = 2500 / 1410


def on_fakes(function, args, static: tuple[int, ...] = ()) -> KernelGraph:
    """Lowered from shapes alone: the sizes here take minutes to compute."""
    return lower(make_fx(function, tracing_mode="fake")(*args), args, static_inputs=static)


def test_roofline_of_a_gemm_by_hand():
    """[4096, 8192] · [8192, 1024] in bf16; the weight comes from memory, the activations do not fit in L2."""
    (device,) = make_cluster("a100-80gb").devices
    args = [torch.empty(4096, 8192, dtype=torch.bfloat16), torch.empty(8192, 1024, dtype=torch.bfloat16)]
    graph = on_fakes(torch.mm, args, (1,))
    (kernel,) = graph.kernels
    assert (kernel.kind, kernel.flops) == ("gemm", 2 * 4096 * 8192 * 1024)
    assert (kernel.bytes_read, kernel.bytes_written) == (2 * (4096 * 8192 + 8192 * 1024), 2 * 4096 * 1024)
    compute = 2 * 4096 * 8192 * 1024 / (312e6 * 0.7)
    memory = 2 * (4096 * 8192 + 8192 * 1024 + 4096 * 1024) / (2039e3 * 0.8)
    assert compute > memory
    assert roofline_us(kernel, graph, device) == pytest.approx(FLOOR + compute)
    # In 32 bits the matrix units run at half the rate.
    graph = on_fakes(torch.mm, [a.float() for a in args], (1,))
    assert roofline_us(graph.kernels[0], graph, device) == pytest.approx(FLOOR + 2 * compute)


def test_roofline_of_a_gemm_bound_by_its_weight():
    """One row: the weight comes from memory, the little else from L2."""
    (device,) = make_cluster("a100-80gb").devices
    args = [torch.empty(1, 4096, dtype=torch.bfloat16), torch.empty(4096, 4096, dtype=torch.bfloat16)]
    graph = on_fakes(torch.mm, args, (1,))
    warm = 2 * (4096 + 4096) / (16 * 108 * 1.41e3 * 0.8)
    cold = 2 * 4096 * 4096 / (2039e3 * 0.8)
    assert roofline_us(graph.kernels[0], graph, device) == pytest.approx(FLOOR + cold + warm)


@pytest.mark.parametrize(("rows", "cached"), [(1024, True), (8192, False)])
def test_roofline_of_a_pointwise_kernel_by_hand(rows, cached):
    """x → x · 2 + 1 in fp32: 8 bytes an element, from L2 or from memory."""
    (device,) = make_cluster("a100-80gb").devices
    graph = on_fakes(lambda x: x * 2 + 1, [torch.empty(rows, 1024)])
    (kernel,) = graph.kernels
    count = rows * 1024
    assert (kernel.kind, kernel.flops) == ("pointwise", 2 * count)
    assert (kernel.bytes_read, kernel.bytes_written) == (4 * count, 4 * count)
    assert (8 * count <= 40 * 2**20) == cached
    rate = 16 * 108 * 1.41e3 * 0.8 if cached else 2039e3 * 0.8
    compute = 2 * count / (108 * 128 * 2 * 1.41e3 * 0.5)
    assert 8 * count / rate > compute
    assert roofline_us(kernel, graph, device) == pytest.approx(FLOOR + 8 * count / rate)


def test_a_device_without_figures_cannot_be_modelled():
    graph = layered()
    for tflops, gb_per_s in ((0.0, 100.0), (10.0, 0.0)):
        unknown = Device("mystery", "mystery", "modelled", 1 << 30, tflops=tflops, gb_per_s=gb_per_s)
        with pytest.raises(ValueError, match="mystery"):
            roofline_us(graph.kernels[0], graph, unknown)
        with pytest.raises(ValueError, match="mystery"):
            timed(graph, Cluster((unknown,), {}))


def test_a_timing_says_how_it_was_had():
    assert Timing(1.0).source == "measured"
    assert {t.source for row in timed(layered(), "a100-80gb").times.values() for t in row.values()} == {"modelled"}
