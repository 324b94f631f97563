"""Decides what an agent does about a job that hangs. Pure; see `policy`.

Laws:

1. First all evidence about the workers is collected and shown, then the agent acts: no worker is ended before.
2. The action is the one that this node was started with, and a hang costs a restart as a failure does. The first node
   to request it decides for all.
3. Events of any other round than the one that runs here change nothing.
"""

from __future__ import annotations

from enum import StrEnum

from rallypoint.agent import steps
from rallypoint.agent.policy_state import Decision, Phase, PolicyState, warning
from rallypoint.protocol.messages import CollectedPart, CollectionEnded, HangFound, HangReport


class OnHang(StrEnum):
    """The action after a hang has been reported."""

    REPORT = "report"
    RESTART = "restart"
    FAIL = "fail"


FOUND = "the job hangs: no rank of its {} has written output or reported progress for its --hang-timeout"
CAUSE = "the job hangs: no rank has given a sign of life for its --hang-timeout"
_NEXT = {
    OnHang.REPORT: "nothing else is done (--on-hang=report)",
    OnHang.RESTART: "it counts as a failure: the workers are restarted if that is left (--on-hang=restart)",
    OnHang.FAIL: "the job ends (--on-hang=fail)",
}


def on_hang(status: PolicyState, event: HangFound | CollectedPart | CollectionEnded | HangReport) -> Decision:
    """Decide what follows from the coordinator's notification of a hang."""
    if isinstance(event, CollectedPart | CollectionEnded):
        return status, (steps.AddToReport(event),)
    if event.round != status.round or status.phase not in (Phase.RUNNING, Phase.FINISHED):
        return status, ()
    if isinstance(event, HangFound):
        nodes = "node" if event.nodes == 1 else f"{event.nodes} nodes"
        return status, (warning(f"{FOUND.format(nodes)}; collecting what the workers are doing"),)
    then = OnHang(status.on_hang or OnHang.REPORT)
    line = warning(f"{event.report.rstrip()}\n{_NEXT[then]}")
    if then is OnHang.REPORT:
        return status, (line,)
    return status, (line, steps.FailHung(event.round, CAUSE, ends_job=then is OnHang.FAIL))
