"""What tests of links hold in the place of an agent."""

from __future__ import annotations

import queue

from rallypoint.rendezvous.messages import LinkOpened, Notice


class Heard(queue.SimpleQueue[Notice]):
    """What a link has delivered, in order, but for the news that it has reached the control plane."""

    def take(self, notice: Notice) -> None:
        """The `Deliver` of a link."""
        if not isinstance(notice, LinkOpened):
            self.put(notice)
