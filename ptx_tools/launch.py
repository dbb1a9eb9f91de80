"""What a kernel is launched on: buffers, numbers and tensor maps, and the addresses they have while it is interpreted."""

from __future__ import annotations

import numbers
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .syntax import TYPE_BYTES, Module, PtxError, Variable

# Generic addresses of what is not global memory. Real GPUs put their windows elsewhere; only the distances matter.
SHARED_WINDOW = 1 << 60
LOCAL_WINDOW = 2 << 60
PARAM_WINDOW = 3 << 60
CONST_WINDOW = 4 << 60
WINDOW = 1 << 60
VARIABLES_BASE = 0x6000_0000_0000
"""Where `.global` variables of the module lie; each is 256-byte aligned, apart from the next."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory that a pointer argument points to: `nbytes` from `addr` on.

    contents: the bytes, where they are known and may be used; without them a value that is loaded is unknown, and a kernel whose
    addresses depend on it has no footprint.
    """

    addr: int
    nbytes: int
    contents: bytes | npt.NDArray[Any] | None = None

    def __post_init__(self) -> None:
        if self.addr < 0 or self.nbytes < 0 or self.addr + self.nbytes >= SHARED_WINDOW:
            raise ValueError(f"Buffer(addr={self.addr:#x}, nbytes={self.nbytes}): both must be positive and lie below 2^60")
        if self.contents is not None and len(self.data()) != self.nbytes:
            raise ValueError(f"Buffer at {self.addr:#x} has {self.nbytes} bytes and contents of {len(self.data())}")

    def data(self) -> npt.NDArray[np.uint8]:
        assert self.contents is not None
        if isinstance(self.contents, np.ndarray):
            return np.ascontiguousarray(self.contents).reshape(-1).view(np.uint8)
        return np.frombuffer(self.contents, np.uint8)


