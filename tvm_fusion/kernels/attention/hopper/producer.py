"""The producer: one thread that brings queries, keys and values, ahead into coming tiles.

Where scouts look for the tiles of keys that can match, it waits for what they find.

K[n-1] Q K[n-2] V[n-1] K[n-3] V[n-2] ... V[0]        keys from the last tile to the first
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...gemm.hopper.state import Ring, expect, wait
from ...gpu.tensor_map import TensorMap
from ..tiled.tiles import Tile
from .config import BOX, HALF_BYTES
from .match import release_found, take_range
from .problem import View
from .state import Kernel


def emit_producer(kernel: Kernel) -> None:
    """Emits the loop of the producer."""
    stages = kernel.plan.config.stages
    keys, values, queries = Ring(stages, 1), Ring(stages, 1), Ring(1, 1)
    with kernel.each_tile() as tile:
        first, end = tile.keys.first, tile.keys.end
        if kernel.shared.found is not None:
            first, end = take_range(kernel)
        count = T.Bind(end - first)
        with T.serial(0, count, unroll=False) as step:
            number = T.Bind(end - 1 - step)
            _bring_keys(kernel, tile, number, keys)
            with T.If(tirx.EQ(step, 0)):
                with T.Then():
                    _bring_queries(kernel, tile, queries)
                with T.Else():
                    _bring_values(kernel, tile, number + 1, values)
        _bring_values(kernel, tile, first, values)


def _bring_queries(kernel: Kernel, tile: Tile, ring: Ring) -> None:
    s, plan = kernel.shared, kernel.plan
    wait(s.q_empty.ptr_to([0]), ring.phase)
    at = {**tile.place, "m": tile.query}
    if s.found is not None:
        release_found(kernel)
    view = kernel.problem.q
    _bring(view, plan.q_map, kernel.maps.q, s.q, [], at, s.q_full.ptr_to([0]))
    ring.advance()


def _bring_keys(kernel: Kernel, tile: Tile, number: Expr, ring: Ring) -> None:
    s, plan = kernel.shared, kernel.plan
    wait(s.k_empty.ptr_to([ring.stage]), ring.phase)
    at = {**tile.place, "n": number * plan.config.block_n}
    view, barrier = kernel.problem.k, s.k_full.ptr_to([ring.stage])
    _bring(view, plan.k_map, kernel.maps.k, s.k, [ring.stage], at, barrier)
    ring.advance()


def _bring_values(kernel: Kernel, tile: Tile, number: Expr, ring: Ring) -> None:
    s, plan = kernel.shared, kernel.plan
    wait(s.v_empty.ptr_to([ring.stage]), ring.phase)
    at = {**tile.place, "n": number * plan.config.block_n}
    view, barrier = kernel.problem.v, s.v_full.ptr_to([ring.stage])
    _bring(view, plan.v_map, kernel.maps.v, s.v, [ring.stage], at, barrier)
    ring.advance()


def _bring(
    view: View,
    found: TensorMap,
    handle: Var,
    buffer: Expr,
    stage: list[Expr],
    at: dict[str, Expr],
    barrier: Expr,
) -> None:
    """All boxes of a tile, which starts `at` this point."""
    boxes, size = (int(extent) for extent in buffer.shape[len(stage) :])
    expect(barrier, boxes * size * HALF_BYTES)
    for box in range(boxes):
        target = buffer.ptr_to([*stage, box, 0])
        column = at.get(view.columns, 0) + box * BOX
        found.load(target, handle, at | {view.columns: column}, barrier)
