"""In the place of `torch.distributed.elastic.utils.distributed`."""

from __future__ import annotations

from rallypoint.base.ports import get_free_port, get_socket_with_port
from rallypoint.compat.reexports import reexports_of
from rallypoint.store.create import create_c10d_store

__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]

__getattr__ = reexports_of(__name__)
