"""Reductions over windows of a product's columns in its own kernel: pooling of rows, maxout."""

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.contraction.model import RowPartial
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm import time as gemm_time
from tvm_fusion.kernels.gemm.forms import WRITER
from tvm_fusion.kernels.gemm.hopper.kernel import hopper_ranked
from tvm_fusion.kernels.gemm.mma.kernel import emit_gemm_mma
from tvm_fusion.kernels.gemm.mma.rank import mma_ranked
from tvm_fusion.kernels.gemm.simt.kernel import simt_ranked
from tvm_fusion.kernels.gemm.time import mma_times

from ...support.cuda_on_cpu import run_cuda_on_cpu
from ...support.gemm_cases import HALF
from ...support.graphs import module, plan_of
from ...support.kernel_cases import fuse, numpy_dtype

A100, H200 = load_profile("nvidia_a100"), load_profile("nvidia_h200")
DEFAULT = load_policy()
TOLERANCE = {HALF: 1e-3, "bfloat16": 8e-3, "float32": 2e-6}


def linear(bb, x, w, b, straight):
    w = w if straight else bb.emit(op.permute_dims(w))
    h = bb.emit(op.matmul(x, w, out_dtype="float32"))
    h = h if b.ty.dtype == "float32" else bb.emit(op.astype(h, b.ty.dtype.dtype))
    return bb.emit(op.add(h, b))


