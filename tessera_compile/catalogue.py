"""GPUs by their published figures, and what this machine has."""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from .passes.cluster import Cluster, Device, cluster_from_table, parse_cluster
from .passes.errors import ClusterError

#: Nominal figures of one CPU core, used only where a kernel cannot be timed: fused multiply-adds of 8 floats, a share of memory.
_CPU_TFLOPS, _CPU_GB_PER_S = 0.05, 8.0


@functools.cache
def catalogue() -> Mapping[str, Mapping[str, Any]]:
    """GPU type → published figures with their source; see ``gpus.toml``."""
    return tomllib.loads(resources.files("tessera_compile").joinpath("gpus.toml").read_text(encoding="utf-8"))


def make_cluster(description: str | Cluster | None = None) -> Cluster:
    """A cluster from its string, or from the TOML file that the string names; None gives two CPU lanes.

    Raises:
        ClusterError: names the item, key or file that cannot be read.
    """
    if isinstance(description, Cluster):
        return description
    if description is not None and description.endswith(".toml"):
        try:
            with open(description, "rb") as file:
                return cluster_from_table(tomllib.load(file), catalogue(), _this_machine)
        except ClusterError as error:
            raise ClusterError(f"{description}: {error}") from None
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ClusterError(f"cannot read the cluster file {description}: {error}") from error
    return parse_cluster("2xcpu" if description is None else description, catalogue(), _this_machine)


def _this_machine(name: str, sms: int | None) -> Device:
    if name != "cpu":
        raise ClusterError(
            f"{name!r}: this version executes on CPU lanes only; name a GPU type such as 'a100-80gb' to plan for one"
        )
    if sms is not None:
        raise ClusterError(f"cpu/{sms}sm: only a GPU can be sliced")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("cpu", "cpu", "cpu", memory, tflops=_CPU_TFLOPS, gb_per_s=_CPU_GB_PER_S)
