"""A watch on the loop: followed from member to member, by revision.

Laws:

- each change is reported once and in order: after a lost member the watch begins again, on another, from the revision
  after the last one that was reported. etcd sends all changes of one revision in one message, so none is split;
- a member that is behind says nothing until it has what is wanted; one that has no leader, or is silent, is left;
- what can no longer be reported ends the watch (`WatchCompacted`) and is never skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rallypoint.base.log import get_logger
from rallypoint.etcd import messages
from rallypoint.etcd.api import EtcdRefused, EtcdUnreachable, WatchCancelled, WatchCompacted, WatchEnd, WatchEvent
from rallypoint.etcd.cluster import Cluster, error_sentence
from rallypoint.etcd.error_classes import Diagnosis, RequestOutcome, classify
from rallypoint.etcd.member import Member, MemberStream, MemberTrouble
from rallypoint.etcd.tasks import shielded

log = get_logger(__name__)

_PAUSE = 0.1
"""Seconds before a watch that could not begin is tried again."""
_PERMISSION_DENIED = 7


class WatchStream:
    """Reports all changes from `from_revision` on; 0 for from now on."""

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

    async def run(self) -> WatchEnd:
        """Report changes until that is no longer possible, and return why."""
        while True:
            try:
                lost = await shielded(self._on_one_member())
            except (EtcdRefused, EtcdUnreachable) as error:
                return WatchCancelled(str(error))
            if lost is not None:
                return lost

    async def _on_one_member(self) -> WatchEnd | None:
        """Follow until this member is of no further use (None), or the watch is over."""
        member = await self._cluster.member()
        try:
            async with member.stream(messages.WATCH) as stream:
                await stream.send(messages.encode_watch(self._key, self._prefix, self._next))
                return await self._read(member, stream)
        except MemberTrouble as trouble:
            return await self._handle_trouble(member, trouble)

    async def _read(self, member: Member, stream: MemberStream) -> WatchEnd | None:
        while True:
            data = await stream.receive()
            if data is None:
                raise MemberTrouble(member.endpoint, Diagnosis(RequestOutcome.UNKNOWN, "ended a watch"), ends=True)
            answer = messages.decode_watch(data)
            if answer.compacted:
                return WatchCompacted(answer.compacted)
            if answer.cancelled:
                raise MemberTrouble(
                    member.endpoint, classify(_PERMISSION_DENIED, answer.reason, named=True), ends=False
                )
            if answer.created:
                self._cluster.reset_timeout()
                self._next = self._next or answer.revision + 1
            if answer.events:
                self._denied = 0
                self._next = answer.events[-1].kv.mod_revision + 1
                self._on_events(answer.events)

    async def _handle_trouble(self, member: Member, trouble: MemberTrouble) -> WatchEnd | None:
        log.debug("a watch moves to another member: %s", trouble)
        if trouble.outcome in (RequestOutcome.LOGIN, RequestOutcome.REFUSED) and not trouble.ends:
            # etcd says "permission denied" also where only the token is too old.
            self._denied += 1
            if self._denied > 1:
                return WatchCancelled(error_sentence(trouble))
            await self._cluster.log_in(member)
            return None
        self._cluster.switch_from(member)
        await asyncio.sleep(_PAUSE if not trouble.ends else 0)
        return None
