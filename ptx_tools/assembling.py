"""PTX to machine code with ptxas, and machine code back to text: what a change to a kernel costs, and that a copy is a copy.

The tools are those of Triton's wheel or of a CUDA toolkit. No GPU, no driver and no torch are needed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from .syntax import PtxError

HEADER = re.compile(r"(?:\s|//[^\n]*|/\*.*?\*/)*\.version\s+[\d.]+(?:\s|//[^\n]*|/\*.*?\*/)*\.target\s+(\w+)", re.DOTALL)
TOO_OLD = re.compile(r"Unsupported \.version|is not defined for option 'gpu-name'")
COMPLAINT = re.compile(r"^ptxas\S* [^\n]*?(?:, line (\d+); )?(?:error|fatal)\s*: ([^\n]*)", re.MULTILINE)
COMPILED = re.compile(r"Compiling entry function '([^']+)'|Function properties for (\S+)")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")

# Sections that reach the device: instructions, constants, initial values, their relocations, and how much shared memory there is.
LOADED = (".text", ".nv.constant", ".nv.global", ".nv.shared", ".rel.text", ".rel.nv", ".rela.text", ".rela.nv")
NOBITS = 8


@dataclass(frozen=True)
class Usage:
    """What one kernel needs. `shared_bytes` is the static part."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Assembly:
    """What ptxas made. `kernels` says what each needs, `log` is all that ptxas said, `tool` the ptxas that was used."""

    cubin: bytes = field(repr=False)
    kernels: dict[str, Usage]
    log: str = field(repr=False)
    tool: Path


def assemble(
    text: str, *, target: str | None = None, ptxas: str | os.PathLike[str] | None = None, name: str = "<ptx>"
) -> Assembly:
    """Assemble a PTX module for `target`, by default the one it names.

    Raises PtxError with what ptxas says, as `NAME:LINE:1: ptxas: …`. Where no `ptxas` is given, an assembler too old for the
    module's `.version` or for the target makes room for the next one found.
    """
    header = HEADER.match(text)
    target = target or (header and header[1])
    if not target:
        raise PtxError(f"{name}:1:1: expected '.version' and '.target' at the head of the module")
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "module.ptx", Path(folder) / "module.cubin"
        source.write_text(text, encoding="utf-8")
        for tool in [find_tool("ptxas", ptxas)] if ptxas else _assemblers(target):
            command = [str(tool), "-v", f"-arch={target}", str(source), "-o", str(cubin)]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            log = done.stdout + done.stderr
            if done.returncode == 0:
                return Assembly(cubin.read_bytes(), _usage(log), log, tool)
            if not TOO_OLD.search(log):
                break
    found = COMPLAINT.search(log)
    line, complaint = (found[1] or "1", found[2]) if found else ("1", log.strip() or f"exit code {done.returncode}")
    raise PtxError(f"{name}:{line}:1: ptxas: {complaint}")


def _usage(log: str) -> dict[str, Usage]:
    """The report of `ptxas -v`. Functions that a kernel calls are reported too, and left out."""
    kernels: dict[str, Usage] = {}
    kernel = function = None
    spills = (0, 0)
    for line in log.splitlines():
        if found := COMPILED.search(line):
            kernel, function = found[1] or kernel, found[2]
        elif (found := SPILLS.search(line)) and function == kernel:
            spills = (int(found[1]), int(found[2]))
        elif kernel and (found := USED.search(line)):
            shared = SHARED.search(line)
            kernels[kernel] = Usage(int(found[1]), *spills, int(shared[1]) if shared else 0)
    return kernels


def find_tool(name: str, given: str | os.PathLike[str] | None = None) -> Path:
    """Where `ptxas`, `nvdisasm` or another tool of CUDA is: `given`, or TESSERA_PTXAS, Triton's wheel, PATH, in that order."""
    if given:
        found = shutil.which(given)
        if not found:
            raise FileNotFoundError(f"there is no program {os.fspath(given)!r} to be run as {name}")
        return Path(found)
    return _tools(name)[0]


def _assemblers(target: str) -> list[Path]:
    """All that can be found. Triton brings a second ptxas, which knows Blackwell and newer versions of PTX."""
    blackwell = int(re.sub(r"\D", "", target) or 0) >= 100
    names = ("ptxas-blackwell", "ptxas") if blackwell else ("ptxas", "ptxas-blackwell")
    return _tools("ptxas", names)


def _tools(name: str, wheel_names: tuple[str, ...] = ()) -> list[Path]:
    chosen = os.environ.get("TESSERA_PTXAS") if name == "ptxas" else None
    found = [find_tool(name, chosen)] if chosen else []
    spec = importlib.util.find_spec("triton")
    for place in (spec and spec.submodule_search_locations) or ():
        paths = [Path(place, "backends", "nvidia", "bin", file) for file in wheel_names or (name,)]
        found += [path for path in paths if os.access(path, os.X_OK)]
    if path := shutil.which(name):
        found.append(Path(path))
    if not found:
        setting = ", or set TESSERA_PTXAS to where it is" if name == "ptxas" else ""
        raise FileNotFoundError(f"no {name} was found: install triton, or the CUDA toolkit with its bin folder on PATH{setting}")
    return found


def sass(cubin: bytes) -> str:
    """The machine code as text, with encodings, and the initial values of variables and constants.

    Sections are sorted by name, and what does not reach the device (notes, symbols, lines) is left out, so that the texts
    of two cubins are equal where their code is. `code` compares the same much faster.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "module.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([find_tool("nvdisasm"), "-hex", path], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"nvdisasm: {done.stderr.strip()}")
    _, *sections = re.split(r"^//-+ (\.\S+) +-+\n", done.stdout, flags=re.MULTILINE)
    pairs = sorted(zip(sections[::2], sections[1::2], strict=True))
    return "".join(f"{name}\n{body.strip()}\n\n" for name, body in pairs if name.startswith(LOADED))


TRIES = 16
"""Assemblies of each text before two kernels count as unlike."""


def same_code(
    text: str, other: str, *, ptxas: str | os.PathLike[str] | None = None, name: str = "<ptx>", tries: int = TRIES
) -> bool:
    """Whether two modules assemble to the same machine code.

    Some assemblers choose registers by chance: ptxas 12.9 gives one text several codes, equal but for their names. So a text
    that does not give one code each time is assembled up to `tries` times, and what both texts have given is looked for.
    Raises PtxError where ptxas refuses one.
    """
    first = assemble(text, ptxas=ptxas, name=name)
    ours, theirs = [code(first.cubin)], [code(assemble(other, ptxas=first.tool, name=f"{name} (other)").cubin)]
    while ours[0] != theirs[0]:
        ours.append(code(assemble(text, ptxas=first.tool, name=name).cubin))
        if len(ours) > tries or (len(ours) > 3 and all(one == ours[0] for one in ours)):
            return False
        theirs.append(code(assemble(other, ptxas=first.tool, name=f"{name} (other)").cubin))
        if any(one in ours for one in theirs):
            return True
    return True


def code(cubin: bytes) -> dict[str, bytes | int]:
    """By name, the bytes of the sections that reach the device, or the size of those that have none."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not a cubin: it does not begin as a 64-bit ELF file does")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<2I4Q", cubin, table + index * size) for index in range(count)]
    strings = headers[names][4]
    found: dict[str, bytes | int] = {}
    for at, kind, _, _, offset, nbytes in headers:
        name = cubin[strings + at : cubin.index(b"\0", strings + at)].decode()
        if name.startswith(LOADED):
            found[name] = nbytes if kind == NOBITS else cubin[offset : offset + nbytes]
    return found
