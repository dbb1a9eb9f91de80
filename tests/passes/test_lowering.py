"""Graphs whose kernels are written out by hand, and the rules that hold for every graph."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tessera_compile.passes import depend, lower
from tessera_compile.passes.errors import LoweringError
from tessera_compile.passes.extraction import extract
from tessera_compile.passes.operators import is_free
from tests.graphs import lowered

T, U, V = (torch.full((4, 4), float(i)) for i in (1, 2, 3))


def shapes(graph):
    """Kernel → (kind, FX nodes), in order."""
    return [(k.kind, k.nodes) for k in graph.kernels]


def test_a_matrix_product_is_alone_and_its_epilogue_one_kernel():
    graph = lowered(lambda x, w: torch.relu(x @ w) * 2 + 1, [T, U])
    assert shapes(graph) == [("gemm", ("mm",)), ("pointwise", ("relu", "mul", "add"))]
    assert [k.inputs for k in graph.kernels] == [("x_1", "w_1"), ("mm",)]
    assert graph.output_values == ("add",)


def test_a_reduction_joins_its_producer_and_takes_what_follows():
    graph = lowered(lambda x: (x * 2).sum(-1, keepdim=True) + 1, [T])
    assert shapes(graph) == [("reduction", ("mul", "sum_1", "add"))]


def test_an_earlier_producer_is_joined_only_by_its_sole_reader():
    def gate(x, a, b):
        left = torch.relu(x @ a)
        return left * (x @ b)

    graph = lowered(gate, [T, U, V])
    # relu waits for the second product, since only the multiplication reads it.
    assert shapes(graph) == [("gemm", ("mm",)), ("gemm", ("mm_1",)), ("pointwise", ("relu", "mul"))]

    def shared(x, a, b):
        left = torch.relu(x @ a)
        return left * (x @ b), left @ b

    graph = lowered(shared, [T, U, V])
    assert [nodes for _, nodes in shapes(graph)] == [("mm",), ("relu",), ("mm_1",), ("mul",), ("mm_2",)]


def test_joining_never_makes_a_cycle():
    def function(x, w):
        a = x * 2
        return (a @ w) + a  # The addition must not join a's kernel: the product stands between.

    graph = lowered(function, [T, U])
    assert [nodes for _, nodes in shapes(graph)] == [("mul",), ("mm",), ("add",)]


def test_views_and_factories_are_free_and_cloned_into_each_consumer():
    def function(x, w):
        t = x.t()
        bias = torch.full((4,), 2.0)
        return (t @ w) + bias, (w @ t) + bias

    graph = lowered(function, [T, U])
    assert graph.free_nodes >= 2
    for kernel in graph.kernels:
        names = {n.name for n in extract(graph, [kernel.name], kernel.outputs).module.graph.nodes}
        if kernel.kind == "gemm":
            assert "permute" in names
        else:
            assert any("full" in n for n in names)


def test_outputs_that_are_views_share_the_storage_of_their_base():
    graph = lowered(lambda x: (lambda y: (y, y.t(), x.t(), None, y[0]))(x + 1), [T])
    add = graph.output_values[0]
    assert graph.output_storages == (add, add, "x_1", None, add)
    assert graph.outputs[3] is None


def test_tuples_stay_with_their_producer():
    graph = lowered(lambda x: torch.topk(x, 2), [T])
    (kernel,) = graph.kernels
    assert kernel.outputs == ("getitem", "getitem_1")
    assert kernel.kind == "opaque"


def test_copy_joins_the_kernel_that_makes_the_value():
    def function(cache, x):
        new = cache * 0.5 + x
        cache.copy_(new)
        return new.sum()

    graph = lowered(function, [T.clone(), T])
    (kernel,) = graph.kernels
    assert kernel.writes == ("cache_1",)
    assert graph.mutated == {"cache_1": "copy_"}
    assert graph.values["copy_"].storage == "cache_1"
    assert graph.values["cache_1"].origin == "state"


def test_copy_waits_for_other_readers_by_an_edge_or_stands_alone():
    def function(cache, x):
        new = x + 1
        read = cache @ x
        cache.copy_(new)
        return read

    graph = lowered(function, [T.clone(), T])
    ddg = depend(graph)
    reader = next(k.name for k in graph.kernels if k.kind == "gemm")
    writer = next(k.name for k in graph.kernels if k.writes)
    assert ddg.edges[reader, writer]["kind"] == "war"
    assert graph.kernels[-1].name == writer

    def cyclic(cache, x):
        new = x + 1
        read = (cache @ new) @ x  # Reads the old content, and needs what is to be written.
        cache.copy_(new)
        return read

    graph = lowered(cyclic, [T.clone(), T])
    writer = next(k for k in graph.kernels if k.writes)
    assert writer.nodes == ("copy_",)
    assert graph.kernels[-1] == writer or graph.kernels[-2] == writer


def test_equal_layers_have_equal_fingerprints():
    def stack(x, a, b):
        return torch.relu(torch.relu(x @ a) @ b)

    graph = lowered(stack, [T, U, V], static=[1, 2])
    assert [k.fingerprint for k in graph.kernels[:2]] == [k.fingerprint for k in graph.kernels[2:]]
    assert graph.kernels[0].fingerprint != graph.kernels[1].fingerprint
    other = lowered(stack, [torch.ones(2, 4), U, V], static=[1, 2])
    assert other.kernels[0].fingerprint != graph.kernels[0].fingerprint
    assert [graph.values[v].origin for v in graph.inputs] == ["input", "weight", "weight"]


def test_flops_and_bytes():
    graph = lowered(lambda x, w: torch.relu(x @ w), [torch.ones(2, 8), torch.ones(8, 16)])
    gemm, relu = graph.kernels
    assert gemm.flops == 2 * 2 * 8 * 16
    assert (gemm.bytes_read, gemm.bytes_written) == (4 * (2 * 8 + 8 * 16), 4 * 2 * 16)
    assert (relu.flops, relu.bytes_read, relu.bytes_written) == (32, 128, 128)


def test_an_embedding_reads_the_rows_it_needs():
    table = torch.ones(1000, 8)
    graph = lowered(lambda i, t: torch.nn.functional.embedding(i, t), [torch.zeros(3, dtype=torch.long), table])
    assert graph.kernels[0].bytes_read == 3 * 8 + 3 * 8 * 4
    assert graph.kernels[0].data_dependent


def test_random_operators_read_seed_tensors_and_only_the_draw_is_an_effect():
    graph = lowered(lambda x: torch.rand(4, 4) + torch.randn(4, 4) + x, [T])
    effects = [k for k in graph.kernels if k.effect]
    assert len(effects) == 1
    assert "inductor_seeds" in effects[0].name


def test_attention_without_dropout_is_no_effect():
    q = torch.ones(1, 2, 4, 8)
    graph = lowered(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q), [q])
    assert not any(k.effect for k in graph.kernels)


def test_constants_become_values():
    constant = torch.arange(4.0)
    graph = lowered(lambda x: x + constant, [T])
    assert {v.origin for v in graph.values.values()} == {"input", "constant", "activation"}


def test_the_graph_given_is_not_changed():
    gm = make_fx(lambda x: torch.rand(4, 4) + torch.softmax(x, -1))(T)
    before = gm.code
    lower(gm, [T])
    assert gm.code == before


def test_dead_nodes_are_dropped_and_effects_kept():
    def function(x):
        torch.exp(x)
        torch.ops.aten._assert_async.msg(x.sum() > 0, "positive")
        return x + 1

    graph = lowered(function, [T])
    names = {n for k in graph.kernels for n in k.nodes}
    assert not any("exp" in n for n in names)
    assert any("assert" in n for n in names)
    assert not any(k.effect for k in graph.kernels)  # Its order does not matter.


def test_in_place_operators_are_refused_with_the_mend():
    with pytest.raises(LoweringError, match="functionalize"):
        lower(make_fx(lambda x: x.clone().add_(1))(T), [T])


def test_reading_an_input_after_overwriting_it_is_refused():
    def function(x):
        x.copy_(U)
        return x + 1

    with pytest.raises(LoweringError, match="after"):
        lower(make_fx(function)(T.clone()), [T.clone()])


def test_operators_are_decomposed_and_keep_their_names_where_they_are_already():
    graph = lowered(lambda x: torch.nn.functional.gelu(x), [T])
    assert all("gelu" not in n for k in graph.kernels for n in k.nodes)
    assert len(graph.kernels) == 1
    gm = make_fx(lambda x, w: torch.relu(x @ w))(T, U)
    names = [n.name for n in gm.graph.nodes if n.op == "call_function"]
    assert [n for k in lower(gm, [T, U]).kernels for n in k.nodes] == names


def test_what_is_not_aten_is_refused():
    with pytest.raises(LoweringError, match="call_module"):
        lower(fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2))), [torch.ones(1, 2)])
    with pytest.raises(LoweringError, match="not an ATen operator"):
        lower(fx.symbolic_trace(lambda x: torch.relu(x)), [T])


def test_missing_shapes_need_example_inputs():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.relu.default, (x,)),))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    assert len(lower(gm, [T]).kernels) == 1
    with pytest.raises(LoweringError, match="example inputs"):
        lower(gm)


def test_a_graph_without_kernels():
    graph = lowered(lambda x: (x.t(), torch.zeros(2)), [T])
    assert graph.kernels == ()
    assert graph.output_values == ("x_1",)


def test_text_form():
    graph = lowered(lambda x, w: torch.relu(x @ w), [T, U], static=[1])
    assert graph.to_text().splitlines() == [
        "graph 2 kernels, 2 nodes in kernels, 0 free, 2 in all",
        "in x_1 f32[4,4] input",
        "in w_1 f32[4,4] weight",
        "k0_mm: gemm (x_1 w_1) -> (mm)",
        "k1_relu: pointwise (mm) -> (relu)",
        "out relu",
    ]


@st.composite
def functions(draw):
    """Random straight-line programs over a pool of 4×4 tensors."""
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["mm", "add", "relu", "sum", "t", "cat", "softmax"]), st.integers(0, 99), st.integers(0, 99)
            ),
            min_size=1,
            max_size=25,
        )
    )
    keep = draw(st.integers(1, 3))

    def function(x, w):
        pool = [x, w]
        for name, i, j in steps:
            a, b = pool[i % len(pool)], pool[j % len(pool)]
            pool.append(
                {
                    "mm": lambda a=a, b=b: a @ b,
                    "add": lambda a=a, b=b: a + b,
                    "relu": lambda a=a: torch.relu(a),
                    "sum": lambda a=a, b=b: a.sum(-1, keepdim=True) * b,
                    "t": lambda a=a: a.t(),
                    "cat": lambda a=a, b=b: torch.cat([a[:2], b[2:]]),
                    "softmax": lambda a=a: torch.softmax(a, -1),
                }[name]()
            )
        return tuple(pool[-keep:])

    return function


@settings(max_examples=60, deadline=None)
@given(functions())
def test_kernels_partition_the_nodes_in_a_valid_order(function):
    graph = lowered(function, [T, U])
    nodes = [n for n in graph.module.graph.nodes if n.op == "call_function" and not is_free(n)]
    in_kernels = [name for k in graph.kernels for name in k.nodes]
    assert sorted(in_kernels) == sorted(n.name for n in nodes)
    seen = set()
    for kernel in graph.kernels:
        for value in kernel.inputs:
            assert graph.producer(value) is None or value in seen
        seen |= set(kernel.outputs)
    assert all(v in seen or graph.producer(v) is None for v in graph.output_values)
