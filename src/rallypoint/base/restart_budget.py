"""The budget in `--max-restarts=3/1h`: restarts per sliding window. Imported only if used."""

from __future__ import annotations

import re

from rallypoint.base.errors import UsageError

MOST, LONGEST = 10_000, 86_400.0
"""The maximum number of restarts per window, and its maximum length in seconds."""

_BUDGET = re.compile(r"([0-9]{1,6})/([0-9]{1,6}(?:\.[0-9]{1,3})?)(s|m|h|d|)", re.ASCII)
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class RestartBudget(int):
    """A number of restarts per `window` seconds."""

    window: float

    @classmethod
    def of(cls, number: int, window: float) -> RestartBudget:
        budget = cls(number)
        budget.window = window
        return budget


def read_budget(text: str) -> RestartBudget:
    """Read `N/TIME`. A time is in seconds, or has the unit `s`, `m`, `h` or `d`. Raises UsageError if malformed."""
    match = _BUDGET.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a number of restarts per period; write it as 3/1h or 5/30m")
    number, window = int(match[1]), float(match[2]) * _SECONDS[match[3]]
    if not (1 <= number <= MOST and 0 < window <= LONGEST):
        raise UsageError(f"{text!r} is out of range; use 1 to {MOST} restarts per period of up to a day (1d)")
    return RestartBudget.of(number, window)
