"""Completions in the shells themselves."""
