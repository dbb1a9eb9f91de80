"""The backend as a user meets it: by name, as an object, its report, dry runs, fallbacks and bad input."""

import json
import warnings

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import tessera_compile
from tessera_compile import Plan, Report
from tessera_compile.compiler import executors
from tessera_compile.passes import verify
from tessera_compile.passes.errors import InfeasibleError, OptionsError, PlanError, TesseraWarning

QUICK = {"codegen": "eager", "profile": "model"}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(32, 64)
        self.second = torch.nn.Linear(64, 32)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return torch.softmax(self.second(torch.relu(self.first(x))), -1)


@pytest.fixture
def net():
    return Net().eval()


def run(model, x, options=None, **kwargs):
    compiled = torch.compile(model, backend="tessera", options={**QUICK, **(options or {})}, **kwargs)
    with torch.no_grad():
        return compiled, compiled(x)


def expect_error(kind, model, x, options, match):
    with pytest.raises(BackendCompilerFailed) as caught:
        run(model, x, options)
    assert isinstance(caught.value.inner_exception, kind)
    assert match in str(caught.value.inner_exception)


def test_by_name_runs_on_two_lanes_and_equals_eager(net):
    x = torch.randn(4, 32)
    with torch.no_grad():
        expected = net(x)
    compiled, actual = run(net, x, {"planner": "alternate"})
    torch.testing.assert_close(actual, expected)
    assert net.calls.item() == 2
    (executor,) = executors(compiled)
    assert executor.runs == 1
    assert executor.lanes == 2
    plan = tessera_compile.report(compiled).graphs[0].plan
    assert set(plan.placement.values()) == {"cpu#0", "cpu#1"}


def test_inductor_and_measured_profile_are_the_default(net):
    x = torch.randn(4, 32)
    compiled = torch.compile(net, backend="tessera", options={"planner": "alternate"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x))
    graph = tessera_compile.report(compiled).graphs[0]
    sources = {t.source for row in graph.profile.times.values() for t in row.values()}
    assert sources == {"calibrated"}
    assert not graph.fallbacks


def test_without_options_at_all():
    compiled = torch.compile(lambda x: torch.sin(x) + 1, backend="tessera")
    x = torch.randn(3)
    torch.testing.assert_close(compiled(x), torch.sin(x) + 1)
    assert executors(compiled)[0].runs == 1


def test_backend_object_is_equal_by_value_and_does_not_recompile(net):
    x = torch.randn(4, 32)
    first, second = tessera_compile.backend(**QUICK), tessera_compile.backend(**QUICK)
    assert first == second
    assert hash(first) == hash(second)
    assert first != tessera_compile.backend(**QUICK, planner="alternate")
    one = torch.compile(net, backend=first)
    two = torch.compile(net, backend=second)
    with torch.no_grad():
        one(x)
        two(x)
    assert executors(one)[0].runs == 2  # The second call found the first one's code.
    with pytest.raises(BackendCompilerFailed, match="has its options already"), torch.no_grad():
        torch.compile(net, backend=tessera_compile.backend(**QUICK, seed=7), options={"strict": True})(x)


def test_functions_and_modules_compiled_in_place(net):
    @torch.compile(backend="tessera", options=QUICK)
    def function(x):
        return x * 2

    x = torch.randn(3)
    torch.testing.assert_close(function(x), x * 2)
    assert len(tessera_compile.report(function).graphs) == 1
    net.compile(backend="tessera", options=QUICK)
    with torch.no_grad():
        net(torch.randn(4, 32))
    assert len(tessera_compile.report(net).graphs) == 1


def test_graph_breaks_give_several_graphs():
    def function(x):
        y = torch.sin(x)
        torch._dynamo.graph_break()
        return torch.cos(y)

    x = torch.randn(5)
    compiled, actual = run(function, x)
    torch.testing.assert_close(actual, torch.cos(torch.sin(x)))
    assert len(tessera_compile.report(compiled).graphs) == 2


def test_report_before_the_first_call_and_of_other_things(net):
    with pytest.raises(RuntimeError, match="call the model once"):
        tessera_compile.report(torch.compile(net, backend="tessera"))
    with pytest.raises(TypeError, match=r"torch\.compile"):
        tessera_compile.report(net)


