"""Kernels of scans: running sums and products with pointwise work before, between and behind."""
