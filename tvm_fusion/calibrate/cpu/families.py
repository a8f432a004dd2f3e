"""The benchmarks of a CPU, in the order in which they are run."""

from __future__ import annotations

from ..findings import Family
from . import arithmetic, bandwidth, launch

FAMILIES: tuple[Family, ...] = (bandwidth.FAMILY, launch.FAMILY, arithmetic.FAMILY)
