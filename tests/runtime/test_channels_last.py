"""Compiled models take torch tensors in channels_last as they lie, and return them so."""

import json

import numpy as np
import pytest
import torch
import torch.nn as nn
import tvm

import tvm_fusion
from tvm_fusion.bench import compare
from tvm_fusion.compilation.one_function import Wishes, compile_function
from tvm_fusion.errors import InputError
from tvm_fusion.flow import functions
from tvm_fusion.frontends.memory_formats import FORMATS
from tvm_fusion.runtime.calls import compiled_module
from tvm_fusion.runtime.calls.compiled_module import CompiledModule
from tvm_fusion.runtime.timing.timing import FUSED, UNFUSED
from tvm_fusion.transform.layouts.memory_formats import MemoryFormats

from ..support.fake_cuda_graph import captured_on_cpu


class Block(nn.Module):
    """An image in channels_last and rows; gives an image and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 6, 1)

    def forward(self, x, scale):
        y = self.second(torch.relu(self.first(x) * scale))
        return y, y.mean((2, 3))


class Write(nn.Module):
    """Writes into its first input."""

    def forward(self, cache, at, new):
        cache.index_put_((at,), new)
        return torch.relu(cache)


def last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=FORMATS[tensor.ndim])


def images(edge: int = 5, batch: int = 2) -> torch.Tensor:
    torch.manual_seed(edge)
    return last(torch.randn(batch, 4, edge, edge + 2))


def compiled_on_cpu(model: nn.Module, inputs: tuple, **options) -> CompiledModule:
    return tvm_fusion.compile((model.eval(), inputs), "llvm", **options)


@pytest.fixture
def as_on_gpus(monkeypatch):
    monkeypatch.setattr(functions, "takes_formats", lambda _target: True)


@pytest.fixture(scope="module")
def block():
    torch.manual_seed(0)
    model, inputs = Block().eval(), (images(), torch.randn(8, 1, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "takes_formats", lambda _target: True)
        return model, compiled_on_cpu(model, inputs, verify=True), inputs


def check(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
        assert one.stride() == other.stride()


def test_the_signature_has_the_shapes_of_the_model_and_its_formats(block):
    _, compiled, _ = block
    assert compiled.signature.inputs[0].shape == (2, 4, 5, 7)
    assert compiled.built.signature.inputs[0].shape == (2, 5, 7, 4)
    assert compiled.signature.formats == MemoryFormats((True, False), (True, False))


def test_tensors_are_taken_and_returned_as_they_lie_in_first_and_in_repeated_calls(block):
    model, compiled, (_, scale) = block
    for n in range(3):
        x = images() + n
        assert compiled.arguments((x, scale))[0].data_ptr() == x.data_ptr()
        with torch.no_grad():
            check(compiled(x, scale), model(x, scale))
        assert compiled._again is not None


def test_a_contiguous_tensor_gives_the_same_by_a_copy(block):
    model, compiled, (x, scale) = block
    for given in (x, x.contiguous(), x, x.contiguous()[:, :, :, :]):
        with torch.no_grad():
            check(compiled(given, scale), model(x, scale))
    plain = x.contiguous()
    assert compiled.arguments((plain, scale))[0].data_ptr() != plain.data_ptr()


def test_bound_calls_give_tensors_with_strides_over_the_same_memory(block):
    model, compiled, inputs = block
    found = compiled.bind(*inputs)()
    with torch.no_grad():
        check([torch.from_dlpack(y) for y in found], model(*inputs))


def test_arrays_have_the_shape_of_the_model_and_are_contiguous(block):
    model, compiled, inputs = block
    arrays = [x.contiguous().numpy() for x in inputs]
    with torch.no_grad():
        expected = model(*inputs)
    for _ in range(2):
        for one, other in zip(compiled(*arrays), expected, strict=True):
            np.testing.assert_allclose(one, other.numpy(), atol=1e-5, rtol=1e-4)
            assert one.flags.c_contiguous


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: tvm.runtime.tensor(x.contiguous().numpy()), "input x is a TVM tensor"),
        (lambda x: x.permute(0, 2, 3, 1), r"expected shape \(2, 4, 5, 7\), got \(2, 5, 7, 4\)"),
        (lambda x: x[0], "of rank 4, got .* of rank 3"),
        (lambda x: x.double(), "expected dtype float32, got float64"),
        (lambda x: 3, "an input is a int"),
    ],
)
def test_what_does_not_fit_is_an_error_in_the_terms_of_the_model(block, change, message):
    _, compiled, (x, scale) = block
    compiled(x, scale)
    with pytest.raises(InputError, match=message):
        compiled(change(x), scale)


def test_a_wrong_number_of_inputs_is_named(block):
    _, compiled, (x, _) = block
    with pytest.raises(InputError, match="expected 2 inputs"):
        compiled(x)


def test_saved_modules_keep_formats_and_older_files_have_none(block, tmp_path):
    model, compiled, inputs = block
    path = compiled.save(tmp_path / "model.so")
    loaded = CompiledModule.load(path)
    assert loaded.signature == compiled.signature
    with torch.no_grad():
        check(loaded(*inputs), model(*inputs))
    sidecar = path.with_name(path.name + ".json")
    facts = json.loads(sidecar.read_text())
    assert facts["format"] == 3  # versions that know of no formats refuse it
    del facts["formats"]
    sidecar.write_text(json.dumps(facts))
    assert CompiledModule.load(path).signature.formats is None


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [True, {"static_outputs": True}])
@pytest.mark.usefixtures("as_on_gpus")
def test_graphs_read_tensors_as_they_lie(options, monkeypatch):
    torch.manual_seed(0)
    model, scale = Block().eval(), torch.randn(8, 1, 1)
    planned = functions.planned_function((model, (images(), scale)), "llvm")
    compiled, driver = captured_on_cpu(monkeypatch, planned.fuse(), options)
    compiled.signature = compiled.signature.in_formats(planned.formats)
    asked = []
    convert = compiled_module.to_argument
    monkeypatch.setattr(
        compiled_module, "to_argument", lambda *a: asked.append(a[0]) or convert(*a)
    )
    with torch.no_grad():
        for n in range(3):
            x = images() + n
            check(compiled(x, scale), model(x, scale))
        assert len(driver.said("capture")) == 1
        assert len(driver.said("launch")) == 2
        assert len(asked) == 2  # the inputs of the first call: later ones are only pointed to
        check(compiled(x.contiguous(), scale), model(x, scale))
        assert len(driver.said("capture")) == 1
        bound = compiled.bind(x, scale)
        for _ in range(2):
            check([torch.from_dlpack(y) for y in bound()], model(x, scale))
            x += 1


def test_a_cpu_takes_contiguous_tensors(tmp_path):
    torch.manual_seed(0)
    model, inputs = Block(), (images(), torch.randn(8, 1, 1))
    compiled = compiled_on_cpu(model, inputs, verify=False)
    assert compiled.signature.formats is None
    found, _ = compiled(*inputs)
    assert found.is_contiguous()
    path = compiled.save(tmp_path / "model.so")
    assert json.loads(path.with_suffix(".so.json").read_text())["format"] == 1


@pytest.mark.usefixtures("as_on_gpus")
def test_volumes_and_symbolic_sizes_keep_their_formats():
    model = nn.SiLU()
    x = last(torch.randn(2, 3, 4, 5, 6))
    compiled = compiled_on_cpu(
        model, (x,), verify=False, dynamic_shapes=({0: torch.export.Dim("batch", max=64)},)
    )
    assert compiled.signature.inputs[0].shape[1:] == (3, 4, 5, 6)
    for batch in (2, 3):
        x = last(torch.randn(batch, 3, 4, 5, 6))
        check([compiled(x)], [model(x)])


@pytest.mark.usefixtures("as_on_gpus")
def test_only_outputs_that_lie_so_are_turned():
    class Turn(nn.Module):
        def forward(self, x):
            return torch.exp(x).to(memory_format=torch.channels_last)

    x = torch.randn(2, 3, 4, 5)
    compiled = compiled_on_cpu(Turn(), (x,), verify=False)
    assert compiled.signature.formats == MemoryFormats((False,), (True,))
    for _ in range(2):
        check([compiled(x)], [last(torch.exp(x))])


@pytest.mark.usefixtures("as_on_gpus")
def test_what_is_written_into_stays_the_callers_memory():
    cache, at, new = last(torch.zeros(5, 3, 6, 4)), torch.tensor([1, 4]), torch.randn(2, 3, 6, 4)
    compiled = compiled_on_cpu(Write(), (cache.clone(), at, new), verify=False)
    assert compiled.writes == (0,)
    assert compiled.signature.formats is None
    compiled(cache, at, new)
    assert torch.equal(cache[at], new)


@pytest.mark.usefixtures("as_on_gpus")
def test_an_exported_file_says_how_its_inputs_lay(tmp_path):
    program = torch.export.export(nn.SiLU(), (last(torch.randn(2, 3, 4, 5)),))
    torch.export.save(program, tmp_path / "model.pt2")
    for model in (program, tmp_path / "model.pt2"):
        planned = functions.planned_function(model, "llvm")
        assert planned.formats == MemoryFormats((True,), (True,))


@pytest.mark.usefixtures("as_on_gpus")
def test_peers_and_both_of_our_modules_are_timed_on_the_same_inputs(monkeypatch):
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()).eval()
    (planned,) = functions.planned_functions((model, (images(),)), "llvm").values()
    compiled = compile_function(planned, Wishes())
    unfused = CompiledModule.of(planned.build_unfused())
    found = {}

    def time_calls(calls, _device):
        found.update({name: call().numpy() for name, call in calls.items()})
        return {}

    monkeypatch.setattr(compare, "time_calls", time_calls)
    assert compare._together(planned, compiled, unfused, ()) == {}
    np.testing.assert_allclose(found[FUSED], found[UNFUSED], atol=1e-5)
