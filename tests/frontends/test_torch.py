"""PyTorch models: real ones, symbolic dimensions, constants, ways to call, bad input."""

import sys

import pytest
import torch
import torch.nn.functional as F
import tvm
from torch import nn
from torch.export import Dim
from tvm import relax

from tests.support.frontend_tools import Function, assert_close, check, operators
from tests.support.helpers_tir import quick_executable
from tests.support.models import run_unfused, tiny_bert, tiny_llama
from tests.support.unknown_operators import unknown
from tvm_fusion import frontends
from tvm_fusion.errors import FrontendError
from tvm_fusion.frontends import load


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# ---- real models ----


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", [tiny_llama, tiny_bert])
def test_a_model_of_transformers_gives_what_pytorch_gives(case):
    case = case()
    mod = load(case.model, case.inputs)
    assert [x.name for x in mod["main"].params] == ["input_ids"]
    assert_close(run_unfused(mod, *case.arrays), case.expected)


@pytest.mark.nightly  # test_models compiles BERT so
@pytest.mark.parametrize("build", [tiny_llama, tiny_bert])
def test_a_model_of_transformers_compiles_once_for_all_batches_and_lengths(build):
    case = build(sequence=16, batch=2)
    sizes = {"input_ids": {0: Dim("batch"), 1: Dim("length", max=256)}}
    mod = load(case.model, case.inputs, dynamic_shapes=sizes)
    machine = relax.VirtualMachine(quick_executable(mod), tvm.cpu())
    for batch, sequence in ((3, 21), (1, 1)):
        other = build(sequence, batch)
        result = machine["main"](tvm.runtime.tensor(other.arrays[0]))
        assert_close([x.numpy() for x in result], other.expected)


def test_llama_attends_causally_with_no_mask_left_and_no_constant_work():
    case = tiny_llama()
    mod = load(case.model, case.inputs)
    names = operators(mod)
    assert names.count("relax.nn.attention") == 2
    assert not {"relax.arange", "relax.cumsum", "relax.where", "relax.cos"} & set(names)
    assert 'causal_mask="TopLeft"' in mod.script(show_meta=False)


def test_bert_has_no_mask_and_no_permutation_around_attention():
    case = tiny_bert()
    mod = load(case.model, case.inputs)
    names = operators(mod)
    assert names.count("relax.nn.attention") == 2
    assert "relax.where" not in names
    assert names.count("relax.permute_dims") == names.count("relax.matmul")  # of weights only


# ---- constants ----


def test_what_depends_on_no_input_is_computed_once():
    mod = check(lambda x: x + torch.arange(4).cos().cumsum(0), torch.randn(4))
    assert operators(mod) == ["relax.add"]


def test_a_large_value_is_computed_where_it_is_used():
    size = (1 << 18) + 1
    mod = load(Function(lambda x: x + torch.arange(size)), (torch.zeros(size),))
    assert "relax.arange" in operators(mod)


def test_random_numbers_are_no_constants():
    with pytest.raises(FrontendError, match="rand"):
        load(Function(lambda x: x + torch.rand(4)), (torch.randn(4),))


def test_an_output_may_be_a_constant():
    check(lambda x: (x, torch.arange(3) + 1), torch.randn(2))


# ---- calling ----


def test_a_bare_tensor_stays_one_and_everything_else_is_a_tuple():
    x = (torch.randn(3),)
    assert isinstance(load(Function(lambda a: a + 1), x)["main"].ret_ty, relax.TensorType)
    for function in (lambda a: (a + 1,), lambda a: {"y": a + 1}, lambda a: [a, (a, a)]):
        assert isinstance(load(Function(function), x)["main"].ret_ty, relax.TupleType)


def test_the_ways_to_give_example_inputs_agree():
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    expected = load(model, (x,))
    for mod in (load((model, (x,))), load(model, x), load(model, [x]), load(model, {"input": x})):
        tvm.ir.assert_structural_equal(mod, expected)


def test_an_exported_program_and_its_file_give_the_same_module(tmp_path):
    program = torch.export.export(nn.Linear(4, 2), (torch.randn(3, 4),))
    torch.export.save(program, tmp_path / "linear.pt2")
    tvm.ir.assert_structural_equal(load(tmp_path / "linear.pt2"), load(program))


