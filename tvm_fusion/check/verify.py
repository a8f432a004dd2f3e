"""Verify fused kernels, a module or one group, against float64."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ..errors import DividedByZero, InputError, OutOfRange
from ..runtime.build.build import build
from .allowance import Reference
from .inputs import numpy_dtype
from .plain import LLVM
from .reference import run_built
from .rules import OutputCheck, check_output, like

logger = logging.getLogger(__name__)

Run = Callable[[Sequence[Any]], Sequence[np.ndarray]]
RunModule = Callable[[tvm.IRModule, Sequence[Any]], Sequence[np.ndarray]]


@dataclass(frozen=True, slots=True)
class Verification:
    """The verdict on a module or a group.

    Attributes
    ----------
    name : str
        What was verified.
    passed : bool
        Whether every output passed.
    outputs : tuple of OutputCheck
        In order, tuples flattened.
    worst_error : float
        The largest error of an output, relative to the largest number of its reference.
    not_finite : float
        The largest share of an output that is NaN or infinite in the reference.
    """

    name: str
    passed: bool
    outputs: tuple[OutputCheck, ...]
    worst_error: float
    not_finite: float = 0.0

    @property
    def why(self) -> str:
        """What is wrong with the outputs that failed, in one line; empty where all passed."""
        failed = [f"output {i} {c.why}" for i, c in enumerate(self.outputs) if not c.passed]
        return "; ".join(failed)


@dataclass(frozen=True, slots=True)
class GroupCase:
    """One fused group, set up so that it can be verified alone.

    Attributes
    ----------
    name : str
        The group.
    fused_mod : IRModule
        `main` calls the one fused kernel.
    unfused_mod : IRModule
        `main` has the same parameters and outputs, and calls the group's operators one by one.
    inputs : tuple
        One value per parameter of `main`. Floats may be float64, as a reference run gives them;
        they are rounded to the parameter's dtype first.
    """

    name: str
    fused_mod: tvm.IRModule
    unfused_mod: tvm.IRModule
    inputs: tuple[Any, ...]


def compare_outputs(
    given: Sequence[Any],
    reference: Reference,
    name: str = "main",
    bounds: Sequence[np.ndarray | None] | None = None,
    plain: Sequence[np.ndarray] | None = None,
) -> Verification:
    """Judge all outputs of a module by `rules.check_output`, with what is given of what roundings
    do to them (`Reference.bounds`) and of what TVM's own loops make of them (`Reference.plain`).
    """
    outputs = reference.outputs
    if len(given) != len(outputs):
        raise InputError(
            f"{name}: {len(given)} outputs and {len(outputs)} of the reference do not belong "
            "together"
            "; give those of the same function"
        )
    missing = [None] * len(outputs)
    checks = tuple(
        check_output(like(x, ref), other, ref, dtype, computed_in, bound, reference.ceiling)
        for x, other, ref, dtype, computed_in, bound in zip(
            given,
            plain or missing,
            outputs,
            reference.dtypes,
            reference.computed_in,
            bounds or missing,
            strict=True,
        )
    )
    worst = max((check.error for check in checks), default=0.0)
    not_finite = max((check.not_finite for check in checks), default=0.0)
    return Verification(name, all(check.passed for check in checks), checks, worst, not_finite)


def judge_outputs(given: Sequence[Any], reference: Reference, name: str = "main") -> Verification:
    """As `compare_outputs`; what roundings do, and what TVM's own loops give, is found out only if
    the verdict depends on it, and a reference is compiled only where it does not pass by one on
    arrays.
    """
    quick = reference.on_arrays
    if quick is not None:
        found = _within_bounds(given, quick, name)
        if found.passed:
            return found
    found = _within_bounds(given, reference, name)
    if not found.passed and any(_asks_for_plain(c, b) for c, b in _judged(found, reference)):
        found = compare_outputs(given, reference, name, reference.bounds, reference.plain)
    return found


def _within_bounds(given: Sequence[Any], reference: Reference, name: str) -> Verification:
    """The verdict with no more draws than it takes."""
    found = compare_outputs(given, reference, name, reference.no_bounds)
    if not found.passed:
        for bounds in reference.growing_bounds():
            found = compare_outputs(given, reference, name, bounds)
            if found.passed:
                break
    return found


def _judged(
    found: Verification, reference: Reference
) -> Iterator[tuple[OutputCheck, np.ndarray | None]]:
    return zip(found.outputs, reference.bounds, strict=True)


def _asks_for_plain(check: OutputCheck, bound: np.ndarray | None) -> bool:
    """Whether an output may be right after all: no bound is known, or it overflows where float64
    does not.
    """
    return not check.passed and (bound is None or math.isinf(check.error))


def verify_group(
    case: GroupCase,
    target: tvm.target.Target | None = None,
    run_fused: RunModule | None = None,
) -> Verification:
    """Verify one group on its own.

    Parameters
    ----------
    case : GroupCase
        The group.
    target : Target
        Where it runs (default: llvm).
    run_fused : callable, optional
        How to run it instead, from a module and inputs to a flat list of arrays.

    Returns
    -------
    Verification
        Carries the name of the group.
    """

    def run(mod: tvm.IRModule, inputs: Sequence[Any]) -> list[np.ndarray]:
        return run_module(mod, inputs, target)

    params = case.unfused_mod["main"].params
    inputs = [rounded_to(value, p.ty) for p, value in zip(params, case.inputs, strict=True)]
    reference = Reference(case.unfused_mod, inputs, target)
    fused = partial(run_fused or run, case.fused_mod)
    return judge_outputs(outputs_on(fused, reference), reference, case.name)


def outputs_on(run: Run, reference: Reference) -> Sequence[np.ndarray]:
    """What a run gives on the inputs of a reference; where it refuses these (an index is out of
    range), numbers that are wrong everywhere.
    """
    try:
        return run(reference.inputs)
    except (OutOfRange, DividedByZero) as error:
        logger.info("inputs are refused that the model takes: %s", error)
        wrong = {"f": lambda x: np.full_like(x, np.nan), "b": np.logical_not}
        return [wrong.get(x.dtype.kind, np.invert)(x) for x in reference.outputs]


def run_module(
    mod: tvm.IRModule,
    inputs: Sequence[Any],
    target: tvm.target.Target | None = None,
    entry: str = "main",
) -> list[np.ndarray]:
    """Build a module of call_tir as it is, run it once, and return its outputs as a flat list."""
    return run_built(build(mod, target or LLVM), inputs, entry)


def rounded_to(value: Any, ty: Any) -> Any:
    """A value with its arrays rounded to the dtype of the parameter that takes them."""
    if isinstance(ty, relax.TupleType):
        return [rounded_to(v, f) for v, f in zip(value, ty.fields, strict=True)]
    if isinstance(value, np.ndarray | np.generic) and isinstance(ty, relax.TensorType):
        with np.errstate(over="ignore"):
            return np.asarray(value).astype(numpy_dtype(str(ty.dtype)))
    return value
