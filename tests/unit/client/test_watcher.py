"""A watcher limits the data of a control plane that sends nonsense."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from rallypoint.base.endpoint import Endpoint
from rallypoint.control.client.dialing import ClientSession, DialTarget
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.messages import CollectedPart
from rallypoint.observe.watching import client as watcher_module
from rallypoint.observe.watching.client import UnreachableError, WatcherSession
from rallypoint.observe.watching.messages import JobList, JobPhase, JobSummary

KIB = 1024


class Lying(ClientSession):
    """A control plane that sends these messages."""

    def __init__(self, told: Iterator[object]) -> None:
        self._told = told
        self.sent = 0

    async def receive(self) -> bytes:
        return codec.encode(next(self._told))

    def send(self, payload: bytes) -> None:
        self.sent += 1


def watching(told: Iterator[object]) -> WatcherSession:
    session = WatcherSession(DialTarget(Endpoint("h", 1)), "job")
    session._session = Lying(told)
    return session


async def until_refused(session: WatcherSession) -> int:
    """The number of messages before one is refused as too much."""
    for taken in itertools.count():
        try:
            await session.receive()
        except UnreachableError as error:
            return taken if "sent more data than a control plane can send" in str(error) else -1
    raise AssertionError


LISTED = JobList((JobSummary("x" * 4000, JobPhase.RUNNING, 1, 2, 3),) * 5, is_last=False)


@pytest.mark.parametrize(
    ("told", "taken"),
    [
        ((CollectedPart(1, bytes(32 * KIB), False, "n0") for _ in range(1 << 20)), 32),
        ((CollectedPart(1, bytes(32 * KIB), False, f"n{number}") for number in range(1 << 20)), 32),
        ((LISTED for _ in range(1 << 20)), 0),
    ],
    ids=["of one node", "of many nodes", "a list of jobs"],
)
def test_endless_answers_are_refused(told: Iterator[object], taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "_MAX_COLLECTED", 1024 * KIB)
    monkeypatch.setattr(watcher_module, "_MAX_LIST", 100 * KIB)
    assert asyncio.run(until_refused(watching(told))) in range(min(taken, 1), taken + 1)


def test_complete_answers_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "_MAX_COLLECTED", 100 * KIB)
    parts = (CollectedPart(1, bytes(32 * KIB), number % 2 == 1, f"n{number // 2}") for number in range(100))
    session = watching(parts)

    async def run() -> None:
        for _ in range(100):
            await session.receive()

    asyncio.run(run())
    assert session._unfinished_size == 0
