"""Tensors compared with those of a call that was checked, in LLVM IR.

TVM makes tensors of its own of what a function is given: 90 ns for one of torch, and a microsecond
to look at it in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import tvm

from ...host.native import address_of, library, load_ir
from .tensors import ALIGNMENT

Like = tuple[tvm.runtime.Device, Sequence[int], str]  # device, shape, and TVM's name of the dtype

# The words of a table: whether the function runs, the function or 0, what calls it, how many
# tensors there are, and where their addresses go; then of each its device, rank and dtype as
# DLTensor has them, and its extents.
_STARTED = 0
DONE = 1


class CheckedTensors:
    """Tensors that have the devices, shapes and dtypes of others, are contiguous and aligned.

    Parameters
    ----------
    like : sequence of Like
    function : tvm_ffi.Function, optional
        What is called with them.

    Attributes
    ----------
    call : tvm_ffi.Function
        Takes tensors: None, or what the function returns. Where that is None, or there is no
        function, it is `DONE`. One thread may call it at a time.
    """

    def __init__(self, like: Sequence[Like], function: Any = None) -> None:
        call = address_of(library("libtvm_ffi").TVMFFIFunctionCall)
        make = address_of(library("libtvm_ffi").TVMFFIFunctionCreate)
        self._addresses = (ctypes.c_int64 * len(like))()
        handle = 0 if function is None else function.__chandle__()
        words = [0, handle, call, len(like), ctypes.addressof(self._addresses)]
        for device, shape, dtype in like:
            words.append(device.dlpack_device_type() | device.index << 32)
            kind = tvm.DataType(dtype)
            packed = kind.type_code | kind.bits << 8 | kind.lanes << 16
            words += [len(shape) | packed << 32, *map(int, shape)]
        self._function = function  # which the table has no reference to
        self._table = (ctypes.c_int64 * len(words))(*words)
        self.call = _checker()(ctypes.addressof(self._table), make)

    def has_failed(self) -> bool:
        """Whether the function began and did not come back: an error is its own, and no refusal of
        what is no tensor.
        """
        failed, self._table[_STARTED] = bool(self._table[_STARTED]), 0
        return failed

    def addresses(self) -> list[int]:
        """Where the tensors of the last call lie."""
        return self._addresses[:]


def can_check() -> bool:
    """Whether TVM loads LLVM IR."""
    return _checker() is not None


@cache
def _checker() -> Any:
    """What makes a function that compares tensors with a table, as long as there is the table; None
    where TVM loads no LLVM IR.
    """
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
  %at.addresses = getelementptr i64, ptr %table, i64 4
  %addresses = load ptr, ptr %at.addresses
  %at.inputs = getelementptr i64, ptr %table, i64 3
  %inputs = load i64, ptr %at.inputs
  %first = getelementptr i64, ptr %table, i64 5
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
  %is.empty = icmp eq i64 %extent, 0
  %factor = select i1 %is.empty, i64 1, i64 %extent
  %step.after = mul i64 %step, %factor
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
  %at.address = getelementptr i64, ptr %addresses, i64 %i
  store i64 %start, ptr %at.address
  %i.after = add i64 %i, 1
  %words = add i64 %rank, 2
  %wanted.after = getelementptr i64, ptr %wanted, i64 %words
  br label %next

run:
  %at.function = getelementptr i64, ptr %table, i64 1
  %function = load ptr, ptr %at.function
  %is.check = icmp eq ptr %function, null
  br i1 %is.check, label %nothing, label %called

called:
  %at.call = getelementptr i64, ptr %table, i64 2
  %call = load ptr, ptr %at.call
  store i64 1, ptr %table
  %status = call i32 %call(ptr %function, ptr %arguments, i32 %number, ptr %result)
  %is.right = icmp eq i32 %status, 0
  br i1 %is.right, label %done, label %failed

done:
  store i64 0, ptr %table
  %given = load i32, ptr %result
  %is.nothing = icmp eq i32 %given, 0
  br i1 %is.nothing, label %nothing, label %returned

nothing:
  %at.number = getelementptr %Any, ptr %result, i64 0, i32 2
  store i64 {DONE}, ptr %at.number
  store i32 1, ptr %result
  ret i32 0

returned:
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
