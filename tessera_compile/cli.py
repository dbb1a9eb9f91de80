"""The command ``tessera``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .passes.errors import TesseraError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command; returns the exit status (2 for bad input, with one line that says what and how to mend it)."""
    parser = argparse.ArgumentParser(prog="tessera", description="Runs every kernel of a model on the device that suits it.")
    parser.add_argument("--version", action="version", version=f"tessera {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="plan a Llama for two unlike GPUs, run it on CPU lanes, compare with eager")
    demo.add_argument("--cluster", default="a100-80gb,l40s@200Gbps+10us", help="devices to plan for (default: %(default)s)")
    demo.add_argument(
        "--out", type=Path, default=Path("tessera-report"), help="directory for the report files (default: %(default)s)"
    )
    demo.add_argument(
        "--codegen", choices=("inductor", "eager"), default="inductor", help="how segments run (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    try:
        from rich.console import Console

        from .demo import demo as run_demo

        return run_demo(arguments.cluster, arguments.out, arguments.codegen, Console())
    except TesseraError as error:
        print(f"tessera {arguments.command}: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        print("tessera demo: needs transformers; pip install 'tessera-compile[demo]'", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
