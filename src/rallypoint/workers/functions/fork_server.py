"""Start method forkserver: the process whose copies the workers are.

The guardian starts it, so all below it is below the guardian. It imports the user's main module, once for all workers,
and then serves, on the connection that was its standard input:

    first       one byte, with a parcel that tells of the main module
    a request   one byte, with the descriptors (channel, standard output, standard error)
    an answer   ("started", pid) with a pidfd, or ("failed", errno)
    a notice    ("ended", pid, exit code), when a worker has ended; -N for death by signal N

Laws:

1. No function of the user's is called in here, so that it always answers. It ends when the agent lets go.
2. It starts with the signals blocked that a scheduler may send to all processes; its copies do not.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import pickle
import select
import signal
from collections.abc import Collection
from socket import recv_fds, send_fds, socket
from typing import NamedTuple

from rallypoint.workers.functions.payload import JobSpec
from rallypoint.workers.functions.worker import channel_at_stdin, prepare_main_module, run_job


class _Worker(NamedTuple):
    pid: int
    pidfd: int


def main(mask: Collection[int]) -> None:
    """Be the server, and in each of its copies a worker, which blocks the signals of `mask`."""
    link = channel_at_stdin()
    for fd in (1, 2):  # so that no descriptor that comes takes their place
        with contextlib.suppress(OSError):
            os.fstat(fd)
            continue
        os.open(os.devnull, os.O_WRONLY)
    _import_main(link)
    channel = _serve(link)
    if channel is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        run_job(channel)


def _import_main(link: socket) -> None:
    # What goes wrong here goes wrong in each worker again, who can tell of it.
    with contextlib.suppress(Exception):
        _, descriptors, _, _ = recv_fds(link, 1, 1)
        with os.fdopen(descriptors[0], "rb") as file:
            file.seek(0)
            prepare_main_module(dict(JobSpec(*pickle.load(file)).main_module))


def _serve(link: socket) -> socket | None:
    """Serve until the agent lets go; then None. In a worker: its channel."""
    workers: dict[int, _Worker] = {}
    poller = select.poll()
    poller.register(link.fileno(), select.POLLIN)
    while True:
        for fd, _ in poller.poll():
            if fd in workers:
                poller.unregister(fd)
                _send_exit(link, workers.pop(fd))
                continue
            data, descriptors, _, _ = recv_fds(link, 1, 3)
            if not data:
                return None
            try:
                pid = os.fork()
            except OSError as error:
                link.send(marshal.dumps(("failed", error.errno or 0)))
                continue
            if pid == 0:
                return _become_worker(link, workers, descriptors)
            worker = _Worker(pid, os.pidfd_open(pid))
            workers[worker.pidfd] = worker
            poller.register(worker.pidfd, select.POLLIN)
            send_fds(link, [marshal.dumps(("started", pid))], [worker.pidfd])
            for each in descriptors:
                os.close(each)


def _send_exit(link: socket, worker: _Worker) -> None:
    _, status = os.waitpid(worker.pid, 0)
    os.close(worker.pidfd)
    with contextlib.suppress(OSError):  # the agent is gone, which is found elsewhere
        link.send(marshal.dumps(("ended", worker.pid, os.waitstatus_to_exitcode(status))))


def _become_worker(link: socket, workers: dict[int, _Worker], descriptors: list[int]) -> socket:
    os.setsid()
    link.close()
    for pidfd in workers:
        os.close(pidfd)
    channel, out, err = descriptors
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    signal.set_wakeup_fd(-1)
    os.set_inheritable(channel, False)
    return socket(fileno=channel)
