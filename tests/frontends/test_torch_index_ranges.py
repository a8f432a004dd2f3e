"""Each operator of PyTorch that reads or writes at indices, at negative ones and beyond the end: it
raises where eager execution raises, and gives what that gives elsewhere.
"""

from functools import cache

import pytest
import tvm

import tvm_fusion
from tvm_fusion.check.index_checks import IndexChecks
from tvm_fusion.frontends import load

from ..support.frontend_tools import Function

torch = pytest.importorskip("torch")
F = torch.nn.functional

X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.arange(1.0, 6)
SOME = torch.tensor([0, 3])  # in range of every axis


def columns(i):
    return i[None].expand(4, -1)


# What an operator makes of x and two indices, and the extent that these are counted in.
OPERATORS = {
    # read
    "x[i]": (lambda x, i: x[i], 4),
    "x[:, i]": (lambda x, i: x[:, i], 5),
    "x[i, i]": (lambda x, i: x[i, i], 4),
    "x[int32]": (lambda x, i: x[i.int()], 4),
    "unsafe_index": (lambda x, i: torch.ops.aten._unsafe_index(x, [i]), 4),
    "take": (lambda x, i: torch.take(x, i), 20),
    "take_along_dim": (lambda x, i: torch.take_along_dim(x, i[None], 1), 5),
    "take_along_dim_flat": (lambda x, i: torch.take_along_dim(x, i), 20),
    "gather": (lambda x, i: x.gather(1, columns(i)), 5),
    "index_select": (lambda x, i: x.index_select(1, i), 5),
    "narrow": (lambda x, i: torch.narrow(x, 1, i[1], 1), 5),
    "embedding": (lambda x, i: F.embedding(i, x), 4),
    "embedding_padded": (lambda x, i: F.embedding(i, x, padding_idx=0), 4),
    "embedding_bag_sum": (lambda x, i: F.embedding_bag(i[None], x, mode="sum"), 4),
    "embedding_bag_max": (lambda x, i: F.embedding_bag(i[None], x, mode="max"), 4),
    "one_hot": (lambda x, i: F.one_hot(i, 4), 4),
    "nll_loss": (lambda x, i: F.nll_loss(x[:2], i, reduction="none"), 5),
    "nll_loss_weighted": (lambda x, i: F.nll_loss(x[:2], i, WEIGHT), 5),
    "nll_loss_images": (lambda x, i: F.nll_loss(x[None, :, :2, None], i[None, :, None]), 4),
    "nll_loss_ignoring": (lambda x, i: F.nll_loss(x[:2], i, ignore_index=-1), 5),
    "cross_entropy": (lambda x, i: F.cross_entropy(x[:2], i), 5),
    "cross_entropy_weighted": (lambda x, i: F.cross_entropy(x[:2], i, WEIGHT), 5),
    "cross_entropy_smoothed": (lambda x, i: F.cross_entropy(x[:2], i, label_smoothing=0.1), 5),
    "multi_margin_loss": (lambda x, i: F.multi_margin_loss(x[:2], i), 5),
    # read of a part of a tensor: the index is one of the part
    "x[1:3][i]": (lambda x, i: x[1:3][i - 2] * 2, 4),
    "split": (lambda x, i: x.split(2)[1][i - 2], 4),
    "pad": (lambda x, i: F.pad(x, (0, 0, 1, 1))[i], 6),
    "repeat": (lambda x, i: x.repeat(2, 1)[i], 8),
    "gather_of_part": (lambda x, i: (x[:, 1:] * 2).gather(1, columns(i)), 4),
    "joined": (lambda x, i: torch.cat([x[1:3], x[:2]]).index_select(0, i), 4),
    "joined_padded": (lambda x, i: torch.cat([F.pad(x, (0, 0, 1, 1)), x[1:3]])[i], 8),
    "stacked": (lambda x, i: torch.stack([x[:, :4], x[:, 1:]]).index_select(2, i), 4),
    "expanded": (lambda x, i: x[1:2].expand(4, 5).index_select(0, i) + 1, 4),
    "outer_sum": (lambda x, i: (x[1:3, None] + x[None, :2])[i - 2] * 2, 4),
    # write
    "scatter": (lambda x, i: x.scatter(1, columns(i), x + 1), 5),
    "scatter_value": (lambda x, i: x.scatter(1, columns(i), 2.5), 5),
    "scatter_number": (lambda x, i: x[0, 0].scatter(0, i[1] - 3, x[0, 1]), 4),
    "scatter_multiply": (lambda x, i: x.scatter(1, columns(i), x, reduce="multiply"), 5),
    "scatter_add": (lambda x, i: x.scatter_add(0, i[:, None].expand(-1, 5), x), 4),
    "scatter_amax": (lambda x, i: x.scatter_reduce(1, columns(i), 2 * x, "amax"), 5),
    "scatter_mean": (
        lambda x, i: x.scatter_reduce(1, columns(i), x, "mean", include_self=False),
        5,
    ),
    "index_add": (lambda x, i: x.index_add(0, i, x[:2], alpha=2), 4),
    "index_add_one": (lambda x, i: x.index_add(1, i[1:], x[:, :1]), 5),
    "index_copy": (lambda x, i: x.index_copy(0, i, x[:2] + 1), 4),
    "index_copy_one": (lambda x, i: x.index_copy(0, i[1:], x[:1] + 1), 4),
    "index_fill": (lambda x, i: x.index_fill(1, i, 3.5), 5),
    "index_fill_one": (lambda x, i: x.index_fill(1, i[1], 3.5), 5),
    "index_reduce": (lambda x, i: x.index_reduce(0, i, x[:2], "amin"), 4),
    "index_put": (lambda x, i: x.index_put((i,), x[:2] + 1), 4),
    "index_put_one": (lambda x, i: x.index_put((i[0], i[1]), x[1, 1]), 5),
    "index_put_added": (lambda x, i: x.index_put((i, i), x[0, :2], accumulate=True), 4),
    "put": (lambda x, i: x.put(i, x[0, :2]), 20),
    "max_unpool1d": (lambda x, i: F.max_unpool1d(x[None, :1, :2], i.reshape(1, 1, 2), 2), 4),
    "max_unpool2d": (lambda x, i: F.max_unpool2d(x[None, None, :1, :2], i[None, None, None], 2), 8),
    "max_unpool3d": (
        lambda x, i: F.max_unpool3d(x[None, None, None, :1, :2], i.reshape(1, 1, 1, 1, 2), 2),
        16,
    ),
}


