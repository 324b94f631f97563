"""What a measurement says when it cannot be made."""

from __future__ import annotations


class BenchError(Exception):
    """One side of a benchmark gave no figure; the message says which process, what was waited for and what it said."""
