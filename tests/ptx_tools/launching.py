"""Launching kernels of the corpus in the interpreter, and comparing with flags of the elements that should be touched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera_compile.ptx_tools import Buffer, Footprint, Intervals, Module, TensorMap, footprint, parse
from tests.ptx_tools.corpus import DATA, triton_ptx

Marks = npt.NDArray[np.bool_]
ITEM = {"i8": 1, "i16": 2, "fp16": 2, "bf16": 2, "i32": 4, "fp32": 4, "i64": 8}


@cache
def static_module(path: str) -> Module:
    file = DATA / path
    return parse(file.read_text(), name=file.name)


@cache
def triton_module(case: str) -> Module:
    return parse(triton_ptx(case).ptx, name=case)


def cuda(path: str, kernel: str, grid: Any, block: Any, args: Sequence[Any], **options: Any) -> Footprint:
    """A kernel of `cuda/`, `hand/` or `bugs/`."""
    return footprint(static_module(path), kernel, grid, block, args, **options)


def triton(case: str, grid: Any, args: Sequence[Any], scratch: Buffer | None = None, **options: Any) -> Footprint:
    """A Triton kernel on its arguments, without the two pointers that Triton adds but with its threads and shared memory."""
    module, metadata = triton_module(case), triton_ptx(case).metadata
    (function,) = module.kernels.values()
    (threads,) = (int(d.tokens[0]) for d in function.tuning if d.name == ".reqntid")
    rest = [] if scratch is None else [*[None] * (len(function.params or ()) - 2 - len(args)), scratch]
    return footprint(module, None, grid, threads, [*args, *rest], shared_bytes=metadata["shared"], **options)


def descriptor(case: str, which: int, addr: int, shape: Sequence[int], pitch: int) -> list[Any]:
    """What Triton passes for a tensor descriptor of a matrix of 2-byte elements: the map, its shape and its strides."""
    box = triton_ptx(case).metadata["tensordesc_meta"][which]["block_size"]
    map_ = TensorMap(addr, 2, tuple(reversed(shape)), (2 * pitch,), tuple(reversed(box)))
    return [map_, *shape, pitch, 1]


def flags(found: Intervals, nbytes: int) -> Marks:
    """One flag a byte."""
    marks = np.zeros(nbytes, bool)
    for start, end in found:
        assert 0 <= start < end <= nbytes
        assert not marks[start:end].any(), "intervals overlap"
        marks[start:end] = True
    return marks


def matches(found: Footprint, kernel: str, expected: dict[int, tuple[Marks | None, Marks | None, int]]) -> None:
    """`expected`: parameter → flags of the elements read and written (None for none at all) and the size of an element."""
    assert found.complete, str(found)
    assert {b.name for b in found.buffers} == {f"{kernel}_param_{i}" for i in expected}
    for index, (reads, writes, size) in expected.items():
        buffer = found[f"{kernel}_param_{index}"]
        for what, got, want in (("reads", buffer.reads, reads), ("writes", buffer.writes, writes)):
            wanted = np.zeros(buffer.nbytes, bool)
            if want is not None:
                wanted[: want.size * size] = np.repeat(want.reshape(-1), size)
            different = np.flatnonzero(flags(got, buffer.nbytes) != wanted)
            assert not len(different), f"{buffer.name} {what}: byte {different[0]} and {len(different)} in all are wrong\n{found}"


def marks(count: int, *indices: Any) -> Marks:
    """Flags of `count` elements, set at the indices."""
    found = np.zeros(count, bool)
    for index in indices:
        found[np.asarray(index)] = True
    return found


HEAD = """.version 8.7
.target sm_90a
.address_size 64
"""
FRAME = """.visible .entry k(.param .u64 p, .param .u64 q, .param .u32 n, .param .align 64 .b8 m[128])
{ .reg .b64 %rd<16>; .reg .b32 %r<16>; .reg .b16 %h<8>; .reg .pred %p<8>; .reg .f32 %f<8>; .reg .b128 %q<4>;
  .shared .align 16 .b8 sm[1024]; .shared .align 8 .b64 bar; .local .align 8 .b8 lo[64];
  ld.param.u64 %rd1, [p]; ld.param.u64 %rd2, [q]; ld.param.u32 %r1, [n]; mov.u32 %r2, %tid.x;
  mul.wide.u32 %rd3, %r2, 4; add.u64 %rd4, %rd1, %rd3; add.u64 %rd5, %rd2, %rd3; mov.u32 %r9, sm; mov.u64 %rd9, m;
  cvta.param.u64 %rd8, %rd9;
"""


def probe(body: str, declarations: str = "") -> Module:
    """A kernel `k` by hand. It begins with %rd1 = p, %rd2 = q, %r1 = n, %r2 = tid.x, %rd4 = p + 4 tid, %rd5 = q + 4 tid, %r9 the
    address of 1024 bytes of shared memory, and %rd8 that of the parameter m, a tensor map."""
    return parse(f"{HEAD}{declarations}\n{FRAME}{body}\nret; }}", name="probe.ptx")
