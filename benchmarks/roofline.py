"""The roofline model against real times: ``python -m benchmarks.roofline [--json FILE]``.

The real times are the A100/L40S census in ``benchmarks/data``. FLOPs and bytes come from gpt-oss-20B's published configuration
(hidden 2880, 64 query and 8 key-value heads of 64, 32 experts of 2880, 4 a token, MXFP4 expert weights, vocabulary 201,088).
Printed: how often the model says rightly which GPU is faster, the error by kind, and the same for the peer, a roofline of DRAM
bandwidth and tensor rate alone. Attention is left out: the census does not say how long its contexts were.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tessera_compile import make_cluster
from tessera_compile.passes.cluster import Device
from tessera_compile.runtime.roofline import ceiling, model_us

CENSUS = Path(__file__).parent / "data" / "gptoss20b_a100_l40s.csv"
ROWS = {"decode": 32, "prefill": 16384}
HIDDEN, EXPERTS, CHOSEN, INNER, VOCABULARY = 2880, 32, 4, 2880, 201088
QKV, HEADS = (64 + 2 * 8) * 64, 64 * 64
MXFP4 = 4.25 / 8  # Bytes a weight: 4 bits and a shared 8-bit scale for 32 of them.


@dataclass(frozen=True)
class Work:
    """What one kernel must do: FLOPs, bytes of weights (cold) and of activations (warm)."""

    kind: str
    flops: float
    cold: float
    warm: float


def gemm(rows: int, inner: int, outer: int) -> Work:
    return Work("gemm", 2.0 * rows * inner * outer, 2.0 * inner * outer, 2.0 * rows * (inner + outer))


def pointwise(read: float, written: float, flops: float = 0.0) -> Work:
    return Work("pointwise", flops, 0.0, read + written)


def experts(rows: int) -> Work:
    """The mean of the up and the down product: the census gives both the same time."""
    hit = EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** rows)
    width = (2 * INNER + INNER) / 2
    warm = 2.0 * rows * (HIDDEN + CHOSEN * (2 * INNER + INNER + HIDDEN)) / 2
    return Work("gemm", 2.0 * rows * CHOSEN * HIDDEN * width, hit * HIDDEN * width * MXFP4, warm)


def work_of(kernel: str, rows: int) -> Work | None:
    """The work of a census kernel, or None for attention."""
    state = 2.0 * rows * HIDDEN
    logits = 2.0 * rows * VOCABULARY
    table: dict[str, Callable[[], Work]] = {
        "embed_gather": lambda: Work("index", 0, state, state),
        "rmsnorm": lambda: Work("reduction", 4.0 * rows * HIDDEN, 0, 2 * state),
        "final_rmsnorm": lambda: Work("reduction", 4.0 * rows * HIDDEN, 0, 2 * state),
        "residual_rmsnorm": lambda: Work("reduction", 5.0 * rows * HIDDEN, 0, 4 * state),
        "qkv_gemm": lambda: gemm(rows, HIDDEN, QKV),
        "out_proj_gemm": lambda: gemm(rows, HEADS, HIDDEN),
        "router_gemm": lambda: gemm(rows, HIDDEN, EXPERTS),
        "lm_head_gemm": lambda: gemm(rows, HIDDEN, VOCABULARY),
        "marlin_moe_up": lambda: experts(rows),
        "marlin_moe_down": lambda: experts(rows),
        "rope_cat": lambda: pointwise(2.0 * rows * HEADS, 2.0 * rows * HEADS),
        "rope_cat2": lambda: pointwise(2.0 * rows * 512, 2.0 * rows * 512),
        "kv_cache_write": lambda: pointwise(2.0 * rows * 1024, 2.0 * rows * 1024),
        "router_splitk_reduce": lambda: pointwise(8.0 * rows * EXPERTS, 2.0 * rows * EXPERTS),
        "pad": lambda: pointwise(state, state),
        "topk_gating": lambda: Work("reduction", 0, 0, 4.0 * rows * EXPERTS),
        "moe_align": lambda: Work("index", 0, 0, 8.0 * rows * CHOSEN),
        "moe_sort": lambda: Work("index", 0, 0, 8.0 * rows * CHOSEN),
        "fill": lambda: pointwise(0, 128),
        "swiglu": lambda: pointwise(2.0 * rows * CHOSEN * 2 * INNER, 2.0 * rows * CHOSEN * INNER),
        "moe_sum": lambda: Work("reduction", rows * CHOSEN * HIDDEN, 0, state * (CHOSEN + 1)),
        "to_float": lambda: pointwise(logits, 2 * logits),
        "temperature_div": lambda: pointwise(2 * logits, 2 * logits),
        "softmax": lambda: Work("reduction", 5.0 * rows * VOCABULARY, 0, 4 * logits),
        "exponential": lambda: pointwise(0, 2 * logits),
        "sample_div": lambda: pointwise(4 * logits, 2 * logits),
        "argmax": lambda: Work("reduction", rows * VOCABULARY, 0, 2 * logits),
    }
    return None if kernel == "unified_attention_2d" else table[kernel]()


def real(row: dict[str, str]) -> tuple[float, float]:
    """Measured µs on the A100 and on the L40S."""
    return float(row["a100-80gb_us"]), float(row["l40s_us"])


def dram_only(work: Work, device: Device) -> float:
    """The peer: max of FLOPs over the tensor rate and bytes over DRAM bandwidth, no floor, no cache."""
    return max(work.flops / (device.tflops * 1e6), (work.cold + work.warm) / (device.gb_per_s * 1e3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    a100, l40s = make_cluster("a100-80gb-pcie,l40s").devices
    with CENSUS.open() as file:
        census = list(csv.DictReader(file))
    rows = [(r, w) for r in census if (w := work_of(r["kernel"], ROWS[r["workload"]])) is not None]
    figures: dict[str, object] = {"date": time.strftime("%Y-%m-%d"), "command": "python -m benchmarks.roofline"}
    print(f"{len(rows)} of {len(census)} kernels of the census (attention left out)")
    models: dict[str, Callable[[Work, Device], float]] = {
        "roofline": lambda w, d: model_us(d, w.kind, w.flops, w.cold, w.warm),
        "dram-only": dram_only,
    }
    for workload in ("decode", "prefill"):
        here = [(*real(r), w, r["kernel"]) for r, w in rows if r["workload"] == workload]
        small = [x for x in here if x[0] < 10]
        faster = sum(a > b for a, b, _, _ in small)
        if small:
            print(f"{workload}: {faster} of its {len(small)} kernels under 10 µs are faster on the L40S")
        for name, us in models.items():
            right = [(us(w, a100) > us(w, l40s)) == (a > b) for a, b, w, _ in here]
            right_small = sum((us(w, a100) > us(w, l40s)) == (a > b) for a, b, w, _ in small)
            figures[f"{workload} {name} right"] = agreement = sum(right) / len(right)
            print(
                f"{workload} {name}: says rightly which is faster for {sum(right)} of {len(right)} kernels ({agreement:.1%})"
                + (f", {right_small} of {len(small)} under 10 µs" if small else "")
            )
            for kind in sorted({w.kind for *_, w, _ in here}):
                cells = []
                for device, column in ((a100, 0), (l40s, 1)):
                    ratios = [us(x[2], device) / x[column] for x in here if x[2].kind == kind]
                    error = statistics.median(abs(r - 1) for r in ratios)
                    figures[f"{workload} {name} {kind} {device.name}"] = error
                    cells.append(f"{device.name} {error:.0%} (model / real {statistics.median(ratios):.2f})")
                print(f"    {kind}: median error {', '.join(cells)}")
    for text in ("a100-80gb,l40s", "h100-sxm,rtx-pro-6000", "b200,h100-sxm"):
        first, second = make_cluster(text).devices
        figures[f"ceiling {text}"] = found = ceiling(first, second)
        print(f"ceiling of any mix of kernels on {text}: {found:.3f}× replicas")
    same_clock = [replace(d, boost_ghz=1.5) for d in (a100, l40s)]
    right = [(lambda a, b: a > b)(*(models["roofline"](w, d) for d in same_clock)) == (real(r)[0] > real(r)[1]) for r, w in rows]
    figures["right with one clock"] = clockless = sum(right)
    print(f"with one clock for both GPUs the roofline would be right for {clockless} of {len(rows)}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
