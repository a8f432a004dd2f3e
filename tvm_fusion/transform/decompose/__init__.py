"""Decompose: composite Relax operators opened into primitive ones.

Before:

    y = R.nn.softmax(x, axis=-1)

After, with `tvm_fusion.composites = {"softmax1_max": "softmax#1", ..., "y": "softmax#1"}`:

    softmax1_max = R.max(x, axis=[-1], keepdims=True)
    softmax1_shifted = R.subtract(x, softmax1_max)
    softmax1_exp = R.exp(softmax1_shifted)
    softmax1_sum = R.sum(softmax1_exp, axis=[-1], keepdims=True)
    y = R.divide(softmax1_exp, softmax1_sum)

A composite hides reductions and pointwise operations from the planner; opened up, each of them can
join any group. The files of this package hold one family of rules each, with their Before -> After.
"""

from .decompose import COMPOSITES_ATTR, RULES, Decompose

__all__ = ["COMPOSITES_ATTR", "RULES", "Decompose"]
