"""Programs on CUDA lanes beside Inductor: ``python -m benchmarks.gpu.cuda_lanes [--json FILE] [SECTION …]``.

A Llama of 1B-class shapes (four layers, bf16, random weights) and two slices of one GPU:

- ``crossings``: what a crossing costs for each transport and three sizes, issued from the host and inside one captured graph;
- ``decode``, ``prefill``: time of a call under Inductor, under ``reduce-overhead``, on one lane and on two slices, with and
  without CUDA graphs; how far logits are from eager's and from one lane's, and on how many positions the best token is the same;
- ``placements``: fifty random placements from one lowering, both policies;
- ``diamond``: 1,000 replays of two branches that sleep, with churned allocations, bit for bit;
- ``contention``: what kernels take while the other slice is busy, over their time alone;
- ``emulated``: a modelled A100 and L40S, paced on the slices: one request's time over the plan's prediction;
- ``models``: the models of the test suite at realistic sizes against eager, one process each (``models.py``).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import MODELS, SLICES, make
from tessera_compile.compiler import executors, report


def llama() -> torch.nn.Module:
    return make("llama", torch.device("cuda:0")).model


def timed(run: Callable[[], Any], repeats: int = 30, warm: int = 5) -> float:
    """Median µs of a call, host time included, synchronised at both ends."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e6)
    return sorted(times)[repeats // 2]


def in_turn(runs: dict[str, Callable[[], Any]], rounds: int = 7) -> dict[str, float]:
    """The same for several, round by round, so that a machine that slows down slows all of them: medians over the rounds."""
    seen: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seen[name].append(timed(run, repeats=9, warm=3))
    return {name: sorted(times)[rounds // 2] for name, times in seen.items()}


def model_times(length: int) -> dict[str, Any]:
    model = llama()
    ids = torch.randint(0, 32000, (1, length), device="cuda")
    ways: dict[str, dict[str, Any]] = {
        "inductor": {"backend": "inductor"},
        "reduce-overhead": {"backend": "inductor", "mode": "reduce-overhead"},
        "one lane": {"backend": "tessera", "options": {"cluster": "cuda:0"}},
        "one lane, graphs": {"backend": "tessera", "options": {"cluster": "cuda:0", "cuda_graphs": True}},
        "two slices": {"backend": "tessera", "options": {"cluster": SLICES, "planner": "layers", "profile": "model"}},
        "two slices, segments": {
            "backend": "tessera",
            "options": {"cluster": SLICES, "planner": "layers", "profile": "model", "cuda_graphs": "segments"},
        },
        "two slices, graphs": {
            "backend": "tessera", "options": {"cluster": SLICES, "planner": "layers", "profile": "model", "cuda_graphs": True},
        },
    }  # fmt: skip
    rows: dict[str, Any] = {}
    with torch.no_grad():
        want = model(ids, use_cache=False).logits.float()
        alone = want
        eager = timed(lambda: model(ids, use_cache=False))
        print(f"\n{length} tokens: eager {eager:.0f} µs")
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = 64
        made: dict[str, Any] = {}
        for name, how in ways.items():
            started = time.perf_counter()
            compiled = torch.compile(model, **how)
            got = compiled(ids, use_cache=False).logits.float()
            first = time.perf_counter() - started
            made[name] = compiled
            for _ in range(3):
                compiled(ids, use_cache=False)
            same = float((got.argmax(-1) == want.argmax(-1)).float().mean())
            row: dict[str, Any] = {
                "first_call_s": first,
                "token_match": same,
                "largest_difference": float((got - want).abs().max()),
            }
            if name == "one lane":
                alone = got
            elif name.startswith("two"):
                row["token_match_one_lane"] = float((got.argmax(-1) == alone.argmax(-1)).float().mean())
                row["largest_difference_one_lane"] = float((got - alone).abs().max())
            if "cluster" in str(how):
                found = [e for e in executors(compiled) if e is not None]
                row["replays"] = sum(getattr(e, "replays", 0) for e in found)
                row["reasons"] = [r for e in found for r in getattr(e, "reasons", {}).values()]
                row["crossing_values"] = sum(g.plan.cut_values for g in report(compiled).graphs)
            rows[name] = row
        for name, us in in_turn({n: (lambda c=c: c(ids, use_cache=False)) for n, c in made.items()}).items():  # type: ignore[misc]
            row = rows[name]
            row["us"] = us
            print(
                f"  {name:20} {us:8.0f} µs  first call {row['first_call_s']:5.1f} s  "
                f"tokens equal {100 * row['token_match']:.1f} %, largest logit difference {row['largest_difference']:.4f} "
                f"{row.get('reasons') or ''}"
            )
    base = {
        "one lane": "inductor",
        "one lane, graphs": "reduce-overhead",
        "two slices": "inductor",
        "two slices, graphs": "reduce-overhead",
    }
    for ours, theirs in base.items():
        rows[ours]["ratio"] = rows[ours]["us"] / rows[theirs]["us"]
        print(f"  {ours} / {theirs}: {rows[ours]['ratio']:.3f}")
    return {"eager_us": eager, **rows}


TRANSPORTS = ("peer", "host", "gpu", "nccl")


def crossings() -> dict[str, Any]:
    """A chain of twenty elementwise kernels, every one on the other slice than the last, against the chain on one slice."""
    rows: dict[str, Any] = {}
    print("\ntransport     bytes  graphs  µs a crossing")
    for nbytes in (4096, 1 << 20, 1 << 26):
        x = torch.randn(nbytes // 4, device="cuda")

        def chain(x: torch.Tensor) -> torch.Tensor:
            for _ in range(10):
                x = torch.cumsum(x.view(-1, 64), 1).view(-1) * 0.5
            return x

        for graphs in (False, True):
            base = 0.0
            for transport in ("together", *TRANSPORTS):
                if transport == "nccl" and importlib.util.find_spec("nccl") is None:
                    continue
                torch._dynamo.reset()
                options = {
                    "cluster": SLICES, "planner": "single" if transport == "together" else "alternate", "profile": "model",
                    "codegen": "eager", "cuda_graphs": graphs, "transport": "auto" if transport == "together" else transport,
                }  # fmt: skip
                compiled = torch.compile(chain, backend="tessera", options=options)
                with torch.no_grad():
                    us = timed(lambda c=compiled, x=x: c(x))  # type: ignore[misc]
                if transport == "together":
                    base = us
                    continue
                count = max(1, sum(g.plan.cut_values for g in report(compiled).graphs))
                each = (us - base) / count
                how = "graph" if graphs else "host"
                rows[f"{transport} {nbytes} {how}"] = {"us_a_crossing": each, "crossings": count, "us": us, "together_us": base}
                print(
                    f"{transport:8} {nbytes:10}  {graphs!s:6}  {each:8.2f}   ({count} crossings: {us:.0f} against {base:.0f} µs)"
                )
    return rows


def placements() -> dict[str, Any]:
    from tessera_compile import make_cluster
    from tessera_compile.passes import depend, partition, schedule, verify
    from tessera_compile.passes.placements import place
    from tessera_compile.runtime.codegen import Codegen
    from tessera_compile.runtime.cuda_lanes import CudaLaneExecutor
    from tessera_compile.runtime.roofline import model_profile
    from tests.capture import Capture

    model, ids = llama(), torch.randint(0, 32000, (1, 64), device="cuda")
    cluster = make_cluster(SLICES)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits.float()
    captured = Capture(model, {"input_ids": ids, "use_cache": False})
    worst, match, ran, crossing = 0.0, 1.0, 0, 0
    codegen = Codegen("eager")
    for seed in range(50):
        for number, kernels in enumerate(captured.graphs):
            ddg, times = depend(kernels), model_profile(kernels, cluster.devices)
            objective = ("throughput", "latency")[seed % 2]
            placement = place(f"random:{seed}", ddg, times, cluster)
            plan = partition(ddg, times, cluster, objective=objective, placement=placement, planner="random", time_limit=0)
            program = schedule(ddg, plan)
            verify(program, ddg, plan)
            captured.run[number] = CudaLaneExecutor(kernels, program, codegen, poison=True)
            crossing += plan.cut_values
        got = captured().logits.float()
        worst = max(worst, float((got - want).abs().max()))
        match = min(match, float((got.argmax(-1) == want.argmax(-1)).float().mean()))
        ran += 1
    print(
        f"\n{ran} random placements, {crossing} crossing values: largest logit difference {worst:.4f}, "
        f"least token match {match:.3f}"
    )
    return {"placements": ran, "crossing_values": crossing, "largest_difference": worst, "least_token_match": match}


def diamond(replays: int = 1000) -> dict[str, Any]:
    left, right = torch.randn(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")

    def f(x: torch.Tensor) -> torch.Tensor:
        a = nap(x)
        for _ in range(3):
            a = torch.sin(a) @ left
        return a + nap(x @ right)

    torch._dynamo.reset()
    options = {"cluster": SLICES, "planner": "random:4", "profile": "model", "codegen": "eager", "cuda_graphs": True}
    run = torch.compile(f, backend="tessera", options=options)
    x, wrong = torch.randn(64, 256, device="cuda"), 0
    with torch.no_grad():
        first = run(x).clone()
        for i in range(replays + 2):
            junk = [torch.full((1 + (i * 7 + j * 13) % 4096,), float("nan"), device="cuda") for j in range(8)]
            wrong += not torch.equal(run(x), first)
            del junk
    (executor,) = executors(run)
    print(f"\ndiamond: {executor.replays} replays, {wrong} of them differ")
    return {"replays": executor.replays, "differ": wrong}


@torch.library.custom_op("tessera_benchmarks::nap", mutates_args=())
def nap(x: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(20_000 + int(x.shape[0]) * 100)
    return x.clone()


@nap.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def contention() -> dict[str, Any]:
    """Products (arithmetic) and sums (memory) on one slice while the other runs products or sums, over their time alone."""
    from tessera_compile.runtime.cuda_streams import lane_streams

    lanes = lane_streams(SLICES.split(","))
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    big = torch.randn(1 << 28, device="cuda", dtype=torch.bfloat16)
    works = {"products": lambda: a @ a, "sums": lambda: big + big, "small sums": lambda: a + a}
    graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
    for name, work in works.items():
        for at, lane in enumerate(lanes):
            lane.compute.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(lane.compute):
                work()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=lane.compute, capture_error_mode="relaxed"):
                for _ in range(10):
                    work()
            graphs[name, at] = graph

    def run(jobs: dict[int, str], counts: dict[int, int]) -> dict[int, float]:
        torch.cuda.synchronize()
        events = {}
        for at, name in jobs.items():
            with torch.cuda.stream(lanes[at].compute):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                for _ in range(counts[at]):
                    graphs[name, at].replay()
                end.record()
            events[at] = begin, end
        torch.cuda.synchronize()
        return {at: b.elapsed_time(e) / counts[at] for at, (b, e) in events.items()}

    rows: dict[str, Any] = {}
    print()
    for mine in works:
        for other in works:
            alone = {at: run({at: name}, {at: 5})[at] for at, name in ((0, mine), (1, other))}
            counts = {at: max(3, round(40 / alone[at])) for at in (0, 1)}
            both = run({0: mine, 1: other}, counts)
            rows[f"{mine} beside {other}"] = both[0] / alone[0]
            print(f"{mine:10} beside {other:10}: {both[0] / alone[0]:.3f} of their time alone")
    torch._dynamo.reset()
    model, ids = llama(), torch.randint(0, 32000, (1, 512), device="cuda")
    compiled = torch.compile(model, backend="tessera", options={"cluster": SLICES, "codegen": "eager", "planner": "single"})
    with torch.no_grad():
        compiled(ids, use_cache=False)
    rows["llama, in its profile"] = dict(report(compiled).graphs[0].profile.contention)
    print("llama, in its profile:", rows["llama, in its profile"])
    return rows


def emulated() -> dict[str, Any]:
    rows: dict[str, Any] = {}
    print()
    pace = 16.0  # at 8 some steps of 8 tokens are late
    for length in (8, 512):
        model, ids = llama(), torch.randint(0, 32000, (1, length), device="cuda")
        for policy in ("latency", "throughput"):
            torch._dynamo.reset()
            options = {
                "cluster": "a100-80gb,l40s@200Gbps", "emulate_on": SLICES, "pace": pace, "policy": policy, "cuda_graphs": True,
            }  # fmt: skip
            compiled = torch.compile(model, backend="tessera", options=options)
            with torch.no_grad():
                for _ in range(4):
                    compiled(ids, use_cache=False)
                before = report(compiled).graphs[0].emulation
                for _ in range(30):
                    compiled(ids, use_cache=False)
            (graph,) = report(compiled).graphs
            after = graph.emulation
            count = after.requests - before.requests
            us = (after.mean_us * after.requests - before.mean_us * before.requests) / count
            row = {
                "us": us, "predicted_us": graph.plan.makespan_us, "ratio": us / graph.plan.makespan_us, "pace": pace,
                "crossing_values": graph.plan.cut_values, "overran": after.overran - before.overran,
                "steps": after.steps - before.steps,
            }  # fmt: skip
            rows[f"{length} tokens, {policy}"] = row
            print(
                f"emulated, {length} tokens, {policy}: {us:.0f} µs, predicted {row['predicted_us']:.0f}, "
                f"ratio {row['ratio']:.3f}; {row['crossing_values']} crossings, {row['overran']} of {row['steps']} overran"
            )
    return rows


def models(most_seconds: float = 190.0, tiny: bool = False) -> dict[str, Any]:
    """All at once: nothing is timed but compilation, and most of that runs on one core."""
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // 4))}

    def row_of(name: str) -> tuple[str, list[str]]:
        """The line that it prints, and of a model that fails why."""
        command = [sys.executable, "-m", "benchmarks.gpu.models", name, *(["--tiny"] if tiny else [])]
        try:
            done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=most_seconds)
        except subprocess.TimeoutExpired:
            return "", [f"not done after {most_seconds:.0f} s"]
        if done.returncode:
            return "", done.stderr.strip().splitlines()[-40:]
        return done.stdout.strip().splitlines()[-1], []

    with ThreadPoolExecutor(len(MODELS)) as pool:
        said = dict(zip(MODELS, pool.map(row_of, MODELS), strict=True))
    rows: dict[str, Any] = {}
    print("\nlargest difference        uncompiled, random placement            compiled by Inductor")
    print("model         from eager  from lowered (on slices)    alone  throughput, replayed   latency, replayed  largest output")
    for name, (line, failed) in said.items():
        if failed:
            rows[name] = {"failed": failed}
            print(f"{name:12} failed: {' | '.join(failed[-6:])}")
            continue
        row = rows[name] = json.loads(line)
        plain = [row["uncompiled"][policy] for policy in ("throughput", "latency")]
        lowered = max(p["from_lowered"] for p in plain)
        slices = max((p["from_lowered_on_slices"] for p in plain if "from_lowered_on_slices" in p), default=lowered)
        both = [f"{row[p]['from_eager']:9.2g}, {row[p]['from_eager_replayed']:8.2g}" for p in ("throughput", "latency")]
        eager = max(p["from_eager"] for p in plain)
        alone = row["inductor"]["from_eager"]
        reasons = "; ".join(sorted({*row["throughput"]["uncaptured"], *row["latency"]["uncaptured"]}))
        print(
            f"{name:12}{eager:12.2g}{lowered:14.2g} ({slices:8.2g}){alone:9.2g}  {both[0]}  {both[1]}  "
            f"{row['largest_output']:14.3g}  {reasons}"
        )
    return rows


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "crossings": crossings,
    "decode": lambda: model_times(8),
    "prefill": lambda: model_times(512),
    "placements": placements,
    "diamond": diamond,
    "contention": contention,
    "emulated": emulated,
    "models": models,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.gpu.cuda_lanes",
        "torch": torch.__version__,
    }
    for name in arguments.sections or SECTIONS:
        result[name] = SECTIONS[name]()
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
