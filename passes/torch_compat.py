"""The only file that names private parts of torch. A torch release that moves one of them breaks here and nowhere else.

Each function has a test of its own in ``tests/passes/test_torch_compat.py``. Supported: torch 2.11 to 2.13.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx

from .errors import TesseraError


def aot_inference(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inference_compiler: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
    training_compiler: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Runs AOTAutograd with Inductor's decompositions over a dynamo graph.

    ``inference_compiler`` gets the functional ATen graph, whose input mutations are trailing ``copy_`` nodes;
    ``training_compiler`` is called instead when gradients are needed.
    """
    import torch._inductor.lowering  # noqa: F401  (decompositions use it without importing it)
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    backend = aot_autograd(
        fw_compiler=training_compiler,
        inference_compiler=inference_compiler,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    result: Callable[..., Any] = backend(gm, example_inputs)
    return result


def inductor_compile(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Plain Inductor on a dynamo graph: what ``torch.compile`` does by default, training included."""
    from torch._inductor.compile_fx import compile_fx

    result: Any = compile_fx(gm, list(example_inputs))
    return result  # type: ignore[no-any-return]


def static_input_indices() -> tuple[int, ...]:
    """Positions of parameters and buffers among the inputs of the graph that AOTAutograd is compiling."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return () if metadata is None else tuple(metadata.static_input_indices)


def copy_dynamo_graph(gm: fx.GraphModule) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of the graph that dynamo hands to a backend, and fake inputs for it. Parameters can still be told from inputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    fakes = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            fakes.append(node.meta.get("example_value"))
            if hasattr(node, "_dynamo_source"):
                copies[node]._dynamo_source = node._dynamo_source
    copied = fx.GraphModule(gm, graph)
    copied.meta = dict(gm.meta)
    return copied, fakes


def resume_tracing() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Remembers the compilation that is going on; calling the result enters it again, after it has ended."""
    from torch._guards import TracingContext, tracing

    context = TracingContext.try_get()
    return lambda: tracing(context)


def current_fake_mode() -> Any:
    """The fake tensor mode of the graph being compiled, or None."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return None if context is None else context.fake_mode


def fake_mode_of(values: Sequence[Any]) -> Any:
    """The fake tensor mode that ``values`` belong to, or None."""
    from torch._subclasses.fake_tensor import FakeTensor

    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def new_fake_mode() -> Any:
    """A fake tensor mode that refuses data access and takes real tensors for constants."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_on(value: Any, device: torch.device) -> Any:
    """The fake tensor ``value`` as if it lay on ``device``, which need not exist: the same mode, symbolic sizes and storage."""
    from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

    with torch.no_grad(), in_kernel_invocation_manager(value.fake_mode):
        shell = torch.ops.aten.alias.default(value)  # A plain meta tensor on the fake one's storage.
    return FakeTensor(value.fake_mode, shell, device)


def stand_ins(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Fake tensors like ``tensors`` on ``device``, parameters for parameters, each in a storage of its own.

    Dynamo traces them as it does real ones. Whatever else combines them with real tensors fails.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    made: list[torch.Tensor] = []
    for tensor in tensors:
        with mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        fake = fake_on(fake, device)
        made.append(torch.nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else fake)
    return made


def in_current_mode(stand_in: torch.Tensor) -> torch.Tensor:
    """A stand-in as a fake tensor of the graph that is being compiled."""
    result: torch.Tensor = current_fake_mode().from_tensor(stand_in, static_shapes=True)
    return result


def cause_of(error: BaseException) -> BaseException:
    """What a backend raised, out of dynamo's wrapping; ``error`` itself where it is something else."""
    from torch._dynamo.exc import BackendCompilerFailed

    return error.inner_exception if isinstance(error, BackendCompilerFailed) else error


def fake_propagate(gm: fx.GraphModule, example_inputs: Sequence[Any], fake_mode: Any) -> None:
    """Fills ``meta["val"]`` of every node by running ``gm`` on fake copies of ``example_inputs``."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    FakeTensorProp(gm, mode=fake_mode).propagate(*example_inputs)


def needs_decomposing(gm: fx.GraphModule) -> bool:
    """Whether the graph calls operators that Inductor only takes in decomposed form (AOTAutograd has done it already)."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings

    table = select_decomp_table()
    return any(n.op == "call_function" and n.target in table and n.target not in lowerings for n in gm.graph.nodes)


def decompose(gm: fx.GraphModule, fake_inputs: Sequence[Any], fake_mode: Any) -> fx.GraphModule:
    """``gm`` traced again through Inductor's decompositions; nodes keep their module path and source line."""
    import torch._inductor.lowering  # noqa: F401  (decompositions use it without importing it)
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with fake_mode, fx.traceback.preserve_node_meta():
        result: fx.GraphModule = make_fx(fx.Interpreter(gm).run, select_decomp_table())(*fake_inputs)
    placeholders = ([n for n in g.graph.nodes if n.op == "placeholder"] for g in (gm, result))
    for old, new in zip(*placeholders, strict=True):
        new.target = old.target
        new._rename(old.name)
    result.recompile()
    return result


def joint_graph_passes(gm: fx.GraphModule, fake_mode: Any) -> fx.GraphModule:
    """Inductor's device-independent passes over the whole graph; random operators get explicit seed tensors. In place."""
    from torch._inductor.compile_fx import _recursive_joint_graph_passes
    from torch._inductor.virtualized import V

    with V.set_fake_mode(fake_mode):
        result: fx.GraphModule = _recursive_joint_graph_passes(gm)
    return result


@contextlib.contextmanager
def fresh_tracing(fake_mode: Any) -> Iterator[None]:
    """A tracing context of its own for the compilation of one segment."""
    from torch._guards import TracingContext, tracing

    with tracing(TracingContext(fake_mode)):
        yield


def inductor_compile_segment(gm: fx.GraphModule, fake_inputs: Sequence[Any], threads: int | None) -> Callable[[list[Any]], Any]:
    """Compiles one segment; the result is boxed: it takes a list, which it empties, and returns a sequence.

    All outputs keep the strides of their metadata. ``threads`` is baked into C++ kernels (None: torch's current setting).
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    metas = [n.meta.get("val") for n in gm.graph.nodes]
    fake_mode = fake_mode_of(fake_inputs) or fake_mode_of(metas) or new_fake_mode()
    output = next(iter(reversed(gm.graph.nodes)))
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    # That meta is not part of Inductor's cache key: without a tag of their own, segments would be served artefacts compiled
    # for a caller to whom strides do not matter.
    with (
        fresh_tracing(fake_mode),
        config.patch({"cpp.threads": -1 if threads is None else threads}),
        torch.compiler.config.patch(  # type: ignore[attr-defined]
            cache_key_tag=torch.compiler.config.cache_key_tag + "tessera"
        ),
    ):
        result: Callable[[list[Any]], Any] = compile_fx_inner(
            gm, list(fake_inputs), is_inference=True, cudagraphs=BoxedBool(False)
        )
    return result


def symbol_of(value: Any) -> str | None:
    """The symbol that a SymInt is, when it is exactly one (``"s0"``); None for expressions and plain ints."""
    if isinstance(value, torch.SymInt):
        expr = value.node.expr
        if expr.is_Symbol:
            return str(expr)
    return None


def free_symbols(values: Sequence[Any]) -> tuple[str, ...]:
    """Names of the symbols in the shapes, strides and offsets of ``values``, sorted."""
    from torch.fx.experimental.symbolic_shapes import free_symbols as torch_free_symbols

    names: set[str] = set()
    for value in values:
        if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            names.update(map(str, torch_free_symbols(value)))
    return tuple(sorted(names))


def has_unbacked(value: Any) -> bool:
    """Whether a tensor's shape, or a SymInt, depends on data (an unbacked symbol)."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) and bool(free_unbacked_symbols(value))


def size_hint(value: Any, fallback: int = 64) -> int:
    """The size that a dimension had in the example (``fallback`` where it depends on data)."""
    if isinstance(value, torch.SymInt):
        hint = value.node.hint
        return fallback if hint is None else int(hint)
    return int(value)


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage; equal for views. Unique among live storages."""
    return int(tensor.untyped_storage()._cdata)


def weak_storage(tensor: torch.Tensor) -> Any:
    """A reference that does not keep the storage's memory but keeps its identity from being reused."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


@contextlib.contextmanager
def unlimited_recompiles() -> Iterator[None]:
    """Lifts dynamo's limit on how often one function is compiled, beyond which it silently runs it uncompiled."""
    from torch._dynamo import config

    with config.patch(recompile_limit=sys.maxsize, accumulated_recompile_limit=sys.maxsize):
        yield


def calling_compile() -> Any:
    """The object that stands for one ``torch.compile`` call, when a backend is being called by it; else None."""
    frame = sys._getframe(1)
    for _ in range(8):
        if frame is None:
            return None
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch._TorchCompileWrapper):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def compile_of(compiled: Any) -> Any:
    """The same object, found from what ``torch.compile`` returned (or a module after ``module.compile()``); else None."""
    from torch._dynamo.eval_frame import OptimizedModule, innermost_backend

    if isinstance(compiled, OptimizedModule):
        contexts = [compiled.dynamo_ctx]
    else:
        function = compiled
        if isinstance(compiled, torch.nn.Module) and compiled._compiled_call_impl is not None:
            function = compiled._compiled_call_impl
        function = getattr(function, "__func__", function)
        cells = getattr(function, "__closure__", None) or ()
        contexts = [c.cell_contents for c in cells if hasattr(c.cell_contents, "callback")]
    for context in contexts:
        found = innermost_backend(cast("Any", context.callback))
        if isinstance(found, torch._TorchCompileWrapper):
            return found
    return None


def is_higher_order(target: Any) -> bool:
    """Whether an FX target is a higher-order operator (cond, scan, a user's Triton kernel …)."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def functionalized_operator(node: Any) -> Any:
    """The operator that a node of AOTAutograd's calls on copies of what its schema says is written; None of other nodes."""
    name = node.target.name() if is_higher_order(node.target) else ""
    return node.args[0] if name in ("auto_functionalized", "auto_functionalized_v2") else None


def is_triton_kernel(target: Any) -> bool:
    """Whether an FX target launches a kernel that the user wrote in Triton."""
    return is_higher_order(target) and target.name().startswith("triton_kernel_wrapper")


def empty_like_fake(value: Any, symbols: dict[Any, int]) -> Any:
    """An uninitialised real tensor (or an int) for a fake one, with ``symbols`` (name → size) substituted."""

    def number(size: Any) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expr = size.node.expr.subs({s: symbols[str(s)] for s in size.node.expr.free_symbols if str(s) in symbols})
        return int(expr) if expr.is_number else size_hint(size)

    if not isinstance(value, torch.Tensor):
        return number(value) if isinstance(value, torch.SymInt) else value
    shape, strides = [number(s) for s in value.shape], [number(s) for s in value.stride()]
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def random_prims() -> tuple[Any, Any, Any]:
    """Inductor's operators for drawing seeds, and for ``rand``/``randn`` and ``randint`` from a given seed."""
    import torch._inductor.inductor_prims

    prims = torch.ops.prims
    return prims.inductor_seeds.default, prims.inductor_random.default, prims.inductor_randint.default


def inductor_config_key() -> str:
    """Hash of Inductor's configuration: equal settings, equal generated code."""
    from torch._inductor import config

    return hashlib.sha256(config.save_config_portable().__repr__().encode()).hexdigest()[:16]


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view of ``tensor`` with its negation bit flipped."""
    return torch._neg_view(tensor)


def triton_ptx(digest: str, name: str, device: int) -> str | None:
    """PTX of a Triton kernel by its hash, from the caches of Triton and of Inductor; None where neither has it.

    Kernels of Inductor's static launcher carry their hash and not their PTX. Triton names a cache entry by the hash in base 32.
    """
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    entry = base64.b32encode(bytes.fromhex(digest)).decode().rstrip("=")
    roots = (os.environ.get("TRITON_CACHE_DIR"), triton_cache_dir(device), Path.home() / ".triton" / "cache")
    for root in roots:
        if root and (path := Path(root) / entry / f"{name}.ptx").is_file():
            return path.read_text()
    return None


def clear_cublas_workspaces() -> None:
    """Forget the scratch memory that cuBLAS keeps for each stream, so that the next product allocates its own: in a capture, from
    the graph's pool; outside, not from a graph's."""
    if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):  # CUDA builds alone
        torch._C._cuda_clearCublasWorkspaces()


# -- launches


def call_for_device(operator: Any, device: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls an operator's implementation for ``"cpu"`` or ``"cuda"`` itself: active dispatch modes see what that calls."""
    key = {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}.get(device)
    if key is None:
        return operator(*args, **kwargs)
    return operator.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


def caching_autotuner() -> Any:
    """The class whose ``run(*args, stream=…)`` launches every Triton kernel that Inductor compiled. Needs triton."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    return CachingAutotuner


def autotuner_kernels(autotuner: Any) -> list[Any]:
    """The compiled kernels that a ``CachingAutotuner`` chooses from, one once it has chosen."""
    if not autotuner.launchers:
        autotuner.precompile()
    return [_launcher_kernel(launcher) for launcher in autotuner.launchers]


def _launcher_kernel(launcher: Any) -> Any:
    scope = launcher.__globals__
    return scope["bin"] if "bin" in scope else scope["runner"].__self__


def autotuner_writes(autotuner: Any) -> frozenset[str] | None:
    """Parameters that a kernel of Inductor's own may write, which its names say; None for kernels of the user's."""
    from torch._inductor.runtime.hints import HeuristicType

    if autotuner.heuristic_type is HeuristicType.USER_AUTOTUNE or getattr(autotuner, "custom_kernel", False):
        return None
    named = {n for n in autotuner.fn.arg_names if n.startswith(("out_ptr", "in_out_ptr", "ws_ptr", "semaphores"))}
    return frozenset(named | set(autotuner.mutated_arg_names))


def autotuner_launch(
    autotuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any], stream: Any
) -> tuple[Any, tuple[int, int, int], list[str], list[Any], Callable[[Sequence[Any]], None]]:
    """What a tuned ``CachingAutotuner`` launches when it is run on ``args``; launches nothing.

    (kernel, grid, parameters, their values, a function that launches the kernel on other values). Parameters that were
    compiled in as constants are left out.
    """
    (launcher,) = autotuner.launchers
    scope, seen = launcher.__globals__, list[Any]()
    kernel, runner = _launcher_kernel(launcher), scope["runner"]
    scope["runner"] = lambda *given: seen.extend(given)
    try:
        launcher(*args, **kwargs, stream=stream)
    finally:
        scope["runner"] = runner
    grid = (int(seen[0]), int(seen[1]), int(seen[2]))
    if "bin" in scope:
        return (kernel, grid, *compiled_arguments(kernel, runner, grid, stream, seen[5:9], seen[9:]))
    values = list(seen[4:])
    constants = set(kernel.full_constexprs)
    names = [name for number, name in enumerate(kernel.arg_names) if number not in constants]
    if len(names) > len(values):  # arguments that are None are left out as well
        missing = {n for n, v in autotuner.compile_results[0].compile_meta["constants"].items() if v is None}
        names = [name for name in names if name not in missing]
    if len(names) != len(values):
        raise TesseraError(f"{kernel.name} has parameters {names} and was given {len(values)} values")
    return kernel, grid, names, values, lambda new: runner(*grid, stream, *new)


def compiled_arguments(
    kernel: Any, runner: Any, grid: tuple[int, ...], stream: Any, middle: Sequence[Any], args: Sequence[Any]
) -> tuple[list[str], list[Any], Callable[[Sequence[Any]], None]]:
    """Parameters and values of a Triton ``CompiledKernel`` whose launcher ``runner`` is given ``args`` after metadata and hooks
    (``middle``), constants among them; and a function that launches the kernel on other values."""
    constants = {key[0] if isinstance(key, tuple) else key for key in getattr(kernel.src, "constants", {})}
    kinds = list(kernel.src.signature.items())
    kept = [
        (number, str(name))
        for number, (name, kind) in enumerate(kinds)
        if kind != "constexpr" and number not in constants and name not in constants
    ]
    if len(args) == len(kinds):
        places = [number for number, _ in kept]
    elif len(args) == len(kept):
        places = list(range(len(kept)))
    else:
        raise TesseraError(f"{kernel.metadata.name} has parameters {[n for n, _ in kinds]} and was given {len(args)} values")

    def again(new: Sequence[Any]) -> None:
        given = list(args)
        for place, value in zip(places, new, strict=True):
            given[place] = value
        runner(*grid, stream, kernel.function, *middle, *given)

    return [name for _, name in kept], [args[place] for place in places], again


@contextlib.contextmanager
def collecting_accesses() -> Iterator[list[tuple[str, list[tuple[str, bool, Any, dict[str, Any], int, bool]]]]]:
    """What Inductor takes its Triton kernels to access, of all that it generates in the block, in the order of their launches.

    One (kernel, accesses) a launch. An access: (parameter, whether it is a write, index, ranges, bytes of an element, whether
    it is atomic). ``index`` is a SymPy expression in elements from the pointer on, of the variables of ``ranges`` (name → size);
    None is the whole buffer. Kernels from a cache are not generated.
    """
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.virtualized import V

    found: list[tuple[str, list[tuple[str, bool, Any, dict[str, Any], int, bool]]]] = []
    scheduling: Any = TritonScheduling
    original = scheduling.define_kernel

    def define_kernel(self: Any, src_code: Any, node_schedule: Any, kernel: Any) -> Any:
        name = original(self, src_code, node_schedule, kernel)
        real = V.graph.scheduler.mutation_real_name if V.graph.scheduler else {}
        parameters: dict[str, set[str]] = {}
        for table in (kernel.args.input_buffers, kernel.args.output_buffers, kernel.args.inplace_buffers):
            for buffer, inner in table.items():
                inner = getattr(inner, "inner_name", inner)
                if isinstance(inner, str):
                    parameters.setdefault(buffer, set()).add(inner)
        accesses = []
        for node in node_schedule:
            sets = getattr(node, "read_writes", None)
            if sets is None:  # a marker between the loops of a reduction
                continue
            for write, deps in ((False, sets.reads), (True, sets.writes)):
                for dep in deps:
                    buffer = real.get(dep.name, dep.name)
                    plain = isinstance(dep, MemoryDep) and not dep.is_indirect()
                    ranges = {str(v): s for v, s in zip(dep.var_names, dep.size, strict=True)} if plain else {}
                    index = dep.index if plain else None
                    atomic = getattr(dep, "mode", None) is not None
                    for parameter in parameters.get(buffer, ()):
                        size = V.graph.get_dtype(buffer).itemsize
                        accesses.append((parameter, write, index, ranges, size, atomic))
        found.append((name, accesses))
        return name

    scheduling.define_kernel = define_kernel
    try:
        yield found
    finally:
        scheduling.define_kernel = original
