"""Causes of a worker's death in the report of a real job: crashes with stacks, bus errors, stopped workers."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import sys

import pytest

from tests.jobs.launching import RALLYRUN, Job, Launcher
from tests.ports import free_port
from tests.processes import completed

FILLED = """
import mmap
with open("/dev/shm/batch", "w+b") as file:
    file.truncate(8 << 20)
    memory = mmap.mmap(file.fileno(), 8 << 20)
    for at in range(0, 8 << 20, 4096):
        memory[at] = 1
"""


def _root(job: Job) -> str:
    """The report's root cause."""
    assert job.ends() == 1, job.err
    return job.err[job.err.index("Root Cause") :]


@pytest.mark.parametrize(
    ("number", "crash", "flags"),
    [
        (signal.SIGSEGV, "import ctypes; ctypes.string_at(0)", ()),
        (signal.SIGABRT, "os.abort()", ("--redirects=3", "--log-dir=logs")),
    ],
)
def test_a_crash_shows_the_python_stack(
    rallyrun: Launcher, number: signal.Signals, crash: str, flags: tuple[str, ...]
) -> None:
    script = rallyrun.script(f"import os\ndef inner():\n    {crash}\ninner()\n")
    root = _root(rallyrun("--standalone", *flags, script))
    assert re.search(rf"exitcode  : -{int(number)} \(pid: \d+\)  \({number.name}\)", root)
    assert f"Signal {int(number)} ({number.name}) received by PID " in root
    assert "Fatal Python error: " in root
    assert f'  File "{script}", line 3 in inner\n' in root
    assert f'  File "{script}", line 4 in <module>\n' in root


STUCK = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
job = os.environ["TORCHELASTIC_RUN_ID"]
def training():
    open(f"up-{os.environ['RANK']}-{job}", "w").close()
    while True:
        time.sleep(1)
if os.environ["RANK"] == "2":
    while not (os.path.exists(f"up-0-{job}") and os.path.exists(f"up-1-{job}")):
        time.sleep(0.02)
    sys.exit(3)
training()
"""


def test_stacks_before_a_kill_tell_whose_they_are(rallyrun: Launcher) -> None:
    flags = ["--standalone", "--nproc-per-node=3", "--shutdown-timeout=1", rallyrun.script(STUCK)]
    job, hidden = (rallyrun(*more, *flags) for more in ([], ["--redirects=3", "--log-dir=logs"]))
    assert [job.ends(), hidden.ends()] == [1, 1]
    host = socket.gethostname()
    for rank in (0, 1):
        own = [
            line.removeprefix(f"[rank {rank} on {host}] ") for line in job.err.split("\n") if f"[rank {rank} on" in line
        ]
        assert own[0] == "Fatal Python error: Aborted"
        assert own[2].startswith("Current thread ")
        assert own[3].endswith("in training")
        assert re.search(rf"the stacks of rank {rank} on {host} \(pid \d+\), .* fatal error, follow\n", job.err)
    for rank in (0, 1):
        (path,) = re.findall(
            rf"the stacks of rank {rank} on {host} \(pid \d+\), .* fatal error, are in (\S+)\n", hidden.err
        )
        with open(path) as file:
            assert file.read().startswith("Fatal Python error: Aborted\n")


@pytest.fixture
def small_shared_memory() -> list[str]:
    """What a command line begins with to have 4 MB of shared memory, and nobody else's."""
    mount = "mount -t tmpfs -o size=4m tmpfs /dev/shm"
    entry = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    if shutil.which("unshare") is None:
        pytest.skip("A FULL /dev/shm WAS NOT TESTED: needs `unshare` (Debian: apt-get install util-linux)")
    done = completed([*entry, "true"])
    if done.returncode:
        pytest.skip(f"A FULL /dev/shm WAS NOT TESTED: needs root, to mount one: {done.stderr.strip()}")
    return entry


