"""Lets a node leave the job if its workers were the first to fail too often (`--host-failure-limit`).

The node counts only failures that ended a round during this agent's life, not consequences of another node's failure. A
spare takes its place, or the job continues without it, as after any departure. If too few nodes remain, they wait for a
new one.
"""

from __future__ import annotations

from rallypoint.agent import steps
from rallypoint.agent.feature import Agent, Feature
from rallypoint.agent.policy import Decision, PolicyState, Rules, end
from rallypoint.control.protocol.messages import LeaveRequest, RoundEnded


class HostLimit(Feature):
    """The failure count of one node."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._limit = self.workers.group.spec.features.recovery.host_failure_limit
        self._failures = 0

    def rules(self) -> Rules:
        return {RoundEnded: self._leave_after_the_last}

    def _leave_after_the_last(self, status: PolicyState, event: RoundEnded) -> Decision | None:
        if not _is_own_failure(status, event) or self._failures + 1 < self._limit or status.leave_signal:
            return None
        times = "once" if self._limit == 1 else f"{self._limit} times"
        why = (
            f"this node is leaving the job: its workers failed {times} (--host-failure-limit); fix the node, then "
            "restart its agent"
        )
        return end(status, steps.End(steps.NodeChecked(why)), LeaveRequest(), failed=True)

    def observe(
        self,
        before: PolicyState,
        event: steps.Event | None,
        _after: PolicyState,
        _steps: tuple[steps.Step, ...],
    ) -> None:
        self._failures += isinstance(event, RoundEnded) and _is_own_failure(before, event)


def _is_own_failure(status: PolicyState, event: RoundEnded) -> bool:
    """Whether this node's workers ended the round."""
    over = event.end
    return over.round == status.round and over.cause is not None and over.cause.is_of(status.failure)
