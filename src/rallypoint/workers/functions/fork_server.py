"""Start method forkserver: the process that the workers are forked from.

The reaper starts it. It imports the user's main module, once for all workers, and then serves on the connection that
was its standard input, by frames of `reaper.protocol`. First comes a payload that names the main module; each request
is `reaper.orphan`'s, with the descriptors (pipe, channel, standard output, standard error).

Laws:

1. No function of the user is called in here, so that it always answers. It ends with the connection.
2. It starts with the signals blocked that a scheduler may send to all processes; its copies do not.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from collections.abc import Collection
from socket import socket

from rallypoint.workers.functions.payload import JobSpec
from rallypoint.workers.functions.worker import channel_at_stdin, prepare_main_module, run_job
from rallypoint.workers.reaper.orphan import await_exit, await_release, fork_orphan
from rallypoint.workers.reaper.protocol import Connection


def main(mask: Collection[int]) -> None:
    """Run the server, and in each of its copies a worker, which blocks the signals of `mask`."""
    link = Connection(channel_at_stdin())
    for fd in (1, 2):  # so that no descriptor that comes takes their place
        with contextlib.suppress(OSError):
            os.fstat(fd)
            continue
        os.open(os.devnull, os.O_WRONLY)
    worker = _serve(link)
    link.close()
    if worker is not None:
        channel = _become_worker(*worker)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        run_job(channel)


def _serve(link: Connection) -> list[int] | None:
    """Serve until the connection ends; then None. In a worker: the parent that is about to end, and the descriptors."""
    with contextlib.suppress(OSError, EOFError):
        _import_main(*link.read()[1])
        while True:
            _, descriptors = link.read()
            parent = fork_orphan(link)
            if parent:
                return [parent, *descriptors]
            for fd in descriptors:
                os.close(fd)
    return None


def _import_main(payload: int) -> None:
    # An error here occurs again in each worker, which can report it.
    with contextlib.suppress(Exception), os.fdopen(payload, "rb") as file:
        file.seek(0)
        prepare_main_module(dict(JobSpec(*pickle.load(file)).main_module))


def _become_worker(parent: int, release_fd: int, channel: int, out: int, err: int) -> socket:
    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    await_release(release_fd)
    for fd in (release_fd, out, err):
        os.close(fd)
    signal.set_wakeup_fd(-1)
    await_exit(parent)
    return socket(fileno=channel)
