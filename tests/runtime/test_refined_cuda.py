"""On a GPU: what kernels of users touch is found by running them once, and just that crosses."""

from __future__ import annotations

import warnings

import pytest
import torch

from tessera_compile.compiler import report
from tessera_compile.passes.errors import TesseraWarning
from tessera_compile.passes.ir import Send

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SLICES = "cuda:0/56sm,cuda:0/64sm"
HOME, OTHER = SLICES.split(",")
N = 4096


@triton.jit
def second_half(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + n + at, mask=inside) * 2, mask=inside)


@triton.jit
def add_into(x, out, start, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + start + at, tl.load(x + at, mask=inside) + 1, mask=inside)


@triton.jit
def rows_by_index(x, index, out, WIDE: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, WIDE)
    tl.store(out + row * WIDE + at, tl.load(x + tl.load(index + row) * WIDE + at))


@triton.jit
def triple(y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(y + at, tl.load(y + at, mask=inside) * 3, mask=inside)


@torch.library.custom_op("tessera_test::triton_lie", mutates_args=())
def triton_lie(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    triple[(triton.cdiv(y.numel(), 1024),)](y, y.numel(), BLOCK=1024)
    return x + 1


@triton_lie.register_fake
def _(x, y):
    return torch.empty_like(x)


class Half(torch.nn.Module):
    """The kernel is given all of the product and reads the second half of it."""

    def forward(self, x, w):
        y = (x @ w).view(-1)
        out = torch.empty(y.numel() // 2, device=y.device)
        second_half[(triton.cdiv(out.numel(), 1024),)](y, out, out.numel(), BLOCK=1024)
        return out.view(-1, 64) @ w[:64]


class Workspace(torch.nn.Module):
    """Two kernels write halves of one buffer, a third reads the second half."""

    def forward(self, x, w):
        a, b = x @ w, (x + 1) @ w
        n = a.numel()
        work = torch.empty(2 * n, device=x.device)
        grid = (triton.cdiv(n, 1024),)
        add_into[grid](a, work, 0, n, BLOCK=1024)
        add_into[grid](b, work, n, n, BLOCK=1024)
        out = torch.empty(n, device=x.device)
        second_half[grid](work, out, n, BLOCK=1024)
        return out.view_as(a) @ w, work[:n].view_as(a) @ w


class Lying(torch.nn.Module):
    def forward(self, x, w):
        y = x @ w
        a = torch.ops.tessera_test.triton_lie(x, y)
        return a @ w, (y @ w).relu()


class Guarded(torch.nn.Module):
    """Which rows are read is written in a buffer of the model."""

    def __init__(self):
        super().__init__()
        self.register_buffer("index", torch.arange(0, 16, dtype=torch.int64))

    def forward(self, x, w):
        y = x @ w
        out = torch.empty(16, y.shape[1], device=y.device)
        rows_by_index[(16,)](y, self.index, out, WIDE=64)
        return out @ w


def arguments():
    torch.manual_seed(0)
    return torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda") / 8


def compiled(model, planner, **more):
    torch._dynamo.reset()
    options = {"cluster": SLICES, "planner": planner, "profile": "model", **more}
    return torch.compile(model, backend="tessera", options=options)


def check(model, call):
    expected = model(*arguments())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            got = call(*arguments())
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    (graph,) = report(call).graphs
    return graph


def sends(graph, of):
    return [x for _, _, x in graph.program if isinstance(x, Send) and x.value in graph.kernels[of].outputs]


@pytest.mark.parametrize("more", [{}, {"cuda_graphs": True}, {"cuda_graphs": "segments"}], ids=["issued", "graph", "segments"])
def test_a_kernel_is_sent_what_it_reads(more):
    model = Half()
    graph = check(model, compiled(model, "alternate", pins={"k0*": HOME, "k1*": OTHER}, **more))
    assert graph.dry_run is not None
    assert graph.dry_run.unproven == ()
    (sent,) = sends(graph, graph.kernels.kernels[0].name)
    assert sent.bytes(graph.kernels) == 64 * 64 * 4 // 2
    assert (sent.boxes[0].start, sent.boxes[0].shape) == (64 * 64 * 2, (64 * 64 * 2,))
    assert "footprint" in graph.dependences()


def test_off_sends_all():
    model = Half()
    graph = check(model, compiled(model, "alternate", pins={"k0*": HOME, "k1*": OTHER}, refine="off"))
    (sent,) = sends(graph, graph.kernels.kernels[0].name)
    assert sent.boxes == ()


@pytest.mark.parametrize("seed", range(4))
def test_three_kernels_share_a_workspace(seed):
    model = Workspace()
    graph = check(model, compiled(model, f"random:{seed}"))
    assert graph.dry_run is not None
    assert graph.dry_run.asked >= 3


def test_a_kernel_that_lies():
    model = Lying()
    pins = {"k0*": HOME, "k1*": OTHER, "k2*": HOME, "k3*": HOME}
    call = compiled(model, "alternate", pins=pins, refine="off")
    with torch.no_grad():
        got, expected = call(*arguments()), model(*arguments())
    assert not torch.allclose(got[1], expected[1])
    call = compiled(model, "alternate", pins=pins)
    with torch.no_grad(), pytest.warns(TesseraWarning, match="triton_lie"):
        call(*arguments())
    check(model, call)


def test_what_holds_while_a_buffer_stays_as_it_is():
    model = Guarded().cuda()
    call = compiled(model, "alternate", pins={"k0*": HOME, "k1*": OTHER})
    graph = check(model, call)
    assert graph.dry_run is not None
    assert graph.dry_run.guards, graph.to_text()
    (sent,) = sends(graph, graph.kernels.kernels[0].name)
    assert sent.bytes(graph.kernels) == 16 * 64 * 4
    model.index += 40  # other rows
    graph = check(model, call)
    (sent,) = sends(graph, graph.kernels.kernels[0].name)
    assert sent.boxes == ()
    assert graph.dry_run.guards == ()


def test_always_runs_every_kernel():
    model = Half()
    graph = check(model, compiled(model, "random:1", refine="always"))
    assert graph.dry_run.asked == len(graph.kernels.kernels)
