"""Edges and bytes before and after refining, against the truth by hand: ``python -m benchmarks.refinement [--json FILE]``.

On a machine with a GPU the models run there, on two slices of it, with footprints of every kernel (``refine="always"``);
elsewhere on two CPU lanes with what the graph's views say. Each is also run on random placements and compared with eager.

The truth is a statement about the model, not about a compiler: which kernels pass bytes to which, and how many.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tessera_compile.compiler import report

N, WIDE = 64, 32


@dataclass(frozen=True)
class Case:
    """``schema``, ``truth``: bytes of the first matrix product, or of the cache, that cross if each reader is elsewhere."""

    function: Callable[..., Any]
    arguments: Callable[[str], list[torch.Tensor]]
    schema: int
    truth: int


def packed_heads(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor) -> Any:
    q, k, v = (x @ w).chunk(3, -1)
    return q @ a, k @ a, v @ a


def plain_cache(x: torch.Tensor, w: torch.Tensor, cache: torch.Tensor) -> Any:
    """One slot is written; what is returned to the caller is that slot."""
    cache[:, 5] = x @ w
    return (cache[:, :6] @ w).sum(1)


def paged_cache(x: torch.Tensor, w: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> Any:
    """Which slots are written is data: all of the cache may change."""
    cache[slots] = x @ w
    return cache.sum(0)


def chunked_experts(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor) -> Any:
    hidden = x @ w
    return torch.cat([part @ a for part in hidden.chunk(4, 0)])


F = 4  # bytes of an element
CASES = {
    # three readers of a product of N × 3·WIDE: all of it each, a third each
    "packed heads": Case(
        packed_heads,
        lambda d: [torch.randn(N, WIDE, device=d), torch.randn(WIDE, 3 * WIDE, device=d), torch.randn(WIDE, WIDE, device=d)],
        3 * N * 3 * WIDE * F,
        N * 3 * WIDE * F,
    ),
    # the cache N × 8 × WIDE goes home: all of it, one slot
    "plain cache": Case(
        plain_cache,
        lambda d: [torch.randn(N, WIDE, device=d), torch.randn(WIDE, WIDE, device=d), torch.zeros(N, 8, WIDE, device=d)],
        N * 8 * WIDE * F,
        N * WIDE * F,
    ),
    "paged cache": Case(
        paged_cache,
        lambda d: [
            torch.randn(N, WIDE, device=d), torch.randn(WIDE, WIDE, device=d), torch.zeros(2 * N, WIDE, device=d),
            torch.arange(0, 2 * N, 2, device=d),
        ],
        2 * N * WIDE * F,
        2 * N * WIDE * F,
    ),
    # four experts read a quarter of N × WIDE each
    "chunked experts": Case(
        chunked_experts,
        lambda d: [torch.randn(N, WIDE, device=d), torch.randn(WIDE, WIDE, device=d), torch.randn(WIDE, WIDE, device=d)],
        4 * N * WIDE * F,
        N * WIDE * F,
    ),
}  # fmt: skip


def crossing(graph: Any, refined: bool) -> int:
    """Bytes of the first product, or of the new version of the cache, over all that need them."""
    kernels, ddg = graph.kernels, graph.ddg
    if kernels.mutated:
        (version,) = kernels.mutated.values()
        boxes = ddg.graph.get("writes", {}).get(version, ()) if refined else ()
        return sum(b.nbytes for b in boxes) or kernels.values[version].bytes
    first = kernels.kernels[0].outputs[0]
    deps = [d for _, _, data in ddg.edges(data=True) for d in data["deps"] if d.value == first and d.kind == "raw"]
    return sum(d.bytes for d in deps)


def compiled(case: Case, options: dict[str, Any]) -> Any:
    torch._dynamo.reset()
    return torch.compile(case.function, backend="tessera", options=options)


def measure(name: str, case: Case, device: str) -> dict[str, Any]:
    cluster = "cuda:0/56sm,cuda:0/64sm" if device == "cuda" else "2xcpu"
    options = {"cluster": cluster, "codegen": "inductor" if device == "cuda" else "eager", "profile": "model"}
    found: dict[str, Any] = {}
    for how in ("off", "always"):
        call = compiled(case, {**options, "planner": "alternate", "refine": how})
        with torch.no_grad():
            call(*case.arguments(device))
        (graph,) = report(call).graphs
        found[how] = crossing(graph, how != "off")
        if how == "always":
            found["edges"] = graph.ddg.number_of_edges()
            found["evidence"] = sorted({d.evidence for _, _, deps in graph.ddg.edges(data="deps") for d in deps})
            found["seconds"] = {s: t for s, t in graph.seconds.items() if s in ("refine", "probe", "evidence", "compile")}
        else:
            found["edges_before"] = graph.ddg.number_of_edges()
    worst = 0.0
    for seed in range(2 if device == "cuda" else 6):
        call = compiled(case, {**options, "planner": f"random:{seed}", "refine": "always"})
        torch.manual_seed(seed)
        given = case.arguments(device)
        mine = [g.clone() for g in given]
        with torch.no_grad():
            got, want = call(*mine), case.function(*given)
        pairs = zip(
            [*(got if isinstance(got, tuple) else [got]), *mine],
            [*(want if isinstance(want, tuple) else [want]), *given],
            strict=True,
        )
        worst = max([worst, *(float((a.double() - b.double()).abs().max()) for a, b in pairs)])
    row = {
        "schema": found["off"], "refined": found["always"], "expected": [case.schema, case.truth],
        "right": (found["off"], found["always"]) == (case.schema, case.truth), "edges": [found["edges_before"], found["edges"]],
        "evidence": found["evidence"], "largest_difference": worst, "seconds": found["seconds"],
    }  # fmt: skip
    verdict = "equal" if row["right"] else "WRONG"
    print(
        f"{name:16} {row['schema']:>8} -> {row['refined']:>8} B (by hand {case.schema} -> {case.truth}: {verdict}); "
        f"edges {found['edges_before']} -> {found['edges']}; {', '.join(found['evidence'])}; against eager {worst:.2g}"
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = {name: measure(name, case, device) for name, case in CASES.items()}
    if given.json:
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        record = {"device": name, "date": time.strftime("%Y-%m-%d"), "command": "python -m benchmarks.refinement", "rows": rows}
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
