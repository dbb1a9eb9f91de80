"""Hold the footprints of Inductor's own Triton kernels against what Inductor takes the kernels to access.

Two ways to the same sets that know nothing of each other: Inductor derives read/write sets from its intermediate form,
``ptx_tools`` derives footprints from the PTX that comes out in the end. A footprint must lie within the sets; where it does not,
one of the two is wrong, and both are told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..passes import torch_compat
from ..passes.index_ranges import index_bytes
from ..ptx_tools.footprints import Intervals
from .codegen import Compiled, lookup
from .copies import copies
from .evidence import Touch, touch
from .launches import Extent, Launch, capturing_launches

NOTHING = Intervals.of(())


@dataclass(frozen=True)
class Mismatch:
    """A kernel whose footprint goes beyond Inductor's sets: bytes from the parameter's pointer on."""

    kernel: str
    parameter: str
    kind: str
    footprint: Intervals
    expected: Intervals

    def to_text(self) -> str:
        beyond = self.footprint - self.expected
        return (
            f"{self.kernel} {self.kind} {beyond.nbytes} bytes of {self.parameter} that Inductor does not know of: {beyond!r}; "
            f"footprint {self.footprint!r}, Inductor {self.expected!r}"
        )


@dataclass(frozen=True)
class CrossCheck:
    """kernels: names of the launches that were compared. enumerated: how many of their accesses were told byte by byte, ``whole``
    how many by the whole buffer alone. skipped: (kernel, why)."""

    kernels: tuple[str, ...]
    mismatches: tuple[Mismatch, ...]
    enumerated: int
    whole: int
    skipped: tuple[tuple[str, str], ...]


def cross_check(make: Callable[[], Compiled], values: Mapping[str, Any]) -> tuple[Compiled, CrossCheck]:
    """Compares the kernels of one piece.

    Args:
        make: compiles the piece; Inductor must generate its code and not find it in a cache.
        values: by name, on the GPU; they are copied.
    """
    with torch_compat.collecting_accesses() as generated:
        compiled = make()
    own = copies({name: lookup(dict(values), name) for name in compiled.inputs})
    with torch.no_grad(), capturing_launches(_touched) as seen:
        compiled.call([own[name] for name in compiled.inputs])
        torch.cuda.synchronize()
    return compiled, compare(generated, [pair for pair in seen if pair is not None])


def _touched(launch: Launch) -> tuple[Launch, Touch] | None:
    return (launch, touch(launch)) if launch.kind == "triton" else None


def compare(
    generated: Sequence[tuple[str, Sequence[tuple[str, bool, Any, Mapping[str, Any], int, bool]]]],
    launches: Sequence[tuple[Launch, Touch]],
) -> CrossCheck:
    """generated: from ``torch_compat.collecting_accesses``. launches: those of one call, in order."""
    left: dict[str, list[Sequence[Any]]] = {}
    for name, accesses in generated:
        left.setdefault(name, []).append(accesses)
    names, skipped, mismatches = [], [], []
    counts = {"enumerated": 0, "whole": 0}
    for launch, touched in launches:
        queue = left.get(launch.name)
        if not queue:
            skipped.append((launch.name, "Inductor did not generate it"))
            continue
        accesses = queue.pop(0)
        if not touched.exact:
            skipped.append((launch.name, touched.record.reason))
            continue
        names.append(launch.name)
        mismatches += _of_launch(launch, touched, accesses, counts)
    return CrossCheck(tuple(names), tuple(mismatches), counts["enumerated"], counts["whole"], tuple(skipped))


def _of_launch(launch: Launch, touched: Touch, accesses: Sequence[Any], counts: dict[str, int]) -> list[Mismatch]:
    extents = {name: value for name, value in launch.args if isinstance(value, Extent)}
    expected = {(name, write): NOTHING for name in extents for write in (False, True)}
    for name, write, index, ranges, itemsize, atomic in accesses:
        if name not in extents:
            continue  # fused away, or a number
        extent = extents[name]
        found = None if index is None else index_bytes(index, ranges, itemsize)
        counts["whole" if found is None else "enumerated"] += 1
        part = extent.whole() if found is None else found.shift(extent.address)
        for kind in {write, False} if atomic else {write}:
            expected[name, kind] = expected[name, kind] | part
    known = {name for name, *_ in accesses}
    mismatches = []
    for write, all_of_it in ((False, touched.reads), (True, touched.writes)):
        allowed = NOTHING
        for (_, kind), part in expected.items():
            allowed = allowed | (part if kind == write else NOTHING)
        # Scratch memory has parameters of its own, of which the sets know nothing.
        scratch = NOTHING
        for name, extent in extents.items():
            if name not in known:
                scratch = scratch | extent.whole()
        beyond = all_of_it - allowed - scratch
        if not beyond:
            continue
        shown = False
        for name, extent in extents.items():
            if name in known and beyond & extent.whole():
                shown = True
                here = (all_of_it & extent.whole()).shift(-extent.address)
                wanted = expected[name, write].shift(-extent.address)
                mismatches.append(Mismatch(launch.name, name, "writes" if write else "reads", here, wanted))
        if not shown:
            mismatches.append(Mismatch(launch.name, "no parameter", "writes" if write else "reads", all_of_it, allowed))
    return mismatches
