"""The data that passes hand to each other.

Everything here is frozen and holds text, numbers and tuples alone, so that a pass can be tested by comparing values and a
file can hold any of it. Each class prints as text that a person can read (``to_text``) and survives ``to_json`` /
``from_json``. Tensors never appear; an FX graph does once, as :attr:`KernelGraph.module`, outside equality and JSON.

Words: a *kernel* is the unit of placement; a *value* is a tensor between kernels, named after the FX node that makes it;
a *lane* is one device executing its own instruction list in order; a *segment* is a run of kernels compiled together.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..ptx_tools.footprints import Box
from .errors import PlanError, ProfileError, ProgramError

Origin = Literal["weight", "input", "state", "constant", "activation"]
DependenceKind = Literal["raw", "war", "waw", "effect"]
Objective = Literal["throughput", "latency"]

#: Values of these origins live on between calls: a lane that reads one keeps a replica instead of receiving it per call.
RESIDENT = frozenset({"weight", "state", "constant"})

_DTYPES = {
    "float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32", "int16": "i16",
    "int8": "i8", "uint8": "u8", "bool": "b1",
}  # fmt: skip


@dataclass(frozen=True)
class Value:
    """A tensor (or a host integer, ``dtype="symint"``) that lives between kernels.

    ``shape`` and ``strides`` hold ints, or text for symbolic dimensions; ``bytes`` uses the hints of such dimensions.
    ``storage`` is the name of the value that owns the memory: it differs from ``name`` only for the result of an in-place
    write, which is the new version of a graph input.
    """

    name: str
    shape: tuple[int | str, ...]
    strides: tuple[int | str, ...]
    dtype: str
    device: str
    bytes: int
    origin: Origin
    storage: str

    def to_text(self) -> str:
        dims = ",".join(map(str, self.shape))
        return f"{self.name} {_DTYPES.get(self.dtype, self.dtype)}[{dims}]"


@dataclass(frozen=True)
class Kernel:
    """The unit of placement: FX nodes that run together on one device.

    ``nodes`` are the non-free FX nodes, in graph order. ``inputs`` are the values read, ``outputs`` the values made,
    ``writes`` the graph inputs overwritten in place (their new versions are among ``outputs``). ``flops`` and bytes are per
    call. ``fingerprint`` is equal for kernels that compile to the same code. ``data_dependent``: the addresses that it touches
    depend on the contents of its inputs; ``needs_data``: and the schemas don't prove that zeros are safe contents.
    """

    name: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    writes: tuple[str, ...]
    kind: str
    flops: int
    bytes_read: int
    bytes_written: int
    module: str
    source: str
    fingerprint: str
    effect: bool = False
    data_dependent: bool = False
    needs_data: bool = False

    def to_text(self) -> str:
        writes = f" writes {' '.join(self.writes)}" if self.writes else ""
        effect = " effect" if self.effect else ""
        return f"{self.name}: {self.kind} ({' '.join(self.inputs)}) -> ({' '.join(self.outputs)}){writes}{effect}"


@dataclass(frozen=True)
class KernelGraph:
    """A lowered graph: kernels in an order that respects every dependence, the values between them, and the boundary.

    ``inputs`` are the placeholders in order. ``outputs`` are the FX nodes returned (None for a returned constant);
    ``output_values`` the values they are computed from, which must reach the home lane. ``mutated`` maps each input that is
    overwritten to the value that it must hold at exit. ``output_storages`` names, for each output, the storage it shares:
    two outputs, or an output and an input, with one name alias each other. ``kept``: the overwritten inputs whose storage belongs
    to the lane of the kernel that writes them: they are neither copied there nor brought home (``keeping.py``).
    """

    kernels: tuple[Kernel, ...]
    values: Mapping[str, Value]
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    output_values: tuple[str, ...]
    mutated: Mapping[str, str]
    output_storages: tuple[str | None, ...]
    nodes: int
    free_nodes: int
    module: Any = field(default=None, compare=False, repr=False)
    kept: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Kernel:
        return self._by_name[name]

    @property
    def _by_name(self) -> dict[str, Kernel]:
        cached: dict[str, Kernel] | None = self.__dict__.get("_kernels_by_name")
        if cached is None:
            cached = {k.name: k for k in self.kernels}
            self.__dict__["_kernels_by_name"] = cached
        return cached

    def producer(self, value: str) -> str | None:
        """Name of the kernel that makes ``value``; None for graph inputs and constants."""
        cached: dict[str, str] | None = self.__dict__.get("_producers")
        if cached is None:
            cached = {v: k.name for k in self.kernels for v in k.outputs}
            self.__dict__["_producers"] = cached
        return cached.get(value)

    def readers(self, value: str) -> tuple[str, ...]:
        """Names of the kernels that read ``value``, in order."""
        cached: dict[str, list[str]] | None = self.__dict__.get("_readers")
        if cached is None:
            cached = {}
            for k in self.kernels:
                for v in k.inputs:
                    cached.setdefault(v, []).append(k.name)
            self.__dict__["_readers"] = cached
        return tuple(cached.get(value, ()))

    def resident(self, value: str) -> bool:
        """Whether ``value`` is kept by lanes between calls (weights, constants, mutable state)."""
        return self.values[value].origin in RESIDENT

    def keeper(self, value: str) -> str | None:
        """Name of the kernel whose lane keeps the storage of ``value``; None where no lane keeps it from call to call."""
        cached: dict[str, str] | None = self.__dict__.get("_keepers")
        if cached is None:
            cached = {v: k.name for k in self.kernels for v in k.writes if v in self.kept}
            self.__dict__["_keepers"] = cached
        return cached.get(self.values[value].storage)

    def to_text(self) -> str:
        covered = sum(len(k.nodes) for k in self.kernels)
        lines = [f"graph {len(self.kernels)} kernels, {covered} nodes in kernels, {self.free_nodes} free, {self.nodes} in all"]
        for name in self.inputs:
            value = self.values[name]
            lines.append(f"in {value.to_text()} {value.origin}")
        lines += [k.to_text() for k in self.kernels]
        lines += [f"mutate {n} = {final}{' kept' if n in self.kept else ''}" for n, final in self.mutated.items()]
        lines.append("out " + " ".join("-" if o is None else o for o in self.outputs))
        return "\n".join(lines)

    def to_json(self) -> str:
        data = {
            "kernels": [asdict(k) for k in self.kernels],
            "values": {name: asdict(v) for name, v in self.values.items()},
            **{n: getattr(self, n) for n in ("inputs", "outputs", "output_values", "output_storages", "nodes", "free_nodes")},
            "mutated": dict(self.mutated),
            "kept": self.kept,
        }
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> KernelGraph:
        """Reads what ``to_json`` wrote. The FX graph is not part of it: such a graph can be planned but not run."""
        data = json.loads(text)
        kernels = tuple(Kernel(**_tuples(k)) for k in data["kernels"])
        values = {name: Value(**_tuples(v)) for name, v in data["values"].items()}
        tuples = {n: tuple(data[n]) for n in ("inputs", "outputs", "output_values", "output_storages")}
        tuples["kept"] = tuple(data.get("kept", ()))
        return cls(kernels, values, mutated=data["mutated"], nodes=data["nodes"], free_nodes=data["free_nodes"], **tuples)


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


@dataclass(frozen=True)
class Dependence:
    """One reason why a kernel must come after another. ``bytes`` is what crosses if they are on different devices.

    ``boxes`` are those bytes of ``value`` where it is known that they are few boxes, apart from each other; () is all of it.
    ``evidence``: ``schema``; ``extent``, the views through which the graph reads the value; ``footprint``, what was recorded
    or interpreted of the kernel's code; ``probe``, what was seen to change.
    """

    kind: DependenceKind
    value: str
    bytes: int
    evidence: str
    boxes: tuple[Box, ...] = ()

    def to_text(self) -> str:
        return f"{self.kind} {part_text(self.value, self.boxes)} {self.bytes} B ({self.evidence})"


@dataclass(frozen=True)
class Timing:
    """The time of one kernel on one device in µs, its spread (interquartile range, µs), and how it was had."""

    us: float
    spread: float = 0.0
    source: str = "measured"


@dataclass(frozen=True)
class Profile:
    """Time of each kernel on each device: ``times[kernel][device]``. A missing device means the kernel cannot run there.

    ``calibration`` is, for each device, the time of the whole graph over the sum of its kernels' times alone; it is contained
    in ``times`` already, and so is ``contention``: the time of the whole graph on a slice while the other slices of its GPU run
    it too, over its time alone. ``cut_us`` is the price of a cut: µs that a device loses each time a segment ends for a
    transfer.
    """

    times: Mapping[str, Mapping[str, Timing]]
    calibration: Mapping[str, float] = field(default_factory=dict)
    cut_us: Mapping[str, float] = field(default_factory=dict)
    contention: Mapping[str, float] = field(default_factory=dict)

    def us(self, kernel: str, device: str) -> float:
        """Microseconds of ``kernel`` on ``device``; infinite where it cannot run."""
        try:
            row = self.times[kernel]
        except KeyError:
            raise ProfileError(f"the profile has no kernel {kernel!r}; profile this graph again") from None
        return row[device].us if device in row else float("inf")

    def check(self, kernels: Iterable[str], devices: Iterable[str]) -> None:
        """Raises :class:`ProfileError` for a missing row, and for times that are NaN, negative or infinite."""
        devices = list(devices)
        for kernel in kernels:
            self.us(kernel, "")  # Raises for a missing row.
            for device in devices:
                timing = self.times[kernel].get(device)
                if timing is not None and not (0 <= timing.us < float("inf") and 0 <= timing.spread < float("inf")):
                    raise ProfileError(
                        f"kernel {kernel!r} on {device!r} takes {timing.us} ± {timing.spread} µs, which is not a time"
                    )
            if not any(d in self.times[kernel] for d in devices):
                raise ProfileError(f"kernel {kernel!r} has no time on any of {', '.join(devices)}")
        for device, us in self.cut_us.items():
            if not 0 <= us < float("inf"):
                raise ProfileError(f"the price of a cut on {device!r} is {us} µs, which is not a time")

    @classmethod
    def of(cls, times: Mapping[str, Mapping[str, float]], source: str = "file") -> Profile:
        """A profile from plain numbers in µs."""
        return cls({k: {d: Timing(float(us), source=source) for d, us in row.items()} for k, row in times.items()})

    def to_json(self) -> str:
        times = {k: {d: asdict(t) for d, t in row.items()} for k, row in self.times.items()}
        return json.dumps(
            {
                "times": times,
                "calibration": dict(self.calibration),
                "cut_us": dict(self.cut_us),
                "contention": dict(self.contention),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Profile:
        data = json.loads(text)
        times = {k: {d: Timing(**t) for d, t in row.items()} for k, row in data["times"].items()}
        return cls(times, data["calibration"], data["cut_us"], data.get("contention", {}))


@dataclass(frozen=True)
class Load:
    """What one device does in one request: µs of compute, µs of transfers in and out, bytes sent, bytes of memory needed."""

    compute_us: float
    transfer_us: float
    sent_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class Plan:
    """Kernel → device, and what the planner knows about it.

    ``bottleneck_us`` is the busiest device's time per request (throughput), ``makespan_us`` one request's time from start to
    end (latency). ``bound_us`` is proven: no placement does better on the plan's own objective. ``gap`` is
    (value − bound) / value. ``certified_us`` is a bound, perhaps lower, that does not rest on the solver's word.
    ``baselines`` maps simpler plans to their value on the same objective. ``home`` is the device that holds the caller's
    tensors: inputs start there, outputs and written state end there. ``times`` are the kernels' µs on each device that can
    run them.
    """

    placement: Mapping[str, str]
    devices: tuple[str, ...]
    home: str
    objective: Objective
    planner: str
    bottleneck_us: float
    makespan_us: float
    bound_us: float
    status: str
    seconds: float
    loads: Mapping[str, Load]
    cut_values: int
    cut_bytes: int
    overlap: bool
    baselines: Mapping[str, float] = field(default_factory=dict)
    certified_us: float = 0.0
    times: Mapping[str, Mapping[str, float]] = field(default_factory=dict, repr=False)

    @property
    def value_us(self) -> float:
        """The plan's value on its own objective, in µs."""
        return self.bottleneck_us if self.objective == "throughput" else self.makespan_us

    @property
    def gap(self) -> float:
        return 0.0 if self.value_us <= 0 else max(0.0, (self.value_us - self.bound_us) / self.value_us)

    @property
    def device_map(self) -> dict[str, list[str]]:
        """Device → names of the kernels on it, in order."""
        result: dict[str, list[str]] = {d: [] for d in self.devices}
        for kernel, device in self.placement.items():
            result[device].append(kernel)
        return result

    def explain(self, kernel: str, device: str) -> str:
        """Why ``kernel`` is not on ``device``: CHOSEN CHEAPER, TARGET CHEAPER, INFEASIBLE or TIE, with the µs of both.

        TARGET CHEAPER is no mistake: alone the kernel would be faster there, but that device is the busier one, or its values
        would have to move.
        """
        if kernel not in self.placement:
            raise PlanError(f"no kernel {kernel!r} in this plan")
        if device not in self.devices:
            raise PlanError(f"no device {device!r} in this plan; it has {', '.join(self.devices)}")
        if kernel not in self.times:
            raise PlanError("this plan was saved without the times of its kernels")
        chosen = self.placement[kernel]
        here, there = self.times[kernel][chosen], self.times[kernel].get(device)
        if there is None:
            return f"{kernel} on {chosen} ({here:.1f} µs): INFEASIBLE on {device}"
        near = abs(here - there) <= 0.01 * max(here, there)
        word = "TIE" if near else "CHOSEN CHEAPER" if here < there else "TARGET CHEAPER"
        return f"{kernel} on {chosen} ({here:.1f} µs), {device} {there:.1f} µs: {word}"

    def diff(self, other: Plan) -> dict[str, tuple[str | None, str | None]]:
        """Kernels placed differently: kernel → (device here, device there), None where a plan lacks the kernel."""
        names = dict.fromkeys([*self.placement, *other.placement])
        pairs = {k: (self.placement.get(k), other.placement.get(k)) for k in names}
        return {k: pair for k, pair in pairs.items() if pair[0] != pair[1]}

    def to_text(self) -> str:
        lines = [
            f"plan for {self.objective} by {self.planner}: bottleneck {self.bottleneck_us:.1f} µs, "
            f"makespan {self.makespan_us:.1f} µs",
            f"solver {self.status} in {self.seconds:.2f} s: proven bound {self.bound_us:.1f} µs, gap {100 * self.gap:.2f} %"
            + (f" (certified without the solver's word: {self.certified_us:.1f} µs)" if self.certified_us else ""),
        ]
        for device, kernels in self.device_map.items():
            load = self.loads[device]
            mark = " (home)" if device == self.home else ""
            lines.append(
                f"{device}{mark}: {len(kernels)} kernels, compute {load.compute_us:.1f} µs, transfers {load.transfer_us:.1f} µs, "
                f"sends {format_bytes(load.sent_bytes)}, memory {format_bytes(load.memory_bytes)}"
            )
        lines.append(f"{self.cut_values} values cross, {format_bytes(self.cut_bytes)}")
        return "\n".join(lines)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "gap": self.gap})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        try:
            data = json.loads(text)
            data.pop("gap", None)
            data["devices"] = tuple(data["devices"])
            data["placement"] = dict(data["placement"].items())
            data["loads"] = {d: Load(**load) for d, load in data["loads"].items()}
            return cls(**data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"not a saved plan: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        with open(path, encoding="utf-8") as file:
            try:
                text = file.read()
            except UnicodeDecodeError as error:
                raise PlanError(f"not a saved plan: {error}") from error
        return cls.from_json(text)


@dataclass(frozen=True)
class Run:
    """Runs a segment: its kernels, in order, compiled together."""

    segment: str
    kernels: tuple[str, ...]

    def to_text(self) -> str:
        return f"run {self.segment}: {' '.join(self.kernels)}"


@dataclass(frozen=True)
class Send:
    """Offers ``value``, or some boxes of its bytes, to lane ``to``."""

    value: str
    to: int
    boxes: tuple[Box, ...] = ()

    def bytes(self, graph: KernelGraph) -> int:
        """What crosses."""
        return sum(b.nbytes for b in self.boxes) or graph.values[self.value].bytes

    def to_text(self) -> str:
        return f"send {part_text(self.value, self.boxes)} -> {self.to}"


@dataclass(frozen=True)
class Recv:
    """Copies ``value`` from lane ``source`` into storage that this lane owns (or into the storage of the state it updates).

    With ``boxes`` it has room for all of the value, and only those bytes hold anything.
    """

    value: str
    source: int
    boxes: tuple[Box, ...] = ()

    def to_text(self) -> str:
        return f"recv {part_text(self.value, self.boxes)} <- {self.source}"


@dataclass(frozen=True)
class Signal:
    """Tells lane ``to`` that ``kernel`` is done; carries no data."""

    kernel: str
    to: int

    def to_text(self) -> str:
        return f"signal {self.kernel} -> {self.to}"


@dataclass(frozen=True)
class Wait:
    """Waits for lane ``source`` to signal that ``kernel`` is done."""

    kernel: str
    source: int

    def to_text(self) -> str:
        return f"wait {self.kernel} <- {self.source}"


@dataclass(frozen=True)
class Hold:
    """Weights, constants and state of which this lane has its own replicas, brought up to date before the lane starts."""

    values: tuple[str, ...]

    def to_text(self) -> str:
        return f"hold {' '.join(self.values)}"


@dataclass(frozen=True)
class Free:
    """Gives back the storage of ``values``."""

    values: tuple[str, ...]

    def to_text(self) -> str:
        return f"free {' '.join(self.values)}"


@dataclass(frozen=True)
class Out:
    """Hands ``values`` to the caller, who computes the graph's outputs from them."""

    values: tuple[str, ...]

    def to_text(self) -> str:
        return f"out {' '.join(self.values)}".rstrip()


Instruction = Run | Send | Recv | Signal | Wait | Hold | Free | Out

_BOX = r"[0-9]+(\+[0-9]+x[0-9]+)*\+[0-9]+"
_LANE = re.compile(r"lane ([0-9]+) (\S+)")
_PAIR: dict[str, tuple[str, type[Send] | type[Recv] | type[Signal] | type[Wait]]] = {
    "send": ("->", Send),
    "recv": ("<-", Recv),
    "signal": ("->", Signal),
    "wait": ("<-", Wait),
}
_LISTS: dict[str, type[Hold] | type[Free] | type[Out]] = {"hold": Hold, "free": Free, "out": Out}


@dataclass(frozen=True)
class Lane:
    """One device's instructions, executed in order."""

    index: int
    device: str
    instructions: tuple[Instruction, ...]

    def to_text(self) -> str:
        return "\n".join([f"lane {self.index} {self.device}", *(f"  {i.to_text()}" for i in self.instructions)])


@dataclass(frozen=True)
class Program:
    """One instruction list a lane. Lane 0 is home: it holds the caller's tensors and executes ``out``."""

    lanes: tuple[Lane, ...]

    def __iter__(self) -> Iterator[tuple[int, int, Instruction]]:
        """Yields (lane, position, instruction)."""
        for lane in self.lanes:
            for position, instruction in enumerate(lane.instructions):
                yield lane.index, position, instruction

    def without(self, lane: int, position: int) -> Program:
        """The program with one instruction deleted; for tests that no instruction is idle."""
        lanes = tuple(
            Lane(x.index, x.device, x.instructions[:position] + x.instructions[position + 1 :]) if x.index == lane else x
            for x in self.lanes
        )
        return Program(lanes)

    def to_text(self) -> str:
        return "\n".join(lane.to_text() for lane in self.lanes) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Program:
        """Reads what ``to_text`` wrote; blank lines and ``#`` comments are skipped.

        Raises:
            ProgramError: names the line that cannot be read.
        """
        lanes: list[tuple[int, str, list[Instruction]]] = []
        for number, raw in enumerate(text.splitlines(), 1):
            line = raw.strip()
            if not line or line.startswith("#"):
                continue
            header = _LANE.fullmatch(line)
            if header:
                lanes.append((int(header[1]), header[2], []))
                continue
            if not lanes:
                raise ProgramError(f"line {number}: an instruction before the first 'lane N DEVICE': {line!r}")
            lanes[-1][2].append(_instruction(line, number))
        if [index for index, _, _ in lanes] != list(range(len(lanes))):
            raise ProgramError("lanes must be numbered 0, 1, 2, … in order")
        return cls(tuple(Lane(index, device, tuple(instructions)) for index, device, instructions in lanes))

    def to_json(self) -> str:
        return json.dumps({"program": self.to_text()})

    @classmethod
    def from_json(cls, text: str) -> Program:
        return cls.from_text(json.loads(text)["program"])


def sent_bytes(graph: KernelGraph, program: Program) -> dict[tuple[str, int], int]:
    """(value, receiving lane) → bytes that cross."""
    return {(i.value, i.to): i.bytes(graph) for _, _, i in program if isinstance(i, Send)}


@dataclass(frozen=True)
class SegmentValues:
    """What a segment takes from its lane and what it leaves there. Values used inside alone appear in neither."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    writes: tuple[str, ...]


def segment_values(graph: KernelGraph, instructions: Sequence[Instruction]) -> dict[int, SegmentValues]:
    """For each ``run`` of a lane, by its position: the values read from the lane, and those made that the lane uses later.

    ``outputs`` leave out new versions of overwritten inputs (``writes``), which are made in place.
    """
    inputs: dict[int, dict[str, None]] = {}
    made: dict[int, list[str]] = {}
    used: set[str] = set()
    for at, instruction in enumerate(instructions):
        if isinstance(instruction, Run):
            inside = made[at] = [v for k in instruction.kernels for v in graph[k].outputs]
            inputs[at] = dict.fromkeys(v for k in instruction.kernels for v in graph[k].inputs if v not in inside)
            used.update(inputs[at])
        elif isinstance(instruction, Send):
            used.add(instruction.value)
        elif isinstance(instruction, Out):
            used.update(instruction.values)
    result = {}
    for at, values in made.items():
        run = instructions[at]
        assert isinstance(run, Run)
        outputs = tuple(v for v in values if v in used and graph.values[v].storage == v)
        writes = tuple(w for k in run.kernels for w in graph[k].writes)
        result[at] = SegmentValues(tuple(inputs[at]), outputs, writes)
    return result


def _instruction(line: str, number: int) -> Instruction:
    word, _, rest = line.partition(" ")
    fields = rest.split()
    if word == "run" and fields and fields[0].endswith(":") and len(fields) > 1:
        return Run(fields[0][:-1], tuple(fields[1:]))
    if word in _PAIR:
        arrow, make = _PAIR[word]
        if len(fields) == 3 and fields[1] == arrow and re.fullmatch("[0-9]+", fields[2]):
            if make in (Send, Recv) and re.fullmatch(rf"[^\[\]]+(\[{_BOX}(,{_BOX})*\])?", fields[0]):
                value, boxes = _part(fields[0])
                return make(value, int(fields[2]), boxes)
            if make not in (Send, Recv):
                return make(fields[0], int(fields[2]))
    if word in _LISTS and (fields or word == "out"):
        return _LISTS[word](tuple(fields))
    raise ProgramError(f"line {number}: not an instruction: {line!r}")


def part_text(value: str, boxes: Sequence[Box]) -> str:
    """``qkv[64+16x4096+128,…]``: of the value's bytes 16 runs of 128, 4096 apart, from 64 on. The name alone is all of it."""
    if not boxes:
        return value
    return f"{value}[{','.join(_box_text(b) for b in boxes)}]"


def _box_text(box: Box) -> str:
    steps = [f"{n}x{s}" for n, s in zip(box.shape[:-1], box.strides[:-1], strict=True)]
    return "+".join([str(box.start), *steps, str(box.shape[-1])])


def _part(text: str) -> tuple[str, tuple[Box, ...]]:
    """What :func:`part_text` wrote."""
    value, bracket, rest = text.partition("[")
    if not bracket:
        return value, ()
    boxes = []
    for part in rest.removesuffix("]").split(","):
        start, *steps, run = part.split("+")
        pairs = [step.split("x") for step in steps]
        shape, strides = [int(n) for n, _ in pairs], [int(s) for _, s in pairs]
        boxes.append(Box(int(start), (*shape, int(run)), (*strides, 1)))
    return value, tuple(boxes)


def format_bytes(count: float) -> str:
    """1536 → '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(count, 1) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
