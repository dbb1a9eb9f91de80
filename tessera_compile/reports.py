"""What was compiled, as text, JSON and objects."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import networkx as nx

from .passes.cluster import Cluster
from .passes.dependence import add_edge
from .passes.errors import PlanError
from .passes.ir import Dependence, KernelGraph, Plan, Profile, Program
from .passes.refinement import Refinement
from .ptx_tools.footprints import Box
from .runtime.dry_runs import DryRun
from .runtime.memory import MemoryUse
from .runtime.pacing import Emulation
from .runtime.roofline import ceiling

_SHOWN = 8


@dataclass(frozen=True)
class GraphReport:
    """One graph: its kernels, dependences, times, plan and program, and the seconds of each step of the pipeline. ``memory``: by
    device, and by GPU where several lie in one's memory. ``uncaptured``: why calls or segments run without a CUDA graph."""

    number: int
    kernels: KernelGraph
    ddg: nx.DiGraph = field(compare=False)
    cluster: Cluster
    profile: Profile
    plan: Plan
    program: Program
    seconds: Mapping[str, float]
    fallbacks: tuple[str, ...] = ()
    emulation: Emulation | None = None
    memory: Mapping[str, MemoryUse] = field(default_factory=dict, compare=False)
    uncaptured: tuple[str, ...] = field(default=(), compare=False)
    dry_run: DryRun | None = None

    def to_text(self) -> str:
        plan, graph = self.plan, self.kernels
        covered = sum(len(k.nodes) for k in graph.kernels)
        distinct = len({k.fingerprint for k in graph.kernels})
        lines = [
            f"graph {self.number}: {len(graph.kernels)} kernels ({distinct} distinct) from {covered} of {graph.nodes} nodes; "
            f"{graph.free_nodes} views, factories and sizes are cloned where they are used"
        ]
        lines += [f"  {line}" for line in plan.to_text().splitlines()]
        lines.append(f"  {_verdict(plan)}")
        lines += [f"  {line}" for line in self.simple_plans()]
        times = ", ".join(f"{step} {seconds:.2f}" for step, seconds in self.seconds.items())
        lines.append(f"  seconds: {times}")
        lines += [f"  {line}" for line in self._refined()]
        how = sorted({t.source for row in self.profile.times.values() for t in row.values()})
        lines.append(f"  times are {' and '.join(how)}")
        lines += [f"  {line}" for line in self.ceilings()]
        if self.emulation is not None:
            predicted = self.plan.makespan_us
            ratio = f" ({self.emulation.mean_us / predicted:.3f}× the plan's makespan)" if predicted else ""
            lines.append(f"  {self.emulation.to_text()}{ratio}")
        lines += [f"  memory of {name}: {use.to_text()}" for name, use in self.memory.items()]
        lines += [f"  uncaptured: {reason}" for reason in self.uncaptured]
        lines += [f"  fallback: {reason}" for reason in self.fallbacks]
        return "\n".join([*lines, "", self.table()])

    @property
    def refinement(self) -> Refinement | None:
        """What refining changed; None with ``refine="off"``."""
        found: Refinement | None = self.ddg.graph.get("refinement")
        return found

    def __str__(self) -> str:
        return self.to_text()

    def dependences(self) -> str:
        """One line for each edge of the dependence graph: what must wait for what, why, and how that is known."""
        return "\n".join(f"{a} -> {b}: {'; '.join(d.to_text() for d in deps)}" for a, b, deps in self.ddg.edges(data="deps"))

    def _refined(self) -> list[str]:
        """What is known of the bytes that kernels touch, and the edges that are not as the schemas have them."""
        found: Counter[str] = Counter(data["evidence"] for _, _, data in self.ddg.edges(data=True))
        evidence = ", ".join(f"{count} by {how}" for how, count in sorted(found.items()))
        lines = [f"{sum(found.values())} dependences: {evidence}"] if found else []
        refinement = self.refinement
        if self.dry_run is not None:
            lines += self._dry_run(self.dry_run)
        if refinement is not None and (refinement.removed or refinement.added or set(found) - {"schema"}):
            lines.append(refinement.summary)
            lines += [f"- {a} -> {b}: {d.to_text()}" for a, b, d in refinement.removed[:_SHOWN]]
            lines += [f"+ {a} -> {b}: {d.to_text()}" for a, b, d in refinement.added[:_SHOWN]]
            edges = [(a, b, d) for a, b, deps in self.ddg.edges(data="deps") for d in deps if d.boxes or d.evidence == "probe"]
            lines += [f"{a} -> {b}: {d.to_text()}" for a, b, d in edges[:_SHOWN]]
            if len(edges) > _SHOWN:
                lines.append(f"… and {len(edges) - _SHOWN} more; dependences() has all")
        return lines

    def _dry_run(self, found: DryRun) -> list[str]:
        """Whose footprints are known, by number of kernels and by time at home."""
        times = {k.name: self.profile.us(k.name, self.plan.home) for k in self.kernels.kernels}
        total = sum(t for t in times.values() if t < float("inf"))
        share = sum(times[k] for k in found.exact) / total if total else 0.0
        launches = ", ".join(f"{count} {how}" for how, count in sorted(found.launches.items()))
        guards = f"; they hold while {', '.join(found.guards)} stay as they are" if found.guards else ""
        lines = [
            f"dry run of {found.asked} kernels: {len(found.exact)} have footprints ({len(found.exact) / len(times):.0%} of all "
            f"kernels, {share:.0%} of the time), {len(found.partly)} for some of their values; launches {launches or 'none'}; "
            f"{found.seconds:.2f} s{guards}"
        ]
        lines += [f"segment {s} may read all of {v}: it is sent whole" for s, v in found.unproven]
        return lines

    def table(self) -> str:
        """Kernels by module: where each runs, and its µs on every device."""
        header = ["module", "kernel", "kind", "device", *(f"{d} µs" for d in self.plan.devices)]
        rows: list[list[str]] = []
        previous = None
        for kernel in self.kernels.kernels:
            us = [self.profile.us(kernel.name, d) for d in self.plan.devices]
            cells = ["-" if u == float("inf") else f"{u:.1f}" for u in us]
            module = kernel.module or "-"
            rows.append(
                [module if module != previous else "", kernel.name, kernel.kind, self.plan.placement[kernel.name], *cells]
            )
            previous = module
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        left = 4

        def line(cells: list[str]) -> str:
            return (
                "  "
                + "  ".join(
                    c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
                ).rstrip()
            )

        return "\n".join([line(header), *map(line, rows)])

    def _json(self) -> dict[str, object]:
        edges = [[a, b, [asdict(d) for d in deps]] for a, b, deps in self.ddg.edges(data="deps")]
        return {
            "number": self.number,
            "kernels": json.loads(self.kernels.to_json()),
            "ddg": edges,
            "reads": [[*key, [asdict(b) for b in boxes]] for key, boxes in self.ddg.graph.get("reads", {}).items()],
            "writes": [[value, [asdict(b) for b in boxes]] for value, boxes in self.ddg.graph.get("writes", {}).items()],
            "refinement": None if self.refinement is None else asdict(self.refinement),
            "profile": json.loads(self.profile.to_json()),
            "plan": json.loads(self.plan.to_json()),
            "program": self.program.to_text(),
            "seconds": dict(self.seconds),
            "fallbacks": list(self.fallbacks),
            "dry_run": None if self.dry_run is None else asdict(self.dry_run),
            "emulation": None if self.emulation is None else asdict(self.emulation),
            "cluster": json.loads(self.cluster.to_json()),
            "memory": {name: asdict(use) for name, use in self.memory.items()},
            "uncaptured": list(self.uncaptured),
        }

    def simple_plans(self) -> list[str]:
        """Of a throughput plan: what simple plans, their mixtures with replicas and the best mixture reach; which is as good."""
        if self.plan.objective != "throughput" or len(self.cluster.devices) < 2 or not self.kernels.kernels:
            return []
        from .passes.mix import mix_of_graphs
        from .passes.mixture import best_mixture

        mix = mix_of_graphs([(self.ddg, self.profile, 1.0)], self.cluster, overlap=self.plan.overlap)
        try:
            found = best_mixture(mix, time_limit=2.0)
        except PlanError:
            return []
        plans = {**found.baselines, "mixture of plans": found.bottleneck_us}
        shown = ", ".join(f"{name} {us:.1f} µs" for name, us in sorted(plans.items(), key=lambda item: item[1]))
        lines = [f"per request, by plan: {shown}"]
        best = min(found.baselines, key=lambda name: found.baselines[name], default="")
        if best and found.baselines[best] <= min(self.plan.bottleneck_us, found.bottleneck_us) * 1.001:
            lines.append(f"{best} is as good: take it")
        return lines

    def ceilings(self) -> list[str]:
        """What any mix of kernels could gain at most on each pair of unlike data-sheet GPUs, by their figures alone."""
        types = list({d.type: d for d in self.cluster.devices if d.kind == "modelled"}.values())
        return [
            f"ceiling by data sheet: no mix of kernels on {a.type} and {b.type} gains over {ceiling(a, b):.3f}× replicas"
            for a, b in itertools.combinations(types, 2)
        ]


