"""What the interpreter does with single features, on kernels by hand: order, barriers, warps, calls, addresses, tensor maps."""

from __future__ import annotations

from typing import Any

import pytest

from tessera_compile.ptx_tools import Buffer, Intervals, NotDerivable, PtxError, TensorMap, footprint, interpretation
from tests.ptx_tools.launching import probe

P, Q = 0x7F00_0000_0000, 0x7F10_0000_0000
SIZE = 1 << 16
SHOW = "mul.wide.u32 %rd6, %r4, 4; add.u64 %rd7, %rd2, %rd6; st.global.u32 [%rd7], 0;"
"""A store to q[%r4]."""


def written(
    body: str, declarations: str = "", *, grid: Any = 1, block: Any = 32, n: int = 5, map_: TensorMap | None = None, **more: Any
) -> set[int]:
    """The elements of q that are stored to, of four bytes."""
    args = [more.pop("p", Buffer(P, SIZE)), Buffer(Q, SIZE), n, map_]
    found = footprint(probe(body, declarations), "k", grid, block, args, **more)
    assert found.complete, str(found)
    assert all(start % 4 == 0 and end % 4 == 0 for start, end in found["q"].writes)
    return {i for start, end in found["q"].writes for i in range(start // 4, end // 4)}


def refused(body: str, declarations: str = "", *, match: str = "depends on data", **more: Any) -> None:
    with pytest.raises(NotDerivable, match=rf"^probe.ptx:\d+:\d+: .*{match}"):
        written(body, declarations, **more)


@pytest.fixture(autouse=True)
def _loops_that_do_not_end_are_given_up_soon(monkeypatch):
    monkeypatch.setattr(interpretation, "MOST_TURNS", 1000)


# -- registers and control


def test_threads_that_wait_keep_their_registers():
    """Others run through the same block meanwhile."""
    body = (
        "setp.lt.u32 %p1, %r2, 32; @%p1 bra A; mov.u32 %r5, 7; bra B; A: bar.sync 1, 64; mov.u32 %r5, 3; B:"
        "add.u32 %r4, %r5, %r2; st.shared.u32 [sm+512], %r2; bar.sync 2, 32;" + SHOW + "@%p1 exit; bar.sync 1, 64;"
    )
    assert written(body, block=64) == {7 + t for t in range(32, 64)} | {3 + t for t in range(32)}
    body = (
        "ld.shared.u32 %r8, [sm]; shr.u32 %r6, %r2, 5; mov.u32 %r7, 0; L: setp.eq.u32 %p1, %r6, 0; setp.ne.u32 %p2, %r7, 0;"
        "mul.lo.u32 %r4, %r2, 2; add.u32 %r4, %r4, %r7; bar.sync %r6, 32;"
    ) + SHOW
    assert written("bar.sync 0;" + body, block=64) == {2 * i for i in range(64)}


def test_a_load_before_a_barrier_is_kept_over_it():
    """Two warps come to one block one after the other; what the first loaded is not what the second loads."""
    body = (
        "shl.b32 %r5, %r2, 2; add.u32 %r5, %r9, %r5; st.shared.u32 [%r5], %r2; bar.sync 0;"
        "setp.ge.u32 %p1, %r2, 32; @%p1 bra W; bra M; W: bar.sync 1, 64; M: ld.shared.u32 %r4, [%r5]; bar.arrive 1, 64;"
        "bar.sync 2, 64;" + SHOW
    )
    assert written(body, block=64) == set(range(64))


@pytest.mark.parametrize("n", range(4))
def test_an_indexed_branch_under_a_guard(n):
    """Where the guard is false the index does not matter, even one that lies in the list."""
    body = (
        "T: .branchtargets A, B, A; mov.u32 %r4, 9; and.b32 %r5, %r2, 1; setp.eq.u32 %p1, %r5, 0; @%p1 brx.idx %r1, T; bra D;"
        "A: mov.u32 %r4, 1; bra D; B: mov.u32 %r4, 2; D:" + SHOW
    )
    if n == 3:
        refused(body, n=n, match="lies outside its list")
    else:
        assert written(body, n=n) == {9, [1, 2, 1][n]}


def test_a_loop_that_does_not_end_is_given_up():
    refused("mov.u32 %r4, 1; L:" + SHOW + "bra L;", match="still running after 1000")
    refused("mov.u32 %r4, 0; L:" + SHOW + "xor.b32 %r4, %r4, 1; setp.lt.u32 %p1, %r4, 2; @%p1 bra L;", match="still running")


def test_exits_in_the_middle():
    body = (
        "mov.u32 %r4, %r2;"
        + SHOW
        + "setp.lt.u32 %p1, %r2, %r1; @%p1 exit; add.u32 %r4, %r2, 100;"
        + SHOW
        + "@!%p1 ret; mov.u32 %r4, 999;"
        + SHOW
    )
    assert written(body) == {*range(32), *range(105, 132)}


def test_threads_that_trap_are_not_followed():
    """The launch fails, so nothing is said about it; the others run on."""
    body = "setp.eq.u32 %p1, %r2, 40; @%p1 trap; mov.u32 %r4, %r2;" + SHOW
    assert written(body) == set(range(32))


@pytest.mark.parametrize("block", [(4, 3, 2), (24, 1, 1), (1, 1, 7), (33, 1, 1)])
@pytest.mark.parametrize("grid", [(1, 1, 1), (3, 2, 2)])
def test_indices_of_threads_and_blocks(block, grid):
    body = (
        "mov.u32 %r3, %tid.y; mov.u32 %r5, %tid.z; mov.u32 %r6, %ntid.x; mov.u32 %r7, %ntid.y; mad.lo.u32 %r4, %r5, %r7, %r3;"
        "mad.lo.u32 %r4, %r4, %r6, %r2; mov.u32 %r3, %ctaid.x; mad.lo.u32 %r4, %r3, 100, %r4; mov.u32 %r3, %ctaid.y;"
        "mad.lo.u32 %r4, %r3, 1000, %r4; mov.u32 %r3, %ctaid.z; mad.lo.u32 %r4, %r3, 4000, %r4;" + SHOW
    )
    threads = block[0] * block[1] * block[2]
    expected = {
        t + 100 * x + 1000 * y + 4000 * z
        for t in range(threads)
        for x in range(grid[0])
        for y in range(grid[1])
        for z in range(grid[2])
    }
    assert written(body, grid=grid, block=block) == expected


def test_blocks_of_a_cluster():
    body = (
        "mov.u32 %r3, %cluster_ctarank; mov.u32 %r5, %clusterid.x; mov.u32 %r6, %ctaid.x; mov.u32 %r7, %ctaid.y;"
        "mov.u32 %r8, %cluster_ctaid.y;"
        "mad.lo.u32 %r4, %r5, 10, %r3; mad.lo.u32 %r4, %r6, 100, %r4; mad.lo.u32 %r4, %r7, 1000, %r4;"
        "mad.lo.u32 %r4, %r8, 5000, %r4;" + SHOW
    )
    expected = {(x // 2) * 10 + (x % 2 + 2 * (y % 3)) + 100 * x + 1000 * y + 5000 * (y % 3) for x in range(4) for y in range(3)}
    assert written(body, grid=(4, 3), cluster=(2, 3), block=1) == expected
    assert written(body, ".extern .global .u8 unused;", grid=(4, 3), block=1) == {
        x * 110 + 1000 * y for x in range(4) for y in range(3)
    }


# -- shared memory

OWN = "shl.b32 %r5, %r2, 2; add.u32 %r5, %r9, %r5;"


def test_values_pass_through_shared_memory():
    body = (
        OWN
        + "st.shared.u32 [%r5], %r2; bar.sync 0; ld.shared.u32 %r4, [%r5+4]; setp.lt.u32 %p1, %r2, 63; @!%p1 mov.u32 %r4, 500;"
        + SHOW
    )
    assert written(body, block=64) == {*range(1, 64), 500}
    refused(body.replace("bar.sync 0;", ""), block=64, match="no barrier between the threads")


def test_a_write_over_what_others_read_needs_a_barrier():
    body = OWN + "st.shared.u32 [%r5], %r2; bar.sync 0; ld.shared.u32 %r4, [sm+4]; {} st.shared.u32 [%r5], 7;" + SHOW
    assert written(body.format("bar.sync 0;"), block=64) == {1}
    refused(body.format(""), block=64, match="no barrier")


@pytest.mark.parametrize(
    "change",
    [
        "atom.shared.add.u32 %r6, [sm], 1;", "red.shared.add.u32 [sm], 1;", "atom.shared.exch.b32 %r6, [%r9], 3;",
        "atom.shared::cta.cas.b32 %r6, [sm], 0, 9;", "cvt.u64.u32 %rd6, %r9; cvta.shared.u64 %rd6, %rd6;"
        "atom.add.u32 %r6, [%rd6], 1;",
        "cvt.u64.u32 %rd6, %r9; cvta.shared.u64 %rd6, %rd6; red.add.u32 [%rd6], 1;",
        "wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%r9], {%f0,%f1,%f2,%f3,%f4,%f5,%f6,%f7}, 16;",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r9], {%r2};", "cp.async.ca.shared.global [sm], [%rd1], 4; cp.async.wait_all;",
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r9], [%rd1], 16, [bar];",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r9], 5, [bar];",
        "mapa.shared::cluster.u32 %r6, %r9, 0; st.shared::cluster.u32 [%r6], 5;", "st.bulk.weak.shared::cta [%r9], 64, 0;",
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r9], [bar];",
        "ld.global.u32 %r6, [%rd1]; setp.eq.u32 %p1, %r6, 0; @%p1 st.shared.u32 [sm], 4;",
        "ld.global.u32 %r6, [%rd1]; st.shared.u32 [sm], %r6;", "ld.global.u32 %r6, [%rd1]; st.shared.u8 [sm+3], %r6;",
        "ld.global.u32 %r6, [%rd1]; setp.eq.u32 %p1, %r6, 0; @%p1 atom.shared.inc.u32 %r7, [sm], 4;",
        "cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes [%r9], [%rd8, {0}], [bar];",
        "st.shared.b128 [%r9], %q1;",
    ],
)  # fmt: skip
def test_whatever_else_writes_shared_memory_makes_it_unknown(change):
    body = "setp.eq.u32 %p7, %r2, 0; @%p7 st.shared.u32 [sm], 2; bar.sync 0; {} bar.sync 0; ld.shared.u32 %r4, [sm];" + SHOW
    map_ = TensorMap(P, 4, (64,), (), (4,))
    assert written(body.format(""), map_=map_) == {2}
    refused(body.format(change), map_=map_)


def test_what_others_do_elsewhere_leaves_shared_memory_alone():
    body = "setp.eq.u32 %p7, %r2, 0; @%p7 st.shared.u32 [sm], 2; bar.sync 0; {} bar.sync 0; ld.shared.u32 %r4, [sm];" + SHOW
    for change in (
        "red.add.u32 [%rd4], 1;",
        "atom.shared.add.u32 %r6, [sm+4], 1;",
        "st.u32 [%rd4], 9;",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r6}, [%r9];",
    ):
        assert written(body.format(change)) == {2}


