"""The cost model of matrix products against measurements, and what it says where nothing is
measured.

`data/gemm_sweep_h200.json` holds kernel times of the Hopper form on an H200, of plain products and
of some with epilogues.
"""

import contextlib
import dataclasses
import functools
import json
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from tvm_fusion.config import load_policy, load_profile, policy_names
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.forms import WRITER
from tvm_fusion.kernels.gemm.hopper.configs import tile_of
from tvm_fusion.kernels.gemm.hopper.cost import GemmTile, GemmWork, gemm_seconds, gemm_time
from tvm_fusion.kernels.gemm.hopper.kernel import hopper_ranked
from tvm_fusion.kernels.gemm.mma import rank
from tvm_fusion.kernels.gemm.mma.plan import MmaConfig
from tvm_fusion.kernels.gemm.runs.problem import read_product
from tvm_fusion.kernels.gemm.runs.shape import RunsConfig, Shape
from tvm_fusion.kernels.gemm.runs.time import runs_seconds
from tvm_fusion.kernels.gemm.simt import kernel as simt_kernel
from tvm_fusion.kernels.gemm.simt.config import SimtConfig

from ...fit_gemm_cost import accuracy, kendall, load, load_layers, predicted_us, work_of
from ...support import gemm_cases as graphs
from ...support.graphs import module, plan_of
from ...support.kernel_cases import fuse

HALF, FLOAT = "float16", "float32"
DATA = Path(__file__).parents[2] / "data"
H200, A100 = load_profile("nvidia_h200"), load_profile("nvidia_a100")
DEFAULT = load_policy()
KERNELS, LIBRARY = load()
ACCURACY = accuracy(KERNELS)
LAYERS = load_layers()
LARGEST_REGRET = 1.08
"""Reached: 1.078, where rows of tiles are cut off (200 x 11008 x 4096); 1.04 on most shapes."""


@functools.cache
def contraction_of(m, n, k, dtype=HALF, emit=graphs.linear):
    return analyze_contraction(fuse(emit, ((m, k), dtype), ((n, k), dtype)))


def names(shapes):
    return ["x".join(map(str, s)) for s in shapes]


# ---- against measurements


def test_the_choice_is_the_fastest_kernel_in_the_median():
    regrets = [regret for regret, _, _ in ACCURACY.values()]
    assert len(regrets) >= 33
    assert statistics.median(regrets) <= 1.005


def test_no_choice_is_far_from_the_fastest_kernel():
    assert {s: r for s, (r, _, _) in ACCURACY.items() if r > LARGEST_REGRET} == {}


def test_predicted_times_are_near_the_measured_ones():
    errors = errors_of(lambda tile: tile.split == 1)
    assert statistics.median(errors) <= 0.04
    assert statistics.quantiles(errors, n=10)[-1] <= 0.13


def test_predicted_times_of_split_sums_are_roughly_right():
    assert statistics.median(errors_of(lambda tile: tile.split > 1)) <= 0.09


@pytest.mark.parametrize("name", LAYERS)
def test_with_epilogues_the_choice_is_near_the_fastest_kernel(name):
    work, times = LAYERS[name]
    ((regret, errors, _),) = accuracy({work: times}).values()
    assert regret <= LARGEST_REGRET
    assert statistics.median(errors) <= 0.15


def test_predicted_times_with_epilogues_are_near_the_measured_ones():
    found = accuracy(dict(LAYERS.values())).values()
    assert statistics.median(e for _, errors, _ in found for e in errors) <= 0.07


def test_choices_are_near_the_fastest_where_nothing_was_fitted():
    """Few columns, many rows, of 1 x 1 convolutions; the worst is 1568 x 512 x 2048."""
    kernels, _ = load(group="held_out")
    found = accuracy(kernels).values()
    assert len(found) >= 8
    assert max(regret for regret, _, _ in found) <= 1.11
    assert statistics.median(regret for regret, _, _ in found) <= 1.03
    assert statistics.median(e for _, errors, _ in found for e in errors) <= 0.1


