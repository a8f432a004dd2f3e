"""`relax.nn.batch_norm` of 16-bit floats as one kernel that computes in float32.

TVM's own legalization gives such a normalization a float32 result, whatever the operator's type
says, and what reads it fails.
"""

from __future__ import annotations

import tvm
from tvm import relax, te, topi
from tvm.ir import Call

# A relax.Call in, what stands for it out.
_DEFAULT = tvm.ir.Op.get("relax.nn.batch_norm").get_attr("FLegalize")


def legalize_batch_norm(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
    """The legalization of one `relax.nn.batch_norm`; of wider floats, TVM's own."""
    dtypes = [str(field.dtype) for field in call.ty.fields]
    if dtypes[0] not in ("float16", "bfloat16"):
        return _DEFAULT(builder, call)
    names = ("axis", "epsilon", "center", "scale", "training", "momentum")
    attributes = {name: getattr(call.attrs, name) for name in names}

    def batch_norm(*tensors: te.Tensor) -> list[te.Tensor]:
        wide = [topi.cast(tensor, "float32") for tensor in tensors]
        results = topi.nn.batch_norm(*wide, **attributes)
        return [topi.cast(r, dtype) for r, dtype in zip(results, dtypes, strict=True)]

    return builder.call_te(batch_norm, *call.args, primfunc_name_hint="batch_norm")
