"""compile(): launches read off built modules, right numbers, fallbacks, plans, and the pass and
pipeline for users' own flows.
"""

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

import tvm_fusion
from tests.plan.test_search import (
    ONE_LAUNCH,
    add_rms_norm,
    chain_then_broadcast,
    cycle_trap,
    layer_norm,
    rms_norm,
    softmax,
)
from tests.support.graphs import module
from tvm_fusion.config import resolve_target
from tvm_fusion.demo import demo_block, demo_module
from tvm_fusion.errors import InputError, PlanError, Unsupported
from tvm_fusion.flow.functions import planned_function
from tvm_fusion.kernels.registry import family
from tvm_fusion.runtime.calls.launch_count import count_launches

F32 = "float32"
X, V = ((37, 129), F32), ((129,), F32)


def smaller(inputs, dtype):
    """The inputs of test_search with 64 for 4096, in another dtype."""
    return tuple((tuple(64 if n == 4096 else n for n in shape), dtype) for shape, _ in inputs)


@pytest.mark.one_in(18)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("emit", "inputs"), ONE_LAUNCH, ids=lambda v: getattr(v, "__name__", ""))
def test_these_run_as_one_launch_with_right_numbers(emit, inputs, dtype):
    if emit.__name__ == "exp_sum_product":
        dtype = "float16"  # its constant is
    compiled = tvm_fusion.compile(module(emit, *smaller(inputs, dtype)), "llvm", verify="groups")
    report = compiled.report
    assert report.verify.passed
    assert compiled.launches == report.launches.fused == 1
    assert all(g.fallback is None for g in report.groups)


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("emit", "inputs"), ONE_LAUNCH, ids=lambda v: getattr(v, "__name__", ""))
def test_these_build_as_one_kernel_for_the_h200(emit, inputs):
    planned = planned_function(module(emit, *inputs), "h200")
    made = planned.build()
    assert not made.planned.cuts
    built = made.built
    assert count_launches(built) == 1
    assert [r.spill_bytes for r in built.resources.values()] == [0]


@pytest.mark.nightly  # the plan has a test of its own, and so has each kind of its kernels
def test_the_demo_block_launches_at_most_13_kernels_for_the_h200():
    planned = planned_function(demo_module("cuda"), "h200")
    made = planned.build()
    assert not made.planned.cuts
    built = made.built
    assert count_launches(built) <= 13
    assert all(r.spill_bytes == 0 for r in built.resources.values())


def test_a_small_demo_block_on_the_cpu():
    compiled = tvm_fusion.compile(demo_block(1, 17, 24, 2, 40, F32), "llvm", verify="groups")
    report = compiled.report
    assert report.verify.passed
    assert compiled.launches <= 13
    assert report.launches.unfused >= 24
    assert all(g.error is not None for g in report.groups if len(g.ops) > 1)


# Always: the demo is timed by the command line (`test_cli_end_to_end`).
@pytest.mark.nightly
def test_a_small_demo_block_is_timed_fused_and_unfused():
    mod = demo_block(1, 17, 24, 2, 40, F32)
    policy = {"measure_budget_s": 1}
    report = tvm_fusion.compile(mod, "llvm", policy=policy, measure=True, verify=False).report
    assert min(report.time_us.fused, report.time_us.unfused) > 0


def test_a_costly_chain_stays_outside_a_broadcast_and_is_right():
    inputs = smaller((((4096, 1), F32), ((4096, 4096), F32)), F32)
    compiled = tvm_fusion.compile(module(chain_then_broadcast, *inputs), "llvm")
    assert compiled.launches == 2
    assert compiled.report.verify.passed


def add_take(bb, x, y, i):
    return bb.emit(op.take(bb.emit(op.add(x, y)), i, axis=0))


def test_add_then_take_is_right():
    """tvm#20421: fused by TVM's own passes it gives wrong results."""
    mod = module(add_take, X, X, ((5,), "int64"))
    compiled = tvm_fusion.compile(mod, "llvm", verify=False)
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(X[0]).astype(F32) for _ in range(2))
    i = np.array([0, 36, 7, 7, 3])
    np.testing.assert_allclose(compiled(x, y, i), (x + y)[i], rtol=1e-6)


def test_a_packed_function_between_two_operators_runs_in_order():
    calls = []

    @tvm.register_global_func("tests.compile.double", override=True)
    def double(a, out):
        calls.append(1)
        out.copyfrom(a.numpy() * 2)

    def emit(bb, x):
        a = bb.emit(op.exp(x))
        c = bb.emit(relax.call_dps_packed("tests.compile.double", (a,), out_ty=x.ty))
        return bb.emit(op.add(a, c))

    compiled = tvm_fusion.compile(module(emit, X), "llvm", verify=False)
    x = np.random.default_rng(0).standard_normal(X[0]).astype(F32)
    np.testing.assert_allclose(compiled(x), 3 * np.exp(x), rtol=1e-5)
    assert len(calls) == 1


def test_symbolic_rows_compile_once_for_all_sizes():
    n = tirx.Var("n", "int64")
    compiled = tvm_fusion.compile(module(layer_norm, ((n, 129), F32), V, V), "llvm", verify=False)
    assert compiled.launches == 1
    rng = np.random.default_rng(0)
    g, b = (rng.standard_normal(129).astype(F32) for _ in range(2))
    for rows in (1, 2, 37):
        x = rng.standard_normal((rows, 129)).astype(F32)
        d = x.astype("f8")
        ref = (d - d.mean(-1, keepdims=True)) / np.sqrt(d.var(-1, keepdims=True) + 1e-5) * g + b
        np.testing.assert_allclose(compiled(x, g, b), ref, rtol=2e-4, atol=2e-5)


