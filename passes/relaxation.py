"""The linear relaxation of a mix: a bound on every plan and every mixture of plans, and the fractions that plans are cut from.

Variables: x[k, g] ∈ [0, 1], how much of kernel k runs on group g; z[v, u, g] ≥ 0, how much of move v goes from u to g;
r[w, g] ≥ x[k, g], resident w is on g; C, the time of one mix. In units in which C is near 1. Equations, and what adds them:

- Σ_g x[k, g] = 1                                                                                    :meth:`_Rows.assign`
- Σ_u z[v, u, g] ≥ x[reader, g] − x[source, g], for each reader and g; z[v, u, g] ≤ x[source, u];
  Σ_g z[v, u, g] ≥ x[source, u] − x[reader, u]                                                       :meth:`_Rows.moves`
- C · size ≥ T[g], C · pairs ≥ L[u, g], or C · size ≥ T[g] + Σ L where transfers are serial          :meth:`_Rows.loads`
- Σ_w bytes · r[w, g] + activations ≤ memory of g                                                    :meth:`_Rows.memory`

Every placement satisfies them with x, z, r ∈ {0, 1}, and a mixture of placements is a convex combination of such points, so the
optimum bounds both from below (with memory: a mixture keeps the union of its plans' weights, so there the bound is a relaxation).
With two groups the polytope of x and z is that of a minimum cut: it is integral, and its optimum *is* that of the best mixture.

The bound does not rest on the solver's word. Whatever the solver calls its dual solution y is made feasible by clipping, and weak
duality for bounded variables gives b·y + Σ_j min(0, c_j − (Aᵀy)_j) · u_j ≤ optimum, summed here (:func:`certified`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from .mix import Mix, Move
from .problem import HOME


@dataclass(frozen=True)
class Relaxed:
    """``x[k, g]`` fractions (of the solver's last point; None where it gave none), ``bound`` certified, in µs of one mix.

    ``prices``: what a µs of each group and of each link costs at the optimum, summing to 1 with the sizes of the groups.
    """

    x: np.ndarray | None
    bound: float
    group_prices: np.ndarray
    link_prices: dict[tuple[int, int], float]
    seconds: float


def relax(mix: Mix, upper: float, time_limit: float = 60.0, one_at_a_time: bool = False) -> Relaxed:
    """Solve the relaxation. ``upper`` is the value of some plan, in µs: it scales the units, and bounds C for the certificate.

    one_at_a_time: C ≥ Σ_g T[g] + Σ L instead, the time of a request whose kernels and moves run one after the other. With two
    groups this is a minimum cut.
    """
    started = time.perf_counter()
    rows = _Rows(mix, upper or 1.0)
    rows.assign()
    rows.moves(rows.uniform())
    if one_at_a_time:
        rows.sum()
    else:
        rows.loads()
    rows.memory()
    answer = rows.solve(time_limit)
    return Relaxed(*answer, time.perf_counter() - started)


_End = tuple[int | None, int | None]
"""Where a move ends: at a kernel, or at a group."""


class _Rows:
    def __init__(self, mix: Mix, upper: float) -> None:
        self.mix = mix
        self.unit = upper
        self.size, self.count = len(mix.groups), len(mix.kernels)
        self.columns: list[float] = []  # upper bounds
        self.data: list[np.ndarray] = []
        self.index: list[np.ndarray] = []
        self.row: list[np.ndarray] = []
        self.right: list[np.ndarray] = []
        self.rows = 0
        allowed = mix.allowed
        self.columns.extend(allowed.reshape(-1).astype(float).tolist())
        self.goal = len(self.columns)
        self.columns.append(1.0 + 1e-9)  # C ≤ upper
        self.transfers: dict[tuple[int, int], list[tuple[int, float]]] = {}

    def variable(self, upper: float = 1.0) -> int:
        self.columns.append(upper)
        return len(self.columns) - 1

    def x(self, k: int, g: int) -> int:
        return k * self.size + g

    def at_most(self, terms: list[tuple[int, float]], right: float) -> int:
        """Σ weight · variable ≤ right."""
        self.index.append(np.array([c for c, _ in terms], dtype=np.int64))
        self.data.append(np.array([w for _, w in terms], dtype=float))
        self.row.append(np.full(len(terms), self.rows, dtype=np.int64))
        self.right.append(np.array([right]))
        self.rows += 1
        return self.rows - 1

    def assign(self) -> None:
        """As equalities, kept apart."""
        self.equal = sparse.csr_array(
            (
                np.ones(self.count * self.size),
                (np.repeat(np.arange(self.count), self.size), np.arange(self.count * self.size)),
            ),
            shape=(self.count, self.count * self.size),
        )

    def moves(self, uniform: bool) -> None:
        """``uniform``: every move costs the same on every link (:meth:`uniform`)."""
        for move in self.mix.moves:
            ends: list[_End] = [(r, None) for r in move.readers]
            if move.to_home:
                ends.append((None, 0))
            if not ends:
                continue
            if self.size == 2 or uniform:
                self._into(move, ends)
            else:
                self._pairs(move, ends)

    def uniform(self) -> bool:
        """Whether every move costs the same on every link, so that only where it arrives matters to its cost."""
        return self.size > 2 and len(set(self.mix.links.values())) == 1

    def _difference(self, end: _End, source: int, g: int, unless: int | None) -> tuple[list[tuple[int, float]], float]:
        """Terms and constant of x[reader, g] − x[source, g] (− x[unless, g])."""
        reader, home = end
        terms: list[tuple[int, float]] = []
        constant = 0.0
        if reader is not None:
            terms.append((self.x(reader, g), 1.0))
        else:
            constant += float(home == g)
        if source == HOME:
            constant -= float(g == 0)
        else:
            terms.append((self.x(source, g), -1.0))
        if unless is not None:
            terms.append((self.x(unless, g), -1.0))
        return terms, constant

    def _into(self, move: Move, ends: list[_End]) -> None:
        """One variable a destination."""
        arriving = []
        for g in range(self.size):
            if move.source == HOME and g == 0:
                continue
            column = self.variable()
            for end in ends:
                terms, constant = self._difference(end, move.source, g, move.unless)
                self.at_most([*terms, (column, -1.0)], -constant)
            if self.size == 2:
                u = 1 - g
                self.transfers.setdefault((u, g), []).append((column, move.count * self.mix.us(u, g, move.bytes)))
            else:
                cost = move.count * self.mix.us(*next(iter(self.mix.links)), move.bytes)
                self.transfers.setdefault((-1, g), []).append((column, cost))
                arriving.append((column, cost))
        if self.size > 2 and move.source == HOME:
            self.transfers.setdefault((0, -1), []).extend(arriving)
        elif self.size > 2 and move.unless is None:
            for u in range(self.size):
                out = self.variable(float(self.size - 1))
                cost = move.count * self.mix.us(*next(iter(self.mix.links)), move.bytes)
                self.transfers.setdefault((u, -1), []).append((out, cost))
                for end in ends:
                    terms, constant = self._difference(end, move.source, u, None)
                    self.at_most([*((c, -w) for c, w in terms), (out, -1.0)], constant)

    def _pairs(self, move: Move, ends: list[_End]) -> None:
        """One variable a source and destination."""
        columns: dict[tuple[int, int], int] = {}
        sources = [0] if move.source == HOME else list(range(self.size))
        for u in sources:
            for g in range(self.size):
                if u != g:
                    columns[u, g] = self.variable()
                    self.transfers.setdefault((u, g), []).append((columns[u, g], move.count * self.mix.us(u, g, move.bytes)))
                    if move.source != HOME:
                        self.at_most([(columns[u, g], 1.0), (self.x(move.source, u), -1.0)], 0.0)
        for end in ends:
            for g in range(self.size):
                arriving = [(columns[u, g], -1.0) for u in sources if (u, g) in columns]
                if arriving:
                    terms, constant = self._difference(end, move.source, g, move.unless)
                    self.at_most([*terms, *arriving], -constant)
                leaving = [(columns[g, h], -1.0) for h in range(self.size) if (g, h) in columns]
                if leaving and move.unless is None:
                    terms, constant = self._difference(end, move.source, g, None)
                    self.at_most([*((c, -w) for c, w in terms), *leaving], constant)

    def loads(self) -> None:
        mix, sizes = self.mix, [g.size for g in self.mix.groups]
        finite = np.where(np.isfinite(mix.times), mix.times, 0.0) * mix.counts[:, None] / self.unit
        self.group_rows: list[int] = []
        self.link_rows: dict[tuple[int, int], int] = {}
        for g in range(self.size):
            terms = [(self.x(k, g), float(finite[k, g])) for k in range(self.count) if finite[k, g]]
            if not mix.overlap:
                for (u, h), columns in self.transfers.items():
                    if g in (u, h):
                        terms += [(c, us / self.unit) for c, us in columns]
            self.group_rows.append(self.at_most([*terms, (self.goal, -float(sizes[g]))], 0.0))
        if not mix.overlap:
            return
        for (u, h), columns in self.transfers.items():
            if u == -1:
                share = float(sum(sizes[h] * sizes[o] for o in range(self.size) if o != h))
            elif h == -1:
                share = float(sum(sizes[u] * sizes[o] for o in range(self.size) if o != u))
            else:
                share = float(sizes[u] * sizes[h])
            terms = [(c, us / self.unit) for c, us in columns if us]
            if terms:
                self.link_rows[u, h] = self.at_most([*terms, (self.goal, -share)], 0.0)

    def sum(self) -> None:
        """All compute and all moves, whoever does them."""
        finite = np.where(np.isfinite(self.mix.times), self.mix.times, 0.0) * self.mix.counts[:, None] / self.unit
        terms = [(self.x(k, g), float(finite[k, g])) for k in range(self.count) for g in range(self.size) if finite[k, g]]
        for (_, h), columns in self.transfers.items():
            if h != -1:  # moves out of a group are the same moves as those into the others
                terms += [(c, us / self.unit) for c, us in columns]
        self.group_rows = [self.at_most([*terms, (self.goal, -1.0)], 0.0)]
        self.link_rows = {}

    def memory(self) -> None:
        mix = self.mix
        total = sum(nbytes for _, nbytes, _, _ in mix.residents) + mix.activation_bytes
        for g, group in enumerate(mix.groups):
            if total <= group.memory:
                continue
            base = float(mix.activation_bytes if g == 0 else 0)
            scale = max(group.memory, 1.0)
            terms: list[tuple[int, float]] = []
            if g and mix.activation_bytes:
                used = self.variable()
                for k in range(self.count):
                    self.at_most([(self.x(k, g), 1.0), (used, -1.0)], 0.0)
                terms.append((used, mix.activation_bytes / scale))
            for _, nbytes, readers, state in mix.residents:
                if state and g == 0:
                    base += nbytes
                    continue
                here = self.variable()
                for k in readers:
                    self.at_most([(self.x(k, g), 1.0), (here, -1.0)], 0.0)
                terms.append((here, nbytes / scale))
            self.at_most(terms or [(self.goal, 0.0)], (group.memory - base) / scale)

    def arrays(self) -> tuple[sparse.csr_array, np.ndarray, np.ndarray, np.ndarray, sparse.csr_array]:
        """Matrix and right-hand side of the rows, cost, upper bounds, matrix of the equalities (right-hand side 1)."""
        width = len(self.columns)
        matrix = sparse.csr_array(
            (np.concatenate(self.data), (np.concatenate(self.row), np.concatenate(self.index))), shape=(self.rows, width)
        )
        cost = np.zeros(width)
        cost[self.goal] = 1.0
        equal = sparse.csr_array((self.equal.data, self.equal.indices, self.equal.indptr), shape=(self.count, width))
        return matrix, np.concatenate(self.right), cost, np.array(self.columns), equal

    def solve(self, time_limit: float) -> tuple[np.ndarray | None, float, np.ndarray, dict[tuple[int, int], float]]:
        matrix, right, cost, upper, equal = self.arrays()
        width = len(cost)
        answer = linprog(
            cost,
            A_ub=matrix,
            b_ub=right,
            A_eq=equal,
            b_eq=np.ones(self.count),
            bounds=np.stack((np.zeros(width), upper), axis=1),
            method="highs",
            options={"time_limit": max(time_limit, 0.01)},
        )
        prices = np.zeros(self.size)
        links: dict[tuple[int, int], float] = {}
        if answer.x is None or answer.ineqlin is None or answer.status not in (0, 1):
            return None, 0.0, prices, links
        y, w = np.minimum(answer.ineqlin.marginals, 0.0), np.asarray(answer.eqlin.marginals)
        bound = certified(cost, matrix, right, equal, np.ones(self.count), upper, y, w) * self.unit
        prices = -y[self.group_rows]
        links = {pair: float(-y[row]) for pair, row in self.link_rows.items()}
        x = answer.x[: self.count * self.size].reshape(self.count, self.size) if answer.status == 0 else None
        return x, max(bound, 0.0), prices, links


def relax_together(mixes: Sequence[Mix], upper: float, time_limit: float = 60.0) -> tuple[float, list[np.ndarray | None]]:
    """A bound, in µs of one mix, on every mixture of plans of several mixes that do the same work on the same groups in other
    ways: a phase at several batch sizes. And the fractions x[k, g] of each mix, None of one that serves nothing. 0 and none where
    the solver has not come to an end; ``upper`` (above 0) is the value of some plan.

    With s[i] the share of the requests that mix i serves, v[i] its variables, A v ≤ b, E v = 1 its rows but those of the loads:

    - A v[i] ≤ b s[i], E v[i] = s[i], Σ s = 1; and of each resource, C · size ≥ Σ_i load(v[i])

    A mixture is such a point: v[i] is the sum of the mix's placements, each times its share. Its dual says the same by prices
    of the resources: whatever they are, no mixture is cheaper than the cheapest plan of any mix. As in :func:`relax`, whatever
    the solver calls its duals is made feasible here. Rows of memory say that each plan fits by itself, not that all do
    together. Where a group has several members, who may be planned apart (``planning.py``), they are left out: members who take
    turns with the stages of such a plan do no more than it does, but may not hold its weights.
    """
    rows = [_Rows(mix, upper) for mix in mixes]
    uniform = all(r.uniform() for r in rows)
    inside, loads, equals, uppers, rights = [], [], [], [], []
    names: dict[int | tuple[int, int], float] = {}  # of each resource, what its size is in C · size
    for r in rows:
        r.assign()
        r.moves(uniform)
        r.loads()
        if all(g.size == 1 for g in r.mix.groups):
            r.memory()
        matrix, right, _, most, equal = r.arrays()
        of: dict[int | tuple[int, int], int] = dict(enumerate(r.group_rows))
        of.update(r.link_rows)
        names.update({name: -float(matrix[row, r.goal]) for name, row in of.items()})
        rest = np.setdiff1d(np.arange(len(right)), list(of.values()))
        most[r.goal] = 0.0  # there is one C for all
        inside.append(matrix[rest])
        rights.append(right[rest])
        loads.append((of, matrix))
        equals.append(equal)
        uppers.append(most)
    count, at = len(rows), {name: i for i, name in enumerate(names)}
    busy = []
    for of, matrix in loads:
        pick = sparse.csr_array((np.ones(len(of)), ([at[n] for n in of], list(of.values()))), shape=(len(at), matrix.shape[0]))
        busy.append(pick @ matrix)
    shared = sparse.block_diag([sparse.csr_array(-right[:, None]) for right in rights])
    ones = sparse.block_diag([np.full((e.shape[0], 1), -1.0) for e in equals])
    goal = np.array([[-size] for size in names.values()])
    a = sparse.block_array([
        [sparse.block_diag(inside), shared, None],
        [sparse.hstack(busy), None, goal],
    ]).tocsr()  # fmt: skip
    e = sparse.block_array([
        [sparse.block_diag(equals), ones, sparse.csr_array((ones.shape[0], 1))],
        [None, np.ones((1, count)), None],
    ]).tocsr()  # fmt: skip
    b = np.zeros(a.shape[0])
    f = np.zeros(e.shape[0])
    f[-1] = 1.0
    most = np.concatenate((*uppers, np.ones(count), [1.0 + 1e-9]))
    cost = np.zeros(len(most))
    cost[-1] = 1.0
    answer = linprog(
        cost, A_ub=a, b_ub=b, A_eq=e, b_eq=f, bounds=np.stack((np.zeros(len(most)), most), axis=1), method="highs",
        options={"time_limit": max(time_limit, 0.01)},
    )  # fmt: skip
    if answer.status != 0:
        return 0.0, [None] * count
    bound = certified(cost, a, b, e, f, most, np.minimum(answer.ineqlin.marginals, 0.0), np.asarray(answer.eqlin.marginals))
    shares = answer.x[-1 - count : -1]
    fractions: list[np.ndarray | None] = []
    for r, share, start in zip(rows, shares, np.cumsum([0, *map(len, uppers)]), strict=False):
        x = answer.x[start : start + r.count * r.size].reshape(r.count, r.size)
        fractions.append(x / share if share > 1e-9 else None)
    return max(0.0, bound * upper), fractions


def integer_plan(mix: Mix, upper: float, time_limit: float, gap: float) -> tuple[int, ...] | None:
    """A placement by ``scipy.optimize.milp`` on the same rows with x integral; None if none as good as ``upper`` is found."""
    rows = _Rows(mix, upper)
    rows.assign()
    rows.moves(rows.uniform())
    rows.loads()
    rows.memory()
    matrix, right, cost, bounds, equal = rows.arrays()
    # y is integral by its rows already; saying so lets HiGHS close the gap several times faster.
    integral = np.ones(len(cost))
    integral[rows.goal] = 0
    answer = milp(
        cost,
        integrality=integral,
        bounds=Bounds(0, bounds),
        constraints=[LinearConstraint(matrix, -np.inf, right), LinearConstraint(equal, 1, 1)],
        options={"time_limit": time_limit, "mip_rel_gap": gap, "disp": False},
    )
    if answer.x is None:
        return None
    x = answer.x[: rows.count * rows.size].reshape(rows.count, rows.size)
    return tuple(int(g) for g in x.argmax(axis=1))


def certified(
    cost: np.ndarray,
    a: sparse.csr_array,
    b: np.ndarray,
    e: sparse.csr_array,
    f: np.ndarray,
    upper: np.ndarray,
    y: np.ndarray,
    w: np.ndarray,
) -> float:
    """A lower bound on min cost·v over a v ≤ b, e v = f, 0 ≤ v ≤ upper, from any y ≤ 0 and any w.

    For feasible v: cost·v ≥ b·y + f·w + Σ_j (cost − aᵀy − eᵀw)_j v_j, and a negative factor is least at v_j = upper_j. One part
    in 10¹² of the sum of absolute terms is taken off for the rounding of the sums.
    """
    if not (np.isfinite(y).all() and np.isfinite(w).all()):
        return -math.inf
    y = np.minimum(y, 0.0)
    reduced = cost - a.T @ y - e.T @ w
    tail = np.minimum(reduced, 0.0) * upper
    total = float(b @ y + f @ w + tail.sum())
    size = float(np.abs(b * y).sum() + np.abs(f * w).sum() + np.abs(tail).sum())
    return total - 1e-12 * size
