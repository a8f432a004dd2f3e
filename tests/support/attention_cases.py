"""Attention in the spellings of real models: one fused PrimFunc each, with float64 references.

for case in CASES: func, inputs = case.built(); expected = case.expected()
case.with_sizes(M=256, N=256, D=64, E=64)      the same graph at other sizes
"""

from tests.support.attention_graphs import AttentionCase, Graph, Sizes, one_group
from tests.support.attention_layouts import LAYOUTS
from tests.support.attention_masks import MASKS
from tests.support.attention_softmaxes import SOFTMAXES

__all__ = ["CASES", "AttentionCase", "Graph", "Sizes", "one_group"]

CASES: list[AttentionCase] = [*LAYOUTS, *MASKS, *SOFTMAXES]
