"""A node's link to the control server over TCP: dial, talk, beat, and dial again when the session is lost.

Laws:

1. The loss of a session is no loss of the job: the running workers run on, and the node says again what it holds
   (`holding`) to whoever answers at the endpoint next, the same server or a new one.
2. The link gives up only when the node can do nothing more without the control plane (it waits for a place, or for what
   follows from a failure or from success) and has been without it for the whole patience.
3. The first session is the exception: what will not get better by waiting (`HandshakeError`) ends the link at once.
4. Where the control plane moves, the link follows: it looks for it anew before each attempt (`whereabouts`), and lets
   go of a session at the former place when it is told to (`follow`).
5. A connection that has only fallen silent is kept until the server has spoken in the next one: hanging up would be the
   first thing that the server hears when the silence ends, and is the end of a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from rallypoint.base.clock import SYSTEM_CLOCK, Deadline
from rallypoint.base.endpoint import Endpoint, plain_address, usable_address
from rallypoint.base.log import get_logger
from rallypoint.base.loop import LoopThread, shared_loop
from rallypoint.protocol.frames import FrameError, check_size, frame
from rallypoint.rendezvous import codec
from rallypoint.rendezvous.dialing import TRY_AGAIN, Dialer, Session, in_words
from rallypoint.rendezvous.handshake import HandshakeError
from rallypoint.rendezvous.holding import Held, after_notice, after_request, forget_join, greeted, said_again
from rallypoint.rendezvous.link import Deliver
from rallypoint.rendezvous.messages import (
    Beat,
    Leave,
    LinkDown,
    LinkLost,
    LinkOpened,
    LinkUp,
    Notice,
    Request,
    SessionEnded,
)
from rallypoint.rendezvous.state import Settings
from rallypoint.rendezvous.whereabouts import Fixed, Place, Whereabouts

if TYPE_CHECKING:
    from rallypoint.base.tls import Tls

log = get_logger(__name__)

_FIRST_DELAY, _LONGEST_DELAY = 0.05, 1.0
_PATIENT_LEASES = 1.5
"""Leases of silence after which a server counts as lost; by then it has taken us out, if it is there."""
_CONNECT_FIRST, _CONNECT_AGAIN = 5.0, 1.5
"""Seconds for one attempt at a TCP connection. A packet lost in it is sent again after a second, then after ever longer
pauses: when a link comes back, a new attempt is quicker."""
_GOODBYE = 1.0
"""Seconds that the last words have to leave."""
_REMIND_FIRST, _REMIND_AGAIN = 2.0, 10.0
"""Seconds until a line says that the server is out of reach: one that nobody has met yet, one that was lost."""
_REMIND_LEAST, _REMIND_MOST = 60.0, 300.0
"""Seconds between later lines, which become fewer."""


class TcpLink:
    """One node's line over TCP. Everything after the constructor happens on the loop's thread."""

    def __init__(
        self,
        endpoint: Endpoint | Whereabouts,
        settings: Settings,
        local_id: int,
        deliver: Deliver,
        deadline: Deadline,
        *,
        key: bytes | None = None,
        tls: Tls | None = None,
        loop: LoopThread | None = None,
    ) -> None:
        """Begin to connect; returns at once.

        Args:
            endpoint: where the control server listens, or what knows that from moment to moment.
            settings: of the job, which the server must share; `join_timeout` is the patience of law 2.
            local_id: which handler of this process this is.
            deliver: is handed every notice, `LinkLost` last if the link ends by itself.
            deadline: until when to try to open the first session.
            key: the job's, if it has one; for an endpoint that is given as such.
            tls: the control plane's, if it has any; as above.
            loop: where to run; the process's shared loop if not given.
        """
        self._where: Whereabouts = Fixed(Place(endpoint, key, tls)) if isinstance(endpoint, Endpoint) else endpoint
        self._settings = settings
        self._local_id = local_id
        self._place: Place | None = None
        """Where the last attempt was made; the dialer is for there."""
        self._dialer: Dialer | None = None
        self._why = ""
        """Why the last attempt came to nothing."""
        self._moved = asyncio.Event()
        self._patience = settings.join_timeout
        self._deliver = deliver
        self._deadline = deadline
        self._loop = loop or shared_loop()
        self._held = Held()
        self._session: Session | None = None
        self._silent: list[asyncio.StreamWriter] = []
        self._closed = False
        self.address: str | None = None
        """See `Link.address`. Set once, on the loop's thread, before `LinkOpened` is delivered."""
        self._waits_since: float | None = None
        self._embedded = True
        """Whether the server lives inside an agent of the job, by the last session; before the first it may."""
        self._farewell = ""
        """Why the server has ended the session, in its own words."""
        self._asked: asyncio.Event | None = None
        """Set when a node asks again whose last join was refused; None while no such node waits for that."""
        self._task = self._loop.submit(self._run())

    def send(self, request: Request) -> None:
        """Say something, now or as soon as a session is open."""
        self._loop.call(lambda: self._send(request))

    def follow(self) -> None:
        """The control plane may be elsewhere by now: look at once."""
        self._loop.call(self._follow)

    def close(self) -> None:
        """Say goodbye, hang up and wait until that is done. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.submit(self._goodbye()).result()

    # On the loop's thread

    def _send(self, request: Request) -> None:
        try:
            payload = _payload(request)
        except (FrameError, ValueError) as error:  # text that UTF-8 has no place for is a ValueError
            self._end(f"what this node had to tell the control plane cannot be sent ({error}): {str(request)[:200]}")
            return
        self._hold(after_request(self._held, request, SYSTEM_CLOCK.monotonic()))
        if self._asked is not None and not self._held.refused:
            self._asked.set()
        if self._session is not None:
            self._say(self._session, payload)

    def _follow(self) -> None:
        self._moved.set()
        if self._session is not None and self._where.find() != self._place:
            self._session.writer.close()

    def _hold(self, held: Held) -> None:
        if held.waits != self._held.waits:
            self._waits_since = SYSTEM_CLOCK.monotonic() if held.waits else None
        self._held = held

    @staticmethod
    def _say(session: Session, payload: bytes) -> None:
        if not session.writer.is_closing():
            session.writer.write(frame(payload if session.signers is None else session.signers.out.sign(payload)))

    async def _goodbye(self) -> None:
        session = self._session
        if session is not None:
            self._say(session, _payload(Leave()))
            session.writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_GOODBYE):
                    await session.writer.wait_closed()
        self._drop_silent()
        self._task.cancel()

    async def _run(self) -> None:
        try:
            session = await self._first()
            while True:
                if self.address is None:
                    self.address = usable_address(plain_address(str(session.writer.get_extra_info("sockname")[0])))
                    self._deliver(LinkOpened())
                lost_at, why = await self._talk(session)
                if self._closed or self._held.ended:
                    return
                if self._held.refused:  # so the server may go; it matters to us only if we ask again
                    await self._asked_again()
                self._deliver(LinkDown(f"the control plane at {self._where} was lost ({why})"))
                session = await self._again(lost_at, why)
                before = self._held
                self._hold(forget_join(before, session.welcome.incarnation))
                self._deliver(LinkUp(join_lost=before.join is not self._held.join))
        except (HandshakeError, TimeoutError) as error:
            self._end(str(error))
        except Exception as error:  # whatever it is, the agent must not wait for ever for what will not come
            log.exception("the link to %s has come to an end that was not foreseen", self._where)
            self._end(f"no control plane could be reached at {self._where}: {type(error).__name__}: {error}")

    def _end(self, sentence: str) -> None:
        if not self._closed:
            self._deliver(LinkLost(sentence))

    # A session

    async def _talk(self, session: Session) -> tuple[float, str]:
        """Use the session until it is lost; returns when that was, and why."""
        welcome = session.welcome
        self._embedded = welcome.embedded
        self._farewell = ""
        for request in said_again(self._held, SYSTEM_CLOCK.monotonic()):
            self._say(session, _payload(request))
        self._hold(greeted(self._held, welcome.incarnation, welcome.node))
        if self._held.greeted_as is not None:
            self._where.greeted(self._held.greeted_as[1], welcome.incarnation)
        self._session = session
        beats = asyncio.ensure_future(self._beat(session, welcome.lease))
        kept = False
        try:
            why = await self._listen(session, _PATIENT_LEASES * welcome.lease)
        except TimeoutError:
            why, kept = f"nothing was heard from it for {_PATIENT_LEASES * welcome.lease:g} s", True
        except (OSError, FrameError, codec.CodecError) as error:
            why = _told(error)
        finally:
            self._session = None
            beats.cancel()
            if kept:
                self._silent.append(session.writer)
            else:
                session.writer.close()
        return SYSTEM_CLOCK.monotonic(), why

    async def _listen(self, session: Session, patience: float) -> str:
        """Take what comes until the server hangs up; returns what there is to say of that."""
        while True:
            while session.unread:
                payload = session.unread.popleft()
                if session.signers is not None:
                    payload = session.signers.into.verify(payload)
                self._take(codec.decode_notice(payload))
            async with asyncio.timeout(patience):
                data = await session.reader.read(65536)
            if not data:
                return self._farewell or "it hung up"
            session.unread.extend(session.frames.feed(data))

    def _drop_silent(self) -> None:
        while self._silent:
            self._silent.pop().transport.abort()

    def _take(self, notice: Notice) -> None:
        self._drop_silent()
        if isinstance(notice, SessionEnded):
            self._farewell = notice.detail
            return
        self._hold(after_notice(self._held, notice))
        if not isinstance(notice, Beat) and not self._closed:
            self._deliver(notice)

    async def _beat(self, session: Session, lease: float) -> None:
        beat = _payload(Beat())
        while True:
            await asyncio.sleep(lease / 3)
            self._say(session, beat)

    # Dialing

    async def _first(self) -> Session:
        return await self._dial_until(
            self._deadline.remaining,
            lambda why, _seconds: (
                f"no control plane could be reached at {self._where} before the join deadline: {why}; "
                f"{self._where.advice}"
            ),
            first=True,
        )

    async def _again(self, lost_at: float, how: str) -> Session:
        def remaining() -> float:
            if self._waits_since is None:
                return float("inf")
            until = max(lost_at, self._waits_since) + self._patience
            if self._held.join is not None and not self._held.spare:  # a join has one deadline, whoever decides on it
                until = min(until, self._held.join[1])
            return max(0.0, until - SYSTEM_CLOCK.monotonic())

        return await self._dial_until(
            remaining,
            lambda why, seconds: (
                f"the control plane at {self._where} was lost ({how}) and has not come back within {seconds:.0f} s "
                f"({why}); look at the output of the node that hosts it"
            ),
            first=False,
        )

    async def _asked_again(self) -> None:
        self._asked = asyncio.Event()
        await self._asked.wait()

    async def _dial_until(
        self, remaining: Callable[[], float], failure: Callable[[str, float], str], *, first: bool
    ) -> Session:
        """Dial until a session is open.

        Args:
            remaining: seconds that are left to try.
            failure: makes the sentence for when they are over, of why and after how many seconds.
            first: whether there was no session yet: then to give up at once where waiting will not help.
        """
        delay, began = _FIRST_DELAY, SYSTEM_CLOCK.monotonic()
        self._why = ""
        reminder = asyncio.ensure_future(self._remind(remaining, first))
        try:
            while True:
                self._moved.clear()
                try:
                    # Not wait_for: it may swallow a cancellation that comes in the very moment of success.
                    async with asyncio.timeout(max(0.1, min(remaining(), 60.0))):
                        return await self._dial(_CONNECT_FIRST if first else _CONNECT_AGAIN)
                except TRY_AGAIN as error:
                    self._why = in_words(error) or self._unfinished or type(error).__name__
                except HandshakeError as error:
                    if first:
                        raise
                    self._why = str(error)
                if remaining() <= 0:
                    raise TimeoutError(failure(self._why, SYSTEM_CLOCK.monotonic() - began))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(delay * random.uniform(0.5, 1.0), remaining())):
                        await self._moved.wait()
                delay = min(delay * 1.5, _LONGEST_DELAY)
        finally:
            reminder.cancel()

    @property
    def _unfinished(self) -> str:
        return "" if self._dialer is None else self._dialer.unfinished

    async def _remind(self, remaining: Callable[[], float], first: bool) -> None:
        """Say now and then that the server is out of reach, and why, also while an attempt lasts."""
        pause = _REMIND_FIRST if first else _REMIND_AGAIN
        while True:
            await asyncio.sleep(pause)
            pause = min(max(2 * pause, _REMIND_LEAST), _REMIND_MOST)
            advice = f"; {self._where.advice}" if first else ""
            left = remaining()
            limit = "the workers run on" if left == float("inf") else f"giving up in {left:.0f} s"
            why = self._why or self._unfinished
            log.warning("waiting for the control plane at %s (%s)%s; %s", self._where, why, advice, limit)

    async def _dial(self, patience: float) -> Session:
        """One attempt, at where the control plane is now."""
        place = self._where.find()
        if place is None:
            raise OSError(self._where.why_not())
        if self._dialer is None or place != self._place:
            self._place = place
            self._dialer = Dialer(place, self._settings, self._local_id)
        try:
            return await self._dialer.dial(patience, self._last_met(), self._where.resolved if self._embedded else None)
        except TRY_AGAIN as error:
            self._where.failed(place, error)
            raise
        except HandshakeError as error:
            self._where.failed(place, error)
            if self._where.lasting:
                raise
            raise OSError(str(error)) from None

    def _last_met(self) -> str:
        """The arbiter of the last session, by its incarnation; empty if there was none."""
        met = self._held.greeted_as or self._held.known_as
        return "" if met is None else met[0]


def _payload(request: Request) -> bytes:
    """The bytes of a request. FrameError where they, signed, are more than a frame may have."""
    payload = codec.encode(request)
    check_size(len(payload))
    return payload


def _told(error: Exception) -> str:
    return in_words(error) or type(error).__name__
