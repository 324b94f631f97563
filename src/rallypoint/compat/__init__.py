"""torch's module paths, for code written for torch: only its import lines change.

`torch.distributed.X` is `rallypoint.compat.X`, and `torch.numa` is in this package too. The names of our agent,
rendezvous, stores and timers are Rallypoint's; all others are imported from torch on first use (`names`).

Laws:
- this package does no work: each name is Rallypoint's own, or a thin adapter if torch's signature differs;
- a name that torch's users subclass is the very class that Rallypoint checks for;
- nothing else in Rallypoint imports this package.
"""

from __future__ import annotations

from importlib import import_module
from importlib.machinery import PathFinder

from rallypoint.compat.names import install, names_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_STORES = {
    "DistError": ("errors", "StoreError"),
    "DistNetworkError": ("errors", "StoreConnectionError"),
    "DistStoreError": ("errors", "StoreError"),
    "FileStore": ("filestore", "FileStore"),
    "HashStore": ("plain", "HashStore"),
    "PrefixStore": ("prefix", "PrefixStore"),
    "QueueEmptyError": ("errors", "QueueEmptyError"),
    "Store": ("api", "Store"),
    "TCPStore": ("client", "TCPStore"),
}
"""The module in `rallypoint.store` and the name there; looked up on first use, as in `rallypoint` itself."""

__all__ = [*_STORES]  # noqa: PLE0604

_find = names_of(__name__)


def __getattr__(name: str) -> Any:
    if name in _STORES:
        module, attribute = _STORES[name]
        return getattr(import_module(f"rallypoint.store.{module}"), attribute)
    # `from rallypoint.compat import launch` asks for the name before it looks for the file, which would import torch.
    if PathFinder.find_spec(f"{__name__}.{name}", __path__):
        return import_module(f"{__name__}.{name}")
    return _find(name)


install()
