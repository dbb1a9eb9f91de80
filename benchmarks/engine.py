"""What the engine reaches of a plan's prediction: ``python -m benchmarks.engine [--json FILE] [PART …]``.

All on modelled GPUs (A100 80 GB and L40S), nothing computed: no hardware is claimed anything about. Parts:

- ``models``: a Llama and a Mamba by discrete-event simulation: throughput over the plan's prediction at 1 to 32 requests in
  flight, dynamic and static; the ablation; 200 to 25 Gbit/s; fairness at saturation.
- ``census``: the same for the measured kernels of gpt-oss-20b (``data/``), 129 decode steps to 2 prefill chunks.
- ``arrivals``: latency against the rate of arrivals, with the latency plan, the throughput plan, and the monitor.
- ``emulated``: the engine itself, its threads paced in emulated time.
- ``threads``: ten thousand requests from eight threads, with a change of plan forced every 50 ms.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import platform
import random
import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import tessera_compile
from tessera_compile import Engine, make_cluster, simulate
from tessera_compile.engine_stats import Percentiles
from tessera_compile.in_flight import simulated_us
from tessera_compile.passes import depend, partition, schedule, verify
from tessera_compile.passes.crossings import plans_by_crossings
from tessera_compile.passes.ir import Kernel, KernelGraph, Plan, Profile, Value
from tessera_compile.passes.mix import Mix, mix_of_table, read_table
from tessera_compile.passes.mix_plan import MixPlan, SharedPlan
from tessera_compile.passes.mixture import best_mixture
from tessera_compile.reports import Report
from tessera_compile.runtime.board import Route
from tessera_compile.runtime.monitor import Monitor
from tessera_compile.runtime.simulator import Passage, Run, drive
from tessera_compile.simulation import modelled_route
from tessera_compile.together import longest

CLUSTER = "a100-80gb,l40s@{}Gbps+10us"
PACE = 2000.0  # real time per emulated time
CENSUS = Path(__file__).parent / "data" / "gptoss20b_a100_l40s.csv"


def llama() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2048, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=1024,
    )  # fmt: skip
    ids = torch.randint(0, 2048, (2, 512), generator=torch.Generator().manual_seed(1))
    return LlamaForCausalLM(config).eval(), {"input_ids": ids, "use_cache": False}


def mamba() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=2048, hidden_size=1024, state_size=16, num_hidden_layers=2)
    ids = torch.randint(0, 2048, (2, 8), generator=torch.Generator().manual_seed(1))
    return MambaForCausalLM(config).eval(), {"input_ids": ids, "use_cache": False}


MODELS = {"llama": llama, "mamba": mamba}


def planned(name: str, policy: str = "throughput", gbps: int = 200) -> Report:
    model, inputs = MODELS[name]()
    options = {"cluster": CLUSTER.format(gbps), "profile": "model", "policy": policy, "time_limit": 10.0}
    return tessera_compile.explain(model, options=options)(**inputs)


def models() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in MODELS:
        report = planned(name)
        plan = report.graphs[0].plan
        rows: dict[str, Any] = {
            "kernels": len(plan.placement), "crossing": plan.cut_values, "predicted_us": plan.bottleneck_us,
            "alone_us": simulate(report, arrivals=1).passages[0].finish,
            "one_device_us": dict(plan.baselines), "in_flight": {}, "links": {},
        }  # fmt: skip
        for inflight, order in itertools.product((1, 2, 4, 8, 16, 32), ("due", "age", "static")):
            ran = simulate(report, arrivals=300, inflight=inflight, order=order)
            rows["in_flight"][f"{inflight} {order}"] = round(plan.bottleneck_us / ran.period_us, 4)
        ablation = {
            "none": {"pipelined": False, "order": "fifo"},
            "pipelining": {"order": "fifo"},
            "age order": {"order": "age"},
            "due order": {"order": "due"},
            "modulo schedule": {"order": "static"},
            "free transfers": {"order": "due", "free_transfers": True},
        }
        rows["ablation_8_in_flight_us"] = {
            what: round(simulate(report, arrivals=300, inflight=8, **how).period_us, 2) for what, how in ablation.items()
        }
        for order in ("due", "age", "static"):
            ran = simulate(report, arrivals=300, inflight=8, order=order)
            # From when a request is let in to its end, with as many in flight as there may be.
            ms = Percentiles.of((p.finish - p.start) / 1e6 for p in ran.passages[50:250])
            rows[f"fairness_p99_over_p50_{order}"] = round(ms.p99 / ms.p50, 4)
        for gbps in (200, 100, 50, 25):
            narrow = planned(name, gbps=gbps)
            bottleneck = narrow.graphs[0].plan.bottleneck_us
            rows["links"][f"{gbps} Gbit/s"] = {
                "predicted_us": round(bottleneck, 2),
                **{
                    o: round(bottleneck / simulate(narrow, arrivals=300, inflight=8, order=o).period_us, 4)
                    for o in ("due", "age", "static")
                },
            }
        found[name] = rows
    return found


def programs_of(
    mix: Mix, placement: Sequence[int], cluster: Any, cut: bool = True
) -> dict[str, tuple[KernelGraph, Any, Profile]]:
    """The workloads of a mix under a placement, as programs. cut: segments no longer than an engine lets them be under a joint
    plan."""
    planned = {name: graph_of(mix, w, placement, cluster) for w, name in enumerate(mix.workloads)}
    longest_us = longest(plan for _, plan, _ in planned.values()) if cut else math.inf
    made = {}
    for name, (ddg, plan, profile) in planned.items():
        program = schedule(ddg, plan, profile=profile, longest_us=longest_us)
        verify(program, ddg, plan)
        made[name] = (ddg.graph["kernels"], program, profile)
    return made


def graph_of(mix: Mix, workload: int, placement: Sequence[int], cluster: Any) -> tuple[Any, Plan, Profile]:
    """One workload of a mix under a placement: values that cross are moves of the mix, once for each destination. What another
    workload, or the next use, needs is sent to its group and ends there."""
    members = [k for k in range(len(mix.kernels)) if mix.workload[k] == workload]
    inside = set(members)
    values: dict[str, Value] = {}
    reads: dict[int, list[str]] = {k: [] for k in members}
    makes: dict[int, list[str]] = {k: [] for k in members}
    sinks: list[tuple[str, int]] = []
    for number, move in enumerate(mix.moves):
        if move.source not in inside:
            continue
        name = f"m{number}"
        values[name] = Value(name, (), (), "uint8", "cpu", move.bytes, "activation", name)
        makes[move.source].append(name)
        elsewhere = set()
        for reader in move.readers:
            if reader in inside and reader > move.source:
                reads[reader].append(name)
            elif placement[reader] != placement[move.source]:
                elsewhere.add(placement[reader])
        near = {placement[r] for r in move.readers if r in inside and r > move.source}
        sinks += [(name, g) for g in sorted(elsewhere - near)]

    def kernel(name: str, inputs: Sequence[str], outputs: Sequence[str]) -> Kernel:
        return Kernel(name, (name,), tuple(inputs), tuple(outputs), (), "opaque", 0, 0, 0, "", "", name)

    kernels = [kernel(mix.kernels[k], reads[k], makes[k]) for k in members]
    where = {mix.kernels[k]: cluster.names[placement[k]] for k in members}
    times = {mix.kernels[k]: dict(zip(cluster.names, mix.times[k].tolist(), strict=True)) for k in members}
    for number, (value, group) in enumerate(sinks):
        kernels.append(kernel(f"sink{number}", [value], []))
        where[f"sink{number}"] = cluster.names[group]
        times[f"sink{number}"] = dict.fromkeys(cluster.names, 1e-3)
    graph = KernelGraph(tuple(kernels), values, (), (), (), {}, (), len(kernels), 0)
    ddg, profile = depend(graph), Profile.of(times)
    return ddg, partition(ddg, profile, cluster, placement=where), profile


def census() -> dict[str, Any]:
    uses = {"decode": 129, "prefill": 2}
    found: dict[str, Any] = {}
    for gbps in (200, 25):
        cluster = make_cluster(CLUSTER.format(gbps))
        mix = mix_of_table(read_table(CENSUS), cluster, uses)
        plan = best_mixture(mix, time_limit=20.0)
        rows: dict[str, Any] = {"one_plan_us": plan.single_us, "mixture_us": plan.bottleneck_us, "decode alone": {}}
        whole = programs_of(mix, indices(mix, plan.single), cluster, cut=False)
        for inflight, order in itertools.product((1, 2, 4, 8, 16) if gbps == 200 else (8,), ("due", "static")):
            decode, shortest = modelled_route(*whole["decode"], cluster, slots=inflight)
            ran = drive(lambda _, r=decode: [r], [0.0] * (30 + 2 * inflight), lanes=2, inflight=inflight, order=order)
            rows["decode alone"][f"{inflight} {order}"] = round(shortest / ran.period, 4)
        if gbps == 200:
            rows["mix"] = in_one_queue(mix, plan, cluster, uses)
        found[f"{gbps} Gbit/s"] = rows
    return found


def in_one_queue(mix: Mix, best: MixPlan, cluster: Any, uses: dict[str, int]) -> dict[str, Any]:
    """The mix at so many in flight: what is reached of the joint prediction, with the best single plan as it is scheduled for one
    graph, with its segments cut, and with the plans that cross less."""
    rows: dict[str, Any] = {}
    crossing_less = [plan for plan in plans_by_crossings(mix, best) if plan is not best]
    routes = {id(p): routes_of(mix, p.placement, cluster) for plan in crossing_less for p in plan.plans}
    single = {cut: [(1.0, routes_of(mix, best.single.placement, cluster, cut))] for cut in (False, True)}
    for inflight in (8, 16, 64):
        row: dict[str, Any] = {}

        def measured(name: str, shares: Any, own_us: float, inflight: int = inflight, row: dict[str, Any] = row) -> None:
            mixes = 6 if inflight < 64 else 4
            us = simulated_us(shares, uses, lanes=2, inflight=inflight, mixes=mixes)
            row[name] = {"of the joint prediction": round(best.bottleneck_us / us, 4), "of its own": round(own_us / us, 4)}
            print(f"  {inflight} in flight, {name}: {row[name]}", flush=True)

        measured("one plan, segments whole", single[False], best.single_us)
        measured("one plan, segments cut", single[True], best.single_us)
        for number, plan in enumerate(crossing_less):
            shares = [(p.share, routes[id(p)]) for p in plan.plans]
            crossings = {k: len(r.transfers.get((0, 1), ())) + len(r.transfers.get((1, 0), ())) for k, r in shares[0][1].items()}
            measured(f"{number}: {', '.join(f'{n} crossings a {k}' for k, n in crossings.items())}", shares, plan.bottleneck_us)
        row["best"] = max(row, key=lambda name: row[name]["of the joint prediction"])
        rows[str(inflight)] = row
    return rows


def indices(mix: Mix, plan: SharedPlan) -> list[int]:
    groups = [g.name for g in mix.groups]
    return [groups.index(plan.placement[k]) for k in mix.kernels]


def routes_of(mix: Mix, placement: Mapping[str, str], cluster: Any, cut: bool = True) -> dict[str, Route]:
    groups = [g.name for g in mix.groups]
    made = programs_of(mix, [groups.index(placement[k]) for k in mix.kernels], cluster, cut)
    return {name: modelled_route(*one, cluster, slots=8)[0] for name, one in made.items()}


def arrivals(seed: int = 0) -> dict[str, Any]:
    """Poisson arrivals, 8 in flight, simulated; ms from arrival to end. The monitor's W is 300 ms of the paper's seconds-long
    requests; here it is 300 requests' worth of the capacity."""
    found: dict[str, Any] = {}
    for name in MODELS:
        reports = {policy: planned(name, policy) for policy in ("latency", "throughput")}
        routes, alone = {}, {}
        for policy, report in reports.items():
            g = report.graphs[0]
            routes[policy] = [modelled_route(g.kernels, g.program, g.profile, g.cluster, slots=8)[0]]
            alone[policy] = simulate(report, arrivals=1).passages[0].finish
        capacity = 1 / reports["throughput"].graphs[0].plan.bottleneck_us
        rows: dict[str, Any] = {"alone_us": alone, "rates": {}}
        for load in (0.1, 0.3, 0.5, 0.7, 0.9, 0.97):
            rng, now, times = random.Random(seed), 0.0, []
            for _ in range(1500):
                now += rng.expovariate(load * capacity)
                times.append(now)
            row: dict[str, Any] = {}
            for policy in ("latency", "throughput", "monitor"):
                ran, monitor = arriving(policy, times, routes, alone, window=300 / capacity)
                ms = Percentiles.of((p.finish - p.arrival) / 1e6 for p in ran.passages)
                row[policy] = {"p50_ms": round(ms.p50, 3), "p99_ms": round(ms.p99, 3)}
                if policy == "monitor":
                    row[policy]["switches"] = monitor.switches
            rows["rates"][f"{load:.2f} of the throughput plan's capacity"] = row
        found[name] = rows
    return found


