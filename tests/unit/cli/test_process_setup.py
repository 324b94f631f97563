"""What a command does about interrupts when it starts, runs and ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

SET_UP = "import os, signal, sys\n"
SET_UP += "from rallypoint.cli.process_setup import set_up_process, restore_keyboard_interrupt\nset_up_process()\n"


def ran(text: str, before: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", before + SET_UP + text], capture_output=True, text=True, timeout=60, check=False
    )


def test_an_interrupt_that_arrives_ignored_stays_so() -> None:
    before = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    done = ran("restore_keyboard_interrupt(); os.kill(os.getpid(), signal.SIGINT); print('still here')", before)
    assert (done.returncode, done.stdout) == (0, "still here\n")


def test_once_the_run_has_begun_it_is_an_exception() -> None:
    interrupted = "try:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt: print('heard')"
    done = ran("restore_keyboard_interrupt()\n" + interrupted)
    assert (done.returncode, done.stdout) == (0, "heard\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_interrupts_the_interpreters_end(number: signal.Signals) -> None:
    before = f"import atexit, os; atexit.register(lambda: os.kill(os.getpid(), {int(number)}))\n"
    done = ran("restore_keyboard_interrupt()", before)  # what is registered first is called last
    assert (done.returncode, done.stderr) == (0, "")
