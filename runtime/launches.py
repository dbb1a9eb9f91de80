"""Call compiled code once and see every kernel that it launches, with what it is launched on.

    with capturing_launches() as seen:
        compiled.call(values)
    for launch in seen: print(launch.kind, launch.name, launch.grid, launch.args)

What is seen:

- Triton kernels that Inductor compiled, its own and the user's (``CachingAutotuner``), and those that Python code launches, in a
  custom operator for example (``JITFunction``): with PTX, grid and the value of every parameter;
- CUDA C++ launched through ``cuda.core``: with PTX where the object code is PTX;
- operators, ATen's and custom ones, that are called with tensors: with the exact extents of these, and which of them the schema
  says are written. What they launch themselves cannot be seen where it is machine code of a library; of a custom operator
  that is written in Python it is seen, and listed as the launches ``inside``.

Kernels in C++ of Inductor's for CPUs, CUDA graphs, and launches of extension modules are not seen.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..passes import torch_compat
from ..passes.errors import TesseraError
from ..ptx_tools.footprints import Box, Intervals
from ..ptx_tools.launch import TensorMap
from .copies import extent

#: Runs of bytes up to which the elements of a strided tensor are told apart.
MOST_RUNS = 1 << 18

_BUILTIN = {"aten", "prims", "prim", "inductor", "rngprims", "_c10d_functional"}
#: Beginnings of names of operators that touch no contents, and what marks those that take a tensor for its shape alone.
_NO_ACCESS = ("empty", "new_empty", "_reinterpret", "resize_", "set_", "record_stream", "sym_", "is_pinned", "_unsafe_view")
_SHAPE_ALONE = re.compile(r"_like$|::new_")
_lock = threading.RLock()


class Refused(TesseraError):
    """A launch was not allowed; raised through the code that wanted it."""


@dataclass(frozen=True, eq=False)
class Extent:
    """Where a tensor lies: address of its first element, shape and strides in elements, and its storage's address and bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    storage: tuple[int, int]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Extent:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        address = start + extent(tensor)[0]
        return cls(
            address, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device, (start, int(storage.nbytes()))
        )

    def intervals(self) -> Intervals:
        """The bytes of the elements, by address; all from the first to the last where they are too scattered."""
        size = self.dtype.itemsize
        if 0 in self.shape:
            return Intervals.of(())
        run, outer = size, list[tuple[int, int]]()
        for stride, count in sorted((s * size, n) for n, s in zip(self.shape, self.strides, strict=True) if n > 1 and s):
            if stride <= run:
                run = stride * (count - 1) + run
            else:
                outer.append((count, stride))
        if math.prod(n for n, _ in outer) > MOST_RUNS:
            return Intervals.of([(self.address, self.address + run + sum((n - 1) * s for n, s in outer))])
        outer.reverse()
        return Box(self.address, (*(n for n, _ in outer), run), (*(s for _, s in outer), 1)).intervals()

    def whole(self) -> Intervals:
        """All bytes of the storage: where a kernel that computes with the pointer may go."""
        return Intervals.of([(self.storage[0], self.storage[0] + self.storage[1])])


@dataclass(frozen=True, eq=False)
class Tiles:
    """A tensor that a kernel copies tiles of, through a map that the host has encoded."""

    extent: Extent
    map: TensorMap


