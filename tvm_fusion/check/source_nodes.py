"""The operators of a PyTorch model that were imported as something else: each by itself, on the
operands that PyTorch has there.

    for each node: converted(PyTorch's operands)  <->  PyTorch's result

Does not handle: models with branches, or with more than `MOST_BYTES` of intermediate results.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from ..frontends.torch.model import CONVERTERS, decomposed, exported
from ..frontends.torch.nodes import Nodes, values_of
from ..frontends.torch.refusals import place_of, producer
from ..runtime.calls.compiled_module import CompiledModule
from .distance import error_of, real_numbers, rounding
from .plain import LLVM, plain_build, plain_module

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 30
EXTREME = 1e30  # sums over such numbers overflow in one order, and not in another


@dataclass(frozen=True, slots=True)
class Differs:
    """An operator that gives something else than PyTorch; `error` is a `distance`."""

    operator: str
    place: str
    error: float

    def __str__(self) -> str:
        off = f"is off by {self.error:.3g} of its largest number"
        if self.error == math.inf:
            off = "gives NaN or infinities where PyTorch gives none, or the other way round"
        return f"{self.operator} ({self.place}) {off} on the operands that PyTorch has there"


@dataclass(frozen=True)
class NodeByNode:
    """The operators of a model, each alone; exported and built when they are first run.

    Attributes
    ----------
    model : torch.nn.Module
    example_inputs : tuple of torch.Tensor
    """

    model: Any
    example_inputs: tuple

    @cached_property
    def _program(self) -> torch.export.ExportedProgram:
        return decomposed(exported(self.model, self.example_inputs))

    @cached_property
    def _nodes(self) -> Nodes:
        return Nodes.of(self._program, CONVERTERS)

    @cached_property
    def _alone(self) -> CompiledModule:
        return CompiledModule.of(plain_build(plain_module(self._nodes.mod, LLVM), LLVM))

    def differing(self, inputs: Sequence[Any]) -> list[Differs]:
        """Those that give something else than PyTorch, in the order of the model, on inputs of the
        shapes of the example inputs.
        """
        nodes = self._nodes.nodes
        if sum(node.meta["val"].nbytes for node in nodes) > MOST_BYTES:
            return []
        inputs = [real_numbers(x.detach()).cpu() for x in inputs]
        values = values_of(self._program, inputs)
        given = [values[node].contiguous() for node in nodes]
        found: dict[fx.Node, Differs] = {}
        for node, result, value in zip(nodes, self._alone(*inputs, *given), given, strict=False):
            whole = producer(node)
            result, value = _in_any_order(node, values, result, value)
            if whole in found or not _error(node, result, value) > rounding(value.dtype):
                continue
            for change in (_wide, _apart):
                value = _either(result, value, _again(node, values, change))
            error = _error(node, result, value)
            if error > rounding(value.dtype) and _is_defined(whole, values):
                found[whole] = Differs(str(whole.target), place_of(whole), error)
        return list(found.values())


def _either(
    given: torch.Tensor, expected: torch.Tensor, again: torch.Tensor | None
) -> torch.Tensor:
    """What is expected, or what PyTorch gives by other code where that is what is given."""
    if again is None or again.shape != expected.shape:
        return expected
    again = again.to(expected.dtype)
    rtol = rounding(expected.dtype)
    agrees = torch.isclose(given, again, rtol=rtol, atol=rtol, equal_nan=True)
    return torch.where(agrees, given, expected)


def _again(
    node: fx.Node, values: Mapping[fx.Node, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor | None:
    """What PyTorch gives for a node of the same numbers in another form; None where it takes none
    of that form.
    """

    def changed(arg: fx.Node) -> Any:
        x = values[arg]
        return change(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    whole = producer(node)
    try:
        result = whole.target(*fx.map_arg(whole.args, changed), **fx.map_arg(whole.kwargs, changed))
    except Exception as error:  # what an operator says that takes no float64
        logger.info("%s has no result by other code: %s", whole.target, error)
        return None
    return result if whole is node else result[node.args[1]]


def _wide(x: torch.Tensor) -> torch.Tensor:
    """As float64: the code for another type overflows, or loses NaN, elsewhere."""
    return x.double()


def _apart(x: torch.Tensor) -> torch.Tensor:
    """With elements that do not lie side by side, which PyTorch computes one by one: where it has
    vectors of them, fmod is NaN if the quotient overflows.
    """
    return torch.stack((x, x), -1)[..., 0]


def _error(node: fx.Node, given: torch.Tensor, expected: torch.Tensor) -> float:
    """As `error_of`; of pointwise operators beside each number, where that is larger than 1."""
    error = error_of(given, expected)
    if not _is_pointwise(node) or not expected.is_floating_point() or error == math.inf:
        return error
    a, b = given.double(), expected.double()
    off = (a - b).abs() / b.abs().clamp(min=1.0)
    return max(error, float(off[b.isfinite()].max())) if bool(b.isfinite().any()) else error


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _in_any_order(
    node: fx.Node, values: Mapping[fx.Node, Any], given: Any, expected: Any
) -> tuple[Any, Any]:
    """For the places that `topk` gives, the elements there: of equal ones it takes any."""
    whole = producer(node)
    if whole.target is not torch.ops.aten.topk.default or node is whole or node.args[1] != 1:
        return given, expected
    x, _, dim = (*whole.args[:3], -1)[:3]
    given, expected = (torch.as_tensor(places) for places in (given, expected))
    return tuple(values[x].gather(dim, places) for places in (given, expected))


def factorizes(run: Callable[[], Any]) -> bool:
    """Whether PyTorch calls LAPACK for what `run` does: of matrices that are not finite it says
    nothing, and builds of it end the process.
    """
    with _Names() as called:
        run()
    return any(map(_is_factorization, called.names))


class _Names(TorchDispatchMode):
    """The names of operators that PyTorch runs within, and of those in graphs that they call."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether Dynamo traces `scan` and its like within: torch's own code fails on the rest."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(func.__name__)
        for graph in (x for arg in args if isinstance(arg, fx.GraphModule) for x in arg.modules()):
            calls = graph.graph.nodes if isinstance(graph, fx.GraphModule) else ()
            self.names.update(getattr(node.target, "__name__", "") for node in calls)
        return func(*args, **(kwargs or {}))


