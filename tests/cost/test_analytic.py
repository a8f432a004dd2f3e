"""The analytic cost model: what raises each term, one formula for one launch and for many, what the
kernel classes say of their launches, and how near the model is to measured kernels.
"""

import dataclasses
import itertools
import json
import math
import statistics
from pathlib import Path

import pytest
from tvm.relax import op

from tests.kernels.row.test_row_config import GRAPHS
from tests.support.counting import calls_of
from tests.support.graphs import module
from tests.support.mixed_cases import rms_norm_backward, rms_norm_inputs
from tvm_fusion.config import load_policy, load_profile, profile_names
from tvm_fusion.cost.analytic import estimate, estimate_many, resident_blocks
from tvm_fusion.cost.liveness import live_values, peak_live
from tvm_fusion.cost.traffic import Resources, Traffic
from tvm_fusion.ir.graph import build_graph
from tvm_fusion.kernels.base import Fit
from tvm_fusion.kernels.group.streams import STORED, streams
from tvm_fusion.kernels.group.traffic import resident_share
from tvm_fusion.kernels.registry import families, family
from tvm_fusion.plan.group_view import GroupView
from tvm_fusion.transform.pipeline import lower

H200 = load_profile("h200")
SWEEP = json.loads((Path(__file__).parents[1] / "data" / "row_sweep_h200.json").read_text())
MB = 1e6
BASE = Traffic(
    64 * MB,
    64 * MB,
    {"arithmetic": 64e6, "special": 16e6, "conversion": 32e6},
    sector_bytes=64 * MB,
    read_bytes=32 * MB,
    wavefronts=5e5,
    smem_bytes=16 * MB,
    exchanges=1.0,
    shuffles=5.0,
    rounds=1.0,
    blocks=8192.0,
    in_flight_bytes=32768.0,
)
THREADS = Resources(32, 1024, 256, 4096)


def group_of(emit, *inputs, hw=H200):
    """All of a graph as one group, as its first class sees it."""
    graph = build_graph(lower(module(emit, *inputs), hw.to_target(), hw=hw))
    ops = tuple(o.id for o in graph.ops)
    return GroupView(graph, ops, tuple(t.id for t in graph.tensors if t.is_output))


def ask(group, hw=H200):
    """Name of the class, traffic, resources and estimate of a group."""
    for kernel in families(hw):
        fit = kernel.accepts(group, hw, load_policy(None))
        if isinstance(fit, Fit):
            traffic, resources = kernel.traffic(group, fit, hw), kernel.resources(group, fit, hw)
            return kernel.name, traffic, resources, estimate(traffic, resources, hw)
    raise AssertionError("no class takes the group")


def terms(hw=H200, resources=THREADS, **changes):
    return estimate(dataclasses.replace(BASE, **changes), resources, hw).terms


# ---- terms

RAISED = {
    "hbm": {"hbm_bytes": 128 * MB},
    "l2": {"sector_bytes": 256 * MB},
    "flight": {"in_flight_bytes": 4096.0},
    "sm": {"sector_bytes": 256 * MB},
    "access": {"wavefronts": 1e6},
    "smem": {"smem_bytes": 64 * MB},
    "arithmetic": {"operations": {"arithmetic": 1e9}},
    "special": {"operations": {"special": 1e9}},
    "integer": {"operations": {"integer": 1e9}},
    "conversion": {"operations": {"conversion": 1e9}},
    "tensor": {"tensor_flops": 1e12},
    "blocks": {"blocks": 1e5},
    "latency": {"exchanges": 8.0},
}


@pytest.mark.parametrize("name", RAISED)
def test_a_term_rises_with_what_it_stands_for_and_the_time_never_falls(name):
    more = dataclasses.replace(BASE, **RAISED[name])
    low, high = (estimate(t, THREADS, H200) for t in (BASE, more))
    assert high.terms[name] > low.terms.get(name, 0.0)
    large = {k: v * 100 for k, v in RAISED[name].items() if isinstance(v, float)}
    if large and name != "flight":
        huge = estimate(dataclasses.replace(BASE, **large), THREADS, H200)
        assert huge.time_us > low.time_us


