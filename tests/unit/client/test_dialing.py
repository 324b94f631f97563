"""Dialing a control server by name: slow look-ups, and names with several addresses."""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from logging.handlers import QueueHandler
from typing import Any, TypeVar

import pytest

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import Endpoint
from rallypoint.control.client import dialing
from rallypoint.control.client.dialing import Dialer, DialTarget, FixedEndpoint
from rallypoint.control.client.tcp_link import TcpLink
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.membership.state import NodeId, Settings, recovery_timeout
from tests.busy_port import busy_port
from tests.ports import free_port
from tests.unit.coordinator.sockets import serving

T = TypeVar("T")
SETTINGS = Settings("job", 1, 1)


class Resolving(asyncio.SelectorEventLoop):
    """A loop with a slow resolver that has several addresses for a name."""

    def __init__(self, addresses: list[str]) -> None:
        super().__init__()
        self.addresses = addresses
        self.looked_up = 0
        self.answer = asyncio.Event()
        self.connected: list[str] = []
        """The dialed addresses."""

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        self.connected.append(address[0])
        await super().sock_connect(sock, address)

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        """Answer once `answer` is set."""
        if host != "control":
            return await super().getaddrinfo(host, port, **options)
        self.looked_up += 1
        await self.answer.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.addresses]


def play(addresses: list[str], script: Callable[[Resolving], Coroutine[Any, Any, T]]) -> T:
    loop = Resolving(addresses)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(script(loop))


def dialer_to(port: int) -> Dialer:
    return Dialer(DialTarget(Endpoint("control", port)), SETTINGS)


@contextmanager
def served() -> Iterator[int]:
    with serving(Dispatcher(SETTINGS)) as server:
        yield server.port


def test_a_slow_look_up_serves_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "_LOOK_UP", 0.05)
    with served() as port:

        async def script(loop: Resolving) -> int:
            dialer = dialer_to(port)
            with pytest.raises(TimeoutError, match="the lookup of the name 'control' was not answered"):
                await dialer.dial(5.0)
            loop.answer.set()
            session = await dialer.dial(5.0)
            session.writer.close()
            return loop.looked_up

        assert play(["127.0.0.1"], script) == 1


def test_a_look_up_does_not_use_up_the_attempts_time() -> None:
    with served() as port:

        async def script(loop: Resolving) -> None:
            dialer = dialer_to(port)
            loop.call_later(1.5, loop.answer.set)
            session = await dialer.dial(1.0)
            session.writer.close()

        play(["127.0.0.1"], script)


def test_all_addresses_are_tried_and_silent_ones_last() -> None:
    with served() as port, busy_port("127.0.0.2", port):

        async def script(loop: Resolving) -> None:
            loop.answer.set()
            dialer = dialer_to(port)
            first = await dialer.dial(1.0)
            assert loop.connected == ["127.0.0.2", "127.0.0.1"]
            second = await dialer.dial(1.0)
            assert loop.connected[2:] == ["127.0.0.1"]
            for session in (first, second):
                session.writer.close()

        play(["127.0.0.2", "127.0.0.1"], script)


def test_a_cancelled_attempt_continues_with_the_next_address() -> None:
    with served() as port, busy_port("127.0.0.2", port):

        async def script(loop: Resolving) -> None:
            loop.answer.set()
            dialer = dialer_to(port)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await dialer.dial(3600.0)
            assert dialer.unfinished == "127.0.0.2 does not answer a TCP connection"
            session = await asyncio.wait_for(dialer.dial(3600.0), 20.0)
            session.writer.close()

        play(["127.0.0.2", "127.0.0.1"], script)


@pytest.mark.parametrize("is_silent", [False, True])
def test_failed_attempts_name_all_addresses(is_silent: bool) -> None:
    port = free_port()

    async def script(loop: Resolving) -> OSError:
        loop.answer.set()
        with pytest.raises(OSError, match="127") as caught:
            await dialer_to(port).dial(0.2)
        return caught.value

    with busy_port("127.0.0.2", port) if is_silent else nullcontext():
        error = play(["127.0.0.2", "127.0.0.1"], script)
    assert isinstance(error, ConnectionRefusedError) != is_silent, "a refusal if all addresses refuse"
    first = "127.0.0.2 does not answer a TCP connection" if is_silent else "Connection refused"
    assert f"127.0.0.2: {first}; 127.0.0.1: Connection refused" in str(error)


def test_a_silent_server_is_logged_during_the_first_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "_CONNECT_FIRST", 1000.0)  # the first attempt outlasts this test
    endpoint = Endpoint("127.0.0.2", free_port())
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = QueueHandler(lines)
    logging.getLogger("rallypoint").addHandler(handler)
    with busy_port(*endpoint):
        place = FixedEndpoint(DialTarget(endpoint))
        link = TcpLink(place, SETTINGS, NodeId("", 1, 0), lambda _notice: None, Deadline.after(1000.0))
        try:
            line = lines.get(timeout=50.0).getMessage()  # an attempt ends after 60 s in any case
        finally:
            logging.getLogger("rallypoint").removeHandler(handler)
            link.close()
    assert line.startswith(
        f"waiting for the control plane at {endpoint} (127.0.0.2 does not answer a TCP connection); check "
        "--rdzv-endpoint, and that the node that hosts it has started; giving up in "
    )


@pytest.mark.parametrize("lease", [0.5, 1.0, 3.0, 60.0])
def test_a_node_leaves_a_busy_server_before_it_is_lost_elsewhere(lease: float) -> None:
    settings = Settings("job", 1, 2, lease=lease)
    assert 0.0 < dialing.patience(settings) <= min(12.0, recovery_timeout(settings) - 2.0)
