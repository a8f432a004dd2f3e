"""A part of a graph, made ready for the compiler: what it takes and gives, as it lies in memory.

part(n, x: f32[n, 8, 4, 4] in channels_last, k)  -> (conv(x) in channels_last,)
ready(x: f32[n, 4, 4, 8], extent_of_k: i8[k, 0]) -> (conv(x) with the channels last,)
ready(x: f32[3, 4, 4, 8])                        -> the same, for n and k as they are now
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils import _pytree as pytree

from tvm_fusion.frontends.torch.graphs import is_size, lone_symbols
from tvm_fusion.frontends.torch.written.writes import chain_of_writes
from tvm_fusion.torch_backend.layouts import inverse, memory_order

_permute = torch.ops.aten.permute.default


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor that a part gives.

    Attributes
    ----------
    order : tuple of int or None
        The permutation that makes it of what is computed; None where it is that.
    device : torch.device
    """

    order: tuple[int, ...] | None
    device: torch.device


@dataclass(frozen=True, slots=True)
class ReadyPart:
    """A part as it is compiled.

    Attributes
    ----------
    count : int
        How many inputs the part has.
    graph : fx.GraphModule
        Takes weights, tensors and then sizes, each of these as the first extent of an empty tensor.
    weights : dict of str to int
        Its placeholders that are weights, and the inputs of the part that they are.
    tensors : tuple of (int, order)
        Which inputs of the part its tensors are, and the permutation that each is given in.
    sizes : tuple of int
        Which inputs of the part its sizes are.
    results : tuple of Given
    in_place : dict of int to list of fx.Node
        Which inputs of the part are written to, and the nodes of the graph that do so.
    """

    count: int
    graph: fx.GraphModule
    weights: dict[str, int]
    tensors: tuple[tuple[int, tuple[int, ...] | None], ...]
    sizes: tuple[int, ...]
    results: tuple[Given, ...]
    in_place: dict[int, list[fx.Node]]

    def lies_elsewhere(self, device: torch.device) -> bool:
        """Whether a tensor is on another device."""
        placeholders = self.graph.graph.find_nodes(op="placeholder")
        values = [n.meta["val"] for n in placeholders if n.name not in self.weights]
        return any(isinstance(x, torch.Tensor) and x.device != device for x in values)


