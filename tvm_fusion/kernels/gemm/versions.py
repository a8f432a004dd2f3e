"""Several kernels of a product whose rows are known at the call, each for a range of sizes. The
cost model is read at `SIZES`. What a form leaves out where sizes are symbolic is not among them.

Does not handle: several symbolic sizes in one launch.
"""

from __future__ import annotations

from tvm import tirx

from ...config import HardwareProfile, Policy
from ...errors import Unsupported
from ...ir.extents import Bounds
from ..forms import Writer
from ..versions import (
    MOST,
    Branch,
    Multiple,
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
    """The kernels of a fused PrimFunc for ranges of its one symbolic size, or the one kernel within
    its bounds; None where it has none or several, and where one kernel is as good.
    """
    size = known_size(func)
    if size is None:
        return None
    exact = policy.rounding == "exact"
    bounds, whole = size.bounds, None
    if bounds.multiple > 1 and _reads_symbolic_rows(func):
        whole = Multiple.made(func, size.var, bounds.multiple)
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


def _reads_symbolic_rows(func: tirx.PrimFunc) -> bool:
    """Whether vectors of some parameter depend on what divides the size."""
    shapes = (param.ty.shape for param in func.params)
    return any(len(shape) and not isinstance(shape[-1], tirx.IntImm) for shape in shapes)
