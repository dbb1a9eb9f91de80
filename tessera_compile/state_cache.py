"""A key-value cache whose layers live on the device where the plan writes them: ``tessera_compile.StateCache``.

    cache = tessera_compile.StateCache(model.config, max_cache_len=512)
    out = compiled(input_ids=ids, past_key_values=cache, use_cache=True)

It is transformers' ``StaticCache``, for whatever takes one (``generate`` too), with tensors that are allocated at once and marked
as state that lanes may keep (``runtime/state_homes.py``). This module is imported when the class is first asked for, and is the
only one that needs transformers.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from .passes.errors import OptionsError, TesseraWarning
from .runtime.state_homes import HOMES, mark

if TYPE_CHECKING:
    # Its own types are those of whatever release is installed.
    StaticCache = Any
else:
    try:
        from transformers import StaticCache
    except ImportError as error:
        raise ImportError("tessera_compile.StateCache is a transformers cache: pip install transformers") from error


class StateCache(StaticCache):  # type: ignore[misc]
    """One conversation's, or one batch of conversations', keys and values.

    Args:
        config: the model's configuration, which says what its layers cache.
        max_cache_len: tokens that it holds.
        batch_size: rows.
        dtype: of keys and values; by default the configuration's, else float32.
        device: where the caller's tensors are, by default ``"cpu"``.
        num_heads, head_dim: of keys and values, of all layers or a list of one for each; by default as the configuration says.

    A graph that overwrites a layer gives it to the lane of the kernel that does: no other lane holds a copy of it, and what was
    written is not sent to the caller, who reads the same storage (``layer.keys``) and sees it. Programs whose homes differ move
    a layer once when they change. Layers that cannot be allocated beforehand (of linear attention) stay with the caller, which a
    warning says.

    Raises:
        OptionsError: the configuration does not say how many heads there are or how wide, or the sizes are not positive.
    """

    def __init__(
        self,
        config: Any,
        max_cache_len: int,
        batch_size: int = 1,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        num_heads: int | list[int] | None = None,
        head_dim: int | list[int] | None = None,
    ) -> None:
        for name, number in (("max_cache_len", max_cache_len), ("batch_size", batch_size)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise OptionsError(f"{name}={number!r}; it takes a whole number from 1")
        super().__init__(config=config, max_cache_len=max_cache_len)
        text = config.get_text_config(decoder=True)
        heads = num_heads or getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
        width = head_dim or getattr(text, "head_dim", None)
        if not width and getattr(text, "hidden_size", None) and getattr(text, "num_attention_heads", None):
            width = text.hidden_size // text.num_attention_heads
        if not heads or not width:
            raise OptionsError(
                f"{type(config).__name__} does not say how many heads keys and values have or how wide they are; give num_heads "
                "and head_dim"
            )
        made = dtype or getattr(text, "dtype", None) or torch.float32
        self.early_initialization(batch_size, heads, width, made, torch.device(device))
        left = []
        for number, layer in enumerate(self.layers):
            tensors = {name: x for name, x in vars(layer).items() if isinstance(x, torch.Tensor)}
            if not getattr(layer, "is_initialized", False) or not tensors:
                left.append(number)
            for name, tensor in tensors.items():
                # Transformers has tied compiled code to the address of its own: other conversations would compile anew.
                own = torch.zeros_like(tensor)
                mark(own)
                setattr(layer, name, own)
        if left:
            warnings.warn(
                f"layers {', '.join(map(str, left))} of a StateCache cannot be allocated beforehand and stay with the caller",
                TesseraWarning,
                stacklevel=2,
            )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorders the rows, for beam search, in the storage where they are.

        Args:
            beam_idx: int64 [batch_size], for each row the one whose content it takes.
        """
        for layer in self.layers:
            for name in ("keys", "values"):
                tensor = getattr(layer, name, None)
                if tensor is not None:
                    tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def homes(self) -> list[dict[str, str | None]]:
        """For each layer the device where each of its tensors lives; None: no compiled graph has written it yet."""
        return [{name: HOMES.of(x) for name, x in vars(layer).items() if isinstance(x, torch.Tensor)} for layer in self.layers]
