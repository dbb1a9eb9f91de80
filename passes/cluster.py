"""Devices and the links between them, and the text that describes them.

Grammar of a cluster string, items joined by commas::

    cluster = item {"," item} [link]
    item    = [COUNT "x"] NAME ["/" N "sm"]        e.g. 2xa100-80gb, cuda:0, cuda:0/48sm, cpu
    link    = ["@" N ("Gbps" | "GB/s")] ["+" N "us"]   for every pair; e.g. @200Gbps+10us

``Gbps`` is 1e9 bits a second and ``GB/s`` 1e9 bytes a second, in each direction.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from .errors import ClusterError

DeviceKind = Literal["cpu", "cuda", "modelled"]

#: Latency of a transfer between modelled GPUs unless the cluster string says otherwise, µs (kernel launch + copy set-up).
DEFAULT_LATENCY_US = 10.0
#: Latency of a copy between two slices of one GPU, µs, issued from the host on an H200; measured links replace it.
SLICE_LATENCY_US = 5.0
#: Latency of a hand-over between two CPU lanes, µs: waking a thread; 12 to 65 µs were seen on a two-core machine.
CPU_LATENCY_US = 30.0


@dataclass(frozen=True)
class Device:
    """Something that runs kernels: a CPU lane, a GPU of this machine or a slice of one, or a GPU known by its data sheet alone.

    ``memory`` is bytes free for a model; ``tflops`` dense bf16 TFLOP/s; ``gb_per_s`` memory bandwidth in 1e9 bytes/s;
    ``sms`` multiprocessors and ``boost_ghz`` their clock; ``price`` dollars an hour. Zero means unknown.
    """

    name: str
    type: str
    kind: DeviceKind
    memory: int
    tflops: float = 0.0
    gb_per_s: float = 0.0
    l2_bytes: int = 0
    sms: int = 0
    boost_ghz: float = 0.0
    price: float = 0.0


@dataclass(frozen=True)
class Link:
    """A directed path between two devices: ``gb_per_s`` in 1e9 bytes/s, ``latency_us`` added to each transfer."""

    gb_per_s: float
    latency_us: float

    def us(self, nbytes: int) -> float:
        """Microseconds to move ``nbytes``: latency + bytes / bandwidth. Empty values move nothing but still cost the latency."""
        return self.latency_us + nbytes / (self.gb_per_s * 1e3)


@dataclass(frozen=True)
class Cluster:
    """Devices in lane order; the first is home, where the caller's tensors live. ``links[(a, b)]`` is the path a → b."""

    devices: tuple[Device, ...]
    links: Mapping[tuple[str, str], Link]

    def __post_init__(self) -> None:
        names = [d.name for d in self.devices]
        if not names:
            raise ClusterError("a cluster needs at least one device")
        for device in self.devices:
            if not device.name or any(c.isspace() for c in device.name):
                raise ClusterError(f"device name {device.name!r}: a name is one word, since programs are written as text")
            for figure in ("memory", "tflops", "gb_per_s", "l2_bytes", "sms", "boost_ghz", "price"):
                if not 0 <= getattr(device, figure) < float("inf"):
                    raise ClusterError(f"device {device.name!r}: {figure} is {getattr(device, figure)}, which is no figure")
        if len(set(names)) != len(names):
            raise ClusterError(f"device names repeat: {', '.join(names)}")
        for a in names:
            for b in names:
                if a != b and (a, b) not in self.links:
                    raise ClusterError(f"no link from {a!r} to {b!r}")
        for pair, link in self.links.items():
            if not (0 < link.gb_per_s < float("inf") and 0 <= link.latency_us < float("inf")):
                raise ClusterError(f"link {pair[0]} → {pair[1]} has {link.gb_per_s} GB/s, {link.latency_us} µs: need > 0 and ≥ 0")

    def __hash__(self) -> int:
        return hash((self.devices, tuple(sorted(self.links.items(), key=lambda item: item[0]))))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(d.name for d in self.devices)

    @property
    def home(self) -> str:
        return self.devices[0].name

    def __getitem__(self, name: str) -> Device:
        for device in self.devices:
            if device.name == name:
                return device
        raise ClusterError(f"no device {name!r} in this cluster; it has {', '.join(self.names)}")

    def us(self, source: str, target: str, nbytes: int) -> float:
        """Microseconds to move ``nbytes`` from ``source`` to ``target``; 0 within a device."""
        return 0.0 if source == target else self.links[source, target].us(nbytes)

    def with_memory(self, limits: Mapping[str, int]) -> Cluster:
        """The cluster with some devices' memory replaced (bytes)."""
        for name in limits:
            self[name]
        devices = tuple(replace(d, memory=limits[d.name]) if d.name in limits else d for d in self.devices)
        return Cluster(devices, self.links)

    def to_text(self) -> str:
        lines = []
        for d in self.devices:
            figures = f"{d.tflops:g} TFLOP/s, {d.gb_per_s:g} GB/s, " if d.tflops else ""
            lines.append(f"device {d.name} {d.kind} {d.type}: {figures}{d.memory / 2**30:.1f} GiB")
        lines += [f"link {a} -> {b}: {link.gb_per_s:g} GB/s + {link.latency_us:g} us" for (a, b), link in self.links.items()]
        return "\n".join(lines)

    def to_json(self) -> str:
        links = [[a, b, asdict(link)] for (a, b), link in self.links.items()]
        return json.dumps({"devices": [asdict(d) for d in self.devices], "links": links})

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        data = json.loads(text)
        return cls(tuple(Device(**d) for d in data["devices"]), {(a, b): Link(**link) for a, b, link in data["links"]})


