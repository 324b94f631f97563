"""The sessions of one coordinator, and the names of their nodes. Pure: `now` is passed in.

Laws:

1. A name is given once. So a node that has lost its session can claim its name in the next one, and is certainly the
   same. A name that was claimed is not given to another node, even if we have not given it (an earlier coordinator may
   have).
2. A session belongs to one node, and a node has one session at most: claiming a name ends the session that had it.
3. A node may report the name that another coordinator gave it, until it has heard from us: that name stands for it here
   too.
4. A session that ends after its node has opened another one has not ended its node: connections break in any order.
5. Silent sessions are found by `liveness`, which is notified of every session here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rallypoint.base.endpoint import is_loopback
from rallypoint.base.light_dataclasses import dataclass
from rallypoint.control.membership.liveness import Liveness
from rallypoint.control.membership.state import NodeId, Settings
from rallypoint.control.protocol.messages import ConfigDifference

_MAX_NAMES = 64
"""The number of earlier names of one node that are remembered, beyond which those of other coordinators are not."""


STRANGER_REFUSED = (
    "without a secret, a job is ended or changed only from machines that host its nodes; give all nodes of the job the "
    "same RALLYPOINT_SECRET_FILE (`rallyctl secret` makes one)"
)
"""Why a node that has proved nothing may not end or change the job."""


@dataclass(slots=True)
class SessionRecord:
    """What is known about a session: how it was opened, and what its node has reported since."""

    node: NodeId
    """The name that the node requests, and from `SessionRegistry.open` on the one that it has."""
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
    requested: NodeId | None = None
    """The name that the node requests in each of its sessions, from `SessionRegistry.open` on."""
    repeats_join: bool = False
    """Whether the node has reported at the beginning that it waits for a place, and has not sent its join yet."""
    skips_join: bool = False
    """Whether the join that it sends next was overtaken by a notification that it was just sent."""
    claimed: bool = False
    """Whether it has claimed a name, which it does at its beginning and once."""
    differences_reported: tuple[ConfigDifference, ...] = ()
    """The differences from the job's settings that the node has been told."""
    addresses: tuple[str, ...] | None = None
    """The addresses of the node's interfaces, as sent with its last join."""


class SessionRegistry:
    """Sessions by number and by node."""

    def __init__(self, liveness: Liveness) -> None:
        self.liveness = liveness
        self._sessions: dict[int, SessionRecord] = {}
        self._by_node: dict[NodeId, int] = {}
        self._newest: dict[NodeId, int] = {}
        """A requested name to the newest session with it."""
        self._next_local_id: dict[tuple[str, int], int] = {}
        """Address and process id to the lowest local id that was not given to them yet."""
        self._names: dict[tuple[str, NodeId], NodeId] = {}
        """Each name that a node had before, with the coordinator that gave it (empty for us), to its name here."""
        self._names_by_node: dict[NodeId, list[tuple[str, NodeId]]] = {}
        """The reverse mapping."""
        self._in_this_process: list[int] = []
        self._external_addresses: dict[int, str] = {}
        """The addresses that nodes on other machines use for us."""

    def open(self, number: int, session: SessionRecord, now: float) -> None:
        """A session begins; its node gets the requested name, unless that was given before."""
        session.requested, session.number, session.node = session.node, number, self._unique(session.node)
        self._sessions[number] = session
        self._newest[session.requested] = number
        self._by_node[session.node] = number
        if session.in_this_process:
            self._in_this_process.append(number)
        if session.server_address and not is_loopback(session.address):
            self._external_addresses[number] = session.server_address
        self.liveness.opened(number, now, leased=session.leased, local=session.local)

    def reserve(self, name: NodeId) -> None:
        """A name was given, perhaps by an earlier coordinator: no other node gets it."""
        taken = max(name.local_id + 1, self._next_local_id.get((name.addr, name.pid), 0))
        self._next_local_id[name.addr, name.pid] = taken

    def resume(self, session: SessionRecord, name: NodeId) -> int | None:
        """The node of a session was here before, with that name. Returns the session that this ends."""
        name = self._names.get(("", name), name)
        if session.node == name or session.claimed:
            return None
        session.claimed = True
        previous = self._by_node.get(name)
        if previous is not None:
            self.close(previous)
        self.reserve(name)
        self._remember("", session.node, name)
        del self._by_node[session.node]
        session.node = name
        self._by_node[name] = session.number
        return previous

    def name_of(self, incarnation: str, name: NodeId) -> NodeId | None:
        """The name here of a node that another coordinator gave that name, if the node has reported it before."""
        return self._names.get((incarnation, name))

    def reported(self, session: SessionRecord, incarnation: str, name: NodeId) -> None:
        """The node of a session has that name from another coordinator: it reports it again until it has heard us."""
        if len(self._names_by_node.get(session.node, ())) < _MAX_NAMES:
            self._remember(incarnation, name, session.node)

    def _remember(self, incarnation: str, name: NodeId, node: NodeId) -> None:
        self._names[incarnation, name] = node
        self._names_by_node.setdefault(node, []).append((incarnation, name))

    def hand_over(self, number: int, known: Callable[[NodeId], bool]) -> bool:
        """A session is about to end: if its node has opened another, which has not claimed anything yet, and is `known`
        by name, the other session takes the name at once. Returns whether it does.
        """
        session = self._sessions.get(number)
        if session is None or session.requested is None or not known(session.node):
            return False
        newest = self._newest.get(session.requested, number)
        return newest != number and self.resume(self._sessions[newest], session.node) is not None

    def close(self, number: int) -> SessionRecord | None:
        """A session ends; its node may come back. Returns its record, None if there is none of that number."""
        session = self._sessions.pop(number, None)
        if session is not None:
            del self._by_node[session.node]
            if session.requested is not None and self._newest.get(session.requested) == number:
                del self._newest[session.requested]
            self._external_addresses.pop(number, None)
            if session.in_this_process:
                self._in_this_process.remove(number)
            self.liveness.closed(number)
        return session

    def forget(self, node: NodeId) -> None:
        """Nothing is held for a node any more: forget its earlier names."""
        for called in self._names_by_node.pop(node, ()):
            if self._names.get(called) == node:
                del self._names[called]

    def get(self, number: int) -> SessionRecord | None:
        """The session of that number, if it is open."""
        return self._sessions.get(number)

    def session_of(self, node: NodeId) -> int | None:
        """The number of the node's session, if it has one."""
        return self._by_node.get(node)

    def __contains__(self, node: NodeId) -> bool:
        return node in self._by_node

    def __iter__(self) -> Iterator[tuple[int, SessionRecord]]:
        """Numbers and sessions, in the order in which they were opened."""
        return iter(self._sessions.items())

    def silence(self, node: NodeId, now: float) -> float | None:
        """Seconds since a node was last heard; None if it has no session, or one without a lease."""
        number = self._by_node.get(node)
        return None if number is None else self.liveness.silence(number, now)

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

    def _unique(self, node: NodeId) -> NodeId:
        addr = node.addr or "?"
        local_id = max(node.local_id, self._next_local_id.get((addr, node.pid), 0))
        self._next_local_id[addr, node.pid] = local_id + 1
        return NodeId(addr, node.pid, local_id, node.host)