def test_the_result_of_an_atomic_is_unknown_however_it_is_guarded():
    refused("mov.u32 %r4, 1; atom.shared.add.u32 %r4, [sm], 1;" + SHOW)
    refused("mov.u32 %r4, 1; setp.eq.u32 %p1, %r2, 3; @%p1 atom.shared.add.u32 %r4, [sm], 1;" + SHOW)
    refused("mov.u32 %r4, 1; ld.global.u32 %r5, [%rd1]; setp.eq.u32 %p1, %r5, 3; @%p1 atom.shared.add.u32 %r4, [sm], 1;" + SHOW)
    refused("mov.u32 %r4, 1; atom.global.add.u32 %r4, [%rd1], 1;" + SHOW)
    refused("mov.u32 %r4, 1; setp.eq.u32 %p1, %r2, 0; bar.red.popc.u32 %r4, 0, %p1;" + SHOW)
    refused(
        "mov.u32 %r4, 1; st.shared.u32 [sm], 3; setp.eq.u32 %p1, %r2, 0; bar.red.popc.u32 %r4, 0, %p1; ld.shared.u32 %r5, [sm];"
        + SHOW
    )


def test_a_flag_in_shared_memory_is_waited_for_and_not_guessed():
    body = (
        OWN + "mov.u32 %r6, 0; @%p7 st.shared.u32 [sm], 0; bar.sync 0; setp.eq.u32 %p1, %r2, {}; @%p1 bra W;"
        "L: ld.shared.u32 %r4, [sm]; setp.eq.u32 %p2, %r4, 0; @%p2 bra L; bra D; W: st.shared.u32 [sm], 5; mov.u32 %r4, 6; D:"
        + SHOW
    )
    body = "setp.eq.u32 %p7, %r2, 0;" + body
    refused(body.format(33), block=64, match="(still running|no barrier|depends on data)")
    refused(body.format(3), block=32, match="(still running|no barrier|depends on data)")


