"""Ports, variables and process states for programs that put a job together by themselves."""

from __future__ import annotations

import os
import socket

import pytest

from rallypoint.base.errors import UserError
from rallypoint.base.procfs import is_uninterruptible_state, read_proc_state
from rallypoint.compat.helpers import get_env_variable_or_raise, get_free_port, get_socket_with_port


@pytest.mark.parametrize("reuse", [0, 1])
@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_a_socket_holds_its_port_on_all_addresses_and_does_not_listen(address: str, reuse: int) -> None:
    with get_socket_with_port() as held:
        port = held.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, port), 30)
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            with pytest.raises(OSError, match="Address already in use"):
                other.bind((address, port))
    with socket.create_server((address, port)):  # it can be bound at once
        pass


def test_a_free_port_can_be_bound_on_all_addresses() -> None:
    with socket.create_server(("", get_free_port())) as server:
        assert server.getsockname()[1] > 0


def test_a_machine_without_ipv6_has_ports_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made = socket.socket

    def without_ipv6(family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return made(family, kind)

    monkeypatch.setattr("socket.socket", without_ipv6)
    with get_socket_with_port() as held:
        assert held.family == socket.AF_INET


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
