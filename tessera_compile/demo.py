"""The demonstration: a Llama with random weights, planned for two unlike GPUs, run on CPU lanes and checked against eager."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .catalogue import make_cluster
from .compiler import executors
from .compiler import report as report_of
from .passes.cluster import Cluster
from .passes.ir import Plan, Run, format_bytes
from .passes.mixture import MixPlan
from .passes.planning import plan_mix
from .reports import GraphReport

#: Largest relative difference from eager that still counts as rounding, by the norm of the outputs.
TOLERANCE = 1e-4


def demo(cluster_text: str, directory: Path, codegen: str, console: Console) -> int:
    """Runs the demonstration and writes its report files; 0 if the result equals eager's.

    Raises:
        ModuleNotFoundError: transformers is not installed (``pip install 'tessera-compile[demo]'``).
        ClusterError: the cluster cannot be read.
    """
    cluster = make_cluster(cluster_text)
    modelled = all(d.kind == "modelled" for d in cluster.devices)
    model, ids = _llama()
    count = sum(p.numel() for p in model.parameters())
    console.print(f"Llama from transformers, {count / 1e6:.1f} M random weights, {ids.shape[1]} tokens; cluster:")
    console.print(cluster.to_text(), highlight=False)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        for policy in ("throughput", "latency"):
            torch.compiler.reset()
            options: dict[str, Any] = {"cluster": cluster_text, "policy": policy, "codegen": codegen}
            compiled = torch.compile(model, backend="tessera", options=options)
            started = time.perf_counter()
            actual = compiled(ids, use_cache=False).logits
            first = time.perf_counter() - started
            report = report_of(compiled)
            graph = report.graphs[0]
            console.print()
            console.print(_kernels(graph, cluster) if policy == "throughput" else "")
            mixture = None
            if policy == "throughput" and len(cluster.devices) > 1:
                mixture = plan_mix([(graph.ddg, 1.0)], cluster, profiles=[graph.profile], overlap=graph.plan.overlap)
            console.print(_comparison(graph.plan, graph.ceilings(), mixture))
            error = float((actual - expected).norm() / expected.norm())
            runs = executors(compiled)[0].runs
            segments = sum(isinstance(instruction, Run) for _, _, instruction in graph.program)
            console.print(
                f"{policy}: {len(graph.kernels.kernels)} kernels in {segments} segments, planned and compiled in {first:.1f} s; "
                f"ran {runs}× on {len(cluster.devices)} CPU lanes{' standing for the GPUs' if modelled else ''}; "
                f"relative difference from eager {error:.1e}",
                highlight=False,
            )
            _write(directory, policy, report.to_text(), report.to_json(), graph.program.to_text())
            if not error <= TOLERANCE or runs != 1:
                console.print("[red]the result differs from eager[/red]")
                return 1
    console.print(f"\n[green]equal to eager[/green]; reports are in {directory}/")
    if modelled:
        console.print("The times are modelled from data sheets: they plan, they are not measurements.")
    return 0


def _llama() -> tuple[torch.nn.Module, torch.Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config).eval(), torch.randint(0, 1024, (1, 256))


def _kernels(graph: GraphReport, cluster: Cluster) -> Table:
    """Kernels summed by module kind, so that a person sees at a glance what runs where."""
    table = Table(title="Where kernels run (throughput plan)", title_justify="left")
    for column, justify in (
        ("operator", "left"),
        *((d, "right") for d in cluster.names),
        *((f"{d} µs", "right") for d in cluster.names),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    rows: dict[str, list[list[float]]] = {}
    for kernel in graph.kernels.kernels:
        word = kernel.module.rsplit(".", 1)[-1] if kernel.kind in ("gemm", "attention", "conv") and kernel.module else kernel.kind
        where = cluster.names.index(graph.plan.placement[kernel.name])
        row = rows.setdefault(word, [[0.0] * len(cluster.names), [0.0] * len(cluster.names)])
        row[0][where] += 1
        for g, device in enumerate(cluster.names):
            row[1][g] += graph.profile.us(kernel.name, device)
    for word, (counts, times) in rows.items():
        table.add_row(word, *(f"{c:.0f}" for c in counts), *(f"{t:.1f}" for t in times))
    return table


def _comparison(plan: Plan, ceilings: list[str], mixture: MixPlan | None) -> Table:
    what = "bottleneck" if plan.objective == "throughput" else "makespan"
    table = Table(title=f"{plan.objective} plan: {what} of one request", title_justify="left")
    table.add_column("plan")
    table.add_column("µs", justify="right")
    table.add_column("against ours", justify="right")
    table.add_column("notes")
    notes = f"{plan.cut_values} values cross, {format_bytes(plan.cut_bytes)}; solver {plan.status}, gap {100 * plan.gap:.2f} %"
    table.add_row("split by kernel (ours)", f"{plan.value_us:.1f}", "1.000×", notes)
    for device, us in plan.baselines.items():
        table.add_row(f"{device} alone", f"{us:.1f}", f"{us / plan.value_us:.3f}×", "")
    if mixture is not None:
        served = "requests are shared; planned, not run: tessera_compile.Engine runs such plans"
        if "replicas" in mixture.baselines:
            us = mixture.baselines["replicas"]
            table.add_row("a replica on each", f"{us:.1f}", f"{us / plan.value_us:.3f}×", served)
        us = mixture.bottleneck_us
        shares = f"{len(mixture.plans)} plans, bound {mixture.bound_us:.1f} µs, gap {100 * mixture.gap:.2f} %"
        table.add_row("the best mixture of plans", f"{us:.1f}", f"{us / plan.value_us:.3f}×", shares)
    table.add_row("proven bound", f"{plan.bound_us:.1f}", f"{plan.bound_us / plan.value_us:.3f}×", "no one placement is faster")
    table.caption, table.caption_justify = "\n".join(ceilings) or None, "left"
    return table


def _write(directory: Path, policy: str, text: str, data: str, program: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{policy}.txt").write_text(text + "\n", encoding="utf-8")
    (directory / f"{policy}.json").write_text(data, encoding="utf-8")
    (directory / f"{policy}.program").write_text(program, encoding="utf-8")
