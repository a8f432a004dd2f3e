"""Where the operators of imported models come from."""

import onnx
from onnx import TensorProto, helper

from tvm_fusion.frontends import load
from tvm_fusion.ir.origins import taken_from


def test_operators_of_onnx_know_the_node_they_come_from():
    nodes = [
        helper.make_node("LayerNormalization", ["x", "s"], ["n"], name="/layers.0/norm/Norm"),
        helper.make_node("Gemm", ["n", "w", "b"], ["g"], name="/layers.0/up/Gemm"),
        helper.make_node("Relu", ["g"], ["y"], name="last"),
    ]
    sizes = {"x": [2, 4], "s": [4], "w": [4, 8], "b": [8]}
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in sizes.items()]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 8])]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.checker.check_model(model)
    mod, origins = taken_from(load(model))
    assert {origin.module for origin in origins.values()} == {
        "layers.0.norm",
        "layers.0.up",
        "last",
    }
    again, none = taken_from(mod)
    assert again.same_as(mod)
    assert none == {}
