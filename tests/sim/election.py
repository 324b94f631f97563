"""An agent's candidacy in etcd: the production machine, effects and journal, in virtual time.

This file simulates the waits: requests to etcd, the writes of a term, the end of its server.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from rallypoint.control.coordinator.dispatcher import RestoredState
from rallypoint.control.coordinator.leader_lease import LeaderLease
from rallypoint.control.election import steps
from rallypoint.control.election.journal import LATER, CannotWrite, Journal, NotYet, Outcome, Written
from rallypoint.control.election.leader_resolver import LeaderResolver
from rallypoint.control.election.machine import Election
from rallypoint.control.election.shell import EffectRunner
from rallypoint.control.election.steps import Answer, CandidatePhase, Event, Request
from rallypoint.control.etcd.api import EtcdError, Put
from rallypoint.control.membership.state import NodeId, State
from tests.sim.coroutine import SimEvent, SimThread, Steps
from tests.sim.etcd import SimClient
from tests.sim.server import Server
from tests.sim.world import Process, Violation

if TYPE_CHECKING:
    from tests.sim.job import Job

_PAUSE = 0.2
_LAST_WRITES = 1.0


class SimCandidate:
    """This agent in etcd, from its start to `close`: what `control.election.shell` does on a thread."""

    def __init__(self, job: Job, process: Process, number: int, name: NodeId, address: LeaderResolver) -> None:
        self.number = number
        self._job = job
        self._process = process
        self._name = name
        self._address = address
        self._news = SimEvent(process)
        self._inbox: deque[Event] = deque()
        self._term: SimTerm | None = None
        self._lead = LeaderLease(process)
        self._finished: Callable[[], None] | None = None
        address.on_news = self._on_news
        assert job.etcd is not None
        rng = job.scenario.stream(f"etcd {number}")
        self._client = SimClient(job.etcd, process, number, rng)
        self._effects = EffectRunner(self._client, address, self._put, self._log)
        self._election = Election(job.keys, job.settings, name, rng)
        self._strand = SimThread(process, self._run())

    @property
    def lease(self) -> int:
        """The lease that this agent's key hangs on; 0 if it has none."""
        return self._election.lease

    def close(self, finished: Callable[[], None]) -> None:
        """Give the coordinator's place to the next, and leave etcd; `finished` is called when that is done."""
        self._finished = finished
        self._job.last_to_leave = self.number, self._process.world.now
        self._put(steps.LeaveElection())

    def _put(self, event: Event) -> None:
        self._inbox.append(event)
        self._news.set()

    def _on_news(self) -> None:
        self._put(steps.LinkNews(self._address.met, self._address.refusing_lease, self._address.lost))

    def _run(self) -> Steps[None]:
        yield from self._take(steps.Tick())
        while self._election.phase is not CandidatePhase.GONE:
            while not self._inbox and (left := self._election.wake_at - self._process.monotonic()) > 0:
                yield self._news.wait(left)
            yield from self._take(self._inbox.popleft() if self._inbox else steps.Tick())
        if self._finished is not None:
            self._finished()

    def _take(self, event: Event) -> Steps[None]:
        for effect in self._election.step(event, self._process.monotonic()):
            if isinstance(effect, steps.Ask):
                try:
                    answer = yield from self._do(effect.request, effect.timeout_s)
                except EtcdError as error:
                    self._put(steps.Failed(effect.number, error))
                else:
                    self._put(steps.Answered(effect.number, answer))
            elif isinstance(effect, steps.NodesLost):
                if self._term is not None:
                    self._term.nodes_lost(effect.nodes, effect.detail)
            else:
                self._effects.run(effect)

    def _log(self, line: steps.WriteLog) -> None:
        if line.error is not None:
            raise Violation("the election has stumbled", f"{line.text % line.args}: {line.error!r}")
        self._process.world.note(self._process, line.text, *line.args)

    def _do(self, request: Request, timeout_s: float | None) -> Steps[Answer]:
        client = self._client
        match request:
            case steps.Txn():
                return (yield from client.make(request, timeout_s))
            case steps.Grant(ttl_s=ttl):
                return (yield from client.lease_grant(ttl, timeout_s))
            case steps.RenewLease(lease=lease):
                asked_at = self._lead.now()
                left = yield from client.lease_keep_alive(lease, timeout_s)
                if left and lease == self._election.lease:
                    self._lead.extend(asked_at, left)
                    if self._term is not None:
                        self._term.server.dispatcher.tick()
                return left
            case steps.Revoke(lease=lease):
                yield from client.lease_revoke(lease, timeout_s)
            case steps.FindAddresses():
                return steps.Addresses((self._name.addr,))
            case steps.StartTerm():
                return self._start_term(request)
            case steps.EndTerm(linger_s=linger):
                term, self._term = self._term, None
                if term is not None:
                    self._lead.end()
                    yield from term.end(linger)
        return None

    def _start_term(self, request: steps.StartTerm) -> steps.Listening:
        def deposed(why: str) -> None:
            self._put(steps.Deposed(request.number, why))

        assert self._term is None, "two terms at once"
        secret = f"{self._client.rng.getrandbits(64):x}"
        self._term = SimTerm(self._job, self._process, self._client, request, deposed, self._lead)
        port = self._term.serve(self.number, secret)
        return steps.Listening(request.addresses, port, secret)


