"""Lets commands on this machine find the agents that run here: each has a socket that names its job.

The socket is an abstract one (unix(7)), so that it disappears with the process, however that ends, and leaves no file.
On systems without them, it is a file in a folder that only its user can open; a left-over one is removed by the next
command or agent that finds it. Laws:

1. It answers only the agent's own user and root.
2. It tells where the job's coordinator can be reached, and the job's token if there is a secret: the command then
   connects to the coordinator. (The secret itself is readable in /proc for the user and for root.)
3. The token never appears in log lines or in lists of jobs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

from rallypoint.base.kernel import remove_socket, socket_address, socket_names, uid_of_peer
from rallypoint.rendezvous.control_plane import LocalJob

_PREFIX = "rallypoint/agent/"
_MAX_ANSWER = 16 * 1024
_TIMEOUT = 1.0
"""Seconds that an agent has to answer."""


class LocalSocket:
    """The socket of this agent. Without a network namespace of its own, or if no name is free, there is none."""

    def __init__(self, answer: Callable[[], LocalJob | None]) -> None:
        """Nothing is opened before `open`.

        Args:
            answer: returns where the job is; None while that is not known.
        """
        self._answer = answer
        self._socket: socket.socket | None = None
        self._listens = False

    def open(self) -> None:
        """Begin to listen."""
        with suppress(OSError):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            self._socket.bind(socket_address(f"{_PREFIX}{os.getpid()}.{os.urandom(4).hex()}"))
            self._socket.listen(16)
            self._listens = True

    def fds(self) -> list[int]:
        """A descriptor that becomes readable when a command connects."""
        # A socket that does not listen would be readable all the time.
        return [self._socket.fileno()] if self._socket is not None and self._listens else []

    def step(self) -> None:
        """Answer pending requests. Does not wait."""
        while self._socket is not None and self._listens:
            try:
                asking, _ = self._socket.accept()
            except OSError:
                return
            with asking, suppress(OSError):
                if uid_of_peer(asking) in {os.getuid(), 0} and (job := self._answer()) is not None:
                    asking.setblocking(False)
                    asking.send("\0".join([*map(str, job), _token_of(job.job)]).encode())

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._socket is not None:
            remove_socket(self._socket.getsockname())
            self._socket.close()
            self._socket, self._listens = None, False


def local_jobs() -> Iterator[LocalJob]:
    """The jobs of agents on this machine that answer this user."""
    return (job for job, _ in _answers())


def local_token(wanted: LocalJob) -> str:
    """The token of one of `local_jobs`, from its agent; empty if it has none. Another job may have the same id."""
    return next((token for job, token in _answers() if job == wanted), "")


def _token_of(job: str) -> str:
    from rallypoint.base.secrets import TOKEN_PREFIX, job_secret, token

    secret = job_secret()
    if secret is None:
        return ""
    return secret.texts[0] if secret.texts[0].startswith(TOKEN_PREFIX) else token(secret, job)


def _answers() -> Iterator[tuple[LocalJob, str]]:
    with suppress(OSError):
        for name in socket_names():
            if name.startswith(_PREFIX) and (answer := _ask(socket_address(name))) is not None:
                yield answer


def _ask(address: str) -> tuple[LocalJob, str] | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(_TIMEOUT)
        try:
            asking.connect(address)
            if uid_of_peer(asking) not in {os.getuid(), 0} and os.getuid() != 0:
                return None
            data = b""
            while len(data) < _MAX_ANSWER and (more := asking.recv(4096)):
                data += more
            pid, job, backend, endpoint, token = data.decode().split("\0")
        except ConnectionRefusedError:  # its agent was killed
            remove_socket(address)
            return None
        except (OSError, ValueError):
            return None
    known = pid.isdecimal() and all(each.isprintable() for each in (job, backend, endpoint, token))
    return (LocalJob(int(pid), job, backend, endpoint), token) if known else None