def test_several_threads_store_to_one_place():
    """The same value is that value; of different ones nobody knows which stays."""
    assert written("st.shared.u32 [sm], 7; bar.sync 0; ld.shared.u32 %r4, [sm];" + SHOW, block=96) == {7}
    refused("st.shared.u32 [sm], %r2; bar.sync 0; ld.shared.u32 %r4, [sm];" + SHOW)
    refused("st.shared.u32 [sm], %r2; bar.sync 0; ld.shared.u32 %r4, [sm];" + SHOW, block=96)


def test_unknown_values_in_some_threads_stay_theirs():
    body = (
        OWN + "mov.u32 %r6, %r2; setp.ge.u32 %p1, %r2, 16; @%p1 ld.global.u32 %r6, [%rd1]; st.shared.u32 [%r5], %r6; bar.sync 0;"
        "ld.shared.u32 %r4, [%r5+{}]; setp.lt.u32 %p2, %r2, 8; @!%p2 exit;"
    ) + SHOW
    assert written(body.format(16)) == set(range(4, 12))
    refused(body.format(36))


def test_named_barriers_of_a_producer_and_a_consumer():
    """One warp hands over a value after the other; it is ahead, but waits until the last one has been read."""
    body = (
        "mov.u32 %r6, 0; setp.ge.u32 %p1, %r2, 32; @%p1 bra P; C: bar.sync 1, 64; ld.shared.u32 %r4, [sm];"
        + SHOW
        + "bar.arrive 2, 64;"
        "add.u32 %r6, %r6, 1; setp.lt.u32 %p2, %r6, 4; @%p2 bra C; bra D;"
        "P: mul.lo.u32 %r7, %r6, 11; setp.eq.u32 %p3, %r6, 0; @!%p3 bar.sync 2, 64; st.shared.u32 [sm], %r7; bar.arrive 1, 64;"
        "add.u32 %r6, %r6, 1; setp.lt.u32 %p2, %r6, 4; @%p2 bra P; bar.sync 2, 64; D:"
    )
    assert written(body, block=64) == {0, 11, 22, 33}
    refused(body.replace("@!%p3 bar.sync 2, 64", "@!%p3 bar.arrive 2, 32"), block=64, match="(no barrier|never complete)")


