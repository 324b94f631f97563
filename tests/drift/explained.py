"""Differences from torch that are meant to be, by fact; and what torch has only since a version.

Patterns are matched with the whole of `fact: about`. A line that neither table explains is a defect: of ours, or of the
contract.
"""

from __future__ import annotations

SINCE: dict[str, str] = {}

EXPLAINED: dict[str, str] = {}
