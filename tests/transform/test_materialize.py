"""Plans applied to modules: one PrimFunc a group, and the same numbers."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.relax import op

from tests.support.graphs import module, plan_of
from tests.support.helpers_tir import quick_executable
from tvm_fusion.check.inputs import random_inputs
from tvm_fusion.check.reference import flatten, to_argument
from tvm_fusion.ir.extents import (
    LOWER_BOUNDS_ATTR,
    MULTIPLES_ATTR,
    UPPER_BOUNDS_ATTR,
    Bounds,
    known_sizes,
)
from tvm_fusion.plan.plan import FusionPlan, PlannedGroup
from tvm_fusion.transform.apply.materialize import group_views, materialize
from tvm_fusion.transform.apply.region_module import group_modules

X = ((6, 8), "float32")


def run(mod, inputs):
    machine = relax.VirtualMachine(quick_executable(mod), tvm.cpu())
    return flatten(machine["main"](*[to_argument(x) for x in inputs]))


def hand_plan(planned, *groups):
    """A plan of the given groups of operator positions; (ops, recomputed)."""
    names = [o.name for o in planned.graph.ops]
    made = tuple(
        PlannedGroup(tuple(names[i] for i in ops), "fallback", tuple(names[i] for i in copies))
        for ops, copies in groups
    )
    return FusionPlan("main", planned.graph.fingerprint(), "llvm_cpu", "default", made)


def check(mod, *groups, sizes=None):
    """Materializes a hand-made plan, compares the numbers, and gives the fused module."""
    planned = plan_of(mod, "llvm")
    plan = hand_plan(planned, *groups)
    fused = materialize(planned.low, planned.graph, plan).mod
    relax.analysis.well_formed(fused)
    inputs = random_inputs(planned.low["main"], sizes=sizes)
    for got, want in zip(run(fused, inputs), run(planned.low, inputs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    return fused


def prim_funcs(mod):
    return [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]


def diamond(bb, x):
    a = bb.emit(op.exp(x))
    return bb.emit(op.tanh(a)), bb.emit(op.sum(a, axis=-1))


def test_a_group_with_two_outputs_is_one_prim_func():
    assert len(prim_funcs(check(module(diamond, X), ((0, 1, 2), ())))) == 1


def test_a_recomputed_operator_stands_in_both_groups():
    fused = check(module(diamond, X), ((0, 1), ()), ((0, 2), (0,)))
    assert len(prim_funcs(fused)) == 2
    assert len(fused["main"].body.blocks[0].bindings) == 3, "two calls and the tuple of outputs"


def test_an_intermediate_that_is_also_read_outside_is_an_output():
    fused = check(module(diamond, X), ((0, 1), ()), ((2,), ()))
    (first, *_) = fused["main"].body.blocks[0].bindings
    assert len(first.var.ty.fields) == 2


def test_the_input_module_is_left_unchanged():
    planned = plan_of(module(diamond, X), "llvm")
    before = planned.low.script()
    materialize(planned.low, planned.graph, planned.plan)
    assert planned.low.script() == before


def test_a_plan_that_fuses_nothing_changes_nothing():
    planned = plan_of(module(diamond, X), "llvm")
    plan = hand_plan(planned, ((0,), ()), ((1,), ()), ((2,), ()))
    tvm.ir.assert_structural_equal(
        materialize(planned.low, planned.graph, plan).mod["main"], planned.low["main"]
    )


def split_and_join(bb, x):
    parts = bb.emit(op.split(x, 2, axis=1))
    a, b = bb.emit(parts[0]), bb.emit(parts[1])
    return bb.emit(op.add(bb.emit(op.exp(a)), b)), b


@pytest.mark.parametrize(
    "groups", [[((0, 1, 2), ())], [((0, 1), ()), ((2,), ())], [((0,), ()), ((1, 2), ())]]
)
def test_operators_with_several_results_can_be_fused(groups):
    check(module(split_and_join, X), *groups)


def test_a_constant_becomes_one_parameter():
    c = relax.const(np.arange(8, dtype="float32"))
    mod = module(lambda bb, x: bb.emit(op.add(bb.emit(op.multiply(x, c)), c)), X)
    (func,) = prim_funcs(check(mod, ((0, 1), ())))
    assert len(func.params) == 3


def test_two_reads_of_one_tensor_keep_both_regions():
    """FuseTIR keeps only the first region; without the repair a later schedule is silently
    wrong.
    """
    mod = module(lambda bb, x: bb.emit(op.add(x, bb.emit(op.flip(x, 1)))), X)
    planned = plan_of(mod, "llvm")
    fused = materialize(planned.low, planned.graph, hand_plan(planned, ((0, 1), ()))).mod
    (func,) = prim_funcs(fused)
    regions = []

    def see(block):
        regions.append(len(block.reads))

    tvm_ffi.structural_walk(func.body, [(s_tir.SBlock, see)])
    assert max(regions) == 2
    check(mod, ((0, 1), ()))


def test_symbolic_extents_stay_symbolic():
    n = tirx.Var("n", "int64")
    mod = module(diamond, ((n, 8), "float32"))
    planned = plan_of(mod, "llvm")
    fused = materialize(planned.low, planned.graph, hand_plan(planned, ((0, 1, 2), ()))).mod
    machine = relax.VirtualMachine(quick_executable(fused), tvm.cpu())
    for rows in (1, 5):
        x = np.random.default_rng(0).standard_normal((rows, 8)).astype("float32")
        tanh, total = flatten(machine["main"](to_argument(x)))
        np.testing.assert_allclose(tanh, np.tanh(np.exp(x)), rtol=1e-5)
        np.testing.assert_allclose(total, np.exp(x).sum(-1), rtol=1e-5)


def test_a_group_whose_inputs_do_not_define_its_symbol_gets_it_passed():
    n = tirx.Var("n", "int64")

    def emit(bb, x):
        flat = bb.emit(op.reshape(x, (n * 2, 4)))
        back = bb.emit(op.reshape(bb.emit(op.exp(flat)), (n, 8)))
        return bb.emit(op.tanh(back))

    planned = plan_of(module(emit, ((n, 8), "float32")), "llvm")
    plan = hand_plan(planned, ((0,), ()), ((1, 2, 3), ()))
    fused = materialize(planned.low, planned.graph, plan).mod
    relax.analysis.well_formed(fused)
    machine = relax.VirtualMachine(quick_executable(fused), tvm.cpu())
    for rows in (1, 5):
        x = np.random.default_rng(0).standard_normal((rows, 8)).astype("float32")
        (got,) = flatten(machine["main"](to_argument(x)))
        np.testing.assert_allclose(got, np.tanh(np.exp(x)), rtol=1e-5)


def test_groups_in_any_order_run_in_the_right_one():
    check(module(diamond, X), ((2,), ()), ((1,), ()), ((0,), ()))


def test_one_group_can_be_taken_out():
    planned = plan_of(module(diamond, X), "llvm")
    plan = hand_plan(planned, ((0, 1), ()), ((2,), ()))
    taken = group_modules(planned.low, planned.graph, plan, plan.groups[0])
    x = np.random.default_rng(0).standard_normal((6, 8)).astype("float32")
    fused, unfused = run(taken.fused, [x]), run(taken.unfused, [x])
    assert len(fused) == 2
    for a, b in zip(fused, unfused, strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(prim_funcs(taken.fused)) == 1
    assert [len(v.outputs) for v in group_views(planned.graph, plan)] == [2, 1]


def bounded(bb, x, y):
    return bb.emit(op.exp(x)), bb.emit(op.tanh(bb.emit(op.concat([y, y]))))


def test_prim_funcs_know_which_sizes_they_are_called_with():
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    mod = module(bounded, ((n, 8), "float32"), ((m, 8), "float32"))
    main = mod["main"].with_attr(
        {LOWER_BOUNDS_ATTR: {"n": 8}, UPPER_BOUNDS_ATTR: {"n": 128}, MULTIPLES_ATTR: {"n": 8}}
    )
    sizes = {"n": 16, "m": 3}
    fused = check(tvm.IRModule({"main": main}), ((0,), ()), ((1, 2), ()), sizes=sizes)
    found = {
        name.name_hint: known_sizes(fused[name])
        for name in fused.get_global_vars()
        if isinstance(fused[name], tirx.PrimFunc)
    }
    ((bounds,),) = (sizes.values() for sizes in found.values() if sizes)
    assert bounds == Bounds(8, 128, 8)
    assert len(found) == 2


def test_calls_of_one_prim_func_have_the_bounds_of_all():
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")

    def twice(bb, x, y):
        return bb.emit(op.exp(x)), bb.emit(op.exp(y))

    mod = module(twice, ((n, 8), "float32"), ((m, 8), "float32"))
    main = mod["main"].with_attr(UPPER_BOUNDS_ATTR, {"n": 128, "m": 100})
    sizes = {"n": 16, "m": 3}
    fused = check(tvm.IRModule({"main": main}), ((0,), ()), ((1,), ()), sizes=sizes)
    (func,) = prim_funcs(fused)
    assert [*known_sizes(func).values()] == [Bounds(0, 128)]
