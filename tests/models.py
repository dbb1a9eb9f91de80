"""Small real models with random weights: the libraries' own code, a few layers, sizes that run in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Example:
    """A model in eval mode, and the keyword arguments of one call."""

    model: torch.nn.Module
    inputs: dict[str, Any]


def _ids(vocabulary: int, length: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(1))


def llama() -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    return Example(LlamaForCausalLM(config).eval(), {"input_ids": _ids(128, 16), "use_cache": False})


def mixtral() -> Example:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    return Example(MixtralForCausalLM(config).eval(), {"input_ids": _ids(128, 16), "use_cache": False})


def bert() -> Example:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    return Example(BertModel(config).eval(), {"input_ids": _ids(128, 16), "attention_mask": torch.ones(1, 16, dtype=torch.long)})


def resnet50() -> Example:
    from transformers import ResNetConfig, ResNetForImageClassification

    # The depths and bottlenecks of ResNet-50, narrow enough for a test.
    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32, 64, 128], depths=[3, 4, 6, 3], layer_type="bottleneck", num_labels=10
    )
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    return Example(ResNetForImageClassification(config).eval(), {"pixel_values": image})


def t5() -> Example:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_decoder_layers=2, num_heads=4)
    return Example(
        T5ForConditionalGeneration(config).eval(),
        {"input_ids": _ids(128, 16), "decoder_input_ids": _ids(128, 8), "use_cache": False},
    )


def unet() -> Example:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    inputs = {
        "sample": torch.randn(1, 4, 16, 16, generator=generator),
        "timestep": torch.tensor([10]),
        "encoder_hidden_states": torch.randn(1, 8, 32, generator=generator),
    }
    return Example(model.eval(), inputs)


MODELS: dict[str, Callable[[], Example]] = {
    "llama": llama, "mixtral": mixtral, "bert": bert, "resnet50": resnet50, "t5": t5, "unet": unet,
}  # fmt: skip
