"""All checks, in the order in which their results are shown."""

from __future__ import annotations

from typing import Any

from rallypoint.preflight.disks import DISKS
from rallypoint.preflight.limits import LIMITS
from rallypoint.preflight.table import Reading

READINGS: tuple[Reading[Any], ...] = (*DISKS, LIMITS)

NAMES = tuple(each.name for reading in READINGS for each in reading.checks)
"""The names of all checks."""
