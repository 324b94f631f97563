"""The shell around the arbiter: one lock, one clock, and delivery in order with the lock released.

Laws:

1. The arbiter is only touched with the lock held; notices are handed over only with it released.
2. One thread delivers at a time, from one queue, so that a session hears of things in the order in which they happened.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.rendezvous.arbiter import Arbiter, Send
from rallypoint.rendezvous.link import Deliver
from rallypoint.rendezvous.messages import Request
from rallypoint.rendezvous.state import NodeId, Reason, Settings, State


class Hub:
    """The arbiter of one job, for use from several threads."""

    def __init__(self, settings: Settings, clock: Clock = SYSTEM_CLOCK) -> None:
        self._arbiter = Arbiter(settings)
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._deliver: dict[int, Deliver] = {}
        self._hang_up: dict[int, Callable[[], None]] = {}
        self._outbox: deque[Send] = deque()
        self._delivering = threading.Lock()
        self.on_change: Callable[[], None] = _nothing
        """Called after each event, from any thread: `wake_at` may have moved."""

    @property
    def settings(self) -> Settings:
        """What the job asked of its rendezvous."""
        return self._arbiter.settings

    @property
    def state(self) -> State:
        """The state at this moment, for those who only look."""
        return self._arbiter.state

    def now(self) -> float:
        """The hub's time, in seconds on its clock."""
        return self._clock.monotonic()

    def attach(
        self,
        deliver: Deliver,
        node: NodeId,
        *,
        address: str,
        server_address: str = "",
        leased: bool = True,
        hang_up: Callable[[], None] | None = None,
    ) -> tuple[int, NodeId]:
        """Open a session.

        Args:
            deliver: is handed the session's notices.
            node: the name that the node gives itself.
            address: the node's own, towards us.
            server_address: ours, as the node sees it.
            leased: whether the session ends when it is silent for the lease.
            hang_up: called, from any thread, when it was ended for that.

        Returns:
            The session's number, and the name that the node goes by.
        """
        with self._lock:
            session = next(self._numbers)
            self._deliver[session] = deliver
            if hang_up is not None:
                self._hang_up[session] = hang_up
            name = self._arbiter.open(
                session,
                node,
                self._clock.monotonic(),
                address=address,
                server_address=server_address,
                leased=leased,
            )
        self.on_change()
        return session, name

    def receive(self, session: int, request: Request) -> bool:
        """A request has come from a session. Returns whether the session is still one: a node that was silent for
        longer than its lease has been taken out, and must come back as a newcomer.
        """
        with self._lock:
            known = self._arbiter.has_session(session)
            self._outbox.extend(self._arbiter.receive(session, request, self._clock.monotonic()))
        self._flush()
        return known

    def detach(self, session: int, reason: Reason = Reason.LOST) -> None:
        """A session has ended."""
        with self._lock:
            self._deliver.pop(session, None)
            self._hang_up.pop(session, None)
            self._outbox.extend(self._arbiter.close(session, self._clock.monotonic(), reason))
        self._flush()

    def tick(self) -> None:
        """Time has passed."""
        with self._lock:
            self._outbox.extend(self._arbiter.tick(self._clock.monotonic()))
            ended = self._arbiter.take_ended()
            for session in ended:
                self._deliver.pop(session, None)
            hang_ups = [self._hang_up.pop(session) for session in ended if session in self._hang_up]
        for hang_up in hang_ups:
            hang_up()
        self._flush()

    def wake_at(self) -> float:
        """When `tick` should be called next, on the clock's monotonic time; infinity for never."""
        with self._lock:
            return self._arbiter.wake_at()

    def _flush(self) -> None:
        while self._outbox and self._delivering.acquire(blocking=False):
            try:
                while self._outbox:
                    session, notice = self._outbox.popleft()
                    deliver = self._deliver.get(session)
                    if deliver is not None:
                        deliver(notice)
            finally:
                self._delivering.release()
        self.on_change()


def _nothing() -> None:
    return None


class LocalLink:
    """The link of the node that hosts the hub: a session without a socket, which lives as long as the process."""

    def __init__(self, hub: Hub, node: NodeId, deliver: Deliver, address: str) -> None:
        self._hub = hub
        self._session, self.node = hub.attach(deliver, node, address=address, leased=False)

    def send(self, request: Request) -> None:
        """Say something to the hub; notices may be delivered before this returns."""
        self._hub.receive(self._session, request)

    def close(self) -> None:
        """End the session. Idempotent."""
        self._hub.detach(self._session, Reason.DEPARTED)
