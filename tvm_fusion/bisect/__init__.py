"""Which kernels of a module give wrong numbers, or are slower than their operators apart: found by
running plans in which parts of the groups are as TVM has them, and shown again by a small program.
"""
