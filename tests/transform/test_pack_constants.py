"""Constant weights in panels: which, how, and that modules with them compute the same."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax import op

import tvm_fusion
from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.flow.planned import Planned
from tvm_fusion.kernels.cpu.contraction.panels import PANELS_ATTR, Panels, mark_constants
from tvm_fusion.kernels.cpu.machine import machine_of
from tvm_fusion.kernels.cpu.write import write_cpu
from tvm_fusion.transform.apply.pack_constants import (
    PackConstants,
    constant_arguments,
    wanted_panels,
)
from tvm_fusion.transform.apply.write_kernels import write_kernels

from ..support.graphs import module
from ..support.helpers_tir import call, compile_cpu, poisoned
from ..support.kernel_cases import fuse

TARGET, HW = resolve_target("llvm")
LANES = machine_of(HW).lanes(4)
RNG = np.random.default_rng(3)


def weight(*shape, dtype="float32"):
    return relax.const(RNG.standard_normal(shape) / 8, dtype)


def linear(held, transposed=True):
    """A product with a constant, stored (out, in) or (in, out), and something behind it."""

    def emit(bb, x):
        w = bb.emit(op.permute_dims(held)) if transposed else held
        return op.nn.relu(bb.emit(op.matmul(x, w)))

    return emit


def job_of(mod):
    return Planned.of(mod, TARGET, HW, load_policy(None))


def run(mod, *arrays):
    compiled = tvm_fusion.compile(mod, "llvm", verify=True)
    assert compiled.report.verify.passed
    machine = relax.VirtualMachine(compiled.executable, tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()


def held_by(mod):
    """The constants with several axes that calls of `main` take, by memory."""
    found = {}

    def look(e):
        if isinstance(e, tvm.ir.Constant) and isinstance(e.value, tvm.runtime.Tensor):
            found[e.value.data_ptr()] = tuple(int(n) for n in e.value.shape)

    relax.analysis.post_order_visit(mod["main"], look)
    return sorted(shape for shape in found.values() if len(shape) > 1)


@pytest.mark.parametrize(
    ("shape", "panels"),
    [
        ((5, 37), Panels((), (0,), (1,), 16)),
        ((37, 5), Panels((), (1,), (0,), 16)),
        ((5, 32), Panels((), (0,), (1,), 16)),
        ((1, 5, 37), Panels((), (1,), (2,), 8)),
        ((3, 5, 37), Panels((0,), (1,), (2,), 4)),
        ((5, 3, 2, 7), Panels((1,), (0,), (3, 2), 4)),
        ((3, 2, 7, 5), Panels((), (3, 0), (1, 2), 16)),
    ],
)
def test_panels_hold_each_element_once_and_zeros_behind(shape, panels):
    constant = RNG.standard_normal(shape)
    packed = panels.of(constant)
    assert packed.shape == panels.shape(shape)
    assert packed.flags.c_contiguous
    terms, columns = ([shape[d] for d in dims] for dims in (panels.terms, panels.columns))
    for at in np.ndindex(*shape):
        k = np.ravel_multi_index([at[d] for d in panels.terms], terms)
        j = np.ravel_multi_index([at[d] for d in panels.columns], columns)
        batch = tuple(at[d] for d in panels.batch)
        assert packed[(*batch, j // panels.lanes, k, j % panels.lanes)] == constant[at]
    assert np.count_nonzero(packed) == constant.size


@pytest.mark.parametrize("shape", [(6, 37), (7, 37), (1, 16)])
def test_panels_of_pairs_hold_two_terms_in_a_number(shape):
    terms, columns = shape
    constant = RNG.standard_normal(shape).astype("bfloat16")
    panels = Panels((), (0,), (1,), 16, paired=True)
    packed = panels.of(constant)
    assert packed.shape == panels.shape(shape)
    assert str(packed.dtype) == panels.dtype("bfloat16")
    bits = packed.view("uint16").reshape(*packed.shape, 2).view("bfloat16")
    for k, j in np.ndindex(terms, columns):
        assert bits[j // 16, k // 2, j % 16, k % 2] == constant[k, j]
    assert np.count_nonzero(bits.astype("float32")) == constant.size


@pytest.mark.parametrize("paired", [False, True])
def test_panels_survive_being_an_attribute(paired):
    panels = Panels((1,), (0, 2), (4, 3), 16, paired)
    assert Panels.read(panels.numbers()) == panels


@pytest.mark.parametrize("transposed", [True, False])
def test_a_kernel_takes_panels_of_a_constant_weight(transposed):
    shape = (45, 70) if transposed else (70, 45)
    fused = job_of(module(linear(weight(*shape), transposed), ((33, 70), "float32"))).fuse()
    assert held_by(fused) == [(-(-45 // LANES), 70, LANES)]
    assert all(PANELS_ATTR not in (f.attrs or {}) for f in fused.functions.values())
    relax.analysis.well_formed(fused)


@pytest.mark.one_in(24)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 3, 37])
@pytest.mark.parametrize(("terms", "columns"), [(70, 45), (129, 16), (16, 17), (1100, 64)])
def test_products_with_panels_are_right(rows, terms, columns, dtype):
    held = weight(columns, terms, dtype=dtype)
    mod = module(linear(held), ((rows, terms), dtype))
    paired = dtype == "bfloat16" and machine_of(HW).dots_pairs
    panel = (-(-terms // 2) if paired else terms, LANES)
    assert held_by(job_of(mod).fuse()) == [(-(-columns // LANES), *panel)]
    x = RNG.standard_normal((rows, terms)).astype(held.value.numpy().dtype)
    expected = np.maximum(x.astype("float64") @ held.value.numpy().astype("float64").T, 0)
    got = run(mod, x).astype("float64")
    limit = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    assert np.abs(got - expected).max() <= limit * max(1, np.abs(expected).max())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(
    ("dtype", "between"),
    [("float32", "int8"), ("bfloat16", "int8"), ("float32", "bfloat16"), ("int8", "float16")],
)
def test_weights_that_are_converted_twice_keep_both_roundings(dtype, between, constant, exact):
    def emit(bb, x, w):
        w = bb.emit(op.astype(bb.emit(op.astype(w, between)), str(x.ty.dtype)))
        return op.matmul(x, w, out_dtype="float32")

    activations = "float32" if dtype == "int8" else dtype
    x = RNG.integers(-4, 5, (16, 64)).astype(activations)
    w = (RNG.standard_normal((64, 48)) * 5).astype(dtype)
    func = fuse(emit, (x.shape, activations), (w.shape, dtype))
    kernel = write_cpu(mark_constants(func, [1] if constant else []), exact, HW)
    held = {i: panels.of(w) for i, panels in wanted_panels(kernel).items()}
    (got,) = call(compile_cpu(kernel), [x, held.get(1, w)], [poisoned((16, 48), "float32")])
    rounds = exact or between == "int8"
    wide = (w.astype(between) if rounds else w).astype("float64")
    np.testing.assert_allclose(got, x.astype("float64") @ wide, rtol=1e-5, atol=1e-4)


def test_a_constant_on_the_left_of_a_vector_is_packed():
    held = weight(45, 70)
    mod = module(lambda bb, x: op.matmul(held, x), ((70,), "float32"))
    x = RNG.standard_normal(70).astype("float32")
    np.testing.assert_allclose(run(mod, x), held.value.numpy() @ x, rtol=1e-4, atol=1e-4)


def test_weights_of_a_batch_are_packed_one_by_one():
    held = weight(3, 40, 50)
    mod = module(lambda bb, x: op.matmul(x, held), ((3, 9, 40), "float32"))
    assert held_by(job_of(mod).fuse()) == [(3, -(-50 // LANES), 40, LANES)]
    x = RNG.standard_normal((3, 9, 40)).astype("float32")
    np.testing.assert_allclose(run(mod, x), x @ held.value.numpy(), rtol=1e-4, atol=1e-4)


def test_equal_layers_share_their_panels():
    held = weight(64, 64)

    def emit(bb, x):
        for _ in range(3):
            x = bb.emit(op.tanh(bb.emit(op.matmul(x, held))))
        return op.exp(x)

    assert len(held_by(job_of(module(emit, ((40, 64), "float32"))).fuse())) == 1


def test_a_constant_that_something_else_reads_stays_as_it_is():
    held = weight(40, 40)
    mod = module(lambda bb, x: op.add(bb.emit(op.matmul(x, held)), held), ((40, 40), "float32"))
    x = RNG.standard_normal((40, 40)).astype("float32")
    w = held.value.numpy()
    np.testing.assert_allclose(run(mod, x), x @ w + w, rtol=1e-4, atol=1e-4)


def test_weights_that_are_parameters_stay_parameters():
    mod = module(lambda bb, x, w: op.matmul(x, w), ((33, 70), "float32"), ((70, 45), "float32"))
    fused = job_of(mod).fuse()
    assert [tuple(map(int, p.ty.shape)) for p in fused["main"].params] == [(33, 70), (70, 45)]
    assert constant_arguments(fused) == {}


def written(mod):
    """A module with kernels that want panels, before they have them."""
    planned = job_of(mod)
    from tvm_fusion.transform.apply.materialize import materialize

    materialized = materialize(planned.low, planned.graph, planned.plan)
    classes = {name: g.kernel_class for name, g in materialized.groups.items()}
    constants = constant_arguments(materialized.mod)
    return write_kernels(materialized.mod, classes, HW, planned.policy, constants=constants).mod


def test_packing_leaves_its_input_alone_and_twice_is_once():
    mod = written(module(linear(weight(45, 70)), ((33, 70), "float32")))
    before = mod.script()
    once = PackConstants()(mod)
    assert mod.script() == before
    assert [wanted_panels(f) for f in mod.functions.values() if wanted_panels_in(f)]
    assert not [f for f in once.functions.values() if wanted_panels_in(f)]
    assert PackConstants()(once).same_as(once)
    assert tvm_ffi.structural_equal(once, PackConstants()(mod))


def wanted_panels_in(func):
    return isinstance(func, tvm.tirx.PrimFunc) and wanted_panels(func)


def test_a_module_without_weights_is_returned_as_it_is():
    mod = written(module(lambda bb, x: op.exp(x), ((33, 70), "float32")))
    assert PackConstants()(mod).same_as(mod)


def test_an_argument_is_a_constant_only_if_it_is_one_in_every_call():
    held = weight(64, 64)

    def emit(bb, x, w):
        y = bb.emit(op.tanh(bb.emit(op.matmul(x, held))))
        return op.tanh(bb.emit(op.matmul(y, w)))

    mod = module(emit, ((40, 64), "float32"), ((64, 64), "float32"))
    x, w = (RNG.standard_normal(s).astype("float32") for s in ((40, 64), (64, 64)))
    expected = np.tanh(np.tanh(x @ held.value.numpy()) @ w)
    np.testing.assert_allclose(run(mod, x, w), expected, rtol=1e-4, atol=1e-4)


def test_the_pipeline_and_saved_modules_hold_panels(tmp_path):
    held = weight(45, 70)
    mod = module(linear(held), ((33, 70), "float32"))
    x = RNG.standard_normal((33, 70)).astype("float32")
    expected = np.maximum(x @ held.value.numpy().T, 0)
    pipeline = tvm_fusion.transform.fusion_pipeline("llvm")
    executable = tvm.compile(mod, TARGET, relax_pipeline=pipeline, tir_pipeline="tvm_fusion")
    executable.export_library(str(tmp_path / "model.so"))
    loaded = tvm.runtime.load_module(str(tmp_path / "model.so"))
    for built in (executable, loaded):
        got = relax.VirtualMachine(built, tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
