"""Kernels of scans: numbers on the CPU emulator, resources, plans, and what they refuse."""

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.flow.planned import Planned
from tvm_fusion.ir.extents import Bounds, sizes_of, with_known_sizes
from tvm_fusion.ir.graph import COOPERATIVE_ATTR
from tvm_fusion.kernels.program.analysis import analyze
from tvm_fusion.kernels.scan import kernel
from tvm_fusion.kernels.scan.config import ScanConfig
from tvm_fusion.kernels.scan.kernel import emit_scan, scan_configs
from tvm_fusion.kernels.scan.problem import read_scans
from tvm_fusion.kernels.versions import MOST
from tvm_fusion.runtime.build.version_names import versions_among
from tvm_fusion.transform.lower.scans import SCANS, scanned

from ...support.cuda_on_cpu import compile_cubins, lower, run_cuda_on_cpu
from ...support.graphs import module, plan_of
from ...support.helpers_tir import poisoned
from ...support.kernel_cases import assert_close, fuse, numpy_dtype, outputs_of
from ...support.module_on_cpu import EmulatedModule

H200 = load_profile("nvidia_h200")
HALF, BRAIN, FLOAT, WHOLE = "float16", "bfloat16", "float32", "int64"


def scan(bb, x, axis, name="cumsum", exclusive=False):
    kind = SCANS[f"relax.{name}"]
    made = bb.call_te(lambda x: scanned(x, axis, kind, exclusive), x, primfunc_name_hint="scan")
    return bb.emit(made)


def wide(bb, x):
    return bb.emit(op.astype(x, FLOAT)) if str(x.ty.dtype) in (HALF, BRAIN) else x


def alone(axis, name="cumsum", exclusive=False):
    """A scan in float32, rounded once."""

    def emit(bb, x):
        return op.astype(scan(bb, wide(bb, x), axis, name, exclusive), str(x.ty.dtype))

    return emit


ACCUMULATED = {
    "cumsum": np.add,
    "cumprod": np.multiply,
    "cummax": np.maximum,
    "cummin": np.minimum,
    "logcumsumexp": np.logaddexp,
}


def reference(x, axis, name="cumsum", exclusive=False):
    x = x.astype(np.int64 if x.dtype.kind in "iu" else np.float64)
    found = ACCUMULATED[name].accumulate(x, axis)
    return found if not exclusive else (found - x if name == "cumsum" else found / x)


def drawn(shape, dtype):
    rng = np.random.default_rng(1)
    if dtype == WHOLE:
        return rng.integers(-9, 9, shape)
    return (1 + rng.standard_normal(shape) * 0.1).astype(numpy_dtype(dtype))


def run(func, *inputs, config=None, seed=None):
    program = read_scans(func)
    written = emit_scan(program, H200, config or scan_configs(program, H200)[0])
    outputs = outputs_of(func, len(inputs))
    assert run_cuda_on_cpu(written, [*inputs, *outputs], seed=seed) == 1
    return outputs


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("shape", "axis", "dtype"),
    [
        ((3, 8), 1, FLOAT),
        ((2, 4096), 1, HALF),
        ((5, 1001), 1, BRAIN),
        ((1, 1), 1, FLOAT),
        ((70, 37), 0, HALF),
        ((3, 131, 5), 1, FLOAT),
        ((2, 300, 33, 1), 1, WHOLE),
        ((9, 12), 1, WHOLE),
        ((1, 1100), 1, FLOAT),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
def test_scans_along_any_axis_are_right(shape, axis, dtype, name):
    x = drawn(shape, dtype)
    if name == "cumprod":
        x = np.sign(x) if dtype == WHOLE else (1 + (x.astype(FLOAT) - 1) / 200).astype(x.dtype)
    func = fuse(alone(axis, name), (shape, dtype))
    (found,) = run(func, x, seed=3)
    assert_close(found, reference(x, axis, name), dtype)


@pytest.mark.parametrize(("shape", "axis"), [((3, 200), 1), ((200, 3), 0)])
def test_an_exclusive_scan_leaves_out_the_element_itself(shape, axis):
    x = drawn(shape, FLOAT)
    (found,) = run(fuse(alone(axis, exclusive=True), (shape, FLOAT)), x)
    assert (np.take(found, 0, axis) == 0).all()
    assert_close(found, reference(x, axis, exclusive=True), FLOAT)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 100, 11), HALF), ((5, 37, 3), FLOAT), ((2, 515, 4), WHOLE), ((3, 64, 40), BRAIN),
     ((1, 515, 34), FLOAT), ((2, 70, 129), HALF)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("number", [0, -1], ids=["first", "last"])
