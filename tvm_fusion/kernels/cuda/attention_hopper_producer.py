"""The producer: one thread that brings queries, keys and values, ahead into coming tiles.

Where it also looks for the tiles of keys that can match, its whole warp does.

K[n-1] Q K[n-2] V[n-1] K[n-3] V[n-2] ... V[0]        keys from the last tile to the first
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from .attention_hopper_config import BOX, HALF_BYTES
from .attention_hopper_match import WARP, Narrowing
from .attention_hopper_state import Kernel
from .attention_tiles import Tile
from .gemm_hopper_state import Ring, expect, wait
from .gemm_tensor_map import TensorMap


def producer_threads(kernel: Kernel) -> int:
    """Threads that run what `emit_producer` emits."""
    return 1 if kernel.plan.match is None else WARP


def emit_producer(kernel: Kernel) -> None:
    """Emits the loop of the producer."""
    stages = kernel.plan.config.stages
    keys, values, queries = Ring(stages, 1), Ring(stages, 1), Ring(1, 1)
    match = kernel.plan.match
    narrowing = None if match is None else Narrowing(kernel, match)
    with kernel.each_tile() as tile:
        first, end = tile.keys.first, tile.keys.end
        if narrowing is not None:
            first, end = narrowing.emit(tile)
        count = T.Bind(end - first)
        with T.serial(0, count, unroll=False) as step:
            number = T.Bind(end - 1 - step)
            _bring_keys(kernel, tile, number, keys)
            with T.If(tirx.EQ(step, 0)):
                with T.Then():
                    _bring_queries(kernel, tile, (first, end), queries)
                with T.Else():
                    _bring_values(kernel, tile, number + 1, values)
        _bring_values(kernel, tile, first, values)


@contextmanager
def _one_thread(kernel: Kernel) -> Iterator[None]:
    """What is emitted inside runs on one thread of the producer."""
    if kernel.plan.match is None:
        yield
        return
    with T.If(kernel.thread == 0), T.Then():
        yield


def _bring_queries(kernel: Kernel, tile: Tile, keys: tuple[Expr, Expr], ring: Ring) -> None:
    s, plan = kernel.shared, kernel.plan
    wait(s.q_empty.ptr_to([0]), ring.phase)
    at = {**tile.place, "m": tile.query}
    size = plan.config.block_m * BOX
    with _one_thread(kernel):
        if s.ranges is not None:
            for place, value in enumerate(keys):
                T.buffer_store(s.ranges, value, [kernel.turn % 2, place])
        _bring(plan.q_map, kernel.maps.q, s.q, [], "d", at, s.q_full.ptr_to([0]), size)
    ring.advance()


def _bring_keys(kernel: Kernel, tile: Tile, number: Expr, ring: Ring) -> None:
    s, plan = kernel.shared, kernel.plan
    wait(s.k_empty.ptr_to([ring.stage]), ring.phase)
    at = {**tile.place, "n": number * plan.config.block_n}
    barrier, size = s.k_full.ptr_to([ring.stage]), plan.config.block_n * BOX
    with _one_thread(kernel):
        _bring(plan.k_map, kernel.maps.k, s.k, [ring.stage], "d", at, barrier, size)
    ring.advance()


def _bring_values(kernel: Kernel, tile: Tile, number: Expr, ring: Ring) -> None:
    s, plan = kernel.shared, kernel.plan
    wait(s.v_empty.ptr_to([ring.stage]), ring.phase)
    at = {**tile.place, "n": number * plan.config.block_n}
    barrier, size = s.v_full.ptr_to([ring.stage]), plan.config.block_n * BOX
    with _one_thread(kernel):
        _bring(plan.v_map, kernel.maps.v, s.v, [ring.stage], "e", at, barrier, size)
    ring.advance()


def _bring(
    found: TensorMap,
    handle: Var,
    buffer: Expr,
    stage: list[Expr],
    columns: str,
    at: dict[str, Expr],
    barrier: Expr,
    size: int,
) -> None:
    """All boxes of a tile, of `size` halves each."""
    boxes = int(buffer.shape[len(stage)])
    expect(barrier, boxes * size * HALF_BYTES)
    for box in range(boxes):
        target = buffer.ptr_to([*stage, box, 0])
        found.load(target, handle, at | {columns: box * BOX}, barrier)
