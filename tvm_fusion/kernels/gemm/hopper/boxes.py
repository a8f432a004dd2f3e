"""Boxes of shared memory between the epilogue of the Hopper GEMM and the TMA.

Threads put 64 x 64 results into a box, and the TMA stores it. Where an epilogue adds a matrix of
the output's shape (a residual), the TMA brings it into the very box first.
"""

from __future__ import annotations

from collections.abc import Iterable

from tvm.ir import Expr
from tvm.script import tirx as T

from ...gpu.product_frame import Tile
from .layout import Layout
from .model import BOX
from .plan import BOX_BYTES
from .state import Hopper, expect, fence_shared, wait, warpgroup_sync


class Boxes:
    """Emits what one consumer warpgroup does with its `count` boxes."""

    def __init__(self, kernel: Hopper, layout: Layout):
        self.kernel, self.plan, self.problem = kernel, kernel.plan, kernel.problem
        self.layout = layout
        self.count, self.deferred = self.plan.config.boxes, self.plan.config.deferred
        self.brings = self.problem.residual is not None

    def start(self) -> None:
        """Emits the request for the first tile's residual, where they are asked for ahead."""
        if self.brings and self.plan.ahead:
            with T.If(self.kernel.turns > 0), T.Then():
                self._request_ahead(T.int32(0))

    def during(self, step: Expr | int, tile: Tile) -> None:
        """Emits what belongs into a step: the request for the tile's residual, once."""
        if not self.brings or self.plan.ahead:
            return
        steps = min(self.plan.depths) // self.plan.config.split
        when = max(steps - 2, 0) if self.deferred else min(2, steps - 1)
        boxes = range(1 if self.deferred else self.count)
        if isinstance(step, int):
            if step == when:
                self.request(boxes, tile)
            return
        with T.If(step == when), T.Then():
            self.request(boxes, tile)

    def await_residual(self, turn: Expr) -> None:
        """Emits the wait for the residual of a tile that is not deferred."""
        if self.brings and self.plan.ahead:
            with T.If(turn + 1 < self.kernel.turns), T.Then():
                self._request_ahead(turn + 1)
            wait(self._arrived(self._first_box(turn)), turn // 2 % 2)
        elif self.brings:
            wait(self._arrived(0), turn % 2)

    def finish(self) -> None:
        """Emits the wait for the last stores, before the block ends."""
        with T.If(self.layout.thread == 0), T.Then():
            T.evaluate(T.ptx.cp.async_.bulk.wait_group(0))

    def buffer(self, box: int, turn: Expr) -> Expr:
        """The place of a box in shared memory."""
        return self.layout.number * self.count + self._first_box(turn) + box % self.count

    def open(self, box: int, turn: Expr) -> None:
        """Waits until the box is free, or holds the residual."""
        if not self.brings:
            with T.If(self.layout.thread == 0), T.Then():
                T.evaluate(T.ptx.cp.async_.bulk.wait_group.read(self.count - 1))
            warpgroup_sync(self.layout.number)
        elif self.deferred:
            rounds = self.plan.share_n // BOX // self.count
            wait(self._arrived(box % self.count), (turn * rounds + box // self.count) % 2)

    def close(self, box: int, buffer: Expr, tile: Tile) -> None:
        """The TMA stores a box that all threads have written."""
        fence_shared()
        warpgroup_sync(self.layout.number)
        with T.If(self.layout.thread == 0), T.Then():
            for number, own in self.kernel.grid.each_segment(tile):
                segment = self.problem.segments[number]
                source = self.kernel.shared.boxes.ptr_to([buffer, 0])
                place = self.layout.box_place(box, own, segment.windows)
                segment.staged_map.store(source, self.kernel.maps.staged[number], place)
            T.evaluate(T.ptx.cp.async_.bulk.commit_group())

    def request(self, boxes: Iterable[int], tile: Tile) -> None:
        """The TMA brings boxes of the residual once earlier stores have left them."""
        with T.If(self.layout.thread == 0), T.Then():
            T.evaluate(T.ptx.cp.async_.bulk.wait_group.read(0))
            if not self.deferred:
                expect(self._arrived(0), self.count * BOX_BYTES)
            for box in boxes:
                place = box % self.count
                barrier = self._arrived(place if self.deferred else 0)
                if self.deferred:
                    expect(barrier, BOX_BYTES)
                self._bring(box, tile, self.layout.number * self.count + place, barrier)

    def _request_ahead(self, turn: Expr) -> None:
        """The TMA brings the residual of the tile of a turn, into the boxes of every other turn."""
        needed = self.plan.share_n // BOX
        with T.If(self.layout.thread == 0), T.Then():
            T.evaluate(T.ptx.cp.async_.bulk.wait_group.read(0))
            tile = self.kernel.tile(turn)
            barrier = self._arrived(self._first_box(turn))
            expect(barrier, needed * BOX_BYTES)
            for box in range(needed):
                self._bring(box, tile, self.buffer(box, turn), barrier)

    def _bring(self, box: int, tile: Tile, buffer: Expr, barrier: Expr) -> None:
        """One box of the residual of a tile."""
        target = self.kernel.shared.boxes.ptr_to([buffer, 0])
        for number, own in self.kernel.grid.each_segment(tile):
            segment = self.problem.segments[number]
            handle = self.kernel.maps.residual[number]
            place = self.layout.box_place(box, own, segment.windows)
            segment.residual_map.load(target, handle, place, barrier)

    def _first_box(self, turn: Expr) -> Expr | int:
        """The first box of a tile, where boxes are for two tiles."""
        return turn % 2 * (self.plan.share_n // BOX) if self.plan.ahead else 0

    def _arrived(self, box: Expr | int) -> Expr:
        return self.kernel.shared.arrived.ptr_to([self.layout.number * self.count + box])
