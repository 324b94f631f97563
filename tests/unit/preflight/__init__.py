"""Checks of a node: what is made of each fact."""
