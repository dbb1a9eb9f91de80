"""Makes the PTX in `cuda/` and `triton/` again: `python tests/data/ptx/regenerate.py`, with nvcc on PATH and triton installed.

`hand/` and `bugs/` are written by hand. Folders of this machine become `/src`, filled up with slashes in the bytes of DWARF,
where lengths count.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from tests.ptx_tools.corpus import KERNELS, compile_triton  # noqa: E402

TARGETS = ("80", "90a", "100a")
ONLY = {"c07_tma": ("90a", "100a"), "c12_debug": ()}  # TMA needs sm_90; c12 is compiled with debugging information
DEBUG = {"c12_debug_G": "-G", "c12_debug_lineinfo": "-lineinfo"}
TRITON = [
    *(f"{name}.sm_80" for name in ("add", "softmax", "gather", "atomics", "splitk_semaphore", "matmul")),
    *("softmax.sm_90", "matmul_tma_host.sm_90"),
]
LIMIT = 64 * 1024


def neutral(text: str, folder: str) -> str:
    """Without the paths of `.file`, and without the name of `folder` in the bytes of a DWARF section."""
    text = re.sub(r'(\.file\s+\d+\s+")[^"]*/', r"\1/src/", text)
    other = "/src".ljust(len(folder), "/")
    between = r"(\s*(?:,|(?://[^\n]*)?\n\s*\.b8)\s*)"
    pattern = re.compile(between.join(rf"\b{byte}\b" for byte in folder.encode()))
    return pattern.sub(lambda found: rejoin(other.encode(), found.groups()), text)


def rejoin(numbers: bytes, between: tuple[str, ...]) -> str:
    """The numbers with what stood between the old ones, less the comments that show the old ones as letters."""
    plain = (re.sub(r" *//[^\n]*", "", gap) for gap in between)
    return str(numbers[0]) + "".join(gap + str(number) for gap, number in zip(plain, numbers[1:], strict=True))


def nvcc(source: Path, target: str, *options: str) -> str:
    # In a folder whose name has the same length everywhere, so that the same text comes out.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        copy = shutil.copy(source, folder)
        command = ["nvcc", "-std=c++17", "-w", "-ptx", f"-arch=compute_{target}", *options, copy, "-o", "out.ptx"]
        subprocess.run(command, check=True, cwd=folder)
        return neutral((Path(folder) / "out.ptx").read_text(), folder)


def cuda() -> Iterator[tuple[str, str]]:
    for source in sorted((HERE / "cuda").glob("*.cu")):
        for target in ONLY.get(source.stem, TARGETS):
            yield f"{source.stem}.sm_{target}", nvcc(source, target)
    for name, option in DEBUG.items():
        yield f"{name}.sm_80", nvcc(HERE / "cuda" / "c12_debug.cu", "80", option)


def triton() -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        spec = importlib.util.spec_from_file_location("kernels", shutil.copy(KERNELS, folder))
        assert spec
        assert spec.loader
        kernels = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kernels)
        for name in TRITON:
            yield name, neutral(compile_triton(name, kernels).ptx, folder)


def main() -> None:
    for folder, made in (("cuda", cuda()), ("triton", triton())):
        for old in (HERE / folder).glob("*.ptx"):
            old.unlink()
        for name, text in made:
            if len(text) > LIMIT:
                raise SystemExit(f"{name} has {len(text)} bytes, more than the {LIMIT} that may be committed")
            if found := re.search(r"/(?:tmp|home|work|root)\b[^\n]*", text):
                raise SystemExit(f"{name} names a folder of this machine: {found[0]}")
            (HERE / folder / f"{name}.ptx").write_text(text)


if __name__ == "__main__":
    main()
