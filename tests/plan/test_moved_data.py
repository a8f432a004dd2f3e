"""What stands before a convolution and only moves its data is no kernel: the convolution reads it
where it lies.
"""

import pytest
from tvm.relax import op

from ..support.graphs import module, plan_of

HALF = "float16"
DATA, WEIGHTS = (2, 10, 12, 64), (96, 3, 3, 64)
ONE_TAP = (96, 1, 1, 64)


def conv(bb, x, w, padding=1, groups=1, **more):
    return bb.emit(
        op.nn.conv2d(
            x,
            w,
            padding=padding,
            groups=groups,
            data_layout="NHWC",
            kernel_layout="OHWI",
            **more,
        )
    )


def twice(bb, x):
    return bb.emit(op.repeat(bb.emit(op.repeat(x, 2, 1)), 2, 2))


def padded(bb, x, **more):
    return bb.emit(op.nn.pad(x, [0, 0, 0, 1, 2, 0, 0, 0], **more))


def launches(emit, device, data=DATA, weights=WEIGHTS, dtype=HALF) -> list[str]:
    """The kernel classes of a plan."""
    mod = module(emit, (data, dtype), (weights, dtype))
    return [group.kernel_class for group in plan_of(mod, device).plan.groups]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("device", ["h200", "a100", "llvm"])
@pytest.mark.parametrize(
    "emit",
    [
        lambda bb, x, w: conv(bb, twice(bb, x), w),
        lambda bb, x, w: conv(bb, padded(bb, x), w, strides=2),
        lambda bb, x, w: conv(bb, padded(bb, twice(bb, x)), w, padding=0),
        lambda bb, x, w: conv(bb, twice(bb, padded(bb, x)), w),
        lambda bb, x, w: op.nn.relu(conv(bb, twice(bb, twice(bb, x)), w)),
    ],
    ids=["enlarged", "padded", "padded behind", "padded before", "enlarged again, relu"],
)
def test_the_convolution_is_the_only_kernel(emit, device):
    dtype = "float32" if device == "llvm" else HALF
    assert launches(emit, device, dtype=dtype) == ["convolution"]


PARTS = (2, 10, 12, 64), (2, 20, 24, 64), (96, 3, 3, 128)


def joined(bb, *parts):
    return bb.emit(op.concat(parts, 3))


def launches_of_parts(emit, device, *shapes) -> list[str]:
    dtype = "float32" if device == "llvm" else HALF
    mod = module(emit, *((shape, dtype) for shape in shapes))
    return [group.kernel_class for group in plan_of(mod, device).plan.groups]


@pytest.mark.parametrize("device", ["h200", "a100", "llvm"])
@pytest.mark.parametrize(
    "emit",
    [
        lambda bb, x, y, w: conv(bb, joined(bb, twice(bb, x), y), w),
        lambda bb, x, y, w: op.nn.relu(conv(bb, joined(bb, y, y), w, strides=2)),
    ],
    ids=["one enlarged", "two, relu"],
)
def test_parts_of_a_concatenation_are_read_where_they_lie(emit, device):
    assert launches_of_parts(emit, device, *PARTS) == ["convolution"]


@pytest.mark.parametrize("device", ["h200", "a100"])
def test_parts_that_one_memory_can_hold_are_written_there(device):
    """The kernels that compute them do so for nothing, and the last one reads one tensor."""

    def emit(bb, x, w, v, u):
        y = bb.emit(op.nn.relu(conv(bb, x, w)))
        z = bb.emit(op.nn.relu(conv(bb, y, v)))
        return conv(bb, joined(bb, y, z), u)

    shapes = (2, 20, 24, 64), *((64, 3, 3, n) for n in (64, 64, 128))
    assert launches_of_parts(emit, device, *shapes).count("join") == 1


