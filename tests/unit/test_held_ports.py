"""The ports that tests are given: nobody else is given one, and who names it may listen there."""

from __future__ import annotations

import socket

import pytest

from rallypoint.base.endpoint import listening_socket
from tests.ports import free_port


def test_a_held_port_is_refused_and_can_be_listened_at_by_one() -> None:
    port = free_port()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with listening_socket("", port), pytest.raises(OSError, match="in use"):
        listening_socket("", port)


def test_a_held_port_is_chosen_for_nobody_else() -> None:
    held, chosen = {free_port() for _ in range(50)}, set()
    for _ in range(1000):
        with listening_socket("", 0) as other:
            chosen.add(other.getsockname()[1])
    assert len(held) == 50
    assert not held & chosen
