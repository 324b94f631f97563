"""The server for commands to a job without other nodes: if it cannot start, the job does not need it."""

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


def test_it_serves_from_the_first_call_on(server: CommandServer, dispatcher: Dispatcher) -> None:
    server.serve()
    server.serve()
    assert phase_at(server) == "waiting"
    server.close("the job has ended")
    server.serve()


def test_without_a_loop_nothing_else_is_lost(
    server: CommandServer, dispatcher: Dispatcher, timer: TimerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = dispatcher.on_change

    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as lacking:
        lacking.setattr(loop_module, "_new_event_loop", refuse)
        with pytest.raises(LoopError, match="Too many open files"):
            server.serve()
    assert dispatcher.on_change == ticks, "the pause before a restart still ends"
    assert not timer._closed
    assert shared_loop().loop.is_running(), "it is another one"
    server.serve()
    assert phase_at(server) == "waiting"


def test_without_a_descriptor_for_connections_nothing_else_is_lost(
    server: CommandServer, dispatcher: Dispatcher, timer: TimerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = dispatcher.on_change

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as lacking:
        lacking.setattr(connection, "Connections", refuse)
        with pytest.raises(LoopError, match="limit of open files"):
            server.serve()
    assert dispatcher.on_change == ticks
    assert not timer._closed
    server.serve()
    assert phase_at(server) == "waiting"
