"""Weights stored as kernels load them: which, how, and that constant folding leaves them so."""

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.ir.graph import build_graph
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.hopper.kernel import emit_gemm_hopper
from tvm_fusion.plan.search.search import search
from tvm_fusion.transform.apply.materialize import materialize
from tvm_fusion.transform.pipeline import lower
from tvm_fusion.transform.rewrites.hidden_weights import BindWeights
from tvm_fusion.transform.rewrites.lean_weights import (
    LeanWeights,
    PackedWeights,
    Storage,
    padded,
    storage,
)

from ..support.graphs import module
from ..support.helpers_tir import quick_executable
from ..support.hopper_on_cpu import run_hopper_on_cpu

H200 = load_profile("nvidia_h200")
RNG = np.random.default_rng(12)


def weight(*shape, dtype="float16"):
    if dtype in ("int8", "uint8", "int32"):
        return relax.const(RNG.integers(0, 120, shape).astype(dtype), dtype)
    kinds = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "bfloat16": ml_dtypes.bfloat16}
    return relax.const(RNG.standard_normal(shape).astype(kinds.get(dtype, dtype)), dtype)


def product(held, transposed=False, left=False):
    def emit(bb, x):
        w = bb.emit(op.permute_dims(held)) if transposed else held
        return bb.emit(op.matmul(*((w, x) if left else (x, w)), out_dtype="float32"))

    return emit


def constants(mod):
    """Shapes and dtypes of the matrices that a module holds."""
    found = []
    relax.analysis.post_order_visit(
        mod["main"], lambda e: found.append(e) if isinstance(e, tvm.ir.Constant) else None
    )
    held = {c.value.data_ptr(): c.value for c in found if isinstance(c.value, tvm.runtime.Tensor)}
    return [(tuple(t.shape), str(t.dtype)) for t in held.values() if len(t.shape) > 1]


def lowered(mod, rewrites=("lean_weights",)):
    return lower(mod, H200.to_target(), hw=H200, rewrites=rewrites)


def run(mod, *arrays):
    executable = quick_executable(mod)
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](*map(tvm.runtime.tensor, arrays))
    many = not isinstance(result, tvm.runtime.Tensor)
    return [r.numpy() for r in result] if many else [result.numpy()]


# ---- how


@pytest.mark.parametrize(
    ("shape", "dtype", "flipped", "expected"),
    [
        ((72, 128), "float16", False, None),
        ((72, 72), "float16", True, None),  # lines would waste too much
        ((64, 1000), "float16", False, Storage(True)),
        ((1000, 1000), "float16", False, Storage(False, 24)),
        ((64, 1001), "float16", False, Storage(True)),
        ((1001, 64), "float16", True, Storage(False)),  # folding would make it [64, 1001]
        ((1001, 1003), "float16", False, Storage(False, 21)),
        ((1001, 1003), "float16", True, Storage(False, 21)),
        ((1003, 63), "float16", False, Storage(False, 1)),
        ((1001, 67), "float16", False, Storage(True, 23)),
        ((67, 69), "bfloat16", False, Storage(False, 3)),  # 128 bytes would waste too much
        ((64, 1001), "float32", False, None),
        ((64, 128), "float8_e4m3fn", False, Storage(True)),
        ((128, 64), "float8_e4m3fn", True, Storage(False)),
        ((1000, 128), "float8_e5m2", False, Storage(True, 24)),
        ((64, 1001), "int8", False, None),
    ],
)
def test_a_right_operand_is_stored_so(shape, dtype, flipped, expected):
    assert storage(shape, dtype, flipped, is_right=True) == expected


def test_a_left_operand_of_float8_is_contiguous_along_the_sum():
    assert storage((64, 128), "float8_e4m3fn", False, is_right=False) is None
    assert storage((128, 64), "float8_e4m3fn", True, is_right=False) is None  # folding does it
    assert storage((64, 120), "float8_e4m3fn", False, is_right=False) == Storage(False, 8)


def test_float32_follows_where_it_may_be_rounded_to_tf32():
    assert storage((64, 128), "float32", False, True, allow_tf32=True) == Storage(True)


@pytest.mark.parametrize(("rows", "expected"), [(1, Storage(True)), (2, Storage(True)), (4, None)])
def test_halves_of_one_or_two_rows_are_stored_along_the_sum(rows, expected):
    assert storage((64, 128), "float16", False, is_right=True, rows=rows) == expected
    kept = Storage(False) if expected else None
    assert storage((128, 64), "float16", True, is_right=True, rows=rows) == kept


@pytest.mark.parametrize(
    ("elements", "size", "expected"),
    [
        (1001, 2, 1024),
        (9, 2, 16),
        (65, 2, 72),
        (602, 2, 640),
        (577, 2, 584),
        (1009, 1, 1024),
    ],
)
def test_rows_are_padded_to_lines_where_that_costs_little(elements, size, expected):
    assert padded(elements, size) == expected


# ---- in modules


