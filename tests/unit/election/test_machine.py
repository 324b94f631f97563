"""The laws of the election: who leads, who waits for whom, what is given up when; and that nothing is left."""

from __future__ import annotations

import math

import pytest

from rallypoint.control.election import steps
from rallypoint.control.election.machine import LONG_PAUSE, PAUSE
from rallypoint.control.election.procedures import STATE_TTL
from rallypoint.control.election.steps import CandidatePhase, EndTerm, Revoke, StartTerm, Watched
from rallypoint.control.etcd.api import (
    EtcdLeaseGone,
    EtcdRefused,
    EtcdUnreachable,
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


# Who leads


def test_each_watches_the_one_before_and_no_other() -> None:
    cluster = Cluster(4)
    for older, agent in zip(cluster.agents, cluster.agents[1:], strict=False):
        assert agent.watches[Watched.PREDECESSOR].key == KEYS.node(older.election.lease)
        assert Watched.NODES not in agent.watches


def test_who_was_registered_by_a_sending_whose_answer_was_lost_looks_who_is_before_it() -> None:
    """Others came before the second sending: they wait for us, so we must not wait for them."""
    cluster = Cluster()
    first = cluster.add()
    first.answer()
    first.answer()
    ask = first.asked[0]
    assert isinstance(ask.request, steps.Txn)
    cluster.etcd.txn(ask.request.compares, ask.request.then)
    second = cluster.add()
    second.settle()
    assert second.election.phase is CandidatePhase.WAITING
    first.settle()
    assert leads(cluster, first)


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
    assert not first.election.leads
    assert kinds(first.answer()) == [steps.EndWatch, EndTerm]
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
    assert agent.election.leads


def test_an_answer_that_is_not_waited_for_means_nothing() -> None:
    agent = Cluster().add()
    assert agent.step(steps.Answered(7, None)) == []
    assert agent.step(steps.Failed(7, AWAY)) == []
    agent.settle()
    assert agent.election.leads


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
    assert agent.requests()[-1] != Revoke(agent.election.lease)


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
    assert second.election.leads
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


@pytest.mark.parametrize("kind", [Watched.PREDECESSOR, Watched.LEADER, Watched.NODES])
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
    first, second = (cluster := Cluster(2)).agents
    old = second.watches[Watched.PREDECESSOR]
    cluster.etcd.revoke(first.election.lease)
    event = cluster.etcd.log[-1]
    second.settle()
    assert second.election.leads
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
    while not agent.election.leads:
        assert cluster.now < 60, "nobody is ever elected"
        cluster.world.run(until := cluster.now + (seconds if agent.asked else 0.1))
        cluster.world.now = until
        if agent.asked:
            agent.answer()
        elif agent.election.wake_at <= cluster.now:
            agent.step(steps.Tick())
    assert cluster.now < 15
    assert sum(isinstance(each, steps.KeepLeaseAlive) for each in agent.requests()) >= 1
    assert [each.ttl_s for each in agent.requests() if isinstance(each, steps.Grant)][1:] == [STATE_TTL]


def until_asked(agent: Agent, kind: type) -> None:
    """Answer what an agent asks until it makes a request of this kind."""
    while not (agent.asked and isinstance(agent.asked[0].request, kind)):
        agent.answer() if agent.asked else agent.step(steps.Tick())


def test_the_lease_of_the_job_s_state_is_renewed_by_the_coordinator() -> None:
    (agent,) = (cluster := Cluster(1)).agents
    cluster.pass_time(STATE_TTL / 2)
    renewed = {each.lease for each in agent.requests() if isinstance(each, steps.KeepLeaseAlive)}
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
    while KEYS.node(first.election.lease) in cluster.etcd.stored:
        first.answer()
    new = cluster.add()
    until_asked(new, StartTerm)
    first.settle()
    assert first.election.phase is CandidatePhase.GONE
    assert KEYS.state in cluster.etcd.stored, "the next coordinator continues with it"
