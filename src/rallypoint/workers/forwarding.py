"""Forwards signals that were sent to the agent to workers that have not been sent them too.

A scheduler signals the agent alone, or every process of a job on this node; which of the two depends on the
scheduler, on its settings (Slurm: `ProctrackType`) and on the command. The reaper distinguishes them: it is below the
agent in a session of its own, as each worker is, and records the signals it is sent. Those were sent to the workers
too.

Laws:

1. A worker gets a signal from the sender or from us, never from both.
2. Under a known scheduler, the sender may not have finished: what has not reached the reaper is forwarded after
   `SETTLE_TIME` seconds. Elsewhere it is forwarded at once.
3. Workers are sent nothing that arrived before they were started.
4. The same signal within `BURST` seconds after it has reached all counts as the same: schedulers repeat signals.

A signal to the reaper alone would be misread; nothing of ours sends one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.log import get_logger
from rallypoint.base.signals import signal_name

log = get_logger(__name__)

SETTLE_TIME = 0.2
"""Seconds that a scheduler may take from the first process of a job on this node to the last."""
BURST = 1.0
"""Seconds within which the same signal to all processes is the same message."""

_SENT_TO_ALL_MESSAGE = "%s was sent to all processes of this job on this node; the workers have it"


class SignalForwarding:
    """The signals of one agent, and whether they have reached the workers. Nothing here waits.

    Args:
        received: gives the signals that the reaper was sent since the last call.
        send: sends a signal to each worker that runs.
        scheduled: whether this process was started by a scheduler that may signal all processes of a job.
        clock: of `wake_at`.
    """

    def __init__(
        self,
        received: Callable[[], Collection[int]],
        send: Callable[[int], None],
        scheduled: bool,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._reaper_signals = received
        self._send = send
        self._scheduled = scheduled
        self._clock = clock
        self._shared: dict[int, float] = {}
        """Signal to the time at which the reaper was found to have been sent it."""
        self._due: dict[int, float] = {}
        """Signal to the time at which it is forwarded, unless it has reached the reaper by then."""

    def shared_signals(self) -> frozenset[int]:
        """The signals that all processes below this agent were sent a moment ago."""
        now = self._clock.monotonic()
        self._shared.update(dict.fromkeys(self._reaper_signals(), now))
        return frozenset(number for number, at in self._shared.items() if now - at <= BURST)

    def forward(self, number: int) -> bool:
        """Handle a signal that the workers should get.

        Returns:
            Whether it is handled: they have it already, or `step` will send it. If not, send it now.
        """
        if number in self.shared_signals():
            log.info(_SENT_TO_ALL_MESSAGE, signal_name(number))
            self._due.pop(number, None)
            return True
        if self._scheduled:
            self._due.setdefault(number, self._clock.monotonic() + SETTLE_TIME)
        return self._scheduled

    def reset(self) -> None:
        """Other workers are about to start: what was sent before was not for them."""
        self._shared.clear()
        self._due.clear()

    def is_handled(self, number: int) -> bool:
        """Whether the workers have been sent the signal, or will be by `step`."""
        return number in self._due or number in self.shared_signals()

    def fds(self) -> list[int]:
        return []

    def wake_at(self) -> float:
        return min(self._due.values(), default=math.inf)

    def step(self) -> None:
        now = self._clock.monotonic()
        due = [number for number, at in self._due.items() if at <= now]
        if not due:
            return
        reached = self.shared_signals()
        for number in due:
            del self._due[number]
            if number in reached:
                log.info(_SENT_TO_ALL_MESSAGE, signal_name(number))
            else:
                log.info("Sending the workers %s", signal_name(number))
                self._send(number)
