"""`tessera ptx`: look at, instrument, interpret and check PTX files from the shell."""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .syntax import Block, Directive, Function, Instruction, Module, PtxError

ARGUMENTS = """\
An argument is an int, a float, or
  buffer:SIZE[@ADDRESS]   memory of SIZE bytes (K, M, G for 2^10, 2^20, 2^30); addresses are made up where none is given
  file:PATH[@ADDRESS]     memory with the contents of a file (.npy, or raw bytes), so that what is loaded from it is known
  map:BYTES:SHAPE:STRIDES:BOX[@ADDRESS]
                          a tensor map: bytes of an element, then numbers joined by x, innermost first; one stride fewer, in bytes
  -                       not known
They go by position, or as NAME=VALUE."""


def add_parser(commands: Any) -> None:
    """Add `ptx` and its commands to an argparse sub-parser collection."""
    ptx = commands.add_parser("ptx", help="show, instrument, interpret or check PTX files")
    parser = ptx.add_subparsers(dest="ptx_command", required=True)

    show = parser.add_parser("show", help="kernels, parameters, verdict, and where each one touches memory")
    show.add_argument("file", type=Path)
    show.add_argument("--kernel", help="this kernel only")
    show.add_argument("--all", action="store_true", help="accesses to shared, local, param and const space too")
    show.set_defaults(run=lambda a: _guarded(_show, a))

    instrument = parser.add_parser("instrument", help="insert code that records what is read and written")
    instrument.add_argument("file", type=Path)
    instrument.add_argument("-o", "--output", type=Path, help="where to write it (default: standard output)")
    instrument.add_argument(
        "--scheme", choices=("shadow", "bitmap"), default="shadow", help="how to record (default: %(default)s)"
    )
    instrument.set_defaults(run=lambda a: _guarded(_instrument, a))

    footprint = parser.add_parser(
        "footprint",
        help="the bytes a launch reads and writes, without running it",
        epilog=ARGUMENTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    footprint.add_argument("file", type=Path)
    footprint.add_argument("--kernel", help="which kernel (default: the only one)")
    footprint.add_argument("--grid", type=_dim, required=True, metavar="X[,Y[,Z]]")
    footprint.add_argument("--block", type=_dim, required=True, metavar="X[,Y[,Z]]")
    footprint.add_argument("--cluster", type=_dim, metavar="X[,Y[,Z]]")
    footprint.add_argument("--shared", type=int, default=0, metavar="BYTES", help="dynamic shared memory")
    footprint.add_argument("--arg", action="append", default=[], metavar="ARGUMENT", help="repeatable; see below")
    footprint.add_argument("--json", type=Path, help="also write every interval to this file")
    footprint.set_defaults(run=lambda a: _guarded(_footprint, a))

    check = parser.add_parser("check", help="parse, print, assemble, compare; instrument and assemble")
    check.add_argument("files", type=Path, nargs="+", metavar="FILE")
    check.add_argument("--ptxas", help="the assembler to use")
    check.set_defaults(run=lambda a: _guarded(_check, a))


def _guarded(run: Any, arguments: argparse.Namespace) -> int:
    try:
        status: int = run(arguments)
        return status
    except (PtxError, ValueError, OSError) as error:
        print(f"tessera ptx {arguments.ptx_command}: {error}", file=sys.stderr)
        return 2


def _dim(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not one to three numbers joined by commas") from None
    return numbers


def _read(path: Path) -> Module:
    from .parsing import parse

    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise PtxError(f"{path}:1:1: expected PTX text, found bytes that are not UTF-8 (at {error.start})") from None
    return parse(text, name=str(path))


# -- show


def source_lines(module: Module, function: Function) -> list[tuple[int, str]]:
    """(offset into the text, `file:line`) of each `.loc` of a function, in order."""
    files = {}
    for item in module.items:
        if isinstance(item, Directive) and item.name == ".file":
            files[item.tokens[0]] = Path(item.tokens[1].strip('"')).name
    found: list[tuple[int, str]] = []

    def walk(block: Block) -> None:
        for item in block.items:
            if isinstance(item, Directive) and item.name == ".loc":
                found.append((item.span[0], f"{files.get(item.tokens[0], item.tokens[0])}:{item.tokens[1]}"))
            elif isinstance(item, Block):
                walk(item)

    if function.body is not None:
        walk(function.body)
    return found


def _show(arguments: argparse.Namespace) -> int:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from .deciding import verdict
    from .isa import check_version

    module = _read(arguments.file)
    check_version(module)
    console = Console(soft_wrap=True, highlight=False)
    version = ".".join(map(str, module.version))
    kernels = [module.kernel(arguments.kernel)] if arguments.kernel else list(module.kernels.values())
    devices = [f for f in module.functions.values() if not f.entry and f.body is not None]
    console.print(
        f"{escape(str(arguments.file))}: PTX {version} for {module.target}, {_count(len(module.kernels), 'kernel')}, "
        f"{_count(len(devices), 'device function')}"
    )
    for function in kernels + ([] if arguments.kernel else devices):
        console.print(f"\n[bold]{'kernel' if function.entry else 'function'} {escape(function.name)}[/bold]")
        for item in function.tuning:
            console.print(f"  {item.name} {' '.join(item.tokens)}".rstrip(), markup=False)
        for param in function.params or ():
            pointer = " ".join(param.qualifiers[param.qualifiers.index(".ptr") :]) if ".ptr" in param.qualifiers else ""
            shape = "".join(f"[{d}]" for d in param.dims)
            console.print(
                f"  {param.name}: {param.type}{shape}, {param.nbytes} bytes{' ' + pointer if pointer else ''}", markup=False
            )
        if function.entry:
            _print_verdict(console, verdict(module, function.name))
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for column in ("line", "source", "instruction", "space", "access", "bytes", "guard"):
            table.add_column(column, justify="right" if column in ("line", "bytes") else "left")
        rows = _sites(module, function, arguments.all)
        for row in rows:
            table.add_row(*map(escape, row))
        if rows:
            console.print(table)
        else:
            console.print("  touches no memory" if arguments.all else "  touches no global memory")
    return 0


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _print_verdict(console: Any, found: Any) -> None:
    console.print(
        f"  verdict: {found.kind}" + (f" while {', '.join(found.buffers)} stay the same" if found.buffers else ""), markup=False
    )
    if found.reason:
        console.print(f"    {found.reason}", markup=False)
    for site in found.sites[:8]:
        console.print(f"    decided by data: {site}", markup=False)
    if len(found.sites) > 8:
        console.print(f"    … {len(found.sites) - 8} more", markup=False)


def _sites(module: Module, function: Function, everything: bool) -> list[tuple[str, ...]]:
    from .isa import UnknownOpcode, accesses
    from .printing import operand

    lines = source_lines(module, function)
    starts = [start for start, _ in lines]
    rows: list[tuple[str, ...]] = []
    for instruction in function.instructions():
        line = str(module.place(instruction.span[0])[0])
        at = bisect_right(starts, instruction.span[0]) - 1
        source = lines[at][1] if at >= 0 else ""
        guard = f"{'!' if instruction.negated else ''}{instruction.predicate}" if instruction.predicate else ""
        try:
            table = accesses(instruction)
        except UnknownOpcode:
            rows.append((line, source, instruction.mnemonic, "?", "not in the table", "?", guard))
            continue
        for access in table:
            if not everything and not access.outside:
                continue
            size = str(access.nbytes) if access.nbytes is not None else operand(access.size) if access.size else access.record
            if access.limit is not None:
                size = f"≤ {size}"
            rows.append((line, source, _short(instruction), access.space, access.kind, size, guard))
    return rows


def _short(instruction: Instruction) -> str:
    text = instruction.mnemonic
    return text if len(text) <= 60 else text[:57] + "…"


# -- instrument


def _instrument(arguments: argparse.Namespace) -> int:
    from .instrumentation import instrument

    module = _read(arguments.file)
    made = instrument(module, scheme=arguments.scheme)
    if arguments.output is None:
        sys.stdout.write(made.text)
    else:
        arguments.output.write_text(made.text)
    for name, kernel in made.kernels.items():
        for reason in kernel.incomplete:
            print(f"{name} has no exact record: {reason}", file=sys.stderr)
    if arguments.output is not None:
        print(f"{arguments.output}: {len(made.sites)} sites in {len(made.kernels)} kernels", file=sys.stderr)
    return 0


# -- footprint


def _size(text: str) -> int:
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    return int(text[:-1] if factor > 1 else text, 0) * factor


class _Addresses:
    """Made-up addresses, far apart and aligned to 2 MiB."""

    def __init__(self) -> None:
        self.next = 0x10_0000_0000

    def __call__(self, given: str, nbytes: int) -> int:
        if given:
            return int(given, 0)
        at = self.next
        self.next += -(-nbytes // (2 << 20)) * (2 << 20) + (2 << 20)
        return at


def parse_argument(text: str, address: Any) -> Any:
    """One argument of the command line; see ARGUMENTS. Raises ValueError that names it."""
    from .launch import Buffer, TensorMap

    if text == "-":
        return None
    kind, colon, rest = text.partition(":")
    body, _, at = rest.rpartition("@") if "@" in rest else (rest, "", "")
    try:
        if not colon:
            try:
                return int(text, 0)
            except ValueError:
                return float(text)
        if kind == "buffer":
            size = _size(body)
            return Buffer(address(at, size), size)
        if kind == "file":
            data = _contents(Path(body))
            return Buffer(address(at, len(data)), len(data), data)
        if kind == "map":
            element, shape, strides, box = body.split(":")
            dims = tuple(int(n) for n in shape.split("x"))
            steps = tuple(int(n) for n in strides.split("x") if n)
            made = TensorMap(0, int(element), dims, steps, tuple(int(n) for n in box.split("x")))
            return TensorMap(address(at, made.nbytes), made.element_bytes, dims, steps, made.box)
    except (ValueError, IndexError) as error:
        raise ValueError(f"argument {text!r}: {error}\n{ARGUMENTS}") from None
    raise ValueError(f"argument {text!r} is none that is known.\n{ARGUMENTS}")


def _contents(path: Path) -> bytes:
    if path.suffix == ".npy":
        import numpy as np

        return bytes(np.ascontiguousarray(np.load(path, allow_pickle=False)).tobytes())
    return path.read_bytes()


def _footprint(arguments: argparse.Namespace) -> int:
    from .interpretation import footprint

    module = _read(arguments.file)
    names = [p.name for p in module.kernel(arguments.kernel).params or ()]
    address = _Addresses()
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for text in arguments.arg:
        name, equals, value = text.partition("=")
        if equals and (name in names or ":" not in name):
            named[name] = parse_argument(value, address)
        else:
            positional.append(parse_argument(text, address))
    if len(positional) > len(names):
        raise ValueError(f"{len(positional)} arguments for {len(names)} parameters: {', '.join(names) or 'none'}")
    both = [name for name in names[: len(positional)] if name in named]
    if both:
        raise ValueError(f"parameter {both[0]} is given by position and by name")
    found = footprint(
        module,
        arguments.kernel,
        arguments.grid,
        arguments.block,
        {**dict(zip(names, positional, strict=False)), **named},
        shared_bytes=arguments.shared,
        cluster=arguments.cluster,
    )
    print(found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found.to_json(), indent=1))
    if not found.complete:
        print("some accesses lie outside every buffer: give all buffers, with their sizes", file=sys.stderr)
    return 0


# -- check


def _check(arguments: argparse.Namespace) -> int:
    failures = 0
    for path in arguments.files:
        try:
            print(f"{path}: {_check_file(path, arguments.ptxas)}")
        except (PtxError, OSError, ValueError) as error:
            failures += 1
            print(f"{path}: FAILED: {error}")
    return 1 if failures else 0


def _check_file(path: Path, ptxas: str | None) -> str:
    from .assembling import assemble, same_code
    from .instrumentation import instrument
    from .parsing import parse
    from .printing import to_text

    module = _read(path)
    original = assemble(module.text, ptxas=ptxas, name=str(path))
    printed = to_text(module)
    if to_text(parse(printed, name=str(path))) != printed:
        raise PtxError(f"{path}:1:1: printing it twice gives two texts")
    if not same_code(module.text, printed, ptxas=ptxas, name=str(path)):
        raise PtxError(f"{path}:1:1: the printed module assembles to other code")
    made = instrument(module)
    after = assemble(made.text, ptxas=ptxas, name=f"{path} instrumented")
    parts = [f"round trip exact, {_count(len(module.kernels), 'kernel')}"]
    for name in module.kernels:
        old, new = original.kernels.get(name), after.kernels.get(name)
        if old is None or new is None:
            continue
        spills = (new.spill_store_bytes + new.spill_load_bytes) - (old.spill_store_bytes + old.spill_load_bytes)
        incomplete = made.kernels[name].incomplete if name in made.kernels else ()
        note = f" (no exact record: {incomplete[0]})" if incomplete else ""
        parts.append(f"{name}: {new.registers - old.registers:+d} registers, {spills:+d} spill bytes instrumented{note}")
    return "; ".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m tessera_compile.ptx_tools.commands ptx …`, for use without the rest of the package."""
    parser = argparse.ArgumentParser(prog="tessera")
    add_parser(parser.add_subparsers(dest="command", required=True))
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