def errors_of(wanted):
    return [
        abs(predicted_us(shape, tile) / us - 1)
        for shape, times in KERNELS.items()
        for tile, us in times.items()
        if wanted(tile)
    ]


def test_configurations_are_in_nearly_the_measured_order():
    assert statistics.mean(tau for _, _, tau in ACCURACY.values()) >= 0.77


def test_shapes_are_in_the_measured_order():
    shapes = list(KERNELS)
    measured = [min(KERNELS[s].values()) for s in shapes]
    predicted = [min(predicted_us(s, tile) for tile in KERNELS[s]) for s in shapes]
    assert kendall(predicted, measured) >= 0.97


@pytest.mark.parametrize("shape", KERNELS, ids=names(KERNELS))
def test_the_measured_kernel_that_the_list_has_first_is_near_the_fastest(shape):
    times = KERNELS[shape]
    first = next(t for t in listed(shape) if t in times)
    assert times[first] <= LARGEST_REGRET * min(times.values())


@pytest.mark.parametrize(
    "shape",
    [(384, 768, 3072), (256, 4096, 14336), (256, 4096, 4096), (2048, 4096, 4096)],
    ids=str,
)
def test_the_choice_is_faster_than_the_library(shape):
    times = KERNELS[shape]
    first = next(t for t in listed(shape) if t in times)
    assert times[first] < LIBRARY[shape]


def listed(shape):
    return [tile_of(config) for _, config in hopper_ranked(contraction_of(*shape), H200)]


@pytest.mark.parametrize(
    "shape",
    [(1, 4096, 4096), (16, 14336, 4096), (512, 4096, 4096), (777, 1024, 4096), (8192, 8192, 8192)],
    ids=str,
)
def test_the_planner_predicts_the_time_of_the_fastest_kernel(shape):
    m, n, k = shape
    planned = plan_of(module(graphs.linear, ((m, k), HALF), ((n, k), HALF)), "nvidia_h200")
    us = planned.plan.predicted_us - H200.launch_us
    assert us == pytest.approx(min(KERNELS[shape].values()), rel=0.15)


# ---- what the model says of what was not measured


BASE = work_of(2048, 4096, 4096)
LARGE = GemmTile(128, 256, 4, True, True, 16)


def seconds(tile=LARGE, work=BASE, **more):
    return gemm_time(dataclasses.replace(work, **more), tile, H200).seconds


@pytest.mark.parametrize(
    "more",
    [
        {"batch": 2},
        {"products": 2},
        {"columns": (4096, 512)},
        {"extra_bytes": 64 * BASE.written_bytes},
        {"written_bytes": 64 * BASE.written_bytes},
        {"operation_s": 1e-10},
        {"b_whole_lines": False, "a_whole_lines": False, "columns": (4000,)},
    ],
    ids=lambda more: next(iter(more)),
)
def test_more_work_takes_more_time(more):
    tile = GemmTile(128, 128, 6, True, False) if "b_whole_lines" in more else LARGE
    assert seconds(tile, **more) > 1.02 * seconds(tile)


@pytest.mark.parametrize("columns", [(4096, 4096), (11008, 11008), (4096, 1024, 1024)], ids=str)
def test_products_in_one_launch_take_no_longer_than_apart(columns):
    """A launch counts no heat: what tensor cores take adds up, however the work is divided."""
    one = work_of(4096, columns[0], 4096)
    apart = [dataclasses.replace(one, columns=(n,), written_bytes=8192.0 * n) for n in columns]
    whole = dataclasses.replace(one, columns=columns, written_bytes=8192.0 * sum(columns))
    powers = [gemm_time(work, LARGE, H200).terms["power"] for work in (whole, *apart)]
    assert powers[0] == pytest.approx(sum(powers[1:]))
    assert seconds(work=whole) < sum(seconds(work=work) for work in apart)


