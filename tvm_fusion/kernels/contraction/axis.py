"""Axes: the coordinates over which contractions are told."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.ir import Var

from ..program.program import Extent

INDEX = "int64"


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """A coordinate: `var` runs over 0 ... extent - 1. Axes of extent 1 are left out."""

    var: Var
    extent: Extent
