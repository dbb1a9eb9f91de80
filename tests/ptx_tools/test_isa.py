"""The instruction table: what each memory instruction touches, and that nothing is passed over in silence."""

from __future__ import annotations

import pytest

from tessera_compile.ptx_tools import Kind, NotDerivable, PtxError, footprint, isa, parse, verdict
from tessera_compile.ptx_tools.syntax import Literal, Name
from tests.ptx_tools.corpus import static_files
from tests.ptx_tools.launching import probe, static_module
from tests.ptx_tools.trees import instruction

MBARRIER = "mbarrier::complete_tx::bytes"
# mnemonic: what it touches, as space, kind, record and bytes, in the order of the file
MEMORY = [
    ("ld.param.u64", "param read mark 8"),
    ("ld.param.u64", "param read mark 8"),
    ("ld.param.u32", "param read mark 4"),
    ("ld.global.v8.f32", "global read mark 32"),
    ("ld.global.nc.v4.b64", "global read mark 32"),
    ("st.global.v8.b32", "global write mark 32"),
    ("st.global.v4.b64", "global write mark 32"),
    ("ld.global.b128", "global read mark 16"),
    ("st.global.b128", "global write mark 16"),
    ("st.async.release.gpu.global.u32", "global write mark 4"),
    ("st.async.mmio.release.sys.global.b64", "global write mark 8"),
    ("red.async.release.gpu.global.add.u32", "global both mark 4"),
    (f"st.async.shared::cluster.{MBARRIER}.v2.u32", "shared write mark 8"),
    (f"red.async.relaxed.cluster.shared::cluster.{MBARRIER}.inc.u32", "shared both mark 4"),
    ("st.bulk.weak.shared::cta", "shared write bulk -"),
    ("st.bulk", "shared write bulk -"),
    ("multimem.ld_reduce.relaxed.gpu.global.add.f32", "global read replicas 4"),
    ("multimem.ld_reduce.global.add.v4.f32", "global read replicas 16"),
    ("multimem.st.weak.global.v4.f32", "global write replicas 16"),
    ("multimem.red.global.add.v2.bf16x2", "global both replicas 8"),
    ("multimem.ld_reduce.global.min.v4.bf16x2", "global read replicas 16"),
    ("atom.global.add.noftz.v8.bf16", "global both mark 16"),
    ("red.global.v2.f32.add", "global both mark 8"),
    ("red.global.max.noftz.v4.f16x2", "global both mark 16"),
    ("atom.global.exch.b128", "global both mark 16"),
    ("atom.global.cas.b16", "global both mark 2"),
    ("cp.async.ca.shared.global", "global read mark 4, shared write mark 4"),
    ("cp.async.ca.shared.global.L2::128B", "global read mark 8, shared write mark 8"),
    ("cp.async.cg.shared.global.L2::cache_hint", "global read mark 16, shared write mark 16"),
    ("cp.async.cg.shared.global.L2::cache_hint", "global read mark 16, shared write mark 16"),
    (f"cp.async.bulk.shared::cta.global.{MBARRIER}", "global read bulk -, shared write bulk -"),
    (f"cp.async.bulk.shared::cluster.global.{MBARRIER}.multicast::cluster", "global read bulk -, shared write bulk -"),
    ("cp.async.bulk.global.shared::cta.bulk_group", "shared read bulk -, global write bulk -"),
    ("cp.async.bulk.global.shared::cta.bulk_group.cp_mask", "shared read bulk -, global write bulk -"),
    ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16", "shared read bulk -, global both bulk -"),
    (f"cp.reduce.async.bulk.shared::cluster.shared::cta.{MBARRIER}.add.u32", "shared read bulk -, shared both bulk -"),
    (f"cp.async.bulk.tensor.1d.shared::cta.global.tile.{MBARRIER}", "global read tensor -, shared write tensor -"),
    (f"cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.{MBARRIER}", "global read tensor -, shared write tensor -"),
    (
        f"cp.async.bulk.tensor.3d.shared::cluster.global.im2col.{MBARRIER}.multicast::cluster",
        "global read tensor -, shared write tensor -",
    ),
    ("cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group", "global write tensor -, shared read tensor -"),
    ("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group", "global both tensor -, shared read tensor -"),
    ("tensormap.replace.tile.global_address.global.b1024.b64", "global write mark 128"),
    ("tensormap.replace.tile.box_dim.shared::cta.b1024.b32", "shared write mark 128"),
    (
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned",
        "shared read mark 128, global write mark 128",
    ),
    (f"clusterlaunchcontrol.try_cancel.async.shared::cta.{MBARRIER}.b128", "shared write mark 16"),
    ("ld.shared.b128", "shared read mark 16"),
    ("st.global.u32", "global write mark 4"),
    ("discard.global.L2", "global write mark 128"),
    ("discard.L2", "generic write mark 128"),
    ("ldu.global.v4.u32", "global read mark 16"),
    ("wmma.load.a.sync.aligned.row.m16n16k16.global.f16", "global read fragment -"),
    ("wmma.store.d.sync.aligned.row.m16n16k16.global.f32", "global write fragment -"),
    ("wmma.load.c.sync.aligned.col.m16n16k16.f32", "generic read fragment -"),
    ("ld.u32", "generic read mark 4"),
    ("st.u8", "generic write mark 1"),
    ("atom.add.u32", "generic both mark 4"),
    ("red.add.u64", "generic both mark 8"),
    ("ld.param.u8", "param read mark 1"),
    ("ld.u32", "generic read mark 4"),
]
NOTHING = {
    "applypriority.global.L2::evict_normal", "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128",
    "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128", "cp.async.bulk.prefetch.L2.global",
    "cp.async.bulk.prefetch.tensor.2d.L2.global.tile", "createpolicy.range.L2::evict_last.b64", "cvt.u64.u32", "cvta.param.u64",
    "cvta.shared.u64", "fence.proxy.tensormap::generic.acquire.gpu", "isspacep.global", "isspacep.shared::cluster", "mov.b16",
    "mov.b32",
    "mov.b64", "mov.u32", "prefetch.L1", "prefetch.global.L2::evict_last", "prefetch.param.tensormap", "prefetch.tensormap",
    "ret",
    "setp.ne.u32",
}  # fmt: skip


