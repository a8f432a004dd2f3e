"""Rows and diagonals in the place of others, in every type, as eager execution has them."""

import pytest
import torch

from tvm_fusion.fuzz.torch_program import Input, Program, Statement
from tvm_fusion.fuzz.verdict import RIGHT

from ..support.emulated_programs import emulated
from ..support.frontend_tools import check

DTYPES = ("bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")


def values(dtype: str, *shape: int) -> torch.Tensor:
    numbers = torch.randint(-3, 5, shape) if "u" not in dtype else torch.randint(0, 5, shape)
    return numbers.to(getattr(torch, dtype))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_another_type_takes_that_of_the_tensor(dtype):
    torch.manual_seed(0)

    def function(x, row, number):
        twice = torch.select_scatter(x, x.select(1, 0) * 2, 1, 2)
        return twice, torch.select_scatter(x, row, -1, -2), torch.select_scatter(x, number, 0, 1)

    row = torch.randint(0, 5, (4,))
    check(function, values(dtype, 4, 6), row, torch.rand(6) * 5)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", ["bool", "int32", "bfloat16", "float32"])
@pytest.mark.parametrize(("offset", "axes"), [(0, (0, 1)), (2, (0, 1)), (-3, (0, 1)), (1, (2, 0))])
def test_a_diagonal_takes_the_place_of_that_of_the_tensor(dtype, offset, axes):
    torch.manual_seed(0)
    x = values(dtype, 5, 7, 3)
    diagonal = x.diagonal(offset, *axes)
    check(
        lambda x, v: torch.diagonal_scatter(x, v, offset, *axes), x, values(dtype, *diagonal.shape)
    )


def in_place(x):
    x = x.clone()
    x[3] *= 2
    x[:, -1] = x[:, 0]
    x.diagonal().add_(1)
    return torch.rot90(x, 3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["int8", "float16", "float32"])
def test_updates_in_place_are_read_where_they_are_turned(dtype):
    check(in_place, values(dtype, 16, 17))


UPDATES = {
    "row": "{out}[3] *= 2",
    "column": "{out}[:, -1] = {out}[:, 0]",
    "diagonal": "{out}.diagonal().add_(1)",
    "rows": "{out}[11:] += 1",
    "steps": "{out}[1::3] += 1",
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("update", UPDATES)
def test_updates_in_place_are_turned_on_a_gpu(update):
    statements = (
        Statement("v0", "{out} = {0}.clone()\n" + UPDATES[update], ("x0",)),
        Statement("v1", "{out} = torch.rot90({0}, 3) * 2", ("v0",)),
    )
    program = Program((Input("x0", "torch.randn((16, 17))"),), statements, ("v1",))
    assert emulated(program, "nvidia_a100").verdict.kind == RIGHT


@pytest.mark.parametrize("types", [("int32", "int32"), ("bool", "int64"), ("int8", "float32")])
def test_angles_of_integers_are_floats(types):
    torch.manual_seed(0)
    check(torch.atan2, *(values(dtype, 9, 7) for dtype in types))
