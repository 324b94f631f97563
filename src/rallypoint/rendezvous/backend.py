"""The minimum that a rendezvous needs of a service: one blob that can be read, and replaced by compare-and-set."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rallypoint.base.light_typing import Any

Token = Any
"""The fencing token: returned with a state, and required to replace it."""


class RendezvousBackend(ABC):
    """A place for the state (contract section 8, `RendezvousBackend`).

    A backend that can tell when the state may have changed also has `wait_for_change(timeout: float) -> bool`, which
    blocks until then or until `timeout` seconds are over; others are read once a second. If it has `cancel_waits()`,
    that ends such waits, from any thread, and all later ones.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name in messages."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and its token, or None if there is none yet. Raises: RendezvousConnectionError: the service cannot
        be reached. RendezvousStateError: the blob is not a state.
        """

    @abstractmethod
    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state if it is still the one that `token` came with (or still none, without a token).

        Returns:
            The state that is there now, its token, and whether it is ours; None if even that is unknown.

        Raises:
            RendezvousConnectionError: the service is out of reach.
            RendezvousStateError: what is there is no state.
        """
