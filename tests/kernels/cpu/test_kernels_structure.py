"""What CPU kernels look like: how many loops, what stays in a tile, what is computed where."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call, TensorLoad
from tvm.relax import op
from tvm.tirx import ForKind

from tvm_fusion.kernels.cpu.contraction.task_tiles import even_parts, register_tile
from tvm_fusion.kernels.cpu.machine import Machine, machine_of
from tvm_fusion.kernels.cpu.stages import lanes
from tvm_fusion.kernels.cpu.write import write_cpu

from ...support.cpu_cases import add_rms_norm, attention, layer_norm, scalar_chain
from ...support.helpers_tir import call, compile_cpu, poisoned
from ...support.kernel_cases import fuse, numpy_dtype

F32, F16 = "float32", "float16"


@dataclass
class Shape:
    """What a kernel consists of."""

    parallel: int = 0
    vectors: int = 0
    shared: list[int] = field(default_factory=list)
    private: list[int] = field(default_factory=list)
    depths: dict[str, int] = field(default_factory=dict)
    branches: int = 0


def shape_of(func: tirx.PrimFunc) -> Shape:
    """Count loops and allocations; `depths` holds the loops around stores, by buffer."""
    shape = Shape()

    def visit(stmt, depth, inside):
        if isinstance(stmt, tirx.SeqStmt):
            for s in stmt.seq:
                visit(s, depth, inside)
        elif isinstance(stmt, tirx.For):
            parallel = stmt.kind == ForKind.PARALLEL
            shape.parallel += parallel
            shape.vectors += stmt.kind == ForKind.VECTORIZED
            visit(stmt.body, depth + 1, inside or parallel)
        elif isinstance(stmt, tirx.AllocBuffer):
            elements = int(np.prod([int(n) for n in stmt.buffer.ty.shape]))
            (shape.private if inside else shape.shared).append(elements)
        elif isinstance(stmt, tirx.BufferStore):
            shape.depths[stmt.buffer.name] = depth

    visit(func.body, 0, False)

    def branch(e):
        shape.branches += str(getattr(e.op, "name", "")).endswith("if_then_else")

    tvm_ffi.structural_walk(func.body, [(Call, branch)])
    return shape


def kernel_of(emit, *inputs) -> tirx.PrimFunc:
    return write_cpu(fuse(emit, *inputs))


def test_pointwise_operators_become_one_loop_without_temporaries():
    def emit(bb, x, y):
        total = bb.emit(op.add(bb.emit(op.multiply(x, y)), x))
        return relax.Tuple([bb.emit(op.nn.relu(total)), bb.emit(op.negative(total))])

    shape = shape_of(kernel_of(emit, ((512, 1024), F32), ((512, 1024), F32)))
    assert shape.parallel == 1
    assert shape.shared == shape.private == []


def test_small_kernels_stay_on_one_core():
    shape = shape_of(kernel_of(lambda bb, x: op.nn.relu(x), ((8, 64), F32)))
    assert shape.parallel == 0


def test_a_softmax_keeps_one_row_at_a_time():
    shape = shape_of(kernel_of(lambda bb, x: op.nn.softmax(x), ((1024, 1000), F32)))
    assert shape.parallel == 1
    assert shape.shared == []
    assert max(shape.private) <= 1000


def test_a_row_is_read_once_for_both_outputs_of_a_norm():
    inputs = ((1024, 1000), F32), ((1024, 1000), F32), ((1000,), F32)
    shape = shape_of(kernel_of(add_rms_norm, *inputs))
    assert shape.parallel == 1
    assert shape.shared == []


def test_the_lanes_of_a_stage_are_chosen_once(monkeypatch):
    asked, choose = [], lanes.lane_axis
    monkeypatch.setattr(
        lanes, "lane_axis", lambda stages, axes: asked.append(stages) or choose(stages, axes)
    )
    kernel_of(layer_norm, ((1024, 1000), F32), ((1000,), F32), ((1000,), F32))
    alone = [stages[0] for stages in asked if len(stages) == 1]
    assert len(alone) == len(set(alone)) > 2


def test_attention_never_holds_all_scores():
    heads = (1, 8, 256, 64)
    inputs = [(heads, F32)] * 3 + [((1, 1, 256, 256), F32)]
    shape = shape_of(kernel_of(attention, *inputs))
    assert 8 * 256 * 256 not in shape.shared
    assert max(shape.private) < 256 * 256


def test_a_chain_on_row_scalars_is_not_repeated_for_every_column():
    func = kernel_of(scalar_chain, ((512, 1), F32), ((512, 4096), F32))
    exps_at = []

    def visit(stmt, depth):
        if isinstance(stmt, tirx.SeqStmt):
            for s in stmt.seq:
                visit(s, depth)
        elif isinstance(stmt, tirx.For):
            visit(stmt.body, depth + 1)
        elif "T.floor" in str(stmt):
            exps_at.append(depth)

    visit(func.body, 0)
    assert exps_at
    assert max(exps_at) < shape_of(func).depths["T_add_intermediate"]


def test_conditions_of_a_concatenation_leave_the_loops():
    func = kernel_of(
        lambda bb, x, y: op.concat([bb.emit(op.exp(x)), y], axis=1),
        ((64, 300), F32),
        ((64, 200), F32),
    )
    assert shape_of(func).branches == 0


def test_the_result_of_a_product_stays_in_its_tile():
    def emit(bb, x, w, b):
        return op.nn.gelu(bb.emit(op.add(bb.emit(op.matmul(x, w)), b)))

    shape = shape_of(kernel_of(emit, ((256, 512), F32), ((512, 2048), F32), ((2048,), F32)))
    assert 256 * 2048 not in shape.shared
    assert max(shape.private) <= 256 * 300


def test_short_loops_are_vectors():
    """LLVM would unroll them, and gather and scatter along the loop around them."""

    def epilogue(bb, x, w, y):
        return op.add(bb.emit(op.matmul(x, w)), y)

    def turned(bb, x):
        return op.permute_dims(bb.emit(op.nn.relu(x)), [1, 0, 2])

    def stored_as_vectors(kernel):
        loops = []
        tvm_ffi.structural_walk(kernel.body, [(tirx.For, loops.append)])
        vectors = [loop for loop in loops if loop.kind == ForKind.VECTORIZED]
        return any(store.buffer.same_as(kernel.params[-1]) for v in vectors for store in stores(v))

    def stores(loop):
        found = []
        tvm_ffi.structural_walk(loop.body, [(tirx.BufferStore, found.append)])
        return found

    shapes = ((64, 64), F32), ((64, 32), F32), ((64, 1), F32)
    assert stored_as_vectors(kernel_of(epilogue, *shapes))
    for length, wanted in ((6, False), (9, True), (32, True), (49, True), (1000, False)):
        assert stored_as_vectors(kernel_of(turned, ((8, 4, length), F32))) == wanted


@pytest.mark.parametrize("length", [5, 8, 9, 15, 17, 31, 49, 63, 65])
def test_short_rows_with_a_number_each_are_right(length):
    shapes = (3, 5, length), (3, 5, 1), (3, 1, length)
    rng = np.random.default_rng(length)
    arrays = [rng.standard_normal(shape).astype(F32) for shape in shapes]
    kernel = kernel_of(
        lambda bb, x, y, z: op.add(bb.emit(op.multiply(x, y)), z), *((s, F32) for s in shapes)
    )
    x, y, z = (a.astype("float64") for a in arrays)
    (got,) = call(compile_cpu(kernel), arrays, [poisoned(shapes[0], F32)])
    np.testing.assert_allclose(got, x * y + z, rtol=1e-5, atol=1e-6)


def test_a_right_operand_that_every_tile_needs_is_packed_once():
    def emit(bb, x, w):
        return op.nn.softmax(bb.emit(op.matmul(x, w)))

    shape = shape_of(kernel_of(emit, ((512, 256), F32), ((256, 1000), F32)))
    assert shape.parallel == 2
    [packed] = shape.shared
    assert 1000 * 256 <= packed <= 1008 * 256  # in panels, as wide as the machine's vectors say


def test_a_convolution_packs_windows_instead_of_storing_them_all():
    def emit(bb, x, w):
        return op.nn.conv2d(x, w, padding=(1, 1))

    shape = shape_of(kernel_of(emit, ((1, 64, 56, 56), F32), ((64, 64, 3, 3), F32)))
    assert all(n <= 64 * 58 * 58 for n in shape.shared)
    assert max(shape.private) <= 128 << 10


@pytest.mark.parametrize("length", [16, 49, 100, 1000])
def test_a_row_sum_runs_in_lanes(length):
    func = kernel_of(lambda bb, x: op.sum(x, axis=1), ((64, length), F32))
    assert shape_of(func).vectors > 0


@pytest.mark.parametrize(
    ("shape", "parts"),
    [((1024, 1024), 64), ((1021, 1024), 60), ((2, 3, 500, 512), 50), ((5, 200_009), 46)],
)
def test_a_long_sum_is_cut_for_several_cores_in_the_same_way_everywhere(shape, parts):
    func = fuse(lambda bb, x: op.sum(x), (shape, F32))
    found = shape_of(write_cpu(func))
    assert found.parallel == 1
    assert parts in found.shared


@pytest.mark.parametrize("shape", [(64, 64), (8, 1024, 1024)], ids=["little", "many_results"])
def test_a_sum_of_little_work_or_many_results_is_not_cut(shape):
    func = fuse(lambda bb, x: op.sum(x, axis=[-2, -1]), (shape, F32))
    assert not any(name.endswith("_parts") for name in shape_of(write_cpu(func)).depths)


@pytest.mark.parametrize(("rows", "is_cut"), [(2048, True), (255, False)])
def test_sums_of_few_columns_are_cut_by_rows_where_these_are_many(rows, is_cut):
    kernel = kernel_of(lambda bb, x: op.sum(x, axis=0), ((rows, 3000), F32))
    names = shape_of(kernel).depths
    assert any(name.endswith("_parts") for name in names) == is_cut
    assert is_cut == (3000 in shape_of(kernel).private)  # whole rows are added, one by one


@pytest.mark.parametrize(
    ("shape", "width"), [((16, 100, 700), 700), ((8, 512, 1000), 128), ((2, 64, 512), 128)]
)
def test_rows_that_are_read_again_are_whole_where_they_stay_near(shape, width):
    func = fuse(lambda bb, x: op.nn.softmax(x, 1), (shape, F32))
    with tvm.target.Target({"kind": "llvm", "mcpu": "skylake-avx512", "num-cores": 2}):
        assert max(shape_of(write_cpu(func)).private) == shape[1] * width


@pytest.mark.parametrize("shape", [(16, 100, 701), (9, 33, 517)])
def test_softmaxes_of_whole_columns_are_right(shape):
    kernel = compile_cpu(kernel_of(lambda bb, x: op.nn.softmax(x, 1), (shape, F32)))
    x = np.random.default_rng(0).standard_normal(shape, dtype=F32)
    wanted = np.exp(x.astype("float64"))
    (got,) = call(kernel, [x], [poisoned(shape, F32)])
    np.testing.assert_allclose(got, wanted / wanted.sum(1, keepdims=True), rtol=2e-6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [op.sum, op.max, op.argmax])
@pytest.mark.parametrize(
    ("shape", "axis"), [((1031, 517), 0), ((2, 300, 1001), 1), ((9, 64, 333), 1), ((40_003, 17), 0)]
)
def test_reductions_along_whole_rows_are_right(kind, shape, axis):
    kernel = compile_cpu(kernel_of(lambda bb, x: kind(bb.emit(op.abs(x)), axis), (shape, F32)))
    x = np.random.default_rng(0).standard_normal(shape, dtype=F32)
    dtype = "int64" if kind is op.argmax else F32
    wanted = getattr(np, kind.__name__)(np.abs(x.astype("float64")), axis)
    (got,) = call(kernel, [x], [poisoned(wanted.shape, dtype)])
    np.testing.assert_allclose(got, wanted, rtol=2e-5)


def test_transposed_reads_go_through_a_small_tile():
    func = kernel_of(lambda bb, x: op.permute_dims(x), ((2048, 2048), F32))
    assert max(shape_of(func).private) <= 64 * 64


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", [(64, 48), (1001, 99), (17, 16), (5, 70)])
@pytest.mark.parametrize("dtype", [F32, F16, "bfloat16", "int64", "bool"])
def test_transposing_copies_are_exact(shape, dtype):
    kernel = compile_cpu(kernel_of(lambda bb, x: op.permute_dims(x), (shape, dtype)))
    x = (np.arange(shape[0] * shape[1]).reshape(shape) % 251).astype(numpy_dtype(dtype))
    (got,) = call(kernel, [x], [poisoned(x.T.shape, dtype)])
    np.testing.assert_array_equal(got, x.T)


@pytest.mark.parametrize(
    "emit", [lambda bb, x: op.sum(bb.emit(op.exp(x)), 1), lambda bb, x: op.exp(x)]
)
def test_remainders_of_a_row_are_vectors_of_powers_of_two(emit):
    func = kernel_of(emit, ((64, 999), F32))
    loops = []
    tvm_ffi.structural_walk(func.body, [(tirx.For, lambda f: loops.append(f) and None)])
    lanes = [int(f.extent) for f in loops if f.kind == ForKind.VECTORIZED]
    assert len(set(lanes)) > 2
    assert all(n & (n - 1) == 0 for n in lanes)
    alone = [f for f in loops if f.kind == ForKind.SERIAL and not holds_a_loop(f)]
    assert all(int(f.extent) < 4 for f in alone)


def holds_a_loop(loop: tirx.For) -> bool:
    """Whether there is a loop within this one."""
    inside = []
    tvm_ffi.structural_walk(loop.body, [(tirx.For, lambda f: inside.append(f) and None)])
    return bool(inside)


def test_squares_are_turned_in_registers():
    func = kernel_of(lambda bb, x: op.permute_dims(x), ((512, 512), F32))
    edge = min(16, machine_of(None).lanes(4))
    turns = []
    tvm_ffi.structural_walk(func.body, [(tirx.Shuffle, lambda e: turns.append(e) and None)])
    assert len(turns) == edge * (edge.bit_length() - 1)


@pytest.mark.parametrize("cores", [1, 2, 16, 64])
def test_rows_are_computed_one_at_a_time(cores):
    """Also where a scalar of each row, as a mean, would be a vector across rows, and however many
    cores want a task.
    """

    def emit(bb, x, g, b):
        centred = bb.emit(op.subtract(x, bb.emit(op.mean(x, [-1], keepdims=True))))
        squares = bb.emit(op.mean(bb.emit(op.multiply(centred, centred)), [-1], keepdims=True))
        scale = bb.emit(op.rsqrt(bb.emit(op.add(squares, relax.const(1e-5)))))
        scaled = bb.emit(op.multiply(bb.emit(op.multiply(centred, scale)), g))
        return op.add(scaled, b)

    inputs = ((512, 768), F32), ((768,), F32), ((768,), F32)
    with tvm.target.Target({"kind": "llvm", "mcpu": "haswell", "num-cores": cores}):
        shape = shape_of(kernel_of(emit, *inputs))
    assert shape.parallel == 1
    assert shape.shared == []
    assert max(shape.private) <= 768


def test_short_rows_are_computed_several_at_a_time():
    inputs = ((4096, 32), F32), ((32,), F32), ((32,), F32)
    shape = shape_of(kernel_of(layer_norm, *inputs))
    assert 16 <= max(shape.private) <= 1024


def test_what_is_read_transposed_is_computed_in_its_own_order():
    def emit(bb, x, y):
        return op.permute_dims(bb.emit(op.multiply(bb.emit(op.exp(x)), y)))

    func = kernel_of(emit, ((512, 512), F32), ((512, 512), F32))
    shape = shape_of(func)
    assert shape.parallel == 1
    assert shape.private
    assert max(shape.private) <= 64 * 64


def test_half_precision_temporaries_are_float32():
    func = kernel_of(lambda bb, x: op.nn.softmax(x), ((1024, 1000), F16))
    dtypes = set()
    tvm_ffi.structural_walk(
        func.body, [(tirx.AllocBuffer, lambda a: dtypes.add(str(a.buffer.ty.dtype)) and None)]
    )
    assert dtypes == {F32}


def test_no_load_is_evaluated_where_its_condition_does_not_hold():
    """A load behind a pad stays under its condition: the buffer ends there."""
    func = kernel_of(lambda bb, x: op.nn.pad(x, (3, 0, 0, 0)), ((5, 7), F32))
    kernel = compile_cpu(func)
    page = np.full((5, 7), 2.0, F32)
    (got,) = call(kernel, [page], [poisoned((8, 7), F32)])
    np.testing.assert_array_equal(got, np.pad(page, ((3, 0), (0, 0))))
    loads = []
    tvm_ffi.structural_walk(func.body, [(TensorLoad, lambda e: loads.append(e) and None)])
    assert loads


MACHINES = [Machine(64, 32, 2), Machine(32, 16, 8), Machine(16, 32, 8), Machine(16, 16, 8)]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("rows", [1, 2, 7, 13, 100, None])
@pytest.mark.parametrize("columns", [1, 16, 17, 200, None])
def test_register_tiles_fit_the_registers(machine, rows, columns):
    tile = register_tile(machine, F32, rows, columns)
    assert tile.rows * tile.vectors + tile.vectors + 1 <= machine.vector_registers
    assert tile.rows <= (rows or tile.rows)
    assert columns is None or tile.columns < columns + tile.lanes


@pytest.mark.parametrize("machine", MACHINES)
def test_register_tiles_of_large_products_multiply_more_than_they_load(machine):
    tile = register_tile(machine, F32)
    assert tile.rows * tile.vectors > tile.rows + tile.vectors
    assert tile.rows * tile.vectors >= machine.vector_registers // 2


@pytest.mark.parametrize("length", [1, 2, 6, 7, 12, 13, 100, 101])
def test_rows_are_dealt_out_evenly(length):
    parts = even_parts(length, 6)
    assert sum(number * size for number, size in parts) == length
    assert max(size for _, size in parts) <= 6
    assert max(size for _, size in parts) - min(size for _, size in parts) <= 1


def test_kernels_are_written_for_the_threads_that_they_run_on():
    from dataclasses import replace

    from tvm_fusion.config import load_profile
    from tvm_fusion.host.threads import thread_count

    profile = load_profile("llvm")
    assert machine_of(replace(profile, num_sms=48)).cores == thread_count()
    assert machine_of(None).cores == thread_count()


@pytest.mark.parametrize(("columns", "copies"), [(64, False), (45, True)])
def test_whole_vectors_of_a_plain_product_are_stored_at_once(columns, copies):
    func = kernel_of(lambda bb, x, w: op.matmul(x, w), ((37, 70), F32), ((70, columns), F32))
    found = []
    tvm_ffi.structural_walk(func.body, [(tirx.AllocBuffer, found.append)])
    assert any(a.buffer.name.endswith("_tile") for a in found) == copies


MULTIPLY_ADDS = {
    "AVX2": ({"kind": "llvm", "mcpu": "haswell"}, r"vfmadd\d+ps\s.*%ymm", r"vfmadd\d+ss"),
    "NEON": (
        {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"]},
        r"fmla\s+v\d+\.4s",
        r"fmadd\s+s\d+",
    ),
}


@pytest.mark.parametrize("name", MULTIPLY_ADDS)
def test_products_are_vectors_on_other_processors(name):
    spec, vectors, scalars = MULTIPLY_ADDS[name]
    target = tvm.target.Target(spec)
    with target:
        func = kernel_of(lambda bb, x, w: op.matmul(x, w), ((61, 70), F32), ((70, 45), F32))
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    text = tvm.compile(mod, target=target, tir_pipeline="s_tir").mod.inspect_source("asm")
    assert len(re.findall(vectors, text)) >= 8
    assert not re.findall(scalars, text)
