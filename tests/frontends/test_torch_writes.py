"""Values written at indices, into copies and into the inputs of a model."""

import logging
import math

import pytest
import torch
import torch.nn.functional as F
import tvm
import tvm_ffi

import tvm_fusion
from tests.support.frontend_tools import Function, assert_close, check, operators
from tests.support.models import run_unfused
from tvm_fusion.config import load_profile
from tvm_fusion.errors import FrontendError
from tvm_fusion.frontends import load
from tvm_fusion.frontends.torch.written.known_indices import are_distinct
from tvm_fusion.fuzz.torch_program import Input, Program, Statement
from tvm_fusion.fuzz.verdict import RIGHT
from tvm_fusion.ir.graph import OpKind, build_graph
from tvm_fusion.runtime.build.lowering import ScheduleLeftovers
from tvm_fusion.runtime.build.plain_schedule import PLAIN_ATTR
from tvm_fusion.transform.lower.ordered_writes import DISTINCT_ATTR
from tvm_fusion.transform.pipeline import lower

from ..support.cuda_on_cpu import run_cuda_on_cpu
from ..support.emulated_programs import emulated
from ..support.runtime_cases import LLVM


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


X = (4, 5, 6)
ONE, TWO = torch.tensor([3]), torch.tensor([4, 0])


def assigned(x, places, values):
    """x with values at places."""
    x = x.clone()
    x[places] = values
    return x


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("function", "values", "index"),
    [
        (lambda x, v, i: x.index_copy(1, i, v), (4, 1, 6), ONE),
        (lambda x, v, i: x.index_copy(-1, i, v), (4, 5, 2), TWO),
        (lambda x, v, i: x.index_copy(0, i, v), (2, 5, 6), torch.tensor([3, 0])),
        (lambda x, v, i: x.index_put((i,), v), (2, 5, 6), torch.tensor([-1, 0])),
        (lambda x, v, i: x.index_put((i,), v), (6,), torch.tensor([-2])),
        (lambda x, v, i: x.index_put((i, i + 1), v), (2, 6), torch.tensor([1, 0])),
        (lambda x, v, i: x.index_put((i, i), v), (1, 6), torch.tensor([[2]])),
        (lambda x, v, i: assigned(x, (slice(None), i, i), v), (4, 2), TWO),
        (lambda x, v, i: assigned(x, (i, slice(None), i), v), (2, 5), torch.tensor([3, 0])),
        (lambda x, v, i: x.index_put((i[:, None], i[None]), v), (2, 2, 6), torch.tensor([3, 1])),
        (lambda x, v, i: x.index_put((i,), v), (), torch.tensor([1, 2], dtype=torch.int32)),
    ],
    ids=["one", "two", "first", "negative", "row", "pair", "point", "tail", "apart", "grid", "all"],
)
def test_values_are_written_where_pytorch_writes_them(function, values, index):
    check(function, torch.randn(X), torch.randn(values), index)


COUNTED = [
    (True, lambda x, v, s: x.index_copy(1, torch.arange(3) + s, v)),
    (True, lambda x, v, s: x.index_copy(1, s - torch.arange(3), v)),
    (True, lambda x, v, s: x.index_copy(1, (torch.arange(3) + s)[None].int().view(-1), v)),
    (False, lambda x, v, s: x.index_copy(1, torch.arange(0, 6, 2) + s, v)),
    (False, lambda x, v, s: x.index_copy(1, torch.arange(3) * s, v)),
    (False, lambda x, v, s: x.index_copy(1, (torch.arange(3) - s / 4).long(), v)),
    (False, lambda x, v, s: x.index_copy(1, torch.arange(-0.5, 2.5).long(), v)),
    (False, lambda x, v, s: x.index_copy(1, torch.arange(3).bool().long(), v)),
    (False, lambda x, v, s: x.index_copy(1, torch.arange(3).to(torch.int8).long(), v)),
    (False, lambda x, v, s: x.index_copy(1, torch.arange(3) + s.expand(3), v)),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("distinct", "function"), COUNTED)
def test_places_that_are_counted_do_not_meet(distinct, function):
    inputs = (torch.randn(X), torch.randn(4, 3, 6), torch.tensor([2]))
    program = torch.export.export(Function(function), inputs)
    write = next(f for g, f in load(program).functions_items() if "write" in g.name_hint)
    assert bool(write.attrs.get(DISTINCT_ATTR)) == distinct


