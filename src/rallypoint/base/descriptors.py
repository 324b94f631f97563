"""How many files this process may have open: a connection is one."""

from __future__ import annotations

import contextlib
import resource

from rallypoint.base.log import get_logger

log = get_logger(__name__)

_warned: set[int] = set()
"""Hard limits that were said to be too low: once is enough, and each round asks again."""

_USUAL = 1024
"""The limit where it cannot be known."""

RESERVED = 256
"""Open files of a process besides its connections, at most."""


def allow_descriptors(wanted: float = float("inf"), what: str = "") -> int:
    """See to it that this process may have so many connections, as far as its hard limit of open files allows.

    The usual soft limit, 1024, is made for programs that use `select`. Processes started from here have the new limit.

    Args:
        wanted: connections.
        what: who they are, for a warning where the hard limit is too low.

    Returns:
        How many files may be open now.
    """
    soft, hard = limits()
    if what and hard not in _warned and hard != resource.RLIM_INFINITY and hard < wanted + RESERVED:
        _warned.add(hard)
        log.warning(
            "%s need %d open files of this process, which may have %d, so not all can connect; raise the hard limit "
            "(`ulimit -Hn`, or LimitNOFILE= of a service)",
            *(what, wanted + RESERVED, hard),
        )
    if soft != resource.RLIM_INFINITY and soft < wanted + RESERVED:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it; then the old limit has to do
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = limits()[0]
    return limit if limit != resource.RLIM_INFINITY else 1 << 30


def allow_nodes(most: int) -> None:
    """See to it that a coordinator in this process can have so many nodes, and say so where it cannot."""
    allow_descriptors(most, f"Up to {most} nodes of this job")


def limits() -> tuple[int, int]:
    """The soft and the hard limit of open files; `RLIM_INFINITY` for none."""
    try:
        return resource.getrlimit(resource.RLIMIT_NOFILE)
    except OSError:  # a sandbox may forbid to ask as well
        pass
    with contextlib.suppress(OSError, ValueError), open("/proc/self/limits", encoding="utf-8") as lines:
        found = next((line.split()[3:5] for line in lines if line.startswith("Max open files")), [])
        soft, hard = (resource.RLIM_INFINITY if each == "unlimited" else int(each) for each in found)
        return soft, hard
    return _USUAL, _USUAL


def for_connections(limit: int) -> int:
    """From which descriptor on those of a process that may have so many are kept for what is no connection."""
    return limit - min(RESERVED, limit // 4)