class _Broken:
    """A kernel class that takes the place of another and fails."""

    def __init__(self, like, how):
        self.like, self.how, self.name = like, how, like.name

    def __getattr__(self, name):
        return getattr(self.like, name)

    def write(self, func, hw, policy, config=None):
        return self.how(self.like.write(func, hw, policy, config))


def _refuses(kernel):
    raise Unsupported("on purpose")


def _wrong(kernel):
    """The kernel with another constant: every 0 it starts a sum from is a 1."""
    import tvm_ffi

    def change(e):
        return tirx.FloatImm(str(e.ty.dtype), 1.0) if float(e.value) == 0.0 else e

    return kernel.with_body(tvm_ffi.structural_map(kernel.body, [(tirx.FloatImm, change)]))


@pytest.mark.parametrize(("how", "code"), [(_refuses, "writer"), (_wrong, "wrong_numbers")])
def test_a_group_that_fails_falls_back_and_says_so(monkeypatch, how, code):
    from tvm_fusion.kernels import registry

    row = family("row")
    kinds = registry._FAMILIES["row"][1]
    monkeypatch.setitem(registry._FAMILIES, "row", (_OnlyFused(row, how), kinds))
    compiled = tvm_fusion.compile(module(add_rms_norm, X, X, V), "llvm", verify=True)
    assert compiled.report.verify.passed
    assert compiled.launches > 1
    assert any(g.fallback and g.fallback.startswith(code) for g in compiled.report.groups)
    assert code in {r.code for r in compiled.report.refusals}


class _OnlyFused(_Broken):
    """Fails for functions of several blocks only, so that single operators still work."""

    def write(self, func, hw, policy, config=None):
        kernel = self.like.write(func, hw, policy, config)
        return self.how(kernel) if len(func.params) > 3 else kernel


def test_a_plan_made_by_hand_runs(tmp_path):
    mod = module(softmax, X)
    first = tvm_fusion.compile(mod, "llvm")
    first.plan.save(tmp_path / "plan.json")
    again = tvm_fusion.compile(mod, "llvm", plan=tmp_path / "plan.json")
    assert again.plan.to_json() == first.plan.to_json()


def test_a_plan_for_another_module_is_an_input_error():
    plan = tvm_fusion.compile(module(softmax, X), "llvm", verify=False).plan
    with pytest.raises(PlanError, match="another module"):
        tvm_fusion.compile(module(rms_norm, X, V), "llvm", plan=plan)


def test_wrong_inputs_at_call_time_are_input_errors():
    compiled = tvm_fusion.compile(module(softmax, X), "llvm", verify=False)
    with pytest.raises(InputError, match="float64"):
        compiled(np.zeros(X[0]))
    with pytest.raises(InputError, match="129"):
        compiled(np.zeros((37, 128), F32))


def test_the_report_says_what_was_saved():
    text = str(tvm_fusion.compile(module(softmax, X), "llvm").report)
    assert "launches" in text
    assert "softmax" in text


def test_fuse_is_a_pass_for_a_users_own_pipeline():
    mod = module(layer_norm, X, V, V)
    target, _ = resolve_target("llvm")
    fuse = tvm_fusion.transform.Fuse(target)
    before = mod.script()
    fused = fuse(mod)
    assert mod.script() == before
    relax.analysis.well_formed(fused)
    assert sum(isinstance(f, tirx.PrimFunc) for f in fused.functions.values()) == 1
    tvm.ir.assert_structural_equal(fuse(fused), fused)


def test_the_registered_pipeline_builds_a_module():
    target, _ = resolve_target("llvm")
    pipeline = relax.get_pipeline("tvm_fusion", target=target)
    built = tvm.compile(
        module(softmax, X), target, relax_pipeline=pipeline, tir_pipeline="tvm_fusion"
    )
    machine = relax.VirtualMachine(built, tvm.cpu())
    x = np.random.default_rng(0).standard_normal(X[0]).astype(F32)
    e = np.exp(x - x.max(-1, keepdims=True))
    got = machine["main"](tvm.runtime.tensor(x)).numpy()
    np.testing.assert_allclose(got, e / e.sum(-1, keepdims=True), rtol=1e-5, atol=1e-6)


def test_a_user_can_add_a_kernel_class(monkeypatch):
    from tvm_fusion.kernels import registry

    class Mine(type(family("pointwise"))):
        name = "mine"

    registry.register(Mine(), ("llvm",))
    try:
        compiled = tvm_fusion.compile(module(lambda bb, x: op.exp(x), X), "llvm")
    finally:
        registry.unregister("mine")
    assert [g.kernel_class for g in compiled.report.groups] == ["mine"]
    with pytest.raises(ValueError, match="registered"):
        registry.register(family("row"))


def test_an_opaque_cycle_is_compiled_without_fusing_across_it():
    report = tvm_fusion.explain(module(cycle_trap, ((64, 64), "float16")), "llvm")
    assert report.launches.fused >= 2


def test_an_operator_whose_kernels_all_fail_keeps_tvms_own_code(monkeypatch):
    from tvm_fusion.kernels import registry

    for name in ("pointwise", "fallback"):
        kernel, kinds = registry._FAMILIES[name]
        monkeypatch.setitem(registry._FAMILIES, name, (_Broken(kernel, _refuses), kinds))
    compiled = tvm_fusion.compile(module(lambda bb, x: op.exp(x), X), "llvm", verify=True)
    assert compiled.report.verify.passed
    assert [g.kernel_class for g in compiled.report.groups] == ["stock"]
