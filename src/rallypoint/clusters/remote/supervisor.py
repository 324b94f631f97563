"""The supervisor that `rallyctl launch` runs on each host with `python -m rallypoint.clusters.remote.supervisor`. It
starts the command there. It ends the command and its leftovers on request, or when the launcher is gone.

Laws:

1. Nothing starts before the launcher requests it, once all hosts are ready.
2. The launcher is gone when standard input ends, or when it has been silent for `lost_after` seconds: sshd may not
   notice for hours that a network is cut. The command then gets SIGTERM, and SIGKILL `grace` seconds later.
3. However this process ends, even by SIGKILL, the reaper ends the command's leftovers.
4. The command writes to pipes that are read to the end, so that a worker that saves after the launcher is gone can
   still print. A slow launcher slows down the command, and output left at the end waits as long as necessary.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import sys
import time
from collections import deque
from contextlib import suppress

from rallypoint.base.endpoint import Endpoint, listening_socket, source_address, unmapped_address
from rallypoint.base.errors import RallypointError
from rallypoint.base.procfs import local_port_range
from rallypoint.base.signals import SignalWakeup, post_signals, signal_name
from rallypoint.base.version import __version__
from rallypoint.clusters.ports import control_port
from rallypoint.clusters.remote.messages import (
    CANNOT_START,
    LONGEST_REQUEST,
    MARK,
    Answer,
    Ended,
    EndpointFound,
    FindEndpoint,
    Prepare,
    Ready,
    Refused,
    Request,
    Signal,
    Start,
    SupervisorHello,
    decode_request,
    encode,
    end_mark,
)
from rallypoint.workers.process import UNKNOWN_EXIT, WorkerProcess
from rallypoint.workers.reaper.client import ReaperClient
from rallypoint.workers.stop import Sweep

_UNPREPARED = 60.0
"""Seconds of silence after which the launcher counts as lost, until it sets its own value."""
_LEFTOVERS_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL for the command's leftovers."""
_STUCK_AFTER = 10.0
"""Seconds after SIGKILL in which everything should end."""
_CHUNK = 64 * 1024
_PORTS, _ATTEMPTS = 65_536, 16
_SIGNALS = frozenset(
    {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGKILL}
)
"""The signals that a launcher may send a command."""


def _address() -> str:
    """The address at which sshd was reached; empty if sshd does not provide it."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return unmapped_address(words[2].partition("%")[0]) if len(words) == 4 else ""


def _find_endpoint(towards: str) -> EndpointFound | Refused:
    """Find an address of this host and a free port. The address is the one on the route to another host (`towards`), or
    the one at which we were reached.
    """
    try:
        address = source_address(Endpoint(towards, 9)) if towards else _address() or "127.0.0.1"
    except OSError as error:
        where = f" towards {towards}" if towards else ""
        return Refused(f"cannot find an address and port for the rendezvous{where}: {error.strerror or error}")
    port = 0
    for _ in range(_ATTEMPTS):
        port, _ = control_port(random.randrange(_PORTS), ephemeral=local_port_range())
        with suppress(OSError):
            listening_socket("", port).close()
            break
    return EndpointFound(address, port)


def _prepare(job: Prepare) -> Refused | None:
    """Enter the command's folder and apply its environment. Returns why it cannot run, None if it can."""
    folder = _native(job.folder)
    try:
        os.chdir(folder)
    except OSError as error:
        return Refused(
            f"does not have the working folder {folder!r} ({error.strerror}); create it there, or choose another "
            "with --chdir"
        )
    os.environ["PWD"] = folder
    # As in an activated virtual environment: find programs next to this Python.
    beside = os.path.dirname(sys.executable)
    os.environ["PATH"] = os.pathsep.join(filter(None, (beside, os.environ.get("PATH", os.defpath))))
    try:
        os.environ.update((_native(name), _native(value)) for name, value in job.environment.items())
    except ValueError as error:
        return Refused(f"cannot set up the environment: {error}; check --env and --env-file")
    program = _native(job.command[0])
    if shutil.which(program) is None:
        return Refused(f"cannot find the program {program!r}; use a path, or set --python to the Python next to it")
    return None


def _native(text: str) -> str:
    """Convert a text from `messages.portable` to the encoding of this host's names."""
    return os.fsdecode(text.encode("latin-1"))


