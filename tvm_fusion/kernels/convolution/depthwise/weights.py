"""Weights of the direct convolution kernel: a thread's in registers, or a block's in shared memory.

They are numbered by channel of a group, taps of the outer windows, of the rows, of the columns.
"""

from __future__ import annotations

import math

from tvm.ir import Expr
from tvm.script import tirx as T

from ...gpu.memory import shared_pool
from ...gpu.product_frame import Frame, evaluate
from ...program.expr import conjunction, convert
from .problem import Direct
from .reads import guard
from .shape import Shape

WIDTH = 4
"""Weights of one access to shared memory."""


class Weights:
    """The weights of a thread's filters."""

    def __init__(self, frame: Frame, problem: Direct, shape: Shape) -> None:
        self.frame, self.problem, self.shape = frame, problem, shape
        self.config = shape.config

    def fill(self, first: Expr, lane: Expr, thread: Expr) -> None:
        """All weights of the block into shared memory, in the order in which they lie; `first` is
        the block's first lane.
        """
        s, c = self.shape, self.config
        pool = shared_pool()
        self.shared = pool.alloc((s.taps, s.pitch), "float32", align=16)
        pool.commit()
        self.own = T.Bind(lane * c.filters)
        width = c.lanes * c.filters
        total = s.taps * width
        dims = [dim for dim in self.problem.convolution.weight_dims if dim]
        by_filter = bool(dims) and any(dims[-1][-1] is a for a in self.problem.filter_axes)
        with T.serial(-(-total // c.threads), unroll=False) as i:
            flat = T.Bind(i * c.threads + thread)
            if by_filter:
                entry, own = T.Bind(flat // width), T.Bind(flat % width)
            else:
                entry, own = T.Bind(flat % s.taps), T.Bind(flat // s.taps)
            filter = T.Bind(first * c.filters + convert(own, self.frame.index))
            inside = conjunction(
                None if total % c.threads == 0 else flat < total,
                None if s.lanes % c.lanes == 0 else filter < s.filters,
            )
            with guard(inside):
                T.buffer_store(self.shared, self._weight(filter, entry), [entry, own])
        T.evaluate(T.cuda.cta_sync())

    def hold(self, lane: Expr) -> None:
        """All weights of the thread into registers."""
        s, c = self.shape, self.config
        self.registers = T.alloc_local((s.taps * c.filters,), "float32")
        with T.serial(s.taps, unroll=True) as entry:
            if s.is_staged:
                self._copy(entry, self.registers, entry * c.filters)
                return
            for f in range(c.filters):
                value = self._weight(lane * c.filters + f, entry)
                T.buffer_store(self.registers, value, [entry * c.filters + f])

    def at(self, entry: Expr) -> Expr:
        """The weights of the thread's filters for one channel and tap."""
        c = self.config
        found = T.alloc_local((c.filters,), "float32")
        if c.shared:
            self._copy(entry, found, 0)
        else:
            for f in range(c.filters):
                T.buffer_store(found, self.registers[entry * c.filters + f], [f])
        return found

    def _copy(self, entry: Expr, target: Expr, start: Expr | int) -> None:
        """Those of a tap from shared memory to registers."""
        filters = self.config.filters
        width = math.gcd(filters, WIDTH)
        for first in range(0, filters, width):
            with T.vectorized(width) as v:
                value = self.shared[entry, self.own + first + v]
                T.buffer_store(target, value, [start + first + v])

    def _weight(self, filter: Expr, entry: Expr) -> Expr:
        """A weight of a filter of all groups."""
        s, c = self.shape, self.problem.convolution
        env = self.problem.filter(filter)
        places = [*s.outer, s.row_window, s.numbers.columns]
        for number in reversed([i for i in places if i is not None]):
            slide, window = s.numbers.windows[number], c.windows[number]
            if window.tap is not None:
                tap = entry % slide.taps
                env[window.tap.var] = slide.taps - 1 - tap if slide.turned else tap
                entry = entry // slide.taps
        if c.channels is not None:
            env[c.channels.var] = entry
        env = {var: convert(value, self.frame.index) for var, value in env.items()}
        (value,) = evaluate(self.frame, c.weights.bindings, [c.weights.value], env, False)
        return convert(value, "float32")
