"""Agents that are started in a strange state: without descriptors, with ignored signals, in a folder that is gone."""

from __future__ import annotations

import shlex
import signal
import sys

import pytest

from tests.jobs.launching import RALLYRUN, Job, Launcher

OPEN_ONES = """
import os
names = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
assert not any(name.startswith(("socket:", "anon_inode:")) for name in names), names
os.write(1, b"said\\n")
with open("told", "w") as file:
    print(*names, file=file)
"""


def shell(rallyrun: Launcher, before: str, *arguments: str, after: str = "") -> Job:
    """`rallyrun` from a shell that has seen to something first."""
    command = [*RALLYRUN, "--standalone", *arguments]
    return rallyrun.command(["bash", "-c", f"{before} exec {shlex.join(command)} {after}"])


def test_standard_descriptors_that_are_closed_are_dev_null_to_workers(rallyrun: Launcher) -> None:
    job = shell(rallyrun, "", rallyrun.script(OPEN_ONES), after="<&- >&- 2>&-")
    assert job.ends() == 0, job.err
    told = (rallyrun.folder / "told").read_text().split()
    assert told[:2] == ["/dev/null"] * 2


WAITING = """
import os, time
os.write(1, b"up\\n")
while not os.path.exists("finish"): time.sleep(0.01)
"""


def test_nohup_is_respected(rallyrun: Launcher) -> None:
    job = shell(rallyrun, "trap '' HUP;", rallyrun.script(WAITING))
    job.until(lambda lines: lines == ["up"], "the worker is up")
    job.signal(signal.SIGHUP)
    (rallyrun.folder / "finish").touch()
    assert job.ends() == 0, job.err
    assert "SIGHUP" not in job.err


def test_a_signal_that_is_named_is_handled_although_it_arrived_ignored(rallyrun: Launcher) -> None:
    job = shell(rallyrun, "trap '' HUP;", "--signals-to-handle=SIGTERM,SIGHUP", rallyrun.script(WAITING))
    job.until(lambda lines: lines == ["up"], "the worker is up")
    job.signal(signal.SIGHUP)
    assert job.ends() == 1, job.err
    assert "stopped by SIGHUP" in job.err


def test_a_working_directory_that_has_been_deleted(rallyrun: Launcher) -> None:
    job = shell(rallyrun, "mkdir gone; cd gone; rmdir ../gone;", "--no-python", "/bin/echo", "well")
    assert job.ends() == 0, job.err
    assert job.out == ["well"]
    assert "Traceback" not in job.err


INTERRUPTED = """
import os, signal, sys
import rallypoint.cli.process_setup as setup
from rallypoint.cli.rallyrun import main
count, moment, ready = 0, int(sys.argv.pop(1)), setup.set_up_process
def hook(event, _):
    global count
    count += event == "import"
    if event == "import" and count == moment:
        os.kill(os.getpid(), signal.SIGINT)
def set_up_process():
    ready()
    sys.addaudithook(hook)
setup.set_up_process = set_up_process
sys.exit(main())
"""


@pytest.mark.parametrize("moment", [1, 20])
def test_an_interrupt_at_any_import_of_the_start_ends_the_agent_in_silence(rallyrun: Launcher, moment: int) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(moment), "--standalone", "--no-python", "true"]
    job = rallyrun.command(command)
    assert job.ends() == -signal.SIGINT
    assert job.err == ""


EMBEDDED = """
import gc, sys, threading
opened = []
sys.addaudithook(lambda event, its: event == "open" and opened.append(str(its[0])))
from rallypoint.cli.rallyrun import main
gc.disable()
code = main(sys.argv[1:])
later = [each.name for each in threading.enumerate() if isinstance(each, threading.Timer)]
print(code, gc.isenabled(), later, [each for each in opened if each.endswith("/smaps")])
"""
"""A program that calls `main` with arguments: its collector and its memory are its own."""


def test_what_embeds_the_command_keeps_its_memory_and_collector(rallyrun: Launcher) -> None:
    job = rallyrun.command([sys.executable, "-c", EMBEDDED, "--standalone", "--no-python", "true"])
    assert job.ends() == 0, job.err
    assert job.out == ["0 False [] []"]
