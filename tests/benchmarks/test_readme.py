"""The README's results for CPUs are what the committed files hold."""

import json
from pathlib import Path

import pytest

from . import readme, workloads
from .readme import filled, table

ROOT = Path(__file__).resolve().parents[2]


def result_of(*rows):
    return {
        "device": "A CPU",
        "threads": 2,
        "date": "2026-11-24",
        "versions": {"torch": "2.14.1", "numpy": "2"},
        "command": "python -m tests.benchmarks --suite cpu --out x.json --threads 2",
        "rows": list(rows),
    }


def row_of(name, ours, **peers):
    best = min((us for us in peers.values() if us), default=None)
    ratio = best / ours if best and ours else None
    return {
        "name": name,
        "launches": 1,
        "ours_us": ours,
        "peers_us": peers,
        "best_peer_ratio": ratio,
    }


def test_a_table_names_machine_versions_and_command_and_its_worst_row():
    shown = table(result_of(row_of("a", 10.0, torch=40.04), row_of("b", 400.0, torch=100.0)))
    assert shown.splitlines() == [
        "A CPU, 2 threads, 2026-11-24, microseconds a call (torch 2.14.1); "
        "`python -m tests.benchmarks --suite cpu --threads 2`:",
        "",
        "| | launches | tvm_fusion | torch | best peer / ours |",
        "|---|---|---|---|---|",
        "| a | 1 | 10.0 | 40.0 | 4.00x |",
        "| b | 1 | 400 | 100 | 0.25x |",
        "",
        "All 2: 1.00x in the geometric mean, the least 0.25x (b), 1 below 1.",
    ]


def test_a_row_that_failed_has_no_numbers():
    assert "| a | 1 | - | 3.0 | - |" in table(result_of(row_of("a", None, torch=3.0)))
    assert "No row has a peer" in table(result_of(row_of("a", None, torch=3.0)))


def test_long_results_show_some_rows_of_each_family_and_the_mean_of_all():
    rows = [row_of(name, 1.0, torch=2.0) for name in workloads.SUITES["cpu"]]
    lines = table(result_of(*rows)).splitlines()
    assert [line.split()[1] for line in lines[4:-2]] == list(readme.SHOWN)
    assert lines[-1].startswith("All 40: 2.00x")


def test_blocks_are_made_anew_and_the_rest_stays(tmp_path):
    (tmp_path / "a.txt").write_text("a report\n")
    (tmp_path / "b.json").write_text(json.dumps(result_of(row_of("a", 1.0, torch=2.0))))
    text = "x\n<!-- from a.txt -->\nold\n<!-- end -->\ny\n<!-- from b.json -->\n<!-- end -->\nz\n"
    made = filled(text, tmp_path)
    assert made.startswith("x\n<!-- from a.txt -->\n```\na report\n```\n<!-- end -->\ny\n")
    assert "| a | 1 | 1.0 | 2.0 | 2.00x |" in made
    assert made.endswith("<!-- end -->\nz\n")
    assert filled(made, tmp_path) == made


def test_whole_calls_have_what_lies_outside_of_kernels_where_it_is_known(tmp_path):
    ran = {
        "name": "layer",
        "wall_us": {"torch": 40.0, "tvm_fusion": 10.0, "torch.reduce-overhead": 15.0},
        "kernel_us": {"tvm_fusion": 8.0},
        "outside_share": {"tvm_fusion": 0.1},
        "launches": {"tvm_fusion": 3.0},
        "errors": {"tvm_fusion": 0.002},
        "best_peer_ratio": 1.5,
    }
    failed = {"name": "other", "wall_us": {}, "errors": {}, "best_peer_ratio": None}
    result = result_of(ran, failed) | {"suite": "tensor_parallel"}
    (tmp_path / "a.json").write_text(json.dumps(result))
    made = filled("<!-- from a.json -->\n<!-- end -->\n", tmp_path)
    assert "| | tvm_fusion | eager | reduce-overhead | best peer / ours | our kernels |" in made
    assert "| layer | 10.0 | 40.0 | 15.0 | 1.50x | 8 | 3 | 10% | 2.0e-03 |" in made
    assert "| other | - | - | - | - | - | - | - | - |" in made
    assert "All 1: 1.50x in the geometric mean" in made
    known = ("name", "wall_us", "errors", "best_peer_ratio")
    rows = [{key: row[key] for key in known} for row in (ran, failed)]
    made = readme.calls(result_of(*rows) | {"suite": "real_models"})
    assert "| | tvm_fusion | eager | reduce-overhead | best peer / ours | error |" in made
    assert "| layer | 10.0 | 40.0 | 15.0 | 1.50x | 2.0e-03 |" in made


