"""A model of the zoo compiled for a CPU, and its numbers beside those of torch."""

from __future__ import annotations

import copy
import importlib
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import tvm_fusion
from tvm_fusion.errors import TvmFusionError
from tvm_fusion.torch_backend import NAME, PartReport

SOURCES = ("transformers", "timm")
RIGHT, WRONG, REFUSED, ERROR, SLOW = "right", "wrong", "refused", "internal error", "too slow"
OUTCOMES = (RIGHT, WRONG, REFUSED, ERROR, SLOW)

NEAR = 1e-4  # of the largest number of a result
AS_FAR = 4  # times the error of torch in float32, beside float64
DISTURBANCE = 0.05
CALLS = 2


@dataclass
class Verdict:
    """What became of a model.

    Attributes
    ----------
    source, name : str
    outcome : str
        One of `OUTCOMES`.
    why : str
        The message of a refusal or an error, or what is wrong.
    error : float
        The largest difference of a result over its largest number.
    seconds : float
        For compiling it.
    phases : dict of str to float
        Seconds of the stages of compiling that took a second and more.
    """

    source: str
    name: str
    outcome: str = ERROR
    why: str = ""
    error: float = 0.0
    seconds: float = 0.0
    parameters: int = 0
    launches: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    dynamo: Dynamo | None = None


@dataclass
class Dynamo:
    """What became of a model through `torch.compile`.

    Attributes
    ----------
    graphs, parts : int
        Those of which something is compiled, and their parts.
    breaks, breaks_of_dynamo : int
        Graph breaks here, and with the backend "eager", which are those of every other backend.
    outside : list of str
        What our warnings say: operators and parts that run in torch.
    flop_inside : float
        The share of the FLOP of eager execution that is not computed by torch.
    """

    graphs: int
    parts: int
    breaks: int
    breaks_of_dynamo: int
    outside: list[str]
    flop_inside: float


def module_of(source: str):
    """The table of a source, with `build(name)`, `TABLE` and `WAYS`."""
    return importlib.import_module(f".{source}_models", __package__)


def prepare() -> None:
    """Imports what takes seconds, and keeps libraries quiet."""
    warnings.simplefilter("ignore")
    for source in SOURCES:
        module_of(source)


def judged(source: str, name: str) -> Verdict:
    """A model is built, compiled and called."""
    verdict, model, inputs = _built(source, name)
    given = list(inputs.values()) if isinstance(inputs, dict) else list(inputs)
    clock, watch = time.monotonic(), _Phases()
    try:
        with watch:
            compiled = tvm_fusion.compile(
                copy.deepcopy(model), "llvm", example_inputs=inputs, verify=False
            )
    except TvmFusionError as error:
        verdict.outcome, verdict.why = REFUSED, str(error)
        return verdict
    finally:
        verdict.seconds, verdict.phases = round(time.monotonic() - clock, 1), watch.long
    verdict.launches = compiled.launches
    ours = [x for _ in range(CALLS) for x in _tensors(compiled(*given))]
    _compare(verdict, ours, model, inputs)
    return verdict


def judged_through_dynamo(source: str, name: str) -> Verdict:
    """The same through `torch.compile(backend="tvm_fusion")`, and what stays in torch there."""
    verdict, model, inputs = _built(source, name)
    breaks = _breaks_of_dynamo(model, inputs)
    reports: list[PartReport] = []
    options = {"verify": False, "report": reports.append}
    clock, watch = time.monotonic(), _Phases()
    with watch, warnings.catch_warnings(record=True) as told, torch.no_grad():
        warnings.simplefilter("always")
        run = torch.compile(copy.deepcopy(model), backend=NAME, options=options)
        ours = [x for _ in range(CALLS) for x in _tensors(_called(run, inputs))]
    verdict.seconds, verdict.phases = round(time.monotonic() - clock, 1), watch.long
    texts = (" ".join(str(one.message).split()) for one in told)
    verdict.dynamo = Dynamo(
        graphs=len({one.graph for one in reports}),
        parts=len(reports),
        breaks=_counted_breaks(),
        breaks_of_dynamo=breaks,
        outside=[text[:400] for text in texts if text.startswith(NAME)],
        flop_inside=round(1 - _flop(run, inputs) / max(1, _flop(model, inputs)), 4),
    )
    verdict.launches = sum(one.module.launches for one in reports)
    _compare(verdict, ours, model, inputs)
    return verdict