Argument = Extent | Tiles | int | float | None


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch.

    kind: ``triton``, ``cuda`` or ``library`` (an operator). digest: SHA-256 of the machine code, or of the PTX where that is not
    at hand; "" for operators. ptx: None where there is none; ``opaque`` says why, and what else hinders. args: (parameter, value)
    in the order of the PTX's parameters, trailing ones that the launcher adds left out; tensors as extents. written: parameters
    that may be written, by schema or by generated names; None where nothing says. tensors: the live tensors by parameter. again:
    launches the same kernel with other values, in order; None where that is not possible. inside: what ``on_launch`` made of the
    launches that an operator made.
    """

    kind: Literal["triton", "cuda", "library"]
    name: str
    digest: str
    ptx: str | None
    grid: tuple[int, int, int]
    block: int | tuple[int, int, int] | None
    args: tuple[tuple[str, Argument], ...]
    shared_bytes: int = 0
    opaque: str = ""
    written: frozenset[str] | None = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)
    kernel: Any = field(default=None, repr=False)
    again: Callable[[Sequence[Any]], None] | None = field(default=None, repr=False)
    inside: tuple[Any, ...] = ()


@dataclass
class _Capture:
    on_launch: Callable[[Launch], Any]
    before: Callable[[str, str | None], None] | None
    thread: int = field(default_factory=threading.get_ident)
    levels: list[list[Any]] = field(default_factory=lambda: [[]])
    paused: int = 0

    @property
    def here(self) -> bool:
        return not self.paused and threading.get_ident() == self.thread

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def note(self, launch: Launch) -> None:
        with self.pause():
            self.levels[-1].append(self.on_launch(launch))

    def ask(self, name: str, ptx: str | None) -> None:
        if self.before is not None:
            with self.pause():
                self.before(name, ptx)


@contextlib.contextmanager
def capturing_launches(
    on_launch: Callable[[Launch], Any] | None = None, before: Callable[[str, str | None], None] | None = None
) -> Iterator[list[Any]]:
    """Sees the launches of this thread for the length of the block; one block at a time in a process.

    The list that it gives fills with what ``on_launch`` makes of each launch right after it was made, by default the launch
    itself. ``before`` is called with name and PTX of a kernel before it is launched, of every candidate where one is yet to be
    chosen by timing; it raises :class:`Refused` to keep it from being launched. It is not asked about operators.
    """
    with _lock, contextlib.ExitStack() as patches:
        capture = _Capture(on_launch or (lambda launch: launch), before)
        for owner, name, made in _replacements(capture):
            old = getattr(owner, name)
            setattr(owner, name, made(old))
            patches.callback(setattr, owner, name, old)
        with _Operators(capture):
            yield capture.levels[0]


def _replacements(capture: _Capture) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    try:
        import triton
    except ImportError:
        triton = None
    if triton is not None:
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.jit import JITFunction

        yield torch_compat.caching_autotuner(), "run", lambda old: _inductor_run(capture, old)
        yield JITFunction, "run", lambda old: _jit_run(capture, old)
        yield Autotuner, "_bench", lambda old: _bench(capture, old)
    core = sys.modules.get("cuda.core")
    launch = getattr(core, "launch", None)
    if launch is not None:
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is launch:
                    yield module, name, lambda old: _core_launch(capture, old)


# -- Triton, compiled by Inductor


def _inductor_run(capture: _Capture, original: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, stream: Any, benchmark_run: bool = False, **kwargs: Any) -> Any:
        if benchmark_run or not capture.here:
            return original(self, *args, stream=stream, benchmark_run=benchmark_run, **kwargs)
        if capture.before is not None:
            for kernel in torch_compat.autotuner_kernels(self):
                capture.ask(self.fn.__name__, _ptx(kernel, args))
        with capture.pause():  # What it tries out to choose a configuration is no launch of the model's.
            result = original(self, *args, stream=stream, **kwargs)
        kernel, grid, names, values, again = torch_compat.autotuner_launch(self, args, kwargs, stream)
        written = torch_compat.autotuner_writes(self)
        capture.note(_triton(kernel, self.fn.__name__, grid, names, values, again, written))
        return result

    return run


def _ptx(kernel: Any, args: Sequence[Any]) -> str | None:
    asm = getattr(kernel, "asm", None)
    if asm is not None:
        return asm.get("ptx")  # type: ignore[no-any-return]
    device = next((a.device.index for a in args if isinstance(a, torch.Tensor) and a.is_cuda), None) or 0
    return torch_compat.triton_ptx(kernel.hash, kernel.name, device)


def _digest(kernel: Any, ptx: str | None) -> str:
    asm = getattr(kernel, "asm", None)
    code = asm.get("cubin") if asm is not None else None
    if code is None and ptx is not None:
        code = ptx.encode()
    return hashlib.sha256(code).hexdigest() if code is not None else str(kernel.hash)


def _triton(
    kernel: Any, name: str, grid: tuple[int, int, int], names: Sequence[str], values: Sequence[Any],
    again: Callable[[Sequence[Any]], None], written: frozenset[str] | None,
) -> Launch:  # fmt: skip
    metadata = getattr(kernel, "metadata", None)
    warps = getattr(metadata, "num_warps", None) or kernel.num_warps
    shared = getattr(metadata, "shared", None)
    ptx, opaque = _ptx(kernel, values), ""
    if ptx is None:
        opaque = "its PTX is in no cache of Triton's"
    elif (getattr(metadata, "num_ctas", 1) or 1) != 1:
        opaque = "it is launched in clusters"
    tensors = {n: v for n, v in zip(names, values, strict=True) if isinstance(v, torch.Tensor)}
    args: list[tuple[str, Argument]] = []
    maps = iter(getattr(metadata, "tensordesc_meta", None) or ())
    for parameter, value in zip(names, values, strict=True):
        if isinstance(value, torch.Tensor):
            args.append((parameter, Extent.of(value)))
        elif hasattr(value, "block_shape") and (tiled := _tiles(parameter, value, next(maps, None))):
            args += tiled
            written = None
            again = _not_again
        elif isinstance(value, bool | int | float | torch.SymInt):
            args.append((parameter, value if isinstance(value, float) else int(value)))
        else:
            opaque = opaque or f"its parameter {parameter} is a {type(value).__name__}"
            found = _tensors_in(value)
            args += [(f"{parameter}.{i}", Extent.of(t)) for i, t in enumerate(found)]
            written = None if found else written
    return Launch(
        "triton",
        str(getattr(metadata, "name", None) or getattr(kernel, "name", name)),
        _digest(kernel, ptx),
        ptx,
        grid,
        32 * warps,
        tuple(args),
        int((kernel.shared if shared is None else shared) or 0),
        opaque,
        written,
        tensors,
        kernel,
        None if opaque or again is _not_again else again,
    )


def _not_again(values: Sequence[Any]) -> None:
    raise TesseraError("a kernel that copies through tensor maps is not launched again: its maps are of the tensors it had")


def _tiles(parameter: str, value: Any, meta: Any) -> list[tuple[str, Argument]] | None:
    """What a tensor descriptor becomes among a kernel's parameters: the map, the sizes and the strides; None where it does not.

    meta: how the compiler wants the map encoded; without it the kernel takes no map.
    """
    if not meta or meta.get("fp4_padded") or meta.get("is_im2col") or not isinstance(value.base, torch.Tensor):
        return None
    size = value.base.element_size()
    shape, strides = [int(n) for n in value.shape], [int(n) for n in value.strides]
    box = tuple(int(n) for n in reversed(meta["block_size"]))
    steps = tuple(size * n for n in reversed(strides[:-1]))
    map_ = TensorMap(value.base.data_ptr(), size, tuple(reversed(shape)), steps, box)
    numbers = [(f"{parameter}.shape.{i}", n) for i, n in enumerate(shape)]
    numbers += [(f"{parameter}.stride.{i}", n) for i, n in enumerate(strides)]
    return [(parameter, Tiles(Extent.of(value.base), map_)), *numbers]


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a tuple, or behind a tensor descriptor."""
    leaves = pytree.tree_leaves(value)
    return [t for leaf in leaves if isinstance(t := getattr(leaf, "base", leaf), torch.Tensor)]


