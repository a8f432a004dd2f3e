"""Reads that do not lie side by side: rows that are made of short runs, and elements that are
picked one in each row. Times are those of kernels measured on an H200.
"""

import dataclasses

import pytest
from tvm.relax import op

from tests.cost.test_analytic import BASE, H200, THREADS, ask, group_of
from tvm_fusion.config import load_policy
from tvm_fusion.cost.analytic import estimate
from tvm_fusion.flow.functions import planned_function
from tvm_fusion.kernels.registry import family
from tvm_fusion.kernels.row.planned import row_shape, row_streams
from tvm_fusion.plan.group_view import GroupView

from ..benchmarks import workloads


def body_us(found):
    """The predicted time without the launch."""
    return found.time_us - found.terms["launch"]


def sum_of_groups(channels, places=4096):
    """Sums over the places and channels of the 32 groups of 32 images: the operator of a group
    normalization that reads x[32, places, 32, channels], float32.
    """

    def emit(bb, x, gamma, beta):
        return op.nn.group_norm(x, gamma, beta, 32, channel_axis=3, axes=[1, 2])

    width = 32 * channels
    shapes = (
        ((32, places // 64, 64, width), "float32"),
        ((width,), "float32"),
        ((width,), "float32"),
    )
    whole = group_of(emit, *shapes)
    block = next(b for b in whole.blocks if b.reduction is not None)
    (number,) = (o.id for o in whole.graph.ops if block.writes[0].tensor in o.outputs)
    group = GroupView(whole.graph, (number,), (block.writes[0].tensor,))
    fit = family("row").accepts(group, H200, load_policy(None))
    _, traffic, _, found = ask(group)
    return row_streams(group, fit), row_shape(group, fit, H200), traffic, found


def test_short_runs_are_narrow_and_take_what_they_were_measured_to():
    reads, shape, traffic, found = sum_of_groups(10)
    assert [s.run for s in reads if not s.stored] == [10]
    assert shape.width == 2
    assert traffic.sector_bytes > 1.3 * 32 * 4096 * 320 * 4
    assert body_us(found) == pytest.approx(63.1, rel=0.15)


def test_runs_of_whole_lines_take_as_long_as_their_bytes():
    reads, shape, traffic, found = sum_of_groups(32)
    assert [s.run for s in reads if not s.stored] == [32]
    assert shape.width == 4
    size = 32 * 4096 * 32 * 32 * 4
    assert traffic.sector_bytes == pytest.approx(size, rel=0.01)
    assert traffic.wavefronts == pytest.approx(size / 128, rel=0.01)
    assert body_us(found) < 1.1 * found.terms["hbm"]


def test_a_block_that_picks_one_element_in_each_row_waits_for_as_many_lines():
    """A kernel of one block that does so took about 10 us; the sum of as many neighbours 1.2 us."""

    def picked(bb, x, labels):
        return op.nn.nll_loss(x, labels, reduction="sum")

    group = group_of(picked, ((4096, 32000), "float16"), ((4096,), "int64"))
    name, traffic, _, found = ask(group)
    assert name == "row"
    assert traffic.wavefronts > 2 * 4096
    assert 5.0 < body_us(found) < 14.0
    near = ask(group_of(lambda bb, x: op.sum(x), ((4096,), "float16")))[3]
    assert body_us(near) < 2.5


def test_warps_of_a_block_that_loads_in_many_rounds_get_out_of_step():
    """The terms of a single wave of blocks overlap more where its threads loop for long."""

    def beyond_the_largest(rounds, exchanges):
        changed = dataclasses.replace(BASE, blocks=132.0, rounds=rounds, exchanges=exchanges)
        found = estimate(changed, THREADS, H200)
        own = {"launch", "gap", "tail", "spill", "code"}
        rest = sum(found.terms.get(name, 0.0) for name in own)
        largest = max(t for name, t in found.terms.items() if name not in own)
        return (found.time_us - rest) / largest

    looped, stopped = beyond_the_largest(100.0, 0.0), beyond_the_largest(100.0, 99.0)
    assert looped < 0.9 * stopped


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "classes", "picks"),
    [("groupnorm_silu_nhwc", ["column"], None), ("cross_entropy", ["row", "row"], 0)],
)
def test_plans_that_were_measured_to_be_the_faster_ones(name, classes, picks):
    """One launch took 65.5 us, row + pointwise 113.6; the pick in the rows 66.5 us, behind 75.8."""
    made = workloads.make(name, "cpu", "float16")
    plan = planned_function((made.module, made.inputs), "nvidia_h200").plan
    groups = [g for g in plan.groups if g.kernel_class != "view"]
    assert [g.kernel_class for g in groups] == classes
    if picks is not None:
        assert any("gathered" in op for op in groups[picks].ops)
