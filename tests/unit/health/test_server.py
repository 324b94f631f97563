"""The health server over real sockets, and the progress of an agent."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rallypoint.base import http_server
from rallypoint.base.loop import LoopThread
from rallypoint.observe.health import HealthCheckServer, ProgressProbe, requested_port
from tests.unit.clocks import HandClock

TIMEOUT = 120.0


async def _nothing() -> None:
    return


@pytest.fixture(name="loop")
def _loop() -> Iterator[LoopThread]:
    loop_once = LoopThread("first")  # uvloop keeps some files for the process when the first loop is made
    loop_once.submit(_nothing()).result()
    loop_once.stop()
    files = len(os.listdir("/proc/self/fd"))
    loop = LoopThread("health-test")
    yield loop
    loop.stop()
    assert len(os.listdir("/proc/self/fd")) <= files


@contextlib.contextmanager
def serving_on(loop: LoopThread, alive: Callable[[], float] = time.time, timeout: float = 60) -> Iterator[int]:
    server = HealthCheckServer(alive, 0, timeout, lambda: {"state": "HEALTHY"}, loop)
    server.start()
    try:
        yield server.port
    finally:
        server.stop()
        server.stop()
    with pytest.raises(ConnectionRefusedError):
        dial(server.port)


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), TIMEOUT)


def get(port: int, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def sent_back(port: int, data: bytes) -> bytes:
    with dial(port) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: sock.recv(65536), b""))


def test_an_error_of_the_callback_is_503(loop: LoopThread) -> None:
    def broken() -> float:
        raise OSError("no watchdog")

    with serving_on(loop, broken) as port:
        code, body = get(port, "/healthz")
        assert code == 503
        assert json.loads(body)["trouble"] == "the agent cannot be queried (OSError: no watchdog)"


def test_repeated_starts(loop: LoopThread) -> None:
    server = HealthCheckServer(time.time, 0, 60, loop=loop)
    for _ in range(3):
        server.start()
        port = server.port
        server.start()
        assert server.port == port
        assert get(port, "/healthz")[0] == 200
        server.stop()
        assert server.port == 0


@pytest.mark.parametrize(("timeout", "status"), [(0, 503), (60, 200)])
def test_a_busy_agent(loop: LoopThread, timeout: float, status: int) -> None:
    """The server answers in the agent's place."""
    probe = ProgressProbe()
    probe.going_to_sleep(float("inf"), {})
    probe.on_wake()
    with serving_on(loop, probe.last_progress, timeout=timeout) as port:
        assert get(port, "/healthz")[0] == status


@pytest.mark.parametrize(
    ("data", "first"),
    [
        (b"", b""),
        (b"GET /healthz HTTP/1.1\r\n", b""),
        (b"\x16\x03\x01\x00\xa5\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET /healthz HTTP/1.1\r\nA: " + b"a" * 20000 + b"\r\n\r\n", b"HTTP/1.1 431 "),
        (b"x" * 30000, b"HTTP/1.1 431 "),
        (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 "),
        (b"GET /healthz HTTP/1.1\r\n\r\n" * 100, b"HTTP/1.1 200 "),
    ],
)
def test_strange_bytes(loop: LoopThread, data: bytes, first: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with serving_on(loop) as port:
        reply = sent_back(port, data)
        assert reply[: len(first)] == first
        assert (reply == b"") == (first == b"")
        assert get(port, "/healthz")[0] == 200
    assert caplog.records == []


def test_resets_and_floods(loop: LoopThread, caplog: pytest.LogCaptureFixture) -> None:
    with serving_on(loop) as port:
        for data in (b"", b"GET /hea", b"GET /healthz HTTP/1.1\r\n\r\n"):
            for _ in range(50):
                with dial(port) as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    sock.sendall(data)
        with dial(port) as sock, pytest.raises(ConnectionError):
            sock.sendall(bytes(64 * 1024 * 1024))  # more than all buffers hold
        assert get(port, "/healthz")[0] == 200
    assert caplog.records == []


def test_many_silent_connections(loop: LoopThread) -> None:
    """The oldest connections are closed for new ones."""
    with serving_on(loop) as port, contextlib.ExitStack() as crowd:
        silent = [crowd.enter_context(dial(port)) for _ in range(3 * http_server._MAX_CONNECTIONS)]
        assert get(port, "/healthz")[0] == 200
        ended = [sock for sock in silent[: http_server._MAX_CONNECTIONS] if sock.recv(1) == b""]
        assert len(ended) == http_server._MAX_CONNECTIONS


def test_silent_connections_are_closed(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as crowd:
        with serving_on(loop) as port:
            silent = [crowd.enter_context(dial(port)) for _ in range(10)]
            assert get(port, "/healthz")[0] == 200
        assert [sock.recv(1) for sock in silent] == [b""] * 10
    monkeypatch.setattr(http_server, "_REQUEST_TIMEOUT", 0.1)
    with serving_on(loop) as port, dial(port) as sock:
        sock.sendall(b"GET /healthz")
        assert sock.recv(1) == b""


def test_a_loop_that_hangs_does_not_block_the_agent(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rallypoint.observe.health._CLOSE_TIMEOUT", 0.1)
    stuck, free = threading.Event(), threading.Event()

    def hang() -> None:
        stuck.set()
        free.wait(TIMEOUT)

    server = HealthCheckServer(time.time, 0, 60, loop=loop)
    server.start()
    assert get(server.port, "/healthz")[0] == 200
    loop.call(hang)
    assert stuck.wait(TIMEOUT)
    server.stop()
    assert "is stuck" in caplog.text
    free.set()


@pytest.mark.parametrize(
    ("text", "port"), [("8080", 8080), ("0", 0), ("", None), ("x", None), ("-1", None), ("65536", None)]
)
def test_requested_port(text: str, port: int | None, caplog: pytest.LogCaptureFixture) -> None:
    assert requested_port({"TORCHELASTIC_HEALTH_CHECK_PORT": text}) == port
    assert (repr(text) in caplog.text) == (port is None and text != "")


@pytest.mark.process
def test_the_package_is_light_until_it_serves() -> None:
    from tests.unit.test_imports_at_start import imported_by

    assert "asyncio" not in imported_by("import rallypoint.observe.health")


def test_progress_of_an_agent() -> None:
    clock = HandClock(100.0)
    probe = ProgressProbe(clock)
    clock.now += 2
    assert (probe.age(), probe.status()) == (2.0, {}), "before the first sleep it is awake"
    probe.going_to_sleep(math.inf, {"state": "HEALTHY"})
    clock.now += 1e6
    assert (probe.age(), probe.status()) == (0.0, {"state": "HEALTHY"})
    assert abs(probe.last_progress() - time.time()) < 60
    probe.on_wake()
    clock.now += 7
    assert (probe.age(), probe.status()) == (7.0, {"state": "HEALTHY"})
    probe.going_to_sleep(clock.now + 10, {"state": "STOPPED"})
    assert probe.age() == 0.0
    clock.now += 9
    assert probe.age() == 0.0
    clock.now += 4
    assert probe.age() == 3.0, "it sleeps longer than it should"
