"""Sandboxes: one sentence names the denied calls that a job needs, before anything starts; others are not needed."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

from tests import denying
from tests.jobs.launching import RALLYCTL, RALLYRUN, Job, Launcher
from tests.jobs.test_bad_input import FINE, refused
from tests.ports import free_port
from tests.processes import completed

pytestmark = pytest.mark.skipif(denying.why_not() is not None, reason=str(denying.why_not()))

FAILS = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("round", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
time.sleep(1000)
"""


def denied(rallyrun: Launcher, what: str, *args: str) -> Job:
    return rallyrun.command([*denying.denying(what), *RALLYRUN, *args, rallyrun.script(FINE)])


@pytest.mark.parametrize(("call", "error"), [("prctl", "EPERM"), ("setsid", "EPERM"), ("clone3", "EPERM")])
def test_a_call_that_is_needed_is_named(rallyrun: Launcher, call: str, error: str) -> None:
    job = denied(rallyrun, f"{call}={error}", "--standalone")
    refused(job, f"the system call {call}", "seccomp")
    assert "ulimit" not in job.err


def test_all_that_is_denied_is_named_at_once(rallyrun: Launcher) -> None:
    job = denied(rallyrun, "socketpair=ENOSYS,eventfd2=EPERM", "--standalone")
    refused(job, "the system calls eventfd2 and socketpair", "seccomp")


@pytest.mark.parametrize("call", ["prctl", "eventfd2", "clone3"])
def test_what_is_denied_is_not_to_be_tried_again(rallyrun: Launcher, call: str) -> None:
    job = denied(rallyrun, f"{call}=EPERM", "--standalone", "--exit-codes=classified")
    assert job.ends() == 2, job.err


@pytest.mark.parametrize("what", [denying.OLD_KERNEL, denying.OLD_SANDBOX, "pidfd_send_signal=EPERM"])
def test_a_job_does_without_pidfds(rallyrun: Launcher, what: str) -> None:
    words = [*denying.denying(what), *RALLYRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    job = rallyrun.command([*words, rallyrun.script(FAILS)])
    job.until(lambda lines: lines.count("round 1") == 2, "the workers run again")
    assert len(rallyrun.pids()) >= 2 + 2 + 2, "agent, supervisor, reaper, workers and their children"
    job.signal(signal.SIGTERM)
    assert job.ends() == 1, job.err
    assert rallyrun.left() == []
    assert job.err.count("processes have no pidfds here") == 1


def test_the_check_says_what_is_lost_without_pidfds(rallyrun: Launcher) -> None:
    check = rallyrun.command([*denying.denying(denying.OLD_KERNEL), *RALLYCTL, "check"])
    assert check.ends() in (1, 2), check.err
    (line,) = [line for line in check.out if " kernel: " in line]
    assert line.startswith("WARN kernel: processes have no pidfds here")
    assert "use Linux 5.3 or newer" in line


def test_an_agent_that_is_killed_leaves_nothing_without_pidfds(rallyrun: Launcher) -> None:
    words = [*denying.denying(denying.OLD_KERNEL), *RALLYRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    job = rallyrun.command([*words, rallyrun.script(FAILS)])
    job.until(lambda lines: lines.count("round 1") == 2, "the workers run again")
    pids = rallyrun.pids()
    job.signal(signal.SIGKILL)
    for pid in pids:
        rallyrun.until_gone(pid)
    assert job.ends() == -signal.SIGKILL


def test_an_event_loop_is_not_begun_without_what_it_needs(rallyrun: Launcher) -> None:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    refused(denied(rallyrun, "pipe2=EPERM", "--rdzv-backend=c10d", endpoint), "the system call pipe2")
    serve = [*denying.denying("epoll_create1=EPERM"), *RALLYCTL, "serve", "--endpoint=127.0.0.1:0"]
    refused(rallyrun.command(serve), "the system call epoll_create1")


def test_functions_need_a_file_in_memory(rallyrun: Launcher) -> None:
    refused(denied(rallyrun, "memfd_create=EPERM", "--standalone", "--run-path"), "the system call memfd_create")


def test_what_can_be_done_without_is(rallyrun: Launcher) -> None:
    calls = ("prlimit64", "memfd_create", "inotify_init1", "sched_setaffinity")
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    job = denied(
        rallyrun,
        ",".join(f"{each}=EPERM" for each in calls),
        "--rdzv-backend=c10d",
        endpoint,
        "--tee=3",
        f"--log-dir={rallyrun.folder}/logs",
    )
    assert job.ends() == 0, job.err
    assert [line.partition(":")[2] for line in job.out] == ["ran"]


def test_workers_start_without_preloading_where_they_cannot_be_forked(rallyrun: Launcher) -> None:
    job = denied(rallyrun, "memfd_create=EPERM", "--standalone", "--preload=json")
    assert job.ends() == 0, job.err
    assert "Workers will start without preloading: the system call memfd_create" in job.err


# Folders of the system, in mount namespaces


@pytest.fixture(scope="session")
def own_mounts() -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("TESTS OF MISSING FOLDERS DID NOT RUN: need root and `unshare` (Debian: util-linux)")
    done = completed(["unshare", "-m", "true"])
    if done.returncode != 0:
        pytest.skip(f"TESTS OF MISSING FOLDERS DID NOT RUN: {done.stderr}")


def within(rallyrun: Launcher, mounts: str, *args: str, ways: tuple[str, ...] = ("-m",)) -> Job:
    """Start rallyrun in namespaces of its own, after this change to what is mounted there."""
    command = [*RALLYRUN, "--standalone", *args, rallyrun.script(FINE)]
    return rallyrun.command(["unshare", *ways, "sh", "-c", f'{mounts} exec "$@"', "sh", *command])


def test_without_proc_nothing_is_started(rallyrun: Launcher, own_mounts: None) -> None:
    refused(within(rallyrun, "umount -l /proc &&"), "/proc cannot be read", "mount -t proc")


def test_the_proc_of_others_is_known_for_what_it_is(rallyrun: Launcher, own_mounts: None) -> None:
    job = within(rallyrun, "", ways=("--pid", "--fork", "--kill-child"))
    refused(job, "/proc belongs to another PID namespace", "--mount-proc")


@pytest.mark.parametrize("flags", [[], ["--run-path"], ["--run-path", "--start-method=fork"]], ids=" ".join)
def test_a_job_does_without_dev_null(rallyrun: Launcher, own_mounts: None, flags: list[str]) -> None:
    job = within(rallyrun, "mount -t tmpfs none /dev &&", *flags)
    assert job.ends() == 0, job.err
    assert job.out == ["ran"]


def test_dev_null_is_named_where_it_is_needed(rallyrun: Launcher, own_mounts: None) -> None:
    bare = "mount -t tmpfs none /dev &&"
    closed = within(rallyrun, f"{bare} exec <&- &&")
    refused(closed, "stdin is closed", "/dev/null", "mknod")


def test_no_temporary_folder_is_named(rallyrun: Launcher, own_mounts: None) -> None:
    # In place, with what is there: this checkout may be below one of them.
    closed = "mount --bind $each $each && mount -o remount,ro,bind $each"
    full = f"for each in /var/tmp /tmp /dev/shm; do {closed} || exit; done"
    job = within(rallyrun, f"{full} && cd / && mount -o remount,ro,bind / && unset TMPDIR &&", ways=("-m",))
    refused(job, "none of the temporary folders is writable", "TMPDIR")