_ITEM = re.compile(r"(?:(\d+)x)?([A-Za-z][\w.:-]*?)(?:/(\d+)sm)?")
_LINK = re.compile(r"(?:@(\d+(?:\.\d+)?)(Gbps|GB/s))?(?:\+(\d+(?:\.\d+)?)us)?")


def parse_cluster(
    text: str,
    catalogue: Mapping[str, Mapping[str, Any]],
    resolve: Callable[[str, int | None], Device] | None = None,
) -> Cluster:
    """Reads a cluster string.

    Args:
        text: see the grammar at the top of this file.
        catalogue: GPU type → published figures (``bf16_tflops``, ``memory_gb_per_s``, ``memory_gib``, ``link_gb_per_s``,
            ``l2_mb``, ``dollars_per_hour``).
        resolve: makes the device for names that stand for hardware of this machine (``cpu``, ``cuda:N``), given the name and
            the number of SMs of a slice; without it such names are unknown.

    Raises:
        ClusterError: names the item that cannot be read and the nearest names that can.
    """
    body, link_text = _split_link(text)
    wanted: list[tuple[str, int | None]] = []
    for item in body.split(","):
        match = _ITEM.fullmatch(item.strip())
        if not match:
            raise ClusterError(
                f"cannot read {item.strip()!r} in cluster {text!r}; items look like '2xa100-80gb', 'cuda:0' or 'cpu'"
            )
        count = int(match[1] or 1)
        if count < 1:
            raise ClusterError(f"{item.strip()!r} in cluster {text!r} asks for no device")
        wanted += [(match[2], int(match[3]) if match[3] else None)] * count
    seen: dict[str, int] = {}
    totals: dict[str, int] = {}
    for name, sms in wanted:
        key = name if sms is None else f"{name}/{sms}sm"
        totals[key] = totals.get(key, 0) + 1
    devices: list[Device] = []
    for name, sms in wanted:
        key = name if sms is None else f"{name}/{sms}sm"
        device = _device(name, sms, text, catalogue, resolve)
        if totals[key] > 1:
            number = seen[key] = seen.get(key, -1) + 1
            device = replace(device, name=f"{key}#{number}")
        devices.append(device)
    links = {(a.name, b.name): _link(a, b, link_text, catalogue) for a in devices for b in devices if a.name != b.name}
    return Cluster(tuple(devices), links)


_DEVICE_KEYS = {"name", "type", "count", "memory_gib", "bf16_tflops", "memory_gb_per_s", "l2_mb", "sms", "boost_ghz",
                "dollars_per_hour"}  # fmt: skip
_LINK_KEYS = {"from", "to", "gb_per_s", "gbps", "latency_us", "both_ways"}


