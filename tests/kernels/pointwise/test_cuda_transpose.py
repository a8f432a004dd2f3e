"""Transposing CUDA kernels: numbers on the emulator, bank conflicts, widths, resources, plans."""

import dataclasses
import itertools
import re
import subprocess

import ml_dtypes
import numpy as np
import pytest
from tvm import relax, tirx
from tvm.relax import op

import tvm_fusion
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.pointwise.kernel import emit_pointwise
from tvm_fusion.kernels.program.analysis import analyze
from tvm_fusion.kernels.program.expr import bytes_of
from tvm_fusion.kernels.registry import family
from tvm_fusion.kernels.transpose.kernel import (
    WRITER,
    DirectConfig,
    TransposeConfig,
    emit_transpose,
    transpose_configs,
    wants_tiles,
    write_transpose_versions,
)
from tvm_fusion.kernels.transpose.layout import Layout, bank_conflict
from tvm_fusion.kernels.transpose.plan import staged_elements
from tvm_fusion.plan.group_view import GroupView
from tvm_fusion.plan.refusal import RefusalCode
from tvm_fusion.runtime.build.version_names import versions_among

from ...benchmarks import workloads
from ...support.cuda_on_cpu import compile_cubins, cuda_source, lower, run_cuda_on_cpu
from ...support.graphs import module, plan_of
from ...support.kernel_cases import Case, assert_close, fuse
from ...support.kernel_checks import assert_right

H200 = load_profile("nvidia_h200")


def turned(*axes):
    """relu(permute(x) + y)."""

    def emit(bb, x, y):
        t = bb.emit(op.permute_dims(x, list(axes)))
        return op.nn.relu(bb.emit(op.add(t, y)))

    return emit


def turned_of(*axes):
    return lambda x, y: [np.maximum(x.transpose(axes) + y, 0)]


def case_of(axes, shape, dtype="float16"):
    """relu(permute(x) + y) for an x of `shape`."""
    inputs = ((shape, dtype), (tuple(shape[a] for a in axes), dtype))
    name = f"{dtype}_{'x'.join(map(str, shape))}_to_{''.join(map(str, axes))}"
    return Case(name, turned(*axes), inputs, turned_of(*axes))


def two_axes(bb, x, y, z):
    """Inputs that are consecutive along three different axes."""
    a = bb.emit(op.permute_dims(x, [2, 0, 1]))
    b = bb.emit(op.permute_dims(y, [0, 2, 1]))
    return op.add(bb.emit(op.multiply(a, b)), z)


def two_inputs(bb, x, y):
    """Both transposed, in different dtypes."""
    a = bb.emit(op.permute_dims(bb.emit(op.astype(x, "float32")), [1, 0]))
    b = bb.emit(op.permute_dims(bb.emit(op.astype(y, "float32")), [1, 0]))
    return op.astype(bb.emit(op.multiply(a, b)), "float16")


def two_outputs(bb, x, y):
    s = bb.emit(op.add(bb.emit(op.permute_dims(x, [1, 0])), y))
    return relax.Tuple([s, bb.emit(op.tanh(s))])


def biases(bb, x, b, c):
    """A bias along the columns and one along the rows."""
    s = bb.emit(op.add(bb.emit(op.permute_dims(x, [0, 2, 1])), b))
    return op.add(s, c)


def channels_last(bb, x, b):
    t = bb.emit(op.permute_dims(bb.emit(op.nn.relu(x)), [0, 2, 3, 1]))
    return op.add(t, b)


def concat_columns(bb, x, y):
    return op.concat([bb.emit(op.permute_dims(x, [1, 0])), y], axis=1)


def concat_rows(bb, x, y):
    return op.concat([y, bb.emit(op.permute_dims(x, [1, 0]))], axis=0)


def slice_of_turned(bb, x, y):
    t = bb.emit(op.permute_dims(x, [1, 0]))
    return op.add(bb.emit(op.strided_slice(t, [0, 1], [8, 3], [40, 43])), y)


