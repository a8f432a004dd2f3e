"""Choice among configurations of row kernels: what is offered, and how well the estimate ranks it.

`data/row_sweep_h200.json` holds kernel times measured on an H200.
"""

import dataclasses
import functools
import json
import statistics
from pathlib import Path

import pytest
from tvm import tirx
from tvm.relax import op

from tvm_fusion.config import load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.program.analysis import analyze
from tvm_fusion.kernels.row.candidates import row_candidates
from tvm_fusion.kernels.row.config import Form, RowConfig
from tvm_fusion.kernels.row.cost import estimate_rows, row_resources, row_time_us
from tvm_fusion.kernels.row.kernel import emit_row, row_configs
from tvm_fusion.kernels.row.work import row_work

from ...support.cuda_on_cpu import compile_cubins
from ...support.kernel_cases import fuse
from ...support.row_graphs import add_rmsnorm, cross_entropy, exp_sum, layernorm, rmsnorm, softmax

H200, A100 = load_profile("nvidia_h200"), load_profile("nvidia_a100")
SWEEP = json.loads((Path(__file__).parents[2] / "data" / "row_sweep_h200.json").read_text())
LARGEST_REGRET = 1.10
"""Reached on both sweeps, 1.08 by a fit that had not seen every fifth program."""
HALF, BRAIN, FLOAT = "float16", "bfloat16", "float32"


def rowsum(bb, x):
    return op.sum(x, axis=-1)


def mean(bb, x):
    return op.mean(x, axis=-1)


GRAPHS = {
    "loss": cross_entropy,
    "expsum": exp_sum,
    **{f.__name__: f for f in (softmax, layernorm, rmsnorm, add_rmsnorm, rowsum, mean)},
}


@functools.cache
def program_of(kind, rows, columns, dtype=HALF):
    """The program of one kind and shape."""
    x, vector = ((rows, columns), dtype), ((columns,), dtype)
    inputs = {
        "layernorm": [x, vector, vector],
        "rmsnorm": [x, vector],
        "add_rmsnorm": [x, x, vector],
        "loss": [x, ((rows,), "int64")],
    }
    return analyze(fuse(GRAPHS[kind], *inputs.get(kind, [x])))


def first(kind, rows, columns, dtype=HALF, hw=H200):
    """The configuration that is chosen."""
    return row_configs(program_of(kind, rows, columns, dtype), hw)[0]


# ---- against measurements


def program_of_entry(entry):
    return program_of(*(entry[key] for key in ("kind", "rows", "columns", "dtype")))


def measured(entry):
    """Configuration -> microseconds of one program of the sweep."""
    return {
        RowConfig(**{**changes, "form": Form(changes.get("form", "reg"))}): time
        for time, _, _, changes in entry["kernels"]
    }


def work_of(entry, times):
    program = program_of_entry(entry)
    widths = sorted({config.width for config in times})
    return row_work(program, widths, H200.special_slots)


def chosen(entry, times):
    """The measured kernel that the list of a program has first; without what it asks of ptxas,
    where it was measured so.
    """
    listed = row_configs(program_of_entry(entry), H200)
    both = (c for config in listed for c in (config, dataclasses.replace(config, min_blocks=0)))
    return next(c for c in both if c in times)


@functools.cache
def regrets():
    """Time of the chosen kernel over that of the fastest one measured, by program."""
    found = {}
    for entry in SWEEP["programs"]:
        times = measured(entry)
        choice = chosen(entry, times)
        name = f"{entry['kind']} {entry['rows']}x{entry['columns']} {entry['dtype']}"
        found[name] = times[choice] / min(times.values())
    return found


def test_the_choice_is_within_three_percent_of_the_fastest_kernel_in_the_median():
    assert len(regrets()) >= 40
    assert statistics.median(regrets().values()) <= 1.03


def test_nearly_all_choices_are_within_six_percent():
    assert sum(r > 1.06 for r in regrets().values()) <= 0.1 * len(regrets())


def test_long_lists_of_rows_run_at_their_best():
    headline = [r for name, r in regrets().items() if "8192x4096 float16" in name]
    assert len(headline) >= 3
    assert max(headline) <= 1.02


