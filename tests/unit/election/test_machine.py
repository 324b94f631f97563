"""The laws of the election: the leader, the order of candidates, and what is given up when."""

from __future__ import annotations

import heapq
import math
from logging import DEBUG, WARNING

import pytest

from rallypoint.control.election import steps
from rallypoint.control.election.keys import SEATS
from rallypoint.control.election.machine import ARRIVALS, LONG_PAUSE, LOOK_LATE, LOOK_SOON, PAUSE
from rallypoint.control.election.procedures import STATE_TTL, StepContext
from rallypoint.control.election.steps import CandidatePhase, EndTerm, Revoke, StartTerm, Watched
from rallypoint.control.etcd.api import (
    EtcdError,
    EtcdLeaseGone,
    EtcdRefused,
    EtcdUnreachable,
    Put,
    WatchCancelled,
    WatchCompacted,
)
from tests.unit.election.cluster import KEYS, SETTINGS, Agent, Cluster

AWAY = EtcdUnreachable("etcd gave no answer")
REFUSED = EtcdRefused("etcd answered 'permission denied'")


def leads(cluster: Cluster, agent: Agent) -> bool:
    return cluster.leaders() == [agent] and cluster.etcd.stored[KEYS.leader].lease == agent.election.lease


def kinds(effects: list[steps.Effect]) -> list[type]:
    return [type(effect.request if isinstance(effect, steps.Ask) else effect) for effect in effects]


def seats(cluster: Cluster) -> set[bytes]:
    """The keys of the candidates."""
    return {key for key in cluster.etcd.stored if key.startswith(KEYS.candidates)}


def until_asked(agent: Agent, kind: type) -> None:
    """Answer an agent's requests until it makes one of this kind."""
    while not (agent.asked and isinstance(agent.asked[0].request, kind)):
        agent.answer() if agent.asked else agent.step(steps.Tick())


def test_a_problem_is_a_warning_every_five_minutes() -> None:
    context = StepContext()
    for context.now, problem in ((0.0, REFUSED), (299.0, REFUSED), (299.0, AWAY), (598.0, AWAY), (599.0, AWAY)):
        context.warn(problem, "it fails")
    levels = [effect.level for effect in context.pop_effects() if isinstance(effect, steps.WriteLog)]
    assert levels == [WARNING, DEBUG, WARNING, DEBUG, WARNING]


# The leader


def test_a_candidate_whose_registration_was_repeated_finds_its_place() -> None:
    """Candidates between the two attempts wait for us, so we must not wait for them."""
    cluster = Cluster()
    first = cluster.add()
    until_asked(first, steps.Grant)
    first.answer()
    ask = first.asked[0]
    assert isinstance(ask.request, steps.Txn)
    cluster.etcd.txn(ask.request.compares, ask.request.then)
    second = cluster.add()
    second.settle()
    assert second.election.phase is CandidatePhase.WAITING
    first.settle()
    assert leads(cluster, first)
    assert len(seats(cluster)) == 2


# Agents without a seat


def crowd(size: int = 12, at_once: int = 12) -> tuple[Cluster, list[Agent], list[Agent]]:
    """A job with more agents than seats: the cluster, the candidates, and the other agents."""
    cluster = Cluster(settings=SETTINGS._replace(max_nodes=size))
    for _ in range(at_once):
        cluster.add()
    cluster.pass_time(1.0 + size / ARRIVALS)
    standing = [agent for agent in cluster.agents if agent.election.lease]
    return cluster, standing, [agent for agent in cluster.agents if agent not in standing]


def test_agents_without_a_seat_have_one_watch() -> None:
    cluster, standing, others = crowd()
    assert (len(standing), len(others)) == (SEATS, 4)
    (leader,) = cluster.leaders()
    for agent in others:
        assert agent.election.phase is CandidatePhase.STANDBY
        assert agent.watches.keys() == {Watched.LEADER}
        assert agent.effects.count(steps.PermanentError("")) >= 1
    asked = [len(agent.requests()) for agent in others]
    cluster.pass_time(LOOK_LATE / 2 - 1.0)
    assert [len(agent.requests()) for agent in others] == asked
    assert cluster.leaders() == [leader]


def test_a_free_seat_is_taken() -> None:
    cluster, standing, others = crowd()
    gone = next(agent for agent in standing if not agent.election.is_leader)
    cluster.agents.remove(gone)
    cluster.pass_time(LOOK_LATE + SETTINGS.lease)
    assert len(seats(cluster)) == SEATS
    assert sum(agent.election.phase is CandidatePhase.WAITING for agent in others) == 1