def test_a_residual_is_waited_for_unless_it_was_asked_for_ahead():
    waiting, ahead = (dataclasses.replace(LARGE, deferred=False, ahead=a) for a in (False, True))
    assert seconds(waiting, residual=True) > seconds(ahead, residual=True)


def test_operations_show_where_no_loop_hides_them():
    short, long = work_of(2048, 4096, 40), work_of(2048, 4096, 8192)
    costs = [seconds(work=work, operation_s=4e-13) / seconds(work=work) for work in (short, long)]
    assert costs[0] > 1.5
    assert costs[1] < 1.05


def test_a_ring_of_few_stages_waits_for_its_loads():
    tiles = [dataclasses.replace(GemmTile(64, 64), stages=n) for n in (2, 8)]
    assert seconds(tiles[0]) > seconds(tiles[1])


def test_bytes_in_the_cache_need_no_memory():
    work = work_of(1, 8192, 8192)
    assert seconds(work=work, resident_bytes=1e8) < seconds(work=work)


def test_a_deferred_epilogue_shows_once():
    assert seconds() < seconds(dataclasses.replace(LARGE, deferred=False))


def test_the_time_is_at_least_that_of_each_term():
    for shape, times in KERNELS.items():
        for tile in times:
            time = gemm_time(work_of(*shape), tile, H200)
            assert max(time.terms.values()) <= 1.001 * time.seconds


@pytest.mark.parametrize("split", [2, 4])
def test_splitting_a_long_sum_pays_where_tiles_are_few(split):
    whole = GemmTile(128, 128, 6, True, False)
    parts = dataclasses.replace(whole, split=split)
    few, many = work_of(128, 2048, 16384), work_of(4096, 4096, 1024)
    assert seconds(parts, few) < 0.8 * seconds(whole, few)
    assert seconds(parts, many) > seconds(whole, many)


def test_lists_hold_split_tiles_only_where_whole_ones_leave_the_device_idle():
    split = [max(t.split for t in listed(s)) for s in ((128, 4096, 8192), (8192, 8192, 8192))]
    assert split[0] > 1
    assert split[1] == 1


def test_lists_are_in_the_order_of_predicted_time():
    ranked = hopper_ranked(contraction_of(777, 1024, 4096), H200)
    assert [time for time, _ in ranked] == sorted(time for time, _ in ranked)
    assert len({config for _, config in ranked}) == len(ranked)


# ---- forms


def form_chosen(*shape, hw=H200, emit=graphs.linear, dtype=HALF):
    contraction = contraction_of(*shape, emit=emit, dtype=dtype)
    return WRITER.form_of(WRITER.ranked(contraction, hw, DEFAULT)[0][1]).name


def test_large_half_products_go_to_wgmma_on_hopper():
    assert form_chosen(4096, 4096, 4096) == "hopper"


@pytest.mark.parametrize("shape", [(4096, 4096, 4095), (1000, 999, 1001)], ids=str)
def test_row_pitches_that_the_tma_refuses_stay_on_tensor_cores(shape):
    assert form_chosen(*shape) == "mma"


@pytest.mark.parametrize(("rows", "form"), [(1, "skinny"), (4, "hopper"), (16, "hopper")])
def test_one_row_goes_to_cuda_cores_and_some_rows_to_wgmma(rows, form):
    assert form_chosen(rows, 11008, 4096) == form


def test_half_products_go_to_mma_sync_on_ampere():
    assert form_chosen(4096, 4096, 4096, hw=A100) == "mma"


def test_float32_is_rounded_only_if_the_policy_allows_tf32():
    contraction = contraction_of(2048, 2048, 2048, dtype=FLOAT)
    configs = [
        WRITER.ranked(contraction, A100, policy)[0][1]
        for policy in (DEFAULT, load_policy({"allow_tf32": True}))
    ]
    assert [(c.split, c.tf32) for c in configs] == [(True, False), (False, True)]


