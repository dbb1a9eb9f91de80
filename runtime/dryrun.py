"""Run a kernel instrumented, on copies of its tensors, and read back which bytes it touched.

    arena = Arena({"x_ptr": x, "out_ptr": out})
    with recording(compiled, arena) as record:
        compiled[grid](arena["x_ptr"], arena["out_ptr"], n)
    record.footprint["x_ptr"].reads

`compiled` is anything that launches the CUfunction in its attribute ``function``: a Triton ``CompiledKernel``, a kernel of
Inductor's static launcher (give its PTX), or a :class:`PtxKernel`, which loads PTX of any origin. The function is replaced
for the length of the block and put back, also when the launch fails. Nothing of the user's is launched on: the arena holds
copies, in one allocation, so that recording needs one range check.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..passes import torch_compat
from ..passes.errors import TesseraError
from ..ptx_tools import Buffer, Footprint, PtxError, TensorMap, parse
from ..ptx_tools.instrumentation import Control, Instrumented, Recording, instrument, read_maps
from ..ptx_tools.syntax import Module
from .copies import extent

_ALIGN = 256
_SMALL_SHARED = 48 * 1024
_REGISTERS_OF_A_BLOCK = 65536


class DryRunError(TesseraError):
    """A kernel could not be run instrumented; the message says why."""


class Arena:
    """Copies of tensors in one allocation on their device. Tensors that share storage share it in the arena too.

    ``arena[name]`` is the copy, with the shape, strides and dtype of the original; ``arena.buffers`` has their address ranges.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        devices = {t.device for t in tensors.values()}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            raise DryRunError(f"an arena holds tensors of one CUDA device, got {', '.join(map(str, devices)) or 'none'}")
        spans: dict[int, tuple[int, int]] = {}
        for tensor in tensors.values():
            key = tensor.untyped_storage().data_ptr()
            low, high = extent(tensor)
            old = spans.get(key, (low, high))
            spans[key] = (min(low, old[0]), max(high, old[1]))
        at = 0
        places: dict[int, int] = {}
        for key, (low, high) in spans.items():
            places[key] = at
            at += -(-(high - low) // _ALIGN) * _ALIGN + _ALIGN
        self.device = next(iter(devices))
        self.memory = torch.zeros(max(at, _ALIGN), dtype=torch.uint8, device=self.device)
        self.views: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, Buffer] = {}
        for name, tensor in tensors.items():
            key = tensor.untyped_storage().data_ptr()
            low, high = extent(tensor)
            start = places[key] + low - spans[key][0]
            size = tensor.element_size()
            if start % size:
                raise DryRunError(f"tensor {name} is not aligned to its elements of {size} bytes")
            raw = self.memory[start : start + high - low].view(tensor.dtype)
            view = torch.as_strided(raw, tensor.shape, tensor.stride(), raw.storage_offset())
            view.copy_(tensor)
            self.views[name] = view
            self.buffers[name] = Buffer(self.memory.data_ptr() + start, high - low)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.views[name]


@dataclass
class Record:
    """What a recorded launch left behind; ``footprint`` is there once the block has ended."""

    instrumented: Instrumented
    registers: int
    _footprint: Footprint | None = field(default=None, repr=False)

    @property
    def footprint(self) -> Footprint:
        if self._footprint is None:
            raise DryRunError("the footprint is read when the recording block ends")
        return self._footprint


class PtxKernel:
    """A kernel of a PTX module, loaded through the driver. ``function`` is its CUfunction, which ``launch`` launches.

    Raises DryRunError where the module is for another GPU, or the driver or ptxas refuses it.
    """

    def __init__(
        self,
        ptx: str,
        name: str | None = None,
        *,
        threads: int = 1024,
        shared_bytes: int = 0,
        device: torch.device | int | None = None,
    ) -> None:
        self.ptx = ptx
        module = parse(ptx, name="<kernel>")
        self.name = module.kernel(name).name
        self.params = module.kernel(name).params or ()
        self.threads, self.shared_bytes = threads, shared_bytes
        self.loaded = _load(module, ptx, self.name, threads, shared_bytes, _index(device))
        self.function: int = self.loaded.function

    def launch(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any]) -> None:
        """Launch on the current stream of the current device; args are tensors, ints, floats and bytes, one a parameter."""
        from cuda.bindings import driver

        if len(args) != len(self.params):
            raise DryRunError(f"{self.name} takes {len(self.params)} arguments, got {len(args)}")
        held = [_argument(param.type, param.nbytes or 0, value) for param, value in zip(self.params, args, strict=True)]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(h) for h in held))
        gx, gy, gz = (*grid, 1, 1)[:3]
        bx, by, bz = (*block, 1, 1)[:3]
        stream = torch.cuda.current_stream().cuda_stream
        _check(
            driver.cuLaunchKernel(
                self.function, gx, gy, gz, bx, by, bz, self.shared_bytes, stream, ctypes.addressof(pointers), 0
            ),
            f"launching {self.name}",
        )


