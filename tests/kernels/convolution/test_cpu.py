"""Convolutions on a CPU against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tvm import tirx

import tvm_fusion
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.convolution.cpu.filter_lanes import FilterLanes
from tvm_fusion.kernels.convolution.cpu.kernel import ways, write_convolution
from tvm_fusion.kernels.convolution.cpu.tiles import Tiles, stores_at_once
from tvm_fusion.kernels.convolution.cpu.winograd import Winograd
from tvm_fusion.kernels.convolution.cpu.writer import Writer
from tvm_fusion.kernels.convolution.geometry import Convolution, read_convolution
from tvm_fusion.kernels.convolution.kernel_class import ConvolutionClass
from tvm_fusion.kernels.cpu.contraction.panels import Panels, wanted_panels
from tvm_fusion.kernels.cpu.machine import Machine, machine_of
from tvm_fusion.kernels.cpu.write import finished

from ...support.convolutions import Conv, moved_convolution, plain, random_convolution
from ...support.helpers_tir import call, compile_cpu, poisoned
from ...support.local_bounds import outside

TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def written(conv: Conv) -> tirx.PrimFunc:
    policy = load_policy({"rounding": "exact" if conv.exact else "fast"})
    return ConvolutionClass().write(conv.func(), load_profile("llvm"), policy)


def check(conv: Conv, kernel: tirx.PrimFunc | None = None) -> None:
    kernel = kernel or written(conv)
    arrays = conv.arrays()
    expected = conv.expected(arrays)
    given = list(arrays)
    for i, how in wanted_panels(kernel).items():
        given[i] = how.of(given[i])
    outputs = [poisoned(e.shape, conv.dtype) for e in expected]
    got = call(compile_cpu(kernel), given, outputs)
    for a, b in zip(got, expected, strict=True):
        scale = max(1.0, np.abs(b).max())
        assert np.isfinite(a.astype("float64")).all()
        assert np.abs(a.astype("float64") - b).max() <= TOLERANCE[conv.dtype] * scale


@pytest.mark.one_in(60)
@pytest.mark.parametrize("seed", range(60))
def test_a_random_convolution(seed):
    check(random_convolution(seed))


@pytest.mark.one_in(20)
@pytest.mark.parametrize("seed", range(60))
def test_a_random_convolution_of_enlarged_and_padded_data(seed):
    conv = moved_convolution(seed)
    assert {w.repeats for w in read_convolution(conv.func()).windows} >= set(conv.repeats)
    check(conv)


# Of each form, and of each way to take them apart: blocks of channels, several tasks, a last vector
# that is not full, rows that are transposed together, weights that are packed by squares or not.
FORMS = {
    "enlarged": plain(sizes=(9, 7), repeats=(2, 3), channels=12, filters=24),
    "positions_enlarged": plain(sizes=(7, 16), repeats=(2, 2), channels=12, filters=2),
    "winograd_enlarged": plain(channels=33, filters=40, repeats=(2, 2), zeros=(0, 1, 2, 0)),
    "padded_before": plain(channels=20, filters=32, strides=(2, 2), zeros=(0, 0, 1, 1)),
    "filters": plain(filters=40, channels=12),
    "filters_along_filters": plain(filters=40, channels=12, data_layout="NHWC"),
    "blocks_of_channels": plain(
        sizes=(20, 30), channels=512, filters=32, dilation=(2, 2), epilogue="residual"
    ),
    "tasks": plain(sizes=(40, 56), channels=16, filters=32),
    "positions": plain(sizes=(24, 32), channels=12, filters=2, epilogue="two_outputs"),
    "depthwise": plain(sizes=(30, 40), channels=32, filters=32, groups=32),
    "depthwise_strided": plain(
        sizes=(31, 57), channels=16, filters=16, groups=16, strides=(2, 2), epilogue="residual"
    ),
    "depthwise_short_rows": plain(sizes=(7, 7), channels=96, filters=96, groups=96),
    "depthwise_strided_columns": plain(
        sizes=(5, 1100), channels=3, filters=3, groups=3, strides=(1, 3), padding=(1, 2, 0, 4)
    ),
    "depthwise_by_channels": plain(channels=72, filters=72, groups=72, data_layout="NHWC"),
    "transposed": Conv((6, 7), (3, 3), 16, 20, strides=(2, 2), padding=(1,) * 4, transposed=True),
    "transposed_one_element": Conv(
        (6, 1), (3, 1), 16, 20, strides=(2, 2), transposed=True, output_padding=(0, 1)
    ),
    "transposed_one_filter": Conv((9, 7), (4, 4), 32, 1, strides=(2, 2), transposed=True),
    "winograd": plain(sizes=(27, 19), channels=33, filters=40, epilogue="residual"),
    "winograd_along_filters": plain(channels=48, filters=68, epilogue="channels_moved"),
    "winograd_images": plain(batch=3, channels=48, filters=64, padding=(0, 2, 1, 0)),
    "winograd_groups": plain(channels=64, filters=64, groups=2, epilogue="two_outputs"),
    "merged": plain(sizes=(7, 7), kernel=(1, 1), padding=(0,) * 4, channels=40, filters=48),
    "at_once": plain(
        sizes=(28, 28), kernel=(1, 1), padding=(0,) * 4, channels=24, filters=37, epilogue="relu"
    ),
    "packed_squares": plain(channels=20, filters=32, constant=False),
    "packed_elements": plain(channels=20, filters=32, weight_layout="HWIO", constant=False),
    "packed_few": plain(sizes=(24, 32), channels=20, filters=6, constant=False),
}


def form_of(conv: Conv) -> tuple[type[Writer], Convolution, Tiles]:
    """How a convolution is written, seen and cut on the CPU of the profile."""
    read = read_convolution(conv.func(), conv.exact)
    return ways(read, machine_of(load_profile("llvm")))[0]


@pytest.mark.one_in(18)
@pytest.mark.parametrize("name", FORMS)
def test_a_form(name):
    form, seen, tiles = form_of(FORMS[name])
    assert (form is Winograd) == name.startswith("winograd")
    along_positions = ("positions", "positions_enlarged", "packed_few")
    along_positions += ("depthwise", "depthwise_short_rows")
    along_positions += ("depthwise_strided", "depthwise_strided_columns")
    along_positions += ("at_once",)
    assert tiles.along_filters == (name not in along_positions)
    assert seen.is_depthwise == (name == "depthwise_by_channels")
    assert (tiles.channels < seen.channels_of_group) == (name == "blocks_of_channels")
    check(FORMS[name])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", FORMS)
def test_kernels_stay_inside_their_own_buffers(name):
    """Of whole images: of the last block of others, no bound of a single index says it."""
    machine, func = machine_of(load_profile("llvm")), FORMS[name].func()
    (form, seen, tiles), *_ = ways(read_convolution(func), machine)
    sizes = [w.size for w in seen.windows]
    blocks = (*(1 for _ in sizes[:-2]), *sizes[-2:])
    body = form(func, seen, replace(tiles, blocks=blocks), machine).run()
    assert outside(body) == []


@pytest.mark.parametrize(
    ("name", "is_at_once"), [("at_once", True), ("positions", True), ("depthwise", False)]
)
def test_whole_vectors_of_results_are_written_from_registers(name, is_at_once):
    """On a machine of vectors of 64 bytes: with others, other blocks are cut, see `test_a_form`."""
    machine, func = Machine(vector_bytes=64, vector_registers=32, cores=2), FORMS[name].func()
    form, seen, tiles = ways(read_convolution(func), machine)[0]
    assert stores_at_once(seen, tiles) == is_at_once
    body = form(func, seen, tiles, machine).run()
    assert ("sums = T.alloc_buffer" in body.script()) != is_at_once


def test_rows_that_are_transposed_together_stay_inside():
    """13 rows of 42 positions, six at a time, once read beyond the sums."""
    conv = Conv((7, 22), (3, 3), 13, 16, strides=(2, 2), padding=(1, 1, 1, 2), transposed=True)
    assert outside(written(conv).body) == []


def test_transforms_keep_the_error_of_direct_sums():
    """Of the largest result, in the mean square: F(2, 3) sums up nine times fewer terms."""
    conv = plain(sizes=(28, 28), channels=64, filters=64)
    func, arrays = conv.func(), conv.arrays()
    (expected,) = conv.expected(arrays)
    errors = {}
    for form, seen, tiles in ways(read_convolution(func), machine_of(load_profile("llvm"))):
        writer = form(func, seen, tiles, machine_of(load_profile("llvm")))
        panels = {writer.weights.source: (writer.weights.buffer, writer.weights.how)}
        kernel = finished(func.with_body(writer.run()), panels)
        given = [arrays[0], writer.weights.how.of(arrays[1])]
        (got,) = call(compile_cpu(kernel), given, [poisoned(expected.shape, conv.dtype)])
        errors[form] = np.sqrt(np.square(got - expected).mean()) / np.abs(expected).max()
    assert set(errors) == {Winograd, FilterLanes}
    assert errors[Winograd] <= 2 * errors[FilterLanes]


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    "change",
    [
        {"exact": True},
        {"constant": False},
        {"strides": (2, 2)},
        {"dilation": (2, 2)},
        {"data_layout": "NHWC"},
        {"channels": 8},
        {"channels": 1024, "filters": 1024},
    ],
    ids=lambda change: "_".join(change),
)
def test_transforms_are_for_constant_taps_of_neighbours_and_policies_that_let_them_round(change):
    conv = plain(sizes=(14, 14), channels=64, filters=64)
    assert is_transformed(written(conv))
    assert not is_transformed(written(replace(conv, **change)))


def test_transformed_panels_are_told_by_numbers():
    how = Panels((), (2, 3, 1), (0,), 16, widened=(2, 3))
    assert Panels.read(how.numbers()) == how
    weights = np.random.default_rng(0).standard_normal((20, 5, 3, 3)).astype("float32")
    panels = how.of(weights)
    assert panels.shape == how.shape(weights.shape) == (2, 4 * 4 * 5, 16)
    np.testing.assert_array_equal(panels[1, :5, 3], weights[19, :, 0, 0])
    middle = panels[0].reshape(4, 4, 5, 16)[1, 1, 2, 7]
    np.testing.assert_allclose(middle, weights[7, 2].sum() / 4, rtol=1e-5)


def is_transformed(kernel: tirx.PrimFunc) -> bool:
    """Whether a kernel takes transformed weights."""
    return any(how.widened for how in wanted_panels(kernel).values())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("machine", [Machine(32, 16, 2), Machine(16, 32, 2)], ids=["AVX2", "NEON"])
@pytest.mark.parametrize(
    "name", ["filters", "positions", "depthwise_strided", "depthwise_by_channels", "winograd"]
)
def test_other_vectors(name, machine):
    conv = FORMS[name]
    func = conv.func()
    kernel = write_convolution(func, read_convolution(func), machine)
    check(conv, kernel)


@pytest.mark.parametrize(
    "conv",
    [
        plain(kernel=(1, 1), padding=(0,) * 4, channels=8, filters=64, sizes=(40, 40)),
        plain(sizes=(3, 3), channels=3),
        plain(sizes=(10, 10), channels=64, filters=64, groups=64),
    ],
    ids=["few_terms", "little_work", "short_rows"],
)
def test_what_other_loops_do_as_well_is_left_to_them(conv):
    func = conv.func()
    with pytest.raises(Unsupported):
        write_convolution(func, read_convolution(func), machine_of(load_profile("llvm")))
    check(conv)


def test_sums_of_integers_are_left_to_other_loops():
    conv = plain(sizes=(20, 20), dtype="int32", channels=32)
    func = conv.func()
    with pytest.raises(Unsupported, match="int32"):
        write_convolution(func, read_convolution(func), machine_of(load_profile("llvm")))


def test_a_block_of_a_residual_network_is_planned_as_two_kernels():
    """Both convolutions take batch norm, the residual and the activation with them."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = torch.nn.ModuleList(
                torch.nn.Conv2d(32, 32, 3, padding=1, bias=False) for _ in range(2)
            )
            self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(32) for _ in range(2))

        def forward(self, x):
            y = torch.relu(self.norms[0](self.convs[0](x)))
            return torch.relu(self.norms[1](self.convs[1](y)) + x)

    x = torch.randn(1, 32, 28, 28)
    block = Block().eval()
    compiled = tvm_fusion.compile(block, "llvm", example_inputs=(x,))
    assert [g.kernel_class for g in compiled.report.groups] == ["convolution", "convolution"]
    np.testing.assert_allclose(compiled(x).numpy(), block(x).detach().numpy(), atol=1e-5)
