"""The server for commands to a job without other nodes, which the job does not need."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator

import pytest

from rallypoint.base import loop as loop_module
from rallypoint.base.endpoint import parse_endpoint
from rallypoint.base.loop import LoopError, shared_loop
from rallypoint.control.client.dialing import DialTarget
from rallypoint.control.coordinator import connection
from rallypoint.control.coordinator.dispatcher import Dispatcher, TimerThread
from rallypoint.control.membership.state import Settings
from rallypoint.observe.watching.client import open_session
from rallypoint.observe.watching.messages import WatchRequest
from rallypoint.rendezvous.backends.command_server import CommandServer


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher(Settings("job", 1, 1, restart_backoff=1.0))


@pytest.fixture
def timer(dispatcher: Dispatcher) -> TimerThread:
    return TimerThread(dispatcher)


@pytest.fixture
def server(dispatcher: Dispatcher, timer: TimerThread) -> Iterator[CommandServer]:
    made = CommandServer(dispatcher, None, timer)
    yield made
    made.close("the test ends")


def phase_at(server: CommandServer) -> str:
    async def ask() -> str:
        where = [DialTarget(parse_endpoint(server.endpoint, None))]
        async with await open_session(where, "job") as session:
            return (await session.snapshot(WatchRequest())).phase.value

    return asyncio.run(ask())


def test_a_server_starts_with_the_first_call(server: CommandServer, dispatcher: Dispatcher) -> None:
    server.serve()
    server.serve()
    assert phase_at(server) == "waiting"
    server.close("the job has ended")
    server.serve()


@pytest.mark.parametrize(
    ("place", "error"),
    [((loop_module, "_new_event_loop"), "Too many open files"), ((connection, "Connections"), "limit of open files")],
    ids=["no loop", "no connections"],
)
def test_the_job_survives_a_server_that_cannot_start(
    place: tuple[object, str],
    error: str,
    server: CommandServer,
    dispatcher: Dispatcher,
    timer: TimerThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = dispatcher.on_change

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as lacking:
        lacking.setattr(*place, refuse)
        with pytest.raises(LoopError, match=error):
            server.serve()
    assert dispatcher.on_change == ticks, "the pause before a restart still ends"
    assert not timer._closed
    assert shared_loop().loop.is_running()
    server.serve()
    assert phase_at(server) == "waiting"
