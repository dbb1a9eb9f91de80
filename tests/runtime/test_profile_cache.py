"""Timings on disk: found again, keyed by all that matters, safe against other processes and broken files."""

import json
import subprocess
import sys
import warnings

import pytest
import torch

import tessera_compile
from tessera_compile import make_cluster
from tessera_compile.passes.errors import TesseraWarning
from tessera_compile.passes.ir import Timing
from tessera_compile.runtime import profile_cache, profiler
from tessera_compile.runtime.codegen import Codegen
from tessera_compile.runtime.profile_cache import ProfileCache, setting
from tests.graphs import lowered

KEY = {**setting("eager", 1), "fingerprint": "abc", "sizes": ""}
TIMING = Timing(12.5, 0.5, "measured")


def test_what_was_put_is_found_and_nothing_else(tmp_path):
    cache = ProfileCache(tmp_path / "new")
    assert cache.get(KEY) is None
    cache.put(KEY, TIMING)
    assert cache.get(KEY) == TIMING
    assert ProfileCache(tmp_path / "new").get(dict(reversed(KEY.items()))) == TIMING
    for field in KEY:
        assert cache.get({**KEY, field: "other"}) is None


def test_the_setting_names_what_a_time_depends_on():
    assert setting("eager", 1) != setting("eager", 2)
    assert setting("eager", 1)["torch"] == torch.__version__
    assert setting("inductor", 1)["inductor"]
    assert setting("eager", 1)["version"] == str(profile_cache.VERSION)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        json.dumps({"key": {"fingerprint": "other"}, "us": 1.0, "spread": 0.0, "source": "measured"}),
        json.dumps({"key": KEY, "us": float("nan"), "spread": 0.0, "source": "measured"}),
        json.dumps({"key": KEY, "us": -1.0, "spread": 0.0, "source": "measured"}),
        json.dumps({"key": KEY, "us": 1.0, "spread": float("nan"), "source": "measured"}),
        json.dumps({"key": KEY, "us": 1.0, "spread": 0.0, "source": "invented"}),
        json.dumps({"key": KEY, "us": "fast", "spread": 0.0, "source": "measured"}),
        json.dumps({"key": KEY, "spread": 0.0, "source": "measured"}),
    ],
)
def test_broken_entries_are_ignored_with_a_warning(tmp_path, text):
    cache = ProfileCache(tmp_path)
    cache.put(KEY, TIMING)
    (entry,) = tmp_path.iterdir()
    entry.write_text(text)
    with pytest.warns(TesseraWarning, match="is ignored"):
        assert cache.get(KEY) is None
    cache.put(KEY, TIMING)
    assert cache.get(KEY) == TIMING


def test_entries_of_another_version_are_not_looked_at(tmp_path, monkeypatch):
    cache = ProfileCache(tmp_path)
    cache.put(KEY, TIMING)
    monkeypatch.setattr(profile_cache, "VERSION", profile_cache.VERSION + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get({**KEY, **setting("eager", 1)}) is None


def test_a_directory_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(TesseraWarning, match="cannot be written"):
        ProfileCache(tmp_path / "file").put(KEY, TIMING)


def test_concurrent_processes_see_whole_entries(tmp_path):
    code = (
        "import sys; from tessera_compile.runtime.profile_cache import ProfileCache\n"
        "from tessera_compile.passes.ir import Timing\n"
        "import warnings; warnings.simplefilter('error')\n"
        "cache = ProfileCache(sys.argv[1]); key = {'fingerprint': 'x'}\n"
        "for i in range(300):\n"
        "    cache.put(key, Timing(float(i), 0.0)); assert cache.get(key) is not None\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd="/") for _ in range(3)]
    assert [p.wait() for p in running] == [0, 0, 0]
    assert len(list(tmp_path.iterdir())) == 1


def test_the_second_profile_times_nothing(tmp_path, monkeypatch):
    graph = lowered(lambda x: torch.relu(x @ x) @ x, [torch.randn(16, 16)])
    cluster, cache = make_cluster("2xcpu"), ProfileCache(tmp_path)
    first = profiler.profile(graph, cluster, Codegen("eager"), lanes=2, threads=1, cache=cache)
    assert {t.source for row in first.times.values() for t in row.values()} == {"calibrated"}

    def never(*args):
        raise AssertionError("timed again")

    monkeypatch.setattr(profiler, "_time", never)
    assert profiler.profile(graph, cluster, Codegen("eager"), lanes=2, threads=1, cache=cache) == first


def test_calibration_is_whole_over_sum_and_the_rest_is_the_price_of_seams(tmp_path, monkeypatch):
    graph = lowered(lambda x: torch.relu(x @ x) @ x, [torch.randn(16, 16)])

    # Each kernel alone 10 µs, the whole, which comes last, 24 µs.
    def big(compiled):
        return calls.append(compiled) or len(calls) == len(distinct) + 1

    calls, distinct = [], {k.fingerprint for k in graph.kernels}
    monkeypatch.setattr(profiler, "_time", lambda compiled, inputs: Timing(24.0 if big(compiled) else 10.0))
    found = profiler.profile(graph, make_cluster("2xcpu"), Codegen("eager"), lanes=2, threads=1)
    assert found.calibration == {"cpu#0": 0.8, "cpu#1": 0.8}
    assert found.cut_us == {"cpu#0": 3.0, "cpu#1": 3.0}
    assert {t.us for row in found.times.values() for t in row.values()} == {8.0}


class Lookup(torch.nn.Module):
    """Its indices are computed, so that it can be timed on a real call alone."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(8, 16)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, i):
        self.seen.add_(1)
        return self.table(i + 3) @ self.table.weight.t()


def test_kernels_that_need_data_are_timed_on_the_first_real_call(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE_DIR", str(tmp_path))
    model = Lookup()
    compiled = torch.compile(model, backend="tessera", options={"codegen": "eager"})
    before = torch.get_rng_state()
    i = torch.tensor([0, 4, 2])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", TesseraWarning)
        torch.testing.assert_close(compiled(i), model.table(i + 3) @ model.table.weight.t())
    assert model.seen.item() == 1
    assert torch.equal(torch.get_rng_state(), before)
    report = tessera_compile.report(compiled)
    kernels = report.graphs[0].kernels.kernels
    assert any(k.needs_data for k in kernels)
    assert {t.source for row in report.graphs[0].profile.times.values() for t in row.values()} == {"calibrated"}


def test_a_first_call_that_raises_leaves_no_plan_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE_DIR", str(tmp_path))
    model = Lookup()
    compiled = torch.compile(model, backend="tessera", options={"codegen": "eager"})
    with torch.no_grad():
        with pytest.warns(TesseraWarning, match="cannot be timed"), pytest.raises(IndexError):
            compiled(torch.tensor([7, 7, 7]))
        good = torch.tensor([0, 4, 2])
        torch.testing.assert_close(compiled(good), model.table(good + 3) @ model.table.weight.t())
    graph = tessera_compile.report(compiled).graphs[0]
    assert {t.source for row in graph.profile.times.values() for t in row.values()} == {"calibrated"}
