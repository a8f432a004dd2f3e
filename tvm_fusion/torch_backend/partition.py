"""A graph of ATen operators, cut into parts that are compiled and the rest, which runs in torch.

    before:  a = add(x, y); b = _fft_r2c(a); c = abs(b); copy_(x, a)
    after:   a = part0(x, y)[0]; b = _fft_r2c(a); c = abs(b); copy_(x, a)

In torch stay operators without a converter, those that draw random numbers, depend on data, write
into tensors or talk to other processes, in the order that they have among each other; views of
inputs and views with gaps that are returned; parts that compute nothing; complex tensors, where
they are put together of what parts give, and taken apart.

A cache that a part alone writes to is written by that part, in place where its kernels can:

    before:  keys = index_put(cache, [i], k); a = attention(q, keys); copy_(cache, keys)
    after:   a = part0(q, k, i, cache)[1]
"""

import copy
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, starmap
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.utils import _pytree as pytree

from tvm_fusion.errors import FrontendError
from tvm_fusion.frontends.finish import first_line
from tvm_fusion.frontends.torch.complex.pairs import JOINTS
from tvm_fusion.frontends.torch.convention import viewing
from tvm_fusion.frontends.torch.graphs import is_size
from tvm_fusion.frontends.torch.importer import Importer, refuse_random
from tvm_fusion.frontends.torch.model import CONVERTERS
from tvm_fusion.frontends.torch.refusals import NO_CONVERTER, Refused
from tvm_fusion.torch_backend.collectives import (
    is_of_processes,
    may_write,
    reduce_in_place,
    root,
    wait_late,
)
from tvm_fusion.torch_backend.layouts import memory_order

_aten = torch.ops.aten

_scan = torch.ops.higher_order.scan
ONE_BY_ONE = (torch.ops.higher_order.cond, torch.ops.higher_order.while_loop)
"""Operators that call graphs as values decide: torch does that, and each graph is compiled."""

PREFIX = "part"
NAME = "tvm_fusion_name"  # of a node in the whole graph, in `meta`
_AFTER = "tvm_fusion_after"

