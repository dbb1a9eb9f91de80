"""Copies of tensors to run kernels on, so that nothing of the user's is launched on or overwritten."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..passes import torch_compat

_ALIGN = 256


def copies(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the tensors among ``values``, the rest as it is. Tensors that share storage share it in the copies too.

    Shapes, strides and dtypes are kept, and so is the place in the first 256 bytes: code that was compiled for aligned
    tensors gets aligned ones. Of a storage only what the tensors reach is copied.
    """
    spans: dict[int, tuple[int, int]] = {}
    for tensor in _plain(values):
        key, (low, high) = _storage(tensor), extent(tensor)
        before = spans.get(key, (low, high))
        spans[key] = (min(low, before[0]) // _ALIGN * _ALIGN, max(high, before[1]))
    memory: dict[int, torch.Tensor] = {}
    found: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            found[name] = value
        elif value.layout != torch.strided or value.numel() == 0:
            found[name] = value.detach().clone()
        else:
            key, (low, high), size = _storage(value), spans[_storage(value)], value.element_size()
            if key not in memory:
                source = storage_bytes(value)
                memory[key] = torch.zeros(-(-(high - low) // 16) * 16, dtype=torch.uint8, device=value.device)
                memory[key][: high - low].copy_(source[low:high])
            start = int(value.storage_offset()) - low // size
            view = torch.as_strided(memory[key].view(value.dtype), value.shape, value.stride(), start)
            view = view.conj() if value.is_conj() else view
            found[name] = torch_compat.negative_view(view) if value.is_neg() else view
    return found


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of a tensor in its storage."""
    size = tensor.element_size()
    low = int(tensor.storage_offset()) * size
    if tensor.numel() == 0:
        return low, low
    last = sum(int((n - 1) * s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (last + 1) * size


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage behind ``tensor``, as a view."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _plain(values: Mapping[str, Any]) -> list[torch.Tensor]:
    return [v for v in values.values() if isinstance(v, torch.Tensor) and v.layout == torch.strided and v.numel()]
