"""In the place of `torch.distributed.elastic.rendezvous.registry`."""

from __future__ import annotations

from rallypoint.compat.reexports import reexports_of
from rallypoint.rendezvous.registry import get_rendezvous_handler
from rallypoint.rendezvous.registry import rendezvous_handler_registry as handler_registry

__all__ = ["get_rendezvous_handler", "handler_registry"]

__getattr__ = reexports_of(__name__)
