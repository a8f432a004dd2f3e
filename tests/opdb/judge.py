"""One entry of the database, compiled, run and compared; called in a process that may die.

A result is right with the shapes and element types of eager execution, and each of its numbers is
near eager's or near float64's: NaN and infinities are equal, floats within `torch.testing`'s
tolerance, or with an error of at most `TIMES` times that of eager execution.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

import tvm_fusion
from tvm_fusion.errors import BuildError, TvmFusionError, VerificationError
from tvm_fusion.torch_backend import NAME

from . import OUTCOMES
from .samples import NotJudged, Sample, operators, samples, tensors_in

TIMES = 4.0
# Nothing is said of the values: memory that nobody wrote
UNSPECIFIED = (
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
)
# Of equal elements any may come first
UNORDERED = ("argsort", "kthvalue", "median", "mode", "msort", "nanmedian", "sort", "topk")
TOLERANCES = {  # about those of torch.testing.assert_close, relative and absolute
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (2e-3, 1e-5),  # two units in the last place, as of bfloat16
    torch.bfloat16: (1.6e-2, 1e-5),
}
BY_TVM = "(TVM: "  # what stands behind it is told of an error that TVM raised


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an entry: one of `OUTCOMES`, what was said, and through `torch.compile` which
    operators our parts left to torch.
    """

    outcome: str
    why: str = ""
    outside: str = ""


def prepare() -> None:
    """What a new process does once."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    operators()


def prepare_inductor() -> None:
    """The same where `torch.compile` is asked: what it compiles once is not of an entry's time."""
    prepare()
    torch.compile(torch.sin, backend="inductor")(torch.ones(64))


def judge(name: str, dtype: str, target: str) -> dict[str, str]:
    """The worst outcome of an entry's samples, as a dict of `Outcome`."""
    return _worst(name, dtype, lambda sample: judge_sample(sample, target, name))


def judge_backend(name: str, dtype: str, target: str) -> dict[str, str]:
    """The same through `torch.compile(backend="tvm_fusion")`."""
    return _worst(name, dtype, lambda sample: judge_sample_of_backend(sample, target, name))


def judge_inductor(name: str, dtype: str) -> dict[str, str]:
    """The same of `torch.compile(backend="inductor")` in our place."""
    return _worst(name, dtype, lambda sample: _by_inductor(sample, name))


def _worst(name: str, dtype: str, judged: Any) -> dict[str, str]:
    try:
        with torch.no_grad():
            found = [judged(sample) for sample in samples(name, dtype)]
    except NotJudged as why:
        return asdict(Outcome("not judged", str(why)))
    return asdict(max(found, key=lambda one: (OUTCOMES.index(one.outcome), one.outside, one.why)))


def judge_sample(sample: Sample, target: str, name: str = "") -> Outcome:
    """What became of one sample."""
    try:
        compiled = tvm_fusion.compile(
            sample.module, target, example_inputs=tuple(sample.copied_inputs()), verify=False
        )
        device = "cpu" if target == "llvm" else "cuda"
        results = compiled(*(x.to(device) for x in sample.copied_inputs()))
    except TvmFusionError as error:
        return Outcome("refused" if _is_clear(error) else "internal error", _told(error))
    except Exception as error:
        return Outcome("internal error", _told(error))
    return _compared(sample, results, name)


def judge_sample_of_backend(sample: Sample, target: str, name: str = "") -> Outcome:
    """What became of one sample through `torch.compile`, where nothing may be refused."""
    device = "cpu" if target == "llvm" else "cuda"
    inputs = [x.to(device) for x in sample.copied_inputs()]
    options = {"target": target, "verify": False}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            results, breaks = _by_dynamo(sample, inputs, backend=NAME, options=options)
            found = _compared(sample, results, name)
        except Exception as error:
            return Outcome("internal error", _told(error))
    outside = "; ".join(_of_backend(told))
    return Outcome(found.outcome, found.why or breaks, outside)


def _of_backend(told: Sequence[warnings.WarningMessage]) -> list[str]:
    texts = (" ".join(str(one.message).split()) for one in told)
    return [text.removeprefix(f"{NAME}: ")[:300] for text in texts if text.startswith(NAME)]


def _by_inductor(sample: Sample, name: str) -> Outcome:
    try:
        results, breaks = _by_dynamo(sample, sample.copied_inputs(), backend="inductor")
        found = _compared(sample, results, name)
    except Exception as error:
        return Outcome("refused", _told(error))
    return Outcome(found.outcome, found.why or breaks)


