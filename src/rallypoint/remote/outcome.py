"""The exit code of a launch, from how the command ended on each host. Pure.

Laws:

1. If the command has ended with 0 on all hosts, it is 0.
2. A host that was lost, or whose command was killed, decides nothing where the others have ended with 0: an elastic job
   has gone on without it.
3. Otherwise it is the first code other than 0 with which a command has ended by itself; failing that, 128 + the first
   signal; and 1 where all hosts were lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FAILED = 1


class End(NamedTuple):
    """How the command has ended on a host: `code` is -N for death by signal N, None where the host was lost."""

    host: str
    code: int | None


def exit_code(ends: Sequence[End]) -> int:
    """The exit code, by the ends in the order in which they came; at least one."""
    codes = [end.code for end in ends if end.code is not None]
    by_itself = [code for code in codes if code >= 0]
    failed = next((code for code in by_itself if code), None)
    if failed is not None:
        return failed
    if by_itself:
        return 0
    return 128 - codes[0] if codes else FAILED


def missing(ends: Sequence[End]) -> list[str]:
    """The hosts that decide nothing: lost, or killed."""
    return [end.host for end in ends if end.code is None or end.code < 0]
