"""Tiles of the CUDA-core GEMM."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimtConfig:
    """Tile of a block (rows, columns, terms a step) and of a thread (rows, columns)."""

    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.block_m // self.thread_m * (self.block_n // self.thread_n)
