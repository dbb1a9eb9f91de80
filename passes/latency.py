"""One request alone on the cluster: how long it takes under a placement, and bounds on how fast it can be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from .mix import Mix, Move
from .problem import HOME


def makespan(mix: Mix, placement: Sequence[int]) -> float:
    """µs of one request that goes through all uses of all workloads, one after the other, alone on the cluster.

    Within a workload: list scheduling in the order of the kernels, transfers included, as in ``problem.evaluate``; a move of
    state to a later workload adds its time once for each use of its writer.
    """
    arrivals: list[list[tuple[int, float]]] = [[] for _ in mix.kernels]
    ends: list[list[tuple[int, float]]] = [[] for _ in mix.workloads]
    between = 0.0
    for move in mix.moves:
        source = 0 if move.source == HOME else placement[move.source]
        phase_targets = set()
        for reader in move.readers:
            target = placement[reader]
            current = target == source or (move.unless is not None and placement[move.unless] == target)
            us = 0.0 if current else mix.us(source, target, move.bytes)
            if move.source == HOME or mix.workload[reader] == mix.workload[move.source]:
                if move.source < reader:  # an earlier kernel reads the state that the use before this one left
                    arrivals[reader].append((move.source, us))
            elif us:
                phase_targets.add(target)
        for target in phase_targets:
            between += move.count * mix.us(source, target, move.bytes)
        if move.to_home and move.source != HOME:
            ends[int(mix.workload[move.source])].append((move.source, mix.us(source, 0, move.bytes)))
    finish = np.zeros(len(mix.kernels))
    total = between
    for w, name in enumerate(mix.workloads):
        free = [0.0] * len(mix.groups)
        last = 0.0
        for k in np.flatnonzero(mix.workload == w).tolist():
            g = placement[k]
            start = free[g]
            for source, us in arrivals[k]:
                start = max(start, us if source == HOME else finish[source] + us)
            finish[k] = free[g] = start + float(mix.times[k, g])
            last = max(last, finish[k])
        last = max([last, *(finish[s] + us for s, us in ends[w])])
        total += mix.weights[name] * last
    return float(total)


def longest_paths(mix: Mix) -> list[list[int]]:
    """Of each workload, the kernels of its longest path with every kernel where it is fastest and moves free. They run one at a
    time; where all kernels of a workload are on it, it is a chain."""
    fastest = np.where(mix.allowed, mix.times, np.inf).min(axis=1, initial=np.inf)
    before: list[set[int]] = [set() for _ in mix.kernels]
    for move in mix.moves:
        for reader in move.readers:
            if move.source != HOME and mix.workload[reader] == mix.workload[move.source] and move.source < reader:
                before[reader].add(move.source)
    # µs and kernels of the longest path to each kernel: of two equal ones, that of more kernels.
    best: list[tuple[float, int]] = []
    came: list[int] = []
    for k, sources in enumerate(before):
        us, count, source = max(((*best[s], s) for s in sources), default=(0.0, 0, HOME))
        best.append((us + float(fastest[k]), count + 1))
        came.append(source)
    paths = []
    for w in range(len(mix.workloads)):
        members = np.flatnonzero(mix.workload == w).tolist()
        k = max(members, key=lambda k: best[k], default=HOME)
        path = []
        while k != HOME:
            path.append(k)
            k = came[k]
        paths.append(path[::-1])
    return paths


def waits(mix: Mix, paths: Sequence[Sequence[int]]) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
    """Of the moves, those that a request cannot but wait for, so that their times add up: along one path of each workload, the
    biggest between each two neighbours, to the first kernel, from the last one home; and those of state between workloads.

    Other moves (over skip edges, of inputs read late) may be hidden behind the compute of the kernels between, so a bound on the
    makespan cannot count them.
    """
    before = {k: source for path in paths for source, k in itertools.pairwise([HOME, *path])}
    last = {path[-1] for path in paths if path}
    biggest: dict[tuple[int, int], Move] = {}
    later = []

    def wait(start: int, end: int, move: Move) -> None:
        if (start, end) not in biggest or biggest[start, end].bytes < move.bytes:
            workload = mix.workloads[int(mix.workload[max(start, end)])]
            readers = () if end == HOME else (end,)
            biggest[start, end] = Move(move.value, move.bytes, start, readers, end == HOME, None, mix.weights[workload])

    for move in mix.moves:
        if move.unless is not None:
            continue
        for reader in move.readers:
            if reader in before and move.source == before[reader]:
                wait(move.source, reader, move)
        if move.source == HOME:
            continue
        if move.to_home and move.source in last:
            wait(move.source, HOME, move)
        elsewhere = tuple(r for r in move.readers if mix.workload[r] != mix.workload[move.source])
        if elsewhere:
            later.append(Move(move.value, move.bytes, move.source, elsewhere, count=move.count))
    return tuple(biggest.values()), tuple(later)


def fastest_chains(mix: Mix, paths: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], float]:
    """The placement with least Σ compute + Σ moves between neighbours on the paths, by dynamic programming, for any number of
    groups, other kernels where they are fastest; and that sum.

    No placement's makespan is less. It is the makespan where the paths are all there is: chains without moves over skip edges.
    """
    size = len(mix.groups)
    times = np.where(mix.allowed, mix.times, np.inf)
    between: dict[tuple[int, int], np.ndarray] = {}
    for move in waits(mix, paths)[0]:
        costs = np.array([[mix.us(u, g, move.bytes) for g in range(size)] for u in range(size)])
        between[move.source, HOME if move.to_home else move.readers[0]] = costs
    placement = times.argmin(axis=1).tolist()
    total = 0.0
    for name, path in zip(mix.workloads, paths, strict=True):
        if not path:
            continue
        best = times[path[0]].copy()
        if (HOME, path[0]) in between:
            best += between[HOME, path[0]][0]
        came = []
        for before, k in itertools.pairwise(path):
            reach = best[:, None] + between.get((before, k), np.zeros((size, size)))
            came.append(reach.argmin(axis=0))
            best = reach.min(axis=0) + times[k]
        if (path[-1], HOME) in between:
            best = best + between[path[-1], HOME][:, 0]
        g = int(best.argmin())
        total += mix.weights[name] * float(best[g])
        for k, choice in zip(reversed(path), [None, *reversed(came)], strict=True):
            g = g if choice is None else int(choice[g])
            placement[k] = g
    return tuple(placement), total
