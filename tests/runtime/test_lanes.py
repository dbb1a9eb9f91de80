"""CPU lanes: honest copies, no idle instruction, failures that stay where they are, and threads that leave no trace."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tessera_compile.catalogue import make_cluster
from tessera_compile.compiler import executors
from tessera_compile.passes import depend, partition, schedule, verify
from tessera_compile.passes.errors import ProgramError
from tessera_compile.passes.ir import Hold, KernelGraph, Plan, Program, Recv, Run, Send, Signal, Wait
from tessera_compile.passes.placements import place
from tessera_compile.runtime import cpu_lanes
from tessera_compile.runtime.codegen import Codegen
from tessera_compile.runtime.cpu_lanes import Aborted, CpuLaneExecutor, lane_threads
from tessera_compile.runtime.lane_pool import LanePool, shared_pool
from tessera_compile.runtime.roofline import model_profile
from tests.graphs import lowered

# Programs


def planned(graph: KernelGraph, planner: str | Callable[[int], int], lanes: int = 2) -> tuple[Any, Plan, Program]:
    """``graph`` placed by a planner's name, or by a function from a kernel's position to its lane, scheduled and verified."""
    cluster = make_cluster(f"{lanes}xcpu")
    ddg = depend(graph)
    times = model_profile(graph, cluster.devices)
    if callable(planner):
        placement = {k.name: cluster.names[planner(i)] for i, k in enumerate(graph.kernels)}
    else:
        placement = place(planner, ddg, times, cluster)
    plan = partition(ddg, times, cluster, placement=placement, planner="test")
    assert plan.placement == placement
    program = schedule(ddg, plan)
    verify(program, ddg, plan)
    return ddg, plan, program


def executor(
    graph: KernelGraph, planner: str | Callable[[int], int] = "alternate", lanes: int = 2, **more: Any
) -> CpuLaneExecutor:
    return CpuLaneExecutor(graph, planned(graph, planner, lanes)[2], Codegen("eager"), threads=1, **more)


def chain(x, a, b):
    y = x @ a
    z = torch.relu(y) @ b
    return z @ a + y, z.t()


def branches(x, a, b):
    left, right = x @ a, x @ b
    return (left @ right).softmax(1) @ a, (right @ left).sum(0), left[:2]


def updates(x, a, b):
    y = x @ b
    a.add_(y)
    z = a @ b
    b.mul_(2)
    return z @ x, b @ y, y


def reads_then_overwrites(x, a, b):
    before = a @ x
    later = before @ a
    a.copy_(b @ x)
    return before, later @ x, x @ b


def draws(x, a, b):
    p = torch.randperm(3)
    y = x @ a
    q = torch.poisson(torch.full((3, 3), 2.0))
    return y * p @ q, torch.randperm(4), q @ b


def inputs(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 3, generator=generator) for _ in range(3)]


def functional(function: Callable[..., Any], static: Sequence[int] = (1, 2)) -> KernelGraph:
    """``function`` as AOTAutograd would hand it over: in-place updates of its inputs become copies at the end."""
    return lowered(torch.func.functionalize(function, remove="mutations"), inputs(), static)


PROGRAMS = {
    "chain": (chain, "alternate", 2),
    "branches": (branches, "alternate", 3),
    "updates": (updates, lambda i: 1 - i % 2, 2),
    "reads_then_overwrites": (reads_then_overwrites, lambda i: (i + 1) % 3, 3),
    "draws": (draws, lambda i: (i // 2) % 2, 2),
}


def built(name: str) -> tuple[KernelGraph, Any, Plan, Program]:
    function, planner, lanes = PROGRAMS[name]
    graph = functional(function)
    return (graph, *planned(graph, planner, lanes))


def flat(results: Any) -> list[torch.Tensor]:
    return [r for r in results if r is not None]


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_instruction_is_idle(name):
    """Without any one send, receive, hold, wait or signal, and without any send and its receive, the program is refused."""
    _, ddg, plan, program = built(name)
    deleted = 0
    for lane, at, instruction in program:
        if not isinstance(instruction, (Send, Recv, Hold, Wait, Signal)):
            continue
        deleted += 1
        with pytest.raises(ProgramError):
            verify(program.without(lane, at), ddg, plan)
        # With three lanes, order may also pass through the third: a signal together with its wait is then one too many.
        if isinstance(instruction, Send) or (isinstance(instruction, Signal) and len(program.lanes) == 2):
            kind = Recv if isinstance(instruction, Send) else Wait
            what = instruction.value if isinstance(instruction, Send) else instruction.kernel
            other = program.lanes[instruction.to].instructions.index(kind(what, lane))
            with pytest.raises(ProgramError):
                verify(program.without(lane, at).without(instruction.to, other), ddg, plan)
    assert deleted >= 4
    verify(program, ddg, plan)


def test_the_programs_have_every_kind_of_instruction():
    kinds = {type(instruction) for name in PROGRAMS for _, _, instruction in built(name)[3]}
    assert {Send, Recv, Hold, Wait, Signal, Run} <= kinds


@pytest.mark.parametrize("name", PROGRAMS)
def test_poisoned_run_equals_eager(name):
    """Freed storage is filled with NaN: whoever used it after, or shared it with a sender, would show."""
    function, planner, lanes = PROGRAMS[name]
    graph = functional(function)
    run = executor(graph, planner, lanes, poison=True)
    for seed in range(4):
        mine, theirs = inputs(seed), inputs(seed)
        torch.manual_seed(seed)
        got = run(list(mine))
        torch.manual_seed(seed)
        want = function(*theirs)
        torch.testing.assert_close(flat(got), list(want))
        torch.testing.assert_close(mine, theirs)
    assert run.runs == 4


def slowed(run: CpuLaneExecutor, lane: int) -> CpuLaneExecutor:
    """Makes every segment of ``lane`` start late, so that what its sender does meanwhile is over."""

    def late(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def wait(args: list[Any]) -> Any:
            time.sleep(0.05)
            return call(args)

        return wait

    for (at_lane, at), segment in run.segments.items():
        if at_lane == lane:
            compiled = replace(segment.compiled, call=late(segment.compiled.call))
            run.segments[at_lane, at] = replace(segment, compiled=compiled)
    return run


def test_a_receive_that_shared_storage_would_show(monkeypatch):
    graph = functional(chain)
    want = chain(*inputs())
    # The product of k0 on lane 0 is freed there once it was sent to lane 1, which begins late.
    run = slowed(executor(graph, lambda i: min(i, 1), poison=True), 1)
    torch.testing.assert_close(flat(run(inputs())), list(want))
    monkeypatch.setattr(cpu_lanes, "own_copy", lambda value: value)
    got = flat(run(inputs()))
    assert not torch.allclose(got[0], want[0])
    assert run.runs == 2


def test_a_receive_has_storage_of_its_own(monkeypatch):
    shared = []
    original = cpu_lanes.own_copy

    def own_copy(value: Any) -> Any:
        copy = original(value)
        if isinstance(value, torch.Tensor):
            shared.append(copy.untyped_storage().data_ptr() == value.untyped_storage().data_ptr())
            assert copy.stride() == value.stride()
        return copy

    monkeypatch.setattr(cpu_lanes, "own_copy", own_copy)
    for name in PROGRAMS:
        function, planner, lanes = PROGRAMS[name]
        executor(functional(function), planner, lanes)(inputs())
    assert len(shared) >= 5
    assert not any(shared)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced", "scalar", "empty"])
def test_a_receive_keeps_the_layout(layout):
    x = {
        "transposed": torch.randn(3, 4).t(),
        "expanded": torch.randn(1, 4).expand(3, 4),
        "sliced": torch.randn(6, 8)[::2, 1::3],
        "scalar": torch.tensor(2.0),
        "empty": torch.randn(0, 4),
    }[layout]
    seen = []
    graph = lowered(lambda x: x * 2 + 1, [x])
    run = executor(graph, lambda i: 1)
    ((key, segment),) = run.segments.items()
    call = segment.compiled.call

    def spy(args: list[Any]) -> Any:
        seen.append(args[0])
        return call(args)

    run.segments[key] = replace(segment, compiled=replace(segment.compiled, call=spy))
    torch.testing.assert_close(run([x]), [x * 2 + 1], check_stride=True)
    assert key[0] == 1
    assert (seen[0].shape, seen[0].stride()) == (x.shape, x.stride())
    assert x.numel() == 0 or seen[0].data_ptr() != x.data_ptr()
    assert run.runs == 1


def test_state_is_overwritten_after_it_was_read(monkeypatch):
    """Lane 1 copies the old state late; home must not overwrite it meanwhile."""

    def f(x, a, b):
        y = a @ b
        a.add_(x @ x)
        return y, x @ x

    bring = cpu_lanes.Replica.bring

    def late(self: Any, *args: Any, **kwargs: Any) -> int:
        time.sleep(0.05)
        return bring(self, *args, **kwargs)

    graph = functional(f, static=())
    assert "a_1" in graph.kernels[0].inputs
    assert not graph.kernels[0].writes
    run = executor(graph, lambda i: 0 if i else 1)
    monkeypatch.setattr(cpu_lanes.Replica, "bring", late)
    for _ in range(2):
        mine, theirs = inputs(), inputs()
        torch.testing.assert_close(run(list(mine)), list(f(*theirs)))
        torch.testing.assert_close(mine, theirs)
    assert run.runs == 2


# Failures


@torch.library.custom_op("tessera_lanes::picky", mutates_args=())
def picky(x: torch.Tensor) -> torch.Tensor:
    """The identity, where the first element is not negative."""
    if x.flatten()[0] < 0:
        raise ValueError("negative first element")
    return x.clone()


@picky.register_fake
def _(x):
    return torch.empty_like(x)


def with_picky(x, w):
    y = picky(x @ w)
    return y @ w, (x @ x) @ w, y


def good() -> list[torch.Tensor]:
    return [torch.eye(3), torch.ones(3, 3)]


def bad() -> list[torch.Tensor]:
    return [-torch.eye(3), torch.ones(3, 3)]


@pytest.mark.parametrize("lane", [0, 1, 2])
def test_an_error_names_its_segment_and_leaves_the_executor_usable(lane):
    graph = lowered(with_picky, good())
    names = [k.name for k in graph.kernels]
    (culprit,) = [n for n in names if "picky" in n]
    run = executor(graph, lambda i: lane if names[i] == culprit else i % 2, lanes=3)
    (segment,) = [s for s in run.segments.values() if culprit in s.kernels]
    for _ in range(3):
        with pytest.raises(ValueError, match="negative first element") as caught:
            run(bad())
        (note,) = caught.value.__notes__
        assert segment.name in note
        assert culprit in note
        assert f"lane {lane}" in note
        torch.testing.assert_close(run(good()), list(with_picky(*good())))
    assert run.runs == 3


def test_an_error_reaches_the_caller_of_a_compiled_model():
    compiled = torch.compile(
        with_picky, backend="tessera", options={"planner": "random:5", "codegen": "eager", "profile": "model", "cluster": "3xcpu"}
    )
    with torch.no_grad():
        torch.testing.assert_close(compiled(*good()), with_picky(*good()))
        with pytest.raises(ValueError, match="negative first element") as caught:
            compiled(*bad())
        assert any("in segment S" in note and "picky" in note for note in caught.value.__notes__)
        torch.testing.assert_close(compiled(*good()), with_picky(*good()))
    assert [e.runs for e in executors(compiled)] == [2]


def test_an_error_in_one_request_leaves_the_others_alone():
    graph = lowered(with_picky, good())
    run = executor(graph, "alternate", lanes=3)
    want = list(with_picky(*good()))
    found: list[Any] = []

    def call(i: int) -> None:
        for n in range(20):
            try:
                if (i + n) % 3 == 0:
                    with pytest.raises(ValueError, match="negative first element"):
                        run(bad())
                else:
                    torch.testing.assert_close(run(good()), want)
            except BaseException as error:
                found.append(error)

    in_threads(call, 4)
    assert found == []
    assert run.runs == sum((i + n) % 3 != 0 for i in range(4) for n in range(20))


def test_the_first_error_wins_over_those_that_it_causes():
    graph = lowered(with_picky, good())
    run = executor(graph, "alternate", lanes=3)
    for _ in range(20):
        with pytest.raises(Exception, match="negative") as caught:
            run(bad())
        assert not isinstance(caught.value, Aborted)
    assert run.runs == 0


def test_wrong_number_of_inputs_is_refused():
    run = executor(functional(chain))
    with pytest.raises(ValueError):
        run(inputs()[:2])
    torch.testing.assert_close(run(inputs()), list(chain(*inputs())))
    assert run.runs == 1


# Threads


def in_threads(call: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=call, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "a call hangs"


@pytest.mark.parametrize(("name", "lanes"), [("chain", 2), ("branches", 3), ("chain", 1)])
def test_many_threads_call_one_executor(name, lanes):
    function = PROGRAMS[name][0]
    run = executor(functional(function), "alternate", lanes)
    wrong: list[BaseException] = []

    def call(i: int) -> None:
        for n in range(25):
            # The weights are the same for all threads, the inputs are not.
            args = [inputs(100 * i + n)[0], *weights]
            try:
                torch.testing.assert_close(flat(run(list(args))), list(function(*args)))
            except BaseException as error:
                wrong.append(error)

    weights = inputs(7)[1:]
    in_threads(call, 8)
    assert wrong == []
    assert run.runs == 200


def test_runs_counts_completed_requests():
    run = executor(functional(chain))
    assert run.runs == 0
    for i in range(3):
        run(inputs())
        assert run.runs == i + 1


def fresh_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def own_thread_setting():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("users", [1, 2, 3])
def test_thread_settings_do_not_leak(own_thread_setting, users):
    torch.set_num_threads(users)
    assert fresh_thread(torch.get_num_threads) == users
    for lanes, threads in ((2, 5), (3, 4)):
        graph = functional(chain)
        run = CpuLaneExecutor(graph, planned(graph, "alternate", lanes)[2], Codegen("eager"), threads=threads)
        torch.testing.assert_close(run(inputs()), list(chain(*inputs())))
        assert torch.get_num_threads() == users
        assert fresh_thread(torch.get_num_threads) == users
        assert on_lanes(shared_pool(lanes, threads)) == [threads] * lanes
        # Also after an operator, at which torch initialises the setting of a thread.
        assert fresh_thread(lambda: (torch.randn(64, 64) @ torch.randn(64, 64)).shape and torch.get_num_threads()) == users
        assert run.runs == 1
    # The user's later change reaches the user's threads and no lane.
    torch.set_num_threads(users + 1)
    assert run.threads == 4
    run(inputs())
    assert on_lanes(shared_pool(3, 4)) == [4] * 3
    assert fresh_thread(torch.get_num_threads) == users + 1


def on_lanes(pool: LanePool) -> list[int]:
    found: dict[int, int] = {}
    done = threading.Barrier(pool.count + 1)

    def job(lane: int) -> Callable[[], None]:
        def run() -> None:
            torch.randn(64, 64) @ torch.randn(64, 64)
            found[lane] = torch.get_num_threads()
            done.wait()

        return run

    pool.submit([job(i) for i in range(pool.count)])
    done.wait()
    return [found[i] for i in range(pool.count)]


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_thread_settings_do_not_leak_from_compiled_models(own_thread_setting, codegen):
    torch.set_num_threads(4)
    x = torch.randn(4, 4)

    def f(x):
        return (x @ x).relu().sum(0) @ x

    compiled = torch.compile(f, backend="tessera", options={"planner": "alternate", "codegen": codegen, "profile": "measure"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), f(x))
    (run,) = executors(compiled)
    assert (run.runs, run.lanes, run.threads) == (1, 2, 2)
    assert torch.get_num_threads() == 4
    assert fresh_thread(torch.get_num_threads) == 4
    assert on_lanes(shared_pool(2, 2)) == [2, 2]


def test_lanes_share_the_callers_threads(own_thread_setting):
    for users, lanes, each in ((4, 2, 2), (1, 2, 1), (5, 3, 1), (2, 1, 2)):
        torch.set_num_threads(users)
        assert lane_threads(lanes) == each


def test_one_lane_runs_in_the_callers_thread():
    seen = []
    graph = functional(chain)
    run = executor(graph, lambda i: 0, lanes=1)
    ((key, segment),) = run.segments.items()
    call = segment.compiled.call

    def spy(args: list[Any]) -> Any:
        seen.append(threading.get_ident())
        return call(args)

    run.segments[key] = replace(segment, compiled=replace(segment.compiled, call=spy))
    run(inputs())
    assert seen == [threading.get_ident()]


def test_a_pool_serves_jobs_in_order_and_ends():
    pool = LanePool(2, 1)
    found: list[list[int]] = [[], []]
    done = threading.Event()
    for n in range(50):
        pool.submit([lambda n=n, lane=lane: found[lane].append(n) for lane in range(2)])
    pool.submit([lambda: None, done.set])
    assert done.wait(10)
    assert found[1] == list(range(50))
    pool.close()
    for worker in pool._workers:
        worker.join(10)
        assert not worker.is_alive()
    assert found[0] == list(range(50))


def test_lanes_work_after_a_fork():
    script = """
        import os
        import torch
        from tessera_compile.runtime.lane_pool import shared_pool
        import threading

        def products():
            found, done = {}, threading.Barrier(3)
            def job(lane):
                def run():
                    found[lane] = torch.full((8, 8), lane + 1.0) @ torch.eye(8)
                    done.wait(20)
                return run
            shared_pool(2, 1).submit([job(0), job(1)])
            done.wait(20)
            return [found[i].sum().item() for i in range(2)]

        torch.set_num_threads(1)
        assert products() == [64, 128]
        child = os.fork()
        for _ in range(3):
            assert products() == [64, 128]
        if child == 0:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        print("both ran")
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "both ran\n"
