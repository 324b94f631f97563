"""`rallyctl check` where it could get stuck itself: a silent name server, a dead file system, no more threads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.clusters.preflight.dialing import LOOK_UP
from rallypoint.clusters.preflight.results import CheckInputs
from rallypoint.clusters.preflight.run import NAMES, run_checks
from tests.environment import undisturbed
from tests.faults.network import Network
from tests.faults.other_user import as_other_user
from tests.jobs.launching import RALLYCTL, RALLYRUN, Launcher, launching
from tests.processes import completed
from tests.waiting import until

PORT = 29400
CHECK = [*RALLYCTL, "check"]


def check(entry: list[str], *flags: str, env: dict[str, str] | None = None) -> dict[str, tuple[str, str]]:
    """Run the command, by way of another; the status and the text of each check."""
    kept = undisturbed("http_", "https_", "HTTP", "no_proxy", "NO_PROXY")
    command = [*entry, *CHECK, "--json", *flags]
    done = completed(command, env={**kept, **(env or {})})
    assert not done.stderr, done.stderr
    told = json.loads(done.stdout)
    assert done.returncode == {"PASS": 0, "WARN": 1, "FAIL": 2}[told["status"]]
    return {each["name"]: (each["status"], f"{each['fact']}; {each['remedy']}") for each in told["checks"]}


def mounting(script: str, *arguments: str) -> list[str]:
    """What a command line begins with to run where this script has mounted something, with these as $1, $2."""
    count = len(arguments)
    return ["unshare", "--mount", "--uts", "sh", "-ec", f'{script}; shift {count}; exec "$@"', "sh", *arguments]


@pytest.fixture(autouse=True)
def possible() -> None:
    if os.geteuid() != 0:
        pytest.skip("FAULT TESTS DID NOT RUN: needs root, to make namespaces")


@pytest.fixture
def rallyrun(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as made:
        yield made


def test_a_user_who_can_start_no_thread_and_no_process_is_told_so() -> None:
    run_checks(CheckInputs())  # so that nothing is left to be imported

    def look() -> list[tuple[str, str, str]]:
        import resource

        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        return [(each.name, each.status.value, each.fact) for each in run_checks(CheckInputs())]

    found = {name: (status, fact) for name, status, fact in as_other_user(look)}
    assert tuple(found) == NAMES
    assert found["processes"] == ("FAIL", "this user can have 0 processes and threads")
    assert found["temp-space"][0] == "WARN"
    assert found["temp-space"][1].startswith("the process that checks cannot be started (")


NAMED = 'hostname node7; mount --bind "$1" /etc/hosts; mount --bind "$2" /etc/resolv.conf'


def named(folder: Path, hosts: str, resolver: str = "") -> list[str]:
    """On a machine that is called node7, with these files."""
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}\n")
    (folder / "resolv.conf").write_text(resolver)
    return mounting(NAMED, str(folder / "hosts"), str(folder / "resolv.conf"))


SILENT_DNS = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
    server.bind(("", 53))
    print("ready", flush=True)
    while True:
        server.recv(4096)
"""


def test_a_dns_server_that_never_answers_does_not_hold_up_the_others(net: Network, tmp_path: Path) -> None:
    here, there = net.hosts
    entry = [*here.entry, *named(tmp_path, "", f"nameserver {there.address}\noptions timeout:30 attempts:5\n")]
    with subprocess.Popen([*there.entry, sys.executable, "-c", SILENT_DNS], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        begun = time.monotonic()
        try:
            found = check(entry, f"--endpoint=node1.cluster:{PORT}")
        finally:
            server.kill()
    assert time.monotonic() - begun < LOOK_UP + 90, "the resolver would wait for 150 s"
    assert found["host-name"][0] == "WARN"
    assert "the lookup of node7 was not answered within 6 s" in found["host-name"][1]
    assert found["endpoint"][0] == "FAIL"
    assert "the lookup of node1.cluster was not answered" in found["endpoint"][1]
    assert found["shared-memory"][0] == check([])["shared-memory"][0]


DEAD_FILE_SYSTEM = """
import ctypes, os, sys
fuse = os.open("/dev/fuse", os.O_RDWR)
libc = ctypes.CDLL(None, use_errno=True)
options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
assert libc.mount(b"dead", sys.argv[1].encode(), b"fuse", 0, options) == 0, os.strerror(ctypes.get_errno())
os.set_inheritable(fuse, True)
os.execvp(sys.argv[2], sys.argv[2:])
"""

IN_TIME = """
import sys, time
from rallypoint.clusters.preflight.run import run_checks
from rallypoint.clusters.preflight.results import CheckInputs
for each in run_checks(CheckInputs(sys.argv[1]), 12.0):
    print(each)
"""


def test_a_dead_file_system_is_told_and_does_not_keep_the_command_from_ending(tmp_path: Path) -> None:
    """As of NFS whose server is gone: whoever asks the folder anything waits for ever."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("FAULT TEST DID NOT RUN: there is no /dev/fuse, by which a file system can be dead")
    folder = tmp_path / "dead"
    folder.mkdir()
    command = ["unshare", "--mount", sys.executable, "-c", DEAD_FILE_SYSTEM, str(folder)]
    command += [sys.executable, "-c", IN_TIME, str(folder / "logs")]
    begun = time.monotonic()
    done = completed(command)
    assert time.monotonic() - begun < 100
    assert done.returncode == 0, done.stderr
    lines = {line.split()[1].rstrip(":"): line for line in done.stdout.splitlines()}
    assert lines["log-space"].startswith("FAIL log-space: the log folder does not answer; if it is a network file")
    assert lines["temp-space"].startswith("PASS")


def test_whoever_is_held_up_by_a_dead_file_system_can_be_ended_and_leaves_nothing(rallyrun: Launcher) -> None:
    """Before anything else asks the folder."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("FAULT TEST DID NOT RUN: there is no /dev/fuse, by which a file system can be dead")
    rallyrun.script("", "train.py")
    folder = rallyrun.folder / "dead"
    folder.mkdir()
    entry = ["unshare", "--mount", sys.executable, "-c", DEAD_FILE_SYSTEM, str(folder)]
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        job = rallyrun.command([*entry, *RALLYRUN, "--preflight=require", f"--log-dir={folder}/logs", "train.py"])
        checking = until(
            lambda: [each for each in rallyrun.left() if "rallypoint.clusters.preflight.run" in each],
            "the process that checks is there",
        )
        job.signal(number)
        assert job.ends() == -number
        rallyrun.until_gone(int(checking[0].partition(":")[0]))
