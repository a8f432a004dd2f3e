"""Index maps within traces: what `transform_layout` and `transform_block_layout` are given.

A trace holds them as JSON graphs of nodes, each node behind those that it refers to:

    {"root_index": 5, "nodes": [{"type": "None"}, {"type": "ir.PrimType", "data": {...}}, ...]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import tvm
from tvm import tirx

from ...errors import Unsupported

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
