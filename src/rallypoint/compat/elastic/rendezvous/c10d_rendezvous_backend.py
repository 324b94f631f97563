"""In the place of `torch.distributed.elastic.rendezvous.c10d_rendezvous_backend`.

Rallypoint's own `c10d` has a control plane instead; this is for programs that put a rendezvous over a store together by
themselves.
"""

from __future__ import annotations

import os
from tempfile import mkstemp
from typing import Any

from rallypoint.base.endpoint import is_this_machine, parse_endpoint
from rallypoint.base.errors import UserError
from rallypoint.compat.elastic.rendezvous.given_store import given
from rallypoint.compat.reexports import reexports_of
from rallypoint.protocol.errors import RendezvousConnectionError
from rallypoint.rendezvous.backend import StoreRendezvousBackend
from rallypoint.rendezvous.params import C10D_PORT, RendezvousParameters
from rallypoint.store.api import Store
from rallypoint.store.client import TCPStore
from rallypoint.store.errors import StoreError
from rallypoint.store.filestore import FileStore

__all__ = ["DEFAULT_PORT", "C10dRendezvousBackend", "create_backend"]

__getattr__ = reexports_of(__name__)

DEFAULT_PORT = C10D_PORT


class C10dRendezvousBackend(StoreRendezvousBackend):
    """The state in one key of a store, which may also be torch's."""

    def __init__(self, store: Any, run_id: str) -> None:
        super().__init__(given(store), run_id)


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Store]:
    """A backend and the store that it is in, from the options of `c10d` (contract section 4.4).

    Raises:
        UserError: an option cannot work.
        RendezvousConnectionError: the store cannot be reached or served.
    """
    kind = str(params.get("store_type", "tcp")).strip().lower()
    if kind not in _MAKERS:
        raise UserError(f"rendezvous option store_type={kind!r} is unknown; choose one of {', '.join(_MAKERS)}")
    store = _MAKERS[kind](params)
    return C10dRendezvousBackend(store, params.run_id), store


def _file(params: RendezvousParameters) -> Store:
    path = params.endpoint
    if not path:
        handle, path = mkstemp()
        os.close(handle)
    try:
        return FileStore(path)
    except StoreError as error:
        raise RendezvousConnectionError(f"the file {path!r} cannot hold a rendezvous: {error}") from error


def _tcp(params: RendezvousParameters) -> Store:
    host, port = parse_endpoint(params.endpoint, DEFAULT_PORT)
    timeout = params.get_as_int("read_timeout", 60)
    assert timeout is not None
    if timeout <= 0:
        raise UserError(f"rendezvous option read_timeout={timeout} must be positive")
    is_host = params.get_as_bool("is_host")
    attempts = (is_host,) if is_host is not None else (True, False) if is_this_machine(host) else (False,)
    last: StoreError | None = None
    for serves in attempts:  # somebody else on this machine may serve already
        try:
            return TCPStore(host, port, is_master=serves, multi_tenant=True, timeout=timeout)
        except StoreError as error:
            last = error
    raise RendezvousConnectionError(f"the store of the rendezvous cannot be reached: {last}") from last


_MAKERS = {"tcp": _tcp, "file": _file}
