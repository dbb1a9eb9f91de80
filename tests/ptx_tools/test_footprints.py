"""Sets of bytes against Python's own sets; boxes; and the recorder that sorts accesses into buffers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_compile.ptx_tools import Box, Buffer, Footprint, Intervals, TensorMap, footprints
from tessera_compile.ptx_tools.footprints import BufferFootprint, Recorder

pairs = st.lists(st.tuples(st.integers(-40, 40), st.integers(0, 9)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


def as_set(found: Intervals) -> set[int]:
    return {byte for start, end in found for byte in range(start, end)}


def bytes_of(intervals: list[tuple[int, int]]) -> set[int]:
    return {byte for start, end in intervals for byte in range(start, end)}


def normal(found: Intervals) -> bool:
    """Sorted, not empty, and with a gap between neighbours."""
    flat = list(found)
    return all(s < e for s, e in flat) and all(a[1] < b[0] for a, b in itertools.pairwise(flat))


@settings(deadline=None)
@given(pairs, pairs)
def test_algebra_of_intervals(a, b):
    one, two = Intervals.of(a), Intervals.of(b)
    first, second = bytes_of(a), bytes_of(b)
    assert as_set(one) == first
    for found, expected in (
        (one | two, first | second), (one & two, first & second), (one - two, first - second), (two - one, second - first),
        (one.shift(7), {x + 7 for x in first}),
    ):  # fmt: skip
        assert as_set(found) == expected
        assert normal(found)
        assert found.nbytes == len(expected)
        assert bool(found) == bool(expected)
        assert found == Intervals.of([(x, x + 1) for x in expected])
        assert hash(found) == hash(Intervals.of([(x, x + 1) for x in expected]))
    assert one.issubset(two) == (first <= second)
    assert (one == two) == (first == second)
    for byte in range(-45, 55):
        assert (byte in one) == (byte in first)


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=60), st.integers(1, 8), st.integers(-50, 50))
def test_intervals_from_flags(flags, unit, offset):
    found = Intervals.from_marks(np.array(flags, bool), unit, offset)
    assert normal(found)
    assert as_set(found) == {offset + i * unit + k for i, flag in enumerate(flags) if flag for k in range(unit)}


def test_an_interval_that_ends_before_it_starts():
    with pytest.raises(ValueError, match=r"interval \[5, 4\) ends before it starts"):
        Intervals.of([(0, 1), (5, 4)])
    assert list(Intervals.of([(5, 5)])) == []
    assert Intervals.of([]) != "nothing"
    assert repr(Intervals.of([(i, i + 1) for i in range(0, 12, 2)])) == "<Intervals [0, 1), [2, 3), [4, 5), [6, 7), … 6 in all>"


def test_intervals_beyond_32_bits():
    found = Intervals.of([(1 << 40, (1 << 40) + 5), ((1 << 40) + 5, 1 << 41)])
    assert list(found) == [(1 << 40, 1 << 41)]
    assert found.nbytes == 1 << 40


# -- boxes

boxes = st.lists(st.tuples(st.integers(2, 4), st.integers(1, 60)), max_size=3)


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(1, 8), boxes)
def test_a_box_is_the_set_it_was_found_in(start, width, dimensions):
    """Whatever set it is: a box says exactly which bytes, or there is none."""
    found = {start + i for i in range(width)}
    for count, stride in dimensions:
        found = {x + k * stride for x in found for k in range(count)}
    intervals = Intervals.of([(x, x + 1) for x in found])
    box = intervals.box()
    if box is not None:
        assert box.intervals() == intervals
        assert box.nbytes == len(found)
    apart = width
    for _, stride in dimensions:
        if stride <= apart:
            return
        apart = stride * 4 + apart
    assert box is not None


@settings(deadline=None)
@given(pairs)
def test_any_set_has_the_box_that_it_is_or_none(intervals):
    found = Intervals.of(intervals)
    box = found.box()
    if box is not None:
        assert box.intervals() == found
    if not found:
        assert box is None


def test_boxes_of_slices():
    matrix = np.arange(10 * 256).reshape(10, 256)
    rows = matrix[2:5, 64:128]
    assert Intervals.of([(int(x), int(x) + 1) for x in rows.ravel()]).box() == Box(2 * 256 + 64, (3, 64), (256, 1))
    cube = np.arange(4 * 6 * 32).reshape(4, 6, 32)
    part = cube[1:4:2, 2:5, 8:12]
    assert Intervals.of([(int(x), int(x) + 1) for x in part.ravel()]).box() == Box(192 + 64 + 8, (2, 3, 4), (384, 32, 1))
    assert Intervals.of([(5, 9)]).box() == Box(5, (4,), (1,))
    every_other = Intervals.of([(4 * i, 4 * i + 2) for i in range(7)])
    assert every_other.box() == Box(0, (7, 2), (4, 1))
    whole_rows = matrix[3:6]
    assert Intervals.of([(int(x), int(x) + 1) for x in whole_rows.ravel()]).box() == Box(768, (768,), (1,))


@pytest.mark.parametrize(
    "intervals",
    [
        [(0, 4), (8, 13)], [(0, 4), (8, 12), (17, 21)], [(0, 1), (2, 3), (10, 11)], [(0, 1), (2, 3), (10, 11), (13, 14)],
        [(0, 1), (2, 3), (10, 11), (12, 13), (21, 22), (23, 24)], [],
    ],
)  # fmt: skip
def test_sets_that_are_no_box(intervals):
    assert Intervals.of(intervals).box() is None


# -- the recorder

BUFFERS = [("a", 1000, 100), ("b", 1090, 60), ("c", 1200, 33), ("d", 1233, 0), ("e", 1240, 7)]
accesses = st.lists(
    st.tuples(
        st.booleans(),
        st.sampled_from([1, 2, 3, 4, 8, 16, 32]),
        st.lists(st.integers(980, 1260), min_size=1, max_size=6),
        st.booleans(),
    ),
    max_size=8,
)


def check_recorder(recorder: Recorder, expected: dict[bool, set[int]], targets: list[tuple[str, int, int]]) -> None:
    for write in (False, True):
        rest = set(expected[write])
        for index, (_, start, size) in enumerate(targets):
            found = recorder.touched(index, write)
            assert normal(found)
            assert as_set(found) == {x - start for x in expected[write] if start <= x < start + size}
            rest -= set(range(start, start + size))
        assert as_set(recorder.touched(-1, write)) == rest


@settings(deadline=None)
@given(accesses, st.sampled_from([0, 8, 1 << 28]))
def test_accesses_fall_into_buffers(found, largest):
    """Aligned or not, over an edge, in two buffers that overlap, in none; as flags or as sorted addresses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(footprints, "LARGEST_MAP", largest)
        patch.setattr(footprints, "SCANNED", 7)
        recorder = Recorder(BUFFERS)
        expected: dict[bool, set[int]] = {False: set(), True: set()}
        for write, width, addresses, as_spans in found:
            at = np.array(addresses)
            if as_spans:
                recorder.spans(write, at, at + width)
            else:
                recorder.mark(write, at.reshape(1, -1), width)
            expected[write] |= {x + k for x in addresses for k in range(width)}
        check_recorder(recorder, expected, BUFFERS)


