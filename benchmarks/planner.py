"""The planner at scale and on a real kernel census: ``python -m benchmarks.planner [--json FILE]``.

1. Synthetic graphs: kernels in layers of 30 with skip edges between layers, times of unlike devices drawn at random, 200 Gbps
   and 10 µs a
   transfer. Seconds, and the proven gap of the mixture and of the best single plan.
2. The census of gpt-oss-20B on an A100 and an L40S: how many times as many mixes a second as two replicas, beside the bound,
   the coarse
   mixtures people use, two A100s and two L40S, for links of 200 and 25 Gbps and 10 to 200 µs a transfer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from tessera_compile import make_cluster
from tessera_compile.passes.explaining import same_budget
from tessera_compile.passes.mix import Group, Mix, Move, mix_of_table, read_table
from tessera_compile.passes.mixture import best_mixture

CENSUS = Path(__file__).parent / "data" / "gptoss20b_a100_l40s.csv"
MIXES = ({"decode": 1.0}, {"prefill": 1.0}, {"decode": 129.0, "prefill": 2.0}, {"decode": 129.0, "prefill": 4.0})


def synthetic(count: int, sizes: tuple[int, ...], seed: int = 0) -> Mix:
    """A graph of ``count`` kernels for groups of the given sizes."""
    draw = random.Random(seed)
    groups = len(sizes)
    base = [draw.uniform(5, 60) for _ in range(30)]
    skew = [[draw.uniform(0.5, 2) for _ in range(groups)] for _ in range(30)]
    times = np.array([[base[k % 30] * skew[k % 30][g] * draw.uniform(0.95, 1.05) for g in range(groups)] for k in range(count)])
    readers: dict[int, list[int]] = {}
    for k in range(1, count):
        readers.setdefault(k - 1, []).append(k)
        if k % 30 == 0:
            readers.setdefault(k - 30, []).append(k)
    moves = tuple(Move(f"v{s}", draw.randrange(10_000, 1_000_000), s, tuple(r)) for s, r in readers.items())
    links = {(u, g): (1 / 25_000, 10.0) for u in range(groups) for g in range(groups) if u != g}
    made = tuple(Group(f"type{g}", tuple(f"type{g}#{i}" for i in range(n))) for g, n in enumerate(sizes))
    return Mix(
        tuple(f"k{i}" for i in range(count)),
        ("graph",),
        np.zeros(count, dtype=np.int64),
        {"graph": 1.0},
        np.ones(count),
        times,
        made,
        links,
        moves,
        tuple(k // 30 for k in range(count)),
        ("other",) * count,
        inner={(a, b): (1 / 25_000, 10.0) for group in made for a in group.members for b in group.members if a != b},
    )


def scale() -> list[dict[str, Any]]:
    rows = []
    print("kernels  devices    seconds  gap of the mixture  gap of one plan  replicas take  layers take")
    for count, sizes in (
        (1000, (1,) * 2),
        (1000, (1,) * 3),
        (1000, (1,) * 4),
        (1000, (1,) * 8),
        (1000, (8, 8)),
        (5000, (1,) * 2),
    ):
        started = time.perf_counter()
        plan = best_mixture(synthetic(count, sizes), gap=0.01)
        seconds = time.perf_counter() - started
        name = "+".join(map(str, sizes)) if max(sizes) > 1 else str(len(sizes))
        against = plan.baselines["replicas"] / plan.bottleneck_us
        layers = plan.baselines["layers"] / plan.bottleneck_us
        print(
            f"{count:7}  {name:8} {seconds:8.2f}  {100 * plan.gap:16.3f} %  {100 * plan.single_gap:13.3f} %  {against:12.2f}x  "
            f"{layers:10.2f}x"
        )
        rows.append({
            "kernels": count, "devices": name, "seconds": round(seconds, 3), "gap": plan.gap, "single_gap": plan.single_gap,
            "replicas_over_ours": against, "layers_over_ours": layers,
        })  # fmt: skip
    return rows


def census() -> list[dict[str, Any]]:
    table = read_table(CENSUS)
    rows = []
    print("\nGbps   µs  transfers   mix                     ours  bound  one plan  phases+repl.  2xA100  2xL40S  seconds")
    for gbps in (200, 25):
        for latency in (10, 50, 100, 200):
            cluster = make_cluster(f"a100-80gb,l40s@{gbps}Gbps+{latency}us")
            for overlap in (True, False):
                for weights in MIXES:
                    mix = mix_of_table(table, cluster, weights, overlap=overlap)
                    started = time.perf_counter()
                    plan = best_mixture(mix)
                    seconds = time.perf_counter() - started
                    replicas = plan.baselines["replicas"]
                    phases = plan.baselines.get("prefill-decode+replicas")
                    budget = same_budget(mix)
                    row = {
                        "gbps": gbps, "us": latency, "overlap": overlap, "mix": weights,
                        "ratio": replicas / plan.bottleneck_us, "bound": replicas / plan.bound_us,
                        "single": replicas / plan.single_us,
                        "phases_and_replicas": replicas / phases if phases else None,
                        "two_a100": replicas / budget["all a100-80gb"], "two_l40s": replicas / budget["all l40s"],
                        "seconds": seconds,
                    }  # fmt: skip
                    rows.append(row)
                    name = " ".join(f"{w} x{n:g}" for w, n in weights.items())
                    shown = f"{row['phases_and_replicas']:.3f}" if phases else "-"
                    print(
                        f"{gbps:4} {latency:4}  {'overlapped' if overlap else 'serial':10}  {name:22} {row['ratio']:.3f}  "
                        f"{row['bound']:.3f}  {row['single']:8.3f}  {shown:>12}  {row['two_a100']:6.3f}  {row['two_l40s']:6.3f}  "
                        f"{seconds:7.2f}"
                    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.planner",
        "scale": scale(),
        "census": census(),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
