"""In the place of `torch.distributed.elastic.timer.debug_info_logging`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rallypoint.base.log import get_logger

__all__ = ["log_debug_info_for_expired_timers"]

log = get_logger(__name__)


def log_debug_info_for_expired_timers(run_id: str, expired_timers: Mapping[int, Sequence[str]]) -> None:
    """Say which timers of a job have run out: process id to their scopes. Nothing is said where there are none."""
    if expired_timers:
        log.info("timers of job %s have run out: %s", run_id, dict(expired_timers))
