"""Jobs that use nothing that only Linux has, as on macOS: the kernel denies the calls, and /proc is not mounted.

What is denied answers with ENOSYS, so whatever is used all the same fails. Loops of asyncio are the exception: on Linux
they need epoll and eventfd, and on macOS they have their own; jobs with a control port are denied the rest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import denying
from tests.jobs.launching import RALLYRUN, Job, Launcher
from tests.jobs.nodes import SCRIPT, Node, all_end
from tests.jobs.test_one_node import UNTIL_KILLED, ups
from tests.ports import free_port

pytestmark = pytest.mark.skipif(denying.why_not() is not None, reason=str(denying.why_not()))

PORTABLE = {"RALLYPOINT_PLATFORM": "portable"}
PROCESSES = ("inotify_init1", "memfd_create", "pidfd_open", "pidfd_send_signal", "prctl", "sched_setaffinity")
LOOPS = ("epoll_create1", "eventfd2")
DENIED_TO_LOOPS = ",".join(f"{each}=ENOSYS" for each in PROCESSES)
SAYS_WHAT_IT_LACKS = "where Rallypoint is for development: what leaves a worker's process group"
RALLYCTL = [sys.executable, "-m", "rallypoint.cli.rallyctl"]


def can_hide_proc() -> bool:
    """Whether a command can be started that sees no /proc."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    hiding = ["unshare", "-m", "sh", "-c", "umount -l /proc"]
    return subprocess.run(hiding, capture_output=True, timeout=30, check=False).returncode == 0


@pytest.fixture(scope="session")
def hidden_proc() -> list[str]:
    """What a command line begins with for a command that sees no /proc, where root can have that."""
    return ["unshare", "-m", "sh", "-c", 'umount -l /proc && exec "$@"', "sh"] if can_hide_proc() else []


@pytest.fixture
def without(hidden_proc: list[str]) -> list[str]:
    """What a command line begins with for a command without anything of Linux's."""
    return [*hidden_proc, *denying.denying(",".join([DENIED_TO_LOOPS, *(f"{each}=ENOSYS" for each in LOOPS)]))]


def one_node(rallyrun: Launcher, without: list[str], *args: str) -> Job:
    return rallyrun.command([*without, *RALLYRUN, "--standalone", *args], PORTABLE)


def test_a_job_succeeds_and_says_what_it_lacks(rallyrun: Launcher, without: list[str]) -> None:
    script = rallyrun.script(
        "import os, sys\nos.write(1, b'out\\n')\nprint('err', file=sys.stderr)\nassert not sys.flags.isolated\n"
    )
    job = one_node(rallyrun, without, "--nproc-per-node=2", "--tee=3", f"--log-dir={rallyrun.folder}/logs", script)
    assert job.ends() == 0, job.err
    assert sorted(job.out) == ["[default0]:out", "[default1]:out"]
    assert job.err.count("[default0]:err") == job.err.count("[default1]:err") == 1
    assert job.err.count(SAYS_WHAT_IT_LACKS) == 1
    logs = sorted(Path(rallyrun.folder, "logs").rglob("stdout.log"))
    assert [each.read_text() for each in logs] == ["out\n", "out\n"]


def test_a_new_round_after_a_death_and_the_report_at_the_end(rallyrun: Launcher, without: list[str]) -> None:
    body = """
rank, again = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
if again and rank == "0":
    open("rank-0-is-up-again", "w").close()
while again and rank == "1":  # its failure ends the others, also one that has not written its line yet
    if os.path.exists("rank-0-is-up-again"):
        raise ValueError("boom")
    time.sleep(0.02)
"""
    script = rallyrun.script(UNTIL_KILLED.format(body=body))
    job = one_node(rallyrun, without, "--nproc-per-node=2", "--max-restarts=1", script)
    first = ups(job.until(lambda lines: len(ups(lines)) == 2, "two workers are up"))
    os.kill(max(first)[2], signal.SIGKILL)
    assert job.ends() == 1
    assert sorted(up[:2] for up in ups(job.out)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert "exit code -9, SIGKILL" in job.err
    report = job.err[job.err.index("FAILED\n") :]
    assert "rank      : 1 (local_rank: 1)" in report
    assert "ValueError: boom" in report


def test_a_check_of_the_node_says_it_too(rallyrun: Launcher, without: list[str]) -> None:
    job = rallyrun.command([*without, *RALLYCTL, "check"], PORTABLE)
    job.ends()
    assert job.out[0].startswith("WARN system: ")
    assert "Traceback" not in job.err


GRANDCHILDREN = """
import os, subprocess, sys, time
subprocess.Popen(["sh", "-c", "sleep 600 & exec sleep 600"])
if os.environ["RANK"] == "1":
    subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600 & sleep 600"])
os.write(1, f"up {os.environ['RANK']} 0 {os.getpid()}\\n".encode())
while not os.path.exists("fail"):
    time.sleep(0.02)
if os.environ["RANK"] == "0":
    sys.exit(3)
time.sleep(600)
"""


def with_grandchildren(rallyrun: Launcher, without: list[str]) -> Job:
    job = one_node(rallyrun, without, "--nproc-per-node=2", rallyrun.script(GRANDCHILDREN))
    job.until(lambda lines: len(ups(lines)) == 2, "two workers are up")
    return job


def reaper_of(rallyrun: Launcher, place: int) -> int:
    """The pid of the supervisor (0), or of the reaper below it (1)."""
    found = [
        pid for pid in rallyrun.pids() if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"rallypoint-reaper\0")
    ]
    return found[place]