def program(kind, shape, width, straight=False):
    rows, columns, _ = shape

    def emit(bb, x, w, b):
        h = linear(bb, x, w, b, straight)
        if kind == "mean":
            h = bb.emit(op.reshape(h, (1, rows, 1, columns)))
            h = bb.emit(op.nn.avg_pool2d(h, (1, width), (1, width)))
            return bb.emit(op.reshape(h, (rows, columns // width)))
        h = bb.emit(op.reshape(h, (rows, columns // width, width)))
        return bb.emit((op.max if kind == "max" else op.sum)(h, axis=[-1]))

    return emit


def inputs(shape, dtype, straight=False):
    m, n, k = shape
    return ((m, k), dtype), ((k, n) if straight else (n, k), dtype), ((n,), dtype)


def contraction_of(kind, shape, width, dtype=HALF, straight=False):
    func = fuse(program(kind, shape, width, straight), *inputs(shape, dtype, straight))
    return analyze_contraction(func)


REDUCE = {"mean": np.mean, "max": np.max, "sum": np.sum}


@pytest.mark.parametrize(
    ("kind", "shape", "width", "dtype", "straight"),
    [
        ("mean", (50, 77, 40), 7, HALF, False),
        ("max", (37, 150, 35), 3, "bfloat16", False),
        ("sum", (70, 260, 48), 2, "float32", False),
        ("max", (33, 130, 64), 5, HALF, True),
        ("mean", (20, 96, 32), 16, HALF, False),
        ("max", (1, 12, 16), 12, HALF, False),
    ],
    ids=str,
)
def test_windows_are_reduced_in_tiles_that_hold_them_whole(kind, shape, width, dtype, straight):
    contraction = contraction_of(kind, shape, width, dtype, straight)
    tiles = {}
    for _, config in mma_ranked(contraction, A100, DEFAULT):
        tiles.setdefault((config.block_n, config.tiles_m > 1), config)
    rng = np.random.default_rng(0)
    arrays = [
        rng.uniform(-1, 1, s).astype(numpy_dtype(d)) for s, d in inputs(shape, dtype, straight)
    ]
    x, w, b = (array.astype("float64") for array in arrays)
    rows, columns, _ = shape
    windows = (x @ (w if straight else w.T) + b).reshape(rows, columns // width, width)
    expected = REDUCE[kind](windows, axis=-1)
    assert tiles
    for config in list(tiles.values())[:3]:
        out = np.full(expected.shape, np.nan, numpy_dtype(dtype))
        run_cuda_on_cpu(emit_gemm_mma(contraction, A100, config), [*arrays, out])
        error = np.abs(out.astype("float64") - expected).max() / np.abs(expected).max()
        assert error <= TOLERANCE[dtype], config


def test_what_is_pointwise_in_a_window_is_stored_of_it():
    (segment,) = contraction_of("mean", (50, 77, 40), 7).segments
    (output,) = segment.outputs
    assert isinstance(output.partial, RowPartial)
    assert output.partial.width == 7
    assert str(output.partial.finish.value) == f"{output.partial.finish.reduced} / T.float32(7.0)"
    assert [str(i) for i in output.indices] == ["i0", "i1 // T.int64(7)"]


def test_forms_whose_threads_hold_parts_of_a_window_refuse_it():
    contraction = contraction_of("max", (64, 192, 64), 6)
    for ranked in (hopper_ranked, simt_ranked):
        with pytest.raises(Unsupported):
            ranked(contraction, H200, DEFAULT)
    for one in (contraction, contraction_of("mean", (64, 192, 64), 16)):
        found = WRITER.ranked(one, H200, DEFAULT)
        assert {WRITER.form_of(c).name for _, c in found} == {"mma"}


def test_a_maximum_keeps_nan_and_negative_infinity():
    contraction = contraction_of("max", (20, 60, 32), 5)
    _, config = mma_ranked(contraction, A100, DEFAULT)[0]
    rng = np.random.default_rng(0)
    x, w, b = (rng.uniform(-1, 1, s).astype(HALF) for s, _ in inputs((20, 60, 32), HALF))
    b[:5], b[7] = -np.inf, np.nan
    out = np.zeros((20, 12), HALF)
    run_cuda_on_cpu(emit_gemm_mma(contraction, A100, config), [x, w, b, out])
    assert (out[:, 0] == -np.inf).all()
    assert np.isnan(out[:, 1]).all()
    assert np.isfinite(out[:, 2:]).all()


def classes(emit, shape, device="h200", straight=False):
    groups = plan_of(module(emit, *inputs(shape, HALF, straight)), device).plan.groups
    return [group.kernel_class for group in groups]


@pytest.mark.parametrize("device", ["h200", "a100"])
@pytest.mark.parametrize(("kind", "width"), [("mean", 7), ("max", 4)])
def test_a_window_behind_a_product_takes_no_launch(kind, width, device):
    shape = (160, 48 * width, 136)
    assert classes(program(kind, shape, width), shape, device) == ["gemm"]


def test_other_windows_take_a_launch_of_their_own():
    def read_too(bb, x, w, b):
        h = linear(bb, x, w, b, False)
        windows = bb.emit(op.reshape(h, (64, 48, 4)))
        return relax.Tuple((h, bb.emit(op.max(windows, axis=[-1]))))

    def across(bb, x, w, b):
        h = bb.emit(op.reshape(linear(bb, x, w, b, False), (64, 4, 48)))
        return bb.emit(op.max(h, axis=[1]))

    shape = (64, 192, 64)
    for emit in (read_too, across, program("max", shape, 48)):
        assert len(classes(emit, shape)) > 1


def maxima(bb, x, w, b):
    h = bb.emit(op.reshape(linear(bb, x, w, b, False), (160, 48, 4)))
    return h, bb.emit(op.max(h, axis=[-1]))


def padded(bb, y, before, behind):
    return bb.emit(op.nn.pad(y, [0, 0, before, behind]))


BEHIND = {
    "columns": lambda bb, h, y: bb.emit(op.strided_slice(y, [1], [5], [40])),
    "rows": lambda bb, h, y: bb.emit(op.nn.relu(bb.emit(op.strided_slice(y, [0], [8], [100])))),
    "padding": lambda bb, h, y: padded(bb, y, 1, 1),
    "shift": lambda bb, h, y: padded(bb, bb.emit(op.strided_slice(y, [1], [5], [48])), 0, 5),
    "repetition": lambda bb, h, y: bb.emit(op.repeat(y, 2, axis=1)),
    "two": lambda bb, h, y: bb.emit(op.add(y, bb.emit(op.sum(h, axis=[-1])))),
}


@pytest.mark.parametrize("what", BEHIND)
def test_what_is_not_pointwise_in_windows_is_no_part_of_their_kernel(what):
    def emit(bb, x, w, b):
        return BEHIND[what](bb, *maxima(bb, x, w, b))

    shape = (160, 192, 136)
    plan = plan_of(module(emit, *inputs(shape, HALF)), "h200").plan
    assert len(plan.groups) > 1
    func = fuse(emit, *inputs(shape, HALF))
    with pytest.raises(Unsupported):
        analyze_contraction(func)


def test_tiles_are_predicted_by_their_whole_windows(monkeypatch):
    """Of 64 columns 40 are of windows of 5, where vectors lie along columns."""
    shape, found = (4096, 4000, 512), []

    def look(launch, *others):
        times = list(mma_times(launch, *others))
        if launch.window:
            found.append(min(one.seconds for one in times))
        return iter(times)

    monkeypatch.setattr(gemm_time, "mma_times", look)
    classes(program("max", shape, 5, straight=True), shape, straight=True)
    ranked = mma_ranked(contraction_of("max", shape, 5, HALF, straight=True), H200, DEFAULT)
    assert min(found) == pytest.approx(ranked[0][0], rel=0.1)
