"""Where operators come from in the model: the module that computes them and the line of its source.

Frontends note it by the names of variables, in an attribute of `main`. `taken_from` takes it off
before a module is planned: names of a model are for its author's eyes, and no plan, cache key or
kernel depends on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import tvm

from .graph import FusionGraph, Op

ORIGINS_ATTR = "tvm_fusion.origins"

_PART = re.compile(r"(.*)_[a-z]+(?:_\d+)?")  # parts are called after the whole: lv3_rows_1


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an operator stands in a model.

    Attributes
    ----------
    module : str
        Path of the submodule that computes it, as `torch.nn.Module.named_modules` has it
        ("layers.3.mlp"), or the name of a node of ONNX; empty for the model itself.
    source : str
        "model.py:42", or empty where that is not known.
    """

    module: str = ""
    source: str = ""


Origins = Mapping[str, Origin]


def with_origins(mod: tvm.IRModule, origins: Origins) -> tvm.IRModule:
    """The module with what is known of its variables, by their names."""
    if not origins:
        return mod
    found = mod.clone()
    told = {name: [origin.module, origin.source] for name, origin in origins.items()}
    found.update_func(mod.get_global_var("main"), mod["main"].with_attr(ORIGINS_ATTR, told))
    return found


def taken_from(mod: tvm.IRModule) -> tuple[tvm.IRModule, Origins]:
    """The module without what `with_origins` noted, and that."""
    attrs = mod["main"].attrs
    if not attrs or ORIGINS_ATTR not in attrs:
        return mod, {}
    origins = {str(n): Origin(*map(str, o)) for n, o in attrs[ORIGINS_ATTR].items()}
    found = mod.clone()
    found.update_func(mod.get_global_var("main"), mod["main"].without_attr(ORIGINS_ATTR))
    return found, origins


def origins_of_operators(graph: FusionGraph, origins: Origins) -> tuple[Origin | None, ...]:
    """Where each operator of a graph comes from.

    An operator that no variable of the model is named after is a part of one that is: of the same
    composite, or named after it, or else of what reads it, or of what it reads.

    Parameters
    ----------
    graph : FusionGraph
    origins : mapping of str to Origin
        By the names of the variables of the model.
    """
    if not origins:
        return (None,) * len(graph.ops)
    tagged = [op for op in graph.ops if op.composite is not None and op.name in origins]
    by_tag = {op.composite: origins[op.name] for op in tagged}
    found = [_own(op, origins, by_tag) for op in graph.ops]
    for op in reversed(graph.ops):
        found[op.id] = found[op.id] or _first(found, graph.consumers(op.id))
    for op in graph.ops:
        found[op.id] = found[op.id] or _first(found, graph.producers(op.id))
    return tuple(found)


def _own(op: Op, origins: Origins, by_tag: Mapping[str | None, Origin]) -> Origin | None:
    if op.composite in by_tag:
        return by_tag[op.composite]
    name: str | None = op.name
    while name is not None and name not in origins:
        whole = _PART.fullmatch(name)
        name = whole and whole[1]
    return origins.get(name) if name else None


def _first(found: list[Origin | None], ops: Iterable[int]) -> Origin | None:
    return next((found[op] for op in ops if found[op] is not None), None)
