"""Footprints that are interpreted from PTX against the kernel's source, worked out with NumPy."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tessera_compile.ptx_tools import Buffer, Intervals, NotDerivable, PtxError, TensorMap, footprint
from tests.ptx_tools.corpus import RECIPES
from tests.ptx_tools.launching import cuda, descriptor, marks, matches, triton, triton_module

BASE = [0x7F00_0000_0000 + (i << 36) for i in range(12)]
GENERATIONS = ["sm_80", "sm_90a", "sm_100a"]


def buffers(*sizes: int) -> list[Buffer]:
    return [Buffer(BASE[i], size) for i, size in enumerate(sizes)]


def targets(name: str) -> list[str]:
    return [f"{name}.sm_{target}" for target in RECIPES[name].targets]


def every(count: int) -> np.ndarray:
    return np.ones(count, bool)


# -- Triton: elements and rows


@pytest.mark.parametrize("case", targets("add"))
@pytest.mark.parametrize(("n", "grid"), [(1000, 1), (1024, 1), (4097, 5), (4096, 3), (1, 2), (0, 1), (5000, 0)])
def test_add(case, n, grid):
    found = triton(case, grid, [*buffers(4 * 5200, 4 * 5200, 4 * 5200), n])
    touched = np.arange(5200) < min(n, grid * 1024)
    matches(found, "k_add", {0: (touched, None, 4), 1: (touched, None, 4), 2: (None, touched, 4)})


@pytest.mark.parametrize("case", targets("add_bf16"))
@pytest.mark.parametrize("n", [16, 2048, 4080])
def test_add_of_bf16(case, n):
    found = triton(case, 2, [*buffers(2 * 4096, 2 * 4096, 2 * 4096), n])
    touched = np.arange(4096) < n
    matches(found, "k_add", {0: (touched, None, 2), 1: (touched, None, 2), 2: (None, touched, 2)})


def test_a_buffer_too_small_shows_what_lies_outside():
    found = triton("add.sm_80", 2, [Buffer(BASE[0], 4000), Buffer(BASE[1], 8000), Buffer(BASE[2], 8000), 1500])
    assert not found.complete
    assert list(found["k_add_param_0"].reads) == [(0, 4000)]
    assert list(found.outside_reads) == [(BASE[0] + 4000, BASE[0] + 6000)]
    assert not found.outside_writes


def test_one_buffer_passed_twice_is_read_and_written():
    same = Buffer(BASE[0], 4096)
    found = triton("add.sm_80", 1, [same, Buffer(BASE[1], 4096), same, 700])
    for name in ("k_add_param_0", "k_add_param_2"):
        assert list(found[name].reads) == list(found[name].writes) == [(0, 2800)]
    shifted = triton("add.sm_80", 1, [Buffer(BASE[0], 4096), Buffer(BASE[1], 4096), Buffer(BASE[0] + 64, 4096), 700])
    assert list(shifted["k_add_param_0"].writes) == [(64, 2864)]
    assert list(shifted["k_add_param_2"].reads) == [(0, 2736)]
    assert shifted.complete


@pytest.mark.parametrize("case", targets("softmax"))
@pytest.mark.parametrize(
    ("rows", "columns", "pitch", "out", "grid"),
    [(5, 700, 900, 1000, 3), (4, 1024, 1024, 1024, 8), (7, 1, 3, 2, 2), (0, 9, 9, 9, 2)],
)
def test_softmax(case, rows, columns, pitch, out, grid):
    found = triton(case, grid, [*buffers(4 * 8000, 4 * 8000), pitch, out, rows, columns])
    at = [np.arange(columns) + r * pitch for r in range(rows)]
    to = [np.arange(columns) + r * out for r in range(rows)]
    matches(found, "k_softmax", {0: (None, marks(8000, *to), 4), 1: (marks(8000, *at), None, 4)})


@pytest.mark.parametrize("case", targets("layernorm"))
@pytest.mark.parametrize(("n", "stride", "grid"), [(1000, 1000, 3), (2500, 2600, 2), (1, 5, 4), (1024, 1024, 1), (0, 10, 2)])
def test_layernorm(case, n, stride, grid):
    size = stride * grid + n
    found = triton(case, grid, [*buffers(2 * size, 2 * size, 4 * n, 4 * n, 4 * grid, 4 * grid), stride, n, 1e-5])
    rows = marks(size, *(np.arange(n) + r * stride for r in range(grid)))
    matches(
        found, "k_layernorm",
        {0: (rows, None, 2), 1: (None, rows, 2), 2: (every(n), None, 4), 3: (every(n), None, 4), 4: (None, every(grid), 4),
         5: (None, every(grid), 4)},
    )  # fmt: skip


@pytest.mark.parametrize("case", targets("inductor_red"))
@pytest.mark.parametrize(("rows", "columns"), [(13, 1040), (4, 512), (1, 16), (9, 0)])
def test_reduction_of_inductor(case, rows, columns):
    count = rows * columns
    found = triton(case, -(-rows // 4), [*buffers(2 * count, 4 * columns, 4 * rows, 8 * rows), rows, columns])
    matches(
        found, "k_inductor_red",
        {0: (every(count), None, 2), 1: (every(columns), None, 4), 2: (None, every(rows), 4), 3: (None, every(rows), 8)},
    )  # fmt: skip


@pytest.mark.parametrize("case", targets("dropout"))
def test_dropout_reads_one_seed(case):
    found = triton(case, 4, [*buffers(4 * 2048, 64, 4 * 2048), 1999, 0.25])
    touched = np.arange(2048) < 1999
    matches(found, "k_dropout", {0: (touched, None, 4), 1: (marks(8, 3), None, 8), 2: (None, touched, 4)})


@pytest.mark.parametrize("case", targets("inline_asm"))
def test_inline_assembly_with_names_of_its_own(case):
    found = triton(case, 3, [*buffers(4 * 1536, 4 * 1536), 1300])
    touched = np.arange(1536) < 1300
    matches(found, "k_inline_asm", {0: (touched, None, 4), 1: (None, touched, 4)})


@pytest.mark.parametrize("case", targets("print_sort_hist"))
def test_sort_and_histogram(case):
    found = triton(case, 1, [*buffers(4 * 256, 4 * 256, 4 * 64), 201])
    touched = np.arange(256) < 201
    matches(found, "k_print_sort_hist", {0: (touched, None, 4), 1: (None, touched, 4), 2: (None, every(64), 4)})


@pytest.mark.parametrize("case", targets("atomics"))
@pytest.mark.parametrize("n", [1000, 100, 512])
def test_atomics(case, n):
    found = triton(case, 2, [*buffers(4 * 1024, 4 * 128, 8, 4, 2 * 1024), n])
    touched, sums = np.arange(1024) < n, np.arange(128) < n
    matches(
        found, "k_atomics",
        {0: (touched, None, 4), 1: (sums, sums, 4), 2: (every(2), every(2), 4), 3: (every(1), every(1), 4),
         4: (touched, touched, 2)},
    )  # fmt: skip


# -- Triton: matrices


def matmul_marks(m: int, n: int, k: int, pitches: tuple[int, int, int]) -> tuple[np.ndarray, ...]:
    sam, sbk, scm = pitches
    a = marks(m * sam, (np.arange(m)[:, None] * sam + np.arange(k)))
    b = marks(k * sbk, (np.arange(k)[:, None] * sbk + np.arange(n)))
    c = marks(m * scm, (np.arange(m)[:, None] * scm + np.arange(n)))
    return a, b, c


@pytest.mark.parametrize("case", targets("matmul"))
@pytest.mark.parametrize(
    ("m", "n", "k"), [(256, 384, 128), (272, 144, 80), (16, 16, 16), (1040, 1168, 272), (128, 128, 0)], ids=lambda v: str(v)
)
def test_matmul(case, m, n, k):
    pitches = (k + 16, n + 32, n + 16)
    a, b, c = matmul_marks(m, n, k, pitches)
    args = [*buffers(2 * a.size, 2 * b.size, 2 * c.size), m, n, k, *pitches]
    matches(triton(case, -(-m // 128) * -(-n // 128), args), "k_matmul", {0: (a, None, 2), 1: (b, None, 2), 2: (None, c, 2)})


def test_matmul_of_some_blocks():
    """Blocks are grouped by eight rows of tiles: the first three are tiles (0, 0), (1, 0) and (2, 0)."""
    m, n, k = 1200, 256, 64
    rows = np.arange(384)[:, None]
    args = [*buffers(2 * m * k, 2 * k * n, 2 * m * n), m, n, k, k, n, n]
    expected = {
        0: (marks(m * k, rows * k + np.arange(k)), None, 2),
        1: (marks(k * n, np.arange(k)[:, None] * n + np.arange(128)), None, 2),
        2: (None, marks(m * n, rows * n + np.arange(128)), 2),
    }
    matches(triton("matmul.sm_80", 3, args), "k_matmul", expected)


def test_rows_wrap_around_where_the_tile_is_larger():
    """(pm * BM + …) % M: the last tile of 100 rows reads the first 28 again, and nothing lies outside."""
    m, n, k = 112, 128, 64
    a, b, c = matmul_marks(m, n, k, (64, 128, 128))
    args = [*buffers(2 * a.size, 2 * b.size, 2 * c.size), m, n, k, 64, 128, 128]
    matches(triton("matmul.sm_90", 1, args), "k_matmul", {0: (a, None, 2), 1: (b, None, 2), 2: (None, c, 2)})


HOSTED = [*targets("matmul_tma_host"), *targets("matmul_ws"), *targets("matmul_ws_64"), *targets("matmul_2cta")]
SHAPES = [(256, 256, 128), (200, 136, 72), (8, 8, 8), (1000, 520, 200)]


@pytest.mark.parametrize("case", HOSTED)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES, ids=lambda v: str(v))
def test_matmul_with_tensor_maps(case, m, n, k):
    """Tiles at the edges are cut by the map; a persistent grid may be smaller or larger than the number of tiles."""
    rows = RECIPES[case.split(".")[0]].constants["BM"]
    tiles = -(-m // rows) * -(-n // 128)
    pitches = (k + 8, k + 16, n + 8)
    matrices = [(m, k), (n, k), (m, n)]
    args = [
        each
        for which, (shape, pitch) in enumerate(zip(matrices, pitches, strict=True))
        for each in descriptor(case, which, BASE[which], shape, pitch)
    ]
    if "ws" in case:
        grid = RECIPES[case.split(".")[0]].constants["NSM"]
    else:
        grid = tiles * (2 if "2cta" in case else 1)
    found = triton(case, grid, [*args, m, n, k])
    kernel = next(iter(triton_module(case).kernels))
    expected = {}
    for which, ((r, c), pitch) in enumerate(zip(matrices, pitches, strict=True)):
        touched = marks((r - 1) * pitch + c, np.arange(r)[:, None] * pitch + np.arange(c))
        expected[5 * which] = (None, touched, 2) if which == 2 else (touched, None, 2)
    matches(found, kernel, expected)


@pytest.mark.parametrize("case", ["matmul_tma_host.sm_90", "matmul_2cta.sm_90"])
def test_one_program_of_a_tensor_map_kernel(case):
    m, n, k = 384, 384, 96
    args = [e for i, s in enumerate([(m, k), (n, k), (m, n)]) for e in descriptor(case, i, BASE[i], s, s[1])]
    found = triton(case, 2 if "2cta" in case else 1, [*args, m, n, k])
    tile = np.arange(128)[:, None]
    matches(
        found, "k_matmul_tma_host",
        {0: (marks(m * k, tile * k + np.arange(k)), None, 2), 5: (marks(n * k, tile * k + np.arange(k)), None, 2),
         10: (None, marks(m * n, tile * n + np.arange(128)), 2)},
    )  # fmt: skip


@pytest.mark.parametrize("case", targets("matmul_tma_dev"))
@pytest.mark.parametrize(("m", "n", "k"), [(256, 256, 128), (200, 144, 80), (16, 16, 16), (1000, 528, 208)], ids=lambda v: str(v))
def test_matmul_that_builds_its_tensor_maps(case, m, n, k):
    grid = 132
    scratch = Buffer(BASE[8], 384 * grid)
    args = [*buffers(2 * m * k, 2 * n * k, 2 * m * n), m, n, k]
    found = triton(case, grid, args, scratch=scratch)
    kernel = "k_matmul_tma_dev"
    used = np.repeat(np.arange(grid) < -(-m // 128) * -(-n // 128), 384)  # programs without a tile read no map
    matches(
        found, kernel,
        {0: (every(m * k), None, 2), 1: (every(n * k), None, 2), 2: (None, every(m * n), 2), 6: (used, every(384 * grid), 1)},
    )  # fmt: skip


@pytest.mark.parametrize("case", targets("matmul_tma_host_fallback"))
@pytest.mark.parametrize(("m", "n", "k"), SHAPES, ids=lambda v: str(v))
def test_matmul_with_descriptors_taken_apart(case, m, n, k):
    pitches = (k + 8, k + 16, n + 8)
    matrices = [(m, k), (n, k), (m, n)]
    args, expected = [], {}
    count = len(triton_module(case).kernels["k_matmul_tma_host"].params)
    flags = [0] * ((count - 5) // 3 - 9)  # newer Tritons pass more of them with each descriptor
    for which, ((r, c), pitch) in enumerate(zip(matrices, pitches, strict=True)):
        here = len(args)
        args += [Buffer(BASE[which], 2 * r * pitch), r, c, pitch, 1, *flags, r, c, pitch, 1]
        touched = marks(r * pitch, np.arange(r)[:, None] * pitch + np.arange(c))
        expected[here] = (None, touched, 2) if which == 2 else (touched, None, 2)
    found = triton(case, -(-m // 128) * -(-n // 128), [*args, m, n, k])
    matches(found, "k_matmul_tma_host", expected)


@pytest.mark.parametrize("case", targets("flash_causal"))
@pytest.mark.parametrize(("context", "blocks", "heads"), [(256, 2, 2), (300, 3, 1), (300, 1, 2), (1, 1, 1), (77, 2, 1)])
def test_causal_attention(case, context, blocks, heads):
    pitch, gap = 80, 400 * 80
    size = heads * gap
    found = triton(case, (blocks, heads), [*buffers(*[2 * size] * 4, 4 * heads * context), 0.125, *(gap, pitch) * 4, context])
    d = np.arange(64)
    queries = keys = marks(size)
    for z in range(heads):
        rows = np.arange(min(context, 128 * blocks))
        queries = queries | marks(size, z * gap + rows[:, None] * pitch + d)
        keys = keys | marks(size, z * gap + rows[:, None] * pitch + d)  # up to the diagonal of the last block
    sums = marks(heads * context, *(z * context + np.arange(min(context, 128 * blocks)) for z in range(heads)))
    matches(
        found,
        "k_flash",
        {0: (queries, None, 2), 1: (keys, None, 2), 2: (keys, None, 2), 3: (None, queries, 2), 4: (None, sums, 4)},
    )


# -- CUDA C++


@pytest.mark.parametrize("sm", GENERATIONS)
@pytest.mark.parametrize(("n", "grid", "block"), [(1000, 4, 256), (1000, 7, 100), (3, 1, 33), (0, 2, 64), (70, 10, 7)])
def test_vec4(sm, n, grid, block):
    found = cuda(f"cuda/c01_vec.{sm}.ptx", "vec4", grid, block, [*buffers(16 * 1024, 16 * 1024, 16 * 1024), n])
    touched = np.arange(1024) < min(n, grid * block)
    matches(found, "vec4", {0: (touched, None, 16), 1: (touched, None, 16), 2: (None, touched, 16)})


@pytest.mark.parametrize("sm", GENERATIONS)
@pytest.mark.parametrize(("n", "grid", "block"), [(1000, 2, 100), (1000, 64, 64), (5, 1, 1), (0, 1, 32), (4000, (1, 2), 129)])
def test_grid_stride(sm, n, grid, block):
    found = cuda(f"cuda/c01_vec.{sm}.ptx", "grid_stride", grid, block, [*buffers(4 * 4096, 4 * 4096), n])
    touched = np.arange(4096) < n
    matches(found, "grid_stride", {0: (touched, None, 4), 1: (None, touched, 4)})


def test_offsets_beyond_two_gigabytes():
    """Rows four billion elements and more apart, in buffers that are too large for flags."""
    pitch, rows, columns = 1_500_000_000, 4, 1000
    size = 4 * rows * pitch
    # r * stride is a 32-bit product in the kernel, as it is in C: row 2 and 3 wrap around
    found = triton("softmax.sm_80", 2, [Buffer(BASE[0], size), Buffer(BASE[1], size), pitch, 1000, 2, columns])
    assert list(found["k_softmax_param_1"].reads) == [(4 * r * pitch, 4 * r * pitch + 4 * columns) for r in range(2)]
    assert list(found["k_softmax_param_0"].writes) == [(0, 8000)]
    heads, gap = 5, 1 << 30
    args = [*[Buffer(BASE[i], 2 * heads * gap) for i in range(4)], Buffer(BASE[4], 4 * heads * 100), 0.5, *(gap, 64) * 4, 100]
    found = triton("flash_causal.sm_80", (1, heads), args)
    rows = [(2 * z * gap, 2 * z * gap + 2 * 64 * 100) for z in range(heads)]
    assert found.complete
    assert [list(found[f"k_flash_param_{i}"].reads) for i in range(3)] == [rows] * 3
    assert list(found["k_flash_param_3"].writes) == rows
    assert list(found["k_flash_param_4"].writes) == [(0, 4 * heads * 100)]


@pytest.mark.parametrize("shift", [1, 3, 4, 20])
def test_buffers_that_are_not_aligned(shift):
    """The flags of a buffer stand for aligned pieces; these addresses are none."""
    args = [Buffer(BASE[0] + shift, 4000), Buffer(BASE[1] + 4 * shift, 3999), Buffer(BASE[2] + 16 * shift, 4001)]
    found = cuda("cuda/c10_loops.sm_80.ptx", "stencil", 1, (10, 10), [*args[:2], 10, 10, 10])
    assert found.complete
    inner = np.zeros((10, 10, 10), bool)
    inner[1:-1, 1:-1, 1:-1] = True
    assert found["stencil_param_1"].writes == Intervals.of([(4 * i, 4 * i + 4) for i in np.flatnonzero(inner).tolist()])
    assert found["stencil_param_0"].reads.nbytes == 4 * (512 + 6 * 64)


@pytest.mark.parametrize("sm", GENERATIONS)
@pytest.mark.parametrize(("shape", "grid", "block"), [((33, 17, 5), (3, 3), (16, 8)), ((9, 9, 3), (1, 1), (9, 9)),
                                                       ((2, 9, 9), 1, (8, 8)),
                                                       ((40, 30, 4), (2, 2), (13, 7))])  # fmt: skip
def test_stencil(sm, shape, grid, block):
    nx, ny, nz = shape
    found = cuda(f"cuda/c10_loops.{sm}.ptx", "stencil", grid, block, [*buffers(4 * nx * ny * nz, 4 * nx * ny * nz), nx, ny, nz])
    reads, writes = np.zeros((nz, ny, nx), bool), np.zeros((nz, ny, nx), bool)
    width = (grid if isinstance(grid, tuple) else (grid, 1))[0] * block[0]
    height = (grid if isinstance(grid, tuple) else (grid, 1))[1] * block[1]
    for z in range(1, nz - 1):
        for y in range(1, min(ny - 1, height)):
            for x in range(1, min(nx - 1, width)):
                writes[z, y, x] = True
                for dz, dy, dx in ((0, 0, 0), (0, 0, 1), (0, 0, -1), (0, 1, 0), (0, -1, 0), (1, 0, 0), (-1, 0, 0)):
                    reads[z + dz, y + dy, x + dx] = True
    matches(found, "stencil", {0: (reads, None, 4), 1: (None, writes, 4)})


@pytest.mark.parametrize("sm", GENERATIONS)
@pytest.mark.parametrize(("w", "h", "grid"), [(64, 64, (2, 2)), (70, 33, (3, 2)), (5, 100, (1, 4)), (33, 65, (1, 1))])
def test_transpose(sm, w, h, grid):
    found = cuda(f"cuda/c10_loops.{sm}.ptx", "transpose", grid, (32, 8), [*buffers(4 * w * h, 4 * w * h), w, h])
    reads, writes = np.zeros((h, w), bool), np.zeros((w, h), bool)
    reads[: 32 * grid[1], : 32 * grid[0]] = True
    writes[: 32 * grid[0], : 32 * grid[1]] = True
    matches(found, "transpose", {0: (reads, None, 4), 1: (None, writes, 4)})


@pytest.mark.parametrize("sm", GENERATIONS)
@pytest.mark.parametrize(("n", "grid", "block"), [(100, 4, 32), (1000, 10, 97), (3, 1, 5), (7, 1, 64)])
def test_bytes(sm, n, grid, block):
    found = cuda(f"cuda/c10_loops.{sm}.ptx", "bytes", grid, block, [*buffers(2000, 4000, 16000), n])
    i = np.arange(min(n, grid * block))
    touched = marks(2000, i)
    matches(found, "bytes", {0: (marks(2000, i, n // 3 + i % 5), None, 1), 1: (None, touched, 2), 2: (None, touched, 8)})


@pytest.mark.parametrize("sm", GENERATIONS)
@pytest.mark.parametrize("op", [*range(9), -1, 1000])
def test_every_case_of_a_switch(sm, op):
    n, threads = 77, 2 * 50
    found = cuda(f"cuda/c03_switch.{sm}.ptx", "sw", 2, 50, [*buffers(4 * 200, 4 * 200), n, op])
    i = np.arange(min(n, threads))
    reads, writes = marks(200, i), marks(200, i)
    sums = None
    if op == 1:
        writes |= marks(200, i + n)
    elif op == 2:
        reads |= marks(200, i ^ 1)
    elif op == 3:
        sums = marks(200, 0)
    elif op == 7:
        reads |= marks(200, n - 1 - i)
    if sums is None and op not in range(8):
        reads = reads if found["sw_param_0"].reads else None  # the compiler may drop a load that nobody uses
    matches(found, "sw", {0: (reads, None, 4), 1: (sums, writes, 4)})


@pytest.mark.parametrize("sm", GENERATIONS)
@pytest.mark.parametrize(("n", "grid", "block"), [(100, 4, 32), (50, 1, 33), (9, 3, 5)])
def test_calls(sm, n, grid, block):
    found = cuda(f"cuda/c02_calls.{sm}.ptx", "calls", grid, block, [*buffers(4 * 300, 4 * 300), n])
    i = np.arange(min(n, grid * block))
    reads = marks(300, *(i + k for k in range(5)))
    got = found["calls_param_0"].reads
    if got.nbytes < 4 * int(reads.sum()):  # `s.a[1]` to `s.a[3]` are never used
        reads = marks(300, i, i + 4)
    matches(found, "calls", {0: (reads, None, 4), 1: (None, marks(300, i, i + n), 4)})


@pytest.mark.parametrize("sm", GENERATIONS)
def test_cpasync(sm):
    found = cuda(f"cuda/c06_async.{sm}.ptx", "cpasync", 3, 256, [*buffers(16 * 1000, 16 * 1000), 0])
    touched = np.arange(1000) < 768
    matches(found, "cpasync", {0: (touched, None, 16), 1: (None, touched, 16)})


@pytest.mark.parametrize("sm", GENERATIONS)
@pytest.mark.parametrize(("turns", "threads"), [(4, 128), (1, 128), (3, 100), (0, 32)])
def test_pipe(sm, turns, threads):
    found = cuda(f"cuda/c06_async.{sm}.ptx", "pipe", 1, threads, [*buffers(16 * 600, 16 * 600), turns])
    touched = marks(600, *(s * 128 + np.arange(threads) for s in range(turns)))
    matches(found, "pipe", {0: (touched, None, 16), 1: (None, touched, 16)})


@pytest.mark.parametrize("sm", GENERATIONS[1:])
@pytest.mark.parametrize(("x", "y", "grid"), [(0, 0, 1), (5, 3, 4), (-7, -30, 2), (90, 40, 3), (200, 0, 1)])
def test_tma2d(sm, x, y, grid):
    shape, pitch = (50, 100), 112
    in_, out = (TensorMap(BASE[i], 4, tuple(reversed(shape)), (4 * pitch,), (32, 32)) for i in range(2))
    found = cuda(f"cuda/c07_tma.{sm}.ptx", "tma2d", grid, 1024, [in_, out, x, y])
    touched = np.zeros((50, pitch), bool)
    for block in range(grid):
        column = x + 32 * block
        touched[max(y, 0) : max(y + 32, 0), max(column, 0) : min(max(column + 32, 0), 100)] = True
    touched = touched.reshape(-1)[: 49 * pitch + 100]
    matches(found, "tma2d", {0: (touched, None, 4), 1: (None, touched, 4)})


@pytest.mark.parametrize("sm", GENERATIONS[1:])
@pytest.mark.parametrize(("n", "grid"), [(16, 2), (1, 3), (256, 1), (0, 2)])
def test_bulk1d(sm, n, grid):
    found = cuda(f"cuda/c07_tma.{sm}.ptx", "bulk1d", grid, 64, [*buffers(4096 * 4, 4096 * 4), n])
    touched = marks(4096, *(b * 1024 + np.arange(4 * n) for b in range(grid)))
    sums = np.arange(4096) < 16  # a reduction of 64 bytes, whatever n is
    matches(found, "bulk1d", {0: (touched, None, 4), 1: (sums, touched | sums, 4)})


@pytest.mark.parametrize("sm", GENERATIONS[1:])
def test_generic_addresses_in_another_block_of_the_cluster_are_not_followed(sm):
    with pytest.raises(NotDerivable, match=r"ld\.u32: its address depends on data"):
        cuda(f"cuda/c07_tma.{sm}.ptx", "clus", 2, 64, buffers(4 * 64, 4 * 128), cluster=2)


@pytest.mark.parametrize("sm", GENERATIONS)
@pytest.mark.parametrize(("n", "threads"), [(5, 7), (16, 32), (0, 3), (1, 1)])
def test_memcpy_memset_and_unaligned_structs(sm, n, threads):
    found = cuda(f"cuda/c09_printf_assert.{sm}.ptx", "memc", 1, threads, [*buffers(600, 600), n])
    writes = marks(600, *(t * n + np.arange(n) for t in range(threads)), np.arange(37), np.arange(39, 52))
    matches(found, "memc", {0: (None, writes, 1), 1: (marks(600, np.arange(n), np.arange(65, 78)), None, 1)})


@pytest.mark.parametrize("sm", GENERATIONS)
def test_memory_of_alloca_is_private(sm):
    found = cuda(f"cuda/c09_printf_assert.{sm}.ptx", "alloca_k", 1, 40, [Buffer(BASE[0], 400), 5])
    matches(found, "alloca_k", {0: (None, np.arange(100) < 40, 4)})


@pytest.mark.parametrize("path", ["c12_debug_G.sm_80.ptx", "c12_debug_lineinfo.sm_80.ptx"])
@pytest.mark.parametrize(("n", "grid", "block"), [(20, 2, 16), (7, 1, 33), (0, 1, 8)])
def test_code_with_debugging_information(path, n, grid, block):
    found = cuda(f"cuda/{path}", "dbg", grid, block, [*buffers(8 * 40, 4 * 40), n])
    count = min(n, grid * block)
    matches(found, "dbg", {0: (np.arange(80) < 2 * max(count - 1, 0), None, 4), 1: (None, np.arange(40) < count, 4)})


@pytest.mark.parametrize("sm", GENERATIONS)
def test_atomics_of_every_type(sm):
    n, t = 100, np.arange(48)
    sizes = [4 * 200, 16, 4 * 64, 8, 4 * 64, 4 * 64, 2 * 64]
    found = cuda(f"cuda/c05_atomics.{sm}.ptx", "atoms", 1, 48, [*buffers(*sizes), n])
    both = marks(200, t, n, 0, 2, 3)
    # i[5] is stored as well; l[0] is written, l[1] exchanged; atomicCAS on 16 bits may take the word around them
    matches(
        found, "atoms",
        {0: (both, both | marks(200, 5), 4), 1: (marks(2, 1), every(2), 8), 2: (marks(64, t, 2), marks(64, t, 2), 4),
         3: (every(1), every(1), 8),
         4: (marks(64, t), marks(64, t), 4), 5: (marks(64, t), marks(64, t), 4), 6: (marks(64, t), marks(64, t), 2)},
    )  # fmt: skip


@pytest.mark.parametrize("sm", GENERATIONS)
def test_reductions_of_vectors(sm):
    found = cuda(f"cuda/c05_atomics.{sm}.ptx", "vec_red", 1, 20, buffers(16 * 32, 16 * 64))
    if sm == "sm_80":
        matches(found, "vec_red", {0: (None, None, 1), 1: (None, None, 1)})
        return
    first = np.arange(512) < 16 * 20
    # v4.f16x2 at q[t]; v2.bf16x2 at q[32 + t]; 16 bytes at q and at q + 1
    second = marks(1024, np.arange(16 * 20), *(512 + 16 * t + np.arange(8) for t in range(20)))
    matches(found, "vec_red", {0: (first, first, 1), 1: (second, second, 1)})


@pytest.mark.parametrize("sm", GENERATIONS)
def test_loads_and_stores_with_hints(sm):
    found = cuda(f"cuda/c11_hints.{sm}.ptx", "hints", 1, 32, [*buffers(4 * 4096, 4 * 4096), 0])
    reads = np.arange(4096) < 33
    writes = marks(4096, np.arange(32), *(1024 + t + np.arange(32) for t in range(1)))
    # discard covers 128 bytes at o + 1024 floats; prefetch, applypriority and createpolicy touch nothing
    matches(found, "hints", {0: (reads, None, 4), 1: (None, writes, 4)})


@pytest.mark.parametrize(
    ("n", "copied"), [(0, [(32, 40)]), (5, [(0, 5), (20, 24)]), (16, [(0, 16), (20, 24)]), (99, [(0, 16), (20, 24)])]
)
def test_cp_async_reads_no_more_than_its_source_size(n, copied):
    """Nothing where the size is 0 or the predicate ignores the source; then a pointer is loaded over its own register."""
    pointer = contents(0, np.array([BASE[0] + 64, *[0] * 9], np.uint64))
    found = cuda("bugs/b11_own_cpasync_srcsize_selfaddr.ptx", "k", 1, 32, [pointer, n])
    assert (found.guards, found.complete) == (("a",), True)
    assert found["a"].reads == Intervals.of([*copied, (0, 8), (64, 68)])
    assert not found["a"].writes


# -- guarded by contents


def contents(index: int, array: np.ndarray) -> Buffer:
    return Buffer(BASE[index], array.nbytes, array)


@pytest.mark.parametrize("case", targets("gather"))
def test_gather(case):
    rng = np.random.default_rng(1)
    index = rng.integers(0, 50, 13)
    d = 200
    args = [*buffers(8 * 13, 4 * 50 * d, 4 * 13 * d), 13, d]
    with pytest.raises(NotDerivable, match=rf"^{case}:\d+:\d+: ld.global.*: its address depends on data$"):
        triton(case, 13, args)
    found = triton(case, 13, [contents(0, index), *args[1:]])
    assert found.guards == ("k_gather_param_0",)
    rows = marks(50 * d, *(i * d + np.arange(d) for i in index))
    matches(found, "k_gather", {0: (every(13), None, 8), 1: (rows, None, 4), 2: (None, every(13 * d), 4)})


@pytest.mark.parametrize("case", targets("scatter"))
def test_scatter(case):
    rng = np.random.default_rng(2)
    index = rng.integers(-5, 1000, 700)
    args = [*buffers(8 * 700, 4 * 700, 4 * 1000), 700]
    with pytest.raises(NotDerivable, match=rf"^{case}:\d+:\d+: "):
        triton(case, 3, args)
    found = triton(case, 3, [contents(0, index), *args[1:]])
    matches(
        found, "k_scatter", {0: (every(700), None, 8), 1: (every(700), None, 4), 2: (None, marks(1000, index[index >= 0]), 4)}
    )


@pytest.mark.parametrize("case", targets("flash_varlen"))
def test_attention_of_sequences_of_different_lengths(case):
    ends = np.array([0, 70, 70, 200, 264], np.int32)
    sm, total = 80, 264 * 80
    args = [*buffers(2 * total, 2 * total, 2 * total, 2 * total), Buffer(BASE[4], 20), 0.5, sm]
    with pytest.raises(NotDerivable, match=rf"^{case}:\d+:\d+: "):
        triton(case, (2, 4), args)
    found = triton(case, (2, 4), [*args[:4], contents(4, ends), *args[5:]])
    assert found.guards == ("k_flash_varlen_param_4",)
    queries, keys = marks(total), marks(total)
    for z in range(4):
        n = ends[z + 1] - ends[z]
        for pm in range(2):
            if pm * 64 < n:
                rows = ends[z] + np.arange(pm * 64, min(pm * 64 + 64, n))
                queries |= marks(total, rows[:, None] * sm + np.arange(64))
                keys |= marks(total, (ends[z] + np.arange(n))[:, None] * sm + np.arange(64))
    matches(
        found, "k_flash_varlen",
        {0: (queries, None, 2), 1: (keys, None, 2), 2: (keys, None, 2), 3: (None, queries, 2), 4: (every(5), None, 4)},
    )  # fmt: skip


@pytest.mark.parametrize("case", targets("loaded_bound"))
def test_a_bound_that_is_loaded(case):
    lengths = np.array([0, 1, 511, 512, 513, 1300], np.int32)
    args = [Buffer(BASE[0], 4 * 6 * 1400), Buffer(BASE[1], 24), Buffer(BASE[2], 24), 1400]
    with pytest.raises(NotDerivable, match=rf"^{case}:\d+:\d+: "):
        triton(case, 6, args)
    found = triton(case, 6, [args[0], contents(1, lengths), *args[2:]])
    reads = marks(6 * 1400, *(r * 1400 + np.arange(n) for r, n in enumerate(lengths)))
    matches(found, "k_loaded_bound", {0: (reads, None, 4), 1: (every(6), None, 4), 2: (None, every(6), 4)})


@pytest.mark.parametrize("case", targets("inductor_where"))
def test_an_index_that_wraps_around(case):
    ks0, count = 48, 20 * 48 - 7
    index = np.random.default_rng(3).integers(-1000, 1000, 20)
    args = [*buffers(8 * 20, 4 * 1000 * ks0, 4 * ks0, 4 * 20 * ks0), ks0, count]
    with pytest.raises(NotDerivable, match=rf"^{case}:\d+:\d+: "):
        triton(case, 4, args)
    found = triton(case, 4, [contents(0, index), *args[1:]])
    at = np.arange(count)
    row = index[at // ks0]
    row = np.where(row < 0, row + 1000, row)
    matches(
        found, "k_inductor_where",
        {0: (every(20), None, 8), 1: (marks(1000 * ks0, at % ks0 + ks0 * row), None, 4), 2: (every(ks0), None, 4),
         3: (None, marks(20 * ks0, at), 4)},
    )  # fmt: skip


@pytest.mark.parametrize("case", targets("masked_by_data"))
def test_a_mask_that_is_data(case):
    values = np.random.default_rng(4).standard_normal(1000).astype(np.float32)
    values[:6] = [0, -0.0, np.nan, np.inf, -np.inf, 1e-42]
    args = [*buffers(4000, 4000), 900]
    with pytest.raises(NotDerivable, match=rf"^{case}:\d+:\d+: st.global.*: its guard depends on data$"):
        triton(case, 2, args)
    found = triton(case, 2, [contents(0, values), *args[1:]])
    matches(
        found, "k_masked_by_data", {0: (np.arange(1000) < 900, None, 4), 1: (None, (values > 0) & (np.arange(1000) < 900), 4)}
    )


@pytest.mark.parametrize("sm", GENERATIONS)
def test_a_sparse_matrix(sm):
    rng = np.random.default_rng(5)
    rows = np.concatenate(([3], 3 + np.cumsum(rng.integers(0, 9, 70)))).astype(np.int32)
    rows[40] = rows[39] - 2  # an end before its start: no turn
    columns = rng.integers(0, 500, 800).astype(np.int32)
    args = [*buffers(4 * 71, 3200, 3200, 2000, 280), 67]
    with pytest.raises(NotDerivable, match=r"^c10_loops.*:\d+:\d+: "):
        cuda(f"cuda/c10_loops.{sm}.ptx", "csr", 3, 30, args)
    with pytest.raises(NotDerivable, match=r"^c10_loops.*:\d+:\d+: ld.global.*: its address depends on data"):
        cuda(f"cuda/c10_loops.{sm}.ptx", "csr", 3, 30, [contents(0, rows), *args[1:]])
    found = cuda(f"cuda/c10_loops.{sm}.ptx", "csr", 3, 30, [contents(0, rows), contents(1, columns), *args[2:]])
    assert found.guards == ("csr_param_0", "csr_param_1")
    used = marks(800, *(np.arange(rows[r], max(rows[r + 1], rows[r])) for r in range(67)))
    matches(
        found, "csr",
        {0: (np.arange(71) < 68, None, 4), 1: (used, None, 4), 2: (used, None, 4), 3: (marks(500, columns[used]), None, 4),
         4: (None, np.arange(70) < 67, 4)},
    )  # fmt: skip


def test_a_kernel_that_writes_what_decides_is_refused():
    """Even where it does so through another argument."""
    index = np.arange(300)
    out = Buffer(BASE[0] + 800, 4 * 1000)
    args = [contents(0, index), Buffer(BASE[1], 1200), out, 300]
    with pytest.raises(NotDerivable, match="k_scatter writes k_scatter_param_0, whose contents decide"):
        triton("scatter.sm_80", 2, args)
    args[2] = Buffer(BASE[0] + 2400, 4000)
    assert triton("scatter.sm_80", 2, args).complete


def test_contents_of_other_buffers_are_no_guards():
    values = np.random.default_rng(6).standard_normal(1024).astype(np.float32)
    found = triton("add.sm_80", 1, [contents(0, values), contents(1, values), Buffer(BASE[2], 4096), 1000])
    assert found.guards == ()


# -- refusals


@pytest.mark.parametrize(("path", "kernel", "block", "args", "why"), [
    ("cuda/c10_loops.sm_90a.ptx", "converge", 64, [Buffer(BASE[0], 400), 60, 0.5], "the branch depends on data"),
    ("cuda/c07_tma.sm_90a.ptx", "tma_ptr_global", 1024, [Buffer(BASE[0], 128), Buffer(BASE[1], 4096), 0],
     "tensor map lies in memory"),
    ("cuda/c08_tex.sm_80.ptx", "texk", 8, [1, 2, Buffer(BASE[0], 400), 8], "texture or surface"),
    ("cuda/c09_printf_assert.sm_80.ptx", "pr", 8, [Buffer(BASE[0], 400), 8], "depends on data"),
    ("cuda/c02_calls.sm_80.ptx", "virt", 8, [Buffer(BASE[0], 400), Buffer(BASE[1], 400), 8, 0], "an indirect call"),
    ("cuda/c06_async.sm_80.ptx", "gridsync", 8, [Buffer(BASE[0], 400), 8], "depends on data"),
])  # fmt: skip
def test_what_cannot_be_derived_is_refused(path, kernel, block, args, why):
    with pytest.raises(PtxError, match=rf"^{re.escape(path.split('/')[1])}:\d+:\d+: .*{why}"):
        cuda(path, kernel, 1, block, args)


@pytest.mark.parametrize("case", targets("splitk_semaphore"))
def test_who_comes_last_is_not_guessed(case):
    with pytest.raises(NotDerivable, match=rf"^{case}:\d+:\d+: .*depends on data"):
        triton(case, (2, 4), [*buffers(8000, 8000, 8, 2000), 500])


def test_arguments_that_are_not_known_are_refused_where_they_matter():
    with pytest.raises(NotDerivable, match="depends on data"):
        triton("add.sm_80", 1, [*buffers(400, 400, 400), None])
    with pytest.raises(NotDerivable, match="its address depends on data"):
        triton("add.sm_80", 1, [*buffers(400, 400), None, 100])
    p = 0.1  # does not matter
    assert triton("dropout.sm_80", 1, [*buffers(400, 32, 400), 100, None]) == triton(
        "dropout.sm_80", 1, [*buffers(400, 32, 400), 100, p]
    )


def test_launches_that_the_driver_would_refuse():
    module = triton_module("add.sm_80")
    args = [*buffers(400, 400, 400), 100]
    with pytest.raises(ValueError, match="compiled for blocks of"):
        footprint(module, None, 1, 64, args)
    with pytest.raises(ValueError, match="1 to 1024 threads"):
        footprint(module, None, 1, 2048, args)
    with pytest.raises(ValueError, match="no multiple of the cluster"):
        footprint(module, None, 3, 128, args, cluster=2)
    with pytest.raises(ValueError, match="takes 6 arguments, got 7"):
        footprint(module, None, 1, 128, [*args, None, None, None])
    with pytest.raises(ValueError, match="has no parameter 'n'"):
        footprint(module, None, 1, 128, {"n": 3})
    with pytest.raises(ValueError, match="is no pointer"):
        footprint(module, None, 1, 128, [*args[:3], args[0]])
    with pytest.raises(ValueError, match="does not fit"):
        footprint(module, None, 1, 128, [*args[:3], 1 << 32])
    with pytest.raises(ValueError, match="no tensor map"):
        footprint(module, None, 1, 128, [TensorMap(0, 2, (4,), (), (4,)), *args[1:]])
