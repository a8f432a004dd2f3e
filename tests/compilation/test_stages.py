"""The stages of `Fuse` as passes: by themselves, in its place, timed, dumped and switched off."""

import numpy as np
import pytest
import tvm
from tvm import relax

from tvm_fusion.errors import InputError, PlanError
from tvm_fusion.transform import Fuse, Materialize, Plan, WriteKernels, plan

from ..pipelines.cells import LLVM, launches
from ..pipelines.modules import cases
from ..support.runtime_cases import H200_CONFIG

TARGET = tvm.target.Target(LLVM)
STAGES = ["Decompose", "Plan", "Materialize", "WriteKernels", "PackConstants", "PlanMemory"]
HELD = np.random.default_rng(1).uniform(-1, 1, (40, 36)).astype("float32")


def softmax_of_a_product() -> tvm.IRModule:
    """A composite behind a product with a constant, which is packed."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((24, 40), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            h = builder.emit(relax.op.matmul(x, relax.const(HELD)))
            y = builder.emit_output(relax.op.nn.softmax(h))
        builder.emit_func_output(y)
    return builder.get()


def expected(x: np.ndarray) -> np.ndarray:
    h = x @ HELD
    e = np.exp(h - h.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def check_numbers(mod: tvm.IRModule) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (24, 40)).astype("float32")
    vm = relax.VirtualMachine(tvm.compile(mod, TARGET), tvm.cpu())
    given = vm["main"](tvm.runtime.tensor(x)).numpy()
    np.testing.assert_allclose(given, expected(x), rtol=1e-4, atol=1e-6)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("module", ["several", *(m for m in cases(LLVM) if m != "several")])
def test_the_stages_one_by_one_come_to_fuse(module):
    mod = cases(LLVM)[module].make()
    plans = plan(mod, TARGET)
    stages = [Materialize(plans, TARGET), WriteKernels(TARGET)]
    tvm.ir.assert_structural_equal(tvm.transform.Sequential(stages)(mod), Fuse(TARGET)(mod))


def test_plans_are_those_of_fuse_and_change_nothing():
    mod, found = cases(LLVM)["several"].make(), {}
    Fuse(TARGET, on_plan=lambda fused: found.update({fused.name: fused.plan}))(mod)
    assert plan(mod, TARGET) == found
    assert Plan(TARGET, on_plan=lambda _: None)(mod).same_as(mod)


@tvm.instrument.pass_instrument
class _Names:
    def __init__(self):
        self.seen = []

    def run_before_pass(self, _mod, info):
        self.seen.append(str(info.name))


def test_instruments_see_the_stages_of_fuse_by_their_names():
    names, timing = _Names(), tvm.ir.instrument.PassTimingInstrument()
    with tvm.transform.PassContext(instruments=[names, timing]):
        Fuse(TARGET)(softmax_of_a_product())
        profile = timing.render()
    stages = [f"tvm_fusion.{name}" for name in ("Fuse", *STAGES[:-1])]
    order = ["Fuse", "Plan", "Decompose", "Materialize", "WriteKernels", "PackConstants"]
    assert [n for n in names.seen if n in stages] == [f"tvm_fusion.{name}" for name in order]
    assert all(name in profile for name in stages)


def test_dumps_are_called_after_the_stages(tmp_path):
    dump = tvm.ir.instrument.DumpIR(str(tmp_path))
    with tvm.transform.PassContext(instruments=[dump]):
        Fuse(TARGET)(softmax_of_a_product())
    dumped = "\n".join(path.name for path in tmp_path.iterdir())
    for name in STAGES[:-1]:
        assert f"tvm_fusion.{name}" in dumped


def test_fuse_that_is_disabled_leaves_the_module_as_it_was():
    mod = softmax_of_a_product()
    with tvm.transform.PassContext(disabled_pass=["tvm_fusion.Fuse"]):
        assert tvm.transform.Sequential([Fuse(TARGET)])(mod).same_as(mod)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", STAGES)
def test_fuse_without_one_stage_is_right(name):
    mod = softmax_of_a_product()
    with tvm.transform.PassContext(disabled_pass=[f"tvm_fusion.{name}"]):
        fused = Fuse(TARGET)(mod)
        if name in ("Plan", "Materialize"):
            assert fused.same_as(mod)
        if name == "WriteKernels":
            tvm.ir.assert_structural_equal(fused, Fuse(TARGET, write=False)(mod))
        check_numbers(fused)


def test_memory_is_planned_by_a_stage_that_can_be_disabled():
    from tvm_fusion.runtime.build.lowering import lowering_pipeline

    target = tvm.target.Target(H200_CONFIG)
    fused = Fuse(target)(cases(H200_CONFIG)["rows"].make())
    counts = {}
    for disabled in ([], ["tvm_fusion.PlanMemory"]):
        names = _Names()
        with target, tvm.transform.PassContext(disabled_pass=disabled, instruments=[names]):
            lowered = lowering_pipeline(target)(fused)
        counts[len(disabled)] = lowered.script().count("alloc_storage")
        assert ("tvm_fusion.PlanMemory" in names.seen) == (not disabled)
    assert counts[0] <= counts[1]


def test_results_on_several_devices_have_a_plan_each():
    devices = [relax.VDevice(LLVM), relax.VDevice(H200_CONFIG)]
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((8, 16), "float32", vdevice=devices[0]))
    with builder.function("main", [x]):
        with builder.dataflow():
            a = builder.emit(relax.op.exp(x))
            b = builder.emit(relax.op.multiply(a, a))
            c = builder.emit(relax.op.to_vdevice(b, devices[1]))
            y = builder.emit_output(relax.op.tanh(c))
        builder.emit_func_output(y)
    mod = builder.get()
    mod.update_global_info("vdevice", devices)
    target = tvm.target.Target(H200_CONFIG)
    plans = plan(mod, target)
    assert set(plans) == {"main@llvm:0", "main@cuda:0"}
    stages = [Materialize(plans, target), WriteKernels(target)]
    made = tvm.transform.Sequential(stages)(mod)
    assert launches(made) == launches(Fuse(target)(mod)) == {"main": 2}


# ---- what goes wrong


def test_a_plan_for_a_function_that_is_not_there_names_those_that_are():
    plans = plan(cases(LLVM)["several"].make(), TARGET)
    with pytest.raises(PlanError, match=r"Materialize: a plan for .*prefill.* are main"):
        Materialize(plans, TARGET)(softmax_of_a_product())


def test_a_plan_of_another_function_is_refused():
    [planned] = plan(cases(LLVM)["rows"].make(), TARGET).values()
    with pytest.raises(PlanError, match="made for another module"):
        Materialize(planned, TARGET)(softmax_of_a_product())


@pytest.mark.parametrize("given", [None, "main", {"main": 3}])
def test_what_is_no_plan_is_refused(given):
    with pytest.raises(PlanError, match=r"plans? ?(are|:) a FusionPlan.*, not a (None|str|int)"):
        Materialize(given, TARGET)(softmax_of_a_product())


def test_one_plan_for_several_functions_is_refused():
    [planned] = plan(softmax_of_a_product(), TARGET).values()
    with pytest.raises(PlanError, match=r"several functions: decode, .*by name"):
        Materialize(planned, TARGET)(cases(LLVM)["several"].make())


def test_kernels_of_a_class_that_a_device_lacks_are_refused():
    mod = softmax_of_a_product()
    made = Materialize(plan(mod, TARGET), TARGET)(mod)
    gvar = next(g for g, f in made.functions_items() if "tvm_fusion.kernel_class" in f.attrs)
    made.update_func(gvar, made[gvar].with_attr("tvm_fusion.kernel_class", "mixed"))
    with pytest.raises(InputError, match=f"{gvar.name_hint} is to be a kernel of class mixed"):
        WriteKernels(TARGET)(made)


def test_a_kernel_that_cannot_be_written_is_left_to_tvm(monkeypatch, caplog):
    from tvm_fusion.errors import Unsupported
    from tvm_fusion.kernels.row.kernel_class import Row

    def refuses(*_):
        raise Unsupported("planted")

    mod = softmax_of_a_product()
    made = Materialize(plan(mod, TARGET), TARGET)(mod)
    classes = {f.attrs.get("tvm_fusion.kernel_class") for _, f in made.functions_items()}
    assert "row" in classes
    monkeypatch.setattr(Row, "write", refuses)
    written = WriteKernels(TARGET)(made)
    assert "stays without a schedule: planted" in caplog.text
    check_numbers(written)
