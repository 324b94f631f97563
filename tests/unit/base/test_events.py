"""The mailbox, signals as events, and the loop thread."""

from __future__ import annotations

import math
import os
import select
import signal
import threading
from functools import partial

import pytest

from rallypoint.base import signals
from rallypoint.base.kernel import until_readable
from rallypoint.base.loop import LoopError, LoopThread
from rallypoint.base.mailbox import Mailbox
from rallypoint.base.signals import (
    SignalWakeup,
    defer_interrupts,
    ignore_signals_at_exit,
    post_signals,
    signal_name,
    signal_number,
)
from tests.processes import no_descriptors
from tests.waiting import in_thread


def readable(mailbox: Mailbox[int]) -> bool:
    return bool(select.select([mailbox.fileno()], [], [], 0)[0])


def test_mailbox() -> None:
    mailbox: Mailbox[int] = Mailbox()
    assert not readable(mailbox)
    mailbox.post(1)
    mailbox.post(2)
    assert readable(mailbox)
    assert list(mailbox.drain()) == [1, 2]
    assert not readable(mailbox)
    mailbox.close()
    mailbox.close()
    mailbox.post(3)


def test_a_mailbox_with_several_writers() -> None:
    mailbox: Mailbox[int] = Mailbox()

    def post_a_thousand() -> None:
        for number in range(1000):
            mailbox.post(number)

    writers = [in_thread(post_a_thousand) for _ in range(4)]
    seen: list[int] = []
    while len(seen) < 4000:
        assert select.select([mailbox.fileno()], [], [], 30)[0], "nothing came for 30 s"
        seen += mailbox.drain()
    for writer in writers:
        writer()
    mailbox.close()
    assert sorted(seen) == sorted(list(range(1000)) * 4)


def test_signals_become_events() -> None:
    mailbox: Mailbox[int] = Mailbox()
    previous = signal.getsignal(signal.SIGUSR1)
    with post_signals(mailbox.post, [signal.SIGUSR1]) as wakeup:
        assert wakeup is not None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert select.select([mailbox.fileno()], [], [], 30)[0]
        assert list(mailbox.drain()) == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) == previous
    mailbox.close()


def test_ignore_signals_at_exit() -> None:
    received: list[int] = []
    before: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, _: before.append(number))
    try:
        with ignore_signals_at_exit():
            os.kill(os.getpid(), signal.SIGUSR1)
            for _ in range(2):
                with ignore_signals_at_exit(), post_signals(received.append, [signal.SIGUSR1]):
                    os.kill(os.getpid(), signal.SIGUSR1)
                os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert received == [signal.SIGUSR1] * 2
    assert before == [signal.SIGUSR1] * 2, "the first and the last"


def test_deferred_interrupts_wake_the_main_thread() -> None:
    with post_signals(lambda _: None, []) as wakeup, defer_interrupts() as raise_interrupt:
        assert wakeup is not None
        raise_interrupt()
        signal.raise_signal(signal.SIGINT)
        assert select.select([wakeup.fileno()], [], [], 30)[0], "nobody was woken"
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            raise_interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_repeated_interrupt_is_raised_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_INTERRUPT_TIMEOUT", 0.0)
    with defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_defer_interrupts_keeps_other_handlers() -> None:
    received: list[int] = []
    with post_signals(received.append, [signal.SIGINT]), defer_interrupts() as raise_interrupt:
        signal.raise_signal(signal.SIGINT)
        raise_interrupt()
    assert received == [signal.SIGINT]

    def attempt() -> bool:
        with defer_interrupts():
            return signal.getsignal(signal.SIGINT) is signal.default_int_handler

    assert in_thread(attempt)()


def test_other_threads_install_no_handlers() -> None:
    def work() -> SignalWakeup | None:
        with post_signals(lambda _: None, [signal.SIGUSR1]) as wakeup, ignore_signals_at_exit():
            entered.set()
            leave.wait(30)
        return wakeup

    entered, leave = threading.Event(), threading.Event()
    wakeup = in_thread(work)
    assert entered.wait(30)
    previous = signal.getsignal(signal.SIGUSR1)
    with post_signals(lambda _: None, [signal.SIGUSR1]):
        pass
    assert signal.getsignal(signal.SIGUSR1) == previous
    leave.set()
    assert wakeup() is None


def test_a_signal_to_another_thread_wakes_the_main_thread() -> None:
    """The kernel may not interrupt the main thread, which runs the handlers; here it cannot."""
    mailbox: Mailbox[int] = Mailbox()
    sleeps, ended = threading.Event(), threading.Event()

    def get_one() -> None:
        assert sleeps.wait(30)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        ended.wait(30)

    other = threading.Thread(target=get_one)
    other.start()
    with post_signals(mailbox.post, [signal.SIGUSR1]) as wakeup:
        assert wakeup is not None
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        try:
            sleeps.set()
            assert select.select([wakeup.fileno(), mailbox.fileno()], [], [], 30)[0], "nobody was woken"
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
            ended.set()
            other.join()
        wakeup.clear()
        wakeup.clear()
        assert list(mailbox.drain()) == [signal.SIGUSR1]
        assert not select.select([wakeup], [], [], 0)[0]
    mailbox.close()


def test_signal_names() -> None:
    assert signal_name(9) == signal_name(-9) == "SIGKILL"
    assert signal_name(0) == "<N/A>"
    assert signal_number(" SIGTERM ") is signal.SIGTERM
    assert signal_number("SIGNOPE") is None


@pytest.mark.parametrize("seconds", [1e7, 1e12, 1e300, math.inf])
def test_no_timeout_is_too_long(seconds: float) -> None:
    fd = os.eventfd(1)
    until_readable([fd], seconds)
    os.close(fd)


def test_loop_thread() -> None:
    loop = LoopThread("test-loop")
    ran = threading.Event()
    loop.call(ran.set)
    assert ran.wait(30)

    async def answer() -> int:
        return 42

    assert loop.submit(answer()).result(30) == 42
    loop.stop()
    loop.stop()
    loop.call(lambda: pytest.fail("ran on a loop that has ended"))
    assert "test-loop" not in {thread.name for thread in threading.enumerate()}


async def nothing() -> None:
    return


def test_a_loop_that_cannot_be_created_blocks_nobody() -> None:
    loop = LoopThread("test-loop")
    early = partial(pytest.fail, "there is no loop to run on")
    with no_descriptors():
        loop.call(early)
        loop_of = in_thread(lambda: loop.loop)
        with pytest.raises(LoopError, match="cannot be created"):
            loop_of()
    with pytest.raises(LoopError, match="cannot be created"):
        loop.submit(nothing())
    with pytest.raises(LoopError, match="cannot be created"):
        loop.call(early)
    assert loop.withdraw(early)
    loop.stop()
    loop.stop()
