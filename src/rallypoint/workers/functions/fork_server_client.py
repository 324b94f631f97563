"""Start method forkserver, the agent's end: see `fork_server`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from socket import socket, socketpair

from rallypoint.base.errors import RallypointError
from rallypoint.workers.fork_request import ForkFailed, request_fork
from rallypoint.workers.process import WorkerProcess, process_start_error
from rallypoint.workers.reaper.client import SENT_TO_ALL, ReaperClient, StartedWorker
from rallypoint.workers.reaper.protocol import Connection

_IMPORT_TIMEOUT = 300.0
"""Seconds for the server to start a worker; before the first one it imports the main module, which may be large."""


class ForkServerClient:
    """The server of one start of workers.

    Args:
        reaper: starts it.
        command: its command.
        payload: a descriptor of a payload, for the description of the main module in it.

    Raises:
        RallypointError: it could not be started.
    """

    def __init__(self, reaper: ReaperClient, command: Sequence[str], payload: int) -> None:
        self._reaper = reaper
        ours, theirs = socketpair()
        self._link = Connection(ours)
        try:
            with theirs:
                # What a scheduler sends to all processes must not end the server; its copies get their own mask.
                stdin = theirs.fileno()
                self._process = WorkerProcess(reaper, command, os.environ, stdin=stdin, blocked=SENT_TO_ALL)
            ours.settimeout(_IMPORT_TIMEOUT)
            with contextlib.suppress(OSError):  # it has ended already, as the first `fork` finds
                self._link.send(("import",), [payload])
        except BaseException:
            ours.close()
            raise

    def fork(self, channel: socket, stdout: int, stderr: int) -> StartedWorker:
        """Start a worker that takes its payload from `channel`.

        Raises:
            RallypointError: it could not be started, or the server is gone.
        """
        try:
            return request_fork(self._link, self._reaper, ("fork",), [channel.fileno(), stdout, stderr])
        except ForkFailed as error:
            raise process_start_error("by the fork server", error) from None
        except (OSError, EOFError):
            raise RallypointError(
                "the fork server, of which the workers are copies, has ended; look at what else ends processes on this "
                "machine"
            ) from None

    def close(self) -> None:
        """Release it; it ends then. Workers keep running. Idempotent."""
        self._link.close()
        self._process.release()
