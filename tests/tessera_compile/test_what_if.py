"""``tessera plan`` and ``tessera advise``: what they print and write, and what they say to bad input."""

from __future__ import annotations

import ctypes
import json
import threading

import pytest

from tessera_compile.cli import main
from tessera_compile.passes import mixture
from tessera_compile.passes.errors import OptionsError
from tessera_compile.what_if import parse_mix
from tests.mixes import CENSUS

HEADER = "workload,position,layer,block,kernel,reads,bytes_out,state,state_bytes_written,a100-80gb_us,l40s_us\n"
ROWS = (
    "prefill,0,0,attention,attn,,100000,kv,200000,30,10\n"
    "prefill,1,1,ffn,ffn,0,100000,,,30,12\n"
    "decode,0,0,attention,attn,,1000,kv,1000,4,9\n"
    "decode,1,1,ffn,ffn,0,1000,,,5,9\n"
)
CLUSTER = ("--cluster", "a100-80gb,l40s@200Gbps+1us")

MODEL = """
import torch

def small():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).eval()
    return model, (torch.randn(8, 64),)
"""


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.csv"
    path.write_text(HEADER + ROWS)
    return str(path)


def runs(capsys, *arguments):
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def fails(capsys, *arguments):
    """The one line that a bad command prints."""
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(f"tessera {arguments[0]}: ")
    return error


# --- plan


def test_json_has_its_keys_in_order(profile, tmp_path, capsys):
    out = tmp_path / "plan.json"
    runs(capsys, "plan", profile, *CLUSTER, "--mix", "decode=4,prefill=1", "--json", str(out))
    found = json.loads(out.read_text())
    first = ["bottleneck_us", "bound_us", "gap", "seconds", "status", "shares", "baselines", "placement"]
    assert list(found)[: len(first)] == first
    assert found["bound_us"] <= found["bottleneck_us"]
    assert found["gap"] == pytest.approx(1 - found["bound_us"] / found["bottleneck_us"], abs=1e-9)
    assert sum(found["shares"]) == pytest.approx(1)
    plans = found["placement"] if isinstance(found["placement"], list) else [found["placement"]]
    assert len(plans) == len(found["shares"]) == len(found["requests"])
    for plan in plans:
        assert set(plan) == {"prefill/0", "prefill/1", "decode/0", "decode/1"}
        assert set(plan.values()) <= {"a100-80gb", "l40s"}
    assert all(found["bottleneck_us"] <= us * (1 + 1e-9) for us in found["baselines"].values())
    assert {"replicas", "layers", "attention-ffn", "prefill-decode", "prefill-decode+replicas"} <= set(found["baselines"])
    assert found["objective"] == "throughput"


def test_text_compares_with_the_simple_plans(profile, capsys):
    text = runs(capsys, "plan", profile, *CLUSTER, "--mix", "decode=4,prefill=1")
    for word in (
        "one mix every",
        "no mixture of plans does better",
        "replicas",
        "single:l40s",
        "layers",
        "prefill-decode",
        "advice:",
    ):
        assert word in text
    for word in ("one plan for all requests", "compute", "transfers", "all l40s", "dollars in l40s", "x as fast"):
        assert word in text


def test_weights_default_to_one(profile, capsys):
    def first(*more):
        return runs(capsys, "plan", profile, *CLUSTER, *more).split(",")[0]

    assert first() == first("--mix", "decode,prefill=1")
    assert first() != first("--mix", "decode=3,prefill")


def test_serial_is_no_faster(profile, tmp_path, capsys):
    values = []
    for more in ((), ("--serial",)):
        runs(capsys, "plan", profile, *CLUSTER, *more, "--json", str(tmp_path / "out.json"))
        values.append(json.loads((tmp_path / "out.json").read_text())["bottleneck_us"])
    assert values[0] < values[1]


def test_phases_say_where_state_goes(profile, tmp_path, capsys):
    """With the small state first, a phase split moves 1000 bytes instead of 200,000."""
    values = []
    for order in ("prefill,decode", "decode,prefill"):
        runs(
            capsys, "plan", profile, "--cluster", "a100-80gb,l40s@8Gbps+0us", "--serial", "--phases", order,
            "--json", str(tmp_path / "out.json"),
        )  # fmt: skip
        values.append(json.loads((tmp_path / "out.json").read_text())["baselines"]["prefill-decode"])
    # 10 + 12 and 200 µs of state, or 1 µs, at the busier end.
    assert values == [22 + 200, 22 + 1]


