"""The command ``tessera``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import __version__, what_if
from .passes.errors import OptionsError, TesseraError
from .ptx_tools import commands as ptx_commands


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command; returns the exit status (2 for bad input, with one line that says what and how to mend it)."""
    parser = argparse.ArgumentParser(prog="tessera", description="Runs every kernel of a model on the device that suits it.")
    parser.add_argument("--version", action="version", version=f"tessera {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    devices = commands.add_parser("devices", help="list the devices of a cluster, or the catalogue of GPUs")
    devices.add_argument("cluster", nargs="?", help="cluster string or TOML file; without it, this machine and the catalogue")
    devices.set_defaults(run=_devices)

    demo = commands.add_parser("demo", help="plan a Llama for two unlike GPUs, run it on CPU lanes, compare with eager")
    demo.add_argument("--cluster", default="a100-80gb,l40s@200Gbps+10us", help="devices to plan for (default: %(default)s)")
    demo.add_argument(
        "--out", type=Path, default=Path("tessera-report"), help="directory for the report files (default: %(default)s)"
    )
    demo.add_argument(
        "--codegen", choices=("inductor", "eager"), default="inductor", help="how segments run (default: %(default)s)"
    )
    demo.set_defaults(run=_demo)

    explain = commands.add_parser(
        "explain",
        help="plan a model of yours and print the report; nothing is compiled",
        description="TARGET is MODULE:CALLABLE or FILE.py:CALLABLE; the callable takes nothing and returns (model, args) or "
        "(model, args, kwargs), args a tuple and kwargs a dict.",
    )
    explain.add_argument("target", metavar="TARGET")
    explain.add_argument("--cluster", help="cluster string or TOML file (default: two CPU lanes)")
    explain.add_argument(
        "--policy", choices=("throughput", "latency"), default="latency", help="what to plan for (default: %(default)s)"
    )
    explain.add_argument(
        "--pin", action="append", default=[], metavar="PATTERN=DEVICE", help="pin kernels or a module; repeatable"
    )
    explain.add_argument(
        "--max-memory", action="append", default=[], metavar="DEVICE=SIZE", help="such as l40s=40GiB; repeatable"
    )
    explain.add_argument("--json", type=Path, help="also write the report to this file")
    explain.set_defaults(run=_explain)

    simulated = commands.add_parser("simulate", help="send requests through the plans of a saved report, in simulated time")
    simulated.add_argument("report", type=Path, help="what tessera explain --json has written")
    simulated.add_argument("--cluster", help="the same devices with other links, say (default: the report's)")
    simulated.add_argument("--requests", type=int, default=200, help="how many (default: %(default)s)")
    simulated.add_argument(
        "--every", type=float, default=0.0, metavar="US", help="µs between two arrivals (default: all at once)"
    )
    simulated.add_argument("--inflight", type=int, default=8, help="requests that run at once (default: %(default)s)")
    simulated.add_argument(
        "--order", choices=("due", "age", "fifo", "static"), default="due", help="what lanes serve first (default: %(default)s)"
    )
    simulated.set_defaults(run=_simulate)

    what_if.add_parsers(commands)
    ptx_commands.add_parser(commands)

    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        return status
    except Exception as error:
        inner = getattr(error, "inner_exception", error)  # dynamo wraps what a backend raises.
        if not isinstance(inner, (TesseraError, BrokenPipeError)):
            raise
        if isinstance(inner, TesseraError):
            print(f"tessera {arguments.command}: {inner}", file=sys.stderr)
            return 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # The reader has seen enough.
        return 0


def _demo(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from .demo import demo

    try:
        return demo(arguments.cluster, arguments.out, arguments.codegen, Console())
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise OptionsError("the demonstration needs transformers; pip install 'tessera-compile[demo]'") from error


def _devices(arguments: argparse.Namespace) -> int:
    from .catalogue import catalogue, make_cluster

    if arguments.cluster is not None:
        print(make_cluster(arguments.cluster).to_text())
        return 0
    print("this machine, by default:")
    print(make_cluster().to_text())
    print("\nGPUs by their data sheets:")
    keys = ("bf16_tflops", "memory_gb_per_s", "memory_gib", "link_gb_per_s", "sms", "boost_ghz", "l2_mb", "dollars_per_hour")
    rows: list[tuple[str, ...]] = [("name", "TFLOP/s", "GB/s", "GiB", "link GB/s", "SMs", "GHz", "L2 MB", "$/hour")]
    rows += [(name, *(f"{figures[k]:g}" for k in keys)) for name, figures in catalogue().items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))))
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    from .compiler import explain
    from .options import Options

    pins, memory = (_mapping(pairs) for pairs in (arguments.pin, arguments.max_memory))
    options = Options.make({"cluster": arguments.cluster, "policy": arguments.policy, "pins": pins, "max_memory": memory})
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise OptionsError(f"--json: no directory {arguments.json.parent}")
    model, args, kwargs = load_target(arguments.target)
    report = explain(model, options)(*args, **kwargs)
    print(report)
    if arguments.json is not None:
        report.to_json(arguments.json)
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    from .reports import Report
    from .simulation import simulate

    if arguments.requests < 1 or arguments.inflight < 1 or not 0 <= arguments.every < float("inf"):
        raise OptionsError("--requests and --inflight take whole numbers from 1, --every µs from 0")
    try:
        report = Report.from_json(arguments.report.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionsError(f"cannot read {arguments.report}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise OptionsError(f"{arguments.report} is not a report that tessera explain --json wrote: {error}") from error
    times = [arguments.every * i for i in range(arguments.requests)]
    print(simulate(report, arguments.cluster, arrivals=times, inflight=arguments.inflight, order=arguments.order))
    return 0


def _mapping(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise OptionsError(f"{pair!r}: give NAME=VALUE")
    return dict(pair.rsplit("=", 1) for pair in pairs)


def load_target(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What the callable named by ``MODULE:CALLABLE`` or ``FILE.py:CALLABLE`` returns: model, args, kwargs."""
    made = _load(target)()
    if not (isinstance(made, tuple) and 2 <= len(made) <= 3 and callable(made[0]) and isinstance(made[1], tuple)):
        raise OptionsError(f"{target} must return (model, args) or (model, args, kwargs), args a tuple and kwargs a dict")
    model, args, kwargs = (*made, {})[:3]
    return model, args, kwargs


def _load(target: str) -> Callable[[], Any]:
    """The callable that ``MODULE:CALLABLE`` or ``FILE.py:CALLABLE`` names."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise OptionsError(f"{target!r}: give MODULE:CALLABLE or FILE.py:CALLABLE")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location("tessera_explained", where)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, os.getcwd())  # As `python -m` would find it.
            module = importlib.import_module(where)
    except FileNotFoundError as error:
        raise OptionsError(f"no file {where}") from error
    except ModuleNotFoundError as error:
        if error.name != where:
            raise
        raise OptionsError(
            f"no module {where!r}; it is looked for from the current directory and among what is installed"
        ) from error
    found: Any = getattr(module, name, None)
    if not callable(found):
        raise OptionsError(f"{where} has no callable {name!r}")
    function: Callable[[], Any] = found
    return function


if __name__ == "__main__":
    sys.exit(main())
