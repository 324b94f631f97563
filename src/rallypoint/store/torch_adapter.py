"""Stores as `torch.distributed.Store`, for code that hands them to torch. Torch is never imported for that."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

from rallypoint.base.errors import UserError


def torch_module() -> Any:
    """The module `torch.distributed`. Raises UserError where it is not imported."""
    found: Any = sys.modules.get("torch.distributed")
    if getattr(found, "Store", None) is None:
        raise UserError("torch.distributed is not imported, so that no store of torch's can be made; import it first")
    return found


def if_torch_is_imported(store: Any) -> Any:
    """`store.to_torch()`, or the store itself where torch is not imported."""
    return store if getattr(sys.modules.get("torch.distributed"), "Store", None) is None else store.to_torch()


def forwarding_store(store: object) -> Any:
    """A store of torch's that forwards every call to `store`. Raises UserError where torch is not imported."""
    made = _class_below(torch_module().Store)(store)
    _keepalive.append(made)
    return made


_keepalive: list[object] = []
"""Torch's C++ does not keep the Python half of such a store, without which it fails: so we do, to the process's end."""

_classes: dict[type, type] = {}


def _class_below(base: type) -> Any:
    """The class of forwarding stores; made when torch is there."""
    if base not in _classes:
        _classes[base] = type("ForwardingStore", (base,), {"__init__": _init, **{name: _call(name) for name in _CALLS}})
    return _classes[base]


def _init(self: Any, store: object) -> None:
    base: Any = type(self).__mro__[1]
    base.__init__(self)
    self.ours = store


def _call(name: str) -> Any:
    def call(self: Any, *arguments: Any) -> Any:
        plain = [each.total_seconds() if isinstance(each, timedelta) else each for each in arguments]
        return getattr(self.ours, name)(*plain)

    return property(lambda self: self.ours.timeout) if name == "timeout" else call


_CALLS = (
    *("set", "get", "compare_set", "add", "check", "wait", "append", "multi_get", "multi_set", "delete_key"),
    *("num_keys", "list_keys", "queue_push", "queue_pop", "queue_len", "barrier", "has_extended_api"),
    *("set_timeout", "timeout"),
)
