"""Mix → splits by layers: contiguous stretches of layers, each on a device of its own, values going from stage to stage.

A *stage* is layers s … e − 1 on one group of the mix (members that are planned apart are groups of one, see ``mix.apart``). Of a
stage on d between stages on a and b, the cost is what ``mix.worth`` counts, for one mix (:meth:`_Costs.of`):

- compute of its kernels on d; infinite where d cannot run one of them or its memory cannot hold their weights and state
- on a → d, all values made before s and read in s or later; on d → b, the same of e
- on home → d what the caller brings for it, on d → home what returns; with serial transfers all of this adds up on d

The best split is the one whose costliest stage costs least, over every cut and every order of any of the devices, found by
dynamic programming over (layers done, devices of each kind used, last device, next device): devices that are alike are used in
their order. With serial transfers home also moves what the stages elsewhere need and return, which adds up over them: the same
program then makes that least under a limit for every other stage, and the limit is halved in on (to 0.1 %). So it is the optimum
of ``mix.value`` where values travel between neighbours only. Values that skip a stage are counted as passed on from stage to
stage; state that goes back to earlier layers is not counted. Two groups are not searched: every cut is returned.

Where the states would be too many (:data:`MOST_STEPS`), devices of one kind stand next to one another, kinds in every order of up
to four, or as in the cluster and reversed. More than :data:`MOST_LAYERS` layers are cut at so many places alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from .mix import Mix
from .problem import HOME

Placement = tuple[int, ...]
Slot = Hashable
Sequences = tuple[dict[Slot, int], dict[Slot, list[Slot]], set[Slot]]

MOST_STEPS = 20_000
MOST_LAYERS = 128
#: So many splits are returned, beside the copies of each that the other devices have room for.
MOST_SPLITS = 48


def layer_splits(mix: Mix) -> list[Placement]:
    """The best split of each choice of devices, best first, and copies of it on the devices it leaves; none for less than two
    layers or groups. Nothing is promised of memory for two groups: see ``mix.fits``."""
    depth, count = _depths(mix)
    if count < 2 or len(mix.groups) < 2:
        return []
    if len(mix.groups) == 2:
        cuts = range(1, count)
        return [tuple(int((d >= cut) == up) for d in depth) for cut in cuts for up in (True, False)]
    depth, count = _merged(mix, depth, count)
    kinds = _kinds(mix)
    costs = _Costs(mix, depth, count, kinds)
    found: dict[tuple[int, ...], tuple[float, list[tuple[int, int]]]] = {}

    sequences = _sequences(kinds)

    def search(limit: float | None) -> float:
        least = math.inf
        for stages in _search(costs, count, sequences, limit):
            us = costs.value(stages)
            used = tuple(sum(d in kind for d, _ in stages) for kind in kinds)
            if len(stages) > 1:
                least = min(least, us)
                if used not in found or us < found[used][0]:
                    found[used] = us, stages
        return least

    most, least = search(None), 0.0
    while not mix.overlap and costs.home.any() and math.isfinite(most) and most - least > 1e-3 * most:
        limit = (most + least) / 2
        us = search(limit)
        most, least = (us, least) if us <= limit else (most, limit)
    ranked = sorted(found, key=lambda used: found[used][0])
    fewest = {sum(used): used for used in reversed(ranked)}  # the best of each number of devices
    chosen = sorted(dict.fromkeys([*fewest.values(), *ranked][:MOST_SPLITS]), key=lambda used: found[used][0])
    splits: dict[Placement, None] = {}
    for used in chosen:
        for stages in _copies(found[used][1], used, kinds):
            ends = [e for _, e in stages]
            splits[tuple(stages[int(np.searchsorted(ends, d, side="right"))][0] for d in depth)] = None
    return list(splits)


def _depths(mix: Mix) -> tuple[list[int], int]:
    """Which layer, from 0, each kernel goes with, and the number of layers: kernels before the first layer of their workload go
    with it, kernels between two layers with the one before."""
    layers = sorted({layer for layer in mix.layers if layer >= 0})
    position = {layer: i for i, layer in enumerate(layers)}
    depth: list[int] = []
    reached: dict[int, int] = {}
    for layer, workload in zip(mix.layers, mix.workload.tolist(), strict=True):
        depth.append(reached.get(workload, 0) if layer < 0 else position[layer])
        reached[workload] = depth[-1]
    return depth, len(layers)


def _merged(mix: Mix, depth: list[int], count: int) -> tuple[list[int], int]:
    """The same with neighbours merged to at most :data:`MOST_LAYERS` of about equal work."""
    if count <= MOST_LAYERS:
        return depth, count
    least = np.where(mix.allowed, mix.times, np.inf).min(axis=1) * mix.counts
    done = np.cumsum(np.bincount(depth, weights=least, minlength=count))
    piece = np.minimum(done / max(done[-1], 1e-300) * MOST_LAYERS, MOST_LAYERS - 1).astype(int)
    numbers = np.unique(piece, return_inverse=True)[1]
    return [int(numbers[d]) for d in depth], int(numbers[-1]) + 1


def _kinds(mix: Mix) -> list[list[int]]:
    """Groups that are alike, home apart: same size, memory and times, and the same links to all others."""
    kinds: list[list[int]] = [[0]]
    for g in range(1, len(mix.groups)):
        for kind in kinds[1:]:
            a = kind[0]
            others = [o for o in range(len(mix.groups)) if o not in (*kind, g)]
            same = (mix.groups[a].size, mix.groups[a].memory) == (mix.groups[g].size, mix.groups[g].memory)
            if same and (mix.times[:, a] == mix.times[:, g]).all() and (mix.allowed[:, a] == mix.allowed[:, g]).all():
                if all(mix.links[a, o] == mix.links[g, o] and mix.links[o, a] == mix.links[o, g] for o in others):
                    kind.append(g)
                    break
        else:
            kinds.append([g])
    return kinds


def _sequences(kinds: Sequence[Sequence[int]]) -> Sequences:
    """Orders of the devices as paths over slots: the device of each slot, earlier ones first; what may follow; where to start."""
    slots: dict[Slot, int] = {}
    after: dict[Slot, list[Slot]] = {}
    starts: set[Slot] = set()
    if math.prod(len(kind) + 1 for kind in kinds) * len(kinds) ** 3 <= MOST_STEPS:
        for used in itertools.product(*(range(len(kind) + 1) for kind in kinds)):
            more = [(*used[:n], used[n] + 1, *used[n + 1 :]) for n in range(len(kinds))]
            following: list[Slot] = [(more[n], n) for n, kind in enumerate(kinds) if used[n] < len(kind)]
            if not any(used):
                starts.update(following)
            for t, number in enumerate(used):
                if number:
                    slots[used, t] = kinds[t][number - 1]
                    after[used, t] = following
        return slots, after, starts
    several = itertools.permutations(kinds) if len(kinds) <= 4 else (tuple(kinds), tuple(reversed(kinds)))
    for order in several:
        firsts = list(itertools.accumulate((len(kind) for kind in order), initial=0))
        devices = [d for kind in order for d in kind]
        base = len(slots)
        starts.update(base + i for i in firsts[:-1])
        for i, device in enumerate(devices):
            slots[base + i] = device
            next_ones = {i + 1, *(f for f in firsts if f > i)} - {len(devices)}
            after[base + i] = [base + j for j in sorted(next_ones)]
    return slots, after, starts


class _Costs:
    """µs of stages, as matrices [s, e]; of values on a link first as (number of moves, bytes), times their uses in a mix."""

    def __init__(self, mix: Mix, depth: Sequence[int], count: int, kinds: Sequence[Sequence[int]]) -> None:
        self.mix = mix
        self.count = count
        self.kind = {g: i for i, kind in enumerate(kinds) for g in kind}
        self.known: dict[Hashable, np.ndarray] = {}
        place = np.asarray(depth)
        finite = np.where(mix.allowed, mix.times, 0.0) * mix.counts[:, None]
        held = self._held(depth)
        self.work = {}
        for g in (kind[0] for kind in kinds):
            us = self._between(np.bincount(place, weights=finite[:, g], minlength=count)) / mix.groups[g].size
            us[self._between(np.bincount(place, weights=~mix.allowed[:, g], minlength=count)) > 0] = np.inf
            base = sum(nbytes for _, nbytes, _, state in mix.residents if state) if g == 0 else 0
            us[held[int(g == 0)] + base + mix.activation_bytes > mix.groups[g].memory] = np.inf
            us[np.tril_indices(count + 1)] = np.inf
            self.work[g] = us
        self.brought = np.zeros((2, count + 1, count + 1))
        self.returned = np.zeros((2, count + 1, count + 1))
        crossing = np.zeros((2, 2, count + 2))  # [whether it goes home too, number and bytes, cut], as differences
        for move in mix.moves:
            amount = np.array([move.count, move.count * move.bytes])
            readers = [depth[r] for r in move.readers]
            if move.source == HOME:
                needed = self._any(readers)
                if move.unless is not None:
                    needed &= ~self._any([depth[move.unless]])
                self.brought += amount[:, None, None] * needed
                continue
            if move.to_home:
                self.returned += amount[:, None, None] * self._any([depth[move.source]])
            first, last = depth[move.source] + 1, max(readers, default=0)
            if last >= first:
                crossing[int(move.to_home), :, first] += amount
                crossing[int(move.to_home), :, last + 1] -= amount
        crossing = crossing.cumsum(axis=2)[:, :, : count + 1]
        self.crossing, self.crossing_only = crossing.sum(axis=0), crossing[0]
        self.home = np.zeros((len(mix.groups), count + 1, count + 1))  # what a stage elsewhere costs home, transfers being serial
        for g in range(1, len(mix.groups)):
            there, back = mix.links[0, g], mix.links[g, 0]
            us = there[1] * self.brought[0] + there[0] * self.brought[1] + back[1] * self.returned[0] + back[0] * self.returned[1]
            self.home[g] = us / mix.groups[0].size

    def _between(self, each: np.ndarray) -> np.ndarray:
        """Sums of [layer] over s … e − 1."""
        sums = np.concatenate(([0.0], np.cumsum(each)))
        return np.asarray(sums[None, :] - sums[:, None])

    def _any(self, depths: Iterable[int]) -> np.ndarray:
        """Whether one of these layers is in s … e − 1."""
        return self._between(np.bincount(list(depths), minlength=self.count)) > 0

    def _held(self, depth: Sequence[int]) -> np.ndarray:
        """Bytes that kernels of the stage read, elsewhere and at home, whose state is counted anyway."""
        held = np.zeros((2, self.count + 1, self.count + 1))
        alone = np.zeros((2, self.count))
        for _, nbytes, readers, state in self.mix.residents:
            layers = {depth[r] for r in readers}
            for home in (0, 1) if not state else (0,):
                if len(layers) == 1:
                    alone[home, min(layers)] += nbytes
                elif layers:
                    held[home] += nbytes * self._any(layers)
        return np.stack([held[i] + self._between(alone[i]) for i in (0, 1)])

    def of(self, before: int | None, at: int, after: int | None) -> np.ndarray:
        """Of the stage on ``at`` between two others: [s, e]."""
        links, kind = self.mix.links, self.kind
        key = (
            kind[at], before == 0, after == 0,
            None if before is None else (links[before, at], self.mix.groups[before].size),
            None if after is None else (links[at, after], self.mix.groups[after].size),
        )  # fmt: skip
        if key not in self.known:
            self.known[key] = self._of(before, at, after)
        return self.known[key]

    def _of(self, before: int | None, at: int, after: int | None) -> np.ndarray:
        groups = self.mix.groups
        loads: dict[tuple[int, int], np.ndarray] = {}

        def add(u: int, g: int, values: np.ndarray) -> None:
            if u != g:
                per_byte, latency = self.mix.links[u, g]
                loads[u, g] = loads.get((u, g), 0.0) + latency * values[0] + per_byte * values[1]

        if before is not None:
            add(before, at, (self.crossing if at else self.crossing_only)[:, :, None])
        if after is not None:
            add(at, after, (self.crossing if after else self.crossing_only)[:, None, :])
        add(0, at, self.brought)
        add(at, 0, self.returned)
        cost = self.work[next(g for g in self.work if self.kind[g] == self.kind[at])]
        for (u, g), us in loads.items():
            if self.mix.overlap:
                cost = np.maximum(cost, us / (groups[u].size * groups[g].size))
            else:
                cost = cost + us / groups[at].size
        return cost

    def value(self, stages: Sequence[tuple[int, int]]) -> float:
        """µs of the costliest stage, and of home with what it moves for others."""
        devices, ends = [d for d, _ in stages], [0, *(e for _, e in stages)]
        neighbours = zip([None, *devices], devices, [*devices[1:], None], strict=False)
        us = [float(self.of(a, d, b)[ends[i], ends[i + 1]]) for i, (a, d, b) in enumerate(neighbours)]
        if not self.mix.overlap:
            at_home = [u if d == 0 else float(self.home[d, s, e]) for u, (d, e), s in zip(us, stages, ends, strict=False)]
            us.append(sum(at_home))
        return max(us)


def _search(costs: _Costs, count: int, sequences: Sequences, limit: float | None) -> Iterable[list[tuple[int, int]]]:
    """For each last device, the stages as (device, end) whose costliest costs least; or, with a ``limit`` that no stage but home
    exceeds, those that cost home least."""
    slots, after, starts = sequences
    reached: dict[tuple[Slot, Slot | None], np.ndarray] = {}
    came: dict[tuple[Slot, Slot | None], tuple[np.ndarray, np.ndarray]] = {}
    before: dict[Slot, list[Slot | None]] = {slot: [None] if slot in starts else [] for slot in slots}
    start = np.full(count + 1, np.inf)
    start[0] = 0.0
    columns = np.arange(count + 1)
    for slot, device in slots.items():
        for following in (*after[slot], None):
            best, who, cut = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=int), np.zeros(count + 1, dtype=int)
            for i, earlier in enumerate(before[slot]):
                done = start if earlier is None else reached[earlier, slot]
                ends = None if earlier is None else slots[earlier], device, None if following is None else slots[following]
                us = costs.of(*ends)
                if limit is None:
                    trial = np.maximum(done[:, None], us)
                else:
                    trial = done[:, None] + (us if device == 0 else np.where(us <= limit, costs.home[device], np.inf))
                s = trial.argmin(axis=0)
                least = trial[s, columns]
                better = least < best
                best, who, cut = np.where(better, least, best), np.where(better, i, who), np.where(better, s, cut)
            if following is None or np.isfinite(best).any():
                reached[slot, following], came[slot, following] = best, (who, cut)
                if following is not None:
                    before[following].append(slot)
    for slot in slots:
        if np.isfinite(reached[slot, None][count]):
            stages: list[tuple[int, int]] = []
            at: Slot | None = slot
            following, end = None, count
            while at is not None:
                stages.append((slots[at], end))
                who, cut = came[at, following]
                at, following, end = before[at][int(who[end])], at, int(cut[end])
            yield stages[::-1]


def _copies(
    stages: list[tuple[int, int]], used: tuple[int, ...], kinds: Sequence[Sequence[int]]
) -> Iterable[list[tuple[int, int]]]:
    """The split, and, where it does without home, as many more on other devices of the same kinds as there are, from the last."""
    yield stages
    room = min(len(kind) // number for kind, number in zip(kinds, used, strict=True) if number)
    for copy in range(room if not used[0] else 0):
        to = {}
        for kind, number in zip(kinds, used, strict=True):
            first = len(kind) - (copy + 1) * number
            to.update(dict(zip(kind[:number], kind[first : first + number], strict=True)))
        yield [(to[d], e) for d, e in stages]
