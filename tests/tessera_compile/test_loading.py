"""Models that are placed lane by lane from a state dict, against the same models in eager."""

import copy
import threading
import weakref

import pytest
import torch

import tessera_compile
from tessera_compile.compiler import executors
from tessera_compile.passes.errors import FallbackError, InfeasibleError, LoadError, OptionsError
from tessera_compile.passes.problem import make_problem
from tests.models import llama
from tests.tessera_compile.test_static_cache import decode

QUICK = {"codegen": "eager", "profile": "model"}


class Mlp(torch.nn.Module):
    def __init__(self, width=8, depth=4):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.scale
        return x


def on_meta(make):
    with torch.device("meta"):
        return make().eval()


def nbytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def executed(loaded):
    return sum(e.runs for e in executors(loaded))


def planned_residents(loaded):
    """Of the latest graph: device → bytes of memory that its plan has for other things than activations."""
    report = tessera_compile.report(loaded).graphs[-1]
    problem = make_problem(report.ddg, report.profile, report.cluster)
    return {d: load.memory_bytes - problem.activation_bytes for d, load in report.plan.loads.items() if load.memory_bytes}


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "where"),
    [({"planner": "alternate"}, "cpu"), ({"planner": "random:1", "cluster": "3xcpu"}, "meta"), ({"cluster": "cpu"}, "meta"),
     ({"planner": "single"}, "meta"), ({"planner": "alternate", "cluster": "a100-80gb,l40s"}, "meta")],
    ids=lambda o: o if isinstance(o, str) else " ".join(o.values()),
)  # fmt: skip
def test_a_small_model_equals_eager_and_holds_what_was_planned(options, where):
    real = Mlp().eval()
    model = on_meta(Mlp) if where == "meta" else Mlp().eval()
    loaded = tessera_compile.load(model, real.state_dict(), **QUICK, **options)
    for rows in (2, 2, 3):
        x = torch.randn(rows, 8)
        assert torch.equal(loaded(x), real(x))
    assert executed(loaded) == 3
    held = loaded.memory()
    planned = planned_residents(loaded)
    assert {d: h.weights for d, h in held.items() if h.weights} == {d: n for d, n in planned.items() if n}
    assert all(h.planned == h.weights and h.state == 0 for h in held.values())
    assert all(not p.is_meta for p in model.parameters()) == (where == "cpu")


@torch.no_grad()
def test_inductor_computes_the_same():
    real = Mlp(depth=1).eval()
    loaded = tessera_compile.load(on_meta(lambda: Mlp(depth=1)), real.state_dict(), planner="alternate", profile="model")
    x = torch.randn(3, 8)
    torch.testing.assert_close(loaded(x), real(x))


@torch.no_grad()
def test_a_model_larger_than_any_lane_is_placed_within_the_lanes_limits():
    real = Mlp(width=64, depth=8).eval()
    weights = nbytes(real.state_dict().values())
    limit = int(weights * 0.7)
    loaded = tessera_compile.load(
        on_meta(lambda: Mlp(width=64, depth=8)),
        real.state_dict(),
        cluster="2xcpu",
        max_memory={0: limit, 1: limit},
        **QUICK,
    )
    x = torch.randn(2, 64)
    assert torch.equal(loaded(x), real(x))
    held = loaded.memory()
    assert all(0 < h.weights == h.planned < h.limit == limit < weights for h in held.values())
    assert sum(h.weights for h in held.values()) >= weights
    assert planned_residents(loaded) == {d: h.weights for d, h in held.items()}


@torch.no_grad()
def test_what_fits_nowhere_is_said():
    limit = {0: 3000, 1: 3000}
    loaded = tessera_compile.load(on_meta(lambda: Mlp(64, 8)), Mlp(64, 8).state_dict(), max_memory=limit, **QUICK)
    with pytest.raises(InfeasibleError, match="memory"):
        loaded(torch.randn(2, 64))