def _argument(kind: str, nbytes: int, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ctypes.c_uint64(value.data_ptr())
    if isinstance(value, bytes):
        return (ctypes.c_char * nbytes).from_buffer_copy(value)
    if isinstance(value, float) or kind[0] == "f":
        return ctypes.c_double(value) if nbytes == 8 else ctypes.c_float(value)
    wide = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}[nbytes]
    return wide(int(value) & ((1 << 8 * nbytes) - 1))


@contextmanager
def recording(
    kernel: Any, arena: Arena, *, ptx: str | None = None, name: str | None = None, threads: int | None = None,
    shared_bytes: int | None = None, scheme: str = "shadow", maps: Mapping[str, TensorMap] | None = None, events: int = 1 << 20,
) -> Iterator[Record]:  # fmt: skip
    """Replace ``kernel.function`` by an instrumented one for the length of the block.

    ptx, name, threads, shared_bytes: of the kernel, where the object does not say (Inductor's static launcher). maps: tensor
    maps by kernel parameter, for kernels that copy through them. events: how many bulk copies fit into the log.

    Raises DryRunError before anything is launched where the kernel cannot be recorded exactly, and PtxError at the end where
    the record is incomplete (an access outside the arena, more events than fit).
    """
    text, name_, threads_, shared_ = _describe(kernel, ptx, name, threads, shared_bytes)
    module = parse(text, name=f"<{name_}>")
    made = instrument(module, scheme)
    reasons = made.kernels[name_].incomplete
    if reasons:
        raise DryRunError(f"{name_} has no exact record: {reasons[0]}")
    loaded = _load(module, made.text, name_, threads_, shared_, arena.device.index or 0)
    nbytes = arena.memory.numel()
    per_map = made.map_bytes(nbytes)
    # One allocation: reads, writes, the log of events, one flag a site. All start at multiples of 128.
    log_at, flags_at = 2 * _up(per_map), 2 * _up(per_map) + _up(made.event_bytes(events))
    maps_memory = torch.zeros(flags_at + _up(max(len(made.sites), 1)), dtype=torch.uint8, device=arena.device)
    base = maps_memory.data_ptr()
    control = Control(
        arena=arena.memory.data_ptr(),
        arena_bytes=nbytes,
        read_map=base,
        write_map=base + _up(per_map),
        outside=base + flags_at,
        events=base + log_at,
        capacity=events,
    )
    _set_global(loaded.library, made.control, control.pack())
    record = Record(made, loaded.registers)
    before = kernel.function
    torch.cuda.synchronize(arena.device)
    kernel.function = loaded.function
    try:
        yield record
        torch.cuda.synchronize(arena.device)
    finally:
        kernel.function = before
    raw = maps_memory.cpu().numpy()
    recorded = Recording(
        raw[:per_map],
        raw[_up(per_map) : _up(per_map) + per_map],
        outside=raw[flags_at : flags_at + len(made.sites)],
        events=raw[log_at : log_at + made.event_bytes(events)],
    )
    by_key: dict[str | int, TensorMap] = dict((maps or {}).items())
    record._footprint = read_maps(made, name_, control, recorded, arena.buffers, by_key)
    loaded.unload()


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _describe(
    kernel: Any, ptx: str | None, name: str | None, threads: int | None, shared: int | None
) -> tuple[str, str, int, int]:
    """PTX, name, threads a block and dynamic shared memory of a launchable kernel object."""
    metadata = getattr(kernel, "metadata", None)
    text = ptx or getattr(kernel, "ptx", None) or (getattr(kernel, "asm", None) or {}).get("ptx")
    if text is None and getattr(kernel, "hash", None):  # Inductor's static launcher
        text = torch_compat.triton_ptx(kernel.hash, kernel.name, torch.cuda.current_device())
    if text is None:
        raise DryRunError("the kernel object does not carry its PTX; pass ptx=")
    if metadata is not None and hasattr(kernel, "_init_handles"):
        kernel._init_handles()  # Triton loads a kernel at its first launch
    found = name or getattr(metadata, "name", None) or getattr(kernel, "name", None)
    if found is None:
        found = parse(text, name="<kernel>").kernel(None).name
    if threads is None:
        warps = getattr(metadata, "num_warps", None) or getattr(kernel, "num_warps", None)
        threads = 32 * warps if warps else getattr(kernel, "threads", 1024)
    if shared is None:
        shared = getattr(metadata, "shared", None)
        if shared is None:
            shared = getattr(kernel, "shared_bytes", getattr(kernel, "shared", 0))
    return text, found, threads, shared or 0