def test_long_rows_that_are_read_once_are_streamed_by_blocks_of_512():
    """1376 x 10877 takes 15.1 us so and 18.1 with 1024 threads, at equal estimates (H200)."""
    many, few = (first("mean", rows, 10877, FLOAT) for rows in (1376, 100))
    assert (many.form, many.threads, many.unroll) == (Form.LOOP, 512, 4)
    assert few.threads == 1024


def test_elements_of_another_place_are_no_reason_for_a_warp_a_row():
    """They lie apart in their row as it is. 16125 x 136 takes 4.8 to 5.0 us with 8 and 16 threads a
    row and 5.7 with 32 (H200, 2026-11-28).
    """

    def flipped(bb, x, w):
        y = bb.emit(op.nn.rms_norm(x, w, axes=-1))
        return op.add(x, bb.emit(op.flip(y, axis=1)))

    program = analyze(fuse(flipped, ((16125, 136), HALF), ((136,), HALF)))
    choice, wide = row_configs(program, H200)[0], RowConfig(threads=32, rows=16, width=8)
    assert choice.threads in (8, 16)
    assert choice.threads * choice.rows >= 64
    times = [row_time_us(program, c, H200).time_us for c in (choice, wide)]
    assert times[0] < times[1]


def test_no_choice_is_far_from_the_fastest_kernel():
    assert {name: r for name, r in regrets().items() if r > LARGEST_REGRET} == {}


def test_a_slow_kernel_is_never_estimated_below_a_fast_one_by_much():
    """Kernels that take over twice the fastest time are estimated above the fastest one's time."""
    wrong, pairs = [], 0
    for entry in SWEEP["programs"]:
        times = measured(entry)
        work = work_of(entry, times)
        estimates = {c: estimate_rows(work, c, H200).time_us for c in times}
        fastest = min(times, key=times.get)
        for config, time in times.items():
            if time > 2 * times[fastest]:
                pairs += 1
                wrong += [config.tag] if estimates[config] < estimates[fastest] else []
    assert pairs >= 50
    assert len(wrong) <= 0.1 * pairs


def test_estimates_of_the_chosen_kernels_are_near_their_times():
    errors = []
    for entry in SWEEP["programs"]:
        times = measured(entry)
        work = work_of(entry, times)
        choice = chosen(entry, times)
        errors.append(abs(estimate_rows(work, choice, H200).time_us / times[choice] - 1))
    assert statistics.median(errors) <= 0.1


def test_estimated_registers_are_near_those_of_ptxas():
    errors = []
    for entry in SWEEP["programs"]:
        times = measured(entry)
        work = work_of(entry, times)
        for config, (_, registers, spilled, _) in zip(times, entry["kernels"], strict=True):
            if not spilled:
                errors.append(abs(row_resources(work, config, H200).registers / registers - 1))
    assert statistics.median(errors) <= 0.15


# ---- candidates

SHAPES = [
    *(("softmax", m, n, HALF) for m, n in ((8192, 4096), (65536, 128), (4096, 65536), (1, 65536))),
    *(("softmax", m, n, BRAIN) for m, n in ((8192, 1000), (64, 128256), (100000, 32))),
    *(("softmax", m, n, FLOAT) for m, n in ((4096, 12288), (3, 7), (300, 1003))),
    *(("layernorm", m, n, HALF) for m, n in ((8192, 4096), (32768, 768), (2048, 5120), (7, 63))),
    *(("layernorm", m, n, FLOAT) for m, n in ((512, 131072), (4096, 1024), (1, 1024))),
    *(("rmsnorm", m, n, BRAIN) for m, n in ((16384, 1024), (16, 8192), (1, 4096), (2048, 5120))),
    *(("rmsnorm", m, n, FLOAT) for m, n in ((8192, 4096), (8192, 4095), (128, 12288))),
    *(("add_rmsnorm", m, n, HALF) for m, n in ((8192, 4096), (16, 5120), (1000, 16384))),
    *(("loss", m, n, HALF) for m, n in ((4096, 32000), (16, 128256), (8192, 50257))),
    *(("expsum", m, n, HALF) for m, n in ((8192, 8192), (2048, 1000), (65536, 64))),
    *(("rowsum", m, n, FLOAT) for m, n in ((4096, 128), (1, 1048576), (1024, 131072))),
    *(("mean", m, n, FLOAT) for m, n in ((1, 4096), (1, 2), (100000, 3), (64, 262144))),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}-{s[1]}x{s[2]}-{s[3]}")
