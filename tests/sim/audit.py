"""Rules that must always hold, checked as things happen.

The audit knows the truth: which failure happened in which round, whose workers have succeeded, who was disturbed. It
compares the beliefs of the coordinator and the agents with that.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from rallypoint.agent.policy import Phase, PolicyState
from rallypoint.agent.steps import (
    DrainArrived,
    End,
    Event,
    SignalArrived,
    Step,
    StopWorkers,
    TimerFired,
    WorkersFailed,
    WorkersSucceeded,
)
from rallypoint.control.election.steps import Fence
from rallypoint.control.membership.state import (
    Close,
    Drain,
    Fail,
    NodeRange,
    Outcome,
    PreemptJob,
    Reason,
    Refusal,
    State,
    Verdict,
    known_to,
    name_of,
)
from rallypoint.control.protocol.messages import (
    JobEnded,
    JoinRefused,
    LeaveRequest,
    LinkLost,
    Notification,
    Placement,
    Request,
    ResumeRequest,
    RoundEnded,
)
from rallypoint.failures.cause import Ending
from rallypoint.observe.watching.messages import JobPhase as SnapshotPhase
from rallypoint.observe.watching.messages import (
    MemberState,
    ResizeCommand,
    RestartCommand,
    Snapshot,
    StopCommand,
    WatcherRequest,
)
from tests.sim.faults import OUTAGES
from tests.sim.ground_truth import AuditStep, Facts, Round, RoundBook, RoundName, common, number_of
from tests.sim.hangs import check_quiet
from tests.sim.network import Connection
from tests.sim.server import Server, SimLocalSession, SimSession
from tests.sim.world import Violation

if TYPE_CHECKING:
    from tests.sim.agent import Agent
    from tests.sim.job import Job

_STOPPING = RoundEnded | JobEnded | SignalArrived | TimerFired | DrainArrived
"""What running workers are stopped for."""
Said = Request | WatcherRequest | None
"""What a coordinator was told before a step, if anything."""
_RECOVERY = 15.0
"""Seconds for which a disturbance may still be felt, beside the leases that it takes to notice."""


class Audit:
    """All checks of one run."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.rounds: dict[RoundName, Round] = {}
        self.names: dict[tuple[int, int], RoundName] = {}
        """(node, number) to the name of the round that the node was placed in."""
        self.verdict: Verdict | None = None
        self._books: dict[int, RoundBook] = {}
        self._failures: dict[int, tuple[int, RoundName]] = {}
        self._counted: set[RoundName] = set()
        self._ended: set[RoundName] = set()
        self._first_server: dict[int, int] = {}
        """Node to the first server that it was known to."""
        self.joined_at: dict[int, float] = {}
        """When a node began to wait for its place without having asked for it."""
        self._drains: set[tuple[int, RoundName]] = set()
        self.left: set[int] = set()
        """The nodes whose departure the job knows: what a deposed coordinator hears is lost."""
        self._stores: dict[int, RoundName] = {}
        """Port to the round whose workers were told of it."""
        self._placed: dict[int, Placement] = {}
        self._gave_up: set[str] = set()
        """The names of those for whose sake a rendezvous was abandoned."""
        self._disturbed: dict[int, float] = {}
        self._drained: dict[int, Placement | None] = {}
        """Nodes that were told to leave by an operator, each with the place that it had by then."""
        self._sizes = {NodeRange(job.settings.min_nodes, job.settings.max_nodes)}
        """All that operators have asked for, and the one of the beginning."""
        self.preempted = False
        """Whether a node was told that the whole job will be taken away."""
        self._delegates: set[int] = set()
        kinds = {fault.kind for fault in job.scenario.faults}
        self._only_etcd_fails = job.scenario.etcd and kinds <= OUTAGES

    # The coordinator

    def keeps_place(self, node: int) -> None:
        """A node waits for its next place from now on, and is about to be told so."""
        self.joined_at[node] = self._job.world.now

    def attached(self, server: Server, node: int) -> None:
        """A node has opened a session."""
        self._first_server.setdefault(node, server.number)

    def hears(self, server: Server, node: int, request: Request) -> None:
        """A node is about to be heard."""
        self._job.world.note(server.process, "hears node %d: %s", node, request)
        if isinstance(request, Drain):
            name = self.names.get((node, request.round))
            if name is not None:
                self._drains.add((node, name))

    def after(self, server: Server, node: int | None, request: Said, number: int) -> None:
        """The coordinator has dealt with something; hold the state before against the one after.

        Where states are kept before anybody is told of them, only a step that was kept is one that the job has taken.
        """
        history = server.coordinator.states
        if (len(history) == 1 and not isinstance(request, Fail)) or server.ending:
            return
        step = AuditStep(number, tuple(history), node, request, self._facts(server, history))
        del history[:-1]
        book = self._book(server)
        if server.keeps and number > server.kept:
            server.steps.append(step)
        else:
            self._judge(server, book, step)
        self._check_lists(server, history[-1])

    def takes_over(self, server: Server, fence: Fence) -> None:
        """A coordinator was elected, and has read what the one before it had kept."""
        if not self._holds(fence):
            return  # what it has read may be old by now, and nobody will hear of it
        kept, found = self._book(server).kept, server.coordinator.state
        # One that begins anew may hold its first round back, for nodes of an earlier one that might live after all.
        known = State(restart_delay=found.restart_delay) if kept is None else kept
        if known != found:
            raise Violation("who takes over does not know what was kept", f"{found} instead of {known}")

    def kept(self, server: Server, number: int, fence: Fence) -> None:
        """The server's state of that number is kept from this moment on."""
        if not self._holds(fence):
            raise Violation("a deposed coordinator wrote", f"{server.process}, state {number}")
        server.kept = number
        book = self._book(server)
        while server.steps and server.steps[0].number <= number:
            step = server.steps.popleft()
            self._judge(server, book, step)
            book.kept = step.states[-1]

    def tells(self, server: Server, number: int, notice: Notification) -> None:
        """A node is about to be told what follows from the state of that number."""
        if server.keeps and number > server.kept:
            raise Violation("a node was told before it was kept", f"state {number}, kept {server.kept}: {notice}")

    def _holds(self, fence: Fence) -> bool:
        """Whether who has this fence is the coordinator."""
        key, created = fence
        etcd = self._job.etcd
        return etcd is not None and key in etcd.stored and etcd.stored[key].create_revision == created

    def _book(self, server: Server) -> RoundBook:
        book = self._books.get(server.number)
        if book is None:
            book = self._books[server.number] = RoundBook()
        return book

    def _facts(self, server: Server, history: list[State]) -> Facts | None:
        if not any(before.complete and after.round > before.round for before, after in pairwise(history)):
            return None
        now, process = self._job.world.now, server.process
        return Facts(
            frozenset(number for number in self._job.plans if self.excused(number)),
            # Of a single node the coordinator cannot tell whether it or everybody is cut off.
            alone=now < self._job.cut_all_until + _RECOVERY and not server.coordinator.present(),
            # A server that slept may find only now what happened to a connection meanwhile, and a node that took
            # it for lost needs some time to come back.
            woke=process.resumed_at > now - 2 * self._job.settings.lease,
        )

    def _judge(self, server: Server, book: RoundBook, step: AuditStep) -> None:
        if isinstance(step.request, LeaveRequest) and step.node is not None:
            self.left.add(step.node)
        if isinstance(step.request, Fail) and step.node is not None:
            self._check_counts(book, step.states[0], step.states[-1], step.node, step.request)
        for before, after in pairwise(step.states):
            self._check_size(book, before, after, step.request)
            if before is not after:
                self._check_step(server, book, before, after, step)
        check_quiet(step.states, step.node, step.request)
        self._check_ranks(book, step.states[-1])

    def _check_size(self, book: RoundBook, before: State, after: State, request: Said) -> None:
        """Rounds have the size that was asked for last, and nothing but a command changes it."""
        if isinstance(request, ResizeCommand) and after.size != before.size:
            most = request.max_nodes - request.max_nodes % self._job.scenario.segment
            self._sizes.add(NodeRange(request.min_nodes, most))
        elif after.size != before.size and not isinstance(request, ResumeRequest):
            raise Violation("the size changed by itself", f"{before.size} to {after.size} on {request}")
        settings = self._job.settings
        book.size = after.size or NodeRange(settings.min_nodes, settings.max_nodes)
        if book.size not in self._sizes:
            raise Violation("a size that nobody has asked for", f"{book.size} on {request}")

    def shown(self, snapshot: Snapshot) -> None:
        """An operator is shown how the job stands."""
        running = snapshot.phase is SnapshotPhase.RUNNING
        ranks = [each.group_rank for each in snapshot.nodes if each.state is MemberState.PARTICIPANT]
        if running and not all(before < after for before, after in pairwise([-1, *ranks])):
            raise Violation("an operator is shown wrong ranks", f"{snapshot}")
        told_later = self._job.etcd is not None  # what is shown waits for the journal, as all else does
        if self.verdict is not None and not snapshot.detail and self._job.servers == 1 and not told_later:
            raise Violation("an operator is shown a job that goes on when it is over", f"{snapshot}")

    def _check_step(self, server: Server, book: RoundBook, before: State, after: State, step: AuditStep) -> None:
        node, request = step.node, step.request
        self._check_ledger(before, after, request)
        filled = False
        if isinstance(request, ResumeRequest) and node is not None and request.round >= 0:
            filled = after.round > before.round + 1 or (after.round == request.round and not before.complete)
            filled = filled or request.round in (after.round, after.round - 1)
            self._learn(book, after, node, request)
        completed = after.complete and (not before.complete or after.round > before.round)
        if before.complete and after.round > before.round and not filled:
            self._check_end(book, before, after, step)
        if completed and not (filled and isinstance(request, ResumeRequest) and after.round == request.round):
            self._complete(server, book, after)
        elif before.complete and after.complete and before.round == after.round:
            self._check_members(book, before, after)
        if after.abandoned.number != before.abandoned.number:
            self._check_abandoned(before, after)
        if after.closed and not before.closed:
            self._check_close(book, before, after, request)

    def _check_abandoned(self, before: State, after: State) -> None:
        """A rendezvous comes to nothing for all only when it cannot do without one whose time is over."""
        by = after.abandoned.given_up_by
        agent = next(each for each in self._job.agents.values() if each.host == by.partition(" ")[0])
        waited = self._job.world.now - agent.joined_at
        least = self._job.settings.min_nodes if before.size is None else before.size.min_nodes
        others = {number_of(node) for node in known_to(before) if not node.is_placeholder} - {agent.number}
        unknown = sum(node.is_placeholder for node in known_to(before))
        if before.complete or self._job.scenario.in_whole_segments(others) + unknown >= least:
            raise Violation("a rendezvous was abandoned that could do without a node", f"{by}: {before}")
        if waited < self._job.settings.join_timeout - 1e-6:
            raise Violation("a rendezvous was abandoned too early", f"by {by} after {waited:.3f} s")
        if known_to(after):
            raise Violation("a rendezvous was abandoned by halves", f"{after}")
        self._gave_up.add(by)

    def _learn(self, book: RoundBook, after: State, node: int, request: ResumeRequest) -> None:
        """A node has said what it holds; from it the server may have taken a round that another one completed."""
        name = self.names.get((node, request.round))
        if name is not None and after.round in (request.round, request.round + 1):
            book.names.setdefault(request.round, name)

    def _check_counts(self, book: RoundBook, before: State, after: State, node: int, request: Fail) -> None:
        """A failure of the round that runs is counted; of any other it is not."""
        _, name = self._failures.get(request.cause.pid, (node, (-1, -1)))
        running = book.names.get(before.round) if before.complete else None
        member = node in {number_of(each) for each in before.participants}
        counts = running == name and member and not before.closed and not before.is_preempted
        grown = after.ledger.failures - before.ledger.failures
        if counts and grown != 1:
            raise Violation(f"a failure was counted {grown} times", f"failure {request.cause.pid} of round {name}")
        if not counts and grown:
            raise Violation(
                "a failure of another round was counted", f"failure {request.cause.pid} of {name} in {running}"
            )
        if not counts:
            return
        if name in book.counted:
            raise Violation("two failures of one round were counted", f"round {name}")
        book.counted.add(name)
        self._counted.add(name)

    def _check_ledger(self, before: State, after: State, request: Said) -> None:
        grown = after.ledger.failures - before.ledger.failures
        if grown and not isinstance(request, Fail | ResumeRequest):
            raise Violation("a restart was counted without a failure", f"on {request}")
        if grown < 0:
            raise Violation("the ledger forgot a failure", f"{before.ledger} became {after.ledger}")
        if after.ledger.failures > len(self._counted):
            raise Violation("more restarts than failures", f"{after.ledger} for failures in {sorted(self._counted)}")

    def _check_lists(self, server: Server, after: State) -> None:
        present = server.coordinator.present()
        running = after.participants if after.complete else after.survivors
        for node in (*after.participants, *after.wait_list, *after.redundancy_list, *after.survivors):
            released = (node in running or server.keeps) and server.coordinator.awaits_some
            if not node.is_placeholder and node not in present and not released:
                raise Violation("a node without a session takes part", f"{node} in round {after.round}")

    def _check_ranks(self, book: RoundBook, after: State) -> None:
        name = book.names.get(after.round) if after.complete else None
        if name is not None:
            members = self.rounds[name].members
            for node, each in after.participants.items():
                if not node.is_placeholder and members.get(number_of(node)) != each.rank:
                    raise Violation(
                        "a node holds a group rank that it was not given", f"{node}: {each} in round {name}"
                    )

    def _check_members(self, book: RoundBook, before: State, after: State) -> None:
        """Who comes into a complete round must have had that very group rank in it before."""
        name = book.names.get(after.round)
        placed = self.rounds[name].members if name is not None else {}
        for node, each in after.participants.items():
            if node not in before.participants and placed.get(number_of(node)) != each.rank:
                raise Violation("a complete round was joined late", f"{node} in round {after.round}")

    def _complete(self, server: Server, book: RoundBook, state: State) -> None:
        size = book.size
        assert size is not None
        members = {number_of(node): each.rank for node, each in state.participants.items()}
        name = book.names[state.round] = (server.number, state.round)
        if len(members) != len(state.participants):
            raise Violation("one agent has two places", f"{sorted(state.participants)} in round {name}")
        if not size.min_nodes <= len(members) <= size.max_nodes:
            raise Violation("a round of a wrong size completed", f"{len(members)} nodes in round {name}")
        if sorted(members.values()) != list(range(len(state.participants))):
            raise Violation("group ranks are not 0..n-1", f"{members} in round {name}")
        if self._job.scenario.in_whole_segments(members) != len(members) or not self._in_one_domain_each(members):
            raise Violation("a segment is not of one domain", f"{members} in round {name}")
        if name in self.rounds:
            raise Violation("a round completed twice", f"{name}")
        if state.is_preempted:
            raise Violation("a preempted job began another round", f"{name}")
        self.rounds[name] = Round(name, members, state.ledger.failures)
        self._job.world.note(server.process, "round %s: %s", name, members)

    def _in_one_domain_each(self, members: Mapping[int, int]) -> bool:
        plans, size = self._job.plans, self._job.scenario.segment
        return size < 2 or len({(rank // size, plans[node].domain) for node, rank in members.items()}) * size == len(
            members
        )

    def _check_end(self, book: RoundBook, before: State, after: State, step: AuditStep) -> None:
        request, facts = step.request, step.facts
        assert facts is not None
        name, ended = book.names.get(before.round), after.ended
        if name is not None:
            self._ended.add(name)
            book.ended.setdefault(name, self._job.world.now)
        if before.is_preempted or ended is None or ended.round != before.round:
            what = "of a preempted job ended before the job" if before.is_preempted else "ended without a reason"
            raise Violation(f"a round {what}", f"{name}: {ended}")
        match ended.reason:
            case Reason.FAILURE:
                if not isinstance(request, Fail) or ended.cause != request.cause:
                    raise Violation("a round ended by a failure that nobody reported", f"{name}: {ended}")
            case Reason.DRAINED:
                agreed = {node for node, each in self._drains if each == name}
                if not agreed:
                    raise Violation("a round was drained that nobody meant", f"{name}: {request}")
                wanted = (
                    {number_of(node) for node in before.participants} if self._job.settings.notice_timeout else set()
                )
                if not wanted <= agreed:
                    raise Violation("a round was drained without the consent of all", f"{name}: only {agreed}")
            case Reason.LOST | Reason.DEPARTED:
                number = self._who(name, before, ended.node)
                # Who was never told of its place, because the server ended just then, cannot say that it has one.
                told = name is None or number in self.rounds[name].told
                if number is not None and told and not facts.alone and not facts.woke and number not in facts.excused:
                    raise Violation("a healthy node was taken for lost", f"node {number} in round {name}: {ended}")
            case Reason.REQUESTED if not isinstance(request, RestartCommand):
                raise Violation("a round was restarted that nobody asked for", f"{name}: {request}")
            case Reason.FORGOTTEN:
                raise Violation("a round that this server ran was forgotten", f"{name}: {ended}")

    def _who(self, name: RoundName | None, before: State, shown: str) -> int | None:
        for node, each in before.participants.items():
            if name_of(before, node) == shown:
                if not node.is_placeholder:
                    return number_of(node)
                members = self.rounds[name].members if name in self.rounds else {}
                return next((number for number, rank in members.items() if rank == each.rank), None)
        return None

    def _check_close(self, book: RoundBook, before: State, after: State, request: Said) -> None:
        verdict, name = after.verdict, book.names.get(before.round)
        if verdict is None:
            raise Violation("the job was closed without a verdict", f"on {request}")
        if verdict.ending is Ending.PREEMPTED:
            self._check_preempted(before, after, request)
        elif verdict.outcome is Outcome.STOPPED and not isinstance(request, Close | StopCommand):
            raise Violation("something other than a verdict closed the job", f"on {request}")
        if verdict.outcome is Outcome.FAILED:
            if not isinstance(request, Fail) or verdict.cause != request.cause:
                raise Violation("the verdict is not the first failure", f"{verdict} on {request}")
            if before.ledger.failures < self._job.scenario.max_restarts:
                raise Violation("the job failed with restarts left", f"{before.ledger}")
        if verdict.outcome is Outcome.SUCCEEDED:
            known = self.rounds.get(name) if name is not None else None
            if known is None or not set(known.members) <= known.finished:
                raise Violation("success before all workers had succeeded", f"round {name}: {known}")
        self.verdict = book.verdict = verdict

    def _check_preempted(self, before: State, after: State, request: Said) -> None:
        """The job ends so only if somebody was told of it, and when all who are still in have had their time."""
        if not self.preempted or not (before.is_preempted or isinstance(request, PreemptJob | ResumeRequest)):
            raise Violation("a job was preempted that nobody takes away", f"on {request}")
        waits = set(after.participants) - after.consents - after.succeeded if after.complete else ()
        if waits:
            raise Violation("a preempted job ended before all had saved", f"{waits} on {request}")
        assert after.verdict is not None
        delegate = after.verdict.delegate
        there = after.participants.items() if after.complete else ()
        ranks = {node: each.rank for node, each in there if not node.is_placeholder}
        if delegate is None or ranks.get(delegate, 0) != min(ranks.values(), default=0):
            raise Violation("the wrong node acts for a preempted job", f"{delegate} of {ranks}")

    def requeues(self, agent: Agent, told: bool) -> None:
        """A node has the scheduler start the job again, because it was told to, or since nobody tells it anything."""
        if not self.preempted:
            raise Violation("a job was requeued that nobody takes away", f"node {agent.number}")
        if told:
            self._delegates.add(agent.number)
        if len(self._delegates) > 1 and self._job.servers == 1:
            raise Violation("two nodes requeue the job", f"{self._delegates}")

    def found_silent(self, server: Server, holder: SimSession | SimLocalSession) -> None:
        """The server has ended a session for silence. Only what did not reach its kernel may be missed."""
        if not isinstance(holder, SimSession):
            raise Violation("a session without a lease was silent", f"node {holder.node}")
        connection: Connection = holder.connection
        end, lease = connection.ends[1], self._job.settings.lease
        heard = self._job.world.now - end.arrived_at
        process = server.process
        if process.resumed_at == self._job.world.now and process.resumed_at - process.paused_at < lease / 2:
            return  # too short a pause to be noticed, with a heartbeat that waits to be read
        if heard < lease - 1e-6 and not end.blackhole and end.open:
            raise Violation("a node that was beating was dropped", f"node {holder.node}, heard {heard:.3f} s ago")

    # The agents

    def placed(self, agent: Agent, placement: Placement, source: int) -> None:
        """A node has been told its place."""
        name = (source, placement.round)
        round_ = self.rounds.get(name)
        if round_ is None:
            raise Violation("a node was placed in no round", f"node {agent.number}: {placement}")
        before = self._placed.get(agent.number)
        if before is not None and placement.round <= before.round and round_.told.get(agent.number) != placement:
            raise Violation("round numbers did not grow", f"node {agent.number}: {before} and {placement}")
        self._check_place(agent, placement, round_)
        if before is not None and placement.restarts < before.restarts:
            raise Violation("the restart count went back", f"node {agent.number}: {before} and {placement}")
        if placement.restarts != round_.restarts or placement.restarts > self._job.scenario.max_restarts:
            raise Violation("a wrong restart count was told", f"node {agent.number}: {placement}")
        if self._job.servers == 1 and placement.restarts != sum(each < name for each in self._counted):
            raise Violation("restarts told are not the failures counted", f"{placement} with {self._counted}")
        round_.told[agent.number] = placement
        round_.restarts_workers[agent.number] = agent.restarts_workers
        self._placed[agent.number] = placement
        self.names[agent.number, placement.round] = name

    def _check_place(self, agent: Agent, placement: Placement, round_: Round) -> None:
        by_rank = sorted((rank, number) for number, rank in round_.members.items())
        sizes = [self._job.plans[number].size for _, number in by_rank]
        if round_.members.get(agent.number) != placement.group_rank:
            raise Violation("a node was told another's rank", f"node {agent.number}: {placement} in {round_.members}")
        base = sum(sizes[: placement.group_rank])
        if (placement.ranks.base_rank, placement.ranks.world_size) != (base, sum(sizes)):
            raise Violation("worker ranks are wrong", f"node {agent.number}: {placement} with sizes {sizes}")
        if placement.group_world_size != len(sizes):
            raise Violation("the size of a round is wrong", f"node {agent.number}: {placement}")
        for other in round_.told.values():
            if common(other) != common(placement):
                raise Violation("two nodes were told different things of one round", f"{other} and {placement}")

    def starts(self, agent: Agent, placement: Placement, source: int) -> None:
        """A node is about to start its workers; `source` is the server that it has talked to last."""
        if self._drained.get(agent.number, placement) != placement:
            raise Violation("a drained node was started again", f"node {agent.number}: {placement}")
        if agent.workers.running is not None:
            raise Violation("workers were started beside others", f"node {agent.number}: {placement}")
        if agent.place != placement:
            raise Violation("workers were started for an old place", f"node {agent.number}: {placement}")
        name = self.names[agent.number, placement.round]
        now = self._job.world.now
        over = now - self._books[source].ended.get(name, now) if source in self._books else 0.0
        if over > self._job.settings.lease + 1e-6:
            raise Violation("workers were started in a round that was long over", f"node {agent.number}: {over:.3f} s")
        if self._stores.setdefault(placement.store_port, name) != name:
            before = self._stores[placement.store_port]
            raise Violation("two rounds have one worker store", f"{before} and {name} on node {agent.number}")
        if placement.group_rank == 0 and agent.stores.prepared != placement.store_port:
            raise Violation("the worker store of a round is not there", f"node {agent.number}: {placement}")
        self._check_survivors(agent, placement, self.rounds[name])
        admitted = self._job.world.admitted.get(placement.store_port)  # until there is one, who comes has to wait
        if admitted is not None and agent.stores.worker_address not in admitted:
            raise Violation("the worker store refuses a member", f"node {agent.number}: {placement} with {admitted}")

    def _check_survivors(self, agent: Agent, placement: Placement, round_: Round) -> None:
        """Workers go on in their processes on all nodes of a round or on none: the others resume from elsewhere."""
        agents = self._job.agents
        if not agent.workers.survivors and not placement.restart_workers:
            return
        # The first will do, and it is mostly the first of all: this is asked by each of ten thousand nodes.
        all_restarted = (
            each for each in round_.members if round_.restarts_workers.get(each, agents[each].restarts_workers)
        )
        restarted = next(all_restarted, None)
        if agent.workers.survivors and restarted is not None:
            raise Violation("a worker goes on beside others that were started anew", f"{placement}: node {restarted}")
        if placement.restart_workers and restarted is None:
            raise Violation("workers that could go on were started anew", f"node {agent.number}: {placement}")

    def decided(self, agent: Agent, before: PolicyState, event: Event, steps: tuple[Step, ...], source: int) -> None:
        """An agent's policy has decided."""
        name = self.names.get((agent.number, before.round))
        if isinstance(event, WorkersFailed) and name is not None:
            self._failures[event.cause.pid] = (agent.number, name)
        elif isinstance(event, WorkersSucceeded) and name is not None:
            self.rounds[name].finished.add(agent.number)
        elif isinstance(event, LinkLost) and before.phase is Phase.RUNNING and not agent.holds_start:
            raise Violation("running workers were stopped for want of a server", f"node {agent.number}")
        if isinstance(event, JoinRefused):
            self._check_refused(agent, event)
        if isinstance(event, RoundEnded) and before.phase is Phase.RUNNING and event.end.reason is Reason.FORGOTTEN:
            self._check_forgotten(agent, name, source)
        if isinstance(event, RoundEnded) and before.phase is Phase.RUNNING and self._only_etcd_fails:
            self._check_outage(agent, event)
        stops = before.phase is Phase.RUNNING and any(isinstance(step, StopWorkers) for step in steps)
        if isinstance(event, DrainArrived):
            self._drained[agent.number] = agent.place
            self.disturb(agent.number, self._job.settings.notice_timeout + self._job.scenario.grace)
        if stops and not isinstance(event, _STOPPING) and not agent.holds_start:
            raise Violation("running workers were stopped for no reason", f"node {agent.number}: {event}")
        if any(isinstance(step, End) and isinstance(step.event, LinkLost) for step in steps):
            self._check_lost(agent)

    def _check_refused(self, agent: Agent, event: JoinRefused) -> None:
        waited = self._job.world.now - agent.joined_at
        early = waited < self._job.settings.join_timeout - 1e-6
        by_another = event.progress is not None and event.progress.gave_up_by in self._gave_up
        if event.refusal is Refusal.TIMEOUT and early and not by_another:
            raise Violation("a join was given up too early", f"node {agent.number} after {waited:.3f} s")
        if event.refusal in (Refusal.CLOSED, Refusal.SPARE_NOT_NEEDED) and self.verdict is None:
            raise Violation("a join was refused by a job that goes on", f"node {agent.number}: {event}")
        if event.refusal is Refusal.RANK_TAKEN:
            raise Violation("a rank was taken where ranks are not fixed", f"node {agent.number}: {event}")

    def _check_outage(self, agent: Agent, event: RoundEnded) -> None:
        if event.end.reason not in (Reason.FAILURE, Reason.DRAINED, Reason.DEPARTED):
            raise Violation("an outage of etcd restarted workers", f"node {agent.number}: {event.end}")

    def _check_forgotten(self, agent: Agent, name: RoundName | None, source: int) -> None:
        """A server that knows nothing of a round may end it only if there was something wrong with its nodes.

        Or if new nodes found a server first, now or before: they cannot tell it of a job that runs, and give the
        numbers of its rounds to other rounds.
        """
        round_ = self.rounds[name] if name is not None else None
        if round_ is None or name in self._ended or any(self.excused(node) for node in round_.members):
            return
        if len({number for _, number in self.rounds}) < len(self.rounds):
            return
        took_over = [node for (server, _), each in self.rounds.items() if server == source for node in each.members]
        if not any(self._first_server[node] == source for node in took_over):
            raise Violation("a running round was forgotten", f"round {name} on node {agent.number}")

    def _check_lost(self, agent: Agent) -> None:
        up_for = self._job.server_up_for()
        if up_for > self._job.settings.join_timeout + _RECOVERY and not self.excused(agent.number):
            raise Violation("a node lost a server that was there", f"node {agent.number}, up for {up_for:.1f} s")

    def told_verdict(self, agent: Agent, verdict: Verdict, source: int) -> None:
        """A node has been told how the job ended."""
        known = self._books[source].verdict
        if verdict != known:
            raise Violation("two verdicts", f"node {agent.number} was told {verdict}, the server said {known}")

    def agent_ended(self, agent: Agent) -> None:
        """An agent has come to its end."""
        self.disturb(agent.number)
        preempted = self.verdict is not None and self.verdict.ending is Ending.PREEMPTED
        succeeded = agent.fate is not None and agent.fate.name == "SUCCEEDED"
        if preempted and succeeded and agent.connected and self._job.servers == 1:  # else it may not know of it
            raise Violation("a node of a preempted job ended as if that had succeeded", f"node {agent.number}")

    # Disturbances

    def disturb(self, number: int, length: float = 0.0) -> None:
        """Something befalls a node, from now on for `length` seconds."""
        until = self._job.world.now + length
        self._disturbed[number] = max(self._disturbed.get(number, 0.0), until)

    def excused(self, number: int) -> bool:
        """Whether a node may be taken for lost."""
        agent = self._job.agents.get(number)
        if agent is None or not agent.alive or agent.status.phase in (Phase.ENDING, Phase.ENDED):
            return True
        until = self._disturbed.get(number)
        return until is not None and self._job.world.now <= until + 3 * self._job.settings.lease + _RECOVERY
