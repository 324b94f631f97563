"""Helpers for programs that start jobs by themselves (contract section 8, `elastic.utils`)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rallypoint.base.endpoint import free_port, listening_socket
from rallypoint.base.errors import UserError

if TYPE_CHECKING:
    import socket


def get_free_port() -> int:
    """A port that was free a moment ago. Prefer `get_socket_with_port`, whose port is held."""
    return free_port()


def get_socket_with_port() -> socket.socket:
    """A socket that listens on a free port of the loopback; the caller closes it."""
    made = listening_socket("localhost", 0)
    made.setblocking(True)
    return made


def get_env_variable_or_raise(env_name: str) -> str:
    """An environment variable's value; UserError if it is not set."""
    value = os.environ.get(env_name)
    if value is None:
        raise UserError(f"Environment variable {env_name} expected, but not set")
    return value