def test_every_first_choice_can_be_written(shape):
    program = program_of(*shape)
    configs = row_configs(program, H200)
    assert len(set(configs)) == len(configs) >= 2
    assert emit_row(program, configs[0], H200) is not None


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [("softmax", 9, 520), ("rmsnorm", 9, 1003), ("mean", 1, 4096)])
def test_every_candidate_can_be_written(shape):
    program = program_of(*shape)
    candidates = row_candidates(program, H200)
    assert {config.form for config in candidates} == {Form.REGISTERS, Form.LOOP}
    for config in candidates:
        emit_row(program, config, H200)


def test_candidates_of_every_form_exist_for_the_longest_rows():
    forms = {config.form for config in row_candidates(program_of("softmax", 4096, 65536), H200)}
    assert forms == set(Form)


def test_the_list_is_the_candidates_in_another_order():
    program = program_of("layernorm", 8192, 4096)
    assert set(row_configs(program, H200)) == set(row_candidates(program, H200))


def test_equal_programs_are_ranked_alike():
    lists = []
    for _ in range(2):
        program_of.cache_clear()
        lists.append(row_configs(program_of("softmax", 8192, 4096), H200))
    assert lists[0] == lists[1]


@pytest.mark.parametrize(
    ("kind", "rows", "columns"),
    [("softmax", 1, 65536), ("loss", 16, 128256), ("rowsum", 1, 1 << 20), ("softmax", 16, 128256)],
)
def test_few_long_rows_are_spread_over_clusters(kind, rows, columns):
    assert first(kind, rows, columns).cluster >= 4


def test_many_rows_are_not():
    assert first("softmax", 8192, 4096).cluster == 1


def test_one_short_row_gets_one_or_two_vectors_a_thread():
    config = first("mean", 1, 4096)
    assert config.cluster == 1
    assert 4096 / (config.threads * config.width) <= 8


def test_short_rows_share_a_block():
    config = first("softmax", 65536, 128)
    assert config.threads <= 16
    assert config.threads * config.rows >= 64


def test_odd_rows_are_read_in_windows_where_they_are_long_enough():
    for kind, rows, columns in (("softmax", 65536, 63), ("layernorm", 8192, 63)):
        widths = {config.width for config in row_candidates(program_of(kind, rows, columns), H200)}
        assert widths == {1, 8}
        assert first(kind, rows, columns).width == 1
    assert first("softmax", 8192, 1003).width == 8
    assert first("rmsnorm", 8192, 4095).width == 8


def test_a_vector_that_starts_elsewhere_than_the_rows_makes_windows_dear():
    assert first("layernorm", 4096, 1023).width == 1


def test_rows_that_one_block_holds_are_not_spread_over_clusters():
    assert first("rmsnorm", 128, 5120, BRAIN).cluster == 1


def test_rows_that_leave_one_number_and_fit_no_registers_are_streamed():
    assert first("loss", 4096, 32000).form is Form.LOOP


def test_devices_without_clusters_get_none():
    for kind, rows, columns in (("softmax", 1, 65536), ("softmax", 4096, 65536)):
        configs = row_configs(program_of(kind, rows, columns), A100)
        assert {config.cluster for config in configs} == {1}
        assert Form.BULK not in {config.form for config in configs}


def test_integer_sums_are_not_exchanged_within_clusters():
    program = analyze(fuse(rowsum, ((1, 65536), "int32")))
    assert {config.cluster for config in row_configs(program, H200)} == {1}


def test_rows_of_symbolic_length_are_streamed():
    n = tirx.Var("n", "int64")
    configs = row_configs(analyze(fuse(softmax, ((4, n), HALF))), H200)
    assert {config.form for config in configs} == {Form.LOOP}


def test_a_symbolic_number_of_rows_counts_as_many():
    m = tirx.Var("m", "int64")
    program = analyze(fuse(softmax, ((m, 4096), HALF)))
    assert row_configs(program, H200)[0] == first("softmax", 8192, 4096)


