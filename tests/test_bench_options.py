"""The suites on the command line, joined results, and the table."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tvm_fusion import cli
from tvm_fusion.bench import prepare, record, suite, workloads
from tvm_fusion.bench.options import names_of, peers_of
from tvm_fusion.bench.record import compare, empty_row, merge, summary
from tvm_fusion.bench.run import run_suite
from tvm_fusion.bench.small import batch_times
from tvm_fusion.bench.table import table
from tvm_fusion.errors import InputError

TINY = ["--target", "llvm", "--scale", "0.01", "--repeats", "3"]


@pytest.mark.parametrize(
    ("text", "peers"),
    [
        (None, ("torch", "torch.compile", "torch.max-autotune", "jax", "tvm")),
        ("torch,jax,tvm", ("torch", "torch.compile", "torch.max-autotune", "jax", "tvm")),
        ("torch.eager, tvm", ("torch", "tvm")),
        ("tvm,torch.max-autotune,tvm", ("tvm", "torch.max-autotune")),
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
        (["bench"], "one of the arguments model --demo --suite"),
        (["bench", "--suite", "memroy"], "did you mean 'memory'?"),
        (["bench", "--suite", "memory", "--only", "softmux"], "did you mean 'softmax'?"),
        (["bench", "--suite", "memory", "--only", "rope"], "'rope' is no workload of memory"),
        (["bench", "--suite", "memory", "--peers", "torhc"], "did you mean 'torch'?"),
        (["bench", "--suite", "memory", "--scale", "0"], "--scale: expected a number above 0"),
        (["bench", "--suite", "memory", "--repeats", "0"], "--repeats: expected 1 or more"),
        (["bench", "--suite", "memory", "--workers", "-1"], "--workers: expected 0 or more"),
        (["bench", "--suite", "memory", "--dtype", "half"], "unknown dtype 'half'"),
        (["bench", "--suite", "memory", "--policy", "default"], "--policy is for a model"),
        (["bench", "--suite", "memory", "--demo"], "not allowed with argument"),
        (["bench", "--demo", "--peers", "jax"], "--peers is for a suite"),
        (["bench", "--merge", "nowhere.json"], "cannot read nowhere.json"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(suite, "measure", lambda *_: pytest.fail("it began"))
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[-1]


def test_the_suites_are_listed_with_their_workloads(capsys):
    assert cli.main(["bench", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"memory_more ({len(workloads.SUITES['memory_more'])})" in lines
    assert "    quantise_fp8 (bfloat16)" in lines


def test_a_suite_prints_a_table_and_writes_its_result(capsys, tmp_path):
    out = tmp_path / "rows.json"
    arguments = ["--suite", "memory", "--only", "chain4,softmax", "--peers", "torch.eager"]
    assert cli.main(["bench", *arguments, *TINY, "--out", str(out)]) == 0
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
    assert cli.bench_main(["softmax", "--peers", "none", *TINY, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["rows"][0]["name"] == "softmax"


def test_the_module_of_the_benchmark_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "tvm_fusion.bench", "--list"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
    )
    assert done.stdout.startswith("memory (12)\n")


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
    assert cli.main(["bench", "--merge", *paths, "--out", str(out)]) == 0
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
    times = batch_times({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, 5)
    assert times.keys() == {"a", "b"}
    assert "".join(calls) == "aaaaabbbbb" * 3  # the first round warms up


def test_workloads_are_compiled_ahead_in_processes_and_failures_named():
    failures = prepare.prepare(["chain4", "no_such"], "llvm", ("tvm", "jax"), None, 0.01, 1)
    assert list(failures) == ["no_such"]
    assert "unknown workload" in failures["no_such"]
