"""What an agent with a loop of its own needs of the rendezvous: one that asks and waits, where ours is told.

Such an agent replaces `_invoke_run` and calls `_initialize_workers`, `_monitor_workers`, `_restart_workers` and
`_exit_barrier` itself, as torch's own loop does. Laws:

1. The agent's thread is the only one here; it waits in `meet` and `finish` and nowhere else.
2. Announce, then act: that a round is over for this node is said before its workers are stopped.
3. When to start again is the agent's own affair: its failures are counted for all to see, and refused by nobody.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from contextlib import AbstractContextManager, ExitStack

from rallypoint.agent.controller import WorkerController
from rallypoint.agent.polling_client import PollingRendezvousClient
from rallypoint.agent.rank_exchange import wait_at_exit_barrier
from rallypoint.agent.signal_set import FORWARDED_SIGNALS, handled_signals
from rallypoint.agent.spec import RunResult, WorkerState
from rallypoint.base.clock import Deadline
from rallypoint.base.errors import SignalException
from rallypoint.base.log import get_logger
from rallypoint.base.signals import post_signals, signal_name
from rallypoint.failures.cause import NO_LIMIT
from rallypoint.health.progress_probe import ProgressProbe
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
    ProgressText,
    RoundEnded,
)
from rallypoint.rendezvous.waiting import incoming_notifications

log = get_logger(__name__)

_VERDICT = 5.0
"""Seconds that the word of this node's last failure may take to become the job's verdict."""


class OwnLoop:
    """The part in the rendezvous of an agent with these workers, from its first `meet` on."""

    def __init__(self, workers: WorkerController) -> None:
        self._workers = workers
        self._membership = workers.membership
        self._inbox: queue.SimpleQueue[Notification] = queue.SimpleQueue()
        self._asks = False
        """Whether the agent leaves it to us to meet the others."""
        self._round = -1
        self._holds = False
        """Whether this node has a place in `_round` that it has not given up."""
        self._finished = False
        """Whether the others have been told that this node is done."""
        self._begun = False
        self._pulse: ProgressProbe | None = None

    def begin(self, stack: ExitStack, health: AbstractContextManager[ProgressProbe | None]) -> None:
        """Do once what `Agent.run_loop` and our loop do for processes, until `stack` is closed."""
        if self._begun:
            return
        self._begun = True
        self._workers.prepare()
        stack.enter_context(post_signals(self._on_signal, handled_signals()))
        self._pulse = stack.enter_context(health)

    def step(self) -> None:
        """Do what our loop does between events."""
        for monitor in self._workers.monitors():
            monitor.step()
        if self._pulse is not None:
            self._pulse.going_to_sleep(time.monotonic(), self._workers.status())

    def meet(self) -> Placement:
        """Take part in the next round, and wait until it is complete.

        Raises:
            RendezvousError: there is no next round for this node; says why.
        """
        self._workers.group.join_requested_at = time.monotonic()
        if not self._asks:
            self._asks = True
            if isinstance(self._membership, PollingRendezvousClient):
                self._membership.polls_waiting_nodes = False
            self._membership.listen(self._inbox.put)
        if self._holds:
            self.end_round(None)
        self._join()
        coming = incoming_notifications(self._inbox, self._membership.ask_progress)
        while True:
            notice = next(coming)
            if isinstance(notice, Placed):
                self._round, self._holds = notice.placement.round, True
                return notice.placement
            self._heed(notice)

    def end_round(self, failed: RunResult | None) -> None:
        """Tell the others that this node starts again; an agent that meets them by itself does so by itself.

        Args:
            failed: how its workers have failed; None if they have not.
        """
        if not self._asks:
            return
        self._holds = False
        if failed is None:
            self._membership.drain(self._round)
        else:  # unlimited, since it has said that there is a restart left
            self._membership.report_failure(self._round, failed.first_cause(exitcode=1), NO_LIMIT)

    def finish(self, timeout: float) -> None:
        """Tell the others that all workers of this node have succeeded, and wait for the job's end.

        What comes instead does not turn success into failure; it is logged.

        Args:
            timeout: seconds to wait at most.
        """
        group = self._workers.group
        log.info("Local worker group finished (%s). Waiting for the other agents.", group.state.value)
        if not self._asks:
            wait_at_exit_barrier(group.store, group.group_world_size, timeout)
            return
        self._finished = True
        self._holds = False
        self._membership.report_success(self._round)
        ending = self._wait_for_the_end(timeout)
        if ending is None:
            log.error("the other agents did not come in %g s; this node's workers had all succeeded", timeout)
        elif isinstance(ending, LinkLost):
            log.warning("%s; this node's workers had all succeeded", ending.detail)
        elif isinstance(ending, RoundEnded):
            reason = ending.end.reason.value
            log.warning("the others start again without this node (%s); its workers had all succeeded", reason)

    def end_with(self, result: RunResult, timeout: float) -> None:
        """The agent's loop has returned: tell the others how, if it has not."""
        if self._finished or not self._asks:
            return
        if result.state == WorkerState.SUCCEEDED:
            self.finish(timeout)
        elif result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._membership.report_failure(self._round, result.first_cause(exitcode=1), 0)
            self._wait_for_the_end(_VERDICT)

    # Inside

    def _on_signal(self, number: int) -> None:
        if number not in FORWARDED_SIGNALS:
            raise SignalException(f"Process {os.getpid()} got signal {signal_name(number)}", signal.Signals(number))
        self._workers.forward(number)

    def _join(self) -> None:
        spec = self._workers.group.spec
        self._membership.join(spec.role, spec.local_world_size, spec.max_restarts, spec.get_program_name())

    def _heed(self, notice: Notification) -> None:
        """Do what a notice means to somebody who waits for a round."""
        error = error_of(notice)
        if error is not None:
            raise error
        match notice:
            case RoundEnded(end=end) if end.round > self._round:  # ours came and went before we heard of our place
                self._round = end.round
                self._join()
            case LinkUp(join_lost=True):
                self._join()
            case LinkDown(detail=detail):
                log.warning("%s", detail)
            case ConfigDiffers(differences=differences):
                for each in differences:
                    log.warning("%s; give all nodes of a job the same", each.sentence("this node"))
            case ProgressText(text=text, warning=loud):
                (log.warning if loud else log.info)("%s", text)
            case _:
                pass

    def _wait_for_the_end(self, timeout: float) -> JobEnded | RoundEnded | LinkLost | None:
        deadline = Deadline.after(timeout)
        while True:
            try:
                notice = self._inbox.get(timeout=max(0.0, deadline.remaining()))
            except queue.Empty:
                return None
            if isinstance(notice, (JobEnded, LinkLost)):
                return notice
            if isinstance(notice, RoundEnded) and notice.end.round >= self._round:
                return notice
