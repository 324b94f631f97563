"""Any events in any order with three candidates: in the end one leads, and then nothing is left."""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.control.election import steps
from rallypoint.control.election.steps import CandidatePhase, EndTerm, StartTerm
from rallypoint.control.etcd.api import EtcdLeaseGone, EtcdRefused, EtcdUnreachable, WatchCompacted
from tests.unit.election.cluster import KEYS, SETTINGS, Agent, Cluster

AWAY = EtcdUnreachable("etcd gave no answer")
TROUBLES = {
    "away": AWAY,
    "lost": AWAY,
    "refused": EtcdRefused("etcd answered 'permission denied'"),
    "gone": EtcdLeaseGone("lease not found"),
}


def _answer(_cluster: Cluster, agent: Agent) -> None:
    if agent.asked:
        agent.answer()


def _time(cluster: Cluster, agent: Agent) -> None:
    if agent.election.wake_at < math.inf:
        cluster.advance(max(cluster.now, agent.election.wake_at))
        agent.step(steps.Tick())


def _greet(cluster: Cluster, agent: Agent) -> None:
    for leader in cluster.leaders()[:1]:
        assert leader.term is not None
        agent.greeted(leader.term.incarnation)


def _refuse(cluster: Cluster, agent: Agent) -> None:
    for leader in cluster.leaders()[:1]:
        agent.greeted(agent.met, refused=leader.election.lease)


def _unwatch(_cluster: Cluster, agent: Agent) -> None:
    if agent.watches:
        agent.loses_watch(min(agent.watches, key=lambda kind: kind.name), WatchCompacted(1))


TURNS: dict[str, Callable[[Cluster, Agent], object]] = {
    "answer": _answer,
    "hear": lambda _cluster, agent: agent.hear(),
    "time": _time,
    "write": lambda _cluster, agent: agent.write(),
    "greet": _greet,
    "refuse": _refuse,
    "end lease": lambda cluster, agent: cluster.etcd.revoke(agent.election.lease),
    "unwatch": _unwatch,
    "close": lambda _cluster, agent: agent.close(),
}


def turn(cluster: Cluster, agent: Agent, what: str) -> None:
    if what in TURNS:
        TURNS[what](cluster, agent)
    elif agent.asked and not isinstance(agent.asked[0].request, StartTerm | EndTerm | steps.FindAddresses):
        agent.answer(TROUBLES[what], done=what == "lost")


def check(cluster: Cluster) -> None:
    """Check the laws after each turn."""
    fenced = [
        agent
        for agent in cluster.agents
        if agent.term is not None and cluster.etcd.txn([agent.term.fence.comparison()], []).succeeded
    ]
    for agent in fenced:
        created = agent.term.fence[1] if agent.term is not None else 0
        nodes = [kv for key, kv in cluster.etcd.stored.items() if key.startswith(KEYS.candidates)]
        assert created == min(kv.create_revision for kv in nodes), "the oldest leads"
    assert len(fenced) <= 1, "two coordinators who can write"
    for agent in cluster.agents:
        assert agent.term is not None or not agent.election.is_leader
        if agent.election.phase is CandidatePhase.GONE:
            assert not agent.asked
            assert agent.term is None


@given(
    st.lists(
        st.tuples(st.sampled_from([*["answer"] * 6, "hear", "hear", *TURNS, *TROUBLES]), st.integers(0, 2)), max_size=80
    )
)
def test_one_candidate_leads_in_the_end_and_nothing_is_left(turns: list[tuple[str, int]]) -> None:
    cluster = Cluster()
    for _ in range(3):
        cluster.add()
    for what, number in turns:
        turn(cluster, cluster.agents[number], what)
        check(cluster)
    living = [agent for agent in cluster.agents if not agent.closed]
    cluster.pass_time(10 * SETTINGS.lease)
    if living:
        (leader,) = cluster.leaders()
        assert cluster.etcd.stored[KEYS.leader].lease == leader.election.lease
        leader.write()
        assert leader.term is not None
        for agent in living:
            agent.greeted(leader.term.incarnation)
    for agent in living:
        agent.close()
    cluster.pass_time(10 * SETTINGS.lease)
    assert {agent.election.phase for agent in cluster.agents} == {CandidatePhase.GONE}
    left = {key for key in cluster.etcd.stored if living or key != KEYS.state}
    assert not left, left