class LauncherLink:
    def __init__(self) -> None:
        os.set_blocking(0, False)
        self.gone = ""
        """Why the launcher counts as lost; empty if it does not."""
        self.lost_after = _UNPREPARED
        self._heard = time.monotonic()
        self._buffer = bytearray()

    @property
    def lost_at(self) -> float:
        """When the launcher counts as lost if it stays silent."""
        return self._heard + self.lost_after

    def receive(self) -> list[Request]:
        while not self.gone:
            try:
                data = os.read(0, _CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._heard = time.monotonic()
            self._buffer += data
            if not data:
                self.gone = "the connection was closed"
            elif len(self._buffer) > LONGEST_REQUEST:
                self.gone = f"a message of more than {LONGEST_REQUEST} bytes arrived"
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        try:
            return [decode_request(bytes(line)) for line in lines]
        except ValueError as error:
            self.gone = f"an invalid message arrived ({error})"
            return []

    def check(self) -> None:
        """Check whether it has been silent for too long. Call `receive` first: this process may have been asleep."""
        if not self.gone and time.monotonic() >= self.lost_at:
            self.gone = f"nothing arrived from rallyctl for {self.lost_after:.0f} s"


class CommandRelay:
    def __init__(self, target: int) -> None:
        self.source, self.command_end = os.pipe()
        os.set_blocking(self.source, False)
        os.set_blocking(target, False)
        self._target = target
        self._pending = b""
        self.discards = False
        """Whether the reader is gone."""
        self.ended = False

    def poll_target(self) -> tuple[int, int] | None:
        if self._pending and not self.discards:
            return self._target, select.POLLOUT
        return None if self.ended else (self.source, select.POLLIN)

    @property
    def is_done(self) -> bool:
        return self.ended and (self.discards or not self._pending)

    def give_up(self) -> None:
        """Stop waiting for the pipe to end, since some process keeps it open. Pass on its content."""
        with suppress(BlockingIOError):
            while data := os.read(self.source, _CHUNK):
                self._pending += data
        self.ended = True

    def move(self) -> None:
        if not self.ended and not self._pending:
            try:
                self._pending = os.read(self.source, _CHUNK)
                self.ended = not self._pending
            except BlockingIOError:
                pass
        if self.discards:
            self._pending = b""
        if self._pending:
            try:
                self._pending = self._pending[os.write(self._target, self._pending) :]
            except BlockingIOError:
                pass
            except OSError:
                self.discards = True


class SupervisedCommand:
    def __init__(self, job: Prepare, launcher: LauncherLink) -> None:
        self._launcher = launcher
        self._grace = job.grace
        self._why = ""
        self._kill_at = self._stuck_at = float("inf")
        self._swept = False
        self.relays = (CommandRelay(1), CommandRelay(2))
        self.own_signals: deque[int] = deque()
        self.reaper = ReaperClient()
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            out, err = (relay.command_end for relay in self.relays)
            words = [_native(word) for word in job.command]
            self._process = WorkerProcess(self.reaper, words, os.environ, out, err, stdin=null)
        finally:
            for fd in (null, *(relay.command_end for relay in self.relays)):
                os.close(fd)
        self._sweep = Sweep(self.reaper, [self._process])

    def run(self) -> Ended:
        with post_signals(self.own_signals.append, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)) as wakeup:
            assert wakeup is not None
            while not self._is_over():
                self._wait(wakeup)
                for request in self._launcher.receive():
                    if isinstance(request, Signal):
                        self._signal(request.number, request.kill_after)
                self._launcher.check()
                while self.own_signals:
                    number = self.own_signals.popleft()
                    self._end(f"the supervisor there was sent {signal_name(number)}", number)
                if self._launcher.gone:
                    self._end(self._launcher.gone, signal.SIGTERM)
                    for relay in self.relays:
                        relay.discards = True
                for relay in self.relays:
                    relay.move()
                self._sweep_if_due()
        code = self._process.poll()
        return Ended(UNKNOWN_EXIT if code is None else code, self._why)

    def _is_over(self) -> bool:
        if time.monotonic() >= self._stuck_at:
            self._stuck_at = float("inf")
            self._sweep.give_up()
            for relay in self.relays:
                relay.give_up()
        return self._swept and self._sweep.done() and all(relay.is_done for relay in self.relays)

    def _wait(self, wakeup: SignalWakeup) -> None:
        poller = select.poll()
        poller.register(wakeup.fileno(), select.POLLIN)
        for relay in self.relays:
            if (target := relay.poll_target()) is not None:
                poller.register(*target)
        fds = self._sweep.fds() if self._swept else [self._process.fileno(), self.reaper.fileno()]
        if not self._launcher.gone:
            fds.append(0)
        for fd in fds:
            poller.register(fd, select.POLLIN)
        until = min(self._kill_at, self._stuck_at, float("inf") if self._launcher.gone else self._launcher.lost_at)
        seconds = max(0.0, until - time.monotonic())
        poller.poll(None if seconds == float("inf") else min(seconds, 3600.0) * 1000 + 1)
        wakeup.clear()

    def _signal(self, number: int, kill_after: float | None) -> None:
        if number in _SIGNALS:
            self._process.forward_signal(number)
        if kill_after is not None:
            self._kill_at = min(self._kill_at, time.monotonic() + kill_after)

    def _end(self, why: str, number: int) -> None:
        if not self._why:
            self._why = why
            self._signal(number, self._grace)

    def _sweep_if_due(self) -> None:
        if time.monotonic() >= self._kill_at:
            # At first signal only the command: if it is rallyrun, its own reaper then ends the workers and removes its
            # files.
            self._kill_at = float("inf")
            self._process.signal(signal.SIGKILL)
        if not self._swept and (self._process.poll() is not None or self.reaper.lost):
            self._swept = True
            self._kill_at = float("inf")
            self._stuck_at = time.monotonic() + _LEFTOVERS_GRACE + _STUCK_AFTER
            self._sweep.begin(_LEFTOVERS_GRACE)


