"""The limits on open files of this process. Each connection needs one."""

from __future__ import annotations

import contextlib
import resource

from rallypoint.base.log import get_logger

log = get_logger(__name__)

_reported: dict[int, float] = {}
"""Hard limits already reported as too low, with the number of connections. Owners check again in each round."""

_USUAL = 1024
"""The limit to assume if it cannot be read."""

RESERVED = 256
"""The maximum number of files that a process has open besides its connections."""

_ENOUGH = 1 << 20
"""A soft limit that is not raised without need, even if the hard limit is much higher, as in some containers: some
programs close every descriptor up to the limit.
"""

_before: tuple[int, int] | None = None
"""The original limits, which workers get."""


def allow_descriptors(needed: float = float("inf"), what: str = "") -> int:
    """Raise the soft limit on open files as far as the hard limit allows, and return it. Children inherit it.

    `what` names the owner of the `needed` connections in the warning about a hard limit that is too low. The warning
    is repeated only if the number has doubled.
    """
    soft, hard = limits()
    is_low = hard != resource.RLIM_INFINITY and hard < needed + RESERVED
    if what and is_low and needed >= 2 * _reported.get(hard, 0):
        _reported[hard] = needed
        log.warning(
            "%s need %d open files in this process, but its limit is %d, so some of them cannot connect; raise the "
            "hard limit (`ulimit -Hn`, or LimitNOFILE= for a service)",
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
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid the change: keep the old limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        _before = _before or (soft, hard)


def allow_nodes(most: int) -> None:
    """Raise the limit for a coordinator in this process with up to `most` nodes, and warn if it is too low. Even a
    few nodes need this: connections from outside the job must leave the agent enough descriptors for a restart.
    """
    allow_descriptors(most, f"Up to {most} nodes of this job")
    soft, hard = limits()
    if soft != resource.RLIM_INFINITY:
        _raise(soft, hard, most + RESERVED)


def restore_for(child: int) -> None:
    """Restore the original limits of a child process that was just started."""
    if _before is not None:
        with contextlib.suppress(OSError, ValueError):  # the child has ended, or a sandbox forbids the change
            resource.prlimit(child, resource.RLIMIT_NOFILE, _before)


def limits() -> tuple[int, int]:
    """The soft and the hard limit on open files; `RLIM_INFINITY` for none."""
    try:
        return resource.getrlimit(resource.RLIMIT_NOFILE)
    except OSError:  # a sandbox may forbid reading them too
        pass
    with contextlib.suppress(OSError, ValueError), open("/proc/self/limits", encoding="utf-8") as lines:
        fields = next((line.split()[3:5] for line in lines if line.startswith("Max open files")), [])
        soft, hard = (resource.RLIM_INFINITY if limit == "unlimited" else int(limit) for limit in fields)
        return soft, hard
    return _USUAL, _USUAL


def for_connections(limit: int) -> int:
    """The first descriptor that, under this limit, is reserved for uses other than connections."""
    return limit - min(RESERVED, limit // 4)


def connection_limit() -> int:
    """Number of connections that this process can have; higher descriptors are for other uses."""
    soft = limits()[0]
    return for_connections(soft if soft != resource.RLIM_INFINITY else 1 << 30)
