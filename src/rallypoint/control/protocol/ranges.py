"""Ranges of numbers and texts in messages, by field name. Only data, for code that accepts these values from users.

One table checks numbers from users (flags, options, arguments) and in messages (`validation`), so each side accepts
whatever the other can send. It includes the options of `--rdzv-conf`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rallypoint.base.light_typing import NamedTuple

MAX_NODES = 65536
"""Maximum number of nodes in a job; a coordinator stores some hundred bytes for each."""
MAX_WORKERS = 65536
"""Maximum number of workers on a node, so that a world has fewer than 2**32."""
MOST_ANSWERS = 256
"""Number of nodes, the first to answer, whose clues to a cause are passed on."""

MAX_LINE = 4 * 1024
"""Maximum size of a one-line text, such as a job's id, in bytes of UTF-8."""
ROUNDS = 2**31


class NumberRange(NamedTuple):
    """Minimum and maximum value of a number. A number of seconds may be infinite only if `most` is."""

    minimum: float
    maximum: float


SECONDS = NumberRange(0.0, 86400.0)
"""Range of times that torchrun has no setting for: at most a day."""
_FROM_ZERO = NumberRange(0, 2**40)
_RANK = NumberRange(-1, MAX_NODES * MAX_WORKERS)
NUMBERS: Mapping[str, NumberRange] = {
    "pid": NumberRange(0, 2**31 - 1),
    "number": NumberRange(0, 2**62),
    "local_world_size": NumberRange(1, MAX_WORKERS),
    "store_port": NumberRange(0, 65535),
    "rank_hint": NumberRange(0, MAX_NODES - 1),
    "group_rank": NumberRange(-1, MAX_NODES - 1),
    "succeeded": NumberRange(0, MAX_NODES - 1),
    "control_rank": NumberRange(-1, MAX_NODES - 1),
    "group_world_size": NumberRange(0, MAX_NODES),
    "max_restarts": NumberRange(-1, 2**31),
    "segment": NumberRange(1, MAX_NODES),
    "min_nodes": NumberRange(1, MAX_NODES),
    "max_nodes": NumberRange(1, MAX_NODES),
    "round": NumberRange(-1, ROUNDS),
    "last_ended_round": NumberRange(-1, ROUNDS),
    "rank": _RANK,
    "local_rank": _RANK,
    "step": NumberRange(-1, 2**63 - 1),
    "progress": NumberRange(-1, 2**63 - 1),
    "steps": NumberRange(-1, 2**63 - 1),
    "least_step": NumberRange(-1, 2**63 - 1),
    "most_step": NumberRange(-1, 2**63 - 1),
    "median": NumberRange(-1, 2**63 - 1),
    "behind": NumberRange(-1, 2**63 - 1),
    "first_step": NumberRange(-1, 2**63 - 1),
    "step_before": NumberRange(-1, 2**63 - 1),
    "valid_for": NumberRange(0.0, math.inf),
    "lasts": SECONDS,
    "lease": NumberRange(0.1, SECONDS.maximum),
    "heartbeat_interval": SECONDS,
    "notice_timeout": SECONDS,
    "min_healthy_time": SECONDS,
    "restart_backoff": SECONDS,
    "restart_backoff_max": SECONDS,
    "restart_window": SECONDS,
    "restarts_in_window": NumberRange(0, 10_000),
    "join_timeout": _FROM_ZERO,
    "last_call_timeout": _FROM_ZERO,
    "close_timeout": _FROM_ZERO,
    "heartbeat_timeout": _FROM_ZERO,
    "keep_alive_interval": _FROM_ZERO,
    "keep_alive_max_attempt": _FROM_ZERO,
    "cas_backoff_max_seconds": _FROM_ZERO,
    "same_failure_limit": _FROM_ZERO,
    "deadline": NumberRange(-math.inf, math.inf),
    "lines": NumberRange(0, 2**31),
    "cursor": NumberRange(0, 2**40),
    "most": NumberRange(0, 2**31),
    "ranks": NumberRange(0, MAX_NODES * MAX_WORKERS),
}
"""The range of a number by the name of its field."""
OTHER_NUMBERS = NumberRange(-(2**40), 2**40)
"""The range of a number whose field is not in the table."""


def range_of(name: str) -> NumberRange:
    """The range of a number in a field of that name."""
    return NUMBERS.get(name, OTHER_NUMBERS)


def is_in_range(name: str, value: float) -> bool:
    """Whether a field of that name may have this value."""
    least, most = range_of(name)
    return least <= value <= most  # false for NaN