def test_programs_without_elements_are_refused():
    program = dataclasses.replace(program_of("softmax", 8192, 4096), columns=0)
    with pytest.raises(Unsupported, match="nothing to reduce"):
        row_configs(program, H200)


# ---- the estimate


def test_terms_say_what_limits_a_kernel():
    many = row_time_us(program_of("softmax", 8192, 4096), RowConfig(threads=128), H200)
    assert many.dominant == "hbm"
    one = row_time_us(program_of("mean", 1, 4096), RowConfig(threads=256), H200)
    assert one.dominant == "latency"
    lanes = RowConfig(threads=1, rows=128, width=1)
    assert row_time_us(program_of("softmax", 65536, 63), lanes, H200).dominant == "access"


def test_rows_that_read_and_store_nothing_of_their_own_have_an_estimate():
    work = row_work(program_of("mean", 64, 4096), [8], H200.special_slots)
    sweeps = tuple(dataclasses.replace(s, streamed=0) for s in work.merged)
    work = dataclasses.replace(work, streamed=0, merged=sweeps)
    assert estimate_rows(work, RowConfig(Form.LOOP), H200).time_us > 0


def test_registers_beyond_the_limit_are_charged():
    program = program_of("softmax", 8192, 16384)
    fits, spills = RowConfig(threads=256), RowConfig(threads=256, min_blocks=8)
    assert row_time_us(program, spills, H200).time_us > row_time_us(program, fits, H200).time_us


def test_first_choices_compile_without_spills():
    shapes = [
        ("softmax", 4096, 65536, HALF),
        ("softmax", 64, 128256, HALF),
        ("layernorm", 512, 131072, HALF),
        ("rmsnorm", 8192, 4096, FLOAT),
        ("loss", 16, 128256, HALF),
        ("add_rmsnorm", 1000, 16384, HALF),
    ]
    kernels = {}
    for shape in shapes:
        program = program_of(*shape)
        name = "_".join(map(str, shape))
        kernels[name] = emit_row(program, row_configs(program, H200)[0], H200)
    resources = compile_cubins(kernels)
    assert {r.kernel for r in resources} == set(kernels)
    assert [r for r in resources if r.spill_bytes] == []


@pytest.mark.parametrize("dtype", [HALF, BRAIN, FLOAT])
def test_streamed_sums_of_exponentials_get_the_blocks_that_the_estimate_counts(dtype):
    """Whatever follows the loop: ptxas is asked for the registers, and spills none."""
    program = program_of("loss", 4096, 32000, dtype)
    asked = [c for c in row_configs(program, H200) if c.form is Form.LOOP and c.min_blocks]
    assert {(c.threads, c.min_blocks) for c in asked} >= {(256, 6), (512, 3)}
    kernels = {f"k{i}": emit_row(program, config, H200) for i, config in enumerate(asked)}
    resources = {r.kernel: r for r in compile_cubins(kernels)}
    for name, config in zip(kernels, asked, strict=True):
        work = row_work(program, [config.width], H200.special_slots)
        most = H200.registers_per_sm // (config.threads * config.min_blocks)
        assert row_resources(work, config, H200).slots == config.min_blocks * H200.num_sms
        assert resources[name].registers <= most
        assert resources[name].spill_bytes == 0


def test_streamed_rows_keep_to_their_registers_on_blackwell():
    """ptxas would unroll loops of few turns, whose loads do not fit."""
    rtx5090, program = load_profile("nvidia_rtx5090"), program_of("softmax", 4096, 65536)
    asked = [
        RowConfig(Form.LOOP, 1024, width=8, unroll=unroll, prefetch=prefetch)
        for unroll, prefetch in ((2, False), (2, True), (4, False))
    ]
    kernels = {f"k{i}": emit_row(program, config, rtx5090) for i, config in enumerate(asked)}
    resources = compile_cubins(kernels, "sm_120")
    assert {r.kernel: r.spill_bytes for r in resources} == dict.fromkeys(kernels, 0)


def test_sums_that_do_not_run_along_ask_for_nothing():
    streamed = [c for c in row_configs(program_of("rowsum", 4096, 32000), H200) if c.cluster == 1]
    assert {c.min_blocks for c in streamed if c.form is Form.LOOP} == {0}
