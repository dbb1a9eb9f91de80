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


def mamba() -> Example:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=128, hidden_size=32, state_size=8, num_hidden_layers=2)
    return Example(MambaForCausalLM(config).eval(), {"input_ids": _ids(128, 8), "use_cache": False})


def qwen2_vl() -> Example:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
    tokens = {"vision_start_token_id": 120, "vision_end_token_id": 121, "image_token_id": 122, "video_token_id": 123}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
    ids = _ids(119, 12)
    ids[0, 2], ids[0, 3:7], ids[0, 7] = 120, 122, 121  # One image of 4 × 4 patches, merged two by two.
    generator = torch.Generator().manual_seed(4)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == 122).int(),
        "use_cache": False,
    }
    return Example(Qwen2VLForConditionalGeneration(config).eval(), inputs)


def vit() -> Example:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8
    )
    image = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    return Example(ViTForImageClassification(config).eval(), {"pixel_values": image})


def dit() -> Example:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(6)
    inputs = {
        "hidden_states": torch.randn(1, 4, 8, 8, generator=generator),
        "timestep": torch.tensor([7]),
        "class_labels": torch.tensor([3]),
    }
    return Example(model.eval(), inputs)


def whisper() -> Example:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=128, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=16, max_source_positions=32, max_target_positions=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    sound = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(7))
    inputs = {"input_features": sound, "decoder_input_ids": _ids(128, 8), "use_cache": False}
    return Example(WhisperForConditionalGeneration(config).eval(), inputs)


MODELS: dict[str, Callable[[], Example]] = {
    "llama": llama, "mixtral": mixtral, "bert": bert, "resnet50": resnet50, "t5": t5, "unet": unet, "mamba": mamba,
    "qwen2_vl": qwen2_vl, "vit": vit, "dit": dit, "whisper": whisper,
}  # fmt: skip
