"""Hosts reached by ssh: each is a namespace with a name and an sshd of its own, and jobs start from one of them.

Only ssh knows the names, by its configuration: the hosts cannot resolve each other's. More names: nothing listens at
`deaf`, `denied` admits nobody, `here` is the first host as it calls itself, and names that begin with `slow` are the
last host, which accepts only a few new connections at a time.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.environment import JOBS
from tests.faults import network
from tests.faults.network import Host, Network, ip
from tests.jobs.launching import RALLYCTL, Job, Launcher
from tests.processes import command_line
from tests.waiting import until

SSHD = "/usr/sbin/sshd"
_PRIVILEGE_SEPARATION = Path("/run/sshd")
"""Debian's sshd wants it; there is none until the service has been started once."""
_SSHD_CONFIG = """
HostKey {folder}/{name}.key
AuthorizedKeysFile {folder}/user.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups {connections}:100:{connections}
"""
_SSH_CONFIG = """
Host {name}
  HostName {address}
"""
_COMMON = """
Host deaf
  HostName {login}
Host denied
  HostName {first}
  HostKeyAlias {first}
  PubkeyAuthentication no
Host here
  HostName 127.0.0.1
  HostKeyAlias {first}
Host busy*
  HostName {last}
  HostKeyAlias {last}
Host *
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile none
"""


def why_not() -> str | None:
    """Why this machine cannot have such hosts, or None if it can."""
    if not os.path.exists(SSHD) or shutil.which("ssh") is None:
        return "needs ssh and sshd (Debian: apt-get install openssh-client openssh-server)"
    return network.why_not()


class SshHosts:
    """Some hosts with sshd, and the host `login` without."""

    def __init__(self, net: Network, folder: Path, names: Sequence[str], *, ipv6_only: bool = False) -> None:
        self.folder = folder
        self.login = net.add("login")
        self.hosts = {name: net.add(name) for name in names}
        self.addresses = {name: host.address for name, host in self.hosts.items()}
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        if ipv6_only:
            for number, host in enumerate((self.login, *self.hosts.values()), 1):
                ip("-n", host.namespace, "address", "flush", "dev", "eth0", "scope", "global")
                ip("-n", host.namespace, "address", "add", f"fd77::{number}/64", "dev", "eth0", "nodad")
                self.addresses[host.name] = f"fd77::{number}"
        self._key("user")
        self.config = folder / "ssh_config"
        entries = [_SSH_CONFIG.format(name=name, address=self.addresses[name]) for name in names]
        common = _COMMON.format(
            folder=folder, login=self.login.address, first=self.addresses[names[0]], last=self.addresses[names[-1]]
        )
        self.config.write_text("".join([*entries, common]))
        for name in names:
            self._key(f"{name}.key")
        self.trust(*names)

    def _key(self, name: str) -> None:
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
        subprocess.run(command, check=True, timeout=30)
        (self.folder / f"{name}.pub").chmod(0o644)  # sshd reads it as the user who logs in, whatever the umask here is

    def trust(self, *names: str) -> None:
        """Let ssh know the keys of these hosts and of no others."""
        lines = [f"{self.addresses[name]} {(self.folder / f'{name}.key.pub').read_text()}" for name in names]
        (self.folder / "known_hosts").write_text("".join(lines))

    def start(self) -> None:
        """Start an sshd on each host; returns when all listen."""
        _PRIVILEGE_SEPARATION.mkdir(exist_ok=True)
        _PRIVILEGE_SEPARATION.chmod(0o755)
        busy = list(self.hosts.values())[-1]
        for name, host in self.hosts.items():
            config = self.folder / f"{name}.conf"
            config.write_text(
                _SSHD_CONFIG.format(folder=self.folder, name=name, connections=3 if host is busy else 100)
            )
            enter = ["nsenter", f"--net=/run/netns/{host.namespace}", "unshare", "--uts", "sh", "-c"]
            become = 'hostname "$1" && shift && exec "$@"'
            with open(self.folder / f"{name}.log", "wb") as log:
                self._servers[name] = subprocess.Popen(
                    [*enter, become, "sh", name, SSHD, "-D", "-e", "-f", str(config)],
                    stdin=subprocess.DEVNULL,
                    stderr=log,
                    env={"PATH": os.environ["PATH"]},
                )
        for name, host in self.hosts.items():
            until(lambda host=host: bool(host.listening()), f"sshd listens on {name}")  # type: ignore[misc]

    def close(self) -> None:
        """End all sshds."""
        for server in self._servers.values():
            server.terminate()
            server.wait(10)

    def launch(self, launcher: Launcher, *words: str, env: dict[str, str] | None = None, on: Host | None = None) -> Job:
        """Run `rallyctl launch` with these arguments, on `login` or elsewhere; the command carries the test's mark."""
        return launcher.command(self._command(words, on or self.login), env)

    @contextmanager
    def launch_into_pipe(self, launcher: Launcher, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        """The same, with a standard output that nobody reads yet."""
        with subprocess.Popen(
            self._command(words, self.login),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=launcher.environment(),
            cwd=launcher.folder,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def _command(self, words: Sequence[str], on: Host) -> list[str]:
        flags = [
            f"--ssh-args=-F {self.config}",
            "--env=RALLYPOINT_TEST_MARK",
            "--env=TMPDIR",
            f"--env={JOBS}",
            "--env=OMP_NUM_THREADS",
        ]
        return [*on.entry, *RALLYCTL, "launch", *flags, *words]

    def lose(self, name: str) -> None:
        """SIGKILL to all that runs on a host but its sshd, the sessions of that included."""
        for pid in self.hosts[name].pids():
            if pid != self._servers[name].pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def running(self) -> dict[str, list[str]]:
        """What runs on each host beside its sshd: command lines."""
        found = {name: self._commands(host, {self._servers[name].pid}) for name, host in self.hosts.items()}
        found["login"] = self._commands(self.login, set())
        return {name: commands for name, commands in found.items() if commands}

    def pids(self, name: str, text: str) -> list[int]:
        """The processes on a host whose command line has this text."""
        return [pid for pid in self.hosts[name].pids() if text in command_line(pid)]

    def until_empty(self) -> float:
        """Wait until nothing runs on any host; returns how long that took."""
        since = time.monotonic()
        until(lambda: not self.running(), f"all hosts are empty: {self.running()}")
        return time.monotonic() - since

    @staticmethod
    def _commands(host: Host, but: set[int]) -> list[str]:
        return [line for pid in host.pids() if pid not in but and (line := command_line(pid))]


@contextmanager
def ssh_hosts(*names: str, ipv6_only: bool = False) -> Iterator[SshHosts]:
    """Hosts with sshd; nothing of them is left at the end."""
    with network.network() as net, tempfile.TemporaryDirectory(prefix="ssh-") as folder:
        Path(folder).chmod(0o755)  # sshd reads a user's keys as that user
        made = SshHosts(net, Path(folder), names, ipv6_only=ipv6_only)
        try:
            made.start()
            yield made
            made.until_empty()
        finally:
            made.close()