def test_neighbouring_rows_are_scanned_side_by_side(shape, dtype, number):
    """Few through shared memory, more in vectors, with walkers over each other."""
    x = drawn(shape, dtype)
    func = fuse(alone(1), (shape, dtype))
    config = scan_configs(read_scans(func), H200)[number]
    (found,) = run(func, x, config=config, seed=4)
    assert_close(found, reference(x, 1), dtype)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["cummax", "cummin", "logcumsumexp"])
@pytest.mark.parametrize(("shape", "axis"), [((3, 301), 1), ((65, 6), 0)], ids=str)
def test_extrema_and_logarithms_keep_nan_and_infinities(name, shape, axis):
    x = drawn(shape, FLOAT)
    x.flat[[0, 7, 40, 65]] = -np.inf, np.inf, np.nan, -np.inf
    (found,) = run(fuse(alone(axis, name), (shape, FLOAT)), x)
    expected = reference(x, axis, name)
    ends = ~np.isfinite(expected)
    np.testing.assert_array_equal(found[ends], expected[ends])
    assert_close(found[~ends], expected[~ends], FLOAT)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "config",
    [
        ScanConfig(32, 4, 4, along=True),
        ScanConfig(256, 1, 8, along=True),
        ScanConfig(1, 64, 8, along=True),
        ScanConfig(8, 16, 3, along=True),
        ScanConfig(16, 32, 8, along=False),
        ScanConfig(1, 32, 4, along=False),
        ScanConfig(32, 2, 5, along=False),
        ScanConfig(64, 2, 4, along=False),
        ScanConfig(16, 2, 6, along=True, staged=1),
    ],
    ids=str,
)
def test_every_layout_of_threads_is_right(config):
    shape = (7, 520)
    x = drawn(shape, HALF)
    (found,) = run(fuse(alone(1), (shape, HALF)), x, config=config, seed=5)
    assert_close(found, reference(x, 1), HALF)


@pytest.mark.parametrize(("shape", "axis"), [((3, 4100), 1), ((70, 37), 0)], ids=str)
def test_places_of_64_bits_are_right(shape, axis, monkeypatch):
    monkeypatch.setattr(kernel, "narrow_indices", lambda program: program)
    x = drawn(shape, FLOAT)
    (found,) = run(fuse(alone(axis), (shape, FLOAT)), x)
    assert_close(found, reference(x, axis), FLOAT)


def around(bb, x, y, w):
    """Work before, between two scans, and behind; what stands before is an output, too."""
    before = bb.emit(op.multiply(op.tanh(wide(bb, x)), w))
    first = scan(bb, before, 1)
    second = scan(bb, bb.emit(op.multiply(op.sigmoid(first), wide(bb, y))), 1)
    behind = bb.emit(
        op.add(bb.emit(op.exp(bb.emit(op.multiply(second, relax.const(-0.1, FLOAT))))), wide(bb, y))
    )
    return relax.Tuple([bb.emit(op.astype(behind, HALF)), before, bb.emit(op.add(first, w))])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(5, 1000, 1), (3, 90, 40)], ids=str)
def test_work_before_between_and_behind_is_in_the_same_launch(shape):
    x, y = drawn(shape, HALF), drawn(shape, HALF)
    w = drawn((shape[1], 1), FLOAT)
    func = fuse(around, (shape, HALF), (shape, HALF), (w.shape, FLOAT))
    found = run(func, x, y, w, seed=1)
    x, y, w = (a.astype(np.float64) for a in (x, y, w))
    before = np.tanh(x) * w
    first = before.cumsum(1)
    second = (y / (1 + np.exp(-first))).cumsum(1)
    expected = [np.exp(second * -0.1) + y, before, first + w]
    for got, wanted, dtype in zip(found, expected, (HALF, FLOAT, FLOAT), strict=True):
        assert_close(got, wanted, dtype)


