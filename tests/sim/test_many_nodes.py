"""Ten thousand nodes and more: they meet, lose some of them, regroup and finish, at a constant number of messages for
each; and all of them come back after a cut in which they have missed their places.

The coordinator, the policy and the handler are the production ones, as in every simulated job. The audit looks at all
nodes only where a round begins or ends, and now and then: for each step of each node that would be a hundred million
looks.
"""

from __future__ import annotations

import gc
from collections import Counter

import pytest

from rallypoint.control.membership.state import Ledger, NodeInfo, Outcome
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.messages import Heartbeat, Placement, ResumeRequest, StorePeers
from tests.effort import examples
from tests.sim import network, world
from tests.sim.agent import Agent, SimOutcome
from tests.sim.audit import Audit, Said
from tests.sim.faults import strike
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
_CUT = 6.0
"""Seconds after which each node has given its connection up, and the coordinator no node."""
_UNCOUNTED = {codec.encode(Heartbeat(number)) for number in range(4)}
_STORE_PEERS = codec.encode(StorePeers(()))[:2]
"""How these messages begin: two numbers, of which the second one is their kind."""
_RESUMES = codec.encode(ResumeRequest("", NodeInfo("", 1, "", 0)))[:2]


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


class _CutOffWhenPlaced(_Sampled):
    """Cuts all nodes off from the coordinator at the moment when the second round is complete: none gets its place."""

    is_cut = False

    def after(self, server: Server, node: int | None, request: Said, number: int) -> None:
        """As the audit's own; and the cut, before anybody is told of the step."""
        super().after(server, node, request, number)
        state = server.coordinator.state
        if state.complete and state.round == 1 and not self.is_cut:
            self.is_cut = True
            strike(self._job, Fault(self._job.world.now, "cut-all", 0, _CUT))


class _SimWorkersWithoutProcesses(WorkerProcesses):
    """Workers that do not feel what happens to others."""

    def enter(self, name: RoundName, workers: SimWorkers) -> None:
        """Nobody is told."""

    def leave(self, name: RoundName, workers: SimWorkers) -> None:
        """Nobody is told."""


def _losses(nodes: int, lost: int) -> tuple[Fault, ...]:
    """Of so many nodes some are killed and some lose their power."""
    victims = range(1, nodes, nodes // lost)
    return tuple(
        Fault(_LOST_AT + 0.01 * number, "power-off" if number % 2 else "agent-kill", victim)
        for number, victim in enumerate(victims[:lost])
    )


def _scenario(nodes: int, lost: int, faults: tuple[Fault, ...]) -> Scenario:
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
        calm=faults[-1].at + 1.0,
        abandoned=False,
    )


class _Played:
    """A job that was played to its end, and what was sent in it besides heartbeats."""

    def __init__(self, scenario: Scenario, patch: pytest.MonkeyPatch, audit: type[Audit] = _Sampled) -> None:
        self.sent = self.resumed = 0
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
                self.resumed += payload.startswith(_RESUMES)
            send(connection, end, payload)

        patch.setattr(network.Connection, "send", counted)
        patch.setattr(world, "_MOST_STEPS", 1_000 * len(scenario.nodes))
        self.job = Job(scenario)
        self.job.audit = audit(self.job)
        self.job.yard = _SimWorkersWithoutProcesses()
        gc.disable()  # all that is made stays until the job is over, and to look through it again and again is slow
        try:
            self.job.run()
        finally:
            gc.enable()
        self.each = self.sent / len(scenario.nodes)
        self.sizes = [len(each.members) for each in self.job.audit.rounds.values()]

    @property
    def fates(self) -> Counter[SimOutcome | None]:
        """How the agents have ended."""
        return Counter(agent.fate for agent in self.job.agents.values())

    @property
    def ledger(self) -> Ledger:
        """The ended rounds, by cause."""
        assert self.job.server is not None
        return self.job.server.coordinator.state.ledger


@pytest.mark.timeout(300)
def test_ten_thousand_nodes_meet_regroup_and_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    many, lost = examples(10_000), 20
    with monkeypatch.context() as patch:
        few = _Played(_scenario(200, lost, _losses(200, lost)), patch)
    with monkeypatch.context() as patch:
        played = _Played(_scenario(many, lost, _losses(many, lost)), patch)
    sizes = played.sizes
    assert played.job.audit.verdict is not None
    assert played.job.audit.verdict.outcome is Outcome.SUCCEEDED
    assert played.fates == {SimOutcome.SUCCEEDED: many - lost, SimOutcome.KILLED: lost}
    assert (sizes[0], sizes[-1]) == (many, many - lost)
    assert played.ledger == Ledger(lost=played.ledger.lost)
    assert 1 <= played.ledger.lost <= lost
    per_round = played.each / len(sizes)
    print(f"{played.each:.1f} messages a node in {len(sizes)} rounds; of 200 nodes {few.each:.1f}")
    assert per_round <= 8  # two of them where a round was waited for longer than the lease: then it is confirmed
    assert max(played.most.values()) <= 8 * len(sizes)
    assert len(sizes) <= played.addresses <= len(sizes) * (many // 1000 + 1), (
        "one host of each round, a thousand at once"
    )


@pytest.mark.timeout(300)
def test_all_nodes_of_the_largest_job_miss_their_places_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker fails; all nodes are cut off when their new places are announced, and get them after the cut; one node
    loses its power; and all others succeed.
    """
    many = examples(12_500)
    faults = (Fault(_LOST_AT, "worker-failure", many // 2), Fault(_LOST_AT + _CUT + 4.0, "power-off", many - 1))
    with monkeypatch.context() as patch:
        played = _Played(_scenario(many, 1, faults), patch, _CutOffWhenPlaced)
    assert played.job.audit.verdict is not None
    assert played.job.audit.verdict.outcome is Outcome.SUCCEEDED
    assert played.fates == {SimOutcome.SUCCEEDED: many - 1, SimOutcome.KILLED: 1}
    assert played.sizes == [many, many, many - 1]
    assert played.ledger == Ledger(failures=1, lost=1)
    assert played.resumed >= many
