"""In the place of `torch.distributed.elastic.utils.log_level`."""

from __future__ import annotations

__all__ = ["get_log_level"]


def get_log_level() -> str:
    """The level of logs where `LOGLEVEL` names none."""
    return "WARNING"
