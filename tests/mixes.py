"""Mixes for tests: small random ones, an evaluation of them written from the formulas alone, and the optimum by enumeration."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import linprog

from tessera_compile.passes.mix import Group, Mix, Move

HOME = -1
CENSUS = Path(__file__).parent.parent / "benchmarks" / "data" / "gptoss20b_a100_l40s.csv"


def mix_of(
    rows: Sequence[Sequence[float | None]],
    moves: Sequence[Move] = (),
    *,
    sizes: Sequence[int] | None = None,
    memory: Sequence[float] | None = None,
    per_byte: float = 0.001,
    latency: float = 1.0,
    links: dict[tuple[int, int], tuple[float, float]] | None = None,
    workload: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
    **more: object,
) -> Mix:
    """A mix from rows[kernel][group] of µs (None where it cannot run). Groups are g0, g1, …; a byte takes a nanosecond."""
    groups = len(rows[0]) if rows else len(sizes or (1, 1))
    sizes, memory = sizes or [1] * groups, memory or [math.inf] * groups
    workload = list(workload or [0] * len(rows))
    weights = list(weights or [1.0] * (max(workload, default=0) + 1))
    made = tuple(Group(f"g{i}", tuple(f"g{i}#{j}" for j in range(sizes[i])), memory[i], 1.0 + i) for i in range(groups))
    times = np.array([[math.inf if us is None else us for us in row] for row in rows], dtype=float).reshape(len(rows), groups)
    fields = {
        "layers": tuple(range(len(rows))),
        "blocks": tuple(("attention", "ffn", "other")[k % 3] for k in range(len(rows))),
        **more,
    }
    return Mix(
        kernels=tuple(f"k{k}" for k in range(len(rows))),
        workloads=tuple(f"w{w}" for w in range(len(weights))),
        workload=np.array(workload, dtype=np.int64),
        weights={f"w{w}": float(weight) for w, weight in enumerate(weights)},
        counts=np.array([weights[w] for w in workload], dtype=float),
        times=times,
        groups=made,
        links=links or {(u, g): (per_byte, latency) for u in range(groups) for g in range(groups) if u != g},
        moves=tuple(moves),
        inner={(a, b): (per_byte, latency) for g in made for a in g.members for b in g.members if a != b},
        **fields,  # type: ignore[arg-type]
    )


def random_mix(seed: int, groups: int, *, limited: bool | None = None) -> Mix:
    """A small mix with what planning knows: several workloads, state, replicas of state, pins, kernels that cannot run somewhere,
    memory (always, never, or as the seed says), links alike or not, moves of nothing and kernels of no time."""
    draw = random.Random(seed)
    count = draw.randint(1, 7 if groups == 2 else 5)
    cut = draw.randint(1, count) if draw.random() < 0.5 else count
    workload = [int(k >= cut) for k in range(count)]
    weights = [draw.choice([1.0, 2.0, 3.5]) for _ in range(1 + (cut < count))]
    rows = []
    for _ in range(count):
        row: list[float | None] = [draw.choice([0, 1, 3, 7, 12.5, 20]) + draw.choice([0, 0.25]) for _ in range(groups)]
        if groups > 1 and draw.random() < 0.2:
            row[draw.randrange(groups)] = None
        rows.append(row)
    one = (draw.choice([0.0, 0.01, 0.05]), draw.choice([0.0, 0.5, 2.0]))
    alike = draw.random() < 0.4
    links = {
        (u, g): one if alike else (draw.choice([0.0, 0.01, 0.05]), draw.choice([0.0, 0.5, 2.0]))
        for u in range(groups)
        for g in range(groups)
        if u != g
    }
    moves = []
    for k in range(count):
        count_k = weights[workload[k]]
        later = [j for j in range(k + 1, count) if workload[j] == workload[k]]
        readers = tuple(j for j in later if draw.random() < 0.4)
        if readers or draw.random() < 0.2:
            moves.append(
                Move(f"v{k}", draw.choice([0, 10, 100, 400]), k, readers, not readers or draw.random() < 0.2, None, count_k)
            )
        if draw.random() < 0.25:
            moves.append(Move(f"x{k}", draw.choice([0, 50, 200]), HOME, (k,), False, None, count_k))
        if draw.random() < 0.2:  # state at home that k overwrites and others read
            others = tuple(j for j in range(count) if j != k and workload[j] == workload[k] and draw.random() < 0.5)
            if others:
                moves.append(Move(f"s{k}", 80, HOME, others, False, k, count_k))
            moves.append(Move(f"t{k}", 80, k, (), True, None, count_k))
        if draw.random() < 0.25:  # state that lives where it is used
            users = tuple(j for j in range(count) if j != k and workload[j] >= workload[k] and draw.random() < 0.6)
            if users:
                moves.append(Move(f"kv{k}", draw.choice([20, 150]), k, users, False, None, count_k))
    residents: list[tuple[str, int, tuple[int, ...], bool]] = []
    memory = [math.inf] * groups
    activation = 0
    if limited or (limited is None and draw.random() < 0.5):
        for w in range(draw.randint(1, 3)):
            readers = tuple(sorted(draw.sample(range(count), draw.randint(1, count))))
            residents.append((f"w{w}", draw.randint(1, 10), readers, draw.random() < 0.2))
        activation = draw.choice([0, 0, 2])
        total = sum(r[1] for r in residents) + activation
        memory = [float(draw.randint(max(1, total // 2), total + 1)) if draw.random() < 0.8 else math.inf for _ in range(groups)]
    pins = {}
    if draw.random() < 0.2:
        k = draw.randrange(count)
        pins[k] = draw.choice([g for g in range(groups) if rows[k][g] is not None])
    return mix_of(
        rows,
        moves,
        sizes=[draw.randint(1, 3) for _ in range(groups)],
        memory=memory,
        links=links,
        workload=workload,
        weights=weights,
        overlap=draw.random() < 0.5,
        residents=tuple(residents),
        activation_bytes=activation,
        pins=pins,
    )


def layered(seed: int, sizes: tuple[int, ...], overlap: bool, tight: bool) -> Mix:
    """Layers of one or two kernels whose values go no further than the next layer; inputs and outputs at home; devices that
    cannot run some kernels; weights, some read in several layers."""
    draw = random.Random(seed)
    layers = [layer for layer in range(draw.randint(2, 6)) for _ in range(draw.randint(1, 2))]
    count, groups = len(layers), len(sizes)
    rows: list[list[float | None]] = [[draw.choice([0, 1, 3, 7, 12.5, 20]) for _ in range(groups)] for _ in range(count)]
    for row in rows:
        if groups > 1 and draw.random() < 0.1:
            row[draw.randrange(groups)] = None
    moves = []
    for k in range(count):
        near = tuple(j for j in range(k + 1, count) if layers[j] <= layers[k] + 1 and draw.random() < 0.6)
        if near:
            moves.append(Move(f"v{k}", draw.choice([0, 500, 4000]), k, near, draw.random() < 0.15))
        if draw.random() < 0.3:
            moves.append(Move(f"x{k}", draw.choice([0, 500, 2000]), HOME, (k,)))
        if draw.random() < 0.3:
            moves.append(Move(f"y{k}", draw.choice([0, 500, 2000]), k, (), True))
    residents = tuple(
        (f"w{k}", draw.randint(1, 10), tuple(sorted(draw.sample(range(count), draw.randint(1, 2)))), draw.random() < 0.1)
        for k in range(count)
    )
    total = sum(r[1] for r in residents)
    return mix_of(
        rows,
        moves,
        sizes=sizes,
        memory=[draw.choice([total / 2, total / 1.5, 2.0 * total]) if tight else math.inf for _ in sizes],
        links={
            (u, g): (0.001 * draw.choice([1, 2]), draw.choice([0.0, 2.0])) for u, g in itertools.permutations(range(groups), 2)
        },
        layers=tuple(layers),
        blocks=("other",) * count,
        overlap=overlap,
        residents=residents,
        activation_bytes=draw.choice([0, 2]),
    )


def best_split(mix: Mix) -> float:
    """Of every cut in two stages or more, in every order of any of the devices; infinite where none fits."""
    layers, best = max(mix.layers) + 1, math.inf
    for stages in range(2, len(mix.groups) + 1):
        for order in itertools.permutations(range(len(mix.groups)), stages):
            for cuts in itertools.combinations(range(1, layers), stages - 1):
                place = [order[sum(layer >= cut for cut in cuts)] for layer in mix.layers]
                if mix.allowed[range(len(place)), place].all() and room(mix, footprint(mix, place)):
                    best = min(best, max(busy(mix, place)))
    return best


# --- the formulas


def busy(mix: Mix, place: Sequence[int]) -> list[float]:
    """µs that each group, and where transfers overlap each link, is busy for one mix."""
    size = len(mix.groups)
    members = [len(g.members) for g in mix.groups]
    compute = [0.0] * size
    for k, g in enumerate(place):
        compute[g] += mix.counts[k] * mix.times[k][g]
    link: dict[tuple[int, int], float] = {}
    for move in mix.moves:
        start = 0 if move.source == HOME else place[move.source]
        for g in range(size):
            wanted = any(place[r] == g for r in move.readers) or (move.to_home and g == 0)
            current = g == start or (move.unless is not None and place[move.unless] == g)
            if wanted and not current:
                per_byte, latency = mix.links[start, g]
                link[start, g] = link.get((start, g), 0.0) + move.count * (latency + per_byte * move.bytes)
    if mix.overlap:
        pairs = [(u, g) for u in range(size) for g in range(size) if u != g]
        return [t / m for t, m in zip(compute, members, strict=True)] + [
            link.get((u, g), 0.0) / (members[u] * members[g]) for u, g in pairs
        ]
    return [(compute[g] + sum(us for (u, h), us in link.items() if g in (u, h))) / members[g] for g in range(size)]


def footprint(mix: Mix, place: Sequence[int]) -> frozenset[tuple[int, int]]:
    """(resident, group) pairs; −1 stands for activations."""
    found = {(w, place[r]) for w, (_, _, readers, _) in enumerate(mix.residents) for r in readers}
    found |= {(w, 0) for w, (_, _, _, state) in enumerate(mix.residents) if state}
    found |= {(-1, g) for g in (0, *place)}
    return frozenset(found)


def room(mix: Mix, held: frozenset[tuple[int, int]]) -> bool:
    """Whether memory holds it."""
    used = [0.0] * len(mix.groups)
    for w, g in held:
        used[g] += mix.activation_bytes if w == -1 else mix.residents[w][1]
    return all(bytes_ <= g.memory for bytes_, g in zip(used, mix.groups, strict=True))


def placements(mix: Mix) -> list[tuple[int, ...]]:
    """All that pins, devices and memory allow."""
    options = [[g for g in range(len(mix.groups)) if math.isfinite(us[g])] for us in mix.times]
    for k, g in mix.pins.items():
        options[k] = [g]
    return [place for place in itertools.product(*options) if room(mix, footprint(mix, place))]


def best_of(columns: np.ndarray) -> float:
    """min over shares λ of max over rows of columns · λ."""
    rows, count = columns.shape
    answer = linprog(
        [0.0] * count + [1.0],
        A_ub=np.hstack([columns, -np.ones((rows, 1))]),
        b_ub=np.zeros(rows),
        A_eq=[[1.0] * count + [0.0]],
        b_eq=[1.0],
        method="highs",
    )
    assert answer.status == 0
    return float(answer.fun)


def optimum(mix: Mix) -> tuple[float, float] | None:
    """(best single placement, best mixture), by trying every placement and every set of residents; None where nothing fits."""
    places = placements(mix)
    if not places:
        return None
    columns = np.array([busy(mix, place) for place in places]).T
    single = float(columns.max(axis=0).min())
    held = [footprint(mix, place) for place in places]
    everything = frozenset[tuple[int, int]]().union(*held)
    if room(mix, everything):
        return single, best_of(columns)
    unions = set(held)
    while True:
        more = {a | b for a in unions for b in set(held) if room(mix, a | b)} - unions
        if not more:
            break
        unions |= more
    largest = [u for u in unions if not any(u < other for other in unions)]
    return single, min(best_of(columns[:, [i for i, h in enumerate(held) if h <= u]]) for u in largest)


def finish(mix: Mix, place: Sequence[int]) -> float:
    """µs of one request: list scheduling of each workload in the order of its kernels, its weight times; and state between."""
    total = 0.0

    def us(u: int, g: int, move: Move) -> float:
        if u == g or (move.unless is not None and place[move.unless] == g):
            return 0.0
        return mix.links[u, g][1] + mix.links[u, g][0] * move.bytes

    for w, name in enumerate(mix.workloads):
        mine = [k for k in range(len(mix.kernels)) if mix.workload[k] == w]
        end: dict[int, float] = {}
        free = dict.fromkeys(range(len(mix.groups)), 0.0)
        done = 0.0
        for k in mine:
            ready = free[place[k]]
            for move in mix.moves:
                if k in move.readers:
                    if move.source == HOME:
                        ready = max(ready, us(0, place[k], move))
                    elif move.source in end:
                        ready = max(ready, end[move.source] + us(place[move.source], place[k], move))
            end[k] = free[place[k]] = ready + mix.times[k][place[k]]
            done = max(done, end[k])
        for move in mix.moves:
            if move.to_home and move.source in end:
                here = place[move.source]
                done = max(
                    done, end[move.source] + (0.0 if here == 0 else mix.links[here, 0][1] + mix.links[here, 0][0] * move.bytes)
                )
        total += mix.weights[name] * done
    for move in mix.moves:
        if move.source != HOME:
            goes = {place[r] for r in move.readers if mix.workload[r] != mix.workload[move.source]}
            total += sum(move.count * us(place[move.source], g, move) for g in goes)
    return total
