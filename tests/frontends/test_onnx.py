"""ONNX models: real ones, symbolic dimensions, and broken files."""

import sys

import numpy as np
import onnx
import pytest
import tvm
from google.protobuf.message import EncodeError
from onnx import TensorProto, helper
from tvm import relax

from tests.support.frontend_tools import operators
from tests.support.models import ONNX_LIGHT, onnx_light, onnx_light_random, run_unfused
from tvm_fusion.errors import FrontendError
from tvm_fusion.frontends import load


def model_of(nodes, inputs, outputs, **graph_options) -> onnx.ModelProto:
    """A float32 model; inputs and outputs are {name: shape}."""
    infos = [
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in values.items()]
        for values in (inputs, outputs)
    ]
    graph = helper.make_graph(nodes, "graph", *infos, **graph_options)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def dense() -> onnx.ModelProto:
    weight = onnx.numpy_helper.from_array(np.arange(12, dtype="float32").reshape(4, 3), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Relu", ["y"], ["z"])]
    return model_of(nodes, {"x": ["batch", 4]}, {"z": ["batch", 3]}, initializer=[weight])


def test_weights_are_constants_and_only_the_input_is_a_parameter():
    (x,) = load(dense())["main"].params
    assert x.name == "x"


def test_a_dimension_without_a_number_stays_symbolic_and_runs_for_every_size():
    mod = load(dense())
    weight = np.arange(12, dtype="float32").reshape(4, 3)
    for batch in (1, 5):
        x = np.random.default_rng(batch).standard_normal((batch, 4)).astype("float32")
        np.testing.assert_allclose(
            run_unfused(mod, x)[0], np.maximum(x @ weight, 0), rtol=1e-5, atol=1e-5
        )


def test_a_file_and_its_model_give_the_same_module(tmp_path):
    onnx.save(dense(), tmp_path / "dense.onnx")
    tvm.ir.assert_structural_equal(load(tmp_path / "dense.onnx"), load(dense()))


def test_weights_in_a_file_beside_the_model_are_read(tmp_path):
    path = tmp_path / "dense.onnx"
    onnx.save(dense(), path, save_as_external_data=True, location="dense.bin", size_threshold=0)
    tvm.ir.assert_structural_equal(load(path), load(dense()))


def test_one_output_is_a_tensor_and_several_are_a_tuple():
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Exp", ["x"], ["z"])]
    one = load(model_of(nodes[:1], {"x": [4]}, {"y": [4]}))
    two = load(model_of(nodes, {"x": [4]}, {"y": [4], "z": [4]}))
    assert isinstance(one["main"].ret_ty, relax.TensorType)
    assert isinstance(two["main"].ret_ty, relax.TupleType)


def test_functions_inside_a_model_are_expanded():
    double = helper.make_function(
        "own",
        "Double",
        ["a"],
        ["b"],
        [helper.make_node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 17)],
    )
    model = model_of(
        [helper.make_node("Double", ["x"], ["y"], domain="own")], {"x": [4]}, {"y": [4]}
    )
    model.functions.append(double)
    model.opset_import.append(helper.make_opsetid("own", 1))
    x = np.arange(4, dtype="float32")
    np.testing.assert_array_equal(run_unfused(load(model), x)[0], x + x)


def test_a_shape_given_as_an_input_is_read_by_a_pure_call():
    model = model_of(
        [helper.make_node("Expand", ["x", "n"], ["y"])], {"x": [3, 1]}, {"y": ["a", "b"]}
    )
    model.graph.input.append(helper.make_tensor_value_info("n", TensorProto.INT64, [2]))
    x = np.arange(3, dtype="float32").reshape(3, 1)
    (result,) = run_unfused(load(model), x, np.array([3, 4]))
    np.testing.assert_array_equal(result, np.broadcast_to(x, (3, 4)))


def test_a_conversion_that_changes_nothing_leaves_no_operator():
    nodes = [
        helper.make_node("Sum", ["x", "x"], ["y"]),
        helper.make_node("Cast", ["y"], ["z"], to=1),
    ]
    assert operators(load(model_of(nodes, {"x": [2, 3]}, {"z": [2, 3]}))) == ["relax.add"]


def filled(op_type: str) -> onnx.ModelProto:
    """An operator with a right operand that is a fill of a constant shape."""
    shape = onnx.numpy_helper.from_array(np.array([4, 3]), "shape")
    value = onnx.numpy_helper.from_array(np.array([0.5], "float32"))
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["w"], value=value),
        helper.make_node(op_type, ["x", "w"], ["y"]),
    ]
    left = [2, 4] if op_type == "MatMul" else [4, 3]
    right = [2, 3] if op_type == "MatMul" else [4, 3]
    return model_of(nodes, {"x": left}, {"y": right}, initializer=[shape])


