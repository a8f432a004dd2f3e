"""Convolutions of every kind as fused PrimFuncs, with float64 references."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import numpy as np
from tvm import tirx
from tvm.relax import op

from tvm_fusion.kernels.cpu.contraction.panels import mark_constants

from .kernel_cases import fuse, numpy_dtype, outputs_of

DATA_LAYOUTS = {1: ("NCW", "NWC"), 2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}
WEIGHT_LAYOUTS = {1: ("OIW", "WIO"), 2: ("OIHW", "HWIO", "OHWI"), 3: ("OIDHW", "DHWIO")}
EPILOGUES = ("none", "relu", "scale_shift", "residual", "two_outputs", "channels_moved", "silu")


@dataclass(frozen=True)
class Conv:
    """A convolution: `sizes`, `kernel`, ... have a number for each dimension that it slides along;
    `padding` has all numbers before, then all behind; `channels`, `filters` are of all groups.
    `repeats` enlarges the data by repeating its elements, then `zeros` pads it, in operators of
    their own. With `parts` it is a concatenation of tensors with so many channels, of which only
    the first one is enlarged and padded. With `any_batch` the function is for any number of images,
    and with `any_size` for data of any size along the dimensions that it slides along; `batch` and
    `sizes` are those of the arrays.
    """

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    channels: int
    filters: int
    batch: int = 1
    groups: int = 1
    strides: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    data_layout: str = ""
    weight_layout: str = ""
    dtype: str = "float32"
    epilogue: str = "none"
    prologue: bool = False
    constant: bool = True
    exact: bool = False
    repeats: tuple[int, ...] = ()
    zeros: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    any_batch: bool = False
    any_size: bool = False

    def __post_init__(self) -> None:
        rank = len(self.sizes)
        defaults = {
            "strides": (1,) * rank,
            "padding": (0,) * (2 * rank),
            "dilation": (1,) * rank,
            "output_padding": (0,) * rank,
            "repeats": (1,) * rank,
            "zeros": (0,) * (2 * rank),
            "data_layout": DATA_LAYOUTS[rank][0],
            "weight_layout": "IO" + "DHW"[-rank:] if self.transposed else WEIGHT_LAYOUTS[rank][0],
        }
        for name, value in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def data_shape(self) -> tuple[int, ...]:
        return self._part_shape(self.sizes, self.parts[0] if self.parts else self.channels)

    @property
    def further_parts(self) -> list[tuple[int, ...]]:
        """Shapes of the parts of the data behind the first one."""
        return [self._part_shape(self.inner_sizes, channels) for channels in self.parts[1:]]

    def _part_shape(self, sizes: tuple[int, ...], channels: int) -> tuple[int, ...]:
        named = dict(zip("DHW"[-self.rank :], sizes, strict=True))
        named |= {"N": self.batch, "C": channels}
        return tuple(named[c] for c in self.data_layout)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        named = dict(zip("DHW"[-self.rank :], self.kernel, strict=True))
        named |= {"O": self.filters, "I": self.channels // self.groups}
        if self.transposed:
            named |= {"O": self.filters // self.groups, "I": self.channels}
        return tuple(named[c] for c in self.weight_layout)

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        """What the convolution's operator slides along."""
        before, behind = self.zeros[: self.rank], self.zeros[self.rank :]
        every = zip(self.sizes, self.repeats, before, behind, strict=True)
        return tuple(n * r + a + b for n, r, a, b in every)

    @property
    def output_sizes(self) -> tuple[int, ...]:
        found = []
        for d in range(self.rank):
            n, k, s = self.inner_sizes[d], self.kernel[d], self.strides[d]
            pad = self.padding[d] + self.padding[self.rank + d]
            reach = self.dilation[d] * (k - 1)
            if self.transposed:
                found.append((n - 1) * s - pad + reach + self.output_padding[d] + 1)
            else:
                found.append((n + pad - reach - 1) // s + 1)
        return tuple(found)

    @property
    def output_shape(self) -> tuple[int, ...]:
        named = dict(zip("DHW"[-self.rank :], self.output_sizes, strict=True))
        named |= {"N": self.batch, "C": self.filters}
        return tuple(named[c] for c in self.data_layout)

    @property
    def channel_shape(self) -> tuple[int, ...]:
        """A number a filter, as the results lie."""
        return tuple(self.filters if c == "C" else 1 for c in self.data_layout)

    def emit(self, bb, x, w, *more):
        """The graph."""
        names = ("conv1d", "conv2d", "conv3d")
        name = names[self.rank - 1] + ("_transpose" if self.transposed else "")
        options = dict(
            strides=self.strides,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            data_layout=self.data_layout,
            kernel_layout=self.weight_layout,
        )
        if self.transposed:
            options["output_padding"] = self.output_padding
        if self.prologue:
            x = bb.emit(op.nn.silu(x))
        x = self._enlarged(bb, x)
        if self.parts:
            further = more[len(self.extra) :]
            x = bb.emit(op.concat([x, *further], self.data_layout.index("C")))
        y = bb.emit(getattr(op.nn, name)(x, w, **options))
        if self.epilogue == "none":
            return y
        if self.epilogue in ("relu", "silu"):
            return bb.emit(getattr(op.nn, self.epilogue)(y))
        if self.epilogue == "channels_moved":
            return bb.emit(op.permute_dims(bb.emit(op.add(y, more[0])), self._moved()))
        y = bb.emit(op.multiply(y, more[0]))
        y = bb.emit(op.add(y, more[1]))
        if self.epilogue == "scale_shift":
            return bb.emit(op.nn.relu(y))
        z = bb.emit(op.nn.relu(bb.emit(op.add(y, more[2]))))
        return z if self.epilogue == "residual" else bb.emit_te_tuple(y, z)

    def _enlarged(self, bb, x):
        """The data with its elements repeated, then zeros around them."""
        axes = [self.data_layout.index(c) for c in "DHW"[-self.rank :]]
        for axis, count in zip(axes, self.repeats, strict=True):
            if count > 1:
                x = bb.emit(op.repeat(x, count, axis))
        if not any(self.zeros):
            return x
        widths = [0] * (2 * len(self.data_layout))
        for d, axis in enumerate(axes):
            widths[2 * axis : 2 * axis + 2] = self.zeros[d], self.zeros[self.rank + d]
        return bb.emit(op.nn.pad(x, widths))

    def _moved(self) -> list[int]:
        """Channels first become channels last, and the other way round."""
        at = self.data_layout.index("C")
        order = [d for d in range(len(self.data_layout)) if d != at]
        order.insert(1 if at > 1 else len(order), at)
        return order

    @property
    def extra(self) -> list[tuple[int, ...]]:
        """Shapes of what the epilogue reads."""
        if self.epilogue == "channels_moved":
            return [self.channel_shape]
        if self.epilogue in ("scale_shift", "residual", "two_outputs"):
            found = [self.channel_shape, self.channel_shape]
            return found if self.epilogue == "scale_shift" else [*found, self.output_shape]
        return []

    def func(self) -> tirx.PrimFunc:
        """The fused PrimFunc."""
        shapes = self._symbolic_shapes if self.any_batch or self.any_size else self._shapes
        func = fuse(_with_tuples(self.emit), *((s, self.dtype) for s in shapes))
        return mark_constants(func, [1]) if self.constant else func

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        """Of all inputs."""
        return [self.data_shape, self.weight_shape, *self.extra, *self.further_parts]

    @property
    def _symbolic_shapes(self) -> list[tuple]:
        """The same with a variable in the place of each size that is not known."""
        names = "DHW"[-self.rank :] if self.any_size else ""
        sizes = [tirx.Var(f"size_{c.lower()}", "int64") for c in names] or list(self.sizes)
        images = tirx.Var("images", "int64") if self.any_batch else self.batch
        whole = replace(self, sizes=tuple(sizes), batch=images, any_batch=False, any_size=False)
        return whole._shapes

    def poisoned(self) -> list[np.ndarray]:
        """Arrays for the outputs, NaN everywhere."""
        fixed = replace(self, any_batch=False, any_size=False).func()
        return outputs_of(fixed, len(self._shapes))

    def arrays(self, seed: int = 0) -> list[np.ndarray]:
        """Inputs, equal in every run."""
        rng = np.random.default_rng(seed)
        terms = np.prod(self.kernel) * self.channels / self.groups
        found = []
        for i, shape in enumerate(self._shapes):
            scale = 1 / np.sqrt(terms) if i == 1 else 1.0
            found.append((scale * rng.standard_normal(shape)).astype(numpy_dtype(self.dtype)))
        return found

    def expected(self, arrays) -> list[np.ndarray]:
        """Results in float64."""
        x, w, *more = (a.astype("float64") for a in arrays)
        if self.prologue:
            x = x / (1 + np.exp(-x))
        y = self._convolved(x, w, more[len(self.extra) :])
        if self.epilogue == "relu":
            y = np.maximum(y, 0)
        elif self.epilogue == "silu":
            y = y / (1 + np.exp(-y))
        elif self.epilogue == "channels_moved":
            y = (y + more[0]).transpose(self._moved())
        elif self.epilogue != "none":
            y = y * more[0] + more[1]
            if self.epilogue == "scale_shift":
                y = np.maximum(y, 0)
            else:
                z = np.maximum(y + more[2], 0)
                return [z] if self.epilogue == "residual" else [y, z]
        return [y]

    def _convolved(self, x: np.ndarray, w: np.ndarray, further: list[np.ndarray]) -> np.ndarray:
        """The convolution, tap by tap."""
        space = "DHW"[-self.rank :]
        order = [self.data_layout.index(c) for c in "NC" + space]
        x = x.transpose(order)
        for d in range(self.rank):
            widths = [(0, 0)] * x.ndim
            widths[2 + d] = self.zeros[d], self.zeros[self.rank + d]
            x = np.pad(x.repeat(self.repeats[d], 2 + d), widths)
        x = np.concatenate([x, *(part.transpose(order) for part in further)], 1)
        first = "IO" if self.transposed else "OI"
        w = w.transpose([self.weight_layout.index(c) for c in first + space])
        sizes = self.output_sizes
        y = np.zeros((self.batch, self.filters, *sizes))
        per, out = self.channels // self.groups, self.filters // self.groups
        for tap in itertools.product(*map(range, self.kernel)):
            for g in range(self.groups):
                source = x[:, g * per : (g + 1) * per]
                target = y[:, g * out : (g + 1) * out]
                if self.transposed:
                    matrix = w[(slice(g * per, (g + 1) * per), slice(None), *tap)].T
                else:
                    matrix = w[(slice(g * out, (g + 1) * out), slice(None), *tap)]
                moved = np.tensordot(matrix, source, (1, 1)).swapaxes(0, 1)
                read, written = self._slices(tap)
                if None not in read:
                    target[(slice(None), slice(None), *written)] += moved[
                        (slice(None), slice(None), *read)
                    ]
        order = ["NC".find(c) if c in "NC" else 2 + space.index(c) for c in self.data_layout]
        return y.transpose(order)

    def _slices(self, tap: tuple[int, ...]):
        """Which elements of the data a tap meets, and at which positions of the results."""
        read, written = [], []
        for d, t in enumerate(tap):
            shift = t * self.dilation[d] - self.padding[d]
            s, n, m = self.strides[d], self.inner_sizes[d], self.output_sizes[d]
            if self.transposed:  # position = s * element + shift
                pairs = [(i, s * i + shift) for i in range(n) if 0 <= s * i + shift < m]
                step = (1, s)
            else:  # element = s * position + shift
                pairs = [(s * i + shift, i) for i in range(m) if 0 <= s * i + shift < n]
                step = (s, 1)
            if not pairs:
                return [None], []
            (a, b), (c, e) = pairs[0], pairs[-1]
            read.append(slice(a, c + 1, step[0]))
            written.append(slice(b, e + 1, step[1]))
        return read, written


def _with_tuples(emit):
    """Lets a graph have two results."""
    from tvm import relax

    def emitted(bb, *variables):
        bb.emit_te_tuple = lambda *results: relax.Tuple(results)
        return emit(bb, *variables)

    return emitted


def random_convolution(seed: int) -> Conv:
    """A convolution of a kind, and with odd sizes, that the seed decides on."""
    rng = random.Random(seed)
    kind = seed % 6
    rank = rng.choice((1, 2, 2, 2, 3)) if kind != 2 else 2
    groups = per = 1
    if kind == 1:  # depthwise, with one or more filters a channel
        groups, per, out = rng.choice((3, 8, 17, 32, 40)), 1, rng.choice((1, 1, 2, 3))
    elif kind == 2:  # grouped
        groups, per, out = rng.choice((2, 3, 4)), rng.randint(1, 9), rng.choice((4, 8, 5, 16, 24))
    else:
        per, out = rng.choice((1, 3, 8, 13, 32, 70)), rng.choice((1, 2, 5, 16, 33, 64, 80))
    most = {1: 90, 2: 23, 3: 9}[rank]
    kernel = tuple(rng.choice((1, 2, 3, 3, 5, 7)) for _ in range(rank))
    if rank == 3:
        kernel = tuple(min(k, 3) for k in kernel)
    if kind == 3:
        kernel = (1,) * rank
    dilation = tuple(rng.choice((1, 1, 2)) for _ in range(rank))
    strides = tuple(rng.choice((1, 1, 2, 3)) for _ in range(rank))
    transposed = kind == 4
    output_padding = ()
    if transposed:
        dilation = (1,) * rank
        strides = tuple(rng.choice((1, 2, 2, 3)) for _ in range(rank))
        output_padding = tuple(rng.randrange(s) for s in strides)
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    padding = tuple(rng.randint(0, min(3, r)) for r in (*reach, *reach))
    if kind == 5:  # as torch has it
        padding = tuple(r // 2 for r in (*reach, *reach))
    sizes = tuple(rng.randint(r + 1, r + most) for r in reach)
    layouts = (
        ("", "")
        if transposed
        else (
            rng.choice(DATA_LAYOUTS[rank]),
            rng.choice(WEIGHT_LAYOUTS[rank]),
        )
    )
    return Conv(
        sizes,
        kernel,
        groups * per,
        groups * out,
        rng.choice((1, 1, 2, 3)),
        groups,
        strides,
        padding,
        dilation,
        transposed,
        output_padding,
        *layouts,
        rng.choice(("float32", "float32", "float32", "float16", "bfloat16")),
        rng.choice(EPILOGUES),
        prologue=rng.random() < 0.1,
        constant=rng.random() < 0.7,
        exact=rng.random() < 0.2,
    )


def plain(**changes) -> Conv:
    """A 3 x 3 convolution, and what is to be different."""
    return replace(Conv((9, 11), (3, 3), 8, 16, padding=(1,) * 4), **changes)


def moved_convolution(seed: int) -> Conv:
    """As `random_convolution`, of data that is enlarged or padded before, as the planner takes it
    in (`convolution.blocks`): few elements of it.
    """
    conv, rng = random_convolution(seed), random.Random(1000 + seed)
    if conv.transposed:
        conv = replace(conv, transposed=False, output_padding=(), weight_layout="")
    repeats = tuple(rng.choice((1, 2, 2, 3)) for _ in range(conv.rank))
    zeros = tuple(rng.choice((0, 0, 1, 2)) for _ in range(2 * conv.rank))
    kernel = tuple(max(2, k) for k in conv.kernel)
    reach = [d * (k - 1) for d, k in zip(conv.dilation, kernel, strict=True)]
    each = zip(repeats, conv.strides, reach, strict=True)
    strides = tuple(1 if n > 1 else min(s, r) for n, s, r in each)
    sizes = (-(-(r + rng.randint(1, 9)) // n) for r, n in zip(reach, repeats, strict=True))
    return replace(
        conv,
        sizes=tuple(max(2, n) for n in sizes),
        kernel=kernel,
        strides=strides,
        repeats=repeats,
        zeros=zeros,
    )


def joined_convolution(seed: int) -> Conv:
    """As `moved_convolution`, of a concatenation whose first part only is enlarged and padded."""
    conv, rng = moved_convolution(seed), random.Random(2000 + seed)
    parts = tuple(rng.choice((2, 3, 8, 13, 24, 64)) for _ in range(rng.choice((2, 2, 2, 3))))
    if rng.random() < 0.4:
        conv = replace(conv, sizes=conv.inner_sizes, repeats=(), zeros=())
    filters = conv.filters // conv.groups
    conv = replace(conv, filters=filters, groups=1, prologue=False)
    return replace(conv, parts=parts, channels=sum(parts))
