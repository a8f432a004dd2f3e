"""ONNX operators that TVM's importer lacks, beside onnx.reference: each is other operators."""

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from tvm_fusion.errors import FrontendError
from tvm_fusion.frontends import load
from tvm_fusion.frontends.onnx.definitions import (
    defined_by_onnx,
    opsets_by_tvm,
    with_known_operators,
)
from tvm_fusion.frontends.onnx.expansions import EXPANSIONS
from tvm_fusion.frontends.onnx.recurrent import MOST_STEPS

from ..support.models import run_unfused

RNG = np.random.default_rng(0)


def floats(*shape) -> np.ndarray:
    return RNG.standard_normal(shape).astype("float32")


def model_of(node, inputs: dict, outputs: int, opset: int = 22) -> onnx.ModelProto:
    given = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in inputs.items()
    ]
    results = [onnx.ValueInfoProto(name=name) for name in node.output[:outputs]]
    graph = helper.make_graph([node], "g", given, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    return onnx.shape_inference.infer_shapes(model)


def check(op: str, inputs: dict, outputs: int = 1, opset: int = 22, **attributes) -> None:
    """A node alone, unfused, beside the reference."""
    names = ["y", "h", "c"][:outputs]
    node = helper.make_node(op, list(inputs), names, **attributes)
    model = model_of(node, {n: x for n, x in inputs.items() if n}, outputs, opset)
    expected = ReferenceEvaluator(model).run(None, {n: x for n, x in inputs.items() if n})
    for output, value in zip(model.graph.output, expected, strict=True):
        dtype = helper.np_dtype_to_tensor_dtype(value.dtype)
        output.CopyFrom(helper.make_tensor_value_info(output.name, dtype, value.shape))
    given = run_unfused(load(model), *(x for n, x in inputs.items() if n))
    for a, b in zip(given, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def recurrent(gates: int, directions: int = 1, **more) -> dict:
    """Inputs of 3 steps, a batch of 2, 4 features and 5 hidden ones."""
    return {
        "x": floats(3, 2, 4),
        "w": floats(directions, gates * 5, 4),
        "r": floats(directions, gates * 5, 5),
        "b": floats(directions, 2 * gates * 5),
    } | more


@pytest.mark.nightly
def test_a_recurrent_operator_starts_where_it_is_told_to():
    state = {"": None, "h0": floats(1, 2, 5), "c0": floats(1, 2, 5), "p": floats(1, 15)}
    check("LSTM", recurrent(4, **state), outputs=3, hidden_size=5)


@pytest.mark.nightly
def test_both_directions_of_a_recurrent_operator():
    check("GRU", recurrent(3, 2), 2, hidden_size=5, direction="bidirectional")


@pytest.mark.nightly
def test_sequences_may_be_shorter_than_the_longest():
    lengths = np.array([3, 1], "int32")
    node = helper.make_node("RNN", ["x", "w", "r", "b", "n"], ["y", "h"], hidden_size=5)
    inputs = recurrent(1, n=lengths)
    y, h = run_unfused(load(model_of(node, inputs, 2)), *inputs.values())
    one = {**inputs, "x": inputs["x"][:1, 1:], "n": lengths[1:]}
    alone = ReferenceEvaluator(model_of(node, one, 2)).run(None, {**one, "n": np.array([1], "i")})
    np.testing.assert_allclose(y[0, 0, 1:], alone[0][0, 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(h[:, 1:], alone[1], rtol=1e-4, atol=1e-5)
    assert not y[1:, 0, 1].any()  # behind the end of the second sequence


@pytest.mark.parametrize(
    ("attributes", "steps", "why"),
    [
        ({}, MOST_STEPS + 1, "or of more than 256 steps; export"),
        ({"activations": ["Affine"]}, 2, "activations of other kinds"),
    ],
)
def test_a_recurrent_operator_that_is_not_converted_says_why(attributes, steps, why):
    inputs = recurrent(1) | {"x": floats(steps, 2, 4)}
    node = helper.make_node("RNN", list(inputs), ["y"], hidden_size=5, **attributes)
    with pytest.raises(FrontendError, match=why):
        load(model_of(node, inputs, 1))


def test_products_of_quantised_numbers_with_a_scale_of_each_filter():
    inputs = {
        "x": RNG.integers(0, 255, (1, 2, 4, 4)).astype("uint8"),
        "xs": np.float32(0.03).reshape(()),
        "xz": np.uint8(7).reshape(()),
        "w": RNG.integers(-128, 127, (3, 2, 3, 3)).astype("int8"),
        "ws": np.array([0.02, 0.05, 0.01], "float32"),
        "wz": np.zeros(3, "int8"),
        "ys": np.float32(0.4).reshape(()),
        "yz": np.uint8(100).reshape(()),
        "bias": np.array([10, -20, 30], "int32"),
    }
    node = helper.make_node("QLinearConv", list(inputs), ["y"], pads=[1, 1, 1, 1])
    (y,) = run_unfused(load(model_of(node, inputs, 1)), *inputs.values())
    x = inputs["x"].astype("int64") - 7
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    whole = np.einsum("bchwij,fcij->bfhw", windows, inputs["w"].astype("int64"))
    whole += inputs["bias"][:, None, None]
    real = whole * (0.03 * inputs["ws"].astype("float64"))[:, None, None]
    expected = np.clip(np.rint(real / 0.4) + 100, 0, 255)
    assert np.abs(y.astype("int64") - expected).max() <= 1  # halves that float32 rounds elsewhere
    assert np.mean(y != expected) < 0.05


def test_other_operators():
    x = floats(2, 3)
    x[0, 0], x[1, 1] = np.inf, -np.inf
    check("IsInf", {"x": x}, detect_negative=0)
    check("IsInf", {"x": x}, detect_positive=0)
    check("Pow", {"x": np.array([2, 3], "int64"), "e": np.array([3.0, 2.0], "float32")})
    check("Pow", {"x": np.array([2, 3], "float32"), "e": np.array([3, 2], "int32")})
    check("LpNormalization", {"x": floats(3, 4)}, axis=0)
    node, x = helper.make_node("LpNormalization", ["x"], ["y"], p=1), floats(3, 4)
    result = run_unfused(load(model_of(node, {"x": x}, 1)), x)[0]
    np.testing.assert_allclose(result, x / np.abs(x).sum(-1, keepdims=True), rtol=1e-5)
    lengths = np.array([2, 3], "int64")
    check("ReverseSequence", {"x": floats(3, 2), "n": lengths}, batch_axis=1, time_axis=0)


def test_operators_that_onnx_defines():
    """One whose definition has a definition, one of numbers, and one of shapes."""
    scores, labels = floats(3, 5), np.array([1, 4, 0], "int64")
    check("SoftmaxCrossEntropyLoss", {"x": scores, "t": labels})
    check("Celu", {"x": floats(2, 3)}, alpha=2.0)
    inputs = {"x": floats(2, 3, 4), "s": floats(4)}
    check("LayerNormalization", inputs, outputs=3)
    assert {"Celu", "SoftmaxCrossEntropyLoss"} <= defined_by_onnx()
    assert defined_by_onnx().isdisjoint(opsets_by_tvm())


def test_a_model_without_such_operators_stays_as_it_is():
    model = model_of(helper.make_node("Relu", ["x"], ["y"]), {"x": floats(2)}, 1)
    assert with_known_operators(model) is model
    assert "Relu" not in EXPANSIONS
