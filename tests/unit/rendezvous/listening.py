"""What tests of links hold in the place of an agent."""

from __future__ import annotations

import queue

from rallypoint.control.protocol.messages import LinkOpened, Notification


class Heard(queue.SimpleQueue[Notification]):
    """What a link has delivered, in order, but for the news that it has reached the control plane."""

    def take(self, notice: Notification) -> None:
        """The `Deliver` of a link."""
        if not isinstance(notice, LinkOpened):
            self.put(notice)
