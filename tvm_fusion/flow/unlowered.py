"""The operator that an error of TVM is about: each of a module is lowered by itself, until one
fails.

    InternalError: Check failed: power only applies to float
    -> relax.power of R.Tensor((3,), dtype="int64") (net.py:12, in layers.0) cannot be compiled: ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tvm
from tvm import relax

from ..errors import FrontendError, TvmFusionError
from ..frontends.finish import first_line
from ..ir.origins import taken_from
from ..transform.pipeline import lower


@contextmanager
def operators_named(mod: tvm.IRModule, target: tvm.target.Target) -> Iterator[None]:
    """Errors within, of TVM and for programmers, say which operator of a module they are about;
    those that no operator has by itself stay as they are.
    """
    try:
        yield
    except (TvmFusionError, MemoryError):
        raise
    except Exception as error:
        found = _unlowered(mod, target)
        if found is None:
            raise
        raise FrontendError(
            f"{found} cannot be compiled: {first_line(error)}; write that line with other operators"
        ) from error


def _unlowered(mod: tvm.IRModule, target: tvm.target.Target) -> str | None:
    """The first operator of `main` that cannot be lowered alone, and where it stands."""
    mod, origins = taken_from(mod)
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            call = getattr(binding, "value", None)
            if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op):
                continue
            alone = _alone(call)
            try:
                lower(alone, target)
            except Exception:
                origin = origins.get(binding.var.name)
                place = ", ".join(p for p in (origin.source, origin.module) if p) if origin else ""
                operands = ", ".join(str(arg.ty) for arg in call.args if hasattr(arg, "ty"))
                return f"{call.op.name} of {operands}" + (f" ({place})" if place else "")
    return None


def _alone(call: relax.Call) -> tvm.IRModule:
    """A call as a module, of its operands."""
    params: dict[relax.Var, relax.Var] = {}

    def own(x: relax.Expr) -> relax.Expr:
        if isinstance(x, relax.Tuple):
            return relax.Tuple([own(field) for field in x.fields])
        if not isinstance(x, relax.Var):
            return x
        return params.setdefault(x, relax.Var(x.name, x.ty))

    call = relax.Call(call.op, [own(arg) for arg in call.args], call.attrs, call.ty_args)
    builder = relax.BlockBuilder()
    with builder.function("main", list(params.values())):
        builder.emit_func_output(builder.emit(call))
    return builder.get()
