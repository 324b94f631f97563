"""`deploy/systemd`: systemd's view of the unit, and what `rallyctl serve` reports to systemd."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.jobs.launching import RALLYCTL, Launcher
from tests.processes import completed

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "rallyctl-serve.service"
SERVE = [*RALLYCTL, "serve", "--endpoint=127.0.0.1:0"]

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (Debian: apt-get install systemd)"
)


def analyze(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", *arguments]
    return completed(command, env={**os.environ, **more})


def installed(folder: Path) -> Path:
    """The unit as it is installed, with a program that is there: the one of this environment."""
    program = Path(sys.executable).with_name("rallyctl")
    text, replaced = re.subn(r"^ExecStart=\S+", f"ExecStart={program}", UNIT.read_text(), flags=re.MULTILINE)
    assert replaced == 1
    path = folder / UNIT.name
    path.write_text(text)
    return path


@needs_systemd
def test_systemd_has_nothing_to_say_against_the_unit(tmp_path: Path) -> None:
    path = installed(tmp_path)
    # Warnings about units of this machine name those.
    said = analyze("verify", "--man=no", "--recursive-errors=no", str(path))
    about_ours = [line for line in said.stderr.splitlines() if UNIT.name in line]
    assert (said.returncode, about_ours) == (0, []), said.stderr


@needs_systemd
def test_the_unit_is_hardened(tmp_path: Path) -> None:
    """As systemd counts it: 10 is all that a service can do, 0 nothing at all."""
    said = analyze("security", "--offline=yes", "--threshold=20", "--no-pager", str(installed(tmp_path)))
    assert said.returncode == 0, said.stdout


@contextmanager
def manager(address: str) -> Iterator[socket.socket]:
    """What a service manager listens at."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(address.replace("@", "\0", 1))
        listening.settimeout(60)
        yield listening


def heard(listening: socket.socket, seconds: float) -> bytes:
    """What comes within this time; empty for nothing."""
    listening.settimeout(seconds)
    try:
        return listening.recv(4096)
    except TimeoutError:
        return b""


@pytest.mark.parametrize("abstract", [False, True], ids=["path", "abstract"])
def test_a_service_manager_is_told_of_readiness_and_of_the_end(rallyrun: Launcher, abstract: bool) -> None:
    address = f"@rallypoint-{rallyrun.mark}" if abstract else str(rallyrun.folder / "notify")
    with manager(address) as listening:
        job = rallyrun.command(SERVE, {"NOTIFY_SOCKET": address})
        ready = listening.recv(4096).decode()
        port = re.fullmatch(r"READY=1\nSTATUS=control plane listens at 127\.0\.0\.1:(\d+)", ready)
        assert port, ready
        with socket.create_connection(("127.0.0.1", int(port[1])), timeout=20):
            pass
        job.signal(signal.SIGTERM)
        assert listening.recv(4096) == b"STOPPING=1"
        assert job.ends() == 0
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.recv(4096)


def test_a_watchdog_hears_of_a_loop_that_goes_on_and_not_of_one_that_is_stuck(rallyrun: Launcher) -> None:
    address = str(rallyrun.folder / "notify")
    stuck = "import os, signal, sys, time, rallypoint.cli.rallyctl as rallyctl\n"
    stuck += "from rallypoint.base.loop import shared_loop\n"
    stuck += "signal.signal(signal.SIGUSR1, lambda *_: shared_loop().call(lambda: (print('stuck'), time.sleep(60))))\n"
    stuck += "sys.exit(rallyctl.main(['serve', '--endpoint=127.0.0.1:0']))\n"
    with manager(address) as listening:
        environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "200000", "PYTHONUNBUFFERED": "1"}
        job = rallyrun.command([sys.executable, "-c", stuck], environment)
        assert listening.recv(4096).startswith(b"READY=1")
        assert [listening.recv(4096) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        job.signal(signal.SIGUSR1)
        job.until(lambda out: out == ["stuck"], "the loop is stuck")
        assert not all(heard(listening, seconds=1.0) for _ in range(5))
        job.signal(signal.SIGKILL)  # as systemd does
        assert job.ends() == -signal.SIGKILL


def test_a_manager_that_is_not_there_costs_one_warning_each_time(rallyrun: Launcher) -> None:
    job = rallyrun.command(SERVE, {"NOTIFY_SOCKET": "/nowhere/notify"})
    job.until_err("could not be sent 'READY=1")
    job.signal(signal.SIGTERM)
    assert job.ends() == 0
    assert job.err.count("NOTIFY_SOCKET=/nowhere/notify") == 2