@dataclass(frozen=True)
class TensorMap:
    """A tiled CUtensorMap, in the order of cuTensorMapEncodeTiled: innermost dimension first.

    addr: global address of the tensor. element_bytes: size of an element.
    shape: elements in each dimension. strides: bytes of one step in dimensions 1, 2, …, one fewer than shape.
    box: elements the copy takes in each dimension. element_strides: steps between them, 1 where None; the first is ignored, as
    the hardware does.
    """

    addr: int
    element_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        rank = len(self.shape)
        if not 1 <= rank <= 5 or len(self.strides) != rank - 1 or len(self.box) != rank:
            raise ValueError(
                f"TensorMap: shape {self.shape} needs 1 to 5 dimensions, one stride fewer (got {self.strides}) and a box of the "
                f"same rank (got {self.box})"
            )
        if self.element_strides is not None and len(self.element_strides) != rank:
            raise ValueError(f"TensorMap: element_strides {self.element_strides} must have {rank} entries")

    @property
    def nbytes(self) -> int:
        """Distance from the first byte to the end of the last element."""
        if 0 in self.shape:
            return 0
        steps = (self.element_bytes, *self.strides)
        return sum((n - 1) * s for n, s in zip(self.shape, steps, strict=True)) + self.element_bytes

    def rows(self, coordinates: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Starts and ends, absolute, of what the box touches at each row of `coordinates` (n x rank); parts out of bounds are not
        touched. Source: PTX ISA, "Tensors", bounding box and traversal stride."""
        rank = len(self.shape)
        steps = (self.element_bytes, *self.strides)
        strides = self.element_strides or (1,) * rank  # the innermost dimension knows no stride where nothing is interleaved
        start = np.full(len(coordinates), self.addr, np.int64)
        ok = np.ones(len(coordinates), bool)
        starts, oks = start[:, None], ok[:, None]
        for d in range(rank - 1, 0, -1):
            at = coordinates[:, d : d + 1] + np.arange(0, self.box[d], strides[d], dtype=np.int64)
            inside = (at >= 0) & (at < self.shape[d])
            n = len(coordinates)
            starts = (starts[:, :, None] + (at * steps[d])[:, None, :]).reshape(n, -1)
            oks = (oks[:, :, None] & inside[:, None, :]).reshape(n, -1)
        low = np.clip(coordinates[:, 0], 0, self.shape[0])[:, None]
        high = np.clip(coordinates[:, 0] + self.box[0], 0, self.shape[0])[:, None]
        keep = oks & (high > low)
        return (starts + low * self.element_bytes)[keep], (starts + high * self.element_bytes)[keep]


Argument = Buffer | TensorMap | int | float | bytes | None


@dataclass
class Launch:
    """The parameter block of a launch: `block` holds its bytes, `known` which of them have a value."""

    block: npt.NDArray[np.uint8]
    known: npt.NDArray[np.bool_]
    offsets: dict[str, int]
    maps: dict[int, TensorMap]
    buffers: list[tuple[str, Buffer]]
    params: tuple[Variable, ...] = field(default=())


def bind_arguments(
    module: Module, kernel: str, params: Sequence[Variable], args: Sequence[Argument] | Mapping[str, Argument]
) -> Launch:
    """Lay the arguments out as the driver does.

    `args` go by position, or by parameter name. Trailing parameters may be left out and None stands for one that is not known: a
    kernel that needs such a value has no footprint. Raises ValueError where the count or the kind does not fit.
    """
    names = [p.name for p in params]
    if isinstance(args, Mapping):
        unknown = [name for name in args if name not in names]
        if unknown:
            raise ValueError(f"{kernel} has no parameter {unknown[0]!r}; it has {', '.join(names) or 'none'}")
        values: list[Argument] = [args.get(name) for name in names]
    else:
        if len(args) > len(params):
            raise ValueError(f"{kernel} takes {len(params)} arguments, got {len(args)}")
        values = [*args, *[None] * (len(params) - len(args))]
    offset, offsets = 0, {}
    for param in params:
        if param.nbytes is None:
            raise PtxError(f"{module.where(param.span)}: parameter {param.name} has no size")
        offset = -(-offset // param.align) * param.align
        offsets[param.name] = offset
        offset += param.nbytes
    launch = Launch(np.zeros(offset, np.uint8), np.zeros(offset, bool), offsets, {}, [], tuple(params))
    for param, value in zip(params, values, strict=True):
        if value is None:
            continue
        at, size = offsets[param.name], param.nbytes or 0
        if isinstance(value, TensorMap):
            if size != 128:
                raise ValueError(f"{kernel}: parameter {param.name} has {size} bytes, so it is no tensor map")
            launch.maps[at] = value
            launch.buffers.append((param.name, Buffer(value.addr, value.nbytes)))
            continue
        if isinstance(value, numbers.Integral) and not isinstance(value, int):
            value = int(value)
        elif isinstance(value, numbers.Real) and not isinstance(value, int | float):
            value = float(value)
        if not isinstance(value, Buffer | int | float | bytes):
            raise ValueError(
                f"{kernel}: parameter {param.name} got {type(value).__name__} {value!r}; it takes a Buffer, a TensorMap, a "
                "number, bytes, or None where it is not known"
            )
        raw = _encode(kernel, param, value)
        if isinstance(value, Buffer):
            launch.buffers.append((param.name, value))
        launch.block[at : at + size] = np.frombuffer(raw, np.uint8)
        launch.known[at : at + size] = True
    return launch


def _encode(kernel: str, param: Variable, value: Buffer | int | float | bytes) -> bytes:
    size = param.nbytes or 0
    if isinstance(value, bytes):
        if len(value) != size:
            raise ValueError(f"{kernel}: parameter {param.name} has {size} bytes, got {len(value)}")
        return value
    if param.dims or param.type not in TYPE_BYTES:
        raise ValueError(f"{kernel}: parameter {param.name} is a struct of {size} bytes; pass its bytes, not {value!r}")
    if isinstance(value, Buffer):
        if size != 8:
            raise ValueError(f"{kernel}: parameter {param.name} has {size} bytes, so it is no pointer")
        return struct.pack("<Q", value.addr)
    if isinstance(value, float):
        if param.type[0] in "us":
            raise ValueError(f"{kernel}: parameter {param.name} is a whole number ({param.type}), got {value!r}")
        if size not in (2, 4, 8):
            raise ValueError(f"{kernel}: parameter {param.name} has {size} bytes, so it is no float")
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], value)
    if param.type[0] == "f":
        return _encode(kernel, param, float(value))
    bits = 8 * size
    if not -(1 << (bits - 1)) <= value < 1 << bits:
        raise ValueError(f"{kernel}: {value} does not fit parameter {param.name} of {size} bytes")
    return (value & ((1 << bits) - 1)).to_bytes(size, "little")
