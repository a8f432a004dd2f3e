"""Schedules as texts: MetaSchedule traces in compact JSON, and back.

A trace lists schedule instructions and the decisions that were sampled, post-processing among them,
so that replaying needs neither rules nor post-processors:

    [[["GetSBlock",[],["matmul","main"],["b0"]], ...], [[4,[8,16]], ...]]

Index maps within it (of `transform_layout`) are JSON graphs of nodes, each behind those that it
refers to:

    {"root_index": 5, "nodes": [{"type": "None"}, {"type": "ir.PrimType", "data": {...}}, ...]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import InstructionKind, Trace

from ...errors import Unsupported
from ...ir.quick_stacks import register_tensor_intrinsics
from ...ir.reader import OPAQUE_PATTERN
from ...runtime.build.lowering import APART_ATTR, SCHEDULED_ATTR
from .space_blocks import module_of

MAX_TEXT = 4 << 20
MAY_BE_NULL = {("TransformLayout", 2)}  # attributes: the value of padding
SEED = 1  # every choice has its decision; nothing is sampled


def canonical(text: str) -> str:
    """A trace's text without needless blanks.

    Raises
    ------
    Unsupported
        It is no trace.
    """
    return json.dumps(parse(text), separators=(",", ":"))


def schedule(func: tirx.PrimFunc, text: str) -> s_tir.Schedule:
    """Replays a trace on a function.

    Parameters
    ----------
    func : tirx.PrimFunc
        The function before any schedule, of any name.
    text : str

    Raises
    ------
    Unsupported
        The text is no trace, or the trace is one of another function.
    """
    parsed = parse(text)
    if any(name == "Tensorize" for name, *_ in parsed[0]):
        register_tensor_intrinsics()
    sch = s_tir.Schedule(module_of(func), seed=SEED, error_render_level="fast")
    try:
        Trace.apply_json_to_schedule(parsed, sch)
    except Exception as error:  # of a candidate: TVM raises errors of many kinds here
        raise Unsupported(f"the trace does not fit this function: {_first_line(error)}") from error
    return sch


def scheduled(func: tirx.PrimFunc, text: str) -> tirx.PrimFunc:
    """The function with a trace's schedule, ready for `runtime.build.build.build_functions`.

    It has the attributes and the name of `func`, and the mark of a finished kernel.

    Raises
    ------
    Unsupported
        As `schedule`.
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


def parse(text: str) -> list:
    """Reads a trace's text and checks its form: TVM reads beyond its arrays when that is wrong.

    Raises
    ------
    Unsupported
        What is wrong.
    """
    if len(text) > MAX_TEXT:
        raise Unsupported(f"a trace of {len(text)} characters")
    try:
        parsed = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Unsupported(f"the trace is no JSON: {error}") from error
    if not _is_list(parsed, 2) or not all(map(_is_list, parsed)):
        raise Unsupported("a trace is a list of instructions and a list of decisions")
    instructions, decisions = parsed
    defined: set[str] = set()
    for number, instruction in enumerate(instructions):
        _check_instruction(number, instruction, defined)
    _check_decisions(instructions, decisions)
    return parsed


def _check_instruction(number: int, instruction: Any, defined: set[str]) -> None:
    where = f"instruction {number} of the trace"
    if not _is_list(instruction, 4) or not isinstance(instruction[0], str):
        raise Unsupported(f"{where} is no [name, inputs, attributes, outputs]")
    name, inputs, attributes, outputs = instruction
    if not all(map(_is_list, (inputs, attributes, outputs))):
        raise Unsupported(f"{where} ({name}) holds something other than lists")
    if name.startswith("Unsafe"):
        raise Unsupported(f"{where}: {name} may change what the function computes")
    if not _is_known(name):
        raise Unsupported(f"{where}: TVM has no instruction {name!r}")
    for value in inputs:
        _check_input(f"{where} ({name})", value, defined)
    for position, value in enumerate(attributes):
        if value is not None or (name, position) not in MAY_BE_NULL:
            _check_plain(f"{where} ({name})", value)
    for output in outputs:
        if not isinstance(output, str) or not output.isidentifier() or output in defined:
            raise Unsupported(f"{where} ({name}) defines {output!r}")
        defined.add(output)