def _say(answer: Answer) -> None:
    # Write on a separate line, whatever a login shell wrote before.
    _write(b"\n" + MARK + encode(answer) + b"\n")


def _write(data: bytes, launcher: LauncherLink | None = None) -> None:
    """Write everything while somebody reads; at the end, while the launcher exists."""
    poller = select.poll()
    poller.register(1, select.POLLOUT)
    if launcher is not None:
        poller.register(0, select.POLLIN)
    while data:
        seconds = _STUCK_AFTER if launcher is None else max(0.0, launcher.lost_at - time.monotonic())
        ready = {fd for fd, _ in poller.poll(seconds * 1000 + 1)}
        if launcher is not None:
            launcher.receive()  # only to see whether it exists: an ended command needs nothing else
            launcher.check()
        if not ready or (launcher is not None and launcher.gone):
            return
        try:
            data = data[os.write(1, data) :] if 1 in ready else data
        except BlockingIOError:
            pass
        except OSError:
            return


def _until_started(launcher: LauncherLink) -> Prepare | None:
    """Answer requests until the start. Returns the command, None if the launcher goes away before."""
    job: Prepare | None = None
    poller = select.poll()
    poller.register(0, select.POLLIN)
    _say(SupervisorHello(__version__, _address()))
    while not launcher.gone:
        poller.poll(max(0.0, launcher.lost_at - time.monotonic()) * 1000 + 1)
        for request in launcher.receive():
            if isinstance(request, FindEndpoint):
                _say(_find_endpoint(request.towards))
            elif isinstance(request, Prepare):
                refusal = _prepare(request)
                _say(refusal or Ready())
                job = None if refusal else request
                launcher.lost_after = request.lost_after
            elif isinstance(request, Start) and job is not None:
                return job
        launcher.check()
    return None


def main() -> int:
    """Serve one launcher. Returns the command's exit code."""
    launcher = LauncherLink()
    job = _until_started(launcher)
    if job is None:
        return 0
    try:
        command = SupervisedCommand(job, launcher)
    except RallypointError as error:
        ended = Ended(CANNOT_START, str(error))
    else:
        ended = command.run()
        command.reaper.close()
    _write(end_mark(job.nonce) + encode(ended), launcher)
    return ended.code if ended.code >= 0 else 128 - ended.code


if __name__ == "__main__":
    sys.exit(main())
