"""Ways in which a footprint or a verdict could be wrong without saying so, each found by somebody who tried to make it so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_compile.ptx_tools import Buffer, Intervals, Kind, NotDerivable, PtxError, footprint, instrument, parse, verdict

A, B = Buffer(0x10000000, 4096), Buffer(0x20000000, 4096)
HEAD = """.reg .u64 %d<30>; .reg .b32 %r<30>; .reg .pred %p<10>; .reg .b16 %h; .shared .align 16 .b8 sm[1024];
.shared .align 8 .b64 mb[2];
ld.param.u64 %d0,[A]; ld.param.u64 %d1,[B]; ld.param.u32 %r0,[n]; mov.u32 %r1,%tid.x; mov.u32 %r29, sm; mov.u32 %r20, mb;
"""
OUT = "mul.wide.u32 %d9,%r9,4; add.u64 %d9,%d1,%d9; st.global.u32 [%d9],%r1;"
PARAMS = ".param .u64 A, .param .u64 B, .param .u32 n"


def module(body: str, *, functions: str = "", tuning: str = "", target: str = "sm_90", params: str = PARAMS) -> Any:
    head = f".version 8.7\n.target {target}\n.address_size 64\n{functions}\n"
    text = f"{head}.visible .entry k({params}) {tuning}\n{{\n{HEAD}{body}\n}}\n"
    return parse(text, name="probe.ptx")


def run(body: str, *, args: Any = None, grid: Any = 1, block: Any = 64, **more: Any) -> Any:
    launch = {key: more.pop(key) for key in ("cluster", "shared_bytes") if key in more}
    return footprint(module(body, **more), "k", grid, block, [A, B, 4] if args is None else args, **launch)


STORED_BY = "ld.global.u32 %r2,[%d0]; setp.eq.u32 %p0,%r1,0; @%p0 st.shared.u32 [%r29],%r2; bar.sync 0;"


@pytest.mark.parametrize(
    "guard",
    [
        "mov.u32 %r3,%ctaid.x; setp.eq.u32 %p1,%r1,%r3;",
        "setp.eq.u32 %p1,%r1,%r0;",
        "setp.gt.u32 %p2,%r0,5; setp.eq.and.u32 %p1,%r1,0,%p2;",
        "setp.ne.u32 %p1,%r1,0;",
    ],
)
def test_a_store_that_no_thread_need_make_overwrites_nothing(guard):
    body = STORED_BY + guard + "@%p1 st.shared.u32 [%r29],7; bar.sync 0; ld.shared.u32 %r9,[%r29];" + OUT + "ret;"
    assert verdict(module(body), "k").data_dependent


def test_a_store_that_the_first_thread_makes_overwrites():
    body = (
        STORED_BY
        + "and.b32 %r3,%r1,63; setp.eq.u32 %p1,%r3,0; @%p1 st.shared.u32 [%r29],7; bar.sync 0; ld.shared.u32 %r9,[%r29];"
    )
    assert verdict(module(body + OUT + "ret;"), "k").kind is Kind.INDEPENDENT
    assert run(body + OUT + "ret;")["B"].writes == Intervals.of([(28, 32)])


SHARED = "mov.u64 %d29, sm; cvta.shared.u64 %d5,%d29;"
LOCAL = ".local .align 8 .b8 l[64]; mov.u64 %d5,l; cvta.local.u64 %d5,%d5;"


@pytest.mark.parametrize("private", [SHARED, LOCAL, "mov.u64 %d5,%d1;"])
def test_a_pointer_that_may_have_been_loaded_is_dependent(private):
    body = private + "setp.gt.u32 %p0,%r0,2; @%p0 ld.global.u64 %d5,[%d0]; st.u32 [%d5],%r1; ret;"
    assert verdict(module(body), "k").kind is Kind.DEPENDENT
    with pytest.raises(NotDerivable, match=r"^probe.ptx:\d+:\d+: st.u32: its address depends on data"):
        run(body)


APART = "shr.u64 %d6,%d0,4; shl.b64 %d6,%d6,4;"


@pytest.mark.parametrize(
    "body",
    [
        SHARED + "setp.gt.u32 %p0,%r0,2;" + APART + "@%p0 mov.u64 %d5,%d6; ld.u32 %r9,[%d5];" + OUT + "ret;",
        "ld.global.u32 %r2,[%d0]; mul.wide.u32 %d7,%r2,4;"
        + APART
        + "cvt.u64.u32 %d8,%r0; add.u64 %d6,%d6,%d8; st.global.u32 [%d6],%r1;"
        "add.u64 %d9,%d1,%d7; ld.global.u32 %r3,[%d9]; ret;",
    ],
)
def test_a_pointer_whose_bits_were_taken_apart_may_go_anywhere(body):
    assert verdict(module(body), "k").kind is Kind.DEPENDENT


INIT = "setp.eq.u32 %p0,%r1,0; @%p0 mbarrier.init.shared.b64 [%r20],1; @%p0 mbarrier.init.shared.b64 [%r20+8],1; bar.sync 0;"
CONSUMER = (
    """setp.lt.u32 %p1,%r1,32; @!%p1 bra P; @!%p0 bra E;