class SimTerm:
    """One agent's time as the coordinator, and a `dispatcher.JournalSink`: what `election.shell` does on threads."""

    def __init__(
        self,
        job: Job,
        process: Process,
        client: SimClient,
        request: steps.StartTerm,
        deposed: Callable[[str], None],
        lead: LeaderLease,
    ) -> None:
        self.fence = request.fence
        self.server: Server
        self._job = job
        self._process = process
        self._client = client
        self._takeover = takeover = request.takeover
        self._incarnation = takeover.incarnation or job.new_incarnation()
        self._journal = Journal(job.keys, request.fence, self._incarnation, takeover)
        self._deposed = deposed
        self._lead = lead
        self._event = SimEvent(process)
        self._closed = False
        self._strand = SimThread(process, self._writes())

    def serve(self, node: int, secret: str) -> int:
        """Open the server; returns its port."""
        former = RestoredState(self._incarnation, self._takeover.state)
        self.server = self._job.new_term(self._process, node, former, self, secret.encode(), self._lead)
        return self.server.port

    def nodes_lost(self, numbers: Collection[int], detail: str) -> None:
        """The nodes of these numbers are no more."""
        self.server.dispatcher.nodes_lost(numbers, detail)

    def append(self, number: int, state: State, awaited: int) -> None:
        """See `dispatcher.JournalSink.append`."""
        self._journal.append(number, state, awaited)
        self._event.set()

    def end(self, linger: float) -> Steps[None]:
        """End it: see `Candidate`."""
        self._journal.write_now()
        self._event.set()
        until = self._process.monotonic() + (_LAST_WRITES if linger else 0.0)
        while not self._closed and not self._journal.is_idle and self._process.monotonic() < until:
            yield self._event.wait(until - self._process.monotonic())
        self._closed = True
        self._event.set()
        while self._strand.running:
            yield self._event.wait(0.05)
        over = SimEvent(self._process)
        self.server.finish(over.set, linger)
        while not self.server.finished:
            yield over.wait()

    def _writes(self) -> Steps[None]:
        due = math.inf
        while not self._closed:
            now = self._process.monotonic()
            if self._journal.is_idle:
                due = math.inf
                yield self._event.wait()
                continue
            due = min(due, now + LATER)
            if now < due and not self._journal.is_awaited:
                yield self._event.wait(due - now)
                continue
            write = self._journal.next_write()
            assert write is not None
            outcome = yield from self._make(write, self._journal.writing)
            self._event.set()
            if isinstance(outcome, Written):
                due = math.inf
                self.server.dispatcher.journal_written(outcome.number)
            elif isinstance(outcome, CannotWrite):
                self._closed = True
                self._deposed(outcome.why)
            elif isinstance(outcome, NotYet):
                yield self._event.wait(_PAUSE)

    def _make(self, write: steps.Txn, number: int) -> Steps[Outcome]:
        def done() -> None:
            if any(isinstance(each, Put) and each.key == self._job.keys.state for each in write.then):
                self._job.audit.kept(self.server, number, self.fence)

        try:
            result = yield from self._client.make(write, done=done)
        except EtcdError as error:
            return self._journal.on_error(error)
        return self._journal.on_answer(result)