def split_heads(bb, x):
    """[B, S, H * D] -> [B, H, D, S], the keys of an attention."""
    b, s, w = (int(extent) for extent in x.ty.shape)
    heads = bb.emit(op.reshape(op.negative(x), (b, s, 3, w // 3)))
    return op.permute_dims(heads, [0, 2, 3, 1])


def with_its_transpose(bb, x, y):
    """Outputs over different axes: one wants tiles, the other does not."""
    return relax.Tuple([bb.emit(op.exp(x)), bb.emit(op.permute_dims(bb.emit(op.exp(y)), [1, 0]))])


def two_transposes(bb, x, y):
    """Of different sizes, with nothing in common."""
    return relax.Tuple([bb.emit(op.permute_dims(bb.emit(op.exp(v)), [1, 0])) for v in (x, y)])


def turned_mask(bb, mask, x, y):
    return op.where(bb.emit(op.permute_dims(mask, [1, 0])), x, y)


def picked_rows(bb, x, y, rows):
    taken = bb.emit(op.take(y, rows, axis=0))
    return op.add(bb.emit(op.permute_dims(x, [1, 0])), taken)


def to_and_fro(bb, x):
    t = bb.emit(op.exp(bb.emit(op.permute_dims(x, [1, 0]))))
    return op.permute_dims(t, [1, 0])


def f16(*shape):
    return (shape, "float16")


def f32(*shape):
    return (shape, "float32")


FIVE = (3, 12, 2, 10, 16)
PERMUTATIONS = [
    *[case_of(p, (12, 20, 16)) for p in itertools.permutations(range(3)) if p[-1] != 2],
    *[case_of(p, (3, 8, 5, 24)) for p in [(3, 0, 1, 2), (0, 3, 1, 2), (1, 3, 2, 0), (2, 3, 0, 1)]],
    *[case_of(p, FIVE) for p in [(4, 3, 2, 1, 0), (0, 4, 1, 3, 2), (2, 4, 0, 1, 3)]],
]
DTYPES = [
    case_of((1, 0), (96, 72), dtype)
    for dtype in ("float16", "bfloat16", "float32", "int8", "int32")
]
SIZES = [
    case_of((1, 0), shape, dtype)
    for shape, dtype in [
        ((2, 40), "float16"),
        ((2, 2), "float16"),
        ((63, 127), "float16"),
        ((70, 45), "float32"),
        ((129, 64), "float16"),
        ((64, 131), "int8"),
        ((3, 300), "float16"),
        ((300, 3), "float16"),
        ((68, 100), "bfloat16"),
    ]
]
OTHERS = [
    Case(
        "axes_p_and_q",
        two_axes,
        (f16(20, 24, 12), f16(12, 24, 20), f16(12, 20, 24)),
        lambda x, y, z: [x.transpose(2, 0, 1) * y.transpose(0, 2, 1) + z],
    ),
    Case("two_dtypes", two_inputs, (f16(48, 40), f32(48, 40)), lambda x, y: [(x * y).T]),
    Case(
        "bytes_and_floats", two_inputs, (((48, 40), "int8"), f32(48, 40)), lambda x, y: [(x * y).T]
    ),
    Case(
        "two_outputs",
        two_outputs,
        (f16(66, 80), f16(80, 66)),
        lambda x, y: [x.T + y, np.tanh(x.T + y)],
    ),
    Case(
        "biases",
        biases,
        (f16(2, 40, 24), f16(40), f16(24, 1)),
        lambda x, b, c: [x.transpose(0, 2, 1) + b + c],
    ),
    Case(
        "channels_last",
        channels_last,
        (f16(2, 40, 6, 12), f16(40)),
        lambda x, b: [np.maximum(x, 0).transpose(0, 2, 3, 1) + b],
    ),
    Case(
        "three_channels_last",
        channels_last,
        (f16(2, 3, 8, 12), f16(3)),
        lambda x, b: [np.maximum(x, 0).transpose(0, 2, 3, 1) + b],
    ),
    case_of((0, 3, 1, 2), (2, 8, 12, 3)),
    case_of((0, 2, 3, 1), (2, 3, 8, 12)),
    case_of((0, 2, 3, 1), (2, 4, 5, 9), "float32"),
    case_of((0, 3, 1, 2), (1, 7, 9, 4), "int8"),
    case_of((1, 0), (300, 3)),
    case_of((0, 2, 1), (70, 3, 4)),
    case_of((0, 2, 1), (40, 8, 8)),
    Case(
        "short_concat",
        concat_rows,
        (f16(24, 3), f16(1, 24)),
        lambda x, y: [np.concatenate([y, x.T], 0)],
    ),
    Case(
        "concat_columns",
        concat_columns,
        (f16(24, 40), f16(40, 16)),
        lambda x, y: [np.concatenate([x.T, y], 1)],
    ),
    Case(
        "concat_rows",
        concat_rows,
        (f16(24, 40), f16(16, 24)),
        lambda x, y: [np.concatenate([y, x.T], 0)],
    ),
    Case(
        "concat_rows_between_vectors",
        concat_rows,
        (f16(24, 40), f16(13, 24)),
        lambda x, y: [np.concatenate([y, x.T], 0)],
    ),
    Case(
        "slice",
        slice_of_turned,
        (f16(48, 56), f16(32, 40)),
        lambda x, y: [x.T[8:40, 3:43] + y],
    ),
    Case(
        "split_heads",
        split_heads,
        (f16(2, 40, 48),),
        lambda x: [-x.reshape(2, 40, 3, 16).transpose(0, 2, 3, 1)],
    ),
    Case(
        "two_transposes",
        two_transposes,
        (f16(40, 72), f32(24, 130)),
        lambda x, y: [np.exp(x).T, np.exp(y).T],
    ),
    Case(
        "bool_mask",
        turned_mask,
        (((40, 24), "bool"), f16(24, 40), f16(24, 40)),
        lambda mask, x, y: [np.where(mask.T, x, y)],
    ),
    Case(
        "picked_rows",
        picked_rows,
        (f16(40, 30), f16(7, 40), ((30,), "int64")),
        lambda x, y, rows: [x.T + y[rows]],
    ),
    Case(
        "siblings",
        with_its_transpose,
        (f16(40, 24), f16(24, 72)),
        lambda x, y: [np.exp(x), np.exp(y).T],
    ),
]


def check(case, config=None, exact=False):
    """Emits, runs on the emulator, compares."""
    func = case.func()
    program = analyze(func, exact=exact)
    assert wants_tiles(program, H200)
    kernel = emit_transpose(program, H200, config)
    assert_right(case, func, kernel)


@pytest.mark.one_in(30)
@pytest.mark.parametrize("case", [*PERMUTATIONS, *DTYPES, *SIZES, *OTHERS], ids=lambda c: c.name)
def test_a_kernel_computes_what_float64_says(case):
    check(case)


TILE = TransposeConfig(axis=0)
TILES = transpose_configs(analyze(DTYPES[0].func()), H200)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "config",
    [
        TILE,
        *TILES[1:],
        dataclasses.replace(TILE, early=False),
        dataclasses.replace(TILE, group=2),
        dataclasses.replace(TILE, lanes=4, stack=2),
        dataclasses.replace(TILE, lanes=16, stack=1, width=4),
        dataclasses.replace(TILE, lanes=32, stack=4, width=1, threads=128),
        dataclasses.replace(TILE, stack=4, rows=128, threads=128),
    ],
    ids=str,
)
def test_every_configuration_computes_the_same(config):
    check(DTYPES[0], config)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["int64", "float64"])
@pytest.mark.parametrize("lanes", [8, 32])
def test_numbers_of_8_bytes_are_moved_whole(dtype, lanes):
    """Also where a line of the tile moves on by 4 bytes, which no index of 8 bytes can say."""
    case = Case(f"{dtype} by {lanes}", negated, (((33, 27), dtype),), lambda x: [-x.T])
    check(case, TransposeConfig(axis=0, lanes=lanes, stack=1, width=1))


def negated(bb, x):
    return op.negative(bb.emit(op.permute_dims(x, [1, 0])))


def widened(dtype):
    """A transpose whose results are wider than what is loaded."""
    return lambda bb, x: op.astype(bb.emit(op.permute_dims(x, [1, 0])), dtype)


FEW_VECTORS = [  # a tile of fewer loads than the block has threads
    case_of((1, 0), (2, 40)),
    *(
        Case(f"{d}_{wide}", widened(wide), ((shape, d),), lambda x: [x.T])
        for d, wide, shape in (("float16", "float64", (8, 24)), ("int8", "int64", (8, 48)))
    ),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", FEW_VECTORS, ids=lambda c: c.name)
def test_no_thread_reads_beyond_a_tile(case):
    configs = transpose_configs(analyze(case.func()), H200)
    assert configs
    for config in configs:
        check(case, config)


BLOCKS = [
    case_of((1, 0), (64, 128)),
    case_of((0, 2, 1), (3, 64, 96), "float32"),
    case_of((0, 2, 1), (2, 128, 64), "bfloat16"),
]


@pytest.mark.parametrize("case", BLOCKS, ids=lambda c: c.name)
def test_blocks_in_registers_compute_the_same(case):
    config = transpose_configs(analyze(case.func()), H200)[-1]
    assert isinstance(config, DirectConfig)
    check(case, config)


def test_blocks_in_registers_need_axes_that_they_divide():
    program = analyze(DTYPES[0].func())
    with pytest.raises(Unsupported, match="do not divide the axes"):
        emit_transpose(program, H200, DirectConfig(0, 128, 8, 8, lanes=8))
    with pytest.raises(Unsupported, match="do not divide the axes"):
        emit_transpose(program, H200, DirectConfig(0, 128, 8, 16))


def test_exact_rounding_is_kept():
    check(OTHERS[0], exact=True)


def test_a_symbolic_batch_is_compiled_once_for_all_sizes():
    n = tirx.Var("n", "int64")
    func = fuse(turned(0, 2, 1), ((n, 24, 40), "float16"), ((n, 40, 24), "float16"))
    kernel = emit_transpose(analyze(func), H200)
    assert "__shared__" in cuda_source(kernel)
    rng = np.random.default_rng(1)
    for batch in (0, 1, 3):
        x, y = (rng.standard_normal(s).astype("f2") for s in ((batch, 24, 40), (batch, 40, 24)))
        out = np.full_like(y, np.nan)
        run_cuda_on_cpu(kernel, [x, y, out])
        assert_close(out, turned_of(0, 2, 1)(x.astype("f8"), y.astype("f8"))[0], "float16")


# ---- which form


@pytest.mark.parametrize(
    ("shape", "form"),
    [
        ((64, 512, 512, 3), DirectConfig),
        ((5000, 8, 8), DirectConfig),
        ((5000, 16, 16), TransposeConfig),
        ((5000, 16, 8), type(None)),
    ],
)
def test_short_axes_are_held_in_registers_and_never_fill_a_tile_with_nothing(shape, form):
    axes = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    configs = transpose_configs(analyze(case_of(axes, shape).func()), H200)
    assert isinstance(configs[0] if configs else None, form)


@pytest.mark.parametrize(
    ("emit", "inputs"),
    [
        (to_and_fro, (f16(32, 48),)),
        (turned(0, 2, 1, 3), (f16(2, 3, 5, 16), f16(2, 5, 3, 16))),
    ],
    ids=["transposes that cancel", "the last axis stays"],
)
def test_programs_without_strided_loads_become_plain_pointwise_kernels(emit, inputs):
    program = analyze(fuse(emit, *inputs))
    assert not wants_tiles(program, H200)
    assert cuda_source(emit_transpose(program, H200)) == cuda_source(emit_pointwise(program, H200))


def test_the_axis_with_most_bytes_gets_the_tile():
    sizes = (f32(20, 24, 12), f16(12, 24, 20), f16(12, 20, 24))

    def emit(bb, x, y, z):
        return two_axes(bb, bb.emit(op.astype(x, "float16")), y, z)

    program = analyze(fuse(emit, *sizes))
    assert transpose_configs(program, H200)[0].axis == 0
    assert len(staged_elements(program, 0, 8)) == 1


@pytest.mark.parametrize(
    ("shape", "vector", "piece"),
    [((64, 96), 8, 16), ((64, 92), 4, 8), ((64, 90), 2, 4), ((64, 91), 1, 2)],
)
def test_loads_along_the_row_axis_are_as_wide_as_alignment_allows(shape, vector, piece):
    program = analyze(fuse(turned(1, 0), f16(*shape), f16(*shape[::-1])))
    (item,) = staged_elements(program, 0, 8).values()
    assert (item.vector, item.piece) == (vector, piece)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"axis": 1}, "no row axis"),
        ({"width": 64}, "cross the end"),
        ({"rows": 12}, "do not divide"),
        ({"threads": 1024}, "evenly"),
        ({"group": 3}, "multiple of 3"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(change, why):
    with pytest.raises(Unsupported, match=why):
        emit_transpose(analyze(DTYPES[0].func()), H200, dataclasses.replace(TILE, **change))


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        (("n", "m"), ["multiples of 8 beyond", "multiples of 8 rows beyond", "up to 8"]),
        (("n", 40), ["multiples of 8 rows beyond", "up to 8"]),
        ((5, "n", 72), ["multiples of 8 rows beyond", "up to 8"]),
        ((24, "n"), ["multiples of 8 beyond", "up to 8"]),
    ],
    ids=str,
)
def test_tiles_along_symbolic_axes_are_right_at_all_sizes(shape, names):
    n, m = (tirx.Var(name, "int64") for name in "nm")
    named = [{"n": n, "m": m}.get(e, e) for e in shape]
    last = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    func = fuse(turned(*last), ([named[a] for a in last], "float16"), (named, "float16"))
    written = write_transpose_versions(WRITER, func, H200, load_policy(None))
    lowered = lower(written)
    assert sorted([*versions_among([lowered.kernel, *(v.kernel for v in lowered.versions)])]) == [
        "beyond",
        *names,
    ]
    rng = np.random.default_rng(2)
    for sizes in ((0, 5), (1, 1), (7, 9), (8, 8), (9, 63), (16, 65), (65, 72), (72, 33), (136, 16)):
        known = [dict(zip("nm", sizes, strict=True)).get(e, e) for e in shape]
        x, y = (rng.standard_normal(s).astype("f2") for s in ([known[a] for a in last], known))
        out = np.full_like(y, np.nan)
        run_cuda_on_cpu(lowered, [x, y, out])
        assert_close(out, turned_of(*last)(x.astype("f8"), y.astype("f8"))[0], "float16")