def test_places_of_two_indices_meet_where_neither_tells_them_apart():
    def grid(x, v, s):
        return x.index_put(((torch.arange(2) + s)[:, None], torch.arange(3)[None]), v)

    def line(x, v, s):
        return x.index_put(((torch.arange(2) + s)[:, None], s[None].expand(1, 3)), v)

    for function, distinct in ((grid, True), (line, False)):
        inputs = (torch.randn(X), torch.randn(2, 3, 6), torch.tensor([1]))
        program = torch.export.export(Function(function), inputs)
        write = next(f for g, f in load(program).functions_items() if "write" in g.name_hint)
        assert bool(write.attrs.get(DISTINCT_ATTR)) == distinct


def test_more_places_than_an_axis_has_meet():
    index = torch.fx.Graph().call_function(torch.ops.aten.arange.default, (7,))
    index.meta["val"] = torch.arange(7)
    assert are_distinct([index], [7])
    assert not are_distinct([index], [6])  # -1 may be among them, and 5


def test_counted_places_are_written_side_by_side_on_a_gpu():
    line = "{out} = torch.index_copy({0}, 1, torch.arange(33) + {1}, {2})"
    program = Program(
        (
            Input("x0", "torch.randn((4, 70, 6))"),
            Input("x1", "torch.randint(0, 37, (1,))"),
            Input("x2", "torch.randn((4, 33, 6))"),
        ),
        (Statement("v0", line, NAMES),),
        ("v0",),
    )
    assert emulated(program, "nvidia_h100").verdict.kind == RIGHT
    exported = torch.export.export(program.module(), program.arguments())
    write = next(f for g, f in load(exported).functions_items() if "write" in g.name_hint)
    scheduled = ScheduleLeftovers(load_profile("nvidia_h100").to_target())(
        tvm.IRModule({"write": write})
    )["write"]
    assert PLAIN_ATTR not in scheduled.attrs
    threads = []
    tvm_ffi.structural_walk(scheduled.body, [(tvm.tirx.For, lambda f: threads.append(f))])
    bound = [int(f.extent) for f in threads if f.thread_binding is not None]
    assert math.prod(bound) >= 4 * 33 * 6


DTYPES = ("bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
ADDED = {
    "rows": ((2, 0, 2, -1), None, None, (4, 5, 6)),
    "one row": ((-2,), None, None, (5, 6)),
    "middle": (None, (4, 0, 4), None, (4, 3, 6)),
    "last": (None, None, (5, -6, 1, 1), (4,)),
    "pairs": ((3, 0, 3), (1, 1, 1), None, (3, 6)),
    "apart": ((3, 0, 3), None, (2, 2, 2), (3, 5)),
    "points": ((3, 3), (-1, 4), (0, 0), ()),
    "grid": (((3,), (0,)), ((1, 1, 2),), None, (2, 3, 6)),
}


@pytest.mark.one_in(36)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ADDED)
def test_values_are_added_where_pytorch_adds_them(case, dtype):
    *indices, shape = ADDED[case]
    indices = [None if i is None else torch.tensor(i) for i in indices]
    x, values = (torch.randint(0, 4, s).to(getattr(torch, dtype)) for s in (X, shape))

    def put(x, values, *given):
        given = iter(given)
        places = [None if i is None else next(given) for i in indices]
        return torch.ops.aten.index_put(x, places, values, True)

    check(put, x, values, *(i for i in indices if i is not None))


def test_values_are_added_in_order_on_each_target():
    places = torch.randint(-7, 7, (301,))
    values = torch.randint(-9, 9, (301, 3)).float()

    def added(x, places, values):
        return torch.index_put(x, (places,), values, accumulate=True) * 2

    inputs = torch.zeros(7, 3), places, values
    compiled = tvm_fusion.compile(Function(added), "llvm", example_inputs=inputs, verify=False)
    for _ in range(3):
        torch.testing.assert_close(torch.as_tensor(compiled(*inputs)), added(*inputs))
    statements = (
        Statement("v0", "{out} = torch.index_put({0}, ({1},), {2}, accumulate=True) * 2", NAMES),
    )
    program = Program(
        (
            Input("x0", "torch.zeros((7, 3))"),
            Input("x1", "torch.randint(-7, 7, (301,))"),
            Input("x2", "torch.randn((301, 3))"),
        ),
        statements,
        ("v0",),
    )
    assert emulated(program, "nvidia_h100").verdict.kind == RIGHT


NAMES = ("x0", "x1", "x2")


