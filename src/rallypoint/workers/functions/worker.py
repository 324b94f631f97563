"""Runs in the process of a worker that is a function.

Law: by the time the function is called, this is a process like that of a program: a session, an environment, outputs
and processors of its own, no standard input, and `record` around it.
"""

from __future__ import annotations

import fcntl
import io
import os
import pickle
from collections.abc import Callable, Sequence
from multiprocessing import process, spawn
from socket import recv_fds, socket
from typing import Any

from rallypoint.failures.record import record
from rallypoint.workers.functions.payload import FOOTER, MAX_DESCRIPTORS, JobSpec, ReceivedDescriptor, write_all
from rallypoint.workers.reaper.process_setup import open_null


def main() -> None:
    """Run a worker of the start method spawn, whose standard input is the channel."""
    run_job(channel_at_stdin())


def channel_at_stdin() -> socket:
    """Move the connection away from descriptor 0, which then delivers nothing."""
    channel = socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3))
    null = open_null()
    os.dup2(null, 0)
    os.close(null)
    return channel


def run_job(channel: socket) -> None:
    """Read the payload, make the call that is in it, and return the result. An exception ends the process."""
    payload, *descriptors = _received(channel)
    ReceivedDescriptor.available = tuple(descriptors)
    record(_unpack_and_call)(payload)


def call(function: Callable[..., Any], args: Sequence[Any], payload: int) -> None:
    """Call the function, and put its result into the payload. `sys.exit(0)` returns None."""
    try:
        value = function(*args)
    except SystemExit as leave:
        if leave.code not in (0, None):
            raise
        value = None
    # A plain pickle: objects that multiprocessing's own pickler passes by reference would be gone with this process.
    write_all(payload, pickle.dumps(value, pickle.HIGHEST_PROTOCOL), FOOTER)


def apply_environment(environ: dict[str, str] | None, cpus: Sequence[int]) -> None:
    """Apply an environment, if one is given, and a processor affinity, if any processors are named."""
    if environ is not None:
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update(environ)
    if cpus:
        from rallypoint.base.topology import bind_this_process

        bind_this_process(frozenset(cpus))


def prepare_main_module(preparation: dict[str, Any]) -> None:
    """Set up the main module and the paths of the launching process, as multiprocessing does it."""
    # While this is set, multiprocessing refuses to start processes at the top level of the main module.
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
    spec = JobSpec(*pickle.load(packed))
    apply_environment(None if spec.environ is None else dict(spec.environ), spec.cpus)
    prepare_main_module(dict(spec.main_module))
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
                raise OSError("the descriptors of this worker did not come; look at the limit of open files")
            found += descriptors
    for fd in found:
        os.set_inheritable(fd, False)
    return found