def test_registers_hold_no_axis_of_symbolic_length():
    n = tirx.Var("n", "int64")
    program = analyze(fuse(turned(1, 0), ((n, 24), "float16"), ((24, n), "float16")))
    assert wants_tiles(program, H200)
    with pytest.raises(Unsupported, match="not known"):
        emit_transpose(program, H200, DirectConfig(0, 256, 1, 2))


def test_a_program_with_reductions_is_refused():
    with pytest.raises(Unsupported, match="reduces"):
        emit_transpose(analyze(fuse(lambda bb, x: op.sum(x, axis=-1), f16(4, 8))), H200)


def test_small_tensors_are_cut_into_smaller_tiles():
    large, small = (analyze(case_of((1, 0), (n, n)).func()) for n in (4096, 512))
    assert (transpose_configs(large, H200)[0].rows, transpose_configs(small, H200)[0].rows) == (
        64,
        32,
    )


# ---- shared memory


def test_conflicts_are_counted_as_the_hardware_splits_an_access():
    assert bank_conflict(range(0, 128, 4), 4) == 1
    assert bank_conflict(range(0, 4096, 128), 4) == 32
    assert bank_conflict([0] * 32, 4) == 1
    assert bank_conflict(range(0, 64, 2), 2) == 1
    assert bank_conflict(range(0, 512, 16), 16) == 1
    assert bank_conflict(range(0, 1024, 32), 16) == 2
    assert bank_conflict(range(0, 256, 8), 8) == 1