def _check_input(where: str, value: Any, defined: set[str]) -> None:
    if _is_list(value):
        for part in value:
            _check_input(where, part, defined)
    elif is_index_map(value):
        check_index_map(where, value)
    elif isinstance(value, str):
        quoted = len(value) >= 2 and value[0] == value[-1] == '"'
        if not quoted and value not in defined and value != "None":
            raise Unsupported(f"{where} reads {value!r}, which nothing before it defines")
    elif not isinstance(value, int | float):
        raise Unsupported(f"{where} has the input {value!r}")


def _check_plain(where: str, value: Any) -> None:
    if _is_list(value):
        for part in value:
            _check_plain(where, part)
    elif is_index_map(value):
        check_index_map(where, value)
    elif not isinstance(value, int | float | str):
        raise Unsupported(f"{where} has the attribute {value!r}")


def _check_decisions(instructions: list, decisions: list) -> None:
    """Exactly one for every sampling instruction."""
    found = set()
    for entry in decisions:
        if not _is_list(entry, 2) or type(entry[0]) is not int:
            raise Unsupported("a decision of the trace is no [number of instruction, value]")
        values = entry[1] if _is_list(entry[1]) else [entry[1]]
        if not all(type(value) is int for value in values):
            raise Unsupported(f"a decision of the trace is {entry[1]!r}")
        found.add(entry[0])
    sampling = {i for i, (name, *_) in enumerate(instructions) if name.startswith("Sample")}
    if found != sampling or len(found) != len(decisions):
        raise Unsupported("the decisions of the trace are not those of its choices")


def _is_list(value: Any, length: int | None = None) -> bool:
    return isinstance(value, list) and length in (None, len(value))


def _is_known(name: str) -> bool:
    try:
        InstructionKind.get(name)
    except Exception:  # TVM's own error for a name that nobody registered
        return False
    return True


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


ROOT = "tirx.IndexMap"
_NUMBER = "int"  # the one node whose integer is no reference
_TYPES = {"None", _NUMBER, "ffi.String", "ffi.Array", "ir.PrimType", "ir.IntImm", "ir.Var", ROOT}
_ARITHMETIC = "prim."


def is_index_map(value: Any) -> bool:
    """Whether an input or attribute of an instruction is meant as an index map."""
    return isinstance(value, str) and value.startswith("{")


def check_index_map(where: str, text: str) -> None:
    """Loads an index map, after a look at its nodes: TVM follows references without one.

    Raises
    ------
    Unsupported
        It is none.
    """
    try:
        _check_graph(json.loads(text))
        sound = isinstance(tvm.ir.load_json(text), tirx.IndexMap)
    except Exception as error:  # of TVM's reader or of `_check_graph`, of many kinds
        raise Unsupported(f"{where} has a damaged index map: {_excerpt(error)}") from error
    if not sound:
        raise Unsupported(f"{where} has something other than an index map")


def _check_graph(graph: Any) -> None:
    nodes, root = graph["nodes"], graph["root_index"]
    for position, node in enumerate(nodes):
        kind = node["type"]
        if kind not in _TYPES and not kind.startswith(_ARITHMETIC):
            raise ValueError(f"a node of type {kind!r}")
        for reference in _references(node):
            if not 0 <= reference < position:
                raise ValueError(f"node {position} refers to {reference}")
    if type(root) is not int or not 0 <= root < len(nodes) or nodes[root]["type"] != ROOT:
        raise ValueError(f"its root is {root!r}")


def _references(node: dict[str, Any]) -> Iterator[int]:
    data = node.get("data")
    if node["type"] == _NUMBER or not isinstance(data, dict | list):
        return
    for value in data.values() if isinstance(data, dict) else data:
        if type(value) is int:
            yield value
        elif not isinstance(value, str):
            raise ValueError(f"a field with {value!r}")


def _excerpt(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1][:200]
