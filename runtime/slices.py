"""Some boxes of a tensor's bytes: as views, and copied into room for the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..passes import torch_compat
from ..ptx_tools.footprints import Box

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def part_views(tensor: torch.Tensor, boxes: Sequence[Box]) -> list[torch.Tensor]:
    """For each box a view of those bytes, counted from the tensor's first element, as the widest integers that fit."""
    views = []
    for box in boxes:
        first = int(tensor.storage_offset()) * tensor.element_size() + box.start
        width = math.gcd(first, box.shape[-1], *box.strides[:-1], 8)
        raw = torch.empty(0, dtype=_WORDS[width], device=tensor.device)
        shape, strides = (*box.shape[:-1], box.shape[-1] // width), (*(s // width for s in box.strides[:-1]), 1)
        # On the storage itself: record_stream does nothing for a piece of one, and its memory would be handed out too early.
        views.append(raw.set_(tensor.untyped_storage(), first // width, shape, strides))
    return views


def room_for(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Uninitialised memory for a tensor of the same shape and strides, which means the same numbers by the same bytes."""
    room = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device)
    room = room.conj() if tensor.is_conj() else room
    return torch_compat.negative_view(room) if tensor.is_neg() else room


def update_part(tensor: torch.Tensor, new: torch.Tensor, boxes: Sequence[Box]) -> None:
    """Copies the boxes of ``new`` into ``tensor``, which has its shape and strides."""
    for view, source in zip(part_views(tensor, boxes), part_views(new, boxes), strict=True):
        view.copy_(source)


def own_part(tensor: torch.Tensor, boxes: Sequence[Box]) -> torch.Tensor:
    """A tensor of the same shape and strides in memory of its own, of which only the boxes hold anything."""
    room = room_for(tensor)
    update_part(room, tensor, boxes)
    return room
