"""Tiles of a contraction, by predicted time.

    task tile       rows x columns of the result that one task computes
    register tile   rows x vectors of it that are summed up in registers

Both follow from a small model of a core: multiply-adds, what has to be loaded for them, where that
lies, what packing costs, and cores that wait. All of it counts cycles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product as combinations
from math import ceil, gcd, prod

from tvm.ir import Expr, TensorLoad, Var
from tvm.sym import Analyzer

from ...program.expr import bytes_of, dtype_of
from ..groups import Group, is_small
from ..machine import Machine
from ..stages.rewrite import loads
from ..stages.stages import (
    Axis,
    Stage,
    analyzer_of,
    bytes_of_buffer,
    load_stride,
    points,
    size_of,
    stage_work,
)
from .bfloat16_pairs import lies_in_pairs, takes_pairs
from .operands import Product, constant_panels, operand_loads
from .panels import Panels, plain_load

# In how many tiles a side is cut.
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)

# The same for an axis of unknown extent: elements of a tile.
UNKNOWN_TILES = (8, 16, 32, 64, 128, 256)

# Cycles of a load in a register tile (of a vector or of one element for all lanes) beside the
# multiply-adds, which take one each, and of a vector of the right operand from the second-level
# cache. On a Zen 4 tiles of 6 x 4 vectors reach 0.93 of the peak, 14 x 2 0.86, 24 x 1 0.66,
# 1 x 4 0.46.
LOAD_CYCLES, NEAR_CYCLES = 0.2, 2.0

# Panels to read side by side where as many cycles are needed either way.
STREAMS = 4

# Multiply-adds under way at a time: two units with a latency of four cycles.
LEAST_CYCLES = 4.0

# Cycles of a vector that comes from beyond the second-level cache, and of one of the result:
# stored, read and stored again, or from further away.
FAR_CYCLES, RESULT_CYCLES, FAR_RESULT_CYCLES = 4.0, 4.0, 10.0

# Terms and elements of the right operand that a task packs at a time: 256 x 256 float32 are a
# quarter of a 1 MB second-level cache.
TERMS_BLOCK = 256
PACKED_ELEMENTS = 72 << 10

# What a task may count on of a core's second-level cache (1 MB); every stage of its group keeps a
# tile at most.
NEAR_BYTES = 512 << 10

# Cycles of beginning a task, a register tile, and a parallel loop.
TASK_CYCLES, TILE_CYCLES, LOOP_CYCLES = 500, 20, 12_000

# Cost of packing an element, in multiply-adds, measured on convolutions and transposed weights:
# contiguous, for each run of contiguous ones, strided, and of writing it to main memory and back.
PACK_CONTIGUOUS, PACK_RUN, PACK_STRIDED, PACK_AHEAD = 12.0, 200.0, 60.0, 6.0
PACK_TURNED = 16.0

Tile = list[int | None]


@dataclass(frozen=True, slots=True)
class RegisterTile:
    """What is summed up in registers: `rows` times `vectors` of `lanes` elements."""

    rows: int
    vectors: int
    lanes: int

    @property
    def columns(self) -> int:
        """Columns of a whole tile."""
        return self.vectors * self.lanes


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A contraction of a group, and which of the shared axes are its rows and its columns."""

    group: Group
    member: int
    product: Product
    machine: Machine

    @property
    def stage(self) -> Stage:
        """The stage that contracts."""
        return self.group.stages[self.member]

    @property
    def dtype(self) -> str:
        """What is summed up."""
        return dtype_of(self.stage.values[0])

    @property
    def lanes(self) -> int:
        """Columns of a vector."""
        return self.machine.lanes(bytes_of(self.dtype))

    @property
    def paired(self) -> bool:
        """Whether terms are multiplied in pairs."""
        return takes_pairs(self.stage, self.product, self.machine)

    def dims(self, side: tuple[Axis, ...]) -> list[int]:
        """Shared axes that belong to a side."""
        found = range(len(self.group.shared))
        return [d for d in found if any(self.group.axis(d, self.member) is a for a in side)]

    def tiles(self, tile: Tile, dims: list[int]) -> int:
        """Number of tiles along some shared axes."""
        sizes = ((size_of(self.group.axis(d)), tile[d]) for d in dims)
        return prod(1 if t is None else ceil(n / t) for n, t in sizes)


def even_parts(length: int, most: int) -> list[tuple[int, int]]:
    """Cuts a length into as few parts as can be, of sizes that differ by one: (number, size)."""
    parts = ceil(length / most)
    size, longer = divmod(length, parts)
    return [(n, s) for n, s in ((longer, size + 1), (parts - longer, size)) if n]


