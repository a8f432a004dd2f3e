"""What callers of a compiled PyTorch model give and get beside the tensors of `main`: tensors that
stay between calls, weights that are loaded later, and results as the model returns them.
"""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import tvm_fusion
from tests.support.frontend_tools import Function
from tvm_fusion.errors import FrontendError, InputError
from tvm_fusion.frontends import load
from tvm_fusion.runtime.module import CompiledModule


def compiled(model, *inputs, **options):
    model = model if isinstance(model, nn.Module) else Function(model)
    return tvm_fusion.compile(model, "llvm", example_inputs=inputs, **{"verify": False, **options})


@dataclasses.dataclass
class Pair:
    """A result of a class of the model's own."""

    sum: torch.Tensor
    number: int = 3


torch.export.register_dataclass(Pair)


def returned(x, z):
    """Results of each kind."""
    y = x * 2
    return {
        "twice": (y, [y]),
        "itself": x,
        "view": x[1:].t(),
        "expanded": z.expand(2, 3),
        "of a result": y.reshape(-1)[2:],
        "numbers": (None, 4, 2.5, True, "text", x.shape[0], 2 * x.shape[0] + 1),
        "pair": Pair(z + 1),
    }


def assert_same(given, wanted):
    """Equal structures, types and values."""
    leaves, spec = torch.utils._pytree.tree_flatten(given)
    expected, structure = torch.utils._pytree.tree_flatten(wanted)
    assert spec == structure
    for one, other in zip(leaves, expected, strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other)
        else:
            assert one == other


def scaled(x, scale, mask=None, bias=None, mode="sum", twice=False):
    """A function with inputs that are no tensors."""
    y = x * scale if mask is None else x * mask
    y = y if bias is None else y + bias
    y = y * 2 if twice else y
    return (x, y.sum() if mode == "sum" else y, scale)


def test_numbers_among_the_example_inputs_are_parts_of_the_model(tmp_path):
    x, bias = torch.randn(4, 3), torch.randn(3)
    inputs = (x, 3.5, None, bias, "none", True)
    module = compiled(scaled, *inputs, verify=True)
    assert [spec.shape for spec in module.signature.inputs] == [(4, 3), (3,)]
    module.save(tmp_path / "scaled.so")
    for one in (module, CompiledModule.load(tmp_path / "scaled.so")):
        assert_same(one(*inputs), scaled(*inputs))
        assert_same(one(x, bias), scaled(*inputs))
        assert one(*inputs)[0] is x
        bound = one.bind(*inputs)()[0].numpy()
        np.testing.assert_allclose(bound, scaled(*inputs)[1], rtol=1e-6, atol=1e-6)
        for place, other in ((1, 3), (1, 4.5), (2, 0), (4, "sum"), (5, 1)):
            given = (*inputs[:place], other, *inputs[place + 1 :])
            with pytest.raises(InputError, match=f"input {place} is .*compile it for the other"):
                one(*given)
    with pytest.raises(InputError, match="expected 2 inputs"):
        module(x, 3.5, bias)


@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_results_alias_and_nest_as_the_model_returns_them(dynamic):
    z, rows = torch.randn(3), torch.export.Dim("rows", min=3)
    module = compiled(
        returned, torch.randn(4, 3), z, dynamic_shapes=(({0: rows}, None),) if dynamic else None
    )
    x = torch.randn(5 if dynamic else 4, 3)
    results, eager = module(x, z), returned(x, z)
    assert_same(results, eager)
    assert results["twice"][0] is results["twice"][1][0]
    assert results["itself"] is x
    assert results["expanded"].data_ptr() == z.data_ptr()
    if not dynamic:
        assert results["view"].data_ptr() == eager["view"].data_ptr()
        results["twice"][0][0, 2] = 7
        assert results["of a result"][0] == 7
    array = module(x.numpy(), z.numpy())
    np.testing.assert_array_equal(array["view"], eager["view"].numpy())
    strided = x.t().contiguous().t()  # a view is one of what the caller gave, a copy if it must be
    assert_same(module(strided, z), returned(strided, z))


