"""Widen the floats in the node graph of a serialised module; `reference` says which and why.

In the JSON of `tvm.ir.save_json` a node is {"type": ..., "data": ...}; a field of an expression is
the index of another node, and every dtype is a string: in a "dtype" field, or a node of its own.
One sweep therefore meets the types of all variables, buffers, functions, casts, constants and
operator attributes.
"""

from ..errors import Unsupported

# Magnitudes that mean "beyond everything"; TVM starts maxima of bfloat16 at the lowest float32.
EXTREMES = {
    "float16": (65504.0,),
    "bfloat16": (3.3895313892515355e38, 3.4028234663852886e38),
    "float32": (3.4028234663852886e38,),
}
LARGEST = 1.7976931348623157e308

_COMPARISONS = ("prim.EQ", "prim.NE", "prim.LT", "prim.LE", "prim.GT", "prim.GE")
_OPERANDS = ("a", "b", "value", "condition", "true_value", "false_value", "args")
# The result depends on the width of a float, or on a function that exists for one width only.
_BOUND_TO_WIDTH = (
    "tirx.reinterpret",
    "tirx.call_extern",
    "tirx.call_pure_extern",
    "tirx.call_llvm_intrin",
    "tirx.call_llvm_pure_intrin",
)


def widen_dtype(dtype: str) -> str:
    """float16, bfloat16, float32, and vectors of them ("float16x8") -> float64; others stay."""
    base, by, lanes = dtype.partition("x")
    return "float64" + by + lanes if base in EXTREMES else dtype


def widen_nodes(nodes: list[dict]) -> None:
    """Widen a node graph in place; new nodes are appended."""
    _refuse_bits(nodes)
    kept = _keep_coordinates(nodes)
    for index, node in enumerate(nodes):
        data = node.get("data")
        if node["type"] == "ir.FloatImm" and index not in kept:
            data["value"] = _widen_extreme(data["value"], _dtype(nodes, index))
    for index, node in enumerate(nodes):
        if index in kept:
            continue
        data = node.get("data")
        if node["type"] in ("DataType", "ffi.String"):
            node["data"] = widen_dtype(data)
        elif isinstance(data, dict) and isinstance(data.get("dtype"), str):
            data["dtype"] = widen_dtype(data["dtype"])


def _widen_extreme(value: float, dtype: str) -> float:
    if abs(value) not in EXTREMES.get(dtype.partition("x")[0], ()):
        return value
    return LARGEST if value > 0 else -LARGEST


def _dtype(nodes: list[dict], index: int) -> str:
    """The dtype of a scalar expression, or an empty string."""
    data = nodes[index].get("data")
    if not isinstance(data, dict) or "ty" not in data:
        return ""
    ty = nodes[data["ty"]]
    return ty["data"]["dtype"] if ty["type"] == "ir.PrimType" else ""


def _is_widened(nodes: list[dict], index: int) -> bool:
    dtype = _dtype(nodes, index)
    return widen_dtype(dtype) != dtype


def _children(node: dict) -> list[int]:
    if node["type"] == "ffi.Array":
        return node["data"]
    return [node["data"][name] for name in _OPERANDS if name in node["data"]]


def _refuse_bits(nodes: list[dict]) -> None:
    for index, node in enumerate(nodes):
        if node["type"] != "ir.Call":
            continue
        op = nodes[node["data"]["op"]]
        if op["type"] != "ir.Op" or op["data"] not in _BOUND_TO_WIDTH:
            continue
        if any(_is_widened(nodes, i) for i in [index, *nodes[node["data"]["args"]]["data"]]):
            raise Unsupported(f"{op['data']} on a float has no meaning in float64")


def _keep_coordinates(nodes: list[dict]) -> set[int]:
    """Give integers and comparisons own copies of load-free float operands; return the copies."""
    memo: dict[int, bool] = {}
    copies: dict[int, int] = {}

    def load_free(index: int) -> bool:
        if index not in memo:
            node = nodes[index]
            kind = node["type"]
            if kind == "ir.Var":
                memo[index] = _dtype(nodes, index).startswith(("int", "uint", "bool"))
            elif kind.startswith("prim.") or kind in ("ir.Call", "ffi.Array"):
                memo[index] = all(load_free(child) for child in _children(node))
            else:
                memo[index] = kind in ("ir.FloatImm", "ir.IntImm", "ir.StringImm")
        return memo[index]

    def copy(index: int) -> int:
        node = nodes[index]
        kind = node["type"]
        if kind in ("ir.Var", "ir.IntImm", "ir.StringImm"):
            return index
        if index not in copies:
            if kind == "ffi.Array":
                data = [copy(child) for child in node["data"]]
            elif kind == "ir.PrimType":
                data = dict(node["data"])
            else:
                data = node["data"] | {
                    name: copy(node["data"][name])
                    for name in ("ty", *_OPERANDS)
                    if name in node["data"] and not (kind == "ir.FloatImm" and name == "value")
                }
            nodes.append({"type": kind, "data": data})
            copies[index] = len(nodes) - 1
        return copies[index]

    for index in range(len(nodes)):
        node = nodes[index]
        to_integer = node["type"] == "prim.Cast" and _dtype(nodes, index).startswith(
            ("int", "uint", "bool")
        )
        if not to_integer and node["type"] not in _COMPARISONS:
            continue
        fields = ["value"] if to_integer else ["a", "b"]
        operands = [node["data"][name] for name in fields]
        if any(_is_widened(nodes, i) for i in operands) and all(map(load_free, operands)):
            node["data"] |= {name: copy(i) for name, i in zip(fields, operands, strict=True)}
    return set(copies.values())
