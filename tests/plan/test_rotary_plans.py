"""Rotary embeddings join the launch of the matrix products in front of them."""

import dataclasses

import pytest
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.frontends import load
from tvm_fusion.ir.graph import build_graph
from tvm_fusion.kernels.gemm.kernel_class import Gemm
from tvm_fusion.plan.group_view import GroupView
from tvm_fusion.plan.refusal import Refusal, RefusalCode
from tvm_fusion.plan.search.search import search
from tvm_fusion.transform.pipeline import lower

from ..support.gemm_cases import HALF
from ..support.graphs import module, plan_of
from ..support.rotary_cases import WAYS, rotary_case


def planned(case, device="nvidia_h200", **more):
    return plan_of(module(case.emit, *case.inputs), device, **more)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
def test_products_with_embeddings_are_one_launch(way):
    case = rotary_case(way, 128, (8, 2), (2,), rows=(2, 1024), k=1024)
    assert planned(case).launches == 1


@pytest.mark.one_in(4)
@pytest.mark.parametrize("device", ["nvidia_h200", "nvidia_a100"])
@pytest.mark.parametrize("rows", [(1, 1), (8, 1), (1, 1024)], ids=str)
def test_at_any_number_of_rows(rows, device):
    case = rotary_case("halves", 128, (8, 2), (2,), rows=rows, k=1024, linear=True, early=True)
    assert planned(case, device).launches == 1


def test_factors_of_rows_come_along():
    case = rotary_case("halves", 128, (8, 2), (2,), rows=(1, 1024), k=1024, statistic=True)
    assert planned(case).launches == 1


def accepted(emit, *shapes, device="nvidia_h200"):
    """What the class says of a whole graph."""
    graph = plan_of(module(emit, *((s, HALF) for s in shapes)), device).graph
    ops = tuple(range(len(graph.ops)))
    outputs = tuple(t.id for t in graph.tensors if t.is_output)
    return Gemm().accepts(GroupView(graph, ops, outputs), load_profile(device), load_policy(None))


def halves(bb, x, w):
    """Both halves of the columns, as outputs."""
    return bb.emit(op.split(bb.emit(op.matmul(x, w)), 2, axis=-1))


def neighbours(bb, x, w):
    """Each column plus the one to its left, but for the first."""
    t = bb.emit(op.matmul(x, w))
    first, rest, left = (
        bb.emit(op.strided_slice(t, [1], [a], [b])) for a, b in ((0, 1), (1, 64), (0, 63))
    )
    return op.concat([first, bb.emit(op.add(rest, left))], axis=-1)


def turned_twice(bb, x, w):
    """Halves swapped, and halves of halves."""
    t = bb.emit(op.matmul(x, w))
    for heads in (1, 2):
        t = bb.emit(op.reshape(t, (64, heads, 64 // heads)))
        a, b = (bb.emit(v) for v in bb.emit(op.split(t, 2, axis=-1)))
        t = bb.emit(op.add(t, bb.emit(op.concat([bb.emit(op.negative(b)), a], axis=-1))))
    return t


@pytest.mark.parametrize("emit", [halves, neighbours, turned_twice])
def test_what_is_no_pair_of_columns_is_refused(emit):
    refusal = accepted(emit, (64, 32), (32, 64))
    assert isinstance(refusal, Refusal)
    assert refusal.code is RefusalCode.SPACE_MISMATCH


# Always: products with embeddings.
@pytest.mark.nightly
def test_a_decoder_block_pairs_its_columns_where_that_is_predicted_to_be_faster():
    """4096 rows of three products of 2048 columns: 159.0 us as one launch on an H200, 136.2 and
    20.1 us as two (2026-11-22), so that the start of the second launch decides.
    """
    pytest.importorskip("torch")
    from ..benchmarks.workloads import make

    made = make("demo_block", "cpu", "float16")
    for started_us, products in ((0.0, 0), (12.0, 3)):
        policy = dataclasses.replace(load_policy(None), launch="stream")
        hw = dataclasses.replace(load_profile("h200"), launch_us=started_us)
        low = lower(load(made.module, made.inputs), hw.to_target(), hw=hw)
        graph = build_graph(low)
        plan = search(graph, hw, policy)
        blocks = {o.name: o.blocks for o in graph.ops}
        joining = {"T_concat", "T_split"}
        found = [[b for o in group.ops for b in blocks[o]] for group in plan.groups]
        holders = [own for own in found if joining & {b.name for b in own}]
        assert len(holders) == 1
        assert sum(b.is_contraction for b in holders[0]) == products
