"""CPU kernels: loops for LLVM."""

from .write import write_cpu

__all__ = ["write_cpu"]