# Operators that move or make values and compute none: parts of those alone do not pay.
_MOVES = frozenset(
    getattr(_aten, packet)
    for packet in (
        "_to_copy", "arange", "clone", "copy", "detach", "empty", "full", "lift_fresh_copy",
        "ones", "scalar_tensor", "zeros",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Partition:
    """A graph in parts.

    Attributes
    ----------
    graph : fx.GraphModule
        Calls the parts, which are submodules, and what runs in torch.
    parts : tuple of fx.Node
        Calls of the submodules. Each takes tensors and sizes and returns a tuple of tensors.
    written : frozenset of str
        Inputs of the graph that are written to, by name.
    updates : tuple of tuple of (int, int)
        Of each part, the inputs that it is to write to, and the results that are their new values.
    outside : tuple of Refused
        The operators that are not compiled, and why.
    count : int
        Operators of the graph, without views, sizes and parts of results.
    """

    graph: fx.GraphModule
    parts: tuple[fx.Node, ...]
    written: frozenset[str]
    updates: tuple[tuple[tuple[int, int], ...], ...]
    outside: tuple[Refused, ...]
    count: int


def partitioned(graph: fx.GraphModule, refused: Mapping[str, str]) -> Partition:
    """Cut a graph.

    Parameters
    ----------
    graph : fx.GraphModule
        Of AOTAutograd; it is left as it is.
    refused : mapping of str to str
        Nodes that are known not to be converted, by name, and why.
    """
    whole = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for node in whole.graph.nodes:
        node.meta[NAME] = node.name
        if node.op == "get_attr" and "val" not in node.meta:
            node.meta["val"] = operator.attrgetter(node.target)(whole)
    shared = _shared(whole.graph)
    writes = _take_off_writes(whole.graph)
    _read_sizes_off_inputs(whole.graph)
    support = _Support(refused)
    outside = [Refused(node, why) for node in whole.graph.nodes if (why := support.why(node))]
    count = sum(map(is_operator, whole.graph.nodes))
    _repeat_views_outside(whole.graph, support, shared)
    _keep_order(whole.graph, support)
    partitioner = CapabilityBasedPartitioner(whole, support, allows_single_node_partition=True)
    proposed = [p for p in partitioner.propose_partitions() if any(map(_computes, p.nodes))]
    partitioner.fuse_partitions(proposed, prefix=PREFIX)
    _forget_order(whole.graph)
    _put_back_writes(whole.graph, writes)
    parts = [node for node in whole.graph.nodes if node.op == "call_module"]
    place = {node.name: i for i, node in enumerate(graph.graph.nodes)}
    for part in parts:
        _put_in_order(whole.get_submodule(part.target), place)
        _return_tuple(part, whole.get_submodule(part.target))
    written = _written(whole.graph)
    updates = tuple(_take_over_writes(part, whole.get_submodule(part.target)) for part in parts)
    _write_at_once(whole.graph)
    wait_late(whole.graph, {part for part, written in zip(parts, updates, strict=True) if written})
    for part in parts:
        reduce_in_place(part, whole.get_submodule(part.target))
    whole.recompile()
    return Partition(whole, tuple(parts), written, updates, tuple(outside), count)


class _Support(OperatorSupportBase):
    """Which nodes can be compiled.

    Attributes
    ----------
    refused : mapping of str to str
    apart : set of fx.Node
        Those that are to stay in torch though they could be.
    """

    def __init__(self, refused: Mapping[str, str]) -> None:
        self.refused, self.apart = refused, set[fx.Node]()
        self._known: dict[fx.Node, bool] = {}

    def is_node_supported(self, submodules: Mapping[str, Any], node: fx.Node) -> bool:
        if is_graph(node):  # goes where it is called
            return all(map(self, node.users))
        if node.op != "call_function" or is_size(node) or node in self.apart:
            return False
        if node.target in JOINTS or node.target in ONE_BY_ONE or _is_of_numbers(node):
            return False
        if node.target is operator.getitem:
            return self.is_node_supported(submodules, node.args[0])
        if node not in self._known:
            self._known[node] = not is_of_processes(node) and self.why(node) is None
        return self._known[node]

    def __call__(self, node: fx.Node) -> bool:
        return self.is_node_supported({}, node)

    def why(self, node: fx.Node) -> str | None:
        """Why an operator cannot be compiled, where that is worth a word."""
        if node.op != "call_function" or is_size(node) or is_of_processes(node):
            return None
        if node.target is operator.getitem or node.target in JOINTS or _is_of_numbers(node):
            return None
        if node.target in ONE_BY_ONE:
            return None
        if node.name in self.refused:
            return self.refused[node.name]
        if node.target is _scan:
            return self._why_no_loop(node)
        if not isinstance(node.target, torch._ops.OpOverload):
            return NO_CONVERTER
        if node.target._schema.is_mutable:
            return "it writes into a tensor"
        try:
            refuse_random(node)
            _refuse_values(node)
        except FrontendError as error:
            return first_line(error)
        return None if node.target.__name__ in _converted() else NO_CONVERTER

    def _why_no_loop(self, node: fx.Node) -> str | None:
        """Why a scan cannot be compiled."""
        try:
            _refuse_values(node)
        except FrontendError as error:
            return first_line(error)
        if node.kwargs.get("mutated_arg_indices"):
            return "its steps write into what they are given"
        for given in filter(is_graph, node.all_input_nodes):
            for inner in operator.attrgetter(given.target)(given.graph.owning_module).graph.nodes:
                why = NO_CONVERTER if inner.target in ONE_BY_ONE else self.why(inner)
                if why is not None:
                    return f"a step of it has {inner.target}: {why}"
        return None


@cache
def _converted() -> frozenset[str]:
    """The names of operators that have a converter."""
    return frozenset(Importer(CONVERTERS).convert_map)


def _refuse_values(node: fx.Node) -> None:
    """Raise FrontendError for tensors that are none of TVM's, or whose sizes depend on values."""
    values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    given = values[0]
    if any(free_unbacked_symbols(v) for v in pytree.tree_leaves(given) if _is_tensor(v)):
        raise FrontendError("the size of its result depends on values; use torch.where instead")
    for value in pytree.tree_leaves(values):
        if _is_tensor(value):
            if value.layout is not torch.strided:
                raise FrontendError(
                    f"a tensor has the layout {value.layout}; make it dense (to_dense)"
                )
            Importer._convert_data_type(value.dtype)
        elif isinstance(value, torch.SymFloat | torch.SymBool):
            raise FrontendError("it takes a number that no tensor has as its size")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def is_graph(node: fx.Node) -> bool:
    """Whether a node is a graph that an operator calls."""
    return node.op == "get_attr" and isinstance(node.meta.get("val"), fx.GraphModule)


def is_operator(node: fx.Node) -> bool:
    """Whether a node is counted: no view, no size and no part of a result."""
    is_call = node.op == "call_function" and node.target is not operator.getitem
    is_number = is_size(node) or _is_of_numbers(node)
    return is_call and not is_number and viewing(node) is None


def _is_of_numbers(node: fx.Node) -> bool:
    """Whether a node compares numbers that are no tensors, or checks one: what Dynamo asks of sizes
    that depend on values.
    """
    target = node.target
    is_own = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    is_own |= getattr(target, "__module__", None) in ("_operator", "math", "torch")
    values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    return is_own and not any(map(_is_tensor, pytree.tree_leaves(values)))


def _computes(node: fx.Node) -> bool:
    """Whether a node that can be compiled does more than move values."""
    return is_operator(node) and getattr(node.target, "overloadpacket", None) not in _MOVES


# ---- Inputs that are written to: at the very end, whatever the order of the rest.


def _take_off_writes(graph: fx.Graph) -> list[str]:
    """Make what is written into inputs results of the graph; returns the names of the inputs."""
    inputs, values = [], []
    for node in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        written, value = node.args[:2]
        returned = all(user.op == "output" for user in node.users)
        if written.op == "placeholder" and returned and isinstance(value, fx.Node):
            node.replace_all_uses_with(written)
            inputs.append(written.name)
            values.append(value)
            graph.erase_node(node)
    output = graph.output_node()
    output.args = ((*output.args[0], *values),)
    return inputs


def _put_back_writes(graph: fx.Graph, inputs: Sequence[str]) -> None:
    output = graph.output_node()
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    (results,) = output.args
    own = len(results) - len(inputs)
    with graph.inserting_before(output):
        for name, value in zip(inputs, results[own:], strict=True):
            graph.call_function(_aten.copy_.default, (placeholders[name], value))
    output.args = (tuple(results[:own]),)


def _take_over_writes(call: fx.Node, part: fx.GraphModule) -> tuple[tuple[int, int], ...]:
    """Leave to a part what it alone reads and writes; see `Partition.updates`."""
    (results,) = part.graph.output_node().args
    found = []
    for given in [user for user in call.users if user.target is operator.getitem]:
        number, users = given.args[1], list(given.users)
        if len(users) != 1 or users[0].target is not _aten.copy_.default:
            continue
        copy_ = users[0]
        written = copy_.args[0]
        readers = {user for user in written.users if not is_size(user)}
        if readers == {call, copy_} and _replaces(results[number], written):
            found.append((call.args.index(written), number))
            call.graph.erase_node(copy_)
    return tuple(found)


def _replaces(value: fx.Node, written: fx.Node) -> bool:
    """Whether what a part computes is a value for each element of an input."""
    new, old = value.meta["val"], written.meta["val"]
    if written.op != "placeholder" or root(value).op == "placeholder":
        return False
    if not all(isinstance(n, int) for n in (*old.shape, *new.shape)):
        return False
    return (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device)


def _write_at_once(graph: fx.Graph) -> None:
    """Make one call of the writes at the end, which is one launch on a GPU: the counters of all
    layers of a cache. What is written from inputs stays apart: they may be written to, too; and so
    does what is read afterwards.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    writes = [
        node
        for node in graph.find_nodes(op="call_function", target=_aten.copy_.default)
        if not node.users
        and node.args[0].op == "placeholder"
        and len(node.args) == 2
        and root(node.args[1]).op != "placeholder"
        and all(place[user] <= place[node] for user in node.args[0].users)
    ]
    if len(writes) < 2:
        return
    targets, values = zip(*(node.args for node in writes), strict=True)
    with graph.inserting_before(graph.output_node()):
        graph.call_function(_aten._foreach_copy_.default, (list(targets), list(values)))
    for node in writes:
        graph.erase_node(node)


def _written(graph: fx.Graph) -> frozenset[str]:
    """The inputs that something writes into."""
    found = set()
    for node in graph.nodes:
        if may_write(node):
            found.update(root(n).name for n in node.all_input_nodes)
    return frozenset(found)


# ---- What stays in torch.


def _read_sizes_off_inputs(graph: fx.Graph) -> None:
    """Read sizes of results off inputs that have the same, so that parts need not end for them."""
    known: dict[Any, tuple[fx.Node, int | None]] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            known[value.node.expr] = node, None
    for node in graph.find_nodes(op="placeholder"):
        for axis, extent in enumerate(getattr(node.meta.get("val"), "shape", ())):
            if isinstance(extent, torch.SymInt):
                known.setdefault(extent.node.expr, (node, axis))
    for node in graph.find_nodes(op="call_function", target=_aten.sym_size.int):
        expression = node.meta["val"].node.expr if is_size(node) else None
        if expression not in known or node.args[0].op == "placeholder":
            continue
        source, axis = known[expression]
        if axis is None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        else:
            node.args = (source, axis)
            graph.find_nodes(op="placeholder")[-1].append(node)


def _shared(graph: fx.Graph) -> set[fx.Node]:
    """What several results are views of that have elements in common: what is written to one of
    them is to be seen in the others.
    """
    (results,) = graph.output_node().args
    views: dict[fx.Node, list[fx.Node]] = {}
    for node in dict.fromkeys(n for n in results if isinstance(n, fx.Node)):
        if viewing(node) is not None:
            views.setdefault(root(node), []).append(node)
    return {
        whole
        for whole, made in views.items()
        if any(starmap(_may_overlap, combinations([n.meta.get("val") for n in made], 2)))
    }


def _may_overlap(a: Any, b: Any) -> bool:
    """Whether two views of a tensor may have elements in common."""
    if not _is_tensor(a) or not _is_tensor(b):
        return False
    ranges = []
    for x in (a, b):
        known = [*x.shape, *x.stride(), x.storage_offset()]
        if not all(isinstance(n, int) for n in known):
            return True
        steps = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        first, size = x.storage_offset(), x.element_size()
        ranges.append((first * size, (first + steps + 1) * size, x.numel() > 0))
    (first, end, some), (other, other_end, others) = ranges
    return some and others and first < other_end and other < end


def _repeat_views_outside(graph: fx.Graph, support: _Support, shared: set[fx.Node]) -> None:
    """Have views made by torch where it reads them, if that is free: views of what parts do not
    make, or return anyhow. Views with gaps in memory have to be, and those of what is `shared`.
    """
    for node in reversed(list(graph.nodes)):
        if viewing(node) is None or not support(node):
            continue
        readers = [user for user in node.users if not support(user)]
        whole = root(node)
        free = not support(whole) or whole in shared or not all(map(support, whole.users))
        if readers and (free or _has_gaps(node.meta.get("val"))):
            with graph.inserting_after(node):
                twin = graph.node_copy(node, lambda n: n)
            support.apart.add(twin)
            for reader in readers:
                reader.replace_input_with(node, twin)
            if not node.users:
                graph.erase_node(node)


def _has_gaps(value: Any) -> bool:
    """Whether a tensor's elements do not lie side by side."""
    return isinstance(value, torch.Tensor) and memory_order(value) is None


def _keep_order(graph: fx.Graph, support: _Support) -> None:
    """Chain the operators whose order counts, as if each read what the one before gives."""
    last = None
    for node in graph.nodes:
        if node.op != "call_function" or support(node) or not _has_order(node):
            continue
        if last is not None:
            node.kwargs = {**node.kwargs, _AFTER: last}
        last = node


def _has_order(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    random = torch.Tag.nondeterministic_seeded in node.target.tags
    return random or node.target._schema.is_mutable or is_of_processes(node) or node.is_impure()


def _forget_order(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if _AFTER in node.kwargs:
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != _AFTER}


def _put_in_order(part: fx.GraphModule, place: Mapping[str, int]) -> None:
    """Have the operators of a part in the order of the graph that they come from. torch 2.11 has
    them by depth, so that the layers of a model with a cache lie in one another: the counters of
    all layers, then the casts of all. Nothing finds equal layers in that order.
    """
    last = part.graph.output_node()
    calls = [n for n in part.graph.nodes if n is not last and n.op != "placeholder"]
    for node in sorted(calls, key=lambda node: place[node.meta[NAME]]):
        last.prepend(node)


def _return_tuple(call: fx.Node, part: fx.GraphModule) -> None:
    """Have a part return a tuple, if it returns a tensor."""
    output = part.graph.output_node()
    (results,) = output.args
    if isinstance(results, tuple | list):
        output.args = (tuple(results),)
    else:
        output.args = ((results,),)
        with call.graph.inserting_after(call):
            first = call.graph.call_function(operator.getitem, (call, 0))
        first.meta = dict(call.meta)
        call.replace_all_uses_with(first, delete_user_cb=lambda user: user is not first)
    part.recompile()
