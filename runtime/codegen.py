"""Pieces of a graph → callables.

Three ways: ``inductor`` compiles, ``eager`` runs the same FX graph operator by operator, ``null`` computes nothing and returns
tensors of the right shape. Equal pieces (see ``Piece.key``) share one callable.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from ..passes import torch_compat
from ..passes.errors import FallbackError, TesseraWarning
from ..passes.extraction import Piece, extract, moved
from ..passes.ir import KernelGraph
from ..passes.operators import RESHAPING_SCATTER, SCATTER, is_free, packet
from .philox import inductor_randint, inductor_random, inductor_seeds

log = logging.getLogger(__name__)

CodegenName = Literal["inductor", "eager", "null"]
Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Compiled:
    """A callable piece. ``call`` takes the values named by ``inputs`` in a list, which it may empty, and returns ``outputs``."""

    call: Boxed
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    writes: tuple[str, ...]
    codegen: str


class Codegen:
    """Compiles pieces and remembers them. One per compiled graph or per test; safe to use from several threads.

    Args:
        threads: threads that C++ kernels use, baked into them; None leaves it to torch's setting at compile time.
        strict: raise where a piece that cannot be compiled would run eagerly with a warning.
    """

    def __init__(self, codegen: CodegenName = "inductor", *, threads: int | None = None, strict: bool = False) -> None:
        self.codegen = codegen
        self.threads = threads
        self.strict = strict
        self.artefacts: dict[str, Boxed] = {}
        self.fallbacks: dict[str, str] = {}
        # With each piece its graph, so that the identity in the key stays taken.
        self._pieces: dict[Any, tuple[KernelGraph, Piece]] = {}
        self._lock = threading.RLock()

    def compile(
        self, graph: KernelGraph, kernels: Sequence[str], outputs: Sequence[str], device: torch.device | None = None
    ) -> Compiled:
        """Makes ``kernels`` callable, returning ``outputs``.

        device: the GPU that runs them, by default the one that the graph was traced for.

        An operator that Inductor cannot compile runs eagerly: its kernel is compiled alone, fails, and is interpreted, while
        the others of the segment are still compiled.

        Raises:
            FallbackError: under ``strict``, with Inductor's error as cause.
        """
        with self._lock:
            asked = (id(graph), tuple(kernels), tuple(outputs), device)
            if asked not in self._pieces:
                piece = extract(graph, kernels, outputs)
                home = traced_device(graph)
                if device is not None and home is not None and device != home:
                    piece = moved(piece, home, device)
                self._pieces[asked] = (graph, piece)
            piece = self._pieces[asked][1]
            call = self.artefacts.get(piece.key)
            if call is None:
                call, codegen = self._make(graph, piece, kernels, device)
                if codegen != "chain":  # A chain names kernels of this graph; an equal piece of another layer cannot use it.
                    self.artefacts[piece.key] = call
            return Compiled(call, piece.inputs, piece.outputs, piece.writes, self.codegen)

    def _make(
        self, graph: KernelGraph, piece: Piece, kernels: Sequence[str], device: torch.device | None
    ) -> tuple[Boxed, str]:  # fmt: skip
        if self.codegen == "eager":
            return eager_call(piece.module), "eager"
        if self.codegen == "null":
            return null_call(piece.module), "null"
        fakes = [n.meta["val"] for n in piece.module.graph.nodes if n.op == "placeholder"]
        if not kernels:
            return eager_call(piece.module), "eager"  # Views and factories alone: nothing to compile.
        if _inductor_loses(piece.module):
            # Kernel by kernel nothing is lost; a single kernel that does both runs uncompiled.
            if len(kernels) > 1:
                return self._chain(graph, piece, kernels, device), "chain"
            return eager_call(piece.module), "eager"
        try:
            return torch_compat.inductor_compile_segment(_copy(piece.module), fakes, self.threads), "inductor"
        except Exception as error:
            if len(kernels) > 1:
                log.info(
                    "a segment of %d kernels does not compile (%s); compiling its kernels one by one",
                    len(kernels),
                    first_line(error),
                )
                return self._chain(graph, piece, kernels, device), "chain"
            kernel = graph[kernels[0]]
            message = (
                f"kernel {kernel.name} ({', '.join(kernel.nodes[:3])}) does not compile and runs eagerly: {first_line(error)}"
            )
            if self.strict:
                raise FallbackError(message) from error
            if kernel.fingerprint not in self.fallbacks:
                self.fallbacks[kernel.fingerprint] = message
                warnings.warn(message, TesseraWarning, stacklevel=2)
            return eager_call(piece.module), "eager"

    def _chain(self, graph: KernelGraph, piece: Piece, kernels: Sequence[str], device: torch.device | None) -> Boxed:
        needed = {v for k in kernels for v in graph[k].inputs} | set(piece.outputs)
        links = [self.compile(graph, [k], [v for v in graph[k].outputs if v in needed], device) for k in kernels]

        def call(args: list[Any]) -> list[Any]:
            env = dict(zip(piece.inputs, args, strict=True))
            args.clear()
            for link in links:
                env.update(zip(link.outputs, link.call([lookup(env, name) for name in link.inputs]), strict=True))
            return [env[name] for name in piece.outputs]

        return call


def traced_device(graph: KernelGraph) -> torch.device | None:
    """The GPU that the graph was traced for; None where it names none."""
    for node in graph.module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            return torch.device("cuda", value.device.index or 0)
    return None


def first_line(error: BaseException) -> str:
    """What an error says, without the stack that torch appends."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def lookup(env: dict[str, Any], name: str) -> Any:
    """The value called ``name``; ``"v.size(1)"`` is a size of value ``v`` unless it was itself passed."""
    if name in env:
        return env[name]
    base, _, rest = name.partition(".size(")
    return env[base].size(int(rest[:-1]))


