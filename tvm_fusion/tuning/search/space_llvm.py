"""Design spaces for CPUs: parallel outer loops, tiles, vectors, unrolling, all of sampled sizes.

    rows     every block below one parallel loop over the rows that all of them share
    nests    a parallel nest each; a reduction in a tile of accumulators with its consumer behind it

A reduction along memory first reduces into a vector of partial results (`rfactor`), one along other
axes runs over vectors of results.
"""

from __future__ import annotations

from tvm import s_tir
from tvm.s_tir.schedule import LoopRV, SBlockRV

from .space_blocks import Blocks, Kind, attempt, gather

LANES = 64  # most elements of an innermost loop
REGISTER_ROWS = 8  # most rows of a tile of accumulators
UNROLLED = (0, 16, 64, 256)
SYMBOLIC_LANES = (8, 16, 32)
TASKS_PER_CORE = (1, 2, 4, 16)


def rows(sch: s_tir.Schedule, count: int, cores: int) -> None:
    """Schedules inlined blocks below the `count` loops that all share."""
    blocks = Blocks(sch)
    split_lanes(blocks)
    last = blocks.named()[-1]
    row = sch.fuse(*blocks.loops(blocks.get(last))[Kind.SPATIAL][:count])
    gather(blocks, row, last)
    reduced = {name: _inner(blocks, blocks.get(name), below=1) for name in blocks.named()}
    _parallel(sch, [row], cores)
    for name, loop in reduced.items():
        if loop is not None:
            sch.decompose_reduction(blocks.get(name), loop)


def nests(sch: s_tir.Schedule, cores: int) -> None:
    """Schedules inlined blocks as a nest each."""
    blocks = Blocks(sch)
    split_lanes(blocks)
    names = blocks.named()
    reductions = [n for n in names if blocks.kind(blocks.get(n)) is Kind.REDUCE]
    done = {_reduction(blocks, name, cores) for name in reductions}
    for name in names:
        if name in done or name in reductions:
            continue
        block = blocks.get(name)
        if blocks.kind(block) is Kind.SPATIAL:
            *outer, last = blocks.loops(block)[Kind.SPATIAL] or [sch.add_unit_loop(block)]
            last, lanes = _split_lanes_of(blocks, last)
            sch.vectorize(lanes)
            _parallel(sch, [*outer, last], cores)


def split_lanes(blocks: Blocks) -> None:
    """Reductions along memory get a block of partial results, a vector of them."""
    sch = blocks.sch
    for name in blocks.named():
        block = blocks.get(name)
        if blocks.kind(block) is not Kind.REDUCE:
            continue
        loops = blocks.loops(block)
        reduced, spatial = loops[Kind.REDUCE][-1], loops[Kind.SPATIAL]
        if not blocks.is_static(reduced) or not blocks.reads_along(block, reduced):
            continue
        if any(blocks.extent(s) != 1 and blocks.reads_along(block, s) for s in spatial):
            continue
        _, lanes = sch.split(reduced, sch.sample_perfect_tile(reduced, 2, LANES))
        attempt(sch.rfactor, lanes, len(sch.get(block).writes[0].region))


def _reduction(blocks: Blocks, name: str, cores: int) -> str | None:
    """Schedules one reduction; the name of the block behind it that this has scheduled too."""
    sch, block = blocks.sch, blocks.get(name)
    loops = blocks.loops(block)
    spatial, reduced = loops[Kind.SPATIAL], loops[Kind.REDUCE]
    if len(spatial) == 0 or _is_lanes_sum(blocks, block):
        sch.decompose_reduction(block, reduced[0])
        return None
    behind = epilogue(blocks, name)
    *outer, columns = spatial
    columns, lanes = _split_lanes_of(blocks, columns)
    held: list[LoopRV] = []
    if outer and blocks.is_static(outer[-1]) and not _is_partial(blocks, block):
        tile = sch.sample_perfect_tile(outer[-1], 2, REGISTER_ROWS)
        outer[-1], inner = sch.split(outer[-1], tile)
        held.append(inner)
    if blocks.is_static(reduced[-1]):
        tile = sch.sample_perfect_tile(reduced[-1], 2, REGISTER_ROWS)
        reduced[-1:] = sch.split(reduced[-1], tile)
    sch.reorder(*outer, columns, *reduced, *held, lanes)
    sch.vectorize(lanes)
    for loop in held:
        sch.unroll(loop)
    behind = hold(blocks, name, behind, columns)
    if behind is not None:
        sch.vectorize(sch.get_loops(blocks.get(behind))[-1])
    _parallel(sch, [*outer, columns], cores)
    sch.decompose_reduction(blocks.get(name), reduced[0])
    return behind


