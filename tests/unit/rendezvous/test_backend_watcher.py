"""A link over shared state that has ended stops watching."""

from __future__ import annotations

import queue
import threading

from rallypoint.control.membership.state import NodeId, Settings
from rallypoint.control.protocol.errors import RendezvousStateError
from rallypoint.control.protocol.messages import LinkLost, Notification
from rallypoint.rendezvous.shared_state import RendezvousBackend, SharedStateLink, Token


class Damaged(RendezvousBackend):
    """A backend whose state nobody can read, and which changes all the time."""

    def __init__(self) -> None:
        self.watchers: set[threading.Thread] = set()

    @property
    def name(self) -> str:
        """What messages call it."""
        return "damaged"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Never works."""
        raise RendezvousStateError("the state is damaged")

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Never works."""
        raise RendezvousStateError("the state is damaged")

    def wait_for_change(self, timeout: float) -> bool:
        """There always is one, soon."""
        self.watchers.add(threading.current_thread())
        threading.Event().wait(min(timeout, 0.01))
        return True


def test_the_watcher_ends_with_the_link() -> None:
    told: queue.SimpleQueue[Notification] = queue.SimpleQueue()
    backend = Damaged()
    link = SharedStateLink(backend, Settings("job", 1, 1, counts_heartbeats=True), NodeId("a", 1, 0), "a", told.put)
    lost = told.get(timeout=10.0)
    assert isinstance(lost, LinkLost)
    assert "damaged" in lost.detail
    for watcher in backend.watchers:
        watcher.join(10.0)
        assert not watcher.is_alive()
    link.close()
