"""DDG + Profile + Cluster → :class:`Plan`, by a mixed-integer program solved with ``scipy.optimize.milp`` (HiGHS).

Variables: x[k, g] ∈ {0, 1}, kernel k runs on device g; y[f, u, g] ∈ {0, 1}, the value of flow f moves from u to g; r[w, g] ∈
[0, 1], resident w (weight, constant, state) is on g; C ≥ 0, the objective in units of the mean kernel time, so that the
solver works near 1. Terms are those of ``problem.py``. Equations, each added by the function that it names:

- Σ_g x[k, g] = 1 where t[k, g] is finite; pins fix x                                        :meth:`_Model.assign`
- y[f, u, g] ≥ x[source, u] + x[reader, g] − 1, for each reader; the source of an input, and the reader "home" of an
  output, are constants; one y per destination, however many readers                          :meth:`_Model.move`
- r[w, g] ≥ x[k, g] for each k that reads w; u[g] ≥ x[k, g]; Σ_w bytes · r + inflight · peak · u ≤ memory of g
                                                                                               :meth:`_Model.fit`
- throughput: C ≥ Σ_k t x[k, g] and C ≥ Σ m y on each link u→g; without overlap C ≥ Σ_k t x + Σ m y at g
  :meth:`_Model.throughput`
- latency, with s[k] the start of k and a[g, k] the time when g has finished the kernels up to k:  :meth:`_Model.latency`
  a[g, k] ≥ a[g, k−1]; a[g, k] ≥ s[k] + t[k, g] x[k, g] − B (1 − x[k, g]); s[k] ≥ a[g, k−1] − B (1 − x[k, g]);
  s[reader] ≥ s[source] + t[source] + m (x[source, u] + x[reader, g] − 1); C ≥ the same for outputs at home.
  B is the makespan of the best plan known before, never a large constant: 1e9 makes HiGHS accept overlapping kernels.

The answer is recomputed with ``evaluate``: nothing of the solver's arithmetic but its bound is reported, and that bound is
never above the recomputed value. Simple plans (each device alone, every split of the order in contiguous parts on two
devices) are made first, so a time limit never returns nothing and the plan is never worse than they are.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Mapping, Sequence

import networkx as nx
import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from .cluster import Cluster
from .errors import InfeasibleError, PlanError
from .ir import KernelGraph, Objective, Plan, Profile, format_bytes
from .problem import HOME, Evaluation, Problem, evaluate, make_problem

#: Up to this many kernels the latency program is handed to the solver; beyond, big-B rows never close the gap in time.
_LATENCY_MILP_KERNELS = 40
#: Up to this many (kernel, device) pairs the throughput program is handed to the solver as a whole.
_MILP_PLACES = 600


def partition(
    ddg: nx.DiGraph,
    profile: Profile,
    cluster: Cluster,
    *,
    objective: Objective = "throughput",
    pins: Mapping[str, str] | None = None,
    inflight: int = 1,
    overlap: bool = True,
    time_limit: float = 60.0,
    gap: float = 1e-4,
    placement: Mapping[str, str] | None = None,
    planner: str = "milp",
) -> Plan:
    """Decides which device runs each kernel.

    Args:
        objective: ``"throughput"`` minimises the bottleneck device's µs per request, ``"latency"`` one request's makespan.
        pins: glob over kernel names or module paths → device name. A module path also pins what is below it.
        inflight: requests whose activations are in memory at once.
        overlap: whether transfers run beside compute (GPUs with copy engines) or take the device's own time (CPU lanes).
        time_limit: seconds for the solver.
        gap: relative gap at which the solver may stop.
        placement: take this kernel → device map instead of solving; it is checked and evaluated under the name ``planner``.

    Raises:
        InfeasibleError: no placement fits into memory, or a pin contradicts it; names the biggest items and the shortfall.
        PlanError: a pin names a device or a kernel that is not there.
    """
    if objective not in ("throughput", "latency"):
        raise PlanError(f"objective {objective!r} is neither 'throughput' nor 'latency'")
    started = time.perf_counter()
    problem = make_problem(ddg, profile, cluster, inflight=inflight, overlap=overlap)
    graph: KernelGraph = ddg.graph["kernels"]
    allowed = _allowed(graph, problem, pins or {})

    def score(evaluation: Evaluation) -> float:
        return evaluation.bottleneck_us if objective == "throughput" else evaluation.makespan_us

    singles: dict[str, Evaluation] = {}
    for g, device in enumerate(problem.devices):
        if np.isfinite(problem.times[:, g]).all():
            singles[device] = evaluate(problem, [g] * len(problem.kernels))
    baselines = {d: score(e) for d, e in singles.items() if e.fits(cluster)}

    if placement is not None:
        chosen = _given(problem, placement, allowed)
        bound, status = _simple_bound(problem, allowed, objective), "given"
    else:
        chosen, bound, status = _solve(problem, allowed, objective, score, time_limit, gap)
    evaluation = evaluate(problem, chosen)
    if not evaluation.fits(cluster):
        raise _does_not_fit(problem, evaluation)
    return Plan(
        placement={k: problem.devices[g] for k, g in zip(problem.kernels, chosen, strict=True)},
        devices=problem.devices,
        home=cluster.home,
        objective=objective,
        planner=planner,
        bottleneck_us=evaluation.bottleneck_us,
        makespan_us=evaluation.makespan_us,
        bound_us=min(bound, score(evaluation)),
        certified_us=_certified(problem, allowed, objective, score(evaluation)) if time_limit > 0 else 0.0,
        times={
            k: {d: float(us) for d, us in zip(problem.devices, problem.times[i], strict=True) if np.isfinite(us)}
            for i, k in enumerate(problem.kernels)
        },
        status=status,
        seconds=time.perf_counter() - started,
        loads=evaluation.loads,
        cut_values=evaluation.cut_values,
        cut_bytes=evaluation.cut_bytes,
        overlap=overlap,
        baselines=baselines,
    )


def matching(graph: KernelGraph, pattern: str) -> list[str]:
    """Names of the kernels that a pin's pattern stands for: a glob over kernel names or module paths, or a path above them."""
    return [
        k.name
        for k in graph.kernels
        if fnmatch.fnmatchcase(k.name, pattern)
        or fnmatch.fnmatchcase(k.module, pattern)
        or (k.module + ".").startswith(pattern + ".")
    ]


