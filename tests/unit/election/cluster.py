"""The pure election, step by step: candidates on an etcd that answers at once, without threads or time."""

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
    """A candidate: its state machine, its effects, and its pending request."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.name = NodeId(f"10.0.0.{number}", number, number, f"host-{number}")
        self.election = Election(KEYS, cluster.settings, self.name._replace(addr=""), Random(number))
        self.effects: list[Effect] = []
        self.asked: deque[steps.Ask] = deque()
        """The pending request, if any."""
        self.watches: dict[Watched, steps.WatchKeys] = {}
        self.term: Journal | None = None
        self.met = ""
        self.closed = False
        self.stumbles = False
        """Whether it may log unexpected errors."""

    def step(self, event: Event) -> list[Effect]:
        """Step the machine, and check the laws of single steps."""
        effects = self.election.step(event, self.cluster.now)
        asks = [effect for effect in effects if isinstance(effect, steps.Ask)]
        assert len(self.asked) + len(asks) <= 1, "two requests at once"
        assert not asks or effects[-1] is asks[0], "a request is the last effect"
        for effect in effects:
            if isinstance(effect, steps.WatchKeys):
                assert effect.kind not in self.watches, "two watches of one kind"
                self.watches[effect.kind] = effect
            elif isinstance(effect, steps.EndWatch):
                del self.watches[effect.kind]
            elif isinstance(effect, steps.WriteLog):
                assert effect.error is None or self.stumbles, effect
        self.asked.extend(asks)
        self.effects += effects
        return effects

    def answer(self, error: EtcdError | None = None, *, done: bool = True) -> list[Effect]:
        """Answer the pending request. With an error, report that, whether the request is done or not."""
        ask = self.asked.popleft()
        answer: Answer = None
        if done or error is None:
            try:
                answer = self._do(ask.request)
            except EtcdError as refused:
                error = error or refused
        return self.step(steps.Answered(ask.number, answer) if error is None else steps.Failed(ask.number, error))

    def settle(self) -> None:
        """Answer requests and deliver changes until the candidate waits."""
        while self.asked or self.hear():
            if self.asked:
                self.answer()

    def hear(self) -> bool:
        """Deliver one watched change. Returns whether there was one."""
        for kind, watch in list(self.watches.items()):
            for event in self.cluster.etcd.log:
                key = event.kv.key
                is_watched = key.startswith(watch.key) if watch.prefix else key == watch.key
                if is_watched and event.kv.mod_revision >= watch.revision:
                    self.watches[kind] = watch._replace(revision=event.kv.mod_revision + 1)
                    self.step(steps.Changed(watch.number, (event,)))
                    return True
        return False

    def wake(self) -> list[Effect]:
        """Move the clock to the time when the machine wants to be called, and call it. No lease ends."""
        self.cluster.world.now = max(self.cluster.now, self.election.wake_at)
        return self.step(steps.Tick())

    def loses_watch(self, kind: Watched, lost: WatchEnd) -> list[Effect]:
        """End a watch."""
        return self.step(steps.Unwatched(self.watches.pop(kind).number, lost))

    def greeted(self, incarnation: str, refused: int = 0) -> list[Effect]:
        """Report a greeting of the coordinator with that name."""
        self.met = incarnation
        return self.step(steps.LinkNews(incarnation, refused, lost=refused != 0))

    def close(self) -> None:
        """Ask it to leave."""
        self.closed = True
        self.step(steps.LeaveElection())

    def requests(self) -> list[Request]:
        """All requests so far."""
        return [effect.request for effect in self.effects if isinstance(effect, steps.Ask)]

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
        """Let the journal of its term write once."""
        if self.term is not None and (write := self.term.next_write()) is not None:
            self.term.on_answer(self.cluster.etcd.txn(write.compares, write.then, write.otherwise))


class Cluster:
    """One etcd and its candidates."""

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
        return self.world.now

    def add(self) -> Agent:
        """Add an agent, which makes its first request."""
        agent = Agent(self, len(self.agents) + 1)
        self.agents.append(agent)
        agent.step(steps.Tick())
        return agent

    def next_lease(self) -> int:
        self._leases += 1
        return self._leases

    def next_incarnation(self) -> str:
        self._incarnations += 1
        return f"coordinator-{self._incarnations}"

    def pass_time(self, seconds: float) -> None:
        """Let time pass. All agents get their answers at once."""
        until = self.now + seconds
        while True:
            for agent in self.agents:
                agent.settle()
            at = min([agent.election.wake_at for agent in self.agents], default=until)
            if at > until:
                break
            self.advance(max(at, self.now))
            for agent in self.agents:
                if agent.election.wake_at <= self.now:
                    agent.step(steps.Tick())
        self.advance(until)
        for agent in self.agents:
            agent.settle()

    def advance(self, until: float) -> None:
        self.world.run(until)
        self.world.now = until

    def leaders(self) -> list[Agent]:
        return [agent for agent in self.agents if agent.election.phase is CandidatePhase.LEADING]
