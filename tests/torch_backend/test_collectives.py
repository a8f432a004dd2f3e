"""Collectives in a graph: asked for once, awaited late, and told of."""

import operator

import pytest
import torch
from torch import fx, nn

from tvm_fusion.torch_backend.collectives import (
    collectives,
    merge_repeated,
    reduce_in_place,
    wait_late,
)

_functional = torch.ops._c10d_functional
GATHER, WAIT = _functional.all_gather_into_tensor.default, _functional.wait_tensor.default
SEND = _functional.all_reduce.default


def gathered(graph, x, group="0"):
    return graph.call_function(WAIT, (graph.call_function(GATHER, (x, 2, group)),))


def module_of(graph):
    return fx.GraphModule({}, graph)


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_what_is_gathered_twice_is_gathered_once():
    graph = fx.Graph()
    x = graph.placeholder("x")
    one, two = gathered(graph, x), gathered(graph, x)
    graph.output((graph.call_function(torch.add, (one, two)),))
    merge_repeated(module_of(graph))
    assert targets(graph) == [GATHER, WAIT, torch.add]
    assert next(n for n in graph.nodes if n.target is torch.add).args == (one, one)


def test_other_groups_and_what_is_returned_are_asked_for_by_themselves():
    graph = fx.Graph()
    x = graph.placeholder("x")
    one, two, three = gathered(graph, x), gathered(graph, x, "1"), gathered(graph, x)
    view = graph.call_function(torch.ops.aten.view.default, (three, [-1]))
    graph.output((graph.call_function(torch.add, (one, two)), view))
    merge_repeated(module_of(graph))
    assert targets(graph).count(GATHER) == 3


def test_a_part_that_needs_no_result_runs_beside_a_collective():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    sent = graph.call_function(SEND, (x, "sum", "0"))
    sent.meta["val"] = x.meta["val"] = torch.empty(4, 8, dtype=torch.float16)
    wait = graph.call_function(WAIT, (sent,))
    beside = graph.call_function(operator.neg, (y,))
    behind = graph.call_function(operator.add, (wait, beside))
    graph.output((behind,))
    wait_late(graph, ())
    assert targets(graph) == [SEND, operator.neg, WAIT, operator.add]
    (found,) = collectives(graph, lambda node: node.target is operator.neg)
    assert (found.name, found.bytes, len(found.beside)) == (sent.name, 64, 1)


def test_a_wait_stays_in_front_of_what_may_write_into_what_is_sent():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    wait = graph.call_function(WAIT, (graph.call_function(SEND, (x, "sum", "0")),))
    part = graph.call_function(operator.neg, (y,))
    graph.call_function(torch.ops.aten.copy_.default, (x, part))
    graph.output((wait,))
    wait_late(graph, {part})  # in place
    assert targets(graph)[:3] == [SEND, WAIT, operator.neg]
    wait_late(graph, ())
    assert targets(graph)[:3] == [SEND, operator.neg, WAIT]


def summed(part, reducers=1):
    """A graph that sums up the first result of a part; returns the targets of the sums."""
    x, whole = torch.empty(4, 8), fx.Graph()
    root = nn.Module()
    root.part = fx.GraphModule({}, part)
    given = whole.placeholder("x")
    call = whole.call_module("part", (given,))
    results = [whole.call_function(operator.getitem, (call, i)) for i in range(2)]
    for result in results:
        result.meta["val"] = x
    sent = [whole.call_function(SEND, (results[0], "sum", "0")) for _ in range(reducers)]
    whole.output((*(whole.call_function(WAIT, (node,)) for node in sent), results[1]))
    reduce_in_place(call, root.part)
    return [node.target for node in sent]


def part_of(first, second):
    part = fx.Graph()
    x = part.placeholder("x")
    made = part.call_function(first, (x,))
    part.output((made, part.call_function(*second(x, made))))
    return part


aten = torch.ops.aten
IN_PLACE = _functional.all_reduce_.default


@pytest.mark.parametrize(
    ("first", "second", "target"),
    [
        (aten.sin.default, lambda x, made: (aten.cos.default, (x,)), IN_PLACE),
        (aten.sin.default, lambda x, made: (aten.view.default, (made, [-1])), SEND),
        (aten.t.default, lambda x, made: (aten.cos.default, (x,)), SEND),
        (aten.dropout.default, lambda x, made: (aten.cos.default, (x,)), SEND),
    ],
)
def test_what_a_part_alone_gives_is_summed_up_where_it_lies(first, second, target):
    assert summed(part_of(first, second)) == [target]


def test_what_is_read_twice_is_copied_and_summed_up():
    part = part_of(aten.sin.default, lambda x, made: (aten.cos.default, (x,)))
    assert summed(part, reducers=2) == [SEND, SEND]
