"""A lost reaper costs one round: everything that the agent keeps for the whole run still works in the next."""

from __future__ import annotations

import os
import signal
import sys

from tests.jobs.launching import Job, Launcher
from tests.ports import free_port
from tests.unit.workers.test_process import parent_of

WORKER = """
import os, pathlib, signal, sys, time
from rallypoint import notices
count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
os.write(1, f"up {count} {os.getppid()}\\n".encode())
def until(holds):
    deadline = time.monotonic() + 30
    while not holds():
        if time.monotonic() > deadline:
            sys.exit("what the worker waits for has not come")
        time.sleep(0.02)
"""


def lose_the_reaper(job: Job, round_: int = 0) -> None:
    """Kill the supervisor of the reaper that has started the workers of a round."""
    begun = f"up {round_} "
    lines = job.until(lambda lines: any(line.startswith(begun) for line in lines), f"round {round_} runs")
    reaper = next(int(line.split()[2]) for line in lines if line.startswith(begun))
    os.kill(parent_of(reaper), signal.SIGKILL)


def test_what_prepares_each_round_prepares_the_next_too(rallyrun: Launcher) -> None:
    script = rallyrun.script(WORKER + "count or signal.pause()")
    flags = ("--socket-ifname=auto", "--worker-env=jax", "--progress-file=step")
    job = rallyrun("--standalone", "--nproc-per-node=2", "--max-restarts=1", *flags, script)
    lose_the_reaper(job)
    assert job.ends() == 0, job.err
    assert sum(line.startswith("up 1 ") for line in job.out) == 2


def test_the_mesh_is_tried_again(rallyrun: Launcher) -> None:
    script, endpoint = rallyrun.script(WORKER + "count or signal.pause()"), f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    flags = ("--nnodes=2", "--rdzv-backend=c10d", endpoint, "--max-restarts=1", "--preflight=warn")
    jobs = [rallyrun(*flags, script) for _ in range(2)]
    lose_the_reaper(jobs[0])
    assert [job.ends() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err


def test_hangs_are_found(rallyrun: Launcher) -> None:
    script = rallyrun.script(WORKER + "notices.progress(count)\nsignal.pause()")
    flags = ("--max-restarts=1", "--hang-timeout=4", "--on-hang=fail", "--log-dir=logs")
    job = rallyrun("--standalone", *flags, script)
    lose_the_reaper(job)
    job.until(lambda lines: any(line.startswith("up 1 ") for line in lines), "the next round runs")
    job.until_err("what the workers are doing:")
    assert job.ends() == 124, job.err


READS_SLOWLY = """
import os, sys, time
from rallypoint.observe.hangs import evidence
def read_slowly(pid):
    open("asked", "w").close()
    while not os.path.exists("answer"):
        time.sleep(0.02)
    raise evidence.Unreadable("it is too late")
evidence.read_python = read_slowly
from rallypoint.cli.rallyrun import main
sys.exit(main())
"""


def written(job: Job, round_: int) -> bool:
    """Whether the evidence of a round's failure has been written."""
    return any("evidence of the failure is in" in line and f"/round-{round_}/" in line for line in job.err.split("\n"))


def test_an_incident_that_is_being_written_delays_no_round(rallyrun: Launcher) -> None:
    """The stacks of a worker of the first round are still being read when the reaper is lost in the second."""
    script = rallyrun.script(
        WORKER + "asked = pathlib.Path('asked').exists\n"
        "if (count, os.environ['RANK']) == (0, '1'): sys.exit(3)\n"
        "if not count: signal.signal(signal.SIGTERM, lambda *_: (until(asked), sys.exit(0)))\n"
        "while count < 2: time.sleep(0.02)"  # a signal right before a pause would not end it
    )
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=2", "--incident-dir=kept")
    job = rallyrun.command([sys.executable, "-c", READS_SLOWLY, *flags, script])
    lose_the_reaper(job, 1)
    job.until(lambda lines: any(line.startswith("up 2 ") for line in lines), "the third round runs")
    assert not written(job, 0), "no round has waited for it"
    (rallyrun.folder / "answer").touch()
    assert job.ends() == 0, job.err
    assert written(job, 0)