def test_latency(profile, tmp_path, capsys):
    text = runs(capsys, "plan", profile, *CLUSTER, "--policy", "latency", "--json", str(tmp_path / "out.json"))
    assert "one request goes through the mix in" in text
    assert "no placement does better" in text
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["objective"] == "latency"
    assert found["gap"] == 0
    # All that touches the state on the L40S; then 1000 bytes at 25 GB/s + 1 µs, and decode/1 on the A100.
    assert found["bottleneck_us"] == pytest.approx(22 + 9 + 1.04 + 5)


@pytest.mark.parametrize("policy", ["throughput", "latency"])
def test_why_and_what_if(profile, capsys, policy):
    text = runs(capsys, "plan", profile, *CLUSTER, "--policy", policy, "--why", "decode/0=l40s", "--what-if")
    assert "decode/0 on " in text
    assert any(word in text for word in ("CHOSEN CHEAPER", "TARGET CHEAPER", "TIE"))
    assert "links twice as wide" in text
    assert "placements that matter most" in text


def test_no_time_says_so(profile, capsys):
    assert "heuristic: no time to solve" in runs(capsys, "plan", profile, *CLUSTER, "--time-limit", "0")


def test_times_of_zero(tmp_path, capsys):
    path = tmp_path / "zero.csv"
    path.write_text(HEADER + "a,0,0,x,k,,0,,,0,0\n")
    assert "one mix every 0.0 µs" in runs(capsys, "plan", str(path), *CLUSTER)
    assert "one device" in runs(capsys, "advise", CLUSTER[1], str(path))


def test_parse_mix():
    assert parse_mix(None, ["a", "b"]) == {"a": 1.0, "b": 1.0}
    assert parse_mix("a=2, b", ["a", "b"]) == {"a": 2.0, "b": 1.0}
    for text in ("a=", "a=x", "a=0", "a=-1", "a=nan", "a=inf", "a=1,a=2"):
        with pytest.raises(OptionsError, match="--mix"):
            parse_mix(text, ["a"])


def test_diff_of_saved_plans(profile, tmp_path, capsys):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    runs(capsys, "plan", profile, *CLUSTER, "--mix", "decode=4,prefill=1", "--json", str(first))
    assert "0 of 4 kernels are placed differently" in runs(capsys, "diff", str(first), str(first))
    saved = json.loads(first.read_text())
    shares, placement = [0.75, 0.25], [{"decode/0": "a", "decode/1": "a"}, {"decode/0": "b", "decode/1": "a"}]
    first.write_text(json.dumps(saved | {"shares": shares, "placement": placement, "bottleneck_us": 12.0}))
    second.write_text(json.dumps(saved | {"shares": [1.0], "placement": {"decode/1": "a", "new": "b"}, "bottleneck_us": 10.0}))
    text = runs(capsys, "diff", str(first), str(second))
    assert f"{first}: 12.0 µs, for throughput" in text
    assert "the second is 1.200x as fast as the first" in text
    assert "2 of 3 kernels are placed differently" in text
    assert "  decode/0  a 0.750, b 0.250 → not there" in text
    assert "  new       not there → b" in text
    runs(capsys, "plan", profile, *CLUSTER, "--policy", "latency", "--json", str(second))
    assert "as fast" not in runs(capsys, "diff", str(first), str(second))


