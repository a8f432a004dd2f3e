"""An attention as the Hopper kernel sees it: which tensors the TMA addresses, what is computed at
each score, where the results go.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Var

from ....config import HardwareProfile
from ....errors import Unsupported
from ...contraction.model import Axis, Operand, Output
from ...gpu.access import AffineAccess, affine_access
from ...gpu.tensor_map import TensorMap, tensor_map
from ...program.expr import HALF_DTYPES, dtype_of
from ...program.program import Param
from ..read.model import Attention
from ..tiled.tiles import TiledAttention, logit_scale
from .config import BOX, MAX_FEATURES, WGMMA_TERMS, boxes_of

# Terms and features of a tensor whose rows the TMA can address.
UNIT = 8


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """An operand or a result as a tensor over the batch, points ("m" or "n") and the head.

    Attributes
    ----------
    rows, columns : of its boxes; neighbours in memory are of different columns.
    head : number of terms or features.
    transposed : the points are the columns, else the head is.
    """

    param: Var
    dtype: str
    access: AffineAccess
    rows: str
    columns: str
    head: int
    transposed: bool

    def boxes(self, points: int) -> TensorMap:
        """The boxes of 64 columns that a tile of so many points is made of.

        Raises
        ------
        Unsupported
            A transposed tile is no whole number of boxes, or not all of one.
        """
        if self.transposed and points > BOX and points % BOX:
            raise Unsupported(f"a turned tile of {points} points, which are no whole boxes")
        box = {self.columns: BOX, self.rows: self._depth if self.transposed else points}
        return tensor_map(self.param, self.dtype, self.access, self.columns, box)

    def layout(self, points: int) -> tuple[int, int]:
        """Boxes of a tile of so many points, and the elements of one."""
        if self.transposed:
            return boxes_of(points), self._depth * BOX
        return boxes_of(self.head), points * BOX

    @property
    def _depth(self) -> int:
        """Rows of a transposed box: those that the products read."""
        return -(-self.head // WGMMA_TERMS) * WGMMA_TERMS


@dataclass(frozen=True, slots=True, eq=False)
class HopperAttention(TiledAttention):
    """Made by `read_attention`.

    Attributes
    ----------
    q, k, v : the operands.
    result : the single output, where it is nothing but the result and the TMA can store it.
    """

    q: View
    k: View
    v: View
    result: View | None

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
    if not hw.architecture.has_wgmma:
        raise Unsupported(f"{hw.arch} has no wgmma")
    terms, features = attention.D, attention.E
    for size, name in ((terms, "terms"), (features, "features")):
        if not isinstance(size, int):
            raise Unsupported(f"a symbolic number of {name}")
        if size % UNIT or size > MAX_FEATURES:
            raise Unsupported(f"{size} {name}: no multiple of {UNIT} up to {MAX_FEATURES}")
    q = _operand(attention, attention.q, "m", "d", terms)
    k = _operand(attention, attention.k, "n", "d", terms)
    v = _operand(attention, attention.v, "n", "e", features)
    dtypes = {view.dtype for view in (q, k, v)}
    if len(dtypes) != 1 or not dtypes <= set(HALF_DTYPES):
        raise Unsupported(f"operands of {', '.join(sorted(dtypes))}, not of one half precision")
    scale, result = logit_scale(attention), _result(attention)
    return HopperAttention(attention, q.dtype, terms, features, scale, q, k, v, result)


def batch_groups(attention: Attention) -> dict[str, tuple[Axis, ...]]:
    """Each axis of the batch as a group of its own, by the name accesses have for it."""
    return {f"batch{i}": (axis,) for i, axis in enumerate(attention.batch)}


def _operand(attention: Attention, operand: Operand, points: str, along: str, head: int) -> View:
    """The view of an operand, transposed where no other is."""
    load = operand.load
    if load is None:
        raise Unsupported("an operand that is computed, not loaded")
    param = next(p for p in attention.params if p.var.same_as(load.source))
    reason = None
    for transposed, names in enumerate(((points, along), (along, points))):
        try:
            view = _view(attention, param, load, names, head, bool(transposed))
        except Unsupported as why:
            reason = reason or why
            continue
        if view is None:
            raise Unsupported(f"{param.name}: an index that is not affine")
        return view
    raise reason


def _view(
    attention: Attention,
    param: Param,
    load: tirx.BufferLoad | Output,
    names: tuple[str, str],
    head: int,
    transposed: bool = False,
) -> View | None:
    """The view with all axes of the batch as one, or else with each of its own; None where the
    index is not affine in them. `names` are those of rows and columns.

    Raises Unsupported where no box of any size is one of the tensor.
    """
    groups = attention.groups
    rest = {name: groups[name] for name in names}
    reason = None
    for batch in ({"batch": attention.batch}, batch_groups(attention)):
        access = affine_access(load.indices, param.shape, {**batch, **rest}, symbolic_strides=True)
        if access is None:
            continue
        view = View(param.var, param.dtype, access, *names, head, transposed)
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
        return _view(attention, param, output, ("m", "e"), attention.E)
    except Unsupported:
        return None
