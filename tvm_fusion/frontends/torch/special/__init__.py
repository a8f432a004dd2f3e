"""Special functions: polynomials of one variable, series of two."""
