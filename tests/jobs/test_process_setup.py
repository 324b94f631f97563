"""Agents that start in a strange state, or get rare things.

Without descriptors, with ignored signals, in a folder that is gone; a ^C while they stop their workers.
"""

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


def test_standard_descriptors_that_are_closed_are_open_in_workers(rallyrun: Launcher) -> None:
    job = shell(rallyrun, "", rallyrun.script(OPEN_ONES), after="<&- >&- 2>&-")
    assert job.ends() == 0, job.err
    told = (rallyrun.folder / "told").read_text().split()
    assert told[0] == "/dev/null"
    assert all(name.startswith("pipe:") for name in told[1:3]), "what they write is kept for the report"


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


# Agents that inherit or get what is rare: an ignored SIGCHLD, a ^C while they stop their workers


CHILDREN_IGNORED = "trap '' CHLD; exec "


def test_an_ignored_sigchld_hides_no_exit_code(rallyrun: Launcher) -> None:
    script = rallyrun.script("import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n")
    command = [*RALLYRUN, "--standalone", "--nproc-per-node=2", script]
    job = rallyrun.command(["bash", "-c", CHILDREN_IGNORED + shlex.join(command)])
    assert job.ends() == 1, job.err
    assert "not foreseen" not in job.err
    assert "exitcode  : 3 " in job.err


def test_signals_of_the_c_library_that_arrive_ignored_do_no_harm(rallyrun: Launcher) -> None:
    """As under GNU make: who is started by `posix_spawn` of glibc finds its signals 32 and 33 ignored for good."""
    script = rallyrun.script("print('up', flush=True)\n")
    command = [*RALLYRUN, "--standalone", "--nproc-per-node=1", script]
    spawn = f"import os; pid = os.posix_spawn({command[0]!r}, {command!r}, os.environ); "
    job = rallyrun.command([sys.executable, "-c", spawn + "raise SystemExit(os.waitpid(pid, 0)[1])"])
    assert job.ends() == 0, job.err
    assert job.out == ["up"]


def test_a_job_in_the_background_of_a_script_can_be_interrupted(rallyrun: Launcher) -> None:
    """The shell has these ignored for it."""
    script = rallyrun.script("import signal\nprint('up', flush=True)\nsignal.pause()\n")
    command = [*RALLYRUN, "--standalone", "--nproc-per-node=1", "--shutdown-timeout=1", script]
    job = rallyrun.command(["bash", "-c", "trap '' INT QUIT; exec " + shlex.join(command)])
    job.until(lambda lines: "up" in lines, "the worker is up")
    job.signal(signal.SIGINT)
    assert job.ends() == 1, job.err


def test_an_interrupt_while_workers_are_stopped_leaves_none(rallyrun: Launcher) -> None:
    script = rallyrun.script(
        "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nsignal.signal(2, signal.SIG_IGN)\n"
        "os.write(1, b'deaf\\n')\nwhile True: signal.pause()\n"
    )
    flags = ["--standalone", "--nproc-per-node=2", "--signals-to-handle=SIGTERM", "--shutdown-timeout=2"]
    job = rallyrun(*flags, script)
    job.until(lambda lines: lines.count("deaf") == 2, "two workers are deaf")
    job.signal(signal.SIGTERM)
    job.until_err("closing signal SIGTERM")
    job.signal(signal.SIGINT)
    assert job.ends() != 0
    assert not rallyrun.left(), "nothing runs when the agent has ended"


INTERRUPTED_STOP = """
import logging, signal, sys
from rallypoint.cli.rallyrun import main

def interrupt(record):
    if "closing signal" in record.getMessage():
        logger.removeFilter(interrupt)
        signal.raise_signal(signal.SIGINT)
    return True

logger = logging.getLogger("rallypoint.workers.stop")
logger.addFilter(interrupt)
sys.exit(main())
"""
"""A `rallyrun` that gets a ^C in the midst of sending its workers the first signal."""


def test_an_interrupt_while_a_stop_is_begun_is_no_other_than_one_after_it(rallyrun: Launcher) -> None:
    """It means SIGKILL to the workers that are being stopped, and no second grace period."""
    script = rallyrun.script(
        "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nos.write(1, b'deaf\\n')\nsignal.pause()\n"
    )
    flags = ["--standalone", "--nproc-per-node=2", "--signals-to-handle=SIGTERM", "--shutdown-timeout=600"]
    job = rallyrun.command([sys.executable, "-c", INTERRUPTED_STOP, *flags, script])
    job.until(lambda lines: lines.count("deaf") == 2, "two workers are deaf")
    job.signal(signal.SIGTERM)
    assert job.ends() == -signal.SIGINT, job.err
    assert job.err.count("closing signal SIGTERM") == 2, job.err
    assert not rallyrun.left(), "nothing runs when the agent has ended"


LATE = """
import signal, sys
from rallypoint.cli import exit, rallyrun

def say(text):
    print(text, file=sys.stderr, flush=True)
    signal.raise_signal(signal.SIGINT)

exit.print_error = say
sys.exit(rallyrun.main())
"""
"""A `rallyrun` that gets a ^C when it says how it has ended."""


def test_an_interrupt_when_all_is_over_leaves_no_traceback(rallyrun: Launcher) -> None:
    script = rallyrun.script("import sys\nsys.exit(3)\n")
    flags = ["--standalone", "--nproc-per-node=1", "--signals-to-handle=SIGTERM"]
    job = rallyrun.command([sys.executable, "-c", LATE, *flags, script])
    assert job.ends() == -signal.SIGINT
    assert "exitcode  : 3 " in job.err
    assert "KeyboardInterrupt" not in job.err, job.err
