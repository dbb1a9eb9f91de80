"""The data between passes: what prints as text reads back, files survive a round trip, and bad ones are refused by name."""

import json
from dataclasses import replace

import pytest
import torch

from tessera_compile.passes.errors import PlanError, ProfileError, ProgramError, TesseraError
from tessera_compile.passes.ir import (
    Dependence,
    Free,
    Hold,
    KernelGraph,
    Lane,
    Load,
    Out,
    Plan,
    Profile,
    Program,
    Recv,
    Run,
    SegmentValues,
    Send,
    Signal,
    Timing,
    Value,
    Wait,
    format_bytes,
    segment_values,
)
from tests.graphs import lowered, synthetic

# --- programs -------------------------------------------------------------------------------------------------------

PROGRAM = Program(
    (
        Lane(
            0,
            "cpu#0",
            (
                Send("x", 1),
                Run("S0", ("k0_mm", "k1_relu")),
                Signal("k0_mm", 1),
                Recv("v2", 1),
                Free(("v1",)),
                Out(("v2",)),
            ),
        ),
        Lane(
            1,
            "cuda:0/48sm#1",
            (
                Hold(("w", "b")),
                Recv("x", 0),
                Wait("k0_mm", 0),
                Run("S1", ("k2",)),
                Send("v2", 0),
                Free(("x", "v2")),
            ),
        ),
        Lane(2, "a100-80gb", ()),
    )
)

TEXT = """\
lane 0 cpu#0
  send x -> 1
  run S0: k0_mm k1_relu
  signal k0_mm -> 1
  recv v2 <- 1
  free v1
  out v2
lane 1 cuda:0/48sm#1
  hold w b
  recv x <- 0
  wait k0_mm <- 0
  run S1: k2
  send v2 -> 0
  free x v2
lane 2 a100-80gb
"""


def test_program_text():
    assert PROGRAM.to_text() == TEXT
    assert Program.from_text(TEXT) == PROGRAM
    assert Program.from_json(PROGRAM.to_json()) == PROGRAM


def test_program_without_outputs_keeps_its_out():
    program = Program((Lane(0, "cpu", (Out(()),)),))
    assert program.to_text() == "lane 0 cpu\n  out\n"
    assert Program.from_text(program.to_text()) == program


def test_program_text_may_hold_comments_blank_lines_and_any_indent():
    loose = "# a program\n\n" + TEXT.replace("  ", "\t ").replace("lane 1", "\n   # the second\n lane 1") + "\n\n"
    assert Program.from_text(loose) == PROGRAM


def test_program_of_no_lanes():
    assert Program.from_text("") == Program(())


def test_program_iterates_over_lanes_and_positions():
    program = Program.from_text("lane 0 a\nsend v -> 1\nfree v\nlane 1 b\nrecv v <- 0")
    assert list(program) == [(0, 0, Send("v", 1)), (0, 1, Free(("v",))), (1, 0, Recv("v", 0))]


def test_program_without_an_instruction():
    program = Program.from_text("lane 0 a\nsend v -> 1\nfree v\nlane 1 b\nrecv v <- 0")
    assert program.without(0, 0).to_text() == "lane 0 a\n  free v\nlane 1 b\n  recv v <- 0\n"
    assert program.without(1, 0).to_text() == "lane 0 a\n  send v -> 1\n  free v\nlane 1 b\n"


@pytest.mark.parametrize(
    "line",
    [
        "jump S0",
        "run",
        "run S0:",
        "run S0 k0",
        "run S0 : k0",
        "send v0",
        "send v0 -> ",
        "send v0 <- 1",
        "send v0 -> one",
        "send v0 -> -1",
        "send v0 -> 1 2",
        "send v0 -> ²",  # A digit to str.isdigit, but no number.
        "recv v0 -> 1",
        "recv <- 1",
        "signal -> 1",
        "wait k0 0",
        "hold",
        "free",
        "Run S0: k0",
        "lane x cpu",
        "lane 1",
        "lane 1 two words",
        "send v0->1",
    ],
)
def test_program_text_that_cannot_be_read_names_its_line(line):
    with pytest.raises(ProgramError, match="line 4") as error:
        Program.from_text(f"# comment\nlane 0 cpu\n\n  {line}\n  out\n")
    assert line.strip() in str(error.value)


def test_instruction_before_the_first_lane():
    with pytest.raises(ProgramError, match=r"line 2.*before the first.*'out v'"):
        Program.from_text("\nout v\nlane 0 cpu\n")


@pytest.mark.parametrize("numbers", [[1], [0, 2], [1, 0], [0, 0]])
def test_lanes_out_of_order(numbers):
    with pytest.raises(ProgramError, match="numbered 0, 1, 2"):
        Program.from_text("".join(f"lane {n} cpu\n" for n in numbers))


