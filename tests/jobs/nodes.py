"""A job of several agents on this machine, with workers that a test controls by files in the folder."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.jobs.launching import RALLYCTL, Job, Launcher
from tests.ports import free_port
from tests.waiting import until

SCRIPT = """
import json, os, pathlib, sys, time
e = os.environ
node, count, rank = e["NODE"], e["TORCHELASTIC_RESTART_COUNT"], e["RANK"]
shown = {name: value for name, value in e.items() if name in NAMES or name.startswith("TORCHELASTIC")}
os.write(1, json.dumps({**shown, "NODE": node, "pid": os.getpid()}).encode() + b"\\n")
while True:
    if os.path.exists(f"fail-{node}-{count}"):
        raise SystemExit(f"{node} fails in {count}")
    if os.path.exists("finish") or os.path.exists(f"finish-{node}"):
        os.write(1, b"done\\n")
        sys.exit(0)
    time.sleep(0.02)
"""

NAMES = [
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
]


@dataclass
class Node:
    """One agent, and what its workers have said."""

    name: str
    job: Job

    @property
    def ups(self) -> list[dict[str, str]]:
        """What each worker found in its environment, in the order of their starts."""
        return _ups(self.job.out)

    def last(self, workers: int) -> list[dict[str, str]]:
        """The workers that were started last, by rank."""
        return sorted(self.ups[-workers:], key=lambda up: int(up["RANK"]))

    def ranks(self, workers: int) -> list[int]:
        """The ranks of the workers that were started last."""
        return [int(up["RANK"]) for up in self.last(workers)]

    def comes_up(self, workers: int, starts: int = 1, world_size: int | None = None) -> None:
        """Wait until the node's workers are up for the `starts`-th time, in a world of that size."""

        def holds(lines: list[str]) -> bool:
            ups = _ups(lines)
            right = world_size is None or all(up["WORLD_SIZE"] == str(world_size) for up in ups[-workers:])
            return len(ups) >= workers * starts and right

        self.job.until(holds, f"node {self.name}: {workers} workers up, start {starts}, world size {world_size}")

    def dies(self) -> None:
        """SIGKILL to the agent. Its workers and temporary files are its reaper's to take away."""
        self.job.signal(signal.SIGKILL)
        assert self.job.ends() == -signal.SIGKILL


def _ups(lines: Iterable[str]) -> list[dict[str, str]]:
    return [{name: str(value) for name, value in json.loads(line).items()} for line in lines if line.startswith("{")]


class Nodes:
    """The nodes of one job."""

    def __init__(self, rallyrun: Launcher, *flags: str, env: dict[str, str] | None = None) -> None:
        self._rallyrun = rallyrun
        self.flags = flags
        self._env = env or {}
        self.script = rallyrun.script(f"NAMES = {NAMES!r}\n{SCRIPT}")

    def start(self, name: str, *flags: str, env: dict[str, str] | None = None) -> Node:
        """Start the agent of a node that is called `name`."""
        merged = {**self._env, "NODE": name, **(env or {})}
        return Node(name, self._rallyrun(*self.flags, *flags, self.script, env=merged))

    def host(self, name: str, env: dict[str, str] | None = None) -> Node:
        """Start an agent and wait until it hosts the control plane of a c10d job."""
        node = self.start(name, env={"LOGLEVEL": "INFO", **(env or {})})
        node.job.until_err("control plane listens on port")
        return node

    def first(self, name: str) -> Node:
        """Start a host, and wait until it has requested a place, so that it gets group rank 0.

        On a busy machine an agent listens long before it requests its own place, and another may be faster.
        """
        node = self.host(name)
        port = next(line for line in node.job.err.splitlines() if "control plane listens on port" in line).split()[-1]
        command = [*RALLYCTL, "status", "--json", f"127.0.0.1:{port}"]

        def is_known() -> bool:
            watcher = self._rallyrun.command(command)
            watcher.ends()  # the code says that the job waits for nodes
            return bool(json.loads("\n".join(watcher.out) or '{"nodes": []}')["nodes"])

        until(is_known, f"{name} has requested a place")
        return node

    def up(self, names: str = "AB", *, hosted: bool = False) -> list[Node]:
        """Start nodes of one worker each, and wait until these are in one world; `hosted`: the first is a `host`."""
        nodes = [self.host(name) if hosted and name == names[0] else self.start(name) for name in names]
        all_up(nodes, world_size=len(names))
        return nodes

    def say(self, what: str) -> None:
        """Tell the workers: `finish`, `finish-<node>` or `fail-<node>-<restart count>`."""
        (self._rallyrun.folder / what).touch()


def c10d(rallyrun: Launcher, nnodes: str, *flags: str, conf: str = "", env: dict[str, str] | None = None) -> Nodes:
    """A job whose control plane is at a port of the kernel's choice; the first agent to come hosts it."""
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    conf_flags = [f"--rdzv-conf={conf}"] if conf else []
    return Nodes(
        rallyrun, f"--nnodes={nnodes}", "--rdzv-backend=c10d", "--rdzv-id=job", endpoint, *conf_flags, *flags, env=env
    )


def all_up(nodes: Iterable[Node], starts: int = 1, world_size: int | None = None) -> None:
    """All nodes, of one worker each, come up for the `starts`-th time, in a world of that size."""
    for node in nodes:
        node.comes_up(1, starts, world_size)


def common(nodes: Sequence[Node], sizes: Sequence[int], name: str) -> str:
    """The value that a variable has in all last workers of all nodes."""
    values = {up[name] for node, size in zip(nodes, sizes, strict=True) for up in node.last(size)}
    assert len(values) == 1, (name, values)
    return values.pop()


def all_ranks(nodes: Sequence[Node], sizes: Sequence[int]) -> list[int]:
    """The ranks of all last workers, sorted."""
    return sorted(rank for node, size in zip(nodes, sizes, strict=True) for rank in node.ranks(size))


def all_end(nodes: Sequence[Node], code: int) -> None:
    """All agents end with this exit code."""
    for node in nodes:
        assert node.job.ends() == code, (node.name, node.job.err)


def told_in_short(node: Node) -> str:
    """The line that stands for the report where others give it, from the rank on; there is no report then."""
    assert "Root Cause" not in node.job.err, node.job.err
    (line,) = [line for line in node.job.err.split("\n") if " FAILED: " in line]
    return line.partition(" FAILED: ")[2]


def root_cause(node: Node) -> list[str]:
    """The lines of the report about the first failure that are the same wherever they are printed."""
    report = node.job.err[node.job.err.index("Root Cause") :].split("\n")
    return [line.rstrip() for line in report if line.startswith(("  time", "  rank", "  exitcode", "  traceback"))]
