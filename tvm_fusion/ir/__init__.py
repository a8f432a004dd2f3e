"""Reads IR and never changes it: access maps of PrimFuncs, and the graph of a Relax function."""
