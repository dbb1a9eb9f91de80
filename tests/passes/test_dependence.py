"""Dependence graphs written out by hand."""

import networkx as nx
import torch

from tessera_compile.passes import depend
from tests.graphs import lowered, synthetic

T, U = torch.ones(4, 4), torch.zeros(4, 4)


def edges(ddg):
    return {(a, b): (data["kind"], data["value"], data["bytes"]) for a, b, data in ddg.edges(data=True)}


def test_raw_edges_carry_the_bytes_of_the_value():
    ddg = depend(lowered(lambda x, w: torch.relu(x @ w) @ w, [T, U]))
    assert edges(ddg) == {("k0_mm", "k1_relu"): ("raw", "mm", 64), ("k1_relu", "k2_mm"): ("raw", "relu", 64)}
    assert ddg.edges["k0_mm", "k1_relu"]["evidence"] == "schema"
    assert ddg.nodes["k0_mm"]["kernel"].kind == "gemm"


def test_two_values_on_one_edge_add_up():
    ddg = depend(lowered(lambda x: (lambda v, i: (v @ v) + i)(*torch.topk(x, 4)), [T]))
    topk = next(n for n in ddg if "topk" in n)
    last = next(n for n in ddg if "add" in n)
    assert ddg.edges[topk, last]["bytes"] == 4 * 4 * 8
    both = synthetic([(0, 1), (0, 2)], 3)
    assert both.edges["k0", "k1"]["bytes"] == 1000


def test_a_diamond():
    ddg = synthetic([(0, 1), (0, 2), (1, 3), (2, 3)], 4)
    assert edges(ddg) == {
        ("k0", "k1"): ("raw", "v0", 1000),
        ("k0", "k2"): ("raw", "v0", 1000),
        ("k1", "k3"): ("raw", "v1", 1000),
        ("k2", "k3"): ("raw", "v2", 1000),
    }


def test_readers_of_state_come_before_its_writer_and_nothing_crosses():
    ddg = synthetic([(0, 2), (1, 2)], 3, writes_state={2: [0, 1]})
    kinds = {(a, b): [d.kind for d in deps] for a, b, deps in ddg.edges(data="deps")}
    assert kinds == {("k0", "k2"): ["raw", "war"], ("k1", "k2"): ["raw", "war"]}
    assert ddg.edges["k0", "k2"]["bytes"] == 1000


def test_effects_keep_their_order():
    ddg = synthetic([], 4, effects=[0, 2, 3], reads_input=[0, 1, 2, 3])
    assert {e: d[0] for e, d in edges(ddg).items()} == {("k0", "k2"): "effect", ("k2", "k3"): "effect"}


def test_always_acyclic():
    def function(cache, x):
        new = x + 1
        read = (cache @ new) @ x
        cache.copy_(new)
        return read

    ddg = depend(lowered(function, [T.clone(), U]))
    assert nx.is_directed_acyclic_graph(ddg)
