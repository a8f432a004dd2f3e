"""Single lines of MetaSchedule's JSON files: parsed and checked without any call into TVM.

    database_workload.json        ["<structural hash>","<base64 of the module's JSON>"]
    database_tuning_record.json   [<workload's line>,[<trace>,<seconds>,<target>,<arguments>]]

TVM may end the process on a line that it does not expect, so that it gets none that fails here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from ..measure.trial_record import MOST_US

WORKLOADS = "database_workload.json"
RECORDS = "database_tuning_record.json"
_LENGTH_BYTES = 8  # before the module's JSON, in the base64


class BadLine(ValueError):
    """A line that is not what its file holds; the message says why."""


@dataclass(frozen=True, slots=True)
class WorkloadLine:
    """A line of `WORKLOADS`: the decimal structural hash, the line's text and its digest."""

    key: str
    text: str
    digest: str

    @property
    def module(self) -> str:
        """The base64 of the module's JSON."""
        return json.loads(self.text)[1]


@dataclass(frozen=True, slots=True)
class RecordLine:
    """A line of `RECORDS`: the line number of its workload, and all else as `payload`."""

    index: int
    payload: list[Any]
    text: str
    digest: str


def canonical(value: Any) -> str:
    """The one JSON text of a value: sorted, compact, ASCII; ValueError for inf and nan."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(text: str) -> str:
    """16 hexadecimal digits of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parse(raw: bytes) -> Any:
    """The JSON value of a line, all its numbers finite."""
    if not raw.strip():
        raise BadLine("a blank line")
    try:
        value = json.loads(raw.decode("utf-8"))
        canonical(value)
    except UnicodeDecodeError as error:
        raise BadLine("not text in UTF-8") from error
    except RecursionError as error:
        raise BadLine("JSON that is nested too deeply") from error
    except ValueError as error:
        raise BadLine(f"not JSON of finite numbers ({error})") from error
    return value


def parse_workload(raw: bytes) -> WorkloadLine:
    """A line of `WORKLOADS`; `check_module` looks into its module."""
    value = parse(raw)
    if not (isinstance(value, list) and [type(x) for x in value] == [str, str]):
        raise BadLine("not a pair of a structural hash and a module")
    if not is_key(value[0]):
        raise BadLine(f"{value[0][:40]!r} is no structural hash")
    text = canonical(value)
    return WorkloadLine(value[0], text, digest(text))


def is_key(value: Any) -> bool:
    """Whether a value is the decimal text of a structural hash."""
    if not (isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20):
        return False
    return str(int(value)) == value and int(value) < 1 << 64


def check_module(line: WorkloadLine) -> None:
    """BadLine unless the module is the base64 of a graph of nodes."""
    try:
        data = base64.b64decode(line.module, validate=True)
    except binascii.Error as error:
        raise BadLine(f"the module is not base64 ({error})") from error
    body = data[_LENGTH_BYTES:]
    if len(data) < _LENGTH_BYTES or int.from_bytes(data[:_LENGTH_BYTES], "little") != len(body):
        raise BadLine("the module is cut off")
    graph = parse(body)
    nodes = graph.get("nodes") if isinstance(graph, dict) else None
    if not isinstance(nodes, list) or not all(_is_node(node) for node in nodes):
        raise BadLine("the module is not a graph of nodes")
    root = graph.get("root_index")
    if type(root) is not int or not 0 <= root < len(nodes):
        raise BadLine("the module has no root")


def _is_node(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get("type"), str)


def parse_record(raw: bytes) -> RecordLine:
    """A line of `RECORDS` with sane times and the shape of a trace."""
    value = parse(raw)
    if not (isinstance(value, list) and len(value) == 2 and type(value[0]) is int):
        raise BadLine("not a pair of a workload's line and a record")
    index, payload = value
    if not (isinstance(payload, list) and len(payload) == 4):
        raise BadLine("not a record of trace, times, target and arguments")
    trace, seconds, target, arguments = payload
    if not _is_trace(trace):
        raise BadLine("the trace is not a list of instructions and of decisions")
    check_seconds(seconds)
    if not isinstance(target, dict) or not isinstance(target.get("kind"), str):
        raise BadLine("the record has no target")
    if arguments is not None and not isinstance(arguments, list):
        raise BadLine("the arguments are not a list")
    text = canonical(payload)
    return RecordLine(index, payload, text, digest(text))


def check_seconds(seconds: Any) -> None:
    """BadLine unless these are times of a kernel that ran."""
    if not isinstance(seconds, list) or not seconds:
        raise BadLine("the record has no times")
    for second in seconds:
        if isinstance(second, bool) or not isinstance(second, int | float):
            raise BadLine(f"a time of {second!r}")
        if not 0 < second < MOST_US * 1e-6:
            raise BadLine(f"a time of {second} s, which no kernel takes")


def _is_trace(trace: Any) -> bool:
    if not (isinstance(trace, list) and [type(x) for x in trace] == [list, list]):
        return False
    instructions, decisions = trace
    return all(_is_instruction(x) for x in instructions) and all(
        isinstance(x, list) and len(x) == 2 and type(x[0]) is int for x in decisions
    )


def _is_instruction(value: Any) -> bool:
    return isinstance(value, list) and [type(x) for x in value] == [str, list, list, list]
