"""GPUs by their published figures, and what this machine has."""

from __future__ import annotations

import functools
import os
import re
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
        return _gpu(name, sms)
    if sms is not None:
        raise ClusterError(f"cpu/{sms}sm: only a GPU can be sliced")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("cpu", "cpu", "cpu", memory, tflops=_CPU_TFLOPS, gb_per_s=_CPU_GB_PER_S)


@functools.cache
def _gpu(name: str, sms: int | None) -> Device:
    """A CUDA device of this machine, or a slice of ``sms`` multiprocessors, and what is known of its type.

    Memory is what other processes leave when it is first asked for: free, or held by this process already. Slices share it.
    """
    import torch

    index = int(name.partition(":")[2] or 0)
    count = torch.cuda.device_count()
    if index >= count:
        what = f"this machine has {count} CUDA devices" if count else "this machine has no CUDA device"
        raise ClusterError(f"{name!r}: {what}; name a GPU type such as 'a100-80gb' to plan for one")
    properties = torch.cuda.get_device_properties(index)
    total = properties.multi_processor_count
    if sms is not None and not 0 < sms <= total:
        raise ClusterError(f"{name}/{sms}sm: {properties.name} has {total} multiprocessors")
    kind = _type_of(properties.name)
    figures = catalogue().get(kind, {})
    share = (sms or total) / total
    free, _ = torch.cuda.mem_get_info(index)
    return Device(
        name=f"cuda:{index}" if sms is None else f"cuda:{index}/{sms}sm",
        type=kind if sms is None else f"{kind}/{sms}sm",
        kind="cuda",
        memory=int(free + torch.cuda.memory_reserved(index)),
        tflops=float(figures.get("bf16_tflops", 0.0)) * share,
        gb_per_s=float(figures.get("memory_gb_per_s", 1000.0)),
        l2_bytes=int(properties.L2_cache_size),
        sms=sms or total,
        boost_ghz=float(figures.get("boost_ghz", 0.0)),
    )


def _type_of(name: str) -> str:
    """The catalogue's name of a GPU whose driver calls it ``name``: the longest whose words all stand there."""
    words = set(re.findall(r"[a-z0-9]+", name.lower().replace(" ", "-")))
    known = [k for k in catalogue() if set(re.findall(r"[a-z0-9]+", k)) <= words | {"80gb", "40gb", "sxm", "pcie"}]
    return max(known, key=len) if known else re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
