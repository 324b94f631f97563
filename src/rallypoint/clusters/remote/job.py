"""One launch: prepares all hosts before starting anything, and then runs one job until it has ended on all of them.

Laws for the exit code:

1. If the command exited with 0 on all hosts, it is 0.
2. Hosts that were lost, or whose command was killed, do not count if the others exited with 0: an elastic job continued
   without them.
3. Otherwise it is the first code other than 0 with which a command exited on its own. Without one, it is 128 + the
   first signal; or 1 if all hosts were lost.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from rallypoint.base.endpoint import Endpoint, is_loopback
from rallypoint.base.errors import RallypointError, SignalException
from rallypoint.base.log import printable
from rallypoint.base.signals import how_it_ended, signal_name
from rallypoint.base.version import __version__
from rallypoint.clusters.remote.inputs import Host, labels, node_variables
from rallypoint.clusters.remote.messages import (
    CANNOT_START,
    Alive,
    Ended,
    EndpointFound,
    FindEndpoint,
    Prepare,
    Ready,
    Signal,
    Start,
    SupervisorHello,
    portable,
)
from rallypoint.clusters.remote.output import LauncherConsole
from rallypoint.clusters.remote.ssh import HostError, SshConnection, SshOptions

_AT_ONCE = 64
"""How many hosts to connect to at a time: a gateway's sshd or name servers would refuse hundreds."""
_TRIES = 5
"""How often to try a host that refuses connections."""
_KILL_AFTER = 5.0
"""Seconds between the second ^C and SIGKILL for all remaining processes."""
_SETTLE = 3.0
"""Seconds in which all agents end after a job ends."""
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class LaunchPlan(NamedTuple):
    """The launch: the command for each host, its folder, and variables in addition to the host's.

    `grace` is in seconds. `given` are the user's variables, which take precedence over those chosen here. If `least` is
    not 0, the job cannot continue with fewer hosts, or without the first, which has the control plane.
    """

    hosts: Sequence[Host]
    command: Sequence[str]
    folder: str
    given: Mapping[str, str]
    ssh: SshOptions
    grace: float
    least: int = 0
    first_has_control_plane: bool = False


def launch(plan: LaunchPlan) -> int:
    """Run a job; returns its exit code.

    Raises:
        RallypointError: a host is unusable, so nothing was started. Each unusable host was logged.
        SignalException: a signal arrived before the start.
    """
    return asyncio.run(_Launch(plan).run())


