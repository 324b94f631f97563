"""Agents that a real MPI launcher starts, on a host each, find one another by what that launcher knows."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.network import Network, network, why_not
from tests.jobs.launching import RALLYRUN, Job, Launcher, launching

WORKER = """
import os
e = os.environ
os.write(1, f"{e['RANK']} of {e['WORLD_SIZE']} on {os.uname().nodename} in {e['TORCHELASTIC_RUN_ID']}\\n".encode())
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


class Hosts:
    """Three hosts: the launcher runs on the last one, and starts agents on the others by a stand-in for ssh."""

    def __init__(self, net: Network, launcher: Launcher) -> None:
        self.launcher = launcher
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

    def start(self, family: str, *flags: str, per_host: int = 1, env: dict[str, str] | None = None) -> Job:
        """Start so many agents on each of n1 and n2."""
        if family == "Open MPI":
            words = ["--allow-run-as-root", "--mca", "plm_rsh_agent", str(self._ssh), "--host", "n1:9,n2:9"]
            words += ["--map-by", f"ppr:{per_host}:node", "--bind-to", "none"]
        else:
            words = ["-launcher", "rsh", "-launcher-exec", str(self._ssh), "-hosts", "n1,n2"]
            words += ["-ppn", str(per_host), "-n", str(2 * per_host), "-bind-to", "none"]
        command = [program(family), *words, *RALLYRUN, *flags, self._script]
        return self.launcher.command([str(self._ssh), self.console.name, shlex.join(command)], env)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(f"MPI TESTS DID NOT RUN: {reason}")
    with network("n1", "n2", "n3") as net, launching(tmp_path) as launcher:
        yield Hosts(net, launcher)


@pytest.mark.parametrize("family", PROGRAMS)
def test_one_agent_on_each_host_needs_nothing_more(hosts: Hosts, family: str) -> None:
    job = hosts.start(family, "--cluster=auto", "--nproc-per-node=2")
    assert job.ends() == 0, job.err
    found = sorted(line.partition(" in ")[0] for line in job.out)
    assert found == [f"{rank} of 4 on n{1 + rank // 2}" for rank in range(4)]
    (run_id,) = {line.partition(" in ")[2] for line in job.out}
    assert run_id.startswith("mpi-")


@pytest.mark.parametrize("family", PROGRAMS)
def test_several_agents_on_a_host_are_refused(hosts: Hosts, family: str) -> None:
    job = hosts.start(family, "--cluster=mpi", per_host=2)
    assert job.ends() == 2
    assert f"{family} has started 2 ranks on this host" in job.err
    assert "Traceback" not in job.err
    assert not job.out


@pytest.mark.parametrize("family", PROGRAMS)
def test_without_the_flag_one_of_them_warns(hosts: Hosts, family: str) -> None:
    job = hosts.start(family)
    assert job.ends() == 0, job.err
    assert sorted(line.partition(" in ")[0] for line in job.out) == ["0 of 1 on n1", "0 of 1 on n2"]
    assert job.err.count(f"{family} has 2 nodes, and --nnodes is 1: each of them runs a job of its own") == 1
