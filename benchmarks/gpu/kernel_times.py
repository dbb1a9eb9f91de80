"""Where the GPU spends one call: ``python -m benchmarks.gpu.kernel_times [TOKENS]``.

Kernels of one call of the benchmark's Llama under ``reduce-overhead`` and on one lane with graphs, by name: calls and µs.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.gpu.cuda_lanes import llama


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    model = llama()
    ids = torch.randint(0, 32000, (1, tokens), device="cuda")
    ways = {
        "reduce-overhead": {"backend": "inductor", "mode": "reduce-overhead"},
        "one lane, graphs": {"backend": "tessera", "options": {"cluster": "cuda:0", "cuda_graphs": True}},
    }
    with torch.no_grad():
        for name, how in ways.items():
            torch._dynamo.reset()
            run = torch.compile(model, **how)
            for _ in range(6):
                run(ids, use_cache=False)
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                for _ in range(5):
                    run(ids, use_cache=False)
                torch.cuda.synchronize()
            spans = sorted((e.time_range.start, e.time_range.end) for e in seen.events() if e.device_type.name == "CUDA")
            ends, idle = spans[0][1], 0.0
            gaps: list[float] = []
            for begin, end in spans[1:]:
                gaps.append(max(0.0, begin - ends))
                ends = max(ends, end)
            idle = sum(gap for gap in gaps if gap > 1)
            print(
                f"{name}: from first to last kernel {(ends - spans[0][0]) / 5:.0f} µs a call, "
                f"idle {idle / 5:.0f} µs of it in gaps"
            )
            print("  largest gaps:", " ".join(f"{gap:.0f}" for gap in sorted(gaps)[-12:]))
            rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
            total = sum(row.self_device_time_total for row in rows) / 5
            print(f"{name}: {total:.0f} µs of kernels a call")
            for row in rows[:14]:
                print(f"  {row.self_device_time_total / 5:8.1f} µs {row.count / 5:6.1f}  {row.key[:110]}")


if __name__ == "__main__":
    main()
