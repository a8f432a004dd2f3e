"""Programs of every family whose sizes have bounds or are multiples: right at the ends of these."""

import pytest
import torch
from torch.export import Dim
from torch.nn import functional as F

from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.errors import Unsupported
from tvm_fusion.flow.planned import Planned
from tvm_fusion.frontends import load
from tvm_fusion.ir.extents import Bounds, known_sizes
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.skinny.kernel import emit_gemm_skinny
from tvm_fusion.transform.apply.materialize import materialize

from ..support.module_on_cpu import EmulatedModule

GPU, H200 = resolve_target("nvidia_h200")
POLICY = load_policy(None)


class Program(torch.nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.compute = forward

    def forward(self, *inputs):
        return self.compute(*inputs)


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def attention_with_bias(q, k, v, bias):
    return F.scaled_dot_product_attention(q, k, v, bias)


# The program, and the shape of each input; "n" is the symbolic size.
PROGRAMS = {
    "rows": (lambda x, w: F.rms_norm(x, (192,), w), ("n", 192), (192,)),
    "columns of rows": (lambda x: torch.softmax(x, -1), (9, "n")),
    "rows of product": (lambda x, w: F.gelu(x @ w), ("n", 64), (64, 96)),
    "columns of product": (lambda x, w: F.relu(x @ w), (40, 64), (64, "n")),
    "last row of product": (lambda x, w: x[-1:] @ w, ("n", 512), (512, 256)),
    "product by the last matrix": (lambda x, w: x @ w[-1], (2, 96), ("n", 96, 50)),
    "terms of product": (lambda x, w: F.relu(x @ w), (40, "n"), ("n", 64)),
    "attention": (attention, *[(1, 2, "n", 64)] * 3),
    "attention with a bias": (attention_with_bias, *[(1, 2, "n", 64)] * 3, (1, 2, "n", "n")),
    "keys of one query": (attention, (1, 2, 1, 64), *[(1, 2, "n", 64)] * 2),
    "sums of columns": (lambda x: x.exp().mean(0), ("n", 96)),
    "pointwise": (lambda x, y: F.silu(x) * y, (5, "n"), (5, "n")),
    "transposed": (lambda x, y: x.t().contiguous() + y, (24, "n"), ("n", 24)),
    "scan": (lambda x: x.relu().cumsum(-1), ("n", 40)),
    "convolution": (lambda x, w: F.relu(F.conv2d(x, w, padding=1)), ("n", 8, 5, 6), (8, 8, 3, 3)),
    "convolution of a line": (lambda x, w: F.conv1d(x, w, padding=1), (1, 8, "n"), (16, 8, 3)),
    "pool": (lambda x: F.max_pool2d(x, 3, 2, 1), ("n", 4, 7, 6)),
    "pool of a line": (lambda x: F.avg_pool1d(x, 3, 1, 1), (2, 4, "n")),
}
IN_CI = ("rows", "columns of rows", "terms of product", "attention with a bias", "scan", "pool")
CASES = [n if n in IN_CI else pytest.param(n, marks=pytest.mark.nightly) for n in PROGRAMS]


def inputs_of(shapes, n):
    torch.manual_seed(n)
    return [torch.randn([n if e == "n" else e for e in shape]).half() for shape in shapes]


def planned_of(name, dim):
    forward, *shapes = PROGRAMS[name]
    axes = [{i: dim for i, e in enumerate(shape) if e == "n"} for shape in shapes]
    program = torch.export.export(
        Program(forward).eval(), tuple(inputs_of(shapes, 16)), dynamic_shapes=((*axes,),)
    )
    return Planned.of(load(program), GPU, H200, POLICY)


def sizes_known(planned):
    found = materialize(planned.low, planned.graph, planned.plan)
    return {bounds for name in found.groups for bounds in known_sizes(found.mod[name]).values()}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", CASES)
def test_sizes_up_to_a_bound_are_right(name):
    planned = planned_of(name, Dim("n", max=50))
    assert Bounds(0, 50) in sizes_known(planned)
    check(planned, name, (1, 7, 16, 49, 50))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", CASES)
def test_multiples_are_right(name):
    planned = planned_of(name, Dim("s", max=9) * 8)
    assert Bounds(0, 72, 8) in sizes_known(planned)
    check(planned, name, (8, 64, 72))


def check(planned, name, sizes):
    forward, *shapes = PROGRAMS[name]
    emulated = EmulatedModule.of(planned)
    assert not emulated.cuts
    for n in sizes:
        inputs = inputs_of(shapes, n)
        (found,) = emulated([x.numpy() for x in inputs])
        wanted = forward(*(x.double() for x in inputs))
        torch.testing.assert_close(torch.tensor(found).double(), wanted, atol=8e-3, rtol=8e-3)


def test_kernels_for_few_rows_count_in_32_bits_where_these_reach_all_that_there_may_be():
    """The last row of so many has the kernel that one row has."""
    planned = planned_of("last row of product", Dim("n", max=50))
    emit_gemm_skinny(contraction_of(planned), H200)
    check(planned, "last row of product", (1, 50))
    for dim in (Dim("n"), Dim("n", max=2**22)):
        with pytest.raises(Unsupported, match="32-bit"):
            emit_gemm_skinny(contraction_of(planned_of("last row of product", dim)), H200)


def test_no_form_fails_on_a_product_of_known_sizes_in_a_symbolic_tensor():
    """That of runs took all sizes for numbers, and TVM's loops stood in for the kernel."""
    check(planned_of("product by the last matrix", Dim("n")), "product by the last matrix", (1, 3))


def contraction_of(planned):
    found = materialize(planned.low, planned.graph, planned.plan)
    (name,) = found.groups
    return analyze_contraction(found.mod[name])
