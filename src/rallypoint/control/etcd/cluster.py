"""All members of a cluster as one: chooses the member to ask, and another if it does not answer. On the loop.

Laws:

- a client uses one member at a time for everything, and so costs the cluster one connection;
- every request is safe to repeat: it only reads, repeating it changes nothing, or its own comparisons fail the second
time. So if an attempt gets no answer in time, the next member is asked;
- an attempt gets one second, or twice the time of the last answer, doubled after each silent member. So if all are slow
(an overloaded machine), the client does not give up one member after another.

Laws of a watch:

- each change is reported once and in order: if a member is lost, the watch continues on another one, from the revision
after the last reported one. etcd sends all changes of a revision in one message, so none is split;
- a member that is behind is silent until it reaches the wanted revision. A member that is silent for a while is asked
for its status, and left if it does not answer, even while the watch is still starting. Many clients ask rarely. A
member without a leader ends the stream by itself;
- changes that can no longer be reported end the watch (`WatchCompacted`), and are never skipped.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from grpclib.client import Stream

from rallypoint.base.endpoint import Endpoint
from rallypoint.base.log import get_logger
from rallypoint.control.etcd import messages
from rallypoint.control.etcd.api import (
    Credentials,
    EtcdLeaseGone,
    EtcdRefused,
    EtcdUnreachable,
    WatchCancelled,
    WatchCompacted,
    WatchEnd,
    WatchEvent,
)
from rallypoint.control.etcd.member import Member, MemberTrouble, shielded, start_task
from rallypoint.control.etcd.messages import Method, RequestOutcome, classify

T = TypeVar("T")

log = get_logger(__name__)

ATTEMPT = 1.0
"""Seconds for a member to answer, and to accept a new connection; more if all are slow."""
_MAX_ATTEMPT = 10.0
IDLE = 1.1
"""Seconds of silence before a watch asks for a member's status; short enough for a lease of 3 s."""
_DEFAULT_REMEDY = "check that most of its members are running"
_PAUSE, _LONGEST_PAUSE = 0.1, 1.0
"""Maximum pause between two rounds over all members: the first value, doubled until a member answers, up to the second.
Each pause is a random part of this, so that the agents of a large job do not all return at the same time."""
_PERMISSION_DENIED = 7


