"""Row kernels that also sum over their rows: each block walks over its share of the rows, computes
each as a row kernel does, and keeps one partial sum a column in registers.

    rows (S, R) x columns N, one block (or cluster) for each of the S groups of R rows
    for each row: wait for its stage of the ring -> phases, outputs -> sums[j] += body -> refill
    store the sums [S, N]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...errors import Unsupported
from .. import forms
from ..gpu.closed_forms import closed_forms
from ..gpu.frame import Frame, kernel_frame, launch_bounds
from ..gpu.transfer import store_vector
from ..gpu.vectors import piece_bytes
from ..gpu.windows import needs_windows
from ..program.analysis import analyze
from ..program.expr import convert, widened
from ..program.narrow import narrow_indices
from ..program.program import COMBINE, Accumulation, Output, Program, Reduction, Tile
from .bulk import BulkRows
from .config import Form, RowConfig
from .exchange import WARP, identity
from .mixed_config import mixed_configs
from .steps import Load

if TYPE_CHECKING:
    from ...config import HardwareProfile, Policy

__all__ = ["emit_mixed", "mixed_configs"]


def emit_mixed(program: Program, config: RowConfig, hw: HardwareProfile) -> tirx.PrimFunc:
    """The TIRx kernel of a program with reductions and accumulations.

    Parameters
    ----------
    program : static; its last row axis is the one that is summed over.
    config : one of `mixed_configs(program, hw)`: REGISTERS or BULK, one row a block at a time.

    Raises
    ------
    Unsupported
        Where the configuration does not suit the program or the device.
    """
    _check(program, config, hw)
    program = narrow_indices(program)
    sums = tuple(
        Output(a.param, a.body, a.offset, widened(a.dtype), True, a.phase)
        for a in program.accumulations
    )
    kinds = {s.param: a for s, a in zip(sums, program.accumulations, strict=True)}
    shown = dataclasses.replace(program, outputs=(*program.outputs, *sums), accumulations=())
    shown = closed_forms(shown)
    turns = program.rows[-1]
    groups = program.row_count // turns
    with (
        kernel_frame(shown, groups, config.threads, config.cluster) as frame,
        launch_bounds(config.min_blocks),
    ):
        MixedRows(shown, kinds, config, frame).emit_groups(turns)
    return frame.func


def _check(program: Program, config: RowConfig, hw: HardwareProfile) -> None:
    if not program.accumulations or not program.phases:
        raise Unsupported("the program does not sum over rows beside reductions over columns")
    if not program.is_static or not program.rows:
        raise Unsupported("mixed kernels need static shapes")
    if any(output.place is not None for output in program.outputs):
        raise Unsupported("an output whose rows are not consecutive in memory")
    if config.form is Form.LOOP or config.rows != 1 or config.threads % WARP:
        raise Unsupported(f"mixed rows of form {config.tag}")
    if config.threads > hw.max_threads_per_block:
        raise Unsupported(f"blocks of {config.threads} threads")
    if needs_windows(program, config.width):
        raise Unsupported(f"vectors of {config.width} in rows of {program.columns}")
    if config.cluster > 1 and not hw.architecture.has_clusters:
        raise Unsupported(f"{hw.arch} has no thread block clusters")
    if config.form is Form.BULK and not hw.architecture.has_tma:
        raise Unsupported(f"{hw.arch} has no bulk copies")
    if config.cluster > 1 and any(r.dtype != "float32" for r in program.reductions):
        raise Unsupported("clusters exchange float32 only")
    if any(r.index is not None for r in program.reductions):
        raise Unsupported("argmax beside sums over rows")


class MixedRows(BulkRows):
    """Each block (or cluster) walks over consecutive rows.

    `sums` says, by parameter, which outputs of `program` are accumulations.
    """

    def __init__(
        self, program: Program, sums: dict[int, Accumulation], config: RowConfig, frame: Frame
    ) -> None:
        super().__init__(program, config, frame)
        self.sums = sums
        self.partial_sums: dict[int, Var] = {}
        self.shared: list[Load] = []
        self.slot: Expr | int = 0

    def emit_groups(self, turns: int) -> None:
        """The body of the kernel."""
        config = self.config
        if self.vectors % config.cluster:
            raise Unsupported("the row does not divide into the blocks of a cluster")
        self.clusters, self.turns, self.partial = 1, turns, False
        is_ring = config.form is Form.BULK
        self.streamed = [tile for tile in self.program.tiles if tile.per_row and is_ring]
        slots = self.chunks * config.width
        self.allocate(slots)
        self._clear(slots)
        first = T.Bind(convert(self.frame.block, self.index) * turns)
        if is_ring:
            self._make_ring()
            with self._first_thread():
                for stage in range(min(config.stages, turns)):
                    self._issue(T.Bind(first + stage), stage)
        self._load_shared()
        self.start_cluster()
        with T.serial(turns, unroll=False) as turn:
            self.turn = turn
            row = T.Bind(first + convert(turn, self.index))
            if is_ring:
                self._turn(row)
            else:
                self.enter_row(row, partial=False)
                self.load_scalars()
                self.compute([])
        self.turn = None
        self._store_sums(first)

    def compute(
        self, loaded: Iterable[Load], after_barrier: Callable[[], None] | None = None
    ) -> None:
        super().compute([*loaded, *self.shared], after_barrier)

    # ---- what stays in registers over all rows

    def _load_shared(self) -> None:
        """Vectors that all rows read (gamma)."""
        shared = [t for t in self.loads if isinstance(t, Tile) and not t.per_row]
        if shared:
            self.each_chunk(lambda chunk: [self.load(tile, chunk) for tile in shared])
        self.shared = shared

    def _clear(self, slots: int) -> None:
        """Neutral sums."""
        for param, item in self.sums.items():
            dtype = self._dtype(item)
            self.partial_sums[param] = T.alloc_local((slots,), dtype)
            neutral = identity(
                Reduction(Var("sum", item.body.ty), item.kind, item.body, dtype, None, 0)
            )
            with T.unroll(slots) as slot:
                T.buffer_store(self.partial_sums[param], neutral, [slot])

    @staticmethod
    def _dtype(item: Accumulation) -> str:
        return str(item.body.ty.dtype)

    def sweep(self, chunk, reductions, outputs, prepared) -> None:
        self.slot = chunk.slot
        super().sweep(chunk, reductions, outputs, prepared)

    def _store(self, output: Output, column: Expr, values: list[Expr], edge: bool) -> None:
        if output.param not in self.sums:
            super()._store(output, column, values, edge)
            return
        partial, item = self.partial_sums[output.param], self.sums[output.param]
        for lane, value in enumerate(values):
            place = self.slot + lane
            total = COMBINE[item.kind](partial[place], convert(value, self._dtype(item)))
            T.buffer_store(partial, total, [place])

    def _store_sums(self, first: Expr) -> None:
        """Registers -> one row of each accumulation."""
        self.scope.forget()
        self.enter_row(first, partial=False)
        for param, item in self.sums.items():
            output = Output(param, item.body, item.offset, item.dtype, True, item.phase)
            piece = piece_bytes(item.offset, item.dtype, self.config.width, self.analyzer)

            def store(chunk, item=item, output=output, piece=piece) -> None:
                partial = self.partial_sums[output.param]
                values = [partial[chunk.slot + lane] for lane in range(self.config.width)]
                if item.initial is not None:
                    values = [COMBINE[item.kind](v, item.initial) for v in values]
                store_vector(self.scope, output, self.column(chunk), values, piece, "wb")

            self.each_chunk(store)


def _ranked(program: Program, hw: HardwareProfile, policy: Policy) -> forms.Ranked:
    return [(None, config) for config in mixed_configs(program, hw)]


WRITER = forms.Writer(
    "reductions of rows and of columns",
    analyze,
    (
        forms.Form(
            "mixed", RowConfig, _ranked, lambda program, hw, config: emit_mixed(program, config, hw)
        ),
    ),
)
