"""The report as text, as JSON, and as an answer about a pair."""

import io
import json
import sys
from dataclasses import replace

import pytest

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.plan.decide.decide import decide
from tvm_fusion.plan.refusal import RefusalCode
from tvm_fusion.report import text
from tvm_fusion.report.facts import Comparison, GroupReport, RefusalReport, Verification
from tvm_fusion.report.flip import KINDS, flip
from tvm_fusion.report.screen import COLUMNS, LINES, Report, screen
from tvm_fusion.runtime.timing.timing import TimeReport, Verdict

from ..benchmarks.plans.random_graphs import graph_of

NORM = GroupReport(
    name="fused_add_rms_norm",
    ops=("add", "multiply", "mean", "rsqrt"),
    composites=("rms_norm",),
    kernel_class="row",
    launches=1,
    bytes_fused=100_000_000,
    bytes_unfused=350_000_000,
    predicted_us=25.0,
    unfused_predicted_us=90.0,
    terms={"hbm": 24.0, "l2": 9.5},
    evidence={"kind": "model", "ratio": 0.28, "low": 0.25, "high": 0.31},
    assumed_l2={"lv0": 8_400_000.0},
    measured_us=26.4,
    measured=TimeReport(26.4, 26.1, 27.0, 20, "wall"),
    roofline_share=0.93,
    registers=40,
    error=3.2e-4,
)
MATMUL = GroupReport(
    name="matmul",
    ops=("matmul",),
    composites=(),
    kernel_class="gemm",
    launches=1,
    bytes_fused=2_000,
    bytes_unfused=2_000,
    predicted_us=1500.0,
    unfused_predicted_us=1500.0,
)
REFUSAL = RefusalReport(
    "RECOMPUTE", ("exp", "matmul"), "exp would be computed 4096 times", {"factor": 4096}
)
REPORT = Report(
    target="nvidia_h200",
    launches=Comparison(2, 6),
    bytes=Comparison(100_002_000, 350_002_000),
    plan={"groups": [["add"], ["matmul"]]},
    groups=(NORM, MATMUL),
    refusals=(REFUSAL,),
    verify=Verification(True, 3.2e-4),
    times={
        "fused": TimeReport(1526.4, 1520.0, 1530.0, 20, "kernel"),
        "unfused": TimeReport(1620.0, 1610.0, 1630.0, 20, "kernel"),
    },
)
SOURCE = dict.fromkeys(("source", "source_error", "source_note", "source_failure")) | {"kernels": 0}
SOURCE |= {"on_examples": False}
EMPTY = Report("llvm_cpu", Comparison(0, 0), Comparison(0, 0), {})


