"""What commands on this machine find of its jobs: those that run, by a socket of each agent, and how others have ended,
by a small file that each agent leaves.

The socket names the agent's job. It is an abstract one (unix(7)), so that it disappears with the process, however that
ends, and leaves no file. Laws:

1. It answers only the agent's own user and root.
2. It tells where the job's coordinator can be reached, and the job's token if there is a secret: the command then
   connects to the coordinator. (The secret itself is readable in /proc for the user and for root.)
3. The token never appears in log lines or in lists of jobs.
4. An agent of this user that is there but does not answer in time is named: its job is not denied in silence.

Of the files:

5. The folder and its files are for their user alone, written and read as `base/private_files.py` says. A file has a
   line for each field, `name: value`.
6. There are at most `_MOST` files of at most `_LARGEST` bytes, and none is older than `_KEPT` seconds: the agent that
   writes one removes the others. Nothing is removed whose name is not of the form that is written here.
7. A file that cannot be written or read is passed over: it never changes how a job ends.
8. An agent that ends imports nothing for it but this file.
9. An agent that is killed writes nothing: its reaper has the file's text, from the first start of workers on.
"""

from __future__ import annotations

import os
import re
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from rallypoint.agent.sources import Source
from rallypoint.base.errors import JobPreempted, NodeLeftInOrder, SignalException, UserError
from rallypoint.base.light_typing import TYPE_CHECKING, NamedTuple
from rallypoint.base.log import get_logger, printable
from rallypoint.base.private_files import is_private, make_private, open_regular, replace_file
from rallypoint.control.protocol.errors import RendezvousClosedError
from rallypoint.failures.cause import Ending
from rallypoint.rendezvous.handler import LocalJob
from rallypoint.workers.logs.specs import temporary_folder

if TYPE_CHECKING:
    from rallypoint.agent.workers import WorkerController

_log = get_logger(__name__)

# Those that run

_PREFIX = "rallypoint/agent/"
_MAX_ANSWER = 16 * 1024
_ANSWERED = len(LocalJob._fields)
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
        names = [each for each in _socket_names() if each.startswith(f"{_PREFIX}{begin}")]
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
            if len(fields) == _ANSWERED and fields[0].isdecimal() and all(each.isprintable() for each in fields):
                float(fields[5])
                self._answers[address] = _uid_of_peer(asking), fields


def _address(name: str) -> str:
    return f"\0{name}"


def _socket_names() -> list[str]:
    """The names of all abstract sockets, in order. Raises OSError."""
    with open("/proc/net/unix", errors="replace") as table:
        found = {line.rstrip().rpartition(" ")[2] for line in table}
    return sorted(each[1:] for each in found if each.startswith("@"))