def test_diff_with_bad_files(tmp_path, capsys):
    assert "No such file" in fails(capsys, "diff", str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    for text in ("{", "[]", '{"placement": 3}', "\udcff"):
        (tmp_path / "a.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        assert "is no saved plan" in fails(capsys, "diff", str(tmp_path / "a.json"), str(tmp_path / "a.json"))


def test_what_the_solver_prints_is_not_seen(profile, capfd, monkeypatch):
    """C code writes past Python's standard output; what is printed before and after stays, and all of it beside other threads."""
    libc, solve = ctypes.CDLL(None), mixture.best_mixture

    def noisy(*args, **options):
        libc.puts(b"HighsMipSolverData")
        return solve(*args, **options)

    monkeypatch.setattr(mixture, "best_mixture", noisy)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    libc.puts(b"before")
    assert main(["plan", profile, *CLUSTER]) == 0
    libc.puts(b"after")
    libc.fflush(None)
    text = capfd.readouterr().out
    assert text.startswith("before\none mix every")
    assert text.endswith("after\n")
    assert "Highs" not in text
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert main(["plan", profile, *CLUSTER]) == 0
    libc.fflush(None)
    assert "Highs" in capfd.readouterr().out


# --- advise


def test_advise_on_the_census(capsys):
    text = runs(capsys, "advise", "a100-80gb,l40s@200Gbps+10us", str(CENSUS), "--mix", "decode=129,prefill=2")
    assert text.startswith("advice: split by kernel\n")
    assert "prefill-decode+replicas" in text
    assert "dollars in l40s" in text


def test_advise_says_when_the_simple_plan_is_as_good(tmp_path, capsys):
    path = tmp_path / "same.csv"
    path.write_text(HEADER + "a,0,0,x,k,,1000000,,,10,10\na,1,0,x,k,0,1000000,,,10,10\n")
    assert runs(capsys, "advise", CLUSTER[1], str(path)).startswith("advice: replicas\n")
    path.write_text(HEADER + "a,0,0,x,k,,1000000,,,1,1000\n")
    assert runs(capsys, "advise", CLUSTER[1], str(path)).startswith("advice: one device\n")


def test_advise_on_a_model(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(MODEL)
    text = runs(capsys, "advise", "a100-80gb,l40s@200Gbps+10us", f"{path}:small")
    assert text.splitlines()[0] in ("advice: one device", "advice: replicas", "advice: split by kernel")
    assert "single:a100-80gb" in text
    error = fails(capsys, "advise", "a100-80gb,l40s", f"{path}:small", "--mix", "a=1")
    assert "--mix and --phases are for a profile CSV" in error


# --- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mix", "decode=2,train=1"), "has no workload 'train'; it has prefill, decode"),
        (("--mix", "decode=zero"), "'decode=zero' is not WORKLOAD=NUMBER"),
        (("--mix", "decode=0"), "must be positive"),
        (("--mix", "decode=inf"), "must be positive"),
        (("--mix", "decode=1,decode=2"), "names 'decode' twice"),
        (("--mix", ""), "no workload ''"),
        (("--phases", "decode"), "must name each of"),
        (("--time-limit", "-1"), "--time-limit -1.0"),
        (("--time-limit", "nan"), "--time-limit nan"),
        (("--gap", "1"), "--gap 1.0"),
        (("--gap", "nan"), "--gap nan"),
        (("--json", "/no/such/place/out.json"), "no directory /no/such/place"),
        (("--json", "/tmp"), "/tmp is a directory"),
        (("--why", "decode/0"), "'decode/0' is not KERNEL=DEVICE"),
        (("--why", "decode/9=l40s"), "no kernel 'decode/9'"),
        (("--why", "decode/0=h200"), "no group 'h200'"),
    ],
)
def test_bad_options_of_plan(profile, capsys, options, message):
    assert message in fails(capsys, "plan", profile, *CLUSTER, *options)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ("a100-80gb,h200", "no times for 'h200'; it has a100-80gb_us, l40s_us"),
        ("a100-80gb,nonsense", "unknown device 'nonsense'"),
        ("a100-80gb,l40s@0Gbps", "zero bandwidth"),
    ],
)
def test_bad_clusters(profile, capsys, cluster, message):
    assert message in fails(capsys, "plan", profile, "--cluster", cluster)
    assert message in fails(capsys, "advise", cluster, profile)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column 'workload'"),
        (HEADER, "no kernels"),
        (HEADER + "a,0,0,x,k,,1\n", "bad.csv:2: 11 fields"),
        (HEADER + "a,0,0,x,k,,1,,,1,1\na,0,0,x,k,,1,,,1,1\n", "bad.csv:3: position 0 of a stands twice"),
        (HEADER + "a,0,0,x,k,1,1,,,1,1\na,1,0,x,k,,1,,,1,1\n", "bad.csv:2: reads position 1"),
        (HEADER + "a,0,0,x,k,,1,,,nan,1\n", "bad.csv:2: a100-80gb_us is 'nan'"),
        (HEADER + "a,0,0,x,k,,1,,,-1,1\n", "bad.csv:2: a100-80gb_us is '-1'"),
        (HEADER + "a,0,zero,x,k,,1,,,1,1\n", "bad.csv:2: layer is 'zero'"),
        (HEADER + "a,0,0,x,k,,1,,,,\n", "can run on no device"),
    ],
)
def test_bad_profiles(tmp_path, capsys, text, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    assert message in fails(capsys, "plan", str(path), *CLUSTER)


def test_files_that_cannot_be_read(tmp_path, capsys):
    assert "No such file" in fails(capsys, "plan", str(tmp_path / "none.csv"), *CLUSTER)
    assert "Is a directory" in fails(capsys, "plan", str(tmp_path), *CLUSTER)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    assert "is no CSV file" in fails(capsys, "plan", str(tmp_path / "binary.csv"), *CLUSTER)
    assert "No such file" in fails(capsys, "advise", CLUSTER[1], str(tmp_path / "none.csv"))
