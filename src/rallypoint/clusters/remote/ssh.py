"""One host: its ssh command line, the meaning of ssh's failures, and the connection to the supervisor there."""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from asyncio.subprocess import Process, SubprocessStreamProtocol
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from rallypoint.base.log import printable
from rallypoint.clusters.remote.messages import (
    LONGEST_ANSWER,
    LONGEST_END,
    MARK,
    Ended,
    EndpointFound,
    Ready,
    Refused,
    Request,
    SupervisorHello,
    decode_answer,
    encode,
    end_mark,
)
from rallypoint.clusters.remote.output import PrefixedLines

if TYPE_CHECKING:
    from rallypoint.clusters.remote.inputs import Host
    from rallypoint.clusters.remote.output import HostOutput, LauncherConsole

A = TypeVar("A", SupervisorHello, EndpointFound, Ready)

_CHUNK = 64 * 1024
_PROGRESS_BAR_DELAY = 1.0
"""Seconds after which to show an unfinished progress bar."""
_START_FACTOR = 6
"""How long the supervisor may take to answer, as a multiple of ssh's time to connect. Authentication, a login shell and
Python, perhaps from a network disk, start after that.
"""
_SSH_END = 5.0
"""Seconds in which ssh must end after the last message."""


_COUNT = 3
"""Number of unanswered keep-alive messages after which ssh gives up a connection."""


class SshOptions(NamedTuple):
    """Options for connecting to hosts: `arguments` are ssh's own, `python` is the remote interpreter; times are in
    seconds.
    """

    arguments: tuple[str, ...]
    python: str
    connect_timeout: int
    lost_after: int


