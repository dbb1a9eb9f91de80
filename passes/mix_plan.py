"""What the planner decided for a mix, as data, as text and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .ir import format_bytes


@dataclass(frozen=True)
class SharedPlan:
    """One plan of a mixture: ``share`` of the requests, and the group of each kernel; of each phase the batch size, where there
    is a choice."""

    share: float
    placement: Mapping[str, str]
    bottleneck_us: float
    batches: tuple[int, ...] = ()


@dataclass(frozen=True)
class MixPlan:
    """What the planner decided for a mix.

    bottleneck_us: µs between two whole mixes in the steady state. bound_us: certified, no mixture of plans does better.
    ``single`` is the best plan found when one must serve all requests, ``whole`` how many requests of ``sum(whole)`` each plan of
    the mixture serves and ``whole_us`` what that takes (``bottleneck_us`` is of the fractions). baselines: name → µs, of the
    simple plans; ``loads``: group → (µs of compute of a member, µs of its busiest link, bytes of memory on a member when all
    plans are resident). batches: of each phase, in the plan with the largest share.
    """

    plans: tuple[SharedPlan, ...]
    whole: tuple[int, ...]
    single: SharedPlan
    single_us: float
    bottleneck_us: float
    bound_us: float
    status: str
    seconds: float
    groups: Mapping[str, tuple[str, ...]]
    loads: Mapping[str, tuple[float, float, float]]
    baselines: Mapping[str, float] = field(default_factory=dict)
    recommendation: str = ""
    batches: tuple[int, ...] = ()
    other_hardware: Mapping[str, float] = field(default_factory=dict)
    objective: str = "throughput"
    whole_us: float = 0.0

    @property
    def gap(self) -> float:
        return 0.0 if self.bottleneck_us <= 0 else max(0.0, 1 - self.bound_us / self.bottleneck_us)

    @property
    def single_gap(self) -> float:
        return 0.0 if self.single_us <= 0 else max(0.0, 1 - self.bound_us / self.single_us)

    def to_text(self) -> str:
        what = "one mix every" if self.objective == "throughput" else "one request goes through the mix in"
        other = "mixture of plans" if self.objective == "throughput" else "placement"
        lines = [
            f"{what} {self.bottleneck_us:.1f} µs; no {other} does better than {self.bound_us:.1f} µs "
            f"(gap {100 * self.gap:.2f} %); {self.status}, {self.seconds:.2f} s",
        ]
        for name, us in sorted(self.baselines.items(), key=lambda item: item[1]):
            ratio = us / self.bottleneck_us if self.bottleneck_us else 1.0
            lines.append(f"  {name:26} {us:12.1f} µs   ours is {ratio:.3f}x as fast")
        if self.baselines:
            name = min(self.baselines, key=lambda n: self.baselines[n])
            if self.recommendation == "split by kernel" and self.baselines[name] <= self.bottleneck_us * 1.001:
                lines.append(f"{name} is as good: take it")
        lines.append(f"advice: {self.recommendation}")
        for name, us in sorted(self.other_hardware.items(), key=lambda item: item[1]):
            faster = us < self.bottleneck_us * 0.999
            ratio = us / self.bottleneck_us if self.bottleneck_us else 1.0
            end = "would be faster than anything on this cluster" if faster else f"ours is {ratio:.3f}x as fast"
            lines.append(f"  {name:26} {us:12.1f} µs   {end}")
        if len(self.plans) > 1:
            whole = " : ".join(map(str, self.whole))
            turns = f", which takes {self.whole_us:.1f} µs" if self.whole_us > self.bottleneck_us * (1 + 1e-6) else ""
            lines.append(f"{len(self.plans)} plans share the requests; in whole requests {whole}{turns}")
        for plan in self.plans:
            counts: dict[str, int] = {}
            for group in plan.placement.values():
                counts[group] = counts.get(group, 0) + 1
            where = ", ".join(f"{n} kernels on {g}" for g, n in counts.items())
            batches = f", batch {' and '.join(map(str, plan.batches))}" if max(plan.batches, default=1) > 1 else ""
            lines.append(f"  share {plan.share:.3f}{batches}: {where}")
        if self.objective == "throughput":
            lines.append(f"one plan for all requests: {self.single_us:.1f} µs (gap {100 * self.single_gap:.2f} %)")
        for name, (compute, transfer, memory) in self.loads.items():
            size = len(self.groups[name])
            held = f", memory {format_bytes(memory)} a device" if memory else ""
            lines.append(
                f"  {name}{f' x {size}' if size > 1 else ''}: compute {compute:.1f} µs, transfers {transfer:.1f} µs{held}"
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        return json.dumps(
            {
                "bottleneck_us": self.bottleneck_us,
                "bound_us": self.bound_us,
                "gap": self.gap,
                "seconds": self.seconds,
                "status": self.status,
                "shares": [plan.share for plan in self.plans],
                "baselines": dict(self.baselines),
                "placement": dict(self.plans[0].placement) if len(self.plans) == 1 else [dict(p.placement) for p in self.plans],
                "requests": list(self.whole),
                "whole_us": self.whole_us,
                "single": {"bottleneck_us": self.single_us, "gap": self.single_gap, "placement": dict(self.single.placement)},
                "groups": {name: list(members) for name, members in self.groups.items()},
                "recommendation": self.recommendation,
                "batches": list(self.batches) if len(self.plans) == 1 else [list(p.batches) for p in self.plans],
                "objective": self.objective,
                "other_hardware": dict(self.other_hardware),
            },
            indent=1,
        )


@dataclass(frozen=True)
class GraphShares:
    """What a mixture says of one graph. Graphs of one mixture have the same ``mixture``.

    ``plans``: of each plan its share of the requests, and the group of each of the graph's kernels. ``groups``: group → devices.
    ``longest_us``: a segment should not keep a lane from the other graphs' requests for longer than that.
    """

    mixture: MixPlan
    plans: tuple[tuple[float, Mapping[str, str]], ...]
    groups: Mapping[str, tuple[str, ...]]
    longest_us: float = math.inf

    @classmethod
    def of(cls, mixture: MixPlan, graph: str, longest_us: float = math.inf) -> GraphShares:
        """Of the graph that is called ``graph`` in the mixture."""
        prefix = f"{graph}/"
        plans = tuple(
            (plan.share, {k.removeprefix(prefix): g for k, g in plan.placement.items() if k.startswith(prefix)})
            for plan in mixture.plans
        )
        return cls(mixture, plans, mixture.groups, longest_us)


def recommend(baselines: Mapping[str, float], value: float, worth_it: float = 0.02) -> str:
    """ "one device", "replicas" or "split by kernel": the simplest plan within ``worth_it`` of the best."""
    single = min((us for name, us in baselines.items() if name.startswith("single:")), default=float("inf"))
    if single <= value * (1 + worth_it):
        return "one device"
    if baselines.get("replicas", float("inf")) <= value * (1 + worth_it):
        return "replicas"
    return "split by kernel"