@pytest.mark.parametrize(
    ("held", "transposed", "stored"),
    [
        (weight(72, 129), False, ((129, 72), "float16")),
        (weight(129, 72), True, ((129, 72), "float16")),
        (weight(73, 129), False, ((73, 136), "float16")),
        (weight(129, 73), True, ((73, 136), "float16")),
        (weight(72, 128), False, ((72, 128), "float16")),
    ],
    ids=["transposed", "kept", "padded", "padded and transposed", "fine"],
)
def test_a_lowered_module_holds_the_stored_weight(held, transposed, stored):
    terms = held.value.shape[1 if transposed else 0]
    mod = module(product(held, transposed), ((5, terms), "float16"))
    low = lowered(mod)
    assert constants(low) == [stored]
    x = RNG.standard_normal((5, terms)).astype("float16")
    matrix = held.value.numpy().astype("float64")
    expected = x.astype("float64") @ (matrix.T if transposed else matrix)
    (got,) = run(low, x)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)


def test_batches_of_weights_and_left_operands_are_stored_too():
    mod = module(product(weight(3, 72, 65), left=True), ((3, 65, 8), "float16"))
    assert constants(lowered(mod)) == [((3, 65, 72), "float16")]


def test_a_weight_and_a_part_of_the_same_memory_are_stored_each():
    memory = torch.randn(200, 130, dtype=torch.float16)
    parts = [relax.const(tvm.runtime.from_dlpack(t)) for t in (memory, memory[:72])]

    def emit(bb, x, y):
        return [
            bb.emit(op.matmul(a, w, out_dtype="float32"))
            for a, w in zip((x, y), parts, strict=True)
        ]

    mod = module(emit, ((40, 200), "float16"), ((40, 72), "float16"))
    result = BindWeights()(LeanWeights(H200)(mod))
    assert relax.analysis.check_well_formed(result)
    arrays = [RNG.standard_normal((40, n)).astype("float16") for n in (200, 72)]
    for got, x in zip(run(result, *arrays), arrays, strict=True):
        wanted = x.astype("float64") @ memory[: x.shape[1]].double().numpy()
        assert np.abs(got - wanted).max() <= 1e-3 * np.abs(wanted).max()


def test_float8_weights_become_contiguous_along_the_sum():
    mod = module(product(weight(128, 64, dtype="float8_e4m3fn")), ((16, 128), "float8_e4m3fn"))
    assert constants(lowered(mod)) == [((64, 128), "float8_e4m3fn")]


def test_a_shared_weight_is_stored_once():
    held = weight(73, 129)

    def emit(bb, x, y):
        return [product(held)(bb, t) for t in (x, y)]

    hidden = LeanWeights(H200)(module(emit, ((5, 73), "float16"), ((9, 73), "float16")))
    assert len(hidden["main"].params) == 3
    tensors = BindWeights()(hidden)
    assert len(tensors["main"].params) == 2


@pytest.mark.parametrize(
    ("emit", "shape"),
    [
        (product(weight(72, 128)), (5, 72)),
        (product(weight(9, 7)), (5, 9)),
        (product(weight(5000, 1)), (5, 5000)),
        (lambda bb, x: op.matmul(x, bb.emit(op.permute_dims(x))), (65, 67)),
        (lambda bb, x: op.add(x, weight(65, 67)), (65, 67)),
    ],
    ids=["fine", "small", "vector", "no constant", "no product"],
)
def test_what_need_not_change_is_returned_as_it_is(emit, shape):
    mod = module(emit, (shape, "float16"))
    assert LeanWeights(H200)(mod).same_as(mod)
    assert PackedWeights(H200)(mod).same_as(mod)
    assert BindWeights()(mod).same_as(mod)


@pytest.mark.parametrize("rewrite", [LeanWeights, PackedWeights])
def test_a_cpu_keeps_what_it_has(rewrite):
    mod = module(product(weight(73, 129)), ((5, 73), "float16"))
    assert rewrite(load_profile("llvm"))(mod).same_as(mod)
    assert rewrite(None)(mod).same_as(mod)


# ---- stored integers


def dequantised(held, scale):
    def emit(bb, x):
        w = bb.emit(op.multiply(bb.emit(op.astype(held, "float16")), scale))
        return bb.emit(op.matmul(x, w, out_dtype="float32"))

    return emit


def unpacked(held):
    """Two 4-bit numbers a byte, side by side."""

    def emit(bb, x):
        low = bb.emit(op.bitwise_and(held, relax.const(15, "int32")))
        high = bb.emit(op.right_shift(held, relax.const(4, "int32")))
        both = bb.emit(op.concat([low, high], axis=1))
        return bb.emit(op.matmul(x, bb.emit(op.astype(both, "float16")), out_dtype="float32"))

    return emit


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e4m3fn"])
def test_weights_stored_in_bytes_stay_bytes(dtype):
    held = weight(72, 64, dtype=dtype)
    scale = weight(64)
    mod = module(dequantised(held, scale), ((5, 72), "float16"))
    assert constants(lowered(mod, ())) == [((72, 64), "float16")]
    low = lowered(mod, ("packed_weights",))
    assert constants(low) == [((72, 64), dtype)]
    x = RNG.standard_normal((5, 72)).astype("float16")
    matrix = held.value.numpy().astype("float64") * scale.value.numpy().astype("float64")
    (got,) = run(low, x)
    expected = x.astype("float64") @ matrix
    assert np.abs(got - expected).max() <= 2e-3 * np.abs(expected).max()


