"""Several kernels of a product whose rows are known at the call, each for a range of sizes. The
cost model is read at `SIZES`. What a form leaves out where sizes are symbolic is not among them.

Does not handle: several symbolic sizes in one launch.
"""

from __future__ import annotations

from tvm import tirx

from ...config import HardwareProfile, Policy
from ...errors import Unsupported
from ..forms import Writer
from ..program.expr import constant, dtype_of
from ..versions import (
    MOST,
    Branch,
    Version,
    joined,
    symbolic_size,
    tables_by_size,
    versions_of,
)

__all__ = ["MOST", "SIZES", "Version", "versions_of", "write_versions"]

SIZES = (16, 64, 128, 256, 512, 1024, 4096)


def write_versions(
    writer: Writer, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy
) -> tirx.PrimFunc | None:
    """The kernels of a fused PrimFunc for ranges of its one symbolic size; None where it has none
    or several, and where one kernel is as good.
    """
    size = symbolic_size(func)
    if size is None:
        return None
    exact = policy.rounding == "exact"
    problem = writer.read(func, exact)
    tables = tables_by_size(writer, func, problem, SIZES, hw, policy)
    found = versions_of(list(tables.values()), list(tables))
    if len(found) < 2:
        return None
    try:
        kernels = [writer.emit(problem, hw, policy, version.config) for version in found]
    except Unsupported:
        return None  # the one kernel is chosen among those that can be written
    branches = []
    for kernel, version in zip(kernels, found, strict=True):
        most = version.most
        condition = None if most is None else size <= constant(most, dtype_of(size))
        branches.append(Branch(kernel, condition, most))
    return joined(branches)
