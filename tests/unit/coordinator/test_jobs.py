"""The control plane for many jobs: which dispatcher a node gets, and what one job costs the others."""

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
    """A control plane, and a timer that ticks it as its server would."""

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
        """Time passes; those who live say so now and then."""
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
        self,
        world: World,
        pid: int,
        job: str = "job",
        nodes: int = 1,
        least: int | None = None,
        peer: str = "192.0.2.1",
    ) -> None:
        self.world = world
        self.peer = peer
        self.pid = pid
        self.settings = Settings(job, least or nodes, nodes)
        self.told: list[Notification] = []
        self.met = ""
        self.comes()

    def comes(self) -> None:
        """Open a session, naming the coordinator of the last one."""
        settings = self.settings
        hello = ClientHandshake(settings.run_id, None, b"n", settings).hello("h", NodeId("h", self.pid, 0), self.met)
        self.dispatcher: Dispatcher = self.world.jobs.dispatcher_for(hello, self.peer)
        self.session = self.dispatcher.attach(self._hears, SessionRecord(NodeId("h", self.pid, 0), "h"))
        self.met = self.dispatcher.incarnation

    def _hears(self, notice: Notification) -> None:
        if not isinstance(notice, Heartbeat):
            self.told.append(notice)

    def says(self, request: Request) -> None:
        """Say something, if the session is open still."""
        self.dispatcher.receive(self.session, request)

    def beats(self) -> None:
        """Send a heartbeat."""
        self.dispatcher.heartbeat(self.session)

    def joins(self) -> None:
        """Ask for a place."""
        self.says(JoinRequest(MEMBER, 600.0))

    def goes(self) -> None:
        """The connection is broken."""
        self.dispatcher.detach(self.session)

    def comes_back(self, round_: int = 0, nodes: int = 1, met: str | None = None) -> None:
        """Open another session, and say what is held of a round that runs."""
        met = met or self.met
        self.comes()
        self.says(ResumeRequest(met, MEMBER, round_, 0, nodes, round_over=False))


