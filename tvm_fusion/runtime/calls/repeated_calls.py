"""Calls like one that was checked: small kernels take less time than checking in Python.

TVM makes tensors of its own of what a function is given. There they are compared with those of a
call that was checked, by a function in LLVM IR:

    again(a, b)  ->  main(a, b)     if a and b have the device, dtype and shape that they had, are
                                    contiguous and aligned
                 ->  None           if not: the caller checks them, and says what is wrong, or
                                    copies them

Small NumPy arrays are seldom aligned: they are copied to memory that is kept for them. On a Zen 4 a
product of 8 x 16 x 8 takes 2.4 us with torch tensors, of which TVM takes 1.7, and 3.8 with NumPy
arrays; 5.5 and 60 where each call is checked in Python, and arrays are copied to new tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from ...host import threads as _threads
from ...host.native import address_of, library, load_ir
from ..build.destinations import Destinations
from .checked_tensors import CheckedTensors, Like, can_check
from .new_tensors import maker
from .tensors import NATIVE, Kind, from_tvm, kind_of, result_kind

# Bytes of NumPy arrays that memory is kept for: 8 us of copying, a tenth of what it saves.
MOST_STAGED_BYTES = 256 << 10

MOST_SIZES = 32  # of a function with symbolic ones, whose calls are known again

RepeatedCall = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class Repeated:
    """A function that is called again and again.

    Attributes
    ----------
    function : tvm_ffi.Function
    lock : held while it runs
    on_cpu : bool
    own : tuple of bool
        The outputs that a NumPy array can be, see `from_tvm`.
    writes : bool
        Whether it writes to inputs.
    destinations : Destinations or None
    into : tvm_ffi.Function or None
        The function of these.
    """

    function: Any
    lock: AbstractContextManager[Any]
    on_cpu: bool
    own: tuple[bool, ...]
    writes: bool
    destinations: Destinations | None = None
    into: Any = None

    def call(
        self,
        inputs: Sequence[Any],
        arguments: Sequence[Any],
        kind: Kind,
        results: Sequence[Any] = (),
        unread: Container[int] = (),
    ) -> RepeatedCall | None:
        """Return a call of the function on inputs like these, which were checked; it returns None
        for others, and outputs of the kind that belongs to its inputs.

        Parameters
        ----------
        inputs, arguments : sequence
            What the caller gave, and as the function takes them.
        kind : Kind
            Of the outputs.
        results : sequence
            The outputs of the call that was checked, which tell sizes that are symbolic.
        unread : container of int
            Outputs that may be None.

        Returns
        -------
        callable or None
            None if inputs like these have to be checked or copied each time.
        """
        if not arguments or not all(isinstance(a, tvm.runtime.Tensor) for a in arguments):
            return None
        if any(0 in a.shape for a in arguments):  # theirs are not the strides of the caller's
            return None
        if kind is Kind.NUMPY:
            return _staged_call(self, arguments) if self._can_stage(inputs, arguments) else None
        pairs = zip(inputs, arguments, strict=True)
        is_lent = all(kind_of(x) is kind and x.data_ptr() == a.data_ptr() for x, a in pairs)
        if not is_lent or not can_check():
            return None
        if kind is Kind.TORCH and self.destinations is not None:
            return _filling_call(self, arguments, results, unread)
        return _lent_call(self, arguments, kind)

    def lends(self, result: Any) -> bool:
        """Whether what the function returns is a tensor whose memory can be an array's."""
        return self.own == (True,) and result.dtype in NATIVE

    def _can_stage(self, inputs: Sequence[Any], arguments: Sequence[Any]) -> bool:
        return (
            self.on_cpu
            and not self.writes
            and all(a.dtype in NATIVE for a in arguments)
            and all(type(value) is np.ndarray and value.size > 0 for value in inputs)
            and sum(value.nbytes for value in inputs) <= MOST_STAGED_BYTES
            and _lends_to_write()
        )


def _lent_call(repeated: Repeated, arguments: Sequence[Any], kind: Kind) -> RepeatedCall:
    """A call on the memory of the caller's tensors."""
    lock, on_cpu = repeated.lock, repeated.on_cpu
    checked = CheckedTensors(list(map(_like, arguments)), repeated.function)
    run = checked.call
    usual = tvm.runtime.Tensor if kind is Kind.TVM else sys.modules["torch"].Tensor
    usual_only = {usual}

    def call(inputs: Sequence[Any]) -> Any:
        if on_cpu and not _threads.settled:
            _threads.kernel_threads()
        with lock:
            try:
                result = run(*inputs)
            except Exception:
                if checked.has_failed():
                    raise
                return None  # no tensor of TVM's can be made of an input: the check says why
        if result is None or type(result) is usual:
            return result
        if type(result) is int:  # it returned nothing
            return None
        if set(map(type, inputs)) == usual_only:
            if kind is Kind.TORCH and type(result) is tvm_ffi.Array:
                return _tensors(result, inputs[0])
            return from_tvm(result, kind, None, repeated.own)
        return from_tvm(result, result_kind([kind_of(x) for x in inputs]), None, repeated.own)

    return call