class EtcdMembers:
    """The members at `endpoints`."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        tls: ssl.SSLContext | None,
        credentials: Credentials | None,
        idle_s: float = IDLE,
    ) -> None:
        self.idle = idle_s
        self.version = ""
        """The version of the last connected member, if known."""
        self._order = random.sample(endpoints, len(endpoints))
        self._tls = tls
        self._credentials = credentials
        self._member: Member | None = None
        self._opening = asyncio.Lock()
        self._last_troubles: dict[Endpoint, MemberTrouble] = {}
        self._attempt = ATTEMPT
        self._pause = _PAUSE
        self._closed = False

    async def ask(self, method: Method, body: bytes, timeout_s: float) -> bytes:
        """Ask until an answer arrives, which is empty if an earlier send was carried out.

        Raises:
            EtcdUnreachable: no answer arrived within `timeout_s`.
            EtcdRefused: no answer will ever arrive.
            EtcdLeaseGone: the lease in the request is gone.
        """
        logins = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    member = await self.member()
                    try:
                        return await self.ask_member(member, method, body)
                    except MemberTrouble as trouble:
                        if trouble.outcome is RequestOutcome.DONE:
                            return b""
                        if trouble.outcome is RequestOutcome.LOGIN and logins < 2:
                            logins += 1
                            await self.log_in(member)
                        else:
                            await self._move_on(member, trouble)
        except TimeoutError:
            raise EtcdUnreachable(self._unreachable(timeout_s)) from None

    async def ask_member(self, member: Member, method: Method, body: bytes) -> bytes:
        """Ask one member, within the time of an attempt. Raises MemberTrouble without an answer."""
        limit, asked_at = self._attempt, asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(limit):
                answer = await member.ask(method, body)
        except TimeoutError:  # the attempt's timeout: the whole request's would have cancelled this
            raise member.trouble(RequestOutcome.RETRY, f"has been silent for {limit:.1f} s") from None
        self._note_answer(asked_at)
        return answer

    def _note_answer(self, asked_at: float) -> None:
        """Note an answer to a request sent at that time: the next attempt may take as long or somewhat longer."""
        took = asyncio.get_running_loop().time() - asked_at
        self._attempt = min(max(ATTEMPT, 2 * took), _MAX_ATTEMPT)
        self._pause = _PAUSE

    async def _sleep_briefly(self) -> None:
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        await asyncio.sleep(random.uniform(pause / 2, pause))

    async def _move_on(self, member: Member, trouble: MemberTrouble) -> None:
        """Switch to another member if that can help."""
        self._last_troubles[member.endpoint] = trouble
        if trouble.outcome is RequestOutcome.LEASE_GONE:
            raise EtcdLeaseGone(trouble.sentence)
        if trouble.outcome is not RequestOutcome.RETRY and not trouble.ends:
            raise EtcdRefused(trouble.sentence)
        await self.leave(member, trouble)

    async def leave(self, member: Member, trouble: MemberTrouble) -> None:
        """Switch to another member for everything."""
        self._leave(member)
        if not trouble.ends:
            await self._sleep_briefly()  # no busy loop if each member refuses at once

    async def log_in(self, member: Member) -> None:
        """Fetch a new token for all requests to `member`; if this fails for now, another member is next.

        Raises:
            EtcdRefused: user and password are no longer accepted.
        """
        try:
            async with asyncio.timeout(self._attempt):
                await member.log_in()
        except TimeoutError:
            self._leave(member)
        except MemberTrouble as trouble:
            self._last_troubles[member.endpoint] = trouble
            if trouble.outcome is RequestOutcome.REFUSED:
                raise EtcdRefused(trouble.sentence) from None
            self._leave(member)

    async def member(self) -> Member:
        """Return the current, connected member; wait until there is one.

        Raises:
            EtcdRefused: all members answer, but none will ever accept us.
            EtcdUnreachable: the client is closed.
        """
        async with self._opening:
            while self._member is None or self._member.closed:
                if self._closed:
                    raise EtcdUnreachable("this etcd client is closed")
                self._member = await self._open_one()
        return self._member

    async def _open_one(self) -> Member | None:
        """Try all members once; after that, pause."""
        refusals = []
        for endpoint in list(self._order):
            member, asked_at = Member(endpoint, self._tls, self._credentials), asyncio.get_running_loop().time()
            try:
                await member.greet(self._attempt)
            except MemberTrouble as trouble:
                member.close()
                self._last_troubles[endpoint] = trouble
                if trouble.outcome is RequestOutcome.REFUSED:
                    refusals.append(trouble)
                    if not trouble.ends:  # the cluster's own answer, which every member gives
                        raise EtcdRefused(trouble.sentence) from None
                self._move_to_end(endpoint)
            except BaseException:
                member.close()
                self._move_to_end(endpoint)  # or requests with little time would all wait for this silent member
                raise
            else:
                self._note_answer(asked_at)
                self.version = member.version
                if self._closed:
                    member.close()
                return member
        if len(refusals) == len(self._order):
            raise EtcdRefused(refusals[0].sentence)
        self._attempt = min(2 * self._attempt, _MAX_ATTEMPT)
        await self._sleep_briefly()
        return None

    def _leave(self, member: Member) -> None:
        """Leave a member like `leave`; the next member gets more time until it answers."""
        member.close()
        if self._member is member:
            self._member = None
            self._attempt = min(2 * self._attempt, _MAX_ATTEMPT)
            self._move_to_end(member.endpoint)

    def _move_to_end(self, endpoint: Endpoint) -> None:
        """Try this member after all others."""
        self._order.remove(endpoint)
        self._order.append(endpoint)

    def _unreachable(self, timeout_s: float) -> str:
        troubles = [self._last_troubles[endpoint] for endpoint in self._order if endpoint in self._last_troubles]
        why = "; ".join(map(str, troubles)) or "no member has answered yet"
        remedy = " and ".join(dict.fromkeys(trouble.diagnosis.remedy or _DEFAULT_REMEDY for trouble in troubles))
        where = ",".join(map(str, sorted(self._order)))
        return f"etcd at {where} did not answer within {timeout_s:g} s ({why}); {remedy or _DEFAULT_REMEDY}"

    def close(self) -> None:
        """End the connection, and open no lasting connection from now on."""
        self._closed = True
        if self._member is not None:
            self._member.close()

    # Watches

    async def watch(
        self, key: bytes, prefix: bool, from_revision: int, on_events: Callable[[Sequence[WatchEvent]], None]
    ) -> WatchEnd:
        """Report all changes from `from_revision` on, 0 for now, until that is no longer possible."""
        stream = _Watch(self, key, prefix, from_revision, on_events)
        while True:
            try:
                lost = await shielded(stream.on_one_member())
            except (EtcdRefused, EtcdUnreachable) as error:
                return WatchCancelled(str(error))
            if lost is not None:
                return lost

    async def check(self, member: Member) -> None:
        """Check that a member answers, even with a refusal. Raises MemberTrouble otherwise."""
        try:
            await self.ask_member(member, messages.STATUS, b"")
        except MemberTrouble as trouble:
            if trouble.ends:
                raise


class _Watch:
    """A watch, followed from member to member."""

    def __init__(
        self,
        cluster: EtcdMembers,
        key: bytes,
        prefix: bool,
        from_revision: int,
        on_events: Callable[[Sequence[WatchEvent]], None],
    ) -> None:
        self._cluster = cluster
        self._key = key
        self._prefix = prefix
        self._next = from_revision
        self._on_events = on_events
        self._denied = 0

    async def on_one_member(self) -> WatchEnd | None:
        """Follow until this member is unusable (None) or the watch ends."""
        member = await self._cluster.member()
        try:
            async with member.stream(messages.WATCH) as stream:
                watch = messages.encode_watch(self._key, self._prefix, self._next)
                await self._while_there(member, stream.send_message(watch))
                return await self._read(member, stream)
        except MemberTrouble as trouble:
            log.debug("an etcd watch is moving to another member: %s", trouble)
            if trouble.outcome not in (RequestOutcome.LOGIN, RequestOutcome.REFUSED) or trouble.ends:
                await self._cluster.leave(member, trouble)
                return None
            # etcd also answers "permission denied" if only the token expired.
            self._denied += 1
            if self._denied > 1:
                return WatchCancelled(trouble.sentence)
            await self._cluster.log_in(member)
            return None

    async def _read(self, member: Member, stream: Stream[bytes, bytes]) -> WatchEnd | None:
        while True:
            data = await self._while_there(member, stream.recv_message())
            if data is None:
                raise member.trouble(RequestOutcome.RETRY, "ended a watch")
            member.note_heard()
            answer = messages.decode_watch(data)
            if answer.compacted:
                return WatchCompacted(answer.compacted)
            if answer.cancelled:
                diagnosis = classify(_PERMISSION_DENIED, answer.reason, named=True)
                raise MemberTrouble(member.endpoint, diagnosis, ends=False)
            if answer.created:
                self._next = self._next or answer.revision + 1
            if answer.events:
                self._denied = 0
                self._next = answer.events[-1].kv.mod_revision + 1
                self._on_events(answer.events)

    async def _while_there(self, member: Member, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the stream or on the way to it, as long as the member answers, and return its result."""
        task, idle = start_task(work), self._cluster.idle
        try:
            while True:
                silent = asyncio.get_running_loop().time() - member.heard_at
                if (await asyncio.wait({task}, timeout=max(idle - silent, 0.05)))[0]:
                    return task.result()
                if asyncio.get_running_loop().time() - member.heard_at >= idle:
                    await self._cluster.check(member)
        finally:
            task.cancel()
