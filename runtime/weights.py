"""Weights of a model that is never whole on one device: read where a lane needs them, once for each memory that holds them.

In the place of such a weight the graph is given a *handle*, an empty tensor that says which weight it stands for. It passes
through AOTAutograd and the executors as any tensor does, and its identity is what replicas compare: another handle, other
contents.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch


class Weight:
    """One parameter or buffer of a loaded model, under all of its names.

    Args:
        names: where it stands in the model; several for tied weights.
        stand_in: a fake tensor with its shape, strides and dtype on the home device: what dynamo traces.
        read: gives its values, on any device; called once for each memory that they are copied to.
        origin: identity of the storage that it had in the model: equal for weights that overlap there.

    Attributes:
        placed: memory → the copy there; a CPU lane is a memory of its own, named after it, and so is a GPU.
        shown: the caller may have been given the copy at home, which others may be views of.
        state: the tensor at home, once a graph overwrites it: from then on this is the weight, and nothing is read any more.
    """

    def __init__(self, names: tuple[str, ...], stand_in: torch.Tensor, read: Callable[[], torch.Tensor], origin: int) -> None:
        self.names = names
        self.stand_in = stand_in
        self.origin = origin
        self.placed: dict[Hashable, torch.Tensor] = {}
        self.state: torch.Tensor | None = None
        self.shown = False
        self._lock = threading.Lock()
        self.replace(read)

    def replace(self, read: Callable[[], torch.Tensor]) -> None:
        """Takes its values from ``read`` from now on; no call may be running."""
        with torch.inference_mode(False), torch.no_grad():
            if self.state is not None:
                self.state.copy_(read())
            else:
                for memory in list(self.placed):
                    self.leave(memory)
            self.read = read
            self.handle = torch.empty(0, dtype=self.stand_in.dtype, device=self.stand_in.device)
            self.handle._tessera_weight = self  # type: ignore[attr-defined]  # read by weight_of

    def on(self, memory: Hashable, device: torch.device | None = None) -> torch.Tensor:
        """Its copy in ``memory``, made from the source by the first who asks.

        Args:
            device: where that memory is, by default the home device.
        """
        with self._lock:
            if memory not in self.placed:
                # A tensor of inference mode has no counter, and could not be overwritten outside of it.
                with torch.inference_mode(False), torch.no_grad():
                    copy = self.placed[memory] = self._copy(device)
                # The copy at home is passed to graphs, and lanes elsewhere must not copy that.
                copy._tessera_weight = self  # type: ignore[attr-defined]
            return self.placed[memory]

    def leave(self, memory: Hashable) -> None:
        """Gives back the copy in ``memory``; whoever comes to use it there makes another."""
        with self._lock:
            copy = self.placed.pop(memory, None)
            if copy is not None and copy.is_cuda:  # Lanes that have been given it on other streams may be reading it still.
                torch.cuda.synchronize(copy.device)

    def at_home(self, memory: Hashable) -> torch.Tensor:
        """What the caller is shown of it: its state, where it has one, else its copy in the home memory."""
        self.shown = True
        return self.state if self.state is not None else self.on(memory)

    def make_state(self, memory: Hashable) -> torch.Tensor:
        """The tensor that graphs overwrite, which lives in the home memory alone."""
        if self.state is None:
            self.state = self.on(memory)
            del self.state._tessera_weight  # type: ignore[attr-defined]
            for other in list(self.placed):
                self.leave(other)
        return self.state

    def _copy(self, device: torch.device | None) -> torch.Tensor:
        # Laid out as in the model, whatever the layout of the source: that is what the graph was compiled for.
        shape, strides, dtype = self.stand_in.shape, self.stand_in.stride(), self.stand_in.dtype
        copy = torch.empty_strided(shape, strides, dtype=dtype, device=device or self.stand_in.device).copy_(self.read())
        if copy.is_cuda:  # The next lane that asks for it may be on another stream.
            torch.cuda.current_stream(copy.device).synchronize()
        return copy


def weight_of(value: Any) -> Weight | None:
    """The weight that ``value`` is the handle or a copy of, or None; state is like any tensor."""
    return getattr(value, "_tessera_weight", None) if isinstance(value, torch.Tensor) else None


def present(value: Any) -> Any:
    """``value``, or, for a handle, the weight's contents on the home device, not kept: for what is timed there on real data."""
    weight = weight_of(value)
    return value if weight is None or value is not weight.handle else weight._copy(None)
