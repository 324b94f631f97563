"""A store for the threads of one process: the server's own table behind a lock, without a server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeVar

from rallypoint.base.errors import UserError
from rallypoint.store.api import DEFAULT_TIMEOUT
from rallypoint.store.client import Receive, RequestStore
from rallypoint.store.errors import StoreProtocolError
from rallypoint.store.plain import Table
from rallypoint.store.wire import Op

if TYPE_CHECKING:
    from datetime import timedelta

T = TypeVar("T")


class _Shared:
    """The table and its lock. Its clients are events: each reply to an event sets it."""

    def __init__(self) -> None:
        self.table: Table[threading.Event] = Table()
        self.lock = threading.Lock()

    def execute(self, client: threading.Event, op: Op, *fields: Any) -> bytes:
        """The replies to `client`; others whom the request wakes find their events set.

        Raises:
            UserError: a number was to be added to what is none.
        """
        mine = []
        with self.lock:
            try:
                replies = self.table.execute(client, op, *fields)
            except StoreProtocolError as error:
                raise UserError(str(error)) from None
            for target, reply in replies:
                target.set()
                if target is client:
                    mine.append(reply)
        return b"".join(mine)

    def forget(self, client: threading.Event) -> None:
        """The client waits no longer."""
        with self.lock:
            self.table.forget(client)


class HashStore(RequestStore):
    """A store in memory, for the threads of this process. Clones share the content.

    Args:
        timeout: seconds, or a timedelta, that its methods wait by default.
    """

    def __init__(self, timeout: timedelta | float = DEFAULT_TIMEOUT, *, _shared: _Shared | None = None) -> None:
        super().__init__(timeout)
        self._shared = _shared or _Shared()

    def clone(self) -> HashStore:
        return HashStore(self._timeout, _shared=self._shared)

    def _where(self) -> str:
        return "this process's store"

    def _exchange(self, read: Callable[[Receive], T], op: Op, *fields: Any) -> T:
        return read(BytesIO(self._shared.execute(threading.Event(), op, *fields)).read)

    def _await(self, timeout: float, op: Op, *fields: Any) -> bool:
        event = threading.Event()
        try:
            self._shared.execute(event, op, *fields)
            event.wait(min(timeout, threading.TIMEOUT_MAX))
        finally:
            self._shared.forget(event)
        return event.is_set()  # asked only now: it may have been set between the end of the wait and the forgetting