def test_a_bus_error_from_full_shared_memory_says_so(rallyrun: Launcher, small_shared_memory: list[str]) -> None:
    job = rallyrun.command([*small_shared_memory, *RALLYRUN, "--standalone", rallyrun.script(FILLED)])
    assert "(SIGBUS) received by PID " in (root := _root(job))
    assert "/dev/shm is nearly full (0 MB of 4 MB free)" in root


STOPPED = """
import os, pathlib, signal, sys, time
from rallypoint import record
rank = os.environ["RANK"]
def until(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)
@record
def main():
    if rank == "0":
        until("up-1"), until("up-2"), until("up-3")
        raise ValueError("the first")
    if rank == "1":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    if rank == "2":
        def complain(*_):
            raise KeyError("only because it was stopped")
        signal.signal(signal.SIGTERM, complain)
    pathlib.Path("up-" + rank).touch()
    while True:
        time.sleep(0.02)  # a signal right before a longer sleep would not end it
main()
"""


def test_whom_the_launcher_ended_is_listed_and_never_a_cause(rallyrun: Launcher) -> None:
    """One ends by its signal, one exits with a code of its own, one even leaves an error file on its way."""
    file = rallyrun.folder / "error.json"
    job = rallyrun(
        "--standalone",
        "--nproc-per-node=4",
        "--log-dir=logs",
        rallyrun.script(STOPPED),
        env={"TORCHELASTIC_ERROR_FILE": str(file)},
    )
    root = _root(job)
    report = job.err[job.err.index(" FAILED\n") :]
    assert "rank      : 0 (local_rank: 0)" in root
    assert "ValueError: the first" in root
    assert "Failures:\n  <NO_OTHER_FAILURES>\n" in report
    assert "Stopped by rallyrun: ranks 1-3\n" in report
    assert "only because" not in report
    assert list(rallyrun.folder.glob("logs/*/attempt_0/2/error.json")), "the stopped one has left its file"
    message = json.loads(file.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("ValueError: the first", 1)


def test_a_function_that_crashes_shows_its_stack_too(rallyrun: Launcher) -> None:
    program = rallyrun.script(
        """
import ctypes, sys
from rallypoint import ChildFailedError, LaunchConfig, elastic_launch

def crash():
    ctypes.string_at(0)

if __name__ == "__main__":
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, rdzv_backend="c10d", run_id="job",
                          rdzv_endpoint="localhost:0", max_restarts=0, start_method="forkserver")
    try:
        elastic_launch(config, crash)()
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
"""
    )
    root = _root(rallyrun.command([sys.executable, program]))
    assert "Signal 11 (SIGSEGV) received by PID " in root
    assert f'  File "{program}", line 6 in crash\n' in root


def test_a_node_without_a_failure_of_its_own_writes_the_other_one_s(rallyrun: Launcher) -> None:
    script = rallyrun.script(
        """
import os, time
if os.environ["FAILS"] == "yes":
    os.kill(os.getpid(), 9)
time.sleep(600)
"""
    )
    port, jobs = free_port(), []
    for fails in ("yes", "no"):
        flags = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]
        env = {"FAILS": fails, "TORCHELASTIC_ERROR_FILE": str(rallyrun.folder / f"{fails}.json")}
        flags += [f"--rdzv-conf=is_host={fails == 'yes'}", f"--log-dir=logs-{fails}"]
        jobs.append(rallyrun(*flags, script, env=env))
    assert [job.ends() for job in jobs] == [1, 1]
    messages = [json.loads((rallyrun.folder / f"{fails}.json").read_text())["message"] for fails in ("yes", "no")]
    words = "Signal 9 (SIGKILL) received by PID "
    assert messages[0]["message"] == messages[1]["message"]
    assert messages[0]["message"].startswith(words)
    assert {message["errorCode"] for message in messages} == {-9}
    assert all(words in message["extraInfo"]["py_callstack"] for message in messages)
    assert words in jobs[0].err[jobs[0].err.index("Root Cause") :]
    assert re.search(rf"script.py FAILED: rank \d failed on \S+ \(exit code .*\): {re.escape(words)}", jobs[1].err)
