"""The demo: one job runs undisturbed, one loses a worker, one replaces a lost worker with a standby worker, and one
loses a node. Prints a line per event.

Workers report through a named pipe, one line of JSON per event: `event` ("start", "training", "step", "done"), `rank`,
`pid`, and details.

Laws:

1. Every process of a run carries a mark in its environment. When the run has ended, none is left.
2. Every wait has a deadline.
3. After a kill, only a step counts that workers finish which were placed after the kill.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rallypoint.base.endpoint import free_port
from rallypoint.base.errors import RallypointError
from rallypoint.base.kernel import set_pipe_size
from rallypoint.base.light_typing import NamedTuple
from rallypoint.base.process_table import descendants, process_table

WORKERS, NODES = 2, 3
VICTIM = 1
TOLERANCE = 1e-6
MARK = "_RALLYPOINT_DEMO"
"""Names the variable that marks every process of a run, so that none can be left behind."""

_TIMEOUT = 60.0
"""Seconds of silence after which a run is abandoned."""
_STANDBY = "a standby worker is ready"
"""A text in the launcher's log."""
_LEVEL = "INFO"
_TICK = 0.1
"""Seconds between checks of the launchers."""
_END = 10.0
"""Seconds in which a launcher must end after SIGTERM."""
_STEERING = ("PET_", "TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_")
_STEERING_NAMES = frozenset({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOGLEVEL", "RALLYPOINT_SECRET"})
"""Variables that would change the demo's launchers or workers."""

Event = Mapping[str, Any]
Write = Callable[[str], None]
"""Writes text to standard output immediately. Raises RallypointError if it cannot be written."""


class DemoError(RallypointError):
    """A result contradicts the demo's claims; the text continues a sentence that begins with the launcher's name."""


class DemoPlan(NamedTuple):
    """The plan of a demo.

    `program` follows the launcher's flags: a module or a script with the flags `--steps`, `--progress` and
    `--checkpoint-dir`. `deadline` is the number of seconds to wait for the next step after a kill. `standby_program` is
    a program that continues in its processes (`rallypoint.inprocess`), for the part with a standby worker.
    """

    program: Sequence[str]
    steps: int
    deadline: float
    standby_program: Sequence[str] = ()

    @property
    def fatal(self) -> int:
        """The step of the kill: a few steps after a checkpoint, so that there is work to repeat."""
        return self.steps // 2 + 5


class DemoResult(NamedTuple):
    """A run's result: the final loss, the seconds of the whole job, and the seconds from the kill to the next step."""

    loss: float
    seconds: float
    stopped: float | None


def demo(plan: DemoPlan, write: Write) -> None:
    """Run all parts, and print the results.

    Raises:
        DemoError: a result contradicts the demo's claims.
        RallypointError: nobody reads the output.
    """
    with tempfile.TemporaryDirectory(prefix="rallypoint-demo-", ignore_cleanup_errors=True) as base:
        write(f"\n{WORKERS} workers train for {plan.steps} steps, without a fault.\n\n")
        expected = _undisturbed(plan, Path(base, "1"), write)
        write(f"\nThe same job, but one worker is killed at step {plan.fatal}.\n\n")
        worker = _worker_lost(plan, Path(base, "2"), write)
        runs = [worker]
        rows = [("a worker killed, until the next step", f"{worker.stopped:.2f} s")]
        if plan.standby_program:
            write("\nThe same kill, but with a standby worker that has already imported and built everything.\n\n")
            runs.append(_worker_replaced(plan, Path(base, "4"), write))
            rows.append(("the same with a standby worker", f"{runs[-1].stopped:.2f} s"))
        fault = f"but one node is lost at step {plan.fatal}."
        write(f"\nThe same job on {NODES} nodes, of which {NODES - 1} are enough, {fault}\n\n")
        node = _node_lost(plan, Path(base, "3"), write)
    runs.append(node)
    difference = max(abs(run.loss - expected.loss) for run in runs)
    if not difference <= TOLERANCE:
        raise DemoError(f"the final losses differ by {difference:.3g}, which is more than {TOLERANCE:g}")
    rows += [
        ("a node lost, until the next step", f"{node.stopped:.2f} s"),
        (f"the whole job ({expected.seconds:.1f} s without a fault)", f"{worker.seconds:.1f} s, {node.seconds:.1f} s"),
        ("the final losses differ by", f"{difference:.1g}"),
    ]
    write("\n" + "".join(f"{label:42}{value:>17}\n" for label, value in rows))
    write("\nThe job lost a worker, then a node, and still ended with the same loss.\n")


def _undisturbed(plan: DemoPlan, folder: Path, write: Write) -> DemoResult:
    with _running(plan, [["--standalone", f"--nproc-per-node={WORKERS}"]], folder, write) as run:
        run.say(f"{WORKERS} workers started: pids {run.pids_of('start', WORKERS, _TIMEOUT)}")
        run.wait_for(lambda event: event.get("step") == 1, _TIMEOUT)
        run.say("first step")
        return run.finish(_TIMEOUT)


def _worker_lost(plan: DemoPlan, folder: Path, write: Write) -> DemoResult:
    flags = ["--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=3"]
    with _running(plan, [flags], folder, write) as run:
        before = run.pids_of("start", WORKERS, _TIMEOUT)
        run.say(f"{WORKERS} workers started: pids {before}")
        run.wait_for(lambda event: event.get("step") == plan.fatal, _TIMEOUT)
        run.kill_worker(before[VICTIM])
        run.say(f"step {plan.fatal} of {plan.steps}: SIGKILL to rank {VICTIM}, pid {before[VICTIM]}")
        after = _resumed(run, WORKERS, plan)
        if set(before) & set(after):
            raise DemoError(f"restarted, but old workers {before} are among the new ones {after}")
        return run.finish(_TIMEOUT)


def _worker_replaced(plan: DemoPlan, folder: Path, write: Write) -> DemoResult:
    flags = ["--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=3", "--standby=1"]
    with _running(plan._replace(program=plan.standby_program), [flags], folder, write) as run:
        before = run.pids_of("training", WORKERS, _TIMEOUT)
        run.say(f"{WORKERS} workers are training: pids {before}")
        run.wait_for(lambda event: event.get("step") == plan.fatal, _TIMEOUT)
        run.wait_for_standby(before, _TIMEOUT)
        run.say("a standby worker is ready")
        run.kill_worker(before[VICTIM])
        run.say(f"SIGKILL to rank {VICTIM}, pid {before[VICTIM]}")
        after = run.wait_for_all("training", WORKERS, plan.deadline)
        goes_on = ", ".join(str(event["pid"]) for event in after if event["pid"] in before)
        run.say(
            f"{run.since_kill():.3f} s after the kill, all are training from step {after[0]['step']} on; pid {goes_on} "
            "kept running"
        )
        run.wait_for(lambda event: event["event"] == "step", plan.deadline)
        run.stopped = run.since_kill()
        run.say(f"{run.stopped:.3f} s after the kill, the next step finished")
        return run.finish(_TIMEOUT)


def _node_lost(plan: DemoPlan, folder: Path, write: Write) -> DemoResult:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    node = [f"--nnodes={NODES - 1}:{NODES}", "--rdzv-backend=c10d", endpoint, "--max-restarts=3"]
    # The first node hosts the control plane; on one machine any node could.
    nodes = [[*node, f"--rdzv-conf=is_host={str(number == 0).lower()}"] for number in range(NODES)]
    with _running(plan, nodes, folder, write) as run:
        before = run.pids_of("start", NODES, _TIMEOUT)
        run.say(f"{NODES} workers started on {NODES} nodes: pids {before}")
        run.wait_for(lambda event: event.get("step") == plan.fatal, _TIMEOUT)
        number = next((host for pid in before[1:] if (host := run.node_of(pid))), None)
        if number is None:
            raise DemoError("has workers only on the first node")
        count = run.kill_node(number)
        run.say(f"step {plan.fatal} of {plan.steps}: SIGKILL to all {count} processes of one node, its launcher first")
        _resumed(run, NODES - 1, plan)
        return run.finish(_TIMEOUT)


def _resumed(run: DemoRun, workers: int, plan: DemoPlan) -> list[int]:
    """Wait for new workers and their first step. Returns their pids."""

    def remaining() -> float:
        return max(0.1, plan.deadline - run.since_kill())

    after = run.pids_of("start", workers, remaining())
    run.say(f"{run.since_kill():.3f} s after the kill, {workers} new workers are running: pids {after}")
    resumed = run.wait_for_all("training", workers, remaining())[0]["step"]
    run.say(f"{run.since_kill():.3f} s after the kill, they resumed from step {resumed}")
    if not 0 < resumed < plan.steps:
        raise DemoError(f"resumed from step {resumed}, which is not a checkpoint from before the kill")
    run.wait_for(lambda event: event["event"] == "step", remaining())
    run.stopped = run.since_kill()
    run.say(f"{run.stopped:.3f} s after the kill, the next step finished")
    return after


@contextmanager
def _running(plan: DemoPlan, flags: Sequence[Sequence[str]], folder: Path, write: Write) -> Iterator[DemoRun]:
    """Run a job that ends with the block. DemoError contains the job's output."""
    for text, times in Counter(" ".join(["rallyrun", *node, *plan.program]) for node in flags).items():
        write(f"$ {text}" + (f"  # {times} times" if times > 1 else "") + "\n")
    run = DemoRun(plan.steps, [[*_rallyrun(), *node, *plan.program] for node in flags], folder, write)
    try:
        yield run
    except DemoError as error:
        raise DemoError(f"rallyrun {error}; the job printed:\n{run.log()}") from None
    finally:
        run.close()


class DemoRun:
    """Launchers that run one job. `stopped` is how many seconds a kill interrupted the job, if there was a kill."""

    def __init__(self, steps: int, launchers: Sequence[list[str]], folder: Path, write: Write) -> None:
        """Start one launcher per command line, each followed by the program's arguments."""
        folder.mkdir()
        pipe = folder / "progress"
        os.mkfifo(pipe)
        # Open it for both directions, so that it never ends while workers come and go.
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        # Even if this process is slow, a kill at a step must not come after the end of the training.
        set_pipe_size(self._pipe, mmap.PAGESIZE)
        self._pending = b""
        self._mark = uuid.uuid4().hex
        self._log = folder / "log"
        self._write = write
        self._killed: float | None = None
        self.stopped: float | None = None
        more = [f"--steps={steps}", f"--progress={pipe}", f"--checkpoint-dir={folder / 'checkpoint'}"]
        self._began = time.monotonic()
        self._lost: set[int] = set()
        self.agents = [self._start([*launcher, *more]) for launcher in launchers]

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in _STEERING_NAMES and not name.startswith(_STEERING)
        }
        env = {**inherited, "OMP_NUM_THREADS": "1", "LOGLEVEL": _LEVEL, MARK: self._mark}
        with self._log.open("ab") as log:
            # In its own session: a ^C is meant for the demo, which then ends everything.
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def since_kill(self) -> float:
        return time.monotonic() - (self._killed or 0.0)

    def say(self, text: str) -> None:
        """Write one line with the time of the event."""
        self._write(f"  {self.seconds():6.2f} s  {text}\n")

    def wait_for(self, matches: Callable[[Event], bool], timeout: float) -> Event:
        """The next event that `matches` accepts. Raises DemoError: a launcher failed, all ended, or no event (after a
        kill: no step) arrived for `timeout` seconds.
        """
        for event in self._events(timeout):
            if matches(event):
                return event
        raise DemoError("ended with exit code 0 before the training was done")

    def wait_for_all(self, name: str, workers: int, timeout: float) -> list[Event]:
        events: dict[int, Event] = {}
        while len(events) < workers:
            event = self.wait_for(lambda event: event["event"] == name, timeout)
            events[event["rank"]] = event
        return [events[rank] for rank in sorted(events)]

    def pids_of(self, name: str, workers: int, timeout: float) -> list[int]:
        """The pids of all workers, after each has reported `name`."""
        return [event["pid"] for event in self.wait_for_all(name, workers, timeout)]

    def wait_for_standby(self, workers: Sequence[int], timeout: float) -> None:
        """Wait until the launcher has a standby worker. Pauses the workers, so that the training does not end."""
        deadline = time.monotonic() + timeout
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        while _STANDBY not in self.log():
            self._check_launchers()
            if time.monotonic() > deadline:
                raise DemoError(f"had no standby worker for {timeout:.0f} s")
            self._receive()
        for pid in workers:
            os.kill(pid, signal.SIGCONT)

    def kill_worker(self, pid: int) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            raise DemoError("finished before the worker could be killed; increase --steps") from None
        self._killed = time.monotonic()

    def kill_node(self, number: int) -> int:
        """Kill one launcher and its descendants, as if its machine were gone. Returns how many processes it killed."""
        agent = self.agents[number]
        self._lost.add(number)
        parents = {pid: stat.parent for pid, stat in process_table().items()}
        all_of_it = [agent.pid, *sorted(descendants(agent.pid, parents))]
        for pid in all_of_it:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._killed = time.monotonic()
        agent.wait()
        return len(all_of_it)

    def node_of(self, pid: int) -> int | None:
        table = process_table()
        above = {agent.pid: number for number, agent in enumerate(self.agents)}
        while pid in table:
            if pid in above:
                return above[pid]
            pid = table[pid].parent
        return None

    def finish(self, timeout: float) -> DemoResult:
        """Wait for the last loss, and for the launchers to end. Raises DemoError unless they exit with 0."""
        loss = self.wait_for(lambda event: event["event"] == "done", timeout)["loss"]
        deadline = time.monotonic() + timeout
        while any(agent.poll() is None for agent in self.agents):
            self._check_launchers()
            if time.monotonic() > deadline:
                raise DemoError(f"was still running {timeout:.0f} s after the training ended")
            time.sleep(0.005)  # nothing better works everywhere for a child's end with a timeout
        self._check_launchers()
        self.say(f"finished: exit code 0, final loss {loss:.9f}")
        return DemoResult(loss, self.seconds(), self.stopped)

    def close(self) -> None:
        for agent in self.agents:
            agent.terminate()
        deadline = time.monotonic() + _END
        for agent in self.agents:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.0, deadline - time.monotonic()))
        while left := list(_marked(self._mark)):  # an agent might have started another process before it was killed
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for agent in self.agents:
                agent.poll()
            time.sleep(0.01)
        for agent in self.agents:
            agent.wait()
        os.close(self._pipe)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _events(self, timeout: float) -> Iterator[Event]:
        """Yield events as they arrive, until all launchers have exited with 0 and the pipe is empty."""
        deadline = time.monotonic() + timeout
        while True:
            while b"\n" in self._pending:
                line, _, self._pending = self._pending.partition(b"\n")
                event: Event = json.loads(line)
                yield event
                if self._killed is None or self.stopped is not None:
                    deadline = time.monotonic() + timeout
            if self._receive():
                continue
            self._check_launchers()
            if all(agent.poll() == 0 for agent in self._running_launchers()):
                return
            if time.monotonic() > deadline:
                if self._killed is not None and self.stopped is None:
                    raise DemoError(f"did not finish any step within {self.since_kill():.0f} s of the kill")
                raise DemoError(f"made no progress within {timeout:.0f} s")

    def _receive(self) -> bool:
        """Wait briefly for events. Returns whether any arrived."""
        ready, _, _ = select.select([self._pipe], [], [], _TICK)
        if ready:
            self._pending += os.read(self._pipe, 65536)
        return bool(ready)

    def _running_launchers(self) -> list[subprocess.Popen[bytes]]:
        return [agent for number, agent in enumerate(self.agents) if number not in self._lost]

    def _check_launchers(self) -> None:
        for agent in self._running_launchers():
            if agent.poll():
                raise DemoError(f"ended early, with exit code {agent.returncode}")


def _rallyrun() -> list[str]:
    beside = Path(sys.executable).with_name("rallyrun")
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "rallypoint.run"]


def _marked(mark: str) -> Iterator[int]:
    variable = f"{MARK}={mark}".encode()
    for pid, stat in process_table().items():
        if not stat.ended:
            with suppress(OSError):
                if variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    yield pid
