"""Row kernels of resident blocks: the coming rows travel into shared memory meanwhile.

    ring of `stages` rows  <-  cp.async.bulk, one thread, a barrier a stage
    for each turn: wait for the stage -> registers -> phases as in `registers` -> refill the stage

For the longest rows, where one row a block leaves too few loads in flight.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...errors import Unsupported
from ..gpu import intrinsics as device
from ..gpu.frame import then
from ..gpu.memory import copy_registers
from ..gpu.transfer import places
from ..gpu.vectors import can_stream
from ..program.expr import bytes_of
from .registers import RegisterRows
from .steps import Chunk

RING_ALIGNMENT = 128


class BulkRows(RegisterRows):
    """Blocks (or clusters) that stay and walk over the rows with stride `clusters`."""

    def emit_turns(self, clusters: int, turns: int) -> None:
        """The body of the kernel."""
        config, program = self.config, self.program
        if config.rows != 1 or self.vectors % config.cluster or not program.is_static:
            raise Unsupported("the row does not divide into bulk copies")
        if not can_stream(program, config.width):
            raise Unsupported("rows that data picks, or that are not aligned, cannot be streamed")
        self.clusters, self.turns = clusters, turns
        self.partial = program.row_count != clusters * turns
        self.streamed = [tile for tile in program.tiles if tile.per_row]
        self.allocate(self.chunks * config.width)
        first = self.first_row()
        self._make_ring()
        with self._first_thread():
            for stage in range(min(config.stages, turns)):
                self._issue(T.Bind(first + stage * clusters), stage)
        self.start_cluster()
        with T.serial(turns, unroll=False) as turn:
            self.turn = turn
            self._turn(T.Bind(first + turn * clusters))

    # ---- a block's share of the row

    @property
    def share(self) -> int:
        return self.vectors // self.config.cluster

    @property
    def stride(self) -> int:
        return self.config.threads

    def walker(self) -> Expr:
        return self.threads.thread

    def chunk(self, step: Expr | int) -> Chunk:
        vector = step * self.stride + self.walker()
        if self.config.cluster > 1:
            vector = self.frame.rank * self.share + vector
        return Chunk(vector, step * self.config.width)

    # ---- the ring

    def _make_ring(self) -> None:
        """Shared memory for `stages` rows, and a barrier for each."""
        stages = self.config.stages
        self.columns = self.share * self.config.width
        self.place: dict[Var, int] = {}
        size = 0
        for tile in self.streamed:
            self.place[tile.var] = size
            row = self.columns * bytes_of(tile.dtype)
            size += -(-row // RING_ALIGNMENT) * RING_ALIGNMENT
        self.stage_bytes = size
        scope = "shared.dyn"
        self.ring = T.alloc_buffer((stages * size,), "uint8", scope=scope, align=RING_ALIGNMENT)
        self.barriers = T.alloc_shared((stages,), "uint64")
        with self._first_thread():
            for stage in range(stages):
                T.evaluate(device.barrier_init(self.barriers.ptr_to([stage])))
        T.evaluate(device.barrier_fence())
        T.evaluate(T.cuda.cta_sync())

    def _first_thread(self):
        return then(tirx.EQ(self.frame.thread, 0))

    def _issue(self, row: Expr, stage: Expr | int) -> None:
        """Starts the copies of this block's share of `row`."""
        barrier = self.barriers.ptr_to([stage])
        sizes = [self.columns * bytes_of(tile.dtype) for tile in self.streamed]
        with self.other_row(row, self.partial):
            T.evaluate(device.barrier_expect(barrier, sum(sizes)))
            for tile, size in zip(self.streamed, sizes, strict=True):
                target = self.ring.ptr_to([stage * self.stage_bytes + self.place[tile.var]])
                start = self.scope.row(tile.offset)
                if self.config.cluster > 1:
                    start = start + self.frame.rank * self.columns
                source = self.scope.address(tile.param, start)
                T.evaluate(device.bulk_copy(target, source, size, barrier))

    def _turn(self, row: Expr) -> None:
        """One row."""
        config = self.config
        stage = T.Bind(T.truncmod(self.turn, config.stages))
        self.enter_row(row, self.partial)
        self.scope.load_scalars()
        parity = T.Bind(T.truncmod(T.truncdiv(self.turn, config.stages), 2))
        T.evaluate(device.barrier_wait(self.barriers.ptr_to([stage]), parity))
        self.each_chunk(lambda chunk: self._take(chunk, stage))

        def refill() -> None:
            more = self.turn + config.stages < self.turns
            with then(tirx.And(tirx.EQ(self.frame.thread, 0), more)):
                self._issue(T.Bind(row + config.stages * self.clusters), stage)

        # the first barrier of the row tells that every thread has read the stage
        if self.program.phases and self.threads.partials > 1:
            self.compute(self.streamed, refill)
            return
        T.evaluate(T.cuda.cta_sync())
        refill()
        self.compute(self.streamed)

    def _take(self, chunk: Chunk, stage: Expr) -> None:
        """Shared memory -> registers."""
        width = self.config.width
        first = chunk.vector
        if self.config.cluster > 1:
            first = first - self.frame.rank * self.share
        for tile in self.streamed:
            size = bytes_of(tile.dtype)
            start = stage * self.stage_bytes + self.place[tile.var] + first * (width * size)
            target = places(self.tile_buffers[tile.var], chunk.slot, size)
            copy_registers(target, places(self.ring, start, 1), width * size)