@pytest.mark.parametrize("size", [1, 2, 4])
def test_whole_vectors_meet_in_no_bank(size):
    width = 16 // size
    layout = Layout(size, 128 // size, 8 * width, width, lanes=8, stack=4 // size)
    assert (layout.write_conflicts(width), layout.read_conflicts()) == (1, 1)
    assert layout.pitch == 128


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32"])
@pytest.mark.parametrize("shape", [(64, 96), (256, 512), (63, 96), (96, 63), (90, 60), (1000, 300)])
def test_chosen_layouts_meet_at_most_twice_in_a_bank(shape, dtype):
    program = analyze(fuse(turned(1, 0), (shape, dtype), (shape[::-1], dtype)))
    config = transpose_configs(program, H200)[0]
    (item,) = staged_elements(program, config.axis, config.width).values()
    layout = config.layout(bytes_of(dtype))
    assert layout.write_conflicts(item.vector) <= 2
    assert layout.read_conflicts() == 1


# ---- what becomes of the code


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8"])
def test_accesses_take_16_bytes(dtype):
    shape = (8192, 8192)
    kernel = emit_transpose(analyze(fuse(turned(1, 0), (shape, dtype), (shape, dtype))), H200)
    ptx = _ptx(kernel)
    loads, stores = (re.findall(rf"\b{what}\S*", ptx) for what in ("ld.global", "st.global"))
    assert all(".v4." in access for access in loads + stores)
    assert loads
    assert stores
    barrier = ptx.index("bar.sync")
    assert ptx.rindex("ld.global") < barrier


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("axes", "shape"), [((0, 2, 3, 1), (2, 3, 64, 64)), ((0, 3, 1, 2), (2, 64, 64, 3))]
)
def test_accesses_of_short_axes_take_16_bytes_too(axes, shape):
    program = analyze(case_of(axes, shape).func())
    assert isinstance(transpose_configs(program, H200)[0], DirectConfig)
    ptx = _ptx(emit_transpose(program, H200))
    assert "ld.shared" not in ptx
    accesses = re.findall(r"\b(?:ld|st)\.global\S*", ptx)
    assert len(accesses) == 9
    assert all(".v4." in access for access in accesses)


