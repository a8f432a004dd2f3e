"""What the emitters of loop nests, with and without reductions, have in common."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr

from ...program.expr import number
from ..machine import Machine
from .nests import Nest
from .point import PointWriter
from .scope import Scope
from .space import Space

# Vectors of fewer elements gain nothing over one element after the other.
LEAST_PIECE = 4


class NestEmitter:
    """Emits one nest; how is up to the class derived from it."""

    def __init__(
        self, item: Nest, space: Space, writer: PointWriter, scope: Scope, machine: Machine
    ) -> None:
        self.nest = item
        self.space = space
        self.writer = writer
        self.scope = scope
        self.loops = scope.loops
        self.machine = machine

    def pieces(self, rest: Expr, lanes: int) -> list[tuple[Expr, Expr, Expr | int]]:
        """What whole blocks leave of an axis, as vectors: how many, where they start, how wide.

        LLVM takes vectors apart whose width is no power of two: 39 elements are 32, 4 and 3.
        """
        size = number(rest)
        if size is None:
            count = self.loops.simplify(tirx.FloorDiv(rest, self.loops.imm(lanes)))
            done = self.loops.simplify(count * self.loops.imm(lanes))
            last = self.loops.simplify(rest - done)
            return [(count, self.loops.imm(0), lanes), (self.loops.imm(1), done, last)]
        found: list[tuple[Expr, Expr, Expr | int]] = []
        at = 0
        while at < size:
            left = int(size) - at
            width = left if left < LEAST_PIECE else 1 << (left.bit_length() - 1)
            found.append((self.loops.imm(1), self.loops.imm(at), width))
            at += width
        return found
