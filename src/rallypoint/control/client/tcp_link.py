"""A node's link to the control server over TCP: dials, talks, sends heartbeats, and dials again when the session is
lost.

The effect of each event in each state (`LinkState`). "-" is none; in CLOSING and ENDED no event has an effect:

    event                          DIALING           OPEN              CUT               IDLE
    -----------------------------  ----------------  ----------------  ----------------  ----------------
    a request                      is kept           is kept and sent  is kept; sent     is kept;
                                                                       after the cut     a join: DIALING
    a request of ours that cannot  ENDED (a)         ENDED (a)         ENDED (a)         ENDED (a)
      be sent (b)
    a welcome                      OPEN              -                 -                 -
    `HandshakeError`               ENDED (law 3)     -                 -                 -
    the timeout of law 2           ENDED             -                 -                 -
    a notification                 -                 is delivered      is not read yet   -
    a drill: `Fault.CUT`           -                 CUT, then OPEN    is not read yet   -
    an unreadable message (b)      -                 ENDED (a)         is not read yet   -
    `SessionEnded`, permanent      -                 ENDED             is not read yet   -
    `SessionEnded`                 -                 DIALING (c)       is not read yet   -
    the connection breaks, or has  -                 DIALING (c)       is not read yet   -
      bytes that are no frame
    silence (`_receive`)           -                 DIALING (c)       -                 -
    the control plane has moved    attempt at once   DIALING (c)       as OPEN, after    -
                                                                       the cut
    `close`                        ENDED             CLOSING, then     CLOSING, then     ENDED
                                                     ENDED (d)         ENDED (d)
    an exception in our own code   ENDED (a)         ENDED (a)         ENDED (a)         ENDED (a)

    (a) The next session would fail for the same cause. If this one is open, `LeaveRequest.why` informs the server.
    (b) If the job can continue without that kind of message (`codec.EXPENDABLE`), it is dropped and logged instead.
    (c) ENDED if the job has ended or all its nodes have succeeded; IDLE if this node's last join was refused: then the
        server may go, which matters only to a node that joins again.
    (d) First the node sends the requests that the cut held back, and a `LeaveRequest`.

ENDED delivers `LinkLost`, or `JobEnded` if all nodes have succeeded; nothing if `JobEnded` was delivered before, or
after `close`. Only `_close_session` closes a session, except for law 5.

Laws:

1. Losing a session does not end the job: running workers keep running, and the node sends its state (`resume_state`) to
   the next server that answers at the endpoint, the same or a new one.
2. The link gives up only when the node can do nothing without the control plane (it waits for a place, or for the
   answer to a failure or a success) and has been without it for the whole timeout.
3. The first session is an exception: an error that waiting cannot solve (`HandshakeError`) ends the link at once. Later
   it is just a failed attempt: the right server might return while the workers run.
4. If the control plane moves, the link follows: it looks up the place before each attempt (`EndpointResolver`). On
   `recheck_endpoint` it ends a session or an attempt at the previous place.
5. A silent connection stays open until the server answers on the next one. Otherwise the server would first see the
   connection's end after the silence, which means the end of a node.
6. Short-lived sessions are followed by growing pauses (`Redialer`), and do not restart the timeout of law 2.
7. A drill that cuts the link (`Fault.CUT`) silences both sides: nothing is sent, read or dialed meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
from collections import deque
from enum import Enum, auto

from rallypoint.base.clock import BOOT_CLOCK, SYSTEM_CLOCK, Deadline
from rallypoint.base.endpoint import is_acknowledged, unmapped_address, usable_address
from rallypoint.base.log import RateLimitedLog, get_logger
from rallypoint.base.loop import shared_loop
from rallypoint.control.client.dialing import ClientSession, EndpointResolver, Redialer, error_words, progress_spread
from rallypoint.control.membership.state import NodeId, Outcome, Settings, Verdict
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.errors import FrameError
from rallypoint.control.protocol.handshake import HandshakeError
from rallypoint.control.protocol.messages import (
    Deliver,
    Fault,
    FaultRequested,
    Heartbeat,
    JobEnded,
    LeaveRequest,
    LinkDown,
    LinkLost,
    LinkOpened,
    LinkUp,
    Notification,
    ProgressRequest,
    Request,
    SessionEnded,
)
from rallypoint.control.protocol.resume_state import (
    ResumeState,
    after_notification,
    after_request,
    give_up_at,
    requests_to_repeat,
    without_foreign_join,
)

log = get_logger(__name__)

_MAX_SILENT_LEASES, _MAX_BUSY_LEASES = 1.5, 4.0
"""Leases of silence after which a server counts as lost. After the first, it removed us if it exists and we are cut
off; the second applies if its kernel still receives our data, so that it might only be busy."""
_CLOSE_TIMEOUT = 1.0
"""Seconds in which to send the last messages."""
_HEARTBEAT = codec.encode(Heartbeat())


class LinkState(Enum):
    """The state of a link; see the table at the top."""

    DIALING = auto()
    """There is no session; the link keeps trying to open one."""
    OPEN = auto()
    """There is a session."""
    CUT = auto()
    """There is a session, in which a drill keeps both sides silent."""
    IDLE = auto()
    """There is no session, and the node needs none until it joins again."""
    CLOSING = auto()
    """`close` was called; the last messages are being written."""
    ENDED = auto()
    """Nothing is sent or delivered any more."""


class _LinkEnd(Exception):
    """Another session would not help, or no time is left for one. The text goes into `LinkLost`."""


class TcpLink:
    """One node's link over TCP. Everything after the constructor runs on the loop's thread."""

    def __init__(
        self,
        resolver: EndpointResolver,
        settings: Settings,
        node: NodeId,
        deliver: Deliver,
        deadline: Deadline,
    ) -> None:
        """Start to connect; returns at once.

        Args:
            resolver: finds the current place of the control server.
            settings: the job's settings, which the server must share; `join_timeout` is the timeout of law 2.
            node: this node, with an empty address, which the first session fills in.
            deliver: called with every notification, last with `LinkLost` if the link ends on its own.
            deadline: until when to try to open the first session.
        """
        self._resolver = resolver
        self._redialer = Redialer(resolver, settings, node)
        self._settings = settings
        self._deliver = deliver
        self._deadline = deadline
        self._state = LinkState.DIALING
        self._session: ClientSession | None = None
        """The session in OPEN and CUT."""
        self._resume_state = ResumeState()
        self.address: str | None = None
        """See `Link.address`. Set once, on the loop's thread, before `LinkOpened` is delivered."""
        self.lease = settings.lease
        """See `Link.lease`; the job's lease once a session is open."""
        self.confirmed_at = -math.inf
        """See `Link.confirmed_at`."""
        self._heartbeats: deque[float] = deque()
        """When this session's unanswered heartbeats were sent, on `BOOT_CLOCK`."""
        self._unsent: list[bytes] = []
        """Requests that wait until a cut ends."""
        self._silent_connections: list[asyncio.StreamWriter] = []
        """The connections of law 5."""
        self._lost_since = self._needed_since = -math.inf
        """Since when there has been no session that lived, and since when the node needs one: the timeout of law 2
        starts at the later of the two."""
        self._rejoined = asyncio.Event()
        """Set to leave IDLE."""
        self._dropped = RateLimitedLog(log, "messages dropped")
        self._loop = shared_loop()
        self._task: asyncio.Task[None]
        self._loop.loop.call_soon_threadsafe(self._start)

    def send(self, request: Request) -> None:
        """Send a request now, or once a session is open."""
        # All nodes might ask for the progress at the same time.
        pause = progress_spread(self._settings) if isinstance(request, ProgressRequest) else 0.0
        self._loop.call(lambda: self._send(request, pause))

    def recheck_endpoint(self) -> None:
        """Look up the control plane at once: it might have moved."""
        self._loop.call(self._recheck_endpoint)

    def close(self) -> None:
        """Leave, disconnect and wait until both are complete. Idempotent."""
        if self._state is not LinkState.ENDED:  # the final state, so any thread may read it
            self._loop.submit(self._close()).result()

    # Events from this node, on the loop's thread

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def _send(self, request: Request, pause: float = 0.0) -> None:
        if pause:
            asyncio.get_running_loop().call_later(pause, self._send, request)
            return
        if self._state in (LinkState.CLOSING, LinkState.ENDED):
            return
        try:
            payload = codec.sendable(request)
        except codec.NotSendable as error:
            if isinstance(request, codec.EXPENDABLE):
                self._dropped.warning(
                    "a %s message was dropped because it could not be sent (%s)", type(request).__name__, error
                )
            else:
                self._end(_unsendable(error))
            return
        self._keep(after_request(self._resume_state, request, SYSTEM_CLOCK.monotonic()))
        if self._state is LinkState.CUT:
            self._unsent.append(payload)
        elif self._session is not None:
            self._session.send(payload)
        elif self._state is LinkState.IDLE and not self._resume_state.refused:
            self._rejoined.set()

    def _recheck_endpoint(self) -> None:
        self._redialer.recheck_endpoint()
        self._follow()

    def _follow(self) -> None:
        """Close the session if the control plane is now at another place."""
        if self._state is LinkState.OPEN and self._redialer.server_has_moved:
            self._close_session()  # `_use` reads the end of the connection

    async def _close(self) -> None:
        session = self._session
        self._stop(LinkState.CLOSING, LeaveRequest())
        if session is not None:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT):
                    await session.writer.wait_closed()
        self._state = LinkState.ENDED

    # End of the link

    def _end(self, sentence: str) -> None:
        """End the link from this side, and tell both sides why."""
        self._stop(LinkState.ENDED, LeaveRequest(why=sentence))
        if not self._resume_state.ended:
            # Without its coordinator, the verdict follows from the notifications.
            done = self._resume_state.all_succeeded
            self._deliver(JobEnded(Verdict(Outcome.SUCCEEDED)) if done else LinkLost(sentence))

    def _stop(self, state: LinkState, word: LeaveRequest) -> None:
        """Begin CLOSING or ENDED; send `word` to the server if there is a session."""
        self._state = state
        # Cancel before anything is awaited:
        #   1. an attempt succeeds or a notification arrives, and `_run` is about to continue with it;
        #   2. `close` comes first, and returns to another thread;
        #   3. if `_run` continued now, it would deliver something after that.
        self._task.cancel()
        self._close_session(word)
        self._abort_silent_connections()

    def _close_session(self, word: LeaveRequest | None = None) -> None:
        """Close the session, if any, with `word` as the last message unless the server ended it."""
        session, self._session = self._session, None
        if session is not None:
            if word is not None:
                self._send_unsent(session)
                session.send(codec.sendable(word))
            session.writer.close()
        self._unsent.clear()

    def _abort_silent_connections(self) -> None:
        while self._silent_connections:
            self._silent_connections.pop().transport.abort()

    # Transitions between states

    async def _run(self) -> None:
        why = ""
        try:
            while True:
                session = await self._dial(why)
                opened_at = SYSTEM_CLOCK.monotonic()
                self._open(session)
                why = await self._use(session)
                self._close_session()
                lost_at = SYSTEM_CLOCK.monotonic()
                if self._resume_state.ended or self._resume_state.all_succeeded:
                    self._end(why)
                    return
                if self._resume_state.refused:
                    self._state = LinkState.IDLE
                    self._rejoined.clear()
                    await self._rejoined.wait()
                self._state = LinkState.DIALING
                self._redialer.session_ended(lost_at - opened_at, why)
                if self._redialer.brief_sessions < 2:
                    self._lost_since = lost_at
                self._deliver(
                    LinkDown(f"the control plane at {self._resolver} was lost ({why})", self._redialer.brief_sessions)
                )
        except (HandshakeError, _LinkEnd) as error:
            self._end(str(error))
        except codec.NotSendable as error:
            self._end(_unsendable(error))
        except Exception as error:  # the agent must not wait forever for a notification that cannot arrive
            log.exception("the link to %s ended unexpectedly", self._resolver)
            dialing = self._state is LinkState.DIALING
            what = "no control plane could be reached at" if dialing else "this node cannot use the control plane at"
            self._end(f"{what} {self._resolver}: {type(error).__name__}: {error}")

    async def _dial(self, lost_how: str) -> ClientSession:
        """DIALING. Open a session, the first one or the next."""
        began = SYSTEM_CLOCK.monotonic()
        try:
            return await self._redialer.open(self._remaining)
        except TimeoutError as error:
            if not self._resume_state.opened:
                raise _LinkEnd(
                    f"no control plane could be reached at {self._resolver} before the join deadline: {error}; "
                    f"{self._resolver.advice}"
                ) from None
            seconds = SYSTEM_CLOCK.monotonic() - began
            raise _LinkEnd(
                f"the control plane at {self._resolver} was lost ({lost_how}) and did not come back within "
                f"{seconds:.0f} s ({error}); see the output of the node that hosts it"
            ) from None

    def _remaining(self) -> float:
        """Seconds left to open a session."""
        if not self._resume_state.opened:
            return self._deadline.remaining()
        until = give_up_at(self._resume_state, max(self._lost_since, self._needed_since), self._settings)
        return max(0.0, until - SYSTEM_CLOCK.monotonic())

    def _keep(self, resume_state: ResumeState) -> None:
        if resume_state.needs_coordinator and not self._resume_state.needs_coordinator:
            self._needed_since = SYSTEM_CLOCK.monotonic()
        self._resume_state = resume_state

    def _open(self, session: ClientSession) -> None:
        """DIALING becomes OPEN. Send the node's state before anything else."""
        self._state, self._session, self.lease = LinkState.OPEN, session, session.welcome.lease
        self._heartbeats.clear()
        before, incarnation = self._resume_state, session.welcome.incarnation
        self._keep(without_foreign_join(before, incarnation))
        if self.address is None:
            self.address = usable_address(unmapped_address(str(session.writer.get_extra_info("sockname")[0])))
            self._deliver(LinkOpened())
        else:
            self._deliver(LinkUp(before.join is not self._resume_state.join, self._redialer.brief_sessions))
        for request in requests_to_repeat(self._resume_state, SYSTEM_CLOCK.monotonic()):
            session.send(codec.sendable(request))
        self._keep(self._resume_state._replace(opened=incarnation))
        self._resolver.session_opened(incarnation)

    async def _use(self, session: ClientSession) -> str:
        """OPEN and CUT. Use the session until it is lost; returns the reason.

        Raises:
            _LinkEnd: the next session would be lost in the same way.
        """
        heartbeats = asyncio.ensure_future(self._send_heartbeats(session))
        try:
            while True:
                try:  # errors below are not the connection's fault, and end the link
                    payload = await self._receive(session)
                except TimeoutError as error:
                    self._silent_connections.append(session.writer)
                    self._session = None
                    return str(error)
                except (OSError, FrameError) as error:
                    return error_words(error) or type(error).__name__
                notification = self._decode(payload)
                if notification is None:
                    continue
                self._abort_silent_connections()
                if isinstance(notification, SessionEnded):
                    if not notification.is_permanent:
                        return notification.detail
                    self._close_session()
                    raise _LinkEnd(
                        f"the control plane at {self._resolver} ended the session of this node: {notification.detail}"
                    )
                self._keep(after_notification(self._resume_state, notification, SYSTEM_CLOCK.monotonic()))
                if isinstance(notification, Heartbeat):
                    for _ in range(min(notification.number, len(self._heartbeats))):
                        self.confirmed_at = self._heartbeats.popleft()
                    continue
                self._deliver(notification)
                if isinstance(notification, FaultRequested) and notification.fault is Fault.CUT:
                    await self._stay_cut(session, notification.lasts)
        finally:
            heartbeats.cancel()

    def _decode(self, payload: bytes) -> Notification | None:
        """Decode a notification; None if it is dropped."""
        try:
            return codec.decode_notification(payload)
        except codec.CodecError as error:
            kind = error.kind
            if kind is not None and issubclass(kind, codec.EXPENDABLE):
                self._dropped.warning(
                    "a %s message was dropped because it could not be read (%s)", kind.__name__, error
                )
                return None
            # Dialing again would not help:
            #   1. the coordinator has a message for this node that the node cannot read;
            #   2. the node leaves this session, and reports its state in the next one;
            #   3. the coordinator sees that the node lacks the message, and sends it again.
            raise _LinkEnd(
                f"the control plane at {self._resolver} sent a message that this node cannot read: {error}"
            ) from None

    async def _receive(self, session: ClientSession) -> bytes:
        """Receive the next message. Raises like `ClientSession.receive`, or TimeoutError after a long silence."""
        began, lease = SYSTEM_CLOCK.monotonic(), session.welcome.lease
        for silence in (_MAX_SILENT_LEASES, random.uniform(_MAX_BUSY_LEASES - 1.0, _MAX_BUSY_LEASES)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(began + silence * lease - SYSTEM_CLOCK.monotonic()):
                    return await session.receive()
            if not is_acknowledged(session.writer.get_extra_info("socket")):
                break
        raise TimeoutError(f"the server was silent for {SYSTEM_CLOCK.monotonic() - began:.3g} s")

    async def _send_heartbeats(self, session: ClientSession) -> None:
        interval = session.welcome.heartbeat_interval
        if interval:  # set by a server of many nodes, all of which might have connected at the same time
            await asyncio.sleep(interval * os.urandom(1)[0] / 256)
            self._send_heartbeat(session)
        while True:
            await asyncio.sleep(interval or session.welcome.lease / 3)
            self._send_heartbeat(session)

    def _send_heartbeat(self, session: ClientSession) -> None:
        if self._state is LinkState.OPEN:
            self._heartbeats.append(BOOT_CLOCK.monotonic())
            session.send(_HEARTBEAT)

    async def _stay_cut(self, session: ClientSession, seconds: float) -> None:
        """OPEN becomes CUT for `seconds`."""
        self._state = LinkState.CUT
        await asyncio.sleep(seconds)
        self._state = LinkState.OPEN
        self._send_heartbeat(session)  # the lease may end before the next heartbeat
        self._send_unsent(session)
        self._follow()

    def _send_unsent(self, session: ClientSession) -> None:
        for payload in self._unsent:
            session.send(payload)
        self._unsent.clear()


def _unsendable(error: codec.NotSendable) -> str:
    return f"this node's message to the control plane cannot be sent: {error}"
