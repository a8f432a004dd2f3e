"""`relax.permute_dims` of constants, evaluated while it is legalized.

    permute_dims(const)  ->  const        weights that a model stores (out, in)

TVM's FoldConstant would build a function for it and run that on one thread, one element after the
other. What it makes of other constants stays its own.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax
from tvm.ir import Call

from ...ir.weights import derived, numbers, tensor_of, weight_of
from ..rewrites.constant_weights import identity
from .weight_recipes import Permuted, permuted

Legalize = Callable[[relax.BlockBuilder, Call], relax.Expr]
_PERMUTE: Legalize = tvm.ir.Op.get("relax.permute_dims").get_attr("FLegalize")


def legalize_permutes(usual: Legalize = _PERMUTE) -> Legalize:
    """The legalization of each `relax.permute_dims` of a module; of what is no constant, the usual
    one. A weight that several operators read in one order stays one constant.
    """
    known: dict[tuple, relax.Expr] = {}

    def legalize(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
        legal = usual(builder, call)  # its PrimFunc counts for the names of those after it
        constant = call.args[0]
        tensor = tensor_of(constant)
        if tensor is None or not str(tensor.dtype).startswith(("float16", "float32", "bfloat16")):
            return legal
        axes = call.attrs.axes
        order = range(len(tensor.shape))[::-1] if axes is None else [int(axis) for axis in axes]
        key = (identity(constant), *order)
        if key not in known:
            known[key] = _permuted(constant, tuple(order))
        return known[key]

    return legalize


def _permuted(constant: relax.Expr, axes: tuple[int, ...]) -> relax.Expr:
    tensor = tensor_of(constant)
    if weight_of(constant) is None:
        return relax.const(permuted(numbers(constant), axes))
    shape, dtype = tuple(map(int, tensor.shape)), str(tensor.dtype)
    result = [shape[axis] for axis in axes]
    return derived(Permuted(axes, shape, dtype), [constant], result, dtype)
