"""The wheel that `make dist` cross-compiles runs on an emulated aarch64 machine, and so does a part of the tests."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests import outcomes
from tests.aarch64.machine import Machine, UnavailableError, set_up
from tests.packaging import contents
from tests.packaging.__main__ import version
from tests.packaging.interpreters import ROOT

pytestmark = pytest.mark.timeout(0)  # each command has its own

NAME = "rallypoint-*-manylinux_*_aarch64.whl"
SMOKE = """
import json, sys
from pathlib import Path
from tests.packaging.smoke import Installed, smoke
print(json.dumps(smoke(Installed(Path("/env/bin"), Path("/tmp/scripts"), sys.argv[1], "C"))))
"""
KILLED = """
import os, signal, sys, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
os.write(1, f"rank {rank} of attempt {attempt} on {os.uname().machine}\\n".encode())
if (rank, attempt) == ("1", "0"):
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == "0":
    time.sleep(600)  # until it is stopped
"""
TESTS = {
    "the store in C and in Python, and what reads the kernel's answers": (
        "tests/unit/store",
        "tests/unit/base",
        "tests/unit/failures",
        "tests/unit/hangs/test_system_calls.py",
        "tests/unit/agent/test_local_socket.py",
    ),
    "jobs, with restarts and a killed agent": (
        "tests/jobs/test_one_node.py",
        "tests/jobs/test_many_nodes.py::test_c10d_with_two_and_one_workers_and_failures_on_either_node",
        "tests/jobs/test_many_nodes.py::test_survivors_of_a_killed_agent_regroup",
    ),
}
"""What the processor may change, in some minutes. docs/decisions/0002-dependencies.md says what this does not show."""
NOT_SHOWN = {
    "tests/unit/base/test_peer_user.py::test_a_connection_of_another_user_is_its_own": (
        "the namespace has one user: nobody can be another"
    ),
    "tests/unit/base/test_secrets.py::test_the_file_of_another_user_is_refused": (
        "the namespace has one user: no file can be another's"
    ),
    "tests/unit/workers": (
        "qemu's vfork is a fork, so posix_spawn does not report that a program is not in a folder of PATH"
    ),
}
"""Tests of these that an emulated machine cannot pass, with the reason."""
HOUR = 3600.0


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel for aarch64, by the command that makes those of a release."""
    done = subprocess.run(
        ["make", "--no-print-directory", "dist"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (ROOT / "dist").glob(NAME)
    return made


@pytest.fixture(scope="module")
def machine() -> Machine:
    try:
        return set_up()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def installed(machine: Machine, wheel: Path) -> Machine:
    machine.install(wheel)
    return machine


def test_the_wheel_has_what_it_should(wheel: Path) -> None:
    assert list(contents.faults(wheel, version(), None)) == []


def test_it_is_installed_and_runs_jobs(installed: Machine) -> None:
    done = installed.run("python", "-c", SMOKE, version())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == (
        f"{version()}, store in C, exit code 1, reported, restarted, status, secret, no torch"
    )


def test_a_killed_worker_is_started_again_with_the_others(installed: Machine) -> None:
    (installed.root / "work" / "killed.py").write_text(KILLED)
    done = installed.run("rallyrun", "--standalone", "--nproc-per-node=2", "--max-restarts=1", "killed.py")
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    seen = {f"rank {rank} of attempt {attempt} on aarch64" for rank in "01" for attempt in "01"}
    assert {"rank 1 of attempt 0 on aarch64"} <= {*done.stdout.splitlines()} <= seen
    assert {each for each in seen if "attempt 1" in each} <= {*done.stdout.splitlines()}
    assert "Signal 9 (SIGKILL)" in done.stderr


@pytest.mark.parametrize("area", TESTS)
def test_the_tests_pass_there(area: str, installed: Machine) -> None:
    without = [f"--deselect={name}" for name in NOT_SHOWN]
    how = ("-n", "2", "--dist", "worksteal", "--quick", "-m", "not (torch or etcd or root)", "--timeout=600")
    done = installed.run("python", "-m", "pytest", "-q", *how, *without, *TESTS[area], timeout=HOUR)
    print(done.stdout, *(f"not shown: {name}: {why}" for name, why in NOT_SHOWN.items()), sep="\n")
    ended = outcomes.read(installed.root / "work" / outcomes.FILE)
    assert [each.name for each in ended if each.outcome == "failed"] == []
    assert done.returncode == 0, done.stdout + done.stderr
