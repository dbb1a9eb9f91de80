"""Real models equal eager under any placement.

Each model is captured and lowered once; the programs of fifty random placements and the alternating one, on two and on three
lanes, are built from its kernel graphs, one kernel a segment so that compiled pieces are shared. Three placements also run as
full segments.
"""

import pytest
import torch

from tessera_compile import make_cluster
from tessera_compile.passes import depend, partition, schedule, verify
from tessera_compile.passes.extraction import extract
from tessera_compile.passes.operators import is_free
from tessera_compile.passes.placements import place
from tessera_compile.runtime.codegen import Codegen
from tessera_compile.runtime.cpu_lanes import CpuLaneExecutor
from tessera_compile.runtime.roofline import model_profile
from tests.capture import Capture, assert_same
from tests.models import MODELS

#: Compiled by Inductor under every placement; the others run their segments uncompiled, which takes a tenth of the time.
COMPILED = {"llama", "mixtral", "bert", "resnet50", "t5", "unet"}


@pytest.fixture(scope="module", params=sorted(MODELS))
def captured(request):
    torch.manual_seed(0)
    torch.compiler.reset()
    example = MODELS[request.param]()
    with torch.no_grad():
        expected = example.model(**example.inputs)
    capture = Capture(example.model, example.inputs)
    assert_same(capture.first, expected)
    return request.param, capture, expected


def _executor(graph, planner, lanes, codegen, **how):
    cluster = make_cluster(f"{lanes}xcpu")
    ddg, profile = depend(graph), model_profile(graph, cluster.devices)
    plan = partition(ddg, profile, cluster, placement=place(planner, ddg, profile, cluster), planner=planner)
    assert len(graph.kernels) < 20 or len(set(plan.placement.values())) == lanes
    program = schedule(ddg, plan, **how)
    verify(program, ddg, plan)
    return CpuLaneExecutor(graph, program, codegen, poison=True)


def test_every_node_is_in_one_kernel_or_free(captured):
    _, capture, _ = captured
    assert sum(len(g.kernels) for g in capture.graphs) >= 20
    for graph in capture.graphs:
        nodes = [n for n in graph.module.graph.nodes if n.op == "call_function"]
        in_kernels = [name for k in graph.kernels for name in k.nodes]
        assert len(in_kernels) == len(set(in_kernels))
        assert set(in_kernels) == {n.name for n in nodes if not is_free(n)}
        assert graph.nodes == len(nodes) == len(in_kernels) + graph.free_nodes


def test_live_free_nodes_are_in_the_piece_of_every_consumer(captured):
    _, capture, _ = captured
    checked = 0
    for graph in capture.graphs:
        pieces = {k.name: {n.name for n in extract(graph, [k.name], k.outputs).module.graph.nodes} for k in graph.kernels}
        kernel_of = {node: k.name for k in graph.kernels for node in k.nodes}
        for node in graph.module.graph.nodes:
            for user in node.users:
                if is_free(node) and user.name in kernel_of:
                    # Clones keep their name where it is not taken by another clone.
                    assert any(name == node.name or name.startswith(node.name + "_") for name in pieces[kernel_of[user.name]])
                    checked += 1
    assert checked


@pytest.mark.parametrize("lanes", [2, 3])
def test_random_placements_equal_eager(captured, lanes):
    name, capture, expected = captured
    codegen = Codegen("inductor" if name in COMPILED else "eager", threads=1, strict=True)
    for planner in ["alternate", *(f"random:{seed}" for seed in range(50))]:
        executors = [_executor(graph, planner, lanes, codegen, one_kernel_a_segment=True) for graph in capture.graphs]
        capture.run[:] = executors
        assert_same(capture(), expected)
        assert_same(capture(), expected)  # Again: replicas are reused, nothing was left behind.
        assert [executor.runs for executor in executors] == [2] * len(capture.graphs)
    distinct = {k.fingerprint for graph in capture.graphs for k in graph.kernels}
    assert len(codegen.artefacts) <= len(distinct) + len(capture.graphs)  # Each graph has a piece that makes its outputs.


@pytest.mark.parametrize(("planner", "lanes"), [("random:0", 2), ("random:1", 3), ("alternate", 2)])
def test_full_segments_equal_eager(captured, planner, lanes):
    _, capture, expected = captured
    executors = [_executor(graph, planner, lanes, Codegen("eager", threads=1)) for graph in capture.graphs]
    capture.run[:] = executors
    assert_same(capture(), expected)
    assert [executor.runs for executor in executors] == [1] * len(capture.graphs)
