"""Shared by all tests: one Inductor cache, deterministic seeds, and what the passes' tests build on."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_dynamo(request):
    """Every test starts without compiled code, but for those that share one capture of a model."""
    torch.manual_seed(0)
    if "captured" in request.fixturenames:
        yield
        return
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