NAMES = list(OPERATORS)
PARTS = 3  # models that have every third of them, the first of which runs always


def function_and_wrong(number):
    """An operator, and indices of which it may make an error."""
    function, extent = OPERATORS[NAMES[number]]
    return function, (3, -1, -extent, -100, extent, -extent - 1, 1 << 40)


def given(number, index):
    """What all operators of a part take, where one has another index."""
    others = range(number % PARTS, len(NAMES), PARTS)
    return [X, *(index if n == number else SOME for n in others)]


def outcome(function, *inputs):
    """What a call gives, or None where it raises."""
    try:
        return function(*inputs)
    except (IndexError, RuntimeError):
        return None


@cache
def model_of(part):
    """All of a part in one model, each with indices of its own."""
    functions = [OPERATORS[name][0] for name in NAMES[part::PARTS]]

    def results(x, *indices):
        return tuple(f(x, i) for f, i in zip(functions, indices, strict=True))

    return load(Function(results), (X, *(SOME.clone() for _ in functions)))


@cache
def compiled_of(part):
    return tvm_fusion.compile(model_of(part), "llvm", verify=False)


@cache
def checks_of(part):
    """What is asked before a call on a GPU."""
    return IndexChecks.of(model_of(part), tvm.target.Target({"kind": "llvm", "opt-level": 0}))


@pytest.mark.one_in(PARTS)
@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_an_index_is_what_it_is_to_torch(number):
    function, wrong = function_and_wrong(number)
    part, place = number % PARTS, number // PARTS
    compiled = compiled_of(part)
    for index in (torch.tensor([0, i]) for i in wrong):
        expected = outcome(function, X, index)
        if expected is None:
            with pytest.raises(IndexError, match=r"an index along axis \d, which has \d+ elements"):
                compiled(*given(number, index))
        else:
            torch.testing.assert_close(compiled(*given(number, index))[place], expected)


@pytest.mark.one_in(3 * PARTS)
@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_checks_before_a_call_raise_where_torch_does(number):
    function, wrong = function_and_wrong(number)
    checks = checks_of(number % PARTS)
    for index in (torch.tensor([0, place]) for place in wrong):
        arguments = [tvm.runtime.tensor(x.numpy()) for x in given(number, index)]
        raises = outcome(lambda values: checks(values) or True, arguments) is None
        assert raises is (outcome(function, X, index) is None)
