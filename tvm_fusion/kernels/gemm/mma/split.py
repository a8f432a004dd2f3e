"""Products of float32 on tensor cores that keep its precision: six of bfloat16 for each.

    a = a1 + a2 + a3,  b = b1 + b2 + b3                 (8 bits of mantissa each: 24 in all)
    a b = a1 b1 + a1 b2 + a2 b1 + a2 b2 + a1 b3 + a3 b1 (less than 2^-21.9 of it is lost)

The parts of a number are exact, and those of 0, 1 and other powers of two are the number and zeros:
a product with such (one-hot rows, permutations, scales) moves numbers as they are. Two parts of
tfloat32 take as long on tensor cores (three products at half the rate) and fewer instructions in
front of them, but hold 22 bits, 23 if rounded to the nearest: a number would change in its last
one. (Henry, Tang and Heinecke, Leveraging the bfloat16 artificial intelligence datatype for
higher-precision computations, 2019.)

Tensor cores cut sums off where they add, which of a long sum leaves less than float32 would: they
add the products of 16 terms (wgmma: 32), and the sums of these are rounded to the nearest outside.
(Ootomo and Yokota, Recovering single precision accuracy from Tensor Cores, 2022.)
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.ir import Expr
from tvm.script import tirx as T

from ...gpu.memory import copy_registers
from ...program.expr import constant
from .operand import Loader, always, store_chunk
from .plan import TERM_BYTES, MmaConfig, WarpTiles
from .units import CHUNK, at_least, multiply, shared_word, split_float32

SUMS, A_REGISTERS, B_REGISTERS = 4, 4, 2
"""Registers of a thread: of the sums of one mma.sync, of its operands."""

PARTS = 3
SMALL_PRODUCTS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1))
"""Parts of a and b that are multiplied before the first ones are, the smallest products first."""
FIRST_PRODUCT = ((0, 0),)

PRODUCTS = len(SMALL_PRODUCTS) + len(FIRST_PRODUCT)
PART_DTYPE = "bfloat16"

LEAST_REST = -(2.0**126)
"""Below any sum of 16 terms' smaller products, each less than 2^-6 of a term that is finite. What
takes the place of NaN is no less, so that finite terms that are added to it stay finite, too, up
to three quarters of the largest float32."""


class SplitProducts:
    """The registers in which the fragments of two rounds are split, and what is multiplied.

    A register of mma.sync holds a term of float32, or two of a half precision: terms t and t + 4
    of 8 are taken for neighbours, on both sides, and two rounds of 8 for one of 16.
    """

    def __init__(self, tiles: WarpTiles):
        self.tiles = tiles
        rows = tiles.tiles_m * A_REGISTERS
        self.a = [T.alloc_local((rows,), "uint32") for _ in range(PARTS)]
        self.b = [T.alloc_local((B_REGISTERS,), "uint32") for _ in range(PARTS)]
        self.part = T.alloc_local((tiles.tiles_m * SUMS,), "float32")

    def take(self, a: Expr) -> None:
        """Splits the left operand's fragments."""
        rows = self.tiles.tiles_m * A_REGISTERS
        with T.serial(self.tiles.tiles_m, unroll=True) as tile:
            for half in range(2):
                for row in range(2):
                    first = half * rows + tile * A_REGISTERS + row
                    at = tile * A_REGISTERS + half * 2 + row
                    _split(self.a, at, a[first], a[first + 2])

    def multiply(self, b: Expr, sums: Expr, column: int) -> None:
        """Adds the products of all rows by 8 columns, the smaller ones first."""
        for half in range(2):
            first = (half * self.tiles.tiles_n + column) * B_REGISTERS
            _split(self.b, half, b[first], b[first + 1])
        count = self.tiles.tiles_m * SUMS
        with T.serial(count, unroll=True) as i:
            T.buffer_store(self.part, constant(0.0, "float32"), [i])
        self._add(SMALL_PRODUCTS)
        with T.serial(count, unroll=True) as i:
            # NaN where a term is infinite: the product of the first parts is that or NaN by itself.
            finite = at_least(self.part[i], constant(LEAST_REST, "float32"))
            T.buffer_store(self.part, finite, [i])
        self._add(FIRST_PRODUCT)
        with T.serial(self.tiles.tiles_m, unroll=True) as i, T.serial(SUMS, unroll=True) as v:
            at = (i * self.tiles.tiles_n + column) * SUMS + v
            T.buffer_store(sums, sums[at] + self.part[i * SUMS + v], [at])

    def _add(self, products: Sequence[tuple[int, int]]) -> None:
        right = [part.ptr_to([0]) for part in self.b]
        for product in products:
            with T.serial(self.tiles.tiles_m, unroll=True) as i:
                left = [part.ptr_to([i * A_REGISTERS]) for part in self.a]
                multiply_parts(self.part.ptr_to([i * SUMS]), left, right, [product])