def test_an_input_to_which_is_added_is_changed_in_place():
    def function(x, places, values):
        x.index_put_((places,), values, accumulate=True)
        return x * 2

    inputs = torch.zeros(5, 3), torch.tensor([1, 1, -1]), torch.ones(3, 3)
    mod = load(Function(function), inputs)
    assert operators(mod).count("relax.call_tir_inplace") == 1
    x = torch.zeros(5, 3)
    tvm_fusion.compile(mod, "llvm", verify=False)(x, *inputs[1:])
    assert x[:, 2].tolist() == [0, 2, 0, 0, 1]


MASKED = {
    "number": (3, ()),
    "whole mask": (3, (7,)),
    "rows": (1, (5, 6)),
    "a row each": (1, (7, 5, 6)),
    "planes": (2, (6,)),
    "a line each": (2, (7, 1)),
    "broadcast": (2, (1, 6)),
}


@pytest.mark.one_in(28)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", ["bool", "int32", "float16", "float32"])
@pytest.mark.parametrize("case", MASKED)
def test_a_mask_says_where_values_are_written(case, dtype, accumulate):
    axes, shape = MASKED[case]
    mask = torch.zeros((9, 5, 6)[:axes], dtype=torch.bool)
    mask.view(-1)[torch.randperm(mask.numel())[:7]] = True
    x, values = (torch.randint(0, 4, s).to(getattr(torch, dtype)) for s in ((9, 5, 6), shape))
    check(lambda x, m, v: x.index_put((m,), v, accumulate), x, mask, values)


def test_a_mask_may_stand_behind_whole_axes():
    mask = torch.tensor([True, False, True, False, True])
    for shape in ((4, 3, 6), (3, 6), (4, 1, 1)):
        check(
            lambda x, m, v: assigned(x, (slice(None), m), v),
            torch.randn(X),
            mask,
            torch.randn(shape),
        )


def test_a_mask_beside_another_index_is_refused():
    def function(x, mask, index):
        return x.index_put((mask, index), torch.tensor(1.0))

    inputs = torch.randn(X), torch.tensor([True, False, True, False]), torch.tensor([1, 2])
    with pytest.raises(FrontendError, match=r"a mask beside another index: .*torch\.where"):
        load(Function(function), inputs)


def test_rows_of_a_symbolic_tensor_are_refused():
    def function(x, values):
        return x.index_put((torch.tensor([1, 0]),), values)

    inputs, rows = (torch.randn(X), torch.randn(2, 5, 6)), torch.export.Dim("rows", min=3)
    program = torch.export.export(Function(function), inputs, dynamic_shapes=(({0: rows}, None),))
    with pytest.raises(FrontendError, match=r"index_put.*symbolic extents .*torch\.where"):
        load(program)


BATCH = torch.export.Dim("batch", min=2)
LINE, GRID = torch.tensor([1, -1]), torch.tensor([[1, 2], [0, 3]])
SYMBOLIC = {
    "each axis": ((5, 4), (LINE, LINE), (2,), True),
    "grid": ((5, 4), (GRID, GRID), (2, 2), True),
    "number": ((5, 4), (LINE, LINE), (), True),
    "columns": ((5, 4), (None, LINE), (5, 2), True),
    "one column": ((5, 4), (None, LINE[:1]), (5, 1), True),
    "pairs of columns": ((5, 4, 3), (None, LINE, LINE), (5, 2), True),
    "one for all": ((5, 4), (LINE, LINE), (1,), False),
    "a row of the grid": ((5, 4), (GRID, GRID), (2,), False),
    "equal columns": ((5, 4), (None, LINE), (5, 1), False),
    "equal rows": ((5, 4), (None, LINE), (2,), False),
    "whole axis behind": ((5, 4), (LINE, None), (2, 4), False),
    "whole axis between": ((5, 4, 3), (LINE, None, LINE), (2, 4), False),
}


@pytest.mark.parametrize("case", SYMBOLIC)
def test_writes_of_symbolic_extents_are_right_or_refused(case):
    shape, indices, values, right = SYMBOLIC[case]

    def function(x, values):
        return torch.ops.aten.index_put(x, indices, values)

    inputs = torch.randn(shape), torch.randn(values)
    dims = {0: BATCH}, {0: BATCH} if values[:1] == (5,) else None
    program = torch.export.export(Function(function), inputs, dynamic_shapes=(dims,))
    if right:
        given = run_unfused(load(program), *(x.numpy() for x in inputs))
        assert_close(given, [function(*inputs).numpy()])
    else:
        with pytest.raises(FrontendError, match=r"index_put.*symbolic extents .*torch\.where"):
            load(program)