def test_who_only_arrives_at_a_barrier_is_not_ordered_by_it():
    """The first warp arrives and stores at once; whether the second has read by then is open."""
    body = (
        "st.shared.u32 [sm], 3; bar.sync 1, 64; setp.lt.u32 %p1, %r2, 32; @%p1 bra A; ld.shared.u32 %r4, [sm]; bar.sync 0, 64;"
        + SHOW
        + "bra D;"
        "A: bar.arrive 0, 64; st.shared.u32 [sm], 8; D:"
    )
    refused(body, block=64, match="no barrier")
    # the other way round in the text, so that the store comes after the barrier is complete
    body = (
        "st.shared.u32 [sm], 3; bar.sync 1, 64; setp.ge.u32 %p1, %r2, 32; @%p1 bra A; bar.arrive 0, 64; L: add.u32 %r1, %r1, -1;"
        "setp.gt.s32 %p2, %r1, 0; @%p2 bra L; bra B; A: ld.shared.u32 %r4, [sm]; bar.sync 0, 64;"
        + SHOW
        + "bra D; B: st.shared.u32 [sm], 8; D:"
    )
    refused(body, block=64, match="no barrier")


def test_a_barrier_that_nobody_completes_is_refused():
    refused("st.shared.u32 [sm], 1; bar.sync 1, 64; ld.shared.u32 %r4, [sm];" + SHOW, match="never complete")


def test_threads_that_are_gone_do_not_hold_a_barrier_up():
    body = (
        "setp.ge.u32 %p1, %r2, 40; @%p1 exit; st.shared.u32 [sm], 6; bar.sync 0; ld.shared.u32 %r4, [sm]; add.u32 %r4, %r4, %r2;"
        + SHOW
    )
    assert written(body, block=64) == set(range(6, 46))


def test_dynamic_shared_memory():
    body = "mov.u32 %r6, dyn; add.u32 %r6, %r6, {}; st.shared.u32 [%r6], 9; bar.sync 0; ld.shared.u32 %r4, [%r6];" + SHOW
    assert written(body.format(252), ".extern .shared .align 16 .b8 dyn[];", shared_bytes=256) == {9}
    refused(
        body.format(256),
        ".extern .shared .align 16 .b8 dyn[];",
        shared_bytes=256,
        match="shared memory that the launch does not have",
    )


# -- local memory and parameters


def test_pieces_of_local_memory():
    body = (
        "st.local.u32 [lo], 0x04030201; setp.lt.u32 %p1, %r2, 16; @%p1 st.local.u8 [lo+1], %r2; ld.local.u16 %r4, [lo];"
        "and.b32 %r4, %r4, 0xff00; shr.u32 %r4, %r4, 8;" + SHOW
    )
    assert written(body) == {*range(16), 2}
    assert written("st.local.u64 [lo+8], 0x700000005; ld.local.u32 %r4, [lo+12];" + SHOW) == {7}
    assert written(
        "st.local.v2.u32 [lo+8], {7, %r2}; ld.local.u64 %rd10, [lo+8]; shr.u64 %rd10, %rd10, 32; cvt.u32.u64 %r4, %rd10;" + SHOW
    ) == set(range(32))
    refused("ld.local.u32 %r4, [lo+40];" + SHOW)
    refused("ld.local.u32 %r4, [lo];" + SHOW)
    refused("st.local.u16 [lo], 4; ld.local.u32 %r4, [lo];" + SHOW)


AT = "mov.u64 %rd10, lo; cvt.u64.u32 %rd11, %r5; add.u64 %rd10, %rd10, %rd11;"
"""%rd10: the byte %r5 of the local array."""


