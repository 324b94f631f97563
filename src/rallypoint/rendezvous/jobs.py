"""A control plane for any number of jobs, outside of all of them (`rallyctl serve`): one hub for each.

A job's hub is made when the first of its nodes comes, with the settings that this node brings, and goes some time after
the last has gone: a job that is started anew under the same id then finds nothing of the old one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.log import get_logger
from rallypoint.rendezvous.handshake import HandshakeError, Hello
from rallypoint.rendezvous.hub import Hub, do_nothing

log = get_logger(__name__)

MOST_JOBS = 1024
"""Jobs at a time, so that nobody can fill the memory with names."""
_KEPT = 60.0
"""Seconds for which a job without nodes is remembered."""


class ManyJobs:
    """The hubs of all jobs whose nodes have come. A `server.Jobs`."""

    job = None

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._hubs: dict[str, Hub] = {}
        self._empty_since: dict[str, float] = {}
        self._lock = threading.Lock()
        self.on_change: Callable[[], None] = do_nothing

    def hub_for(self, hello: Hello) -> Hub:
        """The hub of the node's job, made if there is none.

        Raises:
            HandshakeError: there are too many jobs, this one was begun under another kind of rendezvous, or what the
                node asks for cannot be.
        """
        asked = hello.settings
        if not (1 <= asked.min_nodes <= asked.max_nodes and 0.1 <= asked.lease <= 86400):
            raise HandshakeError("what this node asks of the rendezvous cannot be; look at its --nnodes and lease")
        with self._lock:
            self._forget_the_old()
            hub = self._hubs.get(hello.job)
            if hub is None:
                if len(self._hubs) >= MOST_JOBS:
                    raise HandshakeError(f"this control plane has {MOST_JOBS} jobs already; start another one")
                hub = self._hubs[hello.job] = Hub(hello.settings._replace(run_id=hello.job), self._clock)
                hub.on_change = self._on_change
                log.info("job %r has come", hello.job)
            elif hub.settings.fixed_ranks != hello.settings.fixed_ranks:
                raise HandshakeError(f"job {hello.job!r} is not static on all nodes; give all the same --rdzv-backend")
            return hub

    def _on_change(self) -> None:
        self.on_change()

    def now(self) -> float:
        """The time on which `wake_at` is, in seconds."""
        return self._clock.monotonic()

    def wake_at(self) -> float:
        """When `tick` should be called next; infinity for never."""
        with self._lock:
            self._forget_the_old()
            moments = [hub.wake_at() for hub in self._hubs.values()]
            moments += [since + _KEPT for since in self._empty_since.values()]
        return min(moments, default=float("inf"))

    def tick(self) -> None:
        """Time has passed."""
        with self._lock:
            hubs = list(self._hubs.values())
        for hub in hubs:
            hub.tick()

    def _forget_the_old(self) -> None:
        now = self._clock.monotonic()
        for job, hub in list(self._hubs.items()):
            if hub.sessions:
                self._empty_since.pop(job, None)
            elif now - self._empty_since.setdefault(job, now) >= _KEPT:
                del self._hubs[job], self._empty_since[job]
                log.info("job %r has gone", job)
