"""Norms with and without parameters."""

import pytest
import torch
import torch.nn.functional as F

import tvm_fusion
from tvm_fusion.config import load_profile
from tvm_fusion.frontends import load
from tvm_fusion.ir.graph import build_graph
from tvm_fusion.transform.pipeline import lower

from ..support.frontend_tools import Function

H200 = load_profile("nvidia_h200")

# with how many vectors of parameters that are read
NORMS = {
    "layer": (lambda x: F.layer_norm(x, (24,)), 0),
    "layer, with its unread moments": (
        lambda x: torch.native_layer_norm(x, (24,), None, None, 1e-5)[0],
        0,
    ),
    "layer, scaled": (lambda x: F.layer_norm(x, (24,), torch.arange(24.0)), 1),
    "layer, shifted": (lambda x: F.layer_norm(x, (8, 24), None, torch.ones(8, 24)), 1),
    "group": (lambda x: F.group_norm(x, 4), 0),
    "group, shifted": (lambda x: F.group_norm(x, 4, None, torch.arange(8.0)), 1),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("norm", "vectors"), NORMS.values(), ids=NORMS)
def test_a_norm_reads_the_parameters_that_it_has(norm, vectors):
    x = torch.randn(6, 8, 24, generator=torch.Generator().manual_seed(2))
    program = (Function(norm), (x,))
    graph = build_graph(lower(load(program), H200.to_target(), hw=H200))
    read = {t for op in graph.ops for t in op.inputs if graph.tensors[t].is_constant}
    assert len(read) == vectors
    torch.testing.assert_close(tvm_fusion.compile(program, "llvm")(x), norm(x))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_layer_norm_of_halves_takes_parameters_in_float32(dtype):
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(2)).to(dtype)
    weight, shift = torch.linspace(-1, 1, 24), torch.linspace(0, 2, 24)

    def norm(x):
        return F.layer_norm(x, (24,), weight, shift), F.layer_norm(x, (24,), None, shift)

    given = tvm_fusion.compile((Function(norm), (x,)), "llvm", verify=False)(x)
    torch.testing.assert_close(given, norm(x), rtol=1e-2, atol=1e-2)