def llama_on_meta(tied=False):
    from transformers import LlamaForCausalLM

    config = copy.deepcopy(llama().model.config)
    config.tie_word_embeddings, config.num_hidden_layers = tied, 1
    torch.manual_seed(0)
    real = LlamaForCausalLM(config).eval()
    return real, on_meta(lambda: LlamaForCausalLM(config))


def with_rotary(real):
    """The state dict, and the buffers that are not in it."""
    return {**real.state_dict(), **{n: b for n, b in real.named_buffers() if "inv_freq" in n}}


@torch.no_grad()
@pytest.mark.parametrize(("planner", "tied"), [("alternate", False), ("random:3", True)])
def test_a_llama_on_meta_equals_eager(planner, tied):
    real, model = llama_on_meta(tied)
    state = with_rotary(real)
    if tied:
        del state["lm_head.weight"]
        # Another way to give buffers their values: the module that owns them is built where it can compute them.
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
        state = {k: v for k, v in state.items() if "inv_freq" not in k}
    loaded = tessera_compile.load(model, state, planner=planner, **QUICK)
    ids = llama().inputs["input_ids"]
    logits = loaded(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits, real(input_ids=ids, use_cache=False).logits)
    if not tied:  # The model that is whole on the caller's device, lowered and planned alike, makes the same bits.
        compiled = torch.compile(real, backend="tessera", options={"planner": planner, **QUICK})
        assert torch.equal(logits, compiled(input_ids=ids, use_cache=False).logits)
    graph = loaded.report().graphs[0]
    assert {v.origin for v in graph.kernels.values.values()} >= {"weight", "activation"}
    held = loaded.memory()
    assert planned_residents(loaded) == {d: h.weights for d, h in held.items()}
    assert all(h.planned == h.weights for h in held.values())
    if tied:  # One tensor, though the table and the head may be on two lanes.
        assert len([w for w in loaded._weights if "lm_head.weight" in w.names]) == 1
        assert loaded.state_dict()["lm_head.weight"] is loaded.state_dict()["model.embed_tokens.weight"]


@torch.no_grad()
def test_steps_with_a_static_cache_write_into_the_callers_cache():
    real, model = llama_on_meta()
    loaded = tessera_compile.load(model, with_rotary(real), planner="random:3", **QUICK)
    expected, expected_cache = decode(real, real.config, steps=4)
    actual, cache = decode(loaded, real.config, steps=4)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(cache.layers, expected_cache.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-4, atol=1e-4)
    assert executed(loaded) == 4


# -- bad input


def test_a_state_dict_that_does_not_fit_is_refused_with_every_name():
    state = Mlp().state_dict()
    del state["layers.0.weight"], state["layers.3.bias"]
    state["layers.1.weight"] = torch.zeros(8, 9)
    state["layers.2.bias"] = torch.zeros(8, dtype=torch.float64)
    state["extra"] = torch.zeros(1)
    state["scale"] = [0.5]
    with pytest.raises(LoadError) as caught:
        tessera_compile.load(on_meta(Mlp), state)
    text = str(caught.value)
    assert text.startswith("the state dict does not fit Mlp:")
    assert "missing: layers.0.weight, layers.3.bias" in text
    assert "unexpected: extra" in text
    assert "layers.1.weight is [8, 9], in the model [8, 8]" in text
    assert "layers.2.bias is torch.float64, in the model torch.float32" in text
    assert "scale is a list" in text


def test_long_lists_of_names_are_cut():
    with pytest.raises(LoadError, match=r"missing: scale, layers.0.weight, .*layers.3.weight and 13 more"):
        tessera_compile.load(on_meta(lambda: Mlp(depth=10)), {})


def test_meta_without_a_state_dict_is_refused():
    with pytest.raises(LoadError, match=r"on meta without a value.*layers.0.weight"):
        tessera_compile.load(on_meta(Mlp))
    with pytest.raises(LoadError, match=r"layers.0.weight is on meta"):
        tessera_compile.load(on_meta(Mlp), on_meta(Mlp).state_dict())


