"""Commands as process 1 of a container: of a pid namespace with a /proc of its own."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.jobs.launching import RALLYCTL, RALLYRUN, Job, Launcher
from tests.jobs.terminals import Terminal
from tests.ports import free_port
from tests.processes import completed

pytestmark = pytest.mark.root

ENTER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]

ORPHANS = "(sleep 0.01 & (sleep 0.02 &) ); setsid sh -c 'sleep 0.03 & exit 0'; exec \"$@\""
"""An entrypoint that leaves orphans, which end while the command runs."""

LOOK = """
import os, time
def ended():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            name, rest = open(f"/proc/{pid}/stat").read().rsplit(")", 1)
        except OSError:
            continue
        if rest.split()[0] == "Z" or "sleep" in name:
            found.append(pid)
    return found
until = time.monotonic() + 20
while (left := ended()) and time.monotonic() < until:
    time.sleep(0.02)
"""
"""What looks for a time until no process is a zombie any more, and none of the entrypoint's is left."""


def _why_not() -> str | None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "needs root, and `unshare` of util-linux"
    tried = completed([*ENTER, "true"])
    return f"the kernel or container does not allow pid namespaces: {tried.stderr}" if tried.returncode else None


@pytest.fixture(autouse=True)
def _needs_pid_namespaces() -> None:
    if (reason := _why_not()) is not None:
        pytest.skip(f"PROCESS 1 TESTS DID NOT RUN: {reason}")


def process_one(entered: int) -> int:
    """The pid, out here, of process 1 of the container that a process of `unshare` waits for."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        children = Path(f"/proc/{entered}/task/{entered}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.01)
    raise AssertionError("the container has no process")


def signal_container(job: Job, number: int) -> None:
    """What a container's runtime does to stop it."""
    os.kill(process_one(job.pid), number)


def test_orphans_of_the_whole_container_are_reaped(rallyrun: Launcher) -> None:
    text = LOOK + "os.write(1, f'left {left}\\n'.encode())\n"
    doubled = "import os\nfor _ in range(2):\n    if os.fork() == 0:\n        os.setsid()\n"
    script = rallyrun.script(doubled + "        os._exit(os.fork() and 0)\n    os.wait()\n" + text)
    job = rallyrun.command([*ENTER, "sh", "-c", ORPHANS, "sh", *RALLYRUN, "--nproc-per-node=1", script])
    assert job.ends() == 0, job.err
    assert job.out == ["left []"]


def test_the_control_plane_as_process_1_reaps_and_ends_on_sigterm(rallyrun: Launcher) -> None:
    serve = [*RALLYCTL, "serve", f"--endpoint=127.0.0.1:{free_port()}"]
    job = rallyrun.command([*ENTER, "sh", "-c", ORPHANS, "sh", *serve])
    job.until_err("control plane listens")
    text = LOOK + "print('left', left)"
    inside = ["nsenter", "--pid", "--mount", f"--target={process_one(job.pid)}", sys.executable, "-c", text]
    looked = completed(inside, check=True)
    assert looked.stdout == "left []\n"
    signal_container(job, signal.SIGTERM)
    assert job.ends() == 0
    assert "stopped by SIGTERM" in job.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_before_any_handler_is_there_ends_the_command(rallyrun: Launcher, number: int) -> None:
    text = "import signal\nfrom rallypoint.cli.process_setup import set_up_process\nset_up_process()\n"
    text += "print('set up', flush=True)\nwhile True:\n    signal.pause()"
    job = rallyrun.command([*ENTER, sys.executable, "-c", text])
    job.until(lambda out: out == ["set up"], "it is set up")
    signal_container(job, number)
    assert job.ends() == 128 + number


def test_sigterm_ends_the_job_within_the_grace_period(rallyrun: Launcher) -> None:
    deaf = "import os, signal, time\nsignal.signal(signal.SIGTERM, lambda *_: os.write(1, b'heard\\n'))\n"
    script = rallyrun.script(deaf + "os.write(1, b'up\\n')\nwhile True:\n    time.sleep(1)")
    flags = ["--nproc-per-node=1", "--exit-codes=classified"]
    job = rallyrun.command([*ENTER, *RALLYRUN, *flags, script], {"RALLYPOINT_TERMINATION_GRACE": "8"})
    job.until(lambda out: out == ["up"], "the worker is up")
    begun = time.monotonic()
    signal_container(job, signal.SIGTERM)
    assert job.ends() == 75, job.err
    assert time.monotonic() - begun < 30, "its own --shutdown-timeout"
    assert job.out == ["up", "heard"], "a worker is sent it once"


@pytest.mark.parametrize(
    ("text", "code"),
    [("raise SystemExit(0)", 0), ("raise SystemExit(7)", 1), ("import os\nos.kill(AGENT, 9)\nos.pause()", 137)],
    ids=["success", "failure", "the agent is killed"],
)
def test_the_exit_code_is_the_commands_and_nothing_is_left(rallyrun: Launcher, text: str, code: int) -> None:
    agent = "int(open(f'/proc/{int(open(f\"/proc/{os.getppid()}/stat\").read().split()[3])}/stat').read().split()[3])"
    script = rallyrun.script(text.replace("AGENT", agent).replace("os.pause()", "__import__('signal').pause()"))
    job = rallyrun.command([*ENTER, *RALLYRUN, "--nproc-per-node=1", script])
    assert job.ends() == code, job.err


def test_a_terminal_that_is_closed_ends_the_job(rallyrun: Launcher) -> None:
    """The kernel tells process 1 alone, as the leader of the session."""
    text = "import os, signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\nos.write(1, b'up\\n')\nsignal.pause()"
    command = [*ENTER, "setsid", "--ctty", *RALLYRUN, "--nproc-per-node=1", rallyrun.script(text)]
    terminal = Terminal(rallyrun, command)
    terminal.until("up")
    assert terminal.disconnect() == 1, "as of an agent that handles SIGHUP"


def test_an_interrupt_from_the_terminal_is_heard_once(rallyrun: Launcher) -> None:
    saving = "import os, signal, sys, time\n"
    saving += "def save(*_):\n    time.sleep(0.5)\n    os.write(1, b'saved\\n')\n    sys.exit(0)\n"
    saving += "signal.signal(signal.SIGINT, save)\nos.write(1, b'up\\n')\nwhile True: time.sleep(0.02)"
    script = rallyrun.script(saving)
    command = [*ENTER, "setsid", "--ctty", *RALLYRUN, "--nproc-per-node=1", script]
    terminal = Terminal(rallyrun, command)
    terminal.until("up")
    terminal.write(b"\x03")
    terminal.until("saved")
    assert terminal.ends() == 1, "as of an agent that handles it"
    assert "stopped by SIGINT" in terminal.text