def test_report_says_what_an_engineer_asks(net):
    compiled, _ = run(net, torch.randn(4, 32), {"cluster": "a100-80gb,l40s"})
    report = tessera_compile.report(compiled)
    text = str(report)
    words = "a100-80gb l40s first second gemm bottleneck makespan bound gap alone cross"
    assert all(word in text for word in words.split())
    assert Report.from_json(report.to_json()).to_json() == report.to_json()
    read = Report.from_json(report.to_json()).graphs[0]
    assert read.to_text() == report.graphs[0].to_text()
    verify(read.program, read.ddg, read.plan)  # The dependence graph survives the round trip too.


def test_report_to_file(net, tmp_path):
    compiled, _ = run(net, torch.randn(4, 32))
    tessera_compile.report(compiled).to_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["graphs"][0]["plan"]["objective"] == "latency"


def test_policy_chooses_the_objective(net):
    for policy, objective in (("auto", "latency"), ("latency", "latency"), ("throughput", "throughput")):
        torch._dynamo.reset()
        compiled, _ = run(net, torch.randn(4, 32), {"policy": policy})
        assert tessera_compile.report(compiled).graphs[0].plan.objective == objective


def test_explain_plans_and_leaves_everything_alone(net):
    x = torch.randn(4, 32)
    before = torch.get_rng_state()
    report = tessera_compile.explain(net, {"cluster": "a100-80gb,l40s"})(x)
    assert net.calls.item() == 0
    assert torch.equal(torch.get_rng_state(), before)
    assert report.graphs[0].plan.devices == ("a100-80gb", "l40s")
    assert "explain" not in str(report)


def test_explain_of_a_method_with_an_in_place_argument():
    def function(x):
        return x.mul_(2).sum()

    x = torch.ones(3)
    tessera_compile.explain(function)(x)
    assert x.tolist() == [1, 1, 1]


def test_explain_many_models_of_one_class():
    for _ in range(12):
        assert len(tessera_compile.explain(Net().eval())(torch.randn(4, 32)).graphs) == 1


def test_explain_of_nothing():
    with pytest.raises(RuntimeError, match="captured no graph"):
        tessera_compile.explain(lambda: 3)()


def test_dryrun_of_a_graph_that_falls_back_builds_nothing_and_still_reports(net, tmp_path):
    path = tmp_path / "dry.json"
    compiled = torch.compile(net, backend="tessera", options={**QUICK, "dryrun": path})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TesseraWarning)
        compiled(torch.randn(4, 32)).sum().backward()
    assert net.first.weight.grad is not None
    assert "gradients" in Report.from_json(path.read_text()).fallbacks[0]


def test_dryrun_runs_eagerly_on_one_lane_and_writes_its_report(net, tmp_path):
    x = torch.randn(4, 32)
    with torch.no_grad():
        expected = net(x)
    path = tmp_path / "dry.json"
    compiled, actual = run(net, x, {"dryrun": str(path), "codegen": "inductor", "planner": "alternate"})
    torch.testing.assert_close(actual, expected)
    report = Report.from_json(path.read_text())
    assert set(report.graphs[0].plan.placement.values()) == {"cpu#0", "cpu#1"}
    (executor,) = executors(compiled)
    assert {s.compiled.codegen for s in executor.segments.values()} == {"eager"}
    assert {lane for lane, _ in executor.segments} == {0}


def test_null_codegen_returns_the_right_shapes(net):
    _, actual = run(net, torch.randn(4, 32), {"codegen": "null"})
    assert actual.shape == (4, 32)
    assert actual.dtype == torch.float32


def test_one_lane_is_a_trivial_plan(net):
    x = torch.randn(4, 32)
    compiled, actual = run(net, x, {"cluster": "cpu"})
    with torch.no_grad():
        torch.testing.assert_close(actual, net(x))
    graph = tessera_compile.report(compiled).graphs[0]
    assert [lane.device for lane in graph.program.lanes] == ["cpu"]
    assert sum(i.to_text().startswith("run") for _, _, i in graph.program) == 1
    assert graph.plan.gap == 0


def test_one_lane_is_inductor_itself_and_reports_on_demand(net):
    x = torch.randn(4, 32)
    compiled = torch.compile(net, backend="tessera", options={"cluster": "cpu"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x))
    assert net.calls.item() == 2
    assert executors(compiled) == []  # Nothing of ours stands between the call and Inductor's code.
    graph = tessera_compile.report(compiled).graphs[0]
    assert net.calls.item() == 2
    assert {v.origin for v in graph.kernels.values.values()} == {"state", "input", "weight", "activation"}
    assert sum(v.origin == "weight" for v in graph.kernels.values.values()) == 4
    assert tuple(x.shape) in {v.shape for v in graph.kernels.values.values()}
    assert [k.module for k in graph.kernels.kernels if k.kind == "gemm"] == ["first", "second"]


