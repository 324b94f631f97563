"""Random lives of jobs, for property tests of the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from rallypoint.control.coordinator.coordinator import Coordinator, OutgoingMessage
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import Drain, Fail, NodeId, NodeInfo, Settings, State, Succeed
from rallypoint.control.protocol.messages import (
    JobEnded,
    JoinRefused,
    JoinRequest,
    LeaveRequest,
    Placed,
    Placement,
    Request,
    RoundEnded,
)
from rallypoint.failures.cause import Cause

NODES = 5

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["open", "join", "fail", "succeed", "drain", "leave", "crash", "wait", "stale"]),
        st.integers(0, NODES - 1),
        st.integers(0, 40),
    ),
    max_size=60,
)

SETTINGS = st.builds(
    lambda low, more, last_call: Settings(
        "job", low, low + more, join_timeout=25.0, last_call_timeout=float(last_call), lease=1000.0
    ),
    st.integers(1, 3),
    st.integers(0, 2),
    st.sampled_from([0, 5, 30]),
)

CAUSE = Cause(0, 0, "host", 1, 1, "boom", "", 0.0, "")


@dataclass
class Life:
    """A job as its nodes see it: all placements, and the current one of each session."""

    settings: Settings
    now: float = 0.0
    sessions: dict[int, int] = field(default_factory=dict)
    placements: dict[int, Placement] = field(default_factory=dict)
    rolls: dict[int, dict[int, Placement]] = field(default_factory=dict)
    """Placements by round and session."""
    joined: set[int] = field(default_factory=set)
    over: set[int] = field(default_factory=set)
    count: int = 0

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(self.settings)
        self.budget = self.settings.min_nodes - 1  # 0 to 2, so that jobs fail often enough
        self.states: list[State] = [self.coordinator.state]

    def happen(self, what: str, node: int, number: int) -> None:
        """Handle an event, if it is possible."""
        session = self.sessions.get(node)
        if what == "open" and session is None:
            self.count += 1
            self.sessions[node] = self.count
            self.coordinator.open(
                self.count, SessionRecord(NodeId(f"n{node}", self.count, 0), f"10.0.0.{node}"), self.now
            )
        elif what == "wait":
            self._wait(float(number))
        elif session is not None:
            self._act(what, node, session, number)
        self.states.append(self.coordinator.state)

    def _act(self, what: str, node: int, session: int, number: int) -> None:
        placement = self.placements.get(session)
        sends: list[OutgoingMessage] = []
        if what == "join" and session not in self.joined and session not in self.over:
            self.joined.add(session)
            member = NodeInfo("role", 1 + number % 3, "", 7000 + session, None)
            sends = self.coordinator.receive(session, JoinRequest(member, 25.0), self.now).messages
        elif what == "crash":
            del self.sessions[node]
            sends = self.coordinator.close(session, self.now).messages
        elif what == "leave":
            self.joined.discard(session)
            self.placements.pop(session, None)
            sends = self.coordinator.receive(session, LeaveRequest(), self.now).messages
        elif placement is not None:
            round_ = placement.round - 1 if what == "stale" else placement.round
            requests: dict[str, Request] = {
                "fail": Fail(round_, CAUSE, self.budget),
                "stale": Fail(round_, CAUSE, self.budget),
                "succeed": Succeed(round_),
                "drain": Drain(round_),
            }
            request = requests.get(what)
            before = self.coordinator.state
            sends = [] if request is None else self.coordinator.receive(session, request, self.now).messages
            assert what != "stale" or self.coordinator.state is before, "a report of an ended round had an effect"
        self._hear(sends)

    def _wait(self, seconds: float) -> None:
        until = self.now + seconds
        while (at := self.coordinator.wake_at()) <= until:
            self.now = max(self.now, at)
            self._hear(self.coordinator.tick(self.now).messages)
        self.now = until

    def _hear(self, sends: list[OutgoingMessage]) -> None:
        for session, notice in sends:
            match notice:
                case Placed(placement=placement):
                    assert session in self.joined, "placed without having asked"
                    self.joined.discard(session)
                    self.placements[session] = placement
                    roll = self.rolls.setdefault(placement.round, {})
                    assert session not in roll, "placed twice in one round"
                    roll[session] = placement
                case RoundEnded(end=end):
                    former = self.placements.pop(session)
                    assert former.round == end.round
                case JoinRefused():
                    self.joined.discard(session)
                case JobEnded():
                    self.placements.pop(session, None)
                    self.joined.discard(session)
                    self.over.add(session)
                case _:
                    pass
