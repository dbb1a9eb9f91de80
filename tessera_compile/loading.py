"""Models that are whole on no device: ``load`` gives each lane the weights that its kernels read, straight from a state dict.

``torch.compile`` refuses a graph whose weights are elsewhere than its inputs. So what is compiled is a copy of the model whose
weights are fake tensors on the home device: dynamo and AOTAutograd see an ordinary model there, and no memory is taken. At run
time a handle stands in each weight's place until a lane comes to use it (``runtime/weights.py``).
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .compiler import CollectingBackend, Entry, _compile, _report_of
from .options import Options
from .passes import torch_compat
from .passes.errors import LoadError, OptionsError, PlanError
from .passes.ir import Run, format_bytes
from .passes.problem import Problem, make_problem
from .pipeline import CompiledGraph
from .reports import Report
from .runtime.codegen import constants
from .runtime.weights import Weight, weight_of

StateDict = Mapping[str, torch.Tensor]


def load(model: torch.nn.Module, state_dict: StateDict | None = None, **options: Any) -> Loaded:
    """Places ``model`` on the devices of a cluster, each of which holds only the weights that its own kernels read.

        with torch.device("meta"):
            model = Llama(config).eval()
        loaded = tessera_compile.load(model, safetensors.torch.load_file(path), cluster="cuda:0,cuda:1")
        with torch.no_grad():
            logits = loaded(tokens)              # plans, places the weights, runs
        print(loaded.memory())

    Args:
        model: on the meta device, or wherever its weights are not in the way, such as the CPU. It is neither changed nor moved:
            a copy of it is compiled, which has its structure and whatever it holds besides parameters and buffers.
        state_dict: as for ``model.load_state_dict``, strictly, dtypes included; of tied weights one name is enough. Buffers that
            are not persistent are taken from the model, or from here under their full names. Each tensor is asked for
            once here, to be checked, and again when a lane comes to use it, once for each memory that will hold it: a mapping
            that reads from disk (memory-mapped, or lazy in its ``__getitem__``) is never whole in memory. It must stay readable
            and as it is while the model is in use. None: all values are the model's own.
        options: those of the backend, but for ``dryrun``.

    Returns:
        A callable with the model's signature. It takes tensors on the home device, which is the cluster's first; outputs,
        aliases and overwritten inputs are as in eager. Where gradients are needed it raises FallbackError.

    Raises:
        LoadError: names missing, unexpected and misshapen entries, and buffers whose values cannot be known.
        OptionsError, ClusterError: as the backend.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"load takes a torch.nn.Module, not {type(model).__name__}")
    return Loaded(model, state_dict, Options.make(options))


