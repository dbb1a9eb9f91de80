"""The shape of the package: what importing costs, who may import whom, and where private torch names may stand."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = {"tessera_compile": 3, "runtime": 2, "passes": 1, "ptx_tools": 0}


def sources():
    for folder in LAYERS:
        for path in sorted((ROOT / folder).glob("*.py")):
            yield folder, path


def imports(path):
    """(level, module) of every import statement, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name


def test_arrows_run_downwards():
    count = 0
    for folder, path in sources():
        for level, module in imports(path):
            if level == 0:
                assert module.split(".")[0] not in ("passes", "runtime", "ptx_tools", "tessera_compile"), f"{path}: {module}"
                continue
            target = folder if level == 1 and module.split(".")[0] not in LAYERS else module.split(".")[0]
            if folder != "tessera_compile" and level == 2:
                assert target in LAYERS, f"{path} imports {module} from the top"
            assert LAYERS[target] <= LAYERS[folder], f"{path} imports {module}"
            count += 1
    assert count > 20


def test_ptx_tools_work_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from tessera_compile.ptx_tools import parse, verdict, footprint, instrument, to_text, Buffer\n"
        "text = '.version 8.4\\n.target sm_80\\n.address_size 64\\n.visible .entry k(.param .u64 p) { .reg .b64 %r; "
        "ld.param.u64 %r, [p]; st.global.u32 [%r], 1; ret; }'\n"
        "module = parse(text)\n"
        "found = footprint(module, None, 1, 1, [Buffer(4096, 8)])\n"
        "print(verdict(module), found['p'].writes.nbytes, len(instrument(module).sites))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "INDEPENDENT 4 1\n", done.stderr


def test_private_torch_names_stand_in_one_file():
    private = ("torch._", "torch.fx.experimental", "functorch")
    for _, path in sources():
        found = [m for _, m in imports(path) if m.startswith(private)]
        text = path.read_text(encoding="utf-8")
        if path.name == "torch_compat.py":
            assert found
            continue
        assert not found, f"{path}: {found}"
        assert "torch._inductor" not in text, path
        assert "torch._dynamo" not in text, path


def test_no_submodule_is_named_like_a_public_function():
    import tessera_compile

    modules = {p.stem for p in (ROOT / "tessera_compile").glob("*.py")} | {"passes", "runtime"}
    assert not modules & set(tessera_compile.__all__)


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/").stdout


def test_importing_loads_nothing_and_touches_no_device():
    code = (
        "import sys, torch; before = set(sys.modules); import tessera_compile; "
        "new = set(sys.modules) - before; print(sorted(new)); assert not torch.cuda.is_initialized(); "
        "assert not {'networkx', 'scipy', 'scipy.optimize', 'rich', 'torch._dynamo', 'torch._inductor'} & new"
    )
    loaded = run_python(code)
    assert "tessera_compile" in loaded
    assert "passes" not in loaded


def test_all_that_is_public_can_be_imported():
    import tessera_compile

    for name in tessera_compile.__all__:
        assert getattr(tessera_compile, name) is not None
        assert name in dir(tessera_compile)
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = tessera_compile.nothing_like_this
    from tessera_compile import passes

    for name in passes.__all__:
        assert callable(getattr(passes, name))


def test_torch_finds_the_backend_by_its_name_without_import():
    code = "import torch; assert 'tessera' in torch.compiler.list_backends(); torch.compile(lambda x: x + 1, backend='tessera')"
    run_python(code)
