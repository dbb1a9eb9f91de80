"""The command line: the demonstration, and what it says to bad input."""

import json

import pytest

from tessera_compile import Program, Report
from tessera_compile.cli import main


def test_demo_runs_checks_and_writes_its_files(tmp_path, capsys):
    assert main(["demo", "--codegen", "eager", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for word in ("Llama", "a100-80gb", "l40s", "split by kernel", "proven bound", "equal to eager", "not measurements"):
        assert word in text
    for policy in ("throughput", "latency"):
        report = Report.from_json((tmp_path / f"{policy}.json").read_text())
        plan = report.graphs[0].plan
        assert plan.objective == policy
        assert all(plan.value_us <= us * (1 + 1e-9) for us in plan.baselines.values())
        assert Program.from_text((tmp_path / f"{policy}.program").read_text()) == report.graphs[0].program
        assert "kernels" in (tmp_path / f"{policy}.txt").read_text()
        assert json.loads((tmp_path / f"{policy}.json").read_text())["fallbacks"] == []


def test_unknown_device_is_one_line_and_status_2(capsys):
    assert main(["demo", "--cluster", "a100-80g,l40s"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "did you mean a100-80gb" in error


def test_version_and_help(capsys):
    for flag in ("--version", "--help"):
        with pytest.raises(SystemExit) as stop:
            main([flag])
        assert stop.value.code == 0
    assert "demo" in capsys.readouterr().out
