"""One graph from ATen to an executor.

:class:`CompiledGraph` reads like the list of steps in the documentation: lower, depend, profile, partition, schedule, verify, and
then the executor compiles the segments. Each step is logged with its time at INFO.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import networkx as nx
from torch import fx

from .options import Options
from .passes import depend, lower, partition, refine, schedule, verify
from .passes.cluster import Cluster
from .passes.errors import FallbackError, LoweringError, PlanError, TesseraWarning
from .passes.extents import extents
from .passes.hidden_writes import declare
from .passes.ir import KernelGraph, Plan, Profile, Program
from .passes.keeping import keep
from .passes.mix_plan import GraphShares
from .passes.partitioning import matching, pinned
from .passes.placements import place
from .progress import progress
from .ptx_tools.footprints import Footprint
from .reports import GraphReport
from .runtime.codegen import Codegen
from .runtime.cpu_lanes import CpuLaneExecutor, lane_threads
from .runtime.dry_runs import DryRun, Guards, Values, dry_run, holding, summary, unproven, worth_running
from .runtime.enrolment import serving
from .runtime.pacing import Pace
from .runtime.probing import Undeclared, custom_operators, undeclared_writes
from .runtime.profile_cache import ProfileCache
from .runtime.profiler import needs_real_call, profile
from .runtime.weights import weight_of

log = logging.getLogger(__name__)

#: Called with a graph and its inputs before each run; see ``together.py``.
OBSERVERS: list[Callable[[CompiledGraph, Sequence[Any]], None]] = []


class CompiledGraph:
    """One graph of a model: lowered at once, planned and compiled at once or, where profiling needs real data, at the first call.

    Attributes:
        report: what is known of it; None until it is planned.
        executor: runs it; None until it is compiled.
        prepare: called with this graph and its inputs before each run; it may exchange inputs, and replan.
    """

    def __init__(
        self,
        aten: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: Options,
        static_inputs: Sequence[int],
        number: int,
        kept_inputs: Sequence[int] = (),
    ) -> None:
        self.options = options
        self.number = number
        self.report: GraphReport | None = None
        self.executor: Any = None  # of CPU lanes or of CUDA lanes
        self.prepare: Callable[[CompiledGraph, list[Any]], None] | None = None
        self.joint: GraphShares | None = None  # Its part of the mixture that it was planned for with others.
        self.cluster = options.resolved_cluster()
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._static, self._kept = tuple(static_inputs), tuple(kept_inputs)
        self._lower(aten, example_inputs)
        # One device leaves nothing to decide, and a dry run builds nothing that could be timed.
        self._how = "model" if len(self.cluster.devices) == 1 or options.dryrun else options.profile
        self._cuda = options.emulate_on is not None or any(d.kind == "cuda" for d in self.cluster.devices)
        measured = self._how == "measure" and any(d.kind in ("cpu", "cuda") for d in self.cluster.devices)
        if measured and self._cuda and isinstance(options.cluster, str) and not set("@+") & set(options.cluster):
            self.cluster = self._with_links()  # the user has not said what the links are
        runs = options.codegen != "null" and not options.dryrun
        waits = measured and needs_real_call(self.kernels)
        refines = options.codegen != "null" and len(self.cluster.devices) > 1 and options.refine != "off"
        # Custom operators are run once before anything is planned, to see whether they write what they do not declare.
        self._probes = refines and bool(custom_operators(self.kernels))
        self._dry_runs = refines and self._cuda and (runs or options.refine == "always")
        self.alone = ""  # Why all of it runs on one device.
        self._guards: Guards | None = None
        self._guarded = True  # Whether footprints count that hold while weights stay as they are.
        first = self._probes or (self._dry_runs and bool(worth_running(self.kernels, options.refine)))
        if not ((runs and waits) or first):
            self.build(None)

    def _lower(self, aten: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        with self._step("lower"):
            self.kernels = lower(aten, example_inputs, static_inputs=self._static)
            if self._kept:
                self.kernels = keep(self.kernels, [self.kernels.inputs[i] for i in self._kept])
        with self._step("depend"):
            self.ddg = depend(self.kernels)
        if self.options.refine != "off":
            with self._step("refine"):
                self.ddg = refine(self.ddg, {}, extents(self.kernels))
        #: By schemas and views: for programs whose segments have not been checked against footprints of single kernels.
        self.ddg_by_views = self.ddg

    def __call__(self, args: list[Any]) -> list[Any]:
        """Runs the graph once; ``args`` are its inputs in order, in a list that is emptied."""
        executor, fresh = self._ready(args)
        for observe in tuple(OBSERVERS):
            observe(self, args)
        if self.prepare is not None:
            self.prepare(self, args)
            executor = self.executor or executor
        try:
            request = serving()
            results: list[Any] = executor(args) if request is None else request.run(self, args)
            return results
        except Exception:
            if fresh:  # Planned on the tensors of a call that fails: the next one plans again.
                self.executor = self.report = None
            raise

    def _ready(self, args: list[Any]) -> tuple[Any, bool]:
        """The executor for a call with these inputs, and whether it was made for it."""
        if self._guards is not None:
            with self._lock:
                if self._guards is not None and (changed := self._guards.changed(args)) is not None:
                    log.info("graph %d: %s has changed; planned again without what relied on it", self.number, changed)
                    # In this order: who sees no guards sees no executor that needs them.
                    self.executor = self.report = None
                    self._guarded, self._guards = False, None
        executor = self.executor
        if executor is not None:
            return executor, False
        with self._lock:
            fresh = self.executor is None
            if fresh:
                self.build(args)
            assert self.executor is not None
            return self.executor, fresh

    def current_report(self) -> GraphReport | None:
        """The report, with what emulated requests have shown so far; None until the graph is planned."""
        if self.report is None or self.executor is None or self.executor.pace is None:
            return self.report
        return replace(self.report, emulation=self.executor.pace.result())

    def replan(self, placement: Mapping[str, str], planner: str) -> None:
        """Runs the graph by another placement from the next call on. What is compiled already and needed again is kept. A graph
        that must run on one device goes on doing so.

        Raises InfeasibleError or PlanError, and leaves everything as it is, where the placement is not possible.
        """
        report = self.report
        if report is None:
            raise PlanError(f"graph {self.number} has not been planned yet; call it first")
        if self.alone:
            return
        options = self.options
        plan = partition(
            self.ddg_by_views,
            report.profile,
            self.cluster,
            objective="throughput",
            inflight=options.inflight,
            overlap=report.plan.overlap,
            placement=placement,
            planner=planner,
        )
        program = schedule(self.ddg_by_views, plan)
        verify(program, self.ddg_by_views, plan)
        executor = self.executor
        if not options.dryrun:
            executor = self._executor(program, report.profile)
        with self._lock:
            self.report = replace(report, ddg=self.ddg_by_views, plan=plan, program=program)
            self.executor, self._guards = executor, None

    def build(self, real: Sequence[Any] | None) -> None:
        """The pipeline from the dependence graph on.

        Args:
            real: the inputs of the first call, which are read and left as they are; None where none is needed.
        """
        if self._probes and real is not None:
            with self._step("probe"):
                found = undeclared_writes(self.kernels, dict(zip(self.kernels.inputs, real, strict=True)))
            self._declare(found, real)
        options, kernels = self.options, self.kernels
        lanes = len(self.cluster.devices)
        threads = lane_threads(lanes)
        codegen = self.codegen = Codegen(
            options.codegen,  # type: ignore[arg-type]  # checked by Options
            threads=threads if lanes > 1 and not self._cuda else None,
            strict=options.strict,
        )
        with self._step("profile"):
            times = (
                self._gpu_profile(codegen, real)
                if self._cuda and self._how == "measure"
                else profile(
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
            )
        values = Values(kernels, real)
        footprints: dict[str, Footprint] = {}
        seen: DryRun | None = None
        if self._dry_runs and (asked := worth_running(kernels, options.refine)):
            footprints, seen = self._dry_run(asked, values)
        while True:
            ddg = self.ddg
            with self._step("partition"):
                alone = self.cluster.names[0] if self.alone else None
                plan = make_plan(ddg, kernels, times, self.cluster, options, alone)
            with self._step("schedule"):
                program = schedule(ddg, plan)
            with self._step("verify"):
                verify(program, ddg, plan)
            with self._step("compile"):
                if options.dryrun:
                    at_home = replace(plan, placement=dict.fromkeys(plan.placement, plan.home))
                    executor: Any = CpuLaneExecutor(kernels, schedule(ddg, at_home), Codegen("eager"), threads=threads)
                else:
                    executor = self._executor(program, times)
            failed = self._unproven(program, executor, values) if footprints and not options.dryrun else []
            if seen is None or not failed:
                break
            # Of these values all is sent.
            seen = replace(seen, unproven=(*seen.unproven, *((segment, value) for segment, value, _ in failed)))
            for _, value, readers in failed:
                for reader in set(readers) & set(footprints):
                    kept = tuple(b for b in footprints[reader].buffers if b.name != value)
                    footprints[reader] = replace(footprints[reader], buffers=kept)
            self._refine(footprints)
        fallbacks = (*codegen.fallbacks.values(), *([self.alone] if self.alone else []))
        self.report = GraphReport(
            self.number, kernels, ddg, self.cluster, times, plan, program, self._seconds, fallbacks, dry_run=seen
        )
        self.executor = executor

    def _declare(self, found: Undeclared, real: Sequence[Any]) -> None:
        """Makes undeclared writes part of the graph; where that cannot be said, one device runs all of it, in its order."""
        reason = "; ".join(f"{node} writes {', '.join(names)}" for node, names in found.others.items())
        written = found.inputs(self.kernels)
        for name, value in zip(self.kernels.inputs, real, strict=True):
            weight = weight_of(value)
            if name in written and weight is not None:
                raise FallbackError(
                    f"a custom operator writes {', '.join(weight.names)}, a weight of a loaded model, and does not "
                    "declare it; declare it (mutates_args), so that it is known where the weight must be"
                )
        if not reason and found.sayable:
            try:
                self._lower(declare(self.kernels.module, found.sayable), ())
            except LoweringError as error:
                reason = str(error)
        if reason:
            message = f"graph {self.number} runs on one device, since undeclared writes cannot be told to others: {reason}"
            if self.options.strict:
                raise FallbackError(message)
            warnings.warn(message, TesseraWarning, stacklevel=3)
            self.alone = message

    def _dry_run(self, asked: Sequence[str], values: Values) -> tuple[dict[str, Footprint], DryRun]:
        """What kernels touch, from running each once; the dependence graph is refined by it."""
        from .runtime.cuda_streams import apart

        with self._step("dry run"):
            values.settle()
            evidence = apart(lambda: dry_run(self.kernels, asked, self.codegen, values))
            footprints = holding(self.kernels, evidence, self._guarded)
            guards = Guards(self.kernels, [g for name in footprints for g in evidence[name].guards], values)
            if guards.names and guards.known:
                self._guards = guards
            elif guards.names:
                footprints = holding(self.kernels, evidence, guards=False)
        self._refine(footprints)
        return footprints, summary(self.kernels, evidence, footprints, self._seconds["dry run"])

    def _refine(self, footprints: Mapping[str, Footprint]) -> None:
        watched = self._guards.names if self._guards is not None else ()
        with self._step("refine"):
            self.ddg = refine(depend(self.kernels), footprints, extents(self.kernels), watched)

    def _unproven(self, program: Program, executor: Any, values: Values) -> list[tuple[str, str, tuple[str, ...]]]:
        """Parts of values that are sent on the word of footprints which the final segments do not keep."""
        from .runtime.cuda_streams import apart

        devices = [lane.device for lane in getattr(executor, "inner", executor).lanes]
        watched = self._guards.names if self._guards is not None else ()
        views = extents(self.kernels)
        with self._step("check"):
            found: list[tuple[str, str, tuple[str, ...]]] = apart(
                lambda: unproven(self.ddg, program, views, self.codegen, values, devices, watched)
            )
        return found

    def _with_links(self) -> Cluster:
        from .runtime.cuda_streams import apart
        from .runtime.transports import with_measured_links

        with self._step("links"):
            captured = self.options.cuda_graphs is True
            found: Cluster = apart(lambda: with_measured_links(self.cluster, self.options.transport, captured))
            return found

    def _gpu_profile(self, codegen: Codegen, real: Sequence[Any] | None) -> Profile:
        from .runtime.cuda_profiler import profile_on_gpus

        return profile_on_gpus(self.kernels, self.cluster, codegen, real=real, cache=ProfileCache(), progress=progress)

    def _executor(self, program: Program, times: Profile) -> Any:
        options = self.options
        if self._cuda:
            from .runtime.cuda_graphs import GraphedExecutor
            from .runtime.cuda_lanes import CudaLaneExecutor

            on_gpu = CudaLaneExecutor(
                self.kernels,
                program,
                self.codegen,
                lanes=options.emulate_on.split(",") if options.emulate_on else None,
                transport=options.transport,
                slots=options.inflight if options.cuda_graphs == "segments" else 0,
                pace=(times, self.cluster, options.pace) if options.emulate_on else None,
                progress=progress,
            )
            return GraphedExecutor(on_gpu) if options.cuda_graphs is True else on_gpu
        pace = Pace(self.kernels, program, times, self.cluster, options.pace) if options.pace else None
        threads = lane_threads(len(self.cluster.devices))
        return CpuLaneExecutor(self.kernels, program, self.codegen, threads=threads, pace=pace, progress=progress)

    @contextlib.contextmanager
    def _step(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - started
        log.info("graph %d: %s took %.3f s", self.number, name, self._seconds[name])


def make_plan(
    ddg: nx.DiGraph, kernels: KernelGraph, times: Profile, cluster: Cluster, options: Options, alone: str | None = None
) -> Plan:
    """The plan that ``options.planner`` and ``options.policy`` ask for; ``alone``: the device that must run everything."""
    placement: dict[str, str] | None = None
    if alone is not None:
        placement, how = {k.name: alone for k in kernels.kernels}, "single"
        return partition(ddg, times, cluster, inflight=options.inflight, placement=placement, planner=how)
    pins = {pattern: device for pattern, device in options.pins if matching(kernels, pattern)}
    if options.planner.endswith(".json"):
        placement = saved_placement(options, kernels) | pinned(kernels, pins)
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


def saved_placement(options: Options, kernels: KernelGraph) -> dict[str, str]:
    """The placement for this graph in the saved plan, or in the saved report, that ``options.planner`` names.

    Raises:
        PlanError: the file is neither, or none of its plans is for this graph.
    """
    try:
        data = json.loads(options.saved_plans)
        texts = [json.dumps(g["plan"]) for g in data["graphs"]] if "graphs" in data else [options.saved_plans]
        plans = [Plan.from_json(text) for text in texts]
    except (ValueError, KeyError, TypeError, PlanError) as error:
        raise PlanError(f"{options.planner} is neither a saved plan nor a saved report: {error}") from error
    wanted = {k.name for k in kernels.kernels}
    for plan in plans:
        if set(plan.placement) == wanted:
            return dict(plan.placement)
    raise PlanError(
        f"{options.planner} has no plan for this graph of {len(wanted)} kernels ({', '.join(sorted(wanted)[:3])} …); of a model "
        "that has several graphs, save the report, not the plan of one of them"
    )


def unmatched_pins(options: Options, graphs: Sequence[KernelGraph]) -> list[str]:
    """Patterns of ``options.pins`` that match nothing in any of ``graphs``."""
    return [pattern for pattern, _ in options.pins if not any(matching(g, pattern) for g in graphs)]