st.shared.u32 [%r29],5; mbarrier.arrive.shared.b64 _,[%r20];
W1: mbarrier.try_wait.parity.shared.b64 %p2,[%r20+8],0; @!%p2 bra W1;
ld.shared.u32 %r9,[%r29];"""
    + OUT
    + "bra E; P: setp.eq.u32 %p3,%r1,32; @!%p3 bra E; W2: mbarrier.try_wait.parity.shared.b64 %p2,[%r20],0; @!%p2 bra W2;"
)


@pytest.mark.parametrize(
    "producer",
    [
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r29],[%d0],16,[%r20+8];",
        "ld.global.u32 %r2,[%d0]; and.b32 %r2,%r2,12; add.u32 %r2,%r2,%r29; st.shared.u32 [%r2],9;",
        "cp.async.ca.shared.global [%r29],[%d0],16;",
    ],
)
def test_what_is_handed_over_by_mbarriers_is_refused(producer):
    with pytest.raises(NotDerivable, match="with no barrier between the threads"):
        run(INIT + CONSUMER + producer + "E: ret;")


@pytest.mark.parametrize(
    "body",
    [
        # a store into another block's shared memory
        "mov.u32 %r3,%cluster_ctarank; setp.eq.u32 %p0,%r3,1; @%p0 bra R; barrier.cluster.arrive; barrier.cluster.wait; "
        "mapa.shared::cluster.u32 %r4,%r29,1; st.shared::cluster.u32 [%r4],7; barrier.cluster.arrive; barrier.cluster.wait; ret; "
        "R: st.shared.u32 [%r29],5; barrier.cluster.arrive; barrier.cluster.wait; barrier.cluster.arrive; barrier.cluster.wait; "
        "ld.shared.u32 %r9,[%r29];" + OUT + "ret;",
        # a copy into it
        "mov.u32 %r3,%cluster_ctarank; setp.eq.u32 %p0,%r3,1; @%p0 bra R; barrier.cluster.arrive; barrier.cluster.wait; "
        "mov.u16 %h,2; "
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r29],[%d0],64,[mb],%h; ret; "
        "R: st.shared.u32 [%r29],5; barrier.cluster.arrive; barrier.cluster.wait; ld.shared.u32 %r9,[%r29];" + OUT + "ret;",
    ],
)
def test_shared_memory_of_another_block_of_the_cluster_is_refused(body):
    with pytest.raises(NotDerivable):
        run(body, grid=2, block=1, cluster=2)


def test_maps_that_each_warp_builds_are_not_mixed_up():
    fields = "tensormap.replace.tile.rank.shared::cta.b1024.b32 [%r6],0;"
    body = "shr.u32 %r4,%r1,5; mad.lo.u32 %r6,%r4,128,%r29;" + fields
    body += "cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%d0, {0}], [%r29]; ret;"
    with pytest.raises(NotDerivable, match="several tensor maps at once"):
        run(body, target="sm_90a")


@pytest.mark.parametrize("shared", [False, True])
def test_a_semaphore_shared_by_pairs_guards_other_work_for_each(shared):
    head = "mov.u32 %r3,%ctaid.x; shr.u32 %r4,%r3,1; mul.wide.u32 %d5,%r4,4; add.u64 %d5,%d0,%d5; setp.eq.u32 %p0,%r1,0;"
    ask = (
        "@%p0 atom.global.add.u32 %r5,[%d5],1; @%p0 st.shared.u32 [%r29],%r5; bar.sync 0; ld.shared.u32 %r6,[%r29];"
        if shared
        else "atom.global.add.u32 %r6,[%d5],1;"
    )
    body = head + ask + "setp.ne.u32 %p1,%r6,1; @%p1 bra E; mov.u32 %r9,%r3;" + OUT + "E: ret;"
    assert verdict(module(body), "k").kind is Kind.DEPENDENT


WARPS = "shr.u32 %r3,%r1,5; setp.eq.u32 %p0,%r3,0; setp.eq.u32 %p1,%r3,1; setp.eq.u32 %p2,%r3,2;"


@pytest.mark.parametrize(
    "stores",
    [
        "ld.global.u32 %r2,[%d0]; @%p0 st.volatile.shared.u32 [%r29],%r2; @%p1 st.volatile.shared.u32 [%r29],0;",
        "@%p0 st.volatile.shared.u32 [%r29],5; @%p1 st.volatile.shared.u32 [%r29],7; @%p2 st.volatile.shared.u32 [%r29],7;",
    ],
)
def test_stores_without_order_leave_nothing_known(stores):
    with pytest.raises(NotDerivable, match="its address depends on data"):
        run(WARPS + stores + "bar.sync 0; ld.shared.u32 %r9,[%r29];" + OUT + "ret;", block=96)


def test_lanes_of_one_warp_at_different_places_have_no_order():
    body = (
        """setp.eq.u32 %p0,%r1,0; @%p0 st.shared.u32 [%r29],5; bar.sync 0; @!%p0 bra W;
    bar.warp.sync 0xffffffff; ld.shared.u32 %r9,[%r29];"""
        + OUT
        + """bra E;
    W: setp.eq.u32 %p1,%r1,1; @%p1 st.shared.u32 [%r29],7; bar.warp.sync 0xffffffff; E: ret;"""
    )
    with pytest.raises(NotDerivable, match="with no barrier between the threads"):
        run(body, block=32)
    race = (
        "setp.eq.u32 %p0,%r1,0; @%p0 bra X; st.volatile.shared.u32 [%r29],7; bra Y; "
        "X: st.volatile.shared.u32 [%r29],5; Y: bar.sync 0;"
    )
    with pytest.raises(NotDerivable):
        run(race + "ld.shared.u32 %r9,[%r29];" + OUT + "ret;", block=2)


def test_a_value_passes_within_a_warp_through_its_barrier():
    body = "st.shared.u32 [%r29],3; bar.warp.sync 0xffffffff; ld.shared.u32 %r9,[%r29];" + OUT + "ret;"
    assert run(body, block=32)["B"].writes == Intervals.of([(12, 16)])


def test_nobody_knows_which_lane_is_elected():
    body = "elect.sync %r5|%p0,-1; and.b32 %r9,%r1,31; @!%p0 bra E;" + OUT + "E: ret;"
    assert verdict(module(body), "k").kind is Kind.UNKNOWN
    with pytest.raises(NotDerivable, match="which lane is elected"):
        run(body)
    same = "elect.sync %r5|%p0,-1; shr.u32 %r9,%r1,5; @!%p0 bra E;" + OUT + "E: ret;"
    assert verdict(module(same), "k").kind is Kind.INDEPENDENT
    assert run(same)["B"].writes == Intervals.of([(0, 8)])


def test_an_election_in_a_loop_is_held_again():
    body = (
        "mov.u32 %r9,%r1; L: elect.sync %r5|%p0,-1; @%p0 st.global.u32 [%d1],%r1; ld.global.u32 %r6,[%d0]; setp.eq.u32 %p1,%r6,0;"
    )
    body += "@%p1 exit; bra L;"
    assert verdict(module(body), "k").kind is not Kind.INDEPENDENT


@pytest.mark.parametrize(
    "hidden", ["tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r29], 32;", "mbarrier.init.shared.b64 [%r29],1;"]
)
def test_what_an_instruction_leaves_in_shared_memory_is_not_overlooked(hidden):
    body = "setp.eq.u32 %p0,%r1,0; @%p0 st.shared.u32 [%r29],5; bar.sync 0;" + hidden + "bar.sync 0; ld.shared.u32 %r9,[%r29];"
    with pytest.raises(NotDerivable):
        run(body + OUT + "ret;", target="sm_100a", block=32)


def test_a_namesake_of_a_module_variable_hides_it_from_the_kernel_alone():
    functions = ".global .align 4 .b8 xx[16];\n.func f { .reg .b64 %a; mov.u64 %a, xx; st.global.u32 [%a+4],1; ret; }"
    body = ".shared .align 4 .b8 xx[16]; mov.u32 %r5, xx; st.shared.u32 [%r5],2; call.uni f; ret;"
    found = run(body, functions=functions)
    assert found.complete
    assert found["xx"].writes == Intervals.of([(4, 8)])


def test_a_register_that_some_threads_never_set_is_unknown_in_them():
    with pytest.raises(NotDerivable, match="its address depends on data"):
        run("setp.ne.u32 %p0,%r1,0; @%p0 bra E; mov.u32 %r9,5; E:" + OUT + "ret;")


@pytest.mark.parametrize(
    "text",
    [
        "call.uni f;", "bra;", "mov %r9,%r1;" + OUT, "st.shared.u32 [%r29]; ld.shared.u32 %r9,[%r29];" + OUT,
        "isspacep %p0, %d0; @%p0 exit; st.u32 [%d0],1;",
        "shfl.sync.idx.b32 %r9,%r1;" + OUT, "vote.sync.ballot.b32 %r9,%p0;" + OUT, "cvta.global.u64 %d5; st.global.u32 [%d5],1;",
        "wmma.load.a.sync.aligned.row.f16 {%r2}, [%d0];",
        "cp.async.bulk.tensor.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r29], [%d0, {%r1}], [%r20];",
    ],
)  # fmt: skip
def test_instructions_that_lack_a_piece_are_one_located_error(text):
    made = module(text + "ret;", functions=".func f(.param .b32 a) { ret; }", target="sm_90a")
    with pytest.raises(PtxError, match=r"^probe.ptx:\d+:\d+: "):
        footprint(made, "k", 1, 32, [A, B, 4])


def test_an_instrumented_module_refuses_a_matrix_without_a_shape():
    with pytest.raises(PtxError, match=r"^probe.ptx:\d+:\d+: "):
        instrument(module("wmma.load.a.sync.aligned.row.f16 {%r2}, [%d0]; ret;"))


@pytest.mark.parametrize("target", ["amdgcn", "gfx90a"])
def test_a_target_of_another_maker_is_refused_by_the_parser(target):
    with pytest.raises(PtxError, match=rf"^probe.ptx:2:9: expected a target like sm_90, found '{target}'"):
        module("ret;", target=target)


@pytest.mark.parametrize("target", ["sm_999", "sm_14"])
def test_a_target_that_the_table_does_not_know_is_refused(target):
    made = module("ret;", target=target)
    for use in (lambda: verdict(made, "k"), lambda: footprint(made, "k", 1, 1, []), lambda: instrument(made)):
        with pytest.raises(PtxError, match=rf"^probe.ptx:2:1: target {target} is none"):
            use()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"args": [A, B, 4.0]}, r"parameter n is a whole number \(u32\), got 4.0"),
        ({"args": [A, B, np.float32(4)]}, "parameter n is a whole number"),
        ({"args": [A, B, "4"]}, "parameter n got str '4'"),
        ({"cluster": 0}, "1 to 16 blocks"),
        ({"cluster": 32, "grid": 32}, "1 to 16 blocks"),
        ({"shared_bytes": -5}, "shared_bytes -5"),
        ({"shared_bytes": 10**9}, "shared_bytes 1000000000"),
        ({"grid": (1, 70000)}, "65535 along y and z"),
        ({"block": (1, 1, 128)}, "64 along z"),
        ({"tuning": ".maxntid 32,1,1"}, "at most 32 threads a block, not 64"),
    ],
)
def test_launches_that_the_driver_would_refuse(change, message):
    with pytest.raises(ValueError, match=message):
        run("mov.u32 %r9,%r0;" + OUT + "ret;", **change)


def test_numbers_of_numpy_are_numbers():
    found = run("mov.u32 %r9,%r0;" + OUT + "ret;", args=[A, B, np.int64(4)], grid=np.int64(1), block=(np.int32(64),))
    assert found["B"].writes == Intervals.of([(16, 20)])


def test_a_parameter_that_was_not_given_is_named():
    with pytest.raises(NotDerivable, match=r"\(these parameters were not given: n\)"):
        run("mov.u32 %r9,%r0;" + OUT + "ret;", args=[A, B])
