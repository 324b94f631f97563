"""Workers that are to be forked wait for what they are forked from, and the agent hears everything meanwhile."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from rallypoint.agent.loop import run_agent
from rallypoint.agent.sources import Source
from rallypoint.base.errors import SignalException
from tests.unit.agent.test_stopping import TIMEOUT, beside
from tests.unit.agent.third_party import outcome
from tests.unit.agent.thread_workers import ThreadWorkers


class HandPreload(Source):
    """What is ready when it is told so."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._told = threading.Event()
        self._fd = os.eventfd(0)

    def importing(self) -> bool:
        self.asked.set()
        return not self._told.is_set()

    def fds(self) -> list[int]:
        return [self._fd]

    def step(self) -> None:
        if self._told.is_set():
            os.set_blocking(self._fd, False)
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                return

    def tell(self) -> None:
        self._told.set()
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        os.close(self._fd)


class PreloadedWorkers(ThreadWorkers):
    def __init__(self) -> None:
        super().__init__(lambda rank, start, stopping: rank)
        self.preload = HandPreload()
        self.sources.append(self.preload)

    def preparing(self) -> bool:
        return self.preload.importing()


def test_a_start_waits_until_it_is_preloaded() -> None:
    made = PreloadedWorkers()

    def tell() -> None:
        assert made.preload.asked.wait(TIMEOUT)
        assert made.calls == []
        made.preload.tell()

    with beside(threading.Thread(target=tell)):
        assert outcome(made).return_values == {0: 0}
    assert made.calls[0] == "start"
    made.preload.close()


def test_an_interrupt_ends_an_agent_that_waits_and_nothing_is_started() -> None:
    made = PreloadedWorkers()

    def interrupt() -> None:
        assert made.preload.asked.wait(TIMEOUT)
        os.kill(os.getpid(), signal.SIGINT)

    with beside(threading.Thread(target=interrupt)), pytest.raises(SignalException):
        run_agent(made)
    assert "start" not in made.calls
    made.preload.close()
