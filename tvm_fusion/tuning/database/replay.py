"""Schedules as texts: MetaSchedule traces in compact JSON, and back.

A trace lists schedule instructions and the decisions that were sampled, post-processing among them,
so that replaying needs neither rules nor post-processors:

    [[["GetSBlock",[],["matmul","main"],["b0"]], ...], [[4,[8,16]], ...]]

TVM crashes on some malformed traces, or reads beyond its arrays. The texts here are its own: of a
schedule that was made here, or of one that another process replayed (`foreign`).
"""

from __future__ import annotations

import json
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.schedule import Trace

from ...errors import Unsupported
from ...ir.quick_stacks import register_tensor_intrinsics
from ...ir.reader import OPAQUE_PATTERN
from ...runtime.build.lowering import APART_ATTR, SCHEDULED_ATTR

SEED = 1  # every choice has its decision; nothing is sampled


def module_of(func: tirx.PrimFunc) -> tvm.IRModule:
    """The module that the schedules and traces of a function are of.

    Its body is an object of its own: a schedule changes a body in place that several functions
    share, as a function and its `with_attr` do.
    """
    realize = func.body
    if not isinstance(realize, s_tir.SBlockRealize):
        raise Unsupported("the function's body is no block")
    body = s_tir.SBlockRealize(realize.iter_values, realize.predicate, realize.block)
    return tvm.IRModule({"main": func.with_body(body).with_attr("global_symbol", "main")})


def trace_text(trace: Any) -> str:
    """The text of a choice of kind "trace": a `tvm.s_tir.schedule.Trace` as compact JSON."""
    return json.dumps(_plain(trace.as_json()), separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    """JSON with the numbers that TVM wraps."""
    if isinstance(value, list | tuple | tvm_ffi.Array):
        return [_plain(x) for x in value]
    if isinstance(value, dict | tvm_ffi.Map):
        return {str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, tirx.IntImm | tirx.FloatImm):
        return value.value
    return str(value) if isinstance(value, str) else value


def schedule(func: tirx.PrimFunc, text: str) -> s_tir.Schedule:
    """Replays a trace on a function before any schedule, of any name.

    Raises
    ------
    Unsupported
        The text is no JSON, or the trace is one of another function.
    """
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unsupported(f"the trace is no JSON: {error}") from error
    if "Tensorize" in text:
        register_tensor_intrinsics()
    sch = s_tir.Schedule(module_of(func), seed=SEED, error_render_level="fast")
    try:
        Trace.apply_json_to_schedule(parsed, sch)
    except Exception as error:  # of a candidate: TVM raises errors of many kinds here
        raise Unsupported(f"the trace does not fit this function: {last_line(error)}") from error
    return sch


def scheduled(func: tirx.PrimFunc, text: str) -> tirx.PrimFunc:
    """The function with a trace's schedule, ready for `runtime.build.build.build_functions`.

    It has the attributes and the name of `func`, and the mark of a finished kernel; raises as
    `schedule`.
    """
    return finished(schedule(func, text), func)


def finished(sch: s_tir.Schedule, func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function of a schedule, named as `func` and marked as a finished kernel."""
    result = sch.mod["main"]
    symbol = func.attrs.get("global_symbol") if func.attrs else None
    if symbol is None:
        result = result.without_attr("global_symbol")
    else:
        result = result.with_attr("global_symbol", symbol)
    if any(inst.kind.name == "Tensorize" for inst in sch.trace.insts):
        result = result.with_attr(APART_ATTR, True)
    return result.with_attr({SCHEDULED_ATTR: True, "op_pattern": OPAQUE_PATTERN})


def last_line(error: Exception) -> str:
    """What an error of TVM says, behind its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
