"""A job whose agents run on hosts of their own, and workers that tell what could not be seen from outside.

Laws that hold in every test, told by the workers themselves and checked at the end:

- an agent never has two workers of one local rank at a time: a new one starts when the old one is gone;
- nobody holds a rank of a round that somebody else holds.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import rallypoint
from tests.faults.network import Host, Network
from tests.jobs.launching import RALLYCTL, RALLYRUN, Job, Launcher
from tests.jobs.nodes import NAMES, Node, all_up

LEASE = 3.0
"""Seconds; shorter than the default, to be quick where a loss is waited for and one more would do no harm."""
SAFE_LEASE = 6.0
"""Seconds; on a busy machine, processes may stand still for seconds, and none of them is to be taken for lost."""
SOON = 20.0
"""Seconds that a regroup may take at most once the loss is known; far less on a machine with nothing else to do."""
PORT = 29400

SCRIPT = f"""
import fcntl, json, os, signal, sys, time
e = os.environ
if "DEAF" in e:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
node, count, held = e["NODE"], e["TORCHELASTIC_RESTART_COUNT"], []
def own(what):
    held.append(os.open("own-" + what, os.O_CREAT | os.O_RDONLY))
    try:
        fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.write(1, f"CLASH: {{what}} is held by two\\n".encode())
own(f"node-{{node}}-{{e['LOCAL_RANK']}}")
own(f"round-{{e['MASTER_ADDR']}}-{{e['MASTER_PORT']}}-{{e['RANK']}}")
shown = {{name: value for name, value in e.items() if name in {NAMES!r} or name.startswith("TORCHELASTIC")}}
shown |= {{"NODE": node, "pid": os.getpid(), "at": time.monotonic(), "clock": time.time()}}
os.write(1, json.dumps(shown).encode() + b"\\n")
while True:
    if os.path.exists(f"fail-{{node}}-{{count}}"):
        raise SystemExit(f"{{node}} fails in {{count}}")
    if os.path.exists("finish"):
        os.write(1, b"done\\n")
        sys.exit(0)
    time.sleep(0.02)
"""


@dataclass
class Agent(Node):
    """An agent on a host, with one worker."""

    host: Host

    def is_killed(self) -> float:
        """SIGKILL to the agent and to nothing else; returns the moment."""
        at = time.monotonic()
        self.job.signal(signal.SIGKILL)
        return at

    @property
    def up_at(self) -> float:
        """When its last worker came up, in monotonic seconds."""
        return float(self.ups[-1]["at"])

    @property
    def pid(self) -> int:
        """The pid of its last worker."""
        return int(self.ups[-1]["pid"])


class Cluster:
    """Starts the agents of one job on the hosts of a network; the first host has the control plane's address."""

    def __init__(self, net: Network, launcher: Launcher) -> None:
        self.net = net
        self.launcher = launcher
        self.nnodes = "2:3"
        self.lease: float | None = SAFE_LEASE
        self.conf = ""
        self.backend = "c10d"
        self.within: list[str] = []
        """What the agents' command lines begin with, behind their hosts' own beginning."""
        self.where = ""
        """Where agents meet, if not at a control plane on the first host."""
        self._script = launcher.script(SCRIPT)
        self.agents: list[Agent] = []
        self._hosts: dict[str, Host] = {}

    def host(self, name: str) -> Host:
        """The host of this name; the first time that it is named, it is made."""
        if name not in self._hosts:
            self._hosts[name] = self.net.add(name)
        return self._hosts[name]

    @property
    def endpoint(self) -> str:
        """The control plane's: on the first host, unless it is said to be elsewhere."""
        return self.where or f"{self.net.hosts[0].address}:{PORT}"

    def start(self, name: str, *flags: str, on: str | None = None, env: dict[str, str] | None = None) -> Agent:
        """Start an agent with one obedient worker, on the host of its own name unless another is named."""
        return self.run(name, [*flags, self._script], on=on, env=env)

    def run(
        self, name: str, command: Sequence[str], *, on: str | None = None, env: dict[str, str] | None = None
    ) -> Agent:
        """Start an agent; `command` is the end of its command line, the workers' program included."""
        host = self.host(on or name)
        conf = [f"lease={self.lease}"] if self.lease is not None else []
        conf += [self.conf] if self.conf else []
        flags = [f"--nnodes={self.nnodes}", f"--rdzv-backend={self.backend}", "--rdzv-id=job"]
        flags += [f"--rdzv-endpoint={self.endpoint}"]
        flags += [f"--rdzv-conf={','.join(conf)}"] if conf else []
        return self._launch(name, host, [*flags, *command], env)

    def alone(self, name: str, flags: Sequence[str]) -> Agent:
        """Start an agent with one obedient worker that is told where to meet by these flags and nothing else."""
        return self._launch(name, self.host(name), [*flags, self._script], None)

    def _launch(self, name: str, host: Host, command: Sequence[str], env: dict[str, str] | None) -> Agent:
        merged = {"NODE": name, "LOGLEVEL": "INFO", **(env or {})}
        agent = Agent(name, self.launcher.command([*host.entry, *self.within, *RALLYRUN, *command], merged), host)
        self.agents.append(agent)
        return agent

    def serve(self) -> Job:
        """Start a control plane of its own on the first host, and wait until it listens."""
        host = self.host("control")
        command = [*RALLYCTL, "serve", f"--endpoint={self.endpoint}"]
        job = self.launcher.command([*host.entry, *command])
        job.until_err("control plane listens")
        return job

    def three(self) -> list[Agent]:
        """Agents A (which hosts the control plane), B and C, with their workers up in one world."""
        agents = [self.start(name) for name in "ABC"]
        self.all_up(agents)
        return agents

    def all_up(self, agents: Sequence[Agent], starts: int = 1) -> None:
        """Wait until each has its worker up for that many times, in a world of all of them."""
        all_up(agents, starts=starts, world_size=len(agents))
        assert sorted(agent.ranks(1)[0] for agent in agents) == list(range(len(agents)))

    def say(self, what: str) -> None:
        """Tell the workers: `finish` or `fail-<agent>-<restart count>`."""
        (self.launcher.folder / what).touch()

    def finish(self, agents: Sequence[Agent]) -> None:
        """The workers succeed, and so does the job."""
        self.say("finish")
        for agent in agents:
            assert agent.job.ends() == 0, (agent.name, agent.job.err)

    def check(self) -> None:
        """The laws above, and that no agent has shown a traceback of its own."""
        ours = f'File "{Path(rallypoint.__file__).parent}'
        for agent in self.agents:
            assert not [line for line in agent.job.out if "CLASH" in line], (agent.name, agent.job.out)
            assert ours not in agent.job.err, (agent.name, agent.job.err)


def stays(agents: Sequence[Agent], seconds: float) -> None:
    """For so many seconds no worker is replaced and no agent ends."""
    before = [agent.ups for agent in agents]
    threading.Event().wait(seconds)
    assert [agent.ups for agent in agents] == before, [agent.job.err for agent in agents]
    assert not [agent.name for agent in agents if gone(agent.pid)], "a worker is gone and nobody has noticed"


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has reaped yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def mounted(folder: Path, size: int) -> None:
    """Mount a small file system of its own, of so many bytes, over a new folder."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True, timeout=30)
