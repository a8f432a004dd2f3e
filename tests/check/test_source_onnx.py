"""A compiled ONNX model is held against onnx.reference: another function is found and named."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

import tvm_fusion
from tvm_fusion.check import source_onnx
from tvm_fusion.errors import VerificationError

WEIGHT = np.random.default_rng(0).standard_normal((4, 8)).astype("float32")


def model(*nodes, out=(3, 8)) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, (3, 4))]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, out)]
    weights = [onnx.numpy_helper.from_array(WEIGHT, "w")]
    graph = helper.make_graph(list(nodes), "g", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


NET = (
    helper.make_node("MatMul", ["x", "w"], ["m"], name="/layer/MatMul"),
    helper.make_node("Tanh", ["m"], ["t"], name="/layer/Tanh"),
    helper.make_node("Softmax", ["t"], ["y"], name="/Softmax"),
)


@pytest.fixture
def wrong_tanh(monkeypatch):
    def convert(cls, builder, inputs, attributes, parameters):
        return relax.op.sigmoid(inputs[0])

    for name in [n for n in vars(onnx_frontend.Tanh) if n.startswith("_impl_v")]:
        monkeypatch.setattr(onnx_frontend.Tanh, name, classmethod(convert))


def test_the_error_beside_the_reference_is_in_the_report(tmp_path):
    onnx.save(model(*NET), tmp_path / "net.onnx")
    compiled = tvm_fusion.compile(tmp_path / "net.onnx", "llvm")
    assert 0 < compiled.report.verify.source_error < 1e-5
    assert "beside onnx.reference" in str(compiled.report.full())


def test_the_node_that_differs_is_named(wrong_tanh):
    with pytest.raises(
        VerificationError, match=r"onnx\.reference computes: .*Tanh \(/layer/Tanh\)"
    ):
        tvm_fusion.compile(model(*NET), "llvm")


@pytest.mark.nightly
def test_choices_that_float64_makes_as_the_reference_are_no_other_function(monkeypatch):
    monkeypatch.setattr(source_onnx, "_error", lambda given, expected: 1.0)
    assert tvm_fusion.compile(model(*NET), "llvm").report.verify.source_error == 1.0


@pytest.mark.parametrize(
    ("nodes", "limit", "why"),
    [
        (NET, {"MOST_BYTES": 10}, "its file has more than 0 MB"),
        (NET, {"PRODUCT_S": 1.0}, "it would take about 96 s"),
        (
            (helper.make_node("RandomNormalLike", ["x"], ["y"]),),
            {},
            "it draws random numbers",
        ),
        (
            (
                helper.make_node("Unsqueeze", ["x", "axes"], ["u"]),
                helper.make_node("MaxPool", ["u"], ["y"], kernel_shape=[2]),
            ),
            {"WINDOW_S": 1.0},
            "it would take about 18 s",
        ),
    ],
)
def test_what_is_not_compared_is_told(monkeypatch, nodes, limit, why):
    for name, value in limit.items():
        monkeypatch.setattr(source_onnx, name, value)
    out = (3, 1, 3) if nodes[-1].op_type == "MaxPool" else (3, 8)
    assert source_onnx._not_compared(model(*nodes, out=out)) == why


def test_an_operator_that_the_reference_lacks_is_told(monkeypatch):
    class Lacks:
        def __init__(self, *_):
            raise RuntimeError("no Tanh")

    monkeypatch.setattr(source_onnx, "_Evaluated", Lacks)
    found = tvm_fusion.compile(model(*NET), "llvm").report.verify
    assert (found.source_error, found.source_note) == (None, "no Tanh: not compared")
