"""Graphs of ATen operators as plain values, which can be pickled, and back.

    x, w = placeholders; y = aten.linear.default(x, w)  ->  rows of kinds, names, targets, arguments
    the same with fake tensors of the same shapes, strides, types and devices

Of what a node knows (`meta`) its value stays, and where it comes from in the model. Only graphs of
fixed sizes can be written so.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule

from tvm_fusion.frontends.torch.complex.pairs import IS_COMPLEX, is_complex_node
from tvm_fusion.frontends.torch.refusals import ORIGIN, origin_of

_ATOMS = (
    bool, int, float, complex, str, type(None), type(...),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_NAMESPACES = ("aten", "prims")
MOST_ELEMENTS = 4096  # of a constant of a graph


class NotPlain(Exception):
    """A graph cannot be written as plain values."""


@dataclass(frozen=True, slots=True)
class NodeAt:
    """A node among the arguments of another, by its place in the graph."""

    place: int


@dataclass(frozen=True, slots=True)
class TensorLike:
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class PlainGraph:
    """A graph.

    Attributes
    ----------
    rows : list of tuple
        Of each node: operation, name, target, arguments, keyword arguments, value, origin, and what
        else of its `meta` was to be kept.
    parts : dict of str to PlainGraph
        Its submodules.
    constants : dict of str to torch.Tensor
        Its attributes.
    """

    rows: list[tuple[Any, ...]]
    parts: "dict[str, PlainGraph]"
    constants: dict[str, torch.Tensor]


def plain(module: fx.GraphModule, kept: Sequence[str] = ()) -> PlainGraph:
    """A graph as plain values.

    Parameters
    ----------
    module : fx.GraphModule
    kept : sequence of str
        Keys of plain values in `meta` that stay.

    Raises
    ------
    NotPlain
        Sizes are symbolic, an operator is none of torch's own, or something is no plain value.
    """
    places = {node: i for i, node in enumerate(module.graph.nodes)}
    rows, parts, constants = [], {}, {}
    for node in module.graph.nodes:
        if is_complex_node(node) or IS_COMPLEX in node.meta:
            raise NotPlain(f"{node} is complex")
        target = node.target
        if node.op == "call_module":
            parts[target] = plain(module.get_submodule(target), kept)
        elif node.op == "get_attr":
            constants[target] = _constant(operator.attrgetter(target)(module))
        elif node.op == "call_function":
            target = operator_name(target)
        elif node.op not in ("placeholder", "output"):
            raise NotPlain(f"{node} is a {node.op}")
        args, kwargs = (plain_value(a, places) for a in (node.args, node.kwargs))
        value, found = tensor_like(node.meta.get("val")), origin_of(node)
        more = {key: node.meta[key] for key in kept if key in node.meta}
        rows.append((node.op, node.name, target, args, kwargs, value, found, more))
    return PlainGraph(rows, parts, constants)


def built(graph: PlainGraph, mode: FakeTensorMode | None = None) -> fx.GraphModule:
    """The graph of `plain`, with values of one fake mode."""
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
    known: dict[TensorLike, torch.Tensor] = {}
    root = nn.Module()
    for name, part in graph.parts.items():
        root.add_module(name, built(part, mode))
    for name, constant in graph.constants.items():
        root.register_buffer(name, constant)
    made, nodes = fx.Graph(), []
    for op, name, target, args, kwargs, value, origin, more in graph.rows:
        if op == "call_function":
            target = operator_named(target)
        args, kwargs = (_with_nodes(a, nodes) for a in (args, kwargs))
        node = made.create_node(op, target, args, kwargs, name)
        node.meta = {**more, ORIGIN: origin}
        if value is not None:
            node.meta["val"] = _fake(value, mode, known)
        nodes.append(node)
    return _LazyGraphModule(root, made)  # parts run as modules of torch only where they fail


def plain_value(value: Any, places: Mapping[fx.Node, int]) -> Any:
    """An argument of a node as a plain value; raises NotPlain."""
    if isinstance(value, fx.Node):
        return NodeAt(places[value])
    if type(value) is torch.Size:
        return tuple(value)
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(plain_value(v, places) for v in value)
    if isinstance(value, list):
        return [plain_value(v, places) for v in value]
    if isinstance(value, dict):
        return {key: plain_value(v, places) for key, v in value.items() if _is_key(key)}
    if type(value) is slice:
        parts = (value.start, value.stop, value.step)
        return slice(*(plain_value(v, places) for v in parts))
    if type(value) in _ATOMS:
        return value
    raise NotPlain(f"an argument is a {type(value).__name__}")


def _is_key(key: Any) -> bool:
    if isinstance(key, str):
        return True
    raise NotPlain(f"a key is a {type(key).__name__}")


def _with_nodes(value: Any, nodes: Sequence[fx.Node]) -> Any:
    """Inverse of `plain_value`."""
    if isinstance(value, NodeAt):
        return nodes[value.place]
    if isinstance(value, tuple):
        return tuple(_with_nodes(v, nodes) for v in value)
    if isinstance(value, list):
        return [_with_nodes(v, nodes) for v in value]
    if isinstance(value, dict):
        return {key: _with_nodes(v, nodes) for key, v in value.items()}
    if isinstance(value, slice):
        return slice(*(_with_nodes(v, nodes) for v in (value.start, value.stop, value.step)))
    return value


def operator_name(target: Callable[..., Any]) -> str:
    """A name under which torch, or Python, has an operator; raises NotPlain where it has none."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        raise NotPlain(f"{target} calls graphs")
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        name = str(target)
        if name.partition(".")[0] not in _NAMESPACES:
            raise NotPlain(f"{name} is none of torch's own operators")
        name = f"torch.ops.{name}"
    else:
        name = fx.node._get_qualified_name(target) if callable(target) else ""
    try:
        found = operator_named(name)
    except AttributeError:
        found = None
    if found is not target:
        raise NotPlain(f"{name or target} is not found by its name")
    return name


def operator_named(name: str) -> Any:
    """Inverse of `operator_name`."""
    module, _, path = name.partition(".")
    root = {"torch": torch, "_operator": operator}.get(module)
    if root is None:
        raise AttributeError(name)
    return operator.attrgetter(path)(root)


def _constant(value: Any) -> torch.Tensor:
    if type(value) is not torch.Tensor or value.numel() > MOST_ELEMENTS:
        raise NotPlain("a constant is large, or no tensor")
    return value.detach()


def tensor_like(value: Any) -> Any:
    """What a node gives, without numbers; raises NotPlain."""
    if isinstance(value, torch.Tensor):
        extents = (*value.shape, *value.stride())
        if value.layout is not torch.strided or not all(isinstance(n, int) for n in extents):
            raise NotPlain("a tensor is not dense, or its size is symbolic")
        return TensorLike(tuple(value.shape), value.stride(), value.dtype, value.device)
    if isinstance(value, tuple | list):
        return [tensor_like(v) for v in value]
    if value is None or type(value) in (bool, int, float):
        return value
    raise NotPlain(f"a value is a {type(value).__name__}")


def _fake(value: Any, mode: FakeTensorMode, known: dict[TensorLike, torch.Tensor]) -> Any:
    """Inverse of `tensor_like`; alike tensors are one."""
    if isinstance(value, list):
        return tuple(_fake(v, mode, known) for v in value)
    if not isinstance(value, TensorLike):
        return value
    if value not in known:
        how = {"dtype": value.dtype, "device": value.device}
        with mode:
            known[value] = torch.empty_strided(value.shape, value.stride, **how)
    return known[value]
