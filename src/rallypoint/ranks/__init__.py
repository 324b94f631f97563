"""Arithmetic of ranks. Pure: numbers in, numbers out."""
