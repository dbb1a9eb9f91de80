"""Where state that lanes keep lives: on which device each tensor of a :class:`tessera_compile.StateCache` is at home.

Such a tensor is marked when it is made. A graph that overwrites a marked tensor gives it to the lane that writes it, whose
storage it then is: nothing is copied there, and nothing comes back to the caller, who holds the same storage. Another program
may give it to another lane; that moves it, once. All CPU lanes share one memory, so there a move is only counted.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from ..passes import torch_compat


def mark(tensor: torch.Tensor) -> None:
    """Says that ``tensor`` is state which lanes may keep. Copies of it (``copy.deepcopy``) are marked too."""
    tensor._tessera_kept = True  # type: ignore[attr-defined]  # read by marked


def marked(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and getattr(value, "_tessera_kept", False)


class Homes:
    """Storage → the device where it is at home, as long as the storage lives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._homes: dict[int, tuple[Any, str]] = {}
        self._sweep_at = 1024

    def settle(self, tensor: torch.Tensor, device: str) -> int:
        """Says that ``tensor`` lives on ``device`` from now on; the bytes that had to move for it: none where it lived there
        already, or nowhere yet."""
        key = torch_compat.storage_key(tensor)
        with self._lock:
            weak, before = self._homes.get(key, (None, device))
            if weak is None or weak.expired():
                if len(self._homes) >= self._sweep_at:
                    self._homes = {k: x for k, x in self._homes.items() if not x[0].expired()}
                    self._sweep_at = max(1024, 2 * len(self._homes))
                self._homes[key] = (torch_compat.weak_storage(tensor), device)
                return 0
            if before == device:
                return 0
            self._homes[key] = (weak, device)
            return tensor.nbytes

    def of(self, tensor: torch.Tensor) -> str | None:
        """The device where ``tensor`` lives; None: no program has kept it yet."""
        with self._lock:
            weak, device = self._homes.get(torch_compat.storage_key(tensor), (None, ""))
        return None if weak is None or weak.expired() else device


#: Of this process: programs of all models and engines.
HOMES = Homes()
