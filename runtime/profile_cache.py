"""Measured times on disk, one small file a kernel and setting.

The directory is ``$TESSERA_CACHE_DIR/profiles``, by default under ``~/.cache/tessera``. A file's name is the hash of everything
that the time depends on; the file repeats it in clear. Files are written beside their place and renamed into it, so that
concurrent processes see whole files only. A file that cannot be read, or says something else than its name, is ignored with a
warning.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from ..passes import torch_compat
from ..passes.errors import TesseraWarning
from ..passes.ir import Timing

#: Raised whenever the meaning of an entry changes; entries of other versions are not looked at.
VERSION = 1


class ProfileCache:
    """Looks up and stores timings.

    Args:
        directory: where the files lie; None takes the default.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        base = os.environ.get("TESSERA_CACHE_DIR") or Path.home() / ".cache" / "tessera"
        self.directory = Path(directory) if directory is not None else Path(base) / "profiles"

    def get(self, key: Mapping[str, str]) -> Timing | None:
        """The timing stored for ``key``, or None."""
        path = self._path(key)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["key"] != dict(key):
                raise ValueError("it is about something else")
            timing = Timing(float(data["us"]), float(data["spread"]), str(data["source"]))
            if not (0 <= timing.us < math.inf and 0 <= timing.spread < math.inf and timing.source == "measured"):
                raise ValueError(f"{timing} is not a measured time")
            return timing
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(
                f"profile cache entry {path} is ignored ({error}); the kernel is timed again", TesseraWarning, stacklevel=2
            )
            return None

    def put(self, key: Mapping[str, str], timing: Timing) -> None:
        """Stores ``timing``; a directory that cannot be written costs a warning."""
        path = self._path(key)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.directory, suffix=".tmp")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"key": dict(key), **asdict(timing)}, file)
            os.replace(name, path)
        except OSError as error:
            warnings.warn(f"the profile cache {self.directory} cannot be written: {error}", TesseraWarning, stacklevel=2)

    def _path(self, key: Mapping[str, str]) -> Path:
        text = json.dumps(dict(key), sort_keys=True)
        return self.directory / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def setting(codegen: str, threads: int) -> dict[str, str]:
    """What a time on this machine's CPU depends on besides the kernel: processor, threads, software and its configuration."""
    return {
        "version": str(VERSION),
        "device": f"cpu {_processor()}",
        "threads": str(threads),
        "torch": torch.__version__,
        "inductor": torch_compat.inductor_config_key() if codegen == "inductor" else "",
        "codegen": codegen,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
