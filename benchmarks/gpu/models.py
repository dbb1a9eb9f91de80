"""Models of the test suite at realistic sizes on two slices of one GPU: ``python -m benchmarks.gpu.models [NAME] [--tiny]``.

With random weights, each against eager:

- uncompiled segments under a random placement for each policy. They run the operators of the lowered graph, which AOTAutograd has
  decomposed, so they are held, bit for bit, against that graph run uncompiled on the whole GPU. Where libraries choose other
  algorithms on a slice, so that the two differ, against each kernel's operators on that kernel's own slice, one after the other;
- Inductor's segments under the plan for each policy, issued from the host and replayed from a captured graph, beside what
  Inductor alone differs from eager.

Prints one line of JSON. ``--tiny``: the sizes of the tests, on two CPU lanes, to try the code where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tessera_compile import make_cluster
from tessera_compile.compiler import executors, report
from tessera_compile.passes import depend, partition, schedule, verify
from tessera_compile.passes.ir import KernelGraph, Run
from tessera_compile.passes.placements import place
from tessera_compile.runtime.codegen import Codegen, eager_call
from tessera_compile.runtime.cpu_lanes import CpuLaneExecutor
from tessera_compile.runtime.cuda_lanes import CudaLaneExecutor
from tessera_compile.runtime.cuda_streams import lane_streams
from tessera_compile.runtime.roofline import model_profile
from tests.capture import Capture
from tests.models import MODELS as TINY
from tests.models import Example

SLICES = "cuda:0/56sm,cuda:0/64sm"


def _ids(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, shape)


def llama() -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=1024,
    )  # fmt: skip
    return Example(LlamaForCausalLM(config), {"input_ids": _ids(32000, 1, 512), "use_cache": False})


def mixtral() -> Example:
    """Mixtral 8x7B's widths, two layers."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(vocab_size=32000, num_hidden_layers=2, max_position_embeddings=1024)
    return Example(MixtralForCausalLM(config), {"input_ids": _ids(32000, 1, 128), "use_cache": False})


def bert() -> Example:
    """BERT-base."""
    from transformers import BertConfig, BertModel

    ids = _ids(30000, 8, 128)
    return Example(BertModel(BertConfig()), {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def resnet50() -> Example:
    from transformers import ResNetConfig, ResNetForImageClassification

    return Example(ResNetForImageClassification(ResNetConfig(num_labels=1000)), {"pixel_values": torch.randn(8, 3, 224, 224)})


def t5() -> Example:
    """T5-base's widths, four of twelve layers on each side."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=768, d_ff=3072, num_layers=4, num_decoder_layers=4, num_heads=12)
    inputs = {"input_ids": _ids(32000, 1, 256), "decoder_input_ids": _ids(32000, 1, 32), "use_cache": False}
    return Example(T5ForConditionalGeneration(config), inputs)


def unet() -> Example:
    """Stable Diffusion's widths and cross attention, three of its four levels, one block of two on each."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=64, layers_per_block=1, block_out_channels=(320, 640, 1280),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=768, attention_head_dim=8,
    )  # fmt: skip
    inputs = {
        "sample": torch.randn(2, 4, 64, 64),
        "timestep": torch.tensor([10, 10]),
        "encoder_hidden_states": torch.randn(2, 77, 768),
    }
    return Example(model, inputs)


def mamba() -> Example:
    """Mamba-130m's widths, six of 24 layers."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(hidden_size=768, num_hidden_layers=6)
    return Example(MambaForCausalLM(config), {"input_ids": _ids(50000, 1, 128), "use_cache": False})


def qwen2_vl() -> Example:
    """Qwen2-VL-2B's widths, two layers of text and of vision; one image of 224²."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = {
        "vocab_size": 32000, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 2, "num_attention_heads": 12,
        "num_key_value_heads": 2, "max_position_embeddings": 1024,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }  # fmt: skip
    vision = {"depth": 2, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2}
    tokens = {"vision_start_token_id": 31000, "vision_end_token_id": 31001, "image_token_id": 31002, "video_token_id": 31003}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
    ids = _ids(30000, 1, 96)
    ids[0, 2], ids[0, 3:67], ids[0, 67] = 31000, 31002, 31001  # 16 × 16 patches, merged two by two
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(256, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, 16, 16]]),
        "mm_token_type_ids": (ids == 31002).int(),
        "use_cache": False,
    }
    return Example(Qwen2VLForConditionalGeneration(config), inputs)


