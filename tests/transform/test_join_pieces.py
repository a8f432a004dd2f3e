"""Concatenations of many pieces: joined where they are pieces of one tensor, else searched."""

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.relax import op

import tvm_fusion
from tests.support.emulated_programs import emulated
from tests.support.frontend_tools import Function, operators
from tests.support.graphs import module
from tests.support.models import run_unfused
from tvm_fusion.frontends import load
from tvm_fusion.frontends.finish import cleaned
from tvm_fusion.fuzz.torch_program import Input, Program, Statement
from tvm_fusion.fuzz.verdict import RIGHT
from tvm_fusion.transform.lower.legalizers import MANY, concatenate_many
from tvm_fusion.transform.rewrites.join_pieces import JoinPieces

N = MANY + 1


def slices(bb, x, axis=0, size=2, count=N):
    return [
        bb.emit(op.strided_slice(x, [axis], [size * i], [size * (i + 1)])) for i in range(count)
    ]


def of_all(function, **options):
    """A model that computes `function` of each slice, and concatenates the results."""

    def emit(bb, x, *others):
        parts = [function(bb, part, *others) for part in slices(bb, x, **options)]
        return op.concat(parts, options.get("axis", 0))

    return emit


def computed(bb, x, *others):
    return bb.emit(op.multiply(bb.emit(op.tanh(x)), relax.const(3.0)))


def scaled(bb, x, gamma):
    return bb.emit(op.where(bb.emit(op.greater(x, gamma)), x, gamma))


def squared(bb, x):
    for _ in range(40):
        x = bb.emit(op.subtract(bb.emit(op.multiply(x, x)), x))
    return x


def chained(bb, x):
    for _ in range(400):
        x = bb.emit(op.negative(x))
    return x


def reversed_slices(bb, x):
    return op.concat(slices(bb, x)[::-1], 0)


def stepped_slices(bb, x):
    return op.concat([bb.emit(op.strided_slice(x, [0], [i], [i + 1])) for i in range(1, 65, 2)], 0)


def overlapping(bb, x):
    parts = [bb.emit(op.strided_slice(x, [0], [-2 - i], [66 - i], [2])) for i in range(N)]
    return op.concat(parts, 0)


def of_rows(function, to, axis=0, stacked=True):
    """A model that computes `function` of each row, and stacks or concatenates the results."""

    def emit(bb, x, *others):
        rows = [bb.emit(op.squeeze(part, [axis])) for part in slices(bb, x, axis, 1)]
        parts = [function(bb, row, *others) for row in rows]
        if stacked:
            parts = [bb.emit(op.expand_dims(part, to)) for part in parts]
        return op.concat(parts, to)

    return emit


ROWS, COLUMNS = ((2 * N, 5), "float32"), ((3, 2 * N), "float32")
JOINED = {
    "elementwise": (of_all(computed), [ROWS], ["tanh", "multiply"]),
    "columns": (of_all(computed, axis=1), [COLUMNS], ["tanh", "multiply"]),
    "part of it": (of_all(computed, size=1), [ROWS], ["strided_slice", "tanh", "multiply"]),
    "operands of all": (
        of_all(scaled),
        [ROWS, ((5,), "float32")],
        ["greater", "where"],
    ),
    "a row for all": (of_all(scaled), [ROWS, ((1, 5), "float32")], ["greater", "where"]),
    "read twice": (of_all(squared), [ROWS], ["multiply", "subtract"] * 40),
    "stacked rows": (
        of_rows(scaled, 0),
        [((N, 2, 5), "float32"), ((5,), "float32")],
        ["greater", "where"],
    ),
    "rows stacked behind": (
        of_rows(scaled, 2),
        [((N, 2, 5), "float32"), ((2, 5), "float32")],
        ["greater", "where", "permute_dims"],
    ),
    "columns as rows": (
        of_rows(computed, 0, 1),
        [((3, N), "float32")],
        ["permute_dims", "tanh", "multiply"],
    ),
    "rows side by side": (
        of_rows(scaled, 1, stacked=False),
        [((N, 2, 5), "float32"), ((5,), "float32")],
        ["greater", "where", "permute_dims", "reshape"],
    ),
    "numbers": (of_rows(lambda bb, x: x, 0), [((N,), "float32")], []),
    "reversed": (reversed_slices, [ROWS], ["take"]),
    "stepped": (stepped_slices, [ROWS], ["strided_slice"]),
    "overlapping": (overlapping, [ROWS], ["take"]),
}


