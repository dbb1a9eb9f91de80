"""Each private name of torch that we use, by the function that wraps it: a torch release that moves one fails here."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tessera_compile.passes import torch_compat


def traced(function, *args, **how):
    return make_fx(function, **how)(*args)


def test_aot_inference_makes_a_functional_aten_graph():
    seen = {}

    def inference(aten, inputs):
        seen["aten"], seen["static"] = aten, torch_compat.static_input_indices()
        seen["mode"] = torch_compat.current_fake_mode()

        def call(args):
            return aten(*args)

        call._boxed_call = True
        return call

    def training(aten, inputs):
        raise AssertionError

    model = torch.nn.Linear(2, 3)
    compiled = torch.compile(
        lambda x: x.add_(model(x).sum()), backend=lambda gm, ex: torch_compat.aot_inference(gm, ex, inference, training)
    )
    x = torch.ones(2)
    with torch.no_grad():
        expected = x + model(x).sum()
        compiled(x)
    torch.testing.assert_close(x, expected)
    targets = [n.target for n in seen["aten"].graph.nodes if n.op == "call_function"]
    assert targets[-1] is torch.ops.aten.copy_.default
    assert len(seen["static"]) == 2
    assert seen["mode"] is torch_compat.fake_mode_of([n.meta["val"] for n in seen["aten"].graph.nodes if "val" in n.meta])


def test_aot_inference_calls_the_training_compiler_when_gradients_are_needed():
    class Stop(Exception):
        pass

    def training(aten, inputs):
        raise Stop

    caught = []

    def backend(gm, ex):
        try:
            return torch_compat.aot_inference(gm, ex, training, training)
        except Stop:
            caught.append(True)
            return gm.forward

    torch.compile(torch.nn.Linear(2, 2), backend=backend)(torch.ones(2))
    assert caught == [True]


def test_inductor_compile_is_plain_inductor():
    compiled = torch.compile(torch.sin, backend=torch_compat.inductor_compile)
    torch.testing.assert_close(compiled(torch.ones(3)), torch.sin(torch.ones(3)))


def test_a_dynamo_graph_can_be_compiled_again_after_its_compilation():
    kept = []

    def backend(gm, ex):
        kept.extend((*torch_compat.copy_dynamo_graph(gm), torch_compat.resume_tracing()))
        return gm.forward

    torch.compile(torch.nn.Linear(2, 3), backend=backend)(torch.ones(2))
    gm, fakes, resume = kept
    seen = []
    with resume(), torch.no_grad():
        torch_compat.aot_inference(gm, fakes, lambda aten, inputs: seen.append(aten) or aten, None)
    assert [n.meta["val"].shape for n in seen[0].graph.nodes if n.op == "placeholder"] == [(3, 2), (3,), (2,)]
    assert sum(isinstance(f, torch.nn.Parameter) for f in fakes) == 2


def test_outside_a_compilation_there_is_no_context():
    assert torch_compat.static_input_indices() == ()
    assert torch_compat.current_fake_mode() is None
    assert torch_compat.calling_compile() is None


def test_fake_propagation_and_joint_passes():
    gm = traced(lambda x: torch.rand(3) + x, torch.ones(3))
    mode = torch_compat.new_fake_mode()
    torch_compat.fake_propagate(gm, [torch.ones(3)], mode)
    assert torch_compat.fake_mode_of([n.meta.get("val") for n in gm.graph.nodes]) is mode
    gm = torch_compat.joint_graph_passes(gm, mode)
    seeds, random, _ = torch_compat.random_prims()
    targets = [n.target for n in gm.graph.nodes]
    assert seeds in targets
    assert random in targets


def test_a_compiled_segment_is_boxed_and_keeps_strides():
    gm = traced(lambda x: ((x + 1).t().contiguous().t(), x * 2), torch.ones(3, 4))
    assert torch_compat.needs_decomposing(gm)
    mode = torch_compat.new_fake_mode()
    gm = torch_compat.decompose(gm, [mode.from_tensor(torch.ones(3, 4))], mode)
    assert not torch_compat.needs_decomposing(gm)
    assert next(iter(gm.graph.nodes)).name == "x_1"
    fakes = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    call = torch_compat.inductor_compile_segment(gm, fakes, threads=1)
    args = [torch.ones(3, 4)]
    first, second = call(args)
    assert args == []
    assert first.stride() == (1, 3)
    assert torch.equal(second, torch.full((3, 4), 2.0))


def test_symbols():
    gm = traced(lambda x: (x + 1, x.shape[0] * 2), torch.ones(5, 3), tracing_mode="symbolic")
    x = next(n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder")
    symbol = torch_compat.symbol_of(x.shape[0])
    assert symbol in torch_compat.free_symbols([x])
    assert torch_compat.free_symbols([torch.ones(2), 3]) == ()
    assert torch_compat.symbol_of(x.shape[0] + 1) is None
    assert torch_compat.symbol_of(4) is None
    assert torch_compat.size_hint(x.shape[0]) == 5
    assert torch_compat.size_hint(7) == 7
    assert not torch_compat.has_unbacked(x)
    assert torch_compat.empty_like_fake(x[:, 0], {symbol: 9}).shape == (9,)


def test_unbacked_symbols():
    from torch._dynamo import config

    seen = []

    def backend(gm, ex):
        seen.extend(n.meta.get("example_value") for n in gm.graph.nodes)
        return gm.forward

    with config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(lambda x: x.nonzero() + 1, backend=backend)(torch.ones(3))
    found = [v for v in seen if torch_compat.has_unbacked(v)]
    assert found
    assert torch_compat.size_hint(found[0].shape[0], fallback=11) == 11


def test_storage_identity():
    a = torch.ones(4)
    assert torch_compat.storage_key(a) == torch_compat.storage_key(a[1:]) != torch_compat.storage_key(a.clone())
    weak = torch_compat.weak_storage(a)
    assert weak.cdata == torch_compat.storage_key(a)
    assert not weak.expired()
    del a
    assert weak.expired()


def test_the_object_of_a_compile_call_is_found_from_both_sides():
    seen = []

    def backend(gm, ex):
        seen.append(torch_compat.calling_compile())
        return gm.forward

    class Model(torch.nn.Module):
        def forward(self, x):
            return x + 1

    for make in (lambda f: torch.compile(f, backend=backend), lambda f: torch.compile(backend=backend)(f)):
        torch.compiler.reset()  # An equal call would find the first one's code.
        compiled = make(Model())
        compiled(torch.ones(2))
        assert seen.pop() is torch_compat.compile_of(compiled)
    function = torch.compile(lambda x: x + 1, backend=backend)
    function(torch.ones(2))
    assert seen.pop() is torch_compat.compile_of(function)
    torch.compiler.reset()
    model = Model()
    model.compile(backend=backend)
    model(torch.ones(2))
    assert seen.pop() is torch_compat.compile_of(model)
    assert torch_compat.compile_of(Model()) is None
    assert torch_compat.compile_of(3) is None


def test_higher_order_operators():
    assert torch_compat.is_higher_order(torch.ops.higher_order.cond)
    assert not torch_compat.is_higher_order(torch.ops.aten.add.Tensor)


def test_config_key_names_the_configuration():
    from torch._inductor import config

    before = torch_compat.inductor_config_key()
    assert before == torch_compat.inductor_config_key()
    with config.patch(max_autotune=not config.max_autotune):
        assert torch_compat.inductor_config_key() != before


def test_negative_view():
    assert torch_compat.negative_view(torch.ones(2)).is_neg()


@pytest.mark.parametrize("name", ["inductor_seeds", "inductor_random", "inductor_randint"])
def test_random_prims_exist(name):
    assert name in [op._schema.name.split("::")[1] for op in torch_compat.random_prims()]


def test_ptx_of_a_cached_triton_kernel(tmp_path, monkeypatch):
    """Triton's own naming: base 32 of the hash, without padding."""
    digest = "6f1f45b7817113b70f17ee05ceedda52a4100b05a2f82c253550408d0746d3bd"
    folder = tmp_path / "N4PULN4BOEJ3ODYX5YC453O2KKSBACYFUL4CYJJVKBAI2B2G2O6Q"
    folder.mkdir()
    (folder / "k.ptx").write_text(".version 8.7")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert torch_compat.triton_ptx(digest, "k", 0) == ".version 8.7"
    assert torch_compat.triton_ptx(digest, "other", 0) is None