def vit() -> Example:
    """ViT-base/16."""
    from transformers import ViTConfig, ViTForImageClassification

    return Example(ViTForImageClassification(ViTConfig()), {"pixel_values": torch.randn(8, 3, 224, 224)})


def dit() -> Example:
    """DiT-XL/2's widths, four of 28 layers, latents of 256² images."""
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(num_attention_heads=16, attention_head_dim=72, in_channels=4, out_channels=8, num_layers=4,
                                  sample_size=32, patch_size=2)  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 32, 32),
        "timestep": torch.tensor([7, 500]),
        "class_labels": torch.tensor([3, 999]),
    }
    return Example(model, inputs)


def whisper() -> Example:
    """Whisper-small's widths, four of twelve layers on each side."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=768, encoder_layers=4, decoder_layers=4, encoder_attention_heads=12, decoder_attention_heads=12,
        encoder_ffn_dim=3072, decoder_ffn_dim=3072,
    )  # fmt: skip
    inputs = {"input_features": torch.randn(1, 80, 3000), "decoder_input_ids": _ids(50000, 1, 16), "use_cache": False}
    return Example(WhisperForConditionalGeneration(config), inputs)


#: With the dtype in which each is usually run; those that take longest to compile come first.
MODELS: dict[str, tuple[Callable[[], Example], torch.dtype]] = {
    "unet": (unet, torch.float16), "t5": (t5, torch.float32), "whisper": (whisper, torch.float16),
    "mamba": (mamba, torch.bfloat16),
    "qwen2_vl": (qwen2_vl, torch.bfloat16), "resnet50": (resnet50, torch.float32), "dit": (dit, torch.float16),
    "bert": (bert, torch.float16), "vit": (vit, torch.float16), "mixtral": (mixtral, torch.bfloat16),
    "llama": (llama, torch.bfloat16),
}  # fmt: skip


def make(name: str, device: torch.device) -> Example:
    """The model with random weights on ``device``, and one call's inputs there."""
    build, dtype = MODELS[name]
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)  # so that the largest are never held in 32 bits
    try:
        with device:
            example = build()
    finally:
        torch.set_default_dtype(torch.float32)
    return Example(example.model.eval().to(device, dtype), example.inputs)


def leaves(outputs: Any) -> list[torch.Tensor]:
    found = pytree.tree_leaves(dict(outputs) if hasattr(outputs, "keys") else outputs)
    return [x for x in found if isinstance(x, torch.Tensor)]


def kept(outputs: Any) -> list[torch.Tensor]:
    return [x.clone() for x in leaves(outputs)]


