"""How a node finds a control server by name: slow look-ups, and names with several addresses."""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
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
from rallypoint.control.protocol.messages import Notification
from tests.ports import free_port
from tests.unit.coordinator.sockets import serving

T = TypeVar("T")
SETTINGS = Settings("job", 1, 1)


class Resolving(asyncio.SelectorEventLoop):
    """A loop on a machine whose resolver is slow, and knows a name by several addresses."""

    def __init__(self, addresses: list[str]) -> None:
        super().__init__()
        self.addresses = addresses
        self.looked_up = 0
        self.answer = asyncio.Event()
        self.connected: list[str] = []
        """The addresses to which a connection was begun."""

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        self.connected.append(address[0])
        await super().sock_connect(sock, address)

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        """Answers once it is told to."""
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


@contextmanager
def silent(address: str, port: int) -> Iterator[None]:
    """Whoever connects there gets no answer: the queue of a service that takes nobody is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(0)
        while True:
            caller = stack.enter_context(socket.socket())
            caller.settimeout(0.2)
            try:
                caller.connect((address, port))
            except TimeoutError:
                break
        yield


def test_a_look_up_that_takes_longer_than_an_attempt_serves_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_look_up_has_time_of_its_own() -> None:
    with served() as port:

        async def script(loop: Resolving) -> None:
            dialer = dialer_to(port)
            loop.call_later(1.5, loop.answer.set)
            session = await dialer.dial(1.0)
            session.writer.close()

        play(["127.0.0.1"], script)


def test_each_address_of_a_name_is_tried_and_the_silent_one_last() -> None:
    with served() as port, silent("127.0.0.2", port):

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


def test_an_attempt_that_is_cut_short_at_a_silent_address_goes_on_with_the_next() -> None:
    with served() as port, silent("127.0.0.2", port):

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


def test_when_no_address_answers_each_is_named() -> None:
    port = free_port()

    async def script(loop: Resolving) -> str:
        loop.answer.set()
        with pytest.raises(OSError, match="127") as caught:
            await dialer_to(port).dial(0.2)
        return str(caught.value)

    with silent("127.0.0.2", port):
        sentence = play(["127.0.0.2", "127.0.0.1"], script)
    assert "127.0.0.2: 127.0.0.2 does not answer a TCP connection; 127.0.0.1: Connection refused" in sentence


def test_a_server_that_does_not_answer_is_told_of_before_the_attempt_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "_CONNECT_FIRST", 1000.0)  # the first attempt outlasts this test
    port = free_port()
    told: queue.SimpleQueue[Notification] = queue.SimpleQueue()
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = QueueHandler(lines)
    logging.getLogger("rallypoint").addHandler(handler)
    with silent("127.0.0.2", port):
        link = TcpLink(
            FixedEndpoint(DialTarget(Endpoint("127.0.0.2", port))),
            SETTINGS,
            NodeId("", 1, 0),
            told.put,
            Deadline.after(1000.0),
        )
        try:
            line = lines.get(timeout=50.0).getMessage()  # an attempt ends after 60 s in any case
        finally:
            logging.getLogger("rallypoint").removeHandler(handler)
            link.close()
    assert line.startswith(
        f"waiting for the control plane at 127.0.0.2:{port} (127.0.0.2 does not answer a TCP connection); check "
        "--rdzv-endpoint, and that the node that hosts it has started; giving up in "
    )


def test_when_all_addresses_refuse_that_is_a_refusal() -> None:
    port = free_port()

    async def script(loop: Resolving) -> None:
        loop.answer.set()
        with pytest.raises(ConnectionRefusedError, match=r"127\.0\.0\.2: .*127\.0\.0\.1: "):
            await dialer_to(port).dial(5.0)

    play(["127.0.0.2", "127.0.0.1"], script)


@pytest.mark.parametrize("lease", [0.5, 1.0, 3.0, 60.0])
def test_a_server_that_seems_busy_is_left_before_another_one_takes_this_node_for_lost(lease: float) -> None:
    settings = Settings("job", 1, 2, lease=lease)
    assert 0.0 < dialing.patience(settings) <= min(12.0, recovery_timeout(settings) - 2.0)
