"""Several kernels of a product whose rows are known at the call, each for a range of sizes. The
cost model is read at `SIZES`. What a form leaves out where sizes are symbolic is not among them.

Does not handle: several symbolic sizes in one launch that do not make its rows together.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx

from ...config import HardwareProfile, Policy
from ...errors import Unsupported
from ...ir.extents import Bounds, bounds_within, known_sizes, sizes_of
from ..contraction.model import Contraction
from ..forms import Writer
from ..program.expr import number
from ..program.extents import equal_sizes, with_values
from ..versions import (
    MOST,
    Branch,
    Multiple,
    Size,
    Version,
    joined,
    known_size,
    read_at,
    tables_by_size,
    versions_of,
)

__all__ = ["MOST", "SIZES", "Version", "versions_of", "write_versions"]

SIZES = (16, 64, 128, 256, 512, 1024, 4096)


def write_versions(
    writer: Writer, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy
) -> tirx.PrimFunc | None:
    """The kernels of a fused PrimFunc for ranges of its one symbolic size, or of its rows where
    several sizes make them, or the one kernel within its bounds; None where it has none, or others,
    and where one kernel is as good.
    """
    exact = policy.rounding == "exact"
    size = known_size(func)
    if size is None and len(sizes_of(func)) > 1:
        size = _rows_of_several(func, writer.read(func, exact))
    if size is None:
        return None
    bounds, whole = size.bounds, None
    if bounds.multiple > 1 and _reads_symbolic_rows(func):
        whole = Multiple.made(func, *size.vars, bounds.multiple)
    problem = writer.read(func if whole is None else whole.func, exact)
    tables = tables_by_size(writer, func, size, problem, read_at(SIZES, bounds), hw, policy)
    found = versions_of(list(tables.values()), list(tables))
    if not found and whole is not None:
        found = [Version(None, None)]  # the best guess
    if len(found) < (2 if bounds == Bounds() else 1):
        return None
    sizes = {} if whole is None else whole.sizes
    branches = []
    try:
        for version in found:
            kernel = writer.emit(problem, hw, policy, version.config)
            branches.append(Branch(kernel, size.upto(version.most), version.most, sizes))
    except Unsupported:
        return None  # the one kernel is chosen among those that can be written
    return joined(branches, func)


def _rows_of_several(func: tirx.PrimFunc, problem: Contraction) -> Size | None:
    """The product of the symbolic sizes of a function, where its rows are a multiple of it and
    nothing else is symbolic: the tokens of a batch of texts.
    """
    sizes, buffers = sizes_of(func), [p for p in func.params if isinstance(p.ty, tirx.BufferType)]
    others = [extent for s in problem.segments for extent in (s.B, s.N)]
    others += [product.K for product in problem.products]
    if len(buffers) < len(func.params) or not problem.uniform:
        return None
    if any(not isinstance(extent, int) for extent in others) or isinstance(problem.M, int):
        return None
    size = Size(tuple(sizes), Bounds())
    times = number(with_values(problem.M, dict.fromkeys(sizes, 1)))
    if times is None or not equal_sizes(problem.M, size.extent * times):
        return None
    return replace(size, bounds=bounds_within(size.extent, known_sizes(func)))


def _reads_symbolic_rows(func: tirx.PrimFunc) -> bool:
    """Whether vectors of some parameter depend on what divides the size."""
    shapes = (param.ty.shape for param in func.params)
    return any(len(shape) and not isinstance(shape[-1], tirx.IntImm) for shape in shapes)
