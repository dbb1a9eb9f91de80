"""A mix of workloads on groups of devices: the arrays of joint throughput planning, and what a placement is worth.

A *mix* is what the cluster must do again and again: so many uses of each workload (129 decode steps and 2 prefill chunks, say).
A *group* is m identical devices whose members serve different requests; a kernel is placed on a group. With n[k] uses of kernel k
in a mix, x[k] its group, t[k, g] its µs there, and m[v, u, g] = latency + bytes / bandwidth for a move of value v from u to g:

- compute   T[g] = Σ_k n[k] t[k, g] over x[k] = g, shared by m[g] members: T[g] / m[g]
- link u→g  L[u, g] = Σ n m[v, u, g] over the moves, one for each value and destination group, shared by m[u] · m[g] pairs
- overlapped transfers: value = max over all T[g] / m[g] and L[u, g] / (m[u] m[g]); links are full duplex, one for each pair
- serial transfers: value = max_g (T[g] + Σ_u L[u, g] + Σ_u L[g, u]) / m[g]

State: a kernel that writes mutable state writes ``state_bytes`` of it for each use; these bytes move to every group where another
kernel that touches the state runs. Within a workload that is the replica kept up to date; between workloads it is the move at the
phase boundary, and goes from the earlier phase to the later ones alone (``phases`` of :func:`mix_of_table`). So phase splitting,
block splitting, layer splitting and replicas are all placements, or mixtures of placements, of one problem.
"""

from __future__ import annotations

import csv
import itertools
import math
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import networkx as nx
import numpy as np

from .cluster import Cluster
from .errors import PlanError, ProfileError
from .ir import Profile
from .problem import HOME, Problem, make_problem


@dataclass(frozen=True)
class Group:
    """Identical devices. ``memory`` is bytes of each; ``price`` dollars an hour of each, 0 if unknown."""

    name: str
    members: tuple[str, ...]
    memory: float = math.inf
    price: float = 0.0

    @property
    def size(self) -> int:
        return len(self.members)


@dataclass(frozen=True)
class Move:
    """A value and who needs it: made by kernel ``source`` (HOME for what the caller brings), ``count`` times in a mix."""

    value: str
    bytes: int
    source: int
    readers: tuple[int, ...]
    to_home: bool = False
    unless: int | None = None
    count: float = 1.0


@dataclass(frozen=True)
class Mix:
    """``times[k, g]`` in µs, infinite where a kernel cannot run; ``counts[k]`` uses in one mix; kernels in execution order.

    ``links[u, g]``: (µs a byte, µs of latency) from group u to g. ``inner[a, b]``: the same between two members of one group, by
    their names; without it the members cannot be planned apart.
    """

    kernels: tuple[str, ...]
    workloads: tuple[str, ...]
    workload: np.ndarray
    weights: Mapping[str, float]
    counts: np.ndarray
    times: np.ndarray
    groups: tuple[Group, ...]
    links: Mapping[tuple[int, int], tuple[float, float]]
    moves: tuple[Move, ...]
    layers: tuple[int, ...]
    blocks: tuple[str, ...]
    overlap: bool = True
    residents: tuple[tuple[str, int, tuple[int, ...], bool], ...] = ()
    activation_bytes: int = 0
    pins: Mapping[int, int] = field(default_factory=dict)
    inner: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def us(self, source: int, target: int, nbytes: int) -> float:
        """µs of one move; ``links[u, g]`` holds µs a byte and µs of latency."""
        if source == target:
            return 0.0
        per_byte, latency = self.links[source, target]
        return latency + nbytes * per_byte

    @property
    def allowed(self) -> np.ndarray:
        """Boolean [kernel, group]."""
        found: np.ndarray = np.isfinite(self.times)
        for k, g in self.pins.items():
            if not found[k, g]:
                raise PlanError(f"kernel {self.kernels[k]!r} is pinned to {self.groups[g].name!r}, which cannot run it")
            found[k] = False
            found[k, g] = True
        return found

    def check(self) -> None:
        """Raises ProfileError or PlanError, naming what is wrong."""
        for k, name in enumerate(self.kernels):
            row = self.times[k]
            if np.isnan(row).any() or (row < 0).any():
                raise ProfileError(f"kernel {name!r} has a time that is negative or no number: {row.tolist()}")
            if not np.isfinite(row).any():
                raise PlanError(f"kernel {name!r} can run on no device")
        for name, weight in self.weights.items():
            if not (0 < weight < math.inf):
                raise PlanError(f"workload {name!r} has weight {weight}: it must be a positive number")
        named = {(self.groups[u].name, self.groups[g].name): link for (u, g), link in self.links.items()}
        for (start, end), (per_byte, latency) in (*named.items(), *self.inner.items()):
            if not (0 <= per_byte < math.inf and 0 <= latency < math.inf):
                raise PlanError(f"the link {start} → {end} has no bandwidth")


