"""Convolutions of few channels: a filter's row is one run of the data (see `gemm.runs.problem`).

With channels last the terms (s, c) of a filter's row are neighbours in memory, 21 of them for 7
taps of 3 channels; with channels first the taps s alone are, and channels are lines of their own.
"""

from __future__ import annotations

from tvm import tirx

from ...config import HardwareProfile, Policy
from ...errors import Unsupported
from ..contraction.model import Operand, Segment
from ..contraction.windows import Window, Windows
from ..forms import Ranked
from ..gemm.epilogue import take_loads
from ..gemm.mma.problem import MmaSegment
from ..gemm.runs.kernel import emit_runs
from ..gemm.runs.problem import Runs, RunWindow, halves_of
from ..gemm.runs.rank import rank_runs
from ..gemm.runs.shape import RunsConfig
from ..gpu.access import WindowAccess, window_access
from ..program.extents import equal_sizes
from .geometry import Convolution

MOST_CHANNELS = 15
"""Data of more channels comes in by boxes or vectors of them."""


def runs_ranked(
    convolution: Convolution, hw: HardwareProfile, policy: Policy | None = None
) -> Ranked:
    """Predicted seconds and configurations that can be written, best first.

    Raises
    ------
    Unsupported
        As `read_runs`; a device without cp.async, or no tile fits.
    """
    return rank_runs(read_runs(convolution), hw)


def emit_convolution_runs(
    convolution: Convolution, hw: HardwareProfile, config: RunsConfig
) -> tirx.PrimFunc:
    """Write a convolution of few channels as one TIRx kernel on mma.sync; see `emit_runs`."""
    return emit_runs(read_runs(convolution), hw, config)


def read_runs(convolution: Convolution) -> Runs:
    """What the kernel takes of a convolution.

    Raises
    ------
    Unsupported
        Groups, one filter, many channels or terms, other dtypes than float16 and bfloat16, data
        that is computed or repeated or of which no taps are neighbours in memory, and transposed
        convolutions with a stride.
    """
    c = convolution
    if c.group is not None or c.is_depthwise:
        raise Unsupported("groups of channels")
    if c.filters is None:
        raise Unsupported("one filter")
    if c.channels_of_group > MOST_CHANNELS:
        raise Unsupported(f"{c.channels_of_group} channels, which are read by vectors")
    if any(w.expansion != 1 for w in c.windows):
        raise Unsupported("a transposed convolution with a stride")
    if any(w.repeats != 1 for w in c.windows):
        raise Unsupported("data whose elements are repeated")
    if any(isinstance(w.high, int) and w.high <= w.low for w in c.windows):
        raise Unsupported("data of which nothing is read")
    data = Operand(c.data)
    halves_of(data, c.weights, c.product.dtype)
    access = window_access(
        Windows(c.windows, c.channel_dim, None, c.channels, c.data, c.coordinates)
    )
    if access is None:
        raise Unsupported("data that lies at no strides")
    inside = c.channels is not None and equal_sizes(access.channel, 1)
    unit = c.channels_of_group if inside else 1
    slide = [i for i, w in enumerate(c.windows) if not (w.is_symbolic and w.reads_all)]
    near = [i for i in slide if equal_sizes(access.strides[c.windows[i].dim], unit)]
    inner = max(near, key=lambda i: _terms_along(c.windows[i]), default=None)
    if inner is None or (c.windows[inner].taps > 1 and c.windows[inner].dilation != 1):
        raise Unsupported("taps that are no neighbours in memory")
    several = [i for i in slide if i != inner and not equal_sizes(c.windows[i].size, 1)]
    found = Runs(
        c.contraction,
        _segment(c),
        c.product.accumulator,
        data,
        c.weights,
        access.base,
        tuple(_window(w, access) for w in c.windows),
        inner,
        several[-1] if several else None,
        () if c.channels is None else (c.channels,),
        inside,
        access.channel,
    )
    found.check()
    return found


def _terms_along(window: Window) -> tuple[bool, int]:
    """How many terms all positions along a window have, any number of them more than others."""
    return window.is_symbolic, window.taps * (1 if window.is_symbolic else window.size)


def _window(window: Window, access: WindowAccess) -> RunWindow:
    return RunWindow(
        window.size,
        () if window.axis is None else (window.axis,),
        access.strides[window.dim],
        window.tap,
        window.stride,
        window.dilation,
        window.before,
        window.low,
        window.high,
    )


def _segment(convolution: Convolution) -> MmaSegment:
    """Positions by filters."""
    rows = tuple(w.axis for w in convolution.windows if w.axis is not None)
    filters, own = (convolution.filters,), convolution.segment
    plain = Segment((), rows, filters, own.products, own.bindings, own.outputs)
    groups = {"batch": (), "m": rows, "n": filters}
    return MmaSegment(plain, (), *take_loads(convolution.contraction, plain, groups))
