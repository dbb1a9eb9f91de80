"""What a user can set, as one frozen, hashable value."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from .catalogue import make_cluster
from .passes.cluster import Cluster
from .passes.errors import ClusterError, OptionsError

_POLICIES = ("latency", "throughput", "auto")
_PLANNERS = ("milp", "single", "layers", "attention-ffn", "alternate", "random:SEED", "a saved plan's path ending in .json")
TRANSPORTS = ("auto", "peer", "host", "nccl", "gpu")
_OTHER_PLANNERS = {
    "prefill-decode": "plan the graphs of several phases with tessera_compile.plan_together, which chooses it where it is best",
    "replicas": "one plain call runs one plan; tessera_compile.Engine serves many requests, by replicas where they are best",
}
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class Options:
    """Options of the backend; all have defaults.

    Attributes:
        cluster: devices to plan for (``passes/cluster.py`` has the grammar), the path of a TOML file, or a :class:`Cluster`;
            None: two CPU lanes.
        policy: ``latency`` and ``auto`` run a plain call on the latency plan, ``throughput`` on the throughput plan.
        planner: ``milp``; ``single`` (the best one device); ``alternate`` and ``random:SEED``, for tests that any placement is
            correct; or the path of a saved plan or report (JSON).
        pins: kernel or module glob → device.
        max_memory: device, by name or number → bytes, as a number or text such as ``"20GiB"``.
        profile: ``measure`` or ``model``.
        codegen: ``inductor``, ``eager`` (the same segments uncompiled), ``null`` (compute nothing, return the right shapes).
        cuda_graphs: True: capture whole programs of CUDA lanes and replay them; ``"segments"``: one graph a segment, in as many
            slots of memory as ``inflight`` says. What cannot be captured runs as it is; the executor's ``reasons`` say why.
        transport: how values go from one CUDA lane to another: ``auto``; ``peer``; ``host`` (pinned memory); ``nccl``; ``gpu``
            (the sender's kernel stores them and raises a flag in the receiver's memory). ``runtime/transports.py`` has more.
        refine: dependences by the bytes that kernels touch. ``auto``: by the views of the graph, and by running once what
            schemas say least of: custom operators and users' kernels; ``always``: every kernel that can be run; ``off``: what
            the schemas say.
        time_limit, gap: when the solver may stop: seconds, relative gap.
        pace: on a cluster of data-sheet GPUs, let each run and transfer take its modelled time multiplied by this; 0: off.
            What comes of it is emulated, and says so.
        emulate_on: slices of one GPU, one for each device of the cluster, as ``cuda:0/64sm,cuda:0/56sm``: paced lanes run there
            and not on the CPU.
        inflight: requests whose activations the plan keeps room for.
        dryrun: plan and report, build nothing: calls run uncompiled on one lane. A path also writes the report there as JSON.
        strict: raise where there would be a fallback with a warning.
        seed: of the random planner, where its name gives none.
    """

    cluster: str | Cluster | None = None
    policy: str = "auto"
    planner: str = "milp"
    pins: tuple[tuple[str, str], ...] = ()
    max_memory: tuple[tuple[str, int], ...] = ()
    profile: str = "measure"
    codegen: str = "inductor"
    refine: str = "auto"
    transport: str = "auto"
    cuda_graphs: bool | str = False
    time_limit: float = 10.0
    gap: float = 1e-3
    pace: float = 0.0
    emulate_on: str | None = None
    inflight: int = 1
    dryrun: bool | str = False
    strict: bool = False
    seed: int = 0

    saved_plans: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for name in ("pins", "max_memory"):
            object.__setattr__(self, name, _pairs(name, getattr(self, name)))
        for name in ("cluster", "planner", "dryrun"):
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        # Files are read now: an edited file is another value, which dynamo must not take for the old one.
        if isinstance(self.cluster, str) and self.cluster.endswith(".toml"):
            object.__setattr__(self, "cluster", make_cluster(self.cluster))
        if isinstance(self.planner, str) and self.planner.endswith(".json") and not self.saved_plans:
            try:
                with open(self.planner, encoding="utf-8") as file:
                    object.__setattr__(self, "saved_plans", file.read())
            except (OSError, UnicodeDecodeError) as error:
                raise OptionsError(f"planner={self.planner!r}: cannot read the saved plan: {error}") from error
        if not isinstance(self.cluster, (str, Cluster, type(None))):
            raise OptionsError(f"cluster={self.cluster!r}; it takes a string, a path, a Cluster or None")
        names = make_cluster(self.cluster).names
        memory = []
        for device, limit in self.max_memory:
            name = names[int(device)] if device.isdecimal() and device not in names and int(device) < len(names) else device
            memory.append((name, parse_bytes(name, limit)))
        object.__setattr__(self, "max_memory", tuple(sorted(memory)))
        self._check()

    @classmethod
    def make(cls, options: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
        """Options from a mapping as ``torch.compile(options=…)`` hands it over.

        Raises:
            OptionsError: names the option, and the nearest name or the values that it takes.
            ClusterError: the cluster cannot be read.
        """
        if mode not in (None, "default", "reduce-overhead"):
            raise OptionsError(f"mode={mode!r}: this backend takes 'default' and 'reduce-overhead'; set its own options instead")
        known = {f.name for f in fields(cls) if f.name != "saved_plans"}
        for name in options or {}:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
                hint = f"did you mean {near[0]!r}?" if near else f"options are {', '.join(sorted(known))}"
                raise OptionsError(f"unknown option {name!r}; {hint}")
        made = cls(**(options or {}))
        if mode == "reduce-overhead" and any(d.kind == "cuda" for d in made.resolved_cluster().devices):
            return replace(made, cuda_graphs=True)
        return made

    def with_changes(self, **changes: Any) -> Options:
        """The same options but for ``changes``, validated."""
        return replace(self, **changes)

    def resolved_cluster(self) -> Cluster:
        """The cluster with ``max_memory`` applied."""
        cluster = make_cluster(self.cluster)
        try:
            return cluster.with_memory(dict(self.max_memory))
        except ClusterError as error:
            raise OptionsError(f"max_memory: {error}") from None

    def _check(self) -> None:
        def choice(name: str, allowed: tuple[str, ...]) -> None:
            if getattr(self, name) not in allowed:
                raise OptionsError(f"{name}={getattr(self, name)!r}; it takes {', '.join(map(repr, allowed))}")

        def number(name: str, kind: type | tuple[type, ...], good: Callable[[Any], bool], what: str) -> None:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind) or not good(value):
                raise OptionsError(f"{name}={value!r}; it takes {what}")

        choice("policy", _POLICIES)
        choice("refine", ("auto", "off", "always"))
        choice("profile", ("measure", "model"))
        choice("transport", TRANSPORTS)
        choice("codegen", ("inductor", "eager", "null"))
        planner = self.planner
        if planner in _OTHER_PLANNERS:
            raise OptionsError(f"planner={planner!r}: {_OTHER_PLANNERS[planner]}; an option takes {', '.join(_PLANNERS)}")
        if not (
            planner in ("milp", "single", "layers", "attention-ffn", "alternate", "random")
            or (isinstance(planner, str) and (re.fullmatch(r"random:\d+", planner) or planner.endswith(".json")))
        ):
            raise OptionsError(f"planner={planner!r}; it takes {', '.join(_PLANNERS)}")
        number("time_limit", (int, float), lambda v: v >= 0, "seconds, 0 or more")
        number("gap", (int, float), lambda v: 0 <= v < 1, "a number from 0 up to 1")
        number("pace", (int, float), lambda v: 0 <= v < float("inf"), "a factor, 0 for none")
        number("inflight", int, lambda v: v >= 1, "a whole number from 1")
        number("seed", int, lambda v: v >= 0, "a whole number from 0")
        if not isinstance(self.strict, bool):
            raise OptionsError(f"strict={self.strict!r}; it takes True or False")
        if self.dryrun and self.pace:
            raise OptionsError("dryrun and pace: a dry run executes nothing that could be paced; drop one of them")
        if not isinstance(self.dryrun, (bool, str)):
            raise OptionsError(f"dryrun={self.dryrun!r}; it takes True, False or a path")
        cluster = self.resolved_cluster()
        if not isinstance(self.cuda_graphs, bool) and self.cuda_graphs != "segments":
            raise OptionsError(f"cuda_graphs={self.cuda_graphs!r}; it takes True, False or 'segments'")
        on_gpu = self.emulate_on or any(d.kind == "cuda" for d in cluster.devices)
        for name in ("cuda_graphs", "transport"):
            if getattr(self, name) not in (False, "auto") and not on_gpu:
                raise OptionsError(
                    f"{name}={getattr(self, name)!r}: cluster {', '.join(cluster.names)} has no CUDA device, as cuda:0 is one"
                )
        names = set(cluster.names)
        real = [d.name for d in cluster.devices if d.kind != "modelled"]
        if self.pace and real:
            raise OptionsError(f"pace={self.pace!r}: {', '.join(real)} runs in its own time; name data-sheet GPUs only")
        if self.emulate_on is not None:
            self._check_emulation(cluster)
        for pattern, device in self.pins:
            if device not in names:
                raise OptionsError(f"pins: {pattern!r} → {device!r}, which is not in the cluster ({', '.join(sorted(names))})")

    def _check_emulation(self, cluster: Cluster) -> None:
        if not self.pace:
            raise OptionsError("emulate_on takes a pace: how many real µs a modelled µs lasts, for example pace=1.0")
        slices = str(self.emulate_on).split(",")
        if len(slices) != len(cluster.devices):
            raise OptionsError(
                f"emulate_on={self.emulate_on!r} names {len(slices)} slices; cluster {', '.join(cluster.names)} has "
                f"{len(cluster.devices)} devices, each of which needs one"
            )
        matches = [re.fullmatch(r"cuda:(\d+)/\d+sm", name) for name in slices]
        if not all(matches) or len({m[1] for m in matches if m}) > 1:
            raise OptionsError(f"emulate_on={self.emulate_on!r}; it takes slices of one GPU, as 'cuda:0/64sm,cuda:0/56sm'")


def parse_bytes(device: str, text: object) -> int:
    """``"20GiB"``, ``"1.5gb"`` or a number of bytes → bytes; ``device`` is named in the error."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b)", text.strip(), re.IGNORECASE) if isinstance(text, str) else None
    unit = None if match is None else next((u for u in _UNITS if u.lower() == match[2].lower()), None)
    if match is None or unit is None:
        raise OptionsError(
            f"max_memory for {device!r} is {text!r}; it takes a number of bytes or text such as '20GiB' or '1.5GB'"
        )
    return int(float(match[1]) * _UNITS[unit])


def _pairs(name: str, value: object) -> tuple[tuple[str, Any], ...]:
    if isinstance(value, Mapping):
        return tuple(sorted((str(k), v) for k, v in value.items()))
    if isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        return value
    raise OptionsError(f"{name}={value!r}; it takes a mapping")
