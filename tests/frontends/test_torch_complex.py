"""Complex numbers: as pairs of real ones in what is imported, as such for whoever calls it."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tvm_fusion
from tests.support.frontend_tools import Function, array_of, check, operators
from tests.support.models import run_unfused
from tvm_fusion.check.distance import error_of
from tvm_fusion.errors import FrontendError, InputError, VerificationError
from tvm_fusion.frontends import load
from tvm_fusion.frontends.torch.complex import complex_numbers
from tvm_fusion.fuzz.torch_program import Input, Program, Statement
from tvm_fusion.fuzz.verdict import RIGHT

from ..support.emulated_programs import emulated

PLACES = [complex(a, b) for a in (-3.0, -1.0, -0.25, 0.5, 1.0, 2.5) for b in (-2.0, -0.3, 0.7, 1.5)]


def numbers(*shape: int, dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=dtype)


def compiled(function, *inputs: torch.Tensor, **options):
    return tvm_fusion.compile(Function(function), "llvm", example_inputs=inputs, **options)


# ---- Rotary embeddings, as Llama's reference code has them.


def frequencies(length: int, width: int) -> torch.Tensor:
    rates = 1.0 / 10000 ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(length).float(), rates)
    return torch.polar(torch.ones_like(angles), angles)


class Rotary(torch.nn.Module):
    """With its table as an attribute, which makes it a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.table = frequencies(24, 16)

    def forward(self, q, k):
        return self.turned(q), self.turned(k)

    def turned(self, x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        table = self.table[: x.shape[1]].view(1, x.shape[1], 1, -1)
        return torch.view_as_real(pairs * table).flatten(3).type_as(x)


def test_rotary_embeddings_of_complex_numbers_are_one_launch_each():
    q, k = torch.randn(2, 12, 4, 16), torch.randn(2, 12, 1, 16)
    model = Rotary()
    module = tvm_fusion.compile(model, "llvm", example_inputs=(q, k))
    assert module.launches == 2
    for given, expected in zip(module(q, k), model(q, k), strict=True):
        torch.testing.assert_close(given, expected)


def test_rotary_embeddings_run_on_a_gpu():
    turned = (
        "{out} = torch.view_as_real(torch.view_as_complex({0}.view(2, 9, 4, 8, 2))"
        " * torch.view_as_complex({1}).view(1, 9, 1, 8)).flatten(3)"
    )
    program = Program(
        (Input("x0", "torch.randn((2, 9, 4, 16))"), Input("x1", "torch.randn((9, 8, 2))")),
        (Statement("v0", turned, ("x0", "x1")),),
        ("v0",),
    )
    outcome = emulated(program, "nvidia_h100")
    assert (outcome.verdict.kind, outcome.kernels) == (RIGHT, 1)


# ---- Operators.

FUNCTIONS = (
    *("abs", "angle", "sgn", "conj", "neg", "reciprocal", "square", "sqrt", "rsqrt", "exp"),
    *("expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "sinh", "cosh", "tanh"),
    *("asin", "acos", "atan", "asinh", "acosh", "atanh", "sigmoid", "isfinite", "logical_not"),
)


@pytest.mark.parametrize(
    "dtype", [torch.complex64, pytest.param(torch.complex128, marks=pytest.mark.nightly)]
)
def test_functions_of_complex_numbers(dtype):
    def function(x):
        return [getattr(torch, name)(x).clone() for name in FUNCTIONS]

    check(function, torch.tensor(PLACES, dtype=dtype))


def test_functions_do_not_overflow_where_their_values_do_not():
    x = torch.tensor([3e38 + 1e38j, 1e-30 + 2e-30j, 0j, -0.0 + 1e20j, -40 + 3j, 90 - 1j])

    def function(x):
        return x.abs(), x / x, 1 / x[:2], x.sqrt(), x[3:].tanh(), x.sgn(), x[4:].sigmoid()

    exact = function(x.to(torch.complex128))
    given = run_unfused(load(Function(function), (x,)), array_of(x))
    for found, expected in zip(given, exact, strict=True):
        found = found.view("complex64")[..., 0] if expected.is_complex() else found
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6, atol=1e-37)


def test_arithmetic_with_real_numbers_and_of_other_types():
    x, y = numbers(3, 4), numbers(4)
    real, whole = torch.randn(3, 4).double(), torch.arange(1, 5)

    def function(x, y, real, whole):
        return (
            *(
                x + y,
                x - 2j,
                3 - x,
                torch.add(x, y, alpha=1j),
                x * y,
                x * real,
                whole * x,
                2j * real,
            ),
            *(x / y, x / real, real / x, 2.5 / x, x**2, x**0.5, x**1.3, x**y, 2**x),
            *(x == y, x != x[0], torch.where(real > 0, x, y), torch.where(real > 0, real, x)),
            *(torch.addcmul(x, y, x, value=0.5), torch.lerp(x, y.expand(3, 4), 0.25)),
            *(x.real, x.imag * 2, torch.complex(real, real[0] + 1), torch.polar(real.abs(), real)),
            *(x.to(torch.complex128), real.to(torch.complex64), x.bool(), F.silu(x)),
        )

    check(function, x, y, real, whole)


def test_elements_are_moved_and_summed():
    x, y = numbers(3, 4, 6), numbers(2, 4, 6)
    places = torch.tensor([2, 0])

    def function(x, y, places):
        changed = x.clone()
        changed[1] = y[0].conj()
        changed[:, 1:3] *= 2j
        return (
            *(
                changed,
                torch.cat([x, y, x.real[:1]]),
                torch.stack([x[0], y[0]], -1),
                x.mT.flatten(),
            ),
            *(x[places], x[:, places, 1:5:2], x.index_select(2, places), x.flip(0), x.roll(1, 2)),
            *(
                F.pad(x, (1, 2), value=1.5),
                x.unfold(2, 3, 2),
                x.tril(),
                x.masked_fill(x.abs() > 1, 2j),
            ),
            *(
                x.sum(),
                x.mean(1),
                x.cumsum(2),
                x.prod(1),
                x.cumprod(2),
                x.var(2),
                x.std(),
                x.norm(),
            ),
            *(x.split(2, 1)[1].clone(), torch.zeros_like(x) + torch.full((6,), 1 + 2j), x.any(1)),
            *(
                x.index_put((places,), y),
                torch.scatter(y, 0, y.real.long() * 0, x[:2]),
            ),
        )

    check(function, x, y, places)


def test_products():
    x, y, z = numbers(3, 4, 6), numbers(3, 6, 5), numbers(4, 6)

    def function(x, y, z, kernel):
        return (
            *(x @ y, x[0] @ y[0], z @ y[0], z[0] @ y[0, :, 0], torch.vdot(z[0], z[1]), z @ z.mH),
            *(torch.addmm(x[0, :, :5], z, y[0], beta=2, alpha=1j), torch.baddbmm(x[..., :5], x, y)),
            *(
                F.linear(x, z, z[:, 0]),
                torch.einsum("bij,bjk->ik", x, y),
                torch.linalg.matrix_exp(z @ z.mH),
            ),
            *(F.conv1d(x, kernel, kernel[:, 0, 0]), torch.cov(z), torch.corrcoef(z)),
        )

    check(function, x, y, z, numbers(2, 4, 3))


# ---- Callers.


class Bank(torch.nn.Module):
    """Complex weights, and a complex buffer that is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(numbers(4, 4))
        self.register_buffer("state", numbers(4))

    def forward(self, x):
        self.state.copy_(self.state * 1j + x)
        turned = self.state @ self.weight
        return {"turned": turned, "given": x, "conjugate": x.conj(), "pairs": torch.view_as_real(x)}


def same(given, expected) -> None:
    assert given.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(torch.as_tensor(given[name]), value.resolve_conj())


def test_callers_give_and_get_complex_tensors(tmp_path):
    model, x = Bank(), numbers(4)
    state = model.state.clone()
    module = tvm_fusion.compile(model, "llvm", example_inputs=(x,))
    torch.testing.assert_close(module.state_dict()["state"], state)
    given, expected = module(x), model(x)
    same(given, expected)
    assert given["given"] is x
    torch.testing.assert_close(module.state_dict()["state"], model.state)
    module.save(tmp_path / "bank.so")
    again = tvm_fusion.CompiledModule.load(tmp_path / "bank.so")
    for other in (module, again):
        other.load_state_dict({"state": state})
    model.state.copy_(state)
    array = np.ascontiguousarray(x.numpy()[::-1])
    expected = model(x.flip(0))
    same(module(array), expected)
    same(again(x.flip(0)), expected)
    pairs = array.view("float32").reshape(4, 2)
    module.load_state_dict({"state": state})
    same(module(pairs) | {"given": array}, expected)
    with pytest.raises(InputError, match="float32"):
        module(x.to(torch.complex128))


def test_a_view_as_another_kind_is_a_result_of_its_own():
    pairs, x = torch.randn(3, 2), numbers(3)
    model = Function(
        lambda pairs, x: (torch.view_as_complex(pairs), torch.view_as_real(x), x.conj())
    )
    module = tvm_fusion.compile(model, "llvm", example_inputs=(pairs, x), verify=False)
    for given, expected in zip(module(pairs, x), model(pairs, x), strict=True):
        assert given.dtype == expected.dtype
        assert torch.equal(given, expected)


def test_an_input_that_is_written_to_has_its_new_value():
    x = numbers(5)
    model = Function(lambda x: x.mul_(2j).abs())
    module = tvm_fusion.compile(model, "llvm", example_inputs=(x.clone(),), verify=False)
    ours, array, theirs = x.clone(), x.numpy().repeat(2)[::2], x.clone()
    model(theirs)
    module(ours)
    module(array)
    with pytest.raises(InputError, match="resolve_conj"):
        module(x.conj())
    torch.testing.assert_close(ours, theirs)
    np.testing.assert_allclose(array, theirs.numpy(), rtol=1e-6)


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(numbers(4))

    def forward(self, x):
        return x * self.weight


def test_weights_may_come_later_and_sizes_may_change():
    with torch.device("meta"):
        model = Scaled()
    x, weight = numbers(2, 4), numbers(4)
    batch = {"x": {0: torch.export.Dim("batch")}}
    module = tvm_fusion.compile(
        model, "llvm", example_inputs=(x,), dynamic_shapes=batch, verify=False
    )
    module.load_state_dict({"weight": weight})
    for count in (2, 5):
        x = numbers(count, 4)
        torch.testing.assert_close(module(x), x * weight)


def test_a_module_that_is_imported_alone_takes_and_gives_pairs():
    mod = load(Function(lambda x: x.conj()), (numbers(3),))
    assert [int(n) for n in mod["main"].params[0].ty.shape] == [3, 2]
    assert "relax.negative" in operators(mod)


def test_the_backend_of_torch_compile_takes_and_gives_complex_tensors():
    function = Function(lambda x: (x * 2j, x.abs()))
    model = torch.compile(function, backend="tvm_fusion", options={"strict": True})
    x = numbers(3, 5)
    with torch.no_grad():
        turned, size = model(x)
    torch.testing.assert_close((turned, size), (x * 2j, x.abs()))


# ---- What is wrong, and what is refused.


def test_a_wrong_result_is_found(monkeypatch):
    def kept(x):
        return complex_numbers.joined(*complex_numbers.parts(x))

    monkeypatch.setitem(complex_numbers.OF_COMPLEX, torch.ops.aten._conj.default, kept)
    with pytest.raises(VerificationError, match="another function than PyTorch"):
        compiled(lambda x: x.conj() * 2, numbers(3))


def test_distances_are_those_of_both_parts():
    x = numbers(3)
    assert error_of(x.conj().conj(), x) == 0
    assert error_of(x, x.conj()) > 0.1
    assert error_of(x, x.real) == math.inf


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: torch.linalg.eigvals(x).abs() + 1, "aten.linalg_eig.default"),
        (lambda x: torch.linalg.det(x @ x).abs(), "aten._linalg_det.default"),
    ],
)
def test_operators_without_a_form_are_refused_by_name(function, name):
    with pytest.raises(FrontendError) as raised:
        load(Function(function), (numbers(3, 3),))
    said = str(raised.value)
    assert f"cannot be converted to Relax at {name} " in said
    assert "no form for complex numbers" in said
