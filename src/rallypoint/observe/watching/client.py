"""The watcher's side of the control plane: a session that belongs to no node, for commands like `rallyctl status`."""

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
from rallypoint.control.protocol.messages import CollectedPart, CollectKind, SessionEnded, Taken
from rallypoint.observe.watching.messages import (
    MAX_SNAPSHOT,
    CollectCommand,
    CommandReply,
    JobList,
    JobSummary,
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
"""Seconds per connection attempt."""
_MAX_LIST = 16 * 1024 * 1024
"""Maximum size of a list of jobs in bytes: a control plane has 1,024 jobs, and lists 100 ended ones."""
_MAX_BUNDLES, _MAX_COLLECTED = 128 * 1024 * 1024, 64 * 1024 * 1024
"""Maximum number of bytes in nodes' incomplete answers, including names. A control plane requests no more at a time
(`watching.collection`).
"""

Observation = Snapshot | JobList | CommandReply | CollectedPart


class UnreachableError(RallypointError):
    """No answer arrived, or the session was lost."""


class WatcherSession:
    """A session; use it as an async context manager."""

    def __init__(self, where: DialTarget, job: str) -> None:
        """Prepare the session without opening it.

        Args:
            where: the control plane, with its key and TLS.
            job: the job's id; empty for the only job, or for the list of jobs.
        """
        self._where = where
        self._settings = Settings(job, 1, 1)
        self._session: ClientSession | None = None
        self._data = bytearray()
        self._jobs: tuple[list[JobSummary], list[JobSummary]] = ([], [])
        self._list_size = 0
        self._unfinished: dict[str, int] = {}
        """Bytes in incomplete answers, by node name."""
        self._unfinished_size = 0
        self._most_unfinished = _MAX_COLLECTED

    async def __aenter__(self) -> WatcherSession:
        """Open the session unless it is open."""
        return self if self._session is not None else await self.open()

    async def open(self) -> WatcherSession:
        """Open the session. The caller must still leave it as a context manager.

        Raises:
            UnreachableError: no answer. HandshakeError: the answering service is not the right one; the text gives the
                reason.
        """
        dialer = Dialer(self._where, self._settings, is_watcher=True)
        try:
            self._session = await dialer.dial(_CONNECT)
        except RETRYABLE as error:
            raise UnreachableError(
                f"no control plane answers at {self._where.endpoint} ({error_words(error) or dialer.unfinished}); "
                "check the endpoint, and that the job is running"
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
        """Send a message. Raises UsageError if it contains a value that no control plane accepts."""
        if isinstance(request, CollectCommand):
            self._most_unfinished = _MAX_BUNDLES if request.kind is CollectKind.BUNDLE else _MAX_COLLECTED
        try:
            payload = codec.sendable(request)
        except codec.NotSendable as error:
            raise UsageError(str(error)) from None
        self._open().send(payload)

    async def snapshot(self, request: WatchRequest) -> Snapshot:
        """Request a snapshot and wait for it; ignore all other messages.

        Raises:
            UnreachableError: the session was lost.
            RallypointError: the request was refused, for the reason in the text.
        """
        self.send(request)
        while not isinstance(seen := await self.receive(), Snapshot):
            if isinstance(seen, CommandReply):
                raise RallypointError(seen.detail)
        return seen

    async def receive(self) -> Observation:
        """Receive the next message; join the parts of a snapshot or list, and acknowledge every collected part.

        Raises:
            UnreachableError: the session was lost.
        """
        while True:
            message, size = await self._receive_message()
            if isinstance(message, CollectedPart):
                self._count(message)
                if message.is_last:
                    self.send(Taken(message.number))
            if isinstance(message, JobList):
                running, ended = self._jobs
                running += message.jobs
                ended += message.ended
                self._list_size = self._bounded(self._list_size + size, _MAX_LIST)
                if not message.is_last:
                    continue
                self._jobs, self._list_size = ([], []), 0
                return JobList(tuple(running), tuple(ended))
            if not isinstance(message, SnapshotPart):
                return message
            self._data += message.data
            self._bounded(len(self._data), MAX_SNAPSHOT)
            if message.is_last:
                data, self._data = bytes(self._data), bytearray()
                return decode_snapshot(data)._replace(endpoint=str(self._where.endpoint))

    def _count(self, part: CollectedPart) -> None:
        """Count a node's bytes until its answer is complete. Only the collector stores them."""
        before = self._unfinished.pop(part.node, None)
        size = (len(part.node.encode()) if before is None else before) + len(part.data)
        self._unfinished_size += size - (before or 0)
        self._bounded(self._unfinished_size, self._most_unfinished)
        if part.is_last:
            self._unfinished_size -= size
        else:
            self._unfinished[part.node] = size

    def _bounded(self, size: int, most: int) -> int:
        if size > most:
            raise UnreachableError(
                f"the control plane at {self._where.endpoint} sent more data than a control plane can send; check "
                "the endpoint"
            )
        return size

    def _open(self) -> ClientSession:
        if self._session is None:
            raise RuntimeError("the session is not open; use it as an async context manager")
        return self._session

    async def _receive_message(self) -> tuple[WatcherNotification, int]:
        """Receive the next message. Returns it and its size."""
        session = self._open()
        try:
            payload = await session.receive()
            message = decode_watcher_notification(payload)
        except (OSError, FrameError, codec.CodecError) as error:
            raise self._lost_error(str(error)) from None
        if isinstance(message, SessionEnded):
            raise self._lost_error(message.detail)
        return message, len(payload)

    def _lost_error(self, why: str) -> UnreachableError:
        return UnreachableError(f"the control plane at {self._where.endpoint} was lost ({why})")


async def with_all_nodes(seen: Snapshot, ask: Callable[[WatchRequest], Awaitable[Snapshot]]) -> Snapshot:
    """Complete a snapshot that has only a few rows: request all nodes' rows in parts."""
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
    """Open a session with the first coordinator that answers. The caller must leave it as a context manager.

    Args:
        targets: where the coordinator may be.
        job: see `WatcherSession`.

    Raises:
        UnreachableError: none answers. If one answers that it cannot be used, its error is raised instead.
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
    """The operator of a command, for every node's log: user@host."""
    return f"{user_name(os.getuid())}@{socket.gethostname()}"


def user_name(uid: int) -> str:
    """The name of a user on this machine, or the number if unnamed."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
