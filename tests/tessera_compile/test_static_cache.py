"""A decoder with a static key-value cache over eight steps: the cache is overwritten on other lanes than the caller's."""

import pytest
import torch

import tessera_compile
from tessera_compile.compiler import executors
from tests.models import llama


def decode(call, config, steps=8):
    """Greedy decoding; the logits of every step, and the cache."""
    from transformers import StaticCache

    cache = StaticCache(config=config, max_cache_len=16)
    ids, logits = torch.tensor([[5]]), []
    with torch.no_grad():
        for step in range(steps):
            out = call(input_ids=ids, past_key_values=cache, position_ids=torch.tensor([[step]]), use_cache=True)
            logits.append(out.logits)
            ids = out.logits[:, -1:].argmax(-1)
    return logits, cache


@pytest.mark.parametrize(
    "options",
    [
        {"planner": "alternate"},
        {"planner": "random:1"},
        {"planner": "random:2", "cluster": "3xcpu"},
        {"planner": "single", "pins": {"model.layers": "cpu#1"}},
        {"planner": "random:3", "codegen": "inductor"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_eight_steps_equal_eager_and_so_does_the_cache(options):
    model = llama().model
    expected, expected_cache = decode(model, model.config)
    compiled = torch.compile(model, backend="tessera", options={"codegen": "eager", "profile": "model", **options})
    actual, cache = decode(compiled, model.config)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(cache.layers, expected_cache.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-4, atol=1e-4)
    assert sum(e.runs for e in executors(compiled)) == 8
    graph = tessera_compile.report(compiled).graphs[-1]
    writers = {graph.plan.placement[k.name] for k in graph.kernels.kernels if k.writes}
    assert writers - {"cpu#0"}  # Some of the state is written away from home.
