"""The command line: the demonstration, devices, explain, and what they say to bad input."""

import json

import pytest

from tessera_compile import Program, Report
from tessera_compile.cli import main

MODEL = """
import torch

def small():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).eval()
    return model, (torch.randn(8, 64),)

def with_keywords():
    return torch.softmax, (torch.randn(8, 64),), {"dim": -1}

def wrong():
    return 3
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MODEL)
    return str(path)


def fails(capsys, *arguments):
    """The one line that a bad command prints."""
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(f"tessera {arguments[0]}: ")
    return error


def test_demo_runs_checks_and_writes_its_files(tmp_path, capsys):
    assert main(["demo", "--codegen", "eager", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for word in ("Llama", "a100-80gb", "l40s", "split by kernel", "proven bound", "1.315×", "equal to eager", "not measurements"):
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
    assert "did you mean a100-80gb" in fails(capsys, "demo", "--cluster", "a100-80g,l40s")
    assert "did you mean a100-80gb" in fails(capsys, "devices", "a100-80g,l40s")


def test_devices_lists_this_machine_and_the_catalogue(capsys):
    assert main(["devices"]) == 0
    text = capsys.readouterr().out
    assert "device cpu#0 cpu" in text
    for name in ("a100-80gb", "l40s", "h200", "b200", "rtx-pro-6000"):
        assert f"\n{name}" in text


def test_devices_of_a_cluster(capsys, tmp_path):
    assert main(["devices", "2xl4@100Gbps"]) == 0
    assert "link l4#0 -> l4#1: 12.5 GB/s + 10 us" in capsys.readouterr().out
    path = tmp_path / "mine.toml"
    path.write_text('[[device]]\ntype = "l4"\n[[device]]\ntype = "l40s"\n[link]\ngbps = 100\n')
    assert main(["devices", str(path)]) == 0
    assert "link l4 -> l40s: 12.5 GB/s" in capsys.readouterr().out
    path.write_text('[[device]]\ntype = "l4"\n[lnk]\ngbps = 100\n')
    error = fails(capsys, "devices", str(path))
    assert "mine.toml" in error
    assert "did you mean 'link'" in error


def test_explain_a_file(capsys, model, tmp_path):
    out = tmp_path / "report.json"
    arguments = ["explain", f"{model}:small", "--cluster", "a100-80gb,l40s", "--policy", "throughput", "--pin", "2=l40s"]
    assert main([*arguments, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    report = Report.from_json(out.read_text())
    assert text.strip() == str(report).strip()
    graph = report.graphs[0]
    assert graph.plan.objective == "throughput"
    assert {graph.plan.placement[k.name] for k in graph.kernels.kernels if k.module == "2"} == {"l40s"}
    assert main(["explain", f"{model}:with_keywords"]) == 0


def test_explain_a_module(capsys, model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["explain", "mine:small"]) == 0
    assert "3 kernels" in capsys.readouterr().out


def test_explain_bad_input(capsys, model):
    assert "MODULE:CALLABLE" in fails(capsys, "explain", "mine")
    assert "no module 'no_such_module'" in fails(capsys, "explain", "no_such_module:f")
    assert "no file" in fails(capsys, "explain", "/no/such/file.py:f")
    assert "no callable 'large'" in fails(capsys, "explain", f"{model}:large")
    assert "(model, args)" in fails(capsys, "explain", f"{model}:wrong")
    assert "NAME=VALUE" in fails(capsys, "explain", f"{model}:small", "--pin", "2")
    assert "no directory" in fails(capsys, "explain", f"{model}:small", "--json", "/no/such/place/r.json")
    small = ("--max-memory", "l4=1KiB", "--max-memory", "l40s=1KiB")
    assert "does not fit" in fails(capsys, "explain", f"{model}:small", "--cluster", "l4,l40s", *small)


def test_version_and_help(capsys):
    for flag in ("--version", "--help"):
        with pytest.raises(SystemExit) as stop:
            main([flag])
        assert stop.value.code == 0
    assert "demo" in capsys.readouterr().out
