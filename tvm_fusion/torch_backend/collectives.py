"""Operators that talk to other processes: torch's, each asked for once, without a copy of what a
part gives, and awaited late.

    before:  a = wait(gather(x)); b = linear(a, v); c = wait(gather(x)); d = linear(c, w)
    after:   a = wait(gather(x)); b = linear(a, v); d = linear(a, w)

    before:  a = reduce(part0(x)); b = wait(a); c = part1(y); d = part2(b, c)
    after:   a = reduce_(part0(x)); c = part1(y); b = wait(a); d = part2(b, c)

All processes that take part run the same operators in the same order: what is done here depends on
the graph alone, and is done before anything that may fail on one of them.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tvm_fusion.config.links import Link
from tvm_fusion.frontends.torch.convention import viewing

_NAMESPACES = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor")
_WAIT = "wait_tensor"
_REDUCE = "_c10d_functional.all_reduce.default"
# Those whose result depends on the inputs of all processes alone. A message that is sent twice is
# received twice.
_REPEATABLE = frozenset(
    {
        _WAIT,
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all_single",
        "broadcast",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
    }
)


@dataclass(frozen=True, slots=True)
class Collective:
    """One operator that talks to other processes.

    Attributes
    ----------
    name : str
        Its own in the graph.
    operator : str
        Of torch, such as "_c10d_functional.all_reduce.default".
    bytes : int or None
        The larger of what a process gives and what it gets; None for symbolic sizes.
    beside : tuple of str
        The parts that run between its start and the first wait for it.
    ranks : int or None
        The processes that take part; None where their group is not known here.
    """

    name: str
    operator: str
    bytes: int | None
    beside: tuple[str, ...]
    ranks: int | None = None

    def predicted_us(self, link: Link | None) -> float | None:
        """How long it takes over a link; None where that is not known."""
        if link is None or self.bytes is None or self.ranks is None:
            return None
        return link.ring_us(self.operator.split(".")[1], self.bytes, self.ranks)


def is_of_processes(node: fx.Node) -> bool:
    """Whether an operator talks to other processes, or waits for one that does."""
    return getattr(node.target, "namespace", "") in _NAMESPACES


def is_wait(node: fx.Node) -> bool:
    """Whether an operator waits for a collective."""
    return is_of_processes(node) and _name(node) == _WAIT


def may_write(node: fx.Node) -> bool:
    """Whether an operator may write into its inputs."""
    schema = getattr(node.target, "_schema", None)
    opaque = isinstance(node.target, torch._ops.HigherOrderOperator)
    return node.op == "call_function" and (opaque or (schema is not None and schema.is_mutable))


def root(node: fx.Node) -> fx.Node:
    """What a node is a view of, through all views; itself where it is none."""
    while viewing(node) is not None:
        node = node.args[0]
    return node


def merge_repeated(module: fx.GraphModule) -> None:
    """Ask other processes once for what is asked for again, such as a sequence that two linear
    layers gather. What the graph returns is left: two results share no memory.
    """
    graph = module.graph
    (results,) = graph.output_node().args
    returned = {root(node) for node in pytree.tree_leaves(results) if isinstance(node, fx.Node)}
    known: dict[str, fx.Node] = {}
    count = len(graph.nodes)
    for node in list(graph.nodes):
        if not is_of_processes(node) or _name(node) not in _REPEATABLE:
            continue
        key = repr((node.target, node.args, node.kwargs))  # names of nodes are theirs alone
        first = known.setdefault(key, node)
        if first is not node and not returned & {first, node, *_waits_of(first), *_waits_of(node)}:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
    if len(graph.nodes) < count:
        module.recompile()


def wait_late(graph: fx.Graph, writers: Collection[fx.Node]) -> None:
    """Have each wait stand in front of what reads it first, or writes: what is written to may be
    what is being sent.
    """
    nodes = list(graph.nodes)
    for node in filter(is_wait, reversed(nodes)):
        behind = nodes[nodes.index(node) + 1 :]
        ends = (n for n in behind if n in node.users or n in writers or may_write(n))
        next(ends, graph.output_node()).prepend(node)


def reduce_in_place(call: fx.Node, part: fx.GraphModule) -> None:
    """Sum up what a part gives where it lies, if nobody else has to do with that memory: torch's
    own sum copies it first.
    """
    (results,) = part.graph.output_node().args
    bases = [root(result) for result in results]
    for given in [user for user in call.users if user.target is operator.getitem]:
        base, users = bases[given.args[1]], list(given.users)
        is_alone = bases.count(base) == 1 and _makes_memory(base)
        if not is_alone or len(users) != 1 or str(users[0].target) != _REDUCE:
            continue
        if given.meta["val"].is_contiguous():
            users[0].target = torch.ops._c10d_functional.all_reduce_.default


def _makes_memory(node: fx.Node) -> bool:
    """Whether what an operator that is no view gives never lies in its operands' memory: what is
    composed of others may return what it is given.
    """
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    name, key = node.target.name(), "CompositeImplicitAutograd"
    is_product = node.target.overloadpacket in (torch.ops.aten.linear, torch.ops.aten.matmul)
    return is_product or not torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def awaited(value: Any) -> Any:
    """What a collective gives, when it is there."""
    return pytree.tree_map_only(torch.Tensor, torch.ops._c10d_functional.wait_tensor, value)


def collectives(graph: fx.Graph, is_part: Callable[[fx.Node], bool]) -> tuple[Collective, ...]:
    """The collectives of a graph in parts, in their order."""
    nodes = list(graph.nodes)
    found = []
    for number, node in enumerate(nodes):
        if not is_of_processes(node) or is_wait(node):
            continue
        ends = [nodes.index(wait) for wait in _waits_of(node)]
        between = nodes[number : min(ends, default=number)]
        beside = tuple(str(other.target) for other in between if is_part(other))
        found.append(Collective(node.name, str(node.target), _bytes(node), beside, _ranks(node)))
    return tuple(found)


def _name(node: fx.Node) -> str:
    return node.target.overloadpacket.__name__


def _waits_of(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if is_wait(user)]


def _ranks(node: fx.Node) -> int | None:
    """The size of the group that an operator names last."""
    name = node.args[-1] if node.args else None
    try:
        return torch._C._distributed_c10d._resolve_process_group(name).size()
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


def _bytes(node: fx.Node) -> int | None:
    """What is given and what comes back, the larger of the two."""
    given = [n.meta.get("val") for n in node.all_input_nodes]
    sizes = map(_size, (given, node.meta.get("val")))
    return max((size for size in sizes if size is not None), default=None)


def _size(values: Any) -> int | None:
    tensors = [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]
    shapes: Sequence[torch.Size] = [x.shape for x in tensors]
    if not all(isinstance(extent, int) for shape in shapes for extent in shape):
        return None
    return sum(prod(x.shape) * x.element_size() for x in tensors)
