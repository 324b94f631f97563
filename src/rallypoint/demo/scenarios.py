"""The three parts of the demo: a job that runs undisturbed, one that loses a worker, one that loses a node.

The second and third run under each launcher in turn: the same program, the same kill at the same step.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from rallypoint.base.light_typing import NamedTuple
from rallypoint.demo.account import Account
from rallypoint.demo.job import DemoError, Run, launcher_command
from rallypoint.demo.summary import summary
from rallypoint.demo.track import Track, given_up

WORKERS, NODES = 2, 3
VICTIM = 1
TOLERANCE = 1e-6
OURS, THEIRS = "rallyrun", "torchrun"
_TIMEOUT = 60.0
"""Seconds after which a run that says nothing more is given up."""


class Plan(NamedTuple):
    """The plan of a demo.

    `program` is what follows the launcher's flags: a module or a script that takes `--steps`, `--progress` and
    `--checkpoint-dir`. `launchers` take turns, ours first. `deadline` is for how many seconds a launcher is waited for
    after the kill.
    """

    program: Sequence[str]
    steps: int
    launchers: Sequence[str]
    deadline: float

    @property
    def fatal(self) -> int:
        """The step of the kill: some after a checkpoint, so that there is work to do again."""
        return self.steps // 2 + 5


def demo(plan: Plan, account: Account) -> None:
    """Run all parts, and say what to make of them.

    Raises:
        DemoError: something is not as claimed, of Rallypoint. What torchrun does not do is shown.
    """
    with tempfile.TemporaryDirectory(prefix="rallypoint-demo-", ignore_cleanup_errors=True) as base:
        parts = _Parts(plan, account, Path(base))
        account.part(f"{WORKERS} workers train for {plan.steps} steps, undisturbed.")
        expected = parts.run(_undisturbed, OURS)
        account.part(f"The same again, but one worker is killed at step {plan.fatal}.")
        workers = [parts.run(_worker_lost, name) for name in plan.launchers]
        account.part(
            f"The same on {NODES} nodes, of which {NODES - 1} suffice: one whole node is lost at step {plan.fatal}."
        )
        nodes = [parts.run(_node_lost, name) for name in plan.launchers]
    difference = max(abs((each.loss or 0.0) - (expected.loss or 0.0)) for each in (workers[0], nodes[0]))
    if not difference <= TOLERANCE:
        raise DemoError(f"the final losses differ by {difference:.3g}, which is more than {TOLERANCE:g}")
    account.end(summary(expected, workers, nodes, difference))


class _Parts:
    """Runs one part under one launcher."""

    def __init__(self, plan: Plan, account: Account, base: Path) -> None:
        self.plan, self.account, self.base = plan, account, base
        self._runs = 0

    def run(self, part: Callable[[_Parts, str], Track], name: str) -> Track:
        """Run a part; what torchrun does not do is noted in its track, and no error."""
        try:
            return part(self, name)
        except _NotAsClaimed as error:
            track = error.track
            self.account.show(track)
            return track

    @contextmanager
    def running(self, name: str, flags: Sequence[Sequence[str]]) -> Iterator[Run]:
        """A run that is over at the end.

        Raises:
            DemoError: something is not as claimed; with what the job printed.
        """
        for each, same in groupby([" ".join([name, *node, *self.plan.program]) for node in flags]):
            times = len(list(same))
            self.account.command(each + (f"  # {times} times" if times > 1 else ""))
        self._runs += 1
        track = Track(name, self.plan.steps)
        launchers = [[*launcher_command(name), *node, *self.plan.program] for node in flags]
        run = Run(track, launchers, self.base / str(self._runs), self.account)
        try:
            self.account.show(track)
            yield run
        except DemoError as error:
            if name == OURS:
                raise DemoError(f"{name} {error}; the job printed:\n{run.log()}") from None
            raise _NotAsClaimed(str(error), given_up(run.track, str(error), run.seconds())) from None
        finally:
            run.close()


class _NotAsClaimed(DemoError):
    """Of torchrun, which claims nothing here."""

    def __init__(self, text: str, track: Track) -> None:
        super().__init__(text)
        self.track = track


def _undisturbed(parts: _Parts, name: str) -> Track:
    """Train from beginning to end."""
    with parts.running(name, [["--standalone", f"--nproc-per-node={WORKERS}"]]) as run:
        pids = [event["pid"] for event in run.wait_for_all("start", WORKERS, _TIMEOUT)]
        run.say(f"{WORKERS} workers started: pids {pids}")
        run.wait_for(lambda event: event.get("step") == 1, _TIMEOUT)
        run.say("first step")
        return run.finish(_TIMEOUT)


def _worker_lost(parts: _Parts, name: str) -> Track:
    """Train, and kill one worker half-way."""
    plan = parts.plan
    with parts.running(name, [["--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=3"]]) as run:
        before = [event["pid"] for event in run.wait_for_all("start", WORKERS, _TIMEOUT)]
        run.say(f"{WORKERS} workers started: pids {before}")
        run.wait_for(lambda event: event.get("step") == plan.fatal, _TIMEOUT)
        run.kill_worker(before[VICTIM])
        run.say(f"step {plan.fatal} of {plan.steps}: SIGKILL to rank {VICTIM}, pid {before[VICTIM]}")
        after = _gone_on(run, WORKERS, plan)
        if set(before) & set(after):
            raise DemoError(f"has kept workers of before {before} among the new ones {after}")
        return run.finish(_TIMEOUT)


def _node_lost(parts: _Parts, name: str) -> Track:
    """Train on three nodes, and kill all of one half-way."""
    plan = parts.plan
    endpoint = f"--rdzv-endpoint=127.0.0.1:{_free_port()}"
    node = [f"--nnodes={NODES - 1}:{NODES}", "--rdzv-backend=c10d", endpoint, "--max-restarts=3"]
    # The first hosts the control plane; on one machine every node could.
    nodes = [[*node, f"--rdzv-conf=is_host={str(number == 0).lower()}"] for number in range(NODES)]
    with parts.running(name, nodes) as run:
        before = [event["pid"] for event in run.wait_for_all("start", NODES, _TIMEOUT)]
        run.say(f"{NODES} workers started on {NODES} nodes: pids {before}")
        run.wait_for(lambda event: event.get("step") == plan.fatal, _TIMEOUT)
        # Not the first node, nor that of rank 0, so that the same is lost under each launcher.
        number = next((found for pid in before[1:] if (found := run.node_of(pid))), None)
        if number is None:
            raise DemoError("has no worker that descends from the launcher of another node than the first")
        count = run.kill_node(number)
        run.say(f"step {plan.fatal} of {plan.steps}: SIGKILL to all {count} processes of one node, its launcher first")
        _gone_on(run, NODES - 1, plan)
        return run.finish(_TIMEOUT)


def _gone_on(run: Run, workers: int, plan: Plan) -> list[int]:
    """Wait for new workers and their first step. Returns their pids."""
    killed = run.track.killed or 0.0

    def left() -> float:
        return max(0.1, killed + plan.deadline - run.seconds())

    after = [event["pid"] for event in run.wait_for_all("start", workers, left())]
    run.say(f"{run.seconds() - killed:.3f} s after the kill, {workers} new workers run: pids {after}")
    resumed = run.wait_for_all("training", workers, left())[0]["step"]
    run.say(f"{run.seconds() - killed:.3f} s after the kill, they have resumed from step {resumed}")
    if not 0 < resumed < plan.steps:
        raise DemoError(f"has resumed from step {resumed}, which is not a checkpoint of before the kill")
    run.wait_for(lambda event: event["event"] == "step", left())
    run.say(f"{run.track.stopped:.3f} s after the kill, the next step is finished")
    return after


def _free_port() -> int:
    """A port of loopback that the kernel just had free."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
