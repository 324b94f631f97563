"""The server's side of a control connection at the message level: the handshake, then a node's session.

Runs on the loop's thread. It has no socket: its connection sends for it. The simulator drives the same class.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from rallypoint.base.log import printable
from rallypoint.control.coordinator.extensions import GUEST, load
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import NodeId, Reason
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.handshake import (
    PROTOCOL_VERSION,
    Challenge,
    HandshakeError,
    HandshakeRefused,
    Hello,
    Proof,
    ServerHandshake,
    Welcome,
    version_error,
)
from rallypoint.control.protocol.messages import Heartbeat, JoinRequest, LeaveRequest, SessionEnded

if TYPE_CHECKING:
    from rallypoint.control.coordinator.dispatcher import Dispatcher
    from rallypoint.control.coordinator.jobs import ServedJobs
    from rallypoint.control.protocol.handshake import Keys
    from rallypoint.control.protocol.signing import Signers


HEARTBEAT = codec.encode(Heartbeat())

_answer_to = lru_cache(maxsize=8)(lambda number: codec.encode(Heartbeat(number)))
"""The answer to this many heartbeats: usually the same bytes."""
_session_ended = lru_cache(maxsize=64)(lambda why, is_permanent: codec.sendable(SessionEnded(why, is_permanent)))
"""A session's last message. When all nodes return, their earlier sessions end for the same reason."""
_MANY_HEARTBEATS_PER_LEASE = 2.1
"""Heartbeats per lease if there are many sessions; otherwise three. More than two, so that less than half a lease
passes between two of them: silence of all nodes for half a lease would look like our own outage
(`control.coordinator.sessions`)."""


class SessionOutput(Protocol):
    """The connection of a session, from a server or the simulator."""

    def send(self, *payloads: bytes) -> None:
        """Send messages, signed if the session is."""

    def post(self, message: Any) -> None:
        """Send a message at the end of the turn, in the order of the calls."""

    def disconnect(self, why: str) -> None:
        """End the session, as the coordinator decided."""

    def describe(self, hello: Hello) -> SessionRecord:
        """Describe the session of a node with this greeting after the handshake."""

    @property
    def is_written(self) -> bool:
        """Whether all posted messages were written."""

    @property
    def answers_all(self) -> bool:
        """Whether to answer every heartbeat because there are few sessions, rather than every second one."""


class GuestSession(Protocol):
    """Session of a connection without a node."""

    def receive(self, payload: bytes) -> None:
        """Handle one message. Raises CodecError if it is malformed or not allowed here."""

    def detach(self) -> None:
        """Handle the end of the connection."""


