"""A job of three agents with two workers each, its control plane, and functions that cause each fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

from rallypoint.base.process_table import process_table
from tests.chaos.faults import Backend, Fault
from tests.chaos.invariants import Life, current, is_whole
from tests.environment import JOBS
from tests.etcd_cluster import EtcdCluster
from tests.ports import free_port
from tests.processes import below

NODES, WORKERS = 3, 2
LEASE = 2.0
DEADLINE = 60.0
"""Seconds within which the job must be whole again."""
_SETTLES = 0.5
"""Seconds for which all workers must run: a fault is not noticed at once."""

WORKER = """
import os, signal, sys, time
from rallypoint.store.client import TCPStore
from rallypoint.store.errors import StoreError
own = f"{os.environ['LIVES']}/{os.getpid()}"
try:  # the first one names the round, for all that find its store
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    name = store.compare_set("round", "", f"{os.environ['MASTER_PORT']}-{os.getpid()}").decode()
except StoreError:
    signal.pause()  # the round is over: to fail now could be counted
head = [name, os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RESTART_COUNT"]]
with open(own + ".new", "w") as file:
    file.write(" ".join([*head, str(time.monotonic())]))
os.rename(own + ".new", own)
seen = os.open(own + ".seen", os.O_WRONLY | os.O_CREAT)
while os.pwrite(seen, f"{time.monotonic():030.6f}".encode(), 0) and not os.path.exists(os.environ["LIVES"] + "/finish"):
    if os.path.exists(own + ".fail"):
        sys.exit(3)
    time.sleep(0.02)
"""


class NotWholeError(Exception):
    """The job was not whole again in time, or an agent has ended by itself."""


class ChaosJob:
    """The job; a context manager, which ends it and all that belongs to it."""

    def __init__(self, folder: Path, backend: Backend) -> None:
        self.folder = folder
        self.lives = folder / "lives"
        self.temporary = folder / "tmp"
        for each in (self.lives, self.temporary, folder / "logs"):
            each.mkdir()
        (folder / "worker.py").write_text(WORKER)
        self.backend = backend
        self._etcd = EtcdCluster(folder / "etcd") if backend is Backend.ETCD else None
        self._port = free_port()
        self._serve: subprocess.Popen[bytes] | None = None
        self._agents: list[subprocess.Popen[bytes]] = []
        self._starts = 0

    def __enter__(self) -> ChaosJob:
        if self.backend is Backend.SERVE:
            self._start_serve()
        self._agents = [self._start_agent() for _ in range(NODES)]
        return self

    def __exit__(self, *_: object) -> None:
        for each in [*self._agents, *([] if self._serve is None else [self._serve])]:
            with suppress(ProcessLookupError):
                each.send_signal(signal.SIGCONT)
                each.kill()
            each.wait()
        if self._etcd is not None:
            self._etcd.close()

    # The parts

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        self._starts += 1
        env = os.environ | {
            "LIVES": str(self.lives),
            "TMPDIR": str(self.temporary),
            JOBS: str(self.temporary),
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / "logs" / f"{self._starts:03}").open("wb") as log:
            env["LOGLEVEL"] = "INFO"
            return subprocess.Popen([sys.executable, "-m", *command], env=env, stdout=log, stderr=log)

    def _start_serve(self) -> None:
        self._serve = self._start("rallypoint.cli.rallyctl", "serve", f"--endpoint=localhost:{self._port}")

    def _start_agent(self) -> subprocess.Popen[bytes]:
        conf = {"lease": f"{LEASE}", "last_call_timeout": "1", "join_timeout": "120"}
        where = f"localhost:{self._port}"
        if self.backend is Backend.SERVE:
            conf["is_host"] = "false"
        if self._etcd is not None:
            where = ",".join(map(str, self._etcd.endpoints))
        return self._start(
            *("rallypoint.run", f"--nnodes=2:{NODES}", f"--nproc-per-node={WORKERS}", "--max-restarts=1000"),
            *(f"--rdzv-backend={'etcd' if self._etcd is not None else 'c10d'}", f"--rdzv-endpoint={where}"),
            *("--rdzv-id=chaos", "--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in conf.items())),
            *("--shutdown-timeout=5", "--log-dir=/dev/null"),
            str(self.folder / "worker.py"),
        )

    # What is seen

    def read(self) -> list[Life]:
        """The lives of all workers so far."""
        found = []
        for path in self.lives.iterdir():
            if path.name.isdecimal():
                name, rank, size, failures, begun = path.read_text().split()
                with suppress(OSError, ValueError):
                    seen = float((self.lives / f"{path.name}.seen").read_text())
                    found.append(Life(int(path.name), name, int(rank), int(size), int(failures), float(begun), seen))
        return found

    def whole_again(self, since: float) -> float:
        """Wait until all workers of a round run, beside one another; returns the seconds that it took.

        Raises:
            NotWholeError: that takes too long, or an agent has ended by itself.
        """
        begun = time.monotonic()
        whole: tuple[str, float] | None = None
        """The round whose workers were all seen, and when that was so first."""
        while whole is None or time.monotonic() < whole[1] + _SETTLES:
            lives, now = self.read(), time.monotonic()
            if not is_whole(lives, NODES * WORKERS, max(since, now - _SETTLES)):
                whole = None
            elif whole is None or whole[0] != current(lives)[0].round:
                whole = current(lives)[0].round, now
            for each in self._agents:
                if (code := each.poll()) is not None:
                    raise NotWholeError(f"an agent has ended with {code}")
            if now > begun + DEADLINE:
                raise NotWholeError(f"after {DEADLINE:.0f} s not all workers run: {sorted(current(self.read()))}")
            time.sleep(0.02)
        return whole[1] - begun

    def finish(self) -> list[str]:
        """Let the workers end; returns what is wrong: an exit code, or what is left."""
        (self.lives / "finish").touch()
        wrong = []
        for each in self._agents:
            try:
                code = each.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                wrong.append("an agent does not end")
            else:
                wrong += [f"an agent has ended with {code}"] if code else []
        parts = [each.pid for each in [self._serve] if each is not None]
        members = [] if self._etcd is None else [each.pid for each in self._etcd.members if each.running]
        left = set(below(os.getpid())) - {*parts, *members}
        wrong += [f"a process is left: {pid}" for pid in sorted(left) if not self._is_ours(pid)]
        left_files = [path.name for path in self.temporary.iterdir() if path.name != f"rallypoint-{os.geteuid()}"]
        wrong += [f"a file is left: {name}" for name in left_files]
        return wrong

    def _is_ours(self, pid: int) -> bool:
        """Whether a process below this one is none of the job's."""
        with suppress(OSError):
            return str(self.folder).encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        return True

    # The faults

    def do(self, fault: Fault) -> float:
        """Do this to the job; returns from when on its workers must be seen again."""
        time.sleep(fault.after)
        rng = Random(fault.choice)
        done = self._DEEDS[fault.kind.name](self, rng)
        return time.monotonic() if done is None else done

    def _workers(self) -> list[int]:
        table = process_table()
        return sorted(each.pid for each in current(self.read()).values() if each.pid in table)

    def _kill_worker(self, rng: Random) -> None:
        self._kill(rng.choice(self._workers()))

    def _kill_two(self, rng: Random) -> None:
        by_rank = current(self.read())
        for node in rng.sample(range(NODES), 2):
            self._kill(by_rank[node * WORKERS + rng.randrange(WORKERS)].pid)

    def _fail_worker(self, rng: Random) -> None:
        (self.lives / f"{rng.choice(self._workers())}.fail").touch()
        time.sleep(0.1)

    def _pause_worker(self, rng: Random) -> None:
        self._pause(rng.choice(self._workers()), rng.choice((0.2, 1.0)))

    def _kill_agent(self, rng: Random) -> None:
        self._replace(rng.randrange(NODES), signal.SIGKILL)

    def _terminate_agent(self, rng: Random) -> None:
        self._replace(rng.randrange(NODES), signal.SIGTERM)

    def _pause_briefly(self, rng: Random) -> None:
        self._pause(rng.choice(self._agents).pid, rng.choice((0.1, LEASE / 2)))

    def _pause_long(self, rng: Random) -> None:
        self._pause(rng.choice(self._agents).pid, LEASE + rng.choice((0.5, 3.0)))

    def _kill_reaper(self, rng: Random) -> None:
        parent = process_table()[rng.choice(self._workers())].parent
        assert parent not in {os.getpid(), 1}
        self._kill(parent)

    def _kill_serve(self, _rng: Random) -> None:
        assert self._serve is not None
        self._serve.kill()
        self._serve.wait()
        self._start_serve()

    def _kill_etcd(self, rng: Random) -> None:
        assert self._etcd is not None
        leader = self._etcd.leader()
        leader.kill()
        time.sleep(rng.choice((0.0, 1.0)))
        leader.start()
        leader.wait_ready()

    def _pause_etcd(self, rng: Random) -> None:
        assert self._etcd is not None
        leader = self._etcd.leader()
        leader.pause()
        time.sleep(rng.choice((0.5, 3.0)))
        leader.resume()

    def _replace(self, index: int, number: signal.Signals) -> None:
        old = self._agents[index]
        old.send_signal(number)
        old.wait(DEADLINE)
        self._agents[index] = self._start_agent()

    @staticmethod
    def _kill(pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    @staticmethod
    def _pause(pid: int, seconds: float) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

    _DEEDS: dict[str, Callable[[ChaosJob, Random], float | None]] = {  # noqa: RUF012 - a table, never changed
        "worker killed": _kill_worker,
        "workers of two nodes killed": _kill_two,
        "worker exits with a code": _fail_worker,
        "worker paused": _pause_worker,
        "agent killed": _kill_agent,
        "agent terminated": _terminate_agent,
        "agent paused for less than the lease": _pause_briefly,
        "agent paused for more than the lease": _pause_long,
        "reaper killed": _kill_reaper,
        "control plane killed": _kill_serve,
        "etcd's leader killed": _kill_etcd,
        "etcd's leader paused": _pause_etcd,
    }