def cluster_from_table(
    table: Mapping[str, Any],
    catalogue: Mapping[str, Mapping[str, Any]],
    resolve: Callable[[str, int | None], Device] | None = None,
) -> Cluster:
    """A cluster from what a TOML file holds::

        [[device]]
        type = "a100-80gb"        # of the catalogue; or give bf16_tflops, memory_gb_per_s and memory_gib yourself
        count = 2                 # named a100-80gb#0 and a100-80gb#1; `name` chooses another stem
        memory_gib = 70           # any figure of the catalogue can be overridden

        [link]                    # for every pair without one of its own
        gbps = 200                # or gb_per_s = 25
        latency_us = 10

        [[links]]
        from = "a100-80gb#0"
        to = "a100-80gb#1"
        gb_per_s = 300
        both_ways = true          # the default

    Raises:
        ClusterError: names the key or the pair of devices at fault, and the nearest key that exists.
    """
    _check_keys(table, {"device", "link", "links"}, "the cluster file")
    for key, brackets, kind in (("device", "[[device]]", list), ("link", "[link]", dict), ("links", "[[links]]", list)):
        if key in table and not isinstance(table[key], kind):
            raise ClusterError(f"write {brackets}, not {'[' + key + ']' if kind is list else '[[' + key + ']]'}")
    if not table.get("device"):
        raise ClusterError("the cluster file has no [[device]]")
    devices: list[Device] = []
    for entry in table["device"]:
        _check_keys(entry, _DEVICE_KEYS, "[[device]]")
        devices += _devices_of(entry, catalogue, resolve)
    names = [d.name for d in devices]
    links: dict[tuple[str, str], Link] = {}
    if "link" in table:
        _check_keys(table["link"], _LINK_KEYS - {"from", "to", "both_ways"}, "[link]")
        default = _link_of(table["link"], "[link]")
        links = {(a, b): default for a in names for b in names if a != b}
    for entry in table.get("links", []):
        _check_keys(entry, _LINK_KEYS, "[[links]]")
        ends = (str(entry.get("from")), str(entry.get("to")))
        if ends[0] == ends[1]:
            raise ClusterError(f"[[links]]: {ends[0]!r} is linked to itself")
        if not isinstance(entry.get("both_ways", True), bool):
            raise ClusterError(f"[[links]] {ends[0]} → {ends[1]}: both_ways = {entry['both_ways']!r}; it takes true or false")
        for end in ends:
            if end not in names:
                near = difflib.get_close_matches(end, names, n=2, cutoff=0.3)
                raise ClusterError(f"[[links]]: no device {end!r}; devices are {', '.join(near or sorted(names))}")
        link = _link_of(entry, f"[[links]] {ends[0]} → {ends[1]}")
        links[ends] = link
        if entry.get("both_ways", True):
            links[ends[1], ends[0]] = link
    return Cluster(tuple(devices), links)


