"""All members of a cluster as one: which of them is asked, and what happens when it does not answer. On the loop.

Laws:

- one member at a time is used for everything, so that a client costs the cluster one connection;
- every request may be sent twice: it reads, or is as good twice as once, or having been done makes its own conditions
  false. So where there is no answer within the time of an attempt, the next member is asked;
- an attempt has a second, or twice the time that the last answer took, and twice that again after each silent member:
  where all are slow (an overloaded machine), the members are not given up one after the other.

Laws of a watch:

- each change is reported once and in order: after a lost member the watch begins again, on another, from the revision
  after the last one that was reported. etcd sends all changes of one revision in one message, so none is split;
- a member that is behind says nothing until it has what is wanted. One from which nothing at all was heard for a while
  is asked for its status, and left if it does not answer, also while the watch is still being begun. Clients that are
  many ask rarely. One without a leader ends the stream by itself;
- what can no longer be reported ends the watch (`WatchCompacted`) and is never skipped.
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
"""Seconds that one member has to answer, and to take a new connection; more where all are slow."""
_MAX_ATTEMPT = 10.0
IDLE = 1.1
"""Seconds without a word from a member after which a watch asks for its status: no longer than a lease of 3 s is kept
silent."""
_DEFAULT_REMEDY = "see whether most of its members run"
_PAUSE, _LONGEST_PAUSE = 0.1, 1.0
"""Seconds between two rounds over all members: at most the first, doubled until one has answered, up to the second. A
random part of it, so that the agents of a large job do not all return in the same instant."""
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
        """The version of the last member that was connected to, if it has said so."""
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
        """Ask until there is an answer, which is empty where an earlier sending was done.

        Raises:
            EtcdUnreachable: there was none within `timeout_s`.
            EtcdRefused: there will be none.
            EtcdLeaseGone: the lease that it names is gone.
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
        """The answer of one member, within the time of an attempt. Raises MemberTrouble if there is none."""
        limit, asked_at = self._attempt, asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(limit):
                answer = await member.ask(method, body)
        except TimeoutError:  # its own: that of the whole request would have cancelled this
            raise member.trouble(RequestOutcome.RETRY, f"has been silent for {limit:.1f} s") from None
        self._note_answer(asked_at)
        return answer

    def _note_answer(self, asked_at: float) -> None:
        """A member did what it was asked for then: the next attempt needs as long, or somewhat longer."""
        took = asyncio.get_running_loop().time() - asked_at
        self._attempt = min(max(ATTEMPT, 2 * took), _MAX_ATTEMPT)
        self._pause = _PAUSE

    async def _sleep_briefly(self) -> None:
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        await asyncio.sleep(random.uniform(pause / 2, pause))

    async def _move_on(self, member: Member, trouble: MemberTrouble) -> None:
        """Use another member, where that can help."""
        self._last_troubles[member.endpoint] = trouble
        if trouble.outcome is RequestOutcome.LEASE_GONE:
            raise EtcdLeaseGone(trouble.sentence)
        if trouble.outcome is not RequestOutcome.RETRY and not trouble.ends:
            raise EtcdRefused(trouble.sentence)
        await self.leave(member, trouble)

    async def leave(self, member: Member, trouble: MemberTrouble) -> None:
        """Use another member from now on, for everything."""
        self._leave(member)
        if not trouble.ends:
            await self._sleep_briefly()  # no busy loop, where each member refuses at once

    async def log_in(self, member: Member) -> None:
        """Fetch a new token for all that goes over `member`; if that fails for now, another member is used next.

        Raises:
            EtcdRefused: user and password are not taken any more.
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
        """The member that is used, connected to; waits until there is one.

        Raises:
            EtcdRefused: all members are there, and none will ever accept us.
            EtcdUnreachable: this is closed.
        """
        async with self._opening:
            while self._member is None or self._member.closed:
                if self._closed:
                    raise EtcdUnreachable("this client of etcd is closed")
                self._member = await self._open_one()
        return self._member

    async def _open_one(self) -> Member | None:
        """Go round all members once; after that, pause."""
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
                    if not trouble.ends:  # the cluster's own answer, which is the same everywhere
                        raise EtcdRefused(trouble.sentence) from None
                self._move_to_end(endpoint)
            except BaseException:
                member.close()
                self._move_to_end(endpoint)  # else those with little time would all wait for the same silent one
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
        """As `leave`; the next one has more time until it has answered."""
        member.close()
        if self._member is member:
            self._member = None
            self._attempt = min(2 * self._attempt, _MAX_ATTEMPT)
            self._move_to_end(member.endpoint)

    def _move_to_end(self, endpoint: Endpoint) -> None:
        """Try this one after all others."""
        self._order.remove(endpoint)
        self._order.append(endpoint)

    def _unreachable(self, timeout_s: float) -> str:
        troubles = [self._last_troubles[endpoint] for endpoint in self._order if endpoint in self._last_troubles]
        why = "; ".join(map(str, troubles)) or "no member has answered yet"
        remedy = " and ".join(dict.fromkeys(trouble.diagnosis.remedy or _DEFAULT_REMEDY for trouble in troubles))
        where = ",".join(map(str, sorted(self._order)))
        return f"etcd at {where} gave no answer within {timeout_s:g} s ({why}); {remedy or _DEFAULT_REMEDY}"

    def close(self) -> None:
        """End the connection, and open no other that lasts."""
        self._closed = True
        if self._member is not None:
            self._member.close()

    # Watches

    async def watch(
        self, key: bytes, prefix: bool, from_revision: int, on_events: Callable[[Sequence[WatchEvent]], None]
    ) -> WatchEnd:
        """Report all changes from `from_revision` on, 0 for from now on, until that is no longer possible."""
        stream = _Watch(self, key, prefix, from_revision, on_events)
        while True:
            try:
                lost = await shielded(stream.on_one_member())
            except (EtcdRefused, EtcdUnreachable) as error:
                return WatchCancelled(str(error))
            if lost is not None:
                return lost

    async def check(self, member: Member) -> None:
        """Make sure that a member is there; it may refuse to say more. Raises MemberTrouble if it is not."""
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
        """Follow until this member is of no further use (None), or the watch is over."""
        member = await self._cluster.member()
        try:
            async with member.stream(messages.WATCH) as stream:
                watch = messages.encode_watch(self._key, self._prefix, self._next)
                await self._while_there(member, stream.send_message(watch))
                return await self._read(member, stream)
        except MemberTrouble as trouble:
            log.debug("a watch moves to another member: %s", trouble)
            if trouble.outcome not in (RequestOutcome.LOGIN, RequestOutcome.REFUSED) or trouble.ends:
                await self._cluster.leave(member, trouble)
                return None
            # etcd says "permission denied" also where only the token is too old.
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
        """What `work` returns, on the stream or on the way to it; waits as long as the member is there."""
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
