"""Checks of a node: the judgement of each fact."""
