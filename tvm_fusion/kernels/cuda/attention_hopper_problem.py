"""An attention as the Hopper kernel sees it: which tensors the TMA addresses, what is computed at
each score, where the results go.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...config import HardwareProfile
from ...errors import Unsupported
from ..attention_model import Attention
from ..contraction_model import Axis, Extent, Operand
from ..expr import HALF_DTYPES, dtype_of, number, variables
from .attention_hopper_config import BOX, MAX_FEATURES
from .gemm_access import AffineAccess, affine_access
from .gemm_tensor_map import TensorMap, tensor_map

ARCHITECTURE = "sm_90a"

# Terms and features of a tensor whose rows the TMA can address.
UNIT = 8


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """An operand or a result as a tensor over the batch, `rows` ("m" or "n") and `columns`."""

    param: Var
    dtype: str
    access: AffineAccess
    rows: str
    columns: str

    def boxes(self, rows: int) -> TensorMap:
        """Boxes of 64 columns and so many rows."""
        box = {self.columns: BOX, self.rows: rows}
        return tensor_map(self.param, self.dtype, self.access, self.columns, box)


@dataclass(frozen=True, slots=True, eq=False)
class HopperAttention:
    """Made by `read_attention`.

    Attributes
    ----------
    q, k, v : the operands.
    terms, features : columns of Q and K, and of V.
    scale : the factor of a logit that is nothing but the score times a positive number; else None.
    result : the single output, where it is nothing but the result and the TMA can store it.
    """

    attention: Attention
    dtype: str
    terms: int
    features: int
    q: View
    k: View
    v: View
    scale: float | None
    result: View | None

    @property
    def hides(self) -> bool:
        """Whether there may be rows without a visible key."""
        return self.attention.visible is not None or self.scale is None

    @property
    def kind(self) -> str:
        """What PTX calls the dtype of the operands."""
        return {"float16": "f16", "bfloat16": "bf16"}[self.dtype]


def read_attention(attention: Attention, hw: HardwareProfile) -> HopperAttention:
    """The attention as the TMA and wgmma can compute it.

    Raises
    ------
    Unsupported
        For another architecture or dtype, operands that are computed or that no tensor map
        expresses, symbolic or large heads.
    """
    if hw.arch != ARCHITECTURE:
        raise Unsupported(f"{hw.arch} has no wgmma")
    terms, features = attention.D, attention.E
    for size, name in ((terms, "terms"), (features, "features")):
        if not isinstance(size, int):
            raise Unsupported(f"a symbolic number of {name}")
        if size % UNIT or size > MAX_FEATURES:
            raise Unsupported(f"{size} {name}: no multiple of {UNIT} up to {MAX_FEATURES}")
    q = _operand(attention, attention.q, "m", "d")
    k = _operand(attention, attention.k, "n", "d")
    v = _operand(attention, attention.v, "n", "e")
    dtypes = {view.dtype for view in (q, k, v)}
    if len(dtypes) != 1 or not dtypes <= set(HALF_DTYPES):
        raise Unsupported(f"operands of {', '.join(sorted(dtypes))}, not of one half precision")
    scale = score_factor(attention.logit, attention.score)
    if scale is not None and scale <= 0:
        scale = None
    result = _result(attention)
    return HopperAttention(attention, q.dtype, terms, features, q, k, v, scale, result)


def batch_groups(attention: Attention) -> dict[str, tuple[Axis, ...]]:
    """Each axis of the batch as a group of its own, by the name accesses have for it."""
    return {f"batch{i}": (axis,) for i, axis in enumerate(attention.batch)}


def _operand(attention: Attention, operand: Operand, rows: str, columns: str) -> View:
    load = operand.load
    if load is None:
        raise Unsupported("an operand that is computed, not loaded")
    param = next(p for p in attention.params if p.var.same_as(load.source))
    view = _view(attention, param.var, dtype_of(load), load.indices, param.shape, rows, columns)
    if view is None:
        raise Unsupported(f"{param.name}: an index that is not affine")
    return view


def _view(
    attention: Attention,
    param: Var,
    dtype: str,
    indices: tuple[Expr, ...],
    shape: tuple[Extent, ...],
    rows: str,
    columns: str,
) -> View | None:
    """The view with all axes of the batch as one, or else with each of its own; None where the
    index is not affine in them.

    Raises Unsupported where no box of any size is one of the tensor.
    """
    groups = attention.groups
    rest = {name: groups[name] for name in (rows, columns)}
    reason = None
    for batch in ({"batch": attention.batch}, batch_groups(attention)):
        access = affine_access(indices, shape, {**batch, **rest})
        if access is None:
            continue
        view = View(param, dtype, access, rows, columns)
        try:
            view.boxes(UNIT)
        except Unsupported as why:
            reason = why
            continue
        return view
    if reason is not None:
        raise reason
    return None


def _result(attention: Attention) -> View | None:
    """The only output over the features, if it is the result itself and the TMA can store it."""
    if len(attention.outputs) != 1:
        return None
    output = attention.outputs[0]
    value = output.value
    while isinstance(value, tirx.Cast) and dtype_of(value.value) == "float32":
        value = value.value
    if output.dtype not in HALF_DTYPES or not value.same_as(attention.result):
        return None
    if isinstance(output.value, tirx.Cast) and dtype_of(output.value) != output.dtype:
        return None
    param = attention.params[output.param]
    try:
        return _view(attention, param.var, output.dtype, output.indices, param.shape, "m", "e")
    except Unsupported:
        return None


def score_factor(logit: Expr, score: Var) -> float | None:
    """``c`` of a logit that is ``c * score``, else None."""
    if logit.same_as(score):
        return 1.0
    if isinstance(logit, tirx.Mul):
        for value, other in ((logit.a, logit.b), (logit.b, logit.a)):
            factor = number(value)
            if factor is not None:
                inner = score_factor(other, score)
                return None if inner is None else inner * factor
    if isinstance(logit, tirx.Div) and number(logit.b):
        inner = score_factor(logit.a, score)
        return None if inner is None else inner / number(logit.b)
    return None


def is_load(expr: Expr) -> bool:
    """Whether an expression is a load of a parameter, at most widened."""
    return isinstance(expr.value if isinstance(expr, tirx.Cast) else expr, TensorLoad)
