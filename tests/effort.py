"""How much of a law a test run tries: all of its examples, or with `--quick`, as `make check` does, a part of them.

`make test` tries all. A test with many examples asks here for its number: `@settings(max_examples=examples(400))`.
"""

from __future__ import annotations

from hypothesis import settings

_PART = 5
"""A quick run tries one of so many examples."""
_LEAST = 10

_quick = False


def choose(quick: bool) -> None:
    """Say which of the two it is, before any test is imported."""
    global _quick
    _quick = quick
    # Speed is never tested: these machines are small, shared and noisy.
    settings.register_profile("rallypoint", deadline=None, max_examples=examples(100))
    settings.load_profile("rallypoint")


def examples(number: int) -> int:
    """How many of so many examples this run tries."""
    return max(_LEAST, number // _PART) if _quick else number
