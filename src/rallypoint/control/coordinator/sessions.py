"""The sessions of one coordinator. Pure: `now` is passed in.

Laws:

1. A node's name contains a number that nobody can guess, so a peer that greets with that name is certainly the same
   node.
2. A session belongs to one node. Its first request replaces the node's earlier sessions.
3. A node can outlive its session if it has another one: connections break in any order.
4. The session's state (`SessionState`) decides which messages a node may get, and which of its joins counts:

       state         opened by           ResumeRequest            JoinRequest        the node is placed
       ------------  ------------------  -----------------------  -----------------  ------------------
       OPEN          a new node          joining, and was sent    runs               -
                                         news: IGNORES_JOIN;
                                         joining: WILL_REJOIN;
                                         else OPEN
       RESUMING      a node that was in  as OPEN (any request     as OPEN            it is not sent: it
                     a session before    ends RESUMING)                              asks when it is back
       WILL_REJOIN   -                   as OPEN                  runs: OPEN         IGNORES_JOIN
       IGNORES_JOIN  -                   as OPEN                  is ignored: OPEN   -

   Why a join can be ignored: the node decides what to send before it reads our messages.

       1. A is waiting for a place. Its connection breaks, and in the next session A reports that it waits
          (`ResumeRequest.joining`).
       2. A's earlier join is still waiting here. It completes the round, and `Placed` is sent to A.
       3. A sends its join again, as announced, and only then reads `Placed`. If we ran the second join, A would wait
          for the round after its own.

Laws of `Liveness`:

1. A session that is silent for its lease ends.
2. Time during which this process slept does not count: messages that arrived meanwhile might be unread.
3. Time during which all sessions were silent does not count either, if there are several and none is in our own
   process: then this process is cut off. A single silent node counts as lost, because that is more likely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto

from rallypoint.base.endpoint import is_loopback
from rallypoint.base.light_dataclasses import dataclass
from rallypoint.base.light_typing import NamedTuple
from rallypoint.control.membership.state import NodeId, Settings
from rallypoint.control.protocol.messages import ConfigDifference

STRANGER_REFUSED = (
    "without a secret, only machines that host nodes of a job can end or change it; set the same "
    "RALLYPOINT_SECRET_FILE on all nodes of the job (`rallyctl secret` creates one)"
)
"""Why a node without proof must not end or change the job."""


class SessionState(Enum):
    """What a node in a session knows about its joins (law 4)."""

    OPEN = auto()
    RESUMING = auto()
    """The node had an earlier session. We send it nothing until its `ResumeRequest` describes its place."""
    WILL_REJOIN = auto()
    """The node reported that it is waiting for a place, but has not sent its join yet."""
    IGNORES_JOIN = auto()
    """Our messages overtook the join that the node sends next."""


@dataclass(slots=True)
class SessionRecord:
    """How a session was opened, and what its node reported since."""

    node: NodeId
    address: str
    """The node's own address on the way to us, as the node sees it."""
    server_address: str = ""
    """Our address as the node sees it; empty for the node of our own process."""
    observed_address: str = ""
    """The node's address as we see it; empty for the node of our own process."""
    settings: Settings | None = None
    """Settings that the node was started with; None for our own process's node."""
    leased: bool = True
    """Whether the session ends when it is silent for the lease."""
    in_this_process: bool = False
    """Whether the node's agent is in our own process, even if only for now."""
    local: bool = False
    """Whether the node's agent is in our own process, and both end together."""
    is_own_user: bool = False
    """Whether its process certainly belongs to our own user or root, on this machine."""
    trusted: bool = True
    """Whether it may end and change the job: it belongs to such a user, proved a secret, or is in this process."""
    refused: bool = False
    """Whether such a request was refused."""
    number: int = 0
    """The number of the session, set by `SessionRegistry.open`."""
    state: SessionState = SessionState.OPEN
    differences_reported: tuple[ConfigDifference, ...] = ()
    """Differences from the job's settings that the node was told."""
    addresses: tuple[str, ...] | None = None
    """Addresses of the node's interfaces, from its last join."""
    keeps_place: bool = False
    """Whether the node can get a place without a request, from its last join."""


