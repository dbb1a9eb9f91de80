"""Devices in every place of a graph, and what must stay as it was. No test needs the devices that it names."""

import pytest
import torch
from torch._higher_order_ops.map import map as map_over
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tessera_compile.passes import lower, torch_compat
from tessera_compile.passes.errors import LoweringError
from tessera_compile.passes.retargeting import retargeted

CPU, META, GPU0, GPU1 = (torch.device(d) for d in ("cpu", "meta", "cuda:0", "cuda:1"))


def fakes(*shapes, device=CPU):
    """Fake tensors of one mode; on any device, which need not exist."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [torch_compat.fake_on(torch.empty(s), device) for s in shapes]


def traced(function, *inputs):
    with inputs[0].fake_mode:
        return make_fx(function)(*inputs)


def nodes(gm):
    return {n.name: n for n in gm.graph.nodes}


def devices(gm):
    """Of each node that makes a tensor, where it lies."""
    found = {}
    for node in gm.graph.nodes:
        values = torch.utils._pytree.tree_leaves(node.meta.get("val"))
        found[node.name] = {str(v.device) for v in values if isinstance(v, torch.Tensor)}
    return {name: d for name, d in found.items() if d}


def test_values_and_factories_and_conversions_move():
    def function(x):
        a = torch.arange(3, device=x.device)
        b = torch.zeros(3, device="cuda:0")
        return x + a + b, x.to("cpu"), x.to("cuda:2"), (x.to("cpu") + 1).to("cuda:0")

    gm = traced(function, *fakes((2, 3), device=GPU0))
    moved = retargeted(gm, GPU0, GPU1)
    arguments = {name: n.kwargs["device"] for name, n in nodes(moved).items() if "device" in n.kwargs}
    assert arguments == {"arange": GPU1, "zeros": GPU1, "_to_copy": CPU, "_to_copy_1": torch.device("cuda:2"),
                         "_to_copy_2": CPU, "_to_copy_3": GPU1}  # fmt: skip
    found = devices(moved)
    assert found.pop("_to_copy") == found.pop("_to_copy_2") == found.pop("add_2") == {"cpu"}
    assert found.pop("_to_copy_1") == {"cuda:2"}
    assert set().union(*found.values()) == {"cuda:1"}
    # The original is as it was, device by device.
    assert set().union(*devices(gm).values()) == {"cuda:0", "cuda:2", "cpu"}
    assert nodes(gm)["arange"].kwargs["device"] == GPU0


def test_a_device_without_an_index_is_the_current_one_of_the_trace():
    gm = traced(lambda x: x + torch.zeros(3, device="cuda:1"), *fakes((3,), device=GPU1))
    nodes(gm)["zeros"].update_kwarg("device", torch.device("cuda"))
    assert nodes(retargeted(gm, GPU1, GPU0))["zeros"].kwargs["device"] == GPU0
    assert nodes(retargeted(gm, CPU, GPU0))["zeros"].kwargs["device"] == torch.device("cuda")


def test_a_factory_that_names_no_device_is_told_one():
    gm = traced(lambda x: x + torch.full([x.shape[0]], 2.0), *fakes((3,)))
    nodes(gm)["full"].kwargs = {"pin_memory": False}
    assert nodes(retargeted(gm, CPU, GPU1))["full"].kwargs["device"] == GPU1
    assert "device" not in nodes(retargeted(gm, GPU0, GPU1))["full"].kwargs


def test_scalars_on_the_cpu_stay_there():
    (x,) = fakes((3,), device=GPU0)
    with x.fake_mode:
        scalar = torch.empty(())
    moved = retargeted(traced(lambda x, s: x * s, x, scalar), GPU0, GPU1)
    assert devices(moved) == {"x_1": {"cuda:1"}, "s_1": {"cpu"}, "mul": {"cuda:1"}}


def test_mode_symbols_strides_and_shared_storages_are_kept():
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    example = torch.randn(5, 7).t()
    gm = make_fx(lambda x: (x[1:].t() * 2, torch.zeros(x.shape[0])), tracing_mode="symbolic")(example)
    before = nodes(gm)["x_1"].meta["val"]
    assert torch_compat.fake_mode_of([before]) is not mode
    moved = retargeted(gm, CPU, GPU1)
    after = nodes(moved)["x_1"].meta["val"]
    assert after.fake_mode is before.fake_mode
    assert [str(s) for s in (*after.shape, *after.stride())] == [str(s) for s in (*before.shape, *before.stride())]
    assert torch_compat.free_symbols([after]) == torch_compat.free_symbols([before]) != ()
    view = nodes(moved)["t"].meta["val"]
    assert view.device == GPU1
    assert torch_compat.storage_key(view) == torch_compat.storage_key(after)
    offsets = [str(nodes(g)["t"].meta["val"].storage_offset()) for g in (gm, moved)]
    assert offsets[0] == offsets[1]
    # Sizes are computed as before, with the same symbols.
    assert nodes(moved)["sym_size_int"].meta["val"] is nodes(gm)["sym_size_int"].meta["val"]


def test_values_that_are_tuples_move():
    gm = traced(lambda x: torch.ops.aten.max.dim(x, 0), *fakes((3, 4)))
    moved = retargeted(gm, CPU, GPU1)
    values = nodes(moved)["max_1"].meta["val"]
    assert len(values) == 2
    assert {v.device for v in values} == {GPU1}
    # One object stays one object.
    assert nodes(moved)["getitem"].meta["val"] is values[0] or (
        nodes(gm)["getitem"].meta["val"] is not nodes(gm)["max_1"].meta["val"][0]
    )


def named(gm):
    """The devices among the arguments of a graph's calls."""
    leaves = torch.utils._pytree.tree_leaves([(n.args, n.kwargs) for n in gm.graph.nodes])
    return {a for a in leaves if isinstance(a, torch.device)}