def test_segment_values():
    graph = synthetic([(0, 1), (0, 2), (1, 2)], 4, weights={"w": (10, [1])}, writes_state={2: [0]}, outputs=[2]).graph["kernels"]
    instructions = [Run("S0", ("k0", "k1")), Free(("x",)), Run("S1", ("k2",)), Run("S2", ("k3",)), Out(("v2", "c2"))]
    assert segment_values(graph, instructions) == {
        # v0 and v1 are read by S1; w and s2 come from outside.
        0: SegmentValues(("x", "s2", "w"), ("v0", "v1"), ()),
        # c2 is s2 overwritten in place: a write, not an output.
        2: SegmentValues(("v0", "v1", "s2"), ("v2",), ("s2",)),
        # Nobody uses v3.
        3: SegmentValues((), (), ()),
    }


def test_values_used_inside_a_segment_alone_do_not_leave_it():
    graph = synthetic([(0, 1), (1, 2)], 3).graph["kernels"]
    assert segment_values(graph, [Run("S0", ("k0", "k1")), Send("v1", 1)]) == {0: SegmentValues(("x",), ("v1",), ())}


# --- graphs ---------------------------------------------------------------------------------------------------------


def example():
    def function(x, weight, cache, count):
        cache.copy_(cache + x)
        y = torch.softmax(x @ weight, -1)
        return y.t(), y * count, None

    return lowered(function, [torch.ones(4, 4), torch.ones(4, 4), torch.ones(4, 4), torch.tensor(2.0)], static=[1])


def test_kernel_graph_json_round_trip():
    graph = example()
    again = KernelGraph.from_json(graph.to_json())
    assert again == graph
    assert again.module is None
    assert graph.module is not None
    assert again.to_text() == graph.to_text()
    assert list(again.values) == list(graph.values)
    assert again.kernels[0].nodes == graph.kernels[0].nodes
    assert again.outputs[-1] is None
    origins = {again.values[name].origin for name in again.inputs}
    assert origins == {"input", "weight", "state"}
    json.loads(graph.to_json())


def test_kernel_graph_json_tells_graphs_apart():
    graph = example()
    other = replace(graph, kernels=tuple(replace(k, effect=True) for k in graph.kernels))
    assert KernelGraph.from_json(other.to_json()) != graph


def test_kernel_graph_look_ups():
    graph = synthetic([(0, 1), (0, 2)], 3, weights={"w": (10, [1, 2])}, writes_state={2: [0]}).graph["kernels"]
    assert graph["k1"].name == "k1"
    assert [graph.producer(v) for v in ("v0", "c2", "x", "w")] == ["k0", "k2", None, None]
    assert [graph.readers(v) for v in ("v0", "w", "s2", "v1")] == [("k1", "k2"), ("k1", "k2"), ("k0", "k2"), ()]
    assert [graph.resident(v) for v in ("w", "s2", "x", "v0")] == [True, True, False, False]


def test_kernel_graph_text():
    graph = synthetic([(0, 1)], 2, weights={"w": (10, [1])}, writes_state={1: [0]}, effects=(0,)).graph["kernels"]
    assert graph.to_text() == (
        "graph 2 kernels, 2 nodes in kernels, 0 free, 2 in all\n"
        "in x u8[1000] input\n"
        "in w u8[10] weight\n"
        "in s1 u8[500] state\n"
        "k0: pointwise (x s1) -> (v0) effect\n"
        "k1: pointwise (v0 w s1) -> (v1 c1) writes s1\n"
        "mutate s1 = c1\n"
        "out v1"
    )
    assert replace(graph, outputs=("v1", None)).to_text().endswith("\nout v1 -")


def test_value_and_dependence_text():
    value = Value("mm", (4, "s0"), ("s0", 1), "bfloat16", "cpu", 64, "activation", "mm")
    assert value.to_text() == "mm bf16[4,s0]"
    assert replace(value, dtype="float8_e4m3fn", shape=()).to_text() == "mm float8_e4m3fn[]"
    assert Dependence("raw", "v0", 64, "schema").to_text() == "raw v0 64 B (schema)"


# --- profiles -------------------------------------------------------------------------------------------------------


def test_profile_json_round_trip():
    profile = Profile(
        {"k0": {"d0": Timing(1.5, 0.25, "measured"), "d1": Timing(2.0, source="modelled")}, "k1": {"d1": Timing(0.0)}}
    )
    assert Profile.from_json(profile.to_json()) == profile
    assert Profile.from_json(Profile({}).to_json()) == Profile({})
    priced = replace(profile, calibration={"d0": 0.8}, cut_us={"d1": 2.5})
    assert Profile.from_json(priced.to_json()) == priced != profile


