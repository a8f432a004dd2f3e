"""The producer: one thread that keeps the ring of A and B tiles full, ahead into coming tiles."""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script import tirx as T

from .gemm_grid import Tile
from .gemm_hopper_plan import BLOCK_K
from .gemm_hopper_problem import BOX
from .gemm_hopper_state import Hopper, Ring, expect, wait


def emit_producer(kernel: Hopper) -> None:
    """Emits the loop of the producer thread."""
    ring = Ring(kernel.plan.config.stages, 1)
    with T.serial(0, kernel.turns) as turn:
        tile = kernel.tile(turn)
        with T.serial(0, kernel.plan.steps) as step:
            barrier = kernel.shared.full.ptr_to([ring.stage])
            wait(kernel.shared.empty.ptr_to([ring.stage]), ring.phase)
            expect(barrier, kernel.plan.transaction_bytes)
            _load_a(kernel, tile, step, ring.stage, barrier)
            for number, own in kernel.grid.each_segment(tile):
                _load_b(kernel, number, own, step, ring.stage, barrier)
            ring.advance()


def _load_a(kernel: Hopper, tile: Tile, step: Expr, stage: Expr, barrier: Expr) -> None:
    plan = kernel.plan
    at = {"batch": tile.batch, "m": tile.m * plan.config.block_m, "k": step * BLOCK_K}
    panels = 1 if kernel.problem.a.k_major else plan.config.block_m // BOX
    for panel in range(panels):
        target = kernel.shared.a.ptr_to([stage, panel * BOX * BLOCK_K])
        place = at | {"m": at["m"] + panel * BOX}
        plan.a_map.load(target, kernel.maps.a, place, barrier)


def _load_b(
    kernel: Hopper, number: int, tile: Tile, step: Expr, stage: Expr, barrier: Expr
) -> None:
    """The tiles of B of one segment; those of a pair are one operand of wgmma."""
    plan = kernel.plan
    at = {"batch": tile.batch, "n": tile.n * plan.out_n, "k": step * BLOCK_K}
    panels = 1 if kernel.problem.segments[number].b[0].k_major else plan.out_n // BOX
    for product, found in enumerate(plan.b_maps[number]):
        for panel in range(panels):
            offset = product * plan.out_n * BLOCK_K + panel * BOX * BLOCK_K
            target = kernel.shared.b.ptr_to([stage, offset])
            place = at | {"n": at["n"] + panel * BOX}
            found.load(target, kernel.maps.b[number][product], place, barrier)