class Loaded:
    """A placed model; see :func:`load`. Calls from several threads are safe.

    Attributes:
        compiled: what ``torch.compile`` made of the copy of the model.
    """

    def __init__(self, model: torch.nn.Module, state_dict: StateDict | None, options: Options) -> None:
        if options.dryrun:
            raise OptionsError(
                "dryrun: load builds nothing before its first call; tessera_compile.explain plans and builds nothing"
            )
        self._name = type(model).__name__
        self._placement = _Placement(options)
        found = _tensors_of(model)
        stand_ins = torch_compat.stand_ins([f.tensor for f in found], self._placement.home_device)
        self._weights = [
            Weight(tuple(f.names), stand_in, partial(_itself, f.tensor), torch_compat.storage_key(f.tensor))
            for f, stand_in in zip(found, stand_ins, strict=True)
        ]
        self._persistent = {name for f in found if f.persistent for name in f.names}
        unknown = [f for f in found if f.tensor.is_meta]
        self._take(state_dict, unknown, strict=state_dict is not None)
        copied = copy.deepcopy(model, {id(f.tensor): stand_in for f, stand_in in zip(found, stand_ins, strict=True)})
        by_stand_in = {id(w.stand_in): w for w in self._weights}
        self._buffers = [
            (module._buffers, name, by_stand_in[id(buffer)])
            for module in copied.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._backend = _LoadingBackend(options, self._weights, self._placement)
        self._calls = 0
        self._idle = threading.Condition()
        self.compiled = torch.compile(copied, backend=self._backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._idle:
            self._calls += 1
        try:
            result = self.compiled(*args, **kwargs)
        except Exception as error:
            cause = torch_compat.cause_of(error)
            if cause is not error:
                raise cause from None
            if isinstance(error, AssertionError) and "FakeTensor" in str(error):
                raise LoadError(_OUTSIDE) from error
            raise
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()
        if torch_compat.fake_mode_of(pytree.tree_leaves(result)) is not None:
            result = pytree.tree_map(self._shown, result)
        for buffers, name, weight in self._buffers:
            # ``self.count += 1`` stores what it has written, which would be a tensor of another type to the next call's guards.
            if weight.state is not None and buffers.get(name) is weight.state:
                buffers[name] = weight.stand_in
        return result

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Other values for all parameters and persistent buffers, from the next call on. Waits for calls that are running.

        Raises:
            LoadError: as :func:`load`; nothing is changed then.
        """
        with self._idle:
            self._idle.wait_for(lambda: self._calls == 0)
            self._take(state_dict, (), strict=True)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The present values under the names of ``Module.state_dict``: buffers that graphs overwrite as they are now, at home,
        the others read from where they were loaded."""
        found: dict[str, torch.Tensor] = {}
        for weight in self._weights:
            names = [n for n in weight.names if n in self._persistent]
            if names:
                found.update(dict.fromkeys(names, weight.state if weight.state is not None else weight.read()))
        return found

    @property
    def graphs(self) -> list[Entry]:
        """What has been compiled so far, as the reports and the tests want it."""
        return self._backend.graphs

    def report(self) -> Report:
        """What has been compiled so far; see ``tessera_compile.report``.

        Raises:
            RuntimeError: nothing was compiled yet.
        """
        if not self._backend.graphs:
            raise RuntimeError("nothing was planned yet: call the model once, under torch.no_grad()")
        return _report_of(self._backend.graphs)

    def memory(self) -> dict[str, Held]:
        """What each memory holds now, beside what the plans say; by the name of a CPU lane or GPU."""
        return self._placement.held(self._weights)

    def _shown(self, value: Any) -> Any:
        """What the caller sees: where the model returns a weight itself, dynamo hands on its stand-in."""
        if torch_compat.fake_mode_of([value]) is None:
            return value
        weight = self._backend.weights.get(id(value))
        if weight is None:
            raise LoadError(_OUTSIDE)
        return weight.at_home(self._placement.home)

    def _take(self, state_dict: StateDict | None, unknown: Sequence[_Found], strict: bool) -> None:
        """Checks ``state_dict`` and makes it the source of the weights that it names; ``unknown`` have no other."""
        if type(state_dict) in (dict, OrderedDict):
            state_dict = dict(state_dict or {})  # What is done to the mapping later is not done to the model.
        given = state_dict if state_dict is not None else {}
        problems: dict[str, list[str]] = {}
        sources: list[tuple[Weight, str]] = []
        named: set[str] = set()
        for weight in self._weights:
            named.update(weight.names)
            names = [n for n in weight.names if n in given]
            for name in names:
                _compare(name, given[name], weight.stand_in, problems)
            if names:
                sources.append((weight, names[-1]))  # As load_state_dict, which copies one after the other.
            elif strict and self._persistent.intersection(weight.names):
                problems.setdefault("missing", []).append(" = ".join(weight.names))
            elif any(f.names[0] == weight.names[0] for f in unknown):
                problems.setdefault("unknown", []).append(" = ".join(weight.names))
        if extra := [str(key) for key in given if key not in named]:
            problems["unexpected"] = extra
        if problems:
            raise LoadError(_complaint(self._name, problems))
        for weight, name in sources:
            weight.replace(partial(given.__getitem__, name))


_OUTSIDE = (
    "weights were used outside of the compiled graphs, where a loaded model has none: in code that torch.compile skips or breaks "
    "off at (TORCH_LOGS=graph_breaks names it), or after it gave up recompiling (TORCH_LOGS=recompiles); move that code into the "
    "graph or out of the model"
)


@dataclass
class _Found:
    """A parameter or buffer of a model, under all of its names."""

    tensor: torch.Tensor
    names: list[str]
    persistent: bool


def _tensors_of(model: torch.nn.Module) -> list[_Found]:
    """The model's parameters and buffers, tied ones once.

    Raises:
        LoadError: for kinds of tensors that cannot be placed, and for tensors on meta that are neither parameter nor buffer.
    """
    found: dict[int, _Found] = {}
    bad: list[str] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        transient = module._non_persistent_buffers_set
        own = [*module._parameters.items(), *module._buffers.items()]
        for name, tensor in own:
            if tensor is None:
                continue
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
                bad.append(f"{dot}{name} is a {type(tensor).__name__} ({tensor.layout}), and load takes plain strided tensors")
                continue
            entry = found.setdefault(id(tensor), _Found(tensor, [], False))
            entry.names.append(dot + name)
            entry.persistent |= name in module._parameters or name not in transient
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta and id(value) not in found:
                where = f"{prefix}.{name}" if prefix else name
                bad.append(
                    f"{where} is a plain attribute on meta, which nothing can give a value: make it a buffer, or build it on "
                    "the CPU"
                )
    if bad:
        raise LoadError(f"{type(model).__name__} cannot be loaded:\n  " + "\n  ".join(bad))
    return list(found.values())


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _compare(name: str, value: Any, wanted: torch.Tensor, problems: dict[str, list[str]]) -> None:
    if not isinstance(value, torch.Tensor) or value.is_meta:
        what = "on meta" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        problems.setdefault("no tensor", []).append(f"{name} is {what}")
    elif value.shape != wanted.shape:
        problems.setdefault("shape", []).append(f"{name} is {list(value.shape)}, in the model {list(wanted.shape)}")
    elif value.dtype != wanted.dtype:
        problems.setdefault("dtype", []).append(f"{name} is {value.dtype}, in the model {wanted.dtype}")


_MENDS = {
    "missing": "missing",
    "unexpected": "unexpected",
    "no tensor": "not a tensor with values",
    "shape": "of another shape",
    "dtype": "of another dtype (convert the model, as model.bfloat16() does also on meta, or the state dict)",
    "unknown": "on meta without a value (give them in state_dict under these names, or build the modules that own them outside "
    'of torch.device("meta"))',
}


def _complaint(model: str, problems: Mapping[str, Sequence[str]]) -> str:
    lines = [f"the state dict does not fit {model}:"]
    for kind, mend in _MENDS.items():
        if found := problems.get(kind):
            more = f" and {len(found) - 8} more" if len(found) > 8 else ""
            lines.append(f"  {mend}: {', '.join(found[:8])}{more}")
    return "\n".join(lines)


class _LoadingBackend(CollectingBackend):
    """Compiles the graphs of one loaded model: its graphs are of these weights."""

    def __init__(self, options: Options, weights: Sequence[Weight], placement: _Placement) -> None:
        super().__init__(options)
        self.weights = {id(w.stand_in): w for w in weights}
        self._placement = placement

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = LoadedGraph(self.weights, self._placement)
        run = _compile(gm, graph.examples(example_inputs), self.options, self.graphs, loaded=graph)

        def call(*args: Any) -> Any:
            return run(*graph.given(args))

        return call


class LoadedGraph:
    """Which inputs of one graph are weights, and what is passed in their place.

    Inputs are told by their position, not by the weights that they were when the graph was compiled: dynamo runs one graph for
    all layers that share code, where it does not inline them.
    """

    def __init__(self, weights: Mapping[int, Weight], placement: _Placement) -> None:
        self._weights = weights
        self._placement = placement
        self._fakes: dict[int, tuple[int, Any]] = {}  # storage → (position, the fake tensor, which keeps the storage)
        self._inner: dict[int, int] = {}  # position among AOTAutograd's inputs → position among dynamo's
        self._state: set[int] = set()
        self._returned: set[int] = set()
        self._names: dict[str, int] = {}  # value → position among AOTAutograd's inputs

    def examples(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs that the graph is traced with."""
        made = []
        for position, value in enumerate(inputs):
            if id(value) in self._weights:
                value = torch_compat.in_current_mode(value)
                self._fakes[torch_compat.storage_key(value)] = (position, value)
            made.append(value)
        return made

    def weights_among(self, inputs: Sequence[Any]) -> list[int]:
        """Positions of weights among the inputs that AOTAutograd gives the graph."""
        for inner, value in enumerate(inputs):
            if isinstance(value, torch.Tensor) and (found := self._fakes.get(torch_compat.storage_key(value))):
                self._inner[inner] = found[0]
        return list(self._inner)

    def adopt(self, compiled: CompiledGraph) -> None:
        """Learns what the graph does with its weights, and prepares its calls."""
        kernels = compiled.kernels
        for inner, position in self._inner.items():
            name = kernels.inputs[inner]
            self._names[name] = inner
            if name in kernels.mutated:
                self._state.add(position)
            elif name in kernels.output_values or name in kernels.output_storages:
                self._returned.add(position)
        self._fakes.clear()
        compiled.prepare = self._prepare

    def given(self, args: Sequence[Any]) -> list[Any]:
        """What AOTAutograd is called with: handles, and real tensors where it bumps counters and makes views of inputs."""
        made: list[Any] = []
        for position, value in enumerate(args):
            weight = self._weights.get(id(value))
            if weight is None:
                if torch_compat.fake_mode_of([value]) is not None:
                    raise LoadError(_OUTSIDE)
                made.append(value)
            elif position in self._state:
                made.append(self._placement.state(weight, self._weights.values()))
            elif weight.state is not None or position in self._returned:
                made.append(weight.at_home(self._placement.home))
            else:
                made.append(weight.handle)
        return made

    def _prepare(self, compiled: CompiledGraph, args: list[Any]) -> None:
        """Gives the weights that lanes read at home as tensors; the others are fetched by those who hold them."""
        named = {name: args[inner] for name, inner in self._names.items()}
        for name in self._placement.read_at_home(compiled, named, list(self._weights.values())):
            weight = weight_of(named.get(name))
            if weight is not None:
                args[self._names[name]] = weight.on(self._placement.home)


@dataclass(frozen=True)
class Held:
    """Bytes in one memory: of a CPU lane, or of a GPU with all of its slices.

    Attributes:
        weights: parameters, buffers that no graph overwrites, and constants.
        state: buffers that a graph overwrites, and their replicas.
        planned: weights and state that the plans of all graphs together ask for.
        limit: what the cluster has there, activations included.
    """

    weights: int
    state: int
    planned: int
    limit: int

    def __str__(self) -> str:
        weights, state, planned, limit = map(format_bytes, (self.weights, self.state, self.planned, self.limit))
        return f"{weights} of weights and {state} of state, {planned} planned, of {limit}"


@dataclass
class _Use:
    """What one graph wants where, under its present program.

    Attributes:
        read_at_home: names of inputs that lanes read where the caller's tensors are.
        wanted: (memory, identity of a weight or other tensor) → bytes.
        activations: memory → bytes.
        seen: the weights that it was called with.
    """

    compiled: CompiledGraph
    executor: Any
    read_at_home: tuple[str, ...]
    wanted: dict[tuple[Hashable, int], int]
    activations: dict[Hashable, int]
    seen: set[tuple[int, ...]]


class _Placement:
    """The memories of a cluster, and what the graphs of one model want in each."""

    def __init__(self, options: Options) -> None:
        self._cluster = options.resolved_cluster()
        self._memory: dict[str, Hashable] = {}
        self.limits: dict[Hashable, int] = {}
        for device in self._cluster.devices:
            gpu = options.emulate_on or (device.name if device.kind == "cuda" else None)
            memory: Hashable = device.name if gpu is None else torch.device(gpu.split("/")[0].split("#")[0])
            self._memory[device.name] = memory
            self.limits[memory] = self.limits.get(memory, 0) + device.memory
        self.home = self._memory[self._cluster.devices[0].name]
        self.home_device = self.home if isinstance(self.home, torch.device) else torch.device("cpu")
        self._inflight = options.inflight
        self._uses: dict[int, _Use] = {}
        self._lock = threading.Lock()

    def state(self, weight: Weight, weights: Iterable[Weight]) -> torch.Tensor:
        """The tensor of a weight that a graph overwrites."""
        with self._lock:
            if weight.state is None:
                others = [w.names[0] for w in weights if w is not weight and w.origin == weight.origin]
                if others:
                    raise LoadError(
                        f"{weight.names[0]} is overwritten and shares memory with {', '.join(others)}, which a loaded model does "
                        "not keep up; make them one buffer"
                    )
            return weight.make_state(self.home)

    def read_at_home(self, compiled: CompiledGraph, args: Mapping[str, Any], weights: Sequence[Weight]) -> tuple[str, ...]:
        """Names of the inputs that lanes read at home. Plans the graph again where it wants more than there is room for.

        Args:
            args: the inputs that are weights or state, by name: handles or tensors.
            weights: all of the model.
        """
        with self._lock:
            use = self._uses.get(id(compiled))
            if use is None or use.executor is not compiled.executor:
                use = self._new_use(compiled)
            seen = tuple(map(_identity, args.values()))
            if seen not in use.seen:
                use = self._make_room(use, args)
                use.seen.add(seen)
                self._uses[id(compiled)] = use
                kept = {key for u in self._uses.values() for key in u.wanted}
                for weight in weights:
                    for memory in list(weight.placed):
                        if (memory, id(weight)) not in kept and not (weight.shown and memory == self.home):
                            weight.leave(memory)
            return use.read_at_home

    def _new_use(self, compiled: CompiledGraph) -> _Use:
        program, replicas = compiled.executor.program, _inner(compiled).replicas
        read = dict.fromkeys(compiled.kernels.output_values)
        for lane in program.lanes:
            elsewhere = replicas.get(lane.index, {})
            for instruction in lane.instructions:
                if isinstance(instruction, Run):
                    values = (v for k in instruction.kernels for v in compiled.kernels[k].inputs)
                    read.update(dict.fromkeys(v for v in values if v not in elsewhere))
        names = tuple(v for v in compiled.kernels.inputs if v in read and compiled.kernels.resident(v))
        return _Use(compiled, compiled.executor, names, {}, {}, set())

    def _make_room(self, use: _Use, args: Mapping[str, Any]) -> _Use:
        self._want(use, args)
        others = [u for u in self._uses.values() if u.compiled is not use.compiled]
        over = self._over([*others, use])
        if over and others:
            # Another graph has its weights elsewhere: this one goes where they are.
            self._follow(use, others, args)
            use = self._new_use(use.compiled)
            self._want(use, args)
            over = self._over([*others, use])
        if over:
            raise LoadError(
                "; ".join(f"{m} would hold {format_bytes(n)} of {format_bytes(self.limits[m])}" for m, n in over.items())
                + ": the graphs of this model, each of which fits alone, want unlike weights there; plan them together with "
                "tessera_compile.plan_together, or keep modules in one place with pins"
            )
        return use

    def _want(self, use: _Use, args: Mapping[str, Any]) -> None:
        """Adds what the graph's plan asks for, called with these weights."""
        problem, placement = self._problem(use.compiled)
        home = use.compiled.report.plan.home  # type: ignore[union-attr]  # planned before it is called
        for name, nbytes, readers, state in problem.residents:
            value = args.get(name)
            for device in {placement[problem.kernels[r]] for r in readers} | ({home} if state else set()):
                memory = self._memory[device]
                # Graphs share weights, and what lies at home; other replicas each has for itself.
                shared = weight_of(value) is not None or (value is not None and memory == self.home)
                use.wanted[memory, _identity(value) if shared else hash((use.compiled.number, name))] = nbytes
        use.activations = dict.fromkeys(
            (self._memory[d] for d in (home, *placement.values())), problem.activation_bytes * self._inflight
        )

    def _over(self, uses: Sequence[_Use]) -> dict[Hashable, int]:
        """Memories that would hold more than they have, and the bytes that they would hold."""
        needed = self._planned(uses)
        for memory in needed:
            needed[memory] += max(use.activations.get(memory, 0) for use in uses)
        return {m: n for m, n in needed.items() if n > self.limits[m]}

    def _planned(self, uses: Iterable[_Use]) -> dict[Hashable, int]:
        wanted = {key: nbytes for use in uses for key, nbytes in use.wanted.items()}
        return {m: sum(n for (memory, _), n in wanted.items() if memory == m) for m in self.limits}

    def _follow(self, use: _Use, others: Sequence[_Use], args: Mapping[str, Any]) -> None:
        compiled = use.compiled
        problem, placement = self._problem(compiled)
        had = {key for u in others for key in u.wanted}
        followed = dict(placement)
        for at, kernel in enumerate(problem.kernels):
            read = {name: nbytes for name, nbytes, readers, _ in problem.residents if at in readers and name in args}
            able = [g for g, us in zip(problem.devices, problem.times[at], strict=True) if us < float("inf")]
            near = {g: sum(n for name, n in read.items() if (self._memory[g], _identity(args[name])) in had) for g in able}
            if any(near.values()) and near.get(placement[kernel], 0) < max(near.values()):
                followed[kernel] = max(near, key=near.__getitem__)
        try:
            compiled.replan(followed, "loaded weights")
        except PlanError as error:
            raise LoadError(f"this graph does not fit beside the others where their weights are: {error}") from error

    def _problem(self, compiled: CompiledGraph) -> tuple[Problem, dict[str, str]]:
        report = compiled.report
        assert report is not None
        problem = make_problem(compiled.ddg, report.profile, self._cluster, inflight=self._inflight)
        return problem, dict(report.plan.placement)

    def held(self, weights: Sequence[Weight]) -> dict[str, Held]:
        """What lies in each memory now: every tensor once, however many graphs and lanes use it."""
        with self._lock:
            uses = list(self._uses.values())
        kept: dict[Hashable, dict[int, tuple[int, bool]]] = {memory: {} for memory in self.limits}

        def add(memory: Hashable, tensor: torch.Tensor, state: bool) -> None:
            storage = tensor.untyped_storage()
            kept[memory].setdefault(torch_compat.storage_key(tensor), (storage.nbytes(), state))

        for weight in weights:
            if weight.state is not None:
                add(self.home, weight.state, True)
            for memory, tensor in weight.placed.items():
                add(memory, tensor, False)
        for use in uses:
            kernels = use.compiled.kernels
            for lane, replicas in _inner(use.compiled).replicas.items():
                memory = self._memory[use.executor.program.lanes[lane].device]
                for value, replica in replicas.items():
                    if replica.tensor is not None:
                        add(memory, replica.tensor, kernels.values[value].origin == "state")
            fixed = constants(kernels)
            for lane in use.executor.program.lanes:
                if self._memory[lane.device] == self.home:
                    for name in {
                        v for i in lane.instructions if isinstance(i, Run) for k in i.kernels for v in kernels[k].inputs
                    }:
                        if name in fixed:
                            add(self.home, fixed[name], False)
        planned = self._planned(uses)
        result = {}
        for memory, found in kept.items():
            weights_held, state_held = (sum(n for n, state in found.values() if state == wanted) for wanted in (False, True))
            result[str(memory)] = Held(weights_held, state_held, planned[memory], self.limits[memory])
        return result


def _inner(compiled: CompiledGraph) -> Any:
    """The executor that interprets the program, inside of one that captures it."""
    return getattr(compiled.executor, "inner", compiled.executor)


def _identity(value: Any) -> int:
    """Of the weight that a handle stands for, or of a tensor."""
    weight = weight_of(value)
    return id(value) if weight is None else id(weight)
