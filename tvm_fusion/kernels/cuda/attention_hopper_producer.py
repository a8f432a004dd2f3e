"""The producer: one thread that brings queries, keys and values, ahead into coming tiles.

K[n-1] Q K[n-2] V[n-1] K[n-3] V[n-2] ... V[0]        keys from the last tile to the first
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from .attention_hopper_config import BOX, HALF_BYTES
from .attention_hopper_state import Kernel, Tile
from .gemm_hopper_state import Ring, expect, wait
from .gemm_tensor_map import TensorMap


def emit_producer(kernel: Kernel) -> None:
    """Emits the loop of the producer thread."""
    stages = kernel.plan.config.stages
    keys, values, queries = Ring(stages, 1), Ring(stages, 1), Ring(1, 1)
    with kernel.each_tile() as tile:
        count = T.Bind(tile.keys.end - tile.keys.first)
        with T.serial(0, count, unroll=False) as step:
            number = T.Bind(tile.keys.end - 1 - step)
            _bring_keys(kernel, tile, number, keys)
            with T.If(tirx.EQ(step, 0)):
                with T.Then():
                    _bring_queries(kernel, tile, queries)
                with T.Else():
                    _bring_values(kernel, tile, number + 1, values)
        _bring_values(kernel, tile, tile.keys.first, values)


def _bring_queries(kernel: Kernel, tile: Tile, ring: Ring) -> None:
    s, plan = kernel.shared, kernel.plan
    wait(s.q_empty.ptr_to([0]), ring.phase)
    at = {**tile.place, "m": tile.query}
    size = plan.config.block_m * BOX
    _bring(plan.q_map, kernel.maps.q, s.q, [], "d", at, s.q_full.ptr_to([0]), size)
    ring.advance()


def _bring_keys(kernel: Kernel, tile: Tile, number: Expr, ring: Ring) -> None:
    s, plan = kernel.shared, kernel.plan
    wait(s.k_empty.ptr_to([ring.stage]), ring.phase)
    at = {**tile.place, "n": number * plan.config.block_n}
    barrier, size = s.k_full.ptr_to([ring.stage]), plan.config.block_n * BOX
    _bring(plan.k_map, kernel.maps.k, s.k, [ring.stage], "d", at, barrier, size)
    ring.advance()


def _bring_values(kernel: Kernel, tile: Tile, number: Expr, ring: Ring) -> None:
    s, plan = kernel.shared, kernel.plan
    wait(s.v_empty.ptr_to([ring.stage]), ring.phase)
    at = {**tile.place, "n": number * plan.config.block_n}
    barrier, size = s.v_full.ptr_to([ring.stage]), plan.config.block_n * BOX
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
