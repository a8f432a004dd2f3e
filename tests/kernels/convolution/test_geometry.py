"""What a fused function is read as: windows, groups, filters, channels; and what is refused."""

from __future__ import annotations

import pytest
from tvm.relax import op

from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.convolution.geometry import by_channels, merged, read_convolution

from ...support.convolutions import Conv, plain
from ...support.kernel_cases import fuse

F32 = "float32"


def windows(conv: Conv) -> list[tuple[int, ...]]:
    """Of each window that has several positions or taps, the numbers."""
    return [
        (w.size, w.taps, w.stride, w.dilation, w.before, w.expansion, w.low, w.high)
        for w in read_convolution(conv.func()).windows
        if w.size > 1 or w.taps > 1
    ]


def test_padding_and_strides_are_folded_into_windows():
    conv = plain(sizes=(9, 11), strides=(1, 2), padding=(1, 0, 2, 1))
    assert windows(conv) == [(10, 3, 1, 1, 1, 1, 0, 9), (5, 3, 2, 1, 0, 1, 0, 11)]


def test_conditions_that_are_divided_by_common_factors_are_the_same_windows():
    conv = plain(sizes=(9, 11), strides=(2, 2), dilation=(2, 2), padding=(2,) * 4)
    assert windows(conv) == [(5, 3, 2, 2, 2, 1, 0, 9), (6, 3, 2, 2, 2, 1, 0, 11)]


def test_transposed_convolutions_have_expanded_windows_and_turned_filters():
    conv = Conv((9, 5), (3, 4), 8, 16, strides=(2, 3), padding=(1,) * 4, transposed=True)
    assert windows(conv) == [(17, 3, 1, -1, -1, 2, 0, 9), (14, 4, 1, -1, -1, 3, 0, 5)]


def test_a_phase_meets_some_taps_only():
    conv = Conv((9,), (3,), 8, 16, strides=(2,), transposed=True)
    window = read_convolution(conv.func()).windows[-1]
    assert [window.phase_taps(p) for p in (0, 1)] == [[(0, 0), (2, -1)], [(1, 0)]]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_groups_are_an_axis_of_their_own(layout):
    conv = plain(channels=12, filters=24, groups=4, data_layout=layout)
    found = read_convolution(conv.func())
    assert (found.groups, found.filters_of_group, found.channels_of_group) == (4, 6, 3)
    assert found.channel_dim == layout.index("C")
    assert found.multiply_adds == 9 * 11 * 24 * 3 * 9


@pytest.mark.parametrize("per", [1, 3])
def test_one_position_of_a_grouped_convolution_is_a_window(per):
    conv = Conv((3, 9), (2, 3), 4 * per, 8, groups=4, strides=(2, 1))
    found = read_convolution(conv.func())
    assert [(w.size, w.taps) for w in found.windows[-2:]] == [(1, 2), (7, 3)]
    assert (found.groups, found.channels_of_group, found.channel_dim) == (4, per, 1)


def test_depthwise_is_told_by_channels_as_well():
    conv = plain(channels=12, filters=12, groups=12)
    found = read_convolution(conv.func())
    assert (found.groups, found.filters_of_group, found.channels_of_group) == (12, 1, 1)
    other = by_channels(found)
    assert (other.groups, other.filters_of_group, other.is_depthwise) == (1, 12, True)
    assert by_channels(read_convolution(plain().func())) is None


def test_windows_of_one_tap_without_padding_are_merged():
    found = merged(read_convolution(plain(kernel=(1, 1), padding=(0,) * 4).func()))
    assert [w.size for w in found.windows] == [1, 99]
    unmerged = merged(read_convolution(plain().func()))
    assert [w.size for w in unmerged.windows] == [1, 9, 11]


def test_functions_of_the_data_are_told_where_it_lies():
    found = read_convolution(plain(prologue=True).func())
    assert "sigmoid" in str(found.data)


