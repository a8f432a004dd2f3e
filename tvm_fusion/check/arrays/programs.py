"""Modules of plain PrimFuncs in float64 on whole arrays of PyTorch, where it is loaded: what the
compiled reference gives (`check.reference`) in milliseconds, as nothing is compiled.

A right result is told right by it; a result that seems wrong is judged again by the compiled one.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import Call

from ...ir.weights import numbers
from ...transform.functions.functions import operator_name
from ..reference import to_float64
from ..rules import as_tensor
from .narrow import narrow, wide
from .operations import NotOnArrays, dtype_in_torch, freeing
from .prim_funcs import ArrayFunction

logger = logging.getLogger(__name__)

Run = Callable[[Sequence[Any]], list[Any]]

_LONG = 1 << 27  # operations that take more than a tenth of a second on one core
IN_PLACE = "relax.call_tir_inplace"
_RESHAPES = ("relax.reshape", "relax.memory.view", "relax.memory.ensure_zero_offset")


def device_in_torch(kind: str) -> str | None:
    """torch's name of the device that computes for a kind of target; None where torch is not
    loaded.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return "cuda" if kind == "cuda" and torch.cuda.is_available() else "cpu"


def let_go(device: str | None) -> None:
    """Gives memory that torch keeps on a GPU for what it will compute back to others."""
    if device == "cuda":
        sys.modules["torch"].cuda.empty_cache()


def on_arrays(
    mod: tvm.IRModule, entries: Sequence[str], target: tvm.target.Target | None
) -> dict[str, Run]:
    """Functions of a module in float64, as `check.reference.build_references` gives them.

    Parameters
    ----------
    mod : IRModule
        A call_tir module (after LegalizeOps).
    entries : sequence of str
        Those that cannot be computed this way are left out.
    target : Target or None

    Returns
    -------
    dict of str to callable
        From inputs (arrays, or tensors of torch on the device) to the outputs, tuples flattened:
        arrays, of a GPU tensors there. They raise `NotOnArrays` where data is wrong.
    """
    device = device_in_torch("llvm" if target is None else target.kind.name)
    if device is None:
        return {}
    found: dict[str, Run] = {}
    try:
        functions = _Functions(to_float64(mod), device)
    except Exception as error:  # of TVM, or `Unsupported`: what is compiled says it again
        logger.debug("not on arrays: %s", error)
        return {}
    for entry in entries:
        try:
            with _undisturbed():
                found[entry] = _Program(functions, entry)
        except (NotOnArrays, RuntimeError) as error:  # of torch: no memory, or no such operation
            logger.debug("%s is not computed on arrays: it has %s", entry, error)
    return found


class _Functions:
    """The PrimFuncs of a module, each read when it is first called."""

    def __init__(self, mod: tvm.IRModule, device: str) -> None:
        self.mod, self.device = mod, device
        self._made: dict[tuple, ArrayFunction] = {}

    def of(
        self, gvar: tvm.ir.GlobalVar, count: int, results: tuple[int, ...] | None
    ) -> ArrayFunction:
        key = (gvar, results)
        if key not in self._made:
            func = self.mod[gvar]
            if not isinstance(func, tirx.PrimFunc):
                raise NotOnArrays(f"a call of {gvar.name_hint}")
            try:
                self._made[key] = ArrayFunction(func, count, self.device, results)
            except NotOnArrays as error:
                raise NotOnArrays(f"{gvar.name_hint}: {error}") from error
        return self._made[key]


Value = int | list
"""The number of a tensor among those of a program, or such of the fields of a tuple."""