def names_of(mod):
    """The operators of `main`, but for reshapes to the same shape."""
    mod = cleaned(mod)
    return [name.removeprefix("relax.") for name in operators(mod)]


def drawn(inputs):
    rng = np.random.default_rng(0)
    return [rng.uniform(-0.5, 0.5, shape).astype(dtype) for shape, dtype in inputs]


@pytest.mark.one_in(15)
@pytest.mark.parametrize("what", JOINED)
def test_pieces_of_one_tensor_are_computed_together(what):
    emit, inputs, names = JOINED[what]
    before = module(emit, *inputs)
    after = JoinPieces()(before)
    assert names_of(after) == names
    given = drawn(inputs)
    for one, other in zip(run_unfused(after, *given), run_unfused(before, *given), strict=True):
        np.testing.assert_array_equal(one, other)
    tvm.ir.assert_structural_equal(JoinPieces()(after), after)


def test_long_chains_are_computed_together():
    after = JoinPieces()(module(of_all(chained), ROWS))
    assert operators(after) == ["relax.negative"] * 400


def of_two_kinds(bb, x):
    parts = slices(bb, x)
    return op.concat([bb.emit((op.exp, op.tanh)[i % 2](part)) for i, part in enumerate(parts)], 0)


def with_numbers_of_their_own(bb, x):
    parts = enumerate(slices(bb, x))
    return op.concat([bb.emit(op.add(part, relax.const(float(i)))) for i, part in parts], 0)


def of_two_tensors(bb, x, y):
    return op.concat([(slices(bb, x), slices(bb, y))[i % 2][i] for i in range(N)], 0)


def repeated(join, size=None):
    """A model that joins one and the same computed tensor, of x or of the first rows of it."""

    def emit(bb, x):
        return join(
            [bb.emit(op.exp(x if size is None else slices(bb, x, size=size, count=1)[0]))] * N
        )

    return emit


def alike(join):
    """A model that joins tensors that are computed of x alike."""
    return lambda bb, x: join([bb.emit(op.exp(x)) for _ in range(N)])


def rows_of(parts):
    return op.concat(parts, 0)


def stack_of(parts):
    return op.stack(parts, 0)


def read_elsewhere(which):
    """A model in which a sum reads a piece, too: the value, or what the value is made of."""

    def emit(bb, x):
        inner = [bb.emit(op.exp(part)) for part in slices(bb, x)]
        outer = [bb.emit(op.multiply(part, relax.const(3.0))) for part in inner]
        return op.concat(outer, 0), op.sum((inner, outer)[which][3])

    return emit


def results_too(bb, x):
    parts = [bb.emit(op.exp(part)) for part in slices(bb, x)]
    return op.concat(parts, 0), parts[0]


def a_piece_for_all(bb, x):
    parts = [bb.emit(op.exp(part)) for part in slices(bb, x, size=1)]
    return op.concat([bb.emit(op.add(part, parts[0])) for part in parts], 0)


def neighbours(bb, x):
    parts = [bb.emit(op.exp(part)) for part in slices(bb, x)]
    turned = [*parts[1:], parts[0]]
    return op.concat([bb.emit(op.add(a, b)) for a, b in zip(parts, turned, strict=True)], 0)


