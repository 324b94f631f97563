"""One agent's time as the coordinator: the server of the control plane, and the thread that writes the journal."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, TypeAlias

from rallypoint.base.descriptors import allow_nodes
from rallypoint.base.endpoint import host_name
from rallypoint.base.log import get_logger
from rallypoint.control.coordinator.dispatcher import Dispatcher, RestoredState
from rallypoint.control.coordinator.server import ControlServer
from rallypoint.control.election.journal import CannotWrite, Journal, NotYet, Outcome, Written
from rallypoint.control.election.keys import ElectionKeys
from rallypoint.control.election.steps import Listening, StartTerm, Txn
from rallypoint.control.etcd.api import EtcdError
from rallypoint.control.etcd.client import EtcdClient
from rallypoint.control.membership.state import NodeId, Settings, State

if TYPE_CHECKING:
    import socket

    from rallypoint.base.tls import ControlTls
    from rallypoint.control.protocol.observation import Snapshot

log = get_logger(__name__)

Listen: TypeAlias = "Callable[[Sequence[str]], list[socket.socket]]"

_PAUSE = 0.2
"""Seconds until a write that could not be made is tried again."""
_LAST_WRITES = 1.0
"""Seconds that the last writes of a coordinator may take."""


class JournalWriter:
    """Writes the newest state, on a thread of its own. A `dispatcher.JournalSink`."""

    def __init__(self, client: EtcdClient, journal: Journal, deposed: Callable[[str], None]) -> None:
        """Nothing is written before `start`; `deposed` is called once, with the reason, when we cannot write."""
        self._client = client
        self._journal = journal
        self._deposed = deposed
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, written: Callable[[int], None]) -> None:
        """Write what is appended; `written` is called with the number of each state that is written."""
        self._thread = threading.Thread(target=self._run, args=(written,), name="rallypoint-etcd-journal", daemon=True)
        self._thread.start()

    def append(self, number: int, state: State) -> None:
        """See `dispatcher.JournalSink.append`."""
        with self._changed:
            self._journal.append(number, state)
            self._changed.notify_all()

    def close(self, linger: float = 0.0) -> None:
        """Stop writing; a write in progress may take `linger` seconds. Idempotent."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._journal.is_idle, timeout=linger)
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, written: Callable[[int], None]) -> None:
        try:
            while (write := self._next_write()) is not None:
                self._act_on(self._write_once(write), written)
        except Exception as error:  # otherwise we would seem to coordinate, and no node would be notified of anything
            log.exception("the coordinator's state cannot be written")
            self._deposed(f"its state cannot be written ({type(error).__name__}: {error})")

    def _next_write(self) -> Txn | None:
        """Wait for something to write; None when there will be nothing more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._journal.is_idle)
            return None if self._closed else self._journal.next_write()

    def _write_once(self, write: Txn) -> Outcome:
        failure = None
        try:
            result = self._client.txn(write.compares, write.then, write.otherwise)
        except EtcdError as error:
            failure = error
        with self._changed:
            self._changed.notify_all()
            return self._journal.answered(result) if failure is None else self._journal.failed(failure)

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


class LeaderTerm:
    """A server with its dispatcher and its journal, until it is closed. Made by `start_term`."""

    def __init__(self, dispatcher: Dispatcher, writer: JournalWriter, server: ControlServer) -> None:
        self._dispatcher = dispatcher
        self._writer = writer
        self._server = server

    def snapshot(self) -> Snapshot:
        """The snapshot of the job."""
        return self._dispatcher.snapshot()

    def nodes_lost(self, nodes: Collection[NodeId], detail: str) -> None:
        """These nodes are lost."""
        self._dispatcher.nodes_lost(nodes, detail)

    def close(self, linger: float) -> None:
        """Coordinate no more; nodes have `linger` seconds to read the last notifications and disconnect."""
        # Nodes disconnect when the server ends, and that must not be taken for their departure.
        self._writer.close(_LAST_WRITES if linger else 0.0)
        self._server.close(linger, f"{host_name()} no longer hosts it")


def start_term(
    client: EtcdClient,
    keys: ElectionKeys,
    settings: Settings,
    request: StartTerm,
    deposed: Callable[[str], None],
    listen: Listen,
    tls: ControlTls | None = None,
) -> tuple[LeaderTerm, Listening]:
    """Coordinate the job from what was taken over; returns the term, and where it listens.

    Args:
        client: to write the journal with.
        keys, settings: of the job.
        request: what the term begins with.
        deposed: called once, from any thread, with the reason, when nothing can be written any more.
        listen: opens sockets at these addresses, all on one port.
        tls: of the control plane, if it has any.

    Raises:
        OSError: no socket can be opened.
        UserError: the address to listen at is none of this machine's.
    """
    takeover = request.takeover
    incarnation = takeover.incarnation or secrets.token_hex(8)
    writer = JournalWriter(client, Journal(keys, request.fence, incarnation, takeover), deposed)
    dispatcher = Dispatcher(settings, restored=RestoredState(incarnation, takeover.state), journal=writer)
    allow_nodes(settings.max_nodes)
    secret = secrets.token_hex(16)
    writer.start(dispatcher.journal_written)
    try:
        server = ControlServer(dispatcher, listen(request.addresses), keys=lambda _job: (secret.encode(),), tls=tls)
    except BaseException:
        writer.close()
        raise
    return LeaderTerm(dispatcher, writer, server), Listening(request.addresses, server.port, secret)