def _built(source: str, name: str) -> tuple[Verdict, torch.nn.Module, Any]:
    torch.manual_seed(0)
    model, inputs = module_of(source).build(name)
    model.eval().requires_grad_(False)
    disturb(model)
    return (
        Verdict(source, name, parameters=sum(p.numel() for p in model.parameters())),
        model,
        inputs,
    )


def _compare(
    verdict: Verdict, ours: Sequence[torch.Tensor], model: torch.nn.Module, inputs: Any
) -> None:
    """Say whether results are right."""
    eager = _results(model, inputs)
    verdict.why = _shapes(ours, eager)
    if not verdict.why:
        verdict.error = largest_error(ours, eager)
        if verdict.error > NEAR:
            exact = _results(copy.deepcopy(model).double(), pytree.tree_map(_double, inputs))
            limit = AS_FAR * largest_error(eager, exact)
            beside = largest_error(ours, exact)
            if not beside <= limit:
                verdict.why = f"errs by {beside:.1e}, torch by {limit / AS_FAR:.1e}"
    verdict.outcome = WRONG if verdict.why else RIGHT


def _breaks_of_dynamo(model: torch.nn.Module, inputs: Any) -> int:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        run = torch.compile(copy.deepcopy(model), backend="eager")
        for _ in range(CALLS):
            _called(run, inputs)
    found = _counted_breaks()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return found


def _counted_breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def _flop(run: Callable[..., Any], inputs: Any) -> int:
    """FLOP of products, convolutions and attention that torch computes in a call."""
    with torch.no_grad(), _Flop() as counted:
        _called(run, inputs)
    return counted.flop


class _Flop(TorchDispatchMode):
    """Counts as `torch.utils.flop_counter` does, without keeping Dynamo from what it compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.flop = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flop += count(*args, **kwargs, out_val=results)
        return results


def _called(model: Callable[..., Any], inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def disturb(model: torch.nn.Module) -> None:
    """Every parameter and statistic gets noise: what is 0 or 1 in the beginning hides operators."""
    draw = torch.Generator().manual_seed(1)
    for tensor in model.parameters():
        if tensor.is_floating_point():
            tensor.add_(DISTURBANCE * torch.randn(tensor.shape, generator=draw))
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.add_(DISTURBANCE * torch.randn(buffer.shape, generator=draw))
        elif name.endswith("running_var"):
            buffer.mul_(1 + torch.rand(buffer.shape, generator=draw))


def _double(x: object) -> object:
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _results(model: torch.nn.Module, inputs: dict | Sequence) -> list[torch.Tensor]:
    """Those of calls one after the other: a model may write into itself."""
    model, found = copy.deepcopy(model), []
    with torch.no_grad():
        for _ in range(CALLS):
            found += _tensors(_called(model, inputs))
    return found


def _tensors(results: object) -> list[torch.Tensor]:
    """The tensors of a result, as they are now."""
    found = (torch.as_tensor(x) for x in pytree.tree_leaves(results) if x is not None)
    return [x.clone() for x in found]


def _shapes(ours: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> str:
    """What differs in shapes and types; empty if nothing does."""
    kinds = [[(tuple(x.shape), x.dtype) for x in results] for results in (ours, eager)]
    return "" if kinds[0] == kinds[1] else f"gives {kinds[0]}, torch {kinds[1]}"


def largest_error(given: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest difference over the largest number, of the worst result; infinite where one of
    two is no number.
    """
    worst = 0.0
    for a, b in zip(given, wanted, strict=True):
        a, b = a.double(), b.double()
        finite = torch.isfinite(b)
        if not torch.allclose(a[~finite], b[~finite], equal_nan=True):
            return float("inf")
        if finite.any():
            largest = b[finite].abs().max().clamp(min=1e-12)
            worst = max(
                worst, float(((a - b)[finite].abs().max() / largest).nan_to_num(float("inf")))
            )
    return worst


class _Phases(logging.Handler):
    """Stages that take a second and more."""

    def __init__(self) -> None:
        super().__init__()
        self.long: dict[str, float] = {}
        self.logger = logging.getLogger("tvm_fusion.time")

    def emit(self, record: logging.LogRecord) -> None:
        if len(record.args) != 2:  # a line of the table of all stages
            return
        stage, seconds = record.args
        if seconds >= 1:
            self.long[str(stage)] = round(seconds, 1)

    def __enter__(self) -> None:
        self.level_before, self.propagated = self.logger.level, self.logger.propagate
        self.logger.setLevel(logging.INFO)
        self.logger.propagate = False
        self.logger.addHandler(self)

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self)
        self.logger.setLevel(self.level_before)
        self.logger.propagate = self.propagated
