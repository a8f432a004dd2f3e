"""A set of operators seen as one kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TypeVar

from ..ir.access import Access, Block, Extent
from ..ir.extents import assumed_product
from ..ir.graph import FusionGraph, OpKind
from .refusal import Refusal, RefusalCode

Found = TypeVar("Found")

_BYTES = {"bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}


@cache
def dtype_bytes(dtype: str) -> int:
    """Bytes an element of a TVM dtype takes in memory (sub-byte dtypes count as one)."""
    if dtype in _BYTES:
        return _BYTES[dtype]
    digits = "".join(c for c in dtype.split("_")[0] if c.isdigit())
    return max(1, int(digits or 8) // 8)


@lru_cache(maxsize=4096)
def _bytes(shape: tuple[Extent, ...], dtype: str) -> int:
    return assumed_product(shape) * dtype_bytes(dtype)


@dataclass(frozen=True)
class GroupView:
    """A set of operators seen as one kernel: what it reads, what it must write, and its blocks in
    order.

    `outputs` are the tensors somebody reads outside; `duplicated` is the bitset of members that
    belong to another group and are only recomputed here.
    """

    graph: FusionGraph
    ops: tuple[int, ...]
    outputs: tuple[int, ...]
    duplicated: int = 0

    @cached_property
    def memo(self) -> dict:
        """What `once` has found out."""
        return {}

    def once(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """What a kernel class finds out about the group and asks for again, found when first asked
        for: nobody has to have asked the class anything before.
        """
        if key not in self.memo:
            self.memo[key] = find()
        return self.memo[key]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.graph.ops[i].name for i in self.ops)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(b for i in self.ops for b in self.graph.ops[i].blocks)

    @cached_property
    def produced(self) -> frozenset[int]:
        return frozenset(t for i in self.ops for t in self.graph.ops[i].outputs)

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Tensors read from memory, each once."""
        read = (t for i in self.ops for t in self.graph.ops[i].inputs)
        return tuple(t for t in dict.fromkeys(read) if t not in self.produced)

    @cached_property
    def writer_of(self) -> dict[int, Block]:
        return {w.tensor: b for b in self.blocks for w in b.writes}

    @cached_property
    def readers_of(self) -> dict[int, tuple[tuple[Block, Access], ...]]:
        found: dict[int, list] = {}
        for b in self.blocks:
            for a in b.reads:
                found.setdefault(a.tensor, []).append((b, a))
        return {t: tuple(r) for t, r in found.items()}

    @cached_property
    def views(self) -> frozenset[int]:
        """The blocks of reshapes, by `id`."""
        ops = (self.graph.ops[i] for i in self.ops)
        return frozenset(id(b) for op in ops if op.kind is OpKind.VIEW for b in op.blocks)

    @cached_property
    def reshapes(self) -> frozenset[int]:
        """The same and reshapes that are results of the function, which are copies if alone."""
        ops = (self.graph.ops[i] for i in self.ops)
        return frozenset(id(b) for op in ops if op.reshapes for b in op.blocks)

    @property
    def is_view(self) -> bool:
        """Nothing but one reshape: no kernel at all."""
        return len(self.ops) == 1 and self.graph.ops[self.ops[0]].kind is OpKind.VIEW

    def tensor_bytes(self, tensor: int) -> int:
        t = self.graph.tensors[tensor]
        return _bytes(t.shape, t.dtype)

    def refuse(
        self, code: RefusalCode, why: str, action: str | None = None, **numbers: float
    ) -> Refusal:
        """A refusal of this group; `action` is the one thing that would turn it (`Refusal`)."""
        return Refusal(code, self.names, why, tuple(sorted(numbers.items())), action)