def pinned(graph: KernelGraph, pins: Mapping[str, str]) -> dict[str, str]:
    """Kernel → device for the kernels that ``pins`` name.

    Raises:
        PlanError: a pattern matches no kernel and no module, or two patterns want one kernel on different devices.
    """
    result: dict[str, str] = {}
    for pattern, device in pins.items():
        hit = matching(graph, pattern)
        if not hit:
            modules = sorted({k.module for k in graph.kernels if k.module})
            raise PlanError(f"pin {pattern!r} matches no kernel and no module; modules here: {', '.join(modules[:12]) or 'none'}")
        for kernel in hit:
            if result.setdefault(kernel, device) != device:
                raise PlanError(
                    f"kernel {kernel!r} is pinned to {result[kernel]!r} and, by {pattern!r}, to {device!r}; drop one pin"
                )
    return result


def _allowed(graph: KernelGraph, problem: Problem, pins: Mapping[str, str]) -> np.ndarray:
    """Boolean [kernel, device]: where each kernel may run."""
    allowed: np.ndarray = np.isfinite(problem.times)
    for kernel, device in pinned(graph, pins).items():
        if device not in problem.devices:
            raise PlanError(
                f"kernel {kernel!r} is pinned to {device!r}, which is not in the cluster ({', '.join(problem.devices)})"
            )
        k, g = problem.kernels.index(kernel), problem.devices.index(device)
        if not allowed[k, g]:
            raise InfeasibleError(f"kernel {kernel!r} is pinned to {device!r}, which cannot run it")
        allowed[k] = False
        allowed[k, g] = True
    return allowed


