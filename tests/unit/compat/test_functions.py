"""Functions with torch's names and signatures."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path

import pytest

from rallypoint.base.errors import UserError
from rallypoint.base.procfs import is_uninterruptible_state, read_proc_state
from rallypoint.compat import launch, run
from rallypoint.compat.helpers import (
    get_env_variable_or_raise,
    get_free_port,
    get_socket_with_port,
    parse_rendezvous_endpoint,
)
from rallypoint.failures.report import ChildFailedError


def test_namespaces_become_configurations() -> None:
    args = run.parse_args(["--nnodes=1", "--nproc-per-node=1", "--master-port=7", "x.py"])
    args.nproc_per_node, args.role, args.training_script_args = "3", "mine", ["a"]  # changed by hand
    config, _program, arguments = run.config_from_args(args)
    assert (config.nproc_per_node, config.role, arguments[-1]) == (3, "mine", "a")
    parser = run.get_args_parser()
    parser.add_argument("--mine")
    args = parser.parse_args(["--mine=1", "--nnodes=2", "--node-rank=1", "--master-port=7", "x.py", "--log-dir", "a"])
    config, _program, arguments = run.config_from_args(args)
    assert (config.rdzv_backend, config.rdzv_configs["rank"], config.max_nodes) == ("static", 1, 2)
    assert arguments[-3:] == ["x.py", "--log-dir", "a"]
    with pytest.raises(UserError, match="--nnodes"):
        run.config_from_args(run.parse_args(["--nnodes=a", "x.py"]))


@pytest.mark.process
def test_errors_of_main(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        run.main(["--nnodes=1"])
    assert ending.value.code == 2
    assert "training_script" in capsys.readouterr().err
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(4)")
    with pytest.raises(ChildFailedError) as failed:
        run.main(["--standalone", f"--log-dir={tmp_path}", str(script)])
    assert failed.value.get_first_failure()[1].exitcode == 4


def test_the_old_launcher_warns() -> None:
    with pytest.warns(FutureWarning, match="deprecated"), pytest.raises(UserError, match="--use-env"):
        launch.main(["--no-python", "prog"])
    assert launch.parse_args(["--use_env", "x.py"]).use_env is True
    assert run.get_use_env(argparse.Namespace()) is True


def test_endpoints() -> None:
    assert run.get_rdzv_endpoint(run.parse_args(["--master-addr=h", "--master-port=7", "x.py"])) == "h:7"
    assert run.get_rdzv_endpoint(run.parse_args(["--rdzv-endpoint=e:1", "x.py"])) == "e:1"
    assert parse_rendezvous_endpoint("h:1", 2) == ("h", 1)
    assert parse_rendezvous_endpoint("", 2) == ("localhost", 2)


@pytest.mark.parametrize("argv", [[None, "train.py"], [], ["", "train.py"]], ids=str)
def test_parsing_without_a_program_name(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    """An embedding program need not set `sys.argv`. (torch raises a TypeError and an IndexError.)"""
    monkeypatch.setattr(sys, "argv", argv)
    assert run.get_args_parser().parse_args(["train.py", "1"]).training_script_args == ["1"]
    assert run.parse_args(["--nnodes=2", "train.py"]).nnodes == "2"
    if argv:
        assert run.parse_args(None).training_script == "train.py"


# Ports, variables and process states for programs with their own launcher


@pytest.mark.parametrize("reuse", [0, 1])
@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_a_socket_reserves_its_port_and_does_not_listen(address: str, reuse: int) -> None:
    with get_socket_with_port() as held:
        port = held.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, port), 30)
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            with pytest.raises(OSError, match="Address already in use"):
                other.bind((address, port))
    for free in (port, get_free_port()):  # it can be bound at once
        socket.create_server((address, free)).close()


def test_ports_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    made = socket.socket

    def without_ipv6(family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return made(family, kind)

    monkeypatch.setattr("socket.socket", without_ipv6)
    with get_socket_with_port() as held:
        assert held.family == socket.AF_INET


def test_required_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME", "x")
    assert get_env_variable_or_raise("SOME") == "x"
    monkeypatch.delenv("SOME")
    with pytest.raises(UserError, match="Environment variable SOME expected, but not set"):
        get_env_variable_or_raise("SOME")


def test_process_states() -> None:
    assert read_proc_state(os.getpid()) in {"R", "S"}
    assert read_proc_state(2**31 - 1) is None
    assert [is_uninterruptible_state(state) for state in ("D", "S", "", None)] == [True, False, False, False]
