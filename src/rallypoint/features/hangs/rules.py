"""A node's reaction to a hung job. Pure.

Laws:

1. All evidence about the workers is collected and shown before the agent acts: no worker is ended earlier.
2. Each node sets its own action, and a hang uses up a restart like a failure. The first node to request an action
   decides for all. Events of any round but the running one change nothing.
"""

from __future__ import annotations

from enum import StrEnum

from rallypoint.agent import steps
from rallypoint.agent.policy import Decision, Phase, PolicyState, Rules, warning
from rallypoint.base.light_typing import NamedTuple
from rallypoint.control.protocol.messages import HangFound, HangReport
from rallypoint.failures.cause import Ending


class OnHang(StrEnum):
    """What to do after a hang is reported."""

    REPORT = "report"
    RESTART = "restart"
    FAIL = "fail"


GRACE = 3
"""Factor of the timeout until a worker reports progress twice."""
_CAUSE = "the job is hung: no rank has shown a sign of life for {:g} s (--hang-timeout)"
_THEN = {
    OnHang.REPORT: "nothing else is done (--on-hang=report)",
    OnHang.RESTART: "it counts as a failure: the workers will be restarted if a restart is left (--on-hang=restart)",
    OnHang.FAIL: "the job is ending (--on-hang=fail)",
}


class HangRules(NamedTuple):
    """The rules for the coordinator's messages about a hang.

    Args:
        timeout: seconds, for messages; 0 without hang detection: then only the report follows.
        reaction: what this node does besides reporting.
    """

    timeout: float
    reaction: OnHang

    def rules(self) -> Rules:
        """Rules by event type."""
        return {HangFound: self._on_found, HangReport: self._on_report}

    def _on_found(self, status: PolicyState, event: HangFound) -> Decision:
        if not self.timeout or not _concerns(status, event.round):
            return status, ()
        nodes = "node" if event.nodes == 1 else f"{event.nodes} nodes"
        line = (
            f"the job is hung: no rank of its {nodes} has written anything or reported progress for {self.timeout:g} s "
            f"(--hang-timeout; before the second progress of a round it is {GRACE} times that); collecting what the "
            "workers are doing"
        )
        return status, (warning(line),)

    def _on_report(self, status: PolicyState, event: HangReport) -> Decision:
        if not _concerns(status, event.round):
            return status, ()
        if not self.timeout:
            return status, (warning(event.report),)
        line = warning(f"{event.report.rstrip()}\n{_THEN[self.reaction]}")
        if self.reaction is OnHang.REPORT:
            return status, (line,)
        ends_job = self.reaction is OnHang.FAIL
        return status, (line, steps.FailNode(event.round, _CAUSE.format(self.timeout), Ending.HANG, ends_job))


def _concerns(status: PolicyState, round_: int) -> bool:
    return round_ == status.round and status.phase in (Phase.RUNNING, Phase.FINISHED)
