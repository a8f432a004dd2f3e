"""The suites on the command line, joined results, and the table."""

import copy
import json
import runpy
import sys
from pathlib import Path

import pytest

from tvm_fusion.config import resolve_target
from tvm_fusion.errors import InputError

from . import record, workloads
from .__main__ import main
from .peers.names import peers_of
from .record import compare, empty_row, merge, summary
from .rows import prepare, together
from .rows.setup import Setup
from .rows.small import batch_times
from .run import run_suite
from .table import table
from .workloads import names_of

TINY = ["--target", "llvm", "--scale", "0.01", "--repeats", "3"]


@pytest.mark.parametrize(
    ("text", "peers"),
    [
        (None, ("torch", "torch.compile", "torch.max-autotune", "sdpa", "flex", "jax", "tvm")),
        ("torch,jax,tvm", ("torch", "torch.compile", "torch.max-autotune", "jax", "tvm")),
        ("torch.eager, tvm", ("torch", "tvm")),
        ("tvm,torch.max-autotune,tvm", ("tvm", "torch.max-autotune")),
        ("torch.eager,unfused,cublas", ("torch", "unfused", "cublas")),
        ("none", ()),
    ],
)
def test_torch_stands_for_eager_and_both_of_its_compilers(text, peers):
    assert peers_of(text) == peers