def cond(x):
    return torch.cond(x.sum() > 0, lambda a: a + torch.ones(3, device=a.device), lambda a: a * 2, (x,))


def scan(x):
    from torch._higher_order_ops.scan import scan

    return scan(lambda c, a: (c + a, c * torch.arange(3, device=a.device)), torch.zeros(3, device=x.device), x.expand(4, 3))


def over(x):
    return map_over(lambda a: a + torch.ones(3, device=a.device), x.expand(4, 3))


@pytest.mark.parametrize("function", [cond, scan, over])
def test_bodies_of_control_flow_move(function):
    found = []

    def backend(gm, inputs):
        return torch_compat.aot_inference(gm, inputs, lambda aten, _: found.append(aten) or aten.forward, None)

    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(torch.ones(3))
    aten = found[0]
    moved = retargeted(aten, CPU, GPU1)
    bodies = [n for n, m in moved.named_children() if isinstance(m, torch.fx.GraphModule)]
    assert bodies
    for name in bodies:
        body, original = getattr(moved, name), getattr(aten, name)
        assert body is not original
        assert named(original) <= {CPU}
        assert set().union(*devices(original).values()) <= {"cpu"}
        assert named(body) == ({GPU1} if named(original) else set())
        assert named(original) or "false" in name
    assert set().union(*devices(moved).values()) == {"cuda:1"}
    back = retargeted(moved, GPU1, CPU)
    x = torch.tensor([1.0, -2.0, 3.0])
    for a, b in zip(torch.utils._pytree.tree_leaves(back(x)), torch.utils._pytree.tree_leaves(aten(x)), strict=True):
        assert torch.equal(a, b)


def test_a_body_that_holds_a_tensor_is_refused():
    body = traced(lambda x: x + 1, *fakes((3,)))
    body.register_buffer("constant", torch.ones(3))
    with body.graph.inserting_before(nodes(body)["add"]):
        body.graph.get_attr("constant")
    gm = traced(lambda x: x * 2, *fakes((3,)))
    gm.body = body
    with gm.graph.inserting_before(nodes(gm)["mul"]):
        gm.graph.get_attr("body")
    with pytest.raises(LoweringError, match=r"sub-graph 'body' holds a tensor \('constant'\) on cpu.*as an operand"):
        retargeted(gm, CPU, GPU1)
    retargeted(gm, GPU0, GPU1)


def test_constants_of_the_graph_are_the_same_objects_said_to_lie_elsewhere():
    table = torch.arange(3.0)
    gm = lower(make_fx(lambda x: x + table)(torch.ones(3)), [torch.ones(3)]).module
    fetched = next(n for n in gm.graph.nodes if n.op == "get_attr")
    moved = retargeted(gm, CPU, GPU1)
    assert getattr(moved, str(fetched.target)) is getattr(gm, str(fetched.target))
    assert nodes(moved)[fetched.name].meta["val"].device == GPU1


def test_what_was_traced_on_meta_runs_where_it_is_sent():
    gm = make_fx(lambda x, w: torch.relu(x @ w) + torch.ones(4, device=x.device), tracing_mode="fake")(
        torch.empty(2, 3, device="meta"), torch.empty(3, 4, device="meta")
    )
    x, w = torch.randn(2, 3), torch.randn(3, 4)
    moved = retargeted(gm, META, CPU)
    assert torch.equal(moved(x, w), torch.relu(x @ w) + 1)
    assert {v.device for v in lower(moved).values.values()} == {"cpu"}
