"""The PTX that tests run on: files that are committed, and Triton kernels compiled when they are first asked for."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tessera_compile.ptx_tools.assembling import HEADER, assemble, find_tool
from tessera_compile.ptx_tools.syntax import PtxError

DATA = Path(__file__).parents[1] / "data" / "ptx"
KERNELS = DATA / "triton_kernels.py"


def _has(tool: str) -> bool:
    try:
        return bool(find_tool(tool))
    except FileNotFoundError:
        return False


needs_ptxas = pytest.mark.skipif(not _has("ptxas"), reason="there is no ptxas, which comes with triton or the CUDA toolkit")


@dataclass(frozen=True)
class TritonCase:
    """PTX of one Triton kernel. `metadata` has its name, signature, constexprs, num_warps, shared and so on."""

    ptx: str
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How to compile one kernel. Pointers are divisible by 16, and so are the arguments in `divisible`.

    since: the first Triton known to compile it.
    """

    kernel: str
    arguments: dict[str, str]
    constants: dict[str, int | bool]
    targets: tuple[int, ...]
    divisible: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    since: tuple[int, int] = (0, 0)


def arguments(text: str) -> dict[str, str]:
    """`x y: *fp32, n: i32` to types by name. Tensor descriptors are written `fp16[128,64]`."""
    types = {}
    for part in text.split("; "):
        names, type_ = part.split(": ")
        types.update(dict.fromkeys(names.split(), f"tensordesc<{type_}>" if "[" in type_ else type_))
    return types


ALL, OLD = (80, 90, 100), (80, 90)
TMA = arguments("a_desc b_desc: fp16[128,64]; c_desc: fp16[128,128]; M N K: i32")
FLASH_STRIDES = "sqz sqm skz skn svz svn soz som"
TILE = {"BM": 128, "BN": 128, "BK": 64}
RECIPES = {
    "add": Recipe("k_add", arguments("x_ptr y_ptr o_ptr: *fp32; n: i32"), {"BLOCK": 1024}, ALL),
    "add_bf16": Recipe("k_add", arguments("x_ptr y_ptr o_ptr: *bf16; n: i32"), {"BLOCK": 2048}, ALL, "n"),
    "softmax": Recipe("k_softmax", arguments("o_ptr x_ptr: *fp32; xs os n_rows n_cols: i32"), {"BLOCK": 1024}, ALL),
    "layernorm": Recipe(
        "k_layernorm", arguments("X Y: *fp16; W B Mean Rstd: *fp32; stride N: i32; eps: fp32"), {"BLOCK": 1024}, ALL
    ),
    "matmul": Recipe(
        "k_matmul",
        arguments("a_ptr b_ptr c_ptr: *fp16; M N K sam sbk scm: i32"),
        {"sak": 1, "sbn": 1, "scn": 1, **TILE, "GM": 8},
        ALL,
        "M N K sam sbk scm",
        {"num_stages": 3, "num_warps": 8},
    ),
    "matmul_tma_host": Recipe("k_matmul_tma_host", TMA, TILE, (90, 100), options={"num_stages": 3}),
    "matmul_tma_host_fallback": Recipe("k_matmul_tma_host", TMA, TILE, (80,), options={"num_stages": 3}),
    "matmul_tma_dev": Recipe(
        "k_matmul_tma_dev",
        arguments("a_ptr b_ptr c_ptr: *fp16; M N K: i32"),
        {**TILE, "NSM": 132},
        (90, 100),
        "K N",
        {"num_stages": 3},
    ),
    "matmul_ws": Recipe("k_matmul_ws", TMA, {**TILE, "NSM": 148}, (100,), options={"num_stages": 3}, since=(3, 9)),
    "matmul_ws_64": Recipe(  # Triton 3.9 cannot specialise the warps of the larger tile for sm_90
        "k_matmul_ws",
        arguments("a_desc: fp16[64,64]; b_desc: fp16[128,64]; c_desc: fp16[64,128]; M N K: i32"),
        {**TILE, "BM": 64, "NSM": 132},
        (90,),
        options={"num_stages": 3},
    ),
    "matmul_2cta": Recipe("k_matmul_tma_host", TMA, TILE, (90,), options={"num_ctas": 2, "num_stages": 3}),
    "flash_causal": Recipe(
        "k_flash",
        arguments(f"Q K V O: *fp16; L: *fp32; sm_scale: fp32; {FLASH_STRIDES} N_CTX: i32"),
        {"BM": 128, "BN": 64, "D": 64, "CAUSAL": True},
        ALL,
        FLASH_STRIDES,
    ),
    "flash_varlen": Recipe(
        "k_flash_varlen",
        arguments("Q K V O: *fp16; cu: *i32; sm_scale: fp32; sm: i32"),
        {"BM": 64, "BN": 64, "D": 64},
        OLD,
        "sm",
    ),
    "atomics": Recipe(
        "k_atomics", arguments("x_ptr o_ptr: *fp32; cnt_ptr lock_ptr: *i32; h_ptr: *fp16; n: i32"), {"BLOCK": 512}, ALL
    ),
    "gather": Recipe("k_gather", arguments("idx_ptr: *i64; w_ptr o_ptr: *fp32; n_idx D: i32"), {"BD": 256}, OLD),
    "scatter": Recipe("k_scatter", arguments("idx_ptr: *i64; x_ptr o_ptr: *fp32; n: i32"), {"BLOCK": 256}, OLD),
    "inductor_where": Recipe(
        "k_inductor_where",
        arguments("in_ptr0: *i64; in_ptr1 in_ptr2 out_ptr0: *fp32; ks0: i64; xnumel: i32"),
        {"XBLOCK": 256},
        OLD,
        options={"debug": True},
    ),
    "inductor_red": Recipe(
        "k_inductor_red",
        arguments("in_ptr0: *bf16; in_ptr1 out_ptr0: *fp32; out_ptr1: *i64; xnumel r0_numel: i32"),
        {"XBLOCK": 4, "R0_BLOCK": 512},
        OLD,
        "r0_numel",
    ),
    "dropout": Recipe("k_dropout", arguments("x_ptr: *fp32; seed_ptr: *i64; o_ptr: *fp32; n: i32; p: fp32"), {"BLOCK": 512}, OLD),
    "masked_by_data": Recipe("k_masked_by_data", arguments("x_ptr o_ptr: *fp32; n: i32"), {"BLOCK": 512}, (90,)),
    "loaded_bound": Recipe(
        "k_loaded_bound", arguments("x_ptr: *fp32; len_ptr: *i32; o_ptr: *fp32; stride: i32"), {"BLOCK": 512}, (90,)
    ),
    "grouped_gemm": Recipe(
        "k_grouped_gemm",
        arguments("pa pb pc: *i64; sizes: *i32; G: i32"),
        {"NSM": 132, "BM": 64, "BN": 64, "BK": 32},
        OLD,
    ),
    "inline_asm": Recipe("k_inline_asm", arguments("x_ptr o_ptr: *i32; n: i32"), {"BLOCK": 512}, OLD),
    "print_sort_hist": Recipe("k_print_sort_hist", arguments("x_ptr o_ptr h_ptr: *i32; n: i32"), {"BLOCK": 256}, (90,)),
    "splitk_semaphore": Recipe(
        "k_splitk_semaphore",
        arguments("a_ptr ws_ptr: *fp32; sem_ptr: *i32; o_ptr: *fp32; n: i32"),
        {"SPLIT": 4, "BLOCK": 256},
        OLD,
    ),
}


