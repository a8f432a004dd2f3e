"""Reductions over few leading rows: blocks that are no whole warps, and walkers of every number."""

import numpy as np
import pytest
from tvm.relax import op

from tvm_fusion.config import load_profile
from tvm_fusion.kernels.column.config import Form
from tvm_fusion.kernels.column.kernel import ColumnConfig, emit_column
from tvm_fusion.kernels.column.rank import column_configs
from tvm_fusion.kernels.program.analysis import analyze

from ...support.cuda_on_cpu import run_cuda_on_cpu, without_each_barrier
from ...support.kernel_cases import Case, assert_close, fuse, outputs_of
from ...support.kernel_checks import is_race

H200 = load_profile("nvidia_h200")
FLOAT = "float32"


def sum_over(*axes):
    return lambda bb, x: op.sum(x, axis=list(axes)), lambda x: x.sum(axes)


def max_over(*axes):
    return lambda bb, x: op.max(x, axis=list(axes)), lambda x: x.max(axes)


def softmax_over(axis):
    def reference(x):
        e = np.exp(x - x.max(axis, keepdims=True))
        return e / e.sum(axis, keepdims=True)

    return lambda bb, x: op.nn.softmax(x, axis=axis), reference


def assert_right(operator, shape, config=None):
    """Runs a column kernel, by default that of the best guess, beside float64."""
    emit, reference = operator
    func = fuse(emit, (shape, FLOAT))
    program = analyze(func)
    kernel = emit_column(program, config or column_configs(program, H200)[0], H200)
    x = np.random.default_rng(3).standard_normal(shape).astype(FLOAT)
    (y,) = outputs_of(func, 1)
    run_cuda_on_cpu(kernel, [x, y])
    assert_close(y, reference(x.astype("f8")), FLOAT)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("size", [2, 3, 5, 7, 9, 12, 15, 16, 17, 31, 33])
def test_few_rows_of_few_columns_are_reduced_by_their_best_guess(size):
    assert_right(softmax_over(0), (size, size))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("rows", [3, 5, 6, 7, 10, 63, 65])
def test_few_rows_are_summed_by_their_best_guess(rows):
    assert_right(sum_over(0), (rows, 4, 5))


@pytest.mark.parametrize(
    ("axes", "shape"),
    [((0,), (5, 4, 5)), ((0, 1), (3, 3, 7)), ((0, 1), (5, 1, 9)), ((1,), (2, 7, 7))],
    ids=str,
)
def test_maxima_over_leading_and_middle_axes_are_right(axes, shape):
    assert_right(max_over(*axes), shape)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("lanes", "walkers"),
    [
        (1, 31),
        (2, 17),
        (3, 32),
        (8, 1),
        (8, 4),
        (8, 7),
        (16, 3),
        (16, 8),
        (31, 4),
        (32, 9),
        (33, 3),
    ],
)
def test_walkers_meet_whatever_their_number(lanes, walkers):
    assert_right(sum_over(0), (19, 35), ColumnConfig(Form.LOOP, lanes, walkers, 1, 2))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize(("lanes", "walkers"), [(1, 33), (4, 9), (8, 5), (16, 3)])
def test_maxima_and_their_sums_meet_in_blocks_that_are_no_whole_warps(form, lanes, walkers):
    assert_right(softmax_over(0), (37, 21), ColumnConfig(form, lanes, walkers, 1, 2))


def test_only_whole_and_equal_warps_shuffle():
    def by_shuffle(lanes, walkers):
        return ColumnConfig(lanes=lanes, walkers=walkers).by_shuffle

    assert [by_shuffle(8, walkers) for walkers in (1, 3, 4, 5, 8)] == [1, 1, 4, 1, 4]
    assert [by_shuffle(lanes, 32) for lanes in (1, 3, 16, 32, 64)] == [32, 1, 2, 1, 1]


IN_ANY_ORDER = {
    "lanes": (sum_over(0), (37, 128), ColumnConfig(Form.LOOP, 64, 3, 2, 2)),
    "shuffled_walkers": (sum_over(0), (37, 64), ColumnConfig(Form.LOOP, 8, 16, 8, 2)),
    "maxima_and_their_sums": (softmax_over(0), (37, 64), ColumnConfig(Form.LOOP, 32, 4, 2, 2)),
    "phases": (softmax_over(0), (37, 64), ColumnConfig(Form.REGISTERS, 32, 4, 2, 2)),
    "rows_of_several_lanes": (sum_over(0, 2), (37, 5, 9), ColumnConfig(Form.LOOP, 45, 4, 1, 2)),
    "along_columns": (sum_over(0, 2), (37, 5, 64), ColumnConfig(Form.LOOP, 0, 96, 4, 2)),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", IN_ANY_ORDER)
def test_warps_meet_in_any_order_and_need_each_barrier_for_that(name):
    (emit, reference), shape, config = IN_ANY_ORDER[name]
    case = Case(name, emit, ((shape, FLOAT),), lambda x: [reference(x)])
    func = case.func()
    kernel = emit_column(analyze(func), config, H200)
    assert not is_race(case, func, kernel)
    without = without_each_barrier(kernel)
    assert without
    assert all(is_race(case, func, mutant) for mutant in without)
