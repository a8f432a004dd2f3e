"""Inputs of a task that tell right from wrong, and the reference."""

from pathlib import Path

import numpy as np
import pytest
import torch
import tvm
from tvm import relax
from tvm.s_tir import dlight

from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.flow.planned import Planned
from tvm_fusion.kernels.cpu.contraction.panels import PANELS_ATTR, without_constants
from tvm_fusion.tuning.measure.building import BuildRequest, Place, build_choice, written
from tvm_fusion.tuning.measure.case import DRAWS, Case, Wanted, widened, wrong
from tvm_fusion.tuning.measure.site import Here
from tvm_fusion.tuning.session.choices import CLASS_CHOICE, DEFAULT, TRACE_CHOICE
from tvm_fusion.tuning.session.tasks import tasks_of, without_stamps

OP = relax.op


def module(shape, dtype, emit):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(emit(builder.emit, x))
        builder.emit_func_output(out)
    return builder.get()


def expected(mod, folder):
    """A case of the only kernel of a module, after `expect`, and that kernel."""
    target, hw = resolve_target("llvm")
    planned = Planned.of(mod, target, hw, load_policy("aggressive"))
    (task,) = tasks_of(planned.low, planned.graph, planned.plan, planned.policy, hw)
    workload = tvm.ir.save_json(task.workload)
    path = Path(folder, "untuned.so")
    request = BuildRequest(workload, CLASS_CHOICE, DEFAULT, Place("llvm", planned.policy), path)
    untuned = build_choice(request)
    func = without_constants(without_stamps(task.workload))
    case = Case(func, task.outputs, 1, target, Here.of(target))
    case.expect(untuned)
    return case, untuned


def test_normal_inputs_where_these_do(tmp_path):
    case, untuned = expected(module((8, 64), "float32", lambda e, x: OP.tanh(x)), tmp_path)
    (x, _) = case.values
    assert x.min() < -1 < 1 < x.max()
    assert case.reference == "float64"
    assert not wrong(case.run(case.call(untuned)), case.wanted)[0]


def test_what_roundings_do_is_found_out_only_where_the_verdict_depends_on_it(tmp_path):
    case, untuned = expected(module((8, 64), "float32", lambda e, x: OP.tanh(x)), tmp_path)
    (given,) = case.run(case.call(untuned))
    assert not wrong([given], case.wanted)[0]
    assert case._bounds is None
    assert wrong([given + 1e-3], case.wanted)[0]
    assert case._bounds[0].shape == given.shape


def test_smaller_inputs_where_a_result_is_near_the_largest_half(tmp_path):
    def power(emit, x):
        for _ in range(3):
            x = emit(OP.multiply(x, x))
        return emit(OP.multiply(x, relax.const(8.0, "float16")))

    case, untuned = expected(module((64, 256), "float16", power), tmp_path)
    (x, _) = case.values
    assert np.abs(x).max() < 1
    assert not any(w.is_near_limit for w in case.wanted)
    assert not wrong(case.run(case.call(untuned)), case.wanted)[0]


def test_positive_inputs_where_a_sum_cancels(tmp_path):
    def inverse(emit, x):
        return emit(OP.divide(relax.const(1.0, "float32"), emit(OP.sum(x, [1]))))

    case, untuned = expected(module((4096, 32), "float32", inverse), tmp_path)
    (x, _) = case.values
    assert x.min() > 0
    assert not wrong(case.run(case.call(untuned)), case.wanted)[0]


def test_normal_inputs_where_none_do(tmp_path, monkeypatch):
    monkeypatch.setattr("tvm_fusion.tuning.measure.case.wrong", lambda *_: ("never right", 1.0))
    case, _ = expected(module((8, 64), "float32", lambda e, x: OP.tanh(x)), tmp_path)
    assert case.values[0].min() < -1
    assert case.wanted is not None
    assert DRAWS[0] == "normal"


@pytest.mark.parametrize(
    ("given", "reference", "right"),
    [
        ([0.0, 0.0], [0.0, 0.0], True),
        ([5.0, 5.0], [0.0, 0.0], False),
        ([7.0, np.nan], [7.0, -np.inf], False),  # poison that was not overwritten
        ([7.0, -np.inf], [7.0, -np.inf], True),
        ([7.0, np.nan], [7.0, np.nan], True),
        ([7.0, np.inf], [7.0, 7.0], False),
    ],
)
def test_zeros_infinities_and_poison(given, reference, right):
    wanted = Wanted("float32", "float32", np.array(reference))
    assert (wrong([np.array(given, "float32")], [wanted])[0] == "") == right


