"""What nodes of ONNX are replaced with: others, emitted one by one, of values whose shapes and
types are known as far as ONNX infers them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ...errors import FrontendError

INT32, FLOAT = onnx.TensorProto.INT32, onnx.TensorProto.FLOAT


class Values:
    """Shapes and types of a model's values, as far as ONNX infers them."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        self.shapes: dict[str, list[int | None]] = {}
        self.types: dict[str, int] = {}
        self.opsets = list(model.opset_import)
        for value in (*graph.value_info, *graph.input, *graph.output):
            tensor = value.type.tensor_type
            self.types[value.name] = tensor.elem_type
            if tensor.HasField("shape"):
                self.shapes[value.name] = [d.dim_value or None for d in tensor.shape.dim]
        for tensor in graph.initializer:
            self.types[tensor.name] = tensor.data_type
            self.shapes[tensor.name] = list(tensor.dims)


class Nodes:
    """Nodes in the place of one; a call emits a node, and returns the name of its result."""

    def __init__(self, node: onnx.NodeProto, values: Values) -> None:
        self.node, self.values = node, values
        self.made: list[onnx.NodeProto] = []
        self.attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}

    def __call__(self, op: str, *inputs: str, result: str = "", **attributes: Any) -> str:
        result = result or f"{self.node.output[0] or self.node.name}/{len(self.made)}"
        name = self.node.name
        self.made.append(helper.make_node(op, inputs, [result], name=name, **attributes))
        return result

    def split(self, x: str, axis: int, sizes: Sequence[int]) -> list[str]:
        """Parts of x along an axis."""
        ends = np.cumsum([0, *sizes])
        return [self.slice(x, axis, a, b) for a, b in itertools.pairwise(ends)]

    def slice(self, x: str, axis: int, begin: int, end: int) -> str:
        return self("Slice", x, self.integers(begin), self.integers(end), self.integers(axis))

    def at(self, x: str, place: int) -> str:
        """x[place]."""
        return self("Squeeze", self.slice(x, 0, place, place + 1), self.integers(0))

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, "int64"))

    def constant(self, value: np.ndarray) -> str:
        return self("Constant", value=numpy_helper.from_array(np.asarray(value)))

    def input(self, place: int) -> str:
        """The name of an input; empty where it is left out."""
        return self.node.input[place] if place < len(self.node.input) else ""

    def output(self, place: int) -> str:
        return self.node.output[place] if place < len(self.node.output) else ""

    def shape(self, name: str) -> list[int | None]:
        """The shape of a value, as far as it is known."""
        return self.values.shapes.get(name, [])

    def refuse(self, why: str) -> NoReturn:
        """Raise FrontendError for a form of the node."""
        name = f"{self.node.op_type} {self.node.name}".strip()
        raise FrontendError(f"{name}: {why}; export the model with another form of it")


Expansion = Callable[[Nodes], bool]
"""Emits nodes in the place of one; False where that stays as it is."""
