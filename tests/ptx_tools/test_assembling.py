"""ptxas: what it makes and reports, which one is taken, and what is said where there is none."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tessera_compile.ptx_tools.assembling import Usage, assemble, code, find_tool, sass
from tessera_compile.ptx_tools.syntax import PtxError
from tests.ptx_tools.corpus import DATA, needs_ptxas

ADD = (DATA / "triton" / "add.sm_80.ptx").read_text()
ATOMICS = (DATA / "triton" / "atomics.sm_80.ptx").read_text()
LOOPS = (DATA / "cuda" / "c10_loops.sm_80.ptx").read_text()
TOO_OLD = "echo \"ptxas m.ptx, line 3; fatal   : Unsupported .version 8.7; current version is '1.0'\" >&2; exit 255"


def program(path: Path, script: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def no_tools(monkeypatch):
    """Neither Triton nor a toolkit nor the setting."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else real(name, *rest))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("TESSERA_PTXAS", raising=False)


# -- assembling


@needs_ptxas
def test_what_each_kernel_needs():
    made = assemble(LOOPS)
    assert made.cubin[:4] == b"\x7fELF"
    assert set(made.kernels) == {"stencil", "csr", "transpose", "converge", "bytes"}
    assert {name: usage.shared_bytes for name, usage in made.kernels.items() if usage.shared_bytes} == {"transpose": 32 * 33 * 4}
    assert all(4 < usage.registers <= 64 for usage in made.kernels.values())
    assert all(usage.spill_store_bytes == usage.spill_load_bytes == 0 for usage in made.kernels.values())
    assert "Compiling entry function 'stencil' for 'sm_80'" in made.log


@needs_ptxas
def test_spills_are_counted():
    text = (DATA / "triton" / "matmul.sm_80.ptx").read_text()
    usage = assemble(text).kernels["k_matmul"]
    tight = assemble(text.replace(".reqntid 256", ".maxnreg 64", 1)).kernels["k_matmul"]
    assert (usage.spill_store_bytes, usage.spill_load_bytes) == (0, 0)
    assert usage.registers > tight.registers == 64
    assert tight.spill_store_bytes > 100
    assert tight.spill_load_bytes > 100


@needs_ptxas
def test_spills_of_a_callee_are_not_those_of_the_kernel():
    made = assemble((DATA / "cuda" / "c02_calls.sm_80.ptx").read_text())
    assert "4 bytes spill stores" in made.log
    assert set(made.kernels) == {"calls", "fptr", "virt"}
    assert all(usage.spill_store_bytes == 0 for usage in made.kernels.values())


def test_a_callee_may_be_reported_before_the_registers_of_the_kernel(tmp_path):
    log = """ptxas info    : Compiling entry function 'k' for 'sm_80'
ptxas info    : Function properties for k
    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Function properties for callee
    0 bytes stack frame, 100 bytes spill stores, 100 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 48 bytes smem, 400 bytes cmem[0]"""
    script = f"cat <<'END'\n{log}\nEND\n" + 'while [ "$1" != "-o" ]; do shift; done; echo > "$2"'
    made = assemble(ADD, ptxas=program(tmp_path / "ptxas", script))
    assert made.kernels == {"k": Usage(registers=10, spill_store_bytes=4, spill_load_bytes=8, shared_bytes=48)}


@needs_ptxas
def test_another_target():
    assert "for 'sm_80'" in assemble(ADD).log
    newer = assemble(ADD, target="sm_90")
    assert "for 'sm_90'" in newer.log
    assert code(newer.cubin) != code(assemble(ADD).cubin)


@needs_ptxas
def test_the_target_is_that_of_the_head_and_not_of_a_comment():
    comments = "// .version 8.0 .target sm_50\n/* .target sm_52 */"
    text = comments + " .version 8.4 // .target sm_53\n.target sm_86\n.visible .entry k { ret; }"
    assert "for 'sm_86'" in assemble(text).log