def _given(problem: Problem, placement: Mapping[str, str], allowed: np.ndarray) -> list[int]:
    missing = [k for k in problem.kernels if k not in placement]
    extra = [k for k in placement if k not in problem.kernels]
    if missing or extra:
        raise PlanError(
            f"the placement is for another graph: it lacks {missing[:3] or 'nothing'} and has {extra[:3] or 'nothing'} in excess"
        )
    chosen = []
    for k, kernel in enumerate(problem.kernels):
        device = placement[kernel]
        if device not in problem.devices:
            raise PlanError(
                f"kernel {kernel!r} is placed on {device!r}, which is not in the cluster ({', '.join(problem.devices)})"
            )
        if not allowed[k, problem.devices.index(device)]:
            raise InfeasibleError(f"kernel {kernel!r} is placed on {device!r}, where it is pinned away or cannot run")
        chosen.append(problem.devices.index(device))
    return chosen


def _does_not_fit(problem: Problem, evaluation: Evaluation | None) -> InfeasibleError:
    total = sum(nbytes for _, nbytes, _, _ in problem.residents)
    activations = problem.activation_bytes * problem.inflight
    capacity = {d.name: d.memory for d in problem.cluster.devices}
    biggest = sorted(problem.residents, key=lambda r: -r[1])[:5]
    items = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes, _, _ in biggest) or "no weights"
    room = sum(max(0, c - activations) for c in capacity.values())
    if evaluation is not None:
        worst = max(capacity, key=lambda d: evaluation.loads[d].memory_bytes - capacity[d])
        shortfall = evaluation.loads[worst].memory_bytes - capacity[worst]
        where = f"{worst} lacks {format_bytes(shortfall)}"
    else:
        # One item may be larger than any device even where the sum would fit.
        largest = max([nbytes for _, nbytes, _, _ in problem.residents], default=0)
        shortfall = max(total - room, largest - max(c - activations for c in capacity.values()), 0)
        where = (
            f"{format_bytes(shortfall)} are lacking" if shortfall else "no division of the weights satisfies every device and pin"
        )
    return InfeasibleError(
        f"the graph does not fit: weights and state {format_bytes(total)} plus {format_bytes(activations)} of activations on "
        f"each device, against {', '.join(f'{d} {format_bytes(c)}' for d, c in capacity.items())}; {where}. Biggest: {items}. "
        "Add a device, raise max_memory, lower inflight or remove pins"
    )


def _solve(
    problem: Problem,
    allowed: np.ndarray,
    objective: Objective,
    score: Callable[[Evaluation], float],
    time_limit: float,
    gap: float,
) -> tuple[list[int], float, str]:
    if objective == "throughput" and time_limit > 0 and len(problem.kernels) * len(problem.devices) > _MILP_PLACES:
        return _solve_large(problem, allowed, score, time_limit, gap)
    best, best_value = _incumbent(problem, allowed, score)
    bound = _simple_bound(problem, allowed, objective)
    if best is not None and (len(problem.devices) == 1 or best_value <= bound * (1 + 1e-9)):
        return best, best_value, "optimal"
    if best is None and len(problem.devices) == 1:
        raise _does_not_fit(problem, evaluate(problem, [0] * len(problem.kernels)))
    if best is None:
        best = _any_that_fits(problem, allowed, time_limit)
        best_value = score(evaluate(problem, best))
    status = "heuristic"
    if time_limit > 0 and (objective == "throughput" or len(problem.kernels) <= _LATENCY_MILP_KERNELS):
        finite = problem.times[np.isfinite(problem.times) & (problem.times > 0)]
        mean = float(finite.mean()) if finite.size else 1.0
        model = _Model(problem, allowed, mean if objective == "throughput" else best_value / 100)
        if objective == "throughput":
            model.move()
            model.throughput()
        else:
            # Twice the makespan to beat: with exactly that HiGHS loses optimal plans to rounding, or fails.
            model.latency(2 * best_value)
        found, dual, solved = model.solve_fitting(time_limit, gap)
        if found is not None and (value := score(evaluate(problem, found))) < best_value:
            best, best_value = found, value
        if dual is not None:
            bound = max(bound, min(dual, best_value))
        status = solved if solved == "time limit" else "heuristic"
    if objective == "latency" and time_limit > 0 and len(problem.kernels) > _LATENCY_MILP_KERNELS:
        best, best_value, bound = _cut(problem, allowed, score, best, best_value, bound, time_limit)
    if best_value - bound > max(gap, 1e-6) * best_value:
        best, best_value = _improve(problem, allowed, score, best, best_value, min(1.0, max(0.0, time_limit)))
    if best_value - bound <= max(gap, 1e-6) * best_value + 1e-9:
        status = "optimal"
    return best, bound, status