def constants(graph: KernelGraph) -> dict[str, Any]:
    """The tensors that the FX graph holds as attributes, by value name."""
    found = {}
    for node in graph.module.graph.nodes:
        if node.op == "get_attr" and node.name in graph.values:
            value: Any = graph.module
            for part in str(node.target).split("."):
                value = getattr(value, part)
            found[node.name] = value
    return found


def eager_call(module: fx.GraphModule) -> Boxed:
    """Runs ``module`` operator by operator; its outputs get the strides that their metadata promises."""
    module = _copy(module)
    replaced = dict(zip(torch_compat.random_prims(), (inductor_seeds, inductor_random, inductor_randint), strict=True))
    for node in module.graph.nodes:
        node.target = replaced.get(node.target, node.target)
    module.graph.lint()
    module.recompile()
    output = next(iter(reversed(module.graph.nodes)))
    expected = [_static_strides(n.meta.get("val")) for n in output.args[0]]

    def call(args: list[Any]) -> list[Any]:
        results = module(*args)
        args.clear()
        return [_restride(r, e) for r, e in zip(results, expected, strict=True)]

    return call


def _inductor_loses(module: fx.GraphModule) -> bool:
    """Whether Inductor would compute something else where inputs are overwritten.

    It drops clones, also one that keeps an input's old content for another input; and it makes a scatter in the storage of an
    input that is overwritten, also one whose result is returned while something else is written there in the end.
    """
    copies = [n for n in module.graph.nodes if n.target is torch.ops.aten.copy_.default]
    if not copies:
        return False
    same = (torch.ops.aten.clone.default, torch.ops.aten.copy.default)

    def content(node: Any) -> Any:
        while isinstance(node, fx.Node) and (node.target in same or (is_free(node) and node.args)):
            node = node.args[1 if node.target is torch.ops.aten.copy.default else 0]
        return node

    overwritten = {n.args[0] for n in copies}
    written = [(n.args[0], content(n.args[1])) for n in copies]
    swapped = any(value in overwritten and value is not target for target, value in written)
    output = next(iter(reversed(module.graph.nodes)))
    finals = {value for _, value in written}
    returned = {content(n) for n in output.args[0]} - finals
    return swapped or any(isinstance(n, fx.Node) and packet(n) in SCATTER | RESHAPING_SCATTER for n in returned)


def null_call(module: fx.GraphModule) -> Boxed:
    """Returns uninitialised tensors of the shapes that ``module`` would return."""
    placeholders = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
    output = next(iter(reversed(module.graph.nodes)))
    values = [n.meta.get("val") for n in output.args[0]]

    def call(args: list[Any]) -> list[Any]:
        symbols: dict[Any, int] = {}
        for fake, arg in zip(placeholders, args, strict=True):
            sizes = zip(fake.shape, arg.shape, strict=True) if isinstance(fake, torch.Tensor) else [(fake, arg)]
            symbols.update({symbol: size for s, size in sizes if (symbol := torch_compat.symbol_of(s)) is not None})
        args.clear()
        return [torch_compat.empty_like_fake(v, symbols) for v in values]

    return call


def _static_strides(val: Any) -> tuple[int, ...] | None:
    if isinstance(val, torch.Tensor) and val.layout == torch.strided and not torch_compat.free_symbols([val]):
        return tuple(val.stride())
    return None


def _restride(result: Any, strides: tuple[int, ...] | None) -> Any:
    if strides is None or not isinstance(result, torch.Tensor) or result.stride() == strides or result.numel() <= 1:
        return result
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device).copy_(result)


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)