def test_an_overview_has_a_line_for_each_result(tmp_path):
    rows = [row_of("a", 1.0, torch=2.0), row_of("b", 1.0, torch=0.5), row_of("c", None, torch=1.0)]
    for name in ("cpu", "memory"):
        (tmp_path / f"{name}.json").write_text(json.dumps(result_of(*rows)))
    made = filled("<!-- from cpu.json memory.json -->\n<!-- end -->\n", tmp_path)
    line = "A CPU, 2 threads, 2026-11-24 | 2 | torch | 1.00x | 0.50x | 1 |"
    assert made.count(line) == 2
    assert f"| [{readme.WHAT['cpu']}](tutorials/pages/figures.md) | {line}" in made


def test_drawn_programs_have_a_line_for_each_class(tmp_path):
    names = ("held_scan_0_0", "held_scan_0_1", "held_row_work_summed_1_0")
    rows = [
        row_of(n, 1.0, torch=x) | {"launches": 2}
        for n, x in zip(names, (2.0, 0.5, 3.0), strict=True)
    ]
    for number, part in enumerate((rows[:2], rows[2:])):
        (tmp_path / f"held_classes_{number}.json").write_text(json.dumps(result_of(*part)))
    block = "<!-- from held_classes_0.json held_classes_1.json -->\n<!-- end -->\n"
    made = filled(block, tmp_path)
    assert "| scan | 2 | 2.0 | 1.00x | 0.50x | 1 |\n| row work summed | 1 | 2.0 | 3.00x |" in made
    assert "| all | 3 | 2.0 | 1.44x | 0.50x | 1 |" in made


def test_symbolic_programs_show_all_their_sizes_and_the_means_of_all_programs(tmp_path):
    row = {
        "sizes": [1, 7],
        "us": {"tvm_fusion": [2.0, 200.4], "tvm_fusion.for_size": [2.0, None], "torch": [8.0, 300]},
        "once_ratio": 1.0,
        "once_ratios": [1.0, None],
        "best_peer_ratio": 2.45,
        "best_peer_ratios": [4.0, 1.5],
    }
    rows = [{"name": "swiglu", **row}, {"name": "rows", **row}]
    result = result_of(*rows) | {"suite": "symbolic"}
    result["versions"] |= {"tvm_fusion": "1.0"}
    (tmp_path / "a.json").write_text(json.dumps(result))
    made = filled("<!-- from a.json -->\n<!-- end -->\n", tmp_path)
    assert "(tvm_fusion 1.0, torch 2.14.1)" in made
    cells = "| swiglu | 1 / 7 | 2.0 / 200 | 2.0 / - | - / - | 8.0 / 300 | 1.00x | 2.45x |"
    assert [line for line in made.splitlines() if "/ 7" in line] == [cells]
    assert "All 2 programs, 2 sizes: compiled once 1.00x" in made
    assert "2.45x as long, 1.50x at least." in made


def test_compiling_has_a_line_for_each_model_and_means_of_what_both_have(tmp_path):
    both = {"cold": {"first_s": 4.0, "host_mib": 300.2}, "warm": {"first_s": 1.0, "host_mib": 9.0}}
    cold = {"cold": {"first_s": 8.0, "host_mib": 200.0}}
    rows = [
        {"name": "gpt2", "tvm_fusion": both, "inductor": both},
        {"name": "bert", "date": "2026-11-01", "tvm_fusion": both, "inductor": cold},
        {"name": "net", "tvm_fusion": both, "inductor": {"cold": None}},
    ]
    (tmp_path / "a.json").write_text(json.dumps(result_of(*rows) | {"suite": "compile_time"}))
    made = filled("<!-- from a.json -->\n<!-- end -->\n", tmp_path)
    assert "| gpt2 | 4.0 | 4.0 | 1.0 | 1.0 | 1.00x | 300 |" in made
    assert "| bert (2026-11-01) | 4.0 | 8.0 | 1.0 | - | 0.50x | 300 |" in made
    assert "| net | 4.0 | - | 1.0 | - | - | 300 |" in made
    assert "cold 0.71 (2 models, 1.00 at most), warm 1.00 (1 models, 1.00 at most)." in made


@pytest.mark.parametrize(
    ("name", "result"),
    [("README.md", "gemm.json"), ("tutorials/pages/figures.md", "cpu.json -->")],
)
def test_what_is_committed_is_what_the_files_hold(name, result):
    text = (ROOT / name).read_text()
    assert f"tests/results/{result}" in text
    assert filled(text, ROOT) == text