def test_local_memory_by_an_index_of_the_thread():
    fill = "".join(f"st.local.u8 [lo+{i}], {(5 * i + 3) % 16};" for i in range(16))
    load = "ld.local.u8 %rs1, [%rd10]; cvt.u32.u16 %r4, %rs1;"
    assert written(fill + "shr.u32 %r5, %r2, 2;" + AT + load + SHOW) == {(5 * i + 3) % 16 for i in range(8)}
    # each thread has bytes of its own, also where others store elsewhere
    store = "and.b32 %r5, %r2, 3;" + AT + "cvt.u16.u32 %rs1, %r2; st.local.u8 [%rd10], %rs1;"
    assert written("st.local.u32 [lo], 0x09090909;" + store + load + SHOW) == set(range(32))
    assert written("st.local.u32 [lo], 0x09090909;" + store + "ld.local.u8 %rs1, [lo]; cvt.u32.u16 %r4, %rs1;" + SHOW) == {
        *range(0, 32, 4), 9,
    }  # fmt: skip
    # under a guard, through a generic address
    generic = "cvta.local.u64 %rd10, %rd10; setp.lt.u32 %p1, %r2, 8; @%p1 st.u8 [%rd10], %rs1;"
    store = "and.b32 %r5, %r2, 3;" + AT + "cvt.u16.u32 %rs1, %r2;" + generic
    assert written("st.local.u32 [lo], 0x09090909;" + store + "ld.u8 %rs1, [%rd10]; cvt.u32.u16 %r4, %rs1;" + SHOW) == set(
        range(8)
    ) | {9}
    # what was never stored, and what a store to nobody knows where may have changed
    refused("shr.u32 %r5, %r2, 2;" + AT + load + SHOW)
    unknown = "ld.global.u32 %r5, [%rd3]; and.b32 %r5, %r5, 3;" + AT + "st.local.u8 [%rd10], 1;"
    refused("st.local.u32 [lo], 4;" + unknown + "ld.local.u32 %r4, [lo];" + SHOW)


def test_generic_addresses_of_other_spaces_are_no_global_memory():
    body = (
        "mov.u64 %rd10, lo; cvta.local.u64 %rd10, %rd10; cvt.u64.u32 %rd11, %r9; cvta.shared.u64 %rd11, %rd11;"
        "and.b32 %r5, %r2, 1;"
        "setp.eq.u32 %p1, %r5, 0; selp.b64 %rd12, %rd10, %rd11, %p1; setp.lt.u32 %p2, %r2, 4;"
        "selp.b64 %rd12, %rd5, %rd12, %p2; st.u32 [%rd12], 1;"
    )
    assert written(body) == set(range(4))


def test_an_address_that_lies_nowhere_is_not_passed_over():
    refused("sub.u64 %rd10, %rd3, 64; st.u32 [%rd10], 1;", match="lies in no global memory")
    refused("sub.u64 %rd10, %rd3, 64; ld.global.u32 %r5, [%rd10];", match="lies in no global memory")
    refused(
        "mov.u64 %rd10, -64; cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r9], [%rd10], 16, [bar];",
        match="lies in no global",
    )
    refused("cvt.u64.u32 %rd10, %r9; cvta.shared.u64 %rd10, %rd10; ld.global.u32 %r5, [%rd10];", match="lies in no global memory")
    found = footprint(probe("st.global.u32 [64], 1;"), "k", 1, 1, [])
    assert list(found.outside_writes) == [(64, 68)]


def test_parameters_are_read_through_addresses():
    assert written("mov.u64 %rd10, n; ld.param.u32 %r4, [%rd10];" + SHOW, n=77) == {77}
    assert written("mov.u64 %rd10, q; cvta.param.u64 %rd10, %rd10; ld.u32 %r4, [%rd10+8];" + SHOW, n=78) == {78}
    assert written(
        "mov.b32 %r5, n; cvt.u64.u32 %rd10, %r5; cvta.param.u64 %rd10, %rd10; ld.u16 %r4, [%rd10];" + SHOW, n=0x1000_0005
    ) == {5}
    refused("mov.u64 %rd10, m; ld.param.u32 %r4, [%rd10];" + SHOW)


CALLEE = """.func (.param .align 8 .b8 y[16]) pick(.param .align 8 .b8 x[16], .param .b32 i)
{ .reg .b32 %r<4>; .reg .pred %p<2>; ld.param.b32 %r1, [i]; ld.param.v2.b32 {%r2, %r3}, [x+4]; setp.gt.u32 %p1, %r1, 20;
  @%p1 bra BIG;
  st.param.b32 [y], %r2; st.param.b32 [y+8], %r1; ret; BIG: st.param.b32 [y], %r3; st.param.b32 [y+8], 50; ret; }
.func store(.param .b64 a, .param .b32 v) { .reg .b64 %rd<2>; .reg .b32 %r<2>; ld.param.b64 %rd1, [a]; ld.param.b32 %r1, [v];
  st.u32 [%rd1], %r1; ret; }
"""


def test_calls_with_structs_and_branches():
    body = (
        "{ .param .align 8 .b8 x[16]; .param .b32 i; .param .align 8 .b8 y[16]; st.param.b64 [x], 0x6400000000;"
        "st.param.b32 [x+8], 200;"
        "st.param.b32 [i], %r2; call.uni (y), pick, (x, i); ld.param.b32 %r4, [y]; ld.param.b32 %r5, [y+8];"
        "add.u32 %r4, %r4, %r5; }" + SHOW
    )
    assert written(body, CALLEE) == {*range(100, 121), 250}


