"""Footprints against Inductor's read/write sets, and what is known of the kernels of models:
``python -m benchmarks.gpu.cross_check [--json FILE] [--templates] [--jobs N] [MODEL …]``.

Each model of the test suite is lowered whole and compiled as one segment with cold caches. For each:

- ``compared``: launches of Triton kernels whose footprint was held against Inductor's own sets, and ``mismatches``;
- ``kernels``, ``time``: the share of its GPU kernels, and of their time by the profiler, whose evidence is a footprint;
- ``dryrun_s``: seconds that finding the evidence took, the one call included; ``of_compile``: over the time to compile, the
  first call, in which Inductor tunes its kernels, included.

``--templates`` compiles matrix products (and convolutions) by Inductor's Triton templates instead of by libraries, with a few
configurations to choose from, since choosing well does not matter here. Models run in processes of their own, ``--jobs`` at a
time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from tessera_compile.runtime.codegen import Codegen, Compiled, lookup
from tessera_compile.runtime.copies import copies
from tessera_compile.runtime.cross_check import cross_check
from tessera_compile.runtime.evidence import Evidence, gather

ROOT = Path(__file__).parents[2]


def load(name: str) -> Any:
    """A module of the tests, which are no package of an installation."""
    spec = importlib.util.spec_from_file_location(f"tests_{name}", ROOT / f"tests/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def profiled(compiled: Compiled, values: dict[str, Any]) -> Counter[str]:
    """GPU µs by kernel name, of one call; how often each was launched is under ``("count", name)``."""
    own = copies({name: lookup(values, name) for name in compiled.inputs})
    found: Counter[Any] = Counter()
    with torch.no_grad():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            compiled.call([own[n] for n in compiled.inputs])
            torch.cuda.synchronize()
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset")):
                found[event.name] += event.self_device_time_total
                found["count", event.name] += 1
    return found


def shares(evidence: Evidence, spent: Counter[Any]) -> dict[str, float]:
    known: dict[str, bool] = {}
    for launch in evidence.launches:
        if launch.kind != "library":
            known[launch.name] = known.get(launch.name, True) and bool(launch.how)
    names = [n for n in spent if isinstance(n, str)]
    told = [n for n in names if known.get(n)]
    kernels = sum(spent["count", n] for n in names)
    return {
        "kernels": round(sum(spent["count", n] for n in told) / max(kernels, 1), 3),
        "time": round(sum(spent[n] for n in told) / max(sum(spent[n] for n in names), 1e-9), 3),
        "launched": kernels,
        "gpu_us": round(sum(spent[n] for n in names), 1),
    }


def options(templates: bool) -> dict[str, Any]:
    from torch._inductor import config

    # A hit in the cache of compiled graphs would generate no code, and with it no sets.
    chosen: dict[str, Any] = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    if templates:
        chosen |= {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON", "max_autotune_conv_backends": "TRITON"}
        if hasattr(config.test_configs, "max_mm_configs"):
            chosen["test_configs.max_mm_configs"] = 2
    return chosen


def one(name: str, templates: bool) -> dict[str, Any]:
    example = load("models").MODELS[name]()
    model = example.model.cuda()
    inputs = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in example.inputs.items()}
    capture = load("capture").Capture(model, inputs)
    rows = []
    given: list[list[Any]] = [[] for _ in capture.graphs]

    def keep(place: int, run: Any) -> Any:
        def call(args: list[Any]) -> Any:
            given[place] = list(args)
            return run(args)

        return call

    capture.run = [keep(i, run) for i, run in enumerate(capture.run)]
    capture()
    for graph, args in zip(capture.graphs, given, strict=True):
        values = dict(zip(graph.inputs, args, strict=True))
        kernels = [k.name for k in graph.kernels]
        outputs = [v for v in graph.output_values if graph.producer(v) is not None]
        codegen = Codegen("inductor")
        with torch._inductor.config.patch(options(templates)):
            started = time.perf_counter()
            seconds: list[float] = []

            # The comparison's own call would leave footprints behind that finding the evidence could use.
            holder: dict[str, Any] = {}

            def first() -> Compiled:
                compiled = codegen.compile(graph, kernels, outputs)  # noqa: B023
                own = copies({n: lookup(values, n) for n in compiled.inputs})  # noqa: B023
                with torch.no_grad():  # Inductor tunes its kernels when they are first called: that is compiling, too.
                    compiled.call([own[n] for n in compiled.inputs])
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - started)  # noqa: B023
                holder["evidence"] = gather(graph, kernels, outputs, codegen, values, invented=False)  # noqa: B023
                return compiled

            compiled, checked = cross_check(first, values)
            evidence: Evidence = holder["evidence"]
        rows.append(
            {
                "compile_s": round(seconds[0], 2),
                "dryrun_s": round(evidence.seconds, 2),
                "of_compile": round(evidence.seconds / seconds[0], 3),
                "deciding_s": round(sum(n.seconds for n in evidence.launches), 2),
                "compared": len(checked.kernels),
                "distinct": len(set(checked.kernels)),
                "accesses": {"enumerated": checked.enumerated, "whole": checked.whole},
                "mismatches": [m.to_text() for m in checked.mismatches],
                "skipped": [f"{k}: {why}" for k, why in checked.skipped],
                "how": dict(Counter(n.how or n.kind for n in evidence.launches)),
                "verdicts": dict(Counter(n.verdict for n in evidence.launches if n.verdict)),
                "exact_values": f"{len(evidence.exact)} of {len(evidence.footprint.buffers) if evidence.footprint else 0}",
                "guards": len(evidence.guards),
                "reason": evidence.reason[:2000],
                **shares(evidence, profiled(compiled, values)),
            }
        )
    return {"model": name, "templates": templates, "graphs": rows}


def in_process(name: str, templates: bool, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        cold = {
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TESSERA_CACHE_DIR": f"{folder}/tessera",
        }
        command = [sys.executable, "-m", "benchmarks.gpu.cross_check", "--one", name, *(["--templates"] if templates else [])]
        environment = {**os.environ, **cold, "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"model": name, "templates": templates, "error": done.stderr[-1500:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--templates", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.one, arguments.templates)))
        return
    names = arguments.models or list(load("models").MODELS)
    threads = max(1, (os.cpu_count() or 1) // arguments.jobs)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.gpu.cross_check " + " ".join(sys.argv[1:]),
        "torch": torch.__version__,
        "models": [],
    }
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for done in as_completed([pool.submit(in_process, name, arguments.templates, threads) for name in names]):
            found = done.result()
            results["models"].append(found)
            if "error" in found:
                print(f"{found['model']:10} FAILED {found['error']}")
            for row in found.get("graphs", ()):
                print(
                    f"{found['model']:10} compared {row['compared']:4} mismatches {len(row['mismatches'])}  footprints: "
                    f"{row['kernels']:.0%} of {row['launched']} kernels, {row['time']:.0%} of time  "
                    f"dry run {row['dryrun_s']} s = {row['of_compile']:.0%} of compiling {row['compile_s']} s"
                )
                for text in (*row["mismatches"][:3], *row["skipped"][:2], row["reason"][:300]):
                    print("   ", text[:600])
            sys.stdout.flush()
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1))
    rows = [row for found in results["models"] for row in found.get("graphs", ())]
    for part, weight in (("kernels", "launched"), ("time", "gpu_us")):
        total = sum(r[weight] for r in rows)
        results[part] = round(sum(r[part] * r[weight] for r in rows) / max(total, 1e-9), 3)
        print(f"footprints are known of {results[part]:.0%} of {part}")
    compared, wrong = sum(r["compared"] for r in rows), sum(len(r["mismatches"]) for r in rows)
    results |= {"compared": compared, "mismatches": wrong}
    print(f"{compared} launches compared, {wrong} mismatches")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    sys.exit(1 if wrong or any("error" in found for found in results["models"]) else 0)


if __name__ == "__main__":
    main()
