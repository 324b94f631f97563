"""The port of a job's control plane if the cluster sets none, derived from the job's numbers. Pure."""

from __future__ import annotations

import re

DEFAULT_RANGE = "32768 60999"
"""The content of `/proc/sys/net/ipv4/ip_local_port_range` unless somebody changed it."""

_SPANS = ((10000, 32767), (61000, 65535), (5000, 9999))
"""Where to take ports from: the first range of which the kernel's own range leaves `_ENOUGH`."""
_ENOUGH = 1000
_USED_BY_OTHERS = frozenset(
    {5000, 5432, 5671, 5672, 5900, 5985, 6379, 6443, *range(6000, 6064), *range(6817, 6821), 7077, 8000, 8080, 8081}
    | {8265, 8443, 8786, 8787, 8888, 9000, 9090, 9091, 9092, 9093, 9100, 9200, 9300, 9400, 9418}
    | {*range(10248, 10260), 11211, 15672, 16686, 18080, 20048, 25672, 26379, 27017, 29400, 29500}
)
"""Ports of well-known services on cluster machines, and default ports of launchers."""
_STEP_STRIDE, _RESTART_STRIDE = 101, 10007
"""Consecutive jobs have consecutive ports; the ports of a job's steps and restarts are set apart."""


def control_port(job: int, step: int = 0, restart: int = 0, ephemeral: str = DEFAULT_RANGE) -> tuple[int, bool]:
    """The port of a job's control plane, and whether it is outside the kernel's port range (`ephemeral`, its text).

    It is derived from the numbers of the job and its step, and from how often the job was restarted.
    """
    low, high = _range_of(ephemeral)
    for first, last in _SPANS:
        usable = [port for port in range(first, last + 1) if not low <= port <= high and port not in _USED_BY_OTHERS]
        if len(usable) >= _ENOUGH:
            return usable[_number(job, step, restart) % len(usable)], True
    usable = [port for port in range(_SPANS[0][0], _SPANS[0][1] + 1) if port not in _USED_BY_OTHERS]
    return usable[_number(job, step, restart) % len(usable)], False


def _number(job: int, step: int, restart: int) -> int:
    return job + _STEP_STRIDE * step + _RESTART_STRIDE * restart


def _range_of(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*([0-9]{1,5})\s+([0-9]{1,5})\s*", text, re.ASCII)
    if match is None or not int(match[1]) <= int(match[2]) <= 65535:
        return _range_of(DEFAULT_RANGE)
    return int(match[1]), int(match[2])
