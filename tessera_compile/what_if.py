"""``tessera plan``, ``tessera advise`` and ``tessera diff``: planning from a profile, without running anything."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from .passes.errors import OptionsError


def add_parsers(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="plan a profile CSV for a cluster, without any model",
        description="PROFILE.csv has the columns workload, position, layer, block, kernel, reads, bytes_out, state, "
        "state_bytes_written and <device>_us for each type of device. Times are taken as given.",
    )
    plan.add_argument("profile", type=Path, metavar="PROFILE.csv")
    _common(plan)
    plan.add_argument("--policy", choices=("throughput", "latency"), default="throughput", help="what for (default: %(default)s)")
    plan.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    plan.add_argument(
        "--why", metavar="KERNEL=DEVICE", action="append", default=[], help="why KERNEL is not on DEVICE; repeatable"
    )
    plan.add_argument(
        "--what-if", action="store_true", help="plan again with wider links and more memory, and rank the placements"
    )
    plan.set_defaults(run=_plan)

    advise = commands.add_parser(
        "advise",
        help="one device, replicas, or split by kernel?",
        description="TARGET is a profile CSV, or MODULE:CALLABLE or FILE.py:CALLABLE as for `tessera explain` (times are "
        "modelled then).",
    )
    advise.add_argument("cluster", metavar="CLUSTER")
    advise.add_argument("target", metavar="TARGET")
    _common(advise, cluster=False)
    advise.set_defaults(run=_advise)

    diff = commands.add_parser(
        "diff",
        help="which kernels two saved plans place differently",
        description="A and B are what `tessera plan --json` or `Plan.save` wrote. Of plans that share the requests, a kernel has "
        "its shares.",
    )
    for name in ("a", "b"):
        diff.add_argument(name, type=Path, metavar=f"{name.upper()}.json")
    diff.set_defaults(run=_diff)


def _common(parser: argparse.ArgumentParser, cluster: bool = True) -> None:
    if cluster:
        parser.add_argument("--cluster", required=True, help="such as a100-80gb,l40s@200Gbps")
    parser.add_argument("--mix", help="uses of each workload in one mix: decode=129,prefill=2 (default: each once)")
    parser.add_argument(
        "--phases", help="order of the workloads in a request: prefill,decode (default: the one that writes most state first)"
    )
    parser.add_argument(
        "--serial", action="store_true", help="transfers take the devices' own time instead of overlapping compute"
    )
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--gap", type=float, default=5e-3, help="relative gap at which to stop (default: %(default)s)")


def parse_mix(text: str | None, workloads: list[str]) -> dict[str, float]:
    """``decode=129,prefill=2`` → weights; None is each workload once. Raises OptionsError."""
    if text is None:
        return dict.fromkeys(workloads, 1.0)
    weights: dict[str, float] = {}
    for item in text.split(","):
        name, equals, number = item.partition("=")
        if name.strip() in weights:
            raise OptionsError(f"--mix names {name.strip()!r} twice")
        try:
            weights[name.strip()] = float(number) if equals else 1.0
        except ValueError:
            raise OptionsError(f"--mix: {item!r} is not WORKLOAD=NUMBER") from None
        if not 0 < weights[name.strip()] < math.inf:
            raise OptionsError(f"--mix: {item!r}: the number must be positive")
    return weights


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops what C code writes to the standard output: HiGHS has lines of its own there that no option turns off.

    This redirects the descriptor of the whole process, so it is done only while no other Python thread runs, whose output it
    would drop too.
    """
    kept = None
    if os.name == "posix" and threading.active_count() == 1:
        with contextlib.suppress(OSError):  # There may be no standard output.
            kept = os.dup(1)
    if kept is None:
        yield
        return
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    libc.fflush(None)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        libc.fflush(None)
        os.dup2(kept, 1)
        os.close(nowhere)
        os.close(kept)


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.time_limit >= 0:
        raise OptionsError(f"--time-limit {arguments.time_limit}: give seconds, 0 or more")
    if not 0 <= arguments.gap < 1:
        raise OptionsError(f"--gap {arguments.gap}: give a number from 0 to below 1, such as 0.005")


NO_MEMORY = "memory is not checked: a profile does not say what the weights take"


def _mix(arguments: argparse.Namespace, cluster: Any, path: Path) -> Any:
    from .passes.mix import mix_of_table, read_table

    try:
        rows = read_table(path)
    except OSError as error:
        raise OptionsError(f"{path}: {error.strerror}") from error
    weights = parse_mix(arguments.mix, list(dict.fromkeys(r["workload"] for r in rows)))
    phases = arguments.phases.split(",") if arguments.phases else None
    # One request can use several of identical devices, so for latency each is a device of its own.
    alike = getattr(arguments, "policy", "throughput") != "latency"
    return mix_of_table(rows, cluster, weights, overlap=not arguments.serial, phases=phases, name=str(path), alike=alike)


