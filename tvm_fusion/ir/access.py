"""Access maps: which element of which tensor every block of a PrimFunc reads and writes, and what
it computes a point.

    T[i, j] = max(x[i, 2*j + 1], b[j])     i < M, j < N
      -> Block(axes = (i: M spatial, j: N spatial),
               reads = (x[(1,0)+0, (0,2)+1], b[(0,1)+0]), write = T[(1,0)+0, (0,1)+0], counts =
               {arithmetic: 1})

Everything here is plain Python values, so that the planner never touches TVM objects. Extents are
ints, or the printed form of a symbolic expression. An index that is no affine function of the
block's axes is `Irregular` and says which axes it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, wraps
from typing import Any, TypeVar

Extent = int | str


class AxisKind(Enum):
    SPATIAL = "spatial"
    REDUCE = "reduce"
    OPAQUE = "opaque"


class Pipe(Enum):
    """The unit that executes an operation (DESIGN: the cost model's terms)."""

    ARITHMETIC = "arithmetic"  # add, mul, compare, select, convert: the FMA pipe
    SPECIAL = "special"  # exp, tanh, erf, rsqrt, log, ...: the special-function unit
    DIVISION = "division"
    INTEGER = "integer"  # integer division and modulo in indices or values


@dataclass(frozen=True, slots=True)
class Axis:
    extent: Extent
    kind: AxisKind


@dataclass(frozen=True)
class Affine:
    """sum_i coefficients[i] * axis_i + constant."""

    coefficients: tuple[int, ...]
    constant: int = 0

    @cached_property
    def axes(self) -> frozenset[int]:
        return frozenset(i for i, c in enumerate(self.coefficients) if c)

    @cached_property
    def single_axis(self) -> int | None:
        """The axis this index equals, if it is exactly one axis with coefficient 1 and no
        offset.
        """
        if self.constant == 0 and sum(map(abs, self.coefficients)) == 1:
            return next((i for i, c in enumerate(self.coefficients) if c == 1), None)
        return None


@dataclass(frozen=True, slots=True)
class Irregular:
    """An index that is not affine: division and modulo (reshapes), or an element of another tensor
    (gathers). With `repeats`, ``axis // repeats``: so many neighbours read one element.
    """

    axes: frozenset[int]
    data_dependent: bool = False
    repeats: int = 1


Index = Affine | Irregular


@dataclass(frozen=True)
class Access:
    """One read or write of a tensor.

    `tensor` is a key of the owner: inside a PrimFunc, the position of the parameter, or -1 - k for
    its k-th inner buffer. `guarded`: evaluated under a condition only (if_then_else).
    """

    tensor: int
    index: tuple[Index, ...]
    guarded: bool = False

    @cached_property
    def derived(self) -> dict[str, Any]:
        """What functions that are `derived` have found."""
        return {}

    @cached_property
    def axes(self) -> frozenset[int]:
        return frozenset().union(*(i.axes for i in self.index))

    @cached_property
    def data_dependent(self) -> bool:
        return any(isinstance(i, Irregular) and i.data_dependent for i in self.index)

    def remap(self, tensors: dict[int, int]) -> Access:
        return replace(self, tensor=tensors[self.tensor])


class Reduction(Enum):
    SUM = "sum"
    PRODUCT = "product"
    MAX = "max"
    MIN = "min"
    ARGMAX = "argmax"
    ARGMIN = "argmin"
    OTHER = "other"  # every combiner this package does not know


@dataclass(frozen=True)
class Block:
    """One loop nest: `axes`, what it reads and writes at each point, and the operations a point, by
    pipe.

    `functions` are the special functions by name (divisions of `counts` are not among them), and
    `conversions` those between floating-point types, which belong to a load or a store and count as
    no work of an operator. `scales`: it multiplies what it reads by a number, and nothing else;
    `moves`: each point is an element that it reads, of one of its reads or zero as conditions say.
    `scanned` is the axis along which each point combines all points before it (`blocks.Scan`).
    """

    name: str
    axes: tuple[Axis, ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    counts: tuple[tuple[Pipe, float], ...] = ()
    reduction: Reduction | None = None
    is_contraction: bool = False  # sum of a product of two reads: matmul, convolution
    functions: tuple[tuple[str, float], ...] = ()
    conversions: float = 0.0
    scales: bool = False
    compares: bool = False
    moves: bool = False
    scanned: int | None = None

    @cached_property
    def derived(self) -> dict[str, Any]:
        """What functions that are `derived` have found."""
        return {}

    @cached_property
    def spatial(self) -> tuple[int, ...]:
        return tuple(i for i, a in enumerate(self.axes) if a.kind is AxisKind.SPATIAL)

    @cached_property
    def reduced(self) -> tuple[int, ...]:
        return tuple(i for i, a in enumerate(self.axes) if a.kind is AxisKind.REDUCE)

    def extents(self, axes: tuple[int, ...]) -> tuple[Extent, ...]:
        return tuple(self.axes[i].extent for i in axes)

    @cached_property
    def is_matrix_product(self) -> bool:
        """A contraction both of whose operands vary over spatial axes the other lacks: no row of
        one is read once.
        """
        if not self.is_contraction:
            return False
        spatial = set(self.spatial)
        a, b = (set(read.axes) & spatial for read in self.reads)
        return bool(a - b) and bool(b - a)

    def operations(self) -> float:
        return sum(count for _, count in self.counts)


@dataclass(frozen=True, slots=True)
class FuncAccess:
    """The access maps of a PrimFunc; `refusal` says why it could not be read (it is then opaque to
    the planner).
    """

    blocks: tuple[Block, ...]
    num_inner: int = 0
    refusal: str | None = None
    inner_shapes: tuple[tuple[Extent, ...], ...] = ()
    inner_dtypes: tuple[str, ...] = ()


Found = TypeVar("Found")
_NOT_YET = object()


def derived(find: Callable[..., Found]) -> Callable[..., Found]:
    """`find` of a block or an access, called once for each: what it finds is kept with that.

    What else it takes is the same at each call, such as the block of an access.
    """

    name = f"{find.__module__}.{find.__qualname__}"

    @wraps(find)
    def known(item: Block | Access, *context: Any) -> Found:
        found = item.derived.get(name, _NOT_YET)
        if found is _NOT_YET:
            found = item.derived[name] = find(item, *context)
        return found

    return known
