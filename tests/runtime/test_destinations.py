"""Functions that write outputs into memory that the caller gives, and calls through them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import tvm

import tvm_fusion
from tvm_fusion.errors import InputError
from tvm_fusion.runtime.calls import repeated_calls
from tvm_fusion.runtime.calls.checked_tensors import CheckedTensors
from tvm_fusion.runtime.calls.compiled_module import CompiledModule
from tvm_fusion.runtime.calls.new_tensors import maker


class Model(torch.nn.Module):
    """A function as a model."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.arange(4.0), requires_grad=False)

    def forward(self, *inputs):
        return self.function(self.weight, *inputs)


def compiled(function, *inputs) -> CompiledModule:
    program = torch.export.export(Model(function).eval(), inputs)
    return tvm_fusion.compile(program, "llvm", verify=False)


def normal(*shape) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


FUNCTIONS = {  # and which outputs are given
    "one kernel": (lambda w, x: x + 1, [True]),
    "several outputs": (lambda w, x: (x + 1, (x * 2).sum(0)), [True, True]),
    "an intermediate and a weight": (lambda w, x: torch.softmax(x @ w, 0), [True]),
    "a view of what is made": (lambda w, x: (x + 1).reshape(-1), [True]),
    "no numbers with a fraction": (lambda w, x: (x > 0, x.to(torch.bfloat16)), [True, True]),
    "a weight": (lambda w, x: (x.exp(), w), [True, False]),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_outputs_lie_in_memory_of_torch(name):
    function, given = FUNCTIONS[name]
    x = normal(3, 4)
    module = compiled(function, x)
    assert [output is not None for output in module.built.destinations.outputs] == given
    kept = []
    for scale in (1, 2, 3):
        result = module(x * scale)
        results = [result] if isinstance(result, torch.Tensor) else result
        kept.append((results, function(Model(function).weight, x * scale)))
    for results, wanted in kept:
        wanted = [wanted] if isinstance(wanted, torch.Tensor) else wanted
        for one, other in zip(results, wanted, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other)
    assert len({results[0].data_ptr() for results, _ in kept}) == len(kept)


def test_one_kernel_is_called_without_a_virtual_machine():
    x = normal(3, 4)
    assert compiled(lambda w, x: x + 1, x).built.destinations.kernel is not None
    assert compiled(lambda w, x: x + w, x).built.destinations.kernel is None
    assert compiled(lambda w, x: torch.softmax(x, 0) @ x.T, x).built.destinations.kernel is None


SYMBOLIC = {  # and whether one kernel is all
    "one kernel": (lambda w, x: x + 1, True),
    "an intermediate and a weight": (
        lambda w, x: torch.softmax(x @ w[:, None], 0) * x.sum(0),
        False,
    ),
    "other sizes": (
        lambda w, x: (torch.cat((x, x.exp()))[: x.shape[0] + 1], x.reshape(-1) * 2),
        False,
    ),
    "squares": (lambda w, x: ((x @ x.T).softmax(-1) @ x, x > 0), False),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SYMBOLIC)
def test_sizes_that_a_call_tells_have_destinations_too(name, monkeypatch):
    function, is_kernel = SYMBOLIC[name]
    monkeypatch.setattr(repeated_calls, "MOST_SIZES", 3)
    shapes = {"inputs": ({0: torch.export.Dim("n", min=2, max=64)},)}
    program = torch.export.export(Model(function), (normal(3, 4),), dynamic_shapes=shapes)
    module = tvm_fusion.compile(program, "llvm", verify=False)
    assert (module.built.destinations.kernel is not None) == is_kernel
    for rows in (3, 5, 3, 2, 64, 3, 5, 5, 3, 17, 3):
        x = normal(rows, 4)
        results = [module(x + scale) for scale in range(3)]
        for scale, found in enumerate(results):
            wanted = function(Model(function).weight, x + scale)
            torch.testing.assert_close(found, wanted)
    assert len(module._again._calls) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.double(),
        lambda x: x[:2],
        lambda x: x[None],
        lambda x: [[1.0]],
    ],
    ids=["a dtype", "an extent", "a rank", "a list"],
)
def test_what_is_wrong_is_named_after_many_right_calls_too(wrong):
    x = normal(3, 4)
    module = compiled(lambda w, x: (x + 1, x - 1), x)
    for _ in range(3):
        module(x)
    with pytest.raises(InputError, match="input"):
        module(wrong(x))
    with pytest.raises(InputError, match="expected 1 inputs"):
        module(x, x)
    torch.testing.assert_close(module(x.T.contiguous().T)[0], x + 1)


def test_threads_have_outputs_of_their_own():
    x = normal(64, 4)
    module = compiled(lambda w, x: (x + 1, torch.softmax(x * w, 1)), x)

    def work(scale: float) -> bool:
        calls = (torch.equal(module(x * scale)[0], x * scale + 1) for _ in range(200))
        return all(list(calls))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, (0.0, 1.0, 2.0)))


def test_outputs_that_nobody_reads_are_left_out():
    x = normal(3, 4)
    module = compiled(lambda w, x: (x.exp(), w), x)
    module.unread = frozenset([1])
    module.call_with([x])
    first, second = module.call_with([x])
    torch.testing.assert_close(first, x.exp())
    assert second is None


def test_new_tensors_are_as_torch_makes_them():
    outputs = [((), "float32"), ((2, 3), "bool"), ((4, 0, 2), "int64"), ((1, 5), "bfloat16")]
    for (shape, dtype), made in zip(outputs, maker(outputs, tvm.cpu())(), strict=True):
        wanted = torch.empty(shape, dtype=getattr(torch, dtype))
        assert (made.shape, made.dtype, made.stride()) == (
            wanted.shape,
            wanted.dtype,
            wanted.stride(),
        )


@pytest.mark.parametrize("shape", [(4, 0), (4, 0, 2), (0, 4)])
def test_empty_tensors_are_known_again(shape):
    tensors = CheckedTensors([(tvm.cpu(), shape, "float32")])
    assert tensors.call(torch.empty(shape)) is not None
    assert tensors.call(torch.empty(4, 4)) is None