@dataclass(frozen=True)
class Worth:
    """Of one placement: µs of compute of each group, µs on each link, bytes of memory on a member of each group."""

    compute: np.ndarray
    link: np.ndarray
    memory: np.ndarray
    moved_bytes: float


def worth(mix: Mix, placement: Sequence[int]) -> Worth:
    """The loads of a placement, for one mix, before they are shared by the members of a group."""
    size = len(mix.groups)
    place = np.asarray(placement, dtype=np.int64)
    compute = np.zeros(size)
    np.add.at(compute, place, mix.counts * mix.times[np.arange(len(place)), place])
    link = np.zeros((size, size))
    moved = 0.0
    for move in mix.moves:
        source = 0 if move.source == HOME else placement[move.source]
        targets = {placement[r] for r in move.readers}
        if move.to_home:
            targets.add(0)
        targets.discard(source)
        if move.unless is not None:
            targets.discard(placement[move.unless])
        for target in targets:
            link[source, target] += move.count * mix.us(source, target, move.bytes)
            moved += move.count * move.bytes
    memory = np.zeros(size)
    for _, nbytes, readers, state in mix.residents:
        for g in {placement[r] for r in readers} | ({0} if state else set()):
            memory[g] += nbytes
    for g in {0, *placement} if mix.activation_bytes else ():
        memory[g] += mix.activation_bytes
    return Worth(compute, link, memory, moved)


def resources(mix: Mix, of: Worth) -> np.ndarray:
    """The share of the time that each resource is busy for one mix: groups, then, where transfers overlap, directed links."""
    sizes = np.array([g.size for g in mix.groups], dtype=float)
    if not mix.overlap:
        return np.asarray((of.compute + of.link.sum(axis=0) + of.link.sum(axis=1)) / sizes)
    pairs = of.link / np.outer(sizes, sizes)
    return np.concatenate((of.compute / sizes, pairs[~np.eye(len(sizes), dtype=bool)]))


def value(mix: Mix, placement: Sequence[int]) -> float:
    """µs between two mixes in the steady state: the busiest resource."""
    return float(resources(mix, worth(mix, placement)).max(initial=0.0))


def fits(mix: Mix, of: Worth) -> bool:
    return all(of.memory[g] <= group.memory for g, group in enumerate(mix.groups))


def possible(mix: Mix, placement: Sequence[int]) -> bool:
    """Whether devices and pins allow it."""
    return bool(mix.allowed[np.arange(len(placement)), list(placement)].all()) if len(placement) else True


def memory_binds(mix: Mix) -> bool:
    """Whether some device cannot hold everything: the weights and state of all kernels, and the activations."""
    total = sum(nbytes for _, nbytes, _, _ in mix.residents) + mix.activation_bytes
    return any(total > g.memory for g in mix.groups)


