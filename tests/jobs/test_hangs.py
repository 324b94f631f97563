"""Hangs of whole jobs: what counts as a hang, who hears of it, and what follows."""

from __future__ import annotations

import re

from tests.jobs.launching import Job, Launcher
from tests.ports import free_port

SECONDS = 4.0
"""Without a sign of life: longer than a machine with more to run leaves a worker that gives signs without time."""
TIMEOUT = f"--hang-timeout={SECONDS}"

HUNG = """
import ctypes, os, pathlib, queue, signal, socket, sys, threading, time
from rallypoint import notices

rank = int(os.environ["RANK"])

def asleep():
    until_all_hang()
    time.sleep(1000)

def in_c():
    ctypes.PyDLL(None).sleep(1000)

def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)

def in_the_kernel():  # in state D, for a child that cannot reach its own program
    os.mkfifo("held")
    actions = [(os.POSIX_SPAWN_OPEN, 0, "held", os.O_RDONLY, 0)]
    os.posix_spawn(sys.executable, ["python"], {}, file_actions=actions)

def loads():
    until_all_hang()  # the others make no sound
    batches, lock = queue.Queue(), threading.Lock()
    lock.acquire()
    threading.Thread(target=lock.acquire, daemon=True).start()
    batches.get()

def waits():
    both = socket.socketpair()
    both[0].recv(1)

KINDS = [asleep, in_c, stopped, in_the_kernel, loads, waits, sys.exit]
STATES = ["RS", "S", "T", "D", "RS", "S", "Z"]  # as the kernel calls them; ranks 0 and 4 look

def state(rank):
    try:
        return open(f"/proc/{os.readlink(f'at-{rank}')}/stat").read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z" if os.path.islink(f"at-{rank}") else "none"
    except ProcessLookupError:
        return "Z"

def until_all_hang():
    while not all(state(rank) in states for rank, states in enumerate(STATES)):
        time.sleep(0.05)
        print("not yet all", flush=True)
    notices.progress(0)

os.symlink(str(os.getpid()), f"at-{rank}")
KINDS[rank]()
"""


def report(job: Job) -> list[str]:
    """The lines of the report of a hang."""
    lines = job.err.split("\n")
    first = next(number for number, line in enumerate(lines) if line.endswith("what the workers are doing:"))
    last = next(number for number, line in enumerate(lines) if "(--on-hang=" in line)
    return [re.sub(r"^\S+ \S+ +\d+ \S+\] ", "", each) for each in lines[first + 1 : last]]


def test_all_kinds_of_hang_are_told_on_all_nodes_before_the_job_ends(rallyrun: Launcher) -> None:
    """Asleep, in C without the interpreter, stopped, in the kernel, in a data loader, waiting for another, finished."""
    script, port = rallyrun.script(HUNG), free_port()
    nodes = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--shutdown-timeout=1")
    flags = (*nodes, TIMEOUT, "--on-hang=fail", "--max-restarts=3", "--log-dir=logs")
    first = rallyrun(*flags, "--nproc-per-node=4", "--node-rank=0", script)
    second = rallyrun(*flags, "--nproc-per-node=3", "--node-rank=1", script)
    assert [first.ends(), second.ends()] == [124, 124], first.err + second.err
    for job in (first, second):
        assert job.err.count("the job is hung: no rank of its 2 nodes has") == 1, job.err
        assert "script.py FAILED: the job is hung" in job.err
        assert "are restarted" not in job.err
    told = report(first)
    assert told == report(second)
    text = "\n".join(told)
    for word in ("asleep", "in_c", "stopped", "uninterruptible", "loads", "waits", "ended with exit code 0"):
        assert word in text, text


ALIVE = """
import os, sys, time
from rallypoint import notices

TIMEOUT, other = float(sys.argv[1]), int(os.environ["RANK"])
started = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")

def until(moment, sign):
    while time.clock_gettime(time.CLOCK_BOOTTIME) < moment:
        time.sleep(0.05)
        sign()

def quiet(name):
    while not os.path.exists(name):
        time.sleep(0.05)

now = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
until(started + 1.5 * TIMEOUT, lambda: None)
print("the first step was slow", flush=True)
notices.progress(7)
until(now() + 1.5 * TIMEOUT, lambda: other or os.write(1, b"."))
print("\\nthere was noise of one rank", flush=True)
until(now() + 1.5 * TIMEOUT, lambda: other and notices.progress(7))
print("evaluated for long", flush=True)
until(now() + 0.3 * TIMEOUT, lambda: None)
print("and silently for a while", flush=True)
quiet("wake")
print("awake", flush=True)
quiet("end")
"""


def test_a_job_that_gives_signs_of_life_is_left_alone(rallyrun: Launcher) -> None:
    """A slow first step, noise without progress, a long evaluation; then it hangs, twice, with a sign in between."""
    script = rallyrun.script(ALIVE)
    job = rallyrun("--standalone", "--nproc-per-node=2", "--log-dir=logs", TIMEOUT, script, str(SECONDS))
    job.until_err("(--on-hang=report)")
    assert job.out.count("and silently for a while") == 2, f"reported too early:\n{job.out}\n{job.err}"
    (rallyrun.folder / "wake").touch()
    job.until(lambda lines: lines.count("awake") == 2, "both are awake")
    job.until_err("(--on-hang=report)", 2)
    (rallyrun.folder / "end").touch()
    assert job.ends() == 0, job.err
    assert job.err.count("the job is hung: no rank of its node has") == 2, job.err


ONCE = """
import os, time
print("up", flush=True)
hangs, rank, first = "hangs", int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if first and rank == int(os.environ["WORLD_SIZE"]) - 1:
    open(hangs, "w").close(), time.sleep(1000)
while not os.path.exists(hangs):  # until then the job gives signs of life
    time.sleep(0.05)
    print("not yet", flush=True)
"""


def test_without_a_coordinator_a_node_reports_of_its_own_workers(rallyrun: Launcher) -> None:
    script, state = rallyrun.script(ONCE), f"--rdzv-endpoint={rallyrun.folder}/state"
    flags = ("--nnodes=1:1", "--rdzv-backend=c10d", state, "--rdzv-conf=store_type=file", "--log-dir=logs")
    job = rallyrun(*flags, "--hang-timeout=0.7", "--on-hang=fail", "--max-restarts=3", script)
    assert job.ends() == 124, job.err
    assert "1 rank (0): " in report(job)[0]