def pieces_twice(bb, x):
    parts = [bb.emit(op.exp(part)) for part in slices(bb, x, count=N // 2 + 1)]
    return op.concat(parts + parts, 0)


def views_elsewhere(bb, x):
    rows = [bb.emit(op.squeeze(part, [0])) for part in slices(bb, x, size=1)]
    parts = [bb.emit(op.expand_dims(bb.emit(op.exp(row)), [0])) for row in rows]
    return op.concat(parts, 0), op.sum(parts[3])


def empty_slices(elements):
    """A model of slices of no element, but for one that has so many."""

    def emit(bb, x):
        ends = [4 + elements * (i == 3) for i in range(N)]
        return op.concat([bb.emit(op.strided_slice(x, [0], [4], [end])) for end in ends], 0)

    return emit


ROW, SQUARE = ((1, 2), "float32"), ((N, N), "float32")
ALONE = {
    "one row": (repeated(rows_of), [ROW]),
    "one row of it": (repeated(rows_of, 1), [ROWS]),
    "two rows of it": (repeated(rows_of, 2), [ROWS]),
    "one tensor": (repeated(rows_of), [ROWS]),
    "a stack of one": (repeated(stack_of), [ROWS]),
    "a stack of as many rows": (repeated(stack_of), [SQUARE]),
    "rows that are alike": (alike(rows_of), [ROW]),
    "tensors that are alike": (alike(rows_of), [ROWS]),
    "a stack of what is alike": (alike(stack_of), [ROWS]),
    "a stack of as many rows alike": (alike(stack_of), [SQUARE]),
    "a stack of numbers": (alike(stack_of), [((), "float32")]),
    "values read elsewhere": (read_elsewhere(1), [ROWS]),
    "steps read elsewhere": (read_elsewhere(0), [ROWS]),
    "results too": (results_too, [ROWS]),
    "a piece for all": (a_piece_for_all, [ROWS]),
    "neighbours": (neighbours, [ROWS]),
    "pieces twice": (pieces_twice, [ROWS]),
    "views read elsewhere": (views_elsewhere, [ROWS]),
    "no element": (empty_slices(0), [ROWS]),
    "one element": (empty_slices(1), [ROWS]),
    "few": (of_all(computed, count=MANY - 1), [ROWS]),
    "other operators": (of_all(lambda bb, x: bb.emit(op.nn.softmax(x, 0))), [ROWS]),
    "two kinds": (of_two_kinds, [ROWS]),
    "other numbers": (with_numbers_of_their_own, [ROWS]),
    "two tensors": (of_two_tensors, [ROWS, ROWS]),
    "an operand as long as a piece": (of_all(scaled), [ROWS, ((2, 5), "float32")]),
    "another axis": (lambda bb, x: op.concat(slices(bb, x, axis=1), 0), [COLUMNS]),
    "two axes": (
        lambda bb, x: op.concat(
            [bb.emit(op.strided_slice(x, [0, 1], [i, 0], [i + 1, 3])) for i in range(N)], 0
        ),
        [ROWS],
    ),
    "a symbolic extent": (
        lambda bb, x: op.concat(slices(bb, x), 0),
        [((tirx.Var("n", "int64"), 5), "float32")],
    ),
}


@pytest.mark.parametrize("what", ALONE)
def test_other_concatenations_stay_as_they_are(what):
    emit, inputs = ALONE[what]
    before = module(emit, *inputs)
    tvm.ir.assert_structural_equal(JoinPieces()(before), before)


# ---- concatenations that stay


def depth(expr) -> int:
    below = [a for a in getattr(expr, "args", ()) if isinstance(a, tvm.ir.Expr)]
    return 1 + max(map(depth, below), default=0)


def test_the_part_of_an_element_is_searched():
    parts = [te.placeholder((1 + i % 3, 5), name=f"x{i}") for i in range(600)]
    func = te.create_prim_func([*parts, concatenate_many(parts, 0)])
    values = []
    tvm_ffi.structural_walk(func.body, [(tirx.BufferStore, lambda s: values.append(s.value))])
    assert depth(values[0]) < 15


@pytest.mark.one_in(2)
@pytest.mark.parametrize("axis", [0, 1])
def test_many_tensors_are_concatenated(axis):
    sizes = [1 + i % 3 for i in range(N)]
    inputs = [((size, 4) if axis == 0 else (4, size), "float32") for size in sizes]
    compiled = tvm_fusion.compile(
        module(lambda bb, *x: op.concat(x, axis - 2), *inputs), "llvm", verify=False
    )
    given = drawn(inputs)
    np.testing.assert_array_equal(compiled(*given), np.concatenate(given, axis))


# Always: many tensors, long chains and pieces of one tensor, each by themselves.
@pytest.mark.nightly
def test_many_pieces_of_several_kinds_are_right():
    pieces = "torch.cat([t.tanh() if t.shape[0] % 2 else t.exp() for t in {0}.split([1, 2] * 20)])"
    inputs = (Input("x0", "torch.randn((60, 3))"),)
    program = Program(inputs, (Statement("v0", f"{{out}} = {pieces}", ("x0",)),), ("v0",))
    assert emulated(program, "nvidia_h100").verdict.kind == RIGHT


# ---- models


REPEATED = {
    "a row": ((1, 2), lambda x: torch.cat([x.exp()] * 40, 0)),
    "rows": ((3, 2), lambda x: torch.cat([x.exp()] * 40, 0)),
    "a row of it": ((3, 2), lambda x: torch.cat([x[0:1].exp()] * 40, 0)),
    "a stack": ((1, 2), lambda x: torch.stack([x.exp()] * 40)),
    "a stack of as many rows": ((40, 2), lambda x: torch.stack([x.exp()] * 40)),
    "a row more": ((40, 2), lambda x: torch.cat([t.exp() + x[:1].exp() for t in x.split(1)])),
    "empty": ((3, 2), lambda x: torch.cat([x[2:2].exp()] * 40 + [x[:1].exp()])),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("what", REPEATED)
def test_what_is_repeated_is_there_as_often(what):
    shape, function = REPEATED[what]
    x = torch.randn(shape)
    compiled = tvm_fusion.compile(Function(function), "llvm", example_inputs=(x,), verify=False)
    torch.testing.assert_close(torch.as_tensor(compiled(x)), function(x))


HUNDREDS = {
    "split": (601, "torch.cat([t * 2 for t in {0}.split(2, 0)], 0)"),
    "backwards": (601, "torch.cat([torch.exp(t) for t in {0}.split(2, 0)][::-1], 0) + 1"),
    "unbound": (301, "torch.cat([t * 2 for t in {0}.unbind(0)], 0)"),
    "stacked": (301, "torch.stack([t.tanh() + {0}[0] for t in {0}.unbind(0)], 1)"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("what", HUNDREDS)
def test_hundreds_of_slices_are_concatenated(what):
    rows, code = HUNDREDS[what]
    inputs = (Input("x0", f"torch.randn(({rows}, 3))"),)
    program = Program(inputs, (Statement("v0", f"{{out}} = {code}", ("x0",)),), ("v0",))
    x = program.arguments()
    compiled = tvm_fusion.compile(program.module(), "llvm", example_inputs=x, verify=False)
    torch.testing.assert_close(torch.as_tensor(compiled(*x)[0]), program.eager(x)[0])
    assert emulated(program, "nvidia_h100").verdict.kind == RIGHT


def test_a_split_into_many_pieces_is_slices():
    def function(x):
        return [*x.split(2), *x.split([1, 9, 60]), *x.unbind(0)]

    names = operators(load(Function(function), (torch.randn(70, 3),)))
    assert names.count("relax.split") == 1
    assert names.count("relax.strided_slice") == 35 + 70
