"""In the place of `torch.distributed.elastic.utils.api`."""

from __future__ import annotations

from rallypoint.base.ports import get_env_variable_or_raise, get_socket_with_port
from rallypoint.workers.context import macros

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]
