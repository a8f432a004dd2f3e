"""ONNX operators that TVM's importer lacks, as others that it has.

Those with a definition of ONNX's own (`Celu`, `SwiGLU`, `Attention`, ...) are replaced by that, and
what definitions compute of shapes by the numbers that it gives; others by `expansions`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, inliner, numpy_helper
from tvm.relax.frontend.onnx.onnx_frontend import _get_convert_map

from ...errors import FrontendError
from ..finish import first_line
from .expansions import EXPANSIONS
from .nodes import Nodes, Values

# What such names begin with draws random numbers.
RANDOM = ("RandomNormal", "RandomUniform", "Bernoulli", "Multinomial")

# By TVM outside of its table of converters.
DIRECT = ("Constant", "If")

# Its converters of these names are for operators of another domain.
OF_OTHERS = ("Attention",)


def opsets_by_tvm() -> dict[str, tuple[int, ...]]:
    """The opsets from which on TVM's converters count, by operator."""
    found = {name: _opsets(converter) for name, converter in _get_convert_map().items()}
    return {name: of for name, of in found.items() if name not in OF_OTHERS} | {
        name: (1,) for name in DIRECT
    }


def _opsets(converter: type) -> tuple[int, ...]:
    names = (name.removeprefix("_impl_v") for name in dir(converter) if name.startswith("_impl_v"))
    return tuple(sorted(map(int, names)))


def defined_by_onnx() -> set[str]:
    """The operators of the default domain that no converter has, and ONNX gives a definition of."""
    known = {*opsets_by_tvm(), *EXPANSIONS}
    return {
        schema.name
        for schema in onnx.defs.get_all_schemas()
        if schema.domain == "" and schema.name not in known
        if schema.has_function or schema.has_context_dependent_function
    }


def with_known_operators(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with such operators replaced; itself where it has none.

    Raises
    ------
    FrontendError
        A form of an operator cannot be replaced.
    """
    return _expanded(_defined(model))


def _defined(model: onnx.ModelProto) -> onnx.ModelProto:
    """With definitions of ONNX in the place of operators, and of those that these are made of."""
    known, found = {*opsets_by_tvm(), *EXPANSIONS}, model
    while True:
        names = {
            node.op_type
            for node in found.graph.node
            if node.domain in ("", "ai.onnx")
            and (node.op_type not in known or _is_better_defined(node))
        } & (defined_by_onnx() | BETTER_DEFINED)
        if not names:
            return found if found is model else with_shapes_folded(found)
        ids = [("", name) for name in sorted(names)]
        found = onnx.shape_inference.infer_shapes(found, data_prop=True)
        _give_defaults(found, names)
        try:
            found = inliner.inline_selected_functions(found, ids, inline_schema_functions=True)
        except RuntimeError as error:
            raise FrontendError(
                f"{', '.join(sorted(names))}: ONNX cannot take it apart: {first_line(error)}; "
                "export the model without it, or with all of its inputs"
            ) from error
        if any(node.op_type in names for node in found.graph.node):
            return found  # forms that ONNX has no definition of: refused where they are converted


def _give_defaults(model: onnx.ModelProto, names: set[str]) -> None:
    """Gives attributes their default values, which definitions do not know."""
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)
    for node in model.graph.node:
        if node.op_type not in names:
            continue
        given = {attribute.name for attribute in node.attribute}
        for name, attribute in onnx.defs.get_schema(node.op_type, opset).attributes.items():
            if name not in given and attribute.default_value.name:
                node.attribute.append(attribute.default_value)


BETTER_DEFINED = {"LayerNormalization", "RMSNormalization"}


def _is_better_defined(node: onnx.NodeProto) -> bool:
    """Whether TVM's converter is right for other forms of a node only."""
    if node.op_type == "LayerNormalization":  # mean and deviation, which are empty there
        return any(node.output[1:])
    axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
    return node.op_type == "RMSNormalization" and axis != -1


def _expanded(model: onnx.ModelProto) -> onnx.ModelProto:
    """With what stands here in the place of operators."""
    if not any(node.op_type in EXPANSIONS for node in model.graph.node):
        return model
    found = onnx.ModelProto()
    found.CopyFrom(model)
    values = Values(model)
    del found.graph.node[:]
    for node in model.graph.node:
        expand = EXPANSIONS.get(node.op_type)
        nodes = Nodes(node, values)
        if expand is None or not expand(nodes):
            found.graph.node.append(node)
        else:
            found.graph.node.extend(nodes.made)
    return found


# ---- Arithmetic of shapes, which definitions are full of, as the numbers that it gives.


def with_shapes_folded(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with what depends on known shapes and constants only as constants."""
    while True:
        values, folded = Values(model), False
        known = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        found = onnx.ModelProto()
        found.CopyFrom(model)
        del found.graph.node[:]
        outputs = {output.name for output in model.graph.output}
        for node in model.graph.node:
            value = None if node.output[0] in outputs else _folded(node, known, values)
            if value is None:
                found.graph.node.append(node)
                continue
            known[node.output[0]] = value
            found.graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
            folded = True
        if not folded:
            return found
        model = found


def _folded(
    node: onnx.NodeProto, known: Mapping[str, np.ndarray], values: Values
) -> np.ndarray | None:
    """The value of a node; None where it depends on an input, or is large."""
    if node.op_type in ("Shape", "Size"):
        shape = values.shapes.get(node.input[0])
        if shape is None or None in shape:
            return None
        value = np.zeros(shape, np.bool_)
        node_inputs = {node.input[0]: value}
    elif any(name and name not in known for name in node.input) or node.op_type.startswith(RANDOM):
        return None
    else:
        node_inputs = {name: known[name] for name in node.input if name}
    if len(node.output) != 1 or any(a.type in GRAPHS for a in node.attribute):
        return None
    from onnx.reference import ReferenceEvaluator

    typed = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in node_inputs.items()
    ]
    result = onnx.ValueInfoProto(name=node.output[0])
    graph = helper.make_graph([node], "node", typed, [result])
    alone = helper.make_model(graph, opset_imports=values.opsets)
    try:
        (found,) = ReferenceEvaluator(alone).run(None, node_inputs)
    except Exception:  # what the reference lacks stays as it is
        return None
    found = np.asarray(found)
    return found if found.size <= MOST_FOLDED and found.dtype.kind in "biuf" else None


MOST_FOLDED = 1 << 16
GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
