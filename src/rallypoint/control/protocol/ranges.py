"""The ranges of numbers and texts in messages, by the names of their fields: data alone, for code that takes them from
users.

A number that enters the program (a flag, an option, an argument) is checked by the same table as one that arrives in a
message (`validation`): what one side accepts, the other can send. An option of `--rdzv-conf` has its range here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rallypoint.base.light_typing import NamedTuple

MAX_NODES = 65536
"""Nodes that one job may have; what a coordinator keeps for each is some hundred bytes."""
MAX_WORKERS = 65536
"""Workers that one node may have, so that a world has fewer than 2**32."""
MOST_ANSWERS = 256
"""Nodes whose clues to a cause are passed on: the first that answer."""

MAX_LINE = 4 * 1024
"""Bytes of UTF-8 that a text of one line may have, such as a job's id."""
ROUNDS = 2**31


class NumberRange(NamedTuple):
    """The least and the most that a number may be. A number of seconds may be infinite only where `most` is."""

    minimum: float
    maximum: float


SECONDS = NumberRange(0.0, 86400.0)
"""The range of times that torchrun does not have: at most a day."""
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
"""The range of a number, by the name of its field."""
OTHER_NUMBERS = NumberRange(-(2**40), 2**40)
"""The range of a number whose field's name is not in the table."""


def range_of(name: str) -> NumberRange:
    """The range of a number that is sent in a field of that name."""
    return NUMBERS.get(name, OTHER_NUMBERS)


def is_in_range(name: str, value: float) -> bool:
    """Whether a number may be sent in a field of that name."""
    least, most = range_of(name)
    return least <= value <= most  # never so for NaN