def test_profile_look_ups():
    profile = Profile.of({"k0": {"d0": 3}})
    assert profile.times["k0"]["d0"] == Timing(3.0, 0.0, "file")
    assert profile.us("k0", "d0") == 3
    assert profile.us("k0", "d1") == float("inf")
    with pytest.raises(ProfileError, match="k7"):
        profile.us("k7", "d0")


def test_profile_check():
    profile = Profile.of({"k0": {"d0": 3}, "k1": {"d0": float("nan"), "d1": 1}})
    profile.check(["k0"], ["d0", "d1"])
    profile.check(["k1"], ["d1"])
    with pytest.raises(ProfileError, match="'k1' on 'd0' takes nan"):
        profile.check(["k0", "k1"], ["d0", "d1"])
    with pytest.raises(ProfileError, match="'k0' has no time on any of d1, d2"):
        profile.check(["k0"], iter(["d1", "d2"]))


# --- plans ----------------------------------------------------------------------------------------------------------

PLAN = Plan(
    placement={"k0": "d1", "k1": "d0", "k2": "d1"},
    devices=("d0", "d1", "d2"),
    home="d0",
    objective="throughput",
    planner="milp",
    bottleneck_us=100.0,
    makespan_us=250.0,
    bound_us=90.0,
    status="time limit",
    seconds=1.25,
    loads={"d0": Load(100.0, 7.5, 2048, 3 * 2**20), "d1": Load(90.0, 7.5, 100, 512), "d2": Load(0.0, 0.0, 0, 0)},
    cut_values=3,
    cut_bytes=2148,
    overlap=True,
    baselines={"d0": 180.0},
)


def test_plan_file_round_trip(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert Plan.load(path) == Plan.load(str(path)) == PLAN
    assert Plan.from_json(PLAN.to_json()) == PLAN
    assert json.loads(path.read_text())["gap"] == pytest.approx(0.1)


SAVED = PLAN.to_json()
BAD_FILES = {
    "empty": b"",
    "no JSON": b"not json",
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "a string": b'"text"',
    "an empty object": b"{}",
    "a placement alone": b'{"placement": {"k0": "d0"}}',
    "cut short": SAVED[:-20].encode(),
    "a field of another name": SAVED.replace('"seconds"', '"minutes"').encode(),
    "a load's field of another name": SAVED.replace('"sent_bytes"', '"sent"').encode(),
    "devices that are no list": SAVED.replace('"devices": ["d0", "d1", "d2"]', '"devices": 3').encode(),
    "a picture": b"\x89PNG\r\n\x1a\n\x00\xff\xfe",
    "another encoding": SAVED.encode("utf-16"),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_bad_plan_files(tmp_path, what):
    path = tmp_path / "plan.json"
    path.write_bytes(BAD_FILES[what])
    with pytest.raises(PlanError, match="not a saved plan"):
        Plan.load(path)


def test_plan_gap_and_value():
    assert PLAN.value_us == 100
    assert PLAN.gap == pytest.approx(0.1)
    latency = replace(PLAN, objective="latency")
    assert latency.value_us == 250
    assert latency.gap == pytest.approx(160 / 250)
    assert replace(PLAN, bound_us=100.0).gap == 0
    assert replace(PLAN, bound_us=100.1).gap == 0
    assert replace(PLAN, bottleneck_us=0.0, bound_us=0.0).gap == 0


def test_plan_device_map():
    assert PLAN.device_map == {"d0": ["k1"], "d1": ["k0", "k2"], "d2": []}


def test_plan_diff():
    other = replace(PLAN, placement={"k0": "d1", "k1": "d2", "k3": "d0"})
    assert PLAN.diff(PLAN) == {}
    assert PLAN.diff(other) == {"k1": ("d0", "d2"), "k2": ("d1", None), "k3": (None, "d0")}
    assert other.diff(PLAN) == {"k1": ("d2", "d0"), "k2": (None, "d1"), "k3": ("d0", None)}


def test_plan_text():
    assert PLAN.to_text() == (
        "plan for throughput by milp: bottleneck 100.0 µs, makespan 250.0 µs\n"
        "solver time limit in 1.25 s: proven bound 90.0 µs, gap 10.00 %\n"
        "d0 (home): 1 kernels, compute 100.0 µs, transfers 7.5 µs, sends 2.0 KiB, memory 3.0 MiB\n"
        "d1: 2 kernels, compute 90.0 µs, transfers 7.5 µs, sends 100 B, memory 512 B\n"
        "d2: 0 kernels, compute 0.0 µs, transfers 0.0 µs, sends 0 B, memory 0 B\n"
        "3 values cross, 2.1 KiB"
    )


# --- small things ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (5 * 2**30 // 2, "2.5 GiB"),
        (3 * 2**40, "3072.0 GiB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


def test_every_error_is_a_tessera_error():
    for error in (PlanError, ProfileError, ProgramError):
        assert issubclass(error, TesseraError)
