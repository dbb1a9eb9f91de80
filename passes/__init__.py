"""The passes: pure functions from one data class of ``ir.py`` to the next. No device is touched and no file is read."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dependence import depend as depend
    from .lowering import lower as lower
    from .partitioning import partition as partition
    from .refinement import refine as refine
    from .scheduling import schedule as schedule
    from .verification import verify as verify

_PUBLIC = {
    "lower": "lowering",
    "depend": "dependence",
    "partition": "partitioning",
    "refine": "refinement",
    "schedule": "scheduling",
    "verify": "verification",
}
__all__ = ["depend", "lower", "partition", "refine", "schedule", "verify"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
