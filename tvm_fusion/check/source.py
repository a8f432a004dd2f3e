"""A compiled PyTorch model beside PyTorch itself: what was imported may be another function.

    outputs of the module  <->  model(*example_inputs), as it runs in PyTorch

The check against float64 starts from the imported module, and cannot tell a wrong import. Here
errors are relative to the largest number of an output. Where one is larger than roundings make it,
both are computed in float64: models with choices in them (a top-k, a rounding to integers) may
differ by much more than roundings, and agree then.
Does not compare: models with more than `MOST_PARAMETERS`, and those that write into their inputs.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import VerificationError
from ..flow.planned import Planned
from ..runtime.calls.compiled_module import CompiledModule
from .plain import plain_module
from .reference import run_reference

logger = logging.getLogger(__name__)

MOST_PARAMETERS = 200_000_000
# Of what rounds differently in another order of operations; another function is further off.
ROUNDINGS = {"float64": 1e-7, "float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}
SURE = 1e-6  # of both in float64


def source_error(
    compiled: CompiledModule, planned: Planned, model: Any, example_inputs: Any
) -> float | None:
    """The largest error of an output beside PyTorch's, on the example inputs.

    Parameters
    ----------
    compiled : CompiledModule
    planned : Planned
        What it was built from.
    model, example_inputs
        As `tvm_fusion.compile` takes them.

    Returns
    -------
    float or None
        None where nothing is compared.

    Raises
    ------
    VerificationError
        The imported model is another function than the one that was given.
    """
    found = _example(model, example_inputs)
    if found is None or compiled.built.writes:
        return None
    module, inputs = found
    expected = _leaves(_eager(module, inputs))
    given = _leaves(compiled(*_on_device(compiled, inputs)))
    if len(given) != len(expected):
        raise _another(f"{len(given)} outputs, PyTorch gives {len(expected)}")
    errors = [_error(a, b) for a, b in zip(given, expected, strict=True)]
    limits = [ROUNDINGS.get(str(b.dtype).removeprefix("torch."), 0.0) for b in expected]
    off = [i for i, error in enumerate(errors) if not error <= limits[i]]
    if off and not _same_in_float64(planned, module, inputs):
        worst = max(off, key=lambda i: errors[i])
        raise _another(f"output {worst} is off by {errors[worst]:.3g} of its largest number")
    return max(errors, default=0.0)


def _another(what: str) -> VerificationError:
    return VerificationError(
        f"the imported model is another function than PyTorch runs: {what}. An operator is not "
        "converted as PyTorch means it; compile the parts of the model one by one to find it, or "
        'pass verify=False or verify="report" to get the module as it is'
    )


def _example(model: Any, example_inputs: Any) -> tuple[Any, tuple] | None:
    """A module of PyTorch and inputs by position; None of other models, and of very large ones."""
    torch = sys.modules.get("torch")
    if isinstance(model, tuple) and len(model) == 2 and example_inputs is None:
        model, example_inputs = model
    if torch is None or not isinstance(model, torch.nn.Module):
        return None
    if isinstance(example_inputs, torch.Tensor):
        example_inputs = (example_inputs,)
    if not isinstance(example_inputs, list | tuple):
        return None
    tensors = [*example_inputs, *model.parameters(), *model.buffers()]
    if not all(isinstance(t, torch.Tensor) and t.device.type != "meta" for t in tensors):
        return None
    if sum(parameter.numel() for parameter in model.parameters()) > MOST_PARAMETERS:
        return None
    return model, tuple(example_inputs)


def _eager(module: Any, inputs: Sequence[Any], double: bool = False) -> Any:
    """What PyTorch computes; the model, its buffers and the inputs stay as they were."""
    torch = sys.modules["torch"]
    module = copy.deepcopy(module).eval()
    inputs = [x.clone() for x in inputs]
    if double:
        module = module.double()
        inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    with torch.no_grad():
        return module(*inputs)


def _leaves(outputs: Any) -> list[Any]:
    """The tensors of a result, in order."""
    torch = sys.modules["torch"]
    leaves = torch.utils._pytree.tree_leaves(outputs)
    return [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _on_device(compiled: CompiledModule, inputs: Sequence[Any]) -> list[Any]:
    """The inputs where the module runs."""
    device = "cpu" if compiled.target.kind.name == "llvm" else "cuda"
    return [x.clone().to(device) for x in inputs]


def _error(given: Any, expected: Any) -> float:
    """The largest difference relative to the largest number; infinite where one alone is no number,
    or where shapes or types differ. Of numbers without fractions the share that differs.
    """
    given = given.cpu()
    expected = expected.cpu()
    if given.shape != expected.shape or given.dtype != expected.dtype:
        return math.inf
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        return float((given != expected).double().mean())
    a, b = given.double(), expected.double()
    finite = b.isfinite()
    if not bool(((a == b) | finite | (a.isnan() & b.isnan())).all()):
        return math.inf
    scale = float(b[finite].abs().max()) if bool(finite.any()) else 0.0
    largest = float((a - b)[finite].abs().nan_to_num(math.inf).max()) if scale else 0.0
    return largest / (scale or 1.0)


def _same_in_float64(planned: Planned, module: Any, inputs: Sequence[Any]) -> bool:
    """Whether the imported module and PyTorch's agree in float64; False where one has no such."""
    try:
        expected = [np.asarray(x.cpu()) for x in _leaves(_eager(module, inputs, double=True))]
        mod = plain_module(planned.mod, planned.target)
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        found = run_reference(mod, [x.cpu().numpy() for x in wide])
    except Exception as error:  # whatever an operator raises that there is no float64 of
        logger.info("not compared with PyTorch in float64: %s", error)
        return False
    if len(found) < len(expected):
        return False
    for a, b in zip(found, expected, strict=False):
        if a.shape != b.shape:
            return False
        finite = np.isfinite(b)
        scale = np.abs(b[finite]).max(initial=0.0) if b.dtype.kind == "f" else 0.0
        limit = SURE * scale
        if not np.array_equal(np.isfinite(a), finite) or np.any(
            np.abs(a[finite].astype("float64") - b[finite].astype("float64")) > limit
        ):
            return False
    return True
