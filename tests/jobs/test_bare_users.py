"""Users and machines without names, and folders without write access, as in containers.

A user id without an entry in passwd, no HOME and no USER, a host name that does not resolve, a read-only root.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from tests.jobs.launching import RALLYCTL, RALLYRUN, Job, Launcher
from tests.ports import free_port
from tests.processes import completed

NAME = "nowhere.invalid"
UID = "54321"
WORKER = """
import os
print(os.environ["MASTER_ADDR"], os.environ["RANK"], flush=True)
"""
FAILS = """
import getpass
getpass.getuser()
"""

# That user may read everything, since the interpreter may be below root's home, and write nothing of root's.
_AS_NOBODY = [
    *("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
    *("env", "-u", "USER", "-u", "LOGNAME", "-u", "HOME", "-u", "TMPDIR"),
]
_READ_ONLY = """
for each in /var/tmp /tmp; do mount --bind $each $each && mount -o remount,ro,bind $each || exit; done
cd / && mount -o remount,ro,bind / || exit
"""
_FRESH_SHARED_MEMORY = "mount -t tmpfs -o mode=1777 none /dev/shm || exit\n"


@pytest.fixture(scope="session", autouse=True)
def namespaces() -> None:
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv"))):
        pytest.skip("TESTS OF USERS WITHOUT A NAME DID NOT RUN: need root, `unshare` and `setpriv` (util-linux)")
    done = completed(["unshare", "-m", "-u", *_AS_NOBODY, "true"])
    if done.returncode != 0:
        pytest.skip(f"TESTS OF USERS WITHOUT A NAME DID NOT RUN: {done.stderr}")


def bare(rallyrun: Launcher, *command: str, mounts: str = "", jobs: str = "RALLYPOINT_JOBS_DIR=/dev/shm") -> Job:
    """Run a command as a user without a name, on a machine whose name is unknown and whose shared memory is empty."""
    shell = f'echo {NAME} > /proc/sys/kernel/hostname\n{mounts}{_FRESH_SHARED_MEMORY}exec "$@"'
    return rallyrun.command(["unshare", "-m", "-u", "sh", "-c", shell, "sh", *_AS_NOBODY, jobs, *command])


@pytest.mark.parametrize(
    "flags",
    [
        ["--preload=json", "--hang-timeout=60"],
        ["--run-path"],
        ["--worker-env=jax,tf", "--socket-ifname=lo"],
        ["--preflight=warn", "--node-check=true", "--tee=3"],
        ["--incident-dir=/dev/shm/incidents", "--flight-recorder", "--event-log-handler=jsonl:/dev/shm/events"],
    ],
    ids=" ".join,
)
def test_features_need_no_name_and_no_home(rallyrun: Launcher, flags: list[str]) -> None:
    command = [*RALLYRUN, "--standalone", "--nproc-per-node=2", *flags, rallyrun.script(WORKER)]
    job = bare(rallyrun, *command)
    assert job.ends() == 0, job.err
    assert sorted(line.split()[-1] for line in job.out) == ["0", "1"]
    assert "Traceback" not in job.err


def test_a_program_that_asks_for_the_name_is_explained(rallyrun: Launcher) -> None:
    job = bare(rallyrun, *RALLYRUN, "--standalone", "--max-restarts=0", rallyrun.script(FAILS))
    assert job.ends() == 1
    assert f"host      : {NAME}" in job.err
    assert "this user id has no name on this machine; set LOGNAME or USER to one" in job.err


def test_an_operator_without_a_name_is_a_number(rallyrun: Launcher) -> None:
    """And finds the job on this machine, and what is kept of it when it has ended."""
    run = f"{' '.join(RALLYRUN)} --standalone {rallyrun.script('import time; print(1, flush=True); time.sleep(600)')}"
    ctl = " ".join(RALLYCTL)
    # The worker's line is waited for by reading it from a pipe.
    shell = f"mkfifo out; {run} > out & read line < out; {ctl} stop script.py; wait; {ctl} status --all"
    job = bare(rallyrun, "sh", "-c", f"cd /dev/shm; {shell}")
    assert job.ends() == 0, job.err
    assert f"{UID}@{NAME} stopped the job" in job.err
    assert [line for line in job.out if "stopped" in line and f"{UID}@{NAME}" in line], (job.out, job.err)


def test_workers_reach_a_machine_whose_own_name_is_unknown(rallyrun: Launcher) -> None:
    """Its endpoint is written as a template does, with the name of the first host."""
    flags = [f"--master-addr={NAME}", f"--master-port={free_port()}", "--nproc-per-node=2"]
    job = bare(rallyrun, *RALLYRUN, *flags, rallyrun.script(WORKER))
    assert job.ends() == 0, job.err
    assert sorted(job.out) == ["127.0.0.1 0", "127.0.0.1 1"]
    assert f"workers get MASTER_ADDR=127.0.0.1: {NAME}, this machine's own name, does not resolve" in job.err


def test_two_agents_meet_at_the_unknown_name_of_their_machine(rallyrun: Launcher) -> None:
    flags = [f"--rdzv-endpoint={NAME}:{free_port()}", "--rdzv-backend=c10d", "--rdzv-id=two", "--nnodes=2"]
    script = rallyrun.script(WORKER)
    jobs = [bare(rallyrun, *RALLYRUN, *flags, script) for _ in range(2)]
    assert [job.ends() for job in jobs] == [0, 0], [job.err for job in jobs]
    assert sorted(line for job in jobs for line in job.out) == ["127.0.0.1 0", "127.0.0.1 1"]


def test_a_read_only_root_leaves_shared_memory(rallyrun: Launcher) -> None:
    """The folder of this user that /tmp has from before cannot be written to either."""
    script = rallyrun.script(WORKER)
    folder = Path(f"/tmp/rallypoint-{UID}")
    folder.mkdir(mode=0o700, exist_ok=True)
    os.chown(folder, int(UID), int(UID))
    try:
        for flag in ("--run-path", "--tee=3"):
            run = f"{' '.join(RALLYRUN)} --standalone {flag} {script} && {' '.join(RALLYCTL)} status --all"
            job = bare(rallyrun, "sh", "-c", run, mounts=_READ_ONLY, jobs="-uRALLYPOINT_JOBS_DIR")
            assert job.ends() == 0, job.err
            assert job.err.count("the workers' files go to shared memory (/dev/shm)") == 1
            assert "commands on this machine cannot find" not in job.err
            assert job.out[0].endswith("127.0.0.1 0")
            assert len([line for line in job.out if "  succeeded  " in line]) == 1, job.out
    finally:
        with suppress(OSError):  # a job of that user has left its own files there
            folder.rmdir()
