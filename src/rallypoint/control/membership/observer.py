"""Times at which an observer saw changes of a state, which itself contains no times. Pure."""

from __future__ import annotations

from collections import deque

from rallypoint.control.membership.rules import ClockView
from rallypoint.control.membership.state import NodeId, RemovedNode, Settings, State


class StateObserver:
    """The times of one observer of a state, on its own clock. Call `observe` with each new state first.

    The state has counters instead of times (law 9 of `rules`): a node whose heartbeat counter has not changed for the
    whole allowance is gone, regardless of any wall clock.
    """

    def __init__(self, settings: Settings) -> None:
        self._interval = settings.keep_alive_interval
        self.allowance = settings.keep_alive_interval * settings.keep_alive_max_attempt
        """Seconds without heartbeats after which a node counts as lost."""
        self._heartbeats: dict[NodeId, tuple[int, float]] = {}
        self._last_call: tuple[int, float] | None = None
        self._observed_at: float | None = None
        self._round: tuple[int, float] | None = None
        self._running_at: float | None = None
        self._removed: dict[RemovedNode, float] = {}
        self._window = settings.restart_window
        self._failures, self._failures_at = 0, deque[float](maxlen=max(1, settings.restarts_in_window))
        """Number of failures, and when the last ones were seen; unused without a restart window."""

    def observe(self, state: State, now: float) -> None:
        """Record a state seen at `now`, in seconds on the observer's clock."""
        unseen = 0.0
        if self._observed_at is not None:
            # While the observer slept or the service was unreachable, heartbeats could not be seen: that time counts
            # for no node.
            unseen = max(0.0, now - self._observed_at - self._interval / 2)
        self._observed_at = now
        self._heartbeats = {
            node: (count, seen[1] + unseen)
            if (seen := self._heartbeats.get(node)) and seen[0] == count
            else (count, now)
            for node, count in state.heartbeats.items()
        }
        if self._round is None or self._round[0] != state.round:
            self._round, self._running_at = (state.round, now), None
        if not state.complete:
            self._running_at = None
        elif self._running_at is None:
            self._running_at = now
        if self._window and self._failures != state.ledger.failures:
            self._observe_failures(state.ledger.failures, now)
        if state.removed or self._removed:
            seen_at = {removed.node: at for removed, at in self._removed.items()}
            self._removed = {removed: seen_at.get(removed.node, now) for removed in state.removed}
        if not state.last_call:
            self._last_call = None
        elif self._last_call is None or self._last_call[0] != state.last_call:
            self._last_call = (state.last_call, now)

    def _observe_failures(self, failures: int, now: float) -> None:
        # A new coordinator knows the number of failures but not their times: all count as seen now.
        if failures < self._failures:  # a different job
            self._failures_at.clear()
            self._failures = 0
        self._failures_at.extend([now] * min(failures - self._failures, self._failures_at.maxlen or 1))
        self._failures = failures

    def silent(self, now: float) -> list[NodeId]:
        """Nodes without heartbeats for the whole allowance, in order."""
        return sorted(node for node, (_, since) in self._heartbeats.items() if now - since >= self.allowance)

    def clock_view(self, now: float, heartbeat_at: float | None = None) -> ClockView:
        """The clock view for the rules at `now`."""
        last_call_at = self._last_call[1] if self._last_call else None
        forming_at = self._round[1] if self._round else None
        view = ClockView(now, last_call_at, heartbeat_at, forming_at, self._running_at, tuple(self._removed.values()))
        return view._replace(failures_at=tuple(self._failures_at)) if self._failures_at else view