@pytest.mark.parametrize("field", ["shuffles", "rounds", "exchanges"])
def test_what_a_block_waits_for_is_part_of_its_latency(field):
    assert terms(**{field: 20.0})["latency"] > terms()["latency"]


def test_units_are_microseconds():
    found = terms()
    assert found["hbm"] == pytest.approx(64e6 / H200.hbm_bytes_per_s * 1e6)
    assert found["launch"] == H200.launch_us
    graph = estimate(BASE, THREADS, H200, "graph")
    assert graph.terms["launch"] == H200.graph_launch_us


def test_the_time_is_above_the_largest_term_and_below_their_sum():
    found = estimate(BASE, THREADS, H200)
    own = [t for n, t in found.terms.items() if n != "launch"]
    body = found.time_us - H200.launch_us
    assert max(own) < body < sum(own)


def test_registers_above_the_limit_are_charged_smoothly():
    times = [
        estimate(BASE, Resources(registers, 0, 256), H200).time_us
        for registers in range(240, 280, 4)
    ]
    assert times == sorted(times)
    assert times[-1] > times[0]
    assert max(b / a for a, b in itertools.pairwise(times)) < 1.5
    assert "spill" not in terms(resources=Resources(255, 0, 256))


def test_spills_that_the_probe_found_replace_the_guess():
    guess = terms(resources=Resources(300, 0, 256))["spill"]
    told = Resources(255, 0, 256, spill_bytes=2000)
    assert terms(resources=told)["spill"] > guess
    assert "spill" not in terms(resources=dataclasses.replace(told, spill_bytes=0))


def test_only_code_that_the_cache_does_not_hold_costs():
    cache = H200.instruction_cache_bytes
    assert "code" not in terms(resources=Resources(32, 0, 256, cache))
    once, twice = (
        terms(resources=Resources(32, 0, 256, cache + more))["code"] for more in (4096, 8192)
    )
    assert twice == pytest.approx(2 * once)


def test_blocks_side_by_side_are_limited_by_threads_registers_and_shared_memory():
    assert resident_blocks(256, 32, 0, H200) == 8
    assert resident_blocks(256, 128, 0, H200) == 2
    assert resident_blocks(64, 32, 0, H200) == 32
    assert resident_blocks(64, 32, 100_000, H200) == 2
    assert resident_blocks(1024, 255, 230_000, H200) == 1


def test_few_blocks_leave_multiprocessors_idle():
    few = terms(blocks=8.0)
    assert few["access"] == pytest.approx(terms()["access"] * H200.num_sms / 8, rel=0.1)


def test_a_class_with_a_time_of_its_own_is_charged_the_launch_alone():
    own = dataclasses.replace(BASE, seconds=5e-6, terms={"tensor": 4e-6})
    found = estimate(own, THREADS, H200)
    assert found.time_us == pytest.approx(5.0 + H200.launch_us)
    assert set(found.terms) == {"tensor", "launch"}


# ---- one and many


@pytest.mark.parametrize("device", profile_names())
def test_one_and_many_agree_on_every_device(device):
    hw = load_profile(device)
    launches = [
        (dataclasses.replace(BASE, blocks=blocks, hbm_bytes=size * MB, seconds=own), resources)
        for blocks in (0.0, 1.0, 100.0, 132.0, 1e5)
        for size in (0.01, 1.0, 500.0)
        for own in (None, 3e-6)
        for resources in (THREADS, Resources(300, 0, 512, 400_000), Resources(16, 0))
    ]
    one = [estimate(t, r, hw).time_us for t, r in launches]
    assert list(estimate_many(launches, hw)) == pytest.approx(one, rel=1e-9)
    assert all(math.isfinite(t) and t > 0 for t in one)
    assert estimate_many([], hw).shape == (0,)


def test_a_query_takes_few_calls_and_one_of_many_takes_fewer():
    """77 and 12 when this was written: about 10 and 3 us."""
    batch = [(BASE, THREADS)] * 1000
    assert calls_of(lambda: estimate(BASE, THREADS, H200)) < 120
    assert calls_of(lambda: estimate_many(batch, H200)) < 20 * len(batch)