class Steps(nn.Module):
    """Writes into buffers: a counter, a cache, statistics of a batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(4, 2))
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        self.count += 1
        self.cache[self.count.view(1)] = x[:1]
        return self.norm(x) + self.cache.sum(0), self.count


def test_results_share_memory_where_those_of_the_model_do_and_nowhere_else(tmp_path):
    def function(x):
        y = x * 2
        return y, y.clone(), x.clone(), torch.ones(3), y.reshape(-1)

    x = torch.randn(4, 6)
    module = compiled(function, x)
    module.save(tmp_path / "model.so")
    for run in (module, CompiledModule.load(tmp_path / "model.so")):
        for _ in range(2):  # checked, and as before; what a caller writes stays his own
            results = run(x)
            assert_same(results, function(x))
            bases = [result.untyped_storage().data_ptr() for result in results]
            assert bases[4] == bases[0]
            assert len({*bases, x.untyped_storage().data_ptr()}) == 5
            for result in results:
                result.add_(1)
    arrays = module(x.numpy())
    arrays[0][:] = 0
    np.testing.assert_allclose(arrays[1], 2 * x)


def test_buffers_stay_between_calls_and_are_saved(tmp_path):
    model, x = Steps(), torch.randn(5, 2)
    program = torch.export.export(model.train(), (x,))
    module = tvm_fusion.compile(program, "llvm", verify=False)
    assert [spec.name for spec in module.signature.inputs] == ["x"]
    for number in range(2):
        torch.testing.assert_close(module(x), model(x))
        x = x + number + 1
    kept = module.state_dict()
    assert_same(kept, {name: dict(model.named_buffers())[name] for name in kept})
    assert set(kept) == {
        "count", "cache", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"
    }  # fmt: skip
    again = CompiledModule.load(module.save(tmp_path / "steps.so"))
    torch.testing.assert_close(again(x), model(x))
    assert isinstance(module(x.numpy())[0], np.ndarray)
    module.load_state_dict({"count": torch.tensor(0)})
    assert module(x)[1] == 1
    with pytest.raises(InputError, match=r"norm\.weight.*constants of it.*strict=False"):
        module.load_state_dict({"norm.weight": torch.ones(2), "count": torch.tensor(0)})
    with pytest.raises(InputError, match=r"cache: expected float32 \(4, 2\), got float32 \(4,\)"):
        module.load_state_dict({"count": torch.tensor(0), "cache": torch.zeros(4)})
    assert module.state_dict()["count"] == 1  # nothing was changed
    with pytest.raises(InputError, match="expected 1 inputs"):
        module(x, x)


def test_inputs_that_the_model_writes_have_their_new_values_after_the_call():
    def function(x, y):
        x.add_(1)
        y.mul_(x[:3])
        return x, y + 1

    module = compiled(function, torch.zeros(4), torch.ones(3))
    for made in (lambda v: v, lambda v: v.numpy()):
        x, y = made(torch.arange(4.0)), made(torch.full((3,), 2.0))
        result = module(x, y)
        assert result[0] is x
        assert [*x] == [1, 2, 3, 4]
        assert [*y] == [2, 4, 6]
        assert [*result[1]] == [3, 5, 7]
    with pytest.raises(InputError, match="several of its elements are one in memory"):
        module(torch.zeros(1).expand(4), torch.ones(3))


class Tied(nn.Module):
    """Has weights of two names, constants of its own, and a buffer that no file holds."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.embedding.weight
        self.register_buffer("shift", torch.arange(3), persistent=False)

    def forward(self, i):
        return self.out(torch.tanh(self.embedding(i + self.shift))) + torch.arange(20)


def test_weights_on_the_meta_device_are_loaded_later(tmp_path):
    real, i = Tied(), torch.arange(3)
    with torch.device("meta"):
        model = Tied()
    module = compiled(model, i, verify=True)
    assert model.out.weight.device.type == "meta"
    assert "its weights have no values yet: shapes and dtypes only" in module.report.full()
    with pytest.raises(InputError, match=r"no values yet \(.*weight.*load_state_dict"):
        module(i)
    with pytest.raises(InputError, match=r"given no values \(shift\)"):
        module.load_state_dict(real.state_dict())
    values = {**real.state_dict(), "shift": real.shift}
    module.load_state_dict(values)
    torch.testing.assert_close(module(i), real(i))
    assert_same(module.state_dict(), {name: values[name].detach() for name in module.state_dict()})
    again = CompiledModule.load(module.save(tmp_path / "tied.so"))
    torch.testing.assert_close(again(i), real(i))
    with pytest.raises(FrontendError, match=r"weights have no values .*tvm_fusion\.compile"):
        load((model, (i,)))
    program = torch.export.export(nn.Linear(2, 2, device="meta"), (torch.ones(2, device="meta"),))
    with pytest.raises(FrontendError, match="exported on the meta device"):
        tvm_fusion.compile(program, "llvm")


def test_a_model_that_returns_no_tensor_is_refused():
    with pytest.raises(FrontendError, match="returns no tensor"):
        compiled(lambda x: x.shape[0], torch.ones(2))


def test_a_weight_that_layers_share_is_stored_once():
    layer = nn.Linear(32, 32, bias=False)
    module = compiled(nn.Sequential(layer, nn.ReLU(), layer), torch.randn(3, 32))
    assert module.memory.weights_bytes == layer.weight.nbytes


def test_a_complex_input_of_real_results_is_taken_as_it_is():
    z = torch.randn(3, 4, dtype=torch.complex64)
    module = tvm_fusion.compile(Function(torch.abs), "llvm", example_inputs=(z,), verify=False)
    torch.testing.assert_close(module(z), z.abs())


class Viewed(nn.Module):
    """Layers that share a weight, and a buffer that is a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.register_buffer("rows", self.first.weight.detach()[2:5].t())

    def forward(self, x):
        return self.second(self.first(x).relu()) @ self.rows


def test_models_that_are_compiled_at_once_are_right_and_so_are_views_of_weights():
    model, x = Viewed(), torch.randn(3, 8)
    models = (model, model, nn.Sequential(nn.Linear(8, 9), nn.GELU()))
    start = threading.Barrier(len(models))

    def run(model):
        start.wait(20)
        return compiled(model, x)(x)

    with ThreadPoolExecutor(len(models)) as pool:
        for model, found in zip(models, pool.map(run, models), strict=True):
            torch.testing.assert_close(found, model(x))
