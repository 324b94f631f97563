"""A thread for work that must not block another."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rallypoint.base.side_thread import SideThread, start_thread

_DEADLINE = 60.0


@pytest.fixture
def failures() -> list[str]:
    return []


@pytest.fixture
def side(failures: list[str]) -> Iterator[SideThread]:
    thread = SideThread("test", failures.append, limit=3)
    yield thread
    thread.close(_DEADLINE)


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Allow no more threads until the patch is undone."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return monkeypatch


def test_work_runs_in_order_and_errors_are_reported(side: SideThread, failures: list[str]) -> None:
    done: list[int] = []
    assert side.post("first", lambda: done.append(1))
    assert side.post("second", lambda: 1 // 0)
    assert side.post("third", lambda: done.append(3))
    assert side.wait_idle(_DEADLINE)
    assert (done, failures) == ([1, 3], ["second"])


def test_a_full_queue_drops_work(side: SideThread) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        go_on.wait(_DEADLINE)

    assert side.post("hangs", hang)
    assert begun.wait(_DEADLINE)
    assert [side.post("waits", bool) for _ in range(4)] == [True, True, True, False]
    assert side.dropped == 1
    assert side.busy_for() > 0.0
    assert not side.is_idle
    assert len(side.close(0.0)) == 3, "waiting work is returned"
    assert not side.post("late", bool)
    go_on.set()


def test_without_a_thread_work_waits_for_one(no_threads: pytest.MonkeyPatch, side: SideThread) -> None:
    done: list[int] = []
    assert side.post("first", lambda: done.append(1))
    assert not side.wait_idle(0.0)
    assert start_thread(lambda: done.append(9), "test") is None
    no_threads.undo()
    assert side.post("second", lambda: done.append(2))
    assert side.wait_idle(_DEADLINE)
    assert done == [1, 2]
