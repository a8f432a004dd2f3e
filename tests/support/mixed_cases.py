"""Layer-norm and RMS-norm backward in plain operators, fused into one PrimFunc with partial sums,
and whole; with their float64 results.
"""

import numpy as np
from tvm import relax
from tvm.relax import op

from .kernel_cases import Case


def _wide(bb, tensor):
    dtype = str(tensor.ty.dtype)
    return tensor if dtype == "float32" else bb.emit(op.astype(tensor, "float32"))


def _row_mean(bb, tensor):
    columns = int(tensor.ty.shape[-1])
    total = bb.emit(op.sum(tensor, axis=[-1], keepdims=True))
    return bb.emit(op.multiply(total, relax.const(1.0 / columns, "float32")))


def _over_rows(bb, tensor, pieces):
    """The sum over the first axis: in `pieces` partial sums, or finished where that is None."""
    if pieces is None:
        return bb.emit(op.sum(tensor, axis=[0]))
    rows, columns = (int(extent) for extent in tensor.ty.shape)
    view = bb.emit(op.reshape(tensor, (pieces, rows // pieces, columns)))
    return bb.emit(op.sum(view, axis=[1]))


def layer_norm_backward(pieces=None, statistics="given"):
    """dx, dgamma and dbeta from x, dy, gamma and (`given`) mean and rstd, or from x alone."""

    def emit(bb, x, dy, gamma, *given):
        e, out = bb.emit, str(x.ty.dtype)
        x, dy, gamma = (_wide(bb, t) for t in (x, dy, gamma))
        if given:
            mean, rstd = given
            centered = e(op.subtract(x, mean))
        else:
            centered = e(op.subtract(x, _row_mean(bb, x)))
            variance = _row_mean(bb, e(op.multiply(centered, centered)))
            rstd = e(op.rsqrt(e(op.add(variance, relax.const(1e-5, "float32")))))
        xhat = e(op.multiply(centered, rstd))
        wdy = e(op.multiply(dy, gamma))
        c1 = _row_mean(bb, e(op.multiply(wdy, xhat)))
        c2 = _row_mean(bb, wdy)
        dx = e(op.subtract(e(op.subtract(wdy, e(op.multiply(xhat, c1)))), c2))
        dx = e(op.multiply(dx, rstd))
        dgamma = _over_rows(bb, e(op.multiply(dy, xhat)), pieces)
        dbeta = _over_rows(bb, dy, pieces)
        results = [e(op.astype(dx, out))]
        for total in (dgamma, dbeta):
            results.append(total if pieces is not None else e(op.astype(total, out)))
        return relax.Tuple(results)

    return emit


def rms_norm_backward(pieces=None):
    """dx and dgamma from x, dy, gamma and rstd."""

    def emit(bb, x, dy, gamma, rstd):
        e, out = bb.emit, str(x.ty.dtype)
        x, dy, gamma = (_wide(bb, t) for t in (x, dy, gamma))
        xhat = e(op.multiply(x, rstd))
        wdy = e(op.multiply(dy, gamma))
        c1 = _row_mean(bb, e(op.multiply(wdy, xhat)))
        dx = e(op.multiply(e(op.subtract(wdy, e(op.multiply(xhat, c1)))), rstd))
        dgamma = _over_rows(bb, e(op.multiply(dy, xhat)), pieces)
        if pieces is None:
            dgamma = e(op.astype(dgamma, out))
        return relax.Tuple([e(op.astype(dx, out)), dgamma])

    return emit


def _partial(total, pieces):
    if pieces is None:
        return total.sum(0)
    return total.reshape(pieces, -1, total.shape[-1]).sum(1)


def layer_norm_backward_of(pieces=None):
    """`layer_norm_backward` in float64."""

    def reference(x, dy, gamma, mean=None, rstd=None):
        if mean is None:
            mean = x.mean(-1, keepdims=True)
            rstd = 1 / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        xhat, wdy = (x - mean) * rstd, dy * gamma
        c1 = (wdy * xhat).mean(-1, keepdims=True)
        dx = (wdy - xhat * c1 - wdy.mean(-1, keepdims=True)) * rstd
        return [dx, _partial(dy * xhat, pieces), _partial(dy, pieces)]

    return reference


def rms_norm_backward_of(pieces=None):
    """`rms_norm_backward` in float64."""

    def reference(x, dy, gamma, rstd):
        xhat, wdy = x * rstd, dy * gamma
        c1 = (wdy * xhat).mean(-1, keepdims=True)
        return [(wdy - xhat * c1) * rstd, _partial(dy * xhat, pieces)]

    return reference


def layer_norm_inputs(rows, columns, dtype, given=True):
    """Shapes and dtypes of the inputs of `layer_norm_backward`."""
    inputs = [((rows, columns), dtype), ((rows, columns), dtype), ((columns,), dtype)]
    return tuple(inputs + ([((rows, 1), "float32")] * 2 if given else []))


def rms_norm_inputs(rows, columns, dtype):
    """Shapes and dtypes of the inputs of `rms_norm_backward`."""
    return layer_norm_inputs(rows, columns, dtype)[:4]


def fused_layer_norm(rows, columns, dtype, pieces, given=True) -> Case:
    """The mixed part of a layer norm's backward: dx and partial sums, in one PrimFunc."""
    return Case(
        f"layernorm-{rows}x{columns}-{dtype}-{pieces}",
        layer_norm_backward(pieces),
        layer_norm_inputs(rows, columns, dtype, given),
        layer_norm_backward_of(pieces),
    )


def fused_rms_norm(rows, columns, dtype, pieces) -> Case:
    """The mixed part of an RMS norm's backward."""
    return Case(
        f"rmsnorm-{rows}x{columns}-{dtype}-{pieces}",
        rms_norm_backward(pieces),
        rms_norm_inputs(rows, columns, dtype),
        rms_norm_backward_of(pieces),
    )
