"""One lane against plain Inductor, and two CPU lanes against one: ``python -m benchmarks.parity [--json FILE] [MODEL …]``.

Five models whose step takes over 10 ms, everything at one thread. Run time: both sides are compiled in one process and called in
turn, so that whatever else the machine does falls on both; the median of the calls is printed as a ratio. Compile time: the first
call in a fresh process, with an empty Inductor cache (cold) and again with what it left (warm), the two sides in turn.

The towers are two independent stacks of matrix products of hidden size 512 that one lane must run one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def llama() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=1024, hidden_size=384, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=6,
                         num_key_value_heads=6)  # fmt: skip
    return LlamaForCausalLM(config), {"input_ids": torch.randint(0, 1024, (1, 128)), "use_cache": False}


def bert() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=1024, hidden_size=384, intermediate_size=1536, num_hidden_layers=3, num_attention_heads=6)
    ids = torch.randint(0, 1024, (1, 128))
    return BertModel(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def vit() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=384, num_hidden_layers=3, num_attention_heads=6, intermediate_size=1536, image_size=96, patch_size=8
    )
    return ViTForImageClassification(config), {"pixel_values": torch.randn(1, 3, 96, 96)}


def resnet() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=10
    )
    return ResNetForImageClassification(config), {"pixel_values": torch.randn(1, 3, 128, 128)}


def unet() -> tuple[torch.nn.Module, dict[str, Any]]:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=32, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    inputs = {
        "sample": torch.randn(1, 4, 32, 32),
        "timestep": torch.tensor([10]),
        "encoder_hidden_states": torch.randn(1, 8, 32),
    }
    return model, inputs


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, dict[str, Any]]]] = {
    "llama": llama, "bert": bert, "vit": vit, "resnet": resnet, "unet": unet,
}  # fmt: skip
ONE_LANE: dict[str, Any] = {"cluster": "cpu"}


class Towers(torch.nn.Module):
    """Two stacks that share nothing but their input."""

    def __init__(self, hidden: int = 512, layers: int = 4) -> None:
        super().__init__()
        self.left, self.right = (
            torch.nn.Sequential(*[m for _ in range(layers) for m in (torch.nn.Linear(hidden, hidden), torch.nn.ReLU())])
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)


def compiled(model: Callable[..., Any], backend: str, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=backend, options=options or None)


def in_turn(sides: dict[str, Callable[[], Any]], seconds: float = 6.0) -> dict[str, list[float]]:
    """Milliseconds of each side, called in turn for ``seconds`` after three calls to warm up."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(3):
        for call in sides.values():
            call()
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        for name, call in sides.items():
            begin = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def run_time(name: str) -> dict[str, float]:
    model, inputs = MODELS[name]()
    model.eval()
    with torch.no_grad():
        ours = compiled(model, "tessera", **ONE_LANE)
        expected = torch.utils._pytree.tree_leaves(dict(model(**inputs)))
        for a, e in zip(torch.utils._pytree.tree_leaves(dict(ours(**inputs))), expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-3)
        theirs = compiled(model, "inductor")
        theirs(**inputs)
        times = in_turn({"tessera": lambda: ours(**inputs), "inductor": lambda: theirs(**inputs)})
    mine, peer = (statistics.median(times[side]) for side in ("tessera", "inductor"))
    return {"tessera_ms": mine, "inductor_ms": peer, "ratio": mine / peer, "calls": len(times["tessera"])}


def first_call(name: str, backend: str) -> float:
    model, inputs = MODELS[name]()
    model.eval()
    with torch.no_grad():
        begin = time.perf_counter()  # torch.compile included: with backend="inductor" it already imports Inductor.
        call = compiled(model, backend, **(ONE_LANE if backend == "tessera" else {}))
        call(**inputs)
        return time.perf_counter() - begin


def compile_time(name: str, directory: str) -> dict[str, float]:
    """Cold and warm seconds of both sides, with caches below ``directory``; warm is the median of two."""
    found: dict[str, float] = {}
    directories = {side: f"{directory}/{side}" for side in ("tessera", "inductor")}
    for side, directory in directories.items():
        found[f"{side}_cold_s"] = _fresh(name, side, directory)
    warm: dict[str, list[float]] = {side: [] for side in directories}
    for _ in range(2):
        for side, directory in directories.items():
            warm[side].append(_fresh(name, side, directory))
    found |= {f"{side}_warm_s": statistics.median(times) for side, times in warm.items()}
    return {**found, "cold_ratio": found["tessera_cold_s"] / found["inductor_cold_s"],
            "warm_ratio": found["tessera_warm_s"] / found["inductor_warm_s"]}  # fmt: skip


def _fresh(name: str, backend: str, cache: str) -> float:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TESSERA_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.parity", "--first-call", name, backend]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def towers() -> dict[str, float]:
    """Two towers on one lane and on two, one thread a lane."""
    import tessera_compile

    model, x = Towers().eval(), torch.randn(512, 512)
    with torch.no_grad():
        one = compiled(model, "tessera", **ONE_LANE)
        two = compiled(model, "tessera", cluster="2xcpu", pins={"left": "cpu#0", "right": "cpu#1"})
        torch.testing.assert_close(two(x), model(x), rtol=1e-3, atol=1e-3)
        one(x)
        times = in_turn({"one": lambda: one(x), "two": lambda: two(x)}, 10.0)
    plan = tessera_compile.report(two).graphs[0].plan
    alone, both = (statistics.median(times[side]) for side in ("one", "two"))
    return {"one_lane_ms": alone, "two_lanes_ms": both, "speedup": alone / both, "predicted_two_lanes_ms": plan.makespan_us / 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="which models (default: all)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--first-call", nargs=2, metavar=("MODEL", "BACKEND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.first_call:
        print(first_call(*arguments.first_call))
        return
    figures: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores", "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.parity",
    }  # fmt: skip
    print("model    run ms tessera / inductor  ratio   first call s: cold tessera / inductor  ratio   warm  ratio")
    for name in arguments.models or MODELS:
        torch.compiler.reset()
        with tempfile.TemporaryDirectory() as directory:
            compiling = compile_time(name, directory)
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{directory}/inductor"  # What was compiled need not be compiled again.
            figures[name] = f = {**run_time(name), **compiling}
        print(
            f"{name:8} {f['tessera_ms']:14.2f} / {f['inductor_ms']:8.2f}  {f['ratio']:.3f}   {f['tessera_cold_s']:26.1f} / "
            f"{f['inductor_cold_s']:8.1f}   {f['cold_ratio']:.2f}   {f['tessera_warm_s']:.1f} / {f['inductor_warm_s']:.1f}   "
            f"{f['warm_ratio']:.2f}"
        )
    torch.compiler.reset()
    figures["towers"] = t = towers()
    print(
        f"two towers of hidden 512: one lane {t['one_lane_ms']:.2f} ms, two lanes {t['two_lanes_ms']:.2f} ms: "
        f"{t['speedup']:.2f}× (plan: {t['predicted_two_lanes_ms']:.2f} ms)"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
