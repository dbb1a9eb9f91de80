"""Proves that a program computes its graph; run on every program built.

The program is executed symbolically with rendezvous sends: a send completes together with its receive, a signal together
with its wait. Lanes share nothing but these, so one interleaving stands for all. Each lane's memory maps a storage to the
value that it holds; a value is *current* on a lane while its storage is resident and holds that very value, not an older or
newer version. Vector clocks give the order of runs in every possible execution, also of executors whose sends do not wait for
their receives: order passes from sender to receiver alone. Proven:

- each kernel runs once, on the device that the plan gives it;
- each dependence of the DDG is ordered;
- each use finds its value resident and current, and of a value that came in part the bytes that the kernel reads;
- nothing is freed in use, views included (frees are by storage);
- outputs and overwritten inputs hold the right values on the home lane at exit, state that another lane keeps on that lane;
- whatever a lane allocated is freed or handed out;
- no deadlock, no send without a receive, no instruction for a value that does not exist.
"""

from __future__ import annotations

import networkx as nx

from ..ptx_tools.footprints import Intervals
from .errors import ProgramError
from .ir import Free, Hold, Instruction, KernelGraph, Lane, Out, Plan, Program, Recv, Run, Send, Signal, Wait, segment_values
from .parts import parts, reads


def verify(program: Program, ddg: nx.DiGraph, plan: Plan) -> None:
    """Checks ``program`` against its graph and plan.

    Raises:
        ProgramError: names the lane, the instruction and what is wrong with it.
    """
    graph: KernelGraph = ddg.graph["kernels"]
    _check_shape(program, graph, plan)
    machine = _Machine(program, ddg, plan)
    machine.run()
    for before, after, deps in ddg.edges(data="deps"):
        if not machine.ordered(before, after):
            reason = ", ".join(d.to_text() for d in deps)
            raise ProgramError(f"{after} can start before {before} is done, but depends on it: {reason}")


def _check_shape(program: Program, graph: KernelGraph, plan: Plan) -> None:
    if tuple(lane.device for lane in program.lanes) != plan.devices:
        raise ProgramError(
            f"the program's lanes are {[x.device for x in program.lanes]}, the plan's devices {list(plan.devices)}"
        )
    runs: dict[str, int] = {}
    segments: set[str] = set()
    known = set(graph.values)
    kernels = {k.name for k in graph.kernels}
    for index, _, instruction in program:
        where = f"lane {index}, '{instruction.to_text()}'"
        if isinstance(instruction, Run):
            if instruction.segment in segments:
                raise ProgramError(f"{where}: segment {instruction.segment} runs twice")
            segments.add(instruction.segment)
            for kernel in instruction.kernels:
                if kernel not in plan.placement or kernel not in kernels:
                    raise ProgramError(f"{where}: no kernel {kernel!r} in the plan and its graph")
                if kernel in runs:
                    raise ProgramError(f"{where}: kernel {kernel} runs twice")
                runs[kernel] = index
                if plan.devices[index] != plan.placement[kernel]:
                    raise ProgramError(f"{where}: kernel {kernel} belongs on {plan.placement[kernel]}")
        elif isinstance(instruction, (Send, Recv, Signal, Wait)):
            other = instruction.to if isinstance(instruction, (Send, Signal)) else instruction.source
            if other == index or not 0 <= other < len(program.lanes):
                raise ProgramError(f"{where}: no other lane {other}")
            if isinstance(instruction, (Send, Recv)) and instruction.value not in known:
                raise ProgramError(f"{where}: no value {instruction.value!r}")
        elif isinstance(instruction, (Hold, Free, Out)):
            for value in instruction.values:
                if value not in known:
                    raise ProgramError(f"{where}: no value {value!r}")
    for missing in [k.name for k in graph.kernels if k.name not in runs]:
        raise ProgramError(f"kernel {missing} never runs")


