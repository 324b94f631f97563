"""Our stores as `torch.distributed.Store`, for code that hands them to torch. Torch is never imported for that."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

from rallypoint.base.errors import UserError
from rallypoint.store.api import Store, seconds
from rallypoint.store.client import TCPStore
from rallypoint.store.filestore import FileStore
from rallypoint.store.prefix import PrefixStore


def to_torch(store: Store) -> Any:
    """A `torch.distributed.Store` with the same content.

    Of a store on a server, in a file, or within another store, it is torch's own kind of it; of any other, one that
    hands every call on.

    Raises:
        UserError: `torch.distributed` is not imported.
    """
    torchs: Any = sys.modules.get("torch.distributed")
    if getattr(torchs, "Store", None) is None:
        raise UserError("torch.distributed is not imported, so that no store of torch's can be made; import it first")
    if isinstance(store, PrefixStore):
        return torchs.PrefixStore(store.prefix, store.underlying_store.to_torch())
    if isinstance(store, TCPStore):
        store.keep_server_running()
        return torchs.TCPStore(store.host, store.port, timeout=store.timeout, wait_for_workers=False)
    if isinstance(store, FileStore):
        return torchs.FileStore(store.path, -1)
    made = _adapter_of(torchs.Store)(store)
    _keepalive.append(made)
    return made


def if_torch_is_imported(store: Store) -> Any:
    """`to_torch`, or the store itself where torch is not imported."""
    return store if getattr(sys.modules.get("torch.distributed"), "Store", None) is None else store.to_torch()


_keepalive: list[object] = []
"""Torch's C++ does not keep the Python half of such a store, without which it fails: so we do, to the process's end."""

_adapter_classes: dict[type, type] = {}


def _adapter_of(base: type) -> Any:
    """A class below torch's that hands every call on to a store of ours; made when torch is there."""
    if base not in _adapter_classes:
        _adapter_classes[base] = type(
            "HandedOnStore", (base,), {"__init__": _init, **{name: _call(name) for name in _CALLS}}
        )
    return _adapter_classes[base]


def _init(self: Any, store: Store) -> None:
    base: Any = type(self).__mro__[1]
    base.__init__(self)
    self.ours = store


def _call(name: str) -> Any:
    def call(self: Any, *arguments: Any) -> Any:
        return getattr(self.ours, name)(*[_seconds(each) for each in arguments])

    return property(lambda self: self.ours.timeout) if name == "timeout" else call


def _seconds(value: Any) -> Any:
    return seconds(value) if isinstance(value, timedelta) else value


_CALLS = (
    *("set", "get", "compare_set", "add", "check", "wait", "append", "multi_get", "multi_set", "delete_key"),
    *("num_keys", "list_keys", "queue_push", "queue_pop", "queue_len", "barrier", "has_extended_api"),
    *("set_timeout", "timeout"),
)
