"""Which configurations of the skinny product are worth ranking: how its weights can be read."""

from __future__ import annotations

from dataclasses import replace

from ...config import HardwareProfile
from ...errors import Unsupported
from ..contraction import Contraction
from ..expr import bytes_of
from .gemm_frame import Frame
from .gemm_skinny_config import MMA_LANES, STATIC_SMEM, SkinnyConfig
from .gemm_skinny_halves import conversion
from .gemm_skinny_values import Values, values_of
from .memory import WIDEST


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

    def accesses(self, steps: int, width: int) -> tuple[int, int]:
        """Bytes of the widest access of a block, and how many accesses its widest load takes."""
        if (steps, width) not in self._accesses:
            self._accesses[steps, width] = self._widest(steps, width)
        return self._accesses[steps, width]

    def _widest(self, steps: int, width: int) -> tuple[int, int]:
        widest = [max(v.reader.fetches, key=lambda f: f.nbytes) for v in self.values(steps, width)]
        pieces = [sum(c.elements for c in f.copies) * bytes_of(f.dtype) / f.piece for f in widest]
        return min(f.piece for f in widest), int(max(pieces))

    def vectors(self, steps: int, width: int, tensor: str) -> int:
        """16-byte accesses to the weights of a block, of the segment that has most."""
        values = iter(self.values(steps, width, tensor))
        return max(
            sum(f.nbytes // WIDEST for _ in s.products for f in next(values).fetches(True))
            for s in self.contraction.segments
        )

    def best_steps(self, times: int) -> int:
        """Terms whose weights are one 16-byte access, or as close to it as the sizes allow."""
        best, bytes_best = 0, 0
        for steps in (1, 2, 4, 8, 16, 32):
            if any(extent % (steps * times) for extent in self.k):
                break
            piece, count = self.accesses(steps, 1)
            if count == 1 and piece > bytes_best:
                best, bytes_best = steps, piece
        return best or whole_runs(self.k, 4, times)

    def best_width(self) -> int:
        """Columns whose weights are one 16-byte access."""
        best, bytes_best = 1, 0
        for width in (1, 2, 4, 8, 16):
            if any(extent % width for extent in self.n):
                break
            piece, count = self.accesses(1, width)
            if count == 1 and piece > bytes_best:
                best, bytes_best = width, piece
        return best


def candidates(
    contraction: Contraction, hw: HardwareProfile, layouts: Layouts, tensor: str
) -> list[SkinnyConfig]:
    """All configurations worth ranking."""
    found = [*_along_k(contraction, layouts), *_along_n(contraction, layouts)]
    if tensor:
        found += _on_tensor_cores(contraction, layouts, tensor)
    if hw.has_clusters:
        found += [replace(c, cluster=n) for c in found for n in (2, 4) if c.warps_n == 1]
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
    slots = layouts.vectors(config.steps, config.width, config.tensor)
    slots *= 2 * config.columns if config.tensor else config.columns
    size = config.ring_bytes(slots) + config.smem_bytes(contraction)
    return slots > 0 and size <= STATIC_SMEM


def _along_k(contraction: Contraction, layouts: Layouts) -> list[SkinnyConfig]:
    steps = layouts.best_steps(1)
    products = max(len(s.products) for s in contraction.segments)
    found = []
    for columns in (1, 2, 4):
        for warps_k, warps_n in ((1, 4), (1, 8), (2, 4), (4, 1), (4, 2), (8, 1)):
            for stages, unroll in ((0, 1), (0, 2), (0, 4), (0, 8), (2, 1), (4, 1), (8, 1)):
                if columns * unroll * products <= 16 and columns * products <= max(4, products):
                    size = steps, 1, columns, 1, warps_k, warps_n, 1, unroll, stages
                    found.append(SkinnyConfig("", *size))
    return found


def _along_n(contraction: Contraction, layouts: Layouts) -> list[SkinnyConfig]:
    width = layouts.best_width()
    steps = whole_runs(layouts.k, 8)
    if width == 1:
        return []
    while steps > 1 and layouts.accesses(steps, width)[1] > 8:
        steps //= 2
    return [
        SkinnyConfig("", steps, width, 1, lanes, warps_k, 1, 1, unroll)
        for lanes in (4, 8, 16, 32)
        for warps_k in (4, 8, 16)
        for unroll in (1, 2)
    ]


def _on_tensor_cores(contraction: Contraction, layouts: Layouts, tensor: str) -> list[SkinnyConfig]:
    steps = layouts.best_steps(MMA_LANES)
    piece = layouts.accesses(steps, 1)[0] if steps >= 4 else 0
    if piece < 4:
        return []
    products = max(len(s.products) for s in contraction.segments)
    ways = [(0, unroll) for unroll in (1, 2, 4, 8)]
    if piece == WIDEST:
        ways += [(stages, 1) for stages in (2, 4, 6, 8)]
    return [
        SkinnyConfig(tensor, steps, 1, columns, 1, warps_k, warps_n, 1, unroll, stages)
        for columns in (1, 2, 4)
        for warps_k, warps_n in ((4, 1), (8, 1), (16, 1), (4, 2))
        for stages, unroll in ways
        if columns * unroll * products <= 8 and columns * warps_k <= 16
    ]
