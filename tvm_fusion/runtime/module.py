"""The public address of `CompiledModule`, which loads saved modules."""

from .calls.compiled_module import CompiledModule

__all__ = ["CompiledModule"]
