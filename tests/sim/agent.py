"""A node's process: the production policy and handler, a table of what its steps do here, and made-up workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.agent.confirmation import Confirmation
from rallypoint.agent.policy import Phase, PolicyState, begin, decide
from rallypoint.agent.steps import (
    CheckNode,
    DrainArrived,
    End,
    Event,
    FailNode,
    ForwardSignal,
    KillWorkers,
    LogLine,
    NodeChecked,
    PostNotice,
    PostStopNotice,
    RequestJoin,
    SetTimer,
    SignalArrived,
    StartWorkers,
    Step,
    StopHeld,
    StopWorkers,
    TimerFired,
    WithdrawNotice,
    WorkersFailed,
    WorkersReady,
    WorkersStopped,
    WorkersSucceeded,
)
from rallypoint.agent.steps import Timer as AgentTimer
from rallypoint.base.clock import Deadline
from rallypoint.control.election.leader_resolver import LeaderResolver
from rallypoint.control.membership.state import (
    Drain,
    Fail,
    NodeId,
    NodeInfo,
    Outcome,
    Preempt,
    PreemptJob,
    Settings,
    Succeed,
)
from rallypoint.control.protocol.handshake import PROTOCOL_VERSION, Hello
from rallypoint.control.protocol.messages import (
    CollectedPart,
    CollectionEnded,
    CollectRequested,
    Deliver,
    DrainRequested,
    HangFound,
    HangReport,
    JobEnded,
    JoinRefused,
    LeaveRequest,
    Link,
    LinkLost,
    NodeReport,
    Placed,
    Placement,
    ProgressRequest,
    ReportRequested,
    RoundEnded,
)
from rallypoint.failures.cause import Cause, Ending
from rallypoint.features.hangs.rules import HangRules, OnHang
from rallypoint.features.preemption.rules import RULES, PreemptionRequested, RequeueJob
from rallypoint.rendezvous.elastic import ControlPlane, ElasticHandler
from tests.sim.election import SimCandidate
from tests.sim.hangs import SimSigns
from tests.sim.link import SimLink
from tests.sim.scenario import NodePlan
from tests.sim.server import Server, SimLocalSession
from tests.sim.stores import Stores
from tests.sim.workers import Exit, SimWorkers
from tests.sim.world import Process, Timer, Violation

if TYPE_CHECKING:
    from tests.sim.job import Job


_CHECKS_THAT_FAIL = 0.15
_RULES = (RULES, HangRules(1.0, OnHang.REPORT).rules())
"""Those of the features that all agents here have."""
"""The share of checks of a node that fail before the calm."""


class SimOutcome(Enum):
    """How an agent ended."""

    SUCCEEDED = auto()
    FAILED = auto()
    STOPPED = auto()
    PREEMPTED = auto()
    GAVE_UP = auto()
    DEPARTED = auto()
    KILLED = auto()


class _PendingNotice(NamedTuple):
    """What the workers are asked, and the timer of their answer."""

    timer: Timer
    over: Timer


class _SimControlPlane(ControlPlane):
    """Opens its link as an agent of the simulator does."""

    def __init__(self, settings: Settings, open_link: Callable[[Deliver, Deadline], Link]) -> None:
        super().__init__(settings)
        self._open_link = open_link

    def open(self, deliver: Deliver, deadline: Deadline) -> Link:
        """Make the link."""
        return self._open_link(deliver, deadline)


class Agent:
    """One agent from its start to its end."""

    def __init__(self, job: Job, plan: NodePlan) -> None:
        self.job = job
        self.plan = plan
        self.number = plan.number
        self.process = Process(job.world, f"node {plan.number}", job.scenario.stream(f"agent {plan.number}"))
        self.wall_skew = self.process.rng.uniform(-0.2, 0.2)
        checks = job.scenario.check > 0
        self.status = PolicyState(notice_timeout=job.settings.notice_timeout, checks_node=checks)
        self.fate: SimOutcome | None = None
        self.workers = SimWorkers(
            job.world,
            job.scenario.stream(f"worker group {plan.number}"),
            job.scenario.temper,
            job.scenario.grace,
            job.scenario.calm,
            job.yard,
            plan,
        )
        self.signs = SimSigns(self)
        self.workers.on_exit = lambda: self.process.hears(self._look_at_workers)
        self.server: Server | None = None
        self.candidate: SimCandidate | None = None
        """Its standing in etcd, where there is one."""
        self.link: SimLink | SimLocalSession | None = None
        self._mail: deque[Event] = deque()
        self._busy = False
        self._stop: Timer | None = None
        self.restarts_workers = False
        """What was said last, at a join or a failure, of the workers of the round before."""
        self._start: Timer | None = None
        """The start of workers that waits until those of the round before have been ended."""
        self._held: StartWorkers | None = None
        """The start that waits until the coordinator has confirmed the round."""
        self._check: Timer | None = None
        self._is_checked = not checks
        """Whether this node may join, as far as the user's check of it goes."""
        self._told: Exit | None = None
        self._notice: _PendingNotice | None = None
        self._acknowledged = False
        """Whether the workers have acknowledged a notice."""
        self._timers: dict[AgentTimer, Timer] = {}
        self.place: Placement | None = None
        """The newest that it has heard of; a newer one may wait in its mail."""
        self._is_delegate = False
        self.joined_at = 0.0
        self._ask_every = 2.0
        self._asking: Timer | None = None
        self.stores = Stores(job.world, plan.number)
        control = _SimControlPlane(job.settings, self._open_link)
        self.handler = ElasticHandler("sim", control, self.stores, self.process.monotonic, self.wall_clock)
        self._confirmation = Confirmation(self.handler, self.process)
        self.handler.listen(self._post)
        job.world.note(self.process, "starts")
        self.status, steps = begin(self.status)
        for step in steps:
            self._do(step)

    @property
    def alive(self) -> bool:
        """Whether the agent has not come to its end."""
        return self.fate is None

    def wall_clock(self) -> float:
        """What this host believes the time to be; nothing may depend on it."""
        return max(0.0, self.job.world.now + self.wall_skew)  # nobody's time is before 1970

    @property
    def holds_start(self) -> bool:
        """Whether its workers wait until the coordinator has confirmed their round."""
        return self._held is not None

    @property
    def connected(self) -> bool:
        """Whether there is a session with a server that runs."""
        if isinstance(self.link, SimLink):
            return self.link.is_open
        return self.server is not None and self.server.alive

    # What happens to it

    def kill(self) -> None:
        """SIGKILL of the agent; its workers end very soon after."""
        if self.fate is None:
            self._end(SimOutcome.KILLED)
        self.process.kill()
        if isinstance(self.link, SimLink) and self.link.connection is not None:
            connection = self.link.connection
            if not self.job.network.silent(self.process):
                connection.close(0)
        self.job.world.after(self.process.rng.uniform(0.0, 1.0), self.workers.gone)

    def signal(self, number: int) -> None:
        """A signal for the agent."""
        self.process.hears(self._post, SignalArrived(number))

    def preempt(self, seconds: float) -> None:
        """The node is told that the whole job will be taken away."""
        self._post(PreemptionRequested(seconds, "received SIGUSR2"))

    def close_job(self) -> None:
        """Somebody asks for the end of the job here."""
        self.process.hears(self.handler.set_closed)

    # The loop

    def _post(self, event: Event) -> None:
        if self.fate is not None:
            return
        if isinstance(event, Placed):
            self.job.audit.placed(self, event.placement, self._source())
        elif isinstance(event, JobEnded):
            self._is_delegate = event.is_delegate
            self.job.audit.told_verdict(self, event.verdict, self._source())
        elif isinstance(event, HangFound | HangReport):
            self.job.hangs.hears(self, event)
        self._mail.append(event)
        if not self._busy:
            self._busy = True
            # The loop's thread posts, the agent's thread wakes up a little later.
            self.process.later(0.0, self._wake)

    def _source(self) -> int:
        if isinstance(self.link, SimLink):
            return self.link.source
        return self.server.number if self.server is not None else -1

    def _wake(self) -> None:
        self._busy = False
        while self._mail and self.fate is None:
            self._take(self._mail.popleft())
        self._look_at_workers()

    def _take(self, event: Event) -> None:
        if isinstance(event, DrainRequested):
            event = DrainArrived(event.by, self.status.notice_timeout)
        self._confirmation.on_event(event)
        if isinstance(event, Placed):
            self.place = event.placement
        self._answer(event)
        before = self.status
        self.status, steps = decide(before, event, _RULES)
        if isinstance(event, RoundEnded) and event.end.cause is not None and event.end.cause.is_of(before.failure):
            self._is_checked = not before.checks_node
        self.job.world.note(self.process, "%s on %s: %s", before.phase.name, event, steps)
        self.job.audit.decided(self, before, event, steps, self._source())
        for step in steps:
            if self.fate is None:
                self._do(step)
        if self._held is not None and self.fate is None:
            self._start_if_confirmed(self._held)

    def _answer(self, event: Event) -> None:
        """What needs no decision."""
        match event:
            case ReportRequested():
                self.handler.send(NodeReport(self.status.round, (self.number,)))
            case CollectRequested():
                self.signs.collect(event)
            case CollectedPart() | CollectionEnded():
                self.signs.add(event)
            case _:
                pass

    def _do(self, step: Step) -> None:
        self._HOW[type(step)](self, step)

    def _look_at_workers(self) -> None:
        starts = self._start is not None or self._held is not None
        if self.fate is not None or starts or self.status.phase is not Phase.RUNNING:
            return
        ended = self.workers.exit
        if ended is None or ended is self._told:
            return
        self._told = ended
        limit = self.job.scenario.max_restarts
        failed = WorkersFailed(self._cause(ended), max_restarts=limit)
        self._take(WorkersSucceeded(self._acknowledged) if ended.succeeded else failed)

    def _cause(self, ended: Exit) -> Cause:
        # The failure's number is its pid: so everybody can be asked which failure he means.
        host = f"10.0.0.{self.number}"
        return Cause(0, 0, host, ended.failure, 1, f"failure {ended.failure}", "", self.wall_clock(), "")

    # Steps

    def _do_join(self, step: RequestJoin) -> None:
        if not self._is_checked:
            raise Violation("a place was requested before the node was checked", f"node {self.number}")
        self.joined_at = self.job.world.now
        self.restarts_workers = self.workers.restarted
        if step.keeps_place:
            self.joined_at = self.job.audit.joined_at[self.number]
            self.handler.keep_place()
        else:
            self._confirmation.requests_place()
            limit, restarted = self.job.scenario.max_restarts, self.workers.restarted
            member = NodeInfo(
                *("default", self.plan.size, "", 0, None, limit, "train.py"),
                restarts_workers=restarted,
                domain=self.plan.domain,
            )
            self.handler.join(member, keeps_place=not self.status.checks_node)
        self._ask_every = 2.0
        self._ask_again()

    def _ask_again(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        self._asking = self.process.later(self._ask_every, self._ask_progress)

    def _ask_progress(self) -> None:
        if self.status.phase is Phase.FORMING and self.fate is None:
            self.handler.send(ProgressRequest())
            self._ask_every = min(2 * self._ask_every, 60.0)
            self._ask_again()

    def _do_start(self, step: StartWorkers) -> None:
        if step.placement.restart_workers and self.workers.survivors:  # as the preparation of the round does
            self._start = self.process.later(self.process.rng.uniform(0.0, 0.2), self._start_anew, step)
        else:
            self._start_if_confirmed(step)

    def _start_anew(self, step: StartWorkers) -> None:
        self._start = None
        self.workers.gone()
        self._start_if_confirmed(step)

    def _start_if_confirmed(self, step: StartWorkers) -> None:
        self._held = step if self._confirmation.must_wait() else None
        if self._held is None:
            self._start_workers(step)

    def _start_workers(self, step: StartWorkers) -> None:
        self.job.audit.starts(self, step.placement, self._source())
        self._end_notice()
        self.handler.begin_round(step.placement)
        self._told, self._acknowledged = None, False
        self.workers.start(self.job.audit.names[self.number, step.placement.round])
        self.signs.begin(step.placement.round)
        if step.placement.group_rank == 0 and step.placement.restarts < self.job.scenario.max_restarts:
            self.handler.tell_next_store(step.placement.round)

    def _do_check(self, _step: CheckNode) -> None:
        rng = self.process.rng
        fails = self.job.world.now < self.job.scenario.calm and rng.random() < _CHECKS_THAT_FAIL
        self._check = self.process.later(rng.uniform(0.0, self.job.scenario.check), self._checked, fails)

    def _checked(self, fails: bool) -> None:
        self._check = None
        self._is_checked = not fails
        if fails:
            self.job.audit.disturb(self.number)
        self._post(NodeChecked("the check has failed" if fails else ""))

    def _do_stop(self, step: StopWorkers) -> None:
        self.signs.end()
        if self._check is not None:
            self._check.cancel()
            self._check = None
        if self._start is not None:
            self._start.cancel()
            self._start = None
        self._held = None
        self._confirmation.awaited = False
        self._releases = step.restarts and not step.ends_all and self.workers.resumable
        takes = self.workers.release_time() if self._releases else self.workers.stop_time()
        self._stop = self.process.later(takes, self._stopped, self._releases)

    def _stopped(self, released: bool) -> None:
        self._stop = None
        if released:
            self.workers.released()
        else:
            self.workers.gone()
        self._end_notice()
        waiting = bool(self.workers.survivors)
        self._post(WorkersStopped(ended_in_order=True, waiting=waiting, ended_with_0=not waiting))

    def _do_stop_held(self, _step: StopHeld) -> None:
        if self._stop is not None and self._releases:
            self._stop.cancel()
            self._releases = False
            self._stop = self.process.later(self.workers.stop_time(), self._stopped, False)

    def _do_kill(self, _step: KillWorkers) -> None:
        if self._stop is not None:
            self._stop.cancel()
            self._stop = self.process.later(0.01, self._stopped, False)

    def _do_send(self, step: Fail | Succeed | Drain | Preempt | LeaveRequest) -> None:
        if isinstance(step, Fail):
            self.restarts_workers = self.workers.restarted
            step = step._replace(restarts_workers=self.restarts_workers)
        self.handler.send(step)

    def _do_ask(self, step: PostNotice) -> None:
        self._end_notice()
        answers = self.process.rng.uniform(0.0, 2 * step.seconds)
        late = answers > step.seconds
        self._notice = _PendingNotice(
            self.process.later(min(answers, step.seconds), self._ready, WorkersReady(is_late=late)),
            self.process.later(step.seconds, self._post, TimerFired(AgentTimer.NOTICE)),
        )

    def _ready(self, event: WorkersReady) -> None:
        self._acknowledged = self._acknowledged or not event.is_late
        self._post(event)

    def _do_set_timer(self, step: SetTimer) -> None:
        if step.timer in self._timers:
            self._timers[step.timer].cancel()
        self._timers[step.timer] = self.process.later(step.seconds, self._post, TimerFired(step.timer))

    def _do_requeue(self, _step: RequeueJob) -> None:
        self.job.audit.requeues(self, self._is_delegate)

    def _end_notice(self) -> None:
        notice, self._notice = self._notice, None
        if notice is not None:
            notice.timer.cancel()
            notice.over.cancel()

    def _do_withdraw(self, _step: WithdrawNotice) -> None:
        self._end_notice()

    def _do_nothing(self, _step: Step) -> None:
        pass

    def _do_end(self, step: End) -> None:
        match step.event:
            case JobEnded(verdict=verdict):
                self._shut(SimOutcome.PREEMPTED if verdict.ending is Ending.PREEMPTED else _FATES[verdict.outcome])
            case JoinRefused() | LinkLost():
                self._shut(SimOutcome.GAVE_UP)
            case _:
                self._shut(SimOutcome.DEPARTED)

    _HOW: dict[type, Callable[..., None]] = {  # noqa: RUF012 - a table, never changed
        RequestJoin: _do_join,
        StartWorkers: _do_start,
        CheckNode: _do_check,
        StopWorkers: _do_stop,
        StopHeld: _do_stop_held,
        KillWorkers: _do_kill,
        Fail: _do_send,
        Succeed: _do_send,
        Drain: _do_send,
        Preempt: _do_send,
        PreemptJob: _do_send,
        RequeueJob: _do_requeue,
        LeaveRequest: _do_send,
        PostNotice: _do_ask,
        WithdrawNotice: _do_withdraw,
        PostStopNotice: _do_nothing,
        ForwardSignal: _do_nothing,
        SetTimer: _do_set_timer,
        LogLine: _do_nothing,
        FailNode: _do_nothing,
        End: _do_end,
    }

    # The end

    def _end(self, fate: SimOutcome) -> None:
        self.fate = fate
        self.job.world.note(self.process, "ends: %s", fate.name)
        self.job.audit.agent_ended(self)

    def _shut(self, fate: SimOutcome) -> None:
        """The last step is taken: let go of everything, as `agent.loop` and the handler's `shutdown` do."""
        self._end(fate)
        self._end_notice()
        self.workers.gone()
        if self.link is not None:
            self.link.close()
        self.stores.close()
        if self.candidate is not None:
            self.candidate.close(self._exit)
        elif self.server is not None and self.server.alive:
            self.server.finish(self._exit)
        else:
            self._exit()

    def _exit(self) -> None:
        self.process.kill()

    # The control plane

    def _open_link(self, deliver: Deliver, _deadline: Deadline) -> Link:
        if self.plan.hosts and self.job.network.listener is None:
            self.server = self.job.new_server(self.process, self.pid)
            settings = self.job.settings
            hello = Hello(PROTOCOL_VERSION, settings.run_id, b"", self.address, self.own, False, settings)
            local = SimLocalSession(self.server, self.number, hello, deliver)
            self.link = local
            return local
        posted = None
        if self.job.etcd is not None:
            posted = LeaderResolver("the simulated etcd")
            self.candidate = SimCandidate(self.job, self.process, self.number, self.own, posted)
        self.link = SimLink(
            self.process,
            self.job.network,
            self.number,
            self.own,
            self.job.settings,
            self.job.scenario.stream(f"link {self.number}"),
            deliver,
            self._stand_in,
            posted,
        )
        return self.link

    def _stand_in(self) -> None:
        """An agent at the endpoint hosts what another one there hosted until it died."""
        if self.plan.hosts and self.server is None and self.job.network.listener is None:
            self.server = self.job.new_server(self.process, self.pid)

    @property
    def address(self) -> str:
        """This host's address."""
        return f"10.0.0.{self.number}"

    @property
    def host(self) -> str:
        """What people call this host."""
        return f"host-{self.number}"

    @property
    def own(self) -> NodeId:
        """Who it is."""
        return NodeId(self.address, self.pid, self.pid, self.host)

    @property
    def pid(self) -> int:
        """The agent's process id."""
        return 100 + self.number


_FATES = {
    Outcome.SUCCEEDED: SimOutcome.SUCCEEDED,
    Outcome.FAILED: SimOutcome.FAILED,
    Outcome.STOPPED: SimOutcome.STOPPED,
}