def test_the_id_of_an_ended_job_is_free_when_its_nodes_have_gone(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    old = Node(world, 1)
    old.joins()
    old.says(Fail(0, CAUSE, 0))
    assert isinstance(old.told[-1], JobEnded)
    early = Node(world, 2)
    early.joins()
    assert early.told == [JoinRefused(Refusal.CLOSED, f"it has failed: {CAUSE.headline}")], (
        "while the job's nodes are there it has that id"
    )
    old.goes()
    new = Node(world, 3)
    new.joins()
    assert caplog.messages == [f"job 'job' failed: {CAUSE.headline}; restarts used: 0 of 0"]
    assert isinstance(new.told[-1], Placed), "who was refused does not hold the id"
    early.goes()
    new.says(Succeed(0))
    assert JobEnded(Verdict(Outcome.SUCCEEDED)) in new.told


def test_how_a_job_has_ended_stays() -> None:
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
    assert seen.ended_rounds.failures == 1, "the failure that has ended the job has used no restart"
    assert (seen.totals.command, seen.totals.log_folder) == ("rallyrun train.py", "/logs")
    assert [len(each.traceback) for each in seen.failures] == [0, 4096]
    assert seen.failures[-1].traceback.endswith("ValueError: boom")
    assert [each.message for each in seen.failures] == [CAUSE.headline, CAUSE.headline]
    assert [each.kind for each in seen.events if each.kind is EventKind.COORDINATOR_STARTED] == []
    assert seen.events[-1].kind is EventKind.JOB_ENDED
    listed = job_list(world.jobs)
    assert listed.jobs == ()
    assert [(each.job, each.phase, each.phase_for, each.age, each.restarts) for each in listed.ended] == [
        ("job", JobPhase.FAILED, 90.0, 10.0, 1)
    ]
    assert listed.ended[0].detail == f"the job has failed: {CAUSE.headline}"
    for number in range(2, 130):
        other = Node(world, number, job=f"job{number}")
        other.joins()
        other.says(Succeed(0))
        other.goes()
    assert [each.job for each in job_list(world.jobs).ended] == [f"job{number}" for number in range(129, 29, -1)]


def test_ended_jobs_are_counted_from_their_end_on() -> None:
    world = World()
    nodes = [Node(world, number, job=f"job{number}") for number in range(3)]
    for node in nodes:
        node.joins()
    assert world.jobs.ended_counts == dict.fromkeys(Outcome, 0)
    nodes[0].says(Fail(0, CAUSE, 0))
    assert world.jobs.ended_counts[Outcome.FAILED] == 1, "also while its nodes are there"
    nodes[1].says(Succeed(0))
    for node in nodes:
        node.goes()
    world.passes(90.0)
    assert world.jobs.ended_counts == {Outcome.FAILED: 1, Outcome.SUCCEEDED: 1, Outcome.STOPPED: 0}


def test_a_list_of_jobs_fits_into_messages() -> None:
    jobs = tuple(JobSummary(f"{number:0255}", JobPhase.FAILED, 1, 2, 3, detail="x" * 200) for number in range(250))
    long = tuple(each._replace(job="x" * 4096, detail="\u20ac" * 1365) for each in jobs[:20])
    assert len(list(job_list_parts(JobList(long, long)))) == 8
    parts = list(job_list_parts(JobList(jobs + long, jobs[:20])))
    jobs += long
    assert [each.is_last for each in parts] == [*[False] * (len(parts) - 1), True]
    assert all(len(codec.encode(each)) < codec.MAX_FRAME for each in parts)
    assert tuple(chain.from_iterable(each.jobs for each in parts)) == jobs
    assert tuple(chain.from_iterable(each.ended for each in parts)) == jobs[:20]
    assert [*job_list_parts(JobList(()))] == [JobList(())], "an empty list is an answer too"


def test_a_node_that_comes_back_after_the_end_is_told_of_it_and_never_meets_the_next_job() -> None:
    world = World()
    a, b = Node(world, 1, nodes=2, least=1), Node(world, 2, nodes=2, least=1)
    a.joins()
    b.joins()
    b.goes()
    a.joins()
    a.says(Succeed(1))
    assert isinstance(a.told[-1], JobEnded)
    a.goes()
    for job_of_that_id in (False, True):
        world.passes(3600.0)
        if job_of_that_id:
            new = Node(world, 3)
            new.joins()
            assert new.dispatcher is not a.dispatcher
        b.comes_back(nodes=2)
        assert b.told[-1] == JobEnded(Verdict(Outcome.SUCCEEDED))
        b.goes()


def test_a_node_that_knew_the_job_from_the_control_plane_before_is_told_too() -> None:
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


def test_a_running_job_that_is_out_of_reach_is_the_same_when_it_is_back() -> None:
    world = World()
    a, b = Node(world, 1, nodes=2), Node(world, 2, nodes=2)
    a.joins()
    b.joins()
    dispatcher = a.dispatcher
    b.goes()
    third = Node(world, 3, nodes=2)
    assert third.dispatcher is dispatcher, "one of its nodes is there"
    third.goes()
    a.goes()
    a.comes_back(nodes=2)
    assert a.dispatcher is dispatcher, "it comes back to what knows it"
    ended = a.told[-1]
    assert isinstance(ended, RoundEnded)
    assert ended.end.reason is Reason.LOST


def test_a_job_that_lost_its_id_while_it_was_out_of_reach_fills_the_new_dispatcher() -> None:
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
    a.goes()
    a.comes()
    assert a.dispatcher is dispatcher
    a.goes()
    world.passes(61.0)
    a.comes()
    assert a.dispatcher is not dispatcher


def test_silent_nodes_of_ended_jobs_are_taken_out_too() -> None:
    world = World()
    old = Node(world, 1)
    old.joins()
    old.says(Succeed(0))
    disconnected: list[str] = []
    hello = ClientHandshake("job", None, b"n", old.settings).hello("h", NodeId("h", 9, 0), old.met)
    late = world.jobs.dispatcher_for(hello, "192.0.2.1")
    late.attach(
        old.told.append, SessionRecord(NodeId("h", 9, 0), "h"), disconnect=lambda _why: disconnected.append("late")
    )
    old.goes()
    new = Node(world, 2)
    assert new.dispatcher is not late
    world.passes(10.0)
    assert disconnected == ["late"]


def costs(work: Callable[[], None]) -> int:
    """How many calls of functions a piece of work takes."""
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


def test_one_heartbeat_and_one_tick_cost_the_same_among_many_jobs() -> None:
    heartbeats, ticks = [], []
    for count in (1, 500):
        world = World()
        nodes = [Node(world, 1, job=f"job{each}", peer=f"192.0.2.{each % 100}") for each in range(count)]
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


def test_names_without_sessions_make_way_for_new_nodes() -> None:
    world = World()
    running = Node(world, 1, job="running")
    running.joins()
    dispatcher = running.dispatcher
    for number in range(3 * MAX_JOBS):
        Node(world, 2, job=f"name {number}", peer=f"198.51.100.{number % 200}").goes()
        assert len(world.jobs.names) <= MAX_JOBS
    assert {"running", f"name {3 * MAX_JOBS - 1}"} <= world.jobs.names
    assert "name 0" not in world.jobs.names, "what was left longest ago goes first"
    assert Node(world, 3, job="running").dispatcher is dispatcher


@pytest.mark.parametrize(
    ("peers", "origin"),
    [(["198.51.100.7"], "198.51.100.7"), (["2001:db8:0:1::1", "2001:db8:0:1:ffff::2"], "2001:db8:0:1::/64")],
)
def test_one_address_cannot_keep_out_others_by_names_that_have_sessions(peers: list[str], origin: str) -> None:
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


def test_as_many_jobs_as_there_may_be_are_told_so() -> None:
    world = World()
    for number in range(MAX_JOBS):
        Node(world, 2, job=f"name {number}", peer=f"198.51.100.{number % 200}")
    with pytest.raises(
        HandshakeError, match=f"this control plane has {MAX_JOBS} jobs that are still running; end some"
    ):
        Node(world, 1)


def test_what_cannot_be_is_refused_in_a_sentence() -> None:
    world = World()
    with pytest.raises(HandshakeError, match="requests 2 to 1 nodes"):
        Node(world, 1, nodes=1, least=2)


def test_a_tick_that_goes_wrong_is_told_and_tried_again_and_costs_other_jobs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    broken, sound = Node(world, 1, job="broken"), Node(world, 1, job="sound")
    broken.joins()
    sound.joins()
    disconnected: list[str] = []
    sound.dispatcher.attach(
        sound.told.append, SessionRecord(NodeId("h", 9, 0), "h"), disconnect=lambda _why: disconnected.append("mute")
    )
    with monkeypatch.context() as patch:
        patch.setattr(broken.dispatcher.__dict__["_coordinator"], "tick", lambda _now: 1 / 0)
        world.passes(12.0, sound)
        assert disconnected == ["mute"]
        told = [record.message for record in caplog.records]
        assert len(told) == 3, told
        assert told[0].startswith("job 'broken': a scheduled action failed")
    world.passes(12.0)
    assert not broken.dispatcher.state.participants, "it is ticked again: its silent node is taken out"