def _by_dynamo(sample: Sample, inputs: list[torch.Tensor], **compiler: Any) -> tuple[Any, str]:
    """Results of a sample through `torch.compile`, and a word on what Dynamo left to eager
    execution.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    random.seed(0)
    results = torch.compile(sample.module, **compiler)(*inputs)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return results, (
        f"with {breaks} graph breaks, between which eager execution goes on" if breaks else ""
    )


def _compared(sample: Sample, results: Any, name: str) -> Outcome:
    is_tuple = isinstance(results, list | tuple)
    given = tree_map(_tensor, tuple(results) if is_tuple else results)
    given = tensors_in(sample.determined(given))
    if name.split(".")[0] in UNORDERED:
        given = _with_places_of_equals(given, sample)
    why = difference(given, sample, only_types=name in UNSPECIFIED)
    return Outcome("wrong", why) if why else Outcome("right")


def _with_places_of_equals(given: list[torch.Tensor], sample: Sample) -> list[torch.Tensor]:
    """Results with eager's places for those at which the first input has the same elements."""
    x, results = sample.inputs[0], []
    for found, wanted in zip(given, sample.expected, strict=False):
        is_place = found.dtype == torch.int64 and found.shape == wanted.shape
        reduced = x.ndim - found.ndim
        if is_place and reduced in (0, 1) and found.numel() and int(found.min()) >= 0:
            for axis in range(x.ndim):
                places = [y.unsqueeze(axis) if reduced else y for y in (found, wanted)]
                inside = int(max(y.max() for y in places)) < x.shape[axis]
                if inside and _reads(places[0], x, axis) and _same_elements(x, axis, places):
                    found = wanted
                    break
        results.append(found)
    return [*results, *given[len(results) :]]


def _reads(places: torch.Tensor, x: torch.Tensor, axis: int) -> bool:
    """Whether places are those of rows of x along an axis."""
    sizes = zip(places.shape, x.shape, strict=True)
    return all(a <= b for i, (a, b) in enumerate(sizes) if i != axis)


def _same_elements(x: torch.Tensor, axis: int, places: list[torch.Tensor]) -> bool:
    found, wanted = (x.gather(axis, at) for at in places)
    return torch.equal(found, wanted)


def _tensor(x: Any) -> Any:
    if not hasattr(x, "__dlpack__"):
        return x
    return (x if isinstance(x, torch.Tensor) else torch.from_dlpack(x)).cpu()


def difference(given: list[torch.Tensor], sample: Sample, only_types: bool = False) -> str:
    """What is wrong with results, in words; empty if they are right."""
    types = [f"{tuple(x.shape)} {x.dtype}" for x in given]
    wanted = [f"{tuple(x.shape)} {x.dtype}" for x in sample.expected]
    if types != wanted:
        return f"results are {', '.join(types)}, not {', '.join(wanted)}"
    pairs = list(zip(given, sample.expected, strict=True))
    if only_types or all(map(_near, *zip(*pairs, strict=True))):
        return ""
    reference = sample.in_float64() or sample.expected
    for place, ((x, eager), exact) in enumerate(zip(pairs, reference, strict=True)):
        wrong = ~_right(x, eager, exact)
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0].tolist()) if x.ndim else ()
            return (
                f"result {place} at {at}: {x[at].item()}, not {eager[at].item()} "
                f"({int(wrong.sum())} of {x.numel()})"
            )
    return ""


def _near(x: torch.Tensor, eager: torch.Tensor) -> bool:
    return bool(_right(x, eager, eager).all())


def _right(x: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> np.ndarray:
    """Which elements are right, beside those of eager execution and of float64; of complex ones
    whether both parts are, beside the larger one.
    """
    if eager.is_complex():
        return _right_complex(x, eager, exact)
    if not eager.is_floating_point():
        return (x == eager).numpy()
    relative, absolute = TOLERANCES.get(eager.dtype, (0.125, 1e-2))
    exact = exact.to(eager.dtype).double().numpy()  # infinite where it is in that type
    x, eager = x.double().numpy(), eager.double().numpy()
    finite = np.isfinite(eager) & np.isfinite(exact)
    with np.errstate(invalid="ignore", over="ignore"):
        own = np.abs(eager - exact)[finite].max(initial=0.0)
        bound = absolute + relative * np.abs(eager)
        near = np.isclose(x, eager, relative, absolute, equal_nan=True)
        near |= np.isclose(x, exact, relative, absolute, equal_nan=True)
        return near | (finite & (np.abs(x - exact) <= np.maximum(bound, TIMES * own)))


def _right_complex(x: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> np.ndarray:
    x, eager, exact = (torch.view_as_real(y.resolve_conj()) for y in (x, eager, exact))
    near = _right(x, eager, exact)
    size = eager.double().norm(dim=-1, keepdim=True).expand(eager.shape).numpy()
    relative, absolute = TOLERANCES[eager.dtype]
    with np.errstate(invalid="ignore"):
        off = np.minimum(*(np.abs(x.double().numpy() - y.double().numpy()) for y in (eager, exact)))
        near |= np.isfinite(size) & (off <= absolute + relative * size)
    return near.all(-1)


def _is_clear(error: TvmFusionError) -> bool:
    """Whether an error of ours was raised on purpose and says so in words of its own."""
    if isinstance(error, BuildError | VerificationError) or BY_TVM in str(error):
        return False
    cause, text = error.__cause__, str(error)
    on_purpose = cause is None or isinstance(cause, TvmFusionError | NotImplementedError)
    return on_purpose or "torch.export " in text


def _told(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)}"[:600]