def static_files() -> list[Path]:
    """All committed PTX: by hand, from bug reports of other tools, from nvcc, from Triton."""
    return sorted(DATA.glob("*/*.ptx"))


def skip_if_too_new(text: str) -> None:
    """Skip a test that assembles `text` where the newest ptxas found does not know its version of PTX."""
    head = HEADER.match(text)
    assert head
    try:
        assemble(f"{head[0]}\n.address_size 64\n")
    except PtxError as error:
        if "Unsupported .version" in str(error):
            pytest.skip(str(error))


def triton_cases() -> list[str]:
    """Names as `add.sm_80`. Nothing is compiled."""
    return [f"{name}.sm_{target}" for name, recipe in RECIPES.items() for target in recipe.targets]


@cache
def triton_ptx(name: str) -> TritonCase:
    """The PTX of one case, from the cache on disk where it is there. Skips the test where Triton is not installed."""
    pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot be compiled")
    version, since = importlib.metadata.version("triton"), RECIPES[name.split(".sm_")[0]].since
    if tuple(map(int, version.split(".")[:2])) < since:
        pytest.skip(f"triton {version} does not compile {name}, {'.'.join(map(str, since))} does")
    path = cache_folder() / f"{name}.json"
    if path.exists():
        return TritonCase(**json.loads(path.read_text()))
    from tests.data.ptx import triton_kernels

    case = compile_triton(name, triton_kernels)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(vars(case), file)
    os.replace(file.name, path)
    return case


@cache
def cache_folder() -> Path:
    """One folder for each version of Triton and of what is compiled."""
    root = Path(os.environ.get("TESSERA_TEST_CACHE") or Path.home() / ".cache" / "tessera-tests")
    sources = hashlib.sha256(KERNELS.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:8]
    folder = root / f"ptx-{importlib.metadata.version('triton')}-{sources}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compile_triton(name: str, kernels: ModuleType) -> TritonCase:
    """Compile one case with the kernel taken from the module `kernels`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    case, target = name.split(".sm_")
    recipe = RECIPES[case]
    function = getattr(kernels, recipe.kernel)
    signature = {argument: recipe.arguments.get(argument, "constexpr") for argument in function.arg_names}
    divisible = {
        (index,): [["tt.divisibility", 16]]
        for index, (argument, type_) in enumerate(signature.items())
        if type_.startswith("*") or argument in recipe.divisible.split()
    }
    source = ASTSource(fn=function, signature=signature, constexprs=recipe.constants, attrs=divisible)
    options = {"num_warps": 4, **recipe.options}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", folder)
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        built = triton.compile(source, target=GPUTarget("cuda", int(target), 32), options=options)
    metadata = {key: getattr(built.metadata, key) for key in ("name", "num_warps", "shared", "num_ctas", "global_scratch_size")}
    metadata |= {"signature": signature, "constexprs": recipe.constants, "target": int(target)}
    metadata["tensordesc_meta"] = json.loads(json.dumps(built.metadata.tensordesc_meta, default=str))
    return TritonCase(built.asm["ptx"], metadata)