def _dependence(raw: Any) -> Dependence:
    return Dependence(**{**raw, "boxes": _boxes(raw.get("boxes", ()))})


def _boxes(raw: Any) -> tuple[Box, ...]:
    return tuple(Box(b["start"], tuple(b["shape"]), tuple(b["strides"])) for b in raw)


def _verdict(plan: Plan) -> str:
    """The plan against each device alone, on the plan's own objective."""
    what = "bottleneck" if plan.objective == "throughput" else "makespan"
    alone = [f"{d} alone {us:.1f} µs ({us / plan.value_us:.3f}×)" for d, us in plan.baselines.items() if plan.value_us > 0]
    return f"{what} {plan.value_us:.1f} µs; " + ("; ".join(alone) if alone else "no device fits it alone")


@dataclass(frozen=True)
class Report:
    """The graphs of one compiled model, and why some of its graphs run elsewhere (``fallbacks``)."""

    graphs: tuple[GraphReport, ...]
    fallbacks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        parts = [g.to_text() for g in self.graphs] + [f"not planned: {reason}" for reason in self.fallbacks]
        return "\n\n".join(parts)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as JSON text; also written to ``path`` if given."""
        text = json.dumps({"graphs": [g._json() for g in self.graphs], "fallbacks": list(self.fallbacks)})
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        return text

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Reads what ``to_json`` wrote. The kernel graphs have no FX graph: they can be planned again but not run."""
        data = json.loads(text)
        graphs = []
        for g in data["graphs"]:
            kernels = KernelGraph.from_json(json.dumps(g["kernels"]))
            ddg = nx.DiGraph(kernels=kernels)
            ddg.add_nodes_from((k.name, {"kernel": k}) for k in kernels.kernels)
            for before, after, raw in g["ddg"]:
                add_edge(ddg, before, after, tuple(map(_dependence, raw)))
            ddg.graph["reads"] = {(kernel, value): _boxes(boxes) for kernel, value, boxes in g.get("reads", ())}
            ddg.graph["writes"] = {value: _boxes(boxes) for value, boxes in g.get("writes", ())}
            if refined := g.get("refinement"):
                changed = {n: tuple((a, b, _dependence(d)) for a, b, d in refined[n]) for n in ("removed", "added")}
                ddg.graph["refinement"] = Refinement(**{**refined, **changed})
            graphs.append(
                GraphReport(
                    g["number"],
                    kernels,
                    ddg,
                    Cluster.from_json(json.dumps(g["cluster"])),
                    Profile.from_json(json.dumps(g["profile"])),
                    Plan.from_json(json.dumps(g["plan"])),
                    Program.from_text(g["program"]),
                    g["seconds"],
                    tuple(g["fallbacks"]),
                    Emulation(**g["emulation"]) if g["emulation"] else None,
                    {name: MemoryUse(**use) for name, use in g.get("memory", {}).items()},
                    tuple(g.get("uncaptured", ())),
                    DryRun.of(g["dry_run"]) if g.get("dry_run") else None,
                )
            )
        return cls(tuple(graphs), tuple(data["fallbacks"]))