def _solve_large(
    problem: Problem, allowed: np.ndarray, score: Callable[[Evaluation], float], time_limit: float, gap: float
) -> tuple[list[int], float, str]:
    """Thresholds of the relaxation's fractions, improved by moves, under its certified bound (``relaxation.py``)."""
    from .mix import mix_of_problem
    from .mixture import best_mixture

    fixed = {k: int(np.flatnonzero(row)[0]) for k, row in enumerate(allowed) if row.sum() == 1}
    try:
        plan = best_mixture(mix_of_problem(problem, fixed), time_limit=time_limit, gap=gap)
    except InfeasibleError:
        raise _does_not_fit(problem, None) from None
    chosen = [problem.devices.index(plan.single.placement[k]) for k in problem.kernels]
    value = score(evaluate(problem, chosen))
    bound = min(plan.bound_us, value)
    return chosen, bound, "optimal" if value - bound <= max(gap, 1e-6) * value + 1e-9 else "heuristic"


def _cut(
    problem: Problem,
    allowed: np.ndarray,
    score: Callable[[Evaluation], float],
    best: list[int],
    best_value: float,
    bound: float,
    time_limit: float,
) -> tuple[list[int], float, float]:
    """The minimum cut, best where kernels run one at a time, if it beats ``best``; its value bounds graphs that are chains."""
    from .mix import mix_of_problem
    from .mixture import fastest_request

    fixed = {k: int(np.flatnonzero(row)[0]) for k, row in enumerate(allowed) if row.sum() == 1}
    try:
        plan = fastest_request(mix_of_problem(problem, fixed), time_limit=min(time_limit, 10.0))
    except InfeasibleError:
        return best, best_value, bound
    chosen = [problem.devices.index(plan.single.placement[k]) for k in problem.kernels]
    evaluation = evaluate(problem, chosen)
    if evaluation.fits(problem.cluster) and score(evaluation) < best_value:
        best, best_value = chosen, score(evaluation)
    # Order edges between devices only add to the makespan, so the bound of the mix, which has none, holds.
    return best, best_value, max(bound, min(plan.bound_us, best_value))


def _certified(problem: Problem, allowed: np.ndarray, objective: Objective, value: float) -> float:
    """A bound that rests on no solver's word: dual weights that are checked here, and bounds that need no solver."""
    simple = _simple_bound(problem, allowed, objective)
    if objective == "latency" or not len(problem.kernels) or len(problem.devices) == 1:
        return min(simple, value)
    from .mix import mix_of_problem
    from .relaxation import relax

    fixed = {k: int(np.flatnonzero(row)[0]) for k, row in enumerate(allowed) if row.sum() == 1}
    return min(max(simple, relax(mix_of_problem(problem, fixed), value, 10.0).bound), value)


