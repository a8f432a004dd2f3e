"""Attention as a value: what a PrimFunc around two products with a softmax between them computes.

    S[b, h, i, j] = sum_d q[b, h, i, d] * k[b, h // 4, j, d]      batch (b, h) queries (i) keys (j)
    P = softmax_j(0.125 * S + mask[b, 0, i, j])                   logit 0.125 * score + mask[...]
    y[b, i, h, e] = sum_j P[b, h, i, j] * v[b, h // 4, j, e]      output (b, i, h, e): result

At each point of (batch, queries, keys) there is a score, a logit computed from it, and whether the
key is visible. The result at (batch, queries, features) is the average of the values of the visible
keys with weights exp(logit); `lse` is the logarithm of the sum of these weights. A row without a
visible key has the result 0 and lse -inf (Dao et al., FlashAttention-2, 2023, section 3.1, gives
the online form; the zero is what `torch.nn.functional.scaled_dot_product_attention` returns).

Expressions are TIR over axis variables (int64), placeholders and loads of the PrimFunc's own
parameters, half precision widened to float32, as in `contraction.model`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tvm.ir import Expr, Var

from ....ir.extents import analyzer_of
from ...contraction.model import Axis, Binding, Operand, Output, size_of
from ...program.expr import constant, dtype_of
from ...program.program import Extent, Param

INVISIBLE = -3.0e4
"""A constant at or below this, put in place of a score or added to it, leaves a key no weight in
float32 next to any visible key whose logit is not itself as far below zero. It hides the key where
each row sees another one; where a row may see none, its keys keep the weights that they have among
themselves, and only -inf hides."""


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """What one fused PrimFunc computes; made by `program.analyze_attention`.

    Attributes
    ----------
    name : global symbol of the PrimFunc, or None.
    params : parameters in the order of the PrimFunc.
    batch, queries, keys, terms, features : axes; those of extent 1 are left out. `terms` are summed
        over in a score, `features` are the columns of V and of the result.
    q : Operand over batch, queries and terms.
    k : Operand over batch, keys and terms.
    v : Operand over batch, keys and features. Constant factors of operands are in `logit` or in the
        outputs.
    score : placeholder of ``sum over terms of q * k``, float32.
    logit : over `score`, `bindings`, batch, queries, keys; float32, natural logarithm; any value
        where the key is not visible.
    visible : boolean over the same, or None where all keys are.
    bindings : temporaries of `logit` and `visible`, to be computed in order at each point.
    result : placeholder of the weighted average of the values, float32.
    lse : placeholder of the logarithm of the sum of weights of a row, float32.
    outputs : over batch, queries and features; values over `result`, `lse` and `output_bindings`.
    row_outputs : over batch and queries; values over `lse` and no bindings.
    operand_dtype : the dtype that q, k and v are stored in.
    weight_dtype : the dtype that the unfused graph rounds the weights to before the second product.
    """

    name: str | None
    params: tuple[Param, ...]
    batch: tuple[Axis, ...]
    queries: tuple[Axis, ...]
    keys: tuple[Axis, ...]
    terms: tuple[Axis, ...]
    features: tuple[Axis, ...]
    q: Operand
    k: Operand
    v: Operand
    score: Var
    logit: Expr
    visible: Expr | None
    bindings: tuple[Binding, ...]
    result: Var
    lse: Var
    outputs: tuple[Output, ...]
    row_outputs: tuple[Output, ...]
    output_bindings: tuple[Binding, ...]
    operand_dtype: str
    weight_dtype: str

    @property
    def B(self) -> Extent:
        """Number of independent attentions: batch times heads."""
        return size_of(self.batch)

    @property
    def M(self) -> Extent:
        """Number of queries of one."""
        return size_of(self.queries)

    @property
    def N(self) -> Extent:
        """Number of keys of one."""
        return size_of(self.keys)

    @property
    def may_lack_keys(self) -> bool:
        """Whether there may be queries and no key: where the symbolic number of these is not, for
        all sizes, 1 or as large as that of the queries.
        """
        if isinstance(self.N, int):
            return False
        analyzer = analyzer_of({}, [self.N, *([] if isinstance(self.M, int) else [self.M])])
        some = analyzer.can_prove(constant(0, dtype_of(self.N)) < self.N)
        return not some and (isinstance(self.M, int) or not analyzer.can_prove(self.M <= self.N))

    @property
    def D(self) -> Extent:
        """Number of terms of a score."""
        return size_of(self.terms)

    @property
    def E(self) -> Extent:
        """Number of features of a value."""
        return size_of(self.features)

    @property
    def groups(self) -> dict[str, tuple[Axis, ...]]:
        """The axes by the name of their group, as accesses have them: the rows of a kernel are the
        queries ("m"), its columns the keys ("n").
        """
        return {
            "batch": self.batch,
            "m": self.queries,
            "n": self.keys,
            "d": self.terms,
            "e": self.features,
        }

    @property
    def is_static(self) -> bool:
        """Whether all extents are known."""
        axes = (axis for group in self.groups.values() for axis in group)
        return all(isinstance(axis.extent, int) for axis in axes)

    def __str__(self) -> str:
        def names(axes: Iterable[Axis]) -> str:
            return "(" + ", ".join(f"{axis.var}: {axis.extent}" for axis in axes) + ")"

        lines = [" ".join(f"{name} {names(axes)}" for name, axes in self.groups.items())]
        for name, operand in (("q", self.q), ("k", self.k), ("v", self.v)):
            lines += [f"  {b.var} = {b.value}" for b in operand.bindings]
            lines.append(f"  {name} = {operand.value}")
        lines += [f"  {b.var} = {b.value}" for b in self.bindings]
        lines.append(f"  logit = {self.logit}")
        if self.visible is not None:
            lines.append(f"  visible = {self.visible}")
        lines += [f"  {b.var} = {b.value}" for b in self.output_bindings]
        for output in (*self.outputs, *self.row_outputs):
            index = ", ".join(map(str, output.indices))
            lines.append(f"  {self.params[output.param].name}[{index}] = {output.value}")
        return "\n".join(lines)
