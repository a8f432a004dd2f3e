"""What an epilogue reads beside the accumulators, taken out of its expressions to be read ahead.

    out[m, n] = gelu(acc + f32(bias[n])) * f32(x[m, n])
      ->  out[m, n] = gelu(acc + l0) * l1      l0 = bias[n] (a row vector), l1 = x[m, n] (a matrix)

Loads under a condition, and loads whose index holds another load, stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ..contraction.model import Binding, fresh_var
from ..contraction.reader import Contraction, Output, Segment
from ..gpu.access import AffineAccess, Groups, affine_access
from ..program.expr import HALF_DTYPES, dtype_of, is_if_then_else, rebuild, same, variables, widened


@dataclass(frozen=True, slots=True, eq=False)
class EpilogueLoad:
    """``var = parameter[indices]``, widened; `groups` are those of batch, m, n it depends on."""

    var: Var
    param: Var
    indices: tuple[Expr, ...]
    dtype: str
    groups: frozenset[str]
    access: AffineAccess | None

    @property
    def per_column(self) -> bool:
        """Whether it differs between columns."""
        return "n" in self.groups

    @property
    def per_row(self) -> bool:
        """Whether it differs between rows."""
        return "m" in self.groups

    @property
    def paired(self) -> bool:
        """Whether columns 2 i and 2 i + 1 are the halves of one aligned 32-bit word."""
        aligned = self.access is not None and self.access.aligned(2, "n")
        return aligned and self.dtype in HALF_DTYPES


def take_loads(
    contraction: Contraction, segment: Segment, groups: Groups
) -> tuple[tuple[Binding, ...], tuple[Output, ...], tuple[EpilogueLoad, ...]]:
    """Bindings and outputs of a segment with placeholders for the loads, and the loads."""
    taker = _Taker(contraction, groups)
    bindings = tuple(Binding(b.var, taker.visit(b.value)) for b in segment.bindings)
    outputs = tuple(replace(o, value=taker.visit(o.value)) for o in segment.outputs)
    return bindings, outputs, tuple(taker.found)


class _Taker:
    def __init__(self, contraction: Contraction, groups: Groups):
        self.contraction, self.groups = contraction, groups
        self.found: list[EpilogueLoad] = []

    def visit(self, expr: Expr) -> Expr:
        if is_if_then_else(expr):
            return tirx.if_then_else(self.visit(expr.args[0]), *expr.args[1:])
        load = expr.value if isinstance(expr, tirx.Cast) else expr
        if isinstance(load, TensorLoad):
            taken = self._take(load) if dtype_of(expr) == widened(dtype_of(load)) else None
            return expr if taken is None else taken
        return expr if isinstance(expr, Var) else rebuild(expr, self.visit)

    def _take(self, load: TensorLoad) -> Var | None:
        if any(holds_load(index) for index in load.indices):
            return None
        for known in self.found:
            if known.param.same_as(load.source) and _equal(known.indices, load.indices):
                return known.var
        owner = {axis.var: name for name, axes in self.groups.items() for axis in axes}
        used = frozenset(owner[v] for v in variables(*load.indices) if v in owner)
        shape = next(p.shape for p in self.contraction.params if p.var.same_as(load.source))
        access = affine_access(load.indices, shape, self.groups)
        dtype = dtype_of(load)
        var = fresh_var(f"l{len(self.found)}", widened(dtype))
        indices = tuple(load.indices)
        self.found.append(EpilogueLoad(var, load.source, indices, dtype, used, access))
        return var


def _equal(a: Sequence[Expr], b: Sequence[Expr]) -> bool:
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def holds_load(expr: Expr) -> bool:
    """Whether an expression reads memory."""
    if isinstance(expr, TensorLoad):
        return True
    found: list[bool] = []

    def visit(child: Expr) -> Expr:
        found.append(holds_load(child))
        return child

    rebuild(expr, visit)
    return any(found)


def reads_in_place(bindings: Sequence[Binding], outputs: Sequence[Output]) -> bool:
    """Whether values hold loads that are not fetched ahead: at an index that is read too, a mask
    widened to an integer, or what stands under a condition. They are read at rows and columns that
    exist, also where the tile reaches beyond the matrix.
    """
    values = [*(b.value for b in bindings), *(o.value for o in outputs)]
    return any(map(holds_load, values))