def test_infinities_and_nan_reach_what_follows_them_and_nothing_else():
    x = np.ones((2, 300), np.float32)
    x[0, 100], x[1, 7] = np.inf, np.nan
    (found,) = run(fuse(alone(1), (x.shape, FLOAT)), x)
    expected = x.cumsum(1)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(found[~np.isnan(found)], expected[~np.isnan(found)])


def test_a_scan_is_no_row_program_and_is_not_read_off_its_point():
    func = fuse(alone(1), ((4, 8), FLOAT))
    with pytest.raises(Unsupported, match="is a scan"):
        analyze(func)
    shifted = fuse(lambda bb, x: op.strided_slice(scan(bb, x, 1), [1], [1], [8]), ((4, 8), FLOAT))
    with pytest.raises(Unsupported, match="beside scans"):
        read_scans(shifted)
    other_way = fuse(lambda bb, x: op.flip(scan(bb, x, 1), 0), ((4, 8), FLOAT))
    with pytest.raises(Unsupported, match="read at another point"):
        read_scans(other_way)
    both = fuse(lambda bb, x: op.add(op.flip(y := scan(bb, x, 1), 1), y), ((4, 8), FLOAT))
    with pytest.raises(Unsupported, match="read at another point"):
        read_scans(both)
    with pytest.raises(Unsupported, match="holds no scan"):
        read_scans(fuse(lambda bb, x: op.exp(x), ((4, 8), FLOAT)))


def groups_of(emit, *inputs):
    return plan_of(module(emit, *inputs), "nvidia_h200").plan.groups


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_scan_is_planned_with_what_stands_around_it(axis):
    def emit(bb, x, y):
        found = bb.emit(op.cumsum(bb.emit(op.exp(x)), axis))
        return op.multiply(found, y)

    shape = (64, 512, 96)
    (group,) = groups_of(emit, (shape, HALF), (shape, HALF))
    assert group.kernel_class == "scan"
    limit = 3 * 2 * np.prod(shape) / H200.hbm_bytes_per_s * 1e6
    assert group.predicted_us < 2 * limit + 10


def backwards(axis):
    def emit(bb, x, y):
        found = scan(bb, bb.emit(op.exp(bb.emit(op.flip(wide(bb, x), axis)))), axis)
        return op.astype(bb.emit(op.multiply(bb.emit(op.flip(found, axis)), wide(bb, y))), HALF)

    return emit


@pytest.mark.parametrize(("shape", "axis"), [((3, 520), 1), ((2, 77, 5), 1)], ids=str)
def test_a_scan_from_the_other_end_is_one_launch(shape, axis):
    x, y = drawn(shape, HALF), drawn(shape, HALF) + 1
    (found,) = run(fuse(backwards(axis), (shape, HALF), (shape, HALF)), x, y, seed=2)
    x, y = x.astype(np.float64), y.astype(np.float64)
    assert_close(found, np.flip(np.flip(np.exp(x), axis).cumsum(axis), axis) * y, HALF)


def reshaped(shape, scanned_shape, axis):
    """Work in one shape before and behind a scan in another."""

    def emit(bb, x, y):
        before = bb.emit(op.reshape(bb.emit(op.tanh(wide(bb, x))), scanned_shape))
        found = bb.emit(op.reshape(scan(bb, before, axis), shape))
        return op.astype(bb.emit(op.multiply(found, wide(bb, y))), HALF)

    return emit


RESHAPED = [
    ((3, 401), (1203,), 0),
    ((5, 8, 30), (5, 240), 1),
    ((6, 40), (2, 3, 1, 40), 1),
    ((4, 36), (4, 12, 3), 1),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("shape", "scanned_shape", "axis"), RESHAPED, ids=str)
def test_reshapes_before_and_behind_a_scan_are_in_its_launch(shape, scanned_shape, axis):
    emit = reshaped(shape, scanned_shape, axis)
    (group,) = groups_of(emit, (shape, HALF), (shape, HALF))
    assert group.kernel_class == "scan"
    x, y = drawn(shape, HALF), drawn(shape, HALF) + 1
    (found,) = run(fuse(emit, (shape, HALF), (shape, HALF)), x, y, seed=3)
    x, y = x.astype(np.float64), y.astype(np.float64)
    expected = np.tanh(x).reshape(scanned_shape).cumsum(axis).reshape(shape) * y
    assert_close(found, expected, HALF)


