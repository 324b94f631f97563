"""The laws of the election: who leads, who waits for whom, what is given up when; and that nothing is left."""

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
TROUBLES = {"away": AWAY, "lost": AWAY, "refused": REFUSED, "gone": EtcdLeaseGone("lease not found")}


def leads(cluster: Cluster, agent: Agent) -> bool:
    return cluster.leaders() == [agent] and cluster.etcd.stored[KEYS.leader].lease == agent.election.lease


def kinds(effects: list[steps.Effect]) -> list[type]:
    return [type(each.request if isinstance(each, steps.Ask) else each) for each in effects]


def test_a_problem_is_a_warning_once_in_five_minutes() -> None:
    context = StepContext()
    for context.now, problem in ((0.0, REFUSED), (299.0, REFUSED), (299.0, AWAY), (598.0, AWAY), (599.0, AWAY)):
        context.warn(problem, "it fails")
    levels = [each.level for each in context.pop_effects() if isinstance(each, steps.WriteLog)]
    assert levels == [WARNING, DEBUG, WARNING, DEBUG, WARNING]


# Who leads


def test_who_was_registered_by_a_sending_whose_answer_was_lost_looks_who_is_before_it() -> None:
    """Others came before the second sending: they wait for us, so we must not wait for them."""
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


def seats(cluster: Cluster) -> set[bytes]:
    """The keys of the candidates."""
    return {key for key in cluster.etcd.stored if key.startswith(KEYS.candidates)}


def test_who_is_beaten_to_its_seat_takes_another() -> None:
    cluster = Cluster()
    agents = [cluster.add() for _ in range(SEATS)]
    for kind in (steps.Grant, steps.Txn):
        for agent in agents:
            until_asked(agent, kind)
    for agent in agents:
        agent.settle()
    assert len(seats(cluster)) == SEATS
    assert len(cluster.leaders()) == 1


# Who has no seat


def crowd(size: int = 12, at_once: int = 12) -> tuple[Cluster, list[Agent], list[Agent]]:
    """A job of that size with so many agents, of which more come than there are seats: those that stand, and others."""
    cluster = Cluster(settings=SETTINGS._replace(max_nodes=size))
    for _ in range(at_once):
        cluster.add()
    cluster.pass_time(1.0 + size / ARRIVALS)
    standing = [agent for agent in cluster.agents if agent.election.lease]
    return cluster, standing, [agent for agent in cluster.agents if agent not in standing]


def test_a_few_stand_and_the_others_hold_nothing_but_one_watch() -> None:
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


def test_a_seat_that_is_free_is_taken_after_a_while() -> None:
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


def test_who_has_no_seat_looks_soon_when_the_coordinator_cannot_be_reached() -> None:
    """Its watch may be of an etcd that has lost its data, or on a connection that was dropped unseen."""
    cluster, _, (one, *_) = crowd()
    assert one.election.wake_at - cluster.now > LOOK_SOON
    one.step(steps.LinkNews("coordinator-1", 0, lost=True))
    planned = one.election.wake_at
    assert LOOK_SOON / 2 <= planned - cluster.now <= LOOK_SOON
    cluster.world.now += LOOK_SOON / 4
    one.step(steps.LinkNews("coordinator-1", 0, lost=True))
    assert one.election.wake_at == planned, "it is not put off by the next attempt"
    one.greeted("coordinator-1")
    cluster.pass_time(LOOK_SOON)
    assert one.election.wake_at - cluster.now > LOOK_SOON


@pytest.mark.parametrize("size", [8, 9, 64, 1024, 4096, 16384, 65536])
def test_agents_that_have_nothing_to_do_ask_etcd_for_little_whatever_their_number(size: int) -> None:
    """The pace of those that stand, and of one of the others for all of them."""
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


def test_where_all_come_at_once_few_take_a_lease_in_vain() -> None:
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
    grants = sum(isinstance(each, steps.Grant) for agent in agents for each in agent.requests())
    assert len(seats(cluster)) == SEATS
    assert grants < size / 10


# What is given up, and what is not


def test_who_cannot_reach_etcd_asks_again_after_pauses_that_grow() -> None:
    agent = (cluster := Cluster()).add()
    agent.answer()
    pauses = []
    for _ in range(8):
        agent.answer(AWAY, done=False)
        pauses.append(agent.election.wake_at - cluster.now)
        cluster.world.now = agent.election.wake_at
        agent.step(steps.Tick())
    assert PAUSE / 2 <= pauses[0] <= PAUSE
    assert LONG_PAUSE / 2 <= pauses[-1] <= LONG_PAUSE
    agent.settle()
    assert leads(cluster, agent)
    assert [each.sentence for each in agent.effects if isinstance(each, steps.EtcdTrouble)] == [str(AWAY), ""]