class _Launch:
    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        named = zip(plan.hosts, labels(plan.hosts), strict=True)
        self._connections = [SshConnection(host, label, plan.ssh) for host, label in named]
        self._nonce = secrets.token_hex(16)
        self._started = False
        self._signals: list[int] = []
        self._signalled = asyncio.Event()
        self._ends: list[HostExit] = []
        self._over = asyncio.Event()
        self._failed = 0
        """How many hosts were lost or had a failed command."""
        self._ending_others = False

    async def run(self) -> int:
        self._console = LauncherConsole()
        loop = asyncio.get_running_loop()
        for number in _FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:  # such as under nohup
                loop.add_signal_handler(number, self._on_signal, number)
        heartbeats = asyncio.create_task(self._heartbeats())
        try:
            await self._until_signalled(self._prepare())
            self._started = True
            for connection in self._connections:
                connection.send(Start())
            await asyncio.gather(*(self._follow(connection) for connection in self._connections))
            await self._conclude()
        finally:
            heartbeats.cancel()
            await self._close()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._console.drain(), None if self._started else _KILL_AFTER)
        return exit_code(self._ends)

    # Before the start

    async def _until_signalled(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work. A terminating signal interrupts it, or takes effect after it: nothing has started yet."""
        task = asyncio.create_task(work)
        waiting = asyncio.create_task(self._signalled.wait())
        try:
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if number := next((received for received in self._signals if received in _ENDS), 0):
                if number == signal.SIGINT:
                    raise KeyboardInterrupt
                raise SignalException(f"{signal_name(number)} arrived before the start", number)
            task.result()
        finally:
            waiting.cancel()
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task

    async def _prepare(self) -> None:
        """Prepare all hosts. Raises RallypointError after logging each failure."""
        gate = asyncio.Semaphore(_AT_ONCE)

        async def reach(connection: SshConnection) -> None:
            async with gate:
                hello = await _open(connection)
            if hello.version != __version__:
                there = printable(hello.version) or "of unknown version"
                raise HostError(
                    f"has Rallypoint {there}, but this host has {__version__}; install the same version on all hosts"
                )

        await self._on_all(reach)
        endpoint = await self._find_endpoint()
        run_id = f"ssh-{secrets.token_hex(4)}"

        ranks = {connection: rank for rank, connection in enumerate(self._connections)}

        async def make_ready(connection: SshConnection) -> None:
            defaults = node_variables(self._plan.hosts, ranks[connection], endpoint, run_id)
            variables = {**defaults, **self._plan.given}
            await connection.ask(
                Prepare(
                    [portable(word) for word in self._plan.command],
                    portable(self._plan.folder),
                    {portable(name): portable(value) for name, value in variables.items()},
                    self._plan.ssh.lost_after,
                    self._plan.grace,
                    self._nonce,
                ),
                Ready,
            )

        await self._on_all(make_ready)

    async def _on_all(self, work: Callable[[SshConnection], Awaitable[None]]) -> None:
        """Use all connections. Raises RallypointError after logging each failure."""
        results = await asyncio.gather(*(work(connection) for connection in self._connections), return_exceptions=True)
        failed = 0
        for connection, result in zip(self._connections, results, strict=True):
            if isinstance(result, HostError):
                failed += 1
                await self._console.say(f"{connection.label} {result}")
            elif isinstance(result, BaseException):
                raise result
        if failed:
            count = len(self._connections)
            which = f"{failed} of {count} hosts cannot" if count > 1 else "the host cannot"
            raise RallypointError(f"{which} be used, so nothing was started; see above")

    async def _find_endpoint(self) -> str:
        """Choose the endpoint for the control plane, on the first host."""
        first, *others = self._connections
        towards = ""
        addresses = [connection.hello.address for connection in self._connections if connection.hello is not None]
        if others and not _is_global(addresses[0]):
            towards = next(filter(_is_global, addresses), "")
        try:
            endpoint = await first.ask(FindEndpoint(towards), EndpointFound)
        except HostError as error:
            await self._console.say(f"{first.label} {error}")
            raise RallypointError("no rendezvous endpoint was found, so nothing was started") from None
        return str(Endpoint(endpoint.address, endpoint.port))

    # While the job runs

    async def _follow(self, connection: SshConnection) -> None:
        ended = await connection.follow(self._console, self._nonce)
        self._ends.append(HostExit(connection.label, ended.code if ended is not None else None))
        if self._running_count == 0:
            self._over.set()
        if ended is None:
            await self._console.say(_lost_text(connection.label, self._running_count, self._plan))
        elif text := _end_text(connection.label, ended, self._plan):
            if not ended.why and ended.code > 0:
                await self._others_end(_SETTLE)  # they usually do, and the job has ended
            if self._running_count or ended.code < 0 or ended.why:
                await self._console.say(text + _going_on(self._running_count))
        if ended is not None and ended.why and ended.code == CANNOT_START:
            await self._end_others()
        elif ended is None or ended.code:
            self._failed += 1
            if why := self._why_it_cannot_go_on(connection):
                await self._others_end(self._plan.ssh.lost_after)  # they may notice on their own
                await self._end_others(why)

    def _why_it_cannot_go_on(self, lost: SshConnection) -> str:
        """Why the other hosts would wait in vain: the command is not restarted on a lost host."""
        if len(self._connections) - self._failed < self._plan.least:
            return f"fewer hosts are left than the {self._plan.least} that the job needs, so the job is ending"
        if self._plan.first_has_control_plane and lost is self._connections[0]:
            return (
                f"{lost.label} hosted the control plane, so the job is ending; to host it on another machine, use "
                "'rallyctl serve'"
            )
        return ""

    @property
    def _running_count(self) -> int:
        return len(self._connections) - len(self._ends)

    async def _others_end(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    async def _end_others(self, why: str = "") -> None:
        """End the command on all hosts, once."""
        if self._running_count == 0 or self._ending_others:
            return
        self._ending_others = True
        if why:
            await self._console.say(why)
        for other in self._connections:
            if not other.ended:
                other.send(Signal(signal.SIGTERM, self._plan.grace))

    async def _conclude(self) -> None:
        absent = missing(self._ends)
        if absent and len(self._ends) > 1 and exit_code(self._ends) == 0:
            await self._console.say(f"the job succeeded without {', '.join(absent[:8])}")

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(max(0.5, min(5.0, self._plan.ssh.lost_after / 4)))
            for connection in self._connections:
                if not connection.ended:
                    connection.send(Alive())
            if failure := self._console.failure():
                await self._console.say(failure)

    def _on_signal(self, number: int) -> None:
        """Pass a signal to the command on all hosts. A second terminating signal soon kills everything."""
        self._signals.append(number)
        if number in _ENDS:
            self._signalled.set()
        if self._started:
            twice = sum(received in _ENDS for received in self._signals) > 1 and number in _ENDS
            for connection in self._connections:
                connection.send(Signal(number, _KILL_AFTER if twice else None))

    async def _close(self) -> None:
        if not self._started:
            for connection in self._connections:
                if connection.hello is None:
                    connection.abandon()
        await asyncio.gather(*(connection.close() for connection in self._connections if not connection.ended))


async def _open(connection: SshConnection) -> SupervisorHello:
    """Connect to a host. Retry if it is busy, as a gateway for all connections may be. Raises HostError."""
    for attempt in range(_TRIES):
        try:
            return await connection.open()
        except HostError as error:
            if not error.busy or attempt == _TRIES - 1:
                raise
        await asyncio.sleep(random.uniform(0.5, 1.5) * 2**attempt)
    raise AssertionError


def _is_global(address: str) -> bool:
    """Whether other hosts can use an address."""
    return bool(address) and not is_loopback(address) and not address.lower().startswith(("fe80:", "169.254."))


def _lost_text(label: str, left: int, plan: LaunchPlan) -> str:
    return (
        f"{label}: the connection was lost; the processes there will be terminated within {plan.ssh.lost_after} s and "
        f"killed {plan.grace:.0f} s later{_going_on(left)}"
    )


def _end_text(label: str, ended: Ended, plan: LaunchPlan) -> str:
    """Describe how the command ended on a host; empty after a success."""
    if ended.why:
        return f"{label}: {printable(ended.why, 1000)}"
    return f"{label}: {plan.command[0]} {how_it_ended(ended.code)}" if ended.code else ""


def _going_on(left: int) -> str:
    return f"; {left} host{'s continue' if left > 1 else ' continues'}" if left else ""


# Exit code

FAILED = 1


class HostExit(NamedTuple):
    """How the command ended on a host: `code` is -N after signal N, None if the host was lost."""

    host: str
    code: int | None


def exit_code(ends: Sequence[HostExit]) -> int:
    """The exit code, from the exits in order; at least one is needed."""
    codes = [end.code for end in ends if end.code is not None]
    by_itself = [code for code in codes if code >= 0]
    failed = next((code for code in by_itself if code), None)
    if failed is not None:
        return failed
    if by_itself:
        return 0
    return 128 - codes[0] if codes else FAILED


def missing(ends: Sequence[HostExit]) -> list[str]:
    """The hosts that do not count: lost or killed."""
    return [end.host for end in ends if end.code is None or end.code < 0]
