"""`c10d` with `store_type=file`: the state in a file that all nodes share (contract section 4.4)."""

from __future__ import annotations

import os
import time

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import outward_address
from rallypoint.control.protocol.errors import RendezvousConnectionError
from rallypoint.control.protocol.messages import Deliver, Link
from rallypoint.rendezvous.backends.options import rank_hint, settings_of, worker_stores
from rallypoint.rendezvous.control_plane import ControlPlane, own_node
from rallypoint.rendezvous.elastic import ElasticHandler
from rallypoint.rendezvous.handler import RendezvousHandler
from rallypoint.rendezvous.params import RendezvousParameters
from rallypoint.rendezvous.shared_state import SharedStateLink, StoreRendezvousBackend
from rallypoint.store.errors import StoreError
from rallypoint.store.filestore import FileStore

_POLL_INTERVAL = 0.05
"""Seconds between two looks at the file's size. It may lie on a network, where no kernel tells of changes."""


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The handler for `c10d` parameters with `store_type=file`; the endpoint is the file's path.

    Without an endpoint the file is a private temporary one, for a job of one node.

    Raises:
        UserError: an option cannot work.
    """
    return ElasticHandler(params.backend, _StateInFile(params), worker_stores(params))


class _StateInFile(ControlPlane):
    """The file, and this node's link to what is in it."""

    def __init__(self, params: RendezvousParameters) -> None:
        where = f"in {params.endpoint}" if params.endpoint else ""
        settings = settings_of(params, counts_heartbeats=True)
        super().__init__(settings, where, params.endpoint_flag, rank_hint(params))
        self._path = params.endpoint
        self._local_addr = params.local_addr
        self._private = not params.endpoint

    def open(self, deliver: Deliver, deadline: Deadline) -> Link:
        """Open the file and begin."""
        if self._private:
            from tempfile import mkstemp

            handle, self._path = mkstemp(prefix="rallypoint_rendezvous_")
            os.close(handle)
        address = self._local_addr or outward_address()
        try:
            backend = FileBackend(self._path, self.settings.run_id)
        except StoreError as error:
            raise RendezvousConnectionError(f"--rdzv-endpoint: {error}, which all nodes share") from None
        node = own_node(address)
        return SharedStateLink(backend, self.settings, node, address, deliver)

    def close(self) -> None:
        """Remove a file of our own. One that the user named stays: others may still have to read how the job ended."""
        if self._private and self._path and os.path.exists(self._path):
            os.unlink(self._path)


class FileBackend(StoreRendezvousBackend):
    """The state in a file store, which grows with every change: its size says whether there is something new."""

    def __init__(self, path: str, run_id: str) -> None:
        super().__init__(FileStore(path), run_id)
        self._path = path
        self._size = 0

    def wait_for_change(self, timeout: float) -> bool:
        """Wait until the file has another size, for `timeout` seconds at most; returns whether it has."""
        deadline = Deadline.after(timeout)
        while not deadline.expired:
            size = os.path.getsize(self._path) if os.path.exists(self._path) else 0
            if size != self._size:
                self._size = size
                return True
            time.sleep(min(_POLL_INTERVAL, deadline.remaining()))
        return False