@pytest.mark.parametrize(("filters", "joins"), [(128, 0), (64, 1)])
def test_an_enlarged_part_is_read_apart_from_one_that_is_computed(filters, joins):
    """Few filters are better read with their rims, which enlarged data has none of."""

    def emit(bb, x, w, v, u):
        y = bb.emit(op.nn.silu(conv(bb, x, w)))
        z = bb.emit(op.nn.max_pool2d(y, (2, 2), (2, 2), layout="NHWC"))
        z = bb.emit(op.nn.silu(conv(bb, z, v)))
        return bb.emit(op.nn.silu(conv(bb, joined(bb, twice(bb, z), y), u)))

    filters_of = (128, 3, 3, 128), (128, 3, 3, 128), (filters, 3, 3, 256)
    found = launches_of_parts(emit, "h200", (4, 64, 64, 128), *filters_of)
    assert found.count("join") == joins
    assert found.count("convolution") == 3


def test_groups_of_channels_read_one_tensor():
    def emit(bb, x, y, w):
        return conv(bb, joined(bb, twice(bb, x), y), w, groups=2)

    assert len(launches_of_parts(emit, "h200", *PARTS[:2], (96, 3, 3, 64))) == 2


def test_data_that_is_computed_of_a_concatenation_is_written():
    def emit(bb, x, y, w):
        return conv(bb, bb.emit(op.nn.silu(joined(bb, twice(bb, x), y))), w)

    assert len(launches_of_parts(emit, "h200", *PARTS)) == 2


def test_images_one_behind_the_other_are_written():
    def emit(bb, x, y, w):
        return conv(bb, bb.emit(op.concat([x, y], 0)), w)

    assert len(launches_of_parts(emit, "h200", DATA, DATA, WEIGHTS)) == 2


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("device", ["h200", "llvm"])
def test_lines_and_volumes_are_padded_on_their_way(rank, device):
    def emit(bb, x, w):
        y = bb.emit(op.nn.pad(x, [0, 0, 0, 0, *(1, 2) * rank]))
        return getattr(op.nn, f"conv{rank}d")(y, w)

    shapes = (2, 16, *(9,) * rank), (32, 16, *(3,) * rank)
    dtype = "float32" if device == "llvm" else HALF
    assert launches(emit, device, *shapes, dtype=dtype).count("pointwise") == 0


@pytest.mark.parametrize("device", ["h200", "llvm"])
@pytest.mark.parametrize(
    "emit",
    [
        lambda bb, x, w: conv(bb, padded(bb, x, pad_value=1.0), w),
        lambda bb, x, w: conv(bb, padded(bb, x, pad_mode="reflect"), w),
        lambda bb, x, w: conv(bb, bb.emit(op.tile(x, (1, 2, 1, 1))), w),
    ],
    ids=["ones", "reflected", "tiled"],
)
def test_what_is_no_zero_beside_the_data_is_written(emit, device):
    dtype = "float32" if device == "llvm" else HALF
    assert len(launches(emit, device, dtype=dtype)) == 2


def test_channels_of_zeros_are_written():
    def emit(bb, x, w):
        return conv(bb, bb.emit(op.nn.pad(x, [0, 0, 0, 0, 0, 0, 0, 32])), w)

    assert len(launches(emit, "h200", (2, 10, 12, 32))) == 2


def test_data_that_is_read_outside_is_written():
    def emit(bb, x, w):
        y = twice(bb, x)
        return conv(bb, y, w), y

    assert len(launches(emit, "h200")) == 2


def test_windows_that_lie_apart_read_what_was_written():
    def emit(bb, x, w):
        return conv(bb, twice(bb, x), w, padding=0, strides=2)

    def beside(bb, x, w):
        return conv(bb, padded(bb, x), w, strides=3)

    for device, dtype in (("h200", HALF), ("llvm", "float32")):
        assert len(launches(emit, device, dtype=dtype)) == 2
        assert len(launches(beside, device, dtype=dtype)) == 2


def test_filters_of_one_tap_read_enlarged_data():
    emit = lambda bb, x, w: conv(bb, twice(bb, x), w, padding=0)  # noqa: E731
    assert len(launches(emit, "llvm", weights=ONE_TAP, dtype="float32")) == 2


def test_kernels_of_few_channels_read_enlarged_data():
    emit = lambda bb, x, w: conv(bb, twice(bb, x), w, groups=64)  # noqa: E731
    assert len(launches(emit, "h200", weights=(64, 3, 3, 1))) == 2
    plain = lambda bb, x, w: conv(bb, padded(bb, x), w, groups=64)  # noqa: E731
    assert launches(plain, "h200", weights=(64, 3, 3, 1)) == ["convolution"]
