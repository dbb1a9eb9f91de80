"""Custom operators that write what they do not declare: seen on copies, told once, and right on two lanes from then on."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tessera_compile
from tessera_compile.compiler import report
from tessera_compile.passes import lower
from tessera_compile.passes.errors import FallbackError, LoweringError, TesseraWarning
from tessera_compile.passes.hidden_writes import declare
from tessera_compile.runtime import probing
from tessera_compile.runtime.probing import custom_operators, undeclared_writes


@torch.library.custom_op("tessera_test::scaled", mutates_args=())
def scaled(x: torch.Tensor, y: torch.Tensor, by: float) -> torch.Tensor:
    y.mul_(by)
    return x + 1


@scaled.register_fake
def _(x, y, by):
    return torch.empty_like(x)


@torch.library.custom_op("tessera_test::both", mutates_args=())
def both(x: torch.Tensor, y: torch.Tensor, *, by: float) -> tuple[torch.Tensor, torch.Tensor]:
    x.add_(1)
    y.sub_(by)
    return x + y, x - y


@both.register_fake
def _(x, y, *, by):
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("tessera_test::honest", mutates_args=())
def honest(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


@honest.register_fake
def _(x, y):
    return torch.empty_like(x)


lie = torch.ops.tessera_test


def through_a_view(x, w):
    y = x @ w
    top = y[:2]
    before = y.relu()
    a = lie.scaled(x, top, 3.0)
    return a @ w, top.sum(0), y @ w, before @ w, y.t()


def twice(x, w):
    y = x @ w
    a = lie.scaled(x, y, 3.0)
    b = lie.scaled(a, y, 0.5) + y
    return lie.scaled(y, b, 2.0) @ w, y, b


def two_results(x, w):
    y = x @ w
    z = y.cos()
    p, q = lie.both(y, z, by=2.0)
    return p @ q + y, z


def honest_and_not(x, w):
    y = lie.honest(x @ w, w)
    z = lie.honest(y, y)
    lie_ = lie.scaled(z, y, 2.0)
    return lie_ + y


def of_an_input(x, w):
    return lie.scaled(x, w, 3.0) @ w


CASES = [through_a_view, twice, two_results, honest_and_not, of_an_input]


def arguments() -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.randn(4, 4), torch.randn(4, 4)]


@pytest.fixture(autouse=True)
def told_again(monkeypatch):
    monkeypatch.setattr(probing, "_warned", set())


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_a_declared_graph_does_what_eager_does(function):
    given, mine = arguments(), arguments()
    gm = make_fx(function, tracing_mode="fake")(*arguments())
    with pytest.warns(TesseraWarning, match="which its schema does not declare"):
        found = undeclared_writes(
            lower(gm), dict(zip([n.name for n in gm.graph.nodes if n.op == "placeholder"], mine, strict=True))
        )
    assert all(torch.equal(a, b) for a, b in zip(mine, arguments(), strict=True))  # probing leaves the user's tensors alone
    graph = lower(gm)
    assert not found.others
    said = declare(graph.module, found.sayable)
    again = lower(said)
    assert again.nodes >= graph.nodes
    expected, got = function(*given), said(*mine)
    got = got if isinstance(got, (list, tuple)) else [got]
    for e, g in zip(expected if isinstance(expected, tuple) else [expected], got, strict=True):
        assert torch.equal(e, g)
    assert all(torch.equal(a, b) for a, b in zip(mine, given, strict=True))
    assert not undeclared_writes(again, dict(zip(again.inputs, arguments(), strict=True))).sayable


def test_what_is_found_and_what_is_not():
    gm = make_fx(honest_and_not, tracing_mode="fake")(*arguments())
    graph = lower(gm)
    assert len(custom_operators(graph)) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = undeclared_writes(graph, dict(zip(graph.inputs, arguments(), strict=True)))
    assert found.sayable == {custom_operators(graph)[-1]: ("y",)}
    assert found.others == {}


def test_names_that_are_not_there():
    gm = make_fx(of_an_input, tracing_mode="fake")(*arguments())
    node = custom_operators(lower(gm))[0]
    with pytest.raises(LoweringError, match="no call of an operator"):
        declare(gm, {"nothing": ("y",)})
    with pytest.raises(LoweringError, match="no tensor argument 'by'"):
        declare(gm, {node: ("by",)})


class Lying(torch.nn.Module):
    def forward(self, x, w):
        y = x @ w
        a = lie.scaled(x, y, 3.0)
        return a @ w, (y @ w).relu()


def compiled(refine: str, codegen: str = "eager"):
    pins = {"k0*": "cpu#0", "k1*": "cpu#1", "k2*": "cpu#0", "k3*": "cpu#0"}
    options = {
        "cluster": "2xcpu", "planner": "alternate", "pins": pins, "codegen": codegen, "refine": refine, "profile": "model",
    }  # fmt: skip
    torch._dynamo.reset()
    return torch.compile(Lying(), backend="tessera", options=options)


def test_the_schema_alone_gives_a_wrong_result_on_two_lanes():
    """What the next test is measured against: without looking, the other lane's copy is what changes."""
    expected = Lying()(*arguments())
    got = compiled("off")(*arguments())
    assert torch.equal(got[0], expected[0])
    assert not torch.allclose(got[1], expected[1])


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_what_was_seen_makes_it_right(codegen):
    expected = Lying()(*arguments())
    call = compiled("auto", codegen)
    with pytest.warns(TesseraWarning, match=r"tessera_test.scaled.default writes its argument 'y'") as seen:
        results = [call(*arguments()) for _ in range(3)]
    assert sum("does not declare" in str(w.message) for w in seen) == 1
    for got in results:
        torch.testing.assert_close(tuple(got), expected)
    (graph,) = report(call).graphs
    writer = next(k.name for k in graph.kernels.kernels if "scaled" in k.name)
    assert graph.ddg.has_edge(writer, next(k.name for k in graph.kernels.kernels if k.name.startswith("k3")))
    assert "probe" in graph.seconds
    reader = next(k.name for k in graph.kernels.kernels if k.name.startswith("k3"))
    assert graph.ddg.edges[writer, reader]["evidence"] == "probe"
    assert f"{writer} -> {reader}: raw" in graph.to_text()


