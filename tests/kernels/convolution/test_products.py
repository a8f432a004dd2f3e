"""Convolutions as matrix products on CUDA: numbers on the emulator, ways of data, resources."""

from __future__ import annotations

import dataclasses
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.convolution.forms import CUDA_WRITER
from tvm_fusion.kernels.convolution.geometry import read_convolution
from tvm_fusion.kernels.convolution.products import MAX_PHASES, as_products
from tvm_fusion.kernels.gemm.mma.plan import MmaConfig
from tvm_fusion.kernels.gemm.mma.problem import Way, read_mma
from tvm_fusion.kernels.gemm.simt.config import SimtConfig
from tvm_fusion.kernels.gpu import product_frame

from ...support.convolutions import Conv, moved_convolution, plain, random_convolution
from ...support.cuda_on_cpu import compile_cubins, cuda_source, run_cuda_on_cpu
from ...support.kernel_cases import fuse, numpy_dtype, outputs_of

H200, A100 = (load_profile(name) for name in ("nvidia_h200", "nvidia_a100"))
POLICY = load_policy(None)
MMA, SIMT = CUDA_WRITER.form_of(MmaConfig(64, 64, 32, 32)), CUDA_WRITER.forms[-1]
TILES = (
    MmaConfig(32, 64, 16, 32, 64, 3),
    MmaConfig(16, 64, 16, 16, 128, 3),
    MmaConfig(64, 32, 32, 16, 64, 4),
)
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.2e-2}


def check(conv: Conv, kernel, tolerance: float | None = None, seed: int | None = None) -> None:
    """Every output is poisoned before, and close to float64 after one launch, of which `seed` is
    that of the order of warps.
    """
    inputs = conv.arrays()
    outputs = outputs_of(conv.func(), len(inputs))
    assert run_cuda_on_cpu(kernel, [*inputs, *outputs], seed=seed) == 1
    for got, expected in zip(outputs, conv.expected(inputs), strict=True):
        error = np.abs(got.astype("float64") - expected).max()
        allowed = tolerance or TOLERANCE[conv.dtype]
        assert error <= allowed * max(1.0, np.abs(expected).max())


def read(conv: Conv):
    return read_convolution(conv.func(), conv.exact)


def ways(conv: Conv, tf32: bool = False) -> list[tuple[Way, Way]]:
    """How A and B of each segment come into shared memory."""
    segments = read_mma(as_products(read(conv)), H200, tf32)
    return [(loop.a.way, loop.b[0].way) for s in segments for loop in s.loops]


