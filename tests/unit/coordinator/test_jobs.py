"""The control plane of many jobs: the dispatcher that a node gets, and what one job costs the others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import chain

import pytest

from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.coordinator.jobs import MAX_JOBS, MAX_JOBS_OF_ONE, ManyJobs
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import (
    Fail,
    NodeId,
    NodeInfo,
    Outcome,
    Reason,
    Refusal,
    Settings,
    Succeed,
    Verdict,
)
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.handshake import ClientHandshake, HandshakeError
from rallypoint.control.protocol.messages import (
    Heartbeat,
    JobEnded,
    JoinRefused,
    JoinRequest,
    Notification,
    Placed,
    Request,
    ResumeRequest,
    RoundEnded,
)
from rallypoint.failures.cause import Cause
from rallypoint.observe.watching.messages import EventKind, JobList, JobPhase, JobSummary, job_list_parts
from rallypoint.observe.watching.session import copy_of_job, job_list
from tests.unit.clocks import HandClock

CAUSE = Cause(0, 0, "a", 42, -9, "Signal 9 (SIGKILL)", "", 0.0, "")
MEMBER = NodeInfo("default", 1, "", 7000)


class World:
    """A control plane with a timer, as its server has."""

    def __init__(self) -> None:
        self.clock = HandClock(100.0)
        self.jobs = ManyJobs(self.clock)
        self.looks = 0
        self.jobs.on_change = self._changed
        self.timer = self.jobs.wake_at()

    def _changed(self) -> None:
        self.looks += 1
        self.timer = self.jobs.wake_at()

    def passes(self, seconds: float, *living: Node) -> None:
        """Let time pass, in which these nodes send heartbeats."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(end, self.clock.now + 0.25)
            for node in living:
                node.beats()
            if self.timer <= self.clock.now:
                self.jobs.tick()
                self.timer = self.jobs.wake_at()


class Node:
    """A node of a job, over one session at a time."""

    def __init__(
        self, world: World, pid: int, job: str = "job", nodes: int = 1, least: int = 0, peer: str = "192.0.2.1"
    ) -> None:
        self.world = world
        self.peer = peer
        self.pid = pid
        self.settings = Settings(job, least or nodes, nodes)
        self.told: list[Notification] = []
        self.met = ""
        self.comes()

    def comes(self) -> None:
        """Open a session. The greeting names the last coordinator."""
        settings = self.settings
        hello = ClientHandshake(settings.run_id, None, b"n", settings).hello("h", NodeId("h", self.pid, 0), self.met)
        self.dispatcher: Dispatcher = self.world.jobs.dispatcher_for(hello, self.peer)
        self.session = self.dispatcher.attach(self._hears, SessionRecord(NodeId("h", self.pid, 0), "h"))
        self.met = self.dispatcher.incarnation

    def _hears(self, notice: Notification) -> None:
        if not isinstance(notice, Heartbeat):
            self.told.append(notice)

    def says(self, request: Request) -> None:
        """Send a request."""
        self.dispatcher.receive(self.session, request)

    def beats(self) -> None:
        self.dispatcher.heartbeat(self.session)

    def joins(self) -> None:
        self.says(JoinRequest(MEMBER, 600.0))

    def goes(self) -> None:
        """Lose the connection."""
        self.dispatcher.detach(self.session)

    def comes_back(self, round_: int = 0, nodes: int = 1, met: str | None = None) -> None:
        """Resume a running round in another session."""
        met = met or self.met
        self.comes()
        self.says(ResumeRequest(met, MEMBER, round_, 0, nodes, round_over=False))


