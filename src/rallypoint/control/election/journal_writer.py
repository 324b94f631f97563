"""Writes a coordinator's states to etcd on a separate thread, so that no node waits for a slow etcd."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rallypoint.base.log import get_logger
from rallypoint.control.election.journal import LATER, CannotWrite, Journal, NotYet, Outcome, Written
from rallypoint.control.election.steps import Txn
from rallypoint.control.etcd.api import EtcdError
from rallypoint.control.etcd.client import EtcdClient
from rallypoint.control.membership.state import State

log = get_logger(__name__)

_PAUSE = 0.2
"""Seconds before retrying a failed write."""


class JournalWriter:
    """Writes the newest state on a separate thread. A `dispatcher.JournalSink`."""

    def __init__(self, client: EtcdClient, journal: Journal, deposed: Callable[[str], None]) -> None:
        """Nothing is written before `start`; calls `deposed` once, with the reason, when writing is impossible."""
        self._client = client
        self._journal = journal
        self._deposed = deposed
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, written: Callable[[int], None]) -> None:
        """Write appended states; call `written` with each written state's number."""
        self._thread = threading.Thread(target=self._run, args=(written,), name="rallypoint-etcd-journal", daemon=True)
        self._thread.start()

    def append(self, number: int, state: State, awaited: int) -> None:
        with self._changed:
            self._journal.append(number, state, awaited)
            self._changed.notify_all()

    def close(self, linger: float = 0.0) -> None:
        """Stop writing; a write in progress gets `linger` seconds. Idempotent."""
        with self._changed:
            self._journal.write_now()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._journal.is_idle, timeout=linger)
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, written: Callable[[int], None]) -> None:
        try:
            while (write := self._next_write()) is not None:
                self._act_on(self._write_once(write), written)
        except Exception as error:  # otherwise we would seem to coordinate without notifying any node
            log.exception("the coordinator's state cannot be written")
            self._deposed(f"its state cannot be written ({type(error).__name__}: {error})")

    def _next_write(self) -> Txn | None:
        """Wait for the next write; None after the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._journal.is_idle)
            self._changed.wait_for(lambda: self._closed or self._journal.is_awaited, timeout=LATER)
            if self._closed:
                return None
        # Do not take the lock, since only this thread creates writes:
        #   1. encoding a state with 12,500 nodes takes a tenth of a second;
        #   2. meanwhile the coordinator's loop appends the next state, which needs the lock;
        #   3. if the loop had to wait, so would the heartbeats of all nodes.
        return self._journal.next_write()

    def _write_once(self, write: Txn) -> Outcome:
        failure = None
        try:
            result = self._client.txn(write.compares, write.then, write.otherwise)
        except EtcdError as error:
            failure = error
        with self._changed:
            self._changed.notify_all()
            return self._journal.on_answer(result) if failure is None else self._journal.on_error(failure)

    def _act_on(self, outcome: Outcome, written: Callable[[int], None]) -> None:
        match outcome:
            case Written(number=number):
                written(number)
            case NotYet(why=why):
                log.debug("the coordinator's state cannot be written yet: %s", why)
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, timeout=_PAUSE)
            case CannotWrite(why=why):
                with self._changed:
                    self._closed = True
                    self._changed.notify_all()
                self._deposed(why)
