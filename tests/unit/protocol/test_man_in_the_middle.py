"""An attacker between a node and the coordinator reads, changes, repeats, drops and adds frames."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rallypoint.base.endpoint import Endpoint
from rallypoint.base.secrets import Secret, new_secret, token
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.coordinator.jobs import ManyJobs
from rallypoint.control.membership.state import Close, NodeInfo, Settings
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, FrameReader, frame
from rallypoint.control.protocol.handshake import Challenge, Welcome
from rallypoint.control.protocol.messages import JobEnded, JoinRequest, LinkDown, LinkLost, Placed
from tests.unit.coordinator.sockets import TIMEOUT, Heard, linked, serving

JOB = Settings("job", 1, 1, join_timeout=TIMEOUT)
SECRET = Secret((new_secret(),))

Change = Callable[[bytes, int, int], list[bytes]]
"""Takes a frame, whether it goes to the node (1) or from it (0), and its number. Returns the frames to pass on."""


def as_it_is(payload: bytes, _to_node: int, _number: int) -> list[bytes]:
    return [payload]


class Between:
    """Changes the frames of one connection after another."""

    def __init__(self, port: int, change: Change) -> None:
        self._target = Endpoint("127.0.0.1", port)
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.ended = threading.Event()
        """Set when a connection to the coordinator ends."""
        self._open: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                node, _ = self._listener.accept()
                coordinator = socket.create_connection(self._target)
                self._open += [node, coordinator]
                for to_node, (source, target) in enumerate(((node, coordinator), (coordinator, node))):
                    thread = threading.Thread(target=self._pass, args=(source, target, to_node))
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, source: socket.socket, target: socket.socket, to_node: int) -> None:
        frames, number = FrameReader(), 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                for payload in frames.feed(data):
                    magic = b"" if number else MAGIC
                    target.sendall(magic + b"".join(map(frame, self._change(payload, to_node, number))))
                    number += 1
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        if to_node:
            self.ended.set()

    def close(self) -> None:
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(TIMEOUT)
        for connection in self._open:
            connection.close()


@contextmanager
def between(change: Change, key: bytes | None) -> Iterator[Between]:
    keys = None if key is None else lambda _job: (key,)
    with serving(Dispatcher(JOB), keys) as server, contextlib.closing(Between(server.port, change)) as middle:
        yield middle


@contextmanager
def joining(port: int, key: bytes | None, job: Settings = JOB) -> Iterator[Heard]:
    told = Heard()
    with linked(port, job, told.take, key=key) as link:
        link.send(JoinRequest(NodeInfo("default", 1, "", 7000), TIMEOUT))
        yield told


KEY = SECRET.keys("job")[0]


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "secret"])
def test_passing_frames_on_is_not_noticed(key: bytes | None) -> None:
    with between(as_it_is, key) as middle, joining(middle.port, key) as told:
        assert isinstance(told.get(timeout=TIMEOUT), Placed)


def close_added(payload: bytes, to_node: int, number: int) -> list[bytes]:
    """Add a request that ends the job after the node's join."""
    return [payload, codec.encode(Close())] if not to_node and number == 2 else [payload]


def test_without_a_secret_an_added_frame_ends_the_job() -> None:
    """If this fails, the test below proves nothing."""
    with between(close_added, None) as middle, joining(middle.port, None) as told:
        assert isinstance(told.get(timeout=TIMEOUT), Placed)
        assert isinstance(told.get(timeout=TIMEOUT), JobEnded)


def to_coordinator(change: Callable[[bytes], list[bytes]]) -> Change:
    """Change the node's join."""
    return lambda payload, to_node, number: change(payload) if not to_node and number == 2 else [payload]


def sent_back(payload: bytes, to_node: int, number: int) -> list[bytes]:
    """Repeat the coordinator's first message of the session."""
    return [payload, payload] if to_node and number == 2 else [payload]


@pytest.mark.parametrize(
    "change",
    [
        close_added,
        to_coordinator(lambda payload: [payload, payload]),
        to_coordinator(lambda payload: [payload[:-1] + bytes([payload[-1] ^ 1])]),
        to_coordinator(lambda _payload: []),
        sent_back,
    ],
    ids=["added", "repeated", "changed", "left out", "sent back"],
)
def test_a_manipulated_frame_ends_the_connection_and_not_the_job(change: Change) -> None:
    with between(change, KEY) as middle, joining(middle.port, KEY) as told:
        while not isinstance(notice := told.get(timeout=TIMEOUT), LinkDown):
            assert not isinstance(notice, JobEnded)
        assert middle.ended.wait(TIMEOUT)


def greeting_changed(payload: bytes, to_node: int, number: int) -> list[bytes]:
    """Put another job's name, of the same length, into the Hello."""
    return [payload.replace(b"job", b"jab", 1)] if not to_node and number == 0 else [payload]


def test_a_changed_greeting_is_refused() -> None:
    with (
        serving(ManyJobs(), SECRET.keys) as server,
        contextlib.closing(Between(server.port, greeting_changed)) as middle,
        joining(middle.port, KEY) as told,
    ):
        lost = told.get(timeout=TIMEOUT)
        assert isinstance(lost, LinkLost)
        assert "RALLYPOINT_SECRET" in lost.detail


def test_a_token_is_valid_for_one_job() -> None:
    mine = Secret((token(SECRET, "job"),))
    with serving(ManyJobs(), SECRET.keys) as server:
        with joining(server.port, mine.keys("job")[0]) as told:
            assert isinstance(told.get(timeout=TIMEOUT), Placed)
        other = JOB._replace(run_id="other")
        with joining(server.port, mine.keys("other")[0], other) as told:
            assert isinstance(told.get(timeout=TIMEOUT), LinkLost)


@pytest.mark.parametrize("skips_challenge", [False, True])
def test_a_server_without_the_secret_is_refused_and_learns_nothing(skips_challenge: bool) -> None:
    """It greets and welcomes every node, like a host that took over the address."""
    listener = socket.create_server(("127.0.0.1", 0))
    seen: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
    welcome = codec.encode(Welcome(3.0, "server-0"))

    def serve() -> None:
        node, _ = listener.accept()
        with node:
            frames = FrameReader()
            got: list[bytes] = []
            while not got:
                got += frames.feed(node.recv(65536))
            if skips_challenge:
                node.sendall(MAGIC + frame(welcome))
            else:
                node.sendall(MAGIC + frame(codec.encode(Challenge(b"n" * 16))))
                while len(got) < 2:
                    got += frames.feed(node.recv(65536))
                node.sendall(frame(welcome))
            seen.put(got)
            node.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    with listener, joining(listener.getsockname()[1], KEY) as told:
        lost = told.get(timeout=TIMEOUT)
        assert isinstance(lost, LinkLost)
        assert ("unexpected" if skips_challenge else "could not prove") in lost.detail
    thread.join(TIMEOUT)
    assert not any(KEY in each for each in seen.get(timeout=TIMEOUT))
