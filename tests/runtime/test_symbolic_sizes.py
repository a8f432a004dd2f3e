"""Sizes that are known at the call: memory by what a call needs, bounds, multiples, and none."""

import numpy as np
import pytest
import torch
from torch.export import Dim
from tvm import tirx

import tvm_fusion
from tvm_fusion.config import load_profile
from tvm_fusion.errors import InputError
from tvm_fusion.ir.extents import Bounds
from tvm_fusion.ir.graph import OUTPUTS_ATTR
from tvm_fusion.kernels.program.analysis import analyze
from tvm_fusion.kernels.row.kernel import emit_row, row_configs

from ..support.cuda_on_cpu import run_cuda_on_cpu
from ..support.helpers_tir import poisoned
from ..support.kernel_cases import fuse
from ..support.row_graphs import softmax

TOKENS = Dim("tokens", max=131072)


def compiled(model, inputs, shapes, **options):
    options = {"example_inputs": inputs, "dynamic_shapes": shapes, "verify": False, **options}
    return tvm_fusion.compile(model, "llvm", **options)


def test_memory_is_what_the_call_needs_and_not_what_its_bound_allows():
    class Similar(torch.nn.Module):
        def forward(self, x):
            scores = torch.sort(x[:, None] * x).values  # what no kernel keeps to itself
            return scores.sum(0), scores.sum(1)

    module = compiled(Similar(), (torch.randn(37),), ({0: TOKENS},))
    for tokens in (65, 1, 130):
        x = torch.randn(tokens)
        torch.testing.assert_close(module(x), Similar()(x))
    (symbol,) = module.signature.bounds
    scores = 65 * 65 * 4
    assert scores <= module.memory.peak_bytes({symbol: 65}) <= 4 * (scores + 256) + 2 * 65 * 4


def test_a_size_beyond_its_bounds_is_named(tmp_path):
    shapes = ({0: Dim("rows", max=100)}, {0: Dim("keys", min=3, max=64)})

    class Sums(torch.nn.Module):
        def forward(self, x, y):
            return torch.relu(x).sum(-1) + y.sum()

    module = compiled(Sums(), (torch.randn(16, 4), torch.randn(5, 4)), shapes)
    assert [*module.signature.bounds.values()] == [Bounds(0, 100), Bounds(3, 64)]
    module.save(tmp_path / "sums.so")
    for one in (module, tvm_fusion.CompiledModule.load(tmp_path / "sums.so")):
        for rows, keys, said in (
            (101, 5, "input x: .*axis 0 is 101, but .* is at most 100"),
            (5, 2, "input y: .*axis 0 is 2, but .* is at least 3"),
            (5, 65, "input y: .*axis 0 is 65, but .* is at most 64"),
        ):
            with pytest.raises(InputError, match=said):
                one(torch.randn(rows, 4), torch.randn(keys, 4))
        x, y = torch.randn(100, 4), torch.randn(3, 4)
        torch.testing.assert_close(one(x, y), Sums()(x, y))


def test_multiples_of_a_size_are_taken_and_others_are_refused():
    class Pairs(torch.nn.Module):
        def forward(self, x):
            n = x.shape[0]
            eights = x.reshape(n // 8, 8, 4).sum(1)
            return eights, x.reshape(n // 2, 8).relu()

    model = Pairs()
    module = compiled(model, (torch.randn(16, 4),), ({0: 8 * Dim("s", max=100)},))
    for rows in (8, 16, 800):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(module(x), model(x))
    for rows, said in ((12, "a multiple of 8"), (808, "at most 800")):
        with pytest.raises(InputError, match=f"input x: .*axis 0 is {rows}, but .* is {said}"):
            module(torch.randn(rows, 4))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("weight", [False, True])
def test_norms_over_columns_of_any_number(weight):
    class Norm(torch.nn.Module):
        def forward(self, x, weight=None):
            return torch.nn.functional.layer_norm(x, x.shape[-1:], weight)

    def inputs(columns):
        return (torch.randn(5, columns), *([torch.randn(columns)] * weight))

    shapes = ({1: TOKENS}, *([{0: TOKENS}] * weight))
    module = compiled(Norm(), inputs(37), shapes)
    for columns in (1, 100, 0):
        given = inputs(columns)
        torch.testing.assert_close(module(*given), Norm()(*given))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [torch.as_tensor, np.asarray])
def test_no_elements_along_a_symbolic_axis(kind):
    shapes = ({0: Dim("rows"), 1: Dim("columns")},)

    class Softmax(torch.nn.Module):
        def forward(self, x):
            return torch.softmax(x, -1)

    module = compiled(Softmax(), (torch.randn(5, 7),), shapes)
    for shape in ((0, 7), (5, 0), (0, 0), (1, 1)):
        x = torch.randn(shape)
        for _ in range(3):
            torch.testing.assert_close(torch.as_tensor(module(kind(x))), torch.softmax(x, -1))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("queries", "heads", "dtype"),
    [(1, 2, torch.float32), (3, 1, torch.float16), (40, 2, torch.float16)],
)
def test_attention_over_no_key_is_0(queries, heads, dtype):
    """By one kernel where there are many queries, by two products and a softmax elsewhere."""

    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def inputs(keys):
        shapes = ((2, queries), (heads, keys), (heads, keys))
        return tuple(torch.randn(1, *shape, 64, dtype=dtype) for shape in shapes)

    keys = Dim("keys", max=4096)
    module = compiled(Attention(), inputs(7), ({}, {2: keys}, {2: keys}))
    for count in (0, 1, 5):
        given = inputs(count)
        wanted = Attention()(*(x.double() for x in given)).to(dtype)
        torch.testing.assert_close(module(*given), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("rows", [0, 3])
def test_a_kernel_whose_output_has_no_elements_is_not_launched(rows):
    graph = fuse(softmax, ((tirx.Var("n", "int64"), 64), "float32"))
    program, hw = analyze(graph), load_profile("nvidia_h200")
    written = emit_row(program, row_configs(program, hw)[0], hw).with_attr(OUTPUTS_ATTR, 1)
    x, y = np.random.default_rng(0).random((rows, 64), "float32"), poisoned((rows, 64), "float32")
    assert run_cuda_on_cpu(written, [x, y]) == bool(rows)
    np.testing.assert_allclose(y.sum(1), np.ones(rows), rtol=1e-5)
