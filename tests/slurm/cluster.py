"""A real Slurm with a controller and some nodes, each a host of its own (`tests.faults.network`).

Each has its own name, address, ports and /etc/hosts; files and processes are the machine's. So a Slurm or munge that
the machine may run is not touched, several clusters do not meet, and all of one ends with its namespaces.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.environment import undisturbed
from tests.faults import network
from tests.faults.network import Host, Network
from tests.processes import command_line, completed
from tests.waiting import until

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "munged", "mungekey")
KILL_WAIT = 5
"""Seconds that Slurm leaves between SIGTERM and SIGKILL here."""
TIMEOUT = 120.0

_CONTROLLER = "ctl"
_CONF = """
ClusterName=rallypoint
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
# No control groups: processes are found by their parents, and every process of a step gets its signals.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/linear
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
# A test does not wait: a lost node is found within seconds, and one that is back takes jobs at once.
SlurmdTimeout=6
KillWait={kill_wait}
BatchStartTimeout=10
MessageTimeout=10
ReturnToService=2
JobRequeue=1
MinJobAge=600
NodeName={nodes} CPUs=2 RealMemory=1000 State=UNKNOWN {places}
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE OverSubscribe=YES State=UP
"""


def why_not() -> str | None:
    """Why this machine cannot have a Slurm, or None if it can."""
    missing = [name for name in PROGRAMS if _program(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: apt-get install slurm-wlm munge)"
    return network.why_not()


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")


class Slurm:
    """The cluster, with the nodes n1, n2, ..."""

    def __init__(self, net: Network, folder: Path, nodes: int) -> None:
        self.folder = folder
        self._net = net
        self.controller = net.add(_CONTROLLER)
        self.nodes = {f"n{number}": net.add(f"n{number}") for number in range(1, nodes + 1)}
        for name in (folder / "state", *(folder / each for each in self.nodes)):
            name.mkdir()
        names = {host.address: name for name, host in ((_CONTROLLER, self.controller), *self.nodes.items())}
        hosts = "".join(f"{address} {name}\n" for address, name in names.items())
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        conf = _CONF.format(
            controller=_CONTROLLER,
            address=self.controller.address,
            folder=folder,
            kill_wait=KILL_WAIT,
            nodes=f"n[1-{nodes}]",
            places=f"NodeAddr=n[1-{nodes}]",
        )
        (folder / "slurm.conf").write_text(conf)

    def start(self) -> None:
        """Start all daemons; returns when all nodes are idle."""
        key, socket = self.folder / "munge.key", self.folder / "munge.socket"
        self._run(self.controller, "mungekey", "--create", f"--keyfile={key}")
        self._run(
            *(self.controller, "munged", "--force", f"--key-file={key}", f"--socket={socket}", "--num-threads=2"),
            *(f"--{each}-file={self.folder}/munged.{each}" for each in ("pid", "log", "seed")),
        )
        self._run(self.controller, "slurmctld", "-f", str(self.folder / "slurm.conf"))
        for name in self.nodes:
            self.boot(name)
        self.until_idle()

    def boot(self, name: str) -> None:
        """Start the daemon of a node."""
        self._run(self.nodes[name], "slurmd", "-N", name, "-f", str(self.folder / "slurm.conf"))

    def until_idle(self) -> None:
        """Wait until all nodes take jobs."""
        until(
            lambda: self("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(len(self.nodes)),
            lambda: f"all nodes idle; {self('sinfo')}, see {self.folder}",
            TIMEOUT,
        )

    def lose(self, name: str) -> None:
        """SIGKILL to all that runs on a node."""
        for pid in self.nodes[name].pids():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)

    def __call__(self, *command: str, env: dict[str, str] | None = None) -> str:
        """Run a command of Slurm's on the controller; returns what it prints."""
        return self._run(self.controller, *command, env=env)

    def pids(self, name: str, text: str) -> list[int]:
        """The processes on a node whose command line has this text, the first one first."""
        return [pid for pid in sorted(self.nodes[name].pids()) if text in command_line(pid)]

    def close(self) -> None:
        """End jobs and daemons."""
        with suppress(AssertionError):
            self("scancel", "--state=RUNNING,PENDING,SUSPENDED")
        for host in (self.controller, *self.nodes.values()):
            for pid in host.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
        until(lambda: not any(host.pids() for host in self._net.hosts), "all daemons have ended", TIMEOUT)

    def _run(self, host: Host, program: str, *arguments: str, env: dict[str, str] | None = None) -> str:
        # Named by the file of its namespace: `ip netns exec` would take /sys away from Slurm.
        enter = ["nsenter", f"--net=/run/netns/{host.namespace}", "unshare", "--uts", "--mount", "sh", "-c"]
        become = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
        name = host.name
        done = completed(
            [*enter, become, "sh", name, str(self.folder / "hosts"), _program(program) or program, *arguments],
            env={**undisturbed(), "SLURM_CONF": str(self.folder / "slurm.conf"), **(env or {})},
            check=True,
        )
        return done.stdout


@contextmanager
def slurm(nodes: int) -> Iterator[Slurm]:
    """A cluster of so many nodes; nothing of it is left at the end."""
    with network.network() as net, tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        cluster = Slurm(net, folder, nodes)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()
