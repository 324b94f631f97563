"""A watcher's end of the control plane: one session that is never a node, for commands such as `rallyctl status`."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from rallypoint.base.endpoint import keep_alive
from rallypoint.base.errors import RallypointError, UsageError
from rallypoint.control.client.dialing import RETRYABLE, ClientSession, Dialer, DialTarget, error_words
from rallypoint.control.membership.state import Settings
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.errors import FrameError
from rallypoint.control.protocol.handshake import HandshakeError
from rallypoint.control.protocol.messages import CollectedPart, SessionEnded, Taken
from rallypoint.control.protocol.observation import (
    MAX_SNAPSHOT,
    CommandReply,
    JobList,
    ListRequest,
    NodeView,
    Snapshot,
    SnapshotPart,
    WatcherNotification,
    WatcherRequest,
    WatchRequest,
    decode_snapshot,
    decode_watcher_notification,
)

_CONNECT = 5.0
"""Seconds for one attempt at a connection."""

Observation = Snapshot | JobList | CommandReply | CollectedPart


class UnreachableError(RallypointError):
    """There is no answer, or the session was lost."""


class WatcherSession:
    """An open session, used as an async context manager."""

    def __init__(self, where: DialTarget, job: str) -> None:
        """Nothing is opened yet.

        Args:
            where: the control plane, with key and TLS.
            job: the job's id; empty for the only job, or for the list of jobs.
        """
        self._where = where
        self._settings = Settings(job, 1, 1)
        self._session: ClientSession | None = None
        self._data = bytearray()
        self._jobs = JobList(())

    async def __aenter__(self) -> WatcherSession:
        """Open the session, unless it is open."""
        return self if self._session is not None else await self.open()

    async def open(self) -> WatcherSession:
        """Open the session; it must still be left as a context manager.

        Raises:
            UnreachableError: there is no answer. HandshakeError: the service that answers is not the right one; the
                text says why.
        """
        dialer = Dialer(self._where, self._settings, is_watcher=True)
        try:
            self._session = await dialer.dial(_CONNECT)
        except RETRYABLE as error:
            raise UnreachableError(
                f"no control plane answers at {self._where.endpoint} ({error_words(error) or dialer.unfinished}); "
                "check the endpoint, and that the job runs"
            ) from None
        keep_alive(self._session.writer.get_extra_info("socket"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Disconnect."""
        if self._session is not None:
            self._session.writer.close()

    def send(self, request: WatcherRequest | ListRequest) -> None:
        """Send a message. Raises UsageError: it has a value that no control plane accepts."""
        try:
            payload = codec.sendable(request)
        except codec.NotSendable as error:
            raise UsageError(str(error)) from None
        self._opened().send(payload)

    async def snapshot(self, request: WatchRequest) -> Snapshot:
        """Ask for a snapshot, and wait for it; what else arrives is passed over.

        Raises:
            UnreachableError: the session was lost.
            RallypointError: the request is refused, for the reason that it gives.
        """
        self.send(request)
        while not isinstance(seen := await self.receive(), Snapshot):
            if isinstance(seen, CommandReply):
                raise RallypointError(seen.detail)
        return seen

    async def receive(self) -> Observation:
        """Wait for the next message; parts of a snapshot, or of a list, are put together. Whoever sends is told
        what has been read.

        Raises:
            UnreachableError: the session was lost.
        """
        while True:
            message = await self._next()
            if isinstance(message, CollectedPart | SnapshotPart) and message.is_last:
                self.send(Taken(message.number if isinstance(message, CollectedPart) else 0))
            if isinstance(message, JobList):
                self._jobs = JobList(self._jobs.jobs + message.jobs, self._jobs.ended + message.ended)
                if not message.is_last:
                    continue
                listed, self._jobs = self._jobs, JobList(())
                return listed
            if not isinstance(message, SnapshotPart):
                return message
            self._data += message.data
            if len(self._data) > MAX_SNAPSHOT:
                raise UnreachableError(
                    f"the control plane at {self._where.endpoint} sends more data than a control plane can have"
                )
            if message.is_last:
                data, self._data = bytes(self._data), bytearray()
                return decode_snapshot(data)._replace(endpoint=str(self._where.endpoint))

    def _opened(self) -> ClientSession:
        if self._session is None:
            raise RuntimeError("the session is not open; use it as an async context manager")
        return self._session

    async def _next(self) -> WatcherNotification:
        session = self._opened()
        try:
            message = decode_watcher_notification(await session.receive())
        except (OSError, FrameError, codec.CodecError) as error:
            raise self._lost(str(error)) from None
        if isinstance(message, SessionEnded):
            raise self._lost(message.detail)
        return message

    def _lost(self, why: str) -> UnreachableError:
        return UnreachableError(f"the control plane at {self._where.endpoint} was lost ({why})")


async def with_all_nodes(seen: Snapshot, ask: Callable[[WatchRequest], Awaitable[Snapshot]]) -> Snapshot:
    """The snapshot with the rows of all nodes, which are asked for in parts where it has only a few of them."""
    if not seen.not_shown:
        return seen
    rows: list[NodeView] = []
    left = 1
    while left:
        part = await ask(WatchRequest(first=len(rows)))
        rows += part.nodes
        left = part.not_shown if part.nodes else 0
    return seen._replace(nodes=tuple(rows), not_shown=left)


async def open_session(targets: Sequence[DialTarget], job: str) -> WatcherSession:
    """Open a session with the first coordinator that answers; it must be left as a context manager.

    Args:
        targets: the places where the coordinator may be.
        job: see `WatcherSession`.

    Raises:
        UnreachableError: none answers; or one answers and says why it cannot be used, which is more informative.
    """
    failure = refusal = None
    for target in targets:
        try:
            return await WatcherSession(target, job).open()
        except UnreachableError as error:
            failure = failure or error
        except HandshakeError as error:
            refusal = refusal or UnreachableError(str(error))
    raise refusal or failure or UnreachableError("this job has no coordinator at the moment; try again")


def operator_name() -> str:
    """The operator that gives a command, for the log of every node: user@host."""
    return f"{user_name(os.getuid())}@{socket.gethostname()}"


def user_name(uid: int) -> str:
    """The name of a user of this machine, or the number if there is no name for it."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
