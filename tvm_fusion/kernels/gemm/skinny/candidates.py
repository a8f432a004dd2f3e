"""Which configurations of the skinny product are worth ranking: how its weights can be read."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad, Var

from ....config import HardwareProfile
from ....errors import Unsupported
from ...contraction.reader import Contraction, Product
from ...gpu.memory import WIDEST
from ...gpu.product_frame import Frame
from ...program.expr import bytes_of, dtype_of, is_integer, number, rebuild
from .config import MMA_LANES, STATIC_SMEM, WARP, SkinnyConfig
from .fetch import Fetch
from .halves import conversion
from .values import Values, inlined, values_of

WIDE_REGISTERS = 128  # for the weights and the sums of a block of several rows
SLOW_OPERATION = 14.0
"""Instructions of a division or a special function (estimate)."""


def whole_runs(extents: list[int], most: int, times: int = 1) -> int:
    """The largest power of two up to `most` that, times `times`, divides all extents."""
    run = most
    while run > 1 and any(extent % (run * times) for extent in extents):
        run //= 2
    return run if all(extent % (run * times) == 0 for extent in extents) else 0


def last_extents(contraction: Contraction) -> tuple[list[int], list[int]]:
    """Extents of the last axis of the sums, and of the columns."""
    k = [p.k[-1].extent if p.k else 1 for p in contraction.products]
    return k, [s.n[-1].extent if s.n else 1 for s in contraction.segments]


class Layouts:
    """How wide the weights can be read along the sum and along the columns."""

    def __init__(self, contraction: Contraction):
        self.contraction = contraction
        self.frame = Frame(contraction, {}, "int32")
        self.k, self.n = last_extents(contraction)
        self._values: dict[tuple[int, int, str], list[Values]] = {}
        self._costs: dict[tuple[int, int, str], list[float]] = {}
        self._accesses: dict[tuple[int, int], tuple[int, int]] = {}
        self._left: dict[int, float] = {}

    def values(self, steps: int, width: int, tensor: str = "") -> list[Values]:
        """The weights of all products at blocks of points."""
        key = steps, width, tensor
        if key not in self._values:
            extra = {"lanes": MMA_LANES, "half": tensor} if tensor else {}
            self._values[key] = [
                values_of(self.frame, s, p, p.b, s.n, steps, width, **extra)
                for s in self.contraction.segments
                for p in s.products
            ]
        return self._values[key]

    def conversions(self, steps: int, width: int, tensor: str = "") -> list[float]:
        """Instructions that each product's weights take to become factors."""
        key = steps, width, tensor
        if key not in self._costs:
            self._costs[key] = [conversion(v, tensor) for v in self.values(*key)]
        return self._costs[key]

    def left_operations(self, product: Product) -> float:
        """Instructions that an element of the rows takes where it is computed."""
        if id(product) not in self._left:
            computed = product.a.load is None
            self._left[id(product)] = _operations(inlined(product.a)) if computed else 0.0
        return self._left[id(product)]

    def accesses(self, steps: int, width: int) -> tuple[int, int]:
        """Bytes of an access to the weights, the largest parameter, and how many a block takes."""
        if (steps, width) not in self._accesses:
            found = [self._weights(values) for values in self.values(steps, width)]
            accesses = max(f.nbytes // f.piece for f in found)
            self._accesses[steps, width] = min(f.piece for f in found), accesses
        return self._accesses[steps, width]

    def _weights(self, values: Values) -> Fetch:
        def size(fetch: Fetch) -> int:
            found = (p for p in self.contraction.params if p.var.same_as(fetch.source))
            return next(found).elements * bytes_of(fetch.dtype)

        if not values.reader.fetches:
            raise Unsupported("weights that are read under conditions only")
        return max(values.reader.fetches, key=size)

    def vectors(self, steps: int, width: int, tensor: str) -> int:
        """16-byte accesses to the weights of a block, of the segment that has most."""
        values = iter(self.values(steps, width, tensor))
        return max(
            sum(f.nbytes // WIDEST for _ in s.products for f in next(values).fetches(True))
            for s in self.contraction.segments
        )

    def best_steps(self, times: int) -> int:
        """Terms whose weights are one 16-byte access, or as close to it as the sizes allow."""
        sizes = [s for s in (1, 2, 4, 8, 16, 32) if not any(k % (s * times) for k in self.k)]
        return self._widest_of([(steps, 1) for steps in sizes])[0] or whole_runs(self.k, 4, times)

    def best_width(self) -> int:
        """Columns whose weights are one 16-byte access."""
        sizes = [w for w in (1, 2, 4, 8, 16) if not any(n % w for n in self.n)]
        return self._widest_of([(1, width) for width in sizes])[1] or 1

    def _widest_of(self, blocks: list[tuple[int, int]]) -> tuple[int, int]:
        """The smallest block that is one access, as wide as any."""
        best, bytes_best = (0, 0), 0
        for block in blocks:
            piece, count = self.accesses(*block)
            if count == 1 and piece > bytes_best:
                best, bytes_best = block, piece
        return best


def _operations(expr: Expr) -> float:
    """Instructions of an expression on floats (estimate)."""
    found = []

    def visit(child: Expr) -> Expr:
        found.append(_operations(child))
        return child

    rebuild(expr, visit)
    free = isinstance(expr, TensorLoad | tirx.Cast | Var) or is_integer(dtype_of(expr))
    if free or number(expr) is not None:
        return sum(found)
    slow = isinstance(expr, tirx.Div | Call)
    return sum(found) + (SLOW_OPERATION if slow else 1.0)


def candidates(
    contraction: Contraction, hw: HardwareProfile, layouts: Layouts, tensor: str
) -> list[SkinnyConfig]:
    """All configurations worth ranking: what was the fastest of some shape on an H200, or near."""
    found = [*_along_k(contraction, layouts), *_along_n(layouts)]
    if tensor:
        found += _on_tensor_cores(contraction, layouts, tensor)
    return [c for c in dict.fromkeys(found) if _fits(contraction, hw, layouts, c, tensor)]


def _fits(
    contraction: Contraction,
    hw: HardwareProfile,
    layouts: Layouts,
    config: SkinnyConfig,
    tensor: str,
) -> bool:
    """Whether the sizes allow a configuration, and shared memory holds it."""
    try:
        config.check(contraction, hw, tensor)
    except Unsupported:
        return False
    if not config.stages:
        return True
    slots = layouts.vectors(config.steps, config.width, config.tensor) * config.runs
    size = config.ring_bytes(slots) + config.smem_bytes(contraction)
    return slots > 0 and size <= STATIC_SMEM


def _unrolls(contraction: Contraction, terms: int, most: int) -> list[int]:
    """Steps of a thread at a time; a share of the sum has steps of `terms` terms."""
    steps = max(1, max(p.K for p in contraction.products) // terms)
    # Two at a time first: the fastest where the predictions are the same.
    return [unroll for unroll in (2, 1, 4) if unroll <= max(1, min(steps, most))]


def _along_k(contraction: Contraction, layouts: Layouts) -> list[SkinnyConfig]:
    steps = layouts.best_steps(1)
    products = max(len(s.products) for s in contraction.segments)
    return [
        SkinnyConfig("", steps, 1, columns, 1, warps_k, warps_n, unroll)
        for columns in (1, 2, 4)
        for warps_k, warps_n in ((1, 4), (4, 1), (4, 2), (8, 1))
        for unroll in _unrolls(contraction, WARP * warps_k * steps, 4 // (columns * products))
        if columns * products <= max(4, products) and warps_k * columns * products > 1
    ]


def _along_n(layouts: Layouts) -> list[SkinnyConfig]:
    width = layouts.best_width()
    steps = whole_runs(layouts.k, 8)
    if width == 1:
        return []
    rows = layouts.contraction.M

    def fits(steps: int) -> bool:
        few = rows == 1 or (steps + rows) * width <= WIDE_REGISTERS
        return few and layouts.accesses(steps, width)[1] <= 8

    while steps > 1 and not fits(steps):
        steps //= 2
    return [
        SkinnyConfig("", steps, width, 1, lanes, warps_k, 1, unroll)
        for lanes in (4, 8, 16)
        for warps_k in (4, 8, 16)
        for unroll in _unrolls(layouts.contraction, WARP // lanes * warps_k * steps, 2)
    ]


def _on_tensor_cores(contraction: Contraction, layouts: Layouts, tensor: str) -> list[SkinnyConfig]:
    """Along the sum, or along the columns; at one row only for weights that are computed."""
    products = max(len(s.products) for s in contraction.segments)
    computed = any(p.b.load is None for p in contraction.products)
    if contraction.M == 1 and not computed:
        return []
    found = []
    for steps, width in _tensor_blocks(layouts):
        most_columns = 16 if width == 1 else 128 if contraction.M == 1 else 64
        for columns in (1, 2, 4, 8):
            if 2 * columns % width or columns * products > max(4, width // 2):
                continue
            whole = layouts.accesses(steps, width)[0] == WIDEST
            for warps in (4, 8, 16):
                if columns * warps > most_columns:
                    continue
                most = 4 // (columns * products) if width == 1 else 2
                terms = steps * MMA_LANES * warps
                ways = [(u, 0) for u in _unrolls(contraction, terms, most)] + [(1, 2)] * whole
                found += [
                    SkinnyConfig(tensor, steps, width, columns, 1, warps, 1, unroll, stages)
                    for unroll, stages in ways
                ]
    return found


def _tensor_blocks(layouts: Layouts) -> list[tuple[int, int]]:
    """Terms and columns that a thread reads at once."""
    found = []
    steps = layouts.best_steps(MMA_LANES)
    if steps >= 4 and layouts.accesses(steps, 1)[0] >= 8:
        found.append((steps, 1))
    best = layouts.best_width()
    for width in (w for w in (best, best // 2) if w > 1):
        for steps in (4, 8, 16):
            divides = not any(k % (steps * MMA_LANES) for k in layouts.k)
            piece, count = layouts.accesses(steps, width) if divides else (0, 0)
            if piece >= 4 and count <= 8:
                found.append((steps, width))
    return found
