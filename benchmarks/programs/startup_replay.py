"""Says what was recorded of a start-up (`startup_record`) to a store: plain sockets, one epoll, in C where it can be.

Reads a `Replay` line from standard input and answers it, again and again; ends when standard input does. All
connections are made at once, and each goes through its recorded dialogue as fast as it is answered.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time

from benchmarks.messages import Replay, Replayed, decode, encode, thinned
from benchmarks.programs import raw_drive
from benchmarks.programs.raw_wire import LoadError
from benchmarks.recording import FOLDER, Recording, read
from benchmarks.system import ProcessClock, load_cores, raise_file_limit

_TIMEOUT = 30.0  # seconds without any reply before the load gives up
_CHUNK = 65536
_GET = 3  # the opcode of requests that are answered at once, whatever others do


_library = raw_drive.build()


class _Speaker:
    """One connection and how far its dialogue has come."""

    def __init__(self, messages: list[bytes], replies: list[int], port: int) -> None:
        self._turns = iter(zip(messages, replies, strict=True))
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.connect_ex(("127.0.0.1", port))
        self._missing = 0
        self._sent_at = 0.0
        self._prompt = False

    def speak(self) -> bool:
        """Say the next message; False if there is none."""
        message, self._missing = next(self._turns, (b"", 0))
        if not message:
            return False
        self._prompt = message[0] == _GET
        self._sent_at = time.perf_counter()
        os.write(self.socket.fileno(), message)
        return self._missing > 0 or self.speak()

    def hear(self, latencies: list[float]) -> bool:
        """Take what has come, and say the next message if it is all; False if that was the last.

        Raises:
            LoadError: see there.
        """
        data = os.read(self.socket.fileno(), _CHUNK)
        self._missing -= len(data)
        if not data or self._missing < 0:
            raise LoadError("the server closed the connection or answered more than was recorded")
        if self._missing:
            return True
        if self._prompt:
            latencies.append(time.perf_counter() - self._sent_at)
        return self.speak()


def replay(recording: Recording, order: Replay) -> Replayed:
    """One start-up. Raises LoadError, OSError."""
    server = ProcessClock(order.server_pid)
    used = server.seconds()
    begin = time.perf_counter()
    latencies = _say_in_c(recording, order.port) if _library is not None else _say(recording, order.port)
    return Replayed(time.perf_counter() - begin, thinned(latencies), server.seconds() - used)


def _say_in_c(recording: Recording, port: int) -> list[float]:
    assert _library is not None
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in recording.dialogues]
    for client in clients:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    latencies = raw_drive.replay(_library, [client.fileno() for client in clients], recording.dialogues)
    for client in clients:
        client.close()
    return latencies


def _say(recording: Recording, port: int) -> list[float]:
    latencies: list[float] = []
    speakers = {}
    with select.epoll() as epoll:
        for dialogue in recording.dialogues:
            speaker = _Speaker(dialogue.messages, dialogue.replies, port)
            speakers[speaker.socket.fileno()] = speaker
            epoll.register(speaker.socket, select.EPOLLOUT)
        left = len(speakers)
        while left:
            ready = epoll.poll(_TIMEOUT)
            if not ready:
                raise LoadError(f"the server answered nobody for {_TIMEOUT:.0f} s; {left} connections still wait")
            for descriptor, event in ready:
                speaker = speakers[descriptor]
                if event & select.EPOLLOUT:
                    epoll.modify(descriptor, select.EPOLLIN)
                    left -= not speaker.speak()
                else:
                    left -= not speaker.hear(latencies)
    for speaker in speakers.values():
        speaker.socket.close()
    return latencies


def main() -> None:
    """Answer `Replay` lines until standard input ends."""
    raise_file_limit()
    os.sched_setaffinity(0, load_cores())
    recording = read(FOLDER / "startup-256.xz")
    print("ready", flush=True)
    for line in sys.stdin:
        print(encode(replay(recording, decode(line, Replay))).decode(), flush=True)


if __name__ == "__main__":
    main()