@pytest.mark.one_in(64)
@pytest.mark.parametrize("seed", range(60))
def test_a_random_convolution(seed):
    """Of every kind, at odd sizes, of few positions; in turns on tensor cores and CUDA cores."""
    conv = random_convolution(seed)
    reach = [k * d for k, d in zip(conv.kernel, conv.dilation, strict=True)]
    sizes = tuple(min(n, r + 9) for n, r in zip(conv.sizes, reach, strict=True))
    on_tensor_cores = seed % 3 < 2
    dtype = ("float16", "bfloat16", "float32")[seed % 3]
    conv = replace(conv, sizes=sizes, dtype=dtype)
    if on_tensor_cores:
        check(conv, MMA.emit(read(conv), H200, TILES[seed // 3 % 3]))
    else:
        found = SIMT.rank(read(conv), H200, POLICY)
        check(conv, SIMT.emit(read(conv), H200, found[seed // 3 % len(found)][1]))


@pytest.mark.one_in(40)
@pytest.mark.parametrize("seed", range(40))
def test_a_random_convolution_of_enlarged_and_padded_data(seed):
    on_tensor_cores = seed % 3 < 2
    dtype = ("float16", "bfloat16", "float32")[seed % 3]
    conv = replace(moved_convolution(seed), dtype=dtype)
    if on_tensor_cores:
        check(conv, MMA.emit(read(conv), H200, TILES[seed // 3 % 3]))
    else:
        check(conv, SIMT.emit(read(conv), H200, SIMT.rank(read(conv), H200, POLICY)[0][1]))


def test_divided_places_are_not_simplified_under_the_condition_of_their_padding():
    """TVM's FlattenBuffer makes other places of them where it knows that a row is no padding."""
    conv = Conv(
        (11, 4),
        (3, 5),
        8,
        8,
        padding=(0, 1, 3, 1),
        dilation=(2, 1),
        weight_layout="OHWI",
        repeats=(1, 3),
        zeros=(1, 2, 1, 0),
    )
    check(conv, SIMT.emit(read(conv), H200, SIMT.rank(read(conv), H200, POLICY)[0][1]))


LAST = plain(dtype="float16", data_layout="NHWC", weight_layout="OHWI", channels=16)
FIRST = plain(dtype="float16", channels=16)
UP = Conv((6, 5), (4, 3), 16, 24, strides=(2, 3), padding=(1,) * 4, transposed=True)
KINDS = {
    "vectors": (LAST, Way.WINDOW),
    "a tap a step": (replace(LAST, channels=64), Way.WINDOW),
    "vectors of 8 bytes": (replace(LAST, channels=12, groups=3, filters=24), Way.WINDOW),
    "vectors of 4 bytes": (replace(LAST, channels=10), Way.WINDOW),
    "weights beside filters": (replace(LAST, weight_layout="HWIO"), Way.WINDOW),
    "weights beside taps": (replace(LAST, weight_layout="OIHW"), Way.WINDOW),
    "strided and dilated": (replace(LAST, strides=(2, 1), dilation=(1, 2)), Way.WINDOW),
    "three channels": (replace(LAST, channels=3, kernel=(7, 7), strides=(2, 2)), Way.GATHER),
    "computed": (replace(LAST, prologue=True), Way.EVALUATE),
    "more taps than bits": (
        Conv((60,), (37,), 3, 24, padding=(18, 18), data_layout="NWC", dtype="float16"),
        Way.EVALUATE,
    ),
    "more phases than segments": (
        Conv((3, 4), (7, 6), 8, 16, strides=(6, 5), transposed=True, dtype="float16"),
        Way.EVALUATE,
    ),
    "channels first": (FIRST, Way.GATHER),
    "channels first, groups": (replace(FIRST, groups=2), Way.GATHER),
    "one tap": (replace(LAST, kernel=(1, 1), padding=(0,) * 4), Way.COPY),
    "one tap, strided": (
        replace(LAST, kernel=(1, 1), padding=(0,) * 4, strides=(2, 2)),
        Way.COPY,
    ),
    "one tap, padded": (replace(LAST, kernel=(1, 1)), Way.WINDOW),
    "images": (replace(LAST, batch=3, epilogue="two_outputs"), Way.WINDOW),
    "results turned": (replace(LAST, epilogue="channels_moved"), Way.WINDOW),
    "steps of less than an element": (replace(UP, dtype="float16"), Way.GATHER),
    "three dimensions": (
        Conv((4, 5, 3), (3, 2, 3), 16, 8, padding=(1,) * 6, data_layout="NDHWC", dtype="float16"),
        Way.WINDOW,
    ),
    "one dimension": (
        Conv((40,), (5,), 16, 24, strides=(2,), padding=(2, 2), data_layout="NWC", dtype="float16"),
        Way.WINDOW,
    ),
}


@pytest.mark.one_in(25)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_data_comes_in_by_its_way(kind):
    conv, way = KINDS[kind]
    assert {way in pair for pair in ways(conv)} == {True}
    check(conv, MMA.emit(read(conv), A100, TILES[0]))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("conv", "vectors"),
    [
        (replace(LAST, dtype="float32"), True),
        (replace(LAST, dtype="float32", channels=24, groups=3, filters=24, strides=(2, 2)), True),
        (replace(LAST, dtype="float32", channels=10), True),
        (replace(LAST, dtype="float32", channels=5), False),
        (replace(LAST, dtype="float32", padding=(0,) * 4), True),
        (replace(LAST, dtype="float32", prologue=True), False),
    ],
)
def test_cuda_cores_read_channels_in_vectors_where_they_are_aligned(conv, vectors):
    kernel = SIMT.emit(read(conv), H200, SimtConfig(32, 64, 16, 4, 4))
    assert bool(re.search(r"\*\(float[24]\*\)\(p0_ptr", cuda_source(kernel))) is vectors
    check(conv, kernel)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["vectors", "channels first", "computed"])
def test_indices_may_take_64_bits(name, monkeypatch):
    monkeypatch.setattr(product_frame, "INT32_ELEMENTS", 100)
    conv, _ = KINDS[name]
    kernel = MMA.emit(read(conv), H200, TILES[0])
    assert "int64_t" in cuda_source(kernel)
    check(conv, kernel)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(4))
def test_a_table_of_terms_is_written_before_it_is_read(seed):
    """17 steps of a ring of 3 stages, in any order of warps."""
    conv = replace(FIRST, channels=60)
    check(conv, MMA.emit(read(conv), H200, TILES[0]), seed=seed)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("channels", [16, 3])
@pytest.mark.parametrize(("dtype", "out"), [("int8", "int32"), ("float8_e4m3fn", "float32")])
def test_eight_bits_are_summed_up_exactly(dtype, out, channels, layout):
    weights = "OHWI" if layout == "NHWC" else "OIHW"
    conv = plain(channels=channels, data_layout=layout, weight_layout=weights, dtype=dtype)

    def emit(bb, x, w):
        options = {"data_layout": layout, "kernel_layout": weights, "out_dtype": out}
        return op.nn.conv2d(x, w, padding=1, **options)

    func = fuse(emit, (conv.data_shape, dtype), (conv.weight_shape, dtype))
    rng = np.random.default_rng(0)
    inputs = [
        rng.integers(-8, 9, s).astype(numpy_dtype(dtype))
        for s in (conv.data_shape, conv.weight_shape)
    ]
    (expected,) = conv.expected(inputs)
    for form in (MMA, SIMT):
        problem = read_convolution(func)
        (output,) = outputs_of(func, 2)
        config = form.rank(problem, H200, POLICY)[0][1]
        run_cuda_on_cpu(form.emit(problem, H200, config), [*inputs, output])
        np.testing.assert_array_equal(output, expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("conv", [plain(data_layout="NHWC", weight_layout="OHWI"), plain()])
def test_float32_is_rounded_to_tf32_only_if_the_policy_allows_it(conv):
    allowed = dataclasses.replace(POLICY, allow_tf32=True)
    for policy, tolerance in ((POLICY, 1e-6), (allowed, 2e-3)):
        config = MMA.rank(read(conv), H200, policy)[0][1]
        assert config.tf32 == policy.allow_tf32
        check(conv, MMA.emit(read(conv), H200, config), tolerance=tolerance)


def test_phases_of_as_many_taps_and_positions_are_a_batch():
    """4 taps at steps of 1 / 2, 3 taps at steps of 1 / 3; 12 and 15 positions."""
    (segment,) = as_products(read(replace(UP, sizes=(6, 5), padding=(1, 0, 1, 0)))).segments
    assert [a.extent for a in segment.batch] == [2, 3]
    assert [a.extent for a in segment.products[0].k] == [16, 2]


def test_each_other_phase_has_its_own_taps():
    """5 taps at steps of 1 / 2 are 3 and 2, for 8 and 7 of 15 positions."""
    conv = Conv((7,), (5,), 16, 24, strides=(2,), padding=(1, 1), transposed=True)
    found = as_products(read(conv))
    assert sorted(s.products[0].k[-1].extent for s in found.segments) == [2, 3]
    assert sorted(s.M * s.N // 24 for s in found.segments) == [7, 8]


PHASES = [
    Conv((6, 5), (4, 3), 16, 24, strides=(2, 3), padding=(1, 0, 1, 0), transposed=True),
    Conv((5, 3), (4, 4), 16, 8, 2, 2, strides=(4, 4), padding=(0, 3, 0, 1), transposed=True),
    Conv((5,), (9,), 16, 8, strides=(3,), padding=(4, 2), transposed=True, output_padding=(0,)),
    Conv((3, 4, 3), (2, 2, 2), 8, 16, strides=(2, 2, 2), transposed=True, epilogue="residual"),
    Conv((3, 2, 3), (3, 3, 3), 8, 16, strides=(2, 2, 2), padding=(1,) * 6, transposed=True),
]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("form", ["mma", "simt"])
@pytest.mark.parametrize("conv", PHASES, ids=range(len(PHASES)))
def test_phases_are_put_together(conv, form):
    if form == "mma":
        conv = replace(conv, dtype="float16")
        check(conv, MMA.emit(read(conv), H200, TILES[0]))
    else:
        check(conv, SIMT.emit(read(conv), H200, SIMT.rank(read(conv), H200, POLICY)[0][1]))


DEPTHWISE_UP = [
    Conv((8, 2), (2, 3), 2, 2, 1, 2, (2, 2), (1, 1, 0, 0), transposed=True, output_padding=(1, 1)),
    Conv((5, 3), (4, 4), 8, 8, 1, 8, (4, 4), (1, 1, 0, 0), transposed=True),
    Conv((5, 3), (4, 3), 8, 8, 1, 8, (4, 2), (1,) * 4, transposed=True, output_padding=(2, 1)),
    Conv((8, 2), (4, 7), 8, 8, 1, 8, (4, 5), (1,) * 4, transposed=True, output_padding=(2, 3)),
]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("form", ["mma", "simt"])
@pytest.mark.parametrize("conv", DEPTHWISE_UP, ids=range(len(DEPTHWISE_UP)))
def test_groups_of_one_channel_read_the_taps_of_their_phases(conv, form):
    """The first tap of a phase, (phase + a constant) % steps, stands beside the group, of which
    the phase is the rest.
    """
    if form == "mma":
        conv = replace(conv, dtype="float16")
        check(conv, MMA.emit(read(conv), H200, TILES[0]))
    else:
        check(conv, SIMT.emit(read(conv), H200, SIMT.rank(read(conv), H200, POLICY)[0][1]))


@pytest.mark.one_in(20)
@pytest.mark.parametrize("seed", range(24))
def test_a_random_transposed_convolution_in_groups(seed):
    """Of one or more channels a group; in turns on tensor cores and CUDA cores."""
    rng = random.Random(seed)
    groups, per, out = rng.randint(2, 8), rng.choice((1, 1, 3)), rng.choice((1, 1, 2))
    strides = tuple(rng.randint(1, 4) for _ in range(2))
    kernel = tuple(s * rng.randint(1, 2) if rng.random() < 0.7 else s + 1 for s in strides)
    conv = Conv(
        tuple(rng.randint(2, 6) for _ in range(2)),
        kernel,
        groups * per,
        groups * out,
        rng.randint(1, 2),
        groups,
        strides,
        tuple(rng.randint(0, k - 1) for k in (*kernel, *kernel)),
        transposed=True,
        output_padding=tuple(rng.randrange(s) for s in strides),
        epilogue=rng.choice(("none", "residual")),
    )
    if min(conv.output_sizes) < 1:
        conv = replace(conv, padding=(0,) * 4)
    if seed % 2:
        conv = replace(conv, dtype="float16")
        check(conv, MMA.emit(read(conv), H200, TILES[seed // 2 % 3]))
    else:
        found = SIMT.rank(read(conv), H200, POLICY)
        check(conv, SIMT.emit(read(conv), H200, found[seed // 2 % len(found)][1]))


def test_phases_that_meet_no_tap_are_zeros_behind_which_the_epilogue_runs():
    conv = Conv((5, 4), (1, 1), 8, 16, strides=(2, 2), transposed=True, epilogue="scale_shift")
    check(conv, SIMT.emit(read(conv), H200, SIMT.rank(read(conv), H200, POLICY)[0][1]))


ONE = Conv((3, 1), (3, 1), 8, 16, strides=(2, 2), transposed=True, output_padding=(0, 1))
"""Data of one element along an axis, beside which there are results of no element."""


@pytest.mark.one_in(4)
@pytest.mark.parametrize("form", ["mma", "simt"])
@pytest.mark.parametrize(
    "conv", [ONE, replace(ONE, sizes=(1, 4), kernel=(1, 3), output_padding=(1, 0))]
)
def test_data_of_one_element_is_read_at_its_place(conv, form):
    """The simplifier leaves no axis in an index that is 0 wherever it is read."""
    if form == "mma":
        conv = replace(conv, dtype="float16")
        check(conv, MMA.emit(read(conv), H200, TILES[0]))
    else:
        check(conv, SIMT.emit(read(conv), H200, SIMT.rank(read(conv), H200, POLICY)[0][1]))


def test_more_phases_than_segments_meet_zeros():
    """7 x 6 taps at steps of 1 / 6 and 1 / 5: the phases of one window are enough."""
    conv, _ = KINDS["more phases than segments"]
    found = as_products(read(conv))
    assert len(found.segments) == 6 <= MAX_PHASES < np.prod(conv.strides)
    assert [a.extent for a in found.products[0].k] == [8, 2, 6]


@pytest.mark.parametrize(
    "conv",
    [
        replace(LAST, sizes=(4, 5), repeats=(2, 3), batch=2),
        replace(LAST, sizes=(3, 4), repeats=(2, 2), zeros=(1, 0, 0, 2), channels=24),
    ],
    ids=repr,
)
def test_enlarged_data_is_copied_from_where_it_lies(conv):
    assert ways(conv)[0][0] is Way.WINDOW
    check(conv, MMA.emit(read(conv), H200, TILES[0]))


def test_cuda_cores_read_enlarged_data():
    conv = plain(sizes=(3, 4), repeats=(2, 2))
    check(conv, SIMT.emit(read(conv), H200, SIMT.rank(read(conv), H200, POLICY)[0][1]))


def test_enlarged_data_of_other_layouts_is_computed():
    conv = replace(FIRST, sizes=(3, 4), repeats=(2, 2), strides=(2, 1), channels=8)
    assert Way.EVALUATE in ways(conv)[0]
    check(conv, MMA.emit(read(conv), H200, TILES[1]))


def test_padding_is_zero_beside_infinite_data():
    """What lies in memory where an image ends is another image."""
    conv = replace(LAST, channels=24, batch=2)
    inputs = conv.arrays()
    (clean,), (got,) = conv.expected(inputs), outputs_of(conv.func(), 2)
    inputs[0][1] = np.inf
    run_cuda_on_cpu(MMA.emit(read(conv), H200, TILES[0]), [*inputs, got])
    assert np.abs(got[0].astype("float64") - clean[0]).max() <= 2e-3 * np.abs(clean[0]).max()


# ---- resources, refusals

LARGE = dict(batch=32, dtype="float16", epilogue="scale_shift")
LARGE_LAST = dict(LARGE, data_layout="NHWC", weight_layout="OHWI")
RESOURCES = {
    "middle": plain(sizes=(56, 56), channels=256, filters=256, **LARGE_LAST),
    "strided": plain(sizes=(56, 56), channels=64, filters=64, strides=(2, 2), **LARGE_LAST),
    "stem": Conv((224, 224), (7, 7), 3, 64, strides=(2, 2), padding=(3,) * 4, **LARGE_LAST),
    "first": plain(sizes=(56, 56), channels=256, filters=256, **LARGE),
    "up": Conv(
        (28, 28), (4, 4), 128, 64, strides=(2, 2), padding=(1,) * 4, transposed=True, **LARGE
    ),
}


@pytest.mark.parametrize(
    ("arch", "hw"),
    [pytest.param("sm_80", A100, marks=pytest.mark.nightly), ("sm_90a", H200)],
)
def test_the_first_configurations_compile_without_spills(arch, hw):
    kernels = {}
    for name, conv in RESOURCES.items():
        problem = read(conv)
        kernels[name] = MMA.emit(problem, hw, MMA.rank(problem, hw, POLICY)[0][1])
    found = compile_cubins(kernels, arch)
    assert len(found) == len(kernels)
    assert [r.kernel for r in found if r.spill_bytes] == []


def test_copies_at_windows_are_predicted_to_be_faster_than_single_elements():
    last, first = (RESOURCES[name] for name in ("middle", "first"))
    seconds = [MMA.rank(read(conv), H200, POLICY)[0][0] for conv in (last, first)]
    assert seconds[0] < seconds[1]


def test_devices_without_asynchronous_copies_take_the_cuda_cores():
    old = dataclasses.replace(A100, arch="sm_75")
    with pytest.raises(Unsupported, match=r"cp\.async"):
        MMA.rank(read(LAST), old, POLICY)
    check(LAST, CUDA_WRITER.emit(read(LAST), old, POLICY))


def test_sums_in_double_precision_are_left_to_the_cuda_cores():
    conv = plain(dtype="float64")
    with pytest.raises(Unsupported, match="float64"):
        MMA.rank(read(conv), H200, POLICY)
    check(conv, CUDA_WRITER.emit(read(conv), H200, POLICY), tolerance=1e-12)