def test_an_id_is_free_when_the_ended_job_has_no_nodes(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    old = Node(world, 1)
    old.joins()
    old.says(Fail(0, CAUSE, 0))
    assert isinstance(old.told[-1], JobEnded)
    early = Node(world, 2)
    early.joins()
    # The job has its id until its nodes are gone.
    assert early.told == [JoinRefused(Refusal.CLOSED, f"it has failed: {CAUSE.headline}")]
    old.goes()
    new = Node(world, 3)
    new.joins()
    assert caplog.messages == [f"job 'job' failed: {CAUSE.headline}; restarts used: 0 of 0"]
    assert isinstance(new.told[-1], Placed), "a refused node does not keep the id"
    early.goes()
    new.says(Succeed(0))
    assert JobEnded(Verdict(Outcome.SUCCEEDED)) in new.told


def test_how_a_job_ended_is_kept() -> None:
    world = World()
    node = Node(world, 1)
    for round_ in (0, 1):
        node.joins()
        world.clock.now += 5.0
        found = world.jobs.find("job")
        assert found is not None
        found.history.reported(0.0, "rallyrun train.py", "/logs", world.clock.now)
        node.says(Fail(round_, CAUSE._replace(traceback=f"{'x' * 9000}\nValueError: boom"), 1))
    assert isinstance(node.told[-1], JobEnded)
    node.goes()
    world.passes(90.0)
    found = world.jobs.find("job")
    assert found is not None
    seen = copy_of_job(found)()
    assert (seen.phase, seen.phase_for, seen.age, seen.round) == (JobPhase.FAILED, 90.0, 10.0, 1)
    assert seen.ended_rounds.failures == 1, "the last failure used no restart"
    assert (seen.totals.command, seen.totals.log_folder) == ("rallyrun train.py", "/logs")
    assert [len(failure.traceback) for failure in seen.failures] == [0, 4096]
    assert seen.failures[-1].traceback.endswith("ValueError: boom")
    assert [failure.message for failure in seen.failures] == [CAUSE.headline, CAUSE.headline]
    assert EventKind.COORDINATOR_STARTED not in [event.kind for event in seen.events]
    assert seen.events[-1].kind is EventKind.JOB_ENDED
    listed = job_list(world.jobs)
    assert listed.jobs == ()
    (ended,) = listed.ended
    assert (ended.job, ended.phase, ended.phase_for, ended.age, ended.restarts) == (
        "job",
        JobPhase.FAILED,
        90.0,
        10.0,
        1,
    )
    assert ended.detail == f"the job has failed: {CAUSE.headline}"
    for number in range(2, 130):
        other = Node(world, number, job=f"job{number}")
        other.joins()
        other.says(Succeed(0))
        other.goes()
    assert [job.job for job in job_list(world.jobs).ended] == [f"job{number}" for number in range(129, 29, -1)]


def test_ended_jobs_are_counted() -> None:
    world = World()
    nodes = [Node(world, number, job=f"job{number}") for number in range(3)]
    for node in nodes:
        node.joins()
    nodes[0].says(Fail(0, CAUSE, 0))
    assert world.jobs.ended_counts == dict.fromkeys(Outcome, 0) | {Outcome.FAILED: 1}, "also while it has nodes"
    nodes[1].says(Succeed(0))
    for node in nodes:
        node.goes()
    world.passes(90.0)
    assert world.jobs.ended_counts == {Outcome.FAILED: 1, Outcome.SUCCEEDED: 1, Outcome.STOPPED: 0}


def test_a_list_of_jobs_fits_into_messages() -> None:
    jobs = tuple(JobSummary(f"{number:0255}", JobPhase.FAILED, 1, 2, 3, detail="x" * 200) for number in range(250))
    long = tuple(job._replace(job="x" * 4096, detail="\u20ac" * 1365) for job in jobs[:20])
    assert len(list(job_list_parts(JobList(long, long)))) == 8
    parts = list(job_list_parts(JobList(jobs + long, jobs[:20])))
    assert [part.is_last for part in parts] == [*[False] * (len(parts) - 1), True]
    assert all(len(codec.encode(part)) < codec.MAX_FRAME for part in parts)
    assert tuple(chain.from_iterable(part.jobs for part in parts)) == jobs + long
    assert tuple(chain.from_iterable(part.ended for part in parts)) == jobs[:20]
    assert [*job_list_parts(JobList(()))] == [JobList(())], "an empty list is an answer too"


def test_a_returning_node_hears_of_the_end_and_does_not_join_the_next_job() -> None:
    world = World()
    a, b = Node(world, 1, nodes=2, least=1), Node(world, 2, nodes=2, least=1)
    a.joins()
    b.joins()
    b.goes()
    a.joins()
    a.says(Succeed(1))
    assert isinstance(a.told[-1], JobEnded)
    a.goes()
    for has_next_job in (False, True):
        world.passes(3600.0)
        if has_next_job:
            new = Node(world, 3)
            new.joins()
            assert new.dispatcher is not a.dispatcher
        b.comes_back(nodes=2)
        assert b.told[-1] == JobEnded(Verdict(Outcome.SUCCEEDED))
        b.goes()


def test_a_verdict_is_forgotten_after_a_day() -> None:
    world = World()
    old = Node(world, 1)
    old.joins()
    old.says(Succeed(0))
    old.goes()
    world.clock.now += 86401
    old.comes()
    old.joins()
    assert isinstance(old.told[-1], Placed)


def test_a_node_of_the_previous_control_plane_hears_of_the_end() -> None:
    world = World()
    a, b = Node(world, 1, nodes=2, least=1), Node(world, 2, nodes=2, least=1)
    for node in (a, b):
        node.joins()
    world.jobs = ManyJobs(world.clock)
    world.jobs.on_change = world._changed
    before = a.met
    a.comes_back(nodes=2)
    a.says(Fail(0, CAUSE, 0))
    assert isinstance(a.told[-1], JobEnded)
    a.goes()
    assert b.met == before
    b.comes_back(nodes=2)
    assert isinstance(b.told[-1], JobEnded)


def test_an_unreachable_job_is_the_same_when_it_is_back() -> None:
    world = World()
    a, b = Node(world, 1, nodes=2), Node(world, 2, nodes=2)
    a.joins()
    b.joins()
    dispatcher = a.dispatcher
    b.goes()
    third = Node(world, 3, nodes=2)
    assert third.dispatcher is dispatcher, "one of its nodes is left"
    third.goes()
    a.goes()
    a.comes_back(nodes=2)
    assert a.dispatcher is dispatcher, "the one that knows it"
    ended = a.told[-1]
    assert isinstance(ended, RoundEnded)
    assert ended.end.reason is Reason.LOST


def test_an_unreachable_job_that_lost_its_id_fills_a_new_dispatcher() -> None:
    world = World()
    a = Node(world, 1)
    a.joins()
    a.goes()
    Node(world, 2).goes()
    a.comes_back()
    assert len(a.told) == 1, "its round runs on"
    a.says(Succeed(0))
    assert a.told[-1] == JobEnded(Verdict(Outcome.SUCCEEDED))


def test_a_job_without_nodes_is_forgotten_after_a_minute() -> None:
    world = World()
    a = Node(world, 1)
    a.joins()
    dispatcher = a.dispatcher
    world.passes(1000.0, a)
    for seconds, is_same in ((0.0, True), (61.0, False)):
        a.goes()
        world.passes(seconds)
        a.comes()
        assert (a.dispatcher is dispatcher) == is_same


def test_silent_nodes_of_ended_jobs_are_disconnected() -> None:
    world = World()
    old = Node(world, 1)
    old.joins()
    old.says(Succeed(0))
    disconnected: list[str] = []
    late = NodeId("h", 9, 0)
    hello = ClientHandshake("job", None, b"n", old.settings).hello("h", late, old.met)
    dispatcher = world.jobs.dispatcher_for(hello, "192.0.2.1")
    dispatcher.attach(old.told.append, SessionRecord(late, "h"), disconnect=disconnected.append)
    old.goes()
    assert Node(world, 2).dispatcher is not dispatcher
    world.passes(10.0)
    assert len(disconnected) == 1


def costs(work: Callable[[], None]) -> int:
    """The number of function calls of some work."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    former = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(former)
    return calls


def test_heartbeats_and_ticks_cost_the_same_among_many_jobs() -> None:
    heartbeats, ticks = [], []
    for count in (1, 500):
        world = World()
        nodes = [Node(world, 1, job=f"job{number}", peer=f"192.0.2.{number % 100}") for number in range(count)]
        for node in nodes:
            node.joins()
        world.passes(5.0, *nodes)
        looks = world.looks
        heartbeats.append(costs(nodes[0].beats))
        assert world.looks == looks, "the timer stays as it is"
        world.clock.now = world.timer
        ticks.append(costs(world.jobs.tick))
        assert world.jobs.wake_at() > world.clock.now
    assert heartbeats[0] == heartbeats[1]
    assert ticks[1] <= 500 * ticks[0]


def test_names_without_sessions_are_dropped_for_new_ones() -> None:
    world = World()
    running = Node(world, 1, job="running")
    running.joins()
    dispatcher = running.dispatcher
    for number in range(3 * MAX_JOBS):
        Node(world, 2, job=f"name {number}", peer=f"198.51.100.{number % 200}").goes()
        assert len(world.jobs.names) <= MAX_JOBS
    assert {"running", f"name {3 * MAX_JOBS - 1}"} <= world.jobs.names
    assert "name 0" not in world.jobs.names, "the oldest go first"
    assert Node(world, 3, job="running").dispatcher is dispatcher


@pytest.mark.parametrize(
    ("peers", "origin"),
    [(["198.51.100.7"], "198.51.100.7"), (["2001:db8:0:1::1", "2001:db8:0:1:ffff::2"], "2001:db8:0:1::/64")],
)
def test_one_address_cannot_take_all_names(peers: list[str], origin: str) -> None:
    world = World()
    greedy = [
        Node(world, 2, job=f"name {number}", peer=peers[number % len(peers)]) for number in range(MAX_JOBS_OF_ONE)
    ]
    with pytest.raises(
        HandshakeError, match=f"nodes at {origin} have started {MAX_JOBS_OF_ONE} jobs that are still running"
    ):
        Node(world, 2, job="one more", peer=peers[0])
    Node(world, 1, job="of another", peer="2001:db8:0:2::1").joins()
    Node(world, 2, job="of another", peer=peers[0])
    greedy[7].goes()
    Node(world, 2, job="one more", peer=peers[0])
    assert "name 7" not in world.jobs.names


def test_too_many_jobs_and_impossible_sizes_are_refused() -> None:
    world = World()
    for number in range(MAX_JOBS):
        Node(world, 2, job=f"name {number}", peer=f"198.51.100.{number % 200}")
    with pytest.raises(
        HandshakeError, match=f"this control plane has {MAX_JOBS} jobs that are still running; end some"
    ):
        Node(world, 1)
    with pytest.raises(HandshakeError, match="requests 2 to 1 nodes"):
        Node(World(), 1, nodes=1, least=2)


def test_a_failing_tick_is_logged_and_retried_and_costs_other_jobs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    broken, sound = Node(world, 1, job="broken"), Node(world, 1, job="sound")
    broken.joins()
    sound.joins()
    disconnected: list[str] = []
    mute = SessionRecord(NodeId("h", 9, 0), "h")
    sound.dispatcher.attach(sound.told.append, mute, disconnect=disconnected.append)
    with monkeypatch.context() as patch:
        patch.setattr(broken.dispatcher.__dict__["_coordinator"], "tick", lambda _now: 1 / 0)
        world.passes(12.0, sound)
        assert len(disconnected) == 1
        assert len(caplog.messages) == 3, caplog.messages
        assert caplog.messages[0].startswith("job 'broken': a scheduled action failed")
    world.passes(12.0)
    assert not broken.dispatcher.state.participants, "its silent node is lost"
