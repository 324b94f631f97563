"""A link without a socket, and a timer, for the node whose process hosts the dispatcher."""

from __future__ import annotations

import threading

from rallypoint.coordinator.dispatcher import Dispatcher
from rallypoint.coordinator.session_registry import SessionRecord
from rallypoint.membership.state import NodeId, Reason
from rallypoint.protocol.messages import Deliver, Request


class TimerThread:
    """Ticks a dispatcher that has no server, on a thread of its own while there is something to wait for."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._closed = False
        dispatcher.on_change = self._arm

    def close(self) -> None:
        """Stop ticking. Idempotent."""
        with self._lock:
            self._closed = True
            self._cancel()

    def _arm(self) -> None:
        at = self._dispatcher.wake_at()
        with self._lock:
            self._cancel()
            if self._closed or at == float("inf"):
                return
            self._timer = threading.Timer(max(0.0, at - self._dispatcher.now()), self._dispatcher.tick)
            self._timer.daemon = True
            self._timer.start()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class LocalLink:
    """The link of the node that hosts the dispatcher: a session without a socket, which lives as long as the
    process."""

    def __init__(self, dispatcher: Dispatcher, node: NodeId, deliver: Deliver, address: str) -> None:
        self._dispatcher = dispatcher
        self.address = address
        self._session, self.node = dispatcher.attach(
            deliver, SessionRecord(node, address, leased=False, in_this_process=True, local=True)
        )

    @property
    def lease(self) -> float:
        """See `Link.lease`."""
        return self._dispatcher.settings.lease

    def send(self, request: Request) -> None:
        """Send a request to the dispatcher; notifications may be delivered before this returns."""
        self._dispatcher.receive(self._session, request)

    def close(self) -> None:
        """End the session. Idempotent."""
        self._dispatcher.detach(self._session, Reason.DEPARTED)
