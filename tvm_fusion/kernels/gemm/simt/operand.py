"""A slice of an operand on its way: global memory -> registers -> shared memory[k, row]."""

from __future__ import annotations

from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...contraction.reader import Operand, Product, Segment, size_of
from ...gpu.access import AffineAccess, affine_access
from ...gpu.product_frame import Frame, coordinates
from ...gpu.product_math import evaluate
from ...program.expr import bytes_of, conjunction, constant, convert, dtype_of

VECTOR_BYTES = 16


class Slice:
    """What the threads of a block load of A (`side` "m") or B ("n") for one step.

    Neighbouring threads read along the axis that is contiguous in memory, in vectors where every
    access is aligned; an operand that is no plain load is evaluated element by element.
    """

    def __init__(
        self,
        frame: Frame,
        segment: Segment,
        product: Product,
        side: str,
        operand: Operand,
        width: int,
        depth: int,
        threads: int,
        shared: Expr,
    ):
        self.frame, self.operand, self.shared = frame, operand, shared
        self.product, self.segment = product, segment
        self.axes = segment.m if side == "m" else segment.n
        self.side, self.width, self.depth, self.threads = side, width, depth, threads
        self.access = self._affine()
        self.along_k = self.access is not None and self.access.contiguous("k")
        self.vector = self._vector()
        self.count = -(-width * depth // (threads * self.vector))

    def _affine(self) -> AffineAccess | None:
        load = self.operand.load
        if load is None:
            return None
        shape = [int(n) if isinstance(n, int) else n for n in self._shape(load.source)]
        groups = {"batch": self.segment.batch, self.side: self.axes, "k": self.product.k}
        return affine_access(load.indices, shape, groups)

    def _shape(self, source: Var):
        return next(p.shape for p in self.frame.contraction.params if p.var.same_as(source))

    def _vector(self) -> int:
        """Elements a thread loads at once."""
        along = "k" if self.along_k else self.side
        if self.access is None or not self.access.contiguous(along):
            return 1
        vector = VECTOR_BYTES // bytes_of(dtype_of(self.operand.load))
        run = self.depth if self.along_k else self.width
        while vector > 1 and (
            run % vector
            or self.width * self.depth % (self.threads * vector)
            or not self.access.aligned(vector, along)
        ):
            vector //= 2
        return max(vector, 1)

    def prepare(self, tile, thread: Expr) -> None:
        """Where in the slice this thread's elements lie, and the row each belongs to."""
        dtype = dtype_of(self.operand.load) if self.vector > 1 else dtype_of(self.operand.value)
        self.registers = T.alloc_local((self.count * self.vector,), dtype)
        self.batch = coordinates(self.segment.batch, tile.batch, self.frame)
        first = (tile.m if self.side == "m" else tile.n) * self.width
        fast = (self.depth if self.along_k else self.width) // self.vector
        self.places = []
        for i in range(self.count):
            element = thread + i * self.threads
            outer, inner = T.Bind(element // fast), T.Bind(element % fast * self.vector)
            row, k = (outer, inner) if self.along_k else (inner, outer)
            flat = T.Bind(convert(first + row, self.frame.index))
            self.places.append((row, k, flat))

    def load(self, step: Expr) -> None:
        """Global memory -> registers; what lies outside the operand is 0."""
        for i, (row, k, flat) in enumerate(self.places):
            term = T.Bind(convert(step * self.depth + k, self.frame.index))
            inside = self._inside(row, k, flat, term)
            if inside is None:
                self._read(i, flat, term)
                continue
            with T.If(inside):
                with T.Then():
                    self._read(i, flat, term)
                with T.Else():
                    zero = constant(0, dtype_of(self.registers[0]))
                    for v in range(self.vector):
                        T.buffer_store(self.registers, zero, [i * self.vector + v])

    def _inside(self, row: Expr, k: Expr, flat: Expr, term: Expr) -> Expr | None:
        """Condition under which an element exists; None where all do."""
        rows, terms = size_of(self.axes), self.product.K
        conditions = []
        if not (isinstance(rows, int) and rows % self.width == 0):
            conditions.append(flat < self.frame.size(rows))
        if not (isinstance(terms, int) and terms % self.depth == 0):
            conditions.append(term < self.frame.size(terms))
        if self.width * self.depth % (self.threads * self.vector):
            edge = row if self.along_k else k
            conditions.append(edge < (self.width if self.along_k else self.depth))
        return conjunction(*conditions)

    def _read(self, i: int, flat: Expr, term: Expr) -> None:
        env = self.batch | coordinates(self.axes, flat, self.frame)
        env |= coordinates(self.product.k, term, self.frame)
        if self.vector == 1:
            operand = self.operand
            (value,) = evaluate(self.frame, operand.bindings, [operand.value], env, False)
            T.buffer_store(self.registers, value, [i])
            return
        load = self.operand.load
        *lead, last = self.frame.place(load.indices, env)
        source = self.frame.buffers[load.source]
        with T.vectorized(self.vector) as v:
            T.buffer_store(self.registers, source[(*lead, last + v)], [i * self.vector + v])

    def store(self, turn: Expr) -> None:
        """Registers -> shared memory buffer number `turn`, widened."""
        dtype = dtype_of(self.operand.value)
        partial = self.width * self.depth % (self.threads * self.vector) != 0
        for i, (row, k, _) in enumerate(self.places):
            if not partial:
                self._put(i, turn, row, k, dtype)
                continue
            edge = row if self.along_k else k
            with T.If(edge < (self.width if self.along_k else self.depth)), T.Then():
                self._put(i, turn, row, k, dtype)

    def _put(self, i: int, turn: Expr, row: Expr, k: Expr, dtype: str) -> None:
        for v in range(self.vector):
            value = convert(self.registers[i * self.vector + v], dtype)
            at = [turn, k + v, row] if self.along_k else [turn, k, row + v]
            T.buffer_store(self.shared, value, at)
