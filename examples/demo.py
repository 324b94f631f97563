"""Show what Rallypoint is for: a training job loses a worker, then a whole node, and ends as if nothing had happened.

    make demo

`train_ddp.py` runs three times. First with two workers, undisturbed. Then one of the two workers is killed with SIGKILL
in the middle: the job must regroup, resume from its last checkpoint, and finish with the same loss to 1e-6. Last with
three nodes (agents on loopback) of one worker each, of which two suffice: the agent of one is killed with SIGKILL, its
worker must go with it, and the other two must finish with the same loss. Exits with 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

WORKERS = 2
NODES = 3
VICTIM = 1
TOLERANCE = 1e-6
TIMEOUT = 60.0
"""Seconds after which a run that says nothing more is given up."""
ALONG = 2.0
"""Seconds after which a worker that outlives its agent is given up."""
MARK = "RALLYPOINT_DEMO"
"""Names a variable that every process of a run carries, so that none can be left behind."""

Event = dict[str, Any]


class DemoError(Exception):
    """Something is not as claimed."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its last loss, and the seconds that it took."""

    loss: float
    seconds: float


class Run:
    """One job. What its workers tell comes through a named pipe, one line of JSON an event."""

    def __init__(self, launchers: Sequence[list[str]], steps: int, folder: Path) -> None:
        folder.mkdir()
        pipe = folder / "progress"
        os.mkfifo(pipe)
        # Open for both ways: the pipe never ends while workers come and go.
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self._pending = b""
        self._mark = uuid.uuid4().hex
        self._log = folder / "log"
        script = [str(Path(__file__).with_name("train_ddp.py")), f"--steps={steps}", f"--progress={pipe}"]
        script.append(f"--checkpoint-dir={folder / 'checkpoint'}")
        self._began = time.monotonic()
        self._agents = [self._start([*launcher, *script]) for launcher in launchers]
        self._ended = {os.pidfd_open(agent.pid): agent for agent in self._agents}

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            env = os.environ | {"OMP_NUM_THREADS": "1", MARK: self._mark}
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)

    def seconds(self) -> float:
        """Since the launcher was started."""
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        """One line of the account, with the time at which it happened."""
        print(f"  {self.seconds():6.2f} s  {text}", flush=True)

    def wait_for(self, wanted: Callable[[Event], bool]) -> Event:
        """The next event that `wanted` accepts.

        Raises:
            DemoError: an agent failed, all ended, or nobody said anything for too long.
        """
        for event in self._events():
            if wanted(event):
                return event
        raise DemoError("all launchers ended, with exit code 0, before the training did")

    def wait_for_all(self, name: str, workers: int = WORKERS) -> list[Event]:
        """The event `name` of every worker, in order of rank."""
        found: dict[int, Event] = {}
        while len(found) < workers:
            event = self.wait_for(lambda event: event["event"] == name)
            found[event["rank"]] = event
        return [found[rank] for rank in sorted(found)]

    def agent_pid(self, number: int) -> int:
        """The process of one launcher."""
        return self._agents[number].pid

    def kill_agent(self, number: int, worker: int) -> tuple[float, float]:
        """SIGKILL to one agent and nothing else. Returns the moment, and the seconds until its worker was gone.

        Raises:
            DemoError: the worker stays.
        """
        agent, watched = self._agents[number], os.pidfd_open(worker)
        for fd in [fd for fd, each in self._ended.items() if each is agent]:
            del self._ended[fd]
            os.close(fd)
        at = time.monotonic()
        agent.kill()
        gone, _, _ = select.select([watched], [], [], ALONG)
        took = time.monotonic() - at
        os.close(watched)
        agent.wait()
        if not gone:
            raise DemoError(f"the worker {worker} still runs {ALONG:.0f} s after its agent was killed")
        return at, took

    def finish(self) -> Outcome:
        """Wait for the last loss and the launchers' end."""
        loss = self.wait_for(lambda event: event["event"] == "done")["loss"]
        for agent in self._ended.values():
            if (code := agent.wait(TIMEOUT)) != 0:
                raise DemoError(f"the launcher ended with exit code {code}")
        self.say(f"finished: exit code 0, final loss {loss:.9f}")
        return Outcome(loss, self.seconds())

    def close(self) -> None:
        """End what still runs, and give the descriptors back."""
        for agent in self._agents:
            agent.terminate()
        for agent in self._agents:
            try:
                agent.wait(35)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
        for pid in _marked(self._mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for fd in (*self._ended, self._pipe):
            os.close(fd)

    def log(self) -> str:
        """All that the launcher and its workers printed."""
        return self._log.read_text(errors="replace")

    def _events(self) -> Iterator[Event]:
        """Events as they come, until all launchers have ended well and the pipe is empty."""
        while True:
            while b"\n" in self._pending:
                line, _, self._pending = self._pending.partition(b"\n")
                yield json.loads(line)
            ready, _, _ = select.select([self._pipe, *self._ended], [], [], TIMEOUT)
            if not ready:
                raise DemoError(f"nothing happened for {TIMEOUT:.0f} s")
            if self._pipe in ready:
                self._pending += os.read(self._pipe, 65536)
                continue
            for agent in self._ended.values():
                if agent.poll():
                    raise DemoError(f"a launcher ended early, with exit code {agent.returncode}")
            if all(agent.poll() == 0 for agent in self._ended.values()):
                return


def _marked(mark: str) -> Iterator[int]:
    """Processes of a run that are still there."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):
                if f"{MARK}={mark}".encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    yield int(name)


@contextmanager
def running(launchers: Sequence[list[str]], steps: int, folder: Path) -> Iterator[Run]:
    """A run that is over at the end, with its output shown if something was not as claimed."""
    for (name, *flags), same in groupby(launchers):
        times = len(list(same))
        again = f"  # {times} times" if times > 1 else ""
        print("$ " + " ".join([Path(name).name, *flags, "examples/train_ddp.py"]) + again, flush=True)
    run = Run(launchers, steps, folder)
    try:
        yield run
    except DemoError:
        print("\n--- what the job printed ---", run.log(), "---", sep="\n", file=sys.stderr)
        raise
    finally:
        run.close()


def undisturbed(launcher: list[str], steps: int, folder: Path) -> Outcome:
    """Train from beginning to end."""
    with running([launcher], steps, folder) as run:
        pids = [event["pid"] for event in run.wait_for_all("start")]
        run.say(f"{WORKERS} workers started: pids {pids}")
        run.wait_for(lambda event: event.get("step") == 1)
        run.say("first step")
        return run.finish()


def worker_lost(launcher: list[str], steps: int, folder: Path) -> Outcome:
    """Train, and kill one worker half-way."""
    fatal = steps // 2 + 5  # some steps after a checkpoint, so that there is work to do again
    with running([launcher], steps, folder) as run:
        before = [event["pid"] for event in run.wait_for_all("start")]
        run.say(f"{WORKERS} workers started: pids {before}")
        run.wait_for(lambda event: event.get("step") == fatal)
        os.kill(before[VICTIM], signal.SIGKILL)
        killed = time.monotonic()
        run.say(f"step {fatal} of {steps}: SIGKILL to rank {VICTIM}, pid {before[VICTIM]}")
        after = [event["pid"] for event in run.wait_for_all("start")]
        run.say(f"{time.monotonic() - killed:.3f} s after the kill, {WORKERS} new workers run: pids {after}")
        resumed = run.wait_for_all("training")[0]["step"]
        run.say(f"{time.monotonic() - killed:.3f} s after the kill, they have resumed from step {resumed}")
        if set(before) & set(after):
            raise DemoError(f"workers of before {before} are among the new ones {after}")
        if not 0 < resumed < steps:
            raise DemoError(f"resumed from step {resumed}, which is not a checkpoint of before the kill")
        return run.finish()


def node_lost(launcher: list[str], steps: int, folder: Path) -> Outcome:
    """Train on three nodes, and kill the agent of one half-way."""
    fatal = steps // 2 + 5
    # The first hosts the control plane; on one machine every node could.
    nodes = [[*launcher, f"--rdzv-conf=is_host={str(number == 0).lower()}"] for number in range(NODES)]
    with running(nodes, steps, folder) as run:
        before = run.wait_for_all("start", NODES)
        run.say(f"{NODES} workers started on {NODES} nodes: pids {[event['pid'] for event in before]}")
        run.wait_for(lambda event: event.get("step") == fatal)
        worker, number = _worker_of_another_node(before, run)
        killed, took = run.kill_agent(number, worker)
        run.say(f"step {fatal} of {steps}: SIGKILL to the agent of one node, and to nothing else")
        run.say(f"{took:.3f} s after the kill, its worker {worker} is gone too")
        after = [event["pid"] for event in run.wait_for_all("start", NODES - 1)]
        run.say(f"{time.monotonic() - killed:.3f} s after the kill, {NODES - 1} new workers run: pids {after}")
        resumed = run.wait_for_all("training", NODES - 1)[0]["step"]
        run.say(f"{time.monotonic() - killed:.3f} s after the kill, they have resumed from step {resumed}")
        if not 0 < resumed < steps:
            raise DemoError(f"resumed from step {resumed}, which is not a checkpoint of before the kill")
        return run.finish()


def _worker_of_another_node(workers: list[Event], run: Run) -> tuple[int, int]:
    """A worker that is not on the first node, and its node: whose process is among its forebears."""
    for event in workers:
        for number in range(1, NODES):
            if run.agent_pid(number) in forebears(event["pid"]):
                return event["pid"], number
    raise DemoError("no worker could be found that descends from the agent of a node")


def forebears(pid: int) -> list[int]:
    """The parent of a process, its parent, and so on."""
    found: list[int] = []
    with suppress(OSError):
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            found.append(pid)
    return found


def free_port() -> int:
    """A port of loopback that the kernel just had free."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def find(launcher: str) -> str:
    """The launcher beside this interpreter, else on PATH, or the path itself."""
    beside = Path(sys.executable).with_name(launcher)
    found = str(beside) if "/" not in launcher and beside.exists() else shutil.which(launcher)
    if found is None:
        raise DemoError(f"there is no launcher {launcher!r} beside {sys.executable} or on PATH")
    return found


def demo(launcher: str, steps: int) -> None:
    """Both runs, and what to make of them.

    Raises:
        DemoError: something is not as claimed.
    """
    found = find(launcher)
    alone = [found, "--standalone", f"--nproc-per-node={WORKERS}"]
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    node = [found, f"--nnodes={NODES - 1}:{NODES}", "--rdzv-backend=c10d", endpoint, "--max-restarts=3"]
    with tempfile.TemporaryDirectory(prefix="rallypoint-demo-") as base:
        print(f"A character model is trained for {steps} steps by {WORKERS} workers.\n")
        expected = undisturbed(alone, steps, Path(base) / "undisturbed")
        print("\nThe same again, but one worker is killed half-way.\n")
        first = worker_lost([*alone, "--max-restarts=3"], steps, Path(base) / "worker")
        print(f"\nThe same again on {NODES} nodes, and one whole node is lost half-way.\n")
        second = node_lost(node, steps, Path(base) / "node")
    difference = max(abs(each.loss - expected.loss) for each in (first, second))
    if not difference <= TOLERANCE:
        raise DemoError(f"the final losses differ by {difference:.3g}, which is more than {TOLERANCE:g}")
    print(
        f"\nThe final losses differ by {difference:.1g}: the job lost a worker, then a node,\n"
        "and ended as if nothing had happened, "
        f"after {first.seconds:.1f} s and {second.seconds:.1f} s instead of {expected.seconds:.1f} s."
    )


def main() -> int:
    """Run the demo; 0 if all was as claimed."""
    parser = argparse.ArgumentParser(
        description="Kill a worker, then a whole node, half-way through a training job; it finishes alike."
    )
    parser.add_argument(
        "--launcher", default="rallyrun", help="the launcher to show, such as torchrun (default: rallyrun)"
    )
    parser.add_argument("--steps", type=int, default=120, help="steps to train, at least 40 (default: 120)")
    options = parser.parse_args()
    try:
        demo(options.launcher, options.steps)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
