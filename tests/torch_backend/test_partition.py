"""Graphs of ATen operators in parts."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.utils import fuser_utils

from tvm_fusion.torch_backend.partition import partitioned


def layers(x, counts):
    """Each layer adds its counter, which is raised."""
    raised = []
    for count in counts:
        raised.append(count + 1)
        x = torch.tanh(x * 2) + count
    return x, *raised


def by_depth(nodes):
    """The order that torch 2.11 gives the operators of a part."""
    depth = {}
    for node in nodes:
        depth[node] = 1 + max((depth.get(n, 0) for n in node.all_input_nodes), default=0)
    return sorted(nodes, key=depth.__getitem__)


@pytest.mark.parametrize("sort", [fuser_utils.topo_sort, by_depth])
def test_operators_of_a_part_are_in_the_order_of_the_graph(sort, monkeypatch):
    monkeypatch.setattr(fuser_utils, "topo_sort", sort)
    counts = [torch.full((), n) for n in range(3)]
    graph = make_fx(layers, tracing_mode="fake")(torch.ones(4), counts)
    (call,) = partitioned(graph, {}).parts
    part = call.graph.owning_module.get_submodule(call.target)
    names = [[n.name for n in g.graph.nodes if n.op == "call_function"] for g in (graph, part)]
    assert names[0] == names[1]
    x, counts = torch.rand(4), [torch.tensor(n) for n in (3, 1, 2)]
    given = call.graph.owning_module.forward(x, counts)
    torch.testing.assert_close(tuple(given), layers(x, counts))
