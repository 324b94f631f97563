"""The agent's loop: everything that happens becomes one event, and the policy says what to do about it.

One thread waits for mail (notices of the rendezvous, signals) and for exits of workers, and does nothing else between
events. What the steps mean for workers is handed in as a `Crew`.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from signal import SIGTERM

from rallypoint.agent.membership import Membership
from rallypoint.agent.policy import (
    AnnounceFailure,
    AnnounceSuccess,
    Depart,
    Drain,
    End,
    Event,
    Finish,
    GiveUp,
    Join,
    Phase,
    SignalArrived,
    Start,
    Status,
    Step,
    Stop,
    Tell,
    WorkersFailed,
    WorkersSucceeded,
    decide,
)
from rallypoint.agent.spec import RunResult, WorkerGroup, WorkerState
from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.errors import SignalException
from rallypoint.base.log import get_logger
from rallypoint.base.mailbox import Mailbox
from rallypoint.base.signals import signal_name, signals_to
from rallypoint.failures.cause import Cause
from rallypoint.rendezvous.elastic import error_of
from rallypoint.rendezvous.errors import RendezvousClosedError
from rallypoint.rendezvous.messages import Placement
from rallypoint.rendezvous.state import Outcome

log = get_logger(__name__)

_PROGRESS_FIRST, _PROGRESS_MOST = 2.0, 60.0
"""Seconds until the first line that says whom the rendezvous waits for, and at most between later ones. An interval is
twice the one before: a spare that is parked for days must not fill the log."""


@dataclass(frozen=True)
class Crew:
    """The workers of this node, as the loop sees them. No call waits for other nodes.

    `start` takes up a placement and starts them; `restart` stops them so that they can be started again; `stop` stops
    them for good, `shutdown` too, with a signal that the agent itself was sent; `look` tells how they are; `exit_fds`
    become readable when one ends (None: they must be asked); `finished` is called once all have succeeded; `stopped`
    gives the global ranks of those that were sent a signal to stop while they ran.
    """

    group: WorkerGroup
    start: Callable[[Placement], None]
    restart: Callable[[], None]
    stop: Callable[[], None]
    shutdown: Callable[[int], None]
    look: Callable[[], RunResult]
    exit_fds: Callable[[], list[int] | None]
    finished: Callable[[], None]
    stopped: Callable[[], tuple[int, ...]]


class AgentLoop:
    """One run of an agent, from the first join to the end of the job."""

    def __init__(self, crew: Crew, membership: Membership, clock: Clock = SYSTEM_CLOCK) -> None:
        self._crew = crew
        self._membership = membership
        self._clock = clock
        self._mailbox: Mailbox[Event] = Mailbox()
        self._status = Status()
        self._last: RunResult | None = None
        self._result: RunResult | None = None
        self._ask_at = 0.0
        self._ask_every = _PROGRESS_FIRST
        self._finished_at = 0.0

    def run(self, signals: Iterable[int]) -> RunResult:
        """Run until the job ends.

        Args:
            signals: the numbers of the signals that ask this agent to end.

        Raises:
            RendezvousError: no round could be agreed on.
            SignalException: one of `signals` came.
        """
        try:
            # The handlers stay until the workers are gone: a second signal must not end us in the middle of that.
            with signals_to(lambda number: self._mailbox.post(SignalArrived(number)), signals):
                try:
                    return self._until_the_end()
                finally:
                    self._crew.shutdown(SIGTERM)
        finally:
            self._membership.listen(None)
            self._mailbox.close()

    def _until_the_end(self) -> RunResult:
        self._membership.listen(self._mailbox.post)
        self._do(Join())
        while self._result is None:
            for event in self._events():
                self._status, steps = decide(self._status, event)
                for step in steps:
                    self._do(step)
        return self._result

    # Events

    def _events(self) -> Iterator[Event]:
        """Wait until something has happened, and give it out one by one."""
        fds = self._crew.exit_fds() if self._status.phase is Phase.RUNNING else []
        self._wait(fds or [], self._timeout(asks=fds is None))
        yield from self._mailbox.drain()
        if self._status.phase is Phase.RUNNING:
            yield from self._look_at_workers()
        elif self._status.phase is Phase.FORMING and self._clock.monotonic() >= self._ask_at:
            self._ask_every = min(2 * self._ask_every, _PROGRESS_MOST)
            self._ask_at = self._clock.monotonic() + self._ask_every
            self._membership.ask_progress()

    def _wait(self, exit_fds: list[int], timeout: float | None) -> None:
        poller = select.poll()
        for fd in (self._mailbox.fileno(), *exit_fds):
            poller.register(fd, select.POLLIN)
        poller.poll(None if timeout is None else timeout * 1000 + 1)

    def _timeout(self, *, asks: bool) -> float | None:
        """Seconds until there is something to do by itself; None if only an event can bring something."""
        if self._status.phase is Phase.FORMING:
            return max(0.0, self._ask_at - self._clock.monotonic())
        if self._status.phase is Phase.RUNNING and asks:
            return self._crew.group.spec.monitor_interval
        return None

    def _look_at_workers(self) -> Iterator[Event]:
        group = self._crew.group
        result = self._crew.look()
        group.state = result.state
        match result.state:
            case WorkerState.SUCCEEDED:
                self._last = result
                yield WorkersSucceeded()
            case WorkerState.FAILED | WorkerState.UNHEALTHY:
                self._last = result
                yield WorkersFailed(self._first_cause(result))
            case WorkerState.HEALTHY:
                pass
            case lost:
                raise RuntimeError(f"[{group.spec.role}] the worker group is in state {lost}; the agent has lost track")

    def _first_cause(self, result: RunResult) -> Cause:
        host = socket.gethostname()  # not getfqdn: a name server that is away must not hold up the news
        if not result.failures:
            return Cause(-1, -1, host, os.getpid(), 0, f"worker group {result.state}", "", time.time(), "")
        rank, failure = min(result.failures.items(), key=lambda entry: entry[1].moment)
        program = self._crew.group.spec.get_entrypoint_name()
        log.error(
            "failed (exitcode: %d) local_rank: %d (pid: %d) of binary: %s",
            failure.exitcode,
            failure.local_rank,
            failure.pid,
            program,
        )
        return Cause.of(failure, rank, host)

    # Steps

    def _do(self, step: Step) -> None:
        self._HOW[type(step)](self, step)

    def _do_join(self, _step: Join) -> None:
        spec = self._crew.group.spec
        self._ask_every = _PROGRESS_FIRST
        self._ask_at = self._clock.monotonic() + self._ask_every
        log.info("[%s] Rendezvous'ing worker group", spec.role)
        self._membership.join(spec.role, spec.local_world_size)

    def _do_start(self, step: Start) -> None:
        self._last = None
        self._crew.start(step.placement)

    def _do_stop(self, _step: Stop) -> None:
        self._crew.restart()

    def _do_announce_failure(self, step: AnnounceFailure) -> None:
        spec = self._crew.group.spec
        log.info("[%s] Worker group %s; telling the other agents", spec.role, WorkerState.FAILED)
        self._membership.report_failure(self._status.round, step.cause, spec.max_restarts)

    def _do_announce_success(self, _step: AnnounceSuccess) -> None:
        self._finished_at = self._clock.monotonic()
        self._crew.finished()

    def _do_drain(self, step: Drain) -> None:
        log.info(
            "[%s] Detected %d new nodes from group_rank=%s; will restart worker group",
            self._crew.group.spec.role,
            step.waiting,
            self._crew.group.group_rank,
        )
        self._membership.drain(self._status.round)

    def _do_tell(self, step: Tell) -> None:
        (log.warning if step.loud else log.info)("[%s] %s", self._crew.group.spec.role, step.text)

    def _do_end(self, step: End) -> None:
        verdict, group = step.verdict.verdict, self._crew.group
        last = self._last or RunResult(group.state)
        if verdict.outcome is Outcome.SUCCEEDED:
            self._succeed(last)
        elif verdict.outcome is Outcome.FAILED:
            self._crew.stop()
            group.state = WorkerState.FAILED
            self._result = RunResult(WorkerState.FAILED, {}, last.failures, verdict.cause, self._crew.stopped())
        else:
            self._crew.stop()
            raise RendezvousClosedError("the job was ended on request before its workers had finished")

    def _do_give_up(self, step: GiveUp) -> None:
        self._crew.stop()
        error = error_of(step.notice)
        assert error is not None
        raise error

    def _do_depart(self, step: Depart) -> None:
        name = signal_name(step.signal)
        log.warning("Received %s; ending the workers and leaving the job", name)
        self._membership.leave()
        self._crew.shutdown(step.signal)
        raise SignalException(f"Process {os.getpid()} got signal {name}", step.signal)

    def _do_finish(self, _step: Finish) -> None:
        self._succeed(self._last or RunResult(WorkerState.SUCCEEDED))

    def _succeed(self, last: RunResult) -> None:
        log.info("Done waiting for other agents. Elapsed: %.3f seconds", self._clock.monotonic() - self._finished_at)
        self._crew.stop()
        self._crew.group.state = WorkerState.SUCCEEDED
        self._result = RunResult(WorkerState.SUCCEEDED, last.return_values)

    _HOW: dict[type, Callable[..., None]] = {  # noqa: RUF012 - a table, never changed
        Join: _do_join,
        Start: _do_start,
        Stop: _do_stop,
        AnnounceFailure: _do_announce_failure,
        AnnounceSuccess: _do_announce_success,
        Drain: _do_drain,
        Tell: _do_tell,
        End: _do_end,
        GiveUp: _do_give_up,
        Depart: _do_depart,
        Finish: _do_finish,
    }
