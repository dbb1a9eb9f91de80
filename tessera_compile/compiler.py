"""The backend: what ``torch.compile(…, backend="tessera")`` calls, and what it keeps for reports.

The steps from a graph to something that runs on several devices are in ``pipeline.py``, which is imported only when there is more
than one lane to plan for, or something that Inductor cannot be left alone with: SciPy and NetworkX take their time to load.
"""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .options import Options
from .passes import torch_compat
from .passes.errors import FallbackError, LoweringError, TesseraWarning
from .runtime.replicas import watch_call
from .runtime.state_homes import marked

if TYPE_CHECKING:
    from .loading import LoadedGraph
    from .pipeline import CompiledGraph
    from .reports import GraphReport, Report
    from .runtime.cpu_lanes import CpuLaneExecutor


class GradientsNeeded(Exception):
    """Raised out of AOTAutograd when it wants a training graph."""


class InductorGraph:
    """A graph on one lane, which Inductor runs itself. What there is to report is found out when somebody asks for it."""

    def __init__(self, gm: fx.GraphModule, options: Options, number: int) -> None:
        self._gm, self._inputs = torch_compat.copy_dynamo_graph(gm)  # Inductor changes the one that it compiles.
        self._options = options
        self._number = number
        self.executor = None
        self._resume = torch_compat.resume_tracing()
        self._report: GraphReport | None = None

    def current_report(self) -> GraphReport:
        """The one-lane plan of this graph."""
        if self._report is None:
            from .pipeline import CompiledGraph

            found: list[CompiledGraph] = []
            static = [i for i, fake in enumerate(self._inputs) if isinstance(fake, torch.nn.Parameter)]

            def inference(aten: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
                options = self._options.with_changes(dryrun=True)
                found.append(CompiledGraph(aten, inputs, options, static, self._number))
                return found[0]

            with self._resume(), torch.no_grad():
                torch_compat.aot_inference(self._gm, self._inputs, inference, inference)
            self._report = found[0].current_report()
            assert self._report is not None
        return self._report


#: What is kept of one graph; the text says why a graph runs elsewhere.
Entry = Any  # CompiledGraph | InductorGraph | str, the first of which is imported when it is needed.

_DRAWS = {"randperm", "multinomial", "bernoulli", "normal", "poisson", "binomial", "rrelu"}


def _inductor_suffices(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether one lane may hand this dynamo graph to Inductor as it is.

    Not where gradients may be needed, which is for the fallback to say; nor with two writes into inputs, where Inductor can lose
    the old content of swapped buffers; nor with generators that it draws from in an order of its own.
    """
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs):
        return False
    names, writes = set(), 0
    for node in gm.graph.nodes:
        if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return False  # A custom operator may write whatever its schema says.
        if node.op in ("call_function", "call_method"):
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            names.add(name)
            if _writes(node, name) and _is_input(node.args[0]):
                if name in _PARTIAL or node.args[0].op != "placeholder":
                    return False  # Inductor may return a value in the storage that it then writes.
                writes += 1
    return writes < 2 and not _DRAWS & names


def _writes(node: fx.Node, name: str) -> bool:
    """Whether ``node`` changes its first argument: ``x.add_``, ``x += y``, ``x[i] = y``, ``torch.relu_``."""
    if not node.args or node.target in (operator.and_, operator.or_, operator.not_, operator.is_):
        return False
    return name == "setitem" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _is_input(node: Any) -> bool:
    """Whether ``node`` may be a view of an input of the graph."""
    while isinstance(node, fx.Node) and (node.op == "call_method" or node.target is operator.getitem) and node.args:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.op == "placeholder"


_PARTIAL = {"setitem", "copy_", "index_copy_", "index_put_", "index_add_", "index_fill_", "scatter_", "scatter_add_",
            "scatter_reduce_", "masked_fill_", "masked_scatter_"}  # fmt: skip
_IN_PLACE = {f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")}


class Backend:
    """A ``torch.compile`` backend with fixed options; equal and hashable by value, so that dynamo does not recompile for it."""

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options.make()
        self.__name__ = "tessera"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Backend) and self.options == other.options

    def __hash__(self) -> int:
        return hash(self.options)

    def __repr__(self) -> str:
        return f"tessera_compile.backend({self.options})"

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        if options or mode:
            raise TypeError("this backend object has its options already; give them to tessera_compile.backend(…)")
        return self.compile(gm, example_inputs)

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs the graph."""
        return _compile(gm, example_inputs, self.options, _graphs_of(torch_compat.calling_compile()))


class CollectingBackend(Backend):
    """Keeps what it has compiled in ``graphs``. Equal to no other backend."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.graphs: list[Entry] = []

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def tessera(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """The entry point behind ``torch.compile(model, backend="tessera", options=…)``."""
    return _compile(gm, example_inputs, Options.make(options, mode), _graphs_of(torch_compat.calling_compile()))


def _graphs_of(compile_call: Any) -> list[Entry]:
    """Where the graphs of one ``torch.compile`` call are kept: on the object that stands for the call, and as long as it."""
    if compile_call is None:
        return []
    graphs: list[Entry] = compile_call.__dict__.setdefault("_tessera_graphs", [])
    return graphs


def report(compiled: Any) -> Report:
    """What was compiled so far for ``compiled``, one entry a graph.

    Raises:
        TypeError: ``compiled`` is not something that ``torch.compile(…, backend="tessera")`` or ``load`` returned.
        RuntimeError: nothing was compiled yet.
    """
    from .loading import Loaded

    if isinstance(compiled, Loaded):
        return compiled.report()
    call = torch_compat.compile_of(compiled)
    if call is None:
        raise TypeError(
            f"{type(compiled).__name__} was not made by torch.compile; pass what torch.compile(…, backend='tessera') returned"
        )
    graphs = _graphs_of(call)
    if not graphs:
        raise RuntimeError(
            "nothing was compiled for this torch.compile call yet: call the model once, under torch.no_grad(). If an equal call "
            "compiled the same code before, dynamo reuses that: ask for the report of the earlier one, or torch.compiler.reset()"
        )
    return _report_of(graphs)


def executors(compiled: Any) -> list[CpuLaneExecutor]:
    """The executors behind ``compiled``, in the order of its graphs; graphs that Inductor runs itself have none."""
    from .loading import Loaded

    graphs = compiled.graphs if isinstance(compiled, Loaded) else _graphs_of(torch_compat.compile_of(compiled))
    return [g.executor for g in graphs if not isinstance(g, str) and g.executor is not None]


def _report_of(graphs: Sequence[Entry]) -> Report:
    from .reports import Report

    made = [_present_report(g) for g in graphs if not isinstance(g, str)]
    return Report(tuple(r for r in made if r is not None), tuple(g for g in graphs if isinstance(g, str)))


def _present_report(compiled: CompiledGraph | InductorGraph) -> GraphReport | None:
    """The report of a graph with what is in memory for it now, and why it runs uncaptured where CUDA graphs were asked for.
    Nothing is known of one that Inductor runs itself."""
    report = compiled.current_report()
    if report is None or isinstance(compiled, InductorGraph):
        return report
    from .runtime.memory import memory_use

    options = compiled.options
    built = None if options.dryrun else compiled.executor  # what a dry run builds runs everything at home
    use = memory_use(report.ddg, report.profile, report.cluster, report.plan, inflight=options.inflight, executor=built)
    reasons = getattr(built, "reasons", {})
    uncaptured = tuple(why if where in ("all", why) else f"{where}: {why}" for where, why in reasons.items())
    return replace(report, memory=use, uncaptured=uncaptured)


def explain(model: Callable[..., Any], options: Mapping[str, Any] | Options | None = None) -> Callable[..., Report]:
    """Plans ``model`` for one call and builds nothing: ``explain(model)(*args, **kwargs)`` returns the report.

    The call runs once, uncompiled, under ``torch.no_grad()``, to get past graph breaks. Tensors that its graphs would overwrite
    and the CPU's random generator are left as they were. Python is not undone: what code between graphs, or an attribute assigned
    in ``forward``, changes stays changed.
    """
    made = options if isinstance(options, Options) else Options.make(options)
    backend = _Explaining(made.with_changes(dryrun=made.dryrun or True))

    def run(*args: Any, **kwargs: Any) -> Report:
        compiled = torch.compile(model, backend=backend)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch_compat.unlimited_recompiles():
            compiled(*args, **kwargs)
        if not backend.graphs:
            raise RuntimeError("torch.compile captured no graph of this call: it computes nothing, or dynamo skips its code")
        return _report_of(backend.graphs)

    return run


class _Explaining(CollectingBackend):
    """Collects reports, and works on copies of whatever the graphs overwrite."""

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return _compile(gm, example_inputs, self.options, self.graphs, untouched=True)


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    graphs: list[Entry],
    *,
    untouched: bool = False,
    loaded: LoadedGraph | None = None,
) -> Callable[..., Any]:
    def inference(aten: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from .pipeline import CompiledGraph, unmatched_pins
        from .runtime.probing import taken_by_custom

        static = torch_compat.static_input_indices()
        if loaded is not None:
            static = (*static, *loaded.weights_among(inputs))
        compiled = CompiledGraph(aten, inputs, options, static, len(graphs), _kept_among(example_inputs, inputs, options))
        graphs.append(compiled)
        if loaded is not None:
            loaded.adopt(compiled)
        for pattern in unmatched_pins(options, [g.kernels for g in graphs if isinstance(g, CompiledGraph)]):
            modules = ", ".join(sorted({k.module for k in compiled.kernels.kernels if k.module})[:12]) or "none"
            warnings.warn(
                f"pin {pattern!r} matches no kernel and no module so far; modules of this graph: {modules}",
                TesseraWarning,
                stacklevel=2,
            )
        inputs_of = compiled.kernels.inputs
        # What custom operators are given is copied too: a schema may not say that they write it.
        touched = taken_by_custom(compiled.kernels) if untouched else frozenset()
        overwritten = [i for i, name in enumerate(inputs_of) if name in compiled.kernels.mutated or name in touched]

        def call(args: list[Any]) -> list[Any]:
            if untouched:
                for i in overwritten:
                    args[i] = args[i].clone() if isinstance(args[i], torch.Tensor) else args[i]
            return compiled(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def training(aten: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise GradientsNeeded

    devices = options.resolved_cluster().devices
    one_lane = len(devices) == 1
    # Inductor alone would run on the caller's stream: on the whole GPU, not on a slice of it, and uncaptured.
    whole = one_lane and "/" not in devices[0].name and not options.cuda_graphs and loaded is None
    try:
        _check_devices(example_inputs, options)
        if whole and options.codegen == "inductor" and not options.dryrun and not options.pace:
            if _inductor_suffices(gm, example_inputs):
                graphs.append(InductorGraph(gm, options, len(graphs)))
                return torch_compat.inductor_compile(gm, example_inputs)
        run = torch_compat.aot_inference(gm, example_inputs, inference, training)
    except GradientsNeeded:
        if loaded is not None:
            raise FallbackError(
                "gradients are needed, and a loaded model is whole on no device that could train it; call it under "
                "torch.no_grad() or torch.inference_mode()"
            ) from None
        reason = (
            "gradients are needed, so this graph runs under Inductor on one device; for inference call the model under "
            "torch.no_grad() or torch.inference_mode() (model.eval() alone does not switch gradients off)"
        )
        return _fall_back(gm, example_inputs, reason, options, graphs)
    except LoweringError as error:
        if loaded is not None:
            raise
        return _fall_back(gm, example_inputs, f"this graph runs under Inductor on one device: {error}", options, graphs)
    if options.dryrun and isinstance(options.dryrun, str):
        _report_of(graphs).to_json(options.dryrun)
    if one_lane:
        return run

    def call(*args: Any) -> Any:
        # Version counters are read here, outside AOTAutograd, which bumps those of inputs that the graph overwrites.
        with watch_call(args):
            return run(*args)

    return call


def _check_devices(example_inputs: Sequence[Any], options: Options) -> None:
    """Raises LoweringError where the inputs do not lie where the cluster's lanes run."""
    devices = sorted({str(x.device) for x in example_inputs if isinstance(x, torch.Tensor) and x.dim()})
    cluster = options.resolved_cluster()
    on_gpu = [d.name for d in cluster.devices if d.kind == "cuda"]
    if options.emulate_on:
        home = options.emulate_on.split("/")[0]
        if any(d != home for d in devices):
            raise LoweringError(f"its inputs are on {', '.join(devices)}, and emulate_on={options.emulate_on!r} runs on {home}")
        return
    if not on_gpu:
        if any(d != "cpu" for d in devices):
            raise LoweringError(
                f"its inputs are on {', '.join(devices)}, and cluster {', '.join(cluster.names)} runs on CPU lanes; name the GPU "
                "in the cluster, as cuda:0 or cuda:0/64sm,cuda:0/64sm"
            )
        return
    if len(on_gpu) < len(cluster.devices):
        raise LoweringError(f"cluster {', '.join(cluster.names)} mixes CUDA devices with others")
    home = on_gpu[0].split("/")[0].split("#")[0]
    if any(d != home for d in devices):
        raise LoweringError(f"its inputs are on {', '.join(devices)}, and the home of cluster {', '.join(on_gpu)} is {home}")


def _kept_among(given: Sequence[Any], inputs: Sequence[Any], options: Options) -> list[int]:
    """Positions, among the inputs that AOTAutograd gives the graph, of state that lanes may keep.

    ``given`` are the caller's tensors. State that lanes cannot keep stays with the caller, which a warning says.
    """
    found = [i for i, x in enumerate(given) if marked(x)]
    devices = options.resolved_cluster().devices
    if not found or len(devices) == 1:
        return []
    if any(d.kind == "cuda" for d in devices) or options.emulate_on:
        _warn_once("the state of a StateCache stays on the caller's device: CUDA lanes do not keep state", options)
        return []
    # AOTAutograd keeps the order of inputs, but merges those that are one tensor or views of one.
    if len(inputs) != len(given) or any(inputs[i].shape != given[i].shape for i in found):
        _warn_once("the state of a StateCache stays on the caller's device: inputs of this graph share memory", options)
        return []
    return found


def _warn_once(reason: str, options: Options) -> None:
    """Raises FallbackError under ``strict``."""
    if options.strict:
        raise FallbackError(reason)
    with _warned_lock:
        first = reason not in _warned
        _warned.add(reason)
    if first:
        warnings.warn(reason, TesseraWarning, stacklevel=3)


_warned: set[str] = set()
_warned_lock = threading.Lock()


def _fall_back(
    gm: fx.GraphModule, example_inputs: Sequence[Any], reason: str, options: Options, graphs: list[Entry]
) -> Callable[..., Any]:
    if options.strict:
        raise FallbackError(reason)
    graphs.append(reason)
    if isinstance(options.dryrun, str):
        _report_of(graphs).to_json(options.dryrun)
    with _warned_lock:
        first = reason not in _warned
        _warned.add(reason)
    if first:
        warnings.warn(reason, TesseraWarning, stacklevel=3)
    if options.dryrun:
        return gm.forward  # A dry run builds nothing.
    return torch_compat.inductor_compile(gm, example_inputs)
