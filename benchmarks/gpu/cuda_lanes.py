"""Programs on CUDA lanes beside Inductor: ``python -m benchmarks.gpu.cuda_lanes [--json FILE]``.

A Llama of 1B-class shapes (four layers, bf16, random weights): time of a call under Inductor, under ``reduce-overhead``, on
one lane, and on two slices of the GPU, with and without CUDA graphs; how far logits are from eager's, and on how many
positions the best token is the same. Then what a crossing between two slices costs, for three sizes, issued from the host and
inside one captured graph.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tessera_compile.compiler import executors, report

SLICES = "cuda:0/56sm,cuda:0/64sm"


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=1024,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(torch.bfloat16).cuda()


def timed(run: Callable[[], Any], repeats: int = 30) -> float:
    """Median µs of a call, host time included, synchronised at both ends."""
    for _ in range(5):
        run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e6)
    return sorted(times)[repeats // 2]


def model_times(length: int) -> dict[str, Any]:
    model = llama()
    ids = torch.randint(0, 32000, (1, length), device="cuda")
    ways: dict[str, dict[str, Any]] = {
        "inductor": {"backend": "inductor"},
        "reduce-overhead": {"backend": "inductor", "mode": "reduce-overhead"},
        "one lane": {"backend": "tessera", "options": {"cluster": "cuda:0"}},
        "one lane, graphs": {"backend": "tessera", "options": {"cluster": "cuda:0", "cuda_graphs": True}},
        "two slices": {"backend": "tessera", "options": {"cluster": SLICES, "planner": "layers", "profile": "model"}},
        "two slices, graphs": {
            "backend": "tessera", "options": {"cluster": SLICES, "planner": "layers", "profile": "model", "cuda_graphs": True},
        },
    }  # fmt: skip
    rows: dict[str, Any] = {}
    with torch.no_grad():
        want = model(ids, use_cache=False).logits.float()
        eager = timed(lambda: model(ids, use_cache=False))
        print(f"\n{length} tokens: eager {eager:.0f} µs")
        for name, how in ways.items():
            torch._dynamo.reset()
            started = time.perf_counter()
            compiled = torch.compile(model, **how)
            got = compiled(ids, use_cache=False).logits.float()
            first = time.perf_counter() - started
            us = timed(lambda c=compiled: c(ids, use_cache=False))  # type: ignore[misc]
            same = float((got.argmax(-1) == want.argmax(-1)).float().mean())
            row = {"us": us, "first_call_s": first, "token_match": same, "largest_difference": float((got - want).abs().max())}
            if "cluster" in str(how):
                found = [e for e in executors(compiled) if e is not None]
                row["replays"] = sum(getattr(e, "replays", 0) for e in found)
                row["reasons"] = [r for e in found for r in getattr(e, "reasons", {}).values()]
                row["crossing_values"] = sum(g.plan.cut_values for g in report(compiled).graphs)
            rows[name] = row
            print(
                f"  {name:20} {us:8.0f} µs  first call {first:5.1f} s  tokens equal {100 * same:.1f} %, "
                f"largest logit difference {row['largest_difference']:.4f} {row.get('reasons') or ''}"
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


def crossings() -> dict[str, Any]:
    """A chain of twenty elementwise kernels, every one on the other slice than the last, against the chain on one slice."""
    rows = {}
    print("\nbytes     graphs  µs a crossing")
    for nbytes in (4096, 1 << 20, 1 << 26):
        x = torch.randn(nbytes // 4, device="cuda")

        def chain(x: torch.Tensor) -> torch.Tensor:
            for _ in range(10):
                x = torch.cumsum(x.view(-1, 64), 1).view(-1) * 0.5
            return x

        for graphs in (False, True):
            us = {}
            for name, planner in (("apart", "alternate"), ("together", "single")):
                torch._dynamo.reset()
                options = {"cluster": SLICES, "planner": planner, "profile": "model", "codegen": "eager", "cuda_graphs": graphs}
                compiled = torch.compile(chain, backend="tessera", options=options)
                with torch.no_grad():
                    us[name] = timed(lambda c=compiled, x=x: c(x))  # type: ignore[misc]
                    cut = max(1, sum(g.plan.cut_values for g in report(compiled).graphs))
                if name == "apart":
                    count = cut
            each = (us["apart"] - us["together"]) / count
            rows[f"{nbytes} {'graphs' if graphs else 'host'}"] = {"us_a_crossing": each, "crossings": count, **us}
            print(
                f"{nbytes:9} {graphs!s:6}  {each:8.2f}   ({count} crossings: {us['apart']:.0f} against {us['together']:.0f} µs)"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.gpu.cuda_lanes",
        "torch": torch.__version__,
        "crossings": crossings(),
        "decode": model_times(8),
        "prefill": model_times(512),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