def register_tile(
    machine: Machine, dtype: str, rows: int | None = None, columns: int | None = None
) -> RegisterTile:
    """The register tile for a task tile of some rows and columns; None stands for many."""
    lanes = machine.lanes(bytes_of(dtype))
    vectors = None if columns is None else ceil(columns / lanes)
    return RegisterTile(*_fastest(machine.vector_registers, rows, vectors), lanes)


@lru_cache(maxsize=4096)
def _fastest(registers: int, height: int | None, width: int | None) -> tuple[int, int]:
    """Rows and vectors of the register tile that takes the fewest cycles a term."""
    found = []
    for vectors in range(1, min(8, width or 8) + 1):
        most = (registers - 1 - vectors) // vectors
        if most >= 1:
            rows = most if height is None else max(n for _, n in even_parts(height, most))
            tall, wide = height or 64 * rows, width or 64 * vectors
            cycles = _term_cycles(tall, wide, rows, vectors) / (tall * wide)
            found.append((cycles, abs(vectors - STREAMS), vectors, rows))
    *_, vectors, rows = min(found)
    return rows, vectors


def _term_cycles(height: int, width: int, rows: int, vectors: int) -> float:
    """Cycles of one term for a tile of `height` rows and `width` vectors."""
    pairs = combinations(even_parts(height, rows), even_parts(width, vectors))
    return sum(n * m * _register_cycles(r, v) for (n, r), (m, v) in pairs)


def _register_cycles(rows: int, vectors: int) -> float:
    arithmetic = rows * vectors + LOAD_CYCLES * (rows + vectors)
    return max(arithmetic, NEAR_CYCLES * vectors, LEAST_CYCLES)


def contraction_tile(group: Group, member: int, product: Product, machine: Machine) -> Tile:
    """The tile with the least predicted time."""
    problem = Problem(group, member, product, machine)
    row_dims, column_dims = problem.dims(product.rows), problem.dims(product.columns)
    costs = _Costs.of(problem)
    best: tuple[float, Tile] | None = None
    heights = _goals(problem, row_dims, product.rows, 1)
    widths = _goals(problem, column_dims, product.columns, problem.lanes)
    for rows, columns in combinations(heights, widths):
        tile: Tile = [1] * len(group.shared)
        height = _fill(problem, tile, row_dims, product.rows, rows, 1)
        width = _fill(problem, tile, column_dims, product.columns, columns, problem.lanes)
        cost = _cycles(problem, costs, tile, height, width)
        if best is None or cost < best[0]:
            best = (cost, tile)
    assert best is not None
    return best[1]


def _goals(problem: Problem, dims: list[int], side: tuple[Axis, ...], multiple: int) -> list[int]:
    """Lengths of a side's tile to try."""
    if any(problem.group.axis(d, problem.member).size is None for d in dims):
        return [n for n in UNKNOWN_TILES if n % multiple == 0]
    length = points(side)
    return sorted({ceil(length / p / multiple) * multiple for p in PARTS}, reverse=True)