@dataclass(frozen=True, slots=True)
class _CallOf:
    compute: Callable[[Sequence[Any]], Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass
class _Reader:
    """Reads the bindings of a Relax function."""

    functions: _Functions
    tensors: list[Any] = field(default_factory=list)
    calls: list[_CallOf] = field(default_factory=list)
    known: dict[relax.Var, Value] = field(default_factory=dict)
    views: dict[int, int] = field(default_factory=dict)  # of what each is one
    written: set[int] = field(default_factory=set)

    def new(self, tensor: Any = None) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def value(self, e: relax.Expr) -> Value:
        found = self._value(e)
        if any(self.views.get(i, i) in self.written for i in _flat(found)):
            raise NotOnArrays("a read of memory by the name that it had before a write")
        return found

    def _value(self, e: relax.Expr) -> Value:
        if isinstance(e, relax.Var) and e in self.known:
            return self.known[e]
        if isinstance(e, relax.Tuple):
            return [self.value(item) for item in e.fields]
        if isinstance(e, relax.TupleGetItem):
            return self.value(e.tuple_value)[e.index]
        if isinstance(e, tvm.ir.GenericConst):
            return self.new(narrow(_there(numbers(e), self.functions.device)))
        if isinstance(e, Call):
            return self._call(e)
        raise NotOnArrays(f"a value of {type(e).__name__}")

    def _call(self, call: Call) -> Value:
        name = operator_name(call)
        if name in _RESHAPES:
            shape, output = _extents(call.ty), self.new()
            inputs = tuple(_flat(self.value(call.args[0])))
            self.views[output] = self.views.get(inputs[0], inputs[0])
            self.calls.append(_CallOf(lambda given: [given[0].reshape(shape)], inputs, (output,)))
            return output
        if name not in ("relax.call_tir", IN_PLACE) or len(call.args) > 2:
            raise NotOnArrays(f"a call of {name}")
        (ty,) = call.ty_args
        inputs = tuple(_flat(self.value(call.args[1])))
        results = _results(call, len(inputs)) if name == IN_PLACE else None
        function = self.functions.of(call.args[0], len(inputs), results)
        outputs = [self.new() for _ in (ty.fields if isinstance(ty, relax.TupleType) else [ty])]
        self.calls.append(_CallOf(function, inputs, tuple(outputs)))
        changed = [inputs[i] for i in results or () if i < len(inputs)]
        self.written.update(self.views.get(i, i) for i in changed)
        return outputs if isinstance(ty, relax.TupleType) else outputs[0]


def _results(call: Call, count: int) -> tuple[int, ...]:
    """The numbers of the parameters that hold what a call in place gives: -1 stands for one behind
    the inputs.
    """
    behind = iter(range(count, count + len(call.attrs.inplace_indices)))
    return tuple(i if i >= 0 else next(behind) for i in map(int, call.attrs.inplace_indices))


class _Program:
    """A Relax function as calls of `ArrayFunction`s; what nobody reads any more is let go."""

    def __init__(self, functions: _Functions, entry: str) -> None:
        func, reader = functions.mod[entry], _Reader(functions)
        self._device = functions.device
        for param in func.params:
            reader.known[param] = _parameter(param.ty, reader)
        self._params = [reader.known[param] for param in func.params]
        for binding in (b for block in func.body.blocks for b in block.bindings):
            if not isinstance(binding, relax.VarBinding):
                raise NotOnArrays(f"a binding of {type(binding).__name__}")
            reader.known[binding.var] = reader.value(binding.value)
        self._outputs = _flat(reader.value(func.body.body))
        functions_called = (c.compute for c in reader.calls if isinstance(c.compute, ArrayFunction))
        self._is_long = sum(f.operations for f in functions_called) > _LONG
        self._tensors = reader.tensors
        self._calls = freeing(
            reader.calls, lambda call: (*call.inputs, *call.outputs), self._outputs
        )

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        tensors = list(self._tensors)
        with _undisturbed(), self._threads():
            try:
                for place, value in zip(self._params, inputs, strict=True):
                    self._give(tensors, place, value)
                for call, freed in self._calls:
                    found = call.compute([tensors[i] for i in call.inputs])
                    for i, tensor in zip(call.outputs, found, strict=True):
                        tensors[i] = tensor
                    for i in freed:
                        tensors[i] = None
            except RuntimeError as error:  # of torch: out of memory, mostly
                raise NotOnArrays(str(error)) from error
            found = [wide(tensors[i]) for i in self._outputs]
            return found if self._device == "cuda" else [x.numpy() for x in found]

    def _threads(self) -> AbstractContextManager[None]:
        return nullcontext() if self._device != "cpu" or self._is_long else _one_thread()

    def _give(self, tensors: list[Any], place: Value, value: Any) -> None:
        if isinstance(place, list):
            for inner, item in zip(place, value, strict=True):
                self._give(tensors, inner, item)
        else:
            tensors[place] = narrow(_there(value, self._device))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """torch without gradients, and without modes that look at each operation: torch.compile has one
    while it compiles, which takes five times as long as small operations do.
    """
    torch = sys.modules["torch"]
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        yield


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch without threads of its own, in all of the process: they wait for each other after each
    small operation, and on cores that are busy for much longer than all of them take.
    """
    global _alone, _threads
    torch = sys.modules["torch"]
    with _counting:
        if _alone == 0:
            _threads = torch.get_num_threads()
        _alone += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _counting:
            _alone -= 1
            if _alone == 0:
                torch.set_num_threads(_threads)


_counting = threading.Lock()
_alone, _threads = 0, 1
"""Who runs so, and the threads that torch had before the first of them."""


def _parameter(ty: relax.Type, reader: _Reader) -> Value:
    if isinstance(ty, relax.TupleType):
        return [_parameter(item, reader) for item in ty.fields]
    if not isinstance(ty, relax.TensorType):
        raise NotOnArrays("a parameter that is no tensor")
    _extents(ty)
    dtype_in_torch(str(ty.dtype))
    return reader.new()


def _extents(ty: relax.Type) -> tuple[int, ...]:
    shape = getattr(ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr) or not all(
        isinstance(extent, tirx.IntImm) for extent in shape.values
    ):
        raise NotOnArrays("a tensor of unknown shape")
    return tuple(int(extent) for extent in shape.values)


def _flat(value: Value) -> list[int]:
    return [value] if isinstance(value, int) else [i for item in value for i in _flat(item)]


def _there(value: Any, device: str) -> Any:
    """An array, or a tensor of torch, on a device."""
    try:
        value = as_tensor(value)
    except TypeError as error:
        raise NotOnArrays(str(error)) from error
    return value.to(device).contiguous()