def _ptx(kernel):
    command = ["nvcc", "-arch=sm_90a", "-ptx", "-O3", "--use_fast_math", "-w", "-x", "cu", "-"]
    source = lower(kernel).source
    run = subprocess.run([*command, "-o", "-"], input=source, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8"])
def test_all_configurations_become_cubins_without_spills(dtype):
    program = analyze(case_of((1, 0), (8192, 8192), dtype).func())
    assert_no_spills(
        {
            f"{dtype}_{number}": emit_transpose(program, H200, config)
            for number, config in enumerate(transpose_configs(program, H200))
        }
    )


# Always: all configurations of one type, above.
@pytest.mark.nightly
def test_kernels_become_cubins_without_spills():
    kernels = {c.name: emit_transpose(analyze(c.func()), H200) for c in [*SIZES, *OTHERS]}
    huge = analyze(case_of((1, 0), (70000, 40000)).func())
    assert huge.index_dtype == "int64"
    kernels["huge"] = emit_transpose(huge, H200)
    assert_no_spills(kernels)


def assert_no_spills(kernels):
    found = compile_cubins(kernels)
    assert len(found) == len(kernels)
    assert all(r.spill_bytes == 0 for r in found)


def test_equal_programs_give_equal_code():
    sources = {cuda_source(emit_transpose(analyze(DTYPES[0].func()), H200)) for _ in range(2)}
    assert len(sources) == 1


# ---- the class


def relu_add(bb, x, y):
    return turned(1, 0)(bb, x, y)


def several_outputs(bb, x, y):
    s = bb.emit(op.add(bb.emit(op.permute_dims(x, [1, 0])), y))
    return s, bb.emit(op.nn.relu(s))


def permute_heads(bb, x):
    return op.exp(bb.emit(op.permute_dims(x, [0, 2, 1, 3])))


SQUARE = ((4096, 4096), "float16")


@pytest.mark.parametrize(
    ("emit", "inputs", "name"),
    [
        (relu_add, (SQUARE, SQUARE), "transpose"),
        (several_outputs, (SQUARE, SQUARE), "transpose"),
        (channels_last, (((32, 320, 64, 64), "float16"), ((320,), "float16")), "transpose"),
        (permute_heads, (((2, 16, 2048, 128), "float16"),), "pointwise"),
    ],
)
def test_transposes_and_what_surrounds_them_are_one_group(emit, inputs, name):
    (group,) = plan_of(module(emit, *inputs)).plan.groups
    assert group.kernel_class == name


def test_a_group_that_turns_nothing_is_left_to_pointwise():
    planned = plan_of(module(lambda bb, x: op.exp(x), SQUARE))
    view = kernel_views(planned)[0]
    refusal = family("transpose").accepts(view, H200, load_policy(None))
    assert refusal.code is RefusalCode.NOT_PROFITABLE


def test_a_group_with_a_reduction_is_no_transpose():
    planned = plan_of(module(lambda bb, x: op.sum(x, axis=-1), ((64, 64), "float32")))
    view = kernel_views(planned)[0]
    refusal = family("transpose").accepts(view, H200, load_policy(None))
    assert refusal.code is RefusalCode.REDUCTION


def kernel_views(planned):
    """The operators of a plan, each as a group."""
    return [GroupView(planned.graph, (op.id,), op.outputs) for op in planned.graph.ops]


def test_the_class_writes_its_configurations():
    kernel = family("transpose")
    func, policy = DTYPES[0].func(), load_policy(None)
    configs = [config for _, config in kernel.ranked(func, H200, policy)]
    assert configs == TILES
    sources = {cuda_source(kernel.write(func, H200, policy, c)) for c in (None, *configs[:2])}
    assert len(sources) == 2


def test_a_tile_holds_an_area_of_a_warp_at_least():
    """8 columns of 4096 rows beside as many elements that are not turned."""

    def emit(bb, x, y, m):
        kept = bb.emit(op.where(m, x, y))
        turned = bb.emit(op.permute_dims(kept, [1, 0]))
        return relax.Tuple([turned, bb.emit(op.multiply(kept, y))])

    shape = (8, 4096)
    program = analyze(fuse(emit, (shape, "float32"), (shape, "float32"), (shape, "bool")))
    configs = [c for part in (program, *program.siblings) for c in transpose_configs(part, H200)]
    tiles = [config for config in configs if isinstance(config, TransposeConfig)]
    assert tiles
    assert min(config.areas for config in tiles) >= 1
    assert min(config.threads for config in tiles) >= 32
    emit_transpose(program, H200)


def test_the_benchmark_is_one_launch_of_the_class():
    work = workloads.make("transpose_add", "cpu", "float16", scale=1 / 32)
    compiled = tvm_fusion.compile((work.module, work.inputs), "nvidia_h200", verify=False)
    assert compiled.report.launches.fused == 1
    assert [group.kernel_class for group in compiled.report.groups] == ["transpose"]
    assert not any(group.fallback for group in compiled.report.groups)


def test_half_precision_inputs_are_summed_in_float32():
    x = np.full((8, 16), 1 / 3, ml_dtypes.bfloat16)
    y = np.full((16, 8), 256, ml_dtypes.bfloat16)
    out = np.full_like(y, np.nan)
    func = fuse(turned(1, 0), ((8, 16), "bfloat16"), ((16, 8), "bfloat16"))
    run_cuda_on_cpu(emit_transpose(analyze(func), H200), [x, y, out])
    assert (out.astype("f4") == 256).all()