def test_integers_that_hold_several_weights_stay_whole():
    held = weight(72, 64, dtype="int32")
    mod = module(unpacked(held), ((5, 72), "float16"))
    assert constants(lowered(mod, ("packed_weights",))) == [((72, 64), "int32")]


def test_integers_that_are_moved_before_they_are_taken_apart_stay_whole():
    def emit(bb, x):
        words = bb.emit(op.reshape(weight(512, 9, dtype="int32"), (512, 9, 1)))
        shifts = relax.const(np.arange(0, 32, 4, dtype="int32"), "int32")
        parts = bb.emit(op.bitwise_and(bb.emit(op.right_shift(words, shifts)), fifteen))
        matrix = bb.emit(op.reshape(bb.emit(op.astype(parts, "float16")), (512, 72)))
        matrix = bb.emit(op.permute_dims(matrix, (1, 0)))
        return bb.emit(op.matmul(x, matrix, out_dtype="float32"))

    fifteen = relax.const(15, "int32")
    low = lowered(module(emit, ((5, 72), "float16")), ("packed_weights",))
    assert ((512, 9), "int32") in constants(low)
    assert all(dtype != "float16" for _, dtype in constants(low))


def test_bytes_that_no_product_reads_are_folded():
    def emit(bb, x):
        return op.add(x, bb.emit(op.astype(weight(72, 64, dtype="int8"), "float16")))

    mod = module(emit, ((72, 64), "float16"))
    assert PackedWeights(H200)(mod).same_as(mod)


def test_both_rewrites_and_folded_factors_go_together():
    held, odd = weight(72, 64, dtype="int8"), weight(64, 129)

    def emit(bb, x):
        h = bb.emit(op.astype(dequantised(held, weight(64))(bb, x), "float16"))
        return product(odd)(bb, h)

    mod = module(emit, ((5, 72), "float16"))
    low = lowered(mod, ("fold_factors", "lean_weights", "packed_weights"))
    assert set(constants(low)) == {((72, 64), "int8"), ((129, 64), "float16")}


# ---- kernels


@pytest.mark.parametrize(
    ("held", "dtype"),
    [
        (weight(72, 129), "float16"),
        (weight(128, 64, dtype="float8_e4m3fn"), "float8_e4m3fn"),
    ],
)
def test_tensor_cores_take_what_they_would_not_take_as_it_was(held, dtype):
    func = product_kernel(module(product(held), ((16, held.value.shape[0]), dtype)))
    (found,) = analyze_contraction(func).products
    assert found.a.load is not None
    assert found.b.load is not None
    assert emit_gemm_hopper(analyze_contraction(func), H200).attrs["tirx.is_scheduled"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("held", "transposed", "stored"),
    [
        (weight(41, 120), True, (41, 128)),
        (weight(120, 250), False, (120, 256)),
        (weight(120, 41), False, (41, 128)),
    ],
    ids=["terms padded", "columns padded", "transposed and padded"],
)
def test_a_tensor_core_kernel_reads_padded_rows(held, transposed, stored):
    func = product_kernel(module(product(held, transposed), ((70, 120), "float16")))
    kernel = emit_gemm_hopper(analyze_contraction(func), H200)
    matrix = held.value.numpy().T if transposed else held.value.numpy()
    shapes = [tuple(int(e) for e in p.ty.shape) for p in func.params]
    assert sorted(shapes) == sorted([(70, 120), stored, (70, matrix.shape[1])])
    x = RNG.standard_normal((70, 120)).astype("float16")
    rest = matrix.T if stored[1] == 128 else matrix
    rows = np.pad(rest, [(0, 0), (0, stored[1] - rest.shape[1])])
    given = {x.shape: x, stored: np.ascontiguousarray(rows)}
    arrays = [given.get(shape, np.full(shape, np.nan, "float32")) for shape in shapes]
    run_hopper_on_cpu(kernel, arrays)
    got = arrays[shapes.index((70, matrix.shape[1]))]
    expected = x.astype("float64") @ matrix.astype("float64")
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


def product_kernel(mod):
    """The PrimFunc of a module's only group, with its weight stored for tensor cores."""
    low = lowered(mod)
    graph = build_graph(low)
    made = materialize(low, graph, search(graph, H200, load_policy(None)))
    ((name, group),) = made.groups.items()
    assert group.kernel_class == "gemm"
    return made.mod[name]