def _filling_call(
    repeated: Repeated,
    arguments: Sequence[Any],
    results: Sequence[Any],
    unread: Container[int],
) -> RepeatedCall:
    """A call on the memory of the caller's tensors of torch, which writes to new ones."""
    lock, on_cpu, tensor = repeated.lock, repeated.on_cpu, sys.modules["torch"].Tensor
    outputs, is_tuple = repeated.destinations.outputs, repeated.destinations.is_tuple
    given = [
        (tuple(results[number].shape) if output[0] is None else output[0], output[1])
        for number, output in enumerate(outputs)
        if output is not None
    ]
    device = arguments[0].device
    make = maker(given, device)
    like = [*map(_like, arguments), *((device, *output) for output in given)]
    checked = CheckedTensors(like, repeated.into)
    run = checked.call
    places = [number for number, output in enumerate(outputs) if output is not None]
    others = [number for number, output in enumerate(outputs) if output is None]
    read = [(number, i) for i, number in enumerate(others) if number not in unread]

    def call(inputs: Sequence[Any]) -> Any:
        first = inputs[0] if inputs else None
        if type(first) is not tensor:
            first = next((x for x in inputs if isinstance(x, tensor)), None)
            if first is None:  # the outputs are not torch's
                return None
        if on_cpu and not _threads.settled:
            _threads.kernel_threads()
        made = tuple(make())
        with lock:
            try:
                rest = run(*inputs, *made)
            except Exception:
                if checked.has_failed():
                    raise
                return None  # no tensor of TVM's can be made of an input: the check says why
        if rest is None:
            return None
        if not others:
            return made if is_tuple else made[0]
        results = [None] * len(outputs)
        for number, value in zip(places, made, strict=True):
            results[number] = value
        item = _item()
        for number, i in read:
            results[number] = item(rest, i, first)
        return tuple(results)

    return call


class CallsBySize:
    """Calls of a function with symbolic sizes: those like one that was checked, at each of the
    sizes that it was called with last.

    Parameters
    ----------
    telling : sequence of int
        Inputs whose shapes tell the sizes.
    """

    def __init__(self, telling: Sequence[int]) -> None:
        self._telling = tuple(telling)
        self._calls: dict[tuple[Sequence[int], ...], RepeatedCall] = {}

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """The result; None for inputs that have to be checked."""
        try:
            call = self._calls.get(self._sizes(inputs))
        except (AttributeError, IndexError, TypeError):  # no such tensors: the check says why
            return None
        return None if call is None else call(inputs)

    def keep(self, inputs: Sequence[Any], call: RepeatedCall) -> None:
        """Have `call` take inputs of these sizes; where there are many, the first are dropped."""
        sizes = self._sizes(inputs)
        self._calls.pop(sizes, None)
        if len(self._calls) >= MOST_SIZES:
            self._calls.pop(next(iter(self._calls)))
        self._calls[sizes] = call

    def _sizes(self, inputs: Sequence[Any]) -> tuple[Sequence[int], ...]:
        return tuple([inputs[i].shape for i in self._telling])


def _like(tensor: tvm.runtime.Tensor) -> Like:
    return tensor.device, tensor.shape, str(tensor.dtype)


def _tensors(results: tvm_ffi.Array, like: Any) -> tuple[Any, ...]:
    """Outputs as tensors of torch, which `like` is one of; tuples within them as tuples."""
    item = _item()
    given = [item(results, i, like) for i in range(len(results))]
    if tvm_ffi.Array in map(type, given):
        given = [_tensors(x, like) if type(x) is tvm_ffi.Array else x for x in given]
    return tuple(given)


@cache
def _item() -> Callable[[tvm_ffi.Array, int, Any], Any]:
    """An element of an array. Beside a tensor of torch, what a function returns is one of torch
    from the beginning: 20 outputs take 49 us this way, and 167 through DLPack in Python.
    """
    get = tvm_ffi.get_global_func("ffi.ArrayGetItem")
    call = address_of(library("libtvm_ffi").TVMFFIFunctionCall)
    return load_ir(f"""\
define i32 @__tvm_ffi_item(ptr %self, ptr %arguments, i32 %count, ptr %result) {{
  %call = inttoptr i64 {call} to ptr
  %get = inttoptr i64 {get.__chandle__()} to ptr
  %status = call i32 %call(ptr %get, ptr %arguments, i32 2, ptr %result)
  ret i32 %status
}}
""")["item"]


def _staged_call(repeated: Repeated, arguments: Sequence[Any]) -> RepeatedCall:
    """A call on copies of the caller's arrays, in memory that is kept."""
    function, lock = repeated.function, repeated.lock
    rooms = [tvm.runtime.empty(a.shape, a.dtype) for a in arguments]
    views = [np.from_dlpack(room) for room in rooms]
    wanted = [(view.dtype, view.shape) for view in views]
    is_lent: bool | None = None  # of the output, which is of one type in all calls

    def call(inputs: Sequence[Any]) -> Any:
        nonlocal is_lent
        if len(inputs) != len(wanted):
            return None
        for value, (dtype, shape) in zip(inputs, wanted, strict=True):
            if type(value) is not np.ndarray or value.dtype != dtype or value.shape != shape:
                return None
        if not _threads.settled:
            _threads.kernel_threads()
        with lock:
            for view, value in zip(views, inputs, strict=True):
                view[...] = value
            result = function(*rooms)
            if is_lent is None:
                is_lent = repeated.lends(result)
            if is_lent:
                return np.from_dlpack(result)
            return from_tvm(result, Kind.NUMPY, None, repeated.own)

    return call


@cache
def _lends_to_write() -> bool:
    """Whether NumPy lets arrays be written in memory of others; older releases do not."""
    return np.from_dlpack(tvm.runtime.empty((1,))).flags.writeable
