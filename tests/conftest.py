"""Shared by all tests: one Inductor cache, deterministic seeds, and what the passes' tests build on."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _own_profile_cache(tmp_path_factory):
    """No test reads or writes the user's timings."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TESSERA_CACHE_DIR", str(tmp_path_factory.mktemp("tessera")))
    yield
    patch.undo()


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
