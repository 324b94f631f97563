"""Watches, and the thread on which their callbacks run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rallypoint.base.log import get_logger
from rallypoint.base.loop import LoopThread
from rallypoint.etcd.api import WatchCancelled, WatchEnd, WatchEvent

if TYPE_CHECKING:
    import concurrent.futures

    from rallypoint.etcd.cluster import Cluster

log = get_logger(__name__)


class Watch:
    """A watch that runs until it is closed or lost. Made by `EtcdClient.watch`."""

    def __init__(
        self,
        callbacks: CallbackThread,
        on_events: Callable[[Sequence[WatchEvent]], None],
        on_lost: Callable[[WatchEnd], None],
        on_ended: Callable[[Watch], None],
    ) -> None:
        self._on_ended = on_ended
        self._callback_thread = callbacks
        self._on_events = on_events
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._closed = False
        self._task: concurrent.futures.Future[None] | None = None

    def begin(self, loop: LoopThread, cluster: Cluster, key: bytes, prefix: bool, from_revision: int) -> None:
        """Follow, on the loop. Called once, by the client."""
        following = loop.submit(self._follow(cluster, key, prefix, from_revision))
        with self._lock:
            self._task = following
            closed = self._closed
        if closed:
            following.cancel()

    async def _follow(self, cluster: Cluster, key: bytes, prefix: bool, from_revision: int) -> None:
        from rallypoint.etcd.watch_stream import WatchStream

        try:
            lost = await WatchStream(cluster, key, prefix, from_revision, self._call_on_events).run()
        except Exception as error:
            log.exception("a watch of etcd broke")
            lost = WatchCancelled(f"the watch broke: {type(error).__name__}: {error}")
        self._callback_thread.submit(lambda: self._call_on_lost(lost))

    def _call_on_events(self, events: Sequence[WatchEvent]) -> None:
        self._callback_thread.submit(lambda: self._may_call() and self._on_events(events))

    def _call_on_lost(self, lost: WatchEnd) -> None:
        if self._may_call():
            self.close()
            self._on_lost(lost)

    def _may_call(self) -> bool:
        with self._lock:
            return not self._closed

    def close(self) -> None:
        """Begin no more callbacks; a running one continues. Idempotent; does not wait."""
        with self._lock:
            self._closed = True
            following = self._task
        if following is not None:
            following.cancel()
        self._on_ended(self)


class CallbackThread:
    """The thread on which callbacks run, one after the other."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rallypoint-etcd-watches", daemon=True)
        self._thread.start()

    def submit(self, callback: Callable[[], object]) -> None:
        """Run it, after those before."""
        self._queue.put(callback)

    def stop(self) -> None:
        """End when all that was given so far has run; wait for that, unless this is the thread itself."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (callback := self._queue.get()) is not None:
            try:
                callback()
            except Exception:
                log.exception("a callback of a watch of etcd failed")
