"""Weights on their way through shared memory: every thread has a ring of places of its own.

A load into registers is issued when ptxas finds registers for it, which is late: four in flight at
most, whatever the unrolling. An asynchronous copy needs none. Each thread waits for its own copies
and reads its own places, so that no barrier is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.script import tirx as T

from ...gpu.intrinsics import device_call
from ...gpu.memory import WIDEST, copy_registers
from ...program.expr import bytes_of
from .fetch import Env, Fetch
from .values import Loaded, Values

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
