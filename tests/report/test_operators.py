"""The command that shows which operators are converted."""

import json

import pytest

from tvm_fusion import cli
from tvm_fusion.frontends.coverage import By, Row, counted, onnx_rows, torch_rows

pytest.importorskip("onnx")
torch = pytest.importorskip("torch")


def test_each_core_operator_of_torch_has_a_row_in_order():
    rows = torch_rows()
    names = [row.name for row in rows]
    assert len(names) == len(set(names)) > 150
    assert [name.split(".")[1] for name in names] == sorted(name.split(".")[1] for name in names)
    by = {row.name: row.by for row in rows}
    assert by["aten.add.Tensor"] is By.OURS
    assert by["aten.abs.default"] is By.TVM
    assert by["aten.rand.default"] is By.RANDOM
    assert by["aten.nonzero.default"] is By.OF_VALUES
    assert {by[f"aten.{name}"] for name in ("convolution_backward.default", "atan2.out")} == {
        By.DEFINITION
    }
    assert By.NOBODY not in by.values()


def test_each_operator_of_onnx_has_a_row():
    rows = {row.name: row for row in onnx_rows()}
    assert rows["Gemm"].by is By.TVM
    assert rows["Gemm"].opsets
    assert {rows[name].by for name in ("LSTM", "QLinearConv", "IsInf")} == {By.OURS}
    assert {rows[name].by for name in ("Celu", "Attention")} == {By.DEFINITION}
    assert rows["RandomNormal"].by is By.RANDOM
    assert rows["StringSplit"].by is By.NOBODY


def test_the_command_prints_a_line_each_and_the_sums(capsys):
    assert cli.main(["operators", "--onnx"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == len(onnx_rows())
    assert last == f"{len(lines)} operators: {counted(onnx_rows())}"
    assert cli.main(["operators", "--torch", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [row.name for row in torch_rows()]
    assert cli.main(["operators"]) == 2  # of one framework


def test_rows_are_counted_by_kind():
    rows = [Row("a", By.TVM), Row("b", By.OURS), Row("c", By.TVM)]
    assert counted(rows) == "1 ours, 2 TVM's"
