"""How many examples of a law a test run tries, and whether it draws new ones.

`make test` tries all examples of each law, the same ones for the same commit. `--quick` (`make check`) tries a part of
them; `--fresh` (`make test-all`) draws new ones. A test with many examples gets their number here:
`@settings(max_examples=examples(400))`.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_PART = 5
"""A quick run tries one example in this many."""
_LEAST = 10

_quick = False
_fresh = False


def choose(quick: bool, fresh: bool) -> None:
    """Set the kind of run, before any test is imported."""
    global _quick, _fresh
    _quick, _fresh = quick, fresh
    # Speed is never tested: these machines are small, shared and noisy, and some are emulated.
    slow = (HealthCheck.too_slow,)
    settings.register_profile(
        "rallypoint", deadline=None, max_examples=examples(100), derandomize=not fresh, suppress_health_check=slow
    )
    settings.load_profile("rallypoint")


def examples(number: int) -> int:
    """How many of `number` examples this run tries."""
    return max(_LEAST, number // _PART) if _quick else number


def is_fresh() -> bool:
    """Whether this run draws new seeds."""
    return _fresh
