"""In the place of `torch.distributed.elastic.rendezvous.api`."""

from __future__ import annotations

from rallypoint.compat.reexports import reexports_of
from rallypoint.protocol.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from rallypoint.rendezvous.handler import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from rallypoint.rendezvous.params import RendezvousParameters
from rallypoint.rendezvous.registry import (
    RendezvousHandlerCreator,
    RendezvousHandlerRegistry,
    rendezvous_handler_registry,
)

__all__ = [
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeoutError",
    "rendezvous_handler_registry",
]

__getattr__ = reexports_of(__name__)
