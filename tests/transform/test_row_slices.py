"""Pieces of a packed tensor that products read become slices; other splits stay."""

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.flow.planned import Planned
from tvm_fusion.transform.rewrites.row_slices import RowSlices

from ..support import grouped_cases as graphs
from ..support.decompose_tools import operators
from ..support.graphs import module
from ..support.helpers_tir import quick_executable

HALF = "float16"
H200 = load_profile("nvidia_h200")
TOKENS = (24, 8, 40)
MANY_TOKENS = (600, 300, 900, 100, 700, 496, 500, 500)


def experts(tokens, hidden, inner, dtype=HALF):
    weights = [s for _ in tokens for s in ((inner, hidden), (inner, hidden), (hidden, inner))]
    shapes = [(sum(tokens), hidden), *weights]
    return module(graphs.packed_mixture(tokens), *((s, dtype) for s in shapes))


def run(mod, *arrays):
    executable = quick_executable(mod)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()


def test_the_rows_of_each_expert_are_a_slice_and_the_numbers_stay():
    mod = experts(TOKENS, 16, 8, "float32")
    sliced = RowSlices()(mod)
    assert relax.analysis.check_well_formed(sliced)
    found = operators(sliced)
    assert (found.count("strided_slice"), found.count("split")) == (3, 0)
    assert RowSlices()(sliced).same_as(sliced)
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal([int(n) for n in p.ty.shape]).astype("float32")
        for p in mod["main"].params
    ]
    np.testing.assert_array_equal(run(sliced, *arrays), run(mod, *arrays))


def columns(bb, x, w):
    return bb.emit(op.matmul(bb.emit(bb.emit(op.split(x, 2, 1))[1]), w))


def rows(bb, x, w):
    return bb.emit(op.matmul(bb.emit(bb.emit(op.split(x, 2, 0))[1]), w))


def right_operands(bb, x, w):
    return bb.emit(op.matmul(x, bb.emit(bb.emit(op.split(w, 2, 0))[0])))


def no_products(bb, x, w):
    parts = bb.emit(op.split(x, 2, 0))
    return bb.emit(op.add(bb.emit(parts[0]), bb.emit(parts[1])))


LEFT_ALONE = {
    "columns": (columns, (8, 16), (8, 8)),
    "right operands": (right_operands, (8, 16), (32, 8)),
    "no products": (no_products, (8, 16), (1,)),
    "a symbolic size": (rows, (tirx.Var("n", "int64") * 2, 16), (16, 8)),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_leaves_alone(name):
    emit, *shapes = LEFT_ALONE[name]
    mod = module(emit, *((s, HALF) for s in shapes))
    assert RowSlices()(mod).same_as(mod)


# Always: the rows of each expert are a slice.
@pytest.mark.nightly
def test_experts_of_packed_tokens_read_them_in_place():
    mod = experts(MANY_TOKENS, 2048, 1024)
    planned = Planned.of(mod, H200.to_target(), H200, load_policy())
    assert len(planned.plan.groups) == 3
    # All that is no product is the concatenation of the results.
    assert sorted({g.kernel_class for g in planned.plan.groups}) == ["gemm", "pointwise"]
    assert not planned.write().planned.cuts
