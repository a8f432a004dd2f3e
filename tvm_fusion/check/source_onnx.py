"""A compiled ONNX model beside `onnx.reference`, on the inputs of the check against float64.

    outputs of the module  <->  onnx.reference.ReferenceEvaluator(model).run(inputs)

Where an output is further off than roundings make it, the imported module decides in float64, and
if that differs, too, each node is converted by itself and run on what the reference has there.
Does not compare: models that would take the reference longer than `MOST_S` (it pools in loops of
Python), whose file has more than `MOST_BYTES`, or that draw random numbers; `SourceCheck.note` says
so.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import VerificationError
from ..flow.planned import Planned
from ..frontends import load
from ..frontends.finish import first_line
from ..runtime.calls.compiled_module import CompiledModule
from .checked_sizes import drawn_inputs
from .distance import distance, rounding
from .plain import LLVM, plain_build, plain_module
from .reference import run_reference
from .source import SourceCheck

logger = logging.getLogger(__name__)

REFERENCE = "onnx.reference"
MOST_S = 5.0
MOST_BYTES = 200_000_000
# Seconds of a multiplication in a product, and of one element of a window in a loop of Python.
PRODUCT_S, WINDOW_S = 2e-10, 1.2e-5
RANDOM = ("RandomNormal", "RandomUniform", "Bernoulli", "Multinomial")
POOLS = ("MaxPool", "AveragePool", "LpPool")


def onnx_check(compiled: CompiledModule, planned: Planned, model: Any) -> SourceCheck | None:
    """Compares a module with the reference of ONNX.

    Parameters
    ----------
    compiled : CompiledModule
        That this machine can run.
    planned : Planned
        What it was built from.
    model
        As `tvm_fusion.compile` takes it.

    Returns
    -------
    SourceCheck or None
        None for models that are not of ONNX.

    Raises
    ------
    VerificationError
        The imported model is another function.
    """
    path = Path(model) if isinstance(model, str | os.PathLike) else None
    if path is not None and path.suffix.lower() != ".onnx":
        return None
    if path is None and type(model).__name__ != "ModelProto":
        return None
    import onnx

    if path is not None:
        model = onnx.load(path)
    why = _not_compared(model)
    if why is not None:
        return SourceCheck(REFERENCE, note=f"{why}: not compared")
    inputs = drawn_inputs(planned.mod)
    try:
        expected = _Evaluated(model, inputs)
    except Exception as error:  # operators that it lacks, and what it says of others
        return SourceCheck(REFERENCE, note=f"{first_line(error)}: not compared")
    given = _leaves(compiled(*inputs))
    errors = [_error(a, b) for a, b in zip(given, expected.outputs, strict=True)]
    off = [i for i, b in enumerate(expected.outputs) if not errors[i] <= rounding(b.dtype)]
    if off and not _right_in_float64(planned, inputs, expected.outputs):
        worst = max(off, key=lambda i: errors[i])
        operator = next(_differing(model, expected), None)
        where = operator or "compile the parts of the model one by one to find the operator"
        raise VerificationError(
            f"the imported model is another function than {REFERENCE} computes: output {worst} is "
            f"off by {errors[worst]:.3g} of its largest number. {where}; export it with other "
            'operators, or pass verify=False or verify="report" to get the module as it is'
        )
    return SourceCheck(REFERENCE, max(errors, default=0.0))


class _Evaluated:
    """What the reference gives for each value of a model; raises TimeoutError after `MOST_S`."""

    def __init__(self, model: Any, inputs: Sequence[np.ndarray]) -> None:
        from onnx.reference import ReferenceEvaluator

        evaluator = ReferenceEvaluator(model)
        end = time.monotonic() + 2 * MOST_S
        for node in evaluator.rt_nodes_:
            node.run = _until(end, node.run)
        feeds = dict(zip(evaluator.input_names, inputs, strict=True))
        self.values: Mapping[str, Any] = evaluator.run(None, feeds, intermediate=True)
        self.outputs = [np.asarray(self.values[name]) for name in evaluator.output_names]


def _until(end: float, run: Any) -> Any:
    def timed(*args: Any, **options: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"it takes longer than {2 * MOST_S:.0f} s")
        return run(*args, **options)

    return timed


def _not_compared(model: Any) -> str | None:
    """Why the reference is not run."""
    if model.ByteSize() > MOST_BYTES:
        return f"its file has more than {MOST_BYTES / 1e6:.0f} MB"
    if any(node.op_type.startswith(RANDOM) for node in model.graph.node):
        return "it draws random numbers"
    if any(map(_is_wrong_there, model.graph.node)):
        return "it has no magnitudes in LpNormalization of p = 1"
    seconds = _seconds(model)
    if seconds > MOST_S:
        return f"it would take about {seconds:.0f} s"
    return None


def _is_wrong_there(node: Any) -> bool:
    p = next((a.i for a in node.attribute if a.name == "p"), 2)
    return node.op_type == "LpNormalization" and p == 1


def _seconds(model: Any) -> float:
    """What the reference takes, roughly, for products, convolutions and pools of known shapes."""
    import onnx

    inferred = onnx.shape_inference.infer_shapes(model).graph
    sizes = {t.name: math.prod(t.dims) for t in model.graph.initializer}
    shapes = {
        v.name: v.type.tensor_type.shape.dim for v in (*inferred.value_info, *inferred.output)
    }
    found = 0.0
    for node in model.graph.node:
        shape = [d.dim_value or 1 for d in shapes.get(node.output[0], ())]
        points = math.prod(shape)
        if node.op_type in POOLS:
            kernel = next((a.ints for a in node.attribute if a.name == "kernel_shape"), ())
            found += WINDOW_S * points * math.prod(kernel)
        elif node.op_type in ("Conv", "Gemm", "MatMul") and len(shape) > 1:
            channels = shape[1] if node.op_type == "Conv" else shape[-1]
            found += PRODUCT_S * points * sizes.get(node.input[1], 0) / max(channels, 1)
    return found


def _leaves(outputs: Any) -> list[Any]:
    if not isinstance(outputs, tuple | list):
        return [outputs]
    return [leaf for one in outputs for leaf in _leaves(one)]


def _error(given: Any, expected: np.ndarray) -> float:
    given = np.asarray(given)
    return distance(_wide(given), _wide(expected)) if given.dtype == expected.dtype else math.inf


def _wide(x: np.ndarray) -> np.ndarray:
    """Floats as such of 64 bits, those of 8 and of bfloat16, too."""
    return x.astype("float64") if x.dtype.kind in "fV" and x.dtype != bool else x


def _right_in_float64(planned: Planned, inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    """Whether the imported module agrees with the reference where it computes in float64: places
    of equal numbers are chosen otherwise then.
    """
    found = run_reference(plain_module(planned.mod, planned.target), inputs)
    pairs = zip(found, outputs, strict=False)
    return all(distance(_wide(a), _wide(b)) <= rounding(b.dtype) for a, b in pairs)


def _differing(model: Any, evaluated: _Evaluated) -> Iterator[str]:
    """The nodes that give something else than the reference has there, in words, in order."""
    from onnx import numpy_helper

    known = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    known.update((name, np.asarray(value)) for name, value in evaluated.values.items())
    end = time.monotonic() + 4 * MOST_S
    for node in model.graph.node:
        if time.monotonic() > end:
            return
        try:
            outputs = _alone(model, node, known)
        except Exception as error:  # sequences, branches, and what stops one operator alone
            logger.info("%s %s was not compared alone: %s", node.op_type, node.name, error)
            continue
        for name, given in zip(node.output, outputs, strict=False):
            error = _error(given, known[name]) if name in known else 0.0
            if error > rounding(known[name].dtype):
                at = f" ({node.name})" if node.name else ""
                yield f"{node.op_type}{at} is off by {error:.3g} on what the reference has there"


def _alone(model: Any, node: Any, known: Mapping[str, np.ndarray]) -> list[Any]:
    """What a node gives as a model of its own, of the values that the reference has."""
    from onnx import helper, numpy_helper

    names = list(dict.fromkeys(name for name in node.input if name))
    typed = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(known[name].dtype), known[name].shape
        )
        for name in (*names, *(name for name in node.output if name))
    ]
    # what says a shape or an axis is an initializer, as it was
    constants = [
        numpy_helper.from_array(known[name], name)
        for name in names
        if known[name].dtype.kind == "i" and known[name].size < 64
    ]
    fixed = {tensor.name for tensor in constants}
    inputs = [one for one in typed[: len(names)] if one.name not in fixed]
    graph = helper.make_graph([node], "alone", inputs, typed[len(names) :], constants)
    alone = helper.make_model(graph, opset_imports=list(model.opset_import))
    alone.ir_version = model.ir_version
    mod = load(alone)
    run = CompiledModule.of(plain_build(plain_module(mod, LLVM), LLVM))
    return _leaves(run(*(known[one.name] for one in inputs)))
