"""Builds, calls, CUDA graphs and times of compiled modules."""
