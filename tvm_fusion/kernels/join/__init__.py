"""Concatenations whose parts are computed where they belong."""
