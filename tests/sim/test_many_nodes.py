"""Ten thousand nodes: they meet, lose some of them, regroup and finish, at a constant number of messages for each.

The coordinator, the policy and the handler are the production ones, as in every simulated job. The audit looks at all
nodes only where a round begins or ends, and now and then: for each step of each node that would be a hundred million
looks.
"""

from __future__ import annotations

import gc
from collections import Counter

import pytest

from rallypoint.control.membership.state import Ledger, Outcome
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.messages import Heartbeat, Placement, StorePeers
from tests.effort import examples
from tests.sim import network, world
from tests.sim.agent import Agent, SimOutcome
from tests.sim.audit import Audit, Said
from tests.sim.ground_truth import Round, RoundName, common
from tests.sim.job import Job
from tests.sim.scenario import FailureRates, Fault, NodePlan, Scenario
from tests.sim.server import Server
from tests.sim.workers import SimWorkers, WorkerProcesses
from tests.sim.world import Violation

_LOOK_EVERY = 2_000
_LOST_AT = 2.0
_LENGTH = 5.0
"""Seconds that the workers of a round run."""
_UNCOUNTED = {codec.encode(Heartbeat())}
_STORE_PEERS = codec.encode(StorePeers(()))[:2]
"""How these messages begin: two numbers, of which the second one is their kind."""


class _Sampled(Audit):
    """All checks that concern one node, and now and then those that concern all."""

    _steps = 0

    def after(self, server: Server, node: int | None, request: Said, number: int) -> None:
        """As the audit's own, where a round begins or ends, or it is time for a look."""
        history = server.coordinator.states
        first, last = history[0], history[-1]
        self._steps += 1
        same = (first.round, first.complete, first.closed) == (last.round, last.complete, last.closed)
        if same and self._steps % _LOOK_EVERY:
            del history[:-1]
        else:
            super().after(server, node, request, number)

    def _check_place(self, agent: Agent, placement: Placement, round_: Round) -> None:
        """As the audit's own, for nodes of one worker each."""
        rank, size = round_.members.get(agent.number), len(round_.members)
        told = (placement.group_rank, placement.ranks.base_rank, placement.group_world_size, placement.ranks.world_size)
        if told != (rank, rank, size, size):
            raise Violation("a node was told a wrong place", f"node {agent.number}: {placement}")
        other = next(iter(round_.told.values()), placement)
        if common(other) != common(placement):
            raise Violation("two nodes were told different things of one round", f"{other} and {placement}")


class _SimWorkersWithoutProcesses(WorkerProcesses):
    """Workers that do not feel what happens to others."""

    def enter(self, name: RoundName, workers: SimWorkers) -> None:
        """Nobody is told."""

    def leave(self, name: RoundName, workers: SimWorkers) -> None:
        """Nobody is told."""


def _scenario(nodes: int, lost: int) -> Scenario:
    """Of so many nodes some are killed and some lose their power."""
    victims = range(1, nodes, nodes // lost)
    faults = tuple(
        Fault(_LOST_AT + 0.01 * number, "power-off" if number % 2 else "agent-kill", victim)
        for number, victim in enumerate(victims[:lost])
    )
    return Scenario(
        seed=1,
        min_nodes=nodes - 2 * lost,
        max_nodes=nodes,
        max_restarts=3,
        lease=3.0,
        last_call=5.0,
        join_timeout=60.0,
        grace=0.2,
        notice_timeout=0.0,
        backoff=0.0,
        delay=0.0005,
        temper=FailureRates(shortest=_LENGTH, longest=_LENGTH + 1, fails=0.0, hangs=0.0, infects=0.0),
        nodes=tuple(NodePlan(number, start=number / nodes) for number in range(nodes)),
        faults=faults,
        calm=_LOST_AT + 1.0,
        abandoned=False,
    )


class _Played:
    """A job that was played to its end, and what was sent in it besides heartbeats."""

    def __init__(self, nodes: int, lost: int, patch: pytest.MonkeyPatch) -> None:
        self.sent = 0
        self.addresses = 0
        """Messages to the hosts of worker stores, which list the members' addresses."""
        self.most = Counter[int]()
        send = network.Connection.send

        def counted(connection: network.Connection, end: int, payload: bytes) -> None:
            if payload.startswith(_STORE_PEERS):
                self.addresses += 1
            elif payload not in _UNCOUNTED:
                self.sent += 1
                self.most[connection.node] += 1
            send(connection, end, payload)

        patch.setattr(network.Connection, "send", counted)
        patch.setattr(world, "_MOST_STEPS", 1_000 * nodes)
        self.job = Job(_scenario(nodes, lost))
        self.job.audit = _Sampled(self.job)
        self.job.yard = _SimWorkersWithoutProcesses()
        gc.disable()  # all that is made stays until the job is over, and to look through it again and again is slow
        try:
            self.job.run()
        finally:
            gc.enable()
        self.each = self.sent / nodes


@pytest.mark.timeout(300)
def test_ten_thousand_nodes_meet_regroup_and_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    many, lost = examples(10_000), 20
    with monkeypatch.context() as patch:
        few = _Played(200, lost, patch)
    with monkeypatch.context() as patch:
        played = _Played(many, lost, patch)
    job = played.job
    assert job.audit.verdict is not None
    assert job.audit.verdict.outcome is Outcome.SUCCEEDED
    assert Counter(agent.fate for agent in job.agents.values()) == {
        SimOutcome.SUCCEEDED: many - lost,
        SimOutcome.KILLED: lost,
    }
    sizes = [len(each.members) for each in job.audit.rounds.values()]
    assert (sizes[0], sizes[-1]) == (many, many - lost)
    assert job.server is not None
    ledger = job.server.coordinator.state.ledger
    assert ledger == Ledger(lost=ledger.lost)
    assert 1 <= ledger.lost <= lost
    per_round = played.each / len(sizes)
    print(f"{played.each:.1f} messages a node in {len(sizes)} rounds; of 200 nodes {few.each:.1f}")
    assert per_round <= 8  # two of them where a round was waited for longer than the lease: then it is confirmed
    assert max(played.most.values()) <= 8 * len(sizes)
    assert len(sizes) <= played.addresses <= len(sizes) * (many // 1000 + 1), (
        "one host of each round, a thousand at once"
    )
