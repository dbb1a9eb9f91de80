"""A progress bar for what takes longer than two seconds, on a terminal only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any

_PATIENCE_SECONDS = 2.0


def progress(items: Iterable[Any], title: str) -> Iterator[Any]:
    """Yields ``items``; shows a bar on stderr once they have taken two seconds, if that is a terminal."""
    if not sys.stderr.isatty() or not isinstance(items, Sized):
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress

    started = time.perf_counter()
    bar: Progress | None = None
    try:
        for done, item in enumerate(items):
            if bar is None and time.perf_counter() - started > _PATIENCE_SECONDS:
                bar = Progress(console=Console(stderr=True), transient=True)
                bar.start()
                task = bar.add_task(title, total=len(items), completed=done)
            yield item
            if bar is not None:
                bar.update(task, completed=done + 1)
    finally:
        if bar is not None:
            bar.stop()
