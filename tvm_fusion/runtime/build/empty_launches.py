"""Kernels whose outputs a call leaves without elements are not launched.

    main(x: (n, 256), y: (n, 512)):             main(x: (n, 256), y: (n, 512)):
        launch (n + 63) // 64 blocks                if n > 0:
                                                        launch (n + 63) // 64 blocks

The driver refuses a grid of no blocks, and a tensor map without elements. On a CPU, tiles are
numbered by quotients of their counts: LLVM takes none of these for 0, and moves what follows from
that out of loops without a turn.

Does not handle: kernels that schedules of TVM's make (nothing says which parameters they fill).
"""

from tvm import tirx

from ...ir.graph import OUTPUTS_ATTR
from ...kernels.program.expr import conjunction


def launched_if_filled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A kernel, before it is lowered, as one that is launched only if an output has elements; one
    that does not say how many outputs it has, or has some of every size, as it is.
    """
    count = func.attrs.get(OUTPUTS_ATTR)
    filled = None if count is None else _is_filled(func, int(count))
    return func if filled is None else func.with_body(tirx.IfThenElse(filled, func.body, None))


def _is_filled(func: tirx.PrimFunc, outputs: int) -> tirx.Expr | None:
    """Whether one of the last parameters has elements; None where that is always so."""
    found = None
    for param in func.params[len(func.params) - outputs :]:
        extents = [e for e in param.ty.shape if not isinstance(e, tirx.IntImm)]
        filled = conjunction(*(extent > 0 for extent in extents))
        if filled is None:
            return None
        found = filled if found is None else tirx.Or(found, filled)
    return found
