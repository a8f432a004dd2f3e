"""What TVM's tutorials build, with `Fuse` for TVM's fusion: the same steps, own programs."""

from __future__ import annotations

import tarfile

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, rpc, tirx
from tvm.relax import transform as passes
from tvm.relax.dpl import is_op, wildcard
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.relax.frontend import nn
from tvm.s_tir.meta_schedule.relax_integration import extract_tasks

from tvm_fusion.transform import Fuse

from ..pipelines import llm
from ..pipelines.cells import LLVM, launches
from ..support.runtime_cases import H200_CONFIG

TARGET = tvm.target.Target(LLVM)
H200 = tvm.target.Target(H200_CONFIG)
STOCK_FUSION = [
    passes.LegalizeOps(),
    passes.AnnotateTIROpPattern(),
    passes.FoldConstant(),
    passes.FuseOps(),
    passes.FuseTIR(),
    passes.DeadCodeElimination(),
]

INPUTS, HIDDEN, CLASSES = 196, 64, 10


class Perceptron(nn.Module):
    """Two linear layers and a ReLU, as the first tutorials have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.second = nn.Linear(HIDDEN, CLASSES, bias=False)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.second(nn.op.relu(self.first(x)))


def perceptron() -> tvm.IRModule:
    spec = {"forward": {"x": nn.spec.Tensor((1, INPUTS), "float32")}}
    return Perceptron().export_tvm(spec)[0]


def drawn() -> tuple[list[np.ndarray], np.ndarray]:
    """Inputs of the perceptron and its hidden values before the ReLU."""
    random = np.random.default_rng(0)
    shapes = [(1, INPUTS), (HIDDEN, INPUTS), (HIDDEN,), (CLASSES, HIDDEN)]
    arrays = [random.uniform(-1, 1, shape).astype("float32") / 4 for shape in shapes]
    x, first, bias, _ = arrays
    return arrays, x @ first.T + bias


def check(mod_or_vm, activation=lambda h: np.maximum(h, 0), device=None) -> None:
    """A perceptron against NumPy."""
    device = device or tvm.cpu()
    if isinstance(mod_or_vm, tvm.IRModule):
        mod_or_vm = relax.VirtualMachine(tvm.compile(mod_or_vm, TARGET), device)
    arrays, hidden = drawn()
    given = mod_or_vm["forward"](*[tvm.runtime.tensor(a, device) for a in arrays]).numpy()
    np.testing.assert_allclose(given, activation(hidden) @ arrays[-1].T, rtol=1e-4, atol=1e-5)


def stock_launches(mod: tvm.IRModule, *before: tvm.transform.Pass) -> dict[str, int]:
    return launches(tvm.transform.Sequential([*before, *STOCK_FUSION])(mod))


# ---- quick start: a model of the nn front end, and the "zero" pipeline


def test_quick_start():
    mod = perceptron()
    fused = Fuse(TARGET)(mod)
    assert launches(fused)["forward"] == 2 < stock_launches(mod)["forward"]
    check(relax.get_pipeline("zero")(fused))


# ---- customize_opt: products to a library, the rest fused


def test_customize_opt():
    """A library takes the products, by pattern; `Fuse` has what is left, before it is run and
    after.
    """
    name = "relax.ext.products"
    tvm_ffi.register_global_func(name, _compile_products, override=True)
    try:
        pattern = is_op("relax.matmul")(wildcard(), is_op("relax.permute_dims")(wildcard()))
        parts = [
            passes.FuseOpsByPattern([("products.matmul", pattern)], annotate_codegen=True),
            passes.RunCodegen(),
        ]
        for order in ([*parts, Fuse(TARGET)], [parts[0], Fuse(TARGET), parts[1]]):
            mod = tvm.transform.Sequential(order)(perceptron())
            assert mod.script().count("call_dps_packed") == 2
            assert launches(mod)["forward"] == 1
            check(mod)
    finally:
        tvm_ffi.registry.remove_global_func(name)


def _compile_products(functions, _options, _constants) -> list[tvm.runtime.Module]:
    """A library made of the functions themselves."""
    made = []
    for func in functions:
        symbol = func.attrs["global_symbol"]
        inlined = passes.InlinePrivateFunctions()(_as_module(func))
        low = Fuse(TARGET)(inlined)
        [kernel] = [f for _, f in low.functions_items() if isinstance(f, tirx.PrimFunc)]
        made.append(tvm.compile(kernel.with_attr("global_symbol", symbol), TARGET).mod)
    return made


def _as_module(func: relax.Function) -> tvm.IRModule:
    for name in ("Codegen", "Composite", "Primitive"):
        if name in func.attrs:
            func = func.without_attr(name)
    mod = passes.LambdaLift()(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}))
    for gvar, inner in mod.functions_items():
        for name in ("Composite", "Primitive"):
            if inner.attrs and name in inner.attrs:
                inner = inner.without_attr(name)
        mod.update_func(gvar, inner)
    return mod


# ---- relax_transformation: passes of one's own


@mutator
class _Gelus(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if call.op == tvm.ir.Op.get("relax.nn.relu"):
            return relax.op.nn.gelu_tanh(call.args[0])
        return call


@tvm.transform.module_pass(opt_level=0, name="ReluToGelu")
class ReluToGelu:
    """A pass that changes the model."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        rewriter = _Gelus(mod)
        for gvar, func in mod.functions_items():
            if isinstance(func, relax.Function):
                rewriter.builder_.update_func(gvar, rewriter.visit_expr(func))
        return rewriter.builder_.get()


