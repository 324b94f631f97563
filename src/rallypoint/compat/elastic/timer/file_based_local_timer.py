"""In the place of `torch.distributed.elastic.timer.file_based_local_timer`."""

from __future__ import annotations

import math
import os
import select
import threading
import time

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.kernel import Wakeup
from rallypoint.base.log import get_logger
from rallypoint.compat.reexports import reexports_of
from rallypoint.watchdog.client import FileTimerClient
from rallypoint.watchdog.requests import FileTimerRequest
from rallypoint.watchdog.watchdog import Report, Watchdog

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]

__getattr__ = reexports_of(__name__)

log = get_logger(__name__)


class FileTimerServer:
    """A `Watchdog` on a thread of its own, for programs that have no agent (contract section 8). Unlike torch's, it
    does not end its own process when it has ended another.

    It enforces the timers of any process of this host that writes to its pipe. Nothing is opened before `start`.

    Args:
        file_path: of the pipe; a file of that name is removed.
        run_id: of the job, for the log.
        max_interval: seconds at most between two steps.
        daemon: whether the thread lets the program end.
        log_event: called with each event, and its timer if there is one.
    """

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Report | None = None,
    ) -> None:
        self._path = file_path
        self._run_id = run_id
        self._max_interval = max_interval
        self._daemon = daemon
        self._log_event = log_event
        self._stepped_at = time.time()
        self._running: tuple[Watchdog, threading.Thread, Wakeup] | None = None

    def start(self) -> None:
        """Make the pipe and start the thread. Idempotent.

        Raises:
            UserError: the pipe cannot be made; says why.
        """
        if self._running is not None:
            return
        own = os.getpid()
        watchdog = Watchdog(self._path, lambda pid: pid not in (1, own), run_id=self._run_id, report=self._log_event)
        ending = Wakeup()
        thread = threading.Thread(
            target=self._run, args=(watchdog, ending), name="rallypoint-watchdog", daemon=self._daemon
        )
        self._running = watchdog, thread, ending
        thread.start()

    def stop(self) -> None:
        """End the thread and remove the pipe. Idempotent."""
        if self._running is None:
            return
        watchdog, thread, ending = self._running
        self._running = None
        ending.set()
        thread.join()
        ending.close()
        watchdog.close()

    def get_last_progress_time(self) -> int:
        """Epoch seconds of the last step once a client has written, else of now."""
        client_seen = self._running is not None and self._running[0].client_seen
        return int(self._stepped_at if client_seen else time.time())

    def _run(self, watchdog: Watchdog, ending: Wakeup) -> None:
        while True:
            poller = select.poll()
            for fd in (ending.fileno(), *watchdog.fds()):
                poller.register(fd, select.POLLIN)
            seconds = min(self._max_interval, watchdog.wake_at() - SYSTEM_CLOCK.monotonic())
            ready = poller.poll(math.ceil(max(0.0, seconds) * 1000))
            if any(fd == ending.fileno() for fd, _ in ready):
                return
            try:
                watchdog.step()
            except Exception:
                log.exception("the watchdog goes on after an error")
            self._stepped_at = time.time()
