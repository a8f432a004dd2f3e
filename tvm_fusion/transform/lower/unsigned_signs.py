"""Negation and sign of unsigned integers and booleans, for which TVM's legalizations look for a -1.

-x          ~x + 1, which is 2^bits - x: what other libraries give
sign(x)     x != 0, as a number of its type
"""

from tvm import relax, te, topi
from tvm.ir import Call, Op

from .half_operators import Legalizer


def _negative(x: te.Tensor) -> te.Tensor:
    # TVM takes 0 - x of uint32 for 0: what is never above 0, and not below it
    return topi.add(topi.bitwise_not(x), topi.full_like(x, 1))


def _sign(x: te.Tensor) -> te.Tensor:
    if str(x.dtype) == "bool":
        return topi.identity(x)
    return topi.cast(topi.not_equal(x, topi.full_like(x, 0)), x.dtype)


def _legalizer(name: str, unsigned: object) -> Legalizer:
    default = Op.get(name).get_attr("FLegalize")

    def legalize(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
        if not str(call.ty.dtype).startswith(("uint", "bool")):
            return default(builder, call)
        return builder.call_te(unsigned, call.args[0], primfunc_name_hint=name.split(".")[-1])

    return legalize


LEGALIZERS: dict[str, Legalizer] = {
    "relax.negative": _legalizer("relax.negative", _negative),
    "relax.sign": _legalizer("relax.sign", _sign),
}
"""For `relax.transform.LegalizeOps`."""
