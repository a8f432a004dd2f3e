"""Layout assignment: the order of axes in which each tensor of a convolutional graph lies.

`orders` says what an order is, `ways` in which orders each operator can be computed, `assignment`
chooses among them for the whole graph, and `assign_layouts` is the pass.
"""

from .assign_layouts import AssignLayouts

__all__ = ["AssignLayouts"]
