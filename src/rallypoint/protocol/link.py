"""What a handler holds of the control plane: something to send requests to, which answers with notifications.

The embedded server's own agent has a link without a socket (`dispatcher.LocalLink`), other nodes one over TCP
(`client.TcpLink`), and shared-state backends one that runs the core itself (`shared.SharedStateLink`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rallypoint.protocol.messages import Notification, Request

Deliver = Callable[[Notification], None]
"""Called from any thread, with no lock held, in the order in which things happened. Must not block."""


class Link(Protocol):
    """One node's line to the control plane. Notifications go to the `Deliver` that it was made with."""

    @property
    def address(self) -> str | None:
        """This node's address towards the control plane; None until that has been reached, which `LinkOpened` tells."""
        ...

    def send(self, request: Request) -> None:
        """Say something. Never blocks; a link that is lost says so by `LinkLost`."""
        ...

    def close(self) -> None:
        """End the session: the node is gone for the others. Idempotent; nothing is delivered afterwards."""
        ...
