"""Show what Rallypoint is for: a training job loses a worker half-way and ends as if nothing had happened.

    make demo

`train_ddp.py` runs twice with two workers. The second time, one worker is killed with SIGKILL in the middle; the job
must regroup, resume from its last checkpoint, and finish with the same loss to 1e-6. Exits with 1 if it does not.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKERS = 2
VICTIM = 1
TOLERANCE = 1e-6
PATIENCE = 60.0
"""Seconds after which a run that says nothing more is given up."""

Event = dict[str, Any]


class DemoError(Exception):
    """Something is not as claimed."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its last loss, and the seconds that it took."""

    loss: float
    seconds: float


class Run:
    """One launcher with its job. What the workers tell comes through a named pipe, one line of JSON an event."""

    def __init__(self, launcher: list[str], steps: int, folder: Path) -> None:
        folder.mkdir()
        pipe = folder / "progress"
        os.mkfifo(pipe)
        # Open for both ways: the pipe never ends while workers come and go.
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self._pending = b""
        script = Path(__file__).with_name("train_ddp.py")
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._began = time.monotonic()
            self._process = subprocess.Popen(
                [
                    *launcher,
                    str(script),
                    f"--steps={steps}",
                    f"--checkpoint-dir={folder / 'checkpoint'}",
                    f"--progress={pipe}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self._ended = os.pidfd_open(self._process.pid)

    def seconds(self) -> float:
        """Since the launcher was started."""
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        """One line of the account, with the time at which it happened."""
        print(f"  {self.seconds():6.2f} s  {text}", flush=True)

    def wait_for(self, wanted: Callable[[Event], bool]) -> Event:
        """The next event that `wanted` accepts.

        Raises:
            DemoError: the launcher ended, or nobody said anything for too long.
        """
        for event in self._events():
            if wanted(event):
                return event
        raise DemoError(f"the launcher ended early, with exit code {self._process.wait()}")

    def wait_for_all(self, name: str) -> list[Event]:
        """The event `name` of every worker, in order of rank."""
        found: dict[int, Event] = {}
        while len(found) < WORKERS:
            event = self.wait_for(lambda event: event["event"] == name)
            found[event["rank"]] = event
        return [found[rank] for rank in sorted(found)]

    def finish(self) -> Outcome:
        """Wait for the last loss and the launcher's end."""
        loss = self.wait_for(lambda event: event["event"] == "done")["loss"]
        code = self._process.wait(PATIENCE)
        if code != 0:
            raise DemoError(f"the launcher ended with exit code {code}")
        self.say(f"finished: exit code 0, final loss {loss:.9f}")
        return Outcome(loss, self.seconds())

    def close(self) -> None:
        """End the launcher if it still runs, and give the descriptors back."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(35)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        os.close(self._ended)
        os.close(self._pipe)

    def log(self) -> str:
        """All that the launcher and its workers printed."""
        return self._log.read_text(errors="replace")

    def _events(self) -> Iterator[Event]:
        """Events as they come, until the launcher has ended and the pipe is empty."""
        while True:
            while b"\n" in self._pending:
                line, _, self._pending = self._pending.partition(b"\n")
                yield json.loads(line)
            ready, _, _ = select.select([self._pipe, self._ended], [], [], PATIENCE)
            if not ready:
                raise DemoError(f"no sign of life for {PATIENCE:.0f} s")
            if self._pipe not in ready:
                return
            self._pending += os.read(self._pipe, 65536)


@contextmanager
def running(launcher: list[str], steps: int, folder: Path) -> Iterator[Run]:
    """A run that is over at the end, with its output shown if something was not as claimed."""
    print("$ " + " ".join([Path(launcher[0]).name, *launcher[1:], "examples/train_ddp.py"]), flush=True)
    run = Run(launcher, steps, folder)
    try:
        yield run
    except DemoError:
        print("\n--- what the job printed ---", run.log(), "---", sep="\n", file=sys.stderr)
        raise
    finally:
        run.close()


def undisturbed(launcher: list[str], steps: int, folder: Path) -> Outcome:
    """Train from beginning to end."""
    with running(launcher, steps, folder) as run:
        pids = [event["pid"] for event in run.wait_for_all("start")]
        run.say(f"{WORKERS} workers started: pids {pids}")
        run.wait_for(lambda event: event.get("step") == 1)
        run.say("first step")
        return run.finish()


def disturbed(launcher: list[str], steps: int, folder: Path) -> Outcome:
    """Train, and kill one worker half-way."""
    fatal = steps // 2 + 5  # some steps after a checkpoint, so that there is work to do again
    with running(launcher, steps, folder) as run:
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
    command = [find(launcher), "--standalone", f"--nproc-per-node={WORKERS}"]
    with tempfile.TemporaryDirectory(prefix="rallypoint-demo-") as base:
        print(f"A character model is trained for {steps} steps by {WORKERS} workers.\n")
        expected = undisturbed(command, steps, Path(base) / "undisturbed")
        print("\nThe same again, but one worker is killed half-way.\n")
        found = disturbed([*command, "--max-restarts=3"], steps, Path(base) / "disturbed")
    difference = abs(found.loss - expected.loss)
    if difference > TOLERANCE:
        raise DemoError(f"the final losses differ by {difference:.3g}, which is more than {TOLERANCE:g}")
    print(
        f"\nThe final losses differ by {difference:.1g}: the job lost a worker and ended as if nothing had happened,\n"
        f"after {found.seconds:.1f} s instead of {expected.seconds:.1f} s."
    )


def main() -> int:
    """Run the demo; 0 if all was as claimed."""
    parser = argparse.ArgumentParser(description="Kill a worker half-way through a training job; it finishes alike.")
    parser.add_argument(
        "--launcher", default="rallyrun", help="the launcher to show, such as torchrun (default: rallyrun)"
    )
    parser.add_argument("--steps", type=int, default=240, help="steps to train, at least 40 (default: 240)")
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