# -- Triton, launched from Python


def _jit_run(capture: _Capture, original: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup or not capture.here:
            return original(self, *args, grid=grid, warmup=warmup, **kwargs)
        with capture.pause():
            kernel = original(self, *args, grid=grid, warmup=True, **kwargs)  # compiles, launches nothing
        capture.ask(kernel.metadata.name, kernel.asm.get("ptx"))
        launcher, seen = kernel.run, list[Any]()

        def spy(*given: Any) -> Any:
            seen[:] = given
            return launcher(*given)

        kernel._run = spy
        try:
            with capture.pause():
                result = original(self, *args, grid=grid, warmup=False, **kwargs)
        finally:
            kernel._run = launcher
        capture.note(_triton(*_of_runner(kernel, launcher, seen), None))
        return result

    return run


def _of_runner(
    kernel: Any, launcher: Any, seen: Sequence[Any]
) -> tuple[Any, str, tuple[int, int, int], list[str], list[Any], Any]:
    """What Triton's launcher was given (grid, stream, function, metadata, hooks, arguments) as arguments of :func:`_triton`."""
    grid, stream = tuple(int(n) for n in seen[:3]), seen[3]
    names, values, again = torch_compat.compiled_arguments(kernel, launcher, grid, stream, seen[5:9], seen[9:])
    return kernel, kernel.metadata.name, (grid[0], grid[1], grid[2]), names, values, again


def _bench(capture: _Capture, original: Callable[..., Any]) -> Callable[..., Any]:
    def bench(self: Any, *args: Any, **kwargs: Any) -> Any:
        if capture.before is not None and capture.here:
            # Each candidate would be launched to time it, and what it is is known only when it is compiled.
            raise Refused(f"{self.fn.__name__} is yet to be tuned, which launches it")
        with capture.pause():
            return original(self, *args, **kwargs)

    return bench


# -- CUDA C++ through cuda.core


def _core_launch(capture: _Capture, original: Callable[..., Any]) -> Callable[..., Any]:
    def launch(stream: Any, config: Any, kernel: Any, *args: Any) -> Any:
        if not capture.here:
            return original(stream, config, kernel, *args)
        name, code, is_ptx = _object_code(kernel)
        ptx = code.decode(errors="replace").rstrip("\0") if is_ptx else None
        capture.ask(name, ptx)
        with capture.pause():
            result = original(stream, config, kernel, *args)
        opaque = "" if ptx is not None else "its object code is not PTX, or is no longer there"
        given: list[tuple[str, Argument]] = []
        for number, value in enumerate(args):
            plain = _plain_argument(value)
            if plain is None:
                opaque = opaque or f"its argument {number} is a {type(value).__name__}"
            given.append((f"{name}_param_{number}", plain))
        if any(n != 1 for n in (getattr(config, "cluster", None) or (1,))):
            opaque = opaque or "it is launched in clusters"
        capture.note(
            Launch(
                "cuda",
                name,
                hashlib.sha256(code).hexdigest(),
                ptx,
                _three(config.grid),
                _three(config.block),
                tuple(given),
                int(config.shmem_size or 0),
                opaque,
            )
        )
        return result

    return launch


def _three(numbers: Any) -> tuple[int, int, int]:
    x, y, z = (*(numbers if isinstance(numbers, tuple | list) else (numbers,)), 1, 1)[:3]
    return int(x), int(y), int(z)


def _plain_argument(value: Any) -> int | float | Extent | None:
    if isinstance(value, torch.Tensor):
        return Extent.of(value)
    if isinstance(value, bool | int | float):
        return value if isinstance(value, float) else int(value)
    if isinstance(value, np.integer | np.bool_):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    inner: Any = getattr(value, "value", getattr(value, "handle", None))  # ctypes; a buffer of cuda.core
    return inner if isinstance(inner, int | float) else int(inner) if hasattr(inner, "__int__") else None


def _object_code(kernel: Any) -> tuple[str, bytes, bool]:
    """Name of a kernel of cuda.core, the code that it was loaded from, and whether that is PTX."""
    from cuda.bindings import driver

    held: Any = kernel.handle if hasattr(kernel, "handle") else kernel._handle
    handle = int(held)
    error, name = driver.cuKernelGetName(driver.CUkernel(handle))
    error_, library = driver.cuKernelGetLibrary(driver.CUkernel(handle))
    if int(error) or int(error_):
        raise TesseraError(f"the driver does not know the kernel that cuda.core launches (errors {error}, {error_})")
    for found in gc.get_objects():
        if type(found).__name__ == "ObjectCode" and int(found.handle) == int(library):
            code = found.code
            if isinstance(code, str):
                with open(code, "rb") as file:
                    code = file.read()
            return name.decode(), bytes(code), found.code_type == "ptx"
    return name.decode(), str(handle).encode(), False  # dropped since: a kernel does not hold on to the text it came from


# -- operators


class _Operators(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, capture: _Capture) -> None:
        super().__init__()
        self.capture = capture

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        capture = self.capture
        if not capture.here:
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            return self._seen(func, str(func), args, kwargs, lambda: func(*args, **kwargs), None)
        schema = func._schema
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if view or (func.namespace in _BUILTIN and schema.name.split("::")[1].startswith(_NO_ACCESS)):
            return func(*args, **kwargs)

        def call() -> Any:
            devices = {t.device.type for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            if func.namespace in _BUILTIN or not devices:
                return func(*args, **kwargs)
            device = "cuda" if "cuda" in devices else devices.pop()
            with self:  # Its implementation may be Python: what that calls and launches is seen as well.
                return torch_compat.call_for_device(func, device, args, kwargs)

        return self._seen(func, str(func), args, kwargs, call, schema)

    def _seen(self, func: Any, name: str, args: Any, kwargs: Any, call: Callable[[], Any], schema: Any) -> Any:
        given = _arguments(schema, args, kwargs)
        if schema is not None and func.namespace in _BUILTIN and _SHAPE_ALONE.search(schema.name):
            given = []
        capture = self.capture
        capture.levels.append([])
        try:
            result = call()
        finally:
            inside = capture.levels.pop()
        written = {n for n, _, w in given if w}
        for number, leaf in enumerate(t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)):
            given.append((f"result_{number}", leaf, True))
            written.add(f"result_{number}")
        opaque = ""
        listed: list[tuple[str, Argument]] = []
        for parameter, tensor, _ in given:
            if tensor.layout == torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter):
                listed.append((parameter, Extent.of(tensor)))
            else:
                opaque = f"its argument {parameter} is a {type(tensor).__name__} of layout {tensor.layout}"
        capture.note(
            Launch(
                "library", name, "", None, (1, 1, 1), None, tuple(listed), 0, opaque, frozenset(written),
                {n: t for n, t, _ in given}, func, inside=tuple(inside),
            )
        )  # fmt: skip
        return result


def _arguments(schema: Any, args: Any, kwargs: Any) -> list[tuple[str, torch.Tensor, bool]]:
    """(name, tensor, whether the schema says that it is written) of the tensors that an operator is called with."""
    found: list[tuple[str, torch.Tensor, bool]] = []
    if schema is None:
        leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        return [(f"argument_{i}", t, False) for i, t in enumerate(leaves)]
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
        single = isinstance(value, torch.Tensor)
        found += [(argument.name if single else f"{argument.name}.{i}", t, writes) for i, t in enumerate(tensors)]
    return found
