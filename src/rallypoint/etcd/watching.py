"""A watch on the loop: followed from member to member, by revision.

Laws:

- each change is told once and in order: after a lost member the watch begins anew, on another, from the revision after
  the last one that it told. etcd sends all changes of one revision in one message, so none is told in part;
- a member that is behind says nothing until it has what is wanted; one that has no leader, or is silent, is left;
- what can no longer be told is told as such: `Compacted`, and never skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rallypoint.base.log import get_logger
from rallypoint.etcd import messages
from rallypoint.etcd.answers import Fate, Verdict, judge
from rallypoint.etcd.api import Cancelled, Compacted, EtcdRefused, EtcdUnreachable, Lost, WatchEvent
from rallypoint.etcd.cluster import Cluster, sentence
from rallypoint.etcd.member import Member, MemberStream, Trouble, apart

log = get_logger(__name__)

_PAUSE = 0.1
"""Seconds before a watch that could not begin is tried again."""
_PERMISSION_DENIED = 7


async def follow(
    cluster: Cluster,
    key: bytes,
    prefix: bool,
    from_revision: int,
    on_events: Callable[[Sequence[WatchEvent]], None],
) -> Lost:
    """Tell all changes from `from_revision` on (0: from now on) until that is no longer possible, and why it is not."""
    follower = _Follower(cluster, key, prefix, from_revision, on_events)
    while True:
        try:
            lost = await apart(follower.on_one_member())
        except (EtcdRefused, EtcdUnreachable) as error:
            return Cancelled(str(error))
        if lost is not None:
            return lost


class _Follower:
    def __init__(
        self,
        cluster: Cluster,
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

    async def on_one_member(self) -> Lost | None:
        """Follow until this member is of no further use (None), or the watch is over."""
        member = await self._cluster.member()
        try:
            async with member.stream(messages.WATCH) as stream:
                await stream.send(messages.encode_watch(self._key, self._prefix, self._next))
                return await self._read(member, stream)
        except Trouble as trouble:
            return await self._judge(member, trouble)

    async def _read(self, member: Member, stream: MemberStream) -> Lost | None:
        while True:
            data = await stream.receive()
            if data is None:
                raise Trouble(member.endpoint, Verdict(Fate.UNKNOWN, "ended a watch"), ends=True)
            answer = messages.decode_watch(data)
            if answer.compacted:
                return Compacted(answer.compacted)
            if answer.cancelled:
                raise Trouble(member.endpoint, judge(_PERMISSION_DENIED, answer.reason, named=True), ends=False)
            if answer.created:
                self._cluster.answered()
                self._next = self._next or answer.revision + 1
            if answer.events:
                self._denied = 0
                self._next = answer.events[-1].kv.mod_revision + 1
                self._on_events(answer.events)

    async def _judge(self, member: Member, trouble: Trouble) -> Lost | None:
        log.debug("a watch moves on: %s", trouble)
        if trouble.fate in (Fate.LOGIN, Fate.REFUSED) and not trouble.ends:
            # etcd says "permission denied" also where only the token is too old.
            self._denied += 1
            if self._denied > 1:
                return Cancelled(sentence(trouble))
            await self._cluster.log_in(member)
            return None
        self._cluster.leave(member)
        await asyncio.sleep(_PAUSE if not trouble.ends else 0)
        return None
