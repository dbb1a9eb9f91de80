"""A backend for tests: captures and lowers a model once, then runs whatever executor the test puts in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tessera_compile.passes import lower, torch_compat
from tessera_compile.passes.ir import KernelGraph
from tessera_compile.runtime.replicas import watch_call


class Capture:
    """Compiles ``model`` for one call; ``graphs[i]`` is its i-th lowered graph, run by ``run[i]`` from then on."""

    def __init__(self, model: Callable[..., Any], inputs: dict[str, Any], **compile_options: Any) -> None:
        self.graphs: list[KernelGraph] = []
        self.run: list[Callable[[list[Any]], list[Any]]] = []
        self.compiled = torch.compile(model, backend=self._backend, **compile_options)
        self.inputs = inputs
        with torch.no_grad():
            self.first = self.compiled(**inputs)

    def __call__(self) -> Any:
        with torch.no_grad():
            return self.compiled(**self.inputs)

    def _backend(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        def inference(aten: torch.fx.GraphModule, fakes: list[Any]) -> Callable[..., Any]:
            number = len(self.graphs)
            self.graphs.append(lower(aten, fakes, static_inputs=torch_compat.static_input_indices()))
            self.run.append(lambda args: aten(*args))

            def call(args: list[Any]) -> list[Any]:
                return self.run[number](args)

            call._boxed_call = True  # type: ignore[attr-defined]
            return call

        def training(aten: torch.fx.GraphModule, fakes: list[Any]) -> Callable[..., Any]:
            raise AssertionError("the model is called without gradients")

        run = torch_compat.aot_inference(gm, example_inputs, inference, training)

        def call(*args: Any) -> Any:
            with watch_call(args):
                return run(*args)

        return call


def assert_same(actual: Any, expected: Any, rtol: float = 1e-4, atol: float = 1e-4) -> None:
    """Equal tensors (within rounding), dtypes, devices and strides, leaf by leaf; at least one leaf is a tensor."""
    got, want = (torch.utils._pytree.tree_leaves(dict(x) if hasattr(x, "keys") else x) for x in (actual, expected))
    assert len(got) == len(want)
    assert any(isinstance(w, torch.Tensor) for w in want)
    for g, w in zip(got, want, strict=True):
        if isinstance(w, torch.Tensor):
            torch.testing.assert_close(g, w, rtol=rtol, atol=atol)
            assert g.stride() == w.stride()
        else:
            assert g == w