class Terminal(io.StringIO):
    """A text file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def lines() -> list[str]:
    return [" ".join(line.split()) for line in REPORT.full().splitlines()]


def test_the_json_object_has_the_documented_keys():
    data = REPORT.to_json()
    assert list(data)[:9] == [
        "version",
        "target",
        "launches",
        "bytes",
        "time_us",
        "verify",
        "plan",
        "groups",
        "refusals",
    ]
    assert data["launches"] == {"fused": 2, "unfused": 6}
    assert data["verify"] == {"passed": True, "worst_error": 3.2e-4, "not_finite": 0.0} | SOURCE
    assert data["groups"][0]["terms"] == {"hbm": 24.0, "l2": 9.5}
    assert data["refusals"][0]["where"] == ["exp", "matmul"]


def test_the_json_object_survives_a_round_trip():
    data = REPORT.to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_what_did_not_run_is_null_in_json():
    data = EMPTY.to_json()
    assert data["time_us"] == {"fused": None, "unfused": None}
    assert data["verify"] is None


@pytest.mark.parametrize("error", [float("inf"), float("nan")])
def test_numbers_without_a_json_form_become_null(error):
    data = replace(REPORT, verify=Verification(False, error)).to_json()
    assert data["verify"] == {"passed": False, "worst_error": None, "not_finite": 0.0} | SOURCE


@pytest.mark.parametrize(
    ("pair", "ratio"),
    [
        (Comparison(2, 6), 3.0),
        (Comparison(0, 6), None),
        (Comparison(None, 6), None),
        (Comparison(2, None), None),
    ],
)
def test_the_ratio_of_a_comparison_is_none_where_it_is_not_known(pair, ratio):
    assert pair.ratio == ratio


def test_the_header_shows_launches_bytes_time_and_the_check(lines):
    assert lines[:6] == [
        "tvm_fusion on nvidia_h200",
        "unfused fused saved",
        "launches 6 2 3.00x",
        "bytes 350 MB 100 MB 3.50x",
        "time 1.62 ms 1.53 ms 1.06x",
        "verify passed, worst error 0.00032",
    ]


def test_a_group_is_a_row_with_its_composites_and_numbers(lines):
    row = "fused_add_rms_norm row rms_norm 1 100 MB 3.5x 25 us 26.4 us (26.1 us - 27 us)"
    assert f"{row} at most 0.31 93% 40 0.00032" in lines
    assert "matmul gemm matmul 1 2 kB 1.0x 1.5 ms - - - - -" in lines


def test_a_group_shows_its_terms_and_what_is_taken_to_lie_in_the_l2(lines):
    assert "fused_add_rms_norm: hbm 24 us, l2 9.5 us" in lines
    assert "from the L2: lv0 (8.4 MB)" in lines


def test_only_the_largest_terms_are_shown():
    terms = {name: float(us) for us, name in enumerate("abcdefg")}
    shown = replace(REPORT, groups=(replace(NORM, terms=terms),)).full()
    assert "fused_add_rms_norm: g 6 us, f 5 us, e 4 us, d 3 us, c 2 us, ..." in shown


def test_columns_that_are_empty_everywhere_are_left_out():
    heads = replace(REPORT, groups=(MATMUL,)).full().splitlines()[11].split()
    assert heads == ["group", "class", "computes", "launches", "bytes", "saved", "predicted"]


def test_a_refusal_shows_its_code_place_reason_and_numbers(lines):
    assert "not fused (1 RECOMPUTE):" in lines
    assert "RECOMPUTE: exp, matmul: exp would be computed 4096 times (factor = 4096)" in lines


def test_many_refusals_are_counted_and_the_rest_is_announced():
    each = [replace(REFUSAL, why=f"{chr(ord('a') + n)} would be computed") for n in range(11)]
    shown = replace(REPORT, refusals=tuple(each)).full()
    assert "not fused (11 RECOMPUTE):" in shown
    assert shown.count("would be computed") == 8
    assert "and 3 more" in shown


def test_refusals_of_equal_layers_are_one_line_and_count_together():
    layers = [replace(REFUSAL, where=(f"exp{n}", f"lv{n}"), cost_us=2.0) for n in range(12)]
    dear = replace(REFUSAL, why="dear", cost_us=20.0)
    shown = replace(REPORT, refusals=(dear, *layers)).full().splitlines()
    at = shown.index("not fused (13 RECOMPUTE):")
    assert shown[at + 1].startswith("  x12, 24 us in all: RECOMPUTE: exp0, lv0: ")
    assert "dear" in shown[at + 2]
    assert len(shown) == at + 3


def test_a_fallback_is_marked_in_its_row_and_explained():
    fallen = replace(NORM, fallback="error 0.2 above the limit 0.01")
    shown = replace(REPORT, groups=(fallen,)).full()
    assert "run unfused:\n  fused_add_rms_norm: error 0.2 above the limit 0.01" in shown
    assert "fused_add_rms_norm  unfused" in shown


def test_groups_that_fell_back_for_one_reason_share_a_line():
    groups = [replace(NORM, name=name, fallback="no nvcc") for name in ("first", "second")]
    assert "run unfused:\n  first, second: no nvcc\n" in replace(REPORT, groups=groups).full()


def test_kernels_without_a_schedule_are_named():
    shown = replace(REPORT, plain={"scatter": "in one thread"}).full()
    assert "slow, for want of a schedule:\n  scatter: in one thread" in shown
    assert "for want of a schedule" not in REPORT.full()


def test_a_learned_correction_that_is_not_used_is_named_on_the_first_screen():
    shown = replace(REPORT, unlearned="the profile's numbers have changed")
    line = "the learned correction is not used: the profile's numbers have changed"
    assert line in str(shown)
    assert line in shown.full()


def test_a_failed_check_is_loud():
    assert "FAILED" in replace(REPORT, verify=Verification(False, 0.5)).full()


def test_other_compilers_are_compared_with_our_time():
    times = {
        **REPORT.times,
        "torch.compile": TimeReport(3052.8, 3000.0, 3100.0, 20, "wall"),
        "torch": TimeReport(1520.0, 1490.0, 1550.0, 20, "wall"),
        "jax": TimeReport(failure="ImportError: no jax"),
    }
    rows = [" ".join(line.split()) for line in replace(REPORT, times=times).full().splitlines()]
    assert "unfused 1.62 ms 1.61 ms 1.63 ms 20 1.06x faster" in rows
    assert "torch.compile 3.05 ms 3 ms 3.1 ms 20 2.00x faster" in rows
    assert "torch 1.52 ms 1.49 ms 1.55 ms 20 - no difference" in rows
    assert "jax - - - 0 - -" in rows
    assert "jax: ImportError: no jax" in rows


def test_an_empty_report_has_only_a_header():
    assert len(EMPTY.full().splitlines()) == 5


@pytest.mark.parametrize(
    ("other", "verdict", "ratio"),
    [
        (TimeReport(30.0, 21.0, 40.0), Verdict.FASTER, 1.5),
        (TimeReport(30.0, 20.5, 40.0), Verdict.EVEN, None),
        (TimeReport(20.0, 19.0, 22.0), Verdict.EVEN, None),
        (TimeReport(10.0, 9.0, 17.0), Verdict.SLOWER, 0.5),
        (TimeReport(failure="it died"), None, None),
    ],
)
def test_a_verdict_follows_from_the_quartiles(other, verdict, ratio):
    ours = TimeReport(20.0, 18.0, 20.5, 20, "wall")
    assert ours.verdict(other) is verdict
    assert ours.ratio(other) == ratio


def test_times_that_are_not_told_apart_save_nothing():
    even = {**REPORT.times, "unfused": TimeReport(1600.0, 1525.0, 1700.0, 20, "kernel")}
    for shown in (str(replace(REPORT, times=even)), replace(REPORT, times=even).full()):
        (row,) = (line for line in shown.splitlines() if line.startswith("time  "))
        assert row.endswith("no difference")
        assert "x" not in row
    assert replace(REPORT, times=even).to_json()["times"]["unfused"]["verdict"] == "no difference"


def test_json_says_what_the_quartiles_allow():
    times = REPORT.to_json()["times"]
    assert times["unfused"]["verdict"] == "faster"
    assert times["unfused"]["ratio"] == 1620.0 / 1526.4
    assert "verdict" not in times["fused"]


def large_report():
    """More than a screen: long names, many groups, peers and refusals."""
    groups = []
    for n in range(60):
        times = {"measured_us": float(n), "measured": TimeReport(n, 0.9 * n, 1.1 * n, 20, "wall")}
        name = f"{n}_{'x' * 90}"
        groups.append(replace(NORM, name=name, ops=(*NORM.ops, name), label="y" * 90, **times))
    times = {f"compiler_{'y' * 60}_{n}": TimeReport(1e3 * n, 9e2 * n, 2e3 * n) for n in range(9)}
    refusals = [replace(REFUSAL, code="undecided", why="z" * 200)] * 50
    times = REPORT.times | times
    return replace(REPORT, groups=tuple(groups), refusals=tuple(refusals), times=times)


@pytest.mark.parametrize("report", [EMPTY, REPORT, large_report()], ids=["empty", "two", "large"])
@pytest.mark.parametrize("model", [None, "--demo", "a/" * 40 + "model.onnx"])
def test_the_first_screen_is_a_screen(report, model):
    lines = screen(report, model).splitlines()
    assert len(lines) <= LINES == 50
    assert max(map(len, lines)) <= COLUMNS == 100


def test_the_first_screen_has_times_a_verdict_the_top_ten_and_hints():
    shown = screen(large_report(), "--demo")
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "unfused 1.62 ms 1.61 ms - 1.63 ms 1.06x faster" in lines
    (verdict,) = (line for line in lines if line.startswith("verdict: "))
    assert verdict.startswith("verdict: faster than unfused, compiler_")
    start = next(i for i, line in enumerate(lines) if line.startswith("what takes most"))
    assert lines[start].endswith("measured quartiles of all")
    tops = [line[:3] for line in lines[start + 1 : start + 11]]
    assert tops == [f"{n}_" for n in range(59, 49, -1)]
    assert lines[start + 11] == "50 other kernels: 69%"
    assert lines[start + 12] == "medians of 20 calls, each launch by itself"
    assert "python -m tvm_fusion compile --demo --full" in shown
    assert "times the 50 fusions in doubt" in shown


def test_groups_with_one_kernel_are_one_row_called_after_their_modules():
    layers = [
        replace(
            MATMUL,
            label=f"layers.{n}.mlp: matmul, gelu",
            modules=(f"layers.{n}", f"layers.{n}.mlp.up"),
            same_as=None if n == 0 else 0,
        )
        for n in range(12)
    ]
    shown = screen(replace(REPORT, groups=(*layers, NORM)))
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert "layers.*.mlp.up x12 gemm matmul, gelu 18 ms 100%" in rows
    assert "fused_add_rms_norm row rms_norm 26.4 us 0%" in rows


def test_a_check_that_compared_no_number_says_so():
    nothing = replace(REPORT, verify=Verification(True, 0.0, 1.0))
    assert "no number was compared" in str(nothing)
    some = replace(REPORT, verify=Verification(True, 1e-7, 0.25))
    assert "worst error 1e-07; 25.00% of an output is NaN or infinite, in float64 too" in str(some)


def test_sizes_that_predictions_assume_are_shown():
    assert "assumed   batch = 128" in str(replace(REPORT, assumed={"batch": 128}))


def test_a_peer_without_a_time_says_why_on_the_first_screen():
    times = REPORT.times | {"torch": TimeReport(failure="ImportError: no torch here")}
    assert "torch eager has no time: ImportError: no torch here" in str(
        replace(REPORT, times=times)
    )


def test_printing_a_report_gives_the_first_screen_and_says_how_to_get_the_rest():
    assert str(REPORT) == screen(REPORT)
    assert "print(report.full())" in str(REPORT)


def test_long_names_are_clipped():
    shown = replace(REPORT, groups=(replace(NORM, name="x" * 90),)).full()
    assert "x" * 37 + "..." in shown
    assert "x" * 38 not in shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1 kB"),
        (5e15, "5000 TB"),
        (1.5e6, "1.5 MB"),
    ],
)
def test_sizes_are_scaled(count, shown):
    assert text.format_bytes(count) == shown


@pytest.mark.parametrize(
    ("time_us", "shown"),
    [(None, "-"), (float("nan"), "-"), (0.25, "0.25 us"), (1000.0, "1 ms"), (2.5e9, "2500 s")],
)
def test_times_are_scaled(time_us, shown):
    assert text.format_time(time_us) == shown


def test_a_file_gets_plain_text():
    file = io.StringIO()
    text.show(REPORT, file)
    assert file.getvalue() == REPORT.full() + "\n"


def test_a_terminal_gets_a_ruled_table():
    file = Terminal()
    text.show(REPORT, file)
    assert "───" in file.getvalue()
    assert "RECOMPUTE: exp, matmul" in file.getvalue()


def test_a_terminal_without_rich_gets_plain_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    file = Terminal()
    text.show(REPORT, file)
    assert file.getvalue() == REPORT.full() + "\n"


def test_the_text_names_the_rewrites_of_the_graph():
    rewritten = replace(REPORT, plan={**REPORT.plan, "rewrites": ["fold_factors", "pad_depth"]})
    assert "rewritten fold_factors, pad_depth" in text.render(rewritten).splitlines()
    assert "rewritten" not in text.render(REPORT)


# ---- what would turn a refusal


@pytest.mark.parametrize(
    ("code", "numbers", "said"),
    [
        (
            "not_profitable",
            {"together_us": 50.0, "apart_us": 45.0, "launch_us": 4.0},
            "none: 5 us faster apart; pays if the joined kernel took 10.0% less than predicted",
        ),
        (
            "not_profitable",
            {"together_us": 40.0, "apart_us": 45.0, "launch_us": 4.0},
            "pays by itself (5 us), but less than what was fused instead",
        ),
        ("recompute", {"factor": 4096.0, "allowed": 4.0}, "max_recompute = 4096 (now 4)"),
        ("group_size", {"ops": 80.0, "allowed": 64.0}, "max_group_ops = 80 (now 64)"),
        ("parameter_bytes", {"bytes": 4096.0, "allowed": 4000.0}, "model: read and write fewer"),
    ],
)
def test_the_number_that_would_turn_a_refusal_is_told(code, numbers, said):
    assert said in flip(code, numbers)


@pytest.mark.parametrize("code", [c.value for c in RefusalCode])
def test_every_refusal_has_one_action(code):
    """Without numbers: what to do, and no number is made up."""
    kind, _, said = flip(code, {}).partition(": ")
    assert kind in KINDS
    assert said
    assert not any(c.isdigit() for c in said)


NUMBERED = {
    RefusalCode.NOT_PROFITABLE: {"together_us": 50.0, "apart_us": 45.0, "launch_us": 4.0},
    RefusalCode.UNDECIDED: {"together_us": 40.0, "apart_us": 45.0},
    RefusalCode.SLOWER: {"together_us": 50.0, "apart_us": 45.0, "error_us": 0.1},
    RefusalCode.RECOMPUTE: {"factor": 16.0, "allowed": 4.0},
    RefusalCode.GROUP_SIZE: {"ops": 80.0, "allowed": 64.0},
    RefusalCode.PARAMETER_BYTES: {"bytes": 4096.0, "allowed": 4000.0},
    RefusalCode.SEVERAL_CONTRACTIONS: {"products": 9.0, "allowed": 8.0},
    RefusalCode.SPACE_MISMATCH: {"columns": 9.0, "least": 32.0, "most": 8192.0},
    RefusalCode.REDUCTION: {"reducing": 2.0},
}


@pytest.mark.parametrize("code", NUMBERED)
def test_refusals_that_rest_on_a_number_name_it(code):
    kind, _, said = flip(code.value, NUMBERED[code]).partition(": ")
    assert kind in KINDS
    assert any(c.isdigit() for c in said)


@pytest.mark.parametrize(
    ("code", "numbers", "said"),
    [
        (
            "not_profitable",
            {"together_us": 98.5, "apart_us": 100.0, "launch_us": 4.0, "min_gain": 0.02},
            "taken with min_gain = 0.015 or less (now 0.02)",
        ),
        ("not_profitable", {"waves_together": 3, "waves_apart": 2}, "fewer than 2 waves"),
        (
            "several_contractions",
            {"shortest": 64, "longest": 1024, "allowed": 128},
            "longest sum had 128 terms (now 1024)",
        ),
        ("undecided", {"budget_s": 60.0}, "measure_budget_s above 60"),
        ("space_mismatch", {"columns": 9.0, "least": 32, "most": 8192}, "32 to 8192 elements"),
    ],
)
def test_the_number_is_that_of_the_reason(code, numbers, said):
    assert said in flip(code, numbers)


def test_an_unknown_code_is_an_error():
    with pytest.raises(KeyError):
        flip("no such code", {})


@pytest.mark.parametrize("key", ["random:1:12", "random:3:12", "random-small:2:14"])
def test_each_refusal_of_a_plan_says_what_would_turn_it(key):
    hw = load_profile("h200")
    _, graph = graph_of(key, hw)
    refusals = decide(graph, hw, load_policy()).refusals
    assert refusals
    for refusal in refusals:
        kind, _, said = flip(refusal.code.value, dict(refusal.numbers)).partition(": ")
        assert kind in KINDS
        assert any(c.isdigit() for c in said) is bool(refusal.numbers), (refusal, said)


def test_a_refusal_ends_with_the_number_that_would_turn_it():
    refusal = replace(REFUSAL, flip="allowed from max_recompute = 4096 (now 4)")
    shown = replace(REPORT, refusals=(refusal,)).full()
    assert "(factor = 4096); allowed from max_recompute = 4096 (now 4)" in shown


def test_kernels_for_ranges_of_a_size_are_listed():
    group = replace(REPORT.groups[0], versions=("up to 64", "beyond"))
    said = "a kernel for each range of the symbolic size:"
    assert said not in text.render(REPORT)
    lines = text.render(replace(REPORT, groups=(group,))).splitlines()
    assert lines[lines.index(said) + 1].endswith(": up to 64, beyond")


def test_it_says_how_many_launches_begin_early():
    group = replace(REPORT.groups[0], early=True, launches=2)
    said = "launches begin before the one in front has ended, and wait for it"
    assert said not in text.render(REPORT)
    shown = text.render(replace(REPORT, groups=(group, *REPORT.groups[1:])))
    assert f"\n2 of {REPORT.launches.fused} {said}" in shown
