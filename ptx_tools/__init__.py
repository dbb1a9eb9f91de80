"""PTX: parse, print, instrument, decide, interpret.

A library in its own right; it needs NumPy and networkx, and nothing of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .deciding import Kind as Kind
    from .deciding import Verdict as Verdict
    from .deciding import verdict as verdict
    from .footprints import Box as Box
    from .footprints import Footprint as Footprint
    from .footprints import Intervals as Intervals
    from .instrumentation import Instrumented as Instrumented
    from .instrumentation import instrument as instrument
    from .interpretation import NotDerivable as NotDerivable
    from .interpretation import footprint as footprint
    from .launch import Buffer as Buffer
    from .launch import TensorMap as TensorMap
    from .parsing import parse as parse
    from .printing import to_text as to_text
    from .syntax import Module as Module
    from .syntax import PtxError as PtxError

_HOMES = {
    "Box": "footprints",
    "Buffer": "launch",
    "Footprint": "footprints",
    "Instrumented": "instrumentation",
    "Intervals": "footprints",
    "Kind": "deciding",
    "Module": "syntax",
    "NotDerivable": "interpretation",
    "PtxError": "syntax",
    "TensorMap": "launch",
    "Verdict": "deciding",
    "footprint": "interpretation",
    "instrument": "instrumentation",
    "parse": "parsing",
    "to_text": "printing",
    "verdict": "deciding",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
