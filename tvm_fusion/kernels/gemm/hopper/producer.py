"""The producer: one thread that keeps the ring of A and B tiles full, ahead into coming tiles."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...gpu.product_grid import Tile
from .model import BOX, STEP_BYTES
from .state import Hopper, Ring, expect, wait


def emit_producer(kernel: Hopper) -> None:
    """Emits the loop of the producer thread."""
    ring = Ring(kernel.plan.config.stages, 1)
    with T.serial(0, kernel.turns) as turn:
        tile = kernel.tile(turn)
        if kernel.shared.resume is not None:
            # The stages hold partial sums of other blocks until the consumers have read them.
            with T.If(turn > 0), T.Then():
                wait(kernel.shared.resume.ptr_to([0]), (turn + 1) % 2)
        with T.serial(0, kernel.steps_of(tile), unroll=False) as step:
            barrier = kernel.shared.full.ptr_to([ring.stage])
            _wait_until_empty(kernel, ring)
            expect(barrier, kernel.plan.transaction_bytes)
            term = T.Bind((kernel.first_step + step) * kernel.problem.block_k)
            if kernel.problem.shared:
                _load_a(kernel, 0, tile, term, ring.stage, barrier)
            for number, own in kernel.grid.each_segment(tile):
                if not kernel.problem.shared:
                    _load_a(kernel, number, own, term, ring.stage, barrier)
                _load_b(kernel, number, own, term, ring.stage, barrier)
            ring.advance()
    if kernel.plan.config.multicast > 1:
        # The block lives until the others have handed back its last stages.
        with T.serial(0, kernel.plan.config.stages, unroll=False):
            _wait_until_empty(kernel, ring)
            ring.advance()


def _wait_until_empty(kernel: Hopper, ring: Ring) -> None:
    """Waits until all blocks that read the present stage are through with it."""
    wait(kernel.shared.empty.ptr_to([ring.stage]), ring.phase)


def _load_a(
    kernel: Hopper, number: int, tile: Tile, term: Expr, stage: Expr, barrier: Expr
) -> None:
    """The tile of A, of map `number`."""
    plan = kernel.plan
    at = {"batch": tile.batch, "m": tile.m * plan.config.block_m, "k": term}
    panels = 1 if kernel.problem.a.k_major else plan.config.block_m // BOX
    for panel in range(panels):
        target = kernel.shared.a.ptr_to([stage, panel * BOX * STEP_BYTES])
        place = at | {"m": at["m"] + panel * BOX}
        plan.a_maps[number].load(target, kernel.maps.a[number], place, barrier)


def _load_b(
    kernel: Hopper, number: int, tile: Tile, term: Expr, stage: Expr, barrier: Expr
) -> None:
    """The tiles of B of one segment; those of a pair are one operand of wgmma.

    Blocks that share them take turns in loading their pieces for all.
    """
    plan, blocks = kernel.plan, kernel.plan.config.multicast
    at = {"batch": tile.batch, "n": tile.n * plan.out_n, "k": term}
    k_major = kernel.problem.segments[number].b[0].k_major
    width = plan.out_n // blocks if k_major else BOX
    pieces = plan.out_n // width  # of each product
    for piece in range(len(plan.b_maps[number]) * pieces):
        product, first = divmod(piece, pieces)
        mine = tirx.IntImm("bool", 1)
        if blocks > 1 and pieces % blocks:
            mine = tirx.EQ(kernel.rank, piece % blocks)
        elif blocks > 1:
            # Without branches, which take registers: one of as many neighbours as there are blocks.
            if first % blocks:
                continue
            first = first + kernel.rank
        with T.If(mine), T.Then():
            column = first * width
            target = kernel.shared.b.ptr_to([stage, (product * plan.out_n + column) * STEP_BYTES])
            place = at | {"n": at["n"] + column}
            handle = kernel.maps.b[number][product]
            plan.b_maps[number][product].load(target, handle, place, barrier, blocks)
