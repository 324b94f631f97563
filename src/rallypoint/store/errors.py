"""Errors of a store; `rallypoint.base.errors` shows the whole tree."""

from __future__ import annotations

from rallypoint.base.errors import RallypointError


class StoreError(RallypointError, RuntimeError):
    """The root of a store's errors. Also a RuntimeError, like torch's store errors (contract section 9.5)."""


class StoreTimeoutError(StoreError):
    """A wait timed out, and the store remains usable; or the server did not answer in time, and the next use raises
    StoreConnectionError."""


class StoreConnectionError(StoreError):
    """The server cannot be reached or is gone. After raising this once, a store always raises it."""


class StoreProtocolError(StoreError):
    """Bytes are not the store's protocol, or a key or value exceeds its bounds."""

    def __init__(self, text: str, *, is_launcher: bool = False) -> None:
        super().__init__(text)
        self.is_launcher = is_launcher
        """Whether the bytes came from an agent or `rallyctl`, which asks what is listening here."""


class QueueEmptyError(StoreError):
    """A pop without waiting found nothing."""
