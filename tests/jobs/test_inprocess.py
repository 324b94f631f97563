"""Workers that go on in their processes when a round ends, as far as that is the agent's part."""

from __future__ import annotations

import os
import signal
from typing import NamedTuple

from tests.jobs.launching import AtOnce, Job, Launcher

WORKER = """
import json, os, queue, signal, sys, threading, time

class RoundEnded(BaseException):
    pass

folder, rank = os.environ["RALLYPOINT_NOTICES"], os.environ["LOCAL_RANK"]
orders, inside, over, memory = queue.Queue(), False, False, {}

def listen():
    global over
    for line in open(fifo, encoding="ascii"):
        verb, number = line.split()
        if verb == "leave":
            over = True
            signal.pthread_kill(threading.main_thread().ident, signal.SIGRTMIN)
        orders.put((verb, int(number)))

def interrupt(*_):
    if inside and over:
        raise RoundEnded

def resumable(function):
    global inside, over
    while True:
        try:
            inside = True
            function()
            inside = False
            return
        except RoundEnded:
            inside = False
        verb, number = orders.get()
        assert verb == "leave"
        over = False
        open(f"{folder}/left.{rank}.{number}", "w").close()
        verb, number = orders.get()
        found = json.load(open(f"{folder}/round.{rank}.json"))
        assert verb == "enter" and found["round"] == number
        for name, value in found["environment"].items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)

def train():
    e = os.environ
    memory["calls"] = memory.get("calls", 0) + 1
    up = "up", e["RANK"], e["WORLD_SIZE"], e["TORCHELASTIC_RESTART_COUNT"], os.getpid(), memory["calls"]
    os.write(1, (" ".join(map(str, up)) + "\\n").encode())
    while not os.path.exists("finish"):
        time.sleep(0.02)
    os.write(1, b"done\\n")

os.makedirs(folder, 0o700, exist_ok=True)
os.mkfifo(f"{folder}/inprocess.{rank}")
fifo = os.open(f"{folder}/inprocess.{rank}", os.O_RDWR | os.O_CLOEXEC)
signal.signal(signal.SIGRTMIN, interrupt)
threading.Thread(target=listen, daemon=True).start()
resumable(train)
"""


class Up(NamedTuple):
    """What a worker says when its function is called; `calls` is how often it was in this process."""

    rank: int
    world: int
    restarts: int
    pid: int
    calls: int


def ups(job: Job, restarts: int, workers: int) -> dict[int, Up]:
    """The workers of a round, by rank, once all have said so."""

    def told(lines: list[str]) -> dict[int, Up]:
        each = (Up(*map(int, line.split()[1:])) for line in lines if line.startswith("up "))
        return {up.rank: up for up in each if up.restarts == restarts and up.world == workers}

    return told(job.until(lambda lines: len(told(lines)) == workers, f"{workers} workers in restart {restarts}"))


def finishes(rallyrun: Launcher, *jobs: Job) -> None:
    (rallyrun.folder / "finish").touch()
    for job in jobs:
        assert job.ends() == 0, job.err


def one_of_two_dies_and_the_other_goes_on(rallyrun: Launcher) -> None:
    job = rallyrun("--standalone", "--nproc-per-node=2", "--max-restarts=9", rallyrun.script(WORKER))
    before = ups(job, 0, 2)
    for restarts in (1, 2):
        os.kill(before[1].pid, signal.SIGKILL)
        after = ups(job, restarts, 2)
        assert after[0] == before[0]._replace(restarts=restarts, calls=restarts + 1)
        assert after[1].calls == 1
        assert after[1].pid != before[1].pid
        before = after
    assert job.err.count("1 of 2 workers go on in their processes") == 2
    finishes(rallyrun, job)


def test_workers_go_on_in_their_processes(at_once: AtOnce) -> None:
    at_once(one_of_two_dies_and_the_other_goes_on)