def test_a_reshape_behind_a_symbolic_number_of_rows_is_none_of_the_launch():
    n = tirx.Var("n", "int64")
    emit = reshaped((n, 8, 30), (n, 240), 1)
    made = module(emit, ((n, 8, 30), HALF), ((n, 8, 30), HALF))
    planned = Planned.of(made, H200.to_target(), H200, load_policy(None))
    assert [g.kernel_class for g in planned.plan.groups] == ["scan", "view", "pointwise"]
    written = EmulatedModule.of(planned)
    assert not written.cuts
    x = drawn((5, 8, 30), HALF)
    (found,) = written([x, x])
    x = x.astype(np.float64)
    expected = np.tanh(x).reshape(5, 240).cumsum(1).reshape(x.shape) * x
    assert_close(found, expected, HALF)


def test_a_permutation_behind_a_scan_is_another_launch():
    def emit(bb, x):
        found = scan(bb, wide(bb, x), 1)
        return op.tanh(bb.emit(op.permute_dims(found, (0, 2, 1))))

    shape = (8, 4096, 64)
    groups = groups_of(emit, (shape, HALF))
    assert [group.kernel_class for group in groups] == ["scan", "transpose"]
    with pytest.raises(Unsupported, match="read at another point"):
        read_scans(fuse(emit, (shape, HALF)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("shape", "axis", "symbolic"),
    [((5, 300), 1, 0), ((0, 300), 1, 0), ((1, 37, 3), 1, 2), ((3, 40, 1), 1, 0)],
    ids=str,
)
def test_a_symbolic_number_of_rows_is_a_launch_of_as_many_blocks(shape, axis, symbolic):
    """A launch has one block where there are no rows."""
    extents = [tirx.Var("n", "int64") if n == symbolic else e for n, e in enumerate(shape)]

    def emit(bb, x):
        turned = bb.emit(op.cumsum(bb.emit(op.flip(wide(bb, x), axis)), axis))
        return op.multiply(bb.emit(op.flip(turned, axis)), wide(bb, x))

    planned = Planned.of(module(emit, (extents, HALF)), H200.to_target(), H200, load_policy(None))
    assert [g.kernel_class for g in planned.plan.groups] == ["scan"]
    written = EmulatedModule.of(planned)
    assert not written.cuts
    x = drawn(shape, HALF)
    (found,) = written([x])
    x = x.astype(np.float64)
    assert found.shape == shape
    assert_close(found, np.flip(np.flip(x, axis).cumsum(axis), axis) * x, FLOAT)


N, M = (tirx.Var(name, "int64") for name in "nm")
ANY_LENGTH = [((9, N), 1, HALF), ((N,), 0, FLOAT), ((M, N), 1, WHOLE)]


@pytest.mark.parametrize(("shape", "axis", "dtype"), ANY_LENGTH, ids=str)
def test_an_axis_of_symbolic_length_has_kernels_by_ranges(shape, axis, dtype, monkeypatch):
    monkeypatch.setattr(kernel, "COLUMNS", (64, 1 << 15))

    def emit(bb, x):
        found = bb.emit(op.cumsum(wide(bb, x), axis))
        return op.multiply(found, wide(bb, x))

    planned = Planned.of(module(emit, (shape, dtype)), H200.to_target(), H200, load_policy(None))
    assert [g.kernel_class for g in planned.plan.groups] == ["scan"]
    written = EmulatedModule.of(planned)
    assert not written.cuts
    names = versions_among(list(written.kernels))
    assert "up to 64" in names
    assert len(names) <= MOST
    for n in (0, 1, 2, 7, 8, 63, 64, 65, 72, 1100):
        x = drawn([{N: n, M: 3}.get(e, e) for e in shape], dtype)
        (found,) = written([x])
        assert_close(found, reference(x, axis) * x.astype(float), dtype)


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((N, 40), ScanConfig(4, 8, 2, along=False, vector=2)),
        ((N, 37), ScanConfig(8, 4, 4, along=False)),
        ((N, 3), ScanConfig(8, 12, 2, along=True, staged=3)),
    ],
    ids=str,
)
def test_rows_side_by_side_are_scanned_along_a_symbolic_length(shape, config):
    func = fuse(alone(0), (shape, HALF))
    lowered = lower(emit_scan(read_scans(func), H200, config))
    for n in (0, 1, 7, 8, 100):
        x = drawn((n, shape[1]), HALF)
        found = poisoned(x.shape, HALF)
        run_cuda_on_cpu(lowered, [x, found])
        assert_close(found, reference(x, 0), HALF)


