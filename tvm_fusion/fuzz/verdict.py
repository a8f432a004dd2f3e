"""What became of a program: right, refused, an internal error, or wrong.

An output is judged by the rule of `check.rules`, beside torch in float64. What it allows comes from
torch's own error in the program's types, which is always allowed; where that does not suffice, from
what roundings do to the reference (`check.allowance`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..check.allowance import Reference, narrowest
from ..check.rules import OutputCheck, check_output
from ..compilation.compiler import compile as compiled_of
from ..config import resolve_target
from ..errors import TvmFusionError
from ..frontends import load
from ..transform.pipeline import lower
from .draw import dtype_name
from .torch_program import FLOATS, Program

RIGHT, REFUSED, ERROR, WRONG, CRASH = "right", "refused", "error", "wrong", "crash"

Tensors = tuple[torch.Tensor, ...]
Run = Callable[[Tensors], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a program.

    Attributes
    ----------
    kind : `RIGHT`, `REFUSED`, `ERROR`, `WRONG` or `CRASH`
    why : str
        The message of what refused or failed, or how far which output is off.
    output : int
        The wrong output.
    """

    kind: str
    why: str = ""
    output: int = -1

    @property
    def failed(self) -> bool:
        """Whether somebody has to look at it."""
        return self.kind in (ERROR, WRONG, CRASH)

    def like(self, other: Verdict) -> bool:
        """Whether two programs fail in the same way: wrong numbers, or the same first words."""
        if self.kind != other.kind or self.kind == WRONG:
            return self.kind == other.kind
        return self.why.split(":")[0] == other.why.split(":")[0]


def judged(program: Program, target: Any, inputs: int = 2) -> Verdict:
    """Compiles a program unchecked and runs it on inputs of `inputs` seeds.

    Parameters
    ----------
    program : Program
    target : as `tvm_fusion.compile` takes it
    inputs : int
    """
    arguments = program.arguments()
    device = _device(target)

    def build() -> Run:
        module = compiled_of(program.module(), target, example_inputs=arguments, verify=False)
        return lambda given: _flat(module(*(x.to(device) for x in given)))

    others = (program.arguments(program.seed + n * 1_000_003) for n in range(1, inputs))
    return judged_run(program, build, [arguments, *others])


def judged_run(program: Program, build: Callable[[], Run], arguments: Sequence[Tensors]) -> Verdict:
    """Judges what `build` makes of a program, on each of the arguments."""
    try:
        run = build()
        given = [run(of) for of in arguments]
    except TvmFusionError as error:
        return Verdict(REFUSED, f"{type(error).__name__}: {_line(error)}")
    except Exception as error:  # the boundary of a program: counted, and the run goes on
        return Verdict(ERROR, f"{type(error).__name__}: {_line(error)}")
    for of, outputs in zip(arguments, given, strict=True):
        verdict = compared(program, of, outputs)
        if verdict.kind != RIGHT:
            return verdict
    return Verdict(RIGHT)


def compared(program: Program, arguments: Tensors, given: Sequence[torch.Tensor]) -> Verdict:
    """Compares outputs with torch's."""
    eager, exact = program.eager(arguments), program.exact(arguments)
    if len(given) != len(eager):
        return Verdict(WRONG, f"{len(given)} outputs, not {len(eager)}", 0)
    narrow = narrowest(name for name in FLOATS if _mentions(program, name))
    bounds: list[Any] | None = None
    for i, (x, own, ref) in enumerate(zip(given, eager, exact, strict=True)):
        check = _checked(x, own, ref, narrow, None)
        if check.passed or check.error <= check.plain_error < math.inf:
            continue  # torch's own result is no nearer
        if check.worst_index is not None:  # not of another shape or type
            bounds = bounds if bounds is not None else _bounds(program, arguments)
            check = _checked(x, own, ref, narrow, bounds[i])
        if not check.passed:
            return Verdict(WRONG, f"output {i}: {check.why}", i)
    return Verdict(RIGHT)


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor of an array, bfloat16 among them."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """An array of a tensor, bfloat16 among them."""
    import ml_dtypes

    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _checked(x: Any, own: Any, ref: Any, narrow: str | None, bound: Any) -> OutputCheck:
    dtype = dtype_name(own.dtype)
    # no ceiling beside a bound: programs divide by what cancels, which no kernel computes well
    return check_output(x.detach().cpu(), own, ref, dtype, narrow, bound, ceiling=bound is None)


def _bounds(program: Program, arguments: Tensors) -> list[Any]:
    """What roundings do to each output, as tensors; None where that cannot be said."""
    mod = load(program.module(), arguments)
    low = lower(mod, resolve_target("llvm")[0], decompose=False)
    bounds = Reference(low, [as_array(x) for x in arguments]).bounds
    return [None if b is None else torch.from_numpy(np.asarray(b)) for b in bounds]


def _mentions(program: Program, dtype: str) -> bool:
    codes = [i.code for i in program.inputs] + [s.code for s in program.statements]
    return any(f"torch.{dtype}" in code for code in codes)


def _device(target: Any) -> str:
    return "cuda" if resolve_target(target)[0].kind.name == "cuda" else "cpu"


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _flat(item)]
    return [value]


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else ""
