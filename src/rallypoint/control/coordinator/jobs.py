"""A control plane for many jobs, outside all of them (`rallyctl serve`): one dispatcher per job.

Laws:

1. When a new node names an unknown job, a dispatcher is created with the node's settings. When the job has ended and
   its last node has left, the id is free at once: the next new node starts a new job.
2. A returning node names the coordinator of its last session. If that coordinator ended the job, the node gets the
   verdict from a dispatcher that contains only the ended job's record. The node never starts the job again, and never
   joins a new job with the same id.
3. A job without a verdict and without sessions stays for a while, in case its nodes are only unreachable. If it has no
   node left, the next new node takes over its id, with new counts. Nodes that return later fill the new dispatcher with
   their state, as they would fill a restarted one.
4. Events in one job cost the others nothing: a dispatcher is checked only when something happens or is due in it.
5. The number of names is limited. If there are too many jobs, in total or started from one address, the job that has
   been without sessions for the longest time is dropped as under law 3. If all have sessions, a new node is refused. So
   nodes at one address can exclude only others at that address.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.log import get_logger
from rallypoint.control.coordinator.dispatcher import Dispatcher, JobRecord, RestoredState, Turns, do_nothing
from rallypoint.control.coordinator.notifications import JobHistory
from rallypoint.control.membership.state import Outcome, Settings, State
from rallypoint.control.protocol.handshake import HandshakeError, Hello

log = get_logger(__name__)


MAX_JOBS = 1024
"""Maximum number of jobs at a time, which limits the memory for names."""
MAX_JOBS_OF_ONE = MAX_JOBS // 4
"""Maximum number of jobs at a time from one address, or one IPv6 network (64 bits; a machine has many addresses)."""
_TICK = 0.05
"""Seconds after which a tick leaves the other due jobs to the next tick, to serve connections in between."""
_IDLE_JOB_KEPT = 60.0
"""Seconds until a job without nodes and without a verdict is dropped."""
_MOST_ENDED, _ENDED_KEPT = 4096, 86400.0
"""Maximum number of verdicts stored for nodes that were unreachable when the job ended, and for how many seconds."""
_EVENTS_KEPT, _FAILURES_KEPT, _TRACEBACK_KEPT = 20, 5, 4096
"""Numbers of events and failures stored for an ended job, newest first, and characters of its last traceback."""
_MOST_LISTED = 100
"""Maximum number of ended jobs in a list."""
_MOST_NAMES, _LONGEST_NAME = 8, 64
"""Maximum number of coordinator names stored per job, and characters per name."""


class _EndedJob(NamedTuple):
    """How a job ended; its `state` has no nodes."""

    settings: Settings
    state: State
    history: JobHistory
    until: float


class _Job:
    """A dispatcher, and when to check it. `names` are the incarnations by which its nodes know or knew it; `origin` is
    the address of the node that started it."""

    def __init__(self, dispatcher: Dispatcher, origin: str = "") -> None:
        self.dispatcher = dispatcher
        self.origin = origin
        self.incarnations = {dispatcher.incarnation}
        self.at = math.inf
        self.forgotten_at = math.inf
        self.is_counted = False
        """Whether its end is among `ManyJobs.ended_counts`."""


class ManyJobs:
    """The dispatchers of all jobs whose nodes have connected; all on the thread of the server's loop."""

    job = None
    is_awaited = False
    """See `Dispatcher.is_awaited`: the server never waits for its jobs."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self.remote_control = False
        """See `Dispatcher.remote_control`."""
        self._jobs: dict[str, _Job] = {}
        self._ended: OrderedDict[tuple[str, str], _EndedJob] = OrderedDict()
        self._schedule: list[tuple[float, int, _Job]] = []
        """A heap. Entries that differ from the job's current `at` are ignored."""
        self._ended_counts = dict.fromkeys(Outcome, 0)
        self._numbers = itertools.count()
        self._last_wake_at = math.inf
        """The last result of `wake_at`."""
        self.turns = Turns()
        """The turns of all its dispatchers."""
        self.on_change: Callable[[], None] = do_nothing
        """Called at the end of each step of a job: see `Dispatcher.on_change`."""

    def dispatcher_for(self, hello: Hello, peer: str) -> Dispatcher:
        """Return the dispatcher of the node's job, and create it if needed.

        Args:
            hello: the greeting of the node.
            peer: the address that its connection comes from.

        Raises:
            HandshakeError: there are too many jobs, this one started with another kind of rendezvous, or the node's
                request is impossible.
        """
        _check(hello.settings)
        ended = self._verdict_for(hello)
        if ended is not None:
            return self._verdict_dispatcher(hello.incarnation, ended)
        job = self._job_for(hello) or self._begin(hello, _origin(peer))
        if job.dispatcher.settings.fixed_ranks != hello.settings.fixed_ranks:
            raise HandshakeError(
                f"job {hello.job!r} has both static and other nodes; use the same --rdzv-backend on all nodes"
            )
        if 0 < len(hello.incarnation) <= _LONGEST_NAME and len(job.incarnations) < _MOST_NAMES:
            job.incarnations.add(hello.incarnation)
        return job.dispatcher

    def find(self, job: str) -> Dispatcher | None:
        """Return the dispatcher of a job, even of an ended one; with an empty `job`, that of the only job."""
        if not job and len(self._jobs) == 1:
            return next(iter(self._jobs.values())).dispatcher
        if job in self._jobs:
            return self._jobs[job].dispatcher
        ended = [(incarnation, ended_job) for (name, incarnation), ended_job in self._ended.items() if name == job]
        return self._verdict_dispatcher(*ended[-1]) if ended else None

    def records(self) -> tuple[list[JobRecord], list[JobRecord]]:
        """All jobs, and those that ended most recently."""
        now = self.now()
        ended = {
            id(ended_job.history): JobRecord(ended_job.state, ended_job.settings, ended_job.history)
            for ended_job in reversed(self._ended.values())
            if ended_job.until > now
        }
        return [job.dispatcher.record() for job in self._jobs.values()], list(ended.values())[:_MOST_LISTED]

    @property
    def ended_counts(self) -> dict[Outcome, int]:
        """Number of ended jobs by outcome. It only grows, so an occasional reader misses none."""
        return dict(self._ended_counts)

    @property
    def names(self) -> frozenset[str]:
        """Ids of its jobs, read-only."""
        return frozenset(self._jobs)

    def now(self) -> float:
        """The present time on the clock of `wake_at`, in seconds."""
        return self._clock.monotonic()

    def wake_at(self) -> float:
        """When to call `tick` next; infinity for never."""
        self._last_wake_at = self._next_due()
        return self._last_wake_at

    def tick(self) -> None:
        now = self._clock.monotonic()
        due: deque[_Job] = deque()
        while self._next_due() <= now:
            job = heapq.heappop(self._schedule)[2]
            job.at = math.inf
            due.append(job)
        while due and self._clock.monotonic() <= now + _TICK:
            due.popleft().dispatcher.tick()
        for job in due:
            self._reschedule(job)

    # One job

    def _job_for(self, hello: Hello) -> _Job | None:
        """Return the job that a node requests, unless it ended for this node."""
        job = self._jobs.get(hello.job)
        if job is None:
            return None
        is_new = hello.incarnation not in job.incarnations
        if (is_new and _is_over(job.dispatcher)) or self._clock.monotonic() >= job.forgotten_at:
            self._forget(hello.job, job)
            return None
        return job

    def _begin(self, hello: Hello, origin: str) -> _Job:
        self._make_room(self._jobs, MAX_JOBS, "this control plane has")
        of_one = {name: job for name, job in self._jobs.items() if job.origin == origin}
        self._make_room(of_one, MAX_JOBS_OF_ONE, f"nodes at {origin} have started")
        dispatcher = Dispatcher(
            hello.settings._replace(run_id=hello.job),
            self._clock,
            learns_settings=True,
            turns=self.turns,
        )
        job = self._jobs[hello.job] = self._on_change_of(dispatcher, origin)
        job.forgotten_at = self._clock.monotonic() + _IDLE_JOB_KEPT
        self._reschedule(job)
        log.info("the first node of job %r has joined", hello.job)
        return job

    def _make_room(self, jobs: Mapping[str, _Job], most: int, who: str) -> None:
        if len(jobs) < most:
            return
        name = min(jobs, key=lambda name: jobs[name].forgotten_at)
        if jobs[name].forgotten_at == math.inf:
            raise HandshakeError(
                f"{who} {most} jobs that are still running; end some of them, or start another control plane"
            )
        self._forget(name, jobs[name])

    def _on_change_of(self, dispatcher: Dispatcher, origin: str = "") -> _Job:
        dispatcher.remote_control = self.remote_control
        job = _Job(dispatcher, origin)
        dispatcher.on_change = partial(self._check_job, job)
        return job

    def _check_job(self, job: _Job) -> None:
        """Drop a job that ended, or schedule its next check."""
        name = job.dispatcher.settings.run_id
        if self._jobs.get(name) is job:
            self._count_end(job)
            self._check_ended(name, job)
        self._reschedule(job)
        sooner = self._next_due() < self._last_wake_at
        if sooner:
            self.on_change()

    def _check_ended(self, name: str, job: _Job) -> None:
        now = self._clock.monotonic()
        if job.dispatcher.members:
            job.forgotten_at = math.inf
        elif job.forgotten_at == math.inf:
            job.forgotten_at = now + _IDLE_JOB_KEPT
        ended = job.dispatcher.state.verdict is not None and not job.dispatcher.members
        if ended or now >= job.forgotten_at:
            self._forget(name, job)

    def _count_end(self, job: _Job) -> None:
        verdict = job.dispatcher.state.verdict
        if verdict is not None and not job.is_counted:
            job.is_counted = True
            self._ended_counts[verdict.outcome] += 1

    def _forget(self, name: str, job: _Job) -> None:
        """Free the id. The dispatcher continues to serve its remaining sessions."""
        del self._jobs[name]
        self._count_end(job)
        job.forgotten_at = math.inf
        state = job.dispatcher.state
        verdict = state.verdict
        log.info("the record of job %r was deleted", name)
        if verdict is None:
            return
        if verdict.cause is not None:
            log.warning("job %r failed: %s; restarts used: %s", name, verdict.cause.headline, verdict.restarts)
        ended = _EndedJob(
            job.dispatcher.settings,
            State(
                closed=True, verdict=verdict, round=state.round, ledger=state.ledger, max_restarts=state.max_restarts
            ),
            _shortened_history(job.dispatcher.history),
            self._clock.monotonic() + _ENDED_KEPT,
        )
        for incarnation in job.incarnations:
            self._ended[name, incarnation] = ended
        while len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)

    def _verdict_for(self, hello: Hello) -> _EndedJob | None:
        now = self._clock.monotonic()
        while self._ended and next(iter(self._ended.values())).until <= now:
            self._ended.popitem(last=False)
        return self._ended.get((hello.job, hello.incarnation))

    def _verdict_dispatcher(self, incarnation: str, ended: _EndedJob) -> Dispatcher:
        """Create a dispatcher for a node that returns after the end, or for a query about how the job ended."""
        restored = RestoredState(incarnation, ended.state, _shortened_history(ended.history))
        dispatcher = Dispatcher(ended.settings, self._clock, restored=restored, turns=self.turns)
        return self._on_change_of(dispatcher).dispatcher

    # Schedule

    def _reschedule(self, job: _Job) -> None:
        at = min(job.dispatcher.wake_at(), job.forgotten_at)
        if at == job.at:
            return
        job.at = at
        if at < math.inf:
            heapq.heappush(self._schedule, (at, next(self._numbers), job))
        if len(self._schedule) > 4 * MAX_JOBS:
            self._schedule = list({id(entry[2]): entry for entry in self._schedule if entry[0] == entry[2].at}.values())
            heapq.heapify(self._schedule)

    def _next_due(self) -> float:
        while self._schedule and self._schedule[0][0] != self._schedule[0][2].at:
            heapq.heappop(self._schedule)
        return self._schedule[0][0] if self._schedule else math.inf


