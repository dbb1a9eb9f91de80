"""Recorded = interpreted = analytic on a GPU, and what recording costs: ``python -m benchmarks.gpu.ptx_dryrun [--json FILE]``.

Each Triton kernel runs as it is and instrumented on copies of its tensors. The recorded footprints must equal those of the
slice interpreter and those written out here by hand, results must be bit-equal (atomics: equal as sums); then run times are
compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tessera_compile.ptx_tools import Footprint, Intervals, NotDerivable, TensorMap, footprint, parse, verdict
from tessera_compile.runtime.dryrun import Arena, recording

ROOT = Path(__file__).parents[2]


def kernels() -> Any:
    spec = importlib.util.spec_from_file_location("triton_kernels", ROOT / "tests/data/ptx/triton_kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["triton_kernels"] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Case:
    """One launch. ``run(arena)`` launches and returns the compiled kernel; ``expected``: name → (reads, writes)."""

    name: str
    tensors: dict[str, torch.Tensor]
    run: Callable[[Any], Any]
    grid: tuple[int, ...]
    expected: dict[str, tuple[Intervals, Intervals]]
    params: dict[str, int] = field(default_factory=dict)  # tensor → index of its kernel parameter
    scalars: dict[int, Any] = field(default_factory=dict)  # parameter index → int, or a map of a tensor
    maps: Callable[[Any], dict[int, TensorMap]] | None = None
    exact: bool = True
    known: tuple[str, ...] = ()  # tensors whose contents the interpreter may use


NONE = Intervals.of(())


def all_of(t: torch.Tensor) -> Intervals:
    return Intervals.of([(0, t.numel() * t.element_size())])


def rows(count: int, pitch: int, width: int) -> Intervals:
    return Intervals.of([(i * pitch, i * pitch + width) for i in range(count)])


def cases() -> list[Case]:
    k = kernels()
    cuda = "cuda"
    made = []

    n = 100_003
    x, y, o = torch.randn(n, device=cuda), torch.randn(n, device=cuda), torch.zeros(n, device=cuda)
    made.append(
        Case(
            "add", {"x": x, "y": y, "o": o}, lambda a: k.k_add[(98,)](a["x"], a["y"], a["o"], n, BLOCK=1024), (98,),
            {"x": (all_of(x), NONE), "y": (all_of(y), NONE), "o": (NONE, all_of(o))}, {"x": 0, "y": 1, "o": 2}, {3: n},
        )
    )  # fmt: skip

    r, c = 777, 1000
    sx, so = torch.randn(r, 1024, device=cuda), torch.zeros(r, 1024, device=cuda)
    used = rows(r, 4096, 4 * c)
    made.append(
        Case(
            "softmax", {"o": so, "x": sx},
            lambda a: k.k_softmax[(200,)](a["o"], a["x"], 1024, 1024, r, c, BLOCK=1024), (200,),
            {"x": (used, NONE), "o": (NONE, used)}, {"o": 0, "x": 1}, {2: 1024, 3: 1024, 4: r, 5: c},
        )
    )  # fmt: skip

    m, nn, kk = 1000, 1024, 512
    a_, b_ = torch.randn(m, kk, device=cuda, dtype=torch.float16), torch.randn(kk, nn, device=cuda, dtype=torch.float16)
    c_ = torch.zeros(m, nn, device=cuda, dtype=torch.float16)
    grid = (8 * 8,)
    made.append(
        Case(
            "matmul", {"a": a_, "b": b_, "c": c_},
            lambda t: k.k_matmul[grid](
                t["a"], t["b"], t["c"], m, nn, kk, kk, 1, nn, 1, nn, 1, BM=128, BN=128, BK=64, GM=8, num_warps=8, num_stages=3
            ),
            grid, {"a": (all_of(a_), NONE), "b": (all_of(b_), NONE), "c": (NONE, all_of(c_))}, {"a": 0, "b": 1, "c": 2},
            {3: m, 4: nn, 5: kk, 6: kk, 7: nn, 8: nn},
        )
    )  # fmt: skip

    bt = torch.randn(nn, kk, device=cuda, dtype=torch.float16)
    if hasattr(sys.modules.get("triton.tools.tensor_descriptor"), "TensorDescriptor") or _descriptors():
        from triton.tools.tensor_descriptor import TensorDescriptor

        def tma(t: Any) -> Any:
            def d(name: str, box: list[int]) -> Any:
                tensor = t[name]
                return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box)

            return k.k_matmul_tma_host[grid](
                d("a", [128, 64]), d("b", [128, 64]), d("c", [128, 128]), m, nn, kk, BM=128, BN=128, BK=64, num_stages=3
            )

        made.append(
            Case(
                "matmul_tma", {"a": a_, "b": bt, "c": c_}, tma, grid,
                {"a": (all_of(a_), NONE), "b": (all_of(bt), NONE), "c": (NONE, all_of(c_))}, {"a": 0, "b": 5, "c": 10},
                {15: m, 16: nn, 17: kk},
                maps=lambda t: {
                    0: TensorMap(t["a"].data_ptr(), 2, (kk, m), (2 * kk,), (64, 128)),
                    5: TensorMap(t["b"].data_ptr(), 2, (kk, nn), (2 * kk,), (64, 128)),
                    10: TensorMap(t["c"].data_ptr(), 2, (nn, m), (2 * nn,), (64, 128)),
                },
            )
        )  # fmt: skip

    z, s, d = 3, 1000, 64
    q, kt, v = (torch.randn(z, s, d, device=cuda, dtype=torch.float16) for _ in range(3))
    fo, fl = torch.zeros_like(q), torch.zeros(z, s, device=cuda)
    made.append(
        Case(
            "flash_attention", {"q": q, "k": kt, "v": v, "o": fo, "l": fl},
            lambda t: k.k_flash[(8, z)](
                t["q"], t["k"], t["v"], t["o"], t["l"], 0.125, s * d, d, s * d, d, s * d, d, s * d, d, s, BM=128, BN=64, D=64,
                CAUSAL=True
            ),
            (8, z),
            {**{n_: (all_of(q), NONE) for n_ in "qkv"}, "o": (NONE, all_of(fo)), "l": (NONE, all_of(fl))},
            {"q": 0, "k": 1, "v": 2, "o": 3, "l": 4},
            {5: 0.125, 6: s * d, 7: d, 8: s * d, 9: d, 10: s * d, 11: d, 12: s * d, 13: d, 14: s},
        )
    )  # fmt: skip

    an = 5000
    ax, ao = torch.ones(an, device=cuda), torch.zeros(128, device=cuda)
    cnt, lock = torch.zeros(2, device=cuda, dtype=torch.int32), torch.zeros(1, device=cuda, dtype=torch.int32)
    h = torch.zeros(an, device=cuda, dtype=torch.float16)
    made.append(
        Case(
            "atomics", {"x": ax, "o": ao, "cnt": cnt, "lock": lock, "h": h},
            lambda t: k.k_atomics[(10,)](t["x"], t["o"], t["cnt"], t["lock"], t["h"], an, BLOCK=512), (10,),
            {"x": (all_of(ax), NONE), **{n_: (all_of(t_), all_of(t_)) for n_, t_ in (("o", ao), ("cnt", cnt), ("lock", lock),
            ("h", h))}}, {"x": 0, "o": 1, "cnt": 2, "lock": 3, "h": 4}, {5: an}, exact=False,
        )
    )  # fmt: skip

    picks = torch.tensor([5, 0, 99, 5, 31, 64], device=cuda)
    table, out = torch.randn(100, 200, device=cuda), torch.zeros(6, 200, device=cuda)
    touched = Intervals.of([(int(i) * 800, int(i) * 800 + 800) for i in picks])
    made.append(
        Case(
            "gather", {"idx": picks, "w": table, "o": out},
            lambda t: k.k_gather[(6,)](t["idx"], t["w"], t["o"], 6, 200, BD=256), (6,),
            {"idx": (all_of(picks), NONE), "w": (touched, NONE), "o": (NONE, all_of(out))}, {"idx": 0, "w": 1, "o": 2},
            {3: 6, 4: 200}, known=("idx",),
        )
    )  # fmt: skip
    return made


def _descriptors() -> bool:
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: F401
    except ImportError:
        return False
    return True


def timed(run: Callable[[], Any], launches: int = 20, repeats: int = 15) -> float:
    """Median µs a launch, of launches captured in one CUDA graph so that Python's launch time does not count."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
    return sorted(times[3:])[repeats // 2]


def interpreted(case: Case, compiled: Any, arena: Arena) -> tuple[Footprint, float]:
    from dataclasses import replace

    module = parse(compiled.asm["ptx"], name=case.name)
    params = [p.name for p in module.kernel(None).params or ()]
    args: dict[str, Any] = {params[i]: value for i, value in case.scalars.items()}
    for name, i in case.params.items():
        buffer = arena.buffers[name]
        if name in case.known:
            buffer = replace(buffer, contents=arena[name].cpu().numpy())
        args[params[i]] = buffer
    for i, map_ in (case.maps(arena) if case.maps else {}).items():
        args[params[i]] = map_
    started = time.perf_counter()
    found = footprint(module, None, case.grid, 32 * compiled.metadata.num_warps, args, shared_bytes=compiled.metadata.shared)
    return found, time.perf_counter() - started


def check(case: Case, scheme: str) -> dict[str, Any]:
    plain = Arena(case.tensors)
    compiled = case.run(plain)
    torch.cuda.synchronize()
    plain = Arena(case.tensors)
    case.run(plain)
    arena = Arena(case.tensors)
    module = parse(compiled.asm["ptx"], name=case.name)
    params = [p.name for p in module.kernel(None).params or ()]
    maps = {params[i]: m for i, m in (case.maps(arena) if case.maps else {}).items()}
    started = time.perf_counter()
    with recording(compiled, arena, scheme=scheme, maps=maps) as record:
        built = time.perf_counter() - started
        case.run(arena)
    recorded = record.footprint
    for name in case.tensors:
        same = torch.equal(plain[name], arena[name]) if case.exact else torch.allclose(plain[name], arena[name])
        assert same, f"{case.name}: {name} differs when instrumented"
    found, seconds = interpreted(case, compiled, arena)
    for name, (reads, writes) in case.expected.items():
        got, sliced = recorded[name], found[params[case.params[name]]]
        assert (got.reads, got.writes) == (reads, writes), f"{case.name}: {name} recorded {got} expected {reads} {writes}"
        assert (sliced.reads, sliced.writes) == (reads, writes), f"{case.name}: {name} interpreted {sliced}"
    before = timed(lambda: case.run(plain))
    with recording(compiled, arena, scheme=scheme, maps=maps, events=1 << 24) as record:
        after = timed(lambda: case.run(arena))
    return {
        "verdict": str(verdict(module, None).kind),
        "build_ms": round(built * 1e3, 1),
        "interpret_ms": round(seconds * 1e3, 1),
        "registers": record.registers,
        "plain_us": round(before, 1),
        "instrumented_us": round(after, 1),
        "ratio": round(after / before, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.gpu.ptx_dryrun",
        "torch": torch.__version__,
    }
    failed = []
    for scheme in ("shadow", "bitmap"):
        for case in cases():
            try:
                results[f"{case.name} {scheme}"] = row = check(case, scheme)
                print(f"{case.name:16} {scheme:7} exact  {row}")
            except (AssertionError, NotDerivable, RuntimeError, ValueError) as error:
                failed.append(case.name)
                results[f"{case.name} {scheme}"] = {"error": str(error)[:500]}
                print(f"{case.name:16} {scheme:7} FAILED {type(error).__name__}: {str(error)[:600]}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