# ---- live values


def test_a_chain_needs_two_values_at_a_time():
    assert peak_live({i: (i - 1,) for i in range(1, 50)}, (49,)) == 2


def test_values_that_are_used_again_later_are_all_live():
    sources = {i: (i - 1,) for i in range(1, 61)}
    for k, value in enumerate(range(59, 0, -1)):
        sources[100 + k] = (60 if k == 0 else 99 + k, value)
    assert 60 <= peak_live(sources, (158,)) <= 62


def test_a_value_that_is_used_twice_at_once_counts_once():
    assert peak_live({1: (0, 0), 2: (1,)}, (2,)) == 2


def test_the_live_values_of_a_group_are_counted_in_the_order_of_the_writer():
    def balanced(bb, x):
        found = [bb.emit(op.exp(bb.emit(op.multiply(x, x)))) for _ in range(8)]
        while len(found) > 1:
            found = [bb.emit(op.add(a, b)) for a, b in zip(found[::2], found[1::2], strict=True)]
        return found[0]

    assert live_values(group_of(balanced, ((64, 64), "float32"))) <= 6


# ---- what the classes say

SQUARE = ((4096, 4096), "float16")


def transposed(bb, x, y):
    return op.add(bb.emit(op.permute_dims(x)), y)


def row_sum_of_transposed(bb, x, y):
    return op.sum(bb.emit(op.nn.relu(bb.emit(transposed(bb, x, y)))), axis=-1)


def test_a_tile_makes_a_transposed_read_cheap_and_a_row_kernel_does_not_have_one():
    tile, traffic, _, cheap = ask(group_of(transposed, SQUARE, SQUARE))
    row, strided, _, dear = ask(group_of(row_sum_of_transposed, SQUARE, SQUARE))
    assert (tile, row) == ("transpose", "row")
    assert strided.sector_bytes > 4 * traffic.sector_bytes
    assert traffic.smem_bytes >= 2 * 2 * 4096**2
    assert dear.time_us > 2 * cheap.time_us


def test_the_lanes_are_followed_through_the_maps_between():
    """exp lies between two transposes: what the lanes write next to one another, they also read so;
    behind one transpose alone they do not.
    """

    def around(bb, x):
        return op.permute_dims(bb.emit(op.exp(bb.emit(op.permute_dims(x)))))

    def behind(bb, x):
        return op.permute_dims(bb.emit(op.exp(x)))

    (twice,), (once,) = (
        [s.step for s in streams(g, (4096.0**2,) * len(g.blocks), 4096.0**2) if not s.stored]
        for g in (group_of(around, SQUARE), group_of(behind, SQUARE))
    )
    assert (twice, once) == (1, 4096)


def test_odd_rows_of_a_broadcast_ask_for_more_accesses():
    def biased(bb, x, b):
        return op.add(x, b)

    even, odd = (
        ask(group_of(biased, ((8192, n), "float16"), ((8192, 1), "float16"))) for n in (4096, 4097)
    )
    assert odd[1].wavefronts >= even[1].wavefronts
    assert odd[3].time_us >= even[3].time_us


def test_functions_count_by_their_slots():
    def of(function):
        return ask(group_of(lambda bb, x: function(x), SQUARE))[1].operations["special"]

    slots = H200.special_slots
    assert of(op.exp) == pytest.approx(slots["exp"] * 4096**2)
    assert of(op.erf) == pytest.approx(slots["erf"] * 4096**2)


def test_a_chain_of_special_functions_leaves_the_instruction_cache():
    def chain(length):
        def emit(bb, x):
            for _ in range(length):
                x = bb.emit(op.erf(x))
            return x

        return ask(group_of(emit, SQUARE))

    assert "code" not in chain(10)[3].terms
    assert chain(160)[3].terms["code"] > 0