def test_a_symbolic_number_of_values_for_a_mask_is_refused():
    inputs = torch.randn(5, 2), torch.arange(5) > 2, torch.randn(2, 2)
    dims = {1: BATCH}, None, {1: BATCH}
    program = _masked(inputs, dims)
    given = run_unfused(load(program), *(x.numpy() for x in inputs))
    assert_close(given, [inputs[0].index_put(inputs[1:2], inputs[2]).numpy()])
    with pytest.raises(FrontendError, match=r"a symbolic number of values .*torch\.where"):
        load(_masked(inputs, (None, None, {0: BATCH})))


def _masked(inputs, dims):
    function = Function(lambda x, mask, values: x.index_put((mask,), values))
    return torch.export.export(function, inputs, dynamic_shapes=(dims,))


def test_a_model_may_write_at_several_places():
    def function(x, new, more):
        y = x.index_put((torch.tensor([3, 0]),), new)
        return y.index_put((torch.tensor([2, 3, 0]),), more)

    check(function, torch.randn(X), torch.randn(2, 5, 6), torch.randn(3, 5, 6))


def test_one_position_is_a_choice_that_can_be_fused():
    def function(x, new, index):
        return torch.relu(x.index_copy(1, index, new)) * 2

    mod = check(function, torch.randn(X), torch.randn(4, 1, 6), ONE)
    graph = build_graph(lower(mod, LLVM))
    assert {op.kind for op in graph.ops} == {OpKind.CALL_TIR}


class Cache(torch.nn.Module):
    """Attention of one query to a cache, into which the new key is written."""

    def forward(self, q, k, cache, position):
        cache.index_copy_(2, position, k)
        seen = torch.arange(cache.shape[2]) <= position
        return F.scaled_dot_product_attention(q, cache, cache, attn_mask=seen[None, None, None])


def cache_inputs():
    q, k = torch.randn(2, 3, 1, 8), torch.randn(2, 3, 1, 8)
    return q, k, torch.randn(2, 3, 16, 8), torch.tensor([5])


def test_a_cache_is_written_in_place_and_nothing_of_it_is_copied():
    mod = load(Cache(), cache_inputs())
    assert operators(mod).count("relax.call_tir_inplace") == 1
    compiled = tvm_fusion.compile(mod, "llvm", verify=True)
    q, k, cache, position = cache_inputs()
    expected_cache = cache.clone()
    expected = Cache()(q, k, expected_cache, position)
    torch.testing.assert_close(compiled(q, k, cache, position), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache, expected_cache, rtol=0, atol=0)


def test_a_kernel_for_a_cache_is_generated_for_a_gpu():
    mod = load(
        Cache().half(), tuple(x.half() if x.is_floating_point() else x for x in cache_inputs())
    )
    compiled = tvm_fusion.compile(mod, "nvidia_h200", verify=False)
    assert any("write" in source for source in compiled.built.cuda_sources)
    assert [group.fallback for group in compiled.report.groups if group.fallback] == []


CUT_OUT = {
    "a third, turned": lambda y: y.split(16, -1)[1].view(2, 3, 2, 8).transpose(1, 2),
    "every second": lambda y: y[..., 1:33:2].view(2, 3, 2, 8).transpose(1, 2),
    "one head for all": lambda y: y[:, None, :, 24:32].expand(2, 2, 3, 8),
    "an axis that is left out": lambda y: y.view(2, 3, 3, 2, 8).select(2, 2).permute(0, 2, 1, 3),
}