def test_one_lane_keeps_what_inductor_would_lose():
    class Swap(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.ones(3))
            self.register_buffer("b", torch.zeros(3))

        def forward(self, x):
            keep = self.a.clone()
            self.a.copy_(self.b)
            self.b.copy_(keep)
            return x + self.a

    model = Swap()
    compiled = torch.compile(model, backend="tessera", options={"cluster": "cpu"})
    with torch.no_grad():
        compiled(torch.ones(3))
    assert model.a.tolist() == [0, 0, 0]
    assert model.b.tolist() == [1, 1, 1]
    assert executors(compiled)[0].runs == 1


def test_one_lane_with_gradients_falls_back_as_well(net):
    with pytest.raises(BackendCompilerFailed, match="gradients are needed"):
        torch.compile(net, backend="tessera", options={"cluster": "cpu", "strict": True})(torch.randn(4, 32))


def test_pins_by_module_and_by_kernel(net):
    compiled, _ = run(net, torch.randn(4, 32), {"pins": {"second": "cpu#1"}})
    graph = tessera_compile.report(compiled).graphs[0]
    where = {k.module: graph.plan.placement[k.name] for k in graph.kernels.kernels if k.kind == "gemm"}
    assert where["second"] == "cpu#1"
    torch._dynamo.reset()
    compiled, _ = run(net, torch.randn(4, 32), {"pins": {"*addmm*": "cpu#1"}, "planner": "single"})
    graph = tessera_compile.report(compiled).graphs[0]
    assert {graph.plan.placement[k.name] for k in graph.kernels.kernels if k.kind == "gemm"} == {"cpu#1"}
    assert "cpu#0" in graph.plan.placement.values()


def test_pin_that_matches_nothing_warns(net):
    with pytest.warns(TesseraWarning, match="pin 'thrid' matches no kernel.*: first, second"):
        run(net, torch.randn(4, 32), {"pins": {"thrid": "cpu#1"}})


def test_a_pin_may_be_about_one_of_several_graphs(net):
    def function(x):
        y = net(x)
        torch._dynamo.graph_break()
        return torch.cos(y)

    with warnings.catch_warnings():
        warnings.simplefilter("error", TesseraWarning)
        compiled, _ = run(function, torch.randn(4, 32), {"pins": {"*addmm*": "cpu#1"}, "strict": True})
    assert len(tessera_compile.report(compiled).graphs) == 2


def test_saved_plan_is_followed_and_one_of_another_graph_refused(net, tmp_path):
    x = torch.randn(4, 32)
    compiled, _ = run(net, x, {"planner": "random:3"})
    plan = tessera_compile.report(compiled).graphs[0].plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    torch._dynamo.reset()
    compiled, _ = run(net, x, {"planner": str(tmp_path / "plan.json")})
    again = tessera_compile.report(compiled).graphs[0].plan
    assert again.placement == plan.placement
    torch._dynamo.reset()
    expect_error(PlanError, torch.nn.ReLU(), x, {"planner": str(tmp_path / "plan.json")}, "has no plan for this graph")


def test_saved_report_is_a_plan_for_each_of_its_graphs(net, tmp_path):
    def function(x):
        y = net(x)
        torch._dynamo.graph_break()
        return torch.softmax(y @ y.t(), -1)

    x, path = torch.randn(4, 32), tmp_path / "report.json"
    compiled, _ = run(function, x, {"planner": "random:5"})
    report = tessera_compile.report(compiled)
    report.to_json(path)
    torch.compiler.reset()
    compiled, _ = run(function, x, {"planner": path, "pins": {"*softmax*": "cpu#1"}})
    again = tessera_compile.report(compiled)
    assert len(again.graphs) == 2
    for old, new in zip(report.graphs, again.graphs, strict=True):
        assert {k: d for k, d in new.plan.placement.items() if "amax" not in k} == {
            k: d for k, d in old.plan.placement.items() if "amax" not in k
        }