@pytest.mark.parametrize("bounds", [Bounds(0, 200), Bounds(8, 1 << 20, 8)], ids=str)
def test_a_length_within_bounds_has_no_kernel_for_others(bounds):
    func = fuse(lambda bb, x: scan(bb, x, 1), ((5, N), FLOAT))
    func = with_known_sizes(func, dict.fromkeys(sizes_of(func), bounds))
    lowered = lower(kernel.write_scan_versions(kernel.WRITER, func, H200, load_policy(None)))
    assert len(versions_among([one.kernel for one in (lowered, *lowered.versions)])) in (0, 2)
    for n in sorted({bounds.nearest(1), 8, 16, 200, *([7, 199] if bounds.multiple == 1 else [])}):
        x = drawn((5, n), FLOAT)
        found = poisoned(x.shape, FLOAT)
        assert run_cuda_on_cpu(lowered, [x, found]) == 1
        assert_close(found, reference(x, 1), FLOAT)


def test_few_long_rows_of_symbolic_length_are_shared_by_blocks():
    func = fuse(lambda bb, x: scan(bb, x, 1), ((2, N), FLOAT))
    written = kernel.write_scan_versions(kernel.WRITER, func, H200, load_policy(None))
    assert COOPERATIVE_ATTR in written.attrs
    lowered = lower(written)
    for n in (5, 8, 300, 9000, 9001):
        x = drawn((2, n), FLOAT)
        found = poisoned(x.shape, FLOAT)
        assert run_cuda_on_cpu(lowered, [x, found]) == 1
        assert_close(found, reference(x, 1), FLOAT)


def test_what_reads_from_the_other_end_of_a_symbolic_length_is_another_launch():
    def emit(bb, x):
        return op.flip(bb.emit(op.cumsum(bb.emit(op.flip(x, 1)), 1)), 1)

    planned = Planned.of(module(emit, ((4, N), FLOAT)), H200.to_target(), H200, load_policy(None))
    assert [g.kernel_class for g in planned.plan.groups] == ["scan", "pointwise"]
    x = drawn((4, 21), FLOAT)
    (found,) = EmulatedModule.of(planned)([x])
    assert_close(found, np.flip(np.flip(x, 1).cumsum(1), 1), FLOAT)


def test_both_ends_of_a_row_are_two_launches():
    def emit(bb, x, both):
        found = bb.emit(op.cumsum(bb.emit(op.flip(x, 1)), 1))
        turned = bb.emit(op.flip(found, 1))
        return op.add(turned, found) if both else op.multiply(turned, x)

    shape = ((4096, 2048), FLOAT)
    (one,) = groups_of(lambda bb, x: emit(bb, x, False), shape)
    assert one.kernel_class == "scan"
    two = groups_of(lambda bb, x: emit(bb, x, True), shape)
    assert [group.kernel_class for group in two] == ["scan", "pointwise"]


SHARED = [
    ((2, 3000), 1, HALF, ScanConfig(64, 1, 8, along=True, blocks=3)),
    ((2, 9000), 1, HALF, ScanConfig(64, 1, 8, along=True, runs=2, blocks=3)),
    ((2, 2001), 1, BRAIN, ScanConfig(64, 1, 8, along=True, runs=2, blocks=3)),
    ((3, 2000), 1, WHOLE, ScanConfig(16, 2, 4, along=True, runs=4, blocks=5)),
    ((1, 3000), 1, FLOAT, ScanConfig(16, 2, 4, along=True, blocks=40)),
    ((7, 901), 1, FLOAT, ScanConfig(32, 2, 8, along=True, staged=1, blocks=3)),
    ((2, 300, 5), 1, HALF, ScanConfig(8, 5, 4, along=True, staged=5, blocks=3)),
    ((3, 300, 8), 1, HALF, ScanConfig(8, 4, 4, along=False, vector=2, blocks=4)),
    ((400, 70), 0, FLOAT, ScanConfig(16, 32, 4, along=False, vector=2, blocks=4)),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("shape", "axis", "dtype", "config"), SHARED, ids=str)
