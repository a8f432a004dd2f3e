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

import ctypes
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from ...host import threads as _threads
from ...host.native import address_of, library, load_ir
from .tensors import ALIGNMENT, NATIVE, Kind, from_tvm, kind_of, result_kind

# Bytes of NumPy arrays that memory is kept for: 8 us of copying, a tenth of what it saves.
MOST_STAGED_BYTES = 256 << 10

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
    """

    function: Any
    lock: AbstractContextManager[Any]
    on_cpu: bool
    own: tuple[bool, ...]
    writes: bool

    def call(
        self, inputs: Sequence[Any], arguments: Sequence[Any], kind: Kind
    ) -> RepeatedCall | None:
        """Return a call of the function on inputs like these, which were checked; it returns None
        for others, and outputs of the kind that belongs to its inputs.

        Parameters
        ----------
        inputs, arguments : sequence
            What the caller gave, and as the function takes them.
        kind : Kind
            Of the outputs.

        Returns
        -------
        callable or None
            None if inputs like these have to be checked or copied each time.
        """
        if not arguments or not all(isinstance(a, tvm.runtime.Tensor) for a in arguments):
            return None
        if kind is Kind.NUMPY:
            return _staged_call(self, arguments) if self._can_stage(inputs, arguments) else None
        pairs = zip(inputs, arguments, strict=True)
        is_lent = all(kind_of(x) is kind and x.data_ptr() == a.data_ptr() for x, a in pairs)
        return _lent_call(self, arguments, kind) if is_lent and _checker() else None

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
    table = _table(repeated.function, arguments)
    checked = _checked(table)
    usual = tvm.runtime.Tensor if kind is Kind.TVM else sys.modules["torch"].Tensor
    usual_only = {usual}

    def call(inputs: Sequence[Any]) -> Any:
        if on_cpu and not _threads.settled:
            _threads.kernel_threads()
        with lock:
            try:
                result = checked(*inputs)
            except Exception:
                if table[_STARTED]:
                    table[_STARTED] = 0
                    raise
                return None  # no tensor of TVM's can be made of an input: the check says why
        if result is None or type(result) is usual:
            return result
        if set(map(type, inputs)) == usual_only:
            if kind is Kind.TORCH and type(result) is tvm_ffi.Array:
                return _tensors(result, inputs[0])
            return from_tvm(result, kind, None, repeated.own)
        return from_tvm(result, result_kind([kind_of(x) for x in inputs]), None, repeated.own)

    return call


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


# The words of a table: whether the function runs, the function, what calls it, and how many tensors
# it takes; then of each its device, rank and dtype as DLTensor has them, and its extents.
_STARTED = 0


def _table(function: Any, tensors: Sequence[Any]) -> ctypes.Array[ctypes.c_int64]:
    call = address_of(library("libtvm_ffi").TVMFFIFunctionCall)
    words = [0, function.__chandle__(), call, len(tensors)]
    for tensor in tensors:
        device, dtype = tensor.device, tensor.dtype
        words.append(device.dlpack_device_type() | device.index << 32)
        kind = dtype.type_code | dtype.bits << 8 | dtype.lanes << 16
        words += [len(tensor.shape) | kind << 32, *map(int, tensor.shape)]
    return (ctypes.c_int64 * len(words))(*words)


def _checked(table: ctypes.Array[ctypes.c_int64]) -> Any:
    """A function that compares tensors with a table, as long as there is the table."""
    make = address_of(library("libtvm_ffi").TVMFFIFunctionCreate)
    return _checker()(ctypes.addressof(table), make)


@cache
def _checker() -> Any:
    """What makes a function that compares tensors with a table; None where TVM loads no LLVM IR."""
    try:
        return load_ir(_CHECKER)["checked"]
    except (AttributeError, OSError, ValueError):
        return None


# A value is { i32 kind, i32, ptr or number }, of the kind 7 (DLTensor) or 70 (an object with a
# DLTensor behind its header of 24 bytes). DLTensor is { ptr data, 2 x i32 device, i32 rank, 4 bytes
# dtype, ptr shape, ptr strides, i64 offset }.
_CHECKER = f"""\
%Any = type {{ i32, i32, ptr }}