def _fill(
    problem: Problem, tile: Tile, dims: list[int], side: tuple[Axis, ...], goal: int, multiple: int
) -> int:
    """Lengthen the tile from the innermost axis on, up to `goal` elements; returns its length."""
    axes = {d: problem.group.axis(d, problem.member) for d in dims}
    length = points(a for a in side if not any(a is x for x in axes.values()))
    for d in reversed(dims):
        room = max(1, goal // length)
        size = size_of(axes[d])
        if axes[d].size is not None and size <= room:
            tile[d] = None
            length *= size
            continue
        unit = multiple // gcd(length, multiple)
        room = ceil(ceil(size / ceil(size / room)) / unit) * unit
        tile[d] = room
        length *= room
        break
    return length


@dataclass(frozen=True, slots=True)
class _Costs:
    """What does not depend on the tile: cycles an element of packing, whether a loop of its own may
    do it, whether it is done when compiling, and whether terms are multiplied in pairs.
    """

    right: float
    left: float
    ahead: bool
    constant: bool
    paired: bool

    @classmethod
    def of(cls, problem: Problem) -> _Costs:
        stage, product, lanes = problem.stage, problem.product, problem.lanes
        paired = problem.paired
        right = pack_cost(stage, product.right, product.columns) / lanes
        left = 0.0
        direct = lies_in_pairs(stage, product.left) if paired else reads_directly(product.left)
        if not direct:
            left = pack_cost(stage, product.left, product.rows) / lanes
        constant = constant_panels(stage, product, lanes) is not None
        return cls(right, left, not constant and _may_pack_ahead(problem), constant, paired)


def packs_ahead(problem: Problem, tile: Tile) -> bool:
    """Whether the right operand should be packed once for all tiles, by a loop of its own."""
    costs = _Costs.of(problem)
    return costs.ahead and _panels_fit(problem, tile) and _ahead_pays(problem, costs, tile)


def panels_when_compiling(problem: Problem, tile: Tile) -> tuple[Var, Panels] | None:
    """The constant whose panels the kernel takes in its place."""
    if not _panels_fit(problem, tile):
        return None
    return constant_panels(problem.stage, problem.product, problem.lanes, problem.paired)


def _ahead_pays(problem: Problem, costs: _Costs, tile: Tile) -> bool:
    product = problem.product
    times = problem.tiles(tile, problem.dims(product.rows))
    packed = points((*product.batch, *product.columns, *product.reduced))
    once = packed * (costs.right + PACK_AHEAD / problem.lanes) + LOOP_CYCLES * problem.machine.cores
    return packed * costs.right * times > once


def _may_pack_ahead(problem: Problem) -> bool:
    """It must not depend on the tile, nor outgrow its source."""
    product, group = problem.product, problem.group
    written = {b for s in group.stages for b in s.buffers}
    sources = {r.source: r for r in operand_loads(problem.stage, product.right)}
    if any(source in written for source in sources):
        return False
    held = sum(bytes_of_buffer(s.ty.shape, "float32") for s in sources)
    axes = (*product.batch, *product.columns, *product.reduced)
    return bytes_of_buffer([a.extent for a in axes], "float32") <= 2 * held


def _panels_fit(problem: Problem, tile: Tile) -> bool:
    """Whether tiles are whole panels."""
    product = problem.product
    dims = problem.dims(product.columns)
    long = [a for a in product.columns if a.size != 1]
    whole = all(tile[d] is None for d in dims)
    return whole or (len(long) == 1 and all(tile[d] % problem.lanes == 0 for d in dims))


def _cycles(problem: Problem, costs: _Costs, tile: Tile, height: int, width: int) -> float:
    """Predicted time of a contraction with all its tiles."""
    product, cores = problem.product, problem.machine.cores
    terms = points(product.reduced)
    steps = ceil(terms / 2) if costs.paired else terms
    tasks = problem.tiles(tile, list(range(len(tile))))
    micro = register_tile(problem.machine, problem.dtype, height, width)
    vectors = ceil(width / micro.lanes)
    bytes_each = bytes_of(problem.dtype)
    across, down = ceil(vectors / micro.vectors), ceil(height / micro.rows)
    task = steps * _term_cycles(height, vectors, micro.rows, micro.vectors)
    task += TASK_CYCLES + TILE_CYCLES * across * down
    task += FAR_CYCLES * steps * vectors  # the panels, once
    if height * steps * bytes_each > NEAR_BYTES:
        task += FAR_CYCLES * steps * height * across / micro.lanes
    task += costs.left * height * terms
    near = height * width * len(problem.group.stages)
    before = 0.0
    if costs.constant and _panels_fit(problem, tile):
        pass
    elif costs.ahead and _panels_fit(problem, tile) and _ahead_pays(problem, costs, tile):
        packed = points((*product.batch, *product.columns, *product.reduced))
        before = LOOP_CYCLES + packed * (costs.right + PACK_AHEAD / micro.lanes) / cores
    else:
        task += costs.right * width * terms
        near += min(width * min(steps, TERMS_BLOCK), PACKED_ELEMENTS)
    is_near = near * bytes_each <= NEAR_BYTES
    task += height * vectors * (RESULT_CYCLES if is_near else FAR_RESULT_CYCLES)
    in_turns = tasks if is_small(problem.group, problem.machine) else ceil(tasks / cores)
    return before + task * in_turns


def pack_cost(stage: Stage, operand: Expr, side: tuple[Axis, ...]) -> float:
    """Cost of packing one element of an operand, in multiply-adds."""
    analyzer = analyzer_of(stage.domain)
    last = side[-1] if side else stage.reduced[-1]
    steps = [load_stride(r, last.var, analyzer) for r in operand_loads(stage, operand)]
    contiguous = all(s in (0, 1) for s in steps)
    if not contiguous and _turns(stage, operand, analyzer):
        return PACK_TURNED
    base = PACK_CONTIGUOUS + PACK_RUN / size_of(last) if contiguous else PACK_STRIDED
    return base + 4.0 * max(0, stage_work(stage) - 3)


def _turns(stage: Stage, operand: Expr, analyzer: Analyzer) -> bool:
    """Whether an operand is plain and contiguous along the terms: squares of it are transposed."""
    load = plain_load(stage, operand)
    if load is None or len(stage.reduced) != 1 or loads(*load.indices):
        return False
    return load_stride(load, stage.reduced[0].var, analyzer) == 1


def reads_directly(operand: Expr) -> bool:
    """Whether an operand is one plain load, so that it needs no packing."""
    return isinstance(operand, TensorLoad) and not loads(*operand.indices)