def test_who_lives_and_ceases_to_lead_ends_its_lease_before_its_port_refuses() -> None:
    first, second = (cluster := Cluster(2)).agents
    number = next(each for each in first.requests() if isinstance(each, StartTerm)).number
    assert kinds(first.step(steps.Deposed(number, "another agent is the coordinator now"))) == [Revoke]
    assert not first.election.is_leader
    assert kinds(first.answer()) == [EndTerm]
    assert first.requests()[-1] == EndTerm(0.0)
    cluster.pass_time(1.0)
    assert leads(cluster, second)
    assert first.election.phase is CandidatePhase.WAITING


def test_who_goes_ends_its_server_first_and_gives_nodes_the_time_to_read() -> None:
    (agent,) = Cluster(1).agents
    agent.close()
    assert agent.requests()[-1] == EndTerm(2.0)
    agent.settle()
    assert agent.election.phase is CandidatePhase.GONE


def test_a_deposed_that_comes_from_an_earlier_term_is_passed_over() -> None:
    (agent,) = Cluster(1).agents
    assert agent.step(steps.Deposed(0, "long ago")) == []
    assert agent.election.is_leader


def test_an_answer_that_is_not_waited_for_means_nothing() -> None:
    agent = Cluster().add()
    assert agent.step(steps.Answered(7, None)) == []
    assert agent.step(steps.Failed(7, AWAY)) == []
    agent.settle()
    assert agent.election.is_leader


@pytest.mark.parametrize("trouble", ["refused", "gone"])
def test_who_is_refused_begins_anew_and_leaves_the_job_s_state(trouble: str) -> None:
    (agent,) = (cluster := Cluster(1)).agents
    agent.write()
    agent.greeted("coordinator-1")
    cluster.world.now = agent.election.wake_at
    agent.step(steps.Tick())
    agent.answer(TROUBLES[trouble], done=False)
    agent.settle()
    assert agent.election.phase is CandidatePhase.RESTING
    assert KEYS.state in cluster.etcd.stored
    hopeless = [each.sentence for each in agent.effects if isinstance(each, steps.PermanentError) and each.sentence]
    assert hopeless == ([str(REFUSED)] if trouble == "refused" else [])
    cluster.pass_time(2 * LONG_PAUSE)
    assert leads(cluster, agent)
    assert agent.term is not None
    assert not isinstance(agent.requests()[-1], Revoke)


def test_what_nobody_foresaw_gives_up_all_in_order_and_begins_anew() -> None:
    (agent,) = (cluster := Cluster(1)).agents
    agent.stumbles = True
    before = len(agent.effects)
    agent.step(steps.Broken(RuntimeError("can't start new thread")))
    agent.settle()
    assert [each for each in kinds(agent.effects[before:]) if each in (Revoke, EndTerm)] == [Revoke, EndTerm, Revoke]
    assert agent.effects.count(steps.EtcdTrouble("RuntimeError: can't start new thread")) == 1
    assert [each for each in agent.effects if isinstance(each, steps.WriteLog) and each.error is not None]
    assert agent.election.phase is CandidatePhase.RESTING
    assert not agent.watches
    cluster.pass_time(LONG_PAUSE)
    assert leads(cluster, agent)
    assert agent.watches.keys() == {Watched.LEADER, Watched.NODES}
    assert agent.effects[-1] != steps.EtcdTrouble("RuntimeError: can't start new thread")


def test_a_step_that_breaks_while_all_is_given_up_ends_that() -> None:
    (agent,) = (cluster := Cluster(1)).agents
    agent.stumbles = True
    agent.close()
    agent.asked.clear()
    agent.step(steps.Broken(RuntimeError("can't start new thread")))
    assert agent.election.phase is CandidatePhase.GONE
    assert agent.election.wake_at == math.inf
    assert not cluster.leaders()


# A leader whose port refuses


def test_the_next_in_line_deposes_a_leader_whose_port_refuses() -> None:
    first, second, third = (cluster := Cluster(3)).agents
    for agent in (second, third):
        agent.greeted("coordinator-1", refused=first.election.lease)
        agent.settle()
    assert second.election.is_leader
    assert cluster.etcd.stored[KEYS.leader].lease == second.election.lease
    assert Revoke(first.election.lease) in second.requests()
    assert not [each for each in third.requests() if isinstance(each, Revoke)], "it is not next in line"
    (lost,) = [each for each in second.effects if isinstance(each, steps.NodesLost)]
    assert lost == steps.NodesLost(frozenset([first.name.number]), "its machine refuses connections")


def test_a_lease_that_could_not_be_ended_is_tried_again_with_the_next_heartbeat() -> None:
    first, second = (cluster := Cluster(2)).agents
    second.greeted("", refused=first.election.lease)
    for _ in range(2):
        assert second.requests()[-1] == Revoke(first.election.lease)
        second.answer(AWAY, done=False)
        assert second.election.phase is CandidatePhase.WAITING
        assert not second.asked
        cluster.world.now = second.election.wake_at
        second.step(steps.Tick())
        second.answer()