def _check_keys(table: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            raise ClusterError(
                f"{where}: unknown key {key!r}; " + (f"did you mean {near[0]!r}?" if near else f"it takes {sorted(known)}")
            )


def _devices_of(
    entry: Mapping[str, Any],
    catalogue: Mapping[str, Mapping[str, Any]],
    resolve: Callable[[str, int | None], Device] | None,
) -> list[Device]:
    kind = str(entry.get("type", ""))
    where = f"[[device]] {entry.get('name', kind)}"
    figures = {k: _number(entry, k, where) for k in entry if k not in ("name", "type", "count")}
    if kind == "cpu" and set(figures) - {"memory_gib"}:
        raise ClusterError(f"{where}: a CPU lane takes memory_gib alone; its times are measured")
    needed = {"bf16_tflops", "memory_gb_per_s", "memory_gib"}
    if kind in catalogue or kind == "cpu" or not needed <= set(figures):
        if not kind:
            raise ClusterError(f"[[device]]: give a type of the catalogue, or {', '.join(sorted(needed - set(figures)))}")
        made = _device(kind, None, "file", {k: {**v, **figures} for k, v in catalogue.items()}, resolve)
        if made.kind == "cpu" and "memory_gib" in figures:
            made = replace(made, memory=int(figures["memory_gib"] * 2**30))
    else:
        made = _modelled(kind or str(entry.get("name", "gpu")), figures)
    stem, count = str(entry.get("name", made.name)), entry.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ClusterError(f"[[device]] {stem}: count = {count!r}; it takes a whole number from 1")
    return [replace(made, name=stem if count == 1 else f"{stem}#{i}") for i in range(count)]


def _link_of(entry: Mapping[str, Any], where: str) -> Link:
    if ("gbps" in entry) == ("gb_per_s" in entry):
        raise ClusterError(f"{where}: give one of gbps (1e9 bits a second) and gb_per_s (1e9 bytes a second)")
    rate = _number(entry, "gb_per_s", where) if "gb_per_s" in entry else _number(entry, "gbps", where) / 8
    return Link(rate, _number(entry, "latency_us", where) if "latency_us" in entry else DEFAULT_LATENCY_US)


def _number(entry: Mapping[str, Any], key: str, where: str) -> float:
    value = entry[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ClusterError(f"{where}: {key} = {value!r}; it takes a number, 0 or more")
    return float(value)


def _split_link(text: str) -> tuple[str, re.Match[str]]:
    at = min((i for i in (text.find("@"), text.find("+")) if i >= 0), default=len(text))
    match = _LINK.fullmatch(text[at:].strip())
    if match is None:
        raise ClusterError(
            f"cannot read the link {text[at:]!r} in cluster {text!r}; it stands once, last, like '@200Gbps+10us' or '@25GB/s'"
        )
    if match[1] is not None and float(match[1]) <= 0:
        raise ClusterError(f"the link in cluster {text!r} has zero bandwidth")
    return text[:at], match


def _device(
    name: str,
    sms: int | None,
    text: str,
    catalogue: Mapping[str, Mapping[str, Any]],
    resolve: Callable[[str, int | None], Device] | None,
) -> Device:
    if resolve is not None and re.fullmatch(r"cpu|cuda(:\d+)?", name):
        return resolve(name, sms)
    figures = catalogue.get(name)
    if figures is None:
        near = difflib.get_close_matches(name, [*catalogue, "cpu", "cuda:0"], n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join([*catalogue, 'cpu', 'cuda:N'])}"
        raise ClusterError(f"unknown device {name!r} in cluster {text!r}; {hint}")
    if sms is not None:
        raise ClusterError(f"{name}/{sms}sm in cluster {text!r}: only a real GPU (cuda:N) can be sliced")
    return _modelled(name, figures)


def _modelled(name: str, figures: Mapping[str, Any]) -> Device:
    return Device(
        name=name,
        type=name,
        kind="modelled",
        memory=int(figures["memory_gib"] * 2**30),
        tflops=float(figures["bf16_tflops"]),
        gb_per_s=float(figures["memory_gb_per_s"]),
        l2_bytes=int(figures.get("l2_mb", 0) * 2**20),
        sms=int(figures.get("sms", 0)),
        boost_ghz=float(figures.get("boost_ghz", 0.0)),
        price=float(figures.get("dollars_per_hour", 0.0)),
    )


def _link(a: Device, b: Device, link: re.Match[str], catalogue: Mapping[str, Mapping[str, Any]]) -> Link:
    if link[1] is not None:
        gb_per_s = float(link[1]) / (8 if link[2] == "Gbps" else 1)
    else:
        # Unlike data-sheet GPUs meet at the slower one's link; CPU lanes share one memory, read once and written once.
        known = [float(catalogue[d.type]["link_gb_per_s"]) for d in (a, b) if d.type in catalogue]
        gb_per_s = min(known) if known else max(1.0, a.gb_per_s / 2)
    latency = CPU_LATENCY_US if a.kind == b.kind == "cpu" else DEFAULT_LATENCY_US
    if a.kind == b.kind == "cuda" and a.name.split("/")[0] == b.name.split("/")[0] and link[1] is None:
        gb_per_s, latency = max(1.0, a.gb_per_s / 2), SLICE_LATENCY_US  # one memory, read once and written once
    return Link(gb_per_s, float(link[3]) if link[3] is not None else latency)