def ssh_command(host: Host, options: SshOptions) -> list[str]:
    """The local command that starts a supervisor on a host.

    The user's arguments come first: ssh uses the first of several values for an option.
    """
    own = {
        "BatchMode": "yes",  # nobody can answer
        "ConnectTimeout": str(options.connect_timeout),
        "ServerAliveInterval": str(max(1, options.lost_after // _COUNT)),
        "ServerAliveCountMax": str(_COUNT),
        "ClearAllForwardings": "yes",  # from the user's configuration: one port cannot serve hundreds of connections
        "ControlPath": "none",  # a shared connection sends its own keep-alive messages, or none
        "LogLevel": "ERROR",
    }
    words = ["ssh", *options.arguments, "-T", "-x"]
    for name, value in own.items():
        words += ["-o", f"{name}={value}"]
    # -P: do not search the login folder for modules.
    remote = ["exec", options.python, "-P", "-m", "rallypoint.clusters.remote.supervisor"]
    return [*words, "--", host.target, shlex.join(remote)]


_MEANINGS: tuple[tuple[str, str], ...] = (
    ("could not resolve hostname", "its name is not known here; check its spelling, /etc/hosts and ~/.ssh/config"),
    ("connection refused", "no ssh server listens there; start sshd, or set its port in ~/.ssh/config"),
    ("timed out", "no answer; check that it is up, and that no firewall blocks the connection"),
    ("no route to host|network is unreachable", "there is no route to it; check the network and firewalls"),
    (
        "host key verification failed|identification has changed|host key is known",
        "its key is not in ~/.ssh/known_hosts, or differs from the one there; connect once by hand: ssh {target}",
    ),
    ("permission denied", "it accepts none of your keys; make sure that 'ssh -o BatchMode=yes {target} true' works"),
    ("too many authentication failures", "it was offered too many keys; name one with --ssh-args='-i FILE'"),
    (
        "no module named|modulenotfounderror",
        "Rallypoint is not installed for {python} there; install it, or name another Python with --python",
    ),
    ("unknown option.*-p", "{python} there is older than Python 3.11; name another with --python"),
    ("bad configuration option|illegal option|unknown option", "ssh does not know an option; check --ssh-args"),
)
"""Messages from ssh or the login shell, with remedies. The first matching row counts."""

_BUSY = re.compile(rb"kex_exchange_identification|connection (closed|reset) by", re.IGNORECASE)


def is_busy(code: int | None, errors: bytes) -> bool:
    """Whether a server refused ssh because of too many new connections (sshd's MaxStartups)."""
    return code == _SSH_FAILED and _BUSY.search(errors) is not None


_NOT_FOUND, _CANNOT_RUN, _SSH_FAILED = 127, 126, 255


def why_unreachable(host: Host, options: SshOptions, code: int | None, errors: bytes) -> str:
    """Explain a failure; the text continues a sentence that begins with the host. `code` is None if ssh still ran."""
    lines = [printable(line.strip()) for line in errors.decode(errors="replace").splitlines() if line.strip()]
    quoted = f" ({lines[-1]})" if lines else ""
    text = "\n".join(lines).lower()
    about = {"target": host.target, "python": options.python}
    if code is None:
        return f"did not answer in time{quoted}; check its load and its login shell, or raise --connect-timeout"
    for pattern, meaning in _MEANINGS:
        if re.search(pattern, text):
            return f"cannot be used: {meaning.format(**about)}{quoted}"
    if code in (_NOT_FOUND, _CANNOT_RUN):
        return f"cannot be used: {options.python} cannot be run there; name its Python with --python{quoted}"
    if code == _SSH_FAILED:
        return f"cannot be reached{quoted or ': ssh exited with code 255'}"
    return f"cannot be used: its login shell exited with code {code} before Rallypoint ran{quoted}"


# Connection


class HostError(Exception):
    """A host is unusable; the text continues a sentence that begins with the host.

    `busy`: it may accept a connection a moment later.
    """

    busy = False


class SshConnection:
    def __init__(self, host: Host, label: str, options: SshOptions) -> None:
        self.host = host
        self.label = label
        self.hello: SupervisorHello | None = None
        self.ended = False
        self._options = options
        self._transport: asyncio.SubprocessTransport | None = None
        self._process: Process | None = None
        self._before = bytearray()
        """Other output of ssh and the login shell before the start."""
        self._buffer = bytearray()
        self._reading_errors: asyncio.Task[None] | None = None
        self._started = False

    async def open(self) -> SupervisorHello:
        """Connect to the supervisor. Raises HostError; can then be called again."""
        self._before.clear()
        self._buffer.clear()
        try:
            loop = asyncio.get_running_loop()
            # Like create_subprocess_exec, which does not expose the transport.
            self._transport, protocol = await loop.subprocess_exec(
                lambda: SubprocessStreamProtocol(_CHUNK, loop),
                *ssh_command(self.host, self._options),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # a ^C at the terminal goes to this process, which passes it on
            )
            self._process = Process(self._transport, protocol, loop)
        except OSError as error:
            why = f"ssh cannot be started here ({error.strerror}); install it, and check the limits (`ulimit -a`)"
            raise HostError(f"cannot be reached: {why}") from None
        self._reading_errors = asyncio.create_task(self._keep_errors())
        self.hello = await self._answer(SupervisorHello)
        return self.hello

    async def ask(self, request: Request, expected: type[A]) -> A:
        """Send a request and return the answer. Raises HostError, even if the host refuses."""
        self.send(request)
        return await self._answer(expected)

    def send(self, request: Request) -> None:
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            with suppress(OSError):
                self._process.stdin.write(encode(request) + b"\n")

    async def _answer(self, expected: type[A]) -> A:
        seconds = self._options.connect_timeout * _START_FACTOR
        try:
            line = await asyncio.wait_for(self._line(), seconds)
        except TimeoutError:
            raise HostError(why_unreachable(self.host, self._options, None, bytes(self._before))) from None
        if line is None:
            assert self._process is not None
            assert self._reading_errors is not None
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(self._process.wait(), self._reading_errors), _SSH_END)
            errors = bytes(self._before)
            error = HostError(why_unreachable(self.host, self._options, self._process.returncode, errors))
            error.busy = is_busy(self._process.returncode, errors)
            raise error
        try:
            answer = decode_answer(line)
        except ValueError as error:
            raise HostError(
                f"sent an invalid message ({error}); install the same version of Rallypoint on all hosts"
            ) from None
        if isinstance(answer, Refused):
            raise HostError(printable(answer.why, 1000))
        if not isinstance(answer, expected):
            raise HostError(
                f"sent an unexpected {type(answer).__name__}; install the same version of Rallypoint on all hosts"
            )
        return answer

    async def _line(self) -> bytes | None:
        """The supervisor's next line, without its mark; None at the end, or after too much other output."""
        assert self._process is not None
        assert self._process.stdout is not None
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                if line.startswith(MARK):
                    return bytes(line[len(MARK) :])
                self._keep_tail(line + b"\n")
                continue
            data = await self._process.stdout.read(_CHUNK)
            if not data or len(self._buffer) > LONGEST_ANSWER:
                self._keep_tail(self._buffer)
                return None
            self._buffer += data

    def _keep_tail(self, data: bytes | bytearray) -> None:
        self._before += data
        del self._before[:-LONGEST_ANSWER]

    async def _keep_errors(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(_CHUNK):
            self._keep_tail(data)

    async def follow(self, console: LauncherConsole, nonce: str) -> Ended | None:
        """Show the command's output until it ends; None if the connection is lost before."""
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        assert self._reading_errors is not None
        self._reading_errors.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading_errors
        prefix = f"{self.label}: ".encode()
        out, err = PrefixedLines(prefix, end_mark(nonce)), PrefixedLines(prefix)
        errors = asyncio.create_task(_show(self._process.stderr, err, console.err))
        await console.out.write(out.feed(bytes(self._buffer)))
        await _show(self._process.stdout, out, console.out)
        rest, last = out.finish()
        await console.out.write(rest)
        seen = -1
        while not errors.done():  # another process may keep it open; but do not give up on a blocked console
            if err.received == seen and not console.err.busy:
                errors.cancel()
            seen = err.received
            await asyncio.wait({errors}, timeout=_SSH_END)
        await console.err.write(err.finish()[0])
        self.ended = True
        await self.close()
        try:
            ended = decode_answer(last)
        except ValueError:
            return None
        return ended if isinstance(ended, Ended) else None

    async def close(self) -> None:
        """Send nothing more, so that the supervisor ends its processes, and then ssh ends."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _SSH_END)
        assert self._transport is not None
        self._transport.close()  # kills ssh if it is still running, without waiting for pipes that others keep open
        await self._process.wait()

    def abandon(self) -> None:
        """End ssh immediately. The supervisor will notice that the launcher is gone."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()


async def _show(stream: asyncio.StreamReader, lines: PrefixedLines, output: HostOutput) -> None:
    bar_due: float | None = None
    while True:
        wait = None if bar_due is None else max(0.0, bar_due - time.monotonic())
        try:
            data = await asyncio.wait_for(stream.read(_CHUNK), wait)
        except TimeoutError:
            await output.write(lines.progress_bar())
            bar_due = None
            continue
        if not data:
            return
        await output.write(lines.feed(data))
        if lines.last_size > LONGEST_END:  # not ours
            return
        if not lines.has_progress_bar:
            bar_due = None
        elif bar_due is None:
            bar_due = time.monotonic() + _PROGRESS_BAR_DELAY
