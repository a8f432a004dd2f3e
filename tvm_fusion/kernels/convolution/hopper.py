"""A convolution as the Hopper GEMM sees it: A's rows are positions of windows, in boxes of 64.

    y[n, p, q, f] = sum over r, s, c of x[n, 2 p + r - 1, 2 q + s - 1, c] * w[f, r, s, c]

      rows       boxes of 1 x 8 x 8 positions (n, p, q); the TMA takes every 2nd element
      terms      64 channels of a tap (r, s) a step; zeros outside of the data are the padding
      columns    filters
      batch      groups

A transposed convolution of stride 2 is four of stride 1, side by side in one launch: one for every
other position along each window, with the taps that meet an element there. So is one of data that
is enlarged twice by repeating its elements, with all taps, of which neighbours meet the same one.
Of data that is put together of parts along its channels, a step's channels lie in one of them, and
each part has windows of its own. Data that is computed is so for each tap, in registers, or once
for all taps of a box, in shared memory (`streams`). Everything behind the sums is the GEMM's own.
See `gemm.hopper.model.Windows`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...config import HardwareProfile, Policy
from ...errors import Unsupported
from ..contraction.model import (
    INDEX,
    Axis,
    Operand,
    Simplifier,
    equal_sizes,
    fresh_var,
)
from ..contraction.row_runs import loads_of, with_row_bits
from ..contraction.windows import Window
from ..forms import Ranked
from ..gemm.epilogue import EpilogueLoad, take_loads
from ..gemm.hopper.config import HopperConfig
from ..gemm.hopper.kernel import check_architecture, emit_problem, ranked_problems
from ..gemm.hopper.model import (
    BOX,
    OPERAND_KINDS,
    STEP_BYTES,
    HopperProblem,
    HopperSegment,
    OperandView,
    WindowPart,
    Windows,
)
from ..gemm.hopper.problem import in_boxes, largest, without_residual
from ..gemm.hopper.prologue import Prologue, read_prologue
from ..gpu.access import Groups, affine_access
from ..gpu.tensor_map import TensorMap, tensor_map, with_steps
from ..program.expr import (
    FLOAT8_DTYPES,
    HALF_DTYPES,
    bytes_of,
    constant,
    dtype_of,
    variables,
)
from ..program.extents import divided_up, is_multiple, simplified
from .boxes import box_shape, row_bits, run_of
from .geometry import Convolution, Put
from .patches import in_patches
from .typical import numbers_of


class RimConfig(HopperConfig):
    """As `HopperConfig`, of kernels that bring in boxes with their rims."""

    __slots__ = ()


def rims_ranked(convolution: Convolution, hw: HardwareProfile, policy: Policy) -> Ranked:
    """As `hopper_ranked`, of kernels whose boxes of data hold what all taps read.

    Raises
    ------
    Unsupported
        As `emit_rims`.
    """
    check_architecture(hw)
    ranked = ranked_problems({0: read_windows(convolution, rims=True)}, hw, policy)
    return [(s, RimConfig(**asdict(c))) for s, c in ranked if c.split == 1 and not c.deferred]


def emit_rims(convolution: Convolution, hw: HardwareProfile, config: RimConfig) -> tirx.PrimFunc:
    """As `emit_hopper`, with all taps in a step: data comes in once, with its rim, and each tap
    reads it from another row on. For few filters, whose weights of all taps fit beside it.

    Raises
    ------
    Unsupported
        As `emit_hopper`; also for strides, expansions, one tap, 8-bit floats, and data that is
        computed.
    """
    check_architecture(hw)
    return emit_problem(read_windows(convolution, rims=True), config, hw)


class StreamConfig(HopperConfig):
    """As `HopperConfig`, of kernels that compute boxes with their rims; `stages` are those of the
    weights of one tap.
    """

    __slots__ = ()


def streams_ranked(convolution: Convolution, hw: HardwareProfile, policy: Policy) -> Ranked:
    """As `hopper_ranked`, of kernels that compute the data of a box once for all taps.

    Raises
    ------
    Unsupported
        As `emit_streams`.
    """
    check_architecture(hw)
    ranked = ranked_problems({0: read_windows(convolution, streams=True)}, hw, policy)
    return [(s, StreamConfig(**asdict(c))) for s, c in ranked if c.multicast == 1]


def emit_streams(
    convolution: Convolution, hw: HardwareProfile, config: StreamConfig
) -> tirx.PrimFunc:
    """As `emit_hopper`, of data that is computed: a box comes in once, with its rim, is computed in
    shared memory, and each tap reads it from another row on, while the taps' weights come one after
    the other.

    Raises
    ------
    Unsupported
        As `emit_rims`; also for data that is not computed, or of what differs between the positions
        of an image.
    """
    check_architecture(hw)
    return emit_problem(read_windows(convolution, streams=True), config, hw)


def hopper_ranked(convolution: Convolution, hw: HardwareProfile, policy: Policy) -> Ranked:
    """Predicted seconds and configurations that fit the convolution and the device, best first.

    Raises
    ------
    Unsupported
        Where the kernel cannot compute the convolution; see `emit_hopper`.
    """
    check_architecture(hw)
    return ranked_problems({0: read_windows(convolution)}, hw, policy)


def emit_hopper(
    convolution: Convolution, hw: HardwareProfile, config: HopperConfig
) -> tirx.PrimFunc:
    """Write a convolution as one TIRx kernel for Hopper's tensor cores.

    Raises
    ------
    Unsupported
        For another architecture or dtype, data that is computed for groups or phases, or of what
        differs between positions, data whose channels are not contiguous or no multiples of 16
        bytes, parts of it that are no whole steps of channels, steps of more than 8 elements, one
        filter or channel a group, and what tensor maps of 5 dimensions cannot address.
    """
    check_architecture(hw)
    return emit_problem(read_windows(convolution), config, hw)


@dataclass(frozen=True, slots=True, eq=False)
class WindowView(OperandView):
    """Data that is read at windows; `boxes_of_64` are those of 64 positions."""

    boxes_of_64: TensorMap

    def boxes(self, rows: int) -> TensorMap:
        """Boxes of 64 rows, whatever the rows of a tile."""
        return self.boxes_of_64


@lru_cache(maxsize=16)  # ranked, then written
def read_windows(
    convolution: Convolution, rims: bool = False, streams: bool = False
) -> HopperProblem:
    """The convolution as the TMA and wgmma can compute it; with `rims`, all taps in a step; with
    `streams`, of a box that is computed for all of them.

    Raises
    ------
    Unsupported
        See `emit_hopper`.
    """
    convolution = in_patches(convolution)
    if convolution.filters is None or convolution.channels is None:
        raise Unsupported("a convolution of one filter or one channel a group")
    dtype = _dtype(convolution)
    apart = _apart(convolution)
    starts = (
        range(n if w.is_symbolic else min(n, w.size))
        for n, w in zip(apart, convolution.windows, strict=True)
    )
    if rims or streams:
        _check_rims(convolution, dtype)
    parts = [
        _Part(convolution, at, dtype, rims, streams).segment() for at in itertools.product(*starts)
    ]
    if not all(part.residual for part in parts):
        parts = list(map(without_residual, parts))
    first = parts[0]
    phases = math.prod(apart) > 1
    if streams and first.prologue is None:
        raise Unsupported("data that is not computed")
    if first.prologue is not None and (rims or phases or first.batch):
        raise Unsupported("data that is computed, for groups, phases or all taps of a step")
    return HopperProblem(
        convolution.contraction,
        dtype,
        first.B,
        largest([part.M for part in parts]),
        max(part.K for part in parts),
        first.a,
        tuple(parts),
        len(parts) == 1,
    )


def _apart(convolution: Convolution) -> tuple[int, ...]:
    """How far apart positions of a phase are along each window.

    Raises
    ------
    Unsupported
        Parts of the data that are enlarged differently, each of them.
    """
    found = []
    for i, window in enumerate(convolution.windows):
        repeats = {s.windows[i].repeats for s in convolution.sources} or {window.repeats}
        if len(repeats - {1}) > 1:
            raise Unsupported("parts of data that are enlarged differently")
        found.append(window.expansion * max(repeats))
    return tuple(found)


def _sources(convolution: Convolution) -> list[Convolution]:
    """The convolution of each part of the data, or the one of all of it."""
    return [
        replace(
            convolution,
            windows=source.windows,
            channels=source.channels,
            data=source.data,
            coordinates=source.coordinates,
            sources=(),
        )
        for source in convolution.sources
    ] or [convolution]


def _dtype(convolution: Convolution) -> str:
    """The dtype of data and weights."""
    data = [Operand(part.data).load for part in _sources(convolution)]
    weights = dtype_of(convolution.weights.load)
    dtypes = {weights, *(dtype_of(load) for load in data if load is not None)}
    dtype = weights if data[0] is None else dtype_of(data[0])
    if len(dtypes) != 1 or dtype not in OPERAND_KINDS or convolution.product.dtype != "float32":
        names = ", ".join(OPERAND_KINDS)
        raise Unsupported(f"tensor cores of this kernel take {names}, not {', '.join(dtypes)}")
    return dtype


def _check_rims(convolution: Convolution, dtype: str) -> None:
    steps = {(w.stride, w.expansion) for w in convolution.windows}
    if steps != {(1, 1)} or math.prod(_apart(convolution)) > 1 or convolution.taps == 1:
        raise Unsupported("taps that do not read the same elements")
    if dtype in FLOAT8_DTYPES:
        raise Unsupported("8-bit floats, whose sums are promoted between steps")


IMAGES = (1, 8, 64)
"""That boxes of a symbolic number of images are to suit."""
BEYOND = 1 << 20
"""A position where there is no data: that of the one tap of positions that meet no element."""


class _Part:
    """The positions from each of `starts` on, in steps of the windows' expansions or repeats.

    Attributes
    ----------
    windows : list of Windows
        Of each part of the data.
    positions : list of Axis
        Along each window.
    """

    def __init__(
        self,
        convolution: Convolution,
        starts: Sequence[int],
        dtype: str,
        rims: bool,
        streams: bool,
    ) -> None:
        self.convolution, self.starts, self.dtype = convolution, starts, dtype
        self.rims, self.streams = rims or streams, streams
        self.batch = () if convolution.group is None else (convolution.group,)
        self.n = (convolution.filters,)
        block_k = STEP_BYTES // bytes_of(dtype)
        channels = -(-convolution.channels_of_group // block_k) * block_k
        reduced = [o for o in convolution.segment.outputs if o.partial is not None]
        self.apart, self.sources = _apart(convolution), _sources(convolution)
        if reduced and math.prod(self.apart) > 1:
            raise Unsupported("reductions of results that are computed in phases")
        if any(source.end % block_k for source in convolution.sources[:-1]):
            raise Unsupported(f"parts of data that are no multiples of {block_k} channels")
        self.run = run_of(convolution, reduced) if reduced else None
        found = [self._windows(source, channels) for source in self.sources]
        alone = _images(convolution) if streams else ()
        many = numbers_of(convolution, found[0].sizes, IMAGES)
        self.windows = _in_one_box(found, self.rims, self.run, alone, many)
        self.positions = [Axis(fresh_var("position", INDEX), n) for n in found[0].sizes]

    def _windows(self, source: Convolution, channels: int) -> Windows:
        found, first, step = [], 0, 1
        each = list(zip(source.windows, self.starts, self.apart, strict=True))
        for window, start, apart in reversed(each):
            size = window.size if apart == 1 else divided_up(window.size - start, apart)
            # Of data that is not enlarged beside some that is, every so manieth element is read.
            further = apart // (window.expansion * window.repeats)
            stride = 1 if window.axis is None else window.stride * further
            walk = _repeated_walk(window, start) if window.repeats > 1 else _walk(window, start)
            found.append((size, stride, *walk[1:-1], walk[-1] * step))
            first += walk[0] * step
            step *= window.taps
        sizes, strides, dilations, before, taps, repeats, offsets, steps = zip(
            *reversed(found), strict=True
        )
        whole = self.batch and channels == self.convolution.channels_of_group
        return Windows(
            sizes,
            sizes,
            strides,
            dilations,
            before,
            taps,
            steps,
            first,
            channels,
            repeats,
            offsets,
            channels if whole else 0,
            self.rims,
            self.streams,
        )

    def segment(self) -> HopperSegment:
        """The segment over boxes, and places in them."""
        convolution = self.convolution
        windows = self.windows[0]
        steps = 1 if self.rims else math.prod(windows.taps)
        terms = Axis(fresh_var("term", INDEX), steps * windows.channels)
        env = {}
        for window, start, axis, apart in zip(
            convolution.windows, self.starts, self.positions, self.apart, strict=True
        ):
            if window.axis is not None:
                step, first = (constant(n, INDEX) for n in (apart, start))
                env[window.axis.var] = axis.var * step + first
        axes = Simplifier([*self.batch, *self.positions, *self.n])
        plain = Put(env, axes).segment(convolution.segment)
        m, env = self._rows()
        boxed = Put(env, Simplifier([*self.batch, *m, *self.n])).segment(plain)
        groups = {"batch": self.batch, "m": m, "n": self.n}
        bits = row_bits(windows.shape, self.run) if self.run is not None else None
        outputs = with_row_bits(boxed.outputs, m, (*self.batch, *self.n), bits)
        boxed = replace(boxed, outputs=outputs)
        bindings, outputs, loads = take_loads(convolution.contraction, boxed, groups)
        data, prologue, parts = self._data()
        found = HopperSegment(
            self.batch,
            m,
            self.n,
            (replace(convolution.product, k=(terms,)),),
            data,
            (_weights(convolution, self.dtype, self.batch),),
            bindings,
            outputs,
            loads,
            windows=windows,
            parts=parts,
            prologue=prologue,
        )
        *_, before = take_loads(convolution.contraction, plain, self._by_window)
        unboxed = {id(load): other for load, other in zip(loads, before, strict=True)}

        def of_load(load: EpilogueLoad) -> TensorMap | None:
            if not (load.per_row and load.per_column):
                return None
            return self._boxes_of(load.param, load.dtype, unboxed[id(load)].indices)

        def of_output(position: int) -> TensorMap | None:
            output = plain.outputs[position]
            param = convolution.contraction.params[output.param].var
            return self._boxes_of(param, output.dtype, output.indices)

        return in_boxes(found, of_output, of_load)

    def _data(self) -> tuple[WindowView, Prologue | None, tuple[WindowPart, ...]]:
        """The data, or the first part of it; what is computed of it; the parts, if there are."""
        each = list(zip(self.sources, self.windows, strict=True))
        found = [_data(source, windows, self.batch, self.dtype) for source, windows in each]
        view, prologue = found[0]
        sources = self.convolution.sources
        if sources and any(computed is not None for _, computed in found):
            raise Unsupported("parts of data that are computed")
        parts = zip(sources, self.windows, found, strict=True) if sources else ()
        return (
            view,
            prologue,
            tuple(WindowPart(s.first, s.end, w, own) for s, w, (own, _) in parts),
        )

    def _rows(self) -> tuple[tuple[Axis, ...], dict[Var, Expr]]:
        """The axes of rows, and what positions are of them."""
        outer, inner, env = [], [], {}
        windows = self.windows[0]
        for axis, boxes, size in zip(self.positions, windows.boxes, windows.shape, strict=True):
            place = constant(0, INDEX)
            if not equal_sizes(boxes, 1):
                outer.append(Axis(fresh_var("box", INDEX), boxes))
                place = outer[-1].var * constant(size, INDEX)
            if size > 1:
                inner.append(Axis(fresh_var("place", INDEX), size))
                place = place + inner[-1].var
            env[axis.var] = place
        return (*outer, *inner), env

    @property
    def _by_window(self) -> Groups:
        names = zip(self.windows[0].names, self.positions, strict=True)
        positions = {name: () if equal_sizes(axis.extent, 1) else (axis,) for name, axis in names}
        return {"batch": self.batch, "n": self.n, **positions}

    def _boxes_of(self, param: Var, dtype: str, indices: Sequence[Expr]) -> TensorMap | None:
        """The map of a matrix in boxes of 64 positions by 64 filters, if the TMA moves it."""
        shape = next(p.shape for p in self.convolution.contraction.params if p.var.same_as(param))
        access = affine_access(indices, shape, self._by_window, symbolic_strides=True)
        if access is None or dtype not in HALF_DTYPES or not access.contiguous("n"):
            return None
        windows = self.windows[0]
        boxes = dict(zip(windows.names, windows.shape, strict=True))
        try:
            found = tensor_map(param, dtype, access, "n", {**boxes, "n": BOX})
        except Unsupported:
            return None
        return found if _is_ordered(found, windows) else None


def _in_one_box(
    windows: Sequence[Windows],
    rims: bool,
    run: tuple[int, ...] | None,
    alone: Collection[int],
    many: Sequence[Sequence[int]],
) -> list[Windows]:
    """The windows of all parts of the data with the positions of a box that suits `many` sizes."""
    first = windows[0]
    strides = [max(some) for some in zip(*(w.strides for w in windows), strict=True)]
    reach = [
        max(abs(w.dilations[i]) * (w.taps[i] - 1) // w.repeats[i] for w in windows)
        for i in range(len(first.sizes))
    ]
    shape = box_shape(first.sizes, strides, reach, rims, run, alone, many)
    return [replace(w, shape=shape) for w in windows]


def _images(convolution: Convolution) -> set[int]:
    """The windows along which vectors differ that data is computed of: those of images, of which a
    box then has one.
    """
    loads = loads_of(convolution.data)
    read = [
        {i for i, w in enumerate(convolution.windows) if convolution.coordinates[w.dim] in used}
        for used in (set(variables(*load.indices)) for load in loads)
    ]
    most = max(map(len, read), default=0)
    return set().union(*(windows for windows in read if len(windows) < most))


Walk = tuple[int, int, int, int, int, int, int]
"""The first tap; dilation, elements before, number of taps, repeats, offset; from tap to tap."""


def _walk(window: Window, start: int) -> Walk:
    """How the taps that positions from `start` on meet an element at walk over the data."""
    met = window.phase_taps(start) or [(0, -BEYOND)]
    (tap, at), (next_tap, next_at) = met[0], met[min(1, len(met) - 1)]
    return tap, next_at - at, window.low - at, len(met), 1, 0, next_tap - tap


def _repeated_walk(window: Window, start: int) -> Walk:
    """The same of data whose elements are repeated, all taps of which meet one."""
    if window.dilation < 0:
        raise Unsupported("a filter that is turned around, over elements that are repeated")
    if window.low % window.repeats or not is_multiple(window.high, window.repeats):
        raise Unsupported("zeros in the place of some repetitions of an element")
    first, offset = window.repeated_at(start)
    before = window.low // window.repeats - first
    return 0, window.dilation, before, window.taps, window.repeats, offset, 1


# ---- operands


def _shape_of(convolution: Convolution, load: TensorLoad) -> tuple:
    params = convolution.contraction.params
    return next(p.shape for p in params if p.var.same_as(load.source))


def _data(
    convolution: Convolution, windows: Windows, batch: tuple[Axis, ...], dtype: str
) -> tuple[WindowView, Prologue | None]:
    """The data as the TMA reads it, and what is computed of it."""
    env, groups = {}, {"batch": batch, "k": (convolution.channels,)}
    for name, window in zip(windows.names, convolution.windows, strict=True):
        if isinstance(window.high, int) and window.high <= window.low:
            raise Unsupported("data of which nothing is read")
        low = window.low // window.repeats
        size = simplified(window.high // window.repeats - low)
        place, groups[name] = constant(low, INDEX), ()
        if not equal_sizes(size, 1):
            axis = Axis(fresh_var(name, INDEX), size)
            place = axis.var + place
            groups[name] = (axis,)
        place = place * constant(window.repeats, INDEX)
        env[convolution.coordinates[window.dim]] = place
    channel = convolution.channels.var
    if windows.group_channels:
        channels = Axis(fresh_var("channel", INDEX), convolution.groups * windows.channels)
        channel, groups["k"], groups["batch"] = channels.var, (channels,), ()
    elif convolution.group is not None:
        size = constant(convolution.channels_of_group, INDEX)
        channel = convolution.group.var * size + channel
    env[convolution.coordinates[convolution.channel_dim]] = channel
    put = Put(env, Simplifier([axis for group in groups.values() for axis in group]))
    load, prologue = Operand(convolution.data).load, None
    if load is not None:
        source, indices = load.source, [put(i) for i in load.indices]
        shape = _shape_of(convolution, load)
        access = affine_access(indices, shape, groups, symbolic_strides=True)
    else:
        value = Operand(put(convolution.data))
        sizes = tuple(simplified(w.high - w.low) for w in convolution.windows)
        held = zip(windows.names, windows.held, strict=True)
        alone = [name for name, n in held if n == 1] if windows.streams else ()
        prologue = read_prologue(
            convolution.contraction, convolution.product, value, groups, sizes, alone
        )
        source, access = prologue.stored.param, prologue.stored.access
        if prologue.stored.dtype != dtype:
            raise Unsupported(f"data computed of {prologue.stored.dtype}, weights of {dtype}")
    if access is None or not access.contiguous("k"):
        raise Unsupported("data whose channels are not contiguous")
    boxes = dict(zip(windows.names, windows.held, strict=True))
    boxes["k"] = STEP_BYTES // bytes_of(dtype)
    found = tensor_map(source, dtype, access, "k", boxes)
    if not _is_ordered(found, windows):
        raise Unsupported("data whose windows lie in another order")
    found = with_steps(found, dict(zip(windows.names, windows.strides, strict=True)))
    return WindowView(source, dtype, access, "m", "k", found), prologue


def _is_ordered(found: TensorMap, windows: Windows) -> bool:
    """Whether the rows of a box stand in shared memory in the order of rows: along the last window
    first. (A window of one element is a dimension at the end of a map.)
    """
    long = [d.group for d in found.dimensions if d.group in windows.names and d.box > 1]
    return long == sorted(long, key=windows.names.index, reverse=True)


def _weights(convolution: Convolution, dtype: str, batch: tuple[Axis, ...]) -> OperandView:
    load = convolution.weights.load
    taps = tuple(w.tap for w in convolution.windows if w.tap is not None)
    groups = {
        "batch": batch,
        "n": (convolution.filters,),
        "k": (convolution.channels,),
        "tap": taps,
    }
    access = affine_access(load.indices, _shape_of(convolution, load), groups)
    if access is None:
        raise Unsupported("weights whose index is not affine")
    inner = "k" if access.contiguous("k") else "n"
    if inner != "k" and dtype not in HALF_DTYPES:
        raise Unsupported(f"weights of {dtype} that are not contiguous along channels")
    view = OperandView(load.source, dtype, access, "n", inner)
    view.boxes(BOX)  # raises where no tile of any size is a box
    return view
