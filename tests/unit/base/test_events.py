"""The mailbox, signals that become letters, and the loop thread."""

from __future__ import annotations

import os
import resource
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from rallypoint.base import signals
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


def readable(mailbox: Mailbox[int]) -> bool:
    return bool(select.select([mailbox.fileno()], [], [], 0)[0])


def test_events_come_out_in_order_and_wake_the_reader() -> None:
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


def test_many_writers_lose_nothing() -> None:
    mailbox: Mailbox[int] = Mailbox()

    def post_a_thousand() -> None:
        for number in range(1000):
            mailbox.post(number)

    writers = [threading.Thread(target=post_a_thousand) for _ in range(4)]
    for writer in writers:
        writer.start()
    seen: list[int] = []
    while len(seen) < 4000:
        assert select.select([mailbox.fileno()], [], [], 30)[0], "nothing came for 30 s"
        seen += mailbox.drain()
    for writer in writers:
        writer.join()
    mailbox.close()
    assert sorted(seen) == sorted(list(range(1000)) * 4)


def test_a_signal_becomes_an_event_and_the_previous_handler_is_restored() -> None:
    mailbox: Mailbox[int] = Mailbox()
    previous = signal.getsignal(signal.SIGUSR1)
    with post_signals(mailbox.post, [signal.SIGUSR1]) as wakeup:
        assert wakeup is not None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert select.select([mailbox.fileno()], [], [], 30)[0]
        assert list(mailbox.drain()) == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) == previous
    mailbox.close()


def test_signals_mean_nothing_between_the_end_of_the_handlers_and_that_of_the_block() -> None:
    heard: list[int] = []
    before: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, _: before.append(number))
    try:
        with ignore_signals_at_exit():
            os.kill(os.getpid(), signal.SIGUSR1)
            for _ in range(2):
                with ignore_signals_at_exit(), post_signals(heard.append, [signal.SIGUSR1]):
                    os.kill(os.getpid(), signal.SIGUSR1)
                os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert heard == [signal.SIGUSR1] * 2
    assert before == [signal.SIGUSR1] * 2, "the first and the last"


def test_an_interrupt_is_raised_where_it_may_be_and_wakes_the_sleeper() -> None:
    with post_signals(lambda _: None, []) as wakeup, defer_interrupts() as raise_interrupt:
        assert wakeup is not None
        raise_interrupt()
        signal.raise_signal(signal.SIGINT)
        assert select.select([wakeup.fileno()], [], [], 30)[0], "nobody was woken"
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            raise_interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_nobody_takes_note_of_is_raised_when_it_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_INTERRUPT_TIMEOUT", 0.0)
    with defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_interrupts_are_left_alone_that_are_handled_or_ignored_and_those_of_other_threads() -> None:
    heard: list[int] = []
    with post_signals(heard.append, [signal.SIGINT]), defer_interrupts() as raise_interrupt:
        signal.raise_signal(signal.SIGINT)
        raise_interrupt()
    assert heard == [signal.SIGINT]

    def attempt() -> None:
        with defer_interrupts():
            heard.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert heard == [signal.SIGINT, True]


def test_other_threads_install_no_handlers() -> None:
    def work() -> None:
        with ignore_signals_at_exit():
            entered.set()
            leave.wait(30)

    entered, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(30)
    previous = signal.getsignal(signal.SIGUSR1)
    with post_signals(lambda _: None, [signal.SIGUSR1]):
        pass
    assert signal.getsignal(signal.SIGUSR1) == previous
    leave.set()
    thread.join()


def test_other_threads_install_nothing() -> None:
    outcome: list[SignalWakeup | None] = []

    def attempt() -> None:
        with post_signals(lambda _: None, [signal.SIGUSR1]) as wakeup:
            outcome.append(wakeup)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert outcome == [None]


def test_a_signal_that_another_thread_gets_wakes_who_sleeps_on_the_wakeup() -> None:
    """The kernel need not interrupt the main thread, which runs the handlers; here it cannot."""
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
        assert not select.select([wakeup], [], [], 0)[0], "it is silent again"
    mailbox.close()


def test_names_of_signals() -> None:
    assert signal_name(9) == signal_name(-9) == "SIGKILL"
    assert signal_name(0) == "<N/A>"
    assert signal_number(" SIGTERM ") is signal.SIGTERM
    assert signal_number("SIGNOPE") is None


def test_a_loop_thread_runs_what_it_is_given_and_ends() -> None:
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


def test_a_loop_that_cannot_be_made_holds_up_nobody() -> None:
    loop = LoopThread("test-loop")
    waits: list[Exception] = []

    def ask() -> None:
        try:
            pytest.fail(f"there is {loop.loop}")
        except RuntimeError as error:
            waits.append(error)

    early = partial(pytest.fail, "there is no loop to run on")
    asker = threading.Thread(target=ask, daemon=True)
    with no_descriptors():
        loop.call(early)
        asker.start()
        asker.join(30)
    assert not asker.is_alive(), "it still waits"
    (error,) = waits
    assert isinstance(error, LoopError)
    assert "cannot be created" in str(error)
    with pytest.raises(LoopError, match="cannot be created"):
        loop.submit(nothing())
    with pytest.raises(LoopError, match="cannot be created"):
        loop.call(early)
    assert loop.withdraw(early), "it will not run"
    loop.stop()
    loop.stop()


@contextmanager
def no_descriptors() -> Iterator[None]:
    """In the block this process can open nothing."""
    previous = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, previous[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, previous)
