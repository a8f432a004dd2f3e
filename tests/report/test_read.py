"""A report's JSON is read back as the report that it was made of."""

import json
from dataclasses import replace

import pytest

from tvm_fusion import cli
from tvm_fusion.errors import InputError
from tvm_fusion.plan.search.bound import Bound
from tvm_fusion.report.read import read_json, report_of
from tvm_fusion.report.screen import FunctionReports, Report

from .made_reports import layered_report
from .test_report import REPORT


@pytest.fixture
def made() -> Report:
    return report_of(layered_report(2))


def jsoned(report: Report | FunctionReports) -> dict:
    return json.loads(json.dumps(report.to_json(sources=True), allow_nan=False))


@pytest.mark.parametrize("bound", [None, Bound(10.0, 12.0, 40)])
def test_what_is_read_gives_the_same_json_and_the_same_text(made, bound):
    for report in (made, REPORT, FunctionReports({"a": made, "b": REPORT, "c": "text", "d": None})):
        if isinstance(report, Report):
            report = replace(report, bound=bound)
        again = report_of(jsoned(report))
        assert jsoned(again) == jsoned(report)
        if isinstance(report, Report):
            assert again.full() == report.full()
            assert str(again) == str(report)


def test_parts_of_a_report_are_values_again(made):
    assert made.groups[0].measured.verdict(made.groups[1].measured) is not None
    assert made.graph.tensors[0].shape == (1, 512, 768)
    assert made.device.kind == "cuda"
    assert made.repeats[0].count == 2
    assert made.launches.ratio == 46 / 16


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON, so no report"),
        ("[]", "is no report"),
        ('{"plan": {}}', "is no report"),
        ('{"groups": [], "version": 2}', "of version 2, and this package reads version 3"),
    ],
)
def test_other_files_are_refused(tmp_path, text, why):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(InputError, match=why):
        read_json(path)
    with pytest.raises(InputError, match="there is no such report file"):
        read_json(tmp_path / "nothing.json")


@pytest.mark.parametrize("broken", [{"groups": 3}, {"launches": 3}, {"groups": [{}]}])
def test_a_report_that_is_not_whole_is_refused(broken):
    with pytest.raises(InputError, match="no whole report"):
        report_of(layered_report(1) | broken)


def test_the_command_shows_a_report_and_writes_its_page(tmp_path, capsys):
    file, page = tmp_path / "report.json", tmp_path / "page.html"
    file.write_text(json.dumps(layered_report(2)))
    assert cli.main(["report", str(file)]) == 0
    first = capsys.readouterr().out
    assert "16" in first
    assert cli.main(["report", str(file), "--full"]) == 0
    assert "not fused (8 epilogue, 8 recompute):" in capsys.readouterr().out
    assert cli.main(["report", str(file), "--html", str(page)]) == 0
    assert capsys.readouterr().out == ""
    assert page.read_text().startswith("<!doctype html>")
    assert cli.main(["report", str(tmp_path / "none.json")]) == 2
    assert "there is no such report file" in capsys.readouterr().err


def test_a_report_writes_its_page_with_the_kernels_text(made, tmp_path):
    text = made.sources()["fused_layer0_qkv"]["tensor_ir"].splitlines()[1]
    for report in (made, FunctionReports({"main": made})):
        report.write_html(tmp_path / "page.html")
        assert text in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_functions_are_shown_one_after_another(tmp_path, capsys):
    file = tmp_path / "report.json"
    functions = {"prefill": layered_report(1), "loaded": "as text", "plain": None}
    file.write_text(json.dumps({"version": 3, "functions": functions}))
    assert cli.main(["report", str(file)]) == 0
    shown = capsys.readouterr().out
    assert shown.index("function prefill") < shown.index("function loaded\nas text")
    assert "function plain\nno report" in shown
