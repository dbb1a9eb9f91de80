"""Pieces become callables: same numbers, strides as promised, one artefact for equal pieces, and a fallback that says so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from tessera_compile.catalogue import make_cluster
from tessera_compile.compiler import executors, report
from tessera_compile.passes import depend, lower, partition, schedule
from tessera_compile.passes.errors import FallbackError, TesseraWarning
from tessera_compile.passes.ir import KernelGraph
from tessera_compile.runtime.codegen import Codegen
from tessera_compile.runtime.cpu_lanes import CpuLaneExecutor
from tessera_compile.runtime.philox import inductor_randint, inductor_random, inductor_seeds
from tessera_compile.runtime.roofline import model_profile
from tests.graphs import lowered

# Random numbers


def test_philox_draws_what_compiled_code_draws():
    """Also for shapes, dtypes and ranges at which the C++ kernels take other paths."""

    def f():
        return (
            torch.rand(257),
            torch.randn(3, 43),
            torch.randint(-5, 11, (129,)),
            torch.randint(-(2**40), 2**40, (5, 7)),
            torch.rand(5, dtype=torch.float64),
            torch.randn(33, dtype=torch.bfloat16),
            torch.rand(()),
        )

    with torch.no_grad():
        compiled = torch.compile(f, backend="inductor")
        torch.manual_seed(11)
        want = compiled()
        torch.manual_seed(11)
        seeds = inductor_seeds(7, torch.device("cpu"))
    rand, randn = (lambda size, seed, mode=mode: inductor_random(size, seed, mode) for mode in ("rand", "randn"))
    torch.testing.assert_close(rand([257], seeds[0]), want[0], rtol=0, atol=0)
    torch.testing.assert_close(randn([3, 43], seeds[1]), want[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(inductor_randint(-5, 11, [129], seeds[2]), want[2], rtol=0, atol=0)
    torch.testing.assert_close(inductor_randint(-(2**40), 2**40, [5, 7], seeds[3]), want[3], rtol=0, atol=0)
    torch.testing.assert_close(rand([5], seeds[4]).double(), want[4], rtol=0, atol=0)
    torch.testing.assert_close(randn([33], seeds[5]).bfloat16(), want[5], rtol=0, atol=0)
    torch.testing.assert_close(rand([], seeds[6]), want[6], rtol=0, atol=0)


def test_philox_known_answers():
    """The first words of Philox4x32-10 for key 0 and counter 0, as published with the generator."""
    zero = torch.tensor(0)
    word0, word1 = 0x6627E8D5, 0xE169C58D
    assert inductor_randint(0, 2**62, [1], zero).item() == (word0 | word1 << 32) % 2**62
    assert inductor_random([1], zero, "rand").item() == pytest.approx((word0 & 0x7FFFFFFF) / 2**31, abs=1e-7)
    # 32 bits of the seed count, and every counter gives a number of its own.
    many = inductor_random([5000], torch.tensor(7), "rand")
    assert torch.equal(many, inductor_random([5000], torch.tensor(7 + 2**32), "rand"))
    assert many.unique().numel() > 4990
    assert not torch.equal(many, inductor_random([5000], torch.tensor(8), "rand"))


def test_seeds_come_from_the_default_generator():
    torch.manual_seed(5)
    first = inductor_seeds(3, torch.device("cpu"))
    second = inductor_seeds(3, torch.device("cpu"))
    torch.manual_seed(5)
    assert torch.equal(inductor_seeds(3, torch.device("cpu")), first)
    assert not torch.equal(first, second)


# Strides and shapes


def awkward(x, w):
    y = x @ w
    return (
        y.t().relu(),
        (y + 1).sum(0).expand(4, 5),
        y.t()[1:] * 2,
        y.unsqueeze(0).permute(2, 0, 1) + 1,
        torch.cat([y.t(), y.t()]),
        y[:0],
    )


def promised(graph: KernelGraph) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
    output = next(iter(reversed(graph.module.graph.nodes)))
    vals = [n.meta["val"] for n in output.args[0]]
    return [(tuple(v.shape), tuple(v.stride()), v.dtype) for v in vals]


def got(results: Any) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
    return [(tuple(r.shape), tuple(r.stride()), r.dtype) for r in results]


@pytest.mark.parametrize("codegen", ["eager", "inductor", "null"])
def test_outputs_have_the_strides_of_their_metadata(codegen):
    args = [torch.randn(3, 4), torch.randn(4, 5)]
    graph = lowered(awkward, args)
    compiled = Codegen(codegen).compile(graph, [k.name for k in graph.kernels], [o for o in graph.outputs if o])
    given = dict(zip(graph.inputs, args, strict=True))
    results = compiled.call([given[name] for name in compiled.inputs])
    assert compiled.outputs == graph.outputs
    assert got(results) == promised(graph)
    if codegen != "null":
        torch.testing.assert_close(list(results), list(awkward(*args)))


def test_eager_numbers_are_laid_out_as_promised():
    """Random numbers like a transposed tensor: what draws them knows nothing of strides."""
    x = torch.randn(3, 4)
    graph = lowered(lambda x: (torch.rand_like(x.t()) + x.t(),), [x])
    compiled = Codegen("eager").compile(graph, [k.name for k in graph.kernels], graph.outputs)
    results = compiled.call([x])
    assert promised(graph)[0][1] == (1, 4)
    assert got(results) == promised(graph)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_every_kernel_alone_keeps_its_strides(codegen):
    """A convolution for channels-last inputs, whose layout Inductor likes to change."""

    def f(x, w):
        y = torch.nn.functional.conv2d(x, w, padding=1)
        return torch.nn.functional.conv2d(y.relu(), w, padding=1).permute(0, 2, 3, 1)

    args = [torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last), torch.randn(4, 4, 3, 3)]
    graph = lowered(f, args)
    made = Codegen(codegen)
    env = dict(zip(graph.inputs, args, strict=True))
    for kernel in graph.kernels:
        compiled = made.compile(graph, [kernel.name], kernel.outputs)
        for name, result in zip(compiled.outputs, compiled.call([env[n] for n in compiled.inputs]), strict=True):
            value = graph.values[name]
            assert (tuple(result.shape), tuple(result.stride())) == (value.shape, value.strides)
            env[name] = result
    torch.testing.assert_close(env[graph.output_values[0]].permute(0, 2, 3, 1), f(*args), rtol=1e-4, atol=1e-5)


def test_results_share_storage_only_as_the_graph_says():
    """Re-striding must not copy an output away from its base."""
    args = [torch.randn(3, 3)]
    graph = lowered(lambda x: (x @ x, (x @ x).t()), args)
    made = Codegen("eager")
    y = torch.randn(3, 3)
    finish = made.compile(graph, [], graph.outputs)
    results = finish.call([y.t().contiguous().t() if n.startswith("mm_1") else y for n in finish.inputs])
    assert results[0].data_ptr() == y.data_ptr()


def dynamic_graph(function: Any, args: list[torch.Tensor]) -> KernelGraph:
    return lower(make_fx(function, tracing_mode="symbolic")(*args), args)


@pytest.mark.parametrize("codegen", ["eager", "null", "inductor"])
def test_shapes_follow_sizes_that_change(codegen):
    def f(x, w):
        y = torch.relu(x @ w)
        return torch.cat([y, y]), y.t().reshape(-1), y.sum(0), torch.ones(x.shape[0] * 2)

    graph = dynamic_graph(f, [torch.randn(5, 4), torch.randn(4, 6)])
    cluster = make_cluster("2xcpu")
    ddg = depend(graph)
    names = [k.name for k in graph.kernels]
    for home_only in (True, False):
        placement = {k: cluster.names[0 if home_only else i % 2] for i, k in enumerate(names)}
        plan = partition(ddg, model_profile(graph, cluster.devices), cluster, placement=placement)
        run = CpuLaneExecutor(graph, schedule(ddg, plan), Codegen(codegen, threads=1), threads=1)
        for n, m in ((5, 6), (7, 3), (2, 9)):
            args = [torch.randn(n, 4), torch.randn(4, m)]
            want = f(*args)
            results = run(call_args(graph, args))
            assert got(results) == got(want)
            if codegen != "null":
                torch.testing.assert_close(results, list(want))
        assert run.runs == 3


def call_args(graph: KernelGraph, args: list[torch.Tensor]) -> list[Any]:
    """The graph takes tensors, and what it names sizes besides is made from them."""
    assert all(graph.values[name].dtype != "symint" for name in graph.inputs)
    return list(args)


def test_null_computes_nothing():
    compiled = torch.compile(
        lambda x: (x @ x).softmax(0) @ x,
        backend="tessera",
        options={"codegen": "null", "profile": "model", "planner": "alternate"},
    )
    x = torch.randn(600, 600)
    with torch.no_grad():
        result = compiled(x)
    assert result.shape == (600, 600)
    assert result.stride() == (600, 1)
    assert not torch.allclose(result, (x @ x).softmax(0) @ x)
    assert executors(compiled)[0].runs == 1


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_results_in_the_storage_of_overwritten_inputs_hold_what_was_written(codegen):
    """Inductor updates the state in place and returns it for the value that is copied into it; never for another value."""

    def f(cache, at, row):
        cache.index_copy_(0, at, row)
        return cache * 1.5, cache @ row.t()

    args = [torch.zeros(4, 3), torch.tensor([2]), torch.ones(1, 3)]
    graph = lowered(torch.func.functionalize(f, remove="mutations"), args)
    (writer,) = [k for k in graph.kernels if k.writes]
    outputs = [v for v in writer.outputs if graph.values[v].storage == v]
    assert outputs, "the new content should also be read by another kernel"
    compiled = Codegen(codegen).compile(graph, [writer.name], outputs)
    given = dict(zip(graph.inputs, args, strict=True))
    results = compiled.call([given[name] for name in compiled.inputs])
    assert args[0][2].tolist() == [1, 1, 1]
    for result in results:
        shared = result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
        assert not shared or (codegen == "inductor" and torch.equal(result, args[0]))


@pytest.mark.parametrize("planner", ["alternate", "single", "random:1"])
@pytest.mark.parametrize("cluster", ["cpu", "2xcpu"])
def test_values_that_inductor_would_make_in_place_of_what_is_written_later(planner, cluster):
    def later(x, w):
        x[1].add_(1)
        y = (w @ x) + x
        x.mul_(0.5)
        return y

    def kept(x, w):
        x[1].add_(1)
        kept = x.clone()
        x.mul_(0.5)
        return kept, x @ w

    def last(x, w):
        x[1].add_(1)
        return x.clone(), x @ w

    for f in (later, kept, last):
        torch.compiler.reset()
        x, w = torch.rand(3, 3), torch.rand(3, 3)
        ours = x.clone()
        options = {"planner": planner, "cluster": cluster, "profile": "model"}
        with torch.no_grad():
            results = torch.compile(f, backend="tessera", options=options)(ours, w)
            torch.testing.assert_close(results, f(x, w))
        torch.testing.assert_close(ours, x)
        for result in results if isinstance(results, tuple) else (results,):
            assert result.untyped_storage().data_ptr() != ours.untyped_storage().data_ptr()


# Sharing


def stack(layers: int) -> tuple[KernelGraph, list[torch.Tensor]]:
    model = nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(8, 8), nn.ReLU())]).requires_grad_(False)
    weights = [t for m in model if isinstance(m, nn.Linear) for t in (m.weight, m.bias)]
    args = [torch.randn(2, 8), *weights]

    def f(x, *weights):
        for i in range(layers):
            x = torch.relu(torch.nn.functional.linear(x, weights[2 * i], weights[2 * i + 1]))
        return x

    return lowered(f, args, range(1, len(args))), args


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_equal_kernels_share_artefacts(codegen):
    made = {}
    for layers in (1, 4):
        graph, args = stack(layers)
        cluster = make_cluster("2xcpu")
        ddg = depend(graph)
        placement = {k.name: cluster.names[i // 2 % 2] for i, k in enumerate(graph.kernels)}
        plan = partition(ddg, model_profile(graph, cluster.devices), cluster, placement=placement)
        program = schedule(ddg, plan, one_kernel_a_segment=True)
        made[layers] = Codegen(codegen, threads=1)
        run = CpuLaneExecutor(graph, program, made[layers], threads=1)
        want = args[0]
        for i in range(layers):
            want = torch.relu(torch.nn.functional.linear(want, args[1 + 2 * i], args[2 + 2 * i]))
        torch.testing.assert_close(run(list(args)), [want])
        assert run.runs == 1
        assert len(run.segments) == 2 * layers
        assert len({id(s.compiled.call) for s in run.segments.values()}) == 2
    assert len(made[4].artefacts) == len(made[1].artefacts)
    assert made[4].fallbacks == {}


def test_unequal_kernels_do_not_share():
    """Shape, stride, dtype, constants and the operator all tell pieces apart."""
    x = torch.randn(4, 4)
    variants = [
        (lambda x: x.relu(), [x]),
        (lambda x: x.sigmoid(), [x]),
        (lambda x: x.relu(), [torch.randn(4, 5)]),
        (lambda x: x.relu(), [x.t()]),
        (lambda x: x.relu(), [x.double()]),
        (lambda x: x * 2, [x]),
        (lambda x: x * 3, [x]),
        (lambda x: x * 2.0, [x]),
        (lambda x: x.sum(0), [x]),
        (lambda x: x.sum(1), [x]),
    ]
    keys = {lowered(f, args).kernels[0].fingerprint for f, args in variants}
    assert len(keys) == len(variants)
    assert lowered(lambda y: y.relu(), [torch.randn(4, 4)]).kernels[0].fingerprint in keys


def test_a_piece_is_compiled_once():
    graph, _ = stack(1)
    made = Codegen("eager")
    name = graph.kernels[0].name
    first, second = (made.compile(graph, [name], graph[name].outputs) for _ in range(2))
    assert first.call is second.call
    assert len(made.artefacts) == 1


# What Inductor cannot compile


@torch.library.custom_op("tessera_codegen::odd", mutates_args=())
def odd(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@odd.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.fixture
def odd_does_not_compile(monkeypatch):
    from torch._inductor import lowering

    calls = []

    def refuse(*args: Any) -> Any:
        calls.append(args)
        raise NotImplementedError("odd has no lowering here")

    target = torch.ops.tessera_codegen.odd.default
    before = dict(lowering.lowerings)
    lowering.register_lowering(target, type_promotion_kind=None)(refuse)
    yield calls
    lowering.lowerings.clear()
    lowering.lowerings.update(before)


def with_odd(x, w):
    return odd((x @ w).relu()) + 1, odd(x).sum(0) * 2, odd((x @ w) * 2)


def test_what_inductor_cannot_compile_runs_eagerly(odd_does_not_compile):
    x, w = torch.randn(3, 3), torch.randn(3, 3)
    compiled = torch.compile(
        with_odd, backend="tessera", options={"codegen": "inductor", "profile": "model", "planner": "single"}
    )
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        torch.testing.assert_close(compiled(x, w), with_odd(x, w))
        torch.testing.assert_close(compiled(w, x), with_odd(w, x))
    assert odd_does_not_compile, "Inductor was never asked"
    ours = [w for w in caught if issubclass(w.category, TesseraWarning)]
    names = [k.name for k in report(compiled).graphs[0].kernels.kernels if "odd" in k.name]
    assert len(names) == 3
    # The three kernels have one fingerprint: one warning, which names a kernel, its operator and the reason.
    assert len(ours) == 1
    message = str(ours[0].message)
    assert any(f"kernel {name} " in message for name in names)
    assert "odd" in message
    assert "odd has no lowering here" in message
    assert report(compiled).graphs[0].fallbacks == (message,)
    assert report(compiled).fallbacks == ()
    assert executors(compiled)[0].runs == 2


def test_the_other_kernels_of_its_segment_are_compiled(odd_does_not_compile, monkeypatch):
    from tessera_compile.passes import torch_compat

    compiled_kernels = []
    original = torch_compat.inductor_compile_segment

    def spy(gm, *args):
        result = original(gm, *args)
        compiled_kernels.append({str(n.target) for n in gm.graph.nodes if n.op == "call_function"})
        return result

    monkeypatch.setattr(torch_compat, "inductor_compile_segment", spy)
    args = [torch.randn(3, 3), torch.randn(3, 3)]
    graph = lowered(with_odd, args)
    made = Codegen("inductor")
    names = [k.name for k in graph.kernels]
    with pytest.warns(TesseraWarning):
        compiled = made.compile(graph, names, [o for o in graph.outputs if o])
    given = dict(zip(graph.inputs, args, strict=True))
    torch.testing.assert_close(tuple(compiled.call([given[n] for n in compiled.inputs])), with_odd(*args))
    targets = set().union(*compiled_kernels)
    assert {"aten.mm.default", "aten.relu.default"} <= targets
    assert not any("odd" in t for t in targets)
    assert len(compiled_kernels) >= len({k.fingerprint for k in graph.kernels}) - 1
    assert len(made.fallbacks) == 1


def test_strict_refuses_what_inductor_cannot_compile(odd_does_not_compile):
    args = [torch.randn(3, 3), torch.randn(3, 3)]
    graph = lowered(with_odd, args)
    with pytest.raises(FallbackError, match="odd has no lowering here") as caught:
        Codegen("inductor", strict=True).compile(graph, [k.name for k in graph.kernels], [o for o in graph.outputs if o])
    assert caught.value.__cause__ is not None
    compiled = torch.compile(with_odd, backend="tessera", options={"codegen": "inductor", "profile": "model", "strict": True})
    # A graph with a custom operator is built at its first call, when the operator has been seen to run.
    with pytest.raises(FallbackError, match="odd has no lowering here"), torch.no_grad():
        compiled(*args)
