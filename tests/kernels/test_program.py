"""Analysis of fused PrimFuncs into row programs: what becomes what, what is refused, and why."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.relax import op
from tvm.script import tirx as T

from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.program import program as program_module
from tvm_fusion.kernels.program.analysis import analyze
from tvm_fusion.kernels.program.expr import number, same, substitute, variables
from tvm_fusion.kernels.program.narrow import narrow_indices
from tvm_fusion.kernels.program.online import merge_online, scaled_values
from tvm_fusion.kernels.program.program import Level, ReduceKind

from ..support.kernel_cases import chain, fuse, half_softmax, rotate_half

HALF = "float16"


def softmax(bb, x):
    return op.nn.softmax(x, axis=-1)


def concat(bb, x, y):
    return op.concat([bb.emit(op.exp(x)), y], axis=-1)


def transpose_add(bb, x, y):
    return op.add(bb.emit(op.permute_dims(x, [1, 0])), y)


def add(bb, x, y):
    return op.add(x, y)


def take_rows(bb, x, t):
    return op.take(x, t, axis=0)


def take_columns(bb, x, t):
    return op.take(x, t, axis=1)


def slice_columns(bb, x):
    return op.exp(bb.emit(op.strided_slice(x, [1], [2], [6])))


def reshape(bb, x):
    return op.reshape(bb.emit(op.exp(x)), (2, 12))


def softmax_reshaped(bb, x):
    return op.nn.softmax(bb.emit(op.reshape(x, (2, 3, 8))))


def softmax_transposed(bb, x):
    return op.nn.softmax(bb.emit(op.permute_dims(x, [1, 0])))


def sum_over(axis):
    return lambda bb, x: op.sum(x, axis=axis)


def counts(program):
    parts = (program.tiles, program.scalars, program.elements, program.reductions, program.outputs)
    return tuple(len(part) for part in parts)


KINDS = [
    ("contiguous", add, [((4, 6), HALF), ((4, 6), HALF)], (2, 0, 0, 0, 1), [], 24),
    ("bias", add, [((2, 3, 6), HALF), ((6,), HALF)], (2, 0, 0, 0, 1), [6], 6),
    ("column", add, [((2, 3, 6), HALF), ((2, 3, 1), HALF)], (1, 1, 0, 0, 1), [6], 6),
    ("middle", add, [((2, 3, 6), HALF), ((2, 1, 6), HALF)], (2, 0, 0, 0, 1), [2, 3], 6),
    ("leading", add, [((5, 2, 3), HALF), ((2, 3), HALF)], (2, 0, 0, 0, 1), [5], 6),
    ("number", add, [((4, 6), HALF), ((), HALF)], (1, 1, 0, 0, 1), [], 24),
    ("transposed", transpose_add, [((4, 6), HALF), ((6, 4), HALF)], (1, 0, 1, 0, 1), [6], 4),
    ("concatenated", concat, [((4, 6), HALF), ((4, 10), HALF)], (0, 0, 2, 0, 1), [4], 16),
    ("halves turned", rotate_half, [((2, 3, 8), HALF)], (0, 0, 2, 0, 1), [6], 8),
    ("rows picked", take_rows, [((4, 6), HALF), ((7,), "int64")], (1, 1, 0, 0, 1), [7], 6),
    ("columns picked", take_columns, [((4, 6), HALF), ((7,), "int64")], (1, 0, 1, 0, 1), [4], 7),
    ("sliced", slice_columns, [((4, 9), HALF)], (1, 0, 0, 0, 1), [4], 4),
    ("reshaped", reshape, [((4, 6), HALF)], (1, 0, 0, 0, 1), [], 24),
    ("one element", chain, [((1, 1), HALF)], (0, 1, 0, 0, 1), [], 1),
    ("softmax", softmax, [((2, 3, 8), HALF)], (1, 0, 0, 2, 1), [6], 8),
    ("softmax of reshaped rows", softmax_reshaped, [((6, 8), HALF)], (1, 0, 0, 2, 1), [6], 8),
    ("softmax of transposed", softmax_transposed, [((4, 6), HALF)], (0, 0, 1, 2, 1), [6], 4),
    ("sum of two axes", sum_over([1, 2]), [((4, 6, 8), HALF)], (1, 0, 0, 1, 1), [4], 48),
    ("sum of the middle axis", sum_over(1), [((4, 6, 8), HALF)], (0, 0, 1, 1, 1), [4, 8], 6),
    ("sum of all", sum_over(None), [((4, 6), HALF)], (1, 0, 0, 1, 1), [], 24),
]  # fmt: skip


@pytest.mark.parametrize(
    ("emit", "inputs", "kinds", "rows", "columns"),
    [k[1:] for k in KINDS],
    ids=[k[0] for k in KINDS],
)
def test_loads_become_tiles_scalars_or_elements(emit, inputs, kinds, rows, columns):
    program = analyze(fuse(emit, *inputs))
    assert counts(program) == kinds
    assert (list(program.rows), program.columns) == (rows, columns)


def written(program, row, column):
    """Offset of what each output writes at one point."""
    point = {**dict(zip(program.row_vars, row, strict=True)), program.column_var: column}
    env = {var: tirx.IntImm(program.index_dtype, value) for var, value in point.items()}
    analyzer = tvm.sym.Analyzer()
    offsets = (number(analyzer.simplify(substitute(o.offset, env))) for o in program.outputs)
    return [
        offset + (column if output.full else 0)
        for offset, output in zip(offsets, program.outputs, strict=True)
    ]


def exp_of_sum_and_tanh(bb, x, b):
    return relax.Tuple([bb.emit(op.exp(bb.emit(op.add(x, b)))), bb.emit(op.tanh(x))])


def test_every_element_of_every_output_is_written_once():
    program = analyze(fuse(exp_of_sum_and_tanh, ((2, 3, 8), HALF), ((3, 1), HALF)))
    points = [(r, c) for r in np.ndindex(*program.rows) for c in range(program.columns)]
    places = zip(*(written(program, *point) for point in points), strict=True)
    assert [sorted(place) for place in places] == [list(range(48))] * 2


def test_an_access_knows_its_indices():
    program = analyze(fuse(transpose_add, ((4, 6), HALF), ((6, 4), HALF)))
    (i,), j = program.row_vars, program.column_var
    assert [list(map(str, program.indices(a))) for a in (*program.elements, *program.tiles)] == [
        [str(j), str(i)],
        [str(i), str(j)],
    ]


def with_transpose(bb, x, y):
    return relax.Tuple([bb.emit(op.exp(x)), bb.emit(op.permute_dims(bb.emit(op.exp(y)), [1, 0]))])


def two_sizes(bb, x, y):
    return relax.Tuple([bb.emit(op.exp(x)), bb.emit(op.exp(y))])


@pytest.mark.parametrize(
    ("emit", "shapes", "spaces"),
    [
        (with_transpose, [(4, 6), (4, 6)], [([], 24), ([6], 4)]),
        (two_sizes, [(4, 6), (4, 8)], [([], 24), ([], 32)]),
    ],
    ids=["transposed", "two sizes"],
)
def test_outputs_over_other_axes_are_siblings(emit, shapes, spaces):
    program = analyze(fuse(emit, *((shape, HALF) for shape in shapes)))
    parts = [program, *program.siblings]
    assert [(list(part.rows), part.columns) for part in parts] == spaces
    assert [o.param for part in parts for o in part.outputs] == [2, 3]


def test_loads_under_a_condition_keep_it():
    program = analyze(fuse(concat, ((4, 6), HALF), ((4, 10), HALF)))
    j = program.column_var
    right, left = program.elements
    six = tirx.IntImm("int64", 6)
    assert same(right.guard, six <= j)
    assert same(left.guard, tirx.Not(six <= j))


def test_loads_that_are_in_bounds_anyway_need_no_condition():
    program = analyze(
        fuse(
            lambda bb, x, c: op.where(c, x, bb.emit(op.nn.relu(x))),
            ((4, 6), HALF),
            ((4, 6), "bool"),
        )
    )
    assert counts(program) == (2, 0, 0, 0, 1)
    assert isinstance(program.values[-1].body, tirx.Select)


def test_a_label_pick_stays_under_its_condition():
    def loss(bb, x, t):
        return op.nn.nll_loss(bb.emit(op.nn.log_softmax(x)), t, reduction="none", ignore_index=-100)

    program = analyze(fuse(loss, ((4, 6), HALF), ((4,), "int64")))
    (pick,) = program.elements
    (label,) = program.scalars
    assert variables(pick.guard) == [label.var]
    assert program.level(pick.var) == Level.ROW


def shifted(bb, x, begin):
    """x, moved by one place, zero behind its ends."""
    padded = bb.emit(op.nn.pad(x, [1, 1]))
    return bb.emit(op.strided_slice(padded, [0], [begin], [begin + 9]))


def test_loads_whose_conditions_read_others_are_each_asked_once(monkeypatch):
    """Asked anew for each condition, the work grows exponentially with the chain."""

    def neighbours(bb, x):
        for _ in range(3):
            left, right = shifted(bb, x, 0), shifted(bb, x, 2)
            x = bb.emit(op.where(bb.emit(op.greater(left, right)), x, right))
        return x

    program = analyze(fuse(neighbours, ((9,), "float32")))
    asked = []
    monkeypatch.setattr(
        program_module, "variables", lambda *exprs: asked.append(exprs) or variables(*exprs)
    )
    assert all(program.level(e.var) == Level.ELEMENT for e in program.elements)
    assert len(asked) <= 2 * len(program.elements)


def test_a_temporary_with_two_readers_is_one_value():
    def twice(bb, x):
        e = bb.emit(op.exp(x))
        return op.add(e, bb.emit(op.tanh(e)))

    exp, tanh, total = analyze(fuse(twice, ((4, 6), HALF))).values
    assert set(variables(total.body)) == {exp.var, tanh.var}
    assert variables(tanh.body) == [exp.var]


def test_equal_reductions_are_one():
    def mean_twice(bb, x):
        return relax.Tuple([bb.emit(op.mean(x, axis=-1)), bb.emit(op.sum(x, axis=-1))])

    assert counts(analyze(fuse(mean_twice, ((4, 6), "float32")))) == (1, 0, 0, 1, 2)


@pytest.mark.parametrize(
    ("emit", "dtype", "kind", "accumulator"),
    [
        (lambda bb, x: op.sum(x, axis=-1), "float16", ReduceKind.SUM, "float32"),
        (lambda bb, x: op.prod(x, axis=-1), "float32", ReduceKind.PROD, "float32"),
        (lambda bb, x: op.max(x, axis=-1), "bfloat16", ReduceKind.MAX, "float32"),
        (lambda bb, x: op.min(x, axis=-1), "int32", ReduceKind.MIN, "int32"),
        (lambda bb, x: op.sum(x, axis=-1), "int8", ReduceKind.SUM, "int32"),
        (lambda bb, x: op.max(x, axis=-1), "float64", ReduceKind.MAX, "float64"),
    ],
    ids=["sum", "prod", "max", "min", "bytes", "double"],
)
def test_reductions_accumulate_wide_and_start_neutral(emit, dtype, kind, accumulator):
    (reduction,) = analyze(fuse(emit, ((4, 6), dtype))).reductions
    assert (reduction.kind, reduction.dtype) == (kind, accumulator)
    assert reduction.initial is None


def test_all_of_a_row_of_bools_is_a_minimum():
    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((4, 6), "bool"), Y: T.Buffer((4,), "bool")):
        for i, k in T.grid(4, 6):
            with T.sblock("all"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    Y[vi] = T.bool(True)
                Y[vi] = Y[vi] and X[vi, vk]

    (reduction,) = analyze(func).reductions
    assert (reduction.kind, reduction.dtype, reduction.initial) == (ReduceKind.MIN, "int32", None)


def test_an_initial_value_that_counts_is_kept():
    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((4, 6), "float32"), Y: T.Buffer((4,), "float32")):
        for i, k in T.grid(4, 6):
            with T.sblock("sum"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    Y[vi] = T.float32(2)
                Y[vi] = X[vi, vk] + Y[vi]

    (reduction,) = analyze(func).reductions
    assert number(reduction.initial) == 2


# ---- rounding


def casts(program, dtype):
    found = []
    for item in (*program.values, *program.reductions):
        tvm_ffi.structural_walk(item.body, [(tirx.Cast, lambda c: found.append(str(c.ty.dtype)))])
    return found.count(dtype)


def test_half_precision_is_widened_and_rounded_at_the_end_only():
    program = analyze(fuse(chain, ((4, 6), HALF)))
    assert {str(var.ty.dtype) for var in program.placeholders()} == {"float32"}
    assert casts(program, HALF) == 0
    assert program.outputs[0].dtype == HALF


def test_exact_rounding_keeps_every_store_of_the_unfused_graph():
    program = analyze(fuse(chain, ((4, 6), HALF)), exact=True)
    assert casts(program, HALF) == len(program.values) == 4


def test_exact_rounding_leaves_what_was_just_loaded_alone():
    emit = lambda bb, x: op.exp(bb.emit(op.permute_dims(x, [1, 0])))  # noqa: E731
    assert casts(analyze(fuse(emit, ((4, 6), HALF)), exact=True), HALF) == 1


def test_integers_and_bools_are_left_alone():
    program = analyze(fuse(lambda bb, x, y: op.less(x, y), ((4, 6), "int8"), ((4, 6), "int8")))
    assert {str(tile.var.ty.dtype) for tile in program.tiles} == {"int8"}
    assert program.outputs[0].dtype == "bool"


# ---- symbolic shapes and numbers passed by value


def test_symbolic_rows_merge_like_static_ones():
    b, s = tirx.Var("b", "int64"), tirx.Var("s", "int64")
    program = analyze(fuse(softmax, ((b, s, 8), HALF)))
    assert len(program.rows) == 1
    outer, inner, _ = program.params[0].shape
    assert tvm.sym.Analyzer().can_prove_equal(program.row_count, outer * inner)
    assert (program.columns, program.is_static) == (8, False)


def test_symbolic_columns_are_analysed():
    m = tirx.Var("m", "int64")
    program = analyze(fuse(softmax, ((4, m), HALF)))
    assert same(program.columns, program.params[0].shape[1])
    assert program.phases == 2


def test_numbers_passed_by_value_are_free_variables():
    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((4, 6), "float32"), Y: T.Buffer((4, 6), "float32"), n: T.int64):
        for i, j in T.grid(4, 6):
            with T.sblock("scale"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = X[vi, vj] * T.Cast("float32", n)

    program = analyze(func)
    assert [p.shape for p in program.params] == [(4, 6), (4, 6), None]
    assert program.params[2].var in variables(program.values[0].body)


# ---- narrow indices


def test_coordinates_become_32_bit_where_everything_fits():
    program = narrow_indices(analyze(fuse(transpose_add, ((4, 6), HALF), ((6, 4), HALF))))
    assert program.index_dtype == "int32"
    assert {str(a.offset.ty.dtype) for a in (*program.tiles, *program.elements)} == {"int32"}


def test_large_parameters_keep_64_bits():
    program = narrow_indices(analyze(fuse(chain, ((70000, 40000), HALF))))
    assert program.index_dtype == "int64"


def test_offsets_made_of_data_keep_the_width_of_the_data():
    program = narrow_indices(analyze(fuse(take_columns, ((4, 6), HALF), ((7,), "int64"))))
    assert [str(e.offset.ty.dtype) for e in program.elements] == ["int64"]


def test_arithmetic_that_would_overflow_is_not_narrowed():
    i = te.placeholder((1000,), "int64", "x")
    y = te.compute((1000,), lambda a: i[a] + a * tirx.IntImm("int64", 10**8), "y")
    program = narrow_indices(analyze(te.create_prim_func([i, y])))
    (value,) = program.values
    products = []
    tvm_ffi.structural_walk(value.body, [(tirx.Mul, products.append)])
    assert [str(p.ty.dtype) for p in products] == ["int64"]


# ---- online softmax


@pytest.mark.parametrize("emit", [softmax, half_softmax])
def test_a_softmax_needs_one_phase_when_its_sum_runs_along(emit):
    program = analyze(fuse(emit, ((4, 64), HALF)))
    merged = merge_online(program)
    assert (program.phases, merged.phases) == (2, 1)
    top, total = merged.reductions
    assert total.online is top.var
    assert [o.phase for o in merged.outputs] == [1]
    assert set(scaled_values(merged).values()) == {top.var}


def test_weights_may_stand_beside_the_exponential():
    def expectation(bb, x, w):
        top = bb.emit(op.max(x, axis=-1, keepdims=True))
        e = bb.emit(op.exp(bb.emit(op.subtract(x, top))))
        return op.sum(bb.emit(op.multiply(e, w)), axis=-1)

    program = merge_online(analyze(fuse(expectation, ((4, 64), HALF), ((4, 64), HALF))))
    assert program.phases == 1


def test_a_sum_relative_to_another_maximum_does_not_run_along():
    def other(bb, x, y):
        top = bb.emit(op.max(y, axis=-1, keepdims=True))
        return op.sum(bb.emit(op.exp(bb.emit(op.subtract(x, top)))), axis=-1)

    program = analyze(fuse(other, ((4, 64), HALF), ((4, 64), HALF)))
    assert merge_online(program).phases == 2


def test_exact_rounding_keeps_the_phases_apart():
    program = analyze(fuse(softmax, ((4, 64), HALF)), exact=True)
    assert merge_online(program) is program


# ---- refusals


@T.prim_func(s_tir=True)
def two_writers(X: T.Buffer((8,), "float32"), Y: T.Buffer((8,), "float32")):
    for i in range(8):
        with T.sblock("a"):
            vi = T.axis.spatial(8, i)
            Y[vi] = X[vi]
    for i in range(8):
        with T.sblock("b"):
            vi = T.axis.spatial(8, i)
            Y[vi] = X[vi] + T.float32(1)


@T.prim_func(s_tir=True)
def written_in_part(X: T.Buffer((4,), "float32"), Y: T.Buffer((4,), "float32")):
    Z = T.sblock_alloc_buffer((8,), "float32")
    for i in range(4):
        with T.sblock("a"):
            vi = T.axis.spatial(4, i)
            Z[vi] = X[vi]
    for i in range(4):
        with T.sblock("b"):
            vi = T.axis.spatial(4, i)
            Y[vi] = Z[vi]


@T.prim_func(s_tir=True)
def written_beyond(X: T.Buffer((8,), "float32"), Y: T.Buffer((4,), "float32")):
    for i in range(8):
        with T.sblock("a"):
            vi = T.axis.spatial(8, i)
            Y[vi] = X[vi]


@T.prim_func(s_tir=True)
def written_elsewhere(X: T.Buffer((4,), "float32"), Y: T.Buffer((8,), "float32")):
    for i in range(4):
        with T.sblock("a"):
            vi = T.axis.spatial(4, i)
            Y[vi * 2] = X[vi]


@T.prim_func(s_tir=True)
def with_a_loop(X: T.Buffer((4, 3), "float32"), Y: T.Buffer((4,), "float32")):
    for i in range(4):
        with T.sblock("a"):
            vi = T.axis.spatial(4, i)
            for k in range(3):
                Y[vi] = X[vi, k]


@T.prim_func(s_tir=True)
def scheduled(X: T.Buffer((8,), "float32"), Y: T.Buffer((8,), "float32")):
    for i, j in T.grid(2, 4):
        with T.sblock("a"):
            vi = T.axis.spatial(8, i * 4 + j)
            Y[vi] = X[vi]


@T.prim_func(s_tir=True)
def with_a_predicate(X: T.Buffer((7,), "float32"), Y: T.Buffer((7,), "float32")):
    for i in range(8):
        with T.sblock("a"):
            vi = T.axis.spatial(7, i)
            T.where(i < 7)
            Y[vi] = X[vi]


@T.prim_func(s_tir=True)
def with_a_call(X: T.Buffer((8,), "float32"), Y: T.Buffer((8,), "float32")):
    for i in range(8):
        with T.sblock("a"):
            vi = T.axis.spatial(8, i)
            Y[vi] = T.call_extern("float32", "noise", X[vi])


@T.prim_func(s_tir=True)
def with_a_bit_cast(X: T.Buffer((8,), "float16"), Y: T.Buffer((8,), "uint16")):
    for i in range(8):
        with T.sblock("a"):
            vi = T.axis.spatial(8, i)
            Y[vi] = T.reinterpret("uint16", X[vi] + T.float16(1))


@T.prim_func(s_tir=True)
def eight_bit_floats(X: T.Buffer((8,), "float8_e4m3fnuz"), Y: T.Buffer((8,), "float8_e4m3fnuz")):
    for i in range(8):
        with T.sblock("a"):
            vi = T.axis.spatial(8, i)
            Y[vi] = X[vi]


def shifted_sum(bb, x):
    total = bb.emit(op.sum(x, axis=-1))
    return op.strided_slice(total, [0], [1], [4])


def reversed_sum(bb, x):
    return op.flip(bb.emit(op.sum(x, axis=-1)), axis=0)


def two_lengths(bb, x, y):
    return relax.Tuple([bb.emit(op.sum(x, axis=-1)), bb.emit(op.sum(y, axis=-1))])


def broadcast_sum(bb, x, y):
    return op.add(bb.emit(op.sum(x, axis=-1, keepdims=True)), y)


@T.prim_func(s_tir=True)
def last_argmax(X: T.Buffer((4, 6), "float32"), I: T.Buffer((4,), "int32")):  # noqa: E741
    V = T.sblock_alloc_buffer((4,), "float32")
    for i, k in T.grid(4, 6):
        with T.sblock("last"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                I[vi] = -1
                V[vi] = T.float32(-3e38)
            I[vi] = T.Select(V[vi] > X[vi, vk], I[vi], vk)
            V[vi] = T.Select(V[vi] > X[vi, vk], V[vi], X[vi, vk])


REFUSALS = [
    ("the last argmax", lambda: last_argmax, "reduction"),
    ("another row", lambda: fuse(reversed_sum, ((4, 6), HALF)), "another row"),
    ("part of the rows", lambda: fuse(shifted_sum, ((4, 6), HALF)), "no part of"),
    ("two lengths", lambda: fuse(two_lengths, ((4, 6), HALF), ((4, 8), HALF)), "over 6 and over 8"),
    ("wider output", lambda: fuse(broadcast_sum, ((4, 6), HALF), ((4, 8), HALF)), "no part of"),
    ("two writers", lambda: two_writers, "several blocks"),
    ("in part", lambda: written_in_part, "in part"),
    ("beyond the end", lambda: written_beyond, "beyond its end"),
    ("elsewhere", lambda: written_elsewhere, "written at"),
    ("a loop", lambda: with_a_loop, "holds a For"),
    ("scheduled", lambda: scheduled, "already scheduled"),
    ("predicate", lambda: with_a_predicate, "predicate"),
    ("side effects", lambda: with_a_call, "call of tirx.call_extern"),
    ("dtype", lambda: eight_bit_floats, "holds float8_e4m3fnuz"),
    ("bit cast", lambda: with_a_bit_cast, "bit cast"),
]


@pytest.mark.parametrize(
    ("func", "reason"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS]
)
def test_what_is_no_row_program_is_refused_with_a_reason(func, reason):
    with pytest.raises(Unsupported, match=reason):
        analyze(func())


def test_a_program_prints_as_a_listing():
    text = str(analyze(fuse(softmax, ((4, 6), HALF)).with_attr("global_symbol", "softmax")))
    assert text.splitlines()[0] == "rows [4] x columns 6, 2 reduction phase(s)"
    assert [line.split()[0] for line in text.splitlines()[1:]] == [
        "tile",
        "value",
        "value",
        "reduce",
        "reduce",
        "out",
    ]
