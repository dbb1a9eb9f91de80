"""Why a kernel is where it is, which placements matter most, and what a better link or more memory would bring."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from .errors import PlanError
from .latency import makespan
from .mix import Group, Mix, value, worth
from .mixture import MixPlan, best_mixture, fastest_request

SAME = 0.01
"""Times closer than this, relatively, are a tie."""


class Reason(StrEnum):
    CHOSEN_CHEAPER = "CHOSEN CHEAPER"
    TARGET_CHEAPER = "TARGET CHEAPER"
    INFEASIBLE = "INFEASIBLE"
    TIE = "TIE"


@dataclass(frozen=True)
class Why:
    """Kernel on ``chosen`` rather than ``target``: µs of one use on each (infinite where it cannot run), and the µs of a whole
    mix if this kernel alone moved, beside what it is."""

    kernel: str
    chosen: str
    target: str
    reason: Reason
    chosen_us: float
    target_us: float
    value_us: float
    moved_us: float

    def __str__(self) -> str:
        if self.reason is Reason.INFEASIBLE:
            return f"{self.kernel} on {self.chosen}: INFEASIBLE on {self.target}"
        return (
            f"{self.kernel} on {self.chosen} ({self.chosen_us:.1f} µs), not {self.target} ({self.target_us:.1f} µs): "
            f"{self.reason}; moved alone, a mix takes {self.moved_us:.1f} µs instead of {self.value_us:.1f}"
        )


def compare(chosen_us: float, target_us: float) -> Reason:
    """Which of two places is cheaper for a kernel by itself."""
    if not math.isfinite(target_us):
        return Reason.INFEASIBLE
    if abs(chosen_us - target_us) <= SAME * max(chosen_us, target_us):
        return Reason.TIE
    return Reason.CHOSEN_CHEAPER if chosen_us < target_us else Reason.TARGET_CHEAPER


def why(mix: Mix, placement: Mapping[str, str], kernel: str, target: str, objective: str = "throughput") -> Why:
    """Why ``kernel`` is not on ``target``. ``placement`` is a plan's, made for ``objective``. Raises PlanError for unknown names.

    TARGET CHEAPER is no mistake: the kernel would be faster there by itself, but that group is the busier one, or its values
    would have to move; ``moved_us`` says what the move would cost.
    """
    names = [g.name for g in mix.groups]
    if kernel not in mix.kernels:
        raise PlanError(f"no kernel {kernel!r} in this mix")
    if target not in names:
        raise PlanError(f"no group {target!r}; there are {', '.join(names)}")
    at = [names.index(placement[k]) for k in mix.kernels]
    k, to = mix.kernels.index(kernel), names.index(target)
    value_of = value if objective == "throughput" else makespan
    before = value_of(mix, at)
    chosen_us, target_us = float(mix.times[k, at[k]]), float(mix.times[k, to])
    moved = math.inf
    if mix.allowed[k, to]:
        moved = value_of(mix, [*at[:k], to, *at[k + 1 :]])
    reason = compare(chosen_us, target_us) if mix.allowed[k, to] else Reason.INFEASIBLE
    return Why(kernel, names[at[k]], target, reason, chosen_us, target_us, before, moved)


def matter_most(
    mix: Mix, placement: Mapping[str, str], count: int = 10, objective: str = "throughput", time_limit: float = 20.0
) -> list[Why]:
    """The kernels whose best single move elsewhere would cost most, worst first; of those that ``time_limit`` lets it try."""
    names = [g.name for g in mix.groups]
    at = [names.index(placement[k]) for k in mix.kernels]
    value_of = value if objective == "throughput" else makespan
    deadline = time.perf_counter() + time_limit
    found: list[tuple[float, int, int]] = []
    for k, row in enumerate(mix.allowed):
        moves = [(value_of(mix, [*at[:k], g, *at[k + 1 :]]), k, g) for g in range(len(names)) if row[g] and g != at[k]]
        if moves:
            found.append(min(moves))
        if time.perf_counter() > deadline:
            break
    worst = sorted(found, key=lambda item: -item[0])[:count]
    return [why(mix, placement, mix.kernels[k], names[g], objective) for _, k, g in worst]


def differences(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Kernels that two plans place differently."""
    names = dict.fromkeys([*a, *b])
    return {k: (a.get(k), b.get(k)) for k in names if a.get(k) != b.get(k)}


@dataclass(frozen=True)
class Sensitivity:
    """What would change the result, by planning again: (description, µs of a mix, ratio to today)."""

    today_us: float
    changes: tuple[tuple[str, float, float], ...]

    def __str__(self) -> str:
        return "\n".join(f"  {what}: {us:.1f} µs ({ratio:.3f}x as fast)" for what, us, ratio in self.changes)


def sensitivity(mix: Mix, plan: MixPlan, *, time_limit: float = 10.0) -> Sensitivity:
    """Plan again with every link twice as wide, and, for each group whose memory is a limit, with one more GiB on its devices."""
    changes = []

    def wider(links: Mapping[Any, tuple[float, float]]) -> dict[Any, tuple[float, float]]:
        return {pair: (per / 2, latency) for pair, (per, latency) in links.items()}

    def again(what: str, changed: Mix) -> None:
        planner = best_mixture if plan.objective == "throughput" else fastest_request
        found = planner(changed, time_limit=time_limit)
        changes.append((what, found.bottleneck_us, plan.bottleneck_us / found.bottleneck_us if found.bottleneck_us else 1.0))

    if mix.links:
        again("links twice as wide", replace(mix, links=wider(mix.links), inner=wider(mix.inner)))
    total = sum(nbytes for _, nbytes, _, _ in mix.residents) + mix.activation_bytes
    for i, group in enumerate(mix.groups):
        if math.isfinite(group.memory) and total > group.memory:
            more: list[Group] = list(mix.groups)
            more[i] = replace(group, memory=group.memory + 2**30)
            again(f"one GiB more on {group.name}", replace(mix, groups=tuple(more)))
    return Sensitivity(plan.bottleneck_us, tuple(changes))


def same_budget(mix: Mix) -> dict[str, float]:
    """What the money, or the number of devices, would reach in one type alone: name → µs of a mix.

    ``all NAME``: as many devices as there are, all of that type. ``dollars in NAME``: as many as the price of all pays for (whole
    ones), where prices are known. Each serves whole requests, as replicas do. Types that cannot hold or run the model are left
    out.
    """
    count = sum(g.size for g in mix.groups)
    budget = sum(g.size * g.price for g in mix.groups)
    found: dict[str, float] = {}
    for i, group in enumerate(mix.groups):
        placement: Sequence[int] = [i] * len(mix.kernels)
        if not mix.allowed[:, i].all():
            continue
        of = worth(mix, placement)
        if of.memory[i] > group.memory:
            continue
        alone = float(of.compute[i])
        found[f"all {group.name}"] = alone / count
        if all(g.price > 0 for g in mix.groups) and budget >= group.price:
            found[f"dollars in {group.name}"] = alone / int(budget / group.price + 1e-9)
    return found
