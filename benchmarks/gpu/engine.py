"""The engine on two slices of one GPU: ``python -m benchmarks.gpu.engine [--json FILE] [SECTION …]``.

A Llama of 1B-class shapes (four layers, bf16, random weights). Sections:

- ``emulated``: a modelled A100 and L40S, paced on the slices: throughput over the plan's prediction with 1, 2, 4 and 8 requests
  in flight, issued dynamically and as periods. What is real here is order, waiting and overlap; times are modelled.
- ``real``: requests a second of the engine on the slices in both modes, over plain calls of the same program one at a time, and
  over one lane that is the whole GPU, all captured; how far results are from that lane's; p99 over p50 of the time in flight.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cuda_lanes import SLICES, llama
from tessera_compile import Engine

MODES = ("dynamic", "static")


def engine_of(compiled: Any, inflight: int, scheduling: str) -> Engine:
    return Engine(compiled, inflight=inflight, policy="throughput", scheduling=scheduling)  # type: ignore[arg-type]


def steady_us(engine: Engine, inputs: dict[str, Any], count: int, warm: int) -> float:
    """µs between two results while the lanes are full."""
    for _ in engine.map([inputs] * warm):
        pass
    engine._dispatcher.reset()  # type: ignore[union-attr]
    engine._records.clear()  # What was captured or compiled in between is no part of it.
    ends = []
    for _ in engine.map([inputs] * (count + 2 * engine.inflight)):
        ends.append(time.monotonic())
    ends = ends[engine.inflight : -engine.inflight]
    return (ends[-1] - ends[0]) / (len(ends) - 1) * 1e6


def emulated(length: int = 512, pace: float = 240.0) -> dict[str, Any]:
    model, ids = llama(), torch.randint(0, 32000, (1, length), device="cuda")
    inputs = {"input_ids": ids, "use_cache": False}
    torch._dynamo.reset()
    options = {
        "cluster": "a100-80gb,l40s@200Gbps", "emulate_on": SLICES, "pace": pace, "policy": "throughput", "cuda_graphs": True,
        "codegen": "eager", "profile": "model", "time_limit": 5.0,
    }  # fmt: skip
    compiled = torch.compile(model, backend="tessera", options=options)
    rows: dict[str, Any] = {"length": length, "pace": pace}
    for scheduling in MODES:
        for inflight in (1, 2, 4, 8):
            with engine_of(compiled, inflight, scheduling) as engine:
                engine.submit(**inputs).result()
                ways = next(iter(engine._ways.values()))
                ways._shares = []  # One plan, whose prediction is known.
                us = steady_us(engine, inputs, 8, 3 * inflight) / pace
                stats, way = engine.stats(), ways.throughput
                assert way is not None
                assert stats.emulation is not None
                rows[f"{inflight} {scheduling}"] = row = {
                    "reached": way.plan.bottleneck_us / us, "us": us, "predicted_us": way.plan.bottleneck_us,
                    "alone_us": way.alone_us, "crossing_values": way.plan.cut_values, "void": stats.emulation.void,
                    "overran": f"{stats.emulation.overran} of {stats.emulation.steps}", "busy": dict(stats.busy),
                    "moved_bytes": stats.moved_bytes, "periods": stats.periods, "uncaptured": dict(stats.uncaptured),
                    "modulo_us": way.steady.period_us, "modulo_slots": way.steady.slots,
                }  # fmt: skip
            print(
                f"emulated, {scheduling} {inflight}: {us:.0f} µs a request, {row['reached']:.3f} of the prediction "
                f"({row['predicted_us']:.0f} µs; a modulo schedule with as many slots: {row['modulo_us']:.0f} µs), "
                f"{row['periods']} periods, overran {row['overran']} {row['uncaptured']}",
                flush=True,
            )
    return rows


def a_second(run: Callable[[], Any], count: int) -> float:
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return count / (time.perf_counter() - started)


def real(count: int = 120) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    model = llama()
    for rows_of, length in ((1, 16), (1, 512), (8, 512)):
        ids = torch.randint(0, 32000, (rows_of, length), device="cuda")
        inputs = {"input_ids": ids, "use_cache": False}
        torch._dynamo.reset()
        shared = {"cuda_graphs": True, "profile": "model"}
        slices = torch.compile(model, backend="tessera", options={"cluster": SLICES, "planner": "layers", **shared})
        alone = torch.compile(model, backend="tessera", options={"cluster": "cuda:0", **shared})
        with torch.no_grad():
            row: dict[str, Any] = {
                "one_lane": a_second(lambda a=alone, i=inputs: a(**i), count),  # type: ignore[misc]
                "plain": a_second(lambda s=slices, i=inputs: s(**i), count),  # type: ignore[misc]
            }
            want = alone(**inputs).logits.float().clone()
        for scheduling in MODES:
            with engine_of(slices, 8, scheduling) as engine:
                got = engine.submit(**inputs).result().logits.float()
                per_second = 1e6 / steady_us(engine, inputs, count, 64)
                stats = engine.stats()
                last = engine.submit(**inputs).result().logits.float()
                row[scheduling] = {
                    "a_second": per_second, "over_plain": per_second / row["plain"],
                    "over_one_lane": per_second / row["one_lane"],
                    "p99_over_p50": stats.run.p99 / stats.run.p50, "p50_ms": stats.run.p50, "busy": dict(stats.busy),
                    "largest_difference": float((got - want).abs().max()),
                    "captured_from_issued": float((got - last).abs().max()), "periods": stats.periods,
                    "uncaptured": dict(stats.uncaptured),
                }  # fmt: skip
            found = row[scheduling]
            print(
                f"real, {rows_of} × {length} tokens, {scheduling}: {per_second:.0f} a second, {found['over_plain']:.2f} of "
                f"plain calls ({row['plain']:.0f}), {found['over_one_lane']:.2f} of one lane ({row['one_lane']:.0f}); p99 / p50 "
                f"{found['p99_over_p50']:.2f}; {found['periods']} periods {found['uncaptured']}",
                flush=True,
            )
        rows[f"{rows_of} × {length} tokens"] = row
    return rows


SECTIONS = {"emulated": emulated, "real": real}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="which sections; all by default")
    parser.add_argument("--json", type=Path, help="file to write")
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "machine": {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "slices": SLICES},
    }
    for name in arguments.sections or SECTIONS:
        started = time.perf_counter()
        results[name] = SECTIONS[name]()
        results[name]["seconds"] = time.perf_counter() - started
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