ServedJobs = Dispatcher | ManyJobs
"""What a server serves: one job or many. Nodes, watchers and pages look up their job's dispatcher in it."""


def _is_over(dispatcher: Dispatcher) -> bool:
    """Whether a new node may use the job's id: the job has no sessions, and ended or has no nodes."""
    state = dispatcher.state
    known = state.participants or state.wait_list or state.redundancy_list or state.survivors
    return not dispatcher.members and (state.verdict is not None or not known)


def _shortened_history(history: JobHistory) -> JobHistory:
    """A copy for an ended job, with only the newest entries and the end of the last traceback."""
    shortened = JobHistory()
    shortened.events.extend(list(history.events)[-_EVENTS_KEPT:])
    for at, round_, node, cause, detail in list(history.failures)[-_FAILURES_KEPT:]:
        shortened.failures.append((at, round_, node, cause and cause._replace(traceback=""), detail))
    if history.failures and (last := history.failures[-1][3]) is not None:
        cause = last._replace(traceback=last.traceback[-_TRACEBACK_KEPT:])
        shortened.failures[-1] = (*shortened.failures[-1][:3], cause, shortened.failures[-1][4])
    shortened.phase_since, shortened.began, shortened.known = history.phase_since, history.began, history.known
    return shortened


def _origin(peer: str) -> str:
    """The part of an address that counts as the origin of jobs."""
    if ":" not in peer:
        return peer
    from ipaddress import IPv6Address, IPv6Network

    try:
        return str(IPv6Network((int(IPv6Address(peer)) >> 64 << 64, 64)))
    except ValueError:  # it might have a scope id
        return peer


def _check(settings: Settings) -> None:
    if settings.min_nodes > settings.max_nodes:
        raise HandshakeError(
            f"this node requests {settings.min_nodes} to {settings.max_nodes} nodes; check its --nnodes"
        )
