"""A compiled model beside the framework that it comes from: what was imported may be another
function, and the check against float64, which starts from the imported module, cannot tell.

    outputs of the module  <->  model(*example_inputs), as it runs in PyTorch

Errors are relative to the largest number of an output. Where one is larger than roundings make it,
both are computed in float64: models with choices in them (a top-k, a rounding to integers) may
differ by much more than roundings, and agree then. If they do not, the operator is looked for
(`source_nodes`). Where the model runs in a moment, it is run again with NaN, with infinities, with
zeros and negative numbers, and one of pointwise operators with the largest and the least numbers in
its inputs; an operator that by itself gives something else there is another function, too.

What the two leave in the inputs is compared as outputs are; no special values are tried on a module
that writes into them. The weights are read where they lie; buffers and inputs are copied, as
`forward` may write them.
Does not compare: models with more than `MOST_PARAMETERS` on the CPU, and those without values of
their weights; `SourceCheck.note` says so.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import VerificationError
from ..flow.planned import Planned
from ..host.stages import stage
from ..ir.convention import Of
from ..runtime.calls.compiled_module import CompiledModule
from .distance import error_of, real_numbers, rounding
from .plain import LLVM, plain_build, plain_module
from .reference import poisoned, run_reference
from .written_memory import with_written

if TYPE_CHECKING:
    from .source_nodes import Differs, NodeByNode

logger = logging.getLogger(__name__)

MOST_PARAMETERS = 200_000_000
SURE = 1e-6  # of both in float64
# What runs with special values take together, at most, and the time that decides whether they run.
SPECIAL_S = 1.0
SHAPES_ONLY = "shapes and dtypes only"

Run = Callable[..., Any]
"""Tensors of PyTorch in, what the module gives out."""


@dataclass(frozen=True, slots=True)
class SourceCheck:
    """A module beside the framework that its model comes from.

    Attributes
    ----------
    name : str
        Of the framework.
    error : float or None
        The largest of an output, relative to its largest number; None where nothing is compared.
    note : str or None
        What was not compared, and why.
    """

    name: str
    error: float | None = None
    note: str | None = None


class KernelsAlone(VerificationError):
    """An output is off, and of the module its kernels alone were checked: it may be that which is
    wrong.
    """


@dataclass(frozen=True)
class Original:
    """What a module was imported from.

    Attributes
    ----------
    model, example_inputs
        As `tvm_fusion.compile` takes them.
    with_special : bool
        Whether the two are compared with special values among the inputs, too.
    """

    model: Any
    example_inputs: Any = None
    with_special: bool = True
    _begun: list[Future[_Ran]] = field(default_factory=list, init=False, repr=False, compare=False)

    @contextmanager
    def run_beside(self) -> Iterator[None]:
        """Lets PyTorch run the model on its GPU in a thread, beside what is done within: at their
        first call its libraries look for kernels and load them, for seconds in which Python has
        nothing to do (of EfficientNet 5 of 30 s, H200).

        Of a graph with all devices and types in it: a thread has no modes of the one that calls,
        nor its stream, on which inputs may be written yet.
        """
        source = self.in_torch
        if source is None or source.not_run() is not None or source.gpu is None:
            yield
            return
        torch = sys.modules["torch"]
        infers, stream = torch.is_inference_mode_enabled(), torch.cuda.current_stream(source.gpu)

        def run() -> _Ran:
            with torch.cuda.stream(stream), torch.inference_mode(infers):
                return source.run()

        with ThreadPoolExecutor(1) as pool:
            self._begun.append(pool.submit(run))
            yield

    def ran(self) -> _Ran:
        """What PyTorch computes of the example inputs."""
        return self._begun[0].result() if self._begun else self.in_torch.run()

    @cached_property
    def in_torch(self) -> _Source | None:
        """The model in PyTorch; None for models of other kinds."""
        return _Source.of(self.model, self.example_inputs)

    @property
    def is_comparable(self) -> bool:
        """Whether PyTorch can run it on its example inputs, as far as can be told before it is
        compiled.
        """
        return self.in_torch is not None and self.in_torch.not_run() is None


def source_check(
    compiled: CompiledModule,
    planned: Planned,
    original: Original,
    here: bool = True,
    sure: bool = True,
) -> SourceCheck | None:
    """Compares a module with PyTorch on the example inputs.

    Parameters
    ----------
    compiled : CompiledModule
    planned : Planned
        What it was built from.
    original : Original
    here : bool
        Whether this machine has the device; if not, the imported module is built for the CPU.
    sure : bool
        Whether the module is known to compute what was imported. If not, it may be that which is
        wrong where an output is off.

    Returns
    -------
    SourceCheck or None
        None for models that are not of PyTorch.

    Raises
    ------
    VerificationError
        The imported model is another function than the one that was given.
    """
    source = original.in_torch
    if source is None:
        return None
    why = source.not_compared(here)
    if why is not None:
        return SourceCheck("PyTorch", note=f"{why}: {SHAPES_ONLY}")
    run = _from_the_start(compiled if here else _on_cpu(planned))
    device = "cuda" if here and compiled.target.kind.name == "cuda" else "cpu"
    ran = original.ran()
    theirs, expected = ran.inputs, ran.outputs
    begin = time.perf_counter()
    ours = _moved(source.inputs, device)
    with _in_fresh_memory(compiled, here):
        given = leaves(run(*ours))
    seconds = time.perf_counter() - begin + ran.seconds
    if len(given) != len(expected):
        raise _another(f"{len(given)} outputs, PyTorch gives {len(expected)}", [])
    errors = [error_of(a, b) for a, b in zip(given, expected, strict=True)]
    limits = [rounding(x.dtype) for x in expected]
    names = [f"output {i}" for i in range(len(errors))]
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        errors.append(error_where_unequal(a, b))
        limits.append(rounding(source.inputs[i].dtype))
        names.append(f"what is left in input {i}")
    off = [i for i, error in enumerate(errors) if not error <= limits[i]]
    if off:
        worst = max(off, key=lambda i: errors[i])
        what = f"{names[worst]} is off by {errors[worst]:.3g} of its largest number"
    if off and not sure:
        raise KernelsAlone(
            f"beside PyTorch {what}, and its kernels alone were checked; check all of it: "
            'verify="full"'
        )
    if off and not _same_in_float64(planned, source):
        raise _another(what, source.differing(_moved(source.inputs)))
    quick = original.with_special and here and seconds < SPECIAL_S / 4 and not compiled.writes
    note = _special(source, run, device, planned) if quick else None
    return SourceCheck("PyTorch", max(errors, default=0.0), note)


def error_where_unequal(given: Any, expected: Any) -> float:
    """As `error_of`; most inputs are left as they were, which is known sooner than how far off."""
    equal = sys.modules["torch"].equal(given.to(expected.device), expected)
    return 0.0 if equal else error_of(given, expected)


def _in_fresh_memory(compiled: CompiledModule, here: bool) -> AbstractContextManager[None]:
    """What a run within leaves unwritten is not by chance what PyTorch left there."""
    memory = compiled.memory
    if not here or memory is None:
        return nullcontext()
    return poisoned(compiled.device, memory.storages())


def _special(source: _Source, run: Run, device: str, planned: Planned) -> str | None:
    """Holds a model against PyTorch with special values among its inputs; in words, with which its
    outputs differ though no operator does by itself.
    """
    told = []
    is_finite = source.factorizes()
    for name, inputs in special_inputs(source.inputs, _is_pointwise(planned), is_finite):
        try:
            expected = leaves(source.eager(inputs))
        except Exception as error:  # a factorization, say, that there is none of
            logger.info("PyTorch does not run with %s in the inputs: %s", name, error)
            continue
        given = leaves(run(*_moved(inputs, device)))
        pairs = zip(given, expected, strict=True)
        if all(error_of(a, b) <= rounding(b.dtype) for a, b in pairs):
            continue
        found = source.differing(inputs)
        if found:
            raise _another(f"with {name} in its inputs an output differs", found)
        told.append(f"with {name} in the inputs outputs differ, though no operator by itself does")
    return "; ".join(told) or None


def special_inputs(
    inputs: Sequence[Any], pointwise: bool, finite: bool = False
) -> Iterator[tuple[str, Sequence[Any]]]:
    """Inputs of which some elements are special, and what they are. Numbers that overflow in sums
    are only for models that are pointwise; with `finite` all are numbers.
    """
    if not any(x.is_floating_point() and x.numel() for x in inputs):
        return
    kinds: list[tuple[str, Callable[[Any], Sequence[float]]]] = []
    if not finite:
        kinds.append(("NaN", lambda _: (math.nan,)))
        kinds.append(("infinities", lambda _: (math.inf, -math.inf)))
    kinds.append(("zeros and negative numbers", lambda _: (0.0, -0.0, -1.0, -0.5)))
    if pointwise:
        kinds.append(("extreme numbers", lambda i: (i.max, i.min, i.tiny, -i.tiny)))
    finfo = sys.modules["torch"].finfo
    for name, values in kinds:
        yield (
            name,
            [
                _with(x, values(finfo(x.dtype))) if x.is_floating_point() and x.numel() else x
                for x in inputs
            ],
        )


def _with(x: Any, values: Sequence[float]) -> Any:
    """x with each value in a place of its own at the least, and in one of eight elements."""
    x = x.detach().clone(memory_format=sys.modules["torch"].contiguous_format)
    flat = x.reshape(-1)
    step = min(8, max(1, flat.numel() // len(values)))
    for i, value in enumerate(values):
        flat[i * step :: step * len(values)] = value
    return x


def _is_pointwise(planned: Planned) -> bool:
    """Whether no operator adds up or multiplies over an axis."""
    blocks = [block for op in planned.graph.ops for block in op.blocks]
    opaque = any(op.why_opaque for op in planned.graph.ops)
    return not opaque and not any(block.reduced for block in blocks)


def _another(what: str, operators: Sequence[Differs]) -> VerificationError:
    if operators:
        rest = f" ({len(operators) - 1} more differ)" if operators[1:] else ""
        where = f"{operators[0]}{rest}; write that line with other operators"
    else:
        where = "compile the parts of the model one by one to find the operator that differs"
    return VerificationError(
        f"the imported model is another function than PyTorch runs: {what}. {where}, or "
        'pass verify=False or verify="report" to get the module as it is'
    )


# ---- The model in PyTorch.


@dataclass(frozen=True, slots=True)
class _Ran:
    """The tensors that PyTorch computed, what it left in the inputs, and how long it took."""

    outputs: Sequence[Any]
    inputs: Sequence[Any]
    seconds: float


@dataclass(frozen=True)
class _Source:
    """A module of PyTorch and its example inputs by position: tensors, and by place what else there
    is among them.
    """

    model: Any
    inputs: tuple
    fixed: Mapping[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, example_inputs: Any) -> _Source | None:
        """None for models of other kinds, and for programs that know no example inputs."""
        if isinstance(model, tuple) and len(model) == 2 and example_inputs is None:
            model, example_inputs = model
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        if isinstance(model, str | os.PathLike) and Path(model).suffix.lower() == ".pt2":
            model = torch.export.load(model)
        if isinstance(model, torch.export.ExportedProgram):
            args, kwargs = model.example_inputs or ((), {})
            if kwargs or not args:
                return None
            model, example_inputs = model.module(check_guards=False), args
        if not isinstance(model, torch.nn.Module):
            return None
        if isinstance(example_inputs, torch.Tensor):
            example_inputs = (example_inputs,)
        if not isinstance(example_inputs, list | tuple):
            return cls(model, (None,))
        fixed = {i: x for i, x in enumerate(example_inputs) if isinstance(x, FIXED)}
        return cls(model, tuple(x for x in example_inputs if not isinstance(x, FIXED)), fixed)

    def _given(self, tensors: Sequence[Any]) -> tuple:
        """Tensors and what else the model takes, in their places."""
        rest, count = iter(tensors), len(tensors) + len(self.fixed)
        return tuple(self.fixed[i] if i in self.fixed else next(rest) for i in range(count))

    def not_compared(self, here: bool) -> str | None:
        """Why nothing is compared, if so."""
        why = self.not_run()
        if why is None and not here and self._operations() > MOST_OPERATIONS:
            return "this machine lacks the device, and it has too many operations for the CPU"
        return why

    def not_run(self) -> str | None:
        """Why PyTorch does not run it, if so."""
        torch = sys.modules["torch"]
        if not all(isinstance(x, torch.Tensor) for x in self.inputs):
            return "its example inputs are not tensors by position"
        parameters = list(self.model.parameters())
        tensors = [*self.inputs, *parameters, *self.model.buffers()]
        if any(t.device.type == "meta" for t in tensors):
            return "its weights have no values yet"
        count = sum(p.numel() for p in parameters if p.device.type == "cpu")
        if count > MOST_PARAMETERS:
            return f"it has {count / 1e6:.0f} million parameters on the CPU"
        return None

    @property
    def gpu(self) -> Any:
        """The torch.device of its inputs; None on the CPU."""
        return next((x.device for x in self.inputs if x.is_cuda), None)

    def run(self) -> _Ran:
        begin = time.perf_counter()
        inputs = _moved(self.inputs)
        outputs = leaves(self.eager_on(inputs))
        return _Ran(outputs, inputs, time.perf_counter() - begin)

    def eager(self, inputs: Sequence[Any] | None = None) -> Any:
        """What PyTorch computes; the model, its buffers and the inputs stay as they were."""
        return self.eager_on(_moved(self.inputs if inputs is None else inputs))

    def eager_on(self, inputs: Sequence[Any]) -> Any:
        """The same on these very tensors, which the model may write into."""
        torch = sys.modules["torch"]
        buffers = {name: x.clone() for name, x in self.model.named_buffers()}
        with _evaluation_mode(self.model):
            return torch.func.functional_call(self.model, buffers, self._given(inputs))

    def eager_in_float64(self) -> tuple[Any, list[Any]]:
        """The same in float64, of a copy of the model, and what it leaves in its inputs."""
        model, inputs = copy.deepcopy(self.model).double(), list(map(_wide, self.inputs))
        with _evaluation_mode(model), _wide_casts():
            return model(*self._given(inputs)), inputs

    @cached_property
    def _by_node(self) -> NodeByNode:
        from .source_nodes import NodeByNode

        return NodeByNode(self.model, self._given(self.inputs))

    def factorizes(self) -> bool:
        """As `source_nodes.factorizes`."""
        from .source_nodes import factorizes

        return factorizes(self.eager)

    def differing(self, inputs: Sequence[Any]) -> list[Differs]:
        """The operators that by themselves give something else than PyTorch; none, too, where they
        cannot be run one by one.
        """
        try:
            with stage("looking for the operator that differs from PyTorch"):
                return self._by_node.differing(inputs)
        except Exception as error:  # whatever stops one of TVM's operators alone
            logger.info("operators were not compared with PyTorch one by one: %s", error)
            return []

    def _operations(self) -> float:
        from torch.utils.flop_counter import FlopCounterMode

        try:
            with FlopCounterMode(display=False) as counted:
                self.eager()
        except (
            Exception
        ) as error:  # PyTorch counts nothing of some models that call graphs (`scan`)
            logger.info("the operations of the model are not counted: %s", error)
            return math.inf
        return counted.get_total_flops()


FIXED = (int, float, str, type(None))  # what is part of a program among example inputs
MOST_OPERATIONS = 4_000_000_000  # of a model that is run as TVM's loops on the CPU


def _evaluation_mode(model: Any) -> AbstractContextManager[None]:
    from ..frontends.torch.model import evaluation_mode  # torch is there

    return evaluation_mode(model)


def _wide(x: Any) -> Any:
    if x.is_complex():
        return x.to(sys.modules["torch"].complex128, copy=True)
    return x.to(sys.modules["torch"].float64, copy=True) if x.is_floating_point() else x.clone()


def _wide_casts() -> AbstractContextManager[Any]:
    """Casts within to narrower floats are to float64, and no dtype is asserted."""
    torch = sys.modules["torch"]
    narrower = torch.float32, torch.float16, torch.bfloat16

    class Wide(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if func is torch.ops.aten._assert_tensor_metadata.default:
                return None
            if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in narrower:
                kwargs["dtype"] = torch.float64
            return func(*args, **kwargs)

    return Wide()


def leaves(outputs: Any) -> list[Any]:
    """The tensors of a result, in order."""
    torch = sys.modules["torch"]
    found = torch.utils._pytree.tree_leaves(outputs)
    return [leaf.detach() for leaf in found if isinstance(leaf, torch.Tensor)]


def _moved(inputs: Sequence[Any], device: str | None = None) -> list[Any]:
    """Copies of the inputs, where the module runs."""
    copies = [x.clone() for x in inputs]
    return copies if device is None else [x.to(device) for x in copies]


def _on_cpu(planned: Planned) -> CompiledModule:
    """The imported module as TVM's loops on the CPU."""
    module = CompiledModule.of(plain_build(plain_module(planned.mod, LLVM), LLVM))
    module.follow(planned.source.convention)
    return module