@needs_ptxas
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".version 8.4\n.target sm_80\n\n.entry k { nonsense.u32 a; }", r"k\.ptx:4:1: ptxas: .*nonsense"),
        (".version 8.4\n.target sm_80\n.entry k { mov.u32 a, 1; ret; }", r"k\.ptx:3:1: ptxas: .*a"),
        (".version 8.4\n.target sm_123456\n.entry k { ret; }", r"k\.ptx:1:1: ptxas: .*sm_123456"),
        (".version 99.0\n.target sm_80\n.entry k { ret; }", r"k\.ptx:1:1: ptxas: Unsupported \.version 99\.0"),
        ("int main() {}", r"k\.ptx:1:1: expected '\.version' and '\.target'"),
    ],
)
def test_messages_of_ptxas(text, message):
    with pytest.raises(PtxError, match=message):
        assemble(text, name="k.ptx")


# -- which tool


@needs_ptxas
def test_one_too_old_makes_room_for_the_next(monkeypatch, tmp_path):
    old = program(tmp_path / "ptxas", TOO_OLD)
    monkeypatch.setenv("TESSERA_PTXAS", str(old))
    assert find_tool("ptxas") == old
    assert assemble(ADD).tool != old
    with pytest.raises(PtxError, match=r"^<ptx>:3:1: ptxas: Unsupported \.version 8\.7; current version is '1\.0'$"):
        assemble(ADD, ptxas=old)


@needs_ptxas
def test_one_for_other_targets_makes_room_for_the_next(monkeypatch, tmp_path):
    old = program(tmp_path / "ptxas", "echo \"ptxas fatal   : Value 'sm_80' is not defined for option 'gpu-name'\"; exit 1")
    monkeypatch.setenv("TESSERA_PTXAS", str(old))
    assert assemble(ADD).tool != old


@needs_ptxas
def test_another_complaint_is_the_last_word(monkeypatch, tmp_path):
    bad = program(tmp_path / "ptxas", 'echo "ptxas m.ptx, line 7; error   : no such thing"; exit 1')
    monkeypatch.setenv("TESSERA_PTXAS", str(bad))
    with pytest.raises(PtxError, match=r"^add:7:1: ptxas: no such thing$"):
        assemble(ADD, name="add")


def test_a_crash_is_reported(tmp_path):
    with pytest.raises(PtxError, match="ptxas: exit code 3"):
        assemble(ADD, ptxas=program(tmp_path / "ptxas", "exit 3"))