def test_aligned_accesses_to_buffers_that_are_not_aligned():
    targets = [("a", 1003, 40), ("b", 1043, 5)]
    recorder = Recorder(targets)
    for width in (1, 2, 4, 8):
        recorder.mark(True, np.arange(992, 1056, width), width)
    check_recorder(recorder, {True: set(range(992, 1056)), False: set()}, targets)
    recorder = Recorder(targets)
    recorder.mark(False, np.array([1008, 1016, 1040]), 4)
    check_recorder(recorder, {False: {*range(1008, 1012), *range(1016, 1020), *range(1040, 1044)}, True: set()}, targets)


def test_a_buffer_of_terabytes_takes_little_memory():
    targets = [("a", 1 << 40, 1 << 43)]
    recorder = Recorder(targets)
    at = (1 << 40) + (np.arange(1000, dtype=np.uint64) << np.uint64(33))
    recorder.mark(False, at, 4)
    recorder.mark(False, at + 4, 4)
    recorder.mark(True, at[:1], 1)
    assert sum(m.nbytes for m in recorder.marks.values()) == 0
    assert list(recorder.touched(0, False)) == [(i << 33, (i << 33) + 8) for i in range(1000)]
    assert list(recorder.touched(0, True)) == [(0, 1)]


def test_many_pieces_are_merged_now_and_then():
    """What does not merge is kept; what repeats does not pile up."""
    recorder = Recorder([("a", 0, 1 << 44)])
    piece = np.arange(1 << 18, dtype=np.int64) * 64
    for turn in range(20):
        recorder.mark(False, piece + 4 * (turn % 2), 4)
    assert sum(len(part) for part in recorder.ranges[(0, False)]) <= 1 << 22
    found = recorder.touched(0, False)
    assert len(found) == 1 << 18
    assert found.nbytes == 8 << 18


