"""A reaper that waits for its agent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from rallypoint.workers.reaper import client

pytestmark = pytest.mark.process


def test_the_one_that_waits_is_taken_once() -> None:
    client.prestart()
    client.prestart()
    first, second = client.take_prestarted(), client.take_prestarted()
    try:
        assert first.pid != second.pid
        assert not first.lost
    finally:
        first.close()
        second.close()


def test_one_that_was_lost_meanwhile_is_not_given_out() -> None:
    client.prestart()
    waiting = client._prestarted
    assert waiting is not None
    os.kill(waiting.pid, signal.SIGKILL)
    assert select.select([waiting.fileno()], [], [], 30)[0]
    taken = client.take_prestarted()
    assert taken.pid != waiting.pid
    taken.close()


def test_one_that_nobody_takes_ends_with_the_process() -> None:
    begin = "from rallypoint.workers.reaper import client; client.prestart(); "
    text = begin + "print(client._prestarted.pid, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        fd = os.pidfd_open(int(process.stdout.readline()))
        process.communicate("\n", 30)
    try:
        assert select.select([fd], [], [], 30)[0]
    finally:
        os.close(fd)