SPLIT_SWEEPS = {
    instructions: json.loads((DATA / name).read_text())["shapes"]
    for instructions, name in (
        (rank.SPLIT_INSTRUCTIONS, "split_sweep_three_parts_h100.json"),
        (2.0, "split_sweep_h100.json"),  # of two parts
    )
}
AS_PREDICTED = ("2048", "wide", "along rows", "4096")
SPLIT_REGRET = 1.12
"""Reached: 1.114, along rows, whose elements are read one by one."""


@pytest.mark.parametrize("name", AS_PREDICTED)
@pytest.mark.parametrize("instructions", SPLIT_SWEEPS)
def test_products_in_parts_and_what_splits_them_take_turns(name, instructions, monkeypatch):
    monkeypatch.setattr(rank, "SPLIT_INSTRUCTIONS", instructions)
    sweep = SPLIT_SWEEPS[instructions][name]
    m, n, k = sweep["shape"]
    if sweep["along_rows"]:
        func = fuse(graphs.left_transposed, ((k, m), FLOAT), ((k, n), FLOAT))
        contraction = analyze_contraction(func)
    else:
        contraction = contraction_of(m, n, k, dtype=FLOAT)
    predicted = {
        (c.block_m, c.block_n, c.warp_m, c.warp_n, c.step_bytes, c.stages): seconds * 1e6
        for seconds, c in rank.mma_ranked(contraction, H200)
    }
    tiles = ((tile.split(","), us) for tile, us in sweep["us"].items() if "," in tile)
    measured = {key: us for tile, us in tiles if (key := tuple(map(int, tile))) in predicted}
    shares = [predicted[tile] / us for tile, us in measured.items()]
    assert 0.9 < statistics.median(shares) < 1.1
    chosen = min(measured, key=predicted.__getitem__)
    assert measured[chosen] <= SPLIT_REGRET * min(measured.values())


ODD = json.loads((DATA / "odd_sweep_h200.json").read_text())["kernels"]


@functools.cache
def odd_kernels(shape):
    """Predicted and measured microseconds of the measured kernels of a product of odd size, the
    fastest by prediction first.
    """
    contraction, found = contraction_of(*shape), []
    segments = rank.read_mma(contraction, H200, wide=True)
    beside = rank._Beside.of(contraction, segments, H200)
    for kernel in ODD:
        names = [n for n in kernel if n not in ("shape", "form", "us")]
        if tuple(kernel["shape"]) != shape:
            continue
        config = {name: kernel[name] for name in names}
        if kernel["form"] == "simt":
            seconds = simt_kernel._seconds(contraction, SimtConfig(**config), H200)
        else:
            config = MmaConfig(**config)
            in_turns = sum(rank._tiles(beside, config)) > H200.num_sms
            if beside.off_words and config.wide != in_turns:
                continue
            seconds = rank._seconds(beside, segments, config, H200)
        found.append((seconds * 1e6, kernel["us"]))
    return sorted(found)


ODD_SHAPES = sorted({tuple(kernel["shape"]) for kernel in ODD})


def test_kernels_of_odd_products_are_in_nearly_the_measured_order():
    found = [odd_kernels(shape) for shape in ODD_SHAPES]
    losses = [kernels[0][1] / min(us for _, us in kernels) for kernels in found]
    assert len(losses) == 13
    assert statistics.mean(losses) <= 1.14
    assert sum(loss > 1.26 for loss in losses) <= 2  # ties of three tiles
    assert kendall(*zip(*(k for kernels in found for k in kernels), strict=True)) >= 0.85


def test_small_odd_products_are_multiplied_by_tensor_cores():
    """80 x 649 x 91 takes 5.5 us on CUDA cores, 393 x 1209 x 91 takes 10."""
    assert form_chosen(80, 649, 91) == form_chosen(393, 1209, 91) == "runs"
    assert form_chosen(80, 649, 1001) == "mma"


SMALL = json.loads((DATA / "small_products_h200.json").read_text())["rows"]


