"""Import a PyTorch function, run it unfused, and compare it with PyTorch."""

import ml_dtypes
import numpy as np
import torch
import tvm
from torch import nn
from tvm import relax

from tests.support.models import run_unfused
from tvm_fusion.frontends import load

RTOL = {"float16": 2e-3, "bfloat16": 1e-2}


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def operators(mod: tvm.IRModule) -> list[str]:
    """The operators that main calls, in order."""
    names = []

    def visit(expr):
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op):
            names.append(expr.op.name)

    relax.analysis.post_order_visit(mod["main"], visit)
    return names


def array_of(x: torch.Tensor) -> np.ndarray:
    """A tensor as an array, bfloat16 too; a complex one as pairs of real numbers."""
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj()).numpy()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def assert_close(results: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Equal number, shapes and types; errors relative to the largest value."""
    assert [(x.shape, str(x.dtype)) for x in results] == [(x.shape, str(x.dtype)) for x in expected]
    for result, wanted in zip(results, expected, strict=True):
        wide = wanted.astype("float64")
        largest = np.abs(wide[np.isfinite(wide)]).max(initial=1e-30)
        rtol = RTOL.get(str(wanted.dtype), 1e-5)
        np.testing.assert_allclose(result.astype("float64"), wide, rtol=0, atol=rtol * largest)


def check(function, *inputs: torch.Tensor) -> tvm.IRModule:
    """Import a function or module, run it unfused, compare with PyTorch, return the import."""
    model = function if isinstance(function, nn.Module) else Function(function)
    model.eval()
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(model(*inputs))
    mod = load(model, inputs)
    assert_close(run_unfused(mod, *map(array_of, inputs)), [array_of(x) for x in expected])
    return mod