def test_the_job_survives_the_death_of_all_candidates_at_once() -> None:
    cluster, standing, others = crowd()
    for agent in standing:
        cluster.agents.remove(agent)
    died = cluster.now
    while not cluster.leaders():
        cluster.pass_time(0.1)
    assert cluster.now - died < SETTINGS.lease + 1.1 * LOOK_SOON
    assert set(cluster.agents) == set(others)
    cluster.pass_time(LOOK_SOON)
    assert len(seats(cluster)) == 4


def test_agents_without_a_seat_look_soon_when_the_coordinator_is_unreachable() -> None:
    """Its etcd may have lost its data, or its connection may have been dropped unnoticed."""
    cluster, _, (one, *_) = crowd()
    assert one.election.wake_at - cluster.now > LOOK_SOON
    one.step(steps.LinkNews("coordinator-1", 0, lost=True))
    planned = one.election.wake_at
    assert LOOK_SOON / 2 <= planned - cluster.now <= LOOK_SOON
    cluster.world.now += LOOK_SOON / 4
    one.step(steps.LinkNews("coordinator-1", 0, lost=True))
    assert one.election.wake_at == planned, "the next attempt does not delay it"
    one.greeted("coordinator-1")
    cluster.pass_time(LOOK_SOON)
    assert one.election.wake_at - cluster.now > LOOK_SOON


@pytest.mark.parametrize("size", [8, 9, 64, 1024, 4096, 16384, 65536])
def test_idle_agents_of_any_number_ask_etcd_for_little(size: int) -> None:
    """The rate of the candidates, and of one other agent multiplied."""
    cluster, standing, others = crowd(size, at_once=min(size, SEATS + 1))
    before = sum(len(agent.requests()) for agent in standing)
    cluster.pass_time(60.0)
    asked = (sum(len(agent.requests()) for agent in standing) - before) / 60.0
    for agent in others:
        began, before = cluster.now, len(agent.requests())
        for _ in range(20):
            cluster.world.now = agent.election.wake_at
            agent.step(steps.Tick())
            agent.settle()
        asked += (size - SEATS) * (len(agent.requests()) - before) / (cluster.now - began)
    assert asked < 20.0, "requests a second of the whole job"


def test_few_of_many_agents_at_once_take_a_lease_in_vain() -> None:
    """Requests take some milliseconds here, in which others look."""
    size, takes = 4096, 0.005
    cluster = Cluster(settings=SETTINGS._replace(max_nodes=size))
    agents = [cluster.add() for _ in range(size)]
    begun = cluster.now
    due = [(agent.election.wake_at, index) for index, agent in enumerate(agents)]
    heapq.heapify(due)
    while due and cluster.now < begun + 0.5:
        at, index = heapq.heappop(due)
        cluster.world.now = max(cluster.now, at)
        agent = agents[index]
        agent.answer() if agent.asked else agent.step(steps.Tick())
        later = cluster.now + takes if agent.asked else agent.election.wake_at
        if later < math.inf:
            heapq.heappush(due, (later, index))
    grants = sum(isinstance(request, steps.Grant) for agent in agents for request in agent.requests())
    assert len(seats(cluster)) == SEATS
    assert grants < size / 10


# Giving up


def test_pauses_grow_while_etcd_cannot_be_reached() -> None:
    agent = (cluster := Cluster()).add()
    agent.answer()
    pauses = []
    for _ in range(8):
        agent.answer(AWAY, done=False)
        pauses.append(agent.election.wake_at - cluster.now)
        agent.wake()
    assert PAUSE / 2 <= pauses[0] <= PAUSE
    assert LONG_PAUSE / 2 <= pauses[-1] <= LONG_PAUSE
    agent.settle()
    assert leads(cluster, agent)
    assert [effect.sentence for effect in agent.effects if isinstance(effect, steps.EtcdTrouble)] == [str(AWAY), ""]


def test_a_deposed_leader_ends_its_lease_before_its_server() -> None:
    first, second = (cluster := Cluster(2)).agents
    number = next(request for request in first.requests() if isinstance(request, StartTerm)).number
    assert kinds(first.step(steps.Deposed(number, "another agent is the coordinator now"))) == [Revoke]
    assert not first.election.is_leader
    assert kinds(first.answer()) == [EndTerm]
    assert first.requests()[-1] == EndTerm(0.0)
    cluster.pass_time(1.0)
    assert leads(cluster, second)
    assert first.election.phase is CandidatePhase.WAITING


def test_a_leaving_leader_ends_its_server_first_and_removes_unfinished_parts() -> None:
    (agent,) = (cluster := Cluster(1)).agents
    cluster.etcd.txn((), (Put(KEYS.part(1, 0), b"part", 2),))  # of a state that was never completed
    agent.greeted("coordinator-1")
    agent.close()
    assert agent.requests()[-1] == EndTerm(2.0), "nodes have time to read"
    agent.settle()
    assert agent.election.phase is CandidatePhase.GONE
    assert not cluster.etcd.stored