def described(text: isa.Instruction) -> str:
    return ", ".join(f"{a.space} {a.kind} {a.record} {a.nbytes or '-'}" for a in isa.accesses(text))


def test_every_memory_form_of_sm_100():
    instructions = list(static_module("hand/h2_mem100.ptx").kernel("mem100").instructions())
    assert [(i.mnemonic, described(i)) for i in instructions if isa.accesses(i)] == MEMORY
    assert {i.mnemonic for i in instructions if not isa.accesses(i)} == NOTHING


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ld.relaxed.gpu.global.L1::no_allocate.L2::256B.v2.b16 {a, b}, [p];", "global read mark 4"),
        ("ld.volatile.v4.u8 {a, b, c, d}, [p];", "generic read mark 4"),
        ("ld.mmio.relaxed.sys.global.u32 a, [p];", "global read mark 4"),
        ("ld.const.f64 a, [p];", "const read mark 8"),
        ("ld.shared::cluster.v2.u64 {a, b}, [p];", "shared read mark 16"),
        ("ld.param::func.b32 a, [p];", "param read mark 4"),
        ("st.local.b8 [p], a;", "local write mark 1"),
        ("st.global.L2::cache_hint.v4.f32 [p], {a, b, c, d}, e;", "global write mark 16"),
        ("atom.global.v4.f32.add {a, b, c, d}, [p], {a, b, c, d};", "global both mark 16"),
        ("atom.add.release.gpu.u64 a, [p], b;", "generic both mark 8"),
        ("atom.shared::cta.cas.b64 a, [p], b, c;", "shared both mark 8"),
        ("red.relaxed.sys.global.or.b32 [p], a;", "global both mark 4"),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {a, b, c, d}, [p];", "shared read mark 16"),
        ("stmatrix.sync.aligned.m8n8.x4.shared.b16 [p], {a, b, c, d};", "shared write mark 16"),
        ("tex.2d.v4.f32.f32 {a, b, c, d}, [t, {x, y}];", "resource read resource -"),
        ("sust.b.2d.b32.trap [t, {x, y}], {a};", "resource write resource -"),
        ("sured.b.add.1d.u32.trap [t, {x}], a;", "resource both resource -"),
        ("multimem.cp.async.bulk.global.shared::cta.bulk_group [p], [q], 64;", "global write replicas -"),
        ("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [p], [q], 64, [m];",
        "shared read bulk -, shared write bulk -"),
        ("cp.async.commit_group;", ""), ("cp.async.bulk.wait_group.read 0;", ""),
        ("cp.async.mbarrier.arrive.noinc.shared.b64 [p];", ""),
        ("mbarrier.try_wait.parity.shared.b64 q, [p], 0;", "shared write mark 8"), ("wgmma.fence.sync.aligned;", ""),
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [p], 64;", "shared write mark 4"),
    ],
)  # fmt: skip
def test_other_forms(text, expected):
    assert described(instruction(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "frobnicate.u32 a, b;", "ld.global a, [p];", "ld.global.u32 a, b;", "cp.async.ca.shared.global [p], [q], n;",
        "cp.unheard [p], [q], 4;",
        "st.async.u32 [p], a;", "red.async.add.u32 [p], a;", "multimem.new.global [p];", "wmma.new.f32 a, [p];",
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [p], [q], [m];",
        "cp.async.bulk.shared::cluster.global.ignore_oob.mbarrier::complete_tx::bytes [p], [q], 64, 0, 0, [m];",
        "tensormap.new [p];",
    ],
)  # fmt: skip
def test_what_the_table_does_not_know_fails(text):
    found = instruction(text)
    with pytest.raises(isa.UnknownOpcode, match=rf"^here:7:3: {found.mnemonic} is not in the instruction table"):
        isa.accesses(found, "here:7:3")


