"""What the arithmetic behind matrix products costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from tvm.ir import TensorLoad

from ...config import HardwareProfile
from ...ir.access import Pipe
from ...ir.reader import children, pipe_of
from ..contraction.model import Binding
from ..contraction.reader import Extent, Output
from ..gpu.product_frame import assumed
from .launch import operation_seconds


class HasEpilogue(Protocol):
    """A segment, of a contraction or of a form's problem."""

    bindings: Sequence[Binding]
    outputs: Sequence[Output]
    N: Extent


def operation_s(segments: Sequence[HasEpilogue], hw: HardwareProfile) -> float:
    """Time that the whole device needs for the operations on one element of the products, mean over
    the columns.
    """
    counts: Counter[Pipe] = Counter()
    for segment in segments:
        columns = assumed(segment.N)
        values = [item.value for item in (*segment.bindings, *segment.outputs)]
        while values:
            value = values.pop()
            if (pipe := pipe_of(value)) is not None:
                counts[pipe] += columns
            if not isinstance(value, TensorLoad):
                values.extend(children(value))
    return operation_seconds(counts.items(), hw) / sum(assumed(s.N) for s in segments)
