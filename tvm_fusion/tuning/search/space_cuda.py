"""Design spaces for CUDA: blocks, threads, vectors and items a thread of sampled sizes.

rows     every block below one loop over the rows that all share: a thread block a row
serial   a launch each; a thread reduces alone, its results in registers
cross    a launch each; the threads of a block reduce together
split    as cross, but each reduction in two launches, the first over many thread blocks
"""

from __future__ import annotations

from tvm import s_tir
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV

from ...errors import Unsupported
from .space_blocks import Blocks, Kind, gather
from .space_llvm import epilogue, hold

THREADS = (32, 64, 128, 256, 512, 1024)
ROWS = (1, 2, 4, 8, 16)
ITEMS = (1, 2, 4, 8)
VECTORS = (1, 2, 4, 8)
STEPS = (1, 2, 4, 8, 16)
LONGEST_PART = 1 << 14  # iterations of the first of two launches
UNROLLED = (0, 16, 64, 256)


def rows(sch: s_tir.Schedule, count: int) -> None:
    """Schedules inlined blocks below the `count` loops that all share."""
    blocks = Blocks(sch)
    last = blocks.named()[-1]
    row = sch.fuse(*blocks.loops(blocks.get(last))[Kind.SPATIAL][:count])
    gather(blocks, row, last)
    sch.bind(row, "blockIdx.x")
    threads = sample(sch, THREADS)
    for name in blocks.named():
        _below_row(blocks, name, threads, passes_on=name != last)
    _unroll(sch, row)


def serial(sch: s_tir.Schedule) -> None:
    """Schedules inlined blocks as a launch each."""
    blocks = Blocks(sch)
    names = blocks.named()
    reductions = _reductions(blocks)
    done = {_serial_reduction(blocks, name) for name in reductions}
    _rest(blocks, [n for n in names if n not in done and n not in reductions])


def cross(sch: s_tir.Schedule) -> None:
    """Schedules inlined blocks as a launch each."""
    blocks = Blocks(sch)
    names = blocks.named()
    reductions = _reductions(blocks)
    if not reductions:
        raise Unsupported("nothing is reduced")
    for name in reductions:
        _cross_reduction(blocks, name)
    _rest(blocks, [n for n in names if n not in reductions])


def split(sch: s_tir.Schedule) -> None:
    """Schedules inlined blocks, each reduction as two."""
    blocks = Blocks(sch)
    for name in _reductions(blocks):
        reduced = sch.fuse(*blocks.loops(blocks.get(name))[Kind.REDUCE])
        if not blocks.is_static(reduced):
            raise Unsupported(f"{name} reduces a symbolic extent")
        # without remainder: `rfactor` leaves the results of a cut-off part unset
        parts, _ = sch.split(reduced, sch.sample_perfect_tile(reduced, 2, LONGEST_PART))
        sch.rfactor(parts, 0)
    cross(sch)


def sample(sch: s_tir.Schedule, values: tuple[int, ...]) -> ExprRV:
    """A sampled choice, all as likely."""
    return sch.sample_categorical(list(values), [1 / len(values)] * len(values))


def _whole(blocks: Blocks, loop: LoopRV, factors: tuple[int, ...]) -> tuple[int, ...]:
    """The factors that split a loop without remainder."""
    return tuple(f for f in factors if int(blocks.extent(loop)) % f == 0)


def _grid(blocks: Blocks, loop: LoopRV) -> list[LoopRV]:
    """A loop as thread blocks and threads without remainder: `reverse_compute_at` forgets the
    condition of one, and what it moves there would write beyond the tensor.
    """
    sch = blocks.sch
    if whole := _whole(blocks, loop, THREADS):
        return list(sch.split(loop, [None, sample(sch, whole)]))
    return list(sch.split(loop, sch.sample_perfect_tile(loop, 2, THREADS[-1])))


def _reductions(blocks: Blocks) -> list[str]:
    return [n for n in blocks.named() if blocks.kind(blocks.get(n)) is Kind.REDUCE]


def _rest(blocks: Blocks, names: list[str]) -> None:
    """Launches for blocks that reduce nothing."""
    for name in names:
        block = blocks.get(name)
        if blocks.kind(block) is Kind.SPATIAL:
            _map(blocks, block)
        else:
            _in_order(blocks, block)


def _map(blocks: Blocks, block: SBlockRV) -> None:
    sch = blocks.sch
    spatial = blocks.loops(block)[Kind.SPATIAL]
    if not spatial:
        _one_thread(sch, block)
        return
    loop = sch.fuse(*spatial)
    factors = [None, sample(sch, ITEMS), sample(sch, THREADS), sample(sch, VECTORS)]
    grid, items, threads, lanes = sch.split(loop, factors)
    sch.bind(grid, "blockIdx.x")
    sch.bind(threads, "threadIdx.x")
    sch.vectorize(lanes)
    sch.unroll(items)


