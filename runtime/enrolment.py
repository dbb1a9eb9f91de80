"""Which engine's request, if any, the running thread serves: how the graphs of a compiled model find their engine."""

from __future__ import annotations

import threading
from typing import Any, Protocol


class Serving(Protocol):
    """A request of an engine, as a compiled graph sees it."""

    def run(self, graph: Any, args: list[Any]) -> list[Any]: ...


_here = threading.local()


def serving() -> Serving | None:
    """The request that this thread serves; None outside engines."""
    return getattr(_here, "request", None)


def serve(request: Serving | None) -> None:
    """Says that this thread serves ``request`` from now on."""
    _here.request = request