def test_after_etcd_was_away_for_longer_than_a_lease_a_refused_port_proves_nothing_for_the_time_of_a_lease() -> None:
    """A coordinator that stepped down meanwhile could not end its lease before its port was shut."""
    first, second = (cluster := Cluster(2)).agents
    world, ends = cluster.world, Revoke(first.election.lease)
    came_back = world.now + 10.0
    while world.now < came_back:
        world.now = second.election.wake_at
        second.step(steps.Tick())
        while second.asked:
            second.answer(AWAY if world.now < came_back else None, done=world.now >= came_back)
    second.greeted("coordinator-1", refused=first.election.lease)
    assert ends not in second.requests()
    back = world.now
    while ends not in second.requests():
        world.now = second.election.wake_at
        second.step(steps.Tick())
        while second.asked and ends not in second.requests():
            second.answer()
    assert 3.0 <= world.now - back <= 3.0 + 3.0 / 3, "its lease, and no more than until the next heartbeat"


# Watches


def test_chores_that_etcd_does_not_answer_wait_for_a_pause() -> None:
    _, agent = (cluster := Cluster(2)).agents
    agent.loses_watch(Watched.LEADER, WatchCompacted(17))
    agent.answer(AWAY, done=False)
    assert not agent.asked
    assert agent.election.wake_at == cluster.now + PAUSE
    cluster.pass_time(PAUSE)
    assert Watched.LEADER in agent.watches


@pytest.mark.parametrize("kind", list(Watched))
def test_a_watch_that_is_compacted_is_read_again_at_once_and_one_refused_with_the_next_heartbeat(kind: Watched) -> None:
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


def test_changes_of_a_watch_that_is_over_are_passed_over() -> None:
    _, second = (cluster := Cluster(2)).agents
    old = second.watches[Watched.NODES]
    second.loses_watch(Watched.NODES, WatchCompacted(17))
    second.settle()
    event = cluster.etcd.log[-1]
    assert second.step(steps.Changed(old.number, (event,))) == []


def test_an_etcd_that_has_gone_back_is_begun_anew_with() -> None:
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
def test_the_lease_is_kept_alive_during_a_take_over_from_a_slow_etcd(seconds: float) -> None:
    """A take-over makes several requests, one after the other."""
    cluster = Cluster()
    agent = cluster.add()
    while not agent.election.is_leader:
        assert cluster.now < 60, "nobody is ever elected"
        cluster.world.run(until := cluster.now + (seconds if agent.asked else 0.1))
        cluster.world.now = until
        if agent.asked:
            agent.answer()
        elif agent.election.wake_at <= cluster.now:
            agent.step(steps.Tick())
    assert cluster.now < 20
    assert sum(isinstance(each, steps.RenewLease) for each in agent.requests()) >= 1
    assert [each.ttl_s for each in agent.requests() if isinstance(each, steps.Grant)][1:] == [STATE_TTL]


@pytest.mark.parametrize("kind", list(Watched))
def test_an_answer_that_is_lost_does_not_cost_the_lease(kind: Watched) -> None:
    """What a lost watch showed is read again just before the lease is to be kept alive, and the answer never comes."""
    (agent,) = (cluster := Cluster(1)).agents
    lease = agent.election.lease
    cluster.pass_time(agent.election.wake_at - cluster.now - 0.01)
    agent.loses_watch(kind, WatchCompacted(17))
    (ask,) = agent.asked
    assert ask.timeout_s is not None
    cluster.world.run(until := cluster.now + ask.timeout_s)
    cluster.world.now = until
    agent.answer(AWAY, done=False)
    cluster.pass_time(SETTINGS.lease)
    assert leads(cluster, agent)
    assert agent.election.lease == lease


def until_asked(agent: Agent, kind: type) -> None:
    """Answer what an agent asks until it makes a request of this kind."""
    while not (agent.asked and isinstance(agent.asked[0].request, kind)):
        agent.answer() if agent.asked else agent.step(steps.Tick())


def test_the_lease_of_the_job_s_state_is_renewed_by_the_coordinator() -> None:
    (agent,) = (cluster := Cluster(1)).agents
    cluster.pass_time(STATE_TTL / 2)
    renewed = {each.lease for each in agent.requests() if isinstance(each, steps.RenewLease)}
    assert len(renewed) == 2
    assert agent.election.lease in renewed


def test_who_registers_while_the_last_one_leaves_keeps_the_state_that_it_has_read() -> None:
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


def test_the_last_to_leave_takes_away_parts_of_a_state_that_was_never_complete() -> None:
    """The coordinator lost its place while it wrote the first state."""
    (agent,) = (cluster := Cluster(1)).agents
    cluster.etcd.txn((), (Put(KEYS.part(1, 0), b"part", 2),))
    agent.greeted("coordinator-1")
    agent.close()
    agent.settle()
    assert agent.election.phase is CandidatePhase.GONE
    assert not cluster.etcd.stored
