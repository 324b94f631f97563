"""A node's link to the control server over TCP: dial, talk, heartbeat, and dial again when the session is lost.

Laws:

1. The loss of a session does not end the job: running workers keep running, and the node sends what it holds
   (`resume_state`) again to the server that answers at the endpoint next, the same or a new one.
2. The link gives up only when the node can do nothing more without the control plane (it waits for a place, or for what
   follows from a failure or from success) and has been without it for the whole timeout.
3. The first session is the exception: an error that waiting does not solve (`HandshakeError`) ends the link at once.
4. If the control plane moves, the link follows: it looks it up again before each attempt (`EndpointResolver`), and
   closes a session at the previous place when it is told to (`recheck_endpoint`).
5. A connection that has only fallen silent is kept until the server has answered in the next one: closing it would be
   the first thing that the server sees when the silence ends, and means the end of a node.
6. A session that ends before it has lived is followed by growing pauses, and does not begin the timeout of law 2 anew.
   One that the server has ended for good is the last one.
7. A drill that cuts the link (`Fault.CUT`) is a silence of both sides: nothing is sent, read or dialed meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
from collections import deque

from rallypoint.base.clock import BOOT_CLOCK, SYSTEM_CLOCK, Deadline
from rallypoint.base.endpoint import is_acknowledged, unmapped_address, usable_address
from rallypoint.base.log import RateLimitedLog, get_logger
from rallypoint.base.loop import shared_loop
from rallypoint.control.client.dialing import (
    LIVED,
    ClientSession,
    EndpointResolver,
    Redialer,
    error_words,
    progress_spread,
)
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
"""Leases of silence after which a server counts as lost: by then it has removed us, if it still exists and we are cut
off; and after which it does so if its kernel still receives what we say, so that it may only be busy.
"""
_CLOSE_TIMEOUT = 1.0
"""Seconds within which the last messages must be sent."""


class TcpLink:
    """One node's link over TCP. Everything after the constructor happens on the loop's thread."""

    def __init__(
        self,
        resolver: EndpointResolver,
        settings: Settings,
        node: NodeId,
        deliver: Deliver,
        deadline: Deadline,
    ) -> None:
        """Begin to connect; returns at once.

        Args:
            resolver: knows where the control server listens at any moment.
            settings: the job's settings, which the server must share; `join_timeout` is the timeout of law 2.
            node: who this node is; with an empty address, which the first session shows.
            deliver: called with every notification, last with `LinkLost` if the link ends on its own.
            deadline: the time until which to try to open the first session.
        """
        self._resolver = resolver
        self._redialer = Redialer(resolver, settings, node)
        self._settings = settings
        self._deliver = deliver
        self._deadline = deadline
        self._loop = shared_loop()
        self._resume_state = ResumeState()
        self._session: ClientSession | None = None
        self._silent_connections: list[asyncio.StreamWriter] = []
        self._closed = False
        self.address: str | None = None
        """See `Link.address`. Set once, on the loop's thread, before `LinkOpened` is delivered."""
        self.lease = settings.lease
        """See `Link.lease`: that of the job, once a session is open."""
        self.confirmed_at = -math.inf
        """See `Link.confirmed_at`."""
        self._heartbeats: deque[float] = deque()
        """When those of this session were sent that have no answer yet, on `BOOT_CLOCK`."""
        self._cut_until = -math.inf
        """Until when a drill cuts the link, on the monotonic clock."""
        self._cut_task: asyncio.Task[None] | None = None
        self._dropped = RateLimitedLog(log, "messages dropped")
        self._unsent: list[bytes] = []
        """What the session is sent when that is over."""
        self._waiting_since: float | None = None
        self._embedded = True
        """Whether the server lives inside an agent of the job, by the last session; before the first it may."""
        self._end_detail = ""
        """The server's reason for ending the session."""
        self._is_ended_for_good = False
        """Whether it would end each further one in the same way."""
        self._rejoin_requested: asyncio.Event | None = None
        """Set when a node whose last join was refused asks again; None while none waits for that."""
        self._task = self._loop.submit(self._run())

    def send(self, request: Request) -> None:
        """Send a request, now or as soon as a session is open."""
        self._loop.call(lambda: self._send_in_turn(request))

    def recheck_endpoint(self) -> None:
        """The control plane may have moved: look it up at once."""
        self._loop.call(self._recheck_endpoint)

    def close(self) -> None:
        """Leave, disconnect and wait until that is done. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.submit(self._leave_and_close()).result()

    # On the loop's thread

    def _send_in_turn(self, request: Request) -> None:
        if isinstance(request, ProgressRequest):  # which all nodes may send at the same moment
            asyncio.get_running_loop().call_later(progress_spread(self._settings), self._send, request)
        else:
            self._send(request)

    def _send(self, request: Request) -> None:
        try:
            payload = codec.sendable(request)
        except codec.NotSendable as error:
            if isinstance(request, codec.EXPENDABLE):
                self._dropped.warning("a %s is dropped: it cannot be sent (%s)", type(request).__name__, error)
            else:
                self._end(f"what this node had to tell the control plane cannot be sent: {error}")
            return
        self._update_resume_state(after_request(self._resume_state, request, SYSTEM_CLOCK.monotonic()))
        if self._rejoin_requested is not None and not self._resume_state.refused:
            self._rejoin_requested.set()
        if self._session is not None and self._is_cut():
            self._unsent.append(payload)
        elif self._session is not None:
            self._session.send(payload)

    def _recheck_endpoint(self) -> None:
        self._redialer.endpoint_moved.set()
        if self._session is not None and self._resolver.resolve() != self._redialer.target:
            self._session.writer.close()

    def _update_resume_state(self, resume_state: ResumeState) -> None:
        if resume_state.needs_coordinator != self._resume_state.needs_coordinator:
            self._waiting_since = SYSTEM_CLOCK.monotonic() if resume_state.needs_coordinator else None
        self._resume_state = resume_state

    async def _leave_and_close(self) -> None:
        session = self._session
        if session is not None:
            session.send(codec.sendable(LeaveRequest()))
            session.writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT):
                    await session.writer.wait_closed()
        self._close_silent_session()
        self._task.cancel()

    async def _run(self) -> None:
        try:
            session = await self._connect_first()
            without_since, brief = -math.inf, 0
            while True:
                if self.address is None:
                    self.address = usable_address(unmapped_address(str(session.writer.get_extra_info("sockname")[0])))
                    self._deliver(LinkOpened())
                opened_at = SYSTEM_CLOCK.monotonic()
                lost_at, why = await self._serve_session(session)
                if self._closed or self._resume_state.ended:
                    return
                if self._resume_state.all_succeeded:
                    self._end(why)
                    return
                if self._is_ended_for_good:
                    self._end(f"the control plane at {self._resolver} has ended the session of this node: {why}")
                    return
                if self._resume_state.refused:  # so the server may go; it matters to us only if we ask again
                    await self._rejoin_request()
                self._redialer.session_ended(lost_at - opened_at, why)
                brief = 0 if lost_at - opened_at >= LIVED else brief + 1
                if brief < 2:
                    without_since = lost_at
                self._deliver(LinkDown(f"the control plane at {self._resolver} was lost ({why})", brief))
                session = await self._reconnect(without_since, why)
                before = self._resume_state
                self._update_resume_state(without_foreign_join(before, session.welcome.incarnation))
                self._deliver(LinkUp(before.join is not self._resume_state.join, brief))
        except (HandshakeError, TimeoutError) as error:
            self._end(str(error))
        except Exception as error:  # in any case the agent must not wait forever for what will not arrive
            log.exception("the link to %s ended unexpectedly", self._resolver)
            self._end(f"no control plane could be reached at {self._resolver}: {type(error).__name__}: {error}")

    def _end(self, sentence: str) -> None:
        if self._closed:
            return
        # The verdict of the coordinator that is gone follows from what it has told.
        done = self._resume_state.all_succeeded
        self._deliver(JobEnded(Verdict(Outcome.SUCCEEDED)) if done else LinkLost(sentence))

    # A session

    async def _serve_session(self, session: ClientSession) -> tuple[float, str]:
        """Use the session until it is lost; returns when that was, and why."""
        welcome = session.welcome
        self._embedded, self.lease = welcome.embedded, welcome.lease
        self._end_detail = ""
        for request in requests_to_repeat(self._resume_state, SYSTEM_CLOCK.monotonic()):
            session.send(codec.sendable(request))
        self._update_resume_state(self._resume_state._replace(opened=welcome.incarnation))
        self._resolver.session_opened(welcome.incarnation)
        self._session = session
        heartbeats = asyncio.ensure_future(self._send_heartbeats(session))
        stays_open = False
        try:
            while True:
                payload = await self._receive_patiently(session, welcome.lease)
                await self._while_cut()
                self._on_notification(codec.decode_notification(payload))
        except TimeoutError as error:
            why, stays_open = str(error), True
        except (OSError, FrameError, codec.CodecError) as error:
            why = self._end_detail or error_words(error) or type(error).__name__
        finally:
            self._session = None
            self._unsent.clear()
            heartbeats.cancel()
            if stays_open:
                self._silent_connections.append(session.writer)
            else:
                session.writer.close()
        return SYSTEM_CLOCK.monotonic(), why

    async def _receive_patiently(self, session: ClientSession, lease: float) -> bytes:
        """The next message. Raises as `ClientSession.receive`, or TimeoutError: the server has been silent for long."""
        began = SYSTEM_CLOCK.monotonic()
        for silence in (_MAX_SILENT_LEASES, random.uniform(_MAX_BUSY_LEASES - 1.0, _MAX_BUSY_LEASES)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(began + silence * lease - SYSTEM_CLOCK.monotonic()):
                    return await session.receive()
            if not is_acknowledged(session.writer.get_extra_info("socket")):
                break
        raise TimeoutError(f"nothing was heard from it for {SYSTEM_CLOCK.monotonic() - began:.3g} s")

    def _close_silent_session(self) -> None:
        while self._silent_connections:
            self._silent_connections.pop().transport.abort()

    def _on_notification(self, notification: Notification) -> None:
        self._close_silent_session()
        if isinstance(notification, SessionEnded):
            self._end_detail, self._is_ended_for_good = notification.detail, notification.is_permanent
            return
        now = SYSTEM_CLOCK.monotonic()
        self._update_resume_state(after_notification(self._resume_state, notification, now))
        if isinstance(notification, Heartbeat):
            for _ in range(min(notification.number, len(self._heartbeats))):
                self.confirmed_at = self._heartbeats.popleft()
        elif not self._closed:
            if isinstance(notification, FaultRequested) and notification.fault is Fault.CUT:
                self._cut(now, notification.lasts)
            self._deliver(notification)

    # A drill

    def _cut(self, now: float, seconds: float) -> None:
        self._cut_until = now + seconds
        self._cut_task = asyncio.ensure_future(self._send_after_cut())

    def _is_cut(self) -> bool:
        return SYSTEM_CLOCK.monotonic() < self._cut_until

    async def _while_cut(self) -> None:
        while self._is_cut():
            await asyncio.sleep(self._cut_until - SYSTEM_CLOCK.monotonic())

    async def _send_after_cut(self) -> None:
        await self._while_cut()
        unsent, self._unsent = self._unsent, []
        if self._session is not None:
            for payload in unsent:
                self._session.send(payload)

    async def _send_heartbeats(self, session: ClientSession) -> None:
        heartbeat = codec.sendable(Heartbeat())
        interval = session.welcome.heartbeat_interval
        self._heartbeats.clear()
        if interval:  # by a server of many nodes, which may all have come at the same time
            await asyncio.sleep(interval * os.urandom(1)[0] / 256)
            self._heartbeats.append(BOOT_CLOCK.monotonic())
            session.send(heartbeat)
        while True:
            await asyncio.sleep(interval or session.welcome.lease / 3)
            await self._while_cut()
            self._heartbeats.append(BOOT_CLOCK.monotonic())
            session.send(heartbeat)

    # Dialing

    async def _connect_first(self) -> ClientSession:
        return await self._redialer.open(
            "",
            self._embedded,
            self._deadline.remaining,
            lambda why, _seconds: (
                f"no control plane could be reached at {self._resolver} before the join deadline: {why}; "
                f"{self._resolver.advice}"
            ),
        )

    async def _reconnect(self, lost_at: float, how: str) -> ClientSession:
        def remaining() -> float:
            since = lost_at if self._waiting_since is None else max(lost_at, self._waiting_since)
            until = give_up_at(self._resume_state, since, self._settings)
            return max(0.0, until - SYSTEM_CLOCK.monotonic())

        await self._while_cut()
        return await self._redialer.open(
            self._resume_state.opened,
            self._embedded,
            remaining,
            lambda why, seconds: (
                f"the control plane at {self._resolver} was lost ({how}) and has not come back within {seconds:.0f} s "
                f"({why}); look at the output of the node that hosts it"
            ),
        )

    async def _rejoin_request(self) -> None:
        self._rejoin_requested = asyncio.Event()
        await self._rejoin_requested.wait()
