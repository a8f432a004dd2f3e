"""What the emitters of loop nests, with and without reductions, have in common."""

from __future__ import annotations

from .machine import Machine
from .nests import Nest
from .point import PointWriter
from .scope import Scope
from .space import Space


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