@pytest.mark.parametrize(
    ("given", "only", "names"),
    [
        ("memory", None, workloads.SUITES["memory"]),
        ("memory", "softmax,chain4", ("chain4", "softmax")),
        ("rope,small", None, ("rope", *workloads.SUITES["small"])),
    ],
)
def test_a_suite_is_named_whole_or_in_part(given, only, names):
    assert names_of(given, only) == names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --suite --list --merge is required"),
        (["--suite", "memroy"], "did you mean 'memory'?"),
        (["--suite", "memory", "--only", "softmux"], "did you mean 'softmax'?"),
        (["--suite", "memory", "--only", "rope"], "'rope' is no workload of memory"),
        (["--suite", "memory", "--peers", "torhc"], "did you mean 'torch'?"),
        (["--suite", "memory", "--scale", "0"], "--scale: expected a number above 0"),
        (["--suite", "memory", "--repeats", "0"], "--repeats: expected 1 or more"),
        (["--suite", "memory", "--workers", "-1"], "--workers: expected 0 or more"),
        (["--suite", "memory", "--dtype", "half"], "unknown dtype 'half'"),
        (["--suite", "gemm", "--patience", "0"], "--patience: expected more than 0"),
        (["--suite", "gemm", "--plain-peers", "cublsa"], "did you mean 'cublas'?"),
        (["--suite", "cpu", "--instructions", "sse"], "'sse' is unknown; there are avx2"),
        (["--suite", "memory", "--instructions", "avx2"], "in processes of their own"),
        (["--list", "--suite", "memory"], "not allowed with argument"),
        (["--suite", "cpu", "--full"], "unrecognized arguments: --full"),
        (["--merge", "nowhere.json"], "cannot read nowhere.json"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(together, "measure", lambda *_: pytest.fail("it began"))
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[-1]


def test_the_suites_are_listed_with_their_workloads(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"memory_more ({len(workloads.SUITES['memory_more'])})" in lines
    assert "    quantise_fp8 (bfloat16)" in lines


def test_a_suite_prints_a_table_and_writes_its_result(capsys, tmp_path):
    out = tmp_path / "rows.json"
    arguments = ["--suite", "memory", "--only", "chain4,softmax", "--peers", "torch.eager"]
    assert main([*arguments, *TINY, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    written = json.loads(out.read_text())
    assert [row["name"] for row in written["rows"]] == ["chain4", "softmax"]
    assert written["summary"]["rows"] == 2
    for row in written["rows"]:
        assert row["best_peer"] == "torch"
        assert row["best_peer_ratio"] == row["peers_us"]["torch"] / row["ours_us"]
        assert row["limit_share"] == row["limit_us"] / row["ours_us"]
    assert "best peer / ours over 2 rows: geometric mean" in shown


def test_with_json_the_result_is_the_one_object_on_stdout(capfd):
    assert main(["--suite", "softmax", "--peers", "none", *TINY, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["rows"][0]["name"] == "softmax"


def test_the_module_of_the_benchmark_runs_as_a_program(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tests.benchmarks", "--list"])
    monkeypatch.delitem(sys.modules, "tests.benchmarks.__main__")  # imported above
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("tests.benchmarks", run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out.startswith("memory (12)\n")


def row_of(name, ours, failures=(), **peers):
    row = empty_row(name, tuple(peers))
    row |= {"ours_us": ours, "limit_us": 1.0, "failures": dict.fromkeys(failures, "why")}
    row["peers_us"] |= peers
    compare(row)
    return row


def test_the_best_peer_is_the_fastest_that_was_right():
    row = row_of("a", 2.0, failures=("tvm",), torch=6.0, jax=4.0, tvm=1.0)
    assert (row["best_peer"], row["best_peer_ratio"], row["limit_share"]) == ("jax", 2.0, 0.5)
    wrong = row_of("b", 2.0, failures=("tvm_fusion",), torch=6.0)
    assert (wrong["best_peer"], wrong["best_peer_ratio"], wrong["limit_share"]) == (None,) * 3


def test_a_summary_names_the_rows_that_have_no_ratio():
    rows = [row_of("a", 1.0, torch=4.0), row_of("b", None, torch=1.0), row_of("c", 1.0, jax=1.0)]
    found = summary(rows)
    assert found == {"geomean_ratio": 2.0, "least_ratio": 1.0, "rows": 2, "missing": ["b"]}
    assert summary(rows[1:2])["geomean_ratio"] is None


@pytest.fixture
def result():
    rows = [row_of("a", 1.0, torch=4.0), row_of("b", 2.0, failures=("torch",), torch=1.0)]
    head = record.header("nvidia_h200", False, 1.0, 20)
    return head | {"rows": rows, "summary": summary(rows)}


def files_of(folder, *results):
    paths = [folder / f"{number}.json" for number in range(len(results))]
    for path, result in zip(paths, results, strict=True):
        path.write_text(json.dumps(result))
    return [str(path) for path in paths]


def test_results_of_one_run_are_joined_and_the_later_row_counts(result, tmp_path, capsys):
    later = copy.deepcopy(result)
    later["rows"] = [row_of("b", 1.0, torch=9.0), row_of("c", 1.0, torch=2.0)]
    out = tmp_path / "joined.json"
    paths = files_of(tmp_path, result, later)
    assert main(["--merge", *paths, "--out", str(out)]) == 0
    joined = json.loads(out.read_text())
    assert [(row["name"], row["best_peer_ratio"]) for row in joined["rows"]] == [
        ("a", 4.0),
        ("b", 9.0),
        ("c", 2.0),
    ]
    assert joined["summary"]["rows"] == 3
    assert "over 3 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value"), [("device", "another"), ("date", "2020-01-01"), ("scale", 0.5)]
)
def test_results_of_other_machines_days_and_sizes_do_not_join(key, value, result, tmp_path):
    with pytest.raises(InputError, match=f"does not go with .*{key} is"):
        merge(files_of(tmp_path, result, result | {key: value}))


def test_a_file_that_is_no_result_is_refused(tmp_path):
    (path,) = files_of(tmp_path, {"rows": []})
    with pytest.raises(InputError, match="no result of a suite"):
        merge([path])
    Path(path).write_text("{")
    with pytest.raises(InputError, match="is no JSON"):
        merge([path])


def test_the_table_marks_wrong_peers_and_names_their_failures(result):
    lines = table(result).splitlines()
    assert lines[2].split()[-4:] == ["4.00x", "1.00", "-", "-"]
    assert "1.0!" in lines[3]
    assert lines[-2:] == ["not in the mean: b", "b: torch: why"]


def beside(name, plain=False, **times):
    row = empty_row(name, ("torch", "unfused", "cublas"), plain)
    row |= {"ours_us": 2.0, "limit_us": 1.0} | times
    row["peers_us"]["torch"] = 4.0
    compare(row)
    return row


def test_our_unfused_build_and_the_products_alone_are_no_peers():
    row = beside("a", unfused_us=1.0, cublas_us=3.0)
    assert row["peers_us"] == {"torch": 4.0}
    assert (row["best_peer"], row["best_peer_ratio"]) == ("torch", 2.0)
    assert (row["unfused_ratio"], row["cublas_ratio"]) == (0.5, 1.5)
    wrong = beside("a", unfused_us=1.0, failures={"unfused": "why"})
    assert (wrong["unfused_ratio"], wrong["cublas_ratio"]) == (None, None)


def test_the_table_shows_what_fusion_and_the_products_alone_are_compared_with():
    rows = [
        beside("a", plain=True, unfused_us=2.0, cublas_us=1.0),
        beside("b", plain=True, unfused_us=1.9, cublas_us=4.0),
        beside("c", unfused_us=4.0, cublas_us=1.0),
    ]
    head = record.header("nvidia_h200", False, 1.0, 20)
    lines = table(head | {"rows": rows, "summary": summary(rows)}).splitlines()
    headings = ["ours", "us", "unfused", "cublas", "torch", "best/ours", "unfused/ours"]
    assert lines[1].split()[4:] == [*headings, "cublas/ours", "of", "limit", "regs", "spill", "B"]
    cells = ["2.0", "2.0", "1.0", "4.0", "2.00x", "1.00x", "0.50x", "0.50", "-", "-"]
    assert lines[2].split()[4:] == cells
    assert lines[-5:] == [
        "unfused / ours over 3 rows: geometric mean 1.239x, least 0.95x (b)",
        "    below 0.98: b 0.95x",
        "cublas / ours over 2 rows of a product alone: geometric mean 1.000x, least 0.50x (a)",
        "    below 0.98: a 0.50x",
        "cublas / ours over 1 rows of products and more: geometric mean 0.500x, least 0.50x (c)",
    ]


def test_plain_products_may_have_fewer_peers(monkeypatch):
    monkeypatch.setattr(together, "measure", lambda name, setup: rows_of_setup(name, setup))
    names = ("gemm_256x1024x1024", "qkv")
    run = run_suite(names, ("torch", "tvm"), "llvm", plain_peers=("torch", "cublas"), scale=0.01)
    assert [list(row["peers_us"]) for row in run["rows"]] == [["torch"], ["torch", "tvm"]]


def rows_of_setup(name, setup):
    return empty_row(name, setup.peers_of(name))


def test_small_workloads_are_timed_by_plain_calls_and_bound_ones():
    names = workloads.SUITES["small"]
    (row,) = run_suite(names, ("torch", "tvm"), "llvm", scale=0.5, repeats=3)["rows"]
    assert row["failures"] == {}
    assert row["clock"] == "wall"
    assert 0 < row["ours_bind_us"] < row["ours_us"] * 2
    assert row["peers_us"].keys() == {"torch", "tvm"}
    assert row["best_peer_ratio"] > 0


def test_a_batch_is_timed_as_its_calls_back_to_back():
    calls = []
    given = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = batch_times(given, 2, 5)
    assert times.keys() == {"a", "b"}
    assert "".join(calls) == "aaaaabbbbb" * 3  # the first round warms up
    calls.clear()
    batch_times(given, 2, {"a": 1, "b": 4})
    assert "".join(calls) == "abbbb" * 3


def setup_of(*peers, **options):
    target, hw = resolve_target("llvm")
    return Setup("llvm", target, hw, peers, None, 0.01, 3, 0.1, **options)


# Always: suites in this process, and processes of their own (`bench/test_apart`).
@pytest.mark.nightly
def test_workloads_are_compiled_ahead_in_processes_and_failures_named(monkeypatch, tmp_path):
    setup = setup_of("tvm", "jax", "unfused", "cublas", patience_s=0.01)
    prepared = prepare.prepare(["chain4"], setup, 1, tmp_path)
    assert list(prepared.failures) == [("chain4", "tvm")]  # which takes longer than that
    assert prepared.given_up == prepared.failures
    assert prepare.Prepared({("chain4", "tvm"): "ValueError: another"}).given_up == {}
    monkeypatch.setattr(
        "tvm_fusion.flow.planned.Planned.of", lambda *_: pytest.fail("it compiles again")
    )
    row = together.measure("chain4", setup_of("unfused", saved=prepared.saved))
    assert row["failures"] == {}
    assert row["launches"] >= 1
    assert row["error"] < 1e-4
    assert row["unfused_us"] > 0


def test_a_peer_that_was_given_up_is_not_tried_again():
    setup = setup_of("torch", given_up={("chain4", "torch"): "TimeoutError: too long"})
    row = together.measure("chain4", setup)
    assert row["failures"] == {"torch": "TimeoutError: too long"}
    assert row["peers_us"] == {"torch": None}
    assert row["ours_us"] > 0
