"""One run of the demo: launchers, and what their workers tell, through a named pipe, one line of JSON an event.

Laws:

1. Every process of a run carries a mark in its environment; when the run is over, none is left.
2. Nothing is waited for without a deadline.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rallypoint.base.errors import RallypointError
from rallypoint.base.kernel import set_pipe_size
from rallypoint.base.process_table import descendants, process_table
from rallypoint.demo import track as tracks
from rallypoint.demo.account import Account
from rallypoint.demo.track import Event, Track

MARK = "_RALLYPOINT_DEMO"
"""Names a variable that every process of a run carries, so that none can be left behind."""
_TICK = 0.1
"""Seconds after which what is shown is brought up to date, and launchers are looked after."""
_END = 10.0
"""Seconds that a launcher has to end after SIGTERM."""
_STEERING = ("PET_", "TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_")
_STEERING_NAMES = frozenset({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOGLEVEL", "RALLYPOINT_SECRET"})
"""Variables that would change what the demo's launchers or workers do."""


class DemoError(RallypointError):
    """Something is not as claimed; the text is the rest of a sentence that begins with the launcher's name."""


class Run:
    """Launchers that run one job."""

    def __init__(self, track: Track, launchers: Sequence[list[str]], folder: Path, account: Account) -> None:
        """Start them.

        Args:
            track: says the launcher's name and the number of steps.
            launchers: a command line for each node, to which the arguments of the program are appended.
            folder: is made; pipe, checkpoint and output are there.
            account: is told of what happens.
        """
        folder.mkdir()
        pipe = folder / "progress"
        os.mkfifo(pipe)
        # Open for both ways: the pipe never ends while workers come and go.
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        # A kill at a step must not come after the end of the training because this process was slow.
        set_pipe_size(self._pipe, mmap.PAGESIZE)
        self._pending = b""
        self._mark = uuid.uuid4().hex
        self._log = folder / "log"
        self._account = account
        self.track = track
        more = [f"--steps={track.steps}", f"--progress={pipe}", f"--checkpoint-dir={folder / 'checkpoint'}"]
        self._began = time.monotonic()
        self._lost: set[int] = set()
        self.agents = [self._start([*launcher, *more]) for launcher in launchers]

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in _STEERING_NAMES and not name.startswith(_STEERING)
        }
        env = {**kept, "OMP_NUM_THREADS": "1", MARK: self._mark}
        with self._log.open("ab") as log:
            # In a session of its own: a ^C is for the demo, which then ends all.
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    def seconds(self) -> float:
        """Since the launchers were started."""
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        """One line of the account, with the time at which it happened."""
        self._account.line(self.seconds(), text)

    def show(self, track: Track) -> None:
        """The run stands so now."""
        self.track = track
        self._account.show(track)

    def wait_for(self, wanted: Callable[[Event], bool], timeout: float) -> Event:
        """The next event that `wanted` accepts.

        Raises:
            DemoError: a launcher failed, all ended, or nothing came for `timeout` seconds; after a kill, no step did.
        """
        for event in self._events(timeout):
            if wanted(event):
                return event
        raise DemoError("has ended, with exit code 0, before the training did")

    def wait_for_all(self, name: str, workers: int, timeout: float) -> list[Event]:
        """The event `name` of every worker, in order of rank."""
        found: dict[int, Event] = {}
        while len(found) < workers:
            event = self.wait_for(lambda event: event["event"] == name, timeout)
            found[event["rank"]] = event
        return [found[rank] for rank in sorted(found)]

    def kill_worker(self, pid: int) -> None:
        """SIGKILL to one process."""
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            raise DemoError("had ended the worker before it was killed; give more --steps") from None
        self.show(tracks.killed(self.track, self.seconds()))

    def kill_node(self, number: int) -> int:
        """SIGKILL to one launcher and all that is below it, as if its machine had gone. Returns how many processes."""
        agent = self.agents[number]
        self._lost.add(number)
        parents = {pid: stat.parent for pid, stat in process_table().items()}
        all_of_it = [agent.pid, *sorted(descendants(agent.pid, parents))]
        for pid in all_of_it:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.show(tracks.killed(self.track, self.seconds()))
        agent.wait()
        return len(all_of_it)

    def node_of(self, pid: int) -> int | None:
        """The number of the launcher that a worker descends from."""
        table = process_table()
        above = {agent.pid: number for number, agent in enumerate(self.agents)}
        while pid in table:
            if pid in above:
                return above[pid]
            pid = table[pid].parent
        return None

    def finish(self, timeout: float) -> Track:
        """Wait for the last loss and the launchers' end.

        Raises:
            DemoError: they did not end with exit code 0.
        """
        self.wait_for(lambda event: event["event"] == "done", timeout)
        deadline = time.monotonic() + timeout
        while any(agent.poll() is None for agent in self.agents):
            self._check_launchers()
            if time.monotonic() > deadline:
                raise DemoError(f"has not ended {timeout:.0f} s after the training did")
            time.sleep(0.005)  # a child's end is not to be waited for with a timeout in any better way everywhere
        self._check_launchers()
        loss = self.track.loss
        self.say(f"finished: exit code 0, final loss {loss:.9f}")
        self.show(tracks.finished(self.track, self.seconds()))
        return self.track

    def close(self) -> None:
        """End what still runs, and give the descriptors back."""
        for agent in self.agents:
            agent.terminate()
        deadline = time.monotonic() + _END
        for agent in self.agents:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.0, deadline - time.monotonic()))
        while left := list(_marked(self._mark)):  # an agent that is killed may have started one more
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
        """All that the launchers and their workers printed."""
        return self._log.read_text(errors="replace")

    def _events(self, timeout: float) -> Iterator[Event]:
        """Events as they come, until all launchers have ended well and the pipe is empty.

        Raises:
            DemoError: a launcher failed, or nothing came for `timeout` seconds; after a kill no step did.
        """
        deadline = time.monotonic() + timeout
        while True:
            while b"\n" in self._pending:
                line, _, self._pending = self._pending.partition(b"\n")
                event: Event = json.loads(line)
                self.show(tracks.told(self.track, event, self.seconds()))
                yield event
                if self.track.phase is not tracks.Phase.BROKEN:
                    deadline = time.monotonic() + timeout
            ready, _, _ = select.select([self._pipe], [], [], _TICK)
            if ready:
                self._pending += os.read(self._pipe, 65536)
                continue
            self._account.redraw()
            self._check_launchers()
            if all(agent.poll() == 0 for agent in self._running()):
                return
            if time.monotonic() > deadline:
                raise DemoError(self._missing(timeout))

    def _missing(self, timeout: float) -> str:
        if self.track.phase is tracks.Phase.BROKEN:
            return f"has finished no step for {self.seconds() - (self.track.killed or 0.0):.0f} s after the kill"
        return f"has not come further within {timeout:.0f} s"

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [agent for number, agent in enumerate(self.agents) if number not in self._lost]

    def _check_launchers(self) -> None:
        for agent in self._running():
            if agent.poll():
                raise DemoError(f"has ended early, with exit code {agent.returncode}")


def launcher_command(name: str) -> list[str]:
    """The command that starts `rallyrun` or `torchrun` of this interpreter's environment."""
    beside = Path(sys.executable).with_name(name)
    module = {"rallyrun": "rallypoint.run", "torchrun": "torch.distributed.run"}[name]
    return [str(beside)] if beside.exists() else [sys.executable, "-m", module]


def _marked(mark: str) -> Iterator[int]:
    """Processes of a run that are still there."""
    wanted = f"{MARK}={mark}".encode()
    for pid, stat in process_table().items():
        if not stat.ended:
            with suppress(OSError):
                if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    yield pid