define internal i32 @check(ptr %table, ptr %arguments, i32 %count, ptr %result) {{
entry:
  %at.inputs = getelementptr i64, ptr %table, i64 3
  %inputs = load i64, ptr %at.inputs
  %first = getelementptr i64, ptr %table, i64 4
  %number = trunc i64 %inputs to i32
  %is.number = icmp eq i32 %count, %number
  br i1 %is.number, label %next, label %refused

next:
  %i = phi i64 [ 0, %entry ], [ %i.after, %alike ]
  %wanted = phi ptr [ %first, %entry ], [ %wanted.after, %alike ]
  %is.done = icmp eq i64 %i, %inputs
  br i1 %is.done, label %run, label %input

input:
  %at.kind = getelementptr %Any, ptr %arguments, i64 %i, i32 0
  %kind = load i32, ptr %at.kind
  %at.object = getelementptr %Any, ptr %arguments, i64 %i, i32 2
  %object = load ptr, ptr %at.object
  %inside = getelementptr i8, ptr %object, i64 24
  %is.object = icmp eq i32 %kind, 70
  %is.plain = icmp eq i32 %kind, 7
  %tensor = select i1 %is.object, ptr %inside, ptr %object
  %is.tensor = or i1 %is.object, %is.plain
  br i1 %is.tensor, label %head, label %refused

head:
  %data = load i64, ptr %tensor
  %at.offset = getelementptr i8, ptr %tensor, i64 40
  %offset = load i64, ptr %at.offset
  %start = add i64 %data, %offset
  %beyond = and i64 %start, {ALIGNMENT - 1}
  %is.aligned = icmp eq i64 %beyond, 0
  %at.device = getelementptr i64, ptr %tensor, i64 1
  %device = load i64, ptr %at.device
  %wanted.device = load i64, ptr %wanted
  %is.there = icmp eq i64 %device, %wanted.device
  %at.type = getelementptr i64, ptr %tensor, i64 2
  %type = load i64, ptr %at.type
  %at.wanted.type = getelementptr i64, ptr %wanted, i64 1
  %wanted.type = load i64, ptr %at.wanted.type
  %is.type = icmp eq i64 %type, %wanted.type
  %aligned.there = and i1 %is.aligned, %is.there
  %is.like = and i1 %aligned.there, %is.type
  br i1 %is.like, label %body, label %refused

body:
  %rank = and i64 %type, 4294967295
  %extents = getelementptr i64, ptr %wanted, i64 2
  %at.shape = getelementptr i64, ptr %tensor, i64 3
  %shape = load ptr, ptr %at.shape
  %at.strides = getelementptr i64, ptr %tensor, i64 4
  %strides = load ptr, ptr %at.strides
  %is.compact = icmp eq ptr %strides, null
  br label %axis

axis:
  %left = phi i64 [ %rank, %body ], [ %d, %stepped ]
  %step = phi i64 [ 1, %body ], [ %step.after, %stepped ]
  %is.last = icmp eq i64 %left, 0
  br i1 %is.last, label %alike, label %compare

compare:
  %d = sub i64 %left, 1
  %at.extent = getelementptr i64, ptr %shape, i64 %d
  %extent = load i64, ptr %at.extent
  %at.wanted.extent = getelementptr i64, ptr %extents, i64 %d
  %wanted.extent = load i64, ptr %at.wanted.extent
  %is.extent = icmp eq i64 %extent, %wanted.extent
  br i1 %is.extent, label %along, label %refused

along:
  %step.after = mul i64 %step, %extent
  %is.one = icmp eq i64 %extent, 1
  %needs.no.stride = or i1 %is.compact, %is.one
  br i1 %needs.no.stride, label %stepped, label %stride

stride:
  %at.stride = getelementptr i64, ptr %strides, i64 %d
  %given.stride = load i64, ptr %at.stride
  %is.step = icmp eq i64 %given.stride, %step
  br i1 %is.step, label %stepped, label %refused

stepped:
  br label %axis

alike:
  %i.after = add i64 %i, 1
  %words = add i64 %rank, 2
  %wanted.after = getelementptr i64, ptr %wanted, i64 %words
  br label %next

run:
  %at.function = getelementptr i64, ptr %table, i64 1
  %function = load ptr, ptr %at.function
  %at.call = getelementptr i64, ptr %table, i64 2
  %call = load ptr, ptr %at.call
  store i64 1, ptr %table
  %status = call i32 %call(ptr %function, ptr %arguments, i32 %number, ptr %result)
  %is.right = icmp eq i32 %status, 0
  br i1 %is.right, label %done, label %failed

done:
  store i64 0, ptr %table
  ret i32 0

failed:
  ret i32 %status

refused:
  ret i32 0
}}

define i32 @__tvm_ffi_checked(ptr %self, ptr %arguments, i32 %count, ptr %result) {{
  %at.table = getelementptr %Any, ptr %arguments, i64 0, i32 2
  %table = load ptr, ptr %at.table
  %at.make = getelementptr %Any, ptr %arguments, i64 1, i32 2
  %make = load ptr, ptr %at.make
  %at.made = getelementptr %Any, ptr %result, i64 0, i32 2
  %status = call i32 %make(ptr %table, ptr @check, ptr null, ptr %at.made)
  store i32 68, ptr %result
  ret i32 %status
}}
"""
