"""What the backend does to real models, beside Inductor alone: ``python -m benchmarks.backend [--json FILE]``.

For each model of the tests: graphs, kernels, FX nodes in kernels and free, and the seconds of the first call under Inductor and
under Tessera with its default two CPU lanes, each in a process of its own with an empty Inductor cache. Then the partition of a
synthetic graph of 700 kernels on two devices: seconds and proven gap.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time

MODELS = ("llama", "mixtral", "bert", "resnet50", "t5", "unet")


def first_call(name: str, backend: str) -> dict[str, object]:
    """Seconds of the first call of model ``name``; run in a fresh process."""
    import torch

    import tessera_compile
    from tests.models import MODELS as models

    example = models[name]()
    with torch.no_grad():
        started = time.perf_counter()
        compiled = torch.compile(example.model, backend=backend)
        compiled(**example.inputs)
        result: dict[str, object] = {"seconds": time.perf_counter() - started}
    if backend == "tessera":
        report = tessera_compile.report(compiled)
        kernels = [k for g in report.graphs for k in g.kernels.kernels]
        result |= {
            "graphs": len(report.graphs),
            "kernels": len(kernels),
            "distinct": len({k.fingerprint for k in kernels}),
            "nodes_in_kernels": sum(len(k.nodes) for k in kernels),
            "free_nodes": sum(g.kernels.free_nodes for g in report.graphs),
            "nodes": sum(g.kernels.nodes for g in report.graphs),
            "steps": {step: round(s, 3) for g in report.graphs for step, s in g.seconds.items()},
        }
    return result


def in_fresh_process(name: str, backend: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.backend", "--one", name, backend]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def partition_700() -> dict[str, object]:
    """700 kernels in layers of 30 with skip edges, times and sizes drawn at random, on two unlike devices."""
    from tessera_compile import make_cluster
    from tessera_compile.passes import partition
    from tessera_compile.passes.ir import Profile
    from tests.graphs import synthetic

    draw = random.Random(0)
    count = 700
    edges = {(i - 1, i) for i in range(1, count)} | {(i - 10, i) for i in range(20, count, 10)}
    ddg = synthetic(sorted(edges), count, nbytes=[draw.randrange(10_000, 4_000_000) for _ in range(count)])
    cluster = make_cluster("a100-80gb,l40s@200Gbps+10us")
    profile = Profile.of({f"k{i}": {d: draw.uniform(5, 60) for d in cluster.names} for i in range(count)})
    plan = partition(ddg, profile, cluster, objective="throughput", gap=1e-3, time_limit=60)
    return {
        "kernels": count,
        "seconds": plan.seconds,
        "gap": plan.gap,
        "status": plan.status,
        "bottleneck_us": plan.bottleneck_us,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "BACKEND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(first_call(*arguments.one)))
        return
    figures: dict[str, object] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.backend",
    }
    columns = ("model", "graphs", "kernels", "distinct", "nodes in kernels", "free", "all", "tessera s", "inductor s", "ratio")
    print("  ".join(columns))
    for name in MODELS:
        ours, theirs = in_fresh_process(name, "tessera"), in_fresh_process(name, "inductor")
        ratio = ours["seconds"] / theirs["seconds"]  # type: ignore[operator]
        figures[name] = {**ours, "inductor_seconds": theirs["seconds"], "ratio": ratio}
        counts = [ours[key] for key in ("graphs", "kernels", "distinct", "nodes_in_kernels", "free_nodes", "nodes")]
        times = [f"{s:.1f}" for s in (ours["seconds"], theirs["seconds"])] + [f"{ratio:.2f}"]
        print("  ".join(str(cell).rjust(len(column)) for cell, column in zip([name, *counts, *times], columns, strict=True)))
    figures["partition"] = found = partition_700()
    print(f"partition of {found['kernels']} kernels on two devices: {found['seconds']:.2f} s, gap {100 * found['gap']:.3f} %")  # type: ignore[operator]
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
