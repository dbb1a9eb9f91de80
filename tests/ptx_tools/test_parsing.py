"""Text to tree: what each construct becomes, and what is said where the text is not PTX."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera_compile.ptx_tools.parsing import parse
from tessera_compile.ptx_tools.syntax import (
    Address,
    Block,
    Directive,
    Group,
    Instruction,
    Label,
    Literal,
    Module,
    Name,
    Not,
    Offset,
    Pair,
    PtxError,
    Registers,
    Variable,
    Vector,
)
from tests.ptx_tools.corpus import DATA, static_files
from tests.ptx_tools.trees import HEAD, body, instruction, instructions

SMALL = [DATA / "hand" / "h1_syntax.ptx", *sorted((DATA / "bugs").glob("*.ptx"))]


def load(path: str) -> Module:
    file = DATA / path
    return parse(file.read_text(), name=file.name)


def names(*words: str) -> tuple[Name, ...]:
    return tuple(map(Name, words))


def variable(text: str) -> Variable:
    (found,) = [item for item in parse(HEAD + text).items if isinstance(item, Variable)]
    return found


# -- the module


def test_the_head_of_a_module():
    module = load("hand/h1_syntax.ptx")
    assert (module.version, module.target, module.target_options) == ((8, 7), "sm_90a", ("texmode_independent",))
    assert (module.name, module.address_size) == ("h1_syntax.ptx", 64)
    assert list(module.functions) == ["oldabi", "noargs", "syn"]
    assert list(module.kernels) == ["syn"]
    assert list(module.variables) == ["cst", "mg", "tbl", "arr", "wk", "dyn"]


def test_the_address_size_may_be_left_out():
    assert parse(".version 8.4\n.target sm_80\n.entry k { ret; }").address_size == 64


def test_kernels_with_and_without_parentheses():
    kernels = load("bugs/b01_gpgpusim_pr60_empty_params.ptx").kernels
    assert kernels["empty"].params == ()
    assert kernels["none"].params is None
    assert all(len(list(kernel.instructions())) == 1 for kernel in kernels.values())


def test_a_kernel_is_found_by_name_or_alone():
    module = load("bugs/b01_gpgpusim_pr60_empty_params.ptx")
    assert module.kernel("none").name == "none"
    with pytest.raises(PtxError, match=r"^b01_.*ptx:1:1: the module has not one kernel; it has empty, none"):
        module.kernel(None)
    with pytest.raises(PtxError, match="has no kernel 'other'"):
        module.kernel("other")
    assert load("hand/h1_syntax.ptx").kernel(None).name == "syn"


def test_a_definition_stands_before_its_declaration():
    text = HEAD + ".func (.param .b32 r) f (.param .b32 a);\n.func (.param .b32 r) f (.param .b32 a) { ret; }\n"
    assert parse(text).functions["f"].body is not None
    module = parse(HEAD + ".extern .func vprintf (.param .b64 a);")
    assert module.functions["vprintf"].body is None
    assert module.functions["vprintf"].linkage == (".extern",)


def test_tuning_of_a_kernel():
    kernel = load("hand/h1_syntax.ptx").kernels["syn"]
    assert [(item.name, item.tokens) for item in kernel.tuning] == [
        (".maxntid", ("128", ",", "1", ",", "1")),
        (".minnctapersm", ("2",)),
        (".maxnreg", ("64",)),
    ]


def test_registers_as_parameters_and_results():
    old = load("hand/h1_syntax.ptx").functions["oldabi"]
    assert not old.entry
    assert [(v.space, v.type, v.name) for v in old.returns or ()] == [("reg", "b32", "r")]
    assert [(v.space, v.type, v.name) for v in old.params or ()] == [("reg", "b32", "a"), ("reg", "b32", "b")]
    assert load("hand/h1_syntax.ptx").functions["noargs"].returns is None


def test_pointer_qualifiers_of_parameters():
    params = load("bugs/b03_zluda79_ptr_align.ptx").kernels["k"].params
    assert params is not None
    assert [(v.name, v.qualifiers, v.align, v.nbytes) for v in params] == [
        ("a", (".ptr", ".align", "1"), 1, 8),
        ("b", (".ptr", ".global", ".align", "16"), 16, 8),
        ("c", (".ptr",), 8, 8),
    ]


def test_a_struct_and_a_tensor_map_as_parameters():
    params = {v.name: v for v in load("hand/h1_syntax.ptx").kernels["syn"].params or ()}
    assert (params["st"].nbytes, params["st"].align, params["st"].dims) == (40, 8, (40,))
    params = {v.name: v for v in load("hand/h2_mem100.ptx").kernels["mem100"].params or ()}
    assert (params["tm"].nbytes, params["tm"].align) == (128, 64)


# -- variables


def test_variables_of_a_module():
    found = load("hand/h1_syntax.ptx").variables
    assert [(v.space, v.nbytes, v.align) for v in found.values()] == [
        ("const", 16, 4),
        ("global", 64, 16),
        ("global", 24, 8),
        ("global", 64, 4),
        ("global", 4, 4),
        ("shared", None, 16),
    ]
    assert found["mg"].qualifiers == (".attribute", "(", ".managed", ")", ".align", "16")
    assert found["tbl"].linkage == (".visible",)
    assert found["tbl"].initial == ("{", "generic", "(", "cst", ")", "+", "4", ",", "mg", ",", "0", "}")
    assert found["arr"].dims == (8, 2)
    assert found["wk"].initial == ("-", "1")
    assert found["dyn"].dims == (None,)


def test_several_variables_in_one_statement():
    module = parse(HEAD + ".visible .global .align 16 .v4 .f32 a[2], b, c[] = {{1.0, 2.0, 3.0, 4.0}, {0f3F800000, 0, 0, 0}};")
    assert [(v.name, v.vector, v.nbytes) for v in module.variables.values()] == [
        ("a", "v4", 32),
        ("b", "v4", 16),
        ("c", "v4", 32),
    ]


@pytest.mark.parametrize(
    ("text", "nbytes", "align"),
    [
        (".global .u8 x;", 1, 1),
        (".global .f64 x[3];", 24, 8),
        (".const .v2 .b16 x;", 4, 4),
        (".shared .b128 x;", 16, 16),
        (".global .align 128 .b8 x[(1 << 4) + 3];", 19, 128),
        (".shared .b32 x<4>;", 16, 4),
        ('.global .b8 x[4] = "abc";', 4, 1),
        (".global .texref x;", 8, 8),
    ],
)
def test_sizes_of_variables(text, nbytes, align):
    assert (variable(text).nbytes, variable(text).align) == (nbytes, align)


def test_registers():
    items = load("hand/h1_syntax.ptx").kernels["syn"].body.items
    found = [(r.type, r.vector, r.names) for r in items if isinstance(r, Registers)]
    assert found == [
        ("b64", None, (("%rd", 8),)),
        ("b32", None, (("%r", 16),)),
        ("pred", None, (("p", None), ("q", None), ("%p", 4))),
        ("b32", "v4", (("v", None),)),
        ("f32", None, (("f", None), ("$f", None), ("_f1", None))),
        ("b16", None, (("h", None),)),
    ]


# -- instructions


@pytest.mark.parametrize(
    ("text", "operands"),
    [
        ("ret;", ()),
        ("mov.u32 %r3, %tid.x;", names("%r3", "%tid.x")),
        ("add.u32 %r5, v.x, v.w;", names("%r5", "v.x", "v.w")),
        ("mov.u32 %r4, WARP_SZ;", (Name("%r4"), Literal(32, "WARP_SZ"))),
        ("mov.u64 %rd2, ($str1);", names("%rd2", "$str1")),
        ("setp.lt.u32 p|q, %r3, %r1;", (Pair(*names("p", "q")), *names("%r3", "%r1"))),
        ("setp.lt.u32 p | _, %r3, %r1;", (Pair(*names("p", "_")), *names("%r3", "%r1"))),
        ("setp.lt.and.u32 %p1, %r3, 010, !p;", (Name("%p1"), Name("%r3"), Literal(8, "010"), Not(Name("p")))),
        ("ld.global.u32 %r9, [ %rd1 + -4 ] ;", (Name("%r9"), Address(Name("%rd1"), -4))),
        ("ld.global.u32 %r9, [%rd1+4*4];", (Name("%r9"), Address(Name("%rd1"), 16))),
        ("ld.global.u32 %r9, [%rd1 - 4];", (Name("%r9"), Address(Name("%rd1"), -4))),
        ("ld.local.u32 %r9, [64];", (Name("%r9"), Address(None, 64))),
        ("ld.param.v2.u32 {%r2,_}, [st+8];", (Vector(names("%r2", "_")), Address(Name("st"), 8))),
        ("st.global.b32 [%rd1+ 16 ],{ %r4 };", (Address(Name("%rd1"), 16), Vector(names("%r4")))),
        ("mov.u64 %rd1, x+8;", (Name("%rd1"), Offset(Name("x"), 8))),
        ("mov.u64 %rd1, generic(x)+8;", (Name("%rd1"), Offset(Name("x"), 8, True))),
        ("call noargs;", names("noargs")),
        ("call (%r12), oldabi, (%r3, 5);", (Group(names("%r12")), Name("oldabi"), Group((Name("%r3"), Literal(5, "5"))))),
        ("call.uni (r), f, ();", (Group(names("r")), Name("f"), Group(()))),
        (
            "tex.2d.v4.f32.s32 {f, f, f, f}, [t, s, {%r1, %r2}];",
            (Vector(names("f", "f", "f", "f")), Address(Name("t"), 0, names("%r1", "%r2"), Name("s"))),
        ),
        (
            "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd4, {%r1, 0}], [%r2];",
            (Address(Name("%rd4"), 0, (Name("%r1"), Literal(0, "0"))), Address(Name("%r2"), 0)),
        ),
        ("lop3.or.b32 %r1|%p2, %r1, 0x80, p;", (Pair(*names("%r1", "%p2")), Name("%r1"), Literal(128, "0x80"), Name("p"))),
    ],
)
def test_operands(text, operands):
    assert instruction(text).operands == operands


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 10),
        ("010", 8),
        ("0x1fU", 31),
        ("0XFF", 255),
        ("0b101", 5),
        ("18446744073709551615", 2**64 - 1),
        ("-1", -1),
        ("~7", -8),
        ("!0", 1),
        ("- -3", 3),
        ("(1<<2)+3", 7),
        ("2+3*4", 14),
        ("1 | 6 & 4", 5),
        ("5 % 3", 2),
        ("-7 / 2", -3),
        ("-7 % 4", -3),
        ("7>2?1:0", 1),
        ("0 ? 1 : 2 + 3", 5),
        ("3 >= 3 && 2 != 2 || 4 == 4", 1),
        ("(.s64) 3 - 1", 2),
        ("0xFFFFFFFFFFFFFFFF + 2", 1),
        ("0f3F800000", 1.0),
        ("0F40000000", 2.0),
        ("0dBFF0000000000000", -1.0),
        ("-2.5e0", -2.5),
        ("1.5 * 2.0", 3.0),
        (".5", 0.5),
        ("1e3", 1000.0),
    ],
)
def test_constants(text, value):
    found = instruction(f"mov.b64 %rd1, {text};").operands[1]
    assert isinstance(found, Literal)
    assert (found.value, type(found.value)) == (value, type(value))


def test_equal_constants_are_equal_though_they_are_no_numbers():
    assert instruction("mov.f32 f, 0f7FC00000;").operands == instruction("mov.f32 f, 0f7FC00000;").operands
    assert instruction("mov.f32 f, 0f7FC00000;").operands != instruction("mov.f32 f, 0f7FC00001;").operands


def test_an_index_counts_elements():
    """ptxas loads from `arr+12` for `arr[3]` of a `.u32`, and from `sa+24` where an inner scope says `.u64`."""
    inner = "{ .shared .u64 arr[4]; st.shared.u64 arr[3], %rd1; }"
    text = f"ld.global.u32 %r1, arr[3]; mov.u64 %rd1, arr[3]; {inner} mov.u64 %rd1, arr[1];"
    found = instructions(text, ".global .u32 arr[8];")
    places = (Address(Name("arr"), 12), Offset(Name("arr"), 12), Address(Name("arr"), 24), Offset(Name("arr"), 4))
    assert tuple(next(o for o in item.operands if not isinstance(o, Name)) for item in found) == places


def test_an_index_sees_no_variable_of_another_function():
    other = ".entry other(.param .b64 arr[4]) { .shared .u16 loc[4]; ret; }"
    assert instruction("mov.u64 %rd1, arr[3];", ".global .u32 arr[8];" + other).operands[1] == Offset(Name("arr"), 12)
    with pytest.raises(PtxError, match="declared before the index, found 'loc'"):
        instruction("mov.u64 %rd1, loc[3];", other)


@pytest.mark.parametrize(
    ("text", "predicate", "negated"),
    [("ret;", None, False), ("@p ret;", "p", False), ("@!%p1 ret;", "%p1", True), ("@ ! p ret;", "p", True)],
)
def test_guards(text, predicate, negated):
    assert (instruction(text).predicate, instruction(text).negated) == (predicate, negated)


@pytest.mark.parametrize(
    ("text", "mnemonic"),
    [
        ("ld .global .u32 %r9, [%rd1];", "ld.global.u32"),
        ("ld.global .v4\n.u32 %r9, [%rd1];", "ld.global.v4.u32"),
        ("ld.global.L1::evict_last.L2::128B.f32 f, [%rd1];", "ld.global.L1::evict_last.L2::128B.f32"),
        ("st.shared::cluster.u32 [%r1], %r2;", "st.shared::cluster.u32"),
        ("atom.add.release.gpu.global.f32 %f2, [%rd1+8], %f1;", "atom.add.release.gpu.global.f32"),
        ("nobody.knows.this %r1;", "nobody.knows.this"),
    ],
)
def test_modifiers_are_kept_in_order(text, mnemonic):
    assert instruction(text).mnemonic == mnemonic


def test_statements_share_a_line():
    load = "@%p1 ld.global.v4.b32 { %r4, %r5, %r6, %r7 }, [ %rd1 + 0 ]"
    text = f"setp.gt.u32 %p1, %r1, 5; {load};@!%p1 bra L;L:st.global.b32 [%rd1],%r4;ret;"
    items = body(text).kernels["k"].body.items
    kinds = [item.opcode if isinstance(item, Instruction) else item.name for item in items]
    assert kinds == ["setp", "ld", "bra", "L", "st", "ret"]
    assert isinstance(items[3], Label)


def test_words_inside_comments_strings_and_names_are_no_statements():
    kernel = load("bugs/b10_neutrino_substring_match.ptx").kernels["k"]
    assert [item.mnemonic for item in kernel.instructions()] == ["ld.param.u64", "mov.u32", "st.global.u32", "ret"]
    assert [item.tokens for item in kernel.body.items if isinstance(item, Directive)] == [('"ret; }"', ";")]


def test_scopes_nest():
    kernel = load("hand/h1_syntax.ptx").kernels["syn"]
    blocks = [item for item in kernel.body.items if isinstance(item, Block)]
    assert [[item.name for item in block.items if isinstance(item, Label)] for block in blocks] == [["LOOP"], ["LOOP", "DONE"]]
    assert len(list(kernel.instructions())) == 44
    nested = body("{ { mov.u32 a, 1; } mov.u32 a, 2; } mov.u32 a, 3;").kernels["k"]
    assert [item.operands[1].text for item in nested.instructions()] == ["1", "2", "3"]


def test_a_table_of_branches():
    items = load("hand/h1_syntax.ptx").kernels["syn"].body.items
    at = next(i for i, item in enumerate(items) if isinstance(item, Label) and item.name == "ts")
    assert isinstance(items[at + 1], Directive)
    assert (items[at + 1].name, items[at + 1].tokens) == (".branchtargets", ("L1", ",", "L2", ",", "L1", ";"))
    assert items[at + 3].operands == names("%r14", "ts")


def test_a_call_by_pointer_and_its_prototype():
    kernel = load("bugs/b05_gpgpusim115_callprototype.ptx").kernels["k"]
    (block,) = [item for item in kernel.body.items if isinstance(item, Block)]
    assert [item.name for item in block.items if isinstance(item, Variable | Label | Directive)] == [
        "a0",
        "r0",
        "proto",
        ".callprototype",
    ]
    (call,) = [item for item in kernel.instructions() if item.opcode == "call"]
    assert call.operands == (Group(names("r0")), Name("%rd2"), Group(names("a0")), Name("proto"))


def test_lines_of_inlined_functions_end_without_a_semicolon():
    module = load("bugs/b02_gpgpusim296_loc_inlined.ptx")
    items = module.kernels["k"].body.items
    assert [type(item) for item in items] == [Directive, Label, Directive, Directive, Instruction, Label]
    assert items[3].tokens == (*["1", "8", "1", ",", "function_name", "$L__info0", "+", "4", ",", "inlined_at", "1", "7", "19"],)
    section = module.items[-1]
    assert isinstance(section, Directive)
    assert (section.name, section.tokens[0]) == (".section", ".debug_str")


def test_modifier_orders_that_ptxas_takes():
    kernel = load("bugs/b07_cudawaste5_modifier_order.ptx").kernels["k"]
    atoms = [item.modifiers for item in kernel.instructions() if item.opcode == "atom"]
    assert atoms == [
        ("global", "gpu", "acq_rel", "add", "f32"),
        ("add", "release", "gpu", "global", "f32"),
        ("global", "v2", "f32", "add"),
    ]


def test_operands_of_asynchronous_copies():
    kernel = load("bugs/b11_own_cpasync_srcsize_selfaddr.ptx").kernels["k"]
    copies = [
        item for item in kernel.instructions() if item.modifiers[:2] == ("async", "cg") or item.modifiers[:2] == ("async", "ca")
    ]
    assert [item.operands[2:] for item in copies] == [
        (Literal(16, "16"), Name("%r1")),
        (Literal(4, "4"), Literal(0, "0")),
        (Literal(4, "4"), Not(Name("%p1"))),
        (Literal(8, "8"), Name("%p1")),
    ]
    assert (copies[3].predicate, copies[3].negated) == ("%p1", True)


@pytest.mark.parametrize("path", static_files(), ids=lambda path: path.name)
def test_every_file_has_kernels_with_instructions(path: Path):
    module = parse(path.read_text())
    assert module.kernels
    assert all(list(kernel.instructions()) for kernel in module.kernels.values())
    opcodes = {item.opcode for kernel in module.kernels.values() for item in kernel.instructions()}
    assert all(opcode.isidentifier() for opcode in opcodes), opcodes


# -- what is not PTX


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.ptx:1:1: expected '.version' at the head of the module, found the end of the file"),
        ("\x7fELF\x02\x01\x00", "f.ptx:1:1: expected '.version' at the head of the module, found '\\x7f'"),
        ("// hello\n  int main() {}", "f.ptx:2:3: expected '.version' at the head of the module, found 'int'"),
        (".version 8\n", "f.ptx:1:10: expected a version like 8.7, found '8'"),
        (".version 8.7\n", "f.ptx:2:1: expected a '.target', found the end of the file"),
        (".version 8.7\n.target sm_80\n.address_size 32\n", "f.ptx:3:15: expected an address size of 64"),
        (HEAD + ".entry k { ret }", "f.ptx:4:16: expected an operand, found '}'"),
        (HEAD + ".entry k { ret; ", "f.ptx:4:17: expected '}' at the end of the body, found the end of the file"),
        (HEAD + ".entry k {\n  add.u32 %r1 %r2;\n}", "f.ptx:5:15: expected ',' or ';', found '%r2'"),
        (HEAD + ".entry k {\n  add.u32 %r1, ;\n}", "f.ptx:5:16: expected an operand, found ';'"),
        (HEAD + ".entry k {\n  ld.global.u32 %r1, [%rd1;\n}", "f.ptx:5:27: expected ']', found ';'"),
        (HEAD + ".entry k {\n  ld.global.u32 %r1, [%rd1+x];\n}", "f.ptx:5:28: expected an offset in bytes, found 'x'"),
        (
            HEAD + ".entry k {\n  ld.global.u32 %r1, arr[2];\n}",
            "f.ptx:5:22: expected a variable that is declared before the index",
        ),
        (HEAD + ".entry k {\n  @5 bra L;\n}", "f.ptx:5:4: expected a predicate register, found '5'"),
        (HEAD + ".entry k {\n  mov.u32 %r1, 1 / 0;\n}", "f.ptx:5:18: expected a divisor other than zero"),
        (HEAD + ".entry k {\n  mov.u32 %r1, 089;\n}", "f.ptx:5:16: expected a number, found '089'"),
        (HEAD + ".entry k {\n  mov.u64 %rd1, 0x10000000000000000;\n}", "f.ptx:5:17: expected a number"),
        (HEAD + ".entry k {\n  mov.u32 %r1, ٣;\n}", "f.ptx:5:16: expected ASCII outside of comments and strings"),
        (HEAD + ".entry k {\n  .reg .b31 %r;\n}", "f.ptx:5:8: expected the type of the registers, found '.b31'"),
        (HEAD + ".entry k {\n  .reg .align", "f.ptx:5:14: expected an alignment, found the end of the file"),
        (HEAD + ".entry k {\n  .loc 1 x 3\n}", "f.ptx:5:10: expected a line number, found 'x'"),
        (HEAD + ".entry k(.u64 p) { ret; }", "f.ptx:4:10: expected '.param' or '.reg', found '.u64'"),
        (HEAD + ".global .u32 x[3;", "f.ptx:4:17: expected ']', found ';'"),
        (HEAD + ".global x;", "f.ptx:4:9: expected the type of the variable, found 'x'"),
        (HEAD + ".nothing 3;", "f.ptx:4:1: expected a directive that is known, found '.nothing'"),
        (HEAD + ".section .debug_str { .b8 1", "f.ptx:4:28: expected '}' at the end of the section, found the end of the file"),
        (HEAD + ".entry k { /* never ends", "f.ptx:4:12: expected an instruction, a label or a declaration, found '/'"),
        (HEAD + '.entry k { .pragma "open; }', "f.ptx:4:20: expected a string that ends on its line"),
        (HEAD + ".section", "f.ptx:4:9: expected the name of the section, found the end of the file"),
        (HEAD + ".entry k " + "{" * 5000, "expected fewer levels of nesting"),
        (HEAD + ".entry k { mov.u32 %r1, " + "(" * 5000, "expected fewer levels of nesting"),
    ],
)
def test_messages(text, message):
    with pytest.raises(PtxError) as error:
        parse(text, name="f.ptx")
    assert message in str(error.value)
    assert str(error.value).startswith("f.ptx:")


def test_bytes_are_refused():
    with pytest.raises(TypeError, match="not bytes; decode bytes first"):
        parse(b".version 8.7")  # type: ignore[arg-type]


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.name)
def test_every_prefix_parses_or_is_an_error(path: Path):
    text = path.read_text()
    whole = parse(text)
    parsed = 0
    for end in range(len(text)):
        try:
            module = parse(text[:end])
        except PtxError:
            continue
        parsed += 1
        assert module.items[:-1] == whole.items[: len(module.items) - 1]
    assert 0 < parsed < len(text) / 2