def test_a_guarded_call():
    body = (
        "setp.lt.u32 %p1, %r2, 3; { .param .b64 a; .param .b32 v; st.param.b64 [a], %rd5; st.param.b32 [v], 1;"
        "@%p1 call store, (a, v); }"
    )
    assert written(body, CALLEE) == {0, 1, 2}


# -- warps


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("shfl.sync.up.b32 %r4|%p1, %r2, 1, 0, -1;", {*range(31)}),
        ("shfl.sync.down.b32 %r4, %r2, 30, 31, -1;", {30, 31, *range(2, 32)}),
        ("shfl.sync.idx.b32 %r4, %r2, 3, 0x1c1f, -1;", {3, 7, 11, 15, 19, 23, 27, 31}),
        ("shfl.sync.bfly.b32 %r4, %r2, 1, 31, -1; mul.lo.u32 %r4, %r4, %r2;", {i * (i ^ 1) for i in range(32)}),
        ("setp.gt.u32 %p1, %r2, 27; vote.sync.ballot.b32 %r4, %p1, -1; shr.u32 %r4, %r4, 28;", {15}),
        ("setp.gt.u32 %p1, %r2, 27; vote.sync.all.pred %p2, !%p1, -1; selp.u32 %r4, 1, 2, %p2;", {2}),
        ("setp.gt.u32 %p1, %r2, 40; vote.sync.uni.pred %p2, %p1, -1; selp.u32 %r4, 1, 2, %p2;", {1}),
        ("elect.sync _|%p1, 0xfffffff0; selp.u32 %r4, 100, 7, %p1;", {100, 7}),
        ("mov.u32 %r4, %lanemask_lt; popc.b32 %r4, %r4;", set(range(32))),
    ],
)  # fmt: skip
def test_instructions_of_a_warp(text, expected):
    if "fffffff0" in text:
        text = "setp.lt.u32 %p3, %r2, 4; @%p3 exit;" + text
    assert written(text + SHOW) == expected


def test_a_vote_among_some_lanes():
    """Two halves vote apart, each with a mask of its own."""
    body = (
        "setp.lt.u32 %p1, %r2, 16; selp.b32 %r5, 0xffff, 0xffff0000, %p1; setp.eq.u32 %p2, %r2, 20;"
        "vote.sync.any.pred %p3, %p2, %r5;"
        "selp.u32 %r4, 1, 2, %p3;" + SHOW
    )
    assert written(body) == {1, 2}
    body = body.replace(
        "any.pred %p3, %p2, %r5;selp.u32 %r4, 1, 2, %p3;",
        "ballot.b32 %r4, %p2, %r5; popc.b32 %r4, %r4; mad.lo.u32 %r4, %r4, 100, %r2;",
    )
    assert written(body.replace("setp.eq.u32 %p2, %r2, 20", "setp.gt.u32 %p2, %r2, 14")) == {100 + i for i in range(16)} | {
        1600 + i for i in range(16, 32)
    }


@pytest.mark.parametrize(
    "text",
    ["vote.sync.any.pred %p3, %p2, -1; selp.u32 %r4, 1, 2, %p3;", "vote.sync.ballot.b32 %r4, %p2, -1; and.b32 %r4, %r4, 1;",
     "elect.sync %r4|%p3, -1;", "shfl.sync.idx.b32 %r4, %r2, 25, 31, -1;", "vote.any.pred %p3, %p2; selp.u32 %r4, 1, 2, %p3;",
     "activemask.b32 %r4; and.b32 %r4, %r4, 1;"],
)  # fmt: skip
def test_lanes_that_stand_elsewhere_are_not_left_out_of_a_vote(text):
    """The mask names all 32; only half of them are here."""
    refused("setp.eq.u32 %p2, %r2, 20; setp.lt.u32 %p1, %r2, 16; @%p1 bra A; mov.u32 %r4, 3; bra B; A:" + text + "B:" + SHOW)


def test_lanes_that_are_gone_do_not_vote():
    body = (
        "setp.ge.u32 %p1, %r2, 16; @%p1 exit; setp.lt.u32 %p2, %r2, 16; vote.sync.all.pred %p3, %p2, -1; selp.u32 %r4, 1, 2, %p3;"
        + SHOW
    )
    assert written(body) == {1}
    assert written("setp.lt.u32 %p2, %r2, 40; vote.sync.ballot.b32 %r4, %p2, -1;" + SHOW, block=5) == {31}


# -- tensor maps


