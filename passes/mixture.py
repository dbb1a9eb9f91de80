"""Mix → :class:`MixPlan`: which plans, and which share of the requests each one serves.

A mixture of plans p with shares λ_p ≥ 0, Σ λ = 1, takes max over resources of Σ_p λ_p · load(p): one plan may keep one group busy
while another keeps the other, which is how replicas work. The optimum over all mixtures is at least the relaxation's bound.

1. Where there are few placements (:data:`FEW`) all are tried, and the rest is not needed (:func:`_best_of_all`).
2. Solve the relaxation (``relaxation.py``): fractions x[k, g] and a certified bound.
3. Cut plans from the fractions (:func:`level_plans`): with an order of the groups and a threshold θ ∈ (0, 1], kernel k goes to
   the first group whose cumulated fraction reaches θ. Over a θ drawn at random the expected load of each group is that of the
   fractions, and with two groups so is that of each link: then this mixture *is* the optimum.
4. The simple plans (``baselines.py``) are added, so no mixture of those is better than what comes out.
5. More plans are priced in: moves of kernels that make a plan cheaper under the prices of the resources (:func:`_descend`); with
   two groups none is left.
6. The master program chooses the shares (:func:`_master`); a vertex of it uses at most one plan for each tight resource. Where
   the weights of all plans together exceed a group's memory, it is solved with one binary for each resident and group.
7. Shares become whole requests out of at most 256 (:func:`whole_shares`).

The single best plan is sought in the same pool, improved by moves, and for two groups by ``milp``.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from .baselines import Baselines, simple_plans
from .errors import InfeasibleError, PlanError
from .ir import format_bytes
from .latency import fastest_chains, longest_paths, makespan, waits
from .mix import Mix, Worth, apart, fits, loads_of, memory_binds, possible, resources, worth
from .mix_plan import MixPlan, SharedPlan, recommend
from .problem import HOME
from .relaxation import integer_plan, relax

Placement = tuple[int, ...]

#: So many placements are tried one by one.
FEW = 20_000


def best_mixture(mix: Mix, *, time_limit: float = 60.0, gap: float = 5e-3) -> MixPlan:
    """The best mixture of plans that can be proven so, and the best single plan.

    Where there are few placements (:data:`FEW`) all of them are tried, and both are the optimum. Raises InfeasibleError where no
    plan fits into memory. With ``time_limit`` 0 the simple plans alone are mixed, and the status says so.
    """
    mix.check()
    started = time.perf_counter()
    deadline = started + time_limit
    simple = simple_plans(mix)
    pool: dict[Placement, Worth] = {}

    def add(placement: Sequence[int]) -> bool:
        key = tuple(int(g) for g in placement)
        if key in pool or not possible(mix, key):
            return False
        found = worth(mix, key)
        if not fits(mix, found):
            return False
        pool[key] = found
        return True

    for placement in simple.placements():
        add(placement)
    upper = min((float(resources(mix, w).max()) for w in pool.values()), default=0.0)
    status = "heuristic"
    lower = 0.0
    every = _every(mix) if time_limit > 0 else None
    if every is not None:
        found, lower = _best_of_all(mix, every)
        for placement in found:
            add(placement)
    elif time_limit > 0:
        relaxed = relax(mix, upper or _total(mix), max(0.05, time_limit / 2))
        lower = relaxed.bound
        for placement in level_plans(mix, relaxed.x) if relaxed.x is not None else ():
            add(placement)
    if not pool:
        for placement in _packed(mix, deadline) if every is None else ():
            add(placement)
        if not pool:
            raise _does_not_fit(mix)
    shares, value, prices = _master(mix, pool, deadline)
    if every is None and len(mix.groups) > 2 and time_limit > 0:
        shares, value = _price_in(mix, pool, add, shares, value, prices, lower, gap, deadline)
    best = min(pool, key=lambda p: float(resources(mix, pool[p]).max(initial=0.0)))
    if every is None and time_limit > 0:
        best = _improve(mix, best, deadline, lower, gap)
        if len(mix.groups) == 2 and time.perf_counter() < deadline:
            best = _exact(mix, best, lower, gap, deadline)
        if add(best):
            shares, value, _ = _master(mix, pool, deadline)

    def mixed(of: Mix, part: Mapping[Placement, Worth]) -> float:
        nonlocal shares, value
        found, us, _ = _master(of, part, deadline)
        if us < value and of is mix:  # The master program over all plans stopped at its tolerance.
            shares, value = found, us
        # Of members: their taking turns is in the pool and no slower, so that what is below `value` is tolerance too.
        return us if of is mix else max(us, value)

    baselines = simple.values(mix, mixed, max(0.1, deadline - time.perf_counter()), pool)
    bound = min(max(lower, 0.0), value)
    if value - bound <= max(gap, 1e-9) * value:
        status = "optimal within the gap"
    if memory_binds(mix):
        status += " (memory couples the plans, so the bound is a relaxation)"
    if time_limit <= 0:
        status = "heuristic: no time to solve"
    whole = whole_shares(mix, [pool[p] for p, _ in shares], [s for _, s in shares])
    turns = in_turn(mix, [pool[p] for p, _ in shares], whole)
    plans = tuple(named(mix, p, s, pool[p]) for p, s in shares)
    single = worth(mix, best)
    single_us = float(resources(mix, single).max(initial=0.0))
    return MixPlan(
        plans,
        whole,
        named(mix, best, 1.0, single),
        single_us,
        value,
        bound,
        status,
        time.perf_counter() - started,
        {g.name: g.members for g in mix.groups},
        loads_by_name(mix, [(pool[p], s) for p, s in shares], _union(mix, [p for p, _ in shares])),
        baselines,
        recommend(baselines, value),
        whole_us=turns,
    )


def _every(mix: Mix) -> np.ndarray | None:
    """All placements that devices and pins allow, [placement, kernel]; None where they are more than :data:`FEW`."""
    open_to = [np.flatnonzero(row) for row in mix.allowed]
    if math.prod(len(groups) for groups in open_to) > FEW:
        return None
    free = [k for k, groups in enumerate(open_to) if len(groups) > 1]  # at most log2(FEW): NumPy allows 64 axes
    grid = np.meshgrid(*(open_to[k] for k in free), indexing="ij")
    every = np.zeros((math.prod(len(open_to[k]) for k in free), len(open_to)), dtype=np.int64)
    for k, groups in enumerate(open_to):
        every[:, k] = groups[0] if len(groups) == 1 else grid[free.index(k)].reshape(-1)
    return every


def _best_of_all(mix: Mix, every: np.ndarray) -> tuple[list[Placement], float]:
    """The plans of the best mixture of all placements, and the best single plan; and a bound on every mixture.

    For any prices of the resources that sum to 1, the cheapest plan's cost is such a bound: the prices need not be right.
    """
    table, fit = loads_of(mix, every)
    places, table = every[fit], table[:, fit]
    if not len(places):
        return [], 0.0
    names = [tuple(int(g) for g in place) for place in places]
    scale = float(table.max(axis=0).min()) or 1.0
    chosen, prices = best_shares(table / scale)
    bound = 0.0
    if prices.sum() > 0.5:
        cost = (prices / prices.sum()) @ table
        bound = float(cost.min()) * (1 - 1e-12)
    picked = [names[i] for i, _ in chosen]
    if not picked or not _union_fits(mix, picked):
        picked = [p for p, _ in _master_with_memory(mix, names, table / scale, gap=1e-9)]
    return [*picked, names[int(table.max(axis=0).argmin())]], bound


def fastest_request(mix: Mix, *, time_limit: float = 60.0, gap: float = 5e-3) -> MixPlan:
    """The plan whose single request, alone on the cluster, is done first.

    Where there are few placements (:data:`FEW`) all are tried. Otherwise no request is faster than the longest path of each
    workload, whose kernels and moves between them come one after the other: least by dynamic programming, and for two groups with
    moves of state between workloads by a minimum cut. That is the bound; where the path is all there is (a chain without skip
    edges), its placement is the optimum. Branches may run side by side: plans cut from the relaxation, simple plans and moves of
    kernels are judged by list scheduling. Members of a group are devices of their own here: one request can use several.
    """
    if any(group.size > 1 for group in mix.groups):
        mix = apart(mix)
    mix.check()
    started = time.perf_counter()
    deadline = started + time_limit
    simple = simple_plans(mix)
    pool: dict[Placement, float] = {}

    def add(placement: Sequence[int]) -> None:
        key = tuple(int(g) for g in placement)
        if key not in pool and possible(mix, key) and fits(mix, worth(mix, key)):
            pool[key] = makespan(mix, key)

    for placement in simple.placements():
        add(placement)
    bound = 0.0
    if time_limit > 0 and len(mix.kernels):
        paths = longest_paths(mix)
        placement, bound = fastest_chains(mix, paths)
        add(placement)
        within, later = waits(mix, paths)
        if later or sum(map(len, paths)) < len(mix.kernels):
            counts = np.zeros(len(mix.kernels))
            for path in paths:
                counts[path] = mix.counts[path]
            serial = replace(mix, moves=(*within, *later), counts=counts) if later else mix
            upper = min((float((w := worth(serial, p)).compute.sum() + w.link.sum()) for p in pool), default=_total(serial))
            relaxed = relax(serial, upper, max(0.05, time_limit / 2), one_at_a_time=True)
            if later:
                bound = max(bound, relaxed.bound)
            if relaxed.x is not None:
                for placement in level_plans(mix, relaxed.x):
                    add(placement)
    every = _every(mix) if time_limit > 0 else None
    proven = False
    if every is not None and min(pool.values(), default=math.inf) > bound:
        for placement in every:
            if time.perf_counter() > deadline:
                break
            add(placement)
        else:
            proven = True
    if not pool:
        for placement in _packed(mix, deadline):
            add(placement)
        if not pool:
            raise _does_not_fit(mix)
    best = min(pool, key=lambda p: pool[p])
    if proven:
        bound = pool[best]
    if time_limit > 0 and pool[best] > bound * 1.005:
        best = _hasten(mix, best, min(deadline, time.perf_counter() + 5.0), bound)
        add(best)
    value = pool[best]
    bound = min(bound, value)
    status = "optimal within the gap" if value - bound <= max(gap, 1e-9) * value else "heuristic"
    if time_limit <= 0:
        status = "heuristic: no time to solve"
    baselines: dict[str, float] = {}
    for kind, placements in simple.kinds.items():
        for placement in placements:
            if placement and placement in pool:
                name = f"single:{mix.groups[placement[0]].name}" if kind == "single" else kind
                baselines[name] = min(baselines.get(name, float("inf")), pool[placement])
    of = worth(mix, best)
    only = named(mix, best, 1.0, of)
    return MixPlan(
        (only,),
        (1,),
        only,
        value,
        value,
        bound,
        status,
        time.perf_counter() - started,
        {g.name: g.members for g in mix.groups},
        loads_by_name(mix, [(of, 1.0)], of.memory),
        baselines,
        recommend(baselines, value),
        objective="latency",
    )


def _hasten(mix: Mix, start: Placement, deadline: float, bound: float) -> Placement:
    """A local optimum of the makespan by moves of kernels and stretches."""
    place, best = list(start), makespan(mix, start)
    tight = any(np.isfinite(g.memory) for g in mix.groups)
    allowed = mix.allowed
    improved = True
    while improved:
        improved = False
        for kernels in _stretches(mix, [n for n in (2, 4, 8, 16, 32) if n < len(mix.kernels)]):
            for g in range(len(mix.groups)):
                if time.perf_counter() > deadline or best <= bound * (1 + 1e-9):
                    return tuple(place)
                if all(place[k] == g for k in kernels) or not all(allowed[k, g] for k in kernels):
                    continue
                trial = list(place)
                for k in kernels:
                    trial[k] = g
                value = makespan(mix, trial)
                if value < best * (1 - 1e-9) and (not tight or fits(mix, worth(mix, trial))):
                    place, best, improved = trial, value, True
    return tuple(place)


def _total(mix: Mix) -> float:
    """µs that no plan exceeds: every kernel where it is slowest, every value moved to every group."""
    slowest = np.where(mix.allowed, mix.times, 0.0).max(axis=1, initial=0.0)
    moved = sum(m.count * max((mix.us(u, g, m.bytes) for u, g in mix.links), default=0.0) * len(mix.groups) for m in mix.moves)
    return float((slowest * mix.counts).sum()) + moved or 1.0


# -- plans from fractions


def level_plans(mix: Mix, x: np.ndarray, most: int = 400) -> list[Placement]:
    """All distinct threshold plans of the fractions, for each order of the groups (a sample where there are many)."""
    size = len(mix.groups)
    orders: list[tuple[int, ...]]
    if size == 2:
        orders = [(0, 1)]
    elif size <= 4:
        orders = list(itertools.permutations(range(size)))
    else:
        draw = np.random.default_rng(0)
        orders = [tuple(int(i) for i in draw.permutation(size)) for _ in range(24)]
    found: dict[Placement, None] = {}
    for order in orders:
        cumulated = np.cumsum(x[:, order], axis=1)
        levels = np.unique(np.round(cumulated[:, :-1].reshape(-1), 9))
        levels = levels[(levels > 1e-9) & (levels < 1 - 1e-9)]
        ends = np.concatenate(([0.0], levels, [1.0]))
        middles = (ends[:-1] + ends[1:]) / 2
        if len(middles) > most // len(orders):
            middles = np.quantile(middles, np.linspace(0, 1, max(2, most // len(orders))))
        for theta in middles:
            first = np.argmax(cumulated >= theta - 1e-12, axis=1)
            found[tuple(int(order[i]) for i in first)] = None
    return list(found)


def _packed(mix: Mix, deadline: float) -> list[Placement]:
    """A plan that fits into memory where no simple one does: an integer program with the relaxation's memory rows.

    The solver forgives a row by a millionth: where what it packs onto a device does not fit, not all of that may lie there
    (a cover cut), and it is asked again. Raises PlanError where time is over; gives none where there is none.
    """
    size, count = len(mix.groups), len(mix.kernels)
    if not count:
        return []
    held = len(mix.residents)
    width = size * (count + held + 1)  # x, residents, and whether a group is used
    rows, right = [], []
    for w, (_, _, readers, _) in enumerate(mix.residents):
        for k in set(readers):
            for g in range(size):
                rows.append({k * size + g: 1.0, size * (count + w) + g: -1.0})
                right.append(0.0)
    for g, group in enumerate(mix.groups):
        if not np.isfinite(group.memory):
            continue
        base = float(mix.activation_bytes if g == 0 else 0)
        scale = max(group.memory, 1.0)
        terms = {}
        if g and mix.activation_bytes:
            used = size * (count + held) + g
            terms[used] = mix.activation_bytes / scale
            for k in range(count):
                rows.append({k * size + g: 1.0, used: -1.0})
                right.append(0.0)
        for w, (_, nbytes, _, state) in enumerate(mix.residents):
            if state and g == 0:
                base += nbytes
            else:
                terms[size * (count + w) + g] = nbytes / scale
        rows.append(terms)
        right.append((group.memory - base) / scale)
    equal = sparse.csr_array(
        (np.ones(count * size), (np.repeat(np.arange(count), size), np.arange(count * size))), shape=(count, width)
    )
    finite = np.where(mix.allowed, mix.times * mix.counts[:, None], 0.0)
    cost = np.concatenate((finite.reshape(-1), np.zeros(width - count * size)))
    upper = np.concatenate((mix.allowed.reshape(-1).astype(float), np.ones(width - count * size)))
    started = time.perf_counter()
    seconds = min(20.0, max(1.0, deadline - started))
    while True:
        data = [(i, c, v) for i, row in enumerate(rows) for c, v in row.items()]
        matrix = sparse.csr_array(
            ([d[2] for d in data], ([d[0] for d in data], [d[1] for d in data])), shape=(max(len(rows), 1), width)
        )
        left = seconds - (time.perf_counter() - started)
        answer = milp(
            cost / max(cost.max(), 1.0),
            integrality=np.ones(width),
            bounds=Bounds(0, upper),
            constraints=[
                LinearConstraint(matrix, -np.inf, np.array(right) if right else np.zeros(1)),
                LinearConstraint(equal, 1, 1),
            ],
            options={"time_limit": max(0.1, left), "mip_rel_gap": 0.05},
        )
        if answer.x is None:
            if answer.status == 1 or left <= 0:
                raise PlanError(f"no placement that fits into memory was found within {seconds:.1f} s; raise time_limit")
            return []
        found = tuple(int(g) for g in answer.x[: count * size].reshape(count, size).argmax(axis=1))
        over = [g for g, used in enumerate(_union(mix, [found])) if used > mix.groups[g].memory]
        if not over:
            return [found]
        for g in over:
            lying = [w for w, (_, _, readers, _) in enumerate(mix.residents) if any(found[r] == g for r in readers)]
            if not lying:
                return []
            rows.append({size * (count + w) + g: 1.0 for w in lying})
            right.append(len(lying) - 1.0)


# -- the master program


def best_shares(table: np.ndarray) -> tuple[list[tuple[int, float]], np.ndarray]:
    """Minimise C with Σ λ_p load(p) ≤ C, Σ λ = 1: (column, λ) of those used, and the prices of the resources, which sum to 1."""
    count = table.shape[1]
    cost = np.zeros(count + 1)
    cost[-1] = 1.0
    rows = np.concatenate((table, -np.ones((len(table), 1))), axis=1)
    ones = np.concatenate((np.ones((1, count)), np.zeros((1, 1))), axis=1)
    answer = linprog(cost, A_ub=rows, b_ub=np.zeros(len(rows)), A_eq=ones, b_eq=[1.0], bounds=(0, None), method="highs-ds")
    if answer.x is None:
        return [], np.zeros(len(table))
    return [(i, float(answer.x[i])) for i in range(count) if answer.x[i] > 1e-9], np.maximum(-answer.ineqlin.marginals, 0.0)


def _master(
    mix: Mix, pool: Mapping[Placement, Worth], deadline: float = math.inf
) -> tuple[list[tuple[Placement, float]], float, np.ndarray]:  # fmt: skip
    """Shares, value in µs, and the prices of the resources."""
    names = list(pool)
    table = np.stack([resources(mix, pool[p]) for p in names], axis=1)
    scale = float(table.max(axis=0).min()) or 1.0
    used, prices = best_shares(table / scale)
    chosen = [(names[i], share) for i, share in used]
    if not chosen or not _union_fits(mix, [p for p, _ in chosen]):
        seconds = min(10.0, max(0.2, deadline - time.perf_counter()))
        chosen = _master_with_memory(mix, names, table / scale, seconds=seconds)
    total = sum(s for _, s in chosen)
    chosen = sorted(((p, s / total) for p, s in chosen), key=lambda item: -item[1])
    mixed = sum((s * resources(mix, pool[p]) for p, s in chosen), np.zeros(len(table)))
    return chosen, float(mixed.max(initial=0.0)), prices


def _union(mix: Mix, placements: Sequence[Placement]) -> np.ndarray:
    """Bytes on a member of each group when all these plans are resident."""
    memory = np.zeros(len(mix.groups))
    for _, nbytes, readers, state in mix.residents:
        for g in {p[r] for p in placements for r in readers} | ({0} if state else set()):
            memory[g] += nbytes
    for g in {0, *(g for p in placements for g in p)} if mix.activation_bytes else ():
        memory[g] += mix.activation_bytes
    return memory


def _union_fits(mix: Mix, placements: Sequence[Placement]) -> bool:
    return all(used <= group.memory for used, group in zip(_union(mix, placements), mix.groups, strict=True))


def _master_with_memory(
    mix: Mix, names: Sequence[Placement], table: np.ndarray, gap: float = 1e-4, seconds: float = 10.0
) -> list[tuple[Placement, float]]:
    """The master program where memory holds only some plans together, with one binary for each resident and group: r[w, g] ≥ Σ
    λ_p of the plans that want w on g, Σ bytes · r ≤ memory. ``table`` is in units in which the best plan takes 1."""
    places = np.array(names, dtype=np.int64).reshape(len(names), len(mix.kernels))
    count = len(names)
    wanted: list[np.ndarray] = []  # of each binary, the plans that want it
    limits: list[tuple[dict[int, float], float]] = []  # over the binaries
    for g, group in enumerate(mix.groups):
        if not np.isfinite(group.memory):
            continue
        scale, room, terms = max(group.memory, 1.0), group.memory, {}
        residents = [(nbytes, list(readers), state and g == 0) for _, nbytes, readers, state in mix.residents]
        activations = (mix.activation_bytes, list(range(len(mix.kernels))), g == 0)
        for nbytes, readers, always in [*residents, activations]:
            if always:
                room -= nbytes
            elif nbytes:
                terms[len(wanted)] = nbytes / scale
                wanted.append((places[:, readers] == g).any(axis=1))
        limits.append((terms, room / scale))
    width = count + 1 + len(wanted)
    uses = sparse.hstack(
        [sparse.csr_array(np.array(wanted, dtype=float).reshape(len(wanted), count)), np.zeros((len(wanted), 1)),
         -sparse.eye_array(len(wanted))],
    )  # fmt: skip
    rooms = sparse.lil_array((len(limits), width))
    for i, (terms, _) in enumerate(limits):
        for c, v in terms.items():
            rooms[i, count + 1 + c] = v
    loads = sparse.csr_array(np.concatenate((table, -np.ones((len(table), 1)), np.zeros((len(table), len(wanted)))), axis=1))
    one = sparse.csr_array(np.concatenate((np.ones((1, count)), np.zeros((1, 1 + len(wanted)))), axis=1))
    answer = milp(
        np.eye(1, width, count)[0],
        integrality=np.concatenate((np.zeros(count + 1), np.ones(len(wanted)))),
        bounds=Bounds(0, np.concatenate((np.ones(count), [np.inf], np.ones(len(wanted))))),
        constraints=[
            LinearConstraint(sparse.vstack([loads, uses]).tocsr(), -np.inf, 0.0),
            LinearConstraint(rooms.tocsr(), -np.inf, np.array([room for _, room in limits])),
            LinearConstraint(one, 1.0, 1.0),
        ],
        options={"time_limit": seconds, "mip_rel_gap": gap},
    )
    if answer.x is not None:
        # The shares anew, over the plans that what is resident allows.
        resident = answer.x[count + 1 :] > 0.5
        ready = np.flatnonzero(~(np.array(wanted).reshape(len(wanted), count) & ~resident[:, None]).any(axis=0))
        if len(ready):
            chosen = [(names[int(ready[i])], share) for i, share in best_shares(table[:, ready])[0]]
            if chosen and _union_fits(mix, [p for p, _ in chosen]):
                return chosen
    return [(names[int(table.max(axis=0).argmin())], 1.0)]


def _price_in(
    mix: Mix,
    pool: Mapping[Placement, Worth],
    add: Callable[[Sequence[int]], bool],
    shares: list[tuple[Placement, float]],
    value: float,
    prices: np.ndarray,
    bound: float,
    gap: float,
    deadline: float,
) -> tuple[list[tuple[Placement, float]], float]:
    """Add plans that are cheaper under the prices than those chosen, while that helps and time is left."""
    for _ in range(40):
        if value - bound <= gap * value or time.perf_counter() > deadline:
            break
        fresh = False
        for placement, _ in shares[:6]:
            if time.perf_counter() > deadline:
                break
            fresh |= add(_descend(mix, placement, prices, deadline))
        if not fresh:
            break
        found, better, prices = _master(mix, pool, deadline)
        before = value
        if better <= value:
            shares, value = found, better
        if better >= before * (1 - 1e-7):
            break
    return shares, value


# -- moves


class _Loads:
    """The loads of a placement, kept up to date as kernels move."""

    def __init__(self, mix: Mix, placement: Sequence[int]) -> None:
        self.mix = mix
        self.place = list(placement)
        self.touching: list[list[int]] = [[] for _ in mix.kernels]
        for m, move in enumerate(mix.moves):
            for k in {
                *move.readers,
                *(() if move.source == HOME else (move.source,)),
                *(() if move.unless is None else (move.unless,)),
            }:
                self.touching[k].append(m)
        found = worth(mix, placement)
        self.compute, self.link = found.compute, found.link

    def _crossing(self, m: int) -> list[tuple[int, int, float]]:
        move, place = self.mix.moves[m], self.place
        source = 0 if move.source == HOME else place[move.source]
        targets = {place[r] for r in move.readers}
        if move.to_home:
            targets.add(0)
        targets.discard(source)
        if move.unless is not None:
            targets.discard(place[move.unless])
        return [(source, t, move.count * self.mix.us(source, t, move.bytes)) for t in targets]

    def shift(self, kernels: Sequence[int], target: int) -> None:
        """Move kernels to a group."""
        moves = {m for k in kernels for m in self.touching[k]}
        for m in moves:
            for u, g, us in self._crossing(m):
                self.link[u, g] -= us
        for k in kernels:
            old = self.place[k]
            self.compute[old] -= self.mix.counts[k] * self.mix.times[k, old]
            self.compute[target] += self.mix.counts[k] * self.mix.times[k, target]
            self.place[k] = target
        for m in moves:
            for u, g, us in self._crossing(m):
                self.link[u, g] += us

    def busy(self) -> np.ndarray:
        return resources(self.mix, Worth(self.compute, self.link, np.zeros(len(self.compute)), 0.0))


def _stretches(mix: Mix, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [(k,) for k in range(len(mix.kernels))]
    for length in lengths:
        for start in range(0, len(mix.kernels) - length + 1, max(1, length // 2)):
            found.append(tuple(range(start, start + length)))
    return found


def _descend(mix: Mix, start: Placement, prices: np.ndarray, deadline: float) -> Placement:
    """A local optimum of Σ price · load, by moves of kernels and stretches of them."""
    allowed, loads = mix.allowed, _Loads(mix, start)
    cost = float(prices @ loads.busy())
    for _ in range(3):
        improved = False
        for kernels in _stretches(mix, (4, 16)):
            if time.perf_counter() > deadline:
                return tuple(loads.place)
            before = [loads.place[k] for k in kernels]
            if len(set(before)) > 1:
                continue
            for g in range(len(mix.groups)):
                if g == before[0] or not all(allowed[k, g] for k in kernels):
                    continue
                here = loads.place[kernels[0]]
                loads.shift(kernels, g)
                trial = float(prices @ loads.busy())
                if trial < cost - 1e-9 * abs(cost):
                    cost, improved = trial, True
                else:
                    loads.shift(kernels, here)
        if not improved:
            break
    return tuple(loads.place)


def _improve(mix: Mix, start: Placement, deadline: float, bound: float, gap: float) -> Placement:
    """A local optimum of the busiest resource, ties broken by the sum of squares of all."""
    allowed, loads = mix.allowed, _Loads(mix, start)
    tight = any(np.isfinite(g.memory) for g in mix.groups)

    def score() -> tuple[float, float]:
        busy = loads.busy()
        return float(busy.max(initial=0.0)), float((busy**2).sum())

    best = score()
    lengths = [n for n in (2, 3, 5, 8, 16, 32, 64) if n < len(mix.kernels)]
    stretches = _stretches(mix, lengths)
    for _ in range(12):
        improved = False
        for kernels in stretches:
            if best[0] <= bound * (1 + gap / 2) or time.perf_counter() > deadline:
                return tuple(loads.place)
            before = [loads.place[k] for k in kernels]
            for g in range(len(mix.groups)):
                if all(b == g for b in before) or not all(allowed[k, g] for k in kernels):
                    continue
                old = [loads.place[k] for k in kernels]
                loads.shift(kernels, g)
                trial = score()
                better = trial[0] < best[0] * (1 - 1e-9) or (trial[0] <= best[0] and trial[1] < best[1] * (1 - 1e-6))
                if better and (not tight or fits(mix, worth(mix, loads.place))):
                    best, improved = trial, True
                else:
                    for k, home in zip(kernels, old, strict=True):
                        loads.shift((k,), home)
        if not improved:
            break
    return tuple(loads.place)


def _exact(mix: Mix, start: Placement, bound: float, gap: float, deadline: float) -> Placement:
    """The integer program of two groups, where the best plan found so far is not yet within the gap."""
    value = float(resources(mix, worth(mix, start)).max(initial=0.0))
    if value - bound <= gap * value:
        return start
    left = deadline - time.perf_counter()
    found = integer_plan(mix, value, min(left, 5.0), gap / 4) if left > 0.05 else None
    if found is not None and possible(mix, found):
        w = worth(mix, found)
        if fits(mix, w) and float(resources(mix, w).max()) < value:
            return found
    return start


# -- results


def whole_shares(mix: Mix, worths: Sequence[Worth], shares: Sequence[float], most: int = 256) -> tuple[int, ...]:
    """Whole numbers of requests, the fewest (of at most ``most``) whose mixture is within 0.1 % of the fractions."""
    if len(shares) == 1:
        return (1,)
    loads = np.stack([resources(mix, w) for w in worths], axis=1)
    ideal = float((loads @ np.array(shares)).max())
    best: tuple[float, tuple[int, ...]] = (float("inf"), tuple(1 for _ in shares))
    for total in range(len(shares), most + 1):
        floors = np.floor(np.array(shares) * total).astype(int)
        rest = total - int(floors.sum())
        order = np.argsort(-(np.array(shares) * total - floors))
        floors[order[:rest]] += 1
        value = float((loads @ (floors / total)).max())
        if value < best[0] * (1 - 1e-9):
            best = (value, tuple(int(n) for n in floors))
        if value <= ideal * 1.001:
            break
    return best[1]


def in_turn(mix: Mix, worths: Sequence[Worth], whole: Sequence[int]) -> float:
    """µs between two mixes where each plan serves that many requests of ``sum(whole)``."""
    loads = np.stack([resources(mix, w) for w in worths], axis=1)
    return float((loads @ (np.array(whole) / max(sum(whole), 1))).max(initial=0.0))


def named(mix: Mix, placement: Placement, share: float, of: Worth, batches: tuple[int, ...] = ()) -> SharedPlan:
    names = {k: mix.groups[g].name for k, g in zip(mix.kernels, placement, strict=True)}
    return SharedPlan(share, names, float(resources(mix, of).max(initial=0.0)), batches)


def loads_by_name(mix: Mix, chosen: Sequence[tuple[Worth, float]], memory: np.ndarray) -> dict[str, tuple[float, float, float]]:
    """``MixPlan.loads`` of plans with their shares; ``memory`` is bytes on a member of each group."""
    found = {}
    sizes = np.array([g.size for g in mix.groups], dtype=float)
    pairs = np.outer(sizes, sizes)
    for g, group in enumerate(mix.groups):
        compute = sum(s * w.compute[g] for w, s in chosen) / group.size
        link = sum((s * w.link for w, s in chosen), np.zeros((len(mix.groups),) * 2)) / pairs
        transfer = max(link[g].max(initial=0.0), link[:, g].max(initial=0.0))
        found[group.name] = (float(compute), float(transfer), float(memory[g]))
    return found


def _does_not_fit(mix: Mix) -> InfeasibleError:
    total = sum(nbytes for _, nbytes, _, _ in mix.residents)
    biggest = sorted(mix.residents, key=lambda r: -r[1])[:5]
    items = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes, _, _ in biggest) or "no weights"
    rooms = ", ".join(f"{g.name} {format_bytes(g.memory)}" for g in mix.groups if np.isfinite(g.memory))
    return InfeasibleError(
        f"the mix does not fit: weights and state {format_bytes(total)} plus {format_bytes(mix.activation_bytes)} of activations "
        f"on each device, against {rooms}. Biggest: {items}. Add a device, raise max_memory or remove pins"
    )


__all__ = ["Baselines", "MixPlan", "SharedPlan", "best_mixture", "recommend", "whole_shares"]