def _any_that_fits(problem: Problem, allowed: np.ndarray, time_limit: float) -> list[int]:
    """A placement that fits into memory, where no simple plan does."""
    found, _, solved = _Model(problem, allowed, 1.0).solve_fitting(max(time_limit, 1.0), 1.0)
    if found is not None:
        return found
    if solved == "time limit":
        raise PlanError(f"no placement that fits into memory was found within {max(time_limit, 1.0)} s; raise time_limit")
    raise _does_not_fit(problem, None)


def _incumbent(problem: Problem, allowed: np.ndarray, score: Callable[[Evaluation], float]) -> tuple[list[int] | None, float]:
    """The best of the simple plans: one device, two devices split at one point of the order, each kernel where it is
    fastest."""
    count, devices = len(problem.kernels), len(problem.devices)
    fastest = np.where(allowed, problem.times, np.inf).argmin(axis=1)
    candidates = [[g] * count for g in range(devices)] + [list(map(int, fastest))]
    # A few hundred plans at most: with many devices fewer cuts for each pair.
    step = max(1, count // max(2, 256 // max(1, devices * (devices - 1))))
    for a in range(devices):
        for b in range(devices):
            if a != b:
                candidates += [[a] * cut + [b] * (count - cut) for cut in range(step, count, step)]
    best, best_value = None, float("inf")
    for candidate in candidates:
        placed = [g if allowed[k, g] else int(fastest[k]) for k, g in enumerate(candidate)]
        evaluation = evaluate(problem, placed)
        if evaluation.fits(problem.cluster) and score(evaluation) < best_value:
            best, best_value = placed, score(evaluation)
    return best, best_value


def _improve(
    problem: Problem,
    allowed: np.ndarray,
    score: Callable[[Evaluation], float],
    best: list[int],
    best_value: float,
    seconds: float,
) -> tuple[list[int], float]:
    """Moves one kernel, or a stretch of the order, to another device while that helps and time is left."""
    deadline = time.perf_counter() + seconds
    count = len(best)
    improved = True
    while improved and time.perf_counter() < deadline:
        improved = False
        for length in (1, 2, 4, 8, 16, 32):
            for start in range(0, count - length + 1, max(1, length // 2)):
                for g in range(len(problem.devices)):
                    if time.perf_counter() >= deadline:
                        return best, best_value
                    stretch = range(start, start + length)
                    if all(best[k] == g for k in stretch) or not all(allowed[k, g] for k in stretch):
                        continue
                    trial = best[:start] + [g] * length + best[start + length :]
                    evaluation = evaluate(problem, trial)
                    if score(evaluation) < best_value * (1 - 1e-12) and evaluation.fits(problem.cluster):
                        best, best_value, improved = trial, score(evaluation), True
    return best, best_value


def _simple_bound(problem: Problem, allowed: np.ndarray, objective: Objective) -> float:
    """A bound that needs no solver.

    Throughput: the fluid relaxation without transfers, bottleneck ≥ max(Σ_k min_g t[k, g] / devices, max_k min_g t[k, g]).
    Latency: the longest path when each kernel runs where it is fastest and transfers are free, and the cheapest device
    sequence along that path with its transfers (dynamic programming); every placement's makespan contains both.
    """
    fastest = np.where(allowed, problem.times, np.inf).min(axis=1, initial=np.inf) if len(problem.kernels) else np.zeros(0)
    if not len(fastest):
        return 0.0
    work = max(float(fastest.sum()) / len(problem.devices), float(fastest.max()))
    if objective == "throughput":
        return work
    return max(work, _path_bound(problem, allowed, fastest))


def _path_bound(problem: Problem, allowed: np.ndarray, fastest: np.ndarray) -> float:
    count, devices = len(problem.kernels), len(problem.devices)
    feeds: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for f, flow in enumerate(problem.flows):
        if flow.source != HOME and flow.unless is None:
            for reader in flow.readers:
                if flow.source < reader:
                    feeds[reader].append((flow.source, f))
    length = np.zeros(count)
    came: list[tuple[int, int] | None] = [None] * count
    for k in range(count):
        start = 0.0
        for source, f in feeds[k]:
            if length[source] > start:
                start, came[k] = length[source], (source, f)
        length[k] = start + fastest[k]
    k = int(length.argmax())
    path: list[tuple[int, int | None]] = []
    while True:
        step = came[k]
        path.append((k, None if step is None else step[1]))
        if step is None:
            break
        k = step[0]
    path.reverse()
    cost = np.where(allowed, problem.times, np.inf)
    reach = cost[path[0][0]].copy()
    for k, crossing in path[1:]:
        assert crossing is not None
        flow = problem.flows[crossing]
        reach = np.array([min(reach[u] + problem.us(u, g, flow.bytes) for u in range(devices)) for g in range(devices)]) + cost[k]
    return max(float(length.max()), float(reach.min()))


class _Model:
    """The program in sparse rows; see the equations at the top of this file."""

    def __init__(self, problem: Problem, allowed: np.ndarray, unit: float) -> None:
        self.problem = problem
        self.allowed = allowed
        self.kernels, self.devices = len(problem.kernels), len(problem.devices)
        self.unit = unit or 1.0
        self.rows: list[tuple[list[int], list[float], float, float]] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.integral: list[int] = []
        for k in range(self.kernels):
            for g in range(self.devices):
                self._variable(0.0, float(allowed[k, g]), integral=True)
        self.goal = self._variable(0.0, np.inf)
        self.moved: list[tuple[int, int, int, int]] = []  # (flow, source device, target device, variable)
        self.held: dict[tuple[int, int], int] = {}  # (resident, device) → variable
        self.assign()
        self.fit()

    def _variable(self, lower: float, upper: float, integral: bool = False) -> int:
        self.lower.append(lower)
        self.upper.append(upper)
        self.integral.append(int(integral))
        return len(self.lower) - 1

    def _x(self, kernel: int, device: int) -> int:
        return kernel * self.devices + device

    def _row(self, terms: Sequence[tuple[int, float]], lower: float = -np.inf, upper: float = np.inf) -> None:
        merged: dict[int, float] = {}
        for column, weight in terms:
            merged[column] = merged.get(column, 0.0) + weight
        self.rows.append((list(merged), list(merged.values()), lower, upper))

    def assign(self) -> None:
        for k in range(self.kernels):
            self._row([(self._x(k, g), 1.0) for g in range(self.devices)], 1.0, 1.0)

    def move(self) -> None:
        for f, flow in enumerate(self.problem.flows):
            for u in range(self.devices):
                if flow.source == HOME and u != 0:
                    continue
                for g in range(self.devices):
                    if g == u:
                        continue
                    source = [] if flow.source == HOME else [(self._x(flow.source, u), -1.0)]
                    known = 1.0 if flow.source == HOME else 0.0
                    rows = [[(self._x(r, g), -1.0)] for r in flow.readers]
                    fixed = [known - 1.0] * len(rows)
                    if flow.to_home and g == 0:
                        rows.append([])
                        fixed.append(known)
                    if not rows:
                        continue
                    # Integral by its rows already; saying so lets HiGHS close the gap several times faster.
                    y = self._variable(0.0, 1.0, integral=True)
                    self.moved.append((f, u, g, y))
                    for row, constant in zip(rows, fixed, strict=True):
                        terms = [(y, 1.0), *row, *source]
                        if flow.unless is not None:
                            terms.append((self._x(flow.unless, g), 1.0))
                        self._row(terms, lower=constant)

    def fit(self) -> None:
        activations = self.problem.activation_bytes * self.problem.inflight
        total = sum(nbytes for _, nbytes, _, _ in self.problem.residents)
        for g, device in enumerate(self.problem.cluster.devices):
            if total + activations <= device.memory:
                continue  # Everything fits here: no row can bind.
            scale = max(1, device.memory)
            terms: list[tuple[int, float]] = []
            base = 0
            if g == 0:
                base = activations
            elif activations:
                used = self._variable(0.0, 1.0)
                for k in range(self.kernels):
                    self._row([(used, 1.0), (self._x(k, g), -1.0)], lower=0.0)
                terms.append((used, activations / scale))
            for w, (_, nbytes, readers, state) in enumerate(self.problem.residents):
                if state and g == 0:
                    base += nbytes
                    continue
                here = self.held[w, g] = self._variable(0.0, 1.0)
                for k in readers:
                    self._row([(here, 1.0), (self._x(k, g), -1.0)], lower=0.0)
                terms.append((here, nbytes / scale))
            # HiGHS forgives 1e-6 a row. The row leaves that much room, so that rounding cuts off nothing that fits;
            # `solve_fitting` cuts off what does not.
            self._row(terms or [(self.goal, 0.0)], upper=(device.memory - base) / scale + (1e-6 if terms else 0.0))

    def exclude(self, placement: Sequence[int]) -> bool:
        """Adds rows that cut off residents too many for a device, as in ``placement``; False if all of them fit."""
        loads = evaluate(self.problem, placement).loads
        added = False
        for g, device in enumerate(self.problem.cluster.devices):
            over = loads[device.name].memory_bytes - device.memory
            if over <= 0:
                continue
            cover = [
                w for (w, h), _ in self.held.items() if h == g and any(placement[k] == g for k in self.problem.residents[w][2])
            ]
            for w in sorted(cover, key=lambda w: self.problem.residents[w][1]):
                nbytes = self.problem.residents[w][1]
                if nbytes < over:  # Without it the rest is still too much: a smaller set cuts off more.
                    cover.remove(w)
                    over -= nbytes
            if not cover:
                continue
            # Not all of the cover together (activations are there with any one of its readers).
            self._row([(self.held[w, g], 1.0) for w in cover], upper=len(cover) - 1.0)
            added = True
        return added

    def throughput(self) -> None:
        for g in range(self.devices):
            compute = [
                (self._x(k, g), -float(self.problem.times[k, g]) / self.unit) for k in range(self.kernels) if self.allowed[k, g]
            ]
            if not self.problem.overlap:
                compute += [(y, -self._us(f, u, t)) for f, u, t, y in self.moved if g in (u, t)]
            if compute:
                self._row([(self.goal, 1.0), *compute], lower=0.0)
        if self.problem.overlap:
            links: dict[tuple[int, int], list[tuple[int, float]]] = {}
            for f, u, t, y in self.moved:
                links.setdefault((u, t), []).append((y, -self._us(f, u, t)))
            for terms in links.values():
                self._row([(self.goal, 1.0), *terms], lower=0.0)

    def _us(self, flow: int, source: int, target: int) -> float:
        return self.problem.us(source, target, self.problem.flows[flow].bytes) / self.unit

    def latency(self, horizon: float) -> None:
        big = horizon / self.unit
        start = [self._variable(0.0, big) for _ in range(self.kernels)]
        free = [[self._variable(0.0, big) for _ in range(self.kernels)] for _ in range(self.devices)]
        took = [
            [(self._x(k, g), float(self.problem.times[k, g]) / self.unit) for g in range(self.devices) if self.allowed[k, g]]
            for k in range(self.kernels)
        ]
        for k in range(self.kernels):
            self._row([(self.goal, 1.0), (start[k], -1.0), *((c, -w) for c, w in took[k])], lower=0.0)
            for g in range(self.devices):
                if not self.allowed[k, g]:
                    if k:
                        self._row([(free[g][k], 1.0), (free[g][k - 1], -1.0)], lower=0.0)
                    continue
                us = float(self.problem.times[k, g]) / self.unit
                self._row([(free[g][k], 1.0), (start[k], -1.0), (self._x(k, g), -big - us)], lower=-big)
                if k:
                    self._row([(free[g][k], 1.0), (free[g][k - 1], -1.0)], lower=0.0)
                    self._row([(start[k], 1.0), (free[g][k - 1], -1.0), (self._x(k, g), -big)], lower=-big)
        for flow in self.problem.flows:
            for reader in flow.readers:
                if flow.source > reader:
                    continue  # State that was left there by the call before: its way is not in this program.
                self._arrive(flow.source, reader, start, took, flow.bytes, flow.unless)
            if flow.to_home and flow.source != HOME:
                back = [(self._x(flow.source, u), -self.problem.us(u, 0, flow.bytes) / self.unit) for u in range(1, self.devices)]
                done = [(c, -w) for c, w in took[flow.source]]
                self._row([(self.goal, 1.0), (start[flow.source], -1.0), *done, *back], lower=0.0)
        for before, after in self.problem.order_edges:
            self._arrive(before, after, start, took, 0, None)

    def _arrive(
        self,
        source: int,
        reader: int,
        start: list[int],
        took: list[list[tuple[int, float]]],
        nbytes: int,
        unless: int | None,
    ) -> None:
        if source == HOME:
            for g in range(1, self.devices):
                us = self.problem.us(0, g, nbytes) / self.unit
                terms = [(start[reader], 1.0), (self._x(reader, g), -us)]
                if unless is not None:
                    terms.append((self._x(unless, g), us))
                self._row(terms, lower=0.0)
            return
        ready = [(start[reader], 1.0), (start[source], -1.0), *((c, -w) for c, w in took[source])]
        self._row(ready, lower=0.0)
        for u in range(self.devices):
            for g in range(self.devices):
                if u != g:
                    us = self.problem.us(u, g, nbytes) / self.unit
                    self._row([*ready, (self._x(source, u), -us), (self._x(reader, g), -us)], lower=-us)

    def solve_fitting(self, time_limit: float, gap: float) -> tuple[list[int] | None, float | None, str]:
        """(placement that fits or None, proven bound in µs or None, "optimal" | "time limit" | "infeasible" | "failed")."""
        deadline = time.perf_counter() + time_limit
        while True:
            left = deadline - time.perf_counter()
            if left <= 0:
                return None, None, "time limit"
            found, bound, status = self.solve(left, gap)
            if found is None or not self.exclude(found):
                return found, bound, status

    def solve(self, time_limit: float, gap: float) -> tuple[list[int] | None, float | None, str]:
        """One run of the solver; its placement may exceed memory by a hair."""
        size = len(self.lower)
        counts = [len(columns) for columns, _, _, _ in self.rows]
        matrix = sparse.csr_array(
            (
                np.concatenate([np.asarray(w, dtype=float) for _, w, _, _ in self.rows]),
                np.concatenate([np.asarray(c, dtype=np.int64) for c, _, _, _ in self.rows]),
                np.concatenate([[0], np.cumsum(counts)]),
            ),
            shape=(len(self.rows), size),
        )
        cost = np.zeros(size)
        cost[self.goal] = 1.0
        result = milp(
            cost,
            integrality=np.array(self.integral),
            bounds=Bounds(np.array(self.lower), np.array(self.upper)),
            constraints=LinearConstraint(
                matrix, np.array([row[2] for row in self.rows]), np.array([row[3] for row in self.rows])
            ),
            options={"time_limit": time_limit, "mip_rel_gap": gap, "disp": False},
        )
        status = {0: "optimal", 1: "time limit", 2: "infeasible"}.get(result.status, "failed")
        dual = getattr(result, "mip_dual_bound", None)
        bound = None if dual is None or not np.isfinite(dual) or status == "infeasible" else float(dual) * self.unit
        if result.x is None:
            return None, bound, status
        x = result.x[: self.kernels * self.devices].reshape(self.kernels, self.devices)
        return [int(g) for g in x.argmax(axis=1)], bound, status
