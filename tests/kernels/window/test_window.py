"""Windows that share what they look at: numbers on the emulator, plans, refusals."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.ir.access import Reduction
from tvm_fusion.kernels.window.config import (
    WindowConfig,
    is_straight,
    pieces_of,
    ranked,
    rows_of,
    traffic_of,
)
from tvm_fusion.kernels.window.kernel import emit_windows, work_of
from tvm_fusion.kernels.window.problem import read_windows
from tvm_fusion.kernels.window.sliding import Sliding, paired, window_of
from tvm_fusion.kernels.window.versions import WRITER

from ...support.cuda_on_cpu import cuda_source, run_cuda_on_cpu
from ...support.graphs import module, plan_of
from ...support.kernel_cases import assert_close, fuse, outputs_of

H200 = load_profile("nvidia_h200")
MAX = {1: op.nn.max_pool1d, 2: op.nn.max_pool2d, 3: op.nn.max_pool3d}
MEAN = {1: op.nn.avg_pool1d, 2: op.nn.avg_pool2d, 3: op.nn.avg_pool3d}


def check(emit, expected, shapes, dtype, config):
    """A configuration beside float64; outputs are NaN before."""
    func = fuse(emit, *((shape, dtype) for shape in shapes))
    rng = np.random.default_rng(sum(shapes[0]))
    results = outputs_of(func, len(shapes))
    given = [rng.standard_normal(shape).astype(results[0].dtype) for shape in shapes]
    results[0][...] = np.nan
    run_cuda_on_cpu(emit_windows(read_windows(func), H200, config), [*given, *results])
    wanted = expected(*(torch.from_numpy(x.astype(np.float64)) for x in given))
    assert_close(results[0], wanted.numpy(), dtype)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("shape", "taps", "stride", "padding", "dilation", "dtype", "config"),
    [
        ((2, 2, 16, 32), (3, 3), (2, 2), (1, 1), (1, 1), "float16", WindowConfig(128, 8, 2)),
        ((1, 3, 15, 13), (3, 3), (1, 1), (1, 1), (1, 1), "float32", WindowConfig(128, 4, 4)),
        ((2, 1, 14, 24), (5, 11), (1, 1), (2, 5), (1, 1), "bfloat16", WindowConfig(128, 8, 1)),
        ((1, 2, 9, 40), (2, 3), (2, 3), (0, 1), (2, 2), "float16", WindowConfig(128, 2, 1)),
        ((2, 2, 70), (9,), (4,), (4,), (1,), "float32", WindowConfig(256, 4, 1)),
        ((1, 2, 6, 9, 16), (3, 2, 4), (1, 2, 2), (1, 0, 2), (1, 1, 1), "float16", None),
    ],
)
def test_largest_of_windows(shape, taps, stride, padding, dilation, dtype, config):
    dims = len(taps)

    def emit(bb, x):
        x = bb.emit(op.negative(x))
        y = bb.emit(MAX[dims](x, taps, stride, padding, dilation=dilation))
        return op.tanh(y)

    pool = getattr(F, f"max_pool{dims}d")
    check(
        emit,
        lambda x: pool(-x, taps, stride, padding, dilation).tanh(),
        [shape],
        dtype,
        config,
    )


@pytest.mark.parametrize(
    ("shape", "taps", "padding", "whole", "config"),
    [
        ((2, 2, 12, 20), (3, 3), (1, 1), False, WindowConfig(128, 2, 2)),
        ((1, 2, 40, 48), (24, 24), (12, 12), True, WindowConfig(128, 1, 1)),  # in loops
    ],
)
def test_means_of_windows_between_other_work(shape, taps, padding, whole, config):
    """An activation of each place, once, and another input at the results."""
    sides = zip(shape[2:], padding, taps, strict=True)
    out = (*shape[:2], *((n + 2 * p - k) // 2 + 1 for n, p, k in sides))

    def emit(bb, x, y):
        x = bb.emit(op.nn.relu(x))
        mean = MEAN[2](x, taps, (2, 2), padding, count_include_pad=whole)
        return op.add(bb.emit(mean), y)

    def expected(x, y):
        return F.avg_pool2d(x.relu(), taps, 2, padding, count_include_pad=whole) + y

    check(emit, expected, [shape, out], "float32", config)


def test_nan_in_a_window_is_its_largest():
    func = fuse(
        lambda bb, x: op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1)), ((1, 1, 8, 8), "float32")
    )
    x = np.random.default_rng(0).standard_normal((1, 1, 8, 8)).astype("float32")
    x[0, 0, 3, 3] = np.nan
    results = outputs_of(func, 1)
    run_cuda_on_cpu(emit_windows(read_windows(func), H200), [x, *results])
    wanted = F.max_pool2d(torch.from_numpy(x), 3, 2, 1).numpy()
    np.testing.assert_array_equal(results[0], wanted)


def test_a_thread_loads_what_its_results_share_once():
    func = fuse(
        lambda bb, x: op.nn.max_pool2d(x, (3, 3), (1, 1), (1, 1)), ((8, 64, 56, 56), "float16")
    )
    problem = read_windows(func)
    config = WindowConfig(128, 8, 2)
    assert (rows_of(problem.axes, config), len(problem.axes[-1].needed(8))) == (4, 10)
    source = cuda_source(emit_windows(problem, H200, config))
    body = source[source.rindex("void __launch_bounds__") :]
    assert body.count("load16_nc(") == 4  # of each row a vector and the two at its ends
    assert body.count("load2_nc(") == 8


def test_runs_are_cut_where_memory_is_aligned():
    assert pieces_of(range(17), -1, 8) == [(0, 1), (1, 8), (9, 8)]
    assert pieces_of(range(18), -5, 8) == [(0, 1), (1, 4), (5, 8), (13, 4), (17, 1)]
    assert pieces_of([0, 4, 8], 0, 4) == [(0, 1), (4, 1), (8, 1)]  # one of each vector is needed


def test_large_windows_are_loops():
    func = fuse(lambda bb, x: op.nn.max_pool2d(x, (32, 32), (1, 1)), ((1, 1, 64, 64), "float16"))
    problem = read_windows(func)
    assert not is_straight(problem.axes, WindowConfig(128, 4, 1))
    assert len(cuda_source(emit_windows(problem, H200, WindowConfig(128, 4, 1)))) < 40_000


@pytest.mark.parametrize(
    ("emit", "shapes"),
    [
        (lambda bb, x: op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1)), [(32, 64, 112, 112)]),
        (
            lambda bb, x, y: op.add(bb.emit(op.nn.avg_pool2d(x, (2, 2), (2, 2))), y),
            [(32, 64, 112, 112), (32, 64, 56, 56)],
        ),
        (lambda bb, x: op.nn.max_pool2d(x, (11, 11), (1, 1), (5, 5)), [(8, 64, 56, 56)]),
    ],
)
def test_pools_with_work_around_them_are_windows(emit, shapes):
    (group,) = plan_of(module(emit, *((s, "float16") for s in shapes))).plan.groups
    assert group.kernel_class == "window"


def test_work_in_front_of_overlapping_windows_is_charged_by_place():
    def emit(bb, x):
        return op.nn.max_pool2d(bb.emit(op.exp(x)), (5, 5), (1, 1), (2, 2))

    (group,) = plan_of(module(emit, ((8, 64, 56, 56), "float16"))).plan.groups
    (alone,) = plan_of(module(lambda bb, x: op.exp(x), ((8, 64, 56, 56), "float16"))).plan.groups
    ratio = dict(group.terms)["special"] / dict(alone.terms)["special"]
    assert 2 < ratio < 15  # 25 terms a result


@pytest.mark.parametrize("taps", [(12, 12), (3, 3)])
def test_the_best_configuration_takes_no_longer_than_others(taps):
    pool = fuse(lambda bb, x: op.nn.max_pool2d(x, taps, (1, 1)), ((8, 64, 64, 64), "float16"))
    found = ranked(work_of(read_windows(pool)), H200)
    assert found[0][0] == min(seconds for seconds, _ in found)
    assert len({config for _, config in found}) == len(found) > 4


def test_traffic_counts_each_place_once_for_a_thread():
    work = work_of(
        read_windows(
            fuse(lambda bb, x: op.nn.max_pool2d(x, (5, 5), (1, 1)), ((8, 64, 64, 64), "float16"))
        )
    )
    one, many = (traffic_of(work, WindowConfig(128, *cut), H200) for cut in ((1, 1), (4, 4)))
    assert many.wavefronts < one.wavefronts / 2
    assert many.operations["arithmetic"] < one.operations["arithmetic"] / 2


def refused(emit, *shapes):
    func = fuse(emit, *((shape, "float16") for shape in shapes))
    with pytest.raises(Unsupported) as found:
        read_windows(func)
    return str(found.value)


def test_what_is_no_window_is_refused():
    assert "no windows that slide" in refused(lambda bb, x: op.sum(x, axis=-1), (64, 4))
    twice = refused(
        lambda bb, x: op.nn.max_pool2d(
            bb.emit(op.nn.max_pool2d(x, (3, 3), (1, 1))), (3, 3), (1, 1)
        ),
        (1, 1, 16, 16),
    )
    assert "2 reductions" in twice
    turned = refused(
        lambda bb, x: op.flip(bb.emit(op.nn.max_pool2d(x, (3, 3), (1, 1))), axis=3), (1, 1, 9, 9)
    )
    assert "read at another point" in turned


def test_a_configuration_that_does_not_suit_is_refused():
    func = fuse(
        lambda bb, x, y: op.add(bb.emit(op.nn.max_pool2d(x, (3, 3), (1, 1))), y),
        ((1, 1, 9, 9), "float16"),
        ((1, 1, 7, 7), "float16"),
    )
    for config in (WindowConfig(128, 8, 1), WindowConfig(128, 1, 8), WindowConfig(2048, 1, 1)):
        with pytest.raises(Unsupported, match="WindowConfig"):
            WRITER.emit(read_windows(func), H200, load_policy(None), config)


@pytest.mark.parametrize(
    ("forms", "wanted"),
    [
        ([(0, 2, 1)], {1: (2, 2, 1)}),
        ([(0, 2, 1), (0, 2, 1)], {1: (2, 2, 1)}),
        ([(0, 2, 1), (0, 1, 1)], None),  # other steps in another place
        ([(0, 2, 1), (0, 1, 0)], None),  # the axis alone, too: weights by the result
        ([(1, 1, 1)], None),
        ([(0, 0, 1)], None),
        ([(0, -1, 1)], None),
        ([None], None),
    ],
)
def test_taps_stand_beside_one_axis(forms, wanted):
    touched = [
        frozenset((1, 2)) if f is None else frozenset(n for n, step in enumerate(f) if step)
        for f in forms
    ]
    assert paired([0, 1], [2], forms, touched) == wanted


def test_the_planner_sees_the_axes_that_the_writer_does():
    def emit(bb, x):
        return op.nn.max_pool2d(x, (3, 5), (2, 1), (1, 2), dilation=(1, 2))

    shape = ((2, 3, 17, 19), "float16")
    graph = plan_of(module(emit, shape)).graph
    blocks = [b for o in graph.ops for b in o.blocks if b.reduction is Reduction.MAX]
    axes = read_windows(fuse(emit, shape)).axes
    assert window_of(blocks[0]) == axes
    assert axes[2:] == (Sliding(9, 3, 2, 1), Sliding(15, 5, 1, 2))
    assert math.prod(axis.taps for axis in axes) == 15
