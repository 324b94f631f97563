"""A worker that is a function: both sides of its payload (the call that it receives and the value that it returns), and
the program in the worker's process.

A payload is a file in memory, shared with the worker. The agent writes the call into it. The worker reads the call, and
replaces it with the return value and a footer. So a value of any size is available when the worker ends, neither side
waits for the other, and no file must be removed.

Laws:

1. A value without a footer was not returned.
2. When the function is called, its process is like a program's: with its own session, environment, outputs and
   processors, no standard input, and `record` around it.
"""

from __future__ import annotations

import fcntl
import io
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from multiprocessing import popen_spawn_posix, process, spawn
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from socket import AF_UNIX, SOCK_SEQPACKET, recv_fds, send_fds, socket, socketpair
from typing import Any

from rallypoint.base.errors import RallypointError
from rallypoint.failures.record import record
from rallypoint.workers.reaper.protocol import open_null

FOOTER = b"\0rallypoint: returned"
MAX_DESCRIPTORS = 200
"""Maximum descriptors per message; the kernel permits 253."""

_NAMES = {"spawn": "SpawnProcess", "forkserver": "ForkServerProcess"}
"""Names that multiprocessing gives its processes."""


class NothingReturned(RallypointError):
    """A worker exited with 0 without a value, or with one that cannot be read. The message says which."""


class Payload:
    """One payload, on the agent's side."""

    def __init__(self) -> None:
        from rallypoint.base.kernel import memory_file

        fd = memory_file("rallypoint-function")
        try:
            self.fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)  # never the number of a standard stream
        finally:
            os.close(fd)
        self._descriptors: list[int] = []
        self._value: Any = None
        self._opened = False

    def pack(self, main_module: dict[str, Any], function: Callable[..., Any], args: Sequence[Any]) -> None:
        """Write the call.

        Args:
            main_module: what the worker needs to unpickle the function; see `main_module_of`.
            function, args: the call.

        Raises:
            UserError: a part of the call cannot be pickled.
        """
        body = io.BytesIO()
        gathering = _DescriptorCollector()
        former = get_spawning_popen()
        set_spawning_popen(gathering)  # locks, queues and descriptors can be pickled only for a new process
        try:
            ForkingPickler(body).dump(main_module)
            ForkingPickler(body).dump((function, tuple(args)))
        except Exception as error:
            name = getattr(function, "__qualname__", function)
            from rallypoint.base.errors import user_error

            raise user_error(
                f"the function {name} and its arguments cannot be passed to a new process: {error}; use objects that "
                "are defined at the top of a module, or the start method fork",
                error,
            ) from error
        finally:
            set_spawning_popen(former)
            self._descriptors = gathering.descriptors
        write_all(self.fd, body.getvalue())

    def worker_channel(self) -> socket:
        """The worker's end of a connection that contains all descriptors that the worker needs."""
        ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        with ours:
            sent = [self.fd, *self._descriptors]
            ours.sendall(len(sent).to_bytes(4, "little"))
            for first in range(0, len(sent), MAX_DESCRIPTORS):
                send_fds(ours, [b"\0"], sent[first : first + MAX_DESCRIPTORS])
        return theirs

    def result(self) -> Any:
        """Return the worker's value after it ended.

        Raises:
            NothingReturned: the worker returned no value, or it cannot be read in this process.
        """
        if not self._opened:
            if self.fd < 0:
                raise NothingReturned("it was released before it was known to have returned")
            with open(self.fd, "rb", closefd=False) as file:
                file.seek(0)
                data = file.read()
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
        """Release the file. Idempotent. Values read before stay available."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def main_module_of(function: Callable[..., Any], method: str, local_rank: int) -> dict[str, Any]:
    """Get multiprocessing's description of the main module, `sys.path` and `sys.argv` for a worker that calls a
    function.

    Args:
        function: that function.
        method: the start method of the worker, and the default for processes that it starts itself.
        local_rank: the worker.
    """
    found = {**spawn.get_preparation_data(f"{_NAMES[method]}-{local_rank + 1}"), "start_method": method}
    if str(getattr(function, "__module__", "")).startswith("rallypoint."):
        # Our own functions do not need our own main module.
        found.pop("init_main_from_name", None)
        found.pop("init_main_from_path", None)
    return found


def write_all(fd: int, *pieces: bytes) -> None:
    with open(fd, "wb", closefd=False) as file:
        file.seek(0)
        file.truncate()
        file.writelines(pieces)


class ReceivedDescriptor(popen_spawn_posix._DupFd):
    """A descriptor in a payload: its position among the descriptors sent with the payload."""

    available: tuple[int, ...] = ()
    """The received descriptors, in a worker."""

    def detach(self) -> int:
        """Return the descriptor, which the caller then owns."""
        return os.dup(self.available[self.fd])


class _DescriptorCollector(popen_spawn_posix.Popen):
    """Collects the descriptors for a new process, in place of the process that multiprocessing is starting."""

    DupFd = ReceivedDescriptor

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        """Record a descriptor. Returns its substitute for pickling."""
        self.descriptors.append(fd)
        return len(self.descriptors) - 1


# In the worker's process


def main() -> None:
    """Run a worker whose standard input is the channel. An exception ends the process."""
    channel = socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3))
    null = open_null()
    os.dup2(null, 0)
    os.close(null)
    payload, *descriptors = _received(channel)
    ReceivedDescriptor.available = tuple(descriptors)
    record(_unpack_and_call)(payload)


def call(function: Callable[..., Any], args: Sequence[Any], payload: int) -> None:
    """Call the function, and write its result into the payload. `sys.exit(0)` returns None."""
    try:
        value = function(*args)
    except SystemExit as leave:
        if leave.code not in (0, None):
            raise
        value = None
    # Use a plain pickle: objects that multiprocessing's pickler passes by reference would disappear with this process.
    write_all(payload, pickle.dumps(value, pickle.HIGHEST_PROTOCOL), FOOTER)


def _prepare_main_module(preparation: dict[str, Any]) -> None:
    """Set up the main module and paths of the launching process, as multiprocessing does."""
    # While this is set, multiprocessing refuses to start processes at the main module's top level.
    me: Any = process.current_process()
    me._inheriting = True
    try:
        spawn.prepare(preparation)
    finally:
        del me._inheriting


def _unpack_and_call(payload: int) -> None:
    with io.FileIO(os.dup(payload)) as file:
        file.seek(0)
        packed = io.BytesIO(file.readall())
    _prepare_main_module(pickle.load(packed))
    function, args = pickle.load(packed)
    for fd in ReceivedDescriptor.available:
        os.close(fd)
    call(function, args, payload)


def _received(channel: socket) -> list[int]:
    with channel:
        count = int.from_bytes(channel.recv(4), "little")
        found: list[int] = []
        while len(found) < count:
            _, descriptors, _, _ = recv_fds(channel, 1, MAX_DESCRIPTORS)
            if not descriptors:
                raise OSError("this worker did not receive its descriptors; check the limit of open files")
            found += descriptors
    for fd in found:
        os.set_inheritable(fd, False)
    return found


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a script in this process as its main program: the function of `--run-path` (contract section 1.7)."""
    import runpy

    sys.argv = [training_script, *training_script_args]
    runpy.run_path(training_script, run_name="__main__")
