"""Kernels whose outputs a call leaves without elements are not launched.

    main(x: (n, 256), y: (n, 512)):             main(x: (n, 256), y: (n, 512)):
        launch (n + 63) // 64 blocks                if n > 0:
                                                        launch (n + 63) // 64 blocks

The driver refuses a grid of no blocks, and a tensor map without elements.

Does not handle: kernels that schedules of TVM's make (their blocks stand at the root).
"""

import tvm
from tvm import relax, tirx

from ...kernels.program.expr import conjunction
from ...transform.apply.kernel_bodies import TIRX_ATTR
from ...transform.functions.functions import operator_name, with_functions

OUTPUTS_ATTR = "tvm_fusion.outputs"  # of a PrimFunc: how many of its last parameters it fills


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.TellOutputs")
class TellOutputs:
    """Note at each written kernel how many outputs it has: once `call_tir` is lowered, nothing says
    so.
    """

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod` with the number of outputs at kernels that may have none of an element."""
        counts: dict[tvm.ir.GlobalVar, int] = {}

        def visit(expr: relax.Expr) -> None:
            if operator_name(expr) == "relax.call_tir":
                ty = expr.ty
                counts[expr.args[0]] = len(ty.fields) if isinstance(ty, relax.TupleType) else 1

        for _, func in mod.functions_items():
            if isinstance(func, relax.Function):
                relax.analysis.post_order_visit(func.body, visit)
        functions = dict(mod.functions_items())
        for gvar, count in counts.items():
            func = functions[gvar]
            if func.attrs.get(TIRX_ATTR, False) and _is_filled(func, count) is not None:
                functions[gvar] = func.with_attr(OUTPUTS_ATTR, count)
        return with_functions(mod, functions)


def launched_if_filled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A kernel that `TellOutputs` noted, before it is lowered, as one that is launched only if an
    output has elements; another one as it is.
    """
    count = func.attrs.get(OUTPUTS_ATTR)
    if count is None:
        return func
    condition = _is_filled(func, int(count))
    return func.with_body(tirx.IfThenElse(condition, func.body, None))


def _is_filled(func: tirx.PrimFunc, outputs: int) -> tirx.Expr | None:
    """Whether one of the last parameters has elements; None where that is always so."""
    found = None
    for param in func.params[len(func.params) - outputs :]:
        extents = [e for e in param.ty.shape if not isinstance(e, tirx.IntImm)]
        filled = conjunction(*(extent > 0 for extent in extents))
        if filled is None:
            return None
        found = filled if found is None else tirx.Or(found, filled)
    return found
