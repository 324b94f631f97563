"""Hosts as network namespaces: each has one cable to a switch in a namespace of its own.

The machine's own network is not touched: bridge, cables and addresses are inside the namespaces and vanish with them. A
host that is cut off falls silent: no FIN and no RST reaches anybody.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.processes import completed

_numbers = itertools.count()
_LISTEN = "0A"


def ip(*arguments: str) -> str:
    """Run `ip` of iproute2 and return what it prints."""
    done = completed(["ip", *arguments], check=True)
    return done.stdout


def why_not() -> str | None:
    """Why this machine cannot have namespaces, or None if it can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if shutil.which("ip") is None:
        return "needs `ip` (Debian: apt-get install iproute2)"
    try:
        with network("probe"):
            return None
    except AssertionError as error:
        return f"the kernel or container does not allow network namespaces: {error}"


class Host:
    """One namespace with one address."""

    def __init__(self, name: str, namespace: str, switch: str, number: int) -> None:
        self.name = name
        self.namespace = namespace
        self.address = f"10.77.0.{number}"
        self._switch = switch
        self._port = f"to-{name}"
        ip("netns", "add", namespace)
        ip("-n", switch, "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        ip("-n", switch, "link", "set", self._port, "master", "bridge", "up")
        ip("-n", namespace, "link", "set", "lo", "up")
        ip("-n", namespace, "link", "set", "eth0", "up")
        ip("-n", namespace, "address", "add", f"{self.address}/24", "dev", "eth0")

    @property
    def entry(self) -> list[str]:
        """What a command line begins with to run on this host; the process stays the same."""
        return ["ip", "netns", "exec", self.namespace]

    def cut_off(self) -> None:
        """From now on the switch passes on nothing from or to this host, which is not told."""
        self._set_port("nomaster")

    @contextmanager
    def unplugged(self, *, carrier: bool = True) -> Iterator[None]:
        """The host is cut off inside the block.

        Args:
            carrier: whether its end of the cable stays up. If not, the kernels notice, on both ends; when the cable is
                back they may need a second more to use it again.
        """
        self._set_port("nomaster" if carrier else "down")
        try:
            yield
        finally:
            self._set_port(*(("master", "bridge") if carrier else ("up",)))

    def _set_port(self, *what: str) -> None:
        ip("-n", self._switch, "link", "set", self._port, *what)

    @contextmanager
    def losing(self, percent: float) -> Iterator[None]:
        """Of what this host sends, some frames at random do not arrive at the switch."""
        command = ["ip", "netns", "exec", self._switch, sys.executable, "-m", "tests.faults.loss"]
        with subprocess.Popen(
            [*command, self._port, str(percent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                assert process.stdout.readline() == b"ready\n"
                yield
            finally:
                process.stdin.close()
                process.wait(60)

    def pids(self) -> list[int]:
        """The processes that run here, whatever their environment says."""
        return [int(pid) for pid in ip("netns", "pids", self.namespace).split()]

    def listening(self) -> list[str]:
        """Addresses and ports, in hexadecimal digits, that somebody listens on."""
        lines = "".join(self._proc_net(name) for name in ("tcp", "tcp6")).splitlines()
        return [line.split()[1] for line in lines if line.split()[3] == _LISTEN]

    def retransmissions(self) -> int:
        """TCP segments that had to be sent again so far."""
        names, values = [line.split() for line in self._proc_net("snmp").splitlines() if line.startswith("Tcp:")]
        return int(values[names.index("RetransSegs")])

    def _proc_net(self, name: str) -> str:
        command = [*self.entry, "cat", f"/proc/net/{name}"]
        return completed(command, check=True).stdout


class Network:
    """A switch and its hosts."""

    def __init__(self) -> None:
        # The pid keeps test processes that run side by side apart.
        self._tag = f"rally-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{self._tag}-switch"
        self.hosts: list[Host] = []
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._switch, "link", "set", "bridge", "up")

    def add(self, name: str) -> Host:
        """A new host; `name` has at most 12 letters."""
        host = Host(name, f"{self._tag}-{name}", self._switch, len(self.hosts) + 1)
        self.hosts.append(host)
        return host

    def close(self) -> None:
        """Take everything away; idempotent."""
        for namespace in self.left():
            ip("netns", "del", namespace)

    def left(self) -> list[str]:
        """Our namespaces that are still there."""
        folder = Path("/run/netns")
        return [name for name in os.listdir(folder) if name.startswith(f"{self._tag}-")] if folder.exists() else []


@contextmanager
def network(*names: str) -> Iterator[Network]:
    """A network with these hosts, and the check that the hosts are empty and gone at the end."""
    made: list[Network] = []
    try:
        net = Network()
        made.append(net)
        for name in names:
            net.add(name)
        yield net
        processes = {host.name: pids for host in net.hosts if (pids := host.pids())}
        listening = {host.name: ports for host in net.hosts if (ports := host.listening())}
    finally:
        for net in made:
            for host in net.hosts:
                for pid in host.pids():
                    with suppress(ProcessLookupError):
                        os.kill(pid, 9)
            net.close()
    assert not processes, f"processes were left on the hosts: {processes}"
    assert not listening, f"somebody still listens on the hosts: {listening}"
    assert not net.left(), f"namespaces were left: {net.left()}"