class SessionRegistry:
    """Sessions by number and by node."""

    def __init__(self, liveness: Liveness) -> None:
        self.liveness = liveness
        self._sessions: dict[int, SessionRecord] = {}
        self._by_node: dict[NodeId, tuple[int, ...]] = {}
        """Sessions of each node; the one with requests is first."""
        self._in_this_process: list[int] = []
        self._external_addresses: dict[str, int] = {}
        """Addresses that nodes on other machines use for us, with their numbers of sessions."""

    def open(self, number: int, session: SessionRecord, now: float) -> None:
        """Add a session."""
        session.number = number
        self._sessions[number] = session
        self._by_node[session.node] = (*self._by_node.get(session.node, ()), number)
        if session.in_this_process:
            self._in_this_process.append(number)
        if _is_external(session):
            sessions = self._external_addresses.get(session.server_address, 0)
            self._external_addresses[session.server_address] = sessions + 1
        self.liveness.add_session(number, now, leased=session.leased, local=session.local)

    def hear(self, number: int, now: float) -> SessionRecord | None:
        """Note that a session sent something. Returns the session if it is open."""
        session = self._sessions.get(number)
        if session is not None:
            self.liveness.note_message(number, now)
        return session

    def replace_earlier(self, session: SessionRecord) -> tuple[int, ...]:
        """End the earlier sessions of a session's node (law 2). Returns their numbers."""
        sessions = self._by_node[session.node]
        earlier = sessions[: sessions.index(session.number)]
        for number in earlier:
            self.close(number)
        return earlier

    def close(self, number: int) -> NodeId | None:
        """End a session. Returns its node if that has no other session (law 3)."""
        session = self._sessions.pop(number, None)
        if session is None:
            return None
        if _is_external(session):
            self._external_addresses[session.server_address] -= 1
            if not self._external_addresses[session.server_address]:
                del self._external_addresses[session.server_address]
        if session.in_this_process:
            self._in_this_process.remove(number)
        self.liveness.remove_session(number)
        others = tuple(other for other in self._by_node[session.node] if other != number)
        if others:
            self._by_node[session.node] = others
            return None
        del self._by_node[session.node]
        return session.node

    def get(self, number: int) -> SessionRecord | None:
        """The session of this number, if it is open."""
        return self._sessions.get(number)

    def find(self, node: NodeId) -> SessionRecord | None:
        """The node's session, if it is ready for notifications."""
        numbers = self._by_node.get(node)
        session = None if numbers is None else self._sessions[numbers[0]]
        return None if session is None or session.state is SessionState.RESUMING else session

    def __contains__(self, node: NodeId) -> bool:
        return self.find(node) is not None

    def __iter__(self) -> Iterator[SessionRecord]:
        """Iterate over the sessions in the order of their opening."""
        return iter(self._sessions.values())

    def copy_last_heard(self) -> Callable[[], Mapping[NodeId, float]]:
        """Copy what can change. Returns a function that maps each node with a session to the time of its last message;
        infinity without a lease."""
        sessions, by_node, heard = list(self._sessions.values()), dict(self._by_node), self.liveness.copy_last_heard()

        def last_heard() -> Mapping[NodeId, float]:
            return {
                session.node: heard.get(session.number, math.inf)
                for session in sessions
                if by_node[session.node][0] == session.number and session.state is not SessionState.RESUMING
            }

        return last_heard

    @property
    def nodes(self) -> frozenset[NodeId]:
        """All nodes that have a session."""
        return frozenset(self._by_node)

    @property
    def own_external_address(self) -> str:
        """The address that a node on another machine uses for us; empty if there is no such node."""
        return next(iter(self._external_addresses), "")

    @property
    def local_nodes(self) -> list[NodeId]:
        """The nodes whose agent is in our own process and ends together with the coordinator."""
        return [session.node for number in self._in_this_process if (session := self._sessions[number]).local]

    @property
    def nodes_in_this_process(self) -> list[NodeId]:
        """Nodes whose agent is in our own process, including an elected leader's, which might outlive its term."""
        return [self._sessions[number].node for number in self._in_this_process]


