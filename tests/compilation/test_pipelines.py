"""`Fuse` in users' Relax pipelines: places, functions, targets, neighbours."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.dpl import is_op, wildcard
from tvm.s_tir.meta_schedule.relax_integration import extract_tasks
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_fusion
from tvm_fusion.errors import InputError, PlanError, TargetError
from tvm_fusion.kernels.registry import families
from tvm_fusion.plan import structure
from tvm_fusion.plan.legality import Evaluator
from tvm_fusion.transform import Fuse, plan

from ..pipelines.cells import CUDA, LLVM, device_of, launches, run_cell
from ..pipelines.modules import cases
from ..pipelines.places import PLACES

MODULES = tuple(cases(LLVM))

# Places where TVM itself fails: `ToMixedPrecision` on a function that returns a field of a tuple,
# `InlinePrivateFunctions` on one with symbols, behind its own fusion, too.
TVM_FAILS = {
    ("rows", "before-ToMixedPrecision"),
    ("several", "before-InlinePrivateFunctions"),
}

EVERY_CELL = [
    (module, place, target)
    for module in MODULES
    for place in PLACES
    for target in ("llvm", "cuda")
    if (module, place) not in TVM_FAILS
]
USUAL_CELLS = [
    *((module, "alone", target) for module in MODULES for target in ("llvm", "cuda")),
    ("several", "twice", "llvm"),
    ("block", "after-LegalizeOps", "llvm"),
    ("rows", "after-FuseTIR", "llvm"),
    ("export", "after-RemovePurityChecking", "llvm"),
    ("symbolic", "before-RewriteDataflowReshape", "cuda"),
    ("rows", "before-SplitLayoutRewritePreproc", "cuda"),
    ("block", "before-ToMixedPrecision", "llvm"),
    ("export", "mlc-llm-after-FuseTransposeMatmul", "llvm"),
    ("symbolic", "mlc-llm-after-FoldConstant", "cuda"),
]


@pytest.fixture
def no_nvcc(monkeypatch):
    """CUDA sources are written, and where no such GPU is, not compiled."""
    if device_of("cuda") is not None:
        yield
        return
    name = "tvm_callback_cuda_compile"
    before = tvm_ffi.get_global_func(name, allow_missing=True)
    tvm_ffi.register_global_func(name, lambda *_: bytearray(b"//"), override=True)
    yield
    if before is None:
        tvm_ffi.registry.remove_global_func(name)
    else:
        tvm_ffi.register_global_func(name, before, override=True)


def _check(module: str, place: str, target: str) -> None:
    outcome = run_cell(module, place, target)
    assert outcome.kernels
    assert outcome.planned == outcome.alone
    for name, count in outcome.launches.items():
        assert count <= outcome.stock.get(name, count), outcome


@pytest.mark.one_in(21)
@pytest.mark.parametrize(("module", "place", "target"), USUAL_CELLS)
def test_fuse_works_at_a_place(module, place, target, no_nvcc):
    _check(module, place, target)


@pytest.mark.nightly
@pytest.mark.parametrize(("module", "place", "target"), EVERY_CELL)
def test_fuse_works_at_every_place(module, place, target, no_nvcc):
    _check(module, place, target)


# ---- functions


def _numpy(vm: relax.VirtualMachine, name: str, *inputs: np.ndarray) -> np.ndarray:
    return vm[name](*map(tvm.runtime.tensor, inputs)).numpy()


def test_every_function_gets_the_plan_that_it_has_alone():
    mod = cases(LLVM)["several"].make()
    plans = {}
    fused = Fuse(LLVM_TARGET, on_plan=lambda f: plans.update({f.name: f}))(mod)
    assert set(plans) == {"prefill", "decode", "norm", "decode_branch", "decode_branch1"}
    assert launches(fused) == {"prefill": 1, "decode": 3, "norm": 1}
    alone = tvm.IRModule({"main": mod["norm"].with_attr("global_symbol", "main")})
    report = tvm_fusion.explain(alone, LLVM_TARGET)
    assert len(plans["norm"].plan.groups) == len(report.plan["groups"])
    assert plans["norm"].report().launches.fused == report.launches.fused


def test_functions_inside_of_functions_are_planned():
    @I.ir_module
    class Nested:
        @R.function
        def forward(x: R.Tensor((5, 7), "float32")) -> R.Tensor((5, 7), "float32"):
            @R.function
            def inner(y: R.Tensor((5, 7), "float32")) -> R.Tensor((5, 7), "float32"):
                a = R.exp(y)
                b = R.multiply(a, y)
                return b

            z: R.Tensor((5, 7), "float32") = inner(x)
            return z

    names = []
    fused = Fuse(LLVM_TARGET, on_plan=lambda f: names.append(f.name))(Nested)
    assert len(names) == 1
    assert names[0] != "forward"
    x = np.random.default_rng(0).uniform(-1, 1, (5, 7)).astype("float32")
    vm = relax.VirtualMachine(tvm.compile(fused, LLVM_TARGET), tvm.cpu())
    np.testing.assert_allclose(_numpy(vm, "forward", x), np.exp(x) * x, rtol=1e-5)


def test_a_loop_of_a_function_that_calls_itself_is_planned():
    @I.ir_module
    class Loop:
        @R.function
        def main(i: R.Tensor((), "int32"), x: R.Tensor((6,), "float32")) -> R.Tensor(
            (6,), "float32"
        ):
            cls = Loop
            done = R.less(i, R.const(1, "int32"))
            if done:
                r = x
            else:
                less = R.subtract(i, R.const(1, "int32"))
                half = R.multiply(x, R.const(0.5, "float32"))
                more = R.add(half, R.const(1.0, "float32"))
                r = cls.main(less, more)
            return r

    fused = Fuse(LLVM_TARGET)(Loop)
    vm = relax.VirtualMachine(tvm.compile(fused, LLVM_TARGET), tvm.cpu())
    x = np.arange(6, dtype="float32")
    wanted = x
    for _ in range(3):
        wanted = wanted * 0.5 + 1
    np.testing.assert_allclose(_numpy(vm, "main", np.array(3, "int32"), x), wanted, rtol=1e-6)


def test_branches_that_are_equal_keep_their_variables_apart():
    @I.ir_module
    class Equal:
        @R.function
        def main(x: R.Tensor(("n", 3), "float32"), c: R.Tensor((), "bool")):
            if c:
                a = R.exp(x)
                r = R.multiply(a, x)
            else:
                b = R.exp(x)
                r = R.multiply(b, x)
            if c:
                d = R.exp(r)
                s = R.multiply(d, r)
            else:
                s = r
            return s

    fused = Fuse(LLVM_TARGET)(Equal)
    relax.analysis.well_formed(fused)
    assert launches(fused) == {"main": 3}
    vm = relax.VirtualMachine(tvm.compile(fused, LLVM_TARGET), tvm.cpu())
    x = np.random.default_rng(0).uniform(-1, 1, (5, 3)).astype("float32")
    r = np.exp(x) * x
    for c, wanted in ((True, np.exp(r) * r), (False, r)):
        np.testing.assert_allclose(_numpy(vm, "main", x, np.array(c)), wanted, rtol=1e-5)


def test_modules_without_work_come_back_as_they_were():
    @I.ir_module
    class OnlyTIR:
        @T.prim_func(s_tir=True)
        def double(x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")):
            for i in range(4):
                with T.sblock("y"):
                    v = T.axis.spatial(4, i)
                    y[v] = x[v] * T.float32(2)

    for mod in (tvm.IRModule({}), OnlyTIR):
        assert Fuse(LLVM_TARGET)(mod).same_as(mod)


def test_a_function_called_opaque_by_its_author_stays_alone():
    @I.ir_module
    class Mine:
        @T.prim_func(s_tir=True)
        def double(x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")):
            T.func_attr({"op_pattern": 8})
            for i in range(4):
                with T.sblock("y"):
                    v = T.axis.spatial(4, i)
                    y[v] = x[v] * T.float32(2)

        @R.function
        def main(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            cls = Mine
            with R.dataflow():
                a = R.exp(x)
                b = R.call_tir(cls.double, (a,), out_ty=R.Tensor((4,), "float32"))
                c = R.tanh(b)
                R.output(c)
            return c

    fused = Fuse(LLVM_TARGET)(Mine)
    assert launches(fused) == {"main": 3}
    tvm.ir.assert_structural_equal(fused["double"], Mine["double"])


def test_one_plan_for_several_functions_is_an_error():
    mod = cases(LLVM)["rows"].make()
    plans = []
    Fuse(LLVM_TARGET, on_plan=lambda f: plans.append(f.plan))(mod)
    again = Fuse(LLVM_TARGET, plan=plans[0])(mod)
    assert launches(again)["main"] == launches(Fuse(LLVM_TARGET)(mod))["main"]
    with pytest.raises(PlanError, match=r"several functions: decode, .*prefill"):
        Fuse(LLVM_TARGET, plan=plans[0])(cases(LLVM)["several"].make())


def test_weights_that_functions_share_are_stored_once():
    held = relax.const(np.random.default_rng(0).standard_normal((40, 48)).astype("float32"))
    builder = relax.BlockBuilder()
    for name, rows in (("prefill", 24), ("decode", 1)):
        x = relax.Var("x", relax.TensorType((rows, 48), "float32"))
        with builder.function(name, [x]):
            with builder.dataflow():
                h = builder.emit(relax.op.matmul(x, relax.op.permute_dims(held)))
                y = builder.emit_output(relax.op.nn.relu(h))
            builder.emit_func_output(y)
    executable = tvm.compile(Fuse(LLVM_TARGET)(builder.get()), LLVM_TARGET)
    [pool] = [line for line in executable.stats().splitlines() if "Constant pool" in line]
    assert pool.count("[5, 48, 8]") == 1  # packed, and as it was nowhere
    assert "[40, 48]" not in pool
    assert "[48, 40]" not in pool
    vm = relax.VirtualMachine(executable, tvm.cpu())
    x = np.random.default_rng(1).uniform(-1, 1, (24, 48)).astype("float32")
    wanted = np.maximum(x @ held.value.numpy().T, 0)
    np.testing.assert_allclose(_numpy(vm, "prefill", x), wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(_numpy(vm, "decode", x[:1]), wanted[:1], rtol=1e-4, atol=1e-4)


# ---- targets

LLVM_TARGET = tvm.target.Target(LLVM)
CUDA_TARGET = tvm.target.Target(CUDA)


def _devices(fuse_target, *around) -> set[str]:
    found: set[str] = set()
    fuse = Fuse(fuse_target, on_plan=lambda f: found.add(f.plan.device))
    mod = cases(LLVM)["block"].make()
    if around:
        with tvm.target.Target(around[0]):
            fuse(mod)
    else:
        fuse(mod)
    return found


@pytest.mark.parametrize(
    ("asked", "around"),
    [
        (None, ["nvidia/nvidia-h100"]),
        (CUDA, []),
        ("nvidia/nvidia-h100", []),
        (CUDA_TARGET, ["nvidia/nvidia-h100"]),
        ("h100", ["nvidia/nvidia-h100"]),
    ],
    ids=["current", "dict", "tag", "both", "name"],
)
def test_the_target_is_the_argument_or_the_current_one(asked, around):
    assert _devices(asked, *around) == {"nvidia_h100"}


def test_the_target_of_virtual_devices_is_theirs():
    devices = set()
    Fuse(on_plan=lambda f: devices.add(f.plan.device))(cases(CUDA)["vdevice"].make())
    assert devices == {"nvidia_h100"}


def test_two_targets_that_differ_are_both_named():
    with pytest.raises(TargetError, match=r"cuda sm_90.*llvm"):
        _devices("h100", LLVM)
    with pytest.raises(TargetError, match=r"cuda sm_90.*cuda sm_80"):
        _devices("h100", "nvidia/nvidia-a100")


def test_operators_of_each_virtual_device_are_planned_for_it(no_nvcc):
    @I.ir_module
    class Two:
        I.module_global_infos({"vdevice": [I.vdevice(LLVM), I.vdevice(CUDA)]})

        @R.function
        def main(
            x: R.Tensor((8, 16), "float32", "llvm:0"), w: R.Tensor((16, 4), "float32", "cuda:0")
        ) -> R.Tensor((8, 4), "float32", "cuda:0"):
            with R.dataflow():
                a = R.exp(x)
                b = R.multiply(a, a)
                c = R.to_vdevice(b, "cuda:0")
                d = R.matmul(c, w)
                e = R.nn.relu(d)
                R.output(e)
            return e

    fused = Fuse(CUDA_TARGET)(Two)
    assert launches(fused) == {"main": 2}
    assert len(fused.global_infos["vdevice"]) == 2
    kinds = {
        str(f.attrs["target"].kind.name)
        for _, f in fused.functions_items()
        if isinstance(f, tirx.PrimFunc)
    }
    assert kinds == {"llvm", "cuda"}
    tvm.compile(fused, CUDA_TARGET)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("target", [LLVM_TARGET, CUDA_TARGET], ids=["llvm", "cuda"])
@pytest.mark.parametrize("by", ["string", "pipeline", "s_tir", "relax.build"])
def test_no_second_argument_is_needed(by, target, no_nvcc):
    mod = cases(LLVM)["block"].make()
    if by == "string":
        tvm.compile(mod, target, relax_pipeline="tvm_fusion")
    elif by == "pipeline":
        pipeline = relax.get_pipeline("tvm_fusion", target=target)
        tvm.compile(mod, target, relax_pipeline=pipeline)
    elif by == "s_tir":
        tvm.compile(Fuse(target)(mod), target, tir_pipeline="s_tir")
    else:
        relax.build(Fuse(target)(mod), target)


def test_a_module_without_our_kernels_is_lowered_as_without_us():
    mod = relax.transform.LegalizeOps()(cases(LLVM)["block"].make())
    functions = {g: f for g, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)}
    named = relax.transform.AttachGlobalSymbol()(tvm.IRModule(functions))
    alone = tvm.tirx.transform.BindTarget(tvm.target.Target(LLVM, host=LLVM))(named)
    from tvm.s_tir.pipeline import default_s_tir_pipeline

    lower, _, _ = tvm.tirx.get_tir_pipeline("s_tir")
    stock, _, _ = default_s_tir_pipeline()
    tvm.ir.assert_structural_equal(lower(alone), stock(alone))


# ---- neighbours


def test_what_is_meant_for_a_library_stays_its_own():
    block = cases(LLVM)["block"].make()
    pattern = ("mine.matmul", is_op("relax.matmul")(wildcard(), wildcard()))
    parts = relax.transform.FuseOpsByPattern([pattern], annotate_codegen=True)(block)
    fused = Fuse(LLVM_TARGET)(parts)
    own = [g for g, f in parts.functions_items() if f.attrs and "Codegen" in f.attrs]
    assert len(own) == 1
    tvm.ir.assert_structural_equal(fused[own[0]], parts[own[0]])
    assert launches(fused)["main"] == 1


def test_a_module_with_built_libraries_is_planned():
    block = cases(LLVM)["block"].make()
    library = tvm.compile(tvm.tirx.PrimFunc([], tirx.Evaluate(0)).with_attr("global_symbol", "f"))
    mod = block.with_attr("external_mods", [library.mod])
    fused = Fuse(LLVM_TARGET)(mod)
    assert "external_mods" in fused.attrs
    assert launches(fused)["main"] < 5


def test_objects_and_packed_calls_keep_their_order():
    @I.ir_module
    class Cache:
        @R.function(pure=False)
        def step(x: R.Tensor((3, 4), "float32"), cache: R.Any) -> R.Tensor((3, 4), "float32"):
            a = R.exp(x)
            b = R.multiply(a, x)
            _ = R.call_packed("test.append", cache, b, ty_args=[R.Any])
            c: R.Tensor((3, 4), "float32") = R.call_packed(
                "test.read", cache, ty_args=[R.Tensor((3, 4), "float32")]
            )
            d = R.add(c, b)
            e = R.tanh(d)
            return e

    kept = []

    def append(cache, value):
        kept.append(value.numpy())
        return cache

    tvm_ffi.register_global_func("test.append", append, override=True)
    tvm_ffi.register_global_func(
        "test.read", lambda _: tvm.runtime.tensor(sum(kept)), override=True
    )
    fused = Fuse(LLVM_TARGET)(Cache)
    assert launches(fused) == {"step": 2}
    vm = relax.VirtualMachine(tvm.compile(fused, LLVM_TARGET), tvm.cpu())
    x = np.random.default_rng(0).uniform(-1, 1, (3, 4)).astype("float32")
    result = vm["step"](tvm.runtime.tensor(x), tvm.runtime.ShapeTuple([1])).numpy()
    np.testing.assert_allclose(result, np.tanh(2 * np.exp(x) * x), rtol=1e-5)


def test_fused_functions_without_schedules_are_tasks_of_tvms_tuner():
    case = cases(LLVM)["block"]
    fused = Fuse(LLVM_TARGET, write=False)(case.make())
    tasks = extract_tasks(fused, LLVM_TARGET)
    assert len(tasks) == launches(fused)["main"] < 5
    written = Fuse(LLVM_TARGET)(fused)
    assert launches(written) == launches(fused)
    inputs, [wanted] = case.calls["main"](np.random.default_rng(0))
    for mod in (fused, written):
        vm = relax.VirtualMachine(tvm.compile(mod, LLVM_TARGET), tvm.cpu())
        np.testing.assert_allclose(_numpy(vm, "main", *inputs), wanted, rtol=1e-4, atol=1e-5)


# ---- the same in `compile`


@pytest.mark.parametrize("module", ["export", "vdevice"])
def test_compile_takes_what_pipelines_take(module):
    case = cases(LLVM)[module]
    [call] = case.calls.values()
    inputs, [wanted] = call(np.random.default_rng(0))
    compiled = tvm_fusion.compile(case.make(), LLVM_TARGET)
    np.testing.assert_allclose(compiled(*inputs), wanted, rtol=1e-4, atol=1e-5)


def test_compile_says_that_objects_have_no_values(caplog):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3, 4), "float32"))
    cache = relax.Var("cache", relax.AnyType())
    with builder.function("main", [x, cache]):
        a = builder.emit(relax.op.exp(x))
        builder.emit_func_output(builder.emit(relax.op.multiply(a, x)))
    with caplog.at_level(logging.WARNING):
        compiled = tvm_fusion.compile(builder.get(), LLVM_TARGET, verify=True)
    assert re.search(
        r"main: no values can be drawn for cache: none of its [1-9]\d* kernel", caplog.text
    )
    assert "call it beside `tvm.compile` of the model, each with objects of its own" in caplog.text
    assert compiled.report.verify is None
    ones = np.ones((3, 4), "float32")
    result = compiled(ones, tvm.runtime.ShapeTuple([1]))
    np.testing.assert_allclose(result, np.exp(ones), rtol=1e-5)


# ---- what goes wrong


def test_a_module_that_is_not_well_formed_is_named_with_its_function():
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    stray = relax.Var("stray", relax.TensorType((4,), "float32"))
    out = relax.Var("out", relax.TensorType((4,), "float32"))
    call = relax.BlockBuilder().normalize(relax.op.add(x, stray))
    body = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(out, call)])], out)
    func = relax.Function([x], body, out.ty).with_attr("global_symbol", "main")
    mod = tvm.IRModule({"main": func})
    with pytest.raises(InputError, match=r"tvm_fusion\.Fuse, function main: .*stray"):
        Fuse(LLVM_TARGET)(mod)


@pytest.mark.parametrize(
    ("passes", "why"),
    [
        (lambda plan: Fuse(LLVM_TARGET, plan=plan), r"Fuse, function main: .* another module"),
        (lambda _: Fuse("nonsense"), r"Fuse: unknown target 'nonsense'"),
        (lambda _: Fuse(tvm.target.Target("metal")), r"Fuse: target kind 'metal'"),
    ],
    ids=["plan", "name", "kind"],
)
def test_bad_input_names_the_pass_and_leaves_the_module(passes, why):
    [planned] = plan(cases(LLVM)["rows"].make(), LLVM_TARGET).values()
    mod = cases(LLVM)["block"].make()
    before = mod.script()
    with pytest.raises(InputError, match=rf"^tvm_fusion\.{why}"):
        passes(planned)(mod)
    assert mod.script() == before


def _class_names(target: str) -> list[str]:
    from tvm_fusion.config import resolve_target

    return [kernel.name for kernel in families(resolve_target(target)[1])]


_CHOSEN = {"gemm", "row", "column", "transpose"}
ASKED = {  # classes that the plans of two modules ask this
    "accepts": set(_class_names("h200")),
    "traffic": _CHOSEN | {"pointwise"},
    "write": _CHOSEN,
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("method", ASKED)
@pytest.mark.parametrize("name", _class_names("h200"))
def test_a_class_that_fails_is_refused_with_its_reason(name, method, monkeypatch, caplog):
    from tvm_fusion.kernels.registry import family

    def fails(*_, **__):
        raise ZeroDivisionError("planted")

    monkeypatch.setenv("TVM_FUSION_PLAN_CACHE", "0")
    structure._RECENT.clear()  # what this process knows of structures
    monkeypatch.setattr(type(family(name)), method, fails)
    mods = [cases(LLVM)[m].make() for m in ("block", "rows")]
    with caplog.at_level(logging.WARNING):
        fused = [Fuse("h200")(mod) for mod in mods]
    for mod in fused:
        relax.analysis.well_formed(mod)
    assert (f"kernel class {name} fails" in caplog.text) is (name in ASKED[method])


def test_evaluators_say_which_class_failed(monkeypatch):
    from tvm_fusion.config import load_policy, resolve_target
    from tvm_fusion.ir.graph import build_graph
    from tvm_fusion.kernels.pointwise.kernel_class import Pointwise
    from tvm_fusion.transform.pipeline import lower

    def fails(*_, **__):
        raise ZeroDivisionError("planted")

    target, hw = resolve_target("h200")
    graph = build_graph(lower(cases(LLVM)["rows"].make(), target))
    structure._RECENT.clear()
    monkeypatch.setattr(Pointwise, "accepts", fails)
    costed = Evaluator(graph, hw, load_policy(None)).alone(0)
    assert costed.fit.kernel_class == "fallback"
