"""A small model on two slices under compute-sanitizer: ``compute-sanitizer --tool memcheck python3 -m benchmarks.gpu.sanitized``.

Every transport, as issued, in segment graphs and in one captured graph, a few calls each; results are compared with eager's.
"""

from __future__ import annotations

import torch
from torch import nn


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Softmax(-1), nn.Linear(64, 8)).cuda()
    x = torch.randn(4, 64, device="cuda")
    with torch.no_grad():
        want = model(x)
        for transport in ("peer", "host", "gpu"):
            for graphs in (False, "segments", True):
                torch._dynamo.reset()
                options = {
                    "cluster": "cuda:0/48sm,cuda:0/64sm", "planner": "alternate", "profile": "model", "codegen": "eager",
                    "transport": transport, "cuda_graphs": graphs,
                }  # fmt: skip
                run = torch.compile(model, backend="tessera", options=options)
                for _ in range(4):
                    torch.testing.assert_close(run(x), want, rtol=1e-3, atol=1e-4)
                print(f"{transport}, graphs {graphs}: as eager", flush=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