def test_stale_events_are_ignored() -> None:
    leader, follower = (cluster := Cluster(2)).agents
    assert leader.step(steps.Deposed(0, "in an earlier term")) == []
    assert leader.election.is_leader
    old = follower.watches[Watched.NODES]
    follower.loses_watch(Watched.NODES, WatchCompacted(17))
    follower.settle()
    new = cluster.add()
    for stale in (steps.Answered(7, None), steps.Failed(7, AWAY)):
        assert new.step(stale) == []
    assert follower.step(steps.Changed(old.number, (cluster.etcd.log[-1],))) == []


@pytest.mark.parametrize(
    ("error", "hopeless"), [(REFUSED, [str(REFUSED)]), (EtcdLeaseGone("lease not found"), [])], ids=["refused", "gone"]
)
def test_a_refused_leader_starts_again_and_keeps_the_state(error: EtcdError, hopeless: list[str]) -> None:
    (agent,) = (cluster := Cluster(1)).agents
    agent.write()
    agent.greeted("coordinator-1")
    agent.wake()
    agent.answer(error, done=False)
    agent.settle()
    assert agent.election.phase is CandidatePhase.RESTING
    assert KEYS.state in cluster.etcd.stored
    permanent = [effect for effect in agent.effects if isinstance(effect, steps.PermanentError)]
    assert [effect.sentence for effect in permanent if effect.sentence] == hopeless
    cluster.pass_time(2 * LONG_PAUSE)
    assert leads(cluster, agent)
    assert agent.term is not None
    assert not isinstance(agent.requests()[-1], Revoke)


def test_an_unexpected_error_gives_up_the_lead_and_starts_again() -> None:
    (agent,) = (cluster := Cluster(1)).agents
    agent.stumbles = True
    before = len(agent.effects)
    agent.step(steps.Broken(RuntimeError("can't start new thread")))
    agent.settle()
    assert [kind for kind in kinds(agent.effects[before:]) if kind in (Revoke, EndTerm)] == [Revoke, EndTerm, Revoke]
    assert agent.effects.count(steps.EtcdTrouble("RuntimeError: can't start new thread")) == 1
    assert any(isinstance(effect, steps.WriteLog) and effect.error is not None for effect in agent.effects)
    assert (agent.election.phase, agent.watches) == (CandidatePhase.RESTING, {})
    cluster.pass_time(LONG_PAUSE)
    assert leads(cluster, agent)
    assert agent.watches.keys() == {Watched.LEADER, Watched.NODES}
    assert agent.effects[-1] != steps.EtcdTrouble("RuntimeError: can't start new thread")
    agent.close()
    agent.asked.clear()
    agent.step(steps.Broken(RuntimeError("can't start new thread")))
    assert agent.election.phase is CandidatePhase.GONE, "a candidate that leaves does not start again"
    assert agent.election.wake_at == math.inf


# A leader whose port refuses


def test_the_next_in_line_deposes_a_leader_whose_port_refuses() -> None:
    first, second, third = (cluster := Cluster(3)).agents
    for agent in (second, third):
        agent.greeted("coordinator-1", refused=first.election.lease)
        agent.settle()
    assert second.election.is_leader
    assert cluster.etcd.stored[KEYS.leader].lease == second.election.lease
    assert Revoke(first.election.lease) in second.requests()
    assert not any(isinstance(request, Revoke) for request in third.requests()), "it is not next in line"
    lost = steps.NodesLost(frozenset([first.name.number]), "its machine refuses connections")
    assert [effect for effect in second.effects if isinstance(effect, steps.NodesLost)] == [lost]


def test_revoking_a_lease_is_retried_with_the_next_heartbeat() -> None:
    first, second = Cluster(2).agents
    second.greeted("", refused=first.election.lease)
    for _ in range(2):
        assert second.requests()[-1] == Revoke(first.election.lease)
        second.answer(AWAY, done=False)
        assert second.election.phase is CandidatePhase.WAITING
        assert not second.asked
        second.wake()
        second.answer()


def test_after_an_outage_of_etcd_a_refused_port_proves_nothing_for_a_lease() -> None:
    """A coordinator that stepped down meanwhile could not end its lease before its port was shut."""
    first, second = (cluster := Cluster(2)).agents
    revoke = Revoke(first.election.lease)
    came_back = cluster.now + 10.0
    while cluster.now < came_back:
        second.wake()
        while second.asked:
            second.answer(AWAY if cluster.now < came_back else None, done=cluster.now >= came_back)
    second.greeted("coordinator-1", refused=first.election.lease)
    assert revoke not in second.requests()
    back = cluster.now
    while revoke not in second.requests():
        second.wake()
        while second.asked and revoke not in second.requests():
            second.answer()
    assert 3.0 <= cluster.now - back <= 3.0 + 3.0 / 3, "its lease, and at most until the next heartbeat"