def written_of_cut_out(cut):
    """A step that writes parts of what it computes into a cache; and its inputs."""

    def step(x, w, cache, position):
        y = x @ w
        cache.index_copy_(2, position, cut(y))
        return cache.sum(-1), y[..., 0]

    positions = torch.tensor([7, 0, 4])
    return Function(step), (
        torch.randn(2, 3, 5),
        torch.randn(5, 48),
        torch.zeros(2, 2, 9, 8),
        positions,
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cut", CUT_OUT.values(), ids=CUT_OUT)
def test_values_are_read_where_they_were_cut_out_of(cut):
    model, (x, w, cache, positions) = written_of_cut_out(cut)
    mod = load(model, (x, w, cache, positions))
    (write,) = (func for gvar, func in mod.functions_items() if gvar.name_hint == "write")
    assert [int(n) for n in write.params[2].ty.shape] == [2 * 3 * 48]
    wanted = model(x, w, twin := cache.clone(), positions)
    target = load_profile("nvidia_h100").to_target()
    kernel = ScheduleLeftovers(target)(tvm.IRModule({"write": write}))["write"]
    emulated_cache = cache.numpy().copy()
    run_cuda_on_cpu(kernel, [emulated_cache, positions.numpy(), (x @ w).flatten().numpy()])
    torch.testing.assert_close(torch.from_numpy(emulated_cache), twin)
    given = tvm_fusion.compile(mod, "llvm", verify=True)(x, w, cache, positions)
    torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache, twin, rtol=1e-5, atol=1e-5)


def test_values_that_are_given_are_read_as_they_are():
    def step(cache, position, values):
        cache.index_copy_(2, position, values[..., ::2])
        return cache.sum(-1)

    mod = load(Function(step), (torch.zeros(2, 2, 9, 8), TWO, torch.ones(2, 2, 2, 16)))
    (write,) = (func for gvar, func in mod.functions_items() if gvar.name_hint == "write")
    assert [int(n) for n in write.params[2].ty.shape] == [2, 2, 2, 8]


def test_two_writes_into_one_input_are_both_in_place():
    def function(x, values, index):
        x.index_copy_(0, index, values)
        x.index_copy_(0, index + 1, values * 2)
        return x.sum(1)

    mod = load(Function(function), (torch.zeros(5, 4), torch.ones(1, 4), torch.tensor([1])))
    assert operators(mod).count("relax.call_tir_inplace") == 2
    compiled = tvm_fusion.compile(mod, "llvm", verify=False)
    x = torch.zeros(5, 4)
    compiled(x, torch.ones(1, 4), torch.tensor([1]))
    assert x[:, 0].tolist() == [0, 1, 2, 0, 0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, i, v: (x.index_copy_(0, i, v), v * 2)[1],
        lambda x, i, v: x.mul(2) + x.index_copy_(0, i, v),
        lambda x, i, v: x.add_(1) + v.sum() + i,
    ],
    ids=["nothing reads it", "the old value is read", "another operator"],
)
def test_an_input_that_cannot_be_changed_in_place_stays_and_a_warning_says_so(function, caplog):
    def inputs():
        torch.manual_seed(1)
        return torch.randn(5, 1), torch.tensor([3]), torch.randn(1, 1)

    with caplog.at_level(logging.WARNING, "tvm_fusion"):
        mod = load(Function(function), inputs())
    assert "in place; the compiled one leaves it as it is" in caplog.text
    assert "relax.call_tir_inplace" not in operators(mod)
    given, wanted = run_unfused(mod, *(x.numpy() for x in inputs())), function(*inputs())
    assert_close(given, [wanted.numpy()])


class Counter(torch.nn.Module):
    """Has a state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x):
        self.count.add_(1)
        return x + self.count


def test_a_buffer_that_changes_is_named_in_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "tvm_fusion"):
        load(Counter(), (torch.ones(2),))
    assert "changes its buffer count; the compiled one has no state" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_powers_of_two_are_exponentials(dtype):
    check(torch.exp2, torch.linspace(-4, 4, 33).to(dtype))


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.unsqueeze(0).expand(3, -1, -1)[:, 1:3].fill_(2),
        lambda x: torch.broadcast_to(x, (2, 4, 5)).zero_(),
    ],
)
def test_a_write_into_elements_that_share_memory_is_refused(write):
    """torch.export adds up what lies at one place."""
    with pytest.raises(FrontendError, match=r"(fill_|zero_).* share memory .*clone"):
        load(Function(lambda x: write(x * 2)), (torch.randn(4, 5),))


@pytest.mark.parametrize("resize", [lambda x: x.resize_(2, 3), lambda x: x[1].resize_(2)])
def test_another_size_of_an_input_is_refused(resize):
    with pytest.raises(FrontendError, match=r"resize_.* another size .* resize a clone of it"):
        load(Function(lambda x: resize(x) + 1), (torch.randn(4, 5),))


def test_a_write_beside_an_expanded_view_is_right():
    def write(x):
        y = x * 2
        z = y.unsqueeze(0).expand(3, -1, -1)
        y[1:3].fill_(2)
        return z + 1

    check(write, torch.randn(4, 5))
