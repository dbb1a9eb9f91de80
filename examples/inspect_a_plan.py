"""Call the passes one by one on a small function and print what each of them makes.

python examples/inspect_a_plan.py
"""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tessera_compile import make_cluster
from tessera_compile.passes import depend, lower, partition, schedule, verify
from tessera_compile.runtime.roofline import model_profile


def function(x, w1, w2, w3):
    return torch.softmax(torch.relu(torch.relu(x @ w1) @ w2) @ w3, -1)


args = [torch.randn(512, 1024), *(torch.randn(1024, 1024) for _ in range(3))]

kernels = lower(make_fx(function)(*args), args, static_inputs=[1, 2, 3])
print(kernels.to_text(), "\n")

ddg = depend(kernels)
for before, after, data in ddg.edges(data=True):
    print(f"{before} -> {after}: {data['kind']} {data['value']}, {data['bytes']} bytes")

cluster = make_cluster("a100-80gb,l40s@400GB/s+2us")
plan = partition(ddg, model_profile(kernels, cluster.devices), cluster, objective="throughput")
print(f"\n{plan.to_text()}\n")

program = schedule(ddg, plan)
verify(program, ddg, plan)  # Raises unless the program computes the graph.
print(program.to_text())
