"""What the forms of attention that keep a tile of queries share: the problem, the plan, the tiles.

Such a form walks over tiles of keys for each tile of queries. It leaves out those that no query of
the tile sees, and looks at single points only where some are hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var
from tvm.script import tirx as T

from ....ir.reader import children
from ...contraction.model import Extent, Output, size_of
from ...gemm.hopper.epilogue import PAIRED_DTYPES
from ...gpu.access import affine_access, store_pair
from ...gpu.product_frame import Frame, coordinates, lower
from ...program.expr import bytes_of, convert, dtype_of, number, uses_any
from ..read.bounds import Range
from ..read.model import Attention

# Results of 16 queries of each warp leave from registers.
#
# Two neighbouring columns are stored at once where they lie side by side.


class RowStores:
    """Emits the stores of a thread that holds `column` and the next of every 8 columns.

    `results` are its accumulators: element ``4 * i + 2 * half + v`` is of row `half` and column
    ``8 * i + column + v``.
    """

    def __init__(self, kernel: TiledKernel, results: Expr, lane: Expr, column: Expr):
        self.kernel, self.frame, self.results = kernel, kernel.frame, results
        self.attention, self.features = kernel.problem.attention, kernel.problem.features
        self.lane, self.column = lane, column

    def emit(self, tile: Tile, half: int, row: Expr, lse: Expr | None, whole: bool) -> None:
        """Emits the outputs of a row that exists; those over the features only if `whole`."""
        env = dict(tile.axes)
        env |= coordinates(self.attention.queries, row, self.frame)
        if lse is not None:
            env[self.attention.lse] = lse
        if self.attention.row_outputs:
            with T.If(self.lane % 4 == 0), T.Then():
                for output in self.attention.row_outputs:
                    value = lower(self.frame.rewrite(output.value, env), False)
                    indices = self.frame.place(output.indices, env)
                    target = self.frame.output(output.param)
                    T.buffer_store(target, convert(value, output.dtype), indices)
        if not whole:
            return
        for group in range(self.features // 8):
            column = group * 8 + self.column
            pair = [self._values(env, group, half, v, column + v) for v in range(2)]
            for position, output in enumerate(self.attention.outputs):
                self._store(output, env, column, [values[position] for values in pair])

    def _values(
        self, env: dict[Var, Expr], group: int, half: int, v: int, column: Expr
    ) -> list[Expr]:
        """The outputs of one element."""
        env = env | coordinates(self.attention.features, column, self.frame)
        env[self.attention.result] = T.Bind(self.results[group * 4 + half * 2 + v])
        outputs = self.attention.outputs
        halves = all(bytes_of(output.dtype) <= 2 for output in outputs)
        for binding in self.attention.output_bindings:
            env[binding.var] = T.Bind(lower(self.frame.rewrite(binding.value, env), halves))
        return [T.Bind(lower(self.frame.rewrite(o.value, env), halves)) for o in outputs]

    def _store(
        self, output: Output, env: dict[Var, Expr], column: Expr, pair: Sequence[Expr]
    ) -> None:
        target = self.frame.output(output.param)
        paired = self._is_paired(output)
        for v in range(1 if paired else 2):
            point = env | coordinates(self.attention.features, column + v, self.frame)
            indices = self.frame.place(output.indices, point)
            if paired:
                low, high = (convert(x, "float32") for x in pair)
                T.evaluate(store_pair(output.dtype, target.ptr_to(indices), low, high))
            else:
                T.buffer_store(target, convert(pair[v], output.dtype), indices)

    def _is_paired(self, output: Output) -> bool:
        """Whether columns 2 i and 2 i + 1 are one aligned access."""
        if output.dtype not in PAIRED_DTYPES:
            return False
        groups = {name: self.attention.groups[name] for name in ("batch", "m", "e")}
        shape = self.attention.params[output.param].shape
        access = affine_access(output.indices, shape, groups)
        return access is not None and access.aligned(2, "e")


# Which tiles of keys a tile of queries meets, and which of these it sees as a whole.
#
#     key <= query + 3 and key >= query - 100, queries 128 ... 255, tiles of 64 keys
#       keys 28 ... 258 -> tiles 0 ... 4; those that all of its queries see: 155 ... 131, none
#
# The conditions come from `attention.read.bounds`.


@dataclass(frozen=True, slots=True)
class KeyTiles:
    """Tiles of keys of a tile of queries: ``first ... end - 1``, of which ``whole_first ...
    whole_end - 1`` need no look at single points. ``first <= whole_first <= whole_end < end``.
    """

    first: Expr | int
    whole_first: Expr | int
    whole_end: Expr | int
    end: Expr | int


def static_tiles(
    keys: Range, rows: tuple[int, int], size: int, block_n: int
) -> tuple[int, int, int, int] | None:
    """`KeyTiles` of rows ``rows[0] ... rows[1]`` where all is known, else None."""
    bounds = []
    for bound in keys.bounds:
        rest = number(bound.rest)
        if rest is None:
            return None
        ends = sorted(bound.slope * row + int(rest) for row in rows)
        bounds.append((bound.upper, *ends))
    tiles = -(-size // block_n)
    end = min([size, *(high + 1 for upper, _, high in bounds if upper)])
    first = max([0, *(low for upper, low, _ in bounds if not upper)])
    whole_end = min([size, *(low + 1 for upper, low, _ in bounds if upper)])
    whole_first = max([0, *(high for upper, _, high in bounds if not upper)])
    end = min(max(-(-end // block_n), 1), tiles)
    first = min(max(first // block_n, 0), end - 1)
    whole_end = min(max(whole_end // block_n, first), end - 1)
    if keys.rest:
        whole_end = first
    whole_first = min(max(-(-whole_first // block_n), first), whole_end)
    return first, whole_first, whole_end, end


def emit_tiles(
    frame: Frame, keys: Range, rows: Sequence[Expr], size: Expr, block_n: int, env: dict
) -> KeyTiles:
    """Emits the tiles of the rows from `rows[0]` to `rows[1]`; `env` has the axes of the batch."""
    width = T.int32(block_n)
    end, first = size, T.int32(0)
    whole_end, whole_first = size, T.int32(0)
    for bound in keys.bounds:
        rest = T.Bind(convert(frame.rewrite(bound.rest, env), "int32"))
        low, high = rest, rest
        if bound.slope:
            at = [row * T.int32(bound.slope) + rest for row in rows]
            low, high = at if bound.slope > 0 else reversed(at)
        if bound.upper:
            end, whole_end = T.min(end, high + 1), T.min(whole_end, low + 1)
        else:
            first, whole_first = T.max(first, low), T.max(whole_first, high)
    tiles = tirx.FloorDiv(size + (block_n - 1), width)
    # Truncated divisions: what is negative is brought to 0 before.
    zero, one = T.int32(0), T.int32(1)
    end = T.max(T.truncdiv(T.max(end, zero) + (block_n - 1), width), one)
    end = T.Bind(T.min(end, tiles))
    first = T.Bind(T.min(T.truncdiv(T.max(first, zero), width), end - 1))
    if keys.rest:
        return KeyTiles(first, first, first, end)
    whole_end = T.truncdiv(T.max(whole_end, zero), width)
    whole_end = T.Bind(T.min(T.max(whole_end, first), end - 1))
    whole_first = T.truncdiv(T.max(whole_first, zero) + (block_n - 1), width)
    whole_first = T.Bind(T.min(T.max(whole_first, first), whole_end))
    return KeyTiles(first, whole_first, whole_end, end)


# Tiles of queries that are walked through to find what no tile needs.
MAX_WALK = 4096

# Types of masks that hold lower numbers than float16.
WIDE = ("bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True, eq=False)
class TiledAttention:
    """An attention for tensor cores that multiply halves.

    Attributes
    ----------
    dtype : of the operands.
    terms, features : columns of Q and K, and of V.
    scale : the factor of a logit that is nothing but the score times a positive number; else None.
    """

    attention: Attention
    dtype: str
    terms: int
    features: int
    scale: float | None

    @property
    def hides(self) -> bool:
        """Whether there may be rows without a visible key."""
        return self.attention.visible is not None or self.scale is None

    @property
    def wide_masks(self) -> bool:
        """Whether logits hold what is read for a key and may be far below what float16 has."""
        attention = self.attention
        keys = [axis.var for axis in attention.keys]
        waiting = [] if self.scale is not None else [attention.logit]
        waiting += [binding.value for binding in attention.bindings if waiting]
        while waiting:
            value = waiting.pop()
            wide = isinstance(value, TensorLoad) and dtype_of(value) in WIDE
            if wide and uses_any(value, keys):
                return True
            waiting.extend(children(value))
        return False


def logit_scale(attention: Attention) -> float | None:
    """`TiledAttention.scale` of an attention."""
    scale = score_factor(attention.logit, attention.score)
    return None if scale is None or scale <= 0 else scale


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


class TileConfig(Protocol):
    """What the configurations have in common; see `attention.hopper.config.AttentionConfig`."""

    block_m: int
    block_n: int
    lazy: float


@dataclass(frozen=True, slots=True, eq=False)
class TiledPlan:
    """What follows from a problem and a configuration.

    `query_tiles` are those of one head, `tiles` all of them; `uneven` says that they differ in the
    number of keys they meet. `parts` are those of the loop over keys that some tile needs: behind
    the first tile come tiles looked at by point ("above"), "whole" tiles, and such tiles again
    ("below"). `points_first` says that the first is looked at by point.
    """

    config: TileConfig
    query_tiles: Extent
    tiles: Extent
    keys: Range
    uneven: bool
    parts: frozenset[str]
    points_first: bool

    @property
    def ragged_keys(self) -> bool:
        """Whether the last tile of keys may reach beyond them."""
        return "ragged" in self.parts


def loop_parts(
    attention: Attention, keys: Range, block_m: int, block_n: int
) -> tuple[frozenset[str], bool]:
    """The parts of the loop over keys, and whether the first tile is looked at by point."""
    M, N = attention.M, attention.N
    ragged = not isinstance(N, int) or N % block_n != 0
    found = {"ragged"} if ragged else set()
    by_point = ragged or bool(keys.bounds or keys.rest)
    if isinstance(M, int) and isinstance(N, int) and MAX_WALK * block_m >= M:
        tops = range(0, M, block_m)
        rows = [(top, min(top + block_m, M) - 1) for top in tops]
        all_tiles = [static_tiles(keys, pair, N, block_n) for pair in rows]
        if None not in all_tiles:
            for first, whole_first, whole_end, end in all_tiles:
                counts = {
                    "above": end - 1 - whole_end,
                    "whole": whole_end - whole_first,
                    "below": whole_first - first,
                }
                found |= {name for name, count in counts.items() if count}
            return frozenset(found), by_point
    found |= {"whole"} if not keys.rest else set()
    if keys.rest or any(bound.upper for bound in keys.bounds):
        found.add("above")
    if not keys.rest and any(not bound.upper for bound in keys.bounds):
        found.add("below")
    return frozenset(found), by_point


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Queries of one head: `batch` is the flat coordinate, `query` the first; and their keys."""

    batch: Expr
    query: Expr
    keys: KeyTiles
    axes: dict[Var, Expr]

    @property
    def place(self) -> dict[str, Expr]:
        """Flat coordinates of the groups of the batch."""
        own = {f"batch{i}": value for i, value in enumerate(self.axes.values())}
        return {"batch": self.batch, **own}


