"""Configurations of the direct convolution kernel, the fastest by its model first."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import geometric_mean

from ....config import HardwareProfile, Policy
from ....errors import Unsupported
from ...gemm.epilogue import operations_of
from ...gpu.memory import WIDEST
from ...program.expr import bytes_of
from ..geometry import Convolution
from ..typical import several, with_sizes
from .config import DepthwiseConfig
from .problem import Numbers, direct_problem
from .shape import Roles, Shape
from .time import direct_seconds, registers_of

THREADS = (64, 128)
COLUMNS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 14, 16)
BANDS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
"""In how many parts threads walk down the rows."""
MOST_WASTE = 1.25
"""Columns of all strips over those that there are."""
MOST_REGISTERS = 224
MOST_HELD = 64
"""Weights of a thread in registers."""
MOST_MULTIPLIED = 3000
"""Multiplications that a row's code holds."""
KEPT, KEPT_ALIKE = 64, 2
"""Configurations in all, and of those that differ in rows and threads only."""


def depthwise_ranked(
    convolution: Convolution, hw: HardwareProfile, policy: Policy | None = None
) -> list[tuple[float, DepthwiseConfig]]:
    """Predicted seconds and the configurations that can be written, best first.

    Raises
    ------
    Unsupported
        Many channels a group, other dtypes than float16, bfloat16 and float32, strides of a
        transposed convolution, or filters so large that no block can hold the weights.
    """
    operations = float(operations_of(convolution.segment).total())
    sizes = [(direct_problem(convolution, c).numbers, moved_bytes(c)) for c in several(convolution)]
    lists = [ranked(numbers, hw, moved, operations) for numbers, moved in sizes]
    if len(lists) == 1:
        return lists[0]

    def seconds(config: DepthwiseConfig) -> float:
        shapes = ((Shape(Roles(n, config.rolls), config), moved) for n, moved in sizes)
        return geometric_mean(direct_seconds(s, hw, moved, operations) for s, moved in shapes)

    configs = dict.fromkeys(config for found in lists for _, config in found)
    return sorted(((seconds(c), c) for c in configs), key=lambda entry: entry[0])


def moved_bytes(convolution: Convolution) -> int:
    """Bytes of all tensors, with some images where their number is symbolic."""
    return sum(
        math.prod(map(int, p.shape)) * bytes_of(p.dtype)
        for p in with_sizes(convolution).contraction.params
        if p.shape is not None
    )


def ranked(
    numbers: Numbers, hw: HardwareProfile, moved_bytes: float, operations: float = 3.0
) -> list[tuple[float, DepthwiseConfig]]:
    """The same of plain numbers."""
    found, reasons = [], {}
    for shape in shapes(numbers):
        try:
            shape.check(hw)
        except Unsupported as why:
            reasons[str(why)] = None
            continue
        if registers_of(shape) > MOST_REGISTERS or shape.fmas > MOST_MULTIPLIED:
            reasons["sums or weights of a thread in more registers than there are"] = None
            continue
        found.append((direct_seconds(shape, hw, moved_bytes, operations), shape.config))
    if not found:
        raise Unsupported("; ".join(reasons) or "no configuration")
    kept, alike = [], Counter()
    for entry in sorted(found, key=lambda entry: entry[0]):
        config = entry[1]
        kind = (config.channels, config.filters, config.columns, config.rolls, config.shared)
        alike[kind] += 1
        if alike[kind] <= KEPT_ALIKE:
            kept.append(entry)
    return kept[:KEPT]


def shapes(numbers: Numbers) -> Iterator[Shape]:
    """Configurations of a convolution, whether they can be written or not."""
    for rolls, (channels, filters) in itertools.product(_ways(numbers), _vectors(numbers)):
        roles = Roles(numbers, rolls)
        heights = sorted({-(-roles.rows.positions // parts) for parts in BANDS})
        for columns, rows in itertools.product(_columns(roles.columns.positions), heights):
            alone = Shape(
                roles, DepthwiseConfig(channels, filters, columns, rows, 1, 1, rolls, True)
            )
            for (lanes, tasks), shared in itertools.product(_blocks(alone), (False, True)):
                if shared or alone.taps * filters <= MOST_HELD:
                    yield Shape(
                        roles, replace(alone.config, lanes=lanes, tasks=tasks, shared=shared)
                    )


def _ways(numbers: Numbers) -> Sequence[bool]:
    """Rolling rows or none; the same where no window but the columns has taps."""
    return (True, False) if numbers.rows(True) != numbers.rows(False) else (True,)


def _vectors(numbers: Numbers) -> Iterator[tuple[int, int]]:
    """Channels and filters of a thread."""
    most = WIDEST // numbers.bytes
    widths = [w for w in (1, 2, 4, 8) if w <= most]
    if numbers.is_depthwise:
        if numbers.along_channels:
            for width in widths[1:]:
                if numbers.width % width == 0 and width * numbers.filters <= 16:
                    yield width, width * numbers.filters
        for filters in (1, 2, 3, 4):
            if numbers.filters % filters == 0:
                yield 1, filters
        return
    read = [w for w in widths if numbers.channels % w == 0 and w <= 4]
    read = [w for w in read if numbers.width % w == 0] if numbers.along_channels else [1]
    for filters in (1, 2, 4, 8):
        if numbers.filters % filters == 0:
            for width in read:
                yield width, filters


def _columns(size: int) -> Sequence[int]:
    """Columns of a thread: not more than there are, and few strips that reach beyond the last."""
    return [c for c in COLUMNS if c <= size and -(-size // c) * c <= MOST_WASTE * size]


def _blocks(shape: Shape) -> Iterator[tuple[int, int]]:
    """Threads along filters and along positions."""
    seen = set()
    for threads in THREADS:
        if shape.numbers.along_channels:
            divisors = [d for d in range(1, min(shape.lanes, threads) + 1) if shape.lanes % d == 0]
            lanes = max((d for d in divisors if d <= 32), default=1)
            if lanes < min(8, shape.lanes):
                lanes = min(shape.lanes, 32)
            block = lanes, max(1, min(threads // lanes, shape.tasks))
        else:
            tasks = min(threads, shape.tasks)
            block = max(1, min(threads // tasks, shape.lanes)), tasks
        if block not in seen:
            seen.add(block)
            yield block