def test_buffers_whose_values_cannot_be_known_are_named_with_the_mend():
    real, model = llama_on_meta()
    with pytest.raises(LoadError, match=r"on meta without a value \(give them in state_dict.*\): model.rotary_emb.inv_freq"):
        tessera_compile.load(model, real.state_dict())


def test_other_bad_input_is_refused():
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module, not function"):
        tessera_compile.load(lambda x: x)
    with pytest.raises(OptionsError, match="dryrun"):
        tessera_compile.load(Mlp(), dryrun=True)
    with pytest.raises(OptionsError, match="did you mean 'planner'"):
        tessera_compile.load(Mlp(), planer="single")
    with pytest.raises(RuntimeError, match="call the model once"):
        tessera_compile.load(Mlp()).report()
    model = Mlp()
    model.table = torch.zeros(3, device="meta")
    with pytest.raises(LoadError, match="table is a plain attribute on meta"):
        tessera_compile.load(model)
    model.table = None
    model.layers[0].weight = torch.nn.UninitializedParameter()
    with pytest.raises(LoadError, match=r"layers.0.weight is a UninitializedParameter"):
        tessera_compile.load(model)


def test_gradients_are_refused():
    loaded = tessera_compile.load(Mlp(), **QUICK)
    with pytest.raises(FallbackError, match=r"gradients are needed.*torch.no_grad"):
        loaded(torch.randn(2, 8))
    with torch.inference_mode():
        loaded(torch.randn(2, 8))
    with pytest.raises(LoadError, match="outside of the compiled graphs"), torch.no_grad():
        tessera_compile.load(Outside(), **QUICK)(torch.randn(2, 8))


# -- where weights come from


class Lazy(dict):  # A subclass: what it does when it is asked counts.
    """Makes a tensor whenever it is asked for one, and knows how many of them are alive."""

    def __init__(self, state):
        super().__init__(state)
        self.reads, self.alive, self.most = [], weakref.WeakSet(), 0

    def __getitem__(self, key):
        tensor = super().__getitem__(key).clone()
        self.reads.append(key)
        self.alive.add(tensor)
        self.most = max(self.most, nbytes(self.alive))
        return tensor


@torch.no_grad()
def test_a_lazy_mapping_is_read_once_a_memory_and_one_tensor_at_a_time():
    real = Mlp().eval()
    lazy = Lazy(real.state_dict())
    loaded = tessera_compile.load(on_meta(Mlp), lazy, cluster="2xcpu", planner="random:3", **QUICK)
    assert sorted(lazy.reads) == sorted(real.state_dict())  # To be checked.
    lazy.reads.clear()
    x = torch.randn(2, 8)
    for _ in range(2):
        assert torch.equal(loaded(x), real(x))
    copies = {n: len(w.placed) for w in loaded._weights for n in w.names}
    assert {n: lazy.reads.count(n) for n in copies} == copies
    assert max(copies.values()) == 2  # The scale is read on both lanes,
    assert min(copies.values()) == 1  # weights where they are multiplied.
    assert lazy.most <= 2 * 8 * 8 * 4


@torch.no_grad()
def test_a_memory_mapped_file_and_other_strides(tmp_path):
    real = Mlp().eval()
    state = {k: (v.t().contiguous().t() if v.dim() == 2 else v) for k, v in real.state_dict().items()}
    torch.save(state, tmp_path / "model.pt")
    mapped = torch.load(tmp_path / "model.pt", mmap=True)
    loaded = tessera_compile.load(on_meta(Mlp), mapped, planner="alternate", **QUICK)
    x = torch.randn(2, 8)
    assert torch.equal(loaded(x), real(x))
    assert all(t.stride() == w.stand_in.stride() for w in loaded._weights for t in w.placed.values())


@torch.no_grad()
def test_the_models_own_weights_are_copied_and_left_alone():
    real = Mlp().eval()
    before = copy.deepcopy(real.state_dict())
    loaded = tessera_compile.load(real, planner="alternate", **QUICK)
    x = torch.randn(2, 8)
    expected = real(x)
    assert torch.equal(loaded(x), expected)
    for parameter in real.parameters():
        parameter.zero_()
    assert torch.equal(loaded(x), expected)
    real.load_state_dict(before)
    assert torch.equal(real(x), expected)