class OfTensors(nn.Module):
    """The graph of a `ReadyPart` as a module of its tensors, with its weights in it.

    The graph writes into nothing: what is to be written into a tensor is a result of it. This
    module writes it, as what is compiled does.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        weights: Mapping[str, torch.Tensor],
        updates: Mapping[int, int],
    ) -> None:
        """`updates` are the tensors that are written to, and the results that are written."""
        super().__init__()
        self._graph, self._weights = [graph], weights  # in a list: no submodule
        self._updates = updates

    def forward(self, *tensors: torch.Tensor) -> Any:
        (graph,), given = self._graph, iter(tensors)
        names = (node.name for node in graph.graph.find_nodes(op="placeholder"))
        results = graph(*(self._weights[n] if n in self._weights else next(given) for n in names))
        for number, result in self._updates.items():
            tensors[number].copy_(results[result])
        return results


class SizesUnknown(Exception):
    """A size of a part cannot be read off what it takes."""


def ready(
    part: fx.GraphModule,
    weights: Collection[int],
    inputs: Sequence[Any] | None,
    reorders: bool,
    updates: Sequence[tuple[int, int]] = (),
) -> ReadyPart:
    """Make a part ready.

    Parameters
    ----------
    part : fx.GraphModule
        It is left as it is.
    weights : collection of int
        Its inputs that are constants.
    inputs : sequence or None
        For these sizes and numbers only; None for all that were traced.
    reorders : bool
        Whether tensors that lie permuted are taken so; else they are taken contiguous.
    updates : sequence of (int, int)
        Inputs that may be written to, and the results that are their new values.

    Raises
    ------
    SizesUnknown
        Without inputs, a size is none of the tensors' extents, and may be negative.
    """
    placeholders = part.graph.find_nodes(op="placeholder")
    mode = _mode(placeholders) if inputs is None else FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        copying = _Copy(part, mode)
        values = _values(placeholders, mode, inputs)
        sizes = _carried(placeholders, weights) if inputs is None else ()
        found, tensors = {}, []
        for number, node in enumerate(placeholders):
            value = values[number]
            if not isinstance(value, torch.Tensor):
                copying.hold(node, value)
            elif number in weights:
                found[copying.take(node, value, None).name] = number
            else:
                order = _order(value) if reorders else None
                copying.take(node, value, order)
                tensors.append((number, order))
        for number in sizes:
            copying.carry(placeholders[number])
        results = copying.run(is_static=inputs is not None)
    module = copying.module()
    names = {i: placeholders[i].name for i, _ in updates}
    writes = {i: _writes_of(module, names[i], result) for i, result in updates}
    in_place = {i: nodes for i, nodes in writes.items() if nodes}
    count = len(placeholders)
    return ReadyPart(count, module, found, tuple(tensors), sizes, results, in_place)


class _Copy:
    """Copies a graph node by node, with the values that nodes give."""

    def __init__(self, part: fx.GraphModule, mode: FakeTensorMode) -> None:
        self._part, self._mode, self._graph = part, mode, fx.Graph()
        self._values: dict[fx.Node, Any] = {}
        self._copies: dict[fx.Node, fx.Node] = {}
        self._turned: list[tuple[fx.Node, tuple[int, ...]]] = []  # inputs, by their orders

    def hold(self, node: fx.Node, value: Any) -> None:
        """A number in the place of an input."""
        self._values[node] = value
        if isinstance(value, torch.SymInt):
            self._copies[node] = self._graph.node_copy(node)

    def take(self, node: fx.Node, value: torch.Tensor, order: tuple[int, ...] | None) -> fx.Node:
        """An input, given in an order."""
        taken = self._graph.placeholder(node.name)
        self._values[node] = value
        self._copies[node] = taken
        taken.meta = {**node.meta, "val": value}
        if order is not None:
            taken.meta["val"] = value.permute(order)
            self._turned.append((node, order))
        return taken

    def carry(self, node: fx.Node) -> None:
        """A size as the extent of a tensor."""
        carrier = self._graph.placeholder(f"extent_of_{node.name}")
        carrier.meta["val"] = torch.empty((node.meta["val"], 0), dtype=torch.int8)

    def run(self, is_static: bool) -> tuple[Given, ...]:
        """Copy the rest, and return what the results are."""
        for node, order in self._turned:
            taken = self._copies[node]
            self._copies[node] = self._permuted(taken, self._values[node], inverse(order))
        for node in self._part.graph.nodes:
            if node.op == "call_function":
                self._call(node, is_static)
            elif node.op == "get_attr":
                self._copies[node] = self._graph.node_copy(node)
                self._values[node] = operator.attrgetter(node.target)(self._part)
        (results,) = self._part.graph.output_node().args
        outputs, given = [], []
        for node in results:
            value, order = self._values[node], _order(self._values[node])
            copied = self._copies[node]
            if order is not None:
                copied = self._permuted(copied, value.permute(order), order)
            outputs.append(copied)
            given.append(Given(None if order is None else inverse(order), value.device))
        self._graph.output(tuple(outputs))
        return tuple(given)

    def module(self) -> fx.GraphModule:
        """The copy; its code is made where somebody calls it, which a check of numbers does."""
        return _LazyGraphModule(self._part, self._graph)

    def _call(self, node: fx.Node, is_static: bool) -> None:
        value = node.meta.get("val")
        if is_static:
            args, kwargs = (
                fx.map_arg(a, self._values.__getitem__) for a in (node.args, node.kwargs)
            )
            value = node.target(*args, **kwargs)
        self._values[node] = value
        if is_static and not _holds_tensors(value):
            return  # a number, which stands in the arguments of what reads it
        copied = self._graph.node_copy(node, self._argument)
        copied.meta = {**node.meta, "val": value}
        self._copies[node] = copied

    def _argument(self, node: fx.Node) -> Any:
        return self._copies[node] if node in self._copies else self._values[node]

    def _permuted(self, node: fx.Node, value: torch.Tensor, order: tuple[int, ...]) -> fx.Node:
        made = self._graph.call_function(_permute, (node, list(order)))
        made.meta = {**node.meta, "val": value}
        return made


def _writes_of(module: fx.GraphModule, name: str, result: int) -> list[fx.Node]:
    """The writes that make a result of an input of this name, if they can be done in it."""
    (results,) = module.graph.output_node().args
    chain = chain_of_writes(results[result])
    return chain[1:] if chain and chain[0].name == name else []


def _values(
    placeholders: Sequence[fx.Node], mode: FakeTensorMode, inputs: Sequence[Any] | None
) -> list[Any]:
    if inputs is None:
        return [node.meta["val"] for node in placeholders]
    return [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in inputs]


def _carried(placeholders: Sequence[fx.Node], weights: Collection[int]) -> tuple[int, ...]:
    """The inputs that are sizes which no tensor has as an extent by itself."""
    values = [node.meta["val"] for node in placeholders]
    tensors = [v for i, v in enumerate(values) if isinstance(v, torch.Tensor) and i not in weights]
    if any(isinstance(value, torch.SymFloat | torch.SymBool) for value in values):
        raise SizesUnknown
    known = lone_symbols(tensors)
    sizes = {number: v.node for number, v in enumerate(values) if is_size(placeholders[number])}
    needed = {str(s) for node in sizes.values() for s in node.expr.free_symbols}
    needed |= {str(s) for tensor in tensors for n in tensor.shape for s in free_symbols(n)}
    carried = []
    for number, node in sizes.items():
        symbol = str(node.expr)
        if symbol in needed - known and node.shape_env.bound_sympy(node.expr).lower >= 0:
            carried.append(number)
            known.add(symbol)
    if needed - known:
        raise SizesUnknown
    return tuple(carried)


def _order(value: torch.Tensor) -> tuple[int, ...] | None:
    """How a tensor lies that is not contiguous; None where that is no permutation of one."""
    order = memory_order(value)
    return None if order is None or order == tuple(range(value.ndim)) else order


def _mode(placeholders: Sequence[fx.Node]) -> FakeTensorMode:
    values = (node.meta.get("val") for node in placeholders)
    fakes = (value for value in values if isinstance(value, FakeTensor))
    first = next(fakes, None)
    return FakeTensorMode(allow_non_fake_inputs=True) if first is None else first.fake_mode


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
