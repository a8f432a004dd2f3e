"""Verify fused kernels, a module or one group, against float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ..errors import InputError, VerificationError
from ..runtime.build import build
from ..runtime.entry import entry_of
from .bounds import Reference
from .inputs import numpy_dtype
from .precision import computed_dtypes
from .reference import flatten, to_argument
from .rules import OutputCheck, check_output

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
    """

    name: str
    passed: bool
    outputs: tuple[OutputCheck, ...]
    worst_error: float

    @property
    def why(self) -> str:
        """What is wrong with the outputs that failed, in one line; empty where all passed."""
        failed = [f"output {i} {c.why}" for i, c in enumerate(self.outputs) if not c.passed]
        return "; ".join(failed)

    def raise_if_failed(self) -> None:
        """Raise VerificationError where an output did not pass."""
        if not self.passed:
            raise VerificationError(f"{self.name}: {self.why}")


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
    fused: Sequence[np.ndarray],
    unfused: Sequence[np.ndarray],
    reference: Sequence[np.ndarray],
    name: str = "main",
    computed_in: Sequence[str | None] | None = None,
    bounds: Sequence[np.ndarray | None] | None = None,
) -> Verification:
    """Judge all outputs of a module by `rules.check_output`; the unfused outputs say the dtypes,
    `computed_in` what they are computed in (`precision.computed_dtypes`), `bounds` what roundings
    do to them (`bounds.Reference`).
    """
    computed_in = [None] * len(reference) if computed_in is None else computed_in
    bounds = [None] * len(reference) if bounds is None else bounds
    if not len(fused) == len(unfused) == len(reference):
        raise InputError(
            f"{name}: {len(fused)} fused, {len(unfused)} unfused and {len(reference)} reference "
            "outputs do not belong together"
        )
    checks = tuple(
        check_output(
            np.asarray(x), np.asarray(y), np.asarray(ref), np.asarray(y).dtype.name, by, bound
        )
        for x, y, ref, by, bound in zip(fused, unfused, reference, computed_in, bounds, strict=True)
    )
    worst = max((check.fused_error for check in checks), default=0.0)
    return Verification(name, all(check.passed for check in checks), checks, worst)


def judge_outputs(
    fused: Sequence[np.ndarray],
    unfused: Sequence[np.ndarray],
    reference: Reference,
    name: str = "main",
    computed_in: Sequence[str | None] | None = None,
) -> Verification:
    """As `compare_outputs`; what roundings do is found out only if the verdict depends on it."""
    outputs = reference.outputs
    found = compare_outputs(fused, unfused, outputs, name, computed_in, reference.no_bounds)
    if found.passed:
        return found
    return compare_outputs(fused, unfused, outputs, name, computed_in, reference.bounds)


def verify_module(
    fused_run: Run, unfused_run: Run, call_tir_module: tvm.IRModule, inputs: Sequence[Any]
) -> Verification:
    """Verify a compiled module.

    Parameters
    ----------
    fused_run, unfused_run : callable
        From inputs to a flat list of arrays: the fused module, and the same operators one by one.
    call_tir_module : IRModule
        The module before fusion, after LegalizeOps; the float64 reference is made from it.
    inputs : sequence
        One value per parameter of `main`, in the parameter's dtype.

    Returns
    -------
    Verification
    """
    reference = Reference(call_tir_module, inputs)
    dtypes = computed_dtypes(call_tir_module)
    fused, unfused = fused_run(inputs), unfused_run(inputs)
    return judge_outputs(fused, unfused, reference, computed_in=dtypes)


def verify_group(
    case: GroupCase,
    target: tvm.target.Target | None = None,
    run_fused: RunModule | None = None,
    run_unfused: RunModule | None = None,
) -> Verification:
    """Verify one group on its own.

    Parameters
    ----------
    case : GroupCase
        The group.
    target : Target
        Where both modules run (default: llvm).
    run_fused, run_unfused : callable, optional
        How to run them instead, from a module and inputs to a flat list of arrays.

    Returns
    -------
    Verification
        Carries the name of the group.
    """

    def run(mod: tvm.IRModule, inputs: Sequence[Any]) -> list[np.ndarray]:
        return run_module(mod, inputs, target)

    params = case.unfused_mod["main"].params
    inputs = [_round(value, p.ty) for p, value in zip(params, case.inputs, strict=True)]
    reference = Reference(case.unfused_mod, inputs, target)
    fused = (run_fused or run)(case.fused_mod, inputs)
    unfused = (run_unfused or run)(case.unfused_mod, inputs)
    dtypes = computed_dtypes(case.unfused_mod)
    return judge_outputs(fused, unfused, reference, case.name, dtypes)


def run_module(
    mod: tvm.IRModule,
    inputs: Sequence[Any],
    target: tvm.target.Target | None = None,
    entry: str = "main",
) -> list[np.ndarray]:
    """Build a module of call_tir as it is, run it once, and return its outputs as a flat list."""
    target = target or tvm.target.Target({"kind": "llvm"})
    device = tvm.device("cpu" if target.kind.name == "llvm" else target.kind.name)
    function = entry_of(build(mod, target).executable, device, entry)
    return flatten(function(*[to_argument(value, device=device) for value in inputs]))


def _round(value: Any, ty: Any) -> Any:
    """Round arrays to the dtype of the parameter that takes them."""
    if isinstance(ty, relax.TupleType):
        return [_round(v, f) for v, f in zip(value, ty.fields, strict=True)]
    if isinstance(value, np.ndarray | np.generic) and isinstance(ty, relax.TensorType):
        with np.errstate(over="ignore"):
            return np.asarray(value).astype(numpy_dtype(str(ty.dtype)))
    return value