@torch.no_grad()
def test_other_values_are_seen_by_the_next_call_on_every_lane():
    real, other = Mlp().eval(), Mlp().eval()
    state = dict(real.state_dict())
    loaded = tessera_compile.load(on_meta(Mlp), state, planner="alternate", **QUICK)
    x = torch.randn(2, 8)
    assert torch.equal(loaded(x), real(x))
    state.clear()  # The mapping is the caller's.
    with pytest.raises(LoadError, match=r"missing: layers.0.weight"):
        loaded.load_state_dict({k: v for k, v in other.state_dict().items() if k != "layers.0.weight"})
    assert torch.equal(loaded(x), real(x))
    held = loaded.memory()
    loaded.load_state_dict(other.state_dict())
    assert torch.equal(loaded(x), other(x))
    assert loaded.memory() == held
    assert executed(loaded) == 3
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), other.state_dict().values(), strict=True))


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.middle = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.relu(self.middle(self.embed(ids))))


@torch.no_grad()
def test_tied_weights_are_placed_once():
    real = Tied()
    state = dict(real.state_dict())
    for name in ("embed.weight", "head.weight"):
        loaded = tessera_compile.load(on_meta(Tied), {k: v for k, v in state.items() if k != name}, planner="single", **QUICK)
        ids = torch.tensor([1, 5])
        assert torch.equal(loaded(ids), real(ids))
        assert loaded.memory()["cpu#0"].weights == nbytes(real.parameters())
    with pytest.raises(LoadError, match=r"missing: embed.weight = head.weight"):
        tessera_compile.load(on_meta(Tied), {k: v for k, v in state.items() if "middle" in k})


# -- semantics


class Stateful(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.ones(8), persistent=False)

    def forward(self, x):
        self.count += 1
        y = self.norm(torch.relu(self.a(x))) + self.last
        self.last.copy_(y.mean(0))
        return self.b(y)


@torch.no_grad()
@pytest.mark.parametrize("planner", ["alternate", "random:1", "random:2"])
def test_buffers_that_the_model_overwrites_live_at_home(planner):
    real = Stateful().train()
    model = copy.deepcopy(real)
    loaded = tessera_compile.load(model, copy.deepcopy(real.state_dict()), planner=planner, **QUICK)
    for step in range(4):
        x = torch.randn(4, 8)
        torch.testing.assert_close(loaded(x), real(x))
        if step == 2:
            other = Stateful().state_dict()
            loaded.load_state_dict(other)
            real.load_state_dict(other)
    now = loaded.state_dict()
    assert set(now) == set(real.state_dict())
    for name, value in real.state_dict().items():
        torch.testing.assert_close(now[name], value)
    assert model.count == 0  # The caller's model is not the one that ran.
    assert len(loaded.report().graphs) == 1
    held = loaded.memory()
    assert held["cpu#0"].state >= nbytes([b for _, b in real.named_buffers()])
    assert all(h.weights + h.state == h.planned for h in held.values())
    assert planned_residents(loaded) == {d: h.planned for d, h in held.items()}


class Aliasing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(4, 4))
        self.unread = torch.nn.Parameter(torch.randn(4))

    def forward(self, x, cache):
        cache[1:2] = (x @ self.w).sum(0)
        return x @ self.w, self.w, self.w.t()[1], x, x[0], cache, None, 3