def test_a_read_of_what_was_just_written_is_charged_by_the_share_that_the_l2_holds():
    def emit(bb, x):
        return op.multiply(bb.emit(op.exp(x)), x)

    def second(extent):
        group = group_of(emit, ((extent, extent), "float16"))
        view = GroupView(group.graph, group.ops[1:], group.outputs)
        return view, ask(view)[1]

    shares = []
    for extent in (512, 2048, 4096, 8192):
        view, traffic = second(extent)
        tensor = view.graph.ops[0].outputs[0]
        share = resident_share(view, tensor, 2.0 * extent**2, H200)
        assert traffic.hbm_bytes == pytest.approx((3 - share) * 2 * extent**2)
        if share > 0.01:
            assert traffic.assumed_l2 == ((tensor, pytest.approx(share * 2 * extent**2)),)
        shares.append(share)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.95
    assert shares[-1] < 0.2
    assert any(0.2 < share < 0.95 for share in shares)


def test_a_tensor_that_nobody_has_just_written_comes_from_memory():
    _, traffic, _, _ = ask(group_of(lambda bb, x: op.exp(x), ((64, 64), "float16")))
    assert traffic.assumed_l2 == ()
    assert traffic.hbm_bytes == 2 * 2 * 64 * 64


def test_rows_that_no_block_holds_are_read_again():
    held, streamed = (
        ask(group_of(lambda bb, x: op.nn.softmax(x), ((512, n), "float32")))[1]
        for n in (4096, 1 << 20)
    )
    assert held.sector_bytes == pytest.approx(held.l2_bytes * (1 + STORED) / 2)
    assert streamed.sector_bytes > 1.3 * streamed.l2_bytes


def test_a_cpu_has_no_blocks():
    hw = load_profile("llvm")
    inputs = ((256, 256), "float32")
    _, traffic, _, found = ask(group_of(lambda bb, x: op.nn.softmax(x), inputs, hw=hw), hw)
    assert traffic.blocks == 0
    assert "latency" not in found.terms


# ---- against measurements


def test_the_fastest_row_kernels_of_the_sweep_are_predicted_within_a_fifth():
    errors = []
    for entry in SWEEP["programs"]:
        kind, rows, columns, dtype = (entry[k] for k in ("kind", "rows", "columns", "dtype"))
        x, vector = ((rows, columns), dtype), ((columns,), dtype)
        inputs = {
            "layernorm": [x, vector, vector],
            "rmsnorm": [x, vector],
            "add_rmsnorm": [x, x, vector],
            "loss": [x, ((rows,), "int64")],
        }
        group = group_of(GRAPHS[kind], *inputs.get(kind, [x]))
        row = family("row")
        fit = row.accepts(group, H200, load_policy(None))
        if isinstance(fit, Fit):  # some long reductions are split over launches
            found = estimate(row.traffic(group, fit, H200), row.resources(group, fit, H200), H200)
            measured = min(time for time, *_ in entry["kernels"])
            errors.append(abs(math.log((found.time_us - H200.launch_us) / measured)))
    assert len(errors) >= 35
    assert math.expm1(statistics.median(errors)) <= 0.2


# ---- what a class needs to know before it is asked

HALF = (((256, 1024), "float16"),)


@pytest.mark.parametrize(
    ("name", "emit", "inputs"),
    [
        ("pointwise", lambda bb, x: op.exp(x), HALF),
        ("row", lambda bb, x: op.nn.softmax(x, axis=-1), HALF),
        ("column", lambda bb, x: op.nn.softmax(x, axis=0), HALF),
        ("mixed", rms_norm_backward(64), rms_norm_inputs(256, 1024, "float16")),
        ("transpose", lambda bb, x: op.permute_dims(x), HALF),
        ("gemm", lambda bb, x, y: op.matmul(x, y), (*HALF, ((1024, 256), "float16"))),
    ],
)
def test_a_class_can_be_asked_about_a_view_that_it_has_not_accepted(name, emit, inputs):
    known = group_of(emit, *inputs)
    kernel = family(name)
    fit = kernel.accepts(known, H200, load_policy(None))
    assert isinstance(fit, Fit)
    for ask_for in (kernel.traffic, kernel.resources):
        new = GroupView(known.graph, known.ops, known.outputs)
        assert ask_for(new, fit, H200) == ask_for(known, fit, H200)
