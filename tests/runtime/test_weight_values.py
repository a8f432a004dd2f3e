"""Weights of compiled modules: parameters that nobody gives, computed in the end."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

import tvm_fusion
from tvm_fusion.config import resolve_target
from tvm_fusion.config.targets import device_of
from tvm_fusion.ir import weights
from tvm_fusion.runtime.build import weight_values
from tvm_fusion.runtime.module import CompiledModule
from tvm_fusion.transform.lower.weight_recipes import Computed, Permuted

WIDTH = 64


class Model(torch.nn.Module):
    """Weights read as they are, permuted, with arithmetic, sliced, and joined."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(40, WIDTH)
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.pair = torch.nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, ids):
        x = self.linear(self.table(ids))
        x = torch.nn.functional.gelu(x @ torch.cat(list(self.pair), 1))
        return x[..., :WIDTH] @ (self.table.weight * 0.5).exp()[:32].T


@pytest.fixture(autouse=True)
def small_weights(monkeypatch):
    monkeypatch.setattr(weights, "LEAST_ELEMENTS", 64)
    monkeypatch.setattr(weights, "LEAST_DISTINCT", 16)


@pytest.fixture(scope="module")
def case():
    model, ids = Model().eval(), torch.randint(0, 40, (3, 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "LEAST_ELEMENTS", 64)
        patch.setattr(weights, "LEAST_DISTINCT", 16)
        return model, ids, tvm_fusion.compile(model, "llvm", example_inputs=(ids,))


def test_a_call_takes_inputs_alone_and_is_right(case):
    model, ids, compiled = case
    assert len(compiled.built.weights.weights["main"]) > 3
    assert [spec.name for spec in compiled.signature.inputs] == ["ids"]
    assert compiled.report.verify.passed
    torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-4, atol=1e-4)


def test_the_virtual_machine_does_not_look_at_weights_in_each_call(case):
    text = case[2].built.executable.as_text()
    main = text[text.index("@main") :]
    main = main[: main.index("\n@")] if "\n@" in main else main
    assert main.count("vm.builtin.check_tensor_info") == 1  # ids


def test_what_is_saved_has_its_weights_in_it(case, tmp_path):
    _, ids, compiled = case
    loaded = CompiledModule.load(compiled.save(tmp_path / "model.so"))
    torch.testing.assert_close(loaded(ids), compiled(ids), rtol=0, atol=0)
    machine = relax.VirtualMachine(compiled.executable, tvm.cpu())
    found = machine["main"](tvm.runtime.from_dlpack(ids))
    np.testing.assert_array_equal(found.numpy(), compiled(ids).detach().numpy())


def test_weights_are_those_of_the_time_of_compiling():
    model, ids = Model().eval(), torch.randint(0, 40, (3, 5))
    run = torch.compile(model, backend="tvm_fusion")
    with torch.no_grad():
        before = run(ids).clone()
        model.pair[0].mul_(2)
        torch.testing.assert_close(run(ids), model(ids), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(run(ids), before)


@pytest.mark.parametrize("axes", [(1, 0, 2), (2, 0, 1)])
def test_recipes_compute_alike_on_host_and_device(axes):
    """Of a device the kernel, built here for the CPU."""
    array = np.random.default_rng(0).standard_normal((3, 4, 5)).astype("float32")
    recipe = Permuted(axes, array.shape, "float32")
    kernel = Computed.by(recipe.kernel())
    np.testing.assert_array_equal(recipe.of([array]).numpy(), array.transpose(axes))
    np.testing.assert_array_equal(kernel.of([array]).numpy(), array.transpose(axes))
    assert kernel == Computed.by(recipe.kernel())
    assert kernel.digest() == Computed.by(recipe.kernel()).digest()
    assert kernel != Computed.by(Permuted((0, 2, 1), array.shape, "float32").kernel())


def test_kernels_of_weights_are_compiled_beside_what_else_is_built(monkeypatch):
    go, compiled_in = threading.Event(), []

    def compile_functions(mod, target):
        assert go.wait(60)
        compiled_in.append(threading.current_thread())
        return {gvar.name_hint: "kernel" for gvar in mod.get_global_vars()}, []

    gpu = SimpleNamespace(type="cuda", exist=True)
    monkeypatch.setattr(weight_values, "device_of", lambda target: gpu)
    monkeypatch.setattr(
        weight_values, "_on", lambda device, weight, kernels: kernels[weight.recipe]
    )
    given = weights.Weight("w", (3, 4), "float32", np.zeros((3, 4), "float32"))
    turned = weights.Weight(
        "t", (4, 3), "float32", None, Permuted((1, 0), (3, 4), "float32"), (given,)
    )
    values = weight_values.WeightValues({"main": (turned,)}, None, compile_functions)
    values.begin()
    go.set()
    assert values.of("main") == ["kernel"]
    assert len(compiled_in) == 1
    assert compiled_in != [threading.current_thread()]


def test_a_build_begins_with_its_weights(monkeypatch):
    begun = []
    monkeypatch.setattr(weight_values.WeightValues, "begin", lambda self: begun.append(self))
    inputs = (torch.randn(4, 8),)
    compiled = tvm_fusion.compile(torch.nn.Linear(8, 8), "llvm", example_inputs=inputs)
    assert compiled.built.weights in begun


def test_checks_of_other_values_stay():
    """What is taken out are the checks of weights, and nothing else."""

    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.ObjectType()) for name in "xw")
    with builder.function("main", [x, w], pure=False):
        for function in ("vm.builtin.check_tensor_info", "another"):
            for value in (x, w):
                call = relax.Call(relax.ExternFunc(function), [value], ty_args=[relax.ObjectType()])
                builder.emit(call)
        builder.emit_func_output(x)
    found = {"main": (weights.Weight("w", (2,), "float32"),)}
    main = weight_values.TrustParameters(found, {})(builder.get())["main"]
    values = [b.value for block in main.body.blocks for b in block.bindings]
    assert [(v.op.global_symbol.split(".")[-1], v.args[0].name) for v in values] == [
        ("check_tensor_info", "x"),
        ("another", "x"),
        ("another", "w"),
    ]


@pytest.fixture
def second_gpu(monkeypatch):
    """What torch says where a process has made its second GPU the current one."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def test_a_target_is_torch_s_current_gpu(second_gpu):
    assert device_of(resolve_target("h200")[0]).index == 1
    assert device_of(resolve_target("llvm")[0]) == tvm.cpu(0)


def test_without_torch_on_gpus_a_target_is_the_first_one():
    assert device_of(resolve_target("h200")[0]).index == 0


def test_a_module_stays_on_the_gpu_that_it_was_made_on(second_gpu, monkeypatch):
    compiled = tvm_fusion.compile(
        torch.nn.Linear(8, 8), "h200", example_inputs=(torch.randn(4, 8),)
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert compiled.built.device.index == 1
    assert compiled.built.weights._device.index == 1
