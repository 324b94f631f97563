"""All checks, in the order in which their results are shown."""

from __future__ import annotations

from typing import Any

from rallypoint.preflight.disks import DISKS
from rallypoint.preflight.gpus import GPUS
from rallypoint.preflight.host_name import HOST_NAME
from rallypoint.preflight.limits import LIMITS
from rallypoint.preflight.proxy import PROXY
from rallypoint.preflight.reaching import ENDPOINT
from rallypoint.preflight.table import Reading

READINGS: tuple[Reading[Any], ...] = (*DISKS, LIMITS, HOST_NAME, ENDPOINT, PROXY, *GPUS)

NAMES = tuple(each.name for reading in READINGS for each in reading.checks)
"""The names of all checks."""