def test_process_groups_end_with_a_failure(rallyrun: Launcher, without: list[str]) -> None:
    job = with_grandchildren(rallyrun, without)
    (rallyrun.folder / "fail").touch()
    assert job.ends() == 1, job.err
    assert rallyrun.left() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_agent_stops_all(rallyrun: Launcher, without: list[str], number: signal.Signals) -> None:
    job = with_grandchildren(rallyrun, without)
    job.signal(number)
    assert job.ends() == 1, job.err
    assert number.name in job.err
    assert rallyrun.left() == []


def test_an_agent_that_is_killed_leaves_no_process_group(rallyrun: Launcher, without: list[str]) -> None:
    job = with_grandchildren(rallyrun, without)
    pids = rallyrun.pids()
    job.signal(signal.SIGKILL)
    job.ends()
    for pid in pids:
        rallyrun.until_gone(pid)


@pytest.mark.parametrize("place", [0, 1], ids=["supervisor", "reaper"])
def test_a_reaper_that_is_killed_leaves_no_process_group(rallyrun: Launcher, without: list[str], place: int) -> None:
    job = with_grandchildren(rallyrun, without)
    os.kill(reaper_of(rallyrun, place), signal.SIGKILL)
    assert job.ends() == 1, job.err
    assert "which starts the workers and ends what they leave, is lost" in job.err
    assert rallyrun.left() == []


FUNCTIONS = """
import multiprocessing, os, sys
from rallypoint import LaunchConfig, elastic_launch

def work(text):
    if text == "fails":
        os._exit(7)
    return text + os.environ["RANK"]

if __name__ == "__main__":
    config = LaunchConfig(1, 1, 2, rdzv_backend="static", rdzv_endpoint="127.0.0.1:0", rdzv_configs={"rank": 0},
                          start_method=sys.argv[1], max_restarts=0)
    print(elastic_launch(config, work)("of "))
    try:
        elastic_launch(config, work)("fails")
    except Exception as error:
        print(type(error).__name__, "exitcode  : 7" in str(error))
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_functions(rallyrun: Launcher, hidden_proc: list[str], method: str) -> None:
    without = [*hidden_proc, *denying.denying(DENIED_TO_LOOPS)]
    job = rallyrun.command([*without, sys.executable, rallyrun.script(FUNCTIONS), method], PORTABLE)
    assert job.ends() == 0, job.err
    assert job.out == ["{0: 'of 0', 1: 'of 1'}", "ChildFailedError True"]


def test_two_agents_over_tcp_and_their_status(rallyrun: Launcher, hidden_proc: list[str]) -> None:
    without = [*hidden_proc, *denying.denying(DENIED_TO_LOOPS)]
    script = rallyrun.script(SCRIPT.replace("in NAMES", f"in {['RANK', 'WORLD_SIZE']}"))
    endpoint = f"127.0.0.1:{free_port()}"
    flags = ("--nnodes=2", "--max-restarts=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=twins")
    nodes = [
        Node(name, rallyrun.command([*without, *RALLYRUN, *flags, script], {**PORTABLE, "NODE": name}))
        for name in ("a", "b")
    ]
    for node in nodes:
        node.comes_up(1, world_size=2)
    for where in ([endpoint, "--rdzv-id=twins"], ["--rdzv-id=twins"]):
        asked = rallyrun.command([*without, *RALLYCTL, "status", "--json", *where], PORTABLE)
        assert asked.ends() == 0, asked.err
        job = json.loads("\n".join(asked.out))
        assert len(job["nodes"]) == 2, job
    assert not re.search(rf"@rallypoint/agent/{nodes[0].job.pid}\b", Path("/proc/net/unix").read_text())
    os.kill(int(nodes[1].ups[0]["pid"]), signal.SIGKILL)
    for node in nodes:
        node.comes_up(1, starts=2, world_size=2)
    (rallyrun.folder / "finish").touch()
    all_end(nodes, 0)
    left = [each.name for each in Path("/tmp").glob(f"rallypoint-{os.getuid()}/*")]  # other tests have theirs there too
    assert not [each for each in left for node in nodes if str(node.job.pid) in each.split(":")]