@pytest.mark.parametrize("name", ["cumsum", "cummax"])
def test_blocks_that_share_a_row_are_right(shape, axis, dtype, config, name):
    x = drawn(shape, dtype)
    (found,) = run(fuse(alone(axis, name), (shape, dtype)), x, config=config, seed=6)
    assert_close(found, reference(x, axis, name), dtype)


def test_blocks_that_share_a_row_leave_out_the_element_itself():
    x, config = drawn((2, 1000), FLOAT), ScanConfig(32, 1, 4, along=True, runs=2, blocks=3)
    (found,) = run(fuse(alone(1, exclusive=True), (x.shape, FLOAT)), x, config=config)
    assert_close(found, reference(x, 1, exclusive=True), FLOAT)


def test_blocks_that_share_a_row_compute_what_stands_around_several_scans():
    x, y, w = drawn((3, 1000, 1), HALF), drawn((3, 1000, 1), HALF), drawn((1000, 1), FLOAT)
    func = fuse(around, (x.shape, HALF), (y.shape, HALF), (w.shape, FLOAT))
    config = ScanConfig(32, 1, 8, along=True, runs=2, blocks=2)
    found = run(func, x, y, w, config=config, seed=1)
    one = run(func, x, y, w, config=ScanConfig(32, 1, 8, along=True))
    for got, wanted, dtype in zip(found, one, (HALF, FLOAT, FLOAT), strict=True):
        assert_close(got, wanted.astype(np.float64), dtype)


@pytest.mark.parametrize(
    ("shape", "axis", "blocks"),
    [((1 << 24,), 0, 132), ((3, 1000003), 1, 44), ((1 << 18, 48), 0, 132), ((5000,), 0, 1),
     ((4096, 8192), 1, 1)],
    ids=str,
)  # fmt: skip
def test_few_long_rows_are_shared_by_blocks(shape, axis, blocks):
    """Once through memory in one launch, whatever stands around."""

    def emit(bb, x):
        found = scan(bb, bb.emit(op.exp(wide(bb, x))), axis)
        return op.astype(bb.emit(op.tanh(found)), HALF)

    (group,) = groups_of(emit, (shape, HALF))
    assert group.kernel_class == "scan"
    program = read_scans(fuse(emit, (shape, HALF)))
    config = scan_configs(program, H200)[0]
    assert config.blocks == blocks
    written = emit_scan(program, H200, config)
    assert (COOPERATIVE_ATTR in written.attrs) is (blocks > 1)
    assert -(-program.row_count // (config.rows * config.vector)) * blocks <= H200.num_sms or (
        blocks == 1
    )


def test_a_symbolic_number_of_rows_is_not_shared():
    n = tirx.Var("n", "int64")
    program = read_scans(fuse(alone(1), ((n, 1 << 20), HALF)))
    assert {config.blocks for config in scan_configs(program, H200)} == {1}


def test_other_classes_compute_no_scans_and_say_so():
    def emit(bb, x):
        found = bb.emit(op.cumsum(x, 1))
        return op.sum(found, 1)

    groups = groups_of(emit, ((4096, 4096), FLOAT))
    assert [g.kernel_class for g in groups] == ["scan", "row"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("emit", "shape", "registers"),
    [
        (alone(1), (4096, 4096), 80),
        (alone(0), (4096, 4096), 80),
        (alone(1, "cumprod"), (4096, 4095), 80),
        (alone(1), (70000, 40000), 80),
        (alone(1), (2, 1 << 24), 128),
        (alone(0, "cummax"), (1 << 20, 3), 128),
        (alone(1), (tirx.Var("n", "int64"), 4096), 80),
    ],
    ids=[
        "along",
        "across",
        "product",
        "2.8e9 elements",
        "shared",
        "shared side by side",
        "symbolic",
    ],
)
def test_kernels_compile_for_hopper_without_spills(emit, shape, registers):
    func = fuse(emit, (shape, HALF))
    program = read_scans(func)
    kernels = {
        f"scan_{n}": emit_scan(program, H200, config)
        for n, config in enumerate(scan_configs(program, H200))
    }
    for found in compile_cubins(kernels):
        assert found.spill_bytes == 0
        assert found.registers <= registers
