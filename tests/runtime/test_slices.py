"""Parts of tensors: the bytes of the boxes cross, of any dtype, and lanes compute the same on them as on whole values."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tessera_compile.catalogue import make_cluster
from tessera_compile.passes import depend, lower, partition, refine, schedule, verify
from tessera_compile.passes.errors import ProgramError
from tessera_compile.passes.extents import extents
from tessera_compile.passes.ir import Program, Send
from tessera_compile.passes.placements import place
from tessera_compile.ptx_tools.footprints import Box
from tessera_compile.runtime.codegen import Codegen
from tessera_compile.runtime.cpu_lanes import CpuLaneExecutor
from tessera_compile.runtime.roofline import model_profile
from tessera_compile.runtime.slices import own_part, part_views
from tests.graphs import lowered


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.float8_e5m2, torch.bfloat16, torch.int64])
def test_the_bytes_of_the_boxes_are_copied_and_no_others(dtype):
    raw = torch.randint(0, 2, (6 * 16,), dtype=torch.uint8).view(torch.bool) if dtype == torch.bool else None
    size = torch.empty(0, dtype=dtype).element_size()
    whole = raw if raw is not None else torch.randint(0, 255, (6 * 16 * size,), dtype=torch.uint8).view(dtype)
    tensor = whole.view(6, 16)[1:, 2:]  # starts in the middle of its storage
    boxes = (Box(2 * size, (4, 3 * size), (16 * size, 1)), Box(9 * size, (5, size), (16 * size, 1)))
    got = own_part(tensor, boxes)
    assert (got.shape, got.stride(), got.dtype) == (tensor.shape, tensor.stride(), dtype)
    for view, source in zip(part_views(got, boxes), part_views(tensor, boxes), strict=True):
        assert torch.equal(view, source)
    read = torch.zeros(5, 14, dtype=torch.bool)
    read[:4, 2:5] = True
    read[:, 9] = True
    expected = [tensor.contiguous().view(torch.uint8)[read.repeat_interleave(size, 1)]]
    assert torch.equal(got.contiguous().view(torch.uint8)[read.repeat_interleave(size, 1)], expected[0])


def test_views_of_parts_are_of_the_storage_itself():
    """Else ``record_stream`` does nothing for them: on a GPU the memory would be handed out while a link still reads it."""
    tensor = torch.arange(35, dtype=torch.uint8)[1:]
    (view,) = part_views(tensor, [Box(2, (3, 5), (10, 1))])
    assert view.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    assert view.tolist() == [[3, 4, 5, 6, 7], [13, 14, 15, 16, 17], [23, 24, 25, 26, 27]]


@pytest.mark.parametrize("change", [torch.Tensor.conj, lambda t: t.conj().imag])
def test_numbers_that_are_conjugated_or_negated_as_they_are_read(change):
    tensor = change(torch.randn(4, 6, dtype=torch.complex64))
    size, step = tensor.element_size(), tensor.stride(0) * tensor.element_size()
    got = own_part(tensor, [Box(0, (4, size), (step, 1))])
    assert torch.equal(got[:, 0], tensor[:, 0])


def model(x, w, a, b, c):
    q, k, v = (x @ w).chunk(3, -1)
    gate, up = (v @ a).chunk(2, -1)
    return q @ k.t() @ (gate.sigmoid() * up), (q.cos() + k) @ b, torch.cat([u @ c for u in x.softmax(0).split(2)])


def arguments():
    torch.manual_seed(0)
    return [torch.randn(8, 8), torch.randn(8, 24), torch.randn(8, 16), torch.randn(8, 8), torch.randn(8, 4)]


def planned(planner: str, lanes: int, objective: str):
    graph = lowered(model, arguments())
    ddg = refine(depend(graph), {}, extents(graph))
    cluster = make_cluster(f"{lanes}xcpu")
    times = model_profile(graph, cluster.devices)
    placement = place(planner, ddg, times, cluster)
    plan = partition(ddg, times, cluster, placement=placement, planner=planner, objective=objective)
    program = schedule(ddg, plan)
    verify(program, ddg, plan)
    return graph, ddg, plan, program


def test_fifty_placements_compute_what_eager_does_and_send_less():
    fewer = 0
    codegen = Codegen("eager")
    graph, _, _, program = planned("single", 2, "throughput")
    expected = CpuLaneExecutor(graph, program, codegen, threads=1)(arguments())
    torch.testing.assert_close(tuple(expected), model(*arguments()))
    for seed in range(50):
        graph, _, plan, program = planned(f"random:{seed}", 2 + seed % 3, ("throughput", "latency")[seed % 2])
        sent = sum(i.bytes(graph) for _, _, i in program if isinstance(i, Send))
        whole = sum(graph.values[i.value].bytes for _, _, i in program if isinstance(i, Send))
        fewer += sent < whole
        assert sent <= plan.cut_bytes  # the planner never counts less than what is sent
        got = CpuLaneExecutor(graph, program, codegen, threads=1, poison=True)(arguments())
        for g, e in zip(got, expected, strict=True):
            assert torch.equal(g, e)
        assert Program.from_text(program.to_text()) == program
    assert fewer > 20


def test_a_part_that_is_too_small_is_refused():
    refused = 0
    for seed in range(10):
        _, ddg, plan, program = planned(f"random:{seed}", 2, "throughput")
        for _, _, x in program:
            if isinstance(x, Send) and x.boxes:
                box = x.boxes[0]
                smaller = Box(box.start, (*box.shape[:-1], box.shape[-1] - 4), box.strides)
                text = program.to_text()
                for sent in (x, type(x)(x.value, x.to, (smaller, *x.boxes[1:]))):
                    part = sent.to_text().split()[1]
                    changed = Program.from_text(text.replace(x.to_text().split()[1], part))
                    if sent is x:
                        verify(changed, ddg, plan)
                        continue
                    with pytest.raises(ProgramError, match=r"reads more of .* than came"):
                        verify(changed, ddg, plan)
                    refused += 1
    assert refused > 5


def step(x, w, cache):
    k = x @ w
    cache[:, 3] = k
    cache[:1, 5:] = k.sum()
    return (cache[:, :4] @ w).sum(0) + x[0]


@pytest.mark.parametrize("seed", range(12))
def test_state_that_changes_in_part_returns_in_part(seed):
    torch.manual_seed(1)
    x, w, cache = torch.randn(2, 4), torch.randn(4, 4), torch.randn(2, 8, 4)
    graph = lower(make_fx(torch.func.functionalize(step))(x, w, cache), [x, w, cache])
    ddg = refine(depend(graph), {}, extents(graph))
    cluster = make_cluster("3xcpu")
    times = model_profile(graph, cluster.devices)
    placement = place(f"random:{seed}", ddg, times, cluster)
    plan = partition(ddg, times, cluster, placement=placement, planner="test")
    program = schedule(ddg, plan)
    verify(program, ddg, plan)
    (version,) = graph.mutated.values()
    home = [x for _, _, x in program if isinstance(x, Send) and x.value == version]
    assert all(x.bytes(graph) == 2 * 16 + 3 * 16 for x in home)
    mine, expected = cache.clone(), cache.clone()
    run = CpuLaneExecutor(graph, program, Codegen("eager"), threads=1, poison=True)
    for _ in range(3):
        got, want = run([x, w, mine]), step(x, w, expected)
        torch.testing.assert_close(got[0], want)
        torch.testing.assert_close(mine, expected)
    if home:
        (sent,) = home
        text = program.to_text()
        part = sent.to_text().split()[1]
        with pytest.raises(ProgramError, match="does not make it of what"):
            verify(Program.from_text(text.replace(part, part.partition(",")[0] + "]")), ddg, plan)


def test_some_placement_writes_the_state_elsewhere():
    """Or the test above would say little."""
    graph = lower(
        make_fx(torch.func.functionalize(step))(*(a := [torch.randn(2, 4), torch.randn(4, 4), torch.randn(2, 8, 4)])), a
    )
    ddg, cluster = depend(graph), make_cluster("3xcpu")
    times = model_profile(graph, cluster.devices)
    (version,) = graph.mutated.values()
    writer = graph.producer(version)
    homes = {place(f"random:{seed}", ddg, times, cluster)[writer] for seed in range(12)}
    assert len(homes) > 1


def takes_and_reads_nothing(x, w):
    y = x @ w
    return (y[:, :0] @ w[:0]) + x, y.relu() @ w


@pytest.mark.parametrize("seed", range(24))
def test_a_value_of_which_nothing_is_read_is_there_nonetheless(seed):
    args = [torch.randn(4, 4), torch.randn(4, 4)]
    graph = lower(make_fx(takes_and_reads_nothing)(*args), args)
    ddg = refine(depend(graph), {}, extents(graph))
    assert ddg.graph["refinement"].removed
    cluster = make_cluster("3xcpu")
    times = model_profile(graph, cluster.devices)
    plan = partition(ddg, times, cluster, placement=place(f"random:{seed}", ddg, times, cluster), planner="test")
    program = schedule(ddg, plan)
    verify(program, ddg, plan)
    got = CpuLaneExecutor(graph, program, Codegen("eager"), threads=1, poison=True)(list(args))
    torch.testing.assert_close(tuple(got), takes_and_reads_nothing(*args))