class InPlace(torch.nn.Module):
    def forward(self, x, w):
        return lie.scaled(x, w, 3.0) @ w, x @ w.t()


@pytest.mark.parametrize("seed", range(6))
def test_a_write_to_the_callers_tensor_reaches_it(seed):
    (x, w), (x_, w_) = arguments(), arguments()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = torch.compile(
            InPlace(), backend="tessera",
            options={"cluster": "3xcpu", "planner": f"random:{seed}", "codegen": "eager", "profile": "model"},
        )  # fmt: skip
        for _ in range(3):
            got, expected = call(x_, w_), InPlace()(x, w)
            torch.testing.assert_close(tuple(got), expected)
            assert torch.equal(w, w_)
            assert torch.equal(x, x_)


def test_one_lane_and_off_do_not_probe():
    assert tessera_compile.Options.make({"refine": "off"}).refine == "off"
    torch._dynamo.reset()
    call = torch.compile(Lying(), backend="tessera", options={"cluster": "cpu", "codegen": "eager", "profile": "model"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", TesseraWarning)
        torch.testing.assert_close(tuple(call(*arguments())), Lying()(*arguments()))


@torch.library.custom_op("tessera_test::of_a_list", mutates_args=())
def of_a_list(xs: list[torch.Tensor]) -> torch.Tensor:
    xs[1].add_(1)
    return xs[0] + 1


@of_a_list.register_fake
def _(xs):
    return torch.empty_like(xs[0])


@torch.library.custom_op("tessera_test::half_honest", mutates_args=("y",))
def half_honest(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(1)
    y.mul_(2)


class Unsayable(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x, w):
        y, z = x @ w, x + w
        if self.how == "list":
            a = lie.of_a_list([y, z])
        else:
            lie.half_honest(y, z)
            a = y
        return a @ w, z @ w, y


@pytest.mark.parametrize("how", ["list", "half"])
def test_what_cannot_be_said_runs_on_one_device(how):
    options = {"cluster": "3xcpu", "planner": "random:4", "codegen": "eager", "profile": "model"}
    torch._dynamo.reset()
    call = torch.compile(Unsayable(how), backend="tessera", options=options)
    with torch.no_grad(), pytest.warns(TesseraWarning, match="runs on one device"):
        call(*arguments())
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(tuple(call(*arguments())), Unsayable(how)(*arguments()))
    (graph,) = report(call).graphs
    assert set(graph.plan.placement.values()) == {"cpu#0"}
    assert any("runs on one device" in reason for reason in graph.fallbacks)
    torch._dynamo.reset()
    strict = torch.compile(Unsayable(how), backend="tessera", options={**options, "strict": True})
    with torch.no_grad(), pytest.raises(FallbackError, match="runs on one device"):
        strict(*arguments())


@torch.library.custom_op("tessera_test::pair", mutates_args=())
def pair(x: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k.add_(1)
    v.mul_(2)
    return x + 1


@pair.register_fake
def _(x, k, v):
    return torch.empty_like(x)


raw = torch.library.Library("tessera_test_raw", "DEF")
raw.define("inplace(Tensor x) -> Tensor")
raw.impl("inplace", lambda x: x.mul_(2), "CompositeExplicitAutograd")
torch.library.register_fake("tessera_test_raw::inplace", torch.empty_like, lib=raw)


def halves(x, w):
    y = x @ w
    a = lie.pair(x, y[:2], y[2:])
    return a @ w, y @ w


def same_twice(x, w):
    y = x @ w
    a = lie.scaled(y, y, 3.0)
    return a @ w, y @ w


def halves_of_an_input(x, w):
    a = lie.pair(x, w[:2], w[2:])
    return a @ w, x @ w


def result_in_an_argument(x, w):
    y = x @ w
    a = torch.ops.tessera_test_raw.inplace(y)
    b = torch.ops.tessera_test_raw.inplace(a)
    return b @ w, y @ w, a @ x


def in_a_branch(x, w):
    y = x @ w

    def yes(x, y):
        return lie.scaled(x, y, 3.0) * 1

    def no(x, y):
        return x + y

    a = torch.cond(x.shape[0] > 2 and x.sum() > -1e9, yes, no, (x, y))
    return a @ w, y @ w


def torch_accepts_aliases():
    """Newer torch refuses results in an argument's storage in continuous integration, and warns elsewhere."""
    config = torch._functorch.config
    known = hasattr(config, "error_on_custom_op_aliasing")
    return config.patch(error_on_custom_op_aliasing=False) if known else contextlib.nullcontext()


HARD = [halves, same_twice, halves_of_an_input, result_in_an_argument, in_a_branch]


@pytest.mark.parametrize("function", HARD, ids=lambda f: f.__name__)
@pytest.mark.parametrize("seed", range(3))
def test_what_copies_cannot_show_is_right_too(function, seed):
    torch._dynamo.reset()
    options = {"cluster": "2xcpu", "planner": f"random:{seed}", "codegen": "eager", "profile": "model"}
    call = torch.compile(function, backend="tessera", options=options)
    mine, given = arguments(), arguments()
    with torch.no_grad(), warnings.catch_warnings(), torch_accepts_aliases():
        warnings.simplefilter("ignore")
        for _ in range(2):
            got, want = call(*mine), function(*given)
            torch.testing.assert_close(tuple(got), tuple(want))
            assert all(torch.equal(a, b) for a, b in zip(mine, given, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_of_an_input_that_begins_in_the_middle_of_its_storage(seed):
    def g(x, w):
        a = lie.scaled(x, w[1:], 3.0)
        return a @ w, w.sum(0)

    torch._dynamo.reset()
    options = {"cluster": "2xcpu", "planner": f"random:{seed}", "codegen": "eager", "profile": "model"}
    call = torch.compile(g, backend="tessera", options=options)
    big, other = torch.randn(6, 4), torch.empty(6, 4)
    other.copy_(big)
    x = torch.randn(4, 4)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(tuple(call(x, big[2:])), g(x, other[2:]))
    assert torch.equal(big, other)


@pytest.mark.parametrize("seed", range(2))
def test_dynamic_shapes(seed):
    def f(x, w):
        y = x @ w
        a = lie.scaled(w, y[-2:], 3.0)
        return a, y @ w

    torch._dynamo.reset()
    options = {"cluster": "2xcpu", "planner": f"random:{seed}", "codegen": "eager", "profile": "model"}
    call = torch.compile(f, backend="tessera", options=options)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (5, 6, 9, 4):
            x, w = torch.randn(rows, 4), torch.randn(4, 4)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(tuple(call(x, w)), f(x, w))


def test_zeros_hide_nothing():
    expected = Lying()(*arguments())
    torch._dynamo.reset()
    call = compiled("auto")
    x, w = arguments()
    with pytest.warns(TesseraWarning, match="does not declare"):
        call(torch.zeros_like(x), w)
    torch.testing.assert_close(tuple(call(x, w)), expected)


def test_explain_leaves_tensors_alone_and_shows_what_was_seen():
    mine = arguments()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = tessera_compile.explain(InPlace(), options={"cluster": "2xcpu", "profile": "model"})(*mine)
    assert all(torch.equal(a, b) for a, b in zip(mine, arguments(), strict=True))
    assert "by probe" in found.to_text()


class WithBuffer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(4, 4))
        self.register_buffer("c", torch.randn(4, 4))

    def forward(self, x):
        return lie.scaled(x @ self.w, self.c, 0.5) @ self.c


def test_a_weight_of_a_loaded_model_is_named():
    with torch.device("meta"):
        model = WithBuffer()
    torch._dynamo.reset()
    options = {"cluster": "2xcpu", "codegen": "eager", "profile": "model", "planner": "random:4"}
    loaded = tessera_compile.load(model, WithBuffer().state_dict(), **options)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(FallbackError, match="writes c, a weight of a loaded model"):
            loaded(torch.randn(4, 4))
