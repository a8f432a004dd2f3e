"""Epilogues that read in place, where a tile reaches beyond the matrix: the emulator stops at each
access outside a tensor, so that a row or a column that does not exist must not be read.
"""

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_profile
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.hopper.kernel import emit_gemm_hopper
from tvm_fusion.kernels.gemm.mma.kernel import emit_gemm_mma
from tvm_fusion.kernels.gemm.simt.kernel import emit_gemm_simt
from tvm_fusion.kernels.gemm.skinny.kernel import emit_gemm_skinny

from ...support import gemm_cases as graphs
from ...support.cuda_on_cpu import run_cuda_on_cpu
from ...support.gemm_cases import HALF
from ...support.hopper_on_cpu import run_hopper_on_cpu
from ...support.kernel_cases import TOLERANCE, Case, outputs_of

H200, A100 = load_profile("nvidia_h200"), load_profile("nvidia_a100")
TABLE = 7  # rows and columns of what is gathered from

WRITERS = {
    "mma": (emit_gemm_mma, A100, run_cuda_on_cpu),
    "simt": (emit_gemm_simt, A100, run_cuda_on_cpu),
    "skinny": (emit_gemm_skinny, A100, run_cuda_on_cpu),
    "hopper": (emit_gemm_hopper, H200, run_hopper_on_cpu),
}


def gathered_rows(bb, x, w, table, ids):
    rows = bb.emit(op.take(table, ids, axis=0, mode="clip"))
    return op.add(graphs.matmul(bb, x, w), rows)


def gathered_columns(bb, x, w, table, ids):
    columns = bb.emit(op.take(table, ids, axis=1, mode="clip"))
    return op.add(graphs.matmul(bb, x, w), columns)


def padded(bb, x, w, y):
    """The residual has fewer rows and columns: what it lacks is zero, and is not read."""
    return op.add(graphs.matmul(bb, x, w), bb.emit(op.nn.pad(y, [0, 3, 0, 5])))


def masked(bb, x, w, mask):
    """A mask is widened to an integer before it is a number."""
    count = bb.emit(op.add(bb.emit(op.astype(mask, "int32")), relax.const(1, "int32")))
    return op.multiply(graphs.matmul(bb, x, w), bb.emit(op.astype(count, HALF)))


def cases(m: int, k: int, n: int) -> list[Case]:
    x, w = (m, k), (k, n)

    def made(name, emit, shapes, dtypes, reference, ids=None):
        inputs = tuple(zip(shapes, (HALF, HALF, *dtypes), strict=True))
        make = {3: lambda rng: rng.integers(0, TABLE, ids)} if ids else {}
        return Case(name, emit, inputs, reference, make)

    return [
        made(
            "rows",
            gathered_rows,
            [x, w, (TABLE, n), (m,)],
            [HALF, "int64"],
            lambda x, w, t, i: [x @ w + t[i]],
            m,
        ),
        made(
            "columns",
            gathered_columns,
            [x, w, (m, TABLE), (n,)],
            [HALF, "int64"],
            lambda x, w, t, i: [x @ w + t[:, i]],
            n,
        ),
        made(
            "padded",
            padded,
            [x, w, (m - 3, n - 5)],
            [HALF],
            lambda x, w, y: [x @ w + np.pad(y, ((0, 3), (0, 5)))],
        ),
        made("masked", masked, [x, w, x[:1] + w[1:]], ["bool"], lambda x, w, b: [x @ w * (b + 1)]),
    ]


def assert_right(found: Case, writer: str) -> None:
    emit, hw, run = WRITERS[writer]
    func = found.func()
    inputs = found.arrays()
    outputs = outputs_of(func, len(inputs))
    run(emit(analyze_contraction(func), hw), [*inputs, *outputs])
    (got,), (expected,) = outputs, found.expected(inputs)
    error = np.abs(got.astype(np.float64) - expected).max() / np.abs(expected).max()
    assert error <= TOLERANCE[HALF]


KINDS = range(len(cases(9, 8, 8)))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("number", KINDS, ids=[c.name for c in cases(9, 8, 8)])
@pytest.mark.parametrize("writer", ["mma", "simt", "hopper"])
def test_rows_and_columns_beyond_the_matrix_are_not_read(writer, number):
    assert_right(cases(100, 64, 72)[number], writer)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", KINDS, ids=[c.name for c in cases(9, 8, 8)])
def test_the_product_of_few_rows_reads_none_that_do_not_exist(number):
    assert_right(cases(5, 128, 72)[number], "skinny")


SIZES = [(1, 8, 8), (17, 40, 24), (65, 72, 136), (100, 512, 256), (129, 64, 8), (130, 24, 264)]


@pytest.mark.nightly
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("writer", ["mma", "simt", "hopper"])
@pytest.mark.parametrize("number", KINDS, ids=[c.name for c in cases(9, 8, 8)])
def test_no_size_is_read_beyond(number, writer, size):
    m, k, n = size
    assert_right(cases(m + 3, k, n)[number] if number == 2 else cases(m, k, n)[number], writer)
