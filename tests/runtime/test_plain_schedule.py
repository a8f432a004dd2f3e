"""The GPU schedule of PrimFuncs that no rule takes: on the emulator, threads where the iterations
of a loop are proven not to meet, and one thread where they are not.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tvm
from tvm import relax
from tvm.relax import op
from tvm.script import tirx as T

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.flow.planned import Planned
from tvm_fusion.frontends import load
from tvm_fusion.runtime.build.build import build
from tvm_fusion.runtime.build.lowering import ScheduleLeftovers
from tvm_fusion.runtime.build.plain_schedule import (
    ONE_THREAD,
    OWN_THREADS,
    PER_ELEMENT,
    PLAIN_ATTR,
    plain_schedule,
)

from ..support.frontend_tools import Function
from ..support.helpers_tir import on_the_host
from ..support.runtime_cases import H200
from ..support.stock_cuda_on_cpu import run_launches_on_cpu


@T.prim_func(s_tir=True)
def ragged_sums(x: T.Buffer((7, 11), "float32"), y: T.Buffer((7,), "float32")):
    for i in range(7):
        with T.sblock("sum"):
            row = T.axis.spatial(7, i)
            y[row] = T.float32(0)
            for k in range(row + 1):
                y[row] = y[row] + x[row, k]


@T.prim_func(s_tir=True)
def running_sums(x: T.Buffer((7, 11), "float32"), y: T.Buffer((8, 11), "float32")):
    """Rows follow one another; columns do not meet."""
    for i, j in T.grid(7, 11):
        with T.sblock("scan"):
            row, column = T.axis.remap("SS", [i, j])
            y[row + 1, column] = y[row, column] + x[row, column]


@T.prim_func(s_tir=True)
def last_one_wins(
    at: T.Buffer((30,), "int64"), x: T.Buffer((30,), "float32"), y: T.Buffer((5,), "float32")
):
    """The order decides: places repeat."""
    for i in range(30):
        with T.sblock("write"):
            number = T.axis.spatial(30, i)
            y[at[number]] = x[number]


@T.prim_func(s_tir=True)
def transposed_in_place(y: T.Buffer((6, 6), "float32")):
    """Each element is written once, but read where another thread may have written."""
    for i, j in T.grid(6, 6):
        with T.sblock("turn"):
            row, column = T.axis.remap("SS", [i, j])
            y[row, column] = y[column, row] * T.float32(2)


@T.prim_func(s_tir=True)
def two_nests(x: T.Buffer((300,), "float32"), y: T.Buffer((300,), "float32")):
    between = T.sblock_alloc_buffer((300,))
    for i in range(300):
        with T.sblock("first"):
            place = T.axis.spatial(300, i)
            between[place] = x[299 - place] + T.float32(1)
    for i in range(300):
        with T.sblock("second"):
            place = T.axis.spatial(300, i)
            y[place] = between[299 - place] * T.float32(2)


def sums_in_flat_rows(step, length, pitch):
    """Running sums of rows whose elements lie `step` apart, groups of rows `pitch` apart."""

    @T.prim_func(s_tir=True)
    def sums(x: T.Buffer((210,), "float32"), y: T.Buffer((210,), "float32")):
        for row in range(30):
            with T.sblock("row"):
                r = T.axis.opaque(30, row)
                y[r // step * pitch + r % step] = x[r // step * pitch + r % step]
                for i in range(length - 1):
                    y[r // step * pitch + r % step + (i + 1) * step] = (
                        y[r // step * pitch + r % step + i * step]
                        + x[r // step * pitch + r % step + (i + 1) * step]
                    )

    return sums


def run(func, *arrays):
    """The arrays after a call of the scheduled function, and how it runs."""
    scheduled = plain_schedule(func)
    launches = run_launches_on_cpu(scheduled, arrays)
    return launches, scheduled.attrs[PLAIN_ATTR]


def test_what_is_summed_over_a_length_of_its_own_is_a_thread_a_result():
    x, y = np.random.default_rng(0).random((7, 11), "float32"), np.full(7, np.nan, "float32")
    assert run(ragged_sums, x, y) == (1, PER_ELEMENT)
    np.testing.assert_allclose(y, np.tril(x).sum(1), rtol=1e-6)


def test_a_loop_that_reads_what_it_wrote_before_stays_in_a_thread():
    x, y = np.random.default_rng(0).random((7, 11), "float32"), np.full((8, 11), 0, "float32")
    assert run(running_sums, x, y) == (1, PER_ELEMENT)
    np.testing.assert_allclose(y[1:], x.cumsum(0), rtol=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("step", "length", "pitch", "how"),
    [
        (5, 7, 35, PER_ELEMENT),
        (1, 7, 7, PER_ELEMENT),
        (30, 7, 210, PER_ELEMENT),
        (5, 7, 34, ONE_THREAD),  # the last of a group is the first of the next one
        (5, 7, 30, ONE_THREAD),
    ],
)
def test_rows_of_flat_tensors_are_told_apart_by_their_places(step, length, pitch, how):
    x, y = np.random.default_rng(0).random(210, "float32"), np.zeros(210, "float32")
    expected = np.zeros_like(y)
    for row in range(30):
        first = row // step * pitch + row % step
        at = first + np.arange(length) * step
        expected[at] = x[at].cumsum()
    assert run(sums_in_flat_rows(step, length, pitch), x, y) == (1, how)
    np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_places_that_are_data_are_written_in_order_by_one_thread():
    rng = np.random.default_rng(0)
    at, x, y = rng.integers(0, 5, 30), rng.random(30, "float32"), np.zeros(5, "float32")
    expected = y.copy()
    for place, value in zip(at, x, strict=True):
        expected[place] = value
    assert run(last_one_wins, at, x, y) == (1, ONE_THREAD)
    np.testing.assert_array_equal(y, expected)


def test_what_reads_the_places_of_other_iterations_is_one_thread():
    y = np.random.default_rng(0).random((6, 6), "float32")
    expected = y.copy()
    for i, j in np.ndindex(6, 6):
        expected[i, j] = expected[j, i] * 2
    assert run(transposed_in_place, y) == (1, ONE_THREAD)
    np.testing.assert_array_equal(y, expected)


def test_every_nest_is_a_kernel_of_its_own():
    x, y = np.random.default_rng(0).random(300, "float32"), np.full(300, np.nan, "float32")
    assert run(two_nests, x, y) == (2, PER_ELEMENT)
    np.testing.assert_array_equal(y, (x + 1) * 2)


def test_what_calls_the_host_has_no_plain_schedule():
    assert plain_schedule(on_the_host) is None


def test_a_scheduled_function_is_scheduled_once():
    once = ScheduleLeftovers(H200, ())(tvm.IRModule({"f": ragged_sums}))
    tvm.ir.assert_structural_equal(ScheduleLeftovers(H200, ())(once), once)


X = torch.randn(2, 3, 7, 11)
AT, VALUES = torch.tensor([[0, 6, 2], [1, 0, 5]]), torch.randn(2, 3)

PROGRAMS = {
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x, 4), (X[0],), PER_ELEMENT),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (3, 5)), (X,), PER_ELEMENT),
    "scatter": (lambda x, i, v: x.scatter(0, i, v), (torch.randn(7, 5), AT, VALUES), OWN_THREADS),
    "bucketize": (
        lambda limits, x: torch.bucketize(x, limits),
        (torch.arange(9.0), torch.randn(20) * 5),
        PER_ELEMENT,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_no_rule_takes_runs_and_is_named(name):
    function, inputs, how = PROGRAMS[name]
    mod = load(Function(function), inputs)
    written = Planned.of(mod, H200, load_profile("h200"), load_policy()).write().mod
    built = build(written, H200, compile_kernels=False)
    assert set(built.plain.values()) == {how}
    (symbol,) = built.plain
    func = written[symbol]
    arrays = [x.numpy().copy() for x in inputs]
    expected = function(*inputs).numpy()
    if name == "adaptive_avg_pool1d":
        arrays, expected = [a[:, :, None] for a in arrays], expected[:, :, None]
    result = np.full(expected.shape, -1, expected.dtype)
    run_launches_on_cpu(
        ScheduleLeftovers(H200)(tvm.IRModule({symbol: func}))[symbol], [*arrays, result]
    )
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


PLACES, OTHERS = np.array([1, 1, 6]), np.array([0, 0, 4])


def added(x: np.ndarray, places, values: np.ndarray) -> np.ndarray:
    """x with the values added at places that repeat."""
    result = x.copy()
    np.add.at(result, places, values)
    return result


REPEATED = {
    "index_put": (
        lambda x, i, j, v: op.index_put(x, relax.Tuple([i, j]), v, True),
        lambda x, v: [x, PLACES, OTHERS, v[:, 0]],
        lambda x, v: added(x, (PLACES, OTHERS), v[:, 0]),
        ONE_THREAD,
    ),
    "take_backward": (
        lambda g, x, i: op.grad.take_backward(g, x, i, 0),
        lambda x, v: [v, x, PLACES],
        lambda x, v: added(np.zeros_like(x), PLACES, v),
        ONE_THREAD,
    ),
    "scatter_elements": (
        lambda x, i, v: op.scatter_elements(x, i, v, 0, "add"),
        lambda x, v: [x, np.repeat(PLACES[:, None], 5, 1), v],
        lambda x, v: added(x, PLACES, v),
        OWN_THREADS,
    ),
}


@pytest.mark.parametrize("name", REPEATED)
def test_what_is_added_at_places_that_repeat_is_added_once(name):
    emit, inputs_of, reference, how = REPEATED[name]
    rng = np.random.default_rng(0)
    x, values = rng.random((7, 5), "float32"), rng.random((3, 5), "float32")
    inputs, expected = inputs_of(x, values), reference(x, values)
    builder = relax.BlockBuilder()
    params = [
        relax.Var(f"p{n}", relax.TensorType(a.shape, str(a.dtype))) for n, a in enumerate(inputs)
    ]
    with builder.function("main", params):
        builder.emit_func_output(builder.emit(emit(*params)))
    with H200:
        mod = ScheduleLeftovers(H200)(relax.transform.LegalizeOps()(builder.get()))
    (func,) = (f for f in mod.functions.values() if isinstance(f, tvm.tirx.PrimFunc))
    assert func.attrs[PLAIN_ATTR] == how
    result = np.full_like(expected, np.nan)
    run_launches_on_cpu(func, [*(a.copy() for a in inputs), result])
    np.testing.assert_allclose(result, expected, rtol=1e-6)