# -- the driver


@dataclass
class _Loaded:
    library: Any
    function: int
    registers: int

    def unload(self) -> None:
        from cuda.bindings import driver

        _check(driver.cuLibraryUnload(self.library), "unloading a module")


def _load(module: Module, text: str, name: str, threads: int, shared_bytes: int, device: int) -> _Loaded:
    """Assemble and load ``text``; limits the registers where a block would not fit otherwise."""
    _check_target(module, device)
    torch.cuda.init()
    loaded = _load_once(text, name, device)
    if loaded.registers * threads > _REGISTERS_OF_A_BLOCK:
        loaded.unload()
        most = _REGISTERS_OF_A_BLOCK // threads // 8 * 8
        kernel = parse(text, name=module.name).kernel(name)
        assert kernel.body is not None
        at = kernel.body.span[0]
        loaded = _load_once(f"{text[:at]} .maxnreg {most}\n{text[at:]}", name, device)
    if shared_bytes > _SMALL_SHARED:
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(
            driver.cuFuncSetAttribute(loaded.function, attribute, shared_bytes),
            f"giving {name} {shared_bytes} bytes of shared memory",
        )
    return loaded


def _load_once(text: str, name: str, device: int) -> _Loaded:
    from cuda.bindings import driver

    from ..ptx_tools.assembling import assemble

    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's primary context current
        try:
            image = assemble(text).cubin
        except FileNotFoundError:  # no ptxas here: the driver compiles PTX itself
            image = text.encode() + b"\0"
        except PtxError as error:
            raise DryRunError(f"{name} does not assemble: {error}") from error
        (library,) = _check(driver.cuLibraryLoadData(image, [], [], 0, [], [], 0), f"loading {name}")
        (kernel,) = _check(driver.cuLibraryGetKernel(library, name.encode()), f"finding {name}")
        (function,) = _check(driver.cuKernelGetFunction(kernel), f"finding {name}")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        (registers,) = _check(driver.cuFuncGetAttribute(attribute, function), f"asking about {name}")
    return _Loaded(library, int(function), int(registers))


def _check_target(module: Module, device: int) -> None:
    """A module runs on its own architecture; `a` targets on nothing else, plain ones on newer GPUs through the driver alone."""
    major, minor = torch.cuda.get_device_capability(device)
    digits = "".join(c for c in module.target if c.isdigit())
    if digits != f"{major}{minor}":
        raise DryRunError(
            f"the module is for {module.target}, the device {torch.cuda.get_device_name(device)} is sm_{major}{minor}"
        )


def _set_global(library: Any, name: str, data: bytes) -> None:
    from cuda.bindings import driver

    pointer, size = _check(driver.cuLibraryGetGlobal(library, name.encode()), f"finding {name}")
    if size < len(data):
        raise DryRunError(f"{name} has {size} bytes, the control block {len(data)}")
    _check(driver.cuMemcpyHtoD(pointer, data, len(data)), f"setting {name}")


def _check(result: Any, what: str) -> tuple[Any, ...]:
    """(error, values…) of cuda.bindings → values."""
    error, *values = result
    if int(error) != 0:
        from cuda.bindings import driver

        _, text = driver.cuGetErrorName(error)
        raise DryRunError(f"{what}: {text.decode() if text else error}")
    return tuple(values)


def _index(device: torch.device | int | None) -> int:
    if device is None:
        return torch.cuda.current_device()
    if isinstance(device, int):
        return device
    return device.index if device.index is not None else torch.cuda.current_device()
