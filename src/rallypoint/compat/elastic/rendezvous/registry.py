"""In the place of `torch.distributed.elastic.rendezvous.registry`."""

from __future__ import annotations

from rallypoint.rendezvous.registry import get_rendezvous_handler

__all__ = ["get_rendezvous_handler"]
