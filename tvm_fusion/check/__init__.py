"""Checks of numbers: the float64 reference, the rule for outputs, verified modules and groups."""