def _gelu_tanh(h: np.ndarray) -> np.ndarray:
    return h / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))


@pytest.mark.parametrize("legalized", [False, True])
def test_relax_transformation(legalized):
    legal = [passes.LegalizeOps()] if legalized else []
    fused = tvm.transform.Sequential([ReluToGelu(), *legal, Fuse(TARGET)])(perceptron())
    assert launches(fused)["forward"] == 2
    check(fused, _gelu_tanh)


# ---- meta_schedule: what there is to tune


def test_meta_schedule_finds_a_task_for_each_launch():
    fused = Fuse(TARGET, write=False)(perceptron())
    assert len(extract_tasks(fused, TARGET)) == launches(fused)["forward"] == 2


# ---- the tuning pipeline of static shapes, from an empty database


@pytest.mark.parametrize("prepack", [False, True])
def test_static_shape_tuning(prepack, tmp_path):
    pipeline = relax.get_pipeline(
        "static_shape_tuning",
        total_trials=0,
        target=TARGET,
        work_dir=str(tmp_path),
        cpu_weight_prepack=prepack,
    )
    from tvm.s_tir.meta_schedule.database import JSONDatabase

    JSONDatabase(work_dir=str(tmp_path))
    mod = tvm.transform.Sequential([Fuse(TARGET), pipeline])(perceptron())
    assert launches(mod)["forward"] == 2
    check(mod)


# ---- cross compilation and RPC


def test_cross_compilation(tmp_path):
    """Objects for another machine; linking them takes its compiler."""
    arm = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu"})
    executable = tvm.compile(Fuse(arm)(perceptron()), arm)
    executable.export_library(str(tmp_path / "model.tar"))
    with tarfile.open(tmp_path / "model.tar") as archive:
        objects = {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}
    assert objects
    machine = 0xB7  # AArch64, in the header of an ELF file
    assert all(data[:4] == b"\x7fELF" and data[18] == machine for data in objects.values())


@pytest.mark.nightly
def test_rpc(tmp_path):
    from tests.support.tune_servers import STOCK, servers

    path = tmp_path / "model.so"
    tvm.compile(Fuse(TARGET)(perceptron()), TARGET).export_library(str(path))
    with servers([(STOCK, "--key", "board")]) as address:
        host, _, port = str(address).rpartition(":")
        remote = rpc.connect_tracker(host, int(port)).request("board")
        remote.upload(str(path))
        device = remote.cpu()
        check(relax.VirtualMachine(remote.load_module(path.name), device), device=device)


# ---- optimize_llm: prefill and decode with a paged cache

SMALL = llm.Shape(layers=1, width=64, inner=96, heads=4, groups=2, words=100, dtype="float32")


# Always: the other tutorials, and attention that reads a cache (`kernels/attention`).
@pytest.mark.nightly
def test_optimize_llm_is_right():
    mod, parameters = llm.language_model(SMALL, TARGET)
    counts = stock_launches(mod, passes.FuseTransposeMatmul())
    mod = tvm.transform.Sequential([passes.FuseTransposeMatmul(), Fuse(TARGET)])(mod)
    for name in ("embed", "prefill", "decode"):
        assert launches(mod)[name] <= counts[name]
    vm = relax.VirtualMachine(tvm.compile(mod, TARGET), tvm.cpu())
    random = np.random.default_rng(0)
    weights = {
        name: random.uniform(-1, 1, [int(n) for n in p.shape]).astype(p.dtype) / 4
        for name, p in parameters
    }
    held = [tvm.runtime.tensor(w) for w in weights.values()]
    words = random.integers(0, SMALL.words, 7)
    cache = vm["make_cache"](*(tvm.runtime.ShapeTuple([n]) for n in (1, 64, 32, 16)))
    _cache_function("kv_state_add_sequence")(cache, 0)
    for name, some in (("prefill", words[:6]), ("decode", words[6:])):
        x = vm["embed"](tvm.runtime.tensor(some.astype("int32")), held).numpy()[None]
        _cache_function("kv_state_begin_forward")(
            cache, tvm.runtime.ShapeTuple([0]), tvm.runtime.ShapeTuple([len(some)])
        )
        given = vm[name](tvm.runtime.tensor(x), cache, held)[0].numpy()
        _cache_function("kv_state_end_forward")(cache)
        seen = words[:6] if name == "prefill" else words
        wanted = llm.logits(SMALL, weights, llm.embedded(SMALL, weights, seen))
        np.testing.assert_allclose(given[0, 0], wanted, rtol=1e-3, atol=1e-4)


def _cache_function(name: str):
    return tvm_ffi.get_global_func(f"vm.builtin.{name}")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("views", "prefill", "decode"), [(False, (16, 17), (14, 20)), (True, (20, 25), (18, 20))]
)
def test_optimize_llm_launches_less_on_an_h200(views, prefill, decode):
    """Two layers of TinyLlama's widths, ours and TVM's own; `views` launch nothing."""
    mod, _ = llm.language_model(llm.Shape(layers=2), H200)
    first = passes.FuseTransposeMatmul()
    with H200:
        stock = launches(tvm.transform.Sequential([first, *STOCK_FUSION])(mod), views)
    fused = launches(tvm.transform.Sequential([first, Fuse(H200)])(mod), views)
    assert (fused["prefill"], stock["prefill"]) == prefill
    assert (fused["decode"], stock["decode"]) == decode
