"""The private names by which launches are seen (``torch_compat``, section "launches")."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sympy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tessera_compile.passes import torch_compat
from tessera_compile.passes.errors import TesseraError


def test_an_operator_can_be_called_so_that_modes_see_what_it_calls():
    @torch.library.custom_op("tessera_compat::inner", mutates_args=())
    def inner(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sin() + y

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            if func.namespace == "tessera_compat":
                with self:
                    return torch_compat.call_for_device(func, "cpu", args, kwargs or {})
            return func(*args, **(kwargs or {}))

    x, seen = torch.ones(3), []
    with torch.no_grad(), Mode():
        result = torch.ops.tessera_compat.inner(x, x)
    assert seen == ["tessera_compat.inner.default", "aten.sin.default", "aten.add.Tensor"]
    assert torch.equal(result, x.sin() + x)
    assert torch_compat.call_for_device(torch.ops.aten.add.Tensor, "meta", (x, x), {}).sum() == 6


def launcher(scope, code):
    exec(code, scope)
    return scope["launcher"]


class Static:
    """As ``StaticallyLaunchedCudaKernel``: parameters that are compiled in are named by ``full_constexprs``."""

    arg_names, full_constexprs, name = ["in_ptr0", "out_ptr0", "xnumel", "XBLOCK"], [3], "triton_poi"

    def __init__(self):
        self.launched = []

    def run(self, *args):
        self.launched.append(args)


def autotuner(made, **more):
    return SimpleNamespace(launchers=[made], compile_results=[], **more)


def test_what_the_static_launcher_launches():
    kernel = Static()
    code = "def launcher(a, b, n, stream):\n    runner(-(n // -128), 1, 1, stream, a, b, n)"
    tuned = autotuner(launcher({"runner": kernel.run}, code))
    found, grid, names, values, again = torch_compat.autotuner_launch(tuned, ["x", "y", 300], {}, 7)
    assert (found, grid, names, values) == (kernel, (3, 1, 1), ["in_ptr0", "out_ptr0", "xnumel"], ["x", "y", 300])
    assert kernel.launched == []
    again(["p", "q", 300])
    assert kernel.launched == [(3, 1, 1, 7, "p", "q", 300)]
    assert torch_compat.autotuner_kernels(tuned) == [kernel]
    tuned.launchers[0]("x", "y", 1, stream=0)
    assert len(kernel.launched) == 2  # the launcher is what it was


def test_a_launch_that_does_not_fit_its_parameters_is_an_error():
    kernel = Static()
    tuned = autotuner(launcher({"runner": kernel.run}, "def launcher(a, stream):\n    runner(1, 1, 1, stream, a, a, a, a)"))
    with pytest.raises(TesseraError, match="was given 4 values"):
        torch_compat.autotuner_launch(tuned, ["x"], {}, 7)


@pytest.mark.parametrize("constants", [{}, {(2,): 1}])
def test_what_a_compiled_kernel_launches(constants):
    launched = []
    signature = {"x": "*fp32", "n": "i32", "one": "constexpr" if not constants else "i32", "BLOCK": "constexpr"}
    kernel = SimpleNamespace(
        src=SimpleNamespace(signature=signature, constants=constants), function=5, metadata=SimpleNamespace(name="k")
    )

    def runner(*given):
        launched.append(given)

    code = "def launcher(x, n, stream):\n    runner(n, 2, 1, stream, 5, 'meta', None, None, None, x, n, 1, 64)"
    tuned = autotuner(launcher({"runner": runner, "bin": kernel}, code))
    found, grid, names, values, again = torch_compat.autotuner_launch(tuned, ["X", 9], {}, 3)
    assert (found, grid, names, values) == (kernel, (9, 2, 1), ["x", "n"], ["X", 9])
    kernel.function = 6
    again(["Y", 9])
    assert launched == [(9, 2, 1, 3, 6, "meta", None, None, None, "Y", 9, 1, 64)]
    with pytest.raises(TesseraError, match="was given 1 values"):
        torch_compat.compiled_arguments(kernel, runner, grid, 3, (), ["X"])


def test_inductors_autotuner_is_there_and_names_what_it_writes():
    pytest.importorskip("triton", reason="triton is not installed")
    from torch._inductor.runtime.hints import HeuristicType

    assert callable(torch_compat.caching_autotuner().run)
    fn = SimpleNamespace(arg_names=["in_ptr0", "in_out_ptr1", "out_ptr0", "xnumel", "kept"])
    own = SimpleNamespace(heuristic_type=HeuristicType.POINTWISE, fn=fn, mutated_arg_names=["kept"])
    assert torch_compat.autotuner_writes(own) == {"in_out_ptr1", "out_ptr0", "kept"}
    users = SimpleNamespace(heuristic_type=HeuristicType.USER_AUTOTUNE, fn=fn, mutated_arg_names=[])
    assert torch_compat.autotuner_writes(users) is None


def test_accesses_are_collected_where_kernels_are_defined(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    from torch._inductor.codegen.common import KernelArgs
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.dependencies import MemoryDep, ReadWrites, StarDep
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    d = sympy.Symbol("d0")
    tmp = sympy.Symbol("tmp0")
    reads = [MemoryDep("arg0", d * 2, (d,), (8,)), MemoryDep("arg1", tmp, (d,), (8,)), StarDep("arg2")]
    sets = ReadWrites(OrderedSet(reads), OrderedSet([MemoryDep("buf1", d, (d,), (8,), "atomic_add")]), OrderedSet())
    monkeypatch.setattr(TritonScheduling, "define_kernel", lambda self, code, schedule, kernel: "triton_k")
    before = TritonScheduling.define_kernel
    graph = SimpleNamespace(
        scheduler=SimpleNamespace(mutation_real_name={"buf1": "arg3"}), removed_buffers=set(), unaligned_buffers=set(),
        get_dtype=lambda name: torch.float16 if name == "arg0" else torch.float32,
    )  # fmt: skip
    with V.set_graph_handler(graph), torch_compat.collecting_accesses() as found:
        args = KernelArgs()
        for name in ("arg0", "arg1", "arg2"):
            args.input(name)
        args.make_inplace("arg3", "buf9")
        schedule = [SimpleNamespace(read_writes=sets), object()]
        assert TritonScheduling.define_kernel(None, "", schedule, SimpleNamespace(args=args)) == "triton_k"
    assert TritonScheduling.define_kernel is before
    ((name, accesses),) = found
    assert name == "triton_k"
    assert sorted(accesses, key=str) == sorted(
        [
            ("in_ptr0", False, 2 * d, {"d0": 8}, 2, False),
            ("in_ptr1", False, None, {}, 4, False),
            ("in_ptr2", False, None, {}, 4, False),
            ("in_out_ptr0", True, d, {"d0": 8}, 4, True),
        ],
        key=str,
    )
