"""End to end with the installed wheel alone: found by its name, plans, compiles, runs on two lanes, equals eager."""

import torch

import tessera_compile

assert "site-packages" in tessera_compile.__file__, tessera_compile.__file__


class Towers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return torch.relu(self.left(x)) * torch.tanh(self.right(x))


model, x = Towers().eval(), torch.randn(8, 64)
compiled = torch.compile(model, backend="tessera", options={"planner": "alternate"})
with torch.no_grad():
    expected = torch.relu(model.left(x)) * torch.tanh(model.right(x))
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(compiled(x), expected)
assert model.calls.item() == 2
report = tessera_compile.report(compiled)
assert {"cpu#0", "cpu#1"} == set(report.graphs[0].plan.placement.values())
assert len(tessera_compile.make_cluster("a100-80gb,l40s").devices) == 2
print(report)
print("smoke test passed")
