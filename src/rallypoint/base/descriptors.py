"""The limits of open files of this process; each connection is one."""

from __future__ import annotations

import contextlib
import resource

from rallypoint.base.log import get_logger

log = get_logger(__name__)

_reported: dict[int, float] = {}
"""Hard limits already reported as too low, with the number of connections: each owner checks again in each round."""

_USUAL = 1024
"""The limit if it cannot be read."""

RESERVED = 256
"""The most open files of a process besides its connections."""

_ENOUGH = 1 << 20
"""If the hard limit is higher (in some containers by a factor of a thousand), the soft limit is not raised beyond this
without need: some programs close every descriptor up to the limit.
"""

_before: tuple[int, int] | None = None
"""The limits before they were raised, which workers get."""


def allow_descriptors(needed: float = float("inf"), what: str = "") -> int:
    """Raise the soft limit of open files as far as the hard limit allows, and return it. Children inherit it.

    `what` names the owner of the `needed` connections, for a warning if the hard limit is too low; the next warning
    comes only for twice as many.
    """
    soft, hard = limits()
    is_low = hard != resource.RLIM_INFINITY and hard < needed + RESERVED
    if what and is_low and needed >= 2 * _reported.get(hard, 0):
        _reported[hard] = needed
        log.warning(
            "%s need %d open files of this process, whose limit is %d, so some of them cannot connect; raise the hard "
            "limit (`ulimit -Hn`, or LimitNOFILE= of a service)",
            *(what, needed + RESERVED, hard),
        )
    if soft != resource.RLIM_INFINITY and soft < needed + RESERVED:
        _raise(soft, hard, needed + RESERVED)
    limit = limits()[0]
    return limit if limit != resource.RLIM_INFINITY else 1 << 30


def _raise(soft: int, hard: int, needed: float) -> None:
    global _before
    finite = hard if hard != resource.RLIM_INFINITY else 1 << 30
    limit = finite if needed > _ENOUGH else min(finite, _ENOUGH)
    if limit <= soft:
        return
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it: keep the old limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        _before = _before or (soft, hard)


def allow_nodes(most: int) -> None:
    """Raise the limit for a coordinator in this process with up to `most` nodes, and warn if it is too low. It is
    raised even for a few nodes: connections of strangers must leave the agent enough descriptors for a restart.
    """
    allow_descriptors(most, f"Up to {most} nodes of this job")
    soft, hard = limits()
    if soft != resource.RLIM_INFINITY:
        _raise(soft, hard, most + RESERVED)


def restore_for(child: int) -> None:
    """Give a child process that was just started the original limits."""
    if _before is not None:
        with contextlib.suppress(OSError, ValueError):  # it has ended, or a sandbox forbids it
            resource.prlimit(child, resource.RLIMIT_NOFILE, _before)


def limits() -> tuple[int, int]:
    """The soft and the hard limit of open files; `RLIM_INFINITY` for none."""
    try:
        return resource.getrlimit(resource.RLIMIT_NOFILE)
    except OSError:  # a sandbox may forbid this too
        pass
    with contextlib.suppress(OSError, ValueError), open("/proc/self/limits", encoding="utf-8") as lines:
        fields = next((line.split()[3:5] for line in lines if line.startswith("Max open files")), [])
        soft, hard = (resource.RLIM_INFINITY if limit == "unlimited" else int(limit) for limit in fields)
        return soft, hard
    return _USUAL, _USUAL


def for_connections(limit: int) -> int:
    """The first descriptor reserved for uses other than connections, with this limit."""
    return limit - min(RESERVED, limit // 4)


def connection_limit() -> int:
    """The number of connections that this process may have; higher descriptors are for other uses."""
    soft = limits()[0]
    return for_connections(soft if soft != resource.RLIM_INFINITY else 1 << 30)
