"""torch's module paths, for code that was written for torch: only its import lines change.

`torch.distributed.X` is `rallypoint.compat.X` for `elastic` and all below it, `launcher`, `run`, `launch` and
`argparse_util`; `torch.numa` is `rallypoint.compat.numa`. The stores of `torch.distributed` and their errors are here.

Laws:
- nothing is done here: each name is Rallypoint's own, or a thin adapter where torch's signature differs;
- a name that torch's users subclass is the very class that Rallypoint checks for;
- nothing else of Rallypoint imports this package.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.store.api import Store
    from rallypoint.store.client import TCPStore
    from rallypoint.store.errors import QueueEmptyError
    from rallypoint.store.errors import StoreConnectionError as DistNetworkError
    from rallypoint.store.errors import StoreError as DistError
    from rallypoint.store.errors import StoreError as DistStoreError
    from rallypoint.store.filestore import FileStore
    from rallypoint.store.hashstore import HashStore
    from rallypoint.store.prefix import PrefixStore

__all__ = [
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "QueueEmptyError",
    "Store",
    "TCPStore",
]

_HOME = {
    "DistError": ("errors", "StoreError"),
    "DistNetworkError": ("errors", "StoreConnectionError"),
    "DistStoreError": ("errors", "StoreError"),
    "FileStore": ("filestore", "FileStore"),
    "HashStore": ("hashstore", "HashStore"),
    "PrefixStore": ("prefix", "PrefixStore"),
    "QueueEmptyError": ("errors", "QueueEmptyError"),
    "Store": ("api", "Store"),
    "TCPStore": ("client", "TCPStore"),
}
"""Module of `rallypoint.store` and name there; looked up when first used, as in `rallypoint` itself."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rallypoint.compat' has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(import_module(f"rallypoint.store.{module}"), attribute)
