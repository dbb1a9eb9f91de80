"""How fast PTX is parsed, decided and interpreted, and what instrumenting costs: ``python -m benchmarks.ptx [--json FILE]``.

Parsing: the bodies of the corpus again and again up to 10 MB. Interpreting: Triton kernels of the corpus at realistic sizes,
beside the time that NumPy takes to do nothing but write the same footprint. Instrumenting: registers added, over all kernels of
the corpus.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from tessera_compile.ptx_tools import Buffer, TensorMap, footprint, instrument, parse, verdict
from tessera_compile.ptx_tools.assembling import find_tool
from tessera_compile.ptx_tools.instrumentation import cost
from tests.ptx_tools.corpus import static_files, triton_cases, triton_ptx

BASE = 1 << 32


def parsing() -> dict[str, Any]:
    text = triton_ptx("matmul.sm_90").ptx
    cut = text.index(".visible .entry")
    end = text.index("\t.section") if "\t.section" in text else len(text)
    head, body = text[:cut], text[cut:end]
    copies = 10_000_000 // len(body) + 1
    whole = head + "".join(body.replace("k_matmul", f"k{i}_matmul").replace("$L__", f"$L{i}__") for i in range(copies))
    started = time.perf_counter()
    module = parse(whole, name="ten megabytes")
    seconds = time.perf_counter() - started
    print(
        f"parse: {len(whole) / 1e6:.1f} MB, {len(module.kernels)} kernels in {seconds:.2f} s: "
        f"{len(whole) / 1e6 / seconds:.2f} MB/s"
    )
    return {"megabytes": len(whole) / 1e6, "seconds": seconds}


def launches() -> list[tuple[str, Any, Any, Any]]:
    n = 1 << 24
    m = 2048
    plain = [Buffer(BASE * (i + 1), 2 * m * m) for i in range(3)]
    maps: list[Any] = []
    for i in range(3):
        box = (64, 128)
        maps += [TensorMap(BASE * (i + 1), 2, (m, m), (2 * m,), box), m, m, m, 1]
    s, z, d = 8192, 16, 64
    heads = [Buffer(BASE * (i + 1), 2 * s * z * d) for i in range(4)]
    return [
        ("add.sm_90", -(-n // 1024), None, [*(Buffer(BASE * (i + 1), 4 * n) for i in range(3)), n]),
        ("softmax.sm_90", 4096, None, [Buffer(BASE, 4 * 4096 * 1024), Buffer(2 * BASE, 4 * 4096 * 1024), 1024, 1024, 4096, 1000]),
        ("matmul.sm_90", (m // 128) ** 2, None, [*plain, m, m, m, m, m, m]),
        ("matmul_tma_host.sm_90", (m // 128) ** 2, None, [*maps, m, m, m]),
        ("flash_causal.sm_90", (s // 128, z), None, [*heads, Buffer(5 * BASE, 4 * s * z), 0.1, *[s * d, d] * 4, s]),
    ]


def interpreting() -> dict[str, Any]:
    rows = {}
    print("\nkernel                  verdict      interpret s  bytes touched  NumPy marks them in s   ratio")
    for name, grid, _, args in launches():
        case = triton_ptx(name)
        module = parse(case.ptx, name=name)
        started = time.perf_counter()
        found = footprint(module, None, grid, 32 * case.metadata["num_warps"], args, shared_bytes=case.metadata["shared"])
        seconds = time.perf_counter() - started
        touched = sum(b.reads.nbytes + b.writes.nbytes for b in found.buffers)
        started = time.perf_counter()
        for buffer in found.buffers:
            for intervals in (buffer.reads, buffer.writes):
                marks = np.zeros(buffer.nbytes, bool)
                for start, end in intervals:
                    marks[start:end] = True
        marking = time.perf_counter() - started
        kind = str(verdict(module, None).kind)
        print(f"{name:22}  {kind:11}  {seconds:11.3f}  {touched:13}  {marking:21.3f}  {seconds / marking:6.1f}")
        rows[name] = {"verdict": kind, "seconds": seconds, "bytes": touched, "marking_seconds": marking}
    return rows


def instrumenting() -> dict[str, Any]:
    find_tool("ptxas")
    modules = [parse(p.read_text(), name=p.name) for p in static_files() if "b09" not in p.name]
    modules += [parse(triton_ptx(name).ptx, name=name) for name in triton_cases()]
    result = {}
    for scheme in ("shadow", "bitmap"):
        added, spills = [], 0
        for module in modules:
            for found in cost(module, instrument(module, scheme)).values():
                added.append(found.registers_after - found.registers)
                spills += found.spills_after > found.spills
        print(
            f"instrument {scheme}: {len(added)} kernels, {statistics.median(added):+.0f} registers (median), {max(added):+d} at "
            f"most; {spills} spill more"
        )
        result[scheme] = {"kernels": len(added), "median": statistics.median(added), "most": max(added), "spilling": spills}
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.ptx",
        "parsing": parsing(),
        "interpreting": interpreting(),
        "instrumenting": instrumenting(),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