def _plan(arguments: argparse.Namespace) -> int:
    from .catalogue import make_cluster
    from .passes.explaining import matter_most, same_budget, sensitivity, why
    from .passes.mixture import best_mixture, fastest_request

    if arguments.json is not None and not arguments.json.resolve().parent.is_dir():
        raise OptionsError(f"--json: no directory {arguments.json.parent}")
    if arguments.json is not None and arguments.json.is_dir():
        raise OptionsError(f"--json: {arguments.json} is a directory")
    for item in arguments.why:
        if "=" not in item:
            raise OptionsError(f"--why: {item!r} is not KERNEL=DEVICE")
    _check(arguments)
    cluster = make_cluster(arguments.cluster)
    mix = _mix(arguments, cluster, arguments.profile)
    planner = fastest_request if arguments.policy == "latency" else best_mixture
    with _quiet():
        found = planner(mix, time_limit=arguments.time_limit, gap=arguments.gap)
    if found.objective == "throughput":
        found = replace(found, other_hardware=same_budget(mix))
    print(found.to_text())
    print(NO_MEMORY)
    for item in arguments.why:
        kernel, _, device = item.rpartition("=")
        print(why(mix, found.single.placement, kernel, device, found.objective))
    if arguments.what_if:
        print("planned again with")
        with _quiet():
            again = sensitivity(mix, found)
        print(again)
        print("placements that matter most")
        for reason in matter_most(mix, found.single.placement, objective=found.objective):
            print(f"  {reason}")
    if arguments.json is not None:
        try:
            arguments.json.write_text(found.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise OptionsError(f"--json: {arguments.json}: {error.strerror}") from error
    return 0


def _advise(arguments: argparse.Namespace) -> int:
    from .catalogue import make_cluster
    from .passes.explaining import same_budget
    from .passes.mix import mix_of_graphs
    from .passes.mixture import best_mixture
    from .passes.planning import plan_mix

    _check(arguments)
    limit = min(arguments.time_limit, 40.0)
    cluster = make_cluster(arguments.cluster)
    if arguments.target.endswith(".csv"):
        mix = _mix(arguments, cluster, Path(arguments.target))
        with _quiet():
            found = best_mixture(mix, time_limit=limit, gap=arguments.gap)
    else:
        if arguments.mix or arguments.phases:
            raise OptionsError("--mix and --phases are for a profile CSV: a model is advised on by itself")
        from .cli import load_target
        from .compiler import explain
        from .options import Options

        model, args, kwargs = load_target(arguments.target)
        report = explain(model, Options.make({"cluster": arguments.cluster}))(*args, **kwargs)
        overlap = not arguments.serial
        mix = mix_of_graphs([(g.ddg, g.profile, 1.0) for g in report.graphs], cluster, overlap=overlap)
        with _quiet():
            found = plan_mix(
                [(g.ddg, 1.0) for g in report.graphs],
                cluster,
                profiles=[g.profile for g in report.graphs],
                overlap=overlap,
                time_limit=limit,
                gap=arguments.gap,
            )
    print(f"advice: {found.recommendation}")
    print(replace(found, other_hardware=same_budget(mix)).to_text())
    if arguments.target.endswith(".csv"):
        print(NO_MEMORY)
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    from .passes.explaining import differences

    (us, objective, here), (other_us, other_objective, there) = (_saved(path) for path in (arguments.a, arguments.b))
    for path, value, goal in ((arguments.a, us, objective), (arguments.b, other_us, other_objective)):
        print(f"{path}: {value:.1f} µs, for {goal}")
    if objective == other_objective and us and other_us:
        print(f"the second is {us / other_us:.3f}x as fast as the first")
    found = differences(here, there)
    print(f"{len(found)} of {len({**here, **there})} kernels are placed differently")
    width = max(map(len, found), default=0)
    for kernel, (a, b) in found.items():
        print(f"  {kernel.ljust(width)}  {a or 'not there'} → {b or 'not there'}")
    return 0


def _saved(path: Path) -> tuple[float, str, dict[str, str]]:
    """Of a saved plan: its µs, its objective, and where each kernel is: on a device, or on several with their shares."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        placements = saved["placement"] if isinstance(saved["placement"], list) else [saved["placement"]]
        shares: dict[str, dict[str, float]] = {}
        for share, placement in zip(saved.get("shares", [1.0]), placements, strict=True):
            for kernel, device in placement.items():
                of = shares.setdefault(kernel, {})
                of[device] = of.get(device, 0.0) + share
        objective = str(saved["objective"])
        latency_of_a_plan = objective == "latency" and "makespan_us" in saved
        us = float(saved["makespan_us" if latency_of_a_plan else "bottleneck_us"])
    except OSError as error:
        raise OptionsError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionsError(f"{path} is no saved plan: give what `tessera plan --json` or `Plan.save` wrote") from error
    places = {}
    for kernel, of in shares.items():
        several = [f"{device} {share:.3f}" for device, share in sorted(of.items())]
        places[kernel] = next(iter(of)) if len(of) == 1 else ", ".join(several)
    return us, objective, places