@pytest.mark.parametrize(
    ("dtype", "given", "reference"),
    [
        ("float32", [1.0, 0.0], [1.0, np.inf]),
        ("float32", [1.0, 3.0], [1.0, np.nan]),
        ("float32", [1.0, -np.inf], [1.0, np.inf]),
        ("float32", [1.0, 2.0, 3.0], [1.0, 2.0]),
        ("int32", [1] * 3996 + [2] * 4, [1] * 4000),
        ("bool", [True, False], [True, True]),
    ],
)
def test_what_the_check_of_a_module_refuses_a_trial_is_refused(dtype, given, reference):
    given, reference = np.array(given, dtype), np.array(reference)
    bound = np.zeros(reference.shape, "bool" if dtype != "float32" else "float64")
    for untuned in (None, reference.astype(dtype)):
        want = Wanted(dtype, dtype, reference, untuned, lambda: bound)
        assert wrong([given], [want])[0]
        tensors = [None if a is None else torch.from_numpy(a) for a in (reference, untuned)]
        want = Wanted(dtype, dtype, *tensors, lambda: torch.from_numpy(bound))
        assert wrong([torch.from_numpy(given)], [want])[0]


def test_an_argmax_that_a_rounding_decides_may_go_either_way():
    undecided = np.array([True, False])
    want = Wanted("int64", "float32", np.array([3, 5]), np.array([3, 5]), lambda: undecided)
    assert not wrong([np.array([2, 5])], [want])[0]
    assert wrong([np.array([3, 4])], [want])[0]


def product(emit, x):
    weights = np.random.default_rng(0).standard_normal((256, 10)).astype("float32")
    return emit(OP.matmul(x, relax.const(weights)))


def test_a_product_that_adds_in_another_order_is_right_and_one_without_a_term_is_not(tmp_path):
    case, _ = expected(module((32, 256), "float32", product), tmp_path)
    x, w = (v for v in case.values if v.ndim == 2 and 256 in v.shape)
    w = w if w.shape[0] == 256 else w.T
    for order in (slice(None), slice(None, None, -1)):
        total = np.zeros((32, 10), "float32")
        for k in np.arange(256)[order]:
            total += np.outer(x[:, k], w[k])
        assert not wrong([total], case.wanted)[0]
    assert wrong([total - np.outer(x[:, 7], w[7])], case.wanted)[0]


@pytest.mark.parametrize(
    ("largest", "near"), [(1.0, False), (40000.0, True), (np.inf, True), (np.nan, False)]
)
def test_numbers_near_the_largest_of_a_type(largest, near):
    assert Wanted("float16", "float16", np.array([0.0, largest])).is_near_limit == near
    assert not Wanted("float32", "float32", np.array([0.0, largest])).is_near_limit


def linear(weight):
    """A product with a constant weight, and a constant bias."""
    bias = relax.const(np.linspace(-1, 1, weight.shape[1]).astype("float32"))

    def emit(emit, x):
        return emit(OP.add(emit(OP.matmul(x, relax.const(weight))), bias))

    return module((33, weight.shape[0]), "float32", emit)


WEIGHT = np.random.default_rng(3).standard_normal((70, 150)).astype("float32")


def test_a_weight_that_is_a_constant_is_packed_before_the_call_as_in_the_module(tmp_path):
    case, untuned = expected(linear(WEIGHT), tmp_path)
    ((position, panels),) = untuned.panels
    call = case.call(untuned)
    assert call.tensors[position].shape == panels.shape(WEIGHT.shape)
    assert not wrong(case.run(call), case.wanted)[0]
    case.values[position][:] = 0  # the packed weight is made from what the case has
    assert wrong(case.run(case.call(untuned)), case.wanted)[0]


def test_the_same_product_of_an_input_is_another_task():
    target, hw = resolve_target("llvm")
    planned = Planned.of(linear(WEIGHT), target, hw, load_policy("aggressive"))
    keys = {
        t.key
        for h in (hw, None)
        for t in tasks_of(planned.low, planned.graph, planned.plan, planned.policy, h)
    }
    assert len(keys) == 2


def test_a_schedule_takes_a_constant_as_it_is_stored():
    target, hw = resolve_target("llvm")
    planned = Planned.of(linear(WEIGHT), target, hw, load_policy("aggressive"))
    (task,) = tasks_of(planned.low, planned.graph, planned.plan, planned.policy, hw)
    kernel = written(task.workload, TRACE_CHOICE, "[[],[]]", hw, planned.policy)
    assert PANELS_ATTR not in kernel.attrs
    assert tuple(int(n) for n in kernel.params[1].ty.shape) == WEIGHT.shape


def test_tvms_rule_for_products_takes_a_reference_on_a_gpu():
    """Its own loops take 500 times as long as that rule's."""
    cuda, hw = resolve_target("nvidia_h200")
    planned = Planned.of(linear(WEIGHT), cuda, hw, load_policy("aggressive"))
    (task,) = tasks_of(planned.low, planned.graph, planned.plan, planned.policy, hw)
    func = without_constants(without_stamps(task.workload))
    reference = widened(func, on_cpu=False)
    assert dlight.gpu.Matmul().apply(reference, cuda, False) is not None
