"""The payload of a worker that is a function: the call that it receives, and the value that it returns.

A payload is a file in memory, which the worker has too. The agent writes the call into it; the worker reads that, and
replaces it with the return value and then a footer. So a value of any size is there when the worker ends, neither side
waits for the other, and there is no file to remove.

Law: a value without a footer was not returned.
"""

from __future__ import annotations

import fcntl
import io
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import popen_spawn_posix, spawn
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from socket import AF_UNIX, SOCK_SEQPACKET, send_fds, socket, socketpair
from typing import Any, NamedTuple

from rallypoint.base.errors import RallypointError

FOOTER = b"\0rallypoint: returned"
MAX_DESCRIPTORS = 200
"""Descriptors in one message; the kernel takes 253."""

_NAMES = {"spawn": "SpawnProcess", "forkserver": "ForkServerProcess"}
"""The names that multiprocessing gives its processes."""


class NothingReturned(RallypointError):
    """A worker has ended with exit code 0 and left no value that can be read. The text says which of the two."""


class JobSpec(NamedTuple):
    """The first part of a payload: the state that the worker must have before it can unpack the function."""

    main_module: Mapping[str, Any]
    """multiprocessing's own: `sys.path`, `sys.argv`, the main module."""
    environ: Mapping[str, str] | None
    """The whole environment; None if it is there already."""
    cpus: Sequence[int]
    """The processors to run on; empty for all."""


class Payload:
    """One payload, from the agent's side."""

    def __init__(self) -> None:
        from rallypoint.base.kernel import memory_file

        fd = memory_file("rallypoint-function")
        try:
            self.fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)  # never in the place of a standard stream
        finally:
            os.close(fd)
        self._descriptors: list[int] = []
        self._value: Any = None
        self._opened = False

    def pack(self, spec: JobSpec, function: Callable[..., Any], args: Sequence[Any]) -> None:
        """Write the call.

        Raises:
            UserError: a part of it cannot be pickled.
        """
        body = io.BytesIO()
        gathering = _DescriptorCollector()
        former = get_spawning_popen()
        set_spawning_popen(gathering)  # locks, queues and descriptors can be pickled for a new process only
        try:
            ForkingPickler(body).dump(tuple(spec))
            ForkingPickler(body).dump((function, tuple(args)))
        except Exception as error:
            name = getattr(function, "__qualname__", function)
            from rallypoint.base.errors import user_error

            raise user_error(
                f"the function {name} and its arguments cannot be handed to a new process: {error}; use what stands at "
                "the top of a module, or the start method fork",
                error,
            ) from error
        finally:
            set_spawning_popen(former)
            self._descriptors = gathering.descriptors
        write_all(self.fd, body.getvalue())

    def worker_channel(self) -> socket:
        """The worker's end of a connection that carries all descriptors which the worker needs."""
        ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        with ours:
            sent = [self.fd, *self._descriptors]
            ours.sendall(len(sent).to_bytes(4, "little"))
            for first in range(0, len(sent), MAX_DESCRIPTORS):
                send_fds(ours, [b"\0"], sent[first : first + MAX_DESCRIPTORS])
        return theirs

    def result(self) -> Any:
        """The value that the worker returned, once it has ended.

        Raises:
            NothingReturned: there is none, or it cannot be read in this process.
        """
        if not self._opened:
            if self.fd < 0:
                raise NothingReturned("it was not known to have returned when it was released")
            data = _read_all(self.fd)
            if not data.endswith(FOOTER):
                raise NothingReturned("it ended with exit code 0 before its function returned (os._exit?)")
            try:
                self._value = pickle.loads(data)
            except Exception as error:
                raise NothingReturned(
                    f"what it returned cannot be read here: {type(error).__name__}: {error}; return plain data"
                ) from error
            self._opened = True
        return self._value

    def close(self) -> None:
        """Release the file. Idempotent; a value that was opened stays."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def job_spec(
    function: Callable[..., Any],
    method: str,
    local_rank: int,
    environ: Mapping[str, str] | None = None,
    cpus: Iterable[int] = (),
) -> JobSpec:
    """The job spec of a worker: what it needs to know before it can unpack a function.

    Args:
        function: that function.
        method: the start method of the worker, and the default for processes that it starts itself.
        local_rank: which worker.
        environ: its whole environment, if it does not start in it.
        cpus: the processors that it may run on, if it does not start on them; empty for all.
    """
    name = f"{_NAMES[method]}-{local_rank + 1}"
    preparation = {**spawn.get_preparation_data(name), "start_method": method}
    if str(getattr(function, "__module__", "")).startswith("rallypoint."):
        # Our own main module contains nothing that our own function needs.
        preparation.pop("init_main_from_name", None)
        preparation.pop("init_main_from_path", None)
    return JobSpec(preparation, environ, sorted(cpus))


def write_all(fd: int, *pieces: bytes) -> None:
    """Replace the contents of the file."""
    with open(fd, "wb", closefd=False) as file:
        file.seek(0)
        file.truncate()
        file.writelines(pieces)


def _read_all(fd: int) -> bytes:
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


class ReceivedDescriptor(popen_spawn_posix._DupFd):
    """A descriptor in a payload: its position among those that were sent with the payload."""

    available: tuple[int, ...] = ()
    """In a worker: the received descriptors."""

    def detach(self) -> int:
        """The descriptor, which the caller then owns."""
        return os.dup(self.available[self.fd])


class _DescriptorCollector(popen_spawn_posix.Popen):
    """Takes the place of the process that multiprocessing is starting, and collects the descriptors for it."""

    DupFd = ReceivedDescriptor

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        """Note a descriptor. Returns what is pickled in its place."""
        self.descriptors.append(fd)
        return len(self.descriptors) - 1
