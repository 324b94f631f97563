"""Lets commands on this machine find the agents that run here: each has a socket that names its job.

The socket is an abstract one (unix(7)), so that it disappears with the process, however that ends, and leaves no file.
Laws:

1. It answers only the agent's own user and root.
2. It tells where the job's coordinator can be reached, and the job's token if there is a secret: the command then
   connects to the coordinator. (The secret itself is readable in /proc for the user and for root.)
3. The token never appears in log lines or in lists of jobs.
4. An agent of this user that is there but does not answer in time is named: its job is not denied in silence.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from rallypoint.agent.sources import Source
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger, printable
from rallypoint.rendezvous.handler import LocalJob

if TYPE_CHECKING:
    from rallypoint.agent.workers import WorkerController

_log = get_logger(__name__)

_PREFIX = "rallypoint/agent/"
_MAX_ANSWER = 16 * 1024
_FIELDS = len(LocalJob._fields)
"""All but the user, and the token."""
_TIMEOUT = 5.0
"""Seconds that all agents have to answer. On a machine with no processor to spare an agent takes more than one."""
_BUSY_TIMEOUT, _RETRY = 0.1, 0.01
"""Seconds for which an agent is asked again that too many are asking already, and from one time to the next."""


class LocalSocket(Source):
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
            self._socket.bind(_address(f"{_PREFIX}{os.getpid()}.{os.urandom(4).hex()}"))
            self._socket.listen(16)
            self._listens = True

    def fds(self) -> list[int]:
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
                if _uid_of_peer(asking) in {os.getuid(), 0} and (job := self._answer()) is not None:
                    asking.setblocking(False)
                    asking.send("\0".join([*map(str, job[:-1]), _token_of(job.job)]).encode())

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket, self._listens = None, False


def job_of(workers: WorkerController) -> LocalJob | None:
    """The job of an agent, as it is told to commands here; None while it is not known where its coordinator is."""
    found = workers.rendezvous.local_job()
    script = workers.group.spec.get_program_name()
    return None if found is None else found._replace(script=script, began=workers.began_at)


def local_jobs() -> Iterator[LocalJob]:
    """The jobs of agents on this machine that answer this user."""
    return (job for job, _ in _answers())


def local_token(wanted: LocalJob) -> str:
    """The token of one of `local_jobs`, from its agent; empty if it has none. Another job may have the same id."""
    return next((token for job, token in _answers(f"{wanted.pid}.") if job == wanted), "")


def _token_of(job: str) -> str:
    from rallypoint.base.secrets import TOKEN_PREFIX, job_secret, token

    secret = job_secret()
    if secret is None:
        return ""
    return secret.texts[0] if secret.texts[0].startswith(TOKEN_PREFIX) else token(secret, job)


def _answers(begin: str = "") -> Iterator[tuple[LocalJob, str]]:
    """What the agents here whose names begin so answer, in the order of their names; all are asked side by side."""
    with suppress(OSError):
        names = [each for each in _names() if each.startswith(f"{_PREFIX}{begin}")]
        with _Questions([_address(each) for each in names]) as questions:
            for user, (pid, job, backend, endpoint, script, began, token) in questions.answers():
                yield LocalJob(int(pid), job, backend, endpoint, script, float(began), user), token


class _Questions:
    """Connections to agents' sockets, all with one deadline: whoever is slow delays nobody but himself.

    A socket of another user is closed before anything is read from it; root asks all users' agents.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._asking: dict[int, tuple[str, socket.socket, bytearray]] = {}
        self._answers: dict[str, tuple[int, list[str]]] = {}
        self._poll = select.poll()

    def __enter__(self) -> _Questions:
        return self

    def __exit__(self, *_error: object) -> None:
        for _, asking, _ in self._asking.values():
            asking.close()

    def answers(self) -> Iterator[tuple[int, list[str]]]:
        """The answers that are complete when all have answered, or the time is over, each with its agent's user."""
        began = time.monotonic()
        busy = [each for each in self._addresses if not self._connect(each)]
        while (self._asking or busy) and (elapsed := time.monotonic() - began) < _TIMEOUT:
            pause = _RETRY if busy else _TIMEOUT - elapsed
            for descriptor, _ in self._poll.poll(pause * 1000):
                self._read(descriptor)
            busy = [each for each in busy if elapsed < _BUSY_TIMEOUT and not self._connect(each)]
        for address, asking, _ in self._asking.values():
            if _uid_of_peer(asking) == os.getuid():
                _log.warning(
                    "the agent with process id %s on this machine has not answered within %.0f s, so its job is not "
                    "known here; try again, or give the job's --rdzv-endpoint",
                    printable(address.removeprefix(_address(_PREFIX)).partition(".")[0]),
                    _TIMEOUT,
                )
        return (self._answers[each] for each in self._addresses if each in self._answers)

    def _connect(self, address: str) -> bool:
        """Ask; returns whether that need not be tried again."""
        asking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        asking.setblocking(False)
        try:
            asking.connect(address)
            if _uid_of_peer(asking) in {os.getuid(), 0} or os.getuid() == 0:
                self._asking[asking.fileno()] = address, asking, bytearray()
                self._poll.register(asking, select.POLLIN)
                return True
        except BlockingIOError:  # too many are asking it
            asking.close()
            return False
        except OSError:  # its agent has ended
            pass
        asking.close()
        return True

    def _read(self, descriptor: int) -> None:
        address, asking, data = self._asking[descriptor]
        try:
            more = asking.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        data += more
        if more and len(data) < _MAX_ANSWER:
            return
        self._poll.unregister(asking)
        del self._asking[descriptor]
        with asking, suppress(OSError, ValueError):
            fields = data.decode().split("\0")
            if len(fields) == _FIELDS and fields[0].isdecimal() and all(each.isprintable() for each in fields):
                float(fields[5])
                self._answers[address] = _uid_of_peer(asking), fields


def _address(name: str) -> str:
    return f"\0{name}"


def _names() -> list[str]:
    """The names of all abstract sockets, in order. Raises OSError."""
    with open("/proc/net/unix", errors="replace") as table:
        found = {line.rstrip().rpartition(" ")[2] for line in table}
    return sorted(each[1:] for each in found if each.startswith("@"))


def _uid_of_peer(connected: socket.socket) -> int:
    """The user id of the other end. Raises OSError."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder)
