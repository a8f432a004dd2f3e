"""Reductions over windows that slide (pooling), with what neighbouring results share read once."""