GROUP_WARPS, GROUP_ROWS = 4, 64
"""Warps of a warpgroup, and rows of its wgmma: 16 of each warp, as those of mma.sync."""

GROUP_STEP_BYTES = 128
"""Bytes of a row of float32 in a step."""

LINE, SWIZZLE_64B = GROUP_STEP_BYTES // 2, 2
"""Bytes of a row of a part, in which chunks change places by the number of the pair of rows."""

GROUP_TERMS, CHUNK_TERMS = 16, CHUNK // 2
"""Terms of a wgmma, and of a chunk of a part."""

PART_BUFFERS = 2

GROUP_STEPS = 32
"""Steps whose smaller products, 2^-7 of the others, are added up by wgmma: what it cuts off behind
24 bits of a sum, for each of 10 products of 16 terms in a step, is less than 2^-22 of the others.
"""

LOWEST = -3.4028234663852886e38
"""The least finite float32, which takes the place of NaN where the sum is infinite or NaN."""


def part_bytes(config: MmaConfig, columns: int) -> int:
    """Shared memory of the parts of two steps of a loop with `columns` B operands."""
    return PART_BUFFERS * PARTS * (config.block_m + columns * config.block_n) * LINE


class GroupProducts:
    """The block splits a step's operands in shared memory, while its warpgroups multiply the parts
    of the step before: each element is split once, whichever warps read it. `part` are sums of the
    first parts' products in a step, `rest` those of the smaller ones in `GROUP_STEPS`.
    """

    def __init__(self, loaders: Sequence[Loader], config: MmaConfig, memory: Expr, thread: Expr):
        self.loaders, self.config, self.memory, self.thread = loaders, config, memory, thread
        self.starts, at = [], 0
        for loader in loaders:
            self.starts.append(at)
            at += PARTS * loader.panel.rows * LINE
        self.size = at
        count = config.tiles_n * SUMS
        self.part = [T.alloc_local((count,), "float32") for _ in loaders[1:]]
        self.rest = [T.alloc_local((count,), "float32") for _ in loaders[1:]]
        self.words = T.alloc_local((2 * CHUNK // 4,), "uint32")
        self.chunks = [T.alloc_local((CHUNK // 4,), "uint32") for _ in range(PARTS)]
        self.descriptors = []
        for loader, start in zip(loaders, self.starts, strict=True):
            own = thread // 128 * (GROUP_ROWS * LINE) if loader.source.side == "m" else 0
            found = T.alloc_local((1,), "uint64")
            place = memory.ptr_to([start + own])
            stride = 8 * LINE // CHUNK
            T.evaluate(
                T.cuda.wgmma.encode_matrix_descriptor(
                    found.ptr_to([0]), place, 1, stride, SWIZZLE_64B
                )
            )
            self.descriptors.append(found)

    def split(self, number: int, stage: Expr, buffer: Expr) -> None:
        """Splits an operand's slice; neighbouring threads take rows below each other."""
        loader, threads = self.loaders[number], self.config.threads
        rows = loader.panel.rows
        units = rows * (LINE // CHUNK)
        with T.serial(0, -(-units // threads), unroll=True) as i:
            unit = T.Bind(i * threads + self.thread)
            row, chunk = T.Bind(unit % rows), T.Bind(unit // rows)
            exists = unit < units if units % threads else None
            with T.If(always(exists)), T.Then():
                self._load(loader, stage, row, chunk)
                for pair in range(CHUNK // 4):
                    _split(self.chunks, pair, self.words[2 * pair], self.words[2 * pair + 1])
                turned = T.bitwise_xor(chunk, row // 2 % (LINE // CHUNK))
                at = T.Bind(
                    row * LINE + turned * CHUNK + (buffer * self.size + self.starts[number])
                )
                for part in range(PARTS):
                    place = self.memory.ptr_to([at + part * rows * LINE])
                    store_chunk(place, self.chunks[part].ptr_to([0]))

    def _load(self, loader: Loader, stage: Expr, row: Expr, chunk: Expr) -> None:
        """Reads the terms of a chunk of a row."""
        panel = loader.panel
        if panel.k_major:
            for half in range(2):
                place = loader.place.at(stage, panel.place(row, chunk * 2 + half))
                words = self.words.ptr_to([half * (CHUNK // 4)])
                copy_registers(lambda _, words=words: words, lambda _, place=place: place, CHUNK)
            return
        for term in range(CHUNK_TERMS):
            line = chunk * CHUNK_TERMS + term
            at = panel.place(line, row * panel.element // CHUNK) + row * panel.element % CHUNK
            T.buffer_store(self.words, shared_word(loader.place.at(stage, at)), [term])

    def begin(self, buffer: Expr, more: Expr) -> None:
        """Starts the products of what was split, those of the first parts before the smaller ones,
        which are added to those of the steps before if there are `more`.
        """
        T.evaluate(T.ptx.wgmma.fence.sync.aligned())
        self._issue(self.part, buffer, FIRST_PRODUCT, False)
        self._issue(self.rest, buffer, SMALL_PRODUCTS, more)

    def wait_for_step_before(self) -> None:
        """Waits for the products of the step before the one that was begun."""
        T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(2))

    def add(self, sums: Sequence[Expr]) -> None:
        """Waits for the products of the first parts, and adds them to the sums."""
        T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(1))
        for part, total in zip(self.part, sums, strict=True):
            with T.serial(part.shape[0], unroll=True) as i:
                T.buffer_store(total, total[i] + part[i], [i])

    def finish(self, sums: Sequence[Expr]) -> None:
        """Waits for the smaller products, and adds them to the sums."""
        T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
        for rest, total in zip(self.rest, sums, strict=True):
            with T.serial(rest.shape[0], unroll=True) as i:
                # NaN where a term is infinite: the sum is that or NaN by then.
                finite = at_least(rest[i], constant(LOWEST, "float32"))
                T.buffer_store(total, total[i] + finite, [i])

    def _issue(
        self,
        parts: Sequence[Expr],
        buffer: Expr,
        products: Sequence[tuple[int, int]],
        more: Expr | bool,
    ) -> None:
        name = f"wgmma.mma_async.sync.aligned.m64n{self.config.block_n}k{GROUP_TERMS}.f32.bf16.bf16"
        behind = T.Bind(T.cast(buffer * (self.size // CHUNK), "uint64"))
        for number, part in enumerate(parts, 1):
            sums = [part[i] for i in range(self.config.tiles_n * SUMS)]
            later = more
            for product in products:
                for terms in range(LINE // (2 * GROUP_TERMS)):
                    places = [
                        self.descriptors[n][0] + behind + T.uint64(self._place(n, half, terms))
                        for n, half in zip((0, number), product, strict=True)
                    ]
                    T.evaluate(T.ptx[name](*sums, *places, T.ptx.pred(later), 1, 1, 0, 0))
                    later = True
        T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())

    def _place(self, number: int, part: int, terms: int) -> int:
        """Distance of terms of a part from an operand's first ones, in units of 16 bytes."""
        rows = self.loaders[number].panel.rows
        return (part * rows * LINE + terms * 2 * GROUP_TERMS) // CHUNK


def multiply_parts(
    sums: Expr, a: Sequence[Expr], b: Sequence[Expr], products: Sequence[tuple[int, int]]
) -> None:
    """Adds some products of parts of fragments of 16 terms, by pointers to their registers."""
    for left, right in products:
        T.evaluate(multiply(PART_DTYPE, PART_DTYPE, TERM_BYTES // 2, sums, a[left], b[right]))


def _split(parts: list[Expr], at: Expr | int, first: Expr, second: Expr) -> None:
    places = [part.ptr_to([at]) for part in parts]
    T.evaluate(split_float32(places, first, second))
