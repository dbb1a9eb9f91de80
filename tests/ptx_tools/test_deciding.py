"""Verdicts: of the whole corpus, and of small kernels that carry what they load to an access by every way there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera_compile.ptx_tools import Kind, PtxError, Verdict, parse, verdict
from tests.ptx_tools.corpus import static_files, triton_cases, triton_ptx
from tests.ptx_tools.launching import probe

# Reasons, as far as a verdict needs one:
# - a spin lock only repeats accesses that have happened (k_atomics, cuda_atomic)
# - an assert only stops the kernel (k_inductor_where)
# - whoever comes last at the semaphore does the same work (k_splitk_semaphore): only what the counters start from decides
# - k_scatter sends its values through the shared memory that its indices go through, which the taint does not tell apart
# - converge: how often a loop runs depends on what it writes; grouped GEMM: pointers come from memory
# - the warps of a specialised matmul are told what to do through shared memory, where tiles lie too: only interpretation tells
#   them apart
# - sw switches by a number, not by data; virt and fptr call through pointers; gridsync asks for the driver's own memory
STATIC = {
    "b01": {"empty": "INDEPENDENT", "none": "INDEPENDENT"},
    "b02": {"k": "INDEPENDENT"},
    "b03": {"k": "INDEPENDENT"},
    "b04": {"k": "INDEPENDENT"},
    "b05": {"k": "UNKNOWN an indirect call"},
    "b06": {"k": "INDEPENDENT"},
    "b07": {"k": "INDEPENDENT"},
    "b08": {"k": "INDEPENDENT"},
    "b09": {"k": "INDEPENDENT"},
    "b10": {"k": "INDEPENDENT"},
    "b11": {"k": "DEPENDENT ld.global.u32"},
    "c01_vec": {"vec4": "INDEPENDENT", "grid_stride": "INDEPENDENT"},
    "c02_calls": {"calls": "INDEPENDENT", "fptr": "UNKNOWN an indirect call", "virt": "UNKNOWN an indirect call"},
    "c03_switch": {"sw": "INDEPENDENT"},
    "c05_atomics": {"atoms": "INDEPENDENT", "cuda_atomic": "INDEPENDENT", "vec_red": "INDEPENDENT"},
    "c06_async": {"cpasync": "INDEPENDENT", "pipe": "INDEPENDENT", "gridsync": "UNKNOWN depends on %envreg"},
    "c07_tma": {"tma2d": "INDEPENDENT", "tma_ptr_global": "GUARDED 0", "bulk1d": "INDEPENDENT", "clus": "INDEPENDENT"},
    "c08_tex": {"texk": "UNKNOWN touches a texture or surface"},
    "c09_printf_assert": {"pr": "UNKNOWN depends on malloc", "memc": "INDEPENDENT", "alloca_k": "INDEPENDENT"},
    "c10_loops": {
        "stencil": "INDEPENDENT", "csr": "GUARDED 0 1", "transpose": "INDEPENDENT", "converge": "DEPENDENT bra",
        "bytes": "INDEPENDENT",
    },
    "c11_hints": {"hints": "INDEPENDENT"},
    "c12_debug_G": {"dbg": "INDEPENDENT"},
    "c12_debug_lineinfo": {"dbg": "INDEPENDENT"},
    "h1_syntax": {"syn": "INDEPENDENT"},
    "h2_mem100": {"mem100": "UNKNOWN touches a multicast address"},
}  # fmt: skip
TRITON = {
    "add": "INDEPENDENT", "add_bf16": "INDEPENDENT", "softmax": "INDEPENDENT", "layernorm": "INDEPENDENT",
    "matmul": "INDEPENDENT",
    "matmul_tma_host": "INDEPENDENT", "matmul_tma_host_fallback": "INDEPENDENT", "matmul_tma_dev": "INDEPENDENT",
    "matmul_ws": "DEPENDENT bra", "matmul_ws_64": "DEPENDENT bra", "matmul_2cta": "INDEPENDENT", "flash_causal": "INDEPENDENT",
    "flash_varlen": "GUARDED 4", "atomics": "INDEPENDENT", "gather": "GUARDED 0", "scatter": "GUARDED 0 1",
    "inductor_where": "GUARDED 0",
    "inductor_red": "INDEPENDENT", "dropout": "INDEPENDENT", "masked_by_data": "GUARDED 0", "loaded_bound": "GUARDED 1",
    "grouped_gemm": "DEPENDENT st.global", "inline_asm": "INDEPENDENT", "print_sort_hist": "INDEPENDENT",
    "splitk_semaphore": "GUARDED 2",
}  # fmt: skip


def check(found: Verdict, expected: str, kernel: str) -> None:
    kind, *words = expected.split(" ")
    assert found.kind == kind, str(found)
    assert found.data_dependent is {"INDEPENDENT": False, "UNKNOWN": None}.get(kind, True)
    if kind == "GUARDED":
        assert found.buffers == tuple(w if w.isalpha() else f"{kernel}_param_{w}" for w in words)
    elif kind == "DEPENDENT":
        assert any(site.rsplit(": ", 1)[1].startswith(words[0]) for site in found.sites)
    elif kind == "UNKNOWN":
        assert " ".join(words) in found.reason


@pytest.mark.parametrize("path", static_files(), ids=lambda path: path.stem)
def test_files_of_the_corpus(path: Path):
    module = parse(path.read_text(), name=path.name)
    stem = path.name.split(".")[0]
    if path.parent.name == "triton":
        (kernel,) = module.kernels
        check(verdict(module), TRITON[stem], kernel)
        return
    expected = STATIC[stem if stem in STATIC else stem.split("_")[0]]
    assert set(module.kernels) == set(expected)
    for kernel, word in expected.items():
        found = verdict(module, kernel)
        check(found, word, kernel)
        assert all(site.startswith(f"{path.name}:") for site in found.sites)


@pytest.mark.parametrize("case", triton_cases())
def test_triton_kernels_of_the_corpus(case: str):
    module = parse(triton_ptx(case).ptx, name=case)
    (kernel,) = module.kernels
    check(verdict(module), TRITON[case.split(".")[0]], kernel)


# -- the ways of a loaded value

LOAD = "ld.global.u32 %r3, [%rd4];"
STORE = "mul.wide.u32 %rd6, %r4, 4; add.u64 %rd7, %rd2, %rd6; st.global.u32 [%rd7], 0;"


def decide(body: str, declarations: str = "") -> Verdict:
    return verdict(probe(body, declarations), "k")


GUARDED_BY_P = {
    "address": LOAD + "mov.u32 %r4, %r3;" + STORE,
    "predicate": LOAD + "setp.ne.u32 %p1, %r3, 0; @%p1 st.global.u32 [%rd5], 1;",
    "predicate of a load": LOAD + "setp.ne.u32 %p1, %r3, 0; @!%p1 ld.global.u32 %r5, [%rd5];",
    "loop bound": LOAD + "mov.u32 %r4, 0; L:" + STORE + "add.u32 %r4, %r4, 1; setp.lt.u32 %p1, %r4, %r3; @%p1 bra L;",
    "selp": LOAD + "setp.ne.u32 %p1, %r3, 0; selp.u32 %r4, 1, 2, %p1;" + STORE,
    "value under a guard": LOAD + "setp.ne.u32 %p1, %r3, 0; mov.u32 %r4, 0; @%p1 mov.u32 %r4, 9;" + STORE,
    "implicit flow": LOAD + "setp.ne.u32 %p1, %r3, 0; @%p1 bra A; mov.u32 %r4, 1; bra B; A: mov.u32 %r4, 2; B:" + STORE,
    "early exit": LOAD + "setp.ne.u32 %p1, %r3, 0; @%p1 exit; st.global.u32 [%rd5], 1;",
    "early return": LOAD + "setp.ne.u32 %p1, %r3, 0; @%p1 ret; st.global.u32 [%rd5], 1;",
    "shared memory": LOAD + "st.shared.u32 [sm], %r3; bar.sync 0; ld.shared.u32 %r4, [sm+4];" + STORE,
    "shared memory, generic address": LOAD
    + "cvt.u64.u32 %rd10, %r9; cvta.shared.u64 %rd10, %rd10; st.u32 [%rd10], %r3; bar.sync 0; ld.shared.u32 %r4, [sm];" + STORE,
    "shared memory by cp.async": "cp.async.ca.shared.global [sm], [%rd4], 4; cp.async.wait_all; bar.sync 0;"
    "ld.shared.u32 %r4, [sm];" + STORE,
    "shared memory by bulk copy": "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [sm], [%rd1], 64, [bar];"
    "ld.shared.u32 %r4, [sm];" + STORE,
    "shared memory of the cluster": LOAD + "st.shared.u32 [sm], %r3; mapa.shared::cluster.u32 %r5, %r9, 1;"
    "ld.shared::cluster.u32 %r4, [%r5];"
    + STORE,
    "atomic in shared memory": LOAD + "red.shared.add.u32 [sm], %r3; bar.sync 0; ld.shared.u32 %r4, [sm];" + STORE,
    "ldmatrix": LOAD + "st.shared.u32 [sm], %r3; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r4}, [%r9];" + STORE,
    "local memory": LOAD + "st.local.u32 [lo+8], %r3; ld.local.u32 %r4, [lo+8];" + STORE,
    "local memory, generic address": LOAD
    + "mov.u64 %rd10, lo; cvta.local.u64 %rd10, %rd10; st.u32 [%rd10+4], %r3; ld.local.u32 %r4, [lo+4];" + STORE,
    "shfl": LOAD + "shfl.sync.idx.b32 %r4, %r3, 0, 31, -1;" + STORE,
    "lane of a shfl": LOAD + "shfl.sync.idx.b32 %r4, %r2, %r3, 31, -1;" + STORE,
    "predicate of a shfl": LOAD + "shfl.sync.up.b32 %r4|%p1, %r2, %r3, 0, -1; @%p1 st.global.u32 [%rd5], 1;",
    "vote": LOAD + "setp.ne.u32 %p1, %r3, 0; vote.sync.any.pred %p2, %p1, -1; @%p2 st.global.u32 [%rd5], 1;",
    "ballot": LOAD + "setp.ne.u32 %p1, %r3, 0; vote.sync.ballot.b32 %r4, %p1, -1;" + STORE,
    "barrier with a reduction": LOAD + "setp.ne.u32 %p1, %r3, 0; bar.red.popc.u32 %r4, 0, %p1;" + STORE,
    "match": LOAD + "match.any.sync.b32 %r4, %r3, -1;" + STORE,
    "redux": LOAD + "redux.sync.add.u32 %r4, %r3, -1;" + STORE,
    "carry": LOAD + "add.cc.u32 %r5, %r3, -1; addc.u32 %r4, 0, 0;" + STORE,
    "second destination": LOAD + "setp.eq.u32 %p1|%p2, %r3, 0; @%p2 st.global.u32 [%rd5], 1;",
    "unpacked": LOAD + "mov.b64 %rd10, {%r2, %r3}; mov.b64 {%r5, %r4}, %rd10;" + STORE,
    "half of a vector load": "ld.global.v2.u32 {%r3, %r4}, [%rd4];" + STORE,
    "video instruction": LOAD + "vadd.u32.u32.u32 %r4, %r3, %r2;" + STORE,
    "matrix product": LOAD + "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r4, %r5}, {%r3}, {%r2}, {%r2, %r2};" + STORE,
    "brx.idx": LOAD + "T: .branchtargets A, B; brx.idx %r3, T; A: st.global.u32 [%rd5], 1; B:",
    "size of a bulk copy": LOAD + "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [sm], [%rd2], %r3, [bar];",
    "mask of a bulk copy": "ld.global.u16 %h1, [%rd4];"
    "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd2], [%r9], 64, %h1;",
    "source size of a cp.async": LOAD + "cp.async.ca.shared.global [sm], [%rd2], 16, %r3;",
    "ignored source of a cp.async": LOAD + "setp.ne.u32 %p1, %r3, 0;"
    "cp.async.cg.shared.global.L2::cache_hint [sm], [%rd2], 16, %p1, %rd2;",
    "coordinate of a tensor copy": LOAD
    + "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [sm], [%rd8, {%r3, %r2}], [bar];",
    "stride of a matrix": LOAD + "wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {%r4,%r5,%r6,%r7,%r8,%r10,%r11,%r12},"
    "[%rd2], %r3;",
    "tensor map in global memory": "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [sm],"
    "[%rd1, {0, %r2}], [bar];",
    "field of a tensor map": "tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%r9], 1, %r3;".join((LOAD, ""))
    + "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd2], [%r9], 128;"
    "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [sm], [%rd2, {0, %r2}], [bar];",
    "spin whose access moves": "L:" + LOAD + "add.u64 %rd4, %rd4, 4; setp.ne.u32 %p1, %r3, 0; @%p1 bra L;",
    "spin with an access behind its exit": "L:" + LOAD + "setp.ne.u32 %p1, %r3, 0; @%p1 bra D; st.global.u32 [%rd5], 1;"
    "bra L; D:",
    "count of a loop used after it": "mov.u32 %r4, 0; L:" + LOAD + "add.u32 %r4, %r4, 1; setp.ne.u32 %p1, %r3, 0;"
    "@%p1 bra L;" + STORE,
    "float comparison": "ld.global.f32 %f1, [%rd4]; setp.gt.f32 %p1, %f1, 0f00000000; @%p1 st.global.u32 [%rd5], 1;",
}  # fmt: skip


@pytest.mark.parametrize("way", GUARDED_BY_P)
def test_what_is_loaded_from_p_decides(way: str):
    found = decide(GUARDED_BY_P[way])
    assert (found.kind, found.buffers) == (Kind.GUARDED, ("p",)), str(found)
    assert found.sites
    assert all(site.startswith("probe.ptx:") for site in found.sites)


CALLS = {
    "by register": (
        ".func (.reg .b32 y) f(.reg .b32 x) { add.u32 y, x, 1; ret; }",
        "call (%r4), f, (%r3);",
    ),
    "by parameter": (
        ".func (.param .b32 y) f(.param .b32 x) { .reg .b32 %r; ld.param.b32 %r, [x]; st.param.b32 [y], %r; ret; }",
        "{ .param .b32 a; .param .b32 b; st.param.b32 [a], %r3; call (b), f, (a); ld.param.b32 %r4, [b]; }",
    ),
    "by struct": (
        ".func (.param .align 4 .b8 y[8]) f(.param .align 4 .b8 x[8]) { .reg .b32 %r; ld.param.b32 %r, [x+4];"
        "st.param.b32 [y+4], %r; ret; }",
        "{ .param .align 4 .b8 a[8]; .param .align 4 .b8 b[8]; st.param.v2.b32 [a], {0, %r3}; call (b), f, (a);"
        "ld.param.b32 %r4, [b+4]; }",
    ),
    "by a branch of the callee": (
        ".func (.reg .b32 y) f(.reg .b32 x) { .reg .pred p; setp.eq.u32 p, x, 0; mov.u32 y, 1; @p ret; mov.u32 y, 2; ret; }",
        "call (%r4), f, (%r3);",
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", CALLS)
def test_what_passes_through_a_call_decides(way: str):
    function, call = CALLS[way]
    assert decide(LOAD + call + STORE, function).buffers == ("p",)
    assert decide(call.replace("%r3", "%r1") + STORE, function).kind is Kind.INDEPENDENT


def test_an_access_inside_a_callee_is_decided_by_its_caller():
    function = ".func f(.reg .b64 a, .reg .b32 x) { st.global.u32 [a], x; ret; }"
    assert decide(LOAD + "call f, (%rd5, %r3);", function).kind is Kind.INDEPENDENT
    assert decide(LOAD + "mul.wide.u32 %rd6, %r3, 4; add.u64 %rd6, %rd2, %rd6; call f, (%rd6, 1);", function).buffers == ("p",)
    assert decide(LOAD + "setp.ne.u32 %p1, %r3, 0; @%p1 call f, (%rd5, 1);", function).buffers == ("p",)


@pytest.mark.parametrize("space", ["global", "const"])
def test_tables_of_the_module_decide(space: str):
    found = decide(f"ld.{space}.u32 %r4, [table+4];" + STORE, f".{space} .align 4 .u32 table[4] = {{1, 2, 3, 4}};")
    assert (found.kind, found.buffers) == (Kind.GUARDED, ("table",))


INDEPENDENT = {
    "stored data": LOAD + "st.global.u32 [%rd5], %r3;",
    "a branch around nothing that matters": LOAD
    + "setp.ne.u32 %p1, %r3, 0; @%p1 bra A; add.u32 %r3, %r3, 1; A: st.global.u32 [%rd5], %r3;",
    "a trap": LOAD + "setp.ne.u32 %p1, %r3, 0; @%p1 bra T; st.global.u32 [%rd5], %r3; ret; T: trap;",
    "a spin lock": "L: atom.global.cas.b32 %r3, [%rd2], 0, 1; setp.ne.u32 %p1, %r3, 0; @%p1 bra L; st.global.u32 [%rd5], 1;"
    "atom.global.exch.b32 %r3, [%rd2], 0;",
    "a spin that loads two things": "L: ld.global.u32 %r3, [%rd4]; ld.global.u32 %r5, [%rd5]; add.u32 %r3, %r3, %r5;"
    "setp.ne.u32 %p1, %r3, 0; @%p1 bra L;",
    "shared memory without data": LOAD + "st.shared.u32 [sm], %r2; bar.sync 0; ld.shared.u32 %r4, [sm];" + STORE,
    "data in a register of its own scope": LOAD + "{ .reg .b32 %r4; mov.u32 %r4, %r3; } mov.u32 %r4, %r2;" + STORE,
    "a size from an argument": "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [sm], [%rd2], %r1, [bar];",
    "a vote about no data": "setp.lt.u32 %p1, %r2, %r1; vote.sync.any.pred %p2, %p1, -1; @%p2 st.global.u32 [%rd5], 1;",
    "a tensor map among the parameters": "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
    " [sm], [%rd8, {0, %r2}], [bar];",
    "waiting for a barrier": "L: mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0; @!%p1 bra L; st.global.u32 [%rd5], 1;",
}  # fmt: skip


@pytest.mark.parametrize("way", INDEPENDENT)
def test_what_does_not_decide(way: str):
    assert str(decide(INDEPENDENT[way])) == "INDEPENDENT"


DEPENDENT = {
    "result of an atomic": "atom.global.add.u32 %r4, [%rd1], 1;" + STORE,
    "result of an atomic in shared memory": "st.shared.u32 [sm], 0; bar.sync 0; atom.shared.add.u32 %r4, [sm], 1;" + STORE,
    "the kernel writes what it asks": LOAD + "mov.u32 %r4, %r3; st.global.u32 [%rd4], 7;" + STORE,
    "shared memory, an address that was rounded": LOAD
    + "cvt.u64.u32 %rd10, %r9; cvta.shared.u64 %rd10, %rd10; shr.u64 %rd10, %rd10, 4; shl.b64 %rd10, %rd10, 4;"
    "st.u32 [%rd10], %r3;"
    "bar.sync 0; ld.shared.u32 %r4, [sm];" + STORE,
    "a loaded pointer": "ld.global.u64 %rd10, [%rd1]; st.global.u32 [%rd10], 1;",
    "a write to who knows where": "mul.lo.u64 %rd10, %rd2, 2; st.global.u32 [%rd10], 0;" + LOAD + "mov.u32 %r4, %r3;" + STORE,
    "tensor memory": "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r2];" + STORE,
    "warp group product": "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%r4,%r5,%r6,%r7}, %rd1, %rd1, 1;" + STORE,
    "converging loop": LOAD + "L: setp.gt.u32 %p1, %r3, 9; @!%p1 bra D; st.global.u32 [%rd4], %r3;"
    "ld.global.u32 %r3, [%rd4]; bra L; D:",
}  # fmt: skip


@pytest.mark.parametrize("way", DEPENDENT)
def test_what_no_guard_can_pin_down(way: str):
    assert decide(DEPENDENT[way]).kind is Kind.DEPENDENT


def test_a_tile_that_a_tensor_copy_brought_decides():
    """The map is an argument; what lies where it points is not."""
    copy = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [sm], [%rd8, {0, %r2}], [bar];"
    found = decide(copy + "ld.shared.u32 %r4, [sm];" + STORE)
    assert (found.kind, found.buffers) == (Kind.GUARDED, ("m",))


UNKNOWN = {
    "%clock": "mov.u32 %r4, %clock;" + STORE,
    "%clock64 in a guard": "mov.u64 %rd10, %clock64; setp.gt.u64 %p1, %rd10, 9; @%p1 st.global.u32 [%rd5], 1;",
    "%globaltimer in a branch": "mov.u64 %rd10, %globaltimer; setp.gt.u64 %p1, %rd10, 9; @%p1 bra A; st.global.u32 [%rd5], 1; A:",
    "%smid through shared memory": "mov.u32 %r5, %smid; st.shared.u32 [sm], %r5; bar.sync 0; ld.shared.u32 %r4, [sm];" + STORE,
    "%smid through local memory": "mov.u32 %r5, %smid; st.local.u32 [lo], %r5; ld.local.u32 %r4, [lo];" + STORE,
    "%warpid": "mov.u32 %r4, %warpid;" + STORE,
    "texture": "tex.1d.v4.u32.s32 {%r3, %r4, %r5, %r6}, [%rd1, {%r2}];",
    "surface": "sust.b.1d.b32.trap [%rd1, {%r2}], {%r2};",
    "multicast": "multimem.red.global.add.u32 [%rd1], %r2;",
    "who is active": "activemask.b32 %r4;" + STORE,
    "whether something has arrived": "mbarrier.test_wait.parity.shared::cta.b64 %p1, [bar], 0; @%p1 st.global.u32 [%rd5], 1;",
    "a stolen block": "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r9], [bar];"
    "ld.shared.u32 %r4, [sm];" + STORE,
    "indirect call": "mov.u64 %rd10, f; { P: .callprototype _(.reg .b32 x); call %rd10, (%r2), P; }",
    "body elsewhere": "call g, (%r2);",
    "recursion": "call h, (%r2);",
    "unheard-of instruction": "frobnicate.global.u32 %r4, [%rd1];",
}  # fmt: skip


@pytest.mark.parametrize("way", UNKNOWN)
def test_what_is_not_known(way: str):
    functions = ".func f(.reg .b32 x) { ret; } .extern .func g(.reg .b32 x); .func h(.reg .b32 x) { call h, (x); ret; }"
    found = decide(UNKNOWN[way], functions)
    assert (found.kind, found.data_dependent) == (Kind.UNKNOWN, None), str(found)
    assert found.reason.startswith("probe.ptx:")


def test_memory_of_malloc_is_not_known():
    body = (
        "{ .param .b64 s; .param .b64 r; st.param.b64 [s], 16; call.uni (r), malloc, (s); ld.param.b64 %rd10, [r]; }"
        "st.u32 [%rd10], 1; st.global.u32 [%rd5], 1;"
    )
    found = decide(body, ".extern .func (.param .b64 r) malloc(.param .b64 s);")
    assert found.kind is Kind.UNKNOWN
    assert "malloc" in found.reason


def test_memory_of_malloc_is_not_known_where_registers_pass_it():
    found = decide("call (%rd10), malloc, (16); st.u32 [%rd10], 1;", ".extern .func (.reg .b64 r) malloc(.reg .b64 s);")
    assert found.kind is Kind.UNKNOWN


ASK = "setp.eq.u32 %p2, %r2, 0; @%p2 atom.global.add.u32 %r3, [%rd1], {operand}; @%p2 st.shared.u32 [sm+16], %r3; bar.sync 0;"
LAST = "mov.u32 %r5, %ctaid.x; " + ASK + "ld.shared.u32 %r6, [sm+16]; setp.ne.u32 %p1, %r6, {compared}; @%p1 bra D; {work} D:"
MINE = "mul.wide.u32 %rd10, %r5, 4; add.u64 %rd10, %rd5, %rd10; st.global.u32 [%rd10], 1;"


def test_whoever_comes_last_does_the_same_work():
    work = LAST.format(operand=1, compared="%r1", work="st.global.u32 [%rd5], 1;")
    assert str(decide(work)) == "GUARDED(p)"
    before = "add.u32 %r10, %r9, %r2; ld.global.u32 %r11, [%rd5]; st.shared.u32 [%r10], %r11; bar.sync 0;"
    assert str(decide(before + work)) == "GUARDED(p)", "what lay in shared memory before is overwritten"
    each = "atom.global.add.u32 %r3, [%rd4], 1; setp.ne.u32 %p1, %r3, 7; @%p1 bra D; st.global.u32 [%rd5], 1; D:"
    assert str(decide(each)) == "GUARDED(p)", "every thread has a counter of its own"


@pytest.mark.parametrize(
    "body",
    [
        LAST.format(operand=1, compared=7, work=MINE),
        LAST.format(operand="%r5", compared=7, work="st.global.u32 [%rd5], 1;"),
        LAST.format(operand=1, compared="%r5", work="st.global.u32 [%rd5], 1;"),
        LAST.format(operand=1, compared=7, work="st.global.u32 [%rd5], 1;") + "atom.global.exch.b32 %r7, [%rd1], 0;",
        LAST.format(operand=1, compared=7, work="mov.u32 %r4, 5;") + STORE,
        "mov.u32 %r4, 0; A: " + LAST.format(operand=1, compared=7, work=STORE) + "bar.sync 0; add.u32 %r4, %r4, 1;"
        "setp.lt.u32 %p3, %r4, 4; @%p3 bra A;",
        LAST.format(operand=1, compared=7, work="st.global.u32 [%rd5], 1;").replace("@%p2 atom", "atom").replace("@%p2 st", "st"),
        "mov.u32 %r4, 3; mov.u32 %r5, %ctaid.x; setp.eq.u32 %p3, %r5, 0; @%p3 bra A; mov.u32 %r4, 4; A:"
        + LAST.format(operand=1, compared=7, work=STORE),
        "atom.global.add.u32 %r3, [%rd1], 1; setp.ne.u32 %p1, %r3, 7; @%p1 bra D; st.global.u32 [%rd5], 1; D:",
    ],
    ids=["work of its own", "operand of its own", "compared with its own", "a second atomic", "a value for later", "in a loop",
    "all threads ask",
         "a branch of its own before", "threads ask for themselves"],
)  # fmt: skip
def test_a_last_one_that_differs_makes_it_dependent(body: str):
    assert decide(body).kind is Kind.DEPENDENT


def test_a_store_of_other_threads_reaches_a_load():
    """What a guard overwrote, another branch may have stored again."""
    body = (
        LOAD + "setp.eq.u32 %p2, %r2, 0; @%p2 st.shared.u32 [sm], 0; bar.sync 0; setp.lt.u32 %p3, %r2, 32; @%p3 bra A;"
        "bar.sync 0; ld.shared.u32 %r4, [sm];" + STORE + "bra B; A: st.shared.u32 [sm], %r3; bar.sync 0; B:"
    )
    assert str(decide(body)) == "GUARDED(p)"
    assert str(decide(body.replace("[sm], %r3", "[sm], %r2"))) == "INDEPENDENT"
    loop = (
        LOAD + "mov.u32 %r5, 0; st.shared.u32 [sm], 0; L: ld.shared.u32 %r4, [sm];" + STORE + "st.shared.u32 [sm], %r3;"
        "add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 3; @%p1 bra L;"
    )
    assert str(decide(loop)) == "GUARDED(p)"
    assert str(decide(loop.replace("[sm], %r3", "[sm+4], %r3"))) == "INDEPENDENT"
    assert str(decide(loop.replace("[sm], %r3", "[sm+3], %r3"))) == "GUARDED(p)"


def test_the_verdict_names_the_missing_kernel():
    with pytest.raises(PtxError, match="has no kernel 'other'; it has k"):
        verdict(probe(""), "other")
