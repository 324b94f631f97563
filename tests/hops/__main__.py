"""Counts the functions and files that handle one event: `python -m tests.hops [--list] [EVENT...]`.

    kill    SIGKILL to a worker, until all new workers run; counts both agents of two nodes with two workers each
    term    SIGTERM to the node of two that does not host the coordinator, until its agent has ended; counts that agent
    join    the second of two nodes requests a place, until it has one; counts both agents
    etcd    SIGKILL to the coordinator's agent on etcd, until the next one is reached; counts a surviving agent

`--list` prints the functions of each file, in the order of their first calls.

Real agents run under a profiler, which also counts calls of other threads in that time. Only functions of the package
count, without comprehensions and module bodies.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests import etcd_cluster
from tests.ports import free_port

_TIMEOUT = 60.0
_WORKER = """\
import os, time
rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
with open(f"up.{start}.{rank}.new", "w") as out:
    out.write(f"{os.getpid()} {time.monotonic()}")
os.rename(f"up.{start}.{rank}.new", f"up.{start}.{rank}")
while not os.path.exists("finish"):
    time.sleep(0.02)
"""
_JOIN, _PLACED = ("rendezvous/", ".join"), ("agent/policy.py", "_on_placed")
_LINK_UP = ("agent/policy.py", "_on_link_up")


class Call(NamedTuple):
    """A call of a function; `at` is in seconds on the monotonic clock."""

    at: float
    file: str
    name: str

    def is_of(self, mark: tuple[str, str]) -> bool:
        return self.file.startswith(mark[0]) and self.name.endswith(mark[1])


class Job:
    """Agents under a profiler, in one folder."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._folder = folder
        self._flags = flags
        self._agents: list[subprocess.Popen[bytes]] = []
        (folder / "worker.py").write_text(_WORKER, encoding="utf-8")

    def start(self) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "LOGLEVEL": "WARNING",
            "TRACE_OUT": str(self._trace(len(self._agents))),
            "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
        }
        log = (self._folder / f"log.{len(self._agents)}").open("wb")
        command = [sys.executable, str(Path(__file__).with_name("agent.py")), *self._flags, "worker.py"]
        with log:
            agent = subprocess.Popen(command, cwd=self._folder, env=environment, stdout=log, stderr=log)
        self._agents.append(agent)
        return agent

    def start_at(self, port: int) -> subprocess.Popen[bytes]:
        """Start the agent that hosts the coordinator: the others are started when it does."""
        agent = self.start()
        self.until(lambda: listens(port), "the first agent")
        return agent

    def up(self, start: int, ranks: int) -> list[tuple[int, float]]:
        """Wait until all workers of a start run; returns their pids and start times."""
        paths = [self._folder / f"up.{start}.{rank}" for rank in range(ranks)]
        self.until(lambda: all(path.exists() for path in paths), f"workers of start {start}")
        return [(int(pid), float(at)) for pid, at in (path.read_text("utf-8").split() for path in paths)]

    def settled(self) -> float:
        """Wait until the agents are idle after a start; returns the time."""
        time.sleep(1.5)
        return time.monotonic()

    def until(self, done: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + _TIMEOUT
        while not done():
            if time.monotonic() > until:
                logs = "".join(path.read_text("utf-8", "replace") for path in self._folder.glob("log.*"))
                raise SystemExit(f"waited {_TIMEOUT:g} s in vain for {what}\n{logs}")
            time.sleep(0.02)

    def finish(self) -> list[list[Call]]:
        """End the job; returns the calls of each agent, none for an agent that was killed."""
        (self._folder / "finish").touch()
        for agent in self._agents:
            agent.wait(_TIMEOUT)
        paths = [self._trace(number) for number in range(len(self._agents))]
        return [[Call(*each) for each in json.loads(path.read_text())] if path.exists() else [] for path in paths]

    def end(self) -> None:
        for agent in self._agents:
            if agent.poll() is None:
                agent.kill()
                agent.wait()

    def _trace(self, number: int) -> Path:
        return self._folder / f"trace.{number}.json"


@contextlib.contextmanager
def job(*flags: str) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="rallypoint-hops-") as folder:
        made = Job(Path(folder), "--nproc-per-node=2", "--max-restarts=1", "--rdzv-id=hops", *flags)
        try:
            yield made
        finally:
            made.end()


def kill() -> list[Call]:
    port = free_port()
    with job("--nnodes=2", *c10d(port)) as made:
        made.start_at(port)
        made.start()
        pids = [pid for pid, _ in made.up(0, 4)]
        begin = made.settled()
        os.kill(pids[3], signal.SIGKILL)
        end = max(at for _, at in made.up(1, 4))
        return between(made.finish(), begin, end)


def term() -> list[Call]:
    port = free_port()
    with job("--nnodes=1:2", "--rdzv-conf=last_call_timeout=30", *c10d(port)) as made:
        agents = made.start_at(port), made.start()
        made.up(0, 4)
        begin = made.settled()
        agents[1].terminate()
        agents[1].wait(_TIMEOUT)
        end = time.monotonic()
        return between(made.finish()[1:], begin, end)


def join() -> list[Call]:
    with job("--nnodes=2", *c10d(free_port())) as made:
        made.start()
        made.start()
        made.up(0, 4)
        calls = made.finish()
        # Rank 1's agent is the one that asks last.
        begin, asking = max(
            (next(each.at for each in of if each.is_of(_JOIN)), number) for number, of in enumerate(calls)
        )
        end = next(each.at for each in calls[asking] if each.is_of(_PLACED))
        return between(calls, begin, end)


def etcd() -> list[Call]:
    with (
        tempfile.TemporaryDirectory(prefix="rallypoint-hops-etcd-") as data,
        etcd_cluster.running(Path(data), 1) as cluster,
    ):
        endpoint = str(cluster.endpoints[0])
        with job("--nnodes=1:3", "--rdzv-backend=etcd", f"--rdzv-endpoint={endpoint}") as made:
            first = made.start()
            made.up(0, 2)
            made.start()
            made.start()
            made.up(0, 6)
            begin = made.settled()
            first.kill()
            first.wait()
            made.until(lambda: made.up(0, 1)[0][1] > begin, "the next round")
            calls = made.finish()[1]
            end = next((each.at for each in calls if each.at > begin and each.is_of(_LINK_UP)), time.monotonic())
            return between([calls], begin, end)


def c10d(port: int) -> Sequence[str]:
    return "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"


def listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("localhost", port)) == 0


def between(calls: Sequence[Sequence[Call]], begin: float, end: float) -> list[Call]:
    return [each for of in calls for each in of if begin <= each.at <= end]


EVENTS = {"kill": kill, "term": term, "join": join, "etcd": etcd}


def main(arguments: Sequence[str]) -> None:
    for event in [each for each in arguments if each != "--list"] or EVENTS:
        functions: dict[str, dict[str, None]] = {}
        for each in EVENTS[event]():
            functions.setdefault(each.file, {})[each.name] = None
        print(f"{event:5} {sum(map(len, functions.values())):4} functions in {len(functions):3} files", flush=True)
        for file, names in sorted(functions.items()) if "--list" in arguments else ():
            print(f"    {file} {len(names)}", *names, sep="\n        ")


if __name__ == "__main__":
    main(sys.argv[1:])