def test_an_unknown_opcode_fails_everywhere_with_its_place():
    module = probe("ld.global.u32 %r3, [%rd4];\n  frobnicate.global.u32 %r3, [%rd4];")
    line = module.text[: module.text.index("frobnicate")].count("\n") + 1
    where = f"probe.ptx:{line}:3: frobnicate.global.u32 is not in the instruction table, so what it touches is unknown"
    found = verdict(module, "k")
    assert found.kind is Kind.UNKNOWN
    assert found.reason == where
    with pytest.raises(PtxError, match=f"^{where}$"):
        footprint(module, "k", 1, 1, [])


def test_an_unknown_opcode_where_nobody_comes_is_one_too():
    """A callee that is never called is another matter."""
    assert verdict(probe("bra A; frobnicate.u32 %r3, %r4; A:"), "k").kind is Kind.UNKNOWN
    assert verdict(probe("", ".func f() { frobnicate.u32 _, _; ret; }"), "k").kind is Kind.INDEPENDENT
    assert verdict(probe("call f;", ".func f() { frobnicate.u32 _, _; ret; }"), "k").kind is Kind.UNKNOWN


def test_a_module_that_is_newer_than_the_table_is_refused():
    major, minor = isa.NEWEST_VERSION
    text = "// a comment\n.version {}\n.target sm_100a\n.address_size 64\n.visible .entry k() {{ ret; }}"
    module = parse(text.format(f"{major}.{minor + 1}"), name="new.ptx")
    message = rf"^new.ptx:2:1: PTX {major}.{minor + 1} is newer than the instruction table, which ends at {major}.{minor}$"
    with pytest.raises(PtxError, match=message):
        verdict(module, "k")
    with pytest.raises(PtxError, match=message):
        footprint(module, "k", 1, 1, [])
    newest = parse(text.format(f"{major}.{minor}"))
    assert verdict(newest, "k").kind is Kind.INDEPENDENT
    assert footprint(newest, "k", 1, 1, []).complete
    assert verdict(parse(text.format(f"{major - 1}.{minor + 5}")), "k").kind is Kind.INDEPENDENT


@pytest.mark.parametrize(
    ("mnemonic", "rows"),
    [
        ("load.a.sync.aligned.row.m16n16k16.global.f16", (16, 16, 16)), ("load.a.sync.aligned.row.m32n8k16.f16", (32, 16, 16)),
        ("load.a.sync.aligned.col.m32n8k16.f16", (16, 32, 16)), ("load.b.sync.aligned.row.m32n8k16.bf16", (16, 8, 16)),
        ("load.b.sync.aligned.col.m8n32k16.s8", (32, 16, 8)), ("load.c.sync.aligned.row.m8n32k16.f32", (8, 32, 32)),
        ("load.c.sync.aligned.col.m8n32k16.s32", (32, 8, 32)), ("load.a.sync.aligned.row.m16n16k8.tf32", (16, 8, 32)),
        ("load.a.sync.aligned.row.m8n8k4.f64", (8, 4, 64)), ("load.a.sync.aligned.row.m8n8k32.s4", (8, 32, 4)),
        ("load.b.sync.aligned.col.m8n8k128.b1", (8, 128, 1)),
    ],
)  # fmt: skip
def test_rows_of_a_fragment(mnemonic, rows):
    assert isa.fragment_rows(instruction(f"wmma.{mnemonic} {{a}}, [p], s;")) == rows


def test_operands_that_say_how_much():
    whole, limited, hinted, ignored = (
        instruction(f"cp.async.cg.shared.global{hint} [s], [p], 16{more};")
        for hint, more in (("", ""), ("", ", n"), (".L2::cache_hint", ", n, h"), (".L2::cache_hint", ", h"))
    )
    assert [isa.accesses(i)[0].limit for i in (whole, limited, hinted, ignored)] == [None, Name("n"), Name("n"), None]
    copy, target = isa.accesses(
        instruction("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.cp_mask [p], [s], n, h, m;")
    )
    assert (copy.size, copy.byte_mask, target.size, target.byte_mask) == (Name("n"), None, Name("n"), Name("m"))
    (fragment,) = isa.accesses(instruction("wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [p], {a}, 24;"))
    assert fragment.size == Literal(24, "24")


@pytest.mark.parametrize("path", static_files(), ids=lambda path: path.stem)
def test_the_table_knows_the_corpus(path):
    module = parse(path.read_text(), name=path.name)
    for function in module.functions.values():
        for each in function.instructions():
            isa.accesses(each)


def test_a_stop_of_the_table_is_no_missing_footprint():
    """What is refused for a launch is one thing, what is not understood another."""
    assert not issubclass(isa.UnknownOpcode, NotDerivable)
    assert issubclass(isa.UnknownOpcode, PtxError)