def test_an_edited_plan_file_is_another_plan(net, tmp_path):
    x, path = torch.randn(4, 32), tmp_path / "plan.json"
    for planner in ("alternate", "single"):
        torch.compiler.reset()
        compiled, _ = run(net, x, {"planner": planner})
        tessera_compile.report(compiled).graphs[0].plan.save(path)
        expected = tessera_compile.report(compiled).graphs[0].plan.placement
        compiled, _ = run(net, x, {"planner": str(path)})
        assert tessera_compile.report(compiled).graphs[0].plan.placement == expected


def test_plan_files_that_cannot_be_used(net, tmp_path):
    with pytest.raises(OptionsError, match=r"nope\.json"):
        tessera_compile.backend(planner=str(tmp_path / "nope.json"))
    (tmp_path / "bad.json").write_text("{}")
    expect_error(PlanError, net, torch.randn(4, 32), {"planner": str(tmp_path / "bad.json")}, "neither a saved plan nor")


def test_memory_that_cannot_fit_names_the_biggest_items(net):
    options = {"cluster": "a100-80gb,l40s", "max_memory": {"a100-80gb": "4KiB", "l40s": 4096}}
    expect_error(InfeasibleError, net, torch.randn(4, 32), options, "8.0 KiB")
    assert net.calls.item() == 0
    assert all(torch.isfinite(p).all() for p in net.parameters())


def test_memory_splits_what_fits_no_single_device(net):
    x = torch.randn(4, 32)
    options = {"cluster": "a100-80gb,l40s", "max_memory": {"a100-80gb": "12KiB", "l40s": "12KiB"}}
    compiled, actual = run(net, x, options)
    with torch.no_grad():
        torch.testing.assert_close(actual, net(x))
    plan = tessera_compile.report(compiled).graphs[0].plan
    assert not plan.baselines
    assert all(load.memory_bytes <= 12 * 1024 for load in plan.loads.values())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"plannner": "milp"}, "did you mean 'planner'"),
        ({"planner": "magic"}, "planner='magic'"),
        ({"cluster": 3}, "cluster=3"),
        ({"policy": "fast"}, "'latency'"),
        ({"pins": {"first": "cuda:9"}}, "not in the cluster (cpu#0, cpu#1)"),
        ({"max_memory": {"cpu#0": "lots"}}, "'20GiB'"),
        ({"max_memory": {"gpu": 1}}, "no device 'gpu'"),
        ({"time_limit": -1}, "seconds"),
        ({"inflight": 0}, "whole number from 1"),
        ({"strict": 1}, "True or False"),
        ({"planner": "replicas"}, "one plain call runs one plan"),
        ({"planner": "prefill-decode"}, "plan_together"),
        ({"refine": "sometimes"}, "it takes 'auto', 'off', 'always'"),
        ({"transport": "nccl"}, "no CUDA device"),
        ({"transport": "fast"}, "it takes 'auto', 'peer'"),
        ({"cluster": "a100-80gb,l40s", "emulate_on": "cuda:0/64sm,cuda:0/56sm"}, "takes a pace"),
        ({"cluster": "a100-80gb,l40s", "pace": 1.0, "emulate_on": "cuda:0/64sm"}, "each of which needs one"),
        ({"cluster": "a100-80gb,l40s", "pace": 1.0, "emulate_on": "cuda:0,cuda:1"}, "slices of one GPU"),
        ({"cuda_graphs": True}, "has no CUDA device"),
        ({"pace": -1}, "a factor"),
        ({"pace": 10}, "cpu#0, cpu#1 runs in its own time"),
        ({"pace": 10, "dryrun": True, "cluster": "l4,l40s"}, "drop one"),
    ],
)
def test_bad_options_name_the_option(net, options, match):
    expect_error(OptionsError, net, torch.randn(4, 32), options, match)
    with pytest.raises(OptionsError):
        tessera_compile.backend(**options)


def test_options_are_one_hashable_value_however_they_are_made():
    made = tessera_compile.Options.make({"pins": {"b": "cpu#1", "a": "cpu#0"}, "max_memory": {1: "2gb", "cpu#0": 5}})
    direct = tessera_compile.Options(pins={"a": "cpu#0", "b": "cpu#1"}, max_memory={"cpu#0": 5, "cpu#1": 2 * 10**9})
    assert made == direct
    assert hash(made) == hash(direct)
    assert made.resolved_cluster()["cpu#1"].memory == 2 * 10**9
    with pytest.raises(OptionsError, match="gap"):
        tessera_compile.Options(gap=2)
    assert tessera_compile.Options.make({"refine": "off", "transport": "auto"}, "reduce-overhead").refine == "off"