def _is_factorization(name: str) -> bool:
    return _FACTORIZATION.search(name) is not None and "norm" not in name


_FACTORIZATION = re.compile("linalg|geqrf|ormqr|cholesky|triangular_solve")


def _is_defined(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    """Whether PyTorch says what an operator gives of its operands: not what lies in new memory,
    what integers are made of NaN, how sums of the largest numbers overflow, or whether a filter
    that is not finite meets a zero beside or between the elements of an image; LAPACK says nothing
    of such matrices.
    """
    name, tags = getattr(node.target, "__name__", ""), getattr(node.target, "tags", ())
    if "empty" in name or torch.Tag.nondeterministic_seeded in tags:
        return False
    operands = [values[arg] for arg in node.all_input_nodes]
    floats = [x for x in operands if isinstance(x, torch.Tensor) and x.is_floating_point()]
    result = values[node]
    if "_to_copy" in name and not result.is_floating_point() and result.dtype != torch.bool:
        return all(bool(x.isfinite().all()) for x in floats)
    if _is_factorization(name):
        return all(bool(x.isfinite().all()) for x in operands if isinstance(x, torch.Tensor))
    if "convolution" in name:
        return bool(values[node.args[1]].isfinite().all())
    largest = (float(x.abs().nan_to_num(0.0, 0.0, 0.0).max()) for x in floats if x.numel())
    return _is_pointwise(node) or all(number < EXTREME for number in largest)
