"""Launching kernels of the corpus in the interpreter, and comparing with marks: one flag for each element that should be touched."""

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
