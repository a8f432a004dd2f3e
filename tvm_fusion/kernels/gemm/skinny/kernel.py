"""Matrix products with few rows: the weights are streamed once, at the speed of the memory.

A block computes all rows of a few columns. Its warps share the sum; each keeps several 16-byte
loads of weights in flight and multiplies in float32 or on tensor cores. The sums meet in shared
memory in a fixed order. Operands may be computed: the expression of quantised weights is evaluated
for the elements of the words that a thread has loaded.

    kernel      who sums what, weights on their way through shared memory, where the sums meet
    fma, mma    the sums of a warp: in float32, on tensor cores      sums    what they share
    values      an operand at a block of points: loads in wide copies (`fetch`), factors outside of
                the sum, its expression at each point
    bits        small integers as fields of words, and what the device does to them
    halves      pairs of half-precision numbers made of them
    config      configurations              rank    those worth ranking, and their times
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ....config import HardwareProfile
from ....errors import Unsupported
from ...contraction.reader import Contraction, Product, Segment
from ...gpu.ahead import before_wait, reads_ahead
from ...gpu.intrinsics import device_call
from ...gpu.math_functions import product_of
from ...gpu.memory import WIDEST, copy_registers
from ...gpu.product_frame import Frame, coordinates, evaluate, open_kernel
from ...program.expr import bytes_of, constant, convert
from .config import STATIC_SMEM, WARP, SkinnyConfig, check_problem, paired
from .fetch import Env, Fetch
from .fma import FmaSum, Position, Step
from .mma import MmaSum
from .rank import skinny_ranked
from .values import Loaded, Values

# Weights on their way through shared memory: every thread has a ring of places of its own.
#
# A load into registers is issued when ptxas finds registers for it, which is late: four in flight
# at
# most, whatever the unrolling. An asynchronous copy needs none. Each thread waits for its own
# copies
# and reads its own places, so that no barrier is needed.

WORDS = WIDEST // 4


def _copy(target: Expr, source: Expr) -> Expr:
    body = (
        'asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" '
        ':: "r"((unsigned)__cvta_generic_to_shared(d)), "l"(s) : "memory");'
    )
    return device_call("void", "ring_copy", "void* d, const void* s", body, target, source)


def _commit() -> Expr:
    body = 'asm volatile("cp.async.commit_group;" ::: "memory");'
    return device_call("void", "ring_commit", "", body)


def _wait(newer: int) -> Expr:
    body = f'asm volatile("cp.async.wait_group {newer};" ::: "memory");'
    return device_call("void", f"ring_wait{newer}", "", body)


@dataclass(frozen=True, slots=True, eq=False)
class Ring:
    """`stages` steps of `slots` places of 16 bytes for each thread of a block."""

    memory: Expr
    thread: Expr
    threads: int
    slots: int
    stages: int

    def _place(self, stage: Expr | int, slot: int) -> Expr:
        at = (stage * self.slots + slot) * self.threads + self.thread
        return self.memory.ptr_to([at * WORDS])

    def fill(
        self, stage: Expr | int, first: int, values: Values, fetches: Sequence[Fetch], env: Env
    ) -> int:
        """Starts the copies of some fetches; the number of the next slot."""
        slot = first
        for fetch in fetches:
            buffer, each = values.frame.buffers[fetch.source], WIDEST // bytes_of(fetch.dtype)
            for copy in fetch.copies:
                place = values.frame.place(copy.indices, env)
                for i in range(0, copy.elements, each):
                    source = buffer.ptr_to([*place[:-1], place[-1] + i])
                    T.evaluate(_copy(self._place(stage, slot), source))
                    slot += 1
        return slot

    def commit(self) -> None:
        """Ends a step's copies."""
        T.evaluate(_commit())

    def wait(self) -> None:
        """Waits for the oldest step of a full ring."""
        T.evaluate(_wait(self.stages - 1))

    def take(self, stage: Expr, first: int, fetches: Sequence[Fetch]) -> tuple[Loaded, int]:
        """Register arrays of some fetches; the number of the next slot."""
        slot, loaded = first, {}
        for fetch in fetches:
            size = bytes_of(fetch.dtype)
            array = T.alloc_local((fetch.elements,), fetch.dtype)
            for copy in fetch.copies:
                for i in range(0, copy.elements, WIDEST // size):
                    place = self._place(stage, slot)
                    target = array.ptr_to([copy.slot + i])
                    copy_registers(lambda _, t=target: t, lambda _, p=place: p, WIDEST)
                    slot += 1
            loaded[fetch] = array
        return loaded, slot


def ring_slots(part) -> int:
    """16-byte accesses of a thread in one step of its sums."""
    return part.runs * sum(
        copy.elements * bytes_of(fetch.dtype) // WIDEST
        for values in part.factors.b
        for fetch in values.fetches(True)
        for copy in fetch.copies
    )


def emit_gemm_skinny(
    contraction: Contraction, hw: HardwareProfile, config: SkinnyConfig | None = None
) -> tirx.PrimFunc:
    """Write a contraction with few rows as one TIRx kernel.

    Parameters
    ----------
    contraction : Contraction
        Static, at most 16 rows, any batch. Operands and epilogues may be any expressions.
    hw : HardwareProfile
        A CUDA device of compute capability 8.0 or later.
    config : SkinnyConfig, optional
        One of `skinny_ranked`; the first where None.

    Returns
    -------
    func : tirx.PrimFunc
        With the parameters of the PrimFunc that the contraction was read from.

    Raises
    ------
    Unsupported
        For another contraction, or a configuration that its sizes do not allow.
    """
    check_problem(contraction, hw)
    if config is None:
        config = skinny_ranked(contraction, hw)[0][1]
    contraction = paired(contraction)
    config.check(contraction, hw)
    with open_kernel(contraction) as frame:
        if frame.index != "int32":
            raise Unsupported("parameters that 32-bit indices do not reach")
        _Kernel(frame, config, hw).emit()
    return frame.func


class _Kernel:
    """One kernel: blocks over batch, segments and column tiles."""

    def __init__(self, frame: Frame, config: SkinnyConfig, hw: HardwareProfile):
        self.frame, self.config = frame, config
        self.contraction = c = frame.contraction
        # of a batch the right operands are hardly ever weights
        self.reads_ahead = reads_ahead(hw) and c.batch == 1
        self.tiles = [-(-s.N // config.block_n) for s in c.segments]
        self.most = max(len(s.products) for s in c.segments)
        self.dtype = c.products[0].dtype
        kind = MmaSum if config.tensor else FmaSum
        self.parts = [kind(frame, segment, c.M, config) for segment in c.segments]

    def emit(self) -> None:
        config, contraction = self.config, self.contraction
        per_batch = sum(self.tiles)
        T.device_entry()
        block = T.cta_id([per_batch * contraction.batch])
        self.thread = T.thread_id([config.threads])
        shape = (self.most * config.warps_k * contraction.M * config.block_n,)
        self.partials = T.alloc_shared(shape, self.dtype)
        self.ring = None
        if config.stages:
            slots = max(ring_slots(part) for part in self.parts)
            size = config.ring_bytes(slots)
            if size + config.smem_bytes(contraction) > STATIC_SMEM:
                raise Unsupported("the ring of weights does not fit into static shared memory")
            self.ring = T.alloc_shared((max(size // 4, 1),), "uint32")
        batch, tile = constant(0, "int32"), block
        if contraction.batch > 1:
            batch, tile = T.Bind(block // per_batch), T.Bind(block % per_batch)
        self._branch(batch, tile, 0)

    def _branch(self, batch: Expr, tile: Expr, number: int) -> None:
        """Each segment where the tile is its own."""
        tiles = self.tiles[number]
        if number == len(self.tiles) - 1:
            self._segment(number, batch, tile)
            return
        with T.If(tile < tiles):
            with T.Then():
                self._segment(number, batch, tile)
            with T.Else():
                self._branch(batch, tile - tiles, number + 1)

    def _segment(self, number: int, batch: Expr, tile: Expr) -> None:
        config, part = self.config, self.parts[number]
        segment = part.segment
        lane, warp = T.Bind(self.thread % WARP), T.Bind(self.thread // WARP)
        share, across = warp, constant(0, "int32")
        if config.warps_n > 1:
            share, across = T.Bind(warp // config.warps_n), T.Bind(warp % config.warps_n)
        axes = coordinates(segment.batch, batch, self.frame)
        position = Position(axes, T.Bind(tile), share, across, lane)
        self._sum(part, position)
        self._publish(part, position)
        self._write(part, segment, position)

    def _sum(self, part: FmaSum | MmaSum, position: Position) -> None:
        """The warp's share of the terms: whole rounds of all warps, then what is left."""
        start = part.start(position)
        part.columns()
        stride = self.config.warps_k * part.along_k
        full, rest = divmod(part.chunks, stride)
        if self.config.stages and full:
            self._through_ring(part, start, stride, full)
        else:
            self._through_registers(part, start, stride, full)
        if rest:
            chunk = T.Bind(start + full * stride)
            with T.If(chunk < part.chunks), T.Then():
                self._together(part, [chunk])

    def _together(self, part: FmaSum | MmaSum, chunks: list[Expr], ahead: bool = False) -> None:
        """Some blocks of terms, the loads of all of them first; weights `ahead` of the wait for
        kernels in front.
        """
        steps = [Step(chunk, {}, {}) for chunk in chunks]
        for step in steps:
            for key, values, unit in part.weights_of():
                env = part.env(values, step.chunk, unit)
                step.b[key] = values.load(env, hint="ahead" if ahead else None)
        if ahead:
            loaded = (fetches for step in steps for fetches in step.b.values())
            self.frame.read_ahead |= {fetch.source for fetches in loaded for fetch in fetches}
            before_wait()
        for step in steps:
            part.load_rows(step)
        for step in steps:
            part.multiply(step)

    def _through_registers(self, part, start: Expr, stride: int, full: int) -> None:
        """`unroll` blocks of terms at a time; a warp's lie side by side."""
        ahead = max(1, min(self.config.unroll, full))
        rounds, left = divmod(full, ahead)

        def chunks(first: Expr | int, count: int) -> list[Expr]:
            if count == ahead and part.along_k == 1:
                base = T.Bind((start + first * stride) * ahead)
                return [T.Bind(base + u) for u in range(ahead)]
            return [T.Bind(start + (first * ahead + u) * stride) for u in range(count)]

        first = int(rounds > 0 and self.reads_ahead)
        if first:
            self._together(part, chunks(0, ahead), ahead=True)
        if rounds - first == 1:
            self._together(part, chunks(first, ahead))
        elif rounds - first > 1:
            with T.serial(0, rounds - first, unroll=False) as i:
                self._together(part, chunks(i + first if first else i, ahead))
        if left:
            self._together(part, chunks(rounds, left))

    def _through_ring(self, part, start: Expr, stride: int, full: int) -> None:
        """`stages` blocks of terms on their way at any time."""
        config = self.config
        ring = Ring(self.ring, self.thread, config.threads, ring_slots(part), config.stages)

        def fill(number: Expr | int, stage: Expr | int) -> None:
            chunk, slot = T.Bind(start + number * stride), 0
            for _, values, unit in part.weights_of():
                env = part.env(values, chunk, unit)
                slot = ring.fill(stage, slot, values, values.fetches(True), env)

        for number in range(config.stages):
            if number < full:
                fill(number, number)
            ring.commit()
        with T.serial(0, full, unroll=False) as i:
            step, slot = Step(T.Bind(start + i * stride), {}, {}), 0
            stage = T.Bind(i % config.stages)
            part.load_rows(step)
            for key, values, unit in part.weights_of():
                step.b[key] = values.load(part.env(values, step.chunk, unit), False)
            ring.wait()
            for key, values, _ in part.weights_of():
                found, slot = ring.take(stage, slot, values.fetches(True))
                step.b[key] |= found
            part.multiply(step)
            if full > config.stages:
                with T.If(i + config.stages < full), T.Then():
                    fill(i + config.stages, stage)
            ring.commit()

    # ---- partial sums: [product, share, row, column]

    def _place(self, product: int, share: Expr | int, element: Expr) -> Expr:
        per_share = self.contraction.M * self.config.block_n
        return (product * self.config.warps_k + share) * per_share + element

    def _publish(self, part: FmaSum | MmaSum, position: Position) -> None:

        def put(product: int, row: Expr | int, column: Expr, value: Expr) -> None:
            element = row * self.config.block_n + column
            at = self._place(product, position.share, element)
            T.buffer_store(self.partials, value, [at])

        part.finish(put)
        T.evaluate(T.cuda.cta_sync())

    # ---- outputs

    def _write(self, part: FmaSum | MmaSum, segment: Segment, position: Position) -> None:
        """Each thread finishes some elements of the tile."""
        config = self.config
        elements = self.contraction.M * config.block_n
        for first in range(0, elements, config.threads):
            element = T.Bind(self.thread + first)
            conditions = [] if first + config.threads <= elements else [element < elements]
            row, column = T.Bind(element // config.block_n), T.Bind(element % config.block_n)
            n = T.Bind(position.tile * config.block_n + column)
            if segment.N % config.block_n:
                conditions.append(n < segment.N)
            if not conditions:
                self._element(part, segment, position, element, row, n)
                continue
            condition = conditions[0]
            for other in conditions[1:]:
                condition = tirx.And(condition, other)
            with T.If(condition), T.Then():
                self._element(part, segment, position, element, row, n)

    def _element(self, part, segment: Segment, position: Position, element, row, n) -> None:
        env = self._point(segment, position, row, n)
        for number, product in enumerate(segment.products):
            env[product.accumulator] = self._total(part, number, product, element, env)
        partners = segment.partners
        if partners is not None:
            half = T.Bind(n // partners.distance % 2)
            env[partners.part] = half
            step = T.Bind((1 - 2 * half) * partners.distance)
            there = self._point(segment, position, row, n + step)
            for number, (product, other) in enumerate(
                zip(segment.products, partners.vars, strict=True)
            ):
                if other is not None:
                    env[other] = self._total(part, number, product, element + step, there)
        half = all(bytes_of(output.dtype) == 2 for output in segment.outputs)
        values = [output.value for output in segment.outputs]
        for output, value in zip(
            segment.outputs, evaluate(self.frame, segment.bindings, values, env, half), strict=True
        ):
            target = self.frame.output(output.param)
            at = self.frame.place(output.indices, env)
            T.buffer_store(target, convert(value, output.dtype), at)

    def _point(self, segment: Segment, position: Position, row: Expr, n: Expr) -> dict[Var, Expr]:
        """The axes of an element of the outputs."""
        return {
            **position.batch,
            **coordinates(segment.m, row, self.frame),
            **coordinates(segment.n, n, self.frame),
        }

    def _total(
        self, part, number: int, product: Product, element: Expr, env: Mapping[Var, Expr]
    ) -> Expr:
        """The whole sum of an element of a product."""
        total = None
        for share in range(self.config.warps_k):
            value = self.partials[self._place(number, share, element)]
            total = value if total is None else total + value
        factors = [*part.factors.a[number].outer, *part.factors.b[number].outer]
        if factors:
            zero = {axis.var: constant(0, self.frame.index) for axis in product.k}
            total = total * self.frame.rewrite(product_of(factors), {**env, **zero})
        return T.Bind(convert(total, product.dtype))