def resized(bb, x, w):
    y = bb.emit(
        op.image.resize2d(
            x,
            (18, 22),
            method="nearest_neighbor",
            coordinate_transformation_mode="asymmetric",
            rounding_method="floor",
        )
    )
    return op.nn.conv2d(y, w, padding=1)


def spread(bb, x, w):
    """Each element four times, by shapes alone."""
    y = bb.emit(op.reshape(x, (1, 8, 9, 1, 11, 1)))
    y = bb.emit(op.broadcast_to(y, (1, 8, 9, 2, 11, 2)))
    return op.nn.conv2d(bb.emit(op.reshape(y, (1, 8, 18, 22))), w, padding=1)


@pytest.mark.parametrize("emit", [plain(repeats=(2, 2)).emit, resized, spread])
def test_enlarged_data_is_told_by_what_is_read_not_by_its_operator(emit):
    found = read_convolution(fuse(emit, ((1, 8, 9, 11), F32), ((16, 8, 3, 3), F32)))
    numbers = [(w.size, w.before, w.low, w.high, w.repeats) for w in found.windows]
    assert numbers == [(1, 0, 0, 1, 1), (18, 1, 0, 18, 2), (22, 1, 0, 22, 2)]


@pytest.mark.parametrize(
    ("conv", "expected"),
    [
        (plain(repeats=(3, 1), strides=(2, 1)), [(14, 1, 0, 27, 3), (11, 1, 0, 11, 1)]),
        (plain(repeats=(2, 2), strides=(2, 2)), [(9, 1, 0, 18, 2), (11, 1, 0, 22, 2)]),
        (plain(repeats=(2, 4), padding=(0,) * 4), [(16, 0, 0, 18, 2), (42, 0, 0, 44, 4)]),
        (plain(repeats=(2, 2), zeros=(1, 0, 2, 3)), [(21, 2, 0, 18, 2), (25, 1, 0, 22, 2)]),
        (plain(zeros=(3, 0, 0, 1)), [(12, 4, 0, 9, 1), (12, 1, 0, 11, 1)]),
    ],
)
def test_windows_of_enlarged_and_padded_data(conv, expected):
    windows = read_convolution(conv.func()).windows[-2:]
    assert [(w.size, w.before, w.low, w.high, w.repeats) for w in windows] == expected


def test_zeros_that_are_enlarged_are_zeros_around_the_data():
    def emit(bb, x, w):
        y = bb.emit(op.nn.pad(x, [0, 0, 0, 0, 2, 1, 1, 1]))
        return op.nn.conv2d(bb.emit(op.repeat(y, 2, 2)), w, padding=1)

    found = read_convolution(fuse(emit, ((1, 8, 9, 9), F32), ((16, 8, 3, 3), F32)))
    rows = found.windows[1]
    assert (rows.size, rows.before, rows.low, rows.high, rows.repeats) == (24, 5, 0, 18, 2)


def refused(emit, *shapes) -> str:
    with pytest.raises(Unsupported) as error:
        read_convolution(fuse(emit, *((s, F32) for s in shapes)))
    return str(error.value)


def test_weights_that_are_computed_are_refused():
    def emit(bb, x, w):
        return op.nn.conv2d(x, bb.emit(op.exp(w)), padding=1)

    assert "weights that are computed" in refused(emit, (1, 8, 9, 9), (16, 8, 3, 3))


def test_other_padding_than_zeros_is_refused():
    def emit(bb, x, w):
        return op.nn.conv2d(bb.emit(op.nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1], pad_value=2.0)), w)

    assert "other padding than zeros" in refused(emit, (1, 8, 9, 9), (16, 8, 3, 3))


def test_two_convolutions_are_refused():
    def emit(bb, x, w, v):
        first, second = (bb.emit(op.nn.conv2d(x, y, padding=1)) for y in (w, v))
        return op.add(first, second)

    shape = (16, 8, 3, 3)
    assert "not one product" in refused(emit, (1, 8, 9, 9), shape, shape)
