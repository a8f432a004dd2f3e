"""Samples of PyTorch's operator database as modules that take tensors only.

SampleInput(x, args=(2,), kwargs={"dim": 1, "other": y})  ->  module(x, y)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

SAMPLES = 2  # of an entry are judged
LOOKED_AT = 12  # samples, of which these are the first that can be used
DRAWS = 100  # random streams, in which even one event of a probability of 3 % comes (95 %)


class Operator(torch.nn.Module):
    """A call of an operator, whose tensors are inputs and whose other arguments are its own.

    Parameters
    ----------
    function : Callable
    arguments : tuple of (tuple, dict)
        Positional arguments and those by name; tensors in them are places of inputs only.
    """

    def __init__(self, function: Callable, arguments: tuple[tuple, dict]) -> None:
        super().__init__()
        self.function = function
        leaves, self.structure = tree_flatten(arguments)
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        """What the operator returns of these tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.structure)
        return self.function(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Sample:
    """A module, its inputs, and what eager execution makes of them.

    Attributes
    ----------
    module : Operator
    inputs : list of torch.Tensor
    expected : list of torch.Tensor
        The tensors among the results, in their order.
    determined : Callable
        What the results determine, of which `expected` is made: all, or, say, the magnitudes of
        eigenvectors.
    """

    module: Operator
    inputs: list[torch.Tensor]
    expected: list[torch.Tensor]
    determined: Callable[[Any], Any] = field(default=lambda results: results)

    def copied_inputs(self) -> list[torch.Tensor]:
        """Inputs for one call, which may write into them."""
        return [x.clone() for x in self.inputs]

    def in_float64(self) -> list[torch.Tensor] | None:
        """The results with floats widened to float64, complex numbers to complex128; None where
        the operator does not take them or has other results then.
        """
        wide = [_wide(x) for x in self.inputs]
        try:
            found = tensors_in(self.determined(self.module(*wide)))
        except Exception:  # of PyTorch, which may want equal types or know none of float64
            return None
        return found if [x.shape for x in found] == [x.shape for x in self.expected] else None


def _wide(x: torch.Tensor) -> torch.Tensor:
    if x.is_complex():
        return x.to(torch.complex128)
    return x.double() if x.is_floating_point() else x.clone()


class _OtherRandomNumbers(TorchDispatchMode):
    """Operators that draw random numbers begin some numbers later in the stream, whatever seed a
    sample sets itself; `drawn` tells whether there are any.
    """

    def __init__(self, later: int) -> None:
        super().__init__()
        self.later, self.drawn = later, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn = True
            torch.randint(2**31, (self.later,))
        return func(*args, **kwargs or {})


class NotJudged(Exception):
    """No sample of an entry can be used; the text says why."""


@cache
def operators() -> dict[str, Any]:
    """The operators of PyTorch's database by name and variant."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db
    }


def entries(dtypes: list[str]) -> list[tuple[str, str]]:
    """Names and element types of what the database has for a CPU, in its order."""
    known = operators().items()
    return [
        (name, dtype)
        for dtype in dtypes
        for name, op in known
        if getattr(torch, dtype) in op.supported_dtypes("cpu")
    ]


def samples(name: str, dtype: str) -> list[Sample]:
    """The first usable samples of an operator, the same ones in each run.

    Raises
    ------
    NotJudged
        There is none.
    """
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    op = operators()[name]
    why, found = "it has no samples", []
    drawn: Iterator = op.sample_inputs("cpu", getattr(torch, dtype), requires_grad=False)
    for given in itertools.islice(drawn, LOOKED_AT):
        made = _made(op.op, given)
        if isinstance(made, Sample):
            found.append(made)
        else:
            why = made
        if len(found) == SAMPLES:
            break
    if not found:
        raise NotJudged(why)
    return found


def _made(function: Callable, given: Any) -> Sample | str:
    """A sample, or why there is none."""
    arguments = ((given.input, *given.args), dict(given.kwargs))
    inputs = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    if not inputs:
        return "no tensor among its inputs"
    if not all(map(_is_plain, inputs)):
        return "inputs that are sparse or nested"
    module = Operator(function, arguments)
    copies = [x.detach().clone() for x in inputs]
    try:
        with torch.no_grad():
            expected = tensors_in(given.output_process_fn_grad(module(*copies)))
    except Exception as error:  # such as "only supported on CUDA"
        return f"eager execution stops: {str(error).splitlines()[0]}"
    if not expected:
        return "no tensor among its results"
    if not all(map(_is_plain, expected)):
        return "results that are sparse or nested"
    if _is_random(module, inputs, given.output_process_fn_grad, expected):
        return "its results are random"
    kept = [x.detach() for x in inputs], [x.clone() for x in expected]
    return Sample(module, *kept, given.output_process_fn_grad)


def _is_random(
    module: Operator, inputs: list[torch.Tensor], determined: Callable, expected: list[torch.Tensor]
) -> bool:
    """Whether random numbers are drawn that make other results; dropout with p = 0 has the same
    ones. Of no elements it cannot be said.
    """
    for later in range(1, DRAWS + 1):
        copies = [x.detach().clone() for x in inputs]
        with torch.no_grad(), _OtherRandomNumbers(later) as mode:
            found = tensors_in(determined(module(*copies)))
        if not mode.drawn:
            return False
        if not all(map(_same, found, expected)) or not any(x.numel() for x in found):
            return True
    return False


def _same(x: torch.Tensor, other: torch.Tensor) -> bool:
    return x.shape == other.shape and torch.allclose(x, other, equal_nan=True)


def _is_plain(x: torch.Tensor) -> bool:
    dense = x.layout is torch.strided and not x.is_nested and not x.is_quantized
    return dense and x.device.type == "cpu"


def tensors_in(results: Any) -> list[torch.Tensor]:
    """The tensors among what an operator returns."""
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