def test_the_setting_stands_before_triton_and_triton_before_path(monkeypatch, tmp_path):
    """Triton is not imported to find its tools: this one cannot be."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise RuntimeError('imported')")
    inside = program(tmp_path / "triton" / "backends" / "nvidia" / "bin" / "ptxas")
    on_path = program(tmp_path / "bin" / "ptxas")
    chosen = program(tmp_path / "chosen" / "my-ptxas")
    given = program(tmp_path / "given" / "ptxas")
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(on_path.parent) + os.pathsep + os.environ["PATH"])
    monkeypatch.delenv("TESSERA_PTXAS", raising=False)
    assert find_tool("ptxas") == inside
    monkeypatch.setenv("TESSERA_PTXAS", str(chosen))
    assert find_tool("ptxas") == chosen
    assert find_tool("ptxas", given) == given
    monkeypatch.delenv("TESSERA_PTXAS")
    inside.unlink()
    assert find_tool("ptxas") == on_path


def test_the_setting_is_for_ptxas_alone(monkeypatch, tmp_path, no_tools):
    monkeypatch.setenv("TESSERA_PTXAS", str(program(tmp_path / "ptxas")))
    with pytest.raises(FileNotFoundError, match="no nvdisasm was found"):
        find_tool("nvdisasm")


def test_blackwell_has_an_assembler_of_its_own(monkeypatch, tmp_path, no_tools):
    """Each fake writes its name as the cubin."""
    folder = tmp_path / "triton" / "backends" / "nvidia" / "bin"
    for name in ("ptxas", "ptxas-blackwell"):
        program(folder / name, f'while [ "$1" != "-o" ]; do shift; done; printf {name} > "$2"')
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: type("Spec", (), {"submodule_search_locations": [str(tmp_path / "triton")]})
    )
    text = ".version 8.4\n.target {}\n.entry k {{ ret; }}"
    made = {target: assemble(text.format(target)).cubin for target in ("sm_80", "sm_90a", "sm_100", "sm_100a", "sm_120f")}
    assert made == dict.fromkeys(("sm_80", "sm_90a"), b"ptxas") | dict.fromkeys(
        ("sm_100", "sm_100a", "sm_120f"), b"ptxas-blackwell"
    )


def test_no_tool_at_all(no_tools):
    with pytest.raises(
        FileNotFoundError, match=r"no ptxas was found: install triton, or the CUDA toolkit .* or set TESSERA_PTXAS"
    ):
        find_tool("ptxas")
    with pytest.raises(FileNotFoundError, match="no ptxas was found"):
        assemble(ADD)
    with pytest.raises(FileNotFoundError, match="no nvdisasm was found: install triton, or the CUDA toolkit"):
        sass(b"")


def test_a_tool_that_is_not_there(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no program '/nowhere/ptxas' to be run as ptxas"):
        find_tool("ptxas", "/nowhere/ptxas")
    monkeypatch.setenv("TESSERA_PTXAS", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="to be run as ptxas"):
        assemble(ADD)


# -- machine code


@needs_ptxas
def test_the_same_code_compares_equal():
    """Comments, lines and names of registers change the cubin, or not even that, but not the code."""
    made = assemble(ATOMICS)
    other = assemble("// a comment\n" + ATOMICS.replace("%rd", "%other").replace("\t.loc\t", "\n\n\t.loc\t"))
    assert code(other.cubin) == code(made.cubin)
    assert sass(other.cubin) == sass(made.cubin)


@needs_ptxas
def test_other_code_compares_unequal():
    made = assemble(ADD)
    other = assemble(ADD.replace("add.f32", "sub.f32"))
    assert made.kernels.keys() == other.kernels.keys()
    assert code(other.cubin) != code(made.cubin)
    assert sass(other.cubin) != sass(made.cubin)


@needs_ptxas
@pytest.mark.parametrize("change", [("{1, 2}", "{1, 3}"), ("u64 p = x;", "u64 p = y;"), ("s[16]", "s[20]")])
def test_data_is_compared_too(change):
    text = """.version 8.4\n.target sm_80\n.visible .global .u32 x[2] = {1, 2}; .visible .global .u32 y[2] = {1, 2};
        .visible .global .u64 p = x;
        .visible .entry k { .shared .b32 s[16]; .reg .b32 a; ld.shared.u32 a, [s+8]; st.global.u32 [x], a; ret; }"""
    assert text.count(change[0]) > 0
    first, second = assemble(text).cubin, assemble(text.replace(*change)).cubin
    assert code(first) != code(second)


@needs_ptxas
def test_the_text_of_machine_code():
    text = sass(assemble(LOOPS).cubin)
    heads = [line for line in text.splitlines() if line.startswith(".text.") and not line.endswith(":")]
    assert heads == [".text.bytes", ".text.converge", ".text.csr", ".text.stencil", ".text.transpose"]
    assert "EXIT" in text
    assert "/* 0x000000000000794d */" in text  # the encoding of EXIT
    assert ".debug" not in text
    assert ".note" not in text


def test_what_is_no_cubin():
    with pytest.raises(ValueError, match="not a cubin"):
        code(b"hello")
    with pytest.raises(ValueError, match="not a cubin"):
        code(b"")


@needs_ptxas
def test_what_nvdisasm_does_not_take():
    with pytest.raises(ValueError, match="nvdisasm: "):
        sass(b"hello")


def test_torch_and_triton_are_not_imported():
    """In the folder of the library, so that the package above it is not imported either."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from ptx_tools import assembling, parsing, printing\n"
        "try: assembling.find_tool('ptxas')\n"
        "except FileNotFoundError: pass\n"
        "print(sorted({'torch', 'triton'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