class _Machine:
    """Symbolic execution; :meth:`run` raises at the first thing that is wrong."""

    def __init__(self, program: Program, ddg: nx.DiGraph, plan: Plan) -> None:
        self.program = program
        self.ddg = ddg
        graph: KernelGraph = ddg.graph["kernels"]
        self.graph = graph
        self.home = plan.devices.index(plan.home)
        self.kept = {v: plan.devices.index(plan.placement[graph.keeper(v) or ""]) for v in graph.kept}
        count = len(program.lanes)
        # memory[lane][storage] = the value that it holds. Host integers are known to every lane.
        self.memory: list[dict[str, str]] = [{} for _ in range(count)]
        self.owned: list[set[str]] = [set() for _ in range(count)]
        # Of values that came in part, the bytes that came.
        self.came: list[dict[str, Intervals]] = [{} for _ in range(count)]
        self.position = [0] * count
        self.clock = [[0] * count for _ in range(count)]
        self.started: dict[str, tuple[int, list[int]]] = {}
        self.finished: dict[str, tuple[int, int]] = {}
        self.out: tuple[str, ...] | None = None
        self.io = [segment_values(graph, lane.instructions) for lane in program.lanes]
        for value in graph.values.values():
            if graph.producer(value.name) is None:
                keeper = graph.keeper(value.name)
                owner = self.home if keeper is None else plan.devices.index(plan.placement[keeper])
                for lane in range(count):
                    if lane == owner or value.device == "host":
                        self.memory[lane][value.storage] = value.name

    def ordered(self, before: str, after: str) -> bool:
        """Whether ``before`` is done whenever ``after`` starts, in every execution."""
        lane, tick = self.finished[before]
        after_lane, clock = self.started[after]
        if lane == after_lane and tick == clock[lane]:
            # The same segment: its kernels run in the order in which it lists them.
            return self._place(before) < self._place(after)
        return clock[lane] >= tick

    def _place(self, kernel: str) -> int:
        for _, _, instruction in self.program:
            if isinstance(instruction, Run) and kernel in instruction.kernels:
                return instruction.kernels.index(kernel)
        raise AssertionError(kernel)

    def run(self) -> None:
        lanes = self.program.lanes
        progress = True
        while progress:
            progress = False
            for lane in lanes:
                while self.position[lane.index] < len(lane.instructions) and self._step(lane):
                    progress = True
        stuck = [x for x in lanes if self.position[x.index] < len(x.instructions)]
        if stuck:
            waiting = "; ".join(f"lane {x.index} at '{x.instructions[self.position[x.index]].to_text()}'" for x in stuck)
            raise ProgramError(f"deadlock: {waiting}")
        self._exit()

    def _step(self, lane: Lane) -> bool:
        instruction = lane.instructions[self.position[lane.index]]
        if isinstance(instruction, (Send, Recv, Signal, Wait)):
            return self._meet(lane, instruction)
        self._tick(lane.index)
        if isinstance(instruction, Run):
            self._run(lane.index, instruction)
        elif isinstance(instruction, Hold):
            for value in instruction.values:
                other = lane.index == self.home or value in self.kept or self.graph.producer(value) is not None
                if other or not self.graph.resident(value):
                    raise self._error(lane.index, instruction, f"{value} is not something that this lane can keep a replica of")
                if value in self.memory[lane.index]:
                    raise self._error(lane.index, instruction, f"{value} is already here")
                self.memory[lane.index][self.graph.values[value].storage] = value
        elif isinstance(instruction, Free):
            for value in instruction.values:
                if value not in self.owned[lane.index]:
                    raise self._error(lane.index, instruction, f"{value} is not this lane's to free, or was freed before")
                if lane.index == self.home and value in (self.out or ()):
                    raise self._error(lane.index, instruction, f"{value} was handed out")
                self.owned[lane.index].remove(value)
                self.came[lane.index].pop(value, None)
                del self.memory[lane.index][value]
        elif isinstance(instruction, Out):
            if lane.index != self.home or self.out is not None:
                raise self._error(lane.index, instruction, f"only lane {self.home} hands out, once")
            for value in instruction.values:
                self._current(lane.index, value, instruction)
            self.out = instruction.values
        self.position[lane.index] += 1
        return True

    def _run(self, lane: int, instruction: Run) -> None:
        made: set[str] = set()
        for kernel in instruction.kernels:
            for value in self.graph[kernel].inputs:
                if value not in made:
                    self._current(lane, value, instruction, kernel)
            for value in self.graph[kernel].writes:
                self._current(lane, value, instruction)
            for value in self.graph[kernel].outputs:
                storage = self.graph.values[value].storage
                if storage != value:
                    self.memory[lane][storage] = value
                else:
                    made.add(value)
            self.started[kernel] = (lane, list(self.clock[lane]))
            self.finished[kernel] = (lane, self.clock[lane][lane])
        io = self.io[lane][self.position[lane]]
        for value in io.outputs:
            if value in self.memory[lane]:
                raise self._error(lane, instruction, f"{value} is already here")
            self.memory[lane][value] = value
            self.owned[lane].add(value)

    def _meet(self, lane: Lane, instruction: Send | Recv | Signal | Wait) -> bool:
        """Lets a send and its receive happen together, if the other lane stands at it."""
        other_index = instruction.to if isinstance(instruction, (Send, Signal)) else instruction.source
        other = self.program.lanes[other_index]
        if self.position[other_index] >= len(other.instructions):
            raise self._error(lane.index, instruction, f"lane {other_index} ends without answering")
        answer = other.instructions[self.position[other_index]]
        wanted: Instruction
        if isinstance(instruction, Send):
            wanted = Recv(instruction.value, lane.index, instruction.boxes)
        elif isinstance(instruction, Recv):
            wanted = Send(instruction.value, lane.index, instruction.boxes)
        elif isinstance(instruction, Signal):
            wanted = Wait(instruction.kernel, lane.index)
        else:
            wanted = Signal(instruction.kernel, lane.index)
        if answer != wanted:
            return False
        source, target = (lane.index, other_index) if isinstance(instruction, (Send, Signal)) else (other_index, lane.index)
        if isinstance(instruction, (Send, Recv)):
            self._transfer(instruction, source, target)
        elif instruction.kernel not in self.finished or self.finished[instruction.kernel][0] != source:
            raise self._error(lane.index, instruction, f"{instruction.kernel} has not run on lane {source}")
        self._tick(source)
        self._tick(target)
        # Order flows from sender to receiver alone, so that it also holds for executors whose sends do not wait.
        self.clock[target] = [max(a, b) for a, b in zip(self.clock[source], self.clock[target], strict=True)]
        self.position[source] += 1
        self.position[target] += 1
        return True

    def _transfer(self, instruction: Send | Recv, source: int, target: int) -> None:
        value = instruction.value
        storage = self.graph.values[value].storage
        self._current(source, value, instruction)
        if storage == value:
            if value in self.memory[target]:
                raise self._error(target, instruction, f"{value} is already on lane {target}")
            self.owned[target].add(value)
            if instruction.boxes:
                self.came[target][value] = Intervals.of(i for b in instruction.boxes for i in b.intervals())
        elif instruction.boxes:
            sent, (part,) = Intervals.of(i for b in instruction.boxes for i in b.intervals()), parts(self.ddg, value)
            changed = Intervals.of(i for b in part.boxes for i in b.intervals())
            if not part.boxes or not changed.issubset(sent) or self.memory[target].get(storage) != storage:
                raise self._error(target, instruction, f"this part of {value} does not make it of what lane {target} has")
        elif storage not in self.memory[target]:
            raise self._error(target, instruction, f"lane {target} does not hold {storage}, which {value} updates")
        self.memory[target][storage] = value

    def _current(self, lane: int, value: str, instruction: Instruction, kernel: str | None = None) -> None:
        storage = self.graph.values[value].storage
        held = self.memory[lane].get(storage)
        if held is None:
            raise self._error(lane, instruction, f"{value} is not on lane {lane}")
        if held != value:
            raise self._error(lane, instruction, f"{value} was overwritten by {held} on lane {lane}")
        if value in self.came[lane]:
            needs = reads(self.ddg, kernel, value) if kernel is not None else ()
            if not needs:
                raise self._error(lane, instruction, f"all of {value} is needed, and lane {lane} has a part of it")
            if not Intervals.of(i for b in needs for i in b.intervals()).issubset(self.came[lane][value]):
                raise self._error(lane, instruction, f"{kernel} reads more of {value} than came to lane {lane}")

    def _exit(self) -> None:
        if self.out is None:
            raise ProgramError("the program hands nothing out")
        for value in self.graph.output_values:
            if value not in self.out:
                raise ProgramError(f"output {value} is not handed out")
        for name, final in self.graph.mutated.items():
            lane = self.kept.get(name, self.home)
            if self.memory[lane].get(name) != final:
                raise ProgramError(f"at exit the caller's {name} holds {self.memory[lane].get(name)} on lane {lane}, not {final}")
            if final not in self.out and name not in self.kept:
                raise ProgramError(f"the overwritten input {final} is not handed out")
        for lane, owned in enumerate(self.owned):
            left = owned - set(self.out if lane == self.home else ())
            if left:
                raise ProgramError(f"lane {lane} never frees {', '.join(sorted(left))}")

    def _tick(self, lane: int) -> None:
        self.clock[lane][lane] += 1

    def _error(self, lane: int, instruction: Instruction, what: str) -> ProgramError:
        return ProgramError(f"lane {lane}, '{instruction.to_text()}': {what}")
