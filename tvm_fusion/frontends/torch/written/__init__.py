"""Operators that write at places which are data: writes, scatters, segments."""
