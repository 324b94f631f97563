"""How much of a law a test run tries, and whether it draws new examples.

`make test` tries all examples of each law, the same each time: a run is a function of the commit. With `--quick`, as
`make check`, it tries a part of them; with `--fresh`, as `make test-all`, it draws new ones. A test with many examples
asks here for its number: `@settings(max_examples=examples(400))`.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_PART = 5
"""A quick run tries one of so many examples."""
_LEAST = 10

_quick = False
_fresh = False


def choose(quick: bool, fresh: bool) -> None:
    """Say what kind of run it is, before any test is imported."""
    global _quick, _fresh
    _quick, _fresh = quick, fresh
    # Speed is never tested: these machines are small, shared and noisy, and some are emulated.
    slow = (HealthCheck.too_slow,)
    settings.register_profile(
        "rallypoint", deadline=None, max_examples=examples(100), derandomize=not fresh, suppress_health_check=slow
    )
    settings.load_profile("rallypoint")


def examples(number: int) -> int:
    """How many of so many examples this run tries."""
    return max(_LEAST, number // _PART) if _quick else number


def is_fresh() -> bool:
    """Whether this run draws new seeds."""
    return _fresh
