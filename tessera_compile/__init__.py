"""Tessera: a ``torch.compile`` backend that runs every kernel of a model on the device that suits it.

    torch.compile(model, backend="tessera", options={...})

Nothing is imported until it is used: this module costs next to nothing beside ``import torch``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batches import Batch as Batch
    from .catalogue import make_cluster as make_cluster
    from .compiler import Backend
    from .compiler import explain as explain
    from .compiler import report as report
    from .engine import Engine as Engine
    from .engine import mark_token as mark_token
    from .loading import load as load
    from .options import Options as Options
    from .passes.cluster import Cluster as Cluster
    from .passes.ir import Plan as Plan
    from .passes.ir import Program as Program
    from .reports import Report as Report
    from .simulation import SimulationResult as SimulationResult
    from .simulation import simulate as simulate
    from .state_cache import StateCache as StateCache
    from .together import plan_together as plan_together

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "Cluster",
    "Engine",
    "Options",
    "Plan",
    "Program",
    "Report",
    "SimulationResult",
    "StateCache",
    "backend",
    "explain",
    "load",
    "make_cluster",
    "mark_token",
    "plan_together",
    "report",
    "simulate",
]

_WHERE = {
    "Batch": ".batches",
    "Cluster": ".passes.cluster",
    "Engine": ".engine",
    "Options": ".options",
    "Plan": ".passes.ir",
    "Program": ".passes.ir",
    "Report": ".reports",
    "explain": ".compiler",
    "load": ".loading",
    "make_cluster": ".catalogue",
    "mark_token": ".engine",
    "plan_together": ".together",
    "report": ".compiler",
    "SimulationResult": ".simulation",
    "simulate": ".simulation",
    "StateCache": ".state_cache",
}


def backend(**options: Any) -> Backend:
    """A backend object with these options, for ``torch.compile(model, backend=tessera_compile.backend(cluster="2xcpu"))``.

    Raises:
        OptionsError: an option has an unknown name or a bad value.
    """
    from .compiler import Backend
    from .options import Options

    return Backend(Options.make(options))


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