def small_kernels(form):
    """Predicted and measured microseconds of small products of a form, by dtype and sizes."""
    found = defaultdict(list)
    for kind, dtype, *sizes, config, us in SMALL:
        if kind != form:
            continue
        contraction = contraction_of(*sizes, dtype=dtype)
        if form == "simt":
            seconds = simt_kernel._seconds(contraction, SimtConfig(*config), H200)
        else:
            seconds = runs_seconds(Shape(read_product(contraction), RunsConfig(*config)), H200)
        found[dtype, *sizes].append((seconds * 1e6, us))
    return found


def test_a_warp_alone_on_cuda_cores_is_predicted_with_what_its_terms_take():
    """Without, 256 x 96 x 1000 is predicted 10 us, which takes 23."""
    found = small_kernels("simt")
    long = [p / us for (_, *_, k), pairs in found.items() for p, us in pairs if k >= 200]
    short = [p / us for (_, *_, k), pairs in found.items() for p, us in pairs if k < 200]
    assert len(long) >= 25
    assert 0.85 < statistics.median(long) < 1.1
    assert 0.6 < min(long) < max(long) < 1.2
    assert max(short) < 1.75


def test_float32_of_few_tiles_and_many_terms_is_multiplied_in_parts():
    """256 x 96 x 1000 takes 17.6 us so, 23 on CUDA cores; 40 x 512 x 512 takes 9.3, and 11.9."""
    for sizes in ((256, 96, 1000), (40, 512, 512)):
        assert form_chosen(*sizes, dtype=FLOAT) == "mma"


def test_the_first_tiles_of_odd_products_as_runs_are_among_the_fastest():
    losses = [
        min(pairs)[1] / min(us for _, us in pairs) for pairs in small_kernels("runs").values()
    ]
    assert len(losses) == 11
    assert statistics.median(losses) <= 1.01
    assert sum(loss > 1.13 for loss in losses) <= 1  # 20000 x 96 x 90, tiles of 64 columns


@pytest.mark.parametrize("name", policy_names())
def test_no_shipped_policy_rounds_float32(name):
    assert load_policy(name).allow_tf32 is False


def test_the_list_of_all_forms_is_in_the_order_of_predicted_time():
    times = [time for time, _ in WRITER.ranked(contraction_of(16, 1024, 1024), H200, DEFAULT)]
    assert times == sorted(times)


@pytest.mark.parametrize("form", WRITER.forms, ids=lambda form: form.name)
def test_every_form_writes_the_first_of_its_own_list(form):
    contraction = contraction_of(16, 512, 256)
    config = form.rank(contraction, H200, DEFAULT)[0][1]
    assert WRITER.form_of(config) is form
    assert WRITER.emit(contraction, H200, DEFAULT, config) is not None


def test_a_configuration_of_no_form_is_refused():
    with pytest.raises(Unsupported, match="no configuration of a matrix product"):
        WRITER.emit(contraction_of(16, 512, 256), H200, DEFAULT, config="fast")


@pytest.mark.parametrize(
    "case", graphs.TENSOR_CORE_CASES + graphs.CUDA_CORE_CASES, ids=lambda case: case.name
)
def test_every_form_ranks_a_contraction_or_refuses_it(case):
    contraction = analyze_contraction(case.func())
    for form in WRITER.forms[:-1]:
        with contextlib.suppress(Unsupported):
            assert form.rank(contraction, H200, load_policy(None))[0][0] > 0
    assert WRITER.ranked(contraction, H200, load_policy(None))


@pytest.mark.parametrize("size", [(64, 512, 64), (777, 1024, 4096), (8192, 8192, 512)])
@pytest.mark.parametrize("columns", [64, 128, 256])
def test_a_tile_that_is_left_out_is_no_faster_than_what_is_known(size, columns):
    m, n, k = size
    work, tile = GemmWork(1, m, (n,), k, written_bytes=2 * m * n), GemmTile(128, columns)
    seconds = gemm_seconds(work, tile, H200)
    assert seconds == gemm_time(work, tile, H200).seconds
    assert gemm_seconds(work, tile, H200, seconds * 1.001) == seconds
    assert gemm_seconds(work, tile, H200, 1e-9) == float("inf")
