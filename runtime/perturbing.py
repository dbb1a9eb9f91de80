"""Change what a kernel is said not to read, and see that it makes the same of it.

A check of footprints from outside, which works where there is no PTX. It can show that a claim is wrong, and never that it is
right: evidence ``probe`` adds dependences and removes none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..ptx_tools.footprints import Intervals
from .codegen import Compiled, lookup
from .copies import copies, extent, storage_bytes


def unread_holds(compiled: Compiled, values: Mapping[str, Any], reads: Mapping[str, Intervals]) -> bool | None:
    """Whether ``compiled`` makes the same, bit for bit, when the bytes that it is said not to read are others.

    Only floating-point values are changed: other numbers may be indices, and a kernel that reads them against what is said would
    go anywhere. None where the piece makes something else each time, so that nothing can be told.

    Args:
        values: its inputs by name; they are copied.
        reads: value → the bytes read of it, from its first element on. Values that are not there stay as they are.
    """
    given = {name: lookup(dict(values), name) for name in compiled.inputs}
    changed = [
        name
        for name in reads
        if isinstance(given.get(name), torch.Tensor) and given[name].is_floating_point() and given[name].numel()
    ]
    first, second = (_run(compiled, copies(given)) for _ in range(2))
    if any(not torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        return None
    own = copies(given)
    masks = {}
    for name in changed:
        mask = _unread(own[name], reads[name])
        before = _span(own[name])
        before.copy_(torch.where(mask, before ^ 0x55, before))  # never the same byte, and NaN for few floats
        masks[name] = mask
    start = {name: _span(own[name]).clone() for name in masks}
    plain = {name: _span(given[name]) for name in masks}
    third = _run(compiled, own)
    for number, (want, got) in enumerate(zip(first, third, strict=True)):
        same = want == got
        name = _written(compiled, number)
        if name in masks:  # what was changed and is not overwritten stays changed
            same = same | (masks[name] & (got == start[name]) & (want == plain[name]))
        if not bool(same.all()):
            return False
    return True


def _run(compiled: Compiled, own: Mapping[str, Any]) -> list[torch.Tensor]:
    """Bytes of what the piece returns and of the inputs that it overwrites."""
    with torch.no_grad():
        results = compiled.call([own[name] for name in compiled.inputs])
    made = [_bytes(r) if isinstance(r, torch.Tensor) else torch.zeros(0, dtype=torch.uint8) for r in results]
    return made + [_span(own[name]).clone() for name in compiled.writes]


def _written(compiled: Compiled, number: int) -> str:
    at = number - len(compiled.outputs)
    return compiled.writes[at] if 0 <= at < len(compiled.writes) else ""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes from the first element to the end of the last, as a view."""
    low, high = extent(tensor)
    return storage_bytes(tensor)[low:high]


def _unread(tensor: torch.Tensor, reads: Intervals) -> torch.Tensor:
    """Flags of the bytes of the elements that are not read."""
    mask = torch.zeros(extent(tensor)[1] - extent(tensor)[0], dtype=torch.bool)
    size = tensor.element_size()
    elements = torch.as_strided(torch.arange(len(mask) // size), tensor.shape, tensor.stride()).reshape(-1)
    mask.view(-1, size)[elements] = True
    for start, end in reads:
        mask[max(start, 0) : max(end, 0)] = False
    return mask.to(tensor.device)