def epilogue(blocks: Blocks, name: str) -> str | None:
    """The block that alone reads what a block computes, at the same points."""
    block = blocks.get(name)
    consumers = blocks.consumers(block)
    if len(consumers) != 1 or blocks.is_output(block):
        return None
    consumer = blocks.get(consumers[0])
    if blocks.kind(consumer) is not Kind.SPATIAL:
        return None
    mine = [blocks.extent(s) for s in blocks.loops(block)[Kind.SPATIAL]]
    theirs = [blocks.extent(s) for s in blocks.loops(consumer)[Kind.SPATIAL]]
    return consumers[0] if mine == theirs else None


def hold(blocks: Blocks, name: str, behind: str | None, tile: LoopRV) -> str | None:
    """Keeps a block's results in local memory until its tile is done; what writes them out."""
    sch, block = blocks.sch, blocks.get(name)
    if len(sch.get(block).writes) != 1:
        return None
    if behind is None:
        behind = blocks.name(sch.cache_write(block, 0, "local"))
    else:
        sch.set_scope(block, 0, "local")
    sch.reverse_compute_at(blocks.get(behind), tile, preserve_unit_loops=True)
    return behind


def _inner(blocks: Blocks, block: SBlockRV, below: int) -> LoopRV | None:
    """Vectorises the loops of a block below the shared ones; the first that reduces."""
    sch = blocks.sch
    loops = blocks.loops(block, below)
    reduced = loops[Kind.REDUCE]
    spatial = [
        s for s in loops[Kind.SPATIAL] if _is_partial(blocks, block) or blocks.extent(s) != 1
    ]
    if spatial and not _is_lanes_sum(blocks, block):
        last, lanes = _split_lanes_of(blocks, spatial[-1])
        sch.reorder(*spatial[:-1], last, *reduced, lanes)
        sch.vectorize(lanes)
    return reduced[0] if reduced else None


def _is_lanes_sum(blocks: Blocks, block: SBlockRV) -> bool:
    """Whether it adds up the partial results of `split_lanes`."""
    return any(_is_partial(blocks, p) for p in blocks.sch.get_producers(block))


def _is_partial(blocks: Blocks, block: SBlockRV) -> bool:
    return blocks.name(block).endswith("_rf")


def _split_lanes_of(blocks: Blocks, loop: LoopRV) -> list[LoopRV]:
    sch = blocks.sch
    if blocks.is_static(loop):
        return list(sch.split(loop, sch.sample_perfect_tile(loop, 2, LANES)))
    share = [1 / len(SYMBOLIC_LANES)] * len(SYMBOLIC_LANES)
    return list(sch.split(loop, [None, sch.sample_categorical(SYMBOLIC_LANES, share)]))


def _parallel(sch: s_tir.Schedule, loops: list[LoopRV], cores: int) -> None:
    """Fuses loops into a sampled number of tasks; unrolls what is below by a sampled measure."""
    tasks = sorted({1, *(cores * n for n in TASKS_PER_CORE)})
    count = sch.sample_categorical(tasks, [1 / len(tasks)] * len(tasks))
    outer, _ = sch.split(sch.fuse(*loops), [count, None])
    sch.parallel(outer)
    steps = sch.sample_categorical(UNROLLED, [1 / len(UNROLLED)] * len(UNROLLED))
    sch.annotate(outer, "pragma_auto_unroll_max_step", steps)
    sch.annotate(outer, "pragma_unroll_explicit", 1)