def test_unknown_device_names_the_nearest(net):
    with pytest.raises(tessera_compile.passes.errors.ClusterError, match="did you mean a100-80gb"):
        tessera_compile.backend(cluster="a100-80g,l40s")


def test_mode(net):
    x = torch.randn(4, 32)
    with torch.no_grad():
        torch.compile(net, backend="tessera", mode="default")(x)
        torch._dynamo.reset()
        with pytest.raises(BackendCompilerFailed, match="max-autotune"):
            torch.compile(net, backend="tessera", mode="max-autotune")(x)


def test_gradients_fall_back_to_inductor_with_one_warning(net, monkeypatch):
    monkeypatch.setattr("tessera_compile.compiler._warned", set())
    x = torch.randn(4, 32)
    compiled = torch.compile(net, backend="tessera", options=QUICK)
    with pytest.warns(TesseraWarning, match=r"no_grad\(\)"):
        out = compiled(x)
    out.sum().backward()
    assert net.first.weight.grad is not None
    report = tessera_compile.report(compiled)
    assert not report.graphs
    assert "gradients are needed" in str(report)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", TesseraWarning)
        torch.compile(net, backend="tessera", options=QUICK)(x)  # Warned once in this process.
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="gradients are needed"):
        torch.compile(net, backend="tessera", options={**QUICK, "strict": True})(x)


def test_an_output_that_needs_no_gradient_takes_the_inference_path(net):
    compiled = torch.compile(lambda x: net(x).argmax(-1), backend="tessera", options=QUICK)
    x = torch.randn(4, 32)
    assert torch.equal(compiled(x), net(x).argmax(-1))
    assert executors(compiled)[0].runs == 1


def test_steps_are_logged_at_info(net, caplog):
    with caplog.at_level("INFO", logger="tessera_compile"):
        run(net, torch.randn(4, 32))
    for step in ("lower", "depend", "profile", "partition", "schedule", "verify", "compile"):
        assert any(f": {step} took" in r.message for r in caplog.records)


@pytest.mark.parametrize(
    ("function", "suffices"),
    [
        (lambda x, y: torch.relu(x) & 1 == 0 if x.dtype == torch.int64 else torch.relu(x) + y, True),
        (lambda x, y: (x > 0) & (y > 0), True),
        (lambda x, y: x.add_(1) + y, True),
        (lambda x, y: torch.relu(x).add_(1).mul_(2) + y, True),  # Nothing of the caller's is written.
        (lambda x, y: x.relu().add_(1).mul_(2) + y, False),  # It might be a view of x: the careful answer.
        (lambda x, y: x.add_(1) + y.mul_(2), False),
        (lambda x, y: torch.relu(x) + torch.randperm(3), False),
        (lambda x, y: torch.ops.aten.relu(x) + y, False),
    ],
)
def test_when_inductor_is_left_alone_with_one_lane(function, suffices):
    from tessera_compile.compiler import _inductor_suffices

    seen = []

    def backend(gm, example_inputs):
        seen.append(_inductor_suffices(gm, example_inputs))
        return gm.forward

    torch.compile(function, backend=backend)(torch.ones(3), torch.ones(3))
    assert seen == [suffices]


class _Guard:
    """Stands for guards of a plan: says once that something has changed."""

    names = ()

    def __init__(self):
        self.asked = 0

    def changed(self, args):
        self.asked += 1
        return "w"


def test_a_plan_whose_guard_has_changed_never_runs_again(monkeypatch):
    from tessera_compile.pipeline import CompiledGraph

    made = []
    build = CompiledGraph.build

    def watched(self, real):
        made.append(self)
        if len(made) == 2:
            raise MemoryError("no room")
        build(self, real)

    monkeypatch.setattr(CompiledGraph, "build", watched)
    torch._dynamo.reset()
    call = torch.compile(lambda x: torch.relu(x @ x) @ x, backend="tessera", options={"cluster": "2xcpu", "codegen": "eager"})
    x = torch.randn(8, 8)
    with torch.no_grad():
        expected = call(x)
        (graph,) = set(made)
        old, graph._guards = graph.executor, _Guard()
        with pytest.raises(MemoryError):
            call(x)
        assert graph.executor is None
        assert torch.equal(call(x), expected)
    assert graph.executor is not old
    assert len(made) == 3
    assert graph._guarded is False