@torch.no_grad()
@pytest.mark.parametrize("pins", [{}, {"*mm*": "cpu#1"}])
def test_outputs_alias_inputs_and_weights_as_in_eager(pins):
    real = Aliasing()
    loaded = tessera_compile.load(copy.deepcopy(real).to("meta"), real.state_dict(), planner="single", pins=pins, **QUICK)
    for _ in range(2):
        x, cache, expected_cache = torch.randn(2, 4), torch.zeros(3, 4), torch.zeros(3, 4)
        y, w, row, same, part, returned, none, three = loaded(x, cache)
        expected = real(x, expected_cache)
        assert torch.equal(y, expected[0])
        assert torch.equal(w, real.w)
        assert torch.equal(row, real.w.t()[1])
        assert row.data_ptr() == w.t()[1].data_ptr()
        assert same is x
        assert part.data_ptr() == x.data_ptr()
        assert returned is cache
        assert torch.equal(cache, expected_cache)
        assert (none, three) == (None, 3)
    assert not any(w.placed for w in loaded._weights if w.names == ("unread",))


class Overlapping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[:2])

    def forward(self, x):
        self.part.add_(1)
        return x + self.whole


@torch.no_grad()
def test_state_that_shares_memory_with_another_buffer_is_refused():
    loaded = tessera_compile.load(Overlapping(), **QUICK)
    with pytest.raises(LoadError, match="part is overwritten and shares memory with whole"):
        loaded(torch.ones(4))


class Breaking(Mlp):
    """One graph for each layer, and dynamo uses the first for all of them."""

    def forward(self, x):
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = self.step(layer, x)
        return x

    def step(self, layer, x):
        torch._dynamo.graph_break()
        return torch.relu(torch.nn.functional.linear(x, layer.weight, layer.bias)).sin()


class Outside(Mlp):
    def forward(self, x):
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        return self.elsewhere(x) * 2

    @torch.compiler.disable
    def elsewhere(self, x):
        return x + self.scale


class OutsideAlone(Outside):
    @torch.compiler.disable
    def elsewhere(self, x):
        return self.scale + self.scale


@torch.no_grad()
def test_graph_breaks():
    real = Breaking().eval()
    loaded = tessera_compile.load(on_meta(Breaking), real.state_dict(), planner="alternate", **QUICK)
    x = torch.randn(2, 8)
    for _ in range(2):
        assert torch.equal(loaded(x), real(x))
    held = loaded.memory()
    used = nbytes(p for n, p in real.named_parameters())
    assert sum(h.weights for h in held.values()) == used
    assert all(h.weights == h.planned for h in held.values())
    for broken in (Outside, OutsideAlone):
        with pytest.raises(LoadError, match="outside of the compiled graphs"):
            tessera_compile.load(on_meta(broken), real.state_dict(), **QUICK)(x)