def _from_the_start(module: CompiledModule) -> Run:
    """Calls of a module that all begin with what it keeps now."""
    kept = module.state_dict()

    def run(*inputs: Any) -> Any:
        try:
            return module(*inputs)
        finally:
            module.load_state_dict(kept)

    return run if kept else module


# ---- Errors.


def _same_in_float64(planned: Planned, source: _Source) -> bool:
    """Whether the imported module and PyTorch's agree in float64, in what they leave in the inputs,
    too; False where one has no such.
    """
    try:
        outputs, theirs = source.eager_in_float64()
        expected = [_array(x) for x in leaves(outputs)]
        given = [_array(_wide(x)) for x in source.inputs]
        mod, written = with_written(plain_module(planned.mod, planned.target))
        convention, kept = planned.source.convention, []
        if convention is not None:
            kept = [convention.values[n].numpy() for n in convention.parameters]
            kept = [x.astype("float64") if x.dtype.kind == "f" else x for x in kept]
        found = run_reference(mod, [*given, *kept])
        found, behind = found[: len(found) - len(written)], found[len(found) - len(written) :]
        new = dict(zip(written, behind, strict=True))
        if convention is not None:
            new |= {n: found[output] for n, output in convention.updates.items()}
            tensors = [r for r in convention.results if r.of in (Of.OUTPUT, Of.INPUT)]
            computed = [r.of is Of.OUTPUT for r in tensors]
            expected = [x for x, own in zip(expected, computed, strict=True) if own]
            found = [found[r.value] for r in tensors if r.of is Of.OUTPUT]
        if len(found) < len(expected):
            return False
        found = found[: len(expected)]
        for i, x in enumerate(map(_array, theirs)):
            if not np.array_equal(x, given[i], equal_nan=x.dtype.kind == "f"):
                expected.append(x)
                found.append(new.get(i, given[i]))
    except Exception as error:  # whatever an operator raises that there is no float64 of
        logger.info("not compared with PyTorch in float64: %s", error)
        return False
    return all(map(_is_near, found, expected))


def _array(x: Any) -> np.ndarray:
    return np.asarray(real_numbers(x).cpu())


def _is_near(given: np.ndarray, expected: np.ndarray) -> bool:
    """Whether two arrays in float64 are one function's."""
    if given.shape != expected.shape:
        return False
    finite = np.isfinite(expected)
    if not np.array_equal(np.isfinite(given), finite):
        return False
    scale = np.abs(expected[finite]).max(initial=0.0) if expected.dtype.kind == "f" else 0.0
    off = np.abs(given[finite].astype("float64") - expected[finite].astype("float64"))
    return not np.any(off > SURE * scale)