@pytest.mark.parametrize(
    ("at", "box", "steps", "expected"),
    [
        ((0, 0), (4, 2), None, {(y, x) for y in range(2) for x in range(4)}),
        ((6, 3), (4, 4), None, {(y, x) for y in range(3, 5) for x in range(6, 8)}),
        ((-2, -1), (4, 2), None, {(0, 0), (0, 1)}),
        ((8, 0), (4, 4), None, set()),
        ((1, 0), (4, 5), (1, 2), {(y, x) for y in (0, 2, 4) for x in range(1, 5)}),
        ((0, 1), (4, 4), (2, 3), {(y, x) for y in (1, 4) for x in range(4)}),
    ],
)
def test_boxes_of_a_tensor_copy(at, box, steps, expected):
    """A stride of the innermost dimension is ignored where nothing is interleaved, as cuTensorMapEncodeTiled says."""
    map_ = TensorMap(Q, 4, (8, 5), (40,), box, steps)
    body = (
        f"mov.b32 %r3, {at[0]}; mov.b32 %r4, {at[1]};"
        f"cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd8, {{%r3, %r4}}], [%r9];"
    )
    found = footprint(probe(body), "k", 1, 1, [None, None, 0, map_])
    assert found["m"].writes == Intervals.of([(40 * y + 4 * x, 40 * y + 4 * x + 4) for y, x in expected])
    assert not found["m"].reads


def test_copies_of_rows_that_are_gathered():
    map_ = TensorMap(Q, 2, (64, 100), (128,), (16, 1))
    copy = (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [%r9], [%rd8, {8, 3,"
        "%r1, 99, 200}], [bar];"
    )
    found = footprint(probe(copy), "k", 1, 1, [None, None, 50, map_])
    assert found["m"].reads == Intervals.of([(128 * row + 16, 128 * row + 48) for row in (3, 50, 99)])


def test_tensor_copies_that_are_not_modelled():
    map_ = TensorMap(Q, 2, (64, 100, 3), (128, 12800), (16, 1, 1))
    copy = (
        "cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r9], [%rd8, {0, 0, 0}], [bar], {%h1};"
    )
    refused(copy, map_=map_, match="im2col")
    copy = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r9], [%rd8, {0, 0}], [bar];"
    refused(copy, map_=map_, match="has 3 dimensions, not 2")
    refused(copy, match="parameter m is used as a tensor map")


FIELDS = {"global_address": "%rd2", "rank": "1", "elemtype": "7", "interleave_layout": "0"}
VECTORS = {"global_dim": ("64", "8"), "box_dim": ("16", "1"), "element_stride": ("1", "1")}


def build(columns: str = "16", address: str = "%rd1", guard: str = "") -> str:
    """Make a map of 8 rows of 64 floats at q, publish it and copy a box of one row."""
    lines = []
    for field, value in FIELDS.items():
        wide = "b64" if field == "global_address" else "b32"
        lines.append(f"{guard} tensormap.replace.tile.{field}.shared::cta.b1024.{wide} [%r9], {value};")
    for field, values in VECTORS.items():
        for ordinal, value in enumerate(values):
            value = columns if (field, ordinal) == ("box_dim", 0) else value
            lines.append(f"{guard} tensormap.replace.tile.{field}.shared::cta.b1024.b32 [%r9], {ordinal}, {value};")
    lines.append(f"{guard} tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%r9], 0, 256;")
    lines.append(
        f"tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [{address}], [%r9], 128;"
    )
    return "".join(lines)


COPY = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [{}, {{0, %r3}}], [%r9];"


def test_maps_that_the_kernel_builds():
    body = "mov.u32 %r3, %ctaid.x; mul.wide.u32 %rd10, %r3, 128; add.u64 %rd10, %rd1, %rd10;" + build(address="%rd10")
    assert written(body + COPY.format("%rd10"), grid=3) == {64 * y + x for y in range(3) for x in range(16)}


def test_maps_differ_from_block_to_block():
    """The width of the box is that of the block, whether it comes from a register or from a branch."""
    place = "mov.u32 %r3, %ctaid.x; mul.wide.u32 %rd10, %r3, 128; add.u64 %rd10, %rd1, %rd10; setp.eq.u32 %p1, %r3, 1;"
    expected = set(range(4)) | {64 + x for x in range(12)} | {128 + x for x in range(4)}
    register = place + "selp.u32 %r5, 12, 4, %p1;" + build("%r5", "%rd10") + COPY.format("%rd10")
    assert written(register, grid=3) == expected
    replace = "tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%r9], 0, 12;"
    publish = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd10], [%r9], 128;"
    branch = place + build("4", "%rd10") + f"@!%p1 bra A; {replace} {publish} A:" + COPY.format("%rd10")
    assert written(branch, grid=3) == expected
    guarded = place + build("4", "%rd10") + f"@%p1 {replace} {publish}" + COPY.format("%rd10")
    assert written(guarded, grid=3) == expected
    one = place + "setp.eq.u32 %p2, %r2, 0;" + build("4", "%rd10", "@%p2") + "@%p2 " + COPY.format("%rd10")
    assert written(one, grid=2) == {*range(4), *range(64, 68)}


