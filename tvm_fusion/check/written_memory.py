"""What a module leaves in the inputs that it writes into, as outputs that are checked with others.

    def main(x, cache):                          def main(x, cache):
        new = R.call_tir_inplace(write, ...)         new = R.call_tir_inplace(write, ...)
        y = R.call_tir(read, (new,))                 y = R.call_tir(read, (new,))
        return y                             ->      return y, new

A mask hides from the outputs what is written behind the last token; the next call reads it.

Does not handle: writes in branches and in functions that `main` calls, and those through views of
another shape.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import relax

from ..runtime.calls.written_inputs import last_writes, written_inputs
from .reference import with_intermediates


def with_written(mod: tvm.IRModule) -> tuple[tvm.IRModule, tuple[int, ...]]:
    """The module whose `main` returns the inputs that it writes into behind its outputs, and their
    numbers.
    """
    main = mod["main"]
    numbers = written_inputs(mod)
    last = last_writes(main)
    if set(numbers) != set(last):
        return mod, ()
    names = [b.var.name for block in main.body.blocks for b in block.bindings]
    shown = {
        i: last[i].name
        for i in numbers
        if tvm_ffi.structural_equal(last[i].ty, main.params[i].ty)
        and isinstance(last[i].ty, relax.TensorType)
        and names.count(last[i].name) == 1
    }
    if not shown:
        return mod, ()
    return with_intermediates(mod, "main", list(shown.values())), tuple(shown)