def _in_order(blocks: Blocks, block: SBlockRV) -> None:
    """Threads over the spatial loops alone."""
    sch = blocks.sch
    loops = blocks.loops(block)
    rest = [*loops[Kind.REDUCE], *loops[Kind.OTHER]]
    if not loops[Kind.SPATIAL]:
        _one_thread(sch, block)
        return
    sch.reorder(*loops[Kind.SPATIAL], *rest)
    loop = sch.fuse(*loops[Kind.SPATIAL])
    grid, threads = sch.split(loop, [None, sample(sch, THREADS)])
    sch.bind(grid, "blockIdx.x")
    sch.bind(threads, "threadIdx.x")


def _serial_reduction(blocks: Blocks, name: str) -> str | None:
    """Schedules one reduction; the name of the block behind it that this has scheduled too."""
    sch, block = blocks.sch, blocks.get(name)
    loops = blocks.loops(block)
    reduced = loops[Kind.REDUCE]
    if not loops[Kind.SPATIAL]:
        raise Unsupported(f"{name} reduces to one value")
    if not all(blocks.is_static(loop) for loop in loops[Kind.SPATIAL]):
        raise Unsupported(f"{name} has a symbolic extent")
    behind = epilogue(blocks, name)
    *outer, last = loops[Kind.SPATIAL]
    # lanes of one axis without remainder: else the results of a thread are a huge array
    last, lanes = sch.split(last, [None, sample(sch, _whole(blocks, last, VECTORS))])
    grid, threads = _grid(blocks, sch.fuse(*outer, last))
    steps, inner = sch.split(reduced[-1], [None, sample(sch, STEPS)])
    sch.reorder(grid, threads, *reduced[:-1], steps, inner, lanes)
    sch.vectorize(lanes)
    sch.unroll(inner)
    behind = hold(blocks, name, behind, threads)
    if behind is not None:
        written = list(sch.get_loops(blocks.get(behind)))[2:]
        if written:
            sch.vectorize(sch.fuse(*written))
    sch.bind(grid, "blockIdx.x")
    sch.bind(threads, "threadIdx.x")
    sch.decompose_reduction(blocks.get(name), (reduced[0] if len(reduced) > 1 else steps))
    return behind


def _cross_reduction(blocks: Blocks, name: str) -> None:
    sch, block = blocks.sch, blocks.get(name)
    loops = blocks.loops(block)
    reduced = sch.fuse(*loops[Kind.REDUCE])
    steps, threads = sch.split(reduced, [None, sample(sch, THREADS)])
    if loops[Kind.SPATIAL]:
        grid, several = sch.split(sch.fuse(*loops[Kind.SPATIAL]), [None, sample(sch, ROWS)])
        sch.reorder(grid, several, steps, threads)
        sch.bind(several, "threadIdx.y")
    else:
        grid = sch.add_unit_loop(steps)
    sch.bind(grid, "blockIdx.x")
    sch.bind(threads, "threadIdx.x")
    _unroll(sch, grid)


def _below_row(blocks: Blocks, name: str, threads: ExprRV, passes_on: bool) -> None:
    """A block of a row: over the threads, what it computes in shared memory for the others."""
    sch, block = blocks.sch, blocks.get(name)
    loops = blocks.loops(block, below=1)
    if loops[Kind.OTHER]:
        raise Unsupported(f"{name} runs in order")
    loops[Kind.SPATIAL] = [s for s in loops[Kind.SPATIAL] if blocks.extent(s) != 1]
    bound = loops[Kind.REDUCE] or loops[Kind.SPATIAL]
    if passes_on:
        for position in range(len(sch.get(block).writes)):
            sch.set_scope(block, position, "shared" if bound else "local")
    if not bound:
        return
    if loops[Kind.REDUCE] and loops[Kind.SPATIAL]:
        sch.reorder(*loops[Kind.SPATIAL], *loops[Kind.REDUCE])
    loop = sch.fuse(*bound)
    if loops[Kind.REDUCE]:
        _, inner = sch.split(loop, [None, threads])
    else:
        _, inner, lanes = sch.split(loop, [None, threads, sample(sch, VECTORS)])
        sch.vectorize(lanes)
    sch.bind(inner, "threadIdx.x")


def _one_thread(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """Loops of one iteration, never split: a split's condition would name no axis of the block, so
    blocks that are moved next to it would not inherit it.
    """
    around = list(sch.get_loops(block))
    threads = sch.add_unit_loop(around[0] if around else block)
    sch.bind(threads, "threadIdx.x")
    sch.bind(sch.add_unit_loop(threads), "blockIdx.x")


def _unroll(sch: s_tir.Schedule, loop: LoopRV) -> None:
    sch.annotate(loop, "pragma_auto_unroll_max_step", sample(sch, UNROLLED))
    sch.annotate(loop, "pragma_unroll_explicit", 1)
