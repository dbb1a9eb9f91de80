"""Plan a model for two unlike GPUs, look at the plan, and run it on CPU lanes that stand for them.

python examples/two_gpus.py
"""

import torch

import tessera_compile


class Block(torch.nn.Module):
    """A small transformer block: matrix products want FLOP/s, everything else wants bandwidth."""

    def __init__(self, width=256, heads=4):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attention = torch.nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


model = torch.nn.Sequential(*[Block() for _ in range(4)]).eval()
x = torch.randn(2, 128, 256)

options = {"cluster": "a100-80gb,l40s@200Gbps+10us", "policy": "throughput"}
compiled = torch.compile(model, backend="tessera", options=options)
with torch.no_grad():  # Without it even an eval model takes the training path, which runs on one device.
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)

report = tessera_compile.report(compiled)
print(report)
print(report.graphs[0].program.to_text())