def test_a_model_is_exported_for_inference_and_left_in_its_mode():
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4).eval()).train()
    modes = [module.training for module in model.modules()]
    x = torch.randn(3, 4)
    (result,) = run_unfused(load(model, (x,)), x.numpy())
    assert [module.training for module in model.modules()] == modes
    assert_close([result], [model.eval()(x).detach().numpy()])


def test_the_batch_stays_symbolic():
    model = nn.Linear(4, 2)
    mod = load(model, (torch.randn(3, 4),), dynamic_shapes=({0: Dim("batch")},))
    for batch in (1, 9):
        x = torch.randn(batch, 4)
        assert_close(run_unfused(mod, x.numpy()), [model(x).detach().numpy()])


def test_a_pool_takes_any_size_where_torch_asks_for_a_remainder(monkeypatch):
    def div_rtn(x, y):  # torch 2.11
        quotient, rest = x // y, x % y
        return quotient - 1 if rest != 0 and bool(rest < 0) != bool(y < 0) else quotient

    monkeypatch.setattr(torch._meta_registrations, "div_rtn", div_rtn)
    side = Dim("side", min=3, max=64)
    pool = Function(lambda x: F.max_pool2d(torch.relu(x), 3, 2, 1))
    mod = load(pool, (torch.randn(1, 2, 7, 7),), dynamic_shapes=(({2: side, 3: side},),))
    for size in (3, 8, 9):
        x = torch.randn(1, 2, size, size)
        assert_close(run_unfused(mod, x.numpy()), [pool(x).numpy()])


def test_a_part_of_a_symbolic_dimension_has_a_size():
    def parts(x):
        return x[1:], x[:-1], x[-2:], torch.cat([x, x])[2:], x[0]

    sizes = {0: Dim("rows", min=3)}
    mod = load(Function(parts), (torch.randn(5, 4),), dynamic_shapes=((sizes,),))
    assert all(type_.shape is not None for type_ in mod["main"].ret_ty.fields)
    x = torch.randn(7, 4)
    assert_close(run_unfused(mod, x.numpy()), [y.numpy() for y in parts(x)])


# ---- bad input ----


def test_a_module_without_example_inputs_is_refused():
    with pytest.raises(FrontendError, match="torch module Linear: needs example inputs"):
        load(nn.Linear(4, 2))


def test_example_inputs_of_another_kind_are_refused():
    with pytest.raises(FrontendError, match=r"are a tuple of tensors .* not a str"):
        load(nn.Linear(4, 2), "x")


def test_example_inputs_of_a_wrong_shape_are_refused_in_one_line():
    with pytest.raises(FrontendError, match=r"Linear: torch\.export cannot trace it") as error:
        load(nn.Linear(4, 2), (torch.randn(3, 5),))
    assert "\n" not in str(error.value)


def test_an_input_that_is_another_number_in_each_call_is_refused():
    shapes = (None, torch.export.Dim.DYNAMIC)
    with pytest.raises(FrontendError, match="a number that changes between calls; give a tensor"):
        load(Function(lambda x, n: x * n), (torch.randn(3), 2), dynamic_shapes=(shapes,))


def test_an_operator_that_cannot_be_converted_is_named():
    with pytest.raises(FrontendError, match=r"at tests\.unknown\.default \(.*no converter"):
        load(Function(unknown), (torch.randn(3, 3),))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
            "at aten.scaled_dot_product_attention.default .*: attention with dropout",
        ),
    ],
)
def test_an_operator_that_is_not_supported_in_this_form_is_named(function, message):
    with pytest.raises(FrontendError, match=message):
        load(Function(function), (torch.randn(3, 3),))


def test_a_damaged_file_is_refused_in_one_line(tmp_path):
    path = tmp_path / "damaged.pt2"
    path.write_bytes(b"no archive")
    with pytest.raises(FrontendError, match=r"damaged\.pt2: torch.export.load cannot") as error:
        load(path)
    assert "\n" not in str(error.value)


def test_without_torch_the_error_names_the_extra(monkeypatch, tmp_path):
    path = tmp_path / "model.pt2"
    path.touch()
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "tvm_fusion.frontends.torch.model", raising=False)
    monkeypatch.delattr(frontends, "pytorch", raising=False)
    with pytest.raises(FrontendError, match=r"pip install 'tvm_fusion\[torch\]'"):
        load(path)
