"""Launches: a console that is not read for a while (a pager, ^S), and signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from rallypoint.base.errors import SignalException
from rallypoint.clusters.remote.inputs import Host
from rallypoint.clusters.remote.job import LaunchPlan, _Launch
from rallypoint.clusters.remote.messages import Ended, Prepare, Start, decode_answer, encode, end_mark
from rallypoint.clusters.remote.ssh import SshOptions

SUPERVISOR = """
import sys
from rallypoint.clusters.remote import supervisor
supervisor._STUCK_AFTER = supervisor._LEFTOVERS_GRACE = 0.1
sys.exit(supervisor.main())
"""

SSH = """#!{python}
import os, sys
from rallypoint.clusters.remote.messages import *
from rallypoint import __version__
def say(answer):
    print(MARK.decode() + encode(answer).decode(), flush=True)
say(SupervisorHello(__version__, "127.0.0.1"))
for line in sys.stdin.buffer:
    request = decode_request(line.rstrip())
    if isinstance(request, FindEndpoint):
        say(EndpointFound("127.0.0.1", 29400))
    elif isinstance(request, Prepare):
        nonce = request.nonce
        say(Ready())
    elif isinstance(request, Start):
        break
os.write(1, end_mark(nonce) + encode(Ended(0)))
os.close(1)
with open(2, "w", closefd=False) as err:
    for number in range(400000):
        print(number, file=err)
"""
"""An ssh that ends its output before its errors, which exceed all queues."""

LAUNCH = """
import sys
from rallypoint.clusters.remote import ssh
ssh._SSH_END = 1.0
from rallypoint.cli.rallyctl import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.process
def test_a_supervisor_without_a_reader() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        # More than a pipe holds, but the command can end.
        job = Prepare(["seq", "30000"], "/", {}, 60.0, 1.0, "nonce")
        process.stdin.write(encode(job) + b"\n" + encode(Start()) + b"\n")
        process.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        text, mark, last = process.stdout.read().partition(end_mark("nonce"))
        assert mark
        assert decode_answer(last) == Ended(0)
        assert text.split()[-30000:] == [str(number).encode() for number in range(1, 30001)]
        assert process.wait(30) == 0


def launched(folder: Path, ssh: str) -> subprocess.Popen[bytes]:
    """Run `rallyctl launch` with another ssh."""
    (folder / "ssh").write_text(ssh)
    (folder / "ssh").chmod(0o755)
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = [sys.executable, "-c", LAUNCH, "launch", "--hosts=n1", "--", "echo", "done"]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.process
def test_another_process_holds_ssh_s_stderr(tmp_path: Path) -> None:
    """Like the master of a shared connection."""
    held = f"sleep 100 >/dev/null & echo $! >{tmp_path}/holder; while [ $1 != -- ]; do shift; done; shift 2; exec sh -c"
    with launched(tmp_path, f'#!/bin/sh\n{held} "$*"\n') as process:
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0
    os.kill(int((tmp_path / "holder").read_text()), signal.SIGKILL)
    assert out.decode().splitlines() == ["n1: done"]


@pytest.mark.process
def test_all_errors_are_shown(tmp_path: Path) -> None:
    with launched(tmp_path, SSH.format(python=sys.executable)) as process:
        assert process.stdout is not None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        lines = process.stdout.read().decode().splitlines()
        assert process.wait(30) == 0
    assert lines == [f"n1: {number}" for number in range(400000)]


# Signals while a launch is prepared


@pytest.mark.parametrize(
    ("numbers", "is_last", "error"),
    [
        ([signal.SIGINT], True, KeyboardInterrupt),
        ([signal.SIGINT], False, KeyboardInterrupt),
        ([signal.SIGTERM], True, SignalException),
        ([signal.SIGTERM], False, SignalException),
        ([], True, None),
    ],
)
def test_signals_before_the_start(
    numbers: list[signal.Signals], is_last: bool, error: type[BaseException] | None
) -> None:
    launch = _Launch(LaunchPlan([Host("node1")], ["true"], "/", {}, SshOptions((), "python3", 10, 30), 30.0))

    async def prepared() -> None:
        for number in (signal.SIGUSR1, *numbers):  # SIGUSR1 is for the workers, which are not started
            launch._on_signal(number)
        if not is_last:
            await asyncio.Event().wait()

    with pytest.raises(error) if error else nullcontext():
        asyncio.run(launch._until_signalled(prepared()))
