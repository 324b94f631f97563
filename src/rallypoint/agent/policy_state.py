"""The state of an agent, and the transitions that several of the policy's rules share. Pure; see `policy`."""

from __future__ import annotations

from enum import Enum, auto
from signal import SIGINT, SIGQUIT, SIGTERM

from rallypoint.agent import steps
from rallypoint.base.light_typing import NamedTuple
from rallypoint.base.signals import signal_name
from rallypoint.failures.cause import Cause
from rallypoint.membership.operations import Preempt
from rallypoint.notices import PREEMPTION
from rallypoint.protocol.messages import LeaveRequest, Placement

INTERRUPTS = frozenset({SIGINT, SIGQUIT})
"""Signals that a person sends from the keyboard; the second one means at once."""


class Phase(Enum):
    """The phase of an agent."""

    CHECKING = auto()
    FORMING = auto()
    RUNNING = auto()
    BROKEN = auto()
    FINISHED = auto()
    ENDING = auto()
    LEAVING = auto()
    ENDED = auto()


STARTED = frozenset({Phase.RUNNING, Phase.BROKEN, Phase.FINISHED})
"""The workers of a round have been started."""
LEAVES = frozenset({Phase.ENDING, Phase.LEAVING, Phase.ENDED})
"""The phases in which this agent's end is decided."""


class PostedNotice(NamedTuple):
    """A posted notice. `ready`: the workers have acknowledged, or their time is over (`is_late`); consent is given."""

    reason: str
    ready: bool = False
    is_late: bool = False


class PolicyState(NamedTuple):
    """The whole state of an agent.

    `round` is the one in which it has a place, `group_rank` its rank there; -1 before the first. `notice_timeout` is
    the number of seconds that workers are given before the round is drained; 0 drains at once. `checks_node` is whether
    the user has a check of this node. Both are the same for the whole run.
    """

    phase: Phase = Phase.FORMING
    round: int = -1
    group_rank: int = -1
    notice_timeout: float = 0.0
    checks_node: bool = False
    on_hang: str = ""
    """The action after a hang, besides reporting it (`policy_hang.OnHang`); the same for the whole run."""
    stopping: int = 0
    """The signal by which the workers are being stopped; 0 if they are not."""
    waiting: bool = False
    """Whether some workers of the previous round wait in their processes for the next one."""
    pending_placement: Placement | None = None
    """The placement that waits until the workers of the previous round are gone."""
    final_step: steps.FinalStep | None = None
    """The step to end with, in ENDING."""
    failure: Cause | None = None
    """Why this node's workers have failed, in BROKEN."""
    held_failure: steps.WorkersFailed | None = None
    """The same in RUNNING, while the signal that may have ended them is awaited."""
    posted_notice: PostedNotice | None = None
    leave_signal: int = 0
    """The signal because of which this node leaves when the round ends or the time of the notice is over; else 0."""
    interrupted: bool = False
    """Whether an interrupt has arrived."""
    link_down: bool = False
    """Whether the control plane cannot be reached."""
    preemption: str = ""
    """Which node was told that the whole job will be taken away, and how; empty if none is known to have been."""

    def anew(self, phase: Phase, round_: int, group_rank: int = -1) -> PolicyState:
        """The state of an agent that enters a phase, with what was before reset."""
        return PolicyState(
            phase,
            round_,
            group_rank,
            self.notice_timeout,
            checks_node=self.checks_node,
            on_hang=self.on_hang,
            link_down=self.link_down,
            preemption=self.preemption,
        )

    @property
    def can_notify_workers(self) -> bool:
        """Whether there are workers to notify, and time for that."""
        return bool(self.notice_timeout) and self.phase is Phase.RUNNING and self.held_failure is None


Decision = tuple[PolicyState, tuple[steps.Step, ...]]


def warning(text: str) -> steps.LogLine:
    """The step that logs a warning."""
    return steps.LogLine(text, warning=True)


def start_workers(status: PolicyState, placement: Placement) -> Decision:
    """Start the workers of a round in which this node has a place; none is left of the one before."""
    running = status.anew(Phase.RUNNING, placement.round, placement.group_rank)
    return running, (steps.StartWorkers(placement),)


def end(
    status: PolicyState, last: steps.FinalStep, *before: steps.Step, by: int = SIGTERM, failed: bool = False
) -> Decision:
    """Decide the end: first the workers are stopped, with the signal `by` unless they are stopping already."""
    if status.stopping:
        ending = status._replace(phase=Phase.ENDING, final_step=last, pending_placement=None)
        return ending, (*before, steps.KeepNobody(by, failed))
    if status.phase is not Phase.FORMING or status.waiting:
        stop = steps.StopWorkers(by, failed=failed, shared=isinstance(last, steps.EndBySignal))
        return status._replace(phase=Phase.ENDING, final_step=last, stopping=by, waiting=False), (*before, stop)
    return take_final_step(status, last, *before, in_order=True)


def take_final_step(status: PolicyState, last: steps.FinalStep, *before: steps.Step, in_order: bool) -> Decision:
    """Take the last step: no worker is left."""
    if isinstance(last, steps.EndBySignal) and last.signal == SIGTERM and in_order and not status.link_down:
        return status._replace(phase=Phase.LEAVING, stopping=0, final_step=last), (*before, steps.QueryStanding())
    return status._replace(phase=Phase.ENDED, stopping=0), (*before, last)


def notify_before_leaving(status: PolicyState, why: str, notice: float) -> Decision:
    """Give the workers time to save before this node leaves: at most this many seconds of notice."""
    seconds = min(status.notice_timeout, notice)
    line = warning(f"{why}; the workers have {seconds:g} s to save and acknowledge")
    then = (line, Preempt(status.round, seconds), steps.PostNotice(PREEMPTION, "", seconds))
    return status._replace(posted_notice=PostedNotice(PREEMPTION), leave_signal=SIGTERM), then


def leave_job(status: PolicyState, number: int, why: str = "", *, saved: bool = False) -> Decision:
    """Leave the job to the others, because this signal arrived, or for another reason to end the workers by it.

    `saved`: all workers of the round have acknowledged the notice.
    """
    text = f"{why or f'Received {signal_name(number)}'}; ending the workers and leaving the job"
    before: list[steps.Step] = [warning(text), LeaveRequest()]
    if status.phase is Phase.RUNNING and number == SIGTERM:
        before.append(steps.PostStopNotice())
    if status.stopping and number != status.stopping:
        before.append(steps.ForwardSignal(number))
    return end(status, steps.EndBySignal(number, saved=saved), *before, by=number)