# Watches


def test_unanswered_chores_wait_for_a_pause() -> None:
    _, agent = (cluster := Cluster(2)).agents
    agent.loses_watch(Watched.LEADER, WatchCompacted(17))
    agent.answer(AWAY, done=False)
    assert not agent.asked
    assert agent.election.wake_at == cluster.now + PAUSE
    cluster.pass_time(PAUSE)
    assert Watched.LEADER in agent.watches


@pytest.mark.parametrize("kind", list(Watched))
def test_compacted_watches_are_read_at_once_and_refused_ones_later(kind: Watched) -> None:
    agent = (cluster := Cluster(2)).agents[0 if kind is Watched.NODES else 1]
    number = agent.watches[kind].number
    agent.loses_watch(kind, WatchCompacted(17))
    assert agent.asked
    agent.settle()
    assert agent.watches[kind].number > number
    agent.loses_watch(kind, WatchCancelled("permission denied"))
    assert not agent.asked
    assert agent.election.wake_at <= cluster.now + SETTINGS.lease / 3
    cluster.pass_time(SETTINGS.lease / 3)
    assert kind in agent.watches


def test_the_election_starts_again_on_a_restored_etcd() -> None:
    (agent,) = (cluster := Cluster(1)).agents
    cluster.etcd.revision += 50
    cluster.etcd.revoke(agent.election.lease)
    cluster.pass_time(LONG_PAUSE)
    assert steps.ResetRevision() not in agent.effects
    cluster.etcd.revoke(agent.election.lease)
    cluster.etcd.stored.clear()
    cluster.etcd.log.clear()
    cluster.etcd.revision = 1
    cluster.pass_time(LONG_PAUSE)
    assert steps.ResetRevision() in agent.effects
    assert leads(cluster, agent)


@pytest.mark.parametrize("seconds", [0.8, 1.0, 1.2])
def test_the_lease_is_renewed_during_a_takeover_on_a_slow_etcd(seconds: float) -> None:
    """A takeover makes several requests, one after the other."""
    cluster = Cluster()
    agent = cluster.add()
    while not agent.election.is_leader:
        assert cluster.now < 20, "nobody is ever elected"
        cluster.advance(cluster.now + (seconds if agent.asked else 0.1))
        if agent.asked:
            agent.answer()
        elif agent.election.wake_at <= cluster.now:
            agent.step(steps.Tick())
    assert any(isinstance(request, steps.RenewLease) for request in agent.requests())
    assert [each.ttl_s for each in agent.requests() if isinstance(each, steps.Grant)][1:] == [STATE_TTL]


@pytest.mark.parametrize("kind", list(Watched))
def test_a_lost_answer_does_not_cost_the_lease(kind: Watched) -> None:
    """A lost watch is read again just before the lease must be renewed, and the answer never arrives."""
    (agent,) = (cluster := Cluster(1)).agents
    lease = agent.election.lease
    cluster.pass_time(agent.election.wake_at - cluster.now - 0.01)
    agent.loses_watch(kind, WatchCompacted(17))
    (ask,) = agent.asked
    assert ask.timeout_s is not None
    cluster.advance(cluster.now + ask.timeout_s)
    agent.answer(AWAY, done=False)
    cluster.pass_time(SETTINGS.lease)
    assert leads(cluster, agent)
    assert agent.election.lease == lease


def test_the_coordinator_renews_the_lease_of_the_state() -> None:
    (agent,) = (cluster := Cluster(1)).agents
    cluster.pass_time(STATE_TTL / 2)
    renewed = {each.lease for each in agent.requests() if isinstance(each, steps.RenewLease)}
    assert len(renewed) == 2
    assert agent.election.lease in renewed


def test_a_candidate_keeps_the_state_of_the_last_one_that_leaves() -> None:
    first = (cluster := Cluster(1)).agents[0]
    assert first.term is not None
    first.write()
    first.greeted(first.term.incarnation)
    first.settle()
    assert KEYS.state in cluster.etcd.stored
    first.close()
    while KEYS.seat(first.election.lease) in cluster.etcd.stored:
        first.answer()
    new = cluster.add()
    until_asked(new, StartTerm)
    first.settle()
    assert first.election.phase is CandidatePhase.GONE
    assert KEYS.state in cluster.etcd.stored, "the next coordinator continues with it"
