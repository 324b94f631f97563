"""Finds the known name that a user probably meant, for an error about an unknown one."""

from __future__ import annotations

from collections.abc import Collection
from difflib import SequenceMatcher

ALIKE = 0.6
"""Minimum similarity, from 0 to 1, at which one name may be a misspelling of another."""


def unknown_flag(word: str, flags: Collection[str], command: str) -> str:
    """The error for an unknown flag, which suggests the most similar one in `flags`."""
    flag = word.partition("=")[0]
    names = [name for name in flags if name.startswith("--") and "_" not in name]
    similar = next((name for name in names if name.startswith(flag.rstrip("s"))), "") if len(flag) > 3 else ""
    similar = similar or closest_match(flag, names)
    hint = f"did you mean {similar}? " if similar else ""
    return f"unknown flag {flag}; {hint}'{command} --help' lists all"


def closest_match(name: str, known: Collection[str], least: float = ALIKE) -> str:
    """The known name most similar to `name`, ignoring case; empty if no similarity (0 to 1) reaches `least`."""

    def likeness(other: str) -> float:
        return SequenceMatcher(None, name.lower(), other.lower()).ratio()

    best = max(sorted(known), key=likeness, default="")
    return best if best and likeness(best) >= least else ""