class ServerSession:
    """One connection, from its first message on."""

    def __init__(self, jobs: ServedJobs, keys: Keys | None, nonce: bytes, output: SessionOutput, peer: str) -> None:
        """Wait for the greeting.

        Args:
            jobs: the jobs whose nodes may connect.
            keys: nodes must prove that they have one of these keys; None for no keys.
            nonce: bytes that no other handshake used.
            output: the connection.
            peer: its address.
        """
        self._jobs = jobs
        self._handshake = ServerHandshake(jobs.job, keys, nonce)
        self._transcript = b""
        self._output = output
        self._peer = peer
        self._dispatcher: Dispatcher | None = None
        self._guest: GuestSession | None = None
        """Message handler of a connection without a node."""
        self.is_open = False
        """Whether the handshake is complete."""
        self.only_asked = False
        """Whether the peer only made a query, such as for the list of jobs, and got the answer: it is no session."""
        self._leaving = False
        self._answered_last = False
        """Whether the last heartbeat was answered."""
        self._node: NodeId | None = None
        self._unanswered = 0
        """Heartbeats that no answer has counted yet."""
        self.number = 0
        self.signers: Signers | None = None
        self.end_reason = "its session has ended"

    @property
    def node_name(self) -> str:
        """The host name in the node's greeting; empty before it."""
        return "" if self._node is None else printable(str(self._node), 64)

    def receive(self, payload: bytes) -> str | None:
        """Handle one message. Returns why the connection must be closed; None if it continues.

        Raises:
            CodecError: the message is malformed, or not allowed here.
            SignatureError: the message's signature is missing or wrong.
        """
        if self.signers is not None and self.is_open:
            payload = self.signers.incoming.verify(payload)
        if self._guest is not None:
            self._guest.receive(payload)
            return None
        if self._dispatcher is not None:
            if payload == HEARTBEAT:
                return self.heartbeat()
            request = codec.decode_request(payload)
            if isinstance(request, Heartbeat):  # in another encoding than ours
                return self.heartbeat()
            if isinstance(request, (LeaveRequest, JoinRequest)):
                self._leaving = isinstance(request, LeaveRequest)
            return None if self._dispatcher.receive(self.number, request) else self.end_reason
        if self.only_asked:
            return None
        if self._handshake.greeted is None:
            answer = self._answer_to_hello(payload)
        else:
            answer = self._handshake.proof(codec.decode(payload, Proof), self._transcript)
        greeted = self._handshake.greeted
        if answer is None and greeted is not None:
            try:
                self._open(greeted)
            except HandshakeError as error:
                answer = HandshakeRefused(str(error))
        return None if answer is None else self._answer(answer)

    def refuse(self, sentence: str) -> None:
        """Send the reason for a refusal; the caller must close the connection."""
        self._output.send(codec.encode(HandshakeRefused(sentence)))

    def heartbeat(self) -> str | None:
        """Handle a heartbeat. Returns the same as `receive`."""
        assert self._dispatcher is not None
        if not self._dispatcher.heartbeat(self.number):
            return self.end_reason
        self._unanswered += 1
        self._answered_last = not self._answered_last or self._output.answers_all
        if self._answered_last:
            # Answer at once. While messages wait for the journal or for the end of the turn, the answer only shows that
            # we are alive: the end of the node's round might be among them.
            waits = self._dispatcher.holds_messages or not self._output.is_written
            counted = 0 if waits or not self._dispatcher.is_leader else self._unanswered
            self._output.send(_answer_to(counted))
            self._unanswered -= counted
        return None

    def end(self, why: str, *, is_permanent: bool = False) -> None:
        """Send the session's end with the reason, if there is a session. See `SessionEnded.is_permanent`."""
        if self.is_open:
            self._output.send(_session_ended(why, is_permanent))

    def detach(self, how: str) -> None:
        """Handle the end of the connection, as `how` describes. Idempotent."""
        dispatcher, self._dispatcher = self._dispatcher, None
        guest, self._guest = self._guest, None
        self.is_open = False
        if guest is not None:
            guest.detach()
        if dispatcher is not None:
            dispatcher.detach(self.number, Reason.DEPARTED if self._leaving else Reason.LOST, how)

    def _answer(self, answer: Challenge | HandshakeRefused) -> str | None:
        if isinstance(answer, HandshakeRefused):
            self.refuse(answer.sentence)
            return answer.sentence
        self._output.send(codec.encode(answer))
        return None

    def _answer_to_hello(self, payload: bytes) -> Challenge | HandshakeRefused | None:
        try:
            hello = codec.decode(payload, Hello)
        except codec.CodecError as error:  # perhaps another version, with other fields
            version = codec.version_of(payload)
            return HandshakeRefused(str(error) if version == PROTOCOL_VERSION else version_error(version))
        self._node = hello.node
        answer = self._handshake.hello(hello)
        if isinstance(answer, Challenge):
            from rallypoint.control.protocol.signing import transcript_of

            self._transcript = transcript_of(payload, codec.encode(answer))
        return answer

    def _open(self, hello: Hello) -> None:
        if hello.only_greets:
            self._answer_greeting(hello)
            return
        if hello.is_watcher:
            self._open_guest(hello)
            return
        dispatcher = self._jobs.dispatcher_for(hello, self._peer)
        self.signers = self._handshake.signers
        record = self._output.describe(hello)
        lease = dispatcher.settings.lease
        interval = 0.0 if self._output.answers_all else lease / _MANY_HEARTBEATS_PER_LEASE
        welcome = Welcome(lease, dispatcher.incarnation, self._jobs.job is not None, interval)
        self._output.send(codec.encode(welcome))  # as the session's first frame
        self.number = dispatcher.attach(self._output.post, record, self._on_disconnect)
        self._dispatcher, self.is_open = dispatcher, True

    def _answer_greeting(self, hello: Hello) -> None:
        """Answer a greeting without opening a session: the peer learns that it would be accepted, and our time."""
        self.signers = self._handshake.signers
        self._output.describe(hello)
        lease = hello.settings.lease
        self._output.send(codec.encode(Welcome(lease, "", self._jobs.job is not None, timestamp=time.time())))
        self.only_asked = True

    def _open_guest(self, hello: Hello) -> None:
        """Open a watcher's session. If it names no job, and there are several or none, send only an answer."""
        open_guest = load(GUEST)
        self.signers = self._handshake.signers
        record = self._output.describe(hello)
        trusted = self.signers is not None or record.is_own_user
        self._guest = open_guest(self._jobs, hello, self._output, self._on_disconnect, is_trusted=trusted)
        self.is_open, self.only_asked = self._guest is not None, self._guest is None

    def _on_disconnect(self, why: str) -> None:
        self.end_reason = why
        self._output.disconnect(why)
