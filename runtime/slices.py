"""Some boxes of a tensor's bytes: as views, and copied into room for the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..ptx_tools.footprints import Box

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def part_views(tensor: torch.Tensor, boxes: Sequence[Box]) -> list[torch.Tensor]:
    """For each box a view of those bytes, counted from the tensor's first element, as the widest integers that fit."""
    views = []
    for box in boxes:
        first = int(tensor.storage_offset()) * tensor.element_size() + box.start
        width = math.gcd(first, box.shape[-1], *box.strides[:-1], 8)
        raw = torch.empty(0, dtype=_WORDS[width], device=tensor.device)
        raw.set_(tensor.untyped_storage()[: tensor.untyped_storage().nbytes() // width * width])  # type: ignore[call-overload]
        shape = (*box.shape[:-1], box.shape[-1] // width)
        views.append(torch.as_strided(raw, shape, (*(s // width for s in box.strides[:-1]), 1), first // width))
    return views


def room_for(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Uninitialised memory for a tensor of the same shape and strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device)


def own_part(tensor: torch.Tensor, boxes: Sequence[Box]) -> torch.Tensor:
    """A tensor of the same shape and strides in memory of its own, of which only the boxes hold anything."""
    room = room_for(tensor)
    for view, source in zip(part_views(room, boxes), part_views(tensor, boxes), strict=True):
        view.copy_(source)
    return room