def test_maps_at_one_address_that_differ_are_refused():
    body = "mov.u32 %r3, %ctaid.x; add.u32 %r5, %r3, 4;" + build("%r5") + COPY.format("%rd1")
    refused(body, grid=2, match="disagree about its tensor map")
    refused(
        "mov.u32 %r3, 0; ld.global.u32 %r5, [%rd1];" + build("%r5") + COPY.format("%rd1"),
        match="box_dim of its tensor map is not known",
    )
    refused("mov.u32 %r3, 0;" + COPY.format("%rd1"), match="tensor map lies in memory")


# -- fragments, tables and names


@pytest.mark.parametrize(("layout", "lines", "line"), [("row", 16, 8), ("col", 8, 16)])
def test_fragments_of_a_matrix(layout, lines, line):
    """The b fragment of m32n8k16 is 16 x 8."""
    body = f"wmma.load.b.sync.aligned.{layout}.m32n8k16.global.f16 {{%r3,%r4,%r5,%r6,%r7,%r8,%r10,%r11}}, [%rd2], %r1;"
    found = footprint(probe(body), "k", 1, 32, [Buffer(P, 64), Buffer(Q, SIZE), 40])
    assert found["q"].reads == Intervals.of([(80 * i, 80 * i + 2 * line) for i in range(lines)])


def test_bytes_that_a_mask_of_a_bulk_copy_leaves_out():
    body = "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd2], [%r9], 48, %h1;"
    found = footprint(probe("mov.b16 %h1, 0x8003;" + body), "k", 1, 1, [Buffer(P, 64), Buffer(Q, SIZE), 40])
    assert found["q"].writes == Intervals.of([(16 * i + at, 16 * i + at + 1) for i in range(3) for at in (0, 1, 15)])


def test_tables_of_the_module_count_where_their_contents_are_given():
    table = ".const .align 4 .u32 table[4] = {1, 2, 3, 4}; .global .align 4 .u32 other[4];"
    body = (
        "and.b32 %r5, %r2, 3; mul.wide.u32 %rd10, %r5, 4; mov.u64 %rd11, {0}; add.u64 %rd10, %rd10, %rd11;"
        "ld.{1}.u32 %r4, [%rd10];" + SHOW
    )
    values = b"".join(i.to_bytes(4, "little") for i in (9, 8, 70, 6))
    for name, space in (("table", "const"), ("other", "global")):
        text = body.replace("{0}", name).replace("{1}", space)
        refused(text, table)
        assert written(text, table, symbols={name: values}) == {9, 8, 70, 6}
    generic = body.replace("mov.u64 %rd11, {0};", "mov.u64 %rd11, table; cvta.const.u64 %rd11, %rd11;").replace("ld.{1}", "ld")
    assert written(generic, table, symbols={"table": values}) == {9, 8, 70, 6}
    with pytest.raises(NotDerivable, match="writes other, whose contents decide"):
        written(
            "st.global.u32 [other], 1;" + body.replace("{0}", "other").replace("{1}", "global"), table, symbols={"other": values}
        )
    with pytest.raises(ValueError, match="no variable 'nothing'"):
        written("", symbols={"nothing": b""})


def test_variables_of_the_module_are_buffers_of_their_own():
    found = footprint(
        probe("mov.u64 %rd10, v; add.u64 %rd10, %rd10, %rd3; st.global.u32 [%rd10], 1;", ".global .align 4 .u32 v[8];"),
        "k",
        1,
        10,
        [],
    )
    assert list(found["v"].writes) == [(0, 32)]
    assert found.outside_writes.nbytes == 8


def test_memory_that_is_no_argument_may_be_named():
    args = [Buffer(P, 8, (Q + 64).to_bytes(8, "little")), None, 0]
    body = "ld.global.u64 %rd10, [%rd1]; add.u64 %rd10, %rd10, %rd3; st.global.u32 [%rd10], 1;"
    found = footprint(probe(body), "k", 1, 4, args, extra={"heap": Buffer(Q, 100)})
    assert (found.guards, found.complete) == (("p",), True)
    assert list(found["heap"].writes) == [(64, 80)]


@pytest.mark.parametrize(
    "special", ["%clock", "%globaltimer", "%smid", "%warpid", "%nsmid", "%gridid", "%total_smem_size", "%envreg3"]
)
def test_what_no_argument_decides_is_unknown(special):
    kind = "u64" if special == "%globaltimer" else "u32"
    refused(
        f"mov.{kind} {'%rd10' if kind == 'u64' else '%r4'}, {special};"
        + ("cvt.u32.u64 %r4, %rd10;" if kind == "u64" else "")
        + SHOW
    )


def test_an_unknown_instruction_raises_where_it_stands():
    with pytest.raises(PtxError, match=r"^probe.ptx:\d+:\d+: frobnicate.u32 is not in the instruction table"):
        written("frobnicate.u32 %r4, %r2;")