@dataclass(slots=True, eq=False)
class TiledKernel:
    """A kernel under construction."""

    frame: Frame
    problem: TiledAttention
    plan: TiledPlan

    def size(self, extent: Extent) -> Expr:
        """A size as an int32."""
        return T.int32(extent) if isinstance(extent, int) else convert(extent, "int32")

    @property
    def M(self) -> Expr:
        """Number of queries of a head."""
        return self.size(size_of(self.problem.attention.queries))

    @property
    def N(self) -> Expr:
        """Number of keys of a head."""
        return self.size(size_of(self.problem.attention.keys))

    def tile(self, number: Expr) -> Tile:
        """Emits tile number `number` of all."""
        attention, c = self.problem.attention, self.plan.config
        query_tiles, batch = self.size(self.plan.query_tiles), self.size(attention.B)
        if self.plan.uneven:  # the longest first, a head's tiles apart
            query, head = query_tiles - 1 - number // batch, kept(number % batch)
        else:
            query, head = number % query_tiles, kept(number // query_tiles)
        first = kept(query * c.block_m)
        axes = coordinates(attention.batch, head, self.frame)
        axes = {var: kept(convert(value, "int32")) for var, value in axes.items()}
        last = tirx.Min(first + (c.block_m - 1), self.M - 1)
        keys = emit_tiles(self.frame, self.plan.keys, (first, last), self.N, c.block_n, axes)
        keys = KeyTiles(*map(kept, (keys.first, keys.whole_first, keys.whole_end, keys.end)))
        return Tile(head, first, keys, {a.var: axes[a.var] for a in attention.batch})


def kept(value: Expr) -> Expr:
    """An int32, computed here: what is only bound would be spelled out wherever it is used."""
    if isinstance(value, tirx.IntImm):
        return value
    found = T.alloc_local((1,), "int32")
    T.buffer_store(found, value, [0])
    return found[0]