def arriving(
    policy: str, times: Sequence[float], routes: dict[str, Any], alone: dict[str, float], window: float
) -> tuple[Run, Monitor]:
    """Requests that come at ``times`` (µs), each by the plan that is followed when it is let in."""
    monitor, follows = Monitor(window=window / 1e6), {}

    def choose(number: int) -> Any:
        follows[number] = monitor.following if policy == "monitor" else policy
        return routes[follows[number]]

    def ended(passage: Passage) -> None:
        monitor.add(passage.arrival / 1e6, passage.finish / 1e6, alone[follows.pop(passage.number)] / 1e6)

    return drive(choose, times, lanes=2, inflight=8, ended=ended), monitor


def emulated() -> dict[str, Any]:
    """The engine's own threads, paced."""
    model, inputs = llama()
    found: dict[str, Any] = {}
    for scheduling, inflight in (("dynamic", 4), ("dynamic", 8), ("static", 8)):
        torch._dynamo.reset()
        options = {
            "cluster": CLUSTER.format(200), "profile": "model", "codegen": "null", "policy": "throughput", "pace": PACE,
            "time_limit": 10.0,
        }  # fmt: skip
        compiled = torch.compile(model, backend="tessera", options=options)
        with Engine(compiled, inflight=inflight, policy="throughput", scheduling=scheduling) as engine:
            engine.submit(**inputs).result()
            ways = next(iter(engine._ways.values()))
            ways._shares = []  # One plan, whose prediction is known.
            for _ in engine.map([inputs] * inflight):
                pass
            engine._dispatcher.reset()
            ends = []
            for _ in engine.map([inputs] * (10 + 4 * inflight)):
                ends.append(time.monotonic())
            emulation = engine.stats().emulation
            way = ways.throughput
        ends = ends[inflight:-inflight]  # Neither while the lanes fill nor while they run empty.
        us = (ends[-1] - ends[0]) / (len(ends) - 1) * 1e6 / PACE
        found[f"{inflight} {scheduling}"] = {
            "reached": round(way.plan.bottleneck_us / us, 4), "us": round(us, 2), "predicted_us": way.plan.bottleneck_us,
            "overran": f"{emulation.overran} of {emulation.steps}", "void": emulation.void,
        }  # fmt: skip
    return found