def test_a_weight_given_as_a_fill_becomes_an_array():
    mod = load(filled("MatMul"))
    assert operators(mod) == ["relax.matmul"]
    x = np.ones((2, 4), "float32")
    np.testing.assert_array_equal(run_unfused(mod, x)[0], np.full((2, 3), 2, "float32"))


def test_another_fill_stays_a_fill():
    assert "relax.broadcast_to" in operators(load(filled("Add")))


def test_the_given_model_is_left_as_it_is():
    model = filled("MatMul")
    before = model.SerializeToString()
    load(model)
    assert model.SerializeToString() == before


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ONNX_LIGHT)
def test_a_light_model_is_imported_with_its_weights_as_constants(name):
    case = onnx_light(name)
    mod = load(case.model)
    assert [tuple(map(int, x.ty.shape)) for x in mod["main"].params] == [(1, 3, 224, 224)]
    assert "relax.broadcast_to" not in operators(mod)
    assert relax.analysis.check_well_formed(relax.transform.LegalizeOps()(mod))


# Always: a light model, and tests of each operator (`test_onnx_conformance`).
@pytest.mark.nightly
def test_squeezenet_with_random_weights_gives_what_the_reference_evaluator_gives():
    case = onnx_light_random("light_squeezenet")
    (result,) = run_unfused(load(case.model), *case.arrays)
    assert case.expected[0].std() > 1e-5
    np.testing.assert_allclose(result, case.expected[0], rtol=1e-4, atol=1e-7)


def test_a_damaged_file_is_refused_in_one_line(tmp_path):
    path = tmp_path / "damaged.onnx"
    path.write_bytes(b"\x08\x99this is no protobuf")
    with pytest.raises(FrontendError, match=r"damaged\.onnx: is no ONNX model or is dam") as error:
        load(path)
    assert "\n" not in str(error.value)


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "empty.onnx"
    path.touch()
    with pytest.raises(FrontendError, match=r"empty\.onnx: holds no graph with an output"):
        load(path)


def test_a_truncated_file_is_refused(tmp_path):
    whole = dense().SerializeToString()
    path = tmp_path / "truncated.onnx"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FrontendError, match=r"truncated\.onnx: "):
        load(path)


def test_a_model_of_more_than_a_message_holds_is_read_from_its_file(tmp_path, monkeypatch):
    def check(model):
        if isinstance(model, onnx.ModelProto):
            raise EncodeError("Failed to serialize proto")  # what protobuf says above 2 GB
        return checked(model)

    checked = onnx.checker.check_model
    path = tmp_path / "dense.onnx"
    onnx.save(dense(), path, save_as_external_data=True, location="dense.bin", size_threshold=0)
    monkeypatch.setattr(onnx.checker, "check_model", check)
    tvm.ir.assert_structural_equal(load(path), load(path))
    with pytest.raises(FrontendError, match=r"more than the 2 GB .*save_as_external_data=True"):
        load(dense())


@pytest.mark.parametrize("place", ["onnx.load", "tvm_fusion.frontends.onnx.model._Importer"])
def test_a_model_that_is_too_large_for_memory_is_said_to_be(tmp_path, monkeypatch, place):
    def fails(*_, **__):
        raise MemoryError

    onnx.save(dense(), tmp_path / "dense.onnx")
    load(tmp_path / "dense.onnx")
    monkeypatch.setattr(place, fails)
    with pytest.raises(FrontendError, match=r"dense\.onnx: memory ran out while it was read; "):
        load(tmp_path / "dense.onnx")


def test_what_the_checker_finds_is_reported():
    model = model_of([helper.make_node("Relu", ["missing"], ["y"])], {"x": [4]}, {"y": [4]})
    with pytest.raises(FrontendError, match=r"onnx\.checker finds it invalid: .*; export it again"):
        load(model)


def test_an_operator_that_tvm_does_not_know_is_named():
    model = model_of([helper.make_node("Det", ["x"], ["y"])], {"x": [4, 4]}, {"y": []})
    with pytest.raises(FrontendError, match=r"no converter for Det \(-> y\)") as error:
        load(model)
    assert "\n" not in str(error.value)


def test_an_operator_that_cannot_be_converted_is_named_and_nothing_is_printed(capsys):
    nodes = [helper.make_node("ReduceSum", ["x", "axes"], ["y"])]
    model = model_of(nodes, {"x": [4]}, {"y": []})
    model.graph.input.append(helper.make_tensor_value_info("axes", TensorProto.INT64, [1]))
    with pytest.raises(FrontendError, match="cannot be converted to Relax at operator ReduceSum: "):
        load(model)
    assert capsys.readouterr().out == ""


def test_without_onnx_the_error_names_the_extra(monkeypatch, tmp_path):
    onnx.save(dense(), tmp_path / "dense.onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.delitem(sys.modules, "tvm_fusion.frontends.onnx.model", raising=False)
    with pytest.raises(FrontendError, match=r"pip install 'tvm_fusion\[onnx\]'"):
        load(tmp_path / "dense.onnx")