def _uid_of_peer(connected: socket.socket) -> int:
    """The user id of the other end. Raises OSError."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder)


# Those that have ended


_MOST, _KEPT, _LARGEST = 100, 30 * 86400.0, 16 * 1024
_NOT_KEPT = "how the job has ended is not kept on this machine: %s"
_LONGEST = 1024
"""Characters of a text."""
_LAST_MOMENT = 253402214400.0
"""The year 9999, in seconds since 1970."""
_NAME = re.compile(r"([0-9]{14})-[0-9]+")
"""The milliseconds since 1970 at which an agent ended, and its pid."""

OUTCOMES = frozenset({"succeeded", "failed", "stopped", "left", "killed"})
_OF_ERRORS: tuple[tuple[type[BaseException], str], ...] = (
    (NodeLeftInOrder, "left"),
    (SignalException, "stopped"),
    (KeyboardInterrupt, "stopped"),
    (JobPreempted, "stopped"),
)
"""The outcomes of errors; that of any other is `failed`, and without one the job has succeeded."""


class EndedJob(NamedTuple):
    """How a job has ended as one agent knows it.

    `outcome` is succeeded, failed, stopped, or how this node has gone, so that the job can have continued without it:
    left, killed. `detail` says why, and who has stopped it. `ended` is in seconds since 1970, `round` -1 if none has
    begun, `log_dir` empty without logs, `ending` the name of an `Ending`, empty if it is not known.
    """

    job: LocalJob
    ended: float
    outcome: str
    detail: str
    round: int
    restarts: int
    max_restarts: int
    log_dir: str
    ending: str = ""

    @property
    def seconds(self) -> float:
        """How long the agent has run."""
        return max(0.0, self.ended - self.job.began)


_RECORDED = (*LocalJob._fields, *EndedJob._fields[1:])


def record_end(workers: WorkerController, error: BaseException | None) -> None:
    """Leave how the job of this agent has ended: with that error, or without one."""
    try:
        outcome, detail, restarts = "succeeded", "", workers.group.restarts
        if error is not None:
            outcome, detail, restarts = _of_error(error, restarts)
        ending = Ending.PREEMPTED if isinstance(error, JobPreempted) else getattr(error, "ending", None)
        ended = _end_of(workers, outcome, detail, restarts, Ending(ending).name if ending else "")
        make_private(folder := _folder())
        path = os.path.join(folder, f"{int(1000 * ended.ended):014}-{ended.job.pid}")
        replace_file(path, f"{_text(ended)}ended: {ended.ended}\n".encode())
        _clean(folder, ended.ended)
    except Exception as trouble:  # such as a full disk, or a handler of others
        _log.debug(_NOT_KEPT, trouble)


def record_if_killed(workers: WorkerController) -> None:
    """Have the reaper leave that this agent was killed, if it is."""
    try:
        detail = "its agent was killed, or crashed; what became of other nodes is not known here"
        ended = _end_of(workers, "killed", detail, workers.group.restarts)
        make_private(folder := _folder())
        workers.ensure_reaper().set_record(folder, _text(ended))
    except Exception as trouble:
        _log.debug(_NOT_KEPT, trouble)


def ended_jobs() -> Iterator[EndedJob]:
    """What agents of this user have left here, the newest first."""
    with suppress(UserError):
        folder = _folder()
        for name in sorted(_records(folder), reverse=True) if is_private(folder) else ():
            with suppress(OSError, ValueError, LookupError):
                yield _read(os.path.join(folder, name))


def _text(ended: EndedJob) -> str:
    """The lines of a record but that with the moment."""
    values = zip(_RECORDED, (*ended.job, *ended[1:]), strict=True)
    return "".join(f"{name}: {value}\n" for name, value in values if name != "ended")


def _end_of(workers: WorkerController, outcome: str, detail: str, restarts: int, ending: str = "") -> EndedJob:
    spec, placement, known = workers.group.spec, workers.group.placement, workers.rendezvous.local_job(opens=False)
    texts = (
        spec.rdzv_handler.get_run_id(),
        spec.rdzv_handler.get_backend(),
        "" if known is None else known.endpoint.removesuffix(":0"),
        spec.get_program_name(),
    )
    job, backend, endpoint, script = (printable(each, _LONGEST) for each in texts)
    logs = workers.logs_specs.run_log_dir
    return EndedJob(
        LocalJob(os.getpid(), job, backend, endpoint, script, workers.began_at, os.getuid()),
        time.time(),
        outcome,
        printable(detail, _LONGEST),
        -1 if placement is None else placement.round,
        restarts,
        spec.max_restarts,
        printable(os.path.abspath(logs), _LONGEST) if logs else "",
        ending,
    )


def _of_error(error: BaseException, restarts: int) -> tuple[str, str, int]:
    """Outcome, reason and restarts used, as far as the error knows these."""
    from rallypoint.failures.texts import first_line

    outcome = next((word for kind, word in _OF_ERRORS if isinstance(error, kind)), "failed")
    if outcome == "failed":
        from rallypoint.failures.report import ChildFailedError

        if isinstance(error, ChildFailedError):
            return outcome, error.root_cause().headline, error.restarts.used
        if isinstance(error, RendezvousClosedError) and error.ending is Ending.STOPPED:
            outcome = "stopped"
    return outcome, first_line(str(error)) or type(error).__name__, restarts


def _folder() -> str:
    return os.path.join(temporary_folder(), f"rallypoint-ended-{os.getuid()}")


def _records(folder: str) -> list[str]:
    try:
        return [each for each in os.listdir(folder) if _NAME.fullmatch(each)]
    except OSError:
        return []


def _clean(folder: str, now: float) -> None:
    names = sorted(_records(folder))
    for place, name in enumerate(names, start=1):
        found = _NAME.fullmatch(name)
        if len(names) - place >= _MOST or (found and int(found[1]) / 1000 < now - _KEPT):
            with suppress(FileNotFoundError):  # another agent cleans too
                os.unlink(os.path.join(folder, name))


def _read(path: str) -> EndedJob:
    """Raises OSError, ValueError or LookupError: it is not a file of ours."""
    with open(open_regular(path), "rb") as file:
        text = file.read(_LARGEST + 1).decode()
    lines = text.removesuffix("\n").split("\n")
    found = dict(each.partition(": ")[::2] for each in lines)
    known = found["outcome"] in OUTCOMES and found["ending"] in {"", *Ending.__members__}
    if len(text) > _LARGEST or not known or not all(each.isprintable() for each in lines):
        raise ValueError("it is too large, or has an unknown outcome, or what cannot be printed")
    job, backend, endpoint, script = (found[name] for name in LocalJob._fields[1:5])
    began, ended = float(found["began"]), float(found["ended"])
    if not 0 <= began <= ended <= _LAST_MOMENT:
        raise ValueError("it has times that cannot be")
    return EndedJob(
        LocalJob(int(found["pid"]), job, backend, endpoint, script, began, int(found["user"])),
        ended,
        found["outcome"],
        found["detail"],
        int(found["round"]),
        int(found["restarts"]),
        int(found["max_restarts"]),
        found["log_dir"],
        found["ending"],
    )
