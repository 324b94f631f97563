"""The minimum that a rendezvous needs of a service: one blob that can be read, and replaced by compare-and-set."""

from __future__ import annotations

import base64
import binascii
from abc import ABC, abstractmethod

from rallypoint.base.errors import UserError
from rallypoint.base.light_typing import Any
from rallypoint.control.protocol.errors import RendezvousConnectionError, RendezvousStateError
from rallypoint.store.api import Store
from rallypoint.store.errors import StoreError

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


_NO_STATE = b"Y2FuaW1hZGFt"
"""The value of the key before the first state, so that reading never waits (contract section 4.4)."""


class StoreRendezvousBackend(RendezvousBackend):
    """Key `torch.rendezvous.<run_id>` of a store; the token is its present text."""

    def __init__(self, store: Store, run_id: str) -> None:
        """Make sure that the key is there.

        Args:
            store: any store with `compare_set`.
            run_id: the job's id.

        Raises:
            UserError: an empty run id.
            RendezvousConnectionError: the store is out of reach.
        """
        if not run_id:
            raise UserError("a rendezvous in a store needs a run id that is not empty; give --rdzv-id")
        self._store = store
        self._key = f"torch.rendezvous.{run_id}"
        self._compare_set(b"", _NO_STATE)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return "c10d"

    def get_state(self) -> tuple[bytes, bytes] | None:
        try:
            text = self._store.get(self._key)
        except StoreError as error:
            raise self._connection_error(error) from error
        return self._decoded(text)

    def set_state(self, state: bytes, token: object = None) -> tuple[bytes, bytes, bool] | None:
        expected = _NO_STATE if token is None else token
        if not isinstance(expected, bytes):
            found = self.get_state()
            return None if found is None else (*found, False)
        ours = base64.b64encode(state)
        there = self._compare_set(expected, ours)
        decoded = self._decoded(there)
        return None if decoded is None else (*decoded, there == ours)

    def _compare_set(self, expected: bytes, desired: bytes) -> bytes:
        try:
            return self._store.compare_set(self._key, expected, desired)
        except StoreError as error:
            raise self._connection_error(error) from error

    def _decoded(self, text: bytes) -> tuple[bytes, bytes] | None:
        if text == _NO_STATE:
            return None
        try:
            return base64.b64decode(text, validate=True), text
        except binascii.Error:
            raise RendezvousStateError(
                f"the key {self._key!r} holds {text[:24]!r}, which is not a rendezvous state; "
                "use a store and an --rdzv-id of its own for each job"
            ) from None

    def _connection_error(self, error: StoreError) -> RendezvousConnectionError:
        return RendezvousConnectionError(f"the store of the rendezvous is out of reach: {error}")
