"""The errors of a store. The whole tree is drawn in `rallypoint.base.errors`."""

from __future__ import annotations

from rallypoint.base.errors import RallypointError


class StoreError(RallypointError, RuntimeError):
    """Root of all that a store raises. Also a RuntimeError, as torch's store errors are (contract section 9.5)."""


class StoreTimeoutError(StoreError):
    """A wait has timed out, and the store can still be used; or its server has not answered in time, and the next use
    raises StoreConnectionError.
    """


class StoreConnectionError(StoreError):
    """The server cannot be reached, or is gone. A store that has raised this once always raises it."""


class StoreProtocolError(StoreError):
    """Bytes that are not the store's protocol, or a key or value beyond the protocol's bounds."""


class QueueEmptyError(StoreError):
    """A pop that does not wait found nothing."""