def threads(count: int = 10_000, clients: int = 8) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)).eval()
    options = {"cluster": "2xcpu", "codegen": "eager", "profile": "model"}
    compiled = torch.compile(model, backend="tessera", options=options)
    wrong, answered = [], []
    with Engine(compiled, inflight=4, queue=64) as engine:
        engine.submit(torch.zeros(1, 8)).result()
        stop = threading.Event()

        def switch() -> None:
            for plan in itertools.cycle(("throughput", "latency")):
                if stop.wait(0.05):
                    return
                engine.follow(plan)

        def client(c: int) -> None:
            for i in range(count // clients):
                x = torch.full((1, 8), (c * count + i) / count)
                got = engine.submit(x).result(60)
                with torch.no_grad():
                    if not torch.allclose(got, model(x), atol=1e-5):
                        wrong.append((c, i))
                answered.append((c, i))

        def memory() -> int:
            gc.collect()
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        def rounds(work: Callable[[int], None]) -> None:
            workers = [threading.Thread(target=work, args=(c,)) for c in range(clients)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()

        switching = threading.Thread(target=switch)
        switching.start()
        started = time.perf_counter()
        rounds(client)
        seconds, first = time.perf_counter() - started, memory()
        lost = count - len(set(answered))
        answered.clear()
        rounds(client)
        grown = memory() - first
        stop.set()
        switching.join()
        stats = engine.stats()
    time.sleep(0.5)
    return {
        "requests": count, "seconds": round(seconds, 2), "lost_or_twice": lost + count - len(answered), "wrong": len(wrong),
        "failed": stats.failed, "switches": stats.switches,
        "threads_left": sum(t.name.startswith("tessera-") for t in threading.enumerate()),
        "peak_memory_grown_by_another_round_kib": grown,
    }  # fmt: skip


PARTS = {"models": models, "census": census, "arrivals": arrivals, "emulated": emulated, "threads": threads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which parts; all by default")
    parser.add_argument("--json", type=Path, help="file to write, or to add parts to")
    arguments = parser.parse_args()
    results: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    results["machine"] = {"processor": platform.machine(), "torch": torch.__version__, "python": platform.python_version()}
    for name in arguments.parts or PARTS:
        started = time.perf_counter()
        results[name] = PARTS[name]()
        results[name]["seconds_of_this_part"] = round(time.perf_counter() - started, 1)
        print(json.dumps({name: results[name]}, indent=1), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
