"""The backend: from the graph that dynamo captured to something that runs on several devices.

:class:`CompiledGraph` reads like the list of steps in the documentation: lower, depend, profile, partition, schedule, verify, and
then the executor compiles the segments. Each step is logged with its time at INFO.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import networkx as nx
import torch
from torch import fx

from .options import Options
from .passes import depend, lower, partition, schedule, torch_compat, verify
from .passes.cluster import Cluster
from .passes.errors import FallbackError, LoweringError, TesseraWarning
from .passes.ir import KernelGraph, Plan, Profile
from .passes.partitioning import matching, pinned
from .passes.placements import place
from .progress import progress
from .reports import GraphReport, Report
from .runtime.codegen import Codegen
from .runtime.cpu_lanes import CpuLaneExecutor, lane_threads
from .runtime.pacing import Pace
from .runtime.profile_cache import ProfileCache
from .runtime.profiler import needs_real_call, profile
from .runtime.replicas import watch_call

log = logging.getLogger(__name__)


class GradientsNeeded(Exception):
    """Raised out of AOTAutograd when it wants a training graph."""


class CompiledGraph:
    """One graph of a model: lowered at once, planned and compiled at once or, where profiling needs real data, at the first call.

    Attributes:
        report: what is known of it; None until it is planned.
        executor: runs it; None until it is compiled.
    """

    def __init__(
        self, aten: fx.GraphModule, example_inputs: Sequence[Any], options: Options, static_inputs: Sequence[int], number: int
    ) -> None:
        self.options = options
        self.number = number
        self.report: GraphReport | None = None
        self.executor: CpuLaneExecutor | None = None
        self.cluster = options.resolved_cluster()
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        with self._step("lower"):
            self.kernels = lower(aten, example_inputs, static_inputs=static_inputs)
        with self._step("depend"):
            self.ddg = depend(self.kernels)
        # One device leaves nothing to decide, and a dry run builds nothing that could be timed.
        self._how = "model" if len(self.cluster.devices) == 1 or options.dryrun else options.profile
        measured = self._how == "measure" and any(d.kind == "cpu" for d in self.cluster.devices)
        if not (measured and options.codegen != "null" and needs_real_call(self.kernels)):
            self.build(None)

    def __call__(self, args: list[Any]) -> list[Any]:
        """Runs the graph once; ``args`` are its inputs in order, in a list that is emptied."""
        if self.executor is None:
            with self._lock:
                if self.executor is None:
                    self.build(args)
        executor = self.executor
        assert executor is not None
        return executor(args)

    def current_report(self) -> GraphReport:
        """The report, with what emulated requests have shown so far."""
        assert self.report is not None
        if self.executor is None or self.executor.pace is None:
            return self.report
        return replace(self.report, emulation=self.executor.pace.result())

    def build(self, real: Sequence[Any] | None) -> None:
        """The pipeline from the dependence graph on.

        Args:
            real: the inputs of the first call, which are read and left as they are; None where none is needed.
        """
        options, kernels, ddg = self.options, self.kernels, self.ddg
        lanes = len(self.cluster.devices)
        threads = lane_threads(lanes)
        codegen = Codegen(
            options.codegen,  # type: ignore[arg-type]  # checked by Options
            threads=threads if lanes > 1 else None,
            strict=options.strict,
        )
        with self._step("profile"):
            times = profile(
                kernels,
                self.cluster,
                codegen,
                how=self._how,
                lanes=lanes,
                threads=threads,
                real=real,
                cache=ProfileCache(),
                progress=progress,
            )
        with self._step("partition"):
            plan = make_plan(ddg, kernels, times, self.cluster, options)
        with self._step("schedule"):
            program = schedule(ddg, plan)
        with self._step("verify"):
            verify(program, ddg, plan)
        with self._step("compile"):
            if options.dryrun:
                at_home = replace(plan, placement=dict.fromkeys(plan.placement, plan.home))
                executor = CpuLaneExecutor(kernels, schedule(ddg, at_home), Codegen("eager"), threads=threads)
            else:
                pace = Pace(kernels, program, times, self.cluster, options.pace) if options.pace else None
                executor = CpuLaneExecutor(kernels, program, codegen, threads=threads, pace=pace, progress=progress)
        fallbacks = tuple(codegen.fallbacks.values())
        self.report = GraphReport(self.number, kernels, ddg, self.cluster, times, plan, program, self._seconds, fallbacks)
        self.executor = executor

    @contextlib.contextmanager
    def _step(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - started
        log.info("graph %d: %s took %.3f s", self.number, name, self._seconds[name])


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
        return _compile(gm, example_inputs, self.options, _graphs_of(torch_compat.calling_compile()))


def tessera(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """The entry point behind ``torch.compile(model, backend="tessera", options=…)``."""
    return _compile(gm, example_inputs, Options.make(options, mode), _graphs_of(torch_compat.calling_compile()))


def _graphs_of(compile_call: Any) -> list[CompiledGraph | str]:
    """Where the graphs of one ``torch.compile`` call are kept: on the object that stands for the call, and as long as it."""
    if compile_call is None:
        return []
    graphs: list[CompiledGraph | str] = compile_call.__dict__.setdefault("_tessera_graphs", [])
    return graphs


def report(compiled: Any) -> Report:
    """What was compiled so far for ``compiled``, one entry a graph.

    Raises:
        TypeError: ``compiled`` is not something that ``torch.compile(…, backend="tessera")`` returned.
        RuntimeError: nothing was compiled yet.
    """
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
    """The executors behind ``compiled``, in the order of its graphs."""
    graphs = _graphs_of(torch_compat.compile_of(compiled))
    return [g.executor for g in graphs if isinstance(g, CompiledGraph) and g.executor is not None]


def _report_of(graphs: Sequence[CompiledGraph | str]) -> Report:
    return Report(
        tuple(g.current_report() for g in graphs if isinstance(g, CompiledGraph) and g.report is not None),
        tuple(g for g in graphs if isinstance(g, str)),
    )


def explain(model: Callable[..., Any], options: Mapping[str, Any] | Options | None = None) -> Callable[..., Report]:
    """Plans ``model`` for one call and builds nothing: ``explain(model)(*args, **kwargs)`` returns the report.

    The call runs once, uncompiled, under ``torch.no_grad()``, to get past graph breaks. Tensors that it would overwrite and the
    random generators are left as they were.
    """
    made = options if isinstance(options, Options) else Options.make(options)
    backend = _Explaining(made.with_changes(dryrun=made.dryrun or True))

    def run(*args: Any, **kwargs: Any) -> Report:
        compiled = torch.compile(model, backend=backend)
        with torch.random.fork_rng(), torch.no_grad():
            compiled(*args, **kwargs)
        return _report_of(backend.graphs)

    return run


class _Explaining(Backend):
    """Collects reports, and works on copies of whatever the graphs overwrite. Equal to no other backend."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.graphs: list[CompiledGraph | str] = []

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        return _compile(gm, example_inputs, self.options, self.graphs, untouched=True)


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    graphs: list[CompiledGraph | str],
    *,
    untouched: bool = False,
) -> Callable[..., Any]:
    def inference(aten: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = CompiledGraph(aten, inputs, options, torch_compat.static_input_indices(), len(graphs))
        graphs.append(compiled)
        overwritten = [i for i, name in enumerate(compiled.kernels.inputs) if name in compiled.kernels.mutated]

        def call(args: list[Any]) -> list[Any]:
            if untouched:
                for i in overwritten:
                    args[i] = args[i].clone()
            return compiled(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def training(aten: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise GradientsNeeded

    try:
        _check_devices(example_inputs)
        run = torch_compat.aot_inference(gm, example_inputs, inference, training)
    except GradientsNeeded:
        reason = (
            "gradients are needed, so this graph runs under Inductor on one device; for inference call the model under "
            "torch.no_grad() or torch.inference_mode() (model.eval() alone does not switch gradients off)"
        )
        return _fall_back(gm, example_inputs, reason, options, graphs)
    except LoweringError as error:
        return _fall_back(gm, example_inputs, f"this graph runs under Inductor on one device: {error}", options, graphs)
    if options.dryrun and isinstance(options.dryrun, str):
        _report_of(graphs).to_json(options.dryrun)
    if len(options.resolved_cluster().devices) == 1:
        return run

    def call(*args: Any) -> Any:
        # Version counters are read here, outside AOTAutograd, which bumps those of inputs that the graph overwrites.
        with watch_call(args):
            return run(*args)

    return call


def _check_devices(example_inputs: Sequence[Any]) -> None:
    others = {str(x.device) for x in example_inputs if isinstance(x, torch.Tensor) and x.device.type != "cpu"}
    if others:
        raise LoweringError(f"its inputs are on {', '.join(sorted(others))}, and this version executes on CPU lanes only")


_warned: set[str] = set()
_warned_lock = threading.Lock()


def _fall_back(
    gm: fx.GraphModule, example_inputs: Sequence[Any], reason: str, options: Options, graphs: list[CompiledGraph | str]
) -> Callable[..., Any]:
    if options.strict:
        raise FallbackError(reason)
    graphs.append(reason)
    with _warned_lock:
        first = reason not in _warned
        _warned.add(reason)
    if first:
        warnings.warn(reason, TesseraWarning, stacklevel=3)
    return torch_compat.inductor_compile(gm, example_inputs)


def make_plan(ddg: nx.DiGraph, kernels: KernelGraph, times: Profile, cluster: Cluster, options: Options) -> Plan:
    """The plan that ``options.planner`` and ``options.policy`` ask for."""
    placement: dict[str, str] | None = None
    pins = {}
    for pattern, device in options.pins:
        if matching(kernels, pattern):
            pins[pattern] = device
            continue
        # Not an error: a model may have several graphs, and the pin may be about another one.
        modules = ", ".join(sorted({k.module for k in kernels.kernels if k.module})[:12]) or "none"
        message = f"pin {pattern!r} matches no kernel and no module of this graph; modules here: {modules}"
        if options.strict:
            raise FallbackError(message)
        warnings.warn(message, TesseraWarning, stacklevel=2)
    if options.planner.endswith(".json"):
        placement = dict(Plan.load(options.planner).placement)
    elif options.planner != "milp":
        placement = place(options.planner, ddg, times, cluster, seed=options.seed) | pinned(kernels, pins)
    return partition(
        ddg,
        times,
        cluster,
        objective="throughput" if options.policy == "throughput" else "latency",
        pins=pins,
        inflight=options.inflight,
        # A CPU lane copies what it receives itself; a GPU has engines for that.
        overlap=all(d.kind != "cpu" for d in cluster.devices),
        time_limit=options.time_limit,
        gap=options.gap,
        placement=placement,
        planner=options.planner,
    )