def difference(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """The largest, of all elements of all outputs; infinite where they are of unlike shape or not numbers."""
    assert want, "the model returns no tensor"
    if [x.shape for x in got] != [x.shape for x in want]:
        return float("inf")
    differences = [(g.double() - w.double()).abs().nan_to_num(nan=float("inf")).max() for g, w in zip(got, want, strict=True)]
    return float(torch.stack(differences).max())


class OneByOne(torch.fx.Interpreter):
    """Runs a lowered graph operator by operator, each on the slice that its kernel is placed on, and waits for each."""

    def __init__(self, graph: KernelGraph, placement: dict[str, str], cluster: Any) -> None:
        super().__init__(graph.module)
        streams = dict(zip(cluster.names, lane_streams(cluster.names), strict=True))
        self.stream_of = {node: streams[placement[k.name]].compute for k in graph.kernels for node in k.nodes}

    def run_node(self, n: torch.fx.Node) -> Any:
        with torch.cuda.stream(self.stream_of.get(n.name)):  # None: the current one
            result = super().run_node(n)
        torch.cuda.synchronize()
        return result


def uncompiled(example: Example, eager: list[torch.Tensor], cluster: Any) -> dict[str, Any]:
    """Random placements with uncompiled segments, one for each policy."""
    captured = Capture(example.model, example.inputs)
    for number, graph in enumerate(captured.graphs):
        captured.run[number] = eager_call(graph.module)
    lowered = kept(captured())
    row: dict[str, Any] = {
        "graphs": len(captured.graphs),
        "kernels": sum(len(g.kernels) for g in captured.graphs),
        "lowered_from_eager": difference(lowered, eager),
    }
    for seed, policy in enumerate(("throughput", "latency")):
        crossing, plans = 0, []
        for number, graph in enumerate(captured.graphs):
            ddg, times = depend(graph), model_profile(graph, cluster.devices)
            placement = place(f"random:{seed}", ddg, times, cluster)
            plan = partition(ddg, times, cluster, objective=policy, placement=placement, planner="random", time_limit=0)
            program = schedule(ddg, plan)
            verify(program, ddg, plan)
            how = CudaLaneExecutor if cluster.devices[0].kind == "cuda" else CpuLaneExecutor
            captured.run[number] = how(graph, program, Codegen("eager"), poison=True)
            plans.append(plan)
            crossing += plan.cut_values
        got = kept(captured())
        found: dict[str, Any] = {
            "crossing_values": crossing,
            "from_lowered": difference(got, lowered),
            "from_eager": difference(got, eager),
        }
        if found["from_lowered"] and cluster.devices[0].kind == "cuda":
            for number, graph in enumerate(captured.graphs):
                one = OneByOne(graph, dict(plans[number].placement), cluster)
                captured.run[number] = lambda args, one=one: list(one.run(*args))
            found["from_lowered_on_slices"] = difference(got, kept(captured()))
        row[policy] = found
    return row


def compiled_by(example: Example, calls: int, **how: Any) -> tuple[Any, list[list[torch.Tensor]], float]:
    """What ``torch.compile`` made of the model, the outputs of so many calls, and the seconds until the first were there."""
    torch._dynamo.reset()
    started = time.perf_counter()
    compiled = torch.compile(example.model, **how)
    results = []
    first = 0.0
    with torch.no_grad():
        for _ in range(calls):
            results.append(kept(compiled(**example.inputs)))
            first = first or time.perf_counter() - started
    return compiled, results, first


def check(name: str, tiny: bool = False) -> dict[str, Any]:
    """Everything that is to be known of one model."""
    torch._dynamo.config.recompile_limit = 64
    cluster_text = "2xcpu" if tiny else SLICES
    cluster, cuda = make_cluster(cluster_text), not tiny
    torch.manual_seed(0)
    example = TINY[name]() if tiny else make(name, torch.device("cuda:0"))
    with torch.no_grad():
        eager = kept(example.model(**example.inputs))
    row: dict[str, Any] = {
        "dtype": str(next(example.model.parameters()).dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in example.model.parameters()),
        "largest_output": max(float(x.abs().max()) for x in eager if x.is_floating_point()),
        "uncompiled": uncompiled(example, eager, cluster),
    }
    _, (alone,), seconds = compiled_by(example, 1, backend="inductor")
    row["inductor"] = {"from_eager": difference(alone, eager), "first_call_s": seconds}
    for policy in ("throughput", "latency"):
        options = {
            "cluster": cluster_text, "policy": policy, "profile": "model", "time_limit": 3.0, "cuda_graphs": cuda,
        }  # fmt: skip
        # The first call with a signature runs as it is, the second is captured, the third replays.
        compiled, results, seconds = compiled_by(example, 3, backend="tessera", options=options)
        made = report(compiled)
        found = executors(compiled)
        row[policy] = {
            "segments": sum(isinstance(i, Run) for g in made.graphs for _, _, i in g.program),
            "from_eager": difference(results[0], eager),
            "from_eager_replayed": difference(results[-1], eager),
            "replayed_from_issued": difference(results[-1], results[0]),
            "replays": [getattr(e, "replays", 0) for e in found],
            "uncaptured": sorted({r for g in made.graphs for r in g.uncaptured}),
            "crossing_values": sum(g.plan.cut_values for g in made.graphs),
            "fallbacks": [*made.fallbacks, *(f for g in made.graphs for f in g.fallbacks)],
            "first_call_s": seconds,
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(json.dumps(check(arguments.name, arguments.tiny)))


if __name__ == "__main__":
    main()