class TwoPhases(torch.nn.Module):
    """Two graphs that read the same weights in another order, so that plans of each alone may put them elsewhere."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, x, back: bool):
        for layer in reversed(self.layers) if back else self.layers:
            x = torch.relu(layer(x))
        return x


@torch.no_grad()
def test_a_second_graph_goes_where_the_weights_are_if_there_is_no_room_for_both_plans():
    real = TwoPhases()
    weights = nbytes(real.parameters())
    # Room for 2½ layers a lane: the graphs are one chain, in two directions, of which the first half runs at home.
    limit = int(weights * 0.7)
    loaded = tessera_compile.load(
        on_meta(TwoPhases), real.state_dict(), cluster="2xcpu", max_memory={0: limit, 1: limit}, **QUICK
    )
    x = torch.randn(2, 64)
    for back in (False, True, False):
        assert torch.equal(loaded(x, back), real(x, back))
        held = loaded.memory()
        assert all(h.weights <= h.limit and h.weights == h.planned for h in held.values())
    plans = [g.plan for g in loaded.report().graphs]
    assert len(plans) == 2
    assert plans[1].planner == "loaded weights"


@torch.no_grad()
def test_plans_made_together_give_back_the_copies_that_they_do_without():
    real = TwoPhases()
    loaded = tessera_compile.load(on_meta(TwoPhases), real.state_dict(), planner="alternate", **QUICK)
    x = torch.randn(2, 64)
    with tessera_compile.plan_together() as together:
        for back in (False, True):
            with together.phase(str(back)):
                loaded(x, back)
    assert together.shared == nbytes(real.parameters())  # Handles tell that both graphs read the same weights.
    for graph in loaded.graphs:
        graph.replan({k.name: "cpu#1" for k in graph.kernels.kernels}, "by hand")
    for back in (False, True):
        assert torch.equal(loaded(x, back), real(x, back))
    held = loaded.memory()
    assert (held["cpu#0"].weights, held["cpu#1"].weights) == (0, nbytes(real.parameters()))
    assert all(h.weights == h.planned for h in held.values())


@torch.no_grad()
def test_kernels_that_need_real_data_are_timed_on_the_weights():
    class Gather(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(16, 8))
            self.route = torch.nn.Linear(8, 16)

        def forward(self, x):
            return self.table[self.route(x).argmax(-1)] * 2

    real = Gather()
    loaded = tessera_compile.load(on_meta(Gather), real.state_dict(), planner="alternate", codegen="eager", profile="measure")
    x = torch.randn(2, 8)
    assert torch.equal(loaded(x), real(x))
    sources = {t.source for row in loaded.report().graphs[0].profile.times.values() for t in row.values()}
    assert "modelled" not in sources


@torch.no_grad()
def test_calls_from_threads_and_other_weights_between_them():
    models = [Mlp().eval() for _ in range(2)]
    loaded = tessera_compile.load(on_meta(Mlp), models[0].state_dict(), planner="alternate", **QUICK)
    x = torch.randn(2, 8)
    expected = [m(x) for m in models]
    loaded(x)
    wrong = []

    def call():
        with torch.no_grad():
            for _ in range(20):
                y = loaded(x)
                if not any(torch.equal(y, e) for e in expected):  # Of one model or the other, never a mixture.
                    wrong.append(y)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for at in range(10):
        loaded.load_state_dict(models[at % 2].state_dict())
    for thread in threads:
        thread.join()
    assert not wrong
    assert executed(loaded) == 41


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@torch.no_grad()
@pytest.mark.parametrize("cuda_graphs", [False, True, "segments"])
@pytest.mark.parametrize("cluster", ["cuda:0/48sm,cuda:0/64sm", "cuda:0"])
def test_on_slices_of_a_gpu_weights_are_held_once(cluster, cuda_graphs):
    real = Stateful().eval().cuda()
    state = {k: v.cpu() for k, v in real.state_dict().items()}
    model = copy.deepcopy(real).cpu()
    loaded = tessera_compile.load(
        model, state, cluster=cluster, planner="alternate", cuda_graphs=cuda_graphs, codegen="inductor", profile="model"
    )
    for step in range(5):
        x = torch.randn(4, 8, device="cuda")
        torch.testing.assert_close(loaded(x), real(x), rtol=1e-4, atol=1e-4)
        if step == 3:
            other = Stateful().state_dict()
            loaded.load_state_dict(other)
            real.load_state_dict(other)
    torch.testing.assert_close(loaded.state_dict()["count"], real.count)
    held = loaded.memory()
    assert list(held) == ["cuda:0"]
    parameters = nbytes(real.parameters()) + nbytes([real.norm.running_mean, real.norm.running_var])
    assert held["cuda:0"].weights == parameters  # Once, though both slices read them.


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices")
@torch.no_grad()
def test_on_two_gpus_each_holds_what_it_reads():
    real = Mlp(width=64, depth=8).eval()
    weights = nbytes(real.state_dict().values())
    limit = {0: int(weights * 0.7) + 2**20, 1: int(weights * 0.7) + 2**20}
    loaded = tessera_compile.load(
        on_meta(lambda: Mlp(width=64, depth=8)), real.state_dict(), cluster="cuda:0,cuda:1", planner="alternate",
        max_memory=limit, profile="model",
    )  # fmt: skip
    x = torch.randn(2, 64)
    torch.testing.assert_close(loaded(x.cuda()).cpu(), real(x), rtol=1e-4, atol=1e-4)
    held = loaded.memory()
    assert set(held) == {"cuda:0", "cuda:1"}
    assert all(0 < h.weights == h.planned < weights for h in held.values())
