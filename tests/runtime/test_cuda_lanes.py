"""Programs on CUDA lanes: slices of one GPU stand for several."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from tessera_compile import make_cluster, report
from tessera_compile.compiler import executors
from tessera_compile.passes import depend, partition, schedule, verify
from tessera_compile.passes.errors import ClusterError, TesseraWarning
from tessera_compile.passes.placements import place
from tessera_compile.runtime.codegen import Codegen
from tessera_compile.runtime.cuda_lanes import CudaLaneExecutor
from tessera_compile.runtime.roofline import model_profile
from tests.capture import Capture, assert_same
from tests.models import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
TWO = "cuda:0/48sm,cuda:0/64sm"
THREE = "cuda:0/32sm,cuda:0/32sm,cuda:0/48sm"


class Stateful(nn.Module):
    """A cache written at a position, attention-like products, several outputs, one a view."""

    def __init__(self):
        super().__init__()
        self.key, self.value, self.out = (nn.Linear(64, 64) for _ in range(3))
        self.register_buffer("cache", torch.zeros(16, 64))

    def forward(self, x, at):
        self.cache.index_copy_(0, at, self.key(x))
        scores = torch.softmax(self.value(x) @ self.cache.t(), -1)
        y = torch.relu(self.out(scores @ self.cache)) + x
        return y, y.t(), scores.sum()


def compiled_with(model, cluster=TWO, **options):
    torch._dynamo.reset()
    given = {"cluster": cluster, "profile": "model", "planner": "alternate", **options}
    return torch.compile(model, backend="tessera", options=given, dynamic=False)


def stateful():
    torch.manual_seed(0)
    return Stateful().cuda()


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("cuda_graphs", [False, True, "segments"])
@pytest.mark.parametrize("planner", ["alternate", "random:1", "random:2"])
def test_state_and_outputs_are_those_of_eager(codegen, cuda_graphs, planner):
    model, expected = stateful(), stateful()
    run = compiled_with(model, codegen=codegen, cuda_graphs=cuda_graphs, planner=planner)
    generator = torch.Generator("cuda").manual_seed(1)
    with torch.no_grad():
        for i in range(6):
            x = torch.randn(2, 64, device="cuda", generator=generator)
            at = torch.tensor([2 * i, 2 * i + 1], device="cuda")
            for got, want in zip(run(x, at), expected(x, at), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
                assert got.stride() == want.stride()
    torch.testing.assert_close(model.cache, expected.cache, rtol=1e-3, atol=1e-4)
    assert executors(run)[0].runs == 6


@pytest.mark.parametrize("name", ["llama", "bert", "mixtral", "t5"])
def test_models_under_fifty_placements_from_one_lowering(name):
    torch._dynamo.reset()
    example = MODELS[name]()
    model = example.model.cuda()
    inputs = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in example.inputs.items()}
    with torch.no_grad():
        expected = model(**inputs)
    captured = Capture(model, inputs)
    ran = 0
    for names in (TWO, THREE):
        cluster = make_cluster(names)
        for seed in range(25):
            made = []
            for number, kernels in enumerate(captured.graphs):
                ddg, times = depend(kernels), model_profile(kernels, cluster.devices)
                placement = place(f"random:{seed}", ddg, times, cluster)
                plan = partition(ddg, times, cluster, placement=placement, planner="random", time_limit=0)
                program = schedule(ddg, plan)
                verify(program, ddg, plan)
                captured.run[number] = executor = CudaLaneExecutor(kernels, program, Codegen("eager"), poison=True)
                made.append(executor)
            assert_same(captured(), expected, rtol=1e-3, atol=1e-3)
            ran += sum(e.runs for e in made)
    assert ran == 50 * len(captured.graphs)


def test_the_callers_stream_is_respected_and_restored():
    model = stateful()
    run = compiled_with(model, codegen="eager")
    stream = torch.cuda.Stream()
    x, at = torch.randn(2, 64, device="cuda"), torch.tensor([0, 1], device="cuda")
    with torch.no_grad():
        run(x, at)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # what the caller enqueued must be seen
            y = x * 2
            got = run(y, at)[0]
            assert torch.cuda.current_stream() == stream
        stream.synchronize()
        want = stateful()(x * 2, at)[0]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_a_failing_segment_leaves_stream_and_device_as_they_were():
    def f(x, i):
        return (x @ x)[i] + torch.nonzero(x).sum()

    run = compiled_with(f, codegen="eager")
    x = torch.randn(8, 8, device="cuda")
    with torch.no_grad():
        run(x, torch.tensor([1], device="cuda"))
    before = torch.cuda.current_stream()
    executor = executors(run)[0]
    segment = next(iter(executor.segments.values()))
    original = segment.compiled.call
    object.__setattr__(segment.compiled, "call", lambda args: (_ for _ in ()).throw(RuntimeError("boom")))
    with pytest.raises(RuntimeError, match="boom") as failure, torch.no_grad():
        run(x, torch.tensor([1], device="cuda"))
    assert any("in segment" in note for note in failure.value.__notes__)
    assert torch.cuda.current_stream() == before
    object.__setattr__(segment.compiled, "call", original)
    with torch.no_grad():
        torch.testing.assert_close(run(x, torch.tensor([1], device="cuda")), f(x, torch.tensor([1], device="cuda")))


def test_several_threads_and_streams():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    run = compiled_with(model, codegen="eager")
    inputs = [torch.randn(32, 64, device="cuda") for _ in range(8)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
        run(inputs[0])
    wrong = []

    def work(i):
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                for _ in range(20):
                    torch.testing.assert_close(run(inputs[i]), expected[i], rtol=1e-3, atol=1e-4)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_a_diamond_replayed_with_churned_allocations_is_bit_stable():
    """Two branches that take unlike time, a join, and blocks of the allocator handed round between calls."""
    torch.manual_seed(0)
    left, right = nn.Linear(256, 256).cuda(), nn.Linear(256, 256).cuda()

    def f(x):
        a = left(x)
        for _ in range(4):
            a = torch.sin(a) @ left.weight
        return a + right(x)

    run = compiled_with(f, codegen="eager")
    x = torch.randn(64, 256, device="cuda")
    with torch.no_grad():
        first = run(x).clone()
        for i in range(300):
            junk = [torch.full((1 + (i * 7 + j * 13) % 4096,), float("nan"), device="cuda") for j in range(8)]
            got = run(x)
            del junk
            assert torch.equal(got, first), i


def test_dtypes_that_move_as_bytes_and_empty_values():
    def f(x):
        mask = x > 0
        z = torch.complex(x, -x)
        h = x.to(torch.bfloat16)
        e = x[:0] * 2
        return mask.sum(), (z * 2).abs().sum(), (h + 1).float().sum(), e + 1, mask, z + 1

    x = torch.randn(8, 8, device="cuda")
    for planner in ("alternate", "random:3", "random:5"):
        run = compiled_with(f, planner=planner, codegen="eager")
        with torch.no_grad():
            for got, want in zip(run(x), f(x), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
        assert executors(run)[0].runs == 1


def test_graphs_are_replayed_and_say_why_not():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    run = compiled_with(model, codegen="eager", cuda_graphs=True)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(32, 64, device="cuda")
            torch.testing.assert_close(run(x), model(x), rtol=1e-3, atol=1e-4)
        assert executors(run)[0].replays >= 3
        model[0].weight = nn.Parameter(torch.randn(64, 64, device="cuda"))  # other addresses: captured anew
        for _ in range(3):
            torch.testing.assert_close(run(x), model(x), rtol=1e-3, atol=1e-4)
    view = compiled_with(lambda x: (x.view(-1), x * 2), cuda_graphs=True, codegen="eager")
    with torch.no_grad():
        for _ in range(3):
            view(torch.randn(4, 4, device="cuda"))
    (reason,) = report(view).graphs[0].uncaptured
    assert "a view of input" in reason


def test_profiles_are_measured_on_the_slices():
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda()
    run = compiled_with(model, "cuda:0/16sm,cuda:0/96sm", profile="measure", planner="milp", policy="throughput")
    x = torch.randn(2048, 1024, device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x), rtol=1e-2, atol=1e-2)
    profile = report(run).graphs[0].profile
    gemm = max(profile.times, key=lambda k: profile.us(k, "cuda:0/16sm"))
    assert {t.source for row in profile.times.values() for t in row.values()} <= {"measured", "calibrated", "modelled"}
    assert profile.us(gemm, "cuda:0/16sm") > 1.5 * profile.us(gemm, "cuda:0/96sm")


def test_clusters_that_are_not_there():
    with pytest.raises(ClusterError, match="this machine has"):
        make_cluster("cuda:99")
    with pytest.raises(ClusterError, match="multiprocessors"):
        make_cluster("cuda:0/9999sm")


def test_inputs_elsewhere_than_the_cluster_fall_back_with_one_warning():
    run = compiled_with(lambda x: x @ x + 1, codegen="eager")
    with pytest.warns(TesseraWarning, match="its inputs are on cpu"), torch.no_grad():
        torch.testing.assert_close(run(torch.ones(3, 3)), torch.full((3, 3), 4.0))


@pytest.mark.parametrize("transport", ["peer", "host", "gpu"])
@pytest.mark.parametrize("cuda_graphs", [False, True, "segments"])
def test_every_transport_carries_every_kind_of_graph(transport, cuda_graphs):
    model, expected = stateful(), stateful()
    run = compiled_with(model, codegen="eager", cuda_graphs=cuda_graphs, transport=transport, inflight=2)
    with torch.no_grad():
        for i in range(7):
            x, at = torch.randn(2, 64, device="cuda"), torch.tensor([2 * i, 2 * i + 1], device="cuda")
            for got, want in zip(run(x, at), expected(x, at), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model.cache, expected.cache, rtol=1e-3, atol=1e-4)
    (executor,) = executors(run)
    assert executor.runs == 7
    if cuda_graphs:
        assert executor.replays > 0, executor.reasons


def test_state_on_another_lane_is_replayed_and_seen_when_the_caller_changes_it():
    """Replicas are made current before a replay: the caller writes the cache and replaces a weight in between."""
    model, expected = stateful(), stateful()
    run = compiled_with(model, codegen="eager", cuda_graphs=True, planner="random:2")
    with torch.no_grad():
        for i in range(8):
            for m in (model, expected):
                if i == 4:
                    m.cache.mul_(0.5)
                if i == 6:
                    m.key.weight.add_(0.25)
            x, at = torch.randn(2, 64, device="cuda"), torch.tensor([2 * i, 2 * i + 1], device="cuda")
            for got, want in zip(run(x, at), expected(x, at), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(model.cache, expected.cache, rtol=1e-3, atol=1e-4)
    (executor,) = executors(run)
    assert executor.replays >= 5, executor.reasons


def test_segments_are_captured_again_for_other_weights_and_outputs_are_the_callers():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
    run = compiled_with(model, codegen="eager", cuda_graphs="segments", inflight=2)
    with torch.no_grad():
        kept = []
        for i in range(12):
            if i == 6:
                model[0].weight = nn.Parameter(torch.randn(64, 64, device="cuda"))
            x = torch.randn(4, 64, device="cuda")
            kept.append((run(x), model(x)))
        for got, want in kept:
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert sum(e.replays for e in executors(run)) > 10


def test_an_emulated_pair_takes_the_time_that_its_plan_predicts():
    torch._dynamo.reset()
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]).cuda()
    options = {
        "cluster": "a100-80gb,l40s@200Gbps", "pace": 40.0, "emulate_on": "cuda:0/56sm,cuda:0/64sm", "planner": "alternate",
        "codegen": "eager", "cuda_graphs": True,
    }  # fmt: skip
    run = torch.compile(model, backend="tessera", options=options)
    x = torch.randn(8, 256, device="cuda")
    seen = []
    with torch.no_grad():
        for count in (5, 40):  # the first requests compile, load and capture
            for _ in range(count):
                torch.testing.assert_close(run(x), model(x), rtol=1e-3, atol=1e-4)
            seen.append(report(run).graphs[0].emulation)
    first, all_ = seen
    assert (first.requests, all_.requests) == (5, 45)
    assert all_.steps - first.steps == 40 * first.steps // 5 > 40 * 7
    assert all_.overran - first.overran <= 0.01 * (all_.steps - first.steps)  # more, and an emulation is void
    mean = (45 * all_.mean_us - 5 * first.mean_us) / 40
    predicted = report(run).graphs[0].plan.makespan_us
    assert 0.95 * predicted < mean < 1.1 * predicted


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices")
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("transport", ["auto", "host", "gpu"])
@pytest.mark.parametrize("cuda_graphs", [False, True, "segments"])
def test_two_gpus(codegen, transport, cuda_graphs):
    model, expected = stateful(), stateful()
    run = compiled_with(model, "cuda:0,cuda:1", codegen=codegen, cuda_graphs=cuda_graphs, transport=transport)
    with torch.no_grad():
        for i in range(6):
            x, at = torch.randn(2, 64, device="cuda"), torch.tensor([2 * i, 2 * i + 1], device="cuda")
            for got, want in zip(run(x, at), expected(x, at), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model.cache, expected.cache, rtol=1e-3, atol=1e-4)
