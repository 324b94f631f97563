"""The names of rendezvous backends, and where each is found. A name costs nothing until it is used.

Ours are strings of the form `module:factory`; other packages add theirs by `register` or by an entry point of the group
`torchrun.handlers` (contract section 1.11), looked up only for names that are not registered.
"""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger
from rallypoint.base.plugins import entry_point, entry_point_names, load
from rallypoint.rendezvous.handler import RendezvousHandler
from rallypoint.rendezvous.params import RendezvousParameters

log = get_logger(__name__)

RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]

ENTRY_POINT_GROUP = "torchrun.handlers"


class RendezvousHandlerRegistry:
    """Backend names and the creators behind them."""

    def __init__(self) -> None:
        self._creators: dict[str, RendezvousHandlerCreator | str] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator | str) -> None:
        """Make a backend known.

        Args:
            backend: its name.
            creator: makes a handler from parameters; or `module:factory`, imported when first used.

        Raises:
            UserError: the name is empty, or stands for another creator.
        """
        if not backend:
            raise UserError("a rendezvous backend needs a name that is not empty")
        if self._creators.get(backend, creator) != creator:
            raise UserError(f"the rendezvous backend {backend!r} is registered already, with another creator")
        self._creators[backend] = creator

    def find(self, backend: str) -> RendezvousHandlerCreator | str:
        """The creator of a backend's handlers; that of an installed package is loaded once.

        Raises:
            UserError: there is no such backend.
        """
        creator = self._creators.get(backend) or _plugin(backend)
        if creator is None:
            raise UserError(f"rendezvous backend {backend!r} is unknown; choose one of {', '.join(self.names())}")
        self._creators[backend] = creator
        return creator

    def names(self) -> tuple[str, ...]:
        """The backends that are known, those of installed packages among them."""
        return tuple(sorted({*self._creators, *entry_point_names(ENTRY_POINT_GROUP)}))

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """A handler for the backend that `params` names.

        Raises:
            UserError: there is no such backend, or its parameters cannot work.
            RuntimeError: the handler reports another name than the requested one.
        """
        creator = self.find(params.backend)
        if isinstance(creator, str):
            creator = load(creator)
        handler: RendezvousHandler = creator(params)
        if handler.get_backend() != params.backend:
            raise RuntimeError(
                f"the handler made for the rendezvous backend {params.backend!r} calls itself {handler.get_backend()!r}"
            )
        return handler


def _plugin(backend: str) -> RendezvousHandlerCreator | None:
    """The creator that an installed package offers under this name; a broken plug-in causes only a warning."""
    try:
        offer = entry_point(ENTRY_POINT_GROUP, backend)
        creator: RendezvousHandlerCreator | None = None if offer is None else offer()
    except Exception:
        log.warning("the rendezvous plug-in %r cannot be loaded", backend, exc_info=True)
        return None
    return creator


rendezvous_handler_registry = RendezvousHandlerRegistry()
rendezvous_handler_registry.register("c10d", "rallypoint.rendezvous.backends.embedded:create_handler")
rendezvous_handler_registry.register("etcd", "rallypoint.rendezvous.backends.etcd:create_handler")
rendezvous_handler_registry.register("static", "rallypoint.rendezvous.backends.static:create_handler")
rendezvous_handler_registry.register("etcd-v2", "rallypoint.rendezvous.backends.etcd:create_handler")


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """A handler from the registry that all share. See `RendezvousHandlerRegistry.create_handler`."""
    return rendezvous_handler_registry.create_handler(params)
