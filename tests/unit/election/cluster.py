"""Candidates on an etcd that answers at once, step by step: the pure election, without threads or time."""

from __future__ import annotations

from collections import deque
from random import Random

from rallypoint.control.election import steps
from rallypoint.control.election.journal import Journal
from rallypoint.control.election.keys import ElectionKeys
from rallypoint.control.election.machine import Election
from rallypoint.control.election.steps import Answer, CandidatePhase, Effect, Event, Request, Watched
from rallypoint.control.etcd.api import EtcdError, WatchEnd
from rallypoint.control.membership.state import NodeId, Settings
from tests.sim.etcd import Etcd
from tests.sim.world import World

KEYS = ElectionKeys.for_job("/x", "job")
SETTINGS = Settings("job", 1, 4, lease=3.0)


class Agent:
    """One candidate: its machine, what it said, and what it has asked and not heard of yet."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.name = NodeId(f"10.0.0.{number}", number, number, f"host-{number}")
        self.election = Election(KEYS, cluster.settings, self.name._replace(addr=""), Random(number))
        self.effects: list[Effect] = []
        """All that it has said so far."""
        self.asked: deque[steps.Ask] = deque()
        """At most one: the request under way."""
        self.watches: dict[Watched, steps.WatchKeys] = {}
        self.term: Journal | None = None
        self.met = ""
        self.closed = False
        self.stumbles = False
        """Whether it may find something that nobody has foreseen."""

    def step(self, event: Event) -> list[Effect]:
        """Step the machine, and check what holds of any step."""
        effects = self.election.step(event, self.cluster.now)
        asks = [each for each in effects if isinstance(each, steps.Ask)]
        assert len(self.asked) + len(asks) <= 1, "two requests at once"
        assert not asks or effects[-1] is asks[0], "a request is the last"
        for each in effects:
            if isinstance(each, steps.WatchKeys):
                assert each.kind not in self.watches, "two watches of one kind"
                self.watches[each.kind] = each
            elif isinstance(each, steps.EndWatch):
                del self.watches[each.kind]
            elif isinstance(each, steps.WriteLog):
                assert each.error is None or self.stumbles, each
        self.asked.extend(asks)
        self.effects += effects
        return effects

    def answer(self, error: EtcdError | None = None, *, done: bool = True) -> list[Effect]:
        """Do the request under way and answer it, or with an error say that, whether it was done or not."""
        ask = self.asked.popleft()
        answer: Answer = None
        if done or error is None:
            try:
                answer = self._do(ask.request)
            except EtcdError as refused:
                error = error or refused
        return self.step(steps.Answered(ask.number, answer) if error is None else steps.Failed(ask.number, error))

    def settle(self) -> None:
        """Answer all that it asks, and tell it what its watches see, until it waits."""
        while self.asked or self.hear():
            if self.asked:
                self.answer()

    def hear(self) -> bool:
        """Tell it one change that it watches; returns whether there was one."""
        for kind, watch in list(self.watches.items()):
            for each in self.cluster.etcd.log:
                key = each.kv.key
                meant = key.startswith(watch.key) if watch.prefix else key == watch.key
                if meant and each.kv.mod_revision >= watch.revision:
                    self.watches[kind] = watch._replace(revision=each.kv.mod_revision + 1)
                    self.step(steps.Changed(watch.number, (each,)))
                    return True
        return False

    def loses_watch(self, kind: Watched, lost: WatchEnd) -> list[Effect]:
        """A watch ends by itself."""
        return self.step(steps.Unwatched(self.watches.pop(kind).number, lost))

    def greeted(self, incarnation: str, refused: int = 0) -> list[Effect]:
        """Its link was greeted by the coordinator of that name."""
        self.met = incarnation
        return self.step(steps.LinkNews(incarnation, refused, lost=refused != 0))

    def close(self) -> None:
        """It is to leave."""
        self.closed = True
        self.step(steps.LeaveElection())

    def requests(self) -> list[Request]:
        """All requests that it has made."""
        return [each.request for each in self.effects if isinstance(each, steps.Ask)]

    def _do(self, request: Request) -> Answer:
        etcd = self.cluster.etcd
        match request:
            case steps.Txn():
                return etcd.txn(request.compares, request.then, request.otherwise)
            case steps.Grant(ttl_s=ttl):
                lease = self.cluster.next_lease()
                etcd.grant(lease, ttl)
                return lease
            case steps.RenewLease(lease=lease):
                return etcd.keep_alive(lease)
            case steps.Revoke(lease=lease):
                etcd.revoke(lease)
            case steps.FindAddresses():
                return steps.Addresses((self.name.addr,))
            case steps.StartTerm():
                return self._start_term(request)
            case steps.EndTerm():
                self.term = None
        return None

    def _start_term(self, request: steps.StartTerm) -> Answer:
        assert self.term is None, "two terms at once"
        taken = request.takeover
        name = taken.incarnation or self.cluster.next_incarnation()
        self.term = Journal(KEYS, request.fence, name, taken)
        self.term.append(1, taken.state, 1)
        return steps.Listening(request.addresses, 2000 + self.number, "secret")

    def write(self) -> None:
        """The journal of its term writes what it can."""
        if self.term is not None and (write := self.term.next_write()) is not None:
            self.term.on_answer(self.cluster.etcd.txn(write.compares, write.then, write.otherwise))


class Cluster:
    """One etcd, and those who use it."""

    def __init__(self, agents: int = 0, settings: Settings = SETTINGS) -> None:
        self.settings = settings
        self.world = World()
        self.etcd = Etcd(self.world, Random(0), 0.0)
        self.agents: list[Agent] = []
        self._leases = self._incarnations = 0
        for _ in range(agents):
            self.add().settle()

    @property
    def now(self) -> float:
        """The time, the same for all."""
        return self.world.now

    def add(self) -> Agent:
        """Another agent, which has asked for what it asks first."""
        agent = Agent(self, len(self.agents) + 1)
        self.agents.append(agent)
        agent.step(steps.Tick())
        return agent

    def next_lease(self) -> int:
        """One that nobody had."""
        self._leases += 1
        return self._leases

    def next_incarnation(self) -> str:
        """One that nobody had."""
        self._incarnations += 1
        return f"coordinator-{self._incarnations}"

    def pass_time(self, seconds: float) -> None:
        """Let time pass, in which all agents have their answers at once."""
        until = self.now + seconds
        while True:
            for agent in self.agents:
                agent.settle()
            at = min([agent.election.wake_at for agent in self.agents], default=until)
            if at > until:
                break
            self._advance(max(at, self.now))
            for agent in self.agents:
                if agent.election.wake_at <= self.now:
                    agent.step(steps.Tick())
        self._advance(until)
        for agent in self.agents:
            agent.settle()

    def _advance(self, until: float) -> None:
        self.world.run(until)
        self.world.now = until

    def leaders(self) -> list[Agent]:
        """Those who lead."""
        return [agent for agent in self.agents if agent.election.phase is CandidatePhase.LEADING]
