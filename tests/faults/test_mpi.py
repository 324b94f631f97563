"""Agents started by a real MPI launcher, one per host, find each other through that launcher's data."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.faults.network import Network, network, why_not
from tests.jobs.launching import RALLYRUN, Job, Launcher, launching
from tests.processes import command_line
from tests.waiting import until

WORKER = """
import os, sys, time
e = os.environ
os.write(1, f"{e['RANK']} of {e['WORLD_SIZE']} on {os.uname().nodename} in {e['TORCHELASTIC_RUN_ID']}\\n".encode())
if "fail" in sys.argv and e["RANK"] == "1":
    sys.exit(7)
if len(sys.argv) > 1:
    time.sleep(600)
"""
PROGRAMS = {
    "Open MPI": (("mpirun.openmpi", "mpirun"), "openmpi-bin"),
    "Hydra": (("mpiexec.hydra", "mpiexec.mpich"), "mpich"),
}


def program(family: str) -> str:
    """The launcher of this family, or the test says loudly that it did not run."""
    names, package = PROGRAMS[family]
    for name in names:
        if found := shutil.which(name):
            return found
    pytest.skip(f"MPI TESTS DID NOT RUN: needs {' or '.join(names)} (Debian: apt-get install {package})")


MEET = ("--rdzv-backend=c10d", "--rdzv-endpoint=n1:29400")
"""Each host is a network namespace, so the port is free."""


class Hosts:
    """Three hosts: the launcher runs on the last one, and starts agents on the others by a stand-in for ssh."""

    def __init__(self, net: Network, launcher: Launcher) -> None:
        self.launcher = launcher
        self.hosts = net.hosts
        self.console = net.hosts[-1]
        names = "".join(f"{host.address} {host.name}\n" for host in net.hosts)
        hosts = launcher.folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{names}")
        prefix = net.hosts[0].namespace.removesuffix(net.hosts[0].name)
        self._ssh = launcher.folder / "ssh"
        self._ssh.write_text(
            "#!/bin/sh\nwhile case $1 in -*) true ;; *) false ;; esac; do shift; done\nname=$1; shift\n"
            f"exec nsenter --net=/run/netns/{prefix}$name unshare --uts --mount sh -c "
            f"'hostname $1 && mount --bind {shlex.quote(str(hosts))} /etc/hosts && shift && exec sh -c \"$*\"' "
            'sh "$name" "$@"\n'
        )
        self._ssh.chmod(0o755)
        self._script = launcher.script(WORKER)

    def start(self, family: str, *flags: str, worker: Sequence[str] = ()) -> Job:
        """Start an agent on each of n1 and n2; `worker` are the arguments of the workers."""
        if family == "Open MPI":
            words = ["--allow-run-as-root", "--mca", "plm_rsh_agent", str(self._ssh), "--host", "n1:9,n2:9"]
            words += ["--map-by", "ppr:1:node", "--bind-to", "none"]
        else:
            words = ["-launcher", "rsh", "-launcher-exec", str(self._ssh), "-hosts", "n1,n2"]
            words += ["-ppn", "1", "-n", "2", "-bind-to", "none"]
        command = [program(family), *words, *RALLYRUN, *flags, self._script, *worker]
        return self.launcher.command([str(self._ssh), self.console.name, f"exec {shlex.join(command)}"])

    def kill_agent(self, name: str) -> None:
        """SIGKILL to the agent on a host."""
        (host,) = [host for host in self.hosts if host.name == name]
        words = [*RALLYRUN[1:], "--cluster=auto"]
        agents = [pid for pid in host.pids() if words == command_line(pid).split(" ")[1:4]]
        os.kill(agents[0], signal.SIGKILL)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(f"MPI TESTS DID NOT RUN: {reason}")
    with network("n1", "n2", "n3") as net, launching(tmp_path) as launcher:
        yield Hosts(net, launcher)


@pytest.mark.parametrize("family", PROGRAMS)
def test_a_failure_of_a_worker_is_the_launchers(hosts: Hosts, family: str) -> None:
    job = hosts.start(family, "--cluster=auto", *MEET, "--nproc-per-node=1", worker=["fail"])
    assert job.ends() == 1, job.err
    assert "exitcode  : 7" in job.err


@pytest.mark.parametrize("family", PROGRAMS)
def test_a_signal_to_the_launcher_ends_all_agents_and_their_workers(hosts: Hosts, family: str) -> None:
    job = hosts.start(family, "--cluster=auto", *MEET, "--nproc-per-node=1", worker=["stay"])
    job.until(lambda lines: len(lines) == 2, "both workers are up")
    job.signal(signal.SIGTERM)
    job.ends()  # Hydra's code for it is 0
    until(lambda: not hosts.launcher.left(), "nothing of the job is left")


@pytest.mark.parametrize("family", PROGRAMS)
def test_an_agent_that_is_killed_ends_all_others(hosts: Hosts, family: str) -> None:
    """The launcher does that; a job that has to survive the loss of a node is started by something else."""
    job = hosts.start(family, "--cluster=auto", *MEET, "--nnodes=1:2", "--nproc-per-node=1", worker=["stay"])
    job.until(lambda lines: len(lines) == 2, "both workers are up")
    hosts.kill_agent("n2")
    assert job.ends() != 0
