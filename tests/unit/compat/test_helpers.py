"""Ports, variables and process states for programs that put a job together by themselves."""

from __future__ import annotations

import os
import socket

import pytest

from rallypoint.base.errors import UserError
from rallypoint.base.procfs import is_uninterruptible_state, read_proc_state
from rallypoint.compat.helpers import get_env_variable_or_raise, get_free_port, get_socket_with_port


def test_a_socket_with_a_port_can_be_connected_to() -> None:
    with get_socket_with_port() as listener, socket.create_connection(listener.getsockname()[:2], 30) as one:
        two, _ = listener.accept()
        with two:
            assert two.getpeername()[:2] == one.getsockname()[:2]


def test_a_free_port_can_be_bound() -> None:
    with socket.create_server(("127.0.0.1", get_free_port())) as server:
        assert server.getsockname()[1] > 0


def test_a_variable_that_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME", "x")
    assert get_env_variable_or_raise("SOME") == "x"
    monkeypatch.delenv("SOME")
    with pytest.raises(UserError, match="Environment variable SOME expected, but not set"):
        get_env_variable_or_raise("SOME")


def test_process_states() -> None:
    assert read_proc_state(os.getpid()) in {"R", "S"}
    assert read_proc_state(2**31 - 1) is None
    assert [is_uninterruptible_state(state) for state in ("D", "S", "", None)] == [True, False, False, False]