def apart(mix: Mix) -> Mix:
    """The mix in which every member of a group is a group of its own, in the order of the groups: the first is home.

    What is pinned to a group of several may run on each of its members. Raises PlanError where ``mix.inner`` lacks their links.
    """
    of = [g for g, group in enumerate(mix.groups) for _ in group.members]
    names = [member for group in mix.groups for member in group.members]
    groups = tuple(replace(mix.groups[g], name=name, members=(name,)) for g, name in zip(of, names, strict=True))
    times = mix.times[:, of]
    pins = {}
    for k, g in mix.pins.items():
        if mix.groups[g].size == 1:
            pins[k] = of.index(g)
        else:
            times[k, [i for i, other in enumerate(of) if other != g]] = math.inf
    links = {}
    for (i, a), (j, b) in itertools.permutations(enumerate(names), 2):
        if of[i] == of[j] and (a, b) not in mix.inner:
            raise PlanError(f"the mix does not say how {a!r} and {b!r} are linked: give its `inner`")
        links[i, j] = mix.inner[a, b] if of[i] == of[j] else mix.links[of[i], of[j]]
    return replace(mix, groups=groups, times=times, links=links, pins=pins, inner={})


def loads_of(mix: Mix, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``resources`` of many placements at once: [resource, placement]; and which of them fit into memory.

    ``places[p, k]`` is a group that can run kernel k.
    """
    size, count = len(mix.groups), len(places)
    at = [places == g for g in range(size)]  # [placement, kernel]
    work = np.where(np.isfinite(mix.times), mix.times, 0.0) * mix.counts[:, None]
    compute = np.stack([at[g] @ work[:, g] for g in range(size)])
    link = np.zeros((size, size, count))
    here = [np.full(count, g == 0) for g in range(size)]
    for move in mix.moves:
        for g in range(size):
            needed = at[g][:, list(move.readers)].any(axis=1)
            if move.to_home and g == 0:
                needed = np.ones(count, dtype=bool)
            if move.unless is not None:
                needed &= ~at[g][:, move.unless]
            for u in range(size):
                if u != g:
                    source = here[u] if move.source == HOME else at[u][:, move.source]
                    link[u, g] += (needed & source) * (move.count * mix.us(u, g, move.bytes))
    fit = np.ones(count, dtype=bool)
    for g, group in enumerate(mix.groups):
        if math.isfinite(group.memory):
            used = np.zeros(count)
            for _, nbytes, readers, state in mix.residents:
                used += nbytes * (at[g][:, list(readers)].any(axis=1) | (state and g == 0))
            used += mix.activation_bytes * (at[g].any(axis=1) | (g == 0))
            fit &= used <= group.memory
    sizes = np.array([g.size for g in mix.groups], dtype=float)
    if not mix.overlap:
        return (compute + link.sum(axis=0) + link.sum(axis=1)) / sizes[:, None], fit
    pairs = link / np.outer(sizes, sizes)[:, :, None]
    return np.concatenate((compute / sizes[:, None], pairs[~np.eye(size, dtype=bool)])), fit


# -- from a dependence graph, or from a table


def group_devices(cluster: Cluster, alike: bool = True) -> tuple[Group, ...]:
    """Groups of devices of one type, memory and price with the same links to all others; each alone where not ``alike``."""
    groups: list[list[str]] = []
    for device in cluster.devices:
        for members in groups if alike else []:
            first = cluster[members[0]]
            others = [d for d in cluster.names if d not in (*members, device.name)]
            same = (first.type, first.kind, first.memory, first.price) == (device.type, device.kind, device.memory, device.price)
            if same and all(
                cluster.links[device.name, o] == cluster.links[first.name, o]
                and cluster.links[o, device.name] == cluster.links[o, first.name]
                for o in others
            ):
                members.append(device.name)
                break
        else:
            groups.append([device.name])
    made: list[Group] = []
    for members in groups:
        device = cluster[members[0]]
        name = device.type if len(members) > 1 else device.name
        if any(g.name == name for g in made) or (len(members) > 1 and name in cluster.names):
            name = "+".join(members)  # another group of the type, behind other links
        made.append(Group(name, tuple(members), device.memory or math.inf, device.price))
    return tuple(made)


def group_links(cluster: Cluster, groups: Sequence[Group]) -> dict[tuple[int, int], tuple[float, float]]:
    found = {}
    for u, a in enumerate(groups):
        for g, b in enumerate(groups):
            if u != g:
                link = cluster.links[a.members[0], b.members[0]]
                found[u, g] = (1.0 / (link.gb_per_s * 1e3), link.latency_us)
    return found


def inner_links(cluster: Cluster, groups: Sequence[Group]) -> dict[tuple[str, str], tuple[float, float]]:
    """(Member, other member of its group) → µs a byte and µs of latency."""
    pairs = (pair for group in groups for pair in itertools.permutations(group.members, 2))
    return {pair: (1.0 / (cluster.links[pair].gb_per_s * 1e3), cluster.links[pair].latency_us) for pair in pairs}


def mix_of_graphs(
    parts: Sequence[tuple[nx.DiGraph, Profile, float]],
    cluster: Cluster,
    *,
    overlap: bool = True,
    inflight: int = 1,
    alike: bool = True,
    state_moves: bool = False,
) -> Mix:
    """A mix of dependence graphs, each with its profile and weight, in the order in which a request goes through them.

    state_moves: False, as a plain call has it: mutable state lives at home, is fetched and brought back in every use; what a lane
    keeps moves to the lane of the next graph that keeps it, as often as the rarer of the two is used. True, as
    an engine can have it: state of a storage stays where it is used, and what a kernel writes of it moves to the groups of other
    kernels that touch it, in its own graph and in later ones (``ddg.graph["state_bytes"]``: value → bytes written in one use,
    all of it where that does not say).

    Weights and state of one storage (``ddg.graph["storages"]``: value → storage) in several graphs are one resident: prefill and
    decode of a model share them. Raises PlanError for cyclic graphs and bad weights, ProfileError for missing times.
    """
    if not parts:
        raise PlanError("a mix needs at least one dependence graph")
    groups = group_devices(cluster, alike)
    names: list[str] = []
    kernels: list[str] = []
    of, counts, rows, layers, blocks = [], [], [], [], []
    moves: list[Move] = []
    residents: dict[Hashable, tuple[str, int, list[int], bool]] = {}
    weights = {}
    activation = 0
    shared: dict[Hashable, list[tuple[int, float, _StateUse]]] = {}
    reads: list[tuple[int, float, Hashable, int, tuple[int, ...]]] = []
    writes: dict[Hashable, float] = {}
    kept_by: dict[Hashable, tuple[int, float]] = {}  # Storage → the kernel whose lane keeps it, and the graph's weight.
    cut_us = [0.0] * len(groups)
    for number, (ddg, profile, weight) in enumerate(parts):
        problem = make_problem(ddg, profile, cluster, inflight=inflight, overlap=overlap)
        name = ddg.graph.get("name") or f"graph{number}"
        if name in names:
            name = f"{name}#{number}"
        names.append(name)
        weights[name] = float(weight)
        base = len(kernels)
        columns = [problem.devices.index(g.members[0]) for g in groups]
        cut_us = [max(us, problem.cut_us[c]) for us, c in zip(cut_us, columns, strict=True)]
        kernels += [f"{name}/{k}" for k in problem.kernels]
        of += [number] * len(problem.kernels)
        counts += [float(weight)] * len(problem.kernels)
        rows.append(problem.times[:, columns])
        graph = ddg.graph["kernels"]
        for kernel in graph.kernels:
            layers.append(_layer_of(kernel.module))
            blocks.append(_block_of(kernel.module))
        kept = _state_uses(ddg, base) if state_moves else {}
        for state, use in kept.items():
            if state in ddg.graph.get("storages", {}):
                shared.setdefault(ddg.graph["storages"][state], []).append((number, float(weight), use))
            else:
                shared[number, state] = [(number, float(weight), use)]
        versions = {v for use in kept.values() for v in use.versions}
        for flow in problem.flows:
            if flow.value in versions:
                continue
            source = HOME if flow.source == HOME else base + flow.source
            unless = None if flow.unless is None else base + flow.unless
            readers = tuple(base + r for r in flow.readers)
            moves.append(Move(f"{name}/{flow.value}", flow.bytes, source, readers, flow.to_home, unless, float(weight)))
        storages = ddg.graph.get("storages", {})
        for value in graph.values.values():  # state of another graph that this one only reads
            if value.origin in ("weight", "constant") and value.name in storages:
                users = tuple(base + i for i, k in enumerate(graph.kernels) if value.name in k.inputs)
                reads.append((number, float(weight), storages[value.name], value.bytes, users))
            elif value.origin == "state" and value.name in storages:
                key = storages[value.name]
                writes[key] = writes.get(key, 0.0) + float(weight)
                if graph.keeper(value.name) is not None and not state_moves:
                    writer = base + next(i for i, k in enumerate(graph.kernels) if value.name in k.writes)
                    if key in kept_by:  # It moves once, from the one graph's lane to the other's.
                        before, least = kept_by[key][0], min(kept_by[key][1], float(weight))
                        moves.append(Move(f"state {key}", value.bytes, before, (writer,), count=least))
                    kept_by[key] = (writer, float(weight))
        for resident, nbytes, touchers, mutable in problem.residents:
            held = ("storage", storages[resident]) if resident in storages else (number, resident)
            label, most, holders, written = residents.get(held, (f"{name}/{resident}", 0, [], False))
            holders.extend(base + r for r in touchers)
            residents[held] = (label, max(most, nbytes), holders, (written or mutable) and not state_moves)
        activation = max(activation, problem.activation_bytes * inflight)
    for number, weight, key, nbytes, users in reads:
        if not users or key not in writes:
            continue
        if state_moves:
            shared[key].append((number, weight, _StateUse((), (), users)))
        else:  # its replica is stale after each write
            moves.append(Move(f"state {key}", nbytes, HOME, users, count=min(weight, writes[key])))
    moves.extend(_state_moves(shared))
    cut_of = {member: us for group, us in zip(groups, cut_us, strict=True) for member in group.members}
    made = Mix(
        tuple(kernels),
        tuple(names),
        np.array(of, dtype=np.int64),
        weights,
        np.array(counts),
        np.concatenate(rows) if rows else np.zeros((0, len(groups))),
        groups,
        {(u, g): (per, latency + max(cut_us[u], cut_us[g])) for (u, g), (per, latency) in group_links(cluster, groups).items()},
        tuple(moves),
        tuple(layers),
        tuple(blocks),
        overlap,
        tuple((label, nbytes, tuple(users), state) for label, nbytes, users, state in residents.values()),
        activation,
        inner={(a, b): (per, latency + cut_of[a]) for (a, b), (per, latency) in inner_links(cluster, groups).items()},
    )
    made.check()
    return made


def mix_of_problem(problem: Problem, pins: Mapping[int, int] | None = None) -> Mix:
    """One graph, used once, each device a group of its own: the mix whose single plans are the problem's placements."""
    size = len(problem.devices)
    links = {}
    for u in range(size):
        for g in range(size):
            if u != g:
                latency = problem.us(u, g, 0)
                links[u, g] = ((problem.us(u, g, 1 << 40) - latency) / (1 << 40), latency)
    count = len(problem.kernels)
    groups = tuple(Group(d.name, (d.name,), d.memory, d.price) for d in problem.cluster.devices)
    return Mix(
        problem.kernels,
        ("graph",),
        np.zeros(count, dtype=np.int64),
        {"graph": 1.0},
        np.ones(count),
        problem.times,
        groups,
        links,
        tuple(Move(f.value, f.bytes, f.source, f.readers, f.to_home, f.unless) for f in problem.flows),
        (-1,) * count,
        ("other",) * count,
        problem.overlap,
        problem.residents,
        problem.activation_bytes * problem.inflight,
        dict(pins or {}),
    )


@dataclass(frozen=True)
class _StateUse:
    """One state in one graph: its versions, the kernels that write it with the bytes they write, and all that touch it."""

    versions: tuple[str, ...]
    writers: tuple[tuple[int, int], ...]
    touchers: tuple[int, ...]


def _state_uses(ddg: nx.DiGraph, base: int) -> dict[str, _StateUse]:
    graph = ddg.graph["kernels"]
    written = ddg.graph.get("state_bytes", {})
    position = {k.name: base + i for i, k in enumerate(graph.kernels)}
    found = {}
    for value in graph.values.values():
        if value.origin != "state" or value.storage != value.name:
            continue
        versions = tuple(v.name for v in graph.values.values() if v.storage == value.name)
        writers = [position[k.name] for k in graph.kernels if value.name in k.writes]
        touchers = [position[k.name] for k in graph.kernels if set(versions) & {*k.inputs, *k.outputs} or value.name in k.writes]
        nbytes = int(written.get(value.name, value.bytes))
        found[value.name] = _StateUse(versions, tuple((k, nbytes) for k in writers), tuple(touchers))
    return found


def _state_moves(shared: Mapping[Hashable, Sequence[tuple[int, float, _StateUse]]]) -> Iterator[Move]:
    """What each writer of a state sends to the others that touch it, in its graph and in later ones."""
    for key, uses in shared.items():
        for number, weight, use in uses:
            for writer, nbytes in use.writers:
                readers = tuple(k for other, _, later in uses if other >= number for k in later.touchers if k != writer)
                if readers and nbytes:
                    yield Move(f"state {key}", nbytes, writer, readers, count=weight)


def _layer_of(module: str) -> int:
    """The first number in a module path: `model.layers.3.mlp` is layer 3."""
    return next((int(part) for part in module.split(".") if part.isdigit()), -1)


def _block_of(module: str) -> str:
    lowered = module.lower()
    if "attn" in lowered or "attention" in lowered:
        return "attention"
    if "mlp" in lowered or "ffn" in lowered or "feed_forward" in lowered or "expert" in lowered:
        return "ffn"
    return "other"


_COLUMNS = ("workload", "position", "layer", "block", "kernel", "reads", "bytes_out", "state", "state_bytes_written")


def read_table(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    """The rows of a profile CSV. Raises ProfileError, naming file and line, where a column lacks or a row is cut short."""
    try:
        return _read_table(path)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ProfileError(f"{path} is no CSV file in UTF-8: {error}") from error


def _read_table(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        fields = reader.fieldnames or []
        lacking = [c for c in _COLUMNS if c not in fields]
        if lacking or not any(f.endswith("_us") for f in fields):
            what = lacking[0] if lacking else "<device>_us"
            raise ProfileError(f"{path}: no column {what!r}; a profile has {', '.join(_COLUMNS)} and <device>_us for each device")
        rows = []
        for row in reader:
            if None in row.values() or None in row:
                raise ProfileError(f"{path}:{reader.line_num}: {len(fields)} fields are expected")
            row["line"] = str(reader.line_num)
            rows.append(row)
    if not rows:
        raise ProfileError(f"{path}: no kernels")
    return rows


def mix_of_table(
    rows: Sequence[Mapping[str, str]],
    cluster: Cluster,
    weights: Mapping[str, float],
    *,
    overlap: bool = True,
    phases: Sequence[str] | None = None,
    alike: bool = True,
    name: str = "profile",
) -> Mix:
    """A mix of the workloads of a profile CSV (``read_table``).

    weights: workload → uses in one mix. phases: the order in which a request goes through them, for what state moves; by default
    the one that writes most state in a single use first, as a prefill does. Times are taken as given; column ``<type>_us`` or
    ``<device>_us`` belongs to devices of that type or name.
    """
    known = list(dict.fromkeys(r["workload"] for r in rows))
    for workload in weights:
        if workload not in known:
            raise PlanError(f"{name} has no workload {workload!r}; it has {', '.join(known)}")
    groups = group_devices(cluster, alike)
    columns = []
    for group in groups:
        column = next((c for c in (f"{group.members[0]}_us", f"{cluster[group.members[0]].type}_us") if c in rows[0]), None)
        if column is None:
            have = ", ".join(c for c in rows[0] if c.endswith("_us"))
            raise ProfileError(f"{name} has no times for {group.name!r}; it has {have}")
        columns.append(column)
    workloads = [w for w in known if w in weights]
    index: dict[tuple[str, str], int] = {}
    chosen = [r for r in rows if r["workload"] in weights]
    for r in chosen:
        key = (r["workload"], r["position"])
        if key in index:
            raise ProfileError(f"{name}:{r['line']}: position {r['position']} of {r['workload']} stands twice")
        index[key] = len(index)
    readers: dict[int, list[int]] = {}
    touched: dict[str, list[int]] = {}
    times = np.zeros((len(chosen), len(groups)))
    counts, of = np.zeros(len(chosen)), np.zeros(len(chosen), dtype=np.int64)
    for k, r in enumerate(chosen):
        times[k] = [_time(r, c, name) for c in columns]
        counts[k] = weights[r["workload"]]
        of[k] = workloads.index(r["workload"])
        for position in r["reads"].split():
            source = index.get((r["workload"], position))
            if source is None or source >= k:
                raise ProfileError(
                    f"{name}:{r['line']}: reads position {position}, which is not an earlier kernel of {r['workload']}"
                )
            readers.setdefault(source, []).append(k)
        if r["state"]:
            touched.setdefault(r["state"], []).append(k)
    moves = []
    for source, by in sorted(readers.items()):
        nbytes = _bytes(chosen[source], "bytes_out", name)
        moves.append(Move(f"v{source}", nbytes, source, tuple(by), count=float(counts[source])))
    written = {w: sum(_bytes(r, "state_bytes_written", name) for r in chosen if r["workload"] == w) for w in workloads}
    order = list(phases) if phases is not None else sorted(workloads, key=lambda w: -written[w])
    if sorted(order) != sorted(workloads):
        raise PlanError(f"phases {order} must name each of {workloads} once")
    rank = {workloads.index(w): i for i, w in enumerate(order)}
    for state, users in touched.items():
        for k in users:
            nbytes = _bytes(chosen[k], "state_bytes_written", name)
            later = tuple(j for j in users if j != k and (of[j] == of[k] or rank[int(of[j])] > rank[int(of[k])]))
            if nbytes and later:
                moves.append(Move(state, nbytes, k, later, count=float(counts[k])))
    made = Mix(
        tuple(f"{r['workload']}/{r['position']}" for r in chosen),
        tuple(workloads),
        of,
        {w: float(weights[w]) for w in workloads},
        counts,
        times,
        groups,
        group_links(cluster, groups),
        tuple(moves),
        tuple(_layer(r, name) for r in chosen),
        tuple(r["block"] for r in chosen),
        overlap,
        inner=inner_links(cluster, groups),
    )
    made.check()
    return made


def _time(row: Mapping[str, str], column: str, name: str) -> float:
    text = row[column].strip()
    if not text:
        return math.inf  # this device cannot run it
    try:
        us = float(text)
    except ValueError:
        us = math.nan
    if math.isnan(us) or us < 0:
        raise ProfileError(f"{name}:{row['line']}: {column} is {text!r}, which is no time")
    return us


def _layer(row: Mapping[str, str], name: str) -> int:
    try:
        return int(row["layer"] or -1)
    except ValueError:
        raise ProfileError(f"{name}:{row['line']}: layer is {row['layer']!r}, which is no whole number") from None


def _bytes(row: Mapping[str, str], column: str, name: str) -> int:
    try:
        nbytes = int(row[column] or 0)
    except ValueError:
        nbytes = -1
    if nbytes < 0:
        raise ProfileError(f"{name}:{row['line']}: {column} is {row[column]!r}, which is no number of bytes")
    return nbytes