def _is_external(session: SessionRecord) -> bool:
    """Whether the session's node is on another machine."""
    return bool(session.server_address) and not is_loopback(session.address)


_MAX_EXCUSED_PAUSES = 3
"""Maximum number of consecutive sleeps to excuse: a process that keeps sleeping must decide at some point."""


class SilentSessions(NamedTuple):
    """The result of a check: sessions whose nodes are `lost`, and sessions `out_of_reach` because we are cut off."""

    lost: tuple[int, ...] = ()
    out_of_reach: tuple[int, ...] = ()


class Liveness:
    """Tracks when each session last sent something."""

    def __init__(self, lease: float, outage_timeout: float) -> None:
        """Start without sessions.

        Args:
            lease: seconds for which a session may be silent.
            outage_timeout: seconds for which sessions stay open while all are silent.
        """
        self.lease = lease
        self.outage_timeout = outage_timeout
        self._heard: dict[int, float] = {}
        """When each session with a lease last sent something."""
        self._local: set[int] = set()
        self._heard_at = -math.inf
        self._looked_at = -math.inf
        self._excused_pauses = 0
        """How many consecutive checks were excused because they followed a sleep."""

    def add_session(self, session: int, now: float, *, leased: bool, local: bool) -> None:
        """Add a session; `local` if its node is in our own process."""
        self.note_message(session, now)
        if leased:
            self._looked_at = self._looked_at if self._heard else now
            self._heard[session] = now
        if local:
            self._local.add(session)

    def note_message(self, session: int, now: float) -> None:
        """Note that a session sent something."""
        if self._seem_cut_off(now):
            self._grant_extra_time(now, now - self._heard_at)
        self._heard_at = now
        if session in self._heard:
            self._heard[session] = now

    def copy_last_heard(self) -> Mapping[int, float]:
        """A copy of the times at which each session with a lease last sent something."""
        return dict(self._heard)

    def remove_session(self, session: int) -> None:
        self._heard.pop(session, None)
        self._local.discard(session)

    def check_at(self) -> float:
        """When to check next, in seconds on the clock of `now`; infinity for never."""
        return self._looked_at + self.lease / 4 if self._heard else math.inf

    def check(self, now: float) -> SilentSessions:
        """Find the sessions that are silent at `now`; none before `check_at`."""
        due = self._looked_at + self.lease / 4
        if now < due:
            return SilentSessions()
        late = now - due
        self._grant_extra_time(now, late)
        self._heard_at = min(now, self._heard_at + late)
        # After a sleep, check a little later, when unread messages are read.
        self._excused_pauses = (
            self._excused_pauses + 1 if late > self.lease / 8 and self._excused_pauses < _MAX_EXCUSED_PAUSES else 0
        )
        self._looked_at = now - (self.lease * 3 / 16 if self._excused_pauses else 0.0)
        if self._excused_pauses:
            return SilentSessions()
        if self._seem_cut_off(now):
            return SilentSessions(
                out_of_reach=tuple(self._heard) if now - self._heard_at >= self.outage_timeout else ()
            )
        return SilentSessions(
            lost=tuple(number for number, heard_at in self._heard.items() if now - heard_at >= self.lease)
        )

    def _seem_cut_off(self, now: float) -> bool:
        # Nodes send three heartbeats per lease, or in a large job more than two, each at its own time.
        return now - self._heard_at >= self.lease / 2 and len(self._heard) >= 2 and not self._local

    def _grant_extra_time(self, now: float, seconds: float) -> None:
        for session, heard_at in self._heard.items():
            self._heard[session] = min(now, heard_at + seconds)
