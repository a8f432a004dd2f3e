"""Windows (pooling) in pointwise kernels: numbers on the emulator, and what is refused."""

import numpy as np
import pytest
from tvm.relax import op

from tvm_fusion.config import load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.gpu.vectors import combs
from tvm_fusion.kernels.pointwise.kernel import emit_pointwise, pointwise_configs
from tvm_fusion.kernels.program.analysis import analyze

from ..support.cuda_on_cpu import run_cuda_on_cpu
from ..support.kernel_cases import assert_close, fuse, outputs_of

H200 = load_profile("nvidia_h200")


def windows(x, size, stride, padding, fill):
    """[N, C, H, W] -> [N, C, H', W', size * size]: what each output looks at."""
    edge = [(0, 0), (0, 0), (padding, padding), (padding, padding)]
    x = np.pad(x.astype(np.float64), edge, constant_values=fill)
    view = np.lib.stride_tricks.sliding_window_view(x, (size, size), (2, 3))
    return view[:, :, ::stride, ::stride].reshape(*view[:, :, ::stride, ::stride].shape[:4], -1)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("side", "size", "stride", "padding"),
    [(16, 2, 2, 0), (15, 3, 1, 1), (17, 3, 2, 1), (9, 5, 4, 2)],
)
def test_max_pool_and_add_is_one_kernel_with_right_numbers(side, size, stride, padding, dtype):
    out = (side + 2 * padding - size) // stride + 1

    def emit(bb, x, y):
        pooled = op.nn.max_pool2d(x, (size, size), (stride, stride), (padding, padding))
        return op.add(bb.emit(pooled), y)

    func = fuse(emit, ((2, 3, side, side), dtype), ((2, 3, out, out), dtype))
    rng = np.random.default_rng(1)
    results = outputs_of(func, 2)
    kind = results[0].dtype
    x, y = (rng.standard_normal(s).astype(kind) for s in ((2, 3, side, side), (2, 3, out, out)))
    run_cuda_on_cpu(emit_pointwise(analyze(func), H200), [x, y, *results])
    expected = windows(x, size, stride, padding, -np.inf).max(-1) + y.astype(np.float64)
    assert_close(results[0], expected, dtype)


@pytest.mark.parametrize("include", [True, False])
def test_average_pool_with_an_activation_before_and_after_is_right(include):
    def emit(bb, x):
        x = bb.emit(op.nn.relu(x))
        pooled = op.nn.avg_pool2d(x, (3, 3), (2, 2), (1, 1), count_include_pad=include)
        return op.exp(bb.emit(pooled))

    func = fuse(emit, ((1, 5, 12, 12), "float32"))
    x = np.random.default_rng(2).standard_normal((1, 5, 12, 12)).astype("float32")
    results = outputs_of(func, 1)
    run_cuda_on_cpu(emit_pointwise(analyze(func), H200), [x, *results])
    total = windows(np.maximum(x, 0), 3, 2, 1, 0).sum(-1)
    count = 9 if include else windows(np.ones_like(x), 3, 2, 1, 0).sum(-1)
    assert_close(results[0], np.exp(total / count), "float32")


def pool_add(bb, x, y):
    return op.add(bb.emit(op.nn.max_pool2d(x, (2, 2), (2, 2))), y)


def test_large_windows_are_not_unrolled():
    func = fuse(lambda bb, x: op.nn.max_pool2d(x, (16, 16), (16, 16)), ((1, 2, 32, 32), "float32"))
    program = analyze(func)
    assert program.phases == 1
    with pytest.raises(Unsupported, match="reduces"):
        emit_pointwise(program, H200)


def test_short_rows_stay_rows():
    func = fuse(lambda bb, x: op.sum(x, axis=-1), ((64, 4), "float32"))
    assert analyze(func).phases == 1


def test_a_window_without_gaps_is_read_in_whole_runs():
    func = fuse(pool_add, ((2, 3, 16, 32), "float16"), ((2, 3, 8, 16), "float16"))
    found = combs(analyze(func), 8)
    assert [(comb.stride, sorted(comb.teeth.values()), comb.piece) for comb in found] == [
        (2, [0, 1], 16),
        (2, [0, 1], 16),
    ]


def test_runs_with_gaps_are_left_to_single_loads():
    func = fuse(
        lambda bb, x: op.exp(bb.emit(op.strided_slice(x, [1], [0], [32], [2]))),
        ((4, 32), "float16"),
    )
    assert combs(analyze(func), 8) == ()


def test_wide_vectors_come_first_where_windows_are_whole_runs():
    func = fuse(pool_add, ((32, 64, 112, 112), "float16"), ((32, 64, 56, 56), "float16"))
    assert pointwise_configs(analyze(func), H200)[0].width == 8


def test_narrow_vectors_come_first_where_lanes_step_over_memory():
    func = fuse(
        lambda bb, x: op.exp(bb.emit(op.strided_slice(x, [2], [0], [4096], [2]))),
        ((64, 256, 4096), "float16"),
    )
    assert pointwise_configs(analyze(func), H200)[0].width < 8
