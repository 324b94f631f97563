"""Signals that the agent was sent, on their way to workers that were not sent them too.

A scheduler signals the agent alone, or every process of a job on this node; which of the two depends on the
scheduler, on its settings (Slurm: `ProctrackType`) and on the command. The reaper distinguishes them: it is below
the agent in a session of its own, as each worker is, and keeps what it is sent. That the workers were sent too.

Laws:

1. A worker gets a signal from the sender or from us, never from both.
2. Where a scheduler is known, the sender may still be at it: what has not reached the reaper is sent on after
   `SETTLE_TIME` seconds. Elsewhere it is sent on at once.
3. Workers are sent nothing that came before they were started.
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
    """What has become of the signals of one agent. Nothing here waits.

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
        """When the reaper was found to have been sent a signal."""
        self._due: dict[int, float] = {}
        """When a signal is to be sent on, unless it reaches the reaper until then."""

    def shared_signals(self) -> frozenset[int]:
        """The signals that all processes below this agent have been sent a moment ago."""
        now = self._clock.monotonic()
        self._shared.update(dict.fromkeys(self._reaper_signals(), now))
        return frozenset(number for number, at in self._shared.items() if now - at <= BURST)

    def forward(self, number: int) -> bool:
        """A signal has come that the workers are to have.

        Returns:
            Whether that is seen to: they have it already, or `step` will send it. If not, send it now.
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
        """None: no descriptor shows that the reaper was sent a signal."""
        return []

    def wake_at(self) -> float:
        """When something is to be sent on, in seconds on the clock; infinite for never."""
        return min(self._due.values(), default=math.inf)

    def step(self) -> None:
        """Send on what is due."""
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
