"""The sessions of one coordinator. Pure: `now` is passed in.

Laws:

1. A node names itself, with a number that nobody can guess: who greets by that name is certainly the same node.
2. A session belongs to one node. With its first request it replaces the earlier ones of its node.
3. A session that ends while its node has another one has not ended its node: connections break in any order.
4. Silent sessions are found by `liveness`, which is notified of every session here.
"""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint.base.endpoint import is_loopback
from rallypoint.base.light_dataclasses import dataclass
from rallypoint.control.membership.liveness import Liveness
from rallypoint.control.membership.state import NodeId, Settings
from rallypoint.control.protocol.messages import ConfigDifference

STRANGER_REFUSED = (
    "without a secret, a job is ended or changed only from machines that host its nodes; give all nodes of the job the "
    "same RALLYPOINT_SECRET_FILE (`rallyctl secret` makes one)"
)
"""Why a node that has proved nothing may not end or change the job."""


@dataclass(slots=True)
class SessionRecord:
    """What is known about a session: how it was opened, and what its node has reported since."""

    node: NodeId
    address: str
    """The node's own address towards us, as it sees it."""
    server_address: str = ""
    """Our address as the node sees it; empty for the node of our own process."""
    observed_address: str = ""
    """The node's address as we see it; empty for the node of our own process."""
    settings: Settings | None = None
    """The settings that the node was started with; None for the node of our own process."""
    leased: bool = True
    """Whether the session ends when it is silent for the lease."""
    in_this_process: bool = False
    """Whether the node's agent is in our own process, even if only for now."""
    local: bool = False
    """Whether it is, and both end together."""
    is_own_user: bool = False
    """Whether its process is known to be of our own user, or of root, on this machine."""
    trusted: bool = True
    """Whether it may end and change the job: it is that user's, or has proved something, or runs in this process."""
    refused: bool = False
    """Whether it has wanted to, and was not allowed."""
    number: int = 0
    """The number of the session, from `SessionRegistry.open` on."""
    resumes: bool = False
    """Whether the node was in a session before and has yet to say what it holds: until then it is told nothing."""
    repeats_join: bool = False
    """Whether the node has reported at the beginning that it waits for a place, and has not sent its join yet."""
    skips_join: bool = False
    """Whether the join that it sends next was overtaken by a notification that it was just sent."""
    differences_reported: tuple[ConfigDifference, ...] = ()
    """The differences from the job's settings that the node has been told."""
    addresses: tuple[str, ...] | None = None
    """The addresses of the node's interfaces, as sent with its last join."""


class SessionRegistry:
    """Sessions by number and by node."""

    def __init__(self, liveness: Liveness) -> None:
        self.liveness = liveness
        self._sessions: dict[int, SessionRecord] = {}
        self._by_node: dict[NodeId, tuple[int, ...]] = {}
        """The sessions of each node; the first is the one in which it has spoken."""
        self._in_this_process: list[int] = []
        self._external_addresses: dict[int, str] = {}
        """The addresses that nodes on other machines use for us."""

    def open(self, number: int, session: SessionRecord, now: float) -> None:
        """A session begins."""
        session.number = number
        self._sessions[number] = session
        self._by_node[session.node] = (*self._by_node.get(session.node, ()), number)
        if session.in_this_process:
            self._in_this_process.append(number)
        if session.server_address and not is_loopback(session.address):
            self._external_addresses[number] = session.server_address
        self.liveness.opened(number, now, leased=session.leased, local=session.local)

    def replace_earlier(self, session: SessionRecord) -> tuple[int, ...]:
        """A session speaks: end the earlier ones of its node (law 2). Returns their numbers."""
        sessions = self._by_node[session.node]
        earlier = sessions[: sessions.index(session.number)]
        for each in earlier:
            self.close(each)
        return earlier

    def close(self, number: int) -> NodeId | None:
        """A session ends. Returns its node, if that has no other one (law 3)."""
        session = self._sessions.pop(number, None)
        if session is None:
            return None
        self._external_addresses.pop(number, None)
        if session.in_this_process:
            self._in_this_process.remove(number)
        self.liveness.closed(number)
        others = tuple(each for each in self._by_node[session.node] if each != number)
        if others:
            self._by_node[session.node] = others
            return None
        del self._by_node[session.node]
        return session.node

    def get(self, number: int) -> SessionRecord | None:
        """The session of that number, if it is open."""
        return self._sessions.get(number)

    def of(self, node: NodeId) -> SessionRecord | None:
        """The session in which a node can be told something, if it has one."""
        numbers = self._by_node.get(node)
        session = None if numbers is None else self._sessions[numbers[0]]
        return None if session is None or session.resumes else session

    def __contains__(self, node: NodeId) -> bool:
        return self.of(node) is not None

    def __iter__(self) -> Iterator[SessionRecord]:
        """In the order in which they were opened."""
        return iter(self._sessions.values())

    def silence(self, node: NodeId, now: float) -> float | None:
        """Seconds since a node was last heard; None if it has no session, or one without a lease."""
        session = self.of(node)
        return None if session is None else self.liveness.silence(session.number, now)

    @property
    def nodes(self) -> frozenset[NodeId]:
        """All nodes that have a session."""
        return frozenset(self._by_node)

    @property
    def own_external_address(self) -> str:
        """The address that a node on another machine uses for us; empty if there is none."""
        return next(iter(self._external_addresses.values()), "")

    @property
    def local_nodes(self) -> list[NodeId]:
        """The nodes whose agent is in our own process and ends together with the coordinator."""
        return [self._sessions[number].node for number in self.liveness.local_sessions]

    @property
    def nodes_in_this_process(self) -> list[NodeId]:
        """The nodes whose agent is in our own process: also that of an elected leader, which may outlive its term."""
        return [self._sessions[number].node for number in self._in_this_process]