def test_fake_on_keeps_mode_storage_and_view():
    base = torch_compat.new_fake_mode().from_tensor(torch.ones(3, 4))
    view = base.t()[1:]
    for device in ("cuda:1", "meta", "cpu"):
        moved = torch_compat.fake_on(view, torch.device(device))
        assert moved.device == torch.device(device)
        assert (moved.shape, moved.stride(), moved.storage_offset()) == (view.shape, view.stride(), view.storage_offset())
        assert moved.fake_mode is base.fake_mode
        assert torch_compat.storage_key(moved) == torch_compat.storage_key(base)
        with base.fake_mode:
            assert (moved + 1).device == torch.device(device)
    assert torch_compat.fake_on(base.to(torch.complex64).conj(), torch.device("cuda:0")).is_conj()


def test_stand_ins_are_fake_and_parameters_stay_parameters():
    found = torch_compat.stand_ins([torch.nn.Parameter(torch.ones(2, 3).t()), torch.ones(4)], torch.device("cuda:1"))
    assert [isinstance(t, torch.nn.Parameter) for t in found] == [True, False]
    assert found[0].stride() == (1, 3)
    assert {t.device for t in found} == {torch.device("cuda:1")}
    assert torch_compat.fake_mode_of(found) is not None


def test_stand_ins_are_traced_like_tensors_and_mix_with_none():
    (weight,) = torch_compat.stand_ins([torch.nn.Parameter(torch.ones(3, 3), requires_grad=False)], torch.device("cpu"))
    seen = []

    def backend(gm, inputs):
        fakes = [torch_compat.in_current_mode(x) for x in inputs if x is weight]
        mode = torch_compat.current_fake_mode()
        seen.append([(f.fake_mode is mode, f.device, tuple(f.shape)) for f in fakes])
        return lambda *args: (torch.full((2, 3), float(any(a is weight for a in args))),)

    with torch.no_grad():
        result = torch.compile(lambda x: x @ weight, backend=backend)(torch.ones(2, 3))
    assert seen == [[(True, torch.device("cpu"), (3, 3))]]
    assert torch.equal(result, torch.ones(2, 3))
    with pytest.raises(AssertionError, match="FakeTensor"):
        torch.ones(2, 3) @ weight


def test_cause_of_finds_what_a_backend_raised():
    def backend(gm, inputs):
        raise KeyError("mine")

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert isinstance(torch_compat.cause_of(caught.value), KeyError)
    assert torch_compat.cause_of(error := ValueError()) is error


def test_workspaces_of_cublas_can_be_forgotten():
    torch_compat.clear_cublas_workspaces()
    assert hasattr(torch._C, "_cuda_clearCublasWorkspaces") or torch.version.cuda is None


def test_operators_that_are_called_on_copies_and_kernels_of_users():
    from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional

    graph = torch.fx.Graph()
    copied = graph.call_function(auto_functionalized_v2, (torch.ops.aten.add_.Tensor,))
    plain = graph.call_function(torch.ops.aten.add.Tensor, (1, 2))
    assert torch_compat.functionalized_operator(copied) is torch.ops.aten.add_.Tensor
    assert torch_compat.functionalized_operator(plain) is None
    assert torch_compat.is_triton_kernel(triton_kernel_wrapper_functional)
    assert not torch_compat.is_triton_kernel(auto_functionalized_v2)
    assert not torch_compat.is_triton_kernel(plain.target)