# -- footprints and what they are made of


def sample() -> Footprint:
    def part(name: str, reads: list[tuple[int, int]], writes: list[tuple[int, int]]) -> BufferFootprint:
        return BufferFootprint(name, 64, 100, Intervals.of(reads), Intervals.of(writes))

    return Footprint(
        "k", (part("x", [(0, 100)], []), part("y", [(0, 4), (16, 20), (32, 36)], [(1, 3), (7, 9), (11, 12)]),
         part("z", [(5, 9)], [])),
        Intervals.of([(7, 9)]), Intervals.of([]), ("x",),
    )  # fmt: skip


def test_a_footprint_as_text_and_as_data():
    found = sample()
    assert not found.complete
    assert str(found).splitlines() == [
        "kernel k (while x is unchanged)",
        "  x reads all 100 bytes",
        "  x writes nothing",
        "  y reads 12 of 100 bytes, 3 x 4 with strides (16, 1) from 0",
        "  y writes 5 of 100 bytes in 3 intervals",
        "  z reads 4 of 100 bytes, [5, 9)",
        "  z writes nothing",
        "  outside every buffer: reads 2 bytes, the first at 0x7",
    ]
    data = found.to_json()
    assert data["guards"] == ["x"]
    assert data["outside"] == {"reads": [[7, 9]], "writes": []}
    assert data["buffers"][1] == {
        "name": "y",
        "addr": 64,
        "nbytes": 100,
        "reads": [[0, 4], [16, 20], [32, 36]],
        "writes": [[1, 3], [7, 9], [11, 12]],
    }
    with pytest.raises(KeyError, match="'w' is no buffer of k; it has x, y, z"):
        found["w"]


def test_buffers_and_maps_that_cannot_be():
    with pytest.raises(ValueError, match="must be positive and lie below"):
        Buffer(-1, 4)
    with pytest.raises(ValueError, match="must be positive and lie below"):
        Buffer((1 << 60) - 4, 4)
    with pytest.raises(ValueError, match="has 5 bytes and contents of 4"):
        Buffer(0, 5, b"1234")
    assert Buffer(0, 8, np.arange(4, dtype=np.int16).reshape(2, 2).T).data().tolist() == [0, 0, 2, 0, 1, 0, 3, 0]
    with pytest.raises(ValueError, match="needs 1 to 5 dimensions"):
        TensorMap(0, 4, (4, 4), (), (4, 4))
    with pytest.raises(ValueError, match="must have 2 entries"):
        TensorMap(0, 4, (4, 4), (16,), (4, 4), (1,))
    assert TensorMap(0, 4, (3, 5), (16,), (4, 4)).nbytes == 4 * 16 + 3 * 4
    assert TensorMap(0, 4, (3, 0), (16,), (4, 4)).nbytes == 0


coordinates = st.lists(st.integers(-6, 12), min_size=3, max_size=3)


@settings(deadline=None)
@given(st.lists(coordinates, min_size=1, max_size=4), st.tuples(*[st.integers(1, 5)] * 3), st.tuples(*[st.integers(1, 3)] * 3))
def test_rows_of_a_tensor_map(places, box, steps):
    shape, strides = (7, 4, 5), (32, 160)
    map_ = TensorMap(640, 4, shape, strides, box, steps)
    starts, ends = map_.rows(np.array(places))
    expected = set()
    for x0, y0, z0 in places:
        for x, y, z in itertools.product(range(box[0]), range(0, box[1], steps[1]), range(0, box[2], steps[2])):
            at = (x0 + x, y0 + y, z0 + z)
            if all(0 <= i < n for i, n in zip(at, shape, strict=True)):
                first = 640 + 4 * at[0] + 32 * at[1] + 160 * at[2]
                expected |= set(range(first, first + 4))
    assert as_set(Intervals.merge(starts, ends)) == expected
