"""The rendezvous for an agent with a loop of its own: it polls and waits, while ours is notified.

Such an agent replaces `_invoke_run` and calls `_initialize_workers`, `_monitor_workers`, `_restart_workers` and
`_exit_barrier` itself, as torch's own loop does. Laws:

1. The agent's thread is the only one here; it waits in `rendezvous` and `finish` and nowhere else.
2. Announce, then act: that a round is over for this node is reported before its workers are stopped.
3. When to start again is the agent's own affair: its failures are counted, and no restart is refused.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from contextlib import AbstractContextManager, ExitStack

from rallypoint.agent.signals import FORWARDED_SIGNALS, handled_signals
from rallypoint.agent.spec import RunResult, WorkerState
from rallypoint.agent.third_party import PollingRendezvousClient, wait_at_exit_barrier
from rallypoint.agent.waiting import Confirmation
from rallypoint.agent.workers import WorkerController
from rallypoint.base.clock import Deadline
from rallypoint.base.errors import SignalException
from rallypoint.base.log import get_logger
from rallypoint.base.signals import post_signals, signal_name
from rallypoint.failures.cause import NO_LIMIT
from rallypoint.health.check import ProgressProbe
from rallypoint.membership.operations import Drain, Fail, Succeed
from rallypoint.membership.state import NodeInfo
from rallypoint.protocol.errors import error_of
from rallypoint.protocol.messages import (
    ConfigDiffers,
    JobEnded,
    LinkDown,
    LinkLost,
    LinkUp,
    Notification,
    Placed,
    Placement,
    ProgressRequest,
    ProgressText,
    RoundEnded,
)
from rallypoint.rendezvous.waiting import incoming_notifications

log = get_logger(__name__)

_VERDICT_TIMEOUT = 5.0
"""Seconds until the report of this node's last failure has become the job's verdict."""


class OwnLoop:
    """The part in the rendezvous of an agent with these workers, from its first `rendezvous` on."""

    def __init__(self, workers: WorkerController) -> None:
        self._workers = workers
        self._rendezvous = workers.rendezvous
        self._inbox: queue.SimpleQueue[Notification] = queue.SimpleQueue()
        self._confirmation = Confirmation(workers.rendezvous)
        self._takes_part = False
        """Whether the agent takes part in the rendezvous through this."""
        self._round = -1
        self._has_place = False
        """Whether this node has a place in `_round` that it has not given up."""
        self._finished = False
        """Whether the others were notified that this node is done."""
        self._begun = False
        self._probe: ProgressProbe | None = None

    def begin(self, stack: ExitStack, health: AbstractContextManager[ProgressProbe | None]) -> None:
        """Do once what `run_agent` and our loop do for processes, until `stack` is closed."""
        if self._begun:
            return
        self._begun = True
        self._workers.prepare()
        stack.enter_context(post_signals(self._on_signal, handled_signals()))
        self._probe = stack.enter_context(health)

    def step(self) -> None:
        """Do what our loop does between events."""
        for source in [*self._workers.sources, *self._workers.preparations]:
            source.step()
        if self._probe is not None:
            self._probe.going_to_sleep(time.monotonic(), self._workers.look().status())

    def rendezvous(self) -> Placement:
        """Take part in the next round, and wait until it is complete.

        Raises:
            RendezvousError: there is no next round for this node; says why.
        """
        self._workers.group.join_requested_at = time.monotonic()
        if not self._takes_part:
            self._takes_part = True
            if isinstance(self._rendezvous, PollingRendezvousClient):
                self._rendezvous.polls_waiting_nodes = False
            self._rendezvous.listen(self._inbox.put)
        if self._has_place:
            self.end_round(None)
        self._join()
        incoming = incoming_notifications(self._inbox, lambda: self._rendezvous.send(ProgressRequest()))
        given: Placement | None = None
        while given is None or self._confirmation.holds():
            notification = next(incoming)
            self._confirmation.heard(notification)
            if isinstance(notification, Placed):
                given = notification.placement
                self._round, self._has_place = given.round, True
            elif given is not None and isinstance(notification, RoundEnded) and notification.end.round >= given.round:
                given, self._has_place = None, False
                self._join()
            else:
                self._handle(notification)
        return given

    def end_round(self, failed: RunResult | None) -> None:
        """Announce that this node starts again; an agent with a rendezvous of its own does so by itself.

        Args:
            failed: how its workers have failed; None if they have not.
        """
        if not self._takes_part:
            return
        self._has_place = False
        if failed is None:
            self._rendezvous.send(Drain(self._round, needs_consent=self._rendezvous.notice_timeout > 0))
        else:  # unlimited, since it has said that there is a restart left
            self._rendezvous.send(Fail(self._round, failed.first_cause(exitcode=1), NO_LIMIT))
            _settle(failed)

    def finish(self, timeout: float) -> None:
        """Report that all workers of this node have succeeded, and wait for the job's end.

        What happens instead does not turn success into failure; it is logged.

        Args:
            timeout: seconds to wait at most.
        """
        group = self._workers.group
        log.info("Local worker group finished (%s). Waiting for the other agents.", group.state.value)
        if not self._takes_part:
            wait_at_exit_barrier(group.store, group.group_world_size, timeout)
            return
        self._finished = True
        self._has_place = False
        self._rendezvous.send(Succeed(self._round))
        ending = self._wait_for_the_end(timeout)
        if ending is None:
            log.error("the other agents did not finish within %g s; this node's workers had all succeeded", timeout)
        elif isinstance(ending, LinkLost):
            log.warning("%s; this node's workers had all succeeded", ending.detail)
        elif isinstance(ending, RoundEnded):
            reason = ending.end.reason.value
            log.warning("the others start again without this node (%s); its workers had all succeeded", reason)

    def end_with(self, result: RunResult, timeout: float) -> None:
        """The agent's loop has returned: report how, if it has not."""
        if self._finished or not self._takes_part:
            return
        if result.state == WorkerState.SUCCEEDED:
            self.finish(timeout)
        elif result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._rendezvous.send(Fail(self._round, result.first_cause(exitcode=1), 0))
            _settle(result)
            self._wait_for_the_end(_VERDICT_TIMEOUT)

    # Inside

    def _on_signal(self, number: int) -> None:
        if number not in FORWARDED_SIGNALS:
            raise SignalException(f"Process {os.getpid()} got signal {signal_name(number)}", signal.Signals(number))
        self._workers.forward(number)

    def _join(self) -> None:
        self._confirmation.requests_place()
        spec = self._workers.group.spec
        member = NodeInfo(spec.role, spec.local_world_size, "", 0, None, spec.max_restarts, spec.get_program_name())
        self._rendezvous.join(member._replace(restarts_workers=True))

    def _handle(self, notification: Notification) -> None:
        """Act on a notification while waiting for a round."""
        error = error_of(notification)
        if error is not None:
            raise error
        match notification:
            case RoundEnded(end=end) if end.round > self._round:  # ours began and ended before we got our placement
                self._round = end.round
                self._join()
            case LinkUp(join_lost=True):
                self._join()
            case LinkDown(detail=detail):
                log.warning("%s", detail)
            case ConfigDiffers(differences=differences):
                for each in differences:
                    log.warning("%s; give all nodes of a job the same", each.sentence("this node"))
            case ProgressText(text=text, warning=is_warning):
                (log.warning if is_warning else log.info)("%s", text)
            case _:
                pass

    def _wait_for_the_end(self, timeout: float) -> JobEnded | RoundEnded | LinkLost | None:
        deadline = Deadline.after(timeout)
        while True:
            try:
                notification = self._inbox.get(timeout=max(0.0, deadline.remaining()))
            except queue.Empty:
                return None
            if isinstance(notification, (JobEnded, LinkLost)):
                return notification
            if isinstance(notification, RoundEnded) and notification.end.round >= self._round:
                return notification


def _settle(result: RunResult) -> None:
    """Find out what would have delayed the announcement of a failure."""
    for failure in result.failures.values():
        failure.settle()
